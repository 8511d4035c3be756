"""The bulk messages between a weights source and whoever pulls from it: one request frame, one or two answer frames.

Owns the structs and their bounds. Knows no socket. An answer's bytes travel as a frame of their own behind the `Part`, so that
neither side copies them. The token proves that the receiver was told of the version over the authenticated control channel.
"""

from __future__ import annotations

import msgspec

from scavenger.errors import WireError

TOKEN_NBYTES = 32
MAX_REQUEST_BYTES = 512


class Get(msgspec.Struct, frozen=True, tag=True):
    """Ask for one chunk of a version. `token` is exactly 32 bytes."""

    version: int
    token: bytes
    chunk: int


class Part(msgspec.Struct, frozen=True, tag=True):
    """The chunk's bytes follow in the next frame."""

    version: int
    chunk: int


class NoSuch(msgspec.Struct, frozen=True, tag=True):
    """The chunk cannot be had here. `reason` says why; a wrong token and an unknown version are answered alike."""

    version: int
    chunk: int
    reason: str


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Get)
_answers = msgspec.msgpack.Decoder(Part | NoSuch)


def encode(message: Get | Part | NoSuch) -> bytes:
    return _encoder.encode(message)


def decode_request(frame: bytes | memoryview) -> Get:
    """Raises `WireError` for anything that is not a well-formed request."""
    if len(frame) > MAX_REQUEST_BYTES:
        raise WireError(f"a weights request of {len(frame)} bytes is over the limit of {MAX_REQUEST_BYTES}")
    try:
        request = _requests.decode(frame)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a weights request: {error}") from error
    if len(request.token) != TOKEN_NBYTES:
        raise WireError(f"a token of {len(request.token)} bytes, not {TOKEN_NBYTES}")
    return request


def decode_answer(frame: bytes | memoryview) -> Part | NoSuch:
    """Raises `WireError` for anything that is not an answer's first frame."""
    try:
        answer: Part | NoSuch = _answers.decode(frame)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a weights answer: {error}") from error
    return answer
