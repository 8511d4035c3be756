"""How long a GPU that was taken stays ours: Kaplan-Meier curves by node class and hour of the day, learned from lives. Pure.

A life ends when others take the GPU (an event), or is censored when we let it go, or it still runs. With few lives a curve leans on its
parent: (class, hour) on the class, the class on all, all on the stated prior. The estimate is the posterior mean of a beta process
(Hjort, Ann. Statist. 18, 1990, eq. 4.2):

    S(t) = product over events u <= t of (1 - d(u) / (c + Y(u))) * exp(-integral from 0 to t of c / (c + Y(u)) dH0(u))

with d(u) events and Y(u) lives at risk at u, H0 the parent's cumulative hazard and c lives' worth of trust in it. Without a prior
(c = 0) it is Kaplan and Meier's; where no life has got to, it goes on as the parent does. The prior: exponential, .63 losses an hour, the
hazard of an idle GPU on a production Slurm cluster over 72 hours (README of the project's traces).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

HOUR_S = 3600.0
PRIOR_HAZARD_PER_S = 0.63 / HOUR_S
#: Lives that the parent's curve is worth.
TRUST = 8.0
#: Lives that are remembered for each curve, the latest. Running ones are told in pieces of a quarter of an hour: where 165 GPUs idle that
#: makes 660 an hour, and 2,000 were three hours, in which few of them end (`benchmarks/harvest.py`, share .985: 7.5 % of the starts
#: were wasted, 4.2 % with so many).
MEMORY = 20_000
_POINTS = tuple(10.0 * 2 ** (i / 4) for i in range(56))  # 10 s to 38 h


@dataclass(frozen=True, slots=True)
class ObservedLife:
    """Seconds that a GPU was ours, or idle. `lost`: another user's job took it; else censored. `entered_s`: its age when first seen."""

    seconds: float
    lost: bool
    entered_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.entered_s <= self.seconds:
            raise ValueError(f"a life of {self.seconds} s that was first seen at {self.entered_s} s")


@dataclass(frozen=True, slots=True)
class SurvivalCurve:
    """Survival at fixed points, exponential between them; beyond the last the hazard of the last piece goes on."""

    cumulative: tuple[float, ...]  # hazard up to each of `_POINTS`
    lives: int = 0

    def hazard_to(self, seconds: float) -> float:
        """The cumulative hazard: -ln S."""
        if seconds <= 0:
            return 0.0
        at = bisect_left(_POINTS, seconds)
        if at == 0:
            return self.cumulative[0] * seconds / _POINTS[0]
        at = min(at, len(_POINTS) - 1)
        slope = (self.cumulative[at] - self.cumulative[at - 1]) / (_POINTS[at] - _POINTS[at - 1])
        return self.cumulative[at - 1] + slope * (seconds - _POINTS[at - 1])

    def survives(self, seconds: float, age_s: float = 0.0) -> float:
        """P(it lasts `seconds` more | it has lasted `age_s`)."""
        return math.exp(self.hazard_to(age_s) - self.hazard_to(age_s + seconds))

    def expected_s(self, after_s: float = 0.0, age_s: float = 0.0, horizon_s: float = 24 * HOUR_S) -> float:
        """E[(life - after)+] of what has lasted `age_s`: the seconds that are left after a cold start of `after_s`, up to a horizon.

        The integral of S, which is exponential between points: (S_low - S_high) / hazard.
        """
        start, end = age_s + after_s, age_s + max(after_s, horizon_s)
        cuts = [start, *(p for p in _POINTS if start < p < end), end]
        total = 0.0
        base = self.hazard_to(age_s)
        for low, high in pairwise(cuts):
            first, last = math.exp(base - self.hazard_to(low)), math.exp(base - self.hazard_to(high))
            rate = self.hazard_to(high) - self.hazard_to(low)
            total += (high - low) * ((first - last) / rate if rate > 1e-9 else first)
        return total


def prior() -> SurvivalCurve:
    return SurvivalCurve(tuple(PRIOR_HAZARD_PER_S * point for point in _POINTS))


