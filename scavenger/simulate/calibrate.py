"""Fits the decode curve's free parameters to measured (batch, context, tokens/s). Pure, but for `read`, which opens the one file.

With u = 1 / bandwidth share and v = 1 / compute share the model is `step_s = o + max(u M, v F)`, M and F known for each point. Which
of the two leads at a point depends on v / u alone, so sorted by M / F the memory-bound points come last: n + 1 splits are all there is, and
for each the fit is a small linear least squares with bounds. The best by the true residual wins: no start values, no local minimum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from scavenger.errors import ConfigError
from scavenger.simulate.decode import Efficiency, EngineSpec

Vector = NDArray[np.float64]


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One point of the JSON file: `batch` sequences of `context` tokens each (their mean while measured) made `tokens_per_s` together."""

    batch: int
    context: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Residual:
    """`error`: (predicted - measured) / measured step time."""

    point: Measured
    predicted_tokens_per_s: float
    error: float
    bound: str


@dataclass(frozen=True, slots=True)
class Fit:
    """The fitted parameters. `notes` says what the points could not tell; what they could not keeps its old value."""

    efficiency: Efficiency
    residuals: tuple[Residual, ...]
    rms_error: float
    worst_error: float
    notes: tuple[str, ...]


#: Above it the curve does not describe the points.
USABLE_ERROR = 0.2
_REMEDY = 'write [{"batch": 8, "context": 2048, "tokens_per_s": 900}, ...]'


def read(path: Path) -> tuple[Measured, ...]:
    """The points of a JSON file: `[{"batch": 8, "context": 2048, "tokens_per_s": 900}, ...]`, or `[[8, 2048, 900], ...]`."""
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", _REMEDY) from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.cause}", error.remedy) from error


def parse(text: bytes) -> tuple[Measured, ...]:
    """Raises `ConfigError` naming the point (from 1) that is wrong."""
    try:
        entries = msgspec.json.decode(text, type=list[dict[str, float] | tuple[int, float, float]])
        points = tuple(
            msgspec.convert(entry, Measured, strict=False)
            if isinstance(entry, dict)
            else Measured(entry[0], entry[1], entry[2])
            for entry in entries
        )
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"not a list of measured points: {error}", _REMEDY) from error
    for number, point in enumerate(points, 1):
        if point.batch < 1 or not 0 < point.context < math.inf or not 0 < point.tokens_per_s < math.inf:
            what = f"batch {point.batch}, context {point.context:g}, tokens_per_s {point.tokens_per_s:g}"
            raise ConfigError(f"point {number} is not positive and finite: {what}", _REMEDY)
    return points


def fit(spec: EngineSpec, points: Sequence[Measured]) -> Fit:
    """The efficiencies of `spec` that give the least sum of squared relative errors of step times. Raises `ConfigError` under 3 points."""
    if len(points) < 3:
        raise ConfigError(f"{len(points)} points cannot give three parameters", "measure at least 3, better 10, over batch and context")
    measured = np.array([point.batch / point.tokens_per_s for point in points])
    memory, compute, known = _columns(spec, points)
    order = np.argsort(memory / compute, kind="stable")
    best: tuple[float, Vector, NDArray[np.bool_]] | None = None
    for split in range(len(points) + 1):
        compute_bound = np.zeros(len(points), dtype=bool)
        compute_bound[order[:split]] = True
        for values in _solutions(measured - known, measured, memory, compute, compute_bound):
            error = _errors(values, measured, known, memory, compute)
            cost = float(error @ error)
            if best is None or cost < best[0] - 1e-15:
                best = (cost, values, compute_bound)
    assert best is not None  # three ones and zeros are always a candidate
    return _report(spec, points, best[1], measured, (memory, compute, known))


def _columns(spec: EngineSpec, points: Sequence[Measured]) -> tuple[Vector, Vector, Vector]:
    """Seconds at the datasheet's peak bandwidth and at its peak FLOPs, and what is known beside the overhead (all-reduces)."""
    peak = replace(spec, efficiency=replace(spec.efficiency, bandwidth=1.0, decode_compute=1.0, overhead_s=0.0))
    curves = [peak.curve(point.batch) for point in points]
    tokens = [point.batch * point.context for point in points]
    memory = [curve.memory + curve.memory_slope * held for curve, held in zip(curves, tokens, strict=True)]
    compute = [curve.compute + curve.compute_slope * held for curve, held in zip(curves, tokens, strict=True)]
    return np.array(memory), np.array(compute), np.array([curve.overhead for curve in curves])


def _solutions(target: Vector, weight: Vector, memory: Vector, compute: Vector, compute_bound: NDArray[np.bool_]) -> list[Vector]:
    """(u, v, o) by least squares for one split, with u, v >= 1 (no share above the peak) and o >= 0: every choice of active bounds."""
    columns = np.stack([np.where(compute_bound, 0.0, memory), np.where(compute_bound, compute, 0.0), np.ones_like(memory)]) / weight
    floor = np.array([1.0, 1.0, 0.0])
    rest = target / weight - floor @ columns
    found = []
    for count in range(4):
        for free in itertools.combinations(range(3), count):
            values = floor.copy()
            if free:
                values[list(free)] += np.linalg.lstsq(columns[list(free)].T, rest, rcond=None)[0]
            if (values >= floor).all():
                found.append(values)
    return found


def _errors(values: Vector, measured: Vector, known: Vector, memory: Vector, compute: Vector) -> Vector:
    predicted = known + values[2] + np.maximum(values[0] * memory, values[1] * compute)
    return np.asarray((predicted - measured) / measured)


def _report(spec: EngineSpec, points: Sequence[Measured], values: Vector, measured: Vector, columns: tuple[Vector, Vector, Vector]) -> Fit:
    memory, compute, known = columns
    errors = _errors(values, measured, known, memory, compute)
    compute_bound = values[1] * compute > values[0] * memory
    notes = []
    bandwidth, share = 1 / float(values[0]), 1 / float(values[1])
    # What no point tells keeps its old value, unless that alone would contradict the points.
    if compute_bound.all():
        notes.append("no point is bound by memory bandwidth: its share is not known; measure small batches")
        bandwidth = max(spec.efficiency.bandwidth, float(np.max(memory / compute)) / float(values[1]))
    if not compute_bound.any():
        notes.append("no point is bound by compute: its share is not known; measure large batches of short contexts")
        share = max(spec.efficiency.decode_compute, float(np.max(compute / memory)) / float(values[0]))
    efficiency = replace(spec.efficiency, bandwidth=bandwidth, decode_compute=share, overhead_s=float(values[2]))
    if values[0] == 1.0 or (values[1] == 1.0 and compute_bound.any()):
        notes.append("a share is at 100 % of the datasheet's peak: the points are faster than this GPU and model allow; check both")
    residuals = tuple(
        Residual(point, point.tokens_per_s / (1 + error), float(error), "compute" if bound else "memory")
        for point, error, bound in zip(points, errors, compute_bound, strict=True)
    )
    rms_error = float(np.sqrt(np.mean(errors**2)))
    if rms_error > USABLE_ERROR:
        notes.append(f"this is no fit: its error is over {USABLE_ERROR:.0%}. Check what was measured, and the model and GPU named")
    return Fit(efficiency, residuals, rms_error, float(np.max(np.abs(errors))), tuple(notes))
