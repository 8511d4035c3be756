"""Opening a ledger: URLs, pragmas, permissions, the file system below, and the schema's revisions.

Owns every setting on which durability rests. Knows no record. A ledger is SQLite (one host, WAL, every commit synced) or
PostgreSQL (psycopg 3, `synchronous_commit=on`); anything else is refused.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.pool import NullPool

from scavenger import resources
from scavenger.errors import LedgerError, LedgerRefused
from scavenger.ledger.faults import explain, remedy
from scavenger.ledger.schema import metadata

#: File systems whose locks and shared memory do not reach from one host to another, as /proc/mounts spells them.
NETWORK_FILE_SYSTEMS = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "beegfs_nodev",
        "ceph",
        "cifs",
        "daos",
        "fhgfs",
        "fuse.beegfs",
        "fuse.ceph",
        "fuse.ceph-fuse",
        "fuse.daos",
        "fuse.dfuse",
        "fuse.glusterfs",
        "fuse.juicefs",
        "fuse.sshfs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "mmfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
        "smbfs",
        "wekafs",
    }
)
#: File systems that are gone with the machine's next boot.
VOLATILE_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs"})
_BUSY_TIMEOUT_S = 1.0
_PAGE_CACHE_KIB = 65_536
#: A chunk of 32 tokens takes 450 bytes: on pages of 8 KiB a commit writes fewer of them, and costs a third less than on 4 KiB.
_PAGE_BYTES = 8_192
_WAL_CHECKPOINT_PAGES = 4_000
#: A reader keeps SQLite's log from being written back, and PostgreSQL's rows from vacuum, for as long as it reads.
READER_S = 60.0
#: For what reads the whole ledger and is run seldom, by who knows that it takes its time.
MAINTENANCE_S = 3600.0
#: Steps of SQLite's virtual machine between two readings of the clock: some tenths of a millisecond.
_CLOCK_STEPS = 10_000
_WRITER_LOCK_TIMEOUT_MS = 10_000
#: Revisions of ledgers that were written before the first release. No migration leads from them.
NEVER_RELEASED = frozenset(f"{n:04}" for n in range(1, 9))
#: A daemon that stands still in mid-transaction (stopped, a frozen host) holds its generation's row: PostgreSQL ends that transaction
#: before the successor's wait for the row does. One that wakes tries the same transaction again, or finds itself fenced.
_WRITER_IDLE_TIMEOUT_MS = 8_000
#: A change of the schema is tried once: one that stands still for a while (a busy or frozen host) goes on.
_SCHEMA_IDLE_TIMEOUT_MS = 120_000
#: A connection's option: how SQLite opens its transactions. Only the writer takes the write lock at once.
BEGIN = "ledger_begin"


# ---------------------------------------------------------------- where a ledger may lie


def mount_type(path: str, mounts: str) -> str:
    """The type of the file system that holds the absolute `path`, given the text of /proc/mounts; "" when it names none. Pure."""
    best, found = -1, ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\").rstrip("/")
        inside = path == point or path.startswith(point + "/")
        # Of two mounts on one point the later hides the earlier.
        if inside and len(point) >= best:
            best, found = len(point), fields[2]
    return found


def file_system_of(directory: Path) -> str:
    """The type of the file system that holds a directory; "" where that cannot be told."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():  # not Linux: nothing to read, and no cluster node either
        return ""
    return mount_type(
        os.path.realpath(directory), mounts.read_text(encoding="utf-8", errors="surrogateescape")
    )


def volatile(url: str) -> str:
    """Why a ledger would not outlive the machine's next boot; "" when it would."""
    path = sqlite_file(url)
    kind = file_system_of(path.parent) if path is not None else ""
    return (
        f"{path} lies in the machine's memory ({kind}): the next boot loses it"
        if kind in VOLATILE_FILE_SYSTEMS
        else ""
    )


def refuse_network_file_system(directory: Path) -> None:
    kind = file_system_of(directory)
    if kind in NETWORK_FILE_SYSTEMS:
        raise LedgerRefused(
            f"the ledger {directory} lies on a network file system ({kind}), where SQLite's write-ahead log can lose commits",
            "set daemon.state_dir or daemon.ledger to a local disk, or use PostgreSQL: postgresql://user@host/database",
        )


