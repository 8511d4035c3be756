"""Which of the engines that a policy chose gets which sample, so that samples of one prompt share its prefill. Pure.

A policy says how many samples each engine gets. This only exchanges samples that have no token yet among those places: each engine gets as
many as before. A group goes to the engine that has one of it already, else to the one with just enough free places for all of it, else to
the one with the most; what is left of it goes on likewise.

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
    free = Counter(answer.worker_id for answer in some)
    groups: dict[int, list[int]] = {}
    for answer in some:
        groups.setdefault(answer.group_id, []).append(answer.sample_id)
    found: dict[int, int] = {}
    for group_id, samples in groups.items():
        left = list(samples)
        while left:
            worker_id = _best(free, len(left), held.get(group_id, {}))
            count = min(free[worker_id], len(left))
            found |= dict.fromkeys(left[:count], worker_id)
            del left[:count]
            free[worker_id] -= count
    return found


def _best(free: Mapping[int, int], wanted: int, held: Mapping[int, int]) -> int:
    """The engine that takes some of a group of which so many samples are left. `free`: its places; `held`: of the group, by engine."""
    able = [worker_id for worker_id, places in free.items() if places > 0]

    def rank(worker_id: int) -> tuple[bool, bool, int, int]:
        places = free[worker_id]
        return worker_id not in held, places < wanted, places if places >= wanted else -places, worker_id

    return min(able, key=rank)
