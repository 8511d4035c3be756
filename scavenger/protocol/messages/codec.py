"""Frames and packed arrays: a message becomes one bounded MessagePack frame, tokens and logprobs little-endian arrays.

Owns the encoder, the typed decoder of each direction and the packing. Knows no socket.

Boundary: bytes; the messages themselves know no frame.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from scavenger.errors import WireError
from scavenger.protocol.messages.common import MAX_MESSAGE_BYTES, PROTOCOL, Message
from scavenger.protocol.messages.trainer import Call, ToTrainer
from scavenger.protocol.messages.worker import ToWorker, WorkerMessage

ToDaemon = WorkerMessage | Call

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
_to_daemon: msgspec.msgpack.Decoder[ToDaemon] = msgspec.msgpack.Decoder(ToDaemon)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_trainer: msgspec.msgpack.Decoder[ToTrainer] = msgspec.msgpack.Decoder(ToTrainer)


def encode(message: Message) -> bytes:
    """One frame. Raises `WireError` when the message is larger than any peer accepts."""
    frame = _encoder.encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"a {type(message).__name__} of {len(frame):,} bytes is over the limit of {MAX_MESSAGE_BYTES:,}",
            "send fewer groups or samples in one message",
        )
    return frame


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes | memoryview, limit: int) -> T:
    if len(frame) > limit:
        raise WireError(f"a message of {len(frame):,} bytes is over the limit of {limit:,}")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise WireError(f"not a message of protocol {PROTOCOL}: {error}") from error


def decode_to_daemon(frame: bytes | memoryview, limit: int = MAX_MESSAGE_BYTES) -> ToDaemon:
    """Decode what a worker or trainer sent. Raises `WireError`."""
    return _decode(_to_daemon, frame, limit)


def decode_to_worker(frame: bytes | memoryview) -> ToWorker:
    """Decode what the daemon sent to a worker. Raises `WireError`."""
    return _decode(_to_worker, frame, MAX_MESSAGE_BYTES)


def decode_to_trainer(frame: bytes | memoryview) -> ToTrainer:
    """Decode what the daemon sent to a trainer. Raises `WireError`."""
    return _decode(_to_trainer, frame, MAX_MESSAGE_BYTES)


def _pack(code: str, values: Iterable[Any]) -> bytes:
    packed = array(code, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(code: str, data: bytes) -> tuple[Any, ...]:
    if len(data) % 4:
        raise WireError(f"a packed array of {len(data)} bytes is not a multiple of 4")
    unpacked = array(code)
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return tuple(unpacked)


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian int32."""
    return _pack("i", token_ids)


def token_count(packed: bytes) -> int:
    """How many tokens, or logprobs, these bytes hold."""
    return len(packed) // 4


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """The inverse of `pack_tokens`."""
    return _unpack("i", data)


def squeeze_tokens(packed: bytes) -> bytes:
    """Packed token ids in fewer bytes: ids are small and samples of one group repeat each other."""
    return zlib.compress(b"".join(packed[byte::4] for byte in range(4)), 1)


def unsqueeze_tokens(data: bytes, tokens: int) -> bytes:
    """The inverse of `squeeze_tokens`, for just so many tokens; raises `WireError`. Allocates no more than they need."""
    unzip = zlib.decompressobj()
    try:
        planes = unzip.decompress(data, 4 * tokens + 1)
    except zlib.error as error:
        raise WireError(f"not {tokens} squeezed tokens: {error}") from error
    if len(planes) != 4 * tokens:
        raise WireError(f"not {tokens} squeezed tokens: {len(planes):,} bytes or more, unpacked")
    packed = bytearray(4 * tokens)
    for byte in range(4):
        packed[byte::4] = planes[byte * tokens : (byte + 1) * tokens]
    return bytes(packed)


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """Logprobs as little-endian float32."""
    return _pack("f", logprobs)


def unpack_logprobs(data: bytes) -> tuple[float, ...]:
    """The inverse of `pack_logprobs`."""
    return _unpack("f", data)


def unpack_differences(data: bytes) -> tuple[float, ...]:
    """Packed float16, as `TokenDifferences.values`."""
    if len(data) % 2:
        raise WireError(f"differences of {len(data)} bytes are not a multiple of 2")
    return struct.unpack(f"<{len(data) // 2}e", data)
