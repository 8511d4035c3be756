"""Which daemon holds a state directory and its ledger, and where it is reached. Owns `daemon.lock` and the rendezvous file.

    daemon.lock       names the process that runs on the state directory; beside it counts the ledger's newest generation
    rendezvous file   written when the daemon serves, defended against older daemons, given up to a newer one

Neither file protects anything: generations fence inside each transaction (`ledger.write.transaction`), and peers check the daemon's key.
They tell a second daemon not to start while another is at work (`takeover` decides), make a restore ask before it replaces the ledger of
a live daemon, and name what cannot be taken over: a stopped process that holds SQLite's lock. Knows no router and no socket.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from scavenger.config import DaemonConfig, DaemonSection
from scavenger.daemon.takeover import SILENT_S, Sign
from scavenger.errors import AuthError, DaemonUnavailable, LedgerError, LedgerHeld
from scavenger.host import storage
from scavenger.ledger import identity, restoring, store
from scavenger.ledger.faults import explain, remedy
from scavenger.ledger.maintain import backup
from scavenger.ledger.maintain.backup import Restored
from scavenger.ledger.schema import generations
from scavenger.ledger.write.transaction import NO_WRITER, Announced, Generation
from scavenger.parsing import MALFORMED
from scavenger.protocol import keys

#: A process's start is known to the tick of the kernel's clock only, and by another clock than its commits.
_START_S = 1.0


class LedgerHolder(msgspec.Struct, frozen=True):
    """A daemon's process. Unix seconds: `since` when it has been there, `beat` its last sign of life (0: not known)."""

    host: str
    pid: int
    since: float
    beat: float = 0.0

    def __str__(self) -> str:
        stopped = ", which is stopped (SIGSTOP)" if self.here and process_state(self.pid) == "T" else ""
        beat = f", last heartbeat {_utc(self.beat)}" if self.beat else ""
        return f"the daemon with pid {self.pid} on host {self.host}, there since {_utc(self.since)}{beat}{stopped}"

    @property
    def here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def gone(self) -> bool:
        """Whether its process ended, as far as this host can tell: none has that number, or one that started later, or this one."""
        if not self.here:
            return False
        started = process_started(self.pid)
        return self.pid == os.getpid() or started is None or started > max(self.since, self.beat) + _START_S

    @property
    def remedy(self) -> str:
        return f"on {self.host}: `kill -KILL {self.pid}` if it hangs or is stopped, `kill -TERM {self.pid}` otherwise"


def process_state(pid: int) -> str:
    """Linux's letter for a process of this host ("T": stopped); "" when there is none."""
    try:
        return (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="ascii", errors="replace")
            .rpartition(")")[2]
            .split()[0]
        )
    except (OSError, IndexError):
        return ""


def process_there(host: str, pid: int) -> bool | None:
    """Whether a process is there; None on another host than its own, where it cannot be checked."""
    return process_state(pid) not in ("", "Z") if host == socket.gethostname() else None


def process_started(pid: int) -> float | None:
    """When a process of this host started, in Unix seconds; None when there is none, or nothing but its exit status is left of it."""
    try:
        fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        )
        ticks = int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
    if fields[0] in ("Z", "X"):
        return None
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


class Ownership:
    """This process's claim to a state directory. `holder` is the process that had it before; None = none."""

    def __init__(self, state_dir: Path, me: LedgerHolder) -> None:
        self._path = state_dir / "daemon.lock"
        self._me = me
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._held = False
        self.holder = None if self.claim() else _read(self._path)

    def claim(self) -> bool:
        """Take the lock if it is free; again and again, because the daemon taken over may take a while to end, and as a sign of life."""
        if self._held:
            os.utime(self._descriptor)
            return True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held; or a file system without locks, where the message is no better
            return False
        self._held = True
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, msgspec.json.encode(self._me), 0)
        return True

    def other(self) -> LedgerHolder | None:
        """Who has the lock now, other than this process's claim."""
        return None if self.claim() else _read(self._path)

    def close(self) -> None:
        os.close(self._descriptor)


def _read(path: Path) -> LedgerHolder | None:
    """The holder that a lock file names. It touches the file as long as it lives."""
    try:
        named = msgspec.json.decode(path.read_bytes(), type=LedgerHolder)
        return msgspec.structs.replace(named, beat=path.stat().st_mtime)
    except (OSError, *MALFORMED):
        return None


def present_holder(state_dir: Path) -> LedgerHolder | None:
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


#: Columns that every release had: the holder of a ledger of an older one is named too.
_GENERATIONS = sa.select(
    *(generations.c[name] for name in ("host", "pid", "started_at", "committed_at", "superseded_at"))
).order_by(generations.c.generation.desc())


def _generations(url: str) -> list[sa.Row[tuple[str, int, float, float, float | None]]]:
    """The newest generations of a ledger, the newest first; none where there is none yet. Raises `LedgerError` when it cannot be asked."""
    path = store.sqlite_file(url)
    if path is not None and not path.is_file():
        return []
    engine = store.open_readonly(url)
    try:
        with engine.connect() as connection:
            return list(connection.execute(_GENERATIONS.limit(16)))
    except sa.exc.DBAPIError as error:
        if _without_tables(error):
            return []
        raise LedgerError(f"who holds the ledger cannot be asked: {explain(error)}", remedy(error)) from error
    finally:
        engine.dispose()


def _without_tables(error: sa.exc.DBAPIError) -> bool:
    """Whether the ledger's tables do not exist yet (42P01: PostgreSQL's undefined_table)."""
    return getattr(error.orig, "sqlstate", None) == "42P01" or "no such table" in str(error.orig)


