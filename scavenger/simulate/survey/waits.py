"""How much longer other users wait because an engine is where their job starts: bounds from Slurm's own settings. Pure arithmetic.

Owns the formulas and how many jobs they apply to. They are bounds, not averages: on a private Slurm the longest wait seen was far below.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scavenger.cluster.preemption_notice import notice
from scavenger.simulate.fleet import Occupation
from scavenger.simulate.survey.engines import SurveyedEngine

#: What a notified engine and Slurm take at most beyond GraceTime: flush and exit, `scontrol requeue`, epilog, the next job's start.
JOB_END_S = 5.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Slurm's settings, by its names. The defaults are slurm.conf's own (0, 30 and 10 s)."""

    grace_s: float = 0.0
    kill_wait_s: float = 30.0
    message_timeout_s: float = 10.0

    def preemption_s(self) -> float:
        """A job that preempts an engine which leaves when it is told to starts within `GraceTime + 5 s`.

        It normally starts as soon as the engine is gone, under a second; GraceTime is when Slurm would no longer wait for it.
        """
        return self.grace_s + JOB_END_S

    def hung_s(self) -> float:
        """A job that preempts an engine which hangs has its GPUs within this (`scavenger doctor` says the same)."""
        return notice(self.grace_s, self.kill_wait_s, self.message_timeout_s).most_s


@dataclass(frozen=True, slots=True)
class Delayed:
    """Others' jobs that found engines on their GPUs: how many, of how many that started.

    `usual_*`: how long such jobs wait anyway (s, submission to start); None where the source does not say.
    """

    jobs: int
    of_jobs: int
    usual_mean_s: float | None
    usual_p50_s: float | None


def delayed(
    jobs: Sequence[Occupation], engines: Iterable[SurveyedEngine], waits_s: Sequence[float], notice_s: float
) -> Delayed:
    """Count the jobs that start on a node in the instant in which it loses an engine. An engine younger than `notice_s` was never started.

    `waits_s`: what the jobs that started in the period waited, in any order.
    """
    starts: dict[tuple[float, str], list[int]] = defaultdict(list)
    for index, job in enumerate(jobs):
        for node, _ in job.gpus_by_node:
            starts[(job.start_s, node)].append(index)
    hit = set()
    for engine in engines:
        if engine.lost and engine.length_s > notice_s:
            hit.update(starts[(engine.end_s, engine.node)])
    ordered = sorted(waits_s)
    started = sum(job.start_s > 0 for job in jobs)
    if not ordered:
        return Delayed(len(hit), started, None, None)
    return Delayed(len(hit), started, sum(ordered) / len(ordered), ordered[len(ordered) // 2])
