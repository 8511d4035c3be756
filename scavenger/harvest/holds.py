"""When a job of ours held GPUs, on which node, and why it ended: from one sight of the job after the other. Pure.

A *hold* is one incarnation that holds GPUs. Slurm says less than it knows: an incarnation may begin and end between two looks, its restart
count may grow before its GPUs are free, and a requeue does not say whose wish it was.

Owns the rules for that, and what they say of nodes (`health`) and of preemptions. Does not decide whether an intent is closed.
"""

from __future__ import annotations

import math
from collections import deque

from scavenger.cluster.model import Job, JobState
from scavenger.harvest import sights
from scavenger.harvest.actions import Leaving
from scavenger.harvest.health import Health
from scavenger.harvest.intents import Draft, Hold, Tracked
from scavenger.harvest.sights import Sight
from scavenger.ledger import records as rec

#: An engine that failed sooner than this after its start "died at once".
SHORT_LIFE_S = 60.0


class Holds:
    """See the module. `preempted`: when, as far as this daemon has seen it."""

    def __init__(self, health: Health) -> None:
        self.health = health
        self.preempted: deque[float] = deque(maxlen=10_000)

    def follow(self, draft: Draft, one: Tracked, job: Job, sight: Sight, lost: set[str]) -> None:
        hold = one.hold
        if hold is not None and sight is Sight.COMPLETES:
            # Its GPUs are not free yet, whatever the restart count says already.
            draft.over(one, hold.restart_count, self._why(one, job, lost), sights.crashed(job) and hold.node not in lost)
            return
        if hold is not None and (sight is not Sight.HOLDS or job.restart_count != hold.restart_count):
            self._release(draft, one, hold, job, lost)
            hold = None
        if hold is None and sight is Sight.HOLDS and job.restart_count > one.last_hold:
            hold = self._take(draft, one, job)
        elif sight is Sight.FINISHED and job.restart_count > one.last_hold and job.start_time > 0:
            self._release(draft, one, self._take(draft, one, job), job, lost)  # it began and ended between two looks
        if job.restart_count > 0:  # an incarnation may have come and gone unseen
            draft.over(one, job.restart_count - 1, self._requeued_by(one, None, lost), crashed=False)
        if hold is not None and draft.now - hold.started_at >= SHORT_LIFE_S:
            self.health.proved(hold.started_at)

    def _take(self, draft: Draft, one: Tracked, job: Job) -> Hold:
        node = job.nodes[0] if job.nodes else ""
        started_at = _within(job.start_time, one.known_at, draft.now)
        one.hold = hold = Hold(job.restart_count, node, started_at)
        one.last_hold = job.restart_count
        gpus = job.gpus or one.intended.gpus
        draft.records.append(rec.HoldStarted(one.intent_id, job.restart_count, job.job_id, node, gpus, started_at))
        return hold

    def _release(self, draft: Draft, one: Tracked, hold: Hold, job: Job, lost: set[str]) -> None:
        """The GPUs are somebody else's now. `job` is what the queue shows of it since."""
        one.hold = hold
        same = job.restart_count == hold.restart_count
        why = self._why(one, job, lost) if same else sights.held_word(job) or self._requeued_by(one, hold, lost)
        ended = job.end_time if sights.sight_of(job) is Sight.FINISHED else job.submit_time
        ended_at = _within(ended, max(one.known_at, hold.started_at), draft.now)
        draft.records.append(rec.HoldEnded(one.intent_id, hold.restart_count, why, ended_at))
        if why == "preempted":
            self.preempted.append(ended_at)
        crashed = same and sights.crashed(job) and hold.node not in lost and one.leaving is Leaving.NO
        draft.over(one, hold.restart_count, why, crashed)
        lived_s = ended_at - hold.started_at
        if crashed:
            self._blame(draft, one, hold, job, lived_s)
        elif job.state is JobState.COMPLETED and one.leaving is Leaving.NO and not one.worked and lived_s < SHORT_LIFE_S:
            # An engine that worked leaves when its run ends, which the router tells it before we know.
            self.health.failed_at_once(f"job {job.job_id} on {hold.node} left by itself after {lived_s:.0f} s", draft.now)
        one.hold = None

    def _why(self, one: Tracked, job: Job, lost: set[str]) -> str:
        """Why an incarnation is over, in the ledger's words."""
        if one.hold is not None and one.hold.node in lost:
            return "node_fail"
        word = sights.end_word(job)
        if one.leaving is Leaving.CANCELLED and word != "completed":
            return "cancelled"
        if word:
            return word
        if job.state is JobState.PENDING:
            return sights.held_word(job) or self._requeued_by(one, one.hold, lost)
        return "preempted" if job.reason.startswith("preempted") else "unknown"

    def _requeued_by(self, one: Tracked, hold: Hold | None, lost: set[str]) -> str:
        """A requeue that neither we nor the job's user asked for: Slurm preempts, or loses nodes.

        Our job script requeues itself only on Slurm's notice, so that is a preemption as well. Only when the job was put back because of
        our own request to leave is it called a requeue.
        """
        if (hold is not None and hold.node in lost) or one.last_state in (JobState.NODE_FAIL, JobState.BOOT_FAIL):
            return "node_fail"
        return "requeued" if one.leaving is not Leaving.NO else "preempted"

    def _blame(self, draft: Draft, one: Tracked, hold: Hold, job: Job, lived_s: float) -> None:
        what = f"job {job.job_id} {job.state} (exit code {job.exit_code}) after {lived_s:.0f} s"
        draft.records.append(rec.Event("engine_died", one.intended.run_id, hold.node or one.intent_id, what, "{}", draft.now))
        # What was refused of a predecessor's says nothing of what we submit: after an upgrade all of its jobs are, as they start.
        if lived_s < SHORT_LIFE_S and not (one.inherited and job.exit_code == sights.REFUSED):
            self.health.failed_at_once(what, draft.now)
        if hold.node and job.exit_code != sights.REFUSED:
            self.health.died(hold.node, what, draft.now)


def _within(at: float, low: float, high: float) -> float:
    """Slurm's own time where it lies between our two observations, else the later one: its clock need not be ours.

    It is in whole seconds: what happened in the first observation's second is told as before it.
    """
    return max(at, low) if math.floor(low) <= at <= high else high
