"""`lengths.LengthTable` for all samples of a step at once: the same numbers to the last bit, several times as fast. Pure.

Boundary: a step's samples taken together in arrays; pure.

A policy asks about a thousand samples every few seconds. Sums, products and searches are numpy's, which rounds them as Python does;
logarithms, exponentials and quantiles stay those of `math` and `statistics`, sample by sample, because numpy's may differ in the last bit,
and equal facts shall give equal decisions wherever they run. Sums run from left to right (`cumsum`, `bincount`), never pairwise. Knows
tables, beliefs and present lengths; nothing of who holds a sample.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import NamedTuple

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
Lengths = NDArray[np.int64]
_ROOT2 = math.sqrt(2.0)
_DENSITY = 1 / math.sqrt(2 * math.pi)
#: Up to this cap a length's place among the edges is looked up, not searched.
LONG = (1 << 17) - 1
#: Fewer groups than this are solved one by one.
FEW = 6


def each(function: Callable[[float], float], values: Floats) -> Floats:
    """A function of `math` on every value: its last bit is the same everywhere, numpy's own is not."""
    return np.fromiter(map(function, values.tolist()), np.float64, len(values))


class Places(NamedTuple):
    """Where lengths stand among a table's edges: `at` as `bisect_left` finds it, and the share of the bin, by logs, that lies below."""

    at: NDArray[np.intp]
    part: Floats


@functools.lru_cache(maxsize=8)
def _places(cap: int, edges: tuple[float, ...], logs: tuple[float, ...]) -> Places:
    """Of each length up to the cap. It depends on what is given here alone, and edges are fixed by the cap: nothing makes it stale."""
    return _found(np.arange(cap + 1), edges, logs)


def _found(have: Lengths, edges: tuple[float, ...], logs: tuple[float, ...]) -> Places:
    marks = np.array(logs)
    at = np.searchsorted(np.array(edges), have.astype(np.float64), "left")
    high = np.minimum(np.maximum(at, 1), len(edges) - 1)
    low = high - 1
    own = each(math.log, np.maximum(have, 1).astype(np.float64))
    return Places(at, (own - marks[low]) / (marks[high] - marks[low]))


def places(cap: int, edges: tuple[float, ...], logs: tuple[float, ...], have: Lengths) -> Places:
    """Of these lengths. Whatever is longer than the cap stands where the cap does."""
    if cap > LONG:
        return _found(have, edges, logs)
    all_, short = _places(cap, edges, logs), np.minimum(have, cap)
    return Places(all_.at[short], all_.part[short])


class Present:
    """The present lengths of samples that are not done, and their scores in a table: what is asked of them begins with these."""

    def __init__(
        self, table: LengthTable, have: Sequence[int] | Lengths, known: Places | None = None
    ) -> None:
        """`known`: where they stand among the table's edges, if that was found before."""
        self.table = table
        self.have = np.array(have, np.int64)
        self.least = self.have + 1.0
        self.scores = np.array(table.scores)
        self.logs = np.array(table.logs)
        found = known or places(table.cap, table.edges, table.logs, self.have)
        self.score = self._score(found)
        self.begun = np.flatnonzero(self.have > table.edges[0])

    def __len__(self) -> int:
        return len(self.have)

    def scores_of(self, lengths: Lengths) -> Floats:
        """`LengthTable.score` of each."""
        table = self.table
        return self._score(places(table.cap, table.edges, table.logs, lengths))

    def _score(self, found: Places) -> Floats:
        scores, last = self.scores, len(self.scores)
        high = np.minimum(np.maximum(found.at, 1), last - 1)
        low = high - 1
        score = scores[low] + found.part * (scores[high] - scores[low])
        ends = np.where(found.at == 0, scores[0], scores[-1])
        inside: Floats = np.where((found.at > 0) & (found.at < last), score, ends)
        return inside


class _Many:
    """Samples of one table. `mean`, `sd`: of the score that each one's completion ends at."""

    def __init__(self, present: Present, mean: Floats, sd: Floats) -> None:
        self._present, self._mean, self._sd = present, mean, sd
        self._left = self._survival()

    def _survival(self) -> Floats:
        """Of each sample, the probability that a completion gets as long as it is."""
        begun, left = self._present.begun, np.ones(len(self._present))
        x = (self._present.score[begun] - self._mean[begun]) / self._sd[begun] / _ROOT2
        left[begun] = 0.5 * each(math.erfc, x)
        return left

    def at(self, above: Floats | float) -> Floats:
        """The length that this share of what is above the present one exceeds, of each sample."""
        present, share = self._present, np.minimum(ALMOST, np.maximum(self._left * above, LEAST))
        drawn = np.fromiter(map(quantile, share.tolist(), repeat(0.0), repeat(1.0)), np.float64, len(share))
        score = self._mean - self._sd * drawn
        scores, logs, table = present.scores, present.logs, present.table
        at = np.searchsorted(scores, score, "left")
        inside = (at > 0) & (at < len(scores))
        high = np.where(inside, at, 1)
        low = high - 1
        log = logs[low] + (score - scores[low]) / (scores[high] - scores[low]) * (logs[high] - logs[low])
        length = each(math.exp, np.where(inside, log, 0.0))
        ends = np.where(at == 0, table.edges[0], float(table.cap))
        found: Floats = np.maximum(np.where(inside, length, ends), present.least)
        return found


