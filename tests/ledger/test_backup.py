"""Backups while somebody writes, restores that fence everybody, and histories that cannot be mistaken for one another."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from scavenger.cli.main import app
from scavenger.config import DaemonConfig
from scavenger.daemon import main, ownership
from scavenger.errors import Fenced, LedgerError
from scavenger.ledger import records as rec
from scavenger.ledger import restoring, store
from scavenger.ledger.maintain import backup
from scavenger.ledger.read import reader, reports
from scavenger.ledger.write import transaction
from scavenger.ledger.write.transaction import NO_WRITER, Announced
from scavenger.ledger.write.writer import Writer, WriterState
from scavenger.protocol import keys
from tests.ledger.conftest import new_database
from tests.ledger.examples import T0, everything, written
from tests.ledger.histories import fetch
from tests.ledger.test_roles import DAEMON, ROLES, Site, execute, made_site, scalar


def note(text: str) -> rec.Event:
    return rec.Event("test", 0, text, "", "{}", 1.0)


def generation_of(url: str, announced: Announced = NO_WRITER) -> transaction.Generation:
    engine = store.open_engine(url)
    try:
        return transaction.grant_generation(engine, "h", 1, "v", 0.0, announced)
    finally:
        engine.dispose()


def events(url: str) -> list[str]:
    engine = store.open_readonly(url)
    try:
        return [
            row[0]
            for row in reader.rows(engine, "SELECT subject FROM events WHERE kind = 'test' ORDER BY id").rows
        ]
    finally:
        engine.dispose()


def commit(url: str, generation: transaction.Generation, batch: int, *records: rec.Record) -> bool:
    engine = store.open_engine(url)
    try:
        with transaction.open_connection(engine) as connection:
            return transaction.commit_batch(connection, generation, batch, records, 1.0)
    finally:
        engine.dispose()


def restored(url: str, copy: Path, announced: Announced = NO_WRITER) -> int:
    state_dir = copy.parent / "state"
    generation = backup.restore(url, copy, state_dir, announced, "h", 2.0).generation
    assert restoring.find(state_dir) is None
    return generation


# ---------------------------------------------------------------- backup


def test_a_backup_restored_is_the_ledger_as_it_was(url: str, tmp_path: Path) -> None:
    written(url, everything())
    copy = tmp_path / "copy"
    backup.backup(url, copy)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    engine = store.open_readonly(url)
    before = reader.read_snapshot(engine)
    generation = generation_of(url)
    commit(url, generation, 1, note("lost"))
    assert restored(url, copy) == generation + 1
    assert reader.read_snapshot(engine) == before
    assert events(url) == []
    engine.dispose()
    with pytest.raises(LedgerError, match="never replaces another"):
        backup.backup(url, copy)


def test_a_backup_taken_while_the_writer_commits_is_one_state_of_the_ledger(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup, "PAGES", 8)
    store.upgrade(sqlite_url)
    writer = Writer(sqlite_url, "h", 1, "v", time.time)
    writer.start()
    stop = threading.Event()

    def write() -> None:
        ticket = 0
        while not stop.is_set():
            ticket += 1
            writer.submit(ticket, [note(f"{ticket}a" + "x" * 4000), note(f"{ticket}b" + "x" * 4000)])
            while writer.backlog > 20:
                stop.wait(0.001)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        while len(events(sqlite_url)) < 200:
            stop.wait(0.01)
        backup.backup(sqlite_url, tmp_path / "copy")
    finally:
        stop.set()
        thread.join()
        writer.close()
    assert writer.state is WriterState.CLOSED
    found = events(f"sqlite:///{tmp_path / 'copy'}")
    assert 200 <= len(found) < len(events(sqlite_url)), "it was written on meanwhile"
    assert [name.rstrip("x") for name in found] == [
        f"{1 + i // 2}{'ab'[i % 2]}" for i in range(len(found))
    ], "no half transaction, no gap"


def test_what_is_no_backup_is_refused_and_replaces_nothing(sqlite_url: str, tmp_path: Path) -> None:
    written(sqlite_url, everything())
    garbage, empty = tmp_path / "garbage", tmp_path / "empty"
    garbage.write_bytes(b"not a database" * 1000)
    with contextlib.closing(sqlite3.connect(empty)) as connection:
        connection.execute("CREATE TABLE t (x)")
    for wrong in (garbage, empty, tmp_path / "nowhere"):
        with pytest.raises(LedgerError, match="backup"):
            restored(sqlite_url, wrong)
    assert generation_of(sqlite_url).restored is False


def test_a_file_that_cannot_be_written_or_read_is_named(sqlite_url: str, tmp_path: Path) -> None:
    written(sqlite_url, everything())
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LedgerError, match=r"the backup .*/copy cannot be written: ") as refused:
        backup.backup(sqlite_url, tmp_path / "file" / "copy")
    assert "install -d -o " in refused.value.remedy
    # root, who may run this, is denied nothing; since Python 3.14 a path says of such a name only that there is no file
    with pytest.raises(LedgerError, match=r"cannot be read: File name too long|there is no backup"):
        restored(sqlite_url, tmp_path / ("x" * 300))
    assert generation_of(sqlite_url).restored is False


def test_a_damaged_ledger_is_set_aside_and_replaced(sqlite_url: str, tmp_path: Path) -> None:
    written(sqlite_url, everything())
    backup.backup(sqlite_url, tmp_path / "copy")
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    path.write_bytes(b"damaged" * 5000)
    restored(sqlite_url, tmp_path / "copy", Announced(40, "u"))
    assert generation_of(sqlite_url) == 42, (
        "beyond the one that was announced, and the one that ended the old history"
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (aside,) = path.parent.glob("*.damaged-*[0-9]")
    assert aside.read_bytes().startswith(b"damaged")


def test_a_backup_replaces_a_ledger_of_another_page_size(sqlite_url: str, tmp_path: Path) -> None:
    """As one that an older release made: SQLite copies no pages into a write-ahead log of another size."""
    written(sqlite_url, everything())
    backup.backup(sqlite_url, tmp_path / "copy")
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    path.unlink()
    older = sqlite3.connect(path)
    for statement in (
        "PRAGMA page_size=4096",
        "PRAGMA journal_mode=WAL",
        "CREATE TABLE t (x)",
        "INSERT INTO t VALUES (1)",
    ):
        older.execute(statement)
    older.commit()
    older.close()
    restored(sqlite_url, tmp_path / "copy")
    assert generation_of(sqlite_url).restored
    assert reports.check(sqlite_url) == []


# ---------------------------------------------------------------- everybody is fenced


def test_a_daemon_at_work_is_fenced_by_a_restore_in_its_next_transaction(url: str, tmp_path: Path) -> None:
    store.upgrade(url)
    backup.backup(url, tmp_path / "copy")
    fenced = threading.Event()
    writer = Writer(
        url,
        "h",
        1,
        "v",
        time.time,
        on_state=lambda state, _: fenced.set() if state is WriterState.FENCED else None,
    )
    first = writer.start()
    writer.submit(1, [note("before")])
    while writer.backlog:
        time.sleep(0.005)  # between two looks at the backlog
    restored(url, tmp_path / "copy")
    writer.submit(2, [note("after")])
    assert fenced.wait(10), (writer.state, writer.reason)
    assert "restored" in writer.reason
    assert "no daemon owns it now" in writer.reason
    with pytest.raises(Fenced, match="restored, start this one again"):
        writer.submit(3, [note("later")])
    writer.close(drain=False)
    assert events(url) == []
    assert generation_of(url) > first


def test_a_generation_of_the_other_history_with_the_same_number_and_batch_is_fenced_by_its_uid(
    url: str, tmp_path: Path
) -> None:
    store.upgrade(url)
    copy = tmp_path / "copy"
    backup.backup(url, copy)
    other = generation_of(url)
    commit(url, other, 1, note("other"))
    engine = store.open_engine(url)
    with (
        engine.begin() as connection
    ):  # the disk was put back under everybody, and nothing marks it: no file tells of `other`
        connection.exec_driver_sql("DELETE FROM generations")
        connection.exec_driver_sql("DELETE FROM events")
    engine.dispose()
    mine = generation_of(url)
    assert (int(mine), mine.uid != other.uid) == (int(other), True)
    commit(url, mine, 1, note("mine"))
    with pytest.raises(Fenced, match="restored"):
        commit(url, other, 2, note("stale"))
    with pytest.raises(Fenced, match="restored"):
        commit(url, other, 1, note("stale"))
    assert events(url) == ["mine"]


def test_generations_go_beyond_what_was_announced_and_another_history_begins(url: str) -> None:
    store.upgrade(url)
    first = generation_of(url)
    second = generation_of(url, Announced(int(first), first.uid))
    assert (second, second.timeline, second.restored, second.began) == (2, first.timeline, False, "")
    later = generation_of(url, Announced(9, "unknown"))
    assert (later, later.restored) == (10, True)
    assert "9 was announced, and this ledger ends at 2" in later.began
    assert later.timeline != first.timeline
    after = generation_of(url, Announced(int(later), later.uid))
    assert (after, after.timeline, after.restored, after.began) == (11, later.timeline, True, "")
    twin = generation_of(url, Announced(11, "another daemon"))
    assert "another history" in twin.began


def test_a_ledger_that_was_put_back_by_other_means_is_marked(url: str) -> None:
    store.upgrade(url)
    first = generation_of(url)
    assert backup.mark(url, Announced(5, "x"), "h", 2.0) == 6
    with pytest.raises(Fenced):
        commit(url, first, 1, note("stale"))
    second = generation_of(url)
    assert (second, second.restored, second.began) == (7, True, "")
    assert second.timeline != first.timeline


# ---------------------------------------------------------------- killed, asked, kept

KILLED = """
import os, signal, sys
from pathlib import Path
from scavenger.daemon import ownership
from scavenger.config import DaemonConfig
from scavenger.ledger.maintain import backup
backup.mark = lambda *args, **how: os.kill(os.getpid(), signal.SIGKILL)
daemon = {"state_dir": sys.argv[1], "ledger": sys.argv[2]}
ownership.restore_ledger(DaemonConfig.model_validate({"daemon": daemon}), Path(sys.argv[3]), force=True)
"""


def killed_between(state_dir: Path, url: str, copy: Path) -> None:
    """`scavenger ledger restore`, killed when the contents are replaced and before the new history begins."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(state_dir), url, str(copy)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_a_restore_killed_before_its_history_begins_has_the_next_daemon_begin_it(
    url: str, tmp_path: Path
) -> None:
    state_dir = tmp_path / "state"
    store.upgrade(url)
    first = generation_of(
        url
    )  # the backup is taken within its life: nothing in the restored ledger contradicts what was announced
    keys.write_rendezvous(state_dir, keys.Rendezvous("tcp://h:1", "k", int(first), 1, "h", first.uid))
    backup.backup(url, tmp_path / "copy")
    commit(url, first, 1, note("lost"))
    killed_between(state_dir, url, tmp_path / "copy")
    assert events(url) == [], "the contents are the backup's"
    assert stat.S_IMODE(restoring.path_in(state_dir).stat().st_mode) == 0o600
    writer = Writer(url, "h", 1, "v", time.time, announced=ownership.announced(state_dir))
    second = writer.start()
    writer.close()
    assert "a restore from copy was begun and not seen to its end" in second.began
    assert (second > first, second.restored, second.timeline != first.timeline) == (True, True, True)
    assert ownership.announced(state_dir).unfinished == "", "it is told once"
    third = generation_of(url, Announced(int(second), second.uid))
    assert (third.timeline, third.began) == (second.timeline, "")


