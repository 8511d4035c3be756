"""An engine over several nodes: where it starts, what it counts as, and that it leaves whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scavenger.cluster.model import Job, JobState, Reservation
from scavenger.cluster.slurm import commands
from scavenger.config import ClusterSection, DaemonConfig, DaemonSection, HarvestSection
from scavenger.errors import ConfigError
from scavenger.harvest.decide.actions import comment_of
from scavenger.harvest.decide.decide import (
    Cancel,
    CancelPending,
    DrainAllocated,
    HarvestCode,
    HarvestDecision,
    HarvestLimits,
    OurJob,
    Submit,
    decide,
)
from scavenger.harvest.execute.job_script import job_spec, read_template
from scavenger.harvest.track.node_health import HealthRules
from scavenger.harvest.track.tracker import Tracker, TrackerRules
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import Demand, within_owners
from tests.harvest.flat_limits import limits_with
from tests.harvest.views import UID, USER, job, node, view

NOW = 1000.0
INTENT = "scv-000000000000000a"
LIMITS = limits_with(
    "scavenge", max_engines=8, max_pending=8, max_nodes_per_engine=2, pin=True, standby_jobs=2
)


def demand(engines: int, gpus: int = 4, nodes: int = 2, **more: Any) -> Demand:
    return Demand(1, "run1", engines, gpus, "useful", nodes_per_engine=nodes, **more)


def mine(n: int, nodes: str, *, waits: bool = False, gpus: int = 8, n_nodes: int = 2, **more: Any) -> OurJob:
    where = {"pinned": nodes} if waits else {"node": nodes}
    return OurJob(
        f"scv-{n:016x}", 1, 100 + n, gpus, waits, connected=not waits, n_nodes=n_nodes, **{**where, **more}
    )


def listed(one: OurJob, state: JobState = JobState.RUNNING, **more: Any) -> Job:
    held = one.nodes if state is JobState.RUNNING else ()
    return job(
        one.job_id,
        state,
        user=USER,
        partition="scavenge",
        gpus=one.gpus,
        n_nodes=one.n_nodes,
        nodes=held,
        gpus_by_node=tuple((name, one.gpus_on_node) for name in held),
        **more,
    )


def submits(decision: HarvestDecision) -> list[Submit]:
    return [action for action in decision.actions if isinstance(action, Submit)]


def asked(
    taken: tuple[int, int, int], want: Demand, limits: HarvestLimits = LIMITS, ours: tuple[OurJob, ...] = ()
) -> HarvestDecision:
    held = [listed(one, JobState.PENDING if one.waits else JobState.RUNNING) for one in ours]
    nodes = [node("node0"), *(node(f"node{n}", used) for n, used in enumerate(taken, 1))]
    return decide(view(NOW, held, nodes), [want], ours, limits, NOW)


# ---------------------------------------------------------------- where it starts


@pytest.mark.parametrize(
    ("taken", "gpus", "where"),
    [
        ((0, 0, 0), 4, ("node1", "node2")),
        ((1, 0, 0), 4, ("node2", "node3")),
        ((1, 1, 0), 4, None),  # 10 GPUs are idle, and only one node is idle whole
        ((1, 1, 0), 3, ("node1", "node2")),  # the smallest gaps that fit
        ((4, 4, 0), 2, None),  # never two shares of one node
    ],
)
def test_it_starts_only_where_each_of_its_nodes_has_its_share(
    taken: tuple[int, int, int], gpus: int, where: tuple[str, ...] | None
) -> None:
    decision = asked(taken, demand(1, gpus))
    assert [(one.nodelist, one.gpus, one.nodes) for one in submits(decision)] == (
        [(where, gpus, 2)] if where else []
    )
    if where is None:
        assert decision.code is HarvestCode.NO_CAPACITY


def test_what_a_refused_engine_looked_at_is_left_to_others() -> None:
    small = Demand(2, "run2", 1, 4, "useful")
    nodes = [node("node0"), node("node1", 1), node("node2", 1), node("node3")]
    decision = decide(view(NOW, (), nodes), [demand(1), small], (), LIMITS, NOW)
    assert [(one.run, one.nodelist) for one in submits(decision) if not one.standby] == [("run2", ("node3",))]


def test_all_of_its_gpus_count_against_every_cap() -> None:
    most = limits_with("scavenge", max_engines=8, max_pending=8, max_nodes_per_engine=2, pin=True, max_gpus=8)
    decision = asked((0, 0, 0), demand(4, 2), most)
    assert len(submits(decision)) == 2, "2 engines of 2 nodes x 2 GPUs are 8"
    assert decision.code is HarvestCode.MAX_GPUS
    (left,) = within_owners([demand(4, 2, owner="ada")], lambda _owner: 7)
    assert left.engines == 1, "an owner's 7 GPUs are one engine of 4, not three of 2"
    per_node = replace(LIMITS, caps=replace(LIMITS.caps, max_gpus_per_node=3))
    assert submits(asked((0, 0, 0), demand(1, 4), per_node)) == []


@pytest.mark.parametrize(
    ("want", "said"),
    [
        (demand(2, nodes=3), "run.nodes_per_engine = 3, and harvest.max_nodes_per_engine = 2"),
        (
            demand(2, gpus=5),
            "0 nodes of partition scavenge have the 5 GPUs of an engine on each of its 2 nodes",
        ),
    ],
)
def test_an_engine_that_can_never_start_is_not_wanted_and_the_reason_says_why(
    want: Demand, said: str
) -> None:
    ours = (mine(1, "node1,node2", gpus=want.gpus, n_nodes=want.nodes_per_engine),)
    (action,) = asked((4, 4, 0), want, ours=ours).actions
    assert isinstance(action, DrainAllocated)
    assert action.code in (HarvestCode.NO_DEMAND, HarvestCode.OVER_SHARE)
    from scavenger.harvest.decide.decide import placeable

    (found,) = placeable([want], view(NOW), LIMITS)
    assert (found.engines, found.reason) == (0, said)


def test_another_shape_of_as_many_gpus_is_the_wrong_size() -> None:
    ours = (mine(1, "node1", gpus=4, n_nodes=1),)
    (action,) = (
        one for one in asked((4, 0, 0), demand(1, 2), ours=ours).actions if not isinstance(one, Submit)
    )
    assert isinstance(action, DrainAllocated)
    assert action.code is HarvestCode.WRONG_SIZE
    assert "it has 4 GPUs and run run1 wants 4 GPUs on 2 nodes" in action.reason


def test_a_job_that_waits_for_its_nodes_keeps_both_of_them() -> None:
    ours = (mine(1, "node1,node2", waits=True, since=NOW),)
    decision = asked((0, 0, 0), demand(2), ours=ours)
    assert submits(decision) == []
    assert not any(isinstance(one, CancelPending) for one in decision.actions)


def test_no_standby_job_waits_for_a_run_whose_engines_take_several_nodes() -> None:
    decision = asked((0, 2, 2), demand(1, 2))
    assert [one.standby for one in submits(decision)] == [False]
    with_small = decide(view(NOW), [demand(1, 2), Demand(2, "run2", 1, 1, "useful")], (), LIMITS, NOW)
    assert {one.run for one in submits(with_small) if one.standby} == {"run2"}


# ---------------------------------------------------------------- and leaves


def leaving(
    ours: tuple[OurJob, ...], *others: Job, limits: HarvestLimits = LIMITS, **seen: Any
) -> dict[str, str]:
    held = [listed(one) for one in ours]
    wanted = [demand(9), Demand(2, "run2", 1, 4, "useful")]
    found = decide(replace(view(NOW, [*held, *others]), **seen), wanted, ours, limits, NOW)
    return {one.intent_id: one.reason for one in found.actions if isinstance(one, DrainAllocated | Cancel)}


def test_a_same_tier_job_for_one_of_its_nodes_drains_it_once_and_whole() -> None:
    ours = (mine(1, "node1,node2"),)
    three = job(7, partition="scavenge", gpus=4, nodes=(), submit_time=NOW - 50)
    free = [node("node0"), node("node1", 4), node("node2", 4), node("node3", 4)]
    assert list(leaving(ours, three, nodes=tuple(free))) == [ours[0].intent_id]
    two = job(8, partition="scavenge", gpus=4, submit_time=NOW - 40)
    assert list(leaving(ours, three, two, nodes=tuple(free))) == [ours[0].intent_id], (
        "the second job starts on its other node: nothing more leaves for it"
    )


def test_a_job_for_both_nodes_drains_an_engine_on_both_once_beside_a_small_one() -> None:
    small = replace(mine(2, "node3", gpus=4, n_nodes=1, leases=9), run_id=2)
    ours = (mine(1, "node1,node2"), small)
    both = job(7, partition="scavenge", gpus=8, n_nodes=2, submit_time=NOW - 50)
    full = (node("node0"), *(node(f"node{n}", 4) for n in (1, 2, 3)))
    assert list(leaving(ours, both, nodes=full)) == [ours[0].intent_id]


@pytest.mark.parametrize("lost", ["node1", "node2"])
def test_a_reservation_or_a_drained_node_under_either_end_ends_it(lost: str) -> None:
    ours = (mine(1, "node1,node2"),)
    limits = replace(LIMITS, job=replace(LIMITS.job, drain_before_s=30.0))
    booked = (Reservation("upkeep", frozenset({lost}), NOW + 10.0, NOW + 999.0),)
    (why,) = leaving(ours, limits=limits, reservations=booked).values()
    assert f"a reservation begins on {lost} in 10 s" in why
    nodes = tuple(
        node(f"node{n}", 4 if n in (1, 2) else 0, states=("mixed", "drain") if f"node{n}" == lost else ())
        for n in range(4)
    )
    (why,) = leaving(ours, nodes=nodes).values()
    assert why.startswith(f"{lost} is taken out of service: drain")


# ---------------------------------------------------------------- what is kept of it


def tracker() -> Tracker:
    return Tracker(TrackerRules(UID, USER, 10.0, HealthRules(2, 600.0, 30.0)))


def running(state: JobState = JobState.RUNNING, **more: Any) -> Job:
    fields = {"n_nodes": 2, "gpus": 8, "start_time": 5.0, "nodes": ("node1", "node2")}
    fields |= {"gpus_by_node": (("node1", 4), ("node2", 4)), "reason": ""}
    own = {"user": USER, "partition": "scavenge", "name": INTENT, "comment": comment_of(UID, INTENT)}
    return Job(job_id=1, state=state, **{**own, **fields, **more})  # type: ignore[arg-type]


def started() -> Tracker:
    found = tracker()
    found.intend(rec.JobIntended(INTENT, 1, "scavenge", 8, "k" * 40, 0.0, "node1,node2", 2), 0.0)
    found.submitted(INTENT, 1, 1.0)
    output = found.observe(view(10.0, [running()]), 10.0)
    (begun,) = (one for one in output.records if isinstance(one, rec.AllocationStarted))
    assert (begun.node, begun.gpus) == ("node1,node2", 8), "the ledger counts the GPU-seconds of both nodes"
    return found


def test_the_tracker_holds_gpus_of_both_nodes_and_tells_the_policy_of_both() -> None:
    found = started()
    assert found.held() == {"node1": 4, "node2": 4}
    (one,) = found.jobs({})
    assert (one.nodes, one.gpus, one.n_nodes, one.gpus_on_node) == (("node1", "node2"), 8, 2, 4)


def test_the_loss_of_its_second_node_is_the_loss_of_the_engine() -> None:
    found = started()
    nodes = [node(f"node{n}", states=("down", "not_responding") if n == 2 else ()) for n in range(4)]
    gone = running(JobState.PENDING, restart_count=1, nodes=(), gpus_by_node=(), submit_time=20.0)
    output = found.observe(view(20.0, [gone], nodes), 20.0)
    (ended,) = (one for one in output.records if isinstance(one, rec.AllocationEnded))
    assert ended.reason == "node_fail"
    assert [one.incarnation for one in output.gone] == [0], "its samples go on elsewhere"


def test_each_of_its_nodes_is_charged_where_it_died() -> None:
    found = started()
    dead = running(JobState.FAILED, exit_code=70, end_time=300.0, gpus_by_node=())
    output = found.observe(view(300.0, [dead]), 300.0)
    assert [one.node for one in output.records if isinstance(one, rec.EngineDied)] == ["node1", "node2"]


def test_after_a_restart_it_is_known_with_both_nodes() -> None:
    found = tracker()
    intended = rec.JobIntended(INTENT, 1, "scavenge", 8, "k" * 40, 0.0, "node1,node2", 2)
    found.restore([rec.OpenIntent(intended, 1, "RUNNING", 0, "node1,node2", True, 5.0, 0)], 50.0)
    (one,) = found.jobs({})
    assert (one.nodes, one.pinned, one.n_nodes) == (("node1", "node2"), "node1,node2", 2)


# ---------------------------------------------------------------- the job


def config(state_dir: Path, **harvest: Any) -> DaemonConfig:
    return DaemonConfig(
        daemon=DaemonSection(state_dir=state_dir), harvest=HarvestSection(cpus_per_engine=3, **harvest)
    )


def test_the_job_asks_for_its_nodes_and_starts_one_process_on_each(tmp_path: Path) -> None:
    submit = Submit(1, "run", "scavenge", 4, "because", nodelist=("node1", "node2"), nodes=2, engine="vllm")
    spec = job_spec(config(tmp_path), read_template(None), "slurm", UID, INTENT, submit)
    argv = commands.sbatch_argv(spec)
    for option in ("--nodes=2", "--ntasks=2", "--gres=gpu:4", "--nodelist=node1,node2", "--cpus-per-task=3"):
        assert option in argv
    assert "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=0" in spec.script
    assert " --nodes 2)" in spec.script
    plain = job_spec(
        config(tmp_path), read_template(None), "slurm", UID, INTENT, replace(submit, nodelist=(), nodes=1)
    )
    assert "srun --ntasks=1 --kill-on-bad-exit=1" in plain.script
    assert "--nodes 1" not in plain.script


def test_where_no_slurm_starts_processes_on_several_nodes_it_is_refused(tmp_path: Path) -> None:
    submit = Submit(1, "run", "scavenge", 4, "because", nodes=2)
    with pytest.raises(ConfigError, match="an engine of 2 nodes for run run"):
        job_spec(config(tmp_path), read_template(None), "local", UID, INTENT, submit)
    with pytest.raises(ValueError, match="max_nodes_per_engine = 2 needs Slurm"):
        DaemonConfig(
            daemon=DaemonSection(state_dir=tmp_path),
            cluster=ClusterSection(backend="local"),
            harvest=HarvestSection(max_nodes_per_engine=2),
        )
