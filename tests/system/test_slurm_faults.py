"""Faults of a site and of its daemons, on a real Slurm: no job is lost, cancelled or submitted twice for them, and each passes by itself.

Those of single answers (hung, restarted, cut off, munge or slurmdbd down) are in `tests/harvest/test_watch_faults.py`. The table of all is
in `docs/slurm-states.md`.
"""

from __future__ import annotations

import asyncio
import functools
import os
import pwd
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scavenger.cluster import processes
from scavenger.cluster.error_kind import ErrorKind
from scavenger.cluster.model import ClusterInfo, JobState
from scavenger.cluster.port import Cluster
from scavenger.cluster.pyslurm.client import PyslurmCluster
from scavenger.cluster.sandbox import controllers
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.daemon.process import UnixClock
from scavenger.ledger import records as rec
from scavenger.router.core.events import IntentRevoked, JobGone
from tests import slurm_faults
from tests.clusters import empty, wait_for
from tests.conftest import faketime
from tests.harvest.test_watch_faults import KINDS, error_kinds, saved, survives
from tests.harvest.world import World, layout, running, spec, until

pytestmark = pytest.mark.slurm
LAYOUT = msgspec.structs.replace(layout(), requeue_delay_s=6.0)
STEP_S = 600.0


@pytest.fixture(scope="module")
def sandbox() -> Iterator[SlurmSandbox]:
    with SlurmSandbox(LAYOUT) as made:
        yield made


@pytest.fixture
def two_controllers() -> Iterator[SlurmSandbox]:
    """For one failover each: Slurm that takes over while jobs are completing counts their nodes as taken for a while."""
    why = controllers.missing()
    if why:
        pytest.skip(why)
    with SlurmSandbox(msgspec.structs.replace(LAYOUT, backup=True)) as made:
        yield made


def config(sandbox: SlurmSandbox, name: str, setting: str, value: str) -> dict[str, str]:
    """An environment whose slurm.conf differs from the site's in one thing."""
    text, found = re.subn(rf"^{setting}", value, Path(sandbox.ready.conf).read_text(), flags=re.M)
    assert found == 1, f"slurm.conf says {setting} {found} times"
    path = sandbox.dir / "etc" / name
    path.write_text(text)
    return {**sandbox.env, "SLURM_CONF": str(path)}


@contextmanager
def site(env: Mapping[str, str], tmp_path: Path, kind: str = "slurm", **options: Any) -> Iterator[World]:
    """A harvester's world on the Slurm of this environment; its jobs end with it."""
    cluster: Cluster = SlurmCluster(env, timeout_s=6.0, **options)
    if kind == "pyslurm":
        cluster = PyslurmCluster(SlurmCluster(env, timeout_s=6.0), timeout_s=6.0)
    try:
        yield World(cluster, tmp_path, tmp_path / "state")
    finally:
        cluster.close()
        empty(SlurmCluster(env))


def nothing_was_done(world: World) -> None:
    """No job was ended, cancelled, asked to leave or told to be gone."""
    assert not [one for one in world.said if isinstance(one, tuple) and one[0] == "cancel"]
    assert (
        world.of(rec.JobEnded),
        world.of(rec.AllocationEnded),
        world.of(JobGone),
        world.of(IntentRevoked),
    ) == ([], [], [], [])


async def looks(world: World, count: int) -> None:
    n = len(world.of(rec.ClusterPolled))
    await until(f"{count} more looks", lambda: len(world.of(rec.ClusterPolled)) >= n + count)


# ---------------------------------------------------------------- two controllers


def answering(sandbox: SlurmSandbox) -> list[str]:
    """What `scontrol ping` says of the first controller and of its backup."""
    return re.findall(r" is (UP|DOWN)", sandbox.run("scontrol", "ping", check=False))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_controller_fails_over_to_its_backup_and_back(
    two_controllers: SlurmSandbox, tmp_path: Path, kind: str
) -> None:
    """The first one's host loses its power. The daemon's Slurm has less patience than the takeover takes, as on a site with defaults."""
    sandbox = two_controllers
    env = config(sandbox, "impatient.conf", "SlurmctldTimeout=.*", "SlurmctldTimeout=2")
    with site(env, tmp_path, kind) as world:

        async def play() -> None:
            world.want(1)
            async with running(world.harvester()):
                await until("an engine runs and is observed", lambda: world.of(rec.AllocationStarted))
                await saved(sandbox, world.of(rec.JobSubmitted)[0].job_id)
                slurm_faults.kill_and_hold(sandbox)
                try:
                    await until("the fault is named", lambda: ErrorKind.FAILING_OVER in error_kinds(world))
                    await until("the backup answers", lambda: world.events("cluster_back"))
                    assert answering(sandbox) == ["DOWN", "UP"]
                    world.want(2)
                    await until(
                        "another is submitted to it and runs",
                        lambda: len(world.of(rec.AllocationStarted)) == 2,
                    )
                finally:
                    slurm_faults.let_start(sandbox)
                await until("the first one is back", lambda: answering(sandbox) == ["UP", "UP"])
                await looks(world, 5)

        asyncio.run(play())
        nothing_was_done(world)
        assert error_kinds(world) <= {ErrorKind.FAILING_OVER, ErrorKind.DOWN, ErrorKind.NO_REPLY}
        submitted = {one.job_id for one in world.of(rec.JobSubmitted)}
        assert len(submitted) == len(world.of(rec.JobIntended)) == 2
        assert {job.job_id for job in world.jobs(JobState.RUNNING)} == submitted


