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

Knows no clock: seconds count from the moment asked about. Chooses nothing: `seed_window.py` does.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from scavenger.policy.forecast.service import (
    Floats,
    Outstanding,
    Profile,
    Samples,
    arrivals,
    columns,
    profile,
    rest_of,
    served,
    thinned,
)
from scavenger.policy.forecast.speed import SpeedCurve

NEVER = math.inf
#: Of more samples than about this, every k-th group stands for k of them.
MODELLED = 256
#: A bound on a sum that is made in another order.
ROUNDING = 1e-9
#: Fewer engines than this (what is left of those that are lost) generate nothing.
FEW = 1e-3


@dataclass(frozen=True, slots=True)
class EnginePool:
    """Engines that are alike. `slots`: samples that one may hold; `cache`: tokens of context that it holds, where that is known."""

    curve: SpeedCurve
    engines: float
    slots: int
    cache: float = math.inf

    def capacity(self, mean: float) -> float:
        """Samples of so much context that run on one at a time."""
        if mean <= 0:
            return self.slots
        fit = self.cache / mean
        if fit < 1.0:
            fit = 1.0
        return self.slots if self.slots <= fit else fit


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
    `limit`: samples that each engine serves at a time; more wait, in the order of `samples`. `closed`: reserved engines train to the
    step's end. Before any of its samples is done they may still be woken: that interrupts nothing.
    """

    reserved: EnginePool
    harvested: EnginePool
    costs: Costs
    samples: Sequence[Outstanding] | Samples
    awake: bool = True
    arrivals: tuple[tuple[float, float], ...] = ()
    loss_per_s: float = 0.0
    ready_groups: int = 0
    ready_tokens: float = 0.0
    group_tokens: Mapping[int, float] | None = None
    busy_s: float = 0.0
    reserved_after_s: float = 0.0
    limit: float = math.inf
    closed: bool = False

    def summary(self) -> str:
        """For a decision's reason."""
        coming = sum(more for _, more in self.arrivals)
        engines = f"{self.reserved.engines:g} reserved and {self.harvested.engines:g} harvested engines, {coming:g} more to come"
        return f"{len(self.samples)} samples left, {engines}, {self.ready_groups} groups ready"

    def inputs(self) -> dict[str, float]:
        """The same with all that it is reckoned with, for a decision's record; an infinite limit is left out."""
        costs, harvested = self.costs, self.harvested.curve
        named = {
            "samples": len(self.samples),
            "reserved": self.reserved.engines,
            "harvested": self.harvested.engines,
            "coming": sum(more for _, more in self.arrivals),
            "lost_per_h": 3600 * self.loss_per_s,
            "ready_groups": self.ready_groups,
            "ready_tokens": self.ready_tokens,
            "busy_s": self.busy_s,
            "limit": self.limit,
            "prefill_s": costs.prefill_s,
            "train_s": costs.train_s,
            "round_s": costs.round_s,
            "sleep_s": costs.sleep_s,
            "wake_s": costs.wake_s,
            "finish_s": costs.finish_s,
            "decode_s": harvested.base,
            "decode_sample_s": harvested.per_sample,
            "decode_token_s": harvested.per_token,
        }
        return {name: float(f"{value:.4g}") for name, value in named.items() if value < NEVER}


