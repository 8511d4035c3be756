"""How a batch of records of one kind becomes parameter rows: by name for a statement's row, in order for `batch_sql`. Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, get_args, get_type_hints

from scavenger.ledger import records as r
from scavenger.ledger.records import Record

Row = dict[str, Any]
Rows = Callable[[Sequence[Any]], Iterable[Row]]


def _clean(value: Any) -> Any:
    """PostgreSQL's text holds every character but NUL, and a peer's reason must not be able to stop the ledger."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value


def parameters(record: Record) -> Row:
    """A record's fields as bind parameters; the prefix keeps them apart from the column names that SQLAlchemy binds itself."""
    return {f"p_{name}": _clean(getattr(record, name)) for name in record.__struct_fields__}


def each(records: Sequence[Record]) -> Iterator[Row]:
    """One parameter row a record."""
    return map(parameters, records)


def tuples(names: tuple[str, ...], make: Rows, records: Sequence[Any]) -> tuple[tuple[type, ...], list[tuple[Any, ...]]]:
    """Rows of a batch of one kind for `batch_sql`: the Python type of each parameter, and values in the order of `names`."""
    kind: type[Record] = type(records[0])
    hints = _field_types(kind)
    types = tuple(hints.get(name.removeprefix("p_"), int) for name in names)  # what is not a field is a count
    if make is lengths:  # the hot one: no row of it becomes a dictionary
        return types, sorted(_longest(records).items())
    if make is not each:
        return types, [tuple(row[name] for name in names) for row in make(records)]
    fields = [name.removeprefix("p_") for name in names]
    values = map(attrgetter(*fields), records)
    rows: list[tuple[Any, ...]] = list(values) if len(fields) > 1 else [(value,) for value in values]
    if any("\0" in text for at, kind in enumerate(types) if kind is str for text in {row[at] for row in rows} if text):
        rows = [tuple(map(_clean, row)) for row in rows]
    return types, rows


@functools.cache
def _field_types(kind: type[Record]) -> dict[str, type]:
    """The Python type of each field; an optional one's without its None."""
    hints = get_type_hints(kind)
    return {name: next((x for x in get_args(hint) if x is not type(None)), hint) for name, hint in hints.items()}


def new_samples(records: Sequence[r.GroupCreated]) -> Iterator[Row]:
    for group in records:
        for index in range(group.n):
            yield {
                "p_sample_id": group.first_sample_id + index,
                "p_group_id": group.group_id,
                "p_run_id": group.run_id,
                "p_index": index,
            }


def _longest(records: Sequence[r.ChunkAccepted]) -> dict[int, int]:
    """The last accepted length of each sample: one update a sample, however many chunks it has in the batch."""
    longest: dict[int, int] = {}
    for chunk in records:
        sample_id, length = chunk.sample_id, chunk.offset + len(chunk.tokens) // 4
        if length > longest.get(sample_id, -1):
            longest[sample_id] = length
    return longest


def lengths(records: Sequence[r.ChunkAccepted]) -> Iterator[Row]:
    # The same order in every transaction, so that two never wait for each other.
    return ({"p_sample_id": sample_id, "p_length": length} for sample_id, length in sorted(_longest(records).items()))
