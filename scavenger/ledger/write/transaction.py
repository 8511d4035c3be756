"""One transaction of the writer: fence, then records. Owns generations and histories; knows no thread, queue or retry.

Every transaction begins by moving `batch` from n to n + 1 on the row of its own generation, unless that row is superseded. This

- fences: granting a generation supersedes the older rows, and waits for the transactions that hold them;
- takes the write lock first, so that no transaction fails half-way for it;
- makes a repeated transaction harmless: after a commit whose answer was lost, `batch` is n + 1 already.

A *timeline* is one history of the ledger. A ledger that was restored from a backup goes on in another one, because every id and number
that was given out after the backup is given out again. The new generation is numbered beyond all that were ever announced, and has a
random `uid`, so a daemon of the other history that reaches this database is fenced too. `timeline` goes to workers and trainers, who
discard what the other history gave them.

Moves of many samples at once are logged first and folded later, as a `MovePlan` says (`moves`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from scavenger.errors import Fenced, LedgerError
from scavenger.ledger import queries
from scavenger.ledger.records import Event, Record
from scavenger.ledger.schema import generations
from scavenger.ledger.store import BEGIN, require_head
from scavenger.ledger.write.batches import write_records
from scavenger.ledger.write.moves import MovePlan, fold_left, fold_moves, log_moves

_g = generations.c
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
    """Within a transaction: fence every generation and begin another history, which has no writer yet.

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
    write_records(connection, [history_began(granted, why, now)])
    return granted


def history_began(generation: Generation, why: str, now: float) -> Event:
    """What the ledger's reports say of a history that begins with this generation."""
    return Event("history_began", 0, f"generation {int(generation)}", why, "{}", now)


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
    if (
        connection.execute(
            sa.text(queries.load("advance_batch")), me | {"before": batch - 1, "now": now}
        ).rowcount
        == 1
    ):
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
