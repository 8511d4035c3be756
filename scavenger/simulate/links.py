"""Bytes over one shared network interface: max-min fair rates, piecewise constant, hence finish times in closed form. Pure.

Owns the arithmetic of sharing, used for weight pulls, relays and publishing. Knows nothing of what the bytes are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flow:
    """`nbytes` from `start_s` on, at no more than `cap_bytes_s` (the other end's interface).

    `relays`: it may also be served by relays, and when it has finished it serves others at `cap_bytes_s`.
    """

    name: str
    start_s: float
    nbytes: float
    cap_bytes_s: float
    relays: bool = False

    def __post_init__(self) -> None:
        if self.nbytes < 0 or self.cap_bytes_s <= 0:
            raise ValueError(f"flow {self.name}: {self.nbytes} bytes at {self.cap_bytes_s} bytes/s")


def fair_rates(caps: Mapping[str, float], capacity: float) -> dict[str, float]:
    """Max-min fair shares of `capacity`: nobody above its cap, and what the small ones leave goes to the others."""
    rates: dict[str, float] = {}
    left = capacity
    for count, (name, cap) in zip(range(len(caps), 0, -1), sorted(caps.items(), key=lambda item: (item[1], item[0])), strict=True):
        rates[name] = min(cap, left / count)
        left -= rates[name]
    return rates


def finish_times(flows: Sequence[Flow], link_bytes_s: float, relays_bytes_s: float = 0.0) -> dict[str, float]:
    """When each flow is done. `relays_bytes_s`: what earlier holders can serve from the start.

    All flows share the link first; a flow that may use relays then fills up to its cap from their fair share. A flow that relays adds
    its own interface when it has all bytes (a version is served on only when it is whole).
    """
    if len({flow.name for flow in flows}) < len(flows):
        raise ValueError("two flows have one name")
    left = {flow.name: float(flow.nbytes) for flow in flows}
    by_name = {flow.name: flow for flow in flows}
    done: dict[str, float] = {}
    now = min((flow.start_s for flow in flows), default=0.0)
    supply = relays_bytes_s
    while len(done) < len(flows):
        active = [name for name in left if name not in done and by_name[name].start_s <= now]
        coming = [flow.start_s for flow in flows if flow.start_s > now]
        rates = _rates([by_name[name] for name in active], link_bytes_s, supply)
        ends = {name: now + left[name] / rates[name] if rates[name] > 0 else math.inf for name in active}
        until = min([*ends.values(), *coming])
        if math.isinf(until):
            raise ValueError("nothing serves these flows: the link has no capacity")
        for name in active:
            left[name] -= rates[name] * (until - now)
            if ends[name] <= until:
                done[name] = until
                supply += by_name[name].cap_bytes_s if by_name[name].relays else 0.0
        now = until
    return done


def _rates(active: Sequence[Flow], link_bytes_s: float, supply: float) -> dict[str, float]:
    rates = fair_rates({flow.name: flow.cap_bytes_s for flow in active}, link_bytes_s)
    more = fair_rates({flow.name: flow.cap_bytes_s - rates[flow.name] for flow in active if flow.relays}, supply)
    return {name: rate + more.get(name, 0.0) for name, rate in rates.items()}
