"""Token payloads beside the core: kept while the ledger cannot give them back, then as long as memory allows. Pure tables, no IO.

The core holds lengths; what a sample's tokens are lies here, as opaque bytes (12 a token, and what says its experts), from the lowest
offset that is in memory up to the accepted length:

    0 ......... start ................ durable ............ end = the core's accepted length
    ledger only | memory and ledger, may be evicted | memory only, never evicted (the writer's backlog bounds it)

`PayloadStore` keeps to `bound` bytes by evicting the durable tokens of the samples whose last commit is longest ago. What was evicted,
or never loaded since a restart, is read back by the edge (`router.edge.pipeline`) before the core or a peer needs it. Decides nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from scavenger.protocol.messages import (
    Assign,
    Chunk,
    DoneSample,
    GroupDone,
    Lease,
    SiblingTokens,
    TurnTokens,
    squeeze_tokens,
)

Payload = tuple[
    bytes, bytes, bytes, bytes
]  # tokens, logprobs, raw_logprobs, packed, 4 bytes a token each; routing
#: Bytes of a sample that is kept, besides its tokens: measured, see `benchmarks/router_memory.py`. Python lets its arrays grow by an
#: eighth more than they hold, which is not counted.
FLAT_BYTES = 704


class ColdPayload(Exception):
    """A bug: the core was asked to compare tokens that were not loaded. Names the sample; nothing was changed."""


class PayloadPort(Protocol):
    """What the core asks of the store of tokens."""

    def append(self, sample_id: int, offset: int, chunk: Chunk) -> None:
        """The chunk was accepted at `offset`, the sample's length until now."""

    def same(self, sample_id: int, chunk: Chunk, known: int) -> bool:
        """Whether the first `known` tokens of a chunk, all accepted before, are what was accepted. Raises `ColdPayload`."""
        ...

    def durable(self, sample_id: int, length: int) -> None:
        """The sample's first `length` tokens are in the ledger."""

    def drop(self, sample_id: int) -> None:
        """The sample will not be asked for again."""


class NoPayloads:
    """Keeps nothing: for simulations and benchmarks, whose resends are exact by construction."""

    def append(self, sample_id: int, offset: int, chunk: Chunk) -> None:
        pass

    def same(self, sample_id: int, chunk: Chunk, known: int) -> bool:
        return True

    def durable(self, sample_id: int, length: int) -> None:
        pass

    def drop(self, sample_id: int) -> None:
        pass


class _Kept:
    """What is in memory of one sample: tokens `start` up to `start + len(tokens) / 4`."""

    __slots__ = ("durable", "logprobs", "raw_logprobs", "routing", "start", "tokens")

    def __init__(self, start: int, durable: int, payload: Payload) -> None:
        self.start, self.durable = start, durable
        self.tokens, self.logprobs, self.raw_logprobs, self.routing = map(bytearray, payload)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // 4

    @property
    def width(self) -> int:
        """Bytes of routing a token."""
        return 4 * len(self.routing) // len(self.tokens) if self.routing else 0

    @property
    def nbytes(self) -> int:
        return 3 * len(self.tokens) + len(self.routing)


