"""Gives a ledger's free space back to the filesystem, and measures the ledger. Owns how each database does that safely.

SQLite writes the whole file anew, and no daemon may have it open meanwhile. SQLite's own locks tell whether any other connection is open
(in WAL mode each holds one), and while we hold them exclusively none can open. A crash in between leaves the old file, by SQLite's journal.
PostgreSQL vacuums beside a daemon that goes on.

Boundary: statements that no transaction may hold, by database.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from scavenger.errors import LedgerError
from scavenger.ledger import store
from scavenger.ledger.faults import explain
from scavenger.ledger.read.reader import rows
from scavenger.ledger.schema import metadata


@dataclass(frozen=True, slots=True)
class Vacuumed:
    """Sizes in bytes: the file and its log, or the tables with their indexes."""

    before: int
    after: int


def size(url: str) -> int:
    """Bytes that the ledger takes now. Raises `LedgerError` when there is none."""
    engine = store.open_readonly(url)
    try:
        if engine.dialect.name == "sqlite":
            return _file_size(Path(str(store.parse(url).database)))
        total = "SELECT COALESCE(sum(pg_total_relation_size(c.oid)), 0) FROM pg_class c WHERE c.relkind = 'r' AND c.oid = ANY(:found)"
        found = [
            rows(engine, f"SELECT CAST(to_regclass('{name}') AS oid)").rows[0][0] for name in metadata.tables
        ]
        return int(rows(engine, total, {"found": [oid for oid in found if oid is not None]}).rows[0][0])
    finally:
        engine.dispose()


def _file_size(path: Path) -> int:
    return sum(os.stat(part).st_size for part in (path, Path(f"{path}-wal")) if part.exists())


def holder(url: str) -> str:
    """Which daemon took the ledger last, for a message; "nobody" when none has."""
    engine = store.open_readonly(url)
    try:
        found = rows(
            engine, "SELECT generation, host, pid FROM generations ORDER BY generation DESC LIMIT 1"
        ).rows
    finally:
        engine.dispose()
    return "generation {} (host {}, pid {})".format(*found[0]) if found else "no daemon"


def vacuum(url: str) -> Vacuumed:
    """Give free space back. Raises `LedgerError`: another process has the SQLite file open, the disk is too full, the server refuses."""
    before = size(url)
    parsed = store.parse(url)
    if parsed.drivername == "sqlite":
        _vacuum_sqlite(Path(str(parsed.database)), url)
    else:
        _vacuum_postgres(url)
    return Vacuumed(before, size(url))


def _vacuum_sqlite(path: Path, url: str) -> None:
    needed, free = 2 * _file_size(path), shutil.disk_usage(path.parent).free
    if free < needed:  # the new file and, while it replaces the old one, the log
        raise LedgerError(
            f"vacuum writes the ledger anew beside the old one: {needed:,} bytes, and {free:,} are free",
            "free space where it lies",
        )
    connection = sqlite3.connect(path, timeout=1.0, isolation_level=None)
    try:
        # Before the first read: the index of the log is then kept in memory, and no other process can join.
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("BEGIN EXCLUSIVE")
        connection.execute("COMMIT")
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except sqlite3.OperationalError as error:
        if (error.sqlite_errorcode & 0xFF) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise LedgerError(
                f"the ledger is in use: it belongs to {holder(url)}, or a process reads it",
                "stop the daemon and end the readers (fuser names them), then vacuum, then start it again",
            ) from error
        raise LedgerError(
            f"vacuum failed and changed nothing: {explain(error)}", "look at the disk's space and health"
        ) from error
    finally:
        connection.close()


def _vacuum_postgres(url: str) -> None:
    engine = store.open_engine(url)
    said: list[str] = []

    def hear(notice: Any) -> None:
        if notice.severity_nonlocalized == "WARNING":
            said.append(str(notice.message_primary))

    left: dict[str, str] = {}
    try:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            driver: Any = connection.connection.driver_connection
            driver.add_notice_handler(hear)
            for table in metadata.tables:
                said.clear()
                connection.exec_driver_sql(f"VACUUM (ANALYZE) {table}")
                if said:  # a table that this role may not vacuum is skipped with a warning, and the statement succeeds
                    left[table] = said[0]
    except sa.exc.DBAPIError as error:
        raise LedgerError(f"vacuum failed: {explain(error)}", "run it as the owner of the tables") from error
    finally:
        engine.dispose()
    if left:
        why = f"{len(left)} of {len(metadata.tables)} tables were not vacuumed as they should be: {next(iter(left.values()))}"
        raise LedgerError(why, "run it as the owner of the tables (the daemon's role) or as a superuser")
