"""Bounds on the bytes a second of weight transfers: a token bucket of one process (`ByteRateLimit`), or of a node's engines (`NodePace`).

Engines share their node's network and file server with other users' jobs. The shared bucket is eight bytes in a file in memory, owned by
this user: the time, on the machine's monotonic clock, at which all bytes taken so far are paid for. Owns that file. Knows no weights.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import stat
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from scavenger.errors import WeightsError

_log = structlog.get_logger(__name__)
FOLDER = Path("/dev/shm")
#: A receiver that gets as many bytes a second is given the time that it needs, however large the version is; one that gets fewer is given
#: up. A link of 10 Mbit/s carries them.
LEAST_NBYTES_PER_S = 1e6
#: Seconds of bytes that may be taken at once after a pause.
BURST_S = 0.1
#: More debt than this cannot be ours (s): the file's content is then ignored.
MOST_DEBT_S = 60.0
#: Another process locks the file for microseconds, unless it was stopped just then. Such a process is not waited for.
LOCK_S = 0.1
SHARERS = 8
_FREE_AT = struct.Struct("<d")
_ALONE = ": this engine keeps to its pull_mb_per_s, but not together with its neighbours"


class ByteRateLimit:
    """`take` counts bytes and waits as long as the bound asks for. 0 bytes a second: no bound. Thread-safe."""

    def __init__(self, nbytes_per_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.bounded, self.nbytes_per_s = nbytes_per_s > 0, max(0.0, nbytes_per_s)
        self._rate, self._clock = nbytes_per_s, clock
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, nbytes: int, ended: threading.Event) -> None:
        """Return when these bytes are paid for, or at once when `ended` is set."""
        if self.bounded and (wait_s := self.owe(nbytes)) > 0:
            ended.wait(wait_s)

    def longest_s(self, nbytes: int) -> float:
        """Seconds that these bytes take within the bound where as many engines as nodes have GPUs pull at once; 0 without a bound."""
        return SHARERS * nbytes / self._rate if self.bounded else 0.0

    def owe(self, nbytes: int) -> float:
        """Seconds until these bytes, after all that were taken before them, are paid for."""
        with self._lock:
            return self._owe(nbytes)

    def _owe(self, nbytes: int) -> float:  # under the lock
        now = self._clock()
        self._free_at = max(self._free_at, now - BURST_S) + nbytes / self._rate
        return self._free_at - now


class NodePace(ByteRateLimit):
    """One bound for all engines of this user on this node together."""

    def __init__(
        self, nbytes_per_s: float = 0.0, folder: Path = FOLDER, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(nbytes_per_s, clock)
        self._file = _open(folder / f"scavenger-pull-{os.getuid()}") if self.bounded else None

    def _owe(
        self, nbytes: int
    ) -> float:  # a lock on the file does not keep threads of one process apart: under both
        if self._file is None:
            return super()._owe(nbytes)
        try:
            return self._owe_together(self._file, nbytes)
        except OSError as error:  # no room in memory for the file's page, say: nothing of the pull itself
            _log.warning("weights.pace_alone", reason=f"{error}{_ALONE}")
            os.close(self._file)
            self._file = None
            return super()._owe(nbytes)

    def _owe_together(self, file: int, nbytes: int) -> float:
        if not self._shut():
            return super()._owe(nbytes)
        try:
            stored = self._read()
            if stored <= self._clock() + MOST_DEBT_S:
                self._free_at = stored
            wait_s = super()._owe(nbytes)
            os.pwrite(file, _FREE_AT.pack(self._free_at), 0)
            return wait_s
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)

    def close(self) -> None:
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                os.close(file)

    def _shut(self) -> bool:
        """Whether the file is ours now."""
        assert self._file is not None
        deadline = time.monotonic() + LOCK_S
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)  # between two tries: a file lock wakes only processes that block for it

    def _read(self) -> float:
        assert self._file is not None
        data = os.pread(self._file, _FREE_AT.size, 0)
        value: float = _FREE_AT.unpack(data)[0] if len(data) == _FREE_AT.size else 0.0
        return value if math.isfinite(value) else 0.0


def _open(path: Path) -> int | None:
    """The node's file; None, and a warning, where it cannot be had: then each engine keeps the bound for itself."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        found = os.fstat(file)
        if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            os.close(file)
            raise WeightsError(f"{path} belongs to another user, or has another name too")
    except (OSError, WeightsError) as error:
        _log.warning("weights.pace_alone", reason=f"{error}{_ALONE}")
        return None
    return file
