"""The same harvester on a real Slurm: adopted, preempted without grace, back under its id, given back."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scavenger.cluster.model import Job, JobState, PreemptMode, Reservation
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm import backend
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.ledger import records as rec
from scavenger.router.core.events import JobGone
from tests.harvest.world import SLEEPS, World, layout, running, spec, until

pytestmark = pytest.mark.slurm


@pytest.fixture
def sandbox() -> Iterator[SlurmSandbox]:
    """A Slurm of its own: the shared one has two partitions that cannot preempt each other, and harvesting either is refused."""
    with SlurmSandbox(msgspec.structs.replace(layout(), requeue_delay_s=6.0)) as made:
        yield made


@pytest.fixture
def cluster(sandbox: SlurmSandbox) -> SlurmCluster:
    return SlurmCluster(sandbox.env)


def test_a_preempted_job_comes_back_under_its_id_and_leaves_when_nobody_wants_it(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    world = World(cluster, tmp_path, tmp_path / "state")

    async def play() -> None:
        world.want(1)
        async with running(world.harvester(drain_notice_s=0.5), cancel=True):
            await until("an engine runs and is observed", lambda: world.of(rec.AllocationStarted))
            [mine] = world.jobs(JobState.RUNNING)
            theirs = [cluster.submit(spec(workdir="/tmp")) for _ in range(2)]
            await until("the router knows", lambda: world.of(JobGone), 90.0)
            await until(
                "it waits",
                lambda: [job for job in world.jobs(JobState.PENDING) if job.job_id == mine.job_id],
                90.0,
            )
            await asyncio.to_thread(cluster.cancel, tuple(theirs))
            await until("it holds again", lambda: len(world.of(rec.AllocationStarted)) == 2, 90.0)
            world.want(0)
            await until("it is closed", lambda: world.of(rec.JobEnded), 90.0)

    asyncio.run(play())
    assert [(h.restart_count, h.job_id) for h in world.of(rec.AllocationStarted)] == [
        (n, world.of(rec.JobSubmitted)[0].job_id) for n in (0, 1)
    ]
    assert [end.reason for end in world.of(rec.AllocationEnded)] == ["preempted", "cancelled"]
    assert [(gone.incarnation, gone.crashed) for gone in world.of(JobGone)] == [(0, False), (1, False)]
    assert len(world.of(rec.JobIntended)) == 1


@pytest.mark.parametrize("left", ["drained", "finished"])
def test_a_job_that_left_for_good_and_that_slurm_starts_again_is_cancelled_at_once(
    sandbox: SlurmSandbox, cluster: SlurmCluster, tmp_path: Path, left: str
) -> None:
    """Slurm 24.11 does so by itself with a job that was preempted once; here `scontrol requeue` asks for it.

    No poll sees the job between its two lives, so that what is found is an engine at work, well before `drain_notice_s`."""
    world = World(cluster, tmp_path, tmp_path / "state")
    template = SLEEPS if left == "drained" else "#!/bin/bash\n# {{ key | quote }}\nsleep 8\n"

    def scontrol(*argv: str) -> None:
        subprocess.run(["scontrol", *argv], env=sandbox.env, check=True, capture_output=True, timeout=60)

    def listed(job_id: int) -> Job:
        return next(job for job in cluster.jobs() if job.job_id == job_id)

    def again(job_id: int) -> None:
        scontrol(
            "requeue", str(job_id)
        )  # it waits then for `requeue_delay_s`: until its first life's credential is forgotten
        deadline = time.monotonic() + 60
        while (job := listed(job_id)).state is not JobState.RUNNING or job.flags or not job.restart_count:
            assert time.monotonic() < deadline, f"it is not started again: {job}"
            time.sleep(0.2)

    async def play() -> None:
        world.want(1)
        harvester = world.harvester(template, drain_notice_s=600.0)
        async with running(harvester, cancel=True):
            await until("an engine runs and is observed", lambda: world.of(rec.AllocationStarted), 90.0)
            [mine] = [one.job_id for one in world.of(rec.AllocationStarted)]
            if left == "drained":
                world.want(0)
                await until("it is drained", lambda: world.acted("drain"), 90.0)
            else:
                await until("its end is seen", lambda: world.of(rec.AllocationEnded), 90.0)
            async with harvester._cycle_lock:  # no poll meanwhile
                await asyncio.to_thread(again, mine)
            await until("it is cancelled", lambda: world.acted("cancel"), 30.0)
            await until("it is gone", lambda: listed(mine).state is JobState.CANCELLED)

    asyncio.run(play())
    [subject] = {begun.intent_id for begun in world.of(rec.AllocationStarted) if begun.restart_count}
    first, *_ = world.acted("cancel")
    assert (first.subject, first.code) == (subject, "requeued")
    assert "and Slurm put it back" in first.reason


def test_where_slurm_cancels_what_it_preempts_a_fresh_job_comes_and_nothing_is_blamed(tmp_path: Path) -> None:
    normal, scavenge = layout().partitions
    cancels = msgspec.structs.replace(scavenge, preempt_mode=PreemptMode.CANCEL)
    with SlurmSandbox(msgspec.structs.replace(layout(), partitions=(normal, cancels))) as sandbox:
        cluster = SlurmCluster(sandbox.env)
        world = World(cluster, tmp_path, tmp_path / "state")

        async def play() -> None:
            world.want(1)
            async with running(world.harvester(drain_notice_s=0.5, quarantine_after=1), cancel=True):
                await until("an engine runs and is observed", lambda: world.of(rec.AllocationStarted), 90.0)
                theirs = [cluster.submit(spec(workdir="/tmp")) for _ in range(2)]
                await until("the router knows", lambda: world.of(JobGone), 90.0)
                await until("its job has ended", lambda: world.of(rec.JobEnded), 90.0)
                await asyncio.to_thread(cluster.cancel, tuple(theirs))
                await until("another holds", lambda: len(world.of(rec.AllocationStarted)) == 2, 90.0)

        asyncio.run(play())
    first, second = world.of(rec.AllocationStarted)
    assert first.job_id != second.job_id
    assert (first.restart_count, second.restart_count) == (0, 0)
    assert world.of(rec.AllocationEnded)[0].reason == "preempted"
    assert not any(gone.crashed for gone in world.of(JobGone))
    assert not world.events("node_quarantined")


def test_a_peer_whom_slurm_would_let_wait_gets_a_node_within_his_time(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """And each engine is where the policy wanted it, on its GPUs' share of the node."""
    world = World(cluster, tmp_path, tmp_path / "state")
    theirs: list[int] = []

    async def play() -> None:
        world.want(4)
        async with running(
            world.harvester(same_tier_yield_s=0.5, max_pending=4, cpus_per_engine=99), cancel=True
        ):
            await until("all GPUs are ours", lambda: len(world.of(rec.AllocationStarted)) == 4, 90.0)
            theirs.append(await asyncio.to_thread(cluster.submit, spec("scavenge", gpus=2, workdir="/tmp")))
            await until(
                "the peer runs",
                lambda: theirs[0] in {job.job_id for job in world.jobs(JobState.RUNNING)},
                90.0,
            )
            await asyncio.to_thread(cluster.cancel, tuple(theirs))

    asyncio.run(play())
    assert {decision.code for decision in world.acted("drain")} == {"same_tier_job"}
    assert len(world.acted("drain")) == 2
    assert [end.reason for end in world.of(rec.AllocationEnded)][:2] == ["cancelled", "cancelled"]
    pinned = {decision.subject: decision.reason for decision in world.acted("submit")}
    assert all(
        f"{allocation.node} has the smallest gap" in pinned[allocation.intent_id]
        for allocation in world.of(rec.AllocationStarted)
    )


