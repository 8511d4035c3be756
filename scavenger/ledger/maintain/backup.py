"""Copies of a ledger: taken while the daemon writes, and put back so that no process goes on with the history that they replace.

    backup     SQLite: its online backup, a few pages at a time; PostgreSQL: pg_dump. The copy appears whole or not at all, mode 0600
    restore    SQLite: the copy's pages replace the ledger's in one transaction of the ledger itself; PostgreSQL: pg_restore, likewise

A file is not renamed over a SQLite ledger: a daemon that still has the old one open would write on unseen, and its log would be taken
for that of the new file. Replaced from within, the ledger fences that daemon in its very next transaction. With the same care a restored
ledger begins another history (`transaction`), whose next generation is beyond every one that it, the replaced ledger or the
rendezvous file knows. Knows no daemon: the ledger's locks show whether one is at work.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa

from scavenger.errors import LedgerError
from scavenger.host.user import user_name
from scavenger.ledger import restoring, store
from scavenger.ledger.faults import explain, remedy
from scavenger.ledger.write.transaction import Announced, begin_history, open_connection

#: 4 MiB of pages, then a pause: the writer's commits come between.
PAGES = 1024
PAUSE_S = 0.005
#: The copy reads one state of the ledger, which keeps SQLite's log from shrinking meanwhile: rather no backup than a full disk.
MAX_S = 3600.0
RESTORE_WAIT_S = 10.0
#: How the files begin that `backup` writes.
_STARTS = {"sqlite": b"SQLite format 3\0", "postgresql": b"PGDMP"}
_NAMES = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}


# ---------------------------------------------------------------- backup


def backup(url: str, target: Path) -> None:
    """Copy the ledger to the file `target`, which must not exist. The daemon may go on. Raises `LedgerError`."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        if target.exists():
            raise LedgerError(
                f"{target} exists", "name a file that does not: a backup never replaces another"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        os.close(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise LedgerError(
            f"the backup {target} cannot be written: {error.strerror}",
            f"name a folder that {user_name()} may write; as root: install -d -o {user_name()} -m 0700 FOLDER",
        ) from error
    try:
        parsed = store.parse(url)
        if parsed.drivername == "sqlite":
            _copy_sqlite(Path(str(parsed.database)), partial)
        else:
            _run_postgres(
                "pg_dump", parsed, "--format=custom", "--no-owner", "--no-privileges", f"--file={partial}"
            )
        restoring.sync(partial)
        os.link(partial, target)  # fails where another process made one meanwhile
        restoring.sync(target.parent)
    except OSError as error:
        raise LedgerError(
            f"the backup {target} cannot be written: {error.strerror}", "check the path and its free space"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _copy_sqlite(source: Path, target: Path, *, whole: bool = True) -> None:
    """`whole`: prove that it is a ledger without damage. Otherwise its pages are copied as they are."""
    if not source.is_file():
        raise LedgerError(f"there is no ledger at {source}", "check daemon.state_dir and daemon.ledger")
    deadline = time.monotonic() + MAX_S
    reading, writing = _connect(source, "ro"), _connect(target, "rw")
    try:
        writing.execute("PRAGMA journal_mode=OFF")  # the copy is thrown away unless it is whole
        # One snapshot for all portions: in WAL mode a reader sees one state of the ledger, and the writer does not wait for it.
        reading.execute("BEGIN")
        reading.execute(f"SELECT count(*) FROM {'generations' if whole else 'sqlite_master'}").fetchone()
        reading.backup(writing, pages=PAGES, progress=_unhurried(deadline), sleep=PAUSE_S)
        reading.execute("COMMIT")
        writing.execute(
            "PRAGMA journal_mode=DELETE"
        )  # one file without a log beside it, readable where nothing may be written
        if whole:
            _proved_whole(writing, target)
    except sqlite3.Error as error:
        raise LedgerError(
            f"the ledger {source} cannot be copied: {error}", "is it a ledger, and have both disks room?"
        ) from error
    finally:
        reading.close()
        writing.close()


def _unhurried(deadline: float) -> Callable[[int, int, int], None]:
    def progress(_status: int, left: int, total: int) -> None:
        if time.monotonic() > deadline:
            raise LedgerError(
                f"the backup took over {MAX_S:g} s with {left} of {total} pages left", "copy to a faster disk"
            )

    return progress


def _proved_whole(connection: sqlite3.Connection, path: Path) -> None:
    found = [row[0] for row in connection.execute("PRAGMA quick_check(3)")]
    if found != ["ok"]:
        raise LedgerError(f"{path} is damaged: {'; '.join(found)}", "use another backup")


# ---------------------------------------------------------------- restore


@dataclass(frozen=True, slots=True)
class Restored:
    """`generation` ended the old history: the next daemon's is beyond it. `kept`: the SQLite ledger that was replaced."""

    generation: int
    kept: Path | None


def restore(url: str, source: Path, state_dir: Path, announced: Announced, host: str, now: float) -> Restored:
    """Replace the ledger by the backup `source` and begin another history in it.

    Whole or not at all. Killed in between, `restoring`'s note in `state_dir` makes the next daemon begin that history. Raises
    `LedgerError`, also where a daemon that is stopped holds the ledger.
    """
    parsed = store.parse(url)
    _prove_kind(parsed, source)
    before = _newest(url)
    floor = max(before["generation"] if before is not None else 0, announced.generation)
    restoring.begin(state_dir, restoring.Note(source.name, floor, now))
    try:
        kept = _replace(parsed, source)
    except LedgerError:
        # Not replaced, as far as the ledger itself can say so: then no new history is needed.
        if before is not None and _newest(url) == before and not announced.unfinished:
            restoring.end(restoring.path_in(state_dir))
        raise
    generation = mark(url, announced, host, now, floor=floor, why=f"restored from {source.name}")
    restoring.end(restoring.path_in(state_dir))
    return Restored(generation, kept)


def _replace(parsed: sa.URL, source: Path) -> Path | None:
    if parsed.drivername == "sqlite":
        return _replace_sqlite(Path(str(parsed.database)), source)
    # One transaction, and it drops what is there.
    how = (
        "--clean",
        "--if-exists",
        "--no-owner",
        "--no-privileges",
        "--single-transaction",
        "--exit-on-error",
    )
    _run_postgres("pg_restore", parsed, *how, str(source))
    return None


def mark(
    url: str,
    announced: Announced,
    host: str,
    now: float,
    *,
    floor: int = 0,
    why: str = "restored by other means",
) -> int:
    """Begin another history in a ledger that was put back already (point-in-time recovery, a snapshot of the disk). Fences every daemon."""
    store.upgrade(url)
    engine = store.open_engine(url)
    try:
        with open_connection(engine) as connection, connection.begin():
            return int(begin_history(connection, os.getpid(), host, why, now, announced, floor))
    except sa.exc.DBAPIError as error:
        what = f"{remedy(error)}; then run the same command again"
        raise LedgerError(f"the restored ledger cannot be marked: {explain(error)}", what) from error
    finally:
        engine.dispose()


def _newest(url: str) -> dict[str, Any] | None:
    """The newest generation's row of the ledger that is to be replaced; None where there is none that can be read.

    Two states of a ledger differ in it: every transaction of a writer moves its `batch`. Read as it is: the ledger may be of an older
    release.
    """
    parsed = store.parse(url)
    if parsed.drivername == "sqlite" and not Path(str(parsed.database)).is_file():
        return None
    engine = store.open_readonly(url)
    try:
        with engine.connect() as connection:
            found = (
                connection.exec_driver_sql("SELECT * FROM generations ORDER BY generation DESC LIMIT 1")
                .mappings()
                .one_or_none()
            )
            return dict(found) if found is not None else None
    except sa.exc.DBAPIError:
        return None  # damaged or empty, which is why it is restored; the rendezvous file's generation counts all the same
    finally:
        engine.dispose()


def _journal_for(source: sqlite3.Connection, target: sqlite3.Connection) -> str:
    """SQLite copies no pages of one size into a write-ahead log of another. A rollback journal takes them, and needs the ledger alone."""
    sizes = [connection.execute("PRAGMA page_size").fetchone() for connection in (source, target)]
    return "WAL" if sizes[0] == sizes[1] else "DELETE"


def _replace_sqlite(ledger: Path, source: Path) -> Path | None:
    damaged = _set_aside_damaged(ledger)
    kept = damaged if damaged is not None else _keep(ledger)
    store.open_engine(
        f"sqlite:///{ledger}"
    ).dispose()  # makes the file (0600) and its folder where they are missing
    reading, writing = _connect(source, "ro"), _connect(ledger, "rw", timeout_s=RESTORE_WAIT_S)
    try:
        writing.execute(f"PRAGMA journal_mode={_journal_for(reading, writing)}")
        writing.execute("PRAGMA synchronous=FULL")
        # All pages in one transaction: the old ledger or the new one, whenever this is killed. Each try waits `RESTORE_WAIT_S` for
        # the lock, and the driver by itself would try for ever.
        reading.backup(writing, pages=-1, progress=_not_locked)
        writing.execute("PRAGMA journal_mode=WAL")
        writing.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        aside = (
            f" (the damaged one is {damaged})"
            if damaged is not None
            else f" ({kept} is a copy of it)"
            if kept is not None
            else ""
        )
        remedy = (
            "stop the daemon first, also one that was stopped by SIGSTOP; `scavenger daemon` names its pid"
        )
        raise LedgerError(f"the ledger {ledger} cannot be replaced{aside}: {error}", remedy) from error
    finally:
        reading.close()
        writing.close()
    return kept


def _not_locked(status: int, _left: int, _total: int) -> None:
    if status in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        raise sqlite3.OperationalError("database is locked")


def _keep(ledger: Path) -> Path | None:
    """A copy of the ledger that is to be replaced, beside it: it holds the only record of what came after the backup."""
    if not ledger.exists() or ledger.stat().st_size == 0:
        return None
    aside = _free_name(ledger, "replaced")
    partial = aside.with_name(f".{aside.name}.partial")
    try:
        os.close(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        _copy_sqlite(ledger, partial, whole=False)
        restoring.sync(partial)
        partial.rename(aside)
        restoring.sync(aside.parent)
    except (OSError, LedgerError) as error:
        why = error.cause if isinstance(error, LedgerError) else error.strerror
        remedy = f"nothing was replaced; where there is no room for both, move {ledger.name} with its -wal and -shm away and restore again"
        raise LedgerError(
            f"the ledger {ledger} cannot be kept as {aside.name} before it is replaced: {why}", remedy
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return aside


def _free_name(ledger: Path, what: str) -> Path:
    made = first = ledger.with_name(f"{ledger.name}.{what}-{int(time.time())}")
    number = 1
    while made.exists():
        number += 1
        made = first.with_name(f"{first.name}-{number}")
    return made


def _prove_kind(url: sa.URL, source: Path) -> None:
    """Raises `LedgerError` unless the file is a backup that this ledger can take, as far as it tells without being put back."""
    try:
        if not source.is_file():
            raise LedgerError(
                f"there is no backup at {source}", "name the file that `scavenger ledger backup` wrote"
            )
        with source.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise LedgerError(
            f"the backup {source} cannot be read: {error.strerror}",
            f"let {user_name()} read it, in a folder that {user_name()} may enter",
        ) from error
    found = next((kind for kind, mark in _STARTS.items() if start.startswith(mark)), "")
    wanted = "sqlite" if url.drivername == "sqlite" else "postgresql"
    if found and found != wanted:
        raise LedgerError(
            f"{source} is a backup of a {_NAMES[found]} ledger, and this ledger is kept in {_NAMES[wanted]}",
            f"name a backup of a {_NAMES[wanted]} ledger, or set daemon.ledger to the kind of ledger that it was taken of",
        )
    if wanted == "sqlite":
        _prove_ledger(source)
    elif not found:
        raise LedgerError(
            f"{source} is not a backup of a ledger", "name the file that `scavenger ledger backup` wrote"
        )


def _prove_ledger(source: Path) -> None:
    connection = _connect(source, "ro")
    try:
        connection.execute("SELECT count(*) FROM generations").fetchone()
        _proved_whole(connection, source)
    except sqlite3.Error as error:
        raise LedgerError(
            f"{source} is not a backup of a ledger: {error}",
            "name the file that `scavenger ledger backup` wrote",
        ) from error
    finally:
        connection.close()


def _set_aside_damaged(ledger: Path) -> Path | None:
    """Where the present file is no database any more there is nothing to replace from within: it is kept under another name."""
    if not ledger.exists() or ledger.stat().st_size == 0:
        return None
    connection = _connect(ledger, "rw")
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return None
    except sqlite3.OperationalError:
        return None  # locked: the caller finds out and says so
    except sqlite3.DatabaseError:
        pass
    finally:
        connection.close()
    aside = _free_name(ledger, "damaged")
    for suffix in ("-wal", "-shm", ""):
        part = ledger.with_name(ledger.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    return aside


# ---------------------------------------------------------------- what a restore gives up


@dataclass(frozen=True, slots=True)
class BackupSurvey:
    """`taken`: when the backup was, in words. `lost`: the runs of the present ledger that it does not have; None: not known.

    `keeps`: whether a copy of the ledger that it replaces is kept.
    """

    taken: str
    lost: tuple[str, ...] | None
    keeps: bool = True


def survey(url: str, source: Path) -> BackupSurvey:
    """What the backup `source` holds, asked before it replaces the ledger. Raises `LedgerError` for one that this ledger cannot take."""
    parsed = store.parse(url)
    _prove_kind(parsed, source)
    if parsed.drivername != "sqlite":
        listed = _run_postgres("pg_restore", None, "--list", str(source)).splitlines()
        taken = next(
            (line.partition("created at ")[2].strip() for line in listed if "created at " in line),
            "an unknown time",
        )
        copied = _run_postgres("pg_restore", None, "--data-only", "--table=runs", "--file=-", str(source))
        return BackupSurvey(taken, _lost_runs(url, set(_copied_runs(copied))), keeps=False)
    connection = _connect(source, "ro")
    try:
        (at,) = connection.execute("SELECT max(committed_at) FROM generations").fetchone()
        has = set(_runs(connection))
    finally:
        connection.close()
    when = (
        f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC (its newest commit)"
        if at is not None
        else "an unknown time"
    )
    ledger = Path(str(parsed.database))
    if not ledger.is_file():
        return BackupSurvey(when, ())
    present = _connect(ledger, "ro")
    try:
        return BackupSurvey(when, tuple(name for run, name in _runs(present) if (run, name) not in has))
    except sqlite3.Error:  # damaged, locked or empty: the restore itself says so
        return BackupSurvey(when, None)
    finally:
        present.close()


def _copied_runs(script: str) -> Iterator[tuple[int, str]]:
    """Number and name of each run in the data that pg_restore writes as a script: one line a row, its columns named above them. Pure."""
    columns: list[str] = []
    for line in script.splitlines():
        if line.startswith("COPY ") and line.endswith(" FROM stdin;"):
            columns = [name.strip() for name in line[line.index("(") + 1 : line.rindex(")")].split(",")]
        elif line == "\\.":
            columns = []
        elif columns:
            row = dict(zip(columns, line.split("\t"), strict=True))
            yield int(row["run_id"]), row["name"]  # a run's name has no character that COPY would escape


def _lost_runs(url: str, has: set[tuple[int, str]]) -> tuple[str, ...] | None:
    engine = store.open_readonly(url)
    try:
        with engine.connect() as connection:
            present = connection.exec_driver_sql("SELECT run_id, name FROM runs ORDER BY run_id").all()
    except sa.exc.ProgrammingError:
        return ()  # no tables: a new server
    except sa.exc.DBAPIError:
        return None  # away or damaged: the restore itself says so
    finally:
        engine.dispose()
    return tuple(str(name) for run, name in present if (int(run), str(name)) not in has)


def _runs(connection: sqlite3.Connection) -> list[tuple[int, str]]:
    return [
        (int(run), str(name))
        for run, name in connection.execute("SELECT run_id, name FROM runs ORDER BY run_id")
    ]


# ---------------------------------------------------------------- small


def _connect(path: Path, mode: str, timeout_s: float = 5.0) -> sqlite3.Connection:
    return sqlite3.connect(
        f"file:{quote(str(path.absolute()))}?mode={mode}", uri=True, timeout=timeout_s, isolation_level=None
    )


def _run_postgres(program: str, url: sa.URL | None, *arguments: str) -> str:
    """The output of one of PostgreSQL's own programs, run on the ledger `url` if given. A password goes in its environment, never argv."""
    found = shutil.which(program)
    if found is None:
        raise LedgerError(
            f"{program} is not on PATH",
            "install PostgreSQL's client programs (postgresql-client), of the server's version",
        )
    where, environment = [], dict(os.environ)
    if url is not None:
        where = [
            f"--dbname={url.set(drivername='postgresql', password=None).render_as_string(hide_password=False)}"
        ]
        environment |= {"PGPASSWORD": str(url.password)} if url.password else {}
    done = subprocess.run(
        [found, *where, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise LedgerError(
            f"{program} ended with status {done.returncode}: {done.stderr.strip()[-500:]}",
            "see PostgreSQL's own message",
        )
    return done.stdout
