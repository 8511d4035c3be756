"""Which of our engines leave before Slurm preempts them. Pure.

Their time limit comes, a reservation begins on their node, the node is taken out of service or drained for engines alone, or other users'
jobs wait that would start if they were gone. And which jobs are asked again: asked to leave and still there, or held by Slurm.

Owns these reasons. Knows nothing of demand: what no demand covers leaves by the policy's own rule.
"""

from __future__ import annotations

from collections.abc import Sequence

from scavenger.cluster.model import ClusterView
from scavenger.harvest.decide.actions import (
    BlackoutTime,
    Cancel,
    CancelPending,
    DrainAllocated,
    DrainKind,
    HarvestCode,
    HarvestLimits,
    OurJob,
)
from scavenger.harvest.decide.free_capacity import begins
from scavenger.harvest.decide.other_users import NodeCapacity, QueueScan, preempted_already
from scavenger.harvest.decide.voluntary_preemption import drains_for_other_users

Drain = CancelPending | DrainAllocated | Cancel
#: Slurm's words for a node that its admin takes out of service while jobs still run there.
_OUT = frozenset({"drain", "drained", "draining", "maint", "reserved", "reboot_requested"})
#: An engine that changes hands and has not registered for its run after this is ended: its GPUs serve nobody.
HANDS_S = 120.0
#: When nothing begins on a node, and on which.
_NEVER = (float("inf"), "")


def cancel_overdue(jobs: Sequence[OurJob], limits: HarvestLimits, now: float) -> list[Drain]:
    """Jobs that were asked to leave and are still here, or here again, and jobs that Slurm holds: they would wait for ever."""
    actions: list[Drain] = []
    for job in jobs:
        if not job.job_id:
            continue  # nothing to name to Slurm yet
        if job.returned:
            actions.append(
                CancelPending(job.intent_id, job.returned, HarvestCode.REQUEUED)
                if job.waits
                else Cancel(job.intent_id, job.returned, HarvestCode.REQUEUED)
            )
            continue
        if job.drain_kind is DrainKind.NO:
            if not job.waits and job.changing_since and now - job.changing_since >= HANDS_S:
                late = (
                    f"it was to change hands, and has not registered after {now - job.changing_since:.0f} s"
                )
                actions.append(Cancel(job.intent_id, late, HarvestCode.OVERDUE))
            if job.waits and job.held:
                actions.append(CancelPending(job.intent_id, f"Slurm holds it: {job.held}", HarvestCode.HELD))
        elif job.drain_kind is DrainKind.DRAINING and job.waits:
            actions.append(
                CancelPending(
                    job.intent_id, "it was given back and is in the queue again", HarvestCode.REQUEUED
                )
            )
        elif now >= must_end_by(job, limits):
            late = f"it was {job.drain_kind} and is still there after {now - job.asked_at:.0f} s"
            actions.append(Cancel(job.intent_id, late, HarvestCode.OVERDUE))
        elif (
            job.drain_kind is DrainKind.DRAINING and limits.restrictions.stop and limits.restrictions.stop_now
        ):
            actions.append(Cancel(job.intent_id, limits.restrictions.stop, HarvestCode.STOPPED))
    return actions


def must_end_by(job: OurJob, limits: HarvestLimits) -> float:
    """When a job that was asked to leave is cancelled (Unix s)."""
    wait_s = (
        min(limits.drain_notice_s, limits.yielding.same_tier_s)
        if job.why_draining in (HarvestCode.SAME_TIER_JOB, HarvestCode.QOS)
        else limits.drain_notice_s
    )
    return job.asked_at + wait_s


def asked_to_drain(
    view: ClusterView,
    queue: QueueScan,
    capacity: NodeCapacity,
    jobs: Sequence[OurJob],
    staying: Sequence[OurJob],
    limits: HarvestLimits,
    now: float,
) -> list[Drain]:
    """What leaves of `staying`: what Slurm would end anyway first, and for other users only what is still needed then."""
    leaves = ending(view, queue, staying, limits, now)
    gone = {action.intent_id for action in leaves}
    left = [job for job in staying if job.intent_id not in gone]
    return leaves + [
        _go(job, why, code)
        for job, code, why in drains_for_other_users(queue, capacity, jobs, left, limits, now)
    ]


def ending(
    view: ClusterView, queue: QueueScan, staying: Sequence[OurJob], limits: HarvestLimits, now: float
) -> list[Drain]:
    """Engines whose GPUs are not ours for long any more, whether other users want them or not."""
    engines = [job for job in staying if not job.waits]
    where = {name for job in engines for name in job.nodes}
    until = begins(view, now)
    # between two polls nothing is decided: what comes before the next one is now or too late
    soon_s = limits.job.drain_before_s + limits.yielding.horizon_s if limits.job.drain_before_s > 0 else 0.0
    out = {node.name: node.states & _OUT for node in view.nodes if node.name in where and node.states & _OUT}
    drained = dict(limits.restrictions.drained)
    found: list[Drain] = []
    for job in engines:
        listed = queue.ours.get(job.job_id)
        if listed is not None and preempted_already(listed):
            continue  # Slurm has asked it already, and it is to keep its place in the queue
        ends_at = listed.end_time if listed is not None and listed.has_gpus_allocated else 0.0
        begins_at, booked = min(((until.get(name, float("inf")), name) for name in job.nodes), default=_NEVER)
        taken_out = next((name for name in job.nodes if name in out), "")
        asked = next((name for name in job.nodes if name in drained), "")
        if begins_at - now <= soon_s:
            found.append(
                _go(
                    job,
                    f"a reservation begins on {booked} in {max(0.0, begins_at - now):.0f} s",
                    HarvestCode.RESERVED,
                )
            )
        elif taken_out:
            found.append(
                _go(
                    job,
                    f"{taken_out} is taken out of service: {', '.join(sorted(out[taken_out]))}",
                    HarvestCode.NODE_DRAINED,
                )
            )
        elif asked:
            found.append(_go(job, drained[asked], HarvestCode.NODE_DRAINED))
        elif ends_at > 0 and soon_s > 0 and ends_at - now <= soon_s:
            found.append(
                _go(job, f"its time limit comes in {max(0.0, ends_at - now):.0f} s", HarvestCode.ENDING)
            )
    return found


def _go(job: OurJob, why: str, code: HarvestCode) -> Drain:
    if job.connected:
        return DrainAllocated(job.intent_id, f"{why}; it holds {job.leases} leases", code)
    return Cancel(job.intent_id, f"{why}; no engine of it is connected", code)


def unseen(jobs: Sequence[OurJob], code: HarvestCode, why: str) -> list[DrainAllocated]:
    """Nothing may be harvested and Slurm does not answer: engines that the router knows drain without it. The rest waits for a poll."""
    staying = [job for job in jobs if job.connected and job.drain_kind is DrainKind.NO]
    return [
        DrainAllocated(job.intent_id, f"{why}; Slurm does not answer; it holds {job.leases} leases", code)
        for job in staying
    ]


def leave_for_blackout_at(one: BlackoutTime, limits: HarvestLimits) -> float:
    """When engines are asked to leave for it (Unix s): between two polls nothing is decided, and one that hangs is cancelled later."""
    return one.start - limits.job.drain_before_s - max(limits.yielding.horizon_s, limits.drain_notice_s)
