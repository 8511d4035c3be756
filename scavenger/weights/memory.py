"""Where a version's bytes lie in this process: memory that a reader on the same node can be handed, and that a later version may use again.

Owns allocation and its cost. Knows no tensor and no socket. A buffer is an anonymous file (memfd): it has no name that could outlive a
killed process, and its descriptor can be passed to a neighbour. Its pages are made in large steps ahead of use (`prepare`), because taking
them one fault at a time costs more than receiving what goes into them.
"""

from __future__ import annotations

import mmap
import os

from scavenger.errors import WeightsError

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; Python has no name for it yet
_STEP = 8 << 20


class Buffer:
    """`nbytes` of memory. `view` is writable; whoever exports it keeps the memory, whatever becomes of the buffer."""

    def __init__(self, nbytes: int) -> None:
        try:
            self.fd = os.memfd_create("scavenger-weights", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, max(nbytes, 1))
            self._map = mmap.mmap(self.fd, max(nbytes, 1))
        except OSError as error:
            raise WeightsError(f"no memory for {nbytes:,} bytes of weights: {error}", "give the engine's job more memory") from error
        self.nbytes = nbytes
        self.view = memoryview(self._map)[:nbytes]
        self._prepared = 0

    def prepare(self, upto: int) -> None:
        """Have the pages below `upto` made; a kernel that cannot do so in steps makes them as they are written."""
        while self._prepared < min(upto, self.nbytes):
            try:
                self._map.madvise(_POPULATE_WRITE, self._prepared, min(_STEP, self.nbytes - self._prepared))
            except OSError:
                self._prepared = self.nbytes
                return
            self._prepared += _STEP

    def readonly_fd(self) -> int:
        """A new descriptor of the same memory through which nobody can write."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)
