"""Host memory that a GPU writes into directly: pages of a version's memory that stay where they are (`cudaHostRegister`).

Owns what is pinned of which buffer, for as long as the buffer lives. Without it copies are as right and slower: where the system allows no
pinning (`ulimit -l`), that is told once. Knows no tensor.
Boundary: CUDA's host memory; IO.
"""

from __future__ import annotations

import functools
import mmap
import weakref
from collections.abc import Callable, Iterable

import structlog
import torch

from scavenger.weights.memory import Buffer

_log = structlog.get_logger(__name__)
Register = Callable[[int, int], str]  # address and bytes -> "" or why not


def pages(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The whole pages that hold these byte ranges, those that touch as one."""
    size = mmap.PAGESIZE
    found: list[tuple[int, int]] = []
    for start, stop in sorted(
        (start // size * size, -(-stop // size) * size) for start, stop in ranges if start < stop
    ):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


class Pins:
    """`register` and `release` are CUDA's."""

    def __init__(self, register: Register, release: Callable[[int], None]) -> None:
        self._register, self._release = register, release
        self._known: weakref.WeakSet[Buffer] = weakref.WeakSet()

    def pin(self, buffer: Buffer, address: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Pin these bytes of a buffer that lies at `address`, once; they are released when the buffer goes."""
        if buffer in self._known:
            return
        self._known.add(buffer)
        pinned: list[int] = []
        weakref.finalize(buffer, _release_all, self._release, pinned)  # before its memory is unmapped
        for start, stop in pages(ranges):
            why = self._register(address + start, stop - start)
            if why:
                _warn_unpinned(why)
                return
            pinned.append(address + start)


def _release_all(release: Callable[[int], None], pinned: list[int]) -> None:
    for address in pinned:
        release(address)


@functools.cache
def _warn_unpinned(reason: str) -> None:
    _log.warning(
        "weights.not_pinned",
        reason=reason,
        remedy="raise the limit of locked memory (ulimit -l) of the training job",
    )


def cuda_pins() -> Pins:
    """Pins by the CUDA runtime that torch has loaded."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(address: int, nbytes: int) -> str:
        result = runtime.cudaHostRegister(address, nbytes, 0)
        return "" if int(result) == 0 else f"cudaHostRegister: {result}"

    return Pins(register, lambda address: runtime.cudaHostUnregister(address))
