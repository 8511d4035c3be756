"""Sharing one network interface: max-min fair rates. Pure. Knows nothing of what the bytes are."""

from __future__ import annotations

from collections.abc import Mapping


def fair_rates(caps: Mapping[str, float], capacity: float) -> dict[str, float]:
    """Max-min fair shares of `capacity`: nobody above its cap, and what the small ones leave goes to the others."""
    rates: dict[str, float] = {}
    left = capacity
    for count, (name, cap) in zip(range(len(caps), 0, -1), sorted(caps.items(), key=lambda item: (item[1], item[0])), strict=True):
        rates[name] = min(cap, left / count)
        left -= rates[name]
    return rates