@pytest.mark.parametrize(("standby_jobs", "goes_to"), [(1, "node1"), (0, "node2")])
def test_a_small_job_of_others_goes_where_others_are_too_and_not_to_a_node_that_is_idle_but_for_us(
    cluster: SlurmCluster, tmp_path: Path, standby_jobs: int, goes_to: str
) -> None:
    """Slurm takes the oldest engine away. Without standby jobs that is one of the idle node's, which were there first."""
    world = World(cluster, tmp_path, tmp_path / "state")
    where: list[str] = []

    def running_on(node: str) -> int:
        return sum(node in job.nodes for job in world.jobs(JobState.RUNNING))

    async def play() -> None:
        theirs = [
            await asyncio.to_thread(cluster.submit, spec(gpus=1, workdir="/tmp", nodelist=("node1",)))
            for _ in range(2)
        ]
        await until("others hold node1", lambda: running_on("node1") == 2, 90.0)
        world.want(3)
        async with running(world.harvester(standby_jobs=standby_jobs, max_pending=4), cancel=True):
            await until("node2 is ours", lambda: len(world.of(rec.AllocationStarted)) == 2, 90.0)
            await asyncio.to_thread(cluster.cancel, (theirs[0],))
            await until("and what one of them left", lambda: len(world.of(rec.AllocationStarted)) == 3, 90.0)
            small = await asyncio.to_thread(cluster.submit, spec(gpus=1, workdir="/tmp"))
            await until(
                "the small job runs",
                lambda: small in {job.job_id for job in world.jobs(JobState.RUNNING)},
                90.0,
            )
            where.extend(
                node for job in world.jobs(JobState.RUNNING) if job.job_id == small for node in job.nodes
            )
            await asyncio.to_thread(cluster.cancel, (theirs[1], small))

    asyncio.run(play())
    assert where == [goes_to]
    assert {decision.code for decision in world.acted("release")} == ({"wanted"} if standby_jobs else set())


