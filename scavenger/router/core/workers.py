"""Messages of registered workers, their silence and their end. Pure.

A worker that was silent for `suspect_s` is *suspect* and gets no new leases. It is gone when it says goodbye, when Slurm reports the end of
its job, when a later incarnation registers under its key, or after `dead_s` of silence. Its samples move at once: epochs fence it, so a
worker that was only slow does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass

from scavenger.ledger import records as rec
from scavenger.policy.forecast.speed import PREFILL_SHARE
from scavenger.policy.interface import EngineProgress, Toggled, WorkerLost
from scavenger.protocol.messages import (
    Goodbye,
    GoodbyeAck,
    Heartbeat,
    HeartbeatAck,
    Held,
    HelloAgain,
    Revoke,
    SampleFailed,
    Yield,
)
from scavenger.protocol.worker.events import Speculated
from scavenger.router.core import kv_moves, kv_turns, samples, worker_commands, worker_counts
from scavenger.router.core.events import WorkerLife
from scavenger.router.core.state import ActiveRun, GivenUp, Sample, Worker
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import LEAVING, GpuMemoryState, WorkerStatus, WorkerStep

#: Departed connections whose repeats are answered: a fleet's worth.
MAX_DEPARTED = 4096
#: A heartbeat is early when less than this share of the heartbeat interval passed since the last one, which then was late.
LEAST_BEAT = 0.9
#: A sample that gains more tokens a second than this does not say how fast engines are: no step of a model takes a fifth of a millisecond.
MOST_SAMPLE_TOKENS_PER_S = 5000.0
#: A waking or a pause for weights that is reported as longer counts as this long.
MOST_REPORTED_S = 3600.0
#: The mean gain of an engine's samples between two heartbeats lies within this share of the largest (or within one token) when all of them
#: ran throughout.
ALIKE = 0.05
#: The same of engines that speculate.
ALIKE_SPECULATING = 0.5
#: With steps in advance leases come and go all the time. An engine is measured by the samples that stayed, where they are this share of
#: its batch at least, and where what came meanwhile was prefilled in this share of the time at most.
STAYED_LEAST, ENTERING_MOST = 0.5, 0.15


def disconnect(core: Core, worker: Worker) -> None:
    if worker.conn is not None and core.by_conn.get(worker.conn) is worker:
        del core.by_conn[worker.conn]
    worker.conn = None


def may_hold(core: Core, worker: Worker, held: Held) -> bool:
    sample = core.samples.get(held.sample_id)
    if sample is None or sample.epoch != held.epoch:
        return False
    return sample.worker_id == worker.id or (sample.done and sample.last_worker_id == worker.id)


def heard(core: Core, conn: int) -> None:
    """Something came from a worker and waits for the ledger: it is not silent."""
    worker = core.by_conn.get(conn)
    if worker is not None:
        worker.last_seen = core.now


def sender(core: Core, conn: int, *, leaves: bool) -> Worker | None:
    """The worker of this connection; it is alive. None for an unknown connection, which is asked to register again, and for one that left.
    `leaves`: what it sent is a goodbye."""
    worker = core.by_conn.get(conn)
    if worker is None and conn in core.departed:  # it left; only its goodbye may need to be answered again
        if leaves:
            core.send_durable(conn, GoodbyeAck())
        return None
    if worker is None:
        core.send(conn, HelloAgain("this connection is not known"))
        return None
    worker.last_seen = core.now
    if worker.suspect:
        worker.suspect = False
        worker.run.due.fleet = True
        core.connection_event(
            worker, "worker_back", f"worker {worker.id}", "heard again before it was given up"
        )
    return worker


def goodbye(core: Core, conn: int, worker: Worker, message: Goodbye) -> None:
    """The worker leaves, and sent all it had."""
    worker.departure.notice = message.notice
    wanted = kv_turns.handed_over(core, worker, kv_moves.LEFT_S) if not message.failed else ()
    core.send_durable(conn, GoodbyeAck(wanted))
    gone(core, worker, message.reason, crashed=message.failed, flushed=True)
    core.departed[conn] = None
    while len(core.departed) > MAX_DEPARTED:
        core.departed.popitem(last=False)


def heartbeat(core: Core, worker: Worker, beat: Heartbeat) -> None:
    """How far its samples came, and which of its leases it holds."""
    if beat.progress != worker.engine.progress:
        worker.engine.progress, worker.engine.moved_at = beat.progress, core.now
    leases, now = worker.leases, core.now
    here = gained = most = context = 0
    ahead, stayed, new = worker.run.settings.max_off_policy_steps > 0, _Stayed(), False
    others: list[Held] = []  # that are not its leases, as far as is known here
    for held in beat.held:
        sample = leases.get(held.sample_id)
        if sample is None or sample.epoch != held.epoch:
            others.append(held)
            continue
        here += 1
        length, reported = held.length, sample.reported
        new = reported <= sample.lease_offset  # by the last beat it had no token of this lease
        if length > reported:  # within a lease it only grows
            budget = sample.group.sampling.max_tokens
            if length > budget:
                length = max(budget, reported)
            worker.engine.moved_at = now
            gain = length - reported
            gained += gain
            if gain > most:
                most = gain
            sample.reported, sample.cached_view = length, None
        else:
            length = reported
        size = len(sample.group.prompt) // 4 + length
        context += size
        if ahead:
            stayed.note(length - reported, size, new)
    if here < len(leases):
        _release_lost(core, worker, beat)
    stale = tuple([(held.sample_id, held.epoch) for held in others if not may_hold(core, worker, held)])
    if stale:
        core.send(worker.conn, Revoke(stale, "the sample moved on"))
    worker.heartbeat.acks += 1
    core.send(worker.conn, HeartbeatAck(core.generation, worker.heartbeat.acks))
    if ahead:
        _measure_stayed(core, worker, gained, stayed)
    else:
        _measure(core, worker, gained, most, context)
    wake_s = min(beat.wake_s, MOST_REPORTED_S)
    if worker.kind == "reserved" and wake_s != worker.memory.wake_s:  # a harvested engine is never woken
        worker.memory.wake_s = wake_s
        worker.run.policy.observe(Toggled(worker.id, True, wake_s), core.now)
    bounded(worker, beat.lease_limit)
    worker.weights.pause_s = min(beat.weights_pause_s, MOST_REPORTED_S)
    _count_speculated(worker, beat)
    _ask_again(core, worker)
    worker_commands.reconcile(core, worker, beat)
    worker_commands.steer(core, worker)


def _count_speculated(worker: Worker, beat: Heartbeat) -> None:
    """What its engine drafted since its last heartbeat is its run's too. An engine's totals never shrink; what says so is not counted."""
    told, before = Speculated(beat.drafted, beat.accepted, beat.verifications), worker.engine.speculated
    if told == before:
        return
    worker.engine.speculated, run = told, worker.run
    if before is None:  # what it did before this daemon heard of it, as after a restart
        return
    run.speculated = Speculated(
        run.speculated.drafted + max(0, told.drafted - before.drafted),
        run.speculated.accepted + max(0, told.accepted - before.accepted),
        run.speculated.verifications + max(0, told.verifications - before.verifications),
    )


def bounded(worker: Worker, lease_limit: int | None) -> None:
    """Its host lets it have so many leases from now on. What it has beyond that it gives back itself."""
    if lease_limit == worker.engine.lease_limit:
        return
    worker.engine.lease_limit, worker.cached_slots = lease_limit, None
    due = worker.run.due
    due.samples = due.recount = due.fleet = True
    due.changed_workers.append(worker)


def _release_lost(core: Core, worker: Worker, beat: Heartbeat) -> None:
    """Release leases that the heartbeat does not name although the worker received what was sent after them: they were lost."""
    named = {(held.sample_id, held.epoch) for held in beat.held}
    for sample in list(worker.leases.values()):
        if (sample.id, sample.epoch) not in named and _assignment_lost(sample, beat):
            samples.release(core, sample, "the assignment was lost")


def _measure(core: Core, worker: Worker, gained: int, most: int, context: int) -> None:
    """The engine's rate since its last heartbeat. `gained`: tokens of all its samples; `most`: of the one that gained most.

    The policy gets a rate only if the batch was constant: no lease changed, the beat was not early, and the mean gain per sample is within
    5 % (or one token) of the largest. An early beat follows a late one: by it an engine would look several times as fast as it is. Samples
    that run gain one token a step each; a lower mean shows that some were prefilled meanwhile, or waited for room in the KV cache.
    """
    unchanged, batch = not worker.heartbeat.leases_changed, len(worker.leases)
    seconds = _beat(core, worker, gained)
    if unchanged and _is_steady(core, worker, batch, gained, most, seconds):
        _tell_pace(core, worker, batch, context - gained / 2, gained, seconds)


def _measure_stayed(core: Core, worker: Worker, gained: int, stayed: _Stayed) -> None:
    """The same with steps in advance, where an engine's leases change from each heartbeat to the next: by the samples that it held
    throughout. After a load of weights all of them come back together, and gain alike, at the pace of their prefill: none stayed.

    `gained`: tokens of all its samples. Batch and context are the mean of the interval's two ends.
    """
    batch = (worker.heartbeat.batch + len(worker.leases)) / 2
    enough = stayed.samples >= STAYED_LEAST * max(worker.heartbeat.batch, len(worker.leases))
    enough = enough and PREFILL_SHARE * stayed.entered <= ENTERING_MOST * stayed.most
    seconds = _beat(core, worker, gained)
    if enough and _is_steady(core, worker, stayed.samples, stayed.gained, stayed.most, seconds):
        each = (stayed.context - stayed.gained / 2) / stayed.samples
        tokens = round(stayed.gained / stayed.samples * batch)
        _tell_pace(core, worker, round(batch), each * batch, tokens, seconds)


@dataclass(slots=True)
class _Stayed:
    """Of a heartbeat, the samples that ran throughout since the one before: how many, their tokens since, the most of one, and their
    context now. `entered`: tokens that those which came since had to be prefilled with, at most."""

    samples: int = 0
    gained: int = 0
    most: int = 0
    context: int = 0
    entered: int = 0

    def note(self, gain: int, size: int, new: bool) -> None:
        """A sample of so many tokens, prompt included, that gained so many."""
        if new:
            self.entered += size - gain
            return
        self.samples += 1
        self.gained += gain
        self.most = max(self.most, gain)
        self.context += size


def _beat(core: Core, worker: Worker, gained: int) -> float:
    """A heartbeat came: seconds since the last one."""
    seconds = core.now - worker.heartbeat.at
    worker.heartbeat.at, worker.heartbeat.leases_changed = core.now, False
    worker.heartbeat.batch = len(worker.leases)
    if seconds > 0:
        worker.engine.tokens_per_s = gained / seconds
    return seconds


def _is_steady(core: Core, worker: Worker, batch: int, gained: int, most: int, seconds: float) -> bool:
    """Whether samples that gained so many tokens together, and so many at most, ran throughout a heartbeat that was not early."""
    return (
        batch > 0
        and gained > 0
        and seconds >= LEAST_BEAT * core.limits.heartbeat_s
        and seconds > 0
        and most * batch - gained <= max(_alike(worker.run) * most, 1.0) * batch
        and most <= MOST_SAMPLE_TOKENS_PER_S * seconds
    )


def _tell_pace(core: Core, worker: Worker, batch: int, context: float, tokens: int, seconds: float) -> None:
    worker.run.policy.observe(
        EngineProgress(
            worker.id, worker.kind, worker.place, worker.gpus, batch, context, tokens, seconds, worker.bounded
        ),
        core.now,
    )


def _alike(run: ActiveRun) -> float:
    """By how much of the largest gain the mean may be less. Samples that run gain a token a step, unless they speculate: then one gains
    what its siblings happen to know of it."""
    return ALIKE if run.engine.speculation == "none" else ALIKE_SPECULATING


def _ask_again(core: Core, worker: Worker) -> None:
    """Repeat a Yield that is older than a heartbeat: the request or its reply was lost. A repeat does no harm."""
    asked = tuple(
        (sample_id, one.epoch)
        for sample_id, one in worker.yielding.items()
        if one.at < core.now - core.limits.heartbeat_s
    )
    if asked:
        core.send_durable(worker.conn, Yield(asked, "asked before"))


def _assignment_lost(sample: Sample, beat: Heartbeat) -> bool:
    """The worker has heard what was sent after this lease, and does not hold it. Time alone proves nothing: a loaded host is slow."""
    return sample.assigned_at is not None and beat.heard > sample.assigned_after


def sample_failed(core: Core, worker: Worker, message: SampleFailed) -> None:
    sample = worker.leases.get(message.sample_id)
    if sample is None or sample.epoch != message.epoch:
        return
    core.connection_event(
        worker, "sample_failed", f"sample {sample.id}", message.reason, worker=worker.id, node=worker.place
    )
    samples.release(core, sample, message.reason, crashed=True)


def gone(
    core: Core, worker: Worker, reason: str, *, crashed: bool, flushed: bool = False, silent: bool = False
) -> None:
    """The worker is dead or has left: every lease of its moves with all tokens that were accepted. `flushed`: nothing else existed.

    `silent`: nothing proves that its process is gone, so a reserved engine may hold its memory until its trainer says otherwise.
    """
    leased = list(worker.leases.values())
    salvaged = sum(s.accepted for s in leased)
    regenerated = 0
    # A sample of the run that borrows slots of it may be what ended it, also for a while after it was told that the loan is over.
    lends = bool(worker.loan.public_key or worker.lends)
    blamed = crashed and not worker.bounded and not lends
    for sample in leased:
        lost = 0 if flushed else samples.lost_tokens(core, sample)
        regenerated += lost
        samples.release(core, sample, reason, regenerated=lost, crashed=blamed)
    core.record(
        rec.WorkerLeft(
            worker.id, reason, worker.departure.notice, len(leased), salvaged, regenerated, core.now
        )
    )
    preempted = worker.status not in LEAVING and not crashed
    worker.run.policy.observe(
        WorkerLost(
            worker.id,
            worker.kind,
            worker.place,
            worker.gpus,
            core.now - worker.joined_at,
            preempted,
            reason,
            len(leased),
            worker.bounded,
        ),
        core.now,
    )
    if worker.process.intent_id and worker.status is not WorkerStatus.AWAY:
        core.lived.append(_life(worker, here=False))
    core.count("workers_lost")
    worker.run.weights.directory.gone(worker.id)
    kv_turns.gone(worker)
    if worker.kind == "reserved":
        worker.run.reserved.memory_changed = True
        if (
            silent
            and worker.memory.state is not GpuMemoryState.ASLEEP
            and worker.attempt in (0, worker.run.attempt)
        ):
            worker.run.reserved.unaccounted[worker_counts.name_of(worker)] = (
                worker.slot,
                worker.process.session,
            )
    worker.transition(WorkerStep.LEAVE)
    worker.run.workers.pop(worker.id, None)
    core.workers.pop(worker.id, None)
    worker.run.due.fleet = True
    disconnect(core, worker)


def leases(core: Core) -> dict[str, tuple[int, float]]:
    """For each harvested engine, by intent: how many samples it generates, and since when it has none (Unix s)."""
    return {
        worker.process.intent_id: (len(worker.leases), worker.idle_since)
        for worker in core.workers.values()
        if worker.process.intent_id
    }


def lives(core: Core) -> list[WorkerLife]:
    """Harvested engines that were heard since this daemon began: those that are gone, the newest of them, and those that are there."""
    here = [
        _life(w, here=True)
        for w in core.workers.values()
        if w.process.intent_id and w.status is not WorkerStatus.AWAY
    ]
    return [*core.lived, *here]


def _life(worker: Worker, *, here: bool) -> WorkerLife:
    return WorkerLife(
        worker.process.intent_id,
        worker.process.incarnation,
        worker.node,
        worker.joined_at,
        worker.last_seen,
        here,
        worker.weights.loads > 0,
        worker.run.id,
        worker.weights.first_at,
    )


def watch(core: Core, worker: Worker) -> None:
    """Time passed: mark a silent worker as suspect, give up one silent for long, retry a load that failed."""
    silent = core.now - worker.last_seen
    limits = core.limits
    if worker.status is WorkerStatus.AWAY:
        if silent > limits.reconnect_s:
            gone(
                core,
                worker,
                f"did not come back within {limits.reconnect_s:g} s of the daemon's restart",
                crashed=False,
                silent=True,
            )
    elif silent > limits.dead_s:
        if worker.slot and worker.leases:  # should its slot be filled again, it did crash
            worker.run.reserved.given_up[worker.slot] = GivenUp(
                worker.attempt, worker.place, tuple(worker.leases)
            )
        gone(core, worker, f"silent for {limits.dead_s:g} s", crashed=False, silent=True)
    elif _stalled(core, worker):
        _give_up_stalled(core, worker)
    elif silent > limits.suspect_s and not worker.suspect:
        worker.suspect = worker.run.due.fleet = True
        core.connection_event(
            worker,
            "worker_suspect",
            f"worker {worker.id}",
            f"silent for {limits.suspect_s:g} s",
            node=worker.place,
        )
    else:
        worker_commands.steer(core, worker)
        worker_commands.more_holders(core, worker)


def _stalled(core: Core, worker: Worker) -> bool:
    """Whether its engine hangs: the process answers, and nothing that it was given has moved for `stalled_s`."""
    if core.now - worker.engine.moved_at <= core.limits.stalled_s:
        return False  # the usual case: each sample of a fleet is not checked four times a second
    given = [s.assigned_at for s in worker.leases.values() if s.assigned_at is not None]
    if not given or worker.suspect:
        return False
    moved = max(
        worker.engine.moved_at,
        min(given),
        *(s.chunk_at for s in worker.leases.values() if s.accepted > s.lease_offset),
    )
    return core.now - moved > core.limits.stalled_s


def _give_up_stalled(core: Core, worker: Worker) -> None:
    """Its samples go elsewhere and count the failure; the worker is asked to leave."""
    reason = f"its engine stalled: nothing moved for {core.limits.stalled_s:g} s"
    held = list(worker.leases.values())
    core.event(
        "engine_stalled",
        worker.run.id,
        f"worker {worker.id}",
        reason,
        node=worker.place,
        samples=len(held),
        progress=worker.engine.progress,
    )
    core.send_durable(worker.conn, Revoke(tuple((s.id, s.epoch) for s in held), reason))
    for sample in held:
        samples.release(core, sample, reason, regenerated=samples.lost_tokens(core, sample), crashed=True)
    worker_commands.drain(core, worker, reason)
