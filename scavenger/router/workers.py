"""What happens to workers: greeting, loading, sleeping, going silent, leaving. Pure.

A worker is *suspect* when it was silent for `suspect_s` (no new leases) and dead when it said goodbye, when Slurm says that its job is
over, when a later incarnation greets under its key, or after `dead_s` of silence. Fencing by epoch makes an early move safe.
"""

from __future__ import annotations

from collections.abc import Mapping

from scavenger.ledger import records as rec
from scavenger.router import advice
from scavenger.router import samples as sm
from scavenger.router.events import Identity
from scavenger.router.policy import EngineProgress, Toggled, WorkerJoined, WorkerLost, WorkerReady
from scavenger.router.state import Core, Run, Sample, SampleStatus, Silenced, Version, Worker, WorkerStatus
from scavenger.wire import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    Ack,
    Asleep,
    Chunks,
    Drain,
    Goodbye,
    GoodbyeAck,
    Heartbeat,
    HeartbeatAck,
    Held,
    HelloAgain,
    Rejected,
    Revoke,
    SampleFailed,
    Serving,
    Sleep,
    UseWeights,
    Wake,
    WeightsFailed,
    WeightsLoaded,
    Welcome,
    WorkerHello,
    Yield,
    Yielded,
)

MAX_LOAD_FAILURES = 5
RETRY_LOAD_S = 1.0
OFFER_S = 0.5  # between two lists of holders that a pulling worker is sent
#: Departed connections whose repeats are answered: a fleet's worth.
MAX_DEPARTED = 4096
#: Reserved engines of one run that lost their slots and are refused should they still live.
MAX_EVICTED = 1024
_INT_LIMIT = 2**31


def hello(core: Core, conn: int, identity: Identity, hello: WorkerHello) -> None:
    """Greet a worker, new or back again, or say why not."""
    refusal = _hello_fault(core, identity, hello)
    if refusal is not None:
        if not refusal.retry:
            if core.told(identity.public_key):
                core.event("hello_refused", 0, hello.run, refusal.reason, node=hello.node, job_id=hello.job_id)
            else:
                core.count("hello_refused")
        # Refused, its job would fail: counted against its node. A worker of another release is asked to leave instead.
        drained = hello.kind == "harvested" and not _speaks(hello)
        core.send(conn, Drain(f"{refusal.reason}; {refusal.remedy}") if drained else refusal)
        return
    run = core.runs[hello.run]
    same = (hello.session, identity.intent_id, hello.kind)
    worker = next((w for w in run.workers.values() if (w.session, w.intent_id, w.kind) == same), None)
    run.dirty = True
    if worker is None:
        for other in _siblings(run, identity):
            gone(core, other, "a later incarnation greeted", crashed=False)
        _slot_taken(core, run, hello)
        worker = _join(core, conn, identity, hello, run)
    else:
        _disconnect(core, worker)
        worker.conn, worker.last_seen, worker.suspect = conn, core.now, False
        if worker.status is WorkerStatus.AWAY:
            worker.status = WorkerStatus.LOADING
    core.by_conn[conn] = worker
    worker.protocol = hello.protocol
    worker.cache_tokens, worker.best_batch = hello.cache_tokens, hello.best_batch
    if hello.loaded_version >= 0 and not worker.loads:
        worker.loads = 1  # before the daemon restarted: the next one is no start
    worker.moved_at, worker.attempt = core.now, run.attempt
    core.departed.pop(conn, None)
    limits = core.limits
    pace = (limits.heartbeat_s, limits.flush_ms, limits.flush_tokens)
    core.send_durable(conn, Welcome(worker.id, core.generation, run.name, run.engine, *pace, core.ledger, relay=True))
    worker.loaded_version = worker.asked_version = _proved_version(run, hello)
    _resume_leases(core, worker, hello.held, foreign=core.foreign(hello.ledger))
    if hello.leaving:
        worker.status, worker.drain_reason = WorkerStatus.DRAINING, worker.drain_reason or "it greeted to say goodbye"
    if worker.kind == "reserved" and not run.reserved_awake and worker.status in (WorkerStatus.LOADING, WorkerStatus.READY):
        put_to_sleep(core, worker)
    _repeat_orders(core, worker)
    steer(core, worker)


