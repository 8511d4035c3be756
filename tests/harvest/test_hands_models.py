"""Engines that change to a run of another model: only by predicted seconds, and where no idle GPU gives that run an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scavenger.cluster.model import JobState, Reservation
from scavenger.harvest.decide import decide as decide_module
from scavenger.harvest.decide.actions import (
    BlackoutTime,
    ChangeHands,
    DrainAllocated,
    HandsRules,
    HarvestDecision,
    HarvestLimits,
    OwnerRule,
    Submit,
)
from scavenger.harvest.decide.decide import decide
from scavenger.harvest.limits import hands_rules
from scavenger.harvest.session import Commit, Outcome
from scavenger.policy.fleet_size import Demand
from tests.harvest.test_hands import CHANGE, decided, life, of_run, wants
from tests.harvest.test_session import A, perform, session
from tests.harvest.test_yielding import LIMITS, NOW, listed
from tests.harvest.views import node, ours, view
from tests.harvest.watch import Watch, running

#: Run 2 has another model. Its engines were started, and took 60 s, 42 s of them once they had registered.
RULES = HandsRules(start_s={2: 60.0}, ready_s={2: 42.0})
MEASURED = replace(RULES, build_s={2: 30.0})
PRIOR = "predicted to take 42.0 s (none was measured: a new start without scheduler and job start), a new start 60.0 s"


def with_rules(rules: HandsRules, **more: Any) -> HarvestLimits:
    return replace(LIMITS, hands=rules, **more)


def other(engines: int = 1, **more: Any) -> Demand:
    return wants(engines, 2, **{"hands": "another kind", **more})


def changes(found: HarvestDecision) -> list[ChangeHands]:
    return [one for one in found.actions if isinstance(one, ChangeHands)]


def why_not(found: HarvestDecision) -> str:
    (drain,) = (one for one in found.actions if isinstance(one, DrainAllocated))
    return drain.reason.partition("; it does not go on for run run2: ")[2]


# ---------------------------------------------------------------- by predicted seconds


def test_an_engine_goes_on_for_another_model_where_that_is_predicted_to_be_sooner() -> None:
    """None was measured: of the 60 s of a new start 18 s are Slurm's and the job's start."""
    found = decided([of_run(1)], [wants(0, 1), other()], with_rules(RULES))
    (change,) = changes(found)
    assert (change.run_id, change.builds) == (2, True)
    assert PRIOR in change.reason
    assert "its engine is built anew there" in change.reason
    assert "no idle GPU gives it one" in change.reason
    assert change.reason.endswith("; its run has no demand; it holds 1 leases")


@pytest.mark.parametrize(
    ("rules", "goes", "says"),
    [
        (MEASURED, True, "predicted to take 30.0 s, a new start 60.0 s"),
        (replace(RULES, build_s={2: 59.9}), True, "predicted to take 59.9 s, a new start 60.0 s"),
        (replace(RULES, build_s={2: 60.0}), False, "predicted to take 60.0 s, a new start 60.0 s"),
        (replace(RULES, ready_s={2: 60.0}), False, "a new start 60.0 s"),
        (HandsRules(build_s={2: 30.0}), False, "predicted to take 30.0 s, a new start not measured yet"),
        (HandsRules(), False, "predicted to take not measured yet, a new start not measured yet"),
        # What a change between runs of one kind took says nothing of one for which the engine is built anew.
        (HandsRules(switch_s={2: 1.0}, start_s={2: 60.0}), False, "predicted to take not measured yet"),
        # Another run's figures are its own.
        (HandsRules(build_s={1: 1.0, 3: 1.0}, start_s={1: 60.0, 2: 60.0}), False, "not measured yet"),
    ],
)
def test_predicted_seconds_decide(rules: HandsRules, goes: bool, says: str) -> None:
    found = decided([of_run(1)], [wants(0, 1), other()], with_rules(rules))
    assert len(changes(found)) == goes
    assert says in (changes(found)[0].reason if goes else why_not(found))


def test_where_an_idle_gpu_gives_the_run_an_engine_a_new_job_starts() -> None:
    found = decided([of_run(1)], [wants(0, 1), other()], with_rules(MEASURED), full=False)
    assert [one.run_id for one in found.actions if isinstance(one, Submit)] == [2]
    assert why_not(found).endswith("would be built anew, and idle GPUs give that run an engine")


def test_only_what_idle_gpus_do_not_give_comes_from_another_model() -> None:
    """Five engines are wanted, two GPUs are idle, and of four that leave three go on."""
    mine = [of_run(n) for n in range(1, 5)]
    nodes = [node("node1", 4, gpus=4), node("node2", 2)]
    demand = [wants(0, 1), other(5)]
    found = decide(view(NOW, [listed(one) for one in mine], nodes), demand, mine, with_rules(MEASURED), NOW)
    assert sorted(type(one).__name__ for one in found.actions) == [
        "ChangeHands",
        "ChangeHands",
        "ChangeHands",
        "DrainAllocated",
        "Submit",
        "Submit",
    ]


def test_idle_gpus_on_which_nothing_may_start_give_no_engine() -> None:
    """As much is harvested as may be: the engine that leaves counts until it is gone."""
    limits = with_rules(MEASURED)
    limits = replace(limits, caps=replace(limits.caps, max_gpus=1))
    (change,) = changes(decided([of_run(1)], [wants(0, 1), other()], limits, full=False))
    assert change.builds


def test_a_run_of_the_same_kind_comes_first() -> None:
    """Whatever its turn: for it the engine stays as it is."""
    demand = [wants(0, 1), other(), wants(1, 3)]
    (change,) = changes(decided([of_run(1)], demand, with_rules(MEASURED)))
    assert (change.run_id, change.builds) == (3, False)
    both = changes(decided([of_run(1), of_run(2)], demand, with_rules(MEASURED)))
    assert sorted((one.run_id, one.builds) for one in both) == [(2, True), (3, False)]


def test_the_first_one_for_a_run_is_tried_alone() -> None:
    mine = [of_run(n) for n in range(1, 4)]
    found = decided(mine, [wants(0, 1), other(3)], with_rules(RULES))
    assert len(changes(found)) == 1
    left = [one.reason for one in found.actions if isinstance(one, DrainAllocated)]
    assert len(left) == 2
    assert all("the first one that is built anew for that run shows what it takes" in one for one in left)
    assert len(changes(decided(mine, [wants(0, 1), other(3)], with_rules(MEASURED)))) == 3


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("giver", "taker", "limits", "why"),
    [
        (wants(0, 1), other(), with_rules(replace(MEASURED, models=False)), "harvest.change_models is off"),
        (wants(0, 1, hands=""), other(), with_rules(MEASURED), "run.isolation"),
        (wants(0, 1), other(hands=""), with_rules(MEASURED), "run.isolation"),
        (wants(0, 1), other(engine="vllm"), with_rules(MEASURED), "engine.name is 'reference' and 'vllm'"),
        (wants(0, 1), other(), with_rules(replace(MEASURED, by_owner=True)), "accounted to"),
        (wants(0, 1), other(owner_gpus=0), with_rules(MEASURED), "owners.max_gpus"),
        (
            wants(0, 1),
            other(),
            with_rules(MEASURED, owners=(OwnerRule("owner2", gpu_types=frozenset({"a100"})),)),
            "may not use this node",
        ),
        (
            wants(0, 1),
            other(),
            with_rules(replace(MEASURED, no_builds={2: "one failed 9 s ago"})),
            "would be built anew: one failed 9 s ago",
        ),
        (
            wants(0, 1),
            other(),
            with_rules(
                MEASURED,
                blackouts=(BlackoutTime(NOW + 600, NOW + 900, "maintenance"),),
                job=replace(LIMITS.job, min_life_s=900.0),
            ),
            "a blackout begins in 600 s",
        ),
    ],
    ids=[
        "forbidden",
        "giver alone",
        "taker alone",
        "engine",
        "account",
        "owner's GPUs",
        "owner's nodes",
        "failed",
        "blackout",
    ],
)
def test_who_may_not_change_to_another_model(
    giver: Demand, taker: Demand, limits: HarvestLimits, why: str
) -> None:
    mine = [of_run(1)]
    assert len(changes(decided(mine, [wants(0, 1), other()], with_rules(MEASURED)))) == 1
    found = decided(mine, [giver, taker], limits)
    assert changes(found) == []
    assert why in why_not(found)


@pytest.mark.parametrize("reserved", [False, True])
@pytest.mark.parametrize(("left_s", "goes"), [(131.0, True), (130.0, False)])
def test_no_engine_is_built_that_leaves_before_it_is_ready(left_s: float, goes: bool, reserved: bool) -> None:
    """It takes 30 s, and engines drain 100 s before their end."""
    limits = with_rules(MEASURED)
    limits = replace(limits, job=replace(limits.job, drain_before_s=100.0))
    limits = replace(limits, yielding=replace(limits.yielding, horizon_s=0.0))
    mine = of_run(1)
    jobs = [listed(mine, end_time=NOW + (9000.0 if reserved else left_s))]
    seen = view(NOW, jobs, [node("node1", 1, gpus=1)])
    if reserved:
        booking = Reservation("maintenance", frozenset({"node1"}), NOW + left_s, NOW + 9000.0)
        seen = replace(seen, reservations=(booking,))
    found = decide(seen, [wants(0, 1), other()], [mine], limits, NOW)
    assert len(changes(found)) == goes
    if not goes:
        says = "a reservation begins on node1 in 130 s" if reserved else "its time limit comes in 130 s"
        assert why_not(found).endswith(says)


def test_an_engine_of_another_size_goes_on_for_no_other_model() -> None:
    found = decided([of_run(1, gpus=2)], [wants(0, 1, gpus=2), other()], with_rules(MEASURED))
    assert changes(found) == []
    assert why_not(found) == "the sizes differ"


def test_the_admin_forbids_it() -> None:
    from scavenger.config import HarvestSection

    def rules(**more: Any) -> HandsRules | None:
        return hands_rules(HarvestSection.model_validate({"partition": "scavenge", **more}))

    assert rules(change_models=True) is None, "nothing changes hands without harvest.change_hands"
    assert rules(change_hands=True, change_models=False) == HandsRules(models=False)


# ---------------------------------------------------------------- what is learned


def ready_for_run_1(w: Watch) -> None:
    """Submitted at 2 s, registered at 20 s, its weights there at 62 s."""
    w.submit(A, 1, at=2.0)
    w.tracker.heard([])
    w.see(5.0, running())
    w.tracker.heard([life(1, 20.0, ready_at=62.0)])


def test_a_change_to_another_model_is_learned_by_itself_and_a_start_without_its_way_to_registration() -> None:
    w = Watch()
    ready_for_run_1(w)
    assert w.tracker.predicted_s(63.0) == ({}, {1: 60.0})
    assert w.tracker.predicted_builds_s(63.0) == ({}, {1: 42.0})
    w.tracker.changes_hands(A, 2, "key", 100.0, builds=True)
    assert "not ready yet" in w.tracker.no_builds(101.0)[2]
    gone = life(1, 20.0, here=False, ready_at=62.0)
    w.tracker.heard([gone, life(2, 103.0)])
    assert "not ready yet" in w.tracker.no_builds(104.0)[2], "it has registered, and is being built"
    w.tracker.heard([gone, life(2, 103.0, ready_at=131.0)])
    assert w.tracker.predicted_builds_s(132.0) == ({2: 31.0}, {1: 42.0})
    assert w.tracker.predicted_s(132.0) == ({}, {1: 60.0}), "no change between runs of one kind"
    assert w.tracker.no_builds(132.0) == {}
    # Once one was measured, the next ones need not wait for each other.
    w.tracker.changes_hands(A, 1, "key", 140.0)
    w.tracker.heard([life(1, 141.0, ready_at=142.0)])
    w.tracker.changes_hands(A, 2, "key", 150.0, builds=True)
    assert w.tracker.no_builds(151.0) == {}
    assert w.tracker.predicted_s(151.0)[0] == {1: 2.0}
    assert w.tracker.predicted_builds_s(131.0 + 3601.0) == ({}, {})


@pytest.mark.parametrize("code", [71, 75])
def test_one_that_cannot_be_built_is_not_tried_again_within_the_hour(code: int) -> None:
    """Unless its process left because Slurm told it to."""
    w = Watch()
    ready_for_run_1(w)
    w.tracker.changes_hands(A, 2, "key", 100.0, builds=True)
    w.see(110.0, ours(A, 1, JobState.FAILED, exit_code=code))
    failed = {2: "one that was to be built anew for that run failed 10 s ago"} if code == 71 else {}
    assert w.tracker.no_builds(120.0) == failed
    assert w.tracker.no_builds(110.0 + 3601.0) == {}


def test_one_that_is_preempted_while_it_is_built_says_nothing() -> None:
    w = Watch()
    ready_for_run_1(w)
    w.tracker.changes_hands(A, 2, "key", 100.0, builds=True)
    w.see(110.0, ours(A, 1, restart_count=1))
    assert w.tracker.no_builds(111.0) == {}
    w.see(300.0, running(restart_count=1))
    w.tracker.heard([replace(life(2, 301.0, ready_at=330.0), incarnation=1)])
    assert w.tracker.predicted_builds_s(331.0) == ({}, {1: 42.0})


def test_the_session_learns_it_and_decides_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one = session(A)
    perform(one, replace(CHANGE, builds=True))
    assert one.tracker.intents[A].builds_for == 2
    assert "not ready yet" in one.tracker.no_builds(11.0)[2]
    undone = session(A)
    perform(
        undone,
        replace(CHANGE, builds=True),
        reply=lambda command, now: Outcome(now, done=not isinstance(command, Commit)),
    )
    assert undone.tracker.no_builds(11.0) == {}
    one.tracker._stuck[1] = 5.0
    limits = with_rules(HandsRules())
    seen: list[HarvestLimits] = []
    deciding = decide_module.decide

    def watched(shown: Any, demand: Any, jobs: Any, limits: HarvestLimits, now: float) -> HarvestDecision:
        seen.append(limits)
        return deciding(shown, demand, jobs, limits, now)

    monkeypatch.setattr(decide_module, "decide", watched)
    one.decide(view(11.0), [], {}, limits, None, 11.0)
    assert seen[0].hands is not None
    assert 2 in seen[0].hands.no_builds
    assert "6 s ago" in seen[0].hands.stuck[1]
