"""A reader takes no longer than it may, so that it holds up neither SQLite's log nor PostgreSQL's vacuum; maintenance may take long."""

from __future__ import annotations

import time

import pytest
import sqlalchemy as sa

from scavenger.errors import LedgerError, LedgerUnavailable
from scavenger.ledger import store
from scavenger.ledger.faults import overran
from scavenger.ledger.maintain import purge
from scavenger.ledger.read import reader
from scavenger.ledger.read.reports import check, report
from tests.ledger.examples import WAIT_S, everything, written

#: Some seconds of work, that end by themselves where nobody ends them.
SLOW = {
    "sqlite": "WITH RECURSIVE c (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 50000000) SELECT count(*) FROM c",
    "postgresql": "SELECT CAST(pg_sleep(5) AS text)",
}


def test_a_reader_that_takes_too_long_is_ended_and_says_what_to_do(url: str) -> None:
    written(url, everything())
    engine = store.open_readonly(url, 0.2)
    with pytest.raises(  # it was ended: left alone it would have its rows
        LedgerUnavailable, match=r"cannot be read(.|\n)*readers are ended after 60 s(.|\n)*ask for less"
    ):
        reader.rows(engine, SLOW[engine.dialect.name])
    assert reader.rows(engine, "SELECT count(*) FROM runs").rows == ((1,),), "the next one is not hindered"
    engine.dispose()


def test_several_short_statements_hold_sqlite_s_log_no_longer_than_a_long_one(sqlite_url: str) -> None:
    written(sqlite_url, everything())
    engine, give_up = store.open_readonly(sqlite_url, 0.2), time.monotonic() + WAIT_S

    def asks_again_and_again() -> None:
        with engine.connect() as connection, connection.begin():
            while time.monotonic() < give_up:
                connection.exec_driver_sql("SELECT count(*) FROM v_days").scalar()

    with pytest.raises(sa.exc.OperationalError) as caught:
        asks_again_and_again()
    assert overran(caught.value)
    engine.dispose()
    writing = store.open_engine(sqlite_url)
    with writing.connect() as connection:
        raw = connection.connection.dbapi_connection
        assert raw is not None
        assert raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0, (
            "nobody holds the log any more"
        )  # type: ignore[attr-defined]
    writing.dispose()


def test_a_check_and_a_purge_s_survey_are_not_bound_as_readers_are(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(url, everything())
    monkeypatch.setattr(store, "READER_S", 0.0)
    with pytest.raises(LedgerError, match="cannot be read"):
        report(url, "harvested_gpu_hours_by_day")
    # Each of them would take longer than that.
    assert check(url) == []
    assert purge.survey(url, "sorting").samples == 2


def test_maintenance_is_bound_too(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs for an hour is not asked for any more."""
    bounds: list[float | None] = []
    opened = store.open_readonly

    def noted(ledger: str, most_s: float | None = None) -> sa.Engine:
        bounds.append(most_s)
        return opened(ledger, most_s)

    written(url, everything())
    monkeypatch.setattr(store, "open_readonly", noted)
    monkeypatch.setattr("scavenger.ledger.read.reports.open_readonly", noted)
    check(url)
    purge.survey(url, "sorting")
    assert bounds == [store.MAINTENANCE_S] * 2
