"""Formulas that are written out a second time for speed, and models of one thing in two places: each pair says the same."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from scavenger.policy.forecast import step
from scavenger.policy.forecast.service import Outstanding
from scavenger.policy.forecast.speed import CurveFit, SpeedCurve
from scavenger.policy.forecast.step import NEVER, Costs, EnginePool, Situation, StepModel
from scavenger.simulate import presets
from scavenger.simulate.sequences import EngineBatch, Finished, SimulatedRequest

ENGINE = presets.engine("Qwen3-8B", "H100")
LINE = SpeedCurve(7e-3, 2e-5, 6e-8)
FREE = Costs(0.0, 0.0)


@pytest.mark.parametrize("loss_per_s", [0.0, 1e-3, 0.2])
@pytest.mark.parametrize("cache", [NEVER, 60_000.0])
def test_a_step_that_ends_with_harvested_engines_alone_is_paced_as_any_other(
    monkeypatch: pytest.MonkeyPatch, loss_per_s: float, cache: float
) -> None:
    """`_Fleet.alone` writes `pace` out."""
    draw = random.Random(7)
    samples = tuple(
        Outstanding(draw.uniform(50, 900), draw.lognormvariate(6, 0.9), group)
        for group in range(30)
        for _ in range(8)
    )
    pools = EnginePool(LINE, 2.0, 16, cache), EnginePool(replace(LINE, base=9e-3), 3.0, 16, cache)
    at = Situation(*pools, FREE, samples, loss_per_s=loss_per_s)
    windows = [0.0, 3.0, 40.0]
    short = [StepModel(at).close_s(window) for window in windows]
    monkeypatch.setattr(step._Fleet, "alone_after", lambda self, t: False)
    assert [StepModel(at).close_s(window) for window in windows] == pytest.approx(short, rel=1e-12)
    assert (NEVER in short) == (loss_per_s == 0.2), (
        "with engines that are soon all lost the step never ends, by both"
    )


def test_a_heartbeats_progress_is_each_samples_own() -> None:
    """`EngineBatch.progress` writes `generated` out."""
    draw, batch = random.Random(3), EngineBatch(ENGINE)
    batch.add(
        [
            SimulatedRequest(key, key // 4, 300, draw.randrange(50), 60 + draw.randrange(900))
            for key in range(64)
        ],
        0.0,
    )
    looks = 0
    while batch.size:
        now = batch.next_time() - 1e-3 if looks % 2 else batch.next_time()
        batch.advance(now)
        assert batch.progress(now) == {key: batch.generated(key, now) for key in batch}
        looks += 1
        batch.advance(batch.next_time()) if batch.size else None
    assert looks > 20


@pytest.mark.parametrize("seed", range(4))
def test_an_engine_drains_as_controllers_predict_from_what_they_measured_of_it(seed: int) -> None:
    """`forecast_step` reckons with a straight line and a fluid, `sequences` with the engine's own curves and each sample."""
    draw, fit = random.Random(seed), CurveFit()
    for batch in (1, 4, 16, 48, 64):
        for each in (300, 1500, 4000):
            fit.observe(batch, batch * each, ENGINE.step_s(batch, batch * each))
    rests = [round(draw.lognormvariate(6.5, 0.7)) + 1 for _ in range(64)]
    engine = EngineBatch(ENGINE)
    engine.add([SimulatedRequest(key, key // 8, 400, 0, rest) for key, rest in enumerate(rests)], 0.0)
    ends: list[float] = []
    started_s = engine.next_time()  # the prefill is no part of the prediction
    while engine.size:
        ends += [
            one.time_s - started_s for one in engine.advance(engine.next_time()) if isinstance(one, Finished)
        ]
    samples = tuple(Outstanding(400.0, float(rest), key // 8) for key, rest in enumerate(rests))
    alone = Situation(EnginePool(fit.curve(), 1.0, 64), EnginePool(fit.curve(), 0.0, 64), FREE, samples)
    model = StepModel(alone)
    assert model.end_s == pytest.approx(ends[-1], rel=0.06)
    halfway_s = next(
        t
        for t, left in zip(model.times, [*model.profile.count[1:], 0], strict=True)
        if left <= len(rests) / 2
    )
    assert halfway_s == pytest.approx(ends[len(rests) // 2 - 1], rel=0.06)
    assert fit.curve().drain_s([(400.0, float(rest)) for rest in rests]) == pytest.approx(ends[-1], rel=0.06)
