"""What a site's accounting says of its idle GPUs: the exact `sacct` command, the parsing of its dump, and the fleet it makes.

A dump that is empty, unreadable or whose clocks disagree raises `ConfigError` naming the line: a report from half a dump would mislead.
Only fields that Slurm writes are asked for, so no user's text can forge a record. Pure: runs nothing, opens nothing.

What accounting does not say: nodes that were down or drained count as idle, as do GPUs of nodes reserved for maintenance.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from scavenger.cluster.model import JobState, Node
from scavenger.cluster.slurm.text import REMEMBERED, expand, parse_state
from scavenger.errors import ClusterError, ClusterUnavailable, ConfigError
from scavenger.parsing import whole
from scavenger.simulate.fleet import (
    LONGEST_S,
    MOST_NODE_GPUS,
    FleetTrace,
    Occupation,
    from_occupations,
    most_used,
)

FIELDS = (
    "JobIDRaw",
    "Partition",
    "State",
    "Submit",
    "Start",
    "End",
    "NNodes",
    "NodeList",
    "AllocTRES",
    "ReqTRES",
)
# -a all users; -X allocations, not steps; -D every life of a requeued job; -P -n fields by "|" and no header.
COMMAND = f"SLURM_TIME_FORMAT=%s sacct -a -X -D -P -n -S now-14days -E now -o {','.join(FIELDS)} > dump.txt"
NODES_COMMAND = "scontrol -a -d -o show node > nodes.txt"
_REMEDY = f"make the dump with\n    {COMMAND}"
_NEVER = frozenset({"", "Unknown", "None", "N/A", "NONE"})
_NO_NODES = frozenset({"", "None assigned", "Unknown", "None", "(null)"})
DOWN_NOTE = "nodes that were down or drained count as idle"
ALL_JOBS_NOTE = (
    "GPUs of jobs that are not in the dump count as idle: let one make it who may see all jobs (PrivateData)"
)
_ALLOCATED_STATES = frozenset({JobState.RUNNING, JobState.SUSPENDED})
#: Nodes of all jobs together, each counted as often as a job was on it: what one machine keeps in memory.
_MAX_NODE_ENTRIES = 10_000_000


@dataclass(frozen=True, slots=True)
class SacctJob:
    """One life of a job. Times are Unix s, None where Slurm has none. `gpus`: what it held; `requested_gpus`: what it asked for."""

    line: int
    job_id: str
    partition: str
    state: JobState
    submit: float
    start: float | None
    end: float | None
    nodes: tuple[str, ...]
    gpus: int
    requested_gpus: int


@dataclass(frozen=True, slots=True)
class Dump:
    """A dump as a fleet. Time 0 is `since` (Unix s). `notes` says what was inferred: print it with every result."""

    fleet: FleetTrace
    since: float
    jobs: tuple[SacctJob, ...]
    occupations: tuple[Occupation, ...]
    notes: tuple[str, ...]


def parse(lines: Iterable[str]) -> tuple[SacctJob, ...]:
    """The jobs of a dump, in its order."""
    jobs = []
    node_entries = 0
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        if text:
            jobs.append(job := _job(number, text))
            node_entries += len(job.nodes)
            if node_entries > _MAX_NODE_ENTRIES:
                raise ConfigError(
                    f"line {number} of the sacct dump is one too many: the jobs so far were on {node_entries:,} nodes together",
                    "take fewer days",
                )
    if not jobs:
        raise ConfigError("the sacct dump is empty (line 1)", f"{_REMEDY}\n  as a user who may see all jobs")
    return tuple(jobs)


def _job(number: int, text: str) -> SacctJob:
    if not text.isprintable():
        raise _wrong(number, "it has a character that cannot be printed, which Slurm does not write", text)
    cells = text.split("|")
    if len(cells) != len(FIELDS):
        raise _wrong(number, f"{len(cells)} fields instead of {len(FIELDS)}", text)
    row = dict(zip(FIELDS, cells, strict=True))
    if whole(row["JobIDRaw"]) is None:
        what = (
            "a job step"
            if "." in row["JobIDRaw"]
            else "a header"
            if row["JobIDRaw"].startswith("JobID")
            else "not a job id"
        )
        raise _wrong(number, f"{row['JobIDRaw'][:40]!r} is {what}", text)
    try:
        # 'CANCELLED by 1000'; a trailing + marks a state cut short by its column
        state, _ = parse_state((row["State"].split() or [""])[0].rstrip("+"))
        nodes = () if row["NodeList"] in _NO_NODES else _expanded(row["NodeList"])
        gpus, requested = _gpus(row["AllocTRES"]), _gpus(row["ReqTRES"])
    except ClusterError as error:
        raise _wrong(number, error.cause, text) from error
    submit = _time(number, "Submit", row["Submit"], text)
    if submit is None:
        raise _wrong(number, "the job was never submitted", text)
    job = SacctJob(
        line=number,
        job_id=row["JobIDRaw"],
        partition=row["Partition"],
        state=state,
        submit=submit,
        start=_time(number, "Start", row["Start"], text),
        end=_time(number, "End", row["End"], text),
        nodes=nodes,
        gpus=gpus,
        requested_gpus=requested,
    )
    _consistent(job, text)
    return job


def _consistent(job: SacctJob, text: str) -> None:
    if job.start is not None and job.start < job.submit:
        raise _skewed(job.line, f"it starts {job.submit - job.start:.0f} s before it is submitted", text)
    if job.start is not None and job.end is not None and job.end < job.start:
        raise _skewed(job.line, f"it ends {job.start - job.end:.0f} s before it starts", text)
    if job.start is not None and job.end is None and job.state not in _ALLOCATED_STATES:
        raise _wrong(job.line, f"a job that is {job.state} started and has no end", text)
    if job.gpus and job.start is not None and not job.nodes:
        raise _wrong(job.line, f"a job with {job.gpus} GPUs ran on no node", text)
    if job.gpus > MOST_NODE_GPUS * max(1, len(job.nodes)):
        raise _wrong(
            job.line,
            f"{job.gpus} GPUs on {len(job.nodes)} nodes, and a node has at most {MOST_NODE_GPUS:,}",
            text,
        )


def _time(number: int, field: str, cell: str, text: str) -> float | None:
    if cell in _NEVER:
        return None
    seconds = whole(cell)
    if seconds is None:
        raise _wrong(number, f"{field} {cell[:30]!r} is not in Unix seconds", text)
    return float(seconds) or None


@lru_cache(256)  # a list may have 100,000 names
def _expanded(nodelist: str) -> tuple[str, ...]:
    return tuple(expand(nodelist))


@lru_cache(REMEMBERED)
def _gpus(tres: str) -> int:
    """'gres/gpu' where the site tracks it, else the sum over types."""
    plain, typed = None, 0
    for item in tres.split(","):
        if item.startswith(("gres/gpu=", "gres/gpu:")):
            what, _, text = item.partition("=")
            count = whole(text)
            if count is None:
                raise ClusterUnavailable(f"not a number of GPUs: {item[:80]!r}")
            if what == "gres/gpu":
                plain = count
            else:
                typed += count
    return typed if plain is None else plain


def _wrong(number: int, what: str, text: str) -> ConfigError:
    return ConfigError(f"line {number} of the sacct dump cannot be read: {what}: {text[:100]!r}", _REMEDY)


def _skewed(number: int, what: str, text: str = "") -> ConfigError:
    return ConfigError(
        f"line {number} of the sacct dump has times that cannot be: {what}"
        + (f": {text[:100]!r}" if text else ""),
        "clocks differed between the controller and the database; remove the line, or take a period without",
    )


def gpus_allocated_at_end(jobs: Iterable[SacctJob]) -> int:
    """GPUs that jobs still hold."""
    return sum(job.gpus for job in jobs if job.start is not None and job.end is None)


def capacity_of(nodes: Iterable[Node]) -> dict[str, int]:
    """GPUs of every node, 0 included: `commands.parse_nodes` of NODES_COMMAND's output gives the nodes."""
    return {node.name: node.gpus for node in nodes}


