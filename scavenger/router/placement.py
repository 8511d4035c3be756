"""Which queued sample goes to which worker. Pure.

First form: samples that already have tokens first (their group waits for them), then in the order of step and prompt; each to the
worker with the smallest share of its slots taken, so that the fleet fills evenly and a preemption takes as few samples as it can.
A sample never goes back to a node where an engine failed on it while another node serves: one sick engine, always the emptiest,
would otherwise draw every sample to itself until they count as poisoned.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import NamedTuple

Slot = tuple[float, int, int, int, str]  # share taken, worker id, leases, max_batch, node


class Waiting(NamedTuple):
    """A sample that waits. `avoid`: nodes where engines failed on it."""

    sample_id: int
    avoid: Set[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Slots:
    """A worker that may take leases of the version wanted."""

    worker_id: int
    leases: int
    max_batch: int
    node: str = ""


def priority(accepted: int, step: int, order: int, sample_id: int) -> tuple[bool, int, int, int]:
    """The order in which samples are placed, smallest first."""
    return (accepted == 0, step, order, sample_id)


def place(waiting: Iterable[Waiting], workers: Iterable[Slots]) -> Iterator[tuple[int, int]]:
    """Yield (sample id, worker id) until samples or slots run out; `waiting` comes in the order of `priority`.

    Ties between workers go to the lower id: the order of arrival never decides.
    """
    serving = list(workers)
    nodes = {w.node for w in serving}
    heap: list[Slot] = [(w.leases / w.max_batch, w.worker_id, w.leases, w.max_batch, w.node) for w in serving if w.leases < w.max_batch]
    heapq.heapify(heap)
    for sample in waiting:
        if not heap:
            return
        slot = heapq.heappop(heap) if not sample.avoid or nodes <= sample.avoid else _pop(heap, sample.avoid)
        if slot is None:
            continue
        _, worker_id, leases, max_batch, node = slot
        yield sample.sample_id, worker_id
        if leases + 1 < max_batch:
            heapq.heappush(heap, ((leases + 1) / max_batch, worker_id, leases + 1, max_batch, node))


def _pop(heap: list[Slot], avoid: Set[str]) -> Slot | None:
    """Take the emptiest worker that is not on a node to avoid."""
    skipped: list[Slot] = []
    found = None
    while heap and found is None:
        slot = heapq.heappop(heap)
        if slot[-1] in avoid:
            skipped.append(slot)
        else:
            found = slot
    for slot in skipped:
        heapq.heappush(heap, slot)
    return found
