"""What happens to samples: leases granted and ended, chunks accepted or refused, groups completed. Pure.

Holds I1 (accepted tokens only grow, and only under the current lease), I2 (delivered after the commit), I5 (one budget over all leases) and
I6 (nothing is dropped: a lost lease puts the sample back into the queue with all it has). In the order of a sample's life.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from scavenger.ledger import records as rec
from scavenger.policy.interface import SampleFinished
from scavenger.protocol import engine_options
from scavenger.protocol.messages import (
    MAX_SPANS,
    Ack,
    Assign,
    Chunk,
    DoneSample,
    GroupDone,
    Held,
    Lease,
    Revoke,
    RunStopped,
    TurnTokens,
)
from scavenger.router.core import kv_moves, kv_turns, siblings, staleness
from scavenger.router.core.state import ActiveRun, CachedAt, Group, Sample, Turn, Worker
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import IllegalTransition, SampleStatus, SampleStep, WorkerStatus

ASSIGN_BYTES = 4 * 1024 * 1024
#: Of why a sample was given up, as its trainer is told: a group of thousands is one message.
ERROR_CHARS = 400


# ---------------------------------------------------------------- leased


def servable(worker: Worker, version: int) -> bool:
    """Whether a worker may take leases of this version now."""
    return (
        worker.status is WorkerStatus.READY
        and worker.conn is not None
        and not worker.suspect
        and worker.weights.loaded == version
        and worker.weights.asked == version
        and worker.engine.lease_limit != 0  # its host leaves it nothing: it sleeps
    )


def serves_now(worker: Worker, version: int) -> bool:
    """Whether a worker may take leases of what the trainer works at: it has this version, or one that is young enough for the step."""
    run = worker.run
    if worker.weights.switches:
        return False
    if not run.settings.max_off_policy_steps or run.progress.newest[0] != "train":
        return servable(worker, version)
    return servable(worker, worker.weights.loaded) and staleness.may_lease(
        run, run.progress.newest[1], worker.weights.loaded
    )


def serving(run: ActiveRun, version: int) -> list[Worker]:
    """The workers for which `serves_now` holds."""
    return [worker for worker in run.workers.values() if serves_now(worker, version)]


def may_generate(worker: Worker, group: Group) -> bool:
    """Whether a worker may take leases of this group now: it has the group's version, or one that is young enough for its step."""
    if not staleness.is_bounded(group):
        return servable(worker, group.version)
    return servable(worker, worker.weights.loaded) and staleness.may_serve(worker, group)


def lease(core: Core, worker: Worker, samples: Sequence[Sample]) -> None:
    """Lease samples, taken out of the queue before, to a worker. It is sent once it is durable."""
    leases = [_grant(core, sample, worker) for sample in samples]
    for part in _in_messages(leases):
        core.send_filled(worker.conn, Assign(tuple(x for x, _ in part)), tuple(n for _, n in part))


def _in_messages(leases: list[tuple[Lease, int]]) -> Iterator[list[tuple[Lease, int]]]:
    """Leases in lists whose prompts and tokens make messages of a few MB: a hundred long samples would exceed what a peer accepts."""
    part: list[tuple[Lease, int]] = []
    nbytes = 0
    for lease, accepted in leases:
        size = len(lease.prompt) + 4 * accepted + sum(4 * len(text) for text in lease.sampling.stop)
        if part and nbytes + size > ASSIGN_BYTES:
            yield part
            part, nbytes = [], 0
        part.append((lease, accepted))
        nbytes += size
    if part:
        yield part


def _grant(core: Core, sample: Sample, worker: Worker) -> tuple[Lease, int]:
    """The lease, and how many accepted tokens go with it."""
    sample.transition(SampleStep.LEASE)
    group, accepted, now = sample.group, sample.accepted, core.now
    run = group.run
    version = worker.weights.loaded if staleness.is_bounded(group) else group.version
    sample.epoch = epoch = sample.epoch + 1
    sample.moves += accepted > 0
    sample.worker_id = sample.last_worker_id = worker.id
    sample.lease_version, sample.lease_offset = version, accepted
    sample.leased_at = sample.chunk_at = now
    sample.largest_flush = 0
    sample.reported = accepted
    worker.leases[sample.id] = sample
    worker.leases_altered()
    siblings.lease_began(core, sample, worker)
    if group.turn is not None:
        known = group.turn.found_cached.get(sample.index, 0)
        worker.engine.entered += group.turn.prompt_tokens + accepted - known
    else:
        worker.engine.entered += len(group.prompt) // 4 + accepted
    sample.view_changed()
    run.count_lease(group, version, 1)
    sample.assigned_at = None
    core.lease_granted(sample)
    core.record_grant(rec.LeaseGranted(sample.id, epoch, worker.id, version, accepted, now))
    begun = staleness.begun_version(sample, version)
    blocks = kv_moves.source_of(core, sample, version)
    sample.brings_kv = blocks is not None
    lease = Lease(
        sample.id,
        epoch,
        version,
        group.prompt,
        b"",
        group.sampling,
        run.seed,
        sample.key,
        begun,
        blocks,
        kv_turns.leaves(core, sample, worker),
    )
    return lease, accepted


