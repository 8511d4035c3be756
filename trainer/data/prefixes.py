"""Micro-batches in which a prefix that several rows share is computed once. Pure; knows no tensor library, model or socket.

    rows, sorted      a b c d e       computed   a b c d e      all of the first
    by their tokens   a b c x                          x        of each further one what comes after the longest prefix that it shares
                      a b c x y                        y        with the row before: in this order no earlier row shares a longer one
                      q r                        q r

Samples of a group share their prompt, branches of an episode its turns, and prompts a system prompt. A token keeps its place in its row
(position) and sees the row's path: what was computed for rows before, then the row's own (`trainer.data.collate.branched`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from trainer.data.batching import Micro, TrainRow, rounds

#: Keys that attention gathers are copies, kept for the backward pass: so many times the budget at most in a micro-batch.
MOST_SEEN = 16


def text_of(row: TrainRow) -> bytes:
    """What of a row is computed: all but its last token, which predicts nothing. Packed int32."""
    text = row.prompt + row.completion
    return text[:-4] if len(text) > 4 else text


def shared(one: bytes, other: bytes) -> int:
    """Tokens that two texts begin with alike."""
    low, high = 0, min(len(one), len(other)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if one[: 4 * middle] == other[: 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low


def branches(rows: Sequence[TrainRow]) -> list[tuple[int, int]]:
    """The order in which rows are computed: of each its place among `rows`, and how many of its tokens it has from the row before."""
    texts = [text_of(row) for row in rows]
    order = sorted(range(len(rows)), key=lambda place: (texts[place], place))
    begins = [0, *(shared(texts[before], texts[place]) for before, place in pairwise(order))]
    return list(zip(order, begins[: len(order)], strict=True))


def balanced(
    groups: Sequence[Sequence[TrainRow]], *, budget: int, ranks: int
) -> tuple[tuple[Micro, ...], ...]:
    """Rounds of micro-batches, one a rank, in which at most `budget` tokens are computed and as many trained.

    Rows are cut in the order of their tokens, in which those that share a prefix lie together: into as few rounds as the budget allows, and
    so that the largest micro-batch is as small as it can be. A row longer than the budget gets a micro-batch of its own: a sample is
    never dropped or cut (I6).
    """
    rows = [row for group in groups for row in group]
    ordered = [(rows[place], begin) for place, begin in branches(rows)]
    if not ordered:
        return ()
    count = -(-len(_cut(ordered, budget)) // ranks) * ranks
    low, high = 1, budget
    while low < high:  # the smallest budget with which they are no more
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cut(ordered, middle)) <= count else (middle + 1, high)
    return rounds([_micro(part) for part in _cut(ordered, high)], ranks)


def _cut(ordered: Sequence[tuple[TrainRow, int]], budget: int) -> list[list[tuple[TrainRow, int]]]:
    """The rows in their order, each micro-batch as full as it gets. The first row of one has nothing from a row before."""
    made: list[list[tuple[TrainRow, int]]] = []
    computed = trained = seen = 0
    for row, begin in ordered:
        length = len(text_of(row)) // 4
        computed, trained, seen = computed + length - begin, trained + row.trained, seen + length
        if made and max(computed, trained) <= budget and seen <= MOST_SEEN * budget:
            made[-1].append((row, begin))
        else:
            made.append([(row, 0)])
            computed, trained, seen = length, row.trained, length
    return made


def _micro(part: Sequence[tuple[TrainRow, int]]) -> Micro:
    return Micro(tuple(row for row, _ in part), 0, sum(begin for _, begin in part))
