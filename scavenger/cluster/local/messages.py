"""What a client and the server of the local backend say to each other: one request and one reply a connection.

Owns the size bounds and the typed messages. Knows nothing of processes.
"""

from __future__ import annotations

import socket

import msgspec

from scavenger.cluster import framing
from scavenger.cluster.requests import CancelJobs as CancelJobs
from scavenger.cluster.requests import DoneReply as DoneReply
from scavenger.cluster.requests import GetInfo as GetInfo
from scavenger.cluster.requests import GetView as GetView
from scavenger.cluster.requests import InfoReply as InfoReply
from scavenger.cluster.requests import ReleaseJob as ReleaseJob
from scavenger.cluster.requests import RequeueJob as RequeueJob
from scavenger.cluster.requests import SubmitJob as SubmitJob
from scavenger.cluster.requests import SubmitReply as SubmitReply
from scavenger.cluster.requests import ViewReply as ViewReply

SOCKET_NAME = "control.sock"
MAX_REQUEST_BYTES = 4 << 20
MAX_REPLY_BYTES = 64 << 20


class SetNode(msgspec.Struct, frozen=True, tag=True):
    node: str
    up: bool


class KillProcesses(msgspec.Struct, frozen=True, tag=True):
    job_id: int


class KillReply(msgspec.Struct, frozen=True, tag=True):
    pids: tuple[int, ...]


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
