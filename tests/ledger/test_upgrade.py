"""From no tables to this release's, on to a later one's, and the ledgers that no migration leads from."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from scavenger.cli.main import app
from scavenger.errors import Fenced, LedgerError, LedgerRefused
from scavenger.ledger import records as r
from scavenger.ledger import store
from scavenger.ledger.faults import WriterState
from scavenger.ledger.read.reader import connected
from scavenger.ledger.read.reports import check, report
from tests.ledger.conftest import new_database
from tests.ledger.examples import T0, everything, witness, written
from tests.ledger.histories import config

LATER = "9999_later"
MIGRATION = f'''
import sqlalchemy as sa
from alembic import op

revision, down_revision = "{LATER}", "{store.head()}"


def upgrade() -> None:
    op.add_column("events", sa.Column("later", sa.Text(), nullable=False, server_default=sa.text("''")))
'''


@pytest.fixture
def next_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Installs a release that has this migration beyond ours; with "", this release again."""
    ours = store._migrations()

    def install(migration: str) -> None:
        theirs = tmp_path / f"migrations{len(list(tmp_path.glob('migrations*')))}"
        shutil.copytree(ours, theirs, ignore=shutil.ignore_patterns("__pycache__"))
        if migration:
            (theirs / "versions" / f"{LATER}.py").write_text(migration)
        monkeypatch.setattr(store, "_migrations", lambda: theirs)

    return install


def revision_of(url: str) -> str:
    engine = store.open_engine(url)
    try:
        with engine.connect() as connection:
            return store.current_revision(connection)
    finally:
        engine.dispose()


def execute(url: str, *statements: str) -> None:
    engine = store.open_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


def stamp(url: str, revision: str) -> None:
    execute(url, f"UPDATE alembic_version SET version_num = '{revision}'")


def test_an_upgrade_keeps_every_row_and_fences_the_daemon_that_runs(
    url: str, next_release: Callable[[str], None]
) -> None:
    written(url, everything())
    first = store.head()
    with witness(url) as w:
        w.writer.submit(0, [r.Event("k", 0, "s", "r", "{}", T0)])
        w.wait_ticket(0)
        assert store.upgrade(url) == (first, first)
        w.writer.submit(1, [r.Event("k", 0, "s", "r", "{}", T0)])
        w.wait_ticket(1)  # nothing was upgraded, so nobody was fenced
        before = report(url, "events", "json")
        next_release(MIGRATION)
        assert store.upgrade(url) == (first, LATER)
        w.writer.submit(2, [r.Event("k", 0, "s", "r", "{}", T0)])
        w.wait_state(WriterState.FENCED)
        with pytest.raises(Fenced):
            w.writer.submit(3, [])
        assert w.acked == [0, 1]
    assert report(url, "events", "json") == before
    assert check(url) == []


def test_an_upgrade_that_fails_changes_nothing(url: str, next_release: Callable[[str], None]) -> None:
    written(url, everything())
    first = store.head()
    next_release(MIGRATION + "    op.execute('SELECT * FROM nowhere')\n")
    with pytest.raises(LedgerError, match="schema cannot be changed"):
        store.upgrade(url)
    assert revision_of(url) == first
    engine = store.open_engine(url)
    assert "later" not in {column["name"] for column in sa.inspect(engine).get_columns("events")}
    with engine.connect() as connection:
        alive = "SELECT count(*) FROM generations WHERE superseded_at IS NULL"
        assert connection.scalar(sa.text(alive)) == 1, "no generation was ended"
    engine.dispose()


def test_a_ledger_of_a_newer_release_is_refused(url: str, next_release: Callable[[str], None]) -> None:
    written(url, everything())
    next_release(MIGRATION)
    store.upgrade(url)
    next_release("")
    with pytest.raises(
        LedgerRefused, match=rf"revision {LATER}, which this release does not know(.|\n)*newer"
    ):
        store.upgrade(url)
    with pytest.raises(LedgerRefused, match="install that release again"), witness(url):
        pass
    assert ["newer release has upgraded it" in line for line in check(url)] == [True]
    assert revision_of(url) == LATER


