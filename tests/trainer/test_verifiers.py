from __future__ import annotations

import pytest

from scavenger.errors import RewardError, RewardTimeout
from trainer import verifiers
from trainer.algorithms.rewards import RewardRunner


def test_exact() -> None:
    assert [verifiers.exact("", said, {"answer": "Yes"}) for said in ("Yes", " Yes\n", "yes", "Yes.")] == [
        1.0,
        1.0,
        0.0,
        0.0,
    ]
    assert verifiers.exact("", "yes", {"right": "Yes"}, field="right", ignore_case=True) == 1.0


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("<answer>4</answer>", 1.0),
        ("<answer>3</answer> or <answer> 4 </answer>", 1.0),
        ("<answer>4</answer><answer>5</answer>", 0.0),
        ("4", 0.0),
    ],
)
def test_regex_takes_the_last_match(said: str, reward: float) -> None:
    assert verifiers.regex("", said, {"answer": 4}, pattern="<answer>(.*?)</answer>") == reward


def test_regex_without_a_group_takes_the_whole_match() -> None:
    assert verifiers.regex("", "so 12, no 13", {"answer": "13"}, pattern=r"\d+") == 1.0


@pytest.mark.parametrize(
    ("gold", "said", "reward"),
    [
        ("72", "so the answer is \\boxed{72}", 1.0),
        ("She sold 48/2 = 24.\n#### 72", "The answer is 72.", 1.0),
        ("1,000", "1000", 1.0),
        ("\\frac{1}{2}", "\\boxed{0.5}", 1.0),
        ("x^2+1", "$1 + x^2$", 1.0),
        ("72", "\\boxed{73}", 0.0),
        ("72", "I do not know", 0.0),
        ("72", "", 0.0),
    ],
)
def test_math_compares_values_not_texts(gold: str, said: str, reward: float) -> None:
    assert verifiers.math("", said, {"answer": gold}) == reward


def test_a_problem_whose_own_answer_is_no_mathematics_is_an_error() -> None:
    with pytest.raises(ValueError, match="not mathematics"):
        verifiers.math("", "\\boxed{1}", {"answer": ""})


@pytest.mark.parametrize(
    ("name", "options", "said", "gold"),
    [
        ("math", {}, "\\boxed{10^{10^{10}}}", "7"),
        ("math", {}, "\\boxed{9!!!!}", "7"),
        ("math", {}, "\\boxed{(10^9)!}", "7"),
        ("math", {}, "\\boxed{\\binom{10^9}{5\\cdot 10^8}}", "7"),
        ("regex", {"pattern": "(a+)+b"}, "a" * 64, "x"),
    ],
)
def test_an_answer_that_cannot_be_judged_is_ended_at_the_deadline_and_wrong_and_the_next_is_scored(
    name: str, options: dict[str, str], said: str, gold: str
) -> None:
    right = ("ab", "a") if name == "regex" else ("\\boxed{3}", "3")
    with RewardRunner(f"trainer.verifiers:{name}", timeout_s=2.0, retries=0, options=options) as rewards:
        with pytest.raises(RewardTimeout, match=r"no reward within 2 s"):  # it has no end by itself
            rewards.score("", said, {"answer": gold})
        assert rewards.score("", right[0], {"answer": right[1]}) == 1.0


def test_a_problem_that_is_no_mathematics_stays_an_error_however_often_it_is_tried() -> None:
    with RewardRunner("trainer.verifiers:math", timeout_s=5.0, retries=1) as rewards:
        with pytest.raises(RewardError, match="it raised ValueError") as failed:
            rewards.score("", "\\boxed{1}", {"answer": ""})
        assert not isinstance(failed.value, RewardTimeout)
