"""The predicting policy as a whole, on a small site in virtual time, with nothing but a daemon's knowledge; and by hand."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest

from scavenger.policy import interface as seam
from scavenger.policy import seed_window as windows
from scavenger.policy.admission import Pace
from scavenger.policy.interface import RouterPolicy, SampleView, Standard, StepView, WorkerView
from scavenger.policy.predictive.learned import Forecast
from scavenger.policy.predictive.placement import MANY_LOST
from scavenger.policy.predictive.policy import Predictive
from scavenger.policy.predictive.policy_forecast import PAUSE_S
from scavenger.policy.predictive.settings import PredictiveSettings
from scavenger.simulate import presets
from tests.plain_view import PlainView
from tests.router.small_site import SmallSite, Trainer
from tests.router.test_forecast import CAP, drawn

SPEC = presets.engine("Qwen3-8B", "H100")
TRAINER = Trainer(token_s=8e-5, round_groups=2)


def steps(count: int, groups: int = 16, seed: int = 0) -> list[list[list[int]]]:
    rng = random.Random(seed)
    return [drawn(rng, groups) for _ in range(count)]


def site(policy: RouterPolicy, reserved: int = 2, harvested: int = 3) -> SmallSite:
    return SmallSite(policy, SPEC, reserved, harvested, TRAINER, CAP)


def seconds(
    policy: RouterPolicy, played: list[list[list[int]]], window_s: float = math.inf, harvested: int = 3
) -> float:
    """Of all steps but the first, in which nothing is known yet."""
    where = site(policy, harvested=harvested)
    return sum([where.play(groups, window_s).seconds for groups in played][1:])


def test_it_is_a_router_policy() -> None:
    policy: RouterPolicy = Predictive("r")
    assert policy.every_s > 0
    assert Predictive("r", PredictiveSettings(rebalance=False, tails=False)).every_s == math.inf


@pytest.mark.parametrize("harvested", [1, 3, 6])
def test_steps_are_nearly_as_short_as_with_the_best_fixed_window_known_afterwards(harvested: int) -> None:
    played = steps(4, seed=harvested)
    best = min(
        seconds(Standard(), played, window_s, harvested)
        for window_s in (0.0, 15.0, 30.0, 45.0, 60.0, 90.0, math.inf)
    )
    assert seconds(Predictive("r"), played, harvested=harvested) <= 1.06 * best


def test_steps_are_shorter_than_with_all_generation_first() -> None:
    played = steps(3)
    assert seconds(Predictive("r"), played) < 0.85 * seconds(Standard(), played)


def test_without_harvested_engines_it_generates_to_the_end_and_then_trains() -> None:
    where = site(Predictive("r"), harvested=0)
    plain = site(Standard(), harvested=0)
    for groups in steps(2):
        result, other = where.play(groups), plain.play(groups)
        assert result.seconds <= 1.1 * other.seconds
        assert result.window_s > 0.5 * result.seconds


def test_when_the_harvested_engines_vanish_the_trainer_wakes_the_reserved_ones_and_they_finish_the_step() -> (
    None
):
    first, second = steps(2)
    calm, hit = site(Predictive("r")), site(Predictive("r"))
    calm.play(first)
    hit.play(first)
    usual = calm.play(second)
    gone = usual.window_s + 8.0  # reserved engines sleep by then, and train
    result = hit.play(second, events=((gone, -1), (gone, -1), (gone + 1, -1)))
    assert result.tokens == usual.tokens
    assert result.window_s > usual.window_s + 5.0
    assert any("the window is closed, training on" in reason for reason in result.reasons)


def test_a_window_that_has_closed_stays_closed_though_engines_are_lost() -> None:
    first, second = steps(2)
    calm, hit = site(Predictive("r")), site(Predictive("r"))
    calm.play(first)
    hit.play(first)
    usual = calm.play(second).window_s
    after = usual + 8.0
    assert hit.play(second, events=((after, -1), (after, -1))).window_s == usual


def test_engines_that_join_within_a_step_are_used() -> None:
    first, second = steps(2, seed=4)
    few, more = site(Predictive("r"), harvested=1), site(Predictive("r"), harvested=1)
    few.play(first)
    more.play(first)
    assert more.play(second, events=((5.0, 1), (5.0, 1), (6.0, 1))).seconds < 0.95 * few.play(second).seconds


def test_losses_and_arrivals_at_any_time_lose_no_token() -> None:
    rng = random.Random(5)
    where = site(Predictive("r"), harvested=3)
    for groups in steps(3, groups=8, seed=5):
        times = sorted(rng.uniform(0, 60) for _ in range(6))
        result = where.play(groups, events=tuple(zip(times, (-1, 1, -1, 1, -1, 1), strict=True)))
        assert result.tokens == sum(sum(group) for group in groups)


@pytest.mark.parametrize("off", ["window", "placement", "rebalance", "tails"])
def test_each_controller_can_be_switched_off(off: str) -> None:
    switched: dict[str, Any] = {off: False}
    where = site(Predictive("r", PredictiveSettings(**switched)), harvested=2)
    result = where.play(steps(1, groups=4)[0], window_s=20.0)
    assert result.seconds > 0
    if off == "window":
        assert result.window_s == pytest.approx(20.0, abs=1.0)


def test_equal_facts_give_equal_decisions() -> None:
    outcomes = []
    for _ in range(2):
        where = site(Predictive("r"))
        outcomes.append([where.play(groups) for groups in steps(2, groups=8)])
    assert outcomes[0] == outcomes[1]


# ---------------------------------------------------------------- by hand


def sample(i: int, group: int, **more: object) -> SampleView:
    return SampleView(
        **{"id": i, "group_id": group, "index": i % 4, "prompt_tokens": 100, "cap": 1000} | more  # type: ignore[arg-type]
    )  # type: ignore[arg-type]


def worker(i: int, kind: str = "harvested", leases: int = 0, **more: object) -> WorkerView:
    base = {
        "id": i,
        "kind": kind,
        "node": f"n{i}",
        "gpus": 1,
        "status": "ready",
        "serves": True,
        "leases": leases,
        "max_batch": 4,
    }
    return WorkerView(**base | more)  # type: ignore[arg-type]


def test_many_samples_of_lost_engines_go_on_at_once_within_the_limits_and_few_are_weighed() -> None:
    """Only what was lost: what waits because engines are full waits on."""
    for lost, told in ((MANY_LOST, True), (MANY_LOST - 1, False)):
        policy = Predictive("r")
        step = StepView(step=1, samples=1000, groups=125)
        policy.observe(seam.StepSubmitted(1, "train", 1000, 125), 0.0)
        for n in range(2):
            policy.observe(
                seam.WorkerLost(
                    7 + n, "harvested", "n7", 1, 10.0, True, "preempted", lost // 2 + lost % 2 * n
                ),
                1.0,
            )
        waiting = [sample(i, i // 8) for i in range(1000)]
        view = PlainView(
            step=step,
            samples=waiting,
            queued=waiting,
            workers=[worker(1, max_batch=100), worker(2, max_batch=300)],
            max_batch=300,
        )
        answers = policy.place(view, 1.0)
        assert all(("samples at once" in answer.reason) == told for answer in answers)
        if told:
            assert {answer.sample_id for answer in answers} == set(range(lost))
            assert sum(answer.worker_id == 1 for answer in answers) <= 100


def test_a_machine_that_was_slow_for_a_while_does_not_keep_an_engine_at_one_sample_at_a_time() -> None:
    """Answers of some tokens are done within a heartbeat: their engine's pace is measured only while the machine is too busy for that."""
    policy = Predictive("r")

    def placed(step: int, now: float) -> int:
        policy.observe(seam.StepSubmitted(step, "train", 256, 32, 1000), now)
        waiting = [sample(step * 1000 + i, step * 100 + i // 8, prompt_tokens=7) for i in range(256)]
        view = PlainView(
            step=StepView(step=step, samples=256, groups=32),
            samples=waiting,
            queued=waiting,
            workers=[worker(1, max_batch=96)],
            max_batch=96,
        )
        return len(policy.place(view, now))

    assert placed(1, 0.0) == 96
    for batch, step_s in ((96, 0.62), (63, 0.40), (96, 0.62), (1, 0.0065), (1, 0.0065)) * 40:
        policy.observe(seam.EngineProgress(1, "harvested", "n1", 1, batch, 10.0 * batch, batch, step_s), 1.0)
    assert policy.forecast.curve("harvested", 1).plateau(10, 0.97) == 1, (
        "all its time goes with the samples: what was measured says one"
    )
    assert placed(2, 20.0) == windows.LEAST_SERVED
    assert placed(3, 40.0) == 96, "since then nothing was measured"


def test_a_window_is_solved_again_only_when_something_changed_or_it_is_time() -> None:
    policy = Predictive("r")
    view = PlainView(
        step=StepView(step=1, samples=8, groups=2),
        samples=[sample(i, i // 4, worker_id=1 + i % 2) for i in range(8)],
        workers=[worker(1, "reserved", 4), worker(2, leases=4)],
    )
    policy.observe(seam.StepSubmitted(1, "train", 8, 2), 0.0)
    first = policy.window(view, 0.0)
    assert first is not None
    assert policy.window(view, 0.9) is first
    policy.observe(seam.WorkerLost(2, "harvested", "n2", 1, 10.0, True, "preempted"), 1.5)
    soon = policy.window(view, 1.5)
    assert soon is not None
    assert (soon.reason, soon.again_at) == (first.reason, PAUSE_S)
    alone = PlainView(step=view.step, samples=view.samples, workers=view.workers[:1])
    again = policy.window(alone, PAUSE_S)
    assert again is not None
    assert again is not first
    assert not again.close
    assert "0 harvested" in again.reason
    late = policy.window(alone, again.again_at)
    assert late is not again


def test_a_window_is_kept_open_for_the_next_step_until_harvested_engines_have_what_is_left_of_it() -> None:
    policy, busy_s = Predictive("r"), 0.0
    curve = policy.forecast.curve("harvested", 1)
    policy.pace = lambda _view: Pace(1e6, 1_000.0, 500.0, curve, busy_s)  # type: ignore[assignment, method-assign]
    workers = [worker(1, "reserved", 4), worker(2, "reserved", 4), worker(3, leases=4)]
    step = StepView(
        step=1, samples=8, groups=2, finished=8, ahead=8, reserved_awake=True, max_off_policy_steps=4
    )

    def window(now: float, on: int, awake: bool = True, k: int = 4) -> seam.WindowDecision:
        """Where the next step's samples, 1 to 8, are on engine `on`."""
        following = [sample(i, i // 4, worker_id=on, cap=60_000) for i in range(8)]
        at = msgspec.structs.replace(step, reserved_awake=awake, max_off_policy_steps=k)
        policy.observe(seam.WindowMoved(awake), now)  # it is decided anew
        found = policy.window(PlainView(step=at, workers=workers, next_samples=following), now)
        assert found is not None
        return found

    policy.observe(seam.StepSubmitted(1, "train", 8, 2), 0.0)
    busy_s = 1e6
    assert window(10.0, on=1).close, "they are done before this step is trained"
    busy_s = 0.0
    for how in ({"k": 3}, {"awake": False}):
        found = window(40.0 + len(how), on=1, **how)  # type: ignore[arg-type]
        assert (found.close, found.keep_open) == (True, False)
    found = window(70.0, on=1)
    assert (found.close, found.keep_open) == (False, True)
    assert "8 of them are on no harvested engine" in found.reason
    busy_s = 1e6
    assert window(100.0, on=1).keep_open, "what they would give back is prefilled again"
    assert window(130.0, on=3).close


def test_a_step_that_is_done_is_trained_where_nothing_is_forecast_of_the_next_one() -> None:
    policy = Predictive("r")
    step = StepView(
        step=1, samples=8, groups=2, finished=8, ahead=24, reserved_awake=True, max_off_policy_steps=4
    )
    policy.observe(seam.StepSubmitted(1, "train", 8, 2), 0.0)
    view = PlainView(step=step, workers=[worker(1, "reserved", 4), worker(2, leases=4)])
    assert policy.pace(view) is None
    found = policy.window(view, 0.0)
    assert found is not None
    assert (found.close, found.reason) == (True, "all 8 samples of step 1 are done")


def test_a_window_is_nobodys_without_reserved_engines_and_closed_when_all_is_done() -> None:
    done = PlainView(step=StepView(step=1, samples=4, finished=4, groups=1), workers=[worker(1, "reserved")])
    decision = Predictive("r").window(done, 0.0)
    assert decision is not None
    assert decision.close
    assert (
        Predictive("r").window(
            PlainView(step=StepView(step=1, samples=4, groups=1), workers=[worker(1)]), 0.0
        )
        is None
    )
    assert Predictive("r", PredictiveSettings(window=False)).window(done, 0.0) is None


def test_a_full_fleet_costs_no_look_at_the_samples() -> None:
    class Unread(PlainView):
        @property
        def samples(self):  # type: ignore[no-untyped-def, override]
            raise AssertionError("nobody has room: the samples need not be looked at")

    view = Unread.__new__(Unread)
    object.__setattr__(view, "workers", [worker(1, leases=4)])
    assert Predictive("r").place(view, 0.0) == ()


def test_a_ranking_serves_the_next_free_slots() -> None:
    policy = Predictive("r")
    queued = [sample(i, i // 4) for i in range(12)]
    view = PlainView(
        step=StepView(step=1, samples=12, groups=3),
        samples=queued,
        queued=queued,
        workers=[worker(1), worker(2)],
    )
    first = policy.place(view, 0.0)
    assert len(first) == 8
    assert all(p.reason for p in first)
    left = [s for s in queued if s.id not in {p.sample_id for p in first}]
    later = PlainView(
        step=view.step, samples=queued, queued=left, workers=[worker(1, leases=3), worker(2, leases=4)]
    )
    (second,) = policy.place(later, 1.0)
    assert second.worker_id == 1
    assert "next in the ranking" in second.reason


def test_samples_that_come_back_go_on_at_once_and_the_order_is_found_anew_only_after_a_pause() -> None:
    """An engine that falls asleep gives its samples back one after the other: not each of them is a reason to look at all."""
    policy = Predictive("r")
    queued = [sample(i, i // 4) for i in range(12)]
    step, workers = StepView(step=1, samples=16, groups=4), [worker(1), worker(2)]
    policy.place(PlainView(step=step, samples=queued, queued=queued, workers=workers), 0.0)
    back = [sample(12, 3, length=5, moves=1), sample(13, 3, length=9, moves=1)]

    def placed(waiting: list[SampleView], now: float) -> seam.SamplePlacement:
        room = [worker(1, leases=3), worker(2, leases=4)]
        (answer,) = policy.place(
            PlainView(step=step, samples=[*queued, *back], queued=waiting, workers=room), now
        )
        return answer

    first = placed([back[0], *queued[8:]], 0.5)
    assert (first.sample_id, first.reason) == (
        12,
        "next in the ranking, which 1 joined, to the emptiest engine",
    )
    second = placed([back[1], *queued[8:]], 1.0)
    assert (second.sample_id, second.reason) == (
        13,
        "next in the ranking, which 1 joined, to the emptiest engine",
    )
    late = placed([sample(14, 3, length=9, moves=1), *back, *queued[8:]], PAUSE_S)
    assert "tokens expected" in late.reason


def test_a_step_that_asks_for_more_samples_goes_on() -> None:
    """What dynamic sampling replaces: the engines' loads, what was trained and when the window was solved stay as they were."""
    policy = Predictive("r")
    queued = [sample(i, i // 4) for i in range(8)]
    view = PlainView(
        step=StepView(step=1, samples=8, groups=2),
        samples=queued,
        queued=queued,
        workers=[worker(1, kind="reserved")],
    )
    policy.observe(seam.StepSubmitted(1, "train", 8, 2), 0.0)
    first = policy.window(view, 0.0)
    policy.observe(seam.StepSubmitted(1, "train", 12, 1), 1.0)
    again = policy.window(view, 1.0)
    assert first is not None
    assert again is not None
    assert (again.reason, again.again_at) == (first.reason, PAUSE_S), (
        "no step began: nothing is solved sooner than after the pause"
    )
    policy.observe(seam.StepSubmitted(1, "train", 16, 1), 50.0)
    policy.observe(seam.WorkerReady(1, "reserved", "n1", 1, 2, False, 0.0, 0.0, 0.0), 60.0)
    assert policy.forecast.load_s("reserved") > 30.0, (
        "counted from the step's begin, not from its replacements"
    )
    policy.window(view, 61.0)
    for finished in range(15):
        policy.observe(seam.SampleFinished(finished, 0, 1, 5, 100, False, 1, "reserved", "n1"), 61.5)
    done = PlainView(step=StepView(step=1, samples=16, finished=16, groups=4), workers=view.workers)
    undone = policy.window(done, 61.5)
    policy.observe(seam.SampleFinished(15, 0, 1, 5, 100, False, 1, "reserved", "n1"), 61.6)
    ended = policy.window(done, 61.6)
    assert undone is not None
    assert ended is not None
    assert (undone.close, ended.close) == (False, True), "of sixteen samples, not of eight"


def test_a_step_that_another_attempt_asks_for_begins_again() -> None:
    forecast = Forecast()
    asked = seam.StepSubmitted(1, "train", 8, 2)
    assert forecast.begins(asked)
    forecast.observe(asked, 0.0)
    assert not forecast.begins(seam.StepSubmitted(1, "train", 12, 1))
    assert forecast.begins(asked), "no more than before: from the beginning"
    assert forecast.begins(seam.StepSubmitted(1, "eval", 12, 1))
    assert forecast.begins(seam.StepSubmitted(2, "train", 8, 2))


def test_samples_wait_for_engines_that_are_about_to_be_ready_rather_than_crowd_the_first() -> None:
    def placed(status: str, cap: int = 20_000) -> int:
        queued = [sample(i, i // 4, cap=cap) for i in range(32)]
        workers = [
            worker(1, max_batch=64),
            *(worker(i, max_batch=64, serves=False, status=status) for i in range(2, 5)),
        ]
        view = PlainView(
            step=StepView(step=1, samples=32, groups=8, submitted_at=1.0),
            samples=queued,
            queued=queued,
            workers=workers,
        )
        return len(Predictive("r").place(view, 2.0))

    assert placed("loading") == 8
    assert placed("asleep") == 32
    assert placed("loading", cap=600) == 32, "an answer of a second is done before they are there"


def test_how_many_are_served_at_a_time_is_decided_for_several_short_steps_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It costs ten solutions of the window: in a run whose steps take three seconds not one of them would be free of it."""
    decided: list[int] = []
    monkeypatch.setattr(windows, "serve", lambda orders, usual: decided.append(1) or usual)
    policy, queued = Predictive("r"), [sample(i, i // 4) for i in range(8)]
    for step in range(1, 9):
        now = 3.0 * step
        policy.observe(seam.StepSubmitted(step, "train", 8, 2), now)
        workers = [worker(1, kind="reserved"), worker(2)]
        view = PlainView(
            step=StepView(step=step, samples=8, groups=2), samples=queued, queued=queued, workers=workers
        )
        assert policy.place(view, now)
        policy.observe(seam.StepFinished(step, "train", {"seconds": 3.0, "seconds_train": 1.0}), now + 2.9)
    assert len(decided) == 2, "in the first step, and in that which begins twelve seconds later"


def test_engines_that_were_asked_for_before_the_first_step_are_not_given_back_in_it() -> None:
    policy = Predictive("r")
    evaluation = StepView(step=0, purpose="eval", samples=512, groups=64)
    start = PlainView(step=evaluation, workers=[worker(1, "reserved")], max_engines=3, max_batch=96)
    assert policy.engines(start, 0.0)[0] == 3
    policy.observe(seam.StepSubmitted(1, "train", 8, 2, cap=7), 1.0)
    first = PlainView(
        step=StepView(step=1, samples=8, groups=2), workers=start.workers, max_engines=3, max_batch=96
    )
    engines, why = policy.engines(first, 1.0)
    assert engines == 3
    assert "no step was seen yet" in why


def test_what_a_lost_engine_held_does_not_wait_beside_free_slots() -> None:
    """Limits are made for the engines that are there, and for those that are about to be: one less, and all of them are too low."""
    policy = Predictive("r")
    policy.observe(seam.StepSubmitted(1, "train", 64, 8), 0.0)
    samples = [sample(i, i // 8, cap=20_000) for i in range(64)]
    step = StepView(step=1, samples=64, groups=8, submitted_at=1.0)
    workers = [
        worker(1, max_batch=64),
        *(worker(i, max_batch=64, serves=False, status="loading") for i in (2, 3)),
    ]
    first = policy.place(
        PlainView(step=step, samples=samples, queued=samples, workers=workers, max_batch=64), 1.5
    )
    assert len(first) == 22, "the others' shares are kept for them"
    held = [msgspec.structs.replace(s, worker_id=1 + at // 22) for at, s in enumerate(samples)]
    policy.observe(seam.WorkerLost(3, "harvested", "n3", 1, 5.0, True, "preempted", 20), 5.0)
    back = [msgspec.structs.replace(s, worker_id=0, moves=1, length=9) for s in held[44:]]
    left = [worker(1, leases=22, max_batch=64), worker(2, leases=22, max_batch=64)]
    view = PlainView(step=step, samples=[*held[:44], *back], queued=back, workers=left, max_batch=64)
    assert {answer.sample_id for answer in policy.place(view, 5.0)} == set(range(44, 64))


def test_nobody_waits_for_an_engine_where_one_more_costs_the_others_nothing() -> None:
    """A paced engine: its step takes as long with many samples as with few."""
    policy = Predictive("r")
    for n in range(20):
        policy.observe(
            seam.EngineProgress(1, "harvested", "n1", 1, 8 + 4 * n, 20.0 * (8 + 4 * n), 4 * (8 + 4 * n), 1.0),
            0.0,
        )
    queued = [sample(i, i // 4, cap=600) for i in range(32)]
    workers = [
        worker(1, max_batch=64),
        *(worker(i, max_batch=64, serves=False, status="loading") for i in range(2, 5)),
    ]
    view = PlainView(
        step=StepView(step=1, samples=32, groups=8, submitted_at=1.0),
        samples=queued,
        queued=queued,
        workers=workers,
    )
    assert len(policy.place(view, 2.0)) == 32


def test_a_run_of_short_steps_is_looked_at_as_often_as_its_steps_ask() -> None:
    """Three seconds between two solutions are a third of a step of nine."""
    policy = Predictive("r")
    policy.observe(seam.StepSubmitted(1, "train", 8, 2), 0.0)
    policy.observe(seam.StepFinished(1, "train", {"seconds": 8.0, "seconds_train": 2.0}), 8.0)
    policy.observe(seam.StepSubmitted(2, "train", 8, 2), 8.0)
    queued = [sample(i, i // 4) for i in range(8)]
    view = PlainView(
        step=StepView(step=2, samples=8, groups=2),
        samples=queued,
        queued=queued,
        workers=[worker(1, kind="reserved")],
    )
    first = policy.window(view, 8.0)
    policy.observe(seam.WorkerJoined(2, "harvested", "n2", 1), 8.1)
    assert policy.window(view, 8.1) is not None
    policy.observe(seam.WorkerJoined(3, "harvested", "n3", 1), 8.3)
    again = policy.window(view, 8.3)
    assert first is not None
    assert again is not None
    assert again.again_at > 8.3
    assert again.again_at != first.again_at, "solved again after a fortieth of a step"


def test_engines_are_asked_for_by_what_they_save_and_the_reason_says_so() -> None:
    policy = Predictive("r")
    where = site(policy, harvested=2)
    for groups in steps(2):
        where.play(groups)
    engines, reason = policy.engines(where.view(), where.now)
    assert 1 <= engines <= 64
    assert "saves" in reason
    assert "waits" in reason
    few = PlainView(
        step=where.view().step, samples=where.view().samples, workers=where.view().workers, max_engines=1
    )
    assert policy.engines(few, where.now)[0] <= 1


def test_an_evaluation_changes_neither_the_window_nor_the_fleet_nor_what_is_known_of_lengths() -> None:
    policy = Predictive("r")
    where = site(policy, harvested=2)
    where.play(steps(1)[0])
    asked, lengths = policy.engines(where.view(), where.now), policy.forecast.lengths
    assert lengths is not None
    seen = lengths.seen
    policy.observe(seam.StepSubmitted(1, "eval", 2, 2), where.now)
    policy.observe(seam.SampleFinished(900, 900, 1, 5, 100, False, 1, "reserved", "n1"), where.now)
    view = PlainView(
        step=StepView(step=1, purpose="eval", samples=2, groups=2), workers=[worker(1, "reserved")]
    )
    assert policy.window(view, where.now) is None
    assert policy.engines(view, where.now) == asked
    assert lengths.seen == seen


def test_before_it_knows_anything_it_asks_for_what_the_standard_does() -> None:
    view = PlainView(step=StepView(step=1, samples=64, groups=8), workers=[worker(1, "reserved")])
    assert Predictive("r").engines(view, 0.0) == Standard().engines(view, 0.0)


def test_what_a_round_costs_is_learned_from_whole_steps() -> None:
    policy = Predictive("r")
    where = SmallSite(policy, SPEC, 2, 3, Trainer(token_s=8e-5, round_groups=2, round_s=4.0), CAP)
    for groups in steps(6, seed=5):
        where.play(groups)
    costs = policy.forecast.costs(policy.forecast.curve("harvested", 1), 1, 2)
    assert costs.round_s == pytest.approx(4.0, rel=0.2)
    assert costs.train_s == pytest.approx(8e-5, rel=0.15)


def test_what_an_engine_is_worth_is_told_once_starts_were_seen_and_a_fleet_was_sized() -> None:
    """Until then what is idle is taken: priors are no reason to leave it."""
    policy = Predictive("r", PredictiveSettings(price=0.5))
    policy.observe(seam.StepSubmitted(1, "train", 64, 8, cap=4000), 1.0)
    step = StepView(step=1, samples=64, groups=8)
    view = PlainView(step=step, workers=[worker(1, kind="reserved"), worker(2)], max_engines=6, max_batch=32)
    engines, _ = policy.engines(view, 1.0)
    assert engines > 0
    assert policy.benefit() is None
    policy.observe(seam.WorkerReady(2, "harvested", "n2", 1, 1, True, 40.0, 5.0, 35.0), 50.0)
    policy.observe(seam.StepFinished(1, "train", {"seconds": 100.0, "seconds_train": 10.0}), 100.0)
    policy.engines(view, 101.0)
    benefit = policy.benefit()
    assert benefit is not None
    assert benefit.start_s == pytest.approx(40.0, rel=0.05)
    assert (benefit.run_gpus, benefit.gpus, benefit.price) == (1, 1, 0.5)
    assert benefit.saving is not None
    assert 0 < benefit.saving < 1
    assert isinstance(policy, seam.Weighs)
    assert not isinstance(Standard(), seam.Weighs)
    assert Predictive("r", PredictiveSettings(fleet=False)).benefit() is None
