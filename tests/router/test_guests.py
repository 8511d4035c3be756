"""Engines that are bounded by their host: the router leases them no more than that, and counts one that has none for nothing."""

from __future__ import annotations

import pytest

from scavenger.ledger.records import WorkerJoined as WorkerJoinedRecord
from scavenger.policy.interface import Fact, WorkerJoined, WorkerLost, WorkerReady
from scavenger.protocol.messages import (
    PROTOCOL,
    Assign,
    Drain,
    Goodbye,
    Heartbeat,
    Held,
    Lease,
    Rejected,
    ReportAgreement,
    SampleFailed,
    Serving,
    UseWeights,
    WeightsLoaded,
    WeightSource,
    Welcome,
    WorkerHello,
    Yielded,
)
from scavenger.router.core import guests
from scavenger.router.core.events import HelloReceived, PeerIdentity
from scavenger.router.core.guests import MOST_FAILURES
from scavenger.router.core.policy_view import LiveView
from scavenger.router.core.samples import servable
from scavenger.router.core.state import RouterLimits
from scavenger.router.core.worker_counts import fleet_sizes
from tests.router.harness import SOURCE, Bench, root, specs, started
from tests.router.test_agreement import EVERY, sums

W1, W2 = 50, 51


def beat(bench: Bench, conn: int, held: list[Lease], lease_limit: int | None) -> None:
    bench.say(
        conn,
        Heartbeat(
            tuple(Held(one.sample_id, one.epoch, len(one.accepted) // 4) for one in held),
            1,
            1,
            lease_limit=lease_limit,
        ),
    )


def sizes(bench: Bench) -> tuple[int, int, int]:
    return fleet_sizes(bench.router.core.runs["r"])


def test_the_ledger_has_the_engine_of_the_run_whatever_the_guest_was_told_to_import() -> None:
    bench = started(n=6)
    bench.hello(W1, engine="vllm", lease_limit=0)
    (joined,) = [one for one in bench.ledger.log if isinstance(one, WorkerJoinedRecord)]
    assert joined.engine == bench.router.core.runs["r"].engine.name != "vllm"


def test_a_guest_is_leased_no_more_than_its_host_lets_it_have() -> None:
    bench = started(n=6)
    bench.hello(W1, lease_limit=0)
    bench.tick(2.0)
    assert bench.leases(W1) == []
    bench.say(W1, Heartbeat((), 1, -1, lease_limit=2))
    bench.say(W1, WeightsLoaded(1, root(1)))
    found = bench.leases(W1)
    assert len(found) == 2
    assert sizes(bench) == (0, 0, 0), "reserved engines are not to sleep for it, nor the window to close"
    beat(bench, W1, found, 3)
    assert len(bench.leases(W1)) == 1


def test_a_guest_is_bounded_in_what_policies_see_and_are_told_and_no_other_engine_is() -> None:
    bench = started(n=6)
    told: list[Fact] = []
    run = bench.router.core.runs["r"]
    run.policy.observe = lambda fact, now: told.append(fact)  # type: ignore[method-assign]
    bench.join(W1, lease_limit=1)
    bench.join(W2)
    guest(bench, 52)
    assert sizes(bench) == (1, 0, 0)
    assert [one.bounded for one in LiveView(bench.router.core, run).workers] == [True, False, True]
    bench.restart()
    run = bench.router.core.runs["r"]
    assert [one.bounded for one in LiveView(bench.router.core, run).workers] == [False, False, True], (
        "by its key before it says anything"
    )
    run.policy.observe = lambda fact, now: told.append(fact)  # type: ignore[method-assign]
    bench.tick(bench.limits.reconnect_s + 1)
    found = {
        (type(fact), fact.worker_id): fact.bounded
        for fact in told
        if isinstance(fact, WorkerJoined | WorkerReady | WorkerLost)
    }
    assert found[WorkerJoined, 3]
    assert found[WorkerReady, 3]
    assert found[WorkerLost, 3]
    assert not any(found[kind, 2] for kind in (WorkerJoined, WorkerReady, WorkerLost))


def test_what_a_guest_gives_back_goes_to_another_engine_with_its_tokens_and_never_back_to_it() -> None:
    bench = started(n=2)
    bench.join(W1, lease_limit=2)
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
    bench.join(W1, lease_limit=2)
    bench.router.core.workers[1].engine.lease_limit = 1
    beat(bench, W1, [], 0)
    assert bench.router.core.workers[1].most_leases == 0
    assert not servable(bench.router.core.workers[1], 1)
    beat(bench, W1, [], None)
    assert bench.router.core.workers[1].most_leases == bench.router.core.runs["r"].engine.max_batch


# ---------------------------------------------------------------- a guest that fails, or is wrong


GUEST = "guest-chat"


def guest(bench: Bench, conn: int, *, session: str = "", key: str = "key", lease_limit: int = 1) -> None:
    """A worker of the guest's key `key` registers, and loads what it is asked to."""
    who = PeerIdentity("worker", key, "r", GUEST)
    session = session or f"s{conn}"
    message = WorkerHello(
        PROTOCOL, "harvested", "r", session, 0, 0, "service-node", 1, "vllm", "0", 1, lease_limit=lease_limit
    )
    bench.handle(HelloReceived(conn, who, message))
    if bench.router.core.by_conn.get(conn) is not None:
        bench.say(conn, WeightsLoaded(1, root(1)))


def refused(bench: Bench, conn: int) -> list[tuple[str, bool]]:
    return [(one.reason, one.retry) for one in bench.take(conn, Rejected)]


def test_a_guest_that_fails_every_sample_poisons_none_and_is_refused_after_three() -> None:
    bench = started(n=2, poison_after=1)
    guest(bench, W1)
    for _ in range(MOST_FAILURES):
        (found,) = bench.leases(W1)
        bench.say(W1, SampleFailed(found.sample_id, found.epoch, "no memory"))
    assert bench.leases(W1) == [], "it is given no more"
    assert len(bench.take(W1, Drain)) == 1
    run = bench.router.core.runs["r"]
    assert (run.stopped, bench.events("sample_poisoned")) == ("", [])
    assert [sample.failures for sample in bench.router.core.samples.values()] == [0, 0]
    (event,) = bench.events("guest_refused")
    assert (event.subject, "3 samples failed on it, the last one: no memory" in event.reason) == (GUEST, True)

    bench.say(W1, Goodbye("drained", True))
    guest(bench, W2)
    ((why, retry),) = refused(bench, W2)
    assert "3 samples failed" in why
    assert not retry
    guest(bench, 52, key="renewed")
    assert len(bench.leases(52)) == 1


def test_a_guest_whose_engine_dies_charges_no_sample_and_may_come_back() -> None:
    bench = started(n=MOST_FAILURES, poison_after=1)
    guest(bench, W1, lease_limit=MOST_FAILURES)
    assert len(bench.leases(W1)) == MOST_FAILURES
    bench.say(W1, Goodbye("out of memory", False, failed=True))
    assert {sample.failures for sample in bench.router.core.samples.values()} == {0}
    guest(bench, W2)
    (found,) = bench.leases(W2)
    bench.say(W2, SampleFailed(found.sample_id, found.epoch, "no memory"))
    assert len(bench.leases(W2)) == 1
    assert bench.events("guest_refused") == []


def test_a_harvested_engine_that_fails_a_sample_still_charges_it() -> None:
    bench = started(n=2, poison_after=2)
    first = bench.join(W1)[0]
    bench.say(W1, SampleFailed(first.sample_id, first.epoch, "no memory"))
    assert bench.sample(first.sample_id).failures == 1
    assert bench.events("guest_refused") == []


def test_a_guest_that_is_set_aside_for_wrong_numbers_stays_out_until_its_key_is_renewed() -> None:
    bench = Bench(limits=RouterLimits(agreement=EVERY))
    bench.open()
    bench.publish()
    bench.submit(groups=specs(1, 13))
    core = bench.router.core
    guest(bench, W1)
    for conn in (60, 61, 62):
        bench.join(conn)
    spans = [one for w in (1, 2, 3, 4) for one in sums(w, 1000 * w, rate=0.3 if w == 1 else 0.01)]
    bench.call(ReportAgreement(1, tuple(spans)))
    assert len(bench.take(W1, Drain)) == 1
    assert not core.condemned, "no node of ours"
    assert [event.subject for event in bench.events("guest_refused")] == [GUEST]
    guest(bench, W1)
    assert refused(bench, W1) == [], "the process that is told to leave may come back and say goodbye"
    bench.say(W1, Goodbye("drained", True))
    guest(bench, W2)
    assert [("disagree" in why, retry) for why, retry in refused(bench, W2)] == [(True, False)]
    guest(bench, 52, key="renewed")
    assert len(bench.leases(52)) == 1
    guests.refuse(core, core.runs["r"], GUEST, 1, "found late")
    bench.say(52, Goodbye("preempted", True))
    guest(bench, 52, key="renewed")
    assert refused(bench, 52) == [], "what is found of the earlier key's worker says nothing of the new one"


def test_of_one_key_the_first_process_stays_and_the_second_waits_until_it_is_gone() -> None:
    bench = started(n=2)
    guest(bench, W1, lease_limit=2)
    held = bench.leases(W1)
    guest(bench, W2)
    ((why, retry),) = refused(bench, W2)
    assert "at work on service-node" in why
    assert retry
    assert {bench.sample(lease.sample_id).worker_id for lease in held} == {1}
    bench.now += bench.limits.suspect_s + 1.0  # killed: it says nothing any more
    bench.tick()
    guest(bench, W2)
    assert len(bench.leases(W2)) == 1
    guest(bench, W1)
    assert [retry for _, retry in refused(bench, W1)] == [True], "they do not evict each other"


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("lease_limit", [0, 1])
def test_a_guest_that_joins_loads_once_its_host_leaves_it_something(lease_limit: int) -> None:
    bench = started(n=2)
    bench.hello(W1, lease_limit=lease_limit)
    bench.tick(2.0)
    assert len(bench.take(W1, UseWeights)) == lease_limit
    bench.say(W1, Heartbeat((), 1, -1, lease_limit=1))
    bench.tick(0.5)
    assert len(bench.take(W1, UseWeights)) == 1 - lease_limit


def test_nobody_is_sent_to_a_guest_for_weights_nor_waits_for_it_on_its_node() -> None:
    bench = started(n=2)
    guest(bench, W1)
    (welcome,) = bench.take(W1, Welcome)
    assert not welcome.relay
    bench.say(W1, Serving(1, root(1), WeightSource("tcp://127.0.0.1:2", "key", b"token")))
    for conn, node in ((W2, "other"), (52, "service-node")):
        bench.hello(conn, node=node)
        (order,) = bench.take(conn, UseWeights)
        assert order.sources == (SOURCE,)
    (welcome,) = bench.take(W2, Welcome)
    assert welcome.relay
