"""Which jobs to submit, and on which nodes: what demand is not served, as far as room and limits go. Pure.

A waiting job of ours serves demand where it keeps its place (`keep`); one that does not is cancelled, and submitted afresh where there is
room.

Owns the order of the limits and the words for what stopped it. Knows nothing of who leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from scavenger.cluster.model import ClusterView, Node
from scavenger.harvest.decide.actions import CancelPending, Code, Limits, OurJob, Release, Submit
from scavenger.harvest.decide.free_capacity import FreeCapacity, NodeChoice, free_capacity_of, waits_for
from scavenger.harvest.decide.other_users import OWN_LIMIT, NodeCapacity, QueueScan
from scavenger.harvest.decide.standby import Move, StandbyJobs, more, not_beneficial_to, wait_or_move
from scavenger.harvest.decide.start_benefit import StartBenefits
from scavenger.policy.demand import Demand

Start = Submit | Release | CancelPending


def submit(
    view: ClusterView,
    counted: QueueScan,
    capacity: NodeCapacity,
    demand: Sequence[Demand],
    allotted: Mapping[int, int],
    serving: Sequence[OurJob],
    ours: Sequence[OurJob],
    standby_jobs: Sequence[OurJob],
    limits: Limits,
    now: float,
    start_benefits: StartBenefits,
) -> tuple[list[Start], Code, str]:
    """Jobs for what demand is not served, one run after the other, as far as room and limits go; and what stopped it, code and words.

    `ours` has no standby jobs. New ones come first: they are to be older than what is submitted with them.
    """
    have = Counter(job.run_id for job in serving)
    deficit = {d.run_id: allotted[d.run_id] - have[d.run_id] for d in demand}
    waiting = any(job.waits for job in serving)
    if not any(missing > 0 for missing in deficit.values()):
        stop = _shared_out(demand, allotted, limits)
        if stop is not None:
            return [], *stop
        if not waiting:
            return [], Code.SERVED, ""
    stop = _closed(view, counted, serving, limits, now)
    if stop is not None:
        return [], *stop
    room = free_capacity_of(view, counted, capacity, limits, now)
    start_benefits.measure(room)
    not_beneficial = not_beneficial_to(view, counted, demand, serving, limits, now, start_benefits)
    moving = [*not_beneficial, *wait_or_move(counted, room, serving, ours, not_beneficial, limits, now)]
    user_gpus = counted.user_gpus - sum(job.gpus for job in standby_jobs if job.job_id in counted.ours)
    drafts = _Drafts(view, room, ours, standby_jobs, user_gpus, limits, start_benefits)
    new, stop = _fill(demand, deficit, drafts, now)
    moved = _move({d.run_id: d for d in demand}, moving, drafts, now)
    actions = [*more(standby_jobs, demand, allotted, limits, drafts.least_share(demand)), *moved, *new]
    if stop is not None:
        return actions, *stop
    if room.refused:
        return actions, why_no_capacity(room), f"no room for more: {room.explain()}"
    return actions, *(_shared_out(demand, allotted, limits) or (Code.OWN_PENDING, ""))


def _fill(
    demand: Sequence[Demand], deficit: dict[int, int], drafts: _Drafts, now: float
) -> tuple[list[Start], tuple[Code, str] | None]:
    """One job each in turn for what is not served; and the limit that ended it, None when it was the room or the demand."""
    begun: list[Start] = []
    while any(missing > 0 for missing in deficit.values()):
        for want in demand:
            if deficit[want.run_id] <= 0:
                continue
            stop = drafts.stopped(want)
            if stop is not None:
                return begun, stop
            place = drafts.place(want)
            deficit[want.run_id] = deficit[want.run_id] - 1 if place is not None else 0
            if place is not None:
                begun.append(drafts.begin(want, place, now))
    return begun, None


def _move(by_run: Mapping[int, Demand], moving: Sequence[Move], drafts: _Drafts, now: float) -> list[Start]:
    """Cancel what does not keep its place, and submit it afresh as far as there is room elsewhere. Where others hold GPUs too it goes there
    as it is, with its age (`standby_jobs`)."""
    actions: list[Start] = []
    for move in moving:
        want = by_run[move.job.run_id]
        place = drafts.place(want) if drafts.stopped(want, instead_of=move.job) is None else None
        if place is None and not move.anyway:
            continue  # a smaller engine may still fit
        if place is not None and drafts.goes(move, place):
            actions.append(
                Release(
                    move.job.intent_id,
                    place.node,
                    f"{move.why}, and it can start on {place.node} now",
                    Code.FRESH,
                )
            )
            continue
        drafts.drop(move.job)
        why, code = (
            (move.why, Code.SETTLING)
            if move.anyway
            else (f"{move.why}, and a fresh one can start now", Code.FRESH)
        )
        actions.append(CancelPending(move.job.intent_id, why, code))
        if place is not None:
            actions.append(drafts.submit(want, place, now, move.standby_s))
    return actions


def _shared_out(
    demand: Sequence[Demand], allotted: Mapping[int, int], limits: Limits
) -> tuple[Code, str] | None:
    """Why less is allotted than is wanted, when it is."""
    if sum(d.engines for d in demand) <= sum(allotted.values()):
        return None
    if sum(allotted.values()) >= limits.max_engines:
        return Code.MAX_ENGINES, f"max_engines = {limits.max_engines} is reached"
    return Code.MAX_GPUS, f"max_gpus = {limits.max_gpus} is reached"


def _closed(
    view: ClusterView, counted: QueueScan, serving: Sequence[OurJob], limits: Limits, now: float
) -> tuple[Code, str] | None:
    """Why nothing is submitted now, though it is wanted."""
    partition = view.partition(limits.partition)
    if partition is None or not partition.up:
        return Code.PARTITION_DOWN, f"partition {limits.partition} is {'down' if partition else 'not there'}"
    if now < limits.not_before:
        return Code.BACKOFF, f"backs off: {limits.not_before_reason}"
    if preempted := preempted_enough(limits):
        return Code.PREEMPTIONS, preempted
    for job in serving:
        listed = counted.ours.get(job.job_id)
        if job.waits and listed is not None and listed.waits and listed.reason.startswith(OWN_LIMIT):
            return (
                Code.ACCOUNT_LIMIT,
                f"Slurm holds job {job.job_id} back ({listed.reason}): more would wait with it",
            )
    return None


def preempted_enough(limits: Limits) -> str:
    """Why no engine is to start for a while, however much is idle; "" when it may."""
    most = limits.max_preemptions_per_hour
    if most is None or limits.preempted_last_hour < most:
        return ""
    return f"{limits.preempted_last_hour} preemptions in the last hour, max_preemptions_per_hour = {most}"


class _Drafts:
    """The submissions of one decision, counted against the limits. Jobs that leave count until they are gone."""

    def __init__(
        self,
        view: ClusterView,
        room: FreeCapacity,
        ours: Sequence[OurJob],
        standby_jobs: Sequence[OurJob],
        user_gpus: int,
        limits: Limits,
        start_benefits: StartBenefits,
    ) -> None:
        self._standby_jobs, self._nodes = StandbyJobs(standby_jobs), {node.name: node for node in view.nodes}
        self._room, self.limits, self._start_benefits = room, limits, start_benefits
        self._engines, self._pending = len(ours), sum(job.waits for job in ours)
        self._gpus = sum(job.gpus for job in ours)
        self._user_gpus = user_gpus + sum(job.gpus for job in ours if not job.job_id)
        part = view.partition(limits.partition)
        # Not where others are expected: such plans move, and a job keeps its list for as long as it waits.
        shut = {node for node, _ in limits.quarantined} | {*room.booked, *room.full}
        self._exclude = tuple(sorted(shut & part.nodes)) if part is not None else ()

    def stopped(self, want: Demand, instead_of: OurJob | None = None) -> tuple[Code, str] | None:
        """The limit that one more job for `want` would break, if any."""
        limits = self.limits
        one, gpus = (
            (0, want.gpus_per_engine - instead_of.gpus)
            if instead_of is not None
            else (1, want.gpus_per_engine)
        )
        if self._engines + one > limits.max_engines:
            return Code.MAX_ENGINES, f"max_engines = {limits.max_engines} is reached (leaving ones count)"
        if limits.max_gpus is not None and self._gpus + gpus > limits.max_gpus:
            return Code.MAX_GPUS, f"max_gpus = {limits.max_gpus} is reached (leaving ones count)"
        if limits.max_gpus_per_user is not None and self._user_gpus + gpus > limits.max_gpus_per_user:
            return (
                Code.MAX_PER_USER,
                f"max_gpus_per_user = {limits.max_gpus_per_user} is reached in the partition",
            )
        if self._pending + one > limits.max_pending:
            return Code.MAX_PENDING, f"max_pending = {limits.max_pending} is reached"
        return None

    def place(self, want: Demand) -> NodeChoice | None:
        """Set aside what one more job for `want` takes; None, and the room has `refused`, where there is nothing for it."""
        limits = self.limits
        return self._room.take(
            want.gpus_per_engine,
            limits.cpus_per_engine,
            limits.memory_mb_per_engine,
            self._start_benefits.young(want),
        )

    def drop(self, job: OurJob) -> None:
        """A waiting job is cancelled by the same decision."""
        self._count(-1, -job.gpus)

    def least_share(self, demand: Sequence[Demand]) -> tuple[int, int] | None:
        """CPUs and memory that an engine of any run would get on whichever node; None where there is none for it."""
        gpus = min((want.gpus_per_engine for want in demand), default=1)
        shares = [self._share(node, gpus) for node in self._room.nodes.values()]
        found = [share for share in shares if share is not None]
        return (min(cpus for cpus, _ in found), min(memory for _, memory in found)) if found else None

    def begin(self, want: Demand, place: NodeChoice, now: float) -> Start:
        """An engine on `place`: a spare where others hold GPUs too, else, or where there is none left, a fresh job."""
        standby = self._standby_jobs.take(want) if self._old_here(place) else None
        if standby is None:
            return self.submit(want, place, now)
        self._count(1, want.gpus_per_engine)
        why = f"run {want.run}: {want.reason}; {place.node} has the smallest gap that fits, and others are there too"
        return Release(standby.intent_id, place.node, why)

    def goes(self, move: Move, place: NodeChoice) -> bool:
        """Whether a job that waits elsewhere can begin on `place` as it is."""
        pinned = self._nodes.get(waits_for(move.job, self.limits))
        if pinned is None or not move.ready or move.anyway or not self._old_here(place):
            return False
        return self._share(pinned, move.job.gpus) == (place.cpus, place.memory_mb)

    def _share(self, node: Node, gpus: int) -> tuple[int, int] | None:
        return self._room.share(node, gpus, self.limits.cpus_per_engine, self.limits.memory_mb_per_engine)

    def _old_here(self, place: NodeChoice) -> bool:
        """Whether the oldest jobs belong there; a time limit that a reservation cuts short takes a fresh one.

        Without standby jobs no job is steered: a site orders by start, or Slurm refused to release one of ours.
        """
        return (
            self.limits.pin
            and self.limits.standby_jobs > 0
            and place.node in self._room.shared
            and place.until == float("inf")
        )

    def _count(self, jobs: int, gpus: int) -> None:
        self._engines, self._pending = self._engines + jobs, self._pending + jobs
        self._gpus, self._user_gpus = self._gpus + gpus, self._user_gpus + gpus

    def submit(self, want: Demand, place: NodeChoice, now: float, standby_s: float = 0.0) -> Submit:
        """A fresh job. `standby_s`: how much earlier it ends than it must: by a quarter at most, and not below the least life."""
        limits, gpus = self.limits, want.gpus_per_engine
        self._count(1, gpus)
        why = f"run {want.run}: {want.reason}; {self._room.explain()}"
        why += f"; {worth}" if (worth := self._start_benefits.why(want, place.node)) else ""
        most_s = 0.0
        if limits.pin:
            why = f"{why}; {place.node} has the smallest gap that fits"
            most_s = place.until - now - limits.drain_before_s if place.until < float("inf") else 0.0
            least_s = min(most_s, limits.min_life_s - limits.drain_before_s)
            most_s = max(most_s - min(standby_s, most_s / 4), least_s)
        return Submit(
            want.run_id,
            want.run,
            limits.partition,
            gpus,
            why,
            nodelist=(place.node,) if limits.pin else (),
            exclude=() if limits.pin else self._exclude,
            engine=want.engine,
            cpus=place.cpus,
            memory_mb=place.memory_mb,
            most_s=most_s,
        )


def why_no_capacity(room: FreeCapacity) -> Code:
    """The first that took GPUs out of the room: what comes later would not have been asked. With none of them too young one had fit."""
    if room.settling:
        return Code.SETTLING
    if room.claimed:
        return Code.OTHER_USERS_PENDING
    if room.waiting:
        return Code.OWN_PENDING
    if room.headroom_gpus:
        return Code.HEADROOM
    if room.closed:
        return Code.QUARANTINE
    if room.booked:
        return Code.RESERVED
    if room.expected:
        return Code.PLANNED
    return Code.PER_NODE if room.full else Code.NO_CAPACITY
