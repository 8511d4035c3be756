"""Who generates at the same time, counted in tokens instead of seconds. Pure.

All samples under way gain tokens at one common pace (`forecast.step`), so that one counter V of tokens serves them all: a sample that
begins at V = s with r tokens to come ends at s + r. With capacity for `slots` samples the first ones begin at once, each other one when the
first place comes free: list scheduling, whatever the pace. What the pace depends on, how many are under way and with how much context, is
then known as a function of V, here in buckets.

Fewer places than samples make the first groups whole sooner, at the price of throughput: the trainer wants the one, the step's end the
other. Knows no seconds, engines or clock.

A window is found by looking at some twenty, for each of many moments: what is summed is numpy's, in columns. Its running sums add one after
the other, as a loop does, so that equal facts give equal decisions to the last bit.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

#: Samples that end together in the model: a share of those that have not ended, so that the last ones are told apart.
BUCKET_SHARE = 1 / 10
#: Tokens: what float sums may differ by is no bucket of its own.
LEAST_WIDTH = 1e-3


class Outstanding(NamedTuple):
    """A sample under way or waiting: tokens of context now, tokens to come (expected or imputed), and its group."""

    have: float
    rest: float
    group: int


class Samples(msgspec.Struct, frozen=True, gc=False, eq=False):
    """`Outstanding` in columns, in the order in which they go. `group`: places in `groups`, which are sorted."""

    have: Floats
    rest: Floats
    group: Indices
    groups: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.have)

    def by_group(self, tokens: Mapping[int, float]) -> Floats:
        """A column of the groups' tokens; 0 where there are none."""
        return np.array([tokens.get(group, 0.0) for group in self.groups], np.float64)


