"""The sum of allocations is Slurm's own account, within one poll at each end: on a real Slurm, with polls that are coarse for these lives.

Stub engines, all of them preempted at once and twice, one that ends by itself while slurmctld is frozen, a daemon that is restarted from
its ledger. Slurm's account is what its queue shows, asked four times a second, or `sacct -D` where slurmdbd can be had.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from scavenger.cluster.model import ClusterInfo, ClusterView, JobState
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.errors import ClusterError
from scavenger.harvest.decide.actions import comment_of
from scavenger.ledger import records as rec
from scavenger.ledger import store
from scavenger.ledger.read import reader, reports
from scavenger.router.core.events import WorkerLife
from tests import slurm_faults
from tests.harvest.world import UID, World, layout, running, spec, until
from tests.ledger.examples import written

pytestmark = pytest.mark.slurm

#: It writes when it is there, and leaves on TERM or when it is told to by a file: `<intent> <restart> <node> <Unix s>`.
STUB = """#!/bin/bash
# {{{{ key | quote }}}}
me="$SLURM_JOB_NAME ${{SLURM_RESTART_COUNT:-0}} $SLURMD_NODENAME"
say() {{ at=$(date +%s.%N) && echo "$me $at" >> {folder}/lives; }}  # its end by Slurm may end `date` first
trap 'say; exit 0' TERM
while [ ! -e {folder}/end-$SLURM_JOB_NAME ]; do say; sleep 0.2; done
say
"""
Key = tuple[int, int]  # (job, restart count)


@dataclass
class Account:
    """Slurm's own: from when to when each life of each job was (Unix s)."""

    starts: dict[Key, float] = field(default_factory=dict)
    ends: dict[Key, float] = field(default_factory=dict)

    async def keep(self, cluster: SlurmCluster, names: Callable[[], set[int]]) -> None:
        """Write down what the queue shows, until cancelled."""
        while True:
            with contextlib.suppress(ClusterError):  # it is frozen
                for job in await asyncio.to_thread(cluster.jobs):
                    key, before = (job.job_id, job.restart_count), (job.job_id, job.restart_count - 1)
                    if job.job_id not in names() or (not job.nodes and job.state is not JobState.PENDING):
                        continue
                    if job.state is JobState.RUNNING and job.start_time > 0:
                        self.starts[key] = job.start_time
                    elif job.end_time > 0 and job.state is not JobState.PENDING:
                        self.starts[key], self.ends[key] = job.start_time, job.end_time
                    if before in self.starts and not job.flags:
                        self.ends[before] = job.submit_time
            await asyncio.sleep(0.25)

    def read(self, cluster: SlurmCluster, job_ids: Sequence[int]) -> None:
        """What slurmdbd has of them."""
        for job_id in job_ids:
            lives = [life for life in cluster.accounting((job_id,)) if life.nodes]
            for restart, life in enumerate(sorted(lives, key=lambda life: life.submit_time)):
                self.starts[job_id, restart], self.ends[job_id, restart] = life.start_time, life.end_time


