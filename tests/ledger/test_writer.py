"""What the writer promises: nothing acknowledged before it is durable, nothing lost, one writer at a time, stalls that pass."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import sqlalchemy as sa
from structlog.testing import capture_logs

from scavenger.errors import Fenced, LedgerError
from scavenger.ledger import faults, store, transaction
from scavenger.ledger import records as r
from scavenger.ledger.batch_sql import Shape
from scavenger.ledger.faults import FINAL, TRANSITIONS, WriterState, classify
from scavenger.ledger.moves import Plan
from scavenger.ledger.reader import rows
from scavenger.ledger.statements import KINDS
from scavenger.ledger.store import open_engine, upgrade
from scavenger.ledger.writer import Backoff, Writer
from tests.ledger.conftest import new_database
from tests.ledger.examples import everything, witness, written
from tests.ledger.test_roles import DAEMON, made_site

REMAINING_S = 30.0


def event(n: int, size: int = 0) -> r.Event:
    return r.Event("test", 0, str(n), "x" * size, "{}", float(n))


def subjects(url: str) -> list[int]:
    """The events in the ledger, in the order of their rows."""
    engine = open_engine(url)
    try:
        return [int(subject) for (subject,) in rows(engine, "SELECT subject FROM events WHERE kind = 'test' ORDER BY id").rows]
    finally:
        engine.dispose()


def test_every_kind_of_record_changes_its_tables(url: str) -> None:
    written(url, everything())
    engine = open_engine(url)
    counts = {
        table: rows(engine, f"SELECT count(*) FROM {table}").rows[0][0]
        for table in sa.inspect(engine).get_table_names()
        if table != "alembic_version"
    }
    derived = rows(engine, "SELECT state, moves, epoch, accepted_len, regenerated, worker_id FROM samples ORDER BY sample_id").rows
    engine.dispose()
    assert counts == {
        "generations": 1, "runs": 1, "attempts": 2, "weight_versions": 3, "steps": 2, "checkpoints": 1, "groups": 2, "samples": 3,
        "sample_ends": 7, "leases": 5, "chunks": 4, "workers": 2, "jobs": 1, "job_states": 3, "holds": 1, "cluster_samples": 1,
        "decisions": 1, "events": 1, "move_log": 0,
    }  # fmt: skip
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


def test_submissions_gather_while_a_transaction_runs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    upgrade(url)
    entered, go_on, sizes = threading.Event(), threading.Event(), []
    commit = transaction.commit_batch

    def slow(connection: sa.Connection, generation: int, batch: int, records: list[r.Record], now: float, plan: Plan) -> bool:
        sizes.append(len(records))
        entered.set()
        assert go_on.wait(REMAINING_S)
        return commit(connection, generation, batch, records, now, plan)

    monkeypatch.setattr("scavenger.ledger.writer.commit_batch", slow)
    with witness(url) as w:
        w.writer.submit(0, [event(0)])
        assert entered.wait(REMAINING_S)
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
    rival = threading.Thread(target=lambda: granted.append(transaction.grant_generation(engine, "h", 2, "v", 0.0)))
    with transaction.open_connection(engine) as connection, connection.begin():
        assert transaction._advance(connection, generation, 1, 0.0)
        rival.start()
        rival.join(0.3)
        assert rival.is_alive()
        assert granted == []
        transaction._run(connection, KINDS[r.Event].statements[0], [event(1)])
    rival.join(REMAINING_S)
    assert granted == [2]
    assert subjects(url) == [1]
    engine.dispose()


def test_two_daemons_that_start_at_once_get_two_generations(url: str) -> None:
    upgrade(url)
    engine = open_engine(url)
    granted: list[int] = []
    starters = [
        threading.Thread(target=lambda n=n: granted.append(transaction.grant_generation(engine, "h", n, "v", 0.0))) for n in range(6)
    ]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join(REMAINING_S)
    assert sorted(granted) == [1, 2, 3, 4, 5, 6]
    assert rows(engine, "SELECT generation FROM generations WHERE superseded_at IS NULL").rows == ((6,),)
    engine.dispose()


def test_a_commit_whose_answer_was_lost_is_not_repeated(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    upgrade(url)
    commit, calls = transaction.commit_batch, []

    def lossy(connection: sa.Connection, generation: int, batch: int, records: list[r.Record], now: float, plan: Plan) -> bool:
        done = commit(connection, generation, batch, records, now, plan)
        calls.append(done)
        if len(calls) == 1:
            raise sa.exc.DBAPIError("COMMIT", None, Exception("gone"), connection_invalidated=True)
        return done

    monkeypatch.setattr("scavenger.ledger.writer.commit_batch", lossy)
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
        assert w.writer.close(drain=True, timeout=REMAINING_S)
        assert w.acked[-1] == 199
        assert w.writer.state is WriterState.CLOSED
        with pytest.raises(LedgerError, match="CLOSED"):
            w.writer.submit(200, [])
    assert subjects(url) == list(range(200))


# ---------------------------------------------------------------- stalls


def test_a_full_database_stalls_and_resumes(sqlite_url: str) -> None:
    """SQLite's own SQLITE_FULL, by a limit on pages that each new connection gets."""
    upgrade(sqlite_url)
    with sqlite3.connect(sqlite_url.removeprefix("sqlite:///")) as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.close()
    limit = [pages + 20]
    with witness(sqlite_url) as w:

        def limited(driver: sqlite3.Connection, record: object) -> None:
            driver.execute(f"PRAGMA max_page_count={limit[0]}")

        sa.event.listen(w.writer.engine, "connect", limited)
        for ticket in range(10):
            w.writer.submit(ticket, [event(ticket, 20_000)])
        w.wait_state(WriterState.STALLED_DISK_FULL)
        assert "SQLITE_FULL" in w.states[-1][1]
        w.writer.submit(10, [event(10)])
        acked = w.acked[-1] if w.acked else -1
        assert set(range(acked + 1)) == set(subjects(sqlite_url)), "acknowledged is what is there"
        assert w.writer.backlog == 10 - acked
        limit[0] = 1_000_000
        w.wait_ticket(10)
        assert w.states[-1][0] is WriterState.OK
    assert subjects(sqlite_url) == list(range(11))


