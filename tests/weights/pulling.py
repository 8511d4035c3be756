"""A version of random bytes, and a pull of it that gives up soon: what the tests of sources and pulls share."""

from __future__ import annotations

import asyncio
import os

from scavenger.protocol import keys, messages
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Manifest
from scavenger.weights.pull import pull
from scavenger.weights.transfer import TransferLimits

QUICK = TransferLimits(window=4, stall_s=0.3, backoff_s=0.01, backoff_max_s=0.05)
ME = keys.generate()


def version(number: int, nbytes: int = 300_000, chunk_nbytes: int = 4096) -> tuple[Manifest, memoryview]:
    data = os.urandom(nbytes // 8 * 8)
    half = len(data) // 8 * 4
    tensors = {
        "a": ("float32", (half // 4,), memoryview(data)[:half]),
        "b": ("bfloat16", ((len(data) - half) // 2,), memoryview(data)[half:]),
    }
    return manifests.build(number, tensors, chunk_nbytes=chunk_nbytes)


def get(
    manifest: Manifest,
    *sources: messages.WeightSource,
    deadline_s: float = 10.0,
    limits: TransferLimits = QUICK,
) -> memoryview:
    return asyncio.run(pull(manifest, sources, ME, deadline_s, limits=limits)).view
