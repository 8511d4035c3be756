"""Configuration: `scavenger.toml` (the daemon's, `site`) and `run.toml` (a run's, `run`), read once, checked once, never changed.

Owns the reading, and the words for what is refused: an unknown key, a wrong unit or an impossible value is named with the file, the key
and what is allowed. Must not know what a value is used for, nor ask Slurm or a ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from scavenger.config import layers
from scavenger.config.layers import Layered
from scavenger.config.run import (
    AgentPolicy,
    AlgorithmSection,
    CheckpointSection,
    DataSection,
    DataSet,
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
    "AgentPolicy",
    "AlgorithmSection",
    "Blackout",
    "CheckpointSection",
    "ClusterSection",
    "DaemonConfig",
    "DaemonSection",
    "DataSection",
    "DataSet",
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
    "daemon_of",
    "laid_over",
    "parse",
    "read_daemon",
    "read_run",
    "run_of",
]

C = TypeVar("C", bound=Section)
#: Keys whose values are in no message: a database's URL may hold a password.
SECRETS = frozenset({"daemon.ledger"})


def _explain(model: type[Section], layered: Layered, error: ValidationError) -> ConfigError:
    lines = []
    for item in error.errors():
        missing, mistaken = item["type"] == "missing", item.get("ctx", {}).get("error")
        named = [str(mistaken).partition(" = ")[0]] if isinstance(mistaken, Mistaken) else []
        path = layered.first if missing else layered.origin([*item["loc"], *named])
        key = ".".join(str(part) for part in item["loc"]) or "(file)"
        said = _said(item["type"], item["msg"], item["input"])
        if item["type"] == "extra_forbidden":
            remedy = hint(model, item["loc"], item["input"])
            lines.append(f"{path}: unknown key {key!r}" + (f": {remedy}" if remedy else ""))
        elif missing:
            lines.append(f"{path}: key {key!r} is missing")
        elif isinstance(mistaken, Mistaken):
            lines.append(f"{path}: {'.'.join([*map(str, item['loc']), str(mistaken)])}")
        elif isinstance(item["input"], dict) or key in SECRETS:
            # a rule between keys names them, and what a section holds may be a secret
            lines.append(f"{path}: {key}: {said}")
        else:
            lines.append(f"{path}: {key} = {item['input']!r}: {said}")
    return ConfigError("\n".join(lines), "every key with its unit and default is in docs/config.md")


def _said(kind: str, message: str, given: object) -> str:
    """What is wrong with a value, in TOML's words: a list is no tuple there."""
    if kind != "tuple_type":
        return message.removeprefix("Value error, ")
    inside = "; its elements cannot be set one by one" if isinstance(given, dict) else ""
    return f"a list is wanted, as [...]{inside}"


def parse(model: type[C], path: Path, data: dict[str, Any]) -> C:
    """Check a parsed TOML document; `path` is named in errors. Raises `ConfigError`."""
    return _check(model, layers.lay(model, [(path, data)]))


def _check(model: type[C], layered: Layered) -> C:
    try:
        return model.model_validate(layered.document)
    except ValidationError as error:
        raise _explain(model, layered, error) from error


def laid_over(
    model: type[Section], path: Path, over: Sequence[Path] = (), sets: Sequence[str] = ()
) -> Layered:
    """The files of `path` (several with `:` between), those of `over` and the keys of `sets`, the later over the earlier.

    Raises `ConfigError` for what cannot be read.
    """
    of_run = issubclass(model, RunConfig)
    found = [(one, layers.read(one, of_run=of_run)) for one in layers.files_of(path, over)]
    return layers.lay(model, found, sets)


def read_daemon(path: Path, over: Sequence[Path] = (), sets: Sequence[str] = ()) -> DaemonConfig:
    """Read `scavenger.toml`. Relative folders of ours in it (`FILE_RELATIVE`) are relative to the file. `over`, `sets`: as in `laid_over`.

    Raises `ConfigError`.
    """
    return daemon_of(laid_over(DaemonConfig, path, over, sets))


def daemon_of(layered: Layered) -> DaemonConfig:
    """Raises `ConfigError`."""
    config = _check(DaemonConfig, layered)
    base, section, cluster = layered.first.resolve().parent, config.daemon, config.cluster
    public_dir = None if section.public_dir is None else base / section.public_dir
    folders = {"state_dir": base / section.state_dir, "public_dir": public_dir}
    sections: dict[str, Any] = {"daemon": section.model_copy(update=folders)}
    if cluster.local_dir is not None:
        sections["cluster"] = cluster.model_copy(update={"local_dir": base / cluster.local_dir})
    return config.model_copy(update=sections)


def read_run(path: Path, over: Sequence[Path] = (), sets: Sequence[str] = ()) -> RunConfig:
    """Read `run.toml`. Relative paths in it are relative to the file. `over`, `sets`: as in `laid_over`. Raises `ConfigError`."""
    return run_of(laid_over(RunConfig, path, over, sets))


def run_of(layered: Layered) -> RunConfig:
    """Raises `ConfigError`."""
    config = _check(RunConfig, layered)
    base = layered.first.resolve().parent
    run = config.run.model_copy(
        update={"state_dir": base / config.run.state_dir, "out_dir": base / config.run.out_dir}
        | ({"key": base / config.run.key} if config.run.key else {})
    )
    daemon = config.daemon.model_copy(update={"config": base / (config.daemon.config or "scavenger.toml")})
    weights = config.weights
    if weights.spool_dir:
        weights = weights.model_copy(update={"spool_dir": base / weights.spool_dir})
    python = config.data.environment_python
    trained = tuple(one.model_copy(update={"path": base / one.path}) for one in config.data.sets)
    data = config.data.model_copy(
        update={"sets": trained}
        | ({"path": base / config.data.path} if config.data.path else {})
        | ({"environment_python": base / python} if python else {})
        | {"sandbox_readable": tuple(base / one for one in config.data.sandbox_readable)}
    )
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
