"""The KV blocks that finished turns of an episode left, for the turns behind them (`engine.move_kv`). Pure.

    a turn is leased       leaves       its engine is told to keep its blocks, where they are predicted to come sooner than a prefill
    KvKept                 kept         `KvMoves.turns` says who keeps them; for each engine bounded, the least valuable first out
    the next turn's lease  prefix_of    names the nearest turn before it whose blocks an engine keeps, all of which its prompt begins with
    their keeper leaves    handed_over  FetchKv to engines that stay, the most valuable first, as far as is predicted to come in time
    the episode ends       over         DropKv: nobody will want them

All of it is a hint, in memory alone: the engine that loads blocks knows the tokens of its own prompt, and compares them.

Owns `KvMoves.turns` and `KvMoves.handed`. Knows lengths and no token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from scavenger.policy import kv
from scavenger.policy.kv import KeptTurn
from scavenger.protocol import engine_options
from scavenger.protocol.kv import TURNS_NBYTES
from scavenger.protocol.messages import (
    MAX_KV_OFFERS,
    DropKv,
    FetchKv,
    KvOffer,
    KvSource,
    KvTried,
    WeightSource,
)
from scavenger.router.core import decision_log
from scavenger.router.core.state import (
    ActiveRun,
    Group,
    KvHandedOver,
    KvMoves,
    KvOffered,
    Sample,
    Worker,
    ancestors,
)
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import SampleStatus, WorkerStatus

#: Of the bound on what an engine keeps of turns: what stays where there is more.
ROOM = 7 / 8


def leaves(core: Core, sample: Sample, worker: Worker) -> bool:
    """Whether the engine that a sample is leased to is to keep its blocks once it is finished. Nobody reads from a guest."""
    run, turn = sample.group.run, sample.group.turn
    if (
        turn is None
        or not run.engine.move_kv
        or worker.bounded
        or not engine_options.leaves_kv(run.engine.name, worker.gpus)
    ):
        return False
    tokens = turn.prompt_tokens + max(sample.accepted, round(run.turns.speeds.completion))
    decided = kv.keep_turn(tokens, run.kv.token_nbytes, run.kv.rates)
    if decided.take != run.kv.keeps_turns:
        run.kv.keeps_turns = decided.take
        decision_log.turns_kept(core, run, decided)
    return decided.take


def kept(core: Core, worker: Worker, source: WeightSource, one: KvOffer) -> bool:
    """A worker keeps the blocks of a turn that it finished, or that it was told to fetch. False: nobody will want them."""
    run, sample = worker.run, core.samples.get(one.sample_id)
    if sample is None or sample.group.run is not run or sample.status is not SampleStatus.COMPLETE:
        return False
    turn, handed = sample.group.turn, run.kv.handed.get(sample.id)
    fetched = handed is not None and handed.worker_id == worker.id
    if turn is None or sample.epoch != one.epoch or not (fetched or sample.last_worker_id == worker.id):
        return False
    if (
        one.tokens != turn.prompt_tokens + sample.accepted - 1
        or sample.lease_version != worker.weights.loaded
    ):
        return False
    if fetched:
        del run.kv.handed[sample.id]
        run.kv.turns_handed += 1
    _forget(core, run, sample.id)
    run.kv.turns[sample.id] = KvOffered(
        worker.id, source, one.number, one.tokens, one.token_nbytes, sample.lease_version, core.now
    )
    run.kv.turns_nbytes[worker.id] += one.tokens * one.token_nbytes
    run.kv.token_nbytes = one.token_nbytes
    run.kv.turns_kept += 1
    _within_bounds(core, worker)
    return True


def _within_bounds(core: Core, worker: Worker) -> None:
    """An engine keeps so much of turns at most. What goes makes room for several, so that few of them have to be compared."""
    moves = worker.run.kv
    if moves.turns_nbytes[worker.id] <= TURNS_NBYTES:
        return
    for one in reversed(kv.by_value(_kept_by(core, worker), moves.rates)):
        if moves.turns_nbytes[worker.id] <= ROOM * TURNS_NBYTES:
            return
        _forget(core, worker.run, one.sample_id)


def _kept_by(core: Core, worker: Worker) -> list[KeptTurn]:
    """What an engine keeps of turns. One is superseded where a turn behind it, or behind another choice of it, left its own."""
    turns = worker.run.kv.turns
    passed: set[int] = set()  # groups behind which something is kept
    for sample_id in turns:
        turn = core.samples[sample_id].group.turn
        assert turn is not None
        for sample, _ in ancestors(core.samples, turn):
            if sample.group.id in passed:
                break
            passed.add(sample.group.id)
    return [
        KeptTurn(
            sample_id,
            offer.tokens,
            offer.tokens * offer.token_nbytes,
            offer.at,
            core.samples[sample_id].group.id in passed,
        )
        for sample_id, offer in turns.items()
        if offer.worker_id == worker.id
    ]


def prefix_of(core: Core, sample: Sample, version: int) -> tuple[int, KvOffered] | None:
    """The nearest turn before a sample's whose blocks an engine keeps, made by `version`, all of which the sample begins with; None: there
    is none, or its own engine is believed to have as much in its cache."""
    turn, run = sample.group.turn, sample.group.run
    if turn is None or not run.kv.turns:
        return None
    for before, length in ancestors(core.samples, turn):
        offer = run.kv.turns.get(before.id)
        if offer is None or offer.version != version or offer.tokens > min(length, turn.prompt_tokens - 1):
            continue
        keeper = core.workers.get(offer.worker_id)
        if keeper is None or keeper.weights.loaded != version:
            continue
        known = turn.found_cached.get(sample.index, 0)
        return (before.id, offer) if known < offer.tokens else None
    return None


def fetched(core: Core, worker: Worker, message: KvTried, seconds: float) -> None:
    """What came of blocks that a worker was told to fetch, in `seconds`. Behind it comes that it keeps them, if it does."""
    run = worker.run
    handed = run.kv.handed.get(message.sample_id)
    if handed is None or handed.worker_id != worker.id:
        return
    if not message.fault:
        run.kv.rates.transfers.note(message.nbytes + handed.ahead, seconds)
        return
    del run.kv.handed[message.sample_id]
    core.connection_event(
        worker,
        "kv_refused",
        f"sample {message.sample_id}",
        message.fault,
        worker=worker.id,
        tokens=message.tokens,
    )


def not_there(core: Core, run: ActiveRun, sample_id: int, number: int) -> None:
    """A reader did not find what a turn left, or not just that: nobody is sent there again."""
    offer = run.kv.turns.get(sample_id)
    if offer is not None and offer.number == number:
        _forget(core, run, sample_id)


def handed_over(core: Core, worker: Worker, stays_s: float) -> tuple[int, ...]:
    """A worker leaves, and is there for `stays_s` yet: have engines that stay fetch what it keeps of turns. The numbers of these."""
    run = worker.run
    some = kv.by_value(_kept_by(core, worker), run.kv.rates)
    takers = {
        other.id: run.kv.turns_nbytes[other.id]
        for other in run.workers.values()
        if other is not worker and _may_take(other, worker)
    }
    numbers: list[int] = []
    ahead, reason = 0, "no other engine has its weights"
    for one in some[:MAX_KV_OFFERS] if takers else ():
        offer, taker_id = run.kv.turns[one.sample_id], min(takers, key=lambda other: (takers[other], other))
        decided = kv.decide(one.tokens, offer.token_nbytes, run.kv.rates, ahead, stays_s)
        reason = decided.reason
        if one.superseded or not decided.take or takers[taker_id] + one.nbytes > TURNS_NBYTES:
            continue
        order = KvSource(offer.source, offer.number, offer.tokens, stays_s)  # nobody waits for it
        core.send(
            core.workers[taker_id].conn, FetchKv(one.sample_id, core.samples[one.sample_id].epoch, order)
        )
        run.kv.handed[one.sample_id] = KvHandedOver(taker_id, core.now, ahead)
        numbers.append(offer.number)
        takers[taker_id] += one.nbytes
        ahead += one.nbytes
    if some:
        decision_log.turns_handed_over(core, run, worker.id, len(some), len(numbers), ahead, reason)
    return tuple(numbers)


def _may_take(other: Worker, leaving: Worker) -> bool:
    version = leaving.weights.loaded
    return (
        other.status is WorkerStatus.READY
        and other.conn is not None
        and not other.suspect
        and not other.bounded
        and other.weights.loaded == version == other.weights.asked
    )


def gone(worker: Worker, version: int | None = None) -> None:
    """A worker is gone, and what it keeps with it; or it has loaded this version, and let go of what others made."""
    moves = worker.run.kv
    for sample_id in [s for s, offer in moves.turns.items() if offer.worker_id == worker.id]:
        if moves.turns[sample_id].version != version:
            _pop(moves, sample_id)
    if version is None:
        del moves.turns_nbytes[worker.id]
        for sample_id in [s for s, handed in moves.handed.items() if handed.worker_id == worker.id]:
            del moves.handed[sample_id]


def over(core: Core, group: Group) -> None:
    """No turn will go on from this one: its episode has ended, or it was given up."""
    for sample in group.samples:
        group.run.kv.handed.pop(sample.id, None)
        _forget(core, group.run, sample.id)


def _forget(core: Core, run: ActiveRun, sample_id: int) -> None:
    offer = _pop(run.kv, sample_id)
    if offer is not None:
        drop(core, core.workers.get(offer.worker_id), (offer.number,))


def _pop(moves: KvMoves, sample_id: int) -> KvOffered | None:
    offer = moves.turns.pop(sample_id, None)
    if offer is not None:
        moves.turns_nbytes[offer.worker_id] -= offer.tokens * offer.token_nbytes
    return offer


def drop(core: Core, worker: Worker | None, numbers: Sequence[int]) -> None:
    """Tell a worker that nobody will want these."""
    if worker is not None and numbers:
        core.send(worker.conn, DropKv(tuple(numbers)))


def check(core: Core, run: ActiveRun) -> Iterable[str]:
    """What contradicts the other tables, for `audit`."""
    for sample_id, offer in run.kv.turns.items():
        sample = core.samples.get(sample_id)
        if sample is None or sample.group.turn is None or sample.status is not SampleStatus.COMPLETE:
            yield f"sample {sample_id}: its blocks are kept for the turns behind it, and it is no whole turn"
        if core.workers.get(offer.worker_id) is None:
            yield f"sample {sample_id}: worker {offer.worker_id} is gone and keeps its blocks"
    held: Counter[int] = Counter()
    for offer in run.kv.turns.values():
        held[offer.worker_id] += offer.tokens * offer.token_nbytes
    if +run.kv.turns_nbytes != held:
        yield f"run {run.name}: {+run.kv.turns_nbytes} bytes of turns' blocks are counted, {held} are kept"
    for sample_id, handed in run.kv.handed.items():
        if sample_id not in core.samples or handed.worker_id not in core.workers:
            yield f"sample {sample_id}: worker {handed.worker_id} is to fetch its blocks"
