"""When a job of ours held GPUs, on which node, and why it ended: from one poll to the next. Pure.

Boundary: the times of allocations; pure.

An *allocation* is the GPUs of one incarnation of a job. Slurm says less than it knows: an incarnation may begin and end between two polls,
its restart count may grow before its GPUs are free, and a requeue does not say whose wish it was. Each growth of the restart count is one
allocation that ended, seen or not; its times are Slurm's where it tells them, else what `allocation_bounds` says.

Owns the rules for that, and what they say of nodes (`health`) and of preemptions. Does not decide whether an intent is closed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from scavenger.cluster.model import Job, JobState, nodes_in
from scavenger.harvest.decide.actions import DrainKind
from scavenger.harvest.track import observed_jobs, set_up
from scavenger.harvest.track.allocation_bounds import Bounded, alive, between
from scavenger.harvest.track.intents import ENVIRONMENT, Allocation, Draft, Tracked
from scavenger.harvest.track.node_health import Health
from scavenger.harvest.track.observed_jobs import ObservedState, Stage
from scavenger.harvest.track.set_up import FailedStart
from scavenger.ledger import records as rec
from scavenger.router.core.events import WorkerLife

#: An engine that failed sooner than this after its start "died at once".
SHORT_LIFE_S = 60.0
#: An engine that was told to leave says goodbye while its job completes. One that has not been heard by then does not: it is over.
GOODBYE_S = 5.0
#: Lives that one poll can tell of after the fact. Slurm itself holds a job that it put back a few times; a malformed count is no flood.
MOST_MISSED = 100
#: Incarnations whose nodes are remembered, the newest: an engine may be found wrong when it has left.
MOST_NODES = 20_000


class Allocations:
    """See the module. `preempted`: when, as far as this daemon has seen it. `nodes`: where incarnations of intents ran, as Slurm said."""

    def __init__(self, health: Health) -> None:
        self.health = health
        self.preempted: deque[float] = deque(maxlen=10_000)
        self.nodes: dict[tuple[str, int], str] = {}

    def ran(self, intent_id: str, incarnation: int, node: str) -> None:
        self.nodes[intent_id, incarnation] = node
        if len(self.nodes) > MOST_NODES:
            del self.nodes[next(iter(self.nodes))]

    def follow(self, draft: Draft, one: Tracked, job: Job, observed: ObservedState, lost: set[str]) -> None:
        allocation = one.allocation
        if allocation is not None and observed is ObservedState.COMPLETES:
            # Its GPUs are not free yet, whatever the restart count says already.
            node_lost = allocation.lost(lost)
            crashed = observed_jobs.crashed(job) and not node_lost
            since = one.since if one.stage is Stage.COMPLETING else draft.now
            if crashed or node_lost or draft.now - since >= GOODBYE_S:
                draft.over(one, allocation.restart_count, self._why(one, job, lost), crashed)
            return
        if allocation is not None and (
            observed is not ObservedState.ALLOCATED or job.restart_count != allocation.restart_count
        ):
            self._release(draft, one, allocation, job, lost)
            allocation = None
        # While a job completes its restart count may have grown already: of which life its GPUs are shows when they are free.
        if observed is not ObservedState.COMPLETES:
            self._missed(draft, one, job, lost)
        if (
            allocation is None
            and observed is ObservedState.ALLOCATED
            and job.restart_count > one.last_allocation
        ):
            allocation = self._take(draft, one, job)
        elif (
            observed in (ObservedState.FINISHED, ObservedState.RETURNS)
            and job.restart_count > one.last_allocation
            and job.start_time > 0
            and job.nodes
        ):
            self._release(
                draft, one, self._take(draft, one, job), job, lost
            )  # it began and ended between two polls
        if observed is ObservedState.WAITS:
            one.free_at = max(one.free_at, draft.seen_at)
        elif observed is ObservedState.ALLOCATED:
            one.held_at = draft.seen_at
        if job.restart_count > 0:  # an incarnation may have come and gone unseen
            draft.over(one, job.restart_count - 1, self._requeued_by(one, None, lost), crashed=False)
        for past in [
            life
            for life in one.workers
            if life <= one.last_allocation and (one.allocation is None or life < one.allocation.restart_count)
        ]:
            del one.workers[past]
        if allocation is not None and draft.now - one.works_since(allocation) >= SHORT_LIFE_S:
            self.health.proved(one.works_since(allocation), one.blamed_run)

    def vanished(self, draft: Draft, one: Tracked, why: str) -> None:
        """The job is gone from the queue for good, and its end was not observed: its engines' reports are what is known of its lives."""
        gone_at = one.unseen_since or draft.now
        if one.allocation is not None:
            life = alive(one.workers.get(one.allocation.restart_count), one.allocation.started_at, gone_at)
            ended_at = max(one.held_at, one.allocation.started_at, life[1] if life else 0.0)
            start = (one.allocation.started_at, one.allocation.started_at)
            self._bounded(
                draft,
                one,
                one.allocation,
                job_gpus(one),
                ended_at,
                why,
                start,
                (ended_at, max(ended_at, gone_at)),
            )
        for incarnation in sorted(life for life in one.workers if life > one.last_allocation)[:MOST_MISSED]:
            self._unseen(draft, one, incarnation, why, (one.free_at, max(one.free_at, gone_at)), 0.0)

    def _take(self, draft: Draft, one: Tracked, job: Job) -> Allocation:
        node = ",".join(job.nodes)
        self.ran(one.intent_id, job.restart_count, node)
        worker = one.workers.get(job.restart_count)
        latest = draft.now if worker is None else min(draft.now, max(worker.joined_at, one.free_at))
        started_at = between(job.start_time or latest, one.free_at, latest)
        return self._begin(draft, one, job.restart_count, node, job.gpus or one.intended.gpus, started_at)

    def _begin(
        self, draft: Draft, one: Tracked, restart_count: int, node: str, gpus: int, started_at: float
    ) -> Allocation:
        one.allocation = allocation = Allocation(restart_count, node, started_at)
        one.last_allocation = restart_count
        draft.records.append(
            rec.AllocationStarted(one.intent_id, restart_count, one.job_id, node, gpus, started_at)
        )
        return allocation

    def _missed(self, draft: Draft, one: Tracked, job: Job, lost: set[str]) -> None:
        """Lives that began and ended between two polls: each growth of the restart count was one. Slurm tells of the last one's end."""
        first = max(one.last_allocation + 1, job.restart_count - MOST_MISSED)
        for incarnation in range(first, job.restart_count):
            put_back_at = between(job.submit_time, one.free_at, draft.now) if job.submit_time > 0 else 0.0
            last = incarnation == job.restart_count - 1
            worker = one.workers.get(incarnation)
            unseen = Allocation(incarnation, _claimed(one, worker), one.free_at)
            why = (observed_jobs.held_word(job) if last else "") or self._requeued_by(one, unseen, lost)
            within = (one.free_at, put_back_at or draft.now)
            self._unseen(draft, one, incarnation, why, within, put_back_at if last else 0.0)
            if last and observed_jobs.launch_failed(job):
                # No engine of it can have said where that was.
                self._not_launched(draft, one, replace(unseen, node=one.pinned), job)

    def _unseen(
        self,
        draft: Draft,
        one: Tracked,
        incarnation: int,
        why: str,
        within: tuple[float, float],
        ended_at: float,
    ) -> None:
        """Record a life that no poll showed. `within`: when it can have been; `ended_at`: its end as Slurm says it, 0: it does not."""
        low, high = within
        worker = one.workers.get(incarnation)
        life = alive(worker, low, ended_at or high)
        started_at = life[0] if life else ended_at or low
        end = ended_at or (life[1] if life else started_at)
        gpus = one.intended.gpus
        node = _claimed(one, worker) or one.pinned
        allocation = self._begin(draft, one, incarnation, node, gpus, started_at)
        self._bounded(
            draft,
            one,
            allocation,
            gpus,
            end,
            why,
            (low, started_at if life else end or high),
            (end, ended_at or high),
        )
        one.allocation, one.free_at = None, end
        if why == "preempted":
            self.preempted.append(end)

    def _bounded(
        self,
        draft: Draft,
        one: Tracked,
        allocation: Allocation,
        gpus: int,
        ended_at: float,
        why: str,
        start: tuple[float, float],
        end: tuple[float, float],
    ) -> None:
        """End an allocation of which Slurm did not tell all, and say what is not known of it."""
        draft.records.append(rec.AllocationEnded(one.intent_id, allocation.restart_count, why, ended_at))
        bounded = Bounded(
            one.intent_id,
            one.job_id,
            allocation.restart_count,
            allocation.node,
            gpus,
            allocation.started_at,
            ended_at,
            why,
            start,
            end,
            one.intended.run_id,
            one.intended.at,
        )
        draft.bounded.append(bounded)
        draft.records.append(
            rec.Event(
                "allocation_bounded",
                one.intended.run_id,
                one.intent_id,
                bounded.words,
                bounded.detail,
                draft.now,
            )
        )

    def _release(self, draft: Draft, one: Tracked, allocation: Allocation, job: Job, lost: set[str]) -> None:
        """The GPUs are another user's now. `job` is what the queue shows of it since."""
        one.allocation = allocation
        same = job.restart_count == allocation.restart_count
        why = (
            self._why(one, job, lost)
            if same
            else observed_jobs.held_word(job) or self._requeued_by(one, allocation, lost)
        )
        low = max(one.held_at, allocation.started_at)
        over = observed_jobs.observed_state_of(job) in (ObservedState.FINISHED, ObservedState.RETURNS)
        reported_at = (
            job.end_time
            if same and over
            else job.submit_time
            if same or job.restart_count == allocation.restart_count + 1
            else 0.0
        )
        if reported_at > 0:
            ended_at = between(reported_at, low, max(low, draft.now))
            draft.records.append(rec.AllocationEnded(one.intent_id, allocation.restart_count, why, ended_at))
        else:  # it came back and went again since: the queue tells of its last life only
            high = max(
                low,
                between(job.submit_time, low, draft.now) if job.submit_time > 0 and not same else draft.now,
            )
            life = alive(one.workers.get(allocation.restart_count), allocation.started_at, high)
            ended_at = max(low, life[1] if life else 0.0)
            self._bounded(
                draft,
                one,
                allocation,
                job_gpus(one),
                ended_at,
                why,
                (allocation.started_at, allocation.started_at),
                (ended_at, high),
            )
        one.free_at = max(one.free_at, ended_at)
        if why == "preempted":
            self.preempted.append(ended_at)
        if observed_jobs.launch_failed(job):
            self._not_launched(draft, one, allocation, job)
        crashed = (
            same
            and observed_jobs.crashed(job)
            and not allocation.lost(lost)
            and one.drain_kind is DrainKind.NO
        )
        draft.over(one, allocation.restart_count, why, crashed)
        lived_s = ended_at - allocation.started_at
        if crashed:
            self._blame(draft, one, allocation, job, lived_s)
        elif (
            job.state is JobState.COMPLETED
            and one.drain_kind is DrainKind.NO
            and not one.worked
            and lived_s < SHORT_LIFE_S
        ):
            # An engine that worked leaves when its run ends, which the router tells it before we know.
            self.health.failed_at_once(
                f"job {job.job_id} on {allocation.node} left by itself after {lived_s:.0f} s",
                draft.now,
                one.blamed_run,
            )
        one.allocation = None

    def _why(self, one: Tracked, job: Job, lost: set[str]) -> str:
        """Why an incarnation is over, in the ledger's words."""
        if one.allocation is not None and one.allocation.lost(lost):
            return "node_fail"
        word = observed_jobs.end_word(job)
        if one.drain_kind is DrainKind.CANCELLED and word != "completed":
            return "cancelled"
        if word:
            return word
        if job.state is JobState.PENDING:
            return observed_jobs.held_word(job) or self._requeued_by(one, one.allocation, lost)
        return "preempted" if job.reason.startswith("preempted") else "unknown"

    def _requeued_by(self, one: Tracked, allocation: Allocation | None, lost: set[str]) -> str:
        """A requeue that neither we nor the job's user asked for: Slurm preempts, or loses nodes.

        Our job script requeues itself only on Slurm's notice, so that is a preemption as well. Only when the job was put back because of
        our own request to leave is it called a requeue.
        """
        if (allocation is not None and allocation.lost(lost)) or one.last_state in (
            JobState.NODE_FAIL,
            JobState.BOOT_FAIL,
        ):
            return "node_fail"
        return "requeued" if one.drain_kind is not DrainKind.NO else "preempted"

    def _not_launched(self, draft: Draft, one: Tracked, allocation: Allocation, job: Job) -> None:
        """Slurm could not start it: a prolog that failed, as a rule, for which Slurm has drained the node. No run is at fault. Every
        further job may cost the site another node, so that all wait."""
        what = f"job {job.job_id} could not be started: {job.reason} (did the site's prolog fail there? Slurm then drains the node)"
        node = allocation.node or one.pinned
        draft.records.append(rec.Event("launch_failed", 0, node or one.intent_id, what, "{}", draft.now))
        for name in nodes_in(node):
            draft.records.append(
                rec.EngineDied(
                    name,
                    0,
                    one.intent_id,
                    job.job_id,
                    allocation.restart_count,
                    None,
                    f"not started: {job.reason}",
                    0.0,
                    draft.now,
                )
            )
        self.health.failed_at_once(f"{what}, on {node or 'a node of its partition'}", draft.now)

    def _blame(self, draft: Draft, one: Tracked, allocation: Allocation, job: Job, lived_s: float) -> None:
        code = "unknown" if job.exit_code is None else job.exit_code
        what = f"job {job.job_id} {job.state} (exit code {code}) after {lived_s:.0f} s"
        where, run_id = allocation.node or one.intent_id, one.blamed_run
        if one.intended.kind == ENVIRONMENT:
            what = f"environment worker's {what}"
            draft.records.append(rec.Event("environment_died", run_id, where, what, "{}", draft.now))
            if lived_s < SHORT_LIFE_S or job.exit_code in set_up.CANNOT_BEGIN:
                self.health.failed_at_once(what, draft.now, run_id)
            return  # its user's code says nothing of nodes, nor of engines
        if one.lent_to:
            what = (
                f"{what}; it lent slots to run {one.lent_to}, so neither its node nor its own run is blamed"
            )
        draft.records.append(rec.Event("engine_died", run_id, where, what, "{}", draft.now))
        life = one.workers.get(allocation.restart_count)
        if job.exit_code == set_up.NO_DAEMON and (one.inherited or life is not None):
            # The engine had reached the daemon and later lost it for long: that is no failed start.
            return
        draft.records.extend(
            rec.EngineDied(
                node,
                run_id,
                one.intent_id,
                job.job_id,
                allocation.restart_count,
                job.exit_code,
                f"{job.state}{f' ({job.reason})' if job.reason and job.reason != 'None' else ''} after {lived_s:.0f} s",
                lived_s,
                draft.now,
            )
            for node in allocation.nodes or ("",)
        )
        if one.lent_to:
            return  # samples of another owner's run may have killed it
        if (
            job.exit_code is not None
            and job.exit_code in set_up.CANNOT_BEGIN
            and not (one.worked or (life is not None and life.ready))
        ):
            self._could_not_begin(draft, one, allocation, job.exit_code, lived_s)
            return
        of_run_s = lived_s - (one.works_since(allocation) - allocation.started_at)
        # What was refused of a predecessor's says nothing of what we submit: after an upgrade all of its jobs are, as they start.
        if of_run_s < SHORT_LIFE_S and not (one.inherited and job.exit_code == observed_jobs.REFUSED):
            self.health.failed_at_once(what, draft.now, run_id)
        if job.exit_code != observed_jobs.REFUSED:
            for node in allocation.nodes:  # which of several nodes it was does not show
                self.health.died(node, what, draft.now, run_id)

    def _could_not_begin(
        self, draft: Draft, one: Tracked, allocation: Allocation, code: int, lived_s: float
    ) -> None:
        first = next(iter(allocation.nodes), "")  # where the worker runs, whose code it is
        failed = FailedStart(one.intent_id, one.blamed_run, one.job_id, first, code, lived_s)
        draft.failed_starts.append(failed)
        self.health.could_not_begin(failed, draft.now)


def _claimed(one: Tracked, worker: WorkerLife | None) -> str:
    """Where a life was that no poll showed: as its engine says, until Slurm's accounting is asked. A job that was submitted for one node
    ran there, whatever its engine says."""
    return one.intended.pinned or (worker.node if worker is not None else "")


def job_gpus(one: Tracked) -> int:
    """What its allocation holds: as Slurm shows it, else as it was asked for."""
    return (one.job.gpus if one.job is not None else 0) or one.intended.gpus
