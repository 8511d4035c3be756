"""What the forecasts learn, against answers and timings whose truth the test knows."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.policy.forecast.lengths import Belief, GroupLengths, LengthForecast, impute
from scavenger.policy.forecast.speed import (
    PREFILL_SHARE,
    PRIOR_STEP,
    Average,
    CurveFit,
    Curves,
    Ratio,
    RoundFit,
    SpeedCurve,
)
from scavenger.policy.interface import (
    SampleFinished,
    StepFinished,
    Toggled,
    TrainedGroups,
    WorkerJoined,
    WorkerLost,
)
from scavenger.policy.predictive.learned import Forecast

CAP = 14_000


def drawn(
    rng: random.Random, groups: int, each: int = 8, mu: float = 8.0, sigma: float = 0.8, rho: float = 0.6
) -> list[list[int]]:
    """Lognormal lengths with correlation `rho` inside a group."""
    found = []
    for _ in range(groups):
        shared = rng.gauss(0, 1)
        logs = [
            mu + sigma * (math.sqrt(rho) * shared + math.sqrt(1 - rho) * rng.gauss(0, 1)) for _ in range(each)
        ]
        found.append([max(1, min(CAP, round(math.exp(log)))) for log in logs])
    return found


def learned(rng: random.Random, steps: int = 3, groups: int = 64, **like: Any) -> LengthForecast:
    forecast = LengthForecast(CAP)
    for _ in range(steps):
        step = drawn(rng, groups, **like)
        for length in (length for group in step for length in group):
            forecast.finished(length)
        forecast.step_ended(step)
    return forecast


# ---------------------------------------------------------------- lengths


def test_before_any_answer_the_stated_prior_holds() -> None:
    table = LengthForecast(CAP).table()
    assert table.length(0.0) == pytest.approx(CAP / 6, rel=0.02)
    assert table.score(CAP / 6 * math.e) == pytest.approx(1.0, abs=0.02)
    assert table.correlation == pytest.approx(0.3)


def test_the_quantiles_of_a_known_distribution_are_learned() -> None:
    table = learned(random.Random(1)).table()
    for score in (-1.5, -0.5, 0.0, 0.5):
        assert table.length(score) == pytest.approx(math.exp(8.0 + 0.8 * score), rel=0.15), score


def test_a_larger_cap_unlearns_nothing_and_a_smaller_one_changes_nothing() -> None:
    """As of an evaluation, or of prompts of which each leaves another length."""
    known = learned(random.Random(3), mu=7.0)
    forecast = Forecast(lengths=known)
    assert forecast.capped(4096) is known
    wide = forecast.capped(2 * CAP)
    assert (wide.cap, wide.seen, wide.correlation) == (2 * CAP, known.seen, known.correlation)
    before, after = known.table(), wide.table()
    for score in (-1.5, -0.5, 0.0, 0.5, 1.5):
        assert after.length(score) == pytest.approx(before.length(score), rel=0.1), "a bin is 9 % wide"
    assert forecast.capped(CAP) is wide


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6, 0.9])
def test_the_likeness_of_siblings_is_learned(rho: float) -> None:
    rng = random.Random(2)
    forecast = learned(rng, steps=4, groups=128, rho=rho)
    assert forecast.correlation == pytest.approx(rho, abs=0.12)


def test_running_samples_that_outlast_the_others_lengthen_the_forecast() -> None:
    """The life table is Kaplan's and Meier's: with half of the samples censored at 6,000 tokens, the quantiles do not shrink."""
    rng = random.Random(3)
    lengths = [length for group in drawn(rng, 250, rho=0.0) for length in group]
    forecast = LengthForecast(CAP)
    for length in lengths:
        if length < 3000:
            forecast.finished(length)
    running = [3000 for length in lengths if length >= 3000]
    naive = forecast.table()
    censored = forecast.table(running)
    share = sum(length < 3000 for length in lengths) / len(lengths)
    expected = statistics.NormalDist().inv_cdf(share)
    assert censored.score(3000) == pytest.approx(expected, abs=0.1)
    assert naive.score(3000) > expected + 0.5


def test_a_drift_is_followed_within_two_big_steps() -> None:
    rng = random.Random(4)
    forecast = learned(rng, steps=4, groups=128)
    for _ in range(2):
        step = drawn(rng, 128, mu=8.4)
        for length in (length for group in step for length in group):
            forecast.finished(length)
        forecast.step_ended(step)
    assert math.log(forecast.table().length(0.0)) == pytest.approx(8.4, abs=0.15)


def test_a_group_with_a_long_finished_sibling_is_expected_longer() -> None:
    table = learned(random.Random(5)).table()
    long, short, unknown = (table.belief(GroupLengths(finished)) for finished in ((9000,), (800,), ()))
    assert table.expected(long, 0) > 1.5 * table.expected(unknown, 0) > 2 * table.expected(short, 0)
    assert long.sd < unknown.sd == 1.0


def test_a_belief_is_the_gaussian_posterior_where_nothing_is_censored() -> None:
    table = learned(random.Random(6)).table()
    finished = (1000, 2500, 4000)
    share, noise = table.correlation, 1 - table.correlation
    scores = [table.score(length) for length in finished]
    precision = 1 + len(scores) * share / noise
    belief = table.belief(GroupLengths(finished))
    assert belief.mean == pytest.approx(math.sqrt(share) / noise * sum(scores) / precision, abs=1e-3)
    assert belief.sd == pytest.approx(precision**-0.5, rel=1e-3)


def test_a_belief_from_censored_siblings_is_the_posterior_by_numeric_integration() -> None:
    table = learned(random.Random(7)).table()
    group = GroupLengths((1500,), (5000, 5000, 200))
    normal, share, noise = (
        statistics.NormalDist(),
        math.sqrt(table.correlation),
        math.sqrt(1 - table.correlation),
    )
    weights = {}
    for i in range(-500, 501):
        g = i / 100
        log = -g * g / 2 - ((table.score(1500) - share * g) / noise) ** 2 / 2
        log += sum(
            math.log(1 - normal.cdf((table.score(length) - share * g) / noise)) for length in group.running
        )
        weights[g] = math.exp(log)
    mode = max(weights, key=lambda g: weights[g])
    belief = table.belief(group)
    assert belief.mean == pytest.approx(mode, abs=0.02)
    total = sum(weights.values())
    mean = sum(g * w for g, w in weights.items()) / total
    assert belief.sd == pytest.approx(
        math.sqrt(sum((g - mean) ** 2 * w for g, w in weights.items()) / total), rel=0.08
    )


@settings(max_examples=60, deadline=None)
@given(
    have=st.integers(0, CAP - 1), mean=st.floats(-3, 3), sd=st.floats(0.05, 1), share=st.floats(0.01, 0.99)
)
def test_a_final_length_lies_above_what_is_there_and_grows_with_its_quantile(
    have: int, mean: float, sd: float, share: float
) -> None:
    table = learned(random.Random(8), steps=1).table()
    belief = Belief(mean, sd)
    length = table.at(belief, have, share)
    assert have < length <= CAP
    assert table.at(belief, have, min(0.999, share + 0.1)) >= length
    assert have < table.expected(belief, have) <= CAP


def test_the_expected_rest_is_that_of_the_samples_which_outlast_it() -> None:
    rng = random.Random(9)
    table = learned(rng, steps=3, groups=256, rho=0.0).table()
    fresh = [length for group in drawn(rng, 4000, each=1, rho=0.0) for length in group]
    for have in (500, 3000, 8000):
        longer = [length for length in fresh if length > have]
        assert table.expected(Belief(0.0, 1.0), have) == pytest.approx(statistics.fmean(longer), rel=0.1), (
            have
        )


def test_imputed_lengths_have_the_spread_the_maximum_and_the_likeness_that_are_expected() -> None:
    rng = random.Random(10)
    forecast = learned(rng, steps=4, groups=128)
    table = forecast.table()
    imputed = impute(table, {i: GroupLengths(running=(0,) * 8) for i in range(128)})
    flat = [length for group in imputed.values() for length in group]
    normal = statistics.NormalDist()
    learned_mean = statistics.fmean(table.length(normal.inv_cdf((i + 0.5) / 4000)) for i in range(4000))
    assert statistics.fmean(flat) == pytest.approx(learned_mean, rel=0.03)
    assert max(flat) == pytest.approx(CAP, rel=0.15)
    truth = drawn(rng, 1024)
    whole = statistics.fmean(max(group) for group in imputed.values()) / statistics.fmean(flat)
    expected = statistics.fmean(max(group) for group in truth) / statistics.fmean(
        length for group in truth for length in group
    )
    assert whole == pytest.approx(expected, rel=0.07)
    assert imputed == impute(forecast.table(), {i: GroupLengths(running=(0,) * 8) for i in range(128)})


@pytest.mark.parametrize("cap", [1, 2, 7, 100, 131_072])
def test_any_cap_has_a_forecast(cap: int) -> None:
    forecast = LengthForecast(cap)
    forecast.finished(cap)
    forecast.finished(max(1, cap // 2))
    table = forecast.table([0, cap // 2, cap - 1])
    assert table.length(-9) <= table.length(0) <= table.length(9) == cap
    with pytest.raises(ValueError, match="cap"):
        LengthForecast(0)


# ---------------------------------------------------------------- speed

TRUE = SpeedCurve(9e-3, 4e-5, 5e-8)


def test_a_line_is_found_again_from_its_own_points() -> None:
    rng, fit = random.Random(11), CurveFit()
    for _ in range(200):
        batch, each = rng.randint(1, 200), rng.randint(200, 9000)
        fit.observe(batch, batch * each, TRUE.step_s(batch, batch * each) * rng.gauss(1, 0.02))
    found = fit.curve()
    for batch, each in ((1, 500), (32, 4000), (128, 3000), (200, 9000)):
        assert found.step_s(batch, batch * each) == pytest.approx(TRUE.step_s(batch, batch * each), rel=0.03)
    assert min(found.base, found.per_sample, found.per_token) >= 0


def test_one_measurement_scales_the_prior() -> None:
    fit, prior = CurveFit(), SpeedCurve(*PRIOR_STEP)
    fit.observe(10, 20_000, 50 * prior.step_s(10, 20_000))
    assert fit.curve().step_s(10, 20_000) == pytest.approx(50 * prior.step_s(10, 20_000), rel=0.05)
    assert fit.curve().base == pytest.approx(50 * prior.base, rel=0.3)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.integers(0, 2_000_000), st.floats(1e-4, 10)),
        min_size=1,
        max_size=30,
    )
)
def test_no_coefficient_is_ever_negative(points: list[tuple[int, int, float]]) -> None:
    fit = CurveFit()
    for batch, context, step_s in points:
        fit.observe(batch, context, step_s)
    found = fit.curve()
    assert found.base > 0
    assert found.per_sample >= 0
    assert found.per_token >= 0


def test_a_kind_that_was_never_seen_is_like_the_others_and_then_like_itself() -> None:
    curves = Curves()
    for batch in range(1, 100):
        curves.observe("reserved", batch, batch * 2000, TRUE.step_s(batch, batch * 2000))
    assert curves.curve("harvested").step_s(50, 100_000) == pytest.approx(TRUE.step_s(50, 100_000), rel=0.03)
    for batch in range(1, 100):
        curves.observe("harvested", batch, batch * 2000, 3 * TRUE.step_s(batch, batch * 2000))
    assert curves.curve("harvested").step_s(50, 100_000) == pytest.approx(
        3 * TRUE.step_s(50, 100_000), rel=0.03
    )
    assert curves.curve("reserved").step_s(50, 100_000) == pytest.approx(TRUE.step_s(50, 100_000), rel=0.1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200)), min_size=1, max_size=12))
def test_an_engine_drains_in_the_time_that_stepping_it_takes(samples: list[tuple[int, int]]) -> None:
    stepped, step = 0.0, 0
    while any(rest > step for _, rest in samples):
        running = [have + step for have, rest in samples if rest > step]
        stepped += TRUE.step_s(
            len(running), sum(running) + len(running) / 2
        )  # the mean context over the step
        step += 1
    assert TRUE.drain_s(samples) == pytest.approx(stepped, rel=1e-9)


def test_the_plateau_is_where_throughput_reaches_its_share() -> None:
    each, share = 3000.0, 0.9
    batch = TRUE.plateau(each, share)
    best = 1 / (TRUE.per_sample + TRUE.per_token * each)
    assert TRUE.tokens_per_s(batch, each) >= share * best > TRUE.tokens_per_s(batch - 1, each)


def test_averages_start_at_their_prior_and_forget_it() -> None:
    average, ratio = Average(60.0), Ratio(2.0, 1.0)
    assert average.value == 60.0
    assert ratio.value() == 2.0
    for _ in range(200):
        average.observe(10.0)
        ratio.observe(100.0, 50.0)
    assert average.value == pytest.approx(10.0, rel=1e-3)
    assert ratio.value() == pytest.approx(0.5, rel=1e-2)
    assert PREFILL_SHARE > 0
    with pytest.raises(ValueError, match="duration"):
        average.observe(-1.0)
    with pytest.raises(ValueError, match="units"):
        ratio.observe(0.0, 1.0)


def test_a_prior_hardly_outlasts_the_first_measurement() -> None:
    """Ten seconds of an update's prior would be most of a step of two seconds for as many steps."""
    forecast = Forecast()
    forecast.observe(SampleFinished(1, 1, 1, 1000, 100, False, 1, "harvested", "n1"), 1.0)
    seconds = {"seconds": 2.5, "seconds_train": 0.55, "seconds_update": 0.04, "seconds_publish": 0.05}
    forecast.observe(StepFinished(1, "train", seconds), 2.0)
    forecast.observe(Toggled(1, False, 0.05), 2.0)
    assert forecast.finish.value < 0.3
    assert forecast.sleep_s < 0.2
    assert forecast.costs(SpeedCurve(0.25, 0.0, 0.0), 1, 1).train_s == pytest.approx(0.0005, rel=0.5)


