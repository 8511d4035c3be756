"""What a client and the server of the local backend say to each other: one request and one reply a connection.

Owns the framing (4-byte length, MessagePack), the size bounds and the typed messages. Knows nothing of processes.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from scavenger.cluster.model import ClusterInfo, ClusterView, JobSpec
from scavenger.errors import ClusterUnavailable

SOCKET_NAME = "control.sock"
MAX_REQUEST_BYTES = 4 << 20
MAX_REPLY_BYTES = 64 << 20
HEADER = struct.Struct(">I")


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


def frame(message: Request | Reply) -> bytes:
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body)) + body


def receive_reply(sock: socket.socket) -> Reply:
    """One reply. Raises `ClusterUnavailable` when it is cut short, too large or malformed; OSError passes."""
    length = HEADER.unpack(_exactly(sock, HEADER.size))[0]
    if length > MAX_REPLY_BYTES:
        raise ClusterUnavailable(f"the local cluster's reply of {length} bytes is too large")
    try:
        return reply_decoder.decode(_exactly(sock, length))
    except msgspec.DecodeError as error:
        raise ClusterUnavailable(f"the local cluster's reply is malformed: {error}") from error


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        part = sock.recv(min(1 << 16, nbytes - len(data)))
        if not part:
            raise ClusterUnavailable("the local cluster closed the connection before its reply was complete")
        data += part
    return bytes(data)
