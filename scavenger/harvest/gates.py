"""Which idle GPUs are worth a start to which run: the benefit gate. Pure.

    Demand.benefit   what one more engine saves the run, how long its start takes
    Limits.idle      since when each GPU is idle, how long such GPUs last  --`autoscale.gate`-->  the age from which one is worth a start

GPUs that are too young are the first that others would take, so what is set aside for others and for headroom is taken from them. A job of
ours that waits starts on whatever comes free first, without asking: it is weighed by the GPUs that are there when it may begin.
Where nobody says what an engine is worth, or too little was seen of such GPUs, there is no gate. An engine of several GPUs needs as many
that are old enough, and is weighed by the life of one. Owns the words that a decision's record has of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from scavenger.cluster.model import Node
from scavenger.harvest.actions import Limits
from scavenger.harvest.autoscale import Gate
from scavenger.harvest.idling import Idle, node_class
from scavenger.harvest.room import Room
from scavenger.router.machine import Demand


class Gates:
    """Of one decision. `measure` once, when the room is known and nothing of it is taken."""

    def __init__(self, demand: Sequence[Demand], limits: Limits, now: float) -> None:
        self._idle, self._now = limits.idle or Idle({}, {}, 0.0), now  # of which nothing is known there is no gate
        self._demand = [want for want in demand if want.benefit is not None]
        self._gates: dict[tuple[int, str], Gate | None] = {}
        self._young: dict[int, dict[str, int]] = {}
        self._classes: dict[str, str] = {}

    def measure(self, room: Room) -> None:
        """How many GPUs of each node are too young for each run, those left out that are set aside anyway."""
        for want in self._demand:
            found = self._young[want.run_id] = {}
            for name, space in room.spaces.items():
                node = room.nodes[name]
                gate = self._gate(want, node)
                if gate is None or gate.age_s <= 0 or not space.gpus:
                    continue
                young = self._idle.young(name, node.idle_gpus, gate.age_s, self._now) - (node.idle_gpus - space.gpus)
                if young > 0:
                    found[name] = young

    def _gate(self, want: Demand, node: Node) -> Gate | None:
        kind = self._classes[node.name] = node_class(node)
        key = (want.run_id, kind)
        if key not in self._gates:
            assert want.benefit is not None  # by `_demand`
            self._gates[key] = self._idle.gate(node, want.benefit)
        return self._gates[key]

    def young(self, want: Demand) -> Mapping[str, int]:
        """GPUs by node that are not worth a start of this run's engine now."""
        return self._young.get(want.run_id, {})

    @property
    def weigh(self) -> bool:
        """Whether there may be a gate at all: a run says what an engine is worth to it, and enough is known of idle GPUs."""
        return bool(self._demand and self._idle.curves)

    def too_soon(self, want: Demand, node: Node, gpus: int, at: float) -> str:
        """Why `gpus` GPUs of this node are not worth a start to who may begin there at that time (Unix s); "" where they are, or nobody
        can tell. A node that is taken counts as well: who waits for it starts the moment that others leave."""
        gate = self._gate(want, node) if want.benefit is not None else None
        if gate is None or gate.age_s <= 0:
            return ""
        settled = node.idle_gpus - self._idle.young(node.name, node.idle_gpus, gate.age_s, at)
        if settled >= gpus:
            return ""
        if gate.age_s == math.inf:
            return f"none is worth a start: {gate.reason}"
        return f"{settled} of {gpus} GPUs have then been idle for {gate.age_s:.0f} s: {gate.reason}"

    def why(self, want: Demand, node: str) -> str:
        """The figures by which an engine there is worth its start; "" where nobody weighed it."""
        gate = self._gates.get((want.run_id, self._classes.get(node, "")))
        return gate.reason if gate is not None else ""

    def told(self) -> tuple[str, ...]:
        """All gates, for the record."""
        runs = {want.run_id: want.run for want in self._demand}
        return tuple(
            f"run {runs[run_id]} on {kind}: {'never' if gate.age_s == math.inf else f'from {gate.age_s:.0f} s on'} ({gate.reason})"
            for (run_id, kind), gate in sorted(self._gates.items())
            if gate is not None
        )
