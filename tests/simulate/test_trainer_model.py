"""What training costs, against hand-computed cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.simulate import presets
from scavenger.simulate.decode import GpuDatasheet, Model
from scavenger.simulate.trainer_model import (
    TrainerSpec,
    forward_flops,
    gather_s,
    micro_step_s,
    optimizer_s,
    pack,
    publish_s,
    rank_s,
    state_bytes_per_gpu,
    to_generating_s,
    to_training_s,
)

# 1376 weights in products, 2176 in all, 32 attention FLOPs a pair: see test_decode.py
TINY = Model("tiny", layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=100)
PLAIN = GpuDatasheet(
    "plain",
    memory_bytes=1e6,
    bandwidth_bytes_s=1000.0,
    dense_flops=10_000.0,
    nvlink_bytes_s=500.0,
    host_bytes_s=100.0,
)
SPEC = TrainerSpec(TINY, PLAIN, ranks=2, compute=0.5, link_bytes_s=1e12, nic_bytes_s=1000.0, overhead_s=0.25)


def test_a_forward_pass_is_two_flops_a_weight_and_causal_attention_within_each_sequence() -> None:
    assert forward_flops(TINY, [10]) == 2 * 1376 * 10 + 32 * (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9 + 10)
    # packed sequences do not attend to each other
    assert forward_flops(TINY, [10, 10]) == 2 * forward_flops(TINY, [10]) < forward_flops(TINY, [20])
    assert forward_flops(TINY, []) == 0


def test_a_rank_pays_forward_backward_recomputing_and_extra_forwards() -> None:
    once = forward_flops(TINY, [10]) / 5000
    assert rank_s(SPEC, [10]) == pytest.approx(4 * once)
    assert rank_s(replace(SPEC, recompute=False), [10]) == pytest.approx(3 * once)
    assert rank_s(replace(SPEC, forwards=2), [10]) == pytest.approx(6 * once)


def test_a_micro_step_takes_as_long_as_its_slowest_rank() -> None:
    assert micro_step_s(SPEC, [[10, 10], [30]]) == pytest.approx(0.25 + rank_s(SPEC, [30]))
    assert micro_step_s(SPEC, [[10, 20], []]) == pytest.approx(0.25 + rank_s(SPEC, [10, 20]))
    # as many tokens, but attention's L^2 makes the one long sequence slower
    assert micro_step_s(SPEC, [[30], []]) > micro_step_s(SPEC, [[10, 20], []])
    with pytest.raises(ValueError, match="1 ranks have work and there are 2"):
        micro_step_s(SPEC, [[10]])


def test_traffic_that_outlasts_computing_sets_the_time() -> None:
    slow = replace(SPEC, link_bytes_s=100.0)
    # two gathers of 2176 bf16 and one reduce-scatter of 2176 fp32, half of each from the other rank
    assert gather_s(slow) == pytest.approx((2 * 4352 / 2 + 8704 / 2) / 100)
    assert micro_step_s(slow, [[1], [1]]) == pytest.approx(0.25 + gather_s(slow))
    assert gather_s(replace(slow, ranks=1)) == 0.0


def test_the_optimizer_reads_and_writes_each_ranks_state_once() -> None:
    # 2176 / 2 parameters a rank: 16 bytes read, 16 written, 2 of the cast
    assert optimizer_s(SPEC) == pytest.approx(1088 * 34 / 1000)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 8), st.integers(50, 400))
def test_packing_places_every_sequence_once_within_the_budget(
    lengths: list[int], ranks: int, budget: int
) -> None:
    steps = pack(TINY, lengths, ranks, budget)
    assert sorted(length for step in steps for rank in step for length in rank) == sorted(lengths)
    for step in steps:
        assert len(step) == ranks
        assert any(step)
        for rank in step:
            assert sum(rank) <= budget or len(rank) == 1


def test_packing_balances_work_not_counts() -> None:
    assert pack(TINY, [100, 40, 40, 40], 2, 1000) == (((100,), (40, 40, 40)),)
    assert pack(TINY, [60, 60, 60], 2, 100) == (((60,), (60,)), ((60,), ()))


def test_the_toggle_moves_state_and_weights_over_pcie_both_ways() -> None:
    spec = replace(SPEC, sleep_s=1.5, wake_s=2.5)
    assert state_bytes_per_gpu(spec) == 2176 * 16 / 2
    assert to_training_s(spec, offloaded=True) == pytest.approx(1.5 + 17_408 / 100)
    assert to_training_s(spec, offloaded=False) == 1.5
    assert to_generating_s(spec, offload=True, engine_gpus=2) == pytest.approx(
        2.5 + 4352 / 2 / 100 + 17_408 / 100
    )
    assert to_generating_s(spec, offload=False) == pytest.approx(2.5 + 43.52)


def test_state_that_stays_takes_its_room_from_a_reserved_engines_kv() -> None:
    trainer = TrainerSpec(
        presets.QWEN3_8B, presets.H100, ranks=8, compute=0.4, link_bytes_s=400e9, nic_bytes_s=25e9
    )
    engine = presets.engine("Qwen3-8B", "H100")
    reduced = engine.with_resident(state_bytes_per_gpu(trainer))
    lost = state_bytes_per_gpu(trainer) / engine.model.kv_bytes_per_token
    assert engine.kv_capacity - reduced.kv_capacity == pytest.approx(lost, abs=1)


def test_publishing_hashes_a_shard_a_rank() -> None:
    assert publish_s(replace(SPEC, hash_bytes_s=100.0)) == pytest.approx(4352 / 2 / 100)
    assert publish_s(SPEC) == 0.0


def test_an_8b_step_on_8_h100_is_of_the_expected_order() -> None:
    trainer = TrainerSpec(
        presets.QWEN3_8B, presets.H100, ranks=8, compute=0.4, link_bytes_s=400e9, nic_bytes_s=25e9
    )
    lengths = [4000] * 1024
    took = sum(
        micro_step_s(trainer, ranks) for ranks in pack(trainer.model, lengths, 8, 32_000)
    ) + optimizer_s(trainer)
    # 8 FLOPs a weight and token at 40 % of 8 x 989 TFLOPS, attention adding to it
    assert 1.0 < took / (8 * 7.57e9 * 4000 * 1024 / (8 * 989.4e12 * 0.4)) < 1.5
