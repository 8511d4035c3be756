"""Which engine is sent which of its samples' siblings' tokens, for drafts (`engine.speculation = "group"`). Pure.

    a chunk of a group's sample     --note-->  backlog of each other engine with a live sample of the group
    a first lease of the group      --note-->  that engine's backlog: what it lacks of the group's other samples
    CoreTick                        --take-->  SiblingTokens, no more than the engine's credit

A draft is a guess that its engine verifies, so anything here may be lost. Nothing is kept over a restart: what leases the engines hold
is known again then, and what is accepted from then on is sent. Tokens are counted as they are packed, 4 bytes each, before
`squeeze_tokens`. A backlog holds what `BACKLOG_BEATS` heartbeats may carry, and drops what came first. An engine of which nothing was
heard for two heartbeats is sent nothing: its queue would fill with drafts. An engine keeps a group for `KEEP_SIBLINGS_S` after its last
sample of it, as at a change of weights; for half as long the router goes on from where it was.

Owns `Worker.backlog` and `Group.holders`. Knows lengths and no token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scavenger.protocol.messages import (
    KEEP_SIBLINGS_S,
    MAX_SIBLING_PIECES,
    MAX_SIBLING_TOKENS,
    SiblingPiece,
    SiblingTokens,
)

if TYPE_CHECKING:
    from scavenger.router.core.state import Group, Sample, Worker
    from scavenger.router.core.tables import Core

TOKEN_NBYTES = 4
#: Heartbeats for whose bytes what waits for an engine may stand. After a pause it is sent what one may carry at once.
BACKLOG_BEATS = 4.0
#: Groups that an engine's last sample has left, of which it is remembered what the engine has.
MAX_LEFT = 256


@dataclass(slots=True)
class SiblingBacklog:
    """Of one engine: sample -> the tokens [start, end) of it that are to be sent, those first that came first. `credit`: bytes."""

    ranges: OrderedDict[int, tuple[int, int]] = field(default_factory=OrderedDict)
    tokens: int = 0  # of all ranges
    credit: float = 0.0
    credited_at: float = 0.0  # Unix seconds
    #: Group that no sample of the engine's is of any more -> since when (Unix s), and how much it has of each of the group's samples.
    left: OrderedDict[int, tuple[float, dict[int, int]]] = field(default_factory=OrderedDict)

    def note(self, sample_id: int, start: int, end: int, most: int) -> int:
        """The sample's tokens from `start` up to `end` are to be sent too. Returns how many had to be dropped to keep to `most`."""
        known = self.ranges.get(sample_id)
        if known is not None:
            # One range a sample. What lies between two was sent before or dropped: sent again it changes nothing.
            self.tokens -= known[1] - known[0]
            start, end = min(start, known[0]), max(end, known[1])
        self.ranges[sample_id] = (start, end)
        self.tokens += end - start
        return self._drop(self.tokens - most)

    def forget(self, sample_id: int) -> None:
        start, end = self.ranges.pop(sample_id, (0, 0))
        self.tokens -= end - start

    def _drop(self, excess: int) -> int:
        dropped = 0
        while dropped < excess:
            sample_id, (start, end) = next(iter(self.ranges.items()))
            cut = min(end - start, excess - dropped)
            dropped += cut
            self.tokens -= cut
            if start + cut < end:
                self.ranges[sample_id] = (start + cut, end)
            else:
                del self.ranges[sample_id]
        return dropped

    def earn(self, bytes_per_s: float, burst_s: float, now: float) -> int:
        """Tokens that may be sent now, where at most the bytes of `burst_s` seconds may be sent at once."""
        earned = (now - self.credited_at) * bytes_per_s
        self.credit = min(self.credit + max(0.0, earned), burst_s * bytes_per_s)
        self.credited_at = now
        return int(self.credit / TOKEN_NBYTES)


def lease_began(core: Core, sample: Sample, worker: Worker) -> None:
    """The worker holds a lease of the sample. It gets the sample's own tokens with it, and those of all its siblings from here."""
    group = sample.group
    live = group.holders.get(worker.id, 0)
    group.holders[worker.id] = live + 1
    if not _sends(core, group):
        return
    worker.backlog.forget(sample.id)
    if not live:
        left_at, lengths = worker.backlog.left.pop(group.id, (0.0, {}))
        known = lengths if _counts(core, left_at) else {}
        for other in group.samples:
            if other.accepted > (start := known.get(other.id, 0)) and other.worker_id != worker.id:
                _note(core, worker, other, start)


