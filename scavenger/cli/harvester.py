"""`scavenger harvester`: asks for work on behalf of a further cluster, and submits there. Arguments; `scavenger.harvest.further.process`
does the work.

Boundary: one subcommand.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from scavenger import config
from scavenger.errors import ConfigError
from scavenger.protocol import keys


def harvester(
    cluster: Annotated[
        str, typer.Option("--cluster", help="what the daemon calls this cluster (scavenger keys cluster)")
    ],
    daemon: Annotated[
        Path, typer.Option("--daemon", help="the daemon's public folder, or a copy of its rendezvous.json's")
    ],
    key: Annotated[Path, typer.Option("--key", help="the key pair that the daemon's admin gave")],
    config_path: Annotated[
        Path, typer.Option("--config", help="this cluster's own scavenger.toml: its limits hold")
    ],
) -> None:
    """Ask the daemon of another cluster for engines to submit here, until it is ended: it dials out, and opens no port."""
    from scavenger.cluster import choose
    from scavenger.harvest.further import process
    from scavenger.host import storage
    from scavenger.observe import logs

    logs.configure(os.environ)
    if not keys.CLUSTER_NAME.fullmatch(cluster):
        raise ConfigError(f"{cluster!r} names no cluster", "name it as `scavenger keys cluster` did")
    site, pair = config.read_daemon(config_path), keys.read_keypair(key)
    storage.require_state_dir(site.daemon.state_dir)
    if daemon.resolve() == site.daemon.state_dir.resolve():
        raise ConfigError(
            f"--daemon {daemon} is this cluster's own daemon.state_dir", "name the daemon's public folder"
        )
    backend = choose.backend(site)
    process.require_harmless(site, backend)
    role = process.SiteRole(site, backend, lambda: config.read_daemon(config_path))
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with process.sole(site.daemon.state_dir, f"of cluster {cluster}, for the daemon that {daemon} names"):
        process.HarvesterLoop(cluster, role, pair, daemon).run(stop)
