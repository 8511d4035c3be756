"""Whether the numbers in a message can be: those that the ledger keeps, token ids, logprobs. Pure; one look over a whole message.

Lengths, leases and budgets are the core's (`router.samples`); it takes a fault found here as its last reason to refuse a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from scavenger.router.events import WorkerSaid
from scavenger.wire import Call, Chunk, Chunks, Message, SubmitGroups, ToDaemon

#: A logprob is not positive; float32 may round one that is near 0 to just above it.
MOST_LOGPROB = np.float32(1e-3)
_LEAST_LOGPROB = np.finfo(np.float32).min
_INT64 = 2**63


def fits(message: ToDaemon) -> bool:
    """Whether every integer that the ledger may be asked to keep fits its 64-bit columns. Others arrive checked or as text."""
    if isinstance(message, Call):
        body = message.body
        parts = [body, *body.groups] if isinstance(body, SubmitGroups) else [body]
        return all(_INT64 > value >= -_INT64 for part in parts for value in msgspec.structs.astuple(part) if isinstance(value, int))
    return True


def checked(conn: int, message: Message) -> WorkerSaid:
    """What a worker said, with the faults of its chunks' payloads."""
    return WorkerSaid(conn, message, payload_faults(message.chunks) if isinstance(message, Chunks) else None)


def payload_faults(chunks: Sequence[Chunk]) -> Mapping[int, str] | None:
    """Position of a chunk -> what is wrong with its values; None: nothing is. Says nothing of a chunk whose lengths do not fit."""
    columns = [c.tokens for c in chunks], [c.logprobs for c in chunks], [c.raw_logprobs for c in chunks]
    aligned = not any(len(data) & 3 for column in columns for data in column)
    if aligned and _sound(b"".join(columns[0]), b"".join(columns[1] + columns[2])):
        return None
    faults = {at: fault for at, chunk in enumerate(chunks) if (fault := _fault(chunk))}
    return faults or None


def _sound(tokens: bytes, logprobs: bytes) -> bool:
    ids, values = np.frombuffer(tokens, "<i4"), np.frombuffer(logprobs, "<f4")
    if ids.size and ids.min() < 0:
        return False
    # A NaN is neither: every comparison with it is false, and `min` and `max` hand it on.
    return not values.size or bool(values.max() <= MOST_LOGPROB and values.min() >= _LEAST_LOGPROB)


def _fault(chunk: Chunk) -> str:
    if any(len(data) % 4 for data in (chunk.tokens, chunk.logprobs, chunk.raw_logprobs)):
        return ""  # the core refuses it for its lengths
    for payload in (chunk.logprobs, chunk.raw_logprobs):
        values = np.frombuffer(payload, "<f4")
        if not np.isfinite(values).all():
            return "logprobs that are not finite"
        if (values > MOST_LOGPROB).any():
            return "a positive logprob"
    return "a negative token id" if (np.frombuffer(chunk.tokens, "<i4") < 0).any() else ""
