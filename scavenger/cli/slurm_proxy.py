"""`scavenger slurm-proxy`: asks Slurm for the daemon, as a Unix user of its own. Arguments; `scavenger.cluster.proxy.server` does the work.

Boundary: one subcommand.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import Annotated, Literal

import typer

from scavenger.errors import ConfigError


def slurm_proxy(
    role: Annotated[Literal["submit", "view"], typer.Option(help="submit or view")],
    socket: Annotated[
        Path, typer.Option(help="the Unix socket to make: cluster.submit_socket or view_socket")
    ],
    allow_user: Annotated[str, typer.Option(help="who may connect, alone: the daemon's Unix user")],
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="role submit: cluster.engines_dir, of this process's user alone"),
    ] = None,
    partition: Annotated[
        list[str] | None,
        typer.Option(help="role submit: partitions that jobs may name; may be repeated; none = any"),
    ] = None,
    command_timeout_s: Annotated[float, typer.Option(min=1, help="one Slurm command may take")] = 20.0,
) -> None:
    """Ask Slurm for the daemon as this Unix user, until it is ended: submit and cancel engines' jobs, or read the queue."""
    from scavenger.cluster.proxy import server
    from scavenger.cluster.slurm.backend import SlurmCluster
    from scavenger.cluster.unix_users import uid_of
    from scavenger.observe import logs

    logs.configure(os.environ)
    if (role == "submit") != (folder is not None):
        raise typer.BadParameter("--dir goes with --role submit, and is needed there")
    allowed = pwd.getpwuid(uid_of(allow_user))
    server.check_separate(allowed, os.getuid())
    cluster = SlurmCluster(timeout_s=command_timeout_s)
    part: server.SubmitRole | server.ViewRole
    if folder is not None:
        if not folder.is_absolute():
            raise ConfigError(f"--dir {folder} is relative", "write the absolute path of cluster.engines_dir")
        folder = folder.resolve()
        server.prepare(folder)
        allow = server.EngineJobRules(folder, frozenset(partition or ()))
        part = server.SubmitRole(cluster, folder, allow.check)
    else:
        part = server.ViewRole(cluster, server.OperatorCheck(cluster.environment, command_timeout_s))
    with server.listening(socket, allowed, part) as listener:
        listener.serve()
