"""Whether compute nodes could reach a daemon that announces itself under an address. Pure; nothing is resolved and no socket opened.

Refuses what can be known from names: an address that is each host's own, where the partition has nodes on other hosts. Whether a firewall
stands between is for `scavenger doctor --submit` to try.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Set

from scavenger.cluster.model import NodeHost
from scavenger.errors import ConfigError

REMEDY = (
    "in [daemon], listen = \"0.0.0.0\" (or this host's address in the cluster's network), and advertise = the name by which compute nodes "
    "find this host, if it is another than `hostname` says"
)


def announced(listen: str, advertise: str, hostname: str) -> str:
    """The host that engines are told to connect to."""
    return advertise or (hostname if listen == "0.0.0.0" else listen)


def is_loopback(host: str) -> bool:
    """By its text alone: Debian's hosts file has a host's own name at 127.0.1.1, and elsewhere it means that host all the same."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") in ("localhost", "localhost.localdomain", "ip6-localhost")


def elsewhere(hosts: Mapping[str, NodeHost], names: Set[str], hostname: str) -> list[str]:
    """Those of the named nodes that lie on another host than this one, sorted; of a node that Slurm does not place nothing is said."""
    here = _short(hostname)
    return sorted(
        name
        for name in names & hosts.keys()
        if not (is_loopback(hosts[name].address) or _short(hosts[name].hostname or name) == here)
    )


def unreachable(listen: str, advertise: str, hostname: str, others: list[str]) -> str:
    """Why nodes on other hosts (`elsewhere`) cannot reach the daemon, or ""."""
    host = announced(listen, advertise, hostname)
    if not others or not (is_loopback(host) or is_loopback(listen)):
        return ""
    where = f"{others[0]} and {len(others) - 1} more nodes are" if others[1:] else f"node {others[0]} is"
    if not is_loopback(host):
        return (
            f"daemon.listen = {listen!r} binds this host's loopback alone, and {where} not on this host ({hostname}): "
            f"engines there are told to connect to {host}, where nothing listens for them"
        )
    key = "daemon.advertise" if advertise else "daemon.listen"
    return (
        f"{key} = {host!r} is each host's own address, and {where} not on this host ({hostname}): engines there would find no daemon, "
        "and exit with 69"
    )


def check(listen: str, advertise: str, hostname: str, others: list[str]) -> None:
    """Raises `ConfigError`, naming cause and remedy."""
    if why := unreachable(listen, advertise, hostname, others):
        raise ConfigError(why, REMEDY)


def _short(name: str) -> str:
    return name.lower().partition(".")[0]
