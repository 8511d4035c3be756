"""The process that imports pyslurm: answers one request at a time on its pipes until they close. The only place that imports it.

    python -m scavenger.cluster.pyslurm.process          started by `client`, never by a person

A process of its own, because pyslurm holds the interpreter's lock during every RPC (seconds, when the controller hangs), because libslurm
ends the process that it is in when it finds no configuration, because the cluster is fixed at import, and because it is GPL-2.0: nothing
of it is linked into the daemon.

Owns which of pyslurm's calls are made: `node().get()` and `job().get()` for what only they have (`gres_used`, TRES texts), which releases
22.5 to 24.11 offer; `Jobs.load()` for exit codes, because `job().get()` carries one record's signal over into the next. What a release
lacks of them is in the first message.
Configuration and partitions are the commands' (`partition().get()` leaves the preempt mode out). Knows nothing of what the rows mean.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import msgspec

from scavenger.cluster.pyslurm import messages as wire
from scavenger.errors import ClusterUnavailable

#: What is read of pyslurm. 25.5 dropped `node`, 25.11 `job` too.
READS = ("node", "job", "Jobs", "PyslurmError")
_OVER = (
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "PREEMPTED",
    "NODE_FAIL",
    "BOOT_FAIL",
    "DEADLINE",
    "OUT_OF_MEMORY",
    "COMPLETING",
)
_names: dict[int, str] = {}
_exits: dict[
    tuple[int, int, str], tuple[int, int]
] = {}  # (job, restarts, state) -> (exit code, signal): of our own jobs, and few


def user_name(uid: int) -> str:
    """As squeue prints it: the number where no name has it."""
    if uid not in _names:
        try:
            _names[uid] = pwd.getpwuid(uid).pw_name
        except KeyError:
            _names[uid] = str(uid)
    return _names[uid]


def nodes(lib: Any) -> tuple[wire.NodeRow, ...]:
    return tuple(
        wire.NodeRow(
            row["name"],
            row["state"],
            _joined(row["gres"]),
            _joined(row["gres_used"]),
            tuple(row["partitions"] or ()),
            int(row["cpus"]),
            int(row["alloc_cpus"]),
            int(row["real_memory"]),
            int(row["alloc_mem"]),
        )
        for row in lib.node().get().values()
    )


def jobs(lib: Any) -> tuple[tuple[wire.JobRow, ...], dict[str, int]]:
    """Rows, and what they cost beyond one request."""
    records = list(lib.job().get().values())
    ends, more = _own_exits(lib, records)
    return tuple(_job(row, *ends.get(int(row["job_id"]), (0, 0))) for row in records), more


def _job(row: Mapping[str, Any], exit_code: int, exit_signal: int) -> wire.JobRow:
    return wire.JobRow(
        job_id=int(row["job_id"]),
        user=user_name(int(row["user_id"])),
        partition=row["partition"] or "",
        state=row["job_state"],
        reason=row["state_reason"] or "",
        name=row["name"] or "",
        comment=row["comment"] or "",
        nodes=row["nodes"] or "",
        sched_nodes=row["sched_nodes"] or "",
        n_nodes=int(row["num_nodes"]),
        cpus=int(row["num_cpus"]),
        tasks=int(row["num_tasks"]),
        priority=int(row["priority"]),
        restarts=int(row["restart_cnt"]),
        submit_time=int(row["submit_time"]),
        eligible_time=int(row["eligible_time"]),
        start_time=int(row["start_time"]),
        end_time=int(row["end_time"]),
        time_limit=str(row["time_limit"]),
        exit_code=exit_code,
        exit_signal=exit_signal,
        tres_alloc=row["tres_alloc_str"] or "",
        tres_per_job=row["tres_per_job"] or "",
        tres_per_node=row["tres_per_node"] or "",
        tres_per_socket=row["tres_per_socket"] or "",
        tres_per_task=row["tres_per_task"] or "",
        array_tasks=row["array_task_str"] or "",
        account=row["account"] or "",
    )


def _own_exits(
    lib: Any, records: Iterable[Mapping[str, Any]]
) -> tuple[dict[int, tuple[int, int]], dict[str, int]]:
    """Exit code and signal of our own jobs that are over or ending, asked for once: by one request for all, when a new one is there."""
    uid = os.getuid()
    ended = {
        (int(row["job_id"]), int(row["restart_cnt"]), row["job_state"])
        for row in records
        if int(row["user_id"]) == uid and row["job_state"].startswith(_OVER) and row["exit_code"] != "0:0"
    }
    new = ended - _exits.keys()
    more: dict[str, int] = {}
    if new:
        more = {"job_info": 1}
        loaded = lib.Jobs.load()
        wanted = {key[0]: key for key in new}
        for job in loaded.values():
            key = wanted.get(job.id)
            if key is not None and (job.id, job.requeue_count, job.state) == key:
                _exits[key] = (int(job.exit_code or 0), int(job.exit_code_signal or 0))
    for key in _exits.keys() - ended:
        del _exits[key]
    return {key[0]: _exits[key] for key in ended if key in _exits}, more


def _joined(items: Any) -> str:
    return ",".join(items) if isinstance(items, list) else items or ""


def answer(lib: Any, ask: wire.PyslurmRequest) -> wire.Reply:
    """The reply. Slurm's refusal, and a record that pyslurm of another release would make, are replies too."""
    try:
        node_rows = nodes(lib) if ask.what == "view" else ()  # nodes first, as in `slurm`
        job_rows, more = jobs(lib)
        return wire.RowsReply(ask.number, node_rows, job_rows, more)
    except (KeyError, AttributeError, TypeError) as error:
        return wire.Failed(
            ask.number, f"pyslurm's record is not as this version has it: {error!r}", malformed=True
        )
    except (ValueError, lib.PyslurmError) as error:
        return wire.Failed(ask.number, str(error.args[0] if error.args else error))


def version_of(lib: Any) -> str:
    """A function says it until 22.5, a module of that name since."""
    return str(lib.version() if callable(lib.version) else lib.__version__)


def serve(lib: Any, source: BinaryIO, sink: BinaryIO) -> None:
    """Answer until the daemon closes its end."""
    _send(sink, wire.Hello(version_of(lib), tuple(name for name in READS if not hasattr(lib, name))))
    while True:
        header = source.read(wire.HEADER.size)
        if len(header) < wire.HEADER.size:
            return
        ask = wire.decode_ask(source.read(wire.length_of(header)))
        try:
            _send(sink, answer(lib, ask))
        except ClusterUnavailable as error:  # too large for the pipe's bound: nothing of it was sent
            _send(sink, wire.Failed(ask.number, error.cause, malformed=True))


def _send(sink: BinaryIO, reply: wire.Reply) -> None:
    sink.write(wire.frame(reply))
    sink.flush()


def main() -> int:
    with os.fdopen(os.dup(1), "wb") as sink, os.fdopen(os.dup(0), "rb") as source:
        # what libslurm and pyslurm print, from their import on, must not get into the replies
        os.dup2(2, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        import pyslurm

        try:
            serve(pyslurm, source, sink)
        except (BrokenPipeError, msgspec.DecodeError) as error:
            sys.stderr.write(f"the daemon's end: {error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
