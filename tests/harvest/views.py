"""Builders of cluster views for the harvest tests: the demo's partitions, nodes of four GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scavenger.cluster.model import ClusterInfo, ClusterView, Job, JobState, Node, Partition, PreemptMode
from scavenger.harvest.decide.actions import comment_of
from scavenger.ledger.records import JobIntended

UID = "feedbeef"
USER = "scavenger"
SHARED = ("node1", "node2", "node3")
INFO = ClusterInfo("test", "local", "1", "preempt/partition_prio", 2.0, 3.0, USER)
PARTITIONS = (
    Partition("normal", frozenset(SHARED), 10, PreemptMode.OFF, 0.0, float("inf")),
    Partition("reserved", frozenset({"node0"}), 100, PreemptMode.OFF, 0.0, float("inf")),
    Partition("scavenge", frozenset(SHARED), 1, PreemptMode.REQUEUE, 10.0, float("inf")),
)


def node(
    name: str,
    allocated: int = 0,
    *,
    gpus: int = 4,
    states: Sequence[str] = (),
    cpus_allocated: int | None = None,
) -> Node:
    inside = frozenset(p.name for p in PARTITIONS if name in p.nodes)
    load = frozenset(states) or frozenset({"mixed" if allocated else "idle"})
    used = allocated if cpus_allocated is None else cpus_allocated
    return Node(name, load, inside, "h100", gpus, allocated, 64, used, 1_000_000, 0)


def job(job_id: int, state: JobState = JobState.PENDING, **more: Any) -> Job:
    fields: dict[str, Any] = {
        "user": "alice",
        "partition": "normal",
        "gpus": 1,
        "reason": "Resources" if state is JobState.PENDING else "",
    }
    return Job(job_id=job_id, state=state, **{**fields, **more})


def ours(intent_id: str, job_id: int, state: JobState = JobState.PENDING, **more: Any) -> Job:
    """A job of ours, found by comment and name."""
    fields: dict[str, Any] = {
        "user": USER,
        "partition": "scavenge",
        "gpus": 1,
        "name": intent_id,
        "comment": comment_of(UID, intent_id),
    }
    if state is JobState.RUNNING:
        fields |= {"nodes": ("node1",), "gpus_by_node": (("node1", 1),)}
    return Job(job_id=job_id, state=state, **{**fields, **more})


def view(at: float, jobs: Sequence[Job] = (), nodes: Sequence[Node] | None = None) -> ClusterView:
    if nodes is None:
        nodes = [node("node0"), *(node(name, _held(jobs, name)) for name in SHARED)]
    return ClusterView(at, tuple(nodes), tuple(jobs), PARTITIONS)


def _held(jobs: Sequence[Job], name: str) -> int:
    return sum(
        gpus for one in jobs if one.has_gpus_allocated for where, gpus in one.gpus_by_node if where == name
    )


def intended(intent_id: str, at: float = 0.0, run_id: int = 1, pinned: str = "") -> JobIntended:
    return JobIntended(intent_id, run_id, "scavenge", 1, "k" * 40, at, pinned)
