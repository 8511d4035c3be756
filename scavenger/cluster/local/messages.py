"""What a client and the server of the local backend say to each other: one request and one reply a connection.

Owns the size bounds and the typed messages. Knows nothing of processes.
"""

from __future__ import annotations

import socket

import msgspec

from scavenger.cluster import framing
from scavenger.cluster.model import ClusterInfo, ClusterView, JobSpec

SOCKET_NAME = "control.sock"
MAX_REQUEST_BYTES = 4 << 20
MAX_REPLY_BYTES = 64 << 20


class GetInfo(msgspec.Struct, frozen=True, tag=True):
    pass


class GetView(msgspec.Struct, frozen=True, tag=True):
    pass


class SubmitJob(msgspec.Struct, frozen=True, tag=True):
    spec: JobSpec


class CancelJobs(msgspec.Struct, frozen=True, tag=True):
    job_ids: tuple[int, ...]


class RequeueJob(msgspec.Struct, frozen=True, tag=True):
    job_id: int


class ReleaseJob(msgspec.Struct, frozen=True, tag=True):
    job_id: int
    node: str


class SetNode(msgspec.Struct, frozen=True, tag=True):
    node: str
    up: bool


class KillProcesses(msgspec.Struct, frozen=True, tag=True):
    job_id: int


class InfoReply(msgspec.Struct, frozen=True, tag=True):
    info: ClusterInfo


class ViewReply(msgspec.Struct, frozen=True, tag=True):
    view: ClusterView


class SubmitReply(msgspec.Struct, frozen=True, tag=True):
    job_id: int


class KillReply(msgspec.Struct, frozen=True, tag=True):
    pids: tuple[int, ...]


class DoneReply(msgspec.Struct, frozen=True, tag=True):
    pass


class RefusedReply(msgspec.Struct, frozen=True, tag=True):
    cause: str
    remedy: str


Request = GetInfo | GetView | SubmitJob | CancelJobs | RequeueJob | ReleaseJob | SetNode | KillProcesses
Reply = InfoReply | ViewReply | SubmitReply | KillReply | DoneReply | RefusedReply

request_decoder = msgspec.msgpack.Decoder(Request)
reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def receive_reply(sock: socket.socket, deadline: float) -> Reply:
    """One reply, as `framing.receive` takes it."""
    return framing.receive(sock, reply_decoder, MAX_REPLY_BYTES, "the local cluster", deadline)
