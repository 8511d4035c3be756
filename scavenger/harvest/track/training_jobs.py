"""The GPUs of runs' own training jobs, as the queue shows them: what a run costs beside what is harvested. Pure.

A run tells its job's id when its trainer opens it; GPUs and times are Slurm's. The id is the trainer's word: a job that is not of the
Unix user of the run's owner counts for nothing, and nothing of it is recorded. A job is followed until it holds nothing any more, also
when its run has ended before. One that vanished between two polls ended when it was first missed. Several runs may name one job: each
gets a row, from the same time on, and the report `run_cost` divides.

Boundary: GPUs of runs' own jobs, apart from those that are harvested.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scavenger.cluster.model import Job
from scavenger.ledger import records as rec


class TrainingGpus:
    """`restore` before the first `observe`."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], float] = {}  # (run, job) -> since when

    def restore(self, jobs: Iterable[rec.TrainingJobStarted]) -> None:
        self._held = {(one.run_id, one.job_id): one.at for one in jobs}

    def observe(
        self, runs: Iterable[tuple[int, int, str]], jobs: Sequence[Job], now: float
    ) -> tuple[rec.Record, ...]:
        """One poll. `runs`: (run id, job id, Unix user of its owner; "" = not known) of the open runs that are of a Slurm job."""
        asked = {(run_id, job_id): user for run_id, job_id, user in runs if job_id and user}
        if not asked and not self._held:
            return ()
        keys = sorted(asked.keys() | self._held.keys())
        wanted = {job_id for _, job_id in keys}
        found = {job.job_id: job for job in jobs if job.job_id in wanted}
        records: list[rec.Record] = []
        for key in keys:
            run_id, job_id = key
            job, since = found.get(job_id), self._held.get(key)
            here = job is not None and job.has_gpus_allocated
            if since is not None and (job is None or not here or job.start_time > since + 1.0):
                records.append(rec.TrainingJobEnded(run_id, job_id, _end(job, since, now)))
                del self._held[key]
                since = None
            if job is not None and here and since is None and job.user == asked.get(key):
                self._held[key] = started_at = self._since(job, now)
                records.append(
                    rec.TrainingJobStarted(
                        run_id, job_id, job.user, job.n_nodes, job.gpus, started_at, job.account
                    )
                )
        return tuple(records)

    def _since(self, job: Job, now: float) -> float:
        """Of one life of a job it is the same for all runs that name it."""
        began = min(now, job.start_time or now)
        known = [since for (_, job_id), since in self._held.items() if job_id == job.job_id]
        return max((since for since in known if job.start_time <= since + 1.0), default=began)


def unseen(jobs: Iterable[rec.TrainingJobStarted], now: float) -> tuple[rec.Record, ...]:
    """The ends of those that a daemon without a harvester takes over: it polls no queue, and would never see them end."""
    return tuple(rec.TrainingJobEnded(one.run_id, one.job_id, now) for one in jobs)


def _end(job: Job | None, since: float, now: float) -> float:
    """Of a requeued job `submit_time` is when its GPUs were free; of one that began again, not before that."""
    if job is None:
        return now
    at = job.submit_time if job.waits or job.has_gpus_allocated else job.end_time
    return min(now, at) if at >= since else now
