"""Rows of a parameter in the order of the ranks, which versions and merged adapters want, where tensor parallelism has cut it otherwise.

A rank has its slice of a tensor, and of that the rows that FSDP2 gives it: columns where a layer's inputs are cut, rows of another part of
the tensor where its outputs are. `held`, `due` and `crossing` say who has, wants and gives what; `Rows` does it, one tensor at a time.
Boundary: a layout and the exchange that leads to it; its first half is arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scavenger.weights import shards
from trainer.model.mesh import Mesh
from trainer.model.sharding import local_of
from trainer.model.tensor_parallel import side_of


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [top, bottom) and columns [left, right) of a tensor, whose sides after the first count as one."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        return max(0, self.bottom - self.top), max(0, self.right - self.left)

    @property
    def values(self) -> int:
        return prod(self.shape)

    def meet(self, other: Block) -> Block:
        return Block(
            max(self.top, other.top),
            min(self.bottom, other.bottom),
            max(self.left, other.left),
            min(self.right, other.right),
        )

    def of(self, outer: Block) -> tuple[slice, slice]:
        """Where this block lies in an outer one."""
        return (
            slice(self.top - outer.top, self.bottom - outer.top),
            slice(self.left - outer.left, self.right - outer.left),
        )


def held(shape: Sequence[int], side: int | None, rank: int, ranks: int, tensor: int) -> Block:
    """What a rank of a replica holds of a tensor: its slice of `side` (None: all), and of that the rows that FSDP2 gives it. Pure."""
    rows, columns = (shape[0] if shape else 1), prod(shape[1:])
    row, slice_, over = rank // tensor, rank % tensor, ranks // tensor
    if side == 0:
        each = rows // tensor
        first, last = shards.rows(each, row, over)
        return Block(slice_ * each + first, slice_ * each + last, 0, columns)
    first, last = shards.rows(rows, row, over)
    if side is None:
        return Block(first, last, 0, columns)
    each = columns // tensor
    return Block(first, last, slice_ * each, (slice_ + 1) * each)


def due(shape: Sequence[int], rank: int, ranks: int) -> Block:
    """The rows that a version wants of a rank (`scavenger.weights.shards`). Pure."""
    return Block(*shards.rows(shape[0] if shape else 1, rank, ranks), 0, prod(shape[1:]))


def crossing(
    shape: Sequence[int], side: int | None, source: int, target: int, ranks: int, tensor: int
) -> Block:
    """What one rank gives another. Of what is whole on all ranks of a group, a rank gives to those of its own slice. Pure."""
    if side is None and source % tensor != target % tensor:
        return Block(0, 0, 0, 0)
    return held(shape, side, source, ranks, tensor).meet(due(shape, target, ranks))


class Rows:
    """In the place of `adapters.own`: this rank's rows of a parameter, in the order of the ranks. A collective of a replica's ranks."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    @torch.no_grad()
    def __call__(self, parameter: Any) -> Tensor:
        rank, ranks, tensor = self._mesh.shard, self._mesh.shards, self._mesh.division.tensor
        shape, side = tuple(parameter.shape), side_of(parameter)
        mine, wanted = held(shape, side, rank, ranks, tensor), due(shape, rank, ranks)
        local = local_of(parameter.detach()).reshape(mine.shape)
        going = [crossing(shape, side, rank, other, ranks, tensor) for other in range(ranks)]
        coming = [crossing(shape, side, other, rank, ranks, tensor) for other in range(ranks)]
        given = torch.cat(
            [local[block.of(mine)].flatten() for block in going if block.values] or [local.flatten()[:0]]
        )
        sizes = [block.values for block in coming]
        taken = torch.empty(sum(sizes), dtype=local.dtype, device=local.device)
        dist.all_to_all_single(
            taken, given, sizes, [block.values for block in going], group=self._mesh.shard_group
        )
        found = torch.empty(wanted.shape, dtype=local.dtype, device=local.device)
        for block, piece in zip(coming, torch.split(taken, sizes), strict=True):
            if block.values:
                found[block.of(wanted)] = piece.view(block.shape)
        return found.view(wanted.shape[0], *shape[1:]) if shape else found.view(())
