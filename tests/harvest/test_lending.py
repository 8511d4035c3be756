"""Engines that lend slots: which engine lends to which run and why, when a loan ends, and in which order it is done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scavenger.errors import ClusterError
from scavenger.harvest.decide.actions import (
    Action,
    BeginLoan,
    DrainKind,
    EndLoan,
    HarvestCode,
    LendingRules,
    Loan,
    OurJob,
    OwnerRule,
)
from scavenger.harvest.decide.decide import decide
from scavenger.harvest.decide.lending import BARRED_S, HOLD_S, LEAVES_S, REGISTERS_S, lent, saving
from scavenger.harvest.execute.edges import RouterLink, WorkerKeys
from scavenger.harvest.session import ChangeKey, Command, Commit, DropKey, HarvestSession, Outcome, Report
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import Benefit, Demand
from scavenger.protocol import keys
from scavenger.router.core.events import IntentRevoked, JobGone, PeerIdentity, SlotsLent
from tests.harvest.test_session import A, perform, records, session
from tests.harvest.test_yielding import LIMITS, NOW, engine, listed
from tests.harvest.views import node, view

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
        ([run(1, queued=11), run(2, queued=5)], lending()),  # one it has: there is room for all of them
        ([run(1), run(2, queued=5)], lending(held=(0, NOW - 300))),
        ([run(1), run(2, queued=5)], lending(NOW - REGISTERS_S + 1, None)),
    ],
)
def test_until_then_it_lasts(demand: list[Demand], rules: LendingRules) -> None:
    assert decided([of_run(1)], demand, rules) == []


# ---------------------------------------------------------------- in which order it is done

LEND = BeginLoan(A, 2, "run2", SLOTS, "run2's samples wait")
END = EndLoan(A, "run1's samples wait")


def lender() -> HarvestSession:
    one = session(A)
    one._mint_again = lambda run, intent_id: f"key of {run} for {intent_id}"
    return one


def events(commands: list[Command]) -> list[object]:
    return [event for command in commands if isinstance(command, Report) for event in command.events]


def test_the_decision_is_durable_before_the_key_and_the_key_is_there_before_the_order() -> None:
    one = lender()
    found = perform(one, LEND)
    assert [type(command) for command in found] == [Commit, ChangeKey, Report]
    (decision,) = records(found)
    assert isinstance(decision, rec.Decision)
    assert (decision.action, decision.subject, decision.reason) == ("lend_slots", A, LEND.reason)
    assert found[1] == ChangeKey(lent(A))
    assert events(found) == [SlotsLent(A, f"key of run2 for {lent(A)}", "run2", SLOTS, LEND.reason)]
    assert one._loans[A] == Loan(2, "run2", SLOTS, 12.0)


@pytest.mark.parametrize("why", ["ledger", "key"])
def test_where_it_cannot_be_done_nothing_is_lent_and_it_is_not_tried_again_at_once(why: str) -> None:
    def reply(command: Command, now: float) -> Outcome:
        if why == "ledger":
            return Outcome(now, done=not isinstance(command, Commit))
        return Outcome(now, error=ClusterError("no space") if isinstance(command, ChangeKey) else None)

    one = lender()
    found = perform(one, LEND, reply=reply)
    assert events(found) == []
    assert DropKey(lent(A)) in found, "the key of nobody lies nowhere"
    event = records(found)[-1]
    assert isinstance(event, rec.Event)
    assert event.kind == "slots_not_lent"
    assert not one._loans
    assert one._barred[A, 2] > BARRED_S


def test_at_its_end_the_borrower_is_asked_to_leave_first_and_its_key_goes_once_it_had_time_to() -> None:
    one = lender()
    perform(one, LEND)
    found = perform(one, END)
    assert events(found) == [IntentRevoked(lent(A), END.reason)]
    assert not [command for command in found if isinstance(command, DropKey)]
    soon: list[Command] = list(one._drop_loans(one._loans[A].ended_at + LEAVES_S - 1))
    assert soon == []
    dropped = list(one._drop_loans(one._loans[A].ended_at + LEAVES_S))
    assert dropped[0] == DropKey(lent(A))
    assert events(dropped) == [SlotsLent(A, "", "", 0, "the loan is over")]
    assert not one._loans


def test_an_engine_that_ends_takes_its_borrower_along() -> None:
    one = lender()
    perform(one, LEND)
    gone = [JobGone(A, 0, "preempted", crashed=True), JobGone("scv-" + "0" * 16, 0, "lost", crashed=False)]
    assert one._borrowers_gone(gone, 20.0) == [JobGone(lent(A), 0, "preempted", crashed=False)]
    assert one._loans[A].ended_at == 20.0


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
