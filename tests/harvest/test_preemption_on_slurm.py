"""Ways in which sites preempt, limit and hide, on a real Slurm with slurmdbd: who gave way, what was submitted, and that nobody is blamed.

One site, changed from test to test as an admin would, by `sacctmgr` and `scontrol reconfigure`: it preempts by QOS, with GANG, puts no job
back by default (JobRequeue=0), and its two nodes have nothing in common.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scavenger.cluster.layout import NodeLayout
from scavenger.cluster.model import Job, JobState
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.doctor import collect
from scavenger.doctor.facts import SiteRequirements
from scavenger.doctor.findings import Level, SiteFinding
from scavenger.doctor.rules import run
from scavenger.errors import AccessDenied, ConfigError
from scavenger.ledger import records as rec
from scavenger.router.core.events import JobGone
from tests.clusters import empty, wait_for
from tests.harvest.world import World, layout, running, spec, until

pytestmark = [pytest.mark.slurm, pytest.mark.accounting]

NODE2 = NodeLayout(gpus=4, cpus=8, gpu_type="a100", memory_mb=8000)
SETTINGS = {"JobRequeue": "0", "PreemptMode": "REQUEUE,GANG"}
#: An ordinary user whom every Debian has. Not `nobody`, of whom Slurm 26.05 takes no job.
USER = "mail"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[SlurmSandbox]:
    site = msgspec.structs.replace(layout(), requeue_delay_s=6.0, qos=True, unlike={"node2": NODE2})
    with SlurmSandbox(msgspec.structs.replace(site, settings=SETTINGS)) as made:
        sacctmgr(made, "add", "user", USER, "account=site")
        yield made


@pytest.fixture
def world(sandbox: SlurmSandbox, tmp_path: Path) -> Iterator[World]:
    cluster = SlurmCluster(sandbox.env)
    yield World(cluster, tmp_path, tmp_path / "state")
    empty(cluster)


@pytest.fixture(autouse=True)
def asked_at_each_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a site says of itself, which is asked for every 15 minutes."""
    monkeypatch.setattr("scavenger.harvest.harvester.INFO_S", 0.0)


def sacctmgr(sandbox: SlurmSandbox, *words: str) -> None:
    sandbox.run("sacctmgr", "-i", *words)


@contextmanager
def changed(sandbox: SlurmSandbox, whose: tuple[str, ...], value: str, back: str) -> Iterator[None]:
    """While it lasts slurmdbd has this for a QOS or an account."""
    sacctmgr(sandbox, "modify", *whose, "set", value)
    try:
        yield
    finally:
        sacctmgr(sandbox, "modify", *whose, "set", back)


def found(sandbox: SlurmSandbox, check: str, env: dict[str, str] | None = None, **wanted: Any) -> SiteFinding:
    """What doctor says."""
    about = SiteRequirements("scavenge", **{"user": "root", "account": "site", "qos": "scavenge", **wanted})
    findings = run.judge(collect.gather(about, env=env or sandbox.env), about)
    return next(one for one in findings if one.check == check)


def is_running(world: World, job_id: int) -> bool:
    return job_id in {job.job_id for job in world.jobs(JobState.RUNNING)}


async def preempted(world: World, ours: int) -> tuple[int, ...]:
    """Another user takes every GPU; our job is off its own. Returns their jobs."""
    theirs = tuple(
        [
            await asyncio.to_thread(world.site.submit, spec(gpus=gpus, nodelist=(node,), workdir="/tmp"))
            for node, gpus in (("node1", 2), ("node2", 4))
        ]
    )
    await until("they run", lambda: all(is_running(world, one) for one in theirs), 60.0)
    assert not is_running(world, ours)
    return theirs


async def engine(world: World, started: int) -> Job:
    """The one that runs as the n-th that was observed."""
    await until(f"engine {started} runs", lambda: len(world.of(rec.AllocationStarted)) == started, 90.0)
    last = world.of(rec.AllocationStarted)[-1]
    await until("in the queue as well", lambda: is_running(world, last.job_id), 10.0)
    return next(job for job in world.jobs(JobState.RUNNING) if job.job_id == last.job_id)