def parse(url: str) -> sa.URL:
    """A ledger's URL with its driver. Raises `LedgerError` for what cannot hold a ledger."""
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError as error:
        raise LedgerRefused(
            f"the ledger's URL cannot be read: {error}", "sqlite:////absolute/path or postgresql://…"
        ) from error
    backend = parsed.drivername.split("+")[0]
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise LedgerRefused(
            f"a ledger cannot be kept in {backend}", "use sqlite:////absolute/path or postgresql://…"
        )
    if not parsed.database or parsed.database == ":memory:" or parsed.database.startswith("file:"):
        raise LedgerRefused(
            "a ledger in memory would not survive its daemon", "name a file: sqlite:////absolute/path"
        )
    return parsed


def _prepare_file(path: Path) -> None:
    """Make the directory (0700) and the file (0600). SQLite gives its log and index the file's own mode.

    A directory that exists keeps its mode: it may be a user's home.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_network_file_system(path.parent)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
    except OSError as error:
        raise LedgerError(
            f"the ledger {path} cannot be opened: {error.strerror}", "check the path and its permissions"
        ) from error


# ---------------------------------------------------------------- engines


def open_engine(url: str) -> sa.Engine:
    """An engine that may write. The SQLite file is made (0600) if it is missing; tables come from `upgrade`.

    Raises `LedgerError` for an unusable URL, a missing driver, or SQLite on a network file system.
    """
    parsed = parse(url)
    if parsed.drivername == "sqlite":
        path = Path(str(parsed.database))
        _prepare_file(path)
        return _sqlite_engine(f"file:{quote(str(path.absolute()))}?mode=rw", writes=True)
    limits = f"-c lock_timeout={_WRITER_LOCK_TIMEOUT_MS} -c idle_in_transaction_session_timeout={_WRITER_IDLE_TIMEOUT_MS}"
    return _postgres_engine(parsed, f"-c synchronous_commit=on {limits}")


def open_readonly(url: str, most_s: float | None = None) -> sa.Engine:
    """An engine that cannot write. Raises `LedgerError` when there is no such ledger.

    Keep its transactions short: a reader that stays open keeps SQLite's log from shrinking and PostgreSQL's rows from vacuum. A
    statement is ended after `most_s` seconds (`READER_S`), with SQLite those since its transaction began; see `faults.overran`.
    """
    parsed = parse(url)
    bound_s = READER_S if most_s is None else most_s
    if parsed.drivername == "sqlite":
        path = Path(str(parsed.database))
        if not path.is_file():
            raise LedgerError(
                f"there is no ledger at {path}",
                "start the daemon once, or check daemon.state_dir and daemon.ledger",
            )
        return _sqlite_engine(f"file:{quote(str(path.absolute()))}?mode=ro", writes=False, most_s=bound_s)
    # 0 would be no bound at all.
    return _postgres_engine(
        parsed, f"-c default_transaction_read_only=on -c statement_timeout={max(1, round(1000 * bound_s))}"
    )


def sqlite_file(url: str) -> Path | None:
    """The file of an SQLite ledger; None for PostgreSQL."""
    parsed = parse(url)
    return Path(str(parsed.database)) if parsed.drivername == "sqlite" else None


def _sqlite_engine(uri: str, *, writes: bool, most_s: float | None = None) -> sa.Engine:
    def connect() -> sqlite3.Connection:
        # isolation_level None: the driver opens no transaction of its own, `begin` below does.
        connection = sqlite3.connect(
            uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            if writes:
                connection.execute(f"PRAGMA page_size={_PAGE_BYTES}")  # heard only while the file is empty
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute(
                    "PRAGMA synchronous=FULL"
                )  # a commit outlives the operating system, not only the process
                connection.execute(f"PRAGMA wal_autocheckpoint={_WAL_CHECKPOINT_PAGES}")
            connection.execute(f"PRAGMA cache_size=-{_PAGE_CACHE_KIB}")
        except BaseException:
            connection.close()  # its file is no database, or locked
            raise
        return connection

    engine = sa.create_engine("sqlite://", creator=connect, poolclass=NullPool)

    def begin(connection: sa.Connection) -> None:
        if most_s is not None:
            _end_after(connection, most_s)
        connection.exec_driver_sql(f"BEGIN {connection.get_execution_options().get(BEGIN, 'DEFERRED')}")

    sa.event.listen(engine, "begin", begin)
    return engine


def _end_after(connection: sa.Connection, most_s: float) -> None:
    """SQLite has no timeout of its own for a statement: it asks this handler now and then, and is interrupted by a true answer."""
    deadline = time.monotonic() + most_s
    raw: Any = connection.connection.dbapi_connection
    raw.set_progress_handler(lambda: time.monotonic() > deadline, _CLOCK_STEPS)


def _postgres_engine(url: sa.URL, options: str) -> sa.Engine:
    given = url.query.get("options", "")
    settings: dict[str, Any] = {
        "options": f"{given} {options}".strip() if isinstance(given, str) else options
    }
    settings |= {
        "connect_timeout": 10,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
    }
    settings["tcp_user_timeout"] = 30_000
    try:
        return sa.create_engine(url, connect_args=settings, poolclass=NullPool)
    except ModuleNotFoundError as error:
        raise LedgerRefused(f"PostgreSQL needs {error.name}", "pip install 'scavenger[postgres]'") from error


# ---------------------------------------------------------------- revisions


def _migrations() -> Path:
    return resources.path("scavenger/ledger/migrations")


def _alembic(connection: sa.Connection | None, migrations: Path | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations or _migrations()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


@contextmanager
def _schema_transaction(url: str) -> Iterator[Config]:
    engine = open_engine(url)
    try:
        with engine.connect().execution_options(**{BEGIN: "IMMEDIATE"}) as connection, connection.begin():
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql(
                    f"SET LOCAL idle_in_transaction_session_timeout = {_SCHEMA_IDLE_TIMEOUT_MS}"
                )
            yield _alembic(connection)
    except sa.exc.DBAPIError as error:
        what = remedy(error, failed="check that the ledger is reachable")
        raise LedgerError(f"the ledger's schema cannot be changed: {explain(error)}", what) from error
    finally:
        engine.dispose()


def upgrade(url: str) -> tuple[str, str]:
    """Bring the ledger's schema to this release's, in one transaction.

    Returns the revisions before ("" = no tables) and after. Does nothing when it is there already. Else it ends
    the generation of the daemon that writes: that one knows the tables as they were, so its next commit is
    fenced and it stops. Raises `LedgerRefused` for a ledger that no migration leads from, and for one whose tables are not what its
    revision says. There is no way down: to go back, restore the backup of before.
    """
    with _schema_transaction(url) as config:
        connection: sa.Connection = config.attributes["connection"]
        before = current_revision(connection)
        _require_known(before)
        if before and before != head():
            _end_generations(connection)
        command.upgrade(config, "head")
        after = current_revision(connection)
        if before:
            wanted = _columns_anew(_migrations())
            if found := _altered(after, _columns(connection, wanted), wanted):
                raise found
        return before, after


def _end_generations(connection: sa.Connection) -> None:
    """As `transaction.grant_generation` does, in words that every revision of the table understands."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("LOCK TABLE generations IN SHARE ROW EXCLUSIVE MODE")
    connection.execute(
        sa.text("UPDATE generations SET superseded_at = :now WHERE superseded_at IS NULL"),
        {"now": time.time()},
    )


