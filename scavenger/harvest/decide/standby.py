"""Jobs that wait in the queue until we say where they begin, so that other users' small jobs do not break up idle nodes. Pure.

Where another user's job needs one GPU and every idle one is harvested, Slurm takes an engine away: of preemptible jobs of the same tier and
number of nodes the one that was submitted first (`slurm_find_preemptable_jobs` sorts by those alone, and equal ones keep the order of the
job list: measured with 22.05). Without us the small job would have gone to the fullest node where it fits. If the oldest job happens to be
an engine on a node that is otherwise idle, the small job goes there, stays for hours, and a job that needs whole nodes waits for it.

So the oldest jobs belong on nodes that other users use too. A job's age cannot be changed, and which node will have a gap is not known when
it is submitted. Hence standby jobs: their start time is far away, and one is released (`scontrol update`) when a node has a gap. Nodes that
are idle whole get fresh jobs. A preempted job keeps its age, so those released go round among such nodes.

Owns how many there are, and which is released. Knows nothing of free capacity.

Which of our waiting jobs keep their place in the queue. Pure.

    waits for a node that will not come soon, and may fit elsewhere             moves: cancelled once a fresh one can start now
    waits for a node that Slurm keeps for a job that comes before its limit ends   the same: a shorter one may start there
    would start on GPUs that are not worth a start (`StartBenefits`)              leaves anyway: Slurm starts it when they come free
    else                                                                          stays, and what it will take is set aside

A preempted job comes back to the place that it had. That saves a poll and a submission where its node is soon free for long, and wastes a
start where it is free for a moment only. The start-benefit check tells the two apart, for a waiting job as for a fresh one.

Owns these rules. Knows nothing of what is submitted instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from scavenger.cluster.model import ClusterView, Job, Node
from scavenger.harvest.decide.actions import CancelPending, HarvestCode, HarvestLimits, OurJob, Submit
from scavenger.harvest.decide.free_capacity import FreeCapacity, StartBenefits, waits_for
from scavenger.harvest.decide.other_users import QueueScan
from scavenger.policy.fleet_size import Demand

#: A job that waits this many times `fresh_after_s` for a node that looks free is held back by what we do not see.
STUCK = 4.0
#: What replaces one that was too long for its node ends so many times earlier as that one waited: backfill may take that long to test it,
#: and may count in longer steps (bf_resolution). Each exchange thus waits longer than the one before, until Slurm starts one.
EARLIER = 2.0


@dataclass(frozen=True, slots=True)
class StandbyMove:
    """A waiting job that does not keep its place. `anyway`: it is cancelled whether a fresh one can start elsewhere or not."""

    job: OurJob
    why: str
    anyway: bool = False
    ready: bool = False  # it waits for free capacity only: it could start elsewhere as it is
    standby_s: float = 0.0  # what replaces it ends so long before other users' jobs are expected, as far as it is worth a start then


def not_beneficial_to(
    view: ClusterView,
    queue: QueueScan,
    demand: Sequence[Demand],
    serving: Sequence[OurJob],
    limits: HarvestLimits,
    now: float,
    start_benefits: StartBenefits,
) -> list[StandbyMove]:
    """Our waiting jobs that would start on GPUs that are not worth it. Each of those that stay has settled GPUs of its own."""
    waiting = [job for job in serving if job.waits and _movable(job)]
    part = view.partition(limits.partition)
    if not start_benefits.weigh or not waiting or part is None:
        return []
    nodes = {node.name: node for node in view.nodes if node.name in part.nodes}
    by_run = {want.run_id: want for want in demand}
    spoken: Counter[str] = Counter()
    found = []
    for job in sorted(waiting, key=_order):
        pinned = waits_for(job, limits)
        begins_at = now + max(0.0, _begins_in(queue.ours.get(job.job_id), now))
        where = [nodes[name] for name in pinned or nodes if name in nodes]
        why = _too_soon(by_run[job.run_id], job, where, begins_at, start_benefits, spoken)
        if why:
            found.append(
                StandbyMove(
                    job,
                    f"it would start on {','.join(pinned) or 'whichever node'} at the first moment, and {why}",
                    anyway=True,
                )
            )
    return found


def _too_soon(
    want: Demand,
    job: OurJob,
    nodes: Sequence[Node],
    begins_at: float,
    start_benefits: StartBenefits,
    spoken: Counter[str],
) -> str:
    """Why none of these nodes is worth its start; "" where one is, of several nodes' as many, whose GPUs are then spoken for, or where it
    is not known."""
    why, worth, each = "", list[str](), job.gpus_on_node
    for node in nodes:
        found = start_benefits.too_soon(want, node, spoken[node.name] + each, begins_at)
        why = found or why
        worth += [] if found else [node.name]
        if len(worth) == job.n_nodes:
            spoken.update(dict.fromkeys(worth, each))
            return ""
    return why


def set_aside_or_move(
    queue: QueueScan,
    free: FreeCapacity,
    serving: Sequence[OurJob],
    ours: Sequence[OurJob],
    not_beneficial: Sequence[StandbyMove],
    limits: HarvestLimits,
    now: float,
) -> list[StandbyMove]:
    """Set aside what our waiting jobs will take; return those that will not start soon where they wait. `not_beneficial` ones take nothing.

    A job that is to begin later (a requeued one, Slurm's delay is 121 s by default), or whose node was taken, holds no idle GPU. It counts
    against the caps all the same: it will start there.
    """
    free_to_move = {job.intent_id for job in serving}
    leaving = {move.job.intent_id for move in not_beneficial}
    found = []
    for job in sorted((job for job in ours if job.waits and job.intent_id not in leaving), key=_order):
        listed, pinned = queue.ours.get(job.job_id), waits_for(job, limits)
        free.promise(pinned, job.gpus)
        begins_s = _begins_in(listed, now)
        movable = job.intent_id in free_to_move and _movable(job)
        if begins_s > limits.placement.fresh_after_s:
            if movable:
                found.append(StandbyMove(job, f"it may begin in {begins_s:.0f} s"))
            continue
        if pinned and not free.fits(pinned, job.gpus, limits.job.cpus, limits.job.memory_mb):
            if movable and begins_s <= 0 and now - job.since >= limits.placement.fresh_after_s:
                found.append(
                    StandbyMove(
                        job, f"it has waited for {','.join(pinned)} for {now - job.since:.0f} s", ready=True
                    )
                )
            continue
        if (
            movable
            and begins_s <= 0
            and now - job.since >= limits.placement.fresh_after_s
            and (late := _too_long(listed, pinned, free, now))
        ):
            found.append(StandbyMove(job, late, standby_s=EARLIER * (now - job.since)))
            continue
        free.keep(pinned, job.gpus)
        if (
            limits.placement.pin
            and movable
            and begins_s <= 0
            and now - job.since >= STUCK * limits.placement.fresh_after_s
        ):
            found.append(StandbyMove(job, _stuck(job, listed, pinned, now)))
            for name in pinned:
                free.resources.pop(name, None)  # Slurm knows why; another node is taken, or none
    return found


def _too_long(listed: Job | None, pinned: Sequence[str], free: FreeCapacity, now: float) -> str:
    """Why Slurm does not start it on nodes where it fits; "" where its time limit is none."""
    until, node = min(
        ((free.until.get(name, float("inf")), name) for name in pinned), default=(float("inf"), "")
    )
    if listed is None or now + listed.time_limit_s <= until:
        return ""
    limit_min, until_min = listed.time_limit_s / 60, (until - now) / 60
    return f"its limit is {limit_min:.0f} min, and {node} is kept for other users' jobs that are expected in {until_min:.0f}"


def _stuck(job: OurJob, listed: Job | None, pinned: Sequence[str], now: float) -> str:
    said = f" ({listed.reason})" if listed is not None and listed.reason else ""
    where = (
        f"{','.join(pinned)} {'have' if len(pinned) > 1 else 'has'} free capacity, and"
        if pinned
        else "it waits for a node that a daemon before this one chose, and"
    )
    return f"{where} Slurm has not started it there for {now - job.since:.0f} s{said}"


def _order(job: OurJob) -> tuple[int, str]:
    return (-job.gpus, job.intent_id)


def _movable(job: OurJob) -> bool:
    """It is known to be in the queue, and Slurm does not hold it: a held one is cancelled by another rule."""
    return not job.held and job.job_id > 0


def _begins_in(listed: Job | None, now: float) -> float:
    """In how many seconds Slurm lets it begin; 0 where it waits for free capacity only.

    Slurm says by its own clock that a job is to begin later; ours may be minutes behind, and then every fresh job would look like it.
    """
    later = listed is not None and listed.waits and listed.reason.startswith("BeginTime")
    return listed.eligible_time - now if listed is not None and later else 0.0


#: A standby job's start time lies so far away. What is to begin in more than a day is one: a requeued job waits for minutes, a standby
#: job for weeks.
BEGIN_S = 30 * 86_400.0
LEAST_S = 86_400.0


def is_standby(job: Job, now: float) -> bool:
    """Whether a job of ours as the queue shows it waits to be released."""
    return job.waits and job.eligible_time - now > LEAST_S


def surplus(
    standby_jobs: Sequence[OurJob],
    wanted: Sequence[Demand],
    closed: tuple[HarvestCode, str] | None,
    limits: HarvestLimits,
) -> list[CancelPending]:
    """Standby jobs that are not needed, the youngest first: of runs that want no engine, or more than there shall be."""
    sizes = {want.run_id: want.gpus_per_engine for want in wanted if want.nodes_per_engine == 1}
    found, kept = [], 0
    for job in sorted(standby_jobs, key=_age):
        if closed:
            found.append(CancelPending(job.intent_id, closed[1], closed[0]))
        elif sizes.get(job.run_id) != job.gpus:
            found.append(
                CancelPending(
                    job.intent_id, f"its run wants no engine of {job.gpus} GPUs", HarvestCode.NO_DEMAND
                )
            )
        elif kept >= limits.placement.standby_jobs or not limits.placement.pin:
            found.append(
                CancelPending(
                    job.intent_id,
                    f"harvest.standby_jobs = {limits.placement.standby_jobs} are there without it",
                    HarvestCode.STANDBY,
                )
            )
        else:
            kept += 1
    return found[::-1]


def more(
    standby_jobs: Sequence[OurJob],
    wanted: Sequence[Demand],
    allotted: Mapping[int, int],
    limits: HarvestLimits,
    share: tuple[int, int] | None,
) -> list[Submit]:
    """What is missing of them, a run after the other. `share`: CPUs and memory of an engine that may begin on any node; None: on none.

    A standby job is released to one node: runs whose engines take several have none.
    """
    runs = [want for want in wanted if allotted[want.run_id] > 0 and want.nodes_per_engine == 1]
    if not (limits.placement.pin and runs) or share is None:
        return []
    missing = min(limits.placement.standby_jobs, sum(allotted[want.run_id] for want in runs)) - len(
        standby_jobs
    )
    return [
        Submit(
            want.run_id,
            want.run,
            limits.partition,
            want.gpus_per_engine,
            f"run {want.run}: to be released where other users leave a gap",
            code=HarvestCode.STANDBY,
            engine=want.engine,
            cpus=share[0],
            memory_mb=share[1],
            standby=True,
            owner=want.owner,
        )
        for want in islice(cycle(runs), max(0, missing))
    ]


class StandbyJobs:
    """Those that may be released by one decision, the oldest first."""

    def __init__(self, jobs: Sequence[OurJob]) -> None:
        self._left = sorted((job for job in jobs if job.job_id and not job.held), key=_age)

    def take(self, want: Demand) -> OurJob | None:
        """The oldest one for an engine of this run; it is not given again."""
        job = next(
            (
                job
                for job in self._left
                if job.run_id == want.run_id and (job.gpus, 1) == (want.gpus, want.nodes_per_engine)
            ),
            None,
        )
        if job is not None:
            self._left.remove(job)
        return job


def _age(job: OurJob) -> tuple[bool, int, str]:
    return (job.job_id == 0, job.job_id, job.intent_id)
