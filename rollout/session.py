"""The worker's side of the conversation with the daemon: a sans-IO state machine. Theory of operation:

    CONNECTING --Connected--> GREETING --Welcome--> JOINED          any of the three --Leave--> GONE
         ^                       |  ^                  |
         +------- no answer -----+  +---HelloAgain-----+ (or 3 heartbeats unanswered: CONNECTING)

`handle(event, now)` takes one event and returns the actions that the driver performs, in order. The connection may be lost at any
moment and so may any message: the engine goes on meanwhile (up to `max_unacked` tokens), every token is kept until the daemon says
that it is durable, and after each Welcome everything above the durable length is sent again.

Leaving is an intent beside the phase: it flushes, says Goodbye and goes when that is acked or its deadline has passed.
Owns what is held, sent and awaited. Knows no socket, thread or clock; `now` is monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rollout.engines.base import Delta
from rollout.events import (
    EXIT_DRAINED,
    EXIT_ENGINE_FAILED,
    EXIT_NO_DAEMON,
    EXIT_PREEMPTED,
    EXIT_REFUSED,
    Abort,
    Action,
    Add,
    AddRefused,
    Build,
    Connect,
    Connected,
    EngineDied,
    Event,
    Generated,
    Identity,
    KeyRefused,
    Leave,
    Limits,
    Load,
    Loaded,
    LoadFailed,
    Note,
    Phase,
    Received,
    Send,
    SleepEngine,
    Slept,
    Terminate,
    Tick,
    Unreachable,
    WakeEngine,
)
from rollout.leases import HeldLease, LeaseTable
from scavenger import wire
from scavenger.errors import ScavengerError

LEGAL: dict[Phase, frozenset[Phase]] = {
    Phase.CONNECTING: frozenset({Phase.CONNECTING, Phase.GREETING, Phase.GONE}),
    Phase.GREETING: frozenset({Phase.GREETING, Phase.JOINED, Phase.CONNECTING, Phase.GONE}),
    Phase.JOINED: frozenset({Phase.GREETING, Phase.CONNECTING, Phase.JOINED, Phase.GONE}),
    Phase.GONE: frozenset(),
}


class IllegalTransition(ScavengerError):
    """A bug: the session was asked for a phase that cannot follow."""


class Session:
    """One worker process's session. See the module's theory of operation."""

    def __init__(self, identity: Identity, limits: Limits, now: float) -> None:
        self.phase = Phase.CONNECTING
        self.leases = LeaseTable()
        self.loaded_version = -1
        self.loaded_root = b""
        self.progress = 0
        self._identity = identity
        self._limits = limits
        self._welcome: wire.Welcome | None = None
        self._spec: wire.EngineSpec | None = None
        self._wanted: wire.UseWeights | None = None  # being pulled or loaded
        self._waiting: list[wire.Lease] = []  # assigned for the version that is being loaded
        self._asleep = False  # asked to be
        self._slept = False  # and is
        self._leaving: Leave | None = None
        self._leave_by = 0.0
        self._heard_at = now
        self._attempts = 0
        self._refusals = 0
        self._turned_away: wire.Rejected | None = None  # the last refusal that may pass, since the last Welcome
        self._answer_by = 0.0
        self._unanswered = 0
        self._heartbeat_at = 0.0
        self._flush_at: float | None = None
        self._acked_at = now
        self._rate_tokens = 0
        self._rate_since = now
        self._on_event: dict[type[Event], Callable[[Any, float], list[Action]]] = {
            Received: lambda e, now: self._received(e.message, now),
            Connected: self._connected,
            Unreachable: lambda e, now: [Note("unreachable", e.reason), *self._reconnect(now)],
            KeyRefused: self._key_refused,
            Generated: lambda e, now: self._generated(e.deltas, now),
            AddRefused: lambda e, now: self._fail_handle(e.handle, e.reason),
            EngineDied: lambda e, now: self._leave(Leave(EXIT_ENGINE_FAILED, e.reason), self._limits.drain_s, now),
            Loaded: self._loaded,
            LoadFailed: self._load_failed,
            Slept: self._fell_asleep,
            Terminate: lambda e, now: self._leave(Leave(EXIT_PREEMPTED, e.reason), self._limits.notice_s, now),
            Tick: lambda _, __: [],
        }
        self._on_message: dict[type[wire.Message], Callable[[Any, float], list[Action]]] = {
            wire.Welcome: self._welcomed,
            wire.Rejected: self._rejected,
            wire.HelloAgain: self._greet_again,
            wire.HeartbeatAck: lambda _, __: [],
            wire.UseWeights: self._use_weights,
            wire.Assign: self._assign,
            wire.Revoke: self._revoked,
            wire.Ack: self._acked,
            wire.Sleep: self._sleep,
            wire.Wake: self._wake,
            wire.Drain: lambda m, now: self._leave(Leave(EXIT_DRAINED, m.reason), self._limits.drain_s, now),
            wire.GoodbyeAck: lambda _, __: self._gone(self._leaving) if self._leaving else [],
        }

    # ------------------------------------------------------------ driver's face

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event; returns what to do, in order. Does nothing once the session is GONE."""
        if self._is_gone():
            return []
        actions = self._on_event[type(event)](event, now)
        return actions if self._is_gone() else [*actions, *self._due(now)]

    def next_deadline(self) -> float:
        """When a `Tick` is due if nothing else happens."""
        times = [self._heard_at + self._limits.orphan_s]
        if self._leaving:
            times.append(self._leave_by)
        if self.phase is Phase.GREETING:
            times.append(self._answer_by)
        if self.phase is Phase.JOINED:
            times.append(self._heartbeat_at)
            if self._flush_at is not None:
                times.append(self._flush_at)
        return min(times)

    @property
    def may_generate(self) -> bool:
        """False while too much is held that may be lost: the engine then pauses."""
        return self._leaving is None and self.leases.unacked() < self._limits.max_unacked

    # ------------------------------------------------------------ connection

    def _is_gone(self) -> bool:
        return self.phase is Phase.GONE

    def _enter(self, phase: Phase) -> None:
        if phase not in LEGAL[self.phase]:
            raise IllegalTransition(f"the session cannot go from {self.phase.value} to {phase.value}")
        self.phase = phase

    def _connected(self, _event: Connected, now: float) -> list[Action]:
        return self._greet(now)

    def _greet(self, now: float) -> list[Action]:
        self._enter(Phase.GREETING)
        self._answer_by = now + self._limits.hello_s
        me = self._identity
        hello = wire.WorkerHello(
            protocol=wire.PROTOCOL,
            kind=me.kind,
            run=me.run,
            session=me.session,
            incarnation=me.incarnation,
            job_id=me.job_id,
            node=me.node,
            gpus=me.gpus,
            engine=me.engine,
            code_version=me.code_version,
            pid=me.pid,
            loaded_version=self.loaded_version,
            held=self.leases.held(),
            slot=me.slot,
        )
        return [Send(hello)]

    def _greet_again(self, message: wire.HelloAgain, now: float) -> list[Action]:
        # Several messages may each have been answered so; one hello answers all.
        return [Note("hello-again", message.reason), *self._greet(now)] if self.phase is Phase.JOINED else []

    def _key_refused(self, event: KeyRefused, now: float) -> list[Action]:
        self._refusals += 1
        if self._refusals >= self._limits.refusals:
            return self._gone(Leave(EXIT_REFUSED, event.reason, "a key is minted for one job and dies with it; submit a new job"))
        return [Note("key-refused", event.reason), *self._reconnect(now)]

    def _reconnect(self, now: float) -> list[Action]:
        self._enter(Phase.CONNECTING)
        limits = self._limits
        delay = min(limits.backoff_max_s, limits.backoff_s * 2.0 ** min(self._attempts, 30))
        self._attempts += 1
        # Half of the wait is spread by the session's own number, lest a whole fleet come back in one instant.
        return [Connect(delay * (0.5 + 0.5 * self._identity.jitter))]

    def _welcomed(self, welcome: wire.Welcome, now: float) -> list[Action]:
        if self.phase is not Phase.GREETING:
            return [Note("stray-welcome", self.phase.value)]
        if self._spec is not None and welcome.engine != self._spec:
            return self._gone(Leave(EXIT_PREEMPTED, "the run's engine changed; a fresh worker is needed"))
        self._enter(Phase.JOINED)
        first, self._welcome = self._spec is None, welcome
        self._attempts = self._unanswered = self._refusals = 0
        self._heartbeat_at = now + welcome.heartbeat_s
        self._acked_at, self._turned_away = now, None
        for held in self.leases.all():
            held.rewind()
        note = Note("welcome", f"worker {welcome.worker_id} of run {welcome.run}, generation {welcome.generation}")
        if self._leaving:
            return [note, *self._farewell()]
        if first:
            self._spec = welcome.engine
            return [note, Build(welcome.engine)]
        # What could not be said while the connection was away; everything else is in the hello.
        asleep: list[Action] = [Send(wire.Asleep())] if self._asleep and self._slept else []
        return [note, *self._flush(), *asleep]

    def _rejected(self, message: wire.Rejected, now: float) -> list[Action]:
        if message.retry:
            self._turned_away = message
            return [Note("rejected", f"{message.reason}; trying again"), *self._reconnect(now)]
        return self._gone(Leave(EXIT_REFUSED, message.reason, message.remedy))

    def _received(self, message: wire.ToWorker, now: float) -> list[Action]:
        if not isinstance(message, wire.Rejected):
            self._heard_at = now  # to be turned away again and again is to hear of no daemon that wants us
        self._unanswered = 0
        return self._on_message[type(message)](message, now)

    # ------------------------------------------------------------ time

    def _due(self, now: float) -> list[Action]:
        """What time alone asks for."""
        if self._leaving and now >= self._leave_by:
            return self._gone(self._leaving)
        if now - self._heard_at >= self._limits.orphan_s:
            return self._gone(self._orphaned())
        if self.phase is Phase.GREETING and now >= self._answer_by:
            return [Note("no-answer", "the hello was not answered"), *self._reconnect(now)]
        if self.phase is not Phase.JOINED or self._welcome is None:
            return []
        if now >= self._heartbeat_at:
            return self._heartbeat(self._welcome.heartbeat_s, now)
        if self._flush_at is not None and now >= self._flush_at:
            return self._flush()
        return []

    def _orphaned(self) -> Leave:
        waited, away = f"for {self._limits.orphan_s:g} s", self._turned_away
        if away is not None:
            return Leave(EXIT_NO_DAEMON, f"turned away {waited}: {away.reason}", away.remedy)
        return Leave(EXIT_NO_DAEMON, f"no daemon {waited}", "start it: `scavenger daemon`")

    def _heartbeat(self, heartbeat_s: float, now: float) -> list[Action]:
        # Heartbeats are counted, not timed: after a SIGSTOP the answers may be waiting in the socket.
        if self._unanswered >= self._limits.missed_heartbeats:
            return [Note("silent", f"{self._unanswered} heartbeats without an answer"), *self._reconnect(now)]
        self._unanswered += 1
        self._heartbeat_at = now + heartbeat_s
        rate = self._rate_tokens / max(now - self._rate_since, 1e-9)
        self._rate_tokens, self._rate_since = 0, now
        if self.leases.unsettled() and now - self._acked_at >= self._limits.missed_heartbeats * heartbeat_s:
            # The daemon answers and yet acks nothing: a message was lost. Sending again is a no-op if it was not.
            self._acked_at = now
            for held in self.leases.all():
                held.rewind()
        beat = wire.Heartbeat(self.leases.held(), self.progress, self.loaded_version, rate)
        return [*self._flush(), Send(beat)]

    # ------------------------------------------------------------ tokens

    def _send(self, message: wire.WorkerMessage) -> list[Action]:
        """Send if there is a conversation; else the next Welcome's reconciliation says it."""
        return [Send(message)] if self.phase is Phase.JOINED else []

    def _flush(self) -> list[Action]:
        """Everything not yet sent on this connection, in messages of bounded size."""
        self._flush_at = None
        if self.phase is not Phase.JOINED:
            return []
        actions: list[Action] = []
        while chunks := self.leases.chunks(self._limits.message_tokens):
            actions.append(Send(wire.Chunks(tuple(chunks))))
        return actions

    def _generated(self, deltas: Iterable[Delta], now: float) -> list[Action]:
        actions: list[Action] = []
        welcome = self._welcome
        if not self.leases.unsettled():
            self._acked_at = now  # nothing was owed until now
        for delta in deltas:
            held = self.leases.of_handle(delta.handle)
            if held is None or self._leaving:
                continue  # revoked while the engine was at it, or too late for the goodbye
            if delta.error is not None:
                actions += self._fail(held, delta.error)
                continue
            held.extend(delta)
            self._rate_tokens += len(delta.token_ids)
            if welcome is not None and held.pending >= welcome.flush_tokens:
                self._flush_at = now
        if self._flush_at is None and welcome is not None:
            self._flush_at = now + welcome.flush_ms / 1000.0
        return actions

    def _acked(self, message: wire.Ack, now: float) -> list[Action]:
        for durable in message.durable:
            held = self.leases.find(durable.sample_id, durable.epoch)
            if held is None:
                continue
            if held.acked(durable.length):
                self._acked_at = now
            if held.settled:
                self.leases.drop(held)
        return []

    def _fail_handle(self, handle: int, reason: str) -> list[Action]:
        held = self.leases.of_handle(handle)
        return self._fail(held, reason) if held is not None else []

    def _fail(self, held: HeldLease, reason: str) -> list[Action]:
        actions = self._flush()  # what it made before stays
        self.leases.drop(held)
        return [*actions, *self._send(wire.SampleFailed(held.lease.sample_id, held.lease.epoch, reason))]

    # ------------------------------------------------------------ leases

    def _assign(self, message: wire.Assign, now: float) -> list[Action]:
        if self._leaving:
            return []  # not held: the goodbye, and every heartbeat, says so
        # Only the awake are given work: if the Wake was lost, this is it.
        actions = self._wake(wire.Wake(), now)
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
        self._flush_at = now  # complete already: say so
        return actions

    def _forget(self, leases: Iterable[HeldLease]) -> list[Action]:
        """Drop leases with all their tokens."""
        handles = []
        for held in leases:
            self.leases.drop(held)
            if held.finish is None:
                handles.append(held.handle)
        return [Abort(tuple(handles))] if handles else []

    def _revoked(self, message: wire.Revoke, _now: float) -> list[Action]:
        over = set(message.leases)
        self._waiting = [w for w in self._waiting if (w.sample_id, w.epoch) not in over]
        found = (self.leases.find(sample_id, epoch) for sample_id, epoch in message.leases)
        return self._forget([held for held in found if held is not None])

    # ------------------------------------------------------------ weights, sleep

    def _use_weights(self, message: wire.UseWeights, now: float) -> list[Action]:
        if self._leaving or (self._wanted is not None and self._wanted.version == message.version):
            return []
        if message.version == self.loaded_version:
            return self._send(wire.WeightsLoaded(message.version, self.loaded_root))
        # Its tokens end here: a sample never mixes versions. What is finished stays until it is durable.
        actions = [*self._flush(), *self._forget([held for held in self.leases.all() if held.finish is None])]
        self._wanted, self._waiting, self.loaded_version = message, [], -1
        return [*actions, Load(message)]

    def _loaded(self, event: Loaded, now: float) -> list[Action]:
        if self._wanted is None or event.version != self._wanted.version:
            return [Note("superseded", f"version {event.version} was loaded after a newer one was wanted")]
        self.loaded_version, self.loaded_root, self._wanted = event.version, event.root, None
        waiting, self._waiting = self._waiting, []
        actions = self._send(wire.WeightsLoaded(event.version, event.root, event.pull_s, event.load_s))
        return actions + [a for lease in waiting for a in self._assigned(lease, now)]

    def _load_failed(self, event: LoadFailed, _now: float) -> list[Action]:
        if self._wanted is None or event.version != self._wanted.version:
            return []
        self._wanted, self._waiting = None, []
        return [Note("weights-failed", event.reason), *self._send(wire.WeightsFailed(event.version, event.reason))]

    def _sleep(self, _message: wire.Sleep, _now: float) -> list[Action]:
        if self._asleep:
            return self._send(wire.Asleep()) if self._slept else []
        self._asleep, self._waiting = True, []
        return [*self._flush(), *self._forget(self.leases.all()), SleepEngine()]

    def _wake(self, _message: wire.Wake, _now: float) -> list[Action]:
        if not self._asleep:
            return []
        self._asleep = self._slept = False
        return [WakeEngine()]

    def _fell_asleep(self, _event: Slept, _now: float) -> list[Action]:
        if not self._asleep:
            return []  # woken meanwhile: the engine does both in order
        self._slept = True
        return self._send(wire.Asleep())

    # ------------------------------------------------------------ leaving

    def _leave(self, leave: Leave, within_s: float, now: float) -> list[Action]:
        """Flush, say goodbye, go when it is acked or after `within_s`. A later reason only brings the deadline nearer."""
        if self._leaving is not None:
            self._leave_by = min(self._leave_by, now + within_s)
            return []
        self._leaving, self._leave_by, self._waiting = leave, now + within_s, []
        # That the engine died is worth a reconnect: the samples that it held may have killed it.
        to_say = self.leases.unacked() or leave.code == EXIT_ENGINE_FAILED
        if self._welcome is None or (self.phase is Phase.CONNECTING and not to_say):
            return self._gone(leave)  # nobody knows of us, or nothing is left to say
        handles = tuple(held.handle for held in self.leases.all() if held.finish is None)
        abort: list[Action] = [Abort(handles)] if handles else []
        return [*(self._farewell() if self.phase is Phase.JOINED else []), *abort]

    def _farewell(self) -> list[Action]:
        assert self._leaving is not None
        code = self._leaving.code
        goodbye = wire.Goodbye(self._leaving.reason, notice=code == EXIT_PREEMPTED, failed=code == EXIT_ENGINE_FAILED)
        return [*self._flush(), Send(goodbye)]

    def _gone(self, leave: Leave) -> list[Action]:
        self._enter(Phase.GONE)
        return [leave]
