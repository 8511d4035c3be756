"""Pure: what `squeue --json`, `sinfo --json` and `scontrol show nodes --json` print, of Slurm 22.05 to 25.x, as our model.

The schema is another one in almost every release: numbers are plain, or `{set, infinite, number}` (from 23.02 on); a job's state is a word,
or a list of them (from 23.11 on); a node's flags stand apart (22.05) or among its states. Each value is read as whichever it is, and a
document that lacks a field, reports errors or is cut off fails the whole observation.

Slower than fields (ten times, for the process that prints it), but one request fewer a look: `squeue --json` does not ask for partitions.
Partitions are not read from it, because their preempt mode is not in it. Knows nothing of processes or clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from scavenger.cluster.hostlist import expand, planned
from scavenger.cluster.model import Job, Node
from scavenger.cluster.slurm_text import (
    INFINITE_S,
    Asked,
    count_gpus,
    count_tasks,
    gpu_type,
    job_gpus,
    parse_state,
    parse_tres,
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
    jobs = [job for row in rows for job in [_job(row)] * count_tasks(_text(row, "array_task_string"))]
    return tuple(sorted(jobs, key=lambda job: job.job_id))


def _job(row: Mapping[str, Any]) -> Job:
    state, flags = parse_state(",".join(_words(row, "job_state")))
    nodes = tuple(expand(_text(row, "nodes"))) if _text(row, "nodes") else ()
    n_nodes = int(_number(row, "node_count"))
    asked = Asked(*(_text(row, key) for key in ("tres_alloc_str", "tres_per_job", "tres_per_node", "tres_per_task", "tres_per_socket")))
    by_node = _detail(row, nodes)
    expected = _text(row, "scheduled_nodes") if "scheduled_nodes" in row else ""  # 22.05 has no such field
    gpus = sum(count for _, count in by_node) or job_gpus(asked, n_nodes, int(_number(row, "tasks")))
    return Job(
        job_id=int(_number(row, "job_id")), user=_text(row, "user_name"), partition=_text(row, "partition"), state=state, flags=flags,
        reason=text_or_empty(_text(row, "state_description") or _text(row, "state_reason")), name=_text(row, "name"),
        comment=_text(row, "comment"), nodes=nodes, gpus=gpus, gpus_by_node=by_node or spread(gpus, nodes), n_nodes=n_nodes,
        cpus=int(_number(row, "cpus")), priority=int(_number(row, "priority")), restart_count=int(_number(row, "restart_cnt")),
        submit_time=_number(row, "submit_time"), eligible_time=_number(row, "eligible_time"), start_time=_number(row, "start_time"),
        end_time=_end_time(row), time_limit_s=_limit_s(row), exit_code=_exit_code(row),
        planned=planned(expected) if expected else (),
    )  # fmt: skip


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
    counts = [(node, count_gpus(text)) for node, text in zip(nodes, texts, strict=True)]
    return tuple((node, count) for node, count in counts if count)


def _exit_code(row: Mapping[str, Any]) -> int:
    """The shell's view. A wait status up to 22.05, `{status, return_code, signal}` later."""
    value = _field(row, "exit_code")
    if not isinstance(value, Mapping):
        status = int(_number(row, "exit_code"))
        return 128 + (status & 0x7F) if status & 0x7F else status >> 8 & 0xFF
    signal = value.get("signal") or {}
    if not isinstance(signal, Mapping):
        raise ClusterUnavailable(f"Slurm's JSON: not an exit code: {value!r:.100}")
    signum = int(_number(signal, "id" if "id" in signal else "signal_id")) if signal else 0
    return 128 + signum if signum else int(_number(value, "return_code"))


def parse_nodes(stdout: str) -> tuple[Node, ...]:
    """Nodes sorted by name. An answer without any is no answer."""
    rows = _rows(stdout, "nodes")
    if not rows:
        raise ClusterUnavailable("Slurm's JSON lists no node at all")
    return tuple(sorted((_node(row) for row in rows), key=lambda node: node.name))


def _node(row: Mapping[str, Any]) -> Node:
    words = [word.lower() for word in (*_words(row, "state"), *(_words(row, "state_flags") if "state_flags" in row else ()))]
    gres, used = _text(row, "gres"), _text(row, "gres_used")
    allocated = count_gpus(used) if used else parse_tres(_text(row, "tres_used")).get("gres/gpu", 0)
    return Node(
        name=_text(row, "name"), states=frozenset(_NODE_WORDS.get(word, word) for word in words),
        partitions=frozenset(_words(row, "partitions")), gpu_type=gpu_type(gres), gpus=count_gpus(gres), gpus_allocated=allocated,
        cpus=int(_number(row, "cpus")), cpus_allocated=int(_number(row, "alloc_cpus")), memory_mb=int(_number(row, "real_memory")),
        memory_allocated_mb=int(_number(row, "alloc_memory")),
    )  # fmt: skip


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
        raise ClusterUnavailable(f"Slurm's JSON has no list of {key}", 'use fields: cluster.command_output = "fields"')
    return rows


def _field(row: Mapping[str, Any], key: str) -> Any:
    if key not in row:
        raise ClusterUnavailable(f"Slurm's JSON: a record has no {key!r}", 'use fields: cluster.command_output = "fields"')
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
        value = value.get("number") if value.get("set") else 0
    if value is None or value == _NO_VAL:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ClusterUnavailable(f"Slurm's JSON: {key} is no number: {value!r:.100}")
    return INFINITE_S if value == _NO_VAL + 1 else float(value)