def lease_restored(sample: Sample) -> None:
    """A worker held it before this daemon began: what siblings had by then is in the ledger, and not worth reading it."""
    holders = sample.group.holders
    holders[sample.worker_id] = holders.get(sample.worker_id, 0) + 1


def lease_ended(core: Core, sample: Sample, worker_id: int) -> None:
    """The worker holds it no more."""
    group = sample.group
    left = group.holders[worker_id] - 1
    if left:
        group.holders[worker_id] = left
        return
    del group.holders[worker_id]
    worker = core.workers.get(worker_id)
    if worker is not None and _sends(core, group):
        waiting = worker.backlog.ranges
        has = {s.id: waiting[s.id][0] if s.id in waiting else s.accepted for s in group.samples}
        left_before = worker.backlog.left
        left_before[group.id] = core.now, has
        while len(left_before) > MAX_LEFT or not _counts(core, next(iter(left_before.values()))[0]):
            left_before.popitem(last=False)


def grew(core: Core, sample: Sample, start: int) -> None:
    """The sample has tokens from `start` on that it did not have before, from the worker that holds it."""
    holders = sample.group.holders
    if len(holders) > 1 and _sends(core, sample.group):
        for worker_id in holders:
            worker = core.workers.get(worker_id)
            if worker is not None and worker_id != sample.worker_id:
                _note(core, worker, sample, start)


def send_due(core: Core, workers: Iterable[Worker]) -> None:
    """Send each worker what its credit allows."""
    for worker in workers:
        backlog = worker.backlog
        if not backlog.ranges or worker.conn is None or worker.suspect:
            continue
        if core.now - worker.last_seen > 2 * core.limits.heartbeat_s:
            continue
        left = backlog.earn(core.limits.sibling_bytes_per_s, core.limits.heartbeat_s, core.now)
        while left > 0 and backlog.ranges:
            pieces = _take(core, worker, min(left, MAX_SIBLING_TOKENS))
            if not pieces:
                break
            count = sum(piece.count for piece in pieces)
            left -= count
            backlog.credit -= TOKEN_NBYTES * count
            worker.run.siblings_sent += count
            core.send_siblings(worker.conn, SiblingTokens(pieces))


def _counts(core: Core, left_at: float) -> bool:
    """Whether an engine that left a group then still has what it was sent of it."""
    return core.now - left_at < KEEP_SIBLINGS_S / 2


def _sends(core: Core, group: Group) -> bool:
    return group.run.engine.speculation != "none" and core.limits.sibling_bytes_per_s > 0


def most_waiting(core: Core) -> int:
    """Tokens that may wait for one engine."""
    return int(BACKLOG_BEATS * core.limits.heartbeat_s * core.limits.sibling_bytes_per_s / TOKEN_NBYTES)


def _note(core: Core, worker: Worker, sample: Sample, start: int) -> None:
    if dropped := worker.backlog.note(sample.id, start, sample.accepted, most_waiting(core)):
        core.count("sibling_tokens_dropped", dropped)


def _take(core: Core, worker: Worker, most: int) -> tuple[SiblingPiece, ...]:
    """Pieces of at most so many tokens, off the backlog. What no live sample of the worker's asks for any more is forgotten."""
    backlog = worker.backlog
    found: list[SiblingPiece] = []
    while backlog.ranges and most > 0 and len(found) < MAX_SIBLING_PIECES:
        sample_id, (start, end) = next(iter(backlog.ranges.items()))
        sample = core.samples.get(sample_id)
        backlog.forget(sample_id)
        if sample is None or worker.id not in sample.group.holders or sample.worker_id == worker.id:
            continue
        cut = min(end, sample.accepted, start + most)
        if cut <= start:
            continue
        found.append(SiblingPiece.of(sample_id, sample.key, start, cut - start))
        most -= cut - start
        if cut < end:  # the rest goes first in the next message
            backlog.ranges[sample_id] = (cut, end)
            backlog.ranges.move_to_end(sample_id, last=False)
            backlog.tokens += end - cut
    return tuple(found)
