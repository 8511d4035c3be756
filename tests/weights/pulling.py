"""A version of random bytes, and a pull of it that gives up soon: what the tests of sources and pulls share."""

from __future__ import annotations

import asyncio
import os

from scavenger.protocol import keys, messages
from scavenger.weights import manifest as manifests
from scavenger.weights.choice import MeasuredRate, RateBook
from scavenger.weights.manifest import Manifest
from scavenger.weights.pull import pull
from scavenger.weights.source import WeightServer
from scavenger.weights.transfer import TransferLimits
from tests.clusters import wait_for

QUICK = TransferLimits(window=4, stall_s=0.3, backoff_s=0.01, backoff_max_s=0.05)
ME = keys.generate()


LONG = 1_000_000  # measurements: what a test adds changes little


def known(nbytes_per_s: float) -> MeasuredRate:
    return MeasuredRate(nbytes_per_s, nbytes_per_s * 1e12, 1e12, LONG)


def link_of(nbytes_per_s: float, *hosts: str) -> RateBook:
    """What a process knows that measured its connections to `hosts` for long, and applies 0.1 GB a second."""
    return RateBook(
        applying=known(1e8), connections=dict.fromkeys(hosts or ("127.0.0.1",), known(nbytes_per_s))
    )


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


def parts_sent(source: WeightServer, at_least: int) -> int:
    """What it sent: it counts a part after the last byte is gone, when who asked for it may go on already."""
    wait_for(f"{at_least} parts", lambda: source.stats.parts >= at_least, 10.0)
    return source.stats.parts
