"""The seam of decisions: what a policy is asked, what it may see, and that no answer of it can break the core."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from scavenger.ledger import records as rec
from scavenger.policy.interface import (
    EngineProgress,
    Fact,
    RunView,
    SampleFinished,
    SampleMove,
    SamplePlacement,
    Standard,
    StepSubmitted,
    StepView,
    WindowDecision,
    WorkerJoined,
    WorkerLost,
    WorkerReady,
)
from scavenger.protocol.messages import (
    Assign,
    Fleet,
    Goodbye,
    Heartbeat,
    Held,
    Lease,
    Revoke,
    SetReserved,
    Yield,
    Yielded,
)
from scavenger.router.core.events import CoreTick
from tests.plain_view import PlainView
from tests.router.harness import Bench, specs


class ScriptedPolicy(Standard):
    """Does what the test says, and remembers what it saw."""

    every_s = 2.0

    def __init__(self) -> None:
        self.moves: list[SampleMove] = []
        self.placed: list[SamplePlacement] | None = None
        self.decision: WindowDecision | None = None
        self.facts: list[Fact] = []
        self.asked: list[str] = []

    def place(self, view: RunView, now: float) -> Sequence[SamplePlacement]:
        return super().place(view, now) if self.placed is None else self.placed

    def rebalance(self, view: RunView, now: float) -> Sequence[SampleMove]:
        self.asked.append("rebalance")
        moves, self.moves = self.moves, []
        return moves

    def window(self, view: RunView, now: float) -> WindowDecision | None:
        self.asked.append("window")
        return self.decision

    def observe(self, fact: Fact, now: float) -> None:
        self.facts.append(fact)


@pytest.fixture
def policy() -> ScriptedPolicy:
    return ScriptedPolicy()


@pytest.fixture
def bench(policy: ScriptedPolicy) -> Bench:
    """Worker 1 at connection 11 with four samples of step 1, and worker 2 at 12 with two."""
    bench = Bench()
    bench.router.core.new_policy = lambda _run: policy
    bench.open()
    bench.publish()
    bench.submit(groups=specs(3))
    bench.join(11)
    bench.join(12)
    return bench


@pytest.fixture
def lease(bench: Bench) -> Lease:
    """Sample 1, at worker 1."""
    sample = bench.sample(1)
    assert sample.worker_id == 1
    return Lease(1, sample.epoch, 1, b"", b"", sample.group.sampling, 7, sample.key)


def held_by(bench: Bench, worker_id: int) -> list[int]:
    return sorted(bench.router.core.workers[worker_id].leases)


def settled(bench: Bench, policy: ScriptedPolicy, moves: list[SampleMove]) -> None:
    """The policy's moves are asked for at the next tick that is due."""
    policy.moves = moves
    bench.now += policy.every_s
    bench.handle(CoreTick())


def decisions(bench: Bench, name: str) -> list[rec.Decision]:
    return [r for r in bench.ledger.log if isinstance(r, rec.Decision) and r.policy == name]