@contextmanager
def _small_disk(where: Path, nbytes: int) -> Iterator[Path]:
    where.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a tmpfs")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(where)], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def test_a_full_disk_stalls_and_resumes(tmp_path: Path) -> None:
    with _small_disk(tmp_path / "disk", 4 * 1024 * 1024) as disk:
        url = f"sqlite:///{disk / 'ledger.sqlite3'}"
        upgrade(url)
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(3 * 1024 * 1024))
        with witness(url) as w:
            for ticket in range(30):
                w.writer.submit(ticket, [event(ticket, 50_000)])
            w.wait_state(WriterState.STALLED_DISK_FULL)
            acked = w.acked[-1] if w.acked else -1
            assert acked < 29
            assert max(subjects(url), default=-1) == acked
            ballast.unlink()
            w.wait_ticket(29)
            assert w.states[-1][0] is WriterState.OK
            assert subjects(url) == list(range(30))
            assert w.writer.close()


def test_a_locked_ledger_stalls_and_resumes(sqlite_url: str) -> None:
    upgrade(sqlite_url)
    with witness(sqlite_url) as w:
        holder = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        w.writer.submit(0, [event(0)])
        w.wait_state(WriterState.STALLED_LOCKED)
        assert w.acked == []
        holder.execute("ROLLBACK")
        holder.close()
        w.wait_ticket(0)


def test_a_reader_in_a_long_transaction_does_not_stop_the_writer(sqlite_url: str) -> None:
    upgrade(sqlite_url)
    with witness(sqlite_url) as w:
        reader = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM events").fetchone()
        w.writer.submit(0, [event(0)])
        w.wait_ticket(0)
        reader.close()


def test_a_writer_that_is_stalled_can_be_closed_and_says_what_is_not_durable(sqlite_url: str) -> None:
    upgrade(sqlite_url)
    with witness(sqlite_url) as w:
        holder = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        w.writer.submit(0, [event(0)])
        w.wait_state(WriterState.STALLED_LOCKED)
        assert not w.writer.close(drain=True, timeout=1.2)
        assert w.writer.reason == "closed with 1 records not written"
        holder.close()
    assert subjects(sqlite_url) == []


