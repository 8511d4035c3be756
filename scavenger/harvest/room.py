"""How many GPUs are idle, and idle for us. Pure.

A GPU that another user's pending job could take is not idle, though nobody holds it. *Could take*: the job would start if our engines were
gone (where its partition may preempt ours), on nodes of its own partition. A job that waits for something else, a dependency, a hold,
or more GPUs than could be free, leaves idle GPUs idle: we may use them until it can start, and it preempts us then.

Owns that rule and the GPUs by owner that the ledger records. Knows nothing of demand.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from scavenger.cluster.model import ClusterView, Job, Node, Partition

#: Pending for a reason that more GPUs would not change (Slurm's own words, or how they begin).
NOT_FOR_GPUS = (
    "Dependency", "JobHeld", "JobArrayTaskLimit", "PartitionDown", "PartitionInactive", "PartitionNodeLimit", "PartitionTimeLimit",
    "BadConstraints", "Licenses", "Assoc", "QOS", "MaxGRES", "MaxCpu", "MaxJobs", "MaxMem", "MaxNode", "MaxSubmit", "InvalidAccount",
    "InvalidQOS", "AccountingPolicy", "FrontEndDown", "Reservation", "BurstBuffer", "DeadLine", "launch_failed", "launch failed",
)  # fmt: skip


@dataclass(slots=True)
class Space:
    """What a node can still give."""

    gpus: int
    cpus: int
    memory_mb: int


@dataclass(slots=True)
class Room:
    """Idle GPUs by node, less what is spoken for. `take` uses them up."""

    spaces: dict[str, Space]
    headroom_gpus: int
    idle: int
    claimed: int
    waiting: int
    closed: tuple[str, ...]
    refused: bool = field(default=False)

    @property
    def free(self) -> int:
        return max(0, sum(space.gpus for space in self.spaces.values()) - self.headroom_gpus)

    def take(self, gpus: int, cpus: int, memory_mb: int) -> bool:
        """Set one engine's share aside on the node with the smallest gap that fits. False, and `refused`, when there is none."""
        fits = [
            (space.gpus, name)
            for name, space in self.spaces.items()
            if space.gpus >= gpus and space.cpus >= cpus and space.memory_mb >= memory_mb
        ]
        if self.free < gpus or not fits:
            self.refused = True
            return False
        space = self.spaces[min(fits)[1]]
        space.gpus, space.cpus, space.memory_mb = space.gpus - gpus, space.cpus - cpus, space.memory_mb - memory_mb
        return True

    def explain(self) -> str:
        words = [f"{self.idle} GPUs idle"]
        if self.claimed:
            words.append(f"{self.claimed} of them for others' pending jobs")
        if self.waiting:
            words.append(f"{self.waiting} for our own")
        if self.headroom_gpus:
            words.append(f"headroom {self.headroom_gpus}")
        if self.closed:
            words.append(f"quarantined: {', '.join(self.closed)}")
        return ", ".join(words)


def find_room(
    view: ClusterView,
    *,
    partition: str,
    our_job_ids: frozenset[int],
    our_waiting_gpus: Sequence[int],
    closed: frozenset[str],
    gpu_type: str,
    headroom_gpus: int,
    eligible_before: float,
) -> Room:
    """Idle GPUs of the harvest partition's nodes that nobody else could take now, less those that our own pending jobs will."""
    part = view.partition(partition)
    inside = part.nodes if part is not None else frozenset()
    spaces = {
        node.name: _space(node)
        for node in sorted(view.nodes, key=lambda node: node.name)
        if node.name in inside and node.usable and (not gpu_type or node.gpu_type == gpu_type)
    }
    idle = sum(space.gpus for space in spaces.values())
    claimed = 0
    if part is not None:
        held = _held_by_us(view, our_job_ids)
        for job in waiting_jobs(view, our_job_ids, eligible_before):
            claimed += _claim(view, job, part, spaces, held)
    for name in closed & spaces.keys():
        spaces[name].gpus = 0
    waiting = sum(_remove(spaces, gpus, spaces) for gpus in our_waiting_gpus)
    return Room(spaces, headroom_gpus, idle, claimed, waiting, tuple(sorted(closed & inside)))


