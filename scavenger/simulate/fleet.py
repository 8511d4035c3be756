"""A cluster's idle GPUs over time: a stream of (time, node, idle GPUs change), from whatever source, and the jobs behind it.

Owns the one form that traces, sacct dumps and the synthetic generator are brought into, and checks it. Pure. Knows nothing of files and of
who uses the GPUs: `traces.py` and `sacct.py` read, `benchmarks/synthetic.py` draws, `fleet_stats.py` measures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from scavenger.errors import ConfigError

#: What no cluster exceeds. Beyond it a file is wrong, and reading it on would take memory and hours: who reads one names its line.
MOST_NODE_GPUS, MOST_NODES, MOST_GPUS = 1024, 100_000, 1_000_000
LONGEST_S = 10 * 365.25 * 86_400.0
#: GPUs that change hands over the whole period, each time that one does; the most that one machine keeps in memory.
MOST_MOVES = 20_000_000


@dataclass(frozen=True, slots=True)
class FleetChange:
    """At `t_s` the node's idle GPUs change by `delta` (below 0: others take them) to `idle`."""

    t_s: float
    node: str
    delta: int
    idle: int


@dataclass(frozen=True, slots=True)
class Occupation:
    """A job of others that holds `gpus_by_node` from `start_s` to `end_s`. `line`: where it was read, for messages."""

    start_s: float
    end_s: float
    gpus_by_node: tuple[tuple[str, int], ...]
    line: int = 0

    @property
    def gpus(self) -> int:
        return sum(count for _, count in self.gpus_by_node)


@dataclass(frozen=True, slots=True)
class FleetTrace:
    """Nodes, their idle GPUs at time 0, and every change until `end_s`, in order. `origin` says where it is from; print it."""

    origin: str
    end_s: float
    capacity: Mapping[str, int]
    initial: Mapping[str, int]
    changes: tuple[FleetChange, ...]

    def __post_init__(self) -> None:
        if not self.capacity or self.end_s <= 0:
            raise ConfigError(f"{self.origin}: a fleet of {len(self.capacity)} nodes over {self.end_s} s")
        if self.initial.keys() != self.capacity.keys():
            odd = sorted(self.initial.keys() ^ self.capacity.keys())
            raise ConfigError(f"{self.origin}: nodes without a capacity or a first count: {odd[:5]}")
        idle = dict(self.initial)
        before = 0.0
        moves = sum(abs(change.delta) for change in self.changes)
        if self.gpus > MOST_GPUS or moves > MOST_MOVES:
            raise ConfigError(
                f"{self.origin}: {self.gpus} GPUs that change hands {moves} times; at most {MOST_GPUS:,} and {MOST_MOVES:,} are taken",
                "check its counts of GPUs, or take a shorter period",
            )
        for change in self.changes:
            expected = idle.get(change.node, 0) + change.delta
            if change.node not in idle or change.idle != expected or not change.delta:
                raise ConfigError(
                    f"{self.origin}: {change} follows {idle.get(change.node)} idle GPUs on {change.node!r}"
                )
            if not before <= change.t_s <= self.end_s:
                raise ConfigError(
                    f"{self.origin}: {change} is out of order or after the end at {self.end_s} s"
                )
            idle[change.node], before = expected, change.t_s
            self._check(change.node, expected, change.t_s)
        for node, count in self.initial.items():
            self._check(node, count, 0.0)

    def _check(self, node: str, idle: int, t_s: float) -> None:
        if not 0 <= idle <= self.capacity[node]:
            raise ConfigError(
                f"{self.origin}: node {node!r} has {idle} idle GPUs of {self.capacity[node]} at {t_s} s"
            )

    @property
    def gpus(self) -> int:
        return sum(self.capacity.values())

    def levels(self) -> Iterator[tuple[float, float, int]]:
        """(from, to, idle GPUs of all nodes) for each stretch between changes; stretches of no length are left out."""
        idle = sum(self.initial.values())
        since = 0.0
        for change in self.changes:
            if change.t_s > since:
                yield since, change.t_s, idle
                since = change.t_s
            idle += change.delta
        if self.end_s > since:
            yield since, self.end_s, idle

    def segment(self, start_s: float, length_s: float) -> FleetTrace:
        """The part from `start_s` on, with time starting at 0. Changes at exactly `start_s` have happened."""
        if not 0 <= start_s < start_s + length_s <= self.end_s:
            raise ConfigError(f"{self.origin}: no segment of {length_s} s from {start_s} s in {self.end_s} s")
        initial = dict(self.initial)
        kept = []
        for change in self.changes:
            if change.t_s <= start_s:
                initial[change.node] = change.idle
            elif change.t_s < start_s + length_s:
                kept.append(FleetChange(change.t_s - start_s, change.node, change.delta, change.idle))
        return FleetTrace(
            f"{self.origin}, {start_s:g}-{start_s + length_s:g} s",
            length_s,
            self.capacity,
            initial,
            tuple(kept),
        )

    def only(self, nodes: Iterable[str]) -> FleetTrace:
        """The same over some nodes."""
        kept = set(nodes)
        unknown = kept - self.capacity.keys()
        if unknown:
            raise ConfigError(f"{self.origin}: no nodes {sorted(unknown)[:5]}")
        return FleetTrace(
            self.origin,
            self.end_s,
            {node: count for node, count in self.capacity.items() if node in kept},
            {node: count for node, count in self.initial.items() if node in kept},
            tuple(change for change in self.changes if change.node in kept),
        )


