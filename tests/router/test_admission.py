"""How many samples engines hold for later steps' sake, and when reserved ones sleep: the numbers, by hand where they are simple."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest

from scavenger.policy import admission
from scavenger.policy.admission import AdmissionView, NextStep, Pace
from scavenger.policy.forecast.speed import SpeedCurve

#: 10 ms a decode step, and 0.1 ms more for each sample.
CURVE = SpeedCurve(10e-3, 0.1e-3, 0.0)
PACE = Pace(tokens=1_000_000.0, longest=8_000.0, context=1_000.0, curve=CURVE, busy_s=0.0)
VIEW = AdmissionView(ahead=1, max_batch=256, harvested=4, reserved=0, pace=PACE)


def test_a_step_takes_as_long_as_its_tokens_its_longest_completion_or_the_trainer() -> None:
    """At 100 samples a decode step takes 20 ms: 5,000 tokens a second and engine, 50 a second and sample."""
    assert admission.generated_s(VIEW, PACE, 100) == pytest.approx(1_000_000 / (4 * 5_000))
    assert admission.longest_s(VIEW, PACE, 100) == pytest.approx(8_000 / 50 / 1.5)
    assert admission.step_s(VIEW, replace(PACE, busy_s=500.0), 100) == 500.0


def test_reserved_engines_generate_in_what_the_trainer_leaves_of_a_step() -> None:
    """Two harvested and two reserved engines of 5,000 tokens a second; the trainer has the reserved ones' GPUs for 30 s of each step."""
    pace = replace(PACE, busy_s=30.0)
    view = replace(VIEW, harvested=2, reserved=2, pace=pace)
    took = admission.generated_s(view, pace, 100)
    assert took > 30
    assert 2 * 5_000 * took + 2 * 5_000 * (took - 30) == pytest.approx(1_000_000)
    many = replace(view, harvested=8)
    assert admission.generated_s(many, pace, 100) == pytest.approx(25.0), (
        "the harvested ones are done within it"
    )


def test_no_engine_is_filled_so_far_that_a_long_completion_comes_too_late() -> None:
    found = admission.limit(VIEW)
    predicted = {batch: admission.step_s(VIEW, PACE, batch) for batch in range(1, 257)}
    assert predicted[found.limit] <= min(predicted.values()) * (1 + admission.NEAR)
    assert predicted[256] > 1.5 * predicted[found.limit], "a full engine would make the step far longer"
    assert f"{found.limit} samples an engine" in found.reason
    assert found.inputs["longest_s"] == pytest.approx(admission.longest_s(VIEW, PACE, found.limit))


def test_with_more_steps_in_advance_engines_are_fuller_and_steps_no_longer() -> None:
    views = [replace(VIEW, ahead=ahead) for ahead in (1, 2, 4, 8)]
    limits = [admission.limit(view).limit for view in views]
    steps = [admission.limit(view).inputs["step_s"] for view in views]
    assert limits == sorted(limits)
    assert limits[0] < limits[-1]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < 0.7 * steps[0]


def test_nothing_is_begun_earlier_than_it_is_trained() -> None:
    """The trainer needs 400 s a step: a few samples an engine are in time, and are of newer weights than many would be."""
    slow = admission.limit(replace(VIEW, pace=replace(PACE, busy_s=400.0)))
    assert slow.limit < admission.limit(VIEW).limit / 2
    assert "by training" in slow.reason
    assert slow.inputs["generated_s"] <= 400 * (1 + admission.NEAR)


def test_without_a_forecast_every_slot_is_used() -> None:
    found = admission.limit(replace(VIEW, pace=None))
    assert (found.limit, found.reason) == (256, "nothing is forecast yet: every slot is used")
    assert admission.limit(replace(VIEW, harvested=0)).limit == 256


window = functools.partial(admission.window, sleep_s=2.0, wake_s=3.0)


def test_reserved_engines_sleep_once_the_trainer_would_not_wait() -> None:
    assert not window(awake=True, rest_s=60.0, ready_s=20.0, left=3).close
    found = window(awake=True, rest_s=21.0, ready_s=20.0, left=3)
    assert found.close
    assert "it would not wait" in found.reason
    assert window(awake=True, rest_s=0.0, ready_s=0.0, left=0).close


def test_whole_groups_without_rewards_are_no_work_and_are_waited_for() -> None:
    found = window(awake=True, rest_s=60.0, ready_s=0.0, left=0, unscored=5)
    assert not found.close
    assert "the rewards of 5 groups are 60.0 s from done" in found.reason
    assert found.inputs["unscored"] == 5.0
    assert window(awake=True, rest_s=1.0, ready_s=0.0, left=0, unscored=5).close, "they are about to come"


def test_reserved_engines_wake_again_only_for_more_than_both_changes_cost() -> None:
    assert window(awake=False, rest_s=25.0, ready_s=20.0, left=3).close
    assert not window(awake=False, rest_s=30.0, ready_s=20.0, left=3).close


def test_the_window_is_asked_about_again_before_its_answer_may_change() -> None:
    far = window(awake=True, rest_s=1_000.0, ready_s=0.0, left=3)
    near = window(awake=True, rest_s=5.0, ready_s=0.0, left=3)
    assert admission.AGAIN_LEAST_S <= near.again_s < far.again_s <= admission.AGAIN_MOST_S
    assert math.isfinite(far.inputs["rest_s"])


def following(
    *, left: int = 40, elsewhere: int = 0, rest_s: float = 60.0, kept_open: bool = False
) -> NextStep:
    return NextStep(left=left, elsewhere=elsewhere, rest_s=rest_s, train_s=30.0, kept_open=kept_open)


def test_reserved_engines_generate_on_where_the_trainer_would_soon_wait_for_the_next_step() -> None:
    done = functools.partial(window, awake=True, rest_s=0.0, ready_s=30.0, left=0)
    found = done(following=following())
    assert (found.close, found.keep_open) == (False, True)
    assert "40 samples of the next step are 60.0 s from done" in found.reason
    assert found.inputs["next_rest_s"] == 60.0
    assert done(following=following(rest_s=31.0)).close, "its rest is done while this one is trained"
    assert done(following=None).close


def test_once_they_go_on_they_do_so_until_harvested_engines_have_the_rest() -> None:
    done = functools.partial(window, awake=True, rest_s=0.0, ready_s=30.0, left=0)
    assert done(following=following(rest_s=20.0, elsewhere=5)).close, "for these alone it is not begun"
    found = done(following=following(rest_s=20.0, elsewhere=5, kept_open=True))
    assert (found.keep_open, found.again_s) == (True, admission.AGAIN_LEAST_S)
    assert done(following=following(rest_s=20.0, kept_open=True)).close


@pytest.mark.parametrize(
    ("ahead", "harvested", "reserved", "may"),
    [(4, 2, 8, True), (16, 7, 8, True), (3, 2, 8, False), (4, 8, 8, False), (4, 0, 8, False)],
)
def test_the_next_step_is_waited_for_where_reserved_engines_are_most_of_the_run(
    ahead: int, harvested: int, reserved: int, may: bool
) -> None:
    assert admission.may_keep_open(ahead, harvested, reserved) is may


def test_engines_that_sleep_are_not_woken_for_the_next_step() -> None:
    found = window(awake=False, rest_s=0.0, ready_s=30.0, left=0, following=following())
    assert (found.close, found.keep_open) == (True, False)
