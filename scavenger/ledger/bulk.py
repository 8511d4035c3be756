"""Appending chunks in the fastest way that each database has. Owns the column order of that path and nothing else.

SQLite takes prepared statements of many rows each; PostgreSQL a binary COPY. Both run in the caller's transaction.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import sqlalchemy as sa

from scavenger.ledger.batch_sql import parts
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
_COPY = f"COPY chunks ({_NAMES}) FROM STDIN (FORMAT BINARY)"
#: Of one statement on SQLite, at most: ten parameters each, of 32,766. A power of two, as `parts` makes them.
_SQLITE_ROWS = 2048
#: PostgreSQL's binary COPY: a header, each row as its number of columns and each column as its length and bytes, a trailer.
_COPY_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_TRAILER = b"\xff\xff"
_COPY_ROW = struct.Struct(">h" + "iq" * 6 + "id" + "i")
_COPY_LENGTH = struct.Struct(">i")
#: Bytes handed to the driver at once.
_COPY_BYTES = 1 << 20


def chunk_row(c: ChunkAccepted) -> tuple[Any, ...]:
    """One chunk's values in the order of the columns."""
    return (
        c.sample_id, c.epoch, c.offset, len(c.tokens) // 4, c.version, c.worker_id, c.at, c.tokens, c.logprobs, c.raw_logprobs,
    )  # fmt: skip


def append_chunks(connection: sa.Connection, chunks: Sequence[ChunkAccepted]) -> None:
    """Insert `chunks` in order. Raises what the driver raises, wrapped by SQLAlchemy on SQLite and bare on PostgreSQL."""
    if connection.dialect.name == "sqlite":
        for part in parts([chunk_row(chunk) for chunk in chunks], _SQLITE_ROWS):
            connection.exec_driver_sql(_insert(len(part)), tuple(chain.from_iterable(part)))
        return
    driver: Any = connection.connection.driver_connection
    with driver.cursor() as cursor, cursor.copy(_COPY) as copy:
        for block in copy_blocks(chunks):
            copy.write(block)


@functools.cache
def _insert(rows: int) -> str:
    """Many rows in one statement: the interpreter's lock is released once for all of them."""
    row = f"({', '.join('?' for _ in _COLUMNS)})"
    return f"INSERT INTO chunks ({_NAMES}) VALUES {', '.join([row] * rows)}"


def copy_blocks(chunks: Sequence[ChunkAccepted]) -> Iterator[bytes]:
    """`chunks` as a binary COPY reads them. Packed here: the driver's own packing of a row costs several times the row's insert."""
    row, length = _COPY_ROW.pack, _COPY_LENGTH.pack
    pieces, nbytes = [_COPY_HEADER], 0
    for c in chunks:
        n = len(c.tokens)
        pieces += (
            row(10, 8, c.sample_id, 8, c.epoch, 8, c.offset, 8, n // 4, 8, c.version, 8, c.worker_id, 8, c.at, n), c.tokens,
            length(len(c.logprobs)), c.logprobs, length(len(c.raw_logprobs)), c.raw_logprobs,
        )  # fmt: skip
        nbytes += 3 * n
        if nbytes > _COPY_BYTES:
            yield b"".join(pieces)
            pieces, nbytes = [], 0
    pieces.append(_COPY_TRAILER)
    yield b"".join(pieces)
