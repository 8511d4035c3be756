"""Whether a row's values are of their columns' types: SQLite keeps any value in any column, so a foreign program may have left one there.

Pure. Goes by the columns' names, which a query's own columns share with the tables that they are read from.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from scavenger.errors import LedgerError
from scavenger.ledger import schema

_REMEDY = "another program wrote it: restore the last backup, or put a value of the right type there"
#: What a query calls times and ids of its own making.
_NUMBERS = ("_at", "_id", "_len")


def require(row: Mapping[str, Any] | sa.RowMapping, *, packed: bool = False) -> None:
    """Raises `LedgerError`, naming the column, where a number's or a text's column holds something else. `packed`: also where one of packed
    arrays does; without it such a name may be of a sum (as `tokens`)."""
    kinds = _kinds()
    for name, value in row.items():
        kind = kinds.get(name) or ("numbers" if name.endswith(_NUMBERS) else "")
        wrong = (
            isinstance(value, str | bytes | memoryview)
            if kind == "numbers"
            else not isinstance(value, str)
            if kind == "text"
            else not isinstance(value, bytes | memoryview)
            if kind == "packed arrays" and packed
            else False
        )
        if wrong and value is not None:
            raise LedgerError(
                f"the ledger holds {type(value).__name__} in a column {name}, which is of {kind}", _REMEDY
            )


@functools.cache
def _kinds() -> Mapping[str, str]:
    """By column, what it is of; one that is of different things in different tables is left out."""
    found: dict[str, set[str]] = {}
    for table in schema.metadata.tables.values():
        for column in table.columns:
            found.setdefault(column.name, set()).add(_kind(column.type))
    return {name: kinds.pop() for name, kinds in found.items() if len(kinds) == 1}


def _kind(of: sa.types.TypeEngine[Any]) -> str:
    if isinstance(of, sa.Integer | sa.Double):
        return "numbers"
    if isinstance(of, sa.Text):
        return "text"
    return "packed arrays" if isinstance(of, sa.LargeBinary) else ""