class _Fleet:
    """Who generates at a time: reserved engines between two times, harvested ones as they come and are lost."""

    def __init__(self, situation: Situation, reserved_from_s: float, reserved_to_s: float) -> None:
        self._reserved, self._harvested = situation.reserved, situation.harvested
        self._from, self._to = reserved_from_s, reserved_to_s
        self._arrivals = sorted(situation.arrivals)
        self._loss = situation.loss_per_s
        self.changes = sorted(
            {t for t in (reserved_from_s, reserved_to_s, *(t for t, _ in self._arrivals)) if 0 < t < NEVER}
        )

    def harvested(self, t: float) -> float:
        engines = self._harvested.engines * math.exp(-self._loss * t)
        for after, more in self._arrivals:
            if after > t:
                break
            engines += more * math.exp(-self._loss * (t - after))
        return engines

    def alone_after(self, t: float) -> bool:
        """Whether harvested engines, of which none comes, generate alone from `t` on."""
        return not self._arrivals and (t >= self._to or self._from == NEVER)

    def alone(
        self, t: float, part: float, widths: Sequence[float], counts: Sequence[float], means: Sequence[float]
    ) -> list[float]:
        """What `_generate` finds while `alone_after`: `pace` written out, since each window that is looked at ends so."""
        pool, loss, exp = self._harvested, self._loss, math.exp
        curve, slots, cached = pool.curve, pool.slots, pool.cache < NEVER
        base, per_sample, per_token, all_engines = curve.base, curve.per_sample, curve.per_token, pool.engines
        times: list[float] = []
        for width, n, mean in zip(widths, counts, means, strict=True):
            left, part = width * (1 - part), 0.0
            if left > 0:
                engines = all_engines * exp(-loss * t)
                if engines <= FEW:
                    t = NEVER
                else:
                    capacity = engines * (pool.capacity(mean) if cached else slots)
                    running = capacity if capacity < n else n
                    each = running / engines
                    t += left * (
                        (base + (per_sample + per_token * mean) * (each if each > 1.0 else 1.0)) * n / running
                    )
            times.append(t)
        return times

    def pace(self, t: float, n: float, mean: float) -> tuple[float, float]:
        """(seconds in which each of n samples gains a token, share of samples on reserved engines) at time t; (inf, 0) without engines."""
        reserved = self._reserved.engines if self._from <= t < self._to else 0.0
        harvested = (
            self.harvested(t) if self._arrivals else self._harvested.engines * math.exp(-self._loss * t)
        )
        if harvested <= FEW:
            return (NEVER, 0.0) if reserved <= FEW else (_alone(self._reserved, reserved, n, mean), 1.0)
        if reserved <= FEW:
            return _alone(self._harvested, harvested, n, mean), 0.0
        mine, theirs = self._reserved.curve, self._harvested.curve
        capacity = reserved * self._reserved.capacity(mean) + harvested * self._harvested.capacity(mean)
        running = capacity if capacity < n else n
        k, j = mine.per_sample + mine.per_token * mean, theirs.per_sample + theirs.per_token * mean
        if k < 1e-12:
            k = 1e-12
        if j < 1e-12:
            j = 1e-12
        step = (running + reserved * mine.base / k + harvested * theirs.base / j) / (
            reserved / k + harvested / j
        )
        if step <= mine.base:  # even an empty one would be late
            return _alone(self._harvested, harvested, n, mean), 0.0
        if step <= theirs.base:
            return _alone(self._reserved, reserved, n, mean), 1.0
        share = min(1.0, reserved * (step - mine.base) / k / running)
        return max(step, min(mine.base + k, theirs.base + j)) * n / running, share


def _alone(pool: EnginePool, engines: float, n: float, mean: float) -> float:
    """Seconds in which each of n samples gains a token on engines of one kind: at least those of a sample that is alone."""
    curve, capacity = pool.curve, engines * pool.capacity(mean)
    running = capacity if capacity < n else n
    each = running / engines
    return (
        (curve.base + (curve.per_sample + curve.per_token * mean) * (each if each > 1.0 else 1.0))
        * n
        / running
    )


@dataclass(frozen=True, slots=True)
class _Cursor:
    """Where generation stands: time, bucket, and the part of it that is done."""

    t: float = 0.0
    bucket: int = 0
    part: float = 0.0


def _generate(profile: Profile, fleet: _Fleet, start: _Cursor) -> list[float]:
    """Times at which the buckets from `start` on end."""
    t, part = start.t, start.part
    times: list[float] = []
    changes = [c for c in fleet.changes if c > t]
    pace_of, widths, counts, means = fleet.pace, profile.width, profile.count, profile.mean
    for j in range(start.bucket, len(widths)):
        if not changes and fleet.alone_after(t):
            return times + fleet.alone(t, part, widths[j:], counts[j:], means[j:])
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


def _train(
    situation: Situation, groups: Sequence[tuple[float, float]], weight: float, start_s: float
) -> float:
    """When the last round is done, if training starts at `start_s` and groups, (seconds, tokens) in order, stand for `weight` each."""
    costs, j, last = situation.costs, 0, len(groups)
    t, ready, tokens = start_s, float(situation.ready_groups), situation.ready_tokens
    while True:
        while j < last and groups[j][0] <= t:
            ready, tokens = ready + weight, tokens + weight * groups[j][1]
            j += 1
        if ready and (ready >= costs.round_groups or j == last):
            t += costs.round_s + costs.train_s * tokens
            ready, tokens = 0.0, 0.0
        elif j < last:
            t = groups[j][0]
            if t == NEVER:
                return NEVER
        else:
            return t


def _mean_context(samples: Samples) -> float:
    """Tokens that a running sample has on average over all the steps that are to come."""
    to_come = float(samples.rest.sum())
    return float((samples.rest * (samples.have + samples.rest / 2)).sum()) / to_come if to_come > 0 else 0.0


