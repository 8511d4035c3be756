"""SQLite's write-ahead log under the writer: bounded whoever reads, written back outside of commits; and no temporary file."""

from __future__ import annotations

import os
import sqlite3
import threading
from itertools import count
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from scavenger.ledger.faults import WriterState
from scavenger.ledger.store import open_engine, upgrade
from scavenger.ledger.write import transaction
from tests.ledger.examples import event, subjects, witness


def test_a_log_that_a_reader_keeps_from_shrinking_is_measured_and_written_back_when_it_can(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "scavenger.ledger.write.wal.TIMEOUT_MS", 5
    )  # this test's clock has it tried with every commit
    upgrade(sqlite_url)
    log_file, bound = tmp_path / "state" / "ledger.sqlite3-wal", 1_000_000
    reader = sqlite3.connect(tmp_path / "state" / "ledger.sqlite3", isolation_level=None)
    clock = count(step=2)  # more than a retry's pause from one look to the next
    with (
        witness(sqlite_url, most_wal_bytes=bound, now=lambda: float(next(clock))) as w,
        capture_logs() as told,
    ):
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


def test_short_readers_that_overlap_all_the_time_do_not_let_the_log_grow(
    sqlite_url: str, tmp_path: Path
) -> None:
    upgrade(sqlite_url)
    bound, stop, largest = 500_000, threading.Event(), 0
    clock = count(step=2)
    path = tmp_path / "state" / "ledger.sqlite3"
    readers = [threading.Thread(target=read_on_and_on, args=(path, 0.02 + 0.007 * n, stop)) for n in range(4)]
    with witness(
        sqlite_url, most_wal_bytes=bound, checkpoint_bytes=bound // 2, now=lambda: float(next(clock))
    ) as w:
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


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="no /proc: which files a process has open is not told"
)
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


def test_the_log_is_written_back_by_the_watch_and_not_within_a_commit(
    sqlite_url: str, tmp_path: Path
) -> None:
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


def test_a_sync_that_fails_while_the_log_is_written_back_ends_the_writer(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade(sqlite_url)

    def broken(watch: object, how: str) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
        raise error

    monkeypatch.setattr("scavenger.ledger.write.wal.WalWatch._write_back", broken)
    with witness(sqlite_url, most_wal_bytes=0) as w:
        w.writer.submit(0, [event(0)])
        w.wait_state(WriterState.FAILED)
        assert w.acked == [0], "what was committed before is durable"
