"""Weights as they leave the trainer: gathered whole, cast, laid out and hashed. Rank 0 alone serves them.

Owns the cast and the order of collectives. Knows no daemon: the loop announces what `build_version` made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from scavenger.weights import manifest
from trainer.model import Learner

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def gather(learner: Learner, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Every parameter whole, cast to `dtype`, on the CPU; tied ones once. All ranks must exhaust it together."""
    for name, tensor in learner.full_parameters():
        yield name, tensor.to(DTYPES[dtype]).cpu().contiguous()


def build_version(version: int, tensors: Iterator[tuple[str, Tensor]], dtype: str) -> tuple[manifest.Manifest, bytearray]:
    """The manifest and the bytes of a version."""
    table = {}
    for name, tensor in tensors:
        raw: Any = tensor.view(torch.uint8).numpy()
        table[name] = (dtype, tuple(tensor.shape), memoryview(raw))
    return manifest.build(version, table)
