"""The memory of a version's bytes in this process. A reader on the same node can be given it, and a later version may use it again.

Owns allocation and its cost. Knows no tensor and no socket. A buffer is an anonymous file (memfd): it has no name that could outlive a
killed process, and its descriptor can be passed to a neighbour. Its pages are made in large steps ahead of use (`prepare`), because taking
them one fault at a time costs more than receiving what goes into them.
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os

import structlog

from scavenger.errors import WeightsError

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; Python has no name for it yet
_STEP = 8 << 20
_SEAL_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, Linux 5.1; likewise
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_log = structlog.get_logger(__name__)


def _seal(fd: int) -> None:
    """From here on only the mapping that there is writes, and the size stays: a neighbour could open what it was handed again, to write.

    What a kernel without the seal leaves open is told once.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | _SEAL_FUTURE_WRITE)
    except OSError as error:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        _warn_unsealed(str(error))


@functools.cache
def _warn_unsealed(reason: str) -> None:
    _log.warning(
        "weights.memory_writable",
        reason=f"a process of this user on this node could write it: {reason}",
        remedy="Linux 5.1",
    )


class Buffer:
    """`nbytes` of memory. A `view` keeps the memory alive, whatever becomes of the buffer."""

    def __init__(self, nbytes: int) -> None:
        try:
            self.fd = os.memfd_create("scavenger-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, max(nbytes, 1))
            self._map = mmap.mmap(self.fd, max(nbytes, 1))
            _seal(self.fd)
        except OSError as error:
            raise WeightsError(
                f"no memory for {nbytes:,} bytes of weights: {error}", "give the engine's job more memory"
            ) from error
        self.nbytes = nbytes
        self._prepared = 0

    @property
    def view(self) -> memoryview:
        """The whole buffer, writable."""
        return memoryview(self._map)[: self.nbytes]

    def idle(self) -> bool:
        """Whether no view of it, or of a part of it, exists in this process: the interpreter counts them."""
        try:
            self._map.resize(
                max(self.nbytes, 1)
            )  # to the size that it has: refused while it is looked at, else nothing
        except BufferError:
            return False
        return True

    def prepare(self, upto: int) -> None:
        """Have the pages below `upto` made; a kernel that cannot do so in steps makes them as they are written."""
        while self._prepared < min(upto, self.nbytes):
            try:
                os.posix_fallocate(self.fd, self._prepared, min(_STEP, self.nbytes - self._prepared))
                self._map.madvise(_POPULATE_WRITE, self._prepared, min(_STEP, self.nbytes - self._prepared))
            except OSError:
                self._prepared = self.nbytes
                return
            self._prepared += _STEP

    def readonly_fd(self) -> int:
        """A new read-only descriptor of the same memory."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class MemoryPool:
    """Memory of versions that are over, for the next one of the same size. It is written again only when no view of it is left."""

    def __init__(self, most: int = 2) -> None:
        self._unused: list[Buffer] = []
        self._most = most

    def take(self, nbytes: int) -> Buffer:
        self._unused = [buffer for buffer in self._unused if buffer.nbytes == nbytes]
        for buffer in self._unused:
            if buffer.idle():
                self._unused.remove(buffer)
                return buffer
        return Buffer(nbytes)

    def put_back(self, buffer: Buffer) -> None:
        """Return a buffer that the caller needs no more. Others may still read it."""
        self._unused = [*self._unused, buffer][-self._most :]
