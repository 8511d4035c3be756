"""The note that a restore is under way. Owns `<state_dir>/restoring.json`; knows no database.

A restore replaces the ledger's contents and then begins another history in them: two transactions, of which PostgreSQL's own program runs
the first. Killed in between, it leaves contents of before in the history of after, whose ids would be given out again under the same
name. So this note is on the disk before the contents are replaced and until the history has begun: a daemon that finds it begins one
itself. Too much of it is harmless (trainers are started again), too little never is.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from scavenger.errors import LedgerError
from scavenger.parsing import MALFORMED


class Note(msgspec.Struct, frozen=True):
    """`source`: the backup's name. `floor`: the newest generation of the ledger that is replaced. `at`: Unix seconds."""

    source: str
    floor: int
    at: float


def path_in(state_dir: Path) -> Path:
    return state_dir / "restoring.json"


def begin(state_dir: Path, note: Note) -> None:
    """Durable once this returns. Raises `LedgerError` where it cannot be written."""
    path = path_in(state_dir)
    partial = path.with_name(f".{path.name}.partial")
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(note))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync(state_dir)
    except OSError as error:
        raise LedgerError(
            f"{path} cannot be written: {error.strerror}", "check daemon.state_dir and its free space"
        ) from error


def find(state_dir: Path) -> Note | None:
    """The note of a restore that was not seen to its end. One that cannot be read counts all the same: it is there."""
    try:
        return msgspec.json.decode(path_in(state_dir).read_bytes(), type=Note)
    except FileNotFoundError:
        return None
    except (OSError, *MALFORMED) as error:
        return Note(f"a backup ({type(error).__name__} in {path_in(state_dir)})", 0, 0.0)


def end(path: Path) -> None:
    """Remove the note at `path`: the new history is durable, or nothing was replaced."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's bytes, or a folder's names, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
