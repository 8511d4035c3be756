"""A weight version's manifest: what its bytes are and how each is verified (I8).

Owns the table of tensors, the chunk hashes and the root hash. Knows no socket and no torch.
Layout: all tensors one after another in the order of their names, without padding ("the blob"); the blob is cut into chunks of
`chunk_nbytes`, each hashed by itself, so that any byte range can be pulled from any holder and checked alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import blake3
import msgspec

from scavenger.errors import WeightsError

CHUNK_NBYTES = 1 << 20
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class TensorView:
    """One verified tensor: C-contiguous bytes in the native layout of `dtype` (torch's name without the prefix)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class Tensor(msgspec.Struct, frozen=True):
    """A tensor's place in the blob."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Manifest(msgspec.Struct, frozen=True):
    """`root` is the hash of everything but `version` and `parents`: equal roots are equal weights, whatever their numbers."""

    version: int
    parents: tuple[bytes, ...]  # root hashes of the versions that a delta may start from
    tensors: tuple[Tensor, ...]
    total_nbytes: int
    chunk_nbytes: int
    chunk_hashes: tuple[bytes, ...]
    root: bytes

    def chunk_range(self, index: int) -> tuple[int, int]:
        """Byte range [start, stop) of a chunk in the blob."""
        start = index * self.chunk_nbytes
        return start, min(start + self.chunk_nbytes, self.total_nbytes)


def chunk_hash(data: bytes | memoryview) -> bytes:
    return blake3.blake3(data).digest()


def _root(tensors: Sequence[Tensor], total: int, chunk_nbytes: int, hashes: Sequence[bytes]) -> bytes:
    return blake3.blake3(msgspec.msgpack.encode([list(tensors), total, chunk_nbytes, list(hashes)])).digest()


def build(
    version: int,
    tensors: Mapping[str, tuple[str, tuple[int, ...], memoryview]],
    parents: tuple[bytes, ...] = (),
    chunk_nbytes: int = CHUNK_NBYTES,
) -> tuple[Manifest, bytearray]:
    """Lay `name -> (dtype, shape, bytes)` out as a blob and hash it. Returns the manifest and the blob."""
    table: list[Tensor] = []
    blob = bytearray()
    for name in sorted(tensors):
        dtype, shape, data = tensors[name]
        raw = data.cast("B") if data.nbytes else data
        table.append(Tensor(name, dtype, tuple(shape), len(blob), raw.nbytes))
        blob += raw
    view = memoryview(blob)
    hashes = tuple(chunk_hash(view[i : i + chunk_nbytes]) for i in range(0, len(blob), chunk_nbytes))
    root = _root(table, len(blob), chunk_nbytes, hashes)
    return Manifest(version, parents, tuple(table), len(blob), chunk_nbytes, hashes, root), blob


def encode(manifest: Manifest) -> bytes:
    return msgspec.msgpack.encode(manifest)


def decode(data: bytes, expected_root: bytes | None = None) -> Manifest:
    """Decode and check a manifest. Raises `WeightsError` when it contradicts itself or is not the one expected."""
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise WeightsError(f"not a manifest: {error}") from error
    if manifest.chunk_nbytes <= 0 or manifest.total_nbytes < 0:
        raise WeightsError("the manifest's sizes are not positive")
    offset = 0
    for tensor in manifest.tensors:
        items = 1
        for side in tensor.shape:
            items *= side
        if tensor.offset != offset or tensor.dtype not in ITEMSIZE or tensor.nbytes != items * ITEMSIZE[tensor.dtype]:
            raise WeightsError(f"tensor {tensor.name!r} of the manifest has an impossible place, dtype or size")
        offset += tensor.nbytes
    if offset != manifest.total_nbytes or len(manifest.chunk_hashes) != -(-offset // manifest.chunk_nbytes):
        raise WeightsError("the manifest's tensors and chunks do not add up to its total")
    root = _root(manifest.tensors, manifest.total_nbytes, manifest.chunk_nbytes, manifest.chunk_hashes)
    if root != manifest.root or (expected_root is not None and root != expected_root):
        raise WeightsError("the manifest does not match its root hash")
    return manifest


def views(manifest: Manifest, blob: bytes | bytearray | memoryview) -> list[TensorView]:
    """Cut a complete, verified blob into tensors, without a copy."""
    view = memoryview(blob)
    return [TensorView(t.name, t.dtype, t.shape, view[t.offset : t.offset + t.nbytes]) for t in manifest.tensors]
