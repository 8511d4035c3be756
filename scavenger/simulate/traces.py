"""Readers of the traces that the project is evaluated on: idle GPUs by node and by virtual cluster, the jobs behind them, spot instances.

Owns their columns (the traces' README describes them). Knows no path: the user gives one. `parse_*` are pure; `read_*` open the file.

Boundary: file formats of others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scavenger.errors import ConfigError
from scavenger.parsing import whole
from scavenger.simulate.csvfile import CsvRow, read_csv, rows
from scavenger.simulate.fleet import (
    LONGEST_S,
    MOST_GPUS,
    MOST_MOVES,
    MOST_NODE_GPUS,
    MOST_NODES,
    FleetTrace,
    Occupation,
    from_deltas,
)


@dataclass(frozen=True, slots=True)
class VirtualClusters:
    """Idle GPUs of each virtual cluster (as a `FleetTrace` whose "nodes" are the clusters), and GPUs queued for in it from a time on."""

    fleet: FleetTrace
    pending: tuple[tuple[float, str, int], ...]


def parse_nodes(
    lines: Iterable[str], gpus_per_node: int, end_s: float, origin: str = "trace, simulated placement"
) -> FleetTrace:
    """t_seconds, node, idle_gpus, delta; rows at t = 0 with delta 0 are the first state. `end_s`: the trace's length."""
    initial: dict[str, int] = {}
    deltas: list[tuple[float, str, int]] = []
    idle: dict[str, int] = {}
    for row in rows(lines, ("t_seconds", "node", "idle_gpus", "delta")):
        t_s, node, count, delta = (
            _time(row, "t_seconds"),
            row.text("node"),
            row.whole("idle_gpus"),
            row.whole("delta", least=None),
        )
        if node not in initial:
            if t_s or delta:
                raise row.wrong(f"{node!r} has no row at t = 0")
            initial[node] = idle[node] = count
            _at_most(row, "nodes", len(initial), MOST_NODES)
            continue
        if idle[node] + delta != count:
            raise row.wrong(f"{node!r} had {idle[node]} idle GPUs before a change of {delta}")
        if count > gpus_per_node:
            raise row.wrong(f"more than {gpus_per_node} GPUs idle on one node")
        _in_order(row, t_s, deltas[-1][0] if deltas else 0.0, end_s)
        deltas.append((t_s, node, delta))
        idle[node] = count
    return from_deltas(origin, end_s, dict.fromkeys(initial, gpus_per_node), initial, deltas)


def parse_virtual_clusters(
    lines: Iterable[str], end_s: float, origin: str = "trace, measured"
) -> VirtualClusters:
    """t_seconds, vc, idle_gpus, total_gpus, pending_gpus; rows on change."""
    capacity: dict[str, int] = {}
    initial: dict[str, int] = {}
    idle: dict[str, int] = {}
    deltas: list[tuple[float, str, int]] = []
    pending: list[tuple[float, str, int]] = []
    before = 0.0
    for row in rows(lines, ("t_seconds", "vc", "idle_gpus", "total_gpus", "pending_gpus")):
        t_s, name, count = _time(row, "t_seconds"), row.text("vc"), row.whole("idle_gpus")
        before = _in_order(row, t_s, before, end_s)
        pending.append((t_s, name, row.whole("pending_gpus")))
        if name not in initial:
            if t_s:
                raise row.wrong(f"{name!r} has no row at t = 0")
            capacity[name] = _at_most(row, "GPUs", row.whole("total_gpus", least=1), MOST_GPUS)
            initial[name] = idle[name] = count
        elif row.whole("total_gpus") != capacity[name]:
            raise row.wrong(f"{name!r} had {capacity[name]} GPUs before")
        deltas.append((t_s, name, count - idle[name]))
        idle[name] = count
    return VirtualClusters(from_deltas(origin, end_s, capacity, initial, deltas), tuple(pending))