def current_revision(connection: sa.Connection) -> str:
    """The revision of the ledger's schema, "" where it has no tables; of one that says several, all of them, which is none that we know."""
    return "+".join(sorted(MigrationContext.configure(connection).get_current_heads()))


def contradiction(current: str) -> LedgerError | None:
    """Why this release cannot use a ledger at revision `current` as it is, with the remedy; None: it can."""
    if current == head():
        return None
    if current in NEVER_RELEASED:
        return LedgerRefused(
            f"the ledger's schema is at revision {current}, which was never released",
            "export it with the program that wrote it (scavenger ledger export), then start a new one:"
            " name another daemon.ledger",
        )
    known = {script.revision for script in ScriptDirectory.from_config(_alembic(None)).walk_revisions()}
    if current and current not in known:
        return LedgerRefused(
            f"the ledger's schema is at revision {current}, which this release does not know",
            "a newer release has upgraded it: install that release again, or use another ledger",
        )
    return LedgerError(
        f"the ledger's schema is at revision {current or 'none'}, this version needs {head()}",
        "start this release's daemon on it, which upgrades it (an older release cannot use a newer ledger)",
    )


def _require_known(current: str) -> None:
    if isinstance(found := contradiction(current), LedgerRefused):
        raise found


def head() -> str:
    """The newest revision that this version of the code knows."""
    return _head_of(_migrations())