class Site:
    """A Slurm, a harvester that polls seldom, and a ledger that holds what it said."""

    def __init__(self, sandbox: SlurmSandbox, folder: Path, poll_s: float, *, asks_accounting: bool) -> None:
        self.sandbox, self.folder, self.poll_s = sandbox, folder, poll_s
        self.world = World(SlurmCluster(sandbox.env, timeout_s=2.0), folder, folder / "state")
        self.world.pace = {
            "poll_interval_s": poll_s,
            "fast_poll_interval_s": poll_s / 2,
            "min_poll_interval_s": 0.0,
            "max_rpc_per_min": 60_000.0,
        }
        self.world.lives = self.lives
        self.eyes = SlurmCluster(sandbox.env, timeout_s=2.0)
        self.url = f"sqlite:///{folder}/ledger.sqlite3"
        self.template = STUB.format(folder=folder)
        self.more = {"qos": "scavenge"} if sandbox.layout.qos else {}
        self.account = Account()
        self.may_look = threading.Event()
        self.may_look.set()
        view = self.world.cluster.view

        def answers_later() -> ClusterView:
            self.may_look.wait()
            return view()

        self.world.cluster.view = answers_later  # type: ignore[method-assign]
        if not asks_accounting:
            info = self.world.cluster.info
            self.world.cluster.info = lambda: _without(info())  # type: ignore[method-assign]

    def lives(self) -> list[WorkerLife]:
        """What a router would have heard."""
        found: dict[tuple[str, int], list[tuple[str, float]]] = {}
        with contextlib.suppress(FileNotFoundError):
            written = (self.folder / "lives").read_text()
            for line in written[: written.rfind("\n") + 1].splitlines():  # a last line may be half there
                intent, restart, node, at = line.split()
                found.setdefault((intent, int(restart)), []).append((node, float(at)))
        return [
            WorkerLife(intent, n, said[0][0], said[0][1], said[-1][1])
            for (intent, n), said in sorted(found.items())
        ]

    def jobs(self) -> dict[str, int]:
        return {one.intent_id: one.job_id for one in self.world.of(rec.JobSubmitted)}

    def runs(self, restart: int) -> int:
        """Engines that have registered in this life of their jobs."""
        return sum(life.incarnation == restart for life in self.lives())

    def kept(self) -> list[rec.Record]:
        """What the ledger holds by now, with the engines."""
        jobs = self.jobs()
        joined = [
            rec.WorkerJoined(
                n,
                1,
                "harvested",
                life.intent_id,
                f"s{n}",
                life.incarnation,
                jobs[life.intent_id],
                life.node,
                1,
                "stub",
                life.joined_at,
            )
            for n, life in enumerate(self.lives(), 1)
        ]
        left = [
            rec.WorkerLeft(n, "told to go", True, 0, 0, 0, life.seen_at)
            for n, life in enumerate(self.lives(), 1)
        ]
        return [*(one for one in self.world.said if isinstance(one, rec.Record)), *joined, *left]

    def ledger(self) -> str:
        """A ledger of it, afresh."""
        for path in self.folder.glob("ledger.sqlite3*"):
            path.unlink()
        written(self.url, [self.kept()])
        return self.url

    async def taken_back(self, restart: int) -> None:
        """Another user takes all GPUs at once, and gives them back.

        A look that falls in between is answered after it: a daemon that sees the other job pending withdraws its own.
        """
        self.may_look.clear()
        try:
            theirs = await asyncio.to_thread(self.eyes.submit, spec(nodes=2, tasks=2, workdir="/tmp"))
            mine = set(self.jobs().values())
            await until("all are out", lambda: all((job, restart) in self.account.ends for job in mine), 60.0)
            await asyncio.to_thread(self.eyes.cancel, (theirs,))
        finally:
            self.may_look.set()

    async def play(self) -> None:
        self.world.want(4)
        keeping = asyncio.create_task(self.account.keep(self.eyes, lambda: set(self.jobs().values())))
        try:
            async with running(
                self.world.harvester(self.template, drain_notice_s=600.0, max_pending=4, **self.more)
            ):
                await until("four engines registered", lambda: self.runs(0) == 4, 60.0)
                await self.taken_back(0)  # at once: some of them no look has seen
            await until("they are back, and no daemon saw it", lambda: self.runs(1) == 4, 90.0)
            await asyncio.to_thread(self.ledger)
            second = self.world.harvester(self.template, drain_notice_s=600.0, max_pending=4, **self.more)
            second.restore(await asyncio.to_thread(self.snapshot))
            async with running(second):
                await until("it has looked", lambda: second.view is not None, 30.0)
                await self.taken_back(1)
                await until("and they are back again", lambda: self.runs(2) == 4, 90.0)
                await self.frozen()
                self.world.want(0)
                mine = tuple(self.jobs().values())
                await asyncio.to_thread(self.eyes.cancel, mine)
                starts = self.account.starts
                await until("Slurm has closed all", lambda: starts.keys() <= self.account.ends.keys(), 60.0)
                ended = self.world.of
                await until("all are closed", lambda: len(ended(rec.JobEnded)) == len(self.jobs()), 60.0)
                await until(
                    "all was asked for",
                    lambda: not second.cluster.info().accounting or not second.tracker.to_account(),
                    60.0,
                )
        finally:
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping

    async def frozen(self) -> None:
        """slurmctld hangs for longer than a poll; an engine ends meanwhile."""
        one = sorted(self.jobs())[0]
        slurm_faults.freeze_controller(self.sandbox)
        try:
            (self.folder / f"end-{one}").touch()
            failed = len(self.world.events("cluster_unavailable"))
            await until("a look failed", lambda: len(self.world.events("cluster_unavailable")) > failed, 60.0)
        finally:
            slurm_faults.thaw_controller(self.sandbox)
        key = (self.jobs()[one], 2)
        await until("Slurm knows that it ended", lambda: key in self.account.ends, 60.0)

    def snapshot(self) -> tuple[rec.OpenIntent, ...]:
        engine = store.open_engine(self.url)
        try:
            return reader.read_snapshot(engine).jobs
        finally:
            engine.dispose()

    def allocations(self) -> dict[Key, tuple[float, float]]:
        engine = store.open_engine(self.url)
        try:
            found = reader.rows(
                engine, "SELECT job_id, restart_count, started_at, ended_at FROM gpu_allocations"
            ).rows
            return {(row[0], row[1]): (row[2], row[3]) for row in found}
        finally:
            engine.dispose()


