"""The queries of `scavenger top` run on both databases, with the same answers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sqlalchemy as sa

from scavenger import resources
from scavenger.ledger import queries, store
from scavenger.ledger.read.reader import reading
from tests.ledger.examples import came_back, prologue, written
from tests.top.sites import records

PARAMETERS = {
    "run_id": 1,
    "most": 50,
    "since_step": 1,
    "step": 1,
    "sample_id": 21,
    "id": 1,
    "cluster": "",
    "node": "n3",
}
NAMES = tuple(sorted(path.stem for path in resources.path("sql/ledger").glob("top_*.sql")))
#: Of the history: how many rows each has to give.
ROWS = {
    "top_concluded": 1,
    "top_decision": 1,
    "top_decisions": 2,
    "top_departures": 1,
    "top_engines": 1,
    "top_events": 1,
    "top_moves": 3,
    "top_node_allocations": 1,
    "top_node_faults": 0,
    "top_now": 1,
    "top_poll": 1,
    "top_runs": 1,
    "top_sample": 1,
    "top_sample_ends": 0,
    "top_sample_leases": 2,
    "top_samples": 6,
    "top_steps": 1,
}


def answers(url: str, name: str) -> list[dict[str, Any]]:
    sql = queries.load(name)
    wanted = {key: value for key, value in PARAMETERS.items() if f":{key}" in sql}
    engine = store.open_readonly(url)
    try:
        with reading(engine) as connection:
            return [dict(row) for row in connection.execute(sa.text(sql), wanted).mappings()]
    finally:
        engine.dispose()


def test_every_query_answers_on_both_databases(url: str) -> None:
    written(url, records())
    assert {name: len(answers(url, name)) for name in NAMES} == ROWS
    (engine,) = answers(url, "top_engines")
    assert (engine["worker_id"], engine["samples"], engine["tokens"], engine["version"]) == (2, 1, 0, 1)
    moves = {(row["sample_id"], row["to_worker"]) for row in answers(url, "top_moves")}
    assert moves >= {(11, 2), (21, 2), (31, 0)}
    assert next(row["sample_id"] for row in answers(url, "top_samples")) == 21, "what moved comes first"
    for name in NAMES:
        for row in answers(url, name):
            assert all(isinstance(value, int | float | str | bool | None) for value in row.values()), name


@pytest.mark.parametrize("name", NAMES)
def test_a_query_reads_views_alone_so_that_a_reader_s_role_is_enough(name: str) -> None:
    sql = queries.load(name)
    assert sql.startswith("-- ")
    tables = {word.strip("(),;") for line in sql.splitlines() for word in _after_from(line)}
    assert all(table.startswith("v_") or table in {"held", "chosen", "SELECT", ""} for table in tables), (
        tables
    )


def _after_from(line: str) -> list[str]:
    if line.startswith("--"):
        return []
    words = line.split()
    return [after for before, after in itertools.pairwise(words) if before in ("FROM", "JOIN")]


def test_only_the_last_engine_of_an_allocation_ended_with_it(url: str) -> None:
    written(url, [prologue(), came_back()])
    found = [(row["worker_id"], row["allocation_end"]) for row in answers(url, "top_departures")]
    assert found == [(3, "preempted"), (1, "")]
