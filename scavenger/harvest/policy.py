"""Which jobs to submit, keep, give back and cancel. Pure: `decide` is a function of its arguments and returns its reasons.

    others' pending jobs --claims--> idle GPUs --less headroom--> room
    demand --share of max_engines--> allotment a run --less our jobs--> deficit (submit) or surplus (cancel pending, then give back)

Owns the rules. Knows nothing of how the cluster is observed, how jobs are submitted or what happened earlier: the tracker says what our
jobs are, `Limits` what is allowed now. Everything is sorted before it is decided on, so equal facts in another order decide the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from scavenger.cluster.model import ClusterView
from scavenger.harvest.room import Room, find_room
from scavenger.router.machine import Demand


class Leaving(StrEnum):
    """Whether we asked a job to go, and how."""

    NO = "no"
    GIVEN_BACK = "given back"  # its engine was asked to drain
    CANCELLED = "cancelled"


class Code(StrEnum):
    """A decision's reason in a word. Ledgers hold these and reports rely on them: they are added to, never renamed."""

    # why nothing, or nothing more, was submitted
    STALE_VIEW = "stale_view"
    NO_RUN = "no_run"
    NO_DEMAND = "no_demand"  # runs are open and want no engine; of a job that leaves: its run wants none
    SERVED = "served"  # every wanted engine runs
    OWN_PENDING = "own_pending"  # our own pending jobs are to take what is idle
    PARTITION_DOWN = "partition_down"
    BACKOFF = "backoff"
    MAX_ENGINES = "max_engines"
    MAX_PENDING = "max_pending"
    OTHERS_PENDING = "others_pending"
    HEADROOM = "headroom"
    QUARANTINE = "quarantine"
    NO_ROOM = "no_room"
    # why a job was submitted, cancelled or given back
    WANTED = "wanted"
    WRONG_SIZE = "wrong_size"
    OVER_SHARE = "over_share"
    HELD = "held"
    REQUEUED = "requeued"
    OVERDUE = "overdue"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class OurJob:
    """A harvested job as the tracker has it. `job_id` 0: not known to be in the queue. `waits`: holds no GPU and will, or may, take one.

    `held` is why a waiting job never starts by itself, or "". `asked_at`: when it was asked to leave (Unix s). The router says whether an
    engine of the job is `connected`, how many `leases` it holds and `idle_since` when it has had none (Unix s, 0 = unknown).
    """

    intent_id: str
    run_id: int
    job_id: int
    gpus: int
    waits: bool
    node: str = ""
    held: str = ""
    leaving: Leaving = Leaving.NO
    asked_at: float = 0.0
    connected: bool = False
    leases: int = 0
    idle_since: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What is allowed now. `quarantined`: (node, reason) pairs. `not_before`: Unix s until which nothing is submitted, and why."""

    partition: str
    max_engines: int
    max_pending: int
    headroom_gpus: int = 0
    gpu_type: str = ""
    cpus_per_engine: int = 1
    memory_mb_per_engine: int = 0
    stale_s: float = 60.0  # a view older than this decides nothing
    horizon_s: float = 0.0  # others' jobs that become eligible within this count as waiting
    leave_s: float = 30.0  # a job that was asked to leave and is still there after this is cancelled (again)
    quarantined: tuple[tuple[str, str], ...] = ()
    not_before: float = 0.0
    not_before_reason: str = ""


@dataclass(frozen=True, slots=True)
class Submit:
    """One job for one engine. `nodelist` empty: Slurm chooses among the partition's nodes less `exclude`."""

    run_id: int
    run: str
    partition: str
    gpus: int
    reason: str
    nodelist: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    code: Code = Code.WANTED
    engine: str = "reference"  # which one the job imports ahead of the daemon's answer


@dataclass(frozen=True, slots=True)
class CancelPending:
    intent_id: str
    reason: str
    code: Code


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Drain the engine; its job then ends by itself."""

    intent_id: str
    reason: str
    code: Code


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a job that holds GPUs: nobody is there to drain, or it was asked to leave and did not."""

    intent_id: str
    reason: str
    code: Code


Action = Submit | CancelPending | GiveBack | Cancel


@dataclass(frozen=True, slots=True)
class Decision:
    """`reason` explains the whole: what was done, or why nothing; `code` why nothing more was submitted."""

    actions: tuple[Action, ...]
    reason: str
    code: Code


