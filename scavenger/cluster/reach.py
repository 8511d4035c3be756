"""Whether compute nodes could reach a daemon that announces itself under an address. Pure; nothing is resolved and no socket opened.

Refuses what can be known from names: an announced address that is each host's own, where the partition has nodes on other hosts. A daemon
that listens on loopback and announces another address may stand behind a proxy or a tunnel: that is doubted. Whether a firewall stands
between is for `scavenger doctor --submit` to try.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Set

from scavenger.cluster.model import NodeHost
from scavenger.errors import ConfigError

REMEDY = (
    "in [daemon], listen = \"0.0.0.0\" (or this host's address in the cluster's network), and advertise = the name by which compute nodes "
    "find this host, if it is another than `hostname` says"
)

#: Of one part of an address, as inet_aton reads it.
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]{1,8}|0[0-7]{0,11}|[1-9][0-9]{0,9}")


def announced(listen: str, advertise: str, hostname: str) -> str:
    """The host that engines are told to connect to."""
    return advertise or (hostname if listen == "0.0.0.0" else listen)


def is_loopback(host: str) -> bool:
    """By its text alone: Debian's hosts file has a host's own name at 127.0.1.1, and elsewhere it means that host all the same."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return _is_short_loopback(host) or host.lower().rstrip(".") in (
            "localhost",
            "localhost.localdomain",
            "ip6-localhost",
        )


def _is_short_loopback(host: str) -> bool:
    """127.1, 0x7f.1 or 2130706433: what the resolver takes for an address as well, with fewer parts or other bases (inet_aton)."""
    parts = host.split(".")
    if len(parts) > 4 or not all(_NUMBER.fullmatch(part) for part in parts):
        return False
    numbers = [int(part, 16 if part[:2] in ("0x", "0X") else 8 if part[0] == "0" else 10) for part in parts]
    return (numbers[0] if parts[1:] else numbers[0] >> 24) == 127


def elsewhere(
    hosts: Mapping[str, NodeHost], names: Set[str], hostname: str, own: Set[str] = frozenset()
) -> list[str]:
    """Those of the named nodes that lie on another host than this one, sorted; of a node that Slurm does not place nothing is said.

    `own`: addresses of this host.
    """
    here = _short(hostname)
    return sorted(
        name
        for name in names & hosts.keys()
        if not (
            is_loopback(hosts[name].address)
            or hosts[name].address in own
            or _short(hosts[name].hostname or name) == here
        )
    )


def unreachable(listen: str, advertise: str, hostname: str, others: list[str]) -> str:
    """Why nodes on other hosts (`elsewhere`) cannot reach the daemon, or ""."""
    host = announced(listen, advertise, hostname)
    if not others or not is_loopback(host):
        return ""
    key = "daemon.advertise" if advertise else "daemon.listen"
    return (
        f"{key} = {host!r} is each host's own address, and {_are(others)} not on this host ({hostname}): engines there would find no "
        "daemon, and exit with 69"
    )


def doubted(listen: str, advertise: str, hostname: str, others: list[str]) -> str:
    """What must be there for those nodes to reach the daemon, where nothing here says that it is; "" where nothing must."""
    host = announced(listen, advertise, hostname)
    if not others or is_loopback(host) or not is_loopback(listen):
        return ""
    return (
        f"daemon.listen = {listen!r} binds this host's loopback alone, and {_are(others)} not on this host ({hostname}): "
        f"engines there are told to connect to {host}, where a proxy or a tunnel must take them to the daemon"
    )


def _are(others: list[str]) -> str:
    return f"{others[0]} and {len(others) - 1} more nodes are" if others[1:] else f"node {others[0]} is"


def check(listen: str, advertise: str, hostname: str, others: list[str]) -> None:
    """Raises `ConfigError`, naming cause and remedy."""
    if why := unreachable(listen, advertise, hostname, others):
        raise ConfigError(why, REMEDY)


def _short(name: str) -> str:
    return name.lower().partition(".")[0]
