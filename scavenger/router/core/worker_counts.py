"""How many engines a run has, and in which state: for the messages to its trainer, and to know when its policy must be asked. Pure.

The counts are kept and corrected as workers change, because every event needs them and a fleet may have a thousand workers.
"""

from __future__ import annotations

from scavenger.protocol.messages import MAX_SLOTS, Fleet, reserved_name, words
from scavenger.router.core.state import ActiveRun, ReservedMemory, Worker
from scavenger.router.core.transitions import LEAVING, GpuMemoryState, WorkerStatus


def fleet_sizes(run: ActiveRun) -> tuple[int, int, int]:
    """Harvested workers that can generate, reserved ones awake, reserved ones asleep or going to sleep.

    A harvested worker that still loads does not count: under churn, engines that are taken again before they generate would keep
    reserved ones asleep for nothing. Nor does one beside a service, however many samples it may hold now: it stops within a second.
    """
    sizes = [0, 0, 0]
    for worker in run.workers.values():
        role = _role(worker)
        if role >= 0:
            sizes[role] += 1
    return sizes[0], sizes[1], sizes[2]


def counted(run: ActiveRun) -> tuple[int, int, int]:
    """The sizes, counted from scratch."""
    run.due.changed_workers.clear()
    for worker in run.workers.values():
        worker.counted_as = _role(worker)
    return fleet_sizes(run)


def counted_again(run: ActiveRun) -> tuple[int, int, int]:
    """The sizes as counted last, corrected for the workers that changed since then: a fleet loads its weights one by one."""
    sizes = list(run.cached.sizes)
    for worker in run.due.changed_workers:
        before, worker.counted_as = worker.counted_as, _role(worker)
        if before >= 0:
            sizes[before] -= 1
        if worker.counted_as >= 0:
            sizes[worker.counted_as] += 1
    run.due.changed_workers.clear()
    return sizes[0], sizes[1], sizes[2]


def memory_of(run: ActiveRun) -> ReservedMemory:
    """Which reserved engines acknowledged that their memory is free, and all others: one that is silent or leaving counts as holding it."""
    reserved = [worker for worker in run.workers.values() if worker.kind == "reserved"]
    asleep = [worker for worker in reserved if worker.memory.state is GpuMemoryState.ASLEEP]
    holding = {
        name_of(worker) for worker in reserved if worker.memory.state is not GpuMemoryState.ASLEEP
    } | run.reserved.unaccounted.keys()
    names = sorted(name_of(worker) for worker in asleep)
    held = sum(worker.memory.bytes_held for worker in asleep)
    return ReservedMemory(
        run.reserved.order, tuple(names[:MAX_SLOTS]), tuple(sorted(holding)[:MAX_SLOTS]), min(held, 2**53)
    )


def name_of(worker: Worker) -> str:
    """The name that the trainer has for a reserved worker. One without a slot, which no engine of a job is, gets its number here."""
    return reserved_name(worker.slot, worker.process.session) if worker.slot else f"worker {worker.id}"


def memory_counted(run: ActiveRun) -> ReservedMemory:
    """`memory_of`, computed again only after a worker came, went or changed."""
    if run.reserved.memory_changed:
        run.reserved.counted_memory, run.reserved.memory_changed = memory_of(run), False
    return run.reserved.counted_memory


def pauses(run: ActiveRun) -> list[float]:
    """Seconds without a token at each engine's last change of version, shortest first; engines without one are not counted."""
    return sorted(worker.weights.pause_s for worker in run.workers.values() if worker.weights.pause_s > 0)


def _role(worker: Worker) -> int:
    status = worker.status
    if worker.conn is None or worker.suspect or status in LEAVING:
        return -1
    if worker.kind == "harvested":
        return 0 if status is WorkerStatus.READY and not worker.bounded else -1
    return 1 if status is WorkerStatus.READY or status is WorkerStatus.LOADING else 2


def fleet_of(run: ActiveRun) -> Fleet:
    """The run's workers as its trainer sees them."""
    open_samples = sum([g.unfinished for g in run.by_key.values() if not g.orphaned])
    held = sum([len(w.leases) for w in run.workers.values() if w.kind == "reserved" and _role(w) >= 0])
    sizes = fleet_sizes(run) if run.due.changed_workers else run.cached.sizes
    memory = memory_counted(run)
    return Fleet(
        *sizes,
        open_samples,
        held,
        run.decisions.window,
        words(run.decisions.window_reason),
        memory.order,
        memory.asleep,
        memory.holding,
        memory.bytes_held,
        run.speculated.drafted,
        run.speculated.accepted,
        run.speculated.verifications,
        run.decisions.keep_open,
    )
