"""Random schedules of an engine that several runs share, each from one seed: whatever joins, ends, loads, waits and leaves, a run hears of
its own requests alone, and of all of their tokens; bugs that are planted are found by name."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from rollout.engines import shared
from rollout.engines.base import Engine, EngineInfo, Weight
from scavenger.errors import EngineError
from scavenger.protocol.messages import SampleKey, Sampling
from scavenger.protocol.worker.events import NOT_SPECULATED, Delta, HearSiblings, Request, Speculated

OPS, SEEDS = 150, range(40)
SLOTS = 3
#: Handles of each run: few, so that they are given again and again, and to both runs.
HANDLES = range(4)


class Numbers:
    """An engine whose every token names its request: whose it is, the how manieth of that run, and its place."""

    def __init__(self) -> None:
        self.live: dict[int, tuple[int, Request, int]] = {}  # number -> lane, request, tokens made
        self.loaded: set[int] = set()
        self.made: asyncio.Queue[list[Delta]] = asyncio.Queue()

    def info(self) -> EngineInfo:
        return EngineInfo("numbers", 8, 1000, 1000)

    def _end(self, lane: int) -> None:
        self.live = {number: one for number, one in self.live.items() if one[0] != lane}

    async def load(self, version: int, tensors: Iterable[Weight], *, summed: bool = False) -> bytes:
        self._end(0)
        return b""

    def borrowers(self) -> frozenset[int]:
        return frozenset(self.loaded)

    async def load_beside(self, lane: int, tensors: Iterable[Weight]) -> None:
        self._end(lane)
        self.loaded.add(lane)

    async def add(self, request: Request) -> None:
        self._take(0, request)

    async def add_beside(self, lane: int, request: Request) -> None:
        assert lane in self.loaded
        self._take(lane, request)

    def _take(self, lane: int, request: Request) -> None:
        assert request.handle not in self.live, "two requests of one number"
        self.live[request.handle] = lane, request, 0

    async def abort(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self.live.pop(handle, None)

    async def drop(self, lane: int) -> None:
        self._end(lane)
        self.loaded.discard(lane)

    def generate(self, rng: random.Random) -> None:
        """A pass: a token of each request; some end by it. What is on its way may be late."""
        deltas = []
        for number, (lane, request, made) in list(self.live.items()):
            finish = "length" if rng.random() < 0.1 else None
            deltas.append(Delta(number, (*request.prompt, made), (0.0,) * 3, (0.0,) * 3, finish))
            self.live[number] = lane, request, made + 1
            if finish:
                del self.live[number]
        if deltas:
            self.made.put_nowait(deltas)

    async def next(self) -> list[Delta]:
        return await self.made.get()

    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    async def bytes_held(self) -> list[int]:
        return [0]

    def progress(self) -> int:
        return 0

    def speculated(self) -> Speculated:
        return NOT_SPECULATED

    async def hear(self, news: HearSiblings) -> None: ...
    async def forget(self, run: str) -> None:
        self.live.clear()

    async def close(self) -> None: ...


@dataclass
class Run:
    """One run's view: its requests, and what it heard of each."""

    number: int
    engine: Engine
    open: dict[int, tuple[int, int]] = field(default_factory=dict)  # handle -> (serial, tokens heard)
    serial: int = 0
    listening: asyncio.Task[None] | None = None
    over: bool = False

    async def add(self, rng: random.Random) -> None:
        free = [handle for handle in HANDLES if handle not in self.open]
        if not free or len(self.open) >= SLOTS:
            return
        handle, self.serial = rng.choice(free), self.serial + 1
        key = SampleKey("train", 0, self.number, self.serial)
        asked = Request(handle, (self.number, self.serial), (), 900, Sampling(900), 0, key)
        self.open[handle] = self.serial, 0
        await self.engine.add(asked)

    async def abort(self, rng: random.Random) -> None:
        gone = [handle for handle in sorted(self.open) if rng.random() < 0.5]
        for handle in gone:
            del self.open[handle]
        await self.engine.abort(gone)

    async def load(self) -> None:
        self.open.clear()
        await self.engine.load(1, ())

    async def listen(self) -> None:
        while True:
            for delta in await self.engine.next():
                self.hear(delta)

    def hear(self, delta: Delta) -> None:
        whose, serial, place = delta.token_ids
        assert whose == self.number, f"a token of run {whose} was delivered to run {self.number}"
        assert delta.handle in self.open, f"a token of a request that is over, of handle {delta.handle}"
        known, heard = self.open[delta.handle]
        assert serial == known, "a token of a request that had this handle before"
        assert place == heard, f"token {place} came where {heard} was due"
        self.open[delta.handle] = known, heard + 1
        if delta.finish:
            del self.open[delta.handle]

    def check(self) -> None:
        if self.listening is not None and self.listening.done() and not self.listening.cancelled():
            error = self.listening.exception()
            if isinstance(error, AssertionError):
                raise error
            assert self.over, f"run {self.number} was ended: {error}"


