"""One transaction of the writer: fence, then records. Owns generations; knows no thread, queue or retry.

Every transaction begins by moving `batch` from n to n + 1 on the row of its own generation, unless that row is superseded. This

- fences: granting a generation supersedes the older rows, and waits for the transactions that hold them;
- takes the write lock first, so that no transaction fails half-way for it;
- makes a repeated transaction harmless: after a commit whose answer was lost, `batch` is n + 1 already.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from scavenger.errors import Fenced, LedgerError
from scavenger.ledger import sets
from scavenger.ledger.bulk import append_chunks
from scavenger.ledger.parameters import tuples
from scavenger.ledger.records import ChunkAccepted, Record
from scavenger.ledger.schema import generations
from scavenger.ledger.statements import KINDS, Statement, arrange, describe
from scavenger.ledger.store import BEGIN, require_head

_g = generations.c
_ADVANCE = (
    sa.update(generations)
    .where(_g.generation == sa.bindparam("mine"), _g.batch == sa.bindparam("before"), _g.superseded_at.is_(None))
    .values(batch=_g.batch + 1, committed_at=sa.bindparam("now", type_=sa.Double))
)
_MINE = sa.select(_g.batch, _g.superseded_at).where(_g.generation == sa.bindparam("mine"))
_NEWEST = sa.select(_g.generation, _g.host, _g.pid).order_by(_g.generation.desc()).limit(1)


def open_connection(engine: sa.Engine) -> sa.Connection:
    """A connection whose transactions take SQLite's write lock at once, instead of failing when they first write."""
    return engine.connect().execution_options(**{BEGIN: "IMMEDIATE"})


def grant_generation(engine: sa.Engine, host: str, pid: int, code_version: str, now: float) -> int:
    """Become the ledger's only writer: supersede every older generation and return the new one.

    Raises `LedgerError` unless the schema is current; what the driver raises passes through.
    """
    with open_connection(engine) as connection, connection.begin():
        require_head(connection)
        if connection.dialect.name == "postgresql":
            # Waits for every transaction that advanced its row, and keeps out new ones until we commit.
            connection.exec_driver_sql("LOCK TABLE generations IN SHARE ROW EXCLUSIVE MODE")
        connection.execute(sa.update(generations).where(_g.superseded_at.is_(None)).values(superseded_at=now))
        newest = connection.execute(sa.select(sa.func.max(_g.generation))).scalar()
        mine = int(newest or 0) + 1
        row = {"generation": mine, "host": host, "pid": pid, "code_version": code_version}
        connection.execute(sa.insert(generations).values(**row, started_at=now, committed_at=now, batch=0))
    return mine


def commit_batch(connection: sa.Connection, generation: int, batch: int, records: Sequence[Record], now: float) -> bool:
    """Write `records` as transaction number `batch` (from 1 on) of `generation`; returns once they are durable.

    False: that transaction was committed by an earlier try. Raises `Fenced`, `LedgerError` for a record that matches no row, or
    what the driver raises; then nothing was written, or, if the connection broke, perhaps all: try the same batch again.
    """
    with connection.begin():
        if not _advance(connection, generation, batch, now):
            return False
        for kind, same in arrange(records):
            for statement in KINDS[kind].statements:
                _run(connection, statement, same)
            if kind is ChunkAccepted:
                append_chunks(connection, [record for record in same if isinstance(record, ChunkAccepted)])
    return True


def _advance(connection: sa.Connection, generation: int, batch: int, now: float) -> bool:
    if connection.execute(_ADVANCE, {"mine": generation, "before": batch - 1, "now": now}).rowcount == 1:
        return True
    mine = connection.execute(_MINE, {"mine": generation}).one_or_none()
    # Asked first: a transaction that was committed before its writer was superseded is durable.
    if mine is not None and mine.batch == batch:
        return False
    newest = connection.execute(_NEWEST).one_or_none()
    owner = f"generation {newest.generation} (host {newest.host}, pid {newest.pid})" if newest is not None else "nobody"
    if mine is not None and mine.superseded_at is None:
        raise LedgerError(f"generation {generation} is at batch {mine.batch} of the ledger, not at {batch - 1}", "restart the daemon")
    raise Fenced(f"this daemon's generation {generation} of the ledger is over: {owner} owns it", "stop this daemon")


def _run(connection: sa.Connection, statement: Statement, records: Sequence[Record]) -> None:
    if statement.shape is not None and len(records) >= sets.FEWEST and sets.possible(connection):
        types, rows = tuples(statement.shape.names, statement.rows, records)
        wanted, changed = len(rows), sets.run(connection, statement.shape, types, rows)
    else:
        single = list(statement.rows(records))
        wanted = len(single)
        changed = connection.execute(statement.sql, single).rowcount if single else 0
    if statement.must_match and changed != wanted:
        raise LedgerError(
            f"{wanted - changed} of {wanted} {type(records[0]).__name__} records name a row that is not there, "
            f"among them perhaps {describe(records[0])}",
            "this is a bug of the daemon; nothing of the batch was written",
        )
