"""Which of our engines leave before anybody has to make them. Pure.

Their time limit comes, a reservation begins on their node, the node is taken out of service, or others wait who would start if they were
gone. And which jobs are told again: asked to leave and still there, or held by Slurm.

Owns these reasons. Knows nothing of demand: what no demand covers leaves by the policy's own rule.
"""

from __future__ import annotations

from collections.abc import Sequence

from scavenger.cluster.model import ClusterView
from scavenger.harvest.actions import Cancel, CancelPending, Code, GiveBack, Leaving, Limits, OurJob
from scavenger.harvest.others import Census, Ground, preempted_already
from scavenger.harvest.room import begins
from scavenger.harvest.yielding import yields

Leave = CancelPending | GiveBack | Cancel
#: Slurm's words for a node that its admin takes out of service while jobs still run there.
_OUT = frozenset({"drain", "drained", "draining", "maint", "reserved", "reboot_requested"})


def insist(jobs: Sequence[OurJob], limits: Limits, now: float) -> list[Leave]:
    """Jobs that were asked to leave and are still here, and jobs that Slurm holds: they would wait for ever."""
    actions: list[Leave] = []
    for job in jobs:
        if not job.job_id:
            continue  # nothing to name to Slurm yet
        if job.leaving is Leaving.NO:
            if job.waits and job.held:
                actions.append(CancelPending(job.intent_id, f"Slurm holds it: {job.held}", Code.HELD))
        elif job.leaving is Leaving.GIVEN_BACK and job.waits:
            actions.append(CancelPending(job.intent_id, "it was given back and is in the queue again", Code.REQUEUED))
        elif now >= leave_by(job, limits):
            late = f"it was {job.leaving} and is still there after {now - job.asked_at:.0f} s"
            actions.append(Cancel(job.intent_id, late, Code.OVERDUE))
        elif job.leaving is Leaving.GIVEN_BACK and limits.stop and limits.stop_now:
            actions.append(Cancel(job.intent_id, limits.stop, Code.STOPPED))
    return actions


def leave_by(job: OurJob, limits: Limits) -> float:
    """When a job that was asked to leave is cancelled (Unix s)."""
    wait_s = min(limits.leave_s, limits.peer_yield_s) if job.why_leaving in (Code.PEER, Code.QOS) else limits.leave_s
    return job.asked_at + wait_s


def asked_to_leave(
    view: ClusterView, counted: Census, ground: Ground, jobs: Sequence[OurJob], staying: Sequence[OurJob], limits: Limits, now: float
) -> list[Leave]:
    """What leaves of `staying`: what Slurm would end anyway first, and for others only what is still needed then."""
    leaves = _ending(view, counted, staying, limits, now)
    gone = {action.intent_id for action in leaves}
    left = [job for job in staying if job.intent_id not in gone]
    return leaves + [_go(job, why, code) for job, code, why in yields(counted, ground, jobs, left, limits, now)]


def _ending(view: ClusterView, counted: Census, staying: Sequence[OurJob], limits: Limits, now: float) -> list[Leave]:
    """Engines whose GPUs are not ours for long any more, however little others want them."""
    engines = [job for job in staying if not job.waits]
    where = {job.node for job in engines}
    until = begins(view, now)
    # between two looks nothing is decided: what comes before the next one is now or too late
    soon_s = limits.drain_before_s + limits.horizon_s if limits.drain_before_s > 0 else 0.0
    out = {node.name: node.states & _OUT for node in view.nodes if node.name in where and node.states & _OUT}
    found: list[Leave] = []
    for job in engines:
        listed = counted.ours.get(job.job_id)
        if listed is not None and preempted_already(listed):
            continue  # Slurm told it already, and it is to keep its place in the queue
        ends_at = listed.end_time if listed is not None and listed.holds_gpus else 0.0
        begins_at = until.get(job.node, float("inf"))
        if begins_at - now <= soon_s:
            found.append(_go(job, f"a reservation begins on {job.node} in {max(0.0, begins_at - now):.0f} s", Code.RESERVED))
        elif job.node in out:
            found.append(_go(job, f"{job.node} is taken out of service: {', '.join(sorted(out[job.node]))}", Code.DRAINED))
        elif ends_at > 0 and soon_s > 0 and ends_at - now <= soon_s:
            found.append(_go(job, f"its time limit comes in {max(0.0, ends_at - now):.0f} s", Code.ENDING))
    return found


def _go(job: OurJob, why: str, code: Code) -> Leave:
    if job.connected:
        return GiveBack(job.intent_id, f"{why}; it holds {job.leases} leases", code)
    return Cancel(job.intent_id, f"{why}; no engine of it is connected", code)


def unseen(jobs: Sequence[OurJob], why: str) -> list[GiveBack]:
    """Harvesting is stopped and Slurm does not answer: engines that the router knows drain without it. The rest waits for a look."""
    staying = [job for job in jobs if job.connected and job.leaving is Leaving.NO]
    return [GiveBack(job.intent_id, f"{why}; Slurm does not answer; it holds {job.leases} leases", Code.STOPPED) for job in staying]
