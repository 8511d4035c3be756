"""What a database's error means for the writer: a table from error codes to states. Pure.

A state named STALLED_* or LOST_CONNECTION passes: the same transaction is tried again until it succeeds. FENCED, FAILED and
CLOSED are final. What the table does not name is FAILED: a statement that the database will never take (a bug), or a disk that
cannot be trusted, must end the daemon and not turn into an endless retry.
"""

from __future__ import annotations

import sqlite3
from enum import StrEnum

import sqlalchemy as sa

from scavenger.errors import Fenced


class WriterState(StrEnum):
    """What the writer is doing. Only OK makes progress."""

    OK = "OK"
    STALLED_DISK_FULL = "STALLED_DISK_FULL"
    STALLED_READONLY = "STALLED_READONLY"
    STALLED_LOCKED = "STALLED_LOCKED"
    STALLED_IO = "STALLED_IO"
    LOST_CONNECTION = "LOST_CONNECTION"
    FENCED = "FENCED"
    FAILED = "FAILED"
    CLOSED = "CLOSED"


FINAL = frozenset({WriterState.FENCED, WriterState.FAILED, WriterState.CLOSED})
_RETRYING = frozenset(WriterState) - FINAL - {WriterState.OK}

#: Legal moves of the writer's state.
TRANSITIONS: dict[WriterState, frozenset[WriterState]] = {
    WriterState.OK: _RETRYING | FINAL,
    **{state: (_RETRYING - {state}) | FINAL | {WriterState.OK} for state in sorted(_RETRYING)},
    **{state: frozenset({WriterState.CLOSED}) for state in (WriterState.FENCED, WriterState.FAILED)},
    WriterState.CLOSED: frozenset(),
}

REMEDIES: dict[WriterState, str] = {
    WriterState.STALLED_DISK_FULL: "free space where the ledger lies; writing goes on by itself",
    WriterState.STALLED_READONLY: "make the ledger writable again (mount, permissions, failover); writing goes on by itself",
    WriterState.STALLED_LOCKED: "end the program that holds the ledger locked; writing goes on by itself",
    WriterState.STALLED_IO: "look at the disk (dmesg); writing is tried again",
    WriterState.LOST_CONNECTION: "start the database or repair the network; writing goes on by itself",
    WriterState.FENCED: "another daemon owns this ledger now: let only one daemon run on a ledger; was it restored, start this one again",
    WriterState.FAILED: "the ledger cannot go on; see the reason, then restart the daemon",
}

#: Where PostgreSQL's code (SQLSTATE) tells more than the state that it leads to: the cause, and what to do.
_SQLSTATE_ERRORS: dict[str, tuple[str, str]] = {
    "42501": (
        "the database role that was used may not do this",
        "connect as a role that may: the daemon's own to write or vacuum, a member of scavenger_contents to read tokens and prompts, of "
        "scavenger_read for the rest (`sql/roles.sql` grants them)",
    ),
    "55P03": (
        "another process holds a lock on the ledger",
        "end that session: `SELECT pid, usename, application_name, client_addr, query FROM pg_stat_activity WHERE pid IN (SELECT pid "
        "FROM pg_locks WHERE granted AND relation = 'generations'::regclass)` names those that hold one",
    ),
}

#: Extended codes first, then primary ones (the low byte). See sqlite.org/rescode.html.
_SQLITE: dict[int, WriterState] = {
    # After a failed sync the kernel may drop the dirty pages and report success next time, so no retry can be believed.
    sqlite3.SQLITE_IOERR_FSYNC: WriterState.FAILED,
    sqlite3.SQLITE_IOERR_DIR_FSYNC: WriterState.FAILED,
    sqlite3.SQLITE_FULL: WriterState.STALLED_DISK_FULL,
    sqlite3.SQLITE_READONLY: WriterState.STALLED_READONLY,
    sqlite3.SQLITE_PERM: WriterState.STALLED_READONLY,
    sqlite3.SQLITE_BUSY: WriterState.STALLED_LOCKED,
    sqlite3.SQLITE_LOCKED: WriterState.STALLED_LOCKED,
    sqlite3.SQLITE_PROTOCOL: WriterState.STALLED_LOCKED,
    sqlite3.SQLITE_IOERR: WriterState.STALLED_IO,
    sqlite3.SQLITE_CANTOPEN: WriterState.STALLED_IO,
    sqlite3.SQLITE_NOMEM: WriterState.STALLED_IO,
}

