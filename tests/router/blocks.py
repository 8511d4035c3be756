"""KV blocks in the schedules: what engines keep of samples that leave them, what a reader finds, and what an engine makes of it.

Blocks are what a sample said so far: an engine that loaded other ones goes on with another sample's answer. What a reader finds is as it
was kept, or gone, late, corrupt, of another version or of another sample; the checks are the engines' own (`protocol.kv`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from scavenger.protocol import kv
from scavenger.protocol.kv import KvBinding, KvHeader
from scavenger.protocol.messages import WeightSource

#: What becomes of blocks on their way. "kept": they come as they are.
FATES = ("kept", "late", "corrupt", "another version", "another sample", "gone")
#: Bytes of a token: its own number.
TOKEN_NBYTES = 4


class KeptBlocks(NamedTuple):
    """Of one sample: what they are bound to, the bytes, and the version that truly made them."""

    header: KvHeader
    data: bytes
    version: int


def source_of(worker: int) -> WeightSource:
    """Where others find what a worker keeps."""
    return WeightSource(f"tcp://w{worker}:1", "key", b"token")


def binding(run: str, history: str, version: int, root: bytes, tokens: Sequence[int]) -> KvBinding:
    return KvBinding(run, history, version, root, b"model", "layout", len(tokens), kv.digest_of(tokens))


def data_of(tokens: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(TOKEN_NBYTES, "little", signed=True) for token in tokens)


def blocks_of(bound: KvBinding, tokens: Sequence[int]) -> KeptBlocks:
    data = data_of(tokens)
    return KeptBlocks(kv.header_of(bound, memoryview(data)), data, bound.version)


def on_the_way(kept: KeptBlocks | None, fate: str, other: KeptBlocks | None) -> KeptBlocks | None:
    """What a reader finds. `other`: what some worker keeps of another sample. None: nothing came in time."""
    if kept is None or fate in ("late", "gone"):
        return None
    if fate == "corrupt":
        return kept._replace(data=bytes([kept.data[0] ^ 1]) + kept.data[1:])
    if fate == "another version":
        bound = msgspec.structs.replace(kept.header.binding, version=kept.header.binding.version + 1)
        return kept._replace(
            header=msgspec.structs.replace(kept.header, binding=bound), version=bound.version
        )
    return other if fate == "another sample" else kept


def right(found: KeptBlocks, version: int, tokens: Sequence[int]) -> bool:
    """Whether an engine that loads these goes on as one that prefills: they are this version's, of just these tokens. A sibling's with the
    same tokens are."""
    return found.version == version and found.data == data_of(tokens)


def fault(found: KeptBlocks, expected: KvBinding) -> str:
    """Why an engine refuses blocks; "" when it loads them. As `rollout.kv` checks them."""
    nbytes = TOKEN_NBYTES * expected.tokens
    return kv.mismatch(found.header, expected, nbytes) or kv.chunk_fault(
        found.header, 0, memoryview(found.data)
    )
