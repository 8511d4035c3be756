"""Moves of many samples at once: logged first, folded into `leases` and `samples` soon after. Owns the log and the rules for it.

    LeaseMoved x 10,000 --one row--> move_log --commit: durable, the new engines are told--> fold: 10,000 x (a lease ended, one made, a
                                                                                             sample updated), and the row deleted

A lost fleet's samples stand still until their new leases are durable. To write those takes 30,000 changed rows, the log a single one.
Between the two, `leases` and `samples` tell of the moment before the moves, and of nothing that was not so: a report lags by a second,
by five while ever more engines are lost. Nothing that needs a logged move is written before it is folded, and whoever takes the ledger
over folds what it finds first, in the transaction that makes it the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa

from scavenger.errors import LedgerError
from scavenger.ledger.records import ContentsReduced, GroupCreated, LeaseMoved, Record
from scavenger.ledger.schema import move_log
from scavenger.ledger.write.statements import KINDS

#: Fewer moves than these are written as they are: a fold costs a transaction.
FEWEST = 4
#: Logged moves are folded after this time (s) while others write, after `QUIET_S` (s) when nobody does, when there are `MOST` of them, and
#: after `MOST_LAG_S` (s) whatever is written: engines may be lost for a long time.
MOST_AGE_S = 1.0
QUIET_S = 0.05
MOST_LAG_S = 5.0
MOST = 100_000

Batch = tuple[LeaseMoved, ...]
Write = Callable[[sa.Connection, Sequence[LeaseMoved]], None]
_Row = tuple[int, int, str, int, int, int, int, float]
_ROWS = msgspec.msgpack.Decoder(list[_Row])
#: Kinds that read or change rows of `leases` or `samples`; a group's samples are new, and no lease names them yet.
_TOUCHING = frozenset(
    kind
    for kind, known in KINDS.items()
    if (known.uses | known.creates) & {"leases", "samples"} and kind is not GroupCreated
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a transaction does of moves: `fold` these logged ones first, then write `records`, then log these moves."""

    fold: tuple[Batch, ...]
    records: Sequence[Record]
    log: Batch


class MoveLog:
    """The moves that are logged and not folded. `plan` changes nothing; `done` follows the commit of what was planned."""

    def __init__(self) -> None:
        self._batches: tuple[
            Batch, ...
        ] = ()  # in the order in which they were logged: a later one may move the same samples on
        self._samples: set[int] = set()
        self._since = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._batches))

    def plan(self, records: Sequence[Record], now: float) -> Plan:
        """What to do with the next transaction's records; with none, everything is folded."""
        moves = tuple(record for record in records if type(record) is LeaseMoved)
        samples = {move.sample_id for move in moves}
        log = len(samples) == len(moves) >= FEWEST
        rest = [record for record in records if type(record) is not LeaseMoved] if log else records
        if log and _concerns(rest, samples):
            log, rest = False, records
        return Plan(self._batches if self._due(rest, now, logging=log) else (), rest, moves if log else ())

    def _due(self, rest: Sequence[Record], now: float, *, logging: bool) -> bool:
        """Whether what was logged is folded before `rest` is written."""
        if not self._batches:
            return False
        age_s = now - self._since
        if len(self) > MOST or age_s > MOST_LAG_S or _concerns(rest, self._samples):
            return True
        return not logging and (not rest or age_s > MOST_AGE_S)

    def done(self, plan: Plan, now: float) -> None:
        kept = () if plan.fold else self._batches
        if not kept:
            self._since = now
        if plan.fold or plan.log:
            self._batches = (*kept, plan.log) if plan.log else kept
            if plan.fold:
                self._samples = set()
            self._samples.update(move.sample_id for move in plan.log)


def _concerns(records: Sequence[Record], samples: set[int]) -> bool:
    """Whether any record reads or changes what a move of one of these samples does."""
    if not samples:
        return False
    touching: Iterator[Any] = (record for record in records if type(record) in _TOUCHING)
    return any(isinstance(record, ContentsReduced) or record.sample_id in samples for record in touching)


def append(connection: sa.Connection, moves: Batch, now: float) -> None:
    """Log moves, in the caller's transaction."""
    packed = msgspec.msgpack.encode([msgspec.structs.astuple(move) for move in moves])
    connection.execute(sa.insert(move_log).values(n=len(moves), moves=packed, at=now))


def fold(connection: sa.Connection, batches: Sequence[Batch], write: Write) -> None:
    """Write logged moves where they belong and empty the log, in the caller's transaction: `batches` are all that it holds."""
    for batch in batches:
        write(connection, batch)
    held = connection.execute(sa.delete(move_log)).rowcount
    if held != len(batches):
        raise LedgerError(
            f"move_log held {held} batches of moves, not the {len(batches)} that were folded",
            "restart the daemon",
        )


def fold_left(connection: sa.Connection, write: Write) -> int:
    """Fold what a daemon that ended left in the log, in the caller's transaction; how many moves that were."""
    rows = connection.execute(sa.select(move_log.c.n, move_log.c.moves).order_by(move_log.c.id)).all()
    batches = [_unpacked(n, packed) for n, packed in rows]
    try:
        if batches:
            fold(connection, batches, write)
    except LedgerError as error:
        remedy = "the ledger says of itself what it should not: keep a copy of it, report this, and restore a backup (docs/recovery.md)"
        raise LedgerError(
            f"what the last daemon left in move_log cannot be folded: {error.cause}", remedy
        ) from error
    return sum(map(len, batches))


def _unpacked(n: int, packed: bytes) -> Batch:
    remedy = "start the release that wrote it and stop it: it folds its log; else restore the ledger from a backup (docs/recovery.md)"
    try:
        moves = tuple(LeaseMoved(*row) for row in _ROWS.decode(packed))
    except msgspec.MsgspecError as error:
        raise LedgerError(f"a row of move_log cannot be read: {error}", remedy) from error
    if len(moves) != n:
        raise LedgerError(f"a row of move_log holds {len(moves)} moves, not {n}", remedy)
    return moves
