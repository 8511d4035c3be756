"""Named SQL files. Owns where they lie and how one is read; knows no question that they ask.

`sql/ledger/` holds what the product asks; `sql/reports/` what an admin asks. A report's first line is a comment that states its
question, it takes no parameters, and it runs unchanged in `sqlite3` and `psql`. Both kinds hold to SQL that SQLite and PostgreSQL
share: no `max(a, b)` or `greatest`, no date functions, `CAST(x AS numeric)` before `round`, no colon but before a parameter's name.
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


#: How a report that has no end by itself says what it shows: its newest rows, and none from before a time.
_BOUNDS = re.compile(r"SELECT \d+ AS most, [0-9.]+ AS since\b")


def is_bounded(sql: str) -> bool:
    """Whether a report shows its newest rows only, and can be asked for more or for those since a time."""
    return _BOUNDS.search(sql) is not None


def bounded(sql: str, most: int | None, since: float | None) -> str:
    """The same report for its newest `most` rows since `since` (Unix seconds); None: as the file says."""
    written = _BOUNDS.search(sql)
    if written is None:
        return sql
    _, has_most, _, _, has_since, *_ = written[0].split()
    new = f"SELECT {has_most if most is None else int(most)} AS most, {has_since if since is None else format(float(since), 'f')} AS since"
    return sql.replace(written[0], new)


def question(sql: str) -> str:
    """What a report answers: the text of its first line."""
    return sql.splitlines()[0].removeprefix("--").strip()
