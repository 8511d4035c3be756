"""Who serves which chunk of a version that several ranks made: all of it once, whole chunks, and only borders travel."""

from __future__ import annotations

import random

import pytest

from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Tensor
from scavenger.weights.shards import batches, plan, rows, spans


def table(rng: random.Random) -> tuple[Tensor, ...]:
    shapes = {}
    for number in range(rng.randint(1, 12)):
        shape = tuple(rng.choice((0, 1, 2, 3, 5, 8, 31, 64)) for _ in range(rng.randint(1, 3)))
        shapes[f"w{number}"] = (rng.choice(("bfloat16", "float32", "float64")), shape)
    return manifests.layout(shapes)


@pytest.mark.parametrize("seed", range(40))
def test_every_chunk_has_one_owner_who_is_given_what_it_lacks(seed: int) -> None:
    rng = random.Random(seed)
    tensors, ranks, chunk = table(rng), rng.choice((1, 2, 3, 4, 7)), rng.choice((16, 64, 256, 4096))
    total = tensors[-1].offset + tensors[-1].nbytes
    made = plan(tensors, chunk, ranks)
    memory = [bytearray(total) for _ in range(ranks)]
    truth = rng.randbytes(total)
    for span in spans(tensors, ranks):
        memory[span.rank][span.start : span.stop] = truth[span.start : span.stop]
    for move in made.moves:
        assert move.source != move.owner
        assert move.stop - move.start < chunk
        memory[move.owner][move.start : move.stop] = memory[move.source][move.start : move.stop]
    served = [one for rank in range(ranks) for one in made.chunks(rank, chunk)]
    assert sorted(served) == list(range(-(-total // chunk)))
    for rank in range(ranks):
        for one in made.chunks(rank, chunk):
            assert memory[rank][one * chunk : (one + 1) * chunk] == truth[one * chunk : (one + 1) * chunk]
    hashes = manifests.hashes_of(memoryview(truth), chunk)
    sealed = manifests.seal(1, tensors, hashes, chunk_nbytes=chunk, shards=made.shards)
    again = manifests.decode(
        manifests.encode(sealed), any_chunk=True
    )  # what travels names the shards, and they add up
    assert again.shards == made.shards
    assert again.root == manifests.seal(1, tensors, hashes, chunk_nbytes=chunk).root, (
        "however many ranks made it"
    )


@pytest.mark.parametrize("count", range(12))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_rows_are_cut_as_torch_cuts_them(count: int, ranks: int) -> None:
    torch = pytest.importorskip("torch", reason="FSDP cuts with torch.chunk")
    pieces = list(torch.arange(count).chunk(ranks)) if count else []
    theirs = [(int(p[0]), int(p[-1]) + 1) for p in pieces if len(p)]
    assert [piece for rank in range(ranks) if (piece := rows(count, rank, ranks))[0] < piece[1]] == theirs


def test_a_large_tensor_moves_borders_only() -> None:
    tensors = manifests.layout({"w": ("bfloat16", (1000, 999))})
    made = plan(tensors, 4096, 4)
    assert sum(move.stop - move.start for move in made.moves) < 3 * 4096
    assert [shard.owner for shard in made.shards] == [0, 1, 2, 3]


def test_moves_go_in_rounds_of_bounded_size() -> None:
    tensors = manifests.layout({f"w{i}": ("float32", (7, 13)) for i in range(50)})
    moves = plan(tensors, 1024, 3).moves
    rounds = list(batches(moves, 700))
    assert [move for one in rounds for move in one] == list(moves)
    assert all(sum(m.stop - m.start for m in one) <= 700 or len(one) == 1 for one in rounds)
    assert len(rounds) > 3
