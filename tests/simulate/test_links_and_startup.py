"""Shares of an interface, what is to be pulled, and cold starts, against hand-computed cases. Pulls in time: `test_network`."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scavenger.simulate.clock import Streams
from scavenger.simulate.network import fair_rates
from scavenger.simulate.presets import COLD_CACHE, WARM_CACHE
from scavenger.simulate.startup import ColdStart, Deltas, StartupPhase, pull_cost


def test_fair_rates_give_small_caps_all_they_want_and_share_the_rest() -> None:
    assert fair_rates({"a": 1.0, "b": 10.0, "c": 10.0}, 9.0) == {"a": 1.0, "b": 4.0, "c": 4.0}
    assert fair_rates({"a": 1.0, "b": 2.0}, 9.0) == {"a": 1.0, "b": 2.0}
    assert fair_rates({}, 9.0) == {}


def test_the_bytes_to_pull_by_what_is_held() -> None:
    deltas = Deltas(share=0.1, depth=3)

    def nbytes(version: int, held: int | None, deltas: Deltas | None) -> float:
        found, apply_s = pull_cost(1000.0, version, held, deltas, link_bytes_s=10.0)
        assert apply_s == 0.0
        return found

    assert nbytes(7, None, deltas) == 1000.0
    assert nbytes(7, 6, None) == 1000.0
    assert nbytes(7, 6, deltas) == pytest.approx(100.0)
    assert nbytes(7, 4, deltas) == pytest.approx(300.0)
    assert nbytes(7, 3, deltas) == 1000.0  # deeper than the source keeps
    assert nbytes(7, 5, Deltas(share=0.8, depth=3)) == 1000.0  # the chain would be longer
    assert nbytes(7, 7, deltas) == 0.0
    with pytest.raises(ValueError, match="only grow"):
        nbytes(7, 8, deltas)


def test_deltas_that_cores_apply_slowly_are_pulled_over_slow_links_only() -> None:
    deltas = Deltas(share=0.1, depth=3, apply_bytes_s=20.0)
    assert pull_cost(1000.0, 7, 5, deltas, link_bytes_s=5.0) == (pytest.approx(200.0), 100.0)
    assert pull_cost(1000.0, 7, 5, deltas, link_bytes_s=50.0) == (1000.0, 0.0)
    with pytest.raises(ValueError, match="bytes a second"):
        Deltas(share=0.1, depth=1, apply_bytes_s=0.0)
    with pytest.raises(ValueError, match="deltas"):
        Deltas(share=0.0, depth=1)


def test_cold_starts_have_the_stated_medians_and_means_and_load_by_size() -> None:
    start = ColdStart(
        StartupPhase(16.0, 0.4),
        StartupPhase(10.0),
        StartupPhase(30.0, 0.3),
        load_bytes_s=1e9,
        load_spread=0.2,
    )
    stream = Streams(3).stream("starts")
    drawn = [start.draw(stream, 16e9) for _ in range(4000)]
    assert np.median([one.container_s for one in drawn]) == pytest.approx(16.0, rel=0.03)
    assert np.std(np.log([one.compile_s for one in drawn])) == pytest.approx(0.3, rel=0.05)
    assert {one.import_s for one in drawn} == {10.0}
    assert np.median([one.load_s for one in drawn]) == pytest.approx(16.0, rel=0.03)
    assert np.mean([one.total_s for one in drawn]) == pytest.approx(start.mean_s(16e9), rel=0.02)
    assert start.mean_s(16e9) == pytest.approx(
        16 * math.exp(0.08) + 10 + 30 * math.exp(0.045) + 16 * math.exp(0.02)
    )
    assert start.draw(stream, 0.0).load_s == 0.0


def test_a_phase_without_spread_shifts_no_other_draw() -> None:
    wide, narrow = (
        ColdStart(StartupPhase(1, 0.5), StartupPhase(1, 0.5), StartupPhase(1), 1.0),
        ColdStart(StartupPhase(1), StartupPhase(1, 0.5), StartupPhase(1), 1.0),
    )
    drawn = [start.draw(Streams(1).stream("start", "node-1"), 1.0) for start in (wide, narrow)]
    assert drawn[0].import_s == drawn[1].import_s
    assert drawn[0].container_s != drawn[1].container_s


def test_an_empty_compile_cache_costs_more() -> None:
    assert WARM_CACHE.mean_s(16e9) + 30 < COLD_CACHE.mean_s(16e9) < 300
