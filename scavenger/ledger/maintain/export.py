"""Writes the ledger as files, one a table, for tools that read no database. Owns the files' format.

Reads pages in the order of the primary key, each in a transaction of its own, so neither memory nor the ledger's log grows with the
ledger. Tables are read from the children up: what a row names is in its table's file too, also while a daemon goes on writing.

Boundary: a file format that others read.
"""

from __future__ import annotations

import base64
import csv
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import sqlalchemy as sa

from scavenger.errors import LedgerError
from scavenger.ledger import schema, store
from scavenger.ledger.faults import explain
from scavenger.ledger.read import reader

Format = Literal["jsonl", "csv"]
PAGE_ROWS = 2_000
MANIFEST = "export.json"
#: What a user said or a model answered; left out unless asked for.
CONTENTS: dict[str, frozenset[str]] = {
    "chunks": frozenset({"tokens", "logprobs", "raw_logprobs", "routing"}),
    "groups": frozenset({"prompt", "meta"}),
    "tool_calls": frozenset({"answer"}),
    "token_differences": frozenset({"differences"}),
    "deliveries": frozenset({"episode_rows"}),
}
#: Rows that belong to no run: exported with the whole ledger only.
_COMMON = frozenset(
    {"generations", "cluster_polls", "decisions", "move_log", "other_users_waits", "node_quarantines"}
)
_SAMPLE_S = ("chunks", "leases", "sample_ends", "token_differences", "turn_samples")
_JOB_S = ("job_states", "gpu_allocations")  # of a job that changed hands, whole
#: Children before parents.
ORDER = (
    "chunks",
    "leases",
    "sample_ends",
    "token_differences",
    "turn_samples",
    "samples",
    "delivered_turns",
    "deliveries",
    "turns",
    "groups",
    "tool_calls",
    "episodes",
    "steps",
    "checkpoints",
    "weight_versions",
    "events",
    "gpu_allocations",
    "job_runs",
    "job_states",
    "workers",
    "engine_deaths",
    "jobs",
    "training_jobs",
    "attempts",
    "runs",
    "cluster_polls",
    "decisions",
    "move_log",
    "other_users_waits",
    "node_quarantines",
    "generations",
)


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: rows by table."""

    folder: Path
    rows: dict[str, int]


def export(
    url: str, out: Path, run: str | None = None, *, contents: bool = False, fmt: Format = "jsonl"
) -> Exported:
    """Write the accounting of the newest run of that name (None: of everything) into `out`, which must be empty or not exist.

    Payloads and hashes are base64 of what the ledger holds. Of a run whose engines were lost a moment ago, leases and samples may tell
    of the moment before (`move_log`, which only a whole export holds).

    Raises `LedgerError` for an unknown run or a folder with something in it.
    """
    engine = store.open_readonly(url)
    try:
        with engine.connect() as connection:
            store.require_head(connection)
        run_id = _run_id(engine, run)
        _prepare(out)
        counts: dict[str, int] = {}
        for name in ORDER:
            if run_id is None or name not in _COMMON:
                counts[name] = _write_table(
                    engine, out / f"{name}.{fmt}", schema.metadata.tables[name], run_id, contents, fmt
                )
        # Last, so that a folder with it is whole.
        document = {
            "run": run,
            "run_id": run_id,
            "contents": contents,
            "format": fmt,
            "revision": store.head(),
            "rows": counts,
        }
        with _private(out / MANIFEST) as file:
            json.dump(document, file, indent=2)
        return Exported(out, counts)
    except sa.exc.DBAPIError as error:
        raise LedgerError(
            f"the export stopped half-way: {explain(error)}", "remove the folder and try again"
        ) from error
    finally:
        engine.dispose()


def _run_id(engine: sa.Engine, run: str | None) -> int | None:
    if run is None:
        return None
    found = reader.run_by_name(engine, run)
    if found is None:
        raise LedgerError(
            f"the ledger has no run called {run!r}", "`scavenger ledger report runs` lists them"
        )
    return found.run_id


def _prepare(out: Path) -> None:
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise LedgerError(f"{out} is not empty", "name a new folder")
    except OSError as error:
        raise LedgerError(f"cannot write to {out}: {error.strerror}", "name another folder") from error


@contextmanager
def _private(path: Path) -> Iterator[TextIO]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8", newline="") as file:
        yield file


def _of_run(table: sa.Table, run_id: int) -> sa.ColumnElement[bool]:
    if table.name in _SAMPLE_S:
        owner = sa.select(1).where(
            schema.samples.c.sample_id == table.c.sample_id, schema.samples.c.run_id == run_id
        )
        return sa.exists(owner)
    if table.name in _JOB_S:
        jobs, before = schema.jobs, schema.job_runs
        now = sa.select(1).where(jobs.c.intent_id == table.c.intent_id, jobs.c.run_id == run_id)
        once = sa.select(1).where(before.c.intent_id == table.c.intent_id, before.c.run_id == run_id)
        return sa.or_(sa.exists(now), sa.exists(once))
    return table.c.run_id == run_id


def _write_table(
    engine: sa.Engine, path: Path, table: sa.Table, run_id: int | None, contents: bool, fmt: Format
) -> int:
    left_out = frozenset() if contents else CONTENTS.get(table.name, frozenset())
    columns = [column for column in table.c if column.name not in left_out]
    names = [column.name for column in columns]
    count = 0
    with _private(path) as file:
        write = _WRITERS[fmt](file, names)
        for page in _pages(engine, table, columns, run_id):
            for row in page:
                write([_plain(value) for value in row])
            count += len(page)
    return count


def _pages(
    engine: sa.Engine, table: sa.Table, columns: Sequence[sa.Column[Any]], run_id: int | None
) -> Iterator[Sequence[sa.Row[Any]]]:
    key = list(table.primary_key.columns)
    places = [columns.index(column) for column in key]
    query = sa.select(*columns).order_by(*key).limit(PAGE_ROWS)
    if run_id is not None:
        query = query.where(_of_run(table, run_id))
    after: tuple[Any, ...] | None = None
    while True:
        bounds = (
            ()
            if after is None
            else tuple(sa.literal(value, column.type) for value, column in zip(after, key, strict=True))
        )
        page = query.where(sa.tuple_(*key) > sa.tuple_(*bounds)) if bounds else query
        with engine.connect() as connection, connection.begin():
            found = connection.execute(page).all()
        if found:
            yield found
        if len(found) < PAGE_ROWS:
            return
        after = tuple(found[-1][place] for place in places)


def _plain(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, (bytes, memoryview)) else value


def _jsonl(file: TextIO, names: Sequence[str]) -> Callable[[Sequence[Any]], None]:
    def write(row: Sequence[Any]) -> None:
        file.write(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) + "\n")

    return write


def _csv(file: TextIO, names: Sequence[str]) -> Callable[[Sequence[Any]], None]:
    out = csv.writer(file, lineterminator="\n")
    out.writerow(names)

    def write(row: Sequence[Any]) -> None:
        out.writerow(row)

    return write


_WRITERS: dict[str, Callable[[TextIO, Sequence[str]], Callable[[Sequence[Any]], None]]] = {
    "jsonl": _jsonl,
    "csv": _csv,
}
