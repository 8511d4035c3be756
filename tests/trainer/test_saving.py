"""Checkpoints that are written beside the training: when they count, and what a kill, a failure or another trainer leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from scavenger.errors import CheckpointFailed, StaleAttempt
from trainer.checkpoint import checkpoint
from trainer.checkpoint.saving import Checkpoints, Saver

ROOT = Path(__file__).resolve().parents[2]


class Ranks:
    """Writes when told to."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.written = False

    def save(self, path: Path) -> None:
        self.paths.append(path)
        self.written = False

    def is_saved(self) -> bool:
        return self.written

    def wait_saved(self) -> None:
        self.written = True


class Run:
    def __init__(self) -> None:
        self.told: list[tuple[int, bytes, Sequence[int] | None]] = []
        self.stale = False

    def checkpoint(
        self, step: int, version: int, root: bytes, path: str, kept: Sequence[int] | None = None
    ) -> None:
        if self.stale:
            raise StaleAttempt("fenced")
        assert (Path(path) / checkpoint.STATE_FILE).is_file()
        self.told.append((step, root, kept))


def state(step: int, attempt: int = 1) -> checkpoint.CheckpointState:
    return checkpoint.CheckpointState(step, step, f"{step:02x}", step, 0, step, "float32", attempt)


def steps(out: Path) -> list[int]:
    return [checkpoint.read_state(path).step for path in checkpoint.found(out)]


def test_a_checkpoint_counts_only_once_it_is_written(tmp_path: Path) -> None:
    ranks, run = Ranks(), Run()
    checkpoints = Checkpoints(tmp_path, 2, run, ranks)
    checkpoints.begin(state(2))
    checkpoints.advance()
    assert (steps(tmp_path), run.told) == ([], [])
    ranks.written = True
    checkpoints.advance()
    assert (steps(tmp_path), run.told) == ([2], [(2, b"\x02", (2,))])
    checkpoints.advance()
    assert len(run.told) == 1, "once"


def test_the_next_waits_for_the_one_before_and_the_end_for_the_last(tmp_path: Path) -> None:
    ranks, run = Ranks(), Run()
    checkpoints = Checkpoints(tmp_path, 2, run, ranks)
    for step in (2, 4, 6):
        checkpoints.begin(state(step))
    assert [step for step, *_ in run.told] == [2, 4]
    checkpoints.finish()
    assert [kept for *_, kept in run.told] == [(2,), (2, 4), (4, 6)]
    assert steps(tmp_path) == [4, 6]
    assert checkpoints.take_seconds() > 0 == checkpoints.take_seconds()


def test_a_fenced_trainer_s_checkpoint_is_set_aside(tmp_path: Path) -> None:
    """It was fenced while the checkpoint was written: what the newer trainer goes on from must not be that."""
    ranks, run = Ranks(), Run()
    checkpoints = Checkpoints(tmp_path, 2, run, ranks)
    checkpoints.begin(state(2))
    run.stale = True
    with pytest.raises(StaleAttempt):
        checkpoints.finish()
    assert steps(tmp_path) == []
    assert [path.name for path in checkpoint.abandoned(tmp_path)] == ["step-00000002.abandoned-1"]


def test_a_fenced_trainer_never_replaces_the_newer_one_s_checkpoint(tmp_path: Path) -> None:
    old, new = Checkpoints(tmp_path, 2, Run(), Ranks()), Checkpoints(tmp_path, 2, Run(), Ranks())
    old.begin(state(2, attempt=1))
    new.begin(state(2, attempt=2))
    new.finish()
    with pytest.raises(StaleAttempt, match="attempt 2; this is attempt 1"):
        old.finish()
    assert [checkpoint.read_state(path).attempt for path in checkpoint.found(tmp_path)] == [2]


def test_what_cannot_be_written_is_said_with_its_rank_and_counts_never(
    tmp_path: Path, mesh: DeviceMesh
) -> None:
    saver, run = Saver(), Run()
    values = {"model.a": torch.zeros(4)}
    ranks: Any = SimpleNamespace(
        save=lambda path: saver.begin(values, path), is_saved=saver.is_written, wait_saved=saver.wait
    )
    checkpoints = Checkpoints(tmp_path, 2, run, ranks)
    folder = checkpoint.prepare(tmp_path, 2, 1)
    (folder / "x").mkdir()
    values["model.a"] = torch.zeros(4, dtype=torch.complex128)  # a type that the format does not have
    checkpoints.begin(state(2))
    with pytest.raises(CheckpointFailed, match=r"rank 0: .*\n.*run\.out_dir"):
        checkpoints.finish()
    assert (steps(tmp_path), run.told) == ([], [])


def test_a_folder_that_cannot_be_made_is_said_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointFailed, match=r"could not be written: .*checkpoints.*\n.*run\.out_dir"):
        Checkpoints(tmp_path, 2, Run(), Ranks()).begin(state(2))


def test_a_write_sees_the_values_of_its_beginning(tmp_path: Path, mesh: DeviceMesh) -> None:
    saver, values = Saver(), {"model.a": torch.zeros(1 << 20)}
    ranks: Any = SimpleNamespace(
        save=lambda path: saver.begin(values, path), is_saved=saver.is_written, wait_saved=saver.wait
    )
    checkpoints = Checkpoints(tmp_path, 2, Run(), ranks)
    checkpoints.begin(state(1))
    values["model.a"].fill_(7.0)
    checkpoints.finish()
    learner: Any = SimpleNamespace(state_to_load=lambda: values, set_updates_taken=lambda count: None)
    checkpoint.load_shards(learner, checkpoint.found(tmp_path)[0], 1)
    assert float(values["model.a"].abs().max()) == 0.0


def lives(out: Path, count: int, seed: int) -> list[int]:
    environ = dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, str(Path(__file__).with_name("kill_program.py")), str(out), str(count), str(seed)]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [int(line) for line in done.stdout.split()]


def test_a_trainer_killed_at_any_moment_of_a_save_finds_the_last_complete_one(tmp_path: Path) -> None:
    found = lives(tmp_path, 12, seed=1)
    assert found == sorted(found), "no checkpoint that counted is lost"
    assert found[-1] > 3, "and lives made progress"
    assert 1 <= len(checkpoint.found(tmp_path)) <= 3


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_many_lives(tmp_path: Path, seed: int) -> None:
    found = lives(tmp_path, 60, seed)
    assert found == sorted(found)
