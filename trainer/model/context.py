"""Context parallelism: the ranks of one group train the same micro-batch, each with a piece of its tokens.

    tokens          rank i has the i-th of equal pieces of the packed line; a few padding tokens at its end make it divide
    everything but attention    each rank for its own tokens
    attention       all tokens, a part of the heads: before it heads are exchanged for tokens, after it tokens for heads (all-to-all, as
                    DeepSpeed Ulysses, Jacobs et al., arXiv 2309.14509)
    logprobs        gathered: every rank of the group has those of all answer tokens, and computes the whole loss of whole samples

A rank's loss has gradients for its own tokens' logprobs alone; what FSDP2 sums over ranks is then the gradient of the loss, once. Inside
the exchange attention is `packed_attention` over whole samples, so windows, borders and the GPU's flash kernel are as without it.

torch's own context parallelism (a ring over blocks of keys) is no substitute here: it is a prototype, knows no borders between packed
samples, and replaces CUDA kernels alone. Its one advantage, more ranks than heads, is refused instead (`mesh.check_heads`).
Boundary: what crosses between the ranks of a context group, and for which models; knows no loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, count
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from scavenger.errors import ConfigError
from trainer.data.collate import Batch
from trainer.model.attention import PACKED, no_mask, packed_attention, unlike
from trainer.model.mesh import check_heads

_numbers = count()


class Context:
    """This rank's end of its group. `attention` is the name by which transformers finds the attention over it."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self.attention = f"scavenger_context_{next(_numbers)}"
        AttentionInterface.register(self.attention, self._attend)
        AttentionMaskInterface.register(self.attention, no_mask)

    # ---------------------------------------------------------------- tokens

    def piece(self, batch: Batch) -> Batch:
        """This rank's piece of a packed batch: its tokens, and of the answer tokens those that they predict. Borders stay the whole line's.

        What belongs to all answer tokens (`row`, `behaviour`, `proximal`) stays whole too.
        """
        positions, borders = batch.positions, batch.borders
        assert positions is not None
        assert borders is not None
        each, padding = self._each(batch), self._each(batch) * self._ranks - batch.inputs.shape[1]
        if padding:  # as one more sample, which no other sees
            borders = torch.cat([borders, borders[-1:] + padding])
            beyond = torch.arange(padding, device=positions.device, dtype=positions.dtype)
            positions = torch.cat([positions, beyond[None]], dim=1)
        start = self._rank * each
        mine = slice(start, start + each)
        answers = self._answers(batch)[self._rank]
        return replace(
            batch,
            inputs=functional.pad(batch.inputs, (0, padding))[:, mine],
            positions=positions[:, mine],
            borders=borders,
            longest=max(batch.longest, padding),
            at=batch.at[answers] - start,
            targets=batch.targets[answers],
        )

    def whole(self, mine: Tensor, batch: Batch) -> Tensor:
        """Values of all answer tokens of the batch, from each rank's of its piece. Gradients go to the rank's own."""
        found: Tensor = _Gathered.apply(mine, self._answers(batch), self._rank, self._group)  # type: ignore[no-untyped-call]
        return found

    def _each(self, batch: Batch) -> int:
        """Tokens of a piece."""
        return -(-batch.inputs.shape[1] // self._ranks)

    def _answers(self, batch: Batch) -> list[slice]:
        """Which of the answer tokens each rank's piece predicts; their places ascend along the line."""
        ranks = torch.bincount(batch.at // self._each(batch), minlength=self._ranks).tolist()
        stops = [*accumulate(ranks)]
        return [slice(stop - amount, stop) for stop, amount in zip(stops, ranks, strict=True)]

    # ---------------------------------------------------------------- attention

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        """query [1, H, T / ranks, D], key and value [1, H_kv, T / ranks, D] -> [1, T / ranks, H, D]."""
        # Fewer key heads than ranks: several get the same.
        times = self._ranks // gcd(self._ranks, key.shape[1])
        if times > 1:
            key, value = (part.repeat_interleave(times, dim=1) for part in (key, value))
        query, key, value = (self._to_heads(part) for part in (query, key, value))
        found, _ = packed_attention(module, query, key, value, None, scaling, **more)
        return self._to_tokens(found.transpose(1, 2)).transpose(1, 2), None

    def _to_heads(self, part: Tensor) -> Tensor:
        """[1, H, T / ranks, D] -> [1, H / ranks, T, D]."""
        _, heads, tokens, width = part.shape
        dealt = self._exchange(part.reshape(self._ranks, heads // self._ranks, tokens, width))
        return dealt.transpose(0, 1).reshape(1, heads // self._ranks, -1, width)

    def _to_tokens(self, part: Tensor) -> Tensor:
        """[1, H / ranks, T, D] -> [1, H, T / ranks, D]."""
        _, heads, tokens, width = part.shape
        pieces = part.reshape(heads, self._ranks, tokens // self._ranks, width).transpose(0, 1)
        return self._exchange(pieces).reshape(1, heads * self._ranks, -1, width)

    def _exchange(self, parts: Tensor) -> Tensor:
        found: Tensor = _Exchanged.apply(parts, self._group)  # type: ignore[no-untyped-call]
        return found


def check_model(model: Any, ranks: int, tensor: int = 1) -> None:
    """Raises `ConfigError` for a model whose tokens cannot be shared by so many ranks, or groups of `tensor` ranks that cut its layers. It
    may be without weights."""
    config = model.config.get_text_config()
    check_heads(config.num_attention_heads, ranks, tensor)
    if why := unlike(model):
        raise ConfigError(
            f"trainer.context_parallel = {ranks}: ranks cannot share the tokens of {type(model).__name__}: {why}",
            "set trainer.context_parallel = 1",
        )


@contextmanager
def alone(model: Any) -> Iterator[None]:
    """Inside, each rank attends within what it has: it computes whole samples by itself."""
    before = model.config._attn_implementation
    model.config._attn_implementation = PACKED
    try:
        yield
    finally:
        model.config._attn_implementation = before


class _Exchanged(torch.autograd.Function):
    """parts [ranks, ...]: part i goes to rank i, and part i of the result came from there. So do gradients, backwards."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient, ctx.group), None


def _exchange(parts: Tensor, group: Any) -> Tensor:
    parts = parts.contiguous()
    found = torch.empty_like(parts)
    dist.all_to_all_single(found, parts, group=group)
    return found


class _Gathered(torch.autograd.Function):
    """mine [n of this rank] -> [n of all ranks], where rank i has `places[i]` of them."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, places: list[slice], rank: int, group: Any) -> Tensor:
        ctx.place = places[rank]
        amounts = [place.stop - place.start for place in places]
        padded = functional.pad(mine.detach(), (0, max(amounts) - len(mine)))
        pieces = [torch.empty_like(padded) for _ in places]
        dist.all_gather(pieces, padded, group=group)
        return torch.cat([piece[:amount] for piece, amount in zip(pieces, amounts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient[ctx.place], None, None, None
