"""How long completions will be, learned from completions: a run's distribution, how alike siblings are, what a running one has left. Pure.

    lengths  a life table over bins of log length: finished samples are events, running ones are censored at their present length
    scores   z = Phi^-1(F(length)), piecewise linear in log length; a sample of a group has z = sqrt(rho) g + sqrt(1 - rho) e
    belief   the posterior of g given the group's finished (z known) and running siblings (z above the score of their length)

Before anything was seen: a lognormal with its median at a sixth of the cap and sigma 1, worth four completions, and rho = .3, worth 64
pairs. Older steps count less, so that a drift is followed. Owns what is learned of lengths. Knows no clock, engine or worker, and no
true length of a running sample: all is what the ledger has.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

_quantile = NormalDist().inv_cdf
try:  # what `NormalDist.inv_cdf` calls, (share, mean, sd): without its look at the share
    from _statistics import _normal_dist_inv_cdf  # type: ignore[import-not-found]

    quantile: Callable[[float, float, float], float] = _normal_dist_inv_cdf
except ImportError:  # as in `statistics` itself, where Python was built without it

    def quantile(share: float, mean: float, sd: float) -> float:
        return mean + sd * _quantile(share)


_ROOT2 = math.sqrt(2.0)
_DENSITY = 1 / math.sqrt(2 * math.pi)

BINS_PER_OCTAVE = 8
OCTAVES = 9
PRIOR_ANSWERS = 4.0
PRIOR_MEDIAN_SHARE = 1 / 6
PRIOR_SIGMA = 1.0
PRIOR_CORRELATION = 0.3
PRIOR_PAIRS = 64.0
#: Completions whose weight the memory of earlier steps aims at: a big step forgets quickly, a small one slowly.
MEMORY = 1024.0
_EDGE = 1e-9
#: Tails that are told apart, and the shares whose quantiles `expected` is the mean of.
LEAST, ALMOST = 1e-12, 1 - 1e-12
SIXTHS = (5 / 6, 0.5, 1 / 6)
_MASK = (1 << 64) - 1


def upper_tail(x: float) -> float:
    """P(Z > x) of a standard normal."""
    return 0.5 * math.erfc(x / _ROOT2)


def hazard(x: float) -> float:
    """phi(x) / P(Z > x), by its asymptote where both underflow."""
    return x + 1 / x if x > 8 else _DENSITY * math.exp(-0.5 * x * x) / upper_tail(x)


@dataclass(frozen=True, slots=True)
class GroupLengths:
    """What is known of one prompt's samples: lengths of the finished ones, present lengths of the others (0: not begun)."""

    finished: tuple[int, ...] = ()
    running: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Belief:
    """The posterior of a group's g."""

    mean: float = 0.0
    sd: float = 1.0


