"""What pages are made of: rows of the ledger as panels of tables, charts and texts. Knows no HTML and no statement of its own.

Text that others chose leaves here printable and cut to length; the template escapes it.

Boundary: what is shown of any rows, before what rows a page asks for.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from scavenger.errors import NotInLedger
from scavenger.ledger.read import typed
from scavenger.printable import amount, printable
from scavenger.web import charts, questions
from scavenger.web.texts import Piece

Row = Mapping[str, Any]
_MOST_CELL = 160
_MOST_METRICS = 200


@dataclasses.dataclass(frozen=True)
class Cell:
    """`href` is a path below the page's prefix, "" = no link."""

    text: str
    href: str = ""
    right: bool = False
    tone: str = ""


@dataclasses.dataclass(frozen=True)
class Text:
    """A completion or a prompt with what is known of it. `pieces` are drawn in place of as much of `body` as they are of: its `rest`
    follows them."""

    title: str
    href: str
    facts: str
    body: str
    pieces: tuple[Piece, ...] = ()
    rest: str = ""


@dataclasses.dataclass(frozen=True)
class Panel:
    """What is shown of one statement. `choices`: (name, path, is chosen). `search`: the path that gets what a reader looks for, who looked
    for `wanted` last. `marks`: how the pieces of its texts may be marked, the first as it begins: of "none", "likely", "apart".
    """

    title: str
    sql: str = ""
    note: str = ""
    charts: tuple[charts.Chart, ...] = ()
    head: tuple[str, ...] = ()
    body: tuple[tuple[Cell, ...], ...] = ()
    texts: tuple[Text, ...] = ()
    choices: tuple[tuple[str, str, bool], ...] = ()
    empty: str = ""
    search: str = ""
    wanted: str = ""
    marks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Page:
    title: str
    panels: tuple[Panel, ...]
    above: tuple[tuple[str, str], ...] = ()


def clean(value: object, most: int = _MOST_CELL) -> str:
    """Printable, at most `most` characters."""
    said = printable(str(value)[: most + 1])
    return said if len(said) <= most else f"{said[: most - 1]}\u2026"


def moment(at: float | None) -> str:
    """Unix seconds as UTC; "-" for none, or for what is no date."""
    if at is None:
        return "-"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    except (OverflowError, ValueError, OSError):
        return "-"


def cell_of(name: str, value: object, href: str = "") -> Cell:
    if name == "at" or name.endswith(("_at", "unix_s")):
        return Cell(moment(value if isinstance(value, int | float) else None))
    if value is None:
        return Cell("-", right=True)
    if isinstance(value, str | bytes | bool):
        return Cell(clean(value), href, tone=name if name == "state" else "")
    if name.endswith("_id") or name == "id":
        return Cell(str(value), href, right=True)
    try:
        shown = charts.number(value if isinstance(value, int) else float(str(value)))
    except ValueError:
        shown = str(value)
    return Cell(clean(shown), href, right=True)


def ask(connection: sa.Connection, sql: str) -> list[Row]:
    """The rows of a statement whose numbers are filled in. Raises `LedgerError` where a value is of another type than its column."""
    found: list[Row] = [dict(row) for row in connection.exec_driver_sql(sql).mappings()]
    for row in found:
        typed.require(row)
    return found


def table_of(
    title: str,
    sql: str,
    found: Sequence[Row],
    links: Mapping[str, Callable[[Row], str]] | None = None,
    *,
    omit: tuple[str, ...] = (),
    **options: Any,
) -> Panel:
    names = tuple(name for name in (found[0] if found else ()) if name not in omit)
    by = links or {}
    body = tuple(
        tuple(cell_of(name, row[name], by[name](row) if name in by else "") for name in names)
        for row in found
    )
    shown = tuple(clean(re.sub("unix_s$", "at", name).replace("_", " "), 60) for name in names)
    return Panel(title, sql, head=shown, body=body, empty="" if found else "none", **options)


def metrics_of(row: Row) -> dict[str, float]:
    """The finite numbers of a step's metrics; none where they are no object."""
    try:
        found = json.loads(row["metrics"])
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    out: dict[str, float] = {}
    for name, value in list(found.items())[:_MOST_METRICS]:
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
            out[name] = float(value)
    return out


def steps_of(connection: sa.Connection, sql: str) -> list[Row]:
    """Steps with their metrics as `numbers`, parsed once."""
    return [{**row, "numbers": metrics_of(row)} for row in ask(connection, sql)]


def cut_note(found: Sequence[Row]) -> str:
    """Of how many steps the metrics are not read because they are too many, "" where of none. `found`: as `steps_of`."""
    cut = sum(bool(row["cut"]) for row in found)
    each, together = questions.MOST_METRICS >> 10, questions.MOST_RUN_METRICS // 1_000_000
    return (
        f"metrics of {cut:,} of {amount(len(found), 'step')} are left out: read are {each} Ki characters of a step, and {together} M of a "
        "run, the newest first"
        if cut
        else ""
    )


def notes(*said: str) -> str:
    """What there is to say of a panel, as one."""
    return "; ".join(filter(None, said))


def row_of(connection: sa.Connection, sql: str, what: str) -> Row:
    """The first row. Raises `NotInLedger` where there is none."""
    found = ask(connection, sql)
    if not found:
        raise NotInLedger(f"the ledger has no {what}", "it may have been purged")
    return found[0]


def may_read(connection: sa.Connection, table: str) -> bool:
    """Whether this role may read the table itself: of PostgreSQL's roles `scavenger_read` reads views alone."""
    if connection.dialect.name != "postgresql":
        return True
    asked = sa.text("SELECT has_table_privilege(CAST(:name AS regclass), 'SELECT')")
    return bool(connection.execute(asked, {"name": table}).scalar())


def run_link(row: Row) -> str:
    return f"/runs/{row['run_id']}"


def sample_link(row: Row) -> str:
    return f"/samples/{row['sample_id']}"


def group_link(row: Row) -> str:
    return f"/groups/{row['group_id']}"


def episode_link(row: Row) -> str:
    return f"/episodes/{row['episode_id']}"


def step_of(row: Row) -> tuple[str, str]:
    """(title, path) of the page that lists a group's samples: its step's, or its evaluation's."""
    if row["purpose"] == "eval":
        return f"Evaluation after step {row['step']}", f"/runs/{row['run_id']}/evals/{row['step']}"
    return f"Step {row['step']}", f"/runs/{row['run_id']}/steps/{row['step']}"


def decision_link(row: Row) -> str:
    return f"/decisions/{row['id']}"
