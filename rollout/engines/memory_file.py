"""Tensors of this process where its children can read them: a file that has no name and no place on any disk.

Owns the file and its layout. It is gone when its last user is, however that ends. Knows no torch and no engine.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from types import TracebackType

from rollout.engines.base import Weight
from scavenger.errors import EngineError

ALIGN = 64
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MemoryFile:
    """A copy of tensors. `path` opens it in any process of the same user while this object lives; nobody can change it any more."""

    def __init__(self, views: Sequence[Weight]) -> None:
        self.table: list[tuple[str, str, list[int], int, int]] = []
        offset = 0
        for view in views:
            self.table.append((view.name, view.dtype, list(view.shape), offset, view.nbytes))
            offset += -(-view.nbytes // ALIGN) * ALIGN
        self._fd = os.memfd_create("scavenger-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        try:
            os.ftruncate(self._fd, max(offset, 1))
            for view, (*_, start, _nbytes) in zip(views, self.table, strict=True):
                _write(self._fd, view.data, start)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)  # what was verified stays so, whoever opens the path to write
        except OSError as error:
            os.close(self._fd)
            raise EngineError(f"no memory for a version of {offset} bytes: {error.strerror}", "ask for more memory a job") from error

    def __enter__(self) -> MemoryFile:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        os.close(self._fd)


def _write(fd: int, data: memoryview, offset: int) -> None:
    raw = data.cast("B") if data.nbytes else data
    done = 0
    while done < raw.nbytes:
        done += os.pwrite(fd, raw[done:], offset + done)