def _proved_version(run: Run, hello: WorkerHello) -> int:
    """The version that the worker has loaded, if its root hash says that it is the ledger's; else -1: it is asked to load.

    After an older ledger was restored, one number may name two sets of weights (I8).
    """
    known = run.versions.get(hello.loaded_version)
    return hello.loaded_version if known is not None and known.root == hello.loaded_root else -1


def _siblings(run: Run, identity: Identity) -> list[Worker]:
    """Earlier processes of the same harvested job."""
    return [w for w in run.workers.values() if identity.intent_id and w.intent_id == identity.intent_id]


def _slot_taken(core: Core, run: Run, hello: WorkerHello) -> None:
    """Another process greets as a reserved engine that never said goodbye: that one is dead, and what it held may have killed it.

    Where the trainer is another by now, the whole job died, and the engine with it.
    """
    if hello.kind != "reserved" or not hello.slot:
        return
    _evict_from_slot(run, hello)
    for other in [w for w in run.workers.values() if w.kind == "reserved" and w.slot == hello.slot]:
        gone(core, other, "another engine greeted in its slot", crashed=other.attempt == run.attempt)
    lost = run.silenced.pop(hello.slot, None)
    if lost is None or lost.attempt != run.attempt:
        return
    for sample_id in lost.samples:
        sample = core.samples.get(sample_id)
        if sample is not None and not sample.done and sm.charge(core, sample, lost.node):
            sm.poison(core, sample, "its reserved engine was started again")


def _evict_from_slot(run: Run, hello: WorkerHello) -> None:
    """Who had the slot before never gets it back: two live engines would evict each other for ever, and each time charge the samples."""
    before = run.slots.get(hello.slot, hello.session)
    run.slots[hello.slot] = hello.session
    if before != hello.session:
        run.evicted[before] = None
        while len(run.evicted) > MAX_EVICTED:
            run.evicted.popitem(last=False)


def _disconnect(core: Core, worker: Worker) -> None:
    if worker.conn is not None and core.by_conn.get(worker.conn) is worker:
        del core.by_conn[worker.conn]
    worker.conn = None


def _repeat_orders(core: Core, worker: Worker) -> None:
    """Say again what the worker was asked and has not done: any message may have been lost, and all of these may be repeated."""
    if worker.status is WorkerStatus.DRAINING:
        core.send_durable(worker.conn, Drain(worker.drain_reason))
    elif worker.status is WorkerStatus.SLEEPING:
        core.send_durable(worker.conn, Sleep())


def _speaks(hello: WorkerHello) -> bool:
    return OLDEST_PROTOCOL <= hello.protocol <= PROTOCOL


def _hello_fault(core: Core, identity: Identity, hello: WorkerHello) -> Rejected | None:
    if not _speaks(hello):
        return Rejected(
            f"protocol {hello.protocol}: this daemon speaks {OLDEST_PROTOCOL} to {PROTOCOL}", "run workers and daemon of one release"
        )
    numbers = (hello.incarnation, hello.job_id, hello.gpus)
    names = (hello.session, hello.node, hello.engine, hello.slot)
    if not all(0 <= n < _INT_LIMIT for n in numbers) or max(map(len, names)) > 256 or not hello.session:
        return Rejected("a hello with values that cannot be", "run workers and daemon of one release")
    if identity.role == "worker" and identity.run != hello.run:
        return Rejected(f"this key was minted for another run than {hello.run!r}", "start the worker with its own key file")
    if hello.kind not in ("harvested", "reserved") or (hello.kind == "harvested") != (identity.role == "worker"):
        why = f"a {hello.kind} worker cannot greet with the key of a {identity.role}"
        return Rejected(why, "harvested workers use the key of their job")
    run = core.runs.get(hello.run)
    if run is None or run.attempt == 0:
        return Rejected(f"run {hello.run!r} is not open", "it is tried again until its trainer has opened the run", retry=True)
    if identity.role == "owner" and identity.public_key != run.owner_key:
        return Rejected(f"run {hello.run!r} belongs to another key", "use the key that opened the run")
    if run.ended:
        return Rejected(f"run {hello.run!r} has ended", "nothing is left to do")
    if hello.kind == "reserved" and hello.session in run.evicted:
        return Rejected(f"another engine has its slot {hello.slot!r}", "nothing: this process is a leftover")
    if any(w.incarnation > hello.incarnation for w in _siblings(run, identity)):
        return Rejected(f"a later incarnation of this job than {hello.incarnation} is at work", "nothing: this process is a leftover")
    return None