def expected(present: Present, groups: Sequence[tuple[Belief, int]]) -> Floats:
    """`LengthTable.expected` of each sample. `groups`: the belief of each one and how many samples it has, group after group."""
    if not groups:
        return np.empty(0)
    correlation = present.table.correlation
    root = math.sqrt(correlation)
    counts = [count for _, count in groups]
    mean = np.repeat([root * belief.mean for belief, _ in groups], counts)
    spread = [max(math.sqrt(1 - correlation * (1 - belief.sd * belief.sd)), 1e-3) for belief, _ in groups]
    many = _Many(present, mean, np.repeat(spread, counts))
    total = np.zeros(len(present))
    for share in SIXTHS:
        total = total + many.at(share)
    return np.minimum(float(present.table.cap), total / 3)


def impute(present: Present, groups: Sequence[tuple[int, Belief, int]]) -> Floats:
    """`lengths.impute` of groups given as (key, belief, how many samples), group after group."""
    if not groups:
        return np.empty(0)
    table = present.table
    root = math.sqrt(table.correlation)
    mean = np.repeat(
        [
            root * belief.mean + root * belief.sd * quantile(corput(key + 1), 0.0, 1.0)
            for key, belief, _ in groups
        ],
        [count for _, _, count in groups],
    )
    sd = np.full(len(present), math.sqrt(max(1 - table.correlation, 1e-6)))
    shares = np.array([share for key, _, count in groups for share in scattered(key, count)])
    lengths = _Many(present, mean, sd).at(1 - shares)
    return np.minimum(float(table.cap), lengths)


def beliefs(present: Present, groups: Sequence[tuple[int, int, Sequence[int]]]) -> list[Belief]:
    """`LengthTable.belief` of each group, given as (first, stop, lengths of its finished samples): the others are `first` to `stop - 1`."""
    table = present.table
    if len(groups) < FEW:
        return [
            table.belief(GroupLengths(tuple(finished), tuple(present.have[first:stop].tolist())))
            for first, stop, finished in groups
        ]
    share, noise = math.sqrt(table.correlation), math.sqrt(1 - table.correlation)
    slope = share / noise
    total, count, above = _evidence(present, groups)
    mean, precision = np.zeros(len(groups)), np.ones(len(groups))
    todo = np.flatnonzero((count > 0) | (above > -math.inf).any(axis=1))
    for _ in range(6):
        if not len(todo):
            break
        own = mean[todo]
        pull, information = _pulls(
            (total[todo] - count[todo] * share * own) / noise,
            count[todo],
            (above[todo] - (share * own)[:, None]) / noise,
        )
        solved = 1 + slope * slope * information
        step = np.maximum(-1.5, np.minimum(1.5, (slope * pull - own) / solved))
        mean[todo], precision[todo] = own + step, solved
        todo = todo[np.abs(step) >= 3e-3]
    return [Belief(*one) for one in zip(mean.tolist(), (1 / np.sqrt(precision)).tolist(), strict=True)]


def _evidence(
    present: Present, groups: Sequence[tuple[int, int, Sequence[int]]]
) -> tuple[Floats, NDArray[np.int64], Floats]:
    """What each group's belief follows from: the sum of its known scores, their number, and a row of the scores that its others are above.

    A row is filled up with -inf, which says nothing.
    """
    rows, table = len(groups), present.table
    done = np.array([length for _, _, finished in groups for length in finished], np.int64)
    of = np.repeat(np.arange(rows), [len(finished) for _, _, finished in groups])
    known = done < table.cap
    total = np.bincount(of[known], present.scores_of(done[known]), rows)
    count, capped = np.bincount(of[known], minlength=rows), np.bincount(of[~known], minlength=rows)
    first = np.array([first for first, _, _ in groups], np.int64)
    running = np.array([stop - first for first, stop, _ in groups], np.int64)
    row = np.repeat(np.arange(rows), running)
    samples = np.arange(len(row)) + (first - (running.cumsum() - running))[row]
    begun = present.have[samples] > table.edges[0]
    samples, row = samples[begun], row[begun]
    running = np.bincount(row, minlength=rows)
    column = capped[row] + np.arange(len(row)) - (running.cumsum() - running)[row]
    above = np.full((rows, int((capped + running).max())), -math.inf)
    above[np.arange(above.shape[1]) < capped[:, None]] = present.scores[-1]
    above[row, column] = present.score[samples]
    return total.astype(np.float64, copy=False), count, above


def _pulls(pull: Floats, information: NDArray[np.int64], t: Floats) -> tuple[Floats, Floats]:
    """Both with what each row's samples add, one after the other: h = `hazard(t)`, and h (h - t), as in `LengthTable.belief`."""
    told = t > -6
    x = t[told]
    far, h = x > 8, np.empty(len(x))
    near = x[~far]
    h[~far] = _DENSITY * each(math.exp, -0.5 * near * near) / (0.5 * each(math.erfc, near / _ROOT2))
    h[far] = x[far] + 1 / x[far]
    sums = np.zeros((2, t.shape[0], t.shape[1] + 1))
    sums[0, :, 0], sums[1, :, 0] = pull, information
    sums[0, :, 1:][told], sums[1, :, 1:][told] = h, h * (h - x)
    found = sums.cumsum(axis=2)[:, :, -1]
    return found[0], found[1]
