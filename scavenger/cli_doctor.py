"""`scavenger doctor`: what a site's Slurm means for harvesting, line by line. Arguments and printing; `scavenger.doctor` does the work."""

from __future__ import annotations

import dataclasses
import getpass
from pathlib import Path
from typing import Annotated

import typer

from scavenger import config
from scavenger.cli_options import DEFAULT_CONFIG, ConfigOption
from scavenger.config import DaemonConfig
from scavenger.doctor.facts import Wanted
from scavenger.errors import ConfigError


def wanted_of(settings: DaemonConfig) -> Wanted:
    """What the rules need of the daemon's configuration."""
    h, c = settings.harvest, settings.cluster
    return Wanted(
        h.partition, h.qos, h.account, h.gpu_type, h.cpus_per_engine, h.memory_mb_per_engine, h.time_limit_s, c.observe_s, c.quick_s,
        c.absent_s, getpass.getuser(),
    )  # fmt: skip


def doctor(
    config_path: ConfigOption = DEFAULT_CONFIG,
    partition: Annotated[str, typer.Option(help="the partition to harvest; needed where there is no scavenger.toml yet")] = "",
    qos: Annotated[str, typer.Option(help="the QOS of the harvesting jobs, instead of harvest.qos")] = "",
    submit: Annotated[bool, typer.Option("--submit", help="also run a 1-minute test job: ports, state directory, Python, requeue")] = False,
    layout: Annotated[str, typer.Option("--format", help="text or json")] = "text",
) -> None:
    """Check a site from a login node and explain each line. Exit code 0: all well, 1: warnings or unknowns, 2: a problem."""
    from scavenger.doctor import collect, findings, probe, rules

    if layout not in ("text", "json"):
        raise typer.BadParameter(f"{layout!r}: one of text, json")
    settings = _settings(config_path, partition)
    wanted = wanted_of(settings)
    wanted = dataclasses.replace(wanted, partition=partition or wanted.partition, qos=qos or wanted.qos)
    facts = collect.gather(wanted, deadline_s=settings.cluster.command_timeout_s)
    if submit:
        facts = dataclasses.replace(facts, probe=probe.run(_asked(settings, wanted)))
    found = rules.judge(facts, wanted)
    print(findings.as_json(found).decode() if layout == "json" else "\n".join(findings.lines(found)))
    raise typer.Exit(findings.exit_code(found))


def _settings(path: Path, partition: str) -> DaemonConfig:
    if path.exists() or not partition:
        return config.read_daemon(path)
    return DaemonConfig.model_validate({"daemon": {"state_dir": Path.home() / ".scavenger"}})


def _asked(settings: DaemonConfig, wanted: Wanted) -> DaemonConfig:
    """The configuration as the options changed it, for the test job."""
    if settings.cluster.backend == "local":
        raise ConfigError('--submit needs Slurm, and cluster.backend = "local"', "leave --submit out")
    return settings.model_copy(update={"harvest": settings.harvest.model_copy(update={"partition": wanted.partition, "qos": wanted.qos})})
