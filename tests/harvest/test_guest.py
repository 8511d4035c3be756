"""The harvester as a guest, on a real local cluster: a user who cannot preempt it, the kill switch, `scavenger drain`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scavenger.cli import app
from scavenger.cluster.local import LocalServer
from scavenger.cluster.model import JobState
from scavenger.ledger import records as rec
from scavenger.router.events import IntentRevoked
from tests.harvest.world import World, layout, running, spec, until


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with LocalServer(tmp_path / "cluster", layout()) as server:
        yield World(server.cluster(), server.dir, tmp_path / "state")


def test_a_peer_who_cannot_preempt_us_runs_within_his_time_and_nobody_takes_his_place(world: World) -> None:
    took_s = []

    async def play() -> None:
        world.want(4)
        async with running(world.harvester(leave_s=60.0, peer_yield_s=0.5), cancel=True):
            await until("all GPUs are ours", lambda: len(world.of(rec.HoldStarted)) == 4)
            asked_at = time.monotonic()
            theirs = await asyncio.to_thread(world.site.submit, spec("scavenge", gpus=2))
            await until("the peer runs", lambda: theirs in {job.job_id for job in world.jobs(JobState.RUNNING)})
            took_s.append(time.monotonic() - asked_at)
            await until("both are closed", lambda: len(world.of(rec.JobEnded)) == 2)
            assert theirs in {job.job_id for job in world.jobs(JobState.RUNNING)}

    asyncio.run(play())
    assert [decision.code for decision in world.acted("give_back")] == ["peer", "peer"]
    assert [decision.code for decision in world.acted("cancel") if decision.code != "shutdown"] == ["overdue", "overdue"]
    assert len(world.of(IntentRevoked)) == 2
    nodes = {hold.intent_id: hold.node for hold in world.of(rec.HoldStarted)}
    assert len({nodes[decision.subject] for decision in world.acted("give_back")}) == 1, "two GPUs of one node, as it asked for"
    assert took_s[0] < 8.0, "0.5 s, a look and the end of two processes"


@pytest.mark.parametrize("now", [False, True], ids=["drain", "now"])
def test_a_drain_gives_everything_back_and_off_takes_it_again(world: World, now: bool) -> None:
    path = world.state_dir.parent / "scavenger.toml"
    path.write_text(f'[daemon]\nstate_dir = "{world.state_dir}"\n')

    def command(*words: str) -> str:
        done = CliRunner().invoke(app, ["drain", "--config", str(path), *words])
        assert done.exit_code == 0, done.output
        return done.output

    async def play() -> None:
        world.want(2)
        async with running(world.harvester(leave_s=0.5), cancel=True):
            await until("engines run", lambda: len(world.of(rec.HoldStarted)) == 2)
            assert "none is submitted until" in await asyncio.to_thread(command, "--reason", "a talk", *(["--now"] if now else []))
            await until("everything has left", lambda: not world.jobs())
            assert world.events("harvest_stopped")[0].reason.endswith(": a talk")
            assert "harvests again" in await asyncio.to_thread(command, "--off")
            await until("engines run again", lambda: len(world.of(rec.HoldStarted)) == 4)

    asyncio.run(play())
    assert {decision.code for decision in world.acted("give_back" if not now else "cancel")} >= {"stopped"}
    assert bool(world.acted("give_back")) != now
    assert [event.kind for event in world.of(rec.Event) if event.kind.startswith("harvest_")] == ["harvest_stopped", "harvest_resumed"]
