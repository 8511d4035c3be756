"""How long a new engine takes until it generates: the cold start as a distribution, and the weights it must pull. Pure.

Owns the phases of a start. Knows nothing of fleets and policies. Randomness comes in as a generator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scavenger.weights import choice
from scavenger.weights.choice import DeltaOffer, Form, MeasuredRate, Rates


@dataclass(frozen=True, slots=True)
class StartupPhase:
    """A lognormal duration. `spread`: the standard deviation of its logarithm; 0 is a constant."""

    median_s: float
    spread: float = 0.0

    def mean_s(self) -> float:
        return self.median_s * math.exp(self.spread**2 / 2)

    def draw_s(self, stream: np.random.Generator) -> float:
        # drawn even when constant, so that one phase's spread does not shift what the next one draws
        return self.median_s * math.exp(self.spread * float(stream.standard_normal()))


@dataclass(frozen=True, slots=True)
class ColdStartTimes:
    """One drawn cold start."""

    container_s: float
    import_s: float
    load_s: float
    compile_s: float

    @property
    def total_s(self) -> float:
        return self.container_s + self.import_s + self.load_s + self.compile_s


@dataclass(frozen=True, slots=True)
class ColdStart:
    """Container, imports, loading at `load_bytes_s`, and compilation with graph capture, each drawn by itself."""

    container: StartupPhase
    imports: StartupPhase
    compiling: StartupPhase
    load_bytes_s: float
    load_spread: float = 0.0

    def draw(self, stream: np.random.Generator, weight_bytes: float) -> ColdStartTimes:
        """`weight_bytes`: what is loaded from the node's disk; 0 when the weights are pulled instead (`network`)."""
        container, imports = self.container.draw_s(stream), self.imports.draw_s(stream)
        load = StartupPhase(weight_bytes / self.load_bytes_s, self.load_spread).draw_s(stream)
        return ColdStartTimes(container, imports, load, self.compiling.draw_s(stream))

    def mean_s(self, weight_bytes: float) -> float:
        load = StartupPhase(weight_bytes / self.load_bytes_s, self.load_spread)
        return sum(phase.mean_s() for phase in (self.container, self.imports, load, self.compiling))


@dataclass(frozen=True, slots=True)
class Deltas:
    """Lossless deltas between successive versions: each `share` of the full size; the source keeps the last `depth` of them.

    `apply_bytes_s`: of the full size that an engine's cores apply a second, once for each version in between; inf = it costs no time.
    """

    share: float
    depth: int
    apply_bytes_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or self.depth < 0 or not self.apply_bytes_s > 0:
            raise ValueError(
                f"deltas of {self.share} of the size, {self.depth} deep, {self.apply_bytes_s} bytes a second"
            )


def pull_cost(
    full_bytes: float, version: int, held: int | None, deltas: Deltas | None, link_bytes_s: float
) -> tuple[float, float]:
    """Bytes to pull for `version` when `held` (None: nothing) is in place, and the seconds that applying them takes at least.

    Whole, or a chain of deltas where that is there: what live engines' `choice` predicts to be sooner over a link of `link_bytes_s`.
    """
    if held is not None and held > version:
        raise ValueError(f"version {held} is held and {version} is wanted: versions only grow")
    if held == version:
        return 0.0, 0.0
    if held is None or deltas is None or version - held > deltas.depth:
        return full_bytes, 0.0
    steps = version - held
    offer = DeltaOffer(min(full_bytes, steps * deltas.share * full_bytes), steps)
    rates = Rates(
        link=MeasuredRate(link_bytes_s),
        hashing=MeasuredRate(math.inf),
        applying=MeasuredRate(deltas.apply_bytes_s),
        loading=MeasuredRate(math.inf),
    )
    if choice.choose(full_bytes, offer, rates).form is Form.FULL:
        return full_bytes, 0.0
    return offer.nbytes, steps * full_bytes / deltas.apply_bytes_s
