"""A step whose samples are asked for while the one before is trained: two versions at once, each sample of one; who generated what."""

from __future__ import annotations

from scavenger.protocol.messages import (
    Goodbye,
    GroupDone,
    Heartbeat,
    HeartbeatAck,
    Held,
    Ok,
    PullAhead,
    Serving,
    UseWeights,
    WeightsLoaded,
    WeightSource,
)
from scavenger.router.core import worker_counts
from tests.router.harness import Bench, root, specs, started
from tests.router.moves import W1, W2, finish_all

W3 = 13

GOODBYE = Goodbye("preempted", True)


def ahead() -> Bench:
    """Step 1 was consumed; W1 generates step 2 with version 1, as was asked for in advance; step 3 waits for version 2."""
    bench = started(n=1)
    finish_all(bench, W1, bench.join(W1))
    bench.submit(step=2, version=1, groups=specs(1, 1))
    assert isinstance(bench.commit_step(1, [1]), Ok)
    bench.publish(2, 1)
    bench.submit(step=3, version=2, groups=specs(1, 1))
    return bench


def engine(number: int) -> WeightSource:
    return WeightSource(f"tcp://engine{number}:1", "", b"t")


def asked(bench: Bench, conn: int) -> list[int]:
    return [message.version for message in bench.take(conn, UseWeights)]


def test_an_engine_with_nothing_left_of_the_older_step_begins_with_the_newer() -> None:
    bench = ahead()
    old = bench.leases(W1)
    assert [(lease.sample_id, lease.version) for lease in old] == [(2, 1)]
    bench.hello(W2)
    assert asked(bench, W2) == [2], "version 1 has no sample that waits"
    bench.say(W2, WeightsLoaded(2, root(2)))
    new = bench.leases(W2)
    assert [(lease.sample_id, lease.version) for lease in new] == [(3, 2)]
    finish_all(bench, W2, new)
    assert [group.step for group in bench.take(1, GroupDone)][-1] == 3, "a later step may complete first"
    finish_all(bench, W1, old)
    assert asked(bench, W1)[-1] == 2
    assert isinstance(bench.commit_step(2, [2]), Ok)
    assert isinstance(bench.commit_step(3, [3], version=2), Ok)


def test_an_engine_that_is_at_work_pulls_the_next_version_meanwhile_once() -> None:
    """Before, not a byte of it came until its last sample was done."""
    bench = ahead()
    assert asked(bench, W1) == [1]
    [old] = bench.leases(W1)
    held = (Held(old.sample_id, old.epoch, 0),)
    for progress in (1, 2):
        bench.say(W1, Heartbeat(held, progress, 1, weights_pause_s=2.5))
        bench.tick(1.0)
    [order] = bench.take(W1, PullAhead)
    assert (order.weights.version, order.weights.more) == (2, False)
    assert order.weights.sources
    assert asked(bench, W1) == [], "its samples are of version 1"
    finish_all(bench, W1, [old])
    assert asked(bench, W1) == [2]
    bench.say(W1, WeightsLoaded(2, root(2), chosen="delta: 2 s"))
    [run] = bench.router.core.runs.values()
    assert worker_counts.pauses(run) == [2.5]
    [new] = bench.leases(W1)
    bench.say(W1, Heartbeat((Held(new.sample_id, new.epoch, 0),), 3, 2))
    bench.tick(1.0)
    assert bench.take(W1, PullAhead) == []


def test_an_engine_that_pulls_ahead_hears_of_new_holders() -> None:
    """Else it would wait for one that fetches for its cluster, and not know where that one serves."""
    bench = ahead()
    bench.tick(1.0)
    assert len(bench.take(W1, PullAhead)) == 1
    asked(bench, W1)
    bench.hello(W2)
    bench.say(W2, Serving(2, root(2), engine(W2)))
    bench.tick(1.0)
    (more,) = bench.take(W1, UseWeights)
    assert (more.version, more.more, engine(W2) in more.sources) == (2, True, True)
    bench.say(W1, Serving(2, root(2), engine(W1)))
    bench.hello(W3)
    bench.say(W3, Serving(2, root(2), engine(W3)))
    bench.tick(1.0)
    assert bench.take(W1, UseWeights) == [], "it has all of it"


