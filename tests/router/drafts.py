"""Siblings' tokens in the schedules: what an engine that drafts makes of them, and messages that no honest daemon sends.

Such an engine is the real tables of drafts (`rollout.engines.speculation.groups`) and a model that knows every answer: `verified`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from scavenger.protocol.messages import (
    Lease,
    SampleKey,
    SiblingPiece,
    SiblingTokens,
    pack_tokens,
    squeeze_tokens,
)

#: Bytes a second to each engine: so few that backlogs overflow now and then.
BYTES_PER_S = 64.0
MAX_DRAFT = 4


def accepts(drafted: int, drawn: int) -> bool:
    """Whether a drafted token is kept, where the model draws `drawn`."""
    return drafted == drawn


def verified(draft: Sequence[int], drawn: Sequence[int]) -> tuple[int, ...]:
    """What one pass makes: the drafted tokens up to the first that the model does not draw, and the model's own there. `drawn`: all that
    the model would draw, one at least."""
    kept = 0
    while kept < len(draft) and kept < len(drawn) - 1 and accepts(draft[kept], drawn[kept]):
        kept += 1
    return (*draft[:kept], drawn[kept])


class Truths(NamedTuple):
    """What a forger knows: a lease that runs, its sample's answer, that of a sample of another group, and what the daemon sent to this
    engine, the oldest first."""

    lease: Lease
    answer: tuple[int, ...]
    other: tuple[int, ...]
    sent: tuple[SiblingTokens, ...]


def _told(key: SampleKey, offset: int, tokens: Sequence[int]) -> SiblingTokens:
    return SiblingTokens((SiblingPiece.of(0, key, offset, len(tokens)),), squeeze_tokens(pack_tokens(tokens)))


def _sibling(truths: Truths) -> SampleKey:
    return msgspec.structs.replace(truths.lease.key, index=truths.lease.key.index + 1)


def _right(truths: Truths) -> SiblingTokens:
    return _told(_sibling(truths), 0, truths.answer)


def _wrong(truths: Truths) -> SiblingTokens:
    """Right up to its middle, so that it is drafted from; then it is not."""
    half, most = (len(truths.answer) + 1) // 2, max(2, *truths.answer)
    wrong = [1 + (token + place) % most for place, token in enumerate(truths.answer)]
    return _told(_sibling(truths), 0, [*truths.answer[:half], *wrong])


def _late(truths: Truths) -> SiblingTokens | None:
    """Whatever became of its group since."""
    return truths.sent[0] if truths.sent else None


def _another_group(truths: Truths) -> SiblingTokens:
    """What another group's sample said, under this group's name, from where this one is."""
    return _told(_sibling(truths), 0, [*truths.answer[:3], *truths.other])


def _behind_a_gap(truths: Truths) -> SiblingTokens:
    return _told(_sibling(truths), 7, truths.answer)


def _own_name(truths: Truths) -> SiblingTokens:
    """As if the sample that runs here ran elsewhere too, and said something else there."""
    return _told(truths.lease.key, 0, [token + 1 for token in truths.answer] * 2)


def _of_no_group(truths: Truths) -> SiblingTokens:
    key = msgspec.structs.replace(truths.lease.key, prompt=truths.lease.key.prompt + 1000)
    return _told(key, 0, truths.answer)


def _negative(truths: Truths) -> SiblingTokens:
    return _told(_sibling(truths), 0, [-1, *truths.answer])


def _unreadable(truths: Truths) -> SiblingTokens:
    piece = SiblingPiece.of(0, _sibling(truths), 0, len(truths.answer))
    return SiblingTokens((piece,), b"\x78\x01garbage")


def _fewer_than_said(truths: Truths) -> SiblingTokens:
    told = _right(truths)
    piece = msgspec.structs.replace(told.pieces[0], count=len(truths.answer) + 1)
    return msgspec.structs.replace(told, pieces=(piece,))


#: By name: what makes it, or None where there is nothing to make it of.
FORGED: dict[str, Callable[[Truths], SiblingTokens | None]] = {
    "right": _right,
    "wrong": _wrong,
    "late": _late,
    "another group's": _another_group,
    "behind a gap": _behind_a_gap,
    "under a sample's own name": _own_name,
    "of no group here": _of_no_group,
    "negative": _negative,
    "unreadable": _unreadable,
    "fewer than said": _fewer_than_said,
}
