"""`scavenger doctor`: what a site's Slurm means for harvesting, line by line. Arguments and printing; `scavenger.doctor` does the work.

Boundary: one subcommand.
"""

from __future__ import annotations

import dataclasses
import functools
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from scavenger import config
from scavenger.cli.options import DEFAULT_CONFIG, ConfigOption, EngineName, TextOrJson
from scavenger.config import DaemonConfig, layers
from scavenger.doctor.facts import SiteRequirements
from scavenger.doctor.findings import SiteFinding
from scavenger.errors import ConfigError
from scavenger.host.user import user_name
from scavenger.parsing import whole


def wanted_of(settings: DaemonConfig) -> SiteRequirements:
    """What the rules need of the daemon's configuration."""
    h, c = settings.harvest, settings.cluster
    return SiteRequirements(
        h.partition,
        h.qos,
        h.account,
        h.gpu_type,
        h.cpus_per_engine,
        h.memory_mb_per_engine,
        h.time_limit_s,
        c.poll_interval_s,
        c.fast_poll_interval_s,
        c.absent_s,
        c.engines_user or user_name(),
        settings.daemon.listen,
        settings.daemon.advertise,
        socket.gethostname(),
        pinned=h.placement == "node" and not h.constraint,
        daemon_user=user_name(),
        shared=settings.daemon.public_dir is not None,
    )


def doctor(
    config_path: ConfigOption = DEFAULT_CONFIG,
    partition: Annotated[
        str, typer.Option(help="the partition to harvest; needed where there is no scavenger.toml yet")
    ] = "",
    qos: Annotated[str, typer.Option(help="the QOS of the harvesting jobs, instead of harvest.qos")] = "",
    submit: Annotated[
        bool,
        typer.Option(
            "--submit", help="also run a short test job: ports, state directory, Python and engines, requeue"
        ),
    ] = False,
    harvest_one: Annotated[
        bool,
        typer.Option(
            "--harvest-one",
            help="instead: harvest one engine with a tiny model, as the daemon would, and end it",
        ),
    ] = False,
    engine: Annotated[
        EngineName | None,
        typer.Option(
            help="with --submit or --harvest-one: the engine that runs will use, reference or vllm; default: "
            "any will do, and reference is harvested"
        ),
    ] = None,
    reach: Annotated[
        list[str] | None,
        typer.Option(
            help="HOST:PORT that the test job is to reach too, as the weights' ports of training nodes; may be repeated"
        ),
    ] = None,
    daemon_port: Annotated[
        bool,
        typer.Option(
            "--daemon-port",
            help="with --harvest-one: listen on daemon.port, where a firewall opens no other; no daemon can start meanwhile",
        ),
    ] = False,
    layout: Annotated[TextOrJson, typer.Option("--format", help="text or json")] = "text",
) -> None:
    """Check a site from a login node and explain each line. Exit code 0: all well, 1: warnings or unknowns, 2: a problem."""
    from scavenger.cluster import choose
    from scavenger.doctor import findings

    others = tuple(reach or ())
    for word in others:
        host, _, port = word.rpartition(":")
        if not host or whole(port, most=65_535) is None:
            raise typer.BadParameter(f"{word!r}: HOST:PORT, as train1:7800")
    if others and not submit:
        raise typer.BadParameter("--reach is what the test job tries: add --submit")
    if daemon_port and not harvest_one:
        raise typer.BadParameter("--daemon-port is where the harvested engine connects: add --harvest-one")
    settings = _settings(config_path, partition)
    if harvest_one:
        _harvest_one(settings, partition, qos, engine or "reference", layout, daemon_port=daemon_port)
    wanted = wanted_of(settings)
    wanted = dataclasses.replace(
        wanted, partition=partition or wanted.partition, qos=qos or wanted.qos, engine=engine or ""
    )
    found = (
        _local(settings, wanted, submit)
        if choose.is_local(settings)
        else _slurm(settings, wanted, submit, others)
    )
    print(findings.as_json(found).decode() if layout == "json" else "\n".join(findings.lines(found)))
    raise typer.Exit(findings.exit_code(found))


def _harvest_one(
    settings: DaemonConfig, partition: str, qos: str, engine: str, layout: str, *, daemon_port: bool
) -> NoReturn:
    from scavenger.cluster import choose
    from scavenger.doctor import canary, findings

    named = {key: value for key, value in (("partition", partition), ("qos", qos)) if value}
    asked = settings.model_copy(update={"harvest": settings.harvest.model_copy(update=named)})
    cluster = choose.backend(asked)

    def say(found: SiteFinding) -> None:
        if layout == "text":
            print(canary.line(found), flush=True)

    try:
        stages = canary.Canary(asked, cluster, say, engine, daemon_port=daemon_port).run()
    finally:
        cluster.close()
    if layout == "json":
        print(findings.as_json(stages).decode())
    raise typer.Exit(findings.exit_code(stages))


def _slurm(
    settings: DaemonConfig, wanted: SiteRequirements, submit: bool, others: Sequence[str]
) -> Sequence[SiteFinding]:
    from scavenger.cluster.proxy import client
    from scavenger.cluster.proxy import messages as wire
    from scavenger.doctor import collect, probe
    from scavenger.doctor.rules import limits, run

    if (line := client.view_line(settings)) is not None:
        wanted = dataclasses.replace(wanted, viewer=line.ask(wire.Identify(), wire.Identity).user)
    facts = collect.gather(wanted, deadline_s=settings.cluster.command_timeout_s)
    if submit and not facts.answers["config"].error:  # else there is no Slurm to submit to
        changed = {
            "partition": wanted.partition,
            "qos": wanted.qos,
            "memory_mb_per_engine": limits.probe_memory_mb(facts, wanted),
        }
        asked = settings.model_copy(update={"harvest": settings.harvest.model_copy(update=changed)})
        engines = (wanted.engine,) if wanted.engine else probe.ENGINES
        say = functools.partial(typer.echo, err=True)
        said = probe.run(asked, say=say, engines=engines, controllers=facts.controllers, others=others)
        facts = dataclasses.replace(facts, probe=said)
    return run.judge(facts, wanted)


def _local(settings: DaemonConfig, wanted: SiteRequirements, submit: bool) -> Sequence[SiteFinding]:
    from scavenger.cluster import choose
    from scavenger.doctor import local

    if submit:
        raise ConfigError(
            "--submit needs Slurm, and the configuration's cluster is the local backend", "leave --submit out"
        )
    return local.check(choose.local(settings), wanted)


def _settings(path: Path, partition: str) -> DaemonConfig:
    if layers.is_there(path):
        return config.read_daemon(path)
    if not partition:
        remedy = "name the partition to harvest (--partition NAME), or the daemon's configuration (--config, SCAVENGER_CONFIG)"
        raise ConfigError(f"{path} does not exist, and no partition is named", remedy)
    # A site's daemon listens where compute nodes reach it, as `scavenger init` writes it: the test job tries that.
    return DaemonConfig.model_validate(
        {"daemon": {"state_dir": Path.home() / ".scavenger", "listen": "0.0.0.0"}}
    )
