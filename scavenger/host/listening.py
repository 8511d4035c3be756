"""Addresses that the daemon binds: whether one can be had, and the one error for one that cannot.

Owns these words and what their exit status is. Serves nothing and keeps no socket open.
"""

from __future__ import annotations

import errno
import os
import socket

from scavenger.errors import ConfigError, ScavengerError

#: Connections that may wait to be accepted (the kernel allows `net.core.somaxconn` at most). libzmq's own 100 is less than a fleet that
#: comes back at once, or a flood: the kernel drops the rest, whose next attempts are 1, 3, 7, 15 and 31 s later.
ACCEPT_QUEUE = 4096
#: Keys of scavenger.toml, for messages.
ROUTER, METRICS = "daemon.listen and daemon.port", "prometheus.listen"
CLUSTERS = "daemon.listen and daemon.clusters_port"
_REMEDIES = {
    ROUTER: "end the program that has it (`ss -ltnp` names it), or choose another daemon.port (0 = the system gives one)",
    CLUSTERS: "end the program that has it (`ss -ltnp` names it), or choose another daemon.clusters_port",
    METRICS: 'end the program that has it (`ss -ltnp` names it), or choose another port ("127.0.0.1:0" = the system gives one)',
}


class PortInUse(ConfigError):
    """Another program listens where the daemon is to."""


def refused(key: str, host: str, port: int, error: OSError) -> ScavengerError:
    """Why nothing can listen at `host`:`port`, which `key` of scavenger.toml names. Only what may pass by itself is no `ConfigError`."""
    where, number = f"{key}: {host}:{port} cannot be listened on", error.errno
    said = error.strerror or (os.strerror(number) if number else str(error)) or str(error)
    if number == errno.EADDRINUSE:
        return PortInUse(f"{where}: the port is in use", f"{_REMEDIES[key]} in scavenger.toml")
    if isinstance(error, socket.gaierror):
        if number == socket.EAI_AGAIN:
            return ScavengerError(
                f"{where}: the host's name cannot be looked up now: {said}", "see to DNS, or write an address"
            )
        return ConfigError(
            f"{where}: no such host: {said}", f"write an address of this host as {key} in scavenger.toml"
        )
    if number == errno.EADDRNOTAVAIL:
        return ConfigError(
            f"{where}: {said}",
            f"write an address of this host as {key} in scavenger.toml; 0.0.0.0 = every one",
        )
    if number in (errno.EACCES, errno.EPERM):
        return ConfigError(f"{where}: {said}", f"choose a port above 1023 as {key} in scavenger.toml")
    if number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
        return ScavengerError(
            f"{where}: {said}", "raise the limit on open files (LimitNOFILE=, ulimit -n), or free memory"
        )
    return ConfigError(f"{where}: {said}", f"choose another address as {key} in scavenger.toml")


def require_free(key: str, host: str, port: int) -> None:
    """Bind the address for a moment. Raises what `refused` gives. Port 0 is always to be had."""
    try:
        family, *_, where = socket.getaddrinfo(
            host, port, socket.AF_INET, socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # as libzmq: what is left of closed connections is in no one's way
            probe.bind(where)
            probe.listen(1)
    except OSError as error:
        raise refused(key, host, port, error) from error
