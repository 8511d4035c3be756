"""Where a surveyed fleet comes from: a site's sacct dump, or one of the evaluation's traces, told apart by their columns.

Opens the files whose paths the user gave, and names file and line of what is wrong with them. Runs nothing.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scavenger.cluster.model import Node
from scavenger.cluster.slurm.commands import parse_nodes
from scavenger.errors import ClusterError, ConfigError
from scavenger.simulate import sacct, traces
from scavenger.simulate.clock import Streams
from scavenger.simulate.csvfile import read_csv, rows
from scavenger.simulate.fleet import MOST_NODE_GPUS, FleetTrace, Occupation, from_occupations, most_used
from scavenger.simulate.sacct import Dump, SacctJob
from scavenger.simulate.survey.survey import Observed

#: Hosts of a cluster agree to the second; more than this in the future is a wrong clock.
SKEW_S = 300.0
#: GPUs in use from which on it tells that the dump's jobs hold less than half of them.
_MIN_ALLOCATED_GPUS = 8
#: How a note begins that belongs above the figures.
DOUBT = "DO NOT BELIEVE THIS"


@dataclass(frozen=True, slots=True)
class Only:
    """Which nodes count: those with this type of GPU, and those of this partition ("": any). What the nodes' list tells."""

    gpu_type: str = ""
    partition: str = ""

    def __call__(self, node: Node) -> bool:
        return (not self.gpu_type or node.gpu_type == self.gpu_type) and (
            not self.partition or self.partition in node.partitions
        )


def read_sacct(
    dump: Path, nodes: Path | None, ignore: Collection[str], now: float, only: Only | None = None
) -> Observed:
    """The fleet of `sacct.COMMAND`'s output and, where given, of `sacct.NODES_COMMAND`'s. `now`: Unix s; no job can be later.

    Raises `ConfigError` naming file and line of what is unreadable, empty or skewed.
    """
    only = only or Only()
    if nodes is None and only != Only():
        raise ConfigError("which nodes have this GPU or partition is not known", "give them with --nodes")
    known = None if nodes is None else _nodes(nodes)
    lines = read_lines(dump)
    if lines[-1]:
        raise ConfigError(
            f"{dump}: line {len(lines)} is cut off: {lines[-1][:100]!r}",
            f"the dump has no end: make it again with\n    {sacct.COMMAND}",
        )
    try:
        jobs = sacct.parse(lines)
        not_after(jobs, now)
        found = sacct.fleet_of(
            jobs, None if known is None else sacct.capacity_of(known), ignore_partitions=ignore
        )
    except ConfigError as error:
        raise ConfigError(f"{dump}: {error.cause}", error.remedy) from error
    notes = _hidden_jobs(known or (), jobs)
    notes += [
        f"no job of the dump is in partition {name}"
        for name in sorted(set(ignore) - {job.partition for job in jobs})
    ]
    fleet, gone = without_gone(found, known or ())
    chosen = (
        {node.name for node in known or () if node.gpus and only(node)}
        if known is not None
        else set(fleet.capacity)
    )
    if not chosen:
        parts = sorted({name for node in known or () if node.gpus for name in node.partitions})
        raise ConfigError(
            f"no node has GPUs of type {only.gpu_type or 'any'} in partition {only.partition or 'any'}",
            f"{_known_kinds(known or ())}; nodes with GPUs are in {', '.join(map(repr, parts[:20])) or 'no partition'}",
        )
    notes += _kinds_note(known or (), chosen)
    jobs = tuple(job for job in jobs if chosen.intersection(job.nodes))
    fleet, gone = fleet.only(chosen), [name for name in gone if name in chosen]
    if gone:
        some, are = (
            ", ".join(map(repr, gone[:5])),
            "1 node is" if len(gone) == 1 else f"{len(gone)} nodes are",
        )
        notes.append(f"{are} down or drained now and counted as in use since the last job there: {some}")
    held = tuple(job for job in found.occupations if any(node in chosen for node, _ in job.gpus_by_node))
    earlier = "nodes that were down or drained earlier and are not now count as idle"
    fleet_notes = tuple(earlier if gone and note == sacct.DOWN_NOTE else note for note in found.notes)
    return Observed(fleet, found.since, held, _waits(jobs, found.since, ignore), (*notes, *fleet_notes))


def _hidden_jobs(nodes: Iterable[Node], jobs: Sequence[SacctJob]) -> list[str]:
    """Who may not see others' jobs makes a dump in which the whole cluster idles; the nodes' list says otherwise."""
    allocated, held = sum(node.gpus_allocated for node in nodes), sacct.gpus_allocated_at_end(jobs)
    if allocated < _MIN_ALLOCATED_GPUS or held * 2 >= allocated:
        return []
    return [
        f"{DOUBT}: by the nodes {allocated} GPUs are in use, and the dump's running jobs hold {held}. You probably see only your "
        "own jobs (PrivateData), or the two were made at different times: let one make both who may see all jobs"
    ]


def _kinds_note(nodes: Iterable[Node], chosen: Collection[str]) -> list[str]:
    """A fleet of several GPU types is not one fleet: an engine of a model may not run on all of them."""
    kinds = {node.gpu_type for node in nodes if node.name in chosen}
    return (
        [f"the nodes have several types of GPU; --gpu-type takes one: {_known_kinds(nodes)}"]
        if len(kinds) > 1
        else []
    )


