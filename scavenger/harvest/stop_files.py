"""What the stop files said when they were last read, and what holds while one cannot be.

A file that is there and is read stops harvesting. One that cannot be read now (no descriptor is left, the disk or
its server fails, no answer) is no stop: what was last known holds for `KEEP_S`. After that a file that is known to be
there stops harvesting, whatever is in it; while not even that is known nothing more is submitted, and the engines
that run stay. A file that is there and will not be readable by waiting (its mode, a folder) stops at once: somebody
put it there.

Owns that rule and its log. Reads by the function that it is given; decides nothing about jobs.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from scavenger.harvest.limits import Stop

log = structlog.get_logger()

#: How long what was last known holds.
KEEP_S = 60.0
#: Errors of a file that is there which say nothing of the file: the next look may read it.
PASSING = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.EIO,
        errno.ESTALE,
        errno.EAGAIN,
        errno.EINTR,
        errno.ETIMEDOUT,
        errno.EREMOTEIO,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENOTCONN,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.ENODEV,
        errno.ENXIO,
    }
)


class StopFiles:
    """`read` says what a stop file (path, what it is called) orders, None where there is none, and raises OSError.

    `unread`: why one cannot be read now, "" when all can.
    """

    def __init__(
        self, read: Callable[[Path, str], Stop | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._clock = read, clock
        self._known: dict[Path, Stop | None] = {}
        self._failing: dict[Path, tuple[float, str]] = {}  # since when, and why
        self._silent_since: float | None = None
        self._asked: set[Path] = set()
        self.unread = ""

    @property
    def hold(self) -> str:
        """Why nothing may be submitted; "" = it may. Not known for `KEEP_S`, or since the start: whether somebody stopped it."""
        since = [at for at, _ in self._failing.values()]
        if self._silent_since is not None:
            since.append(self._silent_since)
        return self.unread if since and self._clock() - min(since) >= KEEP_S else ""

    def poll(self, path: Path | None, what: str) -> Stop | None:
        """What holds of one file now."""
        if path is None:
            return None
        self._asked.add(path)
        try:
            there = self._is_there(path)
            stop = self._read(path, what) if there else None
        except OSError as error:
            return self._not_read(path, what, error)
        self._known[path] = stop
        self._failing.pop(path, None)
        self._tell()
        return stop

    def answered(self) -> None:
        """All files were looked at. One that is none of them any more, after a reload, holds nothing up."""
        self._silent_since = None
        self._failing = {path: failing for path, failing in self._failing.items() if path in self._asked}
        self._asked.clear()
        self._tell()

    def no_answer(self) -> None:
        """A look takes too long: what was last known holds."""
        if self._silent_since is None:
            self._silent_since = self._clock() - (0.0 if self._known else KEEP_S)
        self._tell()

    @staticmethod
    def _is_there(path: Path) -> bool:
        """Takes no descriptor: that none is left does not hide that there is no file. Raises OSError."""
        try:
            path.stat()
        except FileNotFoundError:
            return False
        return True

    def _not_read(self, path: Path, what: str, error: OSError) -> Stop | None:
        why, there = f"{what} ({path}) cannot be read: {error.strerror}", True
        try:
            there = self._is_there(path)
        except OSError:
            there = False  # not known
        now = self._clock()
        since = self._failing.get(path, (now if path in self._known else now - KEEP_S, ""))[0]
        if there and (error.errno not in PASSING or now - since >= KEEP_S):
            self._known[path] = Stop(why)
            if error.errno not in PASSING:
                self._failing.pop(path, None)
                self._tell()
                return self._known[path]
        self._failing[path] = (since, why)
        self._tell()
        return self._known.get(path)

    def _tell(self) -> None:
        whys = [why for _, why in self._failing.values()]
        if self._silent_since is not None:
            whys.append("the stop files cannot be read: no answer")
        unread = "; ".join(whys)
        if unread and unread != self.unread:
            log.warning(
                "stop file unread",
                reason=unread,
                holds=f"what was last known, for {KEEP_S:g} s",
                remedy="see to the file system, or to the limit on open files",
            )
        elif self.unread and not unread:
            log.info("stop files are read again")
        self.unread = unread