def blames_nobody(world: World) -> None:
    assert not any(gone.crashed for gone in world.of(JobGone))
    assert world.of(rec.EngineDied) == world.events("node_quarantined") == world.events("engine_died") == []


def test_jobs_that_are_not_put_back_by_default(sandbox: SlurmSandbox, world: World) -> None:
    """JobRequeue=0: ours ask to be put back, which overrides it. One of which an admin (or a plugin) took that back ends, and another is
    submitted."""

    async def play() -> None:
        world.want(1)
        async with running(
            world.harvester(qos="scavenge", drain_notice_s=0.5, quarantine_after=1), cancel=True
        ):
            first = await engine(world, 1)
            await asyncio.to_thread(world.site.cancel, await preempted(world, first.job_id))
            again = await engine(world, 2)
            assert (again.job_id, again.restart_count) == (first.job_id, 1)
            await asyncio.to_thread(sandbox.run, "scontrol", "update", f"JobId={first.job_id}", "Requeue=0")
            await asyncio.to_thread(world.site.cancel, await preempted(world, first.job_id))
            fresh = await engine(world, 3)
            assert (fresh.job_id != first.job_id, fresh.restart_count) == (True, 0)

    asyncio.run(play())
    assert [end.reason for end in world.of(rec.AllocationEnded)][:2] == ["preempted", "preempted"]
    blames_nobody(world)
    assert "--requeue, which overrides" in found(sandbox, "requeue").observed
    lives = sandbox.run(
        "sacct", "-D", "-X", "-n", "-P", "-o", "State", "-j", str(world.of(rec.JobSubmitted)[0].job_id)
    )
    assert lives.split()[:2] == ["PREEMPTED", "PREEMPTED"], "slurmdbd has it so as well"


def test_an_engine_that_may_not_be_put_back_leaves_at_once(sandbox: SlurmSandbox, world: World) -> None:
    """The job script itself, with a worker that leaves on Slurm's notice: it holds no GPU while it asks in vain to be requeued."""
    worker = world.local_dir / "worker"
    worker.write_text("#!/bin/bash\ntrap 'exit 75' TERM\necho here\nwhile :; do sleep 0.05; done\n")
    worker.chmod(0o755)
    script = (Path(__file__).parents[2] / "scripts/rollout.sbatch.j2").read_text()

    async def play() -> None:
        world.want(1)
        harvester = world.harvester(script, qos="scavenge", python=str(worker), quarantine_after=1)
        async with running(harvester, cancel=True):
            first = await engine(world, 1)
            log = world.state_dir / f"logs/{first.name}.log"
            await until("its worker runs", lambda: log.exists() and "here" in log.read_text(), 30.0)
            await asyncio.to_thread(sandbox.run, "scontrol", "update", f"JobId={first.job_id}", "Requeue=0")
            began = asyncio.get_running_loop().time()
            theirs = await preempted(world, first.job_id)
            waited_s = asyncio.get_running_loop().time() - began
            assert "disabled" in log.read_text()
            assert waited_s < 9.0, "of the 30 s of its grace; it asked for 10 s before"
            await asyncio.to_thread(world.site.cancel, theirs)
            assert (await engine(world, 2)).job_id != first.job_id

    with changed(sandbox, ("qos", "scavenge"), "GraceTime=30", "GraceTime=0"):
        asyncio.run(play())
    assert world.of(rec.AllocationEnded)[0].reason == "preempted"
    blames_nobody(world)


