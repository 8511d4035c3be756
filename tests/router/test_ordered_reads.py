"""Order at the edge while tokens are read from the ledger: nothing overtakes, nobody else waits, a ledger that is away delays only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from scavenger.errors import LedgerError, LedgerUnavailable
from scavenger.router.core.payloads import Payload
from scavenger.router.edge import pipeline
from scavenger.router.edge.pipeline import ConnectionLines, Fetcher
from tests.router.harness import payload

Item = tuple[str, int]  # a name, and the sample whose 4 tokens it needs; 0 = none


@dataclass
class Desk:
    """A line whose reads wait until they are let through, and what it handled."""

    handled: list[str] = field(default_factory=list)
    asked: list[list[int]] = field(default_factory=list)
    loaded: set[int] = field(default_factory=set)
    errors: list[BaseException] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    length: int = 4

    def __post_init__(self) -> None:
        self.pipeline = asyncio.Event()
        self.fetcher = Fetcher(self._read, lambda sample_id, _: self.loaded.add(sample_id))
        self.lines: ConnectionLines[Item] = ConnectionLines(
            self._wanted, self._handle, self.fetcher, self.failures.append
        )

    def _wanted(self, item: Item) -> Mapping[int, int]:
        return {} if not item[1] or item[1] in self.loaded else {item[1]: 4}

    def _handle(self, item: Item) -> None:
        if item[0] == "bad":
            raise RuntimeError("a handler's bug")
        self.handled.append(item[0])

    async def _read(self, sample_ids: Sequence[int]) -> Mapping[int, Payload]:
        self.asked.append(list(sample_ids))
        if self.errors:
            raise self.errors.pop(0)
        await asyncio.sleep(0)
        await self.pipeline.wait()
        return {i: payload(i, 0, self.length) for i in sample_ids if i < 100}


def play(scene: Callable[[Desk], Awaitable[None]]) -> Desk:
    async def main() -> Desk:
        desk = Desk()
        await scene(desk)
        await desk.lines.close()
        return desk

    return asyncio.run(main())


async def turns(n: int = 10) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


def test_what_needs_nothing_is_handled_at_once() -> None:
    async def scene(desk: Desk) -> None:
        assert desk.lines.put(1, ("a", 0))
        assert desk.handled == ["a"]
        assert 1 not in desk.lines

    assert play(scene).asked == []


def test_later_items_of_a_connection_wait_behind_a_read_and_other_connections_do_not() -> None:
    async def scene(desk: Desk) -> None:
        assert not desk.lines.put(1, ("a", 7), 10)
        assert not desk.lines.put(1, ("b", 0), 20)
        assert not desk.lines.put(1, ("c", 8), 30)
        assert not desk.lines.put(1, ("d", 7), 40)
        assert desk.lines.put(2, ("other", 0))
        await turns()
        assert desk.handled == ["other"]
        assert desk.lines.nbytes == 100
        desk.pipeline.set()
        await turns()

    desk = play(scene)
    assert desk.handled == ["other", "a", "b", "c", "d"]
    assert desk.asked == [[7], [8]]
    assert desk.lines.nbytes == 0
    assert 1 not in desk.lines


def test_what_is_evicted_again_before_its_turn_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "FIRST_PAUSE_S", 0.0)

    async def scene(desk: Desk) -> None:
        desk.pipeline.set()
        load, desk.fetcher._load = desk.fetcher._load, lambda *_: None
        desk.lines.put(1, ("a", 7))
        await turns(4)
        assert desk.handled == []
        desk.fetcher._load = load
        await turns()

    desk = play(scene)
    assert desk.handled == ["a"]
    assert len(desk.asked) > 1


def test_few_reads_are_under_way_at_once() -> None:
    async def scene(desk: Desk) -> None:
        for conn in range(1, 21):
            desk.lines.put(conn, (f"{conn}", conn))
        await turns()
        assert len(desk.asked) == pipeline.READS
        desk.pipeline.set()
        await turns(100)

    assert len(play(scene).handled) == 20


def test_a_ledger_that_is_away_is_asked_again_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "FIRST_PAUSE_S", 0.001)

    async def scene(desk: Desk) -> None:
        desk.pipeline.set()
        desk.errors = [LedgerUnavailable("away"), LedgerUnavailable("away")]
        desk.lines.put(1, ("a", 7))
        desk.lines.put(1, ("b", 0))
        async with asyncio.timeout(5):
            while desk.handled != ["a", "b"]:
                await asyncio.sleep(0.001)

    desk = play(scene)
    assert len(desk.asked) == 3
    assert desk.failures == []


@pytest.mark.parametrize(
    ("item", "length", "error", "said"),
    [
        (("a", 7), 4, LedgerError("sample 7: chunks overlap"), "chunks overlap"),
        (("a", 7), 3, None, "sample 7: the ledger has 3 tokens, 4 tokens were committed"),
        (("a", 700), 4, None, "sample 700: the ledger has no row, 4 tokens were committed"),
    ],
)
def test_a_ledger_that_is_corrupt_ends_the_daemon_with_its_reason(
    item: Item, length: int, error: Exception | None, said: str
) -> None:
    async def scene(desk: Desk) -> None:
        desk.pipeline.set()
        desk.length = length
        desk.errors = [error] if error is not None else []
        desk.lines.put(1, item)
        desk.lines.put(1, ("b", 0))
        await turns()

    desk = play(scene)
    assert desk.handled == []
    (failure,) = desk.failures
    assert isinstance(failure, LedgerError)
    assert said in failure.cause


def test_a_handler_that_raises_behind_a_read_ends_the_daemon_too() -> None:
    async def scene(desk: Desk) -> None:
        desk.pipeline.set()
        desk.lines.put(1, ("a", 7))
        desk.lines.put(1, ("bad", 0))
        await turns()

    desk = play(scene)
    assert desk.handled == ["a"]
    assert [str(f) for f in desk.failures] == ["a handler's bug"]


def test_closing_ends_reads_that_hang() -> None:
    async def scene(desk: Desk) -> None:
        desk.lines.put(1, ("a", 7))
        await turns()

    desk = play(scene)
    assert desk.handled == []
    assert desk.failures == []