def _join(core: Core, conn: int, identity: Identity, hello: WorkerHello, run: Run) -> Worker:
    worker = Worker(
        core.next_worker_id, run, hello.kind, identity.intent_id, hello.session, hello.incarnation,
        hello.job_id, hello.node, hello.gpus, conn, WorkerStatus.LOADING, core.now, idle_since=core.now, slot=hello.slot,
        joined_at=core.now, beat_at=core.now,
    )  # fmt: skip
    core.next_worker_id += 1
    core.workers[worker.id] = run.workers[worker.id] = worker
    run.policy.observe(WorkerJoined(worker.id, worker.kind, worker.node, worker.gpus), core.now)
    core.record(
        rec.WorkerJoined(
            worker.id, run.id, hello.kind, identity.intent_id, hello.session, hello.incarnation,
            hello.job_id, hello.node, hello.gpus, hello.engine, core.now,
        )
    )  # fmt: skip
    return worker


def _resume_leases(core: Core, worker: Worker, held: tuple[Held, ...], *, foreign: bool) -> None:
    """Reconcile what a greeting worker holds with what it may hold: nothing, if it was leased in another history of the ledger."""
    may = () if foreign else tuple(h for h in held if _may_hold(core, worker, h))
    holds = {(h.sample_id, h.epoch) for h in may}
    for sample in list(worker.leases.values()):
        if (sample.id, sample.epoch) not in holds:
            sm.release(core, sample, "the worker does not hold it any more")
        elif sample.status is SampleStatus.UNCONFIRMED:
            sample.step("confirm")
    stale = tuple((h.sample_id, h.epoch) for h in held if h not in may)
    if stale:
        why = "it was leased in another history of the ledger" if foreign else "the sample moved on while the worker was away"
        core.peer_event(worker, "stale_leases", f"worker {worker.id}", why, count=len(stale))
        core.send_durable(worker.conn, Revoke(stale, "the sample moved on"))
    durable = tuple(Held(h.sample_id, h.epoch, core.samples[h.sample_id].durable) for h in may)
    if durable:
        core.send_durable(worker.conn, Ack(durable))


def _may_hold(core: Core, worker: Worker, held: Held) -> bool:
    sample = core.samples.get(held.sample_id)
    if sample is None or sample.epoch != held.epoch:
        return False
    return sample.worker_id == worker.id or (sample.done and sample.last_worker_id == worker.id)


def heard(core: Core, conn: int) -> None:
    """Something came from a worker and waits for the ledger: it is not silent."""
    worker = core.by_conn.get(conn)
    if worker is not None:
        worker.last_seen = core.now


