"""Appending chunks in the fastest way that each database has. Owns the column order of that path and nothing else.

SQLite takes a prepared statement with positional rows; PostgreSQL a binary COPY. Both run in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from scavenger.ledger.records import ChunkAccepted

#: Column and, for COPY, its PostgreSQL type.
_COLUMNS: tuple[tuple[str, str], ...] = (
    ("sample_id", "int8"),
    ("epoch", "int8"),
    ("start_len", "int8"),
    ("n_tokens", "int8"),
    ("version", "int8"),
    ("worker_id", "int8"),
    ("at", "float8"),
    ("tokens", "bytea"),
    ("logprobs", "bytea"),
    ("raw_logprobs", "bytea"),
)
_NAMES = ", ".join(name for name, _ in _COLUMNS)
_INSERT = f"INSERT INTO chunks ({_NAMES}) VALUES ({', '.join('?' for _ in _COLUMNS)})"
_COPY = f"COPY chunks ({_NAMES}) FROM STDIN (FORMAT BINARY)"


def chunk_row(c: ChunkAccepted) -> tuple[Any, ...]:
    """One chunk's values in the order of the columns."""
    return (
        c.sample_id, c.epoch, c.offset, len(c.tokens) // 4, c.version, c.worker_id, c.at, c.tokens, c.logprobs, c.raw_logprobs,
    )  # fmt: skip


def append_chunks(connection: sa.Connection, chunks: Sequence[ChunkAccepted]) -> None:
    """Insert `chunks` in order. Raises what the driver raises, wrapped by SQLAlchemy on SQLite and bare on PostgreSQL."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(_INSERT, [chunk_row(chunk) for chunk in chunks])
        return
    driver: Any = connection.connection.driver_connection
    with driver.cursor() as cursor, cursor.copy(_COPY) as copy:
        copy.set_types([kind for _, kind in _COLUMNS])
        for chunk in chunks:
            copy.write_row(chunk_row(chunk))
