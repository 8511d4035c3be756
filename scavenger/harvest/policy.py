"""Which jobs to submit, keep, give back and cancel. Pure: `decide` is a function of its arguments and returns its reasons.

    stop, time limits, reservations, drained nodes, others who wait  --> engines that leave, whatever the demand
    demand --share of max_engines and max_gpus--> allotment a run --less our jobs--> deficit (submit) or surplus (cancel pending, give back)
    others' pending jobs, reservations, headroom --`room`--> where the deficit may go
    ages of what is idle, what an engine saves its run --`gates`--> which of it is worth a start

Owns the rules. Knows nothing of how the cluster is observed, how jobs are submitted or what happened earlier: the tracker says what our
jobs are, `Limits` what is allowed now. Everything is sorted before it is decided on, so equal facts in another order decide the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from scavenger.cluster.model import ClusterView
from scavenger.harvest import spares
from scavenger.harvest.actions import (
    Action,
    Cancel,
    CancelPending,
    Code,
    Decision,
    GiveBack,
    Leaving,
    Limits,
    OurJob,
    Release,
    Submit,
)
from scavenger.harvest.gates import Gates
from scavenger.harvest.leave import Leave, asked_to_leave, insist
from scavenger.harvest.others import census
from scavenger.harvest.submit import preempted_enough, submit
from scavenger.harvest.yielding import could_start
from scavenger.router.machine import Demand

__all__ = ["Action", "Cancel", "CancelPending", "Code", "Decision", "GiveBack", "Leaving", "Limits", "OurJob", "Release", "Submit"]
__all__ += ["allot", "decide"]


def decide(view: ClusterView, demand: Sequence[Demand], jobs: Sequence[OurJob], limits: Limits, now: float) -> Decision:
    """What to do about our jobs, given one observation. Gives nothing but its reason when the observation is too old to act on."""
    age = now - view.observed_at
    if age > limits.stale_s:
        old = f"the last observation is {age:.0f} s old (over {limits.stale_s:g} s): nothing is decided on it"
        return Decision((), old, Code.STALE_VIEW)
    every = sorted(jobs, key=lambda job: job.intent_id)
    ours, waiting = [job for job in every if not job.spare], [job for job in every if job.spare]
    wanted = sorted((d for d in demand if d.engines > 0), key=lambda d: d.run_id)
    closed = _closed(limits)
    allotted = allot(wanted, 0 if closed else limits.max_engines, limits.max_gpus)
    counted, ground = census(view, frozenset(job.job_id for job in every if job.job_id), limits, now)
    actions: list[Action] = [*insist(every, limits, now)]
    staying = _staying(ours, actions)
    surplus = _surplus(staying, wanted, allotted, closed, limits)
    actions += surplus
    staying = _staying(staying, surplus)
    waiting = _staying(waiting, actions)
    actions += spares.surplus(waiting, wanted, closed, limits)
    leaves = asked_to_leave(view, counted, ground, ours, staying, limits, now)
    actions += leaves
    serving = _staying(staying, leaves)
    gates = None
    if closed:
        code, why = closed
    else:
        gates = Gates(wanted, limits, now)
        more, code, why = submit(view, counted, ground, wanted, allotted, serving, ours, _staying(waiting, actions), limits, now, gates)
        actions += more
    if not wanted and not closed:
        code = Code.NO_DEMAND if demand else Code.NO_RUN
    replaced = {action.intent_id for action in actions if isinstance(action, CancelPending)}
    serving = [job for job in serving if job.intent_id not in replaced]
    could = could_start(counted, ground, limits) if any(not job.waits for job in ours) else ()
    told = gates.told() if gates is not None else ()
    return Decision(tuple(actions), _summary(actions, serving, wanted, demand, why, limits), code, could, told)


def _closed(limits: Limits) -> tuple[Code, str] | None:
    """Why nothing may be harvested at all, whatever is idle: what is there leaves."""
    if limits.stop:
        return Code.STOPPED, limits.stop
    if limits.blind:
        return Code.HIDDEN, f"{limits.hidden}: a user who cannot preempt us could wait unseen"
    return None


def _staying(jobs: Sequence[OurJob], actions: Sequence[Action]) -> list[OurJob]:
    told = {action.intent_id for action in actions if not isinstance(action, Submit)}
    return [job for job in jobs if job.leaving is Leaving.NO and job.intent_id not in told]


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


def _surplus(
    jobs: Sequence[OurJob], demand: Sequence[Demand], allotted: Mapping[int, int], closed: tuple[Code, str] | None, limits: Limits
) -> list[Leave]:
    """What no demand covers, the least worth first: pending jobs before engines, idle engines before busy ones.

    And after too many preemptions whatever waits: a job that was preempted would start again, and be preempted again, by itself.
    """
    preempted = preempted_enough(limits)
    by_run = {d.run_id: d for d in demand}
    left = dict(allotted)
    pending: list[Leave] = []
    engines: list[Leave] = []
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
            code, why = Code.WRONG_SIZE, f"it has {job.gpus} GPUs and run {want.run} wants {want.gpus_per_engine} per engine"
        else:
            code, why = Code.OVER_SHARE, f"run {want.run} may use {allotted[job.run_id]} engines: {want.reason}"
        if job.waits:
            pending.append(CancelPending(job.intent_id, why, code))
        elif job.connected and not (closed and limits.stop_now):
            engines.append(GiveBack(job.intent_id, f"{why}; it holds {job.leases} leases", code))
        else:
            engines.append(Cancel(job.intent_id, why if job.connected else f"{why}; no engine of it is connected", code))
    return [*reversed(pending), *reversed(engines)]


def _worth(job: OurJob) -> tuple[bool, bool, int, float, str]:
    """Sorts what to keep first: engines before pending jobs, the most leases, the least long idle; known jobs before lost submissions."""
    return (job.waits, job.job_id == 0, -job.leases, -job.idle_since, job.intent_id)


def _summary(
    actions: Sequence[Action],
    serving: Sequence[OurJob],
    wanted: Sequence[Demand],
    demand: Sequence[Demand],
    why: str,
    limits: Limits,
) -> str:
    engines = sum(not job.waits for job in serving)
    pending = sum(job.waits for job in serving)
    total = sum(d.engines for d in wanted)
    words = [f"{total} engines wanted, {engines} run, {pending} wait"]
    if not total:
        words += sorted({f"{d.run}: {d.reason}" for d in demand}) or ["no run is open"]
    counts = Counter(type(action).__name__ for action in actions)
    words += [f"{name} {counts[name]}" for name in sorted(counts)]
    words += [why] if why else []
    words += [f"no courtesy: {limits.hidden}"] if limits.hidden and not limits.blind else []
    return "; ".join(words)
