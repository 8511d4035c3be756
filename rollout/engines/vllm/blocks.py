"""Which KV blocks of an engine's requests may be given out, and the memory in which blocks come and go.

    a request begins                `begins`     vLLM's connector is told where the blocks that it brings lie, and where it leaves its own
    it has its first token          `were_read`  the memory of what it brought is given back
    it has a token                  `wrote`      the blocks of all its tokens but the last one may be asked for
    its entries may be no numbers   `spoiled`    none of its blocks is given out any more
    the whole cache was zeroed      `wiped`      nor any of all that run: they are computed again, in other blocks
    it has its last token           `finished`   what it was to leave is left (`leaving`), but for one that was spoiled or wiped
    its task has ended              `ended`

A request gives its blocks out while it runs if its text is known here: that is what `spoiled` and `wiped` take.

Boundary: memory that leaves this process or comes from another one; the engine knows tokens alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Any

from rollout.engines.base import Kv
from rollout.engines.vllm import setup
from rollout.engines.vllm.core import Core
from rollout.engines.vllm.leaving import LeavingKv
from scavenger.errors import EngineError
from scavenger.protocol.worker.events import Request


class KvBlocks:
    """Of one engine, by its requests' handles. Owns the memory's descriptors."""

    def __init__(self, core: Core) -> None:
        self.layout = ""  # of blocks, in which two engines must agree; "": none moves
        self.token_nbytes = 0
        self.block_tokens = 0
        self.leaving = LeavingKv()
        self.texts: dict[int, list[int]] = {}  # of requests that run, where their blocks may be asked for
        self.brought: dict[int, int] = {}  # descriptors of the memory with the blocks that requests brought
        self._core = core
        self._letting_go: set[asyncio.Task[None]] = set()  # of such memory, whose requests were aborted

    async def ask_shape(self) -> None:
        """Of vLLM's process, whose requests move their blocks from now on."""
        ((self.layout, self.token_nbytes, self.block_tokens),) = await self._core.rpc("scavenger_kv_shape")

    def whole(self, tokens: int) -> int:
        """How many of so many tokens fill blocks."""
        return tokens // self.block_tokens * self.block_tokens if self.block_tokens else 0

    def begins(self, request: Request, brings: Kv | None, *, leaves: bool) -> dict[str, Any]:
        """What vLLM's connector is told of a request; {}: nothing. `leaves`: whether it may leave its blocks when it is finished."""
        handle, parameters = request.handle, dict[str, Any]()
        try:
            if self.block_tokens:
                self.texts[handle] = [*request.prompt, *request.accepted]
                if leaves and request.leaves_kv:
                    parameters |= self.leaving.ask(handle)
            if brings is not None:
                self.brought[handle] = fd = _memory(brings.data.nbytes, brings.data)
                parameters |= {"path": _path(fd), "tokens": len(brings.tokens)}
        except OSError:  # no memory, or no descriptor: no request has what there is of them
            self.texts.pop(handle, None)
            self.leaving.drop((handle,))
            raise
        return parameters

    def were_read(self, handle: int) -> None:
        """What it brought is in vLLM's cache, or was computed: the memory is opened once."""
        if (fd := self.brought.pop(handle, None)) is not None:
            os.close(fd)

    def wrote(self, handle: int, token_ids: Sequence[int]) -> None:
        if handle in self.texts:
            self.texts[handle] += token_ids

    def spoiled(self, handle: int) -> None:
        self.texts.pop(handle, None)

    def wiped(self) -> None:
        self.texts.clear()

    def finished(self, handle: int) -> None:
        self.leaving.finished(handle, self.texts.get(handle, ()))

    def ended(self, handle: int, *, aborted: bool) -> None:
        self.texts.pop(handle, None)
        if not aborted:
            self.were_read(handle)
        elif (fd := self.brought.pop(handle, None)) is not None:
            letting_go = asyncio.create_task(self._let_go(fd))
            self._letting_go.add(letting_go)
            letting_go.add_done_callback(self._letting_go.discard)

    async def take(self, handle: int, name: str | None, tokens: int) -> Kv | None:
        """The entries of its first tokens, as many of these as fill blocks. `name`: of the request in vLLM; None: it does not run.

        Returns None where they may not be given out, or are not there.
        """
        count, known = self.whole(tokens), self.texts.get(handle)
        if self.leaving.has(handle):
            return await self.leaving.take(handle, count, count * self.token_nbytes, self._between_passes)
        if name is None or known is None or not 0 < count <= len(known):
            return None
        fd = _memory(nbytes := count * self.token_nbytes)
        try:
            (taken,) = await self._core.rpc("scavenger_take_kv", name, count, _path(fd))
            # A mapping keeps the memory when its descriptor is closed.
            return Kv(tuple(known[:count]), memoryview(mmap.mmap(fd, nbytes))) if taken else None
        finally:
            os.close(fd)

    def drop(self, handles: Iterable[int]) -> None:
        """Requests that leave nothing."""
        self.leaving.drop(handles)

    def drop_left(self) -> None:
        """What finished ones left, and what those that run were to leave."""
        self.leaving.drop_all()

    async def settled(self) -> None:
        """Once no request that was aborted reads what it brought."""
        await asyncio.gather(*self._letting_go, return_exceptions=True)

    async def _let_go(self, fd: int) -> None:
        """Of an aborted request, which vLLM may have scheduled and not begun. A call is answered behind the abort, and then nothing opens
        the memory any more: closed before, its path would name nothing, or another request's blocks."""
        try:
            with contextlib.suppress(EngineError):  # it died: whoever reads next hears of that
                await self._between_passes()
        finally:
            os.close(fd)

    async def _between_passes(self) -> None:
        """Once vLLM's process is between two passes."""
        await self._core.rpc("scavenger_kv_shape")


def _path(fd: int) -> str:
    return f"/proc/{os.getpid()}/fd/{fd}"


def _memory(nbytes: int, data: memoryview | None = None) -> int:
    """A descriptor of so much memory, which begins with this. Raises `OSError` where there is not so much."""
    fd = os.memfd_create("scavenger-kv", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        if data is not None:
            setup.write_at(fd, data, 0)
    except OSError:
        os.close(fd)
        raise
    return fd
