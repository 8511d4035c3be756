"""Which of our engines drain so that other users' pending jobs can start. Pure.

The fewest GPUs, and of these the engines with the least to lose. GPUs of draining engines count as free: no
second engine drains for the same job.

Owns the choice. `other_users` says which jobs wait, and for how much.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from scavenger.cluster.model import JobFlag
from scavenger.harvest.decide.actions import HarvestCode, HarvestLimits, OurJob
from scavenger.harvest.decide.other_users import (
    NodeCapacity,
    NodeResources,
    QueueScan,
    Wait,
    preempted_already,
)

#: Jobs of which a decision tells that they could start.
REMEMBERED = 200
_WHY = {
    HarvestCode.SAME_TIER_JOB: "cannot preempt us",
    HarvestCode.QOS: "Slurm preempts by QOS, and has not preempted us for it so far",
    HarvestCode.VOLUNTARY_PREEMPTION: "Slurm has not preempted us for it",
}


@dataclass(slots=True)
class _Stand:
    """A node in `drains_for_other_users`: its free GPUs and CPUs, those of draining engines counted,
    and engines that may still drain.

    `most_*`: what is free when they all have ended. It only shrinks.
    """

    gpus: int
    cpus: int
    most_gpus: int = 0
    most_cpus: int = 0
    engines: list[_Engine] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine on one of its nodes. `gpus`, `cpus`: that it has there."""

    job: OurJob
    gpus: int
    cpus: int


def drains_for_other_users(
    queue: QueueScan,
    capacity: NodeCapacity,
    jobs: Sequence[OurJob],
    staying: Sequence[OurJob],
    limits: HarvestLimits,
    now: float,
) -> list[tuple[OurJob, HarvestCode, str]]:
    """The engines that drain so that waiting jobs can start, with the reason. `staying`: those of `jobs` that drain for nothing else.

    The fewest GPUs, and of these the engines with the least to lose. Another harvester's job gets what is idle; no engine drains for
    it. Where Slurm preempts by QOS a waiting job's QOS is not seen, so engines drain for it at once, as for a same-tier job; the reason
    says QOS.
    """
    stands = _Stands(queue, capacity, jobs, staying)
    tier = capacity.reach(limits.partition)[1]
    seen = dict(limits.yielding.could_start_since)
    failed: set[tuple[str, int, int, int]] = set()
    found: list[tuple[OurJob, HarvestCode, str]] = []
    for wait in queue.waits:
        if not stands.engines:
            break
        shape = (wait.partition, wait.n_nodes, wait.gpus_per_node, wait.cpus_per_node)
        same_tier = limits.yielding.by_qos or capacity.reach(wait.partition)[1] <= tier
        if wait.harvested or shape in failed or not _due(wait, same_tier, seen, limits, now):
            continue
        draining = stands.place(wait)
        if draining is None:
            failed.add(shape)  # what is free only shrinks
            continue
        code = (
            HarvestCode.VOLUNTARY_PREEMPTION
            if not same_tier
            else HarvestCode.QOS
            if limits.yielding.by_qos
            else HarvestCode.SAME_TIER_JOB
        )
        reason = _reason(wait, code, now)
        found += [(job, code, reason) for job in draining]
    return found


def could_start(queue: QueueScan, capacity: NodeCapacity, limits: HarvestLimits) -> tuple[int, ...]:
    """Other users' jobs that would start now if our engines drained, and that Slurm may preempt us for: the first of them, in order."""
    if limits.yielding.by_qos:  # no job is waited with until Slurm had its chance
        return ()
    tier = capacity.reach(limits.partition)[1]
    found = (
        wait.job_id
        for wait in queue.waits
        if not wait.needs_at and not wait.harvested and capacity.reach(wait.partition)[1] > tier
    )
    return tuple(islice(found, REMEMBERED))


