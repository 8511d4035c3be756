"""Which other users' jobs wait while we hold GPUs where they could run, from one poll to the next. Pure.

    waits    another user's job waits for GPUs (`waiting_jobs`), and we hold some on nodes of its partitions: one row of the ledger begins
    meanwhile  between two polls what we held at the first counts, for `MOST_UNSEEN_S` at most
    over     the job waits no more: Slurm's start time, or what else became of it

It judges nobody: a job that waits may wait for more than we hold. At most `MOST` waits are open at once, those that could start first.
Owns the arithmetic; `harvester` gives each whole view.

Boundary: what is recorded of others, apart from what is decided for them (`decide/other_users`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from scavenger.cluster.model import ClusterView, Job, JobState
from scavenger.ledger import records as rec

#: Waits that are followed at once: somebody's ten thousand jobs are as many rows otherwise.
MOST = 1000
#: As in the reports `other_users_waiting` and `idle_gpu_hours`: what nobody looked at is not counted.
MOST_UNSEEN_S = 300.0


@dataclass(slots=True)
class _Open:
    submitted_at: float
    partition: str
    held: int  # by us, at the last poll
    seen_at: float  # the last poll that saw it wait
    most: int = 0
    gpu_s: float = 0.0

    def count(self, until: float) -> None:
        self.gpu_s += self.held * min(MOST_UNSEEN_S, max(0.0, until - self.seen_at))


class OtherUsersWaits:
    """See the module. `restore` before the first `observe`: what was held before a restart is not known, and not counted."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}  # by job id; the waiting tasks of an array all have the array's

    def restore(self, waits: Sequence[rec.OtherUserWaits], now: float) -> None:
        self._open = {one.job_id: _Open(one.submitted_at, one.partition, 0, now) for one in waits}

    def observe(
        self, view: ClusterView, waiting: Sequence[Job], held: Mapping[str, int], now: float
    ) -> tuple[rec.Record, ...]:
        """One whole poll. `waiting`: others' jobs that wait for GPUs; `held`: GPUs that are ours, by node."""
        ours = _OurGpus(view, held)
        records: list[rec.Record] = []
        if self._open:
            listed = _listed(view, self._open.keys())
            for job_id in sorted(self._open):
                records += self._follow(job_id, listed.get(job_id), ours, now)
        new = [job for job in waiting if job.job_id not in self._open and ours.near(job.partition)]
        for job in sorted(new, key=lambda job: (_eligible_at(job, now), job.job_id)):
            if len(self._open) >= MOST:
                break
            if job.job_id in self._open:
                continue  # another task of the same array
            submitted_at = job.submit_time or now
            near = ours.near(job.partition)
            self._open[job.job_id] = _Open(submitted_at, job.partition, near, now, near)
            records.append(
                rec.OtherUserWaits(
                    job.job_id,
                    job.user,
                    job.partition,
                    job.gpus,
                    submitted_at,
                    max(submitted_at, _eligible_at(job, now)),
                    now,
                )
            )
        return tuple(records)

    def _follow(self, job_id: int, job: Job | None, ours: _OurGpus, now: float) -> list[rec.Record]:
        one = self._open[job_id]
        if job is not None and job.waits and job.submit_time in (0.0, one.submitted_at):
            one.count(now)
            one.held, one.seen_at = ours.near(one.partition), now
            one.most = max(one.most, one.held)
            return []
        del self._open[job_id]
        outcome, started_at = _outcome(job, one.submitted_at, now)
        one.count(now if started_at is None else min(now, started_at))
        return [
            rec.OtherUserWaited(
                job_id, one.submitted_at, outcome, started_at, one.most, one.gpu_s, started_at or now
            )
        ]


class _OurGpus:
    """GPUs that we hold on the nodes of a job's partitions."""

    def __init__(self, view: ClusterView, held: Mapping[str, int]) -> None:
        self._parts = {part.name: part.nodes for part in view.partitions}
        self._held, self._found = held, dict[str, int]()

    def near(self, partition: str) -> int:
        """`partition`: a job's, which may name several."""
        if partition not in self._found:
            nodes = frozenset[str]().union(
                *(self._parts.get(name, frozenset()) for name in partition.split(","))
            )
            self._found[partition] = sum(gpus for node, gpus in self._held.items() if node in nodes)
        return self._found[partition]


def _listed(view: ClusterView, job_ids: Set[int]) -> dict[int, Job]:
    """The jobs of these ids; of an array's tasks one that still waits, if any does."""
    found: dict[int, Job] = {}
    for job in view.jobs:
        if job.job_id in job_ids and (job.job_id not in found or job.waits):
            found[job.job_id] = job
    return found


def _eligible_at(job: Job, now: float) -> float:
    """Since when it could have started. Slurm's time may lie ahead (a begin time that comes within the window)."""
    return min(now, job.eligible_time or job.submit_time or now)


def _outcome(job: Job | None, submitted_at: float, now: float) -> tuple[str, float | None]:
    if job is None:
        return "left", None  # from the queue, between two polls
    if job.submit_time not in (0.0, submitted_at):
        return "requeued", None  # it began and was put back: its next wait is another one
    cancelled = (
        job.state is JobState.CANCELLED
    )  # of one that never started both times are when it was cancelled
    if job.start_time > 0 and (not cancelled or job.has_gpus_allocated or job.end_time > job.start_time):
        return "started", min(job.start_time, now)
    return "cancelled" if cancelled else "left", None
