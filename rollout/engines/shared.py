r"""One engine, several runs: the run whose engine it is lends slots, and each run has an `Engine` of its own around the common batch.

    LenderEngine    --load, add--> lane 0 \                                   / its own deltas, by its own handles
                                           > SharesBatch, one batch <next()--
    BorrowerEngine  --load, add--> lane n /                                  \ its own deltas, by its own handles

Owns which run gets which delta: each request has a number of its own in the engine, and a delta goes to the run part that made that number.
One task waits for the engine; it asks for tokens only while a run does. A run that does not fetch its tokens holds up no other: what waits
is bounded by its slots. Whatever one borrower does (a version that does not fit, an engine that is closed) ends that one alone; what ends
the engine ends all. Knows no socket and no daemon.

Boundary: between one engine and the workers of several runs in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol, TypeGuard

import structlog

from rollout.engines.around import Around
from rollout.engines.base import Engine, EngineInfo, SharesBatch, Weight
from scavenger.errors import EngineError, describe
from scavenger.protocol.worker.events import NOT_SPECULATED, Delta, HearSiblings, Request, Speculated

_log = structlog.get_logger(__name__)
_OVER = "the slots that were lent are taken back"
_BASE = "the run whose engine this is holds another base now"


class SharedEngine(Engine, SharesBatch, Protocol):
    """What can be shared."""


def can_share(engine: Engine) -> TypeGuard[SharedEngine]:
    return isinstance(engine, SharesBatch)


@dataclass(slots=True)
class _RunPart:
    """What of the common batch is one run's."""

    lane: int
    ready: list[Delta]
    fresh: asyncio.Event
    live: dict[int, int]  # its handle -> the engine's number
    fault: EngineError | None = None
    loaded: bool = False  # of a borrower: its weights were put in place

    async def next(self) -> list[Delta]:
        while True:
            if self.fault is not None:
                raise self.fault
            if self.ready:
                ready, self.ready = self.ready, []
                return ready
            self.fresh.clear()
            await self.fresh.wait()

    def fail(self, error: EngineError) -> None:
        self.fault = self.fault or error
        self.fresh.set()


