"""Which other users' jobs wait while we hold GPUs where they could run, from one poll to the next. Pure.

    waits    another user's job waits for GPUs (`waiting_jobs`) of nodes that are the harvest partition's, or of which we hold some: one row
             of the ledger begins, with how many are ours there, 0 for a wait without us
    meanwhile  between two polls what we held at the first counts, for `MOST_UNSEEN_S` at most
    over     the job waits no more: Slurm's start time, or what else became of it. One that is held by then, or waits for a dependency, a
             begin time or its array's own limit (`held`), waits for no GPU; when it does again, that is another wait, from then on

Jobs of the daemon's own Unix user and engines of other harvesters are no other users' jobs.
It holds no job at fault: one that waits may wait for more than we hold. At most `MOST` waits beside us are open at once, those that could
start first, and `MOST_WITHOUT` without us. Owns the arithmetic; `harvester` gives each whole view.

Boundary: what is recorded of others, apart from what is decided for them (`decide/other_users`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from scavenger.cluster.model import ClusterView, Job, JobState
from scavenger.harvest.decide.other_users import is_harvested
from scavenger.ledger import records as rec

#: Waits that are followed at once: one user's ten thousand jobs are as many rows otherwise.
MOST, MOST_WITHOUT = 1000, 500
#: As in the reports `other_users_waiting` and `idle_gpu_hours`: time between polls that is too long is not counted.
MOST_UNSEEN_S = 300.0


@dataclass(slots=True)
class _Open:
    submitted_at: float
    eligible_at: float
    partition: str
    held: int  # by us, at the last poll
    seen_at: float  # the last poll that saw it wait
    most: int = 0
    gpu_s: float = 0.0

    def count(self, until: float) -> None:
        self.gpu_s += self.held * min(MOST_UNSEEN_S, max(0.0, until - self.seen_at))


class OtherUsersWaits:
    """See the module. `user`: the daemon's. `restore` before the first `observe`: what was held before a restart is not known, and not
    counted."""

    def __init__(self, user: str) -> None:
        self._user = user
        self._open: dict[int, _Open] = {}  # by job id; the waiting tasks of an array all have the array's
        self._idle: dict[int, float] = {}  # pending jobs -> the last poll at which none of it waited for GPUs

    def restore(self, waits: Sequence[rec.OtherUserWaits], now: float) -> None:
        self._open = {
            one.job_id: _Open(one.submitted_at, one.eligible_at, one.partition, 0, now, one.harvested_gpus)
            for one in waits
        }

    def observe(
        self,
        view: ClusterView,
        waiting: Sequence[Job],
        held: Mapping[str, int],
        now: float,
        harvested: frozenset[str] = frozenset(),
    ) -> tuple[rec.Record, ...]:
        """One whole poll. `waiting`: jobs, not the daemon's, that wait for GPUs; `held`: GPUs that are ours, by node; `harvested`: nodes of
        the harvest partition."""
        ours = _OurGpus(view, held, harvested)
        others = [job for job in waiting if job.user != self._user and not is_harvested(job)]
        records: list[rec.Record] = []
        if self._open:
            listed, wanting = _listed(view.jobs, self._open.keys()), _listed(others, self._open.keys())
            for job_id in sorted(self._open):
                records += self._follow(job_id, listed[job_id], wanting[job_id], ours, now)
        new = [job for job in others if job.job_id not in self._open and ours.shared(job.partition)]
        beside = sum(one.most > 0 for one in self._open.values())
        room = {True: MOST - beside, False: MOST_WITHOUT - (len(self._open) - beside)}
        for job in sorted(new, key=lambda job: (self._eligible_at(job, now), job.job_id)):
            with_us = ours.near(job.partition) > 0
            if room[with_us] <= 0 or job.job_id in self._open:
                continue  # or another task of the same array
            room[with_us] -= 1
            submitted_at, near = job.submit_time or now, ours.near(job.partition)
            eligible_at = max(submitted_at, self._eligible_at(job, now))
            self._open[job.job_id] = _Open(submitted_at, eligible_at, job.partition, near, now, near)
            records.append(
                rec.OtherUserWaits(
                    job.job_id,
                    job.user,
                    job.partition,
                    job.gpus,
                    submitted_at,
                    eligible_at,
                    now,
                    harvested_gpus=near,
                )
            )
        self._note_idle(view, waiting, now)
        return tuple(records)

    def _follow(
        self, job_id: int, listed: Sequence[Job], wanting: Sequence[Job], ours: _OurGpus, now: float
    ) -> list[rec.Record]:
        """`listed`: the job, or the tasks of the array; `wanting`: those of them that wait for GPUs."""
        one = self._open[job_id]
        if any(job.submit_time in (0.0, one.submitted_at) for job in wanting):
            one.count(now)
            one.held, one.seen_at = ours.near(one.partition), now
            one.most = max(one.most, one.held)
            return []
        del self._open[job_id]
        outcome, started_at = _outcome(listed, one, now)
        one.count(now if started_at is None else min(now, started_at))
        return [
            rec.OtherUserWaited(
                job_id, one.submitted_at, outcome, started_at, one.most, one.gpu_s, started_at or now
            )
        ]

    def _note_idle(self, view: ClusterView, waiting: Sequence[Job], now: float) -> None:
        """Slurm's eligible time does not move when a hold or an array's limit ends; the last poll that saw it is the nearest we know."""
        pending = {job.job_id for job in view.jobs if job.waits and job.gpus > 0}
        idle = pending - {job.job_id for job in waiting}
        self._idle = {
            job_id: now if job_id in idle else self._idle[job_id]
            for job_id in pending & (idle | self._idle.keys())
        }

    def _eligible_at(self, job: Job, now: float) -> float:
        """Since when it waits for GPUs. Slurm's time may lie ahead (a begin time that comes within the window)."""
        return max(self._idle.get(job.job_id, 0.0), min(now, job.eligible_time or job.submit_time or now))


