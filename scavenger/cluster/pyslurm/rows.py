"""Pure: rows from pyslurm's process as our model. The same checks as for what Slurm's commands print: half a view is none.

Boundary: rows of Slurm's library into the model; pure.

Knows nothing of pyslurm, pipes or clocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from scavenger.cluster.model import KNOWN_NODE_STATES, Job, Node, Unread
from scavenger.cluster.pyslurm.messages import JobRow, NodeRow
from scavenger.cluster.slurm import text
from scavenger.cluster.slurm.text import expand, planned
from scavenger.errors import ClusterUnavailable

_BASE_WORDS = {"power": "powered_down"}  # pyslurm 22.5's own word


def read_nodes(rows: Sequence[NodeRow]) -> tuple[Node, ...]:
    """Sorted by name. An answer without any node is no answer."""
    if not rows:
        raise ClusterUnavailable("pyslurm listed no node at all")
    return tuple(sorted((_node(row) for row in rows), key=lambda node: node.name))


def _node(row: NodeRow) -> Node:
    states = frozenset(_BASE_WORDS.get(word, word) for word in text.parse_node_states(row.state))
    strange = () if states <= KNOWN_NODE_STATES else (Unread("state", row.state),)
    gpus = text.node_gpus(row.gres, row.gres_used, "", "")
    return Node(
        name=row.name,
        states=states,
        partitions=frozenset(row.partitions),
        gpu_type=gpus.kind,
        gpus=gpus.total,
        gpus_allocated=gpus.used,
        cpus=row.cpus,
        cpus_allocated=row.cpus_allocated,
        memory_mb=row.memory_mb,
        memory_allocated_mb=row.memory_allocated_mb,
        unread=(*strange, *gpus.unread),
    )


def read_jobs(rows: Sequence[JobRow]) -> tuple[Job, ...]:
    """Sorted by id; a pending array is one job a task, as `squeue -r` lists it."""
    jobs = [job for row in rows for job in [_job(row)] * text.count_tasks(row.array_tasks)]
    return tuple(sorted(jobs, key=lambda job: job.job_id))


def _job(row: JobRow) -> Job:
    state, flags = text.parse_state(row.state)
    nodes = tuple(expand(row.nodes)) if row.nodes else ()
    asked = text.RequestedTres(
        row.tres_alloc, row.tres_per_job, row.tres_per_node, row.tres_per_task, row.tres_per_socket
    )
    gpus = text.job_gpus(asked, row.n_nodes, row.tasks)
    return Job(
        job_id=row.job_id,
        user=row.user,
        partition=row.partition,
        account=text.text_or_empty(row.account),
        state=state,
        flags=flags,
        reason=text.text_or_empty(row.reason),
        name=row.name,
        comment=row.comment,
        nodes=nodes,
        gpus=gpus,
        gpus_by_node=text.spread(gpus, nodes),
        n_nodes=row.n_nodes,
        cpus=row.cpus,
        priority=row.priority,
        restart_count=row.restarts,
        submit_time=float(row.submit_time),
        eligible_time=float(row.eligible_time),
        start_time=float(row.start_time),
        end_time=float(row.end_time),
        time_limit_s=text.parse_duration(row.time_limit),
        exit_code=128 + row.exit_signal if row.exit_signal else row.exit_code,
        planned=planned(row.sched_nodes) if row.sched_nodes else (),
    )
