"""Shares of a GPU (gres/shard), MIG slices and licences, on a real Slurm with slurmdbd."""

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
from tests.clusters import empty, wait_for
from tests.harvest.world import World, layout, running, until

pytestmark = [pytest.mark.slurm, pytest.mark.accounting]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[SlurmSandbox]:
    with SlurmSandbox(
        msgspec.structs.replace(layout(), requeue_delay_s=6.0, shards=4, licenses="solver:1", accounting=True)
    ) as made:
        yield made


@pytest.fixture
def world(sandbox: SlurmSandbox, tmp_path: Path) -> Iterator[World]:
    cluster = SlurmCluster(sandbox.env)
    yield World(cluster, tmp_path, tmp_path / "state")
    empty(cluster)


def submit(sandbox: SlurmSandbox, *options: str) -> int:
    """A job of somebody else, in Slurm's own words."""
    argv = ["sbatch", "--parsable", "--time=30", "--output=/dev/null", *options, "--wrap=sleep 600"]
    done = subprocess.run(
        argv, env=sandbox.env, cwd="/tmp", check=True, capture_output=True, text=True, timeout=60
    )
    return int(done.stdout)


def has_started(world: World, job_id: int) -> bool:
    return job_id in {job.job_id for job in world.jobs(JobState.RUNNING)}


def test_a_gpu_of_which_others_use_a_share_is_not_harvested(sandbox: SlurmSandbox, world: World) -> None:
    theirs = [submit(sandbox, "--partition=normal", "--nodelist=node1", "--gres=shard:1") for _ in range(2)]
    wait_for("they run", lambda: all(has_started(world, one) for one in theirs))
    wait_for(
        "the GPU that they share is not idle",
        lambda: {node.name: node.idle_gpus for node in world.site.view().nodes} == {"node1": 1, "node2": 2},
    )  # the poll that sees a job first counts a GPU for each

    async def play() -> None:
        world.want(4)
        async with running(world.harvester(max_pending=4), cancel=True):
            await until("the whole GPUs are ours", lambda: len(world.of(rec.AllocationStarted)) == 3, 90.0)
            polls = len(world.of(rec.ClusterPolled))
            await until(
                "it is polled again and again", lambda: len(world.of(rec.ClusterPolled)) > polls + 5, 60.0
            )

    asyncio.run(play())
    assert len(world.of(rec.JobIntended)) == 3, "none is submitted for the GPU that is shared"


@pytest.mark.parametrize(
    ("partition", "code"), [("normal", "voluntary_preemption"), ("scavenge", "same_tier_job")]
)
def test_a_job_that_waits_for_a_share_gets_it(
    sandbox: SlurmSandbox, world: World, partition: str, code: str
) -> None:
    """Where its tier is higher Slurm preempts for it, if the daemon did not drain an engine before; else the daemon must."""
    theirs: list[int] = []

    async def play() -> None:
        world.want(4)
        async with running(
            world.harvester(drain_notice_s=0.5, max_pending=4, same_tier_yield_s=0.5), cancel=True
        ):
            await until("all GPUs are ours", lambda: len(world.of(rec.AllocationStarted)) == 4, 90.0)
            theirs.append(
                await asyncio.to_thread(submit, sandbox, f"--partition={partition}", "--gres=shard:1")
            )
            await until("the job runs", lambda: has_started(world, theirs[0]), 90.0)
            await asyncio.to_thread(world.site.cancel, tuple(theirs))

    asyncio.run(play())
    assert {decision.code for decision in world.acted("drain")} <= {code}


def test_a_job_that_waits_for_a_licence_gets_a_gpu_once_it_has_that(
    sandbox: SlurmSandbox, world: World
) -> None:
    holder = submit(sandbox, "--partition=normal", "--licenses=solver:1")
    wait_for("the licence is taken", lambda: has_started(world, holder))
    theirs = submit(sandbox, "--partition=scavenge", "--gres=gpu:1", "--licenses=solver:1")
    wait_for(
        "Slurm says what it waits for",
        lambda: any(job.reason.startswith("Licenses") for job in world.jobs(JobState.PENDING)),
    )

    async def play() -> None:
        world.want(4)
        async with running(world.harvester(max_pending=4, same_tier_yield_s=0.5), cancel=True):
            await until("all GPUs are ours", lambda: len(world.of(rec.AllocationStarted)) == 4, 90.0)
            polls = len(world.of(rec.ClusterPolled))
            await until(
                "it is polled again and again", lambda: len(world.of(rec.ClusterPolled)) > polls + 5, 60.0
            )
            assert not world.of(rec.AllocationEnded)
            await asyncio.to_thread(world.site.cancel, (holder,))
            await until("with the licence it gets a GPU", lambda: has_started(world, theirs), 90.0)
            await asyncio.to_thread(world.site.cancel, (theirs,))

    asyncio.run(play())
    assert {decision.code for decision in world.acted("drain")} == {"same_tier_job"}


def test_slices_of_a_gpu_are_gpus_of_their_type(tmp_path: Path) -> None:
    """MIG, as sites configure it: `Gres=gpu:1g.10gb:2`. An engine asks for the type that `harvest.gpu_type` names."""
    with SlurmSandbox(msgspec.structs.replace(layout(), gpu_type="1g.10gb", accounting=True)) as made:
        world = World(SlurmCluster(made.env), tmp_path, tmp_path / "state")

        async def play() -> None:
            world.want(2)
            async with running(world.harvester(gpu_type="1g.10gb"), cancel=True):
                await until("two are ours", lambda: len(world.of(rec.AllocationStarted)) == 2, 90.0)

        asyncio.run(play())
        assert {node.gpu_type for node in world.site.view().nodes} == {"1g.10gb"}