def test_a_node_that_slurm_keeps_for_a_larger_job_is_used_until_that_one_is_expected(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """An engine that was preempted there has too long a limit to start again: a shorter one takes its place."""
    world = World(cluster, tmp_path, tmp_path / "state")
    limits: list[float] = []

    def here() -> list[Job]:
        return [job for job in world.jobs(JobState.RUNNING) if job.partition == "scavenge"]

    async def submitted(**more: Any) -> int:
        return await asyncio.to_thread(cluster.submit, spec(gpus=2, workdir="/tmp", **more))

    async def play() -> None:
        await submitted(nodelist=("node1",), time_s=1800.0)
        await until("others hold node1", lambda: len(world.jobs(JobState.RUNNING)) == 1, 90.0)
        world.want(1)
        async with running(
            world.harvester(min_runtime_s=120.0, drain_before_s=1.0, fresh_after_s=8.0, time_limit_s=7200.0),
            cancel=True,
        ):
            await until("an engine is on node2", lambda: len(here()) == 1, 90.0)
            [first] = here()
            short = await submitted(nodelist=("node2",), time_s=600.0)
            await until(
                "it is preempted",
                lambda: not here() and short in {job.job_id for job in world.jobs(JobState.RUNNING)},
                90.0,
            )
            large = await submitted(nodes=2, tasks=2, time_s=3600.0)
            waits = JobState.PENDING
            await until(
                "backfill plans it",
                lambda: [job for job in world.jobs(waits) if job.job_id == large and job.planned],
                90.0,
            )
            await asyncio.to_thread(cluster.cancel, (short,))
            await until("another engine is on node2", lambda: len(here()) == 1, 90.0)
            [second] = here()
            assert second.job_id != first.job_id
            limits.extend((first.time_limit_s, second.time_limit_s))

    asyncio.run(play())
    assert limits[0] > 1800 > limits[1] > 1200
    [exchanged] = world.acted("cancel_pending")
    assert exchanged.code == "fresh"
    assert "node2 is kept for other users" in exchanged.reason


@pytest.mark.long
@pytest.mark.accounting
def test_engines_end_before_a_maintenance_and_come_back_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reservations are asked for every five minutes; here each second, because this one is made 45 s before it begins."""
    monkeypatch.setattr(backend, "RESERVATIONS_S", 1.0)
    with SlurmSandbox(msgspec.structs.replace(layout(), requeue_delay_s=6.0, accounting=True)) as sandbox:
        cluster = SlurmCluster(sandbox.env)
        world = World(cluster, tmp_path, tmp_path / "state")
        starts_in_s = 45

        def scontrol(*argv: str) -> None:
            subprocess.run(["scontrol", *argv], env=sandbox.env, check=True, capture_output=True, timeout=60)

        def maintenance() -> list[Reservation]:
            return [one for one in cluster.view().reservations if one.name == "upgrade"]

        def on_node1() -> list[Job]:
            return [job for job in world.jobs(JobState.RUNNING) if "node1" in job.nodes]

        async def play() -> None:
            world.want(4)
            async with running(
                world.harvester(drain_notice_s=0.5, drain_before_s=15.0, min_runtime_s=60.0, max_pending=4),
                cancel=True,
            ):
                await until("all GPUs are ours", lambda: len(world.of(rec.AllocationStarted)) == 4, 90.0)
                await asyncio.to_thread(
                    scontrol,
                    "create",
                    "reservation",
                    "reservationname=upgrade",
                    f"starttime=now+{starts_in_s}",
                    "duration=60",
                    "nodes=node1",
                    "flags=maint,ignore_jobs",
                    "users=root",
                )
                await until("it is seen", maintenance, 30.0)
                begins = maintenance()[0].start
                await until("its node is empty", lambda: not on_node1(), 90.0)
                assert time.time() < begins
                await until("it has begun", lambda: time.time() > begins + 2.0, 90.0)
                assert not on_node1()
                assert len(world.jobs(JobState.RUNNING)) == 2, "those of the other node stay"
                await asyncio.to_thread(scontrol, "delete", "reservation=upgrade")
                await until("engines are there again", lambda: len(on_node1()) == 2, 120.0)

        asyncio.run(play())
    assert {decision.code for decision in world.acted("drain")} == {"reserved"}
    assert not world.events("node_quarantined")
