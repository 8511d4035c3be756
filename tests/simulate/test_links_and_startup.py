"""Shared interfaces, weight pulls and cold starts against hand-computed cases."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scavenger.simulate.engine import Streams
from scavenger.simulate.links import Flow, fair_rates, finish_times
from scavenger.simulate.presets import COLD_CACHE, WARM_CACHE
from scavenger.simulate.startup import ColdStart, Deltas, Phase, Pull, pull_bytes, pull_times


def test_fair_rates_give_small_caps_all_they_want_and_share_the_rest() -> None:
    assert fair_rates({"a": 1.0, "b": 10.0, "c": 10.0}, 9.0) == {"a": 1.0, "b": 4.0, "c": 4.0}
    assert fair_rates({"a": 1.0, "b": 2.0}, 9.0) == {"a": 1.0, "b": 2.0}
    assert fair_rates({}, 9.0) == {}


def test_flows_speed_up_when_others_end_and_slow_down_when_others_come() -> None:
    # alone at 10 for 1 s, two at 5 each for 3 s (b: 15 done), then a is alone with 15 left at 10
    assert finish_times([Flow("a", 0.0, 40.0, 20.0), Flow("b", 1.0, 15.0, 20.0)], 10.0) == {"b": 4.0, "a": pytest.approx(5.5)}
    assert finish_times([Flow("a", 3.0, 0.0, 20.0)], 10.0) == {"a": 3.0}
    assert finish_times([], 10.0) == {}


def test_without_a_relay_all_share_the_source_and_with_one_holders_serve_on() -> None:
    pulls = [Pull(f"e{i}", 0.0, 100.0) for i in range(4)]
    assert list(pull_times(pulls, 100.0, 50.0, relay=False).values()) == pytest.approx([4.0] * 4)
    # alike engines finish together: nobody holds a whole version before; a first one does
    staggered = [Pull("first", 0.0, 100.0), *(Pull(f"e{i}", 2.0, 100.0) for i in range(4))]
    plain, relayed = (pull_times(staggered, 100.0, 50.0, relay) for relay in (False, True))
    assert plain["first"] == relayed["first"] == pytest.approx(2.0)
    assert plain["e0"] == pytest.approx(2 + 4.0)
    assert relayed["e0"] == pytest.approx(2 + 100 / ((100 + 50) / 4))
    # six holders from the start: each puller is bound by its own interface
    assert pull_times(pulls, 100.0, 50.0, relay=True, holders=6)["e1"] == pytest.approx(2.0)


def test_what_the_source_sends_besides_takes_its_share() -> None:
    times = pull_times([Pull("e", 0.0, 100.0)], 100.0, 100.0, relay=False, other=[Flow("checkpoint", 0.0, 50.0, 100.0)])
    assert times == {"checkpoint": pytest.approx(1.0), "e": pytest.approx(1.5)}


def test_a_link_without_capacity_and_flows_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="no capacity"):
        finish_times([Flow("a", 0.0, 1.0, 1.0)], 0.0)
    with pytest.raises(ValueError, match="one name"):
        finish_times([Flow("a", 0.0, 1.0, 1.0)] * 2, 1.0)
    with pytest.raises(ValueError, match="flow a"):
        Flow("a", 0.0, -1.0, 1.0)


def test_the_bytes_to_pull_by_what_is_held() -> None:
    deltas = Deltas(share=0.1, depth=3)
    assert pull_bytes(1000.0, 7, None, deltas) == 1000.0
    assert pull_bytes(1000.0, 7, 6, None) == 1000.0
    assert pull_bytes(1000.0, 7, 6, deltas) == pytest.approx(100.0)
    assert pull_bytes(1000.0, 7, 4, deltas) == pytest.approx(300.0)
    assert pull_bytes(1000.0, 7, 3, deltas) == 1000.0  # deeper than the source keeps
    assert pull_bytes(1000.0, 7, 5, Deltas(share=0.8, depth=3)) == 1000.0  # the chain would be longer
    assert pull_bytes(1000.0, 7, 7, deltas) == 0.0
    with pytest.raises(ValueError, match="only grow"):
        pull_bytes(1000.0, 7, 8, deltas)
    with pytest.raises(ValueError, match="deltas"):
        Deltas(share=0.0, depth=1)


def test_cold_starts_have_the_stated_medians_and_means_and_load_by_size() -> None:
    start = ColdStart(Phase(16.0, 0.4), Phase(10.0), Phase(30.0, 0.3), load_bytes_s=1e9, load_spread=0.2)
    stream = Streams(3).stream("starts")
    drawn = [start.draw(stream, 16e9) for _ in range(4000)]
    assert np.median([one.container_s for one in drawn]) == pytest.approx(16.0, rel=0.03)
    assert np.std(np.log([one.compile_s for one in drawn])) == pytest.approx(0.3, rel=0.05)
    assert {one.import_s for one in drawn} == {10.0}
    assert np.median([one.load_s for one in drawn]) == pytest.approx(16.0, rel=0.03)
    assert np.mean([one.total_s for one in drawn]) == pytest.approx(start.mean_s(16e9), rel=0.02)
    assert start.mean_s(16e9) == pytest.approx(16 * math.exp(0.08) + 10 + 30 * math.exp(0.045) + 16 * math.exp(0.02))
    assert start.draw(stream, 0.0).load_s == 0.0


def test_a_phase_without_spread_shifts_no_other_draw() -> None:
    wide, narrow = ColdStart(Phase(1, 0.5), Phase(1, 0.5), Phase(1), 1.0), ColdStart(Phase(1), Phase(1, 0.5), Phase(1), 1.0)
    drawn = [start.draw(Streams(1).stream("start", "node-1"), 1.0) for start in (wide, narrow)]
    assert drawn[0].import_s == drawn[1].import_s
    assert drawn[0].container_s != drawn[1].container_s


def test_an_empty_compile_cache_costs_more() -> None:
    assert WARM_CACHE.mean_s(16e9) + 30 < COLD_CACHE.mean_s(16e9) < 300
