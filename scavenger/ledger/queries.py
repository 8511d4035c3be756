"""Named SQL files. Owns where they lie and how one is read; knows no question that they ask.

`sql/ledger/` holds what the product asks; `sql/reports/` what an admin asks. A report's first line is a comment that states its
question, it takes no parameters, and it runs unchanged in `sqlite3` and `psql`. Both kinds hold to SQL that SQLite and PostgreSQL
share: no `max(a, b)` or `greatest`, no date functions, `CAST(x AS numeric)` before `round`, no colon but before a parameter's name.
"""

from __future__ import annotations

import functools

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


def question(sql: str) -> str:
    """What a report answers: the text of its first line."""
    return sql.splitlines()[0].removeprefix("--").strip()