@pytest.mark.postgres
def test_a_lost_connection_is_made_again(postgres: sa.URL) -> None:
    url = new_database(postgres)
    upgrade(url)
    with witness(url) as w:
        w.writer.submit(0, [event(0)])
        w.wait_ticket(0)
        engine = open_engine(url)
        with engine.connect() as connection:
            ended = connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            assert ended.rowcount == 1
        engine.dispose()
        w.writer.submit(1, [event(1)])
        w.wait_ticket(1)
        assert [state for state, _ in w.states] == [WriterState.LOST_CONNECTION, WriterState.OK]
    assert subjects(url) == [0, 1]


@pytest.mark.postgres
def test_a_daemon_that_stands_still_in_mid_transaction_does_not_keep_its_successor_out(
    postgres: sa.URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_WRITER_IDLE_TIMEOUT_MS", 300)
    url = new_database(postgres)
    upgrade(url)
    still, successor = open_engine(url), open_engine(url)
    first = transaction.grant_generation(still, "here", 1, "test", 1.0)
    with transaction.open_connection(still) as connection:
        connection.begin()
        connection.exec_driver_sql(f"UPDATE generations SET batch = batch WHERE generation = {first}")
        assert transaction.grant_generation(successor, "there", 2, "test", 2.0) == first + 1
        with pytest.raises(sa.exc.DBAPIError) as ended:
            connection.exec_driver_sql("SELECT 1")
        connection.invalidate()
    assert classify(ended.value) is WriterState.LOST_CONNECTION
    still.dispose()
    successor.dispose()


def test_the_states_are_a_table() -> None:
    assert set(TRANSITIONS) == set(WriterState)
    assert all(TRANSITIONS[state] <= {WriterState.CLOSED} for state in FINAL)
    assert all(WriterState.OK in TRANSITIONS[state] for state in set(WriterState) - FINAL - {WriterState.OK})


def _sqlite_error(code: int) -> sqlite3.Error:
    error = sqlite3.OperationalError("x")
    error.sqlite_errorcode = code
    return error


class _PostgresError(Exception):
    def __init__(self, sqlstate: str) -> None:
        super().__init__("x")
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (_sqlite_error(sqlite3.SQLITE_FULL), WriterState.STALLED_DISK_FULL),
        (_sqlite_error(sqlite3.SQLITE_READONLY_DBMOVED), WriterState.STALLED_READONLY),
        (_sqlite_error(sqlite3.SQLITE_BUSY_SNAPSHOT), WriterState.STALLED_LOCKED),
        (_sqlite_error(sqlite3.SQLITE_IOERR_WRITE), WriterState.STALLED_IO),
        (_sqlite_error(sqlite3.SQLITE_IOERR_FSYNC), WriterState.FAILED),
        (_sqlite_error(sqlite3.SQLITE_CORRUPT), WriterState.FAILED),
        (_PostgresError("53100"), WriterState.STALLED_DISK_FULL),
        (_PostgresError("40P01"), WriterState.STALLED_LOCKED),
        (_PostgresError("57P01"), WriterState.LOST_CONNECTION),
        (_PostgresError("25P03"), WriterState.LOST_CONNECTION),
        (_PostgresError("08006"), WriterState.LOST_CONNECTION),
        (_PostgresError("25006"), WriterState.STALLED_READONLY),
        (_PostgresError("23505"), WriterState.FAILED),
        (Fenced("x"), WriterState.FENCED),
    ],
)
def test_an_error_has_one_meaning(error: Exception, state: WriterState) -> None:
    assert classify(error) is state
    wrapped = sa.exc.DBAPIError("SELECT 1", None, error)
    assert classify(wrapped if not isinstance(error, Fenced) else error) is state


def test_pauses_grow_up_to_a_bound() -> None:
    backoff = Backoff(0.1, 2.0)
    assert [backoff.pause_s(tries) for tries in (0, 1, 2, 5, 1000)] == [0.1, 0.2, 0.4, 2.0, 2.0]


# ---------------------------------------------------------------- death

