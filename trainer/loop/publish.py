"""Weights as they leave the trainer: every rank casts its own shards into host memory and serves them from there. Nothing is gathered.

Owns a rank's share of each version: the copy, the borders that ranks give each other, the hashes, and the memory's use again. Where the
model has replicas, the ranks of the first do it (`mesh`), and are counted among themselves. Knows no daemon and no MPI: `ranks` carries
hashes to rank 0 and the manifest back, the loop announces what came of it.

A rank's memory of a version is as large as all of it, and holes where other ranks' shards are: a file's holes cost nothing. It is written
again when the version is off the shelf, which waits for its readers' leases, and no view is left (`memory.MemoryPool`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.engines.checksum import Sum
from scavenger.errors import WeightsError
from scavenger.protocol import messages
from scavenger.weights import files, shards
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Adapter, Manifest
from scavenger.weights.memory import Buffer, MemoryPool
from scavenger.weights.shards import ShardMove, ShardPlan
from scavenger.weights.spool import Spool, SpoolShare
from trainer.model.learner import Learner
from trainer.model.merged import MergedSums
from trainer.model.mesh import Mesh
from trainer.model.pinned import Pins, cuda_pins

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
ROUND_NBYTES = 256 << 20  # borders that are under way at a time, of all ranks together
HASHERS = 2  # threads that hash what is copied while more is copied
_TOGETHER = 16  # chunks


class Source(Protocol):
    """`scavenger.weights.source.WeightServer`, or the single-process stand-in."""

    def publish(
        self, manifest: Manifest, blob: Buffer, chunks: Sequence[int] | None = None
    ) -> messages.WeightSource: ...


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Where everything lies and who serves what: the same for all versions of a run."""

    dtype: str
    table: tuple[manifests.Tensor, ...]
    total: int
    chunk_nbytes: int
    plan: ShardPlan
    chunks: tuple[int, ...]  # this rank's


