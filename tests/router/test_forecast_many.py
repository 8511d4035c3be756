"""Forecasts for many samples at once are those of one sample at a time, to the last bit."""

from __future__ import annotations

import random

import pytest

from scavenger.policy.forecast import lengths_of_step
from scavenger.policy.forecast.lengths import Belief, GroupLengths, LengthForecast, impute


def learned(seed: int, cap: int) -> LengthForecast:
    rng = random.Random(seed)
    lengths = LengthForecast(cap)
    for _ in range(3):
        groups = [
            [min(cap, max(1, int(rng.lognormvariate(6 + rng.random(), 0.9)))) for _ in range(8)]
            for _ in range(20)
        ]
        for length in (length for group in groups for length in group):
            lengths.finished(length)
        lengths.step_ended(groups)
    return lengths


@pytest.mark.parametrize("seed", range(20))
def test_many_samples_at_once_get_what_each_gets_alone(seed: int) -> None:
    rng = random.Random(seed)
    cap = rng.choice([7, 300, 4096, 14_336])
    forecast = learned(seed, cap) if seed % 4 else LengthForecast(cap)
    groups = {
        key: GroupLengths(
            tuple(rng.randint(1, cap) for _ in range(rng.randint(0, 4))),
            tuple(rng.choice([0, 1, rng.randint(0, cap), cap - 1, cap]) for _ in range(rng.randint(1, 8))),
        )
        for key in rng.sample(range(1000), 30)
    }
    table = forecast.table([length for group in groups.values() for length in group.running if length])
    beliefs = {
        key: rng.choice([table.belief(group), Belief(rng.uniform(-40, 40), rng.uniform(0, 1))])
        for key, group in groups.items()
    }
    alone = [table.expected(beliefs[key], have) for key, group in groups.items() for have in group.running]
    assert (
        lengths_of_step.expected(
            table, [(beliefs[key], group.running) for key, group in groups.items()]
        ).tolist()
        == alone
    )
    drawn = impute(table, groups, beliefs)
    together = lengths_of_step.impute(table, [(key, beliefs[key], groups[key]) for key in groups])
    assert together.tolist() == [length for key in groups for length in drawn[key]]


def test_of_nobody_there_is_nothing_to_say() -> None:
    table = LengthForecast(100).table()
    assert len(lengths_of_step.expected(table, [])) == len(lengths_of_step.impute(table, [])) == 0
