"""One observation out of two answers: nodes, and the queue a moment later. Pure.

    nodes' own figures  --what the queue shows besides-->  the same nodes, with no GPU idle that a listed job holds

A job that started between the two answers holds GPUs that the nodes still call idle; those of one that completes are no longer counted by
Slurm (22.05: `GresUsed` drops them at once), though its processes are on them still. Both would be taken twice. A job that ended in
between leaves its GPUs busy until the next look: too little is taken, for one look.

Owns the reckoning. Knows nothing of who asks, or how; what was seen running at an earlier look is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from scavenger.cluster.model import Job, JobFlag, Node

#: One life of a job: a requeued one may start anew between two answers.
Life = tuple[int, int]


def settled(jobs: Iterable[Job]) -> frozenset[Life]:
    """Jobs that run and do not complete: nodes that are asked about after this count them."""
    return frozenset((job.job_id, job.restart_count) for job in jobs if job.holds_gpus and JobFlag.COMPLETING not in job.flags)


@dataclass(slots=True)
class _Held:
    """On one node, by the queue: what jobs have that the nodes' answer counted for certain, and what others have."""

    gpus: int = 0
    cpus: int = 0
    new_gpus: int = 0
    new_cpus: int = 0


def agree(nodes: Sequence[Node], jobs: Iterable[Job], before: Set[Life]) -> tuple[Node, ...]:
    """`nodes` with at least as much allocated as `jobs`, asked for later, hold there. `before`: `settled` of the look before this one.

    A node's figure that the jobs of before do not explain is taken to count what is new: only the rest is added. Of a job whose nodes need
    not have the same share each the largest is assumed while it is new; after that the nodes' own figure says what it has.
    """
    held = _held(jobs, before)
    return tuple(node if (here := held.get(node.name)) is None else _raised(node, here) for node in nodes)


def _held(jobs: Iterable[Job], before: Set[Life]) -> dict[str, _Held]:
    found: dict[str, _Held] = {}
    for job in jobs:
        if not job.holds_gpus or not job.nodes:
            continue
        new = JobFlag.COMPLETING in job.flags or (job.job_id, job.restart_count) not in before
        share, cpus = -(-job.gpus // len(job.nodes)), -(-job.cpus // len(job.nodes))
        gpus = dict(job.gpus_by_node)
        for name in job.nodes:
            here = found.setdefault(name, _Held())
            if new:
                here.new_gpus, here.new_cpus = here.new_gpus + gpus.get(name, share), here.new_cpus + cpus
            else:
                here.gpus, here.cpus = here.gpus + gpus.get(name, share), here.cpus + cpus
    return found


def _raised(node: Node, here: _Held) -> Node:
    gpus = _with_new(node.gpus_allocated, here.gpus, here.new_gpus, node.gpus)
    cpus = _with_new(node.cpus_allocated, here.cpus, here.new_cpus, node.cpus)
    if (gpus, cpus) == (node.gpus_allocated, node.cpus_allocated):
        return node
    return replace(node, gpus_allocated=gpus, cpus_allocated=cpus)


def _with_new(allocated: int, old: int, new: int, most: int) -> int:
    """What is allocated, jobs that the figure may not count yet included; never lowered, never more than there is."""
    counted = max(0, allocated - old)
    return max(allocated, min(most, allocated + max(0, new - counted)))
