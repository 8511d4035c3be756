"""How long a step takes when every length is known: groups served in turn or together, and trained as they become whole. Pure.

Owns the clairvoyant policy's arithmetic, seconds from the moment asked about. Knows nothing of policies, samples' ids and clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scavenger.simulate.decode import EngineSpec

#: Groups that are served before j's work is done have this share of their engines' load begun.
BEGUN = 0.35


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a decode step: `base + sequence * batch + token * context`, context over the whole batch."""

    base: float
    sequence: float
    token: float

    def step_s(self, batch: float, context: float) -> float:
        return self.base + self.sequence * batch + self.token * context

    def work_s(self, have: float, rest: float) -> float:
        """What a sample with `rest` tokens to come adds to its engine's time, besides `base` a step."""
        return self.sequence * rest + self.token * rest * (have + rest / 2)


def line(spec: EngineSpec) -> Line:
    """The steeper line of the engine's roofline."""
    one, two = spec.curve(1), spec.curve(2)
    more = two.overhead - one.overhead
    base = one.overhead - more
    if one.memory_slope >= one.compute_slope:
        return Line(base + one.memory, more, one.memory_slope)
    return Line(base, more + one.compute, one.compute_slope)


@dataclass(frozen=True, slots=True)
class Job:
    """A group to be finished: engine seconds, seconds that its longest sample takes, seconds to train it."""

    work_s: float
    latency_s: float
    train_s: float


@dataclass(frozen=True, slots=True)
class Supply:
    """Engines over time, in seconds from now: reserved ones until the window closes, harvested ones between `since` and `until`."""

    reserved: int
    since: tuple[float, ...] = ()
    until: tuple[float, ...] = ()

    def _events(self, window_s: float) -> list[tuple[float, int]]:
        fleet = [*((t, 1) for t in self.since), *((t, -1) for t in self.until if t < math.inf), (0.0, self.reserved)]
        return sorted([*fleet, *([(window_s, -self.reserved)] if window_s < math.inf else [])])

    def changes(self, window_s: float) -> list[tuple[float, int]]:
        """(since when, so many engines), in order."""
        engines, found = 0, {}
        for at, change in self._events(window_s):
            engines += change
            found[at] = engines
        return sorted(found.items())

    def times(self, works: Sequence[float], window_s: float) -> list[float]:
        """When each amount of work (growing) is done; infinity when it never is."""
        changes = self._events(window_s)
        found, done, now, engines, index = [], 0.0, 0.0, 0, 0
        for work in works:
            while index < len(changes) and (not engines or done + engines * (changes[index][0] - now) < work):
                at, change = changes[index]
                done, now, engines, index = done + engines * (at - now), at, engines + change, index + 1
            found.append(now + (work - done) / engines if engines else math.inf)
        return found


def in_turn(jobs: Sequence[Job], supply: Supply, held_s: float, window_s: float) -> list[float]:
    """When each group is whole, if they are served one after the other: caches or slots do not hold all of them.

    `held_s`: work of what is served at one time. Half of it is done when the next group gets its place.
    """
    before, works = [], [0.0]
    for job in jobs:
        before.append(max(0.0, works[-1] - held_s / 2))
        works.append(works[-1] + job.work_s)
    done = supply.times([min(work + BEGUN * held_s, works[-1]) for work in works[1:]], window_s)
    begun = supply.times(before, window_s)
    return [max(end, start + job.latency_s) for end, start, job in zip(done, begun, jobs, strict=True)]


def together(samples: Sequence[tuple[float, int]], curve: Line, ends: Sequence[int], supply: Supply, window_s: float) -> list[float]:
    """When samples have generated each of `ends` tokens (growing) if all of them, (context, tokens to come), run at one common pace.

    A step takes `base`, and the samples' reading spread over the engines that there are.
    """
    waiting = sorted(samples, key=lambda one: one[1])
    alive, context, index = len(waiting), sum(have for have, _ in waiting), 0
    found, now, before = [], 0.0, 0
    changes = supply.changes(window_s)
    for end in ends:
        while before < end:
            upto = min(end, waiting[index][1]) if index < len(waiting) else end
            more = upto - before
            work = curve.sequence * alive * more + curve.token * more * (context + alive * (before + upto) / 2)
            now = _pass(now, curve.base * more, work, changes)
            before = upto
            while index < len(waiting) and waiting[index][1] <= before:
                alive, context, index = alive - 1, context - waiting[index][0], index + 1
        found.append(now)
    return found


def _pass(now: float, alone_s: float, shared_s: float, changes: Sequence[tuple[float, int]]) -> float:
    """The time after `alone_s`, and `shared_s` divided by the engines, as these change."""
    left = 1.0
    for index, (at, engines) in enumerate(changes):
        until = changes[index + 1][0] if index + 1 < len(changes) else math.inf
        if until <= now:
            continue
        start = max(now, at)
        takes = (alone_s + shared_s / engines) if engines else math.inf
        if start + takes * left <= until < math.inf or (until == math.inf and engines):
            return start + takes * left
        left -= (until - start) / takes
        now = until
    return math.inf


def step_s(whole: Sequence[float], trains: Sequence[float], ready_train_s: float, window_s: float, sleep_s: float) -> float:
    """When the last group is trained. `whole`: when each is complete; `ready_train_s`: to train those that are already."""
    now = window_s + sleep_s + ready_train_s
    for at, train_s in sorted(zip(whole, trains, strict=True)):
        now = max(now, at) + train_s
    return now
