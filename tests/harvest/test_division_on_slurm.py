"""GPUs change hands between runs of two owners on a real Slurm, while other users preempt engines.

Slurm, its jobs and the harvester are real. What the runs are worth, and the engines' drain, are the test's: the router is a list.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from scavenger.cluster.model import JobState
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import Demand
from tests.clusters import empty
from tests.harvest.test_division import benefit
from tests.harvest.world import World, layout, running, spec, until

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def sandbox() -> Iterator[SlurmSandbox]:
    with SlurmSandbox(msgspec.structs.replace(layout(), requeue_delay_s=6.0)) as made:
        yield made


@pytest.fixture
def world(sandbox: SlurmSandbox, tmp_path: Path) -> Iterator[World]:
    cluster = SlurmCluster(sandbox.env)
    yield World(cluster, tmp_path, tmp_path / "state")
    empty(cluster)


def demand(ada_gains: bool) -> list[Demand]:
    """Two runs that want all four GPUs, of which one gains far more by each."""
    much, little = benefit(90.0, 32.0, start_s=1.0), benefit(60.0, 0.5, start_s=1.0)
    first, second = (much, little) if ada_gains else (little, much)
    return [
        Demand(1, "hers", 4, 1, "4 are useful", benefit=first, owner="ada"),
        Demand(2, "his", 4, 1, "4 are useful", benefit=second, owner="bob"),
    ]


def engines(world: World) -> dict[int, int]:
    """Engines that run, by run, of the jobs that nobody asked to leave."""
    run_of = {one.intent_id: one.run_id for one in world.of(rec.JobIntended)}
    asked = {one.subject for action in ("drain", "cancel", "cancel_pending") for one in world.acted(action)}
    names = [job.name for job in world.jobs(JobState.RUNNING)]
    return Counter(run_of[name] for name in names if name in run_of and name not in asked)


def test_engines_go_to_the_run_that_gains_more_and_back_while_others_preempt(world: World) -> None:
    moves = 0

    async def play() -> None:
        nonlocal moves
        world.demand = demand(True)
        harvester = world.harvester(
            drain_notice_s=0.5,
            max_pending=4,
            division="value",
            division_floor=0.8,
            division_hold_s=0.5,
            fresh_after_s=1.0,
        )
        async with running(harvester, cancel=True):
            await until("ada's run has all but bob's floor", lambda: engines(world) == {1: 3, 2: 1}, 90.0)
            for ada_gains in (False, True, False, True):
                world.demand = demand(ada_gains)
                expected = {1: 3, 2: 1} if ada_gains else {1: 1, 2: 3}
                await until(f"{expected}", lambda now=expected: engines(world) == now, 90.0)  # type: ignore[misc]  # a default in a lambda
            theirs = await asyncio.to_thread(
                world.site.submit, spec(gpus=2, nodelist=("node1",), workdir="/tmp")
            )
            await until(
                "another user has node1",
                lambda: theirs in {job.job_id for job in world.jobs(JobState.RUNNING)},
                60.0,
            )
            world.demand = demand(False)
            await until("each has one on node2", lambda: sum(engines(world).values()) == 2, 90.0)
            await until(
                "as the floors are", lambda: engines(world) == {1: 1, 2: 1} or engines(world)[2] == 2, 60.0
            )
            await asyncio.to_thread(world.site.cancel, (theirs,))
            await until("bob's run gains what comes back", lambda: engines(world) == {1: 1, 2: 3}, 120.0)
            moves = sum(one.code == "division" for one in world.acted("drain"))

    asyncio.run(play())
    assert moves >= 8, "two engines at each of four changes"
    assert not world.of(rec.EngineDied), "no engine that left is taken for one that failed"
    divided = world.acted("divide")
    assert divided
    inputs = msgspec.json.decode(divided[-1].inputs)
    assert {row["run"]: row["gets"] for row in inputs["division"]} == {"hers": 1, "his": 3}
    assert all(row["next"] <= row["last"] for row in inputs["division"])
    assert any(one.reason.startswith("one of run his saves") for one in world.acted("drain"))
