"""A ledger with many samples in flight, written in bulk by plain SQL, once a database; and how long a daemon takes to serve on it.

Owns the shape of that ledger, which `scavenger ledger check` finds sound, and the daemon's process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from scavenger import toml
from scavenger.ledger import identity, store
from scavenger.ledger import schema as t
from scavenger.protocol import keys, messages

CHUNK = 32
GROUP = 8
WORKERS = 100


def write(url: str, samples: int, tokens: int) -> None:
    """`samples` samples in flight at 100 engines, each with `tokens` accepted tokens in chunks of 32, interleaved as they come."""
    store.upgrade(url)
    engine = store.open_engine(url)
    try:
        with engine.connect() as connection:
            sqlite = connection.dialect.name == "sqlite"
            with connection.begin():
                _rows(connection, samples, tokens)
            with connection.begin():
                _chunks(connection, samples, tokens)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)" if sqlite else "CHECKPOINT")
            connection.exec_driver_sql("ANALYZE")
    finally:
        engine.dispose()


def _rest(table: sa.Table) -> dict[str, Any]:
    """Values for the columns that must have one: empty and zero, where nothing else is said."""
    needed = (x for x in table.columns if not x.nullable and not (x.primary_key and x.autoincrement is True))
    return {
        x.name: "" if isinstance(x.type, sa.Text) else b"" if isinstance(x.type, sa.LargeBinary) else 0
        for x in needed
    }


def _rows(c: sa.Connection, samples: int, tokens: int) -> None:
    spec = '{"name": "bench", "model_config": "{}", "dtype": "float32", "max_batch": 4096, "context_length": 20000}'
    now = time.time()
    c.execute(
        sa.insert(t.generations),
        _rest(t.generations) | {"generation": 1, "host": "h", "started_at": now, "superseded_at": now},
    )
    c.execute(
        sa.insert(t.runs),
        _rest(t.runs)
        | {
            "run_id": 1,
            "name": "bench",
            "owner_key": "k",
            "seed": 0,
            "config": "{}",
            "engine": spec,
            "tokenizer": "",
            "created_at": now,
            "state": "active",
            "reason": "",
            "attempt": 1,
            "resume_step": 0,
            "last_step": 0,
            "last_version": 1,
        },
    )
    c.execute(
        sa.insert(t.attempts),
        _rest(t.attempts)
        | {
            "run_id": 1,
            "attempt": 1,
            "host": "h",
            "job_id": 1,
            "resume_step": 0,
            "config": "{}",
            "engine": spec,
            "started_at": now,
        },
    )
    c.execute(
        sa.insert(t.weight_versions),
        _rest(t.weight_versions)
        | {
            "run_id": 1,
            "version": 1,
            "step": 0,
            "attempt": 1,
            "root": b"r" * 32,
            "manifest": b"m",
            "nbytes": 1,
            "published_at": now,
        },
    )
    c.execute(
        sa.insert(t.workers),
        [
            _rest(t.workers)
            | {
                "worker_id": n,
                "run_id": 1,
                "kind": "harvested",
                "intent_id": f"i{n}",
                "session": f"s{n}",
                "incarnation": 0,
                "job_id": n,
                "node": f"n{n}",
                "gpus": 1,
                "engine": "bench",
                "joined_at": now,
                "reason": "",
                "samples": 0,
                "salvaged": 0,
                "regenerated": 0,
            }
            for n in range(1, WORKERS + 1)
        ],
    )
    _select(
        c,
        samples // GROUP,
        "groups",
        {
            "group_id": "i",
            "run_id": "1",
            "purpose": "'train'",
            "step": "1",
            "prompt_index": "i",
            "retry": "0",
            "created_version": "1",
            "version": "1",
            "prompt": ":prompt",
            "n": str(GROUP),
            "first_sample_id": f"(i - 1) * {GROUP} + 1",
            "sampling": "'{\"max_tokens\": 4096}'",
            "meta": "'{}'",
            "created_at": ":at",
            "delivered_attempt": "0",
        },
        prompt=messages.pack_tokens(range(64)),
        at=now,
    )
    worker = f"(i % {WORKERS}) + 1"
    _select(
        c,
        samples,
        "samples",
        {
            "sample_id": "i",
            "group_id": f"(i - 1) / {GROUP} + 1",
            "run_id": "1",
            "sample_index": f"(i - 1) % {GROUP}",
            "state": "'open'",
            "reason": "''",
            "finish": "''",
            "accepted_len": str(tokens),
            "epoch": "1",
            "moves": "0",
            "worker_id": worker,
            "regenerated": "0",
            "ended_step": "0",
            "ended_attempt": "0",
        },
    )
    _select(
        c,
        samples,
        "leases",
        {
            "sample_id": "i",
            "epoch": "1",
            "worker_id": worker,
            "version": "1",
            "start_len": "0",
            "end_len": "0",
            "regenerated": "0",
            "reason": "''",
            "granted_at": ":at",
        },
        at=now,
    )


def _chunks(c: sa.Connection, samples: int, tokens: int) -> None:
    c.exec_driver_sql("DROP INDEX ix_chunks_sample")
    for start in range(0, tokens, CHUNK):
        n = min(CHUNK, tokens - start)
        payload = b"\x01\x00\x00\x00" * n
        _select(
            c,
            samples,
            "chunks",
            {
                "sample_id": "i",
                "epoch": "1",
                "start_len": str(start),
                "n_tokens": str(n),
                "version": "1",
                "worker_id": f"(i % {WORKERS}) + 1",
                "at": ":at",
                "tokens": ":tokens",
                "logprobs": ":zeros",
                "raw_logprobs": ":zeros",
            },
            at=time.time(),
            tokens=payload,
            zeros=bytes(4 * n),
        )
    c.exec_driver_sql("CREATE INDEX ix_chunks_sample ON chunks (sample_id)")


def _select(c: sa.Connection, count: int, table: str, columns: dict[str, str], **values: object) -> None:
    columns = {
        name: f"'{value}'" if value == "" else str(value)
        for name, value in _rest(t.metadata.tables[table]).items()
    } | columns
    names, made = ", ".join(columns), ", ".join(columns.values())
    numbers = f"WITH RECURSIVE numbers(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM numbers WHERE i < {count})"
    typed = [
        sa.bindparam(k, type_=t.chunks.c.tokens.type if isinstance(v, bytes) else sa.Double())
        for k, v in values.items()
    ]
    if count:
        statement = f"INSERT INTO {table} ({names}) {numbers} SELECT {made} FROM numbers"
        c.execute(sa.text(statement).bindparams(*typed), values)


@contextmanager
def daemon(folder: Path, url: str) -> Iterator[tuple[float, int]]:
    """`python -m scavenger daemon` on a ledger: (seconds from its start to serving, its pid). Killed (SIGKILL) at the end."""
    state = folder / "state"
    keys.init_state(state, "bench")
    (state / "rendezvous.json").unlink(missing_ok=True)
    (state / identity.FILE).unlink(missing_ok=True)  # one state directory for one ledger after another
    config = folder / "scavenger.toml"
    config.write_text(
        toml.dumps(
            {
                "daemon": {"state_dir": state, "ledger": url},
                "cluster": {"backend": "local", "local_dir": folder},
                "harvest": {"enabled": False},
            }
        )
    )
    with (folder / "daemon.log").open("ab") as log:
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "scavenger", "daemon", "--config", str(config)], stderr=log, stdout=log
        )
        try:
            while not (state / "rendezvous.json").exists():
                if process.poll() is not None:
                    raise SystemExit(f"the daemon ended: {(folder / 'daemon.log').read_text()[-2000:]}")
                time.sleep(0.005)  # between two looks; the time to readiness is what is measured
            yield time.monotonic() - started, process.pid
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