def fleet_of(
    jobs: Sequence[SacctJob],
    capacity: Mapping[str, int] | None = None,
    since: float | None = None,
    until: float | None = None,
    ignore_partitions: Collection[str] = (),
) -> Dump:
    """Idle GPUs by node between `since` and `until` (Unix s).

    `capacity`: all nodes with their GPUs; None takes the most that was ever in use on each node, and misses nodes that were always idle.
    `since`: None takes the first end in the dump, since jobs that had ended before the dump's -S are not in it. `until`: None takes the
    latest time in it. Jobs of `ignore_partitions` (our own harvest partition) leave their GPUs idle.
    """
    notes: list[str] = []
    ends = [job.end for job in jobs if job.end is not None and job.start is not None]
    begin = min(ends, default=min(job.submit for job in jobs)) if since is None else since
    latest = max(time for job in jobs for time in (job.submit, job.start or 0.0, job.end or 0.0))
    finish = latest if until is None else until
    if finish <= begin:
        raise ConfigError(f"the sacct dump covers no time: from {begin:.0f} to {finish:.0f}", _REMEDY)
    oldest = min(jobs, key=lambda job: job.submit)
    if finish - min(begin, oldest.submit) > LONGEST_S:
        raise _skewed(
            oldest.line,
            f"job {oldest.job_id} lies {(finish - oldest.submit) / 86_400:,.0f} days before the dump's end",
        )
    for job in jobs:
        if until is not None and max(job.submit, job.start or 0.0, job.end or 0.0) > until:
            raise ConfigError(
                f"line {job.line} of the sacct dump is after its end at {until:.0f}",
                "give a later end, or mend the clocks",
            )
    counted = [job for job in jobs if job.partition not in ignore_partitions]
    if len(counted) < len(jobs):
        notes.append(
            f"{len(jobs) - len(counted)} jobs in {', '.join(sorted(ignore_partitions))} count as idle"
        )
    occupations, uneven = _occupations(counted, capacity, begin, finish)
    if not occupations and any(job.gpus and job.start is not None for job in jobs):
        where = f" outside {', '.join(sorted(ignore_partitions))}" if len(counted) < len(jobs) else ""
        raise ConfigError(
            f"no job{where} held a GPU in the period", "take a longer one, or ignore fewer partitions"
        )
    if not occupations:
        raise ConfigError(
            f"no job among {len(jobs)} held a GPU",
            "add gres/gpu to AccountingStorageTRES in slurm.conf; only jobs that start later will have it",
        )
    if uneven:
        notes.append(
            f"{uneven} jobs hold a number of GPUs that their nodes do not divide: the first nodes were given one more"
        )
    if capacity is None:
        notes.append(
            "nodes and their GPUs are the most ever in use: give the nodes for those that were always idle"
        )
    has = {
        node: count
        for node, count in (most_used(occupations) if capacity is None else capacity).items()
        if count
    }
    _possible(has, occupations)
    fleet = from_occupations("sacct dump", occupations, has, finish - begin)
    return Dump(fleet, begin, tuple(jobs), tuple(occupations), (*notes, DOWN_NOTE, ALL_JOBS_NOTE))