@pytest.mark.long
def test_a_first_controller_that_hangs_hides_the_backup_that_took_over(
    two_controllers: SlurmSandbox, tmp_path: Path
) -> None:
    """Slurm's commands ask the first one first, and give up when it does not answer: nothing is decided until it is back or dead."""
    log = two_controllers.dir / "log/backup.log"
    before = log.read_text().count("Running as primary controller")

    def after_the_takeover() -> None:
        wait_for(
            "the backup takes over", lambda: log.read_text().count("Running as primary controller") > before
        )
        slurm_faults.thaw_controller(two_controllers)

    with site(two_controllers.env, tmp_path) as world:
        survives(
            world,
            functools.partial(slurm_faults.freeze_controller, two_controllers),
            after_the_takeover,
            {ErrorKind.NO_REPLY},
        )


# ---------------------------------------------------------------- clocks


@contextmanager
def munged_elsewhere(sandbox: SlurmSandbox, ahead_s: float) -> Iterator[Path]:
    """The socket of a munge with the site's key and a clock that is off: that of a login node whose time is not kept."""
    run, munged = sandbox.dir / "run", shutil.which("munged", path=sandbox.env["PATH"])
    assert munged is not None
    socket = run / "elsewhere.socket"
    argv = [
        munged,
        "--foreground",
        "--force",
        f"--key-file={sandbox.dir}/munge/munge.key",
        f"--socket={socket}",
        f"--pid-file={run}/elsewhere.pid",
        f"--log-file={sandbox.dir}/log/elsewhere.log",
        f"--seed-file={run}/elsewhere.seed",
    ]
    env = {
        **sandbox.env,
        "LD_PRELOAD": str(faketime()),
        "FAKETIME": f"{ahead_s:+.0f}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    null = subprocess.DEVNULL
    with subprocess.Popen(argv, env=env, stdin=null, stdout=null, stderr=null) as process:
        try:
            wait_for("its socket", socket.exists)
            yield socket
        finally:
            processes.kill_trees([process.pid])


@pytest.mark.long
@pytest.mark.faketime
@pytest.mark.parametrize("ahead_s", [STEP_S, -STEP_S], ids=["ahead", "behind"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_login_node_whose_clock_is_ten_minutes_off(
    sandbox: SlurmSandbox, tmp_path: Path, kind: str, ahead_s: float
) -> None:
    """Munge refuses what is older than five minutes or comes from the future: slurmctld hangs up without a word until the clock is set."""
    link, here = sandbox.dir / "run/ours.socket", sandbox.dir / "run/munge.socket"
    link.unlink(missing_ok=True)
    link.symlink_to(here)
    env = config(sandbox, "ours.conf", f"AuthInfo=socket={here}", f"AuthInfo=socket={link}")

    def ask_at(socket: Path) -> None:
        fresh = link.with_suffix(".new")
        fresh.symlink_to(socket)
        fresh.replace(link)

    with munged_elsewhere(sandbox, ahead_s) as elsewhere, site(env, tmp_path, kind) as world:
        survives(world, partial(ask_at, elsewhere), partial(ask_at, here), {ErrorKind.NO_REPLY})
        assert all("Zero Bytes" in event.reason for event in world.events("cluster_unavailable"))
    assert (
        f"Munge decode failed: {'Rewound' if ahead_s > 0 else 'Expired'} credential"
        in (sandbox.dir / "log/slurmctld.log").read_text()
    )


@pytest.mark.parametrize(
    "ahead_s", [pytest.param(STEP_S, marks=pytest.mark.long), -STEP_S], ids=["ahead", "behind"]
)
def test_a_daemon_whose_hosts_clock_was_ten_minutes_off_and_is_set_right_while_engines_run(
    sandbox: SlurmSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """Slurm's own times are ten minutes off the daemon's throughout: its clock does not step with the host's
    (`scavenger.daemon.process`)."""
    truth = time.time
    monkeypatch.setattr(time, "time", lambda: truth() + ahead_s)
    with site(sandbox.env, tmp_path) as world:
        world.clock = UnixClock()

        async def play() -> None:
            world.want(2)
            async with running(world.harvester(drain_notice_s=0.5), cancel=True):
                await until("two engines hold GPUs", lambda: len(world.of(rec.AllocationStarted)) == 2)
                monkeypatch.setattr(time, "time", truth)
                await looks(world, 4)
                nothing_was_done(world)
                world.want(3)
                await until(
                    "another is submitted and runs", lambda: len(world.of(rec.AllocationStarted)) == 3
                )
                theirs = await asyncio.to_thread(world.site.submit, spec(nodes=2, tasks=2, workdir="/tmp"))
                await until(
                    "who may preempt us does",
                    lambda: theirs in [job.job_id for job in world.jobs(JobState.RUNNING)],
                )
                await until("and that is seen", lambda: len(world.of(rec.AllocationEnded)) >= 2)
                await asyncio.to_thread(world.site.cancel, (theirs,))
                world.want(0)
                await until("the others leave when nobody wants them", lambda: not world.jobs())
                await until(
                    "and are closed", lambda: len(world.of(rec.JobEnded)) == len(world.of(rec.JobIntended))
                )

        asyncio.run(play())
        assert [end.reason for end in world.of(rec.AllocationEnded)][:2] == ["preempted"] * 2
        began = {(hold.intent_id, hold.restart_count): hold.at for hold in world.of(rec.AllocationStarted)}
        assert all(
            0 <= end.at - began[end.intent_id, end.restart_count] < 120
            for end in world.of(rec.AllocationEnded)
        )


# ---------------------------------------------------------------- daemons that are away, and others beside us


def test_a_daemon_that_was_down_for_an_hour_adopts_its_jobs_and_closes_those_that_are_gone(
    sandbox: SlurmSandbox, tmp_path: Path
) -> None:
    """One works on, one waits for its node again, one has ended: nothing that lives is cancelled or submitted again."""
    with site(sandbox.env, tmp_path) as world:

        async def before() -> None:
            world.want(3)
            async with running(world.harvester()):
                await until("three engines run", lambda: len(world.of(rec.AllocationStarted)) == 3)

        asyncio.run(before())
        intended = {one.intent_id: one for one in world.of(rec.JobIntended)}
        ids = {one.intent_id: one.job_id for one in world.of(rec.JobSubmitted)}
        held = {one.intent_id: one for one in world.of(rec.AllocationStarted)}
        ended, requeued, works = sorted(held)
        world.site.cancel((ids[ended],))
        world.site.requeue(ids[requeued])
        wait_for("it waits", lambda: ids[requeued] in [job.job_id for job in world.jobs(JobState.PENDING)])

        world.said.clear()
        second = world.harvester()
        # what the ledger would have: all of it was an hour ago
        second.restore(
            [
                rec.OpenIntent(
                    msgspec.structs.replace(intended[i], at=intended[i].at - 3600.0),
                    ids[i],
                    "RUNNING",
                    0,
                    held[i].node,
                    True,
                    held[i].at - 3600.0,
                    0,
                )
                for i in sorted(held)
            ]
        )

        async def after() -> None:
            async with running(second):
                await until("the one that ended is closed", lambda: world.of(rec.JobEnded))
                await until(
                    "the other holds again",
                    lambda: requeued in [hold.intent_id for hold in world.of(rec.AllocationStarted)],
                )
                await until("the lost one is replaced", lambda: len(world.of(rec.JobSubmitted)) == 1)
                await looks(world, 3)

        asyncio.run(after())
        cancelled = {
            job for said in world.said if isinstance(said, tuple) and said[0] == "cancel" for job in said[1]
        }
        assert not cancelled & {ids[works], ids[requeued]}
        assert (world.of(IntentRevoked), world.events("orphaned_job_cancelled")) == ([], [])
        assert [one.intent_id for one in world.of(rec.JobEnded)] == [ended]
        assert {one.intent_id for one in world.of(rec.AllocationEnded)} == {ended, requeued}
        assert {ids[works], ids[requeued]} < {job.job_id for job in world.jobs(JobState.RUNNING)}


NOBODY = 65534


class Somebody:
    """Slurm's commands run as another user; what they say of jobs is Slurm's own."""

    def __init__(self, cluster: SlurmCluster, user: str) -> None:
        self._cluster, self._user = cluster, user

    def info(self) -> ClusterInfo:
        return replace(self._cluster.info(), user=self._user)

    def __getattr__(self, name: str) -> object:
        return getattr(self._cluster, name)


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A folder that another user reaches (pytest's own are the user's alone)."""
    path = Path(tempfile.mkdtemp(prefix="two-users-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def as_user(env: Mapping[str, str], uid: int, where: Path) -> dict[str, str]:
    """An environment in which Slurm's commands are run as this user."""
    where.mkdir()
    for name in ("sbatch", "squeue", "scontrol", "scancel", "sinfo"):
        real = shutil.which(name, path=env["PATH"])
        (where / name).write_text(
            f'#!/bin/sh\nexec setpriv --reuid={uid} --regid={uid} --clear-groups {real} "$@"\n'
        )
        (where / name).chmod(0o755)
    return {**env, "PATH": f"{where}{os.pathsep}{env['PATH']}"}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a Slurm of one's own runs nobody else's jobs")
def test_two_daemons_of_two_users_share_what_is_idle_and_leave_each_others_jobs_alone(
    sandbox: SlurmSandbox, tmp_path: Path, open_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox.dir.chmod(0o755)
    theirs_env, user = as_user(sandbox.env, NOBODY, tmp_path / "as"), pwd.getpwuid(NOBODY).pw_name
    (open_dir / "state").mkdir()
    (open_dir / "state/logs").mkdir()
    for path in (open_dir, open_dir / "state", open_dir / "state/logs"):
        os.chown(path, NOBODY, NOBODY)
    with site(sandbox.env, tmp_path) as ours:
        theirs = World(
            Somebody(SlurmCluster(theirs_env, timeout_s=6.0), user),  # type: ignore[arg-type]
            open_dir,
            open_dir / "state",
            uid="0ddba115",
        )  # type: ignore[arg-type]
        with monkeypatch.context() as patched:
            patched.setattr(os, "getuid", lambda: NOBODY)
            their_harvester = theirs.harvester(drain_notice_s=0.5)

        async def play() -> None:
            ours.want(2)
            async with running(ours.harvester(), cancel=True), running(their_harvester, cancel=True):
                await until("two of ours run", lambda: len(ours.of(rec.AllocationStarted)) == 2)
                theirs.want(2)
                await until(
                    "the other two GPUs are theirs", lambda: len(theirs.of(rec.AllocationStarted)) == 2
                )
                for one in (ours, theirs):
                    await looks(one, 2)  # a look that began before saw idle GPUs
                    one.want(4)
                for one in (ours, theirs):
                    await looks(one, 3)
                assert (len(ours.of(rec.JobIntended)), len(theirs.of(rec.JobIntended))) == (2, 2), (
                    "nothing is idle"
                )
                for one in (ours, theirs):
                    nothing_was_done(one)
                    sample = one.of(rec.ClusterPolled)[-1]
                    assert (sample.gpus_harvested, sample.gpus_other_users, sample.gpus_idle) == (2, 2, 0)
                theirs.want(0)
                await until("what they give back is ours", lambda: len(ours.of(rec.AllocationStarted)) == 4)
                nothing_was_done(ours)

        asyncio.run(play())
        users = {job.job_id: job.user for job in ours.site.view().jobs}
        assert {users[one.job_id] for one in theirs.of(rec.JobSubmitted)} == {user}
        assert {users[one.job_id] for one in ours.of(rec.JobSubmitted)} == {pwd.getpwuid(os.getuid()).pw_name}
        for one, other in ((ours, theirs), (theirs, ours)):
            assert one.events("orphaned_job_cancelled") == []
            cancelled = {
                job for said in one.said if isinstance(said, tuple) and said[0] == "cancel" for job in said[1]
            }
            assert not cancelled & {submitted.job_id for submitted in other.of(rec.JobSubmitted)}


@pytest.mark.long
def test_a_partition_that_is_set_to_be_preempted_by_nobody_is_left_and_taken_again(
    sandbox: SlurmSandbox, tmp_path: Path
) -> None:
    def mode(word: str) -> Callable[[], str]:
        return lambda: sandbox.run("scontrol", "update", "PartitionName=scavenge", f"PreemptMode={word}")

    with site(sandbox.env, tmp_path, partitions_s=0.2) as world:

        async def play() -> None:
            world.want(2)
            async with running(world.harvester(drain_notice_s=0.5), cancel=True):
                await until("two engines run", lambda: len(world.of(rec.AllocationStarted)) == 2)
                await asyncio.to_thread(mode("OFF"))
                try:
                    await until("both are asked to leave", lambda: len(world.of(IntentRevoked)) == 2)
                    await until(
                        "both have left, since they do not listen", lambda: len(world.of(rec.JobEnded)) == 2
                    )
                    await looks(world, 3)
                    assert len(world.of(rec.JobIntended)) == 2, "nothing is submitted there"
                finally:
                    await asyncio.to_thread(mode("REQUEUE"))
                await until("it is harvested again", lambda: len(world.of(rec.AllocationStarted)) == 4)

        began = time.time()
        asyncio.run(play())
        [refused] = world.events("partition_refused")
        assert "not preemptible" in refused.reason
        assert refused.at >= began
        assert "not preemptible" in world.acted("drain")[0].inputs
