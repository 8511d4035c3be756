"""What bodies ask for and what is refused; names and keys; texts, stops and tool calls. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from scavenger.gateway import dialects, identity
from scavenger.gateway.dialects import BadRequest, ChatStream, Piece, TextSoFar, ToolCall
from scavenger.protocol.messages import Sampling

SAID = [{"role": "user", "content": "hi"}]


def chat(**more: Any) -> dialects.ChatRequest:
    return dialects.parse_chat({"messages": SAID} | more, 128)


def test_a_generate_body_as_renderers_sends_it() -> None:
    body = {
        "model": "m",
        "token_ids": [1, 2],
        "sampling_params": {
            "stop_token_ids": [9],
            "logprobs": 1,
            "skip_special_tokens": False,
            "temperature": 0.5,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": None,
        },
        "cache_salt": "s",
        "priority": 0,
    }
    request, prompt = dialects.parse_generate(body, 128)
    assert prompt == (1, 2)
    assert request.logprobs
    assert request.sampling(2, 64, (0,)) == Sampling(62, 0.5, 1.0, 0, (9, 0), 0, ())


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": []},
        {"token_ids": [128]},
        {"token_ids": [-1]},
        {"token_ids": [1.0]},
        {"token_ids": [True]},
        {"features": {"mm_hashes": {}}},
        {"output_mode": "text"},
        {"priority": 1},
        {"stream": "yes"},
        {"sampling_params": {"n": 0}},
        {"sampling_params": {"n": 65}},
        {"sampling_params": {"n": True}},
        {"sampling_params": {"temperature": -1}},
        {"sampling_params": {"temperature": float("nan")}},
        {"sampling_params": {"temperature": 2.1}},
        {"model": "m" * 1025},
        {"request_id": "r" * 257},
        {"sampling_params": {"temperature": 10**400}},
        {"sampling_params": {"max_tokens": 10**5000}},
        {"sampling_params": {"top_p": 2}},
        {"sampling_params": {"top_p": 0}},
        {"sampling_params": {"max_tokens": 0}},
        {"sampling_params": {"logprobs": 5}},
        {"sampling_params": {"prompt_logprobs": 1}},
        {"sampling_params": {"presence_penalty": 0.1}},
        {"sampling_params": {"logit_bias": {"1": 5}}},
        {"sampling_params": {"stop": [""]}},
        {"sampling_params": {"stop": ["x" * 300]}},
        {"sampling_params": {"stop_token_ids": list(range(600))}},
        {"sampling_params": {"structured_outputs": {"regex": "a"}}},
        {"sampling_params": []},
        {"anything": 1},
    ],
)
def test_what_engines_here_cannot_do_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        dialects.parse_generate({"token_ids": [1], "sampling_params": {}} | change, 128)
    last = next(iter(change.values()))
    names = list(last) if isinstance(last, dict) and last and "mm_hashes" not in last else list(change)
    assert any(name.removesuffix("_id") in refused.value.message for name in names)


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []},
        {"messages": SAID * 4097},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        {"tools": [{}]},
        {"tools": [{"function": {}}], "tool_choice": "required"},
        {"top_logprobs": 5},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_a_conversation_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        chat(**change)


def test_a_conversation_as_templates_take_it() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    made = chat(
        messages=[
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    )
    assert made.messages[0]["content"] == "a\nb"
    assert made.messages[1]["content"] == ""
    assert made.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert chat(max_tokens=7, max_completion_tokens=5).turn.max_tokens == 5
    assert chat().turn.max_tokens == 0


@pytest.mark.parametrize(
    ("text", "whole", "expected"),
    [
        ("abcSTOPd", False, "abc"),
        ("abcST", False, "abc"),
        ("abcST", True, "abcST"),
        ("abcX", False, "abcX"),
        ("aEND", True, "a"),
        ("", False, ""),
    ],
)
def test_nothing_is_shown_that_may_begin_a_stop_text(text: str, whole: bool, expected: str) -> None:
    assert dialects.shown(text, ("STOP", "END"), whole=whole) == expected


def test_tool_calls_are_read_and_what_is_none_stays_text() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert dialects.split_tool_calls(f"so\n{call}{call}") == ("so", [ToolCall("f", '{"a": 1}')] * 2)
    for broken in ("<tool_call>{}</tool_call>", "<tool_call>x</tool_call>", "a<tool_call>{", "plain\n"):
        assert dialects.split_tool_calls(broken) == (broken, [])


DEEP = '{"name": "f", "arguments": ' + "[" * 100_000


@pytest.mark.parametrize(
    "inside",
    [
        DEEP,
        '{"name": "f", "arguments": NaN}',
        '{"name": "f", "arguments": 1%s}' % ("0" * 400),
        '{"name": "f", "arguments": 1e400}',
    ],
)
def test_what_json_cannot_hold_is_no_tool_call(inside: str) -> None:
    text = f"<tool_call>{inside}</tool_call>"
    assert dialects.split_tool_calls(text) == (text, [])
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": inside}}
    with pytest.raises(BadRequest, match="arguments"):
        chat(messages=[{"role": "assistant", "tool_calls": [call]}])


def test_half_a_surrogate_pair_can_be_sent() -> None:
    _, [call] = dialects.split_tool_calls(
        '<tool_call>{"name": "a\\ud800b", "arguments": "\\ude00"}</tool_call>'
    )
    assert call == ToolCall("a?b", "?")
    assert dialects.loads('"\\ud83d\\ude00"') == "\U0001f600", "both halves are a character"
    assert dialects.event({"a": "\ud800"}) == b'data: {"a":"?"}\n\n'


def _streamed(request: dialects.ChatRequest, text: str, size: int) -> dict[str, Any]:
    """The message that a client puts together from a stream of `text`, a token a character, so many at a time."""
    stream = ChatStream("id-0123456789", request, [1], 0, lambda t: "".join(map(chr, t)), chr)
    tokens = [ord(c) for c in text]
    found: dict[str, Any] = {"content": "", "tool_calls": [], "finish": None}
    for at in range(0, len(tokens), size):
        part: Sequence[int] = tokens[at : at + size]
        finish = "stop" if at + size >= len(tokens) else ""
        for event in stream.events(Piece(0, part, [-1.0] * len(part), at, 1, finish)):
            [choice] = json.loads(event.removeprefix(b"data: "))["choices"]
            found["content"] += choice["delta"].get("content") or ""
            found["tool_calls"] += choice["delta"].get("tool_calls", [])
            found["finish"] = choice["finish_reason"] or found["finish"]
    return found


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    "text",
    [
        "plain text",
        'so\n<tool_call>{"name": "f"}</tool_call>',
        "a <tool_call> b",
        '\n\nOK<tool_call>{"name": "f"}</tool_call>Waiting.',
        '\n<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "f"}</tool_call>\n',
        "\na\n\nb\n",
        "cut STOP here",
        "almost STO",
    ],
)
def test_a_stream_adds_up_to_the_whole_answer(text: str, size: int) -> None:
    request = chat(tools=[{"type": "function", "function": {"name": "f"}}], stop="STOP", stream=True)
    shown = dialects.shown(text, request.turn.stop, whole=True)
    piece = Piece(0, [ord(c) for c in text], [-1.0] * len(text), 0, 1, "stop")
    reply = dialects.chat_reply("id-0123456789", request, [piece], [shown], [1], 1, 0, chr)
    [choice] = reply["choices"]
    found = _streamed(request, text, size)
    assert found["content"] == (choice["message"]["content"] or "")
    assert [call["function"] for call in found["tool_calls"]] == [
        call["function"] for call in choice["message"].get("tool_calls", [])
    ]
    assert [call["id"] for call in found["tool_calls"]] == [
        call["id"] for call in choice["message"].get("tool_calls", [])
    ]
    assert found["finish"] == choice["finish_reason"]


def test_the_same_request_has_one_name_however_it_is_shown() -> None:
    body = {"messages": SAID, "n": 2}
    same = [body | {"stream": True}, {"n": 2, "messages": SAID, "user": "u", "stop": None}, body]
    assert len({identity.content_of("chat", one) for one in same}) == 1
    others = [body | {"seed": 1}, body | {"n": 3}, {"messages": [*SAID, *SAID], "n": 2}]
    contents = [identity.content_of("chat", one) for one in (body, *others)]
    assert len({*contents, identity.content_of("generate", body)}) == 5
    named = identity.request_of("e", "name", contents[0])
    assert named == identity.request_of("e", "name", contents[1]), "a name is the name, whatever it asks for"
    assert (
        len({named, identity.request_of("f", "name", contents[0]), identity.request_of("e", "", contents[0])})
        == 3
    )


def test_a_key_is_of_one_episode_and_of_one_secret() -> None:
    mine, theirs = b"a" * 32, b"b" * 32
    for name in ("e", "task-17.part_2"):
        key = identity.episode_key(mine, name)
        assert identity.episode_of(mine, key) == name
        assert identity.episode_of(theirs, key) == ""
        assert identity.episode_of(mine, key[:-1]) == ""
        assert identity.episode_of(mine, key.replace("ep.", "ap.", 1)) == ""
        assert not identity.is_admin(mine, key)
    assert identity.episode_of(mine, identity.admin_key(mine)) == ""
    assert identity.is_admin(mine, identity.admin_key(mine))
    assert not identity.is_admin(theirs, identity.admin_key(mine))


def test_a_long_stream_is_decoded_a_few_times_and_not_again_with_each_token() -> None:
    decoded = [0]

    def text_of(tokens: Sequence[int]) -> str:
        decoded[0] += len(tokens)
        return bytes(tokens).decode("utf-8", "replace")

    text = "aé漢\N{GRINNING FACE} " * 400
    tokens = list(text.encode())
    said, shown_so_far = TextSoFar(text_of), ""
    for at in range(0, len(tokens), 3):
        so_far = said.add(tokens[at : at + 3]).rstrip("\ufffd")
        assert text.startswith(so_far)
        assert so_far.startswith(shown_so_far)
        shown_so_far = so_far
    assert shown_so_far == said.whole() == text
    assert decoded[0] < 12 * len(tokens)


def test_bytes_that_are_no_text_do_not_make_a_stream_quadratic() -> None:
    decoded = [0]

    def text_of(tokens: Sequence[int]) -> str:
        decoded[0] += len(tokens)
        return bytes(tokens).decode("utf-8", "replace")

    said = TextSoFar(text_of)
    for _ in range(4000):
        said.add([0xFF])
    assert said.whole() == "\ufffd" * 4000
    assert decoded[0] < 4000 * 3 * (TextSoFar.MOST_OPEN + 2)
