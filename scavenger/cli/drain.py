"""`scavenger drain`: give every harvested GPU back, or those of some nodes, and take none until told otherwise.

Argument parsing and printing.

Boundary: one subcommand.
"""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Annotated

import typer

from scavenger import config
from scavenger.cli.options import DEFAULT_CONFIG, ConfigOption
from scavenger.errors import ConfigError, DaemonUnavailable
from scavenger.host.user import user_name


def drain(
    config_path: ConfigOption = DEFAULT_CONFIG,
    now: Annotated[bool, typer.Option("--now", help="cancel engines without letting them drain")] = False,
    off: Annotated[bool, typer.Option("--off", help="harvest again")] = False,
    reason: Annotated[str, typer.Option(help="why, for the ledger")] = "",
    node: Annotated[
        list[str] | None, typer.Option("--node", help="only engines of this node; may be repeated")
    ] = None,
) -> None:
    """Give every harvested GPU back, or those of some nodes, and take none there until `drain --off`. The daemon sees it within seconds,
    also one that starts later.

    Exit code 1: it is noted, and nothing acts on it now: no daemon serves, or no node has that name.
    """
    from scavenger.harvest import limits as harvest_limits
    from scavenger.observe import status

    if now and off:
        raise ConfigError("drain --now and --off contradict each other", "give one of them")
    settings = config.read_daemon(config_path)
    state_dir = settings.daemon.state_dir
    if not state_dir.is_dir():
        raise ConfigError(
            f"the state directory {state_dir} does not exist", "name the daemon's configuration with --config"
        )
    gone = _gone(state_dir)
    if node:
        _nodes(state_dir, node, now=now, off=off, reason=reason, gone=gone)
        return
    if off:
        was, stop_file = harvest_limits.resume(state_dir), settings.harvest.stop_file
        still = harvest_limits.read_stop(stop_file, "the stop file")
        does = (
            ("a daemon harvests again once one serves" if gone else "harvests again")
            if was
            else "was not drained"
        )
        print(f"{does}; but {stop_file} is there, and stops it all the same" if still is not None else does)
        return
    harvest_limits.drain(state_dir, _who(reason), at_once=now)
    if not gone:
        print(
            f"{'cancels' if now else 'drains'} all engines; none is submitted until `scavenger drain --off`"
        )
        print("`scavenger status` tells what is still held")
        return
    print(f"NOTHING IS {'CANCELLED' if now else 'DRAINED'} NOW, because no daemon serves: {gone}")
    print(
        "it is noted: a daemon that starts gives everything back and submits nothing until `scavenger drain --off`"
    )
    print(status.left_behind(settings.harvest.partition))
    raise typer.Exit(1)


def _who(reason: str) -> str:
    return f"{user_name()}{f': {reason}' if reason else ''}"


def _nodes(state_dir: Path, nodes: Sequence[str], *, now: bool, off: bool, reason: str, gone: str) -> None:
    from scavenger.harvest import limits as harvest_limits

    if now:
        raise ConfigError(
            "drain --now is for all engines: those of one node are drained",
            "leave out --now, and `scancel` what must go at once; or leave out --node",
        )
    if off:
        for name in nodes:
            was = harvest_limits.resume_node(state_dir, name)
            print(f"{name}: {'engines may start there again' if was else 'was not drained'}")
        return
    for name in nodes:
        harvest_limits.drain_node(state_dir, name, _who(reason))
    again = "".join(f" --node {name}" for name in nodes)
    print(f"drains engines on {', '.join(nodes)}; none starts there until `scavenger drain --off{again}`")
    if gone:
        print(f"it is noted, and nothing is drained now, because no daemon serves: {gone}")
        raise typer.Exit(1)
    if strange := unknown_nodes(_seen_nodes(state_dir), nodes):
        off_again = "".join(f" --node {name}" for name in strange)
        print(
            f"NO NODE OF SLURM IS NAMED {', '.join(strange)}: it is noted, and drains nothing. Names are those of `sinfo -N`; "
            f"take it back with `scavenger drain --off{off_again}`"
        )
        raise typer.Exit(1)


def unknown_nodes(seen: Set[str], nodes: Sequence[str]) -> tuple[str, ...]:
    """Those of `nodes` that the last poll did not show; none where it showed no node at all. Pure."""
    return tuple(name for name in nodes if name not in seen) if seen else ()


def _seen_nodes(state_dir: Path) -> frozenset[str]:
    """Names of all clusters' nodes at the daemon's last poll of each; empty where one was not polled yet."""
    from scavenger.observe import status

    seen = status.read(state_dir)
    polled = [one and one.nodes for one in (seen.harvest, *(cluster.harvest for cluster in seen.clusters))]
    return frozenset(node.name for nodes in polled for node in nodes or ()) if all(polled) else frozenset()


def _gone(state_dir: Path) -> str:
    """Why no daemon serves this state directory; "" when one does."""
    from scavenger.daemon.ownership import process_there
    from scavenger.observe import status

    try:
        seen = status.read(state_dir)
    except DaemonUnavailable as error:
        return error.cause
    return status.absent(seen, time.time(), process_there(seen.host, seen.pid))
