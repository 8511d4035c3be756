"""Reports for an admin and the ledger's own audit, as plain functions for the CLI. Reads only.

Owns the formats. The questions are SQL files under `sql/reports/`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal, get_args

import rich.box
import rich.console
import rich.table
import rich.text
import sqlalchemy as sa

from scavenger.errors import LedgerError
from scavenger.ledger import queries
from scavenger.ledger.read.reader import QueryResult, reading, rows
from scavenger.ledger.store import MAINTENANCE_S, altered, contradiction, open_readonly
from scavenger.printable import amount, printable

Format = Literal["table", "csv", "json"]
#: Characters of a line in which a terminal's table folds its cells, and so many as no table has.
FOLDED, _UNFOLDED = 200, 1 << 20


def report(
    url: str,
    name: str,
    format: Format = "table",
    most: int | None = None,
    since: float | None = None,
    until: float | None = None,
    width: int | None = None,
) -> str:
    """The answer of `sql/reports/<name>.sql` as text. `width`: characters of a table's line, in which cells are folded; None: each row is
    one line, whatever it has. `most`, `since`, `until` (Unix seconds): of reports that show their newest rows.

    Raises `LedgerError` for an unknown report, format or ledger, and for a ledger of another release, which may lack what it reads.

    "table" shows times (columns ending in `_unix_s`) as UTC dates; "csv" and "json" keep Unix seconds.
    """
    sql = queries.load_report(name)
    if (most, since, until) != (None, None, None) and not queries.is_bounded(sql):
        bounded = [
            other for other in queries.report_names() if queries.is_bounded(queries.load_report(other))
        ]
        raise LedgerError(
            f"report {name!r} shows all there is",
            f"--limit, --since and --until are for {', '.join(bounded)}",
        )
    sql = queries.bounded(sql, most, since, until)
    if format not in get_args(Format):
        raise LedgerError(f"there is no format {format!r}", f"choose one of: {', '.join(get_args(Format))}")
    engine = open_readonly(url)
    try:
        if found := _check_revision(engine):
            raise LedgerError(
                f"the ledger cannot be reported on: {found[0]}", "look at daemon.ledger and daemon.state_dir"
            )
        question, result = queries.question(sql), rows(engine, sql)
        return _as_table(question, result, width) if format == "table" else _FORMATS[format](question, result)
    finally:
        engine.dispose()


def check(url: str) -> list[str]:
    """Everything that is wrong with the ledger, one line each; empty when it is sound. Raises `LedgerError` when it cannot be read."""
    engine = open_readonly(url, MAINTENANCE_S)
    try:
        if found := _check_revision(engine):
            return found
        return list(map(printable, [*_check_storage(engine), *_check_contents(engine)]))
    finally:
        engine.dispose()


def _check_revision(engine: sa.Engine) -> list[str]:
    ((there,),) = rows(engine, _HAS_REVISION[engine.dialect.name]).rows
    if not there:
        return ["it has no tables: no daemon was started on it"]
    (current,) = rows(engine, "SELECT max(version_num) FROM alembic_version").rows[0]
    found = contradiction(current or "")
    if found is None:
        with reading(engine) as connection:
            found = altered(connection, current or "")
    return [f"{found.cause}: {found.remedy}"] if found else []


_HAS_REVISION = {
    "sqlite": "SELECT count(*) FROM sqlite_master WHERE name = 'alembic_version'",
    "postgresql": "SELECT count(to_regclass('alembic_version'))",
}


def _check_storage(engine: sa.Engine) -> list[str]:
    if engine.dialect.name != "sqlite":
        return []
    return [f"damaged: {line}" for (line,) in rows(engine, "PRAGMA integrity_check").rows if line != "ok"]


def _check_contents(engine: sa.Engine) -> list[str]:
    found = [
        f"run {run_id}{f' sample {sample_id}' if sample_id else ''}: {problem} ({detail})"
        for name in ("exactly_once", "contradictions")
        for problem, run_id, sample_id, detail in rows(engine, queries.load_report(name)).rows
    ]
    found += [
        f"run {run_id} job {intent_id}: {problem} ({detail})"
        for problem, run_id, intent_id, detail in rows(engine, queries.load_report("unaccounted")).rows
    ]
    found += [
        f"run {run_id} sample {sample_id}: more tokens than its budget ({accepted} accepted, max_tokens {budget})"
        for run_id, sample_id, accepted, budget in rows(
            engine, _OVER_BUDGET.format(budget=_BUDGET[engine.dialect.name])
        ).rows
    ]
    found += [f"{what}: {amount(n, 'row')}" for what, n in rows(engine, queries.load("references")).rows if n]
    return found


#: The two databases spell differently how a field is read from JSON, so this is no report.
_BUDGET = {
    "sqlite": "json_extract(g.sampling, '$.max_tokens')",
    "postgresql": "CAST(CAST(g.sampling AS json) ->> 'max_tokens' AS bigint)",
}
_OVER_BUDGET = """
SELECT s.run_id, s.sample_id, s.accepted_len, {budget} FROM samples s JOIN groups g ON g.group_id = s.group_id
WHERE s.accepted_len > {budget} ORDER BY s.sample_id
"""


def utc(at: float) -> str:
    """A time in Unix seconds as UTC text, for a message."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# ---------------------------------------------------------------- formats


def _plain(value: Any) -> Any:
    """A value as JSON has it: exact decimals become numbers, payloads hexadecimal text."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value.hex() if isinstance(value, bytes) else value


def _shown(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column.endswith("_unix_s"):
        return (
            datetime.fromtimestamp(float(value), UTC)
            .isoformat(sep=" ", timespec="seconds")
            .removesuffix("+00:00")
        )
    value = _plain(value)
    return (
        f"{value:,}"
        if isinstance(value, int) and not column.endswith(("id", "step"))
        else printable(str(value))
    )


def _as_table(question: str, result: QueryResult, width: int | None) -> str:
    table = rich.table.Table(title=question, box=rich.box.SIMPLE, title_justify="left")
    for column in result.columns:
        numeric = bool(result.rows) and all(
            isinstance(v, (int, float, Decimal)) for v in _column(result, column) if v is not None
        )
        table.add_column(
            column.removesuffix("_unix_s"), justify="right" if numeric else "left", overflow="fold"
        )
    for row in result.rows:
        # As plain text: a reason that came from elsewhere must not be read as markup.
        table.add_row(
            *(
                rich.text.Text(_shown(column, value))
                for column, value in zip(result.columns, row, strict=True)
            )
        )
    console = rich.console.Console(file=io.StringIO(), width=width or _UNFOLDED, color_system=None)
    console.print(table)
    console.print(amount(len(result.rows), "row"), highlight=False)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _column(result: QueryResult, column: str) -> Sequence[Any]:
    at = result.columns.index(column)
    return [row[at] for row in result.rows]


def _as_csv(question: str, result: QueryResult) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(result.columns)
    writer.writerows(
        [printable(value) if isinstance(value, str) else _plain(value) for value in row]
        for row in result.rows
    )
    return out.getvalue()


def _as_json(question: str, result: QueryResult) -> str:
    records = [{c: _plain(v) for c, v in zip(result.columns, row, strict=True)} for row in result.rows]
    return json.dumps({"question": question, "rows": records}, indent=2) + "\n"


_FORMATS = {"csv": _as_csv, "json": _as_json}
