"""The surrogate of each token, whose gradient is the policy gradient. Pure functions over flat tensors; knows no model and no reward.

Tokens of several samples lie flat: [N] values, `sample` [N] the sample of each, advantages [B]. The ratio is current/proximal throughout:
both are the trainer's own, so it is exactly 1 at the first update. What the engine's numerics add is corrected apart (`mismatch`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

#: (current, proximal [N], advantages [B], sample [N], low, high) -> loss of each token [N], whether its gradient was clipped away [N] bool.
Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]


def per_sample(values: Tensor, sample: Tensor, samples: int) -> Tensor:
    """Sums of each sample's tokens: [N] -> [B]."""
    return torch.zeros(samples, dtype=values.dtype, device=values.device).index_add(0, sample, values)


def ppo_clip(
    current: Tensor, proximal: Tensor, advantages: Tensor, sample: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), ratio = exp(current - proximal) (Schulman et al., arXiv 1707.06347, eq. 7;
    low != high is DAPO's clip-higher, Yu et al., arXiv 2503.14476, eq. 10).
    """
    return _clipped(torch.exp(current - proximal), advantages[sample], low, high)


def gspo(
    current: Tensor, proximal: Tensor, advantages: Tensor, sample: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """GSPO (Zheng et al., arXiv 2507.18071, eq. 5-7): the ratio of a whole sample, s = exp(mean over its tokens of current - proximal).

    Every token of a sample has the sample's loss -min(s * A, clip(s) * A), so its mean over the tokens is eq. 5's term.
    """
    samples = len(advantages)
    counts = per_sample(torch.ones_like(current), sample, samples).clamp(min=1.0)
    ratio = torch.exp(per_sample(current - proximal, sample, samples) / counts)
    loss, clipped = _clipped(ratio, advantages, low, high)
    return loss[sample], clipped[sample]


def cispo(
    current: Tensor, proximal: Tensor, advantages: Tensor, sample: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """CISPO (MiniMax, arXiv 2506.13585, eq. 4-5): -sg(clip(ratio, 1 - low, 1 + high)) * A * current.

    No token loses its gradient: the weight is clipped instead. The second result says whose weight was.
    """
    ratio = torch.exp(current - proximal).detach()
    weight = ratio.clamp(1.0 - low, 1.0 + high)
    return -weight * advantages[sample] * current, weight != ratio


def by_token(surrogate: Surrogate, samples: int) -> Surrogate:
    """The surrogate of so many samples for advantages [N] of each token, in the place of [B] of each sample."""
    if surrogate is gspo:
        return partial(gspo_token, samples=samples)

    def of_each(
        current: Tensor, proximal: Tensor, advantages: Tensor, sample: Tensor, low: float, high: float
    ) -> tuple[Tensor, Tensor]:
        each = torch.arange(len(sample), device=sample.device)
        return surrogate(current, proximal, advantages, each, low, high)

    return of_each


def gspo_token(
    current: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    sample: Tensor,
    low: float,
    high: float,
    *,
    samples: int,
) -> tuple[Tensor, Tensor]:
    """GSPO-token (Zheng et al., arXiv 2507.18071, §4.3), for advantages [N] that differ within a sample, as of several turns: the ratio is
    sg(s) * exp(current - sg(current)), with the value of the sample's s and each token's own gradient. Where they do not differ and all
    tokens of the sample weigh the same, the sum over it has GSPO's gradient.
    """
    counts = per_sample(torch.ones_like(current), sample, samples).clamp(min=1.0)
    ratio = torch.exp(per_sample((current - proximal).detach(), sample, samples) / counts)
    return _clipped(ratio[sample] * torch.exp(current - current.detach()), advantages, low, high)


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    free = ratio * advantages
    clipped = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return -torch.minimum(free, clipped), clipped < free
