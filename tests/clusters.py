"""Clusters for tests: one private Slurm for the whole run, and local clusters; both end with the tests, however they end.

`slurm_sandbox` is shared and is emptied after each test that asks for it. Mark such tests `slurm`, so that a missing
Slurm is a skip with its reason (or a failure where SCAVENGER_REQUIRE names it).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scavenger.cluster.layout import ClusterLayout, PartitionLayout
from scavenger.cluster.local.client import LocalCluster, LocalServer
from scavenger.cluster.model import ClusterView, JobFlag, JobState, PreemptMode
from scavenger.cluster.port import Cluster
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from tests import slurm_faults

SHARED = ("node1", "node2", "node3")


def layout_for_tests(*, grace_s: float = 10.0, requeue_delay_s: float = 6.0) -> ClusterLayout:
    """The demo's partitions, and `scavenge0`: the same as `scavenge` with no grace at all."""
    lowest = PreemptMode.REQUEUE
    return ClusterLayout(
        nodes=("node0", *SHARED),
        gpus=4,
        requeue_delay_s=requeue_delay_s,
        kill_wait_s=6.0,  # what an engine without a GraceTime has to say goodbye, on a machine that is busy with other tests
        partitions=(
            PartitionLayout(name="reserved", nodes=("node0",), priority_tier=100),
            PartitionLayout(name="normal", nodes=SHARED, priority_tier=10),
            PartitionLayout(
                name="scavenge", nodes=SHARED, priority_tier=1, preempt_mode=lowest, grace_s=grace_s
            ),
            PartitionLayout(name="scavenge0", nodes=SHARED, priority_tier=1, preempt_mode=lowest),
        ),
    )


def wait_for(what: str, condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    """Poll until the condition holds; fail naming what did not happen."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.03)


def unfinished(view: ClusterView) -> tuple[int, ...]:
    live = (JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED)
    return tuple(job.job_id for job in view.jobs if job.state in live or JobFlag.COMPLETING in job.flags)


def empty(cluster: Cluster) -> None:
    """Cancel every job and wait until all are gone."""
    cluster.cancel(unfinished(cluster.view()))
    wait_for("the cluster is empty", lambda: not unfinished(cluster.view()))


@pytest.fixture(scope="session")
def _one_slurm() -> Iterator[SlurmSandbox]:
    with SlurmSandbox(layout_for_tests()) as sandbox:
        yield sandbox


@pytest.fixture
def slurm_sandbox(_one_slurm: SlurmSandbox) -> Iterator[SlurmSandbox]:
    """The shared private Slurm (`layout_for_tests`): nodes node0..node3 with 4 fake GPUs each, and nobody's jobs."""
    yield _one_slurm
    cluster = SlurmCluster(_one_slurm.env)
    for node in cluster.view().nodes:
        if not node.usable:
            slurm_faults.resume_node(_one_slurm, node.name)
    empty(cluster)


@pytest.fixture
def local_server(tmp_path: Path) -> Iterator[LocalServer]:
    with LocalServer(tmp_path / "cluster", layout_for_tests(requeue_delay_s=0.3)) as server:
        yield server


@pytest.fixture
def local_cluster(local_server: LocalServer) -> LocalCluster:
    """A local cluster of the same layout, its processes real, its requeue delay short."""
    return local_server.cluster()
