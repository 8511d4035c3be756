"""What the writer makes of many records at once: statements over batches, and moves of samples; whole, in order, or refused whole."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from scavenger.ledger import records as r
from scavenger.ledger.faults import WriterState
from scavenger.ledger.read.reader import rows
from scavenger.ledger.store import open_engine, upgrade
from scavenger.ledger.write import batch_sql
from scavenger.ledger.write.batch_sql import StatementShape
from tests.ledger.examples import event, subjects, witness, written


def test_whether_a_batch_is_one_statement_is_decided_by_its_rows(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []
    run = batch_sql.run

    def noted(
        connection: sa.Connection,
        shape: StatementShape,
        python_types: tuple[type, ...],
        values: list[tuple[object, ...]],
    ) -> int:
        asked.append((shape.table.name, len(values)))
        return run(connection, shape, python_types, values)

    monkeypatch.setattr(batch_sql, "run", noted)
    chunks = [r.ChunkAccepted(1, 1, at, b"\1\0\0\0", b"\0" * 4, b"\0\0\0\1", 1, 1, 0.5) for at in range(20)]
    written(url, [[r.GroupCreated(1, 1, "train", 1, 0, 0, 1, b"", 64, 1, "{}", "{}", 1.0)], chunks])
    assert asked == [("samples", 64)], "one group's samples, and not the one sample of twenty chunks"
    engine = open_engine(url)
    assert rows(engine, "SELECT count(*), max(accepted_len), sum(accepted_len) FROM samples").rows == (
        (64, 20, 20),
    )
    engine.dispose()


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 511, 512, 513, 3000])
def test_a_batch_of_any_length_is_written_whole_and_in_order(url: str, rows: int) -> None:
    upgrade(url)
    with witness(url) as w:
        w.writer.submit(
            0,
            [
                r.GroupCreated(1, 1, "train", 1, 0, 0, 1, b"", rows, 1, "{}", "{}", 1.0),
                *map(event, range(rows)),
            ],
        )
        w.writer.submit(
            1,
            [
                r.ChunkAccepted(s, 1, 0, b"\1\0\0\0", b"\0" * 4, b"\0\0\0\1", 1, 1, 0.5)
                for s in range(1, rows + 1)
            ],
        )
        w.wait_ticket(1)
    engine = open_engine(url)
    chunks = rows_of(
        engine, "SELECT sample_id, n_tokens, at, tokens, logprobs, raw_logprobs FROM chunks ORDER BY id"
    )
    lengths = rows_of(engine, "SELECT sample_id, accepted_len FROM samples ORDER BY sample_id")
    engine.dispose()
    assert chunks == [(s, 1, 0.5, b"\1\0\0\0", b"\0" * 4, b"\0\0\0\1") for s in range(1, rows + 1)]
    assert lengths == [(s, 1) for s in range(1, rows + 1)]
    assert subjects(url) == list(range(rows))


def rows_of(engine: sa.Engine, sql: str) -> list[tuple[object, ...]]:
    return [
        tuple(bytes(v) if isinstance(v, memoryview) else v for v in row) for row in rows(engine, sql).rows
    ]


def test_a_sample_that_moves_often_within_one_transaction_keeps_every_move(url: str) -> None:
    """An UPDATE ... FROM changes a row once: later rows of the same key need a statement of their own."""
    upgrade(url)
    moves = [
        r.LeaseGranted(s, epoch, 10 + epoch, 1, 0 if epoch == 1 else 5, 1.0)
        for epoch in range(1, 6)
        for s in (1, 2)
    ]
    ends = [r.LeaseEnded(s, epoch, "gone", 5, epoch, 2.0) for epoch in range(1, 5) for s in (1, 2)]
    with witness(url) as w:
        w.writer.submit(
            0, [r.GroupCreated(1, 1, "train", 1, 0, 0, 1, b"", 2, 1, "{}", "{}", 1.0), *moves, *ends]
        )
        w.wait_ticket(0)
    engine = open_engine(url)
    found = rows_of(
        engine,
        "SELECT sample_id, epoch, worker_id, moves, regenerated, accepted_len FROM samples ORDER BY sample_id",
    )
    engine.dispose()
    assert found == [(1, 5, 15, 4, 10, 5), (2, 5, 15, 4, 10, 5)]


@pytest.mark.parametrize("samples", [1, 9, 600])
def test_a_move_is_its_end_and_its_grant(url: str, samples: int) -> None:
    """Three moves of each sample, the first two in one transaction; the even samples' are written as two records each."""
    upgrade(url)
    ids = range(1, samples + 1)

    def moves(epoch: int, at: float) -> list[r.Record]:
        whole = [
            r.LeaseMoved(s, epoch, "node lost" if s % 3 else "", 5 * epoch - 5, s % 4, 10 + epoch, 1, at)
            for s in ids
            if s % 2
        ]
        ended = [
            r.LeaseEnded(s, epoch, "node lost" if s % 3 else "", 5 * epoch - 5, s % 4, at)
            for s in ids
            if not s % 2
        ]
        return [
            *whole,
            *ended,
            *(r.LeaseGranted(s, epoch + 1, 10 + epoch, 1, 5 * epoch - 5, at) for s in ids if not s % 2),
        ]

    with witness(url) as w:
        made = r.GroupCreated(1, 1, "train", 1, 0, 0, 1, b"", samples, 1, "{}", "{}", 1.0)
        w.writer.submit(0, [made, *(r.LeaseGranted(s, 1, 9, 1, 0, 1.0) for s in ids)])
        w.writer.submit(1, [*moves(1, 2.0), *moves(2, 3.0)])
        w.wait_ticket(1)
        w.writer.submit(2, moves(3, 4.0))
        w.wait_ticket(2)
        assert w.writer.close(), "what is logged is folded before the end"
    engine = open_engine(url)
    found = rows_of(
        engine,
        "SELECT sample_id, epoch, worker_id, moves, regenerated, accepted_len FROM samples ORDER BY sample_id",
    )
    leases = rows_of(
        engine,
        "SELECT sample_id, epoch, worker_id, start_len, end_len, regenerated, reason, granted_at, ended_at FROM leases"
        " ORDER BY sample_id, epoch",
    )
    engine.dispose()
    assert found == [(s, 4, 13, 2, 3 * (s % 4), 10) for s in ids]
    expected: list[tuple[object, ...]] = []
    for s in ids:
        why = "node lost" if s % 3 else ""
        expected += [
            (s, e, 9 + e * (e > 1), max(0, 5 * e - 10), 5 * e - 5, s % 4, why, float(e), float(e + 1))
            for e in (1, 2, 3)
        ]
        expected.append((s, 4, 13, 10, 10, 0, "", 4.0, None))
    assert leases == expected


