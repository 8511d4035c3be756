"""Which jobs to submit, keep, drain and cancel. Pure: `decide` is a function of its arguments and returns its reasons.

    stop, time limits, reservations, drained nodes, other users who wait  --> engines that leave, whatever the demand
    demand --turns by share, within max_engines and max_gpus--> allotment a run --less our jobs--> deficit (submit) or surplus (drain)
    or, with `limits.division`, by what one more engine saves each run (`division`), of the GPUs that there are
    other users' pending jobs, reservations, headroom --`free_capacity`--> where the deficit may go
    ages of what is idle, what an engine saves its run --`free_capacity.StartBenefits`--> which of it is worth a start
    surplus of a run that another has a deficit of --`hands`--> engines that change hands, where the site lets them
    deficit, and where it may go --`start`--> submissions, within the limits

A waiting job of ours serves demand where it keeps its place (`standby`); one that does not is cancelled, and submitted afresh where there
is free capacity.

Turns: one engine to each owner, as often as its share. An owner that may use some nodes only (`owners.gpu_types_of`, `partitions_of`)
takes a turn from others only for an engine that could start there: on idle GPUs, or on those of engines that leave because their run has
more than its turns.

Owns the rules, the order of the limits, the turns, and which engine of a run is worth least. Knows nothing of how the cluster is observed,
how jobs are submitted or what happened earlier: the tracker says what our jobs are, `HarvestLimits` what is allowed now. Everything is
sorted before it is decided on, so equal facts in another order decide the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from types import MappingProxyType

from scavenger.cluster.model import ClusterView
from scavenger.harvest.decide import standby
from scavenger.harvest.decide.actions import (
    Action,
    Cancel,
    CancelPending,
    ChangeHands,
    DrainAllocated,
    DrainKind,
    HarvestCode,
    HarvestDecision,
    HarvestLimits,
    OurJob,
    OwnerRule,
    Release,
    Submit,
)
from scavenger.harvest.decide.division import divide_by_value
from scavenger.harvest.decide.drain import Drain, asked_to_drain, cancel_overdue, leave_for_blackout_at
from scavenger.harvest.decide.free_capacity import (
    FreeCapacity,
    StartBenefits,
    cap_groups,
    free_capacity_of,
    nodes_of,
    waits_for,
)
from scavenger.harvest.decide.hands import Handing, change_hands, handed
from scavenger.harvest.decide.lending import decide_loans
from scavenger.harvest.decide.other_users import scan_queue
from scavenger.harvest.decide.public_reason import public_reason
from scavenger.harvest.decide.start import StartFacts, blackout_near, preempted_enough, start_jobs
from scavenger.harvest.decide.voluntary_preemption import could_start
from scavenger.policy.division import Division
from scavenger.policy.fleet_size import Demand

__all__ = [
    "Action",
    "Cancel",
    "CancelPending",
    "DrainAllocated",
    "DrainKind",
    "HarvestCode",
    "HarvestDecision",
    "HarvestLimits",
    "OurJob",
    "Release",
    "Submit",
]
__all__ += ["allot", "decide"]

NOT_ENCRYPTED = (
    "weights.encrypt is off, and this cluster is beyond a link: weights do not cross it in the clear"
)


@dataclass(frozen=True, slots=True)
class DecisionFacts(StartFacts):
    """What one decision is made from: the arguments of `decide`, sorted, and what several clauses need of them.

    `jobs`: all of ours. `vacate`: nodes that runs need which may use no others. `closed`: why nothing may be harvested at all.
    `division`: by value; None: by shares. `in_clear`: runs that want engines, and whose weights may not cross the link to this cluster.
    """

    demand: Sequence[Demand]
    jobs: Sequence[OurJob]
    standby_jobs: Sequence[OurJob]
    vacate: frozenset[str]
    closed: tuple[HarvestCode, str] | None
    division: Division | None
    in_clear: frozenset[int]


def decide(
    view: ClusterView, demand: Sequence[Demand], jobs: Sequence[OurJob], limits: HarvestLimits, now: float
) -> HarvestDecision:
    """What to do about our jobs, given one poll. Each clause takes what no clause before it decided on.

    The clauses, in order: engines that were asked to drain and did not; engines and standby jobs that no demand covers; engines
    that leave for other users, for a reservation or at their time limit; new jobs for the demand that is left. Nothing but the
    reason is returned when the poll is too old to act on.
    """
    if too_old := _too_old(view, limits, now):
        return HarvestDecision((), too_old, HarvestCode.STALE_VIEW, public=too_old)
    facts = _facts(view, demand, jobs, limits, now)
    actions: list[Action] = [*cancel_overdue(facts.jobs, limits, now)]
    beyond = _beyond_demand(facts, _undecided(facts.engines, actions))
    hands = _changes_of_hands(facts, beyond, _undecided(facts.engines, [*actions, *beyond]))
    facts = replace(facts, engines=handed(facts.engines, hands.changes))
    actions += hands.leaves
    actions += _standby_beyond_demand(facts, _undecided(facts.standby_jobs, actions))
    leaves = _due_to_leave(facts, _undecided(facts.engines, actions))
    actions += [*leaves, *_that_stay(hands.changes, leaves)]
    serving, benefits = _serving(facts, actions), None
    if facts.closed:
        code, why = facts.closed
    else:
        benefits = StartBenefits(facts.wanted, limits, now)
        started, code, why = start_jobs(facts, serving, _undecided(facts.standby_jobs, actions), benefits)
        actions += started
    if not facts.wanted and not facts.closed:
        code = _without_demand(facts)
    counts = _counts(facts, actions, serving)
    if rules := limits.lending:
        actions += decide_loans(facts, demand, _undecided(facts.engines, actions), rules)
    return HarvestDecision(
        tuple(actions),
        _summary(facts, counts, why),
        code,
        _could_start(facts),
        benefits.reasons() if benefits is not None else (),
        facts.division,
        "; ".join((*counts, public_reason(code, why))),
    )


def _without_demand(facts: DecisionFacts) -> HarvestCode:
    """Why no engine is wanted."""
    if facts.in_clear:
        return HarvestCode.NOT_ENCRYPTED
    return HarvestCode.NO_DEMAND if facts.demand else HarvestCode.NO_RUN


def _too_old(view: ClusterView, limits: HarvestLimits, now: float) -> str:
    age = now - view.observed_at
    if age <= limits.stale_s:
        return ""
    return f"the last observation is {age:.0f} s old (over {limits.stale_s:g} s): nothing is decided on it"


def _facts(
    view: ClusterView, demand: Sequence[Demand], jobs: Sequence[OurJob], limits: HarvestLimits, now: float
) -> DecisionFacts:
    ours = sorted(jobs, key=lambda job: job.intent_id)
    in_clear = frozenset(d.run_id for d in demand if d.engines > 0 and not_encrypted(d, limits))
    demand = placeable(demand, view, limits)
    wanted = sorted((d for d in demand if d.engines > 0), key=lambda d: d.run_id)
    closed = harvesting_closed(limits, now)
    queue, capacity = scan_queue(view, frozenset(job.job_id for job in ours if job.job_id), limits, now)
    engines = [job for job in ours if not job.standby]
    free = partial(free_capacity_of, view, queue, capacity, limits, now)
    most, division = 0 if closed else limits.caps.max_engines, None
    if limits.division is not None:
        division = divide_by_value(wanted, engines, free, limits, limits.division, most, now)
        allotment = Allotment(dict(division.engines))
    else:
        allotment = allot_within_reach(wanted, engines, free, limits, most)
    return DecisionFacts(
        view=view,
        queue=queue,
        capacity=capacity,
        engines=engines,
        wanted=wanted,
        allotted=allotment.engines,
        limits=limits,
        now=now,
        turns=division.turns if division is not None else (),
        kept=division.kept if division is not None else {},
        demand=demand,
        jobs=ours,
        standby_jobs=[job for job in ours if job.standby],
        vacate=allotment.vacate,
        closed=closed,
        division=division,
        in_clear=in_clear,
    )


def _undecided(jobs: Sequence[OurJob], actions: Sequence[Action]) -> list[OurJob]:
    """Those that were not asked to leave, before this decision or in it."""
    decided = {action.intent_id for action in actions if not isinstance(action, Submit)}
    return [job for job in jobs if job.drain_kind is DrainKind.NO and job.intent_id not in decided]


def _changes_of_hands(facts: DecisionFacts, beyond: Sequence[Drain], staying: Sequence[OurJob]) -> Handing:
    if facts.closed:
        return Handing((), beyond)
    return change_hands(facts, facts.demand, beyond, staying, partial(_starts_on_idle, facts, staying))


def _starts_on_idle(
    facts: DecisionFacts, staying: Sequence[OurJob], changes: Sequence[ChangeHands]
) -> Counter[int]:
    """Engines that idle GPUs would give each run if no engine but these changed hands: what would be started then, played through."""
    facts = replace(facts, engines=handed(facts.engines, changes))
    stays = {*(job.intent_id for job in staying), *(change.intent_id for change in changes)}
    serving = [job for job in facts.engines if job.intent_id in stays]
    standby_jobs = [job for job in facts.standby_jobs if job.drain_kind is DrainKind.NO]
    started, _, _ = start_jobs(
        facts, serving, standby_jobs, StartBenefits(facts.wanted, facts.limits, facts.now)
    )
    run_of = {job.intent_id: job.run_id for job in standby_jobs}
    moved = {job.intent_id: job.run_id for job in serving}  # one that is cancelled begins anew elsewhere
    begun = Counter[int]()
    for action in started:
        if isinstance(action, Submit):
            begun[action.run_id] += not action.standby
        elif isinstance(action, Release):
            begun[run_of.get(action.intent_id, 0)] += 1
        elif action.intent_id in moved:
            begun[moved[action.intent_id]] -= 1
    return begun


def _that_stay(changes: Sequence[ChangeHands], leaves: Sequence[Drain]) -> list[ChangeHands]:
    """Other users come first: what leaves for them changes no hands."""
    gone = {one.intent_id for one in leaves}
    return [one for one in changes if one.intent_id not in gone]


def _serving(facts: DecisionFacts, actions: Sequence[Action]) -> list[OurJob]:
    """Jobs that stay, those that go on for another run among them."""
    return _undecided(facts.engines, [one for one in actions if not isinstance(one, ChangeHands)])


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


def harvesting_closed(limits: HarvestLimits, now: float) -> tuple[HarvestCode, str] | None:
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


def _beyond_demand(facts: DecisionFacts, jobs: Sequence[OurJob]) -> list[Drain]:
    """What no demand covers, the least worth first: pending jobs before engines, idle engines before busy ones.

    And before a blackout, or after too many preemptions, whatever waits: it would start by itself, and be ended again.
    """
    limits, allotted, closed = facts.limits, facts.allotted, facts.closed
    preempted, near = preempted_enough(limits), blackout_near(limits, facts.now)
    by_run = {d.run_id: d for d in facts.wanted}
    left, over_cap = dict(allotted), _over_cap(facts, jobs)
    moved = facts.division.leaving if facts.division is not None else {}
    pending: list[Drain] = []
    engines: list[Drain] = []
    for job in sorted(jobs, key=lambda job: worth(job, facts.vacate)):
        want = by_run.get(job.run_id)
        fits = job.intent_id not in over_cap
        same = want is not None and (job.gpus, job.n_nodes) == (want.gpus, want.nodes_per_engine)
        if want is not None and same and left[job.run_id] > 0 and fits and job.intent_id not in moved:
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
        elif want is None and job.run_id in facts.in_clear:
            code, why = HarvestCode.NOT_ENCRYPTED, NOT_ENCRYPTED
        elif want is None:
            code, why = HarvestCode.NO_DEMAND, "its run has no demand"
        elif not same:
            code, why = (
                HarvestCode.WRONG_SIZE,
                f"it has {_size(job.gpus, job.n_nodes)} and run {want.run} wants {_size(want.gpus, want.nodes_per_engine)} per engine",
            )
        elif job.intent_id in moved:
            code, why = HarvestCode.DIVISION, moved[job.intent_id]
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


def _share(want: Demand, limits: HarvestLimits) -> str:
    """What its owner's share is, where any owner's is not 1."""
    shares = {rule.owner: rule.share for rule in limits.owners if rule.share != 1}
    return f" (owners.share_of: {want.owner} has {shares.get(want.owner, 1)})" if shares else ""


#: What is done to jobs, as a decision's summary counts it.
_TO_DO: Mapping[type[Action], str] = {
    Submit: "to submit",
    Release: "to release",
    DrainAllocated: "to drain",
    CancelPending: "pending to cancel",
    Cancel: "to cancel",
    ChangeHands: "to change hands",
}


def _counts(facts: DecisionFacts, actions: Sequence[Action], serving: Sequence[OurJob]) -> list[str]:
    """Of engines, then of what is done: no name is in it."""
    replaced = {action.intent_id for action in actions if isinstance(action, CancelPending)}
    kept = [job for job in serving if job.intent_id not in replaced]
    engines, pending = sum(not job.waits for job in kept), sum(job.waits for job in kept)
    total = sum(d.engines for d in facts.wanted)
    counts = Counter(type(action) for action in actions)
    return [
        f"{total} engines wanted, {engines} run, {pending} wait",
        *(f"{counts[kind]} {what}" for kind, what in _TO_DO.items() if counts[kind]),
    ]


def _summary(facts: DecisionFacts, counts: Sequence[str], why: str) -> str:
    limits, (of_engines, *of_actions) = facts.limits, counts
    words = [of_engines]
    if not facts.wanted:  # in it each run wants one at least
        words += sorted({f"{d.run}: {d.reason}" for d in facts.demand}) or ["no run is open"]
    words += of_actions
    words += [why] if why else []
    words += (
        [f"no voluntary preemption: {limits.restrictions.hidden}"]
        if limits.restrictions.hidden and not limits.restrictions.blind
        else []
    )
    return "; ".join(words)


# ---------------------------------------------------------------- how many engines each run may have


@dataclass(frozen=True, slots=True)
class Allotment:
    """`engines`: by run id. `vacate`: nodes that are taken, and are needed for engines that may start nowhere else."""

    engines: dict[int, int]
    vacate: frozenset[str] = frozenset()


def allot(
    demand: Sequence[Demand],
    most: int,
    most_gpus: int | None = None,
    shares: Mapping[str, int] = MappingProxyType({}),
    fits: Callable[[Demand], bool] = lambda _: True,
) -> dict[int, int]:
    """Share `most` engines and `most_gpus` GPUs: one engine to each owner in turn, for the run of the owner that was given fewest.

    An owner with a share of n has n turns for each of others: the next is the owner with least for its share. In the order of
    run ids, until no run wants more or what is left is too small. A run for whose next engine nothing `fits` takes no more turns.
    """
    wanted = sorted(demand, key=lambda d: d.run_id)
    left = {d.run_id: d.engines for d in wanted}
    given = dict.fromkeys(left, 0)
    runs_of = {
        owner: [d for d in wanted if d.owner == owner] for owner in dict.fromkeys(d.owner for d in wanted)
    }
    gpus = float("inf") if most_gpus is None else most_gpus
    turns = dict.fromkeys(runs_of, 0)
    while most > 0:
        for d in wanted:
            if d.gpus > gpus:
                left[d.run_id] = 0
        asking = [owner for owner, runs in runs_of.items() if any(left[d.run_id] for d in runs)]
        if not asking:
            break
        owner = min(
            asking, key=lambda owner: Fraction(turns[owner], shares.get(owner, 1))
        )  # of equals the first
        d = min((d for d in runs_of[owner] if left[d.run_id]), key=lambda d: (given[d.run_id], d.run_id))
        if not fits(d):
            left[d.run_id] = 0
            continue
        left[d.run_id] -= 1
        given[d.run_id] += 1
        turns[owner] += 1
        most, gpus = most - 1, gpus - d.gpus
    return given


def placeable(demand: Sequence[Demand], view: ClusterView, limits: HarvestLimits) -> list[Demand]:
    """The demand, of which a run wants no engine that the partition's nodes cannot hold or that the site does not allow: others take no
    turn behind it."""
    demand = [replace(d, engines=0, reason=why) if (why := not_encrypted(d, limits)) else d for d in demand]
    partition = view.partition(limits.partition)
    if partition is None:
        return demand
    gpus = [node.gpus for node in view.nodes if node.name in partition.nodes]
    return [
        replace(d, engines=0, reason=why) if (why := _unplaceable(d, gpus, limits)) else d for d in demand
    ]


def not_encrypted(d: Demand, limits: HarvestLimits) -> str:
    """Why this run has no engine on a further cluster; "" where it may have some."""
    return NOT_ENCRYPTED if limits.beyond_link and not d.encrypts else ""


def _unplaceable(d: Demand, gpus_of_nodes: Sequence[int], limits: HarvestLimits) -> str:
    """Why no engine of this run can ever start; "" where one can. `gpus_of_nodes`: GPUs of each node of the partition, taken or not."""
    most, nodes = limits.caps.max_nodes_per_engine, d.nodes_per_engine
    if nodes > most:
        return f"run.nodes_per_engine = {nodes}, and harvest.max_nodes_per_engine = {most}"
    large = sum(gpus >= d.gpus_per_engine for gpus in gpus_of_nodes)
    if large >= nodes:
        return ""
    of = (
        f"no node of partition {limits.partition} has"
        if nodes == 1
        else f"{large} nodes of partition {limits.partition} have"
    )
    return f"{of} the {d.gpus_per_engine} GPUs of an engine{f' on each of its {nodes} nodes' if nodes > 1 else ''}"


def allot_within_reach(
    wanted: Sequence[Demand],
    engines: Sequence[OurJob],
    free: Callable[[], FreeCapacity],
    limits: HarvestLimits,
    most: int,
) -> Allotment:
    """Turns, of which owners that may use some nodes only take those for engines that have a place, or could get one. What is left is
    theirs all the same. `engines`: ours, waiting ones and those that leave included. `free`: a count of its own at each call."""
    shares = {rule.owner: rule.share for rule in limits.owners}
    plain = allot(wanted, most, limits.caps.max_gpus, shares)
    rules = [rule for rule in limits.owners if rule.gpu_types is not None or rule.partitions is not None]
    owners = {rule.owner for rule in rules}
    bounded = {d.run_id for d in wanted if d.owner in owners}
    if not bounded or all(plain[d.run_id] >= d.engines for d in wanted):
        return Allotment(plain)
    staying = [job for job in engines if job.drain_kind is DrainKind.NO and not job.waits]
    leaving = [job for job in engines if job.drain_kind is not DrainKind.NO]
    others_wait = [job for job in engines if job.waits and job.run_id not in bounded]
    # First as if any engine might go that is where its owner may start, then with those alone that go.
    only = _nodes_of(rules, free())
    allotted, vacate = plain, frozenset[str]()
    going = [
        job
        for job in staying
        if job.run_id not in bounded or only.get(job.owner, frozenset()).issuperset(job.nodes)
    ]
    for _ in range(2):
        kept = Counter(job.run_id for job in staying) - Counter(job.run_id for job in going)
        reach = _Reach(free(), only, kept, [*leaving, *going], others_wait, limits)
        allotted = allot(wanted, most, limits.caps.max_gpus, shares, reach.take)
        vacate = frozenset(reach.vacate)
        going = _beyond(staying, allotted, vacate)
    rest = [replace(d, engines=d.engines - allotted[d.run_id]) for d in wanted]
    gpus = limits.caps.max_gpus
    if gpus is not None:
        gpus -= sum(allotted[d.run_id] * d.gpus for d in wanted)
    more = allot(rest, most - sum(allotted.values()), gpus, shares)
    return Allotment({run_id: n + more[run_id] for run_id, n in allotted.items()}, vacate)


def _beyond(staying: Iterable[OurJob], allotted: Mapping[int, int], vacate: frozenset[str]) -> list[OurJob]:
    """Engines that leave because their runs have more than these."""
    left, found = Counter(dict(allotted)), []
    for job in sorted(staying, key=lambda job: worth(job, vacate)):
        left[job.run_id] -= 1
        if left[job.run_id] < 0:
            found.append(job)
    return found


def _nodes_of(rules: Sequence[OwnerRule], free: FreeCapacity) -> dict[str, frozenset[str]]:
    return {rule.owner: nodes_of(rule, free.nodes.values()) or frozenset() for rule in rules}


class _Reach:
    """What may begin on the nodes of owners that may use some only. `kept`: engines that stay, by run. `going`: those that leave."""

    def __init__(
        self,
        free: FreeCapacity,
        only: Mapping[str, frozenset[str]],
        kept: Counter[int],
        going: Sequence[OurJob],
        waiting: Sequence[OurJob],
        limits: HarvestLimits,
    ) -> None:
        self.vacate: set[str] = set()
        self._free, self._only, self._job, self._kept = free, only, limits.job, kept
        shut = {*free.closed, *free.booked}
        self._going: Counter[str] = Counter()
        for job in going:
            for name in set(job.nodes) - shut:
                self._going[name] += job.gpus_on_node
        for job in waiting:
            if pinned := waits_for(job, limits):
                free.promise(pinned, job.gpus)
                free.keep(pinned, job.gpus)

    def take(self, d: Demand) -> bool:
        """Whether one more engine for `d` has a place, which is then taken. One that may start anywhere has."""
        if d.owner not in self._only:
            return True
        if self._kept[d.run_id] > 0:
            self._kept[d.run_id] -= 1
            return True
        only, gpus = self._only[d.owner], d.gpus_per_engine
        nodes = d.nodes_per_engine
        if self._free.take(gpus, self._job.cpus, self._job.memory_mb, None, only, nodes) is not None:
            return True
        given_up = [name for name in sorted(only) if self._going[name] >= gpus][:nodes]
        if len(given_up) < nodes:
            return False
        for name in given_up:
            self._going[name] -= gpus
        self.vacate.update(given_up)
        return True


def worth(job: OurJob, vacate: frozenset[str]) -> tuple[bool, bool, bool, int, float, str]:
    """Sorts what to keep first: engines before pending jobs, those whose node no other job needs, the most leases, the least long idle;
    known jobs before lost submissions."""
    return (
        job.waits,
        not vacate.isdisjoint(job.nodes),
        job.job_id == 0,
        -job.leases,
        -job.idle_since,
        job.intent_id,
    )
