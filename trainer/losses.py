"""The policy loss, token by token. Pure functions over tensors; knows no model, no rank and no optimizer.

Three logprobs of each sampled token are kept apart (all [B, T], under the sampling temperature):

    behaviour   recorded by the engine when the token was drawn; never recomputed
    proximal    the trainer's own, with the weights at the step's start; with one update a step, `current` detached
    current     the trainer's own, with gradients

The PPO ratio is current/proximal; the correction of the engine's numerics is proximal/behaviour, truncated and detached. Clipping
current/behaviour instead would drop gradients for mere rounding in the engine.

All losses are *sums* over tokens: the denominator is known only when the step's last group has come, and is applied then (I7).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """`loss` [] with gradients. The rest are detached sums over the masked tokens of each row: [B]."""

    loss: Tensor
    policy: Tensor
    kl: Tensor
    clipped: Tensor
    mismatch_k3: Tensor
    mismatch_max: Tensor
    truncated: Tensor


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at the targets. logits: [B, T, V]; targets: [B, T] int64. Returns [B, T]."""
    scaled = logits if temperature == 1.0 else logits / temperature
    picked = scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return picked - torch.logsumexp(scaled, dim=-1)


def importance_weight(proximal: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    """Truncated importance weight min(pi_proximal / pi_behaviour, cap), detached (Yao et al. 2025, "truncated importance sampling";

    Espeholt et al., arXiv 1802.01561, eq. 1). All [B, T].
    """
    return torch.exp(proximal - behaviour).clamp(max=cap).detach()


def ppo_clip(current: Tensor, proximal: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), ratio = exp(current - proximal) (Schulman et al., arXiv 1707.06347, eq. 7;

    low != high is DAPO's clip-higher, Yu et al., arXiv 2503.14476, eq. 10). current, proximal: [B, T]; advantages: [B, 1].
    Returns the loss of each token and whether its gradient was clipped away: [B, T] each.
    """
    ratio = torch.exp(current - proximal)
    free = ratio * advantages
    held = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return -torch.minimum(free, held), held < free


def kl_k3(current: Tensor, reference: Tensor) -> Tensor:
    """k3 = exp(d) - d - 1 with d = reference - current: unbiased, >= 0 (Schulman 2020, "Approximating KL divergence"). [B, T]."""
    difference = reference - current
    return torch.exp(difference) - difference - 1.0


def policy_loss(
    current: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
    kl_coef: float = 0.0,
    reference: Tensor | None = None,
) -> PolicyTerms:
    """sum over tokens of w * ppo_clip + kl_coef * k3(current, reference).

    current, proximal, behaviour, reference: [B, T]; advantages: [B]; mask: [B, T], 1 at trained tokens. Masked positions must hold
    finite logprobs (zeros will do). Raises `ValueError` when `kl_coef > 0` comes without a reference.
    """
    weight = importance_weight(proximal, behaviour, importance_cap)
    surrogate, clipped = ppo_clip(current, proximal, advantages.unsqueeze(-1), clip_low, clip_high)
    policy = weight * surrogate * mask
    if kl_coef > 0 and reference is None:
        raise ValueError("kl_coef > 0 needs the reference model's logprobs")
    kl = kl_k3(current, reference) * mask if reference is not None else torch.zeros_like(policy)
    difference = (proximal - behaviour).detach() * mask
    return PolicyTerms(
        loss=(policy + kl_coef * kl).sum(),
        policy=policy.detach().sum(-1),
        kl=kl.detach().sum(-1),
        clipped=(clipped * mask).detach().sum(-1),
        mismatch_k3=(torch.exp(difference) - difference - 1.0).sum(-1),
        mismatch_max=difference.abs().amax(-1),
        truncated=((difference > torch.log(torch.tensor(importance_cap, dtype=difference.dtype))) * mask).sum(-1),
    )