def _writer(url: str) -> LedgerHolder | None:
    """The daemon that the ledger itself names, alive or not; None also where it cannot be asked: who restores it must not need it."""
    try:
        rows = _generations(url)
    except LedgerError:
        return None
    return next(
        (
            LedgerHolder(row.host, row.pid, row.started_at, row.committed_at)
            for row in rows
            if row.superseded_at is None
        ),
        None,
    )


def writer_of(url: str, now: float) -> LedgerHolder | None:
    """The daemon that the ledger itself names, if it is at work as far as can be seen from here."""
    holder = _writer(url)
    if holder is None or holder.gone or (not holder.here and now - holder.beat >= SILENT_S):
        return None
    return holder


def holders(mine: Ownership, url: str) -> dict[Sign, LedgerHolder]:
    """All other processes that hold the ledger or, with another ledger, the state directory: alive or not, less those fenced already."""
    rows, locked = _generations(url), mine.other()
    found = [
        LedgerHolder(row.host, row.pid, row.started_at, row.committed_at)
        for row in rows
        if row.superseded_at is None
    ]
    known = locked is not None and any(_same(row, locked) for row in rows)
    if locked is not None and not known:
        found.append(locked)
    signs = {}
    for holder in found:
        locks = locked is not None and (holder.host, holder.pid) == (
            locked.host,
            locked.pid,
        )  # then the kernel knows that it lives
        signs[
            Sign(
                f"{holder.host}:{holder.pid}:{holder.since}",
                holder.beat,
                holder.gone and not locks,
                holder.here,
            )
        ] = holder
    return signs


def _same(row: Any, locked: LedgerHolder) -> bool:
    """Whether a generation is of the process that holds the lock, rather than of an earlier one with its number."""
    return (row.host, row.pid) == (locked.host, locked.pid) and row.started_at >= locked.since


def refused(holder: LedgerHolder, why: str) -> LedgerHeld:
    """Why a daemon does not start."""
    return LedgerHeld(
        f"another daemon is at work here: it is held by {holder} ({why})",
        f"one is enough: leave it. To run this one instead, end the other ({holder.remedy}), or start this one with --take-over, which "
        "fences the other at once. To have this one go on when the other fails, start it with --standby",
    )


def explained(error: LedgerError, state_dir: Path, url: str) -> LedgerError:
    """The same error, naming who holds the ledger, where that is the trouble, or the disk."""
    path = store.sqlite_file(url)
    if path is not None and any(
        code in error.cause for code in ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY")
    ):
        cause = f"{error.cause} ({path}: {storage.free_text(path)})"
        return LedgerError(cause, "free space there, or see to the disk (dmesg); then start the daemon again")
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
        known = NO_WRITER
    note = restoring.find(state_dir)
    if note is None:
        return known
    return Announced(max(known.generation, note.floor), known.uid, note.source, restoring.path_in(state_dir))


def restore_ledger(config: DaemonConfig, source: Path | None, *, force: bool) -> Restored:
    """Refused while a daemon owns the ledger, unless `force`."""
    state_dir, url, now = config.daemon.state_dir, config.ledger_url, time.time()
    holder = present_holder(state_dir) or writer_of(url, now)
    if holder is not None and not force:
        raise LedgerError(
            f"the ledger is in use by {holder}",
            f"stop it first ({holder.remedy}), or pass --force: it is fenced then",
        )
    known, host = announced(state_dir), socket.gethostname()
    try:
        if source is None:
            marked = Restored(backup.mark(url, known, host, now), None)
            restoring.end(restoring.path_in(state_dir))
            return marked
        restored = backup.restore(url, source, state_dir, known, host, now)
        identity.record(state_dir, url, now)  # a restored backup is that ledger
        return restored
    except LedgerError as error:
        raise explained(error, state_dir, url) from error


class Announcement:
    """Of one daemon, whose section says how others reach it."""

    def __init__(self, state_dir: Path, section: DaemonSection) -> None:
        self._state_dir, self._section = state_dir, section
        self.mine: keys.Rendezvous | None = None

    def newest(self) -> int:
        """The newest generation that was announced here, whatever ledger it had."""
        return announced(self._state_dir).generation

    def publish(self, public: str, port: int, generation: Generation, clusters_port: int = 0) -> str:
        """Write the file. `clusters_port`: of links to further clusters, 0 = none. Returns the router's endpoint, as the file names it."""
        listen = self._section.listen
        host = self._section.advertise or (socket.gethostname() if listen == "0.0.0.0" else listen)
        endpoint = f"tcp://{host}:{port}"
        self.mine = keys.Rendezvous(
            endpoint,
            public,
            int(generation),
            os.getpid(),
            socket.gethostname(),
            generation.uid,
            f"tcp://{host}:{clusters_port}" if clusters_port else "",
        )
        self._write(self.mine)
        return endpoint

    def _write(self, mine: keys.Rendezvous) -> None:
        keys.write_rendezvous(self._state_dir, mine)
        if self._section.public_dir is not None:
            keys.write_rendezvous(self._section.public_dir, mine, public=True)

    def defend(self) -> str:
        """An older daemon's announcement is replaced. Returns why this daemon has to end when a newer one has announced itself, or ""."""
        if self.mine is None:
            return ""
        announced, mine = self.newest(), self.mine.generation
        if announced < mine:
            self._write(self.mine)
        if announced <= mine:
            return ""
        why = f"another daemon owns this ledger now, or has another: generation {announced} was announced in {self._state_dir}"
        return f"{why}; this daemon's is {mine}"
