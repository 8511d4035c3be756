"""One transaction of the writer: fence, then records. Owns generations and histories; knows no thread, queue or retry.

Every transaction begins by moving `batch` from n to n + 1 on the row of its own generation, unless that row is superseded. This

- fences: granting a generation supersedes the older rows, and waits for the transactions that hold them;
- takes the write lock first, so that no transaction fails half-way for it;
- makes a repeated transaction harmless: after a commit whose answer was lost, `batch` is n + 1 already.

A *timeline* is one history of the ledger. A ledger that was restored from a backup goes on in another one: every id and number that
was given out after the backup is given out again. The new generation is numbered beyond all that were ever announced, and has a
random `uid`, so a daemon of the other history is fenced here too, should it reach this database. `timeline` goes to workers and
trainers, who void what the other history gave them.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from scavenger.errors import Fenced, LedgerError
from scavenger.ledger.records import ChunkAccepted, ContentsReduced, LeaseMoved, Record
from scavenger.ledger.schema import generations
from scavenger.ledger.store import BEGIN, require_head
from scavenger.ledger.write import batch_sql, moves
from scavenger.ledger.write.compaction import reduce_contents
from scavenger.ledger.write.moves import Plan
from scavenger.ledger.write.statements import KINDS, Statement, arrange, describe, each, tuples

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
    """The newest generation that the rendezvous file tells of; the default says that there was none.

    `unfinished`: the restore that was not seen to its end, as `note` (a file of `restoring`) tells it; "" when none is known.
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
        moves.fold_left(connection, _write_moves)
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
    """End the generation of a daemon that was told to stop and wrote all it had: nobody needs to wait for its silence. False: it was over.

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
    plan: Plan | None = None,
) -> bool:
    """Write `records` as transaction number `batch` (from 1 on) of `generation`; returns once they are durable.

    `plan`: what a `MoveLog` says is to be done with these records and with logged moves; None: all is written in place.
    False: that transaction was committed by an earlier try. Raises `Fenced`, `LedgerError` for a record that matches no row, or
    what the driver raises; then nothing was written, or, if the connection broke, perhaps all: try the same batch again.
    """
    with connection.begin():
        fresh = _advance(connection, generation, batch, now)
        if fresh:
            _write(connection, plan or Plan((), records, ()), now)
    return fresh


def _write(connection: sa.Connection, plan: Plan, now: float) -> None:
    if plan.fold:
        moves.fold(connection, plan.fold, _write_moves)
    for kind, same in arrange(plan.records):
        _run_all(connection, KINDS[kind].statements, same)
        if kind is ChunkAccepted:
            batch_sql.append_chunks(
                connection, [record for record in same if isinstance(record, ChunkAccepted)]
            )
        elif kind is ContentsReduced:
            reduce_contents(connection, [record for record in same if isinstance(record, ContentsReduced)])
    if plan.log:
        moves.append(connection, plan.log, now)


def _write_moves(connection: sa.Connection, batch: Sequence[LeaseMoved]) -> None:
    _run_all(connection, KINDS[LeaseMoved].statements, batch)


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
        else "nobody"
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
                f"{why}, and nobody owns it now", "start it again: it goes on with the restored ledger"
            )
        raise Fenced(f"{why}: {owner} owns it", "stop this daemon")
    raise Fenced(
        f"this daemon's generation {generation} of the ledger is over: {owner} owns it", "stop this daemon"
    )


def _run_all(connection: sa.Connection, statements: tuple[Statement, ...], records: Sequence[Record]) -> None:
    """The statements of one kind, in order: over one table of their parameters where they have it in common."""
    shapes = tuple(s.shape for s in statements if s.shape is not None and s.rows is each)
    strict = all(
        s.must_match for s in statements if s.shape is not None and s.shape.keys
    )  # what joint counts rest on
    if (
        1 < len(shapes) == len(statements)
        and strict
        and len(records) >= batch_sql.FEWEST
        and batch_sql.possible(connection)
    ):
        names = batch_sql.joint_names(shapes)
        types, rows = tuples(names, each, records)
        if batch_sql.apart(shapes, names, rows):
            for statement, changed in zip(
                statements, batch_sql.run_jointly(connection, shapes, types, rows), strict=True
            ):
                _compare(statement, records, len(rows), changed, counted=connection.dialect.name == "sqlite")
            return
    for statement in statements:
        _run(connection, statement, records)


def _run(connection: sa.Connection, statement: Statement, records: Sequence[Record]) -> None:
    if statement.shape is not None and batch_sql.possible(connection):
        # By the number of rows: one group makes a row for each of its samples, many chunks of a sample make one.
        names = statement.shape.names
        types, rows = tuples(names, statement.rows, records)
        wanted = len(rows)
        if wanted >= batch_sql.FEWEST:
            changed = batch_sql.run(connection, statement.shape, types, rows)
        else:
            changed = (
                connection.execute(
                    statement.sql, [dict(zip(names, row, strict=True)) for row in rows]
                ).rowcount
                if rows
                else 0
            )
    else:
        single = list(statement.rows(records))
        wanted = len(single)
        changed = connection.execute(statement.sql, single).rowcount if single else 0
    _compare(statement, records, wanted, changed)


def _compare(
    statement: Statement, records: Sequence[Record], wanted: int, changed: int, *, counted: bool = True
) -> None:
    if statement.must_match and changed != wanted:
        many = f"{wanted - changed}" if counted else "one or more"
        raise LedgerError(
            f"{many} of {wanted} {type(records[0]).__name__} records name a row that is not there, "
            f"among them perhaps {describe(records[0])}",
            "this is a bug of the daemon; nothing of the batch was written",
        )