def target_version(run: ActiveRun) -> int:
    """The version that the run's idle workers shall load: the oldest queued one, else the oldest that a step's samples are leased with,
    else the newest. Turns that are leased ask for nothing: one that loses its engine is queued; nor do turns whose version is served.

    With steps in advance, who has nothing left to do for one step begins with the next.
    """
    turns = {version for version in run.turns.queue.versions() if not _is_served(run, version)}
    if run.settings.max_off_policy_steps:
        # What was begun with an older version goes on with any that is young enough: only a turn needs its own.
        held = [version for version in turns if run.weights.available(version)]
        return min([*held, max(run.weights.versions, default=-1)])
    of_steps = {version for version, n in run.leased.items() if n > run.turns.leased.get(version, 0)}
    for wanted in (run.queue.versions() | turns, of_steps):
        held = [version for version in wanted if run.weights.available(version)]
        if held:
            return min(held)
    return max(run.weights.versions, default=-1)


def _is_served(run: ActiveRun, version: int) -> bool:
    """Whether a worker that has other leases takes them as those end; an idle one is to stay for them."""
    return any(worker.leases and servable(worker, version) for worker in run.workers.values())


def queued_version(run: ActiveRun) -> int:
    """The version under which samples wait that may be leased now."""
    if run.settings.max_off_policy_steps:
        return max(run.weights.versions, default=-1)
    return target_version(run)


# ---------------------------------------------------------------- chunks


class Fault(NamedTuple):
    """Why a chunk cannot be accepted. `engine`: an engine made it wrong; a gap or a late chunk is no engine's fault."""

    reason: str
    engine: bool = False


def chunk_fault(chunk: Chunk, sample: Sample | None, worker: Worker) -> Fault | None:
    """Why a chunk cannot be accepted, or None. The first reason in the order of I1; looks at lengths, never at tokens."""
    if sample is None:
        return Fault("unknown sample")
    if sample.status is not SampleStatus.LEASED or sample.worker_id != worker.id:
        return Fault("no lease: the sample moved on")
    if chunk.epoch != sample.epoch:
        return Fault(f"stale epoch {chunk.epoch}, the lease is {sample.epoch}")
    if chunk.version != sample.lease_version:
        return Fault(f"weight version {chunk.version}, the lease names {sample.lease_version}")
    offset, nbytes, last = chunk.offset, len(chunk.tokens), chunk.finish
    if nbytes % 4 or offset < 0 or not nbytes == len(chunk.logprobs) == len(chunk.raw_logprobs):
        return Fault("malformed payload", engine=True)
    width = sample.group.run.engine.routing
    if len(chunk.routing) != nbytes // 4 * width:
        return Fault(f"routing of {len(chunk.routing)} bytes, {width} a token are due", engine=True)
    if offset > sample.accepted:
        return Fault(f"gap: offset {offset}, accepted {sample.accepted}")
    finish_alone = last is not None and 0 < offset == sample.accepted  # all its tokens are here already
    if not nbytes and not finish_alone:
        return Fault("no tokens", engine=True)
    budget, end = sample.group.sampling.max_tokens, offset + nbytes // 4
    if end > budget:
        return Fault(f"over the budget of {budget} tokens", engine=True)
    if last is None or last == "stop":
        return None
    if last != "length":
        return Fault(f"unknown finish {last[:20]!r}", engine=True)
    return (
        Fault(f"finish 'length' below the budget of {budget} tokens", engine=True) if end < budget else None
    )


