"""Orders to workers: load a version, sleep, wake, leave; and the acknowledgements that come back. Pure.

Any message may be lost. So every order may be repeated without harm, and is repeated until the worker's heartbeat shows that it was
carried out.
"""

from __future__ import annotations

import msgspec

from scavenger.policy.interface import Toggled, WorkerReady
from scavenger.protocol.messages import (
    BaseWeights,
    ChangeRun,
    Drain,
    Heartbeat,
    LendSlots,
    PullAhead,
    Revoke,
    Serving,
    Sleep,
    UseWeights,
    Wake,
    WeightsFailed,
    WeightsLoaded,
    WeightSource,
    words,
)
from scavenger.router.core import kv_turns, refusals, returns, samples
from scavenger.router.core.state import ActiveRun, Version, Worker
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import LEAVING, GpuMemoryState, MemoryStep, WorkerStatus, WorkerStep
from scavenger.weights.directory import VERSIONS_SERVED, not_across, refused

MAX_LOAD_FAILURES = 5
RETRY_LOAD_S = 1.0
#: So many engines at least keep the weights of open turns.
MIN_TURN_HOLDERS = 2
OFFER_S = 0.5  # between two lists of holders that a pulling worker is sent


def repeat(core: Core, worker: Worker, heard: int) -> None:
    """Repeat the orders that the worker has not carried out: a message may have been lost.

    `heard`: number of the last order to sleep or wake that reached it.
    """
    if worker.status is WorkerStatus.DRAINING:
        core.send_durable(worker.conn, Drain(worker.departure.reason))
    elif worker.status is WorkerStatus.HANDING_OVER:
        core.send_durable(worker.conn, ChangeRun(worker.departure.hands_to, words(worker.departure.reason)))
    elif heard != worker.memory.order:
        sleeps = worker.memory.state in (GpuMemoryState.FALLING_ASLEEP, GpuMemoryState.ASLEEP)
        core.send_durable(worker.conn, Sleep(worker.memory.order) if sleeps else Wake(worker.memory.order))


def reconcile(core: Core, worker: Worker, beat: Heartbeat) -> None:
    """Repair what a lost message left behind: a heartbeat is newer than everything received before it."""
    if beat.loaded_version != worker.weights.loaded:
        worker.weights.loaded = -1  # until it says, with the root hash, what it loaded
        worker.run.due.fleet = True
        if worker.status is WorkerStatus.READY:
            worker.transition(WorkerStep.LOAD)
    asked_long_ago = core.now - worker.weights.asked_at > 5 * core.limits.heartbeat_s
    if (
        worker.weights.asked != worker.weights.loaded
        and asked_long_ago
        and worker.status is WorkerStatus.LOADING
    ):
        # `steer` asks again; a load under way is not disturbed by that.
        worker.weights.asked = worker.weights.loaded
    weights = worker.weights
    if weights.ahead > weights.loaded and beat.ahead != weights.ahead and beat.heard > weights.ahead_after:
        # The order to pull ahead was lost, or its pull failed. Another engine may lead its node, before `steer` asks this one again.
        worker.run.weights.directory.settled(worker.id)
        weights.ahead, weights.ahead_failed_at = -1, core.now
    # Its memory state answers the newest order: the acknowledgement may have been lost.
    if beat.memory_order == worker.memory.order:
        if beat.memory == "asleep" and worker.memory.state is GpuMemoryState.FALLING_ASLEEP:
            asleep(core, worker, beat.memory_order, beat.bytes_held)
        elif beat.memory == "awake" and worker.memory.state is GpuMemoryState.WAKING:
            awake(core, worker, beat.memory_order, beat.bytes_held)
    repeat(core, worker, beat.memory_order)
    worker.lends = beat.lends
    if beat.lends != worker.loan.public_key and worker.status not in LEAVING:
        core.send_durable(worker.conn, worker.loan)