class SharedBatch:
    """The common batch. `lender` is the engine of the run whose engine it is; `borrow` gives another run's."""

    def __init__(self, engine: SharedEngine) -> None:
        self.engine = engine
        self._numbers = count()
        self._lanes = count(1)
        self._of: dict[
            int, tuple[_RunPart, int]
        ] = {}  # the engine's number -> whose it is, and its handle there
        self._parts: dict[int, _RunPart] = {}
        self._asking = 0  # runs that wait for tokens
        self._asked = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self.recalled = False  # all of it is about to be closed or forgotten
        self.lender = LenderEngine(self, self.new_part(0))

    def new_part(self, lane: int | None = None) -> _RunPart:
        part = _RunPart(next(self._lanes) if lane is None else lane, [], asyncio.Event(), {})
        self._parts[part.lane] = part
        return part

    def borrow(self, slots: int) -> BorrowerEngine:
        return BorrowerEngine(self, self.new_part(), slots)

    def number(self, part: _RunPart, request: Request) -> Request:
        """The request as the engine knows it."""
        number = next(self._numbers)
        part.live[request.handle] = number
        self._of[number] = part, request.handle
        return replace(request, handle=number)

    def unknown(self, part: _RunPart, handle: int) -> None:
        """The engine did not take it, or it is over."""
        if (number := part.live.pop(handle, None)) is not None:
            self._of.pop(number, None)

    async def abort(self, part: _RunPart, handles: Iterable[int]) -> None:
        gone = set(handles)
        numbers = [part.live[handle] for handle in gone if handle in part.live]
        for handle in gone:
            self.unknown(part, handle)
        part.ready = [delta for delta in part.ready if delta.handle not in gone]
        await self.engine.abort(numbers)

    def abandon(self, part: _RunPart) -> None:
        """All of its requests are over: the engine drops them by itself."""
        for handle in list(part.live):
            self.unknown(part, handle)
        part.ready.clear()

    async def next(self, part: _RunPart) -> list[Delta]:
        self._asking += 1
        self._asked.set()
        if self._pump is None:
            self._pump = asyncio.create_task(self._deliver())
            self._pump.add_done_callback(self._ended)
        try:
            return await part.next()
        finally:
            self._asking -= 1
            if not self._asking:
                self._asked.clear()

    async def _deliver(self) -> None:
        while True:
            await self._asked.wait()
            for delta in await self.engine.next():
                self._give(delta)

    def _ended(self, pump: asyncio.Task[None]) -> None:
        error = None if pump.cancelled() else pump.exception()
        if error is None:
            return
        if not isinstance(error, EngineError):  # a bug, ours or a library's: it keeps its traceback
            _log.error("engine.failed", exc_info=error)
            error = EngineError(f"the engine failed: {describe(error)}", quoted=str(error))
        self.fail(error)

    def _give(self, delta: Delta) -> None:
        if (whose := self._of.get(delta.handle)) is None:
            return
        part, handle = whose
        if delta.finish or delta.error:
            self.unknown(part, handle)
        part.ready.append(replace(delta, handle=handle))
        part.fresh.set()

    def fail(self, error: EngineError) -> None:
        """The engine died: all of its runs are told."""
        for part in self._parts.values():
            part.fail(error)

    def drop_lost(self) -> None:
        """The lender's load may have dropped borrowers' weights."""
        kept = self.engine.borrowers()
        for lane, part in self._parts.items():
            if part.loaded and lane not in kept:
                self.abandon(part)
                part.fail(EngineError(_BASE))

    async def end(self, part: _RunPart) -> None:
        """The loan is over: nothing of it stays in the engine."""
        if self._parts.pop(part.lane, None) is None:
            return
        self.abandon(part)
        part.fail(EngineError(_OVER))
        if not self.recalled:
            await self.engine.drop(part.lane)

    async def end_loans(self) -> None:
        for part in [part for lane, part in self._parts.items() if lane]:
            await self.end(part)

    async def stop(self) -> None:
        """Ask the engine for no more tokens."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait((self._pump,))
            self._pump = None


class LenderEngine(Around):
    """`base.Engine` of the run whose engine it is, as it would be without borrowers."""

    def __init__(self, batch: SharedBatch, part: _RunPart) -> None:
        super().__init__(batch.engine)
        self._batch, self._part = batch, part

    def borrow(self, slots: int) -> Engine:
        return self._batch.borrow(slots)

    def recall(self) -> None:
        self._batch.recalled = True

    async def load(self, version: int, tensors: Iterable[Weight], *, summed: bool = False) -> bytes:
        self._batch.abandon(self._part)
        try:
            return await self._engine.load(version, tensors, summed=summed)
        finally:
            self._batch.drop_lost()

    async def add(self, request: Request) -> None:
        try:
            await self._engine.add(self._batch.number(self._part, request))
        except BaseException:  # refused, or the call was cancelled: no token of it will come
            self._batch.unknown(self._part, request.handle)
            raise

    async def abort(self, handles: Iterable[int]) -> None:
        await self._batch.abort(self._part, handles)

    async def next(self) -> list[Delta]:
        return await self._batch.next(self._part)

    async def sleep(self) -> None:
        await self._batch.end_loans()
        self._batch.abandon(self._part)
        await self._engine.sleep()

    async def forget(self, run: str) -> None:
        await self._batch.stop()
        self._batch.recalled = True
        await self._batch.end_loans()
        self._batch.abandon(self._part)
        await self._engine.forget(run)
        self._batch.recalled = False

    async def close(self) -> None:
        await self._batch.stop()
        self._batch.fail(EngineError("the engine is closed"))
        await self._engine.close()


class BorrowerEngine:
    """`base.Engine` of a run that borrows slots."""

    def __init__(self, batch: SharedBatch, part: _RunPart, slots: int) -> None:
        self._batch, self._part, self._engine, self._slots = batch, part, batch.engine, slots

    def info(self) -> EngineInfo:
        whole = self._engine.info()
        slots = min(self._slots, whole.max_batch)
        cache, best = whole.cache_tokens * slots // whole.max_batch, min(whole.best_batch, slots)
        return replace(whole, max_batch=slots, cache_tokens=cache, best_batch=best, device="")

    async def load(self, version: int, tensors: Iterable[Weight], *, summed: bool = False) -> bytes:
        if summed:
            raise EngineError(
                "nothing is merged in an engine that several runs share", 'set lora.serve = "unmerged"'
            )
        self._refuse_over()
        self._batch.abandon(self._part)
        self._part.loaded = False
        await self._engine.load_beside(self._part.lane, tensors)
        self._part.loaded = True
        return b""

    async def add(self, request: Request) -> None:
        self._refuse_over()
        if len(self._part.live) >= self._slots:
            raise EngineError(f"{self._slots} slots are lent, and each holds a sample")
        try:
            await self._engine.add_beside(self._part.lane, self._batch.number(self._part, request))
        except BaseException:  # refused, or the call was cancelled: no token of it will come
            self._batch.unknown(self._part, request.handle)
            raise

    def _refuse_over(self) -> None:
        if self._part.fault is not None:
            raise self._part.fault

    async def abort(self, handles: Iterable[int]) -> None:
        await self._batch.abort(self._part, handles)

    async def next(self) -> list[Delta]:
        return await self._batch.next(self._part)

    async def sleep(self) -> None:
        raise EngineError("a run that borrows slots does not put the engine to sleep")

    async def wake(self) -> None:
        raise EngineError("a run that borrows slots does not wake the engine")

    async def bytes_held(self) -> Sequence[int]:
        return await self._engine.bytes_held()

    def progress(self) -> int:
        return self._engine.progress()

    def speculated(self) -> Speculated:
        return NOT_SPECULATED

    async def hear(self, news: HearSiblings) -> None:
        """What siblings say elsewhere is no draft here: an engine that drafts is not shared."""

    async def forget(self, run: str) -> None:
        raise EngineError(f"an engine in lent slots does not change hands to run {run}")

    async def close(self) -> None:
        await self._batch.end(self._part)
