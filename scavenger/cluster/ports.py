"""TCP ports on this machine: which are free, which are listened on. Loopback only; owns nothing."""

from __future__ import annotations

import os
import socket

from scavenger.errors import ClusterError


def free_ports(count: int) -> int:
    """The first of `count` consecutive free TCP ports below the ephemeral range (a port range in slurm.conf is consecutive)."""
    # two that start at the same moment have neighbouring pids: begin far apart, since looking does not reserve
    for base in range(20000 + os.getpid() * 61 % 11000, 32000, count):
        if all(not in_use(port) for port in range(base, base + count)):
            return base
    raise ClusterError(f"no {count} consecutive free TCP ports between 20000 and 32000", "stop what holds them")


def in_use(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
        return False


def listens(port: int, address: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0