@pytest.mark.parametrize("revision", ["0001", "0008"])
def test_a_ledger_from_before_the_first_release_is_refused_with_the_remedy(url: str, revision: str) -> None:
    written(url, everything())
    stamp(url, revision)
    never = (
        rf"revision {revision}, which was never released(.|\n)*scavenger ledger export(.|\n)*start a new one"
    )
    with pytest.raises(LedgerRefused, match=never):
        store.upgrade(url)
    with pytest.raises(LedgerRefused, match=never), witness(url):
        pass
    assert ["was never released" in line for line in check(url)] == [True]
    assert revision_of(url) == revision


#: What a snapshot of before the release had instead, in a revision's text; and what is then found.
YESTERDAY = {
    "a column": (
        (
            ('"text call tool"', '"text call"'),
            ("call_id, episode_id, run_id, call, tool,", "call_id, episode_id, run_id, call,"),
        ),
        "tool_calls has no column tool",
    ),
    "a table": (
        (
            ('    "token_differences": (', '    "differences_of_tokens": ('),
            ('("token_differences", "sample_id")', '("differences_of_tokens", "sample_id")'),
            ('        "token_differences",\n', '        "differences_of_tokens",\n'),
        ),
        "token_differences is missing",
    ),
    "a column too many": (
        (('"text node reason", "time at until_at', '"text node reason rack", "time at until_at'),),
        "node_quarantines has the column rack, which this release does not fill",
    ),
}


