"""Moves against brute force on small fleets; that they never go round in circles; lease bounds and tails by hand."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as again

from scavenger.policy import migration
from scavenger.policy.forecast.speed import SpeedCurve
from scavenger.policy.migration import EngineLoad, Price, Running, Shift, drains, merge, rebalance

LINE = SpeedCurve(7e-3, 2e-5, 6e-8)
PRICE = Price(token_s=5e-5, move_s=0.1, margin=0.1)


def load(
    worker_id: int, *rests: float, have: float = 1000, limit: int = 64, node: str = "", **more: bool
) -> EngineLoad:
    samples = tuple(Running(worker_id * 1000 + i, have, rest) for i, rest in enumerate(rests))
    return EngineLoad(worker_id, node or f"n{worker_id}", LINE, limit, samples, **more)


def after(loads: list[EngineLoad], shifts: list[Shift]) -> list[EngineLoad]:
    held = {one.worker_id: {s.sample_id: s for s in one.samples} for one in loads}
    for shift in shifts:
        sample = held[shift.source].pop(shift.sample_id)
        held[shift.target][shift.sample_id] = again(sample, left=sample.left | {shift.source})
    return [replace(one, samples=tuple(held[one.worker_id].values())) for one in loads]


def costs(loads: list[EngineLoad], shifts: list[Shift]) -> dict[int, float]:
    samples = {s.sample_id: s for one in loads for s in one.samples}
    spent = {one.worker_id: 0.0 for one in loads}
    for shift in shifts:
        spent[shift.target] += PRICE.of(samples[shift.sample_id])
    return spent


# ---------------------------------------------------------------- rebalancing


def test_an_idle_engine_takes_from_the_one_that_is_done_last() -> None:
    loads = [load(1, *[4000.0] * 20), load(2)]
    shifts = rebalance(loads, PRICE)
    assert 7 <= len(shifts) <= 11
    assert {(s.source, s.target) for s in shifts} == {(1, 2)}
    before, now = drains(loads), drains(after(loads, shifts))
    assert max(now[w] + costs(loads, shifts)[w] for w in now) < 0.85 * max(before.values())
    assert "is done in" in shifts[0].reason


def test_even_loads_are_left_alone() -> None:
    assert (
        rebalance([load(1, 4000, 3000, 500), load(2, 4000, 2900, 600), load(3, 3900, 3100, 500)], PRICE) == []
    )


def test_a_gain_below_what_the_move_costs_is_no_reason_to_move() -> None:
    loads = [load(1, 300, 300, have=100), load(2)]
    assert rebalance(loads, replace(PRICE, margin=0.0, move_s=0.0, token_s=0.0))
    assert rebalance(loads, replace(PRICE, move_s=5.0)) == []


def test_what_is_done_before_the_step_can_end_is_not_hurried() -> None:
    loads = [load(1, *[4000.0] * 20), load(2)]
    end = max(drains(loads).values())
    assert rebalance(loads, PRICE, critical_s=end) == []
    fewer = rebalance(loads, PRICE, critical_s=0.87 * end)
    assert 0 < len(fewer) < len(rebalance(loads, PRICE))


def test_fixed_samples_full_engines_and_closed_ones_are_respected() -> None:
    many = [4000.0] * 20
    fixed = load(1, *many)
    fixed = replace(fixed, samples=tuple(again(s, fixed=True) for s in fixed.samples))
    assert rebalance([fixed, load(2)], PRICE) == []
    assert rebalance([load(1, *many), load(2, 10, 10, limit=2)], PRICE) == []
    assert rebalance([load(1, *many), load(2, takes=False)], PRICE) == []
    assert rebalance([load(1, *many, gives=False), load(2)], PRICE) == []
    two = [load(1, *many), load(3, *many), load(2), load(4)]
    assert {s.source for s in rebalance(two, PRICE)} == {1, 3}
    assert {s.source for s in rebalance(two, PRICE, most=3)} == {1}


def test_nothing_moves_into_a_cache_that_is_full() -> None:
    many = [4000.0] * 20
    each = 1000 + 4000 / 2
    assert len(rebalance([load(1, *many), replace(load(2), cache=6 * each)], PRICE)) == 6
    assert rebalance([load(1, *many), replace(load(2, 4000), cache=1.5 * each)], PRICE) == []
    long, full = (
        load(1, 9000, takes=False),
        replace(load(2, 800, 900, gives=False), cache=4500.0),
    )  # 2,850 held: one more of 1,350 fits
    end = max(drains([long]).values())
    for tail, emptied in (([load(3, 700)], (3,)), ([load(3, 700, 700)], ()), ([load(3, 3000)], ())):
        assert merge([long, full, *tail], PRICE, end, worth_s=30).emptied == emptied


def test_a_thousand_engines_that_fit_nowhere_are_not_all_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fits_nowhere(source: Any, *_: object) -> None:
        asked.append(source.load.worker_id)

    monkeypatch.setattr(migration, "_fit", fits_nowhere)
    assert merge([load(i, 4000) for i in range(1, 101)], PRICE, 1000.0, worth_s=30).emptied == ()
    assert len(asked) == migration.REFUSALS


@pytest.mark.parametrize("seed", range(12))
def test_the_last_end_comes_within_a_fifth_of_the_best_of_all_assignments(seed: int) -> None:
    rng = random.Random(seed)
    loads = [load(1, *(float(rng.randint(200, 8000)) for _ in range(8))), load(2), load(3)]
    samples = loads[0].samples
    best = min(
        max(
            LINE.drain_s([(s.have, s.rest) for s, w in zip(samples, choice, strict=True) if w == worker])
            + sum(PRICE.of(s) for s, w in zip(samples, choice, strict=True) if w == worker != 1)
            for worker in (1, 2, 3)
        )
        for choice in itertools.product((1, 2, 3), repeat=8)
    )
    shifts = rebalance(loads, PRICE)
    ends, paid = drains(after(loads, shifts)), costs(loads, shifts)
    assert max(ends[w] + paid[w] for w in ends) <= 1.2 * best + 0.1 * max(drains(loads).values())


@st.composite
def fleets(draw: st.DrawFn) -> list[EngineLoad]:
    count = draw(st.integers(2, 6))
    rests = st.lists(st.floats(1, 9000), max_size=12)
    return [load(i, *draw(rests), have=draw(st.floats(10, 9000))) for i in range(1, count + 1)]


@settings(max_examples=100, deadline=None)
@given(fleets())
def test_moves_come_to_rest_and_the_ends_only_fall(loads: list[EngineLoad]) -> None:
    """Asked again and again with nothing else changing: soon nothing moves, and each answer lowers the sorted ends."""
    for _ in range(20):
        shifts = rebalance(loads, PRICE)
        if not shifts:
            return
        before = sorted(drains(loads).values(), reverse=True)
        loads = after(loads, shifts)
        assert sorted(drains(loads).values(), reverse=True) < before
    raise AssertionError("it never comes to rest")


@settings(max_examples=60, deadline=None)
@given(fleets(), st.integers(0, 10_000), st.floats(0, 0.5))
def test_whatever_the_forecasts_do_no_sample_goes_back(
    loads: list[EngineLoad], seed: int, error: float
) -> None:
    """Forecasts that err anew at each look, by up to a half."""
    rng = random.Random(seed)
    visited = {s.sample_id: {one.worker_id} for one in loads for s in one.samples}
    for _ in range(10):
        seen = [
            replace(
                one,
                samples=tuple(again(s, rest=s.rest * rng.uniform(1 - error, 1 + error)) for s in one.samples),
            )
            for one in loads
        ]
        shifts = rebalance(seen, PRICE)
        for shift in shifts:
            assert shift.target not in visited[shift.sample_id]
            visited[shift.sample_id].add(shift.target)
        loads = after(loads, shifts)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 5), st.integers(1, 12))
def test_engines_that_are_level_stay_so_while_forecasts_err_by_less_than_half_the_margin(
    seed: int, engines: int, count: int
) -> None:
    rng = random.Random(seed)
    loads = [load(i, *(4000.0 + 10 * j for j in range(count))) for i in range(1, engines + 1)]
    for _ in range(5):
        seen = [
            replace(
                one, samples=tuple(again(s, rest=s.rest * rng.uniform(0.975, 1.025)) for s in one.samples)
            )
            for one in loads
        ]
        assert rebalance(seen, PRICE) == []


# ---------------------------------------------------------------- tails


def test_tails_are_merged_onto_few_engines_that_are_done_in_time() -> None:
    loads = [load(1, 9000), load(2, 800, 900), load(3, 1000), load(4, 700)]
    end = max(drains(loads).values())
    found = merge(loads, PRICE, end, worth_s=30)
    assert set(found.emptied) == {3, 4}
    assert {shift.target for shift in found.shifts} == {2}  # the longest sample has its engine to itself
    left = after(loads, list(found.shifts))
    assert all(not one.samples for one in left if one.worker_id in found.emptied)


def test_what_would_lengthen_the_step_stays() -> None:
    loads = [load(1, 9000), load(2, 8900)]
    found = merge(loads, PRICE, max(drains(loads).values()), worth_s=30)
    assert found.emptied == ()
    assert found.shifts == ()


def test_nothing_is_merged_for_less_time_than_an_engine_takes_to_start() -> None:
    loads = [load(1, 3000), load(2, 200)]
    assert merge(loads, PRICE, 20.0, worth_s=60).emptied == ()
    assert "20.0 s are left" in merge(loads, PRICE, 20.0, worth_s=60).reason


def test_the_node_with_the_fewest_samples_is_freed_whole() -> None:
    loads = [
        load(1, 9000, node="a"),
        load(2, 500, 500, node="a"),
        load(3, 600, node="b"),
        load(4, 600, node="b"),
    ]
    found = merge(loads, PRICE, max(drains(loads).values()), worth_s=30)
    assert {3, 4} <= set(found.emptied)


@settings(max_examples=120, deadline=None)
@given(fleets(), st.floats(1, 3))
def test_merging_ends_within_the_step_and_what_was_freed_stays_free(
    loads: list[EngineLoad], slack: float
) -> None:
    end = slack * max(drains(loads).values(), default=0.0)
    found = merge(loads, PRICE, end, worth_s=0.0)
    left = after(loads, list(found.shifts))
    ends, paid = drains(left), costs(loads, list(found.shifts))
    for one in left:
        if any(shift.target == one.worker_id for shift in found.shifts):
            assert ends[one.worker_id] + paid[one.worker_id] <= 0.9 * end + 1e-9
        if one.worker_id in found.emptied:
            assert not one.samples
    assert len({shift.sample_id for shift in found.shifts}) == len(found.shifts)
    closed = [replace(one, takes=one.worker_id not in found.emptied) for one in left]
    assert not {s.target for s in rebalance(closed, PRICE)} & set(found.emptied)