ENDLESS = """
import sys, time
from scavenger.ledger import records as r
from scavenger.ledger.writer import Writer

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
        child = subprocess.Popen([sys.executable, "-c", ENDLESS, url, str(last + 1)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        deadline = time.monotonic() + REMAINING_S
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


def test_a_log_that_a_reader_keeps_from_shrinking_is_measured_and_written_back_when_it_can(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scavenger.ledger.wal.PATIENCE_MS", 5)  # this test's clock has it tried with every commit
    upgrade(sqlite_url)
    log_file, bound = tmp_path / "state" / "ledger.sqlite3-wal", 1_000_000
    reader = sqlite3.connect(tmp_path / "state" / "ledger.sqlite3", isolation_level=None)
    clock = count(step=2)  # more than a retry's pause from one look to the next
    with witness(sqlite_url, most_wal_bytes=bound, now=lambda: float(next(clock))) as w, capture_logs() as told:
        w.writer.submit(0, [event(0)])
        w.wait_ticket(0)
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM events").fetchone() == (1,)
        for ticket in range(1, 41):  # far beyond the size at which SQLite writes its log back by itself
            w.writer.submit(ticket, [event(ticket, 2_000_000)])
            w.wait_ticket(ticket)
        assert w.states == [], "a reader does not stall the writer"
        assert reader.execute("SELECT count(*) FROM events").fetchone() == (1,), "the reader sees what it saw"
        assert log_file.stat().st_size > 75_000_000
        assert (w.writer.wal.blocked > 0, w.writer.wal.written_back) == (True, 0)
        reader.execute("COMMIT")
        w.writer.submit(41, [event(41)])
        w.wait_ticket(41)
        assert w.writer.close(drain=True)
        assert w.writer.wal_bytes <= bound
        assert w.writer.wal.written_back == 1
        *large, small = [entry for entry in told if "log is" in entry["event"]]
        assert large
        assert all(entry["log_level"] == "warning" and entry["nbytes"] > bound for entry in large)
        assert len(large) < 10, "said now and then, not with every commit"
        assert small["event"] == "ledger's log is small again"
    reader.close()
    assert subjects(sqlite_url) == list(range(42))


def read_on_and_on(path: Path, hold_s: float, stop: threading.Event) -> None:
    """Short transactions, one after the other."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
    while not stop.is_set():
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM events WHERE id < 10").fetchone()
        stop.wait(hold_s)
        connection.execute("COMMIT")
    connection.close()


def test_short_readers_that_overlap_all_the_time_do_not_let_the_log_grow(sqlite_url: str, tmp_path: Path) -> None:
    upgrade(sqlite_url)
    bound, stop, largest = 500_000, threading.Event(), 0
    clock = count(step=2)
    path = tmp_path / "state" / "ledger.sqlite3"
    readers = [threading.Thread(target=read_on_and_on, args=(path, 0.02 + 0.007 * n, stop)) for n in range(4)]
    with witness(sqlite_url, most_wal_bytes=bound, checkpoint_bytes=bound // 2, now=lambda: float(next(clock))) as w:
        for thread in readers:
            thread.start()
        try:
            for ticket in range(200):
                w.writer.submit(ticket, [event(ticket, 20_000)])
                w.wait_ticket(ticket)
                largest = max(largest, w.writer.wal_bytes)
        finally:
            stop.set()
            for thread in readers:
                thread.join()
        assert w.writer.wal.written_back >= 3
    assert largest < 4 * bound, "of about 6 MB that were written"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc: which files a process has open is not told")
def test_the_writer_makes_no_temporary_file(sqlite_url: str) -> None:
    """They would lie in /tmp, and a full /tmp would stall it."""
    upgrade(sqlite_url)
    engine = open_engine(sqlite_url)
    with transaction.open_connection(engine) as connection, connection.begin():
        assert connection.exec_driver_sql("PRAGMA temp_store").scalar() == 2
        connection.exec_driver_sql("CREATE TEMP TABLE v (x)")
        # A thousand pages: more than SQLite keeps of a temporary table before it asks for a file.
        connection.exec_driver_sql(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 4000) INSERT INTO v SELECT randomblob(4000) FROM n"
        )
        opened = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    engine.dispose()
    assert [name for name in opened if "etilqs" in name] == []


