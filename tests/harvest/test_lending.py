"""Engines that lend slots: which engine lends to which run and why, when a loan ends, and in which order it is done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scavenger.cluster.model import JobState
from scavenger.errors import ClusterError
from scavenger.harvest.decide.actions import (
    Action,
    BeginLoan,
    DrainKind,
    EndLoan,
    HarvestCode,
    LendingRules,
    Loan,
    LoanPair,
    LoanPause,
    OurJob,
    OwnerRule,
)
from scavenger.harvest.decide.decide import decide
from scavenger.harvest.decide.lending import BARRED_S, HOLD_S, LEAVES_S, REGISTERS_S, SHORT_S, lent, saving
from scavenger.harvest.execute.edges import RouterLink, WorkerKeys
from scavenger.harvest.session import ChangeKey, Command, Commit, DropKey, HarvestSession, Outcome, Report
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import Benefit, Demand
from scavenger.protocol import keys
from scavenger.router.core.events import IntentRevoked, JobGone, PeerIdentity, SlotsLent
from tests.harvest.test_session import A, drive, perform, records, session
from tests.harvest.test_yielding import LIMITS, NOW, engine, listed
from tests.harvest.views import node, ours, view

SLOTS = 4
RULES = LendingRules(SLOTS)


def run(run_id: int, engines: int = 1, **more: Any) -> Demand:
    fields: dict[str, Any] = {"owner": f"owner{run_id}", "shares": "one base", "max_batch": 16, **more}
    return Demand(run_id, f"run{run_id}", engines, fields.pop("gpus", 1), f"{engines} are useful", **fields)


def of_run(n: int, run_id: int = 1, **more: Any) -> OurJob:
    return replace(engine(n, started_at=NOW - 500, owner=f"owner{run_id}", **more), run_id=run_id)


def decided(mine: list[OurJob], demand: list[Demand], rules: LendingRules = RULES) -> list[Action]:
    nodes = [node("node1", sum(one.gpus for one in mine), gpus=sum(one.gpus for one in mine))]
    found = decide(
        view(NOW, [listed(one) for one in mine if not one.waits], nodes),
        demand,
        mine,
        replace(LIMITS, lending=rules),
        NOW,
    )
    return [one for one in found.actions if isinstance(one, BeginLoan | EndLoan)]


def gains(saved: float) -> Benefit:
    return Benefit(saved, 8, 1, 60.0)


def test_an_engine_with_slots_to_spare_lends_some_to_a_run_whose_samples_wait() -> None:
    (found,) = decided([of_run(1, leases=3)], [run(1), run(2, queued=12)])
    assert isinstance(found, BeginLoan)
    assert (found.intent_id, found.run_id, found.run, found.slots) == (of_run(1).intent_id, 2, "run2", SLOTS)
    assert found.code is HarvestCode.LENT
    assert found.reason == (
        "4 slots of an engine of run run1 are lent to run run2: 12 samples of run run2 wait, and one engine more would save it 1 "
        "GPU-s a GPU-s; the engine has 3 of 16 samples, none of run run1 waits, and its last engine saves it 1"
    )


def test_the_run_that_one_more_engine_saves_most_borrows_of_the_run_whose_last_engine_saves_least() -> None:
    mine = [of_run(1, 1), of_run(2, 2)]
    demand = [
        run(1, benefit=gains(0.5)),
        run(2, benefit=gains(0.1)),
        run(3, benefit=gains(0.2), queued=5),
        run(4, benefit=gains(0.4), queued=5),
    ]
    assert saving(demand[1], 1) < saving(demand[0], 1)
    found = decided(mine, demand)
    assert [(one.intent_id, one.run_id) for one in found if isinstance(one, BeginLoan)] == [
        (mine[1].intent_id, 4),
        (mine[0].intent_id, 3),
    ]
    (only,) = decided(mine[:1], demand)
    assert isinstance(only, BeginLoan)
    assert only.run_id == 4, "one borrower each"


@pytest.mark.parametrize(
    ("job", "lender", "borrower", "rules"),
    [
        ({"leases": 9}, {}, {}, RULES),
        ({"connected": False}, {}, {}, RULES),
        ({"changing_since": NOW - 1}, {}, {}, RULES),
        ({"drain_kind": DrainKind.DRAINING, "asked_at": NOW - 1}, {}, {}, RULES),
        ({}, {"queued": 1}, {}, RULES),
        ({}, {"max_batch": 1}, {"max_batch": 1}, RULES),
        ({}, {"shares": ""}, {}, RULES),
        ({}, {"shares": "another base"}, {}, RULES),
        ({}, {}, {"shares": ""}, RULES),
        ({}, {}, {"gpus": 2}, RULES),
        ({}, {}, {"queued": 0}, RULES),
        ({}, {}, {"engines": 0}, RULES),
        ({}, {}, {}, LendingRules(0)),
        ({}, {}, {}, replace(RULES, barred={(of_run(1).intent_id, 2): NOW + 1})),
        ({}, {}, {}, replace(RULES, loans={of_run(9).intent_id: Loan(2, "run2", 4, NOW)})),
        ({}, {}, {}, replace(RULES, loans={of_run(1).intent_id: Loan(3, "run3", 4, NOW, NOW)})),
    ],
)
def test_what_is_busy_or_of_another_kind_or_not_allowed_lends_nothing(
    job: dict[str, Any], lender: dict[str, Any], borrower: dict[str, Any], rules: LendingRules
) -> None:
    assert decided([of_run(1, **job)], [run(1, **lender), run(2, **{"queued": 5, **borrower})], rules) == []


def test_a_run_borrows_only_where_its_owner_s_engines_may_be() -> None:
    demand = [run(1), run(2, queued=5)]
    nodes = [replace(node("node1", 1, gpus=1), gpu_type="h100")]
    for types, lends in ((frozenset({"h100"}), True), (frozenset({"a100"}), False)):
        limits = replace(LIMITS, lending=RULES, owners=(OwnerRule("owner2", gpu_types=types),))
        mine = [of_run(1)]
        found = decide(view(NOW, [listed(mine[0])], nodes), demand, mine, limits, NOW)
        assert any(isinstance(one, BeginLoan) for one in found.actions) is lends


def test_never_more_than_half_of_a_batch_is_lent() -> None:
    (found,) = decided([of_run(1)], [run(1, max_batch=4), run(2, max_batch=4, queued=5)])
    assert isinstance(found, BeginLoan)
    assert found.slots == 2


IT = of_run(1).intent_id


def lending(since: float = NOW - 100, held: tuple[int, float] | None = (2, NOW - 50)) -> LendingRules:
    return LendingRules(
        SLOTS, {IT: Loan(2, "run2", SLOTS, since)}, held={lent(IT): held} if held is not None else {}
    )


@pytest.mark.parametrize(
    ("demand", "rules", "why", "came_to_nothing"),
    [
        ([run(1, queued=12), run(2, queued=5)], lending(), "12 samples of it wait", False),
        ([run(1)], lending(), "wants no engine, or is not open", False),
        ([run(1), run(2, 0, queued=5)], lending(), "wants no engine, or is not open", False),
        ([run(1), run(2, shares="")], lending(), "no longer shares engines", False),
        ([run(1), run(2)], lending(held=(0, NOW - HOLD_S)), "has had no sample in the slots", False),
        ([run(1), run(2, queued=5)], lending(NOW - REGISTERS_S, None), "no engine of run run2 is in", True),
        ([run(1), run(2, queued=5)], replace(lending(), slots=0), "harvest.lend_slots is 0", False),
        (
            [run(1), run(2, queued=5)],
            replace(lending(), slots=3),
            "harvest.lend_slots is 3, and 4 slots",
            False,
        ),
    ],
)
def test_when_a_loan_ends(
    demand: list[Demand], rules: LendingRules, why: str, *, came_to_nothing: bool
) -> None:
    (found,) = decided([of_run(1)], demand, rules)
    assert isinstance(found, EndLoan)
    assert why in found.reason
    assert found.came_to_nothing is came_to_nothing


@pytest.mark.parametrize(
    ("demand", "rules"),
    [
        ([run(1), run(2)], lending()),
        ([run(1), run(2)], lending(held=(0, NOW - HOLD_S + 1))),
        ([run(1), run(2, queued=5)], replace(lending(), slots=SLOTS + 1)),
        ([run(1, queued=11), run(2, queued=5)], lending()),  # one it has: there is room for all of them
        ([run(1), run(2, queued=5)], lending(held=(0, NOW - 300))),
        ([run(1), run(2, queued=5)], lending(NOW - REGISTERS_S + 1, None)),
    ],
)
def test_until_then_it_lasts(demand: list[Demand], rules: LendingRules) -> None:
    assert decided([of_run(1)], demand, rules) == []


TWO = ("owner1", "owner2")


def test_loans_that_are_over_soon_again_and_again_make_their_two_owners_wait_and_no_other() -> None:
    demand = [run(1, queued=12), run(2, queued=5)]
    waited = []
    pause: LoanPause | None = None
    for _ in range(6):
        rules = lending(NOW - SHORT_S + 1)
        loan = replace(rules.loans[IT], lender=1, owners=TWO)
        rules = replace(rules, loans={IT: loan}, paused={loan.pair: pause} if pause else {})
        (found,) = decided([of_run(1)], demand, rules)
        assert isinstance(found, EndLoan)
        pause = LoanPause(found.short, NOW + found.pause_s)
        waited.append(found.pause_s)
        assert ("loans of these two owners in a row" in found.reason) == (found.pause_s > 0)
    assert waited == [0, 60, 120, 240, 480, BARRED_S]
    assert pause is not None
    assert (
        f"6 loans of these two owners in a row were over within 120 s or came to nothing: none for {BARRED_S:g} s"
        in (found.reason)
    )
    rules = replace(RULES, paused={TWO: pause})
    assert decided([of_run(1)], [run(1), run(2, queued=5)], rules) == []
    for other in ([run(1), run(3, queued=5)], [run(2, queued=5), run(3)]):
        lender = of_run(1, other[0].run_id) if not other[0].queued else of_run(1, 3)
        (lends,) = decided([lender], other, rules)
        assert isinstance(lends, BeginLoan)
    again = [run(1), run(7, owner="owner2", queued=5)]
    assert decided([of_run(1)], again, rules) == [], "another run of the same owner has not waited"
    over = replace(RULES, paused={TWO: LoanPause(6, NOW)})
    assert len(decided([of_run(1)], [run(1), run(2, queued=5)], over)) == 1


def test_a_loan_that_lasted_makes_its_runs_wait_for_nothing_and_is_held_against_none() -> None:
    rules = lending(NOW - SHORT_S)
    loan = replace(rules.loans[IT], lender=1, owners=TWO)
    rules = replace(rules, loans={IT: loan}, paused={loan.pair: LoanPause(5, NOW - 1)})
    (found,) = decided([of_run(1)], [run(1, queued=12), run(2, queued=5)], rules)
    assert isinstance(found, EndLoan)
    assert (found.short, found.pause_s) == (0, 0.0)


# ---------------------------------------------------------------- in which order it is done

BEGIN = BeginLoan(A, 2, "run2", SLOTS, "run2's samples wait")
END = EndLoan(A, "run1's samples wait")


def lender() -> HarvestSession:
    one = session(A)
    one._mint_again = lambda run, intent_id: f"key of {run} for {intent_id}"
    return one


def events(commands: list[Command]) -> list[object]:
    return [event for command in commands if isinstance(command, Report) for event in command.events]


def test_the_decision_is_durable_before_the_key_and_the_key_is_there_before_the_order() -> None:
    one = lender()
    found = perform(one, BEGIN)
    assert [type(command) for command in found] == [Commit, ChangeKey, Report]
    (decision,) = records(found)
    assert isinstance(decision, rec.Decision)
    assert (decision.action, decision.subject, decision.reason) == ("lend_slots", A, BEGIN.reason)
    assert found[1] == ChangeKey(lent(A))
    assert events(found) == [SlotsLent(A, f"key of run2 for {lent(A)}", "run2", SLOTS, BEGIN.reason)]
    assert one._loans[A] == Loan(2, "run2", SLOTS, 12.0, lender=1)


@pytest.mark.parametrize("why", ["ledger", "key"])
def test_where_it_cannot_be_done_nothing_is_lent_and_it_is_not_tried_again_at_once(why: str) -> None:
    def reply(command: Command, now: float) -> Outcome:
        if why == "ledger":
            return Outcome(now, done=not isinstance(command, Commit))
        return Outcome(now, error=ClusterError("no space") if isinstance(command, ChangeKey) else None)

    one = lender()
    found = perform(one, BEGIN, reply=reply)
    assert events(found) == []
    assert DropKey(lent(A)) in found, "the key of nobody lies nowhere"
    event = records(found)[-1]
    assert isinstance(event, rec.Event)
    assert event.kind == "slots_not_lent"
    assert not one._loans
    assert one._barred[A, 2] > BARRED_S


def test_at_its_end_the_borrower_is_asked_to_leave_first_and_its_key_goes_once_it_had_time_to() -> None:
    one = lender()
    perform(one, BEGIN)
    found = perform(one, END)
    assert events(found) == [IntentRevoked(lent(A), END.reason)]
    assert not [command for command in found if isinstance(command, DropKey)]
    assert one.tracker.intents[A].lent_to == "run2"
    soon: list[Command] = list(one._drop_loans(one._loans[A].ended_at + LEAVES_S - 1))
    assert soon == []
    dropped = list(one._drop_loans(one._loans[A].ended_at + LEAVES_S))
    assert dropped[0] == DropKey(lent(A))
    assert events(dropped) == [SlotsLent(A, "", "", 0, "the loan is over")]
    assert one.tracker.intents[A].lent_to == "run2", "what became of its engine meanwhile the next view shows"
    one.observe(
        view(40.0, [ours(A, 1, JobState.RUNNING, nodes=("node1",), start_time=1.0)]), {}, (), (), 40.0
    )
    assert one.tracker.intents[A].lent_to == ""
    assert not one._loans


def test_an_engine_that_ends_takes_its_borrower_along() -> None:
    one = lender()
    perform(one, BEGIN)
    gone = [JobGone(A, 0, "preempted", crashed=True), JobGone("scv-" + "0" * 16, 0, "lost", crashed=False)]
    assert one._borrowers_gone(gone, 20.0) == [JobGone(lent(A), 0, "preempted", crashed=False)]
    assert one._loans[A].ended_at == 20.0


def test_the_session_remembers_which_runs_loans_were_short_until_one_lasts_or_time_passes() -> None:
    one = lender()
    perform(one, BEGIN)
    perform(one, replace(END, short=2, pause_s=60.0))
    (at,) = (pause.until - 60.0 for pause in one._paused.values())
    assert one._paused == {(1, 2): LoanPause(2, at + 60.0)}
    assert list(one._drop_loans(at + 60.0 + BARRED_S - 1)) != []
    assert one._paused
    assert list(one._drop_loans(at + 60.0 + BARRED_S)) == []
    assert not one._paused
    perform(one, BEGIN)
    perform(one, replace(END, short=1))
    list(one._drop_loans(one._loans[A].ended_at + LEAVES_S))
    perform(one, BEGIN)
    perform(one, END)
    assert not one._paused


def test_the_end_of_a_loan_that_is_over_or_never_was_does_nothing() -> None:
    one = lender()
    assert events(perform(one, END)) == []
    perform(one, BEGIN)
    assert len(events(perform(one, END))) == 1
    assert events(perform(one, END)) == []


def test_a_loan_to_a_run_that_is_not_open_any_more_ends_and_is_dropped_without_a_poll() -> None:
    one = lender()
    perform(one, BEGIN)
    assert list(one.settle_loans({1, 2}, 20.0)) == []
    found: list[Command] = []
    drive(one.settle_loans({1}, 20.0), found, lambda _command, now: Outcome(now))
    (left,) = events(found)
    assert left == IntentRevoked(lent(A), "run run2, to which 4 slots were lent, is not open")
    assert [one.action for one in records(found) if isinstance(one, rec.Decision)] == ["end_loan"]
    assert list(one.settle_loans({1}, 20.0 + LEAVES_S - 1)) == []
    dropped = list(one.settle_loans({1}, one._loans[A].ended_at + LEAVES_S))
    assert dropped[0] == DropKey(lent(A))
    assert not one._loans


@pytest.mark.parametrize("another", [False, True])
def test_a_run_that_is_closed_and_opened_again_and_again_does_not_get_round_the_pause(another: bool) -> None:
    """Each loan has its borrower pull a base beside the lender's samples, and its end has vLLM compute their entries once more.
    `another`: run after run of one owner, each new."""
    one = lender()
    loans, pauses = 0, list[float]()
    now = 12.0
    while now < 1200.0:
        run_id = 2 + loans * another
        demand = [run(1), run(run_id, owner="mallory", queued=5)]
        one.take_demand(demand, lambda _owner: None, "", now)
        paused = dict(one._paused)
        if begins := decided([of_run(1)], demand, replace(RULES, paused=_at(paused, now))):
            assert isinstance(begins[0], BeginLoan)
            perform(one, replace(BEGIN, run_id=run_id))
            one._loans[A] = replace(one._loans[A], since=now)
            loans += 1
            now += 10.0
            drive(one.settle_loans({1}, now), [], lambda _command, now: Outcome(now))
            now += LEAVES_S
            drive(one.settle_loans({1}, now), [], lambda _command, now: Outcome(now))
            pauses.append(max((each.until - now for each in one._paused.values()), default=0.0))
        else:
            now += 10.0
    assert loans <= 6, pauses


def _at(paused: dict[LoanPair, LoanPause], now: float) -> dict[LoanPair, LoanPause]:
    """As they are for a decision at `NOW`."""
    return {pair: replace(one, until=one.until - now + NOW) for pair, one in paused.items()}


def test_an_engine_that_dies_while_it_lends_has_neither_its_node_nor_its_run_blamed_and_its_runs_wait() -> (
    None
):
    """A borrower's sample may have killed it; three such deaths would quarantine the node for the lender too. Polls are a minute apart: the
    loan may be over when its engine's death shows."""
    for lends, over in ((True, False), (True, True), (False, False)):
        one = lender()
        if lends:
            perform(one, BEGIN)
        running = ours(A, 1, JobState.RUNNING, nodes=("node1",), start_time=1.0)
        one.observe(view(13.0, [running]), {}, (), (), 13.0)
        assert one.tracker.intents[A].lent_to == ("run2" if lends else "")
        if over:
            perform(one, END)
            list(one.settle_loans({1, 2}, one._loans[A].ended_at + LEAVES_S))
            assert not one._loans
        failed = ours(A, 1, JobState.FAILED, exit_code=1, nodes=("node1",), start_time=1.0, end_time=14.0)
        found = one.observe(view(15.0, [failed]), {}, (), (), 15.0)
        health = one.tracker.health
        assert bool(health._nodes) is not lends
        assert (health.backoff_of(1)[0] > 0) is not lends
        (died,) = [
            event for event in found.records if isinstance(event, rec.Event) and event.kind == "engine_died"
        ]
        assert (
            "it lent slots to run run2, so neither its node nor its own run is blamed" in died.reason
        ) is lends
        assert one._paused == ({(1, 2): LoanPause(1, 15.0 + BARRED_S)} if lends else {})


def test_a_borrower_s_key_lies_beside_the_engine_s_and_opens_nothing_after_the_loan(tmp_path: Path) -> None:
    allowed: dict[str, PeerIdentity] = {}
    link = RouterLink(
        post=lambda _event: None,
        demand=list,
        leases=dict,
        register=allowed.__setitem__,
        unregister=lambda public: allowed.pop(public, None),  # type: ignore[arg-type,return-value]  # what it gives back is dropped
    )
    mine = WorkerKeys(tmp_path, link)
    public = mine.mint("run2", lent(A))
    mine.write(lent(A))
    mine.allow(lent(A))
    path = keys.lent_key_path(keys.worker_key_path(tmp_path, A))
    assert (keys.read_keypair(path).public, keys.read_keypair(path).run) == (public, "run2")
    assert allowed[public] == PeerIdentity("worker", public, "run2", lent(A))
    mine.drop(lent(A))
    assert not path.exists()
    assert not allowed
    mine.mint("run2", lent(A))
    mine.write(lent(A))
    WorkerKeys(tmp_path, link).drop_stale({A})
    assert not path.exists(), "a daemon that starts ends what was lent before"
