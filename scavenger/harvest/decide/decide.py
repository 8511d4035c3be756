"""Which jobs to submit, keep, drain and cancel. Pure: `decide` is a function of its arguments and returns its reasons.

    stop, time limits, reservations, drained nodes, other users who wait  --> engines that leave, whatever the demand
    demand --share of max_engines and max_gpus--> allotment a run --less our jobs--> deficit (submit) or surplus (cancel, drain)
    other users' pending jobs, reservations, headroom --`free_capacity`--> where the deficit may go
    ages of what is idle, what an engine saves its run --`free_capacity.StartBenefits`--> which of it is worth a start

A waiting job of ours serves demand where it keeps its place (`standby`); one that does not is cancelled, and submitted afresh where there
is free capacity.

Owns the rules, the order of the limits and the words for what stopped it. Knows nothing of how the cluster is observed, how jobs are
submitted or what happened earlier: the tracker says what our jobs are, `Limits` what is allowed now. Everything is sorted before it is
decided on, so equal facts in another order decide the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from scavenger.cluster.model import ClusterView, Node
from scavenger.harvest.decide import standby
from scavenger.harvest.decide.actions import (
    Action,
    BlackoutTime,
    Cancel,
    CancelPending,
    DrainAllocated,
    DrainKind,
    HarvestCode,
    HarvestDecision,
    Limits,
    OurJob,
    Release,
    Submit,
)
from scavenger.harvest.decide.allotment import allot, allot_within_reach, placeable, worth
from scavenger.harvest.decide.drain import Drain, asked_to_drain, cancel_overdue
from scavenger.harvest.decide.free_capacity import (
    FreeCapacity,
    NodeChoice,
    StartBenefits,
    cap_groups,
    free_capacity_of,
    nodes_of,
    waits_for,
)
from scavenger.harvest.decide.other_users import OWN_LIMIT, NodeCapacity, QueueScan, scan_queue
from scavenger.harvest.decide.standby import (
    StandbyJobs,
    StandbyMove,
    more,
    not_beneficial_to,
    set_aside_or_move,
)
from scavenger.harvest.decide.voluntary_preemption import could_start
from scavenger.policy.fleet_size import Demand

__all__ = [
    "Action",
    "Cancel",
    "CancelPending",
    "DrainAllocated",
    "DrainKind",
    "HarvestCode",
    "HarvestDecision",
    "Limits",
    "OurJob",
    "Release",
    "Submit",
]
__all__ += ["allot", "decide"]


@dataclass(frozen=True, slots=True)
class DecisionFacts:
    """What one decision is made from: the arguments of `decide`, sorted, and what several clauses need of them.

    `jobs`: all of ours; `engines`: those that are no standby jobs, pending or running. `wanted`: demand for engines, by run id.
    `allotted`: engines a run may have. `vacate`: nodes that runs need which may use no others.
    `closed`: why nothing may be harvested at all. `queue`, `capacity`: the view, read once.
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
    vacate: frozenset[str]
    closed: tuple[HarvestCode, str] | None
    queue: QueueScan
    capacity: NodeCapacity


def decide(
    view: ClusterView, demand: Sequence[Demand], jobs: Sequence[OurJob], limits: Limits, now: float
) -> HarvestDecision:
    """What to do about our jobs, given one poll. Each clause takes what no clause before it decided on.

    The clauses, in order: engines that were asked to drain and did not; engines and standby jobs that no demand covers; engines
    that leave for other users, for a reservation or at their time limit; new jobs for the demand that is left. Nothing but the
    reason is returned when the poll is too old to act on.
    """
    if too_old := _too_old(view, limits, now):
        return HarvestDecision((), too_old, HarvestCode.STALE_VIEW)
    facts = _facts(view, demand, jobs, limits, now)
    actions: list[Action] = [*cancel_overdue(facts.jobs, limits, now)]
    actions += _beyond_demand(facts, _undecided(facts.engines, actions))
    actions += _standby_beyond_demand(facts, _undecided(facts.standby_jobs, actions))
    actions += _due_to_leave(facts, _undecided(facts.engines, actions))
    serving, benefits = _undecided(facts.engines, actions), None
    if facts.closed:
        code, why = facts.closed
    else:
        benefits = StartBenefits(facts.wanted, limits, now)
        started, code, why = start_jobs(facts, serving, _undecided(facts.standby_jobs, actions), benefits)
        actions += started
    if not facts.wanted and not facts.closed:
        code = HarvestCode.NO_DEMAND if demand else HarvestCode.NO_RUN
    return HarvestDecision(
        tuple(actions),
        _summary(facts, actions, serving, why),
        code,
        _could_start(facts),
        benefits.reasons() if benefits is not None else (),
    )


