"""Data sets as researchers have them: files and folders, conversations, and what is wrong with them told before a run starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from pydantic import ValidationError

from scavenger.config import EvalSection, RewardSection, RunConfig, read_run
from scavenger.errors import ConfigError
from scavenger.protocol.messages import Sampling
from trainer.algorithms.reward_pool import refuse_missing
from trainer.algorithms.scoring import specs
from trainer.data.prompts import PromptSource, open_tokenizer, stop_tokens

TEMPLATE = (
    "{% for m in messages %}{{ {'system': '9', 'user': '1', 'assistant': '2'}[m.role] }}{{ m.content }}>{% endfor %}"
    "{% if add_generation_prompt %}{{ '0' if thinking | default(true) else '00' }}{% endif %}"
)


def config_of(
    model: Path, path: Path | None, *, problems: int = 1, held_out: Path | None = None, **data: Any
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 3, "state_dir": "s", "out_dir": "o"},
            "model": {"path": model, "context_length": 21},
            "sampling": {"max_tokens": 8},
            "data": {"task": "jsonl", "path": path, "prompts_per_step": 4} | data,
            "eval": {"prompts": problems, "path": held_out},
        }
    )


def problems_of(config: RunConfig, said: list[str] | None = None) -> PromptSource:
    return PromptSource(config, open_tokenizer(config.model.path), (said if said is not None else []).append)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def chat_folder(model_folder: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(model_folder, tmp_path / "chat")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return folder


ROWS = [{"question": f"{n:04d}>", "label": n, "level": n % 3} for n in range(9)]
COLUMNS: dict[str, Any] = {"prompt_field": "question", "answer_field": "label"}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_and_a_folder_hold_the_same_problems(model_folder: Path, tmp_path: Path, suffix: str) -> None:
    whole = write(tmp_path / f"whole.{suffix}", ROWS)
    write(tmp_path / f"parts/data/train-0.{suffix}", ROWS[:5])
    write(tmp_path / f"parts/data/train-1.{suffix}", ROWS[5:])
    one, other = (
        problems_of(config_of(model_folder, path, task=suffix, **COLUMNS))
        for path in (whole, tmp_path / "parts")
    )
    assert one.take(0, 20) == other.take(0, 20)
    named = problems_of(
        config_of(model_folder, tmp_path / f"parts/data/train-*.{suffix}", task=suffix, **COLUMNS)
    )
    assert named.take(0, 20) == one.take(0, 20)
    assert one.held_out() == other.held_out()
    assert one.digest == other.digest
    first = one.take(0, 1)[0]
    assert first.meta.keys() == {"answer", "label", "level", "row"}, "columns keep their names"
    assert first.meta["answer"] == first.meta["label"] == int(first.text[:4])
    assert one.digest == "15328ac64b31b07a070b5fe7e3f6e1fe", "as 0.2.0 made it: its runs can be resumed"


def test_rows_need_no_answer_and_every_column_keeps_its_name(model_folder: Path, tmp_path: Path) -> None:
    """What a judge or tests of code reward. A column may have any name, `row` and `mode` among them."""
    rows = [
        {"prompt": f"{n}>", "tests": [n], "row": "mine", "mode": "hard", "answer": None} for n in range(6)
    ]
    source = problems_of(config_of(model_folder, write(tmp_path / "a.jsonl", rows), problems=2))
    (first,) = source.take(0, 1)
    assert first.meta["tests"] == [int(first.text[0])]
    assert (first.meta["row"], first.meta["mode"], first.meta["answer"]) == ("mine", "hard", None)
    (spec, *_) = specs(source.held_out(), n=1, sampling=Sampling(4), mark={"mode": "greedy", "set": "x"})
    meta = json.loads(spec.meta)
    assert (meta["mode"], meta["set"]) == ("hard", "x")
    other = [row | {"row": "yours"} for row in rows]
    changed = problems_of(config_of(model_folder, write(tmp_path / "b.jsonl", other), problems=2))
    assert changed.digest != source.digest


def test_all_rows_have_an_answer_or_none_has(model_folder: Path, tmp_path: Path) -> None:
    mixed: list[dict[str, Any]] = [{"prompt": "1"}, {"prompt": "2", "answer": 2}]
    for rows, told in ((mixed, "it has 'answer' and a row before it has none"), (mixed[::-1], "it has none")):
        with pytest.raises(ConfigError, match=rf"a\.jsonl:2: .*{told}"):
            problems_of(config_of(model_folder, write(tmp_path / "a.jsonl", rows)))


@pytest.mark.parametrize("function", ["exact", "math", "regex"])
def test_a_verifier_without_a_column_to_compare_with_is_refused_before_the_start(function: str) -> None:
    reward = RewardSection(function=f"trainer.verifiers:{function}")
    with pytest.raises(ConfigError, match="compares with the column 'answer', and the rows have 'tests'"):
        refuse_missing(reward, {"row": 0, "tests": []})
    with pytest.raises(ConfigError, match="no column beside the prompt"):
        refuse_missing(reward, {"row": 0})
    refuse_missing(reward, {"answer": 1})
    refuse_missing(reward.model_copy(update={"options": {"field": "tests"}}), {"tests": []})
    refuse_missing(RewardSection(function="mine:judge"), {"row": 0})


def test_held_out_problems_may_come_from_a_file_of_their_own(model_folder: Path, tmp_path: Path) -> None:
    path, other = (
        write(tmp_path / "a.jsonl", ROWS),
        write(tmp_path / "b.jsonl", [{"question": "7>", "label": 7}, {"question": "8>", "label": 8}]),
    )
    problems = problems_of(config_of(model_folder, path, problems=2, held_out=other, **COLUMNS))
    assert sorted(problem.text for problem in problems.held_out()) == ["7>", "8>"]
    assert {problem.meta["row"] for problem in problems.take(0, 9)} == set(range(9)), (
        "every row of data.path is trained on"
    )
    with pytest.raises(ConfigError, match=r"eval\.path has 2 rows, eval\.prompts = 3"):
        problems_of(config_of(model_folder, path, problems=3, held_out=other, **COLUMNS))


def test_prompts_are_rendered_with_the_model_s_chat_template(chat_folder: Path, tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "3"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "5"},
    ]
    path = write(tmp_path / "a.jsonl", [{"prompt": "7", "answer": 0}, {"prompt": talk, "answer": 1}])

    def texts(**data: Any) -> list[str]:
        found = problems_of(config_of(chat_folder, path, problems=0, chat=True, **data)).take(0, 2)
        return [problem.text for problem in sorted(found, key=lambda one: one.meta["answer"])]

    assert texts() == ["17>0", "13>24>15>0"]
    assert texts(system="6") == ["96>17>0", "96>13>24>15>0"]
    assert texts(chat_options={"thinking": False}) == ["17>00", "13>24>15>00"]


@pytest.mark.parametrize(
    ("template", "why"),
    [("{{ messages[0].content + '>' }}", "TypeError"), ("{{ raise_exception('odd') }}", "odd")],
)
def test_a_prompt_that_the_chat_template_cannot_render_is_told_with_its_row(
    chat_folder: Path, tmp_path: Path, template: str, why: str
) -> None:
    settings = json.loads((chat_folder / "tokenizer_config.json").read_text())
    text = f"{{% if messages[0].content is none %}}{template}{{% endif %}}1>"
    (chat_folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": text}))
    path = write(
        tmp_path / "a.jsonl",
        [{"prompt": [{"role": "user", "content": content}], "answer": 1} for content in ("3", None)],
    )
    with pytest.raises(ConfigError, match=rf"a\.jsonl, row 1: the model's chat template raised .*{why}"):
        problems_of(config_of(chat_folder, path, chat=True))


def test_a_tokenizer_that_transformers_cannot_open_is_told(chat_folder: Path, tmp_path: Path) -> None:
    (chat_folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"transformers cannot open the tokenizer in .*chat"):
        problems_of(config_of(chat_folder, write(tmp_path / "a.jsonl", ROWS), chat=True, **COLUMNS))


def test_a_line_of_jsonl_ends_at_a_line_feed_alone_and_a_byte_order_mark_is_no_text(
    model_folder: Path, tmp_path: Path
) -> None:
    path, answers = tmp_path / "a.jsonl", ["a\u2028b", "a\u2029b", "a\x85b", "plain"]
    lines = [json.dumps({"prompt": "1>", "answer": answer}, ensure_ascii=False) for answer in answers]
    path.write_bytes(("\ufeff" + "\r\n".join(lines) + "\n").encode())
    assert {
        problem.meta["answer"]
        for problem in problems_of(config_of(model_folder, path, problems=0)).take(0, 4)
    } == set(answers)


def test_chat_is_refused_where_it_cannot_be(model_folder: Path, tmp_path: Path) -> None:
    talk = write(tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": "3"}], "answer": 1}])
    with pytest.raises(ConfigError, match=r"data\.chat is false"):
        problems_of(config_of(model_folder, talk))
    with pytest.raises(ConfigError, match="has no chat template"):
        problems_of(config_of(model_folder, talk, chat=True))


@pytest.mark.parametrize(
    ("rows", "data", "why"),
    [
        ([{"question": "1", "answer": 1}], {}, r"a\.jsonl:1: no 'prompt'; there is 'question', 'answer'"),
        ([{"prompt": "1", "gold": 1}], {"answer_field": "label"}, "no 'label'; there is 'prompt', 'gold'"),
        ([{"prompt": None}], {}, "no 'prompt'; there is no other column"),
        ([{"prompt": 5, "answer": 1}], {}, "neither text nor a conversation"),
        ([{"prompt": [{"content": "1"}], "answer": 1}], {}, "neither text nor a conversation"),
    ],
)
def test_a_wrong_column_is_told_with_its_row(
    model_folder: Path, tmp_path: Path, rows: Any, data: Any, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        problems_of(config_of(model_folder, write(tmp_path / "a.jsonl", rows), **data))


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ('{"prompt": "1", "answer": "\\ud800"}', r"a\.jsonl:2: .*surrogates not allowed"),
        ('{"prompt": "1\\udc80", "answer": 1}', r"a\.jsonl:2: .*surrogates not allowed"),
        ('{"prompt": "1", "answer": 1, "source": {"\\udfff": 0}}', r"a\.jsonl:2: .*surrogates not allowed"),
        ('{"prompt": "1", "answer": ' + "9" * 5000 + "}", r"a\.jsonl:2: not JSON: Exceeds the limit"),
        (
            '{"prompt": "1", "answer": ' + "[" * 100_000 + "]" * 100_000 + "}",
            r"a\.jsonl:2: not JSON: maximum recursion depth",
        ),
    ],
)
def test_a_row_that_cannot_travel_is_told_before_the_start(
    model_folder: Path, tmp_path: Path, row: str, why: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "1", "answer": 1}\n' + row + "\n")
    with pytest.raises(ConfigError, match=why):
        problems_of(config_of(model_folder, path))


def test_what_is_no_data_set_is_refused(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"holds no \*\.parquet"):
        problems_of(config_of(model_folder, tmp_path / "empty", task="parquet"))
    with pytest.raises(ConfigError, match="holds no"):
        problems_of(config_of(model_folder, tmp_path / "train-*.parquet", task="parquet"))
    with pytest.raises(ConfigError, match="give a Parquet file"):
        problems_of(config_of(model_folder, write(tmp_path / "a.jsonl", ROWS), task="parquet"))
    for row in ({"prompt": "1", "answer": 1, "image": b"x"}, {"prompt": "1", "answer": b"x"}):
        with pytest.raises(ConfigError, match=r"a\.parquet, row 0: .*metadata travels as JSON"):
            problems_of(config_of(model_folder, write(tmp_path / "a.parquet", [row]), task="parquet"))


def test_overlong_prompts_are_all_reported_before_the_start(model_folder: Path, tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", [{"prompt": "1" * (14 if n in (2, 5) else 3), "answer": n} for n in range(8)]
    )
    with pytest.raises(
        ConfigError, match=r"2 of 8 prompts do not have 1 to 13 tokens: row 2 has 14, row 5 has 14\n"
    ):
        problems_of(config_of(model_folder, path))
    said: list[str] = []
    problems = problems_of(config_of(model_folder, path, problems=0, on_overlong="drop"), said)
    assert [line.endswith("they are left out") for line in said] == [True]
    assert {problem.meta["row"] for problem in problems.take(0, 6)} == set(range(8)) - {2, 5}


def test_every_end_that_the_generation_config_names_ends_an_answer(
    model_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert stop_tokens(folder, ()) == (1, 7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": []}))
    assert stop_tokens(folder, ()) == (1,), (
        "an empty list names none: config.json is asked, and no run goes without an end"
    )


@pytest.mark.parametrize(
    "text", ['{"eos_token_id": [1, null]}', '{"eos_token_id": "</s>"}', '{"eos_token_id": -1}', "{"]
)
def test_an_end_that_is_no_token_is_told(model_folder: Path, tmp_path: Path, text: str) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "m")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json: .*\n.*sampling\.stop_token_ids"):
        stop_tokens(folder, ())
    assert stop_tokens(folder, (3,)) == (3,)


def test_the_digest_tells_other_training_problems_and_nothing_else(
    model_folder: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    digest = problems_of(config_of(model_folder, path, **COLUMNS)).digest
    held_out = write(tmp_path / "held-out.jsonl", ROWS[:4])
    apart = problems_of(config_of(model_folder, path, held_out=held_out, **COLUMNS)).digest
    assert apart != digest, "a row more to train on moves all positions"
    assert (
        apart == problems_of(config_of(model_folder, path, problems=2, held_out=held_out, **COLUMNS)).digest
    )
    assert digest != problems_of(config_of(model_folder, path, seed=1, **COLUMNS)).digest
    assert digest != problems_of(config_of(model_folder, path, problems=2, **COLUMNS)).digest
    other = [*ROWS[:-1], ROWS[-1] | {"level": 99}]
    assert (
        digest
        != problems_of(config_of(model_folder, write(tmp_path / "other.jsonl", other), **COLUMNS)).digest
    )
    asked = [*ROWS[:-1], ROWS[-1] | {"question": "9999>"}]
    assert (
        digest
        != problems_of(config_of(model_folder, write(tmp_path / "asked.jsonl", asked), **COLUMNS)).digest
    )
    assert digest != problems_of(config_of(model_folder, path, system="1", **COLUMNS)).digest


def test_the_digest_is_the_same_on_another_day_where_the_template_writes_the_date(
    chat_folder: Path, tmp_path: Path
) -> None:
    """Llama's and others' do; a run that is requeued after midnight goes on."""
    settings = json.loads((chat_folder / "tokenizer_config.json").read_text())

    def digest(template: str) -> str:
        (chat_folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
        return problems_of(
            config_of(chat_folder, write(tmp_path / "rows.jsonl", ROWS), chat=True, **COLUMNS)
        ).digest

    dated = "{{ strftime_now('%f') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert digest(dated) == digest(dated) != digest(TEMPLATE)


def test_an_evaluation_has_several_data_sets_with_names(model_folder: Path, tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", ROWS)
    hard = write(tmp_path / "hard.jsonl", [{"task": f"{n}>"} for n in range(5)])
    (tmp_path / "run.toml").write_text(
        f"""
