"""The policy loss of some samples, as sums, and the logprobs that it needs. Pure functions over tensors; knows no model, no rank and no
optimizer.

Three logprobs of each sampled token are kept apart (all [N], flat, under the sampling temperature):

    behaviour   recorded by the engine when the token was drawn; never recomputed
    proximal    the trainer's own, with the weights at the step's start; with one update a step, `current` detached
    current     the trainer's own, with gradients

The policy ratio is current/proximal; the correction of the engine's numerics is proximal/behaviour, detached. Clipping current/behaviour
instead would drop gradients for mere rounding in the engine.

Losses are *sums*: the denominator is known only when the step's last group has come, and is applied then (I7).

KL(current || reference) is estimated from sampled tokens (Schulman 2020, "Approximating KL divergence"). All estimators are unbiased or
nearly so as *values*. As losses they differ (Tang & Munos, arXiv 2506.09477): differentiated through `current`, k2 has the KL's own
gradient, k3 that of the reverse direction to second order, and k1 a gradient whose mean is zero.

Boundary: the policy loss; pure, over tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.algorithms import mismatch
from trainer.algorithms.rows import Recipe
from trainer.algorithms.surrogates import by_token, per_sample

#: Values of logits that `picked_logprobs` holds in float32 at once.
PIECE = 1 << 26


@dataclass(frozen=True, slots=True)
class Tokens:
    """The trained tokens of B samples, flat: current, proximal, behaviour, reference [N]; advantages [B]. `sample` [N] int64: whose each
    token is. `reference`: None without KL. `entropy` [N]: of the distribution that a token was drawn from; None = not computed.
    `others` [B]: tokens of the same sample that are not here, but in other rows; None = there are none. `turn_advantages` [N]: of each
    token its turn's, which takes the place of its sample's; None = turns share it.
    """

    current: Tensor
    proximal: Tensor
    behaviour: Tensor
    sample: Tensor
    advantages: Tensor
    reference: Tensor | None = None
    entropy: Tensor | None = None
    others: Tensor | None = None
    turn_advantages: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """`loss` [] with gradients, the sum of `losses`. The rest are detached sums over each sample's tokens: [B], bins [B, BINS].

    `weight`, `weight_squares`: of proximal/behaviour before it is truncated or masked.
    """

    loss: Tensor
    tokens: Tensor
    kept: Tensor
    losses: Tensor
    kl: Tensor
    clipped: Tensor
    mismatch_k3: Tensor
    mismatch_max: Tensor
    mismatch_bins: Tensor
    truncated: Tensor
    entropy: Tensor
    weight: Tensor
    weight_squares: Tensor


#: So that the square of a weight has a number: a token whose weight is larger is one of its own anyway.
MOST_LOG_WEIGHT = 20.0


def policy_loss(tokens: Tokens, recipe: Recipe) -> Terms:
    """sum over tokens of share * (weight * surrogate + kl_coef * divergence): `weight` corrects the engine, `share` is what the aggregation
    gives a token.

    Raises `ValueError` when the recipe has a KL term and `tokens` no reference.
    """
    samples, sample = len(tokens.advantages), tokens.sample
    ones = torch.ones_like(tokens.behaviour)
    log_ratio = mismatch.log_ratio(
        tokens.proximal, tokens.behaviour, sample, samples, recipe.importance_level
    )
    weight, kept = ones, ones
    if recipe.importance == "truncate":
        weight, kept = mismatch.truncated(log_ratio, recipe.importance_cap)
    elif recipe.importance == "mask":
        weight, kept = mismatch.masked(log_ratio, recipe.importance_floor, recipe.importance_cap)
    surrogate, clipped = _surrogate(tokens, recipe)
    share = token_share(recipe, kept, sample, samples, tokens.others)
    divergence = _divergence(tokens, recipe) * kept
    losses = share * (weight * surrogate + recipe.kl_coef * divergence)
    difference = (tokens.proximal - tokens.behaviour).detach()

    def summed(values: Tensor) -> Tensor:
        return per_sample(values.detach().to(difference.dtype), sample, samples)

    beyond = log_ratio > torch.log(torch.tensor(recipe.importance_cap, dtype=log_ratio.dtype))
    uncut = torch.exp(log_ratio.clamp(max=MOST_LOG_WEIGHT))
    return Terms(
        loss=losses.sum(),
        tokens=summed(ones),
        kept=summed(kept),
        losses=summed(losses),
        kl=summed(divergence),
        clipped=summed(clipped),
        mismatch_k3=summed(torch.exp(difference) - difference - 1.0),
        mismatch_max=mismatch.largest(difference, sample, samples),
        mismatch_bins=mismatch.binned(difference, sample, samples),
        truncated=summed(beyond if recipe.importance == "truncate" else 1.0 - kept),
        # E[-log p(token)] is the entropy, over tokens drawn from p: its estimate where it was not computed
        entropy=summed(-tokens.current if tokens.entropy is None else tokens.entropy),
        weight=summed(uncut),
        weight_squares=summed(uncut * uncut),
    )


def _surrogate(tokens: Tokens, recipe: Recipe) -> tuple[Tensor, Tensor]:
    low, high, of_turns = recipe.clip_low, recipe.clip_high, tokens.turn_advantages
    shared = recipe.algorithm.surrogate(
        tokens.current, tokens.proximal, tokens.advantages, tokens.sample, low, high
    )
    if of_turns is None:
        return shared
    samples = len(tokens.advantages)
    own = by_token(recipe.algorithm.surrogate, samples)(
        tokens.current, tokens.proximal, of_turns, tokens.sample, low, high
    )
    # By row, so that no row's gradient depends on which others are in its micro-batch.
    differs = (of_turns != tokens.advantages[tokens.sample]).to(of_turns.dtype)
    rows = (per_sample(differs, tokens.sample, samples) > 0)[tokens.sample]
    return torch.where(rows, own[0], shared[0]), torch.where(rows, own[1], shared[1])


def token_share(
    recipe: Recipe, kept: Tensor, sample: Tensor, samples: int, others: Tensor | None = None
) -> Tensor:
    """What the aggregation gives a token before the step's denominator: 1 / |o_i| for "sequence", else 1. [N]

    `others` [B]: tokens of each o_i that are in other rows.
    """
    if recipe.aggregation != "sequence":
        return torch.ones_like(kept)
    counted = torch.ones_like(kept) if recipe.algorithm.masked_count else kept
    lengths = per_sample(counted, sample, samples)
    if others is not None:
        lengths = lengths + others
    return 1.0 / lengths.clamp(min=1.0)[sample]


def _divergence(tokens: Tokens, recipe: Recipe) -> Tensor:
    if recipe.kl_coef == 0:
        return torch.zeros_like(tokens.behaviour)
    reference = tokens.proximal if recipe.kl_reference == "proximal" else tokens.reference
    if reference is None:
        raise ValueError("kl_coef > 0 needs the reference model's logprobs")
    return KL_ESTIMATORS[recipe.kl_estimator](tokens.current, reference)


def k1(current: Tensor, reference: Tensor) -> Tensor:
    """current - reference: unbiased, of either sign."""
    return current - reference


def k2(current: Tensor, reference: Tensor) -> Tensor:
    """(current - reference)^2 / 2: biased, >= 0; its gradient is the KL's."""
    return 0.5 * (current - reference) ** 2


