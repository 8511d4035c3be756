"""PolyRL, as its code does it: groups as requests.

- A group is one request: it is served by one instance and handed over when all its completions are there; when it moves, it is cut to its
  shortest completion (`SimulatedPolicy.whole_groups`).
- Groups are handed out round-robin over the instances whose queue is empty, 4 a second over all instances. An engine here runs whatever it
  holds, so its queue is empty while a whole group fits its batch.
- The window is slept to its end, whatever has come meanwhile (`SimulatedPolicy.sleeps`), and remembered by the number of instances as an
  exponential average, .8 old and .2 new. Its correction is RLBoost's, of which it is the implementation.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.baselines.seeding import Seeding
from scavenger.policy.interface import (
    Fact,
    RunView,
    SampleMove,
    SamplePlacement,
    StepSubmitted,
    WindowDecision,
)
from scavenger.simulate.policies import SimulatedPolicy

GROUPS_PER_S = 4.0
#: Credit for one group, but for what a few microseconds of an event's own time are worth.
A_TURN = 1 - 1e-5


class PolyRL:
    """See the module."""

    every_s = 1e9

    def __init__(self) -> None:
        self._seeding = Seeding(1 / 3, 5.0, 30.0, ema=0.8)
        self._turn = 0
        self._credit, self._credit_at = 1.0, 0.0
        self._served = False  # somebody did, when it was last this one's turn
        self._due = True  # a group may wait for its turn, and not for an instance
        self._queue: list[
            list[int]
        ] = []  # groups as they wait, for as long as nobody comes and only those go that are placed
        self._queue_of: tuple[object, int] | None = None  # `came`, and how many wait then

    def observe(self, fact: Fact, now: float) -> None:
        self._seeding.observe(fact, now)
        self._due = True
        if isinstance(fact, StepSubmitted):
            self._credit, self._credit_at = 1.0, now

    def place(self, view: RunView, now: float) -> Sequence[SamplePlacement]:
        slots = sorted(view.slots(), key=lambda slot: slot.worker_id)
        free = {slot.worker_id: slot.max_batch - slot.leases for slot in slots}
        # What was saved up while nobody served is not spent at once: a sleeping dispatcher wakes 4 times a second.
        saved = self._credit + (now - self._credit_at) * GROUPS_PER_S
        self._credit = min(saved, 32.0) if slots and self._served else 1.0
        self._credit_at, self._served = now, bool(slots)
        self._due = True
        found: list[SamplePlacement] = []
        placed = 0
        if self._credit < A_TURN:  # not its turn yet: who waits is not looked at
            return found
        came = view.came
        if self._queue_of != (came, view.waits):
            self._queue = _groups(view)
        for members in self._queue:
            ready = [slot.worker_id for slot in slots if free[slot.worker_id] >= len(members)]
            self._due = bool(ready)
            if not ready or self._credit < A_TURN:
                break
            target = next((worker_id for worker_id in ready if worker_id > self._turn), ready[0])
            self._turn, free[target] = target, free[target] - len(members)
            self._credit -= 1
            placed += 1
            found += [SamplePlacement(sample_id, target) for sample_id in members]
        del self._queue[:placed]
        self._queue_of = came, view.waits - len(found)
        return found

    def rebalance(self, view: RunView, now: float) -> Sequence[SampleMove]:
        return ()

    def window(self, view: RunView, now: float) -> WindowDecision | None:
        decision = self._seeding.window(view, now)
        if view.waits and self._due:  # the dispatcher's next turn
            return WindowDecision(
                decision.close, decision.reason, min(decision.again_at, now + 1 / GROUPS_PER_S)
            )
        return decision

    def engines(self, view: RunView, now: float) -> tuple[int, str]:
        return self._seeding.cap(sum(w.kind == "reserved" for w in view.workers), view.max_engines)


def _groups(view: RunView) -> list[list[int]]:
    """Queued samples by group, in the queue's order."""
    found: dict[int, list[int]] = {}
    for sample in view.queued:
        found.setdefault(sample.group_id, []).append(sample.id)
    return list(found.values())


POLYRL = SimulatedPolicy("polyrl", PolyRL, whole_groups=True, sleeps=True)
