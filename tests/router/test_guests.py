"""Engines that are bounded by their host: the router leases them no more than that, and counts one without room for nothing."""

from __future__ import annotations

from scavenger.protocol.messages import Assign, Heartbeat, Held, Lease, Yielded
from scavenger.router.core.samples import servable
from scavenger.router.core.worker_counts import fleet_sizes
from tests.router.harness import Bench, started

W1, W2 = 50, 51


def beat(bench: Bench, conn: int, held: list[Lease], room: int | None) -> None:
    bench.say(
        conn,
        Heartbeat(
            tuple(Held(one.sample_id, one.epoch, len(one.accepted) // 4) for one in held), 1, 1, room=room
        ),
    )


def sizes(bench: Bench) -> tuple[int, int, int]:
    return fleet_sizes(bench.router.core.runs["r"])


def test_a_guest_is_leased_no_more_than_its_host_lets_it_have() -> None:
    bench = started(n=6)
    assert bench.join(W1, room=0) == []
    assert sizes(bench) == (0, 0, 0), (
        "it is no engine that can generate: reserved ones are not to sleep for it"
    )
    beat(bench, W1, [], 2)
    found = bench.leases(W1)
    assert len(found) == 2
    assert sizes(bench) == (1, 0, 0)
    beat(bench, W1, found, 3)
    assert len(bench.leases(W1)) == 1


def test_what_a_guest_gives_back_goes_to_another_engine_with_its_tokens_and_never_back_to_it() -> None:
    bench = started(n=2)
    bench.join(W1, room=2)
    held = bench.router.core.samples
    (first, second) = sorted(held.values(), key=lambda sample: sample.id)
    lease = Lease(first.id, first.epoch, 1, b"", b"", first.group.sampling, 0, None)  # type: ignore[arg-type]
    bench.chunk(W1, lease, 0, 3)
    beat(bench, W1, [], 0)
    bench.say(W1, Yielded((Held(first.id, first.epoch, 3), Held(second.id, second.epoch, 0))))
    assert bench.take(W1, Assign)[1:] == []
    assert {sample.worker_id for sample in (first, second)} == {0}
    bench.tick(2.0)
    assert bench.leases(W1) == []
    moved = bench.join(W2)
    assert sorted((one.sample_id, one.epoch, len(one.accepted) // 4) for one in moved) == [
        (first.id, 2, 3),
        (second.id, 2, 0),
    ]


def test_a_guest_that_sleeps_says_so_again_when_it_registers_again() -> None:
    bench = started(n=2)
    bench.join(W1, room=2)
    bench.router.core.workers[1].engine.room = 1
    beat(bench, W1, [], 0)
    assert bench.router.core.workers[1].most_leases == 0
    assert not servable(bench.router.core.workers[1], 1)
    beat(bench, W1, [], None)
    assert bench.router.core.workers[1].most_leases == bench.router.core.runs["r"].engine.max_batch
