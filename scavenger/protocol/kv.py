"""What a sample's KV blocks are bound to when they go from one engine to another, and the checks before they are loaded. Pure.

    holder    header = bound to (run, ledger, version, root, model, layout, tokens) and the hash of each chunk
    reader    header of what its own lease says  ==  the holder's?   then each chunk's hash; anything else: the tokens are prefilled

The reader computes the binding from its own lease, engine and weights, so nothing that a holder says of itself is believed. The tokens are
named by their digest: blocks of another sample, or of the same one with another token anywhere, are refused.

Boundary: which blocks may be loaded; no engine, no socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import blake3
import msgspec

from scavenger.errors import WireError
from scavenger.protocol.messages import BoundedText, Count, Digest, MessagePart, Nbytes, pack_tokens

#: Of all samples together that an engine keeps for others, of which what was kept first goes first; and of all that come to one engine and
#: are not used yet, beyond which samples are prefilled.
MOST_NBYTES = 4 << 30
#: Of which finished turns' may be so much: who orders engines about keeps within it, so that the most valuable ones stay.
TURNS_NBYTES = 3 << 30
#: Bytes of a chunk on the wire, but for the last.
CHUNK_NBYTES = 4 * 1024 * 1024
#: Of one sample: half a million tokens of a large model.
MAX_CHUNKS = 4096
MAX_HEADER_BYTES = 64 * MAX_CHUNKS


class KvBinding(MessagePart, frozen=True):
    """What KV blocks are of. `layout`: engine, dtype and shape of a token's entries. `tokens`: that they cover; `digest`: of these.

    `history`: of the ledger, in which versions have their numbers. `root`: of the weights that made them. `model`: digest of its config.
    """

    run: BoundedText
    history: BoundedText
    version: int
    root: Digest
    model: Digest
    layout: BoundedText
    tokens: Count
    digest: Digest


class KvHeader(MessagePart, frozen=True):
    """What a holder says of a sample's blocks: what they are of, how many bytes, and the hash of each chunk."""

    binding: KvBinding
    nbytes: Nbytes
    hashes: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_CHUNKS)]


_encoder = msgspec.msgpack.Encoder()
_headers: msgspec.msgpack.Decoder[KvHeader] = msgspec.msgpack.Decoder(KvHeader)


def digest_of(tokens: Sequence[int]) -> bytes:
    """Names these tokens, in this order."""
    return blake3.blake3(pack_tokens(tokens)).digest()


def model_digest(model_config: str) -> bytes:
    """Names a model by the text of its config.json."""
    return blake3.blake3(model_config.encode()).digest()


def chunk_range(chunk: int, nbytes: int) -> tuple[int, int]:
    """The bytes [start, stop) of a chunk."""
    return chunk * CHUNK_NBYTES, min((chunk + 1) * CHUNK_NBYTES, nbytes)


def chunk_count(nbytes: int) -> int:
    return -(-nbytes // CHUNK_NBYTES)


def header_of(binding: KvBinding, data: memoryview) -> KvHeader:
    """Hashes every byte: call it in a thread."""
    chunks = (data[slice(*chunk_range(i, data.nbytes))] for i in range(chunk_count(data.nbytes)))
    return KvHeader(binding, data.nbytes, tuple(blake3.blake3(chunk).digest() for chunk in chunks))


def encode_header(header: KvHeader) -> bytes:
    return _encoder.encode(header)


def decode_header(frame: bytes | memoryview) -> KvHeader:
    """Raises `WireError` for anything that is not a well-formed header."""
    if len(frame) > MAX_HEADER_BYTES:
        raise WireError(f"a KV header of {len(frame)} bytes is over the limit of {MAX_HEADER_BYTES}")
    try:
        header = _headers.decode(frame)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a KV header: {error}") from error
    if len(header.hashes) != chunk_count(header.nbytes):
        raise WireError(f"a KV header with {len(header.hashes)} hashes for {header.nbytes} bytes")
    return header


def mismatch_of_other(header: KvHeader, own: KvBinding, token_nbytes: int) -> str:
    """Why blocks bound so may not be kept for a turn whose tokens are not known here; "" when they may. `own`: what is common to all that
    this engine has of so many tokens. Who loads them knows the tokens, and compares these."""
    known = msgspec.structs.replace(own, digest=header.binding.digest)
    return mismatch(header, known, own.tokens * token_nbytes)


def mismatch(header: KvHeader, expected: KvBinding, nbytes: int) -> str:
    """Why blocks bound so may not be loaded where `expected` is needed, in `nbytes` bytes; "" when they may."""
    found = header.binding
    other = [name for name in KvBinding.__struct_fields__ if getattr(found, name) != getattr(expected, name)]
    if other:
        return f"the blocks are of another {' and '.join(other)}"
    return "" if header.nbytes == nbytes else f"the blocks have {header.nbytes} bytes, {nbytes} are due"


def chunk_fault(header: KvHeader, chunk: int, data: memoryview) -> str:
    """Why a chunk that came is not the one that the header names; "" when it is."""
    start, stop = chunk_range(chunk, header.nbytes)
    if data.nbytes != stop - start:
        return f"chunk {chunk} has {data.nbytes} bytes, {stop - start} are due"
    return (
        "" if blake3.blake3(data).digest() == header.hashes[chunk] else f"chunk {chunk} differs from its hash"
    )
