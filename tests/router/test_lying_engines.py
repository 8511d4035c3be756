"""What an engine that lies can do: its heartbeats teach the run's policy nothing that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from scavenger.errors import WireError
from scavenger.policy.forecast.speed import CurveFit
from scavenger.policy.interface import EngineProgress, Fact, Toggled
from scavenger.protocol.messages import (
    Heartbeat,
    Held,
    Lease,
    SampleFailed,
    WeightsFailed,
    decode_to_daemon,
    encode,
)
from scavenger.router.core import workers
from scavenger.router.core.events import JobGone
from scavenger.router.core.state import Worker
from tests.router.harness import Bench, started


def watched(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[Fact]:
    """The facts that the run's policy is told from now on."""
    told: list[Fact] = []
    policy: Any = bench.router.core.runs["r"].policy
    observe = policy.observe

    def listen(fact: Fact, now: float) -> None:
        told.append(fact)
        observe(fact, now)

    monkeypatch.setattr(policy, "observe", listen)
    return told


def engine(bench: Bench) -> Worker:
    (worker,) = bench.router.core.runs["r"].workers.values()
    return worker


def beat(bench: Bench, conn: int, lease: Lease, length: int, **more: Any) -> None:
    bench.now += 3
    bench.say(conn, Heartbeat((Held(lease.sample_id, lease.epoch, length),), length, 1, **more))


def test_a_length_is_believed_up_to_the_samples_budget_and_never_falls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = started(n=1, max_tokens=40)
    told = watched(bench, monkeypatch)
    (lease,) = bench.join(10)
    for length, reported in ((0, 0), (2**31 - 1, 40), (5, 40), (2**31 - 1, 40)):
        beat(bench, 10, lease, length)
        assert bench.sample(lease.sample_id).reported == reported
    assert [fact.tokens for fact in told if isinstance(fact, EngineProgress)] == [40], "and counts once"


def test_a_pace_that_no_engine_has_is_no_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MOST_SAMPLE_TOKENS_PER_S", 10.0)
    bench = started(n=1, max_tokens=60)
    told = watched(bench, monkeypatch)
    (lease,) = bench.join(10)
    for length in (0, 31, 61):
        beat(bench, 10, lease, length)
    assert [fact.tokens for fact in told if isinstance(fact, EngineProgress)] == [29]


def test_durations_are_bounded_and_only_a_reserved_engine_tells_of_wakings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind, wakings in (("harvested", []), ("reserved", [3600.0, 4.0])):
        bench = started(n=1, max_tokens=40)
        told = watched(bench, monkeypatch)
        (lease,) = bench.join(10, kind=kind)
        beat(bench, 10, lease, 0, wake_s=1e9, weights_pause_s=1e9)
        assert engine(bench).weights.pause_s == 3600.0
        beat(bench, 10, lease, 1, wake_s=4.0)
        assert [fact.seconds for fact in told if isinstance(fact, Toggled)] == wakings


def refused_by(bench: Bench, conn: int, intent: str, **how: Any) -> bool:
    """An engine of this key refuses a version. Whether the run is stopped."""
    bench.hello(conn, session=f"x{conn}", intent=intent, **how)
    bench.say(conn, WeightsFailed(2, "no", refused=True))
    return bool(bench.router.core.runs["r"].stopped)


def test_one_key_that_names_many_nodes_and_lives_refuses_a_version_once() -> None:
    bench = started()
    bench.join(10)
    bench.publish(2, 1)
    assert not any(refused_by(bench, 20 + n, "evil", node=f"m{n}", incarnation=n) for n in range(12))
    assert not refused_by(bench, 40, "second", node="m1")
    assert refused_by(bench, 41, "third", node="n3"), "three keys on three nodes do"


def test_lives_of_a_key_that_the_scheduler_ended_count_each() -> None:
    bench = started()
    bench.join(10)
    bench.publish(2, 1)
    for life in range(3):
        assert refused_by(bench, 20 + life, "job", node=f"n{life}", incarnation=life) == (life == 2)
        bench.handle(JobGone("job", life, "preempted", crashed=False))


def test_samples_that_one_key_fails_on_nodes_that_it_makes_up_fail_on_one_node() -> None:
    bench = started(n=1, poison_after=3)
    for n in range(5):
        for lease in bench.join(30 + n, session=f"y{n}", intent="evil", node=f"m{n}"):
            bench.say(30 + n, SampleFailed(lease.sample_id, lease.epoch, "bad"))
    (sample,) = bench.router.core.samples.values()
    assert sample.failures > 3
    assert sample.failed_nodes == {"m0"}
    assert not bench.router.core.runs["r"].stopped


@pytest.mark.parametrize("pace", [float("nan"), float("inf"), -1.0])
def test_a_pace_that_is_no_number_is_refused(pace: float) -> None:
    with pytest.raises(WireError):
        decode_to_daemon(encode(Heartbeat((), 0, 1, tokens_per_s=pace)))


def test_one_measurement_far_from_all_before_teaches_a_curve_nothing() -> None:
    fits = [CurveFit(), CurveFit()]
    for n in range(50):
        for fit in fits:
            fit.observe(8, 8000.0 + n, 0.02)
    fits[1].observe(1, 1000.0, 1 / 4999)
    found = [fit.curve().step_s(8, 8000.0) for fit in fits]
    assert found[1] == pytest.approx(found[0], rel=0.01)


def test_engines_that_became_faster_for_good_are_believed_in_the_end() -> None:
    fit = CurveFit()
    for _ in range(50):
        fit.observe(8, 8000.0, 0.02)
    for _ in range(1000):
        fit.observe(8, 8000.0, 0.0005)
    assert fit.curve().step_s(8, 8000.0) == pytest.approx(0.0005, rel=0.1)
