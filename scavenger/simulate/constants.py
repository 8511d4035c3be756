"""Calibrated constants of an engine as a small TOML file: written by `scavenger simulate calibrate`, read by the simulations. Pure text.

Owns the file's form. The file says what it was fitted for, so that one model's constants are not taken for another's unseen.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib

from scavenger import toml
from scavenger.errors import ConfigError
from scavenger.simulate.calibrate import Fit
from scavenger.simulate.decode import Efficiency, EngineSpec

_MOST_S = 60.0
_NAMES = tuple(field.name for field in dataclasses.fields(Efficiency))
_SHARES = frozenset({"bandwidth", "decode_compute", "prefill_compute", "memory_share"})  # of the datasheet's peak
_REMEDY = "make it with `scavenger simulate calibrate points.json --model M --gpu G --out FILE`"


def dump(spec: EngineSpec, fit: Fit) -> str:
    """The fit as TOML."""
    engine = {"model": spec.model.name, "gpu": spec.gpu.name, "gpus": spec.gpus}
    quality = {"points": len(fit.residuals), "rms_error": fit.rms_error, "worst_error": fit.worst_error}
    return toml.dumps({"engine": engine, "efficiency": dataclasses.asdict(fit.efficiency), "fit": quality})


def load(text: str, spec: EngineSpec) -> Efficiency:
    """The constants of `dump`'s text. Raises `ConfigError` when it is none, or was fitted for another model or GPU than `spec`'s."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not TOML: {error}", _REMEDY) from error
    engine, values = document.get("engine"), document.get("efficiency")
    if not isinstance(engine, dict) or not isinstance(values, dict):
        raise ConfigError("the tables [engine] and [efficiency] are not both there", _REMEDY)
    wanted = {"model": spec.model.name, "gpu": spec.gpu.name, "gpus": spec.gpus}
    if engine != wanted:
        raise ConfigError(f"the constants are for {engine}, not for {wanted}", "measure that engine and fit its own")
    odd = sorted(values.keys() ^ set(_NAMES))
    if odd or not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values()):
        what = ", ".join(odd) or "a value is no number"
        raise ConfigError(f"[efficiency] has not exactly the numbers {', '.join(_NAMES)} ({what})", _REMEDY)
    for name, value in sorted(values.items()):
        if name in _SHARES and not 0 < value <= 1:
            raise ConfigError(f"[efficiency] {name} = {value:g} is no share of the peak, above 0 and at most 1", _REMEDY)
        if name not in _SHARES and not 0 <= value <= _MOST_S:
            raise ConfigError(f"[efficiency] {name} = {value:g} is no time of a step, from 0 to {_MOST_S:g} s", _REMEDY)
    return Efficiency(**{name: float(values[name]) for name in _NAMES})


def error_of(text: str) -> float | None:
    """The error of the fit, where `load`'s text tells."""
    told = tomllib.loads(text).get("fit", {})
    found = told.get("rms_error") if isinstance(told, dict) else None
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else None