def from_deltas(
    origin: str,
    end_s: float,
    capacity: Mapping[str, int],
    initial: Mapping[str, int],
    deltas: Iterable[tuple[float, str, int]],
) -> FleetTrace:
    """A fleet from (time, node, delta) in order of time."""
    idle = dict(initial)
    changes = []
    for t_s, node, delta in deltas:
        if delta:
            idle[node] = idle.get(node, 0) + delta
            changes.append(FleetChange(t_s, node, delta, idle[node]))
    return FleetTrace(origin, end_s, capacity, initial, tuple(changes))


def from_occupations(
    origin: str, jobs: Sequence[Occupation], capacity: Mapping[str, int], end_s: float
) -> FleetTrace:
    """The GPUs that the jobs leave. At one instant jobs that end make room before others start, and a node's change is the net of both.

    Raises `ConfigError` naming the job's line when a node would hold more than it has: clocks that differ, or jobs that never ended.
    """
    events: list[tuple[float, int, int, str]] = []
    initial = dict(capacity)
    for job in jobs:
        for node, count in job.gpus_by_node:
            if node not in capacity:
                raise ConfigError(
                    f"line {job.line}: node {node!r} is not among the nodes given",
                    "give all nodes, from the same day",
                )
            if job.end_s > 0 and job.start_s < end_s:
                events.append((max(job.start_s, 0.0), -count, job.line, node))
                if job.end_s < end_s:
                    events.append((job.end_s, count, job.line, node))
    changes: list[tuple[float, str, int]] = []
    idle = dict(capacity)
    for t_s, group in _instants(sorted(events)):
        before: dict[str, int] = {}
        # within an instant: what ends first, then what starts
        for delta, line, node in sorted(group, key=lambda item: (item[0] < 0, item[1], item[2])):
            before.setdefault(node, idle[node])
            idle[node] += delta
            if idle[node] < 0:
                raise ConfigError(
                    f"line {line}: at {t_s:g} s node {node!r} would hold {capacity[node] - idle[node]} of its {capacity[node]} GPUs",
                    "clocks differ between hosts, or an earlier job never got its end (`sacctmgr show runawayjobs`)",
                )
        for node, count in sorted(before.items()):
            if t_s == 0:
                initial[node] = idle[node]
            else:
                changes.append((t_s, node, idle[node] - count))
    return from_deltas(origin, end_s, capacity, initial, changes)


def _instants(
    events: Iterable[tuple[float, int, int, str]],
) -> Iterator[tuple[float, list[tuple[int, int, str]]]]:
    group: list[tuple[int, int, str]] = []
    t_s = 0.0
    for at, delta, line, node in events:
        if group and at != t_s:
            yield t_s, group
            group = []
        t_s = at
        group.append((delta, line, node))
    if group:
        yield t_s, group


def most_used(jobs: Iterable[Occupation]) -> dict[str, int]:
    """The most GPUs in use at once on each node: the least that it must have, where nothing better is known."""
    events: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for job in jobs:
        for node, count in job.gpus_by_node:
            events[node] += [(job.start_s, count), (job.end_s, -count)]
    most = {}
    for node, moves in events.items():
        used = peak = 0
        for _, delta in sorted(moves):  # at one instant the ends come first
            used += delta
            peak = max(peak, used)
        most[node] = peak
    return most
