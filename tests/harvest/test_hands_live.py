"""Engines change hands on a live cluster: their jobs go on, and the key file in the engine's place is the next run's.

The cluster, its jobs and the harvester are real; the router is a list, so the engines' registrations are the test's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from scavenger.cluster.model import JobState
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.harvest.harvester import Harvester
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import Demand
from scavenger.protocol import keys
from scavenger.router.core.events import IntentHandedOver, IntentRevoked, WorkerLife
from tests.clusters import empty
from tests.harvest.world import World, layout, running, spec, until


def demand(hers: int, his: int) -> list[Demand]:
    """Two runs of two owners, whose engines are of one kind."""
    return [
        Demand(1, "hers", hers, 1, f"{hers} are useful", owner="ada", hands="one kind"),
        Demand(2, "his", his, 1, f"{his} are useful", owner="bob", hands="one kind"),
    ]


def allocated(harvester: Harvester) -> int:
    """Jobs that the harvester has seen start: one that it has not, it would cancel instead."""
    return sum(one.allocation is not None for one in harvester.tracker.intents.values())


def key_of(world: World, intent_id: str) -> keys.KeyPair:
    return keys.read_keypair(keys.worker_key_path(world.state_dir, intent_id))


def an_engine_changes_hands(world: World) -> None:
    """In the same job, which another user then preempts: it comes back for the run that it changed hands to."""

    async def play() -> None:
        world.demand = demand(2, 0)
        harvester = world.harvester(drain_notice_s=30.0, max_engines=2, change_hands=True)
        async with running(harvester, cancel=True):
            await until("the harvester saw both start", lambda: allocated(harvester) == 2, 120.0)
            before = {job.name: job.job_id for job in world.jobs(JobState.RUNNING)}
            world.demand = demand(1, 1)
            await until("one is told", lambda: world.of(IntentHandedOver), 120.0)
            (order,) = world.of(IntentHandedOver)
            (changed,) = world.of(rec.JobChangedHands)
            assert world.said.index(changed) < world.said.index(order)
            assert (changed.intent_id, changed.run_before, changed.run_id) == (order.intent_id, 1, 2)
            pair = key_of(world, order.intent_id)
            assert (pair.run, pair.public) == ("his", order.public_key)
            assert pair.public == changed.worker_key
            mine = [who.run for who in world.allowed.values() if who.intent_id == order.intent_id]
            assert sorted(mine) == ["hers", "his"], "the old key says goodbye yet"
            now = time.time()
            world.lives = lambda: [WorkerLife(order.intent_id, 0, "node1", now, now, True, True, 2)]
            await until(
                "the old key opens nothing",
                lambda: (
                    [who.run for who in world.allowed.values() if who.intent_id == order.intent_id] == ["his"]
                ),
                120.0,
            )
            assert {job.name: job.job_id for job in world.jobs(JobState.RUNNING)} == before
            assert len(world.of(rec.JobIntended)) == 2, "a job was submitted besides"
            assert not world.of(IntentRevoked)
            node = next(job.nodes[0] for job in world.jobs(JobState.RUNNING) if job.name == order.intent_id)
            theirs = await asyncio.to_thread(
                world.site.submit, spec(gpus=2, nodelist=(node,), workdir="/tmp")
            )
            await until(
                "another user has its node",
                lambda: theirs in {job.job_id for job in world.jobs(JobState.RUNNING)},
                120.0,
            )
            assert key_of(world, order.intent_id).run == "his"
            await asyncio.to_thread(world.site.cancel, (theirs,))

    asyncio.run(play())
    assert len(world.of(rec.JobChangedHands)) == 1


def test_an_engine_changes_hands_in_its_job(world: World) -> None:
    an_engine_changes_hands(world)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[World]:
    with SlurmSandbox(msgspec.structs.replace(layout(), requeue_delay_s=6.0)) as sandbox:
        cluster = SlurmCluster(sandbox.env)
        yield World(cluster, tmp_path, tmp_path / "state")
        empty(cluster)


@pytest.mark.slurm
def test_an_engine_changes_hands_in_its_job_on_slurm(slurm: World) -> None:
    an_engine_changes_hands(slurm)
