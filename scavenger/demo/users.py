"""The other users of the demo's cluster: what they submit, when, and for how long. Pure; the driver submits it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """An ordinary job: `gpus` on `node` for `run_s`, submitted `at_s` after the start."""

    at_s: float
    node: str
    gpus: int
    run_s: float


def arrivals(nodes: Sequence[str], gpus_per_node: int, *, every_s: float, run_s: float, seed: int) -> Iterator[Arrival]:
    """A million arrivals, on average one every `every_s`; they hit one node after another, mostly whole nodes.

    A job takes a whole node or all but one GPU of it, so that it meets whatever runs there; it goes on long enough that the engine
    has to come back elsewhere.
    """
    rng = random.Random(seed)
    at_s = 0.0
    for index in range(1_000_000):
        at_s += every_s * rng.uniform(0.6, 1.4)
        node = nodes[index % len(nodes)]
        yield Arrival(at_s, node, gpus_per_node - (rng.random() < 0.25), run_s * rng.uniform(0.7, 1.3))
