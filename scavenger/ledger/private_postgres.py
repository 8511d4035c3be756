"""A PostgreSQL server of one's own, for tests, benchmarks and trials: a fresh data directory, a Unix socket, no port.

Owns where the server's programs are looked for, how a server is made, started and ended. It is never a site's database: nothing
of it outlives the context. By default it is as durable as PostgreSQL is by default (`fsync`, `synchronous_commit` on).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from scavenger.errors import LedgerError


def programs() -> Path | None:
    """The folder of PostgreSQL's own programs (Debian keeps them off PATH); None where it is not installed."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: [int(n) for n in p.parts[4].split(".")])
    found = shutil.which("initdb") or (debian[-1] if debian else None)
    return Path(found).parent if found else None


@contextmanager
def private_postgres(settings: Mapping[str, str] | None = None, folder: Path | None = None) -> Iterator[sa.URL]:
    """A running server's URL (database `postgres`, superuser `ledger`); it ends, and its files go, with the context.

    `settings` are PostgreSQL's own. Raises `LedgerError` where PostgreSQL is not installed or does not start.
    """
    found = programs()
    if found is None:
        raise LedgerError("PostgreSQL's server programs are not installed here", "apt-get install postgresql")
    home = Path(tempfile.mkdtemp(prefix="scavenger-pg-", dir=folder))
    try:
        if os.geteuid() == 0:
            shutil.chown(home, "nobody")
        data = home / "data"
        _run([str(found / "initdb"), "-D", str(data), "-U", "ledger", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"], home)
        alone = {"listen_addresses": "", "unix_socket_directories": str(home)}
        (data / "postgresql.auto.conf").write_text(_conf(alone | dict(settings or {})))
        control = [str(found / "pg_ctl"), "-D", str(data), "-w", "-t", "60"]
        _run([*control, "-l", str(home / "log"), "start"], home)
        try:
            yield sa.URL.create("postgresql+psycopg", "ledger", database="postgres", query={"host": str(home)})
        finally:
            _run([*control, "-m", "immediate", "stop"], home)
    finally:
        shutil.rmtree(home)


def create_database(server: sa.URL, name: str) -> str:
    """Make an empty database on `server`; returns its URL."""
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql(f'CREATE DATABASE "{name}"')
    engine.dispose()
    return server.set(database=name).render_as_string(hide_password=False)


def _conf(settings: Mapping[str, str]) -> str:
    return "".join(f"{name} = '{value}'\n" for name, value in settings.items())


def _run(argv: list[str], home: Path) -> None:
    """Run one of the server's programs; PostgreSQL refuses to run as root. Its output goes to a file: the server inherits it."""
    said = home / "said"
    with said.open("ab") as out:
        as_server = ["runuser", "-u", "nobody", "--", *argv] if os.geteuid() == 0 else argv
        status = subprocess.run(as_server, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=home, check=False).returncode
    if status:
        log = home / "log"
        words = said.read_text(errors="replace")[-500:] + (log.read_text(errors="replace")[-500:] if log.exists() else "")
        raise LedgerError(f"{Path(argv[0]).name} ended with status {status}: {words.strip()}", "see the message; run it by hand")