def said(core: Core, conn: int, message: object, faults: Mapping[int, str] | None = None) -> None:
    """A message of a greeted worker. One whose connection is unknown is asked to greet again."""
    worker = core.by_conn.get(conn)
    if worker is None and conn in core.departed:  # it left; only its goodbye may need to be answered again
        if isinstance(message, Goodbye):
            core.send_durable(conn, GoodbyeAck())
        return
    if worker is None:
        core.send(conn, HelloAgain("this connection is not known"))
        return
    worker.last_seen = core.now
    if worker.suspect:
        worker.suspect = False
        worker.run.dirty = True
        core.peer_event(worker, "worker_back", f"worker {worker.id}", "heard again before it was given up")
    match message:
        case Chunks(chunks=chunks):
            for at, chunk in enumerate(chunks):
                sm.accept_chunk(core, worker, chunk, faults.get(at, "") if faults else "")
        case Heartbeat():
            _heartbeat(core, worker, message)
        case Yielded(leases=leases):
            advice.handed_back(core, worker, leases)
        case WeightsLoaded(version=version):
            _loaded(core, worker, message, version)
        case WeightsFailed():
            _load_failed(core, worker, message)
        case Serving():
            _serving(core, worker, message)
        case SampleFailed():
            _sample_failed(core, worker, message)
        case Asleep():
            _asleep(core, worker)
        case Goodbye(reason=reason, notice=notice, failed=failed):
            worker.notice = notice
            core.send_durable(conn, GoodbyeAck())
            gone(core, worker, reason, crashed=failed, flushed=True)
            core.departed[conn] = None
            while len(core.departed) > MAX_DEPARTED:
                core.departed.popitem(last=False)


def _heartbeat(core: Core, worker: Worker, beat: Heartbeat) -> None:
    if beat.progress != worker.progress:
        worker.progress, worker.moved_at = beat.progress, core.now
    lengths = {(h.sample_id, h.epoch): h.length for h in beat.held}
    gained = context = 0
    for sample in list(worker.leases.values()):
        length = lengths.pop((sample.id, sample.epoch), None)
        if length is not None:
            if length > sample.reported:
                worker.moved_at = core.now
                gained += length - sample.reported
            context += len(sample.group.prompt) // 4 + length
            if length != sample.reported:
                sample.reported, sample.seen = length, None
        elif _assignment_lost(core, worker, sample, beat):
            worker.lost_assignments += 1
            sm.release(core, sample, "the assignment was lost")
    stale = tuple(
        (sample_id, epoch) for sample_id, epoch in lengths if not _may_hold(core, worker, Held(sample_id, epoch, 0))
    )  # fmt: skip
    if stale:
        core.send(worker.conn, Revoke(stale, "the sample moved on"))
    worker.acks += 1
    core.send(worker.conn, HeartbeatAck(core.generation, worker.acks))
    _measure(core, worker, gained, context)
    if beat.wake_s != worker.wake_s:
        worker.wake_s = beat.wake_s
        worker.run.policy.observe(Toggled(worker.id, True, beat.wake_s), core.now)
    _ask_again(core, worker)
    _reconcile_orders(core, worker, beat)
    steer(core, worker)


def _measure(core: Core, worker: Worker, gained: int, context: int) -> None:
    """What its engine did since its last heartbeat; for the policy only where it held the same samples throughout."""
    seconds, batch = core.now - worker.beat_at, len(worker.leases)
    steady = not worker.changed and batch > 0 and gained > 0
    worker.beat_at, worker.changed = core.now, False
    if seconds <= 0:
        return
    worker.tokens_per_s = gained / seconds
    if steady:
        at_mean = context - gained / 2
        worker.run.policy.observe(
            EngineProgress(worker.id, worker.kind, worker.node, worker.gpus, batch, at_mean, gained, seconds), core.now
        )


def _ask_again(core: Core, worker: Worker) -> None:
    """It holds what it was asked to give back before it sent this: the request was lost, or its answer was. A repeat does no harm."""
    asked = tuple((sample_id, one.epoch) for sample_id, one in worker.yielding.items() if one.at < core.now - core.limits.heartbeat_s)
    if asked:
        core.send_durable(worker.conn, Yield(asked, "asked before"))


