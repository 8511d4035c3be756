"""SQLite's write-ahead log (WAL): when it is written back, how large it is, what is tried when it stays large. Not for PostgreSQL.

By default SQLite writes the log back within the commit that made it long, and every caller of that commit waits for tens of MB and
two syncs. So the writer's connection never does it, and `WalWatch` does it once the commit was acknowledged.

Writing back stops at the oldest reader that is still in a transaction, so a reader that stays open makes the log grow with every commit.
Our own readers have a deadline; a person's `sqlite3` may not. While short readers overlap, writing back never reaches the log's end, and
SQLite starts the file anew only from there. So a log that is too large is written back with a short wait, in which the old readers end.

Boundary: one database's files; PostgreSQL has none of this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa
import structlog

log = structlog.get_logger()

#: Bytes of records between two checkpoints; a log of a few tens of MB costs little to read and to write back.
CHECKPOINT_BYTES = 32 * 1024 * 1024
#: A log beyond this is too large: a warning says so, and every `RETRY_S` a commit is followed by an attempt to write it back whole.
MAX_WAL_BYTES = 256 * 1024 * 1024
RETRY_S = 1.0
#: How often the warning about a log that stays large is repeated.
WARN_EVERY_S = 60.0
#: How long such an attempt waits for readers to end: a reader of ours takes less.
TIMEOUT_MS = 200


class WalWatch:
    """Called by the writer after its commits.

    May be read from any thread: `nbytes`, the log's size; `written_back` and `blocked`, how often a log that was too large could be written
    back whole, and how often a reader prevented it.
    """

    def __init__(
        self,
        engine: sa.Engine,
        path: Path | None,
        most_bytes: int = MAX_WAL_BYTES,
        checkpoint_bytes: int = CHECKPOINT_BYTES,
    ) -> None:
        self._engine = engine
        self._file = path.with_name(path.name + "-wal") if path is not None else None
        self._most_bytes, self._checkpoint_bytes = most_bytes, checkpoint_bytes
        self._written = 0  # bytes of records since the log was written back last
        self._tried_at = self._warned_at = float("-inf")
        self.nbytes = self.written_back = self.blocked = 0

    def take_over(self, connection: sa.Connection) -> None:
        """This connection's commits no longer write the log back."""
        if self._file is not None:
            driver: Any = connection.connection.driver_connection
            driver.execute("PRAGMA wal_autocheckpoint=0").close()

    def after_commit(self, now: float, nbytes: int) -> None:
        """After a commit of `nbytes` of records: write the log back when it is time, measure it. Raises what the driver raises."""
        if self._file is None:
            return
        self._written += nbytes
        if self._written >= self._checkpoint_bytes:
            self._written = 0
            self._write_back("PASSIVE")
        was_large = self.nbytes > self._most_bytes
        self._measure()
        if self.nbytes > self._most_bytes and now - self._tried_at >= RETRY_S:
            self._tried_at = now
            self._write_back("TRUNCATE")
            self._measure()
        large = self.nbytes > self._most_bytes
        if large and now - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            log.warning(
                "ledger's log is large",
                nbytes=self.nbytes,
                cause=f"readers never pause: one transaction that stays open, or none of {TIMEOUT_MS} ms without a reader",
                remedy="end the readers: fuser on the ledger names them",
            )
        elif was_large and not large:
            self._warned_at = float("-inf")
            log.info("ledger's log is small again", nbytes=self.nbytes)

    def _measure(self) -> None:
        assert self._file is not None
        try:
            self.nbytes = self._file.stat().st_size
        except FileNotFoundError:  # nothing was written since it was last closed
            self.nbytes = 0

    def _write_back(self, how: str) -> None:
        """A checkpoint: as much as readers allow, or a whole one that truncates the log, which waits a little. On its own connection."""
        driver = self._engine.raw_connection()
        try:
            cursor = driver.cursor()
            cursor.execute(f"PRAGMA busy_timeout={TIMEOUT_MS if how == 'TRUNCATE' else 0}")
            busy, *_ = cursor.execute(f"PRAGMA wal_checkpoint({how})").fetchone()
            cursor.close()
        finally:
            driver.close()
        if how == "TRUNCATE":  # the others write back what they can, and count nothing
            self.blocked, self.written_back = self.blocked + bool(busy), self.written_back + (not busy)