def test_engines_that_live_for_seconds_are_expected_to_be_lost_within_steps_of_seconds() -> None:
    forecast = Forecast()
    forecast.observe(StepFinished(1, "train", {"seconds": 5.0, "seconds_train": 1.0}), 5.0)
    for worker in range(40):
        forecast.observe(WorkerJoined(worker, "harvested", "n1", 1), 10.0 * worker)
        forecast.observe(WorkerLost(worker, "harvested", "n1", 1, 8.0, True, "SIGTERM"), 10.0 * worker + 8.0)
    assert forecast.loss_per_s(1, 400.0) > 0.05


def test_what_a_round_costs_is_told_apart_from_what_tokens_cost() -> None:
    rng, forecast = random.Random(3), Forecast()
    for step in range(1, 31):
        rounds, tokens = rng.randint(3, 30), rng.randint(50, 200)
        forecast.observe(SampleFinished(step, step, step, tokens, 0, False, 1, "harvested", "n1"), step)
        noisy = rng.gauss(1.0, 0.02) * (0.4 * rounds + 0.05 * tokens)
        forecast.observe(
            StepFinished(step, "train", {"seconds": 99.0, "seconds_train": noisy, "rounds": float(rounds)}),
            step,
        )
    costs = forecast.costs(SpeedCurve(0.01, 0.0, 0.0), 1, 8)
    assert costs.round_s == pytest.approx(0.4, rel=0.1)
    assert costs.train_s == pytest.approx(0.05, rel=0.1)
    assert forecast.train_s(SpeedCurve(0.01, 0.0, 0.0), 1, 8) > 1.4 * costs.train_s, (
        "a token's share of the rounds is in it"
    )


