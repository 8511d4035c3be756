"""Prompts, completions and what is known of each of their tokens, of some samples at once, in few statements. Reads only.

Boundary: packed arrays as the ledger has them; who reads them makes text or numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from scavenger.errors import LedgerError
from scavenger.ledger import queries
from scavenger.ledger.read import typed
from scavenger.ledger.read.prompts import whole_prompts
from scavenger.ledger.read.reader import GONE, Piece, join_chunks
from scavenger.ledger.read.reports import utc


class Recorded(NamedTuple):
    """Of one sample, packed: int32 `tokens`, float32 `logprobs`, float16 `differences` (empty: not kept). `why`: why it cannot be read,
    empty where it can."""

    group_id: int
    tokens: bytes = b""
    logprobs: bytes = b""
    differences: bytes = b""
    why: str = ""


def recorded(connection: sa.Connection, sample_ids: Sequence[int], most: int) -> dict[int, Recorded]:
    """By sample, in their order, the first `most` tokens of each; one that the ledger does not have is not in the answer. `differences` are
    those of the newest step."""
    found = {row.sample_id: row for row in _in(connection, "texts_samples", "sample_ids", sample_ids)}
    read = [one for one in sample_ids if one in found and found[one].contents not in GONE]
    pieces: dict[int, list[Piece]] = {one: [] for one in read}
    for sample_id, start, tokens, logprobs, raw in _in(
        connection, "texts_chunks", "sample_ids", read, most=most
    ):
        pieces[sample_id].append((start, bytes(tokens), bytes(logprobs), bytes(raw), b""))
    apart = {
        sample_id: (n_tokens, bytes(values))
        for sample_id, n_tokens, values in _in(connection, "texts_differences", "sample_ids", read, most=most)
    }
    out: dict[int, Recorded] = {}
    for one in sample_ids:
        row = found.get(one)
        if row is None:
            continue
        if one not in pieces:
            out[one] = Recorded(row.group_id, why=gone(one, row.accepted_len, row.contents, row.purged_at))
            continue
        try:
            tokens, logprobs, _, _ = join_chunks(one, pieces[one], min(most, row.accepted_len))
        except LedgerError as error:
            out[one] = Recorded(row.group_id, why=error.cause)
            continue
        n_tokens, values = apart.get(one, (0, b""))
        fits = n_tokens == row.accepted_len and len(values) * 2 == len(tokens)
        out[one] = Recorded(row.group_id, tokens, logprobs, values if fits else b"")
    return out


def gone(sample_id: int, length: int, contents: str, purged_at: float | None) -> str:
    """What became of a sample's tokens, in words."""
    at = f" at {utc(purged_at)}" if contents == "purged" and purged_at is not None else ""
    return (
        f"the {length} tokens of sample {sample_id} were {contents}{at}; what happened to it is still known"
    )


def prompts(
    connection: sa.Connection, group_ids: Sequence[int], most: int, *, added: bool
) -> dict[int, bytes]:
    """Packed prompts by group, of each the first `most` tokens, of groups that were not purged. `added`: of a turn what it adds to the turn
    before, instead of the whole. Raises `LedgerError` where a whole one does not match its digest."""
    found = {row.group_id: row for row in _in(connection, "texts_prompts", "group_ids", group_ids, most=most)}
    turns = [] if added else [one for one, row in found.items() if row.purpose == "turn"]
    whole = whole_prompts(connection, turns)
    return {one: bytes(row.prompt) for one, row in found.items()} | {
        one: prompt[: 4 * most] for one, prompt in whole.items()
    }


def _in(
    connection: sa.Connection, query: str, name: str, ids: Sequence[int], **numbers: int
) -> Sequence[Any]:
    """Raises `LedgerError` where a value is of another type than its column."""
    if not ids:
        return ()
    statement = sa.text(queries.load(query)).bindparams(sa.bindparam(name, expanding=True))
    found = connection.execute(statement, {name: list(ids), **numbers}).all()
    for row in found:
        typed.require(row._mapping, packed=True)
    return found
