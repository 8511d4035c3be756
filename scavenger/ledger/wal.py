"""SQLite's write-ahead log: how large it is, and what is tried when it stays large. PostgreSQL looks after its own.

SQLite writes the log back into the file by itself, but never past the oldest reader that is still in a transaction: one that stays open
makes the log grow with every commit. Readers of ours have a deadline; somebody's `sqlite3` may not. Owns the bound and the attempts to
bring the log back below it; they never wait for a reader, because the writer would.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
import structlog

log = structlog.get_logger()

#: A log beyond this is said, and tried to be written back whole after every `RETRY_S` of commits.
MOST_BYTES = 256 * 1024 * 1024
RETRY_S = 1.0
#: How often a log that stays large is said again.
SAY_S = 60.0


class WalWatch:
    """Called by the writer after its commits. The figures may be read from any thread: the log's size, and how often a log that was
    too large could be written back whole, or could not because somebody was reading."""

    def __init__(self, engine: sa.Engine, path: Path | None, most_bytes: int = MOST_BYTES) -> None:
        self._engine = engine
        self._file = path.with_name(path.name + "-wal") if path is not None else None
        self._most_bytes = most_bytes
        self._tried_at = self._said_at = float("-inf")
        self.nbytes = self.written_back = self.blocked = 0

    def look(self, now: float) -> None:
        """Measure the log, and try to write it back when it is too large. Raises what the driver raises."""
        if self._file is None:
            return
        was_large = self.nbytes > self._most_bytes
        self._measure()
        if self.nbytes > self._most_bytes and now - self._tried_at >= RETRY_S:
            self._tried_at = now
            self._write_back()
            self._measure()
        large = self.nbytes > self._most_bytes
        if large and now - self._said_at >= SAY_S:
            self._said_at = now
            log.warning(
                "ledger's log is large", nbytes=self.nbytes, cause="a reader keeps a transaction open", remedy="end it: fuser on the ledger"
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

    def _write_back(self) -> None:
        """A whole checkpoint that truncates the log, at once or not at all. On a connection of its own, outside any transaction."""
        driver = self._engine.raw_connection()
        try:
            cursor = driver.cursor()
            cursor.execute("PRAGMA busy_timeout=0")
            busy, *_ = cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            cursor.close()
        finally:
            driver.close()
        self.blocked, self.written_back = self.blocked + bool(busy), self.written_back + (not busy)