def k3(current: Tensor, reference: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = reference - current: unbiased, >= 0. GRPO's (arXiv 2402.03300, eq. 4)."""
    difference = reference - current
    return torch.exp(difference) - difference - 1.0


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at the targets. logits: [..., V]; targets: [...] int64. Returns [...]."""
    scaled = logits if temperature == 1.0 else logits / temperature
    picked = scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return picked - torch.logsumexp(scaled, dim=-1)


class _Picked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
        totals = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        picked = torch.empty_like(totals)
        for piece in _pieces(logits):
            scaled = logits[piece].float() / temperature
            totals[piece] = torch.logsumexp(scaled, dim=-1)
            picked[piece] = scaled.gather(-1, targets[piece, None])[:, 0]
        ctx.save_for_backward(logits, targets, totals)
        ctx.temperature = temperature
        return picked - totals

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """d logprob / d logits = (onehot(target) - softmax) / temperature."""
        logits, targets, totals = ctx.saved_tensors
        found = torch.empty_like(logits)
        for piece in _pieces(logits):
            slope = (logits[piece].float() / ctx.temperature - totals[piece, None]).exp_().neg_()
            slope.scatter_add_(-1, targets[piece, None], torch.ones_like(totals[piece, None]))
            found[piece] = slope.mul_(gradient[piece, None] / ctx.temperature)
        return found, None, None


def _pieces(logits: Tensor) -> list[slice]:
    rows = max(1, PIECE // max(1, logits.shape[-1]))
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]


def picked_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """`token_logprobs` in float32, piece by piece: the softmax over the vocabulary is never held in float32 for the whole micro-batch.

    logits: [N, V] of any floating type; targets: [N] int64. Returns [N].
    """
    found: Tensor = _Picked.apply(logits, targets, temperature)  # type: ignore[no-untyped-call]
    return found