def accept_chunk(core: Core, worker: Worker, chunk: Chunk, flaw: str = "") -> None:
    """Take a chunk, or refuse it with its reason; an exact resend changes nothing, a differing one ends the lease.

    `flaw`: what its values are found to be wrong in (the pipeline's `checked`); an engine made it so.
    """
    sample = core.samples.get(chunk.sample_id)
    fault = chunk_fault(chunk, sample, worker)
    if fault is None and flaw:
        fault = Fault(flaw, engine=True)
    if fault is not None:
        refuse_chunk(core, worker, chunk, sample, fault)
        return
    assert sample is not None
    if chunk.offset < sample.accepted:
        rest = _resent(core, worker, sample, chunk)
        if rest is None:
            return
        chunk = rest
    if chunk.tokens:
        _append(core, worker, sample, chunk)
    elif chunk.finish is None:
        core.send(
            worker.conn, Ack((Held(sample.id, sample.epoch, sample.durable),))
        )  # a resend: the ack was lost
    if chunk.finish is not None:
        finish(core, sample, chunk.finish)
    elif sample.accepted == sample.group.sampling.max_tokens:
        finish(core, sample, "length")


def overlaps(core: Core, conn: int, chunks: Sequence[Chunk]) -> list[tuple[int, int, int]]:
    """Where `accept_chunk` will compare a chunk with what was accepted: (sample, offset, accepted length)."""
    worker = core.by_conn.get(conn)
    if worker is None:
        return []
    found, samples = [], core.samples
    for chunk in chunks:
        sample = samples.get(chunk.sample_id)
        if (
            sample is not None
            and 0 <= chunk.offset < sample.accepted
            and chunk.epoch == sample.epoch
            and sample.worker_id == worker.id
        ):
            found.append((sample.id, chunk.offset, sample.accepted))
    return found


