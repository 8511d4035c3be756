from __future__ import annotations

import random

import pytest

from tests.trainer.rows import make_group
from trainer.data.batching import (
    balanced,
    filler,
    mini_batch_of,
    one_per_group,
    pack,
    rounds,
    shuffled,
    spread,
)


def test_packing_keeps_every_row_once_and_the_budget() -> None:
    groups = [make_group(number) for number in range(5)]
    micros = pack(groups, budget=40)
    assert sorted(row.sample_id for micro in micros for row in micro.rows) == list(range(20))
    assert all(micro.computed_tokens <= 40 for micro in micros)
    assert all(row.tokens <= micro.width for micro in micros for row in micro.rows)


def test_a_row_over_the_budget_is_trained_alone() -> None:
    assert [len(micro.rows) for micro in pack([make_group(0)], budget=3)] == [1, 1, 1, 1]


def test_packing_does_not_depend_on_the_order_of_arrival() -> None:
    groups = [make_group(number) for number in range(6)]
    assert pack(groups, budget=64) == pack(random.Random(1).sample(groups, 6), budget=64)


def test_spreading_gives_every_rank_work() -> None:
    assert len(spread([make_group(0), make_group(1)], budget=10_000, ranks=4)) >= 4
    assert spread([], budget=10, ranks=2) == ()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("budget", [20, 60, 10_000])
def test_packed_rounds_hold_every_row_once_within_the_budget_and_even(ranks: int, budget: int) -> None:
    groups = [make_group(number) for number in range(9)]
    made = balanced(groups, budget=budget, ranks=ranks)
    assert {len(one) for one in made} == {ranks}
    real = [micro for one in made for micro in one if micro.rows[0].sample_id >= 0]
    assert sorted(row.sample_id for micro in real for row in micro.rows) == list(range(36))
    sizes = [micro.computed_tokens for micro in real]
    assert max(sizes) <= budget
    assert max(sizes) - min(sizes) <= max(row.tokens for group in groups for row in group)
    total = sum(row.tokens for group in groups for row in group)
    assert sum(sizes) == total, "no padding"
    if budget > total:
        assert len(made) == 1
    shuffled_too = balanced(random.Random(1).sample(groups, 9), budget=budget, ranks=ranks)
    assert made == shuffled_too, "arrival does not matter"


def test_a_row_over_the_budget_is_packed_alone() -> None:
    made = balanced([make_group(0)], budget=3, ranks=2)
    assert [[len(micro.rows) for micro in one] for one in made] == [[1, 1], [1, 1]]
    assert balanced([], budget=3, ranks=2) == ()


def test_deterministic_micro_batches_are_one_group_at_a_fixed_width() -> None:
    groups = [make_group(0), (), make_group(1)]
    micros = one_per_group(groups, width=15)
    assert [micro.rows for micro in micros] == [groups[0], groups[2]]
    assert {micro.width for micro in micros} == {15}
    with pytest.raises(ValueError, match="fixed width"):
        one_per_group(groups, width=8)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_runs_the_same_number_of_micro_steps(ranks: int) -> None:
    micros = one_per_group([make_group(number) for number in range(5)], width=15)
    made = rounds(micros, ranks)
    assert {len(one) for one in made} == {ranks}
    flat = [micro for one in made for micro in one]
    real = [micro for micro in flat if micro.rows[0].sample_id >= 0]
    assert sorted(real, key=lambda m: m.rows[0].sample_id) == list(micros)
    assert len(flat) - len(real) == -5 % ranks


def test_a_filler_has_no_answer_and_no_advantage() -> None:
    made = filler(one_per_group([make_group(0)], width=15)[0])
    assert [(row.completion, row.advantage, row.sample_id) for row in made.rows] == [(b"", 0.0, -1)]


def test_mini_batches_are_fixed_by_seed_step_and_prompts_not_by_order() -> None:
    prompts = list(range(100, 110))
    found = mini_batch_of(3, 5, prompts, 4)
    assert found == mini_batch_of(3, 5, prompts[::-1], 4)
    assert found != mini_batch_of(3, 6, prompts, 4)
    sizes = [list(found.values()).count(place) for place in range(4)]
    assert sum(sizes) == 10
    assert max(sizes) - min(sizes) <= 1


def test_a_shuffle_is_the_same_on_every_machine() -> None:
    assert shuffled(range(8), "x") == shuffled(range(8)[::-1], "x") == [7, 3, 1, 2, 5, 6, 4, 0]
    assert sorted(shuffled(range(8), "y")) == list(range(8))
