"""The asynchronous trainers do what their code says, by counts made by hand, and their play takes the time that a formula gives."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.baselines.asynchronous import AReaL, Counts, PrimeRL, Queued, Rule, Verl
from benchmarks.baselines.asynchronous_run import Life, Played, best, lives_of, play, splits
from scavenger.simulate import trainer_model as cost
from scavenger.simulate.decode import Stretch
from scavenger.simulate.outcome import EngineOutcome
from scavenger.simulate.scenario import Scenario
from tests.simulate.test_driver import EQUAL, LENGTH

ALWAYS = Life(0.0, math.inf)
NONE = Counts(0, 0, 0, 0, 0, 64)


# ---------------------------------------------------------------- the rules


def test_areal_admits_up_to_its_staleness_and_its_concurrency() -> None:
    """`areal/infra/staleness_manager.py`, `get_capacity`: min(C - running, (staleness + version + 1) * batch - (accepted + running))."""
    rule = AReaL(max_staleness=2, max_concurrent=150)
    assert rule.admit(NONE) == 150, "concurrency: (2 + 0 + 1) * 64 = 192 would be allowed"
    assert rule.admit(replace(NONE, running=100, accepted=60)) == 32, "192 - 160"
    assert rule.admit(replace(NONE, version=1, running=100, accepted=60)) == 50, (
        "256 - 160 = 96, but 150 - 100"
    )
    assert rule.admit(replace(NONE, running=150, accepted=60)) == 0
    assert rule.cancel({1: 99}, NONE) == (), "it bounds how many are begun, not how old one gets"
    queued = [Queued(5, 2), Queued(3, 1), Queued(4, 2)]
    assert [one.group for one in rule.first(queued)] == [3, 4, 5], (
        "`drained.sort(key=lambda x: x.create_time)`"
    )
    assert list(PrimeRL(1).first(queued)) == list(Verl(0.5).first(queued)) == queued


def test_verl_begins_no_more_than_its_threshold_of_a_version() -> None:
    """`fully_async_rollouter.py`, `set_max_required_samples`: int(required * (threshold + 1) * trigger_parameter_sync_step)."""
    rule = Verl(0.5)
    assert rule.max_required(64) == 96
    assert Verl(0.5, sync_steps=4).max_required(64) == 384
    assert rule.admit(NONE) == 96
    assert rule.admit(replace(NONE, begun=96, running=10)) == 0, (
        "it waits for the next version, whatever is done"
    )
    assert rule.admit(replace(NONE, begun=40)) == 56
    dropping = Verl(0.5, "drop")
    assert dropping.admit(replace(NONE, begun=1000, running=90, queued=96)) == 6, "nothing waits"
    assert dropping.overflow(replace(NONE, queued=97)) == 1, "its queue of 96 loses the oldest"
    assert (dropping.overflow(replace(NONE, queued=96)), rule.overflow(replace(NONE, queued=97))) == (0, 0)


def test_prime_rl_keeps_its_pool_full_and_cancels_what_is_more_than_eight_steps_old() -> None:
    """`orchestrator/utils.py`, `min_fresh_version`: (step - 1) - max_off_policy_steps; `step` is the batch that is collected now."""
    rule = PrimeRL(in_flight=100)
    assert rule.admit(NONE) == 100
    assert rule.admit(replace(NONE, running=97)) == 3
    assert rule.admit(replace(NONE, running=97, queued=64)) == 0, "a whole batch waits: max_async_level = 1"
    assert PrimeRL(100, max_async_level=2).admit(replace(NONE, running=97, queued=64)) == 3
    assert list(rule.cancel({7: 8, 9: 9, 8: 12}, NONE)) == [8, 9]
    assert list(rule.cancel({7: 8, 9: 7}, replace(NONE, queued=64))) == [7], (
        "a batch is whole: the next one is collected"
    )


# ---------------------------------------------------------------- the play


def train_s(scenario: Scenario) -> float:
    """Of a step in which every completion is equally long."""
    lengths = [scenario.prompt_tokens + LENGTH] * (scenario.prompts * scenario.samples)
    packed = cost.pack(scenario.trainer.model, lengths, scenario.trainer.ranks, scenario.round_tokens)
    rounds = sum(cost.micro_step_s(scenario.trainer, by_rank) for by_rank in packed)
    return rounds + cost.optimizer_s(scenario.trainer) + cost.publish_s(scenario.trainer)


def generate_s(scenario: Scenario, samples: int) -> float:
    """So many at once on one engine."""
    engine = scenario.harvested
    stretch = Stretch(engine.curve(samples), samples, samples * scenario.prompt_tokens)
    prefill_s = engine.prefill_many_s([(scenario.prompt_tokens, 0)] * samples)
    return prefill_s + stretch.seconds(LENGTH)


def played(scenario: Scenario, rule: Rule, *lives: Life) -> Played:
    return play(replace(scenario, horizon_s=4000.0), rule, lives or (ALWAYS,), 0)


def test_without_staleness_a_step_is_generated_and_then_trained() -> None:
    found = played(EQUAL, AReaL(0, 10**6))
    each = EQUAL.prompts * EQUAL.samples
    assert found.steps[0].end_s == pytest.approx(generate_s(EQUAL, each) + train_s(EQUAL), rel=1e-6)
    gap = found.steps[1].end_s - found.steps[0].end_s
    assert gap >= found.steps[0].end_s - 1e-6
    assert {step.age_most for step in found.steps} == {0}
    assert {step.tokens for step in found.steps} == {each * LENGTH}


def test_with_enough_engines_and_staleness_the_trainer_never_waits() -> None:
    rules = (AReaL(4, 10**6), Verl(4.0), PrimeRL(4 * EQUAL.prompts, max_async_level=4))
    for rule in rules:
        found = played(EQUAL, rule, *[ALWAYS] * 24)
        ends = [step.end_s for step in found.steps[-4:]]
        assert ends[1] - ends[0] == pytest.approx(train_s(EQUAL), rel=1e-6), rule.name
        assert found.thrown == 0


def test_an_engine_that_is_lost_costs_its_samples_their_tokens_and_nothing_else() -> None:
    whole = generate_s(EQUAL, EQUAL.prompts * EQUAL.samples)
    lost = played(EQUAL, AReaL(0, 10**6), Life(0.0, 0.5 * whole), Life(0.5 * whole, math.inf))
    first = lost.steps[0]
    assert first.end_s == pytest.approx(1.5 * whole + train_s(EQUAL), rel=1e-6)
    each = EQUAL.prompts * EQUAL.samples
    assert 0.4 * each * LENGTH < lost.lost_tokens < 0.6 * each * LENGTH
    assert first.tokens == each * LENGTH


def test_what_is_cancelled_or_dropped_for_age_is_counted() -> None:
    eager = played(EQUAL, PrimeRL(8 * EQUAL.prompts, max_off_policy_steps=1))
    assert eager.thrown > 0
    assert max(step.age_most for step in eager.steps) <= 3
    dropped = played(EQUAL, Verl(0.0, "drop"), *[ALWAYS] * 24)
    assert dropped.thrown > 0


def test_the_best_split_of_the_reserved_gpus_is_taken() -> None:
    scenario = replace(EQUAL, horizon_s=4000.0)
    tried = {number: play(scenario, AReaL(4, 10**6), (), number) for number in splits(scenario)}
    assert len(tried) > 1
    assert tried[0].steps == (), "nobody generates"
    chosen = best(scenario, AReaL(4, 10**6), (), 0.0)
    assert chosen.tokens_per_s(0.0) == max(one.tokens_per_s(0.0) for one in tried.values()) > 0


def test_an_engine_generates_from_its_first_weights_to_its_end() -> None:
    def one(ready_s: float, end_s: float, why: str) -> EngineOutcome:
        return EngineOutcome("n", 1, 0.0, end_s, ready_s, 0.0, 0, why)

    engines = [one(60.0, 500.0, "preempted"), one(-1.0, 30.0, "preempted"), one(80.0, 900.0, "running")]
    assert lives_of(engines) == [Life(60.0, 500.0), Life(80.0, math.inf)]
