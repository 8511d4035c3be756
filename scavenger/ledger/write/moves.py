"""Moves of many samples at once: logged in one row, and folded into `leases` and `samples` soon after. Knows no generation and no thread.

    LeaseMoved x 10,000 --one row--> move_log --commit: durable, the new engines are told--> fold: 10,000 x (a lease ended, one made, a
                                                                                             sample updated), and the row deleted

A lost fleet's samples wait until their new leases are durable. In place that takes 30,000 changed rows, in the log a single one. Until
the fold, `leases` and `samples` describe the moment before the moves: a report lags by a second, or by five while more and more engines
are lost. No record that needs a logged move is written before it is folded, and a new owner of the ledger folds what it finds in the
transaction that makes it the owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa

from scavenger.errors import LedgerError
from scavenger.ledger.records import ContentsReduced, GroupCreated, LeaseMoved, Record
from scavenger.ledger.schema import move_log
from scavenger.ledger.write.batches import run_all
from scavenger.ledger.write.statements import KINDS

#: Fewer moves than these are written in place: a fold costs a transaction.
FEWEST_MOVES = 4
# Logged moves are folded when any of these holds, or when a record needs one of them.
#: They are older than this (s), and the transaction at hand logs no further moves.
MOST_AGE_S = 1.0
#: No record has come for this time (s).
QUIET_S = 0.05
#: They are older than this (s), whatever the transaction does: engines may go on being lost for a long time.
MOST_LAG_S = 5.0
#: There are more of them than this.
MOST_MOVES = 100_000

Moves = tuple[LeaseMoved, ...]
_Row = tuple[int, int, str, int, int, int, int, float]
_ROWS = msgspec.msgpack.Decoder(list[_Row])
#: Kinds that read or change rows of `leases` or `samples`; a group's samples are new, and no lease names them yet.
_TOUCHING = frozenset(
    kind
    for kind, known in KINDS.items()
    if (known.uses | known.creates) & {"leases", "samples"} and kind is not GroupCreated
)


@dataclass(frozen=True, slots=True)
class MovePlan:
    """What one transaction does: fold these batches of logged moves, then write `records`, then log the moves `log`."""

    fold: tuple[Moves, ...]
    records: Sequence[Record]
    log: Moves


class MoveLog:
    """The moves that are logged and not folded. `plan` decides and changes nothing; call `done` when the plan is committed."""

    def __init__(self) -> None:
        #: In the order in which they were logged: a later one may move the same samples again.
        self._batches: tuple[Moves, ...] = ()
        self._samples: set[int] = set()
        self._since = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._batches))

    def plan(self, records: Sequence[Record], now: float) -> MovePlan:
        """What to do with the next transaction's records; with none, everything is folded."""
        moves = tuple(record for record in records if type(record) is LeaseMoved)
        samples = {move.sample_id for move in moves}
        log = len(samples) == len(moves) >= FEWEST_MOVES
        rest = [record for record in records if type(record) is not LeaseMoved] if log else records
        if log and _concerns(rest, samples):
            log, rest = False, records
        return MovePlan(
            self._batches if self._due(rest, now, logging=log) else (), rest, moves if log else ()
        )

    def _due(self, rest: Sequence[Record], now: float, *, logging: bool) -> bool:
        """Whether what was logged is folded before `rest` is written."""
        if not self._batches:
            return False
        age_s = now - self._since
        if len(self) > MOST_MOVES or age_s > MOST_LAG_S or _concerns(rest, self._samples):
            return True
        return not logging and (not rest or age_s > MOST_AGE_S)

    def done(self, plan: MovePlan, now: float) -> None:
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


def log_moves(connection: sa.Connection, moves: Moves, now: float) -> None:
    """Log moves, in the caller's transaction."""
    packed = msgspec.msgpack.encode([msgspec.structs.astuple(move) for move in moves])
    connection.execute(sa.insert(move_log).values(n=len(moves), moves=packed, at=now))


def fold_moves(connection: sa.Connection, batches: Sequence[Moves]) -> None:
    """Write logged moves where they belong and empty the log, in the caller's transaction: `batches` are all that it holds."""
    for batch in batches:
        run_all(connection, KINDS[LeaseMoved].statements, batch)
    held = connection.execute(sa.delete(move_log)).rowcount
    if held != len(batches):
        raise LedgerError(
            f"move_log held {held} batches of moves, not the {len(batches)} that were folded",
            "restart the daemon",
        )


def fold_left(connection: sa.Connection) -> int:
    """Fold what a daemon that ended left in the log, in the caller's transaction; how many moves that were."""
    rows = connection.execute(sa.select(move_log.c.n, move_log.c.moves).order_by(move_log.c.id)).all()
    batches = [_unpacked_moves(n, packed) for n, packed in rows]
    try:
        if batches:
            fold_moves(connection, batches)
    except LedgerError as error:
        remedy = "the ledger says of itself what it should not: keep a copy of it, report this, and restore a backup (docs/recovery.md)"
        raise LedgerError(
            f"what the last daemon left in move_log cannot be folded: {error.cause}", remedy
        ) from error
    return sum(map(len, batches))


def _unpacked_moves(n: int, packed: bytes) -> Moves:
    remedy = "start the release that wrote it and stop it: it folds its log; else restore the ledger from a backup (docs/recovery.md)"
    try:
        moves = tuple(LeaseMoved(*row) for row in _ROWS.decode(packed))
    except msgspec.MsgspecError as error:
        raise LedgerError(f"a row of move_log cannot be read: {error}", remedy) from error
    if len(moves) != n:
        raise LedgerError(f"a row of move_log holds {len(moves)} moves, not {n}", remedy)
    return moves
