"""Observes the cluster: `Poller.observe` gives a view, of the queue alone or of everything.

Owns the last complete observation, what Slurm says of itself, and the verdict on the partition. A poll of the queue becomes a full one
where it says too little. Every observation is stamped by our clock, with the time before it was asked for. Knows no job of ours, and not
when to poll.

Boundary: what is seen, apart from what is done about it (`harvester`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from scavenger.cluster import partition_check
from scavenger.cluster.model import ClusterInfo, ClusterView, Job
from scavenger.cluster.port import Cluster, OneThread
from scavenger.config import DaemonConfig
from scavenger.errors import ConfigError
from scavenger.harvest.execute.edges import Sources
from scavenger.harvest.pace import PollKind
from scavenger.ledger import records as rec

#: A cycle of backfill takes minutes at most (bf_max_time, by default bf_interval: 30 s); a job without a plan for longer has none.
KEPT_S = 300.0
#: A site changes whether Slurm preempts at all, and what it hides, without a word to us: by a reload, or a restart of slurmctld.
INFO_S = 900.0


class Plans:
    """Remembers what backfill planned last for each waiting job. Call `complete` with every poll's queue.

    Each cycle of backfill begins by forgetting the starts and nodes of all waiting jobs (Slurm's `_clear_job_estimates`) and finds them
    again one by one, so a queue that is polled in between shows none.
    """

    def __init__(self) -> None:
        self._seen: dict[
            int, tuple[Job, float]
        ] = {}  # by job id: how it was planned last, and when that was seen

    def complete(self, jobs: Sequence[Job], now: float) -> tuple[Job, ...]:
        """The queue, with the last plan of each waiting job that shows none, while that is still to come."""
        seen = self._seen
        self._seen = {}
        return tuple(self._completed(job, seen, now) if job.waits else job for job in jobs)

    def _completed(self, job: Job, seen: dict[int, tuple[Job, float]], now: float) -> Job:
        if job.planned:
            self._seen[job.job_id] = (job, now)
            return job
        found = seen.get(job.job_id)
        if found is None or now - found[1] > KEPT_S or found[0].start_time <= now:
            return job
        self._seen[job.job_id] = found
        return replace(job, planned=found[0].planned, start_time=found[0].start_time)


class Poller:
    """`surprised` says whether a queue shows more than the queue alone can explain; `learned` gets what Slurm says of itself."""

    def __init__(
        self,
        config: Callable[[], DaemonConfig],
        cluster: Cluster,
        thread: OneThread,
        *,
        surprised: Callable[[Sequence[Job]], bool],
        learned: Callable[[ClusterInfo], None],
        write: Callable[[Sequence[rec.Record]], object],
        sources: Sources,
    ) -> None:
        self._config, self._cluster, self._thread = config, cluster, thread
        self._surprised, self._learned, self._write = surprised, learned, write
        self._clock, self._monotonic = sources.clock, sources.monotonic
        self.view: ClusterView | None = None  # the last complete observation
        self.info: ClusterInfo | None = None  # None: Slurm never answered
        self._info_at = -math.inf
        self._plans = Plans()
        self.refused = ""  # why the partition may no longer be harvested

    @property
    def name(self) -> str:
        return self.info.name if self.info is not None else "cluster"

    async def observe(self, poll: PollKind, failed: bool) -> tuple[ClusterView, PollKind]:
        """What was seen, and by which poll. `failed`: the last one did. Raises `ClusterError`, and the first one `ConfigError` when the
        partition may not be harvested."""
        view, poll = await self._observe(poll, failed)
        self.view = replace(view, jobs=self._plans.complete(view.jobs, view.observed_at))
        return self.view, poll

    async def _observe(self, poll: PollKind, failed: bool) -> tuple[ClusterView, PollKind]:
        if self.info is None:
            info = await self._thread.call(self._cluster.info)
            view = await self.whole()
            harvest = self._config().harvest
            partition_check.check(info, view.partitions, harvest.partition, harvest.qos)
            self._learn(info)
            return view, PollKind.FULL
        if poll is PollKind.JOBS and self.view is not None:
            asked_at = self._clock()
            jobs = await self._thread.call(self._cluster.jobs)
            if not self._surprised(jobs):
                return replace(self.view, jobs=jobs, observed_at=asked_at), PollKind.JOBS
        view = await self.whole()
        if (
            failed or self._monotonic() - self._info_at >= INFO_S
        ):  # a controller that was restarted has read another configuration
            self._learn(await self._thread.call(self._cluster.info))
        self._check_again(self.info, view)
        return view, PollKind.FULL

    async def whole(self) -> ClusterView:
        """A view, stamped by our clock and with the time before it was asked for: it is at least as new as it says."""
        asked_at = self._clock()
        return replace(await self._thread.call(self._cluster.view), observed_at=asked_at)

    def _learn(self, info: ClusterInfo) -> None:
        if info != self.info:
            self._learned(info)
        self.info, self._info_at = info, self._monotonic()

    def _check_again(self, info: ClusterInfo, view: ClusterView) -> None:
        """A partition that stops being harmless while we run gets no more jobs, and loses those it has."""
        harvest = self._config().harvest
        refused = ""
        try:
            partition_check.check(info, view.partitions, harvest.partition, harvest.qos)
        except ConfigError as error:
            refused = error.cause
        if refused != self.refused:
            kind = "partition_refused" if refused else "partition_allowed"
            self._write(
                [
                    rec.Event(
                        kind, 0, harvest.partition, refused or "it is preemptible again", "{}", self._clock()
                    )
                ]
            )
        self.refused = refused
