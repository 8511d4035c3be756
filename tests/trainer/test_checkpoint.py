"""Which checkpoints are kept, set aside and selected. Shards are not looked at here."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from scavenger.errors import ConfigError
from trainer.checkpoint import checkpoint


def write(out_dir: Path, step: int, attempt: int, keep: int = 2) -> Path:
    """A checkpoint, and the end of what it makes surplus."""
    path = complete(out_dir, step, attempt)
    checkpoint.delete(checkpoint.surplus(out_dir, path, keep).going)
    return path


def complete(out_dir: Path, step: int, attempt: int) -> Path:
    checkpoint.prepare(out_dir, step, attempt)
    return checkpoint.complete(
        out_dir, checkpoint.CheckpointState(step, step, "00", step, 0, step, "float32", attempt)
    )


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


@pytest.fixture
def rewound(tmp_path: Path) -> Path:
    """Steps 20, 40 and 60 were written, two are kept, and attempt 2 started over."""
    for step in (20, 40, 60):
        write(tmp_path, step, attempt=1)
    assert names(checkpoint.found(tmp_path)) == ["step-00000040", "step-00000060"]
    assert names(checkpoint.abandon(tmp_path, 0, None, 2)) == [
        "step-00000040.abandoned-2",
        "step-00000060.abandoned-2",
    ]
    return tmp_path


def test_a_run_that_starts_over_never_resumes_from_the_history_it_left(rewound: Path) -> None:
    assert checkpoint.select(rewound, "auto") is None
    first = write(rewound, 20, attempt=2)
    assert checkpoint.select(rewound, "auto") == first
    assert checkpoint.read_state(first).attempt == 2


def test_abandoned_checkpoints_stay_until_the_new_history_has_as_many_as_are_kept(rewound: Path) -> None:
    write(rewound, 20, attempt=2)
    assert len(checkpoint.abandoned(rewound)) == 2
    write(rewound, 40, attempt=2)
    assert checkpoint.abandoned(rewound) == []
    assert names(checkpoint.found(rewound)) == ["step-00000020", "step-00000040"]


def test_only_what_lies_after_the_start_is_set_aside(tmp_path: Path) -> None:
    written = [write(tmp_path, step, attempt=1, keep=3) for step in (20, 40, 60)]
    assert names(checkpoint.abandon(tmp_path, 40, written[1], 2)) == ["step-00000060.abandoned-2"]
    assert checkpoint.select(tmp_path, "auto") == written[1]
    assert checkpoint.abandon(tmp_path, 40, written[1], 2) == []


def test_a_start_from_elsewhere_sets_the_own_checkpoint_of_that_step_aside(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write(here, 20, attempt=1)
    assert names(checkpoint.abandon(here, 20, write(there, 20, attempt=5), 2)) == [
        "step-00000020.abandoned-2"
    ]


@pytest.mark.parametrize("keep", [1, 2])
def test_the_checkpoint_just_written_is_never_pruned(tmp_path: Path, keep: int) -> None:
    for step in (40, 60):
        write(tmp_path, step, attempt=1)
    lowest = write(tmp_path, 20, attempt=2, keep=keep)  # nothing was set aside
    assert lowest.is_dir()
    assert len(checkpoint.found(tmp_path)) == keep


def test_a_checkpoint_from_before_attempts_were_noted_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, 20, attempt=3)
    state = msgspec.json.decode((path / checkpoint.STATE_FILE).read_bytes())
    del state["attempt"]
    (path / checkpoint.STATE_FILE).write_bytes(msgspec.json.encode(state))
    assert checkpoint.read_state(path).attempt == 0
    (path / checkpoint.STATE_FILE).write_bytes(b"{}")
    with pytest.raises(ConfigError):
        checkpoint.read_state(path)


def test_what_stays_is_known_while_everything_is_still_there(tmp_path: Path) -> None:
    write(tmp_path, 20, attempt=1)
    write(tmp_path, 40, attempt=1)
    found = checkpoint.surplus(tmp_path, complete(tmp_path, 60, attempt=1), 2)
    assert found.kept == (40, 60)
    assert names(checkpoint.found(tmp_path)) == ["step-00000020", "step-00000040", "step-00000060"], (
        "nothing is deleted by asking"
    )
    checkpoint.delete(found.going)
    assert names(checkpoint.found(tmp_path)) == ["step-00000040", "step-00000060"]


def test_abandoned_checkpoints_are_not_said_to_be_kept(rewound: Path) -> None:
    assert checkpoint.surplus(rewound, complete(rewound, 20, attempt=2), 2).kept == (20,)


def test_what_a_deletion_left_when_it_was_killed_is_deleted_by_the_next(tmp_path: Path) -> None:
    half = write(tmp_path, 20, attempt=1)
    (half / "shard.safetensors").write_bytes(b"x")
    (half / checkpoint.STATE_FILE).unlink()
    assert checkpoint.surplus(tmp_path, complete(tmp_path, 40, attempt=1), 2) == ((40,), (half,))
    write(tmp_path, 60, attempt=1)
    assert not half.exists()


def test_a_damaged_state_keeps_no_run_from_going_on_from_another_checkpoint(tmp_path: Path) -> None:
    written = [write(tmp_path, step, attempt=1, keep=3) for step in (20, 40, 60)]
    (written[1] / checkpoint.STATE_FILE).write_text("{")
    with pytest.raises(ConfigError, match=r"step-00000040 is not a complete checkpoint(.|\n)*--resume none"):
        checkpoint.read_state(written[1])
    assert checkpoint.newest(tmp_path, 59) == written[1]
    assert checkpoint.steps(tmp_path) == [20, 40, 60]
    assert checkpoint.surplus(tmp_path, write(tmp_path, 80, attempt=1, keep=3), 3).kept == (40, 60, 80)
    assert names(checkpoint.abandon(tmp_path, 20, None, 2)) == [
        f"step-000000{step}.abandoned-2" for step in (40, 60, 80)
    ]