def decide(view: ClusterView, demand: Sequence[Demand], jobs: Sequence[OurJob], limits: Limits, now: float) -> Decision:
    """What to do about our jobs, given one observation. Gives nothing but its reason when the observation is too old to act on."""
    age = now - view.observed_at
    if age > limits.stale_s:
        old = f"the last observation is {age:.0f} s old (over {limits.stale_s:g} s): nothing is decided on it"
        return Decision((), old, Code.STALE_VIEW)
    ours = sorted(jobs, key=lambda job: job.intent_id)
    wanted = sorted((d for d in demand if d.engines > 0), key=lambda d: d.run_id)
    allotted = allot(wanted, limits.max_engines)
    actions: list[Action] = _insist(ours, limits, now)
    told = {action.intent_id for action in actions if not isinstance(action, Submit)}
    staying = [job for job in ours if job.leaving is Leaving.NO and job.intent_id not in told]
    surplus = _surplus(staying, wanted, allotted)
    actions += surplus
    leaving = {action.intent_id for action in surplus}
    serving = [job for job in staying if job.intent_id not in leaving]
    submits, code, why = _submit(view, wanted, allotted, serving, ours, limits, now)
    actions += submits
    if not wanted:
        code = Code.NO_DEMAND if demand else Code.NO_RUN
    return Decision(tuple(actions), _summary(actions, serving, wanted, demand, why), code)


def allot(demand: Sequence[Demand], most: int) -> dict[int, int]:
    """Share `most` engines among the runs: one each in turn, in the order of their ids, until nobody wants more."""
    left = {d.run_id: d.engines for d in sorted(demand, key=lambda d: d.run_id)}
    given = dict.fromkeys(left, 0)
    while most > 0 and any(left.values()):
        for run_id in left:
            if left[run_id] and most > 0:
                left[run_id] -= 1
                given[run_id] += 1
                most -= 1
    return given


def _insist(jobs: Sequence[OurJob], limits: Limits, now: float) -> list[Action]:
    """Jobs that were asked to leave and are still here, and jobs that Slurm holds: they would wait for ever."""
    actions: list[Action] = []
    for job in jobs:
        if not job.job_id:
            continue  # nothing to name to Slurm yet
        if job.leaving is Leaving.NO:
            if job.waits and job.held:
                actions.append(CancelPending(job.intent_id, f"Slurm holds it: {job.held}", Code.HELD))
        elif job.leaving is Leaving.GIVEN_BACK and job.waits:
            actions.append(CancelPending(job.intent_id, "it was given back and is in the queue again", Code.REQUEUED))
        elif now - job.asked_at >= limits.leave_s:
            late = f"it was {job.leaving} and is still there after {limits.leave_s:g} s"
            actions.append(Cancel(job.intent_id, late, Code.OVERDUE))
    return actions


def _surplus(jobs: Sequence[OurJob], demand: Sequence[Demand], allotted: Mapping[int, int]) -> list[CancelPending | GiveBack | Cancel]:
    """What no demand covers, the least worth first: pending jobs before engines, idle engines before busy ones."""
    by_run = {d.run_id: d for d in demand}
    left = dict(allotted)
    pending: list[CancelPending | GiveBack | Cancel] = []
    engines: list[CancelPending | GiveBack | Cancel] = []
    for job in sorted(jobs, key=_worth):
        want = by_run.get(job.run_id)
        if want is not None and job.gpus == want.gpus_per_engine and left[job.run_id] > 0:
            left[job.run_id] -= 1
            continue
        if want is None:
            code, why = Code.NO_DEMAND, "its run has no demand"
        elif job.gpus != want.gpus_per_engine:
            code, why = Code.WRONG_SIZE, f"it has {job.gpus} GPUs and run {want.run} wants {want.gpus_per_engine} per engine"
        else:
            code, why = Code.OVER_SHARE, f"run {want.run} may use {allotted[job.run_id]} engines: {want.reason}"
        if job.waits:
            pending.append(CancelPending(job.intent_id, why, code))
        elif job.connected:
            engines.append(GiveBack(job.intent_id, f"{why}; it holds {job.leases} leases", code))
        else:
            engines.append(Cancel(job.intent_id, f"{why}; no engine of it is connected", code))
    return [*reversed(pending), *reversed(engines)]


def _worth(job: OurJob) -> tuple[bool, bool, int, float, str]:
    """Sorts what to keep first: engines before pending jobs, the most leases, the least long idle; known jobs before lost submissions."""
    return (job.waits, job.job_id == 0, -job.leases, -job.idle_since, job.intent_id)


