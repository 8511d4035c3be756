"""The clairvoyant policy's engines with what they hold, and who goes where among them. Pure.

Owns the arithmetic of one engine's load when every length is known, and an order of samples that stays good for a while. Knows nothing of
windows, groups and clocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import msgspec

from scavenger.policy.forecast.speed import SpeedCurve
from scavenger.simulate.decode import SimulatedEngine

#: A sample counts in the cache with what it has, and with this share of its whole length at least: it grows.
STORED = 0.55
#: A move must end the later engine by so many seconds sooner, its prefill paid.
MOVE_GAIN_S = 0.5


class KnownSample(msgspec.Struct, frozen=True, gc=False):
    """A sample with its truth. `have`: tokens of context, prompt included; `rest`: tokens to come."""

    id: int
    have: int
    rest: int


@dataclass(slots=True)
class PlannedEngine:
    """An engine while samples are placed. `share`: see `STORED`; 0 = as many as there are slots. `left_s`: until others take it."""

    worker_id: int
    slots: int
    spec: SimulatedEngine
    curve: SpeedCurve
    share: float = STORED
    left_s: float = math.inf
    longest: int = 0
    work_s: float = 0.0
    stored: float = 0.0
    held: dict[int, KnownSample] = field(default_factory=dict)
    _cache: int = 0

    def __post_init__(self) -> None:
        self._cache = self.spec.kv_capacity

    @property
    def drain_s(self) -> float:
        return self.curve.base * self.longest + self.work_s

    def with_s(self, one: KnownSample, prefill_s: float) -> float:
        """When it would be done with this one too."""
        return (
            self.curve.base * max(self.longest, one.rest)
            + self.work_s
            + self.curve.work_s(one.have, one.rest)
            + prefill_s
        )

    def without_s(self, one: KnownSample, longest: tuple[int, int]) -> float:
        """When it would be done without this one; `longest`: the most tokens to come of two that it holds."""
        left = longest[0] if one.rest < longest[0] else longest[1]
        return self.curve.base * left + self.work_s - self.curve.work_s(one.have, one.rest)

    def two_longest(self) -> tuple[int, int]:
        first = second = 0
        for one in self.held.values():
            if one.rest > first:
                first, second = one.rest, first
            elif one.rest > second:
                second = one.rest
        return first, second

    def fits(self, one: KnownSample) -> bool:
        if len(self.held) >= self.slots:
            return False
        return not self.share or not self.held or self.stored + self._stored(one) <= self._cache

    def _stored(self, one: KnownSample) -> float:
        return max(one.have, self.share * (one.have + one.rest))

    def take(self, one: KnownSample, prefill_s: float = 0.0) -> None:
        self.longest = max(self.longest, one.rest)
        self.work_s += self.curve.work_s(one.have, one.rest) + prefill_s
        self.stored += self._stored(one)
        self.held[one.id] = one

    def fill(self, running: Iterable[KnownSample]) -> None:
        """`take` each of these: an engine has hundreds, and is filled anew at every look at a step."""
        curve, share, held = self.curve, self.share, self.held
        per_sample, per_token = curve.per_sample, curve.per_token
        longest, work_s, stored = self.longest, self.work_s, self.stored
        for one in running:
            have, rest = one.have, one.rest
            if rest > longest:
                longest = rest
            work_s += per_sample * rest + per_token * rest * (have + rest / 2)
            whole = share * (have + rest)
            stored += have if have >= whole else whole
            held[one.id] = one
        self.longest, self.work_s, self.stored = longest, work_s, stored

    def remove(self, sample_id: int) -> None:
        one = self.held.pop(sample_id)
        self.work_s -= self.curve.work_s(one.have, one.rest)
        self.stored -= self._stored(one)
        if one.rest >= self.longest:
            self.longest = max((other.rest for other in self.held.values()), default=0)

    def ended(self, sample_id: int) -> None:
        """A sample is done: what it still counted for is little, and errs on the careful side."""
        if sample_id in self.held:
            self.remove(sample_id)


def best_move(
    late: PlannedEngine, early: PlannedEngine, moved: Set[int]
) -> tuple[float, KnownSample, float] | None:
    """(seconds that the later of two engines is done sooner, the sample that does it, its prefill); None when that is not worth it."""
    longest, best = late.two_longest(), None
    before_s = late.drain_s
    for one in late.held.values():
        least = MOVE_GAIN_S if best is None else best[0]
        left_s = late.without_s(one, longest)
        # What it cannot gain even with no prefill is looked at no further: a prefill's time is the dearest to tell.
        if (
            before_s - left_s < least
            or before_s - early.with_s(one, 0.0) < least
            or one.id in moved
            or not early.fits(one)
        ):
            continue
        prefill_s = early.spec.prefill_s(one.have)
        gain = before_s - max(left_s, early.with_s(one, prefill_s))
        if gain < MOVE_GAIN_S:
            continue
        if best is None or (gain, -one.id) > (best[0], -best[1].id):
            best = (gain, one, prefill_s)
    return best


@dataclass(slots=True)
class Order:
    """Samples in the order in which they go, and the engines as they fill up. Good until the fleet is another, or for a while."""

    samples: list[KnownSample]
    seats: Sequence[PlannedEngine]
    since: float
    reasons: Mapping[int, str]
    _todo: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._todo = {one.id for one in self.samples}

    def knows(self, waiting: Set[int]) -> bool:
        """Whether all that waits was ordered, and nothing has come back since it was placed."""
        return waiting <= self._todo

    def ended(self, worker_id: int, sample_id: int) -> None:
        for planned in self.seats:
            if planned.worker_id == worker_id:
                planned.ended(sample_id)

    def place(self, waits: Callable[[int], bool], free: Mapping[int, int]) -> Iterable[tuple[int, int]]:
        """(sample, worker) in order, until the next one fits nowhere. `waits`: whether a sample does; `free`: places left, by worker."""
        left = dict(free)
        for index, one in enumerate(self.samples):
            if not waits(one.id):
                continue
            planned = self._engine_for(one, left)
            if planned is None:
                del self.samples[:index]
                return
            planned.take(one, planned.spec.prefill_s(one.have))
            self._todo.discard(one.id)
            left[planned.worker_id] -= 1
            yield one.id, planned.worker_id
        self.samples.clear()

    def _engine_for(self, one: KnownSample, left: Mapping[int, int]) -> PlannedEngine | None:
        """The engine that is done first with it, before others take it where one can be."""
        prefill_s: dict[
            int, float
        ] = {}  # by engines' spec, as many are of one kind: its hash would cost more than the sum
        best: tuple[bool, float, int] | None = None
        found = None
        for planned in self.seats:
            if left.get(planned.worker_id, 0) < 1 or not planned.fits(one):
                continue
            kind = id(planned.spec)
            if kind not in prefill_s:
                prefill_s[kind] = planned.spec.prefill_s(one.have)
            done_s = planned.with_s(one, prefill_s[kind])
            rank = (done_s > planned.left_s, done_s, planned.worker_id)
            if best is None or rank < best:
                best, found = rank, planned
        return found
