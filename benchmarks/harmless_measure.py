"""What the harmlessness benchmark computes from what happened. Pure: times in seconds of one arm's clock, nothing of Slurm.

A node's idle GPUs are seen as slots: slot l is idle while at least l GPUs of the node are. A *slice* is one such stay; those longer than a
cold start are what could be harvested. At each moment a node's harvested GPUs count up to the number of such slices there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Stay:
    """A job, others' or ours, on `gpus` GPUs of one node."""

    node: str
    gpus: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Use:
    """GPU-seconds: of all nodes, others', ours; idle in slices longer than a cold start, and of these harvested."""

    total: float
    other_users: float
    ours: float
    idle_long: float
    harvested_long: float

    @property
    def share(self) -> float:
        return self.harvested_long / self.idle_long if self.idle_long > 0 else 1.0


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; nan of nothing."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def bounded(
    delays: Mapping[int, float], waited: Mapping[int, float], counted: Iterable[int] | None = None
) -> dict[int, float]:
    """The delay of each job that counts; of one that did not begin what it had waited by the end, which is the least that it can be.

    Delays of those that began alone would be the smaller the more never do. `counted`: those that began with nobody harvesting; None: all.
    """
    every = {**waited, **delays}
    return every if counted is None else {number: every[number] for number in counted if number in every}


def levels(stays: Iterable[Stay], node: str, start: float, end: float) -> list[tuple[float, float, int]]:
    """(from, to, GPUs held) on a node, from `start` to `end`, without gaps."""
    changes: dict[float, int] = {start: 0, end: 0}
    for stay in stays:
        if stay.node == node and stay.end > start and stay.start < end:
            low, high = max(start, stay.start), min(end, stay.end)
            changes[low] = changes.get(low, 0) + stay.gpus
            changes[high] = changes.get(high, 0) - stay.gpus
    found, held = [], 0
    times = sorted(changes)
    for low, high in pairwise(times):
        held += changes[low]
        found.append((low, high, held))
    return found


def long_slices(
    busy: Sequence[tuple[float, float, int]], gpus: int, longer_than: float
) -> list[tuple[float, float]]:
    """Stays of idle slots that outlast a cold start, of all slots of one node."""
    found = []
    for slot in range(1, gpus + 1):
        since: float | None = None
        for low, high, held in busy:
            idle = gpus - held >= slot
            if idle and since is None:
                since = low
            if since is not None and (not idle or high == busy[-1][1]):
                until = high if idle else low
                if until - since > longer_than:
                    found.append((since, until))
                since = None
    return found


def use(
    other_users: Sequence[Stay],
    ours: Sequence[Stay],
    nodes: Sequence[str],
    gpus: int,
    start: float,
    end: float,
    cold_s: float,
) -> Use:
    """Who used the GPUs from `start` to `end`. Slices that the window cuts count with what of them lies in it."""
    theirs = mine = idle = harvested = 0.0
    for node in nodes:
        busy, held = levels(other_users, node, start, end), levels(ours, node, start, end)
        theirs += sum((high - low) * min(n, gpus) for low, high, n in busy)
        mine += sum((high - low) * min(n, gpus) for low, high, n in held)
        slices = long_slices(busy, gpus, cold_s)
        idle += sum(high - low for low, high in slices)
        cuts = sorted(
            {time for low, high, _ in held for time in (low, high)}
            | {time for pair in slices for time in pair}
        )
        for low, high in pairwise(cuts):
            middle = (low + high) / 2
            open_slices = sum(a <= middle < b for a, b in slices)
            taken = next((n for a, b, n in held if a <= middle < b), 0)
            harvested += (high - low) * min(open_slices, taken)
    return Use(len(nodes) * gpus * (end - start), theirs, mine, idle, harvested)
