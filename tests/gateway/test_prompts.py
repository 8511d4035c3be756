"""Templates as transformers renders them, and the tokens that conversations keep."""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scavenger.errors import AuthError, ConfigError
from scavenger.gateway import dialects
from scavenger.gateway.dialects import BadRequest, ToolCall
from scavenger.gateway.prompts import Conversations, ModelFolder
from tests.gateway.conftest import PAIR, write_model

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {"é": ["<", 1]}}}]
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def chat(messages: list[dict[str, Any]], **more: Any) -> dialects.ChatRequest:
    return dialects.parse_chat({"messages": messages} | more, 128)


def test_a_prompt_is_what_transformers_renders(tmp_path: Path, model: ModelFolder) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "a~"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "1"},
    ]
    request = chat(said, tools=TOOLS)
    rendered = theirs.apply_chat_template(
        list(request.messages), tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    assert model.render(request) == rendered
    assert model.tokens(rendered) == theirs.encode(rendered, add_special_tokens=False)


def test_a_template_has_what_those_of_models_use(tmp_path: Path) -> None:
    template = (
        "{{ eos_token }}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}{{ extra }}{{ strftime_now('%Y')|length }}"
    )
    model = ModelFolder(write_model(tmp_path / "m", template), ())
    said: list[dict[str, Any]] = [{"role": "user", "content": text} for text in "abc"]
    assert model.render(chat(said, chat_template_kwargs={"extra": "!"})) == "<e>ab!4"


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no') }}", "{{ messages[0].__class__.__mro__ }}", "{{ messages.append(1) }}"],
)
def test_a_template_that_refuses_or_reaches_out_is_the_caller_s_error(tmp_path: Path, template: str) -> None:
    model = ModelFolder(write_model(tmp_path / "m", template), ())
    try:
        shown = model.render(chat([{"role": "user", "content": "a"}]))
    except BadRequest:
        return
    assert "class" not in shown


def test_a_folder_without_a_template_serves_tokens_only(tmp_path: Path) -> None:
    model = ModelFolder(write_model(tmp_path / "m", ""), ())
    with pytest.raises(BadRequest, match="no chat template"):
        model.render(chat([{"role": "user", "content": "a"}]))
    (tmp_path / "m/config.json").write_text(json.dumps({"vocab_size": 128}))
    with pytest.raises(ConfigError, match="eos_token_id"):
        ModelFolder(tmp_path / "m", ())
    assert ModelFolder(tmp_path / "m", (3,)).ends == (3,)
    (tmp_path / "m/tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        ModelFolder(tmp_path / "m", ())


def test_a_conversation_keeps_the_tokens_of_its_answers(model: ModelFolder) -> None:
    kept = Conversations(model)
    first = chat([{"role": "user", "content": "a"}], tools=TOOLS)
    prompt, pair = kept.prompt("e", first), model.tokenizer.token_to_id(PAIR)
    assert pair is not None
    kept.answered("e", first, prompt, PAIR, [], [pair])
    more: list[dict[str, Any]] = [
        {"role": "assistant", "content": PAIR, "refusal": None},
        {"role": "user", "content": "b"},
    ]
    second = chat([{"role": "user", "content": "a", "name": "ann"}, *more])
    assert pair not in kept.prompt("e", second), "other tools: the prompt was another one"
    second = chat([{"role": "user", "content": "a", "name": "ann"}, *more], tools=TOOLS)
    tokens, text = kept.prompt("e", second), model.render(second)
    assert pair in tokens
    assert pair not in model.tokens(text)
    assert model.text(tokens, skip_special_tokens=False) == text
    assert kept.prompt("f", second) == model.tokens(text), "of another episode"


def test_a_conversation_goes_on_after_a_tool_call(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m['content'] }}{% for c in m.get('tool_calls', []) %}({{ c['function']['name'] }})"
        "{% endfor %}{% endfor %}"
    )
    model = ModelFolder(write_model(tmp_path / "m", template), ())
    kept = Conversations(model)
    first = chat([{"role": "user", "content": "a"}], tools=TOOLS)
    prompt, answer = kept.prompt("e", first), model.tokens("(f)")
    kept.answered("e", first, prompt, "", [ToolCall("f", '{"a": 1}')], answer)
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    more = chat([*said, {"role": "tool", "tool_call_id": "c", "content": "42"}], tools=TOOLS)
    assert kept.prompt("e", more) == [*prompt, *answer, *model.tokens("42")]
    assert (kept.continued, kept.rendered) == (1, 1)


def test_kept_tokens_are_bounded_and_the_longest_unused_go_first(model: ModelFolder) -> None:
    kept = Conversations(model, most_bytes=4 * 100)
    asked = [chat([{"role": "user", "content": text}]) for text in "abc"]
    for request in asked:
        kept.answered("e", request, list(range(40)), "x", [], [1])
    assert kept.nbytes == 4 * 82
    kept.answered("e", asked[2], list(range(40)), "x", [], [1])
    assert kept.nbytes == 4 * 82, "the same once"


def test_an_episode_that_floods_forgets_its_own_conversations(model: ModelFolder) -> None:
    kept = Conversations(model, most_bytes=4 * 1000)
    calm = chat([{"role": "user", "content": "calm"}])
    kept.answered("calm", calm, model.tokens(model.render(calm)), "x", [], model.tokens("x"))
    for number in range(60):
        flood = chat([{"role": "user", "content": str(number)}])
        kept.answered("flood", flood, list(range(99)), "x", [], [1])
    assert 4 * 800 < kept.nbytes <= 4 * 1000
    more = chat(
        [
            {"role": "user", "content": "calm"},
            {"role": "assistant", "content": "x"},
            {"role": "user", "content": "b"},
        ]
    )
    kept.prompt("calm", more)
    assert (kept.continued, kept.rendered) == (1, 0)
    kept.forget("flood")
    kept.forget("flood")
    assert kept.nbytes < 4 * 100
    kept.forget("calm")
    assert kept.nbytes == 0


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("starlette", reason="the extra `gateway`")
    from scavenger.gateway.app import secret_of

    made = secret_of(tmp_path)
    assert secret_of(tmp_path) == made
    assert [path.name for path in tmp_path.iterdir()] == ["gateway.secret"]
    (tmp_path / "gateway.secret").chmod(0o640)
    with pytest.raises(AuthError):
        secret_of(tmp_path)


def test_each_message_is_hashed_once(model: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [{"role": "assistant", "content": "a"}] * 2000
    encoded: list[int] = []
    monkeypatch.setattr(
        "scavenger.gateway.prompts._encoded", lambda value: (encoded.append(1), b"%d" % len(encoded))[1]
    )
    Conversations(model).prompt("e", chat(said))
    assert len(encoded) == 2001


def test_others_run_while_a_long_text_is_tokenised(model: ModelFolder) -> None:
    text = "ab" * 500_000
    for work in (lambda: model.tokens(text), lambda: model.text(array("i", [5]) * 1_000_000)):
        rounds, over = 0, threading.Event()

        def done(work: Callable[[], object] = work, over: threading.Event = over) -> None:
            work()
            over.set()

        working = threading.Thread(target=done)
        working.start()
        while not over.wait(0.001):
            rounds += 1
        working.join()
        assert rounds > 10, "this thread was stopped meanwhile"
