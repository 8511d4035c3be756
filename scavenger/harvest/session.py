"""The harvester's side of its conversation with Slurm, ledger and router: sans-IO. Theory of operation:

    observe(view, ...)      -> Output      what became of our jobs, for the ledger and the router
    take_demand(asked, ...) -> Demand      what the runs may have
    decide(view, ...)       -> Decision    actions, each with its reason
    settle_loans(...)       -> Procedure   loans that end, or are over, whatever a poll shows
    perform(decision, ...)  -> Procedure   the commands that carry them out, in this order:

        orphaned jobs         those of intents that the ledger does not have open are cancelled
        DrainAllocated        an event to the router; Slurm hears nothing of it
        EndLoan               an event to the router: the borrower leaves; its key opens nothing once it had time for that
        BeginLoan             the decision durable -> the borrower's key in place -> an event to the router; Slurm hears nothing of it
        ChangeHands           its new run durable -> its new key in place -> an event to the router; Slurm hears nothing of it
        CancelPending, Cancel one command for all. A job without an id yet is remembered, and leaves when it turns up
        Release               a standby job begins; one that Slurm does not let us steer is cancelled
        Submit                intent durable -> submitted

A `Procedure` is a generator: it yields one `Command` after the other, and its driver sends back each one's `Outcome` (`resume`). So what
becomes of a refusal, or of a reply that is missing, is decided here. A process that dies anywhere in between leaves what its successor
needs: an intent in the ledger, and a job that carries the intent in its name and comment. Before every command that changes something a
write is attempted: a daemon that another one replaced is fenced there, before it touches that one's jobs.

The daemon's `harvester` drives it with commands of Slurm and a ledger, `simulate.site_cluster` with a virtual Slurm. Owns the tracker, what
is known of idle GPUs and of other users' waits, and the order within one decision. Must not know a command line, a key or a file, nor when
to poll.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from scavenger.cluster.model import ClusterView
from scavenger.errors import ClusterError, ClusterUnavailable, SubmitUnknown
from scavenger.harvest.decide import decide
from scavenger.harvest.decide.actions import (
    Action,
    BeginLoan,
    Cancel,
    CancelPending,
    ChangeHands,
    DrainAllocated,
    DrainKind,
    EndLoan,
    HarvestCode,
    HarvestDecision,
    HarvestLimits,
    Loan,
    LoanPair,
    LoanPause,
    Release,
    Submit,
)
from scavenger.harvest.decide.environments import EnvironmentDecision, EnvironmentLimits, decide_environments
from scavenger.harvest.decide.free_capacity import gpu_use, waiting_jobs
from scavenger.harvest.decide.lending import BARRED_S, LEAVES_S, ended, lent
from scavenger.harvest.track.intents import ENGINE, ENVIRONMENT
from scavenger.harvest.track.node_health import without_failing
from scavenger.harvest.track.tracker import Output, Tracker, TrackerRules
from scavenger.harvest.track.waits import OtherUsersWaits
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import Demand, EnvironmentDemand, within_owners
from scavenger.policy.idle_gpus import Idling
from scavenger.protocol.messages import LENT_INTENT, RUN_NAME_PATTERN
from scavenger.router.core.events import (
    CondemnedEngine,
    IntentHandedOver,
    IntentRevoked,
    JobGone,
    RouterEvent,
    SlotsLent,
    WorkerLife,
)

RUN_NAME = re.compile(RUN_NAME_PATTERN)
#: For each connected worker, by intent: how many samples it generates, and since when it has none (Unix s).
Leases = Mapping[str, tuple[int, float]]


# ---- commands, and what came of them --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """Records to the ledger, then events to the router. Nobody waits for either."""

    records: Sequence[rec.Record]
    events: Sequence[RouterEvent] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """Make these records durable: `done` if they are in time. With none it only finds out whether another daemon replaced this one."""

    records: Sequence[rec.Record]


@dataclass(frozen=True, slots=True)
class Confirm:
    """`done` if what was decided still holds: a busy Slurm takes many seconds a job, and somebody may have stopped us."""


@dataclass(frozen=True, slots=True)
class CancelJobs:
    job_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReleaseJob:
    job_id: int
    node: str


@dataclass(frozen=True, slots=True)
class SubmitJob:
    """`job_id` is Slurm's answer. `SubmitUnknown`: none came. What failed before Slurm was asked is a refusal."""

    intent_id: str
    action: Submit


