"""`scavenger gateway`: the run's engines as an HTTP endpoint for agents. Argument parsing.

Boundary: one subcommand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from scavenger import config
from scavenger.cli.options import OverOption, SetOption
from scavenger.errors import ConfigError


def gateway(
    run: Annotated[Path, typer.Argument(help="the run's run.toml")],
    host: Annotated[
        str, typer.Option(help="address to listen on; beyond loopback only with TLS")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0: the system chooses; gateway.HOSTNAME.json names it")
    ] = 0,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="certificate chain, PEM")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="its private key, PEM")] = None,
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "processed_logprobs"],
        typer.Option("--logprobs-mode", help="raw_logprobs, as vLLM; or processed_logprobs: as sampled"),
    ] = "raw_logprobs",
    announce: Annotated[
        bool,
        typer.Option(
            "--announce/--no-announce",
            help="whether to write gateway.HOSTNAME.json; not for a caller that chose the port",
        ),
    ] = True,
    over: OverOption = None,
    sets: SetOption = None,
) -> None:
    """Serve vLLM's generate endpoint and OpenAI's chat for the agents of a run. Runs until it is stopped.

    Where it listens and the key that begins episodes are in gateway.HOSTNAME.json in the run's out_dir.
    """
    from scavenger.host import descriptors, packages

    try:
        from scavenger.gateway import app
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed", packages.extra("gateway")) from error
    descriptors.raise_limit()  # one for each connection of an agent
    app.serve(
        config.read_run(run, over or (), sets or ()),
        app.GatewayOptions(host, port, tls_cert, tls_key, logprobs_mode, announce),
    )
