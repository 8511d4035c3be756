"""What backfill plans for waiting jobs, also while it plans anew. Owns the last plans that were seen; knows nothing of what they are for.

Each of backfill's cycles begins by forgetting the starts and nodes of all waiting jobs (Slurm's `_clear_job_estimates`), and finds them
again one by one while it lets others ask. A look in between would see no plan, and a node that is kept would seem free for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scavenger.cluster.model import Job

#: A cycle of backfill takes minutes at most (bf_max_time, by default bf_interval: 30 s); a job without a plan for longer has none.
KEPT_S = 300.0


class Plans:
    """`complete` is told every look."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Job, float]] = {}  # by job id: how it was planned last, and when that was seen

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
