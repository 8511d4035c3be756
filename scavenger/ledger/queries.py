"""Named SQL files. Owns where they lie and how one is read; knows no question that they ask.

`sql/ledger/` holds what the product asks, and in `writes.sql` the statements of its writer, to read; `sql/reports/` what an admin asks.
A report's first line is a comment that states its question, it takes no parameters, and it runs unchanged in `sqlite3` and `psql`. Both
kinds hold to SQL that SQLite and PostgreSQL share: no `max(a, b)` or `greatest`, no date functions, `CAST(x AS numeric)` before
`round`, no colon but before a parameter's name.
"""

from __future__ import annotations

import functools
import re

from scavenger import resources
from scavenger.errors import LedgerError


@functools.cache
def load(name: str) -> str:
    """The text of `sql/ledger/<name>.sql`."""
    return resources.text(f"sql/ledger/{name}.sql")


def report_names() -> tuple[str, ...]:
    """The reports that exist, sorted."""
    return tuple(sorted(path.stem for path in resources.path("sql/reports").glob("*.sql")))


def load_report(name: str) -> str:
    """The text of `sql/reports/<name>.sql`. Raises `LedgerError` for a report that does not exist."""
    names = report_names()
    if name not in names:
        raise LedgerError(f"there is no report {name!r}", f"choose one of: {', '.join(names)}")
    return resources.text(f"sql/reports/{name}.sql")


#: How a report that has no end by itself says what it shows: its newest rows of a span of time.
_BOUNDS = re.compile(r"SELECT (\d+) AS most, ([0-9.]+) AS since, ([0-9.]+) AS until\b")


#: Of a bounded report's first line, for who runs it as SQL; and the same for who runs the command.
_BOUNDS_SAID = '"bounds": how many, of which Unix seconds.'
_OPTIONS_SAID = "--limit, --since and --until: others."


def is_bounded(sql: str) -> bool:
    """Whether a report shows its newest rows only, and can be asked for more or for those of a span of time."""
    return _BOUNDS.search(sql) is not None


def bounded(sql: str, most: int | None, since: float | None, until: float | None = None) -> str:
    """The same report for its newest `most` rows of [`since`, `until`) (Unix seconds); None: as the file says."""
    written = _BOUNDS.search(sql)
    if written is None:
        return sql
    rows = written[1] if most is None else str(int(most))
    begin, end = (
        said if at is None else format(float(at), "f")
        for said, at in ((written[2], since), (written[3], until))
    )
    return sql.replace(written[0], f"SELECT {rows} AS most, {begin} AS since, {end} AS until")


def question(sql: str) -> str:
    """What a report answers: the text of its first line, which has options of the command where SQL has `bounds`."""
    return sql.splitlines()[0].removeprefix("--").strip().replace(_BOUNDS_SAID, _OPTIONS_SAID)
