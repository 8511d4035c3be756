from __future__ import annotations

import math
from itertools import combinations

import pytest

from scavenger.ledger import redaction
from trainer.loop.metrics import Judgement, pass_at_k, spread, summarise_evaluation


@pytest.mark.parametrize(("n", "right", "k"), [(5, 0, 2), (5, 2, 1), (5, 2, 3), (5, 4, 2), (4, 4, 4)])
def test_pass_at_k_is_the_share_of_all_choices_that_hold_a_right_answer(n: int, right: int, k: int) -> None:
    choices = list(combinations([True] * right + [False] * (n - right), k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_an_evaluation_s_figures() -> None:
    def answers(*rewards: float) -> list[Judgement]:
        return [Judgement(reward, 4 + place, reward == 0.0) for place, reward in enumerate(rewards)]

    found = summarise_evaluation([answers(1, 0, 0, 0), answers(1, 1, 0.5)], [answers(1), answers()])
    assert found == {
        "eval_sampled": pytest.approx(3.5 / 7),
        "eval_greedy": 1.0,
        "eval_length_mean": pytest.approx((4 + 5 + 6 + 7 + 4 + 5 + 6) / 7),
        "eval_cut_fraction": pytest.approx(3 / 7),
        "eval_pass_at_1": pytest.approx((1 / 4 + 2 / 3) / 2),
        "eval_pass_at_2": pytest.approx((1 / 2 + 1) / 2),
        "eval_pass_at_4": 1.0,
    }
    assert summarise_evaluation([], [])["eval_sampled"] == 0.0


def test_a_reward_below_1_may_count_as_solved_and_parts_and_sets_have_metrics_of_their_own() -> None:
    sampled = [[Judgement(0.5, 3, False), Judgement(0.2, 3, False)], [Judgement(0.6, 3, False)]]
    assert summarise_evaluation(sampled, [])["eval_pass_at_1"] == 0.0
    found = summarise_evaluation(sampled, [], 0.5, [{"right": 1.0}, {"right": 0.0, "form": 0.5}], "math")
    assert found["eval_math_pass_at_1"] == pytest.approx((1 / 2 + 1) / 2)
    assert (found["eval_math_reward_right"], found["eval_math_reward_form"]) == (0.5, 0.5)
    assert all(name.startswith("eval_math_") for name in found)


def test_a_step_s_metrics_have_the_spread_of_its_rewards() -> None:
    found = spread([1.0, 0.0, 0.5, 0.5])
    assert found == {
        "reward": 0.5,
        "reward_std": pytest.approx(math.sqrt(0.125)),
        "reward_min": 0.0,
        "reward_max": 1.0,
    }
    assert set(spread([]).values()) == {0.0}
    assert found.keys() <= redaction.METRICS, "a purge keeps their names"