def _too_old(view: ClusterView, limits: Limits, now: float) -> str:
    age = now - view.observed_at
    if age <= limits.stale_s:
        return ""
    return f"the last observation is {age:.0f} s old (over {limits.stale_s:g} s): nothing is decided on it"


def _facts(
    view: ClusterView, demand: Sequence[Demand], jobs: Sequence[OurJob], limits: Limits, now: float
) -> DecisionFacts:
    ours = sorted(jobs, key=lambda job: job.intent_id)
    demand = placeable(demand, view, limits)
    wanted = sorted((d for d in demand if d.engines > 0), key=lambda d: d.run_id)
    closed = harvesting_closed(limits, now)
    queue, capacity = scan_queue(view, frozenset(job.job_id for job in ours if job.job_id), limits, now)
    engines = [job for job in ours if not job.standby]
    free = partial(free_capacity_of, view, queue, capacity, limits, now)
    allotment = allot_within_reach(wanted, engines, free, limits, 0 if closed else limits.caps.max_engines)
    return DecisionFacts(
        view,
        demand,
        limits,
        now,
        jobs=ours,
        engines=engines,
        standby_jobs=[job for job in ours if job.standby],
        wanted=wanted,
        allotted=allotment.engines,
        vacate=allotment.vacate,
        closed=closed,
        queue=queue,
        capacity=capacity,
    )


def _undecided(jobs: Sequence[OurJob], actions: Sequence[Action]) -> list[OurJob]:
    """Those that were not asked to leave, before this decision or in it."""
    decided = {action.intent_id for action in actions if not isinstance(action, Submit)}
    return [job for job in jobs if job.drain_kind is DrainKind.NO and job.intent_id not in decided]


def _standby_beyond_demand(facts: DecisionFacts, standby_jobs: Sequence[OurJob]) -> list[CancelPending]:
    return standby.surplus(standby_jobs, facts.wanted, facts.closed, facts.limits)


def _due_to_leave(facts: DecisionFacts, staying: Sequence[OurJob]) -> list[Drain]:
    """Time limits, reservations and drained nodes first, then voluntary preemption for what other users still need."""
    return asked_to_drain(
        facts.view, facts.queue, facts.capacity, facts.engines, staying, facts.limits, facts.now
    )


def _could_start(facts: DecisionFacts) -> tuple[int, ...]:
    """Other users' pending jobs that would start if our engines were gone; none when we have no engine that runs."""
    if all(job.waits for job in facts.engines):
        return ()
    return could_start(facts.queue, facts.capacity, facts.limits)


def harvesting_closed(limits: Limits, now: float) -> tuple[HarvestCode, str] | None:
    """Why nothing may be harvested at all, whatever is idle: what is there leaves."""
    if limits.restrictions.stop:
        return HarvestCode.STOPPED, limits.restrictions.stop
    if limits.restrictions.blind:
        return (
            HarvestCode.HIDDEN,
            f"{limits.restrictions.hidden}: a user who cannot preempt us could wait unseen",
        )
    if limits.blackouts and now >= leave_for_blackout_at(limits.blackouts[0], limits):
        one = limits.blackouts[0]
        begins = "is on" if now >= one.start else f"begins in {one.start - now:.0f} s"
        return HarvestCode.BLACKOUT, f"a blackout {begins} ({one.words})"
    return None


