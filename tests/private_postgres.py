"""A private PostgreSQL for tests, benchmarks and trials: a fresh data directory, a Unix socket, no port; as durable as a site's would be.

Owns where the server's programs are looked for, its folder, its processes and their ends: none is left when the block is left, nor when
this process is killed. It is never a site's database. PostgreSQL refuses to run as root; then it runs as `nobody`, who gets the folder.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import sqlalchemy as sa

from scavenger.cluster import processes
from scavenger.errors import LedgerError

USER = "ledger"
START_S = 60.0
SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "32MB",
    "max_connections": "40",
}


def programs() -> Path | None:
    """The folder of PostgreSQL's own programs (Debian keeps them off PATH); None where it is not installed."""
    debian = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"),
        key=lambda path: [int(n) for n in path.parts[4].split(".")],
    )
    found = shutil.which("initdb") or (debian[-1] if debian else None)
    return Path(found).resolve().parent if found else None  # a link on PATH may have no neighbours


class PrivatePostgres:
    """See the module. `settings` override those of `SETTINGS`. Start it from the main thread, whose end ends it too."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        found = programs()
        if found is None:
            raise LedgerError(
                "PostgreSQL's server programs are not installed here", "apt-get install postgresql"
            )
        self._programs = found
        self._settings = {**SETTINGS, **(settings or {})}
        self._home: Path | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self.log_path = Path()

    @property
    def url(self) -> str:
        """The database `postgres`, as the superuser."""
        return f"postgresql+psycopg://{USER}@/postgres?host={self._home}"

    @property
    def pid(self) -> int:
        """The postmaster's; 0 while there is none."""
        return self._server.pid if self._server is not None and self._server.poll() is None else 0

    def backends(self) -> tuple[int, ...]:
        """The processes that serve a connection."""
        table = processes.snapshot()
        mark = f"postgres: {USER} "
        return (
            tuple(
                pid for pid in processes.descendants(self.pid, table) if processes.title(pid).startswith(mark)
            )
            if self.pid
            else ()
        )

    def __enter__(self) -> Self:
        try:
            self.create()
            self.spawn()
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def create(self) -> None:
        """Make the folder and an empty cluster in it."""
        self._home = Path(tempfile.mkdtemp(prefix="scavenger-pg-"))
        self.log_path = self._home / "log"
        if os.geteuid() == 0:
            shutil.chown(self._home, "nobody")
        argv = [
            str(self._programs / "initdb"),
            "-D",
            str(self._home / "data"),
            "-U",
            USER,
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
        ]
        argv.append("--no-sync")  # nothing is worth keeping yet
        done = subprocess.run(
            argv, capture_output=True, text=True, cwd=self._home, check=False, **self._as_server()
        )
        if done.returncode != 0:
            raise LedgerError(f"initdb failed: {done.stderr.strip()}")

    def spawn(self) -> None:
        """Start the server without waiting for it; the folder is that of before, whatever ended the last one."""
        assert self._home is not None
        given = {"listen_addresses": "", "unix_socket_directories": str(self._home), **self._settings}
        options = [part for name, value in given.items() for part in ("-c", f"{name}={value}")]
        log = self.log_path.open("ab")
        self._server = subprocess.Popen(
            [str(self._programs / "postgres"), "-D", str(self._home / "data"), *options],
            cwd=self._home,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_end_with_parent,
            **self._as_server(),
        )
        log.close()

    def tend(self) -> None:
        """Start it again if it ended: after a kill the first tries may fail, while the last one's backends still end."""
        if self._server is None or self._server.poll() is not None:
            self.spawn()

    def ready(self) -> bool:
        """Whether it takes connections now."""
        asked = [str(self._programs / "pg_isready"), "-q", "-h", str(self._home), "-U", USER]
        return subprocess.run(asked, check=False).returncode == 0

    def wait(self, deadline_s: float = START_S) -> None:
        """Until it takes connections, starting it again if need be. Raises `LedgerError` with the end of its log."""
        end = time.monotonic() + deadline_s
        while not self.ready():
            self.tend()
            if time.monotonic() > end:
                raise LedgerError(f"PostgreSQL is not ready after {deadline_s:g} s:\n{self.tail()}")
            time.sleep(0.1)  # between two looks; readiness is not told otherwise

    def kill(self) -> None:
        """SIGKILL the postmaster; its children find out by themselves."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    def stop(self) -> None:
        """End every process and remove the folder. May be repeated."""
        if self._server is not None:
            children = processes.descendants(self._server.pid, processes.snapshot())
            if self._server.poll() is None:
                processes.send(children, signal.SIGCONT)
                self._server.send_signal(signal.SIGQUIT)
            try:
                self._server.wait(15)
            except subprocess.TimeoutExpired:
                processes.kill_trees([self._server.pid])
                self._server.wait()
            self._server = None
        if self._home is not None:
            shutil.rmtree(
                self._home, ignore_errors=True
            )  # a last backend may still be writing its statistics
            self._home = None

    def tail(self, lines: int = 15) -> str:
        if not self.log_path.is_file():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    @staticmethod
    def _as_server() -> dict[str, Any]:
        if os.geteuid() != 0:
            return {}
        nobody = pwd.getpwnam("nobody")
        return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def create_database(server: sa.URL | str, name: str) -> str:
    """Make an empty database on `server`; returns its URL."""
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql(f'CREATE DATABASE "{name}"')
    engine.dispose()
    return sa.make_url(server).set(database=name).render_as_string(hide_password=False)


def _end_with_parent() -> None:
    """In the child: PostgreSQL's immediate shutdown when this process is gone."""
    processes.die_with_parent(signal.SIGQUIT)
