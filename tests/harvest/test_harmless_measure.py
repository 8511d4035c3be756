"""What the harmlessness benchmark computes: idle slices, what of them was harvested, and the scale benchmark's own site."""

from __future__ import annotations

import math

import pytest

from benchmarks.harmless_measure import Stay, bounded, levels, long_slices, percentile, use
from benchmarks.harmless_neighbour import Round, report, slower
from benchmarks.scale import DEMAND, LIMITS, NOW, busy_site
from scavenger.harvest.decide.decide import decide
from tests.harvest.flat_limits import limits_with


def test_percentiles_are_values_that_were_seen() -> None:
    assert [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0.5, 0.99, 1.0)] == [2.0, 4.0, 4.0]
    assert math.isnan(percentile([], 0.5))


def test_a_job_that_never_begins_counts_with_what_it_has_waited_where_it_began_without_us() -> None:
    """Else an arm that keeps a job out for ever would have a smaller p99 than one that lets it wait."""
    here, out = {1: 0.5, 2: 0.7}, {3: 200.0, 4: 5.0}
    assert bounded(here, out, counted=(1, 3, 7)) == {1: 0.5, 3: 200.0}
    assert bounded(here, out) == {1: 0.5, 2: 0.7, 3: 200.0, 4: 5.0}
    assert percentile(list(bounded(here, out, (1, 2, 3)).values()), 0.99) == 200.0


def test_slices_are_stays_of_idle_slots_that_outlast_a_cold_start() -> None:
    busy = levels(
        [Stay("a", 1, 10.0, 20.0), Stay("a", 2, 15.0, 40.0), Stay("b", 2, 0.0, 50.0)], "a", 0.0, 50.0
    )
    assert busy == [(0.0, 10.0, 0), (10.0, 15.0, 1), (15.0, 20.0, 3), (20.0, 40.0, 2), (40.0, 50.0, 0)]
    assert sorted(long_slices(busy, 2, 5.0)) == [(0.0, 10.0), (0.0, 15.0), (40.0, 50.0), (40.0, 50.0)]
    assert sorted(long_slices(busy, 2, 10.0)) == [(0.0, 15.0)]


@pytest.mark.parametrize(
    ("ours", "share"),
    [
        ([], 0.0),
        ([Stay("a", 1, 0.0, 10.0)], 0.5),
        ([Stay("a", 2, 0.0, 10.0)], 1.0),
        ([Stay("a", 1, 10.0, 13.0)], 0.0),  # in a slice that ends within a cold start
        ([Stay("a", 1, 0.0, 5.0), Stay("a", 1, 5.0, 10.0)], 0.5),
    ],
)
def test_what_is_harvested_counts_up_to_the_long_slices(ours: list[Stay], share: float) -> None:
    other_users = [Stay("a", 2, 10.0, 11.0), Stay("a", 1, 11.0, 13.0), Stay("a", 2, 13.0, 20.0)]
    found = use(other_users, ours, ["a"], 2, 0.0, 20.0, cold_s=5.0)
    assert (found.total, found.other_users, found.idle_long) == (40.0, 18.0, 20.0)
    assert found.share == share


def test_a_large_site_is_decided_on_and_its_queue_claims_what_is_idle() -> None:
    view, ours = busy_site(200, 2000, seed=3)
    first = decide(view, DEMAND, ours, LIMITS, NOW)
    assert (first.actions, first.code) == ((), "other_users_pending")
    later = decide(
        view,
        DEMAND,
        ours,
        limits_with(LIMITS, could_start_since=tuple((job, NOW - 60) for job in first.could_start)),
        NOW,
    )
    assert {str(action.code) for action in later.actions} == {"voluntary_preemption"}


def test_a_neighbour_is_as_much_slower_as_its_median_round_beside_an_engine_in_each_turn() -> None:
    turns = [(0.0, 10.0, 14.0), (100.0, 110.0, 114.0), (200.0, 210.0, 214.0)]
    alone = [
        Round("cpu", at, took, 0.5)
        for at, took in ((0.0, 1.0), (1.0, 1.0), (2.0, 9.0), (100.0, 2.0), (103.5, 1.0))
    ]
    beside = [
        Round("cpu", at, took, 0.5)
        for at, took in ((9.5, 9.0), (10.0, 1.1), (12.0, 1.1), (13.5, 1.0), (110.0, 3.0))
    ]
    found = slower([*alone, *beside], turns, 4.0, lambda one: one.took_s)
    assert found == pytest.approx([0.1, 0.5]), (
        "rounds over a turn's edge, and a turn without any, say nothing"
    )
    assert "| CPU, CPU time | 10 | +0.0% | +0.0% | +0.0% |" in report([*alone, *beside], turns, 4.0)
