"""`scavenger drain`: give every harvested GPU back, and take none until told otherwise. Argument parsing and printing."""

from __future__ import annotations

import getpass
from typing import Annotated

import typer

from scavenger import config
from scavenger.cli_options import DEFAULT_CONFIG, ConfigOption
from scavenger.errors import ConfigError


def drain(
    config_path: ConfigOption = DEFAULT_CONFIG,
    now: Annotated[bool, typer.Option("--now", help="cancel engines without letting them drain")] = False,
    off: Annotated[bool, typer.Option("--off", help="harvest again")] = False,
    reason: Annotated[str, typer.Option(help="why, for the ledger")] = "",
) -> None:
    """Give every harvested GPU back, and take none until `drain --off`. The daemon sees it within seconds, also one that starts later."""
    from scavenger.harvest import standing

    if now and off:
        raise ConfigError("drain --now and --off contradict each other", "give one of them")
    state_dir = config.read_daemon(config_path).daemon.state_dir
    if not state_dir.is_dir():
        raise ConfigError(f"the state directory {state_dir} does not exist", "name the daemon's configuration with --config")
    if off:
        print("harvests again" if standing.resume(state_dir) else "was not drained")
        return
    standing.drain(state_dir, f"{getpass.getuser()}{f': {reason}' if reason else ''}", at_once=now)
    print(f"{'cancels' if now else 'drains'} all engines; none is submitted until `scavenger drain --off`")
