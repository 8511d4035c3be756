"""`lengths.LengthTable` for all samples of a step at once: the same numbers to the last bit, several times as fast. Pure.

Boundary: a step's samples taken together in arrays; pure.

A policy asks about a thousand samples every few seconds. Sums, products and searches are numpy's, which rounds them as Python does;
logarithms, exponentials and quantiles stay those of `math` and `statistics`, sample by sample, because numpy's may differ in the last bit,
and equal facts shall give equal decisions wherever they run. Knows tables, beliefs and present lengths; nothing of who holds a sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from scavenger.policy.forecast.lengths import (
    ALMOST,
    LEAST,
    SIXTHS,
    Belief,
    GroupLengths,
    LengthTable,
    corput,
    quantile,
    scattered,
)

Floats = NDArray[np.float64]
_ROOT2 = math.sqrt(2.0)


class _Many:
    """Samples of one table. `have`: tokens of each; `mean`, `sd`: of the score that its completion ends at."""

    def __init__(self, table: LengthTable, have: Sequence[int], mean: Floats, sd: Floats) -> None:
        self._table, self._mean, self._sd = table, mean, sd
        self._edges, self._logs, self._scores = (
            np.array(table.edges),
            np.array(table.logs),
            np.array(table.scores),
        )
        self._have = np.array(have, np.float64)
        self.least = self._have + 1.0
        self._left = self._survival(have)

    def _survival(self, have: Sequence[int]) -> Floats:
        """Of each sample, the probability that a completion gets as long as it is."""
        begun = np.flatnonzero(self._have > self._edges[0])
        left = np.ones(len(have))
        if len(begun):
            at = np.searchsorted(self._edges, self._have[begun], "left")
            high = np.minimum(at, len(self._edges) - 1)
            low = high - 1
            logs, scores = self._logs, self._scores
            own = np.array(list(map(math.log, self._have[begun].tolist())))
            part = (own - logs[low]) / (logs[high] - logs[low])
            score = np.where(
                at == len(self._edges), scores[-1], scores[low] + part * (scores[high] - scores[low])
            )
            x = (score - self._mean[begun]) / self._sd[begun] / _ROOT2
            left[begun] = 0.5 * np.array(list(map(math.erfc, x.tolist())))
        return left

    def at(self, above: Floats | float) -> Floats:
        """The length that this share of what is above the present one exceeds, of each sample."""
        share = np.minimum(ALMOST, np.maximum(self._left * above, LEAST))
        score = self._mean - self._sd * np.array(
            list(map(quantile, share.tolist(), repeat(0.0), repeat(1.0)))
        )
        scores, logs = self._scores, self._logs
        at = np.searchsorted(scores, score, "left")
        inside = (at > 0) & (at < len(scores))
        high = np.where(inside, at, 1)
        low = high - 1
        log = logs[low] + (score - scores[low]) / (scores[high] - scores[low]) * (logs[high] - logs[low])
        length = np.array(list(map(math.exp, np.where(inside, log, 0.0).tolist())))
        ends = np.where(at == 0, self._edges[0], float(self._table.cap))
        found: Floats = np.maximum(np.where(inside, length, ends), self.least)
        return found


def expected(table: LengthTable, groups: Sequence[tuple[Belief, Sequence[int]]]) -> Floats:
    """`LengthTable.expected` of each group's samples, given as (belief, present lengths), group after group."""
    if not groups:
        return np.empty(0)
    root, correlation = math.sqrt(table.correlation), table.correlation
    have = [length for _, lengths in groups for length in lengths]
    counts = [len(lengths) for _, lengths in groups]
    mean = np.repeat([root * belief.mean for belief, _ in groups], counts)
    spread = [max(math.sqrt(1 - correlation * (1 - belief.sd * belief.sd)), 1e-3) for belief, _ in groups]
    many = _Many(table, have, mean, np.repeat(spread, counts))
    total = np.zeros(len(have))
    for share in SIXTHS:
        total = total + many.at(share)
    return np.minimum(float(table.cap), total / 3)


def impute(table: LengthTable, groups: Sequence[tuple[int, Belief, GroupLengths]]) -> Floats:
    """`lengths.impute` of groups given as (key, belief, group), group after group."""
    if not groups:
        return np.empty(0)
    root = math.sqrt(table.correlation)
    have = [length for _, _, group in groups for length in group.running]
    counts = [len(group.running) for _, _, group in groups]
    mean = np.repeat(
        [
            root * belief.mean + root * belief.sd * quantile(corput(key + 1), 0.0, 1.0)
            for key, belief, _ in groups
        ],
        counts,
    )
    sd = np.full(len(have), math.sqrt(max(1 - table.correlation, 1e-6)))
    shares = np.array(
        [share for (key, _, _), count in zip(groups, counts, strict=True) for share in scattered(key, count)]
    )
    lengths = _Many(table, have, mean, sd).at(1 - shares)
    return np.minimum(float(table.cap), lengths)
