"""Whether what a further cluster's harvester replies can be of a cluster at all. Pure.

Types alone let a node have four thousand million GPUs, and a time be no number. Decisions go over GPUs one by one on the daemon's event
loop, which serves every cluster and every engine, and the ledger refuses such times.

Boundary: sizes and times that a cluster can have; pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from scavenger.cluster.model import ClusterInfo, ClusterView, Job, JobLife

MOST_NODES, MOST_JOBS, MOST_NODE_GPUS, MOST_GPUS = 1 << 17, 1 << 18, 1 << 10, 1 << 18
#: Of times (Unix s) and durations (s), and of other numbers: SQL keeps 63 bits, and sums have room.
MOST_S, MOST_NUMBER = 1e11, 1 << 53
NO_LIMIT = float("inf")


Replied = ClusterInfo | ClusterView | tuple[Job, ...] | tuple[JobLife, ...]


def fault(replied: Replied) -> str:
    """What no cluster has; "" = nothing."""
    match replied:
        case ClusterInfo():
            found = _of_info(replied)
        case ClusterView():
            found = itertools.chain(_of_nodes(replied), _of_jobs(replied.jobs))
        case _:
            found = _of_jobs(replied)
    return next(found, "")


def _of_info(info: ClusterInfo) -> Iterator[str]:
    times, exempt = [info.kill_wait_s, info.message_timeout_s], [info.exempt_s]
    for qos in info.qos or ():
        times += [qos.grace_s, qos.usage_factor]
        exempt.append(qos.exempt_s or 0.0)
    exempt_ok = all(0 <= value <= NO_LIMIT for value in exempt)
    if not _are(times) or not exempt_ok or not 1.0 <= info.plan_step_s <= MOST_S:
        yield "a time of its configuration is out of range"


def _of_nodes(view: ClusterView) -> Iterator[str]:
    if len(view.nodes) > MOST_NODES:
        yield f"{len(view.nodes)} nodes, over {MOST_NODES}"
    for node in view.nodes:
        sizes = (node.cpus, node.cpus_allocated, node.memory_mb, node.memory_allocated_mb)
        if node.gpus > MOST_NODE_GPUS or max(map(abs, sizes)) > MOST_NUMBER:
            yield f"node {node.name[:64]!r} has {node.gpus} GPUs, or a size out of range"
    if sum(node.gpus for node in view.nodes) > MOST_GPUS:
        yield f"its nodes have over {MOST_GPUS} GPUs"
    for partition in view.partitions:
        if not _are([partition.grace_s]) or not 0 <= partition.max_time_s <= NO_LIMIT:
            yield f"a time of partition {partition.name[:64]!r} is out of range"
    if not all(_are([one.start]) and 0 <= one.end <= NO_LIMIT for one in view.reservations):
        yield "a time of a reservation is out of range"


def _of_jobs(jobs: Sequence[Job | JobLife]) -> Iterator[str]:
    if len(jobs) > MOST_JOBS:
        yield f"{len(jobs)} jobs, over {MOST_JOBS}"
    for job in jobs:
        times, numbers = [job.submit_time, job.start_time, job.end_time], [job.gpus]
        if isinstance(job, Job):
            times.append(job.eligible_time)
            numbers += [job.n_nodes, job.cpus, job.priority, job.exit_code or 0]
            if not 0 <= job.time_limit_s <= NO_LIMIT:
                yield f"the time limit of job {job.job_id} is out of range"
        if not _are(times) or job.gpus > MOST_GPUS or max(map(abs, numbers)) > MOST_NUMBER:
            yield f"a time or a number of job {job.job_id} is out of range"


def _are(times: Iterable[float]) -> bool:
    """Whether all are times or durations. No comparison holds of what is no number."""
    return all(0 <= value <= MOST_S for value in times)
