"""What makes the writer wait or end: which error is which stall, what is said of it, and that everything goes on when it passes."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from scavenger.errors import Fenced, LedgerError
from scavenger.ledger import faults, store
from scavenger.ledger.faults import FINAL, TRANSITIONS, WriterState, classify
from scavenger.ledger.read.reader import rows
from scavenger.ledger.store import open_engine, upgrade
from scavenger.ledger.write import transaction
from scavenger.ledger.write.writer import Backoff, Writer
from tests.ledger.conftest import new_database
from tests.ledger.examples import event, subjects, witness
from tests.ledger.test_roles import DAEMON, made_site


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
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(where)], capture_output=True, text=True
    )
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
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                " AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )
            assert ended.rowcount == 1, "autovacuum aside, the writer alone is connected"
        engine.dispose()
        w.writer.submit(1, [event(1)])
        w.wait_ticket(1)
        assert [state for state, _ in w.states] == [WriterState.LOST_CONNECTION, WriterState.OK]
    assert subjects(url) == [0, 1]


@pytest.mark.postgres
def test_a_daemon_that_stands_still_in_mid_transaction_does_not_keep_its_successor_out(
    postgres: sa.URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = new_database(postgres)
    upgrade(url)
    monkeypatch.setattr(store, "_WRITER_IDLE_TIMEOUT_MS", 300)
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


@pytest.mark.postgres
def test_a_right_that_is_missing_and_a_lock_that_is_held_have_a_cause_and_a_remedy_of_their_own(
    postgres: sa.URL,
) -> None:
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
            assert faults.explain(locked.value).startswith(
                "another process holds a lock on the ledger: 55P03"
            )
            assert faults.classify(locked.value) is WriterState.STALLED_LOCKED
            query = faults.remedy(locked.value).split("`")[1]
            assert mine in [row[0] for row in rows(impatient, query).rows], (
                "the remedy's own query names the holder"
            )
            impatient.dispose()
        holder.dispose()
