"""Which jobs to submit, keep, drain and cancel. Pure: `decide` is a function of its arguments and returns its reasons.

    stop, time limits, reservations, drained nodes, other users who wait  --> engines that leave, whatever the demand
    demand --share of max_engines and max_gpus--> allotment a run --less our jobs--> deficit (submit) or surplus (cancel, drain)
    other users' pending jobs, reservations, headroom --`free_capacity`--> where the deficit may go
    ages of what is idle, what an engine saves its run --`start_benefits`--> which of it is worth a start

Owns the rules. Knows nothing of how the cluster is observed, how jobs are submitted or what happened earlier: the tracker says what our
jobs are, `Limits` what is allowed now. Everything is sorted before it is decided on, so equal facts in another order decide the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from scavenger.cluster.model import ClusterView
from scavenger.harvest.decide import standby
from scavenger.harvest.decide.actions import (
    Action,
    Cancel,
    CancelPending,
    Code,
    Decision,
    DrainAllocated,
    DrainKind,
    Limits,
    OurJob,
    Release,
    Submit,
)
from scavenger.harvest.decide.drain import Drain, asked_to_leave, cancel_overdue
from scavenger.harvest.decide.other_users import NodeCapacity, QueueScan, scan_queue
from scavenger.harvest.decide.start_benefit import StartBenefits
from scavenger.harvest.decide.submit import Start, preempted_enough, submit
from scavenger.harvest.decide.voluntary_preemption import could_start
from scavenger.policy.demand import Demand

__all__ = [
    "Action",
    "Cancel",
    "CancelPending",
    "Code",
    "Decision",
    "DrainAllocated",
    "DrainKind",
    "Limits",
    "OurJob",
    "Release",
    "Submit",
]
__all__ += ["allot", "decide"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What one decision is made from: the arguments of `decide`, sorted, and what several clauses need of them.

    `jobs`: all of ours; `engines`: those that are no standby jobs, pending or running. `wanted`: demand for engines, by run id.
    `allotted`: engines a run may have. `closed`: why nothing may be harvested at all. `queue`, `capacity`: the view, read once.
    """

    view: ClusterView
    demand: Sequence[Demand]
    limits: Limits
    now: float
    jobs: list[OurJob]
    engines: list[OurJob]
    standby_jobs: list[OurJob]
    wanted: list[Demand]
    allotted: dict[int, int]
    closed: tuple[Code, str] | None
    queue: QueueScan
    capacity: NodeCapacity


def decide(
    view: ClusterView, demand: Sequence[Demand], jobs: Sequence[OurJob], limits: Limits, now: float
) -> Decision:
    """What to do about our jobs, given one poll. Each clause takes what no clause before it decided on.

    The clauses, in order: engines that were told to drain and did not; engines and standby jobs that no demand covers; engines
    that leave for other users, for a reservation or at their time limit; new jobs for the demand that is left. Nothing but the
    reason is returned when the poll is too old to act on.
    """
    if too_old := _too_old(view, limits, now):
        return Decision((), too_old, Code.STALE_VIEW)
    facts = _facts(view, demand, jobs, limits, now)
    actions: list[Action] = [*cancel_overdue(facts.jobs, limits, now)]
    actions += _beyond_demand(facts, _undecided(facts.engines, actions))
    actions += _standby_beyond_demand(facts, _undecided(facts.standby_jobs, actions))
    actions += _leave_for_others(facts, _undecided(facts.engines, actions))
    serving, benefits = _undecided(facts.engines, actions), None
    if facts.closed:
        code, why = facts.closed
    else:
        benefits = StartBenefits(facts.wanted, limits, now)
        more, code, why = _submit(facts, serving, _undecided(facts.standby_jobs, actions), benefits)
        actions += more
    if not facts.wanted and not facts.closed:
        code = Code.NO_DEMAND if demand else Code.NO_RUN
    return Decision(
        tuple(actions),
        _summary(facts, actions, serving, why),
        code,
        _could_start(facts),
        benefits.told() if benefits is not None else (),
    )


def _too_old(view: ClusterView, limits: Limits, now: float) -> str:
    age = now - view.observed_at
    if age <= limits.stale_s:
        return ""
    return f"the last observation is {age:.0f} s old (over {limits.stale_s:g} s): nothing is decided on it"


def _facts(
    view: ClusterView, demand: Sequence[Demand], jobs: Sequence[OurJob], limits: Limits, now: float
) -> Facts:
    ours = sorted(jobs, key=lambda job: job.intent_id)
    wanted = sorted((d for d in demand if d.engines > 0), key=lambda d: d.run_id)
    closed = _closed(limits)
    queue, capacity = scan_queue(view, frozenset(job.job_id for job in ours if job.job_id), limits, now)
    return Facts(
        view,
        demand,
        limits,
        now,
        jobs=ours,
        engines=[job for job in ours if not job.standby],
        standby_jobs=[job for job in ours if job.standby],
        wanted=wanted,
        allotted=allot(wanted, 0 if closed else limits.max_engines, limits.max_gpus),
        closed=closed,
        queue=queue,
        capacity=capacity,
    )


def _undecided(jobs: Sequence[OurJob], actions: Sequence[Action]) -> list[OurJob]:
    """Those that nobody asked to leave, before this decision or in it."""
    decided = {action.intent_id for action in actions if not isinstance(action, Submit)}
    return [job for job in jobs if job.leaving is DrainKind.NO and job.intent_id not in decided]


