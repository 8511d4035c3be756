"""Ledgers to test against: a SQLite file, and a database of a private PostgreSQL (or of the server that SCAVENGER_TEST_PG names)."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path

import pytest
import sqlalchemy as sa

from scavenger.ledger.store import parse
from tests.private_postgres import PrivatePostgres, create_database

_databases = count(1)
_SERVER = pytest.StashKey[PrivatePostgres]()


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest) -> Iterator[sa.URL]:
    """A server's URL. A private one listens on a Unix socket only, so it takes no port."""
    if named := os.environ.get("SCAVENGER_TEST_PG"):
        yield parse(named)
        return
    # fsync is off for speed: no test here pulls the plug of the machine.
    with PrivatePostgres({"fsync": "off", "max_connections": "20"}) as server:
        request.config.stash[_SERVER] = server
        yield sa.make_url(server.url)


def new_database(server: sa.URL) -> str:
    return create_database(server, f"ledger_{os.getpid()}_{next(_databases)}")


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty ledger, without tables yet."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'state' / 'ledger.sqlite3'}"
    return new_database(request.getfixturevalue("postgres"))


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'state' / 'ledger.sqlite3'}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What the private server said last stands beside a failure here, once one was started."""
    report = yield
    server = item.config.stash.get(_SERVER, None)
    if report.failed and server is not None:
        report.sections.append(("PostgreSQL's log", server.tail()))
    return report