def test_whether_a_batch_is_one_statement_is_decided_by_its_rows(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    run = transaction.batch_sql.run

    def noted(connection: sa.Connection, shape: Shape, kinds: tuple[type, ...], values: list[tuple[object, ...]]) -> int:
        asked.append((shape.table.name, len(values)))
        return run(connection, shape, kinds, values)

    monkeypatch.setattr(transaction.batch_sql, "run", noted)
    chunks = [r.ChunkAccepted(1, 1, at, b"\1\0\0\0", b"\0" * 4, b"\0\0\0\1", 1, 1, 0.5) for at in range(20)]
    written(url, [[r.GroupCreated(1, 1, "train", 1, 0, 0, 1, b"", 64, 1, "{}", "{}", 1.0)], chunks])
    assert asked == [("samples", 64)], "one group's samples, and not the one sample of twenty chunks"
    engine = open_engine(url)
    assert rows(engine, "SELECT count(*), max(accepted_len), sum(accepted_len) FROM samples").rows == ((64, 20, 20),)
    engine.dispose()


@pytest.mark.postgres
def test_a_right_that_is_missing_and_a_lock_that_is_held_have_a_cause_and_a_remedy_of_their_own(postgres: sa.URL) -> None:
    with made_site(postgres) as site:
        upgrade(site.url(DAEMON))
        assert site.grant().returncode == 0
        with pytest.raises(LedgerError) as refused:
            Writer(site.url("scavenger_read"), "host", 1, "test", time.time).start()
        assert "role that was used may not do this: 42501: permission denied" in refused.value.cause
        assert "scavenger_contents" in refused.value.remedy
        holder = sa.create_engine(site.admin, poolclass=sa.NullPool)
        with holder.connect() as holding, holding.begin():
            holding.exec_driver_sql("LOCK TABLE generations")
            mine = holding.exec_driver_sql("SELECT pg_backend_pid()").scalar()
            impatient = store._postgres_engine(sa.make_url(site.url(DAEMON)), "-c lock_timeout=50")
            with pytest.raises(sa.exc.DBAPIError) as locked:
                transaction.grant_generation(impatient, "host", 1, "test", 1.0)
            assert faults.explain(locked.value).startswith("somebody holds a lock on the ledger: 55P03")
            assert faults.classify(locked.value) is WriterState.STALLED_LOCKED
            query = faults.remedy(locked.value).split("`")[1]
            assert mine in [row[0] for row in rows(impatient, query).rows], "the remedy's own query names the holder"
            impatient.dispose()
        holder.dispose()


def test_the_log_is_written_back_by_the_watch_and_not_within_a_commit(sqlite_url: str, tmp_path: Path) -> None:
    upgrade(sqlite_url)
    log_file = tmp_path / "state" / "ledger.sqlite3-wal"
    sizes = {}
    for checkpoint_bytes in (10**9, 2_000_000):
        with witness(sqlite_url, checkpoint_bytes=checkpoint_bytes) as w:
            for ticket in range(25):
                w.writer.submit(ticket, [event(ticket, 2_000_000)])
                w.wait_ticket(ticket)
            assert w.writer.close(drain=False)
            sizes[checkpoint_bytes] = w.writer.wal_bytes
        assert not log_file.exists() or log_file.stat().st_size == 0, "the last connection closed it"
    assert sizes[10**9] > 45_000_000, "SQLite alone would have written it back at 32 MB"
    assert sizes[2_000_000] < 10_000_000


def test_a_sync_that_fails_while_the_log_is_written_back_ends_the_writer(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    upgrade(sqlite_url)

    def broken(watch: object, how: str) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
        raise error

    monkeypatch.setattr("scavenger.ledger.wal.WalWatch._write_back", broken)
    with witness(sqlite_url, most_wal_bytes=0) as w:
        w.writer.submit(0, [event(0)])
        w.wait_state(WriterState.FAILED)
        assert w.acked == [0], "what was committed before is durable"


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 511, 512, 513, 3000])
def test_a_batch_of_any_length_is_written_whole_and_in_order(url: str, rows: int) -> None:
    upgrade(url)
    with witness(url) as w:
        w.writer.submit(0, [r.GroupCreated(1, 1, "train", 1, 0, 0, 1, b"", rows, 1, "{}", "{}", 1.0), *map(event, range(rows))])
        w.writer.submit(1, [r.ChunkAccepted(s, 1, 0, b"\1\0\0\0", b"\0" * 4, b"\0\0\0\1", 1, 1, 0.5) for s in range(1, rows + 1)])
        w.wait_ticket(1)
    engine = open_engine(url)
    chunks = rows_of(engine, "SELECT sample_id, n_tokens, at, tokens, logprobs, raw_logprobs FROM chunks ORDER BY id")
    lengths = rows_of(engine, "SELECT sample_id, accepted_len FROM samples ORDER BY sample_id")
    engine.dispose()
    assert chunks == [(s, 1, 0.5, b"\1\0\0\0", b"\0" * 4, b"\0\0\0\1") for s in range(1, rows + 1)]
    assert lengths == [(s, 1) for s in range(1, rows + 1)]
    assert subjects(url) == list(range(rows))


