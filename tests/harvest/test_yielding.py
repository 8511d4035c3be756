"""Idle means idle, and who leaves for whom: what others need now or soon is not ours, however the cluster looks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.cluster.model import ClusterView, JobFlag, JobState, Reservation
from scavenger.config import DaemonConfig
from scavenger.harvest.decide.decide import (
    Action,
    Cancel,
    CancelPending,
    DrainAllocated,
    DrainKind,
    HarvestCode,
    HarvestDecision,
    HarvestLimits,
    OurJob,
    Submit,
    decide,
)
from scavenger.harvest.limits import StopState
from scavenger.harvest.track.node_health import HealthRules
from scavenger.harvest.track.tracker import Tracker, TrackerRules
from scavenger.policy.fleet_size import Demand
from tests.harvest.flat_limits import limits_with
from tests.harvest.views import INFO, SHARED, job, node, ours, view

LIMITS = limits_with(
    "scavenge",
    max_engines=30,
    max_pending=30,
    pin=True,
    other_users_window_s=60.0,
    drain_before_s=30.0,
    user="scavenger",
)
NOW = 1000.0


def want(engines: int, gpus: int = 1) -> list[Demand]:
    return [Demand(1, "run1", engines, gpus, f"{engines} are useful")]


def engine(n: int, where: str = "node1", **more: Any) -> OurJob:
    fields: dict[str, Any] = {"connected": True, "leases": 1, "since": NOW - 500, **more}
    return OurJob(
        f"scv-{n:016x}", 1, 100 + n, fields.pop("gpus", 1), fields.pop("waits", False), where, **fields
    )


def listed(one: OurJob, **more: Any) -> Any:
    fields: dict[str, Any] = {
        "nodes": (one.node,),
        "gpus": one.gpus,
        "gpus_by_node": ((one.node, one.gpus),),
        **more,
    }
    return ours(one.intent_id, one.job_id, JobState.RUNNING, **fields)


def waiting(one: OurJob, **more: Any) -> Any:
    return ours(one.intent_id, one.job_id, gpus=one.gpus, **more)


def full(*busy: str) -> list[Any]:
    """Nodes of which those named are taken by others."""
    return [node("node0"), *(node(name, 4 if name in busy else 0) for name in SHARED)]


def played(
    engines: list[OurJob], others: list[Any], nodes: list[Any] | None = None, **more: Any
) -> tuple[ClusterView, list[OurJob]]:
    jobs = [*(listed(one) for one in engines if not one.waits), *others]
    made = view(NOW, jobs) if nodes is None else view(NOW, jobs, nodes)
    return replace(made, **more), engines


def asked(decision: HarvestDecision) -> int:
    return sum(action.gpus for action in decision.actions if isinstance(action, Submit))


def left(actions: tuple[Action, ...]) -> list[tuple[str, str]]:
    return [(type(a).__name__, str(a.code)) for a in actions if not isinstance(a, Submit)]


# ---------------------------------------------------------------- what is idle


@pytest.mark.parametrize(
    ("others", "room"),
    [
        ([], 12),
        ([job(1, gpus=4, reason="BeginTime", eligible_time=NOW + 59)], 8),
        ([job(1, gpus=4, reason="BeginTime", eligible_time=NOW + 61)], 12),
        (
            [job(1, gpus=20, n_nodes=5, start_time=NOW + 59)],
            0,
        ),  # others will have ended by then, says the backfill plan
        ([job(1, gpus=20, n_nodes=5, start_time=NOW + 61)], 12),
        ([job(1, gpus=20, n_nodes=5)], 12),  # nobody knows when
        ([job(1, gpus=4, reason="Dependency", start_time=NOW + 10)], 12),
        ([job(1, gpus=4, cpus=65)], 12),  # no node has so many CPUs: it waits for something else
        ([job(1, gpus=2), job(2, gpus=2)], 8),
        ([job(1, gpus=2)] * 3, 6),  # the waiting tasks of an array all have the array's id
    ],
)
def test_what_others_need_within_the_window_is_not_idle(others: list[Any], room: int) -> None:
    assert asked(decide(view(NOW, others), want(20), [], LIMITS, NOW)) == room


def test_after_too_many_preemptions_no_preempted_job_comes_back_by_itself_and_what_runs_goes_on() -> None:
    limits = limits_with(LIMITS, max_preemptions_per_hour=2)
    cluster, ours_ = played(
        [engine(1), engine(2, waits=True)], [waiting(engine(2), restart_count=1, reason="BeginTime")]
    )
    assert (
        left(decide(cluster, want(2), ours_, limits_with(limits, preempted_last_hour=1), NOW).actions) == []
    )
    decision = decide(cluster, want(2), ours_, limits_with(limits, preempted_last_hour=2), NOW)
    assert (left(decision.actions), decision.code) == (
        [("CancelPending", "preemptions")],
        HarvestCode.PREEMPTIONS,
    )
    assert asked(decision) == 0


@pytest.mark.parametrize(
    ("limits", "room", "code"),
    [
        ({"headroom_gpus": 3}, 9, HarvestCode.HEADROOM),
        ({"headroom_per_node": 1}, 9, HarvestCode.HEADROOM),
        ({"headroom_by_type": (("h100", 5),)}, 7, HarvestCode.HEADROOM),
        ({"headroom_by_type": (("a100", 5),)}, 12, HarvestCode.HEADROOM),
        ({"headroom_by_partition": (("normal", 4), ("reserved", 2))}, 8, HarvestCode.HEADROOM),
        ({"max_gpus_per_node": 1}, 3, HarvestCode.NO_CAPACITY),
        ({"max_gpus": 5}, 5, HarvestCode.MAX_GPUS),
        ({"max_gpus_per_user": 5}, 5, HarvestCode.MAX_PER_USER),
        ({"max_engines": 5}, 5, HarvestCode.MAX_ENGINES),
        ({"max_pending": 5}, 5, HarvestCode.MAX_PENDING),
        ({"max_preemptions_per_hour": 3, "preempted_last_hour": 3}, 0, HarvestCode.PREEMPTIONS),
        ({"max_preemptions_per_hour": 3, "preempted_last_hour": 2}, 12, HarvestCode.NO_CAPACITY),
        ({"hidden": "PrivateData hides jobs"}, 12, HarvestCode.NO_CAPACITY),
        ({"hidden": "PrivateData hides jobs", "blind": True}, 0, HarvestCode.HIDDEN),
        ({"stop": "the stop file"}, 0, HarvestCode.STOPPED),
        ({"memory_mb_per_engine": 250_001}, 0, HarvestCode.NO_CAPACITY),
    ],
)
def test_each_limit_stops_submissions_and_says_so(
    limits: dict[str, Any], room: int, code: HarvestCode
) -> None:
    decision = decide(view(NOW), want(20), [], limits_with(LIMITS, **limits), NOW)
    assert (asked(decision), decision.code) == (room, code)
    assert decision.reason


def test_that_nobody_is_yielded_to_is_said_in_every_decision() -> None:
    decision = decide(
        view(NOW), want(1), [], limits_with(LIMITS, hidden="PrivateData hides jobs: 3 GPUs"), NOW
    )
    assert "no voluntary preemption: PrivateData hides jobs: 3 GPUs" in decision.reason


def test_a_job_that_slurm_holds_back_for_a_limit_of_ours_stops_more() -> None:
    mine = engine(1, "", waits=True)
    held = replace(waiting(mine), reason="QOSMaxGRESPerUser")
    decision = decide(view(NOW, [held]), want(3), [mine], LIMITS, NOW)
    assert (decision.actions, decision.code) == ((), HarvestCode.ACCOUNT_LIMIT)


def test_an_engine_asks_for_its_gpus_share_of_the_node_at_most() -> None:
    decision = decide(view(NOW), want(1, gpus=2), [], limits_with(LIMITS, cpus_per_engine=100), NOW)
    (one,) = decision.actions
    assert isinstance(one, Submit)
    assert (one.cpus, one.memory_mb) == (32, 500_000)


def test_fragments_are_filled_first_and_each_job_names_its_node() -> None:
    cluster = view(NOW, [], [node("node0"), node("node1", 1), node("node2", 3), node("node3")])
    nodes = [
        action.nodelist
        for action in decide(cluster, want(5), [], LIMITS, NOW).actions
        if isinstance(action, Submit)
    ]
    assert nodes == [("node2",), ("node1",), ("node1",), ("node1",), ("node3",)]


def test_of_equal_gaps_those_are_taken_that_nobody_reclaims_together_with_ours() -> None:
    cluster = view(
        NOW,
        [],
        [
            replace(node(name), partitions=frozenset({"scavenge", where}))
            for name, where in (("node1", "a"), ("node2", "a"), ("node3", "b"))
        ],
    )
    first, second = [
        action.nodelist
        for action in decide(cluster, want(2, gpus=4), [], LIMITS, NOW).actions
        if isinstance(action, Submit)
    ]
    assert {first, second} == {("node1",), ("node3",)}


# ---------------------------------------------------------------- reservations


def test_a_node_with_a_reservation_soon_gets_no_engine_and_a_later_one_ends_it_in_time() -> None:
    soon = Reservation("maintenance", frozenset({"node1"}), NOW + 900, NOW + 2000, maintenance=True)
    later = Reservation("course", frozenset({"node2"}), NOW + 5000, NOW + 9000)
    past = Reservation("old", frozenset({"node3"}), NOW - 900, NOW - 1)
    cluster = replace(view(NOW), reservations=(soon, later, past))
    decision = decide(cluster, want(20), [], limits_with(LIMITS, min_life_s=930.0), NOW)
    found = {(action.nodelist, action.most_s) for action in decision.actions if isinstance(action, Submit)}
    assert found == {(("node2",), 4970.0), (("node3",), 0.0)}
    assert "reserved soon: node1" in decision.reason


def test_an_engine_leaves_before_its_end_a_reservation_and_a_drained_node() -> None:
    engines = [engine(n, where) for n, where in ((1, "node1"), (2, "node2"), (3, "node3"), (4, "node3"))]
    jobs = [listed(engines[0], end_time=NOW + 29), *(listed(one, end_time=NOW + 1000) for one in engines[1:])]
    booked = Reservation("course", frozenset({"node2"}), NOW + 30, NOW + 9000)
    nodes = [node("node0"), node("node1", 1), node("node2", 1), node("node3", 2, states=("mixed", "drain"))]
    cluster = replace(view(NOW, jobs, nodes), reservations=(booked,))
    engines[3] = replace(engines[3], connected=False)
    gone = {
        a.intent_id: (type(a), a.code)
        for a in decide(cluster, want(4), engines, LIMITS, NOW).actions
        if not isinstance(a, Submit)
    }
    assert gone == {
        engines[0].intent_id: (DrainAllocated, HarvestCode.ENDING),
        engines[1].intent_id: (DrainAllocated, HarvestCode.RESERVED),
        engines[2].intent_id: (DrainAllocated, HarvestCode.NODE_DRAINED),
        engines[3].intent_id: (Cancel, HarvestCode.NODE_DRAINED),
    }


def test_engines_of_a_node_that_scavenger_drains_leave_and_none_starts_there() -> None:
    engines = [engine(1, "node1"), engine(2, "node2")]
    jobs = [listed(one, end_time=NOW + 1000) for one in engines]
    nodes = [node("node0"), node("node1", 1), node("node2", 1), node("node3", states=("down",))]
    limits = limits_with(LIMITS, drained=(("node1", "node1 is drained: ada"),))
    decision = decide(view(NOW, jobs, nodes), want(9), engines, limits, NOW)
    left = [a for a in decision.actions if not isinstance(a, Submit)]
    assert [(type(a), getattr(a, "intent_id", ""), a.code) for a in left] == [
        (DrainAllocated, engines[0].intent_id, HarvestCode.NODE_DRAINED)
    ]
    assert "node1 is drained: ada" in left[0].reason
    assert {a.nodelist for a in decision.actions if isinstance(a, Submit)} == {("node2",)}, "three are idle"
    assert "drained: node1" in decision.reason


# ---------------------------------------------------------------- who leaves for whom


@pytest.mark.parametrize(
    ("waits", "gone"),
    [
        (
            {"partition": "scavenge"},
            [("DrainAllocated", "same_tier_job")],
        ),  # at once: Slurm will never take it from us
        ({"partition": "scavenge", "gpus": 2}, [("DrainAllocated", "same_tier_job")] * 2),
        ({"partition": "scavenge", "gpus": 5, "n_nodes": 1}, []),  # no node has five
        ({"partition": "scavenge", "reason": "Dependency"}, []),
        (
            {"partition": "scavenge", "name": "scv-00000000000000ff"},
            [],
        ),  # another harvester's: a guest like us
        ({"partition": "normal"}, []),  # Slurm preempts us for it
        (
            {"partition": "normal", "job_id": 2},
            [("DrainAllocated", "voluntary_preemption")],
        ),  # and did not for ten seconds
        (
            {"partition": "normal", "job_id": 3, "submit_time": NOW - 99},
            [],
        ),  # it could start for nine seconds only
        ({"partition": "normal", "submit_time": NOW - 99}, []),  # it could not start at the last look
        ({"partition": "reserved", "submit_time": NOW - 99}, []),  # not on our nodes
        (
            {"partition": "normal", "reason": "BeginTime", "eligible_time": NOW + 19},
            [("DrainAllocated", "voluntary_preemption")],
        ),
        (
            {"partition": "normal", "reason": "BeginTime", "eligible_time": NOW + 21},
            [],
        ),  # the next look is early enough
        (
            {"partition": "scavenge", "gpus": 1, "cpus": 61},
            [("DrainAllocated", "same_tier_job")],
        ),  # it is the CPUs that it lacks
    ],
)
def test_who_leaves_for_a_waiting_job(waits: dict[str, Any], gone: list[tuple[str, str]]) -> None:
    engines = [engine(n) for n in range(4)]
    other = replace(job(1, submit_time=NOW), **waits)
    cluster, _ = played(
        engines, [other], [node("node0"), node("node1", 4), node("node2", 4), node("node3", 4)]
    )
    limits = limits_with(LIMITS, horizon_s=20.0, could_start_since=((2, NOW - 10), (3, NOW - 9)))
    decision = decide(cluster, want(4), engines, limits, NOW)
    assert left(decision.actions) == gone
    assert asked(decision) == 0
    now_and_by_tier = other.partition == "normal" and other.reason != "BeginTime"
    assert decision.could_start == ((other.job_id,) if now_and_by_tier else ())


@pytest.mark.parametrize("partition", ["normal", "scavenge"])
def test_where_slurm_preempts_by_qos_nobody_is_called_a_peer_and_all_are_left_for_at_once(
    partition: str,
) -> None:
    """Tiers say nothing there, and whether the one who waits may preempt us is not seen."""
    engines = [engine(n) for n in range(4)]
    cluster, _ = played(
        engines,
        [job(1, partition=partition, submit_time=NOW)],
        [node("node0"), *(node(name, 4) for name in SHARED)],
    )
    decision = decide(cluster, want(4), engines, limits_with(LIMITS, by_qos=True), NOW)
    assert left(decision.actions) == [("DrainAllocated", "qos")]
    assert "preempts by QOS" in decision.actions[0].reason
    slow = engine(1, drain_kind=DrainKind.DRAINING, asked_at=NOW - 5, why_draining=HarvestCode.QOS)
    bound = limits_with(LIMITS, by_qos=True, same_tier_yield_s=5.0, drain_notice_s=30.0)
    assert left(decide(played([slow], [])[0], [], [slow], bound, NOW).actions) == [("Cancel", "overdue")]
    info = replace(INFO, preempt_type="preempt/qos")
    stop_state = StopState(lambda: DaemonConfig.model_validate({"daemon": {"state_dir": Path()}}))
    tracker = Tracker(TrackerRules("u", "scavenger", 1.0, HealthRules(3, 60.0, 1.0)))
    assert stop_state.update_limits(cluster, info, tracker, 30.0, NOW).yielding.by_qos
    assert not stop_state.update_limits(cluster, INFO, tracker, 30.0, NOW).yielding.by_qos


def test_the_engines_with_the_least_to_lose_leave_and_no_more_than_are_needed() -> None:
    engines = [
        engine(1, "node1", leases=3),
        engine(2, "node1", leases=0, idle_since=5.0),
        engine(3, "node2", leases=2),
    ]
    nodes = [node("node0"), node("node1", 4), node("node2", 4), node("node3", 4)]
    cluster, _ = played(engines, [job(1, partition="scavenge", submit_time=NOW)], nodes)
    (only,) = decide(cluster, want(3), engines, LIMITS, NOW).actions
    assert isinstance(only, DrainAllocated)
    assert only.intent_id == engines[1].intent_id
    assert "job 1 of alice would start here on 1 x 1 GPUs" in only.reason


def test_what_is_on_its_way_out_counts_as_free_for_the_one_who_waits() -> None:
    nodes = [node("node0"), node("node1", 4), node("node2", 4), node("node3", 4)]
    peer = job(1, partition="scavenge", submit_time=NOW)
    leaving = [engine(1, drain_kind=DrainKind.DRAINING, asked_at=NOW - 1), engine(2)]
    cluster, _ = played(leaving, [peer], nodes)
    assert decide(cluster, want(2), leaving, LIMITS, NOW).actions == ()
    completing = job(
        9,
        JobState.RUNNING,
        nodes=("node2",),
        gpus_by_node=(("node2", 1),),
        flags=frozenset({JobFlag.COMPLETING}),
    )
    cluster, engines = played([engine(2)], [peer, completing], nodes)
    assert decide(cluster, want(1), engines, LIMITS, NOW).actions == ()


def test_an_engine_in_slurm_s_grace_is_left_alone_and_counts_as_leaving() -> None:
    """22.05 shows the end of the grace as EndTime. Asked to leave, it would be cancelled when it comes back to the queue."""
    engines = [engine(1), engine(2)]
    ends_at = (NOW + 10, NOW + 3500)
    jobs = [
        listed(one, start_time=NOW - 100, time_limit_s=3600.0, end_time=end)
        for one, end in zip(engines, ends_at, strict=True)
    ]
    late, limits = job(1), limits_with(LIMITS, could_start_since=((1, NOW - 60),))
    cluster = view(NOW, [*jobs, late], [node("node0"), node("node1", 4), node("node2", 4), node("node3", 4)])
    assert decide(cluster, want(2), engines, limits, NOW).actions == ()
    ends = [replace(jobs[0], time_limit_s=110.0), jobs[1]]
    at_its_limit = replace(cluster, jobs=tuple(ends))
    assert left(decide(at_its_limit, want(2), engines, limits, NOW).actions) == [("DrainAllocated", "ending")]


def test_a_peer_gets_the_gpus_within_its_time_even_from_an_engine_that_does_not_drain() -> None:
    limits = limits_with(LIMITS, same_tier_yield_s=5.0, drain_notice_s=30.0)
    slow = engine(1, drain_kind=DrainKind.DRAINING, asked_at=NOW - 5)
    cluster, _ = played([slow], [], full())
    assert decide(cluster, want(1), [slow], limits, NOW).actions[:1] != (
        Cancel(slow.intent_id, "", HarvestCode.OVERDUE),
    )
    assert left(decide(cluster, [], [slow], limits, NOW).actions) == []
    for_peer = replace(slow, why_draining=HarvestCode.SAME_TIER_JOB)
    assert left(decide(cluster, [], [for_peer], limits, NOW).actions) == [("Cancel", "overdue")]


def test_where_slurm_chooses_a_job_of_before_a_restart_waits_for_no_node() -> None:
    """It is known by where it ran. Its node is taken, and it may start anywhere."""
    one = engine(1, "", waits=True, pinned="node1", since=NOW - 500)
    cluster = view(NOW, [waiting(one, reason="Resources")], full("node1"))
    for pin, moves in ((False, 0), (True, 1)):
        decision = decide(
            cluster,
            want(1),
            [one],
            limits_with(LIMITS, fresh_after_s=30.0, max_engines=1, max_pending=1, pin=pin),
            NOW,
        )
        assert sum(isinstance(action, CancelPending) for action in decision.actions) == moves


def test_a_stop_drains_and_one_in_a_hurry_cancels() -> None:
    engines = [
        engine(1),
        engine(2, drain_kind=DrainKind.DRAINING, asked_at=NOW - 1),
        engine(3, "", waits=True),
    ]
    cluster, _ = played(engines, [waiting(engines[2])])
    soft = decide(cluster, want(9), engines, limits_with(LIMITS, stop="drain"), NOW)
    assert left(soft.actions) == [("CancelPending", "stopped"), ("DrainAllocated", "stopped")]
    hard = decide(cluster, want(9), engines, limits_with(LIMITS, stop="drain", stop_now=True), NOW)
    assert left(hard.actions) == [("Cancel", "stopped"), ("CancelPending", "stopped"), ("Cancel", "stopped")]


# ---------------------------------------------------------------- a waiting job of ours: its place or a fresh one


@pytest.mark.parametrize(
    ("mine", "in_queue", "busy", "moves"),
    [
        ({}, {"reason": "BeginTime", "eligible_time": NOW + 121}, (), True),
        (
            {},
            {"reason": "BeginTime", "eligible_time": NOW + 121},
            SHARED,
            False,
        ),  # nowhere to go: it keeps its place
        ({}, {"reason": "BeginTime", "eligible_time": NOW + 6}, (), False),  # as soon as a fresh one
        (
            {"since": NOW - 1},
            {"reason": "None", "eligible_time": NOW + 600},
            (),
            False,
        ),  # just submitted; our clock is behind Slurm's
        ({"pinned": "node1", "since": NOW - 31}, {"reason": "Resources"}, ("node1",), True),
        ({"pinned": "node1", "since": NOW - 29}, {"reason": "Resources"}, ("node1",), False),
        (
            {"pinned": "node1", "since": NOW - 99},
            {"reason": "Resources"},
            (),
            False,
        ),  # its node is free: it will start
        (
            {"pinned": "node1", "since": NOW - 121},
            {"reason": "Resources"},
            (),
            True,
        ),  # it looks free, and Slurm does not start it
        ({"since": NOW - 99}, {"reason": "Resources"}, ("node1",), False),
        (
            {"since": NOW - 121},
            {"reason": "Resources"},
            ("node1",),
            True,
        ),  # a daemon before this one chose its node; which?
    ],
)
def test_a_waiting_job_keeps_its_place_unless_a_fresh_one_starts_sooner(
    mine: dict[str, Any], in_queue: dict[str, Any], busy: tuple[str, ...], moves: bool
) -> None:
    one = engine(1, "", waits=True, **mine)
    cluster = view(NOW, [waiting(one, **in_queue)], full(*busy))
    decision = decide(
        cluster, want(1), [one], limits_with(LIMITS, fresh_after_s=30.0, max_engines=1, max_pending=1), NOW
    )
    kinds = [type(action) for action in decision.actions]
    assert kinds == ([CancelPending, Submit] if moves else [])
    assert not moves or decision.actions[0].code is HarvestCode.FRESH


# ---------------------------------------------------------------- properties

place_st = st.sampled_from(SHARED)
others_st = st.lists(
    st.builds(
        lambda n, gpus, nodes, partition, reason, later, start, since: job(
            500 + n,
            gpus=gpus * nodes,
            n_nodes=nodes,
            partition=partition,
            reason=reason,
            eligible_time=NOW + later,
            start_time=NOW + start,
            submit_time=NOW - since,
        ),
        st.integers(0, 30),
        st.integers(1, 4),
        st.integers(1, 3),
        st.sampled_from(["normal", "scavenge", "normal,scavenge", "reserved"]),
        st.sampled_from(["Resources", "Priority", "BeginTime", "Dependency"]),
        st.integers(-50, 200),
        st.integers(-50, 200),
        st.integers(0, 100),
    ),
    max_size=6,
    unique_by=lambda one: one.job_id,
)
fleet_st = st.lists(
    st.builds(
        lambda n, where, leases, connected, waits, pinned, leaving: engine(
            n,
            "" if waits else where,
            leases=leases,
            connected=connected and not waits,
            waits=waits,
            pinned=where if pinned else "",
            drain_kind=leaving,
            asked_at=NOW - 3,
        ),
        st.integers(0, 40),
        place_st,
        st.integers(0, 3),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.sampled_from([DrainKind.NO, DrainKind.NO, DrainKind.NO, DrainKind.DRAINING]),
    ),
    max_size=6,
    unique_by=lambda one: one.intent_id,
)
limits_st = st.builds(
    lambda engines, gpus, pending, per_node, per_user, room, node_room, kind_room, part_room, fresh: (
        limits_with(
            LIMITS,
            max_engines=engines,
            max_gpus=gpus,
            max_pending=pending,
            max_gpus_per_node=per_node,
            max_gpus_per_user=per_user,
            headroom_gpus=room,
            headroom_per_node=node_room,
            headroom_by_type=(("h100", kind_room),),
            headroom_by_partition=(("normal", part_room),),
            fresh_after_s=fresh,
            min_life_s=100.0,
        )
    ),
    st.integers(0, 10),
    st.none() | st.integers(0, 10),
    st.integers(1, 6),
    st.none() | st.integers(0, 4),
    st.none() | st.integers(0, 8),
    st.integers(0, 4),
    st.integers(0, 2),
    st.integers(0, 4),
    st.integers(0, 4),
    st.sampled_from([30.0, float("inf")]),
)
booked_st = st.lists(
    st.builds(
        lambda names, start, long: Reservation("r", frozenset(names), NOW + start, NOW + start + long),
        st.sets(place_st, min_size=1),
        st.integers(-50, 300),
        st.integers(1, 100),
    ),
    max_size=2,
)


def cluster_of(
    taken: tuple[int, ...], others: list[Any], fleet: list[OurJob], booked: list[Reservation]
) -> ClusterView:
    held = {name: sum(one.gpus for one in fleet if one.node == name and not one.waits) for name in SHARED}
    nodes = [
        node("node0"),
        *(node(name, min(4, n + held[name])) for name, n in zip(SHARED, taken, strict=True)),
    ]
    jobs = [listed(one) if not one.waits else waiting(one, reason="Resources") for one in fleet]
    return replace(view(NOW, [*jobs, *others], nodes), reservations=tuple(booked))


taken_st = st.tuples(*(st.integers(0, 3) for _ in SHARED))


@settings(max_examples=400, deadline=None)
@given(taken_st, others_st, fleet_st, booked_st, st.integers(0, 8), st.integers(1, 2), limits_st)
def test_no_limit_is_broken_and_no_gpu_of_a_reservation_is_taken(
    taken: tuple[int, ...],
    others: list[Any],
    fleet: list[OurJob],
    booked: list[Reservation],
    engines: int,
    gpus: int,
    limits: HarvestLimits,
) -> None:
    cluster = cluster_of(taken, others, fleet, booked)
    decision = decide(cluster, want(engines, gpus), fleet, limits, NOW)
    new = [action for action in decision.actions if isinstance(action, Submit)]
    fresh = {
        action.intent_id
        for action in decision.actions
        if action.code is HarvestCode.FRESH and isinstance(action, CancelPending)
    }
    rest = [one for one in fleet if one.intent_id not in fresh]
    if new:
        # Where more is there than is allowed, one may take another's place: never is it more than it was.
        gpus_before = sum(one.gpus for one in fleet)
        assert len(new) + len(rest) <= max(limits.caps.max_engines, len(fleet))
        waiting_now = len(new) + sum(one.waits for one in rest)
        assert waiting_now <= max(limits.caps.max_pending, sum(one.waits for one in fleet))
        total = sum(action.gpus for action in new) + sum(one.gpus for one in rest)
        assert limits.caps.max_gpus is None or total <= max(limits.caps.max_gpus, gpus_before)
        assert limits.caps.max_gpus_per_user is None or total <= max(
            limits.caps.max_gpus_per_user, gpus_before
        )
        idle = sum(one.idle_gpus for one in cluster.nodes if one.name in SHARED)
        assert asked(decision) <= idle - max(
            limits.headroom.gpus, limits.headroom.by_type[0][1], limits.headroom.by_partition[0][1]
        )
    for name in SHARED:
        here = sum(action.gpus for action in new if action.nodelist == (name,))
        held = sum(one.gpus for one in fleet if one.node == name and not one.waits)
        assert (
            not here or limits.caps.max_gpus_per_node is None or here + held <= limits.caps.max_gpus_per_node
        )
        idle = next(one.idle_gpus for one in cluster.nodes if one.name == name)
        assert not here or here <= idle - limits.headroom.per_node
    for action in new:
        for reservation in booked:
            if reservation.end > NOW and action.nodelist[0] in reservation.nodes:
                assert reservation.start >= NOW + limits.job.min_life_s
                assert NOW + action.most_s <= reservation.start
    gone = [action.intent_id for action in decision.actions if not isinstance(action, Submit)]
    assert len(gone) == len(set(gone))
    assert all(action.reason for action in decision.actions)


@settings(max_examples=400, deadline=None)
@given(
    taken_st, others_st, fleet_st, st.floats(0, 300), st.floats(0, 300), st.integers(0, 4), st.integers(1, 2)
)
def test_a_longer_window_for_other_users_never_takes_more(
    taken: tuple[int, ...],
    others: list[Any],
    fleet: list[OurJob],
    one: float,
    other: float,
    headroom: int,
    gpus: int,
) -> None:
    cluster, limits = cluster_of(taken, others, fleet, []), limits_with(LIMITS, headroom_gpus=headroom)
    short, long = (limits_with(limits, other_users_window_s=window) for window in sorted((one, other)))
    less = decide(cluster, want(30, gpus), fleet, long, NOW)
    assert asked(less) <= asked(decide(cluster, want(30, gpus), fleet, short, NOW))
    kinder = decide(cluster, want(30, gpus), fleet, limits_with(long, headroom_gpus=headroom + 1), NOW)
    assert asked(kinder) <= asked(less)
    if others:
        fewer = replace(cluster, jobs=tuple(job for job in cluster.jobs if job is not others[0]))
        assert asked(less) <= asked(decide(fewer, want(30, 1), fleet, long, NOW)) or gpus > 1


@settings(max_examples=200, deadline=None)
@given(taken_st, others_st, fleet_st)
def test_nobody_leaves_for_a_job_that_could_start_without_that(
    taken: tuple[int, ...], others: list[Any], fleet: list[OurJob]
) -> None:
    cluster = cluster_of(taken, others, fleet, [])
    decision = decide(
        cluster,
        want(30),
        fleet,
        limits_with(LIMITS, could_start_since=tuple((one.job_id, NOW - 99) for one in others)),
        NOW,
    )
    gone = [
        action
        for action in decision.actions
        if action.code in (HarvestCode.SAME_TIER_JOB, HarvestCode.VOLUNTARY_PREEMPTION)
    ]
    needed = sum(one.gpus for one in others if "scavenge" in one.partition or "normal" in one.partition)
    freed = sum(
        one.gpus for one in fleet if one.intent_id in {getattr(action, "intent_id", "") for action in gone}
    )
    assert freed <= needed
    for name in SHARED:
        idle = next(one.idle_gpus for one in cluster.nodes if one.name == name)
        if gone and all(one.n_nodes == 1 for one in others):
            total = sum(one.gpus for one in others)
            assert total > idle or any(one.gpus > idle for one in others)