def _due(wait: Wait, same_tier: bool, seen: Mapping[int, float], limits: HarvestLimits, now: float) -> bool:
    """Whether engines drain for it at this poll: what begins before the next one; a same-tier job at once; else what Slurm did not start.

    Since when it waits says little there: the GPUs that it lacked may have come free a moment ago, and Slurm is about to preempt us.
    """
    if wait.needs_at:
        return wait.needs_at <= now + limits.yielding.horizon_s
    return same_tier or now - seen.get(wait.job_id, now) >= limits.yielding.after_s


def _reason(wait: Wait, code: HarvestCode, now: float) -> str:
    what = f"job {wait.job_id} of {wait.user} would start here on {wait.n_nodes} x {wait.gpus_per_node} GPUs"
    if wait.needs_at:
        return f"{what}, and is expected in {wait.needs_at - now:.0f} s"
    why = _WHY[code]
    return f"{what}: it has waited for {now - wait.since:.0f} s and {why}"


class _Stands:
    """What is free, draining engines' GPUs counted, and engines that may still drain; waiting jobs are placed one by one."""

    def __init__(
        self, queue: QueueScan, capacity: NodeCapacity, jobs: Sequence[OurJob], staying: Sequence[OurJob]
    ) -> None:
        self._capacity = capacity
        nothing = NodeResources(0, 0, 0)
        self._stands = {
            name: _Stand(space.gpus + (more := queue.freed.get(name, nothing)).gpus, space.cpus + more.cpus)
            for name, space in capacity.free.items()
        }
        self._heaps: dict[str, list[tuple[int, str]]] = {}
        self._sorted: dict[tuple[str, bool], list[str]] = {}
        self._able: dict[tuple[str, bool, int, int], list[tuple[str, _Stand]]] = {}
        self.engines = 0
        kept = {job.intent_id for job in staying}
        for job in jobs:
            stands = [self._stands[name] for name in job.nodes if name in self._stands]
            listed = queue.ours.get(job.job_id)
            if job.waits or not stands or listed is None or JobFlag.COMPLETING in listed.flags:
                continue
            here = _Engine(job, job.gpus_on_node, -(-listed.cpus // job.n_nodes))
            stays = job.intent_id in kept and not preempted_already(listed)
            self.engines += stays
            for stand in stands:
                if stays:
                    stand.engines.append(here)
                else:
                    stand.gpus, stand.cpus = stand.gpus + here.gpus, stand.cpus + here.cpus
        self._manned = frozenset(name for name, stand in self._stands.items() if stand.engines)
        for stand in self._stands.values():
            stand.most_gpus, stand.most_cpus = stand.gpus, stand.cpus
        for name in self._manned:
            stand = self._stands[name]
            stand.most_gpus += sum(one.gpus for one in stand.engines)
            stand.most_cpus += sum(one.cpus for one in stand.engines)
            stand.engines.sort(
                key=lambda one: (one.job.leases, -one.job.idle_since, -one.job.since, one.job.intent_id)
            )

    def place(self, wait: Wait) -> list[OurJob] | None:
        """Where it would start: the engines that drain for that, none when enough is free; None when it cannot start at all."""
        name = self._emptiest(wait.partition)
        free = self._stands[name] if name else None
        if (
            wait.n_nodes == 1
            and free is not None
            and free.gpus >= wait.gpus_per_node
            and free.cpus >= wait.cpus_per_node
        ):
            return self._use(name, 0, wait)
        full = wait.n_nodes == 1 and (free is None or free.gpus < wait.gpus_per_node)
        options: list[tuple[int, int, str, int]] = []
        whole = 0
        gpus, cpus = wait.gpus_per_node, wait.cpus_per_node
        for at, stand in self._near(wait, manned=full):
            if stand.most_gpus < gpus or stand.most_cpus < cpus:
                continue
            if stand.gpus >= gpus and stand.cpus >= cpus:
                options.append((0, 0, at, 0))
                whole += 1
                if whole >= wait.n_nodes:
                    break  # enough is free
            else:
                options.append(self._option(at, wait))
        if len(options) < wait.n_nodes:
            return None
        options.sort()
        going: list[OurJob] = []
        for _, _, at, draining in options[: wait.n_nodes]:
            # An engine of several nodes that leaves one of these leaves all: fewer are needed on the next.
            going += self._use(at, self._option(at, wait)[3] if draining and going else draining, wait)
        return going

    def _near(self, wait: Wait, *, manned: bool) -> list[tuple[str, _Stand]]:
        """The nodes that its partition's jobs reach, by name; of these those with engines of ours. Without such as could not even at
        first give it its share."""
        gpus, cpus = wait.gpus_per_node, wait.cpus_per_node
        key = (wait.partition, manned, gpus, cpus)
        near = self._able.get(key)
        if near is None:
            named = ((at, self._stands[at]) for at in self._reached(wait.partition, manned))
            near = self._able[key] = [
                (at, stand) for at, stand in named if stand.most_gpus >= gpus and stand.most_cpus >= cpus
            ]
        return near

    def _reached(self, partition: str, manned: bool) -> list[str]:
        key = (partition, manned)
        if key not in self._sorted:
            nodes = self._capacity.reach(partition)[0]
            self._sorted[key] = sorted(nodes & (self._manned if manned else self._stands.keys()))
        return self._sorted[key]

    def _option(self, name: str, wait: Wait) -> tuple[int, int, str, int]:
        """(GPUs of engines that drain, their leases, the node, how many drain), the least first, on a node that can take it."""
        stand = self._stands[name]
        gpus, cpus, lost, leases, draining = stand.gpus, stand.cpus, 0, 0, 0
        while gpus < wait.gpus_per_node or cpus < wait.cpus_per_node:
            one = stand.engines[draining]
            gpus, cpus, draining = gpus + one.gpus, cpus + one.cpus, draining + 1
            # For a job of several nodes an engine's GPUs count where they lie: what leaves one of those may leave the others with it.
            lost += one.job.gpus if wait.n_nodes == 1 else one.gpus
            leases += one.job.leases
        return lost, leases, name, draining

    def _use(self, name: str, draining: int, wait: Wait) -> list[OurJob]:
        stand = self._stands[name]
        gone, stand.engines = stand.engines[:draining], stand.engines[draining:]
        stand.gpus += sum(one.gpus for one in gone) - wait.gpus_per_node
        stand.cpus += sum(one.cpus for one in gone) - wait.cpus_per_node
        stand.most_gpus, stand.most_cpus = (
            stand.most_gpus - wait.gpus_per_node,
            stand.most_cpus - wait.cpus_per_node,
        )
        self._note_freed(name, gone)
        for one in gone:
            for other in one.job.nodes if one.job.n_nodes > 1 else ():
                if other != name and other in self._stands:
                    self._leave(other, one)
        self.engines -= draining
        return [one.job for one in gone]

    def _leave(self, name: str, engine: _Engine) -> None:
        """An engine of several nodes leaves this one too."""
        stand = self._stands[name]
        stand.engines.remove(engine)
        stand.gpus, stand.cpus = stand.gpus + engine.gpus, stand.cpus + engine.cpus
        self._note_freed(name, [engine])

    def _note_freed(self, name: str, gone: Sequence[_Engine]) -> None:
        gpus = self._stands[name].gpus
        for heap in self._heaps.values() if gone and gpus else ():
            heapq.heappush(heap, (-gpus, name))

    def _emptiest(self, partition: str) -> str:
        """The node with most free GPUs among those that a partition's jobs reach, "" when none has any."""
        heap = self._heaps.get(partition)
        if heap is None:
            names = self._capacity.reach(partition)[0]
            found = (
                (name, stand.gpus)
                for name in names
                if (stand := self._stands.get(name)) is not None and stand.gpus
            )
            heap = self._heaps[partition] = sorted((-gpus, name) for name, gpus in found)
        while heap and -heap[0][0] != self._stands[heap[0][1]].gpus:
            name = heap[0][1]
            gpus = self._stands[name].gpus
            heapq.heapreplace(heap, (-gpus, name)) if gpus else heapq.heappop(heap)
        return heap[0][1] if heap else ""
