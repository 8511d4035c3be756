"""Jobs that begin where we say: how many wait, which one goes where others are too, and that idle nodes get fresh ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from scavenger.cluster.model import ClusterView, Job, JobState, Node, Reservation
from scavenger.harvest.decide.decide import (
    CancelPending,
    HarvestCode,
    HarvestDecision,
    OurJob,
    Release,
    Submit,
    decide,
)
from scavenger.harvest.decide.standby import BEGIN_S, is_standby
from scavenger.policy.fleet_size import Demand
from tests.harvest.flat_limits import limits_with
from tests.harvest.views import job, node, ours, view

NOW = 1_000_000.0
LIMITS = limits_with("scavenge", max_engines=8, max_pending=8, pin=True, standby_jobs=2, fresh_after_s=60.0)
TAKEN = job(900, JobState.RUNNING, nodes=("node1",), gpus=3, gpus_by_node=(("node1", 3),))


def standby(number: int, **more: Any) -> OurJob:
    return OurJob(f"scv-{number:016x}", 1, number, 1, True, standby=True, **more)


def listed(number: int) -> Job:
    return ours(f"scv-{number:016x}", number, reason="BeginTime", eligible_time=NOW + BEGIN_S)


def decided(
    jobs: Sequence[OurJob] = (),
    nodes: Sequence[Node] = (),
    *queue: Job,
    engines: int = 2,
    reserved: Sequence[Reservation] = (),
    **limits: Any,
) -> HarvestDecision:
    wanted = [Demand(1, "r", engines, 1, f"{engines} are useful")]
    seen: ClusterView = replace(view(NOW, queue, nodes), reservations=tuple(reserved))
    return decide(seen, wanted, jobs, limits_with(LIMITS, **limits), NOW)


def new_spares(decision: HarvestDecision) -> list[Submit]:
    return [action for action in decision.actions if isinstance(action, Submit) and action.standby]


def fresh(decision: HarvestDecision) -> list[tuple[str, ...]]:
    return [
        action.nodelist for action in decision.actions if isinstance(action, Submit) and not action.standby
    ]


def released(decision: HarvestDecision) -> list[tuple[str, str]]:
    return [(action.intent_id, action.node) for action in decision.actions if isinstance(action, Release)]


def test_the_first_decision_submits_them_before_any_engine_so_that_they_are_the_oldest() -> None:
    decision = decided((), [node("node1"), node("node2")])
    kinds = [isinstance(action, Submit) and action.standby for action in decision.actions]
    assert kinds == [True, True, False, False]
    assert {action.nodelist for action in new_spares(decision)} == {()}
    assert {action.code for action in new_spares(decision)} == {HarvestCode.STANDBY}


def test_the_oldest_goes_where_others_are_too_and_an_idle_node_gets_a_fresh_job() -> None:
    decision = decided(
        [standby(8), standby(7)], [node("node1", 3), node("node2")], TAKEN, listed(7), listed(8), engines=2
    )
    assert released(decision) == [("scv-0000000000000007", "node1")]
    assert fresh(decision) == [("node2",)]
    assert new_spares(decision) == []  # the next decision sees that one is missing


def test_without_a_gap_beside_others_none_is_released() -> None:
    decision = decided([standby(7), standby(8)], [node("node1"), node("node2")], listed(7), listed(8))
    assert released(decision) == []
    assert len(fresh(decision)) == 2


def test_they_are_no_engines_and_no_pending_jobs() -> None:
    """Two standby jobs wait, and max_engines, max_pending and max_gpus of one are for the engine."""
    decision = decided(
        [standby(7), standby(8)],
        [node("node1")],
        listed(7),
        listed(8),
        engines=1,
        max_engines=1,
        max_pending=1,
        max_gpus=1,
        max_gpus_per_user=1,
        user="scavenger",
    )
    assert fresh(decision) == [("node1",)]


def test_one_that_is_not_in_the_queue_yet_or_leaves_is_not_released() -> None:
    for held in (replace(standby(7), job_id=0), replace(standby(7), held="JobHeldAdmin")):
        decision = decided([held], [node("node1", 3)], TAKEN, listed(7), engines=1)
        assert released(decision) == []
        assert fresh(decision) == [("node1",)]


def test_a_gap_that_a_reservation_cuts_short_gets_a_fresh_job_with_that_limit() -> None:
    soon = Reservation("maint", frozenset({"node1"}), NOW + 7200, NOW + 9000)
    decision = decided(
        [standby(7), standby(8)], [node("node1", 3)], TAKEN, listed(7), listed(8), engines=1, reserved=[soon]
    )
    assert released(decision) == []
    [action] = [action for action in decision.actions if isinstance(action, Submit)]
    assert 0 < action.most_s <= 7200


def test_a_job_that_waits_for_a_node_that_others_took_keeps_its_age_beside_others_and_not_on_an_idle_node() -> (
    None
):
    mine = OurJob("scv-0000000000000003", 1, 3, 1, True, pinned="node3", since=NOW - 100)
    queue = (ours(mine.intent_id, 3, reason="Resources"), TAKEN)
    nodes = [node("node1", 3), node("node3", 4)]
    decision = decided([mine], nodes, *queue, engines=1)
    assert released(decision) == [(mine.intent_id, "node1")]
    steered_by_nobody = decided([mine], nodes, *queue, engines=1, standby_jobs=0)
    assert released(steered_by_nobody) == [], "Slurm refused to release one, or orders by start"
    assert fresh(steered_by_nobody) == [("node1",)]
    decision = decided([mine], [node("node2"), node("node3", 4)], *queue, engines=1)
    assert released(decision) == []
    assert [action.intent_id for action in decision.actions if isinstance(action, CancelPending)] == [
        mine.intent_id
    ]
    assert fresh(decision) == [("node2",)]


@pytest.mark.parametrize("standby_jobs", [1, 0])
def test_more_jobs_than_may_wait_leave_a_node_that_others_took_for_what_is_idle(standby_jobs: int) -> None:
    """Three engines were preempted together, with max_pending = 2 (its default): they waited for three minutes for the node that was taken,
    beside eight idle GPUs. Each is exchanged for one, so that no more wait than before."""
    mine = [
        OurJob(f"scv-{number:016x}", 1, number, 1, True, pinned="node3", since=NOW - 31)
        for number in (3, 4, 5)
    ]
    queue = [ours(job.intent_id, job.job_id, reason="Resources") for job in mine]
    nodes = [node("node1"), node("node2"), node("node3", 4)]
    caps: dict[str, Any] = {"max_pending": 2, "max_gpus": 3, "max_engines": 3, "fresh_after_s": 30.0}
    decision = decided(mine, nodes, *queue, engines=3, standby_jobs=standby_jobs, **caps)
    left = {
        one.intent_id for one in decision.actions if isinstance(one, CancelPending) and one.code == "fresh"
    }
    assert left == {job.intent_id for job in mine}
    assert sorted(fresh(decision)) == [("node1",)] * 3
    assert "it has waited for node3 for 31 s" in next(
        one.reason for one in decision.actions if isinstance(one, CancelPending)
    )
    just_now = [replace(job, since=NOW - 29) for job in mine]
    assert fresh(decided(just_now, nodes, *queue, engines=3, standby_jobs=standby_jobs, **caps)) == []


def test_a_node_whose_cpus_others_hold_is_taken_though_its_gpus_are_idle() -> None:
    mine = OurJob("scv-0000000000000003", 1, 3, 1, True, pinned="node3", since=NOW - 31)
    queue = (ours(mine.intent_id, 3, reason="Resources"),)
    full = node("node3", cpus_allocated=64)
    limits: dict[str, Any] = {"standby_jobs": 0, "fresh_after_s": 30.0}
    decision = decided([mine], [node("node2"), full], *queue, engines=1, **limits)
    assert fresh(decision) == [("node2",)]
    assert [one.intent_id for one in decision.actions if isinstance(one, CancelPending)] == [mine.intent_id]
    assert decided([mine], [node("node2"), node("node3")], *queue, engines=1, **limits).actions == ()


def test_what_nobody_needs_is_cancelled_the_youngest_first() -> None:
    jobs, queue = [standby(number) for number in (7, 8, 9)], [listed(number) for number in (7, 8, 9)]
    too_many = decided(jobs, [node("node1", 4)], *queue)
    assert [action.intent_id for action in too_many.actions if isinstance(action, CancelPending)] == [
        "scv-0000000000000009"
    ]
    nobody = decided(jobs, [node("node1", 4)], *queue, engines=0)
    assert len(nobody.actions) == 3
    assert {action.code for action in nobody.actions if isinstance(action, CancelPending)} == {
        HarvestCode.NO_DEMAND
    }
    stopped = decided(jobs, [node("node1", 4)], *queue, stop="drained")
    assert {action.code for action in stopped.actions if isinstance(action, CancelPending)} == {
        HarvestCode.STOPPED
    }
    unpinned = decided(jobs, [node("node1", 4)], *queue, pin=False)
    assert len([action for action in unpinned.actions if isinstance(action, CancelPending)]) == 3


def test_there_are_no_more_of_them_than_engines() -> None:
    assert len(new_spares(decided((), [node("node1")], engines=1, standby_jobs=4))) == 1
    assert new_spares(decided((), [node("node1")], standby_jobs=0)) == []


def test_the_queue_alone_tells_a_spare() -> None:
    assert is_standby(listed(7), NOW)
    assert is_standby(listed(7), NOW + 28 * 86_400), "a run may take weeks"
    assert not is_standby(
        ours("scv-0000000000000007", 7, reason="BeginTime", eligible_time=NOW + 121), NOW
    )  # requeued
    assert not is_standby(ours("scv-0000000000000007", 7, JobState.RUNNING, eligible_time=NOW + BEGIN_S), NOW)
