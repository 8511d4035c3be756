"""The asynchronous trainers do what their code says, by counts made by hand, and their play takes the time that a formula gives."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest

from benchmarks.baselines import no_wait
from benchmarks.baselines.asynchronous import AReaL, Counts, PrimeRL, Queued, Rule, Verl
from benchmarks.baselines.asynchronous_run import Life, Played, best, lives_of, play, splits, synchronous
from benchmarks.baselines.registry import running_context
from benchmarks.baselines.seer import Seer
from scavenger.simulate import trainer_model as cost
from scavenger.simulate.decode import Stretch
from scavenger.simulate.outcome import EngineOutcome
from scavenger.simulate.scenario import Scenario
from scavenger.simulate.speculation import CHECKED
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
    assert rule.admit(replace(NONE, samples=97)) == 3
    assert rule.admit(replace(NONE, samples=97, queued=64)) == 0, "a whole batch waits: max_async_level = 1"
    assert PrimeRL(100, max_async_level=2).admit(replace(NONE, samples=97, queued=64)) == 3
    assert list(rule.cancel({7: 8, 9: 9, 8: 12}, NONE)) == [8, 9]
    assert list(rule.cancel({7: 8, 9: 7}, replace(NONE, queued=64))) == [7], (
        "a batch is whole: the next one is collected"
    )


def test_prime_rl_s_permits_are_samples_not_groups() -> None:
    """`orchestrator/dispatcher.py`, "One permit is one episode": a group of which three ended lets three samples of another begin."""
    rule, eights = PrimeRL(in_flight=64), replace(NONE, siblings=8)
    assert rule.admit(eights) == 8
    assert rule.admit(replace(eights, running=8, samples=64)) == 0
    assert rule.admit(replace(eights, running=8, samples=61)) == 1, "however many groups are still in flight"
    assert rule.admit(replace(eights, running=8, samples=55)) == 2


def test_prime_rl_trains_no_group_beyond_its_bound() -> None:
    """`orchestrator/train_sink.py`, `_drop_stale`: a group is voided on arrival where the batch that it joins would train it later than
    `max_off_policy_steps` versions after it began. Batch `step` trains version `step` - 1."""
    rule, at = PrimeRL(1), replace(NONE, version=10)
    assert [rule.too_old(began, at) for began in (1, 2)] == [True, False], (
        "the batch is trained by version 10"
    )
    assert [rule.too_old(began, replace(at, training=True)) for began in (2, 3)] == [True, False], "by 11"
    held = replace(at, training=True, queued=64 + 63)
    assert [rule.too_old(began, held) for began in (3, 4)] == [True, False], "a batch waits: by 12"
    assert not Verl(0.5).too_old(0, held)
    assert not AReaL(0, 1).too_old(0, held)


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
    rules = (AReaL(4, 10**6), Verl(4.0), PrimeRL(4 * EQUAL.prompts * EQUAL.samples))
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
    for bound in (1, 2):
        pool = 8 * EQUAL.prompts * EQUAL.samples
        eager = played(EQUAL, PrimeRL(pool, max_off_policy_steps=bound), *[ALWAYS] * 4)
        assert eager.thrown > 0
        assert max(step.age_most for step in eager.steps) == bound, "the bound is reached and never passed"
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


# ---------------------------------------------------------------- Seer


@dataclass(frozen=True)
class Queuing:
    group: int
    index: int
    generated: int = 0


def test_seer_sends_probes_first_and_then_the_longest_expected() -> None:
    """arXiv 2511.14617, section 3.3: the first of each group, shortest first; then longest first, where a group without a completion counts
    as the longest."""
    rule = Seer()
    waiting = [Queuing(2, 1), Queuing(3, 0, 4096), Queuing(5, 0, 2048), Queuing(1, 1)]
    assert rule.pick(waiting, {}) == 2
    rest = [Queuing(2, 1), Queuing(1, 3), Queuing(4, 2), Queuing(3, 1)]
    assert rule.pick(rest, {1: 900, 2: 500, 3: 700, 4: 100}) == 1
    assert rule.pick(rest, {1: 900, 2: 500, 3: 700}) == 2, "of group 4 nothing is known"


def test_seer_begins_a_step_when_the_one_before_is_trained() -> None:
    rule = Seer()
    assert rule.admit(NONE) == 64
    assert rule.admit(replace(NONE, running=64)) == 0
    assert rule.admit(replace(NONE, running=1, accepted=63)) == 0
    assert rule.admit(replace(NONE, accepted=64)) == 0, "it is trained now"
    assert rule.admit(replace(NONE, version=1, accepted=64)) == 64


def seer(scenario: Scenario, chunk: int, *lives: Life) -> Played:
    one = replace(scenario, horizon_s=150.0, reserved_engines=0)
    return synchronous(one, Seer(chunk), lives)


def test_seer_s_step_is_generated_and_then_trained_whatever_its_chunks() -> None:
    each = EQUAL.prompts * EQUAL.samples
    for chunk in (10**6, LENGTH // 4):
        found = seer(EQUAL, chunk, ALWAYS)
        assert found.steps[0].end_s == pytest.approx(generate_s(EQUAL, each) + train_s(EQUAL), rel=1e-6)
        assert {step.age_most for step in found.steps} == {0}
        assert {step.tokens for step in found.steps} == {each * LENGTH}


def test_a_lost_engine_costs_seer_a_chunk_and_a_new_one_takes_its_share_at_the_next() -> None:
    whole = generate_s(EQUAL, EQUAL.prompts * EQUAL.samples)
    half = [Life(0.0, 0.5 * whole), Life(0.5 * whole, math.inf)]
    coarse, fine = (seer(EQUAL, chunk, *half) for chunk in (10**6, LENGTH // 16))
    each = EQUAL.prompts * EQUAL.samples
    assert 0.4 * each * LENGTH < coarse.lost_tokens
    assert fine.lost_tokens <= each * LENGTH // 16
    two = [ALWAYS, Life(0.25 * whole, math.inf)]
    alone, divided = (seer(EQUAL, chunk, *two).steps[0].end_s for chunk in (10**6, LENGTH // 16))
    assert divided < alone - 0.1 * whole, "samples move to the engine that came"


def test_seer_s_drafts_come_from_all_siblings_that_are_done() -> None:
    """Two groups of two, one sample at a time: the second of each group is drafted with one sibling done."""
    scenario = replace(EQUAL, prompts=2, samples=2, max_batch=1)
    drafted = replace(
        scenario, harvested=replace(scenario.harvested, gpus=1), reserved=replace(scenario.reserved, gpus=1)
    )
    drafted = drafted.speculating(CHECKED)
    engine, prompt = drafted.harvested, drafted.prompt_tokens
    seconds = 0.0
    for siblings in (0, 0, 1, 1):
        curve, _ = engine.token_curve(1, prompt, siblings)
        seconds += engine.prefill_many_s([(prompt, 0)]) + Stretch(curve, 1, prompt).seconds(LENGTH)
    found = seer(drafted, 10**6, ALWAYS)
    assert found.steps[0].end_s == pytest.approx(seconds + train_s(drafted), rel=1e-6)


def test_the_bound_in_which_no_gpu_waits_in_closed_form() -> None:
    """With r reserved engines alone a step of S tokens takes S / (r g) + t; with harvested ones at least t."""
    context = running_context(EQUAL)
    rate = no_wait.full_rate(EQUAL.reserved, EQUAL.max_batch, context)
    tokens, train = 1e6, 30.0
    alone = no_wait.Had(1000.0, 0.0, tokens, train)
    step_s = tokens / (EQUAL.reserved_engines * rate) + train
    assert no_wait.tokens_per_s(EQUAL, alone) == pytest.approx(tokens / step_s)
    many = replace(alone, harvested_s=1e9)
    assert no_wait.tokens_per_s(EQUAL, many) == pytest.approx(tokens / train)
    one = replace(alone, harvested_s=1000.0)
    found = no_wait.tokens_per_s(EQUAL, one)
    each = no_wait.full_rate(EQUAL.harvested, EQUAL.max_batch, context)
    step_s = tokens / found
    assert each * step_s + EQUAL.reserved_engines * rate * (step_s - train) == pytest.approx(tokens)
    assert (
        no_wait.harvested_s([Life(0.0, 50.0), Life(20.0, math.inf), Life(90.0, 95.0)], 10.0, 80.0)
        == 40.0 + 60.0
    )


def test_an_asynchronous_trainer_comes_near_the_bound_and_not_above_it() -> None:
    """One reserved GPU trains and engines come from elsewhere: its split is the bound's, but for prompts, loads and the tail."""
    scenario = replace(EQUAL, reserved_engines=1, prompts=64, horizon_s=4000.0)
    lives = [Life(0.0, math.inf)] * 2
    one = best(scenario, PrimeRL(4 * scenario.prompts * scenario.samples), lives, 800.0)
    steps = [step for step in one.steps if step.end_s >= 800.0]
    seconds = steps[-1].end_s - steps[0].end_s
    had = no_wait.Had(seconds, 2 * seconds, steps[0].tokens, train_s(scenario))
    share = one.tokens_per_s(800.0) / no_wait.tokens_per_s(scenario, had)
    assert 0.6 < share <= 1.02
