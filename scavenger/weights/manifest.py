"""A weight version's manifest: what its bytes are and how each is verified (I8).

Owns the table of tensors, the chunk hashes and the root hash. Knows no socket and no torch.
Layout: all tensors one after another without padding ("the blob"), wider items first and then by name, which is the data section of a
safetensors file; the blob is cut into chunks of `chunk_nbytes`, each hashed by itself (xxh3-128), so that any of them can be pulled from
any holder and checked alone. The root is the blake3 hash of the table and all chunk hashes. It travels over the authenticated channel, so
with it a receiver checks a manifest, and with a checked manifest it checks bytes from anywhere.
The chunks' size follows from the blob's alone: equal weights have equal roots, however many ranks made them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import blake3
import msgspec
import xxhash

from scavenger.errors import WeightsError

CHUNK_NBYTES = 1 << 20
LARGE_CHUNK_NBYTES = (
    4 << 20
)  # of a blob above LARGE_BLOB_NBYTES: a manifest's size and the choice among chunks stay small
LARGE_BLOB_NBYTES = 8 << 30
HASH_NBYTES = 16  # xxh3-128
ROOT_NBYTES = 32  # blake3
DIGEST_NBYTES = 32
MAX_CHUNK_NBYTES = 64 << 20  # a receiver holds a few chunks beside the blob
MAX_SIDES = 16  # of a tensor: the product of a million sides takes an hour, in the loop of a process that others share
ITEMSIZE = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}


class SharedMemory(Protocol):
    """A version's bytes in a file without a name: `memory.Buffer`."""

    fd: int

    @property
    def view(self) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class TensorView:
    """One verified tensor: C-contiguous bytes in the native layout of `dtype` (torch's name without the prefix).

    `memory`: that `data` is a part of, from `offset` on, if another process of this user may be shown it there.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    memory: SharedMemory | None = None
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class Tensor(msgspec.Struct, frozen=True):
    """A tensor's place in the blob."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Shard(msgspec.Struct, frozen=True):
    """The bytes [start, stop) of the blob, whole chunks, that the publisher's rank `owner` serves."""

    owner: int
    start: int
    stop: int


class Adapter(msgspec.Struct, frozen=True):
    """What makes weights of a version that holds low-rank adapters alone: W0 + scale * B A, rounded to `dtype`.

    `base`: root hash of the version with every W0. A and B are the tensors `<layer>.lora_A.weight` and `<layer>.lora_B.weight`.
    """

    base: bytes
    scale: float
    dtype: str


class Manifest(msgspec.Struct, frozen=True):
    """`root` is the hash of what the bytes are: equal roots are equal weights, whatever their number, parents and owners."""

    version: int
    parents: tuple[bytes, ...]  # root hashes of the versions that a delta may start from
    tensors: tuple[Tensor, ...]
    total_nbytes: int
    chunk_nbytes: int
    chunk_hashes: tuple[bytes, ...]
    root: bytes
    shards: tuple[Shard, ...] = ()  # none: one owner of everything
    adapter: Adapter | None = None  # none: these are weights as they are
    merged: bytes = b""  # what the trainer makes of adapters and base, as a digest over checksums of its tensors; none: it states nothing

    def chunk_range(self, index: int) -> tuple[int, int]:
        """Byte range [start, stop) of a chunk in the blob."""
        start = index * self.chunk_nbytes
        return start, min(start + self.chunk_nbytes, self.total_nbytes)


