"""How many GPUs are idle, and idle for us, and where; and which of them are worth a start to which run. Pure.

    usable nodes of the partition --other users' claims--> --reservations, quarantine--> --our own pending jobs--> --headroom--> free

    Demand.benefit   what one more engine saves the run, how long its start takes
    HarvestLimits.idle      since when each GPU is idle, how long such GPUs last  --`policy.fleet_size.start_benefit`-->
    the age from which one is worth a start: the start-benefit check

GPUs that are too young are the first that other users would take, so what is set aside for them and for headroom is taken from them. A job
of ours that waits starts on whatever comes free first, without asking: it is weighed by the GPUs that are there when it may begin. Where no
run says what an engine is worth, or too little was seen of such GPUs, nothing is checked. An engine of several GPUs needs as many that are
old enough, and is weighed by the life of one.

What other users could take is `other_users`'s. Owns the rest of the subtraction, the choice of a node (`FreeCapacity.take`), the GPUs by
owner that the ledger records, and the words that a decision's record has of the check.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from scavenger.cluster.model import ClusterView, Job, Node, Partition, nodes_in
from scavenger.harvest.decide.actions import HarvestLimits, OurJob, OwnerRule
from scavenger.harvest.decide.other_users import (
    NOT_FOR_GPUS,
    NodeCapacity,
    NodeResources,
    QueueScan,
    claim,
    gpus_by_node,
    resources_of,
    scan_queue,
)
from scavenger.policy.fleet_size import Demand, StartBenefit
from scavenger.policy.idle_gpus import Idle, node_class

#: A job that ends within the minute before a plan does not fit: backfill counts in steps of one, or longer ones
#: (`YieldLimits.plan_step_s`).
PLAN_STEP_S = 60.0
#: Less memory than this for each GPU is no figure of a node: its RealMemory is not configured.
NO_MEMORY_MB = 64


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """One engine's share of a node, of several the same share of each. `until`: when a reservation begins on one of them, or a job that
    backfill plans (Unix s); inf: none is known."""

    nodes: tuple[str, ...]
    cpus: int
    memory_mb: int
    until: float

    @property
    def name(self) -> str:
        return ",".join(self.nodes)


@dataclass(slots=True)
class Quota:
    """GPUs that may still be taken on a set of nodes; None: on all."""

    nodes: frozenset[str] | None
    left: int

    def covers(self, node: str) -> bool:
        return self.nodes is None or node in self.nodes


@dataclass(slots=True)
class FreeCapacity:
    """Idle GPUs by node, less what is spoken for. `take` uses them up."""

    resources: dict[str, NodeResources]
    nodes: dict[str, Node]
    until: dict[str, float]
    quotas: list[Quota]
    per_node: int | None
    held: dict[str, int]  # GPUs of ours by node, to come ones included
    groups: dict[
        frozenset[str], int
    ]  # the same by the other partitions of their nodes: who shares them loses them together
    idle: int
    claimed: int
    waiting: int = 0
    headroom_gpus: int = 0
    closed: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()
    booked: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    full: tuple[str, ...] = ()
    caps: list[tuple[str, Quota]] = field(
        default_factory=list
    )  # of `quotas`, what bounds what we hold: with its words
    not_owners: int = 0  # GPUs, at most, that were free on nodes that an owner may not use
    refused: bool = False
    shared: frozenset[str] = frozenset()  # nodes where other users hold GPUs
    doubted: frozenset[str] = frozenset()  # nodes on which engines could not start
    settling: int = (
        0  # GPUs, at most, that would have been taken had they been idle for longer, or been worth a start
    )
    too_large: bool = field(default=False)  # a configured memory that is more than an engine's share

    @property
    def free(self) -> int:
        return max(0, min((quota.left for quota in self.quotas), default=0))

    @property
    def capped(self) -> frozenset[str]:
        """Nodes that get no more engines, because we hold as much of their partition or type as we may."""
        return frozenset[str]().union(*(quota.nodes or () for _, quota in self.caps if quota.left <= 0))

    def take(
        self,
        gpus: int,
        cpus: int,
        memory_mb: int,
        young: Mapping[str, int] | None = None,
        only: frozenset[str] | None = None,
        n_nodes: int = 1,
    ) -> NodeChoice | None:
        """Set one engine's share aside on the node with the smallest gap that fits, of equals where we have least; on
        a doubted node only where no other fits. None, and `refused`, when there is none. `young`: GPUs of nodes that are not worth this
        engine's start (`free_capacity.StartBenefits`). `only`: nodes that its owner may use. `n_nodes`: so many different nodes, with
        `gpus` GPUs on each; nothing is set aside where there are fewer."""
        chosen: dict[str, tuple[int, int]] = {}
        while len(chosen) < n_nodes:
            best = self._best(gpus, cpus, memory_mb, young or {}, only, chosen)
            if best is None:
                for name, share in chosen.items():
                    self._use(name, -gpus, -share[0], -share[1])
                return None
            name, share = best
            self._use(name, gpus, *share)
            chosen[name] = share
        return NodeChoice(
            tuple(chosen),
            min(share[0] for share in chosen.values()),
            min(share[1] for share in chosen.values()),
            min(self.until.get(name, float("inf")) for name in chosen),
        )

    def _best(
        self,
        gpus: int,
        cpus: int,
        memory_mb: int,
        young: Mapping[str, int],
        only: frozenset[str] | None,
        chosen: Mapping[str, tuple[int, int]],
    ) -> tuple[str, tuple[int, int]] | None:
        """The next node for an engine that has the `chosen` ones, and its CPUs and memory there."""
        settling, barred = 0, 0
        best: tuple[bool, int, int, str] | None = None
        share = (cpus, memory_mb)
        for name, space in self.resources.items():
            if (
                space.gpus < gpus
                or name in chosen
                or (best is not None and (name in self.doubted, space.gpus) > best[:2])
                or not self._allowed(name, gpus)
            ):
                continue
            asked = self.share(self.nodes[name], gpus, cpus, memory_mb)
            if asked is None or space.cpus < asked[0] or space.memory_mb < asked[1]:
                continue
            if space.gpus - young.get(name, 0) < gpus:
                settling += min(space.gpus, young.get(name, 0))
                continue
            if only is not None and name not in only:
                barred += space.gpus
                continue
            key = (name in self.doubted, space.gpus, self.groups.get(self._group(name), 0), name)
            if best is None or key < best:
                best, share = key, asked
        if best is None:
            self.refused, self.settling = True, max(self.settling, settling)
            self.not_owners = max(self.not_owners, barred)
            return None
        return best[3], share

    def fits(self, nodes: Sequence[str], gpus: int, cpus: int, memory_mb: int) -> bool:
        """Whether a job that waits for these very nodes, for so many GPUs on all of them, can start there. Their idle GPUs are of no use
        where another user's job holds the CPUs or the memory. `cpus`, `memory_mb`: as configured, of each node."""
        each = gpus // len(nodes)
        for name in nodes:
            space = self.resources.get(name)
            if space is None or space.gpus < each:
                return False
            asked = self.share(self.nodes[name], each, cpus, memory_mb)
            if asked is None or space.cpus < asked[0] or space.memory_mb < asked[1]:
                return False
        return True

    def keep(self, nodes: Sequence[str], gpus: int) -> int:
        """Leave GPUs to a job of ours that waits; without nodes the fullest gaps lose them. Returns how many."""
        kept = 0
        names = nodes or sorted(self.resources, key=lambda name: (-self.resources[name].gpus, name))
        most = gpus // len(nodes) if nodes else gpus
        for name in names:
            some = min(most, gpus - kept, self.resources[name].gpus) if name in self.resources else 0
            if some > 0:
                self._use(name, some, 0, 0)
                self._uncap(name, some)
                kept += some
        self.waiting += kept
        return kept

    def give_up(self, name: str, gpus: int, cpus: int, memory_mb: int) -> None:
        """Count GPUs of an engine of ours that leaves a node as free; below 0: no longer. `cpus`, `memory_mb`: as configured."""
        share = self.share(self.nodes[name], abs(gpus), cpus, memory_mb) or (0, 0)
        sign = 1 if gpus < 0 else -1
        self._use(name, -gpus, sign * share[0], sign * share[1])

    def promise(self, nodes: Sequence[str], gpus: int) -> None:
        """Count a waiting job of ours against the caps of the nodes where it will start, now taken or not; without nodes against all."""
        for _, quota in self.caps:
            covered = sum(quota.covers(name) for name in nodes)
            quota.left -= gpus // len(nodes) * covered if nodes else gpus

    def capped_beside(self, nodes: Sequence[str]) -> frozenset[str]:
        """Nodes under a cap that an engine meant for these nodes is not counted against."""
        return frozenset[str]().union(
            *(quota.nodes or () for _, quota in self.caps if not all(map(quota.covers, nodes)))
        )

    def _allowed(self, name: str, gpus: int) -> bool:
        if self.per_node is not None and self.held.get(name, 0) + gpus > self.per_node:
            return False
        return all(quota.left >= gpus for quota in self.quotas if quota.covers(name))

    def share(self, node: Node, gpus: int, cpus: int, memory_mb: int) -> tuple[int, int] | None:
        """CPUs and memory of an engine there: what is asked for, at most its GPUs' share of the node; None: it would not live on that."""
        memory = node.memory_mb * gpus // max(1, node.gpus)
        if memory < NO_MEMORY_MB * gpus:
            memory = 0
        elif memory_mb > memory:
            self.too_large = True
            return None
        return min(cpus, max(1, node.cpus * gpus // max(1, node.gpus))), min(memory, memory_mb or memory)

    def _use(self, name: str, gpus: int, cpus: int, memory_mb: int) -> None:
        space = self.resources[name]
        space.gpus, space.cpus, space.memory_mb = (
            space.gpus - gpus,
            space.cpus - cpus,
            space.memory_mb - memory_mb,
        )
        self.held[name] = self.held.get(name, 0) + gpus
        self.groups[self._group(name)] = self.groups.get(self._group(name), 0) + gpus
        for quota in self.quotas:
            if quota.covers(name):
                quota.left -= gpus

    def _uncap(self, name: str, gpus: int) -> None:
        for _, quota in self.caps:
            if quota.covers(name):
                quota.left += gpus

    def _group(self, name: str) -> frozenset[str]:
        return self.nodes[name].partitions

    def explain(self) -> str:
        words = [f"{self.idle} GPUs idle"]
        if self.claimed:
            words.append(f"{self.claimed} of them for other users' pending jobs")
        if self.waiting:
            words.append(f"{self.waiting} for our own")
        if self.headroom_gpus:
            words.append(f"headroom {self.headroom_gpus}")
        named = (
            ("quarantined", self.closed),
            ("drained", self.drained),
            ("reserved soon", self.booked),
            ("kept for other users' jobs that are expected soon", self.expected),
            ("at max_gpus_per_node", self.full),
        )
        words += [f"{what}: {_few(names)}" for what, names in named if names]
        words += [what for what, quota in self.caps if quota.left <= 0]
        if self.not_owners:
            words.append(
                f"{self.not_owners} on nodes that an owner may not use (owners.gpu_types_of, partitions_of)"
            )
        if self.settling:
            words.append(f"{self.settling} not idle for long enough to be worth a start")
        if self.too_large:
            words.append("memory_mb_per_engine is more than its GPUs' share of a node")
        return ", ".join(words)


def _few(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def find_free_capacity(
    view: ClusterView, limits: HarvestLimits, ours: Sequence[OurJob], now: float
) -> FreeCapacity:
    """Idle GPUs of the harvest partition's nodes that no other user's job could take, less those that our own pending jobs will."""
    queue, capacity = scan_queue(view, frozenset(job.job_id for job in ours if job.job_id), limits, now)
    free = free_capacity_of(view, queue, capacity, limits, now)
    for job in ours:
        if job.waits:
            free.promise(waits_for(job, limits), job.gpus)
            free.keep(waits_for(job, limits), job.gpus)
    return free


def waits_for(job: OurJob, limits: HarvestLimits) -> tuple[str, ...]:
    """The nodes for which it waits, () where Slurm chooses: there a job of before a restart, known by where it ran, waits for no node."""
    return nodes_in(job.pinned) if limits.placement.pin else ()


def free_capacity_of(
    view: ClusterView, queue: QueueScan, capacity: NodeCapacity, limits: HarvestLimits, now: float
) -> FreeCapacity:
    """The same before our own pending jobs are thought of."""
    part = view.partition(limits.partition)
    inside = part.nodes if part is not None else frozenset[str]()
    nodes = {
        node.name: node
        for node in sorted(
            (node for node in view.nodes if node.name in capacity.free), key=attrgetter("name")
        )
        if node.name in inside and (not limits.job.gpu_type or node.gpu_type == limits.job.gpu_type)
    }
    resources = {name: resources_of(node) for name, node in nodes.items()}
    idle = sum(space.gpus for space in resources.values())
    claimed = claim(queue.waits, capacity, resources) if part is not None else 0
    reserved = begins(view, now)
    until = dict(reserved)
    for name, at in queue.plans.items():
        until[name] = min(
            until.get(name, float("inf")),
            at - PLAN_STEP_S,
            at // limits.yielding.plan_step_s * limits.yielding.plan_step_s,
        )
    quarantined = {name for name, _ in limits.restrictions.quarantined} & inside
    drained = {name for name, _ in limits.restrictions.drained} & inside
    soon = {name for name, at in until.items() if name in inside and at < now + limits.job.min_life_s}
    booked = {name for name in soon if reserved.get(name, float("inf")) < now + limits.job.min_life_s}
    expected = tuple(sorted(name for name in soon - booked if name in resources and resources[name].gpus))
    for name in (quarantined | drained | soon) & resources.keys():
        resources[name].gpus = 0
    kept = sum(min(space.gpus, limits.headroom.per_node) for space in resources.values())
    for space in resources.values():
        space.gpus = max(0, space.gpus - limits.headroom.per_node)
    held = {name: space.gpus for name, space in queue.held.items()}
    caps = _caps(view, nodes, held, limits)
    free = FreeCapacity(
        resources,
        nodes,
        until,
        [*_quotas(view, nodes, resources, limits), *(quota for _, quota in caps)],
        limits.caps.max_gpus_per_node,
        held,
        {},
        idle,
        claimed,
        headroom_gpus=_headroom(limits, kept),
        closed=tuple(sorted(quarantined)),
        drained=tuple(sorted(drained)),
        booked=tuple(sorted(booked)),
        expected=expected,
        full=_full(held, nodes, limits),
        caps=caps,
        shared=_shared(nodes, queue),
        doubted=limits.restrictions.doubted,
    )
    for name, gpus in held.items():
        if name in nodes:
            free.groups[nodes[name].partitions] = free.groups.get(nodes[name].partitions, 0) + gpus
    return free


def _shared(nodes: Mapping[str, Node], queue: QueueScan) -> frozenset[str]:
    """Nodes where another user's job holds GPUs and is not about to release them."""
    none = NodeResources(0, 0, 0)
    ours = {name: queue.held.get(name, none).gpus + queue.freed.get(name, none).gpus for name in nodes}
    return frozenset(name for name, node in nodes.items() if node.gpus_allocated > ours[name])


def begins(view: ClusterView, now: float) -> dict[str, float]:
    """When the next reservation begins on each node that has one (Unix s); one that is on has begun."""
    found: dict[str, float] = {}
    for reservation in view.reservations:
        if reservation.end > now:
            for name in reservation.nodes:
                found[name] = min(found.get(name, float("inf")), reservation.start)
    return found


def _headroom(limits: HarvestLimits, kept: int) -> int:
    """GPUs that the site wants to stay idle; `kept`: of these, on nodes that each keep some."""
    return max(
        limits.headroom.gpus,
        sum(gpus for _, gpus in (*limits.headroom.by_type, *limits.headroom.by_partition)),
        kept,
    )


def _quotas(
    view: ClusterView, nodes: dict[str, Node], resources: dict[str, NodeResources], limits: HarvestLimits
) -> list[Quota]:
    """What each headroom leaves of the GPUs that are idle for us."""
    groups: list[tuple[frozenset[str] | None, int]] = [(None, limits.headroom.gpus)]
    for kind, gpus in limits.headroom.by_type:
        groups.append((frozenset(name for name, node in nodes.items() if node.gpu_type == kind), gpus))
    for name, gpus in limits.headroom.by_partition:
        part = view.partition(name)
        groups.append((part.nodes if part is not None else frozenset(), gpus))
    return [Quota(names, max(0, _sum(resources, names) - gpus)) for names, gpus in groups]


def _caps(
    view: ClusterView, nodes: Mapping[str, Node], held: Mapping[str, int], limits: HarvestLimits
) -> list[tuple[str, Quota]]:
    """What each cap leaves of what we may hold of other partitions' nodes and of GRES types, in words and as a quota."""
    return [
        (words, Quota(names, max(0, most - sum(gpus for node, gpus in held.items() if node in names))))
        for words, names, most in cap_groups(view, limits)
        if names & nodes.keys()
    ]


def cap_groups(view: ClusterView, limits: HarvestLimits) -> list[tuple[str, frozenset[str], int]]:
    """Each cap: its words, its nodes, and the GPUs of ours that these may have."""
    groups: list[tuple[str, str, frozenset[str], int]] = []
    for name, gpus in limits.caps.by_partition:
        part = view.partition(name)
        groups.append(("max_gpus_by_partition", name, part.nodes if part is not None else frozenset(), gpus))
    for kind, gpus in limits.caps.by_type:
        of_type = frozenset(node.name for node in view.nodes if node.gpu_type == kind)
        groups.append(("max_gpus_by_type", kind, of_type, gpus))
    return [(f"at {key} of {name} ({most})", names, most) for key, name, names, most in groups]


def nodes_of(rule: OwnerRule, nodes: Iterable[Node]) -> frozenset[str] | None:
    """The nodes that engines of this owner's runs may use; None: all."""
    if rule.gpu_types is None and rule.partitions is None:
        return None
    return frozenset(
        node.name
        for node in nodes
        if (rule.gpu_types is None or node.gpu_type in rule.gpu_types)
        and (rule.partitions is None or node.partitions & rule.partitions)
    )


def _sum(resources: dict[str, NodeResources], names: frozenset[str] | None) -> int:
    return sum(space.gpus for name, space in resources.items() if names is None or name in names)


def _full(held: dict[str, int], nodes: Iterable[str], limits: HarvestLimits) -> tuple[str, ...]:
    most = limits.caps.max_gpus_per_node
    return () if most is None else tuple(sorted(name for name in nodes if held.get(name, 0) >= most))


def waiting_jobs(view: ClusterView, our_job_ids: frozenset[int], eligible_before: float) -> list[Job]:
    """Others' pending jobs that would take GPUs if they had them."""
    reasons = {job.reason for job in view.jobs}  # few, and each is tested once
    helped = {reason for reason in reasons if not reason.startswith(NOT_FOR_GPUS)}
    later = {reason for reason in reasons if reason.startswith("BeginTime")}
    return [
        job
        for job in view.jobs
        if job.reason in helped
        and job.gpus > 0
        and job.waits
        and job.job_id not in our_job_ids
        and not (job.reason in later and job.eligible_time > eligible_before)
    ]


@dataclass(frozen=True, slots=True)
class GpuUse:
    """How many of the cluster's GPUs are idle, or whose. `reserved`: on nodes outside the harvest partition.

    `jobs_pending_other_users`: jobs of other users that wait for GPUs of the harvest partition.
    """

    idle: int
    harvested: int
    other_users: int
    reserved: int
    unusable: int
    jobs_pending_other_users: int


@dataclass(frozen=True, slots=True)
class NodeUse:
    """Whose the GPUs of one node are; `rest`: nobody's. `inside`: it belongs to the harvest partition."""

    node: Node
    inside: bool
    harvested: int
    other_users: int

    @property
    def rest(self) -> int:
        return self.node.gpus - self.harvested - self.other_users


def gpus_of_nodes(view: ClusterView, partition: str, our_job_ids: frozenset[int]) -> list[NodeUse]:
    """Every node, in the view's order."""
    part = view.partition(partition)
    inside = part.nodes if part is not None else frozenset[str]()
    held: dict[str, int] = {}
    for job in view.jobs:
        if job.job_id in our_job_ids and job.has_gpus_allocated:
            for node_name, gpus in gpus_by_node(job):
                held[node_name] = held.get(node_name, 0) + gpus
    found = []
    for node in view.nodes:
        ours = min(held.get(node.name, 0), node.gpus)
        theirs = max(0, min(node.gpus_allocated, node.gpus) - ours)
        found.append(NodeUse(node, node.name in inside, ours, theirs))
    return found


def gpu_use(view: ClusterView, partition: str, our_job_ids: frozenset[int], now: float) -> GpuUse:
    """Every GPU of the cluster, counted once."""
    part = view.partition(partition)
    inside = part.nodes if part is not None else frozenset[str]()
    idle = harvested = other_users = reserved = unusable = 0
    for use in gpus_of_nodes(view, partition, our_job_ids):
        if not use.inside:
            reserved += use.node.gpus
            continue
        harvested += use.harvested
        other_users += use.other_users
        idle, unusable = (idle + use.rest, unusable) if use.node.usable else (idle, unusable + use.rest)
    waiting = waiting_jobs(view, our_job_ids, now)
    reached = {text: _reaches(view.partitions, text, inside) for text in {job.partition for job in waiting}}
    pending = sum(reached[job.partition] for job in waiting)
    return GpuUse(idle, harvested, other_users, reserved, unusable, pending)


def _reaches(partitions: Iterable[Partition], text: str, inside: frozenset[str]) -> bool:
    names = text.split(",")
    return any(part.name in names and part.nodes & inside for part in partitions)


class StartBenefits:
    """Of one decision. Call `measure` once, when the free capacity is known and nothing of it is taken."""

    def __init__(self, demand: Sequence[Demand], limits: HarvestLimits, now: float) -> None:
        self._idle, self._now = (
            limits.idle or Idle({}, {}, 0.0),
            now,
        )  # without data on idle GPUs every start is worth it
        self._demand = [want for want in demand if want.benefit is not None]
        self._start_benefits: dict[tuple[int, str], StartBenefit | None] = {}
        self._young: dict[int, dict[str, int]] = {}
        self._classes: dict[str, str] = {}

    def measure(self, free: FreeCapacity) -> None:
        """How many GPUs of each node are too young for each run, those left out that are set aside anyway."""
        for want in self._demand:
            found = self._young[want.run_id] = {}
            for name, space in free.resources.items():
                node = free.nodes[name]
                start_benefit = self._start_benefit(want, node)
                if start_benefit is None or start_benefit.age_s <= 0 or not space.gpus:
                    continue
                young = self._idle.young(name, node.idle_gpus, start_benefit.age_s, self._now) - (
                    node.idle_gpus - space.gpus
                )
                if young > 0:
                    found[name] = young

    def _start_benefit(self, want: Demand, node: Node) -> StartBenefit | None:
        kind = self._classes[node.name] = node_class(node)
        key = (want.run_id, kind)
        if key not in self._start_benefits:
            assert want.benefit is not None  # by `_demand`
            self._start_benefits[key] = self._idle.start_benefit(node, want.benefit)
        return self._start_benefits[key]

    def young(self, want: Demand) -> Mapping[str, int]:
        """GPUs by node that are not worth a start of this run's engine now."""
        return self._young.get(want.run_id, {})

    @property
    def weigh(self) -> bool:
        """Whether anything can be checked: a run says what an engine is worth to it, and enough is known of idle GPUs."""
        return bool(self._demand and self._idle.curves)

    def too_soon(self, want: Demand, node: Node, gpus: int, at: float) -> str:
        """Why `gpus` GPUs of this node are not worth a start to who may begin there at that time (Unix s); "" where they are, or it
        can tell. A node that is taken counts as well: a job that waits for it starts when other users' jobs leave."""
        start_benefit = self._start_benefit(want, node) if want.benefit is not None else None
        if start_benefit is None or start_benefit.age_s <= 0:
            return ""
        settled = node.idle_gpus - self._idle.young(node.name, node.idle_gpus, start_benefit.age_s, at)
        if settled >= gpus:
            return ""
        if start_benefit.age_s == math.inf:
            return f"none is worth a start: {start_benefit.reason}"
        return f"{settled} of {gpus} GPUs have then been idle for {start_benefit.age_s:.0f} s: {start_benefit.reason}"

    def why(self, want: Demand, nodes: Sequence[str]) -> str:
        """The metrics by which an engine there is worth its start; "" where none were computed."""
        start_benefit = self._start_benefits.get((want.run_id, self._classes.get(nodes[0], "")))
        return start_benefit.reason if start_benefit is not None else ""

    def reasons(self) -> tuple[str, ...]:
        """Every start-benefit check, for the record."""
        runs = {want.run_id: want.run for want in self._demand}
        return tuple(
            (
                f"run {runs[run_id]} on {kind}: "
                f"{'never' if start_benefit.age_s == math.inf else f'from {start_benefit.age_s:.0f} s on'} ({start_benefit.reason})"
            )
            for (run_id, kind), start_benefit in sorted(self._start_benefits.items())
            if start_benefit is not None
        )