@dataclass(frozen=True, slots=True)
class LengthTable:
    """The distribution at one moment. `scores[j]` is the score of length `edges[j]`; beyond the last edge lies the cap."""

    cap: int
    edges: tuple[float, ...]
    logs: tuple[float, ...]
    scores: tuple[float, ...]
    correlation: float

    def score(self, length: float) -> float:
        """The score of a length below the cap; of the cap and above, the score at which the cap begins."""
        at = bisect_left(self.edges, length)
        if at == 0:
            return self.scores[0]
        if at == len(self.edges):
            return self.scores[-1]
        low, high = self.logs[at - 1], self.logs[at]
        part = (math.log(length) - low) / (high - low)
        return self.scores[at - 1] + part * (self.scores[at] - self.scores[at - 1])

    def length(self, score: float) -> float:
        """The length of a score: the inverse of `score`."""
        at = bisect_left(self.scores, score)
        if at == 0:
            return self.edges[0]
        if at == len(self.scores):
            return float(self.cap)
        low, high = self.scores[at - 1], self.scores[at]
        part = (score - low) / (high - low)
        return math.exp(self.logs[at - 1] + part * (self.logs[at] - self.logs[at - 1]))

    def belief(self, group: GroupLengths) -> Belief:
        """The mode of g and the curvature there, by Newton's method; the log posterior is concave.

        d/dg = -g + sqrt(rho / v) (sum of t over finished + sum of hazard(t) over censored), t = (z - sqrt(rho) g) / sqrt(v), v = 1 - rho.
        """
        share, noise = math.sqrt(self.correlation), math.sqrt(1 - self.correlation)
        slope = share / noise
        known = [self.score(length) for length in group.finished if length < self.cap]
        above = [self.scores[-1] for length in group.finished if length >= self.cap]
        above += [self.score(length) for length in group.running if length > self.edges[0]]
        if not slope or not (known or above):
            return Belief()
        total, count, mean, precision, exp, erfc = _in_order(known), len(known), 0.0, 1.0, math.exp, math.erfc
        for _ in range(6):
            pull, information = (total - count * share * mean) / noise, float(count)
            middle = share * mean
            for score in above:
                t = (score - middle) / noise
                if t > -6:
                    # `hazard`, written out: a step has a thousand samples, and several looks a minute
                    h = t + 1 / t if t > 8 else _DENSITY * exp(-0.5 * t * t) / (0.5 * erfc(t / _ROOT2))
                    pull += h
                    information += h * (h - t)
            precision = 1 + slope * slope * information
            step = max(-1.5, min(1.5, (slope * pull - mean) / precision))
            mean += step
            if abs(step) < 3e-3:
                break
        return Belief(mean, 1 / math.sqrt(precision))

    def at(self, belief: Belief, have: int, share: float, group_share: float | None = None) -> float:
        """The final length of a sample that has `have` tokens and goes on: the quantile `share` of what is above `have`.

        `group_share` fixes the group's g at that quantile of its posterior, so that siblings can be drawn together; without it g is
        integrated out.
        """
        root = math.sqrt(self.correlation)
        mean, variance = root * belief.mean, 1 - self.correlation
        if group_share is None:
            variance += self.correlation * belief.sd * belief.sd
        else:
            mean += root * belief.sd * _quantile(group_share)
        sd = math.sqrt(max(variance, 1e-6))
        left = upper_tail((self.score(have) - mean) / sd) if have > self.edges[0] else 1.0
        tail = left * (1 - share)
        score = mean - sd * _quantile(min(ALMOST, max(tail, LEAST)))
        return min(float(self.cap), max(self.length(score), have + 1.0))

    def expected(self, belief: Belief, have: int) -> float:
        """E[length | length > have, group], the mean of three quantiles that share the distribution evenly."""
        mean, sd = (
            math.sqrt(self.correlation) * belief.mean,
            math.sqrt(1 - self.correlation * (1 - belief.sd * belief.sd)),
        )
        sd = max(sd, 1e-3)
        left = upper_tail((self.score(have) - mean) / sd) if have > self.edges[0] else 1.0
        total, least, scores, logs = 0.0, have + 1.0, self.scores, self.logs
        for share in SIXTHS:  # `length`, written out: it is asked three times for each sample of a step
            score = mean - sd * _quantile(min(ALMOST, max(left * share, LEAST)))
            at = bisect_left(scores, score)
            if at == 0:
                length = self.edges[0]
            elif at == len(scores):
                length = float(self.cap)
            else:
                low = scores[at - 1]
                start = logs[at - 1]
                length = math.exp(start + (score - low) / (scores[at] - low) * (logs[at] - start))
            total += length if length > least else least
        return min(float(self.cap), total / 3)


def _in_order(values: Sequence[float]) -> float:
    """Their sum, rounded at each one, as `lengths_of_step` adds up many groups: Python's own sum rounds once since 3.12."""
    total = 0.0
    for value in values:
        total += value
    return total