def loaded(core: Core, worker: Worker, message: WeightsLoaded, version: int) -> None:
    if refusal := worker.run.weights.unproved(version, message.root, message.merged):
        core.connection_event(
            worker, "weights_refused", f"worker {worker.id}", refusal, version=version, node=worker.place
        )
        drain(core, worker, refusal)
        if message.merged:
            refusals.refused(core, worker, version, refusal)
        return
    worker.run.weights.directory.settled(worker.id)
    refusals.proved(worker.run, version)
    kv_turns.gone(worker, version)
    first, worker.weights.loaded = worker.weights.loads == 0, version
    worker.engine.cache_tokens, worker.engine.best_batch = message.cache_tokens, message.best_batch
    worker.weights.loads += 1
    worker.weights.first_at = worker.weights.first_at or core.now
    worker.weights.failures = 0
    worker.run.due.samples = worker.run.due.recount = True  # the others' orders stay as they are
    worker.run.due.changed_workers.append(worker)
    durations: dict[str, float | str] = {
        "pull_s": message.pull_s,
        "verify_s": message.verify_s,
        "load_s": message.load_s,
    }
    if message.chosen:
        durations["chosen"] = message.chosen
    if worker.weights.loads <= worker.run.weights.next_version:  # each version once
        core.event("weights_loaded", worker.run.id, f"worker {worker.id}", f"version {version}", **durations)
    else:
        core.connection_event(
            worker, "weights_loaded", f"worker {worker.id}", f"version {version}", **durations
        )
    worker.run.policy.observe(
        WorkerReady(
            worker.id,
            worker.kind,
            worker.place,
            worker.gpus,
            version,
            first,
            core.now - worker.joined_at,
            message.pull_s,
            message.load_s,
            worker.bounded,
        ),
        core.now,
    )
    if worker.run.engine.move_kv and (not message.chosen or message.chosen.startswith("full")):
        known = worker.run.weights.versions.get(version)
        worker.run.kv.rates.weights_pulled(known.nbytes if known is not None else 0, message.pull_s)
    if worker.status is WorkerStatus.LOADING:
        worker.transition(WorkerStep.SERVE)
    returns.lease_returning(core, worker)
    steer(core, worker)


def serving(core: Core, worker: Worker, message: Serving) -> None:
    """It serves a version on. Its word is taken as far as the root goes: a receiver that pulls from it checks every byte."""
    run, known = worker.run, worker.run.weights.versions.get(message.version)
    refusal = refused(message.source, run.settings.encrypt) if message.source is not None else ""
    if refusal and refusal != worker.weights.serving_refused:
        core.connection_event(
            worker, "serving_refused", f"worker {worker.id}", refusal, version=message.version
        )
    worker.weights.serving_refused = refusal or worker.weights.serving_refused
    # Nobody is sent to a guest: its network and its CPUs are the service's.
    if worker.bounded or message.source is None or known is None or known.root != message.root or refusal:
        run.weights.directory.drop(message.version, worker.id)
    else:
        before = run.weights.available(message.version)
        run.weights.directory.add_holder(
            message.version,
            worker.id,
            worker.place,
            message.source,
            worker.process.cluster,
            nbytes=known.nbytes,
            now=core.now,
        )
        run.due.fleet |= run.weights.available(message.version) != before


def load_failed(core: Core, worker: Worker, message: WeightsFailed) -> None:
    worker.weights.failures += 1
    worker.run.weights.directory.settled(worker.id)
    worker.weights.asked, worker.weights.asked_at = worker.weights.loaded, core.now
    core.connection_event(
        worker, "weights_failed", f"worker {worker.id}", message.reason, version=message.version
    )
    worker.run.weights.drop_trainer(
        VERSIONS_SERVED, message.version
    )  # announced again by a trainer that has it no more
    if message.refused:
        refusals.refused(core, worker, message.version, message.reason)
    if worker.weights.failures >= MAX_LOAD_FAILURES:
        drain(core, worker, f"weights could not be loaded {worker.weights.failures} times: {message.reason}")


def put_to_sleep(core: Core, worker: Worker) -> None:
    worker.transition(WorkerStep.SLEEP)
    worker.transition_memory(MemoryStep.SLEEP)
    worker.run.due.fleet, worker.memory.sleep_ordered_at = True, core.now
    worker.memory.order += 1
    core.send_durable(worker.conn, Sleep(worker.memory.order))


def asleep(core: Core, worker: Worker, order: int, bytes_held: int) -> None:
    """Its memory is free. Everything it generated came before this message, so its samples move with all their tokens.

    The acknowledgement of an older order is none of the newest: between the two it was woken, or is about to be.
    """
    if order != worker.memory.order or worker.memory.state is not GpuMemoryState.FALLING_ASLEEP:
        return
    worker.memory.bytes_held = bytes_held
    worker.transition_memory(MemoryStep.SLEPT)
    for sample in list(worker.leases.values()):
        samples.release(core, sample, "reserved worker sleeps")
    if worker.status is WorkerStatus.FALLING_ASLEEP:
        worker.transition(WorkerStep.SLEPT)
        worker.run.policy.observe(
            Toggled(worker.id, False, core.now - worker.memory.sleep_ordered_at), core.now
        )
    worker.run.due.fleet = True
    if worker.run.reserved.awake:
        wake(core, worker)


def awake(core: Core, worker: Worker, order: int, bytes_held: int) -> None:
    """It has its memory again. Leases were sent behind the order to wake: it takes them in turn."""
    if order == worker.memory.order and worker.memory.state is GpuMemoryState.WAKING:
        worker.memory.bytes_held = bytes_held
        worker.transition_memory(MemoryStep.WOKEN)


