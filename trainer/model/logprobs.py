"""Logprobs of chosen tokens from logits, piece by piece: the vocabulary's softmax is never held in float32 for the whole micro-batch.

Owns the forward and backward of one operation; knows no model and no loss.
Boundary: one operation with its own backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Values of logits that are held in float32 at once.
PIECE = 1 << 26


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
    """log softmax(logits / temperature) at the targets, in float32. logits: [N, V] of any floating type; targets: [N]. Returns [N]."""
    found: Tensor = _Picked.apply(logits, targets, temperature)  # type: ignore[no-untyped-call]
    return found
