"""Ages of idle GPUs from looks, and the gate that they are for: which of what is idle is worth a start, and what the record says of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.cluster.model import Node
from scavenger.harvest.decide.decide import HarvestCode, HarvestDecision, Submit, decide
from scavenger.policy.fleet_size import Benefit, Demand, start_benefit
from scavenger.policy.forecast.survival import ObservedLife, SurvivalCurve, estimate, prior
from scavenger.policy.idle_gpus import GAP_S, LEAST_LOST, PIECE_S, Idle, Idling, node_class
from tests.harvest.flat_limits import limits_with
from tests.harvest.views import SHARED, node, view

NOW = 10_000.0
KIND = node_class(node("node1"))
LIMITS = limits_with("scavenge", max_engines=12, max_pending=12, pin=True)
BENEFIT = Benefit(0.05, 8.0, 1, 100.0)
#: Half of the slices end within two minutes, the others last for hours.
MIXED = estimate(
    [ObservedLife(20.0 + i % 100, True) for i in range(300)]
    + [ObservedLife(30_000.0, False) for _ in range(300)],
    prior(),
)
#: None outlasts a start.
SHORT = estimate([ObservedLife(20.0 + i % 30, True) for i in range(3000)], prior())


def polled(idling: Idling, at: float, *allocated: int, held: dict[str, int] | None = None) -> None:
    """A look at nodes of four GPUs, of which so many are allocated, ours included."""
    idling.observe(
        view(at, nodes=[node(name, n) for name, n in zip(SHARED, allocated, strict=True)]),
        "scavenge",
        held or {},
        at,
    )


def ages(idling: Idling, now: float) -> dict[str, list[float]]:
    return {name: [now - at for at in since] for name, since in idling.known(0.985, now).since.items()}


# ---------------------------------------------------------------- ages


def test_what_was_free_at_the_first_look_has_an_age_that_nobody_knows() -> None:
    idling = Idling()
    polled(idling, 0.0, 4, 2, 0)
    assert ages(idling, 0.0) == {"node1": [], "node2": [math.inf] * 2, "node3": [math.inf] * 4}


def test_the_latest_to_come_free_is_taken_first() -> None:
    idling = Idling()
    polled(idling, 0.0, 4, 4, 4)
    polled(idling, 60.0, 2, 4, 4)
    polled(idling, 120.0, 1, 4, 4)
    assert ages(idling, 200.0)["node1"] == [140.0, 140.0, 80.0]
    polled(idling, 180.0, 2, 4, 4)
    assert ages(idling, 200.0)["node1"] == [140.0, 140.0]


def test_a_gpu_that_we_take_lives_on() -> None:
    idling = Idling()
    polled(idling, 0.0, 4, 4, 4)
    polled(idling, 60.0, 2, 4, 4)
    polled(idling, 120.0, 4, 4, 4, held={"node1": 2})  # engines of ours
    assert ages(idling, 120.0)["node1"] == [60.0, 60.0]
    polled(idling, 180.0, 4, 4, 4, held={"node1": 1})  # others took one of them
    assert ages(idling, 180.0)["node1"] == [120.0]


def test_curves_come_of_lives_that_others_ended_and_of_those_that_go_on() -> None:
    """A quarter of what comes free is taken within two minutes; the rest idles to the end."""
    idling, now = Idling(), 0.0
    polled(idling, now, 4, 4, 4)
    polled(idling, now := now + 60, 4, 4, 1)  # three that nobody takes
    for _ in range(LEAST_LOST):
        assert not idling.known(0.985, now).curves, "too little is known"
        polled(idling, now := now + 60, 3, 4, 1)
        polled(idling, now := now + 60, 4, 4, 1)
    curve = idling.known(0.985, now).curves[KIND]
    assert curve.survives(50.0) > 0.95
    assert curve.survives(200.0) < 0.3
    assert curve.survives(1000.0, age_s=1000.0) > 0.88 > prior().survives(1000.0), "what goes on counts"


def test_nodes_that_go_down_lost_nothing_to_others() -> None:
    idling, now = Idling(), 0.0
    polled(idling, now, 4, 4, 4)
    for _ in range(2 * LEAST_LOST):
        polled(idling, now := now + 60, 0, 4, 4)
        down = [node("node1", 0, states=["down"]), node("node2", 4), node("node3", 4)]
        idling.observe(view(now := now + 60, nodes=down), "scavenge", {}, now)
        polled(idling, now := now + 60, 4, 4, 4)
    assert not idling.known(0.985, now).curves


def test_ages_end_with_a_gap_in_which_nobody_looked() -> None:
    idling = Idling()
    polled(idling, 0.0, 4, 4, 4)
    polled(idling, 60.0, 0, 4, 4)
    polled(idling, 60.0 + GAP_S + 1, 0, 4, 4)
    assert ages(idling, 2000.0)["node1"] == [math.inf] * 4


@settings(deadline=None)  # a busy machine is no fault of ours
@given(st.lists(st.tuples(*(st.tuples(st.integers(0, 4), st.integers(0, 4)) for _ in SHARED)), max_size=30))
def test_there_are_as_many_ages_as_gpus_that_others_do_not_hold(
    looks: Sequence[Sequence[tuple[int, int]]],
) -> None:
    idling = Idling()
    for turn, nodes in enumerate(looks):
        held = {name: min(ours, used) for name, (used, ours) in zip(SHARED, nodes, strict=True)}
        polled(idling, 400.0 * turn, *(used for used, _ in nodes), held=held)
        known = ages(idling, 400.0 * turn)
        assert {name: len(found) for name, found in known.items()} == {
            name: 4 - used + held[name] for name, (used, _) in zip(SHARED, nodes, strict=True)
        }
        assert all(found == sorted(found, reverse=True) for found in known.values())
    assert PIECE_S > 400.0


# ---------------------------------------------------------------- the gate


def decided(
    idle: Idle | None,
    nodes: Sequence[Node],
    engines: int = 12,
    benefit: Benefit | None = BENEFIT,
    **more: Any,
) -> HarvestDecision:
    wanted = Demand(1, "r", engines, benefit.gpus if benefit else 1, f"{engines} are useful", benefit=benefit)
    return decide(view(NOW, nodes=nodes), [wanted], [], limits_with(LIMITS, idle=idle, **more), NOW)


def where(decision: HarvestDecision) -> list[str]:
    return sorted(action.nodelist[0] for action in decision.actions if isinstance(action, Submit))


def idle_for(curve: SurvivalCurve, share: float = 0.95, **seconds: list[float]) -> Idle:
    return Idle({name: [NOW - age for age in found] for name, found in seconds.items()}, {KIND: curve}, share)


def test_only_gpus_that_have_settled_are_taken_and_the_record_says_why() -> None:
    idle = idle_for(MIXED, node1=[5000.0, 900.0, 10.0], node2=[30.0, 20.0, 5.0, 1.0], node3=[math.inf])
    nodes = [node("node1", 1), node("node2", 0), node("node3", 3)]
    decision = decided(idle, nodes)
    assert where(decision) == ["node1", "node1", "node3"]
    assert decision.code is HarvestCode.SETTLING
    assert "not idle for long enough to be worth a start" in decision.reason
    for action in decision.actions:
        assert "outlast a start of 100 s" in action.reason
        assert "saves 5.00% of a step of 8 GPUs" in action.reason
    assert decision.start_benefits[0].startswith("run r on 4 x h100: from ")
    assert where(decided(replace(idle, share=0.0), nodes)) == ["node1"] * 3 + ["node2"] * 4 + ["node3"], (
        "harvest.min_expected_life = 0"
    )


def test_no_engine_is_asked_for_whose_saving_over_its_expected_life_is_less_than_its_start() -> None:
    nodes = [node(name, 0) for name in SHARED]
    young = {name: [10.0] * 4 for name in SHARED}
    assert where(decided(idle_for(MIXED, share=0.0, **young), nodes)) == [
        name for name in SHARED for _ in range(4)
    ]
    assert where(decided(idle_for(SHORT, share=0.0, **young), nodes)) == [], "none of them outlasts a start"
    decision = decided(
        idle_for(MIXED, share=0.0, node1=[math.inf] * 4), nodes, benefit=replace(BENEFIT, saving=1e-6)
    )
    assert where(decision) == []
    assert decision.code is HarvestCode.SETTLING
    assert "never" in decision.start_benefits[0]
    assert "not worth its start" in decision.start_benefits[0]


@pytest.mark.parametrize("known", ["nobody looked", "too few lives", "no benefit", "no price"])
def test_where_nobody_can_tell_what_is_idle_is_taken(known: str) -> None:
    idle: Idle | None = idle_for(SHORT, node1=[1.0] * 4)
    benefit: Benefit | None = BENEFIT
    if known == "nobody looked":
        idle = None
    elif known == "too few lives":
        idle = Idle({"node1": [NOW - 1] * 4}, {}, 0.95)
    elif known == "no benefit":
        benefit = None
    else:
        benefit = replace(BENEFIT, price=0.0)
    assert where(decided(idle, [node("node1", 0)], benefit=benefit)) == ["node1"] * 4


def test_an_engine_on_trial_is_weighed_by_its_chance_alone() -> None:
    trial = replace(BENEFIT, saving=None)
    idle = idle_for(MIXED, node1=[5000.0], node2=[3.0])
    assert where(decided(idle, [node("node1", 3), node("node2", 3)], benefit=trial)) == ["node1"]


def test_what_is_set_aside_for_others_is_the_youngest() -> None:
    """Four idle, two of them young; two stay idle for the site: the two old ones are for us."""
    idle = idle_for(MIXED, node1=[5000.0, 4000.0, 10.0, 5.0])
    assert where(decided(idle, [node("node1", 0)], headroom_per_node=2)) == ["node1"] * 2
    assert where(decided(idle, [node("node1", 0)], headroom_per_node=3)) == ["node1"]


def test_an_engine_of_several_gpus_needs_as_many_that_have_settled() -> None:
    pair = replace(BENEFIT, gpus=2)
    idle = idle_for(MIXED, node1=[5000.0, 4000.0, 4000.0, 5.0], node2=[5000.0, 10.0])
    assert where(decided(idle, [node("node1", 0), node("node2", 2)], benefit=pair)) == ["node1"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 5000), max_size=4), st.integers(0, 4), st.floats(0, 0.98), st.floats(0, 0.2))
def test_no_gpu_is_taken_that_is_younger_than_the_gate(
    young: list[float], ours: int, share: float, saving: float
) -> None:
    """Whatever the ages: at most as many as are old enough, and all of them where there is room."""
    free = sorted(young, reverse=True)
    held = min(ours, len(free))
    benefit = replace(BENEFIT, saving=saving)
    idle = idle_for(MIXED, share=share, node1=free)
    decision = decided(idle, [node("node1", 4 - len(free) + held)], benefit=benefit)
    age = start_benefit(benefit, MIXED, share).age_s
    assert len(where(decision)) == sum(one >= age for one in free[held:])