def rows_of(engine: sa.Engine, sql: str) -> list[tuple[object, ...]]:
    return [tuple(bytes(v) if isinstance(v, memoryview) else v for v in row) for row in rows(engine, sql).rows]


def test_a_sample_that_moves_often_within_one_transaction_keeps_every_move(url: str) -> None:
    """An UPDATE ... FROM changes a row once: later rows of the same key need a statement of their own."""
    upgrade(url)
    moves = [r.LeaseGranted(s, epoch, 10 + epoch, 1, 0 if epoch == 1 else 5, 1.0) for epoch in range(1, 6) for s in (1, 2)]
    ends = [r.LeaseEnded(s, epoch, "gone", 5, epoch, 2.0) for epoch in range(1, 5) for s in (1, 2)]
    with witness(url) as w:
        w.writer.submit(0, [r.GroupCreated(1, 1, "train", 1, 0, 0, 1, b"", 2, 1, "{}", "{}", 1.0), *moves, *ends])
        w.wait_ticket(0)
    engine = open_engine(url)
    found = rows_of(engine, "SELECT sample_id, epoch, worker_id, moves, regenerated, accepted_len FROM samples ORDER BY sample_id")
    engine.dispose()
    assert found == [(1, 5, 15, 4, 10, 5), (2, 5, 15, 4, 10, 5)]


@pytest.mark.parametrize("samples", [1, 9, 600])
def test_a_move_is_its_end_and_its_grant(url: str, samples: int) -> None:
    """Three moves of each sample, the first two in one transaction; the even samples' are written as two records each."""
    upgrade(url)
    ids = range(1, samples + 1)

    def moves(epoch: int, at: float) -> list[r.Record]:
        whole = [r.LeaseMoved(s, epoch, "node lost" if s % 3 else "", 5 * epoch - 5, s % 4, 10 + epoch, 1, at) for s in ids if s % 2]
        ended = [r.LeaseEnded(s, epoch, "node lost" if s % 3 else "", 5 * epoch - 5, s % 4, at) for s in ids if not s % 2]
        return [*whole, *ended, *(r.LeaseGranted(s, epoch + 1, 10 + epoch, 1, 5 * epoch - 5, at) for s in ids if not s % 2)]

    with witness(url) as w:
        made = r.GroupCreated(1, 1, "train", 1, 0, 0, 1, b"", samples, 1, "{}", "{}", 1.0)
        w.writer.submit(0, [made, *(r.LeaseGranted(s, 1, 9, 1, 0, 1.0) for s in ids)])
        w.writer.submit(1, [*moves(1, 2.0), *moves(2, 3.0)])
        w.wait_ticket(1)
        w.writer.submit(2, moves(3, 4.0))
        w.wait_ticket(2)
        assert w.writer.close(), "what is logged is folded before the end"
    engine = open_engine(url)
    found = rows_of(engine, "SELECT sample_id, epoch, worker_id, moves, regenerated, accepted_len FROM samples ORDER BY sample_id")
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
        expected += [(s, e, 9 + e * (e > 1), max(0, 5 * e - 10), 5 * e - 5, s % 4, why, float(e), float(e + 1)) for e in (1, 2, 3)]
        expected.append((s, 4, 13, 10, 10, 0, "", 4.0, None))
    assert leases == expected


@pytest.mark.parametrize("samples", [1, 600])
def test_a_move_of_a_lease_that_is_not_there_is_refused_whole(url: str, samples: int) -> None:
    upgrade(url)
    with witness(url) as w:
        made = r.GroupCreated(1, 1, "train", 1, 0, 0, 1, b"", samples, 1, "{}", "{}", 1.0)
        w.writer.submit(0, [made, *(r.LeaseGranted(s, 1, 9, 1, 0, 1.0) for s in range(1, samples + 1))])
        w.wait_ticket(0)
        w.writer.submit(1, [r.LeaseMoved(s, 1 + (s == samples), "node lost", 0, 0, 2, 1, 2.0) for s in range(1, samples + 1)])
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
