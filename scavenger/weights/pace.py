"""How fast the engines of one node fetch weights together: a token bucket that their processes share.

Their jobs run beside others' on a node whose network and file server are others' too. The bucket is eight bytes in a file of this user in
memory: the moment, on the machine's own clock, at which what was taken is paid for. Owns that file. Knows nothing of what is fetched.
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
#: What may be taken at once after a rest.
BURST_S = 0.1
#: More debt than this nobody has made: the file's content is no time of ours.
MOST_DEBT_S = 60.0
#: Another process has the file for microseconds, unless it was stopped just there: nobody waits for that one.
LOCK_S = 0.1
_FREE_AT = struct.Struct("<d")


class NodePace:
    """`take` what came, and wait as long as that costs. 0 bytes a second: no bound."""

    def __init__(self, nbytes_per_s: float = 0.0, folder: Path = FOLDER, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = nbytes_per_s, clock
        self._lock = threading.Lock()  # a lock on the file does not keep threads of one process apart
        self._alone_at = 0.0  # where the file is not to be had
        self._file = _open(folder / f"scavenger-pull-{os.getuid()}") if nbytes_per_s > 0 else None

    def take(self, nbytes: int, ended: threading.Event) -> None:
        """Return when these bytes are paid for, or at once when `ended` is set."""
        if self._rate > 0 and (wait_s := self.owe(nbytes)) > 0:
            ended.wait(wait_s)

    def owe(self, nbytes: int) -> float:
        """Seconds until these bytes, after all that were taken before them on this node, are paid for."""
        with self._lock:
            locked = self._file is not None and self._shut()
            try:
                before = self._read() if locked else self._alone_at
                now = self._clock()
                free_at = max(before if before <= now + MOST_DEBT_S else now, now - BURST_S) + nbytes / self._rate
                self._alone_at = free_at
                if locked and self._file is not None:
                    os.pwrite(self._file, _FREE_AT.pack(free_at), 0)
            finally:
                if locked and self._file is not None:
                    fcntl.flock(self._file, fcntl.LOCK_UN)
        return free_at - now

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
            time.sleep(0.001)

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
        if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
            os.close(file)
            raise WeightsError(f"{path} is somebody else's")
    except (OSError, WeightsError) as error:
        _log.warning("weights.pace_alone", reason=f"{error}: this engine keeps to its pull_mb_per_s, but not together with its neighbours")
        return None
    return file
