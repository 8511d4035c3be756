"""Whether ranks reach one another, checked at the start and within a deadline: by MPI, and by TCP, for torch.distributed.

Owns the two checks and their words. MPI is handed in: this module imports neither it nor torch.
"""

from __future__ import annotations

import errno
import itertools
import random
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from scavenger.errors import ConfigError
from trainer.mpi_settings import HostFault

TAG = 3
#: MPI_Init has met before: what is left is one small message each way.
LIMIT_S = 20.0
CONNECT_S = 5.0
#: The ports that Linux gives by itself, and those where it does not say.
PORT_RANGE, PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range"), "32768 60999"
#: At how many of them a host is tried; how long an answer may take between nodes of one cluster.
TRIED_PORTS, SILENT_S = 8, 3.0
_POLL_S = 0.002


def partners(rank: int, size: int) -> tuple[int, ...]:
    """Who exchanges a byte with `rank`: rank 0 with all, all with their neighbours. Symmetric. Pure."""
    if rank == 0:
        return tuple(range(1, size))
    return tuple(sorted({0, (rank - 1) % size, (rank + 1) % size} - {rank}))


def exchange(
    mpi: Any, world: Any, limit_s: float, clock: Callable[[], float] = time.monotonic
) -> tuple[int, ...]:
    """All ranks of `world` (mpi4py's): a byte to and from each partner. With whom that failed within `limit_s` seconds.

    Raises `mpi.Exception` where the library itself finds that it cannot reach one.
    """
    rank: int = world.Get_rank()
    others = partners(rank, world.Get_size())
    inbox = {other: bytearray(1) for other in others}
    outgoing = {other: world.Isend([b"\1", mpi.BYTE], dest=other, tag=TAG) for other in others}
    incoming = {other: world.Irecv([inbox[other], mpi.BYTE], source=other, tag=TAG) for other in others}
    deadline = clock() + limit_s
    while True:
        incoming = {other: request for other, request in incoming.items() if not request.Test()}
        outgoing = {other: request for other, request in outgoing.items() if not request.Test()}
        if not incoming and not outgoing:
            return ()
        if clock() > deadline:
            return tuple(sorted(incoming.keys() | outgoing.keys()))
        time.sleep(_POLL_S)


def unheard(rank: int, host: str, missing: Sequence[int], limit_s: float) -> str:
    others = ", ".join(map(str, missing))
    return f"rank {rank} on {host} exchanged nothing by MPI with rank {others} within {limit_s:g} s"


def check_mpi(mpi: Any, world: Any, limit_s: float) -> None:
    """All ranks. Raises `ConfigError` on each rank that did not hear its partners."""
    remedy = "is TCP open between the job's nodes, and does MPI use a network of both? (OMPI_MCA_btl_tcp_if_include)"
    rank, host = world.Get_rank(), socket.gethostname()
    try:
        missing = exchange(mpi, world, limit_s)
    except mpi.Exception as error:
        raise ConfigError(f"rank {rank} on {host} cannot reach the others by MPI: {error}", remedy) from error
    if missing:
        raise ConfigError(unheard(rank, host, missing, limit_s), remedy)


def connects(host: str, port: int, limit_s: float = CONNECT_S) -> str:
    """Why no process can be reached at `host`:`port` from here, "" where a connection was made."""
    try:
        with socket.create_connection((host, port), limit_s):
            return ""
    except OSError as error:
        return f"{host}:{port}: {error.strerror or error}"


def system_ports() -> str:
    """First and last port that this host gives by itself."""
    try:
        return PORT_RANGE.read_text()
    except OSError:
        return PORTS


def tried_ports(system: str, draw: random.Random, most: int = TRIED_PORTS) -> tuple[int, ...]:
    """Spread over the ports that the system gives (`system_ports`): a firewall may open a part of them. Pure, but for what `draw` gives."""
    first, last = map(int, system.split())
    count = max(1, min(most, last - first + 1))
    bounds = [first + part * (last - first + 1) // count for part in range(count + 1)]
    return tuple(draw.randrange(low, high) for low, high in itertools.pairwise(bounds))


def silent_hosts(
    hosts: Sequence[str], ports: Sequence[int], limit_s: float = SILENT_S
) -> dict[str, HostFault]:
    """Hosts that neither accept nor refuse a connection at any of these ports, and how that showed.

    Srun, MPI and torch connect at ports that the system gives (`tried_ports`). Names that do not resolve are left to them: they say so at
    once.
    """
    if not hosts:
        return {}
    pairs = [(host, port) for host in hosts for port in ports]
    with ThreadPoolExecutor(min(256, len(pairs))) as pool:
        seen = pool.map(lambda pair: _fault(pair[0], pair[1], limit_s), pairs)
        found = dict(zip(pairs, seen, strict=True))
    faults = {host: [found[host, port] for port in ports] for host in hosts}
    return {
        host: HostFault.DROPS if HostFault.DROPS in of_ports else HostFault.UNREACHABLE
        for host, of_ports in faults.items()
        if None not in of_ports
    }


def _fault(host: str, port: int, limit_s: float) -> HostFault | None:
    try:
        socket.create_connection((host, port), limit_s).close()
    except TimeoutError:
        return HostFault.DROPS  # as firewalls do
    except OSError as error:  # no route, or a firewall that says so
        return HostFault.UNREACHABLE if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH) else None
    return None


def check_tcp(comm: Any, limit_s: float = CONNECT_S) -> None:
    """All ranks of `comm` (`comm.Comm`): each connects to rank 0 and to its successor, by host name.

    Raises `ConfigError`, on all ranks. Ranks that share one host use the loopback interface and are not asked.
    """
    host = socket.gethostname()
    listener = socket.create_server(("", 0), backlog=max(16, comm.size))
    try:
        addresses = _gathered(comm, (host, listener.getsockname()[1]))
        if len({name for name, _ in addresses}) == 1:
            return
        targets = sorted({0, (comm.rank + 1) % comm.size} - {comm.rank})
        faults = [(to, connects(addresses[to][0], addresses[to][1], limit_s)) for to in targets]
        found = [f"rank {comm.rank} on {host} cannot reach rank {to} at {why}" for to, why in faults if why]
        said = [words for words, _ in _gathered(comm, ("; ".join(found), 0)) if words]
    finally:
        listener.close()
    if said:
        raise ConfigError(
            f"ranks cannot reach one another by TCP: {'; '.join(said)}",
            "each node's host name must resolve on the others, and TCP between the nodes of the job be open on all ports",
        )


def _gathered(comm: Any, mine: tuple[str, int]) -> tuple[tuple[str, int], ...]:
    """All ranks: every rank's pair, in rank order."""
    decoder = msgspec.msgpack.Decoder(tuple[tuple[str, int], ...])
    if comm.rank:
        comm.reply(msgspec.msgpack.encode(mine))
        return decoder.decode(comm.share(b""))
    pairs = [mine, *(msgspec.msgpack.decode(frame, type=tuple[str, int]) for frame in comm.replies())]
    return decoder.decode(comm.share(msgspec.msgpack.encode(pairs)))
