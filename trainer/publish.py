"""Weights as they leave the trainer: gathered whole, cast, laid out and hashed. Rank 0 alone serves them.

Owns the cast and the order of collectives. Knows no daemon: the loop announces what `build_version` made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Manifest
from scavenger.weights.memory import Buffer
from trainer.model import Learner

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def gather(learner: Learner, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Every parameter whole, cast to `dtype`, on the CPU; tied ones once. All ranks must exhaust it together."""
    for name, tensor in learner.full_parameters():
        yield name, tensor.to(DTYPES[dtype]).cpu().contiguous()


def build_version(version: int, learner: Learner, dtype: str, take: Callable[[int], Buffer] = Buffer) -> tuple[Manifest, Buffer]:
    """The manifest and the bytes of a version; each tensor is copied into place as it is gathered, so only one is held beside them.

    `take` gives the memory for so many bytes.
    """
    shapes = {name: (dtype, tuple(parameter.shape)) for name, parameter in learner.model.named_parameters()}
    table = manifests.layout(shapes)
    buffer = take(sum(tensor.nbytes for tensor in table))
    place = {tensor.name: tensor for tensor in table}
    for name, tensor in gather(learner, dtype):
        raw: Any = tensor.view(-1).view(torch.uint8).numpy()
        start = place[name].offset
        buffer.view[start : start + place[name].nbytes] = memoryview(raw)
    size = manifests.chunk_nbytes_of(buffer.nbytes)
    return manifests.seal(version, table, manifests.hashes_of(buffer.view, size), chunk_nbytes=size), buffer
