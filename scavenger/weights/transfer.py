"""Which chunk is asked of which holder, and what becomes of an answer: the pure core of a pull.

Owns the bookkeeping of one version's transfer into one blob. No socket and no clock: time is an argument. Any holder may deliver
any chunk; a holder that fails loses what was asked of it to the others. A chunk is accepted only with the manifest's hash.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from scavenger.weights.manifest import Manifest, chunk_hash


class Verdict(Enum):
    """What became of a delivered chunk."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    CORRUPT = "corrupt"
    UNASKED = "unasked"


@dataclass(slots=True)
class Limits:
    """`window` chunks are asked of a holder at a time; after `stall_s` without any answer they go back to all.

    A holder rests `backoff_s` after a failure, doubling to `backoff_max_s`, and is given up after `failures` in a row
    that say something about it (corrupt bytes, a refusal). Silence never gives a holder up: the deadline does.
    """

    window: int = 8
    stall_s: float = 5.0
    backoff_s: float = 0.05
    backoff_max_s: float = 2.0
    failures: int = 4


@dataclass(slots=True)
class Holder:
    """One source of the version, as this receiver has seen it."""

    asked: dict[int, float] = field(default_factory=dict)
    heard_at: float = 0.0
    resting_until: float = 0.0
    backoff_s: float = 0.0
    failures: int = 0
    given_up: bool = False
    reason: str = ""


class Transfer:
    """One version on its way into `blob`."""

    def __init__(self, manifest: Manifest, holders: int, limits: Limits, now: float) -> None:
        self.manifest = manifest
        self.blob = bytearray(manifest.total_nbytes)
        self.holders = [Holder(heard_at=now) for _ in range(holders)]
        self.corrupt = 0
        self._limits = limits
        self._wanted = deque(range(len(manifest.chunk_hashes)))
        self._missing = set(self._wanted)

    def complete(self) -> bool:
        return not self._missing

    def ask(self, index: int, now: float) -> list[int]:
        """Chunks to request from holder `index` now."""
        holder = self.holders[index]
        if holder.given_up or now < holder.resting_until:
            return []
        if not holder.asked:
            holder.heard_at = now  # silence counts from the first question on
        chunks = []
        # One that failed gets a single chunk until it delivers, lest the dead take work from the living again and again.
        window = 1 if holder.backoff_s else self._limits.window
        while self._wanted and len(holder.asked) < window:
            chunk = self._wanted.popleft()
            if chunk in self._missing:
                holder.asked[chunk] = now
                chunks.append(chunk)
        return chunks

    def delivered(self, index: int, chunk: int, data: bytes | memoryview, now: float) -> Verdict:
        """Take a chunk's bytes if they are what the manifest says."""
        holder = self.holders[index]
        holder.heard_at = now
        if not 0 <= chunk < len(self.manifest.chunk_hashes):
            return Verdict.UNASKED
        asked = holder.asked.pop(chunk, None) is not None
        if chunk not in self._missing:
            return Verdict.DUPLICATE
        start, stop = self.manifest.chunk_range(chunk)
        if len(data) != stop - start or chunk_hash(data) != self.manifest.chunk_hashes[chunk]:
            self.corrupt += 1
            if asked:
                self._wanted.append(chunk)
            self._failed(holder, f"chunk {chunk} does not have the manifest's hash", now)
            return Verdict.CORRUPT
        self.blob[start:stop] = data
        self._missing.discard(chunk)
        holder.failures, holder.backoff_s = 0, 0.0
        return Verdict.ACCEPTED

    def refused(self, index: int, chunk: int, reason: str, now: float) -> None:
        """The holder says that it cannot deliver."""
        holder = self.holders[index]
        holder.heard_at = now
        if holder.asked.pop(chunk, None) is not None:
            self._wanted.append(chunk)
            if now >= holder.resting_until:  # the rest of a window refused with it is the same failure
                self._failed(holder, reason, now)

    def stalled(self, index: int, now: float) -> bool:
        """True when the holder has been silent too long; what was asked of it is then wanted of others again."""
        holder = self.holders[index]
        if not holder.asked or now - holder.heard_at < self._limits.stall_s:
            return False
        self._give_back(holder)
        self._rest(holder, f"no answer for {self._limits.stall_s:g} s", now)
        return True

    def abandon(self, index: int, reason: str) -> None:
        """Nothing can come from this holder."""
        holder = self.holders[index]
        holder.given_up, holder.reason = True, reason
        self._give_back(holder)

    def next_wait(self, index: int, now: float) -> float:
        """Seconds until holder `index` has to be looked at again, whatever arrives."""
        holder = self.holders[index]
        due = holder.heard_at + self._limits.stall_s if holder.asked else now + self._limits.stall_s
        if holder.resting_until > now:
            due = min(due, holder.resting_until)
        return max(0.0, due - now)

    def summary(self) -> str:
        """What is missing and why, for the error."""
        total = len(self.manifest.chunk_hashes)
        reasons = "; ".join(f"source {i}: {h.reason}" for i, h in enumerate(self.holders) if h.reason) or "no answer yet"
        return f"{total - len(self._missing)} of {total} chunks arrived, {self.corrupt} with a wrong hash ({reasons})"

    def _failed(self, holder: Holder, reason: str, now: float) -> None:
        holder.failures += 1
        self._rest(holder, reason, now)
        if holder.failures >= self._limits.failures:
            self.abandon(self.holders.index(holder), reason)

    def _rest(self, holder: Holder, reason: str, now: float) -> None:
        holder.reason = reason
        holder.backoff_s = min(max(holder.backoff_s * 2, self._limits.backoff_s), self._limits.backoff_max_s)
        holder.resting_until = now + holder.backoff_s

    def _give_back(self, holder: Holder) -> None:
        self._wanted.extend(sorted(holder.asked))
        holder.asked.clear()
