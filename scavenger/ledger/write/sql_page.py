"""Writes `sql/ledger/writes.sql`: for each kind of record, the statements of `KINDS` as they are compiled. A test holds the file to them.

The file is for readers; nothing loads it. SQLite and PostgreSQL are given the same text. Run as a module to make it:

    python -m scavenger.ledger.write.sql_page > sql/ledger/writes.sql
"""

from __future__ import annotations

import sys
import textwrap
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql import visitors

from scavenger.ledger import records as r
from scavenger.ledger.write.statements import KINDS

_HEADER = """\
-- What the writer does with each kind of record: its statements over one parameter row, the same on SQLite and PostgreSQL.
-- Generated from `KINDS` (scavenger/ledger/write/statements.py), for readers only:
--     python -m scavenger.ledger.write.sql_page > sql/ledger/writes.sql
-- A parameter :p_x is the record's field x. Many records of a kind are written by one statement over all their rows (batch_sql.py).
"""
_NOTES = {
    r.GroupCreated: "The second statement runs once for each of the group's n samples.",
    r.ChunkAccepted: "One row for each sample, with its longest length. The chunks themselves: batches.append_chunks.",
    r.ContentsReduced: "What is run depends on what the chunks hold: compaction.reduce_contents.",
    r.Heartbeat: "Nothing: the transaction itself moves committed_at (advance_batch.sql).",
}


def page() -> str:
    """The whole file. Raises `AssertionError` where the dialects' texts differ: the page shows one."""
    parts = [_HEADER]
    for kind, known in KINDS.items():
        lines = [f"-- {kind.__name__}"]
        if kind in _NOTES:
            lines.append(f"-- {_NOTES[kind]}")
        parts.append("\n".join([*lines, *(_shown(statement.sql) for statement in known.statements)]) + "\n")
    return "\n".join(parts)


def _shown(statement: sa.Executable) -> str:
    text, other = (_compiled(statement, dialect) for dialect in (sqlite.dialect, postgresql.dialect))
    assert text == other, f"SQLite runs\n{text}\nand PostgreSQL\n{other}"
    for clause in ("VALUES", "SET", "WHERE"):
        text = text.replace(f" {clause} ", f"\n{clause} ", 1)
    return "\n".join(map(_wrapped, text.split("\n"))) + ";"


def _wrapped(clause: str) -> str:
    return "\n".join(
        textwrap.wrap(clause, 120, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    )


def _compiled(statement: Any, dialect: Any) -> str:
    def by_name(element: Any, **_: Any) -> Any:
        if isinstance(element, sa.BindParameter) and element.key.startswith("p_"):
            return sa.literal_column(f":{element.key}", element.type)
        return None

    made = visitors.replacement_traverse(statement, {}, by_name)
    return str(made.compile(dialect=dialect(paramstyle="named"), compile_kwargs={"literal_binds": True}))


if __name__ == "__main__":
    sys.stdout.write(page())
