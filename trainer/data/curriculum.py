"""Which prompts a step takes, by the pass rates that earlier steps measured. Pure; the same in every attempt of a run.

The order of prompts stays the data's. A step takes the next positions of the stream and passes over those whose row was measured to be
too easy or too hard, for some epochs; then the row is measured anew, so that nothing is left out for good. Position p is the same prompt
whatever was measured.

A step that is asked for k steps in advance knows only what was committed by then. So step t always goes by what steps up to t - 1 - k
measured, also after a restart, where all of it is known from the ledger.

Boundary: positions, rows and rates; no prompts, and no ledger.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Visit(NamedTuple):
    """Which row a position of the stream is, and for which time: `epoch` 0 is the first."""

    row: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """A prompt with a pass rate below `least` or above `most` (shares) is passed over for `rest` epochs. None: no bound."""

    least: float | None
    most: float | None
    rest: int

    def judge(self, rate: float, epochs: int) -> str:
        """ "easy" or "hard": it is passed over, `epochs` epochs after this rate was measured; "": it is taken."""
        if epochs > self.rest:
            return ""
        if self.least is not None and rate < self.least:
            return "hard"
        return "easy" if self.most is not None and rate > self.most else ""


@dataclass(frozen=True, slots=True)
class Measured:
    """`rate`: share of a group's scored completions that passed, as `step` trained it."""

    step: int
    epoch: int
    rate: float


class PassRates:
    """What was measured of each row. Rows whose group had no usable reward were not measured."""

    def __init__(self) -> None:
        self._of: defaultdict[str, list[Measured]] = defaultdict(list)

    def note(self, visit: Visit, step: int, passed: int, scored: int) -> None:
        if scored:
            self._of[visit.row].append(Measured(step, visit.epoch, passed / scored))

    def last(self, row: str, until_step: int) -> Measured | None:
        """By the latest of the steps up to `until_step`; of one step, in the latest epoch. None: never."""
        known = [one for one in self._of.get(row, ()) if one.step <= until_step]
        return max(known, key=lambda one: (one.step, one.epoch), default=None)


@dataclass(frozen=True, slots=True)
class Choice:
    """`taken`: positions, in order. `cursor`: where the data goes on. `easy`, `hard`: how many were passed over for it."""

    taken: tuple[int, ...]
    cursor: int
    easy: int = 0
    hard: int = 0


def choose(
    cursor: int,
    count: int,
    until_step: int,
    visit: Callable[[int], Visit],
    rates: PassRates,
    bounds: Bounds | None,
) -> Choice:
    """The next `count` positions from `cursor` on, by what steps up to `until_step` measured. It ends: no row is passed over for more than
    `bounds.rest` epochs."""
    if bounds is None:
        return Choice(tuple(range(cursor, cursor + count)), cursor + count)
    taken: list[int] = []
    passed = {"easy": 0, "hard": 0}
    while len(taken) < count:
        at = visit(cursor)
        known = rates.last(at.row, until_step)
        why = bounds.judge(known.rate, at.epoch - known.epoch) if known is not None else ""
        if why:
            passed[why] += 1
        else:
            taken.append(cursor)
        cursor += 1
    return Choice(tuple(taken), cursor, passed["easy"], passed["hard"])


def passed(rewards: Iterable[float], solved_at: float) -> int:
    """How many of a group's rewards pass."""
    return sum(reward >= solved_at for reward in rewards)