def test_a_restore_that_was_killed_can_be_repeated(url: str, tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    config = DaemonConfig.model_validate({"daemon": {"state_dir": state_dir, "ledger": url}})
    store.upgrade(url)
    backup.backup(url, tmp_path / "copy")
    for _ in range(3):
        latest = generation_of(url)  # no file tells of it, and the backup does not know it
    killed_between(state_dir, url, tmp_path / "copy")
    done = ownership.restore_ledger(config, tmp_path / "copy", force=True)
    assert done.generation == latest + 1, "beyond the ledger that the killed one replaced"
    assert restoring.find(state_dir) is None
    with pytest.raises(Fenced, match="restored"):
        commit(url, latest, 1, note("stale"))


def test_a_note_that_cannot_be_read_counts(url: str, tmp_path: Path) -> None:
    store.upgrade(url)
    first = generation_of(url)
    restoring.begin(tmp_path, restoring.Note("copy", 1, 1.0))
    restoring.path_in(tmp_path).write_bytes(b"torn")
    assert generation_of(url, ownership.announced(tmp_path)).timeline != first.timeline


def test_a_restore_that_replaced_nothing_leaves_the_history_as_it_is(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(sqlite_url, everything())
    backup.backup(sqlite_url, tmp_path / "copy")
    monkeypatch.setattr(backup, "RESTORE_WAIT_S", 0.1)
    stopped = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    stopped.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerError, match=r"cannot be replaced(.|\n)*database is locked"):
        restored(sqlite_url, tmp_path / "copy")
    stopped.close()
    assert restoring.find(tmp_path / "state") is None
    assert generation_of(sqlite_url).restored is False


@pytest.mark.postgres
def test_a_backup_of_the_other_database_is_named(postgres: sa.URL, tmp_path: Path) -> None:
    urls = {
        "SQLite": f"sqlite:///{tmp_path / 'state' / 'ledger.sqlite3'}",
        "PostgreSQL": new_database(postgres),
    }
    for kind, url in urls.items():
        store.upgrade(url)
        backup.backup(url, tmp_path / kind)
    for kind, other in (("SQLite", "PostgreSQL"), ("PostgreSQL", "SQLite")):
        with pytest.raises(
            LedgerError, match=f"is a backup of a {kind} ledger, and this ledger is kept in {other}"
        ):
            restored(urls[other], tmp_path / kind)
    assert backup.survey(urls["PostgreSQL"], tmp_path / "PostgreSQL").taken.startswith("20")
    (tmp_path / "garbage").write_bytes(b"x" * 100)
    with pytest.raises(LedgerError, match="is not a backup"):
        restored(urls["PostgreSQL"], tmp_path / "garbage")


def test_the_command_says_what_is_lost_asks_and_keeps_the_replaced_ledger(tmp_path: Path) -> None:
    config = config_of(tmp_path / "state")
    (tmp_path / "scavenger.toml").write_text(f'[daemon]\nstate_dir = "{tmp_path / "state"}"\n')
    store.upgrade(config.ledger_url)
    generation_of(config.ledger_url)
    backup.backup(config.ledger_url, tmp_path / "copy")
    written(config.ledger_url, everything())
    command = [
        "ledger",
        "restore",
        str(tmp_path / "copy"),
        "--config",
        str(tmp_path / "scavenger.toml"),
        "--force",
    ]
    refused = CliRunner().invoke(app, command, input="n\n")
    assert refused.exit_code == 1, refused.output
    assert "1970-01-01 00:00:00 UTC (its newest commit)" in refused.output
    assert "not in the backup: sorting" in refused.output
    assert "nothing was replaced" in refused.output
    state = reader.read_snapshot(engine := store.open_readonly(config.ledger_url))
    engine.dispose()
    assert state.runs
    done = CliRunner().invoke(app, [*command, "--yes"])
    assert done.exit_code == 0, done.output
    (kept,) = (tmp_path / "state").glob("*.replaced-*")
    assert str(kept) in done.output.replace("\n", "")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    old = store.open_readonly(f"sqlite:///{kept}")
    assert reader.read_snapshot(old) == state
    old.dispose()
    assert reports.check(config.ledger_url) == []


# ---------------------------------------------------------------- who holds it


def config_of(state_dir: Path) -> DaemonConfig:
    return DaemonConfig.model_validate({"daemon": {"state_dir": state_dir}})


@pytest.mark.postgres
def test_the_command_says_of_postgresql_too_what_is_lost_and_that_nothing_is_kept(
    postgres: sa.URL, tmp_path: Path
) -> None:
    url = new_database(postgres)
    (tmp_path / "scavenger.toml").write_text(
        f'[daemon]\nstate_dir = "{tmp_path / "state"}"\nledger = "{url}"\n'
    )
    command = [
        "ledger",
        "restore",
        str(tmp_path / "copy"),
        "--config",
        str(tmp_path / "scavenger.toml"),
        "--force",
    ]

    def run_of(number: int, name: str) -> rec.RunCreated:
        return rec.RunCreated(
            number, name, "owner", 17, "{\n}", "tab\t and \\ newline\n", "/tokenizer.json", 1.0
        )

    written(url, [[run_of(1, "kept-1"), run_of(2, "kept-2")]])
    backup.backup(url, tmp_path / "copy")
    none_lost = CliRunner().invoke(app, command, input="n\n")
    assert "not in the backup" not in none_lost.output
    written(url, [[run_of(3, "lost-1"), run_of(4, "kept-1")]])
    refused = CliRunner().invoke(app, command, input="n\n")
    assert (refused.exit_code, "nothing was replaced" in refused.output) == (1, True), refused.output
    assert "not in the backup: lost-1, kept-1\n" in refused.output, (
        "a run of a known name is another one all the same"
    )
    assert "no copy of the replaced ledger is kept" in refused.output
    done = CliRunner().invoke(app, [*command, "--yes"])
    assert done.exit_code == 0, done.output
    assert "is kept as" not in done.output
    assert fetch(url, "SELECT name FROM runs ORDER BY run_id") == [("kept-1",), ("kept-2",)]


def test_a_restore_names_the_daemon_that_is_in_the_way(tmp_path: Path) -> None:
    config = config_of(tmp_path / "state")
    written(config.ledger_url, everything())
    backup.backup(config.ledger_url, tmp_path / "copy")
    keys.write_rendezvous(tmp_path / "state", keys.Rendezvous("tcp://h:1", "k", 30, 1, "h", "u"))
    here = ownership.LedgerHolder(socket.gethostname(), os.getpid(), 1_700_000_000.0)
    first = ownership.Ownership(tmp_path / "state", here)
    assert first.holder is None
    second = ownership.Ownership(tmp_path / "state", ownership.LedgerHolder("elsewhere", 1, 0.0))
    assert second.holder is not None
    assert (second.holder.host, second.holder.pid, second.holder.since) == (here.host, here.pid, here.since)
    assert abs(second.holder.beat - time.time()) < 60.0
    with pytest.raises(
        LedgerError,
        match=rf"pid {os.getpid()} on host \S+, there since 2023-11-14 22:13:20 UTC(.|\n)*--force",
    ):
        ownership.restore_ledger(config, tmp_path / "copy", force=False)
    assert ownership.restore_ledger(config, tmp_path / "copy", force=True).generation == 31
    first.close()
    assert second.claim(), "whoever took over holds the lock when the first is gone"
    second.close()
    assert ownership.present_holder(tmp_path / "state") is None
    assert ownership.restore_ledger(config, None, force=False).generation == 32


def test_a_daemon_of_another_host_is_known_by_its_recent_commit(url: str) -> None:
    store.upgrade(url)
    engine = store.open_engine(url)
    transaction.grant_generation(engine, "elsewhere", 77, "v", 1000.0)
    engine.dispose()
    assert ownership.writer_of(url, 1030.0) == ownership.LedgerHolder("elsewhere", 77, 1000.0, 1000.0)
    assert ownership.writer_of(url, 2000.0) is None


HOLD = """
import sqlite3, sys, time
from pathlib import Path
from scavenger.daemon import ownership
import os, socket
mine = ownership.Ownership(Path(sys.argv[1]), ownership.LedgerHolder(socket.gethostname(), os.getpid(), 1_700_000_000.0))
ledger = sqlite3.connect(Path(sys.argv[1]) / "ledger.sqlite3", isolation_level=None)
ledger.execute("BEGIN IMMEDIATE")
print("holds", flush=True)
sys.stdin.read()
"""


def test_a_daemon_that_finds_the_ledger_locked_by_a_stopped_one_names_it_and_how_to_end_it(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path / "state")
    store.upgrade(config.ledger_url)
    keys.init_state(tmp_path / "state", "owner")
    argv = [sys.executable, "-c", HOLD, str(tmp_path / "state")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"holds\n"
            holder.send_signal(signal.SIGSTOP)
            os.waitpid(holder.pid, os.WUNTRACED)
            with pytest.raises(LedgerError) as refused:
                main.run(config, None)
        finally:
            holder.kill()
    assert (
        f"held by the daemon with pid {holder.pid} on host {socket.gethostname()}, there since 2023-11-14"
        in refused.value.cause
    )
    assert "which is stopped (SIGSTOP)" in refused.value.cause
    assert f"`kill -KILL {holder.pid}`" in refused.value.remedy


@pytest.mark.postgres
def test_a_backup_is_restored_where_none_of_its_roles_exist(postgres: sa.URL, tmp_path: Path) -> None:
    """Another server after the first one's loss: the ledger comes first, `sql/roles.sql` is run again after it."""
    copy = tmp_path / "copy"
    with made_site(postgres) as lost:
        written(lost.url(DAEMON), everything())
        assert lost.grant().returncode == 0
        before = reports.report(lost.url(DAEMON), "runs", "csv")
        backup.backup(lost.admin.render_as_string(hide_password=False), copy)
    there = scalar(
        postgres.render_as_string(hide_password=False),
        f"SELECT count(*) FROM pg_roles WHERE rolname IN {(*ROLES, DAEMON)}",
    )
    if there and os.environ.get("SCAVENGER_TEST_PG"):
        pytest.skip("SCAVENGER_TEST_PG names a server with a site's own roles, which cannot be taken from it")
    assert there == 0
    url = new_database(postgres)
    backup.restore(url, copy, tmp_path, NO_WRITER, "h", T0 + 100)
    assert reports.check(url) == []
    assert reports.report(url, "runs", "csv") == before
    assert Site(sa.make_url(url)).grant().returncode == 0
    try:
        assert reports.report(Site(sa.make_url(url)).url("scavenger_read"), "runs", "csv") == before
    finally:
        execute(
            postgres,
            f'DROP DATABASE "{sa.make_url(url).database}" WITH (FORCE)',
            *(f"DROP ROLE {role}" for role in ROLES),
        )