def test_what_an_engine_leaves_of_the_older_step_is_generated_with_the_older_version() -> None:
    bench = ahead()
    [old] = bench.leases(W1)
    bench.hello(W2)
    bench.say(W2, WeightsLoaded(2, root(2)))
    new = bench.leases(W2)
    bench.chunk(W1, old, 0, 3)
    bench.say(W1, GOODBYE)
    finish_all(bench, W2, new)
    assert asked(bench, W2) == [2, 1]
    bench.say(W2, WeightsLoaded(1, root(1)))
    [moved] = bench.leases(W2)
    assert (moved.sample_id, moved.version, len(moved.accepted) // 4) == (2, 1, 3)
    finish_all(bench, W2, [moved])
    assert isinstance(bench.commit_step(2, [2]), Ok)


def test_the_trainer_is_told_who_generated_a_sample() -> None:
    bench = started(n=1)
    [lease] = bench.join(W1)
    bench.chunk(W1, lease, 0, 3)
    bench.say(W1, GOODBYE)
    [moved] = bench.join(W2, kind="reserved")
    finish_all(bench, W2, [moved])
    [sample] = bench.take(1, GroupDone)[0].samples
    assert (sample.by_harvested, sample.by_reserved, sample.moves) == (3, 5, 1)


def test_a_version_that_is_generated_with_is_held_on_while_the_next_is_pulled_and_outlives_its_trainer() -> (
    None
):
    """Before, each engine that had the next version's bytes let go of its own: its samples could go on nowhere once the trainer left."""
    bench = started(n=1)
    finish_all(bench, W1, bench.join(W1))
    bench.hello(W2)
    bench.say(W2, WeightsLoaded(1, root(1)))
    bench.submit(step=2, version=1, groups=specs(2, 4))  # each engine has room for four
    assert isinstance(bench.commit_step(1, [1]), Ok)
    old = {conn: bench.leases(conn) for conn in (W1, W2)}
    assert all(old.values()), "both generate with version 1"
    for conn in old:
        bench.say(conn, Serving(1, root(1), engine(conn)))
    bench.publish(2, 1)
    bench.submit(step=3, version=2, groups=specs(1, 1))
    bench.tick(1.0)
    for conn in old:
        [order] = bench.take(conn, PullAhead)
        assert order.weights.version == 2
        for version in {1, 2} - {2, *order.weights.keep}:  # what an engine's store does once it has the bytes
            bench.say(conn, Serving(version, root(version), None))
        bench.say(conn, Serving(2, root(2), engine(conn)))
    bench.open(resume_step=1)  # the trainer left and another came: version 1 has no publisher any more
    bench.say(W2, GOODBYE)
    bench.hello(W3)
    [load] = bench.take(W3, UseWeights)
    assert (load.version, load.sources) == (1, (engine(W1),)), "what W2 left goes on with version 1"


def test_an_order_to_pull_ahead_that_did_not_reach_its_engine_is_repeated_and_another_leads_the_node_first() -> (
    None
):
    """Before, it was sent once, and the other engines of the node waited for bytes that this one never fetched."""
    bench = ahead()
    bench.tick(1.0)
    [old] = bench.leases(W1)
    assert len(bench.take(W1, PullAhead)) == 1
    bench.hello(W2, node="n11")
    [load] = bench.take(W2, UseWeights)
    assert (load.version, [source.last for source in load.sources]) == (2, [True]), (
        "W1 fetches it for the node"
    )
    held = (Held(old.sample_id, old.epoch, 0),)
    bench.say(W1, Heartbeat(held, 1, 1))
    bench.tick(0.5)
    assert bench.take(W2, UseWeights) == [], "its heartbeat may be older than the order"
    [ack] = bench.take(W1, HeartbeatAck)
    bench.say(W1, Heartbeat(held, 2, 1, heard=ack.number))
    bench.tick(0.75)
    [load] = bench.take(W2, UseWeights)
    assert (load.more, [source.last for source in load.sources]) == (True, [False]), "now W2 does"
    bench.tick(0.5)
    [order] = bench.take(W1, PullAhead)
    assert (order.weights.version, [source.last for source in order.weights.sources]) == (2, [True])
    bench.say(W1, Heartbeat(held, 3, 1, heard=ack.number, ahead=2))
    for progress in (4, 5):
        ack = bench.take(W1, HeartbeatAck)[-1]
        bench.say(W1, Heartbeat(held, progress, 1, heard=ack.number, ahead=2))
        bench.tick(1.0)
    assert bench.take(W1, PullAhead) == [], "it is here, or on its way"
    [ack] = bench.take(W1, HeartbeatAck)
    bench.say(W1, Heartbeat(held, 6, 1, heard=ack.number))
    bench.tick(1.25)
    assert len(bench.take(W1, PullAhead)) == 1, "its pull failed"
