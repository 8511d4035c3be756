"""What a worker is told to be, and how far it is: loading, asleep, awake, leaving. Pure.

An order may be lost, so each may be repeated without harm, and is, until what the worker says shows that it was carried out.
"""

from __future__ import annotations

from scavenger.policy.interface import Toggled, WorkerReady
from scavenger.protocol.messages import (
    BaseWeights,
    Drain,
    Heartbeat,
    Serving,
    Sleep,
    UseWeights,
    Wake,
    WeightsFailed,
    WeightsLoaded,
)
from scavenger.router.core import refusals
from scavenger.router.core import samples as sm
from scavenger.router.core.state import Run, Version, Worker
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import Memory, MemoryStep, WorkerStatus, WorkerStep
from scavenger.weights.directory import refused

MAX_LOAD_FAILURES = 5
RETRY_LOAD_S = 1.0
OFFER_S = 0.5  # between two lists of holders that a pulling worker is sent


def repeat(core: Core, worker: Worker, heard: int) -> None:
    """Say again what the worker was asked and has not done: any message may have been lost, and all of these may be repeated.

    `heard`: number of the last order to sleep or wake that reached it.
    """
    if worker.status is WorkerStatus.DRAINING:
        core.send_durable(worker.conn, Drain(worker.drain_reason))
    elif heard != worker.memory_order:
        sleeps = worker.memory in (Memory.FALLING_ASLEEP, Memory.ASLEEP)
        core.send_durable(worker.conn, Sleep(worker.memory_order) if sleeps else Wake(worker.memory_order))


def reconcile(core: Core, worker: Worker, beat: Heartbeat) -> None:
    """Repair what a lost message left behind. What a heartbeat says is newer than all that was heard before it."""
    if beat.loaded_version != worker.loaded_version:
        worker.loaded_version = -1  # until it says, with the root hash, what it loaded
        worker.run.dirty = True
        if worker.status is WorkerStatus.READY:
            worker.step(WorkerStep.LOAD)
    asked_long_ago = core.now - worker.asked_at > 5 * core.limits.heartbeat_s
    if (
        worker.asked_version != worker.loaded_version
        and asked_long_ago
        and worker.status is WorkerStatus.LOADING
    ):
        worker.asked_version = (
            worker.loaded_version
        )  # `steer` asks again; a load under way is not disturbed by that
    if (
        beat.memory_order == worker.memory_order
    ):  # what it says of its memory answers the newest order: its own word may have been lost
        if beat.memory == "asleep" and worker.memory is Memory.FALLING_ASLEEP:
            asleep(core, worker, beat.memory_order, beat.bytes_held)
        elif beat.memory == "awake" and worker.memory is Memory.WAKING:
            awake(core, worker, beat.memory_order, beat.bytes_held)
    repeat(core, worker, beat.memory_order)


def loaded(core: Core, worker: Worker, message: WeightsLoaded, version: int) -> None:
    if refusal := worker.run.unproved(version, message.root, message.merged):
        core.connection_event(
            worker, "weights_refused", f"worker {worker.id}", refusal, version=version, node=worker.node
        )
        drain(core, worker, refusal)
        if message.merged:
            refusals.refused(core, worker, version, refusal)
        return
    worker.run.directory.settled(worker.id)
    refusals.proved(worker.run, version)
    first, worker.loaded_version = worker.loads == 0, version
    worker.cache_tokens, worker.best_batch = message.cache_tokens, message.best_batch
    worker.loads += 1
    worker.load_failures = 0
    worker.run.stirred = worker.run.recount = True  # the others' orders stay as they are
    worker.run.restated.append(worker)
    told = {"pull_s": message.pull_s, "verify_s": message.verify_s, "load_s": message.load_s}
    if worker.loads <= worker.run.next_version:  # each version once
        core.event("weights_loaded", worker.run.id, f"worker {worker.id}", f"version {version}", **told)
    else:
        core.connection_event(worker, "weights_loaded", f"worker {worker.id}", f"version {version}", **told)
    worker.run.policy.observe(
        WorkerReady(
            worker.id,
            worker.kind,
            worker.node,
            worker.gpus,
            version,
            first,
            core.now - worker.joined_at,
            message.pull_s,
            message.load_s,
        ),
        core.now,
    )
    if worker.status is WorkerStatus.LOADING:
        worker.step(WorkerStep.SERVE)
    steer(core, worker)


