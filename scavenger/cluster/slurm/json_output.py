"""Pure: what `squeue --json`, `sinfo --json` and `scontrol show nodes --json` print, of Slurm 22.05 to 26.05, as our model.

Boundary: the JSON of Slurm's commands; pure.

The schema is another one in almost every release: numbers are plain, or `{set, infinite, number}` (from 23.02 on); a job's state is a word,
or a list of them (from 23.11 on); a node's flags stand apart (22.05) or among its states. Each value is read as whichever it is, and a
document that reports errors or is cut off fails the whole poll. So does a record whose owner, state, nodes, GPUs or
demand are missing or cannot be read; any other such field is unknown in its record, as in `commands`.

Slower than fields (ten times, for the process that prints it), but one request fewer a poll: `squeue --json` does not ask for partitions.
Partitions are not read from it, because their preempt mode is not in it. Knows nothing of processes or clocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from scavenger.cluster.model import KNOWN_NODE_STATES, Job, Node, Unread
from scavenger.cluster.slurm.text import (
    INFINITE_S,
    RequestedTres,
    count_gpus,
    count_tasks,
    expand,
    job_gpus,
    node_gpus,
    parse_state,
    planned,
    spread,
    text_or_empty,
)
from scavenger.errors import ClusterUnavailable

_NO_VAL = 0xFFFFFFFE  # Slurm's "not set" in 32 bits; one more is "infinite"
_NODE_WORDS = {"maintenance": "maint", "reservation": "reserved", "power": "powered_down"}


def jobs_argv() -> list[str]:
    return ["squeue", "-a", "-t", "all", "--json"]


def nodes_argv(version: str) -> list[str]:
    """`sinfo --json` lists nodes up to 22.05; later `scontrol` has JSON, and 24.11's sinfo lists none."""
    major = int(version.split(".")[0]) if version.split(".")[0].isdigit() else 0
    return ["sinfo", "-a", "--json"] if major < 23 else ["scontrol", "-a", "-d", "show", "nodes", "--json"]


def parse_jobs(stdout: str) -> tuple[Job, ...]:
    """Jobs sorted by id; a pending array is one job a task, as `squeue -r` lists it."""
    rows = _rows(stdout, "jobs")
    tasks = [(_job_with_unknowns(row), count_tasks(_text(row, "array_task_string"))) for row in rows]
    jobs = [job for one, count in tasks for job in [one] * count]
    return tuple(sorted(jobs, key=lambda job: job.job_id))


def _job_with_unknowns(row: Mapping[str, Any]) -> Job:
    """`_job`; what only informs and is missing or cannot be read is unknown. Raises for all else."""
    try:
        return _job(row)
    except ClusterUnavailable:
        known, unread = dict(row), list[Unread]()
        for key, (read, unknown) in _INFORMS.items():
            try:
                read(row, key)
            except ClusterUnavailable:
                unread.append(Unread(key, repr(row[key])[:200] if key in row else ""))
                known[key] = unknown
        if not unread:
            raise
        job = _job(known)
        exit_code = None if "exit_code" in dict(unread) else job.exit_code
        return replace(job, unread=tuple(unread), exit_code=exit_code)


