"""The KV blocks that samples take along when they move (`engine.move_kv`): who keeps them, and whether the next lease names them. Pure.

    KvKept  --offered-->  `Sample.kv`  --the next lease of it-->  `Lease.kv`, where `policy.kv.decide` says so; else nothing, and it is
                                                                  prefilled. An offer serves one lease.
    KvTried --tried-->    what the transfer took, for the next decisions; or why the engine prefilled after all

What finished turns left is offered in the same way to the turns behind them: `kv_turns`.

An offer is a hint and is not durable: the engine that reads the blocks verifies them. Who left keeps them for `LEFT_S`.

Owns `Sample.kv` and `ActiveRun.kv`. Knows lengths and no token.
"""

from __future__ import annotations

import math

from scavenger.policy import kv
from scavenger.protocol.messages import KvKept, KvSource, KvTried
from scavenger.router.core import decision_log, kv_turns
from scavenger.router.core.state import KvOffered, KvUnderWay, Sample, Worker
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import SampleStatus
from scavenger.weights.directory import refused

#: Seconds after an offer for which an engine that has left is believed to be there still.
LEFT_S = 0.4
#: A transfer that is reported as longer counts as this long.
MOST_REPORTED_S = 3600.0
#: An engine that says nothing of a lease's blocks for so long will say nothing more: it is gone, or the sample is over.
SILENT_S = 60.0
#: Of the time for which blocks are waited for: who waited so long waited all of it.
NEARLY = 0.99


def offered(core: Core, worker: Worker, message: KvKept) -> None:
    """A worker keeps the blocks of leases that it is about to give back. Nobody is sent to a guest, nor anywhere in the clear."""
    run = worker.run
    if not run.engine.move_kv or worker.bounded or refused(message.source, True):
        return
    unwanted = []
    for one in message.offers:
        sample = worker.leases.get(one.sample_id)
        if sample is None or sample.epoch != one.epoch or sample.status is not SampleStatus.LEASED:
            if not kv_turns.kept(core, worker, message.source, one):
                unwanted.append(one.number)
            continue
        sample.kv = KvOffered(
            worker.id,
            message.source,
            one.number,
            one.tokens,
            one.token_nbytes,
            sample.lease_version,
            core.now,
        )
        run.kv.offered += 1
    kv_turns.drop(core, worker, unwanted)


def source_of(core: Core, sample: Sample, version: int) -> KvSource | None:
    """Where a lease of this version finds the blocks of all its sample's tokens but the last, or of those that its turn's prompt begins
    with; None: they are to be prefilled."""
    own = _own(core, sample, version)
    before = (0, own) if own is not None else kv_turns.prefix_of(core, sample, version)
    if before is None:
        return None
    (of, offer), run = before, sample.group.run
    stays_s = math.inf if offer.worker_id in core.workers else LEFT_S - (core.now - offer.at)
    holder, ahead = offer.source.server_key, _ahead(core, sample, offer.source.server_key)
    decided = kv.decide(offer.tokens, offer.token_nbytes, run.kv.rates, ahead, stays_s)
    decision_log.kv_moved(core, run, sample.id, decided)
    if not decided.take:
        run.kv.prefilled += 1
        return None
    here = offer.worker_id == sample.worker_id
    way = KvUnderWay(
        holder, sample.worker_id, decided.nbytes, ahead, core.now, decided.within_s, here, of, offer.number
    )
    run.kv.under_way[sample.id] = way
    return KvSource(offer.source, offer.number, offer.tokens, decided.within_s)


def _own(core: Core, sample: Sample, version: int) -> KvOffered | None:
    """What the engine of its last lease keeps; served once."""
    offer, sample.kv = sample.kv, None
    if offer is None:
        return None
    cached = len(sample.group.prompt) // 4 + sample.accepted - 1
    left = offer.worker_id not in core.workers and core.now - offer.at > LEFT_S
    if offer.tokens != cached or offer.version != version or left:
        sample.group.run.kv.gone += 1
        return None
    return offer


def _ahead(core: Core, sample: Sample, holder: str) -> int:
    """Bytes that are on their way from the same holder or to the same reader, whichever are more."""
    under_way = sample.group.run.kv.under_way
    for sample_id in [other for other, one in under_way.items() if core.now >= one.at + SILENT_S]:
        del under_way[sample_id]
    under_way.pop(sample.id, None)
    awaited = [one for one in under_way.values() if core.now < one.at + one.within_s]
    from_it = sum(one.nbytes for one in awaited if one.holder == holder)
    to_it = sum(one.nbytes for one in awaited if one.reader_id == sample.worker_id)
    return max(from_it, to_it)


def tried(core: Core, worker: Worker, message: KvTried) -> None:
    """What came of the blocks that a lease named, by its engine's word."""
    sample, moves = worker.leases.get(message.sample_id), worker.run.kv
    seconds = min(message.seconds, MOST_REPORTED_S)
    if sample is None or sample.epoch != message.epoch or not sample.brings_kv:
        kv_turns.fetched(core, worker, message, seconds)
        return
    way = moves.under_way.pop(message.sample_id, None)
    # It waited for those before it, or shared the way with them.
    nbytes = message.nbytes + (way.ahead if way is not None else 0)
    if message.fault:
        moves.refused += 1
        if way is not None and way.of:
            kv_turns.not_there(core, worker.run, way.of, way.number)
        # Blocks that did not come in time would have taken longer still; a fault that showed sooner says nothing of the way.
        if way is not None and NEARLY * way.within_s <= seconds > moves.rates.transfer_s(nbytes):
            moves.rates.transfers.note(nbytes, seconds)
        core.connection_event(
            worker,
            "kv_refused",
            f"sample {sample.id}",
            message.fault,
            worker=worker.id,
            tokens=message.tokens,
        )
        return
    if way is None or not way.is_here:
        moves.rates.transfers.note(nbytes, seconds)
    moves.moved += 1
    moves.tokens += message.tokens
    moves.nbytes += message.nbytes
    moves.seconds += seconds


def note_prefill(core: Core, sample: Sample) -> None:
    """The first tokens of a lease that named no blocks came: its context was prefilled. A flush waits for some; not for a turn's."""
    if sample.assigned_at is None or sample.brings_kv:
        return
    flush_s = core.limits.flush_ms / 1000 if sample.group.turn is None else 0.0
    seconds = core.now - sample.assigned_at - flush_s
    sample.group.run.kv.rates.prefills.note(
        len(sample.group.prompt) // 4 + sample.lease_offset, min(seconds, MOST_REPORTED_S)
    )
