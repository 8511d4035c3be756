"""Even shares: each engine that is there, or about to be, gets as many samples as the others; no engine takes what others wait for."""

from __future__ import annotations

from collections.abc import Sequence

from scavenger.router import placement
from scavenger.router.placement import Slots
from scavenger.router.policy import Placement, RunView, Standard

#: Engines that generate, or will as soon as their weights are there.
COMING = ("loading", "ready")


def even_share(view: RunView) -> int:
    """Unfinished samples an engine: over those that generate or load the next weights; over cold ones too while there are no others."""
    coming = [worker.warm for worker in view.workers if worker.status in COMING]
    return -(-(view.step.samples - view.step.finished) // max(1, sum(coming) or len(coming)))


class Even(Standard):
    """Places by `placement.place`, but no engine gets more than its share of the step's unfinished samples."""

    def place(self, view: RunView, now: float) -> Sequence[Placement]:
        share = even_share(view)
        slots = [Slots(one.worker_id, one.leases, min(one.max_batch, share), one.node) for one in view.slots()]
        return [Placement(sample_id, worker_id) for sample_id, worker_id in placement.place(view.waiting(), slots)]
