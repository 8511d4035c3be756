"""Which idle GPUs are worth a start to which run: the benefit gate. Pure.

    Demand.benefit   what one more engine saves the run, how long its start takes
    Limits.idle      since when each GPU is idle, how long such GPUs last  --`autoscale.start_benefit`-->
    the age from which one is worth a start

GPUs that are too young are the first that others would take, so what is set aside for others and for headroom is taken from them. A job of
ours that waits starts on whatever comes free first, without asking: it is weighed by the GPUs that are there when it may begin.
Where nobody says what an engine is worth, or too little was seen of such GPUs, there is no gate. An engine of several GPUs needs as many
that are old enough, and is weighed by the life of one. Owns the words that a decision's record has of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from scavenger.cluster.model import Node
from scavenger.harvest.decide.actions import Limits
from scavenger.harvest.decide.free_capacity import FreeCapacity
from scavenger.policy.demand import Demand
from scavenger.policy.fleet_size import StartBenefit
from scavenger.policy.idle_gpus import Idle, node_class


class StartBenefits:
    """Of one decision. `measure` once, when the room is known and nothing of it is taken."""

    def __init__(self, demand: Sequence[Demand], limits: Limits, now: float) -> None:
        self._idle, self._now = (
            limits.idle or Idle({}, {}, 0.0),
            now,
        )  # of which nothing is known there is no gate
        self._demand = [want for want in demand if want.benefit is not None]
        self._start_benefits: dict[tuple[int, str], StartBenefit | None] = {}
        self._young: dict[int, dict[str, int]] = {}
        self._classes: dict[str, str] = {}

    def measure(self, room: FreeCapacity) -> None:
        """How many GPUs of each node are too young for each run, those left out that are set aside anyway."""
        for want in self._demand:
            found = self._young[want.run_id] = {}
            for name, space in room.resources.items():
                node = room.nodes[name]
                start_benefit = self._start_benefit(want, node)
                if start_benefit is None or start_benefit.age_s <= 0 or not space.gpus:
                    continue
                young = self._idle.young(name, node.idle_gpus, start_benefit.age_s, self._now) - (
                    node.idle_gpus - space.gpus
                )
                if young > 0:
                    found[name] = young

    def _start_benefit(self, want: Demand, node: Node) -> StartBenefit | None:
        kind = self._classes[node.name] = node_class(node)
        key = (want.run_id, kind)
        if key not in self._start_benefits:
            assert want.benefit is not None  # by `_demand`
            self._start_benefits[key] = self._idle.start_benefit(node, want.benefit)
        return self._start_benefits[key]

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
        start_benefit = self._start_benefit(want, node) if want.benefit is not None else None
        if start_benefit is None or start_benefit.age_s <= 0:
            return ""
        settled = node.idle_gpus - self._idle.young(node.name, node.idle_gpus, start_benefit.age_s, at)
        if settled >= gpus:
            return ""
        if start_benefit.age_s == math.inf:
            return f"none is worth a start: {start_benefit.reason}"
        return f"{settled} of {gpus} GPUs have then been idle for {start_benefit.age_s:.0f} s: {start_benefit.reason}"

    def why(self, want: Demand, node: str) -> str:
        """The figures by which an engine there is worth its start; "" where nobody weighed it."""
        start_benefit = self._start_benefits.get((want.run_id, self._classes.get(node, "")))
        return start_benefit.reason if start_benefit is not None else ""

    def told(self) -> tuple[str, ...]:
        """All gates, for the record."""
        runs = {want.run_id: want.run for want in self._demand}
        return tuple(
            (
                f"run {runs[run_id]} on {kind}: "
                f"{'never' if start_benefit.age_s == math.inf else f'from {start_benefit.age_s:.0f} s on'} ({start_benefit.reason})"
            )
            for (run_id, kind), start_benefit in sorted(self._start_benefits.items())
            if start_benefit is not None
        )
