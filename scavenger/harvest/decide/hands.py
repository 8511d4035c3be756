"""Which engines that their runs have too many of go on for another run, instead of ending while a new one starts. Pure.

    engines that leave because another run of ours is to have their GPUs   (`decide`, `division`)
      + runs that are to have one more, in their turn
      --same kind of engine, same job owner, a switch is not predicted to take longer than a start--> ChangeHands

Owns what may change hands with whom. What leaves for other users, reservations or time limits never does: those clauses come later and
stand before this one.

Boundary: from one run's surplus to another's deficit; how many engines each may have is decided before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from scavenger.harvest.decide.actions import ChangeHands, DrainAllocated, HandsRules, HarvestCode, OurJob
from scavenger.harvest.decide.drain import Drain
from scavenger.harvest.decide.free_capacity import nodes_of
from scavenger.harvest.decide.start import StartFacts, by_turn
from scavenger.policy.fleet_size import Demand

#: Why an engine leaves whose GPUs go to another run of ours.
_OURS_AGAIN = frozenset({HarvestCode.DIVISION, HarvestCode.OVER_SHARE, HarvestCode.NO_DEMAND})


@dataclass(frozen=True, slots=True)
class Handing:
    """`changes`: engines that go on for another run. `leaves`: those that leave all the same; the reason of one that another run could
    have used says why that run does not get it."""

    changes: Sequence[ChangeHands]
    leaves: Sequence[Drain]


def change_hands(
    facts: StartFacts, demand: Sequence[Demand], beyond: Sequence[Drain], staying: Sequence[OurJob]
) -> Handing:
    """Of the engines in `beyond`, which leave for what our runs want, those that go on for another run. `demand`: of all runs, those that
    want no engine included. `staying`: our jobs that are not in `beyond`, pending ones included."""
    rules = facts.limits.hands
    if rules is None:
        return Handing((), beyond)
    have = Counter(job.run_id for job in staying)
    missing = {want.run_id: facts.allotted[want.run_id] - have[want.run_id] for want in facts.wanted}
    engine_of = {want.run_id: want.hands for want in demand}
    jobs = {job.intent_id: job for job in facts.engines}
    held = Counter[str]()
    for job in facts.engines:
        held[job.owner] += job.gpus
    changes, leaves = list[ChangeHands](), list[Drain]()
    for action in beyond:
        if not isinstance(action, DrainAllocated) or action.code not in _OURS_AGAIN:
            leaves.append(action)
            continue
        job, obstacle = jobs[action.intent_id], ""
        for want in by_turn(facts.wanted, facts.turns):
            if missing[want.run_id] <= 0:
                continue
            if stop := _obstacle(job, want, engine_of, held, facts, rules):
                obstacle = obstacle or f"; it does not go on for run {want.run}: {stop}"
                continue
            missing[want.run_id] -= 1
            held[job.owner] -= job.gpus
            held[want.owner] += job.gpus
            why = f"it goes on for run {want.run}: {predicted(rules, want.run_id)}; {action.reason}"
            changes.append(ChangeHands(job.intent_id, want.run_id, want.run, want.owner, why))
            break
        else:
            leaves.append(replace(action, reason=action.reason + obstacle))
    return Handing(changes, leaves)


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
    switch_s, start_s = rules.switch_s.get(run_id), rules.start_s.get(run_id)
    switch = "not measured yet" if switch_s is None else f"{switch_s:.1f} s"
    start = "not measured yet" if start_s is None else f"{start_s:.1f} s"
    return f"to change hands is predicted to take {switch}, a new start {start}"


def _obstacle(
    job: OurJob,
    want: Demand,
    engine_of: Mapping[int, str],
    held: Counter[str],
    facts: StartFacts,
    rules: HandsRules,
) -> str:
    """Why this engine cannot go on for this run; "" where it can."""
    if slower(rules, want.run_id):
        return predicted(rules, want.run_id)
    mine = engine_of.get(job.run_id, "")
    if not mine or not want.hands:
        return "one of the two runs keeps its processes for itself (run.isolation), or is not open"
    if mine != want.hands:
        return "its engine is of another kind, and would be built anew"
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


def on_nodes_of(owner: str, node: str, facts: StartFacts) -> bool:
    """Whether the owner's engines may be on this node."""
    rule = next((rule for rule in facts.limits.owners if rule.owner == owner), None)
    only = nodes_of(rule, facts.view.nodes) if rule is not None else None
    return only is None or node in only
