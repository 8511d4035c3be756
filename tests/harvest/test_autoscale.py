"""The autoscaler's rules against hand-computed cases."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.policy.fleet_size import (
    FleetSizeRules,
    State,
    break_even,
    restarted,
    start_with,
    step_ended,
    worth,
)
from scavenger.policy.forecast.survival import ObservedLife, estimate, prior

RULES = FleetSizeRules(low=0.05, high=0.15, shrink=0.125, patience=2, weight=1.0)


def test_before_a_step_was_seen_all_that_is_useful_is_asked_for() -> None:
    assert start_with(State(), 12).target == 12
    seen = State(target=3, wait=0.1)
    assert start_with(seen, 12) is seen


def test_what_was_asked_for_before_any_forecast_stays_until_a_step_was_seen() -> None:
    """On priors alone an engine that is starting would be given back, and asked for again a step later."""
    first = start_with(State(), 1, asked=3)
    assert first.target == 3
    assert "stay" in first.reason
    assert start_with(State(), 5, asked=3).target == 5
    seen = step_ended(first, 0.5, 4, FleetSizeRules())
    assert start_with(seen, 1, asked=3) is seen


def test_a_restart_alone_gives_nothing_back() -> None:
    """The steps of before were answered: asked again, all of them would count as so many steps with too many engines."""
    after = restarted(State(), (0.4, 0.0, 0.0, 0.0), 2, FleetSizeRules(weight=0.5))
    assert (after.target, after.wait, after.low_steps) == (2, 0.05, 0)
    assert start_with(after, 1) is after
    once = step_ended(after, 0.0, 1, RULES)
    assert (once.target, step_ended(once, 0.0, 1, RULES).target) == (2, 1), "and from here on as ever"
    assert start_with(restarted(State(), (), 2, RULES), 1, asked=2).target == 2, "it had seen no step either"


def test_a_long_wait_that_no_engine_would_shorten_is_told_as_such() -> None:
    stays = step_ended(State(target=2, wait=0.9), 0.97, 2, RULES)
    assert stays.target == 2
    assert stays.reason.endswith("over 15%, but no more are useful, so it stays")


def test_waiting_grows_the_fleet_to_where_the_wait_would_vanish() -> None:
    state = step_ended(State(target=8), 0.5, 64, RULES)
    assert state.target == 16
    assert "over 15%" in state.reason
    assert step_ended(State(target=8), 0.5, 10, RULES).target == 10
    assert step_ended(State(target=0), 0.9, 64, RULES).target == 10


def test_inside_the_dead_band_nothing_changes() -> None:
    for wait in (0.05, 0.1, 0.15):
        assert step_ended(State(target=8, wait=0.1), wait, 64, RULES).target == 8


def test_the_fleet_shrinks_late_and_gently() -> None:
    state, targets = State(target=32, wait=0.0), []
    for _ in range(5):
        state = step_ended(state, 0.0, 64, RULES)
        targets.append(state.target)
    assert targets == [32, 28, 25, 22, 20]


def test_what_became_useless_leaves_step_by_step_and_no_further() -> None:
    state, targets = State(target=40, wait=0.3), []
    for _ in range(8):
        state = step_ended(state, 0.1, 25, RULES)
        targets.append(state.target)
    assert targets == [40, 35, 31, 28, 28, 28, 28, 28]


def test_a_useful_number_that_wavers_by_less_than_the_share_moves_nothing() -> None:
    state = State(target=40, wait=0.1)
    for useful in (40, 36, 41, 35, 44, 36):
        state = step_ended(state, 0.1, useful, RULES)
        assert state.target == 40


@settings(max_examples=80, deadline=None)
@given(
    waits=st.lists(st.floats(0, 1), min_size=1, max_size=40),
    useful=st.lists(st.integers(0, 50), min_size=1, max_size=40),
)
def test_the_target_grows_to_what_is_useful_at_most_and_falls_by_a_share_at_most(
    waits: list[float], useful: list[int]
) -> None:
    state = State(target=20)
    for wait, most in zip(waits, useful, strict=False):
        after = step_ended(state, wait, most, FleetSizeRules())
        assert after.target <= max(state.target, most)
        assert after.target >= state.target - max(1, math.floor(0.125 * state.target))
        assert after.target >= 0
        state = after


def test_a_steady_wait_in_the_band_ends_every_change() -> None:
    state = step_ended(State(target=4), 0.6, 40, FleetSizeRules())
    for _ in range(10):
        state = step_ended(state, 0.1, 40, FleetSizeRules())
    assert step_ended(state, 0.1, 40, FleetSizeRules()).target == state.target


def test_an_engine_is_worth_its_start_exactly_above_the_break_even() -> None:
    """Exponential lives of 1 / .63 h: E[(life - 60)+] up to a day, E[min(life, 60)] = (1 - e^(-.0105)) / h."""
    life, hazard = prior(), 0.63 / 3600
    serves = math.exp(-hazard * 60) / hazard
    starting = (1 - math.exp(-hazard * 60)) / hazard
    even = break_even(8, 1, 60.0, life)
    assert even == pytest.approx(starting / (8 * serves), rel=1e-3)
    assert worth(even * 1.01, 8, 1, 60.0, life).ask
    assert not worth(even * 0.99, 8, 1, 60.0, life).ask


def test_an_engine_that_is_most_likely_lost_before_it_serves_is_not_asked_for() -> None:
    short = estimate([ObservedLife(30.0, True)] * 200, prior())
    verdict = worth(0.5, 64, 1, 90.0, short)
    assert not verdict.ask
    assert "wasted" in verdict.reason
    assert worth(0.5, 64, 1, 90.0, prior()).ask


def test_a_longer_hold_between_steps_costs() -> None:
    cheap, dear = (worth(0.001, 8, 1, 60.0, prior(), hold_s=allocation) for allocation in (0.0, 600.0))
    assert dear.cost_gpu_s == pytest.approx(cheap.cost_gpu_s + 600.0)


def test_impossible_rules_and_shares_are_refused() -> None:
    with pytest.raises(ValueError, match="low"):
        FleetSizeRules(low=0.3, high=0.2)
    with pytest.raises(ValueError, match="wait share"):
        step_ended(State(), 1.5, 3, RULES)


def test_at_no_price_idle_gpus_are_taken_whatever_is_wasted() -> None:
    """Lives of seconds, starts of half a minute: at a price nobody asks; for nothing, all that shorten the step are worth it."""
    short = estimate([ObservedLife(6.0, True) for _ in range(200)], prior())
    assert not worth(0.05, 1, 1, 30.0, short).ask
    assert worth(0.05, 1, 1, 30.0, short, price=0.0).ask
    assert not worth(0.0, 1, 1, 30.0, short, price=0.0).ask, "one that shortens nothing is not worth having"
    assert break_even(1, 1, 30.0, short, price=0.0) == 0.0
    assert break_even(8, 1, 30.0, prior(), price=0.25) == pytest.approx(break_even(8, 1, 30.0, prior()) / 4)