async def settled() -> None:
    """Until all tasks wait."""
    for _ in range(12):
        await asyncio.sleep(0)


async def schedule(seed: int) -> int:
    """Play one; returns how many tokens were heard."""
    rng, engine = random.Random(seed), Numbers()
    batch = shared.SharedBatch(engine)
    runs = [Run(0, batch.lender)]
    ended: list[Run] = []
    heard = 0
    try:
        for _ in range(OPS):
            op = rng.random()
            run = rng.choice(runs)
            if op < 0.04 and len(runs) < 4:
                runs.append(Run(len(runs) + len(ended), batch.borrow(SLOTS)))
                await runs[-1].load()
            elif op < 0.07 and run is not runs[0]:
                run.over = True
                runs.remove(run)
                ended.append(run)
                run.open.clear()
                await run.engine.close()
                assert not any(lane and lane not in engine.loaded for lane, _, _ in engine.live.values())
            elif op < 0.12:
                await run.load()
            elif op < 0.25:
                await run.abort(rng)
            elif op < 0.5:
                await run.add(rng)
            elif op < 0.6 and run.listening is not None:
                run.listening.cancel()  # it is held up: nobody else waits for it
                await settled()
                run.listening = None
            elif op < 0.75 and run.listening is None:
                run.listening = asyncio.create_task(run.listen())
            else:
                engine.generate(rng)
            await settled()
            for one in (*runs, *ended):
                one.check()
        for one in runs:
            one.listening = one.listening or asyncio.create_task(one.listen())
        await settled()
        for one in (*runs, *ended):
            one.check()
        for lane, request, made in engine.live.values():
            whose = next(one for one in runs if one.number == request.prompt[0])
            known = dict(whose.open.values())
            assert known.get(request.prompt[1]) == made, (
                f"tokens of run {whose.number} (lane {lane}) are lost"
            )
            heard += made
        assert sum(len(one.open) for one in runs) == len(engine.live), "a request is lost"
        return heard
    finally:
        for one in (*runs, *ended):
            if one.listening is not None:
                one.listening.cancel()
        await batch.stop()


def play(seed: int) -> int:
    return asyncio.run(asyncio.wait_for(schedule(seed), 60.0))


@pytest.mark.parametrize("seed", SEEDS)
def test_each_run_hears_of_its_own_requests_and_of_all_their_tokens(seed: int) -> None:
    play(seed)


def test_the_schedules_hear_tokens() -> None:
    assert sum(play(seed) for seed in SEEDS) > 100


# ---------------------------------------------------------------- planted


def to_the_other_run(batch: shared.SharedBatch, delta: Delta) -> None:
    """Given by handle, as if all were one run's."""
    if (whose := batch._of.get(delta.handle)) is not None:
        part = next(
            (one for one in batch._parts.values() if one is not whose[0] and whose[1] in one.live), whose[0]
        )
        part.ready.append(Delta(whose[1], delta.token_ids, delta.logprobs, delta.raw_logprobs, delta.finish))
        part.fresh.set()


async def keeps_what_waits(batch: shared.SharedBatch, part: shared._RunPart, handles: Iterable[int]) -> None:
    """Tokens that wait outlive the abort of their request."""
    gone = set(handles)
    numbers = [part.live[handle] for handle in gone if handle in part.live]
    for handle in gone:
        batch.unknown(part, handle)
    await batch.engine.abort(numbers)


def knows_it_still(batch: shared.SharedBatch, part: shared._RunPart, handle: int) -> None:
    """A request that is over is taken for one that goes on."""
    part.live.pop(handle, None)


def loads_end_all(batch: shared.SharedBatch, part: shared._RunPart) -> None:
    """A load of one run ends the requests of all."""
    for one in batch._parts.values():
        for handle in list(one.live):
            batch.unknown(one, handle)
        one.ready.clear()


@pytest.mark.parametrize(
    ("method", "plant", "cause"),
    [
        ("_give", to_the_other_run, "was delivered to run"),
        ("abort", keeps_what_waits, "a token of a request that"),
        ("unknown", knows_it_still, "a token of a request that"),
        ("abandon", loads_end_all, "lost|came where"),
    ],
)
def test_planted_bugs_are_found(
    method: str, plant: Callable[..., object], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared.SharedBatch, method, plant)
    found = []
    for seed in SEEDS:
        try:
            play(seed)
        except (AssertionError, EngineError) as error:
            found.append(str(error))
    assert found, f"nobody noticed that {plant.__doc__}"
    assert any(re.search(cause, one) for one in found), found