def _assignment_lost(core: Core, worker: Worker, sample: Sample, beat: Heartbeat) -> bool:
    """The worker has heard what was sent after this lease, and does not hold it. Time alone proves nothing: a loaded host is slow.

    Workers of protocol 1 do not say what they heard: for them a time has to do.
    """
    if sample.assigned_at is None:
        return False
    if worker.protocol < 2:
        return core.now - max(sample.assigned_at, sample.chunk_at) > 3 * core.limits.heartbeat_s
    return beat.heard > sample.assigned_after


def _reconcile_orders(core: Core, worker: Worker, beat: Heartbeat) -> None:
    """Repair what a lost message left behind. What a heartbeat says is newer than all that was heard before it."""
    if beat.loaded_version != worker.loaded_version:
        worker.loaded_version = -1  # until it says, with the root hash, what it loaded
        worker.run.dirty = True
        if worker.status is WorkerStatus.READY:
            worker.status = WorkerStatus.LOADING
    asked_long_ago = core.now - worker.asked_at > 5 * core.limits.heartbeat_s
    if worker.asked_version != worker.loaded_version and asked_long_ago and worker.status is WorkerStatus.LOADING:
        worker.asked_version = worker.loaded_version  # `steer` asks again; a load under way is not disturbed by that
    if worker.lost_assignments and worker.kind == "reserved" and worker.run.reserved_awake and worker.run.conn is not None:
        core.send_durable(worker.conn, Wake())  # asleep since before the daemon restarted: it takes no lease
    worker.lost_assignments = 0
    _repeat_orders(core, worker)


def _loaded(core: Core, worker: Worker, message: WeightsLoaded, version: int) -> None:
    known = worker.run.versions.get(version)
    if known is None or known.root != message.root:
        core.peer_event(worker, "weights_refused", f"worker {worker.id}", f"loaded version {version} under another root hash")
        drain(core, worker, "it holds weights that nobody published")
        return
    worker.run.directory.settled(worker.id)
    first, worker.loaded_version = worker.loads == 0, version
    worker.cache_tokens, worker.best_batch = message.cache_tokens, message.best_batch
    worker.loads += 1
    worker.load_failures = 0
    worker.run.stirred = worker.run.recount = True  # the others' orders stay as they are
    worker.run.restated.append(worker)
    told = {"pull_s": message.pull_s, "load_s": message.load_s}
    if worker.loads <= worker.run.next_version:  # each version once
        core.event("weights_loaded", worker.run.id, f"worker {worker.id}", f"version {version}", **told)
    else:
        core.peer_event(worker, "weights_loaded", f"worker {worker.id}", f"version {version}", **told)
    worker.run.policy.observe(
        WorkerReady(
            worker.id, worker.kind, worker.node, worker.gpus, version, first, core.now - worker.joined_at, message.pull_s, message.load_s
        ),
        core.now,
    )
    if worker.status is WorkerStatus.LOADING:
        worker.status = WorkerStatus.READY
    steer(core, worker)


def _serving(core: Core, worker: Worker, message: Serving) -> None:
    """It serves a version on. What it says is believed as far as the root goes: whoever pulls from it checks every byte."""
    run, known = worker.run, worker.run.versions.get(message.version)
    if message.source is None or known is None or known.root != message.root:
        run.directory.drop(message.version, worker.id)
    else:
        before = run.held(message.version)
        run.directory.hold(message.version, worker.id, worker.node, message.source)
        run.dirty |= run.held(message.version) != before


def _load_failed(core: Core, worker: Worker, message: WeightsFailed) -> None:
    worker.load_failures += 1
    worker.run.directory.settled(worker.id)
    worker.asked_version, worker.asked_at = worker.loaded_version, core.now
    core.peer_event(worker, "weights_failed", f"worker {worker.id}", message.reason, version=message.version)
    if worker.load_failures >= MAX_LOAD_FAILURES:
        drain(core, worker, f"weights could not be loaded {worker.load_failures} times: {message.reason}")


def _sample_failed(core: Core, worker: Worker, message: SampleFailed) -> None:
    sample = worker.leases.get(message.sample_id)
    if sample is None or sample.epoch != message.epoch:
        return
    core.peer_event(worker, "sample_failed", f"sample {sample.id}", message.reason, worker=worker.id, node=worker.node)
    sm.release(core, sample, message.reason, crashed=True)


