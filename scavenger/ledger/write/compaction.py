"""Compacting and dropping samples' chunks inside a transaction of the writer. Owns the statements; `retention` owns the rule.

Chunks have no unique key, so that they join up without a hole or an overlap is proved here before any of them goes. A sample whose
chunks do not is left as it is, and an event says so.

Boundary: statements of one maintenance operation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from scavenger.ledger.records import ContentsReduced
from scavenger.ledger.retention import BECOMES, FINAL_STATES, ChunkRow, merge
from scavenger.ledger.schema import chunks, events, runs, samples, token_differences

_c, _s = chunks.c, samples.c
_PLACE = (_c.sample_id, _c.id, _c.epoch, _c.start_len, _c.n_tokens, _c.version, _c.worker_id, _c.at)


def reduce_contents(connection: sa.Connection, records: Sequence[ContentsReduced]) -> None:
    """Carry out each record, unless its run was granted another attempt since. Samples that are not final are left alone."""
    for record in records:
        # The lock that a purge takes too: without it, on PostgreSQL, one of the two could put back what the other removed.
        mine = sa.select(runs.c.attempt).where(runs.c.run_id == record.run_id).with_for_update()
        attempt = connection.execute(mine).scalar()
        if attempt == record.attempt:
            _reduce(connection, record)


def _reduce(connection: sa.Connection, record: ContentsReduced) -> None:
    lengths = _wanted(connection, record)
    payload = (_c.tokens, _c.logprobs, _c.raw_logprobs, _c.routing)
    columns = (*_PLACE, *payload) if record.to == "compacted" else _PLACE
    query = (
        sa.select(*columns).where(_c.sample_id.in_(list(lengths))).order_by(_c.sample_id, _c.start_len, _c.id)
    )
    found = {
        sample_id: list(rows)
        for sample_id, rows in groupby(connection.execute(query), key=lambda row: row.sample_id)
    }
    done, stale, merged_rows = [], [], []
    for sample_id, length in lengths.items():
        rows = found.get(sample_id, [])
        merged, problem = merge([_chunk(row, dropped=record.to == "dropped") for row in rows], length)
        if problem:
            _report(connection, record, sample_id, problem)
            continue
        done.append(sample_id)
        if record.to == "dropped" or len(merged) != len(rows):
            stale += [row.id for row in rows]
            merged_rows += [{"sample_id": sample_id, **asdict(row)} for row in merged]
    if stale:
        connection.execute(
            sa.delete(chunks).where(_c.id == sa.bindparam("p_id")), [{"p_id": row_id} for row_id in stale]
        )
        connection.execute(sa.insert(chunks), merged_rows)
    if done and record.to == "dropped":
        apart = token_differences.c
        connection.execute(
            sa.update(token_differences).where(apart.sample_id.in_(done)).values(differences=b"")
        )
    if done:
        connection.execute(sa.update(samples).where(_s.sample_id.in_(done)).values(contents=record.to))


def _chunk(row: Any, *, dropped: bool) -> ChunkRow:
    values = [*row[2:], b"", b"", b"", b""] if dropped else [*row[2:-1], row.routing or b""]
    return ChunkRow(*values)


def _wanted(connection: sa.Connection, record: ContentsReduced) -> dict[int, int]:
    """The record's samples that may still be reduced, with their lengths."""
    query = sa.select(_s.sample_id, _s.accepted_len, _s.contents).where(
        _s.sample_id.in_(record.sample_ids), _s.run_id == record.run_id, _s.state.in_(FINAL_STATES)
    )
    rows = connection.execute(query.order_by(_s.sample_id))
    return {row.sample_id: row.accepted_len for row in rows if row.contents in BECOMES[record.to]}


def _report(connection: sa.Connection, record: ContentsReduced, sample_id: int, problem: str) -> None:
    connection.execute(
        sa.insert(events).values(
            kind="chunks_do_not_join",
            run_id=record.run_id,
            subject=f"sample {sample_id}",
            reason=problem,
            detail=json.dumps({"not": record.to}),
            at=record.at,
        )
    )
