"""A SQLite ledger on a node's own disk that follows its daemon: for a daemon that is a job, and may start again on another node.

Boundary: the ledger's file on two file systems; IO.

SQLite cannot lie on a network file system. So a daemon that ends well leaves a whole copy in its state directory, which all nodes see, and
the next one, wherever it starts, takes it up. One that died left none: its ledger is still on its node, and a daemon elsewhere refuses to
begin without it rather than forget it. Owns `<state_dir>/ledger-carried.sqlite3` and that decision (`choose`, pure).
PostgreSQL needs none of this.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import structlog

from scavenger.config import DaemonConfig
from scavenger.errors import AuthError, ConfigError, DaemonUnavailable, LedgerError
from scavenger.ledger import store
from scavenger.ledger.maintain import backup
from scavenger.protocol import keys

log = structlog.get_logger()

FILE = "ledger-carried.sqlite3"
_NEWEST = "SELECT generation, batch FROM generations ORDER BY generation DESC LIMIT 1"


class HandoffChoice(StrEnum):
    STAY = "stay"  # with what is on this node's disk, or with nothing yet
    TAKE = "take"  # the copy
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True, order=True)
class Age:
    """How new a ledger is: every generation is a later one, and every transaction moves its batch. None of it: (0, 0)."""

    generation: int = 0
    batch: int = 0


def choose(here: Age, carried: Age, announced: int) -> HandoffChoice:
    """`announced`: the newest generation that ever served with this state directory, wherever its ledger is."""
    if max(here, carried).generation < announced:
        return HandoffChoice.REFUSE
    return HandoffChoice.TAKE if carried > here else HandoffChoice.STAY


def path_in(state_dir: Path) -> Path:
    return state_dir / FILE


def take_up(config: DaemonConfig) -> HandoffChoice:
    """Before a daemon starts: see to it that the newest ledger is the one on this node. Raises `ConfigError` when it cannot be had."""
    ledger, carried = store.sqlite_file(config.ledger_url), path_in(config.daemon.state_dir)
    if ledger is None:
        return HandoffChoice.STAY
    announced, host = _announced(config.daemon.state_dir)
    here, there = (
        _age(ledger, "mode=ro"),
        _age(carried, "mode=ro&immutable=1"),
    )  # the copy lies on a network file system, and rests
    choice = choose(here, there, announced)
    if choice is HandoffChoice.REFUSE:
        raise ConfigError(
            f"the newest ledger of {config.daemon.state_dir}, of generation {announced}, is on host {host}, whose daemon left no copy",
            f"if it runs no more, start on that node (sbatch --nodelist={host}), or go back to the last copy, of generation "
            f"{there.generation}, with `scavenger ledger restore {carried}`; a ledger in PostgreSQL is the same everywhere",
        )
    if choice is HandoffChoice.TAKE:
        _replace(carried, ledger)
        log.info("took up the carried ledger", generation=there.generation, ledger=str(ledger))
    return choice


def put_down(config: DaemonConfig, granted: int) -> None:
    """After a daemon ended well, of generation `granted`: leave a whole copy. Raises `LedgerError`; an earlier copy stays then.

    No daemon writes the ledger by now. A copy in which another daemon has begun is no end of anything: that one writes on, and leaves its
    own."""
    if store.sqlite_file(config.ledger_url) is None:
        return
    carried = path_in(config.daemon.state_dir)
    fresh = carried.with_name(f".{carried.name}.new")
    fresh.unlink(missing_ok=True)
    backup.backup(config.ledger_url, fresh)
    newest = _age(fresh, "mode=ro&immutable=1").generation
    if newest != granted:
        fresh.unlink()
        raise LedgerError(
            f"no copy of the ledger was left: it is of generation {newest} by now, and the daemon that ended was {granted}",
            "nothing is lost: the daemon that took the ledger leaves the copy when it ends; run one daemon at a time",
        )
    os.replace(fresh, carried)
    log.info("left a copy of the ledger", path=str(carried), nbytes=carried.stat().st_size)


def _announced(state_dir: Path) -> tuple[int, str]:
    try:
        rendezvous = keys.read_rendezvous(state_dir)
    except (DaemonUnavailable, AuthError):
        return 0, ""
    return rendezvous.generation, rendezvous.host


def _age(path: Path, how: str) -> Age:
    if not path.is_file():
        return Age()
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)) as connection:
            row = connection.execute(_NEWEST).fetchone()
    except sqlite3.Error as error:
        raise LedgerError(f"{path} cannot be read: {error}", "restore a backup: docs/recovery.md") from error
    return Age(*row) if row is not None else Age()


def _replace(carried: Path, ledger: Path) -> None:
    """Whole or not at all. An older ledger of this node is kept beside it, with the log that belongs to it."""
    ledger.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = ledger.with_name(f".{ledger.name}.partial")
    partial.unlink(missing_ok=True)
    # Never readable by others, not even while it is written, and never through a symbolic link.
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as target, carried.open("rb") as source:
        shutil.copyfileobj(source, target)
        target.flush()
        os.fsync(target.fileno())
    aside = f".older-{int(time.time())}"
    for suffix in ("-wal", "-shm", ""):
        old = ledger.with_name(ledger.name + suffix)
        if old.exists():
            old.rename(old.with_name(f"{ledger.name}{aside}{suffix}"))
    os.replace(partial, ledger)
