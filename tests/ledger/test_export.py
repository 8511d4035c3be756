"""An export holds every row, is read back in three lines, and does not grow in memory with the ledger."""

from __future__ import annotations

import array
import base64
import csv
import json
import stat
import tracemalloc
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from scavenger.cli.main import app
from scavenger.errors import LedgerError
from scavenger.ledger import records as r
from scavenger.ledger import schema, store
from scavenger.ledger.maintain import export
from scavenger.protocol.messages import unpack_tokens
from tests.ledger.examples import T0, answer, chunk, everything, group, prologue, written
from tests.ledger.histories import config, ended, fetch, training
from tests.ledger.test_purge import other_run


def test_every_table_is_exported_and_children_come_before_what_they_name() -> None:
    assert sorted(export.ORDER) == sorted(schema.metadata.tables)
    for child, parent in [
        ("chunks", "samples"),
        ("leases", "samples"),
        ("leases", "workers"),
        ("samples", "groups"),
        ("groups", "runs"),
        ("turns", "groups"),
        ("turn_samples", "samples"),
        ("turns", "episodes"),
        ("tool_calls", "episodes"),
        ("episodes", "runs"),
        ("gpu_allocations", "jobs"),
        ("job_states", "jobs"),
        ("jobs", "runs"),
        ("steps", "attempts"),
        ("workers", "runs"),
    ]:
        assert export.ORDER.index(child) < export.ORDER.index(parent)


def test_an_export_is_read_back_in_three_lines(url: str, tmp_path: Path) -> None:
    written(url, everything())
    out = tmp_path / "out"
    done = export.export(url, out, "sorting", contents=True)

    chunks = [json.loads(line) for line in (out / "chunks.jsonl").read_text().splitlines()]
    mine = sorted((c for c in chunks if c["sample_id"] == 11), key=lambda c: c["start_len"])
    tokens = array.array("i", b"".join(base64.b64decode(c["tokens"]) for c in mine))

    assert tokens.tolist() == list(unpack_tokens(answer(11, 9)))
    assert done.rows["chunks"] == len(chunks) == 4
    manifest = json.loads((out / export.MANIFEST).read_text())
    assert (manifest["rows"], manifest["revision"], manifest["run_id"]) == (done.rows, store.head(), 1)
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o600}


@pytest.mark.parametrize("fmt", ["jsonl", "csv"])
def test_every_value_of_every_table_is_there(
    url: str, tmp_path: Path, fmt: export.Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "PAGE_ROWS", 3)  # pages end within keys of two columns too
    written(url, everything())
    export.export(url, tmp_path / "out", None, contents=True, fmt=fmt)
    for name, table in schema.metadata.tables.items():
        path = tmp_path / "out" / f"{name}.{fmt}"
        if fmt == "jsonl":
            found = [json.loads(line) for line in path.read_text().splitlines()]
        else:
            found = list(csv.DictReader(path.read_text().splitlines()))
        columns = ", ".join(column.name for column in table.c)
        keys = ", ".join(column.name for column in table.primary_key.columns)
        expected = [
            {
                c.name: base64.b64encode(v).decode() if isinstance(v, bytes) else v
                for c, v in zip(table.c, row, strict=True)
            }
            for row in fetch(url, f"SELECT {columns} FROM {name} ORDER BY {keys}")
        ]
        if fmt == "csv":
            expected = [{k: "" if v is None else str(v) for k, v in row.items()} for row in expected]
        if name == "workers":  # SQLite has no booleans of its own
            told = {"1": "True", "0": "False", 1: True, 0: False}
            expected = [row | {"notice": told.get(row["notice"], row["notice"])} for row in expected]
        assert found == expected, name


def test_one_run_is_exported_without_the_others_and_without_contents(url: str, tmp_path: Path) -> None:
    written(url, [*training(), ended(), other_run()])
    out = tmp_path / "out"
    done = export.export(url, out, "reversal")
    assert {name: n for name, n in done.rows.items() if n} == {
        "attempts": 1,
        "chunks": 1,
        "groups": 1,
        "leases": 1,
        "runs": 1,
        "samples": 1,
        "weight_versions": 1,
        "workers": 1,
    }
    assert "decisions" not in done.rows
    assert not (out / "decisions.jsonl").exists()
    text = "".join(path.read_text() for path in out.iterdir())
    assert "a secret" not in text
    assert (
        set(json.loads((out / "chunks.jsonl").read_text()))
        == {c.name for c in schema.chunks.c} - export.CONTENTS["chunks"]
    )
    whole = export.export(url, tmp_path / "all", None)
    assert whole.rows["chunks"] == fetch(url, "SELECT count(*) FROM chunks")[0][0]


def test_a_folder_with_something_in_it_and_an_unknown_run_are_refused(
    sqlite_url: str, tmp_path: Path
) -> None:
    written(sqlite_url, [prologue()])
    (tmp_path / "out").mkdir()
    with pytest.raises(LedgerError, match="no run called"):
        export.export(sqlite_url, tmp_path / "out", "sortin")
    (tmp_path / "out" / "x").touch()
    with pytest.raises(LedgerError, match="not empty"):
        export.export(sqlite_url, tmp_path / "out")
    path = config(tmp_path, sqlite_url)
    done = CliRunner().invoke(
        app, ["ledger", "export", "--out", str(tmp_path / "new"), "--config", str(path)]
    )
    assert (done.exit_code, "runs                          1 row\n" in done.output) == (0, True), done.output


def test_an_export_s_memory_is_bounded(sqlite_url: str, tmp_path: Path) -> None:
    written(sqlite_url, [prologue(), [group(1, 1, 1, 1, 1), r.LeaseGranted(1, 1, 1, 1, 0, T0)]])
    size, rows = 1_000, 8_000
    payload = chunk(1, 1, 0, size, 1).tokens
    engine = store.open_engine(sqlite_url)
    with engine.connect() as connection, connection.begin():
        for start in range(0, rows, 1000):
            values: dict[str, object] = {
                "sample_id": 1,
                "epoch": 1,
                "n_tokens": size,
                "version": 1,
                "worker_id": 1,
                "at": T0,
            }
            values |= {"tokens": payload, "logprobs": b"", "raw_logprobs": b""}
            connection.execute(
                sa.insert(schema.chunks), [{**values, "start_len": size * (start + i)} for i in range(1000)]
            )
    engine.dispose()
    tracemalloc.start()
    export.export(sqlite_url, tmp_path / "out", contents=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    written_bytes = (tmp_path / "out" / "chunks.jsonl").stat().st_size
    assert written_bytes > rows * size * 4
    assert peak < written_bytes / 2, (peak, written_bytes)
