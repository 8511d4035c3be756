"""Speculation in simulation: acceptance as measured, drafts as long as the live engine's, passes as long as the formula says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from rollout.engines.speculation.length import MARGIN as LIVE_MARGIN
from rollout.engines.speculation.length import PassTime, draft_length
from rollout.engines.speculation.speculator import MAX_DRAFT
from scavenger.errors import ConfigError
from scavenger.simulate import speculation
from scavenger.simulate.decode import DecodeCurve, Stretch
from scavenger.simulate.driver import simulate
from scavenger.simulate.policies import SIMULATED_POLICIES
from scavenger.simulate.sequences import EngineBatch, SimulatedRequest
from scavenger.simulate.speculation import (
    CHECKED,
    CURVES,
    NO_DRAFT,
    SEER,
    TEXT,
    AcceptanceCurve,
    Draft,
    choose,
    made,
)
from tests.simulate.digest import ENGINE, small

ONE_GPU = replace(ENGINE, gpus=1)


def test_a_curve_says_what_was_measured_and_lies_between() -> None:
    assert [CHECKED.tokens(n, 16) for n in (0, 1, 15)] == pytest.approx([1.10, 7.84, 9.28])
    assert [TEXT.tokens(n, 16) for n in (0, 1, 15)] == pytest.approx([1.09, 1.15, 1.42])
    assert [SEER.tokens(n, 8) for n in (0, 15)] == pytest.approx([1.70, 2.53])
    assert CHECKED.longest(0.5) == pytest.approx((1.10 + 7.84) / 2)
    assert CHECKED.longest(99) == 9.28
    for curve in CURVES.values():
        assert curve.tokens(3, 0) == 1.0
        assert curve.tokens(3, 1) == pytest.approx(1 + curve.chance(3))
    assert CHECKED.draft == MAX_DRAFT


def test_tokens_of_a_verification_are_those_of_the_paper() -> None:
    """Leviathan et al., arXiv 2211.17192, eq. 1: (1 - p^(d + 1)) / (1 - p)."""
    for chance in (0.0, 0.3, 0.8):
        for draft in (0, 1, 5):
            assert made(chance, draft) == pytest.approx((1 - chance ** (draft + 1)) / (1 - chance))
    assert made(1.0, 4) == 5.0


@pytest.mark.parametrize(
    ("points", "draft"),
    [((), 16), (((1, 2.0), (0, 1.0)), 16), (((0, 0.9),), 16), (((0, 6.0),), 4), (((0, 1.0),), 0)],
)
def test_a_curve_that_cannot_be_is_refused(points: Any, draft: int) -> None:
    with pytest.raises(ConfigError, match="acceptance 'odd'"):
        AcceptanceCurve("odd", points, draft)


class Passes:
    """What `draft_length` asks of the live `PassTime`: seconds of a pass over so many positions."""

    def __init__(self, rows: int, curves: list[DecodeCurve], context: float) -> None:
        self._seconds = {rows * (1 + draft): one.at(context) for draft, one in enumerate(curves)}

    def of(self, positions: int) -> float:
        return self._seconds[positions]


@pytest.mark.parametrize("curve", CURVES.values(), ids=lambda one: one.name)
@pytest.mark.parametrize("rows", [1, 4, 32, 128, 256])
def test_a_draft_is_as_long_as_the_live_engine_s(curve: AcceptanceCurve, rows: int) -> None:
    for siblings in (0.0, 0.4, 1.0, 7.0):
        for context in (rows * 600.0, rows * 8000.0):
            passes = [ONE_GPU.pass_curve(rows, draft) for draft in range(curve.draft + 1)]
            mine = choose(curve, siblings, rows, [one.at(context) for one in passes])
            chances = [[curve.chance(siblings)] * curve.draft] * rows
            theirs = draft_length(chances, rows, cast(PassTime, Passes(rows, passes, context)))
            rates = [
                tokens / passes[length].at(context)
                for length, tokens in ((mine.length, rows * mine.tokens), (theirs.length, theirs.expected))
            ]
            assert bool(mine.length) == bool(theirs.length)
            assert rates[0] == pytest.approx(rates[1], rel=1e-9)
    assert speculation.MARGIN == LIVE_MARGIN


def test_a_nearly_empty_engine_drafts_deep_and_a_full_one_with_poor_drafts_not_at_all() -> None:
    checked, text = (replace(ONE_GPU, acceptance=curve) for curve in (CHECKED, TEXT))
    assert checked.token_curve(1, 2000.0, 7.0)[1].length == 16
    assert text.token_curve(256, 256 * 600.0, 1.0) == (ONE_GPU.pass_curve(256, 0), NO_DRAFT)
    full = checked.token_curve(256, 256 * 600.0, 7.0)[1]
    assert full.length < 16, "positions are computed, and cost"


def test_the_last_of_a_group_takes_as_long_as_its_passes() -> None:
    spec = replace(ONE_GPU, acceptance=CHECKED)
    batch = EngineBatch(spec)
    batch.add([SimulatedRequest(key, 7, 512, 0, 100) for key in range(15)], 0.0)
    while batch.size:
        batch.advance(batch.next_time())
    assert batch.passes == 0, "no sibling was done"
    start = end = 50.0
    batch.add([SimulatedRequest(99, 7, 512, 0, 4000)], start)
    while batch.size:
        end = batch.next_time()
        batch.advance(end)
    one, tokens = ONE_GPU.pass_curve(1, 16), 9.28
    each = DecodeCurve(
        (one.overhead + 57e-6) / tokens,
        one.memory / tokens,
        one.memory_slope / tokens,
        one.compute / tokens,
        one.compute_slope / tokens,
    )
    expected = ONE_GPU.prefill_s(512) + Stretch(each, 1, 512).seconds(4000)
    assert end - start == pytest.approx(expected, rel=1e-6)
    assert batch.verified_tokens / batch.passes == pytest.approx(9.28)


def test_siblings_of_another_engine_are_drafts_from_when_it_is_told() -> None:
    spec = replace(ONE_GPU, acceptance=CHECKED)
    ends = {}
    for told_at in (0.0, 5.0, 1e9):
        batch = EngineBatch(spec)
        batch.add([SimulatedRequest(0, 7, 512, 0, 4000)], 0.0)
        while batch.size:
            at = min(batch.next_time(), told_at)
            if at == told_at and batch.size:
                batch.sibling_ended(7, at)
                told_at = 1e9
            batch.advance(at)
        ends[len(ends)] = at
    quick, half, slow = ends.values()
    ratio = ONE_GPU.token_curve(1, 2000.0, 0.0)[0].at(2000.0) / spec.token_curve(1, 2000.0, 1.0)[0].at(2000.0)
    assert slow / quick == pytest.approx(ratio, rel=0.05)
    assert half - 5.0 == pytest.approx((slow - 5.0) / ratio, rel=0.05)


def test_siblings_of_another_group_or_of_which_nothing_is_told_are_no_drafts() -> None:
    spec = replace(ONE_GPU, acceptance=CHECKED)
    plain, other = EngineBatch(ONE_GPU), EngineBatch(spec)
    other.add([SimulatedRequest(0, 1, 512, 0, 50)], 0.0)
    while other.size:
        other.advance(other.next_time())
    ends = []
    for batch in (plain, other):
        batch.add([SimulatedRequest(5, 2, 512, 0, 500)], 10.0)
        while batch.size:
            at = batch.next_time()
            batch.advance(at)
        ends.append(at)
    assert ends[1] == pytest.approx(ends[0])


def test_a_run_that_speculates_trains_the_same_tokens_and_no_slower() -> None:
    scenario = small(3, 2)
    scenario = replace(scenario, reserved=ONE_GPU, harvested=ONE_GPU)
    plain, drafted = (
        simulate(one, SIMULATED_POLICIES["ours"]) for one in (scenario, scenario.speculating(CHECKED))
    )
    assert [step.tokens for step in drafted.steps] == [step.tokens for step in plain.steps]
    assert drafted.steps[-1].end_s < 0.98 * plain.steps[-1].end_s


def test_a_setting_that_no_live_run_has_is_refused() -> None:
    scenario = small(3, 2)
    with pytest.raises(ConfigError, match="speculation on engines of 2 GPUs"):
        replace(scenario, reserved=replace(ENGINE, gpus=2), harvested=replace(ENGINE, gpus=2)).speculating(
            TEXT
        )
    with pytest.raises(ConfigError, match="speculate otherwise"):
        replace(scenario, reserved=replace(ONE_GPU, acceptance=TEXT), harvested=ONE_GPU)


def test_no_draft_makes_one_token_a_pass() -> None:
    assert Draft(0, 1.0) == NO_DRAFT
