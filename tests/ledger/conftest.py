"""Ledgers to test against: a SQLite file, and a database of a private PostgreSQL (or of the server that SCAVENGER_TEST_PG names)."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import sqlalchemy as sa

from scavenger.ledger.store import parse
from tests.conftest import postgres_programs

_databases = count(1)


def _as_server(*argv: str) -> list[str]:
    """PostgreSQL refuses to run as root."""
    return ["runuser", "-u", "nobody", "--", *argv] if os.geteuid() == 0 else list(argv)


@pytest.fixture(scope="session")
def postgres() -> Iterator[sa.URL]:
    """A server's URL. A private one listens on a Unix socket only, so it takes no port."""
    if named := os.environ.get("SCAVENGER_TEST_PG"):
        yield parse(named)
        return
    programs = postgres_programs()
    assert programs is not None, "the marker `postgres` skips tests without it"
    home = Path(tempfile.mkdtemp(prefix="scavenger-pg-"))
    if os.geteuid() == 0:
        shutil.chown(home, "nobody")
    data = home / "data"
    initdb = [str(programs / "initdb"), "-D", str(data), "-U", "ledger", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
    subprocess.run(_as_server(*initdb), check=True, capture_output=True, cwd=home)
    # fsync is off for speed: no test here pulls the plug of the machine.
    options = f"-c listen_addresses='' -c unix_socket_directories='{home}' -c fsync=off -c shared_buffers=32MB -c max_connections=20"
    control = [str(programs / "pg_ctl"), "-D", str(data), "-w", "-t", "60"]
    start = _as_server(*control, "-l", str(home / "log"), "-o", options, "start")
    subprocess.run(start, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=home)
    try:
        yield sa.URL.create("postgresql+psycopg", "ledger", database="postgres", query={"host": str(home)})
    finally:
        subprocess.run(_as_server(*control, "-m", "immediate", "stop"), check=True, capture_output=True, cwd=home)
        shutil.rmtree(home)


def new_database(server: sa.URL) -> str:
    name = f"ledger_{os.getpid()}_{next(_databases)}"
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql(f'CREATE DATABASE "{name}"')
    engine.dispose()
    return server.set(database=name).render_as_string(hide_password=False)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty ledger, without tables yet."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'state' / 'ledger.sqlite3'}"
    return new_database(request.getfixturevalue("postgres"))


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'state' / 'ledger.sqlite3'}"
