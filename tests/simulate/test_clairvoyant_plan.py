"""The clairvoyant's search looks at few windows: they are as good as those of a search that looks at all of a fine grid."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.baselines.clairvoyant.plan import (
    LATER,
    REOPEN_GAIN,
    SERVE_GAIN,
    SHARES,
    WORTH,
    plan,
    share_of,
)
from scavenger.policy.forecast.service import Outstanding
from scavenger.policy.forecast.speed import SpeedCurve
from scavenger.policy.forecast.step import NEVER, Costs, EnginePool, Situation, StepModel
from scavenger.policy.seed_window import limit_of

CURVE = SpeedCurve(7e-3, 2e-5, 6e-8)


def situation(seed: int, awake: bool, groups: int = 12) -> Situation:
    """Part of a step: engines, lengths, costs and what is ready already all differ."""
    draw = random.Random(seed)
    samples = tuple(
        Outstanding(draw.uniform(200, 900), draw.lognormvariate(7, 0.8), group)
        for group in range(groups)
        for _ in range(8)
    )
    train_s = draw.choice([2e-5, 1e-4, 4e-4])
    costs = Costs(
        1e-5, train_s, round_groups=4, sleep_s=draw.uniform(1, 6), wake_s=draw.uniform(1, 6), finish_s=3.0
    )
    ready = draw.choice([0, 5, 40])
    pools = EnginePool(CURVE, 2.0, 64), EnginePool(CURVE, float(draw.randint(1, 6)), 64)
    limit = draw.choice([NEVER, 8.0, 16.0])
    return Situation(
        *pools, costs, samples, awake, ready_groups=ready, ready_tokens=ready * 12_000.0, limit=limit
    )


def finest(one: Situation, points: int = 60) -> float:
    model = StepModel(one)
    return min(model.close_s(model.end_s * i / points) for i in range(points + 1))


@pytest.mark.parametrize("seed", range(12))
def test_a_window_is_as_good_as_the_best_of_a_fine_grid(seed: int) -> None:
    one = situation(seed, awake=True)
    best = finest(one)
    waits = one.ready_groups >= one.costs.round_groups
    found = plan(one)
    alike = WORTH if waits and not found.awake else LATER  # closing now is preferred then
    assert found.step_s <= best * (1 + alike + 0.015)
    again = plan(one, found.window_s)  # from the last answer
    assert again.step_s <= best * (1 + (WORTH if waits and not again.awake else LATER) + 0.015)


@pytest.mark.parametrize("seed", range(16))
def test_who_sleeps_is_woken_where_that_pays_and_only_there(seed: int) -> None:
    one = situation(seed, awake=False)
    model = StepModel(one)
    stay, best = model.asleep_s(), finest(one)
    found = plan(one)
    worth = stay * (1 - (REOPEN_GAIN if one.ready_groups else 0.0))
    if found.awake:
        assert found.step_s < worth
    else:
        assert best >= worth * 0.98
        assert found.step_s == stay
    least = model.least_s(0.0)
    assert all(model.close_s(model.end_s * part) >= least * (1 - 1e-9) for part in (0.0, 0.1, 0.4, 0.8, 1.0))


def test_the_seeds_tell_all_answers_apart() -> None:
    asleep = [plan(situation(seed, awake=False)) for seed in range(16)]
    assert {one.awake for one in asleep} == {True, False}
    assert {"as long" in one.reason for one in asleep if not one.awake} == {True, False}


@pytest.mark.parametrize("seed", range(4))
def test_the_share_is_as_good_as_any(seed: int) -> None:
    one = replace(situation(seed, awake=True, groups=32), limit=NEVER)

    def step_s(share: float) -> float:
        return finest(replace(one, limit=limit_of(one, share)), 30)

    usual = SHARES[seed]
    assert step_s(share_of(one, usual)) <= min(step_s(share) for share in SHARES) * (
        1 + SERVE_GAIN + LATER + 0.01
    )
