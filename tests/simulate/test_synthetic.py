"""The made-up cluster is like the real one: its statistics lie within the stated tolerances of the traces' README."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from benchmarks.synthetic import EARTH_LIKE, Fragments, SyntheticSite, Teams, generate, idle_quantile
from scavenger.errors import ConfigError
from scavenger.simulate.clock import Streams
from scavenger.simulate.fleet_stats import Statistics, measure

HOURS_72 = 72 * 3600.0
SEEDS = range(8)

# (statistic, README's figure, tolerance of the mean over seeds, as a share). One seed may lie further off: it is one random cluster.
README = [
    ("idle_mean", 165, 0.10),
    ("idle_p5", 112, 0.15),
    ("idle_p50", 152, 0.10),
    ("idle_p95", 264, 0.20),
    ("idle_max", 290, 0.20),
    ("reclaims_per_h", 35, 0.15),
    ("reclaimed_gpus_per_h", 105, 0.10),
    ("hazard_per_gpu_h", 0.63, 0.15),
    ("whole_node_share", 0.70, 0.15),
    ("hourly_p10", 15, 0.50),
    ("hourly_p50", 96, 0.15),
    ("hourly_p90", 211, 0.15),
    ("slice_p50_s", 260, 0.20),
    ("slice_p90_s", 8467, 0.30),
    ("slice_mean_s", 3214, 0.15),
    ("short_share", 0.023, 0.25),
]


@functools.cache
def found() -> tuple[Statistics, ...]:
    return tuple(measure(generate(Streams(seed), HOURS_72)) for seed in SEEDS)


@pytest.mark.parametrize(("name", "expected", "tolerance"), README)
def test_a_statistic_is_that_of_the_real_cluster(name: str, expected: float, tolerance: float) -> None:
    assert np.mean([getattr(one, name) for one in found()]) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize(("limit_s", "share"), [(60.0, 0.29), (300.0, 0.53), (900.0, 0.70), (3600.0, 0.85)])
def test_idle_slices_end_as_soon_as_the_real_ones(limit_s: float, share: float) -> None:
    assert np.mean([one.ended_within[limit_s] for one in found()]) == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize(
    ("idle", "share", "tolerance"),
    [
        ((1,), 0.014, 0.015),
        ((2,), 0.030, 0.015),
        ((3,), 0.031, 0.015),
        ((4,), 0.067, 0.03),
        ((5, 6, 7), 0.12, 0.03),
        ((8,), 0.74, 0.05),
    ],
)
def test_idle_time_lies_on_nodes_as_full_as_the_real_ones(
    idle: tuple[int, ...], share: float, tolerance: float
) -> None:
    mean = np.mean([sum(one.by_idle_on_node.get(count, 0.0) for count in idle) for one in found()])
    assert mean == pytest.approx(share, abs=tolerance)


def test_it_has_as_many_gpus() -> None:
    assert {one.gpus for one in found()} == {856}


def test_the_same_seed_gives_the_same_fleet_another_another_and_a_longer_one_begins_alike() -> None:
    short, again, longer = (generate(Streams(3), length) for length in (7200.0, 7200.0, 14_400.0))
    assert short == again
    assert longer.initial == short.initial
    assert tuple(change for change in longer.changes if change.t_s < 7200.0) == short.changes
    assert generate(Streams(4), 7200.0).changes != short.changes


def test_idle_quantiles_pass_through_their_table() -> None:
    table = ((0.0, 1.0), (0.5, 100.0), (1.0, 1000.0))
    assert [idle_quantile(share, table) for share in (0.0, 0.25, 0.5, 1.0)] == pytest.approx(
        [1.0, 10.0, 100.0, 1000.0]
    )


def test_a_team_comes_and_goes_together() -> None:
    fleet = generate(
        Streams(1), HOURS_72, SyntheticSite(constant_idle=(), teams=(Teams(1, 3, 20_000.0),), fragments=())
    )
    times = {change.t_s for change in fleet.changes}
    assert len(times) > 3
    assert all(sum(change.t_s == t_s for change in fleet.changes) == 3 for t_s in times)


def test_a_busier_site_has_fewer_idle_gpus() -> None:
    calm, busy = (
        SyntheticSite(constant_idle=(), teams=(Teams(40, 1, mean_s),), fragments=())
        for mean_s in (4000.0, 40_000.0)
    )
    assert (
        measure(generate(Streams(1), HOURS_72, busy)).idle_mean
        < 0.5 * measure(generate(Streams(1), HOURS_72, calm)).idle_mean
    )


def test_a_site_that_cannot_be_is_refused() -> None:
    for wrong in (
        {"constant_idle": (9,)},
        {"fragments": (Fragments(1, (4, 5), 10.0),)},
        {"teams": (Teams(1, 1, 0.0),)},
        {"day": 1.0},
    ):
        with pytest.raises(ConfigError, match="cannot be"):
            SyntheticSite(**wrong)  # type: ignore[arg-type]
    assert SyntheticSite() == EARTH_LIKE
