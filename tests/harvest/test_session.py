"""The harvester's session without any IO: which commands a decision becomes, in which order, and what each outcome leads to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from scavenger.errors import ClusterError, ClusterUnavailable, SubmitUnknown
from scavenger.harvest.decide.actions import (
    Action,
    Cancel,
    CancelPending,
    Caps,
    DrainAllocated,
    DrainKind,
    HarvestCode,
    HarvestDecision,
    HarvestLimits,
    JobPlacement,
    Release,
    Submit,
)
from scavenger.harvest.session import (
    CancelJobs,
    Command,
    Commit,
    Confirm,
    HarvestSession,
    Outcome,
    Procedure,
    ReleaseJob,
    Report,
    SubmitJob,
    resume,
)
from scavenger.harvest.track.observed_jobs import Stage
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import Demand
from scavenger.router.core.events import IntentRevoked
from tests.harvest.views import intended, node, ours, view
from tests.harvest.watch import RULES

A, B, C = (f"scv-{number:016x}" for number in (0xA, 0xB, 0xC))
SUBMIT = Submit(1, "run", "scavenge", 1, "one is useful", ("node1",))

Reply = Callable[[Command, float], Outcome]


def done(command: Command, now: float) -> Outcome:
    return Outcome(now, job_id=7 if isinstance(command, SubmitJob) else 0)


def answered(is_done: bool, _command: Command, now: float) -> Outcome:
    return Outcome(now, done=is_done)


def refusing(kind: type[Command], error: ClusterError) -> Reply:
    return lambda command, now: Outcome(now, error=error) if isinstance(command, kind) else done(command, now)


def session(*mine: str) -> HarvestSession:
    """`mine`: intents whose jobs wait, numbered from 1."""
    minted = iter((C, "scv-000000000000000d", "scv-000000000000000e"))
    made = HarvestSession(RULES, lambda _run: (next(minted), "public"))
    for number, intent_id in enumerate(mine, 1):
        made.tracker.intend(intended(intent_id, 0.0), 0.0)
        made.tracker.submitted(intent_id, number, 0.0)
    return made


def perform(one: HarvestSession, *actions: Action, reply: Reply = done) -> list[Command]:
    """All commands; each takes a second."""
    found: list[Command] = []
    decision = HarvestDecision(actions, "a reason", HarvestCode.WANTED)
    drive(one.perform(decision, [], (), 10.0), found, reply)
    one.tracker.check()
    return found


def drive(procedure: Procedure[object], found: list[Command], reply: Reply) -> None:
    outcome = None
    while (command := resume(procedure, outcome)) is not None:
        found.append(command)
        outcome = reply(command, 10.0 + len(found))


def records(commands: list[Command]) -> list[rec.Record]:
    return [one for command in commands if isinstance(command, Report | Commit) for one in command.records]


def test_drains_come_first_then_one_cancellation_then_starts_with_the_intent_durable_before_its_job() -> None:
    one = session(A, B)
    cancels = CancelPending(A, "not wanted", HarvestCode.SERVED), Cancel(B, "it stays", HarvestCode.OVERDUE)
    found = perform(one, *cancels, SUBMIT, DrainAllocated(B, "not wanted", HarvestCode.SERVED))
    assert [type(command) for command in found] == [
        Report,
        Report,
        Commit,
        CancelJobs,
        Commit,
        SubmitJob,
        Report,
    ]
    drained, _, fence, cancelled, intent, submitted, _ = found
    assert isinstance(drained, Report)
    assert drained.events == [IntentRevoked(B, "not wanted")]
    assert (fence, cancelled) == (Commit([]), CancelJobs((1, 2)))
    assert isinstance(intent, Commit)
    assert intent.records[0] == rec.JobIntended(C, 1, "scavenge", 1, "public", 14.0, "node1")
    assert submitted == SubmitJob(C, SUBMIT)
    assert found[-1] == Report((rec.JobSubmitted(C, 7, 16.0),))
    assert one.tracker.intents[A].drain_kind is DrainKind.CANCELLED
    assert (one.tracker.intents[C].job_id, one.tracker.intents[C].stage) == (7, Stage.WAITING)


def test_between_two_starts_it_asks_whether_the_decision_still_holds() -> None:
    one = session()
    found = perform(
        one,
        SUBMIT,
        SUBMIT,
        SUBMIT,
        reply=lambda command, now: replace(done(command, now), done=not isinstance(command, Confirm)),
    )
    assert [type(command) for command in found] == [Commit, SubmitJob, Report, Confirm]
    assert list(one.tracker.intents) == [C]


@pytest.mark.parametrize(
    ("error", "stays", "kind"),
    [
        (ClusterError("no such account"), False, "submit_refused"),
        (SubmitUnknown("no answer came"), True, "submit_unknown"),
        (ClusterUnavailable("slurmctld does not answer"), True, "submit_unknown"),
    ],
)
def test_a_submission_that_fails_is_the_last_and_one_that_may_have_arrived_is_remembered(
    error: ClusterError, stays: bool, kind: str
) -> None:
    one = session()
    found = perform(one, SUBMIT, SUBMIT, reply=refusing(SubmitJob, error))
    assert [type(command) for command in found] == [Commit, SubmitJob, Report]
    assert (C in one.tracker.intents) == stays
    [event] = [one for one in records(found) if isinstance(one, rec.Event)]
    assert (event.kind, event.reason) == (kind, error.cause)


def test_what_does_not_become_durable_in_time_never_reaches_slurm() -> None:
    one = session()
    found = perform(one, SUBMIT, reply=partial(answered, False))
    assert [type(command) for command in found] == [Commit, Report]
    assert not one.tracker.intents
    assert any(isinstance(one, rec.JobEnded) and one.state == "REFUSED" for one in records(found))


def test_a_cancellation_that_slurm_refuses_ends_the_procedure_and_the_job_counts_as_ours_still() -> None:
    one, found = session(A), list[Command]()
    decision = HarvestDecision(
        (Cancel(A, "it stays", HarvestCode.OVERDUE), SUBMIT), "a reason", HarvestCode.WANTED
    )
    with pytest.raises(ClusterError, match="not yours"):
        drive(one.perform(decision, [], (), 10.0), found, refusing(CancelJobs, ClusterError("not yours")))
    assert found[-1] == CancelJobs((1,))
    assert one.tracker.intents[A].drain_kind is DrainKind.NO


def test_orphaned_jobs_are_cancelled_first_and_only_once_that_is_durable() -> None:
    for durable in (True, False):
        found: list[Command] = []
        nothing = session().perform(HarvestDecision((), "nothing", HarvestCode.NO_RUN), [], (41, 42), 10.0)
        drive(nothing, found, partial(answered, durable))
        assert (CancelJobs((41, 42)) in found) == durable
        assert isinstance(found[0], Commit)


def test_a_standby_job_that_slurm_does_not_let_us_steer_is_cancelled_and_there_are_no_more() -> None:
    one = session(A)
    found = perform(
        one, Release(A, "node1", "it is idle"), reply=refusing(ReleaseJob, ClusterError("access denied"))
    )
    assert [type(command) for command in found] == [Commit, ReleaseJob, Report, Report, Commit, CancelJobs]
    assert one.tracker.intents[A].drain_kind is DrainKind.CANCELLED
    limits = HarvestLimits("scavenge", Caps(4, 4), placement=JobPlacement(standby_jobs=2))
    seen = view(20.0, (ours(A, 1),), [node("node1")])
    wanted = one.take_demand([Demand(1, "run", 3, 1, "three")], lambda _: None, "", 20.0)
    decision = one.decide(seen, wanted, {}, limits, None, 20.0)
    assert not any(isinstance(action, Submit) and action.standby for action in decision.actions)


def test_why_nothing_is_done_is_recorded_once() -> None:
    one = session()
    for reason, told in (("no run is open", 1), ("no run is open", 0), ("it is stopped", 1)):
        found: list[Command] = []
        drive(one.perform(HarvestDecision((), reason, HarvestCode.NO_RUN), [], (), 10.0), found, done)
        assert len(records(found)) == told


def test_a_name_that_no_job_can_carry_keeps_nobody_else_s_job_waiting() -> None:
    one = session()
    found = perform(one, replace(SUBMIT, run="a\nb"), replace(SUBMIT, run="a\nb"), SUBMIT)
    assert [one.action for one in found if isinstance(one, SubmitJob)] == [SUBMIT]
    assert [one.kind for one in records(found) if isinstance(one, rec.Event)] == ["run_name_refused"]