def chunk_hash(data: bytes | bytearray | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


def chunk_nbytes_of(total_nbytes: int) -> int:
    return CHUNK_NBYTES if total_nbytes <= LARGE_BLOB_NBYTES else LARGE_CHUNK_NBYTES


def _root(
    tensors: Sequence[Tensor], total: int, chunk_nbytes: int, hashes: Sequence[bytes], adapter: Adapter | None
) -> bytes:
    named = [list(tensors), total, chunk_nbytes, list(hashes), *([adapter] if adapter is not None else [])]
    return blake3.blake3(msgspec.msgpack.encode(named)).digest()


def layout(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[Tensor, ...]:
    """Places in the blob for `name -> (dtype, shape)`. Raises `WeightsError` for a dtype that has no place."""
    table: list[Tensor] = []
    offset = 0
    for name, (dtype, _) in tensors.items():
        if dtype not in ITEMSIZE:
            raise WeightsError(f"tensor {name!r} is {dtype}", f"publish one of {', '.join(ITEMSIZE)}")
    for name in sorted(tensors, key=lambda name: (-ITEMSIZE[tensors[name][0]], name)):
        dtype, shape = tensors[name]
        nbytes = math.prod(shape) * ITEMSIZE[dtype]
        table.append(Tensor(name, dtype, tuple(shape), offset, nbytes))
        offset += nbytes
    return tuple(table)


def hashes_of(blob: memoryview, chunk_nbytes: int) -> tuple[bytes, ...]:
    return tuple(chunk_hash(blob[i : i + chunk_nbytes]) for i in range(0, len(blob), chunk_nbytes))


def seal(
    version: int,
    table: tuple[Tensor, ...],
    hashes: tuple[bytes, ...],
    *,
    parents: tuple[bytes, ...] = (),
    chunk_nbytes: int,
    shards: tuple[Shard, ...] = (),
    adapter: Adapter | None = None,
    merged: bytes = b"",
) -> Manifest:
    """The manifest of a blob that was laid out by `layout` and whose chunks have these hashes."""
    total = table[-1].offset + table[-1].nbytes if table else 0
    root = _root(table, total, chunk_nbytes, hashes, adapter)
    return Manifest(version, parents, table, total, chunk_nbytes, hashes, root, shards, adapter, merged)


def build(
    version: int,
    tensors: Mapping[str, tuple[str, tuple[int, ...], memoryview]],
    parents: tuple[bytes, ...] = (),
    chunk_nbytes: int = 0,
    blob: memoryview | None = None,
    adapter: Adapter | None = None,
) -> tuple[Manifest, memoryview]:
    """Lay `name -> (dtype, shape, bytes)` out as a blob and hash it. Returns the manifest and the blob (`blob`, where it is given)."""
    table = layout({name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()})
    total = table[-1].offset + table[-1].nbytes if table else 0
    view = memoryview(bytearray(total)) if blob is None else blob
    for tensor in table:
        data = tensors[tensor.name][2]
        if data.nbytes != tensor.nbytes:
            raise WeightsError(
                f"tensor {tensor.name!r}: {data.nbytes} bytes given, its shape and dtype need {tensor.nbytes}"
            )
        if data.nbytes:
            view[tensor.offset : tensor.offset + tensor.nbytes] = data.cast("B")
    size = chunk_nbytes or chunk_nbytes_of(total)
    return seal(
        version, table, hashes_of(view, size), parents=parents, chunk_nbytes=size, adapter=adapter
    ), view


def encode(manifest: Manifest) -> bytes:
    return msgspec.msgpack.encode(manifest)


def decode(data: bytes, expected_root: bytes | None = None, *, any_chunk: bool = False) -> Manifest:
    """Decode and check a manifest. Raises `WeightsError` when it contradicts itself or is not the one expected.

    `any_chunk`: chunks of another size than the blob's own will do. A sender that chose it could make a receiver keep millions of tiny
    ones."""
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise WeightsError(f"not a manifest: {error}") from error
    if not 0 < manifest.chunk_nbytes <= MAX_CHUNK_NBYTES or manifest.total_nbytes < 0:
        raise WeightsError(
            f"the manifest's sizes are not positive, or its chunks are over {MAX_CHUNK_NBYTES:,} bytes"
        )
    if not any_chunk and manifest.chunk_nbytes != chunk_nbytes_of(manifest.total_nbytes):
        size = chunk_nbytes_of(manifest.total_nbytes)
        raise WeightsError(
            f"the manifest's sizes: chunks of {manifest.chunk_nbytes} bytes, {manifest.total_nbytes} are cut into {size}"
        )
    offset = 0
    for tensor in manifest.tensors:
        possible = tensor.offset == offset and tensor.dtype in ITEMSIZE and len(tensor.shape) <= MAX_SIDES
        possible = possible and all(side >= 0 for side in tensor.shape)
        if not possible or tensor.nbytes != math.prod(tensor.shape) * ITEMSIZE[tensor.dtype]:
            raise WeightsError(
                f"tensor {tensor.name!r} of the manifest has an impossible place, dtype or size"
            )
        offset += tensor.nbytes
    if offset != manifest.total_nbytes or len(manifest.chunk_hashes) != -(-offset // manifest.chunk_nbytes):
        raise WeightsError("the manifest's tensors and chunks do not add up to its total")
    _check_shards(manifest)
    of = manifest.adapter
    if len(manifest.merged) not in (0, DIGEST_NBYTES) or (manifest.merged and of is None):
        raise WeightsError(
            f"the manifest of version {manifest.version} states what was merged by no digest, or without adapters"
        )
    if of is not None and not (
        len(of.base) == ROOT_NBYTES and math.isfinite(of.scale) and of.dtype in ITEMSIZE
    ):
        raise WeightsError(
            f"the manifest of version {manifest.version} names no base, scale or dtype that adapters can have"
        )
    root = _root(manifest.tensors, manifest.total_nbytes, manifest.chunk_nbytes, manifest.chunk_hashes, of)
    if root != manifest.root or (expected_root is not None and root != expected_root):
        raise WeightsError("the manifest does not match its root hash")
    return manifest


class _Named(msgspec.Struct):
    root: bytes = b""
    adapter: Adapter | None = None
    merged: bytes = b""


_NOTHING = _Named()


def _read(data: bytes) -> _Named:
    try:
        return msgspec.msgpack.decode(data, type=_Named)
    except msgspec.MsgspecError:
        return _NOTHING


def named(data: bytes) -> tuple[bytes, bytes]:
    """An encoded manifest's root, and that of the version which its adapters are merged with; b"" where there is none, or no manifest.

    For who passes manifests on without using them: nothing is checked, which receivers do.
    """
    found = _read(data)
    return found.root, found.adapter.base if found.adapter is not None else b""


def base_of(data: bytes) -> bytes:
    return named(data)[1]


def merged_of(data: bytes) -> bytes:
    """What an encoded manifest's publisher makes of its adapters and their base; b"" where it states nothing. As unchecked as `named`."""
    return _read(data).merged


def stating(data: bytes, merged: bytes) -> bytes:
    """An encoded manifest that states this as what its adapters make of their base; the root stays. As unchecked as `named`."""
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except msgspec.MsgspecError:
        return data  # no manifest: receivers say so
    return encode(msgspec.structs.replace(manifest, merged=merged))


def _check_shards(manifest: Manifest) -> None:
    end = 0
    for shard in manifest.shards:
        whole = shard.stop % manifest.chunk_nbytes == 0 or shard.stop == manifest.total_nbytes
        if shard.start != end or shard.stop < shard.start or not whole:
            raise WeightsError(
                f"the manifest's shard of rank {shard.owner} does not follow the one before in whole chunks"
            )
        end = shard.stop
    if manifest.shards and end != manifest.total_nbytes:
        raise WeightsError(f"the manifest's shards end at byte {end} of {manifest.total_nbytes}")


def views(
    manifest: Manifest, blob: bytes | bytearray | memoryview, memory: SharedMemory | None = None
) -> list[TensorView]:
    """Cut a complete, verified blob into tensors, without a copy. `memory`: that it is the view of."""
    view = memoryview(blob)
    return [
        TensorView(t.name, t.dtype, t.shape, view[t.offset : t.offset + t.nbytes], memory, t.offset)
        for t in manifest.tensors
    ]


def views_in(manifest: Manifest, memory: SharedMemory) -> list[TensorView]:
    """`views` of a version that lies in a file, which other processes may read there."""
    return views(manifest, memory.view, memory)
