"""Messages over a stream socket: 4 bytes of length, then MessagePack. Both ends bound what they take, and for how long they wait.

Owns the framing; which messages there are is each protocol's.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import TypeVar

import msgspec

from scavenger.errors import ClusterUnavailable

HEADER = struct.Struct(">I")
M = TypeVar("M")


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body)) + body


def receive(
    sock: socket.socket, decoder: msgspec.msgpack.Decoder[M], most_bytes: int, who: str, deadline: float
) -> M:
    """One message of `who`, whole by `deadline` (`time.monotonic`), however its bytes come. Changes the socket's timeout.

    Raises `ClusterUnavailable` when it is cut short, too large or malformed; OSError passes, `TimeoutError` with it.
    """
    length = HEADER.unpack(_exactly(sock, HEADER.size, who, deadline))[0]
    if length > most_bytes:
        raise ClusterUnavailable(f"{who} sends {length} bytes, more than the bound of {most_bytes}")
    try:
        return decoder.decode(_exactly(sock, length, who, deadline))
    except msgspec.DecodeError as error:  # ValidationError is one too
        raise ClusterUnavailable(f"what {who} sends is malformed: {error}") from error


def peer_uid(sock: socket.socket) -> int:
    """Who is at the other end of a Unix socket, by the kernel's word: of a client, who connected; of a server, who listens."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def _exactly(sock: socket.socket, nbytes: int, who: str, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left_s)  # of one `recv`: one byte now and then would begin it afresh
        part = sock.recv(min(1 << 16, nbytes - len(data)))
        if not part:
            raise ClusterUnavailable(f"{who} closed the connection before its message was complete")
        data += part
    return bytes(data)
