"""The simulator's harvester is the live one where it is meant to be: start-benefit checks, idle ages, a node for each job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.baselines.clairvoyant.site import clairvoyant
from benchmarks.baselines.mixed import mixed
from benchmarks.baselines.registry import MIXTURES, SIMULATED_POLICIES
from scavenger.policy.fleet_size import Benefit
from scavenger.policy.idle_gpus import LEAST_LOST
from scavenger.policy.interface import RunView, Standard, Weighs
from scavenger.simulate.driver import simulate
from scavenger.simulate.fleet import FleetTrace, from_deltas
from scavenger.simulate.outcome import EngineOutcome, SimulationOutcome
from scavenger.simulate.policies import Even, SimulatedPolicy
from tests.simulate.test_driver import EQUAL

END_S = 1000.0
START_S = 40.0  # of an engine: more than a flickering GPU lasts


class Weighing(Even):
    """Wants all that it may have, and says that each engine saves a twentieth of a step."""

    def engines(self, view: RunView, now: float) -> tuple[int, str]:
        return view.max_engines, "all"

    def benefit(self) -> Benefit | None:
        return Benefit(0.05, 8, 1, START_S)


TAKES = SimulatedPolicy("takes what comes", Weighing)
GATED = replace(TAKES, name="gated", start_benefits=True)


def flickering() -> FleetTrace:
    """On b and c eight GPUs each idle for 25 s and are taken for 25; on a, from 700 s on, four idle for good."""
    deltas = [
        (25.0 * tick, node, -8 if tick % 2 else 8)
        for tick in range(1, int(END_S / 25))
        for node in ("b", "c")
    ]
    deltas.append((700.0, "a", 4))
    return from_deltas("flickering", END_S, dict.fromkeys("abc", 8), {"a": 0, "b": 8, "c": 8}, sorted(deltas))


SCENARIO = replace(EQUAL, fleet=flickering(), steps=0, horizon_s=END_S, max_engines=12)


@pytest.fixture(scope="module")
def played() -> tuple[SimulationOutcome, SimulationOutcome]:
    return simulate(SCENARIO, TAKES), simulate(SCENARIO, GATED)


def begun(out: SimulationOutcome, after_s: float) -> Sequence[EngineOutcome]:
    return [engine for engine in out.engines if engine.start_s >= after_s]


def test_once_enough_was_seen_no_engine_starts_on_gpus_that_do_not_last(
    played: tuple[SimulationOutcome, SimulationOutcome],
) -> None:
    takes, gated = played
    seen_s = 25.0 * 2 * (LEAST_LOST / 16 + 1)
    assert seen_s < 600
    assert {engine.node for engine in begun(takes, seen_s)} == {"a", "b", "c"}
    assert {engine.node for engine in begun(gated, seen_s)} == {"a"}
    assert takes.wasted_starts > 2 * gated.wasted_starts > 0, "at first it knew no better"


def test_what_lasts_is_taken_once_it_has_shown_so(
    played: tuple[SimulationOutcome, SimulationOutcome],
) -> None:
    _, gated = played
    starts = [engine.start_s for engine in gated.engines if engine.node == "a"]
    assert len(starts) == 4
    assert all(700.0 + 25.0 <= start_s <= 700.0 + 120.0 for start_s in starts)


def test_a_policy_that_says_nothing_of_an_engines_worth_meets_no_gate() -> None:
    """Though it is placed node by node as the live daemon's jobs are."""
    silent = SimulatedPolicy("silent", Even, start_benefits=True)
    assert {engine.node for engine in begun(simulate(replace(SCENARIO, horizon_s=600.0), silent), 500.0)} & {
        "b",
        "c",
    }


@pytest.mark.parametrize(("start_benefits", "least_s"), [(False, 0.0), (True, 30.0)])
def test_a_gated_job_waits_for_its_node_for_a_while_and_then_moves(
    start_benefits: bool, least_s: float
) -> None:
    """The smallest gap that fits is a's, and it is gone before Slurm has placed anybody."""
    fleet = from_deltas("taken at once", 1e6, {"a": 8, "b": 8}, {"a": 1, "b": 8}, [(1.0, "a", -1)])
    out = simulate(
        replace(EQUAL, fleet=fleet, steps=2, max_engines=1),
        SimulatedPolicy("one", Standard, window=0.5, start_benefits=start_benefits),
    )
    (engine,) = out.engines
    assert engine.node == "b"
    assert least_s <= engine.start_s <= least_s + 15.0


def test_ours_and_what_harvests_as_ours_do_are_gated_and_the_published_ones_are_not() -> None:
    ours = ({name for name in SIMULATED_POLICIES if name.startswith("ours")} | MIXTURES.keys()) - {
        "ours without start benefits"
    }
    assert {name for name, one in SIMULATED_POLICIES.items() if one.start_benefits} == ours
    assert not clairvoyant(SCENARIO).start_benefits


def test_a_mixture_says_what_the_policy_that_asks_for_engines_says() -> None:
    for other, growing, benefit in (
        (Standard, Weighing, Benefit(0.05, 8, 1, START_S)),
        (Weighing, Standard, None),
    ):
        policy = mixed("", other, other, growing).new_policy()
        assert isinstance(policy, Weighs)
        assert policy.benefit() == benefit
