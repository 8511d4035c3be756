"""A worker's hello: who it is, whether it may register, which of its leases it keeps. Pure.

A later incarnation of a job replaces the earlier one, and a reserved engine that registers in a slot replaces the one there. A worker that
returns after the daemon was away keeps the leases that the ledger says it holds.
"""

from __future__ import annotations

from scavenger.ledger import records as rec
from scavenger.policy.interface import WorkerJoined
from scavenger.protocol import engine_options
from scavenger.protocol.messages import PROTOCOL, Ack, Drain, Held, Rejected, Revoke, Welcome, WorkerHello
from scavenger.router.core import agreement, guests, refusals, samples, worker_commands, workers
from scavenger.router.core.events import PeerIdentity
from scavenger.router.core.row_budget import OWNER_BURST
from scavenger.router.core.state import ActiveRun, Worker, WorkerProcess
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import (
    LEAVING,
    MEMORY_FOUND,
    GpuMemoryState,
    SampleStatus,
    SampleStep,
    WorkerStatus,
    WorkerStep,
)
from scavenger.weights.directory import not_across

#: Reserved engines of one run that lost their slots and are refused should they still live.
MAX_EVICTED = 1024
_INT_LIMIT = 2**31


def hello(core: Core, conn: int, identity: PeerIdentity, hello: WorkerHello) -> None:
    """Register a worker, new or returning, or reject it with the reason and the remedy."""
    refusal = _hello_fault(core, identity, hello)
    if refusal is not None:
        _refuse(core, conn, identity, hello, refusal)
        return
    run = core.runs[hello.run]
    same = (hello.session, identity.intent_id, hello.kind)
    worker = next(
        (w for w in run.workers.values() if (w.process.session, w.process.intent_id, w.kind) == same), None
    )
    if worker is None and not _may_join(core, identity, hello, run):
        core.count("hello_refused")
        why = "this key registers as new workers again and again"
        core.send(conn, Rejected(why, "look at the log of its job; it is tried again", retry=True))
        return
    run.due.fleet = run.reserved.memory_changed = True
    guests.admitted(core, run, identity)
    known = worker is not None and worker.status is not WorkerStatus.AWAY
    worker = _join(core, conn, identity, hello, run) if worker is None else _back(core, conn, worker)
    core.by_conn[conn] = worker
    worker.engine.cache_tokens, worker.engine.best_batch = hello.cache_tokens, hello.best_batch
    workers.bounded(worker, hello.lease_limit)
    if hello.loaded_version >= 0 and not worker.weights.loads:
        worker.weights.loads = 1  # before the daemon restarted: the next one is no start
    worker.engine.moved_at, worker.attempt = core.now, run.attempt
    core.departed.pop(conn, None)
    limits = core.limits
    pace = (limits.heartbeat_s, limits.flush_ms, limits.flush_tokens)
    core.send_durable(
        conn,
        Welcome(
            worker.id, core.generation, run.name, run.engine, *pace, core.ledger, relay=not worker.bounded
        ),
    )
    worker.weights.loaded = worker.weights.asked = _proved_version(run, hello)
    if worker.weights.loaded >= 0:
        refusals.proved(run, worker.weights.loaded)
    _resume_leases(core, worker, hello)
    _resume_memory(core, worker, hello, known=known)
    if hello.leaving:
        worker.departure.reason = worker.departure.reason or "it registered to say goodbye"
        if worker.status not in LEAVING:
            worker.transition(WorkerStep.DRAIN)
    told_to_sleep = run.reserved.awake_stated and not run.reserved.awake
    if (
        worker.kind == "reserved"
        and told_to_sleep
        and worker.status in (WorkerStatus.LOADING, WorkerStatus.READY)
    ):
        worker_commands.put_to_sleep(core, worker)  # and was sent the order, behind its Welcome
    else:
        worker_commands.repeat(core, worker, hello.memory_order)
        if run.reserved.awake:
            worker_commands.wake(core, worker)
    worker_commands.steer(core, worker)


