"""`algorithm.kv = "keep"`: a sample that its engine gives back to load newer weights goes on there, where its KV cache is."""

from __future__ import annotations

import pytest

from scavenger.ledger import records as rec
from scavenger.protocol.messages import (
    Goodbye,
    Heartbeat,
    Held,
    Lease,
    UseWeights,
    WeightsLoaded,
    Yield,
    Yielded,
)
from scavenger.router.core import returns, staleness
from tests.router.harness import Bench, root, specs
from tests.router.moves import W1, W2, finish_all


def beats(bench: Bench, seconds: float, **loaded: int) -> None:
    """`loaded`: of w1 and w2, the version that each has loaded."""
    for second in range(int(seconds)):
        for conn, version in zip((W1, W2), loaded.values(), strict=False):
            bench.say(conn, Heartbeat((), second, version))
        bench.tick(1.0)


def switching(kv: str = "keep") -> tuple[Bench, Lease]:
    """W1 has given sample 2 back, with three tokens, and loads version 2; W2 has it loaded and its slots free."""
    bench = Bench()
    bench.open(ahead=1, kv=kv)
    bench.publish()
    for step in (1, 2):
        bench.submit(step=step, groups=specs(1, 1))
    first, ahead = bench.join(W1)
    bench.chunk(W1, ahead, 0, 3)
    finish_all(bench, W1, [first])
    bench.commit_step(1, [1])
    bench.publish(2, 1)
    beats(bench, staleness.PULL_S + 2, w1=1)
    [order] = bench.take(W1, Yield)
    assert order.leases == ((2, 1),)
    bench.hello(W2)
    bench.say(W2, WeightsLoaded(2, root(2)))
    bench.say(W1, Yielded((Held(2, 1, 3),)))
    assert [order.version for order in bench.take(W1, UseWeights)][-1] == 2
    return bench, ahead


def test_it_returns_to_its_engine_though_another_has_a_free_slot_and_names_whose_entries_it_may_use() -> None:
    bench, ahead = switching()
    assert ahead.begun_version == 1, "it was begun with version 1"
    assert bench.leases(W2) == []
    bench.say(W1, WeightsLoaded(2, root(2)))
    [lease] = bench.leases(W1)
    assert (lease.sample_id, lease.version, len(lease.accepted) // 4, lease.begun_version) == (2, 2, 3, 1)
    assert bench.router.core.runs["r"].returning == {}
    why = [record.reason for record in bench.ledger.log if isinstance(record, rec.Decision)]
    assert "begun on worker 1, which has its KV cache and loaded version 2" in why


def test_without_it_the_first_free_slot_takes_it() -> None:
    bench, ahead = switching("recompute")
    [lease] = bench.leases(W2)
    assert (lease.sample_id, lease.version, ahead.begun_version, lease.begun_version) == (2, 2, -1, -1)


@pytest.mark.parametrize("ended", ["goodbye", "late"])
def test_nobody_waits_for_an_engine_that_is_gone_or_does_not_come_to_an_end(ended: str) -> None:
    bench, _ = switching()
    if ended == "goodbye":
        bench.say(W1, Goodbye("preempted", True))
    else:
        beats(bench, returns.RETURN_S + 1, w1=1, w2=2)
    assert [(lease.sample_id, lease.version) for lease in bench.leases(W2)] == [(2, 2)]
    if ended == "late":
        bench.say(W1, WeightsLoaded(2, root(2)))
        assert bench.leases(W1) == [], "it came too late: the sample is elsewhere"


def test_an_evaluation_uses_no_entries_but_those_of_its_version() -> None:
    bench = Bench()
    bench.open(ahead=1, kv="keep")
    bench.publish()
    bench.submit(step=1, purpose="eval", groups=specs(1, 1))
    [lease] = bench.join(W1)
    assert lease.begun_version == -1


def test_a_daemon_that_restarts_knows_that_caches_are_kept() -> None:
    bench, _ = switching()
    bench.restart()
    run = bench.router.core.runs["r"]
    assert (run.settings.keeps_cache, run.returning) == (True, {})


def test_an_evaluation_goes_before_what_returns() -> None:
    bench, _ = switching()
    bench.submit(step=1, version=2, purpose="eval", groups=specs(4, 1))
    bench.say(W1, WeightsLoaded(2, root(2)))
    leases = [lease for conn in (W1, W2) for lease in bench.leases(conn)]
    assert sorted(lease.key.purpose for lease in leases) == ["eval"] * 4, (
        "four samples of it, and none in advance"
    )
