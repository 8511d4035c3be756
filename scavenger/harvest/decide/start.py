"""Which jobs are submitted for the demand that none of ours serves, and what stopped it. Pure.

    deficit of a run --limits, the owner's limits--> a node with free capacity --> a standby job released, or a fresh one submitted
    our waiting jobs that lost their place        --> cancelled, and submitted afresh elsewhere

Each limit has a function that says why it stands against a start, as a code and in words: `not_now` for all jobs, `Drafts.limit_broken` and
`Drafts.owner_limit_broken` for one more. `Drafts` counts what the decision has submitted so far.

Boundary: what begins and within which limits, apart from what of ours leaves (`decide`); pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scavenger.cluster.model import ClusterView, Node
from scavenger.harvest.decide.actions import (
    CancelPending,
    HarvestCode,
    HarvestLimits,
    OurJob,
    Release,
    Submit,
)
from scavenger.harvest.decide.drain import leave_for_blackout_at
from scavenger.harvest.decide.free_capacity import (
    FreeCapacity,
    NodeChoice,
    StartBenefits,
    free_capacity_of,
    nodes_of,
    waits_for,
)
from scavenger.harvest.decide.other_users import OWN_LIMIT, NodeCapacity, QueueScan
from scavenger.harvest.decide.standby import (
    StandbyJobs,
    StandbyMove,
    more,
    not_beneficial_to,
    set_aside_or_move,
)
from scavenger.policy.fleet_size import Demand

Start = Submit | Release | CancelPending


@dataclass(frozen=True, slots=True)
class StartFacts:
    """What the submissions of one decision are made from. `engines`: ours but for standby jobs, pending or running. `wanted`: demand for
    engines, by run id. `allotted`: engines a run may have. `queue`, `capacity`: the view, read once. `turns`: runs in the order in which
    they were given engines by value. `kept`: nodes that are set aside for one run."""

    view: ClusterView
    queue: QueueScan
    capacity: NodeCapacity
    engines: Sequence[OurJob]
    wanted: Sequence[Demand]
    allotted: Mapping[int, int]
    limits: HarvestLimits
    now: float
    turns: Sequence[int]
    kept: Mapping[str, int]


def start_jobs(
    facts: StartFacts,
    serving: Sequence[OurJob],
    standby_jobs: Sequence[OurJob],
    start_benefits: StartBenefits,
) -> tuple[list[Start], HarvestCode, str]:
    """Jobs for the demand that `serving` leaves, as far as free capacity and limits go; and what stopped it, as code and words.

    The runs take turns. New standby jobs come first: they are to be older than what is submitted with them. `standby_jobs`: those that
    may be released.
    """
    view, queue, wanted, allotted = facts.view, facts.queue, facts.wanted, facts.allotted
    limits, now = facts.limits, facts.now
    have = Counter(job.run_id for job in serving)
    deficit = {d.run_id: allotted[d.run_id] - have[d.run_id] for d in wanted}
    waiting = any(job.waits for job in serving)
    if not any(missing > 0 for missing in deficit.values()):
        stop = _shared_out(wanted, allotted, limits)
        if stop is not None:
            return [], *stop
        if not waiting and sum(d.engines for d in wanted) <= sum(allotted.values()):
            return [], HarvestCode.SERVED, ""
    stop = not_now(view, queue, serving, limits, now)
    if stop is not None:
        return [], *stop
    free = free_capacity_of(view, queue, facts.capacity, limits, now)
    start_benefits.measure(free)
    not_beneficial = not_beneficial_to(view, queue, wanted, serving, limits, now, start_benefits)
    # Takes from `free` what our waiting jobs will start on; what follows sees the rest.
    relocating = set_aside_or_move(queue, free, serving, facts.engines, not_beneficial, limits, now)
    moving = [*not_beneficial, *relocating]
    user_gpus = queue.user_gpus - sum(job.gpus for job in standby_jobs if job.job_id in queue.ours)
    drafts = Drafts(view, free, facts.engines, standby_jobs, user_gpus, limits, start_benefits, facts.kept)
    new, stop = _fill(by_turn(wanted, facts.turns), deficit, drafts, now)
    moved = _move({d.run_id: d for d in wanted}, moving, drafts, now)
    actions = [*more(standby_jobs, wanted, allotted, limits, drafts.least_share(wanted)), *moved, *new]
    if stop is not None:
        return actions, *stop
    if free.refused:
        return actions, why_no_capacity(free), f"no free capacity for more: {free.explain()}"
    return actions, *(_shared_out(wanted, allotted, limits) or _all_given(wanted, allotted, limits))


def _fill(
    wanted: Sequence[Demand], deficit: dict[int, int], drafts: Drafts, now: float
) -> tuple[list[Start], tuple[HarvestCode, str] | None]:
    """One job each in turn for what is not served; and the limit that ended it, None when it was free capacity or demand. A limit of one
    owner ends it only where nothing begins.
    """
    begun: list[Start] = []
    of_owner: tuple[HarvestCode, str] | None = None
    while any(missing > 0 for missing in deficit.values()):
        for want in wanted:
            if deficit[want.run_id] <= 0:
                continue
            stop = drafts.limit_broken(want)
            if stop is not None:
                return begun, stop
            if owners_stop := drafts.owner_limit_broken(want):
                deficit[want.run_id], of_owner = 0, owners_stop  # runs of other owners go on
                continue
            place = drafts.reserve_node(want)
            deficit[want.run_id] = deficit[want.run_id] - 1 if place is not None else 0
            if place is not None:
                begun.append(drafts.release_or_draft(want, place, now))
    return begun, None if begun else of_owner


def by_turn(wanted: Sequence[Demand], turns: Sequence[int]) -> list[Demand]:
    """Who was given engines first comes first; the others by run id."""
    order = {run_id: number for number, run_id in reversed(list(enumerate(turns)))}
    return sorted(wanted, key=lambda d: (order.get(d.run_id, len(turns)), d.run_id))


def _move(
    by_run: Mapping[int, Demand], moving: Sequence[StandbyMove], drafts: Drafts, now: float
) -> list[Start]:
    """Cancel what does not keep its place, and submit it afresh as far as another node has free capacity. Where other users hold GPUs
    too it goes there as it is, with its age (`standby`)."""
    actions: list[Start] = []
    for move in moving:
        want = by_run[move.job.run_id]
        broken = drafts.limit_broken(want, move.job) or drafts.owner_limit_broken(want, move.job)
        place = drafts.reserve_node(want, move) if broken is None else None
        if place is None and not move.anyway:
            continue  # a smaller engine may still fit
        if place is not None and drafts.can_release_at(move, place):
            actions.append(
                Release(
                    move.job.intent_id,
                    place.name,
                    f"{move.why}, and it can start on {place.name} now",
                    HarvestCode.FRESH,
                )
            )
            continue
        drafts.uncount(move.job)
        why, code = (
            (move.why, HarvestCode.SETTLING)
            if move.anyway
            else (f"{move.why}, and a fresh one can start now", HarvestCode.FRESH)
        )
        actions.append(CancelPending(move.job.intent_id, why, code))
        if place is not None:
            actions.append(drafts.draft(want, place, now, move.standby_s))
    return actions


def _shared_out(
    wanted: Sequence[Demand], allotted: Mapping[int, int], limits: HarvestLimits
) -> tuple[HarvestCode, str] | None:
    """Why less is allotted than is wanted, when it is."""
    if sum(d.engines for d in wanted) <= sum(allotted.values()):
        return None
    if sum(allotted.values()) >= limits.caps.max_engines:
        return HarvestCode.MAX_ENGINES, f"max_engines = {limits.caps.max_engines} is reached"
    if limits.division is not None:
        gpus = sum(d.gpus * allotted[d.run_id] for d in wanted)
        least = min(d.gpus for d in wanted if d.engines > allotted[d.run_id])
        if limits.caps.max_gpus is None or gpus + least <= limits.caps.max_gpus:
            return None  # all GPUs that there are were divided
    return HarvestCode.MAX_GPUS, f"max_gpus = {limits.caps.max_gpus} is reached"


def _all_given(
    wanted: Sequence[Demand], allotted: Mapping[int, int], limits: HarvestLimits
) -> tuple[HarvestCode, str]:
    if limits.division is not None and sum(d.engines for d in wanted) > sum(allotted.values()):
        return HarvestCode.NO_CAPACITY, "all GPUs that there are were divided by value"
    return HarvestCode.OWN_PENDING, ""


def not_now(
    view: ClusterView, queue: QueueScan, serving: Sequence[OurJob], limits: HarvestLimits, now: float
) -> tuple[HarvestCode, str] | None:
    """Why nothing is submitted now, though it is wanted."""
    partition = view.partition(limits.partition)
    if partition is None or not partition.up:
        return (
            HarvestCode.PARTITION_DOWN,
            f"partition {limits.partition} is {'down' if partition else 'not there'}",
        )
    if now < limits.restrictions.not_before:
        return HarvestCode.BACKOFF, f"backs off: {limits.restrictions.not_before_reason}"
    if preempted := preempted_enough(limits):
        return HarvestCode.PREEMPTIONS, preempted
    if near := blackout_near(limits, now):
        return HarvestCode.BLACKOUT, near
    for job in serving:
        listed = queue.ours.get(job.job_id)
        if job.waits and listed is not None and listed.waits and listed.reason.startswith(OWN_LIMIT):
            return (
                HarvestCode.ACCOUNT_LIMIT,
                f"Slurm holds job {job.job_id} back ({listed.reason}): more would wait with it",
            )
    return None


class Drafts:
    """The submissions of one decision, counted against the limits. Jobs that leave count until they are gone."""

    def __init__(
        self,
        view: ClusterView,
        free: FreeCapacity,
        ours: Sequence[OurJob],
        standby_jobs: Sequence[OurJob],
        user_gpus: int,
        limits: HarvestLimits,
        start_benefits: StartBenefits,
        kept: Mapping[str, int],
    ) -> None:
        self._kept = kept
        self._standby_jobs, self._nodes = StandbyJobs(standby_jobs), {node.name: node for node in view.nodes}
        self._free, self.limits, self._start_benefits = free, limits, start_benefits
        self._engines, self._pending = len(ours), sum(job.waits for job in ours)
        self._gpus = sum(job.gpus for job in ours)
        self._user_gpus = user_gpus + sum(job.gpus for job in ours if not job.job_id)
        self._owner_gpus = Counter[str]()
        for job in ours:
            self._owner_gpus[job.owner] += job.gpus
        part = view.partition(limits.partition)
        # Caps: `_excluded`. Not where other users' jobs are expected: such plans move, and a job keeps its list for as long as it waits.
        shut = {node for node, _ in limits.restrictions.quarantined}
        shut |= {*free.drained, *free.booked, *free.full}
        self._inside = part.nodes if part is not None else frozenset[str]()
        self._exclude = frozenset(shut & self._inside)
        self._owner_nodes = {rule.owner: nodes_of(rule, free.nodes.values()) for rule in limits.owners}

    def limit_broken(self, want: Demand, instead_of: OurJob | None = None) -> tuple[HarvestCode, str] | None:
        """The limit that one more job for `want` would break, if any. One in the place of another breaks none that more jobs than are
        allowed exceed already: engines that were preempted together wait together, more of them than `max_pending`."""
        limits = self.limits
        one, gpus = (0, want.gpus - instead_of.gpus) if instead_of is not None else (1, want.gpus)
        if one and self._engines + one > limits.caps.max_engines:
            return (
                HarvestCode.MAX_ENGINES,
                f"max_engines = {limits.caps.max_engines} is reached (draining ones count)",
            )
        if gpus > 0 and limits.caps.max_gpus is not None and self._gpus + gpus > limits.caps.max_gpus:
            return HarvestCode.MAX_GPUS, f"max_gpus = {limits.caps.max_gpus} is reached (draining ones count)"
        if (
            gpus > 0
            and limits.caps.max_gpus_per_user is not None
            and self._user_gpus + gpus > limits.caps.max_gpus_per_user
        ):
            return (
                HarvestCode.MAX_PER_USER,
                f"max_gpus_per_user = {limits.caps.max_gpus_per_user} is reached in the partition",
            )
        if one and self._pending + one > limits.caps.max_pending:
            return HarvestCode.MAX_PENDING, f"max_pending = {limits.caps.max_pending} is reached"
        return None

    def owner_limit_broken(
        self, want: Demand, instead_of: OurJob | None = None
    ) -> tuple[HarvestCode, str] | None:
        """The limit of the run's owner, if one more job for `want` would break it."""
        gpus = want.gpus - (instead_of.gpus if instead_of is not None else 0)
        replaced = instead_of is not None and gpus <= 0
        if replaced or want.owner_gpus is None or self._owner_gpus[want.owner] + gpus <= want.owner_gpus:
            return None
        why = f"owner {want.owner} has {self._owner_gpus[want.owner]} of {want.owner_gpus} GPUs (owners.max_gpus; draining ones count)"
        return HarvestCode.MAX_PER_OWNER, why

    def reserve_node(self, want: Demand, instead_of: StandbyMove | None = None) -> NodeChoice | None:
        """Reserve one engine's GPUs, CPUs and memory (MB) on a node. None, with the reason in `FreeCapacity.refused`, where no node fits.
        `instead_of`: the standby job that is replaced; its GPUs do not count against the caps."""
        if instead_of is None or instead_of.anyway:  # that counts against none
            return self._reserve_node(want)
        job = instead_of.job
        pinned = waits_for(job, self.limits)
        self._free.promise(pinned, -job.gpus)
        place = self._reserve_node(want)
        if place is None:
            self._free.promise(pinned, job.gpus)
        return place

    def _reserve_node(self, want: Demand) -> NodeChoice | None:
        limits = self.limits
        return self._free.take(
            want.gpus_per_engine,
            limits.job.cpus,
            limits.job.memory_mb,
            self._start_benefits.young(want),
            self._only(want),
            want.nodes_per_engine,
        )

    def _only(self, want: Demand) -> frozenset[str] | None:
        """The nodes on which its engines may start; None: all."""
        only = self._owner_nodes.get(want.owner)
        others = {name for name, run_id in self._kept.items() if run_id != want.run_id}
        return frozenset(self._free.nodes if only is None else only) - others if others else only

    def _excluded(self, want: Demand, place: NodeChoice) -> tuple[str, ...]:
        """Where Slurm is to put no engine: not where the owner may not, on a doubted node only where there is no other for it, and on a
        node under a cap only those that are counted against it."""
        doubted = self.limits.restrictions.doubted & self._free.nodes.keys()
        only = self._owner_nodes.get(want.owner)
        barred = frozenset[str]() if only is None else self._inside - only
        barred |= self._free.capped_beside(place.nodes) & self._inside
        return tuple(sorted(self._exclude | barred | (doubted if doubted.isdisjoint(place.nodes) else set())))

    def uncount(self, job: OurJob) -> None:
        """A waiting job is cancelled by the same decision."""
        self._count(-1, -job.gpus, job.owner)

    def least_share(self, demand: Sequence[Demand]) -> tuple[int, int] | None:
        """The smallest number of CPUs and memory (MB) that one engine would get on any node; None where no node fits one."""
        gpus = min((want.gpus_per_engine for want in demand), default=1)
        shares = [self._share(node, gpus) for node in self._free.nodes.values()]
        found = [share for share in shares if share is not None]
        return (min(cpus for cpus, _ in found), min(memory for _, memory in found)) if found else None

    def release_or_draft(self, want: Demand, place: NodeChoice, now: float) -> Start:
        """An engine on `place`: a standby job where other users hold GPUs too, else, or where there is none left, a fresh job."""
        standby_job = self._standby_jobs.take(want) if self._wants_oldest_job(place) else None
        if standby_job is None:
            return self.draft(want, place, now)
        self._count(1, want.gpus, want.owner)
        why = f"run {want.run}: {want.reason}; {place.name} has the smallest gap that fits, and other users are there too"
        return Release(standby_job.intent_id, place.name, why)

    def can_release_at(self, move: StandbyMove, place: NodeChoice) -> bool:
        """Whether a job that waits elsewhere can begin on `place` as it is."""
        waited = waits_for(move.job, self.limits)
        pinned = self._nodes.get(waited[0]) if len(waited) == 1 else None
        if pinned is None or not move.ready or move.anyway or not self._wants_oldest_job(place):
            return False
        return self._share(pinned, move.job.gpus) == (place.cpus, place.memory_mb)

    def _share(self, node: Node, gpus: int) -> tuple[int, int] | None:
        return self._free.share(node, gpus, self.limits.job.cpus, self.limits.job.memory_mb)

    def _wants_oldest_job(self, place: NodeChoice) -> bool:
        """Whether the oldest jobs belong there; a time limit that a reservation cuts short takes a fresh one.

        Without standby jobs no job is steered: a site orders by start, or Slurm refused to release one of ours.
        """
        return (
            self.limits.placement.pin
            and self.limits.placement.standby_jobs > 0
            and len(place.nodes) == 1
            and place.nodes[0] in self._free.shared
            and place.until == float("inf")
        )

    def _count(self, jobs: int, gpus: int, owner: str) -> None:
        self._owner_gpus[owner] += gpus
        self._engines, self._pending = self._engines + jobs, self._pending + jobs
        self._gpus, self._user_gpus = self._gpus + gpus, self._user_gpus + gpus

    def draft(self, want: Demand, place: NodeChoice, now: float, standby_s: float = 0.0) -> Submit:
        """A fresh job. `standby_s`: how much earlier it ends than it must: by a quarter at most, and not below the least life."""
        limits = self.limits
        self._count(1, want.gpus, want.owner)
        why = f"run {want.run}: {want.reason}; {self._free.explain()}"
        why += f"; {worth}" if (worth := self._start_benefits.why(want, place.nodes)) else ""
        most_s = 0.0
        if limits.placement.pin:
            gap = (
                "has the smallest gap that fits"
                if len(place.nodes) == 1
                else "have the smallest gaps that fit"
            )
            why = f"{why}; {place.name} {gap}"
            most_s = place.until - now - limits.job.drain_before_s if place.until < float("inf") else 0.0
            least_s = min(most_s, limits.job.min_life_s - limits.job.drain_before_s)
            most_s = max(most_s - min(standby_s, most_s / 4), least_s)
        if limits.blackouts:  # should the daemon be away then, Slurm ends it
            before_s = limits.blackouts[0].start - now - limits.job.drain_before_s
            most_s = min(most_s or before_s, before_s)
        return Submit(
            want.run_id,
            want.run,
            limits.partition,
            want.gpus_per_engine,
            why,
            nodelist=place.nodes if limits.placement.pin else (),
            exclude=() if limits.placement.pin else self._excluded(want, place),
            engine=want.engine,
            cpus=place.cpus,
            memory_mb=place.memory_mb,
            most_s=most_s,
            owner=want.owner,
            nodes=want.nodes_per_engine,
        )


