"""Which of the engines that a policy chose gets which sample, so that samples of one prompt share its prefill. Pure.

A policy says how many samples each engine gets. This only exchanges samples that have no token yet among those places: each engine gets as
many as before. A group goes to the engine that has one of it already, else to the one with just enough room for all of it, else to the one
with the most; what is left of it goes on likewise.

Boundary: which sample takes which place; the places are the policy's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Placeable(NamedTuple):
    """A sample without tokens, its group, and the engine that the policy chose for it."""

    sample_id: int
    group_id: int
    worker_id: int


def together(answers: Iterable[Placeable], held: Mapping[int, Mapping[int, int]]) -> dict[int, int]:
    """By sample, the engine that it goes to. `held`: by group, how many samples of it each engine generates already."""
    some = list(answers)
    room = Counter(answer.worker_id for answer in some)
    groups: dict[int, list[int]] = {}
    for answer in some:
        groups.setdefault(answer.group_id, []).append(answer.sample_id)
    found: dict[int, int] = {}
    for group_id, samples in groups.items():
        left = list(samples)
        while left:
            worker_id = _best(room, len(left), held.get(group_id, {}))
            count = min(room[worker_id], len(left))
            found |= dict.fromkeys(left[:count], worker_id)
            del left[:count]
            room[worker_id] -= count
    return found


def _best(room: Mapping[int, int], wanted: int, held: Mapping[int, int]) -> int:
    able = [worker_id for worker_id, free in room.items() if free > 0]

    def rank(worker_id: int) -> tuple[bool, bool, int, int]:
        free = room[worker_id]
        return worker_id not in held, free < wanted, free if free >= wanted else -free, worker_id

    return min(able, key=rank)
