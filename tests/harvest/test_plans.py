"""Idle nodes that Slurm keeps for a job which it expects to start later: ours start there only if they end before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scavenger.cluster.model import Job, JobState
from scavenger.harvest.decide.decide import (
    CancelPending,
    HarvestCode,
    HarvestDecision,
    OurJob,
    Submit,
    decide,
)
from scavenger.harvest.harvester import KEPT_S, Plans
from scavenger.policy.fleet_size import Demand
from tests.harvest.flat_limits import limits_with
from tests.harvest.views import job, node, ours, view

NOW = 10_000.0
LIMITS = limits_with(
    "scavenge",
    max_engines=4,
    max_pending=4,
    pin=True,
    fresh_after_s=30.0,
    drain_before_s=30.0,
    min_life_s=630.0,
)
NODES = (node("node1", 4), node("node2"), node("node3", 4))  # node2 is idle


def planned(in_s: float, *nodes: str) -> Job:
    """Somebody's job of whole nodes, which waits for the last of them."""
    return job(7, gpus=4 * len(nodes), n_nodes=len(nodes), start_time=NOW + in_s, planned=nodes, priority=9)


def decided(*queue: Job, jobs: tuple[OurJob, ...] = (), wants: int = 1, **limits: Any) -> HarvestDecision:
    return decide(
        view(NOW, queue, NODES),
        [Demand(1, "r", wants, 1, "useful")],
        jobs,
        limits_with(LIMITS, **limits),
        NOW,
    )


def submitted(decision: HarvestDecision) -> list[tuple[tuple[str, ...], float]]:
    return [(one.nodelist, one.most_s) for one in decision.actions if isinstance(one, Submit)]


def test_an_engine_on_a_kept_node_ends_before_the_others_are_expected() -> None:
    assert submitted(decided(planned(1800, "node1", "node2"))) == [(("node2",), 1800 - 60 - 30)]
    assert submitted(decided(planned(1800, "node1", "node3"))) == [(("node2",), 0.0)], "it is kept for nobody"
    both = decided(planned(3600, "node1", "node2"), replace(planned(1800, "node2", "node3"), job_id=8))
    assert submitted(both) == [(("node2",), 1800 - 60 - 30)], "the first who is expected"


def test_where_they_are_expected_too_soon_none_is_submitted() -> None:
    decision = decided(planned(689, "node1", "node2"))
    assert (decision.actions, decision.code) == ((), HarvestCode.PLANNED)
    assert "kept for other users' jobs that are expected soon: node2" in decision.reason
    assert submitted(decided(planned(691, "node1", "node2")))


@pytest.mark.parametrize(
    "more",
    [{"start_time": NOW - 1}, {"start_time": 0.0}, {"reason": "JobHeldUser"}],
    ids=["over", "none", "held"],
)
def test_a_plan_that_no_longer_holds_keeps_nothing(more: dict[str, Any]) -> None:
    assert submitted(decided(replace(planned(1800, "node1", "node2"), **more))) == [(("node2",), 0.0)]


def test_our_own_jobs_are_no_others() -> None:
    mine = ours("scv-0000000000000009", 9, start_time=NOW + 1800, planned=("node2",))
    waits = OurJob("scv-0000000000000009", 1, 9, 1, True, pinned="node2", since=NOW - 5)
    assert submitted(decided(mine, jobs=(waits,), wants=2)) == [(("node2",), 0.0)]


@pytest.mark.parametrize(
    ("limit_s", "waited_s", "exchanged"),
    [(3600, 31, True), (3600, 29, False), (1700, 31, False)],
    ids=["too long", "just now", "it fits"],
)
def test_a_job_of_ours_whose_limit_is_too_long_for_the_kept_node_is_exchanged_for_a_shorter_one(
    limit_s: float, waited_s: float, exchanged: bool
) -> None:
    """A preempted one: it has the limit with which it was submitted, before anybody was expected there."""
    name = "scv-0000000000000009"
    mine = ours(name, 9, restart_count=1, reason="Priority", time_limit_s=limit_s)
    waits = OurJob(name, 1, 9, 1, True, pinned="node2", since=NOW - waited_s)
    decision = decided(planned(1800, "node1", "node2"), mine, jobs=(waits,))
    if not exchanged:
        assert decision.actions == ()
        return
    cancelled, fresh = decision.actions
    assert isinstance(cancelled, CancelPending)
    assert (cancelled.intent_id, cancelled.code) == (name, HarvestCode.FRESH)
    assert (
        "its limit is 60 min, and node2 is kept for other users' jobs that are expected in 29"
        in cancelled.reason
    )
    assert submitted(decision) == [(("node2",), 1710.0 - 2 * waited_s)]
    assert isinstance(fresh, Submit)


def test_one_that_fits_nowhere_else_and_no_more_before_the_plan_keeps_its_place() -> None:
    mine = ours("scv-0000000000000009", 9, restart_count=1, reason="Priority", time_limit_s=3600.0)
    waits = OurJob("scv-0000000000000009", 1, 9, 1, True, pinned="node2", since=NOW - 100)
    assert decided(planned(400, "node1", "node2"), mine, jobs=(waits,)).actions == ()


