"""Up and down through every revision with rows in every table, and a running daemon that an upgrade fences."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.script import ScriptDirectory
from typer.testing import CliRunner

from scavenger.cli import app
from scavenger.errors import Fenced
from scavenger.ledger import records as r
from scavenger.ledger import store
from scavenger.ledger.faults import WriterState
from scavenger.ledger.reports import check
from tests.ledger.conftest import new_database
from tests.ledger.examples import T0, everything, witness, written
from tests.ledger.histories import config

Rows = dict[str, list[dict[str, object]]]


def revisions() -> list[str]:
    """Oldest first."""
    return [script.revision for script in ScriptDirectory.from_config(store._alembic(None)).walk_revisions()][::-1]


def dump(url: str) -> Rows:
    """Every row of every table, whatever the revision."""
    engine = store.open_engine(url)
    with engine.connect() as connection:
        names = sorted(set(sa.inspect(connection).get_table_names()) - {"alembic_version"})
        found = {name: [dict(row) for row in connection.execute(sa.text(f"SELECT * FROM {name}")).mappings()] for name in names}
    engine.dispose()
    return {name: sorted(rows, key=repr) for name, rows in found.items()}


def common(now: Rows, then: Rows) -> tuple[Rows, Rows]:
    """Both, reduced to the tables and columns that each has rows of. `superseded_at`: an upgrade ends generations."""
    both: tuple[Rows, Rows] = ({}, {})
    for name in (name for name in now.keys() & then.keys() if now[name] or then[name]):
        columns = set(now[name][0]) & set(then[name][0]) - {"superseded_at"}
        for side, rows in zip(both, (now[name], then[name]), strict=True):
            side[name] = sorted(({c: row[c] for c in sorted(columns)} for row in rows), key=repr)
    return both


def test_rows_of_every_table_go_down_and_up_through_every_revision(url: str) -> None:
    written(url, everything())
    whole = dump(url)
    assert all(rows for name, rows in whole.items() if name != "move_log"), "every table has rows, but the one that is emptied"
    for revision in revisions()[-2::-1]:
        store.downgrade(url, revision)
        found = dump(url)
        assert found.keys() <= whole.keys()
        assert "chunks" in found
        mine, theirs = common(found, whole)
        assert mine == theirs, revision
    oldest = dump(url)
    for before, after in zip(revisions(), revisions()[1:], strict=False):
        assert store.upgrade(url, after) == (before, after)
        mine, theirs = common(dump(url), oldest)  # a column that came later starts empty
        assert mine == theirs, after
    assert dump(url).keys() == whole.keys()
    assert check(url) == []


def test_what_was_noted_before_codes_and_kept_checkpoints_says_nothing_of_them(url: str) -> None:
    written(url, everything())
    store.downgrade(url, "0005")
    store.upgrade(url)
    found = dump(url)
    assert {row["code"] for row in found["decisions"]} == {""}
    assert {row["pinned"] for row in found["jobs"]} == {""}
    assert {row["kept"] for row in found["checkpoints"]} == {""}
    engine = store.open_readonly(url)
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT DISTINCT d.code, c.kept FROM v_decisions d, v_checkpoints c")).all() == [("", "")]
    engine.dispose()


@pytest.mark.postgres
def test_an_upgrade_keeps_the_grants_of_the_views_that_got_a_column(postgres: sa.URL) -> None:
    url = new_database(postgres)
    store.upgrade(url, "0005")
    engine = store.open_engine(url)
    granted = "SELECT table_name FROM information_schema.role_table_grants WHERE grantee = 'PUBLIC' AND table_name LIKE 'v\\_%' ORDER BY 1"
    with engine.connect() as connection, connection.begin():
        connection.execute(sa.text("GRANT SELECT ON v_decisions, v_checkpoints, v_runs TO PUBLIC"))
    store.upgrade(url)
    with engine.connect() as connection:
        assert connection.scalars(sa.text(granted)).all() == ["v_checkpoints", "v_decisions", "v_runs"]
    engine.dispose()


def test_an_upgrade_fences_the_daemon_that_runs_on_the_older_tables(url: str) -> None:
    written(url, everything())
    with witness(url) as w:
        w.writer.submit(0, [r.Event("k", 0, "s", "r", "{}", T0)])
        w.wait_ticket(0)
        assert store.upgrade(url) == (store.head(), store.head())
        w.writer.submit(1, [r.Event("k", 0, "s", "r", "{}", T0)])
        w.wait_ticket(1)  # nothing was upgraded, so nobody was fenced
        store.downgrade(url, revisions()[0])
        assert store.upgrade(url) == (revisions()[0], store.head())
        w.writer.submit(2, [r.Event("k", 0, "s", "r", "{}", T0)])
        w.wait_state(WriterState.FENCED)
        with pytest.raises(Fenced):
            w.writer.submit(3, [])
        assert w.acked == [0, 1]


def test_the_command_says_from_where_to_where(sqlite_url: str, tmp_path: Path) -> None:
    argv = ["ledger", "upgrade", "--config", str(config(tmp_path, sqlite_url))]
    said = [CliRunner().invoke(app, argv).output for _ in range(2)]
    store.downgrade(sqlite_url, revisions()[0])
    said.append(CliRunner().invoke(app, argv).output)
    assert said == [
        f"the schema was brought from revision none to {store.head()}\n",
        f"the schema is at revision {store.head()} already\n",
        f"the schema was brought from revision {revisions()[0]} to {store.head()}; a daemon that ran on it stops at its next commit\n",
    ]