def serving(core: Core, worker: Worker, message: Serving) -> None:
    """It serves a version on. What it says is believed as far as the root goes: whoever pulls from it checks every byte."""
    run, known = worker.run, worker.run.versions.get(message.version)
    refusal = refused(message.source, run.encrypt) if message.source is not None else ""
    if refusal and refusal != worker.no_holder:
        core.connection_event(
            worker, "serving_refused", f"worker {worker.id}", refusal, version=message.version
        )
    worker.no_holder = refusal or worker.no_holder
    if message.source is None or known is None or known.root != message.root or refusal:
        run.directory.drop(message.version, worker.id)
    else:
        before = run.held(message.version)
        run.directory.add_holder(message.version, worker.id, worker.node, message.source)
        run.dirty |= run.held(message.version) != before


def load_failed(core: Core, worker: Worker, message: WeightsFailed) -> None:
    worker.load_failures += 1
    worker.run.directory.settled(worker.id)
    worker.asked_version, worker.asked_at = worker.loaded_version, core.now
    core.connection_event(
        worker, "weights_failed", f"worker {worker.id}", message.reason, version=message.version
    )
    if message.refused:
        refusals.refused(core, worker, message.version, message.reason)
    if worker.load_failures >= MAX_LOAD_FAILURES:
        drain(core, worker, f"weights could not be loaded {worker.load_failures} times: {message.reason}")


def put_to_sleep(core: Core, worker: Worker) -> None:
    worker.step(WorkerStep.SLEEP)
    worker.step_memory(MemoryStep.SLEEP)
    worker.run.dirty, worker.commanded_at = True, core.now
    worker.memory_order += 1
    core.send_durable(worker.conn, Sleep(worker.memory_order))


def asleep(core: Core, worker: Worker, order: int, bytes_held: int) -> None:
    """Its memory is free. Everything it generated came before this message, so its samples move with all their tokens.

    The acknowledgement of an older order is none of the newest: between the two it was woken, or is about to be.
    """
    if order != worker.memory_order or worker.memory is not Memory.FALLING_ASLEEP:
        return
    worker.bytes_held = bytes_held
    worker.step_memory(MemoryStep.SLEPT)
    for sample in list(worker.leases.values()):
        sm.release(core, sample, "reserved worker sleeps")
    if worker.status is WorkerStatus.SLEEPING:
        worker.step(WorkerStep.SLEPT)
        worker.run.policy.observe(Toggled(worker.id, False, core.now - worker.commanded_at), core.now)
    worker.run.dirty = True
    if worker.run.reserved_awake:
        wake(core, worker)


def awake(core: Core, worker: Worker, order: int, bytes_held: int) -> None:
    """It has its memory again. Leases were sent behind the order to wake: it takes them in turn."""
    if order == worker.memory_order and worker.memory is Memory.WAKING:
        worker.bytes_held = bytes_held
        worker.step_memory(MemoryStep.WOKEN)


def wake(core: Core, worker: Worker) -> None:
    """Take the GPU again; a worker that has not answered Sleep yet is woken when it does. Not before the trainer has said, to this daemon,
    that it gave its own memory back."""
    if worker.status is WorkerStatus.ASLEEP and worker.run.reserved_told:
        worker.run.dirty = True
        worker.step_memory(MemoryStep.WAKE)
        worker.memory_order += 1
        core.send_durable(worker.conn, Wake(worker.memory_order))
        worker.step(WorkerStep.WAKE)
        if worker.loaded_version >= 0:
            worker.step(WorkerStep.SERVE)
        # It may have been asked to load another version before it slept, and not have heard: `steer` asks again.
        worker.asked_version = worker.loaded_version
        steer(core, worker)