def put_to_sleep(core: Core, worker: Worker) -> None:
    worker.run.dirty = True
    worker.status, worker.told_at = WorkerStatus.SLEEPING, core.now
    core.send_durable(worker.conn, Sleep())


def _asleep(core: Core, worker: Worker) -> None:
    """Everything it generated came before this message, so its samples move with all their tokens."""
    for sample in list(worker.leases.values()):
        sm.release(core, sample, "reserved worker sleeps")
    if worker.status is WorkerStatus.SLEEPING:
        worker.status = WorkerStatus.ASLEEP
        worker.run.policy.observe(Toggled(worker.id, False, core.now - worker.told_at), core.now)
    worker.run.dirty = True
    if worker.run.reserved_awake:
        wake(core, worker)


def wake(core: Core, worker: Worker) -> None:
    """Take the GPU again; a worker that has not answered Sleep yet is woken when it does."""
    if worker.status in (WorkerStatus.LOADING, WorkerStatus.READY):
        core.send_durable(worker.conn, Wake())  # it may sleep since before the daemon restarted; an awake one ignores it
    elif worker.status is WorkerStatus.ASLEEP:
        worker.run.dirty = True
        core.send_durable(worker.conn, Wake())
        worker.status = WorkerStatus.READY if worker.loaded_version >= 0 else WorkerStatus.LOADING
        steer(core, worker)


def steer(core: Core, worker: Worker, target: int | None = None) -> None:
    """Have an idle worker load what its run needs next (`target`, where the caller knows it).

    A worker with leases finishes them first: one version a sample (I4).
    """
    if worker.conn is None or worker.status not in (WorkerStatus.LOADING, WorkerStatus.READY) or worker.leases:
        return
    wanted = sm.target_version(worker.run) if target is None else target
    version = worker.run.versions.get(wanted)
    if version is None:
        return
    if wanted == worker.loaded_version and (wanted == worker.asked_version or not worker.run.held(wanted)):
        if worker.status is not WorkerStatus.READY or worker.asked_version != wanted:
            worker.status, worker.asked_version, worker.run.dirty = WorkerStatus.READY, wanted, True
            worker.run.restated.append(worker)
        return
    if not worker.run.held(wanted) or worker.asked_version == wanted:
        return
    if worker.load_failures and core.now - worker.asked_at < RETRY_LOAD_S:
        return
    worker.asked_version, worker.asked_at, worker.status, worker.run.dirty = wanted, core.now, WorkerStatus.LOADING, True
    worker.run.restated.append(worker)
    _send_to_holders(core, worker, version)


def _send_to_holders(core: Core, worker: Worker, version: Version, *, more: bool = False) -> None:
    """Tell the worker whom to pull from, and what it alone holds of what the run still needs."""
    run = worker.run
    choice = run.directory.choose(version.version, worker.id, worker.node, version.sources)
    worker.offered, worker.offered_at = run.directory.revision(version.version), core.now
    needed = {*run.queue.versions(), *run.leased} - {version.version}
    served = {v for v in needed if run.conn is not None and v in run.versions and run.versions[v].sources}  # its trainer has them
    keep = tuple(sorted(v for v in needed - served if run.directory.last_holder(v) == worker.id))
    manifest = b"" if more else version.manifest
    core.send_durable(worker.conn, UseWeights(version.version, manifest, choice.sources, keep, more))  # behind its Welcome


def _more_holders(core: Core, worker: Worker) -> None:
    """A worker that still pulls hears of the holders that came and went since it was asked."""
    version = worker.run.versions.get(worker.asked_version)
    if version is None or worker.status is not WorkerStatus.LOADING or worker.asked_version == worker.loaded_version or worker.conn is None:
        return
    if worker.offered != worker.run.directory.revision(version.version) and core.now - worker.offered_at >= OFFER_S:
        _send_to_holders(core, worker, version, more=True)


