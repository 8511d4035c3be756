"""TCP ports on this machine: ranges that no other process of ours takes, and which are free or listened on. Loopback only.

To look does not reserve: two that start at the same moment would find the same ports free, and one's daemons would find them taken. So a
range is taken by names first, abstract Unix sockets, which one process at a time can have and the kernel takes back when it ends, however
it ends. They belong to the network namespace, as ports do. Knows nothing of what listens there.
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass, field
from typing import Self

from scavenger.errors import ClusterError

#: Below the ephemeral range, and above what services have.
LOWEST, HIGHEST = 20000, 32000
#: Ports that one name stands for: a range of a thousand is not to take a thousand descriptors.
BLOCK = 16


@dataclass(slots=True)
class Ports:
    """`count` consecutive TCP ports from `first` on (a port range in slurm.conf is consecutive), ours until `close`."""

    first: int
    count: int
    _names: list[socket.socket] = field(default_factory=list)

    def close(self) -> None:
        for name in self._names:
            name.close()
        self._names.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def take_ports(count: int) -> Ports:
    """Ports that are free, and that no other caller gets before they are given back. Raises `ClusterError` when there are none."""
    blocks = -(-count // BLOCK)
    starts = range(LOWEST, HIGHEST - blocks * BLOCK + 1, BLOCK)
    # ports that were just given back may be waited for by the kernel still: the next caller begins elsewhere
    skip = os.getpid() * 61 % max(1, len(starts))
    for at in range(len(starts)):
        base = starts[(skip + at) % len(starts)]
        names = _named(range(base, base + blocks * BLOCK, BLOCK))
        if names and not any(in_use(port) for port in range(base, base + count)):
            return Ports(base, count, names)
        for name in names:
            name.close()
    raise ClusterError(
        f"no {count} consecutive free TCP ports between {LOWEST} and {HIGHEST}", "stop what holds them"
    )


def _named(blocks: range) -> list[socket.socket]:
    """The names of these blocks, all or none."""
    names: list[socket.socket] = []
    for block in blocks:
        name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        names.append(name)
        try:
            name.bind(f"\0scavenger-ports-{block}")
        except OSError as error:
            for one in names:
                one.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return []
    return names


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