def test_in_the_first_step_training_costs_what_was_seen_of_it_so_far_and_then_what_the_whole_step_says() -> (
    None
):
    forecast, curve = Forecast(), SpeedCurve(0.01, 0.0, 0.0)
    prior = forecast.train_s(curve, 1, 1)
    forecast.observe(TrainedGroups(1, 1, 1000, 1000 * prior * 4), 1.0)
    assert prior < forecast.train_s(curve, 1, 1) < 2 * prior, "a round of short answers says little"
    forecast.observe(TrainedGroups(1, 40, 200_000, 200_000 * prior * 4), 2.0)
    assert forecast.costs(curve, 1, 1).train_s == pytest.approx(4 * prior, rel=0.05)
    forecast.observe(SampleFinished(1, 1, 1, 500_000, 0, False, 1, "harvested", "n"), 3.0)
    forecast.observe(
        StepFinished(1, "train", {"seconds": 10.0, "seconds_train": 500_000 * prior * 3, "rounds": 4.0}), 4.0
    )
    assert forecast.train_s(curve, 1, 1) == pytest.approx(3 * prior, rel=0.05)
    forecast.observe(TrainedGroups(2, 40, 200_000, 200_000 * prior * 9), 5.0)
    assert forecast.train_s(curve, 1, 1) == pytest.approx(3 * prior, rel=0.05), "a whole step knows better"


