"""What a worker does for its run: the weights it holds, the leases it serves, whether it sleeps, and what of that the daemon was told.

Sans-IO, like `session`, which hands it what it hears and tells it how the conversation stands: `hears` (somebody listens) and
`closed` (the worker leaves: nothing new begins). What cannot be said now is said by what follows the next Welcome.
Owns tokens until they are durable. Knows nothing of connections, retries or goodbyes; `now` is monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollout.events import (
    Abort,
    Action,
    Add,
    AddRefused,
    Built,
    Generated,
    Load,
    Loaded,
    LoadFailed,
    MoreHolders,
    Note,
    Send,
    Serves,
    SleepEngine,
    Slept,
    WakeEngine,
    Woken,
)
from rollout.leases import HeldLease, LeaseTable
from scavenger import wire


class Work:
    """The work of one session. Every method returns what to do, in order."""

    def __init__(self, message_tokens: int, now: float) -> None:
        self.leases = LeaseTable()
        self.loaded_version = -1
        self.hears = False
        self.closed = False
        self.flush_at: float | None = None
        self.loaded_root = self.loaded_merged = b""
        self.mismatches = 0  # versions in a row of which the engine held other weights than were published
        self._wanted: wire.UseWeights | None = None  # being pulled or loaded
        self._serving: dict[int, wire.Serving] = {}  # what is given out to other workers
        self._waiting: list[wire.Lease] = []  # assigned for the version that is being loaded
        self._asleep = False  # asked to be
        self._slept = False  # and is
        self._terms: wire.Welcome | None = None
        self._message_tokens = message_tokens
        self._acked_at = now
        self._rate_tokens = 0
        self._rate_since = now
        self.cache_tokens = self.best_batch = 0  # as the engine says, once it is built
        self._wake_s = 0.0
        self._heard = 0  # number of the last heartbeat ack of this conversation

    # ------------------------------------------------------------ the conversation

    def welcomed(self, welcome: wire.Welcome, now: float) -> list[Action]:
        """A new conversation: whatever was sent on the last one may be lost.

        Under another history of the ledger (an older one was restored) the same numbers name other samples and weights: all is void.
        """
        void = self._terms is not None and welcome.ledger != self._terms.ledger
        self._terms, self._heard = welcome, 0
        self._rewind(now)
        if not void:
            return []
        dropped = self.leases.all()
        actions = self._forget(dropped)
        self._wanted, self._waiting, self.loaded_version = None, [], -1
        self.loaded_root = self.loaded_merged = b""
        return [Note("ledger-restored", f"{len(dropped)} leases and the loaded weights are of its other history: dropped"), *actions]

    @property
    def ledger(self) -> str:
        """Which history of the ledger all of this is of."""
        return self._terms.ledger if self._terms is not None else ""

    def resume(self) -> list[Action]:
        """What could not be said while the connection was away; everything else is in the hello."""
        asleep: list[Action] = [Send(wire.Asleep())] if self._asleep and self._slept else []
        return [*self.flush(), *asleep, *(action for serving in self._serving.values() for action in self._say_serving(serving))]

    def close(self) -> list[Action]:
        """The worker leaves: stop what the engine is at. What was made stays until it is durable."""
        self.closed, self._waiting = True, []
        handles = tuple(held.handle for held in self.leases.all() if held.runs)
        return [Abort(handles)] if handles else []

    def beat(self, progress: int, now: float, unacked_s: float) -> list[Action]:
        """The heartbeat, after all that is unsent; everything is unsent again when no ack came for `unacked_s`."""
        rate = self._rate_tokens / max(now - self._rate_since, 1e-9)
        self._rate_tokens, self._rate_since = 0, now
        if self.leases.unsettled() and now - self._acked_at >= unacked_s:
            # The daemon answers and yet acks nothing: a message was lost. Sending again is a no-op if it was not.
            self._rewind(now)
        return [*self.flush(), Send(wire.Heartbeat(self.held(), progress, self.loaded_version, rate, self._heard, self._wake_s))]

    def beat_acked(self, message: wire.HeartbeatAck, _now: float) -> list[Action]:
        self._heard = message.number
        return []

    def held(self) -> tuple[wire.Held, ...]:
        """Every lease that was received and not given back, those that wait for their version among them."""
        waiting = (wire.Held(w.sample_id, w.epoch, len(w.accepted) // 4) for w in self._waiting)
        return (*self.leases.held(), *waiting)

    def flush(self) -> list[Action]:
        """Everything not yet sent on this connection, in messages of bounded size."""
        self.flush_at = None
        if not self.hears:
            return []
        actions: list[Action] = []
        while chunks := self.leases.chunks(self._message_tokens):
            actions.append(Send(wire.Chunks(tuple(chunks))))
        back = self.leases.to_yield()
        if back:
            actions.append(Send(wire.Yielded(tuple(held.held() for held in back))))
        return actions

    def _send(self, message: wire.WorkerMessage) -> list[Action]:
        return [Send(message)] if self.hears else []

    def _rewind(self, now: float) -> None:
        self._acked_at = now
        for held in self.leases.all():
            held.rewind()

    # ------------------------------------------------------------ tokens

    def generated(self, event: Generated, now: float) -> list[Action]:
        actions: list[Action] = []
        terms = self._terms
        if not self.leases.unsettled():
            self._acked_at = now  # nothing was owed until now
        for delta in event.deltas:
            held = self.leases.of_handle(delta.handle)
            if held is None or held.given_back or self.closed:
                continue  # revoked or given back while the engine was at it, or too late for the goodbye
            if delta.error is not None:
                actions += self._fail(held, delta.error)
                continue
            held.extend(delta)
            self._rate_tokens += len(delta.token_ids)
            if held.at_bound:
                actions += self._give_back([held], now)
            if terms is not None and held.pending >= terms.flush_tokens:
                self.flush_at = now
        if self.flush_at is None and terms is not None:
            self.flush_at = now + terms.flush_ms / 1000.0
        return actions

    def acked(self, message: wire.Ack, now: float) -> list[Action]:
        for durable in message.durable:
            held = self.leases.find(durable.sample_id, durable.epoch)
            if held is None:
                continue
            if held.acked(durable.length):
                self._acked_at = now
            if held.settled:
                self.leases.drop(held)
        return []

    def add_refused(self, event: AddRefused, _now: float) -> list[Action]:
        held = self.leases.of_handle(event.handle)
        return self._fail(held, event.reason) if held is not None else []

    def _fail(self, held: HeldLease, reason: str) -> list[Action]:
        actions = self.flush()  # what it made before stays
        self.leases.drop(held)
        return [*actions, *self._send(wire.SampleFailed(held.lease.sample_id, held.lease.epoch, wire.words(reason)))]

    # ------------------------------------------------------------ leases

    def assign(self, message: wire.Assign, now: float) -> list[Action]:
        if self.closed:
            return []  # not held: the goodbye, and every heartbeat, says so
        # Only the awake are given work: if the Wake was lost, this is it.
        actions = self.wake(wire.Wake(), now)
        return actions + [action for lease in message.leases for action in self._assigned(lease, now)]

    def _assigned(self, lease: wire.Lease, now: float) -> list[Action]:
        present = self.leases.find(lease.sample_id)
        if present is not None and present.lease.epoch >= lease.epoch:
            return []  # a repeat
        if self._wanted is not None and lease.version == self._wanted.version:
            self._waiting = [w for w in self._waiting if w.sample_id != lease.sample_id] + [lease]
            return []
        if lease.version != self.loaded_version:
            return [Note("wrong-version", f"sample {lease.sample_id} needs {lease.version}, loaded is {self.loaded_version}")]
        actions = self._forget([present]) if present is not None else []
        held = self.leases.take(lease)
        if held.finish is None:
            return [*actions, Add(held.request())]
        self.flush_at = now  # complete already: say so
        return actions

    def _forget(self, leases: Iterable[HeldLease]) -> list[Action]:
        """Drop leases with all their tokens."""
        handles = []
        for held in leases:
            self.leases.drop(held)
            if held.runs:
                handles.append(held.handle)
        return [Abort(tuple(handles))] if handles else []

    def _give_back(self, leases: Iterable[HeldLease], now: float) -> list[Action]:
        handles = []
        for held in leases:
            held.given_back = True
            handles.append(held.handle)
        self.flush_at = now
        return [Abort(tuple(handles))] if handles else []

    def yield_(self, message: wire.Yield, now: float) -> list[Action]:
        """Asked to give leases back. One that ended meanwhile ends; one that waits for its version goes as it came."""
        asked = set(message.leases)
        waiting = [w for w in self._waiting if (w.sample_id, w.epoch) in asked]
        self._waiting = [w for w in self._waiting if (w.sample_id, w.epoch) not in asked]
        untouched = tuple(wire.Held(w.sample_id, w.epoch, len(w.accepted) // 4) for w in waiting)
        found = [held for name in message.leases if (held := self.leases.find(*name)) is not None]
        for held in found:
            held.yield_sent = False  # asked again: said again
        abort = self._give_back([held for held in found if held.runs], now)
        return [*abort, *self.flush(), *(self._send(wire.Yielded(untouched)) if untouched else [])]

    def revoked(self, message: wire.Revoke, _now: float) -> list[Action]:
        over = set(message.leases)
        self._waiting = [w for w in self._waiting if (w.sample_id, w.epoch) not in over]
        found = (self.leases.find(sample_id, epoch) for sample_id, epoch in message.leases)
        return self._forget([held for held in found if held is not None])

    # ------------------------------------------------------------ weights, sleep

    def use_weights(self, message: wire.UseWeights, _now: float) -> list[Action]:
        if self.closed:
            return []
        if self._wanted is not None and self._wanted.version == message.version:
            return [MoreHolders(message)] if _holders(message) != _holders(self._wanted) else []
        if message.more:
            return []  # holders of a version that is here by now, or that was given up
        if message.version == self.loaded_version:
            return self._send(self._loaded_message(message.version, 0.0, 0.0))
        # Its tokens end here: a sample never mixes versions. What is finished stays until it is durable.
        actions = [*self.flush(), *self._forget([held for held in self.leases.all() if held.finish is None])]
        self._wanted, self._waiting, self.loaded_version = message, [], -1
        return [*actions, Load(message)]

    def loaded(self, event: Loaded, now: float) -> list[Action]:
        self.mismatches = 0
        if self._wanted is None or event.version != self._wanted.version:
            return [Note("superseded", f"version {event.version} was loaded after a newer one was wanted")]
        self.loaded_version, self.loaded_root, self.loaded_merged, self._wanted = event.version, event.root, event.merged, None
        waiting, self._waiting = self._waiting, []
        actions = self._send(self._loaded_message(event.version, event.pull_s, event.load_s, event.verify_s))
        return actions + [a for lease in waiting for a in self._assigned(lease, now)]

    def _loaded_message(self, version: int, pull_s: float, load_s: float, verify_s: float = 0.0) -> wire.WeightsLoaded:
        known = (self.cache_tokens, self.best_batch)
        return wire.WeightsLoaded(version, self.loaded_root, pull_s, load_s, *known, verify_s, self.loaded_merged)

    def built(self, event: Built, _now: float) -> list[Action]:
        self.cache_tokens, self.best_batch = event.cache_tokens, event.best_batch
        return []

    def woken(self, event: Woken, _now: float) -> list[Action]:
        self._wake_s = event.seconds
        return []

    def serves(self, event: Serves, _now: float) -> list[Action]:
        """Others may pull a version from here, or may not any more."""
        serving = event.serving
        if serving.source is None:
            self._serving.pop(serving.version, None)
        else:
            self._serving[serving.version] = serving
        return self._say_serving(serving)

    def _say_serving(self, serving: wire.Serving) -> list[Action]:
        wanted = self._terms is not None and self._terms.relay
        return self._send(serving) if wanted else []

    def load_failed(self, event: LoadFailed, _now: float) -> list[Action]:
        self.mismatches += event.differs
        if self._wanted is None or event.version != self._wanted.version:
            return []
        self._wanted, self._waiting = None, []
        failed = wire.WeightsFailed(event.version, wire.words(event.reason), event.refused)
        return [Note("weights-failed", event.reason), *self._send(failed)]

    def sleep(self, _message: wire.Sleep, _now: float) -> list[Action]:
        if self._asleep:
            return self._send(wire.Asleep()) if self._slept else []
        self._asleep, self._waiting = True, []
        return [*self.flush(), *self._forget(self.leases.all()), SleepEngine()]

    def wake(self, _message: wire.Wake, _now: float) -> list[Action]:
        if not self._asleep:
            return []
        self._asleep = self._slept = False
        return [WakeEngine()]

    def fell_asleep(self, _event: Slept, _now: float) -> list[Action]:
        if not self._asleep:
            return []  # woken meanwhile: the engine does both in order
        self._slept = True
        return self._send(wire.Asleep())


def _holders(weights: wire.UseWeights) -> tuple[tuple[wire.WeightSource, ...], ...]:
    """Of the version, and of its base."""
    return weights.sources, weights.base.sources if weights.base is not None else ()
