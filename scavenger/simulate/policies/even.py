"""Even shares: each engine that is there, or about to be, gets as many samples as the others; no engine takes what others wait for."""

from __future__ import annotations

from collections.abc import Sequence

from scavenger.policy import placement
from scavenger.policy.interface import (
    Fact,
    Placement,
    RunView,
    SampleFinished,
    Standard,
    StepSubmitted,
    WindowMoved,
    WorkerJoined,
    WorkerLost,
    WorkerReady,
)
from scavenger.policy.placement import Slots

#: Engines that generate, or will as soon as their weights are there.
COMING = ("loading", "ready")


def even_share(view: RunView) -> int:
    """`EvenShare` from one view: for who asks seldom."""
    coming = [worker.warm for worker in view.workers if worker.status in COMING]
    return -(-(view.step.samples - view.step.finished) // max(1, sum(coming) or len(coming)))


class EvenShare:
    """Unfinished samples an engine: over those that generate or load the next weights; over cold ones too while there are no others.

    Counted from facts alone, so that asking costs nothing.
    """

    def __init__(self) -> None:
        self._left = 0
        self._cold: set[int] = set()
        self._warm: dict[str, set[int]] = {"reserved": set(), "harvested": set()}
        self._awake = True

    def observe(self, fact: Fact) -> None:
        match fact:
            case SampleFinished():
                self._left -= 1
            case StepSubmitted(samples=samples):
                self._left = samples
            case WindowMoved(awake=awake):
                self._awake = awake
            case WorkerJoined(worker_id=worker_id):
                self._cold.add(worker_id)
            case WorkerReady(worker_id=worker_id, kind=kind):
                self._cold.discard(worker_id)
                self._warm[kind].add(worker_id)
            case WorkerLost(worker_id=worker_id, kind=kind):
                self._cold.discard(worker_id)
                self._warm[kind].discard(worker_id)

    @property
    def each(self) -> int:
        warm = len(self._warm["harvested"]) + self._awake * len(self._warm["reserved"])
        return -(-max(1, self._left) // max(1, warm or len(self._cold)))


class Even(Standard):
    """Places by `placement.place`, but no engine gets more than its share of the step's unfinished samples."""

    def __init__(self) -> None:
        self._share = EvenShare()

    def place(self, view: RunView, now: float) -> Sequence[Placement]:
        share = self._share.each
        slots = [
            Slots(one.worker_id, one.leases, min(one.max_batch, share), one.node) for one in view.slots()
        ]
        return [
            Placement(sample_id, worker_id) for sample_id, worker_id in placement.place(view.waiting(), slots)
        ]

    def observe(self, fact: Fact, now: float) -> None:
        self._share.observe(fact)
