"""Weight pulls as they come and go: flows over one shared interface, and from engine to engine, in virtual time.

Without relays all pulls share the source's interface, max-min fair (`links.fair_rates`), and rates change when a flow begins or ends. With
relays they are served in order, each at its full rate: the source serves as many as its interface feeds, and each receiver that is done
one more (shared evenly they would all finish last, and none could relay). One whose holder is gone keeps its bytes, and waits for another.

The source is the trainer, whose interface pulls have for themselves: to publish is to copy to host memory and to hash
(`trainer_model.publish_s`), no byte leaves before engines ask for it, and gradients have a network of their own (`link_bytes_s`).
Knows of versions only that a new one has no holders.

Sharing one network interface: max-min fair rates. Pure. Knows nothing of what the bytes are.

Boundary: one shared interface, in virtual time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from scavenger.simulate.clock import Simulation, Timer


def fair_rates(caps: Mapping[str, float], capacity: float) -> dict[str, float]:
    """Max-min fair shares of `capacity`: none above its cap, and what the small ones leave goes to the others."""
    rates: dict[str, float] = {}
    left = capacity
    for count, (name, cap) in zip(
        range(len(caps), 0, -1), sorted(caps.items(), key=lambda item: (item[1], item[0])), strict=True
    ):
        rates[name] = min(cap, left / count)
        left -= rates[name]
    return rates


_DONE_S = 1e-6  # what is over so soon is over: float time does not resolve less


@dataclass(slots=True)
class _Flow:
    name: str
    left: float
    done: Callable[[], None]
    rate: float = 0.0
    newest: bool = True  # it pulls what those pull who begin now


class Network:
    """`source_bytes_s`: the interface that all pull from; `end_bytes_s`: each puller's own. `relay`: who has finished serves the others."""

    def __init__(self, sim: Simulation, source_bytes_s: float, end_bytes_s: float, relay: bool) -> None:
        self._sim, self._source, self._end, self._relay = sim, source_bytes_s, end_bytes_s, relay
        self._flows: dict[str, _Flow] = {}
        self._holders = 0
        self._since = sim.now
        self._timer: Timer | None = None
        self._stale = False

    def new_version(self) -> None:
        """No peer holds what is pulled from now on."""
        self._holders = 0
        for flow in self._flows.values():
            flow.newest = False

    def pull(self, name: str, nbytes: float, done: Callable[[], None]) -> None:
        """Begin a pull; `done` is called when it is over. A pull of the same name is given up."""
        self._advance()
        self._flows[name] = _Flow(name, nbytes, done)
        self._later()

    def cancel(self, name: str) -> None:
        if name in self._flows:
            self._advance()
            del self._flows[name]
            self._later()

    def left_holder(self) -> None:
        """One that served others is gone."""
        self._advance()
        self._holders = max(0, self._holders - 1)
        self._later()

    def _advance(self) -> None:
        now = self._sim.now
        for flow in self._flows.values():
            flow.left -= flow.rate * (now - self._since)
        self._since = now

    def _later(self) -> None:
        """Rates are worked out once for all that begins at one instant."""
        if not self._stale:
            self._stale = True
            self._sim.at(self._sim.now, self._share, priority=1)

    def _share(self) -> None:
        self._stale = False
        self._advance()
        if self._relay:
            by_source = max(1, int(self._source // self._end))
            for position, flow in enumerate(self._flows.values()):
                rate = min(self._end, self._source) if position < by_source else self._end
                flow.rate = rate if position < by_source + self._holders else 0.0
        else:
            rates = fair_rates(dict.fromkeys(sorted(self._flows), self._end), self._source)
            for name, flow in self._flows.items():
                flow.rate = rates[name]
        if self._timer is not None:
            self._timer.cancel()
        due = min((flow.left / flow.rate for flow in self._flows.values() if flow.rate), default=math.inf)
        self._timer = self._sim.after(max(0.0, due), self._finish) if math.isfinite(due) else None

    def _finish(self) -> None:
        self._timer = None
        self._advance()
        over = [
            flow for _, flow in sorted(self._flows.items()) if flow.rate and flow.left <= flow.rate * _DONE_S
        ]
        for flow in over:
            del self._flows[flow.name]
        self._holders += sum(flow.newest for flow in over)
        self._later()
        for flow in over:
            flow.done()