def wake(core: Core, worker: Worker) -> None:
    """Take the GPU again; a worker that has not answered Sleep yet is woken when it does. Not before the trainer has said, to this daemon,
    that it gave its own memory back."""
    if worker.status is WorkerStatus.ASLEEP and worker.run.reserved.awake_stated:
        worker.run.due.fleet = True
        worker.transition_memory(MemoryStep.WAKE)
        worker.memory.order += 1
        core.send_durable(worker.conn, Wake(worker.memory.order))
        worker.transition(WorkerStep.WAKE)
        if worker.weights.loaded >= 0:
            worker.transition(WorkerStep.SERVE)
        # It may have been asked to load another version before it slept, and not have heard: `steer` asks again.
        worker.weights.asked = worker.weights.loaded
        steer(core, worker)


def steer(core: Core, worker: Worker, target: int | None = None) -> None:
    """Have an idle worker load what its run needs next (`target`, where the caller knows it).

    A worker with leases finishes them first: one version a sample (I4). Meanwhile it may have the next version's bytes.
    """
    if worker.conn is None or worker.status not in (WorkerStatus.LOADING, WorkerStatus.READY):
        return
    if not may_pull(core, worker):
        return
    if worker.leases:
        if worker.engine.lease_limit != 0:
            _pull_ahead(core, worker)
        return
    worker.weights.switches = False  # nothing is left to give back
    wanted = samples.target_version(worker.run) if target is None else target
    version = worker.run.weights.versions.get(wanted)
    if version is None:
        return
    if wanted == worker.weights.loaded and (
        wanted == worker.weights.asked or not worker.run.weights.available(wanted)
    ):
        if worker.status is not WorkerStatus.READY or worker.weights.asked != wanted:
            if worker.status is WorkerStatus.LOADING:
                worker.transition(WorkerStep.SERVE)
            worker.weights.asked, worker.run.due.fleet = wanted, True
            worker.run.due.changed_workers.append(worker)
        return
    if not worker.run.weights.available(wanted) or worker.weights.asked == wanted:
        return
    if worker.engine.lease_limit == 0:
        return  # bytes and hashing are the service's now; it is asked once its host leaves it something again
    if worker.weights.failures and core.now - worker.weights.asked_at < RETRY_LOAD_S:
        return
    if worker.status is WorkerStatus.READY:
        worker.transition(WorkerStep.LOAD)
    worker.weights.asked, worker.weights.asked_at, worker.run.due.fleet = wanted, core.now, True
    worker.weights.ahead = -1  # an order to load ends it
    worker.run.due.changed_workers.append(worker)
    _send_to_holders(core, worker, version)


def may_pull(core: Core, worker: Worker) -> bool:
    """Whether it may be told to pull its run's weights. One that may not is asked to leave: each order goes by here."""
    refusal = not_across(worker.process.cluster, worker.run.settings.encrypt)
    if refusal and worker.status is not WorkerStatus.DRAINING:
        core.connection_event(worker, "pull_refused", f"worker {worker.id}", refusal, code="not_encrypted")
        drain(core, worker, refusal)
    return not refusal


def _pull_ahead(core: Core, worker: Worker) -> None:
    """Have a worker that still generates pull what idle workers load now: the load that follows finds the bytes there."""
    wanted, weights = worker.run.cached.target, worker.weights
    version = worker.run.weights.versions.get(wanted)
    if (
        version is None
        or wanted <= max(weights.loaded, weights.ahead)
        or weights.loaded < 0
        or weights.asked != weights.loaded
        or core.now - weights.ahead_failed_at < RETRY_LOAD_S
        or not worker.run.weights.available(wanted)
    ):
        return
    worker.run.weights.directory.settled(worker.id)  # what it was to pull before this is superseded
    order = _order(core, worker, version)
    # What it generates with stays: once the trainer is gone, no other engine may hold it. The order to load lets go of it.
    order = msgspec.structs.replace(order, keep=tuple(sorted({*order.keep, weights.loaded})))
    weights.ahead, weights.ahead_after, weights.ahead_at = wanted, worker.heartbeat.acks, core.now
    core.send(worker.conn, PullAhead(order))  # before the next ack, which shows that it was received


def _send_to_holders(core: Core, worker: Worker, version: Version, *, more: bool = False) -> None:
    """Ask the worker to load the version."""
    core.send_durable(worker.conn, _order(core, worker, version, more=more))  # behind its Welcome