def test_where_the_qos_cancels_what_it_preempts(sandbox: SlurmSandbox, world: World) -> None:
    async def play() -> None:
        world.want(1)
        async with running(
            world.harvester(qos="scavenge", drain_notice_s=0.5, quarantine_after=1), cancel=True
        ):
            first = await engine(world, 1)
            await asyncio.to_thread(world.site.cancel, await preempted(world, first.job_id))
            assert (await engine(world, 2)).job_id != first.job_id

    with changed(sandbox, ("qos", "scavenge"), "PreemptMode=cancel", "PreemptMode=requeue"):
        told = found(sandbox, "preempt mode")
        asyncio.run(play())
    assert (told.level, told.observed[:6]) == (Level.WARNING, "CANCEL")
    assert world.of(rec.AllocationEnded)[0].reason == "preempted"
    blames_nobody(world)


@pytest.mark.parametrize(
    ("value", "back", "check", "words"),
    [
        ("PreemptMode=suspend", "PreemptMode=requeue", "preempt mode", "suspends what it preempts"),
        (
            "PreemptExemptTime=00:05:00",
            "PreemptExemptTime=00:00:00",
            "exempt time",
            "PreemptExemptTime = 300 s",
        ),
    ],
)
def test_a_qos_whose_preemption_would_make_others_wait_is_refused(
    sandbox: SlurmSandbox, world: World, value: str, back: str, check: str, words: str
) -> None:
    """At the start, and its engines leave should it become so while they run."""

    async def play() -> None:
        world.want(1)
        async with running(world.harvester(drain_notice_s=0.5, qos="scavenge"), cancel=True):
            await engine(world, 1)
            with changed(sandbox, ("qos", "scavenge"), value, back):
                await until("that is noticed", lambda: world.events("partition_refused"), 60.0)
                await until("the engine has left", lambda: world.of(rec.AllocationEnded), 60.0)
                await until("for good", lambda: not world.jobs(), 60.0)
                told = await asyncio.to_thread(found, sandbox, check)
                with pytest.raises(ConfigError, match=words):
                    await world.harvester(qos="scavenge").run(asyncio.Event())
            assert told.level is Level.PROBLEM
            await until("it is allowed again", lambda: world.events("partition_allowed"), 60.0)

    asyncio.run(play())
    assert words in world.events("partition_refused")[0].reason
    blames_nobody(world)


@pytest.mark.parametrize(
    ("whose", "reason"), [(("account", "site"), "AssocGrpGRES"), (("qos", "scavenge"), "QOSGrpGRES")]
)
def test_a_limit_of_gpus_holds_one_job_back_and_no_more(
    sandbox: SlurmSandbox, world: World, whose: tuple[str, ...], reason: str
) -> None:
    """GrpTRES of the account, or of the QOS."""

    async def play() -> None:
        world.want(4)
        harvester = world.harvester(qos="scavenge", account="site", max_pending=4, quarantine_after=1)
        async with running(harvester, cancel=True):
            await until("Slurm holds one back", lambda: refused_for(world, "account_limit"), 60.0)
            polls = len(world.of(rec.ClusterPolled))
            await until("for several polls", lambda: len(world.of(rec.ClusterPolled)) > polls + 5, 60.0)
            assert len(world.jobs(JobState.RUNNING)) == 2
            assert len(world.of(rec.JobIntended)) <= 4
            assert reason in harvester.stop_state.concluded, "scavenger status says which limit"
            told = await asyncio.to_thread(found, sandbox, "account limits")
            if whose[0] == "account":
                assert told.level is Level.WARNING, "another user is in that account"
                assert (
                    f"GrpTRES=gres/gpu=2 of account site is also that of {USER}, whose jobs" in told.observed
                )
            else:
                assert (told.level, told.observed) == (Level.OK, "account site has no limit")
                told = await asyncio.to_thread(found, sandbox, "qos")
                assert "GrpTRES=gres/gpu=2" in told.observed

    with changed(sandbox, whose, "GrpTRES=gres/gpu=2", "GrpTRES=gres/gpu=-1"):
        asyncio.run(play())
    blames_nobody(world)


