"""What has become of each job that we intended, from one observation after the other. Pure.

    intend -> submitted | submit_unknown | submit_refused          what we did
    observe(view)  -> Output(records, gone, orphaned_jobs, ended)  what the queue shows; see `observed_jobs` for the tables
    revoke                                                         what we drained or cancelled

No single observation is trusted: a job that is not listed, or is listed as finished, is closed only when it was so for `absent_s` and at
least twice. What can be said at once is that an *incarnation* is over (its restart count grew, it is pending again, it is completing or
finished): the router moves its samples then, and fencing makes an early move safe.

Owns the intents; `allocations` follows their GPUs. Knows nothing of commands, keys or demand; `now` is given.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from scavenger.cluster.model import ClusterView, Job, JobLife, nodes_in
from scavenger.harvest.decide.actions import DrainKind, HarvestCode, OurJob
from scavenger.harvest.decide.drain import HANDS_S
from scavenger.harvest.decide.standby import is_standby
from scavenger.harvest.track import observed_jobs
from scavenger.harvest.track.allocation_bounds import (
    MOST_ASKED,
    Bounded,
    Vanished,
    beyond,
    corrected,
    lives_of,
    merged,
)
from scavenger.harvest.track.allocations import Allocations
from scavenger.harvest.track.intents import Allocation, Draft, Tracked
from scavenger.harvest.track.node_health import Health, HealthRules
from scavenger.harvest.track.observed_jobs import ObservedState, Stage
from scavenger.harvest.track.set_up import FailedStart
from scavenger.ledger import records as rec
from scavenger.router.core.events import CondemnedEngine, JobGone, WorkerLife

#: A job that has waited in the queue for longer than this may wait for hours: it is no reason to poll often.
EXPECTED_S = 180.0
#: Starts and changes of hands whose durations are remembered, the newest, and for how long.
MOST_TOOK, TOOK_S = 16, 3600.0
_LOST_NODE = frozenset({"down", "not_responding", "fail", "failing", "error", "unknown"})


@dataclass(frozen=True, slots=True)
class TrackerRules:
    """`uid` identifies this ledger in the comments of its jobs; `user` owns them."""

    uid: str
    user: str
    absent_s: float
    health: HealthRules


@dataclass(frozen=True, slots=True)
class Output:
    """What an observation (or a submission's answer) led to. `orphaned_jobs`: jobs with our uid whose intent the ledger does not have.
    `failed_starts`: engines that ended before they could work. `changed`: intents whose engine has registered for the run that it changed
    hands to."""

    records: tuple[rec.Record, ...] = ()
    gone: tuple[JobGone, ...] = ()
    orphaned_jobs: tuple[int, ...] = ()
    ended: tuple[str, ...] = ()
    failed_starts: tuple[FailedStart, ...] = ()
    changed: tuple[str, ...] = ()


class _Took(NamedTuple):
    """When something was over (Unix s), and how long it took (s)."""

    at: float
    seconds: float


class _Durations:
    """How long something took for each run, the newest `MOST_TOOK` of the last `TOOK_S`."""

    def __init__(self) -> None:
        self._of_run: dict[int, deque[_Took]] = {}

    def add(self, run_id: int, took: _Took) -> None:
        self._of_run = {run: of for run, of in self._of_run.items() if took.at - of[-1].at <= TOOK_S}
        self._of_run.setdefault(run_id, deque(maxlen=MOST_TOOK)).append(took)

    def means(self, now: float) -> dict[int, float]:
        """By run: the mean in seconds."""
        recent = {
            run: [one.seconds for one in of if now - one.at <= TOOK_S] for run, of in self._of_run.items()
        }
        return {run: sum(seconds) / len(seconds) for run, seconds in recent.items() if seconds}


class Tracker:
    """See the module. Not shared between threads."""

    def __init__(self, rules: TrackerRules) -> None:
        self.rules = rules
        self.health = Health(rules.health)
        self.intents: dict[str, Tracked] = {}
        self._quarantined: dict[str, str] = {}
        self._condemned = 0  # number of the last that was heard of
        self._allocations = Allocations(self.health)
        self.bounded: dict[
            tuple[str, int], Bounded
        ] = {}  # allocations that accounting may still tell the times of
        self.vanished: dict[str, Vanished] = {}  # jobs whose end was not observed
        self._asked: Counter[tuple[str, int]] = Counter()
        self._switches, self._starts = _Durations(), _Durations()
        # Changes to another model; and what follows the registration of a fresh start.
        self._builds, self._ready = _Durations(), _Durations()
        # By run: when an engine that was to be built anew for it failed.
        self._not_built = dict[int, float]()
        # By run: when an engine that was to leave it for another one had not got away in time.
        self._stuck = dict[int, float]()
        self._changed: list[
            str
        ] = []  # intents whose engine registered for its new run since the last observation

    # ---------------------------------------------------------------- what we did

    def intend(self, intended: rec.JobIntended, now: float, *, standby: bool = False) -> None:
        """The intent is durable; its submission follows."""
        self.intents[intended.intent_id] = Tracked(
            intended, free_at=now, since=now, pinned=intended.pinned, standby=standby
        )

    def changes_hands(
        self, intent_id: str, run_id: int, worker_key: str, now: float, *, builds: bool = False
    ) -> None:
        """Its engine was asked to go on for another run, under this public key. `builds`: it is built anew for it."""
        one = self.intents[intent_id]
        one.leaves_run = one.leaves_run or one.intended.run_id
        one.intended = msgspec.structs.replace(one.intended, run_id=run_id, worker_key=worker_key)
        one.run_since = one.changing_since = now
        life = one.workers.get(one.last_allocation)
        # One that had not been built yet is built on the way: that says nothing of others.
        one.switching_since = now if life is not None and life.ready else 0.0
        one.builds_for = run_id if builds else 0
        one.submitted_at = 0.0

    def predicted_s(self, now: float) -> tuple[Mapping[int, float], Mapping[int, float]]:
        """By run: seconds until an engine has its first weights for it, by a change of hands and by a start. Means of the run's own in the
        last hour, so that a run with slow weights tells nothing of others; a run that had none is not there."""
        return self._switches.means(now), self._starts.means(now)

    def predicted_builds_s(self, now: float) -> tuple[Mapping[int, float], Mapping[int, float]]:
        """By run, as `predicted_s`: seconds of a change of hands for which the engine was built anew; and from the registration of a
        freshly started engine to its first weights."""
        return self._builds.means(now), self._ready.means(now)

    def no_builds(self, now: float) -> Mapping[int, str]:
        """By run: why no engine is built anew for it now. One that failed is not tried again in the next hour; and as long as none was
        measured one shows what it takes."""
        known = self._builds.means(now)
        under_way = {one.builds_for for one in self.intents.values() if one.builds_for} - known.keys()
        found = dict.fromkeys(under_way, "the first one that is built anew for that run is not ready yet")
        self._not_built = {run: at for run, at in self._not_built.items() if now - at <= TOOK_S}
        for run, at in self._not_built.items():
            found[run] = f"one that was to be built anew for that run failed {now - at:.0f} s ago"
        return found

    def stuck(self, now: float) -> Mapping[int, str]:
        """By run: why none of its engines goes on for another run now. What it has its engines do may hold them, and the run that waits
        for one would have had a new start meanwhile: one that did not get away is the last for an hour."""
        self._stuck = {run: at for run, at in self._stuck.items() if now - at <= TOOK_S}
        return {
            run: f"one that was to leave its run for another had not got away after {HANDS_S:g} s, {now - at:.0f} s ago"
            for run, at in self._stuck.items()
        }

    def released(self, intent_id: str, node: str, now: float) -> None:
        """Slurm took our release: this standby job begins on `node`."""
        one = self.intents[intent_id]
        one.standby, one.pinned, one.since = False, node, now

    def submitted(self, intent_id: str, job_id: int, now: float) -> Output:
        """Slurm answered with an id. The job waits until a view says otherwise."""
        one = self.intents[intent_id]
        one.job_id, one.stage, one.since = (
            job_id,
            Stage.WAITING,
            now,
        )  # not `free_at`: it may have started before the answer came
        one.unseen_since, one.unseen = None, 0
        one.submitted_at = 0.0 if one.standby else now
        return Output((rec.JobSubmitted(intent_id, job_id, now),))

    def submit_unknown(self, intent_id: str, reason: str, now: float) -> Output:
        """No answer came: the job may exist. It is looked up by its comment and name, and submitted afresh only when it stays absent."""
        return Output(
            (
                rec.Event(
                    "submit_unknown", self.intents[intent_id].intended.run_id, intent_id, reason, "{}", now
                ),
            )
        )

    def submit_refused(self, intent_id: str, reason: str, now: float) -> Output:
        """Slurm refused: there is no job."""
        one = self.intents.pop(intent_id)
        self.health.submission_failed(reason, now)
        records = (
            rec.JobEnded(intent_id, "REFUSED", reason, now),
            rec.Event("submit_refused", one.intended.run_id, intent_id, reason, "{}", now),
        )
        return Output(records, ended=(intent_id,))

    def revoke(
        self, intent_id: str, how: DrainKind, reason: str, now: float, code: HarvestCode | None = None
    ) -> None:
        """We asked the job to leave (again)."""
        one = self.intents[intent_id]
        if one.changing_since and one.leaves_run and now - one.changing_since >= HANDS_S:
            self._stuck[one.leaves_run] = now
        one.drain_kind, one.asked_at, one.why_draining, one.drain_code = how, now, reason, code
        # A job that completes may show the restart count of its next life already: that one is not to be.
        now_at = one.allocation.restart_count if one.allocation else one.job.restart_count if one.job else 0
        one.last_life, one.returned = max(one.last_life, now_at), ""

    def restore(self, states: Sequence[rec.OpenIntent], now: float) -> None:
        """Take over what the ledger has. Nothing is concluded before the first view."""
        for state in sorted(states, key=lambda s: s.intended.intent_id):
            # Where Slurm chose the node, a job that ran waits for the same one again: its capacity is kept.
            pinned = state.intended.pinned or state.node
            one = Tracked(
                state.intended,
                state.job_id,
                since=now,
                last_state=state.last_state,
                inherited=True,
                pinned=pinned,
                run_since=state.run_since,
            )
            one.stage = (
                Stage.UNKNOWN
                if not state.job_id
                else Stage.ALLOCATED
                if state.allocation_open
                else Stage.WAITING
            )
            if state.last_state in observed_jobs.LASTING:
                one.last_life = state.restart_count
            one.last_allocation, one.free_at = state.last_allocation, max(state.intended.at, state.free_since)
            one.workers = {
                life.incarnation: WorkerLife(one.intent_id, *msgspec.structs.astuple(life))
                for life in state.lives
            }
            if state.allocation_open:
                # Of the time between our predecessor's last poll and our first one Slurm tells, or the job's engine.
                one.allocation = Allocation(state.last_allocation, state.node, state.allocated_since)
                self._allocations.ran(one.intent_id, state.last_allocation, state.node)
                one.held_at = max(state.allocated_since, state.polled_at)
                one.worked = (
                    True  # unknown; and if it leaves now, then perhaps because our predecessor asked it to
                )
            self.intents[one.intent_id] = one

    # ---------------------------------------------------------------- what the queue shows

    def observe(self, view: ClusterView, now: float) -> Output:
        """Compare a view with what we know. Records, events and ends come in the order of intent ids."""
        draft = Draft(now, asked_at=view.observed_at)
        listed, orphaned_jobs = self._match(view)
        self._forget_reused(draft, listed, view)
        lost = {node.name for node in view.nodes if node.states & _LOST_NODE}
        for intent_id in sorted(self.intents):
            self._poll_one(draft, self.intents[intent_id], listed.get(intent_id), lost)
        for intent_id in draft.ended:
            del self.intents[intent_id]
        self._note_quarantine(draft)
        self.bounded.update({(one.intent_id, one.restart_count): one for one in draft.bounded if one.job_id})
        changed, self._changed = tuple(self._changed), []
        return Output(
            tuple(draft.records),
            tuple(draft.gone),
            tuple(sorted(orphaned_jobs)),
            tuple(draft.ended),
            tuple(draft.failed_starts),
            changed,
        )

    def _match(self, view: ClusterView) -> tuple[dict[str, Job], list[int]]:
        """Which listed job is which intent's, and jobs that carry our uid for an intent that the ledger does not have.

        A job counts as an intent's when it carries the intent in its comment or name and has the id that we know, if we know one: an id
        alone proves nothing, because a controller that lost its state gives ids out again.
        """
        listed: dict[str, Job] = {}
        orphaned_jobs = []
        for job in sorted(view.jobs, key=attrgetter("job_id")):
            intent_id, proved = observed_jobs.intent_in(job, self.rules.uid)
            if not intent_id:
                continue  # most of a queue
            one = self.intents.get(intent_id)
            alive = observed_jobs.observed_state_of(job) in (ObservedState.WAITS, ObservedState.ALLOCATED)
            if one is None:
                if proved and alive and job.user == self.rules.user:
                    orphaned_jobs.append(job.job_id)
            elif job.user == self.rules.user and one.job_id in (0, job.job_id) and intent_id not in listed:
                listed[intent_id] = job
            elif proved and alive and job.user == self.rules.user:
                orphaned_jobs.append(
                    job.job_id
                )  # a second job of one intent: its submission was repeated behind our back
        return listed, orphaned_jobs

    def _forget_reused(self, draft: Draft, listed: Mapping[str, Job], view: ClusterView) -> None:
        """An id that is another job's now (the controller lost its state, and counts afresh) must never be cancelled as ours."""
        absent = [intent_id for intent_id in sorted(self.intents) if intent_id not in listed]
        theirs = (
            {job.job_id for job in view.jobs} - {job.job_id for job in listed.values()} if absent else set()
        )
        for intent_id in absent:
            one = self.intents[intent_id]
            if one.job_id in theirs:
                why = f"job {one.job_id} does not carry this intent: its id was given out again"
                draft.records.append(
                    rec.Event("job_id_reused", one.intended.run_id, intent_id, why, "{}", draft.now)
                )
                one.job_id = 0

    def _poll_one(self, draft: Draft, one: Tracked, job: Job | None, lost: set[str]) -> None:
        observed = ObservedState.ABSENT if job is None else observed_jobs.observed_state_of(job)
        target = observed_jobs.next_stage(one.stage, observed)
        if job is not None:
            self._adopt(draft, one, job)
            self._record_state(draft, one, job)
            self._allocations.follow(draft, one, job, observed, lost)
            one.standby = is_standby(job, draft.now)
            if one.builds_for and observed_jobs.crashed(job):
                self._not_built[one.builds_for] = draft.now
            if one.allocation is None:
                one.switching_since, one.builds_for, one.leaves_run = 0.0, 0, 0
                if one.changing_since:
                    one.changing_since = (
                        0.0  # its process ended on the way: the next one begins with the new key
                    )
                    self._changed.append(one.intent_id)
            self._note_return(one, job, observed)
            one.job, one.last_state, one.held = job, str(job.state), observed_jobs.held_back(job)
        one.since = one.since if target is one.stage else draft.now
        one.stage = target
        if target not in observed_jobs.UNSEEN:
            one.unseen_since, one.unseen = None, 0
            return
        one.unseen += 1
        if one.unseen_since is None:
            one.unseen_since = draft.now
        if one.unseen >= 2 and draft.now - one.unseen_since >= self.rules.absent_s:
            self._end(draft, one)

    def _note_return(self, one: Tracked, job: Job, observed: ObservedState) -> None:
        """Whether Slurm started its job again, or is about to, after a life that was to be the last one.

        Slurm 24.11 puts a job that was preempted once back into the queue after whichever exit comes later, 0 included. A preempted job
        comes back too, and is to: its life ended as PREEMPTED, or with an exit code that says that it left on Slurm's notice.
        """
        if observed is ObservedState.FINISHED and not observed_jobs.left_on_notice(job):
            one.last_life = max(one.last_life, job.restart_count)
        one.returned = self._came_back(one, job)

    def _came_back(self, one: Tracked, job: Job) -> str:
        """Why this job is not to be in the queue; "" where it may, or is on its way out."""
        alive = (ObservedState.WAITS, ObservedState.ALLOCATED)
        ended = 0 <= one.last_life < job.restart_count
        if not ended or observed_jobs.observed_state_of(job) not in alive:
            return ""
        if one.drain_kind is DrainKind.NO:
            return "it had ended by itself, and Slurm put it back"
        return f"it was {one.drain_kind} ({one.why_draining}), and Slurm put it back"

    def _adopt(self, draft: Draft, one: Tracked, job: Job) -> None:
        if not one.job_id:
            one.job_id = job.job_id
            draft.records.append(rec.JobSubmitted(one.intent_id, job.job_id, draft.now))
            why = f"job {job.job_id} carries this intent: the submission had reached Slurm"
            draft.records.append(
                rec.Event("job_adopted", one.intended.run_id, one.intent_id, why, "{}", draft.now)
            )

    def _record_state(self, draft: Draft, one: Tracked, job: Job) -> None:
        node = ",".join(job.nodes)
        seen = (str(job.state), ",".join(sorted(job.flags)), node, job.restart_count)
        if seen == one.seen:
            return
        one.seen = seen
        state, flags, _, restarts = seen
        draft.records.append(
            rec.JobObserved(one.intent_id, job.job_id, state, flags, job.reason, node, restarts, draft.now)
        )

    def _end(self, draft: Draft, one: Tracked) -> None:
        """Close the intent: it was not alive for long enough."""
        if one.stage is Stage.UNKNOWN:
            state, reason = (
                "LOST",
                f"it did not appear in the queue within {self.rules.absent_s:g} s: the submission never arrived",
            )
        elif one.stage is Stage.MISSING:
            state, reason = one.last_state or "LOST", f"not in the queue for {self.rules.absent_s:g} s"
        else:
            state, reason = one.last_state, one.job.reason if one.job is not None else ""
        if one.drain_kind is not DrainKind.NO:
            reason = f"{one.drain_kind}: {one.why_draining}"
        why = (
            "cancelled"
            if one.drain_kind is DrainKind.CANCELLED
            else "completed"
            if one.drain_kind is DrainKind.DRAINING
            else "unknown"
        )
        held = one.allocation
        self._allocations.vanished(draft, one, why)
        if held is not None:
            draft.over(one, held.restart_count, reason, crashed=False)
        if one.stage is Stage.MISSING and one.job_id:
            gpus, at = one.intended.gpus, one.intended.at
            self.vanished[one.intent_id] = Vanished(one.intent_id, one.job_id, one.last_allocation, gpus, at)
        draft.records.append(rec.JobEnded(one.intent_id, state, reason, draft.now))
        draft.ended.append(one.intent_id)
        one.stage = Stage.ENDED

    def _note_quarantine(self, draft: Draft) -> None:
        now = dict(self.health.quarantined(draft.now))
        for node in sorted(now.keys() - self._quarantined.keys()):
            draft.records.append(rec.Event("node_quarantined", 0, node, now[node], "{}", draft.now))
            until_at = self.health.quarantined_until(node)
            draft.records.append(rec.NodeQuarantined(node, now[node], until_at, draft.now))
        for node in sorted(self._quarantined.keys() - now.keys()):
            draft.records.append(
                rec.Event("node_released", 0, node, "its quarantine is over", "{}", draft.now)
            )
            draft.records.append(rec.NodeReleased(node, draft.now))
        self._quarantined = now

    # ---------------------------------------------------------------- for the policy

    def jobs(
        self, leases: Mapping[str, tuple[int, float]], owners: Mapping[int, str] = MappingProxyType({})
    ) -> list[OurJob]:
        """Our jobs that hold GPUs or may come to. `leases`: intent -> (leases held, idle since), from the router. `owners`: by run."""
        found = []
        for intent_id in sorted(self.intents):
            one = self.intents[intent_id]
            if one.stage in (Stage.OVER, Stage.ENDED):
                continue
            n_leases, idle_since = leases.get(intent_id, (0, 0.0))
            found.append(
                OurJob(
                    intent_id,
                    one.intended.run_id,
                    one.job_id,
                    one.intended.gpus,
                    one.allocation is None,
                    one.allocation.node if one.allocation is not None else "",
                    one.held if one.stage is Stage.WAITING else "",
                    one.drain_kind,
                    one.asked_at,
                    intent_id in leases,
                    n_leases,
                    idle_since,
                    one.pinned,
                    one.since,
                    one.drain_code,
                    one.standby and one.allocation is None,
                    owners.get(one.intended.run_id, ""),
                    max(one.allocation.started_at, one.run_since) if one.allocation is not None else 0.0,
                    one.returned,
                    one.intended.nodes,
                    one.changing_since,
                )
            )
        return found

    def job_ids(self) -> frozenset[int]:
        return frozenset(one.job_id for one in self.intents.values() if one.job_id)

    def held(self) -> dict[str, int]:
        """GPUs that our jobs hold, by node."""
        found: dict[str, int] = {}
        for one in self.intents.values():
            if one.allocation is not None and one.allocation.node:
                gpus = (one.job.gpus if one.job is not None else 0) or one.intended.gpus
                for node in one.allocation.nodes:
                    found[node] = found.get(node, 0) + gpus // len(one.allocation.nodes)
        return found

    def preempted_since(self, at: float) -> int:
        """Preemptions since then that this daemon has seen."""
        return sum(seen >= at for seen in self._allocations.preempted)

    def expecting(self, now: float) -> bool:
        """Whether something is about to happen that is worth an early poll: just submitted, just preempted, asked to leave."""
        quiet = {Stage.ALLOCATED, Stage.WAITING}
        return any(
            one.stage not in quiet
            or one.drain_kind is not DrainKind.NO
            or one.changing_since > 0
            or (one.stage is Stage.WAITING and now - one.since < EXPECTED_S)
            for one in self.intents.values()
            if not (one.standby and one.stage is Stage.WAITING and one.drain_kind is DrainKind.NO)
        )

    def surprised(self, jobs: Iterable[Job]) -> bool:
        """Whether one of our jobs no longer holds what it held, or is back though it was to leave for good. Why it left (a lost node?)
        takes more than the queue to tell, and nothing is cancelled on the queue alone."""
        listed = {job.job_id: job for job in jobs}
        for one in self.intents.values():
            job = listed.get(one.job_id)
            if job is not None and self._came_back(one, job):
                return True
        held = [
            (one.allocation, listed.get(one.job_id))
            for one in self.intents.values()
            if one.allocation is not None and one.stage is Stage.ALLOCATED
        ]
        return any(
            job is None
            or observed_jobs.observed_state_of(job) is not ObservedState.ALLOCATED
            or job.restart_count != allocation.restart_count
            for allocation, job in held
        )

    def heard(self, lives: Iterable[WorkerLife]) -> None:
        """What the router knows of our jobs' engines, those that left since the last poll as well: each shows that its job held GPUs."""
        for life in lives:
            one = self.intents.get(life.intent_id)
            if one is not None and (
                life.incarnation > one.last_allocation
                or (one.allocation is not None and life.incarnation == one.last_allocation)
            ):
                one.workers[life.incarnation] = merged(one.workers, life)
                self._registered(one, life)
                of_run = life.run_id in (0, one.blamed_run)
                if (
                    life.ready
                    and of_run
                    and one.allocation is not None
                    and life.incarnation == one.last_allocation
                ):
                    self._works(one, one.allocation)

    def _registered(self, one: Tracked, life: WorkerLife) -> None:
        """Whether a change of hands is over now, and how long it took, or a start. A worker registers before its engine is built, so
        that both are measured until the engine is ready."""
        of_run = life.run_id == one.intended.run_id
        its = life.here and of_run
        if one.leaves_run and of_run and (life.here or life.joined_at >= one.run_since):
            one.leaves_run, one.worked = 0, False
        if one.changing_since and its:
            one.changing_since = 0.0
            self._changed.append(one.intent_id)
        if not its or not life.ready_at:
            return
        if one.submitted_at and not life.incarnation:  # a later life of the job waited in the queue once more
            self._starts.add(life.run_id, _Took(life.ready_at, max(0.0, life.ready_at - one.submitted_at)))
            self._ready.add(life.run_id, _Took(life.ready_at, max(0.0, life.ready_at - life.joined_at)))
        if one.switching_since and not one.changing_since:
            took = self._builds if one.builds_for else self._switches
            took.add(life.run_id, _Took(life.ready_at, max(0.0, life.ready_at - one.switching_since)))
        one.submitted_at = one.switching_since = 0.0
        one.builds_for = 0

    def condemned(self, engines: Iterable[CondemnedEngine], now: float) -> None:
        """What the router knows of engines that computed wrong numbers; each is heard once. The node is the one where Slurm ran it."""
        for one in engines:
            if one.number > self._condemned:
                self._condemned = one.number
                for node in nodes_in(self._allocations.nodes.get((one.intent_id, one.incarnation), "")):
                    self.health.condemned(node, one.reason, now, one.run_id)

    def to_account(self) -> tuple[int, ...]:
        """Jobs of which accounting may tell more than we saw."""
        return tuple(
            sorted(
                {one.job_id for one in self.bounded.values()} | {one.job_id for one in self.vanished.values()}
            )
        )

    def accounted(self, asked: Iterable[int], lives: Sequence[JobLife], now: float) -> Output:
        """Put the times of Slurm's accounting in the place of those that were bounded. `lives`: of all the jobs that were `asked` about.

        slurmdbd hears of an end seconds later, or when it is up again: what it does not know yet is asked again, `MOST_ASKED` times.
        """
        records: list[rec.Record] = []
        about = set(asked)
        for key in sorted(key for key, one in self.bounded.items() if one.job_id in about):
            one = self.bounded[key]
            life = corrected(one, lives_of(one.intent_id, one.job_id, one.intended_at, lives))
            self._asked[key] += 1
            if life is not None:
                records.append(_correction(one, life, now))
            if life is not None or self._asked[key] >= MOST_ASKED:
                del self.bounded[key], self._asked[key]
        for intent_id in sorted(intent_id for intent_id, one in self.vanished.items() if one.job_id in about):
            gone = self.vanished[intent_id]
            found = beyond(gone, lives)
            for restart_count, life in found or ():
                held = (intent_id, restart_count)
                node = ",".join(life.nodes)
                start = life.start_time or life.end_time  # of one without a start nothing more is certain
                records.append(rec.AllocationStarted(*held, gone.job_id, node, life.gpus or gone.gpus, start))
                records.append(
                    rec.AllocationEnded(
                        *held, observed_jobs.accounted_word(life.state) or "unknown", life.end_time
                    )
                )
            key = (intent_id, -1)
            self._asked[key] += 1
            if found is not None or self._asked[key] >= MOST_ASKED:
                del self.vanished[intent_id], self._asked[key]
        return Output(tuple(records))

    def works(self, intent_ids: Iterable[str]) -> None:
        """Engines of these intents hold leases: jobs of ours can run."""
        for intent_id in intent_ids:
            one = self.intents.get(intent_id)
            if one is not None and one.allocation is not None:
                self._works(one, one.allocation)

    def _works(self, one: Tracked, allocation: Allocation) -> None:
        one.worked = True
        for node in allocation.nodes:
            self.health.proved(one.works_since(allocation), one.blamed_run, node, worked=True)

    def check(self) -> None:
        """Raise AssertionError when the table contradicts itself. For tests."""
        for one in self.intents.values():
            assert one.stage is not Stage.ENDED, f"{one.intent_id} is closed and still tracked"
            assert (one.allocation is None) or one.allocation.restart_count == one.last_allocation, (
                f"{one.intent_id}: an allocation that is not recorded"
            )
            if one.stage in (Stage.WAITING, Stage.RETURNING, Stage.OVER):
                assert one.allocation is None, f"{one.intent_id} is {one.stage} and holds GPUs"
            if one.stage is Stage.ALLOCATED:
                assert one.allocation is not None or one.job is None, (
                    f"{one.intent_id} runs without an allocation"
                )


def _correction(one: Bounded, life: JobLife, now: float) -> rec.AllocationCorrected:
    node, gpus = ",".join(life.nodes) or one.node, life.gpus or one.gpus
    why = observed_jobs.accounted_word(life.state) if one.reason == "unknown" else ""
    start = life.start_time or min(one.started_at, life.end_time)
    return rec.AllocationCorrected(
        one.intent_id, one.restart_count, node, gpus, start, life.end_time, why or one.reason, now
    )
