"""What other users' pending jobs could take. Pure.

    ClusterView --QueueScan--> Wait, ...  those that more GPUs would start, in the order in which we care for them
    Wait        --claim-->     idle GPUs that are not idle for us (`voluntary_preemption`: engines of ours that leave for it)

A job *could start* if our engines were gone, on nodes of its own partitions. One that waits for something else, a dependency, a hold, or
more GPUs than could be free, leaves idle GPUs idle: we may use them until it can start. What is needed now comes before what the
scheduler expects later, so that a longer look-ahead window only adds to what a shorter one claims.

Owns these rules. Each is asked against what the nodes could give at first, never against what an earlier one left: one more waiting job
then never leaves more for us. Knows nothing of demand, and no clock.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from scavenger.cluster.model import ClusterView, Job, JobFlag, JobState, Node
from scavenger.harvest.decide.actions import HarvestLimits

#: Pending for a reason that more GPUs would not change (Slurm's own words, or how they begin).
NOT_FOR_GPUS = (
    "Dependency",
    "JobHeld",
    "JobArrayTaskLimit",
    "PartitionDown",
    "PartitionInactive",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "BadConstraints",
    "Licenses",
    "Assoc",
    "QOS",
    "MaxGRES",
    "MaxCpu",
    "MaxJobs",
    "MaxMem",
    "MaxNode",
    "MaxSubmit",
    "InvalidAccount",
    "InvalidQOS",
    "AccountingPolicy",
    "FrontEndDown",
    "Reservation",
    "BurstBuffer",
    "DeadLine",
    "launch_failed",
    "launch failed",
)
#: A limit of our own QOS, account or user, in Slurm's words: more of our jobs would only wait with this one.
OWN_LIMIT = (
    "Assoc",
    "QOS",
    "MaxGRES",
    "MaxCpu",
    "MaxJobs",
    "MaxMem",
    "MaxNode",
    "MaxSubmit",
    "AccountingPolicy",
)
#: Slurm counts seconds, and may begin a job a moment before it says so.
_SLACK_S = 5.0
_HARVESTED_JOB_NAME = re.compile(r"scv-[0-9a-f]{16}")
#: When (0 = now) and less its tier: in the order in which we care. Of equals the higher priority comes first, then the lower id.
_Rank = tuple[float, int]
#: Enum members as globals: the loops over a whole queue ask for them a hundred thousand times.
_PENDING, _RUNNING = JobState.PENDING, JobState.RUNNING
#: Less its tier, may begin later, could start: of all jobs of one kind.
_Verdict = tuple[int, bool, bool]
_NEW: _Verdict = (0, False, False)  # a kind that was not judged yet: compared by identity
#: More than any job id needs (Slurm's have 32): a job's order within its rank is its priority's and its id's bits, and then its place in
#: the queue, because the waiting tasks of an array all have the array's id.
_ID_BITS, _PLACE_BITS = 40, 24


@dataclass(frozen=True, slots=True)
class Wait:
    """Another's pending job that would take GPUs if it had them. `needs_at` 0: now. `harvested`: an engine of another harvester."""

    job_id: int
    user: str
    partition: str
    gpus: int
    n_nodes: int
    gpus_per_node: int
    cpus_per_node: int
    since: float
    needs_at: float
    harvested: bool


class Waits:
    """Jobs by rank, by order within it, as Waits in order, each made when it is asked for: most of a long queue is never read.

    The order within a rank is one integer a job: tens of thousands of tuples would be as many things for Python's collector.
    """

    def __init__(self, ranks: Mapping[_Rank, dict[int, Job]]) -> None:
        self._ranks = [(*rank, ranks[rank]) for rank in sorted(ranks, reverse=True)]
        self._heap: list[int] = []
        self._made: list[Wait] = []

    def __iter__(self) -> Iterator[Wait]:
        at = 0
        while at < len(self._made) or self._ranks:
            if at == len(self._made):
                self._make()
            yield self._made[at]
            at += 1

    def _make(self) -> None:
        needs_at, _, jobs = self._ranks[-1]
        if not self._heap:
            self._heap = list(jobs)
            heapq.heapify(self._heap)
        self._made.append(_made(jobs[heapq.heappop(self._heap)], needs_at))
        if not self._heap:
            self._ranks.pop()


@dataclass(slots=True)
class NodeResources:
    """What a node can give."""

    gpus: int
    cpus: int
    memory_mb: int


@dataclass(slots=True)
class QueueScan:
    """One pass over the queue. `ours`: our listed jobs. `held`: GPUs and CPUs of ours by node. `freed`: those of jobs that complete.

    `plans`: by node when backfill expects the first of other users' pending jobs there (Unix s). Until then only what ends before starts.
    """

    ours: dict[int, Job] = field(default_factory=dict)
    held: dict[str, NodeResources] = field(default_factory=dict)
    freed: dict[str, NodeResources] = field(default_factory=dict)
    user_gpus: int = 0  # of the limits' user in the partition, ours included
    waits: Waits = field(default_factory=lambda: Waits({}))
    plans: dict[str, float] = field(default_factory=dict)


