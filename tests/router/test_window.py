"""The predicted window against a small step that is played token by token, and against what must hold of any prediction."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.policy.forecast.service import Outstanding, Samples
from scavenger.policy.forecast.speed import SpeedCurve
from scavenger.policy.forecast.step import NEVER, Costs, EnginePool, Situation, StepModel
from scavenger.policy.seed_window import (
    ALIKE,
    GRID,
    LATER,
    MIN_BENEFIT,
    SERVE_GAIN,
    ServingOrder,
    _step_s,
    carried,
    predict,
    serve,
    size_fleet,
    solve,
)

LINE = SpeedCurve(0.02, 2e-3, 1e-6)
COSTS = Costs(
    prefill_s=2e-4, train_s=2e-3, round_s=0.05, round_groups=2, sleep_s=0.5, wake_s=0.5, finish_s=1.0
)


def situation(
    seed: int = 1, groups: int = 8, each: int = 4, reserved: int = 3, harvested: int = 2, sigma: float = 0.7
) -> Situation:
    rng = random.Random(seed)
    samples = []
    for group in range(groups):
        shared = rng.gauss(0, 1)
        for _ in range(each):
            rest = min(600, max(2, round(math.exp(4.6 + sigma * (0.7 * shared + 0.7 * rng.gauss(0, 1))))))
            samples.append(Outstanding(20, rest, group))
    return Situation(EnginePool(LINE, reserved, 64), EnginePool(LINE, harvested, 64), COSTS, tuple(samples))


def played(at: Situation, window_s: float) -> float:
    """The step, token by token: before each token samples are spread evenly over the engines that are awake; rounds of whole groups."""
    assert at.reserved.curve == at.harvested.curve
    assert not isinstance(at.samples, Samples)
    left = [[sample.have, sample.rest, sample.group] for sample in at.samples]
    tokens: dict[float, float] = {
        g: sum(s.have + s.rest for s in at.samples if s.group == g) for g in {s.group for s in at.samples}
    }
    t, shut, whole = 0.0, False, []
    while left:
        if not shut and t >= window_s:
            shut = True
            share = at.reserved.engines / (at.reserved.engines + at.harvested.engines)
            t += sum(have for have, _, _ in left) * share * at.costs.prefill_s / at.harvested.engines
        engines = at.harvested.engines + (0 if shut else at.reserved.engines)
        batch = len(left) / engines
        base = at.harvested.curve.base
        t += (
            base
            + at.harvested.curve.per_sample * batch
            + at.harvested.curve.per_token * sum(have for have, _, _ in left) / engines
        )
        before = {group for _, _, group in left}
        left = [[have + 1, rest - 1, group] for have, rest, group in left if rest > 1]
        whole += [(t, tokens[group]) for group in before - {group for _, _, group in left}]
    now = min(t, window_s) + at.costs.sleep_s
    ready: list[float] = []
    while whole or ready:
        while whole and whole[0][0] <= now:
            ready.append(whole.pop(0)[1])
        if ready and (len(ready) >= at.costs.round_groups or not whole):
            now += at.costs.round_s + at.costs.train_s * sum(ready)
            ready = []
        else:
            now = max(now, whole[0][0])
    return max(now, t) + at.costs.finish_s


@pytest.mark.parametrize("seed", range(6))
def test_a_prediction_is_what_playing_the_step_takes(seed: int) -> None:
    at = situation(seed)
    end = predict(at, NEVER)
    for window in (0.0, end / 8, end / 4, end / 2, NEVER):
        assert predict(at, window) == pytest.approx(played(at, window), rel=0.05), window


@pytest.mark.parametrize(("seed", "harvested"), [(1, 1), (2, 2), (3, 4), (4, 8), (5, 2), (6, 3)])
def test_the_window_is_as_good_as_the_best_of_a_fine_grid_when_played(seed: int, harvested: int) -> None:
    at = situation(seed, groups=24, harvested=harvested)
    plan = solve(at)
    end = predict(at, NEVER)
    best = min(played(at, end * i / 40) for i in range(41))
    mine = played(at, plan.close_after_s)
    assert mine <= 1.04 * best
    assert str(round(plan.step_s, 1)) in plan.reason


def test_without_harvested_engines_everything_is_generated_first() -> None:
    at = situation(harvested=0)
    plan = solve(at)
    assert plan.awake
    assert plan.close_after_s == NEVER
    assert predict(at, 0.0) == NEVER
    assert plan.step_s < NEVER


def test_with_a_great_fleet_reserved_engines_train_at_once() -> None:
    at = situation(harvested=200)
    at = replace(at, costs=replace(COSTS, train_s=2e-2))
    plan = solve(at)
    assert not plan.awake
    assert plan.close_after_s == 0.0


def test_engines_that_are_on_their_way_are_reckoned_with() -> None:
    nobody = situation(harvested=0)
    coming = replace(nobody, arrivals=((1.0, 4.0),))
    late = replace(nobody, arrivals=((1e6, 4.0),))
    assert solve(coming).step_s < solve(nobody).step_s
    assert solve(coming).close_after_s < NEVER
    assert solve(late).step_s == pytest.approx(solve(nobody).step_s)


def test_reserved_engines_wake_when_the_harvested_ones_vanish_before_any_sample_is_done() -> None:
    asleep = replace(situation(harvested=0), awake=False)
    plan = solve(asleep)
    assert plan.awake
    assert StepModel(asleep).asleep_s() == NEVER


@pytest.mark.parametrize("harvested", [0, 1, 4])
def test_a_window_that_has_closed_stays_closed(harvested: int) -> None:
    asleep = replace(situation(groups=16, reserved=8, harvested=harvested), awake=False)
    assert solve(asleep).awake
    plan = solve(replace(asleep, closed=True))
    assert not plan.awake
    assert plan.step_s == StepModel(asleep).asleep_s()
    assert "the window is closed, training on" in plan.reason


def test_waking_for_the_last_samples_does_not_pay_its_toggle() -> None:
    few = situation(groups=1, each=2, harvested=4)
    asleep = replace(few, awake=False, costs=replace(COSTS, wake_s=5.0), ready_groups=1, ready_tokens=500.0)
    plan = solve(asleep)
    assert not plan.awake
    assert "training from now on" in plan.reason


def test_before_any_sample_is_done_waking_needs_no_margin() -> None:
    """The trainer has nothing to do yet: the toggle interrupts nothing."""
    at = situation(groups=16, reserved=1, harvested=8)
    for wake_s in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0):
        asleep = replace(at, awake=False, costs=replace(COSTS, wake_s=wake_s))
        plan = solve(asleep)
        stay_s = StepModel(asleep).asleep_s()
        assert plan.awake == (plan.step_s < stay_s)
        assert plan.step_s <= stay_s


def test_waking_pays_when_most_is_left_to_few() -> None:
    asleep = replace(situation(groups=16, reserved=8, harvested=1), awake=False)
    plan = solve(asleep)
    assert plan.awake
    assert plan.step_s < 0.95 * StepModel(asleep).asleep_s()


def test_losing_engines_lengthens_the_step() -> None:
    steady = situation()
    assert predict(replace(steady, loss_per_s=1 / 20), 0.0) > 1.05 * predict(steady, 0.0)


def test_a_step_with_nothing_left_takes_its_finish() -> None:
    empty = replace(situation(), samples=())
    plan = solve(empty)
    assert not plan.awake
    assert plan.step_s == pytest.approx(COSTS.sleep_s + COSTS.finish_s)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    groups=st.integers(1, 12),
    reserved=st.integers(0, 6),
    harvested=st.integers(0, 12),
    awake=st.booleans(),
)
def test_a_plan_is_never_worse_than_either_extreme(
    seed: int, groups: int, reserved: int, harvested: int, awake: bool
) -> None:
    at = replace(situation(seed, groups, 3, reserved, harvested), awake=awake)
    plan = solve(at)
    if reserved + harvested == 0:
        assert plan.step_s == NEVER
        return
    if awake:
        extremes = min(predict(at, 0.0), predict(at, NEVER))
        assert plan.step_s <= extremes * (1 + max(ALIKE, LATER)) + 1e-9
    if reserved:
        assert plan.step_s < NEVER
    assert solve(at) == plan


def test_with_a_round_that_waits_it_closes_where_later_is_hardly_better_and_without_one_it_waits() -> None:
    ready = (replace(situation(seed, harvested=12), ready_groups=2, ready_tokens=900.0) for seed in range(99))
    at = next(at for at in ready if _hardly_better(at))
    closed, waits = solve(at), solve(replace(at, ready_groups=1))
    assert not closed.awake
    assert closed.step_s == predict(at, 0.0)
    assert waits.awake, "with less than a round nothing is gained by closing early"
    assert waits.step_s < predict(replace(at, ready_groups=1), 0.0)


def _hardly_better(at: Situation) -> bool:
    """A late window ends the step sooner by .5 to 1.5 %, also with one group ready less."""
    for ready in (at.ready_groups, 1):
        one = replace(at, ready_groups=ready)
        best, window = min((predict(one, StepModel(one).end_s * i / 50), i / 50) for i in range(51))
        if not (1.005 < predict(one, 0.0) / best < 1.015 and window > 0.3):
            return False
    return True


def test_the_fleet_grows_to_where_an_engine_saves_too_little_and_no_further() -> None:
    alone = situation(groups=16, each=8, reserved=4, harvested=0)
    size = size_fleet(alone, most=64, least_saving=0.01)
    with_ = {
        n: solve(replace(alone, harvested=replace(alone.harvested, engines=float(n)))).step_s
        for n in range(size.engines + 9)
    }
    assert 2 <= size.engines < 64
    assert size.step_s == with_[size.engines]
    more = 1 - (with_[size.engines + 8] / with_[size.engines]) ** (1 / 8)
    assert more < 0.012
    assert size_fleet(alone, most=64, least_saving=0.03).engines < size.engines
    assert size_fleet(alone, most=3, least_saving=0.01).engines <= 3
    assert size_fleet(alone, most=0, least_saving=0.01).engines == 0


def test_shares_that_are_alike_in_samples_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[float] = []
    monkeypatch.setattr(
        "scavenger.policy.seed_window._step_s", lambda at, _: looked_at.append(at.limit) or 1.0
    )
    few = situation(
        groups=12, reserved=2, harvested=2
    )  # 12 samples an engine: most shares are the least that is served
    serve([few])
    assert sorted(looked_at) == [8, 9, 11, NEVER]


def test_fewer_samples_at_a_time_than_fit_are_served_only_where_that_ends_the_step_clearly_sooner() -> None:
    decided = [serve([situation(seed, groups=16, harvested=3)]) for seed in range(8)]
    for seed, chosen in enumerate(decided):
        at = situation(seed, groups=16, harvested=3)
        all_s, limited_s = solve(at).step_s, solve(replace(at, limit=chosen.limit)).step_s
        assert chosen.limit == NEVER or limited_s < (1 - SERVE_GAIN / 2) * all_s, (
            "it looks at fewer windows than this"
        )
        assert "at a time end the step in" in chosen.reason
    assert any(chosen.limit == NEVER for chosen in decided)


@pytest.mark.parametrize("pool", [EnginePool(LINE, 1, slots=2), EnginePool(LINE, 1, slots=64, cache=400.0)])
def test_what_finds_no_place_waits_its_turn(pool: EnginePool) -> None:
    """Two slots, or a cache that holds two: the first group is whole at half time, not both of them at the end."""
    samples = tuple(Outstanding(150, 100, group) for group in (1, 1, 2, 2))
    model = StepModel(Situation(EnginePool(LINE, 0, 64), pool, COSTS, samples, awake=False))
    assert [at for at, _ in model.profile.whole] == [100, 200]
    free = StepModel(Situation(EnginePool(LINE, 0, 64), EnginePool(LINE, 1, 64), COSTS, samples, awake=False))
    assert [at for at, _ in free.profile.whole] == [100, 100]


def test_a_decision_that_is_carried_over_is_the_same_share_of_what_each_engine_has_now() -> None:
    few, many = situation(groups=8), situation(groups=32)
    kept = carried(many, ServingOrder(1, 10, 0.5, "why"))
    assert (kept.order, kept.share) == (1, 0.5)
    assert kept.limit == math.ceil(0.5 * len(many.samples) / 5)
    assert "decided for a step before" in kept.reason
    assert carried(many, ServingOrder()).limit == NEVER
    assert carried(few, ServingOrder(0, 90, 0.85)).limit == NEVER, (
        "of seven samples an engine all are served: fewer would leave it unused"
    )


@pytest.mark.parametrize("awake", [True, False])
@pytest.mark.parametrize("limit", [NEVER, 5.0])
@pytest.mark.parametrize("train_s", [1e-4, 2e-3, 1e-2])
def test_no_window_ends_a_step_sooner_than_all_its_training_allows(
    train_s: float, limit: float, awake: bool
) -> None:
    """And windows that are left out for that are none that any search could answer with."""
    at = replace(situation(3, harvested=4), costs=replace(COSTS, train_s=train_s), limit=limit, awake=awake)
    at = replace(at, ready_groups=3, ready_tokens=400.0, group_tokens={1: 90.0}, busy_s=0.0 if awake else 2.0)
    model = StepModel(at)
    windows = [model.end_s * i / GRID for i in range(GRID)] + [model.end_s]
    assert all(model.least_s(window) <= model.close_s(window) for window in windows)
    known = [model.close_s(window) for window in windows]
    best = min(known)
    left_out = [window for window in windows if model.least_s(window) > best * (1 + LATER)]
    assert all(known[windows.index(window)] > best * (1 + LATER) for window in left_out)
    found = solve(at)
    if found.awake or awake:
        assert found.step_s <= best * (1 + LATER + max(ALIKE, MIN_BENEFIT))
    assert left_out or train_s < 1e-2, "training takes longest: late windows need not be looked at"


def test_a_step_s_time_is_that_of_its_plan_also_where_no_window_is_looked_at() -> None:
    looked_at = 0
    for seed in range(40):
        rng = random.Random(seed)
        costs = replace(COSTS, train_s=rng.choice([1e-4, 2e-3, 1e-2]))
        done = {group: rng.uniform(50, 900) for group in range(3)} if seed % 2 else None
        ready: dict[str, Any] = {"ready_groups": 2, "ready_tokens": 900.0} if seed % 3 else {}
        base = situation(seed, harvested=rng.choice([1, 2, 8]))
        for awake in (True, False):
            for limit in (NEVER, 3.0):
                at = replace(base, awake=awake, costs=costs, group_tokens=done, limit=limit, **ready)
                alike = max(MIN_BENEFIT, LATER) if awake else 0.0
                assert _step_s(at) == pytest.approx(solve(at).step_s, rel=alike, abs=0)
                assert solve(at).step_s <= _step_s(at, 0) * (1 + alike + LATER), (
                    "a coarse grid finds none that is clearly better"
                )
                model = StepModel(at)
                looked_at += not awake and model.least_s(0.0) < model.asleep_s()
    assert 0 < looked_at < 80  # both ways of a sleeping one were there
