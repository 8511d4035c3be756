"""One job of two nodes on a real Slurm: a process on each, joined; preempted whole, back under its id, and ended by one node's loss."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from scavenger import resources
from scavenger.cluster.model import JobState
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.harvest.execute.job_script import TEMPLATE
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import Demand
from scavenger.router.core.events import JobGone
from tests.harvest.world import World, layout, running, spec, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]


def test_one_job_of_two_nodes_is_one_engine_and_leaves_and_dies_whole(tmp_path: Path) -> None:
    notes, program = tmp_path / "notes", tmp_path / "python"
    notes.mkdir()
    program.write_text(
        f'#!/bin/bash\nPYTHONPATH={ROOT} exec {sys.executable} -m tests.harvest.node_program {notes} "$@"\n'
    )
    program.chmod(0o755)

    def said(life: int, word: str) -> list[Path]:
        return [path for path in sorted(notes.glob(f"*.{life}.*")) if path.read_text().startswith(word)]

    def both(life: int) -> bool:
        return bool(said(life, "started") and said(life, "built"))

    with SlurmSandbox(msgspec.structs.replace(layout(), requeue_delay_s=2.0)) as sandbox:
        cluster = SlurmCluster(sandbox.env)
        world = World(cluster, tmp_path, tmp_path / "state", backend="slurm")
        harvest = {"python": str(program), "max_nodes_per_engine": 2, "quarantine_after": 5}

        async def play() -> None:
            world.demand = [Demand(1, "run", 1, 2, "useful", nodes_per_engine=2)]
            harvester = world.harvester(resources.text(TEMPLATE), drain_notice_s=0.5, **harvest)
            async with running(harvester, cancel=True):
                await until("both nodes have joined", lambda: both(0), 180.0)
                (mine,) = world.jobs(JobState.RUNNING)
                assert (mine.n_nodes, mine.nodes, mine.gpus) == (2, ("node1", "node2"), 4)
                # One node's worth for somebody else: the engine leaves both.
                theirs = await asyncio.to_thread(cluster.submit, spec(workdir="/tmp"))
                await until("the router knows", lambda: world.of(JobGone), 90.0)
                await until(
                    "they run", lambda: theirs in {job.job_id for job in world.jobs(JobState.RUNNING)}, 90.0
                )
                await asyncio.to_thread(cluster.cancel, (theirs,))
                await until("it is back, and whole", lambda: both(1), 180.0)
                (further,) = said(1, "built")
                os.kill(int(further.read_text().split()[-1]), signal.SIGKILL)
                await until("the engine is over", lambda: len(world.of(rec.AllocationEnded)) == 2, 90.0)

        asyncio.run(play())
    begun = world.of(rec.AllocationStarted)[:2]
    assert [(one.restart_count, one.node, one.gpus) for one in begun] == [
        (0, "node1,node2", 4),
        (1, "node1,node2", 4),
    ]
    assert [one.reason for one in world.of(rec.AllocationEnded)][:2] == ["preempted", "failed"]
    assert {one.node for one in world.of(rec.EngineDied)} == {"node1", "node2"}
    assert world.of(rec.JobIntended)[0].nodes == 2
    assert len({path.name.split(".")[2] for path in notes.glob("*.0.*")}) == 2, "one process on each node"
