"""A fit as a reader meets it: the constants with what they were, and each point's error. Pure: a `Fit` in, text out."""

from __future__ import annotations

from scavenger.simulate.calibrate import Fit
from scavenger.simulate.decode import EngineSpec
from scavenger.simulate.survey_text import Row


def rows(spec: EngineSpec, fit: Fit) -> tuple[Row, ...]:
    """The three fitted constants, beside the uncalibrated ones, and how well they do."""
    old, new = spec.efficiency, fit.efficiency
    bandwidth, compute = _origin(old.bandwidth, new.bandwidth), _origin(old.decode_compute, new.decode_compute)
    return (
        Row("memory bandwidth", f"{new.bandwidth:.1%} of the peak", f"{bandwidth}; the peak is the datasheet's"),
        Row("compute when decoding", f"{new.decode_compute:.1%} of the peak", compute),
        Row("overhead of a step", f"{new.overhead_s * 1e3:.3f} ms", f"{old.overhead_s * 1e3:g} ms was assumed"),
        Row(
            "error of step times",
            f"{fit.rms_error:.1%}",
            f"root mean square of {len(fit.residuals)} points; the worst: {fit.worst_error:.1%}",
        ),
    )


def _origin(old: float, new: float) -> str:
    return "as assumed: the points do not tell" if new == old else f"{old:.0%} was assumed"


def residuals(spec: EngineSpec, fit: Fit) -> tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """(title, columns, cells): each point with what the fitted curve says of it."""
    columns = ("batch", "context", "measured tok/s", "fitted tok/s", "error of step time", "bound by")
    cells = tuple(
        (
            str(one.point.batch),
            f"{one.point.context:,.0f}",
            f"{one.point.tokens_per_s:,.0f}",
            f"{one.predicted_tokens_per_s:,.0f}",
            f"{one.error:+.1%}",
            one.bound,
        )
        for one in fit.residuals
    )
    return f"{spec.model.name} on {spec.gpus} x {spec.gpu.name}", columns, cells