def _job(row: Mapping[str, Any]) -> Job:
    state, flags = parse_state(",".join(_words(row, "job_state")))
    nodes = tuple(expand(_text(row, "nodes"))) if _text(row, "nodes") else ()
    n_nodes = int(_finite(row, "node_count"))
    asked = RequestedTres(
        *(
            _text(row, key)
            for key in ("tres_alloc_str", "tres_per_job", "tres_per_node", "tres_per_task", "tres_per_socket")
        )
    )
    by_node = _detail(row, nodes)
    gpus = sum(count for _, count in by_node) or job_gpus(asked, n_nodes, int(_finite(row, "tasks")))
    return Job(
        job_id=int(_finite(row, "job_id")),
        user=_text(row, "user_name"),
        partition=_text(row, "partition"),
        account=text_or_empty(_text(row, "account")) if "account" in row else "",
        state=state,
        flags=flags,
        reason=text_or_empty(_text(row, "state_description") or _text(row, "state_reason")),
        name=_text(row, "name"),
        comment=_text(row, "comment"),
        nodes=nodes,
        gpus=gpus,
        gpus_by_node=by_node or spread(gpus, nodes),
        n_nodes=n_nodes,
        cpus=int(_finite(row, "cpus")),
        priority=int(_finite(row, "priority")),
        restart_count=int(_finite(row, "restart_cnt")),
        submit_time=_number(row, "submit_time"),
        eligible_time=_number(row, "eligible_time"),
        start_time=_number(row, "start_time"),
        end_time=_end_time(row),
        time_limit_s=_limit_s(row),
        exit_code=_exit_code(row, "exit_code"),
        planned=_planned(row, "scheduled_nodes"),
    )


def _limit_s(row: Mapping[str, Any]) -> float:
    """22.05 writes null for a job without a limit."""
    return INFINITE_S if _field(row, "time_limit") is None else _number(row, "time_limit") * 60.0


def _end_time(row: Mapping[str, Any]) -> float:
    """0 for a running job without a limit, as in fields: JSON has it end a year after its start."""
    endless = _limit_s(row) == INFINITE_S and "RUNNING" in _words(row, "job_state")
    return 0.0 if endless else _number(row, "end_time")