def test_a_move_takes_all_tokens_along_and_nothing_is_generated_twice(
    bench: Bench, policy: ScriptedPolicy, lease: Lease
) -> None:
    settled(bench, policy, [SampleMove(lease.sample_id, 1, 2, "b is faster")])
    asked = bench.take(11, Yield)
    assert [m.leases for m in asked] == [((lease.sample_id, lease.epoch),)]
    assert lease.sample_id in held_by(bench, 1), "it generates until the worker has given it back"
    bench.take(12, Assign)
    bench.chunk(11, lease, 0, 3)
    bench.say(11, Yielded((Held(lease.sample_id, lease.epoch, 3),)))
    assert bench.take(11, Revoke)[-1].leases == ((lease.sample_id, lease.epoch),)
    moved = bench.leases(12)
    assert [(x.sample_id, x.epoch, len(x.accepted) // 4) for x in moved] == [
        (lease.sample_id, lease.epoch + 1, 3)
    ]
    ended = [r for r in bench.ledger.log if isinstance(r, rec.LeaseEnded)]
    assert [(r.reason, r.regenerated) for r in ended] == [("moved: b is faster", 0)]
    assert [d.reason for d in decisions(bench, "rebalance")] == ["b is faster"]


def test_what_is_given_back_before_its_last_tokens_came_is_not_taken_yet(
    bench: Bench, policy: ScriptedPolicy, lease: Lease
) -> None:
    settled(bench, policy, [SampleMove(lease.sample_id, 1, 2, "why not")])
    bench.say(11, Yielded((Held(lease.sample_id, lease.epoch, 3),)))
    assert lease.sample_id in held_by(bench, 1)
    bench.chunk(11, lease, 0, 3)
    bench.say(11, Yielded((Held(lease.sample_id, lease.epoch, 3),)))
    assert lease.sample_id in held_by(bench, 2)


def test_a_lost_request_to_give_back_is_repeated_at_a_heartbeat(bench: Bench, policy: ScriptedPolicy) -> None:
    sample_id = held_by(bench, 1)[0]
    settled(bench, policy, [SampleMove(sample_id, 1, 0, "to the queue")])
    bench.take(11, Yield)
    bench.now += 2.0
    held = tuple(Held(i, 1, 0) for i in held_by(bench, 1))
    bench.say(11, Heartbeat(held, 0, 1))
    assert [m.leases for m in bench.take(11, Yield)] == [((sample_id, 1),)]


def test_a_sample_that_ends_while_it_is_asked_for_stays_where_it_ended(
    bench: Bench, policy: ScriptedPolicy, lease: Lease
) -> None:
    settled(bench, policy, [SampleMove(lease.sample_id, 1, 2, "b")])
    bench.chunk(11, lease, 0, 3, "stop")
    bench.say(11, Yielded((Held(lease.sample_id, lease.epoch, 3),)))
    assert bench.sample(lease.sample_id).done
    assert bench.take(11, Revoke) == []


def test_moves_that_cannot_be_made_are_dropped_and_counted(bench: Bench, policy: ScriptedPolicy) -> None:
    here, there = held_by(bench, 1), held_by(bench, 2)
    nonsense = [
        SampleMove(there[0], 1, 2, "not its own"),
        SampleMove(here[0], 1, 9, "no such worker"),
        SampleMove(here[0], 1, 1, "to itself"),
        SampleMove(999, 1, 2, "no such sample"),
        SampleMove(here[0], 7, 2, "from nobody"),
    ]
    settled(bench, policy, nonsense)
    assert bench.router.core.counters["advice_dropped"] == len(nonsense)
    assert (held_by(bench, 1), held_by(bench, 2)) == (here, there)


def test_placements_that_cannot_be_made_are_dropped_and_counted(policy: ScriptedPolicy) -> None:
    bench = Bench()
    bench.router.core.new_policy = lambda _run: policy
    bench.open()
    bench.publish()
    bench.submit(groups=specs(3))  # six samples; an engine takes four
    policy.placed = [SamplePlacement(i, 1) for i in (1, 1, 2, 3, 4, 5, 99)] + [SamplePlacement(6, 77)]
    assert sorted(lease.sample_id for lease in bench.join(11)) == [1, 2, 3, 4]
    assert bench.router.core.counters["advice_dropped"] >= 4


def test_the_window_is_told_to_the_trainer_when_it_changes_and_recorded(
    bench: Bench, policy: ScriptedPolicy
) -> None:
    bench.attach()
    bench.take(1, Fleet)
    policy.decision = WindowDecision(True, "harvested engines carry the rest", again_at=bench.now + 3.0)
    bench.call(SetReserved(False))
    assert [(m.window, m.window_reason) for m in bench.take(1, Fleet)] == [
        ("close", "harvested engines carry the rest")
    ]
    policy.asked.clear()
    bench.tick(2.9)
    assert "window" not in policy.asked
    bench.tick(0.2)
    assert "window" in policy.asked, "asked again when it wanted to be"
    assert bench.take(1, Fleet) == [], "nothing new"
    assert [(d.action, d.reason) for d in decisions(bench, "window")] == [
        ("close", "harvested engines carry the rest")
    ]


def test_a_window_that_is_kept_open_is_told_to_the_trainer_and_recorded_as_such(
    bench: Bench, policy: ScriptedPolicy
) -> None:
    bench.attach()
    bench.take(1, Fleet)
    policy.decision = WindowDecision(False, "they generate", again_at=bench.now + 3.0)
    bench.call(SetReserved(False))
    policy.decision = WindowDecision(False, "for the next step", again_at=bench.now + 3.0, keep_open=True)
    bench.tick(3.1)
    told = [(m.window, m.keep_open, m.window_reason) for m in bench.take(1, Fleet) if m.window]
    assert told == [("open", False, "they generate"), ("open", True, "for the next step")]
    policy.decision = WindowDecision(True, "it is there", again_at=bench.now + 30.0, keep_open=True)
    bench.tick(3.1)
    assert {(m.window, m.keep_open) for m in bench.take(1, Fleet)} == {("close", False)}
    assert [(d.action, d.code) for d in decisions(bench, "window")] == [
        ("open", "opened"),
        ("open", "kept_open"),
        ("close", "closed"),
    ]


def test_chunks_ask_nobody_for_moves_or_the_window(
    bench: Bench, policy: ScriptedPolicy, lease: Lease
) -> None:
    policy.asked.clear()
    bench.chunk(11, lease, 0, 3)
    bench.chunk(11, lease, 3, 1, "stop")
    assert policy.asked == []


def test_a_policy_sees_lengths_so_far_and_engines_as_they_were_measured(
    bench: Bench, policy: ScriptedPolicy, lease: Lease
) -> None:
    seen: list[RunView] = []
    policy.place = lambda view, now: seen.append(view) or ()  # type: ignore[method-assign, func-returns-value]
    bench.say(11, Heartbeat(tuple(Held(i, 1, 0) for i in (1, 2, 3, 4)), 0, 1))
    bench.now += 2.0
    bench.say(11, Heartbeat((Held(1, 1, 6), Held(2, 1, 6), Held(3, 1, 6), Held(4, 1, 5)), 1, 1))
    progress = [f for f in policy.facts if isinstance(f, EngineProgress)]
    assert [(f.batch, f.tokens, f.seconds, f.context) for f in progress] == [(4, 23, 2.0, 4 * 3 + 23 / 2)]
    bench.submit(step=1, groups=specs(4))
    sample = next(s for s in seen[-1].samples if s.id == lease.sample_id)
    assert (sample.accepted, sample.length, sample.worker_id, sample.cap, sample.done) == (0, 6, 1, 8, False)
    assert [(w.id, w.kind, w.leases, w.tokens_per_s, w.serves) for w in seen[-1].workers] == [
        (1, "harvested", 4, 11.5, True),
        (2, "harvested", 2, 0.0, True),
    ]
    assert [s.id for s in seen[-1].queued] == [7, 8]
    assert (seen[-1].step.samples, seen[-1].step.finished, seen[-1].step.groups) == (8, 0, 4)


@pytest.mark.parametrize(
    ("gained", "measured"), [((8, 8, 7, 7), True), ((8, 8, 8, 0), False), ((8, 2, 8, 8), False)]
)
def test_an_engine_is_measured_only_where_all_its_samples_ran(
    bench: Bench, policy: ScriptedPolicy, lease: Lease, gained: tuple[int, ...], measured: bool
) -> None:
    """One that is prefilled meanwhile, or that waits for room in the KV cache, makes no engine slow for four samples."""
    (run,) = bench.router.core.runs.values()
    run.engine = replace(run.engine, speculation="none")
    bench.say(11, Heartbeat(tuple(Held(i, 1, 0) for i in (1, 2, 3, 4)), 0, 1))
    bench.now += 2.0
    bench.say(11, Heartbeat(tuple(Held(i, 1, length) for i, length in enumerate(gained, 1)), 1, 1))
    assert bool([f for f in policy.facts if isinstance(f, EngineProgress)]) is measured


@pytest.mark.parametrize(("gained", "measured"), [((4, 7, 5, 3), True), ((7, 1, 0, 0), False)])
def test_an_engine_that_speculates_is_measured_although_its_samples_gain_unequally(
    bench: Bench, policy: ScriptedPolicy, lease: Lease, gained: tuple[int, ...], measured: bool
) -> None:
    """Each gains what its siblings know of it. Otherwise such an engine's speed would never be known."""
    (run,) = bench.router.core.runs.values()
    run.engine = replace(run.engine, speculation="group")
    bench.say(11, Heartbeat(tuple(Held(i, 1, 0) for i in (1, 2, 3, 4)), 0, 1))
    bench.now += 2.0
    bench.say(11, Heartbeat(tuple(Held(i, 1, length) for i, length in enumerate(gained, 1)), 1, 1))
    assert bool([f for f in policy.facts if isinstance(f, EngineProgress)]) is measured


def test_two_beats_that_arrive_together_measure_nothing(
    bench: Bench, policy: ScriptedPolicy, lease: Lease
) -> None:
    """The first of them was late: by the second alone the engine made in a tenth of a second what takes it one."""
    for seconds, length in ((1.0, 1), (1.9, 2), (0.1, 3), (1.0, 4)):
        bench.now += seconds
        bench.say(11, Heartbeat(tuple(Held(i, 1, length) for i in (1, 2, 3, 4)), length, 1))
    progress = [round(f.seconds, 3) for f in policy.facts if isinstance(f, EngineProgress)]
    assert 1.9 in progress
    assert 0.1 not in progress


def test_a_policy_hears_of_what_it_may_learn_from(bench: Bench, policy: ScriptedPolicy, lease: Lease) -> None:
    bench.chunk(11, lease, 0, 8)
    bench.say(12, Goodbye("SIGTERM", notice=True))
    kinds = [type(fact) for fact in policy.facts]
    assert kinds == [
        StepSubmitted,
        WorkerJoined,
        WorkerReady,
        WorkerJoined,
        WorkerReady,
        SampleFinished,
        WorkerLost,
    ]
    finished = next(f for f in policy.facts if isinstance(f, SampleFinished))
    assert (finished.length, finished.capped, finished.kind) == (8, True, "harvested")
    assert [f.preempted for f in policy.facts if isinstance(f, WorkerLost)] == [True]


def test_the_standard_policy_is_the_evenly_filled_fleet() -> None:
    view = PlainView(step=StepView(samples=100), max_batch=16, max_engines=7)
    assert Standard().engines(view, 0.0) == (7, "100 samples a step can use 25 engines, run.max_engines = 7")
    assert Standard().window(view, 0.0) is None
    assert Standard().every_s == math.inf