def _submit(
    view: ClusterView,
    demand: Sequence[Demand],
    allotted: Mapping[int, int],
    serving: Sequence[OurJob],
    ours: Sequence[OurJob],
    limits: Limits,
    now: float,
) -> tuple[list[Submit], Code, str]:
    """Jobs for what demand is not served, one run after the other, as far as room and limits go; and what stopped it, code and words."""
    have = Counter(job.run_id for job in serving)
    deficit = {d.run_id: allotted[d.run_id] - have[d.run_id] for d in demand}
    if not any(missing > 0 for missing in deficit.values()):
        capped = sum(d.engines for d in demand) > sum(allotted.values())
        if capped:
            return [], Code.MAX_ENGINES, f"max_engines = {limits.max_engines} is reached"
        return [], Code.OWN_PENDING if any(job.waits for job in serving) else Code.SERVED, ""
    partition = view.partition(limits.partition)
    if partition is None or not partition.up:
        return [], Code.PARTITION_DOWN, f"partition {limits.partition} is {'down' if partition else 'not there'}"
    if now < limits.not_before:
        return [], Code.BACKOFF, f"backs off: {limits.not_before_reason}"
    room = _room_of(view, ours, limits, now)
    exclude = tuple(sorted({node for node, _ in limits.quarantined} & partition.nodes))
    pending = sum(job.waits for job in ours)
    engines = len(ours)
    submits: list[Submit] = []
    while any(missing > 0 for missing in deficit.values()):
        for want in demand:
            if deficit[want.run_id] <= 0:
                continue
            stop = _stopped(engines, pending, limits)
            if stop is not None:
                return submits, *stop
            if not room.take(want.gpus_per_engine, limits.cpus_per_engine, limits.memory_mb_per_engine):
                deficit[want.run_id] = 0
                continue
            engines, pending = engines + 1, pending + 1
            deficit[want.run_id] -= 1
            why = f"run {want.run}: {want.reason}; {room.explain()}"
            submits.append(
                Submit(want.run_id, want.run, limits.partition, want.gpus_per_engine, why, exclude=exclude, engine=want.engine)
            )
    if room.refused:
        return submits, _why_no_room(room), f"no room for more: {room.explain()}"
    return submits, Code.OWN_PENDING, ""


def _stopped(engines: int, pending: int, limits: Limits) -> tuple[Code, str] | None:
    if engines >= limits.max_engines:
        return Code.MAX_ENGINES, f"max_engines = {limits.max_engines} is reached (leaving ones count)"
    if pending >= limits.max_pending:
        return Code.MAX_PENDING, f"max_pending = {limits.max_pending} is reached"
    return None


def _why_no_room(room: Room) -> Code:
    """The first that took GPUs out of the room: what comes later would not have been asked."""
    if room.claimed:
        return Code.OTHERS_PENDING
    if room.waiting:
        return Code.OWN_PENDING
    if room.headroom_gpus:
        return Code.HEADROOM
    return Code.QUARANTINE if room.closed else Code.NO_ROOM


def _room_of(view: ClusterView, ours: Sequence[OurJob], limits: Limits, now: float) -> Room:
    waiting = [job.gpus for job in ours if job.waits]
    return find_room(
        view,
        partition=limits.partition,
        our_job_ids=frozenset(job.job_id for job in ours if job.job_id),
        our_waiting_gpus=sorted(waiting, reverse=True),
        closed=frozenset(node for node, _ in limits.quarantined),
        gpu_type=limits.gpu_type,
        headroom_gpus=limits.headroom_gpus,
        eligible_before=now + limits.horizon_s,
    )


def _summary(
    actions: Sequence[Action], serving: Sequence[OurJob], wanted: Sequence[Demand], demand: Sequence[Demand], why: str
) -> str:
    engines = sum(not job.waits for job in serving)
    pending = sum(job.waits for job in serving)
    total = sum(d.engines for d in wanted)
    words = [f"{total} engines wanted, {engines} run, {pending} wait"]
    if not total:
        words += sorted({f"{d.run}: {d.reason}" for d in demand}) or ["no run is open"]
    counts = Counter(type(action).__name__ for action in actions)
    words += [f"{name} {counts[name]}" for name in sorted(counts)]
    return "; ".join([*words, why] if why else words)
