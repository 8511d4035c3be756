"""Bounded staleness in simulation: what is trained is what was asked for, step by step, and the simulator's trainer stays within k."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scavenger.policy import admission
from scavenger.simulate.clock import Streams
from scavenger.simulate.driver import simulate
from scavenger.simulate.policies import SIMULATED_POLICIES
from tests.simulate.digest import small

STEPS = 4


@pytest.mark.parametrize(("k", "on_new_version"), [(1, "switch"), (4, "switch"), (2, "finish")])
def test_the_lengths_that_a_step_trains_are_those_that_were_asked_for(k: int, on_new_version: str) -> None:
    """Neither are long completions dropped or put off, nor short ones favoured: each step trains its own, whole."""
    scenario = replace(
        small(3, STEPS),
        max_off_policy_steps=k,
        on_new_version="finish" if on_new_version == "finish" else "switch",
    )
    out = simulate(scenario, SIMULATED_POLICIES["ours"])
    assert [step.step for step in out.steps] == list(range(1, STEPS + 1))
    assert 0 < max(step.age_most for step in out.steps) <= k
    assert all(0 <= step.age_mean <= step.age_most for step in out.steps)
    streams = Streams(scenario.seed)
    for step in out.steps:
        asked = [
            length
            for prompt in range(scenario.prompts)
            for length in scenario.lengths.group(streams, step.step, prompt, scenario.samples)
        ]
        assert (step.samples, step.tokens) == (len(asked), sum(asked)), f"step {step.step}"


def test_a_kept_cache_saves_the_prefill_of_samples_that_meet_new_weights() -> None:
    """Live they meet them all the time; harvested engines alone, which do not sleep while a step trains."""
    scenario = replace(small(3, 4), max_off_policy_steps=2)
    recomputed, kept = (
        simulate(replace(scenario, kv=kv), SIMULATED_POLICIES["ours"]) for kv in ("recompute", "keep")
    )
    assert [step.tokens for step in kept.steps] == [step.tokens for step in recomputed.steps]
    assert kept.prefilled < 0.9 * recomputed.prefilled
    assert kept.seconds <= 1.02 * recomputed.seconds


@pytest.mark.parametrize("engines", [1, 4])
def test_reserved_engines_generate_while_rewards_are_waited_for(engines: int) -> None:
    """A first step with k = 1 and slow rewards: the reserved GPUs slept beside whole groups that had no rewards yet, as if those were
    work, while a harvested engine generated alone."""
    slow = replace(small(3, 2), reward_s=60.0, max_engines=engines)
    [alone, *_] = simulate(slow, SIMULATED_POLICIES["ours"]).steps
    assert (alone.age_mean, alone.age_most) == (0.0, 0), "on policy"
    first, second = simulate(replace(slow, max_off_policy_steps=1), SIMULATED_POLICIES["ours"]).steps
    assert first.wait_s < 0.5 * slow.reward_s, "its GPUs idle while they wait"
    assert first.seconds < 1.05 * alone.seconds
    assert second.seconds < 0.5 * alone.seconds, "it was generated meanwhile"


def test_what_is_late_is_trained_in_the_next_step_and_all_lengths_are_those_that_were_asked_for() -> None:
    """`on_late = "later"`: over a window of k steps the lengths that are trained are those that were asked for, long ones not left out."""
    scenario = replace(small(3, 6), max_off_policy_steps=4, on_late="later")
    out = simulate(scenario, SIMULATED_POLICIES["ours"])
    waited = simulate(replace(scenario, on_late="wait"), SIMULATED_POLICIES["ours"])
    each = scenario.prompts * scenario.samples
    streams = Streams(scenario.seed)
    asked = [
        sum(
            length
            for prompt in range(scenario.prompts)
            for length in scenario.lengths.group(streams, step.step, prompt, scenario.samples)
        )
        for step in out.steps
    ]
    first, second = out.steps[:2]
    late = each - first.samples
    assert 0 < late <= each // 2, "nothing was late: this shows nothing"
    assert second.samples == each + late
    assert first.tokens / first.samples < asked[0] / each, "what came late is long"
    assert first.tokens + second.tokens == asked[0] + asked[1]
    assert [step.samples for step in out.steps[2:]] == [each] * 4
    assert first.wait_s < waited.steps[0].wait_s
    assert sum(step.tokens for step in out.steps) == sum(asked) == sum(step.tokens for step in waited.steps)


def test_with_steps_in_advance_several_are_trained_without_a_change_of_the_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where reserved engines are most of the run: what each change costs, seconds and prefill, is paid for several steps at once."""
    scenario = replace(small(3, 14), max_off_policy_steps=4, kv="keep", max_engines=2)
    out = simulate(scenario, SIMULATED_POLICIES["ours"])
    monkeypatch.setattr(admission, "KEEP_OPEN_FROM", 99)
    each = simulate(scenario, SIMULATED_POLICIES["ours"])
    assert [step.tokens for step in out.steps] == [step.tokens for step in each.steps]
    assert max(step.age_most for step in out.steps) <= 4
    toggled, before = (sum(step.toggle_s for step in one.steps) for one in (out, each))
    assert toggled < 0.7 * before
    assert out.prefilled < 0.8 * each.prefilled
    assert out.seconds < each.seconds