def _order(core: Core, worker: Worker, version: Version, *, more: bool = False) -> UseWeights:
    """From which sources it has the version, and which versions it keeps because no other engine holds them, or, where turns were begun
    with them, one other: that one may be lost with its turns, which go on with nothing else. It counts as their reader.
    """
    run, published = worker.run, worker.run.weights
    sources = _chosen(core, worker, version)
    worker.weights.offered, worker.weights.offered_at = _revision(run, version), core.now
    needed = {*run.queue.versions(), *run.turns.queue.versions(), *run.leased} - {version.version}
    connected, versions = run.trainer.conn is not None, published.versions
    from_trainer = {v for v in needed if connected and v in versions and versions[v].sources}
    of_turns = run.turns.leased.keys() | run.turns.queue.versions()
    keep = tuple(
        sorted(
            v
            for v in needed - from_trainer
            if published.directory.is_among_last(v, worker.id, MIN_TURN_HOLDERS if v in of_turns else 1)
        )
    )
    manifest, base = b"" if more else version.manifest, _base(core, worker, version, more=more)
    return UseWeights(version.version, manifest, sources, keep, more, run.settings.encrypt, base)


def _base(core: Core, worker: Worker, version: Version, *, more: bool) -> BaseWeights | None:
    """The base that the version's adapters are merged with. It is by far the larger part, so the worker is counted as its reader."""
    run = worker.run
    base = run.weights.base_of(version)
    if base is None:
        return None
    sources = base.sources
    if not run.weights.directory.is_holder(base.version, worker.id):
        sources = _chosen(core, worker, base)
    return BaseWeights(base.version, b"" if more else base.manifest, sources, base.root)


def _chosen(core: Core, worker: Worker, version: Version) -> tuple[WeightSource, ...]:
    """The sources that the directory has for the worker; it counts as their reader."""
    return worker.run.weights.directory.choose(
        version.version,
        worker.id,
        worker.place,
        version.sources,
        alone=worker.bounded,
        cluster=worker.process.cluster,
        nbytes=version.nbytes,
        now=core.now,
    ).sources


def _revision(run: ActiveRun, version: Version) -> tuple[int, ...]:
    """Changes whenever a holder of the version or of its base comes or goes, and when its base is published again."""
    base = run.weights.base_of(version)
    return (
        run.weights.directory.revision(version.version),
        *((base.version, run.weights.directory.revision(base.version)) if base is not None else ()),
    )


def more_holders(core: Core, worker: Worker) -> None:
    """Send a worker that still pulls the holders that came since it was asked to load."""
    weights, run = worker.weights, worker.run
    loads = worker.status is WorkerStatus.LOADING and weights.asked != weights.loaded
    version = run.weights.versions.get(weights.asked if loads else weights.ahead)
    if (
        version is None
        or not (loads or weights.ahead > weights.loaded)
        or run.weights.directory.is_holder(version.version, worker.id)
        or worker.conn is None
        or worker.engine.lease_limit == 0
        or not may_pull(core, worker)
    ):
        return
    if (
        worker.weights.offered != _revision(worker.run, version)
        and core.now - worker.weights.offered_at >= OFFER_S
    ):
        _send_to_holders(core, worker, version, more=True)


def drain(core: Core, worker: Worker, reason: str) -> None:
    """Ask a worker to flush and leave for good."""
    if worker.status is not WorkerStatus.DRAINING:
        worker.transition(WorkerStep.DRAIN)
        worker.departure.reason, worker.run.due.fleet = reason, True
        core.send_durable(worker.conn, Drain(reason))


def hand_over(core: Core, worker: Worker, public_key: str, reason: str) -> None:
    """Ask a worker to flush, to leave this run and to register for the one of this key. One that neither generates nor loads leaves for
    good: its job ends, and what its GPUs are for is decided afresh."""
    if worker.status in LEAVING:
        return
    if worker.status not in (WorkerStatus.LOADING, WorkerStatus.READY) or worker.bounded:
        drain(core, worker, reason)
        return
    worker.transition(WorkerStep.HAND_OVER)
    worker.departure.reason, worker.departure.hands_to = reason, public_key
    core.handed.add(worker.process.intent_id)
    worker.run.due.fleet = True
    core.send_durable(worker.conn, ChangeRun(public_key, words(reason)))


def lend(core: Core, worker: Worker, order: LendSlots) -> None:
    """Tell a worker of a loan of slots of its engine; heartbeats say whether the order came."""
    if worker.status not in LEAVING and not worker.bounded:
        worker.lends = worker.loan.public_key or worker.lends  # until a heartbeat says otherwise
        worker.loan = order
        core.send_durable(worker.conn, order)


def set_aside(core: Core, worker: Worker, reason: str) -> None:
    """Its samples go elsewhere, and it leaves. That these samples failed here says nothing against them."""
    held = list(worker.leases.values())
    if held:
        core.send_durable(worker.conn, Revoke(tuple((s.id, s.epoch) for s in held), reason))
    for sample in held:
        samples.release(core, sample, reason, regenerated=samples.lost_tokens(core, sample))
    drain(core, worker, reason)