# A running program's files do not change, and each page of `scavenger web` asks.
@functools.lru_cache(maxsize=4)
def _head_of(migrations: Path) -> str:
    return ScriptDirectory.from_config(_alembic(None, migrations)).get_current_head() or ""


def require_head(connection: sa.Connection) -> None:
    """Raises `LedgerError` unless the ledger's schema is this code's: its revision, and the columns of its tables. Views are compared by
    `upgrade` alone, with which each daemon starts."""
    current = current_revision(connection)
    if found := contradiction(current) or altered(connection, current):
        raise found


# ---------------------------------------------------------------- a revision that was changed after it had made a ledger


class LedgerColumn(NamedTuple):
    """A column of a table or view. `needed`: every row that is inserted must name it."""

    name: str
    needed: bool


#: By table or view.
LedgerColumns = Mapping[str, frozenset[LedgerColumn]]
#: Of those that a query means by these names: of PostgreSQL's whichever schema they are in, and also where the asker may not read them. Of
#: others nothing is asked: SQLite refuses to look into a view of somebody's whose table is gone.
_COLUMNS = {
    "sqlite": 'SELECT m.name, c.name, c."notnull" AND c.dflt_value IS NULL AND NOT c.pk FROM sqlite_master m'
    " JOIN pragma_table_info(m.name) c WHERE m.type IN ('table', 'view') AND m.name IN :names",
    "postgresql": "SELECT t.relname, c.attname, c.attnotnull AND NOT c.atthasdef FROM pg_class t"
    " JOIN pg_attribute c ON c.attrelid = t.oid AND c.attnum > 0 AND NOT c.attisdropped"
    " WHERE t.relkind IN ('r', 'p', 'v') AND pg_table_is_visible(t.oid) AND t.relname IN :names",
}


def _columns(connection: sa.Connection, names: Collection[str]) -> LedgerColumns:
    """Of these tables and views, as far as they are there."""
    found: dict[str, set[LedgerColumn]] = {}
    asked = sa.text(_COLUMNS[connection.dialect.name]).bindparams(sa.bindparam("names", expanding=True))
    for table, column, needed in connection.execute(asked, {"names": sorted(names)}):
        found.setdefault(str(table), set()).add(LedgerColumn(str(column), bool(needed)))
    return {table: frozenset(columns) for table, columns in found.items()}


@functools.cache
def _columns_anew(migrations: Path) -> LedgerColumns:
    """Those of a ledger that these revisions make."""
    engine = sa.create_engine("sqlite://")
    try:
        with engine.connect() as connection, connection.begin():
            command.upgrade(_alembic(connection, migrations), "head")
            made = connection.exec_driver_sql(
                "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"
            )
            return _columns(connection, list(made.scalars()))
    finally:
        engine.dispose()


def _altered(revision: str, found: LedgerColumns, wanted: LedgerColumns) -> LedgerRefused | None:
    """Why tables and views are not what their revision makes, with the remedy; None: they are. What else there is does not count, but for
    a column without which nothing can be inserted. Pure."""
    for table, columns in sorted(wanted.items()):
        names, there = {column.name for column in columns}, found.get(table, frozenset())
        missing = sorted(names - {column.name for column in there})
        unknown = sorted(column.name for column in there if column.needed and column.name not in names)
        if not there:
            what = f"{table} is missing"
        elif missing:
            what = f"{table} has no column {missing[0]}"
        elif unknown:
            what = f"{table} has the column {unknown[0]}, which this release does not fill"
        else:
            continue
        return LedgerRefused(
            f"the ledger's schema is at revision {revision}, but not as this release makes it: {what}",
            "a snapshot made it before the revision was released: export it with that one (scavenger ledger export),"
            " then start a new one: name another daemon.ledger",
        )
    return None


def altered(connection: sa.Connection, revision: str) -> LedgerRefused | None:
    """Why the tables of a ledger at this `revision`, the newest, are not this code's, with the remedy; None: they are."""
    wanted = {
        name: frozenset(LedgerColumn(column.name, needed=False) for column in table.columns)
        for name, table in metadata.tables.items()
    }
    return _altered(revision, _columns(connection, wanted), wanted)
