"""Random fleets under the harvester's whole decision, poll by poll: it divides, starts, drains, and has engines change hands.

Slurm is a simple one here: what is submitted starts at once, what drains is gone two polls later. `play(seed)` raises `AssertionError`:

    each decision   carries its division; starts nothing on GPUs that others hold, nor beyond a cap, an owner's GPUs or the division
    each change     between runs of one kind of engine and one size, of an engine that is there, to a run that is to have it
      or another kind  where that is predicted to be sooner than a start, says both figures, and no idle GPU gives that run an engine
    all of them     no run waits for its first engine beyond its bound
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from scavenger.harvest.decide import decide as decide_module
from scavenger.harvest.decide import hands
from scavenger.harvest.decide.actions import (
    Cancel,
    Caps,
    ChangeHands,
    DrainAllocated,
    DrainKind,
    HandsRules,
    HarvestDecision,
    HarvestLimits,
    OurJob,
    OwnerRule,
    Submit,
)
from scavenger.harvest.decide.decide import decide
from scavenger.policy.division import DivisionRules
from scavenger.policy.fleet_size import Demand
from tests.harvest.test_division import benefit
from tests.harvest.test_yielding import LIMITS, NOW, engine, listed
from tests.harvest.views import SHARED, view

POLL_S, GPUS = 30.0, 4
RULES = DivisionRules(floor=0.9, wait_s=300.0, hold_s=120.0, horizon_s=1800.0, margin=1.25)


@dataclass
class Harvested:
    """Our jobs on three nodes. `changed`, `left`: engines that changed hands, `built` of them for another model, and that drained."""

    limits: HarvestLimits
    demand: list[Demand]
    now: float = NOW
    jobs: dict[str, OurJob] = field(default_factory=dict)
    since: dict[int, float] = field(default_factory=dict)
    most_wait_s: float = 0.0
    number: int = 0
    changed: int = 0
    built: int = 0
    left: int = 0

    def poll(self) -> None:
        wanted = {want.run_id for want in self.demand if want.engines}
        running = {job.run_id for job in self.jobs.values()}
        self.since = {run: self.since.get(run, self.now) for run in wanted - running}
        self.most_wait_s = max([self.most_wait_s, *(self.now - at for at in self.since.values())])
        limits = replace(self.limits, waiting_since=tuple(sorted(self.since.items())))
        mine = list(self.jobs.values())
        decision = decide(view(self.now, [listed(job) for job in mine]), self.demand, mine, limits, self.now)
        self._check(decision)
        gone = [
            job for job in mine if job.drain_kind is not DrainKind.NO and self.now > job.asked_at + POLL_S
        ]
        for action in decision.actions:
            self._do(action)
        for job in gone:
            self.jobs.pop(job.intent_id, None)
        self.now += POLL_S

    def _do(self, action: object) -> None:
        match action:
            case Submit():
                self._start(action)
            case ChangeHands():
                self.changed += 1
                self.built += action.builds
                job = self.jobs[action.intent_id]
                self.jobs[job.intent_id] = replace(
                    job, run_id=action.run_id, owner=action.owner, started_at=self.now
                )
            case DrainAllocated():
                self.left += 1
                self.jobs[action.intent_id] = replace(
                    self.jobs[action.intent_id],
                    drain_kind=DrainKind.DRAINING,
                    asked_at=self.now,
                    why_draining=action.code,
                )
            case Cancel():
                self.jobs.pop(action.intent_id, None)
            case _:
                raise AssertionError(f"nothing waits here, and {action} was decided")

    def _free(self) -> dict[str, int]:
        used = Counter[str]()
        for job in self.jobs.values():
            used[job.node] += job.gpus
        return {name: GPUS - used[name] for name in SHARED}

    def _start(self, one: Submit) -> None:
        free = self._free()
        fits = [name for name in one.nodelist or SHARED if free[name] >= one.gpus and name not in one.exclude]
        assert fits, f"run {one.run} was to start an engine of {one.gpus} GPUs where {free} are free"
        self.number += 1
        job = engine(self.number, fits[0], gpus=one.gpus, since=self.now, owner=one.owner)
        self.jobs[job.intent_id] = replace(job, run_id=one.run_id, started_at=self.now)

    # ---- what must hold of a decision

    def _check(self, decision: HarvestDecision) -> None:
        by_run = {want.run_id: want for want in self.demand}
        after = dict(self.jobs)
        division = decision.division
        assert division is not None, "a decision without its division"
        rows = {row["run"] for row in division.rows}
        assert rows == {want.run for want in self.demand if want.engines}, (
            f"numbers of {sorted(map(str, rows))} alone"
        )
        told = [action.intent_id for action in decision.actions if hasattr(action, "intent_id")]
        assert len(told) == len(set(told)), f"an engine was told two things: {sorted(told)}"
        begun = Counter[int]()
        for action in decision.actions:
            assert action.reason, f"{action} without a reason"
            if isinstance(action, ChangeHands):
                self._change(action, by_run)
                after[action.intent_id] = replace(
                    after[action.intent_id], run_id=action.run_id, owner=action.owner
                )
            elif isinstance(action, Submit):
                begun[action.run_id] += 1
            elif isinstance(action, DrainAllocated):
                after[action.intent_id] = replace(after[action.intent_id], drain_kind=DrainKind.DRAINING)
        self._within(decision, by_run, after, begun)
        self._none_idle(decision, by_run, after, begun)

    def _change(self, action: ChangeHands, by_run: dict[int, Demand]) -> None:
        job, want = self.jobs[action.intent_id], by_run[action.run_id]
        before = by_run[job.run_id]
        kind = f"run {before.run} of {before.hands!r} and {job.gpus} GPUs to run {want.run} of {want.hands!r} and {want.gpus}"
        assert before.hands, f"an engine changes hands that is kept to itself: {kind}"
        assert job.gpus == want.gpus, f"an engine changes hands from {kind}"
        assert action.builds == (before.hands != want.hands), f"an engine changes hands as it is from {kind}"
        assert job.drain_kind is DrainKind.NO, f"an engine that leaves changes hands: {kind}"
        assert (action.owner, want.run in action.reason) == (want.owner, True), action.reason
        if action.builds:
            self._sooner(action, kind)
            assert (before.engine, bool(want.hands)) == (want.engine, True), f"{kind} changes hands anew"

    def _sooner(self, action: ChangeHands, kind: str) -> None:
        rules = self.limits.hands
        assert rules is not None
        run_id = action.run_id
        start_s = rules.start_s.get(run_id, 0.0)
        switch_s = rules.build_s.get(run_id, rules.ready_s.get(run_id, float("inf")))
        assert switch_s < start_s, (
            f"an engine changes hands, predicted to take {switch_s} s of {start_s} s: {kind}"
        )
        assert f"{switch_s:.1f} s" in action.reason, action.reason
        assert f"a new start {start_s:.1f} s" in action.reason, action.reason

    def _none_idle(
        self,
        decision: HarvestDecision,
        by_run: dict[int, Demand],
        after: dict[str, OurJob],
        begun: Counter[int],
    ) -> None:
        """Where an engine is built anew for a run, nothing is idle after all starts on which that run could have had one."""
        assert decision.division is not None
        free = self._free()
        for action in decision.actions:
            if isinstance(action, Submit):
                free[action.nodelist[0]] -= action.gpus
        gpus = sum(job.gpus for job in after.values()) + sum(by_run[run].gpus * n for run, n in begun.items())
        caps = self.limits.caps
        for run_id in {one.run_id for one in decision.actions if isinstance(one, ChangeHands) and one.builds}:
            want = by_run[run_id]
            full = len(after) + begun.total() >= caps.max_engines
            full = full or (caps.max_gpus is not None and gpus + want.gpus > caps.max_gpus)
            if full or want.owner_gpus is not None:
                continue
            kept = decision.division.kept
            idle = {name for name in free if free[name] >= want.gpus and kept.get(name, run_id) == run_id}
            assert not idle, f"an engine was built anew for run {run_id}, and GPUs are idle on {sorted(idle)}"

    def _within(
        self,
        decision: HarvestDecision,
        by_run: dict[int, Demand],
        after: dict[str, OurJob],
        begun: Counter[int],
    ) -> None:
        assert decision.division is not None
        have = Counter(job.run_id for job in after.values() if job.drain_kind is DrainKind.NO)
        got = {*begun, *(one.run_id for one in decision.actions if isinstance(one, ChangeHands))}
        for run_id in got:
            gets = decision.division.engines[run_id]
            assert have[run_id] + begun[run_id] <= gets, f"run {run_id} begins beyond the {gets} that it gets"
        gpus = Counter[str]()
        for job in after.values():
            gpus[job.owner] += job.gpus
        for run_id, count in begun.items():
            gpus[by_run[run_id].owner] += count * by_run[run_id].gpus
        for run_id in got:
            want = by_run[run_id]
            assert want.owner_gpus is None or gpus[want.owner] <= want.owner_gpus, (
                f"owner {want.owner} would have {gpus[want.owner]} GPUs, over its limit of {want.owner_gpus}"
            )
        if begun:
            caps, engines = self.limits.caps, len(after) + begun.total()
            assert engines <= caps.max_engines, f"{engines} engines, over the cap of {caps.max_engines}"
            assert caps.max_gpus is None or gpus.total() <= caps.max_gpus, (
                f"{gpus.total()} GPUs, over the cap"
            )


def _demand(draw: random.Random) -> list[Demand]:
    owners = "abc"[: draw.randint(1, 3)]
    most = {owner: draw.choice([None, None, 4, 6]) for owner in owners}
    kinds = ["one kind"] if draw.random() < 0.5 else ["one kind", "another", ""]
    sizes = [1] if draw.random() < 0.5 else [1, 2]
    found = []
    for run_id in range(1, 1 + draw.randint(2, 5)):
        owner, gpus = draw.choice(owners), draw.choice(sizes)
        known = benefit(draw.uniform(1.0, 95.0), draw.choice([1.0, 8.0, 64.0]), gpus)
        one = Demand(run_id, f"run{run_id}", 12, gpus, "useful", benefit=known, owner=owner)
        found.append(replace(one, owner_gpus=most[owner], hands=draw.choice(kinds)))
    return found


def _learned(draw: random.Random, runs: int) -> HandsRules:
    """What some of the runs took to start, and to change to from another model."""

    def some(least: float, most: float) -> dict[int, float]:
        return {run: draw.uniform(least, most) for run in range(1, 1 + runs) if draw.random() < 0.85}

    failed = {run: "one failed" for run in range(1, 1 + runs) if draw.random() < 0.1}
    return HandsRules(start_s=some(40, 80), build_s=some(10, 70), ready_s=some(20, 60), no_builds=failed)


def play(seed: int, polls: int = 60) -> Harvested:
    """Play one schedule."""
    draw = random.Random(seed)
    demand = _demand(draw)
    owners = tuple(OwnerRule(owner, draw.randint(1, 7)) for owner in sorted({want.owner for want in demand}))
    models = random.Random(seed + 1_000_000)  # of its own: the other schedules stay what they were
    if models.random() < 0.5:
        kinds = ["one kind", "another", "a third", ""]
        demand = [
            replace(want, hands=models.choice(kinds), engine=models.choice(["reference"] * 7 + ["vllm"]))
            for want in demand
        ]
    limits = replace(LIMITS, caps=Caps(12, 12), division=RULES, owners=owners)
    limits = replace(limits, hands=_learned(models, len(demand)))
    fleet = Harvested(limits, demand)
    for _ in range(polls):
        if models.random() < 0.1:  # one run ends, and another one begins
            ends, begins = models.sample(range(len(demand)), 2)
            demand[ends] = replace(demand[ends], engines=0)
            demand[begins] = replace(demand[begins], engines=12)
        if models.random() < 0.1:
            learned = _learned(models, len(demand))
            limits, fleet.limits = replace(limits, hands=learned), replace(fleet.limits, hands=learned)
        if draw.random() < 0.25:
            at = draw.randrange(len(demand))
            demand[at] = replace(demand[at], engines=draw.choice([0, 1, 4, 12]))
        if draw.random() < 0.05:
            caps = Caps(draw.choice([len(demand), 8, 12]), 12, draw.choice([None, 6, 10]))
            fleet.limits = replace(limits, caps=caps)
        fleet.poll()
    bound = RULES.wait_s + len(demand) * (RULES.hold_s + 4 * POLL_S)  # a drain takes two polls more
    limited = any(want.owner_gpus is not None for want in demand)
    assert limited or fleet.most_wait_s <= bound, f"a run waited {fleet.most_wait_s:.0f} s, over {bound:.0f}"
    return fleet


# ---------------------------------------------------------------- planted bugs


def changes_hands_with_anybody(patch: pytest.MonkeyPatch) -> None:
    """Kind and size of an engine do not matter, nor what its owner may have."""
    patch.setattr(hands, "_obstacle", lambda *_: "")


def owners_limit_not_counted(patch: pytest.MonkeyPatch) -> None:
    """An engine that changes hands is nobody's GPU more."""
    obstacle = hands._obstacle

    def lenient(job: OurJob, want: Demand, *rest: Any) -> str:
        return obstacle(job, replace(want, owner_gpus=None), *rest)

    patch.setattr(hands, "_obstacle", lenient)


def another_model_whatever_it_takes(patch: pytest.MonkeyPatch) -> None:
    """An engine is built anew for another run whatever the predicted seconds are."""
    patch.setattr(hands, "build_is_sooner", lambda *_: True)


def idle_gpus_not_asked(patch: pytest.MonkeyPatch) -> None:
    """An engine is built anew for another run though a new job could start on idle GPUs."""
    patch.setattr(decide_module, "_starts_on_idle", lambda *_: Counter[int]())


HANDS_PLANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, int]] = {
    "changes_hands_with_anybody": (changes_hands_with_anybody, "changes hands", 0),
    "owners_limit_not_counted": (owners_limit_not_counted, "over its limit of", 9),
    "another_model_whatever_it_takes": (another_model_whatever_it_takes, "predicted to take", 0),
    "idle_gpus_not_asked": (idle_gpus_not_asked, "was built anew .* GPUs are idle", 0),
}
