"""The roofline by hand, and its closed form against stepping token by token."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import msgspec
import pytest

from scavenger.errors import ConfigError
from scavenger.simulate.decode import (
    DecodeCurve,
    Efficiency,
    GpuDatasheet,
    Model,
    SimulatedEngine,
    Stretch,
    _bend,
)
from scavenger.simulate.presets import GPUS, MODELS, UNCALIBRATED, engine

# 1 layer, 2 query heads and 1 KV head of 4, hidden 8, intermediate 16, vocabulary 100, on round numbers
TINY = Model("tiny", layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=100)
PLAIN = GpuDatasheet(
    "plain",
    memory_bytes=20_000.0,
    bandwidth_bytes_s=1000.0,
    dense_flops=10_000.0,
    nvlink_bytes_s=500.0,
    host_bytes_s=100.0,
)
HALF = Efficiency(bandwidth=0.5, decode_compute=0.25, overhead_s=0.125, prefill_compute=0.5, memory_share=1.0)
SPEC = SimulatedEngine(TINY, PLAIN, HALF)


def test_a_model_is_counted_by_hand() -> None:
    # q 8x8, o 8x8, k 8x4, v 8x4; gate, up, down 8x16
    assert TINY.layer_parameters == 64 + 64 + 32 + 32 + 3 * 128 == 576
    assert TINY.matmul_parameters == 576 + 800
    assert TINY.parameters == 576 + 1600
    assert replace(TINY, tied=True).parameters == 576 + 800
    assert TINY.kv_bytes_per_token == 2 * 4 * 2  # k and v of one head of 4, 2 bytes each
    assert TINY.attention_flops_per_pair == 2 * (2 * 2 * 4)  # 2 products, 2 heads of 4, 2 FLOPs


def test_a_step_is_the_roofline_by_hand() -> None:
    # memory: (1376 * 2 + 16 C) / 500; compute: (2 * 1376 * B + 32 C) / 2500
    assert SPEC.step_s(1, 100) == pytest.approx(0.125 + (2752 + 1600) / 500)
    assert SPEC.step_s(10, 100) == pytest.approx(0.125 + (27_520 + 3200) / 2500)
    assert SPEC.tokens_per_s(10, 10) == pytest.approx(10 / SPEC.step_s(10, 100))


def test_kv_capacity_is_what_weights_and_training_state_leave() -> None:
    assert SPEC.kv_capacity == (20_000 - 2176 * 2) // 16
    assert SPEC.with_resident(8000.0).kv_capacity == (20_000 - 8000 - 4352) // 16
    assert replace(SPEC, gpus=2).kv_capacity == (40_000 - 4352) // 16
    with pytest.raises(ConfigError, match="no memory for KV"):
        SPEC.with_resident(16_000.0)


def test_two_gpus_halve_the_roofline_and_pay_for_their_all_reduces() -> None:
    two = replace(SPEC, gpus=2, efficiency=replace(HALF, allreduce_latency_s=0.01))
    # twice a layer: latency, and 2 (g - 1) / g of B * 8 * 2 bytes at 500 bytes/s
    assert two.step_s(4, 100) == pytest.approx(
        0.125 + 2 * (0.01 + 64 / 500) + max((2752 + 1600) / 1000, (11_008 + 3200) / 5000)
    )


def test_prefill_by_hand_alone_after_a_shared_prompt_and_again_after_a_move() -> None:
    def seconds(tokens: int, pairs: float) -> float:
        return 0.125 + max((2752 * tokens + 32 * pairs) / 5000, 2752 / 500)

    assert SPEC.prefill_s(50) == pytest.approx(seconds(50, 50 * 51 / 2))
    assert SPEC.prefill_s(1) == pytest.approx(0.125 + 2752 / 500)  # bound by one read of the weights
    assert SPEC.prefill_s(20, cached_tokens=50) == pytest.approx(seconds(20, 20 * 50 + 20 * 21 / 2))
    # a move costs prompt and answer; with the prompt in a sibling's cache only the answer
    assert SPEC.prefill_s(70) > SPEC.prefill_s(20, cached_tokens=50)
    assert SPEC.prefill_s(0, 50) == 0.0
    # prefilled in one go: the work adds up, overhead and floor are paid once
    assert SPEC.prefill_many_s([(50, 0), (20, 50)]) == pytest.approx(seconds(70, 50 * 51 / 2 + 20 * 50 + 210))
    assert replace(SPEC, prefill_chunk=32).prefill_s(50) == pytest.approx(seconds(50, 1275) + 0.125)


def stepped(curve: DecodeCurve, batch: int, context: float, steps: int) -> float:
    return math.fsum(curve.at(context + k * batch) for k in range(steps))


def test_the_closed_form_equals_stepping_token_by_token_over_random_batches() -> None:
    draw = random.Random(11)
    bent = 0
    for _ in range(150):
        spec = engine(draw.choice(sorted(MODELS)), draw.choice(sorted(GPUS)), 2)
        # some engines of little compute, whose roofline bends within the stretch
        spec = replace(spec, efficiency=replace(UNCALIBRATED, decode_compute=draw.choice([0.6, 0.1, 0.02])))
        batch, steps = draw.randint(1, 256), draw.randint(1, 4000)
        stretch = Stretch(spec.curve(batch), batch, float(draw.randint(batch, batch * 8000)))
        exact = stepped(stretch.curve, batch, stretch.context, steps)
        assert stretch.seconds(steps) == pytest.approx(exact, rel=1e-9)
        assert stretch.steps(exact) == pytest.approx(steps, rel=1e-9)
        bent += 0 < _bend(*stretch._lines()) < steps
    assert bent >= 3  # the bend is tested, not only the straight part


@pytest.mark.parametrize(
    ("memory", "compute"), [((10.0, 0.5), (40.0, 0.1)), ((40.0, 0.1), (10.0, 0.5)), ((1.0, 0.0), (2.0, 0.0))]
)
def test_the_bend_is_found_whichever_side_leads_first(
    memory: tuple[float, float], compute: tuple[float, float]
) -> None:
    curve = DecodeCurve(
        overhead=1.0, memory=memory[0], memory_slope=memory[1], compute=compute[0], compute_slope=compute[1]
    )
    stretch = Stretch(curve, batch=3, context=5.0)
    for steps in (0, 1, 20, 24, 25, 26, 300):
        exact = stepped(curve, 3, 5.0, steps)
        assert stretch.seconds(steps) == pytest.approx(exact, rel=1e-12)
        assert stretch.steps(exact) == pytest.approx(steps, abs=1e-9)


def test_stretches_add_up_wherever_they_are_cut() -> None:
    stretch = Stretch(engine("Qwen3-8B", "H100").curve(64), 64, 64 * 1000.0)
    for cut in (1, 17.3, 500.9):
        rest = msgspec.structs.replace(stretch, context=stretch.context + cut * 64)
        assert stretch.seconds(cut) + rest.seconds(1000 - cut) == pytest.approx(
            stretch.seconds(1000), rel=1e-6
        )


def test_decoding_slows_as_context_grows() -> None:
    stretch = Stretch(engine("Qwen3-8B", "H100").curve(128), 128, 128 * 500.0)
    assert stretch.seconds(2000) - stretch.seconds(1000) > 1.1 * stretch.seconds(1000)


@pytest.mark.parametrize("context", [500, 4000, 16_000])
def test_the_plateau_is_the_smallest_batch_near_the_best_throughput(context: int) -> None:
    spec = engine("Qwen3-8B", "H100")
    best = max(spec.tokens_per_s(batch, context) for batch in range(1, spec.max_batch(context) + 1))
    plateau = spec.plateau(context, 0.9)
    assert spec.tokens_per_s(plateau, context) >= 0.9 * best
    assert plateau == 1 or spec.tokens_per_s(plateau - 1, context) < 0.9 * best
    assert spec.plateau(context, 1.0) <= spec.max_batch(context)
    with pytest.raises(ValueError, match="share"):
        spec.plateau(context, 0.0)


def test_only_a_batch_of_at_least_one_has_a_cost() -> None:
    with pytest.raises(ValueError, match="batch of 0"):
        SPEC.curve(0)
