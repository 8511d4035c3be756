"""Several data sets by weight: which of them position p of the training stream is of. Pure; the same in every attempt of a run.

Each position goes to the set that is furthest behind its share, the first of those alike. So every stretch of the stream has each set's
share within two prompts, a step's as well as an epoch's, and nothing is drawn.

Boundary: weights and positions; no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """`set`: which one. `number`: how many of its prompts came before, in it its position."""

    set: int
    number: int


class Mixture:
    """Owns what was laid out so far; positions are asked for in any order."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Weights are above 0, of any sum. Raises `ValueError` where there is none."""
        total = sum(weights)
        if not weights or not all(weight > 0 for weight in weights):
            raise ValueError(f"weights {list(weights)}: at least one, all above 0")
        self.shares = [weight / total for weight in weights]
        self._counts = [0] * len(weights)
        self._places: list[Place] = []

    def at(self, position: int) -> Place:
        """Position 0 is the first."""
        while len(self._places) <= position:
            length = len(self._places) + 1
            behind = [share * length - count for share, count in zip(self.shares, self._counts, strict=True)]
            chosen = behind.index(max(behind))
            self._places.append(Place(chosen, self._counts[chosen]))
            self._counts[chosen] += 1
        return self._places[position]

    def counts(self, length: int) -> list[int]:
        """How many of the first `length` positions are each set's."""
        found = [0] * len(self.shares)
        for position in range(length):
            found[self.at(position).set] += 1
        return found