@dataclass(frozen=True, slots=True)
class ChangeKey:
    """Put the pair that was minted for the job's new run where its engine reads it, and let its holder in. The old one stays let in until
    the engine is there under the new one."""

    intent_id: str


@dataclass(frozen=True, slots=True)
class DropKey:
    """The borrower under this intent is let in no more, and its key file goes."""

    intent_id: str


Command = Report | Commit | Confirm | CancelJobs | ReleaseJob | SubmitJob | ChangeKey | DropKey


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a command, and when that was known (Unix s). `error`: what Slurm said instead of doing it."""

    now: float
    done: bool = True
    job_id: int = 0
    error: ClusterError | None = None


T = TypeVar("T")
#: See the module. What it returns at its end is for the procedure that it is a part of.
Procedure = Generator[Command, Outcome, T]


def resume(procedure: Procedure[object], outcome: Outcome | None) -> Command | None:
    """Its next command, None at its end. `outcome`: of the last one, None at the beginning. Raises what the procedure raises."""
    try:
        return next(procedure) if outcome is None else procedure.send(outcome)
    except StopIteration:
        return None


# ---- the session ----------------------------------------------------------------------------------------------------


class HarvestSession:
    """See the module. `mint` names a new intent of a run and makes its engine's key: (run) -> (intent, public key); for "" none is made.
    `mint_again` makes another key for an intent that goes on for another run: (run, intent) -> public key."""

    def __init__(
        self,
        rules: TrackerRules,
        mint: Callable[[str], tuple[str, str]],
        mint_again: Callable[[str, str], str] = lambda _run, _intent: "",
    ) -> None:
        self._mint_again = mint_again
        self.tracker = Tracker(rules)
        #: Jobs of environment workers: their ends say nothing of nodes and of engines.
        self.environments = Tracker(rules)
        self.idling = Idling()
        self.waits = OtherUsersWaits(rules.user)
        self.steers = True  # whether Slurm lets us release a standby job: without that there are none
        self._mint = mint
        self._decided_on: tuple[tuple[int, int, int, int], ...] = ()  # the demand of the last decision
        self._owners: dict[
            int, str
        ] = {}  # by run that ever wanted engines: those of one that ended leave later
        self._last_reason = ""  # why nothing was done, as last recorded
        self._last_environments = ""  # the same of environment workers
        self._environments_decided_on: tuple[tuple[int, int], ...] = ()
        self._refused_names = set[int]()  # runs
        self._without: dict[int, float] = {}  # since when runs have wanted engines and had none
        self._divided: dict[int, int] = {}  # engines by run, as last recorded
        self._loans: dict[str, Loan] = {}  # of slots, by the intent of the engine's job
        self._dropped: dict[str, Loan] = {}  # that were over since the last view
        self._barred: dict[tuple[str, int], float] = {}  # (its intent, run): until when nothing is lent again
        self._paused: dict[LoanPair, LoanPause] = {}  # by `Loan.pair`

    def restore(
        self, jobs: Sequence[rec.OpenIntent], waits: Sequence[rec.OtherUserWaits], now: float
    ) -> None:
        """Take over what the ledger has of our jobs and of other users' waits, before the first view."""
        self.tracker.restore([one for one in jobs if one.intended.kind == ENGINE], now)
        self.environments.restore([one for one in jobs if one.intended.kind != ENGINE], now)
        self.waits.restore(waits, now)

    # ---------------------------------------------------------------- what is seen

    def observe(
        self,
        view: ClusterView,
        leases: Leases,
        lives: Sequence[WorkerLife],
        condemned: Sequence[CondemnedEngine],
        now: float,
    ) -> Output:
        """What a view shows of our jobs. The router's word comes first: `lives` are the engines of our jobs that have registered,
        `condemned` those that were set aside, the newest last."""
        self.tracker.works(intent_id for intent_id, (n_leases, _) in leases.items() if n_leases)
        self.tracker.heard(lives)
        self.tracker.condemned(condemned, now)
        found = self.tracker.observe(view, now)
        beside = self.environments.observe(view, now)
        borrowers = self._borrowers_gone(found.gone, now)
        self._forget_dropped()
        return replace(
            found,
            gone=(*found.gone, *borrowers),
            records=(*found.records, *(one for one in beside.records if _of_environments(one))),
            # Each of the two has intents that the other does not know.
            orphaned_jobs=tuple(sorted({*found.orphaned_jobs} & {*beside.orphaned_jobs})),
            ended=(*found.ended, *beside.ended),
        )

    def use_records(self, view: ClusterView, partition: str, now: float) -> list[rec.Record]:
        """For the ledger, of a whole view: how the partition's GPUs are used, and which other users' jobs wait there or beside ours."""
        ours = self.tracker.job_ids()
        use = gpu_use(view, partition, ours, now)
        pending = use.jobs_pending_other_users
        polled = rec.ClusterPolled(
            use.idle, use.harvested, use.other_users, use.reserved, use.unusable, pending, now
        )
        waiting = waiting_jobs(view, ours, now)
        ours_may_be = view.partition(partition)
        nodes = ours_may_be.nodes if ours_may_be is not None else frozenset()
        return [polled, *self.waits.observe(view, waiting, self.tracker.held(), now, nodes)]

    # ---------------------------------------------------------------- what is decided

    def moved(self, asked: Sequence[Demand]) -> bool:
        """Whether the runs want other engines than when it was last decided."""
        return _shape(asked) != self._decided_on

    def environments_moved(self, asked: Sequence[EnvironmentDemand]) -> bool:
        """Whether they want another number of environment workers."""
        return _workers(asked) != self._environments_decided_on

    def take_demand(
        self, asked: Sequence[Demand], most_gpus: Callable[[str], int | None], refused: str, now: float
    ) -> list[Demand]:
        """What the runs may have of what they ask for. `most_gpus`: by owner. `refused`: why nothing may be harvested at all."""
        self._decided_on = _shape(asked)
        self._owners |= {want.run_id: want.owner for want in asked}
        demand = within_owners(asked, most_gpus)
        if refused:
            return [replace(d, engines=0, reason=refused) for d in demand]
        self.tracker.health.owners = self._owners
        return without_failing(self.tracker.health, demand, self.tracker.jobs({}), now)

    def decide(
        self,
        view: ClusterView,
        demand: Sequence[Demand],
        leases: Leases,
        limits: HarvestLimits,
        min_expected_life: float | None,
        now: float,
    ) -> HarvestDecision:
        """What to do, on a whole view. `min_expected_life` None: an idle GPU is taken whatever its age."""
        if min_expected_life is not None:
            self.idling.observe(view, limits.partition, self.tracker.held(), now)
            limits = replace(limits, idle=self.idling.known(min_expected_life, now))
        if limits.division is not None:
            limits = replace(limits, waiting_since=self._waiting(demand, now))
        if limits.hands is not None:
            switch_s, start_s = self.tracker.predicted_s(now)
            build_s, ready_s = self.tracker.predicted_builds_s(now)
            hands = replace(
                limits.hands,
                switch_s=switch_s,
                start_s=start_s,
                build_s=build_s,
                ready_s=ready_s,
                no_builds=self.tracker.no_builds(now),
                stuck=self.tracker.stuck(now),
            )
            limits = replace(limits, hands=hands)
        if limits.lending is not None:
            held = {intent: held for intent, held in leases.items() if intent.startswith(LENT_INTENT)}
            lending = replace(
                limits.lending,
                loans=dict(self._loans),
                barred=dict(self._barred),
                held=held,
                paused=dict(self._paused),
            )
            limits = replace(limits, lending=lending if lending.slots or self._loans else None)
        if not self.steers:
            limits = replace(limits, placement=replace(limits.placement, standby_jobs=0))
        view = _without(view, self.environments)  # where one of them waits, no other user is about to begin
        return decide.decide(view, demand, self.tracker.jobs(leases, self._owners), limits, now)

    def decide_environments(
        self,
        view: ClusterView,
        demand: Sequence[EnvironmentDemand],
        limits: HarvestLimits,
        most: EnvironmentLimits,
        now: float,
    ) -> EnvironmentDecision:
        """What to do about environment workers, on the same view. `limits`: as engines', but for what their jobs' failures say."""
        self._environments_decided_on = _workers(demand)
        if limits.restrictions.not_before < math.inf:  # else an admin has paused all
            not_before, why = self.environments.health.backoff()
            own = replace(limits.restrictions, not_before=not_before, not_before_reason=why)
            limits = replace(limits, restrictions=own)
        jobs, engines = self.environments.jobs({}, self._owners), self.tracker.held()
        view = _without(view, self.tracker)
        return decide_environments(view, demand, jobs, engines, limits, most, now)

    def perform_environments(self, decision: EnvironmentDecision, now: float) -> Procedure[None]:
        """Carry it out, as `perform`."""
        inputs = as_json({"decision": decision.reason})
        if not decision.actions:
            if decision.reason != self._last_environments:
                why, code = decision.reason, decision.code
                yield Report([rec.Decision(ENVIRONMENT, "none", "", why, inputs, now, code)])
            self._last_environments = decision.reason
            return
        self._last_environments = ""
        leaving = [action for action in decision.actions if not isinstance(action, Submit)]
        yield from self.cancel(leaving, inputs, now)
        for action in decision.actions:
            if isinstance(action, Submit):
                confirmed = yield Confirm()
                if not confirmed.done or not (yield from self._submit(action, inputs, confirmed.now)):
                    return

    def _kind_of(self, intent_id: str) -> tuple[str, Tracker]:
        """Who decided about it, and who follows it."""
        if intent_id in self.environments.intents:
            return ENVIRONMENT, self.environments
        return "harvest", self.tracker

    @property
    def owners(self) -> Mapping[int, str]:
        """By run: whose it is, of those that asked for engines since the daemon began."""
        return self._owners

    def _waiting(self, demand: Sequence[Demand], now: float) -> tuple[tuple[int, float], ...]:
        """Since when each run has wanted engines while none of its own ran."""
        serve = {
            job.run_id for job in self.tracker.jobs({}) if not job.waits and job.drain_kind is DrainKind.NO
        }
        wait = {want.run_id for want in demand if want.engines > 0} - serve
        self._without = {run_id: self._without.get(run_id, now) for run_id in sorted(wait)}
        return tuple(self._without.items())

    # ---------------------------------------------------------------- what is done

    def perform(
        self, decision: HarvestDecision, demand: Sequence[Demand], orphaned_jobs: tuple[int, ...], now: float
    ) -> Procedure[None]:
        """Carry out all of it, unless it no longer holds between two starts. Raises `ClusterError` when Slurm does not answer, or refuses
        a cancellation: what is left is decided afresh."""
        yield from self._cancel_orphaned(orphaned_jobs, now)
        asked = [[d.run, d.engines, d.gpus] for d in demand]
        facts: dict[str, object] = {
            "decision": decision.reason,
            "demand": asked,
            "start_benefits": decision.start_benefits,
        }
        if decision.division is not None:
            facts["division"] = decision.division.rows
        inputs = as_json(facts)
        if decision.division is not None and dict(decision.division.engines) != self._divided:
            self._divided = dict(decision.division.engines)
            why = decision.division.reason
            yield Report([rec.Decision("harvest", "divide", "", why, inputs, now, HarvestCode.DIVISION)])
        if not decision.actions:
            if decision.reason != self._last_reason:
                yield Report(
                    [rec.Decision("harvest", "none", "", decision.reason, inputs, now, decision.code)]
                )
            self._last_reason = decision.reason
            return
        self._last_reason = ""
        for action in decision.actions:
            if isinstance(action, DrainAllocated):
                now = (yield self.drain(action, inputs, now)).now
        cancels = [action for action in decision.actions if isinstance(action, CancelPending | Cancel)]
        now = yield from self.cancel(cancels, inputs, now)
        for action in decision.actions:
            if isinstance(action, ChangeHands):
                now = yield from self._change_hands(action, inputs, now)
            elif isinstance(action, EndLoan):
                now = (yield self._end_loan(action, inputs, now)).now
            elif isinstance(action, BeginLoan):
                now = yield from self._lend(action, inputs, now)
        starts = [action for action in decision.actions if isinstance(action, Submit | Release)]
        for number, action in enumerate(starts):
            if number:
                confirmed = yield Confirm()
                if not confirmed.done:
                    return
                now = confirmed.now
            if isinstance(action, Release):
                yield from self._release(action, inputs, now)
            elif not (yield from self._submit(action, inputs, now)):
                return  # one that fails says enough about the next

    def drain(self, action: DrainAllocated, inputs: str, now: float) -> Report:
        """Ask an engine to leave. Needs no Slurm."""
        self.tracker.revoke(action.intent_id, DrainKind.DRAINING, action.reason, now, action.code)
        return Report(
            [_decided(action, action.intent_id, inputs, now)],
            [IntentRevoked(action.intent_id, action.reason)],
        )

    def _change_hands(self, action: ChangeHands, inputs: str, now: float) -> Procedure[float]:
        """Have an engine go on for another run. Where that does not become durable, or its key does not get to it, all stays as it was.
        Returns when it was done."""
        one = self.tracker.intents[action.intent_id]
        before, key_before = one.intended.run_id, one.intended.worker_key
        public_key = self._mint_again(action.run, action.intent_id)
        since = one.run_since or one.intended.at
        changed = rec.JobChangedHands(action.intent_id, action.run_id, public_key, before, since, now)
        outcome = yield Commit([changed, _decided(action, action.intent_id, inputs, now)])
        why = "the ledger is stalled" if not outcome.done else ""
        if not why:
            outcome = yield ChangeKey(action.intent_id)
            why = outcome.error.cause if outcome.error is not None else ""
        if why:
            at = outcome.now
            undone = rec.JobChangedHands(action.intent_id, before, key_before, action.run_id, now, at)
            event = rec.Event("hands_not_changed", before, action.intent_id, why, "{}", at)
            yield Report([undone, event])
            one.run_since = at
            return at
        self.tracker.changes_hands(action.intent_id, action.run_id, public_key, now, builds=action.builds)
        self._takes_borrower_along(action.intent_id, outcome.now)
        order = IntentHandedOver(action.intent_id, public_key, action.reason)
        return (yield Report([], [order])).now

    def _lend(self, action: BeginLoan, inputs: str, now: float) -> Procedure[float]:
        """Let a run borrow slots of an engine. Where its key does not get there nothing is lent. Returns when it was done."""
        borrower = lent(action.intent_id)
        public_key = self._mint_again(action.run, borrower)
        outcome = yield Commit([_decided(action, action.intent_id, inputs, now)])
        why = "the ledger is stalled" if not outcome.done else ""
        if not why:
            outcome = yield ChangeKey(borrower)
            why = outcome.error.cause if outcome.error is not None else ""
        if why:
            self._barred[action.intent_id, action.run_id] = outcome.now + BARRED_S
            yield DropKey(borrower)
            event = rec.Event("slots_not_lent", action.run_id, action.intent_id, why, "{}", outcome.now)
            return (yield Report([event])).now
        lender = self.tracker.intents[action.intent_id]
        lender.lent_to = action.run
        of = lender.intended.run_id
        owners = self._owners.get(of, ""), self._owners.get(action.run_id, "")
        self._loans[action.intent_id] = Loan(
            action.run_id, action.run, action.slots, outcome.now, lender=of, owners=owners
        )
        order = SlotsLent(action.intent_id, public_key, action.run, action.slots, action.reason)
        return (yield Report([], [order])).now

    def _end_loan(self, action: EndLoan, inputs: str, now: float) -> Report:
        """Ask the borrower to leave. Its key still opens what it needs to say goodbye. Of a loan that is over already nothing is done."""
        loan = self._loans.get(action.intent_id)
        if loan is None or loan.ended_at:
            return Report([])
        self._loans[action.intent_id] = replace(loan, ended_at=now)
        if action.short:
            self._paused[loan.pair] = LoanPause(action.short, now + action.pause_s)
        else:
            self._paused.pop(loan.pair, None)
        if action.came_to_nothing:
            self._barred[action.intent_id, loan.run_id] = now + BARRED_S
        leaves = IntentRevoked(lent(action.intent_id), action.reason)
        return Report([_decided(action, action.intent_id, inputs, now)], [leaves])

    def settle_loans(self, open_runs: Set[int], now: float) -> Procedure[None]:
        """End loans to runs that are not open, and drop those that are over. It needs no view and no Slurm: call it each cycle, also where
        no poll succeeds."""
        for intent_id, loan in sorted(self._loans.items()):
            if not loan.ended_at and loan.run_id not in open_runs:
                why = f"run {loan.run}, to which {loan.slots} slots were lent, is not open"
                before = self._paused.get(loan.pair)
                end = ended(intent_id, loan, why, before, now, came_to_nothing=False)
                now = (yield self._end_loan(end, "{}", now)).now
        yield from self._drop_loans(now)

    def _drop_loans(self, now: float) -> Procedure[None]:
        """Loans whose borrowers had time to leave, and those of engines that are gone: the keys open nothing any more."""
        for intent_id, loan in sorted(self._loans.items()):
            gone = intent_id not in self.tracker.intents
            if gone or (loan.ended_at and now - loan.ended_at >= LEAVES_S):
                self._dropped[intent_id] = self._loans.pop(intent_id)
                yield DropKey(lent(intent_id))
                yield Report([], [SlotsLent(intent_id, "", "", 0, "the loan is over")])
        self._barred = {key: until for key, until in self._barred.items() if until > now}
        # What is held against a pair is forgotten when it had time for a loan that is not short.
        self._paused = {pair: one for pair, one in self._paused.items() if now < one.until + BARRED_S}

    def _forget_dropped(self) -> None:
        """Loans that were dropped before this view: an engine that died meanwhile has been seen, and its borrower's samples may have killed
        it. One that dies later did not die of them."""
        for intent_id in self._dropped:
            if intent_id not in self._loans and intent_id in self.tracker.intents:
                self.tracker.intents[intent_id].lent_to = ""
        self._dropped.clear()

    def _borrowers_gone(self, gone: Sequence[JobGone], now: float) -> list[JobGone]:
        """An engine's process that ended took its borrower along."""
        for one in gone:
            loan = self._loans.get(one.intent_id) or self._dropped.get(one.intent_id)
            if one.crashed and loan is not None:
                # Its samples may have killed the engine, for which no node is blamed: so these two wait.
                before = self._paused.get(loan.pair)
                self._paused[loan.pair] = LoanPause(1 + (before.short if before else 0), now + BARRED_S)
        mine = [one for one in gone if self._takes_borrower_along(one.intent_id, now)]
        return [replace(one, intent_id=lent(one.intent_id), crashed=False) for one in mine]

    def _takes_borrower_along(self, intent_id: str, now: float) -> bool:
        """Whether this engine, which ends or changes hands, has lent slots: the loan is over by that."""
        if (loan := self._loans.get(intent_id)) is None:
            return False
        self._loans[intent_id] = replace(loan, ended_at=loan.ended_at or now)
        return True

    def cancel(self, actions: Sequence[CancelPending | Cancel], inputs: str, now: float) -> Procedure[float]:
        """Cancel jobs with one command. What has no id yet is remembered, and cancelled when it turns up. Returns when it was done."""
        if not actions:
            return now
        kinds = {action.intent_id: self._kind_of(action.intent_id) for action in actions}
        yield Report(
            [
                _decided(action, action.intent_id, inputs, now, kinds[action.intent_id][0])
                for action in actions
            ]
        )
        ids = {name: tracker.intents[name].job_id for name, (_, tracker) in kinds.items()}
        for action in actions:
            if not ids[action.intent_id]:
                kinds[action.intent_id][1].revoke(action.intent_id, DrainKind.DRAINING, action.reason, now)
        if known := tuple(sorted(job_id for job_id in ids.values() if job_id)):
            # A daemon that another one replaced meanwhile is fenced here, before it takes that one's jobs away. A stalled ledger does
            # not keep our engines on GPUs that others wait for: that a job was cancelled the queue tells as well.
            yield Commit([])
            now = _unless_failed((yield CancelJobs(known)))
        for action in actions:
            if ids[action.intent_id]:
                kinds[action.intent_id][1].revoke(action.intent_id, DrainKind.CANCELLED, action.reason, now)
        return now

    def _cancel_orphaned(self, job_ids: tuple[int, ...], now: float) -> Procedure[None]:
        if not job_ids:
            return
        why = "it carries this ledger's id and an intent that the ledger does not have open"
        committed = yield Commit(
            [rec.Event("orphaned_job_cancelled", 0, f"job {job_id}", why, "{}", now) for job_id in job_ids]
        )
        if committed.done:  # else they may be a successor's, of whom we cannot know
            _unless_failed((yield CancelJobs(job_ids)))

    def _release(self, action: Release, inputs: str, now: float) -> Procedure[None]:
        """Let a waiting job begin. One that Slurm does not let us steer is cancelled, and there are no standby jobs from then on."""
        one = self.tracker.intents[action.intent_id]
        yield Commit([_decided(action, action.intent_id, inputs, now)])  # who was replaced is fenced here
        outcome = yield ReleaseJob(one.job_id, action.node)
        match outcome.error:
            case None:
                self.tracker.released(action.intent_id, action.node, outcome.now)
            case ClusterUnavailable():
                raise outcome.error
            case refusal:
                self.steers = False
                why = f"job {one.job_id} was not released to {action.node}: {refusal.cause}"
                run_id = one.intended.run_id
                yield Report([rec.Event("release_refused", run_id, action.intent_id, why, "{}", outcome.now)])
                yield from self.cancel(
                    [CancelPending(action.intent_id, why, HarvestCode.STANDBY)], inputs, outcome.now
                )

    def _submit(self, action: Submit, inputs: str, now: float) -> Procedure[bool]:
        """Submit one job. The intent is durable before Slurm can know of it. False when Slurm did not take it."""
        if not RUN_NAME.fullmatch(action.run):
            # It is refused where runs are opened; a ledger may be older than that. Nobody else's jobs wait for it.
            if action.run_id not in self._refused_names:
                self._refused_names.add(action.run_id)
                why = "no job can carry this name"
                yield Report([rec.Event("run_name_refused", action.run_id, repr(action.run), why, "{}", now)])
            return True
        kind, policy, tracker = ENGINE, "harvest", self.tracker
        if action.environment:
            kind, policy, tracker = ENVIRONMENT, ENVIRONMENT, self.environments
        intent_id, public_key = self._mint("" if action.environment else action.run)
        intended = rec.JobIntended(
            intent_id,
            action.run_id,
            action.partition,
            action.gpus * action.nodes,
            public_key,
            now,
            ",".join(action.nodelist),
            action.nodes,
            kind=kind,
        )
        committed = yield Commit([intended, _decided(action, intent_id, inputs, now, policy)])
        tracker.intend(intended, committed.now, standby=action.standby)
        if not committed.done:
            # Slurm never hears of it: the intent, should it become durable yet, is followed by its end
            why = "the ledger is stalled: the intent is not durable"
            yield _concluded(tracker.submit_refused(intent_id, why, committed.now))
            return False
        answer = yield SubmitJob(intent_id, action)
        match answer.error:
            case None:
                output = tracker.submitted(intent_id, answer.job_id, answer.now)
            case SubmitUnknown() | ClusterUnavailable() as error:
                output = tracker.submit_unknown(intent_id, error.cause, answer.now)
            case error:
                output = tracker.submit_refused(intent_id, error.cause, answer.now)
        yield _concluded(output)
        return answer.error is None


