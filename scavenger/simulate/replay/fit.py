"""What a recorded run's machines cost, fitted to some of its steps: engines' curve, trainer, loads. Pure.

    engines   what they made between leases and chunks (`policy.warm_start.rates`), through the same fit as `scavenger simulate calibrate`
    trainer   its own figures: seconds a trained token, a scored group, an update, a publication
    loads     from a new version to an engine that has it, after the engine's first

A stretch of an engine's work is counted from the lease on, so its prefills are in its steps, and are not counted again. Owns the fit; knows
nothing of how a run is played.

Boundary: pure fitting, without a play.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

import msgspec

from scavenger.config import RunConfig
from scavenger.errors import ConfigError
from scavenger.policy.history import RunHistory, Step
from scavenger.policy.warm_start import Rate, rates
from scavenger.protocol.messages import EngineSpec as WireSpec
from scavenger.simulate import calibrate, presets
from scavenger.simulate.decode import SimulatedEngine
from scavenger.simulate.plan import parse_model

#: Points that are fitted: more make the fit slow and not better.
POINTS = 120
#: States of samples that were trained; the others of a step were delivered and had nothing to teach.
TRAINED = "consumed"


@dataclass(frozen=True, slots=True)
class MeasuredSpec(SimulatedEngine):
    """An engine whose curve was measured with its prefills in it."""

    def prefill_many_s(self, parts: Sequence[tuple[int, int]]) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Machines:
    """What a replay is told of a run's machines. `load_s` by kind. `ranks` that train; `points` behind the curves and their error."""

    engines: Mapping[str, SimulatedEngine]
    load_s: Mapping[str, float]
    train_token_s: float
    score_group_s: float
    update_s: float
    publish_s: float
    ranks: int
    points: int
    rms_error: float


def fit(run_history: RunHistory, steps: Collection[int], ranks: int = 0) -> Machines:
    """The machines as these steps show them. Raises `ConfigError` when they show too little. `ranks` 0: as the steps tell, if they do."""
    chosen = [step for step in run_history.steps if step.step in steps and step.committed_at is not None]
    if not chosen:
        raise ConfigError("no step to calibrate on was committed", "replay a run that took at least 4 steps")
    spans = [(step.submitted_at, step.committed_at or 0.0) for step in chosen]
    measured = [rate for rate in rates(run_history) if any(low <= rate.at <= high for low, high in spans)]
    kinds = {life.worker_id: life.kind for life in run_history.lives}
    engines, worst = {}, 0.0
    for kind in ("reserved", "harvested"):
        own = [rate for rate in measured if kinds.get(rate.worker_id) == kind]
        engines[kind], error = _engine(run_history, own if len(own) >= 3 else measured)
        worst = max(worst, error)
    trained = sum(_trained_tokens(step) for step in chosen)
    groups = sum(len({completion.group_id for completion in step.completions}) for step in chosen)
    return Machines(
        engines=engines,
        load_s={kind: _load_s(run_history, kind) for kind in engines},
        train_token_s=_total(chosen, "seconds_train") / max(1, trained),
        score_group_s=_total(chosen, "seconds_reward") / max(1, groups),
        update_s=_total(chosen, "seconds_update") / len(chosen),
        publish_s=_total(chosen, "seconds_publish") / len(chosen),
        ranks=ranks or _ranks(run_history, chosen),
        points=len(measured),
        rms_error=worst,
    )


def trained_groups(step: Step) -> frozenset[int]:
    """Prompts whose completions were trained."""
    return frozenset(
        completion.prompt_index for completion in step.completions if completion.state == TRAINED
    )


def _trained_tokens(step: Step) -> int:
    return sum(
        completion.prompt_tokens + completion.length
        for completion in step.completions
        if completion.state == TRAINED
    )


def _total(steps: Sequence[Step], metric: str) -> float:
    missing = [step.step for step in steps if metric not in step.metrics]
    if missing:
        raise ConfigError(
            f"step {missing[0]} was committed without {metric!r}", "replay a run of this project's trainer"
        )
    return sum(step.metrics[metric] for step in steps)


def _engine(run_history: RunHistory, measured: Sequence[Rate]) -> tuple[SimulatedEngine, float]:
    if len(measured) < 3:
        why = f"{len(measured)} stretches of work of the recorded engines cannot give a curve"
        raise ConfigError(
            why, 'their chunks may be compacted: replay a ledger with ledger.retention = "keep"'
        )
    wire_spec = msgspec.json.decode(run_history.engine.encode(), type=WireSpec)
    model = parse_model(msgspec.json.decode(wire_spec.model_config), wire_spec.name, Path("config.json"))
    spec = MeasuredSpec(model, presets.H100, presets.UNCALIBRATED, max_sequences=wire_spec.max_batch)
    every = -(-len(measured) // POINTS)
    points = [
        calibrate.MeasuredPoint(max(1, round(rate.batch)), _each(rate), _speed(rate))
        for rate in measured[::every]
    ]
    found = calibrate.fit(spec, points)
    return replace(spec, efficiency=found.efficiency), found.rms_error


def _each(rate: Rate) -> float:
    return max(1.0, rate.context / rate.batch)


def _speed(rate: Rate) -> float:
    """Tokens a second of the rounded batch."""
    return rate.tokens / rate.seconds * max(1, round(rate.batch)) / rate.batch


def _load_s(run_history: RunHistory, kind: str) -> float:
    """Of an engine that had weights before; the median."""
    again = [
        load.pull_s + load.load_s
        for life in run_history.lives
        if life.kind == kind
        for load in life.loads[1:]
    ]
    first = [
        load.pull_s + load.load_s for life in run_history.lives if life.kind == kind for load in life.loads
    ]
    return median(again or first or [0.0])


def _ranks(run_history: RunHistory, steps: Sequence[Step]) -> int:
    """A deterministic trainer takes one group a rank and micro-step; others do not tell."""
    config = msgspec.json.decode(run_history.config, type=dict)
    if config.get("run", {}).get("deterministic"):
        shares = [
            len(trained_groups(step)) / step.metrics["micro_steps"]
            for step in steps
            if step.metrics.get("micro_steps")
        ]
        if shares:
            return max(1, round(fmean(shares) + 0.25))
    return max(
        1, sum(life.gpus for life in run_history.lives if life.kind == "reserved" and life.left_at is None)
    )


def config_of(run_history: RunHistory) -> RunConfig:
    """The run's own configuration, as its trainer gave it. Raises `ConfigError` for one of another release."""
    from scavenger import config

    return config.parse(
        config.RunConfig, Path(f"run {run_history.name}"), msgspec.json.decode(run_history.config, type=dict)
    )