def waiting_jobs(view: ClusterView, our_job_ids: frozenset[int], eligible_before: float) -> list[Job]:
    """Others' pending jobs that would take GPUs if they had them, in the order in which they would be considered."""
    jobs = [
        job
        for job in view.jobs
        if job.waits
        and job.job_id not in our_job_ids
        and job.gpus > 0
        and not (job.reason.startswith("BeginTime") and job.eligible_time > eligible_before)
        and not job.reason.startswith(NOT_FOR_GPUS)
    ]
    tiers = {part.name: part.priority_tier for part in view.partitions}
    jobs.sort(key=lambda job: (-max((tiers.get(p, 0) for p in job.partition.split(",")), default=0), -job.priority, job.job_id))
    return jobs


def _space(node: Node) -> Space:
    return Space(node.idle_gpus, max(0, node.cpus - node.cpus_allocated), max(0, node.memory_mb - node.memory_allocated_mb))


def _held_by_us(view: ClusterView, our_job_ids: frozenset[int]) -> dict[str, int]:
    held: dict[str, int] = {}
    for job in view.jobs:
        if job.job_id in our_job_ids and job.holds_gpus:
            for node, gpus in _gpus_by_node(job):
                held[node] = held.get(node, 0) + gpus
    return held


def _gpus_by_node(job: Job) -> Sequence[tuple[str, int]]:
    if job.gpus_by_node or not job.nodes:
        return job.gpus_by_node
    return [(node, -(-job.gpus // len(job.nodes))) for node in job.nodes]


def _claim(view: ClusterView, job: Job, harvest: Partition, spaces: dict[str, Space], held: Mapping[str, int]) -> int:
    """Take out of `spaces` the idle GPUs that a pending job could start on; 0 when it could not start even without us."""
    mine = [part for part in view.partitions if part.name in job.partition.split(",") and part.up]
    nodes = frozenset[str]().union(*(part.nodes for part in mine))
    shared = nodes & spaces.keys()
    if not shared:
        return 0
    preempts = any(part.priority_tier > harvest.priority_tier for part in mine)
    per_node = -(-job.gpus // max(1, job.n_nodes))
    could = 0
    for node in view.nodes:
        if node.name in nodes and node.usable:
            free = spaces[node.name].gpus if node.name in spaces else node.idle_gpus
            could += free + (held.get(node.name, 0) if preempts else 0) >= per_node
    if could < job.n_nodes:
        return 0
    return _remove(spaces, job.gpus, shared)


def _remove(spaces: dict[str, Space], gpus: int, names: Collection[str]) -> int:
    """Take up to `gpus` from `names`, the fullest gaps first: which node Slurm picks is unknown, and a whole gap is worth most to us."""
    removed = 0
    while removed < gpus:
        name = max(sorted(names), key=lambda name: spaces[name].gpus, default="")
        if not name or not spaces[name].gpus:
            break
        taken = min(gpus - removed, spaces[name].gpus)
        spaces[name].gpus -= taken
        removed += taken
    return removed


@dataclass(frozen=True, slots=True)
class Owners:
    """GPUs by who has them. `reserved`: on nodes outside the harvest partition. `pending_others`: others' jobs waiting for GPUs."""

    idle: int
    harvested: int
    others: int
    reserved: int
    unusable: int
    pending_others: int


def owners(view: ClusterView, partition: str, our_job_ids: frozenset[int], now: float) -> Owners:
    """Every GPU of the cluster, counted once."""
    part = view.partition(partition)
    inside = part.nodes if part is not None else frozenset()
    held = _held_by_us(view, our_job_ids)
    idle = harvested = others = reserved = unusable = 0
    for node in view.nodes:
        if node.name not in inside:
            reserved += node.gpus
            continue
        ours = min(held.get(node.name, 0), node.gpus)
        theirs = max(0, min(node.gpus_allocated, node.gpus) - ours)
        rest = node.gpus - ours - theirs
        harvested += ours
        others += theirs
        idle, unusable = (idle + rest, unusable) if node.usable else (idle, unusable + rest)
    waiting = [job for job in waiting_jobs(view, our_job_ids, now) if _reaches(view, job, inside)]
    return Owners(idle, harvested, others, reserved, unusable, len(waiting))


def _reaches(view: ClusterView, job: Job, inside: frozenset[str]) -> bool:
    return any(part.name in job.partition.split(",") and part.nodes & inside for part in view.partitions)
