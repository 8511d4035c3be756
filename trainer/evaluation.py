"""What an evaluation's answers amount to. Pure; knows no engine, run or reward function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: From this reward on an answer is right.
RIGHT = 1.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """One usable answer: its reward, its tokens, and whether the length limit ended it."""

    reward: float
    tokens: int
    cut: bool


def pass_at_k(n: int, right: int, k: int) -> float:
    """The chance that one of k answers drawn from n, of which `right` are right, is right (Chen et al., arXiv 2107.03374, eq. 1)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def summarise(sampled: Sequence[Sequence[Judgement]], greedy: Sequence[Sequence[Judgement]]) -> dict[str, float]:
    """Figures over the problems, in their order: mean rewards, pass@k for k = 1, 2, 4, ... up to the answers of a problem, lengths.

    A problem with fewer than k usable answers is left out of pass@k.
    """
    answers = [one for problem in sampled for one in problem]
    figures = {
        "eval_sampled": _mean([one.reward for one in answers]),
        "eval_greedy": _mean([one.reward for problem in greedy for one in problem]),
        "eval_length_mean": _mean([float(one.tokens) for one in answers]),
        "eval_cut_fraction": _mean([float(one.cut) for one in answers]),
    }
    k, most = 1, max((len(problem) for problem in sampled), default=0)
    while k <= most:
        enough = [problem for problem in sampled if len(problem) >= k]
        figures[f"eval_pass_at_{k}"] = _mean(
            [pass_at_k(len(problem), sum(one.reward >= RIGHT for one in problem), k) for problem in enough]
        )
        k *= 2
    return figures


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