def estimate(lives: Sequence[ObservedLife], parent: SurvivalCurve, trust: float = TRUST) -> SurvivalCurve:
    """The posterior mean curve of these lives, at the fixed points."""
    entries = sorted(life.entered_s for life in lives)
    exits = sorted(life.seconds for life in lives)
    events = sorted(life.seconds for life in lives if life.lost)

    def at_risk(t: float) -> int:
        """Seen before t, and not gone before it."""
        return bisect_left(entries, t) - bisect_left(exits, t) if t > 0 else 0

    cumulative, total, before, first = [], 0.0, 0.0, 0
    for point in _POINTS:
        last = bisect_right(events, point)
        while first < last:
            same = bisect_right(events, events[first])
            died, risk = same - first, max(at_risk(events[first]), same - first)
            share = died / (trust + risk)
            total += -math.log1p(-share) if share < 1 else 50.0
            first = same
        if trust:
            risk = at_risk((before + point) / 2)
            total += trust / (trust + risk) * (parent.hazard_to(point) - parent.hazard_to(before))
        cumulative.append(total)
        before = point
    return SurvivalCurve(tuple(cumulative), len(lives))


@dataclass(slots=True)
class _Cell:
    lives: deque[ObservedLife] = field(default_factory=lambda: deque(maxlen=MEMORY))
    seen: int = 0
    curve: SurvivalCurve | None = None
    made_at: int = -1
    parent_at: int = -1


class Survival:
    """Curves by node class and hour of the day (UTC), and how many lives stand behind each."""

    #: A curve is made again when its lives have grown by this share.
    FRESH = 0.05

    def __init__(self) -> None:
        self._prior = prior()
        self._cells: dict[tuple[str, int] | str, _Cell] = {"": _Cell()}

    def observe(self, node_class: str, ended_at: float, life: ObservedLife) -> None:
        """A life ended, or was last seen, at Unix second `ended_at`; it counts for the hour in which it was first seen."""
        hour = _hour(ended_at - (life.seconds - life.entered_s))
        for key in ("", f"class {node_class}", (node_class, hour)):
            cell = self._cells.setdefault(key, _Cell())
            cell.lives.append(life)
            cell.seen += 1

    def curve(self, node_class: str, now: float) -> SurvivalCurve:
        """What holds for a GPU of this class that is taken at this hour."""
        everything = self._of("", self._prior, 0)
        of_class = self._of(f"class {node_class}", everything, self._cells[""].made_at)
        own = self._cells.get(f"class {node_class}")
        return self._of((node_class, _hour(now)), of_class, own.made_at if own else self._cells[""].made_at)

    def lives(self, node_class: str = "") -> int:
        cell = self._cells.get(f"class {node_class}" if node_class else "")
        return cell.seen if cell else 0

    def _of(self, key: tuple[str, int] | str, parent: SurvivalCurve, parent_at: int) -> SurvivalCurve:
        cell = self._cells.get(key)
        if cell is None:
            return parent
        if (
            cell.curve is None
            or cell.seen > cell.made_at * (1 + self.FRESH)
            or parent_at > cell.parent_at * (1 + self.FRESH)
        ):
            cell.curve, cell.made_at, cell.parent_at = (
                estimate(tuple(cell.lives), parent),
                cell.seen,
                parent_at,
            )
        return cell.curve


def _hour(at: float) -> int:
    return int(at // HOUR_S) % 24


#: Nothing waits longer than so many cold starts, nor for so long that this share of the idle time would pass unused.
MOST_STARTS, MOST_UNUSED = 20.0, 0.5
#: Where no age reaches the share: the least that is at most so much likelier to be wasted than the best one.
NEARLY = 1.5


def settle_s(curve: SurvivalCurve, cold_start_s: float, share: float) -> float:
    """The least age at which an idle GPU outlasts a cold start with this probability: until then it is better left idle.

    A GPU that has been idle for longer lasts longer (most idle slices are gaps between two jobs), so that waiting a little avoids most
    of the starts that would be wasted. Where no age within bounds reaches the share, one that comes near to what waiting can reach: 0
    where waiting changes nothing.
    """
    if curve.survives(cold_start_s) >= share:
        return 0.0
    unused_s = curve.expected_s() * MOST_UNUSED
    ages = [0.0]
    for age in _POINTS:
        unused_s -= curve.expected_s(0.0, ages[-1], age - ages[-1]) * math.exp(-curve.hazard_to(ages[-1]))
        if age > MOST_STARTS * cold_start_s or unused_s < 0:
            break
        ages.append(age)
    wasted = [1 - curve.survives(cold_start_s, age_s=age) for age in ages]
    most = max(1 - share, NEARLY * min(wasted)) + 1e-9
    return next(age for age, lost in zip(ages, wasted, strict=True) if lost <= most)
