"""Which addresses are this host's own. Asks the kernel's routes; resolves no name and sends nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterable


def own(addresses: Iterable[str]) -> frozenset[str]:
    """Those of the IP addresses that this host has. A name, or an address without a route, is none of them."""
    return frozenset(address for address in set(addresses) if _is_own(address))


def _is_own(address: str) -> bool:
    """To an address of its own a host sends from that address. (Binding would tell nothing where `ip_nonlocal_bind` is set.)"""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.inet_pton(family, address)
        with socket.socket(family, socket.SOCK_DGRAM) as udp:
            udp.connect((address, 9))  # of UDP it chooses the route only; any port will do
            return str(udp.getsockname()[0]) == address
    except OSError:
        return False
