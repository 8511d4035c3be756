"""One look at a cluster: what idles, what fits, and what the policy that runs live would do about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scavenger.cluster.model import ClusterInfo, ClusterView, Job, JobState, Node, Partition, PreemptMode
from scavenger.errors import ConfigError
from scavenger.harvest.decide.decide import HarvestLimits, Submit
from scavenger.simulate import live
from scavenger.simulate.live import ClusterPoll, EngineRequest, poll
from tests.harvest.flat_limits import limits_with

INFO = ClusterInfo("hand", "slurm", "22.05.8", "preempt/partition_prio", 30.0, 10.0, "admin")
LIMITS = limits_with("scavenge", max_engines=50, max_pending=50)
NOW = 1000.0


def node(name: str, gpus: int, used: int = 0, state: str = "idle") -> Node:
    return Node(name, frozenset({state}), frozenset({"normal"}), "h100", gpus, used, 64, 0, 1000, 0)


NORMAL = Partition("normal", frozenset({"a", "b", "c"}), 10, PreemptMode.OFF, 0.0, 1e9)
SCAVENGE = Partition("scavenge", frozenset({"a", "b"}), 1, PreemptMode.REQUEUE, 20.0, 1e9)
NODES = (node("a", 8, 5), node("b", 8), node("c", 4), node("d", 0))
BOTH = ClusterView(NOW, NODES, (), (NORMAL, SCAVENGE))


def at(
    view: ClusterView, wish: EngineRequest, limits: HarvestLimits = LIMITS, info: ClusterInfo = INFO
) -> ClusterPoll:
    return poll(view, info, wish, limits, NOW)


def submits(found: ClusterPoll) -> int:
    return sum(isinstance(action, Submit) for action in found.decision.actions)


def test_idle_gpus_engines_that_fit_and_what_would_be_submitted() -> None:
    found = at(BOTH, EngineRequest(2))
    # of the partition: 3 on a, 8 on b; whole engines of 2: one and four
    assert (found.gpus.idle, found.gpus.other_users, found.gpus.reserved, found.fit, submits(found)) == (
        11,
        5,
        4,
        5,
        5,
    )
    assert found.idle_by_count == ((3, 1), (8, 1))
    assert not found.hypothetical
    assert found.refused == ""
    assert (found.timing.preemption_s(), found.timing.hung_s()) == (25.0, 100.0)


def test_the_limits_are_the_policy_s_and_are_named() -> None:
    found = at(BOTH, EngineRequest(1, engines=9), limits_with(LIMITS, max_pending=2))
    assert (found.fit, submits(found)) == (11, 2)
    assert "9 engines wanted" in found.decision.reason
    assert "max_pending = 2 is reached" in found.decision.reason
    assert "0 wait; 2 to submit; " in found.decision.reason


def test_gpus_that_others_wait_for_are_not_idle_for_us() -> None:
    job = Job(7, "ann", "normal", JobState.PENDING, reason="Resources", gpus=8, n_nodes=1, priority=1)
    found = at(replace(BOTH, jobs=(job,)), EngineRequest(1))
    assert (found.pending_other_users, found.fit) == (1, 3)
    assert "8 of them for other users' pending jobs" in found.free_capacity


def test_a_partition_that_is_not_there_is_shown_below_all_others() -> None:
    found = at(replace(BOTH, partitions=(NORMAL,)), EngineRequest(4))
    # it would have every node with GPUs: 3 + 8 + 4 idle, three engines of 4
    assert found.hypothetical
    assert (found.gpus.idle, found.fit, found.refused) == (15, 3, "")
    assert "no partition 'scavenge' yet" in live.notes(found, True)[0]


def test_what_the_daemon_would_refuse_is_said() -> None:
    off = replace(SCAVENGE, preempt_mode=PreemptMode.OFF)
    assert "PreemptMode=OFF" in at(replace(BOTH, partitions=(NORMAL, off)), EngineRequest(1)).refused
    plain = replace(INFO, preempt_type="preempt/none")
    assert "preempts nothing" in at(replace(BOTH, partitions=(NORMAL,)), EngineRequest(1), info=plain).refused


def test_engines_that_run_already_are_counted_and_not_asked_for_again() -> None:
    ours = Job(
        3,
        "scavenger",
        "scavenge",
        JobState.RUNNING,
        name="scv-0123456789abcdef",
        nodes=("a",),
        gpus=2,
        gpus_by_node=(("a", 2),),
    )
    waits = Job(4, "scavenger", "scavenge", JobState.PENDING, name="scv-0123456789abcdee", gpus=2)
    found = at(replace(BOTH, jobs=(ours, waits)), EngineRequest(2, engines=3))
    assert (found.gpus.harvested, found.gpus.other_users, found.engines, found.pending) == (2, 3, 1, 1)
    # one of three runs and one waits: one more, though four would fit beside the one that waits
    assert (found.fit, submits(found)) == (4, 1)


def test_down_nodes_have_no_idle_gpus() -> None:
    down = replace(BOTH, nodes=(node("a", 8, 5), node("b", 8, 0, "down"), *NODES[2:]))
    found = at(down, EngineRequest(1))
    assert (found.gpus.idle, found.gpus.unusable, found.fit, found.nodes) == (3, 8, 3, 1)


def test_a_cluster_without_gpus_is_refused() -> None:
    with pytest.raises(ConfigError, match="no node of this cluster has GPUs"):
        at(ClusterView(NOW, (node("d", 0),), (), (NORMAL,)), EngineRequest(1))


def test_an_old_view_decides_nothing() -> None:
    found = poll(BOTH, INFO, EngineRequest(1), LIMITS, NOW + 1000)
    assert submits(found) == 0
    assert "nothing is decided" in found.decision.reason


def test_the_table_says_what_was_found() -> None:
    rows = {row.name: row for row in live.rows(at(BOTH, EngineRequest(2)), EngineRequest(2))}
    assert rows["GPUs idle now"].value == "11"
    assert rows["engines that fit now"].value == "5"
    assert rows["the policy would submit"].value == "5"
    assert rows["unusable"].value == "0"
    assert live.notes(at(BOTH, EngineRequest(2)), False)[0].startswith("There is no scavenger.toml here")
