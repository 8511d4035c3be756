"""An engine whose numbers are wrong is set aside: its samples move, it leaves, its node is charged, and its trainer is told."""

from __future__ import annotations

import json

import pytest

from scavenger.ledger import records as rec
from scavenger.policy.agreement import AgreementRules
from scavenger.protocol.messages import (
    Drain,
    Goodbye,
    Reply,
    ReportAgreement,
    Revoke,
    RunStopped,
    SpanSums,
    Suspects,
)
from scavenger.router.core.state import RouterLimits
from scavenger.router.core.transitions import WorkerStatus
from tests.router.harness import Bench, specs
from tests.router.moves import W1, W2, one_lease

ENGINES = (21, 22, 23, 24)
EVERY = AgreementRules(samples=4, tokens=16)


def sums(
    worker_id: int, first: int, *, count: int = 8, rate: float = 0.01, tokens: int = 10
) -> tuple[SpanSums, ...]:
    """Reports of `count` samples, of which none is like the other."""
    return tuple(
        SpanSums(first + i, worker_id, tokens, -tokens * rate / 4, tokens * rate * (1 + i % 3 / 10), 0.0)
        for i in range(count)
    )


def bench_with(limits: RouterLimits | None = None, n: int = 8, kind: str = "harvested") -> Bench:
    """Four engines with leases, of which number 1 is the first that joined."""
    bench = Bench(limits=limits or RouterLimits(agreement=EVERY))
    bench.open()
    bench.publish()
    bench.submit(groups=specs(1, n))
    for conn in ENGINES:
        bench.join(conn, kind=kind, slot=str(conn) if kind == "reserved" else "", node=f"n{conn}")
    return bench


def report(bench: Bench, wrong: int = 1, rate: float = 0.3) -> Suspects:
    spans = [one for w in (1, 2, 3, 4) for one in sums(w, 1000 * w, rate=rate if w == wrong else 0.01)]
    bench.call(ReportAgreement(1, tuple(spans)))
    found = [reply.body for reply in bench.take(1, Reply) if isinstance(reply.body, Suspects)]
    return found[-1]


def test_an_engine_that_disagrees_is_set_aside_and_its_samples_move() -> None:
    bench = bench_with()
    held = list(bench.router.core.workers[1].leases)
    assert len(held) == 4, "the first engine took what it could"
    suspects = report(bench).suspects
    assert [one.worker_id for one in suspects] == [1]
    assert suspects[0].node == "n21"
    assert "disagree" in suspects[0].reason
    assert bench.router.core.workers[1].status is WorkerStatus.DRAINING
    assert bench.router.core.workers[1].leases == {}
    assert {bench.sample(i).worker_id for i in held}.isdisjoint({1})
    assert all(bench.sample(i).failures == 0 for i in held), "they killed nobody"
    assert bench.take(21, Drain)
    assert {i for m in bench.take(21, Revoke) for i, _ in m.leases} == set(held)


def test_the_ledger_has_the_numbers_and_the_node_is_charged() -> None:
    bench = bench_with()
    report(bench)
    (decision,) = [r for r in bench.ledger.log if isinstance(r, rec.Decision) and r.policy == "agreement"]
    found = json.loads(decision.inputs)
    assert (decision.code, decision.action, decision.subject) == ("disagrees", "set-aside", "worker 1")
    assert found["node"] == "n21"
    assert found["absolute"] == pytest.approx(0.33, abs=0.02)
    assert found["usual"] == pytest.approx(0.011, abs=0.001)
    assert found["samples"] == 8
    (event,) = [e for e in bench.ledger.events if e.kind == "engine_set_aside"]
    assert event.reason == decision.reason
    assert [(one.intent_id, one.incarnation, one.number) for one in bench.router.core.condemned] == [
        ("job21", 0, 1)
    ]


def test_a_report_that_is_repeated_changes_nothing_and_names_it_again() -> None:
    bench = bench_with()
    first, events = report(bench), len(bench.ledger.events)
    assert report(bench) == first
    assert len(bench.ledger.events) == events


def test_an_engine_that_left_is_named_and_its_node_is_charged() -> None:
    bench = bench_with()
    bench.say(21, Goodbye("SIGTERM", True))
    assert [one.worker_id for one in report(bench).suspects] == [1]
    assert [one.intent_id for one in bench.router.core.condemned] == ["job21"]


def test_workers_of_another_run_and_engines_that_agree_are_left_alone() -> None:
    bench = bench_with()
    assert report(bench, wrong=0).suspects == ()
    bench.call(ReportAgreement(1, sums(77, 9000, rate=5.0)))
    assert not bench.router.core.condemned


@pytest.mark.parametrize("mode", ["report", "off"])
def test_what_is_only_to_be_reported_is_not_set_aside(mode: str) -> None:
    bench = bench_with(RouterLimits(agreement=EVERY, disagreement=mode))
    assert report(bench).suspects == ()
    assert bench.router.core.workers[1].status is WorkerStatus.READY
    told = [r.action for r in bench.ledger.log if isinstance(r, rec.Decision) and r.policy == "agreement"]
    assert told == (["report"] if mode == "report" else [])
    assert not bench.router.core.condemned


def test_a_reserved_engine_starts_again_once_and_then_the_run_stops() -> None:
    bench = bench_with(kind="reserved")
    report(bench)
    assert not bench.take(1, RunStopped)
    assert not bench.router.core.condemned, "the harvester has no say over the trainer's own nodes"
    bench.join(31, kind="reserved", slot="21", node="n21")  # worker 5, on the same GPU
    spans = [one for w in (2, 3, 4) for one in sums(w, 10_000 * w)] + list(sums(5, 90_000, rate=0.3))
    bench.call(ReportAgreement(2, tuple(spans)))
    (stopped,) = bench.take(1, RunStopped)
    assert "reserved engine 21 on node n21 is wrong again" in stopped.reason
    assert "GPU" in stopped.remedy


def test_a_sample_says_who_generated_it_also_after_a_restart() -> None:
    bench, lease = one_lease()
    bench.chunk(W1, lease, 0, 2)
    bench.chunk(W1, lease, 2, 1)
    bench.say(W1, Goodbye("SIGTERM", True))
    bench.join(W2)
    assert bench.sample(1).spans == [(1, 3)]
    bench.restart()
    assert bench.sample(1).spans == [(1, 3)]
