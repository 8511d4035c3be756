"""Correction of what engine and trainer make different of the same weights: weights and masks of proximal/behaviour. Pure, flat tensors.

The behaviour logprobs were recorded by the engine when the token was drawn. Everything here is detached: it weighs gradients and has none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.algorithms.surrogates import per_sample

#: Upper edges of the bins in which |proximal - behaviour| is counted, in nats: whatever order they come in, counts add up exactly.
EDGES = tuple(1e-5 * 2.0 ** (bin_index / 2) for bin_index in range(43))  # up to 20
BINS = len(EDGES) + 1


def log_ratio(proximal: Tensor, behaviour: Tensor, sample: Tensor, samples: int, level: str) -> Tensor:
    """log(pi_proximal / pi_behaviour) [N] of the token ("token"), its whole sample ("sequence": the product over its tokens), or the
    geometric mean over its sample ("geometric"). Sequence: unbiased and of high variance; the others bound it.
    """
    difference = (proximal - behaviour).detach()
    if level == "token":
        return difference
    total = per_sample(difference, sample, samples)
    if level == "geometric":
        total = total / per_sample(torch.ones_like(difference), sample, samples).clamp(min=1.0)
    return total[sample]


def truncated(log_ratio: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling (Espeholt et al., arXiv 1802.01561, eq. 1; Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training"): min(ratio, cap). `log_ratio`: [N]. Returns weights and kept tokens (all).
    """
    return torch.exp(log_ratio).clamp(max=cap), torch.ones_like(log_ratio)


def masked(log_ratio: Tensor, floor: float, cap: float) -> tuple[Tensor, Tensor]:
    """Masked importance sampling (IcePop, Ling team, arXiv 2510.18855, eq. 3): ratio where floor <= ratio <= cap, else nothing.

    `log_ratio`: [N]; of whole samples, it is the sequence mask of Liu et al. 2025, "When speed kills stability". Returns weights and
    kept tokens, 0 or 1.
    """
    weight = torch.exp(log_ratio)
    kept = ((weight >= floor) & (weight <= cap)).to(log_ratio.dtype)
    return weight * kept, kept


def binned(difference: Tensor, sample: Tensor, samples: int) -> Tensor:
    """How many of each sample's tokens lie in each bin of |difference|: [B, BINS] int64. A NaN lies in none."""
    edges = torch.tensor(EDGES, dtype=difference.dtype, device=difference.device)
    bin_index = sample * BINS + torch.bucketize(difference.detach().abs(), edges)
    return (
        torch.zeros(samples * BINS, dtype=torch.int64, device=sample.device)
        .index_add(0, bin_index, (~difference.detach().isnan()).to(torch.int64))
        .view(samples, BINS)
    )


def largest(difference: Tensor, sample: Tensor, samples: int) -> Tensor:
    """The greatest |difference| of each sample's tokens [B]; a NaN counts as 0: `binned` tells how many there are."""
    size = difference.detach().abs()
    zeros = torch.zeros(samples, dtype=size.dtype, device=size.device)
    return zeros.scatter_reduce(0, sample, size.masked_fill(size.isnan(), 0.0), "amax")


def quantile(counts: Sequence[int], share: float) -> float:
    """What this share of the counted differences does not exceed: an upper edge, so at most 1.42 times too high; below the first one 0."""
    wanted, so_far = share * sum(counts), 0
    for bin_index, count in enumerate(counts):
        so_far += count
        if so_far >= wanted:
            return EDGES[min(bin_index, len(EDGES) - 1)] if bin_index else 0.0
    return 0.0
