"""Where a ledger may lie, who may read it, and that its revisions add up to its schema."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from scavenger.errors import LedgerError
from scavenger.ledger import store
from scavenger.ledger.schema import metadata
from tests.ledger.conftest import new_database
from tests.ledger.examples import everything, written

MOUNTS = """\
/dev/vda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb /home/local xfs rw 0 0
tmpfs /mnt/with\\040space tmpfs rw 0 0
scratch /scratch lustre rw 0 0
overlay /scratch overlay rw 0 0
"""


def test_migrations_add_up_to_the_schema(url: str) -> None:
    store.upgrade(url)
    engine = store.open_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, metadata) == []
        store.require_head(connection)
    engine.dispose()


@pytest.mark.postgres
def test_updated_rows_have_room_on_their_page(postgres: sa.URL) -> None:
    url = new_database(postgres)
    store.upgrade(url)
    engine = store.open_engine(url)
    with engine.connect() as connection:
        ours = "SELECT relname, reloptions[1] FROM pg_class WHERE relnamespace = 'public'::regnamespace AND reloptions IS NOT NULL"
        options = {str(row[0]): str(row[1]) for row in connection.execute(sa.text(ours))}
    engine.dispose()
    wanted = {
        name: f"fillfactor={table.dialect_options['postgresql']['with']['fillfactor']}"
        for name, table in metadata.tables.items()
        if table.dialect_options["postgresql"]["with"]
    }
    assert options == wanted
    assert set(wanted) == {"samples", "leases"}


def test_an_upgrade_of_a_current_ledger_changes_nothing(url: str) -> None:
    engine = store.open_engine(url)
    with engine.connect() as connection, pytest.raises(LedgerError, match="revision none"):
        store.require_head(connection)
    written(url, everything())
    store.upgrade(url)
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM chunks")) == 4
        store.require_head(connection)
    engine.dispose()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/ledger", "ext4"),
        ("/home/ada/state", "nfs4"),
        ("/home/local/state", "xfs"),
        ("/home/localised", "nfs4"),
        ("/mnt/with space/x", "tmpfs"),
        ("/scratch/x", "overlay"),
    ],
)
def test_the_innermost_and_latest_mount_holds_a_path(path: str, kind: str) -> None:
    assert store.mount_type(path, MOUNTS) == kind


def test_sqlite_on_a_network_file_system_is_refused_with_the_remedy(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "mount_type", lambda path, mounts: "lustre")
    with pytest.raises(LedgerError, match=r"network file system \(lustre\)(.|\n)*PostgreSQL"):
        store.open_engine(sqlite_url)


@pytest.mark.parametrize("bad", ["sqlite://", "sqlite:///:memory:", "mysql://x/y", "not a url"])
def test_what_cannot_hold_a_ledger_is_refused(bad: str) -> None:
    with pytest.raises(LedgerError, match="sqlite:////absolute/path"):
        store.open_engine(bad)


def test_only_its_owner_may_read_the_ledger(sqlite_url: str, tmp_path: Path) -> None:
    store.upgrade(sqlite_url)
    engine = store.open_engine(sqlite_url)
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE TABLE t (x)")
        connection.commit()
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "state").iterdir()}
    engine.dispose()
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    assert modes == {"ledger.sqlite3": 0o600, "ledger.sqlite3-wal": 0o600, "ledger.sqlite3-shm": 0o600}


def test_every_commit_is_synced(sqlite_url: str) -> None:
    engine = store.open_engine(sqlite_url)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
    engine.dispose()


def test_a_reader_cannot_write(url: str) -> None:
    store.upgrade(url)
    engine = store.open_readonly(url)
    with engine.connect() as connection, pytest.raises(sa.exc.DBAPIError, match=r"(?i)read-?only"):
        connection.exec_driver_sql("DELETE FROM runs")
    engine.dispose()


def test_a_reader_does_not_make_a_ledger(sqlite_url: str, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="there is no ledger"):
        store.open_readonly(sqlite_url)
    assert not (tmp_path / "state").exists()


def test_a_ledger_without_tables_is_not_written(url: str) -> None:
    from scavenger.ledger.write.writer import Writer

    writer = Writer(url, "host", 1, "test", lambda: 0.0)
    with pytest.raises(LedgerError, match="start this release's daemon on it"):
        writer.start()
    writer.close()
