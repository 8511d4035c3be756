"""Configuration: `scavenger.toml` (the daemon's, `site`) and `run.toml` (a run's, `run`), read once, checked once, never changed.

Owns the reading, and the words for what is refused: an unknown key, a wrong unit or an impossible value is named with the file, the key
and what is allowed. Must not know what a value is used for, nor ask Slurm or a ledger.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from scavenger.config.run import (
    AlgorithmSection,
    CheckpointSection,
    DataSection,
    EmbeddedSection,
    EngineSection,
    EvalSection,
    EvalSet,
    LoraSection,
    ModelSection,
    MonitorSection,
    OptimizerSection,
    ReservedSection,
    RewardSection,
    RunConfig,
    RunSection,
    SamplingSection,
    TrainerSection,
    WeightsSection,
)
from scavenger.config.section import Mistaken, Section
from scavenger.config.site import (
    Blackout,
    ClusterSection,
    DaemonConfig,
    DaemonSection,
    HarvestSection,
    Hours,
    LedgerSection,
    OwnersSection,
    PrometheusSection,
    RouterSection,
)
from scavenger.config.unknown_keys import hint
from scavenger.errors import ConfigError

__all__ = [
    "AlgorithmSection",
    "Blackout",
    "CheckpointSection",
    "ClusterSection",
    "DaemonConfig",
    "DaemonSection",
    "DataSection",
    "EmbeddedSection",
    "EngineSection",
    "EvalSection",
    "EvalSet",
    "HarvestSection",
    "Hours",
    "LedgerSection",
    "LoraSection",
    "ModelSection",
    "MonitorSection",
    "OptimizerSection",
    "OwnersSection",
    "PrometheusSection",
    "ReservedSection",
    "RewardSection",
    "RouterSection",
    "RunConfig",
    "RunSection",
    "SamplingSection",
    "TrainerSection",
    "WeightsSection",
    "parse",
    "read_daemon",
    "read_run",
]

C = TypeVar("C", bound=Section)
#: Keys whose values are in no message: a database's URL may hold a password.
SECRETS = frozenset({"daemon.ledger"})


def _explain(model: type[Section], path: Path, error: ValidationError) -> ConfigError:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(file)"
        if item["type"] == "extra_forbidden":
            remedy = hint(model, item["loc"], item["input"])
            lines.append(f"{path}: unknown key {key!r}" + (f": {remedy}" if remedy else ""))
        elif item["type"] == "missing":
            lines.append(f"{path}: key {key!r} is missing")
        elif isinstance(mistaken := item.get("ctx", {}).get("error"), Mistaken):
            lines.append(f"{path}: {'.'.join([*map(str, item['loc']), str(mistaken)])}")
        elif isinstance(
            item["input"], dict
        ):  # a rule between keys names them, and what a section holds may be a secret
            lines.append(f"{path}: {key}: {item['msg'].removeprefix('Value error, ')}")
        elif key in SECRETS:
            lines.append(f"{path}: {key}: {item['msg']}")
        else:
            lines.append(f"{path}: {key} = {item['input']!r}: {item['msg']}")
    return ConfigError("\n".join(lines), "every key with its unit and default is in docs/config.md")


def parse(model: type[C], path: Path, data: dict[str, Any]) -> C:
    """Check a parsed TOML document; `path` is named in errors. Raises `ConfigError`."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _explain(model, path, error) from error


def _read(model: type[C], path: Path) -> C:
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}", "name it (--config, SCAVENGER_CONFIG); `scavenger init` writes one"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    return parse(model, path, data)


def read_daemon(path: Path) -> DaemonConfig:
    """Read `scavenger.toml`. A relative `daemon.state_dir` is relative to the file. Raises `ConfigError`."""
    config = _read(DaemonConfig, path)
    base, section = path.resolve().parent, config.daemon
    public_dir = None if section.public_dir is None else base / section.public_dir
    folders = {"state_dir": base / section.state_dir, "public_dir": public_dir}
    return config.model_copy(update={"daemon": section.model_copy(update=folders)})


def read_run(path: Path) -> RunConfig:
    """Read `run.toml`. Relative paths in it are relative to the file. Raises `ConfigError`."""
    config = _read(RunConfig, path)
    base = path.resolve().parent
    run = config.run.model_copy(
        update={"state_dir": base / config.run.state_dir, "out_dir": base / config.run.out_dir}
        | ({"key": base / config.run.key} if config.run.key else {})
    )
    daemon = config.daemon.model_copy(update={"config": base / (config.daemon.config or "scavenger.toml")})
    weights = config.weights
    if weights.spool_dir:
        weights = weights.model_copy(update={"spool_dir": base / weights.spool_dir})
    data = config.data.model_copy(update={"path": base / config.data.path} if config.data.path else {})
    sets = tuple(one.model_copy(update={"path": base / one.path}) for one in config.eval.sets)
    held_out = config.eval.model_copy(
        update={"sets": sets} | ({"path": base / config.eval.path} if config.eval.path else {})
    )
    model = config.model.model_copy(update={"path": base / config.model.path})
    reward = config.reward.model_copy(update={"path": base / config.reward.path})
    return config.model_copy(
        update={
            "run": run,
            "daemon": daemon,
            "data": data,
            "eval": held_out,
            "model": model,
            "reward": reward,
            "weights": weights,
        }
    )
