"""Simulated peers tell the core what live ones tell it, and an engine that made no token was started for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from scavenger.policy.interface import Fact, RunView, SamplePlacement, Standard, StepSubmitted, TrainedGroups
from scavenger.simulate import trainer_model as cost
from scavenger.simulate.driver import simulate
from scavenger.simulate.fleet import from_deltas
from scavenger.simulate.policies import DISAGGREGATED, SimulatedPolicy
from tests.simulate.test_driver import ENGINE, EQUAL, LENGTH, PROMPT, TRAINER, UNEVEN


class Listener(Standard):
    """The live default policy, overheard: caches by kind of engine, and what it is told."""

    def __init__(self) -> None:
        self.caches: dict[str, set[int]] = {}
        self.facts: list[tuple[float, Fact]] = []

    def place(self, view: RunView, now: float) -> Sequence[SamplePlacement]:
        for worker in view.workers:
            if worker.serves:
                self.caches.setdefault(worker.kind, set()).add(worker.cache_tokens)
        return super().place(view, now)

    def observe(self, fact: Fact, now: float) -> None:
        self.facts.append((now, fact))


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.mark.parametrize("offload", [True, False])
def test_engines_tell_the_tokens_their_cache_holds_beside_what_is_resident(
    listener: Listener, offload: bool
) -> None:
    simulate(
        replace(UNEVEN, steps=2, offload=offload), SimulatedPolicy("listener", lambda: listener, window=0.5)
    )
    beside = ENGINE if offload else ENGINE.with_resident(cost.state_bytes_per_gpu(TRAINER))
    assert (beside.kv_capacity < ENGINE.kv_capacity) != offload
    assert listener.caches == {"reserved": {beside.kv_capacity}, "harvested": {ENGINE.kv_capacity}}


def test_the_trainer_tells_how_far_a_step_is_trained(listener: Listener) -> None:
    """Whole groups, with their prompts, and the seconds that they took; of the step under way alone."""
    out = simulate(replace(UNEVEN, steps=3), SimulatedPolicy("listener", lambda: listener, window=0.3))
    step, told = 0, 0
    before = TrainedGroups(0, 0, 0, 0.0)
    for now, fact in listener.facts:
        if isinstance(fact, StepSubmitted):
            step, before = fact.step, TrainedGroups(fact.step, 0, 0, 0.0)
        elif isinstance(fact, TrainedGroups):
            told += 1
            assert fact.step == step
            assert before.groups < fact.groups <= UNEVEN.prompts
            assert fact.tokens - before.tokens > (fact.groups - before.groups) * UNEVEN.samples * PROMPT
            assert before.seconds < fact.seconds <= out.steps[step - 1].train_s + 1e-9
            assert now < out.steps[step - 1].end_s
            before = fact
    assert told >= 3


def test_what_is_told_of_equal_groups_are_their_tokens(listener: Listener) -> None:
    slow = replace(
        EQUAL, trainer=replace(TRAINER, hash_bytes_s=0.5e9)
    )  # so long that the last round is told before the step ends
    simulate(slow, SimulatedPolicy("listener", lambda: listener, window=1.0))
    told = {fact.step: fact for _, fact in listener.facts if isinstance(fact, TrainedGroups)}
    assert set(told) == {1, 2, 3}
    assert {(one.groups, one.tokens) for one in told.values()} == {(16, 16 * 8 * (PROMPT + LENGTH))}


def test_an_engine_lost_after_its_prefill_and_before_a_token_was_started_for_nothing() -> None:
    one = replace(EQUAL, prompts=1, samples=1, steps=1, max_engines=1)

    def played(gone_s: float) -> tuple[int, int]:
        """Wasted starts and tokens of the first engine, when its GPU is taken for a minute at that time."""
        fleet = from_deltas("one", 1e6, {"a": 1}, {"a": 1}, [(gone_s, "a", -1), (gone_s + 60, "a", 1)])
        out = simulate(replace(one, fleet=fleet), DISAGGREGATED)
        return out.wasted_starts, out.engines[0].tokens

    ready_s = (
        simulate(replace(one, fleet=from_deltas("one", 1e6, {"a": 1}, {"a": 1}, [])), DISAGGREGATED)
        .engines[0]
        .ready_s
    )
    prefilled_s, step_s = ready_s + ENGINE.prefill_s(PROMPT), ENGINE.step_s(1, PROMPT)
    assert played(ready_s - 1.0) == (1, 0)
    assert played(prefilled_s - 0.001) == (1, 0)
    assert played(prefilled_s + 0.9 * step_s) == (1, 0)
    assert played(prefilled_s + 1.1 * step_s) == (0, 1)