class PayloadStore:
    """See the module. `bound`: bytes in memory, `FLAT_BYTES` a sample included; exceeded only by what is not durable yet."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.nbytes = 0
        self.evictions = 0  # samples that lost tokens from memory
        self._kept: dict[int, _Kept] = {}
        self._evictable: OrderedDict[int, None] = (
            OrderedDict()
        )  # samples with durable tokens here, the longest untouched first

    # ---- for the core

    def append(self, sample_id: int, offset: int, chunk: Chunk) -> None:
        kept = self._kept.get(sample_id)
        if kept is None:
            kept = self._kept[sample_id] = _Kept(offset, offset, (b"", b"", b"", b""))
            self.nbytes += FLAT_BYTES
        tokens = chunk.tokens
        if kept.start + len(kept.tokens) // 4 != offset:
            raise AssertionError(
                f"sample {sample_id}: payload kept up to {kept.end}, a chunk was accepted at {offset}"
            )
        kept.tokens += tokens
        kept.logprobs += chunk.logprobs
        kept.raw_logprobs += chunk.raw_logprobs
        kept.routing += chunk.routing
        self.nbytes += 3 * len(tokens) + len(chunk.routing)

    def same(self, sample_id: int, chunk: Chunk, known: int) -> bool:
        kept = self._kept.get(sample_id)
        if kept is None or chunk.offset < kept.start:
            raise ColdPayload(
                f"sample {sample_id}: tokens from {chunk.offset} on are to be compared, and are not in memory"
            )
        here, there = (
            slice(4 * (chunk.offset - kept.start), 4 * (chunk.offset - kept.start + known)),
            slice(4 * known),
        )
        pairs = (
            (kept.tokens, chunk.tokens),
            (kept.logprobs, chunk.logprobs),
            (kept.raw_logprobs, chunk.raw_logprobs),
        )
        at, width = chunk.offset - kept.start, kept.width
        routed = kept.routing[width * at : width * (at + known)] == chunk.routing[: width * known]
        return routed and all(mine[here] == theirs[there] for mine, theirs in pairs)

    def durable(self, sample_id: int, length: int) -> None:
        kept = self._kept.get(sample_id)
        if kept is None:
            return
        if length > kept.durable:
            kept.durable = length
        if kept.durable > kept.start:
            self._evictable[sample_id] = None
            self._evictable.move_to_end(sample_id)
        if self.nbytes > self.bound:
            self.trim()

    def drop(self, sample_id: int) -> None:
        kept = self._kept.pop(sample_id, None)
        if kept is not None:
            self._evictable.pop(sample_id, None)
            self.nbytes -= FLAT_BYTES + kept.nbytes

    # ---- for the edge

    def start(self, sample_id: int) -> int | None:
        """The lowest offset in memory; None when nothing of the sample is."""
        kept = self._kept.get(sample_id)
        return None if kept is None else kept.start

    def has(self, sample_id: int, length: int) -> bool:
        """Whether the first `length` tokens are in memory."""
        kept = self._kept.get(sample_id)
        return length == 0 or (kept is not None and kept.start == 0 and kept.end >= length)

    def has_all(self, parts: Iterable[Lease | DoneSample], lengths: Iterable[int]) -> bool:
        """`has` of many: the first `lengths[i]` tokens of the i-th part's sample."""
        get = self._kept.get
        for part, n in zip(parts, lengths, strict=True):
            if n and ((kept := get(part.sample_id)) is None or kept.start or len(kept.tokens) < 4 * n):
                return False
        return True

    def tokens(self, sample_id: int, length: int) -> bytes | None:
        """The first `length` token ids, packed; None unless they are in memory."""
        kept = self._kept.get(sample_id)
        if kept is None or kept.start:
            return None
        tokens, nbytes = kept.tokens, 4 * length
        if len(tokens) == nbytes:
            return bytes(tokens)
        return bytes(tokens[:nbytes]) if len(tokens) > nbytes else None

    def take(self, sample_id: int, length: int) -> Payload:
        """The first `length` tokens. Raises `ColdPayload` unless `has` says so."""
        if not length:
            return b"", b"", b"", b""
        kept = self._kept.get(sample_id)
        if kept is None or kept.start or kept.end < length:
            raise ColdPayload(
                f"sample {sample_id}: its first {length} tokens are to be sent, and are not in memory"
            )
        return (
            bytes(kept.tokens[: 4 * length]),
            bytes(kept.logprobs[: 4 * length]),
            bytes(kept.raw_logprobs[: 4 * length]),
            bytes(kept.routing[: kept.width * length]),
        )

    def has_from(self, sample_id: int, start: int, end: int) -> bool:
        """Whether the tokens from `start` up to `end` are in memory."""
        kept = self._kept.get(sample_id)
        return kept is not None and kept.start <= start and kept.end >= end

    def piece(self, sample_id: int, start: int, end: int) -> Payload:
        """The tokens from `start` up to `end`. Raises `ColdPayload` unless `has_from` says so."""
        kept = self._kept.get(sample_id)
        if kept is None or kept.start > start or kept.end < end:
            raise ColdPayload(
                f"sample {sample_id}: its tokens {start} to {end} are to be sent, and are not in memory"
            )
        first, last = start - kept.start, end - kept.start
        cut, routed = slice(4 * first, 4 * last), slice(kept.width * first, kept.width * last)
        return (
            bytes(kept.tokens[cut]),
            bytes(kept.logprobs[cut]),
            bytes(kept.raw_logprobs[cut]),
            bytes(kept.routing[routed]),
        )

    def load(self, sample_id: int, payload: Payload, accepted: int) -> None:
        """Take back what the ledger has of a sample of `accepted` tokens; a later `trim` may evict it again.

        Does nothing where it does not join with what is in memory: more was committed and evicted while the ledger was read.
        """
        length = len(payload[0]) // 4
        kept = self._kept.get(sample_id)
        if kept is None:
            if length != accepted:
                return
            self._kept[sample_id] = _Kept(0, length, payload)
            self.nbytes += FLAT_BYTES + self._kept[sample_id].nbytes
        elif 0 < kept.start <= length:
            cut, before = 4 * kept.start, kept.nbytes
            routed = kept.start * len(payload[3]) // length
            kept.tokens = bytearray(payload[0][:cut]) + kept.tokens
            kept.logprobs = bytearray(payload[1][:cut]) + kept.logprobs
            kept.raw_logprobs = bytearray(payload[2][:cut]) + kept.raw_logprobs
            kept.routing = bytearray(payload[3][:routed]) + kept.routing
            kept.start = 0
            self.nbytes += kept.nbytes - before
        else:
            return
        self._evictable[sample_id] = None
        self._evictable.move_to_end(sample_id)

    def cool(self, sample_ids: Iterable[int]) -> None:
        """These were delivered: they go first when room is needed."""
        for sample_id in sample_ids:
            if sample_id in self._evictable:
                self._evictable.move_to_end(sample_id, last=False)

    def trim(self) -> None:
        """Evict until the bound holds, or nothing durable is left in memory."""
        while self.nbytes > self.bound and self._evictable:
            sample_id, _ = self._evictable.popitem(last=False)
            self._evict(sample_id, self._kept[sample_id])

    def _evict(self, sample_id: int, kept: _Kept) -> None:
        self.evictions += 1
        if kept.durable >= kept.end:
            self.drop(sample_id)
            return
        cut, before = 4 * (kept.durable - kept.start), kept.nbytes
        routed = kept.width * (kept.durable - kept.start)
        # New arrays: a bytearray that is cut at its front keeps its memory.
        kept.tokens, kept.logprobs, kept.raw_logprobs, kept.routing = (
            kept.tokens[cut:],
            kept.logprobs[cut:],
            kept.raw_logprobs[cut:],
            kept.routing[routed:],
        )
        kept.start = kept.durable
        self.nbytes -= before - kept.nbytes

    def check(self, lengths: dict[int, tuple[int, int]]) -> None:
        """For tests: raise AssertionError unless what is here fits (accepted, durable) of every sample that the core has."""
        for sample_id, (accepted, durable) in lengths.items():
            kept = self._kept.get(sample_id)
            if kept is None:
                assert durable == accepted, (
                    f"sample {sample_id}: {accepted - durable} tokens are neither in memory nor durable"
                )
                continue
            assert kept.end == accepted, f"sample {sample_id}: payload up to {kept.end}, {accepted} accepted"
            assert kept.start <= durable, f"sample {sample_id}: evicted up to {kept.start}, durable {durable}"
            assert len(kept.tokens) == len(kept.logprobs) == len(kept.raw_logprobs), (
                f"sample {sample_id}: payload"
            )
        total = sum(FLAT_BYTES + kept.nbytes for kept in self._kept.values())
        assert total == self.nbytes, f"{self.nbytes} bytes counted, {total} kept"
        assert all(self._kept[i].durable > self._kept[i].start for i in self._evictable)