def _known_kinds(nodes: Iterable[Node]) -> str:
    counts: Counter[str] = Counter()
    for node in nodes:
        counts[node.gpu_type or "(no type)"] += node.gpus
    return "there are " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()) if count)


def _nodes(path: Path) -> tuple[Node, ...]:
    remedy = f"make it with\n    {sacct.NODES_COMMAND}"
    try:
        nodes = parse_nodes("\n".join(read_lines(path)))
    except ClusterError as error:
        raise ConfigError(f"{path}: {error.cause}", remedy) from error
    for node in nodes:
        if node.gpus > MOST_NODE_GPUS:
            raise ConfigError(
                f"{path}: node {node.name!r} has {node.gpus} GPUs; at most {MOST_NODE_GPUS:,} are taken",
                remedy,
            )
    return nodes


def without_gone(dump: Dump, nodes: Sequence[Node]) -> tuple[FleetTrace, list[str]]:
    """The fleet without the idle time of nodes that cannot be used now, from the end of their last job on; and those nodes.

    A node on which a job still runs is left as it is: how much of it is lost to others is not known.
    """
    last: dict[str, float] = {}
    for job in dump.occupations:
        for node, _ in job.gpus_by_node:
            last[node] = max(last.get(node, 0.0), job.end_s)
    fleet = dump.fleet
    gone = [
        node.name
        for node in nodes
        if node.gpus and not node.usable and last.get(node.name, 0.0) < fleet.end_s
    ]
    held = [Occupation(last.get(name, 0.0), fleet.end_s, ((name, fleet.capacity[name]),)) for name in gone]
    return from_occupations(
        fleet.origin, [*dump.occupations, *held], fleet.capacity, fleet.end_s
    ) if held else fleet, gone


def read_lines(path: Path) -> list[str]:
    """Lines of UTF-8 text, gzipped when the name ends in .gz. Raises `ConfigError` naming the line that is none."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f"{path} cannot be read: {why}",
            "give the path of a readable file, gzipped if its name ends in .gz",
        ) from error
    lines = []
    for number, line in enumerate(data.split(b"\n"), 1):
        try:
            lines.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path}: line {number} is no text (byte {error.start + 1})",
                "give the command's output as it is",
            ) from error
    return lines


def not_after(jobs: Sequence[SacctJob], now: float) -> None:
    """Refuse times that have not come yet: one of them would stretch the period by as much."""
    for job in jobs:
        for what, time in (("Submit", job.submit), ("Start", job.start), ("End", job.end)):
            if time is not None and time > now + SKEW_S:
                raise ConfigError(
                    f"line {job.line} of the sacct dump has times that cannot be: {what} of job {job.job_id} lies {time - now:.0f} s ahead",
                    "clocks differ between the cluster and this host, or within the cluster; mend them, or remove the line",
                )


def _waits(jobs: Iterable[SacctJob], since: float, ignore: Collection[str]) -> tuple[float, ...]:
    """What the GPU jobs that started in the period waited (s). A requeued job counts again: each life has its own Submit."""
    return tuple(
        job.start - job.submit
        for job in jobs
        if job.gpus and job.start is not None and job.start >= since and job.partition not in ignore
    )


_KNOWN_TRACES = (
    "give one with the columns t_seconds, node, idle_gpus, delta (idle GPUs), or t_start, t_end, vc, gpus, placement (jobs), or "
    "source, target, t_seconds, available_instances (spot); docs/simulate.md has more of them"
)


def read_trace(path: Path, gpus_per_node: int, source: str, streams: Streams) -> Observed:
    """One of the evaluation's traces. `source`: which of a spot trace's instances; `gpus_per_node`: what a node, or an instance, has."""
    first = read_csv(path, lambda lines: next(rows(lines, ()), None))
    if first is None:
        raise ConfigError(f"{path} has a header and no rows", "check the path")
    columns = first.cells
    if {"node", "idle_gpus", "delta"} <= columns.keys():
        end_s = read_csv(
            path, lambda lines: max(row.number("t_seconds") for row in rows(lines, ("t_seconds",)))
        )
        return Observed(traces.read_nodes(path, gpus_per_node, end_s))
    if {"available_instances", "source"} <= columns.keys():
        known = read_csv(path, lambda lines: sorted({row.text("source") for row in rows(lines, ("source",))}))
        chosen = source or (known[0] if len(known) == 1 else "")
        if not chosen:
            raise ConfigError(
                f"{path} has several sources", "choose with --source: " + ", ".join(map(repr, known))[:400]
            )
        return Observed(traces.read_spot(path, chosen, gpus_per_node, streams.stream("spot", chosen)))
    if {"t_start", "t_end", "placement"} <= columns.keys():
        jobs = traces.read_jobs(path)
        fleet = from_occupations(
            f"{path.name} (placement simulated)", jobs, most_used(jobs), max(job.end_s for job in jobs)
        )
        return Observed(
            fleet,
            jobs=jobs,
            notes=("nodes and their GPUs are the most ever in use: nodes that were always idle are missing",),
        )
    has = ", ".join(map(repr, columns))[:200]
    raise ConfigError(f"{path} is no trace that is known: it has the columns {has}", _KNOWN_TRACES)
