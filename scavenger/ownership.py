"""Who runs on a state directory and its ledger, for messages: a lock file that names its holder, and the ledger's newest generation.

Nothing is protected by this: generations fence, in the transaction itself (`ledger.transaction`). A second daemon takes over and says
from whom; what cannot be taken over (a stopped process that holds SQLite's lock) is named; a restore asks before it pulls the ledger
from under a daemon that is at work. Owns `<state_dir>/daemon.lock`. Knows no router and no socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import sqlalchemy as sa

from scavenger import keys
from scavenger.config import DaemonConfig
from scavenger.errors import AuthError, DaemonUnavailable, LedgerError
from scavenger.ledger import backup, restoring, store
from scavenger.ledger.backup import Restored
from scavenger.ledger.schema import generations
from scavenger.ledger.transaction import NOBODY, Announced

#: A daemon of another host that committed so recently is taken to be at work.
RECENT_S = 60.0


class Holder(msgspec.Struct, frozen=True):
    """A daemon's process. `since`: Unix seconds."""

    host: str
    pid: int
    since: float

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        stopped = ", which is stopped (SIGSTOP)" if self.host == socket.gethostname() and process_state(self.pid) == "T" else ""
        return f"the daemon with pid {self.pid} on host {self.host}, there since {since}{stopped}"

    @property
    def remedy(self) -> str:
        return f"on {self.host}: `kill -KILL {self.pid}` if it hangs or is stopped, `kill -TERM {self.pid}` otherwise"


def process_state(pid: int) -> str:
    """Linux's letter for a process of this host ("T": stopped); "" when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


class Ownership:
    """This process's claim to a state directory. `holder` is who had it when we came; None = nobody."""

    def __init__(self, state_dir: Path, me: Holder) -> None:
        self._path = state_dir / "daemon.lock"
        self._me = me
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._held = False
        self.holder = None if self.claim() else _read(self._path)

    def claim(self) -> bool:
        """Take the lock if it is free; again and again, because whoever was taken over may take a while to die."""
        if self._held:
            return True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held; or a file system without locks, and then nobody's message gets friendlier
            return False
        self._held = True
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, msgspec.json.encode(self._me), 0)
        return True

    def close(self) -> None:
        os.close(self._descriptor)


def _read(path: Path) -> Holder | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Holder)
    except (OSError, msgspec.MsgspecError):
        return None


def present_holder(state_dir: Path) -> Holder | None:
    """Who holds the state directory's lock now."""
    path = state_dir / "daemon.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    except OSError:
        return _read(path)
    finally:
        os.close(descriptor)


def writer_of(url: str, now: float) -> Holder | None:
    """The daemon that the ledger itself names, if it is at work as far as can be seen from here."""
    with contextlib.suppress(LedgerError, sa.exc.DBAPIError):
        engine = store.open_readonly(url)
        try:
            with engine.connect() as connection:
                newest = sa.select(generations).where(generations.c.superseded_at.is_(None)).order_by(generations.c.generation.desc())
                row = connection.execute(newest.limit(1)).one_or_none()
        finally:
            engine.dispose()
        if row is None:
            return None
        here = row.host == socket.gethostname()
        if _is_daemon(row.pid) if here else now - row.committed_at < RECENT_S:
            return Holder(row.host, row.pid, row.started_at)
    return None


def _is_daemon(pid: int) -> bool:
    """Whether a process of that number runs here, other than this one; a number that was given out again looks the same."""
    return pid != os.getpid() and process_state(pid) not in ("", "Z")


def explained(error: LedgerError, state_dir: Path, url: str) -> LedgerError:
    """The same error, naming who holds the ledger, where that is the trouble."""
    if "locked" not in error.cause and "lock timeout" not in error.cause:
        return error
    holder = present_holder(state_dir) or writer_of(url, time.time())
    return error if holder is None else LedgerError(f"{error.cause}; it is held by {holder}", holder.remedy)


def announced(state_dir: Path) -> Announced:
    """The newest generation that was announced in the state directory, whatever ledger it had, and the restore that was not finished."""
    try:
        rendezvous = keys.read_rendezvous(state_dir)
        known = Announced(rendezvous.generation, rendezvous.uid)
    except (DaemonUnavailable, AuthError):
        known = NOBODY
    note = restoring.find(state_dir)
    if note is None:
        return known
    return Announced(max(known.generation, note.floor), known.uid, note.source, restoring.path_in(state_dir))


def restore_ledger(config: DaemonConfig, source: Path | None, *, force: bool) -> Restored:
    """Refused while a daemon owns the ledger, unless `force`."""
    state_dir, url, now = config.daemon.state_dir, config.ledger_url, time.time()
    holder = present_holder(state_dir) or writer_of(url, now)
    if holder is not None and not force:
        raise LedgerError(f"the ledger is in use by {holder}", f"stop it first ({holder.remedy}), or pass --force: it is fenced then")
    known, host = announced(state_dir), socket.gethostname()
    try:
        if source is None:
            marked = Restored(backup.mark(url, known, host, now), None)
            restoring.end(restoring.path_in(state_dir))
            return marked
        return backup.restore(url, source, state_dir, known, host, now)
    except LedgerError as error:
        raise explained(error, state_dir, url) from error