def why_no_capacity(free: FreeCapacity) -> HarvestCode:
    """The first reason for which GPUs are not free for us. GPUs that are too young come first: with them one more job would have fitted."""
    if free.settling:
        return HarvestCode.SETTLING
    if free.claimed:
        return HarvestCode.OTHER_USERS_PENDING
    if free.waiting:
        return HarvestCode.OWN_PENDING
    if free.headroom_gpus:
        return HarvestCode.HEADROOM
    if free.closed:
        return HarvestCode.QUARANTINE
    if free.booked:
        return HarvestCode.RESERVED
    if free.expected:
        return HarvestCode.PLANNED
    if free.capped:
        return HarvestCode.PER_PARTITION
    if free.not_owners:
        return HarvestCode.PER_OWNER_NODES
    return HarvestCode.PER_NODE if free.full else HarvestCode.NO_CAPACITY


def blackout_near(limits: HarvestLimits, now: float) -> str:
    """Why no engine is to start: it would not have its least life before a blackout. "" when it would."""
    one = next(iter(limits.blackouts), None)
    if (
        one is None
        or now + limits.job.min_life_s <= leave_for_blackout_at(one, limits) + limits.job.drain_before_s
    ):
        return ""
    return f"a blackout begins in {max(0.0, one.start - now):.0f} s ({one.words}): no engine would live for long enough"


def preempted_enough(limits: HarvestLimits) -> str:
    """Why no engine is to start for a while, however much is idle; "" when it may."""
    most = limits.caps.max_preemptions_per_hour
    if most is None or limits.restrictions.preempted_last_hour < most:
        return ""
    return f"{limits.restrictions.preempted_last_hour} preemptions in the last hour, max_preemptions_per_hour = {most}"
