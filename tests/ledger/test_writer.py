"""What the writer promises: nothing acknowledged before it is durable, nothing lost, one writer at a time. See `test_writer_*` too."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from scavenger.errors import Fenced, LedgerError
from scavenger.ledger import records as r
from scavenger.ledger.faults import WriterState
from scavenger.ledger.read.reader import rows
from scavenger.ledger.store import open_engine, upgrade
from scavenger.ledger.write import batches, transaction
from scavenger.ledger.write.moves import MovePlan
from scavenger.ledger.write.statements import KINDS
from scavenger.ledger.write.transaction import Generation
from scavenger.ledger.write.writer import Writer
from tests.ledger.examples import WAIT_S, event, everything, subjects, witness, written


def test_every_kind_of_record_changes_its_tables(url: str) -> None:
    written(url, everything())
    engine = open_engine(url)
    counts = {
        table: rows(engine, f"SELECT count(*) FROM {table}").rows[0][0]
        for table in sa.inspect(engine).get_table_names()
        if table != "alembic_version"
    }
    derived = rows(
        engine,
        "SELECT state, moves, epoch, accepted_len, regenerated, worker_id FROM samples ORDER BY sample_id",
    ).rows
    engine.dispose()
    assert counts == {
        "generations": 1,
        "runs": 1,
        "attempts": 2,
        "weight_versions": 3,
        "steps": 2,
        "checkpoints": 1,
        "groups": 2,
        "samples": 3,
        "sample_ends": 7,
        "leases": 5,
        "chunks": 4,
        "workers": 2,
        "jobs": 1,
        "job_states": 3,
        "gpu_allocations": 1,
        "job_runs": 1,
        "cluster_polls": 1,
        "decisions": 1,
        "events": 1,
        "move_log": 0,
        "other_users_waits": 1,
        "training_jobs": 1,
        "engine_deaths": 1,
        "node_quarantines": 1,
        "deliveries": 1,
        "delivered_turns": 1,
        "episodes": 1,
        "turns": 1,
        "turn_samples": 1,
        "token_differences": 1,
        "tool_calls": 2,
    }
    assert derived == (("consumed", 1, 2, 9, 2, 2), ("consumed", 0, 1, 4, 0, 2), ("surplus", 0, 2, 0, 1, 2))


def test_one_transaction_or_many_leave_the_same_ledger(sqlite_url: str, tmp_path: Path) -> None:
    other = f"sqlite:///{tmp_path / 'other.sqlite3'}"
    written(sqlite_url, [[record] for submission in everything() for record in submission])
    written(other, [[record for submission in everything() for record in submission]])
    dumps = []
    for each in (sqlite_url, other):
        with sqlite3.connect(each.removeprefix("sqlite:///")) as connection:
            dumps.append([line for line in connection.iterdump() if '"generations"' not in line])
        connection.close()
    assert dumps[0] == dumps[1]


def held_commits(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event, list[int]]:
    """Commits wait: the event that one has begun, the one that lets them go on, and how many records each has."""
    entered, go_on, sizes, commit = (
        threading.Event(),
        threading.Event(),
        list[int](),
        transaction.commit_batch,
    )

    def slow(
        connection: sa.Connection,
        generation: Generation,
        batch: int,
        records: list[r.Record],
        now: float,
        plan: MovePlan,
    ) -> bool:
        sizes.append(len(records))
        entered.set()
        assert go_on.wait(WAIT_S)
        return commit(connection, generation, batch, records, now, plan)

    monkeypatch.setattr("scavenger.ledger.write.writer.commit_batch", slow)
    return entered, go_on, sizes


def test_a_list_that_its_owner_empties_after_the_submission_is_written_whole(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harvester does that with its events: `harvest_stopped` was never in the ledger, and counted as not durable for ever."""
    upgrade(url)
    entered, go_on, _ = held_commits(monkeypatch)
    with witness(url) as w:
        w.writer.submit(0, [event(0)])
        assert entered.wait(WAIT_S)
        records: list[r.Record] = [event(1), event(2)]
        w.writer.submit(1, records)
        records.clear()
        go_on.set()
        w.wait_ticket(1)
        assert (w.writer.backlog, w.writer.backlog_bytes) == (0, 0)
    assert subjects(url) == [0, 1, 2]


