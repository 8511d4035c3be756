"""One site for the harvester: a real local cluster whose jobs are processes; ledger, router and key ring are lists of what is said."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from scavenger.cluster.layout import ClusterLayout, PartitionLayout
from scavenger.cluster.model import ClusterInfo, ClusterView, Job, JobLife, JobSpec, JobState, PreemptMode
from scavenger.cluster.port import Cluster, RpcCounter
from scavenger.config import ClusterSection, DaemonConfig, DaemonSection, HarvestSection
from scavenger.errors import ClusterError, ClusterUnavailable, Fenced, SubmitUnknown
from scavenger.harvest.execute.edges import LedgerWrites, RouterLink, Sources
from scavenger.harvest.harvester import Harvester
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import Demand
from scavenger.router.core.events import PeerIdentity, WorkerLife
from tests.clusters import unfinished

UID = "feedbeef"
SLEEPS = "#!/bin/bash\n# {{ key | quote }}\ntrap 'exit 0' TERM\nwhile :; do sleep 0.05; done\n"
FAST = {
    "poll_interval_s": 0.2,
    "fast_poll_interval_s": 0.1,
    "min_poll_interval_s": 0.0,
    "max_rpc_per_min": 60_000.0,
}


class Reached:
    """The port, over a real cluster: writes down what is called, and fails when told to."""

    def __init__(self, cluster: Cluster, said: list[Any]) -> None:
        self.cluster, self.said = cluster, said
        self.fail_view = self.lose_answer = False
        self.refuse = ""
        self.own_rpc, self.whole_cost = RpcCounter(), 4
        self.looks: list[str] = []

    def info(self) -> ClusterInfo:
        return self.cluster.info()

    def view(self) -> ClusterView:
        self.looks.append("full")
        self.own_rpc.add({"node_info": self.whole_cost})
        if self.fail_view:
            self.said.append("view failed")
            raise ClusterUnavailable("slurmctld does not answer")
        return self.cluster.view()

    @property
    def rpc(self) -> RpcCounter:
        return self.own_rpc

    def jobs(self) -> tuple[Job, ...]:
        self.looks.append("jobs")
        return self.cluster.jobs()

    def submit(self, spec: JobSpec) -> int:
        if self.refuse:
            raise ClusterError(self.refuse)
        self.said.append(("submit", spec.name))
        job_id = self.cluster.submit(spec)
        if self.lose_answer:
            raise SubmitUnknown("the answer was lost")
        return job_id

    def cancel(self, job_ids: tuple[int, ...]) -> None:
        self.said.append(("cancel", job_ids))
        self.cluster.cancel(job_ids)

    def requeue(self, job_id: int) -> None:
        self.cluster.requeue(job_id)

    def release(self, job_id: int, node: str) -> None:
        self.cluster.release(job_id, node)

    def accounting(self, job_ids: tuple[int, ...]) -> tuple[JobLife, ...]:
        return self.cluster.accounting(job_ids)

    def close(self) -> None:
        self.cluster.close()


@dataclass
class World:
    """One site: the cluster, a state directory, and what the harvester said to ledger, router and key ring, in order."""

    site: Cluster
    local_dir: Path
    state_dir: Path
    said: list[Any] = field(default_factory=list)
    demand: list[Demand] = field(default_factory=list)
    connected: bool = True  # whether the router knows an engine of every job that holds GPUs
    allowed: dict[str, PeerIdentity] = field(default_factory=dict)
    pace: dict[str, Any] = field(default_factory=lambda: dict(FAST))
    stalled: bool = False  # the ledger takes records and makes none durable
    fenced: bool = False
    ahead_s: float = 0.0  # the daemon's clock, of the scheduler's
    clock: Callable[[], float] = time.time
    uid: str = UID  # of its ledger
    lives: Callable[[], Sequence[WorkerLife]] = tuple  # engines that the router knows of
    backend: Literal["local", "slurm"] = (
        "local"  # as the configuration says it; the cluster is `site` in any case
    )
    cluster: Reached = field(init=False)

    def __post_init__(self) -> None:
        self.cluster = Reached(self.site, self.said)

    def want(self, engines: int, *, encrypts: bool = False) -> None:
        self.demand = [Demand(1, "run", engines, 1, f"{engines} are useful", encrypts=encrypts)]

    def config(self, template: str, **harvest: Any) -> DaemonConfig:
        path = self.state_dir.parent / "job.j2"
        path.write_text(template)
        return DaemonConfig(
            daemon=DaemonSection(state_dir=self.state_dir),
            cluster=ClusterSection(backend=self.backend, local_dir=self.local_dir, absent_s=0.3, **self.pace),
            harvest=HarvestSection(
                **{"standby_jobs": 0, "job_template": path, "max_engines": 4, "backoff_s": 0.1, **harvest}
            ),
        )

    def harvester(self, template: str = SLEEPS, drain_notice_s: float = 30.0, **harvest: Any) -> Harvester:
        def write(records: Sequence[rec.Record]) -> None:
            if self.fenced:
                raise Fenced("another generation owns the ledger")
            self.said.extend(records)

        async def commit(records: Sequence[rec.Record]) -> None:
            await asyncio.sleep(0)
            write(records)
            if self.stalled:
                await asyncio.Event().wait()

        def leases() -> dict[str, tuple[int, float]]:
            held = (one for one in made.tracker.intents.values() if one.allocation is not None)
            return {one.intent_id: (0, 0.0) for one in held} if self.connected else {}

        def forget(key: str) -> None:
            self.allowed.pop(key, None)

        made = Harvester(
            self.config(template, **harvest),
            self.cluster,
            self.uid,
            LedgerWrites(commit, write),
            RouterLink(
                post=self.said.append,
                demand=lambda: self.demand,
                leases=leases,
                register=self.allowed.__setitem__,
                unregister=forget,
                lives=lambda: self.lives(),
            ),
            Sources(clock=lambda: self.clock() + self.ahead_s, draw=lambda: 0.5),
            drain_notice_s=drain_notice_s,
        )
        return made

    def of(self, kind: type) -> list[Any]:
        return [one for one in self.said if isinstance(one, kind)]

    def events(self, kind: str) -> list[rec.Event]:
        return [event for event in self.of(rec.Event) if event.kind == kind]

    def acted(self, action: str) -> list[rec.Decision]:
        return [decision for decision in self.of(rec.Decision) if decision.action == action]

    def jobs(self, state: JobState | None = None) -> list[Job]:
        view = self.site.view()
        alive = unfinished(view)
        return [job for job in view.jobs if job.job_id in alive and state in (None, job.state)]


def layout() -> ClusterLayout:
    nodes = ("node1", "node2")
    low = PreemptMode.REQUEUE
    return ClusterLayout(
        nodes=nodes,
        gpus=2,
        requeue_delay_s=0.3,
        kill_wait_s=1.0,
        partitions=(
            PartitionLayout(name="normal", nodes=nodes, priority_tier=10),
            PartitionLayout(name="scavenge", nodes=nodes, priority_tier=1, preempt_mode=low),
        ),
    )


@asynccontextmanager
async def running(harvester: Harvester, *, cancel: bool = False) -> AsyncIterator[None]:
    stop = asyncio.Event()
    task = asyncio.create_task(harvester.run(stop))
    try:
        yield
    finally:
        if not task.done():
            await harvester.shutdown(cancel)
        await task


async def until(what: str, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.02)


def spec(partition: str = "normal", gpus: int = 2, **more: Any) -> JobSpec:
    script = "#!/bin/bash\nwhile :; do sleep 0.05; done\n"
    return JobSpec(
        **{"name": "theirs", "comment": "", "partition": partition, "script": script, "gpus": gpus, **more}
    )
