"""What a restarted daemon's policy learns from the ledger is what it had learned from the facts."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from scavenger.policy.forecast.lengths import Belief
from scavenger.policy.history import (
    Completion,
    EngineLifetime,
    Flush,
    LeaseInterval,
    RunHistory,
    Step,
    WeightLoad,
)
from scavenger.policy.interface import (
    EngineProgress,
    EnginesAsked,
    SampleFinished,
    StepFinished,
    StepSubmitted,
    StepView,
    WorkerJoined,
    WorkerLost,
    WorkerReady,
)
from scavenger.policy.predictive.policy import Predictive
from scavenger.policy.warm_start import LEAST_S, facts, observe_all, rates
from tests.plain_view import PlainView
from tests.router.test_predictive import worker

STEP_S = 0.1  # of the engine that is played
LENGTHS = (10, 10, 30)


def played() -> RunHistory:
    """One engine decodes three samples in one step: two of 10 tokens, one of 30, with prompts of 5; a token every `STEP_S` each."""
    flushes = [
        Flush(sample, 1, position - 1, 1, 100.0 + STEP_S * position)
        for sample, length in enumerate(LENGTHS)
        for position in range(1, length + 1)
    ]
    spans = [
        LeaseInterval(sample, 1, 1, 0, length, 100.0, 100.0 + STEP_S * length)
        for sample, length in enumerate(LENGTHS)
    ]
    answers = tuple(
        Completion(
            sample,
            sample // 2,
            sample // 2,
            sample % 2,
            5,
            length,
            "stop",
            "consumed",
            1,
            100.0 + STEP_S * length,
        )
        for sample, length in enumerate(LENGTHS)
    )
    metrics = {"seconds": 4.0, "seconds_train": 0.5}
    life = EngineLifetime(
        1,
        "harvested",
        "job",
        0,
        "n1",
        1,
        90.0,
        110.0,
        True,
        True,
        "SIGTERM",
        (WeightLoad(97.0, 1, 0.1, 0.2), WeightLoad(105.0, 2, 0.1, 0.2)),
    )
    flushes.sort(key=lambda flush: flush.at)
    return RunHistory(
        "r", "{}", "{}", (Step(1, 40, 100.0, 104.0, metrics, answers),), (life,), tuple(spans), tuple(flushes)
    )


def test_rates_are_tokens_over_the_time_in_which_the_batch_was_held() -> None:
    found = rates(played())
    assert sum(rate.tokens for rate in found) == sum(LENGTHS)
    assert all(rate.seconds >= LEAST_S for rate in found)
    assert [round(rate.batch) for rate in found] == [3, 1]
    for rate in found:
        assert rate.seconds * rate.batch / rate.tokens == pytest.approx(STEP_S, rel=0.02)
    assert found[0].context == pytest.approx(3 * (5 + 5), rel=0.15), (
        "prompts and half of what was generated meanwhile"
    )


def test_an_engine_that_waits_for_work_is_not_slow() -> None:
    played_once = played()
    later = tuple(
        LeaseInterval(s.sample_id + 10, 1, 1, 0, s.end_len, s.granted_at + 1000, (s.ended_at or 0) + 1000)
        for s in played_once.spans
    )
    flushes = tuple(Flush(f.sample_id + 10, 1, f.start_len, 1, f.at + 1000) for f in played_once.flushes)
    twice = RunHistory(
        "r", "{}", "{}", (), (), (*played_once.spans, *later), (*played_once.flushes, *flushes)
    )
    assert [round(rate.seconds, 6) for rate in rates(twice)] == [
        round(rate.seconds, 6) for rate in rates(played_once)
    ] * 2


def test_facts_come_in_the_order_in_which_they_became_known() -> None:
    known = facts(played())
    assert [at for at, _ in known] == sorted(at for at, _ in known)
    kinds = [type(fact) for _, fact in known if not isinstance(fact, EngineProgress)]
    assert kinds == [
        WorkerJoined,
        WorkerReady,
        StepSubmitted,
        SampleFinished,
        SampleFinished,
        SampleFinished,
        StepFinished,
        WorkerReady,
        WorkerLost,
    ]
    ready = [fact for _, fact in known if isinstance(fact, WorkerReady)]
    assert [(fact.first, fact.start_s) for fact in ready] == [(True, 7.0), (False, 15.0)]


def test_a_policy_that_is_taught_has_learned_lengths_speed_trainer_starts_and_lives() -> None:
    policy, fresh = Predictive("r"), Predictive("r")
    history = played()
    observe_all(policy, facts(history))
    forecast = policy.forecast
    assert forecast.curve("harvested", 1).step_s(2, 40) == pytest.approx(STEP_S, rel=0.1)
    assert forecast.lengths is not None
    assert 10 <= forecast.lengths.table().expected(Belief(), 0) <= 30
    assert forecast.start.value < fresh.forecast.start.value
    assert forecast.train.value(0.0) == pytest.approx(0.5 / (sum(LENGTHS) + 15 + 20), rel=0.01)
    assert forecast.last is not None
    assert forecast.last.step == 1
    assert forecast.survival.lives() == 1


def test_what_is_read_of_a_guest_is_told_as_of_a_guest() -> None:
    whole = played()
    (life,) = whole.lives
    beside = msgspec.structs.replace(whole, lives=(msgspec.structs.replace(life, intent_id="guest-chat"),))
    of_engines = (WorkerJoined, WorkerReady, WorkerLost, EngineProgress)
    for history, bounded in ((whole, False), (beside, True)):
        found = [fact for _, fact in facts(history) if isinstance(fact, of_engines)]
        assert {type(fact) for fact in found} == set(of_engines)
        assert {fact.bounded for fact in found} == {bounded}


def test_a_step_under_way_is_begun_and_not_finished() -> None:
    history = played()
    (step,) = history.steps
    under_way = Step(
        1,
        40,
        step.submitted_at,
        None,
        {},
        (*step.completions[:2], Completion(2, 1, 1, 0, 5, 12, "", "open", 1, None)),
    )
    known = facts(RunHistory("r", "{}", "{}", (under_way,), (), (), ()))
    assert [type(fact) for _, fact in known] == [StepSubmitted, SampleFinished, SampleFinished]


def test_a_restarted_daemon_asks_for_as_many_engines_as_the_one_before() -> None:
    """Though its forecast finds fewer useful: what leaves does so by the same rules as without a restart."""
    history = msgspec.structs.replace(played(), engines=4)
    assert facts(history)[-1] == (110.0, EnginesAsked(4)), "after all that it may rest on"
    here = PlainView(
        step=StepView(step=2, samples=3, groups=2),
        workers=[worker(1, "reserved"), *(worker(i) for i in range(2, 6))],
        max_engines=8,
    )
    anew, again = Predictive("r"), Predictive("r")
    observe_all(anew, facts(played()))
    assert anew.engines(here, 111.0)[0] < 4
    observe_all(again, facts(history))
    engines, why = again.engines(here, 111.0)
    assert engines == 4
    assert "asked for before the daemon's restart" in why


def test_engines_stay_over_a_restart_between_two_steps() -> None:
    """Nobody has said yet what the next step will be: by that alone none would be of use."""
    policy, nothing = (
        Predictive("r"),
        PlainView(step=StepView(), workers=[worker(2), worker(3)], max_engines=8),
    )
    assert policy.engines(nothing, 0.0)[0] == 0
    policy.observe(EnginesAsked(6), 0.0)
    assert policy.engines(nothing, 1.0)[0] == 6
    assert policy.engines(replace(nothing, max_engines=3), 1.0)[0] == 3
    assert policy.sized_by()["target"] == 3
