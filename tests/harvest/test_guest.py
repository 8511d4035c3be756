"""The harvester as a guest, on a real local cluster: a user who cannot preempt it, the kill switch, `scavenger drain`."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from scavenger.cli.main import app
from scavenger.cluster.model import JobState
from scavenger.errors import ConfigError
from scavenger.harvest import limits as harvest_limits
from scavenger.ledger import records as rec
from scavenger.observe import status
from scavenger.observe import status as harvested
from scavenger.observe.fleet import NodeGpus
from scavenger.protocol import keys
from scavenger.router.core.events import IntentRevoked
from tests.harvest.world import World, running, spec, until


def test_a_peer_who_cannot_preempt_us_runs_within_his_time_and_nobody_takes_his_place(world: World) -> None:
    took_s = []

    async def play() -> None:
        world.want(4)
        async with running(world.harvester(drain_notice_s=60.0, same_tier_yield_s=0.5), cancel=True):
            await until("all GPUs are ours", lambda: len(world.of(rec.AllocationStarted)) == 4)
            asked_at = time.monotonic()
            theirs = await asyncio.to_thread(world.site.submit, spec("scavenge", gpus=2))
            await until(
                "the peer runs", lambda: theirs in {job.job_id for job in world.jobs(JobState.RUNNING)}
            )
            took_s.append(time.monotonic() - asked_at)
            await until("both are closed", lambda: len(world.of(rec.JobEnded)) == 2)
            assert theirs in {job.job_id for job in world.jobs(JobState.RUNNING)}

    asyncio.run(play())
    assert [decision.code for decision in world.acted("drain")] == ["same_tier_job", "same_tier_job"]
    assert [decision.code for decision in world.acted("cancel") if decision.code != "shutdown"] == [
        "overdue",
        "overdue",
    ]
    assert len(world.of(IntentRevoked)) == 2
    nodes = {allocation.intent_id: allocation.node for allocation in world.of(rec.AllocationStarted)}
    assert len({nodes[decision.subject] for decision in world.acted("drain")}) == 1, (
        "two GPUs of one node, as it asked for"
    )
    assert took_s[0] < 8.0, "0.5 s, a look and the end of two processes"


def serving() -> status.Status:
    """Of a daemon in this process."""
    at = time.time()
    return status.Status(at, 1, socket.gethostname(), os.getpid(), at, "OK", "", 0, 0, 0, 0, 0, 0, 0, 0, 0)


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
        status.write(world.state_dir, serving())
        harvester = world.harvester(drain_notice_s=0.5)
        async with running(harvester, cancel=True):
            await until("engines run", lambda: len(world.of(rec.AllocationStarted)) == 2)
            had = harvested.take(harvester, time.time())
            assert had is not None
            assert (had.partition, had.engines, had.gpus, had.waiting, had.draining, had.stopped) == (
                "scavenge",
                2,
                2,
                0,
                0,
                "",
            )
            assert "none is submitted until" in await asyncio.to_thread(
                command, "--reason", "a talk", *(["--now"] if now else [])
            )
            await until("everything has left", lambda: not world.jobs())
            await until("the harvester has seen it", lambda: not harvester.tracker.jobs({}))
            told = harvested.take(harvester, time.time())
            assert told is not None
            assert (told.engines, told.gpus, told.waiting) == (0, 0, 0)
            assert told.stopped.endswith(": a talk")
            assert world.events("harvest_stopped")[0].reason.endswith(": a talk")
            assert "harvests again" in await asyncio.to_thread(command, "--off")
            await until("engines run again", lambda: len(world.of(rec.AllocationStarted)) == 4)

    asyncio.run(play())
    assert {decision.code for decision in world.acted("drain" if not now else "cancel")} >= {"stopped"}
    assert bool(world.acted("drain")) != now
    assert [event.kind for event in world.of(rec.Event) if event.kind.startswith("harvest_")] == [
        "harvest_stopped",
        "harvest_resumed",
    ]


def test_a_drained_node_gives_its_engines_back_and_gets_none_until_off(world: World) -> None:
    path = world.state_dir.parent / "scavenger.toml"
    path.write_text(f'[daemon]\nstate_dir = "{world.state_dir}"\n')

    def command(*words: str) -> str:
        done = CliRunner().invoke(app, ["drain", "--config", str(path), *words])
        assert done.exit_code == 0, done.output
        return done.output

    async def play() -> None:
        world.want(4)
        status.write(world.state_dir, serving())
        harvester = world.harvester(drain_notice_s=0.5)
        async with running(harvester, cancel=True):
            await until("engines run", lambda: len(world.of(rec.AllocationStarted)) == 4)
            nodes = {one.node for one in world.of(rec.AllocationStarted)}
            drained = min(nodes)
            said = await asyncio.to_thread(command, "--node", drained, "--reason", "new cables")
            assert (
                f"drains engines on {drained}; none starts there until `scavenger drain --off --node {drained}`"
                in said
            )
            await until(
                "it is empty", lambda: drained not in {job.node for job in harvester.tracker.jobs({})}
            )
            await until("a decision says so", lambda: "drained" in harvester.stop_state.concluded)
            seen = status.take(harvester, time.time())
            assert seen is not None
            assert seen.nodes, "each node of the site"
            (there,) = [one for one in seen.nodes if one.name == drained]
            assert there.harvested == 0
            assert there.why.endswith(": new cables")
            assert [why for why in seen.closed if why.startswith(drained) and why.endswith(": new cables")]
            assert not [why for why in seen.closed if "NO NODE" in why]
            assert not seen.stopped, "the other nodes are harvested"
            assert "may start there again" in await asyncio.to_thread(command, "--off", "--node", drained)
            await until(
                "engines are there again", lambda: drained in {job.node for job in harvester.tracker.jobs({})}
            )

    asyncio.run(play())
    assert {decision.code for decision in world.acted("drain")} == {"node_drained"}
    kinds = [event.kind for event in world.of(rec.Event) if event.kind.startswith("node_")]
    assert kinds == ["node_drained", "node_undrained"]


def test_one_node_s_engines_are_drained_never_cancelled(world: World) -> None:
    world.state_dir.mkdir(exist_ok=True)
    path = world.state_dir.parent / "scavenger.toml"
    path.write_text(f'[daemon]\nstate_dir = "{world.state_dir}"\n')
    done = CliRunner().invoke(app, ["drain", "--config", str(path), "--now", "--node", "gpu17"])
    assert isinstance(done.exception, ConfigError)
    assert done.exception.exit_code == 2
    assert "leave out --now, and `scancel`" in done.exception.remedy
    assert harvest_limits.drained_nodes(world.state_dir) == {}


def test_a_node_that_slurm_does_not_have_is_not_said_to_be_drained(world: World) -> None:
    world.state_dir.mkdir(exist_ok=True)
    path = world.state_dir.parent / "scavenger.toml"
    path.write_text(f'[daemon]\nstate_dir = "{world.state_dir}"\n')
    held = status.Harvest("scavenge", 0, 0, 0, 0, 0.0, 8, 0, 0, "", "", nodes=(NodeGpus("gpu1", idle=4),))
    status.write(world.state_dir, msgspec.structs.replace(serving(), harvest=held))

    def command(*nodes: str) -> Result:
        words = [word for node in nodes for word in ("--node", node)]
        return CliRunner().invoke(app, ["drain", "--config", str(path), *words])

    mistyped = command("gpu1", "gpu01")
    assert mistyped.exit_code == 1
    assert "NO NODE OF SLURM IS NAMED gpu01: it is noted, and drains nothing" in mistyped.output
    assert "scavenger drain --off --node gpu01`" in mistyped.output
    assert command("gpu1").exit_code == 0
    # nothing is known of the names before the first poll, which shows no node
    status.write(world.state_dir, msgspec.structs.replace(serving(), harvest=None))
    assert command("gpu01").exit_code == 0


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 300, "a\nb"])
def test_only_a_node_s_name_can_be_drained(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no node's name"):
        harvest_limits.drain_node(tmp_path, name, "x")
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("ended", ["never", "died", "closed"])
def test_a_drain_without_a_daemon_says_that_nothing_leaves_now_and_how_to_end_the_jobs(
    tmp_path: Path, ended: str
) -> None:
    path, state_dir = tmp_path / "scavenger.toml", tmp_path / "state"
    path.write_text(
        f'[daemon]\nstate_dir = "{state_dir}"\n[harvest]\npartition = "idle"\nstop_file = "{tmp_path / "STOP"}"\n'
    )
    keys.init_state(state_dir, "ada")
    if ended != "never":
        gone: dict[str, dict[str, Any]] = {
            "died": {"pid": 2**30},
            "closed": {"state": "CLOSED", "stopped_at": time.time()},
        }
        status.write(state_dir, msgspec.structs.replace(serving(), **gone[ended]))
    done = CliRunner().invoke(app, ["drain", "--now", "--config", str(path)])
    assert done.exit_code == 1
    why = {"never": "no daemon has run", "died": f"DIED: no process {2**30}", "closed": "CLOSED, stopped at"}[
        ended
    ]
    assert f"NOTHING IS CANCELLED NOW, because no daemon serves: {why}" in done.output
    assert "scancel -u $USER -p idle" in done.output
    assert harvest_limits.read_stop(harvest_limits.drain_path(state_dir), "drain") is not None, (
        "the next daemon obeys"
    )
    (tmp_path / "STOP").write_text("")
    off = CliRunner().invoke(app, ["drain", "--off", "--config", str(path)])
    assert off.exit_code == 0
    assert (
        off.output
        == f"a daemon harvests again once one serves; but {tmp_path / 'STOP'} is there, and stops it all the same\n"
    )