def _may_join(core: Core, identity: PeerIdentity, hello: WorkerHello, run: ActiveRun) -> bool:
    """Charge a new session, which is two rows, to the job whose key it is; all reserved engines have their owner's: to the run and slot."""
    if hello.kind != "reserved":
        return core.charge_row(f"registers {identity.public_key}")
    # A slot is whatever the engine says: their number is bounded by what the owner has in all.
    return core.charge_row(f"registers {run.id} {hello.slot}") and core.charge_row(
        f"registers {run.owner_key}", OWNER_BURST
    )


def advanced(core: Core, run: ActiveRun) -> None:
    """The run committed a step: its reserved engines work, however often they were started."""
    for peer in (run.owner_key, *(f"{run.id} {slot}" for slot in {*run.reserved.sessions, ""})):
        core.advanced(f"registers {peer}")


def _refuse(core: Core, conn: int, identity: PeerIdentity, hello: WorkerHello, refusal: Rejected) -> None:
    if not refusal.retry:
        if core.count_refusal(identity.public_key):
            core.event("hello_refused", 0, hello.run, refusal.reason, node=hello.node, job_id=hello.job_id)
        else:
            core.count("hello_refused")
    # Refused, its job would fail: counted against its node. What is no fault of the node's is asked to leave instead.
    run = core.runs.get(hello.run)
    drained = hello.kind == "harvested" and (
        hello.protocol != PROTOCOL
        or (
            run is not None
            and (
                _fault_of_options(core, run) is not None
                or bool(not_across(identity.cluster, run.settings.encrypt))
            )
        )
    )
    core.send(conn, Drain(f"{refusal.reason}; {refusal.remedy}") if drained else refusal)


def _proved_version(run: ActiveRun, hello: WorkerHello) -> int:
    """The version that the worker has loaded, if its hashes say that it is the ledger's; else -1: it is asked to load."""
    return (
        -1
        if run.weights.unproved(hello.loaded_version, hello.loaded_root, hello.loaded_merged)
        else hello.loaded_version
    )


def _disowned(run: ActiveRun, hello: WorkerHello) -> int:
    """The version that the worker holds as other weights than were published, by what it says itself; -1: it says no such thing (as those
    of older releases, or of a version whose digest was stated after it was loaded, say nothing)."""
    known = run.weights.versions.get(hello.loaded_version)
    if known is None or not hello.loaded_root:
        return -1
    other = known.root != hello.loaded_root or (
        known.merged and hello.loaded_merged not in (b"", known.merged)
    )
    return known.version if other else -1


def _siblings(run: ActiveRun, identity: PeerIdentity) -> list[Worker]:
    """Earlier processes of the same harvested job."""
    return [
        w for w in run.workers.values() if identity.intent_id and w.process.intent_id == identity.intent_id
    ]


def _left_for_this(worker: Worker, identity: PeerIdentity, run: ActiveRun) -> bool:
    """Whether it is this job's worker of another run, whose goodbye was lost: the job's key is of this run now."""
    return (
        bool(identity.intent_id) and worker.process.intent_id == identity.intent_id and worker.run is not run
    )


def _of_its_job(core: Core, identity: PeerIdentity) -> list[Worker]:
    """Processes of the same harvested job, of whichever run."""
    return [
        w
        for w in core.workers.values()
        if identity.intent_id and w.process.intent_id == identity.intent_id and w.kind == "harvested"
    ]


def _slot_taken(core: Core, run: ActiveRun, hello: WorkerHello) -> None:
    """Another process registers as a reserved engine that never said goodbye: that one is dead, and what it held may have killed it.

    Where the trainer is another by now, the whole job died, and the engine with it.
    """
    if hello.kind != "reserved" or not hello.slot:
        return
    _evict_from_slot(run, hello)
    for other in [w for w in run.workers.values() if w.kind == "reserved" and w.slot == hello.slot]:
        workers.gone(
            core, other, "another engine registered in its slot", crashed=other.attempt == run.attempt
        )
    lost = run.reserved.given_up.pop(hello.slot, None)
    if lost is None or lost.attempt != run.attempt:
        return
    for sample_id in lost.samples:
        sample = core.samples.get(sample_id)
        if sample is not None and not sample.done and samples.charge(core, sample, lost.node):
            samples.poison(core, sample, "its reserved engine was started again")


