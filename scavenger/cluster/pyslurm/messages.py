"""What the daemon and its pyslurm process say to each other: one typed request, one typed reply, over a pair of pipes.

Owns the framing (4-byte length, MessagePack), the bounds, and the rows: Slurm's records as pyslurm has them, without a meaning. What they
mean is in `rows`. Knows nothing of processes, and never imports pyslurm.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from scavenger.cluster.error_kind import ErrorKind
from scavenger.errors import ClusterUnavailable

MAX_BYTES = 512 << 20  # 100,000 jobs take about 60 MB
HEADER = struct.Struct(">I")


class NodeRow(msgspec.Struct, frozen=True, array_like=True):
    name: str
    state: str
    gres: str
    gres_used: str
    partitions: tuple[str, ...]
    cpus: int
    cpus_allocated: int
    memory_mb: int
    memory_allocated_mb: int


class JobRow(msgspec.Struct, frozen=True, array_like=True):
    """`array_tasks` is '0-3,7%2' for a pending array's record, else empty. `exit_code` and `exit_signal` are set for our own jobs only."""

    job_id: int
    user: str
    partition: str
    state: str
    reason: str
    name: str
    comment: str
    nodes: str
    sched_nodes: str
    n_nodes: int
    cpus: int
    tasks: int
    priority: int
    restarts: int
    submit_time: int
    eligible_time: int
    start_time: int
    end_time: int
    time_limit: str  # minutes, 'UNLIMITED' or 'Partition_Limit'
    exit_code: int
    exit_signal: int
    tres_alloc: str
    tres_per_job: str
    tres_per_node: str
    tres_per_socket: str
    tres_per_task: str
    array_tasks: str
    account: str = ""


class PyslurmRequest(msgspec.Struct, frozen=True, tag=True):
    """One request. `view` is nodes and jobs; `number` comes back with the reply, so that no late answer is taken for a later one."""

    number: int
    what: Literal["view", "jobs"]


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Sent once, when pyslurm was imported. `lacks`: names that are read and that this release does not have."""

    version: str
    lacks: tuple[str, ...] = ()


class RowsReply(msgspec.Struct, frozen=True, tag=True):
    """`more_rpcs`: what was asked of the controller beyond the usual, by request."""

    number: int
    nodes: tuple[NodeRow, ...] = ()
    jobs: tuple[JobRow, ...] = ()
    more_rpcs: dict[str, int] = {}


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Slurm's (or Python's) words, and whether they are about a record that cannot be read."""

    number: int
    words: str
    malformed: bool = False


Reply = Hello | RowsReply | Failed

_asks = msgspec.msgpack.Decoder(PyslurmRequest)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def frame(message: PyslurmRequest | Reply) -> bytes:
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_BYTES:
        raise ClusterUnavailable(f"an answer of {len(body)} bytes is too large", error_kind=ErrorKind.PARTIAL)
    return HEADER.pack(len(body)) + body


def length_of(header: bytes) -> int:
    """Bytes of the body that follows. Raises `ClusterUnavailable` over the bound."""
    length: int = HEADER.unpack(header)[0]
    if length > MAX_BYTES:
        raise ClusterUnavailable(
            f"pyslurm's process announces {length} bytes, more than the bound", error_kind=ErrorKind.PARTIAL
        )
    return length


def decode_ask(body: bytes) -> PyslurmRequest:
    return _asks.decode(body)


def decode_reply(body: bytes) -> Reply:
    try:
        return _replies.decode(body)
    except msgspec.DecodeError as error:  # ValidationError is one too
        raise ClusterUnavailable(
            f"pyslurm's process sent something else than a reply: {error}", error_kind=ErrorKind.PARTIAL
        ) from error
