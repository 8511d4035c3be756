"""A turn's whole prompt from what the ledger keeps of it: what it adds, and what it has of its parent. Reads only.

    prompt of a turn = (parent's prompt + parent's completion)[:prefix_len] + groups.prompt

`assemble` is pure: it walks from a turn to its ancestors and joins the pieces, each token once, so that a turn costs as much as its
prompt is long, however many turns came before it. What it made is compared with the digest of the whole prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import sqlalchemy as sa

from scavenger.errors import LedgerError
from scavenger.ledger import queries

_RESTORE = "run `scavenger ledger check`, and restore the last backup if it finds more"
#: Groups or samples named in one statement: SQLite takes 32,766 parameters at most.
_MOST_NAMED = 500


class TurnPrompt(NamedTuple):
    """What the ledger has of a turn's prompt. `added`: the packed tokens after the first `prefix_len`. `parent_group`: the parent's turn,
    0 without one."""

    group_id: int
    parent_id: int
    parent_group: int
    prefix_len: int
    prompt_tokens: int
    sha256: bytes
    added: bytes


def assemble(group_id: int, turns: Mapping[int, TurnPrompt], completions: Mapping[int, bytes]) -> bytes:
    """The whole prompt of a turn, packed. `turns`: it and its ancestors; `completions`: packed tokens of its ancestors' samples.

    Raises `LedgerError`, naming the turn, unless the result has the digest and the length that were recorded.
    """
    turn = turns[group_id]
    pieces = [turn.added]
    upto, at = turn.prefix_len, turn  # `upto`: tokens of the prompt that are still to be found
    while upto:
        parent = turns.get(at.parent_group)
        if parent is None or parent.group_id >= at.group_id:
            raise _damaged(turn, f"sample {at.parent_id}, its parent, is no sample of an earlier turn")
        completion = completions.get(at.parent_id, b"")
        if upto > parent.prompt_tokens:
            pieces.append(completion[: 4 * (upto - parent.prompt_tokens)])
        upto = min(upto, parent.prompt_tokens)
        if upto > parent.prefix_len:
            pieces.append(parent.added[: 4 * (upto - parent.prefix_len)])
            upto = parent.prefix_len
        at = parent
    prompt = b"".join(reversed(pieces))
    if len(prompt) != 4 * turn.prompt_tokens or sha256(prompt).digest() != turn.sha256:
        raise _damaged(
            turn, "what it shares with its parent and what it adds are not what it was generated from"
        )
    return prompt


def _damaged(turn: TurnPrompt, why: str) -> LedgerError:
    return LedgerError(f"turn {turn.group_id}: {why}", _RESTORE)


def whole_prompts(connection: sa.Connection, group_ids: Sequence[int]) -> dict[int, bytes]:
    """Group id -> the whole prompt, packed, of those groups that are turns. Raises `LedgerError` where one does not match its digest."""
    turns: dict[int, TurnPrompt] = {}
    for part in _parts(group_ids):
        for row in _in(connection, "turn_prompts", "group_ids", part):
            turns[row[0]] = TurnPrompt(
                row[0], row[1], row[2] or 0, row[3], row[4], bytes(row[5]), bytes(row[6])
            )
    needed = sorted({turn.parent_id for turn in turns.values() if turn.parent_id})
    completions = tokens_of(connection, needed)
    return {group_id: assemble(group_id, turns, completions) for group_id in group_ids if group_id in turns}


def tokens_of(connection: sa.Connection, sample_ids: Sequence[int]) -> dict[int, bytes]:
    """Sample id -> its accepted tokens, packed; a sample without any is not in the answer."""
    pieces: dict[int, list[bytes]] = defaultdict(list)
    for part in _parts(sample_ids):
        for sample_id, tokens in _in(connection, "turn_tokens", "sample_ids", part):
            pieces[sample_id].append(bytes(tokens))
    return {sample_id: b"".join(some) for sample_id, some in pieces.items()}


def _parts(ids: Sequence[int]) -> Iterable[Sequence[int]]:
    return (ids[first : first + _MOST_NAMED] for first in range(0, len(ids), _MOST_NAMED))


def _in(connection: sa.Connection, query: str, name: str, ids: Sequence[int]) -> Sequence[Any]:
    statement = sa.text(queries.load(query)).bindparams(sa.bindparam(name, expanding=True))
    return connection.execute(statement, {name: list(ids)}).all()
