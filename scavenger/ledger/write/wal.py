"""SQLite's write-ahead log: when it is written back, how large it is, what is tried when it stays large. PostgreSQL looks after its own.

Left alone, SQLite writes the log back within the commit that made it long, and all that this commit made durable waits for that: tens of
MB and two syncs. So the writer's connection does not, and the watch does it once the commit was acknowledged. It never gets past the
oldest reader that is still in a transaction: one that stays open makes the log grow with every commit. Readers of ours have a deadline;
somebody's `sqlite3` may not. Nor does it get to the log's end at one instant while short readers overlap, and then the log is never begun
anew: so a log that is too large is written back with a little patience, during which new readers wait for nothing and the old ones end.
Owns the bound and the attempts to bring the log back below it, and how long the writer may wait for one.

Boundary: one database's files; PostgreSQL has none of this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa
import structlog

log = structlog.get_logger()

#: About so much is written between two checkpoints; a log of a few tens of MB costs little to read and to write back.
CHECKPOINT_BYTES = 32 * 1024 * 1024
#: A log beyond this is said, and tried to be written back whole after every `RETRY_S` of commits.
MOST_BYTES = 256 * 1024 * 1024
RETRY_S = 1.0
#: How often a log that stays large is said again.
SAY_S = 60.0
#: The writer waits so long for readers to end, once in `RETRY_S` and only while the log is too large: a reader of ours takes less.
TIMEOUT_MS = 200


class WalWatch:
    """Called by the writer after its commits. The figures may be read from any thread: the log's size, and how often a log that was
    too large could be written back whole, or could not because somebody was reading."""

    def __init__(
        self,
        engine: sa.Engine,
        path: Path | None,
        most_bytes: int = MOST_BYTES,
        checkpoint_bytes: int = CHECKPOINT_BYTES,
    ) -> None:
        self._engine = engine
        self._file = path.with_name(path.name + "-wal") if path is not None else None
        self._most_bytes, self._checkpoint_bytes = most_bytes, checkpoint_bytes
        self._written = 0  # bytes of records since the log was written back last
        self._tried_at = self._said_at = float("-inf")
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
        if large and now - self._said_at >= SAY_S:
            self._said_at = now
            log.warning(
                "ledger's log is large",
                nbytes=self.nbytes,
                cause=f"somebody reads all the time: one transaction that stays open, or none of {TIMEOUT_MS} ms without a reader",
                remedy="end the readers: fuser on the ledger names them",
            )
        elif was_large and not large:
            self._said_at = float("-inf")
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
