"""`scavenger ledger tokens`: one sample's tokens, as ids, as text, or with their logprobs as JSON. Reads only.

Owns the formats. The ledger has the ids, and the run names the tokenizer that makes text of them.

Boundary: one sample whole, for who asks for it by its number; pages read the beginnings of many (`contents`).
"""

from __future__ import annotations

import json
import math
from typing import Any, Literal

import sqlalchemy as sa

from scavenger.errors import LedgerError
from scavenger.ledger import queries
from scavenger.ledger.read.contents import gone
from scavenger.ledger.read.prompts import whole_prompts
from scavenger.ledger.read.reader import Piece, join_chunks, reading
from scavenger.ledger.read.tokenizer import load_tokenizer
from scavenger.ledger.store import open_readonly
from scavenger.printable import printable
from scavenger.protocol.messages import unpack_logprobs, unpack_tokens

Format = Literal["ids", "text", "json"]


def show(url: str, sample_id: int, format: Format = "ids") -> str:
    """A sample's accepted tokens, complete or not. "ids": decimal, on one line. "text": decoded, control characters replaced. "json": one
    object, with the prompt's tokens, the logprobs (float32, exact; infinities as the strings "Infinity" and "-Infinity") and where the
    sample belongs.

    Raises `LedgerError` for a sample that the ledger does not have or whose chunks do not join, `ConfigError` without its tokenizer.
    """
    engine = open_readonly(url)
    try:
        with reading(engine) as connection:
            return shown(connection, sample_id, format)
    finally:
        engine.dispose()


def shown(connection: sa.Connection, sample_id: int, format: Format = "ids") -> str:
    """As `show`, by a connection that is open."""
    sample, pieces, prompt = _read(connection, sample_id)
    if sample["contents"] in ("dropped", "purged"):
        raise LedgerError(
            gone(sample_id, sample["accepted_len"], sample["contents"], sample["purged_at"]),
            "next time, let `retention` in [ledger] keep or compact them, or export the run before it is purged",
        )
    tokens, logprobs, raw_logprobs, _ = join_chunks(sample_id, pieces, sample["accepted_len"])
    ids = unpack_tokens(tokens)
    if format == "ids":
        return " ".join(map(str, ids)) + "\n"
    if format == "text":
        return (
            printable(load_tokenizer(sample["tokenizer"]).decode(list(ids), skip_special_tokens=False)) + "\n"
        )
    place = {name: sample[name] for name in _PLACE}
    said = {"prompt": unpack_tokens(prompt), "tokens": ids}
    told = {
        "logprobs": _plain(unpack_logprobs(logprobs)),
        "raw_logprobs": _plain(unpack_logprobs(raw_logprobs)),
    }
    return json.dumps({**place, **said, **told}, allow_nan=False) + "\n"


_PLACE = (
    "sample_id",
    "run",
    "group_id",
    "purpose",
    "step",
    "prompt_index",
    "retry",
    "sample_index",
    "state",
    "finish",
)


def _read(connection: sa.Connection, sample_id: int) -> tuple[dict[str, Any], list[Piece], bytes]:
    statement = sa.text(queries.load("sample_tokens"))
    records = [dict(row) for row in connection.execute(statement, {"sample_id": sample_id}).mappings()]
    if not records:
        raise LedgerError(
            f"the ledger has no sample {sample_id}",
            "`scavenger samples --jsonl` and `scavenger ledger report open_leases` name samples",
        )
    prompt = bytes(records[0]["prompt"] or b"")  # null where its first chunk is missing
    if records[0]["purpose"] == "turn" and records[0]["contents"] != "purged":
        group_id = records[0]["group_id"]
        prompt = whole_prompts(connection, [group_id]).get(group_id, prompt)
    chunks = [record for record in records if record["start_len"] is not None]  # null: it has none yet
    return (
        records[0],
        [
            (c["start_len"], bytes(c["tokens"]), bytes(c["logprobs"]), bytes(c["raw_logprobs"]), b"")
            for c in chunks
        ],
        prompt,
    )


def _plain(logprobs: tuple[float, ...]) -> list[float | str]:
    """JSON has no infinities; Python's float() and PostgreSQL's real read these words."""
    return [
        x if math.isfinite(x) else "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
        for x in logprobs
    ]
