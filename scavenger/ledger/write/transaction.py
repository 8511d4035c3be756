"""One transaction of the writer: fence, then records. Owns generations, histories and logged moves; knows no thread, queue or retry.

Every transaction begins by moving `batch` from n to n + 1 on the row of its own generation, unless that row is superseded. This

- fences: granting a generation supersedes the older rows, and waits for the transactions that hold them;
- takes the write lock first, so that no transaction fails half-way for it;
- makes a repeated transaction harmless: after a commit whose answer was lost, `batch` is n + 1 already.

A *timeline* is one history of the ledger. A ledger that was restored from a backup goes on in another one, because every id and number
that was given out after the backup is given out again. The new generation is numbered beyond all that were ever announced, and has a
random `uid`, so a daemon of the other history that reaches this database is fenced too. `timeline` goes to workers and trainers, who
discard what the other history gave them.

Moves of many samples at once are logged first, and folded into `leases` and `samples` soon after (`MoveLog`):

    LeaseMoved x 10,000 --one row--> move_log --commit: durable, the new engines are told--> fold: 10,000 x (a lease ended, one made, a
                                                                                             sample updated), and the row deleted

A lost fleet's samples wait until their new leases are durable. In place that takes 30,000 changed rows, in the log a single one. Until
the fold, `leases` and `samples` describe the moment before the moves: a report lags by a second, or by five while more and more engines
are lost. No record that needs a logged move is written before it is folded, and a new owner of the ledger folds what it finds in the
transaction that makes it the owner.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from scavenger.errors import Fenced, LedgerError
from scavenger.ledger.records import ContentsReduced, GroupCreated, LeaseMoved, Record
from scavenger.ledger.schema import generations, move_log
from scavenger.ledger.store import BEGIN, require_head
from scavenger.ledger.write.batches import run_all, write_records
from scavenger.ledger.write.statements import KINDS

_g = generations.c
_ADVANCE = (
    sa.update(generations)
    .where(
        _g.generation == sa.bindparam("mine"),
        _g.uid == sa.bindparam("my_uid"),
        _g.batch == sa.bindparam("before"),
        _g.superseded_at.is_(None),
    )
    .values(batch=_g.batch + 1, committed_at=sa.bindparam("now", type_=sa.Double))
)
_MINE = sa.select(_g.batch, _g.superseded_at).where(
    _g.generation == sa.bindparam("mine"), _g.uid == sa.bindparam("my_uid")
)
_NEWEST = sa.select(generations).order_by(_g.generation.desc()).limit(1)
_FIRST = sa.select(_g.timeline).order_by(_g.generation).limit(1)


@dataclass(frozen=True, slots=True)
class Announced:
    """The newest generation that the rendezvous file names; the default: none.

    `unfinished`: the restore that was begun and not completed, as in `note` (a file of `restoring`); "" when none is known.
    """

    generation: int = 0
    uid: str = ""
    unfinished: str = ""
    note: Path | None = None


NO_WRITER = Announced()


class Generation(int):
    """A generation's number, with what else was granted. `began`: why a new history begins with it, "" when none does."""

    uid: str
    timeline: str
    restored: bool  # this history began with a backup
    began: str

    @classmethod
    def of(cls, number: int, uid: str, timeline: str, *, restored: bool, began: str) -> Generation:
        made = cls(number)
        made.uid, made.timeline, made.restored, made.began = uid, timeline, restored, began
        return made


def open_connection(engine: sa.Engine) -> sa.Connection:
    """A connection whose transactions take SQLite's write lock at once, instead of failing when they first write."""
    connection = engine.connect().execution_options(**{BEGIN: "IMMEDIATE"})
    if connection.dialect.name == "sqlite":
        # Temporary tables and statement journals: a full /tmp must not stall a ledger whose own disk has room. Not of an upgrade, which
        # may sort a whole table.
        driver: Any = connection.connection.driver_connection
        driver.execute("PRAGMA temp_store=MEMORY").close()
    return connection


def grant_generation(
    engine: sa.Engine, host: str, pid: int, code_version: str, now: float, announced: Announced = NO_WRITER
) -> Generation:
    """Become the ledger's only writer: supersede every older generation and return the new one.

    Raises `LedgerError` unless the schema is current; what the driver raises passes through.
    """
    with open_connection(engine) as connection, connection.begin():
        require_head(connection)
        granted = _grant(connection, now, announced)
        fold_left(connection)
        row = {
            "generation": int(granted),
            "uid": granted.uid,
            "timeline": granted.timeline,
            "host": host,
            "pid": pid,
        }
        connection.execute(
            sa.insert(generations).values(
                **row, code_version=code_version, started_at=now, committed_at=now, batch=0
            )
        )
    return granted


def release(engine: sa.Engine, generation: Generation, now: float) -> bool:
    """End the generation of a daemon that stops with everything written, so that its successor need not wait. False: it was over already.

    What the driver raises passes through; then the generation ends when its heartbeat is old.
    """
    mine = (_g.generation == int(generation), _g.uid == generation.uid, _g.superseded_at.is_(None))
    with open_connection(engine) as connection, connection.begin():
        return connection.execute(sa.update(generations).where(*mine).values(superseded_at=now)).rowcount == 1


