"""Which queued sample goes to which worker. Pure.

First form: samples that already have tokens first (their group waits for them), then in the order of step and prompt; each to the
worker with the smallest share of its slots taken, so that the fleet fills evenly and a preemption takes as few samples as it can.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """A sample that waits. `accepted`: tokens it already has."""

    sample_id: int
    accepted: int
    step: int
    order: int


@dataclass(frozen=True, slots=True)
class Slots:
    """A worker that may take leases of the version wanted."""

    worker_id: int
    leases: int
    max_batch: int


def place(waiting: Iterable[Waiting], workers: Iterable[Slots]) -> Iterator[tuple[int, int]]:
    """Yield (sample id, worker id) until samples or slots run out. Ties go to the lower id: the order of arrival never decides."""
    heap = [(w.leases / w.max_batch, w.worker_id, w.leases, w.max_batch) for w in workers if w.leases < w.max_batch]
    heapq.heapify(heap)
    for sample in sorted(waiting, key=lambda s: (s.accepted == 0, s.step, s.order, s.sample_id)):
        if not heap:
            return
        _, worker_id, leases, max_batch = heapq.heappop(heap)
        yield sample.sample_id, worker_id
        if leases + 1 < max_batch:
            heapq.heappush(heap, ((leases + 1) / max_batch, worker_id, leases + 1, max_batch))
