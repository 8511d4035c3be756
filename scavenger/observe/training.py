"""What has become of the training jobs of open runs, from one poll of the queue to the next. Pure.

Owns the judgement and the words. A run tells its job's id when its trainer opens it; that the job ended is Slurm's word
alone: a job that was never seen in the queue, is another user's than the run's, or is of a trainer that still calls,
is not judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from scavenger.cluster.model import Job, JobFlag, JobState

#: Slurm's times have whole seconds, and a call of the trainer's may be on its way: later ones are of
#: another job.
HEARD_S = 3.0
_LIVE = (JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED)


@dataclass(frozen=True, slots=True)
class UnclosedRun:
    """A run that is not closed. `heard_at`: when its trainer last called (Unix seconds).

    `job_id` 0: of no Slurm job. `user`: as whom its owner's jobs run.
    """

    name: str
    job_id: int
    heard_at: float
    user: str


class TrainingJob(msgspec.Struct, frozen=True):
    """For the status. `state`: Slurm's word, with restarts.

    `ended`: how it ended while its run is open, "" = it has not.
    """

    run: str
    job_id: int
    state: str
    ended: str = ""


class TrainingJobs:
    """The last judgement is `found`."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, int]] = set()
        self.found: tuple[TrainingJob, ...] = ()

    def observe(self, runs: Iterable[UnclosedRun], jobs: Sequence[Job]) -> tuple[TrainingJob, ...]:
        """One poll. Those whose end is news."""
        reported = {(one.run, one.job_id) for one in self.found if one.ended}
        by_id = {job.job_id: job for job in jobs}
        chosen = sorted((run for run in runs if run.job_id), key=lambda run: run.name)
        self._seen &= {(run.name, run.job_id) for run in chosen}
        judged = [self._judge(run, by_id.get(run.job_id)) for run in chosen if self._is_own(run, by_id)]
        self.found = tuple(one for one in judged if one is not None)
        return tuple(one for one in self.found if one.ended and (one.run, one.job_id) not in reported)

    @staticmethod
    def _is_own(run: UnclosedRun, by_id: Mapping[int, Job]) -> bool:
        """A run may name any number: of other users' jobs it learns nothing."""
        job = by_id.get(run.job_id)
        return job is None or job.user == run.user

    def _judge(self, run: UnclosedRun, job: Job | None) -> TrainingJob | None:
        key = (run.name, run.job_id)
        if job is None:
            return TrainingJob(*key, "gone", "is not in the queue any more") if key in self._seen else None
        if job.state not in _LIVE and run.heard_at > job.end_time + HEARD_S:
            return None  # the trainer called after that: the number is another cluster's, or an older job's
        self._seen.add(key)
        if job.state in _LIVE:
            restarts = f", restart {job.restart_count}" if job.restart_count else ""
            return TrainingJob(
                *key, f"{JobFlag.COMPLETING if JobFlag.COMPLETING in job.flags else job.state}{restarts}"
            )
        return TrainingJob(
            *key, str(job.state), f"ended as {job.state}, exit code {job.exit_code}, and its run is open"
        )
