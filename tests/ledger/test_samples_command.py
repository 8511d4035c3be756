"""`scavenger samples`: which samples, in which order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from typer.testing import CliRunner

from scavenger.cli.main import app
from scavenger.errors import ConfigError, LedgerError
from scavenger.ledger.local_run import CONFIG, LocalLedger
from scavenger.protocol import messages
from tests.ledger.test_local_run import begun

#: Of the newest step: reward, tokens, finish.
SAMPLES = ((0.5, 3, "stop"), (1.0, 4, "length"), (-1.0, 1, "stop"), (0.25, 2, "stop"))
RUN = """
[run]
name = "try"
steps = 1
state_dir = "s"
out_dir = "out"
[model]
path = "m"
context_length = 9
[sampling]
max_tokens = 4
"""


def take(ledger: LocalLedger, step: int) -> None:
    ends = []
    for prompt in (0, 1):
        spec = messages.GroupSpec(prompt, messages.pack_tokens((3,)), 2, messages.Sampling(4), "{}")
        _, first = ledger.submitted(step, 1, spec, "train")
        for index, (reward, length, finish) in enumerate(SAMPLES[2 * prompt : 2 * prompt + 2]):
            tokens, logprobs = messages.pack_tokens((5,) * length), messages.pack_logprobs((-0.5,) * length)
            ledger.finished(
                messages.DoneSample(first + index, index, tokens, logprobs, logprobs, finish, 0), 1
            )
            ends.append(messages.SampleOutcome(first + index, "consumed", reward, 0.0))
    ledger.committed(step, 1, ends, {"reward": 0.0}, "train")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    words = {chr(97 + place): place for place in range(16)}
    Tokenizer(WordLevel(words, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    ledger = begun(tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))
    take(ledger, 1)
    take(ledger, 2)
    ledger.submitted(
        3, 1, messages.GroupSpec(0, messages.pack_tokens((3,)), 2, messages.Sampling(4), "{}"), "train"
    )
    ledger.close()
    return tmp_path / CONFIG


def shown(config: Path, *arguments: str) -> str:
    done = CliRunner().invoke(app, ["samples", *arguments, "-c", str(config)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def rewards(config: Path, *arguments: str) -> list[float]:
    return [json.loads(line)["reward"] for line in shown(config, *arguments, "--jsonl").splitlines()]


def test_without_a_step_the_newest_is_shown_and_without_a_name_the_newest_run(config: Path) -> None:
    said = shown(config, "try")
    assert said.splitlines()[0] == "run try, step 2 (the newest, 4 of 4 samples)"
    assert said.count("reward ") == 4
    assert shown(config) == said
    assert "step 1" not in shown(config, "try", "--step", "1"), (
        "as before: a step that was named is not named again"
    )


def test_of_a_run_of_agents_it_says_how_their_turns_are_read(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    spec = messages.GroupSpec(0, messages.pack_tokens((3,)), 1, messages.Sampling(4), "{}")
    ledger.submitted(1, 1, spec, "turn")
    ledger.committed(1, 1, [], {"reward": 0.0}, "train")  # a step whose samples are turns
    ledger.close()
    for words in (["try"], ["try", "--step", "1"]):
        with pytest.raises(
            LedgerError, match=r"'try' plays episodes: .* no train samples, only turns"
        ) as caught:
            shown(tmp_path / CONFIG, *words)
        assert "scavenger ledger report episodes" in caught.value.remedy


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([], [0.5, 1.0, -1.0, 0.25]),
        (["--best"], [1.0, 0.5, 0.25, -1.0]),
        (["--worst", "--limit", "2"], [-1.0, 0.25]),
        (["--sort", "length"], [-1.0, 0.25, 0.5, 1.0]),
        (["--sort=-length"], [1.0, 0.5, 0.25, -1.0]),
        (["--sort", "finish"], [1.0, 0.5, -1.0, 0.25]),
        (["--reward", ">=0.25", "--reward", "<1"], [0.5, 0.25]),
        (["--reward", "-1"], [-1.0]),
        (["--length", ">2"], [0.5, 1.0]),
        (["--finish", "length"], [1.0]),
        (["--moves", ">0"], []),
        (["--step", "1"], [0.5, 1.0, -1.0, 0.25]),
        (["--step", "0-2"], [0.5, 1.0, -1.0, 0.25] * 2),
        (["--step", "1-999999999999999999", "--reward", ">=0.5"], [0.5, 1.0, 0.5, 1.0]),
        (["--step", "1-2", "--best", "--limit", "3"], [1.0, 1.0, 0.5]),
    ],
)
def test_samples_are_sorted_and_filtered(config: Path, arguments: list[str], found: list[float]) -> None:
    assert rewards(config, "try", *arguments) == found


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--sort", "colour"], "no such key"),
        (["--reward", "great"], "is no comparison"),
        (["--reward", "1.2.3"], "is no comparison"),
        (["--step", "seven"], "is no step"),
        (["--step", "-1"], "is no step"),
        (["--step", "3-"], "is no step"),
        (["--step", "٣"], "is no step"),
        (["--step", "9" * 19], "is no step"),
        (["--step", "7-3"], "ends before it begins"),
        (["--local"], "needs the run's file"),
    ],
)
def test_what_means_nothing_is_refused(config: Path, arguments: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        shown(config, *arguments)


def test_a_sample_that_was_superseded_comes_after_all_that_were_trained(config: Path, tmp_path: Path) -> None:
    ledger = begun(tmp_path, 2, tokenizer=str(tmp_path / "tokenizer.json"))
    _, first = ledger.submitted(
        1, 1, messages.GroupSpec(0, messages.pack_tokens((3,)), 2, messages.Sampling(4), "{}"), "train"
    )
    tokens, logprobs = messages.pack_tokens((5,)), messages.pack_logprobs((-0.5,))
    for sample in (first, first + 1):
        ledger.finished(messages.DoneSample(sample, 0, tokens, logprobs, logprobs, "stop", 0), 1)
    ledger.close()  # attempt 2 ends before its step
    states = [
        json.loads(line)["state"]
        for line in shown(config, "try", "--step", "1", "--sort", "length", "--jsonl").splitlines()
    ]
    assert states == ["consumed"] * 4 + ["superseded"] * 2


def test_of_several_steps_each_group_names_its_own(config: Path) -> None:
    said = shown(config, "try", "--step", "1-2").splitlines()
    assert [line.partition("  ")[0] for line in said if not line.startswith(" ")] == [
        f"step {step}, group {group} (retry 0)" for step in (1, 2) for group in (0, 1)
    ]
    first, *_ = shown(config, "try", "--step", "1-2", "--limit", "1").splitlines()
    assert first == "run try, steps 1-2 (1 of 8 samples)"
    assert "group 0" in shown(config, "try", "--step", "3"), "a step in flight is shown where it is named"
    with pytest.raises(LedgerError, match="no train samples of steps 4-7"):
        shown(config, "try", "--step", "4-7")


def test_what_is_not_there_is_said(config: Path) -> None:
    with pytest.raises(LedgerError, match="no run called 'other'"):
        shown(config, "other")
    with pytest.raises(LedgerError, match="no eval samples yet"):
        shown(config, "try", "--purpose", "eval")
    assert "exclude one another" in shown(config, "--best", "--worst")
    assert "'eos' is not one of 'stop'" in shown(config, "try", "--finish", "eos")


def test_a_run_s_file_names_the_run_and_what_a_local_try_kept(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my"
    folder.mkdir()
    (folder / "run.toml").write_text(RUN)
    run = str(folder / "run.toml")
    assert "step 2 (the newest" in shown(config, run), "in the ledger that was named"
    with pytest.raises(ConfigError, match="make a try first: python -m trainer"):
        shown(config, run, "--local")
    (folder / "out").mkdir()
    (folder / "out" / "local").symlink_to(tmp_path)
    assert "step 2 (the newest" in shown(config, run, "--local")
    monkeypatch.chdir(folder)
    assert "step 2 (the newest" in CliRunner().invoke(app, ["samples", run]).output, (
        "there is no other ledger"
    )
