"""Takes the looks at Slurm: at the queue alone or at everything, and now and then at what Slurm says of itself.

A look at the queue becomes a whole one where it says too little. Every look is stamped by our clock, with the time before it was asked
for. What Slurm says of itself decides, with the partitions, whether ours may be harvested; it may change while we run.

Owns the last complete observation, Slurm's account of itself, and the verdict on the partition. Must not know when to look (`pace`), nor
what is concluded from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from scavenger.cluster.model import ClusterInfo, ClusterView, Job
from scavenger.cluster.port import Cluster
from scavenger.config import DaemonConfig
from scavenger.errors import ConfigError
from scavenger.harvest import preflight
from scavenger.harvest.pace import Look
from scavenger.harvest.plans import Plans
from scavenger.harvest.thread import OneThread
from scavenger.ledger import records as rec

#: A site changes whether Slurm preempts at all, and what it hides, without a word to us: by a reload, or a restart of slurmctld.
INFO_S = 900.0


class Looks:
    """`surprised` says whether a queue shows more than a look at it alone can explain; `learned` hears what Slurm says of itself."""

    def __init__(
        self,
        config: Callable[[], DaemonConfig],
        cluster: Cluster,
        thread: OneThread,
        *,
        surprised: Callable[[Sequence[Job]], bool],
        learned: Callable[[ClusterInfo], None],
        write: Callable[[Sequence[rec.Record]], object],
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._config, self._cluster, self._thread = config, cluster, thread
        self._surprised, self._learned, self._write = surprised, learned, write
        self._clock, self._monotonic = clock, monotonic
        self.view: ClusterView | None = None  # the last complete observation
        self.info: ClusterInfo | None = None  # None: Slurm never answered
        self._info_at = -math.inf
        self._plans = Plans()
        self.refused = ""  # why the partition may no longer be harvested

    @property
    def name(self) -> str:
        return self.info.name if self.info is not None else "cluster"

    async def observe(self, look: Look, failed: bool) -> tuple[ClusterView, Look]:
        """What was seen, and by which look. `failed`: the last one did. Raises `ClusterError`, and the first one `ConfigError` when the
        partition may not be harvested."""
        view, look = await self._observe(look, failed)
        self.view = replace(view, jobs=self._plans.complete(view.jobs, view.observed_at))
        return self.view, look

    async def _observe(self, look: Look, failed: bool) -> tuple[ClusterView, Look]:
        if self.info is None:
            info = await self._thread.call(self._cluster.info)
            view = await self.whole()
            harvest = self._config().harvest
            preflight.check(info, view.partitions, harvest.partition, harvest.qos)
            self._learn(info)
            return view, Look.FULL
        if look is Look.JOBS and self.view is not None:
            asked_at = self._clock()
            jobs = await self._thread.call(self._cluster.jobs)
            if not self._surprised(jobs):
                return replace(self.view, jobs=jobs, observed_at=asked_at), Look.JOBS
        view = await self.whole()
        if failed or self._monotonic() - self._info_at >= INFO_S:  # a controller that was restarted has read another configuration
            self._learn(await self._thread.call(self._cluster.info))
        self._check_again(self.info, view)
        return view, Look.FULL

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
            preflight.check(info, view.partitions, harvest.partition, harvest.qos)
        except ConfigError as error:
            refused = error.cause
        if refused != self.refused:
            kind = "partition_refused" if refused else "partition_allowed"
            self._write([rec.Event(kind, 0, harvest.partition, refused or "it is preemptible again", "{}", self._clock())])
        self.refused = refused