def _resent(core: Core, worker: Worker, sample: Sample, chunk: Chunk) -> Chunk | None:
    """What is new of a chunk that begins below the accepted length; None when it differs, which ends the lease.

    It differs too when it ends the sample before what followed.
    """
    known = min(sample.accepted - chunk.offset, len(chunk.tokens) // 4)
    cut_short = chunk.finish is not None and chunk.offset + known < sample.accepted
    if cut_short or not core.payloads.same(sample.id, chunk, known):
        why = "a resend differs from what was accepted"
        core.connection_event(worker, "resend_differs", f"sample {sample.id}", why, offset=chunk.offset)
        core.send(worker.conn, Revoke(((sample.id, sample.epoch),), why))
        release(core, sample, "resend differs", crashed=True)
        return None
    new = 4 * known
    return Chunk(
        chunk.sample_id,
        chunk.epoch,
        sample.accepted,
        chunk.version,
        chunk.tokens[new:],
        chunk.logprobs[new:],
        chunk.raw_logprobs[new:],
        chunk.finish,
        chunk.routing[known * sample.group.run.engine.routing :],
    )


def _append(core: Core, worker: Worker, sample: Sample, chunk: Chunk) -> None:
    length = len(chunk.tokens) // 4
    worker.engine.entered += length
    if sample.accepted == sample.lease_offset:
        if sample.group.run.engine.move_kv:
            kv_moves.note_prefill(core, sample)
        if sample.group.turn is not None and not sample.brings_kv:
            _note_prefill(core, sample, sample.group.turn)
    core.payloads.append(sample.id, chunk.offset, chunk)
    sample.accepted += length
    siblings.grew(core, sample, chunk.offset)
    if worker.kind == "reserved":
        sample.by_reserved += length
    else:
        sample.by_harvested += length
    note_span(sample.spans, worker.id, length)
    if staleness.is_bounded(sample.group):
        staleness.note(sample, chunk.version, length)
    sample.view_changed()
    sample.chunk_at = core.now
    if length > sample.largest_flush:
        sample.largest_flush = length
    core.record(
        rec.ChunkAccepted(
            sample.id,
            chunk.epoch,
            chunk.offset,
            chunk.tokens,
            chunk.logprobs,
            chunk.raw_logprobs,
            chunk.version,
            worker.id,
            core.now,
            chunk.routing,
        )
    )
    core.length_accepted(sample)
    core.count("tokens_accepted", length)
    if (turn := sample.group.turn) is not None and (read := turn.hashes.get(sample.index)) is not None:
        turn.episode.prefixes.add(sample.id, read.grow(chunk.tokens))


def _note_prefill(core: Core, sample: Sample, turn: Turn) -> None:
    """The first tokens of a lease came: its context was prefilled, but for what was cached. A flush waits for some of them."""
    if sample.assigned_at is not None:
        tokens = turn.prompt_tokens + sample.lease_offset - turn.found_cached.get(sample.index, 0)
        seconds = core.now - sample.assigned_at - core.limits.flush_ms / 1000
        sample.group.run.turns.speeds.prefilled(tokens, seconds)


def note_span(spans: list[tuple[int, int]], worker_id: int, tokens: int) -> None:
    """The sample has so many more tokens, and this worker generated them."""
    if spans and spans[-1][0] == worker_id:
        tokens += spans.pop()[1]
    spans.append((worker_id, tokens))


def refuse_chunk(core: Core, worker: Worker, chunk: Chunk, sample: Sample | None, fault: Fault) -> None:
    """Record why, revoke the sample and, if this worker holds its lease, queue it again. A completed sample's last worker only gets its
    ack again.
    """
    done = sample is not None and sample.status is SampleStatus.COMPLETE and sample.epoch == chunk.epoch
    if sample is not None and done and sample.last_worker_id == worker.id:
        core.send(
            worker.conn, Ack((Held(sample.id, sample.epoch, sample.durable),))
        )  # a resend of what is complete
        return
    worker.refused_chunks += 1
    detail = {
        "worker": worker.id,
        "epoch": chunk.epoch,
        "offset": chunk.offset,
        "refused_so_far": worker.refused_chunks,
    }
    core.connection_event(worker, "chunk_refused", f"sample {chunk.sample_id}", fault.reason, **detail)
    core.send(worker.conn, Revoke(((chunk.sample_id, chunk.epoch),), fault.reason))
    mine = sample is not None and sample.worker_id == worker.id and sample.epoch == chunk.epoch
    if sample is not None and mine and sample.status is SampleStatus.LEASED:
        release(core, sample, f"chunk refused: {fault.reason}", crashed=fault.engine)


# ---------------------------------------------------------------- finished


def finish(core: Core, sample: Sample, reason: str) -> None:
    """The sample has its last token."""
    sample.transition(SampleStep.FINISH)
    sample.finish = reason
    core.record(rec.SampleFinished(sample.id, reason, sample.accepted, core.now))
    if sample.group.turn is not None:
        _note_sequence(core, sample, sample.group.turn)
    _notify_finished(core, sample)
    if sample.worker_id:
        _end_lease(core, sample, "finished", 0)
    core.length_accepted(sample)


def _note_sequence(core: Core, sample: Sample, turn: Turn) -> None:
    """The episode's next prompts may begin with this sample's prompt and completion, which its engine has cached if it keeps prefixes."""
    worker, engine = core.workers.get(sample.worker_id), sample.group.run.engine
    if worker is not None and engine_options.keeps_prefixes(engine.name, engine.options):
        turn.cached_at[sample.index] = CachedAt(worker.id, worker.cache_era, worker.engine.entered)
    speeds = sample.group.run.turns.speeds
    if worker is not None:
        entered = turn.prompt_tokens + sample.lease_offset - turn.found_cached.get(sample.index, 0)
        made, seconds = sample.accepted - sample.lease_offset, core.now - sample.leased_at
        worker.engine.turn_token_s = speeds.paced(worker.engine.turn_token_s, made, seconds, entered)
    speeds.completed(sample.accepted)
    read = turn.hashes.pop(sample.index, None)
    if read is not None:
        end = read.end()
        turn.ends[sample.index] = end.digest
        turn.episode.prefixes.add(sample.id, (end,))
        core.record(rec.TurnSampleFinished(sample.id, end.digest))


def _notify_finished(core: Core, sample: Sample) -> None:
    if sample.group.turn is not None:
        return  # a policy forecasts the lengths of steps
    group, worker = sample.group, core.workers.get(sample.worker_id)
    kind, node = (worker.kind, worker.place) if worker is not None else ("", "")
    group.run.policy.observe(
        SampleFinished(
            sample.id,
            group.id,
            group.step,
            sample.accepted,
            len(group.prompt) // 4,
            sample.finish == "length",
            sample.worker_id,
            kind,
            node,
        ),
        core.now,
    )


# ---------------------------------------------------------------- its lease ends


def _end_lease(core: Core, sample: Sample, reason: str, regenerated: int) -> None:
    worker = core.workers.get(sample.worker_id)
    sample.group.run.count_lease(sample.group, sample.lease_version, -1)
    if worker is not None:
        worker.leases.pop(sample.id, None)
        worker.yielding.pop(sample.id, None)
        worker.leases_altered()
        if not worker.leases:
            worker.idle_since = core.now
            sample.group.run.due.idle_workers.append(worker)
    siblings.lease_ended(core, sample, sample.worker_id)
    sample.regenerated += regenerated
    core.record_end(rec.LeaseEnded(sample.id, sample.epoch, reason, sample.accepted, regenerated, core.now))
    sample.worker_id = 0
    sample.view_changed()


def lost_tokens(core: Core, sample: Sample) -> int:
    """At most how many tokens of the sample died with its worker: what the last heartbeat named, or else one flush.

    What a killed worker had generated since its last flush cannot be known; a flush interval holds no more than the largest flush of this
    lease did, at a steady rate.
    """
    flush, most = sample.largest_flush, core.limits.flush_tokens
    if flush > most:
        flush = most
    unheard = sample.reported - sample.accepted
    return (
        flush
        if unheard <= flush
        else max(flush, min(sample.reported, sample.group.sampling.max_tokens) - sample.accepted)
    )


def release(core: Core, sample: Sample, reason: str, *, regenerated: int = 0, crashed: bool = False) -> None:
    """End a lease and queue the sample again with all its tokens. A sample that killed too many engines is poisoned instead.

    What fails beside a service says nothing of the sample: memory is short there, and whoever has a guest's key could end the run by it.
    """
    worker = core.workers.get(sample.worker_id)
    sample.transition(SampleStep.RELEASE)
    if worker is not None:
        _end_lease(core, sample, reason, regenerated)
    if crashed and worker is not None:
        if worker.bounded:
            worker.run.failed_beside(worker, reason)
        elif charge(core, sample, core.life_of(worker)[1]):
            poison(core, sample, reason)
            return
    sample.queue.add(sample)


def charge(core: Core, sample: Sample, node: str) -> bool:
    """Count an engine's death on `node` against the sample that it held; True when these were too many."""
    sample.failures += 1
    sample.failed_nodes |= {node}
    sample.view_changed()
    enough = sample.group.run.settings.poison_after
    # A site of one node could never reach `poison_after` different ones.
    return len(sample.failed_nodes) >= enough or sample.failures >= 3 * enough


# ---------------------------------------------------------------- durable, delivered


def confirm_durable(core: Core, lengths: list[tuple[Sample, int]]) -> None:
    """A commit made these lengths durable: acknowledge them to the holders, deliver groups that are whole now."""
    acks: dict[int, dict[int, Held]] = {}
    groups: dict[int, Group] = {}
    of_turns: dict[int, tuple[Sample, int]] = {}  # each with the length that was durable before
    for sample, length in lengths:
        before = sample.durable
        if length > before:
            sample.durable = length
            core.payloads.durable(sample.id, length)
        if sample.group.turn is None:
            groups[sample.group.id] = sample.group
        else:
            of_turns.setdefault(sample.id, (sample, before))
        worker = core.workers.get(sample.last_worker_id)
        if worker is not None and worker.conn is not None:
            acks.setdefault(worker.conn, {})[sample.id] = Held(sample.id, sample.epoch, sample.durable)
    for conn, held in acks.items():
        core.send(conn, Ack(tuple(held.values())))
    for sample, before in of_turns.values():
        stream(core, sample, before)
        settle(sample.group)
    for group in groups.values():
        deliver_if_done(core, group)


def deliver_if_done(core: Core, group: Group) -> None:
    """Send a whole, durable group to the trainer (I2); once to each attempt and connection."""
    run = group.run
    if (
        group.turn is not None
        or group.orphaned
        or group.delivered_to == run.attempt
        or run.trainer.conn is None
        or not (group.done and group.durable)
    ):
        return
    if core.groups.get(group.id) is not group:
        return
    if found := staleness.trained_beyond(group):
        raise IllegalTransition(f"group {group.id} is whole and may not be trained: {found}")
    group.delivered_to = run.attempt
    core.record(rec.GroupDelivered(group.id, run.attempt, core.now))
    samples = tuple(
        DoneSample(
            s.id,
            s.index,
            b"",
            b"",
            b"",
            s.finish,
            s.moves,
            s.reward,
            s.error and s.error[:ERROR_CHARS],
            s.reward_version,
            s.by_reserved,
            s.by_harvested,
            s.regenerated,
            tuple(s.spans) if len(s.spans) <= MAX_SPANS else (),
            b"",
            staleness.told(group, s),
        )
        for s in group.samples
    )
    done = GroupDone(
        group.id,
        group.step,
        group.version,
        group.purpose,
        group.prompt_index,
        group.prompt,
        group.meta,
        samples,
    )
    core.send_filled(run.trainer.conn, done, tuple(s.accepted for s in group.samples))


def stream(core: Core, sample: Sample, start: int, conn: int | None = None) -> None:
    """Send what is durable of a turn's sample, from token `start` on, to those who follow it, or to `conn` alone."""
    group = sample.group
    if group.turn is None or core.groups.get(group.id) is not group:
        return
    whole = sample.status is SampleStatus.COMPLETE and sample.durable == sample.accepted
    error = None if sample.error is None else sample.error[:ERROR_CHARS]
    if sample.durable <= start and not whole and error is None:
        return
    message = TurnTokens(
        group.turn.request,
        sample.id,
        sample.index,
        start,
        b"",
        b"",
        b"",
        group.version,
        sample.finish if whole else "",
        error,
    )
    for one in group.turn.followers if conn is None else (conn,):
        core.send_tokens(one, message, sample.durable)


def settle(group: Group) -> None:
    """A turn whose samples are done and durable needs no engine, and its prompt is in the ledger."""
    if group.done and group.durable and group.run.turns.open.pop(group.id, None) is not None:
        group.prompt = b""
        if group.turn is not None:
            group.turn.hashes.clear()
        for sample in group.samples:
            sample.view_changed()


# ---------------------------------------------------------------- given up


def poison(core: Core, sample: Sample, reason: str) -> None:
    """Give a sample up: the run stops with its id, or the sample is masked and counted (`on_poison`)."""
    run = sample.group.run
    cause = f"sample {sample.id} failed {sample.failures} times on {len(sample.failed_nodes)} node(s), last: {reason}"
    abandon(core, sample, "poisoned", cause)
    sample.give_up(cause)
    core.event("sample_poisoned", run.id, f"sample {sample.id}", cause)
    if sample.group.turn is not None:  # its caller is told, and the run goes on
        stream(core, sample, sample.durable)
        settle(sample.group)
    elif run.settings.on_poison == "stop":
        if run.stopped:
            return  # its trainer was told of the first
        stop_run(sample, cause)
        core.send_durable(run.trainer.conn, RunStopped(run.stopped, run.stop_remedy))
    else:
        deliver_if_done(core, sample.group)


def stop_run(sample: Sample, cause: str) -> None:
    """The run cannot go on, and says why and what to do to every trainer that attaches."""
    run = sample.group.run
    run.stopped = cause or f"sample {sample.id} is poisoned"
    run.stop_remedy = f'look at it: scavenger samples {run.name} --step {sample.group.step}; on_poison = "mask" goes on without it'


def abandon(core: Core, sample: Sample, end: str, reason: str) -> None:
    """End a sample that no trainer will consume; its worker, if any, drops it. `end`: the ledger's word for how it ended."""
    sample.transition(SampleStep.ABANDON)
    worker = core.workers.get(sample.worker_id)
    if worker is not None:
        core.send_durable(
            worker.conn, Revoke(((sample.id, sample.epoch),), reason)
        )  # behind the lease's own Assign
        _end_lease(core, sample, end, 0)
    sample.queue.discard(sample)
    core.record(
        rec.SampleEnded(
            sample_id=sample.id,
            state=end,
            reason=reason,
            step=0,
            attempt=sample.group.run.attempt
            if end == "poisoned"
            else 0,  # it stops this attempt, and none after it
            reward=sample.reward,
            advantage=None,
            at=core.now,
            reward_version=sample.reward_version,
        )
    )


def supersede(core: Core, group: Group, reason: str) -> None:
    """The group's prompt is generated again: what exists of it is recorded and forgotten."""
    for sample in group.samples:
        if sample.status is not SampleStatus.ENDED:
            abandon(core, sample, "superseded", reason)
        elif sample.error is None:
            core.record(
                rec.SampleEnded(
                    sample.id,
                    "superseded",
                    reason,
                    0,
                    0,
                    sample.reward,
                    None,
                    core.now,
                    sample.reward_version,
                )
            )
    group.run.retries[group.key] = group.retry + 1
    forget(core, group)


def forget(core: Core, group: Group) -> None:
    if group.turn is not None:
        kv_turns.over(core, group)
    for sample in group.samples:
        core.samples.pop(sample.id, None)
        core.payloads.drop(sample.id)
    group.samples.clear()  # they name each other: freed now, and not when the collector stops the daemon to look for them
    core.groups.pop(group.id, None)
    group.run.turns.open.pop(group.id, None)
    if group.run.by_key.get(group.key) is group:
        del group.run.by_key[group.key]