def _without(info: ClusterInfo) -> ClusterInfo:
    return replace(info, accounting=False)


@contextlib.contextmanager
def site(folder: Path, poll_s: float, *, qos: bool, asks_accounting: bool = False) -> Iterator[Site]:
    settings = {"AccountingStoreFlags": "job_comment"} if qos else {}
    with SlurmSandbox(
        msgspec.structs.replace(layout(), requeue_delay_s=6.0, qos=qos, settings=settings)
    ) as sandbox:
        yield Site(sandbox, folder, poll_s, asks_accounting=asks_accounting)


def agrees(site: Site, within_s: float) -> None:
    """Each life is one allocation, each end within one poll; and the ledger's own check finds nothing."""
    recorded, slurm = site.allocations(), site.account
    assert recorded.keys() == slurm.starts.keys() == slurm.ends.keys()
    assert {restart for _, restart in recorded} >= {0, 1, 2}
    off = {
        key: (start - slurm.starts[key] if slurm.starts[key] > 0 else 0.0, end - slurm.ends[key])
        for key, (start, end) in recorded.items()
    }
    assert all(max(abs(first), abs(last)) <= within_s for first, last in off.values()), off
    ours = sum(end - start for start, end in recorded.values())
    theirs = sum(slurm.ends[key] - (slurm.starts[key] or recorded[key][0]) for key in recorded)
    assert abs(ours - theirs) <= 2 * within_s * len(recorded)
    lost = [row for row in reports.check(site.url) if "allocation" in row]
    assert lost == []


def test_the_ledger_has_what_slurms_queue_showed_at_any_moment(tmp_path: Path) -> None:
    with site(tmp_path, 5.0, qos=False) as here:
        began = time.time()
        asyncio.run(here.play())
        here.ledger()
        # a poll, stretched by up to a tenth, and the seconds in which Slurm counts
        agrees(here, 1.1 * here.poll_s + 1.0)
        assert time.time() - began < 150.0
        preempted = [end for end in here.world.of(rec.AllocationEnded) if end.reason == "preempted"]
        assert len(preempted) >= 8, "four at once, twice"


@pytest.mark.long
@pytest.mark.accounting
@pytest.mark.parametrize("asks_accounting", [True, False])
def test_the_ledger_has_what_sacct_says(tmp_path: Path, asks_accounting: bool) -> None:
    """Also where the daemon does not ask it."""
    with site(tmp_path, 10.0, qos=True, asks_accounting=asks_accounting) as here:
        asyncio.run(here.play())
        here.account = Account()
        here.account.read(here.eyes, sorted(here.jobs().values()))
        here.ledger()
        agrees(here, 2.0 if asks_accounting else 1.1 * here.poll_s + 1.0)
        says_whose_each_job_is(here)


def says_whose_each_job_is(site: Site) -> None:
    """As docs/site.md has an admin ask: every life of each job names its run, and the job's name is the ledger's id."""
    command = "sacct -n -P -X -D -S now-1day -o JobID,JobName,Comment"
    found = [line.split("|", 2) for line in site.sandbox.run(*command.split()).splitlines()]
    ids = {str(job_id): intent for intent, job_id in site.jobs().items()}
    ours = [row for row in found if row[0] in ids]
    assert len(ours) >= 2 * len(ids), "each was requeued"
    assert {(job, name, comment) for job, name, comment in ours} == {
        (job, intent, comment_of(UID, intent, "run")) for job, intent in ids.items()
    }
