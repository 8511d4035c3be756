"""What crosses between the ranks of a tensor group, forward and backward (Megatron-LM's f and g: Shoeybi et al., arXiv 1909.08053).

Every rank of a group computes the same loss. What all have alike and each uses in part is `entering`: its gradients are added up. Parts
of a sum are `leaving`: they are added up, and the gradient is each part's. Along the last side values are `gathered` and `split`. Sums are
taken in the values' own type.
Boundary: collectives with gradients; knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def entering(value: Tensor, group: Any) -> Tensor:
    """The same on all ranks, used in part by each: gradients are added up."""
    if not torch.is_grad_enabled() or not value.requires_grad:
        return value
    found: Tensor = _Entering.apply(value, group, None)  # type: ignore[no-untyped-call]
    return found


class Entrance:
    """Of one model: a tensor that enters several layers one after another enters once, so that its gradient is added up once."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, value: Tensor) -> Tensor:
        if self._last is None or self._last[0] is not value:
            entered = value
            if torch.is_grad_enabled() and value.requires_grad:
                entered = _Entering.apply(value, self._group, self.forget)  # type: ignore[no-untyped-call]
            self._last = value, entered
        return self._last[1]

    def forget(self) -> None:
        """Nothing more enters as that did: let go of it. Said by the layer after those, and by the gradient that comes back, since layers
        that are computed again for the backward pass may stop before."""
        self._last = None


def leaving(part: Tensor, group: Any) -> Tensor:
    """The sum of all ranks' parts, on each."""
    found: Tensor = _Leaving.apply(part, group)  # type: ignore[no-untyped-call]
    return found


def gathered(part: Tensor, group: Any) -> Tensor:
    """All ranks' parts, side by side along the last side."""
    found: Tensor = _Gathered.apply(part, group)  # type: ignore[no-untyped-call]
    return found


def split(whole: Tensor, group: Any) -> Tensor:
    """This rank's part of the last side."""
    found: Tensor = _Split.apply(whole, group)  # type: ignore[no-untyped-call]
    return found


def _summed(value: Tensor, group: Any) -> Tensor:
    found = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(found, group=group)
    return found


def _side_by_side(part: Tensor, group: Any) -> Tensor:
    pieces = [
        torch.empty_like(part, memory_format=torch.contiguous_format)
        for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(pieces, part.contiguous(), group=group)
    return torch.cat(pieces, dim=-1)


def _own_part(whole: Tensor, group: Any) -> Tensor:
    return whole.chunk(dist.get_world_size(group), dim=-1)[dist.get_rank(group)].contiguous()


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any, forget: Callable[[], None] | None) -> Tensor:
        ctx.group, ctx.forget = group, forget
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.forget is not None:
            ctx.forget()
        return _summed(gradient, ctx.group), None, None


class _Leaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        return _summed(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _side_by_side(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _own_part(gradient, ctx.group), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _own_part(whole, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _side_by_side(gradient, ctx.group), None
