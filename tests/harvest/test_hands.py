"""Engines that change hands: which ones do, what is durable before they do, and which key opens what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scavenger.cluster.model import Job
from scavenger.errors import AuthError, ClusterError
from scavenger.harvest.decide.actions import (
    Action,
    Cancel,
    ChangeHands,
    DrainAllocated,
    DrainKind,
    HandsRules,
    HarvestCode,
    HarvestDecision,
    HarvestLimits,
    OurJob,
    OwnerRule,
    Submit,
)
from scavenger.harvest.decide.decide import decide
from scavenger.harvest.decide.drain import HANDS_S
from scavenger.harvest.execute.edges import RouterLink, WorkerKeys
from scavenger.harvest.limits import hands_rules
from scavenger.harvest.session import ChangeKey, Command, Commit, Outcome, Report
from scavenger.ledger import records as rec
from scavenger.policy.division import DivisionRules
from scavenger.policy.fleet_size import Demand
from scavenger.protocol import keys
from scavenger.router.core.events import IntentHandedOver, PeerIdentity, WorkerLife
from tests.harvest.test_session import A, perform, records, session
from tests.harvest.test_yielding import LIMITS, NOW, engine, listed
from tests.harvest.views import job, node, ours, view
from tests.harvest.watch import Watch, running

HANDS = replace(LIMITS, hands=HandsRules())


def wants(engines: int, run_id: int, **more: Any) -> Demand:
    fields: dict[str, Any] = {"owner": f"owner{run_id}", "hands": "one kind", **more}
    return Demand(run_id, f"run{run_id}", engines, fields.pop("gpus", 1), f"{engines} are useful", **fields)


def of_run(n: int, run_id: int = 1, **more: Any) -> OurJob:
    return replace(engine(n, started_at=NOW - 500, owner=f"owner{run_id}", **more), run_id=run_id)


def decided(
    mine: Sequence[OurJob],
    demand: Sequence[Demand],
    limits: HarvestLimits = HANDS,
    others: Sequence[Job] = (),
    full: bool = True,
) -> HarvestDecision:
    """On nodes that our engines fill (`full`): each of them has its GPUs on `node1`."""
    mine_listed = [listed(one) for one in mine if not one.waits]
    gpus = sum(one.gpus for one in mine)
    nodes = [node("node1", gpus, gpus=gpus)] if full else None
    return decide(view(NOW, [*mine_listed, *others], nodes), demand, mine, limits, NOW)


def kinds(actions: Sequence[Action]) -> list[tuple[str, str]]:
    return sorted((type(one).__name__, str(one.code)) for one in actions)


# ---------------------------------------------------------------- who changes hands


def test_what_one_run_has_too_many_of_goes_on_for_the_run_that_wants_more() -> None:
    mine = [of_run(n) for n in range(1, 5)]
    found = decided(mine, [wants(2, 1), wants(2, 2)])
    assert kinds(found.actions) == [("ChangeHands", "handed_over")] * 2
    first = found.actions[0]
    assert isinstance(first, ChangeHands)
    assert (first.run_id, first.run, first.owner) == (2, "run2", "owner2")
    assert "to change hands is predicted to take not measured yet" in first.reason
    assert "run run1 may use 2 engines" in first.reason
    assert "2 to change hands" in found.reason


def test_a_run_that_wants_none_any_more_gives_its_engines_on() -> None:
    found = decided([of_run(1), of_run(2)], [wants(0, 1), wants(1, 2)])
    assert kinds(found.actions) == [("ChangeHands", "handed_over"), ("DrainAllocated", "no_demand")]


def test_off_by_default_their_jobs_end() -> None:
    found = decided([of_run(1), of_run(2)], [wants(0, 1), wants(2, 2)], LIMITS)
    assert {type(one) for one in found.actions} <= {DrainAllocated, Submit}
    assert len([one for one in found.actions if isinstance(one, DrainAllocated)]) == 2


def test_an_engine_that_changes_hands_is_not_started_once_more_for_its_run() -> None:
    """There are idle GPUs too: of three engines that run 2 wants, two come from run 1 and one is started."""
    found = decided([of_run(1), of_run(2)], [wants(0, 1), wants(3, 2)], full=False)
    assert sorted(type(one).__name__ for one in found.actions) == ["ChangeHands", "ChangeHands", "Submit"]


@pytest.mark.parametrize(
    ("giver", "taker", "limits", "why"),
    [
        (wants(0, 1, hands=""), wants(1, 2), HANDS, "run.isolation"),
        (wants(0, 1), wants(1, 2, hands=""), HANDS, "run.isolation"),
        (wants(0, 1), wants(1, 2, hands="another kind"), HANDS, "of another kind"),
        (wants(0, 1), wants(1, 2), replace(LIMITS, hands=HandsRules(by_owner=True)), "accounted to"),
        (wants(0, 1), wants(1, 2, owner_gpus=0), HANDS, "owners.max_gpus"),
        (
            wants(0, 1),
            wants(1, 2),
            replace(LIMITS, hands=HandsRules(switch_s={2: 61.0}, start_s={2: 60.0})),
            "predicted to take 61.0 s, a new start 60.0 s",
        ),
        (
            wants(0, 1),
            wants(1, 2),
            replace(HANDS, owners=(OwnerRule("owner2", gpu_types=frozenset({"a100"})),)),
            "may not use this node",
        ),
    ],
    ids=["giver alone", "taker alone", "kind", "account", "owner's GPUs", "slower", "owner's nodes"],
)
def test_who_may_not_change_hands_with_whom(
    giver: Demand, taker: Demand, limits: HarvestLimits, why: str
) -> None:
    """Its record says why."""
    mine = [of_run(1)]
    assert "ChangeHands" in {type(one).__name__ for one in decided(mine, [wants(0, 1), wants(1, 2)]).actions}
    found = decided(mine, [giver, taker], limits)
    (drain,) = (one for one in found.actions if not isinstance(one, Submit))
    assert isinstance(drain, DrainAllocated)
    reason, _, obstacle = drain.reason.partition("; it does not go on for run run2: ")
    assert reason == "its run has no demand; it holds 1 leases"
    assert why in obstacle


def test_a_run_that_changes_hands_slowly_hinders_no_other() -> None:
    """Its owner decides how large its weights are."""
    slow = replace(
        LIMITS, hands=HandsRules(switch_s={1: 900.0, 3: 900.0}, start_s={1: 60.0, 2: 60.0, 3: 60.0})
    )
    found = decided([of_run(1)], [wants(0, 1), wants(1, 2)], slow)
    (change,) = found.actions
    assert "to change hands is predicted to take not measured yet, a new start 60.0 s" in change.reason


def test_an_engine_that_no_other_run_could_use_leaves_for_its_own_reason_alone() -> None:
    found = decided([of_run(1), of_run(2, run_id=2)], [wants(0, 1), wants(1, 2)])
    assert [one.reason for one in found.actions] == ["its run has no demand; it holds 1 leases"]


def test_of_several_runs_the_record_names_the_first_in_turn() -> None:
    """A record does not grow with the runs that there are."""
    found = decided([of_run(1)], [wants(0, 1), *(wants(1, n, hands="other") for n in range(2, 40))])
    (drain,) = (one for one in found.actions if isinstance(one, DrainAllocated))
    assert drain.reason.count("it does not go on") == 1
    assert "run run2: its engine is of another kind" in drain.reason


def test_runs_of_one_owner_change_hands_also_where_jobs_are_accounted_to_owners() -> None:
    limits = replace(LIMITS, hands=HandsRules(by_owner=True, switch_s={2: 3.0}, start_s={2: 60.0}))
    found = decided([of_run(1)], [wants(0, 1), wants(1, 2, owner="owner1")], limits)
    (change,) = found.actions
    assert "to change hands is predicted to take 3.0 s, a new start 60.0 s" in change.reason


@pytest.mark.parametrize(
    "state",
    [
        {"connected": False},
        {"changing_since": NOW - 1},
        {"drain_kind": DrainKind.DRAINING, "asked_at": NOW - 1},
        {"gpus": 2},
    ],
)
def test_what_is_not_there_or_of_another_size_does_not(state: dict[str, Any]) -> None:
    found = decided([of_run(1, **state)], [wants(0, 1), wants(1, 2)])
    assert not [one for one in found.actions if isinstance(one, ChangeHands)]


@pytest.mark.parametrize("changing", [False, True])
def test_an_engine_on_its_way_to_a_run_is_not_taken_for_the_next(changing: bool) -> None:
    """It serves nobody yet: taken on the way, its job would end for nothing."""
    rules = DivisionRules(wait_s=1.0, hold_s=1.0)
    limits = replace(HANDS, division=rules, waiting_since=((2, NOW - 100.0),))
    mine = of_run(1, connected=not changing, changing_since=NOW - 2.0 if changing else 0.0)
    found = decided([mine], [wants(1, 1), wants(1, 2)], limits)
    assert kinds(found.actions) == ([] if changing else [("ChangeHands", "handed_over")])


def test_other_users_come_first() -> None:
    """A user waits for the node: what would have changed hands leaves for that one."""
    mine = [of_run(n) for n in range(1, 5)]
    waiting = job(9, gpus=4)
    since = replace(HANDS.yielding, could_start_since=((9, NOW - 100.0),))
    limits = replace(HANDS, yielding=since)
    calm = decided(mine, [wants(2, 1), wants(2, 2)], limits)
    assert kinds(calm.actions) == [("ChangeHands", "handed_over")] * 2
    found = decided(mine, [wants(2, 1), wants(2, 2)], limits, [waiting])
    assert not [one for one in found.actions if isinstance(one, ChangeHands)]
    assert len([one for one in found.actions if isinstance(one, DrainAllocated)]) == 4


def test_nothing_changes_hands_while_harvesting_is_stopped() -> None:
    stop = replace(HANDS.restrictions, stop="an admin stopped it")
    found = decided([of_run(1)], [wants(0, 1), wants(1, 2)], replace(HANDS, restrictions=stop))
    assert kinds(found.actions) == [("DrainAllocated", "stopped")]


def test_one_that_never_registers_for_its_new_run_is_ended() -> None:
    late = of_run(1, run_id=2, connected=False, changing_since=NOW - HANDS_S)
    found = decided([late], [wants(1, 2)])
    assert ("Cancel", "overdue") in kinds(found.actions)
    on_time = replace(late, changing_since=NOW - HANDS_S + 1)
    assert not [one for one in decided([on_time], [wants(1, 2)]).actions if isinstance(one, Cancel)]


# ---------------------------------------------------------------- in which order it is done

CHANGE = ChangeHands(A, 2, "run2", "owner2", "it goes on for run run2")


def test_the_new_run_is_durable_before_the_key_and_the_key_is_there_before_the_order() -> None:
    one = session(A)
    one._mint_again = lambda run, intent_id: f"key of {run} for {intent_id}"
    found = perform(one, CHANGE)
    assert [type(command) for command in found] == [Commit, ChangeKey, Report]
    changed, decision = records(found)[:2]
    assert changed == rec.JobChangedHands(A, 2, f"key of run2 for {A}", 1, 0.0, 10.0)
    assert isinstance(decision, rec.Decision)
    assert (decision.action, decision.code) == ("change_hands", HarvestCode.HANDED_OVER)
    assert isinstance(found[-1], Report)
    assert found[-1].events == [IntentHandedOver(A, f"key of run2 for {A}", CHANGE.reason)]
    tracked = one.tracker.intents[A]
    assert (tracked.intended.run_id, tracked.changing_since, tracked.run_since) == (2, 10.0, 10.0)
    back = perform(one, replace(CHANGE, run_id=1, run="run1"))
    assert records(back)[0] == rec.JobChangedHands(A, 1, f"key of run1 for {A}", 2, 10.0, 10.0)


@pytest.mark.parametrize("why", ["ledger", "key"])
def test_where_it_cannot_be_done_all_stays_as_it_was(why: str) -> None:
    def reply(command: Command, now: float) -> Outcome:
        if why == "ledger":
            return Outcome(now, done=not isinstance(command, Commit))
        failed = ClusterError("no space") if isinstance(command, ChangeKey) else None
        return Outcome(now, error=failed)

    one = session(A)
    found = perform(one, CHANGE, reply=reply)
    undone, event = records(found)[-2:]
    assert isinstance(undone, rec.JobChangedHands)
    assert (undone.run_id, undone.worker_key, undone.run_before) == (1, "k" * 40, 2)
    assert isinstance(event, rec.Event)
    assert event.kind == "hands_not_changed"
    assert not [e for command in found if isinstance(command, Report) for e in command.events]
    tracked = one.tracker.intents[A]
    assert (tracked.intended.run_id, tracked.changing_since) == (1, 0.0)


def life(run_id: int, joined_at: float, *, here: bool = True, ready_at: float = 0.0) -> WorkerLife:
    return WorkerLife(A, 0, "node1", joined_at, joined_at + 1, here, True, run_id, ready_at)


def test_a_change_of_hands_is_over_when_the_engine_registers_for_the_new_run_and_measured_once_it_is_ready() -> (
    None
):
    """A worker registers long before its engine is built, but one that changes hands after it has forgotten."""
    w = Watch()
    w.submit(A, 1, at=2.0)
    w.tracker.heard([])
    w.see(5.0, running())
    w.tracker.heard([life(1, 6.0)])
    assert w.tracker.predicted_s(6.0) == ({}, {})
    w.tracker.heard([life(1, 6.0, ready_at=40.0)])
    assert w.tracker.predicted_s(50.0) == ({}, {1: 38.0})
    w.tracker.changes_hands(A, 2, "key", 100.0)
    w.tracker.heard([life(1, 6.0, ready_at=40.0)])
    assert w.see(101.0, running()).changed == (), "the old one is still there"
    w.tracker.heard([life(1, 6.0, here=False, ready_at=40.0), life(2, 103.0)])
    assert w.see(104.0, running()).changed == (A,)
    assert w.tracker.predicted_s(104.0) == ({}, {1: 38.0})
    w.tracker.heard([life(1, 6.0, here=False, ready_at=40.0), life(2, 103.0, ready_at=105.0)])
    assert w.tracker.predicted_s(106.0) == ({2: 5.0}, {1: 38.0})
    assert w.see(107.0, running()).changed == ()
    assert w.tracker.predicted_s(105.0 + 3601.0) == ({}, {})
    (mine,) = w.tracker.jobs({})
    assert (mine.run_id, mine.changing_since, mine.started_at > 0) == (2, 0.0, True)


def test_a_start_that_was_preempted_before_it_could_work_is_not_measured() -> None:
    """Its job waited in the queue once more."""
    w = Watch()
    w.submit(A, 1, at=2.0)
    w.see(5.0, running())
    w.tracker.heard([replace(life(1, 6.0), ready=False)])
    w.see(10.0, ours(A, 1, restart_count=1))
    w.see(300.0, running(restart_count=1))
    w.tracker.heard([replace(life(1, 301.0, ready_at=302.0), incarnation=1)])
    assert w.tracker.predicted_s(303.0) == ({}, {})


def test_one_that_was_not_built_yet_is_not_measured() -> None:
    """Its build is part of the way, whose hands it is in: neither a start nor a change."""
    w = Watch()
    w.submit(A, 1, at=2.0)
    w.see(5.0, running())
    w.tracker.heard([replace(life(1, 6.0), ready=False)])
    w.tracker.changes_hands(A, 2, "key", 10.0)
    w.tracker.heard([life(2, 50.0, ready_at=51.0)])
    assert w.see(52.0, running()).changed == (A,)
    assert w.tracker.predicted_s(52.0) == ({}, {})


def test_one_that_is_preempted_on_the_way_comes_back_for_its_new_run_and_is_not_measured() -> None:
    w = Watch()
    w.submit(A, 1, at=2.0)
    w.see(5.0, running())
    w.tracker.heard([life(1, 6.0)])
    w.tracker.changes_hands(A, 2, "key", 100.0)
    assert w.tracker.expecting(101.0), "its new worker is about to come"
    back = ours(A, 1, restart_count=1)
    assert w.see(110.0, back).changed == (A,), "the old key opens nothing any more"
    w.see(300.0, running(restart_count=1))
    w.tracker.heard([replace(life(2, 301.0, ready_at=302.0), incarnation=1)])
    assert w.tracker.predicted_s(302.0) == ({}, {})
    (mine,) = w.tracker.jobs({})
    assert (mine.run_id, mine.changing_since) == (2, 0.0)


def test_an_engine_that_changed_hands_is_held_as_one_that_was_just_started() -> None:
    w = Watch()
    w.submit(A, 1, at=2.0)
    w.see(5.0, running())
    w.tracker.heard([life(1, 6.0)])
    w.tracker.changes_hands(A, 2, "key", 100.0)
    assert [one.started_at for one in w.tracker.jobs({})] == [100.0]


# ---------------------------------------------------------------- keys


class Ring:
    """Which keys are let in, and as whose."""

    def __init__(self) -> None:
        self.allowed: dict[str, PeerIdentity] = {}

    def drop(self, key: str) -> None:
        self.allowed.pop(key, None)

    def link(self) -> RouterLink:
        return RouterLink(lambda _event: None, tuple, dict, self.allowed.__setitem__, self.drop)


def test_a_key_opens_one_run_and_the_old_one_nothing_once_the_engine_is_there_under_the_new(
    tmp_path: Path,
) -> None:
    ring = Ring()
    mine = WorkerKeys(tmp_path, ring.link())
    first = mine.mint("run1", A)
    mine.write(A)
    mine.allow(A)
    second = mine.mint("run2", A)
    assert keys.read_keypair(keys.worker_key_path(tmp_path, A)).public == first
    mine.write(A)
    mine.allow(A)
    pair = keys.read_keypair(keys.worker_key_path(tmp_path, A))
    assert (pair.public, pair.run, pair.intent) == (second, "run2", A)
    assert keys.worker_key_path(tmp_path, A).stat().st_mode & 0o777 == 0o600
    assert {key: who.run for key, who in ring.allowed.items()} == {first: "run1", second: "run2"}
    mine.changed(A)
    assert list(ring.allowed) == [second]
    mine.mint("run1", A)
    mine.write(A)
    mine.allow(A)
    mine.drop(A)
    assert ring.allowed == {}
    assert not keys.worker_key_path(tmp_path, A).exists()


def test_after_a_restart_only_the_key_that_the_ledger_has_is_let_in(tmp_path: Path) -> None:
    before = WorkerKeys(tmp_path, Ring().link())
    public = before.mint("run1", A)
    before.write(A)
    ring = Ring()
    with pytest.raises(AuthError, match="still that of the run before"):
        WorkerKeys(tmp_path, ring.link()).allow_again(A, "the key of run2, which was never written")
    assert ring.allowed == {}
    WorkerKeys(tmp_path, ring.link()).allow_again(A, public)
    assert list(ring.allowed) == [public]


def test_the_rules_follow_the_configuration() -> None:
    from scavenger.config import HarvestSection

    def rules(**more: Any) -> HandsRules | None:
        return hands_rules(HarvestSection.model_validate({"partition": "scavenge", **more}))

    assert rules() is None
    assert rules(change_hands=True) == HandsRules()
    assert rules(change_hands=True, account="rl-{owner}") == HandsRules(by_owner=True)
    assert rules(change_hands=True, wckey="{owner}") == HandsRules(by_owner=True)
