"""What is left of a step, predicted: when each sample is done, when the trainer is. Pure.

A fluid model: samples that run gain tokens at one common pace, since placement and rebalancing spread them so that no engine is done
late. With n samples and m tokens of context each, engines of kind i take a share of them at which their steps take the same time s, and
these shares make n:

    sum over kinds of e_i (s - a_i) / k_i = n,   k_i = b_i + c_i m        (a, b, c of the decode line, e_i engines)

So tokens to come, sorted, give the time of every completion in one pass, and the trainer's rounds follow from the completions of whole
groups:

    open    reserved and harvested engines generate, the trainer does not
    closed  harvested engines alone; what reserved ones held is prefilled there; the trainer takes whole groups as they come
    step    the later of the last sample and the trainer's last round, plus the update

Knows no clock: seconds count from the moment asked about. Chooses nothing: `window.py` does.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from scavenger.router.forecast_speed import Curve

NEVER = math.inf
#: Samples that end together in the model: a share of those that still run, so that the last ones are told apart.
BUCKET_SHARE = 1 / 10
#: Fewer engines than this (what is left of those that are lost) generate nothing.
FEW = 1e-3


@dataclass(frozen=True, slots=True)
class Pool:
    """Engines that are alike. `slots`: samples that one may hold."""

    curve: Curve
    engines: float
    slots: int


class Outstanding(msgspec.Struct, frozen=True, gc=False):
    """A sample under way: tokens of context now, tokens to come (expected or imputed), and its group."""

    have: float
    rest: float
    group: int


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. `prefill_s`, `train_s`: a token. `round_s`: a round of micro-steps, which starts with `round_groups` whole groups.

    `sleep_s`, `wake_s`: the toggle to training and back. `finish_s`: update and publication.
    """

    prefill_s: float
    train_s: float
    round_s: float = 0.0
    round_groups: int = 1
    sleep_s: float = 0.0
    wake_s: float = 0.0
    finish_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Situation:
    """A step under way. `arrivals`: (seconds from now, engines) that will join the harvested ones; each of these is lost at `loss_per_s`.

    `ready_groups`, `ready_tokens`: whole groups that wait for training; `group_tokens`: tokens of each unfinished group's finished samples.
    `busy_s`: what is left of the round under way. `reserved_after_s`: until when reserved engines cannot generate (they load).
    """

    reserved: Pool
    harvested: Pool
    costs: Costs
    samples: tuple[Outstanding, ...]
    awake: bool = True
    arrivals: tuple[tuple[float, float], ...] = ()
    loss_per_s: float = 0.0
    ready_groups: int = 0
    ready_tokens: float = 0.0
    group_tokens: Mapping[int, float] | None = None
    busy_s: float = 0.0
    reserved_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Profile:
    """Samples in buckets by tokens to come. Bucket j: `width[j]` tokens each for `count[j]` samples of `mean[j]` tokens of context.

    `groups[j]`, `tokens[j]`: whole groups that the end of bucket j completes, and their tokens.
    """

    width: tuple[float, ...]
    count: tuple[float, ...]
    mean: tuple[float, ...]
    groups: tuple[int, ...]
    tokens: tuple[float, ...]


def _profile(situation: Situation) -> _Profile:
    samples = sorted([(s.rest if s.rest > 1.0 else 1.0, s.have, s.group) for s in situation.samples])
    ends, todo = [], len(samples)
    while todo:
        todo -= max(1, int(todo * BUCKET_SHARE))
        ends.append(len(samples) - todo)
    rests = [samples[end - 1][0] for end in ends]
    have_left = sum([have for _, have, _ in samples])
    width, count, mean = [], [], []
    first, before = 0, 0.0
    for end, rest in zip(ends, rests, strict=True):
        inside = samples[first:end]
        spent = sum([own - before for own, _, _ in inside])  # sample-tokens of those that end here
        lasting = len(samples) - end
        span = rest - before
        n = lasting + (spent / span if span else len(inside))
        width.append(span)
        count.append(n)
        mean.append(have_left / (len(samples) - first) + before + span / 2)
        have_left -= sum([have for _, have, _ in inside])
        first, before = end, rest
    groups, tokens = _completions(situation, samples, rests)
    return _Profile(tuple(width), tuple(count), tuple(mean), groups, tokens)


