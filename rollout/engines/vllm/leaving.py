"""The KV blocks that finished requests leave for those behind them: a memory file each, which vLLM's process fills.

    the request begins      `ask`       an empty file; vLLM's connector is told its path
    it has its last token   `finished`  vLLM holds its blocks until the connector has copied them there, in the next pass, and sealed it
    its worker takes them   `take`      waits for the seal; the memory is the taker's from then on
    it is aborted, or its
    entries are no good     `drop`      closed; the connector finds another file at the path, or none, and writes nothing

A file of which nothing was copied is sealed empty. Knows tokens and sizes, and nothing of what is in the file.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.engines.base import Kv

#: `take` waits for so many answers at most. Where vLLM's process could not open the file it seals none, and the worker's next order to its
#: engine waits behind the take.
MOST_ANSWERS = 200


@dataclass(slots=True)
class _Left:
    fd: int
    text: tuple[int, ...] = ()  # prompt and completion; empty: it runs


class LeavingKv:
    """Of one engine's requests, by handle. Owns the files' descriptors."""

    def __init__(self) -> None:
        self._files: dict[int, _Left] = {}

    def ask(self, handle: int) -> dict[str, Any]:
        """What vLLM's connector is told of a request that begins."""
        fd = os.memfd_create("scavenger-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._files[handle] = _Left(fd)
        return {"leave_path": f"/proc/{os.getpid()}/fd/{fd}", "leave_inode": os.fstat(fd).st_ino}

    def finished(self, handle: int, text: Sequence[int]) -> None:
        """A request has its last token. Of one whose text is not known any more nothing is left."""
        if not text:
            self.drop((handle,))
        elif handle in self._files:
            self._files[handle].text = tuple(text)

    def has(self, handle: int) -> bool:
        """Whether it is finished and was not taken."""
        return bool((found := self._files.get(handle)) and found.text)

    async def take(
        self, handle: int, tokens: int, nbytes: int, answer: Callable[[], Awaitable[object]]
    ) -> Kv | None:
        """Of a finished request's first tokens, `nbytes` in all; None where it left others. `answer` calls vLLM's process, which answers
        between two passes: the one that copies is the next, or the next but one."""
        found, answers = self._files[handle], 0
        while tokens and answers < MOST_ANSWERS and not _is_sealed(found.fd):
            await answer()
            answers += 1
            if self._files.get(handle) is not found:
                return None  # dropped meanwhile
        del self._files[handle]
        try:
            if not tokens or not _is_sealed(found.fd) or os.fstat(found.fd).st_size != nbytes:
                return None
            return Kv(found.text[:tokens], memoryview(mmap.mmap(found.fd, nbytes)))
        finally:
            os.close(found.fd)  # a mapping keeps the memory

    def drop(self, handles: Iterable[int]) -> None:
        for handle in handles:
            if (found := self._files.pop(handle, None)) is not None:
                os.close(found.fd)

    def drop_all(self) -> None:
        self.drop(list(self._files))


def seal(fd: int) -> None:
    """Nothing more comes into the file: its length is what it is."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)


def _is_sealed(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS))