[run]
name = "r"
steps = 1
state_dir = "s"
out_dir = "o"
[model]
path = "{model_folder}"
context_length = 21
[sampling]
max_tokens = 8
[data]
task = "jsonl"
path = "a.jsonl"
prompt_field = "question"
prompts_per_step = 2
[eval]
prompts = 2
samples = 4
[[eval.sets]]
name = "hard"
path = "hard.jsonl"
prompt_field = "task"
samples = 2
[[eval.sets]]
name = "few"
path = "a.jsonl"
prompts = 3
"""
    )
    config = read_run(tmp_path / "run.toml")
    assert [one.path for one in config.eval.sets] == [hard, train]
    sets = problems_of(config).evaluations
    assert [(one.name, one.samples, len(one.prompts)) for one in sets] == [
        ("", 4, 2),
        ("hard", 2, 5),
        ("few", 4, 3),
    ]
    assert [task.index for one in sets for task in one.prompts] == list(range(10))
    assert {task.text for task in sets[1].prompts} == {f"{n}>" for n in range(5)}
    (tmp_path / "run.toml").write_text(
        (tmp_path / "run.toml").read_text().replace("prompts = 3", "prompts = 10")
    )
    with pytest.raises(ConfigError, match=r"a\.jsonl has 9 rows, prompts = 10 wants more\n.*'few'"):
        problems_of(read_run(tmp_path / "run.toml"))


@pytest.mark.parametrize(
    ("names", "told"), [(("a", "a"), "two are named 'a'"), (("reward",), "may be named 'reward'")]
)
def test_names_of_data_sets_that_metrics_cannot_tell_apart_are_refused(
    names: tuple[str, ...], told: str
) -> None:
    with pytest.raises(ValidationError, match=told):
        EvalSection.model_validate({"sets": [{"name": name, "path": "x"} for name in names]})
