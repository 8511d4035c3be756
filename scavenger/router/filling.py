"""How full an engine's KV cache becomes while its samples grow, so that no more are given to it than fit to their ends. Pure.

All samples of an engine gain a token a step, so that with V more tokens each it holds

    sum over those with V or more to come of (tokens now + V)

which grows while few are done and falls once many are. A sample fits where that stays within the cache at each of a few V. What does not
fit would be preempted in the engine and computed again, over and over: what is freed by one that ends is given at once to one that is not
yet whole, and taken again. Owns these sums; knows no engines, leases or seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

#: The points at which the cache is looked at, up to the longest that is to come.
POINTS = 16


class Filling:
    """One engine's cache of `cache` tokens; `held`: (tokens now, tokens to come) of what it has.

    `longest`: tokens to come of the longest sample of all that it may hold.
    """

    def __init__(self, cache: float = math.inf, longest: float = 1.0, held: Iterable[tuple[float, float]] = ()) -> None:
        self._cache, self._step = cache, max(longest, 1.0) / POINTS
        self._tokens = [0.0] * POINTS
        for have, rest in held:
            self.take(have, rest)

    def fits(self, have: float, rest: float) -> bool:
        """Whether a sample of `have` tokens with `rest` to come fits, to its end."""
        if self._cache == math.inf:
            return True
        room, step = self._cache - have, self._step
        return all(tokens + i * step <= room for i, tokens in enumerate(self._tokens[: self._upto(rest)]))

    def take(self, have: float, rest: float) -> None:
        if self._cache < math.inf:
            for i in range(self._upto(rest)):
                self._tokens[i] += have + i * self._step

    @property
    def fitting(self) -> float:
        """The share of what is here that fits, by the moment at which it is most."""
        most = max(self._tokens)
        return min(1.0, self._cache / most) if most > 0 else 1.0

    def _upto(self, rest: float) -> int:
        """Points at which a sample with so much to come is still there: the first is now."""
        return min(POINTS, math.floor(max(0.0, rest) / self._step) + 1)
