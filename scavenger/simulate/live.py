"""What one poll of a cluster says of its idle GPUs: how many idle now, and what the policy would do about them. Pure.

    ClusterView --harvest.decide.decide.decide--------------------> what it would submit, and why
                --harvest.decide.free_capacity.find_free_capacity--> how many engines fit
    ClusterPoll --rows, notes--> text

Reads only: it is handed a view. A site without a harvest partition is shown as if it had one below all other partitions, and `notes` says
so. One poll cannot say how long GPUs stay idle, or how often they are taken.

Boundary: a live cluster is polled; the rest of `simulate` plays what was recorded or drawn. It must not know a backend.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from scavenger.cluster import partition_check
from scavenger.cluster.model import ClusterInfo, ClusterView, Partition, PreemptMode
from scavenger.errors import ConfigError
from scavenger.harvest.decide import decide
from scavenger.harvest.decide.decide import HarvestLimits, OurJob, Submit
from scavenger.harvest.decide.free_capacity import GpuUse, find_free_capacity, gpu_use
from scavenger.harvest.track.observed_jobs import held_back
from scavenger.policy.fleet_size import Demand
from scavenger.simulate.sacct import COMMAND
from scavenger.simulate.survey import text
from scavenger.simulate.survey.text import TableRow
from scavenger.simulate.survey.waits import Timing

NEEDS_TIME = f"one poll cannot tell how long GPUs stay idle. Ask accounting:\n    {COMMAND}\n    scavenger simulate --sacct dump.txt"


def rows(found: ClusterPoll, wish: EngineRequest) -> tuple[TableRow, ...]:
    """The table of one poll."""
    gpus = found.gpus
    size = "1 GPU" if wish.gpus_per_engine == 1 else f"{wish.gpus_per_engine} GPUs"
    spread = ", ".join(f"{nodes} with {count}" for count, nodes in found.idle_by_count) or "none"
    submits = [
        action for action in found.decision.actions if isinstance(action, Submit) and not action.standby
    ]
    return (
        TableRow(
            "GPUs idle now",
            f"{gpus.idle}",
            f"on {found.nodes} usable nodes of partition {found.partition}; nodes by idle GPUs: {spread}",
        ),
        TableRow(
            "other users use",
            f"{gpus.other_users}",
            f"{found.pending_other_users} jobs of other users wait for GPUs there",
        ),
        TableRow("harvested", f"{gpus.harvested}", f"{found.engines} engines run, {found.pending} wait"),
        TableRow("unusable", f"{gpus.unusable}", "on nodes of the partition that are down or drained"),
        TableRow("outside", f"{gpus.reserved}", "on nodes that the partition does not have"),
        TableRow("engines that fit now", f"{found.fit}", f"of {size} each: {found.free_capacity}"),
        TableRow("the policy would submit", f"{len(submits)}", found.decision.reason),
        *(TableRow("  each", size, action.reason) for action in submits[:1]),
        *text.waits(found.timing),
    )


def notes(found: ClusterPoll, configured: bool) -> tuple[str, ...]:
    """What to know before the table is believed. `configured`: the limits are a site's own."""
    lines = [] if configured else ["There is no scavenger.toml here: the limits are the daemon's defaults."]
    if found.hypothetical:
        made = "over all nodes with GPUs, GraceTime 0, its PriorityTier below the other partitions'"
        lines.append(f"There is no partition {found.partition!r} yet: this shows one {made}.")
    if found.refused:
        lines.append(f"The daemon would refuse it as it is: {found.refused}")
    return (*lines, NEEDS_TIME)