def test_rounds_that_nobody_counts_cost_nothing_of_themselves() -> None:
    """Another trainer's steps, and those of ledgers from before."""
    forecast = Forecast()
    forecast.observe(SampleFinished(1, 1, 1, 1000, 100, False, 1, "harvested", "n1"), 1.0)
    forecast.observe(StepFinished(1, "train", {"seconds": 9.0, "seconds_train": 4.0}), 2.0)
    curve = SpeedCurve(0.01, 0.0, 0.0)
    assert forecast.costs(curve, 1, 1).round_s == 0.0
    assert forecast.costs(curve, 1, 1).train_s == forecast.train_s(curve, 1, 1)


@pytest.mark.parametrize("steps", [1, 40])
def test_steps_that_are_all_alike_leave_nothing_to_the_rounds(steps: int) -> None:
    """They cannot tell: then a prediction must be what was measured, however few rounds there are to come."""
    fit = RoundFit()
    assert fit.costs() is None
    for _ in range(steps):
        fit.observe(10.0, 1e6, 50.0)
    found = fit.costs()
    assert found is not None
    round_s, token_s = found
    assert 10 * round_s + 1e6 * token_s == pytest.approx(50.0, rel=1e-6)
    assert round_s < 1e-6
    with pytest.raises(ValueError, match="rounds"):
        fit.observe(0.0, 1.0, 1.0)


@given(
    st.lists(
        st.tuples(st.integers(1, 100), st.integers(1, 10**7), st.floats(1e-3, 1e4)), min_size=1, max_size=20
    )
)
def test_no_cost_is_negative_whatever_was_measured(steps: list[tuple[int, int, float]]) -> None:
    fit = RoundFit()
    for rounds, tokens, seconds in steps:
        fit.observe(rounds, tokens, seconds)
    found = fit.costs()
    assert found is not None
    assert min(found) >= 0
    assert max(found) > 0


@pytest.mark.parametrize("rounds", [-1.0, 0.0, 1e300, math.nan, math.inf])
def test_rounds_that_cannot_be_teach_nothing(rounds: float) -> None:
    forecast = Forecast()
    forecast.observe(SampleFinished(1, 1, 1, 1000, 100, False, 1, "harvested", "n1"), 1.0)
    forecast.observe(StepFinished(1, "train", {"seconds_train": 4.0, "rounds": rounds}), 2.0)
    assert forecast.rounds.costs() is None