class NodeCapacity:
    """The nodes: what each could give if our engines were gone, and which of them a partition's jobs reach."""

    def __init__(self, view: ClusterView, *held: Mapping[str, NodeResources]) -> None:
        """`held`: what would be free besides, our engines gone and the jobs that complete."""
        self._parts = {part.name: part for part in view.partitions}
        self.free: dict[str, NodeResources] = {}
        self.could: dict[str, NodeResources] = {}
        named = frozenset[str]().union(*held)
        for node in view.nodes:
            if (node.gpus <= node.gpus_allocated and node.name not in named) or not node.usable:
                continue
            self.free[node.name] = self.could[node.name] = free = resources_of(node)
            if node.name in named:
                more = [resources[node.name] for resources in held if node.name in resources]
                gpus, cpus = sum(space.gpus for space in more), sum(space.cpus for space in more)
                self.could[node.name] = NodeResources(free.gpus + gpus, free.cpus + cpus, free.memory_mb)
        self._reach: dict[str, tuple[frozenset[str], int]] = {}
        self._starts: dict[tuple[str, int, int], int] = {}

    def reach(self, partition: str) -> tuple[frozenset[str], int]:
        """The nodes with something to give of a job's partitions (several are separated by commas), and the highest tier among them."""
        found = self._reach.get(partition)
        if found is None:
            parts = [
                part
                for name in partition.split(",")
                if (part := self._parts.get(name)) is not None and part.up
            ]
            nodes = frozenset[str]().union(*(part.nodes for part in parts)) & self.could.keys()
            found = self._reach[partition] = (nodes, max((part.priority_tier for part in parts), default=0))
        return found

    def could_start(self, partition: str, n_nodes: int, gpus: int, cpus: int) -> bool:
        """Whether as many nodes as it asks for could give a job its share (of all nodes together), our engines gone."""
        shape = (partition, -(-gpus // n_nodes), -(-cpus // n_nodes))
        nodes = self._starts.get(shape)
        if nodes is None:
            resources = (self.could[name] for name in self.reach(partition)[0])
            nodes = self._starts[shape] = sum(
                space.gpus >= shape[1] and space.cpus >= shape[2] for space in resources
            )
        return nodes >= n_nodes


def resources_of(node: Node) -> NodeResources:
    return NodeResources(
        node.idle_gpus,
        max(0, node.cpus - node.cpus_allocated),
        max(0, node.memory_mb - node.memory_allocated_mb),
    )


def scan_queue(
    view: ClusterView, our_job_ids: frozenset[int], limits: HarvestLimits, now: float
) -> tuple[QueueScan, NodeCapacity]:
    """Read the queue once. Others' jobs that need GPUs within `horizon_s` or `other_users_window_s` are waits."""
    found = QueueScan()
    pending: list[Job] = []
    user, partition = limits.user, limits.partition
    plan: tuple[Sequence[str], float] = ((), 0.0)
    for job in view.jobs:
        mine = job.job_id in our_job_ids
        if mine:
            found.ours[job.job_id] = job
        if job.state is _PENDING and (not job.flags or job.waits):
            if not mine:
                pending.append(job)
                shown = (job.planned, job.start_time)
                if (
                    job.planned
                    and shown != plan
                    and job.start_time > now
                    and not job.reason.startswith(NOT_FOR_GPUS)
                ):  # else an old one
                    plan = shown  # all waiting tasks of an array show it
                    for node in job.planned:
                        found.plans[node] = min(found.plans.get(node, job.start_time), job.start_time)
        elif job.state is _RUNNING and not (mine or job.flags):
            pass  # most of a queue: it keeps what it has
        elif not job.has_gpus_allocated:
            continue
        elif mine or job.flags:
            _hold(found, job, mine)
        if mine or (job.user == user and job.partition == partition):
            found.user_gpus += job.gpus
    capacity = NodeCapacity(view, found.held, found.freed)
    found.waits = Waits(_ranks(pending, capacity, limits, now))
    return found, capacity


def _hold(found: QueueScan, job: Job, mine: bool) -> None:
    """GPUs of ours, and GPUs that a job which completes is about to give back, whosever it is."""
    held = found.freed if JobFlag.COMPLETING in job.flags else found.held if mine else None
    if held is None:
        return
    for node, gpus in gpus_by_node(job):
        space = held.setdefault(node, NodeResources(0, 0, 0))
        space.gpus += gpus
        space.cpus += -(-job.cpus // max(1, len(job.nodes)))


def preempted_already(job: Job) -> bool:
    """Whether a running job is in its grace: Slurm then shows the grace's end as its end, which its time limit does not explain."""
    return job.start_time > 0 and 0 < job.end_time < job.start_time + job.time_limit_s - _SLACK_S < float(
        "inf"
    )


def gpus_by_node(job: Job) -> Sequence[tuple[str, int]]:
    if job.gpus_by_node or not job.nodes:
        return job.gpus_by_node
    return [(node, -(-job.gpus // len(job.nodes))) for node in job.nodes]


def _ranks(
    pending: Iterable[Job], capacity: NodeCapacity, limits: HarvestLimits, now: float
) -> dict[_Rank, dict[int, Job]]:
    """What is needed now first, by tier and priority; then what is expected, in its order. Only jobs that reach our partition's nodes."""
    ours, _ = capacity.reach(limits.partition)
    until, planned_until = (
        now + max(limits.yielding.horizon_s, limits.yielding.window_s),
        now + limits.yielding.window_s,
    )
    kinds: dict[tuple[str, str, int, int, int], _Verdict | None] = {}
    ranks: dict[_Rank, dict[int, Job]] = {}
    for place, job in enumerate(pending):
        kind = (job.partition, job.reason, job.n_nodes, job.gpus, job.cpus)
        verdict = kinds.get(kind, _NEW)
        if verdict is _NEW:
            verdict = kinds[kind] = _kind(*kind, capacity, ours)
        if verdict is None:
            continue
        less_tier, begins_later, could = verdict
        needs_at = job.eligible_time if begins_later and job.eligible_time > now else 0.0
        if needs_at > until:
            continue
        if not could:
            needs_at = job.start_time  # the backfill plan: other jobs end by then
            if not now < needs_at <= planned_until:
                continue
        rank = ranks.get((needs_at, less_tier))
        if rank is None:
            rank = ranks[needs_at, less_tier] = {}
        rank[((job.job_id - (job.priority << _ID_BITS)) << _PLACE_BITS) + place] = job
    return ranks


def _kind(
    partition: str,
    reason: str,
    n_nodes: int,
    gpus: int,
    cpus: int,
    capacity: NodeCapacity,
    ours: frozenset[str],
) -> _Verdict | None:
    """(less its tier, may begin later, could start) of jobs of one kind; None of those that more of our partition's GPUs do not help."""
    nodes, tier = capacity.reach(partition)
    if gpus <= 0 or ours.isdisjoint(nodes) or reason.startswith(NOT_FOR_GPUS):
        return None
    return -tier, reason.startswith("BeginTime"), capacity.could_start(partition, max(1, n_nodes), gpus, cpus)


def _made(job: Job, needs_at: float) -> Wait:
    nodes = max(1, job.n_nodes)
    return Wait(
        job.job_id,
        job.user,
        job.partition,
        job.gpus,
        nodes,
        -(-job.gpus // nodes),
        -(-job.cpus // nodes),
        max(job.eligible_time, job.submit_time),
        needs_at,
        is_harvested(job),
    )


def is_harvested(job: Job) -> bool:
    """An engine of a harvester, ours or another one, by its name."""
    return _HARVESTED_JOB_NAME.fullmatch(job.name) is not None


def claim(waits: Iterable[Wait], capacity: NodeCapacity, resources: dict[str, NodeResources]) -> int:
    """Take what they could start on out of `resources`; how many GPUs that were.

    The fullest gaps first: which node Slurm picks is unknown, and a whole gap is worth most to us.
    """
    heaps: dict[str, list[tuple[int, str]]] = {}
    left = sum(space.gpus for space in resources.values())
    claimed = 0
    for wait in waits:
        if not left:
            break
        heap = heaps.get(wait.partition)
        if heap is None:
            names = capacity.reach(wait.partition)[0] & resources.keys()
            heap = heaps[wait.partition] = sorted(
                (-resources[name].gpus, name) for name in names if resources[name].gpus
            )
        taken = _take(heap, resources, min(wait.gpus, left))
        claimed, left = claimed + taken, left - taken
    return claimed


def _take(heap: list[tuple[int, str]], resources: dict[str, NodeResources], gpus: int) -> int:
    """Up to `gpus` from the fullest nodes of a heap whose entries may be too full: another partition's jobs took from them too."""
    taken = 0
    while heap and taken < gpus:
        entry, name = heap[0]
        space = resources[name]
        if -entry != space.gpus:
            heapq.heapreplace(heap, (-space.gpus, name)) if space.gpus else heapq.heappop(heap)
            continue
        some = min(gpus - taken, space.gpus)
        space.gpus -= some
        taken += some
        heapq.heapreplace(heap, (-space.gpus, name)) if space.gpus else heapq.heappop(heap)
    return taken