def _evict_from_slot(run: ActiveRun, hello: WorkerHello) -> None:
    """Who had the slot before never gets it back: two live engines would evict each other for ever, and each time charge the samples."""
    before = run.reserved.sessions.get(hello.slot, hello.session)
    run.reserved.sessions[hello.slot] = hello.session
    if before != hello.session:
        evict(run, before)


def evict(run: ActiveRun, session: str) -> None:
    """Reject this session from now on."""
    run.reserved.evicted[session] = None
    while len(run.reserved.evicted) > MAX_EVICTED:
        run.reserved.evicted.popitem(last=False)


def _fault_of_options(core: Core, run: ActiveRun) -> tuple[str, str] | None:
    """What a harvested engine must not be given of this run's options, which another attempt of its trainer may have changed."""
    return engine_options.fault_of_text(run.engine.options, harvested=True, allowed=core.limits.vllm_options)


def _hello_fault(core: Core, identity: PeerIdentity, hello: WorkerHello) -> Rejected | None:
    if hello.protocol != PROTOCOL:
        why = f"protocol {hello.protocol}: this daemon speaks {PROTOCOL}"
        return Rejected(why, "run workers and daemon of one release")
    numbers = (hello.incarnation, hello.job_id, hello.gpus)
    names = (hello.session, hello.node, hello.engine, hello.slot)
    if (
        not all(0 <= n < _INT_LIMIT for n in numbers)
        or max(map(len, names)) > 256
        or not hello.session
        or not all(map(str.isprintable, names))
        or "/" in hello.node  # no node's name has it: `Worker.place`
    ):
        return Rejected("a hello with values that cannot be", "run workers and daemon of one release")
    if identity.role == "worker" and identity.run != hello.run:
        return Rejected(
            f"this key was minted for another run than {hello.run!r}",
            "start the worker with its own key file",
        )
    if hello.kind not in ("harvested", "reserved") or (hello.kind == "harvested") != (
        identity.role == "worker"
    ):
        why = f"a {hello.kind} worker cannot register with the key of a {identity.role}"
        return Rejected(why, "harvested workers use the key of their job")
    run = core.runs.get(hello.run)
    if run is None or run.attempt == 0:
        return Rejected(
            f"run {hello.run!r} is not open",
            "it is tried again until its trainer has opened the run",
            retry=True,
        )
    if identity.role == "owner" and identity.public_key != run.owner_key:
        return Rejected(f"run {hello.run!r} belongs to another key", "use the key that opened the run")
    if run.ended:
        return Rejected(f"run {hello.run!r} has ended", "nothing is left to do")
    if hello.kind == "harvested" and (found := _fault_of_options(core, run)) is not None:
        return Rejected(*found)
    if refusal := not_across(identity.cluster, run.settings.encrypt):
        return Rejected(refusal, "set weights.encrypt = true in the run's TOML")
    if hello.kind == "reserved" and hello.session in run.reserved.evicted:
        return Rejected(f"another engine has its slot {hello.slot!r}", "nothing: this process is a leftover")
    if (held := guests.fault(run, identity, hello)) is not None:
        return held
    if any(w.process.incarnation > hello.incarnation for w in _of_its_job(core, identity)):
        return Rejected(
            f"a later incarnation of this job than {hello.incarnation} is at work",
            "nothing: this process is a leftover",
        )
    return None


def _back(core: Core, conn: int, worker: Worker) -> Worker:
    workers.disconnect(core, worker)
    worker.conn, worker.last_seen, worker.suspect = conn, core.now, False
    if worker.status is WorkerStatus.AWAY:
        worker.transition(WorkerStep.RETURN)
    return worker


