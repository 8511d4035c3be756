"""Which chunk is asked of which holder, and what becomes of an answer: the pure core of a pull. Theory of operation:

A chunk is wanted, then in flight at one holder (at two when a faster one steals it from a slow one, at more when none of those delivers
it), then here. Nothing but a chunk with the manifest's hash is ever written to the blob, so what is here stays right whatever arrives
later (I8).

  which chunk   one that the fewest partial holders have, so that receivers who begin together fetch different ones from the publisher
                and the rest from each other; among equals the order is the receiver's own (`seed`). What is on its way to a partial
                holder is left to it, and asked of no complete one, as long as that holder gets anything (`stall_s`), and each chunk for
                `_LEFT_STALLS * stall_s` in all: no word of partial holders keeps a pull from the complete ones for longer than that
  how many      as many as a holder delivers in `ahead_s`, between 2 and `window`
  stealing      nothing is free any more: take the chunk that is expected last, if it comes from here in less than half its time;
                or one that others were asked for as long ago as that
  last          holders that are kept for when the others deliver nothing are asked while no chunk came from those for `stall_s`, or for
                as long as was said of such a holder
  failures      a silent, lost or refusing holder gives its chunks back and rests, longer each time; only wrong bytes, refusals and
                chunks that it had reported and does not have, in a row, give it up

Owns the bookkeeping of one version's transfer into one blob. No socket, no lock and no clock: time is an argument, and so is order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from scavenger.backoff import backoff_s
from scavenger.weights.manifest import Manifest, chunk_hash

_MOST_COPIES = 2
_RATE_MEMORY = 0.7
#: Times `stall_s`: so long at most is a chunk left to partial holders that say it is on its way to them, and to holders that were asked
#: for it and do not deliver. An honest one has it by then, or gets less than a chunk a second over its usual four connections.
_LEFT_STALLS = 2


class ChunkOutcome(Enum):
    """What became of a delivered chunk."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    CORRUPT = "corrupt"
    UNASKED = "unasked"


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """`window` chunks are asked of a holder at a time; after `stall_s` without any byte they go back to all.

    A holder rests `backoff_s` after a failure, doubling to `backoff_max_s`, and is given up after `failures` in a row
    that say something about it (corrupt bytes, a refusal, a chunk that it had reported and does not have). Silence never gives
    a holder up: the deadline does.
    `streams` connections are shared by all complete holders, at least one each; a partial holder gets one.
    """

    window: int = 8
    stall_s: float = 5.0
    backoff_s: float = 0.05
    backoff_max_s: float = 2.0
    failures: int = 4
    ahead_s: float = 0.1
    streams: int = 4


@dataclass(slots=True)
class ChunkHolder:
    """One connection to a source, as this receiver has seen it. `source` numbers what the connection leads to."""

    source: int
    asked: dict[int, float] = field(default_factory=dict)
    heard_at: float = 0.0
    resting_until: float = 0.0
    rests: int = 0  # in a row, since it last delivered
    failures: int = 0
    given_up: bool = False
    reason: str = ""
    rate: float = 0.0  # chunks a second; 0 = none delivered yet
    delivered_at: float = 0.0
    chunks: int = 0


