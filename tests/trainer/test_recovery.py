"""What a trainer that starts again takes over: rewards of the same judge, and the newest checkpoint that the ledger knows."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from scavenger.config import AlgorithmSection, RewardSection, RunConfig
from scavenger.errors import CheckpointAhead, ConfigError
from scavenger.protocol import messages
from trainer import __main__ as program
from trainer.algorithms.scoring import Scoring
from trainer.checkpoint import checkpoint
from trainer.loop.run import RunStart
from trainer.model import identity

# ---------------------------------------------------------------- rewards


class Judge:
    """Gives 2.0, and counts how often it was asked."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.asked = 0

    def score(self, prompt: str, completion: str, meta: dict[str, Any]) -> float:
        self.asked += 1
        return 2.0


def group(*recorded: tuple[float | None, str]) -> messages.GroupDone:
    one, half = messages.pack_tokens([0]), messages.pack_logprobs([-0.5])
    samples = tuple(
        messages.DoneSample(i, i, one, half, half, "length", 0, reward, reward_version=version)
        for i, (reward, version) in enumerate(recorded)
    )
    return messages.GroupDone(1, 1, 1, "train", 0, one, "{}", samples)


def scoring(judge: Judge, said: list[str]) -> Scoring:
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, "x"))
    return Scoring(judge, tokenizer, RewardSection(), AlgorithmSection(), said.append)


def test_a_recorded_reward_is_taken_from_the_same_version_alone_and_scored_again_aloud_otherwise() -> None:
    said: list[str] = []
    judge = Judge("v2")
    scored = scoring(judge, said).score(group((1.0, "v2"), (1.0, "v1"), (1.0, "v1"), (None, "")))
    assert scored.rewards == (1.0, 2.0, 2.0, 2.0)
    assert judge.asked == 3
    assert len(said) == 1, "once for each version"
    assert "scored again by 'v2'" in said[0]
    assert "'v1'" in said[0]
    assert {outcome.reward_version for outcome in scored.outcomes} == {"v2"}


def test_a_reward_of_a_release_that_noted_no_version_is_scored_again() -> None:
    said: list[str] = []
    assert scoring(Judge("v2"), said).score(group((1.0, ""), (None, ""))).rewards == (2.0, 2.0)
    assert "not noted" in said[0]


# ---------------------------------------------------------------- checkpoints


class Shards:
    """`Ranks` as far as a restore needs them: remembers what was loaded."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.tokenizer = ""

    def load(self, path: Path, updates_taken: int) -> None:
        self.loaded.append(path.name)


def config_of(folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 9, "state_dir": folder, "out_dir": folder},
            "model": {"path": folder, "context_length": 64},
            "sampling": {"max_tokens": 8},
        }
    )


def begin(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ledger_ends_at: int, resume: str = "auto", data: str = ""
) -> tuple[int, list[str]]:
    """The step that the run is opened from, and what was loaded on the way."""
    shards = Shards()

    def open_run(config: RunConfig, spec: object, start: RunStart, source: object, stack: ExitStack) -> str:
        if start.step > ledger_ends_at:
            raise CheckpointAhead(f"the ledger ends at {ledger_ends_at}", "", ledger_ends_at)
        return "run"

    monkeypatch.setattr(program, "open_run", open_run)
    with ExitStack() as stack:
        start, _ = program.begin(
            config_of(folder), cast(Any, None), cast(Any, shards), cast(Any, None), stack, resume, data
        )
    return start.step, shards.loaded


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    for step in (2, 4, 6):
        path = checkpoint.folder(tmp_path) / checkpoint.name(step)
        path.mkdir(parents=True)
        (path / checkpoint.STATE_FILE).write_bytes(
            msgspec.json.encode(checkpoint.CheckpointState(step, step, "", 0, 0, 0, "float32", 1))
        )
    return tmp_path


def test_a_trainer_goes_back_to_the_newest_checkpoint_that_a_restored_ledger_knows(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert begin(checkpoints, monkeypatch, 5) == (4, ["step-00000006", "step-00000004"])
    assert "going back to step-00000004" in capsys.readouterr().out
    assert begin(checkpoints, monkeypatch, 6) == (6, ["step-00000006"])


def test_without_such_a_checkpoint_or_with_a_chosen_one_the_trainer_ends_and_says_what_to_do(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"no checkpoint that old(.|\n)*another run.name"):
        begin(checkpoints, monkeypatch, 1)
    chosen = str(checkpoint.folder(checkpoints) / "step-00000006")
    with pytest.raises(ConfigError, match="the ledger ends at 5"):
        begin(checkpoints, monkeypatch, 5, resume=chosen)


def test_another_run_s_checkpoint_is_gone_on_from_only_where_it_was_chosen(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--set run.name=...` alone leaves run.out_dir as it is."""
    path = checkpoint.folder(checkpoints) / "step-00000006"
    state = checkpoint.read_state(path)
    own = config_of(checkpoints).run.name
    (path / checkpoint.STATE_FILE).write_bytes(msgspec.json.encode(msgspec.structs.replace(state, run=own)))
    assert begin(checkpoints, monkeypatch, 6) == (6, ["step-00000006"])
    (path / checkpoint.STATE_FILE).write_bytes(
        msgspec.json.encode(msgspec.structs.replace(state, run="first"))
    )
    with pytest.raises(ConfigError, match=r"belongs to run 'first'(.|\n)*another run.out_dir"):
        begin(checkpoints, monkeypatch, 6)
    assert begin(checkpoints, monkeypatch, 6, resume=str(path)) == (6, ["step-00000006"])


