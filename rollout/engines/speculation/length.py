"""How much of a draft a pass verifies: as long as it makes more tokens a second, by measured acceptance and measured passes. Pure.

A pass over n positions takes T(n) seconds. With d drafted positions in each of b rows it makes b + S(d) tokens, where S(d) adds up, over
all rows, the chance that each drafted token is reached and accepted. Chosen is the d with the most tokens a second:

    max over d of  (b + S(d)) / T(b (1 + d))

d = 0 wins where drafts are poor, or where a full batch leaves no free compute. A nearly empty engine drafts deep.

Boundary: the decision how long drafts are; it knows no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Buckets of predicted chance: how often a token was accepted of which that was predicted.
BUCKETS = 8
#: Tokens that a bucket's prediction counts for, beside what was measured.
PRIOR_TOKENS = 8.0
#: A pass forgets this share of what was measured. A rate that fell to nothing is thus tried again.
FORGOTTEN = 1 / 1024
#: Before passes of different sizes were measured: positions that double the time of a pass of one.
PRIOR_DOUBLES = 48.0
PRIOR_SPREAD = 64.0  # positions squared: how much the prior slope weighs beside measured ones
#: A pass that took this many times what was expected counts as so long: the machine did something else.
OUTLIER = 4.0
#: So many times the tokens a second drafts must promise: they cost bookkeeping that no pass shows, and pass times are noisy.
MARGIN = 1.1


class Acceptance:
    """How often drafted tokens were accepted, by how often that was predicted."""

    def __init__(self) -> None:
        self._tried = [0.0] * BUCKETS
        self._taken = [0.0] * BUCKETS

    def chance(self, frequency: float) -> float:
        """That a drafted token is accepted if all before it were. `frequency`: as its siblings say, in (0, 1)."""
        bucket = _bucket(frequency)
        return (self._taken[bucket] + PRIOR_TOKENS * frequency) / (self._tried[bucket] + PRIOR_TOKENS)

    def judged(self, frequency: Sequence[float], accepted: int) -> None:
        """Of a draft with these frequencies so many tokens were accepted. Those behind the first refused one say nothing."""
        for place, one in enumerate(frequency[: accepted + 1]):
            bucket = _bucket(one)
            self._tried[bucket] += 1
            self._taken[bucket] += place < accepted

    def age(self) -> None:
        """A pass was made."""
        for bucket in range(BUCKETS):
            self._tried[bucket] *= 1 - FORGOTTEN
            self._taken[bucket] *= 1 - FORGOTTEN


def _bucket(frequency: float) -> int:
    return min(BUCKETS - 1, max(0, int(frequency * BUCKETS)))


class PassTime:
    """Seconds of a pass by its positions: a line through what was measured (least squares, older ones fade), with a prior slope.

    `floor_s`: no pass begins sooner after the one before it, so that what is computed within it is free.
    """

    def __init__(self, floor_s: float = 0.0) -> None:
        self._floor_s = floor_s
        self._weight = self._positions = self._seconds = 0.0
        self._nn = self._nt = 0.0

    def measured(self, positions: int, seconds: float) -> None:
        """A pass over so many positions took so long."""
        if self._weight:
            seconds = min(seconds, OUTLIER * self._line(positions))
        keep = 1 - FORGOTTEN
        self._weight = self._weight * keep + 1
        step_n, step_t = positions - self._positions, seconds - self._seconds
        self._positions += step_n / self._weight
        self._seconds += step_t / self._weight
        self._nn = self._nn * keep + step_n * (positions - self._positions)
        self._nt = self._nt * keep + step_t * (positions - self._positions)

    def of(self, positions: int) -> float:
        """What one would take; in any unit before the first was measured."""
        return max(self._floor_s, self._line(positions))

    def _line(self, positions: int) -> float:
        if not self._weight:
            return 1 + positions / PRIOR_DOUBLES
        prior = self._seconds / (PRIOR_DOUBLES + self._positions)
        slope = (self._nt + PRIOR_SPREAD * prior) / (self._nn + PRIOR_SPREAD)
        slope = min(max(slope, 0.0), self._seconds / max(self._positions, 1.0))
        return max(self._seconds + slope * (positions - self._positions), 1e-9)


@dataclass(frozen=True, slots=True)
class DraftLength:
    """The decision for one pass: positions that each row drafts at most, tokens that the pass is expected to make, and why."""

    length: int
    expected: float
    reason: str


def draft_length(
    chances: Sequence[Sequence[float]], rows: int, time: PassTime, *, padded: bool = True
) -> DraftLength:
    """Of one pass over `rows` samples. `chances`: of each drafted sample, that token i is accepted if all before it were.

    `padded`: every row is computed as wide as the longest draft, as T(b (1 + d)) says; else a draft's own positions are. Of equal rates
    the shortest draft wins.
    """
    longest = max((len(row) for row in chances), default=0)
    if not longest:
        return DraftLength(0, float(rows), "no sibling said what follows")
    plain = best = rows / time.of(rows)
    length, expected = 0, float(rows)
    gained, drafts = 0.0, 0
    reached = [1.0] * len(chances)
    for drafted in range(1, longest + 1):
        for at, row in enumerate(chances):
            reached[at] *= row[drafted - 1] if len(row) >= drafted else 0.0
        gained += math.fsum(reached)
        drafts += sum(len(row) >= drafted for row in chances)
        rate = (rows + gained) / time.of(rows * (1 + drafted) if padded else rows + drafts)
        if rate > best and rate > plain * MARGIN:
            best, length, expected = rate, drafted, rows + gained
    if not length:
        return DraftLength(0, float(rows), f"{longest} drafted tokens would cost more than they give")
    return DraftLength(
        length, expected, f"{length} drafted tokens make {best / plain:.2f} times as many a second"
    )
