"""What would keep weights from engines: adapters that fit no layer, a folder that takes no version, memory that holds none. Starts nothing.

Owns the checks of `[lora]` and `[weights]`, and of what the daemon gives an engine's job, where its configuration can be read. How much
memory that is: `scavenger.sizing.engine`.
Boundary: the checks of `[lora]` and `[weights]`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from scavenger import config as configs
from scavenger.config import DaemonConfig, RunConfig
from scavenger.errors import ConfigError
from scavenger.sizing import engine as engine_sizes
from scavenger.sizing.engine import PublishedSize
from scavenger.weights import files, manifest, rdma
from scavenger.weights.source import is_loopback
from trainer.prepare.model import ModelFacts
from trainer.serving import adapters_beside_base

MB = 1 << 20
#: `weights.spool_dir` has the two newest versions, and one that is being written.
SPOOLED = 3


def check_adapters(config: RunConfig) -> str:
    """Raises `ConfigError` for a target that no layer of the model can have an adapter for."""
    if not config.lora.rank:
        return "none: all weights are trained"
    from trainer.model import adapters  # seconds of imports: only where there are some
    from trainer.prepare import engines

    text = (config.model.path / "config.json").read_text()
    layers = adapters.check_targets(engines.empty_model(text), config.lora)
    _, why = adapters_beside_base(config, text, "cuda")
    return f"rank {config.lora.rank} beside {layers} layers; served by engines on GPUs {why}"


def version_of(config: RunConfig, facts: ModelFacts) -> PublishedSize:
    """What engines hold: the model in `weights.dtype`, and with adapters also their base, in the type in which it is stored.

    With stop texts the tokenizer beside them.
    """
    whole = facts.parameters * manifest.ITEMSIZE[config.weights.dtype]
    tokenizer = len(files.read_tokenizer(facts.folder)) if config.sampling.stop else 0
    if not config.lora.rank:
        return PublishedSize(whole + tokenizer, 0)
    from trainer.model import adapters

    stored = facts.parameters * manifest.ITEMSIZE[adapters.stored_dtype(facts.folder)]
    return PublishedSize(whole, stored + tokenizer)


def check(config: RunConfig, facts: ModelFacts, nodes: int, at_hand: Path | None) -> str:
    """Raises `ConfigError`. `nodes`: of the training job. `at_hand`: a daemon's configuration, perhaps this run's."""
    section, version = config.weights, version_of(config, facts)
    if nodes > 1 and is_loopback(section.listen):
        raise ConfigError(
            f'weights.listen = "{section.listen}" is reached from its own host alone, and the job has {nodes} nodes: engines pull from all',
            'set weights.listen = "0.0.0.0"',
        )
    if section.nixl and not rdma.installed():
        raise ConfigError(
            "weights.nixl = true, and this Python has no NIXL", "install it: pip install 'scavenger[nixl]'"
        )
    if section.spool_dir is not None:
        _spool(section.spool_dir, config.run.name, version)
    size = f"a version has {version.nbytes / MB:,.0f} MiB" + (
        f" on a base of {version.base / MB:,.0f} MiB" if version.base else ""
    )
    return f"{size}; {_engine_memory(config, version, at_hand)}"


def _spool(folder: Path, run: str, version: PublishedSize) -> None:
    """A version that cannot be written is only left out of the spool: the run would go on, and the restart that needs it would not."""
    there = next(path for path in (folder / run, *(folder / run).parents) if path.exists())
    remedy = "name a folder that engines and all ranks see and may write, or leave weights.spool_dir out"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        how = "cannot be written by this user" if there.is_dir() else "is no folder"
        raise ConfigError(f"weights.spool_dir = {str(folder)!r}: {there} {how}", remedy)
    each = version.base or version.nbytes  # adapters beside their base are small
    has = shutil.disk_usage(there).free + sum(
        path.stat().st_size for path in (folder / run).glob("version-*/*")
    )
    if has < SPOOLED * each:
        raise ConfigError(
            f"weights.spool_dir = {str(folder)!r} has room for {has / MB:,.0f} MiB, and is to hold {SPOOLED} versions of {each / MB:,.0f}",
            remedy,
        )


def _engine_memory(config: RunConfig, version: PublishedSize, at_hand: Path | None) -> str:
    least = engine_sizes.engine_host_mb(version, config.engine.name, 0)
    wanted = engine_sizes.engine_host_mb(version, config.engine.name, config.run.gpus_per_engine)
    asks = f"an engine's job wants {wanted:,} MiB of host memory"
    if not config.run.harvest:
        return asks
    found = _daemon_config(config, at_hand)
    if found is None:
        return f"{asks} (harvest.memory_mb_per_engine of the daemon, whose configuration was not found from here)"
    path, daemon = found
    given = daemon.harvest.memory_mb_per_engine
    cpus, has = engine_sizes.engine_cpus(version, config.run.gpus_per_engine), daemon.harvest.cpus_per_engine
    few = (
        f"; LOOK: harvest.cpus_per_engine = {has}, and a vLLM engine wants {cpus}"
        if config.engine.name == "vllm" and has < cpus
        else ""
    )
    if not given:
        return f"{asks}; {path} has harvest.memory_mb_per_engine = 0: it gets its GPUs' share of a node{few}"
    if given < least and daemon.harvest.enabled:
        enough = -(-wanted // 1024) * 1024
        raise ConfigError(
            f"{path}: harvest.memory_mb_per_engine = {given}, and this run's jobs need {least} at least: Slurm would kill each as it loads",
            f"set harvest.memory_mb_per_engine = {enough} there (docs/weights.md has the rule), or 0 for the GPUs' share",
        )
    return f"{asks}, {path} gives it {given:,}{': LOOK whether that does' if given < wanted else ''}{few}"


def _daemon_config(config: RunConfig, at_hand: Path | None) -> tuple[Path, DaemonConfig] | None:
    """The daemon's configuration: the run's own daemon's, or the one at hand, if it is of the run's state."""
    if config.daemon.embedded:
        assert config.daemon.config is not None
        return config.daemon.config, configs.read_daemon(config.daemon.config)
    if at_hand is None or not at_hand.is_file() or not os.access(at_hand, os.R_OK):
        return None
    found = configs.read_daemon(at_hand)
    return (at_hand, found) if found.daemon.state_dir.resolve() == config.run.state_dir.resolve() else None
