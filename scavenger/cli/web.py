"""`scavenger web`: the ledger as web pages. Argument parsing.

Boundary: one subcommand; what it serves needs parts that other commands do not load.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from scavenger import config
from scavenger.cli.options import DEFAULT_CONFIG, ConfigOption, number
from scavenger.errors import ConfigError


def web(
    config_path: ConfigOption = DEFAULT_CONFIG,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="port of 127.0.0.1; 0: the system chooses")
    ] = 8765,
    unix: Annotated[
        Path | None, typer.Option("--socket", help="a Unix socket, mode 0600, in place of port and token")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", help="holds the token, mode 0600; default: web.token in daemon.state_dir"
        ),
    ] = None,
    root_path: Annotated[
        str, typer.Option("--root-path", help="prefix under which a proxy serves it, as /scavenger")
    ] = "",
    export: Annotated[
        Path | None,
        typer.Option(help="write the pages of --run to this HTML file, and serve nothing", dir_okay=False),
    ] = None,
    run: Annotated[str, typer.Option("--run", help="name of the run for --export")] = "",
    every_sample: Annotated[
        bool, typer.Option("--every-sample", help="with --export: pages of samples that never moved too")
    ] = False,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="with --socket: a name by which a proxy asks for it; repeatable"),
    ] = None,
    interval: Annotated[
        float, number("--interval", "seconds between two looks for changes", least=1.0)
    ] = 5.0,
) -> None:
    """Serve runs, steps, samples, other users' waits and decisions as web pages. Reads the ledger; writes none and asks Slurm nothing.

    Also of a daemon that is stopped. Needs the extra `web`. Runs until it is stopped. With --export it writes one file, mode 0600,
    with prompts and completions, for those who have no ledger.
    """
    if (export is None) is not (run == ""):
        raise ConfigError("--export FILE and --run NAME belong together", "give both, or none of them")
    if every_sample and export is None:
        raise ConfigError("--every-sample is for --export", "give --export FILE and --run NAME too")
    if root_path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+/?", root_path):
        raise ConfigError(f"--root-path {root_path!r} is no path", "write it as /scavenger")
    found = config.read_daemon(config_path)
    if export is not None:
        from scavenger.web import export as export_file

        shown = export_file.write(found.ledger_url, run, export, every_sample=every_sample)
        print(f"{export}: {len(shown)} pages, {export.stat().st_size:,} bytes, mode 0600")
        return
    try:
        from scavenger.web import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise ConfigError(f"{error.name} is not installed", "pip install 'scavenger[web]'") from error
    if root_path.lstrip("/").partition("/")[0] in app.OWN:
        raise ConfigError(
            f"--root-path {root_path!r} begins as a page of ours",
            f"choose another name than {', '.join(sorted(app.OWN))}",
        )
    app.serve(
        found.ledger_url,
        port=port,
        unix=unix,
        token_file=token_file or found.daemon.state_dir / "web.token",
        interval_s=interval,
        root_path=root_path,
        hosts=host or (),
    )
