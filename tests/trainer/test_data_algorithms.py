"""Which groups and prompts are trained: filter, curriculum and replay, each by itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from scavenger.config import DataSection
from scavenger.ledger import redaction
from trainer.data.curriculum import Bounds, PassRates, Visit, choose, passed
from trainer.data.group_filter import NO_FILTER, GroupFilter
from trainer.data.replay import KeptGroup, Replay, worth_keeping
from trainer.data.replay import choose as replayed

# ---------------------------------------------------------------- filter


@pytest.mark.parametrize(
    ("rule", "rewards", "fault"),
    [
        (NO_FILTER, [1.0, 1.0], ""),
        (
            GroupFilter(min_spread=1e-9),
            [1.0, 1.0],
            "rewards differ by 0, less than data.filter_min_spread = 1e-09",
        ),
        (GroupFilter(min_spread=0.5), [0.0, 0.5], ""),
        (
            GroupFilter(min_spread=0.5),
            [0.0, 0.25],
            "rewards differ by 0.25, less than data.filter_min_spread = 0.5",
        ),
        (GroupFilter(min_mean=0.5), [0.0, 1.0], ""),
        (
            GroupFilter(min_mean=0.5),
            [0.0, 0.0, 1.0],
            "mean reward 0.333333 is below data.filter_mean_min = 0.5",
        ),
        (
            GroupFilter(max_mean=0.5),
            [1.0, 1.0, 0.0],
            "mean reward 0.666667 is above data.filter_mean_max = 0.5",
        ),
        (GroupFilter(max_mean=-1.0), [-0.5], "mean reward -0.5 is above data.filter_mean_max = -1"),
        (GroupFilter(1.0, 0.5, 0.5), [], ""),
    ],
)
def test_a_group_is_filtered_by_its_rewards(rule: GroupFilter, rewards: list[float], fault: str) -> None:
    assert rule.fault(rewards) == fault
    assert redaction.is_known(fault), "the ledger would keep it as a trainer's own words"


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8), st.randoms())
def test_the_order_of_a_group_s_samples_does_not_matter_to_its_filter(
    rewards: list[float], order: Any
) -> None:
    rule, other = GroupFilter(0.5, -1.0, 1.0), list(rewards)
    order.shuffle(other)
    assert rule.fault(other) == rule.fault(rewards)


# ---------------------------------------------------------------- curriculum

ROWS = 5


def visit(position: int) -> Visit:
    """Five rows, in the same order each epoch."""
    return Visit(str(position % ROWS), position // ROWS)


def measured(*of: tuple[int, int, float]) -> PassRates:
    """(position, step, rate)"""
    rates = PassRates()
    for position, step, rate in of:
        rates.note(visit(position), step, round(rate * 10), 10)
    return rates


def test_without_bounds_a_step_takes_the_next_positions() -> None:
    choice = choose(7, 3, 99, visit, measured((0, 1, 1.0)), None)
    assert (choice.taken, choice.cursor, choice.easy, choice.hard) == ((7, 8, 9), 10, 0, 0)


def test_easy_and_hard_rows_rest_and_are_then_measured_again() -> None:
    rates = measured((0, 1, 1.0), (1, 1, 0.0), (2, 1, 0.5))
    one, two = Bounds(0.1, 0.9, 1), Bounds(0.1, 0.9, 2)
    choice = choose(5, 3, 1, visit, rates, one)
    assert (choice.taken, choice.cursor, choice.easy, choice.hard) == ((7, 8, 9), 10, 1, 1)
    assert choose(10, 3, 1, visit, rates, one).taken == (10, 11, 12)
    assert choose(10, 3, 1, visit, rates, two).taken == (12, 13, 14)
    assert choose(15, 3, 1, visit, rates, two).taken == (15, 16, 17)


def test_a_rate_at_a_bound_is_taken() -> None:
    assert choose(5, 2, 1, visit, measured((0, 1, 0.1), (1, 1, 0.9)), Bounds(0.1, 0.9, 1)).taken == (5, 6)


def test_only_what_was_measured_in_time_counts_and_the_newest_of_it() -> None:
    rates, bounds = measured((0, 1, 1.0), (5, 4, 0.5)), Bounds(None, 0.9, 3)
    assert choose(10, 1, 0, visit, rates, bounds).taken == (10,), "nothing was known"
    assert choose(10, 1, 3, visit, rates, bounds).taken == (11,)
    assert choose(10, 1, 4, visit, rates, bounds).taken == (10,)


def test_what_a_restart_finds_in_another_order_leads_to_the_same_choice() -> None:
    of = [(position, 1 + position // 3, (position % 4) / 3) for position in range(12)]
    bounds = Bounds(0.2, 0.9, 2)
    assert choose(12, 9, 3, visit, measured(*of), bounds) == choose(
        12, 9, 3, visit, measured(*reversed(of)), bounds
    )


def test_a_step_finds_its_prompts_where_every_row_is_solved() -> None:
    rates = measured(*((position, 1, 1.0) for position in range(ROWS)))
    choice = choose(ROWS, 4, 1, visit, rates, Bounds(None, 0.5, 2))
    assert choice.taken == (15, 16, 17, 18)
    assert choice.easy == 10


def test_a_group_without_usable_rewards_measures_nothing() -> None:
    rates = PassRates()
    rates.note(visit(0), 1, 0, 0)
    assert rates.last("0", 9) is None
    assert passed([0.0, 0.5, 1.0], 0.5) == 2


# ---------------------------------------------------------------- replay


def kept(group: int, step: int, oldest: int, signal: float = 1.0, *workers: int) -> KeptGroup:
    return KeptGroup(group, step, oldest, signal, frozenset(workers))


def test_a_replayed_group_is_within_the_bound_and_those_with_most_signal_come_first() -> None:
    groups = [kept(1, 3, 0), kept(2, 3, 2, 0.5), kept(3, 4, 3, 0.5), kept(4, 4, 3, 0.75), kept(5, 4, 2, 0.1)]
    assert groups[0].age(5) == 4
    assert replayed(groups, 5, limit=3, max_age=3) == Replay((4, 3, 2), too_old=1, beyond_limit=1)
    assert replayed(groups[::-1], 5, limit=3, max_age=3) == Replay((4, 3, 2), too_old=1, beyond_limit=1)
    assert replayed(groups, 5, limit=9, max_age=0) == Replay((), too_old=5)


def test_what_a_wrong_engine_took_part_in_is_not_replayed() -> None:
    groups = [kept(1, 3, 2, 1.0, 7, 8), kept(2, 3, 2, 0.5, 9)]
    assert replayed(groups, 4, limit=2, max_age=2, suspects={8}) == Replay((2,), set_aside=1)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3), st.floats(0, 1)), max_size=30),
    st.integers(1, 4),
    st.integers(1, 3),
)
@example([(6, 0, 0.0), (6, 2, 1.0)], 1, 3)  # of one step, the better one is too old first
def test_nothing_that_a_later_step_would_choose_is_thrown_away(
    of: list[tuple[int, int, float]], limit: int, max_age: int
) -> None:
    groups = [
        kept(number, step, max(0, step - 1 - lag), signal) for number, (step, lag, signal) in enumerate(of)
    ]
    left = worth_keeping(groups, 7, limit=limit, max_age=max_age)
    assert len(left) <= limit * (max_age + 1)
    for step in (7, 8):
        assert (
            replayed(left, step, limit=limit, max_age=max_age).taken
            == replayed(groups, step, limit=limit, max_age=max_age).taken
        )


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"filter_mean_min": 0.9, "filter_mean_max": 0.1}, "filter_mean_min <= filter_mean_max must hold"),
        ({"task": "jsonl", "path": "p", "curriculum_min": 0.9, "curriculum_max": 0.1}, "curriculum_min <= "),
        ({"curriculum_max": 0.9}, 'not of task = "sort", whose prompts never come again'),
        ({"environment": "e", "curriculum_max": 0.9}, "not of an environment's tasks"),
        ({"task": "jsonl", "path": "p", "curriculum_rest": 2}, "curriculum_rest is of a curriculum"),
    ],
)
def test_settings_that_choose_nothing_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        DataSection.model_validate(settings)
