"""What an evaluation's answers amount to. Pure; knows no engine, run or reward function.

Boundary: an evaluation's metrics; pure.
"""

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


def summarise(
    sampled: Sequence[Sequence[Judgement]], greedy: Sequence[Sequence[Judgement]]
) -> dict[str, float]:
    """Figures over the problems, in their order: mean rewards, pass@k for k = 1, 2, 4, ... up to the answers of a problem, lengths.

    A problem with fewer than k usable answers is left out of pass@k.
    """
    completions = [one for prompt in sampled for one in prompt]
    metrics = {
        "eval_sampled": _mean([one.reward for one in completions]),
        "eval_greedy": _mean([one.reward for prompt in greedy for one in prompt]),
        "eval_length_mean": _mean([float(one.tokens) for one in completions]),
        "eval_cut_fraction": _mean([float(one.cut) for one in completions]),
    }
    k, most = 1, max((len(prompt) for prompt in sampled), default=0)
    while k <= most:
        enough = [prompt for prompt in sampled if len(prompt) >= k]
        metrics[f"eval_pass_at_{k}"] = _mean(
            [pass_at_k(len(prompt), sum(one.reward >= RIGHT for one in prompt), k) for prompt in enough]
        )
        k *= 2
    return metrics


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