def _detail(row: Mapping[str, Any], nodes: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """GPUs by node from 'gres_detail', one text a node, while the job holds them; empty where Slurm tells no such thing."""
    texts = row.get("gres_detail") or []
    if not isinstance(texts, list) or len(texts) != len(nodes):
        return ()
    if not all(isinstance(text, str) for text in texts):
        return ()
    counts = [(node, count_gpus(text)) for node, text in zip(nodes, texts, strict=True)]
    return tuple((node, count) for node, count in counts if count)


def _exit_code(row: Mapping[str, Any], key: str) -> int:
    """The shell's view. A wait status up to 22.05, `{status, return_code, signal}` later."""
    value = _field(row, key)
    if not isinstance(value, Mapping):
        status = int(_finite(row, key))
        return 128 + (status & 0x7F) if status & 0x7F else status >> 8 & 0xFF
    signal = value.get("signal") or {}
    if not isinstance(signal, Mapping):
        raise ClusterUnavailable(f"Slurm's JSON: not an exit code: {value!r:.100}")
    signum = int(_finite(signal, "id" if "id" in signal else "signal_id")) if signal else 0
    return 128 + signum if signum else int(_finite(value, "return_code"))


def _planned(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """22.05 has no such field."""
    text = _text(row, key) if key in row else ""
    return planned(text) if text else ()


def parse_nodes(stdout: str) -> tuple[Node, ...]:
    """Nodes sorted by name. An answer without any is no answer."""
    rows = _rows(stdout, "nodes")
    if not rows:
        raise ClusterUnavailable("Slurm's JSON lists no node at all")
    return tuple(sorted((_node(row) for row in rows), key=lambda node: node.name))


def _node(row: Mapping[str, Any]) -> Node:
    words = [
        word.lower()
        for word in (*_words(row, "state"), *(_words(row, "state_flags") if "state_flags" in row else ()))
    ]
    states = frozenset(_NODE_WORDS.get(word, word) for word in words)
    unread = [] if states and states <= KNOWN_NODE_STATES else [Unread("state", "+".join(words))]
    if isinstance(row.get("state"), str) and "state_flags" not in row:
        # 22.05 has one word there, and what else is so (DRAIN) in the flags; later releases have one list
        states, unread = states | {"unknown"}, [*unread, Unread("state_flags", "")]
    configured = _text(row, "tres") if "tres" in row else ""
    gpus = node_gpus(_text(row, "gres"), _text(row, "gres_used"), configured, _text(row, "tres_used"))
    memory = {}
    for key in ("real_memory", "alloc_memory"):
        try:
            memory[key] = int(_finite(row, key))
        except ClusterUnavailable:
            unread.append(Unread(key, repr(row[key])[:200] if key in row else ""))
    memory_mb, allocated_mb = memory.values() if len(memory) == 2 else (0, 0)  # one alone says nothing
    return Node(
        name=_text(row, "name"),
        states=states or frozenset({"unknown"}),
        partitions=frozenset(_words(row, "partitions")),
        gpu_type=gpus.kind,
        gpus=gpus.total,
        gpus_allocated=gpus.used,
        cpus=int(_finite(row, "cpus")),
        cpus_allocated=int(_finite(row, "alloc_cpus")),
        memory_mb=memory_mb,
        memory_allocated_mb=allocated_mb,
        unread=(*unread, *gpus.unread),
    )


# ---------------------------------------------------------------- values


def _rows(stdout: str, key: str) -> list[Mapping[str, Any]]:
    try:
        document = msgspec.json.decode(stdout)
    except msgspec.DecodeError as error:
        raise ClusterUnavailable(f"Slurm's JSON is cut off or malformed: {error}") from error
    if not isinstance(document, Mapping):
        raise ClusterUnavailable(f"Slurm's JSON is no object but {type(document).__name__}")
    errors = document.get("errors")
    if errors:
        raise ClusterUnavailable(f"Slurm's JSON reports errors: {errors!r:.300}")
    rows = document.get(key)
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ClusterUnavailable(
            f"Slurm's JSON has no list of {key}", 'use fields: cluster.command_output = "fields"'
        )
    return rows


def _field(row: Mapping[str, Any], key: str) -> Any:
    if key not in row:
        raise ClusterUnavailable(
            f"Slurm's JSON: a record has no {key!r}", 'use fields: cluster.command_output = "fields"'
        )
    return row[key]


def _text(row: Mapping[str, Any], key: str) -> str:
    value = _field(row, key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ClusterUnavailable(f"Slurm's JSON: {key} is no text: {value!r:.100}")
    return value


def _words(row: Mapping[str, Any], key: str) -> list[str]:
    """A word, several in one text, or a list of them."""
    value = _field(row, key)
    if isinstance(value, str):
        return [value] if value else []
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise ClusterUnavailable(f"Slurm's JSON: {key} is no list of words: {value!r:.100}")
    return value


def _number(row: Mapping[str, Any], key: str) -> float:
    """0 for what is not set, infinite for what has no limit."""
    value = _field(row, key)
    if isinstance(value, Mapping):
        if value.get("infinite"):
            return INFINITE_S
        if not {"set", "number"} <= value.keys():
            raise ClusterUnavailable(f"Slurm's JSON: {key} is no number: {value!r:.100}")
        value = value["number"] if value["set"] else 0
    if value is None or value == _NO_VAL:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ClusterUnavailable(f"Slurm's JSON: {key} is no number: {value!r:.100}")
    return INFINITE_S if value == _NO_VAL + 1 else float(value)


def _finite(row: Mapping[str, Any], key: str) -> float:
    """A count or an id."""
    value = _number(row, key)
    if not (math.isfinite(value) and value >= 0 and value.is_integer()):
        raise ClusterUnavailable(f"Slurm's JSON: {key} is no number: {row[key]!r:.100}")
    return value


#: What only informs: how each is read, and what stands for one that is not known (see `Job`).
#: No decision over GPUs, nodes or demand depends on them.
_INFORMS: dict[str, tuple[Callable[[Mapping[str, Any], str], object], object]] = {
    "priority": (_finite, 0),
    "submit_time": (_number, 0),
    "eligible_time": (_number, 0),
    "start_time": (_number, 0),
    "end_time": (_number, 0),
    "time_limit": (_number, None),  # none
    "exit_code": (_exit_code, 0),
    "scheduled_nodes": (_planned, ""),
    "state_reason": (_text, ""),
    "state_description": (_text, ""),
}