@pytest.mark.parametrize("samples", [1, 600])
def test_a_move_of_a_lease_that_is_not_there_is_refused_whole(url: str, samples: int) -> None:
    upgrade(url)
    with witness(url) as w:
        made = r.GroupCreated(1, 1, "train", 1, 0, 0, 1, b"", samples, 1, "{}", "{}", 1.0)
        w.writer.submit(0, [made, *(r.LeaseGranted(s, 1, 9, 1, 0, 1.0) for s in range(1, samples + 1))])
        w.wait_ticket(0)
        w.writer.submit(
            1,
            [
                r.LeaseMoved(s, 1 + (s == samples), "node lost", 0, 0, 2, 1, 2.0)
                for s in range(1, samples + 1)
            ],
        )
        w.wait_state(WriterState.FAILED)
        many = "one or more" if samples > 1 and url.startswith("postgres") else "1"
        assert f"{many} of {samples} LeaseMoved records name a row that is not there" in w.states[-1][1]
    engine = open_engine(url)
    assert rows_of(engine, "SELECT count(*) FROM leases") == [(samples,)]
    engine.dispose()


def test_a_large_batch_that_names_a_missing_row_is_refused_whole(url: str) -> None:
    upgrade(url)
    with witness(url) as w:
        w.writer.submit(0, [r.GroupCreated(1, 1, "train", 1, 0, 0, 1, b"", 8, 1, "{}", "{}", 1.0)])
        w.wait_ticket(0)
        w.writer.submit(1, [r.SampleFinished(s, "stop", 5, 1.0) for s in range(1, 12)])
        w.wait_state(WriterState.FAILED)
        assert "3 of 11 SampleFinished records name a row that is not there" in w.states[-1][1]
    engine = open_engine(url)
    assert rows_of(engine, "SELECT count(*) FROM samples WHERE state <> 'open'") == [(0,)]
    engine.dispose()
