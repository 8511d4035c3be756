"""An engine's roofline as the one line that controllers reckon with. Pure."""

from __future__ import annotations

from scavenger.router.forecast_speed import Curve
from scavenger.simulate.decode import EngineSpec


def line(spec: EngineSpec) -> Curve:
    """The steeper line of the engine's roofline: the seconds of a decode step by batch and context."""
    one, two = spec.curve(1), spec.curve(2)
    more = two.overhead - one.overhead
    base = one.overhead - more
    if one.memory_slope >= one.compute_slope:
        return Curve(base + one.memory, more, one.memory_slope)
    return Curve(base, more + one.compute, one.compute_slope)
