"""Which of our waiting jobs keep their place in the queue. Pure.

    waits for a node that will not come soon, and there may be room elsewhere   moves: cancelled once a fresh one can start now
    waits for a node that Slurm keeps for others who come before its limit ends   the same: a shorter one may start there
    would start on GPUs that are not worth a start (`gates`)                    leaves anyway: Slurm starts it the moment that others leave
    else                                                                        stays, and what it will take is set aside

A preempted job comes back to the place that it had. That saves a look and a submission where its node is soon free for long, and wastes a
start where it is free for a moment only: which of the two, the gate knows, and a job that waits is weighed as a fresh one is.

Owns these rules. Knows nothing of what is submitted instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from scavenger.cluster.model import ClusterView, Job, Node
from scavenger.harvest.actions import Limits, OurJob
from scavenger.harvest.gates import Gates
from scavenger.harvest.others import Census
from scavenger.harvest.room import Room, waits_for
from scavenger.router.machine import Demand

#: A job that waits this many times `fresh_after_s` for a node that looks free is held back by what we do not see.
STUCK = 4.0
#: What replaces one that was too long for its node ends so many times earlier as that one waited: backfill may take that long to test it,
#: and may count in longer steps (bf_resolution). Each exchange thus waits longer than the one before, until Slurm starts one.
EARLIER = 2.0


@dataclass(frozen=True, slots=True)
class Move:
    """A waiting job that does not keep its place. `anyway`: it is cancelled whether a fresh one can start elsewhere or not."""

    job: OurJob
    why: str
    anyway: bool = False
    ready: bool = False  # nothing but room is waited for: it could start elsewhere as it is
    spare_s: float = 0.0  # what replaces it ends so long before others are expected, as far as it is worth a start then


def not_worth(
    view: ClusterView, counted: Census, demand: Sequence[Demand], serving: Sequence[OurJob], limits: Limits, now: float, gates: Gates
) -> list[Move]:
    """Our waiting jobs that would start on GPUs that are not worth it. Each of those that stay has settled GPUs of its own."""
    waiting = [job for job in serving if job.waits and _movable(job)]
    part = view.partition(limits.partition)
    if not gates.weigh or not waiting or part is None:
        return []
    nodes = {node.name: node for node in view.nodes if node.name in part.nodes}
    by_run = {want.run_id: want for want in demand}
    spoken: Counter[str] = Counter()
    found = []
    for job in sorted(waiting, key=_order):
        pinned = waits_for(job, limits)
        begins_at = now + max(0.0, _begins_in(counted.ours.get(job.job_id), now))
        where = [nodes[name] for name in ((pinned,) if pinned else nodes) if name in nodes]
        why = _too_soon(by_run[job.run_id], job, where, begins_at, gates, spoken)
        if why:
            found.append(Move(job, f"it would start on {pinned or 'whichever node'} at the first moment, and {why}", anyway=True))
    return found


def _too_soon(want: Demand, job: OurJob, nodes: Sequence[Node], begins_at: float, gates: Gates, spoken: Counter[str]) -> str:
    """Why none of these nodes is worth its start; "" where one is, whose GPUs are then spoken for, or where nobody can tell."""
    why = ""
    for node in nodes:
        why = gates.too_soon(want, node, spoken[node.name] + job.gpus, begins_at)
        if not why:
            spoken[node.name] += job.gpus
            return ""
    return why


def wait_or_move(
    counted: Census, room: Room, serving: Sequence[OurJob], ours: Sequence[OurJob], unworthy: Sequence[Move], limits: Limits, now: float
) -> list[Move]:
    """Set aside what our waiting jobs will take; return those that will not start soon where they wait. `unworthy` ones take nothing.

    A job that is to begin later (a requeued one, Slurm's delay is 121 s by default), or whose node was taken, holds no idle GPU.
    """
    free_to_move = {job.intent_id for job in serving}
    leaving = {move.job.intent_id for move in unworthy}
    found = []
    for job in sorted((job for job in ours if job.waits and job.intent_id not in leaving), key=_order):
        listed = counted.ours.get(job.job_id)
        begins_s = _begins_in(listed, now)
        movable = job.intent_id in free_to_move and _movable(job)
        if begins_s > limits.fresh_after_s:
            if movable:
                found.append(Move(job, f"it may begin in {begins_s:.0f} s"))
            continue
        pinned = waits_for(job, limits)
        if pinned and not room.fits(pinned, job.gpus):
            if movable and begins_s <= 0 and now - job.since >= limits.fresh_after_s:
                found.append(Move(job, f"it has waited for {pinned} for {now - job.since:.0f} s", ready=True))
            continue
        if movable and begins_s <= 0 and now - job.since >= limits.fresh_after_s and (late := _too_long(listed, pinned, room, now)):
            found.append(Move(job, late, spare_s=EARLIER * (now - job.since)))
            continue
        room.keep(pinned, job.gpus)
        if limits.pin and movable and begins_s <= 0 and now - job.since >= STUCK * limits.fresh_after_s:
            found.append(Move(job, _stuck(job, listed, pinned, now)))
            room.spaces.pop(pinned, None)  # Slurm knows why; another node is taken, or none
    return found


def _too_long(listed: Job | None, pinned: str, room: Room, now: float) -> str:
    """Why Slurm does not start it on a node with room; "" where its time limit is none."""
    until = room.until.get(pinned, float("inf"))
    if listed is None or now + listed.time_limit_s <= until:
        return ""
    return f"its limit is {listed.time_limit_s / 60:.0f} min, and {pinned} is kept for others who are expected in {(until - now) / 60:.0f}"


def _stuck(job: OurJob, listed: Job | None, pinned: str, now: float) -> str:
    said = f" ({listed.reason})" if listed is not None and listed.reason else ""
    where = f"{pinned} has room, and" if pinned else "it waits for a node that a daemon before this one chose, and"
    return f"{where} Slurm has not started it there for {now - job.since:.0f} s{said}"


def _order(job: OurJob) -> tuple[int, str]:
    return (-job.gpus, job.intent_id)


def _movable(job: OurJob) -> bool:
    """It is known to be in the queue, and Slurm does not hold it: a held one is cancelled by another rule."""
    return not job.held and job.job_id > 0


def _begins_in(listed: Job | None, now: float) -> float:
    """In how many seconds Slurm lets it begin; 0 where nothing but room is waited for.

    Slurm says by its own clock that a job is to begin later; ours may be minutes behind, and then every fresh job would look like it.
    """
    later = listed is not None and listed.waits and listed.reason.startswith("BeginTime")
    return listed.eligible_time - now if listed is not None and later else 0.0
