"""Messages over a stream socket: 4 bytes of length, then MessagePack. Both ends bound what they take.

Owns the framing; which messages there are is each protocol's.
"""

from __future__ import annotations

import socket
import struct
from typing import TypeVar

import msgspec

from scavenger.errors import ClusterUnavailable

HEADER = struct.Struct(">I")
M = TypeVar("M")


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body)) + body


def receive(sock: socket.socket, decoder: msgspec.msgpack.Decoder[M], most_bytes: int, who: str) -> M:
    """One message of `who`. Raises `ClusterUnavailable` when it is cut short, too large or malformed; OSError passes."""
    length = HEADER.unpack(_exactly(sock, HEADER.size, who))[0]
    if length > most_bytes:
        raise ClusterUnavailable(f"{who} sends {length} bytes, more than the bound of {most_bytes}")
    try:
        return decoder.decode(_exactly(sock, length, who))
    except msgspec.DecodeError as error:  # ValidationError is one too
        raise ClusterUnavailable(f"what {who} sends is malformed: {error}") from error


def peer_uid(sock: socket.socket) -> int:
    """Who is at the other end of a Unix socket, by the kernel's word: of a client, who connected; of a server, who listens."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def _exactly(sock: socket.socket, nbytes: int, who: str) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        part = sock.recv(min(1 << 16, nbytes - len(data)))
        if not part:
            raise ClusterUnavailable(f"{who} closed the connection before its message was complete")
        data += part
    return bytes(data)
