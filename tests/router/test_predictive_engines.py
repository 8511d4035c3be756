"""The predicting policy and its engines, by hand: how many it asks for, those that are late or thousands, what they told."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from scavenger.policy import interface as seam
from scavenger.policy import migration
from scavenger.policy import seed_window as windows
from scavenger.policy.fleet_size import FleetSizeRules
from scavenger.policy.forecast.lengths import Belief, GroupLengths
from scavenger.policy.forecast.speed import SpeedCurve
from scavenger.policy.forecast.step import Situation
from scavenger.policy.interface import StepView, WorkerView
from scavenger.policy.predictive import view as predictive_view
from scavenger.policy.predictive.fleet import SIZE_STEPS, TRIAL_S, FleetSizer
from scavenger.policy.predictive.learned import Forecast
from scavenger.policy.predictive.policy import Predictive
from scavenger.policy.predictive.settings import PredictiveSettings
from scavenger.policy.predictive.view import LONG, Picture
from tests.plain_view import PlainView
from tests.router.test_predictive import sample, worker


def test_engines_that_never_come_keep_nobody_waiting_beside_free_slots() -> None:
    """Whose weights never arrive, say: slots were kept for what they would take, and no sample ended since."""
    policy = Predictive("r")
    policy.observe(seam.StepSubmitted(1, "train", 32, 8, 32_768), 150.0)
    coming = [
        worker(i, status="loading", serves=False, max_batch=64, joined_at=100.0, warm=False)
        for i in range(2, 33)
    ]
    held: set[int] = set()

    def placed(now: float) -> int:
        samples = [
            sample(i, i // 4, cap=32_768, worker_id=int(i in held), length=int(5 * (now - 150)) * (i in held))
            for i in range(32)
        ]
        view = PlainView(
            step=StepView(step=1, version=1, submitted_at=100.0, samples=32, groups=8),
            samples=samples,
            queued=[s for s in samples if not s.worker_id],
            workers=[worker(1, leases=len(held), max_batch=64), *coming],
        )
        answers = policy.place(view, now)
        held.update(answer.sample_id for answer in answers)
        return len(answers)

    assert placed(150.0) == 1, "they are expected within 10 s"
    assert placed(155.0) == 0
    assert placed(300.0) == 31


def test_what_a_merged_tail_freed_is_not_asked_for_again_in_that_step() -> None:
    policy = Predictive("r", PredictiveSettings(price=0.0, least_saving=1e-4))

    def asked(step: int, now: float, engines: range, most: int = 8) -> int:
        workers = [worker(i, leases=4, max_batch=64) for i in engines]
        view = PlainView(
            step=StepView(step=step, version=1, samples=512, groups=64), workers=workers, max_engines=most
        )
        return policy.engines(view, now)[0]

    policy.observe(seam.StepSubmitted(1, "train", 512, 64, 8192), 0.0)
    for i in range(1, 9):
        policy.observe(seam.WorkerJoined(i, "harvested", f"n{i}", 1), 0.0)
    assert asked(1, 50.0, range(1, 9)) == 8
    policy._mover.retired |= {7, 8}
    assert asked(1, 60.0, range(1, 9)) == 6
    assert asked(1, 61.0, range(1, 9), most=16) == 6, (
        "more are wanted than there are: what was freed goes back all the same"
    )
    policy.observe(seam.WorkerLost(8, "harvested", "n8", 1, 60.0, False, "given back"), 65.0)
    assert asked(1, 66.0, range(1, 8)) == 6
    policy.observe(seam.WorkerLost(3, "harvested", "n3", 1, 60.0, True, "preempted"), 67.0)
    assert asked(1, 68.0, range(1, 7)) == 8, "the load of those that are left is another"


def tail(context: int) -> PlainView:
    """A step's end: the trainer has 15 groups of such prompts, engine 2 a long answer, 3 and 4 one each that ends soon."""
    left = {0: (2, 600), 1: (3, 31_000), 2: (4, 31_100)}
    views = [
        sample(i, i // 4, cap=32_768, prompt_tokens=context, worker_id=left[i][0], length=left[i][1])
        if i in left
        else sample(i, i // 4, cap=32_768, prompt_tokens=context, length=900, done=True)
        for i in range(64)
    ]
    asleep = worker(1, "reserved", status="asleep", serves=False, max_batch=64)
    step = StepView(
        step=1,
        version=1,
        submitted_at=0.0,
        samples=64,
        groups=16,
        finished=61,
        delivered=15,
        reserved_awake=False,
    )
    return PlainView(
        step=step,
        samples=views,
        workers=[asleep, *(worker(i, leases=1, max_batch=64) for i in (2, 3, 4))],
        max_engines=8,
    )


def at_the_tail(view: PlainView, **settings: Any) -> tuple[Predictive, Sequence[seam.SampleMove]]:
    policy = Predictive("r", PredictiveSettings(price=0.0, **settings))
    policy.observe(seam.StepSubmitted(1, "train", 64, 16, 32_768), 0.0)
    policy.observe(seam.WindowMoved(False), 100.0)
    return policy, policy.rebalance(view, 300.0)


def test_a_tail_is_merged_and_what_is_freed_goes_back_where_the_trainer_has_work_for_longer() -> None:
    view = tail(context=40_000)
    policy, moves = at_the_tail(view)
    assert [(move.sample_id, move.from_worker, move.to_worker, move.merges) for move in moves] == [
        (1, 3, 4, True)
    ]
    assert "1 engines are emptied" in moves[0].whole
    wanted, why = policy.engines(view, 301.0)
    assert wanted == 2, "eight are wanted and three are there: one of them goes"
    assert "1 were freed by merging" in why
    policy.observe(seam.StepSubmitted(2, "train", 64, 16, 32_768), 400.0)
    assert policy.engines(view, 401.0)[0] == 8


def test_no_tail_is_merged_where_it_is_switched_off_or_the_step_would_be_longer() -> None:
    assert not at_the_tail(tail(context=40_000), tails=False)[1]
    assert not at_the_tail(tail(context=100))[1], "the trainer waits for the last answers"


@pytest.mark.parametrize("cap", [1000, 131_071, 131_072, 5_000_000])
def test_any_cap_is_looked_at_in_bounded_memory(cap: int) -> None:
    policy = Predictive("r")
    policy.observe(seam.StepSubmitted(1, "train", 2, 1, cap), 0.0)
    waiting = [sample(i, 1, cap=cap, length=cap - 1) for i in range(2)]
    view = PlainView(
        step=StepView(step=1, samples=2, groups=1), samples=waiting, queued=waiting, workers=[worker(1)]
    )
    assert len(policy.place(view, 0.0)) == 2
    assert all(
        size <= 1 << 17
        for size in (len(predictive_view._octaves(bits)) for bits in range(1, LONG.bit_length() + 1))
    )


@pytest.mark.parametrize("cap", [2000, LONG + 1])
def test_a_look_at_all_samples_together_is_what_one_look_at_each_says(cap: int) -> None:
    """At moment after moment: what is kept of one (beliefs) or found once (places among the edges) is never taken for another."""
    draw, forecast, kept = random.Random(cap), Forecast(), dict[int, tuple[object, Belief]]()
    lengths = forecast.capped(cap)
    ends = [int(min(cap, 1 + draw.lognormvariate(6, 1))) for _ in range(96)]
    alone: dict[int, tuple[object, Belief]] = {}
    solved = 0
    for moment in range(60):
        had = [min(end, max(0, 9 * moment - i)) for i, end in enumerate(ends)]
        views = [
            sample(i, i // 8, cap=cap, length=n, worker_id=1 + i % 5 if n < ends[i] else 0, done=n == ends[i])
            for i, n in enumerate(had)
        ]
        if moment % 20 == 19:  # siblings are found to be more alike, and the table is another
            for end in ends:
                lengths.finished(end)
            lengths.step_ended([[500 + 100 * i] * 4 for i in range(9)])
        picture = Picture(PlainView(samples=views, workers=[]), forecast, float(moment), kept)
        running = [one for one in views if not one.done]
        table = lengths.table([one.length for one in running if one.length])
        assert picture.table == table
        beliefs: dict[int, Belief] = {}
        for group_id in dict.fromkeys(one.group_id for one in running):
            siblings = [one for one in views if one.group_id == group_id]
            known = GroupLengths(
                tuple(one.length for one in siblings if one.done),
                tuple(one.length for one in siblings if not one.done),
            )
            stamp = (
                len(known.finished),
                tuple(predictive_view._octave(n) for n in known.running),
                round(table.correlation, 2),
            )
            if group_id not in alone or alone[group_id][0] != stamp:
                alone[group_id], solved = (stamp, table.belief(known)), solved + 1
            beliefs[group_id] = alone[group_id][1]
        assert list(picture.beliefs.items()) == list(beliefs.items())
        assert picture.expected == {
            one.id: table.expected(beliefs[one.group_id], one.length) - one.length for one in running
        }
        held: dict[int, list[int]] = {}
        for one in running:
            held.setdefault(one.worker_id, []).append(one.id)
        assert {key: [one.id for one in those] for key, those in picture.held.items()} == held
    assert 200 < solved < 60 * 12, "some beliefs were kept, and most were not"


def test_work_of_many_samples_is_the_sum_of_each_ones() -> None:
    draw, curve = random.Random(4), SpeedCurve(7e-3, 2e-5, 6e-8)
    held = [(draw.uniform(1, 9000), draw.uniform(1, 9000)) for _ in range(100)]
    assert curve.works_s(held) == sum(curve.work_s(have, rest) for have, rest in held)
    assert curve.works_s([]) == 0


def test_a_thousand_engines_that_load_are_reckoned_with_by_the_second() -> None:
    forecast = Forecast()
    forecast.capped(1000)
    coming = [
        worker(i, status="loading", serves=False, joined_at=100.0 + 50 * i / 1000, warm=False)
        for i in range(1000)
    ]
    view = PlainView(
        step=StepView(step=1, samples=4, groups=1), samples=[sample(i, 1) for i in range(4)], workers=coming
    )
    arrivals = Picture(view, forecast, 155.0, {}).situation(0.0).arrivals
    assert len(arrivals) <= 51
    assert sum(more for _, more in arrivals) == 1000


def test_caches_and_best_batches_that_engines_told_hold_for_moves_and_the_fleets_size_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = Predictive("r")
    policy.observe(seam.StepSubmitted(1, "train", 8, 2, 1000), 0.0)
    workers = [
        worker(1, "reserved", cache_tokens=9000),
        worker(2, leases=4, cache_tokens=5000, best_batch=3),
        worker(3, leases=4),
    ]
    held = [sample(i, i // 4, worker_id=2 + i // 4) for i in range(8)]
    view = PlainView(
        step=StepView(step=1, samples=8, groups=2), samples=held, workers=workers, max_engines=4, max_batch=4
    )
    loads: list[migration.EngineLoad] = []
    monkeypatch.setattr(migration, "rebalance", lambda found, *_: loads.extend(found) or [])
    policy.rebalance(view, 100.0)
    assert {load.worker_id: (load.cache, load.limit) for load in loads} == {
        1: (9000.0, 4),
        2: (5000.0, 3),
        3: (math.inf, 4),
    }
    seen: list[Any] = []
    sized = windows.size_fleet
    monkeypatch.setattr(windows, "size_fleet", lambda whole, *more: seen.append(whole) or sized(whole, *more))
    policy.engines(view, 100.0)
    assert (seen[0].reserved.cache, seen[0].harvested.cache) == (9000.0, 5000.0)


def test_the_fleet_is_sized_again_after_a_step_in_which_an_engine_came_or_was_lost_or_some_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sized: list[windows.FleetSize] = []
    solved = windows.size_fleet

    def size(situation: Situation, most: int, least_saving: float) -> windows.FleetSize:
        sized.append(solved(situation, most, least_saving))
        return sized[-1]

    monkeypatch.setattr(windows, "size_fleet", size)
    policy = Predictive("r")
    policy.observe(seam.StepSubmitted(1, "train", 8, 2, 1000), 0.0)
    view = PlainView(
        step=StepView(step=1, samples=8, groups=2), workers=[worker(1, "reserved"), worker(2)], max_engines=4
    )

    def step(*facts: seam.Fact) -> int:
        """How often it is sized in the step and right after it."""
        before = len(sized)
        for fact in facts:
            policy.observe(fact, 1.0)
            policy.engines(view, 1.0)
        policy._fleet.step_ended(0.1)
        policy.engines(view, 1.0)
        return len(sized) - before

    assert step() == 1, "the first time"
    assert [step() for _ in range(SIZE_STEPS)] == [0] * (SIZE_STEPS - 1) + [1]
    assert step(seam.WorkerLost(2, "harvested", "n2", 1, 10.0, True, "preempted")) == 1
    assert step() == 0
    assert step(seam.WorkerReady(3, "harvested", "n3", 1, 1, True, 40.0, 5.0, 35.0)) == 1
    assert step(seam.WorkerReady(3, "harvested", "n3", 1, 2, False, 0.0, 5.0, 0.0)) == 0, (
        "it only loaded the next version"
    )


def test_a_run_that_asks_for_no_engine_tries_one_now_and_then() -> None:
    """Starts may have become short since: without a trial nobody would ever know."""
    sizer = FleetSizer(0.003, FleetSizeRules())
    forecast = Forecast()
    forecast.capped(1000)
    for at in range(200):  # engines that are lost long before they are ready
        forecast.observe(seam.WorkerJoined(at, "harvested", "n", 1), float(at))
        forecast.observe(seam.WorkerLost(at, "harvested", "n", 1, 2.0, True, "SIGTERM"), float(at))

    def asked(now: float, *workers: WorkerView) -> int:
        view = PlainView(
            step=StepView(step=1, samples=8, groups=2), workers=[worker(1, kind="reserved"), *workers]
        )
        return sizer.engines(view, forecast, now)[0]

    assert asked(1000.0) == 0
    assert sizer.benefit is not None
    assert sizer.benefit.saving is not None
    assert asked(1000.0 + TRIAL_S - 1) == 0
    assert asked(1000.0 + TRIAL_S) == 1
    assert sizer.benefit.saving is None, "nobody knows what it would save"
    assert asked(1001.0 + TRIAL_S, worker(2, status="loading")) == 1, "it may finish its start"
    assert asked(1040.0 + TRIAL_S, worker(2)) == 0, "and goes, if nothing changed by it"
    assert asked(1041.0 + TRIAL_S) == 0
    assert asked(1041.0 + 2 * TRIAL_S) == 1


def test_a_fleet_of_which_none_ever_comes_asks_for_one_on_trial() -> None:
    """Whatever keeps the harvester from asking for any: by what it learned of idle GPUs they may never be worth a start."""
    policy = Predictive("r", PredictiveSettings(price=0.5))
    policy.observe(seam.StepSubmitted(1, "train", 64, 8, cap=4000), 1.0)
    policy.observe(seam.WorkerReady(2, "harvested", "n2", 1, 1, True, 40.0, 5.0, 35.0), 50.0)
    step = StepView(step=1, samples=64, groups=8)

    def asked(now: float, *workers: WorkerView) -> tuple[int, float | None]:
        view = PlainView(
            step=step, workers=[worker(1, kind="reserved"), *workers], max_engines=6, max_batch=32
        )
        engines, _ = policy.engines(view, now)
        found = policy.benefit()
        return engines, found.saving if found else None

    all_of_them, saving = asked(100.0)
    assert all_of_them > 1
    assert saving
    assert asked(100.0 + TRIAL_S - 1) == (all_of_them, saving)
    assert asked(100.0 + TRIAL_S) == (1, None)
    assert asked(101.0 + TRIAL_S, worker(2, status="loading"))[0] == all_of_them
    assert asked(102.0 + TRIAL_S)[0] == all_of_them, "it is lost: the time begins anew"


# ---------------------------------------------------------------- an engine beside a service


def guest(i: int, **more: Any) -> WorkerView:
    return worker(i, bounded=True, max_batch=1, **more)


def test_a_guest_counts_in_no_forecast_of_a_step() -> None:
    """It may stop within the second: no reserved engine sleeps for it, and no slot is kept free for it."""
    forecast = Forecast()
    forecast.capped(1000)
    step = StepView(step=1, samples=8, groups=2, submitted_at=0.0)
    samples = [sample(i, i // 4) for i in range(8)]
    alone = [worker(1, kind="reserved"), worker(2)]
    beside = [*alone, guest(3, gpus=8), guest(4, status="loading", serves=False, warm=False)]
    without, with_guests = (
        Picture(PlainView(step=step, samples=samples, workers=workers), forecast, 1.0, {})
        for workers in (alone, beside)
    )
    found = with_guests.situation(0.0)
    assert (found.harvested, found.arrivals) == (without.situation(0.0).harvested, ())
    assert with_guests.fair_share == without.fair_share
    only = Picture(PlainView(step=step, samples=samples, workers=[beside[0], beside[2]]), forecast, 1.0, {})
    assert only.situation(0.0).harvested.engines == 0


def test_a_guest_neither_blocks_the_trial_of_the_first_harvested_engine_nor_says_its_size() -> None:
    policy = Predictive("r", PredictiveSettings(price=0.5))
    policy.observe(seam.StepSubmitted(1, "train", 64, 8, cap=4000), 1.0)
    policy.observe(seam.WorkerReady(2, "harvested", "n2", 1, 1, True, 40.0, 5.0, 35.0), 50.0)

    def asked(now: float, *workers: WorkerView) -> int:
        step = StepView(step=1, samples=64, groups=8)
        return policy.engines(PlainView(step=step, workers=workers, max_engines=6, max_batch=32), now)[0]

    mine, beside = worker(1, kind="reserved"), guest(3, gpus=8)
    asked(100.0, mine, beside)
    assert policy.benefit() is not None
    assert policy.benefit().gpus == 1  # type: ignore[union-attr]
    assert asked(100.0 + TRIAL_S, mine, beside) == 1, "on trial: none has come"
    assert asked(101.0 + TRIAL_S, beside) == 1, "also where it is all that there is"


def test_how_a_guest_lives_and_how_fast_it_is_says_nothing_of_harvested_engines() -> None:
    def learned(*facts: seam.Fact) -> tuple[float, float, float]:
        forecast = Forecast()
        for at, fact in enumerate(facts):
            forecast.observe(fact, float(at))
        curve = forecast.curve("harvested", 1)
        return forecast.loss_per_s(1, 100.0), forecast.start.value, curve.step_s(8, 800)

    def life(*, bounded: bool) -> list[seam.Fact]:
        return [
            seam.WorkerJoined(1, "harvested", "n", 1, bounded),
            seam.WorkerReady(1, "harvested", "n", 1, 1, True, 400.0, 5.0, 35.0, bounded),
            seam.EngineProgress(1, "harvested", "n", 1, 8, 800.0, 8, 30.0, bounded),
            seam.WorkerLost(1, "harvested", "n", 1, 2.0, True, "SIGTERM", 0, bounded),
        ]

    assert learned(*life(bounded=True)) == learned()
    assert all(a != b for a, b in zip(learned(*life(bounded=False)), learned(), strict=True))