RUN = 1  # the run that is asked for; one is enough
NAMED = re.compile(r"scv-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What a run would ask for. `engines` None: as many as fit, next to those that run already."""

    gpus_per_engine: int
    engines: int | None = None


@dataclass(frozen=True, slots=True)
class ClusterPoll:
    """One poll. `fit`: engines that would start now. `idle_by_count`: (idle GPUs on a node, nodes). `decision`: with its reasons.

    `refused`: why the daemon would not harvest this partition as it is, or "". `hypothetical`: the partition does not exist yet.
    """

    cluster: str
    partition: str
    hypothetical: bool
    refused: str
    gpus: GpuUse
    idle_by_count: tuple[tuple[int, int], ...]
    nodes: int
    free_capacity: str
    fit: int
    engines: int
    pending: int
    decision: decide.HarvestDecision
    timing: Timing
    pending_other_users: int


def poll(
    view: ClusterView,
    info: ClusterInfo,
    wish: EngineRequest,
    limits: HarvestLimits,
    now: float,
    qos: str = "",
) -> ClusterPoll:
    """Answer from one observation, with `limits` as the daemon would have them. Raises `ConfigError` for a cluster without GPUs."""
    hypothetical = view.partition(limits.partition) is None
    seen = with_partition(view, limits.partition) if hypothetical else view
    part = seen.partition(limits.partition)
    assert part is not None  # it was there, or was put there
    ours = our_jobs(seen)
    ids = frozenset(job.job_id for job in ours)
    free_capacity = find_free_capacity(seen, limits, ours, now)
    explained, fit = free_capacity.explain(), 0
    while free_capacity.take(wish.gpus_per_engine, limits.job.cpus, limits.job.memory_mb):
        fit += 1
    count = len(ours) + fit if wish.engines is None else wish.engines
    why = f"asked for {wish.engines}" if wish.engines is not None else "as many as fit"
    decision = decide.decide(
        seen, [Demand(RUN, "example", count, wish.gpus_per_engine, why)], ours, limits, now
    )
    inside = [node for node in seen.nodes if node.name in part.nodes and node.usable]
    by_count = Counter(node.idle_gpus for node in inside if node.idle_gpus)
    gpus = gpu_use(seen, limits.partition, ids, now)
    return ClusterPoll(
        cluster=f"{info.name} ({info.backend} {info.version})",
        partition=limits.partition,
        hypothetical=hypothetical,
        refused=_refusal(info, seen, limits.partition, qos, hypothetical),
        gpus=gpus,
        idle_by_count=tuple(sorted(by_count.items())),
        nodes=len(inside),
        free_capacity=explained,
        fit=fit,
        engines=sum(not job.waits for job in ours),
        pending=sum(job.waits for job in ours),
        decision=decision,
        timing=Timing(part.grace_s, info.kill_wait_s, info.message_timeout_s),
        pending_other_users=gpus.jobs_pending_other_users,
    )


def with_partition(view: ClusterView, name: str) -> ClusterView:
    """The same cluster with a preemptible partition over every node that has GPUs, its tier below all others."""
    nodes = frozenset(node.name for node in view.nodes if node.gpus)
    if not nodes:
        raise ConfigError(
            "no node of this cluster has GPUs",
            "Slurm must know them: GresTypes=gpu, and Gres=gpu:... on the nodes",
        )
    tier = min((part.priority_tier for part in view.partitions), default=1) - 1
    made = Partition(name, nodes, tier, PreemptMode.REQUEUE, 0.0, float("inf"))
    return replace(view, partitions=(*view.partitions, made))


def our_jobs(view: ClusterView) -> list[OurJob]:
    """Jobs that carry an intent's name: a daemon's, whichever. Without its ledger their run is not known: all count as the asked one's."""
    found = []
    for job in view.jobs:
        if NAMED.fullmatch(job.name) and (job.waits or job.has_gpus_allocated):
            held = held_back(job) if job.waits else ""
            n_nodes = max(1, job.n_nodes)
            found.append(
                OurJob(
                    job.name,
                    RUN,
                    job.job_id,
                    job.gpus,
                    job.waits,
                    ",".join(job.nodes),
                    held,
                    connected=True,
                    leases=1,
                    n_nodes=n_nodes,
                )
            )
    return found


def _refusal(info: ClusterInfo, view: ClusterView, name: str, qos: str, hypothetical: bool) -> str:
    """What `scavenger daemon` would refuse about the partition; of one that does not exist only what the cluster itself lacks."""
    if hypothetical and info.preempts_by == "qos":
        return ""  # a QOS would go with the partition
    try:
        partition_check.check(info, view.partitions, name, qos)
    except ConfigError as error:
        return f"{error.cause} ({error.remedy})"
    return ""
