"""Jobs that wait in the queue until we say where they begin, so that others' small jobs do not break up nodes that are idle whole. Pure.

Where a job of others needs one GPU and every idle one is harvested, Slurm takes an engine away: of preemptible jobs of the same tier and
number of nodes the one that was submitted first (`slurm_find_preemptable_jobs` sorts by those alone, and equal ones keep the order of the
job list: measured with 22.05). Without us the small job would have gone to the fullest node that has room. If the oldest job happens to be
an engine on a node that is otherwise idle, the small job goes there, stays for hours, and whoever waits for whole nodes waits for it.

So the oldest jobs belong on nodes that others use too. A job's age cannot be changed, and which node will have a gap is not known when it
is submitted: hence jobs with a start time far away, released to a node with a gap (`scontrol update`) when there is one, while nodes that
are idle whole get fresh ones. A preempted job keeps its age, so those released go round among such nodes.

Owns how many there are, and which is released. Knows nothing of room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice

from scavenger.cluster.model import Job
from scavenger.harvest.actions import CancelPending, Code, Limits, OurJob, Submit
from scavenger.router.machine import Demand

#: A spare's start time lies so far away. What is to begin in more than a day is one: a requeued job waits for minutes, a spare for weeks.
BEGIN_S = 30 * 86_400.0
LEAST_S = 86_400.0


def is_spare(job: Job, now: float) -> bool:
    """Whether a job of ours as the queue shows it waits to be released."""
    return job.waits and job.eligible_time - now > LEAST_S


def surplus(spares: Sequence[OurJob], wanted: Sequence[Demand], closed: tuple[Code, str] | None, limits: Limits) -> list[CancelPending]:
    """Spares that nobody needs, the youngest first: of runs that want no engine, or more than there shall be."""
    sizes = {want.run_id: want.gpus_per_engine for want in wanted}
    found, kept = [], 0
    for job in sorted(spares, key=_age):
        if closed:
            found.append(CancelPending(job.intent_id, closed[1], closed[0]))
        elif sizes.get(job.run_id) != job.gpus:
            found.append(CancelPending(job.intent_id, f"its run wants no engine of {job.gpus} GPUs", Code.NO_DEMAND))
        elif kept >= limits.spares or not limits.pin:
            found.append(CancelPending(job.intent_id, f"harvest.spares = {limits.spares} are there without it", Code.SPARE))
        else:
            kept += 1
    return found[::-1]


def more(
    spares: Sequence[OurJob], wanted: Sequence[Demand], allotted: Mapping[int, int], limits: Limits, share: tuple[int, int] | None
) -> list[Submit]:
    """What is missing of them, a run after the other. `share`: CPUs and memory of an engine that may begin on any node; None: on none."""
    runs = [want for want in wanted if allotted[want.run_id] > 0]
    if not (limits.pin and runs) or share is None:
        return []
    missing = min(limits.spares, sum(allotted.values())) - len(spares)
    return [
        Submit(
            want.run_id, want.run, limits.partition, want.gpus_per_engine, f"run {want.run}: to be released where others leave a gap",
            code=Code.SPARE, engine=want.engine, cpus=share[0], memory_mb=share[1], spare=True,
        )
        for want in islice(cycle(runs), max(0, missing))
    ]  # fmt: skip


class Spares:
    """Those that may be released by one decision, the oldest first."""

    def __init__(self, jobs: Sequence[OurJob]) -> None:
        self._left = sorted((job for job in jobs if job.job_id and not job.held), key=_age)

    def take(self, want: Demand) -> OurJob | None:
        """The oldest one for an engine of this run; it is not given again."""
        job = next((job for job in self._left if job.run_id == want.run_id and job.gpus == want.gpus_per_engine), None)
        if job is not None:
            self._left.remove(job)
        return job


def _age(job: OurJob) -> tuple[bool, int, str]:
    return (job.job_id == 0, job.job_id, job.intent_id)
