"""Which waiting jobs of ours keep their place: one that would start on GPUs that no fresh job may take is cancelled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from scavenger.cluster.model import Job, Node
from scavenger.harvest.decide.decide import (
    CancelPending,
    HarvestCode,
    HarvestDecision,
    OurJob,
    Submit,
    decide,
)
from scavenger.policy.fleet_size import Benefit, Demand, start_benefit
from scavenger.policy.forecast.survival import ObservedLife, estimate, prior
from scavenger.policy.idle_gpus import Idle, node_class
from tests.harvest.flat_limits import limits_with
from tests.harvest.views import node, ours, view

NOW = 10_000.0
KIND = node_class(node("node1"))
LIMITS = limits_with("scavenge", max_engines=4, max_pending=4, pin=True, fresh_after_s=60.0)
BENEFIT = Benefit(0.05, 8.0, 1, 100.0)
#: Half of the slices end within two minutes, the others last for hours.
MIXED = estimate(
    [ObservedLife(20.0 + i % 100, True) for i in range(300)]
    + [ObservedLife(30_000.0, False) for _ in range(300)],
    prior(),
)
SETTLED_S = start_benefit(BENEFIT, MIXED, 0.95).age_s


def waiting(number: int = 1, pinned: str = "node1", **more: Any) -> OurJob:
    return OurJob(f"scv-{number:016x}", 1, number, 1, True, pinned=pinned, since=NOW - 5, **more)


def decided(
    jobs: Sequence[OurJob],
    nodes: Sequence[Node],
    idle: Idle | None,
    *listed: Job,
    benefit: Benefit | None = BENEFIT,
    **limits: Any,
) -> HarvestDecision:
    wanted = Demand(1, "r", len(jobs), 1, f"{len(jobs)} are useful", benefit=benefit)
    queue = listed or tuple(
        ours(job.intent_id, job.job_id, restart_count=1, reason="Resources") for job in jobs
    )
    return decide(view(NOW, queue, nodes), [wanted], jobs, limits_with(LIMITS, idle=idle, **limits), NOW)


def idle_for(share: float = 0.95, **seconds: list[float]) -> Idle:
    return Idle({name: [NOW - age for age in found] for name, found in seconds.items()}, {KIND: MIXED}, share)


def cancelled(decision: HarvestDecision) -> list[str]:
    return [action.intent_id for action in decision.actions if isinstance(action, CancelPending)]


def placed(decision: HarvestDecision) -> list[tuple[str, ...]]:
    return [action.nodelist for action in decision.actions if isinstance(action, Submit)]


def test_a_preempted_job_does_not_wait_for_the_node_that_others_took_where_what_comes_free_is_not_worth_a_start() -> (
    None
):
    """Slurm would start it in the moment that they leave, on GPUs of which every second one is taken again within two minutes."""
    decision = decided([waiting()], [node("node1", 4)], idle_for())
    assert cancelled(decision) == ["scv-0000000000000001"]
    [action] = decision.actions
    assert isinstance(action, CancelPending)
    assert action.code is HarvestCode.SETTLING
    assert f"0 of 1 GPUs have then been idle for {SETTLED_S:.0f} s" in action.reason
    assert "outlast a start of 100 s" in action.reason


def test_it_is_submitted_afresh_where_gpus_have_settled() -> None:
    idle = idle_for(node2=[5000.0, 20.0], node3=[30.0])
    decision = decided([waiting()], [node("node1", 4), node("node2", 2), node("node3", 3)], idle)
    assert (cancelled(decision), placed(decision)) == (["scv-0000000000000001"], [("node2",)])


@pytest.mark.parametrize(
    ("idle", "benefit"),
    [
        (None, BENEFIT),
        (Idle({}, {}, 0.95), BENEFIT),
        (idle_for(), None),
        (idle_for(), replace(BENEFIT, price=0.0)),
        (idle_for(share=0.0), BENEFIT),
    ],
    ids=["nobody looked", "too few lives", "no benefit", "no price", "harvest.min_expected_life is 0"],
)
def test_where_what_is_idle_is_taken_at_once_a_job_keeps_its_place(
    idle: Idle | None, benefit: Benefit | None
) -> None:
    assert decided([waiting()], [node("node1", 4)], idle, benefit=benefit).actions == ()


def test_a_job_stays_that_waits_for_gpus_which_have_settled_and_only_as_many_as_there_are() -> None:
    old = idle_for(node1=[5000.0, 4000.0, 10.0])
    jobs = [waiting(1), waiting(2), waiting(3)]
    assert cancelled(decided(jobs[:2], [node("node1", 1)], old)) == []
    assert cancelled(decided(jobs, [node("node1", 1)], old)) == ["scv-0000000000000003"], (
        "the third would have the young one"
    )


def test_a_requeued_job_is_weighed_by_what_has_settled_when_it_may_begin() -> None:
    """Slurm holds it back for two minutes; what is young now need not be then."""
    job = waiting()
    begins = ours(job.intent_id, 1, restart_count=1, reason="BeginTime", eligible_time=NOW + 50)
    young = idle_for(node1=[SETTLED_S - 49.0])
    assert cancelled(decided([job], [node("node1", 3)], young, begins)) == []
    younger = idle_for(node1=[SETTLED_S - 51.0])
    assert cancelled(decided([job], [node("node1", 3)], younger, begins)) == [job.intent_id]


def test_where_slurm_chooses_the_node_one_that_has_settled_is_enough() -> None:
    idle = idle_for(node1=[10.0], node2=[5000.0])
    nodes = [node("node1", 3), node("node2", 3)]
    assert cancelled(decided([waiting(1, "")], nodes, idle, pin=False)) == []
    assert cancelled(decided([waiting(1, ""), waiting(2, "")], nodes, idle, pin=False)) == [
        "scv-0000000000000002"
    ]
    assert cancelled(decided([waiting(1, "")], [node("node1", 3)], idle, pin=False)) == [
        "scv-0000000000000001"
    ]


def test_an_engine_that_is_not_worth_a_start_anywhere_does_not_wait_either() -> None:
    decision = decided(
        [waiting()],
        [node("node1", 0)],
        idle_for(share=0.0, node1=[math.inf] * 4),
        benefit=replace(BENEFIT, saving=1e-6),
    )
    assert cancelled(decision) == ["scv-0000000000000001"]
    assert "none is worth a start" in decision.actions[0].reason


def test_what_has_no_id_yet_is_held_or_leaves_is_not_weighed() -> None:
    """The first cannot be named to Slurm, the others go by rules of their own."""
    unknown, held = replace(waiting(1), job_id=0), replace(waiting(2), held="JobHeldUser")
    decision = decided([unknown, held], [node("node1", 4)], idle_for())
    assert [
        (action.intent_id, action.code) for action in decision.actions if isinstance(action, CancelPending)
    ] == [(held.intent_id, HarvestCode.HELD)]
