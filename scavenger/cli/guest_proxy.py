"""`scavenger guest-proxy`: a proxy before an inference service, whose guest reads exact latencies of it.

Boundary: one subcommand, a step of the service's own job. Owns the arguments.
"""

from __future__ import annotations

from typing import Annotated

import typer

from scavenger.errors import ConfigError
from scavenger.host import packages


def guest_proxy(
    service_url: Annotated[
        str, typer.Option("--service", help='the service\'s address, as in "http://127.0.0.1:8000"')
    ],
    listen: Annotated[
        str, typer.Option("--listen", help="HOST:PORT for the service's callers; port 0: the system chooses")
    ] = "127.0.0.1:0",
) -> None:
    """Pass a service's requests on, and tell its guest each streamed reply's latencies (/scavenger/metrics).

    Needs the extra `guest`. Runs until it is stopped, whatever becomes of the guest.
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--listen {listen!r} is no address", 'name it as in "127.0.0.1:8001"')
    packages.require_proxy("a proxy passes HTTP on")
    from scavenger.guest import proxy

    proxy.serve(service_url, host.strip("[]") or "127.0.0.1", int(port))
