"""What engines and the trainer say of themselves reaches the policy: cache, plateau, toggles, how far the step is trained."""

from __future__ import annotations

import math

from scavenger.policy.interface import (
    EngineProgress,
    RunView,
    StepFinished,
    StepSubmitted,
    Toggled,
    TrainedGroups,
    WorkerReady,
)
from scavenger.policy.predictive.learned import PRIOR_TOGGLE_S, Forecast
from scavenger.protocol.messages import (
    Asleep,
    Heartbeat,
    Held,
    Ping,
    SetReserved,
    Trained,
    WeightsLoaded,
    decode_to_daemon,
    encode,
)
from tests.router.harness import Bench, root, specs
from tests.router.test_policy import ScriptedPolicy


def started(policy: ScriptedPolicy) -> Bench:
    bench = Bench()
    bench.router.core.new_policy = lambda _run: policy
    bench.open()
    bench.publish()
    return bench


def facts(policy: ScriptedPolicy, kind: type) -> list[object]:
    return [fact for fact in policy.facts if isinstance(fact, kind)]


def test_an_engine_s_cache_and_plateau_are_seen_with_its_first_weights() -> None:
    policy = ScriptedPolicy()
    bench = started(policy)
    bench.join(11)
    bench.say(11, WeightsLoaded(1, root(1), cache_tokens=4096, best_batch=3))
    seen: list[RunView] = []
    policy.place = lambda view, now: seen.append(view) or ()  # type: ignore[method-assign, func-returns-value]
    bench.submit(groups=specs(1))
    (worker,) = seen[-1].workers
    assert (worker.cache_tokens, worker.best_batch) == (4096, 3)


def test_a_message_of_the_release_before_says_nothing_of_them_and_is_understood() -> None:
    old = (
        encode(WeightsLoaded(1, b"root"))
        .replace(b"\xaccache_tokens\x00", b"")
        .replace(b"\xaabest_batch\x00", b"")
    )
    old = old.replace(b"\xa8verify_s\xcb" + bytes(8), b"")
    assert b"cache_tokens" not in old
    assert b"verify_s" not in old
    patched = bytes([old[0] - 3]) + old[1:]  # a map of three entries less
    assert decode_to_daemon(patched) == WeightsLoaded(1, b"root", cache_tokens=0, best_batch=0)


def test_toggles_are_measured_from_being_told_and_by_the_engine() -> None:
    policy = ScriptedPolicy()
    bench = started(policy)
    bench.join(11, kind="reserved")
    bench.submit(groups=specs(1))
    bench.call(SetReserved(False))
    bench.now += 1.5
    bench.say(11, Asleep(1, 0))
    bench.call(SetReserved(True))
    held = tuple(Held(lease.sample_id, lease.epoch, 0) for lease in bench.leases(11))
    bench.say(11, Heartbeat(held, 1, 1, wake_s=2.5))
    bench.say(11, Heartbeat(held, 2, 1, wake_s=2.5))
    assert facts(policy, Toggled) == [Toggled(1, False, 1.5), Toggled(1, True, 2.5)], (
        "a heartbeat repeats what was said before"
    )


def test_how_far_a_step_is_trained_is_told_once_for_each_round() -> None:
    policy = ScriptedPolicy()
    bench = started(policy)
    bench.submit(groups=specs(2))
    for body in (
        Ping(),
        Ping(trained=Trained(1, 1, 40, 0.5)),
        Ping(trained=Trained(1, 1, 40, 0.5)),
        Ping(trained=Trained(7, 1, 9, 0.1)),
    ):
        bench.call(body)
    assert facts(policy, TrainedGroups) == [TrainedGroups(1, 1, 40, 0.5)], "step 7 is not under way"


def test_an_engine_that_was_there_before_the_daemon_restarted_does_not_start_again() -> None:
    policy = ScriptedPolicy()
    bench = started(policy)
    bench.hello(11, loaded=1)
    bench.publish(2)
    bench.now += 100.0
    bench.say(11, WeightsLoaded(2, root(2)))
    assert [fact.first for fact in facts(policy, WorkerReady) if isinstance(fact, WorkerReady)] == [False]


def test_the_forecast_takes_the_later_of_engines_and_trainer_and_knows_the_cap_from_the_first_step() -> None:
    forecast = Forecast()
    assert (forecast.sleep_s, forecast.wake_s) == (PRIOR_TOGGLE_S, PRIOR_TOGGLE_S)
    for step in range(1, 60):
        forecast.observe(StepSubmitted(step, "train", 8, 2, 64), 10.0 * step)
        forecast.observe(Toggled(1, False, 0.2), 10.0 * step + 1)
        forecast.observe(Toggled(1, True, 0.4), 10.0 * step + 2)
        forecast.observe(StepFinished(step, "train", {"seconds": 9.0}), 10.0 * step + 9)
    assert math.isclose(forecast.sleep_s, 0.2, rel_tol=0.2)
    assert math.isclose(forecast.wake_s, 0.4, rel_tol=0.2)
    forecast.observe(StepFinished(60, "train", {"seconds": 9.0, "seconds_to_training": 3.0}), 700.0)
    assert math.isclose(forecast.sleep_s, 3.0, rel_tol=0.01)
    assert forecast.lengths is not None
    assert forecast.lengths.cap == 64


def test_with_steps_in_advance_the_interval_of_a_prefill_measures_no_engine() -> None:
    """After each load of weights an engine's samples come back together, with tokens: they gain alike while these are prefilled."""
    policy = ScriptedPolicy()
    bench = Bench()
    bench.router.core.new_policy = lambda _run: policy
    bench.open(ahead=1)
    bench.publish()
    bench.submit(groups=specs(2, 1))
    leases = bench.join(11)

    def beat(length: int) -> None:
        bench.now += 2.0
        bench.say(11, Heartbeat(tuple(Held(one.sample_id, one.epoch, length) for one in leases), length, 1))

    for length in (0, 3, 6):
        beat(length)
    measured = [fact for fact in policy.facts if isinstance(fact, EngineProgress)]
    assert [(fact.batch, fact.tokens, fact.seconds) for fact in measured] == [(2, 6, 2.0)], (
        "not the first three"
    )


def test_a_policy_sees_the_next_step_s_samples_apart_from_those_of_the_step_under_way() -> None:
    seen = []
    for ahead in (4, 0):
        policy, views = ScriptedPolicy(), []
        policy.window = lambda view, now, views=views: views.append(view)  # type: ignore[method-assign, misc]
        bench = Bench()
        bench.router.core.new_policy = lambda _run, policy=policy: policy  # type: ignore[misc]
        bench.open(ahead=ahead)
        bench.publish()
        for step in range(1, 1 + min(3, 1 + ahead)):
            bench.submit(step=step, groups=specs(step, 1))
        bench.join(11)
        view = views[-1]
        seen.append(
            (view.step.step, len(view.samples), len(view.next_samples), view.step.max_off_policy_steps)
        )
    assert seen == [(1, 1, 2, 4), (1, 1, 0, 0)]
