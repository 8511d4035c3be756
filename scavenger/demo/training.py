"""What the demo makes of its training job, poll by poll: whether it goes on, is done, or has failed, and in which words.

Owns that decision and the limits on it. Pure: the queue, the run's state in the ledger and `now` (monotonic seconds) are inputs. Knows
neither the display nor how a queue is read.

Boundary: what one poll of the training job means; no IO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scavenger.cluster.model import Job, JobFlag, JobState

#: A job that ended is reported within 10 s: each limit below leaves time for a slow poll.
COMPLETING_S = 8.0
#: `sbatch` may have replied before the queue shows the job, and the ledger may lag a job that has just ended.
ABSENT_S = 4.0
UNFINISHED_S = 3.0
#: A queue that gives no answer for so long will give none: the job's end would not be seen. One whose reply
#: makes no
#: sense (another release of Slurm) goes on replying so.
SILENT_S, MALFORMED_S = 60.0, 8.0
LIVE = (JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED)
TAIL_LINES = 20


@dataclass(frozen=True, slots=True)
class DemoProgress:
    """`failed`: why the demo ends without its run, "" while it need not.

    `phase`: what the training job is at, for the display.
    """

    done: bool = False
    failed: str = ""
    phase: str = ""


class Training:
    """Follows one training job from poll to poll."""

    def __init__(self, job_id: int) -> None:
        self.job_id = job_id
        self._odd: tuple[str, float, int] = (
            "",
            0.0,
            0,
        )  # what is not as it should be, since when, in how many polls running

    def observe(self, jobs: Sequence[Job], run_state: str, now: float) -> DemoProgress:
        """`jobs`: the whole queue, finished jobs as long as it lists them.

        `run_state`: the ledger's word, "" where it has none yet.
        """
        job = next((job for job in jobs if job.job_id == self.job_id), None)
        if job is None:
            return self._lasts(
                "absent", ABSENT_S, now, f"training job {self.job_id} is not in the queue any more"
            )
        if job.state not in LIVE:
            return self._ended(job, run_state, now)
        if JobFlag.COMPLETING in job.flags:
            return self._lasts(
                "completing", COMPLETING_S, now, f"training job {job.job_id} is being ended (COMPLETING)"
            )
        self._odd = ("", 0.0, 0)
        if job.state is JobState.PENDING and "held" in job.reason.lower():
            return DemoProgress(failed=f"training job {job.job_id} will not start: it is held ({job.reason})")
        if job.state is JobState.PENDING and job.restart_count:
            return DemoProgress(
                phase=f"the training job was requeued (restart {job.restart_count}) and waits"
            )
        if job.state is JobState.PENDING:
            return DemoProgress(phase="the training job waits" + (f": {job.reason}" if job.reason else ""))
        return DemoProgress()

    def unreadable(self, why: str, now: float, *, malformed: bool = False) -> DemoProgress:
        """The queue could not be read: nothing is known of the job.

        `malformed`: it replied, and that makes no sense.
        """
        limit_s = MALFORMED_S if malformed else SILENT_S
        words = f"the queue could not be read for {limit_s:.0f} s: {why}"
        seen = self._lasts("unreadable", limit_s, now, words)
        return DemoProgress(failed=seen.failed, phase=f"the queue cannot be read: {why}")

    def _ended(self, job: Job, run_state: str, now: float) -> DemoProgress:
        if job.state is JobState.COMPLETED and run_state == "finished":
            return DemoProgress(done=True)
        why = f"training job {job.job_id} ended as {job.state}, exit code {job.exit_code}, before its run was finished"
        if job.state is JobState.COMPLETED:
            return self._lasts(
                "unfinished", UNFINISHED_S, now, f"{why} (the ledger says {run_state or 'nothing'})"
            )
        return DemoProgress(failed=why)

    def _lasts(self, what: str, limit_s: float, now: float, words: str) -> DemoProgress:
        """Failed once `what` was so for longer than `limit_s`, in more than one poll."""
        before, since, polls = self._odd
        since, polls = (since, polls + 1) if before == what else (now, 1)
        self._odd = (what, since, polls)
        return (
            DemoProgress(failed=words) if polls > 1 and now - since > limit_s else DemoProgress(phase=words)
        )


def log_tail(text: str) -> str:
    """The last lines of the training job's log, or that it has none. Pure."""
    lines = [line for line in text.splitlines() if line.strip()][-TAIL_LINES:]
    return (
        "\n".join(f"  {line}" for line in lines)
        if lines
        else "  (nothing was written: the batch script did not start)"
    )
