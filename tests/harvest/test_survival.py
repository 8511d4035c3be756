"""Survival curves against textbook cases, simulated lives, and the prior."""

from __future__ import annotations

import math
import random

import pytest

from scavenger.policy.forecast.survival import (
    HOUR_S,
    MOST_STARTS,
    MOST_UNUSED,
    NEARLY,
    PRIOR_HAZARD_PER_S,
    ObservedLife,
    Survival,
    estimate,
    prior,
    settle_s,
)


def test_without_trust_in_a_prior_the_curve_is_kaplan_and_meiers() -> None:
    """Lives 100+, 200, 300, 300+, 500 (+ = censored): S = 3/4 after 200, 3/4 * 2/3 after 300, 0 after 500."""
    lives = [
        ObservedLife(100, False),
        ObservedLife(200, True),
        ObservedLife(300, True),
        ObservedLife(300, False),
        ObservedLife(500, True),
    ]
    curve = estimate(lives, prior(), trust=0)
    assert curve.survives(190.2) == pytest.approx(1.0)  # at one of the fixed points, which no event precedes
    assert curve.survives(269.1) == pytest.approx(3 / 4, rel=1e-3)
    assert curve.survives(452.5) == pytest.approx(1 / 2, rel=1e-3)
    assert curve.survives(600) < 1e-3


def test_without_lives_the_prior_holds() -> None:
    curve = Survival().curve("8 GPUs", 0.0)
    assert curve.survives(HOUR_S) == pytest.approx(math.exp(-0.63), rel=1e-6)
    assert curve.expected_s(60.0) == pytest.approx(
        math.exp(-PRIOR_HAZARD_PER_S * 60) / PRIOR_HAZARD_PER_S, rel=1e-4
    )


def test_exponential_lives_are_found_again_though_most_are_censored() -> None:
    rng, survival = random.Random(1), Survival()
    for _ in range(2000):
        life, seen = rng.expovariate(1 / 600), rng.uniform(0, 600)
        survival.observe("a", 0.0, ObservedLife(min(life, seen), life <= seen))
    curve = survival.curve("a", 0.0)
    for seconds in (60, 300, 550):
        assert curve.survives(seconds) == pytest.approx(math.exp(-seconds / 600), abs=0.04), seconds


def test_lives_that_came_into_sight_late_do_not_count_before() -> None:
    """Idle GPUs that are seen only once they are 1,000 s old say nothing of the first 1,000 s (delayed entry)."""
    lives = [ObservedLife(1000.0 + 10 * i, True, entered_s=1000.0) for i in range(1, 60)]
    curve = estimate(lives, prior(), trust=1e-6)
    assert curve.survives(900) == pytest.approx(prior().survives(900), rel=1e-3)
    assert curve.survives(600, age_s=1000) < 0.1


def test_a_life_told_in_pieces_counts_as_one() -> None:
    whole = [ObservedLife(1000.0 + i, i % 2 == 0) for i in range(50)]
    pieces = [
        piece
        for life in whole
        for piece in (ObservedLife(500.0, False), ObservedLife(life.seconds, life.lost, entered_s=500.0))
    ]
    a, b = estimate(whole, prior()), estimate(pieces, prior())
    for seconds in (100, 700, 1040, 5000):
        assert a.survives(seconds) == pytest.approx(b.survives(seconds), rel=0.02)


def test_each_class_and_hour_has_its_own_curve_and_new_ones_lean_on_the_others() -> None:
    survival = Survival()
    for i in range(200):
        survival.observe("day", 12 * HOUR_S + 200, ObservedLife(100.0 + i % 7, True))
        survival.observe("day", 3 * HOUR_S, ObservedLife(20_000.0, False))
        survival.observe("night", 3 * HOUR_S, ObservedLife(20_000.0, False))
    noon, early = survival.curve("day", 12 * HOUR_S), survival.curve("day", 21 * HOUR_S)
    assert noon.survives(600) < 0.1
    assert survival.curve("night", 3 * HOUR_S).survives(600) > 0.9
    assert noon.survives(600) < early.survives(600) < survival.curve("night", 21 * HOUR_S).survives(600)
    assert survival.lives("day") == 400
    assert survival.lives() == 600


def test_expected_seconds_are_the_integral_of_the_curve() -> None:
    rng = random.Random(2)
    curve = estimate([ObservedLife(rng.lognormvariate(6, 1.5), True) for _ in range(300)], prior())
    for after, age in ((0.0, 0.0), (90.0, 0.0), (90.0, 700.0)):
        step = 5.0
        points = [curve.survives(after + (i + 0.5) * step, age) for i in range(int((20_000 - after) / step))]
        assert curve.expected_s(after, age, horizon_s=20_000) == pytest.approx(step * sum(points), rel=0.01)


def test_waiting_for_a_gpu_to_settle_avoids_wasted_starts() -> None:
    """Half of the slices end within two minutes, the others last for hours: one that is 150 s old is worth a start of 100 s."""
    lives = [ObservedLife(20.0 + i % 100, True) for i in range(300)] + [
        ObservedLife(30_000.0, False) for _ in range(300)
    ]
    curve = estimate(lives, prior())
    assert curve.survives(100.0) < 0.7
    wait = settle_s(curve, 100.0, 0.95)
    assert 20 < wait < 200
    assert curve.survives(100.0, age_s=wait) >= 0.95
    assert settle_s(curve, 100.0, 0.3) == 0.0


def test_nothing_is_waited_for_where_waiting_changes_nothing() -> None:
    """A life without memory outlasts a start as likely at any age; and one whom nobody ever outlasts is for `worth` to refuse."""
    assert settle_s(prior(), 3000.0, 0.985) == 0.0
    assert settle_s(estimate([ObservedLife(15.0, True)] * 500, prior()), 1e5, 0.99) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_a_wait_is_bounded_and_comes_near_to_what_any_bounded_wait_reaches(seed: int) -> None:
    rng = random.Random(seed)
    lives = [ObservedLife(rng.lognormvariate(5, 2.0), rng.random() < 0.9) for _ in range(2000)]
    curve, cold = estimate(lives, prior()), rng.choice([5.0, 60.0, 300.0])
    for share in (0.5, 0.9, 0.985, 0.9999):
        wait = settle_s(curve, cold, share)
        assert wait <= MOST_STARTS * cold
        assert curve.expected_s(wait) >= MOST_UNUSED * curve.expected_s()
        bounded = [
            age
            for age in range(0, int(MOST_STARTS * cold), 5)
            if curve.expected_s(age) >= MOST_UNUSED * curve.expected_s()
        ]
        best = max(curve.survives(cold, age_s=age) for age in bounded)
        assert 1 - curve.survives(cold, age_s=wait) <= max(1 - share, (NEARLY + 0.5) * (1 - best)) + 1e-9, (
            "ages in between differ a little"
        )


def test_a_life_cannot_end_before_it_came_into_sight() -> None:
    with pytest.raises(ValueError, match="was first seen"):
        ObservedLife(10.0, True, entered_s=11.0)
