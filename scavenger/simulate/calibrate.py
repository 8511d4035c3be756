"""Fits the decode curve's free parameters to measured (batch, context, tokens/s), and keeps them in a small TOML file.

    measurements --read--> points --fit--> Fit --rows--> a table for people
                                            '--dump, load--> TOML, read by the simulations

With u = 1 / bandwidth share and v = 1 / compute share the model is `step_s = o + max(u M, v F)`, M and F known for each point. Which
of the two leads at a point depends on v / u alone, so sorted by M / F the memory-bound points come last: n + 1 splits are all there is, and
for each the fit is a small linear least squares with bounds. The best by the true residual wins: no start values, no local minimum.

The file says what it was fitted for, so that one model's constants are not taken for another's. Pure, but for `read`, which opens the one
file. It must not know a fleet, a run or a policy.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from scavenger import toml
from scavenger.errors import ConfigError
from scavenger.simulate.decode import Efficiency, SimulatedEngine
from scavenger.simulate.survey.text import TableRow


def rows(spec: SimulatedEngine, fit: Fit) -> tuple[TableRow, ...]:
    """The three fitted constants, beside the uncalibrated ones, and how well they do."""
    old, new = spec.efficiency, fit.efficiency
    bandwidth, compute = (
        _origin(old.bandwidth, new.bandwidth),
        _origin(old.decode_compute, new.decode_compute),
    )
    return (
        TableRow(
            "memory bandwidth",
            f"{new.bandwidth:.1%} of the peak",
            f"{bandwidth}; the peak is the datasheet's",
        ),
        TableRow("compute when decoding", f"{new.decode_compute:.1%} of the peak", compute),
        TableRow(
            "overhead of a step", f"{new.overhead_s * 1e3:.3f} ms", f"{old.overhead_s * 1e3:g} ms was assumed"
        ),
        TableRow(
            "error of step times",
            f"{fit.rms_error:.1%}",
            f"root mean square of {len(fit.residuals)} points; the worst: {fit.worst_error:.1%}",
        ),
    )


def _origin(old: float, new: float) -> str:
    return "as assumed: the points do not tell" if new == old else f"{old:.0%} was assumed"


def residuals(spec: SimulatedEngine, fit: Fit) -> tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]]:
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


_MOST_S = 60.0
_NAMES = tuple(field.name for field in dataclasses.fields(Efficiency))
_SHARES = frozenset(
    {"bandwidth", "decode_compute", "prefill_compute", "memory_share"}
)  # of the datasheet's peak
_CONSTANTS_REMEDY = "make it with `scavenger simulate calibrate points.json --model M --gpu G --out FILE`"


def dump(spec: SimulatedEngine, fit: Fit) -> str:
    """The fit as TOML."""
    engine = {"model": spec.model.name, "gpu": spec.gpu.name, "gpus": spec.gpus}
    quality = {"points": len(fit.residuals), "rms_error": fit.rms_error, "worst_error": fit.worst_error}
    return toml.dumps({"engine": engine, "efficiency": dataclasses.asdict(fit.efficiency), "fit": quality})


def load(text: str, spec: SimulatedEngine) -> Efficiency:
    """The constants of `dump`'s text. Raises `ConfigError` when it is none, or was fitted for another model or GPU than `spec`'s."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not TOML: {error}", _CONSTANTS_REMEDY) from error
    engine, values = document.get("engine"), document.get("efficiency")
    if not isinstance(engine, dict) or not isinstance(values, dict):
        raise ConfigError("the tables [engine] and [efficiency] are not both there", _CONSTANTS_REMEDY)
    wanted = {"model": spec.model.name, "gpu": spec.gpu.name, "gpus": spec.gpus}
    if engine != wanted:
        raise ConfigError(
            f"the constants are for {engine}, not for {wanted}", "measure that engine and fit its own"
        )
    odd = sorted(values.keys() ^ set(_NAMES))
    if odd or not all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values.values()
    ):
        what = ", ".join(odd) or "a value is no number"
        raise ConfigError(
            f"[efficiency] has not exactly the numbers {', '.join(_NAMES)} ({what})", _CONSTANTS_REMEDY
        )
    for name, value in sorted(values.items()):
        if name in _SHARES and not 0 < value <= 1:
            raise ConfigError(
                f"[efficiency] {name} = {value:g} is no share of the peak, above 0 and at most 1",
                _CONSTANTS_REMEDY,
            )
        if name not in _SHARES and not 0 <= value <= _MOST_S:
            raise ConfigError(
                f"[efficiency] {name} = {value:g} is no time of a step, from 0 to {_MOST_S:g} s",
                _CONSTANTS_REMEDY,
            )
    return Efficiency(**{name: float(values[name]) for name in _NAMES})


