"""How many engines a run has, and in what state: what its trainer is told and its policy is asked by. Pure.

Counted as workers change, not looked up: a fleet of a thousand is asked about with every event.
"""

from __future__ import annotations

from scavenger.router.state import Run, Worker, WorkerStatus
from scavenger.wire import (
    Fleet,
    words,
)


def fleet_sizes(run: Run) -> tuple[int, int, int]:
    """Harvested workers that can generate, reserved ones awake, reserved ones asleep or going to sleep.

    A harvested worker that still loads does not count: under churn, engines that are taken again before they generate would keep
    reserved ones asleep for nothing.
    """
    sizes = [0, 0, 0]
    for worker in run.workers.values():
        role = _role(worker)
        if role >= 0:
            sizes[role] += 1
    return sizes[0], sizes[1], sizes[2]


def counted(run: Run) -> tuple[int, int, int]:
    """The sizes, counted anew."""
    run.restated.clear()
    for worker in run.workers.values():
        worker.role = _role(worker)
    return fleet_sizes(run)


def counted_again(run: Run) -> tuple[int, int, int]:
    """The sizes as counted last, with those workers counted again that are another since: a fleet loads one by one."""
    sizes = list(run.sizes)
    for worker in run.restated:
        before, worker.role = worker.role, _role(worker)
        if before >= 0:
            sizes[before] -= 1
        if worker.role >= 0:
            sizes[worker.role] += 1
    run.restated.clear()
    return sizes[0], sizes[1], sizes[2]


def _role(worker: Worker) -> int:
    status = worker.status
    if worker.conn is None or worker.suspect or status is WorkerStatus.DRAINING:
        return -1
    if worker.kind == "harvested":
        return 0 if status is WorkerStatus.READY else -1
    return 1 if status is WorkerStatus.READY or status is WorkerStatus.LOADING else 2


def fleet_of(run: Run) -> Fleet:
    """The run's workers as its trainer sees them."""
    open_samples = sum([g.unfinished for g in run.by_key.values() if not g.orphaned])
    held = sum([len(w.leases) for w in run.workers.values() if w.kind == "reserved" and _role(w) >= 0])
    sizes = fleet_sizes(run) if run.restated else run.sizes
    return Fleet(*sizes, open_samples, held, run.window, words(run.window_reason))