@pytest.mark.parametrize(
    ("whose", "limit", "word"),
    [
        (("account", "site"), "GrpSubmitJobs", "AssocGrpSubmitJobsLimit"),
        (("user", "root", "where", "account=site"), "MaxSubmitJobs", "AssocMaxSubmitJobLimit"),
        (("qos", "scavenge"), "GrpSubmitJobs", "QOSGrpSubmitJobsLimit"),
    ],
)
def test_a_submission_that_a_limit_refuses_names_it_and_is_not_repeated_at_once(
    sandbox: SlurmSandbox, world: World, whose: tuple[str, ...], limit: str, word: str
) -> None:
    async def play() -> None:
        world.want(4)
        harvester = world.harvester(
            qos="scavenge", account="site", max_pending=4, quarantine_after=1, backoff_s=60.0
        )
        async with running(harvester, cancel=True):
            await until("one runs", lambda: world.of(rec.AllocationStarted), 60.0)
            await until("the next is refused", lambda: world.events("submit_refused"), 60.0)
            polls = len(world.of(rec.ClusterPolled))
            await until("for several polls", lambda: len(world.of(rec.ClusterPolled)) > polls + 5, 60.0)
            assert len(world.of(rec.JobIntended)) == 2, "each refusal is a request for nothing"
            assert word in world.events("submit_refused")[0].reason
            assert word in harvester.stop_state.concluded
            assert "1 submissions in a row failed" in harvester.stop_state.concluded
            assert len(world.jobs(JobState.RUNNING)) == 1
            told = await asyncio.to_thread(found, sandbox, "account limits")
            assert (f"{limit.removesuffix('Jobs')}=1" in told.observed) == (whose[0] != "qos")
            assert told.level is (Level.WARNING if whose[0] == "account" else Level.OK)

    with changed(sandbox, whose, f"{limit}=1", f"{limit}=-1"):
        asyncio.run(play())
    assert [decision.code for decision in refused_for(world, "backoff")]
    blames_nobody(world)


def refused_for(world: World, code: str) -> list[rec.Decision]:
    return [decision for decision in world.of(rec.Decision) if decision.code == code]


def test_nodes_that_have_nothing_in_common(sandbox: SlurmSandbox, world: World) -> None:
    """2 h100 beside 32 CPUs each, 4 a100 beside 2 CPUs and 2000 MiB each: each engine has its share of its own node."""

    async def play(engines: int, **harvest: Any) -> list[Job]:
        world.want(engines)
        started = len(world.of(rec.AllocationStarted))
        async with running(
            world.harvester(qos="scavenge", max_engines=6, max_pending=6, **harvest), cancel=True
        ):
            await until("they run", lambda: len(world.of(rec.AllocationStarted)) == started + engines, 90.0)
            return [job for job in world.jobs(JobState.RUNNING) if job.partition == "scavenge"]

    jobs = asyncio.run(play(6, cpus_per_engine=8))
    assert (
        sorted((job.nodes[0], job.gpus, job.cpus) for job in jobs)
        == [("node1", 1, 8)] * 2 + [("node2", 1, 2)] * 4
    )
    jobs = asyncio.run(play(2, gpu_type="h100"))
    assert [job.nodes for job in jobs] == [("node1",)] * 2
    jobs = asyncio.run(play(4, gpu_type="a100"))
    assert [job.nodes for job in jobs] == [("node2",)] * 4
    jobs = asyncio.run(play(2, memory_mb_per_engine=10_000))
    assert [job.nodes for job in jobs] == [("node1",)] * 2, "a node's GPU there has 2000 MiB"
    blames_nobody(world)
    assert "2 CPUs on node2" in found(sandbox, "shape", cpus=8).observed
    told = found(sandbox, "shape", memory_mb=10_000)
    assert (told.level, "2000 MiB on node2" in told.observed) == (Level.WARNING, True)
    assert found(sandbox, "shape", memory_mb=10_000, gpu_type="h100").level is Level.OK
    assert "4 GPUs (gpu:a100) on 1 nodes" in found(sandbox, "gpus", gpu_type="a100").observed