def _join(core: Core, conn: int, identity: PeerIdentity, hello: WorkerHello, run: ActiveRun) -> Worker:
    for other in _siblings(run, identity):
        workers.gone(core, other, "a later incarnation registered", crashed=False)
    for other in [w for w in core.workers.values() if _left_for_this(w, identity, run)]:
        workers.gone(core, other, f"its process works for run {run.name} now", crashed=False)
    _slot_taken(core, run, hello)
    run.reserved.unaccounted = {
        name: (slot, session)
        for name, (slot, session) in run.reserved.unaccounted.items()
        if session != hello.session and (not slot or slot != hello.slot)
    }
    process = WorkerProcess(
        identity.intent_id, hello.session, hello.incarnation, hello.job_id, identity.cluster
    )
    worker = Worker(
        core.next_worker_id,
        run,
        hello.kind,
        hello.node,
        hello.gpus,
        process,
        conn,
        core.now,
        hello.slot,
        joined_at=core.now,
        idle_since=core.now,
    )
    if (
        identity.intent_id in core.handed
    ):  # its process worked for another run: what it loads first is no start
        core.handed.discard(identity.intent_id)
        worker.weights.loads = 1
    worker.heartbeat.at = core.now
    worker.transition(WorkerStep.JOIN)
    core.next_worker_id += 1
    core.workers[worker.id] = run.workers[worker.id] = worker
    agreement.joined(worker)
    run.policy.observe(
        WorkerJoined(worker.id, worker.kind, worker.place, worker.gpus, worker.bounded), core.now
    )
    core.record(
        rec.WorkerJoined(
            worker.id,
            run.id,
            hello.kind,
            identity.intent_id,
            hello.session,
            hello.incarnation,
            hello.job_id,
            hello.node,
            hello.gpus,
            run.engine.name,
            core.now,
            slot=hello.slot,
            cluster=identity.cluster,
        )
    )
    return worker


def _resume_memory(core: Core, worker: Worker, hello: WorkerHello, *, known: bool) -> None:
    """What it does with its memory, where this daemon has not ordered it: it may sleep since before the daemon restarted.

    Of one that is known, only what answers the newest order is news.
    """
    if worker.kind != "reserved":
        return
    if known:
        if hello.memory_order == worker.memory.order and hello.memory == "asleep":
            worker_commands.asleep(core, worker, hello.memory_order, hello.bytes_held)
        elif hello.memory_order == worker.memory.order and hello.memory == "awake":
            worker_commands.awake(core, worker, hello.memory_order, hello.bytes_held)
        return
    found = MEMORY_FOUND.get(GpuMemoryState(hello.memory))
    if found is not None:
        worker.transition_memory(found)
    worker.memory.order, worker.memory.bytes_held = hello.memory_order, hello.bytes_held
    if worker.memory.state is GpuMemoryState.FALLING_ASLEEP:
        worker.transition(WorkerStep.FOUND_FALLING_ASLEEP)
        worker.memory.sleep_ordered_at = core.now
    elif worker.memory.state is GpuMemoryState.ASLEEP:
        worker.transition(WorkerStep.FOUND_ASLEEP)


def _resume_leases(core: Core, worker: Worker, hello: WorkerHello) -> None:
    """Reconcile what a worker that registers holds with what it may hold.

    Nothing, if it was leased in another history of the ledger; nothing that it generates with weights that were never published (I8).
    """
    foreign, disowned = core.foreign(hello.ledger), _disowned(worker.run, hello)
    known = () if foreign else tuple(h for h in hello.held if workers.may_hold(core, worker, h))
    may = tuple(h for h in known if core.samples[h.sample_id].lease_version != disowned)
    other = worker.run.weights.unproved(disowned, hello.loaded_root, hello.loaded_merged)
    holds = {(h.sample_id, h.epoch) for h in may}
    for sample in list(worker.leases.values()):
        if (sample.id, sample.epoch) not in holds:
            samples.release(
                core,
                sample,
                other if sample.lease_version == disowned else "the worker does not hold it any more",
            )
        elif sample.status is SampleStatus.UNCONFIRMED:
            sample.transition(SampleStep.CONFIRM)
    stale = tuple((h.sample_id, h.epoch) for h in hello.held if h not in may)
    if stale:
        moved = (
            "it was leased in another history of the ledger"
            if foreign
            else "the sample moved on while the worker was away"
        )
        core.connection_event(
            worker, "stale_leases", f"worker {worker.id}", other if may != known else moved, count=len(stale)
        )
        core.send_durable(worker.conn, Revoke(stale, "the sample moved on"))
    durable = tuple(Held(h.sample_id, h.epoch, core.samples[h.sample_id].durable) for h in may)
    if durable:
        core.send_durable(worker.conn, Ack(durable))
