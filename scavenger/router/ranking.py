"""Who of those that wait is next: an order that was found once and serves for a while. Pure.

    renew    the order of all that wait, found by expected lengths (`placement.order`, `placement.in_turn`)
    admit    who came since, without finding it anew: who was begun goes first (its group has waited most), who is new goes last
    next     who waits yet, in that order

An order costs a look at every sample of the step, and a slot comes free with every sample that ends. Owns the order and who is known to be
in it; knows no engine, no length, and no clock but the time of the last `renew`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Set

from scavenger.router.placement import Ranked, Waiting
from scavenger.router.policy import RunView

_NOWHERE: Set[str] = frozenset()


class Ranking:
    """`at`: when the order was found; -inf: never, or a step began since. `order`: of ids, who waits no more included."""

    def __init__(self) -> None:
        self.at = -math.inf
        self.order: list[int] = []
        self._known: set[int] = set()
        self._avoid: dict[int, Set[str]] = {}  # where a sample must not go: it may have failed there since it was ranked
        self._came: object = None  # `RunView.came` for which all that wait are known to be in the order
        self._first = 0  # those before this one wait no more

    def forget(self) -> None:
        """Another step: the order says nothing of it."""
        self.at = -math.inf

    def renew(self, ranked: Iterable[Ranked], came: object, now: float) -> None:
        """The order of those that wait. `came`: `RunView.came` if these are all, else None."""
        jobs = [one.job for one in ranked]
        self.order = [job.sample_id for job in jobs]
        self._known = set(self.order)
        self._avoid = {job.sample_id: job.avoid for job in jobs if job.avoid}
        self._came, self._first, self.at = came, 0, now

    def has_all(self, view: RunView) -> bool:
        """Whether all that wait are in the order. They were, and nobody came since, in all but a few cases."""
        came = view.came
        if came != self._came:
            waiting = list(view.waiting())
            if not self._known.issuperset(one.sample_id for one in waiting):
                return False
            self._avoid = {one.sample_id: one.avoid for one in waiting if one.avoid}
            self._came, self._first = came, 0  # who was placed may wait again
        return True

    def admit(self, view: RunView) -> int:
        """Put who came since where it goes, and return how many those are."""
        new = [sample for sample in view.queued if sample.id not in self._known]
        begun = [sample.id for sample in new if sample.moves or sample.length]
        fresh = [sample.id for sample in new if not (sample.moves or sample.length)]
        self.order = [*begun, *self.order, *fresh]
        self._known.update(begun, fresh)
        self._came = None
        self.has_all(view)
        return len(new)

    def next(self, view: RunView) -> Iterator[Waiting]:
        """Who waits, first come first. Only for an order that has all that wait."""
        order, first = self.order, self._first
        while first < len(order) and not view.is_waiting(order[first]):
            first += 1
        self._first = first
        rest = (order[at] for at in range(first, len(order)))
        return (Waiting(sample_id, self._avoid.get(sample_id, _NOWHERE)) for sample_id in rest if view.is_waiting(sample_id))