def _standby_beyond_demand(facts: Facts, standby_jobs: Sequence[OurJob]) -> list[CancelPending]:
    return standby.surplus(standby_jobs, facts.wanted, facts.closed, facts.limits)


def _leave_for_others(facts: Facts, staying: Sequence[OurJob]) -> list[Drain]:
    """Time limits, reservations and drained nodes first, then voluntary preemption for what other users still need."""
    return asked_to_leave(
        facts.view, facts.queue, facts.capacity, facts.engines, staying, facts.limits, facts.now
    )


def _submit(
    facts: Facts, serving: Sequence[OurJob], standby_jobs: Sequence[OurJob], benefits: StartBenefits
) -> tuple[list[Start], Code, str]:
    return submit(
        facts.view,
        facts.queue,
        facts.capacity,
        facts.wanted,
        facts.allotted,
        serving,
        facts.engines,
        standby_jobs,
        facts.limits,
        facts.now,
        benefits,
    )


def _could_start(facts: Facts) -> tuple[int, ...]:
    """Other users' pending jobs that would start if our engines were gone; none when we have no engine that runs."""
    if all(job.waits for job in facts.engines):
        return ()
    return could_start(facts.queue, facts.capacity, facts.limits)


def _closed(limits: Limits) -> tuple[Code, str] | None:
    """Why nothing may be harvested at all, whatever is idle: what is there leaves."""
    if limits.stop:
        return Code.STOPPED, limits.stop
    if limits.blind:
        return Code.HIDDEN, f"{limits.hidden}: a user who cannot preempt us could wait unseen"
    return None


def allot(demand: Sequence[Demand], most: int, most_gpus: int | None = None) -> dict[int, int]:
    """Share `most` engines and `most_gpus` GPUs among the runs: one engine each in turn, in the order of their ids, until nobody wants
    more or what is left is too small."""
    wanted = sorted(demand, key=lambda d: d.run_id)
    left = {d.run_id: d.engines for d in wanted}
    given = dict.fromkeys(left, 0)
    gpus = float("inf") if most_gpus is None else most_gpus
    while most > 0 and any(left.values()):
        for d in wanted:
            if d.gpus_per_engine > gpus:
                left[d.run_id] = 0
            elif left[d.run_id] and most > 0:
                left[d.run_id] -= 1
                given[d.run_id] += 1
                most, gpus = most - 1, gpus - d.gpus_per_engine
    return given


def _beyond_demand(facts: Facts, jobs: Sequence[OurJob]) -> list[Drain]:
    """What no demand covers, the least worth first: pending jobs before engines, idle engines before busy ones.

    And after too many preemptions whatever waits: a job that was preempted would start again, and be preempted again, by itself.
    """
    limits, allotted, closed = facts.limits, facts.allotted, facts.closed
    preempted = preempted_enough(limits)
    by_run = {d.run_id: d for d in facts.wanted}
    left = dict(allotted)
    pending: list[Drain] = []
    engines: list[Drain] = []
    for job in sorted(jobs, key=_worth):
        want = by_run.get(job.run_id)
        if want is not None and job.gpus == want.gpus_per_engine and left[job.run_id] > 0:
            left[job.run_id] -= 1
            if not (job.waits and preempted):
                continue
        if closed:
            code, why = closed
        elif job.waits and preempted:
            code, why = Code.PREEMPTIONS, preempted
        elif want is None:
            code, why = Code.NO_DEMAND, "its run has no demand"
        elif job.gpus != want.gpus_per_engine:
            code, why = (
                Code.WRONG_SIZE,
                f"it has {job.gpus} GPUs and run {want.run} wants {want.gpus_per_engine} per engine",
            )
        else:
            code, why = (
                Code.OVER_SHARE,
                f"run {want.run} may use {allotted[job.run_id]} engines: {want.reason}",
            )
        if job.waits:
            pending.append(CancelPending(job.intent_id, why, code))
        elif job.connected and not (closed and limits.stop_now):
            engines.append(DrainAllocated(job.intent_id, f"{why}; it holds {job.leases} leases", code))
        else:
            engines.append(
                Cancel(job.intent_id, why if job.connected else f"{why}; no engine of it is connected", code)
            )
    return [*reversed(pending), *reversed(engines)]


def _worth(job: OurJob) -> tuple[bool, bool, int, float, str]:
    """Sorts what to keep first: engines before pending jobs, the most leases, the least long idle; known jobs before lost submissions."""
    return (job.waits, job.job_id == 0, -job.leases, -job.idle_since, job.intent_id)


def _summary(facts: Facts, actions: Sequence[Action], serving: Sequence[OurJob], why: str) -> str:
    replaced = {action.intent_id for action in actions if isinstance(action, CancelPending)}
    kept = [job for job in serving if job.intent_id not in replaced]
    engines, pending = sum(not job.waits for job in kept), sum(job.waits for job in kept)
    total, limits = sum(d.engines for d in facts.wanted), facts.limits
    words = [f"{total} engines wanted, {engines} run, {pending} wait"]
    if not total:
        words += sorted({f"{d.run}: {d.reason}" for d in facts.demand}) or ["no run is open"]
    counts = Counter(type(action).__name__ for action in actions)
    words += [f"{name} {counts[name]}" for name in sorted(counts)]
    words += [why] if why else []
    words += [f"no voluntary preemption: {limits.hidden}"] if limits.hidden and not limits.blind else []
    return "; ".join(words)