def test_submissions_gather_while_a_transaction_runs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    upgrade(url)
    entered, go_on, sizes = held_commits(monkeypatch)
    with witness(url) as w:
        w.writer.submit(0, [event(0)])
        assert entered.wait(WAIT_S)
        for ticket in range(1, 101):
            w.writer.submit(ticket, [event(ticket)])
        assert w.writer.backlog == 101
        assert w.writer.backlog_bytes > 101
        assert w.acked == [], "nothing is acknowledged before its commit"
        go_on.set()
        w.wait_ticket(100)
        assert (w.writer.backlog, w.writer.backlog_bytes) == (0, 0)
    assert sizes == [1, 100]
    assert subjects(url) == list(range(101))


def test_a_transaction_has_a_largest_size(url: str) -> None:
    upgrade(url)
    with witness(url, max_batch_bytes=5_000) as w:
        for ticket in range(40):
            w.writer.submit(ticket, [event(ticket, 2_000)])
        w.wait_ticket(39)
    assert len(w.acked) >= 20
    assert subjects(url) == list(range(40))


def test_an_empty_submission_is_acknowledged_in_its_turn(url: str) -> None:
    upgrade(url)
    with witness(url) as w:
        w.writer.submit(3, [])
        w.writer.submit(5, [event(1)])
        w.writer.submit(9, [])
        w.wait_ticket(9)
        with pytest.raises(LedgerError, match="does not follow"):
            w.writer.submit(9, [])


def test_a_newer_writer_fences_the_older_one(url: str) -> None:
    upgrade(url)
    with witness(url) as old, witness(url) as new:
        assert (old.writer.generation, new.writer.generation) == (1, 2)
        new.writer.submit(1, [event(2)])
        new.wait_ticket(1)
        old.writer.submit(1, [event(1)])
        old.wait_state(WriterState.FENCED)
        assert "generation 2 (host host, pid 1)" in old.states[-1][1]
        with pytest.raises(Fenced, match="another daemon owns this ledger"):
            old.writer.submit(2, [event(3)])
        assert old.acked == []
        assert not old.writer.close(drain=True, timeout=1)
        new.writer.submit(2, [event(4)])
        new.wait_ticket(2)
    assert subjects(url) == [2, 4]


def test_what_was_committed_before_a_newer_generation_stays_acknowledged(url: str) -> None:
    """The answer to a commit is lost, then another daemon takes over: the tickets are durable, and the writer may say so."""
    upgrade(url)
    engine = open_engine(url)
    generation = transaction.grant_generation(engine, "h", 1, "v", 0.0)
    with transaction.open_connection(engine) as connection:
        assert transaction.commit_batch(connection, generation, 1, [event(1)], 0.0)
    transaction.grant_generation(engine, "h", 2, "v", 0.0)
    with transaction.open_connection(engine) as connection:
        assert not transaction.commit_batch(connection, generation, 1, [event(1)], 0.0)
        with pytest.raises(Fenced):
            transaction.commit_batch(connection, generation, 2, [event(2)], 0.0)
    engine.dispose()
    assert subjects(url) == [1]


def test_a_new_generation_waits_for_the_transaction_in_progress(url: str) -> None:
    """Otherwise a commit could land after the new daemon took its snapshot."""
    upgrade(url)
    engine = open_engine(url)
    generation = transaction.grant_generation(engine, "h", 1, "v", 0.0)
    granted: list[int] = []
    rival = threading.Thread(
        target=lambda: granted.append(transaction.grant_generation(engine, "h", 2, "v", 0.0))
    )
    with transaction.open_connection(engine) as connection, connection.begin():
        assert transaction._advance(connection, generation, 1, 0.0)
        rival.start()
        rival.join(0.3)
        assert rival.is_alive()
        assert granted == []
        batches._run(connection, KINDS[r.Event].statements[0], [event(1)])
    rival.join(WAIT_S)
    assert granted == [2]
    assert subjects(url) == [1]
    engine.dispose()


