from __future__ import annotations

from itertools import combinations

import pytest

from trainer.loop.metrics import Judgement, pass_at_k, summarise_evaluation


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