def begin_history(
    connection: sa.Connection, pid: int, host: str, why: str, now: float, announced: Announced, floor: int = 0
) -> Generation:
    """Within a transaction: fence every generation and begin another history, in which nobody writes yet.

    `floor`: a generation known from elsewhere; the next daemon's is beyond it.
    """
    beyond = replace(announced, generation=max(announced.generation, floor))
    granted = _grant(connection, now, beyond, why)
    row = {
        "generation": int(granted),
        "uid": granted.uid,
        "timeline": granted.timeline,
        "host": host,
        "pid": pid,
        "code_version": why,
    }
    connection.execute(
        sa.insert(generations).values(**row, started_at=now, committed_at=now, batch=0, superseded_at=now)
    )
    return granted


def _grant(connection: sa.Connection, now: float, announced: Announced, why: str = "") -> Generation:
    """Supersede all generations; what the next one is. `why` begins another history whatever was announced."""
    if connection.dialect.name == "postgresql":
        # Waits for every transaction that advanced its row, and keeps out new ones until we commit.
        connection.exec_driver_sql("LOCK TABLE generations IN SHARE ROW EXCLUSIVE MODE")
    connection.execute(sa.update(generations).where(_g.superseded_at.is_(None)).values(superseded_at=now))
    newest = connection.execute(_NEWEST).one_or_none()
    number = max(newest.generation if newest is not None else 0, announced.generation) + 1
    uid, fresh = secrets.token_hex(8), secrets.token_hex(8)
    if newest is None:
        return Generation.of(number, uid, fresh, restored=False, began="")
    began = why or _contradiction(connection, newest.generation, announced)
    timeline = fresh if began else newest.timeline
    return Generation.of(
        number, uid, timeline, restored=timeline != connection.execute(_FIRST).scalar(), began=began
    )


def _contradiction(connection: sa.Connection, newest: int, announced: Announced) -> str:
    """Why this ledger cannot be the one that the announced daemon wrote, as it wrote it; "" when it can."""
    if announced.unfinished:
        return f"a restore from {announced.unfinished} was begun and not seen to its end"
    if announced.generation > newest:
        return f"generation {announced.generation} was announced, and this ledger ends at {newest}: it is an older one or another"
    known = connection.execute(sa.select(_g.uid).where(_g.generation == announced.generation)).scalar()
    if announced.uid and known is not None and known != announced.uid:
        return f"generation {announced.generation} was announced, and is another daemon in this ledger: it is of another history"
    return ""


def commit_batch(
    connection: sa.Connection,
    generation: Generation,
    batch: int,
    records: Sequence[Record],
    now: float,
    plan: MovePlan | None = None,
) -> bool:
    """Write `records` as transaction number `batch` (from 1 on) of `generation`; returns once they are durable.

    `plan`: what a `MoveLog` says is to be done with these records and with logged moves; None: all is written in place.
    False: that transaction was committed by an earlier try. Raises `Fenced`, `LedgerError` for a record that matches no row, or
    what the driver raises; then nothing was written, or, if the connection broke, perhaps all: try the same batch again.
    """
    with connection.begin():
        fresh = _advance(connection, generation, batch, now)
        if fresh:
            plan = plan or MovePlan((), records, ())
            if plan.fold:
                fold_moves(connection, plan.fold)
            write_records(connection, plan.records)
            if plan.log:
                log_moves(connection, plan.log, now)
    return fresh


def _advance(connection: sa.Connection, generation: Generation, batch: int, now: float) -> bool:
    me = {"mine": int(generation), "my_uid": generation.uid}
    if connection.execute(_ADVANCE, me | {"before": batch - 1, "now": now}).rowcount == 1:
        return True
    mine = connection.execute(_MINE, me).one_or_none()
    # Asked first: a transaction that was committed before its writer was superseded is durable.
    if mine is not None and mine.batch == batch:
        return False
    newest = connection.execute(_NEWEST).one_or_none()
    owner = (
        f"generation {newest.generation} (host {newest.host}, pid {newest.pid})"
        if newest is not None
        else "no daemon"
    )
    if mine is not None and mine.superseded_at is None:
        raise LedgerError(
            f"generation {generation} is at batch {mine.batch} of the ledger, not at {batch - 1}",
            "restart the daemon",
        )
    if mine is None:
        why = f"this daemon's generation {generation} never was in this ledger, which was restored"
        if newest is None or newest.superseded_at is not None:  # as the restore itself leaves it
            raise Fenced(
                f"{why}, and no daemon owns it now", "start it again: it goes on with the restored ledger"
            )
        raise Fenced(f"{why}: {owner} owns it", "stop this daemon")
    raise Fenced(
        f"this daemon's generation {generation} of the ledger is over: {owner} owns it", "stop this daemon"
    )


# ---------------------------------------------------------------- moves of many samples at once

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
