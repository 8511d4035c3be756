"""How many engines each run may have: turns by share, within `max_engines` and `max_gpus`. Pure.

    demand --size--> `placeable` --turns--> `allot`
    owners that may use some nodes only --what is idle or given up there--> `allot_within_reach`

An owner that may use some nodes only (`owners.gpu_types_of`, `partitions_of`) takes a turn from others only for an engine that could start
there: on idle GPUs, or on those of engines that leave because their run has more than its turns.

Owns the turns, and which engine of a run is worth least. Knows nothing of what is submitted or drained.

Boundary: how many engines each run may have, apart from which jobs that makes (`decide`); pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType

from scavenger.cluster.model import ClusterView
from scavenger.harvest.decide.actions import DrainKind, Limits, OurJob, OwnerRule
from scavenger.harvest.decide.free_capacity import FreeCapacity, nodes_of, waits_for
from scavenger.policy.fleet_size import Demand


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


def placeable(demand: Sequence[Demand], view: ClusterView, limits: Limits) -> list[Demand]:
    """The demand, of which a run wants no engine that the partition's nodes cannot hold or that the site does not allow: others take no
    turn behind it."""
    partition = view.partition(limits.partition)
    if partition is None:
        return list(demand)
    gpus = [node.gpus for node in view.nodes if node.name in partition.nodes]
    return [
        replace(d, engines=0, reason=why) if (why := _unplaceable(d, gpus, limits)) else d for d in demand
    ]


def _unplaceable(d: Demand, gpus_of_nodes: Sequence[int], limits: Limits) -> str:
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
    limits: Limits,
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
        limits: Limits,
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
