"""Vacuum gives space back, and never under a daemon that writes."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from scavenger.cli.main import app
from scavenger.errors import LedgerError
from scavenger.ledger import records as r
from scavenger.ledger.maintain import purge, vacuum
from scavenger.ledger.read.reports import check
from tests.ledger.examples import T0, witness, written
from tests.ledger.histories import answers, config, ended, fetch, training
from tests.ledger.test_roles import DAEMON, made_site


def fat(run_id: int = 1) -> list[r.Record]:
    """Half a megabyte in one group that a purge empties."""
    payload = b"\7\0\0\0" * 40_000
    return [
        r.GroupCreated(7000, run_id, "train", 9, 0, 0, 1, b"\7\0\0\0", 1, 7001, "{}", "", T0),
        r.LeaseGranted(7001, 1, 1, 1, 0, T0),
        r.ChunkAccepted(7001, 1, 0, payload, payload, payload, 1, 1, T0),
        r.LeaseEnded(7001, 1, "the run finished", 40_000, 0, T0 + 1),
        r.SampleEnded(7001, "surplus", "the run finished", 0, 0, None, None, T0 + 1),
    ]


def test_sqlite_gives_the_space_of_a_purge_back(sqlite_url: str, tmp_path: Path) -> None:
    written(sqlite_url, [*training(), fat(), ended()])
    purge.purge(sqlite_url, "sorting")
    before = answers(sqlite_url)
    path = config(tmp_path, sqlite_url)
    done = CliRunner().invoke(app, ["ledger", "vacuum", "--config", str(path)])
    assert done.exit_code == 0, done.output
    was, now = (int(word.replace(",", "")) for word in done.output.split() if word[0].isdigit())
    assert now == vacuum.size(sqlite_url) < was - 400_000
    assert (answers(sqlite_url), check(sqlite_url)) == (before, [])
    with witness(sqlite_url) as w:  # and a daemon goes on with it, in WAL mode
        w.writer.submit(0, [r.Event("k", 0, "s", "r", "{}", T0)])
        w.wait_ticket(0)
        assert fetch(sqlite_url, "PRAGMA journal_mode") == [("wal",)]


@pytest.mark.postgres
def test_postgres_is_vacuumed_beside_its_daemon(postgres: object, request: pytest.FixtureRequest) -> None:
    from tests.ledger.conftest import new_database

    url = new_database(request.getfixturevalue("postgres"))
    written(url, [*training(), fat(), ended()])
    purge.purge(url, "sorting")
    with witness(url) as w:
        done = vacuum.vacuum(url)
        w.writer.submit(0, [r.Event("k", 0, "s", "r", "{}", T0)])
        w.wait_ticket(0)
    assert min(done.before, done.after) > 100_000
    assert check(url) == []
    assert (
        fetch(
            url,
            "SELECT count(*) FROM pg_stat_user_tables WHERE last_vacuum IS NOT NULL AND last_analyze IS NOT NULL",
        )[0][0]
        >= 18
    )


@pytest.mark.postgres
def test_a_role_that_may_not_vacuum_is_told_so(postgres: sa.URL, tmp_path: Path) -> None:
    with made_site(postgres) as site:
        written(site.url(DAEMON), training())
        assert site.grant().returncode == 0
        path = config(tmp_path, site.url("scavenger_contents"))
        done = CliRunner().invoke(app, ["ledger", "vacuum", "--config", str(path)])
        assert done.exit_code != 0, done.output
        assert isinstance(done.exception, LedgerError)
        assert re.match(r"(\d+) of \1 tables were not vacuumed .*generations", done.exception.cause), (
            done.exception.cause
        )
        assert "owner of the tables" in done.exception.remedy
        assert vacuum.vacuum(site.url(DAEMON)).after > 0


def test_sqlite_is_not_vacuumed_while_a_writer_or_a_reader_has_it_open(sqlite_url: str) -> None:
    written(sqlite_url, training())
    with witness(sqlite_url) as w:
        w.writer.submit(0, [])  # as the daemon's first: it opens the writer's connection
        w.wait_ticket(0)
        with pytest.raises(
            LedgerError,
            match=r"in use: it belongs to generation 2 \(host host, pid 1\)(.|\n)*stop the daemon",
        ):
            vacuum.vacuum(sqlite_url)
        assert not w.states, "and the writer noticed nothing"
    reader = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))
    reader.execute("SELECT count(*) FROM runs").fetchall()
    with pytest.raises(LedgerError, match="a process reads it"):
        vacuum.vacuum(sqlite_url)
    reader.close()
    assert vacuum.vacuum(sqlite_url).after > 0


def test_a_disk_without_room_for_the_new_file_is_told_first(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(sqlite_url, training())
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("scavenger.ledger.maintain.vacuum.shutil.disk_usage", lambda path: usage)
    with pytest.raises(LedgerError, match="and 1,000 are free"):
        vacuum.vacuum(sqlite_url)
