"""Who generates at the same time, counted in tokens instead of seconds. Pure.

All samples under way gain tokens at one common pace (`forecast_step`), so that one counter V of tokens serves them all: a sample that
begins at V = s with r tokens to come ends at s + r. With room for `slots` samples the first ones begin at once, each other one when the
first place comes free: list scheduling, whatever the pace. What the pace depends on, how many are under way and with how much context, is
then known as a function of V, here in buckets.

Fewer places than samples make the first groups whole sooner, at the price of throughput: the trainer wants the one, the step's end the
other. Knows no seconds, engines or clock.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: Samples that end together in the model: a share of those that have not ended, so that the last ones are told apart.
BUCKET_SHARE = 1 / 10
#: Tokens: what float sums may differ by is no bucket of its own.
LEAST_WIDTH = 1e-3


class Outstanding(NamedTuple):
    """A sample under way or waiting: tokens of context now, tokens to come (expected or imputed), and its group."""

    have: float
    rest: float
    group: int


class Span(NamedTuple):
    """A sample from V = `start` to `end`, with the context that it begins with."""

    start: float
    end: float
    have: float
    group: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Buckets end at V = `ends[j]` and are `width[j]` wide; meanwhile `count[j]` samples run, with `mean[j]` tokens of context each.

    `whole`: (V, tokens) of each group when it becomes whole, growing. `weight`: samples, and groups, that each one here stands for.
    """

    spans: tuple[Span, ...]
    ends: tuple[float, ...]
    width: tuple[float, ...]
    count: tuple[float, ...]
    mean: tuple[float, ...]
    whole: tuple[tuple[float, float], ...]


def thinned(samples: Sequence[Outstanding], most: int) -> tuple[Sequence[Outstanding], float]:
    """Every k-th group by size, so that about `most` samples are left, in their order; and how many each stands for.

    By size: the set keeps its spread. (Every k-th that comes may be all alike, imputed lengths are spread evenly over ids.)
    """
    every = len(samples) // most
    rests: dict[int, float] = {}
    for sample in samples:
        rests[sample.group] = rests.get(sample.group, 0.0) + sample.rest
    if every < 2 or len(rests) < 8 * every:
        return samples, 1.0
    kept = set(sorted(rests, key=lambda group: (rests[group], group))[every // 2 :: every])
    left = [sample for sample in samples if sample.group in kept]
    return left, len(samples) / len(left)


def served(samples: Iterable[Outstanding], slots: float) -> tuple[Span, ...]:
    """When each sample begins and ends, the first `slots` at once and the others in order as places come free."""
    places: list[float] = []
    spans = []
    room = max(1, math.floor(slots)) if slots < math.inf else math.inf
    for have, rest, group in samples:
        tokens = max(1.0, rest)
        if len(places) < room:
            start = 0.0
            heapq.heappush(places, tokens)
        else:
            start = places[0]
            heapq.heapreplace(places, start + tokens)
        spans.append(Span(start, start + tokens, have, group))
    return tuple(spans)


def profile(spans: tuple[Span, ...], before: Mapping[int, float], weight: float = 1.0) -> Profile:
    """The buckets of these spans. `before`: tokens of each group's samples that are not among them."""
    by_end = sorted(spans, key=lambda span: span.end)
    ends = _bucket_ends([span.end for span in by_end])
    starts = sorted(spans, key=lambda span: span.start)
    # Sums over what has begun and not ended: number, starts, squares of starts, contexts, contexts times starts.
    n = s1 = s2 = h1 = hs = 0.0
    done = done_context = 0.0  # sample-tokens, and tokens of context over them, of what has ended
    i = j = 0
    width, count, mean = [], [], []
    at_before = spent_before = context_before = 0.0
    for end in ends:
        while i < len(starts) and starts[i].start < end:
            start, have = starts[i].start, starts[i].have
            n, s1, s2, h1, hs = n + 1, s1 + start, s2 + start * start, h1 + have, hs + have * start
            i += 1
        while j < len(by_end) and by_end[j].end <= end:
            start, stop, have, _ = by_end[j]
            n, s1, s2, h1, hs = n - 1, s1 - start, s2 - start * start, h1 - have, hs - have * start
            done += stop - start
            done_context += (stop - start) * (have + (stop - start) / 2)
            j += 1
        spent = done + n * end - s1
        context = done_context + h1 * end - hs + (n * end * end - 2 * end * s1 + s2) / 2
        span, tokens = end - at_before, spent - spent_before
        width.append(span)
        count.append(weight * tokens / span)
        mean.append((context - context_before) / tokens if tokens > 0 else 0.0)
        at_before, spent_before, context_before = end, spent, context
    return Profile(spans, tuple(ends), tuple(width), tuple(count), tuple(mean), _whole(by_end, before))


def _bucket_ends(ends: Sequence[float]) -> list[float]:
    found: list[float] = []
    todo = len(ends)
    while todo:
        todo -= max(1, int(todo * BUCKET_SHARE))
        end = ends[len(ends) - todo - 1]
        if found and end - found[-1] < LEAST_WIDTH:
            found[-1] = end
        else:
            found.append(end)
    return found


def _whole(by_end: Sequence[Span], before: Mapping[int, float]) -> tuple[tuple[float, float], ...]:
    last: dict[int, float] = {}
    total: dict[int, float] = dict(before)
    for start, end, have, group in by_end:  # sorted: the last one seen ends the group
        last[group] = end
        total[group] = total.get(group, 0.0) + have + end - start
    return tuple(sorted((end, total[group]) for group, end in last.items()))


def rest_of(spans: Iterable[Span], at: float) -> tuple[list[Outstanding], dict[int, float]]:
    """What is left at V = `at`: what is under way first, then what waits, in order; and each group's tokens that are done by then."""
    begun: list[Outstanding] = []
    waiting: list[Outstanding] = []
    done: dict[int, float] = {}
    for start, end, have, group in spans:
        if end <= at:
            done[group] = done.get(group, 0.0) + have + end - start
        elif start < at:
            begun.append(Outstanding(have + at - start, end - at, group))
        else:
            waiting.append(Outstanding(have, end - start, group))
    return begun + waiting, done


def arrivals(
    whole: Iterable[tuple[float, float]], ends: Sequence[float], times: Sequence[float], since: float
) -> list[tuple[float, float]]:
    """(seconds, tokens) of each group, when bucket j ends at `times[j]` and the first begins at `since`. Without those after the last."""
    found = []
    for at, tokens in whole:
        j = bisect_left(ends, at)
        if j >= len(times):
            break
        low, low_s = (ends[j - 1], times[j - 1]) if j else (0.0, since)
        high_s = times[j]
        share = (at - low) / (ends[j] - low)
        found.append((high_s if high_s == math.inf or share >= 1 else low_s + share * (high_s - low_s), tokens))
    return found
