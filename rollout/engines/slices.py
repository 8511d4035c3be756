"""Which part of each published tensor a rank of an engine keeps, and which part of it each rank answers for. Knows torch; knows no engine.

What a rank keeps is asked of the model's own weight loaders (`Reads`): they are run once over tensors of torch's meta device, which have a
shape and strides and no bytes. Whatever a loader makes of such a tensor first (narrowed, cut, turned), it still names the storage and the
place in it; the operation that reads it, mostly a copy into a parameter, says the place. So columns, rows, heads that several ranks hold,
padded vocabularies and fused experts need no table of ours.

A box is a start and a stop for each side of a tensor. What is read in any other form counts as the whole tensor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Box = tuple[tuple[int, int], ...]
Boxes = dict[str, list[Box]]  # by tensor


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, side) for side in shape)


def numel(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def contains(outer: Box, inner: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def cut(tensor: Tensor, box: Box) -> Tensor:
    """A view of that part."""
    return tensor[tuple(slice(start, stop) for start, stop in box)]


def box_of(shape: Sequence[int], view: Tensor) -> Box:
    """Where in a contiguous tensor of this shape a view of it lies; the whole where that is no box."""
    first = last = int(view.storage_offset())
    last += sum((int(side) - 1) * int(step) for side, step in zip(view.shape, view.stride(), strict=True))
    found: list[tuple[int, int]] = []
    for side in reversed(shape):
        found.append((first % side, last % side + 1))
        first, last = first // side, last // side
    box = tuple(reversed(found))
    exact = all(start < stop for start, stop in box) and numel(box) == view.numel()
    return box if exact else whole(shape)


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not say its types
    """Notes what is read of `sources`, contiguous tensors by name, while it is entered."""

    def __init__(self, sources: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = dict(sources)
        self._names = {source.untyped_storage()._cdata: name for name, source in sources.items()}
        self._found: dict[str, dict[Box, None]] = defaultdict(dict)

    @property
    def boxes(self) -> Boxes:
        """By tensor name, the boxes that were read; a tensor that was never read is absent."""
        return {name: list(found) for name, found in self._found.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = {_storage(value) for value in tree_leaves(result) if isinstance(value, Tensor)}
        for value in tree_leaves((args, kwargs)):
            if not isinstance(value, Tensor) or not value.numel():
                continue
            name = self._names.get(_storage(value))
            if (
                name is not None and _storage(value) not in made
            ):  # else another view of it: nothing is read yet
                self._found[name][box_of(self._sources[name].shape, value)] = None
        return result


def _storage(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def shares(shape: Sequence[int], kept: Sequence[Sequence[Box]]) -> list[list[Box]]:
    """By rank, what it answers for of a tensor of which each keeps these boxes: together all of it, and nothing twice.

    Ranks that keep the same part it between them. Where what they keep overlaps otherwise, or is not all, the first rank that keeps
    anything answers for the whole.
    """
    owners: dict[Box, list[int]] = defaultdict(list)
    for rank, boxes in enumerate(kept):
        for sides in boxes:  # lists of lists, where they came from another process
            owners[tuple((start, stop) for start, stop in sides)].append(rank)
    found: list[list[Box]] = [[] for _ in kept]
    if not owners:
        return found
    disjoint = all(
        not _overlap(one, other) for i, one in enumerate(owners) for other in list(owners)[i + 1 :]
    )
    if not disjoint or sum(map(numel, owners)) != math.prod(shape):
        found[min(rank for ranks in owners.values() for rank in ranks)].append(whole(shape))
        return found
    for box, ranks in owners.items():
        if not box:
            found[ranks[0]].append(box)
            continue
        (start, stop), *others = box
        for i, rank in enumerate(ranks):
            rows = (start + (stop - start) * i // len(ranks), start + (stop - start) * (i + 1) // len(ranks))
            if rows[0] < rows[1]:
                found[rank].append((rows, *others))
    return found


def copies(shape: Sequence[int], kept: Sequence[Sequence[Box]]) -> int:
    """On how many ranks each element of a tensor lies of which each keeps these boxes; 1 where that differs among elements."""
    together, each = sum(numel(box) for boxes in kept for box in boxes), math.prod(shape)
    return together // each if together and together % each == 0 else 1


def _overlap(one: Box, other: Box) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))


def meta(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Sources for `Reads`: no bytes."""
    return {name: torch.empty(tuple(shape), dtype=dtype, device="meta") for name, shape in shapes.items()}
