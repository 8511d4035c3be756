"""Which engines that their runs have too many of go on for another run, instead of ending while a new one starts. Pure.

    engines that leave because another run of ours is to have their GPUs   (`decide`, `division`)
      + runs that are to have one more, in their turn
      --same kind of engine, same job owner, a switch is not predicted to take longer than a start--> ChangeHands
    what is left of both
      --another model, no idle GPU for that run, a switch is predicted to take less than a start----> ChangeHands(builds)

An engine of the same kind stays as it is, one for another model is built anew in its process: what that saves is the scheduler's part of a
new start alone, and so it must be known to be less.

Owns what may change hands with whom. What leaves for other users, reservations or time limits never does: those clauses come later and
stand before this one.

Boundary: from one run's surplus to another's deficit; how many engines each may have is decided before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from scavenger.harvest.decide.actions import ChangeHands, DrainAllocated, HandsRules, HarvestCode, OurJob
from scavenger.harvest.decide.drain import Drain
from scavenger.harvest.decide.free_capacity import begins, nodes_of
from scavenger.harvest.decide.start import StartFacts, blackout_near, by_turn
from scavenger.policy.fleet_size import Demand

#: Why an engine leaves whose GPUs go to another run of ours.
_OURS_AGAIN = frozenset({HarvestCode.DIVISION, HarvestCode.OVER_SHARE, HarvestCode.NO_DEMAND})
#: Engines that idle GPUs give each run, once these changes of hands were ordered.
Starts = Callable[[Sequence[ChangeHands]], Mapping[int, int]]


@dataclass(frozen=True, slots=True)
class Handing:
    """`changes`: engines that go on for another run. `leaves`: those that leave all the same; the reason of one that another run could
    have used says why that run does not get it."""

    changes: Sequence[ChangeHands]
    leaves: Sequence[Drain]


def change_hands(
    facts: StartFacts,
    demand: Sequence[Demand],
    beyond: Sequence[Drain],
    staying: Sequence[OurJob],
    starts: Starts,
) -> Handing:
    """Of the engines in `beyond`, which leave for what our runs want, those that go on for another run. `demand`: of all runs, those that
    want no engine included. `staying`: our jobs that are not in `beyond`, pending ones included. `starts`: is asked once, and only where
    an engine could be built anew."""
    rules = facts.limits.hands
    if rules is None:
        return Handing((), beyond)
    handing = _Handing(facts, demand, staying, rules, starts)
    left = [action for action in beyond if not handing.goes_on(action, builds_too=False)]
    leaves = [handing.with_reason(action) for action in left if not handing.goes_on(action, builds_too=True)]
    return Handing(handing.changes, leaves)


class _Handing:
    """The changes of one decision so far, and what is missing besides."""

    def __init__(
        self,
        facts: StartFacts,
        demand: Sequence[Demand],
        staying: Sequence[OurJob],
        rules: HandsRules,
        starts: Starts,
    ) -> None:
        have = Counter(job.run_id for job in staying)
        self._facts, self._rules = facts, rules
        self._missing = {
            want.run_id: facts.allotted[want.run_id] - have[want.run_id] for want in facts.wanted
        }
        self._of = {want.run_id: want for want in demand}
        self._jobs = {job.intent_id: job for job in facts.engines}
        self._held = Counter[str]()
        for job in facts.engines:
            self._held[job.owner] += job.gpus
        self._tried = set[int]()  # runs for which an engine is built anew for the first time
        self._starts = starts
        self._idle: Mapping[int, int] | None = None  # engines that idle GPUs give each run, once asked
        self.changes = list[ChangeHands]()

    def goes_on(self, action: Drain, *, builds_too: bool) -> bool:
        """Whether this engine goes on for another run, which `changes` has then. `builds_too`: also where it is built anew."""
        for job, want in self._pairs(action):
            builds = self._builds(job, want)
            if (builds and not builds_too) or self._why_not(job, want):
                continue
            self._missing[want.run_id] -= 1
            self._held[job.owner] -= job.gpus
            self._held[want.owner] += job.gpus
            way = predicted(self._rules, want.run_id)
            if builds:
                way = f"its engine is built anew there, and {predicted_build(self._rules, want.run_id)}; no idle GPU gives it one"
                self._tried |= set() if want.run_id in self._rules.build_s else {want.run_id}
            why = f"it goes on for run {want.run}: {way}; {action.reason}"
            self.changes.append(
                ChangeHands(job.intent_id, want.run_id, want.run, want.owner, why, builds=builds)
            )
            return True
        return False

    def with_reason(self, action: Drain) -> Drain:
        """With the reason why the first run in turn that could have used this engine does not get it."""
        for job, want in self._pairs(action):
            why = f"; it does not go on for run {want.run}: {self._why_not(job, want)}"
            return replace(action, reason=action.reason + why)
        return action

    def _pairs(self, action: Drain) -> list[tuple[OurJob, Demand]]:
        """The engine, with each run in its turn that is to have one more."""
        if not isinstance(action, DrainAllocated) or action.code not in _OURS_AGAIN:
            return []
        job, facts = self._jobs[action.intent_id], self._facts
        return [(job, want) for want in by_turn(facts.wanted, facts.turns) if self._missing[want.run_id] > 0]

    def _builds(self, job: OurJob, want: Demand) -> bool:
        mine = self._of.get(job.run_id)
        return mine is not None and mine.hands != want.hands

    def _why_not(self, job: OurJob, want: Demand) -> str:
        if why := _obstacle(job, want, self._of, self._held, self._facts, self._rules):
            return why
        if not self._builds(job, want):
            return ""
        if want.run_id in self._tried:
            return f"{ANOTHER}, and the first one that is built anew for that run shows what it takes"
        if self._idle is None:
            self._idle = self._starts(self.changes)
        idle = self._missing[want.run_id] <= self._idle.get(want.run_id, 0)
        return f"{ANOTHER}, and idle GPUs give that run an engine" if idle else ""


def handed(jobs: Iterable[OurJob], changes: Sequence[ChangeHands]) -> list[OurJob]:
    """The jobs as they are once these changes of hands were ordered."""
    to = {change.intent_id: change for change in changes}
    return [
        replace(job, run_id=to[job.intent_id].run_id, owner=to[job.intent_id].owner)
        if job.intent_id in to
        else job
        for job in jobs
    ]


def slower(rules: HandsRules, run_id: int) -> bool:
    """Whether a change of hands to this run is predicted to take longer than to end the engine and start another."""
    switch_s, start_s = rules.switch_s.get(run_id), rules.start_s.get(run_id)
    return switch_s is not None and start_s is not None and switch_s > start_s


def predicted(rules: HandsRules, run_id: int) -> str:
    """The predicted seconds until an engine has weights of this run, by either way."""
    switch = _seconds(rules.switch_s.get(run_id))
    return f"to change hands is predicted to take {switch}, a new start {_seconds(rules.start_s.get(run_id))}"


def build_s(rules: HandsRules, run_id: int) -> float | None:
    """Predicted seconds of a change of hands for which the engine is built anew: as measured, else what a new start takes once its engine
    has registered. None: neither is known."""
    return rules.build_s.get(run_id, rules.ready_s.get(run_id))


def build_is_sooner(rules: HandsRules, run_id: int) -> bool:
    """Whether an engine that is built anew for this run is predicted to have its weights sooner than one of a new job. Not where one of the
    two is unknown: a new job is what measures it."""
    switch_s, start_s = build_s(rules, run_id), rules.start_s.get(run_id)
    return switch_s is not None and start_s is not None and switch_s < start_s


def predicted_build(rules: HandsRules, run_id: int) -> str:
    """The predicted seconds of both ways, and what the first one is made of."""
    switch = _seconds(build_s(rules, run_id))
    if run_id not in rules.build_s and run_id in rules.ready_s:
        switch += " (none was measured: a new start without scheduler and job start)"
    return f"to change hands is predicted to take {switch}, a new start {_seconds(rules.start_s.get(run_id))}"


def _seconds(known: float | None) -> str:
    return "not measured yet" if known is None else f"{known:.1f} s"


#: Begins the reason why an engine is not built anew for another run.
ANOTHER = "its engine is of another kind, and would be built anew"


def _obstacle(
    job: OurJob,
    want: Demand,
    demand: Mapping[int, Demand],
    held: Counter[str],
    facts: StartFacts,
    rules: HandsRules,
) -> str:
    """Why this engine cannot go on for this run, whatever is idle; "" where it can. `demand`: by run."""
    mine = demand.get(job.run_id)
    if mine is None or not mine.hands or not want.hands:
        return "one of the two runs keeps its processes for itself (run.isolation), or is not open"
    if why := rules.stuck.get(job.run_id):
        return why
    if mine.hands != want.hands:
        if why := _no_build(job, mine, want, facts, rules):
            return f"{ANOTHER}: {why}"
    elif slower(rules, want.run_id):
        return predicted(rules, want.run_id)
    if (job.gpus, job.n_nodes) != (want.gpus, 1) or want.nodes_per_engine != 1:
        return "the sizes differ"
    if not job.connected or job.changing_since:
        return "its engine is not there, or changes hands already"
    if rules.by_owner and job.owner != want.owner:
        return "its job is accounted to the owner of its run"
    others = want.owner != job.owner
    if others and want.owner_gpus is not None and held[want.owner] + job.gpus > want.owner_gpus:
        return "owners.max_gpus"
    if facts.kept.get(job.node, want.run_id) != want.run_id:
        return "its node is kept for another run"
    return "" if on_nodes_of(want.owner, job.node, facts) else "its owner may not use this node"


def _no_build(job: OurJob, mine: Demand, want: Demand, facts: StartFacts, rules: HandsRules) -> str:
    """Why this engine of run `mine` is not built anew for run `want`."""
    if not rules.models:
        return "harvest.change_models is off"
    if mine.engine != want.engine:
        return f"engine.name is {mine.engine!r} and {want.engine!r}"
    if why := rules.no_builds.get(want.run_id):
        return why
    if not build_is_sooner(rules, want.run_id):
        return predicted_build(rules, want.run_id)
    return blackout_near(facts.limits, facts.now) or _leaves_before(
        job, build_s(rules, want.run_id) or 0.0, facts
    )


def _leaves_before(job: OurJob, ready_s: float, facts: StartFacts) -> str:
    """Why an engine leaves before it is ready for another run in so many seconds: it would be built for nothing. "" where it stays."""
    now, limits = facts.now, facts.limits
    listed = facts.queue.ours.get(job.job_id)
    before_s = ready_s + limits.job.drain_before_s
    ends_s = listed.end_time - now if listed is not None and listed.end_time > 0 else float("inf")
    if ends_s <= before_s:
        return f"its time limit comes in {max(0.0, ends_s):.0f} s"
    begins_s = begins(facts.view, now).get(job.node, float("inf")) - now
    return f"a reservation begins on {job.node} in {max(0.0, begins_s):.0f} s" if begins_s <= before_s else ""


def on_nodes_of(owner: str, node: str, facts: StartFacts) -> bool:
    """Whether the owner's engines may be on this node."""
    rule = next((rule for rule in facts.limits.owners if rule.owner == owner), None)
    only = nodes_of(rule, facts.view.nodes) if rule is not None else None
    return only is None or node in only