class StepModel:
    """One situation's predictions: the open phase is computed once, when it is asked for; each window costs the rest."""

    def __init__(self, situation: Situation) -> None:
        self.situation = situation
        since = situation.reserved_after_s if situation.awake else situation.busy_s + situation.costs.wake_s
        self._open = _Fleet(situation, since, NEVER)
        self._shut = _Fleet(situation, NEVER, NEVER)
        self._samples, self._weight = thinned(columns(situation.samples), MODELLED)
        self._before = self._samples.by_group(situation.group_tokens or {})
        self._mean = _mean_context(self._samples)
        alone = situation.harvested.engines > FEW or bool(situation.arrivals)
        self._crowded = alone and self._places(0.0, len(self._samples)) < NEVER  # once reserved engines sleep

    @cached_property
    def profile(self) -> Profile:
        return self._profile(self._samples, self._before, self.situation.reserved.engines)

    @cached_property
    def times(self) -> list[float]:
        """When the buckets end in the open phase. Who stays asleep asks for none of it."""
        return _generate(self.profile, self._open, _Cursor())

    @property
    def end_s(self) -> float:
        return self.times[-1] if self.times else 0.0

    def _profile(self, samples: Samples, before: Floats, reserved: float) -> Profile:
        """With the places of `reserved` engines, and of all harvested ones that are there or will be."""
        return profile(served(samples, self._places(reserved, len(samples))), before, self._weight)

    def _places(self, reserved: float, samples: int) -> float:
        """How many of these run at a time on so many reserved engines and all harvested ones; NEVER where that is all of them."""
        situation = self.situation
        harvested = situation.harvested.engines + sum(more for _, more in situation.arrivals if more > 0)
        capacity = reserved * situation.reserved.capacity(
            self._mean
        ) + harvested * situation.harvested.capacity(self._mean)
        places = min(situation.limit * max(1.0, reserved + harvested), max(1.0, capacity)) / self._weight
        return float(math.ceil(places)) if places <= samples - 1 else NEVER

    def asleep_s(self) -> float:
        """The rest of the step when reserved engines train from now on, with no toggle."""
        shut = self._profile(self._samples, self._before, 0.0) if self._crowded else self.profile
        times = _generate(shut, self._shut, _Cursor())
        return self._finish(arrivals(shut.whole, shut.ends, times, 0.0), times, self.situation.busy_s)

    def close_s(self, window_s: float) -> float:
        """The rest of the step when reserved engines generate until `window_s` and then train."""
        whole, ends = self.profile.whole, self.profile.ends
        if window_s >= self.end_s:
            return self._finish(
                arrivals(whole, ends, self.times, 0.0), self.times, self.end_s + self.situation.costs.sleep_s
            )
        train_from_s = max(window_s, self.situation.busy_s) + self.situation.costs.sleep_s
        done = bisect_right(self.times, window_s)
        cursor = self._at(window_s, done)
        t = window_s + self._stall_s(cursor)
        if not self._crowded:
            later = _generate(self.profile, self._shut, _Cursor(t, cursor.bucket, cursor.part))
            times = [*self.times[:done], *later]
            return self._finish(arrivals(whole, ends, times, 0.0), times, train_from_s)
        at = (ends[done - 1] if done else 0.0) + cursor.part * self.profile.width[done]
        rest, tokens = rest_of(self.profile.spans, at, self._samples.groups)
        shut = self._profile(rest, tokens + self._before, 0.0)
        later = _generate(shut, self._shut, _Cursor(t=t))
        until_now = arrivals([one for one in whole if one[0] <= at], ends, self.times, 0.0)
        return self._finish([*until_now, *arrivals(shut.whole, shut.ends, later, t)], later, train_from_s)

    def least_s(self, window_s: float) -> float:
        """What `close_s` is never below: after the window and the toggle, all that is not trained is."""
        costs = self.situation.costs
        return (
            max(min(window_s, self.end_s), self.situation.busy_s)
            + costs.sleep_s
            + self._trains_s
            + costs.finish_s
        ) * (1 - ROUNDING)

    @cached_property
    def _trains_s(self) -> float:
        whole = self.profile.whole
        tokens = self._weight * sum([tokens for _, tokens in whole]) + (
            self.situation.ready_tokens if whole else 0.0
        )
        return self.situation.costs.train_s * tokens

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

    def _finish(
        self, groups: Sequence[tuple[float, float]], times: Sequence[float], train_from_s: float
    ) -> float:
        last = times[-1] if times else 0.0
        return (
            max(last, _train(self.situation, groups, self._weight, train_from_s))
            + self.situation.costs.finish_s
        )
