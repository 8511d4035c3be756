"""The samples that this worker holds: their tokens, what was sent of them and what is durable.

Owns the bookkeeping of tokens between the engine and the daemon. No IO, no clock. All lengths count from the sample's first
answer token: `durable <= sent <= length`. Tokens below `durable` are forgotten, all others are kept, however often sent.

Boundary: one worker's samples, apart from weights and sleep.
"""

from __future__ import annotations

from scavenger.protocol.messages import Chunk, Held, Lease, pack_logprobs, pack_tokens, unpack_tokens
from scavenger.protocol.worker.engine import Delta, Request


class WorkerLease:
    """One lease. `handle` names it to the engine."""

    def __init__(self, lease: Lease, handle: int) -> None:
        self.lease = lease
        self.handle = handle
        self.accepted = unpack_tokens(lease.accepted)
        self.base = len(self.accepted)
        self.durable = self.base
        self.sent = self.base
        self.finish: str | None = None
        self.finish_sent = False
        self.yielded = False  # nothing more is generated under it; its tokens stay until a Revoke says that they are durable
        self.yield_sent = False
        self._finish_acked = False
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._raw: list[float] = []
        if self.base and self.accepted[-1] in lease.sampling.stop_token_ids:
            self.finish = "stop"
        elif self.base >= lease.sampling.max_tokens:
            self.finish = "length"

    @property
    def length(self) -> int:
        """All tokens of the sample that the worker has, accepted ones included."""
        return self.durable + len(self._tokens)

    @property
    def unacked(self) -> int:
        return len(self._tokens)

    @property
    def pending(self) -> int:
        """Tokens never sent on this connection."""
        return self.length - self.sent

    @property
    def runs(self) -> bool:
        """The engine is at it."""
        return self.finish is None and not self.yielded

    @property
    def settled(self) -> bool:
        """Nothing is left to do: it is complete and durable. A finish is durable with the token that it came with."""
        return (
            self.finish is not None and not self._tokens and (self.length > self.base or self._finish_acked)
        )

    def request(self) -> Request:
        """The engine's request: what is left of the sample's one token budget."""
        lease = self.lease
        return Request(
            handle=self.handle,
            prompt=unpack_tokens(lease.prompt),
            accepted=self.accepted,
            max_new_tokens=lease.sampling.max_tokens - self.base,
            sampling=lease.sampling,
            seed=lease.seed,
            key=lease.key,
        )

    def held(self) -> Held:
        return Held(self.lease.sample_id, self.lease.epoch, self.length)

    def extend(self, delta: Delta) -> None:
        self._tokens += delta.token_ids
        self._logprobs += delta.logprobs
        self._raw += delta.raw_logprobs
        self.finish = delta.finish

    def acked(self, length: int) -> bool:
        """Tokens below `length` are durable. True when that is news."""
        self._finish_acked = self._finish_acked or (self.finish_sent and length >= self.length)
        # Never beyond what we have: the rest of it is another worker's, and a Revoke is on its way.
        news = min(length, self.length) - self.durable
        if news <= 0:
            return False
        del self._tokens[:news], self._logprobs[:news], self._raw[:news]
        self.durable += news
        self.sent = max(self.sent, self.durable)
        return True

    def rewind(self) -> None:
        """Send again, from the durable length, whatever may have been lost."""
        self.sent = self.durable
        self.finish_sent = self.yield_sent = False

    def chunk(self, most: int) -> Chunk | None:
        """The next at most `most` tokens to send, or None. Counts them as sent."""
        if not self.pending and (self.finish is None or self.finish_sent):
            return None
        first, stop = self.sent - self.durable, min(self.sent - self.durable + most, len(self._tokens))
        finish = self.finish if stop == len(self._tokens) else None
        chunk = Chunk(
            sample_id=self.lease.sample_id,
            epoch=self.lease.epoch,
            offset=self.sent,
            version=self.lease.version,
            tokens=pack_tokens(self._tokens[first:stop]),
            logprobs=pack_logprobs(self._logprobs[first:stop]),
            raw_logprobs=pack_logprobs(self._raw[first:stop]),
            finish=finish,
        )
        self.sent = self.durable + stop
        self.finish_sent = finish is not None
        return chunk


class LeaseTable:
    """All leases of a worker, by sample and by engine handle. At most one lease a sample; the newest epoch wins."""

    def __init__(self) -> None:
        self._by_sample: dict[int, WorkerLease] = {}
        self._by_handle: dict[int, WorkerLease] = {}
        self._handles = 0

    def all(self) -> tuple[WorkerLease, ...]:
        return tuple(self._by_sample.values())

    def find(self, sample_id: int, epoch: int | None = None) -> WorkerLease | None:
        """The lease of a sample, if it is of this epoch."""
        held = self._by_sample.get(sample_id)
        return held if held is not None and epoch in (None, held.lease.epoch) else None

    def of_handle(self, handle: int) -> WorkerLease | None:
        return self._by_handle.get(handle)

    def take(self, lease: Lease) -> WorkerLease:
        self._handles += 1
        held = WorkerLease(lease, self._handles)
        self._by_sample[lease.sample_id] = held
        self._by_handle[held.handle] = held
        return held

    def drop(self, held: WorkerLease) -> None:
        del self._by_sample[held.lease.sample_id]
        del self._by_handle[held.handle]

    def unacked(self) -> int:
        """Tokens kept because they are not durable yet."""
        return sum(held.unacked for held in self._by_sample.values())

    def unsettled(self) -> bool:
        """Whether the daemon owes an ack."""
        return any(held.unacked or not held.runs for held in self._by_sample.values())

    def to_yield(self) -> list[WorkerLease]:
        """Given back, with everything sent but the word that says so. Counts it as said."""
        found = [
            held
            for held in self._by_sample.values()
            if held.yielded and not held.yield_sent and held.finish is None
        ]
        for held in found:
            held.yield_sent = True
        return found

    def held(self) -> tuple[Held, ...]:
        return tuple(held.held() for held in self._by_sample.values())

    def chunks(self, most: int) -> list[Chunk]:
        """At most `most` tokens to send, of all samples that have any."""
        found = []
        for held in self._by_sample.values():
            if most <= 0:
                break
            chunk = held.chunk(most)
            if chunk is not None:
                found.append(chunk)
                most -= len(chunk.tokens) // 4
        return found
