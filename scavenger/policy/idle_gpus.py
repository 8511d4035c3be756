"""For how long GPUs have been idle, and how long such GPUs last: ages by node and survival curves, from one poll after the other. Pure.

    poll --Idling.observe-->  lives of GPUs that no job but ours has  --survival-->  Idle   what the policy may know of them

A life begins when another user's job leaves a GPU and ends when one takes it, whether an engine of ours came to be on it or not: we take
no GPU from any job, so the GPU's time is the same. On a node the latest to come free is the first to be taken (which GPU Slurm picks is not
seen; so it is in `simulate.fleet_stats`). What was free at the first poll has an age that is not known: it counts as settled, and in no
curve.

Owns the ages. Knows nothing of demand or limits; `now` is given. What happens between two polls is not seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scavenger.cluster.model import ClusterView, Node
from scavenger.policy.fleet_size import Benefit, StartBenefit, start_benefit
from scavenger.policy.forecast.survival import ObservedLife, Survival, SurvivalCurve

#: Pieces of a life that goes on are told to the curves this often, so that they count as lives at risk.
PIECE_S = 900.0
#: After a gap between polls that is longer, ages are not known any more.
GAP_S = 900.0
#: On fewer lost lives nothing is waited for, and no start forgone: they say too little, and a small or young site would idle for nothing.
LEAST_LOST = 100


@dataclass(slots=True)
class _Gpu:
    """`since`: when it came free (Unix s; -inf: before the first poll). `reported_s`: the age up to which the curves know it."""

    since: float
    reported_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Idle:
    """What is known of idle GPUs now. `since`: by node, when each GPU that no job but ours has came free, the earliest first (Unix s).

    `curves`: how long such GPUs last, by class of node; a class of which too little is known has none.
    `share`: as in `fleet_size.start_benefit`.
    """

    since: Mapping[str, Sequence[float]]
    curves: Mapping[str, SurvivalCurve]
    share: float

    def start_benefit(self, node: Node, benefit: Benefit) -> StartBenefit | None:
        """From which age on this node's GPUs are worth a start; None where it is not known."""
        curve = self.curves.get(node_class(node))
        return None if curve is None else start_benefit(benefit, curve, self.share)

    def young(self, node: str, idle: int, age_s: float, now: float) -> int:
        """How many of the node's `idle` GPUs are younger than that (inf: all are); ours hold those that came free first."""
        if age_s == math.inf:
            return idle
        since = self.since.get(node, ())
        return sum(now - at < age_s for at in since[max(0, len(since) - idle) :]) if idle > 0 else 0


def node_class(node: Node) -> str:
    """Nodes whose GPUs are taken for alike."""
    return f"{node.gpus} x {node.gpu_type or 'GPU'}"


class Idling:
    """See the module. Feed it every whole poll."""

    def __init__(self) -> None:
        self._survival = Survival()
        self._free: dict[str, list[_Gpu]] = {}
        self._classes: dict[str, str] = {}
        self._lost: dict[str, int] = {}
        self._at = -math.inf

    def observe(self, view: ClusterView, partition: str, held: Mapping[str, int], now: float) -> None:
        """A poll of the whole cluster; `held`: GPUs that jobs of ours hold, by node."""
        if now < self._at or now - self._at > GAP_S:
            self._free.clear()
        part = view.partition(partition)
        inside = part.nodes if part is not None else frozenset[str]()
        seen = set()
        for node in view.nodes:
            if node.name in inside and node.usable:
                seen.add(node.name)
                self._follow(node, held.get(node.name, 0), now)
        for name in self._free.keys() - seen:  # down, drained or gone: no job took them
            for gpu in self._free.pop(name):
                self._report_life(self._classes[name], gpu, now, lost=False)
        self._at = now

    def _follow(self, node: Node, ours: int, now: float) -> None:
        free = max(0, node.gpus - max(0, node.gpus_allocated - ours))
        here = self._free.get(node.name)
        if here is None:
            self._free[node.name] = [_Gpu(-math.inf) for _ in range(free)]
            self._classes[node.name] = node_class(node)
            return
        kind = self._classes[node.name]
        while len(here) > free:
            self._lost[kind] = self._lost.get(kind, 0) + 1
            self._report_life(kind, here.pop(), now, lost=True)
        for gpu in here:
            if now - gpu.since - gpu.reported_s >= PIECE_S:
                self._report_life(kind, gpu, now, lost=False)
        here.extend(_Gpu(now) for _ in range(free - len(here)))

    def _report_life(self, kind: str, gpu: _Gpu, now: float, *, lost: bool) -> None:
        age = now - gpu.since
        if age < math.inf:
            self._survival.observe(kind, now, ObservedLife(age, lost, gpu.reported_s))
            gpu.reported_s = age

    def known(self, share: float, now: float) -> Idle:
        since = {name: [gpu.since for gpu in gpus] for name, gpus in self._free.items()}
        kinds = [kind for kind, lost in sorted(self._lost.items()) if lost >= LEAST_LOST]
        return Idle(since, {kind: self._survival.curve(kind, now) for kind in kinds}, share)