def test_a_run_whose_problems_changed_goes_on_only_from_a_checkpoint_that_was_chosen(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint.folder(checkpoints) / "step-00000006"
    state = msgspec.structs.replace(checkpoint.read_state(path), data="these", cursor=48)
    (path / checkpoint.STATE_FILE).write_bytes(msgspec.json.encode(state))
    assert begin(checkpoints, monkeypatch, 6, data="these") == (6, ["step-00000006"])
    with pytest.raises(ConfigError, match=r"data.path(.|\n)*--resume .*step-00000006"):
        begin(checkpoints, monkeypatch, 6, data="others")
    capsys.readouterr()
    assert begin(checkpoints, monkeypatch, 6, resume=str(path), data="others") == (6, ["step-00000006"])
    assert "from position 48" in capsys.readouterr().out


def test_a_run_whose_base_model_changed_goes_on_only_from_a_checkpoint_that_was_chosen(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its checkpoints would hide that the new weights are used for nothing but the reference model."""
    weights = checkpoints / "model.safetensors"
    save_file({"a": np.zeros(5000, np.float32), "b": np.zeros(1, np.float32)}, weights)
    path = checkpoint.folder(checkpoints) / "step-00000006"
    state = checkpoint.read_state(path)
    assert begin(checkpoints, monkeypatch, 6) == (6, ["step-00000006"]), "an older release noted none"
    state = msgspec.structs.replace(state, base=identity.digest(checkpoints))
    (path / checkpoint.STATE_FILE).write_bytes(msgspec.json.encode(state))
    os.utime(weights, (0, 0))
    assert begin(checkpoints, monkeypatch, 6) == (6, ["step-00000006"]), "a copy of the same model"
    save_file({"a": np.zeros(5000, np.float32), "b": np.ones(1, np.float32)}, weights)
    with pytest.raises(ConfigError, match=r"model.path(.|\n)*--resume none(.|\n)*--resume .*step-00000006"):
        begin(checkpoints, monkeypatch, 6)
    capsys.readouterr()
    assert begin(checkpoints, monkeypatch, 6, resume=str(path)) == (6, ["step-00000006"])
    assert "goes on from the checkpoint all the same" in capsys.readouterr().out


def test_a_model_s_identity_is_that_of_its_values_wherever_it_lies(tmp_path: Path) -> None:
    assert identity.digest(tmp_path) == ""
    many = {f"t{i}": np.full(2000, i, np.float32) for i in range(3)}
    save_file(many, tmp_path / "model.safetensors")
    before = identity.digest(tmp_path)
    for name in many:
        save_file(many | {name: many[name] + 1}, tmp_path / "model.safetensors")
        assert identity.digest(tmp_path) != before
    other = tmp_path / "copy"
    other.mkdir()
    save_file(many, other / "model.safetensors")
    assert identity.digest(other) == before
    (other / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="cannot be read"):
        identity.digest(other)


@pytest.mark.parametrize("resume", ["none", "step-00000002"])
def test_a_requeued_job_goes_on_from_what_its_earlier_life_wrote_whatever_it_was_told_to_begin_with(
    resume: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm starts it with the same arguments again: a run of weeks would be back at its beginning after each preemption."""
    told = resume if resume == "none" else str(checkpoint.folder(checkpoints) / resume)
    begins, last = (
        (0, []) if resume == "none" else (2, [resume]),
        checkpoint.folder(checkpoints) / "step-00000006",
    )
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert begin(checkpoints, monkeypatch, 6, told) == begins, (
        "its earlier life wrote nothing: another job's are there"
    )
    (last / checkpoint.STATE_FILE).write_bytes(
        msgspec.json.encode(msgspec.structs.replace(checkpoint.read_state(last), job=77))
    )
    assert begin(checkpoints, monkeypatch, 6, told) == (6, [last.name])
    assert f"--resume {told} was for the first start of job 77" in capsys.readouterr().out
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert begin(checkpoints, monkeypatch, 6, told) == begins, "submitted by somebody: what is told counts"
