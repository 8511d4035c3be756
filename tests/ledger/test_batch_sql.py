"""Statements over many rows find each row by its key: a plan that reads a whole table would cost more with every sample ever generated."""

from __future__ import annotations

import re

import pytest

from scavenger.ledger import records as r
from scavenger.ledger.store import open_engine
from scavenger.ledger.write import batch_sql, statements
from scavenger.ledger.write.batches import tuples
from scavenger.ledger.write.statements import KINDS, each
from tests.ledger.examples import written

UPDATES = [
    (kind, s.shape)
    for kind, known in KINDS.items()
    for s in known.statements
    if s.shape is not None and s.shape.keys
]
HOT = [(kind, shape) for kind, shape in UPDATES if shape.table.name in ("samples", "leases")]


@pytest.mark.parametrize("analyzed", [False, True])
def test_sqlite_searches_by_key(sqlite_url: str, analyzed: bool) -> None:
    many = [r.GroupCreated(1, 1, "train", 1, 0, 0, 1, b"", 3000, 1, "{}", "{}", 1.0)]
    written(sqlite_url, [[*many, *(r.LeaseGranted(s, 1, 1, 1, 0, 1.0) for s in range(1, 3001))]])
    engine = open_engine(sqlite_url)
    with engine.connect() as connection:
        if analyzed:
            connection.exec_driver_sql("ANALYZE")
        for kind, shape in HOT if analyzed else UPDATES:
            for rows in (8, batch_sql.SQLITE_ROWS):
                values = (1,) * (rows * len(shape.names))
                plan = connection.exec_driver_sql(
                    "EXPLAIN QUERY PLAN " + batch_sql._sqlite(shape, rows), values
                ).all()
                steps = [step[3] for step in plan]
                assert any(step.startswith(f"SEARCH {shape.table.name} ") for step in steps), (
                    kind,
                    rows,
                    steps,
                )
                assert not any(step.startswith(f"SCAN {shape.table.name}") for step in steps), (
                    kind,
                    rows,
                    steps,
                )
    engine.dispose()


JOINT = {
    kind: tuple(s.shape for s in known.statements if s.shape is not None and s.rows is each)
    for kind, known in KINDS.items()
}


@pytest.mark.parametrize("analyzed", [False, True])
def test_sqlite_searches_by_key_from_a_table_of_parameters_too(sqlite_url: str, analyzed: bool) -> None:
    many = [r.GroupCreated(1, 1, "train", 1, 0, 0, 1, b"", 3000, 1, "{}", "{}", 1.0)]
    written(sqlite_url, [[*many, *(r.LeaseGranted(s, 1, 1, 1, 0, 1.0) for s in range(1, 3001))]])
    engine = open_engine(sqlite_url)
    with engine.connect() as connection:
        if analyzed:
            connection.exec_driver_sql("ANALYZE")
        for kind in (r.LeaseGranted, r.LeaseEnded, r.LeaseMoved, r.SampleEnded, r.SampleReopened):
            shapes = JOINT[kind]
            names = batch_sql.joint_names(shapes)
            connection.exec_driver_sql(f"CREATE TEMP TABLE {batch_sql._stage(names)} ({', '.join(names)})")
            for shape, statement in zip(shapes, batch_sql._sqlite_joint(shapes), strict=True):
                steps = [
                    step[3] for step in connection.exec_driver_sql("EXPLAIN QUERY PLAN " + statement).all()
                ]
                if shape.keys:
                    assert any(step.startswith(f"SEARCH {shape.table.name} ") for step in steps), (
                        kind,
                        steps,
                    )
                assert not any(step.startswith(f"SCAN {shape.table.name}") for step in steps), (kind, steps)
    engine.dispose()


def test_rows_that_share_a_key_of_any_shape_are_not_run_jointly() -> None:
    shapes = JOINT[r.LeaseMoved]
    names = batch_sql.joint_names(shapes)
    epoch, sample = names.index("p_epoch"), names.index("p_sample_id")

    def row(sample_id: int, number: int) -> tuple[int, ...]:
        return tuple(sample_id if at == sample else number if at == epoch else 0 for at in range(len(names)))

    assert batch_sql.keys_distinct(shapes, names, [row(1, 1), row(2, 1)])
    assert not batch_sql.keys_distinct(shapes, names, [row(1, 1), row(2, 1), row(1, 2)]), (
        "the second move needs what the first one made"
    )


def test_rows_of_one_key_are_run_one_after_the_other() -> None:
    rows = [(1, "a"), (2, "b"), (1, "c"), (1, "d"), (2, "e")]
    assert batch_sql.split_repeated_keys(1, rows) == [[(1, "a"), (2, "b")], [(1, "c"), (2, "e")], [(1, "d")]]
    assert batch_sql.split_repeated_keys(0, rows) == [rows]


def test_parts_are_few_lengths_and_lose_nothing() -> None:
    rows = [(n,) for n in range(1323)]
    cut = [list(part) for part in batch_sql.parts(rows, 600)]
    assert [row for part in cut for row in part] == rows
    assert [len(part) for part in cut] == [512, 512, 256, 32, 8, 2, 1]


def in_one_line(text: str) -> str:
    """SQL without its layout: line ends, indents and spaces beside brackets."""
    return re.sub(r"(?<=\() | (?=\))", "", " ".join(text.split()))


def test_the_docstrings_show_the_sql_that_is_run() -> None:
    (finished,) = KINDS[r.SampleFinished].statements
    assert finished.shape is not None
    many = in_one_line(batch_sql.__doc__ or "")
    single = str(finished.sql)
    assert in_one_line(single.replace("state=:state", "state='complete'")) in in_one_line(
        statements.__doc__ or ""
    )
    assert in_one_line(batch_sql._sqlite(finished.shape, 2)) in many
    python_types, _ = tuples(finished.shape.names, each, [r.SampleFinished(1, "stop", 2, 1.0)])
    pg_types = tuple(batch_sql._POSTGRES_TYPES[one] for one in python_types)
    on_postgres = batch_sql._postgres(finished.shape, pg_types)
    start, end = on_postgres.index(" FROM unnest"), on_postgres.index(" WHERE")
    assert in_one_line(on_postgres[start:end]) in many
    shapes = JOINT[r.LeaseEnded]
    names = batch_sql.joint_names(shapes)
    python_types, _ = tuples(names, each, [r.LeaseEnded(1, 1, "worker lost", 2, 0, 1.0)])
    pg_types = tuple(batch_sql._POSTGRES_TYPES[one] for one in python_types)
    joint, _ = batch_sql._postgres_joint(shapes, pg_types, tuple(name == "p_reason" for name in names))
    assert in_one_line(joint) in many
