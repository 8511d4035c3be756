"""Many rows at once: the writer's way to run a batch of a kind. Owns that SQL and nothing else.

A driver that runs a statement row by row pays for each row: on PostgreSQL a message each way, on SQLite the
interpreter's lock, released and taken again around every row, which a busy event loop gives back only after
its switch interval. So a batch becomes a table `v`, of `VALUES` on SQLite and of `unnest` over arrays on
PostgreSQL, and the row's statement is written once over it. Its expressions are those of the row's own
statement (`statements` shows that of `SampleFinished`), with `v`'s columns for the parameters. Two rows of it
on SQLite:

    UPDATE samples
    SET "state" = 'complete', "finish" = v.p_finish,
        "accepted_len" = CASE WHEN (samples.accepted_len < v.p_length) THEN v.p_length
                              ELSE samples.accepted_len END,
        "finished_at" = v.p_at
    FROM (SELECT column1 AS p_sample_id, column2 AS p_finish, column3 AS p_length, column4 AS p_at
          FROM (VALUES (?,?,?,?),(?,?,?,?))) AS v
    WHERE samples."sample_id" = v.p_sample_id

and on PostgreSQL the same with

    FROM unnest(%s::bigint[], %s::text[], %s::bigint[], %s::double precision[])
        AS v(p_sample_id, p_finish, p_length, p_at)

An insert is `INSERT INTO t ("c") SELECT v.p_x FROM (...) AS v`. An UPDATE ... FROM changes a row once, so
rows that name the same key go into statements of their own, in their order (`split_repeated_keys`).

Several statements over the same rows share one `v`, which is sent once: a temporary table on SQLite, and on
PostgreSQL one statement whose parts all read it. The end of many leases (`LeaseEnded`, of which all have one
reason) is

    WITH v AS MATERIALIZED (
        SELECT u.p_sample_id, u.p_epoch, g.p_reason, u.p_regenerated, u.p_length, u.p_at
        FROM (SELECT %s::bigint[] AS p_sample_id, %s::bigint[] AS p_epoch, %s::text AS p_reason,
                     %s::bigint[] AS p_regenerated, %s::bigint[] AS p_length, %s::double precision[] AS p_at) AS g,
             unnest(g.p_sample_id, g.p_epoch, g.p_regenerated, g.p_length, g.p_at)
                 AS u(p_sample_id, p_epoch, p_regenerated, p_length, p_at)
    ),
    s0 AS (
        UPDATE leases
        SET "reason" = v.p_reason, "regenerated" = v.p_regenerated, "end_len" = v.p_length,
            "ended_at" = v.p_at
        FROM v WHERE leases."sample_id" = v.p_sample_id AND leases."epoch" = v.p_epoch
        RETURNING 1
    )
    UPDATE samples
    SET "accepted_len" = CASE WHEN (samples.accepted_len < v.p_length) THEN v.p_length
                              ELSE samples.accepted_len END,
        "regenerated" = samples.regenerated + v.p_regenerated
    FROM v WHERE samples."sample_id" = v.p_sample_id AND (SELECT count(*) FROM s0) = %s

All of it runs in the caller's transaction. A test holds these examples to what is run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql import visitors

#: Below this a batch is not worth a statement of its own length.
FEWEST = 8
#: Rows of one statement on SQLite: powers of two up to this, so that few statements exist and the driver keeps them prepared.
SQLITE_ROWS = 512
_SQLITE_PARAMETERS = 32_766
#: UPDATE ... FROM came with 3.33.
_SQLITE_NEEDED = (3, 33)

_DIALECTS: dict[str, Any] = {"sqlite": sqlite, "postgresql": postgresql}
_POSTGRES_TYPES = {int: "bigint", str: "text", float: "double precision", bytes: "bytea", bool: "boolean"}
_AS_TEXT = ("bigint", "double precision")


@dataclass(frozen=True, slots=True)
class StatementShape:
    """An insert (`keys` empty) or an update of the row that `keys` name; `values` are expressions over parameters `p_…`."""

    table: sa.Table
    keys: tuple[str, ...]
    values: tuple[tuple[str, Any], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters in the order of the columns of `v`; keys first."""
        return _names(self)


@functools.cache
def _names(shape: StatementShape) -> tuple[str, ...]:
    found = dict.fromkeys(f"p_{key}" for key in shape.keys)
    for _, value in shape.values:
        if isinstance(value, sa.ClauseElement):
            elements: list[Any] = list(visitors.iterate(value))
            found.update(dict.fromkeys(e.key for e in elements if _is_parameter(e)))
    return tuple(found)


def _is_parameter(element: Any) -> bool:
    return isinstance(element, sa.BindParameter) and element.key.startswith("p_")


def possible(connection: sa.Connection) -> bool:
    """Whether this database has what the statements need."""
    dialect = connection.dialect
    return dialect.name != "sqlite" or tuple(dialect.server_version_info or ()) >= _SQLITE_NEEDED