COMMANDS = ("squeue", "scontrol", "sbatch", "scancel", "sacctmgr", "sacct", "sinfo", "srun")


@pytest.fixture
def as_user(sandbox: SlurmSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The daemon's world as an ordinary user's: each of Slurm's commands runs as that user, whom Slurm tells what users may see."""
    if os.getuid() != 0:
        pytest.skip("only root can run commands as another user")
    uid = pwd.getpwnam(USER).pw_uid
    bin_dir, home = tmp_path / "bin", sandbox.dir / "home"
    bin_dir.mkdir()
    for name in COMMANDS:
        real = shutil.which(name, path=sandbox.env["PATH"])
        (bin_dir / name).write_text(
            f'#!/bin/sh\nexec setpriv --reuid={uid} --regid={uid} --clear-groups {real} "$@"\n'
        )
        (bin_dir / name).chmod(0o755)
    (home / "state/logs").mkdir(parents=True)
    for folder in (home / "state/logs", home / "state", home, sandbox.dir):
        folder.chmod(0o777 if folder.name == "logs" else 0o755)
    monkeypatch.setattr(os, "getuid", lambda: uid)
    env = {**sandbox.env, "PATH": f"{bin_dir}{os.pathsep}{sandbox.env['PATH']}"}
    yield World(SlurmCluster(env), tmp_path, home / "state")
    monkeypatch.undo()
    empty(SlurmCluster(sandbox.env))
    shutil.rmtree(home)


@contextmanager
def hidden(sandbox: SlurmSandbox, what: str) -> Iterator[None]:
    """slurm.conf says PrivateData, and slurmctld has read it."""
    conf = Path(sandbox.env["SLURM_CONF"])
    before = conf.read_text()

    def reconfigure(text: str, says: str) -> None:
        conf.write_text(text)
        sandbox.run("scontrol", "reconfigure")
        wait_for("it has read that", lambda: f"PrivateData             = {says}\n" in shown(sandbox))

    reconfigure(f"{before}PrivateData={what}\n", what)
    try:
        yield
    finally:
        reconfigure(before, "none")


def shown(sandbox: SlurmSandbox) -> str:
    return sandbox.run("scontrol", "show", "config", check=False)


def test_what_private_data_hides_is_not_taken_for_idle(sandbox: SlurmSandbox, as_user: World) -> None:
    """jobs and usage: who waits is not seen, so that nothing is harvested but where only we may submit."""
    world, slurm = as_user, SlurmCluster(sandbox.env)
    theirs = slurm.submit(spec(gpus=2, nodelist=("node1",), workdir="/tmp"))
    wait_for("it runs", lambda: any(job.state is JobState.RUNNING for job in slurm.jobs()))
    env = {**sandbox.env, "PATH": world.site.environment["PATH"]}  # type: ignore[attr-defined]

    async def play() -> None:
        world.want(4)
        harvester = world.harvester(qos="scavenge", account="site", max_pending=4)
        async with running(harvester, cancel=True):
            await until("it is told", lambda: refused_for(world, "hidden"), 60.0)
            polls = len(world.of(rec.ClusterPolled))
            await until("for several polls", lambda: len(world.of(rec.ClusterPolled)) > polls + 5, 60.0)
            assert world.of(rec.JobIntended) == []
            assert f"2 GPUs are taken by jobs that {USER} may not see" in harvester.stop_state.concluded
        own = world.harvester(qos="scavenge", account="site", max_pending=4, sole_user=True)
        async with running(own, cancel=True):
            await until("engines on what is idle", lambda: len(world.of(rec.AllocationStarted)) == 4, 90.0)
            assert {one.node for one in world.of(rec.AllocationStarted)} == {"node2"}
            waits = await asyncio.to_thread(slurm.submit, spec(gpus=4, nodelist=("node2",), workdir="/tmp"))
            await until("who may preempt them does", lambda: is_running_in(slurm, waits), 60.0)
            await until("and that is seen", lambda: len(world.of(rec.AllocationEnded)) == 4, 60.0)
        assert {end.reason for end in world.of(rec.AllocationEnded)} == {"preempted"}

    with hidden(sandbox, "jobs,usage"):
        assert {job.user for job in world.site.jobs()} == set()
        told = found(sandbox, "private data", env, user=USER)
        asyncio.run(play())
    assert (told.level, "hides jobs of other users" in told.observed) == (Level.WARNING, True)
    assert is_running_in(slurm, theirs)
    blames_nobody(world)


def is_running_in(slurm: SlurmCluster, job_id: int) -> bool:
    return any(job.job_id == job_id and job.state is JobState.RUNNING for job in slurm.jobs())


def test_a_maintenance_that_is_hidden_ends_engines_when_it_begins(
    sandbox: SlurmSandbox, as_user: World
) -> None:
    """With PrivateData=reservations the daemon learns of one from the node's state. `test_on_slurm.py` has one that it sees."""
    world = as_user
    env = {**sandbox.env, "PATH": world.site.environment["PATH"]}  # type: ignore[attr-defined]
    book = "scontrol create reservation reservationname=upgrade starttime=now+8 duration=60 nodes=node1 flags=maint,ignore_jobs users=root"

    async def play() -> None:
        world.want(6)
        harvester = world.harvester(
            drain_notice_s=0.5, qos="scavenge", account="site", max_engines=6, max_pending=6, sole_user=True
        )
        async with running(harvester, cancel=True):
            await until("engines run", lambda: len(world.of(rec.AllocationStarted)) == 6, 90.0)
            await asyncio.to_thread(sandbox.run, *book.split())
            assert world.site.view().reservations == ()
            await until("node1 is empty", lambda: len(world.of(rec.AllocationEnded)) == 2, 60.0)
            await until("and stays so", lambda: len(world.jobs()) == 4, 60.0)

    with hidden(sandbox, "reservations"):
        told = found(sandbox, "private data", env, user=USER)
        try:
            asyncio.run(play())
        finally:
            sandbox.run("scontrol", "delete", "reservation=upgrade", check=False)
    assert (told.level, "once one has begun" in told.observed) == (Level.WARNING, True)
    drains = world.acted("drain")
    assert {drain.code for drain in drains} == {"node_drained"}
    assert all("node1 is taken out of service: " in drain.reason for drain in drains)
    blames_nobody(world)


def test_a_daemon_that_may_not_see_nodes_does_not_start(sandbox: SlurmSandbox, as_user: World) -> None:
    """And one that may no longer keeps what it has, submits nothing, and goes on when it may again."""
    world = as_user
    env = {**sandbox.env, "PATH": world.site.environment["PATH"]}  # type: ignore[attr-defined]

    async def play() -> None:
        world.want(1)
        async with running(world.harvester(qos="scavenge", account="site"), cancel=True):
            await until("an engine runs", lambda: world.of(rec.AllocationStarted), 60.0)
            with hidden(sandbox, "nodes"):
                await until("no poll succeeds", lambda: world.events("cluster_refused"), 60.0)
                world.want(4)
                failed = len(world.events("cluster_refused"))
                await until("and again", lambda: len(world.events("cluster_refused")) > failed + 1, 60.0)
                assert len(world.of(rec.JobIntended)) == 1
                assert world.of(rec.AllocationEnded) == []
                told = await asyncio.to_thread(found, sandbox, "private data", env, user=USER)
                with pytest.raises(AccessDenied, match="denied") as refused:
                    await world.harvester(qos="scavenge").run(asyncio.Event())
            await until("it goes on", lambda: len(world.of(rec.AllocationStarted)) == 4, 90.0)
        assert refused.value.exit_code == ConfigError.exit_code, "the unit does not start it again"
        assert "PrivateData" in refused.value.remedy
        assert (told.level, "does not start" in told.observed) == (Level.PROBLEM, True)

    asyncio.run(play())
    blames_nobody(world)