def _completions(
    situation: Situation, samples: Sequence[tuple[float, float, int]], rests: Sequence[float]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    last: dict[int, float] = {}
    total: dict[int, float] = dict(situation.group_tokens or {})
    for rest, have, group in samples:  # sorted: the last one seen ends the group
        last[group] = rest
        total[group] = total.get(group, 0.0) + have + rest
    groups, tokens = [0] * len(rests), [0.0] * len(rests)
    for group in sorted(last):
        at = bisect_left(rests, last[group])
        groups[at] += 1
        tokens[at] += total[group]
    return tuple(groups), tuple(tokens)


class _Fleet:
    """Who generates at a time: reserved engines between two times, harvested ones as they come and are lost."""

    def __init__(self, situation: Situation, reserved_from_s: float, reserved_to_s: float) -> None:
        self._reserved, self._harvested = situation.reserved, situation.harvested
        self._from, self._to = reserved_from_s, reserved_to_s
        self._arrivals = sorted(situation.arrivals)
        self._loss = situation.loss_per_s
        self.changes = sorted(t for t in (reserved_from_s, reserved_to_s, *(t for t, _ in self._arrivals)) if 0 < t < NEVER)

    def harvested(self, t: float) -> float:
        engines = self._harvested.engines * math.exp(-self._loss * t)
        for after, more in self._arrivals:
            if after > t:
                break
            engines += more * math.exp(-self._loss * (t - after))
        return engines

    def pace(self, t: float, n: float, mean: float) -> tuple[float, float]:
        """(seconds in which each of n samples gains a token, share of the samples on reserved engines) at time t; (inf, 0) with nobody."""
        reserved = self._reserved.engines if self._from <= t < self._to else 0.0
        harvested = self.harvested(t) if self._arrivals else self._harvested.engines * math.exp(-self._loss * t)
        if harvested <= FEW:
            return (NEVER, 0.0) if reserved <= FEW else (_alone(self._reserved, reserved, n, mean), 1.0)
        if reserved <= FEW:
            return _alone(self._harvested, harvested, n, mean), 0.0
        mine, theirs = self._reserved.curve, self._harvested.curve
        running = min(n, reserved * self._reserved.slots + harvested * self._harvested.slots)
        k, j = max(mine.per_sample + mine.per_token * mean, 1e-12), max(theirs.per_sample + theirs.per_token * mean, 1e-12)
        step = (running + reserved * mine.base / k + harvested * theirs.base / j) / (reserved / k + harvested / j)
        if step <= mine.base:  # even an empty one would be late
            return _alone(self._harvested, harvested, n, mean), 0.0
        if step <= theirs.base:
            return _alone(self._reserved, reserved, n, mean), 1.0
        share = min(1.0, reserved * (step - mine.base) / k / running)
        return max(step, min(mine.base + k, theirs.base + j)) * n / running, share


def _alone(pool: Pool, engines: float, n: float, mean: float) -> float:
    """Seconds in which each of n samples gains a token on engines of one kind: at least those of a sample that is alone."""
    curve, room = pool.curve, engines * pool.slots
    running = room if room < n else n
    each = running / engines
    return (curve.base + (curve.per_sample + curve.per_token * mean) * (each if each > 1.0 else 1.0)) * n / running


@dataclass(frozen=True, slots=True)
class _Cursor:
    """Where generation stands: time, bucket, and the part of it that is done."""

    t: float = 0.0
    bucket: int = 0
    part: float = 0.0


def _generate(profile: _Profile, fleet: _Fleet, start: _Cursor) -> list[float]:
    """Times at which the buckets from `start` on end."""
    t, part = start.t, start.part
    times: list[float] = []
    changes = [c for c in fleet.changes if c > t]
    pace_of, widths, counts, means = fleet.pace, profile.width, profile.count, profile.mean
    for j in range(start.bucket, len(widths)):
        left = widths[j] * (1 - part)
        while left > 0:
            pace, _ = pace_of(t, counts[j], means[j])
            needed = left * pace
            if changes and t + needed > changes[0]:
                left -= (changes[0] - t) / pace if pace < NEVER else 0.0
                t = changes.pop(0)
                continue
            t += needed
            left = 0.0
        times.append(t)
        part = 0.0
    return times


def _train(situation: Situation, profile: _Profile, times: Sequence[float], start_s: float) -> float:
    """When the last round is done, if training starts at `start_s` and bucket j's groups come at `times[j]`."""
    costs, j = situation.costs, 0
    t, groups, tokens = start_s, situation.ready_groups, situation.ready_tokens
    while True:
        while j < len(times) and times[j] <= t:
            groups, tokens = groups + profile.groups[j], tokens + profile.tokens[j]
            j += 1
        if groups and (groups >= costs.round_groups or j == len(times)):
            t += costs.round_s + costs.train_s * tokens
            groups, tokens = 0, 0.0
        elif j < len(times):
            t = times[j]
            if t == NEVER:
                return NEVER
        else:
            return t


class StepModel:
    """One situation's predictions: the open phase is computed once, each window costs the rest."""

    def __init__(self, situation: Situation) -> None:
        self.situation = situation
        self.profile = _profile(situation)
        since = situation.reserved_after_s if situation.awake else situation.busy_s + situation.costs.wake_s
        self._open = _Fleet(situation, since, NEVER)
        self._shut = _Fleet(situation, NEVER, NEVER)
        self.times = _generate(self.profile, self._open, _Cursor())
        self.end_s = self.times[-1] if self.times else 0.0

    def asleep_s(self) -> float:
        """The rest of the step when reserved engines train from now on, with no toggle."""
        times = _generate(self.profile, self._shut, _Cursor())
        return self._finish(times, self.situation.busy_s)

    def close_s(self, window_s: float) -> float:
        """The rest of the step when reserved engines generate until `window_s` and then train."""
        if window_s >= self.end_s:
            return self._finish(self.times, self.end_s + self.situation.costs.sleep_s)
        done = bisect_right(self.times, window_s)
        cursor = self._at(window_s, done)
        t = window_s + self._stall_s(cursor)
        later = _generate(self.profile, self._shut, _Cursor(t, cursor.bucket, cursor.part))
        return self._finish([*self.times[:done], *later], max(window_s, self.situation.busy_s) + self.situation.costs.sleep_s)

    def _at(self, t: float, done: int) -> _Cursor:
        before = self.times[done - 1] if done else 0.0
        span = self.times[done] - before
        return _Cursor(t, done, (t - before) / span if 0 < span < NEVER else 0.0)

    def _stall_s(self, cursor: _Cursor) -> float:
        """Harvested engines prefill what reserved ones held, all of its context, before they go on."""
        count, mean = self.profile.count[cursor.bucket], self.profile.mean[cursor.bucket]
        _, share = self._open.pace(cursor.t, count, mean)
        engines = self._shut.harvested(cursor.t)
        return count * share * mean * self.situation.costs.prefill_s / engines if engines > FEW else 0.0

    def _finish(self, times: Sequence[float], train_from_s: float) -> float:
        last = times[-1] if times else 0.0
        return max(last, _train(self.situation, self.profile, times, train_from_s)) + self.situation.costs.finish_s