def test_two_daemons_that_start_at_once_get_two_generations(url: str) -> None:
    upgrade(url)
    engine = open_engine(url)
    granted: list[int] = []
    starters = [
        threading.Thread(
            target=lambda n=n: granted.append(transaction.grant_generation(engine, "h", n, "v", 0.0))
        )
        for n in range(6)
    ]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join(WAIT_S)
    assert sorted(granted) == [1, 2, 3, 4, 5, 6]
    assert rows(engine, "SELECT generation FROM generations WHERE superseded_at IS NULL").rows == ((6,),)
    engine.dispose()


def test_a_commit_whose_answer_was_lost_is_not_repeated(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    upgrade(url)
    commit, calls = transaction.commit_batch, []

    def lossy(
        connection: sa.Connection,
        generation: Generation,
        batch: int,
        records: list[r.Record],
        now: float,
        plan: MovePlan,
    ) -> bool:
        done = commit(connection, generation, batch, records, now, plan)
        calls.append(done)
        if len(calls) == 1:
            raise sa.exc.DBAPIError("COMMIT", None, Exception("gone"), connection_invalidated=True)
        return done

    monkeypatch.setattr("scavenger.ledger.write.writer.commit_batch", lossy)
    with witness(url) as w:
        w.writer.submit(0, [event(0)])
        w.wait_ticket(0)
        w.writer.submit(1, [event(1)])
        w.wait_ticket(1)
        assert [state for state, _ in w.states] == [WriterState.LOST_CONNECTION, WriterState.OK]
    assert calls == [True, False, True]
    assert subjects(url) == [0, 1]


def test_a_record_that_names_no_row_stops_the_writer_and_writes_nothing(url: str) -> None:
    upgrade(url)
    with witness(url) as w:
        w.writer.submit(0, [event(0), r.SampleFinished(99, "stop", 1, 0.0)])
        w.wait_state(WriterState.FAILED)
        assert "SampleFinished" in w.states[-1][1]
        assert w.acked == []
        with pytest.raises(LedgerError, match="FAILED"):
            w.writer.submit(1, [event(1)])
    assert subjects(url) == []


def test_a_record_that_exists_already_stops_the_writer(url: str) -> None:
    written(url, everything())
    with witness(url) as w:
        w.writer.submit(0, [everything()[0][0]])
        w.wait_state(WriterState.FAILED)
        assert w.acked == []


def test_close_drains(url: str) -> None:
    upgrade(url)
    with witness(url) as w:
        for ticket in range(200):
            w.writer.submit(ticket, [event(ticket)])
        assert w.writer.close(drain=True, timeout=WAIT_S)
        assert w.acked[-1] == 199
        assert w.writer.state is WriterState.CLOSED
        with pytest.raises(LedgerError, match="CLOSED"):
            w.writer.submit(200, [])
    assert subjects(url) == list(range(200))


# ---------------------------------------------------------------- death

ENDLESS = """
import sys, time
from scavenger.ledger import records as r
from scavenger.ledger.write.writer import Writer

def acked(ticket):
    sys.stdout.write(f"{ticket}\\n")
    sys.stdout.flush()

writer = Writer(sys.argv[1], "host", 1, "test", time.time, on_commit=acked)
writer.start()
first = int(sys.argv[2])
for ticket in range(first, first + 10_000_000):
    while writer.backlog > 500:
        time.sleep(0.001)
    writer.submit(ticket, [r.Event("test", 0, str(ticket), "x" * 200, "{}", 0.0)] * 1)
"""


def test_what_was_acknowledged_outlives_kill_9(url: str) -> None:
    upgrade(url)
    last = -1
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", ENDLESS, url, str(last + 1)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        deadline = time.monotonic() + WAIT_S
        first = last
        while last < first + 300 and time.monotonic() < deadline:
            last = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        last = max([last, *(int(line) for line in child.stdout.read().splitlines() if line)])
        child.wait()
        child.stdout.close()
        found = subjects(url)
        assert found == list(range(len(found))), "in order, without a gap, none twice"
        assert len(found) > last, "every acknowledged ticket is there"
        last = len(found) - 1
    engine = open_engine(url)
    assert rows(engine, "SELECT max(generation) FROM generations").rows == ((3,),)
    engine.dispose()


def test_the_writer_reports_a_ledger_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="cannot be opened"):
        Writer(f"sqlite:///{tmp_path / 'file' / 'ledger.sqlite3'}", "host", 1, "test", time.time)
