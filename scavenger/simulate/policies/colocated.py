"""Colocated: all generation on the reserved GPUs, then training, as veRL does. No harvested engines."""

from __future__ import annotations

from collections.abc import Sequence

from scavenger.policy.interface import Placement, RunView, Standard
from scavenger.simulate.policy import SimulatedPolicy


class StaticSplit(Standard):
    """veRL's dispatch: the batch is cut into consecutive parts of whole groups, one an engine; nothing moves.

    Group i of G goes to engine floor(i * N / G) of N.
    """

    def place(self, view: RunView, now: float) -> Sequence[Placement]:
        engines = [worker for worker in view.workers if worker.kind == "reserved"]
        rank = {
            group: index for index, group in enumerate(sorted({sample.group_id for sample in view.samples}))
        }
        free = {worker.id: worker.max_batch - worker.leases for worker in engines if worker.serves}
        found = []
        for sample in view.queued:
            engine = engines[rank[sample.group_id] * len(engines) // len(rank)]
            if free.get(engine.id, 0) > 0:
                free[engine.id] -= 1
                found.append(Placement(sample.id, engine.id))
        return found


COLOCATED = SimulatedPolicy("colocated", StaticSplit, harvest=False, reserved=True)