class LengthForecast:
    """Learns from finished samples; `table` is the distribution that they and the running ones imply."""

    def __init__(self, cap: int) -> None:
        if cap < 1:
            raise ValueError(f"a cap of {cap} tokens")
        self.cap = cap
        highest = cap - 0.5  # whatever is longer is the cap itself
        lowest = min(max(0.5, cap / 2.0**OCTAVES), highest / 2)
        count = math.ceil(math.log2(highest / lowest) * BINS_PER_OCTAVE)
        self.edges = (*(lowest * (highest / lowest) ** (j / count) for j in range(count)), highest)
        self.logs = tuple(math.log(edge) for edge in self.edges)
        self._prior = self._prior_weights()
        self._past = [0.0] * (len(self.edges) + 1)
        self._now = [0.0] * (len(self.edges) + 1)
        self._pair_sum, self._pairs = PRIOR_CORRELATION * PRIOR_PAIRS, PRIOR_PAIRS
        self.seen = 0

    def widened(self, cap: int) -> LengthForecast:
        """The same for a larger cap. What ended at the old one counts as that long; within a bin all counts at its middle, by logs."""
        wide = LengthForecast(cap)
        logs = self.logs
        middles = [
            self.edges[0],
            *(math.exp((low + high) / 2) for low, high in pairwise(logs)),
            float(self.cap),
        ]
        for middle, past, now in zip(middles, self._past, self._now, strict=True):
            at = bisect_left(wide.edges, middle)
            wide._past[at] += past
            wide._now[at] += now
        wide._pair_sum, wide._pairs, wide.seen = self._pair_sum, self._pairs, self.seen
        return wide

    def finished(self, length: int) -> None:
        """One sample of the present step ended at `length` tokens."""
        self._now[bisect_left(self.edges, length)] += 1.0
        self.seen += 1

    def step_ended(self, groups: Iterable[Sequence[int]]) -> None:
        """A step is over; `groups`: the lengths of each of its whole groups. Learns how alike siblings are, and lets older steps fade."""
        self._learn_correlation([tuple(group) for group in groups if len(group) > 1])
        count = sum(self._now)
        keep = min(0.95, max(0.5, 1 - count / MEMORY)) if count else 1.0
        self._past = [keep * old + new for old, new in zip(self._past, self._now, strict=True)]
        self._now = [0.0] * len(self._now)

    @property
    def correlation(self) -> float:
        """Of siblings' scores. Below 1, so that the noise of one sample never vanishes."""
        return min(0.97, max(0.0, self._pair_sum / self._pairs))

    def table(self, running: Iterable[int] = ()) -> LengthTable:
        """The distribution, given the present lengths of all running samples (they are longer than that).

        A sample that stands inside a bin counts half in it (the actuarial estimate).
        """
        passed = [0] * (len(self.edges) + 1)
        for length in running:
            passed[bisect_left(self.edges, length)] += 1
        return self.table_of(passed)

    def table_of(self, passed: Sequence[int]) -> LengthTable:
        """The same, where that many running samples stand in each bin."""
        done = [self._prior[j] + self._past[j] + self._now[j] for j in range(len(self._prior))]
        at_risk = sum(done) + sum(passed)
        left, scores = 1.0, []
        for j in range(len(self.edges)):
            risk = at_risk - passed[j] / 2
            left *= 1 - done[j] / risk
            at_risk -= done[j] + passed[j]
            scores.append(-quantile(min(1 - _EDGE, max(_EDGE, left)), 0.0, 1.0))
        for j in range(1, len(scores)):  # strictly growing, so that it can be inverted
            scores[j] = max(scores[j], scores[j - 1] + 1e-9)
        return LengthTable(self.cap, self.edges, self.logs, tuple(scores), self.correlation)

    def _prior_weights(self) -> list[float]:
        middle = math.log(self.cap * PRIOR_MEDIAN_SHARE)
        below = [1 - upper_tail((log - middle) / PRIOR_SIGMA) for log in self.logs]
        shares = [below[0], *(high - low for low, high in pairwise(below)), 1 - below[-1]]
        return [PRIOR_ANSWERS * share for share in shares]

    def _learn_correlation(self, groups: Sequence[Sequence[int]]) -> None:
        """Mean product of siblings' scores, standardised within the step so that a drift is not taken for likeness."""
        if not groups:
            return
        table = self.table()
        above = hazard(table.scores[-1])  # E[z | z above the cap's score]
        scores = [
            [table.score(length) if length < self.cap else above for length in group] for group in groups
        ]
        flat = [z for group in scores for z in group]
        mean = sum(flat) / len(flat)
        variance = sum((z - mean) ** 2 for z in flat) / len(flat)
        if variance < 1e-6 or len(groups) < 2:
            return
        total, pairs = 0.0, 0.0
        for group in scores:
            centred = [z - mean for z in group]
            total += (sum(centred) ** 2 - sum(z * z for z in centred)) / 2 / variance
            pairs += len(group) * (len(group) - 1) / 2
        keep = min(0.95, max(0.5, 1 - len(flat) / MEMORY))
        self._pair_sum = keep * self._pair_sum + total
        self._pairs = keep * self._pairs + pairs


@functools.lru_cache(maxsize=4096)
def corput(index: int, base: int = 2) -> float:
    """The `index`-th point (from 1) of the van der Corput sequence: shares that fill (0, 1) evenly, the same at each call."""
    share, unit = 0.0, 1.0
    while index:
        index, digit = divmod(index, base)
        unit /= base
        share += digit * unit
    return share


def scatter(key: int, index: int) -> float:
    """A share in (0, 1) for sample `index` of group `key`: always the same one, and siblings' are as if independent (splitmix64)."""
    mixed = (key * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((mixed ^ (mixed >> 31)) + 0.5) / (_MASK + 1)


@functools.lru_cache(maxsize=4096)
def scattered(key: int, count: int) -> tuple[float, ...]:
    """`scatter` of the first `count` samples of a group: asked for again at each look at a step."""
    return tuple(scatter(key, index) for index in range(count))


def impute(
    table: LengthTable, groups: Mapping[int, GroupLengths], beliefs: Mapping[int, Belief] | None = None
) -> dict[int, tuple[float, ...]]:
    """One plausible final length of each running sample of each group, in the order of `GroupLengths.running`.

    Groups' means fill their distribution evenly; siblings' deviations are scattered (spread evenly inside a group, the longest of each
    would be too long). So the set has the spread, the likeness of siblings and about the maximum that the distribution expects, and equal
    facts give equal lengths. `beliefs`: of all groups, where they are known already.
    """
    imputed = {}
    for key in sorted(groups):
        group = groups[key]
        if group.running:
            belief = beliefs[key] if beliefs else table.belief(group)
            shares = scattered(key, len(group.running))
            where = corput(key + 1)
            imputed[key] = tuple(
                table.at(belief, have, share, where)
                for have, share in zip(group.running, shares, strict=True)
            )
    return imputed