def drain(core: Core, worker: Worker, reason: str) -> None:
    """Ask a worker to flush and leave for good."""
    if worker.status is not WorkerStatus.DRAINING:
        worker.status, worker.drain_reason, worker.run.dirty = WorkerStatus.DRAINING, reason, True
        core.send_durable(worker.conn, Drain(reason))


def gone(core: Core, worker: Worker, reason: str, *, crashed: bool, flushed: bool = False) -> None:
    """The worker is dead or has left: every lease of its moves with all tokens that were accepted. `flushed`: nothing else existed."""
    samples = list(worker.leases.values())
    salvaged = sum(s.accepted for s in samples)
    regenerated = 0
    for sample in samples:
        lost = 0 if flushed else sm.lost_tokens(core, sample)
        regenerated += lost
        sm.release(core, sample, reason, regenerated=lost, crashed=crashed)
    core.record(rec.WorkerLeft(worker.id, reason, worker.notice, len(samples), salvaged, regenerated, core.now))
    preempted = worker.status is not WorkerStatus.DRAINING and not crashed
    worker.run.policy.observe(
        WorkerLost(worker.id, worker.kind, worker.node, worker.gpus, core.now - worker.joined_at, preempted, reason), core.now
    )
    core.count("workers_lost")
    worker.run.directory.gone(worker.id)
    worker.run.workers.pop(worker.id, None)
    core.workers.pop(worker.id, None)
    worker.run.dirty = True
    _disconnect(core, worker)


def watch(core: Core, worker: Worker) -> None:
    """Time passed: suspect the silent, give up the long silent, retry a load that failed."""
    silent = core.now - worker.last_seen
    limits = core.limits
    if worker.status is WorkerStatus.AWAY:
        if silent > limits.reconnect_s:
            gone(core, worker, f"did not come back within {limits.reconnect_s:g} s of the daemon's restart", crashed=False)
    elif silent > limits.dead_s:
        if worker.slot and worker.leases:  # should its slot be filled again, it did crash
            worker.run.silenced[worker.slot] = Silenced(worker.attempt, worker.node, tuple(worker.leases))
        gone(core, worker, f"silent for {limits.dead_s:g} s", crashed=False)
    elif _stalled(core, worker):
        _give_up_stalled(core, worker)
    elif silent > limits.suspect_s and not worker.suspect:
        worker.suspect = worker.run.dirty = True
        core.event("worker_suspect", worker.run.id, f"worker {worker.id}", f"silent for {limits.suspect_s:g} s", node=worker.node)
    else:
        steer(core, worker)
        _more_holders(core, worker)


def _stalled(core: Core, worker: Worker) -> bool:
    """Whether its engine hangs: the process answers, and nothing that it was given has moved for `stalled_s`."""
    if core.now - worker.moved_at <= core.limits.stalled_s:
        return False  # the usual case: nobody looks at each sample of a fleet four times a second
    given = [s.assigned_at for s in worker.leases.values() if s.assigned_at is not None]
    if not given or worker.suspect:
        return False
    moved = max(worker.moved_at, min(given), *(s.chunk_at for s in worker.leases.values() if s.accepted > s.lease_offset))
    return core.now - moved > core.limits.stalled_s


def _give_up_stalled(core: Core, worker: Worker) -> None:
    """Its samples go elsewhere and count the failure; the worker is asked to leave."""
    reason = f"its engine stalled: nothing moved for {core.limits.stalled_s:g} s"
    held = list(worker.leases.values())
    core.event(
        "engine_stalled", worker.run.id, f"worker {worker.id}", reason, node=worker.node, samples=len(held), progress=worker.progress
    )  # fmt: skip
    core.send_durable(worker.conn, Revoke(tuple((s.id, s.epoch) for s in held), reason))
    for sample in held:
        sm.release(core, sample, reason, regenerated=sm.lost_tokens(core, sample), crashed=True)
    drain(core, worker, reason)