# ---------------------------------------------------------------- filling messages


Filled = Assign | GroupDone | TurnTokens | SiblingTokens


def missing(message: Filled, lengths: Sequence[int], store: PayloadStore) -> dict[int, int]:
    """Sample -> how many of its first tokens the message needs, where these are not in memory."""
    if isinstance(message, SiblingTokens):
        return {}  # drafts are worth no read of the ledger
    if isinstance(message, TurnTokens):
        here = store.has_from(message.sample_id, message.offset, lengths[0])
        return {} if here else {message.sample_id: lengths[0]}
    parts: Sequence[Lease | DoneSample] = message.leases if isinstance(message, Assign) else message.samples
    if store.has_all(parts, lengths):
        return {}
    return {
        part.sample_id: n for part, n in zip(parts, lengths, strict=True) if not store.has(part.sample_id, n)
    }


def needed(message: Filled, lengths: Sequence[int]) -> dict[int, int]:
    """The same of all its samples that have tokens, wherever these are."""
    if isinstance(message, SiblingTokens):
        return {}
    if isinstance(message, TurnTokens):
        return {message.sample_id: lengths[0]}
    parts: Sequence[Lease | DoneSample] = message.leases if isinstance(message, Assign) else message.samples
    return {part.sample_id: n for part, n in zip(parts, lengths, strict=True) if n}


