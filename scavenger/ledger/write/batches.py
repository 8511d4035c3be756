"""A transaction's records as batches of one kind, and the SQL that writes each. In the caller's transaction; knows no generation.

`arrange` turns the records into few batches, because a statement run with many parameter rows costs a fraction of many statements. A
record joins an earlier batch of its kind unless a batch in between must come first (the three sets of each kind: `statements`).

    records --arrange--> batches of one kind --> few records: the kind's statements, row by row
                                                 many:        the same statements over many rows at once (`batch_sql`)
                                                 chunks:      append_chunks, and their samples' new lengths

Chunks are the hot rows and are only appended: SQLite takes prepared inserts of many rows each, PostgreSQL a binary COPY.

Boundary: how records become SQL, apart from who may write (`transaction`).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, get_args, get_type_hints

import sqlalchemy as sa

from scavenger.errors import LedgerError
from scavenger.ledger.records import ChunkAccepted, ContentsReduced, Record
from scavenger.ledger.write import batch_sql
from scavenger.ledger.write.compaction import reduce_contents
from scavenger.ledger.write.statements import KINDS, Kind, Rows, Statement, clean, describe, each


def write_records(connection: sa.Connection, records: Sequence[Record]) -> None:
    """Write `records`, in an order with the same result as their own. Raises `LedgerError` for a record that matches no row."""
    for kind, same in arrange(records):
        if kind is ChunkAccepted:
            chunks = [record for record in same if isinstance(record, ChunkAccepted)]
            run_all(connection, KINDS[kind].statements, lengths(chunks))
            append_chunks(connection, chunks)
            continue
        run_all(connection, KINDS[kind].statements, same)
        if kind is ContentsReduced:
            reduce_contents(connection, [record for record in same if isinstance(record, ContentsReduced)])


Batch = tuple[type[Record], list[Record]]


def _must_follow(later: Kind, earlier: Kind) -> bool:
    return bool(later.sets & earlier.sets) or bool(later.uses & earlier.creates)


#: For each kind, the other kinds whose earlier records it may not overtake.
BARRIERS: dict[type[Record], tuple[type[Record], ...]] = {
    kind: tuple(other for other in KINDS if other is not kind and _must_follow(KINDS[kind], KINDS[other]))
    for kind in KINDS
}


def arrange(records: Iterable[Record]) -> list[Batch]:
    """Records of one transaction as batches of one kind each, in an order with the same result. Records of a kind keep theirs."""
    batches: list[Batch] = []
    last: dict[type[Record], int] = {}
    before: type[Record] | None = None
    for record in records:
        kind = type(record)
        if kind is before:  # the common case, which must cost nothing
            batches[last[kind]][1].append(record)
            continue
        before = kind
        barrier = max((last.get(other, -1) for other in BARRIERS[kind]), default=-1)
        at = last.get(kind, -1)
        if at <= barrier:
            at = last[kind] = len(batches)
            batches.append((kind, []))
        batches[at][1].append(record)
    return batches


def run_all(connection: sa.Connection, statements: tuple[Statement, ...], records: Sequence[Record]) -> None:
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
        python_types, rows = tuples(names, each, records)
        if batch_sql.keys_distinct(shapes, names, rows):
            for statement, changed in zip(
                statements, batch_sql.run_jointly(connection, shapes, python_types, rows), strict=True
            ):
                _compare(statement, records, len(rows), changed, counted=connection.dialect.name == "sqlite")
            return
    for statement in statements:
        _run(connection, statement, records)


def _run(connection: sa.Connection, statement: Statement, records: Sequence[Record]) -> None:
    if statement.shape is not None and batch_sql.possible(connection):
        # By the number of rows: one group makes a row for each of its samples, many chunks of a sample make one.
        names = statement.shape.names
        python_types, rows = tuples(names, statement.rows, records)
        wanted = len(rows)
        if wanted >= batch_sql.FEWEST:
            changed = batch_sql.run(connection, statement.shape, python_types, rows)
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


def tuples(
    names: tuple[str, ...], make: Rows, records: Sequence[Any]
) -> tuple[tuple[type, ...], list[tuple[Any, ...]]]:
    """Rows of a batch of one kind for `batch_sql`: the Python type of each parameter, and values in the order of `names`."""
    record_kind: type[Record] = type(records[0])
    hints = _field_types(record_kind)
    python_types = tuple(
        hints.get(name.removeprefix("p_"), int) for name in names
    )  # what is not a field is a count
    if make is not each:
        return python_types, [tuple(row[name] for name in names) for row in make(records)]
    fields = [name.removeprefix("p_") for name in names]
    values = map(attrgetter(*fields), records)
    rows: list[tuple[Any, ...]] = list(values) if len(fields) > 1 else [(value,) for value in values]
    if any(
        "\0" in text
        for at, python_type in enumerate(python_types)
        if python_type is str
        for text in {row[at] for row in rows}
        if text
    ):
        rows = [tuple(map(clean, row)) for row in rows]
    return python_types, rows


@functools.cache
def _field_types(record_kind: type[Record]) -> dict[str, type]:
    """The Python type of each field; an optional one's without its None."""
    hints = get_type_hints(record_kind)
    return {
        name: next((x for x in get_args(hint) if x is not type(None)), hint) for name, hint in hints.items()
    }