def table_of(
    shapes: Mapping[str, tuple[int, ...]], dtype: str, tokenizer: bytes
) -> tuple[manifests.Tensor, ...]:
    """Weights of one type, and after them the tokenizer's bytes, if there are any."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {name: (dtype, shape) for name, shape in shapes.items()}
    if tokenizer:
        tensors[files.TOKENIZER] = (files.DTYPE, (len(tokenizer),))
    return manifests.layout(tensors)


def layout(
    shapes: Mapping[str, tuple[int, ...]], dtype: str, rank: int, ranks: int, tokenizer: bytes = b""
) -> WeightLayout:
    table = table_of(shapes, dtype, tokenizer)
    total = sum(tensor.nbytes for tensor in table)
    size = manifests.chunk_nbytes_of(total)
    plan = shards.plan(table, size, ranks)
    return WeightLayout(dtype, table, total, size, plan, tuple(plan.chunks(rank, size)))


class Publisher:
    """One rank's end. `make`, then `offer`, for each version; both on all ranks, in turn.

    `tokenizer`: the bytes of the model's tokenizer.json, the same on all ranks, where engines need it; b"" where they do not.
    """

    def __init__(self, source: Source, spool: Spool | None = None, tokenizer: bytes = b"") -> None:
        self._source = source
        self._spool = spool
        self._tokenizer = tokenizer
        self._merged = MergedSums()
        self._pool = MemoryPool(most=4)
        self._layout: WeightLayout | None = None
        self._of_base = False  # what that layout is of
        self._made: Buffer | None = None
        self._pins: Pins | None = None  # where weights come from a GPU

    @property
    def tokenizer(self) -> str:
        """Digest of the tokenizer that versions hold, in hex; "" = none."""
        return files.digest(self._tokenizer)

    # ---------------------------------------------------------------- this rank's share

    def make(self, learner: Learner, dtype: str, *, base: bool = False) -> bytes:
        """Copy this rank's share of the present weights, cast, into host memory. A collective of the replica that publishes.

        Returns its chunks' hashes, in order.

        `base`: of what the adapters stand beside, not of the adapters.
        """
        mesh = learner.mesh
        if self._layout is None or (self._layout.dtype, self._of_base) != (dtype, base):
            beside = self._tokenizer if base or not learner.adapter_scale else b""  # adapters: in their base
            self._layout = layout(learner.shapes(base=base), dtype, mesh.shard, mesh.shards, beside)
            self._of_base = base
        of = self._layout
        self._made = buffer = self._pool.take(of.total)
        with ThreadPoolExecutor(HASHERS, "weights-hash") as hashers:
            hashing = _Hashing(hashers, buffer.view, of, mesh.shard)
            if of.total:
                flat = torch.frombuffer(buffer.view, dtype=torch.uint8)
                if mesh.device_type == "cuda":
                    self._pin(buffer, flat.data_ptr(), of, mesh)
                for end in _copy(flat, learner, of, base=base, tokenizer=self._tokenizer):
                    hashing.copied(end)
                for moves in shards.batches(of.plan.moves, ROUND_NBYTES):
                    _exchange(flat, moves, mesh)
            hashing.exchanged()
            return hashing.result()

    def sums(self, learner: Learner, dtype: str) -> dict[str, Sum]:
        """Checksums of this rank's rows of all weights with their adapters merged, rounded to `dtype`. A collective, as `make`."""
        return self._merged.of(learner, DTYPES[dtype])

    def _pin(self, buffer: Buffer, address: int, of: WeightLayout, mesh: Mesh) -> None:
        spans = shards.spans(of.table, mesh.shards)
        own = [(span.start, span.stop) for span in spans if span.rank == mesh.shard]
        served = [(shard.start, shard.stop) for shard in of.plan.shards if shard.owner == mesh.shard]
        self._pins = self._pins or cuda_pins()
        self._pins.pin(buffer, address, [*own, *served])

    def seal(
        self, version: int, hashes: Sequence[bytes], adapter: Adapter | None = None, merged: bytes = b""
    ) -> Manifest:
        """The manifest of what all ranks made, in their order. Raises `WeightsError` where they do not fit together."""
        of = self._layout
        assert of is not None
        found = [b""] * -(-of.total // of.chunk_nbytes)
        for rank, rank_hashes in enumerate(hashes):
            mine = list(of.plan.chunks(rank, of.chunk_nbytes))
            if len(rank_hashes) != len(mine) * manifests.HASH_NBYTES:
                raise WeightsError(
                    f"rank {rank} hashed {len(rank_hashes)} bytes for {len(mine)} chunks",
                    "start all ranks with one configuration",
                )
            for position, chunk in enumerate(mine):
                found[chunk] = rank_hashes[
                    position * manifests.HASH_NBYTES : (position + 1) * manifests.HASH_NBYTES
                ]
        owners = of.plan.shards if len(hashes) > 1 else ()
        return manifests.seal(
            version,
            of.table,
            tuple(found),
            chunk_nbytes=of.chunk_nbytes,
            shards=owners,
            adapter=adapter,
            merged=merged,
        )

    # ---------------------------------------------------------------- given out

    def mark(self) -> str:
        """Rank 0: under which mark all ranks shall write the version to the spool; "" = not at all."""
        return secrets.token_hex(8) if self._spool is not None and self._spool.ready() else ""

    def offer(
        self, manifest: Manifest, mark: str, rank: int, ranks: int
    ) -> tuple[messages.WeightSource, ...]:
        """Serve this rank's share, and write it to the spool where `mark` says so. Returns its sources: none for an empty share."""
        of, buffer = self._layout, self._made
        assert of is not None
        assert buffer is not None
        found = []
        if of.chunks or not of.total:
            found.append(self._source.publish(manifest, buffer, None if ranks == 1 else of.chunks))
        if mark and self._spool is not None:
            mine = [(shard.start, shard.stop) for shard in of.plan.shards if shard.owner == rank]
            disk = self._spool.put(manifest, buffer, SpoolShare(mark, rank, ranks, mine))
            found += [disk] if rank == 0 else []
        self._made = None
        self._pool.put_back(buffer)  # for a later version, once this one is neither served nor read
        return tuple(found)


def _copy(
    flat: Tensor, learner: Learner, of: WeightLayout, *, base: bool, tokenizer: bytes = b""
) -> Iterator[int]:
    """Each tensor's rows into place, cast on their way, then the tokenizer's bytes where the version holds them.

    Yields up to which byte of the blob all that this rank has is there.
    """
    position = {tensor.name: tensor for tensor in of.table}
    beside = position.pop(files.TOKENIZER, None)
    rank, ranks = learner.mesh.shard, learner.mesh.shards
    for name, value in learner.shards(position, base=base):
        tensor = position[name]
        count = tensor.shape[0] if tensor.shape else 1
        first, last = shards.rows(count, rank, ranks)
        row = tensor.nbytes // max(count, 1)
        if value.numel() * manifests.ITEMSIZE[of.dtype] != (last - first) * row:
            raise WeightsError(
                f"rank {rank} has {tuple(value.shape)} of {name!r} {tensor.shape}",
                "shard parameters by their first side",
            )
        if value.numel():
            start = tensor.offset + first * row
            flat[start : start + (last - first) * row].view(DTYPES[of.dtype]).copy_(value.reshape(-1))
        yield tensor.offset + tensor.nbytes
    if beside is not None:
        first, last = shards.rows(beside.nbytes, rank, ranks)
        if first < last:
            data = torch.frombuffer(bytearray(tokenizer[first:last]), dtype=torch.uint8)
            flat[beside.offset + first : beside.offset + last] = data
        yield beside.offset + beside.nbytes


def _exchange(flat: Tensor, moves: Sequence[ShardMove], mesh: Mesh) -> None:
    """Give each rank what it lacks of its chunks. All ranks of a replica go through the same moves."""
    rank, ranks = mesh.shard, mesh.shards
    going = sorted((move for move in moves if move.source == rank), key=lambda move: move.owner)
    coming = sorted((move for move in moves if move.owner == rank), key=lambda move: move.source)
    device = torch.device(mesh.device_type)
    given = torch.cat([flat[move.start : move.stop] for move in going] or [flat[:0]]).to(device)
    sent = [sum(move.stop - move.start for move in going if move.owner == other) for other in range(ranks)]
    due = [sum(move.stop - move.start for move in coming if move.source == other) for other in range(ranks)]
    taken = torch.empty(sum(due), dtype=torch.uint8, device=device)
    dist.all_to_all_single(taken, given, due, sent, group=mesh.shard_group)
    here, at = taken.cpu(), 0
    for move in coming:
        flat[move.start : move.stop] = here[at : at + move.stop - move.start]
        at += move.stop - move.start


class _Hashing:
    """Hashes a rank's chunks by threads as their bytes are there, in any order; gives the hashes in the chunks' order."""

    def __init__(self, hashers: ThreadPoolExecutor, view: memoryview, of: WeightLayout, rank: int) -> None:
        self._hashers, self._view, self._size, self._total = hashers, view, of.chunk_nbytes, of.total
        lacking = {move.start // of.chunk_nbytes for move in of.plan.moves if move.owner == rank}
        self._chunks = of.chunks
        self._own = [chunk for chunk in of.chunks if chunk not in lacking]
        self._lacking = [chunk for chunk in of.chunks if chunk in lacking]
        self._begun = 0
        self._work: list[tuple[Sequence[int], Future[list[bytes]]]] = []

    def copied(self, end: int) -> None:
        """Everything of this rank below `end` is there."""
        ready = self._begun
        while ready < len(self._own) and min((self._own[ready] + 1) * self._size, self._total) <= end:
            ready += 1
        self._begin(self._own[self._begun : ready])
        self._begun = ready

    def exchanged(self) -> None:
        self._begin([*self._own[self._begun :], *self._lacking])

    def _begin(self, chunks: Sequence[int]) -> None:
        for at in range(0, len(chunks), _TOGETHER):
            some = chunks[at : at + _TOGETHER]
            self._work.append((some, self._hashers.submit(self._hash, some)))

    def _hash(self, chunks: Sequence[int]) -> list[bytes]:
        return [
            manifests.chunk_hash(self._view[chunk * self._size : (chunk + 1) * self._size])
            for chunk in chunks
        ]

    def result(self) -> bytes:
        found: dict[int, bytes] = {}
        for chunks, future in self._work:
            found.update(zip(chunks, future.result(), strict=True))
        return b"".join(found[chunk] for chunk in self._chunks)
