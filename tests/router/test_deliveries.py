"""A trainer that takes its groups slowly: what waits for it is bounded in bytes, nothing of it is lost, and nobody else waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import zmq

from scavenger.protocol import keys, messages
from scavenger.protocol.messages import Fleet, GroupDone, Message, Pong, Reply
from scavenger.router.core.events import Send
from scavenger.router.core.payloads import Payload, PayloadStore
from scavenger.router.core.state import RouterLimits
from scavenger.router.core.tables import Core
from scavenger.router.edge import pipeline
from scavenger.router.edge import pipeline as payload_gate
from scavenger.router.edge.pipeline import Deliveries, PayloadPipeline
from tests.router.edge import LiveDaemon
from tests.router.harness import started
from tests.router.test_edge import eventually


def group(group_id: int, nbytes: int = 10) -> GroupDone:
    return GroupDone(group_id, 1, 1, "train", group_id, bytes(nbytes), "{}", ())


def test_bytes_under_way_are_counted_for_each_connection_until_they_are_gone() -> None:
    deliveries, gone = Deliveries(100), {1: False, 2: False, 3: False}
    deliveries.sent(1, 60, lambda: gone[1])
    assert deliveries.has_headroom(1)
    deliveries.sent(1, 60, lambda: gone[2])
    deliveries.sent(2, 60, lambda: gone[3])
    assert (deliveries.has_headroom(1), deliveries.has_headroom(2), deliveries.nbytes) == (False, True, 180)
    gone[2] = True
    assert not deliveries.has_headroom(1), "they go in order: a later one is not gone before the first"
    gone[1] = True
    assert (deliveries.has_headroom(1), deliveries.nbytes) == (True, 60)
    gone[3] = True
    assert (deliveries.has_headroom(1), deliveries.nbytes) == (True, 0)


def test_bytes_under_way_are_counted_for_a_run_over_all_its_connections_too() -> None:
    deliveries, gone = Deliveries(100), {1: False, 2: False}
    deliveries.sent(1, 110, lambda: gone[1], run=7)
    deliveries.sent(2, 90, lambda: gone[2], run=7)
    assert [deliveries.has_headroom(conn, run=7) for conn in (1, 2, 3)] == [False, False, False], (
        "also on a connection that has none yet"
    )
    assert deliveries.has_headroom(3, run=8), "another run does not wait"
    assert deliveries.has_headroom(3), "nor does what is of no known run"
    gone[1] = True
    assert deliveries.has_headroom(3, run=7)
    assert deliveries.has_headroom(2, run=7)
    gone[2] = True
    assert deliveries.has_headroom(1, run=7)
    assert (deliveries.nbytes, deliveries._of_run) == (0, {})


class Desk:
    """A gate whose peers take what they are let take."""

    def __init__(self) -> None:
        core = Core(RouterLimits(), 1, store := PayloadStore(1000))
        self.core = core
        self.said: dict[int, list[Message]] = {}
        self.parcels: dict[int, deque[bool]] = {}
        self.taken: dict[int, int] = {}
        self.full: set[int] = set()
        self.gone: set[int] = set()
        self.failures: list[BaseException] = []
        self.pipeline = PayloadPipeline(
            core,
            store,
            self._read,
            post=lambda _: None,
            send=self._send,
            connected=lambda conn: conn not in self.gone,
            failed=self.failures.append,
        )
        self.pipeline.deliveries.most_bytes = 25

    async def _read(self, sample_ids: Sequence[int]) -> dict[int, Payload]:
        raise AssertionError("nothing is cold here")

    def _send(self, conn: int, message: Message) -> bool:
        if conn in self.full:
            return False
        self.said.setdefault(conn, []).append(message)
        if isinstance(message, GroupDone):
            number = sum(isinstance(m, GroupDone) for m in self.said[conn])
            run = self.pipeline.run_of(message)
            self.pipeline.deliveries.sent(
                conn, len(message.prompt), lambda: self.taken.get(conn, 0) >= number, run
            )
        return True

    def groups(self, conn: int) -> list[int]:
        return [m.group_id for m in self.said.get(conn, []) if isinstance(m, GroupDone)]


def play(scene: Callable[[Desk], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(pipeline, "CAPACITY_PAUSE_S", 0.0)

    async def main() -> Desk:
        desk = Desk()
        await scene(desk)
        await desk.pipeline.close()
        assert desk.failures == []
        return desk

    return asyncio.run(main())


async def turns(n: int = 20) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


def test_groups_beyond_the_bound_wait_in_order_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(desk: Desk) -> None:
        for n in range(1, 8):
            desk.pipeline.give(Send(1, group(n)))
        desk.pipeline.give(Send(1, Reply(1, Pong(1))))
        desk.pipeline.give(Send(2, group(99)))
        await turns()
        assert desk.groups(1) == [1, 2, 3], "the third crosses the bound"
        assert desk.groups(2) == [99], "another trainer does not wait"
        desk.taken[2] = 1
        for taken in range(1, 8):
            desk.taken[1] = taken
            await turns()
            assert desk.groups(1) == list(range(1, min(taken + 3, 7) + 1))
            assert desk.pipeline.deliveries.nbytes <= 30

    desk = play(scene, monkeypatch)
    assert [type(m) for m in desk.said[1]][-2:] == [GroupDone, Reply], "in its place"


def test_a_trainer_that_connects_again_and_again_takes_no_more_than_its_runs_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = started(prompts=30)
    ids = sorted(bench.router.core.groups)

    async def scene(desk: Desk) -> None:
        desk.core.groups.update(bench.router.core.groups)
        for conn in range(1, 11):
            for number in ids[3 * conn - 3 : 3 * conn]:
                desk.pipeline.give(Send(conn, group(number)))
            await turns()
        assert desk.pipeline.deliveries.nbytes == 50, "twice the bound of one connection"
        assert len(desk.said) == 2
        for conn in range(1, 11):  # the transport finds the first ones dead
            desk.taken[conn] = 100
            await turns()
        assert [number for conn in range(1, 11) for number in desk.groups(conn)] == ids, "nothing is lost"

    play(scene, monkeypatch)


def test_a_group_that_a_full_queue_does_not_take_is_tried_again_and_a_lesser_message_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(desk: Desk) -> None:
        desk.full.add(1)
        desk.pipeline.give(Send(1, Fleet(1, 0, 0, 0, 0)))
        desk.pipeline.give(Send(1, group(1)))
        desk.pipeline.give(Send(1, Fleet(2, 0, 0, 0, 0)))
        await turns()
        assert 1 not in desk.said
        desk.full.clear()
        await turns()

    desk = play(scene, monkeypatch)
    assert desk.said[1] == [group(1), Fleet(2, 0, 0, 0, 0)]


def test_lesser_messages_behind_a_group_are_bounded_by_number_and_groups_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(payload_gate, "MOST_WAITING", 5)

    async def scene(desk: Desk) -> None:
        for n in range(1, 4):
            desk.pipeline.give(Send(1, group(n)))
        for n in range(20):
            desk.pipeline.give(Send(1, group(10 + n) if n % 2 else Fleet(n, 0, 0, 0, 0)))
        desk.taken[1] = 100
        await turns(200)

    desk = play(scene, monkeypatch)
    assert desk.groups(1) == [1, 2, 3, *range(11, 31, 2)]
    assert sum(isinstance(m, Fleet) for m in desk.said[1]) == 3
    assert desk.pipeline.counters["messages_dropped"] == 7


def test_what_waits_for_a_peer_that_went_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(desk: Desk) -> None:
        for n in range(1, 8):
            desk.pipeline.give(Send(1, group(n)))
        await turns()
        desk.gone.add(1)
        await turns()
        assert desk.pipeline._out.waiting(1) == 0

    play(scene, monkeypatch)


# ---------------------------------------------------------------- over a real socket


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[LiveDaemon]:
    with LiveDaemon(tmp_path / "state") as live:
        yield live


def test_a_trainer_that_reads_nothing_costs_the_bound_and_gets_every_group_when_it_does(
    daemon: LiveDaemon,
) -> None:
    size, most, n = 1_000_000, 2_000_000, 30
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    trainer = context.socket(zmq.DEALER)
    try:
        rendezvous, owner = (
            keys.read_rendezvous(daemon.state_dir),
            keys.read_keypair(keys.owner_key_path(daemon.state_dir)),
        )
        trainer.linger = 0
        keys.secure(trainer, rendezvous.server_key, owner)
        trainer.rcvhwm, trainer.rcvbuf = 1, 65_536
        trainer.connect(rendezvous.endpoint)
        trainer.send(messages.encode(messages.Call(1, "r", 0, messages.Ping())))
        assert trainer.poll(5000)
        trainer.recv()
        server = daemon.server
        server.pipeline.deliveries.most_bytes = most
        (conn,) = server._routes
        for number in range(n):
            daemon.loop.call_soon_threadsafe(server.pipeline.give, Send(conn, group(number, size)))
        eventually(lambda: server.pipeline._out.waiting(conn) > 0)
        held = server.pipeline._out.waiting(conn)
        assert held > 0
        assert most <= server.pipeline.deliveries.nbytes <= most + size + 1000
        got = []
        while len(got) < n:
            assert trainer.poll(5000), f"{len(got)} of {n} groups came"
            message = messages.decode_to_trainer(trainer.recv())
            assert isinstance(message, GroupDone)
            got.append(message.group_id)
            assert server.pipeline.deliveries.nbytes <= most + size + 1000
        assert got == list(range(n))
        eventually(
            lambda: server.pipeline.deliveries.has_headroom(conn) and server.pipeline.deliveries.nbytes == 0
        )
    finally:
        trainer.close(linger=0)
        context.term()
