"""`scavenger status`: the daemon's own figures for its user, and what the site's public folder tells for every other. Argument parsing and
printing; which of the two is read.

Boundary: one subcommand.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import typer

from scavenger import config
from scavenger.cli.options import DEFAULT_CONFIG, ConfigOption
from scavenger.config import layers
from scavenger.protocol import keys


def show_status(context: typer.Context, config_path: ConfigOption = DEFAULT_CONFIG) -> None:
    """What the daemon last said of itself: GPUs held, who stopped harvesting, why there are no more engines, ledger, memory.

    Who may not read the daemon's configuration or state is shown what the site that was joined last tells all users. Exit code 1 when no
    daemon serves.
    """
    from scavenger.daemon.ownership import process_there
    from scavenger.observe import public_status, status

    now = time.time()
    source = getattr(context.get_parameter_source("config_path"), "name", "")
    public_dir = _public_dir(config_path, named=source != "DEFAULT")
    if public_dir is not None:
        public = public_status.read(public_dir)
        lines, gone = public_status.lines(public_dir, public, now), public_status.absent(public, now)
    else:
        seen = status.read(config.read_daemon(config_path).daemon.state_dir)
        runs = process_there(seen.host, seen.pid)
        lines, gone = status.lines(seen, now, runs), status.absent(seen, now, runs)
    for line in lines:
        print(line)
    if gone:
        raise typer.Exit(1)


def _public_dir(config_path: Path, *, named: bool) -> Path | None:
    """The public folder to read; None where this user reads the daemon's own files, or no site is known. Raises `ConfigError`.

    A configuration that was `named` and is not there is a mistake, for which nothing else is shown.
    """
    files = layers.files_of(config_path)
    if not all(map(layers.is_there, files)):
        return _joined() if not named else None
    if not all(os.access(file, os.R_OK) for file in files):
        return _joined()
    from scavenger.observe import status

    daemon = config.read_daemon(config_path).daemon
    own = status.path(daemon.state_dir)
    if layers.is_there(own) and not os.access(own, os.R_OK):
        return daemon.public_dir or _joined()
    return None


def _joined() -> Path | None:
    """The public folder of the site that this user joined last."""
    site = keys.noted_site()
    return Path(site) if site else None
