"""Samples served with so many places: list scheduling, sums over buckets, and which limit ends a step soonest."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.policy import placement
from scavenger.policy.forecast import service
from scavenger.policy.forecast.service import (
    Outstanding,
    Samples,
    arrivals,
    columns,
    profile,
    rest_of,
    served,
    thinned,
)
from scavenger.policy.forecast.speed import SpeedCurve
from scavenger.policy.forecast.step import NEVER, Costs, EnginePool, Situation, StepModel
from scavenger.policy.seed_window import ServingOrder, serve, solve

SAMPLES = st.lists(
    st.builds(Outstanding, st.integers(0, 500), st.integers(1, 2000), st.integers(0, 5)),
    min_size=1,
    max_size=30,
)


def groups(seed: int, count: int = 24, each: int = 4) -> tuple[Outstanding, ...]:
    draw = random.Random(seed)
    return tuple(
        Outstanding(200.0, min(8000.0, draw.lognormvariate(8.3, 0.6)), group)
        for group in range(count)
        for _ in range(each)
    )


def rows(samples: Samples) -> list[Outstanding]:
    keys = [samples.groups[at] for at in samples.group.tolist()]
    return [Outstanding(*one) for one in zip(samples.have.tolist(), samples.rest.tolist(), keys, strict=True)]


@settings(deadline=None)
@given(SAMPLES, st.integers(1, 40))
def test_no_more_run_than_there_are_places_and_none_is_left_empty(
    samples: list[Outstanding], places: int
) -> None:
    spans = served(columns(samples), places)
    for at in set(spans.start.tolist()):
        running = int(((spans.start <= at) & (at < spans.end)).sum())
        waiting = int((spans.start > at).sum())
        assert running == places or (running < places and not waiting)
    assert (spans.end - spans.start).tolist() == pytest.approx([float(sample.rest) for sample in samples])


@settings(deadline=None)
@given(SAMPLES, st.integers(1, 40))
def test_buckets_hold_every_token_and_its_context(samples: list[Outstanding], places: int) -> None:
    them = columns(samples)
    found = profile(served(them, places), them.by_group({}))
    tokens = [width * count for width, count in zip(found.width, found.count, strict=True)]
    contexts = [mean * some for mean, some in zip(found.mean, tokens, strict=True)]
    assert sum(tokens) == pytest.approx(sum(sample.rest for sample in samples))
    assert sum(contexts) == pytest.approx(
        sum(sample.rest * (sample.have + sample.rest / 2) for sample in samples), rel=1e-6
    )
    assert len(found.whole) == len({sample.group for sample in samples})


@settings(deadline=None)
@given(
    st.lists(
        st.builds(Outstanding, st.floats(0, 5e4), st.floats(0, 2e4), st.integers(0, 5)),
        min_size=1,
        max_size=60,
    )
)
def test_where_all_begin_at_once_the_sums_are_the_same_to_the_last_bit(samples: list[Outstanding]) -> None:
    spans = served(columns(samples), NEVER)
    by_end = spans.at(spans.end.argsort(kind="stable"))
    ends = np.array(service._bucket_ends(by_end.end.tolist()))
    quick, whole = service._spent_at_once(spans, by_end, ends), service._spent(spans, by_end, ends)
    assert [column.tolist() for column in quick] == [column.tolist() for column in whole]


@settings(deadline=None)
@given(SAMPLES, st.integers(1, 10), st.floats(0, 3000))
def test_what_is_left_and_what_is_done_are_all(samples: list[Outstanding], places: int, at: float) -> None:
    them = columns(samples)
    spans = served(them, places)
    left, done = rest_of(spans, at, them.groups)
    rest = rows(left)
    whole = sum(sample.have + sample.rest for sample in samples)
    assert sum(one.have + one.rest for one in rest) + done.sum() == pytest.approx(whole)
    running = int(((spans.start < at) & (at < spans.end)).sum())
    assert all(one.rest > 0 for one in rest[:running])


@settings(deadline=None)
@given(SAMPLES, st.integers(1, 40))
def test_a_group_is_whole_with_its_last_sample_and_has_all_its_tokens(
    samples: list[Outstanding], places: int
) -> None:
    them = columns(samples)
    spans = served(them, places)
    keys = [one.group for one in samples]
    ends = {
        key: max(end for end, group in zip(spans.end.tolist(), keys, strict=True) if group == key)
        for key in set(keys)
    }
    tokens = {key: 7.0 + sum(one.have + one.rest for one in samples if one.group == key) for key in set(keys)}
    found = profile(spans, them.by_group(dict.fromkeys(keys, 7.0) | {99: 1.0})).whole
    assert [at for at, _ in found] == sorted(ends.values())
    assert sorted(found) == [
        pytest.approx(one) for one in sorted((ends[key], tokens[key]) for key in set(keys))
    ]


def test_nothing_left_is_no_bucket() -> None:
    none = columns([])
    found = profile(served(none, 4), none.by_group({1: 5.0}))
    assert (list(found.ends), list(found.whole), len(found.spans)) == ([], [], 0)


def test_groups_arrive_between_the_ends_of_buckets() -> None:
    assert arrivals(
        [(50.0, 1.0), (100.0, 2.0), (150.0, 3.0), (900.0, 4.0)], [100.0, 200.0], [10.0, 30.0], 4.0
    ) == [(7.0, 1.0), (10.0, 2.0), (20.0, 3.0)]


def test_what_stands_for_all_has_their_spread() -> None:
    samples = groups(1, 128, 8)
    few, weight = thinned(columns(samples), 256)
    left = rows(few)
    assert weight == 4
    assert len(left) == 256
    assert weight * sum(one.rest for one in left) == pytest.approx(sum(one.rest for one in samples), rel=0.03)
    assert [one for one in samples if one in set(left)] == left  # in their order
    assert sorted({one.group for one in left}) == list(few.groups)
    all_, alone = thinned(columns(samples[:80]), 256)
    assert (rows(all_), alone) == (list(samples[:80]), 1.0)


CURVE = SpeedCurve(8e-3, 3e-6, 2.8e-8)


def site(harvested: float, samples: tuple[Outstanding, ...]) -> Situation:
    costs = Costs(prefill_s=6e-5, train_s=1e-4, round_groups=2, sleep_s=3.0, wake_s=3.0, finish_s=1.0)
    return Situation(EnginePool(CURVE, 1.0, 256), EnginePool(CURVE, harvested, 256), costs, samples)


def test_a_limit_that_holds_all_is_none() -> None:
    whole = site(3, groups(3))
    for window_s in (0.0, 20.0, 60.0, 1e9):
        assert StepModel(replace(whole, limit=96.0)).close_s(window_s) == pytest.approx(
            StepModel(whole).close_s(window_s), rel=0.02
        )


def large() -> Situation:
    """The published setting: 128 x 8 answers of up to 14,336 tokens on 4 reserved and 8 harvested engines."""
    draw = random.Random(1)
    samples = tuple(
        Outstanding(180.0, min(14336.0, draw.lognormvariate(9.25, 0.6)), group)
        for group in range(128)
        for _ in range(8)
    )
    costs = Costs(prefill_s=7e-5, train_s=2.7e-5, round_groups=8, sleep_s=3.0, wake_s=3.0, finish_s=2.0)
    return Situation(EnginePool(CURVE, 4.0, 256), EnginePool(CURVE, 8.0, 256), costs, samples)


def test_fewer_at_a_time_are_served_when_the_trainer_waits_for_the_first_groups() -> None:
    """Engines in plenty for a trainer that takes long: group after group ends the step sooner than all at once."""
    whole = large()
    found = serve([whole])
    assert found.limit < 0.9 * 1024 / 12
    assert solve(replace(whole, limit=found.limit)).step_s < 0.97 * solve(whole).step_s
    assert f"{found.limit:.0f} samples an engine" in found.reason


def test_what_was_decided_stays_where_nothing_is_clearly_better() -> None:
    whole = large()
    found = serve([whole])
    assert serve([whole], found) == found
    alone = replace(whole, harvested=EnginePool(CURVE, 0.0, 256), samples=groups(5, 4, 2))
    assert replace(serve([alone]), reason="") == ServingOrder()
    assert ServingOrder().limit == NEVER


def test_in_turn_keeps_few_groups_open() -> None:
    jobs = [
        placement.QueuedSample(10 * group + index, group, 100.0, 1000.0 + index)
        for group in (1, 2, 3)
        for index in range(3)
    ]
    moved = placement.QueuedSample(39, 3, 900.0, 100.0, moved=True)
    ranked = placement.in_turn([*jobs, moved], {1: 5000.0, 2: 2000.0, 3: 3000.0})
    assert [one.job.sample_id for one in ranked] == [39, 22, 21, 20, 32, 31, 30, 12, 11, 10]
    assert ranked[0].why == "moved"


def test_a_cache_lets_fewer_run() -> None:
    whole = site(1, groups(6))
    small = replace(
        whole, reserved=EnginePool(CURVE, 1.0, 256, 50_000.0), harvested=EnginePool(CURVE, 1.0, 256, 50_000.0)
    )
    assert solve(small).step_s > solve(whole).step_s
    assert EnginePool(CURVE, 1.0, 256, 50_000.0).capacity(5_000.0) == 10
    assert EnginePool(CURVE, 1.0, 256, 50_000.0).capacity(90_000.0) == 1
    assert EnginePool(CURVE, 1.0, 256).capacity(5_000.0) == 256
