"""The harvest policy: what it may never do, whatever the cluster looks like, and what it does in the cases that matter."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.cluster.model import ClusterView, JobState
from scavenger.harvest.decide.decide import (
    NOT_ENCRYPTED,
    Cancel,
    CancelPending,
    DrainAllocated,
    DrainKind,
    HarvestCode,
    HarvestDecision,
    HarvestLimits,
    OurJob,
    Submit,
    allot,
    decide,
)
from scavenger.policy.fleet_size import Demand
from tests.harvest.flat_limits import limits_with
from tests.harvest.views import SHARED, job, node, view

LIMITS = limits_with("scavenge", max_engines=8, max_pending=4)
NOW = 1000.0


def demand(engines: int, run_id: int = 1, gpus: int = 1) -> Demand:
    return Demand(run_id, f"run{run_id}", engines, gpus, f"{engines} are useful")


def mine(n: int, *, waits: bool = False, **more: Any) -> OurJob:
    return OurJob(
        f"scv-{n:016x}",
        more.pop("run_id", 1),
        more.pop("job_id", 100 + n),
        more.pop("gpus", 1),
        waits,
        connected=more.pop("connected", not waits),
        **more,
    )


def submits(decision: HarvestDecision) -> list[Submit]:
    return [action for action in decision.actions if isinstance(action, Submit)]


# ---------------------------------------------------------------- properties

nodes_st = st.tuples(*(st.integers(0, 4) for _ in SHARED))
others_st = st.lists(
    st.builds(
        lambda n, gpus, partition, reason, nodes: job(
            500 + n, gpus=gpus * nodes, n_nodes=nodes, partition=partition, reason=reason
        ),
        st.integers(0, 30),
        st.integers(1, 4),
        st.sampled_from(["normal", "reserved", "scavenge"]),
        st.sampled_from(["Resources", "Priority", "", "Dependency", "JobHeldUser"]),
        st.integers(1, 3),
    ),
    max_size=4,
    unique_by=lambda one: one.job_id,
)
ours_st = st.lists(
    st.builds(
        lambda n, waits, leases, idle, leaving, run_id, connected: mine(
            n,
            waits=waits,
            leases=leases,
            idle_since=idle,
            drain_kind=leaving,
            run_id=run_id,
            connected=connected,
            asked_at=NOW - 5,
        ),
        st.integers(0, 50),
        st.booleans(),
        st.integers(0, 3),
        st.floats(0, 100),
        st.sampled_from(DrainKind),
        st.integers(1, 2),
        st.booleans(),
    ),
    max_size=8,
    unique_by=lambda one: one.intent_id,
)
demand_st = st.lists(
    st.builds(demand, st.integers(0, 6), st.integers(1, 3), st.integers(1, 2)),
    max_size=3,
    unique_by=lambda one: one.run_id,
)
limits_st = st.builds(
    lambda most, pending, headroom: limits_with(
        LIMITS, max_engines=most, max_pending=pending, headroom_gpus=headroom
    ),
    st.integers(0, 8),
    st.integers(1, 4),
    st.integers(0, 4),
)


def could_be_taken(cluster: ClusterView) -> int:
    """Idle GPUs that others' pending single-node jobs of the other users' partition could start on now, counted on its own."""
    free = {n.name: n.idle_gpus for n in cluster.nodes if n.name in SHARED}
    taken = 0
    for one in sorted(cluster.jobs, key=lambda one: one.job_id):
        if one.partition == "normal" and one.n_nodes == 1 and one.reason in ("Resources", "Priority", ""):
            where = max(sorted(free), key=lambda name: free[name])
            if free[where] >= one.gpus:
                free[where] -= one.gpus
                taken += one.gpus
    return taken


@settings(max_examples=300, deadline=None)
@given(nodes_st, others_st, ours_st, demand_st, limits_st, st.randoms(use_true_random=False))
def test_whatever_the_cluster_looks_like_the_decision_stays_within_bounds(
    allocated: tuple[int, ...],
    others: list[Any],
    jobs: list[OurJob],
    wanted: list[Demand],
    limits: HarvestLimits,
    rng: random.Random,
) -> None:
    cluster = view(
        NOW, others, [node("node0"), *(node(name, n) for name, n in zip(SHARED, allocated, strict=True))]
    )
    decision = decide(cluster, wanted, jobs, limits, NOW)
    new = submits(decision)
    idle = sum(n.idle_gpus for n in cluster.nodes if n.name in SHARED)
    waiting = [one for one in jobs if one.waits]

    # room: never more than is idle, less headroom, less what our own pending jobs and others' pending jobs take
    asked = sum(one.gpus for one in new)
    if new:
        assert asked + sum(one.gpus for one in waiting) <= idle
        assert asked + limits.headroom.gpus <= idle
    simple = [one for one in others if one.partition == "normal" and one.n_nodes == 1]
    if new and len(simple) == len(others):
        assert asked <= idle - could_be_taken(cluster)
    # limits
    assert len(new) + len(jobs) <= limits.caps.max_engines or not new
    assert len(new) + len(waiting) <= limits.caps.max_pending or not new
    # demand
    told = {action.intent_id for action in decision.actions if not isinstance(action, Submit)}
    serving = Counter(
        one.run_id for one in jobs if one.drain_kind is DrainKind.NO and one.intent_id not in told
    )
    serving.update(one.run_id for one in new)
    for run_id, have in serving.items():
        assert have <= sum(d.engines for d in wanted if d.run_id == run_id)
    # an engine goes only when no pending job of its run is left to cancel
    for action in decision.actions:
        if isinstance(action, DrainAllocated):
            run_id = next(one.run_id for one in jobs if one.intent_id == action.intent_id)
            left = [
                one
                for one in waiting
                if one.run_id == run_id and one.drain_kind is DrainKind.NO and one.intent_id not in told
            ]
            assert not left
    # reasons, and each job is told one thing
    assert decision.reason
    assert decision.public
    assert not re.search(r"run\d|node\d|scv-|alice|useful", decision.public), decision.public
    assert all(action.reason for action in decision.actions)
    assert len(told) == sum(not isinstance(action, Submit) for action in decision.actions)
    # the same facts in another order decide the same
    shuffled = [rng.sample(list(items), len(items)) for items in (cluster.nodes, others, jobs, wanted)]
    again = replace(
        cluster,
        nodes=tuple(shuffled[0]),
        jobs=tuple(shuffled[1]),
        partitions=tuple(reversed(cluster.partitions)),
    )
    assert decide(again, shuffled[3], shuffled[2], limits, NOW) == decision


@given(demand_st, st.integers(0, 12))
def test_engines_are_shared_in_turn_and_never_beyond_the_demand(wanted: list[Demand], most: int) -> None:
    given_ = allot(wanted, most)
    assert sum(given_.values()) == min(most, sum(d.engines for d in wanted))
    for d in wanted:
        assert given_[d.run_id] <= d.engines
        richer = [one for one in wanted if one.engines > given_[one.run_id]]
        assert all(given_[d.run_id] <= given_[one.run_id] + 1 for one in richer)


# ---------------------------------------------------------------- cases


def test_a_job_is_of_its_run_s_engine() -> None:
    wanted = [replace(demand(1), engine="vllm"), demand(1, run_id=2)]
    made = submits(decide(view(NOW), wanted, [], LIMITS, NOW))
    assert {submit.run: submit.engine for submit in made} == {"run1": "vllm", "run2": "reference"}


def test_idle_gpus_get_one_job_per_engine_up_to_what_may_wait() -> None:
    decision = decide(view(NOW), [demand(6)], [], LIMITS, NOW)
    assert len(submits(decision)) == 4
    assert "max_pending = 4" in decision.reason
    assert "12 GPUs idle" in decision.actions[0].reason


def test_an_old_view_decides_nothing() -> None:
    decision = decide(view(NOW - 61), [], [mine(1, waits=True)], LIMITS, NOW)
    assert decision.actions == ()
    assert "61 s old" in decision.reason


@pytest.mark.parametrize(
    ("other", "room"),
    [
        (job(1, gpus=3), 1),
        (job(1, gpus=4), 0),
        (job(1, gpus=4, reason="Dependency"), 4),
        (job(1, gpus=4, reason="BeginTime", eligible_time=NOW + 600), 4),
        (job(1, gpus=4, reason="BeginTime", eligible_time=NOW + 1), 0),
        (job(1, gpus=8, n_nodes=2), 4),  # could not start even without us
        (job(1, gpus=4, partition="reserved"), 4),  # another partition's nodes
        (job(1, gpus=1, partition="scavenge"), 3),
        (job(1, gpus=0), 4),
    ],
)
def test_a_gpu_that_a_pending_job_of_another_could_take_is_not_idle(other: Any, room: int) -> None:
    limits = limits_with(LIMITS, horizon_s=5.0)
    cluster = view(NOW, [other], [node("node0"), node("node1"), node("node2", 4), node("node3", 4)])
    assert len(submits(decide(cluster, [demand(6)], [], limits, NOW))) == room


def test_a_job_that_would_start_if_our_engines_left_claims_the_idle_gpus_too() -> None:
    running = [mine(1, job_id=7), mine(2, job_id=8)]
    held = [
        job(
            one.job_id, JobState.RUNNING, partition="scavenge", nodes=("node1",), gpus_by_node=(("node1", 1),)
        )
        for one in running
    ]
    cluster = view(
        NOW, [*held, job(1, gpus=4)], [node("node0"), node("node1", 2), node("node2", 4), node("node3", 4)]
    )
    assert submits(decide(cluster, [demand(6)], running, LIMITS, NOW)) == []


@pytest.mark.parametrize(
    "bad",
    [
        node("node1", states=("down",)),
        node("node1", states=("idle", "drain")),
        node("node1", 4),
        node("node1", cpus_allocated=64),
    ],
)
def test_a_node_that_cannot_take_an_engine_is_no_room(bad: Any) -> None:
    cluster = view(NOW, nodes=[node("node0"), bad, node("node2", 4), node("node3", 3)])
    assert len(submits(decide(cluster, [demand(6)], [], LIMITS, NOW))) == 1


def test_a_quarantined_node_is_excluded_and_is_no_room() -> None:
    limits = limits_with(
        LIMITS, quarantined=(("node1", "3 engines died on it"),), max_pending=12, max_engines=12
    )
    decision = decide(view(NOW), [demand(12)], [], limits, NOW)
    assert len(submits(decision)) == 8
    assert all(action.exclude == ("node1",) for action in submits(decision))
    assert "quarantined: node1" in decision.reason


@pytest.mark.parametrize("pin", [True, False])
def test_a_node_where_engines_could_not_start_gets_one_only_where_no_other_does(pin: bool) -> None:
    """node1 has the smaller gap, and is tried last; it is no quarantine."""
    shown = view(NOW, nodes=[node("node1", gpus=1), node("node2", gpus=2)])
    limits = limits_with(LIMITS, doubted=frozenset({"node1"}), pin=pin)
    placed = submits(decide(shown, [demand(3)], (), limits, NOW))
    if pin:
        assert [one.nodelist for one in placed] == [("node2",), ("node2",), ("node1",)]
    else:
        assert [one.exclude for one in placed] == [("node1",), ("node1",), ()]
    alone = view(NOW, nodes=[node("node1", gpus=1)])
    assert len(submits(decide(alone, [demand(3)], (), limits, NOW))) == 1


def test_nothing_is_submitted_before_the_back_off_is_over() -> None:
    limits = limits_with(LIMITS, not_before=NOW + 1, not_before_reason="job 3 FAILED after 1 s")
    early = decide(view(NOW), [demand(1)], [], limits, NOW)
    assert early.actions == ()
    assert "job 3 FAILED" in early.reason
    assert len(submits(decide(view(NOW + 1), [demand(1)], [], limits, NOW + 1))) == 1


def test_a_requeued_job_waiting_for_its_begin_time_serves_demand_and_counts_as_pending() -> None:
    assert decide(view(NOW), [demand(1)], [mine(1, waits=True)], LIMITS, NOW).actions == ()
    limits = limits_with(LIMITS, max_pending=1)
    decision = decide(view(NOW), [demand(2)], [mine(1, waits=True)], limits, NOW)
    assert decision.actions == ()
    assert "max_pending" in decision.reason


def test_surplus_goes_pending_first_then_the_idlest_engine() -> None:
    jobs = [mine(1, leases=2), mine(2, idle_since=50.0), mine(3, idle_since=10.0), mine(4, waits=True)]
    assert [type(a) for a in decide(view(NOW), [demand(3)], jobs, LIMITS, NOW).actions] == [CancelPending]
    two = decide(view(NOW), [demand(2)], jobs, LIMITS, NOW).actions
    assert {a.code for a in two} == {HarvestCode.OVER_SHARE}
    misfits = decide(view(NOW), [demand(1, gpus=2)], [mine(1)], LIMITS, NOW).actions
    assert [a.code for a in misfits] == [HarvestCode.WRONG_SIZE, HarvestCode.WANTED]
    assert [(type(a), a.intent_id) for a in two if not isinstance(a, Submit)] == [
        (CancelPending, jobs[3].intent_id),
        (DrainAllocated, jobs[2].intent_id),
    ]


def test_with_demand_gone_everything_goes_at_once_and_says_why() -> None:
    jobs = [mine(1, leases=2), mine(2, waits=True), mine(3, connected=False)]
    decision = decide(view(NOW), [Demand(1, "run1", 0, 1, "the run is over")], jobs, LIMITS, NOW)
    assert {a.code for a in decision.actions} == {decision.code} == {HarvestCode.NO_DEMAND}
    assert {type(a): a.intent_id for a in decision.actions if not isinstance(a, Submit)} == {
        CancelPending: jobs[1].intent_id,
        DrainAllocated: jobs[0].intent_id,
        Cancel: jobs[2].intent_id,
    }
    assert "the run is over" in decision.reason


def test_beyond_a_link_only_runs_that_encrypt_their_weights_have_engines_and_the_decision_says_so() -> None:
    beyond = replace(LIMITS, beyond_link=True)
    clear, sealed = demand(2), replace(demand(1, run_id=2), encrypts=True)
    jobs = [mine(1), mine(2, waits=True)]
    barred = decide(view(NOW), [clear], jobs, beyond, NOW)
    assert {a.code for a in barred.actions} == {barred.code} == {HarvestCode.NOT_ENCRYPTED}
    assert {type(a) for a in barred.actions} == {CancelPending, DrainAllocated}, "what is there leaves"
    assert NOT_ENCRYPTED in barred.reason
    both = decide(view(NOW), [clear, sealed], [], beyond, NOW)
    assert [one.run for one in submits(both)] == ["run2"]
    assert len(submits(decide(view(NOW), [clear, sealed], [], LIMITS, NOW))) == 3, "here all have"


def test_a_job_that_does_not_leave_is_cancelled_after_the_grace() -> None:
    given_back = mine(1, drain_kind=DrainKind.DRAINING, asked_at=NOW)
    assert decide(view(NOW + 29), [], [given_back], LIMITS, NOW + 29).actions == ()
    (late,) = decide(view(NOW + 30), [], [given_back], LIMITS, NOW + 30).actions
    assert (type(late), late.code) == (Cancel, HarvestCode.OVERDUE)
    back = mine(1, waits=True, drain_kind=DrainKind.DRAINING, asked_at=NOW)
    first, *_ = decide(view(NOW), [demand(1)], [back], LIMITS, NOW).actions
    assert (type(first), first.code) == (CancelPending, HarvestCode.REQUEUED)


@pytest.mark.parametrize("kind", DrainKind)
@pytest.mark.parametrize("waits", [True, False])
def test_a_job_that_was_to_leave_for_good_and_is_back_is_cancelled_at_once(
    kind: DrainKind, waits: bool
) -> None:
    """With its engine at work again, and whatever its run wants: it gets a fresh job where it wants one."""
    back = mine(1, waits=waits, drain_kind=kind, asked_at=NOW, returned="Slurm put it back", leases=2)
    decision = decide(view(NOW), [demand(1)], [back], LIMITS, NOW)
    first, *others = decision.actions
    assert (type(first), first.code) == (CancelPending if waits else Cancel, HarvestCode.REQUEUED)
    assert first.reason == "Slurm put it back"
    assert [type(one) for one in others] == [Submit]


def test_a_job_that_slurm_holds_is_cancelled_and_replaced() -> None:
    decision = decide(
        view(NOW), [demand(1)], [mine(1, waits=True, held="launch failed requeued held")], LIMITS, NOW
    )
    assert [(type(a), a.code) for a in decision.actions] == [
        (CancelPending, HarvestCode.HELD),
        (Submit, HarvestCode.WANTED),
    ]
    assert "launch failed" in decision.actions[0].reason


def test_a_leaving_engine_still_counts_against_max_engines() -> None:
    limits = limits_with(LIMITS, max_engines=1)
    decision = decide(
        view(NOW), [demand(1)], [mine(1, drain_kind=DrainKind.DRAINING, asked_at=NOW)], limits, NOW
    )
    assert decision.actions == ()
    assert "max_engines = 1" in decision.reason


def test_a_partition_that_is_gone_gets_no_jobs_but_surplus_still_leaves() -> None:
    limits = limits_with(LIMITS, partition="nowhere")
    decision = decide(view(NOW), [demand(1, run_id=2)], [mine(1, waits=True)], limits, NOW)
    assert [type(a) for a in decision.actions] == [CancelPending]
    assert "nowhere is not there" in decision.reason


def test_an_engine_of_two_gpus_needs_them_on_one_node() -> None:
    cluster = view(NOW, nodes=[node("node0"), node("node1", 3), node("node2", 3), node("node3", 2)])
    assert len(submits(decide(cluster, [demand(6, gpus=2)], [], LIMITS, NOW))) == 1