def split_repeated_keys(keys: int, rows: Sequence[tuple[Any, ...]]) -> list[list[tuple[Any, ...]]]:
    """Rows apart so that no two of a list share their first `keys` values; a later list holds later rows of the same key."""
    if not keys or len({row[:keys] for row in rows}) == len(rows):
        return [list(rows)]
    made: list[list[tuple[Any, ...]]] = []
    seen: dict[tuple[Any, ...], int] = {}
    for row in rows:
        at = seen[row[:keys]] = seen.get(row[:keys], -1) + 1
        if at == len(made):
            made.append([])
        made[at].append(row)
    return made


def run(
    connection: sa.Connection,
    shape: StatementShape,
    python_types: tuple[type, ...],
    rows: Sequence[tuple[Any, ...]],
) -> int:
    """Run `shape` with every row (values in the order of `shape.names`, with `python_types`); returns how many rows it changed."""
    return sum(
        _run_distinct(connection, shape, python_types, part)
        for part in split_repeated_keys(len(shape.keys), rows)
    )


def _run_distinct(
    connection: sa.Connection,
    shape: StatementShape,
    python_types: tuple[type, ...],
    rows: Sequence[tuple[Any, ...]],
) -> int:
    if connection.dialect.name == "sqlite":
        width = len(shape.names)
        return sum(
            connection.exec_driver_sql(_sqlite(shape, len(part)), tuple(chain.from_iterable(part))).rowcount
            for part in parts(rows, min(SQLITE_ROWS, _SQLITE_PARAMETERS // width))
        )
    pg_types = tuple(_POSTGRES_TYPES[python_type] for python_type in python_types)
    arrays = tuple(
        _array(kind, column) for kind, column in zip(pg_types, zip(*rows, strict=True), strict=True)
    )
    return connection.exec_driver_sql(_postgres(shape, pg_types), arrays).rowcount


def joint_names(shapes: tuple[StatementShape, ...]) -> tuple[str, ...]:
    """Every parameter of any of the shapes, once."""
    return tuple(dict.fromkeys(name for shape in shapes for name in shape.names))


def keys_distinct(
    shapes: tuple[StatementShape, ...], names: tuple[str, ...], rows: Sequence[tuple[Any, ...]]
) -> bool:
    """Whether no two rows name the same key of a shape: only then no shape depends on what another one made of an earlier row."""
    for keys in {shape.keys for shape in shapes if shape.keys}:
        of = itemgetter(*(names.index(f"p_{key}") for key in keys))
        if len(set(map(of, rows))) < len(rows):
            return False
    return True


def run_jointly(
    connection: sa.Connection,
    shapes: tuple[StatementShape, ...],
    python_types: tuple[type, ...],
    rows: Sequence[tuple[Any, ...]],
) -> list[int]:
    """Run all shapes with every row (in the order of `joint_names`), where `keys_distinct` allows it; how many rows each of them changed.

    On PostgreSQL every update counts what the last one changed: 0 where an earlier one missed a row (`_postgres_joint`).
    """
    if connection.dialect.name != "sqlite":
        pg_types = tuple(_POSTGRES_TYPES[python_type] for python_type in python_types)
        columns = list(zip(*rows, strict=True))
        single = tuple(
            kind not in _AS_TEXT and len(set(column)) == 1
            for kind, column in zip(pg_types, columns, strict=True)
        )
        made = [
            c[0] if one else _array(kind, c) for kind, c, one in zip(pg_types, columns, single, strict=True)
        ]
        statement, guards = _postgres_joint(shapes, pg_types, single)
        changed = connection.exec_driver_sql(statement, (*made, *[len(rows)] * guards)).rowcount
        return [
            changed if shape.keys else len(rows) for shape in shapes
        ]  # an insert takes all its rows, or fails
    names = joint_names(shapes)
    connection.exec_driver_sql(f"CREATE TEMP TABLE IF NOT EXISTS {_stage(names)} ({', '.join(names)})")
    for part in parts(rows, min(SQLITE_ROWS, _SQLITE_PARAMETERS // len(names))):
        connection.exec_driver_sql(_sqlite_stage(names, len(part)), tuple(chain.from_iterable(part)))
    counts = [connection.exec_driver_sql(statement).rowcount for statement in _sqlite_joint(shapes)]
    connection.exec_driver_sql(f"DELETE FROM {_stage(names)}")
    return counts


def parts(rows: Sequence[tuple[Any, ...]], most: int) -> Iterator[Sequence[tuple[Any, ...]]]:
    """Consecutive rows in lists whose lengths are powers of two, of `most` at most."""
    at, size = 0, 1 << (most.bit_length() - 1)
    while at < len(rows):
        while size > len(rows) - at:
            size >>= 1
        yield rows[at : at + size]
        at += size


def _array(kind: str, values: Sequence[Any]) -> Any:
    """A PostgreSQL array. Numbers as its text: one join is many times faster than a driver's look at each of them."""
    if kind in _AS_TEXT:
        return "{" + ",".join(["NULL" if value is None else str(value) for value in values]) + "}"
    return list(values)


@functools.cache
def _sqlite(shape: StatementShape, rows: int) -> str:
    names = shape.names
    row = "(" + ",".join("?" * len(names)) + ")"
    columns = ", ".join(f"column{n} AS {name}" for n, name in enumerate(names, 1))
    return _statement_from(
        shape,
        _DIALECTS["sqlite"].dialect(),
        f"(SELECT {columns} FROM (VALUES {','.join([row] * rows)})) AS v",
    )


@functools.cache
def _postgres(shape: StatementShape, pg_types: tuple[str, ...]) -> str:
    arrays = ", ".join(f"%s::{kind}[]" for kind in pg_types)
    return _statement_from(
        shape, _DIALECTS["postgresql"].dialect(), f"unnest({arrays}) AS v({', '.join(shape.names)})"
    )


def _stage(names: tuple[str, ...]) -> str:
    """The temporary table for rows of these parameters; of one connection, and empty between transactions."""
    return "temp.v_" + "_".join(name.removeprefix("p_") for name in names)


@functools.cache
def _sqlite_stage(names: tuple[str, ...], rows: int) -> str:
    row = "(" + ",".join("?" * len(names)) + ")"
    return f"INSERT INTO {_stage(names)} VALUES {','.join([row] * rows)}"


@functools.cache
def _sqlite_joint(shapes: tuple[StatementShape, ...]) -> tuple[str, ...]:
    return tuple(
        _statement_from(shape, _DIALECTS["sqlite"].dialect(), f"{_stage(joint_names(shapes))} AS v")
        for shape in shapes
    )


@functools.cache
def _postgres_joint(
    shapes: tuple[StatementShape, ...], pg_types: tuple[str, ...], single: tuple[bool, ...]
) -> tuple[str, int]:
    """One statement: `v`, each shape as a part of it, the last update at its end; and how many guards it has.

    A value that all rows share travels once. Inserts take all rows or fail, so nothing counts theirs. PostgreSQL reports only the last
    update's count. If an earlier update misses a row, its guard makes the last change nothing; all updates are then reported as 0.
    (To count the rows of each part instead would cost a fifth of the whole.)
    """
    names = joint_names(shapes)
    dialect = _DIALECTS["postgresql"].dialect()
    given = {name: f"u.{name}" for name, one in zip(names, single, strict=True) if not one}
    # Parameters stand in the order of `names`: arrays and single values mixed, so each is a column of its own.
    columns = ", ".join(
        f"%s::{kind} AS {name}" if one else f"%s::{kind}[] AS {name}"
        for name, kind, one in zip(names, pg_types, single, strict=True)
    )
    arrays = ", ".join(f"g.{name}" for name in given)
    rows = ", ".join(given.get(name, f"g.{name}") for name in names)
    *before, last = sorted(
        shapes, key=lambda shape: bool(shape.keys)
    )  # inserts first; updates in their order
    parts = [
        f"v AS MATERIALIZED (SELECT {rows} FROM (SELECT {columns}) AS g, unnest({arrays}) AS u({', '.join(given)}))"
    ]
    parts += [
        f"s{n} AS ({_statement_from(shape, dialect, 'v')}{' RETURNING 1' if shape.keys else ''})"
        for n, shape in enumerate(before)
    ]
    guards = [f" AND (SELECT count(*) FROM s{n}) = %s" for n, shape in enumerate(before) if shape.keys]
    return f"WITH {', '.join(parts)} {_statement_from(last, dialect, 'v')}{''.join(guards)}", len(guards)


def _statement_from(shape: StatementShape, dialect: Any, v: str) -> str:
    columns = [(name, _expression(shape.table.c[name], value, dialect)) for name, value in shape.values]
    if not shape.keys:
        named = ", ".join(f'"{name}"' for name, _ in columns)
        return f"INSERT INTO {shape.table.name} ({named}) SELECT {', '.join(made for _, made in columns)} FROM {v}"
    where = " AND ".join(f'{shape.table.name}."{key}" = v.p_{key}' for key in shape.keys)
    changes = ", ".join(f'"{name}" = {made}' for name, made in columns)
    return f"UPDATE {shape.table.name} SET {changes} FROM {v} WHERE {where}"


def _expression(column: sa.Column[Any], value: Any, dialect: Any) -> str:
    def from_v(element: Any, **_: Any) -> Any:
        return sa.literal_column(f"v.{element.key}", element.type) if _is_parameter(element) else None

    if value is None:
        return "NULL"
    if not isinstance(value, sa.ClauseElement):
        value = sa.literal(value, column.type)
    made: Any = visitors.replacement_traverse(value, {}, from_v)
    return str(made.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
