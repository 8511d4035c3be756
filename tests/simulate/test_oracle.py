"""The oracle's bound: proven in its docstring, and here never beaten by anything that engines and trainer can play."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.oracle import OracleEngine, OracleGroup, OracleStep, bound, least_training_s
from scavenger.errors import ConfigError
from scavenger.simulate import presets
from scavenger.simulate.decode import SimulatedEngine
from scavenger.simulate.sequences import EngineBatch, SimulatedRequest
from scavenger.simulate.trainer_model import TrainerSpec, micro_step_s, pack
from tests.simulate.one_step import Fixed, Play

H100 = presets.engine("Qwen3-8B", "H100")
TRAINER = TrainerSpec(
    presets.QWEN3_8B, presets.H100, ranks=2, compute=0.4, link_bytes_s=4e11, nic_bytes_s=25e9, overhead_s=0.2
)


class Wild:
    """A random plan: places, moves, closes and opens as the draw says."""

    def __init__(self, draw: random.Random, horizon_s: float, calm: bool) -> None:
        self._draw = draw
        self._flips = sorted(draw.uniform(0, horizon_s) for _ in range(draw.choice([0, 1, 1, 1, 3])))
        self._open = draw.random() < 0.8
        shakes = [] if calm else [draw.uniform(0, horizon_s) for _ in range(draw.randint(0, 6))]
        self.times: Sequence[float] = (*self._flips, *shakes)

    def where(self, key: int, generated: int, up: Sequence[int], play: Play) -> int | None:
        if self._draw.random() < 0.7:
            return min(up, key=lambda index: (play.load[index] / play.step.engines[index].spec.gpus, index))
        return self._draw.choice(up)

    def moves(self, play: Play) -> list[tuple[int, int, int]]:
        up = sorted(play.batches)
        keys = [(key, index) for index in up for key in play.batches[index]]
        chosen = self._draw.sample(keys, min(len(keys), self._draw.randint(0, 5)))
        return [(key, index, self._draw.choice(up)) for key, index in chosen]

    def awake(self, play: Play) -> bool:
        wanted = self._open ^ (sum(flip <= play.now for flip in self._flips) % 2 == 1)
        return wanted or not play.harvested_later()


def specs(draw: random.Random) -> list[SimulatedEngine]:
    pool = [
        H100,
        replace(H100, max_sequences=draw.choice([4, 16, 64])),
        presets.engine("Qwen3-8B", "H100", 2),
        presets.engine("Qwen3-8B", "A100"),
        H100.with_resident(draw.uniform(40e9, 52e9)),
    ]
    return draw.sample(pool, draw.randint(1, 3))


def instance(seed: int) -> OracleStep:
    draw = random.Random(seed)
    scale = draw.choice([60, 400, 1500])
    correlated = draw.random()
    groups = []
    for _ in range(draw.choice([1, 3, 10, 24])):
        middle = draw.lognormvariate(math.log(scale), 0.8)
        targets = tuple(
            max(
                1,
                min(
                    6 * scale,
                    round(correlated * middle + (1 - correlated) * draw.lognormvariate(math.log(scale), 0.8)),
                ),
            )
            for _ in range(draw.choice([1, 2, 8]))
        )
        groups.append(OracleGroup(draw.choice([1, 30, 200, 1000]), targets))
    kinds = specs(draw)
    engines = [OracleEngine(draw.choice(kinds), reserved=True) for _ in range(draw.randint(1, 3))]
    for _ in range(draw.randint(0, 5)):
        start = draw.choice([0.0, draw.uniform(0, 20)])
        spans = [(start, draw.choice([math.inf, start + draw.expovariate(1 / 20)]))]
        if draw.random() < 0.3 and spans[0][1] < math.inf:
            spans.append((spans[0][1] + draw.uniform(1, 20), math.inf))
        engines.append(OracleEngine(draw.choice(kinds), tuple(spans)))
    trainer = replace(
        TRAINER,
        ranks=draw.choice([1, 2, 8]),
        compute=draw.choice([0.05, 0.4]),
        overhead_s=draw.choice([0.0, 0.3]),
    )
    toggle, reward = draw.choice([0.0, 4.0]), draw.choice([0.0, 0.0, 1.0])
    return OracleStep(
        tuple(groups),
        tuple(engines),
        trainer,
        draw.choice([2000, 16_000]),
        toggle,
        toggle / 2,
        draw.random() < 0.7,
        0.5,
        reward,
    )


def test_no_schedule_beats_the_bound_on_200_random_instances(capsys: pytest.CaptureFixture[str]) -> None:
    ratios, reasons = [], []
    for seed in range(200):
        step = instance(seed)
        found = bound(step)
        best = math.inf
        for attempt in range(3):
            draw = random.Random(1000 * seed + attempt)
            play = Play(step, Wild(draw, horizon_s=2 * found.total_s, calm=attempt == 0))
            took = play.run()
            assert took >= found.total_s, (seed, attempt, found)
            assert play.decoded + sum(batch.decoded_tokens for batch in play.batches.values()) == sum(
                play.target
            )
            best = min(best, took)
        ratios.append(best / found.total_s)
        reasons.append(found.reason)
    mean, middle = statistics.mean(ratios), statistics.median(ratios)
    counts = {reason: reasons.count(reason) for reason in sorted(set(reasons))}
    with capsys.disabled():
        print(
            f"\nbest of 3 random schedules over the bound: mean {mean:.2f}, median {middle:.2f}, least {min(ratios):.4f}; bound by {counts}"
        )
    assert len(counts) == 3, "the instances exercise every part of the bound"
    assert middle < 2.0


def alike(samples: int, engines: int, length: int, spec: SimulatedEngine = H100) -> OracleStep:
    gpu = replace(presets.H100, dense_flops=1e20, bandwidth_bytes_s=1e18)
    quick = replace(TRAINER, gpu=gpu, overhead_s=0.0, link_bytes_s=1e18)
    group = OracleGroup(100, (length,) * 8)
    return OracleStep(
        (group,) * (samples // 8), tuple(OracleEngine(spec) for _ in range(engines)), quick, 16_000
    )


@pytest.mark.parametrize(
    ("samples", "engines", "slots"), [(64, 1, 256), (64, 4, 256), (512, 2, 64), (256, 8, 256)]
)
def test_with_equal_lengths_on_equal_engines_the_bound_is_what_even_filling_takes(
    samples: int, engines: int, slots: int
) -> None:
    step = alike(samples, engines, 2000, replace(H100, max_sequences=slots))
    to = {key: key // 8 % engines for key in range(samples)}
    took = Play(step, Fixed(to, 0.0)).run()
    assert 1.0 <= took / bound(step).total_s < (1.06 if samples // engines <= slots else 1.10)


def test_the_price_of_a_samples_time_matters_where_samples_are_few() -> None:
    # 8 samples on each of 8 engines: without it each engine would count as full
    step = alike(64, 8, 2000)
    full = alike(64, 8, 2000, replace(H100, max_sequences=8))
    assert bound(step).work_s == pytest.approx(bound(full).work_s, rel=0.05)


def test_a_single_sample_takes_its_steps_one_by_one() -> None:
    step = OracleStep((OracleGroup(500, (3000,)),), (OracleEngine(H100),), TRAINER, 16_000, publish_s=1.5)
    batch = EngineBatch(H100)
    batch.add([SimulatedRequest(0, 0, 500, 0, 3000)], 0.0)
    while batch.size:
        done = batch.next_time()
        batch.advance(done)
    train = micro_step_s(TRAINER, pack(TRAINER.model, [3500], 2, 16_000)[0])
    assert bound(step).total_s == pytest.approx(done + train + step.end_s, rel=1e-4)
    assert bound(step).total_s <= done + train + step.end_s


def test_training_waits_for_the_first_group_and_no_micro_step_is_free() -> None:
    slow = replace(TRAINER, compute=0.002)
    groups = (OracleGroup(100, (50, 60)), OracleGroup(100, (300, 200)), OracleGroup(100, (400,)))
    step = OracleStep(groups, (OracleEngine(H100),), slow, 1000, publish_s=2.0)
    found = bound(step)
    assert found.reason == "training"
    first = H100.prefill_s(100) + sum(H100.step_s(1, 100 + token) for token in range(60))
    assert found.train_s == pytest.approx(first + least_training_s(step, [0, 1, 2])[0] + step.end_s, rel=1e-3)
    # 1,110 + 200 tokens on two ranks of 1,000: one micro-step at the least; at a budget of 400 two (a rank holds the longest, 500)
    assert (
        least_training_s(step, [0, 1, 2])[0] < least_training_s(replace(step, token_budget=400), [0, 1, 2])[0]
    )


def test_reserved_gpus_do_not_generate_and_train_at_once() -> None:
    alone = replace(alike(512, 4, 1500), trainer=replace(TRAINER, compute=0.1))
    reserved = replace(
        alone, engines=tuple(replace(engine, reserved=True) for engine in alone.engines), to_training_s=5.0
    )
    train = least_training_s(alone, range(64))[0]
    assert bound(reserved).work_s > bound(alone).work_s + 4.9
    assert bound(reserved).work_s > train + 5.0 + reserved.end_s


def test_an_engine_counts_only_while_it_is_there() -> None:
    late = OracleEngine(H100, ((30.0, math.inf),))
    step = alike(256, 1, 1000)
    assert bound(replace(step, engines=(late,))).total_s >= 30.0 + bound(step).total_s - 0.1
    gone = OracleEngine(H100, ((0.0, 1.0),))
    assert math.isinf(bound(replace(step, engines=(gone,))).work_s)
    both = replace(step, engines=(late, gone))
    assert bound(step).total_s < bound(both).total_s < bound(replace(step, engines=(late,))).total_s


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 groups"):
        OracleStep((), (OracleEngine(H100),), TRAINER, 1000)
    with pytest.raises(ConfigError, match="0 prompt tokens"):
        OracleGroup(0, (3,))


# ---------------------------------------------------------------- exhaustive


def exhaustive(step: OracleStep, windows: Sequence[float]) -> float:
    """The best step time over all assignments of samples to engines (equal engines and siblings told apart by nothing) and windows."""
    samples = step.samples
    shapes = [(group.prompt_tokens, target) for group in step.groups for target in group.targets]
    seen = set()
    best = math.inf
    for to in itertools.product(range(len(step.engines)), repeat=samples):
        loads = [
            tuple(sorted(shapes[key] for key in range(samples) if to[key] == index))
            for index in range(len(step.engines))
        ]
        shape = tuple(sorted((repr(engine), load) for engine, load in zip(step.engines, loads, strict=True)))
        if shape in seen:
            continue
        seen.add(shape)
        for close in windows:
            best = min(best, Play(step, Fixed(dict(enumerate(to)), close)).run())
    return best


def small(seed: int) -> OracleStep:
    draw = random.Random(seed)
    count = draw.randint(1, 4)  # up to eight samples
    longest = draw.choice(
        [3000, 14_000]
    )  # at the longer one the KV of a few samples costs as much as the weights
    groups = tuple(
        OracleGroup(draw.choice([50, 400]), tuple(draw.randint(100, longest) for _ in range(2)))
        for _ in range(count)
    )
    engines = (
        OracleEngine(H100, reserved=True),
        *(OracleEngine(H100) for _ in range(draw.randint(1, 2) if count < 4 else 1)),
    )
    return OracleStep(
        groups,
        engines,
        replace(TRAINER, compute=draw.choice([0.05, 0.4])),
        8000,
        to_training_s=draw.choice([0.0, 2.0]),
    )


def windows_of(step: OracleStep) -> list[float]:
    longest = bound(step).longest_s
    return [0.0, 0.3 * longest, 0.7 * longest, 1.2 * longest]


def test_the_bound_stays_below_the_best_of_all_assignments_and_near_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ratios = [exhaustive(step, windows_of(step)) / bound(step).total_s for step in map(small, range(10))]
    with capsys.disabled():
        print(
            f"\nbest of all assignments over the bound: mean {statistics.mean(ratios):.3f}, worst {max(ratios):.3f}"
        )
    assert min(ratios) >= 1.0
    assert statistics.mean(ratios) < 1.05