#: SQLSTATE codes, then classes (the first two characters). See PostgreSQL's appendix A.
_POSTGRES: dict[str, WriterState] = {
    "53100": WriterState.STALLED_DISK_FULL,
    "53200": WriterState.STALLED_IO,  # out of memory
    "53300": WriterState.LOST_CONNECTION,  # too many connections
    "25006": WriterState.STALLED_READONLY,
    "25P03": WriterState.LOST_CONNECTION,  # stood still in mid-transaction for too long
    "40001": WriterState.STALLED_LOCKED,
    "40P01": WriterState.STALLED_LOCKED,  # deadlock
    "55P03": WriterState.STALLED_LOCKED,
    "57014": WriterState.STALLED_LOCKED,  # cancelled by an administrator or a timeout
    "57P01": WriterState.LOST_CONNECTION,
    "57P02": WriterState.LOST_CONNECTION,
    "57P03": WriterState.LOST_CONNECTION,  # starting up
    "58030": WriterState.STALLED_IO,
    "08": WriterState.LOST_CONNECTION,
}


def classify(error: BaseException) -> WriterState:
    """The state that `error` puts the writer into. SQLAlchemy's wrapper is looked through."""
    if isinstance(error, Fenced):
        return WriterState.FENCED
    lost = isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) and error.orig is not None else error
    if isinstance(cause, sqlite3.Error):
        code: int = getattr(cause, "sqlite_errorcode", 0)
        return _SQLITE.get(code) or _SQLITE.get(code & 0xFF) or WriterState.FAILED
    sqlstate: str | None = getattr(cause, "sqlstate", None)
    if sqlstate:
        return _POSTGRES.get(sqlstate) or _POSTGRES.get(sqlstate[:2]) or WriterState.FAILED
    # libpq reports a broken or refused connection as an OperationalError without a code.
    if lost or type(cause).__name__ == "OperationalError":
        return WriterState.LOST_CONNECTION
    return WriterState.FAILED


def remedy(error: BaseException, failed: str = REMEDIES[WriterState.FAILED]) -> str:
    """What to do about it; `failed` where nothing is known of it."""
    known = _SQLSTATE_ERRORS.get(_sqlstate(error))
    if known is not None:
        return known[1]
    state = classify(error)
    return failed if state is WriterState.FAILED else REMEDIES[state]


def _sqlstate(error: BaseException) -> str:
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) and error.orig is not None else error
    return getattr(cause, "sqlstate", None) or ""


def overran(error: BaseException) -> bool:
    """Whether a reader was ended because it took longer than it may (`store.open_readonly`), or was cancelled."""
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    return (
        getattr(cause, "sqlite_errorcode", 0) == sqlite3.SQLITE_INTERRUPT
        or getattr(cause, "sqlstate", None) == "57014"
    )


def explain(error: BaseException) -> str:
    """The driver's message on one line, without statement and parameters (they may be a user's prompts)."""
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) and error.orig is not None else error
    name: str = (
        getattr(cause, "sqlite_errorname", "") or getattr(cause, "sqlstate", "") or type(cause).__name__
    )
    # Beyond its first line PostgreSQL quotes the row.
    known = _SQLSTATE_ERRORS.get(_sqlstate(error))
    return f"{known[0] + ': ' if known is not None else ''}{name}: {(str(cause).splitlines() or [''])[0]}"