def leave_for_blackout_at(one: BlackoutTime, limits: Limits) -> float:
    """When engines are asked to leave for it (Unix s): between two polls nothing is decided, and one that hangs is cancelled later."""
    return one.start - limits.job.drain_before_s - max(limits.yielding.horizon_s, limits.drain_notice_s)


def blackout_near(limits: Limits, now: float) -> str:
    """Why no engine is to start: it would not have its least life before a blackout. "" when it would."""
    one = next(iter(limits.blackouts), None)
    if (
        one is None
        or now + limits.job.min_life_s <= leave_for_blackout_at(one, limits) + limits.job.drain_before_s
    ):
        return ""
    return f"a blackout begins in {max(0.0, one.start - now):.0f} s ({one.words}): no engine would live for long enough"


def _beyond_demand(facts: DecisionFacts, jobs: Sequence[OurJob]) -> list[Drain]:
    """What no demand covers, the least worth first: pending jobs before engines, idle engines before busy ones.

    And before a blackout, or after too many preemptions, whatever waits: it would start by itself, and be ended again.
    """
    limits, allotted, closed = facts.limits, facts.allotted, facts.closed
    preempted, near = preempted_enough(limits), blackout_near(limits, facts.now)
    by_run = {d.run_id: d for d in facts.wanted}
    left, over_cap = dict(allotted), _over_cap(facts, jobs)
    pending: list[Drain] = []
    engines: list[Drain] = []
    for job in sorted(jobs, key=lambda job: worth(job, facts.vacate)):
        want = by_run.get(job.run_id)
        fits = job.intent_id not in over_cap
        same = want is not None and (job.gpus, job.n_nodes) == (want.gpus, want.nodes_per_engine)
        if want is not None and same and left[job.run_id] > 0 and fits:
            left[job.run_id] -= 1
            if not (job.waits and (preempted or near)):
                continue
        if closed:
            code, why = closed
        elif job.waits and preempted:
            code, why = HarvestCode.PREEMPTIONS, preempted
        elif job.waits and near:
            code, why = HarvestCode.BLACKOUT, near
        elif not fits:
            code, why = HarvestCode.PER_PARTITION, over_cap[job.intent_id]
        elif want is None:
            code, why = HarvestCode.NO_DEMAND, "its run has no demand"
        elif not same:
            code, why = (
                HarvestCode.WRONG_SIZE,
                f"it has {_size(job.gpus, job.n_nodes)} and run {want.run} wants {_size(want.gpus, want.nodes_per_engine)} per engine",
            )
        else:
            code, why = (
                HarvestCode.OVER_SHARE,
                f"run {want.run} may use {allotted[job.run_id]} engines{_share(want, limits)}: {want.reason}",
            )
        if job.waits:
            pending.append(CancelPending(job.intent_id, why, code))
        elif job.connected and not (closed and limits.restrictions.stop_now):
            engines.append(DrainAllocated(job.intent_id, f"{why}; it holds {job.leases} leases", code))
        else:
            engines.append(
                Cancel(job.intent_id, why if job.connected else f"{why}; no engine of it is connected", code)
            )
    return [*reversed(pending), *reversed(engines)]


def _size(gpus: int, nodes: int) -> str:
    return f"{gpus} GPUs on {nodes} nodes" if nodes > 1 else f"{gpus} GPUs"


def _over_cap(facts: DecisionFacts, jobs: Sequence[OurJob]) -> dict[str, str]:
    """Of jobs that wait for one node: those with which we would hold more than a cap allows, and why."""
    found: dict[str, str] = {}
    for words, names, most in cap_groups(facts.view, facts.limits):
        held = sum(_gpus_in(job, job.nodes, names) for job in facts.engines if not job.waits)
        for job in sorted(jobs, key=lambda job: worth(job, facts.vacate)):
            gpus = _gpus_in(job, waits_for(job, facts.limits), names) if job.waits else 0
            if gpus and job.intent_id not in found:
                if held + gpus > most:
                    found[job.intent_id] = f"it waits for a node {words}: {held} GPUs of ours are there"
                else:
                    held += gpus
    return found


