"""Before a job is submitted: a model, tokenizer, data or reward that would stop the run is refused with cause and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scavenger.errors import ConfigError
from scavenger.weights import files
from tests.trainer.prepare.hand import NO_GPU, RAISES, ROOT, change, edit, refused
from trainer.prepare import __main__ as program
from trainer.prepare import check
from trainer.prepare.check import RequestedGpus


def test_a_wrong_model_path_is_refused_and_what_needs_it_is_skipped(run: Path, own_model: Path) -> None:
    change(run, f'path = "{own_model}"', 'path = "/nowhere/qwen"')
    findings = {finding.what: finding for finding in check.check(run, RequestedGpus(1, 1, 80.0))}
    assert "there is no folder /nowhere/qwen" in findings["model"].problem
    assert "remedy: give the folder of a Hugging Face model" in findings["model"].problem
    assert {what for what, finding in findings.items() if finding.skipped} == {
        "tokenizer",
        "data and prompts",
        "reward",
        "adapters",
        "ranks",
        "engine",
        "memory of the GPUs",
        "weights",
    }
    assert not findings["daemon and keys"].problem


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _shard_lost(folder: Path) -> None:
    edit(folder / "model.safetensors.index.json", weight_map={"a": "model-00001-of-00002.safetensors"})


def _pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def _own_code(folder: Path) -> None:
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "x.Y"})


def _other_config(folder: Path) -> None:
    edit(folder / "config.json", hidden_size=48)


def _more_layers(folder: Path) -> None:
    edit(folder / "config.json", num_hidden_layers=3)


def _strange(folder: Path) -> None:
    edit(folder / "config.json", model_type="nothing-known")


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (_no_config, "holds no config.json"),
        (_shard_lost, "lacks model-00001-of-00002.safetensors"),
        (_pointer, "is no safetensors file"),
        (_own_code, "brings its own code"),
        (
            _other_config,
            "are of two models: model.embed_tokens.weight has the shape (16, 32) there, not (16, 48)",
        ),
        (_more_layers, "is not in the weight files"),
        (_strange, "config.json cannot be used"),
    ],
)
def test_a_folder_that_is_no_whole_model_is_refused(
    run: Path, own_model: Path, spoil: Any, cause: str
) -> None:
    spoil(own_model)
    assert cause in refused(run)["model"]
    assert "remedy: " in refused(run)["model"]


def _many_tokens(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)} | {"<eos>": 100}, unk_token="w0")).save(
        str(folder / "tokenizer.json")
    )


def _broken(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (_many_tokens, "the tokenizer does not match the model"),
        (_broken, "tokenizer.json"),
        (
            lambda folder: edit(folder / "generation_config.json", eos_token_id=15),
            "token 15 is to end a completion",
        ),
        (
            lambda folder: edit(folder / "generation_config.json", eos_token_id=4),
            "the tokenizer ends texts with '<eos>' (token 1)",
        ),
    ],
)
def test_a_tokenizer_of_another_model_is_refused(run: Path, own_model: Path, spoil: Any, cause: str) -> None:
    spoil(own_model)
    found = refused(run)["tokenizer"]
    assert cause in found
    assert "remedy: " in found


def test_a_tokenizer_that_is_too_large_for_every_engine_is_refused_where_it_would_go_there(
    run: Path, own_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_TOKENIZER_NBYTES", 100)
    assert not [one for one in check.check(run, NO_GPU) if one.what == "tokenizer" and one.problem]
    change(run, "[sampling]", '[sampling]\nstop = ["1"]')
    assert "with sampling.stop it goes to every engine, and may have 1 to 100" in refused(run)["tokenizer"]


def test_a_missing_column_is_named_with_those_that_are_there(run: Path) -> None:
    change(run, 'answer_field = "answer"', 'answer_field = "solution"')
    found = refused(run)["data and prompts"]
    assert "no 'solution'; there is 'question', 'answer', 'level'" in found
    assert "remedy: set data.answer_field" in found


def test_overlong_prompts_are_told_with_their_rows(run: Path, data: Path) -> None:
    with data.open("a") as file:
        file.write(json.dumps({"question": "1" * 50, "answer": "1"}) + "\n")
    found = refused(run)["data and prompts"]
    assert "1 of 41 prompts do not have 1 to 32 tokens: row 40 has 50" in found
    assert 'data.on_overlong = "drop"' in found
    change(run, 'on_overlong = "stop"', 'on_overlong = "drop"')
    (said,) = [finding.note for finding in check.check(run, NO_GPU) if finding.what == "data and prompts"]
    assert "they are left out" in said


NAN = 'def f(prompt, completion, meta):\n    return float("nan")\n'
SAME = "def f(prompt, completion, meta):\n    return 1.0\n"


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        (RAISES, "KeyError"),
        (NAN, "nan"),
        ("import nothing_there\n", "reward.function"),
        ("g = 1\n", "reward.function"),
    ],
)
def test_a_reward_function_that_cannot_work_is_refused(
    run: Path, source: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_reward(run, source, tmp_path, monkeypatch)
    assert cause in refused(run)["reward"]


def test_a_reward_beside_run_toml_is_found_by_the_check_too_and_rows_need_no_answers(
    run: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (run.parent / "beside.py").write_text(
        "def f(prompt, completion, meta):\n    return float(len(completion))\n"
    )
    change(run, '"trainer.verifiers:math"', '"beside:f"')
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    data.write_text("".join(json.dumps({"question": row["question"]}) + "\n" for row in rows))
    text = run.read_text()
    run.write_text(
        "\n".join(line for line in text.splitlines() if not line.startswith("answer_field")) + "\n"
    )
    found = {finding.what: finding for finding in check.check(run, NO_GPU)}
    assert found["reward"].problem == ""
    assert found["reward"].note == "rows have no answers; empty and wrong completions get 0 to 2"


def test_what_is_laid_over_the_file_is_checked_as_it_will_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["check", str(run.parent), "--set", "algorithm.name=gspo", "--set=run.steps=7"]) == 0
    said = capsys.readouterr().out
    assert "ok       algorithm: gspo" in said
    assert ", 7 steps of" in said
    assert program.main(["check", str(run.parent), "--set", "algorithm.nam=gspo"]) == ConfigError.exit_code
    assert "--set: unknown key 'algorithm.nam': did you mean algorithm.name?" in capsys.readouterr().out


def use_reward(run: Path, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_rewards.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    change(run, '"trainer.verifiers:math"', '"their_rewards:f"')


def test_a_reward_that_cannot_tell_answers_apart_is_pointed_at(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_reward(run, SAME, tmp_path, monkeypatch)
    (said,) = [finding for finding in check.check(run, NO_GPU) if finding.what == "reward"]
    assert not said.problem
    assert "LOOK" in said.note


def test_a_reward_function_sees_the_prompt_as_it_will_in_the_run(
    run: Path, own_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_model / "chat_template.jinja").write_text("<eos>{{ messages[-1].content }}<eos>")
    change(run, "chat = false", "chat = true")
    source = "def f(prompt, completion, meta):\n    assert prompt and '<eos>' not in prompt\n    return len(completion)\n"
    use_reward(run, source, tmp_path, monkeypatch)
    assert "reward" not in refused(run)
