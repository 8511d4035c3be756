"""Slurm's own limits on the daemon's user, by QOS, on a real Slurm with slurmdbd: harvesting stays below them and blames nobody."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from scavenger.cluster.model import JobState
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.ledger import records as rec
from tests.clusters import empty
from tests.harvest.world import World, layout, running, until

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.accounting]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[SlurmSandbox]:
    with SlurmSandbox(msgspec.structs.replace(layout(), requeue_delay_s=6.0, qos=True)) as made:
        yield made


@pytest.fixture
def world(sandbox: SlurmSandbox, tmp_path: Path) -> Iterator[World]:
    cluster = SlurmCluster(sandbox.env)
    yield World(cluster, tmp_path, tmp_path / "state")
    empty(cluster)


def set_qos(sandbox: SlurmSandbox, value: str) -> None:
    argv = ["sacctmgr", "-i", "modify", "qos", "scavenge", "set", value]
    subprocess.run(argv, env=sandbox.env, check=True, capture_output=True, timeout=60)


def test_while_slurm_holds_a_job_back_for_a_limit_no_other_is_submitted(
    sandbox: SlurmSandbox, world: World
) -> None:
    set_qos(sandbox, "MaxTRESPerUser=gres/gpu=1")

    async def play() -> None:
        world.want(3)
        async with running(world.harvester(qos="scavenge"), cancel=True):
            await until("one runs", lambda: world.of(rec.AllocationStarted), 60.0)
            await until(
                "that is the reason",
                lambda: [d for d in world.of(rec.Decision) if d.code == "account_limit"],
                60.0,
            )
            polls = len(world.of(rec.ClusterPolled))
            await until(
                "it is polled again and again", lambda: len(world.of(rec.ClusterPolled)) > polls + 5, 60.0
            )
            assert len(world.jobs(JobState.RUNNING)) == 1
            assert len(world.jobs(JobState.PENDING)) <= 2, "max_pending"
            submitted = len(world.of(rec.JobIntended))
            await asyncio.to_thread(set_qos, sandbox, "MaxTRESPerUser=gres/gpu=3")
            await until("all three run", lambda: len(world.jobs(JobState.RUNNING)) == 3, 90.0)
            assert len(world.of(rec.JobIntended)) <= submitted + 1

    try:
        asyncio.run(play())
    finally:
        set_qos(sandbox, "MaxTRESPerUser=gres/gpu=-1")
    assert not world.events("node_quarantined")


def test_a_submission_that_a_limit_refuses_is_tried_later_and_no_node_is_blamed(
    sandbox: SlurmSandbox, world: World
) -> None:
    set_qos(sandbox, "MaxSubmitJobsPerUser=1")

    async def play() -> None:
        world.want(2)
        async with running(world.harvester(qos="scavenge", quarantine_after=1), cancel=True):
            await until("one runs", lambda: world.of(rec.AllocationStarted), 60.0)
            await until("the other is refused", lambda: world.events("submit_refused"), 60.0)
            assert len(world.jobs(JobState.RUNNING)) == 1
            await asyncio.to_thread(set_qos, sandbox, "MaxSubmitJobsPerUser=-1")
            await until("both run", lambda: len(world.jobs(JobState.RUNNING)) == 2, 90.0)

    try:
        asyncio.run(play())
    finally:
        set_qos(sandbox, "MaxSubmitJobsPerUser=-1")
    assert not world.events("node_quarantined")