def _possible(has: Mapping[str, int], occupations: Sequence[Occupation]) -> None:
    """Refuse a node with more GPUs than any has, naming the largest job on it."""
    for node, count in has.items():
        if count > MOST_NODE_GPUS:
            line = max((dict(job.gpus_by_node).get(node, 0), job.line) for job in occupations)[1]
            raise ConfigError(
                f"line {line} of the sacct dump: with it {count} GPUs of node {node!r} were in use at once, of at most {MOST_NODE_GPUS:,}",
                "an earlier job never got its end (`sacctmgr show runawayjobs`), or the line is wrong: remove it",
            )


def _occupations(
    jobs: Sequence[SacctJob], capacity: Mapping[str, int] | None, since: float, until: float
) -> tuple[list[Occupation], int]:
    found = []
    uneven = 0
    for job in jobs:
        if not job.gpus or job.start is None:
            continue
        nodes = _gpu_nodes(job, capacity)
        share, rest = divmod(job.gpus, len(nodes))
        uneven += rest > 0
        placed = tuple(
            (node, share + (index < rest)) for index, node in enumerate(nodes) if share + (index < rest)
        )
        end = until if job.end is None else job.end
        if end > since and job.start < until:
            found.append(Occupation(max(job.start - since, 0.0), end - since, placed, job.line))
    return found, uneven


def _gpu_nodes(job: SacctJob, capacity: Mapping[str, int] | None) -> tuple[str, ...]:
    if capacity is None:
        return job.nodes
    for node in job.nodes:
        if node not in capacity:
            what = f"line {job.line} of the sacct dump: node {node!r} is not among those given"
            raise ConfigError(what, f"list them all: {NODES_COMMAND}")
    with_gpus = tuple(node for node in job.nodes if capacity[node])
    if not with_gpus:
        raise ConfigError(
            f"line {job.line} of the sacct dump: {job.gpus} GPUs on nodes without",
            f"list the nodes again: {NODES_COMMAND}",
        )
    return with_gpus