def unseen(waits: Iterable[rec.OtherUserWaits], now: float) -> tuple[rec.Record, ...]:
    """The ends of those that a daemon without a harvester takes over: it polls no queue, and would never see them end."""
    return tuple(
        rec.OtherUserWaited(one.job_id, one.submitted_at, "unseen", None, one.harvested_gpus, 0.0, now)
        for one in waits
    )


class _OurGpus:
    """GPUs that we hold, or might, on the nodes of a job's partitions."""

    def __init__(self, view: ClusterView, held: Mapping[str, int], harvested: frozenset[str]) -> None:
        self._parts = {part.name: part.nodes for part in view.partitions}
        self._held, self._found = held, dict[str, int]()
        self._harvested, self._inside = harvested, dict[str, bool]()

    def shared(self, partition: str) -> bool:
        """Whether we hold GPUs there, or it has nodes of the harvest partition."""
        if partition not in self._inside:
            parts = (self._parts.get(name, frozenset()) for name in partition.split(","))
            self._inside[partition] = not all(map(self._harvested.isdisjoint, parts))
        return self._inside[partition] or self.near(partition) > 0

    def near(self, partition: str) -> int:
        """`partition`: a job's, which may name several."""
        if partition not in self._found:
            nodes = frozenset[str]().union(
                *(self._parts.get(name, frozenset()) for name in partition.split(","))
            )
            self._found[partition] = sum(gpus for node, gpus in self._held.items() if node in nodes)
        return self._found[partition]


def _listed(jobs: Iterable[Job], job_ids: Set[int]) -> defaultdict[int, list[Job]]:
    """The jobs of these ids: several where they are an array's tasks."""
    found: defaultdict[int, list[Job]] = defaultdict(list)
    for job in jobs:
        if job.job_id in job_ids:
            found[job.job_id].append(job)
    return found


def _outcome(listed: Sequence[Job], one: _Open, now: float) -> tuple[str, float | None]:
    """Of a job none of whose tasks waits for GPUs any more. A task that began before this wait of its array did not end it."""
    if not listed:
        return "left", None  # from the queue, between two polls
    tasks = [job for job in listed if job.submit_time in (0.0, one.submitted_at)]
    if not tasks:
        return "requeued", None  # it began and was put back: its next wait is another one
    pending = any(job.waits for job in tasks)
    began = [job.start_time for job in tasks if not job.waits and _began(job)]
    if began and (not pending or max(began) >= one.eligible_at):
        return "started", min(max(began), now)
    if pending:
        return "held", None
    return "cancelled" if any(job.state is JobState.CANCELLED for job in tasks) else "left", None


def _began(job: Job) -> bool:
    """Of one that was cancelled before it began, both times are when it was cancelled."""
    cancelled = job.state is JobState.CANCELLED
    return job.start_time > 0 and (not cancelled or job.has_gpus_allocated or job.end_time > job.start_time)