def fill_leases(message: Assign, lengths: Sequence[int], store: PayloadStore) -> list[Lease]:
    """The leases with their accepted tokens. One whose tokens are not in memory is left out: its sample was forgotten."""
    made: list[Lease] = []
    tokens_of = store.tokens
    for x, n in zip(message.leases, lengths, strict=True):
        if not n:
            made.append(x)
        elif (tokens := tokens_of(x.sample_id, n)) is not None:
            made.append(msgspec.structs.replace(x, accepted=tokens))
    return made


def fill_group(message: GroupDone, lengths: Sequence[int], store: PayloadStore) -> GroupDone:
    """The group with each sample's tokens and logprobs. Raises `ColdPayload` unless all are in memory."""
    replace = msgspec.structs.replace
    samples = []
    for sample, length in zip(message.samples, lengths, strict=True):
        tokens, logprobs, raw_logprobs, routing = store.take(sample.sample_id, length)
        samples.append(
            replace(sample, tokens=tokens, logprobs=logprobs, raw_logprobs=raw_logprobs, routing=routing)
        )
    return replace(message, samples=tuple(samples))


def fill_tokens(message: TurnTokens, length: int, store: PayloadStore) -> TurnTokens:
    """The message with the sample's tokens from its offset up to `length`. Raises `ColdPayload` unless they are in memory."""
    tokens, logprobs, raw_logprobs, _ = store.piece(message.sample_id, message.offset, length)
    return msgspec.structs.replace(message, tokens=tokens, logprobs=logprobs, raw_logprobs=raw_logprobs)


def fill_siblings(message: SiblingTokens, ends: Sequence[int], store: PayloadStore) -> SiblingTokens | None:
    """The pieces with those of their tokens that are in memory; None where there are none."""
    pieces, tokens = [], []
    for piece, end in zip(message.pieces, ends, strict=True):
        first = store.start(piece.sample_id)
        start = max(piece.offset, end if first is None else first)
        if start < end and store.has_from(piece.sample_id, start, end):
            pieces.append(msgspec.structs.replace(piece, offset=start, count=end - start))
            tokens.append(store.piece(piece.sample_id, start, end)[0])
    return SiblingTokens(tuple(pieces), squeeze_tokens(b"".join(tokens))) if pieces else None
