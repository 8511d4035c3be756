"""Which engines a fleet's idle GPUs could have carried: a replay that puts an engine wherever one fits. Pure.

Each engine takes `gpus` idle GPUs of one node as soon as they idle; the fullest node that fits first, as the
policy's `FreeCapacity.take` has it.
When others take GPUs that it holds, the node's latest engine goes, and one starts where there is room. `ready_s` after its start it works.

Owns that replay and what it counts. Knows nothing of a training run: it says what the GPUs allow, not what a run would use of it
(the driver plays runs, with the real policy).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo

import numpy as np

from scavenger.errors import ConfigError
from scavenger.simulate.fleet import FleetChange, FleetTrace
from scavenger.simulate.fleet_stats import HOUR_S, weighted_quantile


@dataclass(frozen=True, slots=True)
class SurveyedEngine:
    """One engine's time on a node's GPUs. `lost`: others took them at `end_s`; else the fleet ends there."""

    node: str
    start_s: float
    end_s: float
    lost: bool

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Hour:
    """One hour of the day over all days: working engines on average, and how many there were for 90 % of the time."""

    hour: int
    mean: float
    mostly: int


class _Nodes:
    """Idle GPUs and engines by node, while time goes on."""

    def __init__(self, fleet: FleetTrace, gpus: int) -> None:
        self.gpus = gpus
        self.idle = dict(fleet.initial)
        self.starts: dict[str, list[float]] = {node: [] for node in fleet.initial}
        self.running = 0
        self.open = {node for node in fleet.initial if self.gap(node) >= gpus}

    def gap(self, node: str) -> int:
        return self.idle[node] - self.gpus * len(self.starts[node])

    def update(self, node: str) -> None:
        (self.open.add if self.gap(node) >= self.gpus else self.open.discard)(node)

    def shrink(self, node: str, now: float) -> list[SurveyedEngine]:
        """The engines that no longer fit."""
        lost = []
        while self.gap(node) < 0:
            lost.append(SurveyedEngine(node, self.starts[node].pop(), now, True))
            self.running -= 1
        self.update(node)
        return lost

    def grow(self, most: int, now: float) -> None:
        if not self.open or self.running >= most:
            return
        # an engine makes its node the fullest of those that fit: it stays the first until it is full
        for node in sorted(self.open, key=lambda name: (self.gap(name), name)):
            fitting = min(self.gap(node) // self.gpus, most - self.running)
            if fitting < 1:
                break
            self.starts[node] += [now] * fitting
            self.running += fitting
            self.update(node)


def replay(fleet: FleetTrace, gpus: int, most: int | None = None) -> tuple[SurveyedEngine, ...]:
    """Every engine that `fleet` carries when there may be `most` at once (None: any number), in order of their end."""
    if gpus < 1 or (most is not None and most < 1):
        raise ConfigError(
            f"engines of {gpus} GPUs, at most {most}",
            "an engine has at least one GPU, and there is at least one",
        )
    nodes = _Nodes(fleet, gpus)
    limit = fleet.gpus if most is None else most
    ended: list[SurveyedEngine] = []
    nodes.grow(limit, 0.0)
    for t_s, changes in itertools.groupby(fleet.changes, key=lambda change: change.t_s):
        here = _net(changes)
        for node, idle in here.items():
            nodes.idle[node] = idle
        for node in sorted(here):
            ended += nodes.shrink(node, t_s)
        nodes.grow(limit, t_s)
    left = [
        SurveyedEngine(node, start, fleet.end_s, False)
        for node in sorted(nodes.starts)
        for start in nodes.starts[node]
    ]
    return (*ended, *left)


def _net(changes: Iterable[FleetChange]) -> dict[str, int]:
    """What each node has after everything that happens at one instant."""
    return {change.node: change.idle for change in changes}


def working_s(engines: Sequence[SurveyedEngine], ready_s: float) -> float:
    """Engine seconds after the start-up."""
    return sum(max(0.0, engine.length_s - ready_s) for engine in engines)


def by_hour(
    engines: Sequence[SurveyedEngine], ready_s: float, end_s: float, since: float, zone: tzinfo
) -> tuple[Hour, ...]:
    """Working engines by the hour of the day in `zone`; time 0 is `since` (Unix s). Hours that the fleet does not reach are left out."""
    events = [(engine.start_s + ready_s, 1) for engine in engines if engine.length_s > ready_s]
    events += [(engine.end_s, -1) for engine in engines if engine.length_s > ready_s]
    edges = _hour_edges(end_s, since, zone)
    times = np.array(sorted({*(t_s for t_s, _ in events), *edges}))
    steps = np.zeros(len(times))
    for t_s, delta in events:
        steps[int(np.searchsorted(times, t_s))] += delta
    level, spans = np.cumsum(steps)[:-1], np.diff(times)
    hours = np.array(
        [(_clock(since, zone) + timedelta(seconds=float(t_s) + 1e-6)).hour for t_s in edges[:-1]]
    )
    hour_of = hours[np.searchsorted(np.array(edges), times[:-1], side="right") - 1]
    found = []
    for hour in sorted(set(hours.tolist())):
        inside = hour_of == hour
        values, weights = level[inside], spans[inside]
        mostly = int(weighted_quantile(values, weights, 0.1))
        found.append(Hour(int(hour), float(values @ weights / weights.sum()), mostly))
    return tuple(found)


def _clock(since: float, zone: tzinfo) -> datetime:
    """Wall-clock arithmetic on it keeps the offset of its start: over a change of summer time hours are those of the first day."""
    return datetime.fromtimestamp(since, zone)


def _hour_edges(end_s: float, since: float, zone: tzinfo) -> list[float]:
    """0, every full hour of the clock, and the end."""
    at = _clock(since, zone)
    first = HOUR_S - (at.minute * 60 + at.second + at.microsecond * 1e-6)
    full = [first + HOUR_S * index for index in range(int(end_s / HOUR_S) + 1)]
    return [0.0, *(edge for edge in full if edge < end_s), end_s]
