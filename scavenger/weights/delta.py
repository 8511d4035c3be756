"""What changed between two versions, chunk by chunk: lossless and bit-exact. Pure.

Owns the encoding. Knows no socket and no version's number. A change is new less old, of the items as integers modulo their width, small
ones of either sign first. A chain is several deltas of one chunk, one version after another. Of two forms:

  few changed    the positions and the changes. Bytes of equal weight lie together, because the high ones are nearly all zero.
  many changed   every item's change, in the order of the old items' exponents, which both sides know: what an optimizer step adds is much
                 the same for all, so the exponent tells how many last places it is. Four small changes (0 to 2) share a byte, that the
                 entropy coder may spend less than a bit on one; 3 says that the rest of it is among the large ones.

    delta   uint8 width of an item | uint8 width of a gap | uint32 changed items | zstd(gaps' byte planes, changes' byte planes)
            uint8 width of an item | uint8 0              | uint32 large changes | zstd(fours of changes, large ones' byte planes)
    chain   (uint32 length, delta)*

Nothing here is trusted: the receiver checks the hash of the chunk that comes out, and a delta that cannot be one raises `WeightsError`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from scavenger.errors import WeightsError
from scavenger.weights.manifest import ITEMSIZE, Manifest

LEVEL = 1
#: A chain is kept and sent where it is at most this share of the chunk, so that memory is not spent on what saves next to nothing. Whether
#: it is asked for, the receiver decides by seconds (`choice`).
WORTH = 0.9
MOST_LINKS = 8
#: Up to this share of changed items, positions cost less than 1 % of the chunk: all items' changes could save no more, and are several
#: times slower to make and to apply.
FEW = 0.01
#: Beyond this share, all items' changes are shorter whichever items moved. Between the two it depends on that: positions are shorter where
#: those lie together; all items' changes, by far, where the old exponent tells which move, as where the masters were bfloat16 before.
MANY = 0.05
LARGE = 3
EXPONENT = {
    1: (0, 0xFF),
    2: (7, 0xFF),
    4: (23, 0xFF),
    8: (52, 0x7FF),
}  # where bfloat16, float32 and float64 have it: shift, mask
_HEAD = struct.Struct("<BBI")
_LENGTH = struct.Struct("<I")
Array = np.ndarray[Any, Any]
_FOURS: Array = (
    np.array([[byte >> 2 * lane & 3 for lane in range(4)] for byte in range(256)], dtype=np.uint8)
    .view("<u4")
    .reshape(-1)
)


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
    changed = np.flatnonzero(before != after)
    if len(changed) > MANY * len(before):
        return _encode_all(before, after)
    few = _encode_few(before, after, changed)
    return few if len(changed) <= FEW * len(before) else min(few, _encode_all(before, after), key=len)


def _encode_few(before: Array, after: Array, changed: Array) -> bytes:
    change = _folded(after[changed] - before[changed])
    gaps = np.diff(changed, prepend=-1) - 1
    gap_width = 1 if not len(gaps) or gaps.max() < 1 << 8 else 2 if gaps.max() < 1 << 16 else 4
    return _packed(
        before.dtype.itemsize,
        gap_width,
        len(changed),
        [*_planes(gaps.astype(f"<u{gap_width}")), *_planes(change)],
    )


def _encode_all(before: Array, after: Array) -> bytes:
    change = _folded(after - before)[_order(before)]
    small = np.zeros(-(-len(change) // 4) * 4, dtype=np.uint8)
    small[: len(change)] = np.minimum(change, LARGE)
    four = small.view("<u4")
    fours = (four | four >> 6 | four >> 12 | four >> 18).astype(np.uint8)
    large = change[change >= LARGE] - change.dtype.type(LARGE)
    return _packed(before.dtype.itemsize, 0, len(large), [fours, *_planes(large)])


def _packed(width: int, gap_width: int, count: int, planes: Sequence[Array]) -> bytes:
    return _HEAD.pack(width, gap_width, count) + zstandard.ZstdCompressor(level=LEVEL).compress(
        b"".join(p.tobytes() for p in planes)
    )


def _folded(change: Array) -> Array:
    """0, -1, 1, -2, 2, … become 0, 1, 2, 3, 4, …"""
    folded: Array = (change << 1) ^ -(change >> (8 * change.dtype.itemsize - 1))
    return folded


def _unfolded(change: Array) -> Array:
    unfolded: Array = (change >> 1) ^ -(change & 1)
    return unfolded


def _order(items: Array) -> Array:
    """The places of the items by their exponents, equal ones as they lie."""
    shift, mask = EXPONENT[items.dtype.itemsize]
    exponents = (items >> shift) & mask
    return np.argsort(exponents.astype(np.uint8 if mask <= 0xFF else np.uint16), kind="stable")


def _planes(items: Array) -> list[Array]:
    """First all lowest bytes, then all second ones, and so on."""
    return list(np.ascontiguousarray(items.view(np.uint8).reshape(-1, items.dtype.itemsize).T))


def chain(deltas: Sequence[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(delta)) + delta for delta in deltas)


def links(encoded: bytes | memoryview) -> int:
    """How many deltas a chain has, counted up to one more than it may have; one that is cut off has one too many rather than too few."""
    at = count = 0
    while at < len(encoded) and count <= MOST_LINKS:  # whoever sent it may have made millions of empty ones
        at += _LENGTH.size + int.from_bytes(encoded[at : at + _LENGTH.size], "little")
        count += 1
    return count


def apply_chain(old: memoryview, encoded: memoryview, into: memoryview) -> None:
    """Write to `into` what the chain makes of `old`. Raises `WeightsError` for bytes that are no chain for a chunk of this length."""
    into[:] = old
    for one in chain_links(encoded):
        _apply(one, into)


def chain_links(encoded: memoryview) -> Iterator[memoryview]:
    """The deltas of a chain, one version after another. Raises `WeightsError` where it is cut off or has too many."""
    at = links = 0
    while at < len(encoded):
        links += 1
        if links > MOST_LINKS or at + _LENGTH.size > len(encoded):
            raise WeightsError("a delta of too many links, or one that is cut off")
        (length,) = _LENGTH.unpack_from(encoded, at)
        at += _LENGTH.size
        if at + length > len(encoded):
            raise WeightsError("a delta that is cut off")
        yield encoded[at : at + length]
        at += length


@dataclass(frozen=True, slots=True)
class Changes:
    """A delta taken apart, of items of `width` bytes. `fours`: of every item, in the order of their exponents; or else `gaps`: between the
    changed ones. `folded`: of those that are large, or that are changed, in their order; unsigned.
    """

    width: int
    fours: Array | None
    gaps: Array | None
    folded: Array


def taken_apart(delta: memoryview, chunk_nbytes: int) -> Changes | None:
    """What a delta to a chunk of this length says; None where that is nothing. Raises `WeightsError` for what cannot be one."""
    if len(delta) < _HEAD.size:
        raise WeightsError("a delta without its head")
    width, gap_width, count = _HEAD.unpack_from(delta)
    if (
        width not in (1, 2, 4, 8)
        or gap_width not in (0, 1, 2, 4)
        or chunk_nbytes % width
        or count > chunk_nbytes // width
    ):
        raise WeightsError("a delta that is not one of this chunk")
    items = chunk_nbytes // width
    fours = 0 if gap_width else -(-items // 4)
    raw = _unpacked(delta[_HEAD.size :], fours + count * (gap_width + width))
    if fours:
        return Changes(width, np.frombuffer(raw, np.uint8, fours), None, _from_planes(raw[fours:], width))
    if count > MANY * items:  # as `encode` makes none: links of it that change nothing would cost only time
        raise WeightsError(f"a delta with {count} positions of {items}")
    if not count:
        return None
    gaps = _from_planes(raw[: count * gap_width], gap_width)
    return Changes(width, None, gaps, _from_planes(raw[count * gap_width :], width))


def _apply(delta: memoryview, chunk: memoryview) -> None:
    changes = taken_apart(delta, len(chunk))
    if changes is None:
        return
    items = np.frombuffer(chunk, dtype=f"<u{changes.width}")
    if changes.fours is not None:
        _apply_all(changes.fours, changes.folded, items)
        return
    changed = positions(changes, len(items))
    items[changed] += _unfolded(changes.folded)


def positions(changes: Changes, items: int) -> Array:
    """Where the changed ones of so many items are. Raises `WeightsError` where one lies beyond them."""
    assert changes.gaps is not None
    changed: Array = np.cumsum(changes.gaps.astype(np.int64) + 1) - 1
    if changed[-1] >= items:
        raise WeightsError("a delta that reaches beyond its chunk")
    return changed


def _apply_all(fours: Array, large: Array, items: Array) -> None:
    some = _FOURS.take(fours).view(np.uint8)[: len(items)]
    rest = np.flatnonzero(some == LARGE)
    if len(rest) != len(large):
        raise WeightsError(f"a delta of {len(rest)} large changes, its head says {len(large)}")
    change = some.astype(items.dtype)
    change[rest] += large
    placed = np.empty_like(change)
    placed[_order(items)] = _unfolded(change)
    items += placed


def _unpacked(packed: memoryview, nbytes: int) -> bytes:
    try:
        # The library allots what the frame names, whatever `max_output_size` says: so that is looked at first. -1: it names nothing.
        named = zstandard.frame_content_size(packed)
        if named != nbytes:
            raise WeightsError(f"a delta of {named} bytes, its head says {nbytes}")
        raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=max(nbytes, 1))
    except zstandard.ZstdError as error:
        raise WeightsError(f"a delta that cannot be unpacked: {error}") from error
    if len(raw) != nbytes:
        raise WeightsError(f"a delta of {len(raw)} bytes, its frame names {nbytes}")
    return raw


def _from_planes(raw: bytes, width: int) -> Array:
    planes = np.frombuffer(raw, dtype=np.uint8).reshape(width, -1)
    return np.ascontiguousarray(planes.T).view(f"<u{width}").reshape(-1)
