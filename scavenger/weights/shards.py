"""Which rank of a training job serves which bytes of a version, and what ranks give each other for that. Pure.

FSDP2 cuts every tensor along its first side into as many pieces as there are ranks; each piece is one byte range of the blob. Chunks know
nothing of ranks: their places follow from the blob alone, so that equal weights have equal roots however many ranks made them. So a chunk
may lie across several ranks' pieces. It belongs to the rank that has most of it, which is given the rest (`ShardMove`) and then hashes and
serves it whole: a receiver never has to put a chunk together. What moves is less than one chunk at each border between two pieces.
Boundary: which rank serves which bytes; pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scavenger.weights.manifest import Shard, Tensor


@dataclass(frozen=True, slots=True)
class ShardSpan:
    """The bytes [start, stop) of the blob are computed by `rank`."""

    start: int
    stop: int
    rank: int


@dataclass(frozen=True, slots=True)
class ShardMove:
    """The bytes [start, stop) of the blob go from the rank that computes them to the one that serves their chunk."""

    start: int
    stop: int
    source: int
    owner: int


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """`shards` cover the blob in whole chunks; `moves` are in the order of the blob."""

    shards: tuple[Shard, ...]
    moves: tuple[ShardMove, ...]

    def chunks(self, owner: int, chunk_nbytes: int) -> Iterator[int]:
        """The chunks that a rank serves, in order."""
        for shard in self.shards:
            if shard.owner == owner:
                yield from range(shard.start // chunk_nbytes, -(-shard.stop // chunk_nbytes))


def rows(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rows [first, last) of a tensor with `count` rows that FSDP2 gives a rank: equal pieces, the last ones shorter or empty."""
    each = -(-count // ranks)
    return min(rank * each, count), min((rank + 1) * each, count)


def spans(table: Sequence[Tensor], ranks: int) -> Iterator[ShardSpan]:
    """Who computes which bytes, in the order of the blob."""
    for tensor in table:
        count = tensor.shape[0] if tensor.shape else 1
        for rank in range(ranks) if tensor.nbytes else ():
            first, last = rows(count, rank, ranks)
            if first < last:
                row = tensor.nbytes // count
                yield ShardSpan(tensor.offset + first * row, tensor.offset + last * row, rank)


def plan(table: Sequence[Tensor], chunk_nbytes: int, ranks: int) -> ShardPlan:
    """Every chunk to the rank that has most of it, the lowest among equals."""
    shards: list[Shard] = []
    moves: list[ShardMove] = []
    pieces: list[ShardSpan] = []

    def settle(stop: int) -> None:
        """The chunk that `pieces` make up ends here."""
        amounts: dict[int, int] = {}
        for piece in pieces:
            amounts[piece.rank] = amounts.get(piece.rank, 0) + piece.stop - piece.start
        owner = min(amounts, key=lambda rank: (-amounts[rank], rank))
        moves.extend(
            ShardMove(piece.start, piece.stop, piece.rank, owner) for piece in pieces if piece.rank != owner
        )
        if shards and shards[-1].owner == owner:
            shards[-1] = Shard(owner, shards[-1].start, stop)
        else:
            shards.append(Shard(owner, pieces[0].start, stop))
        pieces.clear()

    for span in spans(table, ranks):
        start = span.start
        while start < span.stop:
            end = min(span.stop, (start // chunk_nbytes + 1) * chunk_nbytes)
            pieces.append(ShardSpan(start, end, span.rank))
            if end % chunk_nbytes == 0:
                settle(end)
            start = end
    if pieces:
        settle(pieces[-1].stop)
    return ShardPlan(tuple(shards), tuple(moves))


def batches(moves: Sequence[ShardMove], most_nbytes: int) -> Iterator[tuple[ShardMove, ...]]:
    """The moves in rounds of so many bytes at most (one move at least), the same for all ranks."""
    batch: list[ShardMove] = []
    size = 0
    for move in moves:
        nbytes = move.stop - move.start
        if batch and size + nbytes > most_nbytes:
            yield tuple(batch)
            batch, size = [], 0
        batch.append(move)
        size += nbytes
    if batch:
        yield tuple(batch)