def test_what_replaces_one_that_slurm_did_not_start_in_time_leaves_it_more_time() -> None:
    """Backfill tests a job minutes after it was submitted, or counts in longer steps than a minute (bf_resolution)."""
    name = "scv-0000000000000009"
    mine = ours(name, 9, reason="Priority", time_limit_s=1740.0)

    def limit_after(waited_s: float, in_s: float) -> list[tuple[tuple[str, ...], float]]:
        waits = OurJob(name, 1, 9, 1, True, pinned="node2", since=NOW - waited_s)
        return submitted(decided(planned(in_s, "node1", "node2"), mine, jobs=(waits,)))

    assert limit_after(60, 1790) == [(("node2",), 1700 - 120)]
    assert limit_after(900, 1790) == [(("node2",), 1700 * 0.75)], "it waited for others to leave, maybe"
    assert limit_after(900, 700) == [(("node2",), 600)], "not less than it is worth a start for"


@pytest.mark.parametrize(
    ("every_s", "takes_s", "step_s"), [(30, 5, 60), (60, 30, 60), (120, 60, 60), (300, 240, 60), (30, 5, 600)]
)
def test_an_engine_starts_before_the_others_however_slow_backfill_is(
    every_s: int, takes_s: int, step_s: int
) -> None:
    """It tests a job `takes_s` after it listed the queue, and holds a plan to begin at a whole `step_s`."""
    for phase in range(0, 600, 97):
        began = 1_000_000 + phase
        plan = began + 3000
        waits: dict[str, tuple[int, float]] = {}  # since, limit
        listed: set[str] = set()
        exchanged = 0
        for at in range(began, plan):
            if (at - began) % every_s == 10 % every_s:
                listed = set(waits)
            if (at - began - takes_s) % every_s == 10 % every_s and any(
                at + waits[name][1] < plan // step_s * step_s for name in listed & waits.keys()
            ):
                break
            if (at - began) % 10:
                continue
            large = job(7, gpus=8, n_nodes=2, start_time=plan, planned=("node1", "node2"), priority=9)
            queue = [
                ours(name, int(name[4:]), reason="Priority", time_limit_s=limit_s)
                for name, (_, limit_s) in waits.items()
            ]
            jobs = [
                OurJob(name, 1, int(name[4:]), 1, True, pinned="node2", since=since)
                for name, (since, _) in waits.items()
            ]
            decision = decide(
                view(at, (large, *queue), NODES), [Demand(1, "r", 1, 1, "useful")], jobs, LIMITS, at
            )
            for action in decision.actions:
                if isinstance(action, CancelPending):
                    del waits[action.intent_id]
                    exchanged += 1
                elif isinstance(action, Submit):
                    waits[f"scv-{at:016d}"] = (at, min(3600.0, action.most_s // 60 * 60))
        else:
            pytest.fail(f"it never started, and was exchanged {exchanged} times")
        assert exchanged <= 3


def test_a_job_for_whichever_node_may_still_go_where_others_are_expected_now() -> None:
    """It waits with the nodes that it was submitted without, and plans move."""
    idle = (node("node1", 2), node("node2"), node("node3", 4))
    decision = decide(
        view(NOW, (planned(400, "node2", "node3"),), idle),
        [Demand(1, "r", 1, 1, "useful")],
        (),
        limits_with(LIMITS, pin=False),
        NOW,
    )
    [fresh] = [one for one in decision.actions if isinstance(one, Submit)]
    assert (fresh.nodelist, fresh.exclude) == ((), ())


def test_where_backfill_counts_in_long_steps_an_engine_ends_before_the_step_in_which_others_are_expected() -> (
    None
):
    """Measured with 22.05 and bf_resolution=1200: one that ends within that step is not started."""
    assert submitted(decided(planned(3500, "node1", "node2"), plan_step_s=1200.0)) == [
        (("node2",), 13_200 - NOW - 30)
    ]
    assert submitted(decided(planned(3100, "node1", "node2"), plan_step_s=1200.0)) == [
        (("node2",), 12_000 - NOW - 30)
    ]


def test_a_plan_that_backfill_is_making_anew_still_holds() -> None:
    plans, whole = Plans(), planned(1800, "node1", "node2")
    cleared = replace(whole, planned=(), start_time=0.0)
    assert plans.complete([cleared], NOW) == (cleared,), "none was seen yet"
    assert plans.complete([whole], NOW) == (whole,)
    assert plans.complete([cleared], NOW + 60) == (whole,)
    assert plans.complete([cleared], NOW + KEPT_S) == (whole,), (
        "since it was seen, not since it was asked for"
    )
    assert plans.complete([cleared], NOW + KEPT_S + 1) == (cleared,)
    later = replace(whole, start_time=NOW + 4000)
    assert plans.complete([later], NOW + 400) == (later,), "what Slurm says now counts"


def test_a_plan_ends_with_its_hour_and_with_its_job() -> None:
    plans, whole = Plans(), planned(100, "node1", "node2")
    cleared = replace(whole, planned=(), start_time=0.0)
    plans.complete([whole], NOW)
    assert plans.complete([cleared], NOW + 101) == (cleared,), "it should have begun"
    plans.complete([whole], NOW)
    running = replace(cleared, state=JobState.RUNNING)
    assert plans.complete([running], NOW + 1) == (running,)
    assert plans.complete([cleared], NOW + 2) == (cleared,), "it was put back: another life"
