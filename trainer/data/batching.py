"""Micro-batches: which rows are trained together, and on which rank. Pure; knows no tensor library, model or socket.

A row is one sample with everything its loss needs. Rows travel to the ranks as MessagePack, unpadded; padding is added where the
tensors are made. Every rank runs the same number of micro-steps, because each is a collective: what is missing is filled with
zero-weight fillers.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Sequence

import msgspec


class TrainRow(msgspec.Struct, frozen=True):
    """One sample, or a branch of an episode. Token fields are packed int32, `behaviour` packed float32, `proximal` packed float64 (empty:
    not computed).

    `sample_id` -1 marks a filler. `mask`: a byte for each token of `completion`, 1 where the model generated it and it is trained; empty:
    all of them. The others are observations: what a tool or an environment said. What follows is of the trained tokens alone, in order:
    `behaviour`, `proximal`, `cuts` (tokens by who generated them; empty: not known) and `routing` (which experts each went to,
    `rollout.engines.routing`; empty: not recorded).

    `episode`: the sample that this row is a branch of, -1: it is one by itself. `others`: trained tokens in that sample's other rows.
    `turns`: of each turn of the row how many trained tokens are its, and its advantage; empty: all have `advantage`.
    """

    sample_id: int
    prompt: bytes
    completion: bytes
    behaviour: bytes
    advantage: float
    proximal: bytes = b""
    cuts: tuple[int, ...] = ()
    routing: bytes = b""
    mask: bytes = b""
    episode: int = -1
    others: int = 0
    turns: tuple[tuple[int, float], ...] = ()

    @property
    def tokens(self) -> int:
        """Prompt and completion."""
        return (len(self.prompt) + len(self.completion)) // 4

    @property
    def trained(self) -> int:
        """Tokens that are trained."""
        return self.mask.count(1) if self.mask else len(self.completion) // 4

    @property
    def signal(self) -> float:
        """|advantage|; of turns with advantages of their own the mean over their tokens."""
        if not self.turns:
            return abs(self.advantage)
        return math.fsum(tokens * abs(one) for tokens, one in self.turns) / self.trained

    @property
    def whole(self) -> int:
        """The sample that the row is, or is a branch of."""
        return self.sample_id if self.episode < 0 else self.episode


class Micro(msgspec.Struct, frozen=True):
    """One rank's work of one micro-step: rows padded to `width` tokens each, or (0) packed into one line without padding. `shared`: tokens
    that rows begin with alike and that are computed for one of them alone (`trainer.data.prefixes`)."""

    rows: tuple[TrainRow, ...]
    width: int
    shared: int = 0

    @property
    def computed_tokens(self) -> int:
        return (
            len(self.rows) * self.width if self.width else sum(row.tokens for row in self.rows) - self.shared
        )


def filler(like: Micro) -> Micro:
    """A micro-batch that costs little and adds exactly nothing: one prompt token, no completion, advantage 0."""
    return Micro((TrainRow(-1, like.rows[0].prompt[:4], b"", b"", 0.0),), width=2 if like.width else 0)


def pack(groups: Sequence[Sequence[TrainRow]], *, budget: int) -> tuple[Micro, ...]:
    """Cut the rows of some completed groups into micro-batches of at most `budget` padded tokens.

    Rows of similar length go together (longest first, ties by sample id), so that little padding is computed. A row longer than the
    budget gets a micro-batch of its own: a sample is never dropped or cut (I6).
    """
    rows = sorted((row for group in groups for row in group), key=lambda row: (-row.tokens, row.sample_id))
    micros: list[Micro] = []
    start = 0
    while start < len(rows):
        width = rows[start].tokens
        count = max(1, min(budget // width, len(rows) - start))
        micros.append(Micro(tuple(rows[start : start + count]), width))
        start += count
    return tuple(micros)


def spread(groups: Sequence[Sequence[TrainRow]], *, budget: int, ranks: int) -> tuple[Micro, ...]:
    """`pack`, with the budget lowered where that gives every rank something to do."""
    rows = [row for group in groups for row in group]
    if not rows:
        return ()
    even = -(-len(rows) // ranks) * max(row.tokens for row in rows)
    return pack(groups, budget=min(budget, even))


def balanced(
    groups: Sequence[Sequence[TrainRow]], *, budget: int, ranks: int
) -> tuple[tuple[Micro, ...], ...]:
    """Rounds of packed micro-batches of at most `budget` tokens, one a rank, which differ by less than a row.

    As few rounds as the budget allows; each row goes to the micro-batch with the fewest tokens, longest row first. A row longer than the
    budget gets a micro-batch of its own: a sample is never dropped or cut (I6).
    """
    rows = sorted((row for group in groups for row in group), key=lambda row: (-row.tokens, row.sample_id))
    total = sum(row.tokens for row in rows)
    count = -(-total // budget // ranks) * ranks
    while rows:
        bins: list[list[TrainRow]] = [[] for _ in range(count)]
        loads = [(0, bin_index) for bin_index in range(count)]
        for row in rows:
            load, bin_index = heapq.heappop(loads)
            bins[bin_index].append(row)
            heapq.heappush(loads, (load + row.tokens, bin_index))
        if all(load <= budget or len(bins[bin_index]) == 1 for load, bin_index in loads):
            return rounds([Micro(tuple(one), 0) for one in bins if one], ranks)
        count += ranks
    return ()


def one_per_group(groups: Sequence[Sequence[TrainRow]], *, width: int) -> tuple[Micro, ...]:
    """Deterministic form: each group alone, always padded to the same width, so its gradient does not depend on its company.

    A group without rows (zero variance) makes no micro-batch. Raises `ValueError` when a row is longer than `width`.
    """
    for group in groups:
        for row in group:
            if row.tokens > width:
                raise ValueError(
                    f"sample {row.sample_id} has {row.tokens} tokens, more than the fixed width {width}"
                )
    return tuple(Micro(tuple(group), width) for group in groups if group)


def rounds(micros: Sequence[Micro], ranks: int) -> tuple[tuple[Micro, ...], ...]:
    """Give each rank one micro-batch a round; the last round is filled up. Within a round, rank 0 gets the largest.

    Micro-batches of similar cost share a round, since a round lasts as long as its slowest rank.
    """
    ordered = sorted(micros, key=lambda micro: -micro.computed_tokens)
    made = []
    for start in range(0, len(ordered), ranks):
        real = ordered[start : start + ranks]
        made.append((*real, *(filler(real[0]) for _ in range(ranks - len(real)))))
    return tuple(made)


def mini_batch_of(seed: int, step: int, prompts: Sequence[int], updates: int) -> dict[int, int]:
    """Which of the step's `updates` a prompt belongs to: a shuffle fixed by (seed, step), never by arrival. Sizes differ by at most 1."""
    ordered = shuffled(sorted(prompts), f"mini-batch/{seed}/{step}")
    return {prompt: bin_index * updates // len(ordered) for bin_index, prompt in enumerate(ordered)}


def mini_batch_alone(seed: int, step: int, prompt: int, updates: int) -> int:
    """The same where a step's prompts are not known at its start: fixed by (seed, step, prompt), even only on average."""
    digest = hashlib.blake2b(f"mini-batch/{seed}/{step}/{prompt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % updates


def shuffled(items: Sequence[int], name: str) -> list[int]:
    """A permutation that depends on `name` and the items alone, on every machine and Python version."""
    return sorted(
        items, key=lambda item: (hashlib.blake2b(f"{name}/{item}".encode(), digest_size=16).digest(), item)
    )
