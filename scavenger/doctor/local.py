"""The checks that apply to the local backend: no Slurm, no other users, one machine's processes.

Owns the list. Each is Slurm's rule of the same name, on what the backend reports. All it reads is the backend's `Cluster` port.

Boundary: the checks of one backend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scavenger.cluster import partition_check
from scavenger.cluster.model import ClusterInfo, ClusterView
from scavenger.cluster.port import Cluster
from scavenger.doctor.facts import SiteRequirements
from scavenger.doctor.findings import Level, SiteFinding
from scavenger.errors import ClusterError, ConfigError


def check(cluster: Cluster, wanted: SiteRequirements) -> Sequence[SiteFinding]:
    """Ask the backend and judge. No answer is a problem: the daemon could not start with it either."""
    try:
        info, view = cluster.info(), cluster.view()
    except ClusterError as error:
        return (SiteFinding("local backend", Level.PROBLEM, error.cause, error.remedy or SERVE),)
    finally:
        cluster.close()
    return judge(info, view, wanted)


SERVE = "start it: python -m scavenger.cluster.local.client serve --dir DIR, and name the same DIR in cluster.local_dir"


def judge(info: ClusterInfo, view: ClusterView, wanted: SiteRequirements) -> Sequence[SiteFinding]:
    """Pure."""
    observed = f"cluster {info.name} of {len(view.nodes)} nodes on this machine answers; nothing is asked of a Slurm, nor is anything there"
    found = [SiteFinding("local backend", Level.OK, observed)]
    try:
        partition_check.check(info, view.partitions, wanted.partition, wanted.qos)
    except ConfigError as error:
        return (*found, SiteFinding("preemption", Level.PROBLEM, error.cause, error.remedy))
    found.append(
        SiteFinding(
            "preemption",
            Level.OK,
            f"{info.preempt_type}: jobs in all other partitions of its nodes take our GPUs",
        )
    )
    return (*found, _gpus(view, wanted), _limits(view, wanted))


def _gpus(view: ClusterView, wanted: SiteRequirements) -> SiteFinding:
    here = [
        node
        for node in view.nodes
        if wanted.partition in node.partitions and wanted.gpu_type in ("", node.gpu_type)
    ]
    gpus = sum(node.gpus for node in here)
    if not gpus:
        kind = f" of type {wanted.gpu_type}" if wanted.gpu_type else ""
        return SiteFinding(
            "gpus",
            Level.PROBLEM,
            f"partition {wanted.partition} has no GPUs{kind}",
            "harvest.partition, harvest.gpu_type",
        )
    return SiteFinding("gpus", Level.OK, f"{gpus} GPUs on {len(here)} nodes of partition {wanted.partition}")


def _limits(view: ClusterView, wanted: SiteRequirements) -> SiteFinding:
    part = view.partition(wanted.partition)
    assert part is not None  # preflight saw it
    if not part.up:
        return SiteFinding(
            "partition limits",
            Level.PROBLEM,
            f"partition {part.name} is down",
            "set it up, or choose another",
        )
    if part.max_time_s < wanted.time_limit_s:
        observed = f"MaxTime of {part.name} is {part.max_time_s / 60:g} min, harvest.time_limit_s is {wanted.time_limit_s / 60:g} min"
        return SiteFinding(
            "partition limits", Level.PROBLEM, observed, f"harvest.time_limit_s = {part.max_time_s:g}"
        )
    most = "no limit of time" if math.isinf(part.max_time_s) else f"{part.max_time_s / 60:g} min at most"
    return SiteFinding(
        "partition limits",
        Level.OK,
        f"partition {part.name} is up, {most}, ours ask for {wanted.time_limit_s / 60:g} min",
    )