def error_of(text: str) -> float | None:
    """The error of the fit, where `load`'s text tells."""
    fit_section = tomllib.loads(text).get("fit", {})
    found = fit_section.get("rms_error") if isinstance(fit_section, dict) else None
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else None


Vector = NDArray[np.float64]


class MeasuredPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One point of the JSON file: `batch` sequences of `context` tokens each (their mean while measured) made `tokens_per_s` together."""

    batch: int
    context: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Residual:
    """`error`: (predicted - measured) / measured step time."""

    point: MeasuredPoint
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


def read(path: Path) -> tuple[MeasuredPoint, ...]:
    """The points of a JSON file: `[{"batch": 8, "context": 2048, "tokens_per_s": 900}, ...]`, or `[[8, 2048, 900], ...]`."""
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", _REMEDY) from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.cause}", error.remedy) from error


def parse(text: bytes) -> tuple[MeasuredPoint, ...]:
    """Raises `ConfigError` naming the point (from 1) that is wrong."""
    try:
        entries = msgspec.json.decode(text, type=list[dict[str, float] | tuple[int, float, float]])
        points = tuple(
            msgspec.convert(entry, MeasuredPoint, strict=False)
            if isinstance(entry, dict)
            else MeasuredPoint(entry[0], entry[1], entry[2])
            for entry in entries
        )
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"not a list of measured points: {error}", _REMEDY) from error
    for number, point in enumerate(points, 1):
        if point.batch < 1 or not 0 < point.context < math.inf or not 0 < point.tokens_per_s < math.inf:
            what = f"batch {point.batch}, context {point.context:g}, tokens_per_s {point.tokens_per_s:g}"
            raise ConfigError(f"point {number} is not positive and finite: {what}", _REMEDY)
    return points


def fit(spec: SimulatedEngine, points: Sequence[MeasuredPoint]) -> Fit:
    """The efficiencies of `spec` that give the least sum of squared relative errors of step times. Raises `ConfigError` under 3 points."""
    if len(points) < 3:
        raise ConfigError(
            f"{len(points)} points cannot give three parameters",
            "measure at least 3, better 10, over batch and context",
        )
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


def _columns(spec: SimulatedEngine, points: Sequence[MeasuredPoint]) -> tuple[Vector, Vector, Vector]:
    """Seconds at the datasheet's peak bandwidth and at its peak FLOPs, and what is known beside the overhead (all-reduces)."""
    peak = replace(
        spec, efficiency=replace(spec.efficiency, bandwidth=1.0, decode_compute=1.0, overhead_s=0.0)
    )
    curves = [peak.curve(point.batch) for point in points]
    tokens = [point.batch * point.context for point in points]
    memory = [
        curve.memory + curve.memory_slope * stored for curve, stored in zip(curves, tokens, strict=True)
    ]
    compute = [
        curve.compute + curve.compute_slope * stored for curve, stored in zip(curves, tokens, strict=True)
    ]
    return np.array(memory), np.array(compute), np.array([curve.overhead for curve in curves])


def _solutions(
    target: Vector, weight: Vector, memory: Vector, compute: Vector, compute_bound: NDArray[np.bool_]
) -> list[Vector]:
    """(u, v, o) by least squares for one split, with u, v >= 1 (no share above the peak) and o >= 0: every choice of active bounds."""
    columns = (
        np.stack(
            [
                np.where(compute_bound, 0.0, memory),
                np.where(compute_bound, compute, 0.0),
                np.ones_like(memory),
            ]
        )
        / weight
    )
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


def _report(
    spec: SimulatedEngine,
    points: Sequence[MeasuredPoint],
    values: Vector,
    measured: Vector,
    columns: tuple[Vector, Vector, Vector],
) -> Fit:
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
        notes.append(
            "no point is bound by compute: its share is not known; measure large batches of short contexts"
        )
        share = max(spec.efficiency.decode_compute, float(np.max(compute / memory)) / float(values[0]))
    efficiency = replace(
        spec.efficiency, bandwidth=bandwidth, decode_compute=share, overhead_s=float(values[2])
    )
    if values[0] == 1.0 or (values[1] == 1.0 and compute_bound.any()):
        notes.append(
            "a share is at 100 % of the datasheet's peak: the points are faster than this GPU and model allow; check both"
        )
    residuals = tuple(
        Residual(point, point.tokens_per_s / (1 + error), float(error), "compute" if bound else "memory")
        for point, error, bound in zip(points, errors, compute_bound, strict=True)
    )
    rms_error = float(np.sqrt(np.mean(errors**2)))
    if rms_error > USABLE_ERROR:
        notes.append(
            f"this is no fit: its error is over {USABLE_ERROR:.0%}. Check what was measured, and the model and GPU named"
        )
    return Fit(efficiency, residuals, rms_error, float(np.max(np.abs(errors))), tuple(notes))