class Spans(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Samples from V = `start` to `end`, with the context that each begins with; `group` as in `Samples`, of which there are `groups`."""

    start: Floats
    end: Floats
    have: Floats
    group: Indices
    groups: int

    def __len__(self) -> int:
        return len(self.have)

    def at(self, which: Indices | NDArray[np.bool_]) -> Spans:
        return Spans(self.start[which], self.end[which], self.have[which], self.group[which], self.groups)


class Profile(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Buckets end at V = `ends[j]` and are `width[j]` wide; meanwhile `count[j]` samples run, with `mean[j]` tokens of context each.

    `whole`: (V, tokens) of each group when it becomes whole, growing. `weight`: samples, and groups, that each one here stands for.
    """

    spans: Spans
    ends: Sequence[float]
    width: Sequence[float]
    count: Sequence[float]
    mean: Sequence[float]
    whole: Sequence[tuple[float, float]]


def columns(samples: Sequence[Outstanding] | Samples) -> Samples:
    if isinstance(samples, Samples):
        return samples
    have, rest, group = zip(*samples, strict=True) if samples else ((), (), ())
    groups, place = np.unique(np.array(group, np.int64), return_inverse=True)
    return Samples(np.array(have, np.float64), np.array(rest, np.float64), place, tuple(groups.tolist()))


def thinned(samples: Samples, most: int) -> tuple[Samples, float]:
    """Every k-th group by size, so that about `most` samples are left, in their order; and how many each stands for.

    By size: the set keeps its spread. (Every k-th that comes may be all alike, imputed lengths are spread evenly over ids.)
    """
    every = len(samples) // most
    if every < 2 or len(samples.groups) < 8 * every:
        return samples, 1.0
    rests = np.bincount(samples.group, samples.rest, len(samples.groups))
    kept = np.zeros(len(rests), np.bool_)
    kept[rests.argsort(kind="stable")[every // 2 :: every]] = True
    left = kept[samples.group]
    place = kept.cumsum() - 1
    groups = tuple(group for group, stays in zip(samples.groups, kept.tolist(), strict=True) if stays)
    few = Samples(samples.have[left], samples.rest[left], place[samples.group[left]], groups)
    return few, len(samples) / len(few)


def served(samples: Samples, slots: float) -> Spans:
    """When each sample begins and ends, the first `slots` at once and the others in order as places come free."""
    tokens = np.maximum(1.0, samples.rest)
    start = np.zeros(len(samples))
    capacity = max(1, math.floor(slots)) if slots < math.inf else len(samples)
    if capacity < len(samples):
        each = tokens.tolist()
        places, replace = each[:capacity], heapq.heapreplace
        heapq.heapify(places)
        start[capacity:] = [replace(places, places[0] + more) for more in each[capacity:]]
    return Spans(start, start + tokens, samples.have, samples.group, len(samples.groups))


def profile(spans: Spans, before: Floats, weight: float = 1.0) -> Profile:
    """The buckets of these spans. `before`: tokens of each group's samples that are not among them."""
    if not len(spans):
        return Profile(spans, (), (), (), (), ())
    by_end = spans.at(spans.end.argsort(kind="stable"))
    ends = np.array(_bucket_ends(by_end.end.tolist()))
    if spans.start.any():
        spent, context = _spent(spans.at(spans.start.argsort(kind="stable")), by_end, ends)
    else:
        spent, context = _spent_at_once(spans, by_end, ends)
    width, tokens, mean = _steps(ends), _steps(spent), np.zeros(len(ends))
    np.divide(_steps(context), tokens, out=mean, where=tokens > 0)
    count = weight * tokens / width
    return Profile(
        spans, ends.tolist(), width.tolist(), count.tolist(), mean.tolist(), _whole(by_end, before)
    )


def _steps(sums: Floats) -> Floats:
    """What each adds to the one before."""
    found = sums.copy()
    found[1:] -= sums[:-1]
    return found


def _spent(by_start: Spans, by_end: Spans, ends: Floats) -> tuple[Floats, Floats]:
    """Up to each of `ends`: tokens that were generated, and tokens of context over them.

    What begins before a bucket's end is counted from its start to there, and no more when it ends: sums over what has begun and not ended
    (number n, starts, squares of starts, contexts, contexts times starts), and over what has ended.
    """
    began, ended = by_start.start.searchsorted(ends, "left"), by_end.end.searchsorted(ends, "right")
    order = np.arange(len(by_start))
    # In a bucket all that begins comes before all that ends.
    comes = order + np.concatenate(([0], ended[:-1]))[ends.searchsorted(by_start.start, "right")]
    goes = order + began[ends.searchsorted(by_end.end, "left")]
    sums = np.empty((4, 2 * len(order)))
    for spans, at in ((by_start, comes), (by_end, goes)):
        start, have = spans.start, spans.have
        for row, column in enumerate((start, start * start, have, have * start)):
            sums[row, at] = column if spans is by_start else -column
    s1, s2, h1, hs = sums.cumsum(axis=1)[:, began + ended - 1]
    n, last = (began - ended).astype(np.float64), ended - 1
    each = by_end.end - by_end.start
    done, done_context = each.cumsum()[last], (each * (by_end.have + each / 2)).cumsum()[last]
    spent = done + n * ends - s1
    return spent, done_context + h1 * ends - hs + (n * ends * ends - 2 * ends * s1 + s2) / 2


def _spent_at_once(spans: Spans, by_end: Spans, ends: Floats) -> tuple[Floats, Floats]:
    """`_spent` where all begin at V = 0, as they do without a limit: the same sums, to the last bit, without those that are 0."""
    ended = by_end.end.searchsorted(ends, "right")
    n, last = (len(spans) - ended).astype(np.float64), ended - 1
    contexts = np.concatenate((spans.have, -by_end.have)).cumsum()[len(spans) + last]
    done, done_context = (
        by_end.end.cumsum()[last],
        (by_end.end * (by_end.have + by_end.end / 2)).cumsum()[last],
    )
    return done + n * ends, done_context + contexts * ends + n * ends * ends / 2


def _bucket_ends(ends: Sequence[float]) -> list[float]:
    found: list[float] = []
    for at in _bucket_lasts(len(ends)):
        end = ends[at]
        if found and end - found[-1] < LEAST_WIDTH:
            found[-1] = end
        else:
            found.append(end)
    return found


@functools.lru_cache(4096)
def _bucket_lasts(count: int) -> tuple[int, ...]:
    """Of so many, in the order in which they end, the last one of each bucket."""
    found, todo = [], count
    while todo:
        todo -= max(1, int(todo * BUCKET_SHARE))
        found.append(count - todo - 1)
    return tuple(found)


def _whole(by_end: Spans, before: Floats) -> list[tuple[float, float]]:
    last = np.zeros(by_end.groups)
    last[by_end.group] = by_end.end  # sorted: the last one seen ends the group
    total = _tokens(by_end, before)
    there = np.flatnonzero(last)
    there = there[np.lexsort((total[there], last[there]))]
    return list(zip(last[there].tolist(), total[there].tolist(), strict=True))


def _tokens(spans: Spans, before: Floats) -> Floats:
    """Each group's tokens: those before, and its spans' own with their context."""
    count, groups = len(spans), spans.groups
    group, tokens = np.empty(groups + 3 * count, np.intp), np.empty(groups + 3 * count)
    group[:groups], tokens[:groups] = np.arange(groups), before
    for part, column in enumerate((spans.have, spans.end, -spans.start)):  # sample by sample, as they end
        group[groups + part :: 3], tokens[groups + part :: 3] = spans.group, column
    return np.bincount(group, tokens, groups).astype(np.float64, copy=False)


def rest_of(spans: Spans, at: float, groups: tuple[int, ...]) -> tuple[Samples, Floats]:
    """What is left at V = `at`: what is under way first, then what waits, in order; and each group's tokens that are done by then."""
    ended = spans.end <= at
    begun, waiting = spans.at(~ended & (spans.start < at)), spans.at(~ended & (spans.start >= at))
    left = Samples(
        np.concatenate((begun.have + at - begun.start, waiting.have)),
        np.concatenate((begun.end - at, waiting.end - waiting.start)),
        np.concatenate((begun.group, waiting.group)),
        groups,
    )
    return left, _tokens(spans.at(ended), np.zeros(spans.groups))


def arrivals(
    whole: Sequence[tuple[float, float]], ends: Sequence[float], times: Sequence[float], since: float
) -> list[tuple[float, float]]:
    """(seconds, tokens) of each group, when bucket j ends at `times[j]` and the first begins at `since`. Without those after the last."""
    found = []
    j, last = 0, len(times)
    low, low_s = 0.0, since
    for at, tokens in whole:
        while j < last and ends[j] < at:
            low, low_s = ends[j], times[j]
            j += 1
        if j >= last:
            break
        high_s = times[j]
        share = (at - low) / (ends[j] - low)
        found.append(
            (high_s if high_s == math.inf or share >= 1 else low_s + share * (high_s - low_s), tokens)
        )
    return found
