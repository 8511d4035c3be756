"""A site's prolog and epilog, on a real Slurm: one that fails, one that takes long, and that ours run as everybody's."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from scavenger.cluster.model import JobState
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.ledger import records as rec
from tests import slurm_faults
from tests.clusters import empty
from tests.harvest.world import World, layout, running, until

pytestmark = pytest.mark.slurm

PROLOG = """#!/bin/sh
echo "$SLURM_JOB_ID $SLURMD_NODENAME" >> {dir}/prolog.log
[ -e {dir}/slow ] && sleep 6
[ -e {dir}/fails-on-$SLURMD_NODENAME ] && exit 1
exit 0
"""
EPILOG = """#!/bin/sh
echo "$SLURM_JOB_ID $SLURMD_NODENAME" >> {dir}/epilog.log
exit 0
"""


@dataclass
class Site:
    sandbox: SlurmSandbox
    dir: Path

    def ran(self, what: str) -> list[list[str]]:
        path = self.dir / f"{what}.log"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def say(self, what: str) -> Path:
        path = self.dir / what
        path.touch()
        return path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("programs")
    programs = {}
    for name, text in (("prolog", PROLOG), ("epilog", EPILOG)):
        path = folder / name
        path.write_text(text.format(dir=shlex.quote(str(folder))))
        path.chmod(0o755)
        programs[name] = str(path)
    with SlurmSandbox(msgspec.structs.replace(layout(), requeue_delay_s=6.0, **programs)) as made:
        yield Site(made, folder)


@pytest.fixture
def world(site: Site, tmp_path: Path) -> Iterator[World]:
    cluster = SlurmCluster(site.sandbox.env)
    yield World(cluster, tmp_path, tmp_path / "state")
    for path in (site.dir / "slow", *site.dir.glob("fails-on-*")):
        path.unlink(missing_ok=True)
    empty(cluster)
    for node in ("node1", "node2"):
        slurm_faults.resume_node(site.sandbox, node)


def test_a_slow_prolog_delays_an_engine_and_the_epilog_runs_after_it(site: Site, world: World) -> None:
    site.say("slow")

    async def play() -> None:
        world.want(1)
        async with running(world.harvester()):
            await until("it holds GPUs", lambda: world.of(rec.AllocationStarted))
            polls = len(world.of(rec.ClusterPolled))
            await until("time goes by", lambda: len(world.of(rec.ClusterPolled)) > polls + 10)
            assert not world.of(rec.AllocationEnded), "a prolog that takes long ends nothing"
            world.want(0)
            await until("it leaves", lambda: world.of(rec.JobEnded))

    asyncio.run(play())
    assert not world.of(rec.EngineDied)
    [started] = world.of(rec.AllocationStarted)
    name = [str(started.job_id), started.node]
    assert name in site.ran("prolog")
    assert name in site.ran("epilog")


def test_a_node_drained_by_a_failing_prolog_is_not_hammered_and_no_run_is_blamed(
    site: Site, world: World
) -> None:
    site.say("fails-on-node1")
    before = len(site.ran("prolog"))

    async def play() -> None:
        world.want(1)
        harvester = world.harvester(backoff_s=3.0)
        async with running(harvester, cancel=True):
            await until("it is told", lambda: world.events("launch_failed"), 90.0)
            health = harvester.tracker.health
            not_before, why = health.backoff()
            assert "could not be started" in why
            assert not_before > 0, "the next job waits: it may cost the site another node"
            assert health.quarantined(harvester._clock()) == (), (
                "Slurm has drained the node: it needs no quarantine"
            )
            await until("an engine runs elsewhere", lambda: world.jobs(JobState.RUNNING), 120.0)
            [mine] = world.jobs(JobState.RUNNING)
            assert mine.nodes == ("node2",)

    asyncio.run(play())
    [told] = world.events("launch_failed")
    assert (told.subject, told.run_id) == ("node1", 0)
    assert "prolog" in told.reason
    [died] = world.of(rec.EngineDied)
    assert (died.node, died.run_id, died.exit_code) == ("node1", 0, None)
    assert [node for _, node in site.ran("prolog")[before:]].count("node1") == 1, "it was tried once"
    assert not world.events("engine_died")
    assert not world.of(rec.NodeQuarantined)
    assert json.loads(world.events("launch_failed")[0].detail) == {}


def test_a_prolog_that_fails_everywhere_costs_nodes_ever_more_slowly(site: Site, world: World) -> None:
    for node in ("node1", "node2"):
        site.say(f"fails-on-{node}")
    before = len(site.ran("prolog"))

    async def play() -> None:
        world.want(1)  # of two, the second may be submitted while Slurm still calls the first one running
        async with running(world.harvester(backoff_s=600.0), cancel=True):
            await until("the first is told", lambda: world.events("launch_failed"), 90.0)
            polls = len(world.of(rec.ClusterPolled))
            await until(
                "it is polled again and again", lambda: len(world.of(rec.ClusterPolled)) > polls + 15, 60.0
            )

    asyncio.run(play())
    assert len(world.of(rec.JobIntended)) == 1, "nothing is submitted while it backs off"
    assert len(site.ran("prolog")[before:]) == 1
