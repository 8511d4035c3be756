"""Slurm fails in every way that can be had on one machine, on a real one: each is a named trouble, costs no job, and passes by itself."""

from __future__ import annotations

import asyncio
import functools
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from scavenger.cluster import processes
from scavenger.cluster.error_kind import ErrorKind
from scavenger.cluster.model import JobState, PreemptMode
from scavenger.cluster.port import Cluster
from scavenger.cluster.pyslurm.client import PyslurmCluster
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.ledger import records as rec
from scavenger.router.core.events import IntentRevoked, JobGone
from tests import slurm_faults
from tests.clusters import empty
from tests.harvest.world import World, layout, running, spec, until

pytestmark = pytest.mark.slurm
KINDS = ["slurm", pytest.param("pyslurm", marks=pytest.mark.pyslurm)]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[SlurmSandbox]:
    """A Slurm of its own: the shared one may not be stopped under others, and cannot be harvested."""
    with SlurmSandbox(msgspec.structs.replace(layout(), requeue_delay_s=6.0)) as made:
        yield made


@pytest.fixture
def world(sandbox: SlurmSandbox, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    """A harvester's world on it, by the commands or by pyslurm, and with what stands in `tmp_path/bin` before Slurm's commands."""
    (tmp_path / "bin").mkdir()
    env = {**sandbox.env, "PATH": f"{tmp_path}/bin{os.pathsep}{sandbox.env['PATH']}"}
    cluster: Cluster = SlurmCluster(env, timeout_s=6.0)
    if getattr(request, "param", "slurm") == "pyslurm":
        cluster = PyslurmCluster(SlurmCluster(env, timeout_s=6.0), timeout_s=6.0)
    yield World(cluster, tmp_path, tmp_path / "state")
    cluster.close()
    empty(SlurmCluster(sandbox.env))


def error_kinds(world: World) -> set[str]:
    return {msgspec.json.decode(event.detail)["error_kind"] for event in world.events("cluster_unavailable")}


def survives(
    world: World, begin: Callable[[], object], end: Callable[[], object], expected: set[str]
) -> None:
    """An engine runs; the fault begins, is named, and ends. Nothing was done on it, and the same job goes on."""

    async def play() -> None:
        world.want(1)
        harvester = world.harvester()
        async with running(harvester):
            await until("an engine runs and is observed", lambda: world.of(rec.AllocationStarted), 30.0)
            begin()
            try:
                await until("the fault is named", lambda: error_kinds(world), 30.0)
                world.want(0)  # nothing is decided on a cluster that is not seen
                count = len(world.events("cluster_unavailable"))
                await until("and goes on", lambda: len(world.events("cluster_unavailable")) > count, 30.0)
                assert not world.of(IntentRevoked)
                world.want(1)
            finally:
                end()
            await until("it answers again", lambda: world.events("cluster_back"), 60.0)
            n = len(world.of(rec.ClusterPolled))
            await until("and is looked at", lambda: len(world.of(rec.ClusterPolled)) > n + 1, 30.0)
        assert harvester.error_kinds.total() == len(world.events("cluster_unavailable"))

    asyncio.run(play())
    assert error_kinds(world) <= expected
    assert not [one for one in world.said if isinstance(one, tuple) and one[0] == "cancel"]
    assert (
        world.of(rec.JobEnded),
        world.of(rec.AllocationEnded),
        world.of(JobGone),
        world.of(IntentRevoked),
    ) == ([], [], [], [])
    assert len(world.of(rec.JobIntended)) == len(world.of(rec.AllocationStarted)) == 1
    [job] = world.jobs(JobState.RUNNING)
    assert job.job_id == world.of(rec.JobSubmitted)[0].job_id


async def saved(sandbox: SlurmSandbox, job_id: int) -> None:
    """The controller has written down that the job runs: what it is told of the job now is saved after that."""
    file, told_at = sandbox.dir / "state/job_state", time.time()
    await asyncio.to_thread(sandbox.run, "scontrol", "update", f"JobId={job_id}", "AdminComment=seen")
    await until("the controller has saved it", lambda: file.exists() and file.stat().st_mtime > told_at, 30.0)


@pytest.mark.parametrize("world", KINDS, indirect=True)
def test_a_controller_that_hangs(world: World, sandbox: SlurmSandbox) -> None:
    survives(
        world,
        functools.partial(slurm_faults.freeze_controller, sandbox),
        functools.partial(slurm_faults.thaw_controller, sandbox),
        {ErrorKind.NO_REPLY},
    )


@pytest.mark.long
@pytest.mark.parametrize("world", KINDS, indirect=True)
def test_munge_is_down(world: World, sandbox: SlurmSandbox) -> None:
    socket, aside = sandbox.dir / "run/munge.socket", sandbox.dir / "run/munge.aside"
    survives(
        world, lambda: socket.rename(aside), lambda: aside.rename(socket), {ErrorKind.AUTH, ErrorKind.BACKEND}
    )
    assert ErrorKind.AUTH in error_kinds(world), (
        "pyslurm's process may be ended besides: munge's own patience is longer than ours"
    )


def test_a_controller_that_answers_every_question_with_an_error(world: World, sandbox: SlurmSandbox) -> None:
    """Slurm's own words, from commands that say nothing else. Two real controllers are in `tests/system/test_slurm_faults.py`."""
    words, error_kind = (
        "slurm_load_jobs error: Slurm backup controller in standby mode",
        ErrorKind.FAILING_OVER,
    )
    fakes = [world.local_dir / "bin" / name for name in ("squeue", "scontrol")]

    def begin() -> None:
        for fake in fakes:
            fake.write_text(f"#!/bin/bash\nprintf '%s\\n' {shlex.quote(words)} >&2\nexit 1\n")
            fake.chmod(0o755)

    def end() -> None:
        for fake in fakes:
            fake.unlink()

    survives(world, begin, end, {error_kind})


def test_an_answer_that_is_cut_off(world: World, sandbox: SlurmSandbox) -> None:
    fake = world.local_dir / "bin/squeue"

    def cut() -> None:
        fake.write_text(
            f'#!/bin/bash\nPATH="{sandbox.env["PATH"]}"\nout=$(squeue "$@"; echo .)\nprintf %s "${{out:0:40}}"\n'
        )
        fake.chmod(0o755)

    survives(world, cut, fake.unlink, {ErrorKind.PARTIAL})


@pytest.mark.long
def test_an_answer_that_leaves_nodes_out(world: World, sandbox: SlurmSandbox) -> None:
    fake = world.local_dir / "bin/scontrol"

    def leave_out() -> None:
        fake.write_text(
            f'#!/bin/bash\nPATH="{sandbox.env["PATH"]}"\nscontrol "$@" | grep -v NodeName=node2\n'
        )
        fake.chmod(0o755)

    survives(world, leave_out, fake.unlink, {ErrorKind.PARTIAL})


@pytest.mark.parametrize("world", [pytest.param("pyslurm", marks=pytest.mark.pyslurm)], indirect=True)
def test_pyslurms_process_hangs(world: World) -> None:
    site = world.site
    assert isinstance(site, PyslurmCluster)
    frozen: list[int] = []

    def freeze() -> None:
        frozen.append(site.pid)
        processes.send(frozen, signal.SIGSTOP)

    survives(world, freeze, lambda: None, {ErrorKind.BACKEND})
    assert site.pid not in (0, *frozen)


@pytest.mark.long
@pytest.mark.parametrize("world", KINDS, indirect=True)
def test_a_controller_that_is_killed_and_comes_back(world: World, sandbox: SlurmSandbox) -> None:
    """It is started again at once, so that a look need not fail; what matters is that the job is the same one before and after."""

    async def play() -> None:
        world.want(1)
        async with running(world.harvester()):
            await until("an engine runs and is observed", lambda: world.of(rec.AllocationStarted), 30.0)
            [mine] = world.jobs(JobState.RUNNING)
            await saved(sandbox, mine.job_id)
            before = sandbox.controller_pid
            processes.send([before], signal.SIGKILL)
            await until("another controller runs", lambda: sandbox.controller_pid not in (0, before), 30.0)
            n = len(world.of(rec.ClusterPolled))
            await until("it is looked at", lambda: len(world.of(rec.ClusterPolled)) > n + 3, 60.0)
            assert [job.job_id for job in world.jobs(JobState.RUNNING)] == [mine.job_id]

    asyncio.run(play())
    assert error_kinds(world) <= {ErrorKind.DOWN, ErrorKind.NO_REPLY}
    assert (world.of(rec.JobEnded), world.of(rec.AllocationEnded), world.of(JobGone)) == ([], [], [])
    assert len(world.of(rec.JobIntended)) == 1


@pytest.mark.long
@pytest.mark.accounting
def test_slurmdbd_is_down(tmp_path: Path) -> None:
    """Accounting is no part of a look or of a submission: slurmctld remembers who may do what, and keeps what it has to tell."""
    with SlurmSandbox(msgspec.structs.replace(layout(), requeue_delay_s=6.0, qos=True)) as made:
        world = World(SlurmCluster(made.env, timeout_s=6.0), tmp_path, tmp_path / "state")

        async def play() -> None:
            world.want(1)
            async with running(world.harvester(qos="scavenge")):
                await until("an engine runs", lambda: world.of(rec.AllocationStarted), 30.0)
                processes.send([made.ready.daemons["slurmdbd"]], signal.SIGKILL)
                world.want(2)
                await until(
                    "another is submitted and runs", lambda: len(world.of(rec.AllocationStarted)) == 2, 30.0
                )
                theirs = world.site.submit(spec(nodes=2, tasks=2))
                await until(
                    "who may preempt us does",
                    lambda: theirs in [job.job_id for job in world.jobs(JobState.RUNNING)],
                    60.0,
                )
                await until("and that is seen", lambda: world.of(rec.AllocationEnded), 30.0)

        asyncio.run(play())
        assert not error_kinds(world)
        # Where Slurm preempts by QOS the daemon yields as well, if it sees them wait before Slurm has begun: then it asked.
        asked = {decision.subject for decision in world.acted("drain")}
        ends = world.of(rec.AllocationEnded)
        assert [end.reason for end in ends] == [
            "requeued" if end.intent_id in asked else "preempted" for end in ends
        ]
        empty(SlurmCluster(made.env))


@pytest.mark.long
@pytest.mark.accounting
def test_a_qos_that_nobody_may_preempt_any_more_gets_no_more_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmdbd is asked who may preempt whom: at the start, and again as often as for the configuration."""
    monkeypatch.setattr("scavenger.harvest.harvester.INFO_S", 0.0)
    with SlurmSandbox(msgspec.structs.replace(layout(), requeue_delay_s=6.0, qos=True)) as made:
        cluster = SlurmCluster(made.env)
        world = World(cluster, tmp_path, tmp_path / "state")

        def set_qos(name: str, value: str) -> None:
            argv = ["sacctmgr", "-i", "modify", "qos", name, "set", value]
            subprocess.run(argv, env=made.env, check=True, capture_output=True, timeout=60)

        low, normal = sorted(cluster.info().qos or (), key=lambda one: one.name != "scavenge")
        assert (low.name, low.preempt_mode, low.exempt_s) == ("scavenge", PreemptMode.REQUEUE, None)
        assert (normal.name, normal.preempts) == ("normal", {"scavenge"})
        for value, exempt_s in (("PreemptExemptTime=00:05:00", 300.0), ("PreemptExemptTime=00:00:00", 0.0)):
            set_qos("scavenge", value)
            assert {one.exempt_s for one in cluster.info().qos or () if one.name == "scavenge"} == {exempt_s}

        async def play() -> None:
            world.want(1)
            async with running(world.harvester(qos="scavenge"), cancel=True):
                await until("an engine runs", lambda: world.of(rec.AllocationStarted), 60.0)
                await asyncio.to_thread(set_qos, "normal", "Preempt=")
                await until("that is noticed", lambda: world.events("partition_refused"), 60.0)
                await until("the engine has left", lambda: world.of(rec.AllocationEnded), 60.0)
                await asyncio.to_thread(set_qos, "normal", "Preempt=scavenge")
                await until("so is this", lambda: world.events("partition_allowed"), 60.0)
                await until("another one runs", lambda: len(world.of(rec.AllocationStarted)) == 2, 60.0)

        asyncio.run(play())
        assert "no QOS of cluster" in world.events("partition_refused")[0].reason