def _unless_failed(outcome: Outcome) -> float:
    """When it was done. Raises what kept it from being done."""
    if outcome.error is not None:
        raise outcome.error
    return outcome.now


def _concluded(output: Output) -> Report:
    return Report(output.records, output.gone)


def _decided(
    action: Action, intent_id: str, inputs: str, now: float, policy: str = "harvest"
) -> rec.Decision:
    """The record of one action."""
    names = {
        Submit: "submit",
        Release: "release",
        CancelPending: "cancel_pending",
        DrainAllocated: "drain",
        Cancel: "cancel",
        ChangeHands: "change_hands",
        BeginLoan: "lend_slots",
        EndLoan: "end_loan",
    }
    return rec.Decision(policy, names[type(action)], intent_id, action.reason, inputs, now, action.code)


def _without(view: ClusterView, tracker: Tracker) -> ClusterView:
    """A view without these jobs of ours."""
    ids = tracker.job_ids()
    return replace(view, jobs=tuple(job for job in view.jobs if job.job_id not in ids)) if ids else view


def _workers(demand: Sequence[EnvironmentDemand]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((one.run_id, one.workers) for one in demand))


def _of_environments(record: rec.Record) -> bool:
    """What an environment worker's job tells of itself, and not of engines: it is allocated no GPU, and says nothing of its node."""
    if isinstance(record, rec.Event):
        return not record.kind.startswith("node_")
    return isinstance(record, rec.JobSubmitted | rec.JobObserved | rec.JobEnded)


def _shape(demand: Sequence[Demand]) -> tuple[tuple[int, int, int, int], ...]:
    return tuple(sorted((d.run_id, d.engines, d.gpus_per_engine, d.nodes_per_engine) for d in demand))


def as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
