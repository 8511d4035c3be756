"""`ledger check` finds what contradicts: each broken invariant is planted in a sound ledger, and named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import sqlalchemy as sa

from scavenger.ledger import store
from scavenger.ledger.read import reports
from scavenger.ledger.schema import metadata
from scavenger.printable import amount
from tests.ledger.examples import everything, written
from tests.ledger.histories import ended, training

#: What breaks it (SQL that both databases understand), and what the check must say of it. Sample 11 moved in mid-answer: epoch 1 brought
#: tokens 0 to 4 and epoch 2 tokens 5 to 8; step 1 consumed it in attempt 1, and after a rewind in attempt 2.
HOLES: dict[str, tuple[str, str]] = {
    "a chunk under an epoch that was over": (
        "UPDATE chunks SET epoch = 1, worker_id = 1 WHERE sample_id = 11 AND epoch = 2",
        "run 1 sample 11: tokens beyond their lease (epoch 1 from 0 to 5, a chunk of it from 5 to 9)",
    ),
    "a chunk from before its lease": (
        "UPDATE chunks SET epoch = 2, worker_id = 2 WHERE sample_id = 11 AND epoch = 1",
        "run 1 sample 11: tokens beyond their lease (epoch 2 from 5 to 9, a chunk of it from 0 to 3)",
    ),
    "a lease that ended elsewhere": (
        "UPDATE leases SET end_len = 500 WHERE sample_id = 11 AND epoch = 1",
        "run 1 sample 11: lease does not follow the one before (epoch 2 at 5, not epoch 2 at 500)",
    ),
    "a lease that began elsewhere": (
        "UPDATE leases SET start_len = 1 WHERE sample_id = 11 AND epoch = 2",
        "run 1 sample 11: lease does not follow the one before (epoch 2 at 1, not epoch 2 at 5)",
    ),
    "a first lease that began with tokens": (
        "UPDATE leases SET start_len = 2 WHERE sample_id = 12",
        "run 1 sample 12: lease does not follow the one before (epoch 1 at 2, not epoch 1 at 0)",
    ),
    "an epoch that nobody held": (
        "UPDATE leases SET epoch = 3 WHERE sample_id = 11 AND epoch = 2",
        "run 1 sample 11: lease does not follow the one before (epoch 3 at 5, not epoch 2 at 5)",
    ),
    "a last lease of another length": (
        "UPDATE leases SET end_len = 500 WHERE sample_id = 11 AND epoch = 2",
        "run 1 sample 11: accepted length differs from its last lease (9 accepted, the lease ended at 500)",
    ),
    "a move that was not": (
        "UPDATE samples SET moves = 40 WHERE sample_id = 11",
        "run 1 sample 11: moves differ from its leases (40 moves, 1 in leases)",
    ),
    "a worker of another run": (
        "UPDATE workers SET run_id = 2 WHERE worker_id = 1",
        "run 1 sample 11: lease at a worker of another run",
    ),
    "an end that was not": (
        "DELETE FROM sample_ends WHERE sample_id = 11",
        "run 1 sample 11: state differs from its last end (consumed (step 1, attempt 2), but it has no end)",
    ),
    "another state than the end's": (
        "UPDATE samples SET state = 'surplus' WHERE sample_id = 11",
        "run 1 sample 11: state differs from its last end (surplus (step 1, attempt 2), the last end: consumed (step 1, attempt 2))",
    ),
    "another step than the end's": (
        "UPDATE samples SET ended_step = 99 WHERE sample_id = 11",
        "run 1 sample 11: state differs from its last end (consumed (step 99, attempt 2)",
    ),
    "consumed although it was reopened": (
        "DELETE FROM sample_ends WHERE sample_id = 11 AND attempt = 2 AND state = 'consumed'",
        "run 1 sample 11: state differs from its last end (consumed (step 1, attempt 2), the last end: reopened",
    ),
    "a step that was not": (
        "DELETE FROM steps WHERE attempt = 1",
        "run 1 sample 11: consumed by a step that was never committed (step 1, attempt 1)",
    ),
    "a gradient of nothing": (
        "DELETE FROM chunks WHERE sample_id = 11; UPDATE samples SET accepted_len = 0 WHERE sample_id = 11;"
        "UPDATE leases SET start_len = 0, end_len = 0 WHERE sample_id = 11; UPDATE samples SET moves = 0 WHERE sample_id = 11",
        "run 1 sample 11: consumed without a token (step 1)",
    ),
    "one position of the data trained on twice": (
        "UPDATE samples SET sample_index = 0, group_id = 60, state = 'consumed', ended_step = 1, ended_attempt = 2 WHERE sample_id = 61;"
        "UPDATE groups SET step = 1, prompt_index = 0, retry = 1 WHERE group_id = 60",
        "run 1 sample 61: one position of the data consumed twice (step 1, prompt 0, index 0: 2 samples)",
    ),
    "one retry twice": (
        "UPDATE groups SET step = 1, prompt_index = 0 WHERE group_id = 60",
        "run 1 sample 61: one retry of a prompt twice (step 1, prompt 0, retry 0: 2 groups)",
    ),
    "one index twice": (
        "UPDATE samples SET sample_index = 0",
        "run 1 sample 12: two samples of a group with one index (index 0)",
    ),
    "weights that were not": (
        "UPDATE leases SET version = 77 WHERE sample_id = 11; UPDATE chunks SET version = 77 WHERE sample_id = 11",
        "run 1 sample 11: a lease of weights that were never published (epoch 1, version 77)",
    ),
    "a group of weights that were not": (
        "UPDATE groups SET version = 99 WHERE group_id = 10",
        "run 1 sample 11: a group of weights that were never published (made for version 1, now of 99)",
    ),
    "a step of weights that were not": (
        "UPDATE steps SET version = 99 WHERE attempt = 2",
        "run 1: a step of weights that were never published (train step 1, attempt 2, version 99)",
    ),
    "an attempt that was not": (
        "UPDATE runs SET attempt = 9",
        "run 1: its newest attempt was never granted (attempt 9)",
    ),
    "a last step that was not": (
        "UPDATE runs SET last_step = 50",
        "run 1: its last step was never committed (step 50)",
    ),
    "more tokens than were allowed": (
        """UPDATE groups SET sampling = '{"temperature":1.0,"max_tokens":8}' WHERE group_id = 10""",
        "run 1 sample 11: more tokens than its budget (9 accepted, max_tokens 8)",
    ),
    "an engine whose job never held a GPU": (
        "DELETE FROM gpu_allocations; DELETE FROM job_states; UPDATE jobs SET restart_count = 0",
        "run 1 job i1: an engine without an allocation (worker 1, job 501, restart 0, on n3)",
    ),
    "a job that ran and has no allocation": (
        "DELETE FROM gpu_allocations",
        "run 1 job i1: seen to run without an allocation (job 501, restart 0, on n3)",
    ),
    "a preemption that nobody recorded": (
        "UPDATE jobs SET restart_count = 3",
        "run 1 job i1: fewer allocations that ended than restarts (job 501 was put back 3 times, 1 allocations say so)",
    ),
    "an allocation that goes on for ever": (
        "UPDATE gpu_allocations SET ended_at = NULL",
        "run 1 job i1: an allocation is open although its job ended (job 501, restart 0, on n3)",
    ),
    "an allocation that runs backwards": (
        "UPDATE gpu_allocations SET ended_at = started_at - 1",
        "run 1 job i1: an allocation ends before it begins (job 501, restart 0)",
    ),
    "one job's GPU counted twice": (
        "INSERT INTO gpu_allocations (intent_id, restart_count, job_id, node, gpus, started_at, ended_at, reason)"
        " SELECT intent_id, 1, job_id, node, gpus, started_at + 2, ended_at + 2, reason FROM gpu_allocations",
        "run 1 job i1: two allocations of one job overlap (job 501, restarts 0 and 1)",
    ),
    "a clipped beginning": (
        "UPDATE gpu_allocations SET started_at = started_at + 120, ended_at = ended_at + 200; UPDATE workers SET left_at = left_at + 200",
        "run 1 job i1: an engine outside its allocation (worker 1, job 501, restart 0, registered 119.0 s before it began)",
    ),
    "a clipped end": (
        "UPDATE workers SET left_at = left_at + 300 WHERE worker_id = 1",
        "run 1 job i1: an engine outside its allocation (worker 1, job 501, restart 0, said goodbye 299.0 s after it ended)",
    ),
    "no writer": (
        "DELETE FROM generations",
        "run 1: written by no daemon: the ledger names no generation (1 runs)",
    ),
}


def carried_out(engine: sa.Engine, statements: Sequence[str]) -> None:
    with engine.connect() as connection, connection.begin():
        for statement in statements:
            connection.exec_driver_sql(statement)


def saved(engine: sa.Engine) -> dict[sa.Table, list[dict[str, Any]]]:
    with engine.connect() as connection:
        return {
            table: [dict(row._mapping) for row in connection.execute(sa.select(table))]
            for table in metadata.sorted_tables
        }


def put_back(engine: sa.Engine, rows: dict[sa.Table, list[dict[str, Any]]]) -> None:
    with engine.connect() as connection, connection.begin():
        for table, held in rows.items():
            connection.execute(sa.delete(table))
            if held:
                connection.execute(sa.insert(table), held)


def test_each_hole_is_found_and_a_sound_ledger_has_none(url: str) -> None:
    written(url, everything())
    engine = store.open_engine(url)
    try:
        assert reports.check(url) == []
        before, missed = saved(engine), {}
        for name, (sql, said) in HOLES.items():
            carried_out(engine, sql.split(";"))
            found = reports.check(url)
            if not any(line.startswith(said) for line in found):
                missed[name] = found
            put_back(engine, before)
        assert missed == {}
        assert reports.check(url) == []
    finally:
        engine.dispose()


def test_a_long_history_with_its_evaluations_and_takes_is_sound(url: str) -> None:
    written(url, [*training(), ended()])
    assert reports.check(url) == []


@pytest.mark.parametrize(("n", "said"), [(0, "0 rows"), (1, "1 row"), (1200, "1,200 rows")])
def test_numbers_agree_with_their_nouns(n: int, said: str) -> None:
    assert amount(n, "row") == said
