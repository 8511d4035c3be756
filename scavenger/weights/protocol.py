"""The messages between a holder of weights and a receiver that pulls from it, the same on every transport.

Owns the structs, their bounds and the proof of a request. Knows no socket. Every request stands alone: it proves by itself that the
receiver was told of the version's token over the authenticated control channel, without showing the token. An eavesdropper on a request
on a network in the clear can repeat it, and gets the bytes that passed there anyway.

    Get(version, chunk)  ->  Part, then the chunk's bytes; or NoSuch        Have(version)  ->  Holds, or NoSuch
                             Have with `parent`: Holds says too what deltas from those weights there are
    Reach(version)       ->  Reached, or NoSuch: where NIXL finds the memory
    Map(version)         ->  one byte with a descriptor of the memory, or without one where it is refused (same node only)
"""

from __future__ import annotations

import secrets
from typing import Annotated

import blake3
import msgspec

from scavenger.errors import WireError

TOKEN_NBYTES = 32
MAX_REQUEST_BYTES = 512
#: Two bitmaps of as many chunks as a blob can have: 2 TB in chunks of 4 MiB.
MAX_REPLY_BYTES = 192 * 1024
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Rate = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]  # bytes a second; NaN is refused with it


class Get(msgspec.Struct, frozen=True, tag=True):
    """Ask for one chunk of a version. `parent`: root of weights that the receiver has; a delta from those may be sent instead."""

    version: int
    chunk: int
    proof: bytes
    parent: bytes = b""


class Have(msgspec.Struct, frozen=True, tag=True):
    """Ask which chunks the holder has, and what deltas to them from the weights with root `parent`.

    `link`, `applying`: bytes a second that the receiver measured of its connections and of applying deltas, all its threads together; 0 =
    not yet. What is beside the proof is no secret, and whoever alters it changes a count or an estimate.
    """

    version: int
    proof: bytes
    parent: bytes = b""
    link: _Rate = 0.0
    applying: _Rate = 0.0


class Map(msgspec.Struct, frozen=True, tag=True):
    """Ask for a descriptor of the holder's memory, on the same node."""

    version: int
    proof: bytes


class Reach(msgspec.Struct, frozen=True, tag=True):
    """Ask how NIXL can read the holder's memory."""

    version: int
    proof: bytes


class Reached(msgspec.Struct, frozen=True, tag=True):
    """The version's first byte lies at `address` of the agent whose metadata this is."""

    version: int
    metadata: bytes
    address: int


class ChunkPart(msgspec.Struct, frozen=True, tag=True):
    """`nbytes` bytes follow: the chunk's, or a chain of deltas to it from the receiver's own."""

    version: int
    chunk: int
    nbytes: int
    delta: bool = False


class NoSuch(msgspec.Struct, frozen=True, tag=True):
    """The request cannot be met here. `reason` says why; a wrong token and an unknown version are answered alike.

    `chunk` is -1 where none was asked for. `absent`: the version is here, the chunk not, or not yet.
    """

    version: int
    chunk: int
    reason: str
    absent: bool = False


class OfferedDeltas(msgspec.Struct, frozen=True):
    """Of `of_nbytes` of chunks, `nbytes` would be sent: deltas over `steps` versions, and whole chunks where there is none.

    `left_nbytes`: of chunks whose deltas are still being made, at `nbytes_per_s`.
    """

    nbytes: _Count
    of_nbytes: _Count
    steps: _Count
    left_nbytes: _Count = 0
    nbytes_per_s: _Rate = 0.0


class AvailableChunks(msgspec.Struct, frozen=True, tag=True):
    """What is here: everything, or the chunks whose bits are set (lowest bit first). `coming`: the chunks on their way here, likewise."""

    version: int
    complete: bool
    bitmap: bytes = b""
    coming: bytes = b""
    deltas: OfferedDeltas | None = None


SourceRequest = Get | Have | Map | Reach
SourceReply = ChunkPart | NoSuch | AvailableChunks | Reached
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[SourceRequest] = msgspec.msgpack.Decoder(SourceRequest)
_replies: msgspec.msgpack.Decoder[SourceReply] = msgspec.msgpack.Decoder(SourceReply)


def _proof(token: bytes, what: str, version: int, chunk: int, parent: bytes = b"") -> bytes:
    return blake3.blake3(f"{what} {version} {chunk} {parent.hex()}".encode(), key=token).digest(length=16)


def get(token: bytes, version: int, chunk: int, parent: bytes = b"") -> bytes:
    return _encoder.encode(Get(version, chunk, _proof(token, "get", version, chunk, parent), parent))


def have(token: bytes, version: int, parent: bytes = b"", link: float = 0.0, applying: float = 0.0) -> bytes:
    return _encoder.encode(Have(version, _proof(token, "have", version, -1), parent, link, applying))


def reach(token: bytes, version: int) -> bytes:
    return _encoder.encode(Reach(version, _proof(token, "reach", version, -1)))


def map_(token: bytes, version: int) -> bytes:
    return _encoder.encode(Map(version, _proof(token, "map", version, -1)))


def proven(request: SourceRequest, token: bytes) -> bool:
    """Whether the requester proved that it knows `token`."""
    chunk, parent = (request.chunk, request.parent) if isinstance(request, Get) else (-1, b"")
    return secrets.compare_digest(
        request.proof, _proof(token, type(request).__name__.lower(), request.version, chunk, parent)
    )


def encode(message: SourceReply) -> bytes:
    return _encoder.encode(message)


def decode_request(frame: bytes | memoryview) -> SourceRequest:
    """Raises `WireError` for anything that is not a well-formed request."""
    if len(frame) > MAX_REQUEST_BYTES:
        raise WireError(f"a weights request of {len(frame)} bytes is over the limit of {MAX_REQUEST_BYTES}")
    try:
        return _requests.decode(frame)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a weights request: {error}") from error


def decode_reply(frame: bytes | bytearray | memoryview) -> SourceReply:
    """Raises `WireError` for anything that is not an answer's first frame."""
    try:
        return _replies.decode(frame)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a weights answer: {error}") from error