def _gpus_in(job: OurJob, nodes: Sequence[str], names: frozenset[str]) -> int:
    """Of those that it has, or will have, on `nodes`: those that lie in a set of nodes."""
    return job.gpus_on_node * sum(name in names for name in nodes)


def _share(want: Demand, limits: Limits) -> str:
    """What its owner's share is, where any owner's is not 1."""
    shares = {rule.owner: rule.share for rule in limits.owners if rule.share != 1}
    return f" (owners.share_of: {want.owner} has {shares.get(want.owner, 1)})" if shares else ""


def _summary(facts: DecisionFacts, actions: Sequence[Action], serving: Sequence[OurJob], why: str) -> str:
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
    words += (
        [f"no voluntary preemption: {limits.restrictions.hidden}"]
        if limits.restrictions.hidden and not limits.restrictions.blind
        else []
    )
    return "; ".join(words)


# ---------------------------------------------------------------- what is submitted

Start = Submit | Release | CancelPending


def start_jobs(
    facts: DecisionFacts,
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
        if not waiting:
            return [], HarvestCode.SERVED, ""
    stop = _not_now(view, queue, serving, limits, now)
    if stop is not None:
        return [], *stop
    free = free_capacity_of(view, queue, facts.capacity, limits, now)
    start_benefits.measure(free)
    not_beneficial = not_beneficial_to(view, queue, wanted, serving, limits, now, start_benefits)
    # Takes from `free` what our waiting jobs will start on; what follows sees the rest.
    relocating = set_aside_or_move(queue, free, serving, facts.engines, not_beneficial, limits, now)
    moving = [*not_beneficial, *relocating]
    user_gpus = queue.user_gpus - sum(job.gpus for job in standby_jobs if job.job_id in queue.ours)
    drafts = _Drafts(view, free, facts.engines, standby_jobs, user_gpus, limits, start_benefits)
    new, stop = _fill(wanted, deficit, drafts, now)
    moved = _move({d.run_id: d for d in wanted}, moving, drafts, now)
    actions = [*more(standby_jobs, wanted, allotted, limits, drafts.least_share(wanted)), *moved, *new]
    if stop is not None:
        return actions, *stop
    if free.refused:
        return actions, why_no_capacity(free), f"no free capacity for more: {free.explain()}"
    return actions, *(_shared_out(wanted, allotted, limits) or (HarvestCode.OWN_PENDING, ""))


def _fill(
    wanted: Sequence[Demand], deficit: dict[int, int], drafts: _Drafts, now: float
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


def _move(
    by_run: Mapping[int, Demand], moving: Sequence[StandbyMove], drafts: _Drafts, now: float
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
    wanted: Sequence[Demand], allotted: Mapping[int, int], limits: Limits
) -> tuple[HarvestCode, str] | None:
    """Why less is allotted than is wanted, when it is."""
    if sum(d.engines for d in wanted) <= sum(allotted.values()):
        return None
    if sum(allotted.values()) >= limits.caps.max_engines:
        return HarvestCode.MAX_ENGINES, f"max_engines = {limits.caps.max_engines} is reached"
    return HarvestCode.MAX_GPUS, f"max_gpus = {limits.caps.max_gpus} is reached"


def _not_now(
    view: ClusterView, queue: QueueScan, serving: Sequence[OurJob], limits: Limits, now: float
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


def preempted_enough(limits: Limits) -> str:
    """Why no engine is to start for a while, however much is idle; "" when it may."""
    most = limits.caps.max_preemptions_per_hour
    if most is None or limits.restrictions.preempted_last_hour < most:
        return ""
    return f"{limits.restrictions.preempted_last_hour} preemptions in the last hour, max_preemptions_per_hour = {most}"


class _Drafts:
    """The submissions of one decision, counted against the limits. Jobs that leave count until they are gone."""

    def __init__(
        self,
        view: ClusterView,
        free: FreeCapacity,
        ours: Sequence[OurJob],
        standby_jobs: Sequence[OurJob],
        user_gpus: int,
        limits: Limits,
        start_benefits: StartBenefits,
    ) -> None:
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
            self._owner_nodes.get(want.owner),
            want.nodes_per_engine,
        )

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
