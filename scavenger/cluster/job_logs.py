"""Bounds what engines' jobs write to `<state_dir>/logs`: an engine that complains for ever must not fill the shared file system.

Boundary: files that jobs write; IO.

Owns which logs go and which are cut. A job's log stays while its job may still write; the oldest of ended jobs go first. One that is too
large loses its middle: Slurm appends to it, so it can be cut under the job, and its last words are kept. `plan` is pure.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import structlog

from scavenger.asyncio_helpers import within
from scavenger.errors import ClusterError

log = structlog.get_logger()

CHECK_INTERVAL_S = 60.0
#: Of one log that is cut, so much of its end is kept.
TAIL_BYTES = 64 * 1024
#: The share of all logs that one of them may take.
ONE_SHARE = 8
#: What others than the worker write to its log when it fails.
_OF_SLURM = ("srun: ", "slurmstepd: ", "rollout job: ", "remedy: ", "  remedy: ")
_OF_WORKER = "rollout: "


@dataclass(frozen=True, slots=True)
class LogFile:
    name: str
    nbytes: int
    written_at: float


@dataclass(frozen=True, slots=True)
class LogBounds:
    """Names of the logs that lose their middle, and of those that go."""

    cut: tuple[str, ...]
    remove: tuple[str, ...]


def plan(files: Iterable[LogFile], live: Collection[str], most_bytes: int) -> LogBounds:
    """`live`: names of the logs of jobs that may still write. Cuts first; then ended jobs' logs go, the oldest first, until it fits."""
    most_one = max(2 * TAIL_BYTES, most_bytes // ONE_SHARE)
    ordered = sorted(files, key=lambda one: (one.written_at, one.name))
    cut = tuple(one.name for one in ordered if one.nbytes > most_one)
    sizes = {one.name: TAIL_BYTES if one.name in cut else one.nbytes for one in ordered}
    total, remove = sum(sizes.values()), []
    for one in ordered:
        if total <= most_bytes:
            break
        if one.name not in live:
            total -= sizes[one.name]
            remove.append(one.name)
    return LogBounds(tuple(name for name in cut if name not in remove), tuple(remove))


def bound(folder: Path, live: Collection[str], most_bytes: int) -> LogBounds:
    """Look at the folder and do what `plan` says; returns what was done of it. A log that cannot be touched is logged and left. Raises
    `OSError` for the folder itself."""
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".log") and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # its job ended without a word meanwhile
                    seen = entry.stat(follow_symlinks=False)
                    files.append(LogFile(entry.name, seen.st_size, seen.st_mtime))
    wanted = plan(files, live, most_bytes)
    made = LogBounds(
        tuple(name for name in wanted.cut if _touched(folder / name, _cut)),
        tuple(name for name in wanted.remove if _touched(folder / name, Path.unlink)),
    )
    if made.cut or made.remove:
        log.info("job logs bounded", cut=len(made.cut), removed=len(made.remove), most_bytes=most_bytes)
    return made


def last_words(path: Path, most: int = 300) -> str:
    """`words_of` the log; "" where the job left none. Raises `OSError`."""
    return words_of(end_of(path), most)


def end_of(path: Path) -> bytes:
    """The last `TAIL_BYTES` of a log; b"" where there is none. Raises `OSError`."""
    try:
        with _open(path, os.O_RDONLY) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read()
    except FileNotFoundError:
        return b""


def words_of(end: bytes, most: int = 300) -> str:
    """What the job said last, on one line, best its worker's own word. Pure."""
    lines = end.decode("utf-8", "replace").splitlines()
    said = [line.strip() for line in lines if line.strip() and not line.startswith(_OF_SLURM)]
    own = [line.removeprefix(_OF_WORKER) for line in said if line.startswith(_OF_WORKER)]
    return "".join(c if c.isprintable() else "?" for c in (own or said or [""])[-1])[:most]


def _touched(path: Path, act: Callable[[Path], None]) -> bool:
    """Whether it was done. One log never keeps the others from theirs."""
    try:
        act(path)
    except FileNotFoundError:  # another process was faster
        return False
    except OSError as error:
        log.warning("job log not bounded", path=str(path), reason=str(error))
        return False
    return True


def _cut(path: Path) -> None:
    """What the job writes between the reading and the cut is lost; it is a log."""
    with _open(path, os.O_RDWR) as file:
        file.seek(-TAIL_BYTES, os.SEEK_END)
        tail = file.read(TAIL_BYTES)
        file.truncate(0)
    with _open(path, os.O_WRONLY | os.O_APPEND) as file:
        file.write(
            b"[scavenger: this log was too large; its beginning was cut off]\n" + tail.partition(b"\n")[2]
        )


def _open(path: Path, how: int) -> IO[bytes]:
    """A job may put anything where its log was: no link is followed, and no writer of a pipe is waited for. Raises `OSError`."""
    descriptor = os.open(path, how | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, {os.O_RDONLY: "rb", os.O_RDWR: "r+b"}.get(how, "ab"))


async def watch(
    bound: Callable[[Collection[str]], object],
    live: Callable[[], Collection[str]],
    stop: asyncio.Event,
    check_interval_s: float = CHECK_INTERVAL_S,
    call: Callable[..., Awaitable[object]] = asyncio.to_thread,
) -> None:
    """Keep the bound until `stop`: `bound` is called with the names of jobs that may still write, in a thread by `call`. A fault ends
    nothing."""
    while not stop.is_set():
        try:
            await call(bound, frozenset(live()))
        except FileNotFoundError as error:
            log.debug("no job has written a log yet", folder=error.filename)
        except (OSError, ClusterError) as error:
            log.warning("job logs not bounded; tried again", reason=str(error))
        await within(stop, check_interval_s)
