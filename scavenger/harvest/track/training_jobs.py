"""The GPUs of runs' own training jobs, as the queue shows them: what a run costs beside what is harvested. Pure.

A run tells its job's id when its trainer opens it; GPUs and times are Slurm's. A job is followed until it holds nothing any more, also
when its run has ended before. One that vanished between two polls ended when it was first missed.

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
        self, runs: Iterable[tuple[int, int]], jobs: Sequence[Job], now: float
    ) -> tuple[rec.Record, ...]:
        """One poll. `runs`: (run id, job id) of the open runs that are of a Slurm job."""
        asked = {(run_id, job_id) for run_id, job_id in runs if job_id}
        if not asked and not self._held:
            return ()
        wanted = {job_id for _, job_id in asked | self._held.keys()}
        found = {job.job_id: job for job in jobs if job.job_id in wanted}
        records: list[rec.Record] = []
        for key in sorted(asked | self._held.keys()):
            run_id, job_id = key
            job, since = found.get(job_id), self._held.get(key)
            here = job is not None and job.has_gpus_allocated
            if since is not None and (job is None or not here or job.start_time > since + 1.0):
                records.append(rec.TrainingJobEnded(run_id, job_id, _end(job, since, now)))
                del self._held[key]
                since = None
            if job is not None and here and since is None:
                self._held[key] = started_at = min(now, job.start_time or now)
                records.append(
                    rec.TrainingJobStarted(run_id, job_id, job.user, job.n_nodes, job.gpus, started_at)
                )
        return tuple(records)


def _end(job: Job | None, since: float, now: float) -> float:
    """Of a requeued job `submit_time` is when its GPUs were free; of one that began again, not before that."""
    if job is None:
        return now
    at = job.submit_time if job.waits or job.has_gpus_allocated else job.end_time
    return min(now, at) if at >= since else now