class Transfer:
    """One version on its way into `blob`."""

    def __init__(
        self,
        manifest: Manifest,
        holders: int,
        limits: TransferLimits,
        now: float,
        *,
        blob: memoryview | None = None,
        seed: int | None = None,
    ) -> None:
        count = len(manifest.chunk_hashes)
        self.manifest = manifest
        self.blob = memoryview(bytearray(manifest.total_nbytes)) if blob is None else blob
        self.holders = [ChunkHolder(i, heard_at=now) for i in range(holders)]
        self.corrupt = self.stolen = self.duplicates = 0
        self.here = np.zeros(count, dtype=bool)
        self.missing = count
        self._bytes: np.ndarray[Any, Any] = np.frombuffer(self.blob, dtype=np.uint8)
        self._limits = limits
        self._free = np.ones(count, dtype=bool)
        self._flying: dict[int, set[int]] = {}  # chunk -> holders that were asked for it
        self._has: dict[int, np.ndarray[Any, Any]] = {}  # partial source -> its chunks
        self._coming: dict[int, np.ndarray[Any, Any]] = {}  # -> those on their way to it
        self._got: dict[int, tuple[int, float]] = {}  # -> the most chunks that it reported, and since when
        # When a chunk was first reported to be on its way to one of them.
        self._left_since = np.full(count, np.inf)
        self._order = np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)
        self._rarity = self._order
        # Sources that are asked only while the others deliver nothing: for so many seconds.
        self._last: dict[int, float] = {}
        self._delivered_at = now  # when one of the others did

    def complete(self) -> bool:
        return not self.missing

    def here_nbytes(self) -> int:
        """Bytes of the chunks that are here; the last chunk counts as a whole one."""
        return (len(self.here) - self.missing) * self.manifest.chunk_nbytes

    def add_holder(self, source: int, now: float) -> int:
        self.holders.append(ChunkHolder(source, heard_at=now))
        return len(self.holders) - 1

    def coming(self) -> np.ndarray[Any, Any]:
        """Which chunks are on their way here."""
        found: np.ndarray[Any, Any] = ~self._free & ~self.here
        return found

    def expect(
        self, source: int, has: np.ndarray[Any, Any], coming: np.ndarray[Any, Any] | None, now: float
    ) -> None:
        """Note which chunks are on their way to a partial source, before `know` is told what it has."""
        count, most = int(np.count_nonzero(has)), self._got.get(source)
        # More than ever: one that names other chunks each time got nothing.
        if most is None or count > most[0]:
            self._got[source] = count, now
        if coming is None:
            self._coming.pop(source, None)
            return
        self._coming[source] = coming
        self._left_since[coming & np.isinf(self._left_since)] = now

    def know(self, source: int, has: np.ndarray[Any, Any] | None) -> None:
        """Note which chunks a source has; None: all. A source that has not said is taken to have all."""
        if has is None:
            self._coming.pop(source, None)
        if has is not None:
            self._has[source] = has
        elif self._has.pop(source, None) is None:
            return
        known: Sequence[np.ndarray[Any, Any]] = list(self._has.values())
        counts = np.sum(known, axis=0, dtype=np.int64) if known else np.zeros_like(self._order)
        self._rarity = counts * len(self._order) + self._order

    def is_partial(self, source: int) -> bool:
        return source in self._has

    def keep_for_last(self, source: int, last: bool, after_s: float = 0.0) -> None:
        """Ask this source only while the others deliver nothing, for `after_s` (0: `stall_s`), or as any other."""
        if last:
            self._last[source] = after_s or self._limits.stall_s
        else:
            self._last.pop(source, None)

    # ---------------------------------------------------------------- asking

    def is_kept_back(self, index: int, now: float) -> bool:
        """Whether nothing is to be asked of holder `index` now, because others deliver or have not had the time to."""
        after_s = self._last.get(self.holders[index].source)
        return after_s is not None and now - self._delivered_at < after_s

    def ask(self, index: int, now: float) -> list[int]:
        """Chunks to request from holder `index` now."""
        holder = self.holders[index]
        if holder.given_up or now < holder.resting_until or self.is_kept_back(index, now):
            return []
        if not holder.asked:
            holder.heard_at = now  # silence counts from the first question on
        chunks: list[int] = []
        while len(holder.asked) < self._window(holder):
            chunk = self._choose(index, now)
            if chunk is None:
                break
            holder.asked[chunk] = now
            self._flying.setdefault(chunk, set()).add(index)
            self._free[chunk] = False
            chunks.append(chunk)
        return chunks

    def _window(self, holder: ChunkHolder) -> int:
        # One that failed gets a single chunk until it delivers, lest the dead take work from the living again and again.
        if holder.rests:
            return 1
        return max(
            min(2, self._limits.window), min(self._limits.window, round(holder.rate * self._limits.ahead_s))
        )

    def _choose(self, index: int, now: float) -> int | None:
        source = self.holders[index].source
        has = self._has.get(source)
        free = np.flatnonzero(self._unclaimed(now) if has is None else self._free & has)
        if len(free):
            return int(free[np.argmin(self._rarity[free])])
        return self._steal(index, has, now)

    def _unclaimed(self, now: float) -> np.ndarray[Any, Any]:
        """Free chunks that are on their way to no partial holder, or only to such as get nothing any more."""
        stall_s, left = self._limits.stall_s, np.zeros_like(self._free)
        for source, coming in self._coming.items():
            if now - self._got[source][1] < stall_s:
                left |= coming
        if not left.any():
            return self._free
        free: np.ndarray[Any, Any] = self._free & ~(left & (now - self._left_since < _LEFT_STALLS * stall_s))
        return free

    def _steal(self, index: int, has: np.ndarray[Any, Any] | None, now: float) -> int | None:
        """The chunk in flight elsewhere that is expected last, if this holder has it in less than half that time.

        One that all have kept for `_LEFT_STALLS * stall_s`, whatever else they said meanwhile, any further holder may be asked for.
        """
        thief = self.holders[index]
        mine = (len(thief.asked) + 1) / thief.rate if thief.rate else 0.0
        best, latest = None, 2 * mine
        for chunk, at in self._flying.items():
            if self.here[chunk] or (has is not None and not has[chunk]):
                continue
            if any(self.holders[other].source == thief.source for other in at):
                continue  # two connections to one source share what it can send
            expected = min(now - self.holders[other].asked[chunk] for other in at)
            if expected < _LEFT_STALLS * self._limits.stall_s:
                if not thief.rate or len(at) >= _MOST_COPIES:
                    continue
                expected = min(self._expected(self.holders[other], chunk, now) for other in at)
            if expected > latest:
                best, latest = chunk, expected
        self.stolen += best is not None
        return best

    def _expected(self, holder: ChunkHolder, chunk: int, now: float) -> float:
        """Seconds until the holder delivers the chunk. One that is later than its rate said is expected to take as long again."""
        waited = now - max(holder.asked[chunk], holder.delivered_at)
        position = list(holder.asked).index(chunk) + 1
        return (
            max(position / holder.rate - waited, waited) if holder.rate else max(waited, self._limits.ahead_s)
        )

    # ---------------------------------------------------------------- answers

    def matches(self, chunk: int, data: bytes | bytearray | memoryview) -> bool:
        """Whether these are the chunk's bytes. Reads nothing that changes: any thread may ask."""
        if not 0 <= chunk < len(self.here):
            return False
        start, stop = self.manifest.chunk_range(chunk)
        return len(data) == stop - start and chunk_hash(data) == self.manifest.chunk_hashes[chunk]

    def write(self, chunk: int, data: bytes | bytearray | memoryview) -> None:
        """Put matching bytes into place. Two threads may do so with one chunk: they write the same."""
        start, stop = self.manifest.chunk_range(chunk)
        self._bytes[start:stop] = np.frombuffer(data, dtype=np.uint8)

    def settle(self, index: int, chunk: int, good: bool, now: float) -> ChunkOutcome:
        """A holder delivered a chunk; `good`: it matched and is written."""
        holder = self.holders[index]
        holder.heard_at = now
        if not 0 <= chunk < len(self.here):
            return ChunkOutcome.UNASKED
        asked_at = holder.asked.get(chunk)
        self._unask(holder, index, chunk)
        if not good and not self.here[chunk]:
            self.corrupt += 1
            self._failed(index, f"chunk {chunk} does not have the manifest's hash", now)
            return ChunkOutcome.CORRUPT
        if asked_at is not None:
            self._measure(holder, asked_at, now)
        if self.here[chunk]:
            self.duplicates += 1
            return ChunkOutcome.DUPLICATE
        self.here[chunk], self._free[chunk] = True, False
        self.missing -= 1
        holder.chunks += 1
        holder.failures, holder.rests = 0, 0
        if holder.source not in self._last:
            self._delivered_at = now
        return ChunkOutcome.ACCEPTED

    def delivered(
        self, index: int, chunk: int, data: bytes | bytearray | memoryview, now: float
    ) -> ChunkOutcome:
        """`matches`, `write` and `settle` in one call, for a driver without threads."""
        good = self.matches(chunk, data)
        if good:
            self.write(chunk, data)
        return self.settle(index, chunk, good, now)

    def heard(self, index: int, now: float) -> None:
        """Note that bytes came from the holder: it is slow, perhaps, but not silent."""
        self.holders[index].heard_at = now

    def absent(self, index: int, chunk: int, now: float) -> None:
        """Note that a holder does not have this chunk (yet). A failure where it was asked, which is because it had said that it has it."""
        holder = self.holders[index]
        holder.heard_at = now
        asked = chunk in holder.asked
        self._unask(holder, index, chunk)
        has = self._has.get(holder.source)
        self.know(
            holder.source,
            np.zeros(len(self.here), dtype=bool) if has is None else has & (np.arange(len(has)) != chunk),
        )
        if asked and now >= holder.resting_until:  # the rest of a window is the same failure
            self._failed(index, f"chunk {chunk} is not there, which it had reported", now)

    def returned(self, index: int, chunk: int, now: float) -> None:
        """Take back a chunk whose bytes were of no use, without a failure: the fault may be ours."""
        holder = self.holders[index]
        holder.heard_at = now
        self._unask(holder, index, chunk)

    def refused(self, index: int, chunk: int, reason: str, now: float) -> None:
        """The holder says that it cannot deliver."""
        holder = self.holders[index]
        holder.heard_at = now
        asked = chunk in holder.asked or chunk < 0
        self._unask(holder, index, chunk)
        if asked and now >= holder.resting_until:  # the rest of a window refused with it is the same failure
            self._failed(index, reason, now)

    def stalled(self, index: int, now: float) -> bool:
        """True when the holder has been silent too long; what was asked of it is then wanted of others again."""
        holder = self.holders[index]
        if not holder.asked or now - holder.heard_at < self._limits.stall_s:
            return False
        self.lost(index, f"no answer for {self._limits.stall_s:g} s", now)
        return True

    def lost(self, index: int, reason: str, now: float) -> None:
        """Note that the connection was lost: no chunk requested on it will come."""
        self._return_chunks(index)
        self._rest(self.holders[index], reason, now)

    def hung_up(self, index: int) -> None:
        """We closed the connection ourselves."""
        self._return_chunks(index)

    def resumed(self, manifest: Manifest, now: float) -> Transfer:
        """A transfer of the same weights into the same memory, without holders: what is here stays here."""
        again = Transfer(manifest, 0, self._limits, now, blob=self.blob)
        again.here, again.missing, again._free = self.here, self.missing, ~self.here
        again._order = again._rarity = self._order
        return again

    def abandon(self, index: int, reason: str) -> None:
        """Give this holder up, for `reason`."""
        holder = self.holders[index]
        holder.given_up, holder.reason = True, reason
        self._return_chunks(index)
        if all(other.given_up for other in self.holders if other.source == holder.source):
            self.know(holder.source, None)  # its chunks are not to be had

    def summary(self) -> str:
        """What is missing and why, for the error."""
        total = len(self.here)
        reasons = (
            "; ".join(f"source {h.source}: {h.reason}" for h in self.holders if h.reason) or "no answer yet"
        )
        owners = self._owners_of_missing()
        return f"{total - self.missing} of {total} chunks arrived{owners}, {self.corrupt} with a wrong hash ({reasons})"

    def _owners_of_missing(self) -> str:
        """Which training ranks have what is missing, where several share a version: a dead one is named by its number."""
        size = self.manifest.chunk_nbytes
        counts: dict[int, int] = {}
        for shard in self.manifest.shards:
            missing = int(np.count_nonzero(~self.here[shard.start // size : -(-shard.stop // size)]))
            if missing:
                counts[shard.owner] = counts.get(shard.owner, 0) + missing
        return "".join(f", {count} of rank {owner} missing" for owner, count in sorted(counts.items())[:8])

    def _measure(self, holder: ChunkHolder, asked_at: float, now: float) -> None:
        took = max(now - max(asked_at, holder.delivered_at), 1e-6)
        holder.rate = (
            1 / took if not holder.rate else 1 / (_RATE_MEMORY / holder.rate + (1 - _RATE_MEMORY) * took)
        )
        holder.delivered_at = now

    def _unask(self, holder: ChunkHolder, index: int, chunk: int) -> None:
        """The chunk is no longer asked of this holder; free again where no other holder has it in flight."""
        if holder.asked.pop(chunk, None) is None:
            return
        at = self._flying[chunk]
        at.discard(index)
        if not at:
            del self._flying[chunk]
            self._free[chunk] = not self.here[chunk]

    def _failed(self, index: int, reason: str, now: float) -> None:
        holder = self.holders[index]
        holder.failures += 1
        self._rest(holder, reason, now)
        if holder.failures >= self._limits.failures:
            self.abandon(index, reason)

    def _rest(self, holder: ChunkHolder, reason: str, now: float) -> None:
        holder.reason = reason
        holder.rests += 1
        limits = self._limits
        holder.resting_until = now + backoff_s(limits.backoff_s, limits.backoff_max_s, holder.rests)

    def _return_chunks(self, index: int) -> None:
        holder = self.holders[index]
        for chunk in list(holder.asked):
            self._unask(holder, index, chunk)
