"""What changed between two versions, chunk by chunk: lossless and bit-exact. Pure.

Owns the encoding. Knows no socket and no version's number. A delta of a chunk is the positions whose items changed and by how much (new
less old, of the items as integers modulo their width, small ones of either sign first), zstd-compressed. Bytes of equal weight lie
together, because the high ones are nearly all zero: a small step moves a bfloat16 to its neighbour. A chain is several deltas of one
chunk, one version after another.

    delta   uint8 width of an item | uint8 width of a gap | uint32 changed items | zstd(gaps' byte planes, changes' byte planes)
    chain   (uint32 length, delta)*

Nothing here is trusted: the receiver checks the hash of the chunk that comes out, and a delta that cannot be one raises `WeightsError`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard

from scavenger.errors import WeightsError
from scavenger.weights.manifest import ITEMSIZE, Manifest

LEVEL = 1
#: A chain is sent where it is at most this share of the chunk: reading the old bytes and scattering costs about as much as the rest saves.
WORTH = 0.6
MOST_LINKS = 8
_HEAD = struct.Struct("<BBI")
_LENGTH = struct.Struct("<I")
Array = np.ndarray[Any, Any]


def same_layout(one: Manifest, other: Manifest) -> bool:
    """Whether chunk i of the one is chunk i of the other, item for item."""
    return one.tensors == other.tensors and one.chunk_nbytes == other.chunk_nbytes


def width_of(manifest: Manifest, chunk: int) -> int:
    """Bytes of an item in this chunk; 1 where tensors of several widths meet in it."""
    start, stop = manifest.chunk_range(chunk)
    widths = {ITEMSIZE[t.dtype] for t in manifest.tensors if t.offset < stop and t.offset + t.nbytes > start}
    width = widths.pop() if len(widths) == 1 else 1
    return width if start % width == 0 and (stop - start) % width == 0 else 1


def encode(old: memoryview, new: memoryview, width: int) -> bytes:
    """The delta from one chunk's bytes to another's of equal length."""
    kind = np.dtype(f"<u{width}")
    before, after = np.frombuffer(old, dtype=kind), np.frombuffer(new, dtype=kind)
    places = np.flatnonzero(before != after)
    change = after[places] - before[places]
    change = (change << 1) ^ -(change >> (8 * width - 1))  # 0, -1, 1, -2, 2, … become 0, 1, 2, 3, 4, …
    gaps = np.diff(places, prepend=-1) - 1
    gap_width = 1 if not len(gaps) or gaps.max() < 1 << 8 else 2 if gaps.max() < 1 << 16 else 4
    planes = [*_planes(gaps.astype(f"<u{gap_width}")), *_planes(change)]
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(b"".join(plane.tobytes() for plane in planes))
    return _HEAD.pack(width, gap_width, len(places)) + packed


def _planes(items: Array) -> list[Array]:
    """First all lowest bytes, then all second ones, and so on."""
    return list(np.ascontiguousarray(items.view(np.uint8).reshape(-1, items.dtype.itemsize).T))


def chain(deltas: Sequence[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(delta)) + delta for delta in deltas)


def apply_chain(old: memoryview, encoded: memoryview, into: memoryview) -> None:
    """Write to `into` what the chain makes of `old`. Raises `WeightsError` for bytes that are no chain for a chunk of this length."""
    into[:] = old
    at = links = 0
    while at < len(encoded):
        links += 1
        if links > MOST_LINKS or at + _LENGTH.size > len(encoded):
            raise WeightsError("a delta of too many links, or one that is cut off")
        (length,) = _LENGTH.unpack_from(encoded, at)
        at += _LENGTH.size
        if at + length > len(encoded):
            raise WeightsError("a delta that is cut off")
        _apply(encoded[at : at + length], into)
        at += length


def _apply(delta: memoryview, chunk: memoryview) -> None:
    if len(delta) < _HEAD.size:
        raise WeightsError("a delta without its head")
    width, gap_width, count = _HEAD.unpack_from(delta)
    if width not in (1, 2, 4, 8) or gap_width not in (1, 2, 4) or len(chunk) % width or count > len(chunk) // width:
        raise WeightsError("a delta that is not one of this chunk")
    nbytes = count * (gap_width + width)
    try:
        # The library allots what the frame names, whatever `max_output_size` says: so that is looked at first. -1: it names nothing.
        named = zstandard.frame_content_size(delta[_HEAD.size :])
        if named != nbytes:
            raise WeightsError(f"a delta of {named} bytes, its head says {nbytes}")
        raw = zstandard.ZstdDecompressor().decompress(delta[_HEAD.size :], max_output_size=max(nbytes, 1))
    except zstandard.ZstdError as error:
        raise WeightsError(f"a delta that cannot be unpacked: {error}") from error
    if len(raw) != nbytes:
        raise WeightsError(f"a delta of {len(raw)} bytes, its frame names {nbytes}")
    if not count:
        return
    gaps = _from_planes(raw[: count * gap_width], gap_width)
    change = _from_planes(raw[count * gap_width :], width)
    places = np.cumsum(gaps.astype(np.int64) + 1) - 1
    items = np.frombuffer(chunk, dtype=f"<u{width}")
    if places[-1] >= len(items):
        raise WeightsError("a delta that reaches beyond its chunk")
    items[places] += (change >> 1) ^ -(change & 1)


def _from_planes(raw: bytes, width: int) -> Array:
    planes = np.frombuffer(raw, dtype=np.uint8).reshape(width, -1)
    return np.ascontiguousarray(planes.T).view(f"<u{width}").reshape(-1)