@pytest.mark.parametrize("what", YESTERDAY)
def test_a_ledger_whose_revision_was_changed_after_it_made_it_is_refused_with_the_remedy(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    replaced, found = YESTERDAY[what]
    remove_changes(url, tmp_path, monkeypatch, replaced)
    altered = (
        rf"but not as this release makes it: {found}(.|\n)*scavenger ledger export(.|\n)*start a new one"
    )
    with pytest.raises(LedgerRefused, match=altered):
        store.upgrade(url)
    with pytest.raises(LedgerRefused, match=altered), witness(url):
        pass
    assert [found in line for line in check(url)] == [True]


def test_a_view_that_was_changed_with_its_revision_is_found_when_a_daemon_starts(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = (("call_id, episode_id, run_id, call, tool,", "call_id, episode_id, run_id, call,"),)
    remove_changes(url, tmp_path, monkeypatch, changed)
    with pytest.raises(LedgerRefused, match="v_tool_calls has no column tool"):
        store.upgrade(url)


def test_a_view_of_somebody_s_own_whose_table_is_gone_keeps_nobody_out(sqlite_url: str) -> None:
    store.upgrade(sqlite_url)
    execute(
        sqlite_url, "CREATE TABLE mine (a)", "CREATE VIEW my_view AS SELECT a FROM mine", "DROP TABLE mine"
    )
    assert store.upgrade(sqlite_url) == (store.head(), store.head())
    with witness(sqlite_url):
        pass
    assert check(sqlite_url) == []


@pytest.mark.postgres
def test_a_reader_who_has_a_schema_of_his_own_reads_the_ledger(postgres: sa.URL) -> None:
    """ "$user" comes first in PostgreSQL's search path."""
    url = new_database(postgres)
    store.upgrade(url)
    execute(url, f'CREATE SCHEMA AUTHORIZATION "{sa.make_url(url).username}"')
    assert check(url) == []
    with connected(url) as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM v_runs").scalar() == 0


def remove_changes(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: tuple[tuple[str, str], ...]
) -> None:
    """Make the ledger by an older text of a revision."""
    ours, theirs = store._migrations(), tmp_path / "yesterday"
    shutil.copytree(ours, theirs, ignore=shutil.ignore_patterns("__pycache__"))
    for now, then in replaced:
        having = [path for path in (theirs / "versions").glob("*.py") if now in path.read_text()]
        assert len(having) == 1, "the revision has another text by now: change this test with it"
        having[0].write_text(having[0].read_text().replace(now, then))
    monkeypatch.setattr(store, "_migrations", lambda: theirs)
    store.upgrade(url)
    monkeypatch.setattr(store, "_migrations", lambda: ours)


@pytest.mark.postgres
def test_a_host_that_stands_still_for_a_while_breaks_off_no_upgrade(
    postgres: sa.URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_WRITER_IDLE_TIMEOUT_MS", 50)
    with store._schema_transaction(new_database(postgres)) as config:
        connection = config.attributes["connection"]
        assert store.current_revision(connection) == ""
        time.sleep(0.5)  # it stands still
        assert store.current_revision(connection) == ""


def test_the_command_says_from_where_to_where(
    sqlite_url: str, tmp_path: Path, next_release: Callable[[str], None]
) -> None:
    argv = ["ledger", "upgrade", "--config", str(config(tmp_path, sqlite_url))]
    first = store.head()
    said = [CliRunner().invoke(app, argv).output for _ in range(2)]
    next_release(MIGRATION)
    said.append(CliRunner().invoke(app, argv).output)
    assert said == [
        f"the schema was brought from revision none to {first}\n",
        f"the schema is at revision {first} already\n",
        f"the schema was brought from revision {first} to {LATER}; a daemon that ran on it stops at its next commit\n",
    ]


def test_a_ledger_of_the_first_release_gets_times_that_people_read_and_keeps_its_grants(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, first = store._migrations(), tmp_path / "first"
    shutil.copytree(ours, first, ignore=shutil.ignore_patterns("__pycache__", "000[2-9]*"))
    monkeypatch.setattr(store, "_migrations", lambda: first)
    assert store.upgrade(url) == ("", "0001_first")
    engine = store.open_engine(url)
    postgres = engine.dialect.name == "postgresql"
    with engine.begin() as connection:
        before = {view: _columns(connection, view) for view in sa.inspect(connection).get_view_names()}
        event = (
            "INSERT INTO events (kind, run_id, subject, reason, detail, at) VALUES ('k', 0, '', '', '{}', "
        )
        for at in (T0 + 29.9996, 0.0, 253402300799.5, 1e300, -1.0):
            connection.exec_driver_sql(f"{event}{at!r})")
        if postgres:
            connection.exec_driver_sql("GRANT SELECT ON v_events TO PUBLIC")
    monkeypatch.setattr(store, "_migrations", lambda: ours)
    assert store.upgrade(url) == ("0001_first", store.head())
    with engine.connect() as connection:
        for view, columns in before.items():
            after = _columns(connection, view)
            assert after[: len(columns)] == columns, f"{view} keeps its columns, in their places"
            times = [name for name in columns if name == "at" or name.endswith("_at")]
            added = [
                name for name in after[len(columns) :] if name not in ("nodes", "kind", "cluster", "place")
            ]
            assert added == ([f"{name}_utc" for name in times] or added)
            assert times or view in ("v_now", "v_days", "v_sample_tokens"), view
        shown = connection.exec_driver_sql("SELECT at_utc FROM v_events ORDER BY id").scalars().all()
        assert shown == ["2026-09-21 14:13:49", "1970-01-01 00:00:00", "9999-12-31 23:59:59", None, None]
        assert connection.exec_driver_sql("SELECT utc FROM v_now").scalar() is None, "nobody wrote yet"
        if postgres:
            acl = connection.exec_driver_sql(
                "SELECT CAST(relacl AS text) FROM pg_class WHERE relname = 'v_events'"
            )
            assert "=r/" in str(acl.scalar()), "what was granted stays"
    engine.dispose()


def _columns(connection: sa.Connection, view: str) -> list[str]:
    return list(connection.exec_driver_sql(f"SELECT * FROM {view} LIMIT 0").keys())
