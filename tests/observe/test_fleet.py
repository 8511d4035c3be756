"""Nodes, engines and runs one by one, from the parts that know them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from scavenger.cluster.model import JobState
from scavenger.harvest.decide.actions import DrainKind, OurJob
from scavenger.observe import fleet
from scavenger.policy.forecast.survival import prior
from scavenger.policy.idle_gpus import Idle, node_class
from tests.harvest.views import node, ours, view
from tests.router.moves import W1, one_lease

NOW = 1000.0
NAME = "scv-0000000000000001"


def held(where: str, **more: object) -> OurJob:
    return OurJob(NAME, 1, 101, 1, False, where, **more)  # type: ignore[arg-type]


def test_every_gpu_of_every_node_is_somebody_s_once() -> None:
    running = ours(NAME, 101, JobState.RUNNING, end_time=NOW + 500)
    nodes = [node("node0"), node("node1", 3), node("node2", 1, states=("mixed", "drain")), node("node3")]
    seen = view(NOW, [running], nodes)
    ids, jobs = frozenset({101}), [held("node1")]
    found = fleet.nodes_of(seen, "scavenge", ids, jobs, {"node3": "3 engines died on it"})
    assert found == (
        fleet.NodeGpus("node0", reserved=4),
        fleet.NodeGpus("node1", other_users=2, harvested=1, idle=1),
        fleet.NodeGpus("node2", other_users=1, out=3, why="drain, mixed"),
        fleet.NodeGpus("node3", idle=4, why="3 engines died on it"),
    )
    leaving = [replace(jobs[0], drain_kind=DrainKind.DRAINING)]
    assert fleet.nodes_of(seen, "scavenge", ids, leaving, {})[1].draining == 1
    for one in found:
        assert one.reserved + one.other_users + one.harvested + one.draining + one.idle + one.out == 4


def test_the_life_of_a_job_s_gpus_is_the_survival_curve_s_up_to_its_time_limit() -> None:
    running = ours(NAME, 101, JobState.RUNNING, end_time=NOW + 500)
    seen = view(NOW, [running], [node("node1", 1)])
    curve, kind = prior(), node_class(node("node1"))
    known = Idle({"node1": [NOW - 600.0]}, {kind: curve}, 0.0)
    assert curve.expected_s(0.0, 600.0) > 500
    assert fleet.outlooks([held("node1")], seen, known, NOW) == {NAME: fleet.JobOutlook(500.0, NOW + 500)}
    endless = view(NOW, [replace(running, end_time=0.0)], [node("node1", 1)])
    (found,) = fleet.outlooks([held("node1")], endless, known, NOW).values()
    assert found.life_s == pytest.approx(curve.expected_s(0.0, 600.0))
    (unknown,) = fleet.outlooks([held("node1")], endless, Idle({}, {}, 0.0), NOW).values()
    assert unknown.life_s is None, "too little was seen of such GPUs"


def test_engines_and_runs_are_what_the_router_has() -> None:
    bench, lease = one_lease()
    runs = bench.router.core.runs.values()
    (engine,) = fleet.engines_of(runs, {})
    assert (engine.kind, engine.state, engine.samples, engine.version) == ("harvested", "ready", 1, 1)
    prompt = engine.tokens_held
    assert prompt > 0
    bench.chunk(W1, lease, 0, 2)
    (grown,) = fleet.engines_of(runs, {"": fleet.JobOutlook(60.0, 0.0)})
    assert grown.tokens_held == prompt + 2
    (run,) = fleet.runs_of(runs)
    assert (run.purpose, run.samples_open, run.last_step, run.version) == ("train", 1, 0, 1)
    assert run.phase == "train", "no reserved engine is there"
    assert msgspec.json.decode(msgspec.json.encode(grown), type=fleet.EngineNow) == grown
    next(iter(runs)).ended = True
    assert fleet.runs_of(runs) == fleet.engines_of(runs, {}) == ()


@pytest.mark.parametrize(
    ("facts", "phase"),
    [
        ({"asked": False}, "between"),
        ({"purpose": "eval"}, "evaluate"),
        ({"awake": True, "holding": True}, "seed"),
        ({"awake": True, "holding": True, "trained": True}, "wake"),
        ({"holding": True}, "sleep"),
        ({}, "train"),
        ({"unfinished": False}, "finish"),
        ({"reserved": False, "awake": True}, "train"),
        ({"reserved": False, "awake": True, "unfinished": False}, "finish"),
    ],
)
def test_the_phase_of_a_step_is_told_by_what_the_trainer_ordered(
    facts: dict[str, object], phase: str
) -> None:
    plain: dict[str, object] = {
        "purpose": "train",
        "asked": True,
        "reserved": True,
        "awake": False,
        "holding": False,
        "trained": False,
        "unfinished": True,
    }
    given = plain | facts
    assert fleet.phase_of(str(given.pop("purpose")), **given) == phase  # type: ignore[arg-type]