def parse_jobs(lines: Iterable[str]) -> tuple[Occupation, ...]:
    """t_start, t_end, vc, gpus, placement as `node:k|node:k`."""
    jobs = []
    for row in rows(lines, ("t_start", "t_end", "vc", "gpus", "placement")):
        placed = []
        for item in row.text("placement").split("|"):
            node, _, text = item.rpartition(":")
            count = whole(text)
            if not node or not count:
                raise row.wrong("no placement node:k|node:k")
            placed.append((node, _at_most(row, "GPUs of a node", count, MOST_NODE_GPUS)))
        job = Occupation(_time(row, "t_start"), _time(row, "t_end"), tuple(placed), row.line)
        if job.gpus != row.whole("gpus") or job.end_s < job.start_s:
            raise row.wrong(f"{job.gpus} GPUs are placed, from {job.start_s:g} to {job.end_s:g} s")
        jobs.append(job)
    return tuple(jobs)


def parse_spot(
    lines: Iterable[str],
    source: str,
    gpus_per_instance: int,
    stream: np.random.Generator,
    end_s: float | None = None,
) -> FleetTrace:
    """Spot instances of one `source` as nodes that are wholly there or not. The trace counts instances: which one goes is drawn.

    `gpus_per_instance`: what one of ours would have, whatever the trace's had. `end_s`: None for the last change.
    """
    counts: list[tuple[float, int]] = []
    target = moves = 0
    seen = set()
    for row in rows(lines, ("source", "target", "t_seconds", "available_instances")):
        seen.add(row.text("source"))
        if row.text("source") != source:
            continue
        before_s, before = counts[-1] if counts else (0.0, 0)
        t_s, count = _time(row, "t_seconds"), _instances(row, "available_instances")
        _in_order(row, t_s, before_s, t_s if end_s is None else end_s)
        counts.append((t_s, count))
        target = max(target, _instances(row, "target"), count)
        moves += abs(count - before) * gpus_per_instance
        _at_most(row, "GPUs that come and go so far", moves, MOST_MOVES)
    if not counts:
        raise ConfigError(f"no spot instances of source {source!r}", f"the sources are {sorted(seen)}")
    names = [f"spot-{index:03}" for index in range(target)]
    up: list[str] = []
    down = list(names)
    deltas: list[tuple[float, str, int]] = []
    for t_s, count in counts:
        while len(up) < count:
            up.append(down.pop(0))
            deltas.append((t_s, up[-1], gpus_per_instance))
        while len(up) > count:
            down.append(up.pop(int(stream.integers(len(up)))))
            deltas.append((t_s, down[-1], -gpus_per_instance))
    first = dict.fromkeys(names, 0)
    for t_s, name, delta in deltas:
        first[name] += 0 if t_s else delta
    later = [one for one in deltas if one[0]]
    return from_deltas(
        f"spot trace {source}", end_s or counts[-1][0], dict.fromkeys(names, gpus_per_instance), first, later
    )


def _time(row: CsvRow, column: str) -> float:
    t_s = row.number(column)
    if t_s > LONGEST_S:
        raise row.wrong(
            f"{column} is {t_s:g} s from the trace's start: over 10 years (a date, or milliseconds?)"
        )
    return t_s


def _instances(row: CsvRow, column: str) -> int:
    return _at_most(row, column, row.whole(column), MOST_NODES)


def _at_most(row: CsvRow, what: str, count: int, most: int) -> int:
    if count > most:
        raise row.wrong(f"{what}: {count}, and at most {most:,} are taken,")
    return count


def _in_order(row: CsvRow, t_s: float, before: float, end_s: float) -> float:
    if not before <= t_s <= end_s:
        raise row.wrong(
            f"time {t_s:g} s is not between the row before ({before:g} s) and the end ({end_s:g} s)"
        )
    return t_s


def read_nodes(path: Path, gpus_per_node: int, end_s: float) -> FleetTrace:
    return read_csv(
        path,
        lambda lines: parse_nodes(
            lines, gpus_per_node, end_s, f"{path.name} (trace-driven, simulated placement)"
        ),
    )


def read_virtual_clusters(path: Path, end_s: float) -> VirtualClusters:
    return read_csv(path, lambda lines: parse_virtual_clusters(lines, end_s, f"{path.name} (measured)"))


def read_jobs(path: Path) -> tuple[Occupation, ...]:
    return read_csv(path, parse_jobs)


def read_spot(
    path: Path, source: str, gpus_per_instance: int, stream: np.random.Generator, end_s: float | None = None
) -> FleetTrace:
    return read_csv(path, lambda lines: parse_spot(lines, source, gpus_per_instance, stream, end_s))
