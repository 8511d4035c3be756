"""Which ledger a state directory belongs to: `<state_dir>/ledger.json`, written at a daemon's first start.

A path that slips (another working directory, a key that was left out, a file system that is not mounted) would begin a new history
in silence, and all that was recorded would be elsewhere. So a ledger that is not the one of before is refused, unless the person
who starts the daemon says that it is meant (`--new-ledger`).

A ledger is known by its first generation, which every release wrote and none changes; a copy, a restored backup and a ledger that
moved to another database have the same. Owns that file and the comparison (`compare`, pure).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import sqlalchemy as sa

from scavenger.errors import LedgerError, LedgerRefused
from scavenger.ledger import store
from scavenger.ledger.faults import explain, remedy
from scavenger.ledger.schema import generations
from scavenger.parsing import MALFORMED
from scavenger.protocol import keys

FILE = "ledger.json"
_g = generations.c
#: Columns that every release had.
_FIRST = sa.select(_g.generation, _g.host, _g.pid, _g.started_at).order_by(_g.generation).limit(1)


class LedgerNote(msgspec.Struct, frozen=True):
    """`identity`: of the ledger's first generation. `url`: where it was last, without a password. `since`: Unix seconds."""

    identity: str
    url: str
    since: float


def path_in(state_dir: Path) -> Path:
    return state_dir / FILE


def identity_of(url: str) -> str:
    """By what a ledger is known; "" for one without a generation. Makes no file. Raises `LedgerError`."""
    path = store.sqlite_file(url)
    if path is not None and (not path.is_file() or path.stat().st_size == 0):
        return ""
    engine = store.open_readonly(url)
    try:
        with engine.connect() as connection:
            first = connection.execute(_FIRST).one_or_none()
    except sa.exc.DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) == "42P01" or "no such table" in str(error.orig):
            return ""
        raise LedgerError(f"which ledger this is cannot be asked: {explain(error)}", remedy(error)) from error
    finally:
        engine.dispose()
    return "" if first is None else f"{first.generation}:{first.host}:{first.pid}:{first.started_at!r}"


def read(state_dir: Path) -> LedgerNote | None:
    """What the state directory names; None where no daemon has written it. Raises `LedgerError` for a file that cannot be read."""
    path = path_in(state_dir)
    try:
        return msgspec.json.decode(path.read_bytes(), type=LedgerNote)
    except FileNotFoundError:
        return None
    except MALFORMED as error:
        raise LedgerRefused(
            f"{path} is damaged: {error}", "start once with --new-ledger, which writes it anew"
        ) from error
    except OSError as error:
        raise LedgerError(
            f"{path} cannot be read: {error.strerror}", "see to the file system of daemon.state_dir"
        ) from error


def compare(note: LedgerNote | None, announced: int, found: str, url: str) -> str:
    """Why this ledger is not the one of before; "" when it is, or nothing was before. Pure.

    `announced`: the newest generation that ever served with the state directory. `found`: the identity of the ledger at `url`.
    """
    there = "no daemon has written in it" if not found else f"it began as {found}"
    if note is not None:
        if note.identity == found:
            return ""
        return f"the ledger {url} is not the one of this state directory: {there}; the one of before was at {note.url}"
    if announced and not found:
        return f"the ledger {url} is new, and daemons up to generation {announced} have served with this state directory"
    return ""


def check(state_dir: Path, url: str, announced: int) -> None:
    """Raise `LedgerRefused` unless the state directory may go on with this ledger."""
    why = compare(read(state_dir), announced, identity_of(url), shown(url))
    if why:
        raise LedgerRefused(
            f"{why} ({path_in(state_dir)})",
            "set daemon.ledger in scavenger.toml back to where the ledger is, or mount what it lies on; "
            "`scavenger ledger restore` puts back a backup. To leave the old one behind and begin with this one, "
            "start once with --new-ledger",
        )


def record(state_dir: Path, url: str, now: float) -> None:
    """Write down that the state directory belongs to this ledger, where that is not there yet. Raises `OSError`."""
    found, where = identity_of(url), shown(url)
    try:
        note = read(state_dir)
    except LedgerRefused:
        note = None
    if note is None or (note.identity, note.url) != (found, where):
        keys.write_private(path_in(state_dir), msgspec.json.encode(LedgerNote(found, where, now)))


def shown(url: str) -> str:
    """The URL without its password; an SQLite file by its absolute path."""
    path = store.sqlite_file(url)
    return str(path.absolute()) if path is not None else store.parse(url).render_as_string()