def steer(core: Core, worker: Worker, target: int | None = None) -> None:
    """Have an idle worker load what its run needs next (`target`, where the caller knows it).

    A worker with leases finishes them first: one version a sample (I4).
    """
    if (
        worker.conn is None
        or worker.status not in (WorkerStatus.LOADING, WorkerStatus.READY)
        or worker.leases
    ):
        return
    wanted = sm.target_version(worker.run) if target is None else target
    version = worker.run.versions.get(wanted)
    if version is None:
        return
    if wanted == worker.loaded_version and (wanted == worker.asked_version or not worker.run.held(wanted)):
        if worker.status is not WorkerStatus.READY or worker.asked_version != wanted:
            if worker.status is WorkerStatus.LOADING:
                worker.step(WorkerStep.SERVE)
            worker.asked_version, worker.run.dirty = wanted, True
            worker.run.restated.append(worker)
        return
    if not worker.run.held(wanted) or worker.asked_version == wanted:
        return
    if worker.load_failures and core.now - worker.asked_at < RETRY_LOAD_S:
        return
    if worker.status is WorkerStatus.READY:
        worker.step(WorkerStep.LOAD)
    worker.asked_version, worker.asked_at, worker.run.dirty = wanted, core.now, True
    worker.run.restated.append(worker)
    _send_to_holders(core, worker, version)


def _send_to_holders(core: Core, worker: Worker, version: Version, *, more: bool = False) -> None:
    """Tell the worker whom to pull from, and what it alone holds of what the run still needs."""
    run = worker.run
    choice = run.directory.choose(version.version, worker.id, worker.node, version.sources)
    worker.offered, worker.offered_at = _revision(run, version), core.now
    needed = {*run.queue.versions(), *run.leased} - {version.version}
    served = {
        v for v in needed if run.conn is not None and v in run.versions and run.versions[v].sources
    }  # its trainer has them
    keep = tuple(sorted(v for v in needed - served if run.directory.last_holder(v) == worker.id))
    manifest, base = b"" if more else version.manifest, _base(worker, version, more=more)
    core.send_durable(
        worker.conn, UseWeights(version.version, manifest, choice.sources, keep, more, run.encrypt, base)
    )  # behind its Welcome


def _base(worker: Worker, version: Version, *, more: bool) -> BaseWeights | None:
    """What the version's adapters are merged with. Of the two it is by far the larger, so the worker counts as one that reads this."""
    run = worker.run
    base = run.base_of(version)
    if base is None:
        return None
    sources = base.sources
    if not run.directory.is_holder(base.version, worker.id):
        sources = run.directory.choose(base.version, worker.id, worker.node, base.sources).sources
    return BaseWeights(base.version, b"" if more else base.manifest, sources, base.root)


def _revision(run: Run, version: Version) -> tuple[int, ...]:
    """Another one whenever somebody begins or ceases to hold what a worker pulls for this version, and when its base is published again."""
    base = run.base_of(version)
    return (
        run.directory.revision(version.version),
        *((base.version, run.directory.revision(base.version)) if base is not None else ()),
    )


def more_holders(core: Core, worker: Worker) -> None:
    """A worker that still pulls hears of the holders that came and went since it was asked."""
    version = worker.run.versions.get(worker.asked_version)
    if (
        version is None
        or worker.status is not WorkerStatus.LOADING
        or worker.asked_version == worker.loaded_version
        or worker.conn is None
    ):
        return
    if worker.offered != _revision(worker.run, version) and core.now - worker.offered_at >= OFFER_S:
        _send_to_holders(core, worker, version, more=True)


def drain(core: Core, worker: Worker, reason: str) -> None:
    """Ask a worker to flush and leave for good."""
    if worker.status is not WorkerStatus.DRAINING:
        worker.step(WorkerStep.DRAIN)
        worker.drain_reason, worker.run.dirty = reason, True
        core.send_durable(worker.conn, Drain(reason))