# ---------------------------------------------------------------- chunks

#: Column and, for COPY, its PostgreSQL type.
_CHUNK_COLUMNS: tuple[tuple[str, str], ...] = (
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
    ("routing", "bytea"),
)
_CHUNK_NAMES = ", ".join(name for name, _ in _CHUNK_COLUMNS)
_COPY = f"COPY chunks ({_CHUNK_NAMES}) FROM STDIN (FORMAT BINARY)"
#: Of one statement on SQLite, at most: eleven parameters each, of 32,766. A power of two, as `parts` makes them.
_SQLITE_CHUNKS = 2048
#: PostgreSQL's binary COPY: a header, each row as its number of columns and each column as its length and bytes, a trailer.
_COPY_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_TRAILER = b"\xff\xff"
_COPY_ROW = struct.Struct(">h" + "iq" * 6 + "id" + "i")
_COPY_LENGTH = struct.Struct(">i")
#: Bytes handed to the driver at once.
_COPY_BYTES = 1 << 20


class SampleLength(Record, frozen=True):
    """How many tokens of a sample its chunks bring to the ledger."""

    sample_id: int
    length: int


def lengths(chunks: Sequence[ChunkAccepted]) -> list[SampleLength]:
    """The last accepted length of each sample; in one order in every transaction, so that two never wait for each other."""
    longest: dict[int, int] = {}
    for chunk in chunks:
        sample_id, length = chunk.sample_id, chunk.offset + len(chunk.tokens) // 4
        if length > longest.get(sample_id, -1):
            longest[sample_id] = length
    return [SampleLength(sample_id, length) for sample_id, length in sorted(longest.items())]


def chunk_row(c: ChunkAccepted) -> tuple[Any, ...]:
    """One chunk's values in the order of the columns."""
    return (
        c.sample_id,
        c.epoch,
        c.offset,
        len(c.tokens) // 4,
        c.version,
        c.worker_id,
        c.at,
        c.tokens,
        c.logprobs,
        c.raw_logprobs,
        c.routing,
    )


def append_chunks(connection: sa.Connection, chunks: Sequence[ChunkAccepted]) -> None:
    """Insert `chunks` in order. Raises what the driver raises, wrapped by SQLAlchemy on SQLite and bare on PostgreSQL."""
    if connection.dialect.name == "sqlite":
        for part in batch_sql.parts([chunk_row(chunk) for chunk in chunks], _SQLITE_CHUNKS):
            connection.exec_driver_sql(_insert_chunks(len(part)), tuple(chain.from_iterable(part)))
        return
    driver: Any = connection.connection.driver_connection
    with driver.cursor() as cursor, cursor.copy(_COPY) as copy:
        for block in copy_blocks(chunks):
            copy.write(block)


@functools.cache
def _insert_chunks(rows: int) -> str:
    """Many rows in one statement: the interpreter's lock is released once for all of them."""
    row = f"({', '.join('?' for _ in _CHUNK_COLUMNS)})"
    return f"INSERT INTO chunks ({_CHUNK_NAMES}) VALUES {', '.join([row] * rows)}"


def copy_blocks(chunks: Sequence[ChunkAccepted]) -> Iterator[bytes]:
    """`chunks` as a binary COPY reads them. Packed here: the driver's own packing of a row costs several times the row's insert."""
    row, length = _COPY_ROW.pack, _COPY_LENGTH.pack
    pieces, nbytes = [_COPY_HEADER], 0
    for c in chunks:
        n = len(c.tokens)
        pieces += (
            row(
                11,
                8,
                c.sample_id,
                8,
                c.epoch,
                8,
                c.offset,
                8,
                n // 4,
                8,
                c.version,
                8,
                c.worker_id,
                8,
                c.at,
                n,
            ),
            c.tokens,
            length(len(c.logprobs)),
            c.logprobs,
            length(len(c.raw_logprobs)),
            c.raw_logprobs,
            length(len(c.routing)),
            c.routing,
        )
        nbytes += 3 * n + len(c.routing)
        if nbytes > _COPY_BYTES:
            yield b"".join(pieces)
            pieces, nbytes = [], 0
    pieces.append(_COPY_TRAILER)
    yield b"".join(pieces)
