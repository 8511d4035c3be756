"""Copies of a ledger: taken while the daemon writes, and put back so that nobody goes on with the history they replace.

    backup     SQLite: its online backup, a few pages at a time; PostgreSQL: pg_dump. The copy appears whole or not at all, mode 0600
    restore    SQLite: the copy's pages replace the ledger's in one transaction of the ledger itself; PostgreSQL: pg_restore, likewise

A file is not renamed over a SQLite ledger: a daemon that still has the old one open would write on unseen, and its log would be taken
for that of the new file. Replaced from within, the ledger fences that daemon in its very next transaction. With the same care a restored
ledger begins another history (`transaction`), whose next generation is beyond every one that it, the replaced ledger or the
rendezvous file knows. Knows no daemon; whether one is at work its locks say.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa

from scavenger.errors import LedgerError
from scavenger.ledger import store
from scavenger.ledger.schema import generations
from scavenger.ledger.transaction import Announced, begin_history, open_connection

#: 4 MiB of pages, then a pause: the writer's commits come between.
PAGES = 1024
PAUSE_S = 0.005
#: The copy reads one state of the ledger, which keeps SQLite's log from shrinking meanwhile: rather no backup than a full disk.
MAX_S = 3600.0
RESTORE_WAIT_S = 10.0


# ---------------------------------------------------------------- backup


def backup(url: str, target: Path) -> None:
    """Copy the ledger to the file `target`, which must not exist. The daemon may go on. Raises `LedgerError`."""
    if target.exists():
        raise LedgerError(f"{target} exists", "name a file that does not: a backup never replaces another")
    partial = target.with_name(f".{target.name}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        parsed = store.parse(url)
        if parsed.drivername == "sqlite":
            _copy_sqlite(Path(str(parsed.database)), partial)
        else:
            _run_postgres("pg_dump", parsed, "--format=custom", "--no-owner", "--no-privileges", f"--file={partial}")
        _sync(partial)
        os.link(partial, target)  # fails where somebody made one meanwhile
        _sync(target.parent)
    except OSError as error:
        raise LedgerError(f"the backup {target} cannot be written: {error.strerror}", "check the path and its free space") from error
    finally:
        partial.unlink(missing_ok=True)


def _copy_sqlite(source: Path, target: Path) -> None:
    if not source.is_file():
        raise LedgerError(f"there is no ledger at {source}", "check daemon.state_dir and daemon.ledger")
    deadline = time.monotonic() + MAX_S
    reading, writing = _connect(source, "ro"), _connect(target, "rw")
    try:
        writing.execute("PRAGMA journal_mode=OFF")  # the copy is thrown away unless it is whole
        # One snapshot for all portions: in WAL mode a reader sees one state of the ledger, and the writer does not wait for it.
        reading.execute("BEGIN")
        reading.execute("SELECT count(*) FROM generations").fetchone()
        reading.backup(writing, pages=PAGES, progress=_unhurried(deadline), sleep=PAUSE_S)
        reading.execute("COMMIT")
        writing.execute("PRAGMA journal_mode=DELETE")  # one file without a log beside it, readable where nothing may be written
        _proved_whole(writing, target)
    except sqlite3.Error as error:
        raise LedgerError(f"the ledger {source} cannot be copied: {error}", "is it a ledger, and have both disks room?") from error
    finally:
        reading.close()
        writing.close()


def _unhurried(deadline: float) -> Callable[[int, int, int], None]:
    def progress(_status: int, left: int, total: int) -> None:
        if time.monotonic() > deadline:
            raise LedgerError(f"the backup took over {MAX_S:g} s with {left} of {total} pages left", "copy to a faster disk")

    return progress


def _proved_whole(connection: sqlite3.Connection, path: Path) -> None:
    found = [row[0] for row in connection.execute("PRAGMA quick_check(3)")]
    if found != ["ok"]:
        raise LedgerError(f"{path} is damaged: {'; '.join(found)}", "use another backup")


# ---------------------------------------------------------------- restore


def restore(url: str, source: Path, announced: Announced, host: str, now: float) -> int:
    """Replace the ledger by the backup `source`; returns the generation that ended the old history: the next daemon's is beyond it.

    Whole or not at all. Raises `LedgerError`, also where a daemon that is stopped holds the ledger.
    """
    if not source.is_file():
        raise LedgerError(f"there is no backup at {source}", "name the file that `scavenger ledger backup` wrote")
    floor = _newest_generation(url)
    parsed = store.parse(url)
    if parsed.drivername == "sqlite":
        _replace_sqlite(Path(str(parsed.database)), source)
    else:
        # One transaction, and it drops what is there.
        how = ("--clean", "--if-exists", "--no-owner", "--no-privileges", "--single-transaction", "--exit-on-error")
        _run_postgres("pg_restore", parsed, *how, str(source))
    return mark(url, announced, host, now, floor=floor, why=f"restored from {source.name}")


def mark(url: str, announced: Announced, host: str, now: float, *, floor: int = 0, why: str = "restored by other means") -> int:
    """Begin another history in a ledger that was put back already (point-in-time recovery, a snapshot of the disk). Fences everybody."""
    store.upgrade(url)
    engine = store.open_engine(url)
    try:
        with open_connection(engine) as connection, connection.begin():
            return int(begin_history(connection, os.getpid(), host, why, now, announced, floor))
    except sa.exc.DBAPIError as error:
        raise LedgerError(f"the restored ledger cannot be marked: {error.orig}", "run the same command again") from error
    finally:
        engine.dispose()


def _newest_generation(url: str) -> int:
    """The newest generation of the ledger that is to be replaced; 0 where there is none that can be read."""
    parsed = store.parse(url)
    if parsed.drivername == "sqlite" and not Path(str(parsed.database)).is_file():
        return 0
    engine = store.open_readonly(url)
    try:
        with engine.connect() as connection:
            return int(connection.execute(sa.select(sa.func.max(generations.c.generation))).scalar() or 0)
    except sa.exc.DBAPIError:
        return 0  # damaged or empty, which is why it is restored; the rendezvous file's generation counts all the same
    finally:
        engine.dispose()


def _journal_for(source: sqlite3.Connection, target: sqlite3.Connection) -> str:
    """SQLite copies no pages of one size into a write-ahead log of another. A rollback journal takes them, and needs the ledger alone."""
    sizes = [connection.execute("PRAGMA page_size").fetchone() for connection in (source, target)]
    return "WAL" if sizes[0] == sizes[1] else "DELETE"


def _replace_sqlite(ledger: Path, source: Path) -> None:
    _prove_ledger(source)
    damaged = _set_aside_damaged(ledger)
    store.open_engine(f"sqlite:///{ledger}").dispose()  # makes the file (0600) and its folder where they are missing
    reading, writing = _connect(source, "ro"), _connect(ledger, "rw", timeout_s=RESTORE_WAIT_S)
    try:
        writing.execute(f"PRAGMA journal_mode={_journal_for(reading, writing)}")
        writing.execute("PRAGMA synchronous=FULL")
        reading.backup(writing, pages=-1)  # all pages in one transaction: the old ledger or the new one, whenever this is killed
        writing.execute("PRAGMA journal_mode=WAL")
        writing.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        aside = f" (the damaged one is {damaged})" if damaged is not None else ""
        remedy = "stop the daemon first, also one that was stopped by SIGSTOP; `scavenger daemon` names its pid"
        raise LedgerError(f"the ledger {ledger} cannot be replaced{aside}: {error}", remedy) from error
    finally:
        reading.close()
        writing.close()


def _prove_ledger(source: Path) -> None:
    connection = _connect(source, "ro")
    try:
        connection.execute("SELECT count(*) FROM generations").fetchone()
        _proved_whole(connection, source)
    except sqlite3.Error as error:
        raise LedgerError(f"{source} is not a backup of a ledger: {error}", "name the file that `scavenger ledger backup` wrote") from error
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
    aside = ledger.with_name(f"{ledger.name}.damaged-{int(time.time())}")
    for suffix in ("-wal", "-shm", ""):
        part = ledger.with_name(ledger.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    return aside


# ---------------------------------------------------------------- small


def _connect(path: Path, mode: str, timeout_s: float = 5.0) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode={mode}", uri=True, timeout=timeout_s, isolation_level=None)


def _run_postgres(program: str, url: sa.URL, *arguments: str) -> None:
    """Run one of PostgreSQL's own programs on the ledger; a password goes through its environment, never through argv."""
    found = shutil.which(program)
    if found is None:
        raise LedgerError(f"{program} is not on PATH", "install PostgreSQL's client programs (postgresql-client), of the server's version")
    plain = url.set(drivername="postgresql", password=None).render_as_string(hide_password=False)
    environment = dict(os.environ) | ({"PGPASSWORD": str(url.password)} if url.password else {})
    done = subprocess.run([found, f"--dbname={plain}", *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LedgerError(f"{program} ended with status {done.returncode}: {done.stderr.strip()[-500:]}", "see PostgreSQL's own message")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
