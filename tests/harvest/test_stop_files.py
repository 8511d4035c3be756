"""A stop file that cannot be read now is no stop; one that is there and is read is."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scavenger.config import DaemonConfig, DaemonSection, HarvestSection
from scavenger.harvest.limits import KEEP_S, Stop, StopFiles, StopState


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Nothing can be opened: as in a process whose connections took all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Reads:
    """Reads a stop file, or fails as it was told to."""

    def __init__(self) -> None:
        self.fails = 0

    def __call__(self, path: Path, what: str) -> Stop | None:
        if self.fails:
            raise OSError(self.fails, os.strerror(self.fails))
        return Stop(path.read_text())


def test_without_a_descriptor_a_file_that_is_not_there_stops_nobody_and_one_that_was_read_still_does(
    tmp_path: Path,
) -> None:
    path = tmp_path / "stop"
    settings = DaemonConfig(daemon=DaemonSection(state_dir=tmp_path), harvest=HarvestSection(stop_file=path))
    stop_state, prepared = StopState(lambda: settings), tmp_path / "prepared"
    prepared.touch()
    stop_state.poll()
    with no_descriptors():
        stop_state.poll()
        assert stop_state.stop_read is None
        assert stop_state.files.unread == "", "that there is no file is known without one"
        os.link(prepared, path)
        stop_state.poll()
        assert stop_state.stop_read is None, "not read yet, and read a moment later"
        assert "Too many open files" in stop_state.files.unread
    stop_state.poll()
    assert stop_state.stop_read == Stop("the stop file")
    assert stop_state.files.unread == ""
    with no_descriptors():
        stop_state.poll()
        assert stop_state.stop_read == Stop("the stop file"), "what was last known holds"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE])
def test_a_failure_that_passes_keeps_what_was_known_for_a_bounded_time(tmp_path: Path, number: int) -> None:
    path, now, read = tmp_path / "stop", [0.0], Reads()
    files = StopFiles(read, lambda: now[0])
    assert files.poll(path, "the stop file") is None
    path.write_text("maintenance")
    read.fails = number
    assert files.poll(path, "the stop file") is None
    assert os.strerror(number) in files.unread
    assert not files.paused
    now[0] = KEEP_S
    held = files.poll(path, "the stop file")
    assert held is not None, "it is there, whatever is in it"
    assert os.strerror(number) in held.reason
    read.fails = 0
    assert files.poll(path, "the stop file") == Stop("maintenance")
    path.unlink()
    assert files.poll(path, "the stop file") is None
    assert not files.unread


def test_while_it_is_not_known_whether_there_is_a_file_engines_stay_and_in_the_end_none_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now = tmp_path / "stop", [0.0]
    files = StopFiles(Reads(), lambda: now[0])
    assert files.poll(path, "the stop file") is None

    def fails(self: Path, **_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(Path, "stat", fails)
        for second in (0.0, KEEP_S - 1.0):
            now[0] = second
            assert files.poll(path, "the stop file") is None
            assert not files.paused
        now[0] = KEEP_S
        assert files.poll(path, "the stop file") is None, "no stop by itself"
        assert "Input/output error" in files.paused
        fresh = StopFiles(Reads(), lambda: now[0])
        assert fresh.poll(path, "the stop file") is None
        assert fresh.paused, "a daemon that starts never knew"
    assert files.poll(path, "the stop file") is None
    assert not files.paused


def test_a_file_that_is_named_no_more_holds_nothing_up(tmp_path: Path) -> None:
    now, read = [0.0], Reads()
    files = StopFiles(read, lambda: now[0])
    (tmp_path / "old").touch()
    read.fails = errno.EIO
    files.poll(tmp_path / "old", "the stop file")
    files.answered()
    assert files.paused
    files.poll(tmp_path / "new", "the stop file")
    files.answered()
    assert not files.paused
