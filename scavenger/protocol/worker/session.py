"""The worker's side of the conversation with the daemon: a sans-IO state machine. Theory of operation:

    CONNECTING --Connected--> REGISTERING --Welcome--> JOINED      each of the three --EndWorker--> GONE
        ^ ^                    |        ^              |  |
        | +-- hello unanswered +        +- HelloAgain -+  |
        +---------------- 3 heartbeats unanswered --------+

`handle(event, now)` takes one event and returns the actions that the driver performs, in order. The connection may be lost at any
moment and so may any message. Meanwhile the engine goes on, up to `max_unacked` tokens. Every token is kept until the daemon says that
it is durable, and after each Welcome everything above the durable length is sent again (`work`).

A worker that leaves stays in its phase until it is gone: it flushes, sends Goodbye, and ends when that is acknowledged or its deadline
has passed. Owns the phases and their deadlines. Knows no socket, thread or clock; `now` is monotonic seconds.

Boundary: sans-IO; the rollout worker performs its actions, and so does the simulated one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scavenger.backoff import backoff_s
from scavenger.errors import ScavengerError
from scavenger.protocol import messages
from scavenger.protocol.worker.events import (
    EXIT_DRAINED,
    EXIT_ENGINE_FAILED,
    EXIT_NO_DAEMON,
    EXIT_PREEMPTED,
    EXIT_REFUSED,
    NOT_SPECULATED,
    AddRefused,
    Bounded,
    Build,
    Built,
    Connect,
    Connected,
    EndWorker,
    EngineCrashed,
    Generated,
    KeyRefused,
    KvLoaded,
    KvTaken,
    LeaveKv,
    Loaded,
    LoadFailed,
    LogNote,
    PullFailed,
    Received,
    SendMessage,
    Serves,
    Slept,
    Terminate,
    TurnKvKept,
    Unreachable,
    Woken,
    WorkerAction,
    WorkerEvent,
    WorkerIdentity,
    WorkerLimits,
    WorkerPhase,
    WorkerTick,
)
from scavenger.protocol.worker.work import TokenBuffer, Work

#: Versions in a row of which the engine held other weights than were published; then it counts as dead.
MAX_MISMATCHES = 2
#: Which phases may follow, and on what.
PHASE_TRANSITIONS: dict[WorkerPhase, frozenset[WorkerPhase]] = {
    WorkerPhase.CONNECTING: frozenset(
        {
            WorkerPhase.CONNECTING,  # Unreachable, KeyRefused: another try after a pause
            WorkerPhase.REGISTERING,  # Connected: the hello is sent
            WorkerPhase.GONE,  # EndWorker
        }
    ),
    WorkerPhase.REGISTERING: frozenset(
        {
            WorkerPhase.JOINED,  # Welcome
            WorkerPhase.CONNECTING,  # the hello was not answered, Rejected for now, Unreachable, KeyRefused
            WorkerPhase.GONE,  # EndWorker
        }
    ),
    WorkerPhase.JOINED: frozenset(
        {
            WorkerPhase.REGISTERING,  # HelloAgain: the daemon does not know this connection
            WorkerPhase.CONNECTING,  # three heartbeats unanswered, Rejected for now, Unreachable, KeyRefused
            WorkerPhase.GONE,  # EndWorker
        }
    ),
    WorkerPhase.GONE: frozenset(),
}


class IllegalWorkerPhase(ScavengerError):
    """A bug: the session was asked for a phase that cannot follow."""


class Session:
    """One worker process's session. The driver connects first (as for `Connect(0)`), sets `progress` and `speculated` before each `handle`,
    and lets the engine generate only while `may_generate` says so.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        limits: WorkerLimits,
        now: float,
        new_buffer: Callable[[], TokenBuffer] = TokenBuffer,
    ) -> None:
        self.phase = WorkerPhase.CONNECTING
        self.work = Work(limits.message_tokens, now, new_buffer, lease_limit=0 if identity.guest else None)
        self.progress = 0  # decode iterations of the engine, for heartbeats
        self.speculated = NOT_SPECULATED  # as the engine says, for heartbeats too
        self._identity = identity
        self._limits = limits
        self._welcome: messages.Welcome | None = None
        self._spec: messages.EngineSpec | None = None
        self._ending: EndWorker | None = None
        self._end_by = 0.0
        self._goodbye_is_acked = False
        self._names_wanted = False  # that acknowledgement named blocks that other workers were told to fetch
        self._heard_at = now
        self._attempts = 0
        self._refusals = 0
        # The last refusal that may pass, since the last Welcome.
        self._turned_away: messages.Rejected | None = None
        self._reply_by = 0.0
        self._unanswered = 0
        self._heartbeat_at = 0.0

    # ------------------------------------------------------------ for the driver

    def handle(self, event: WorkerEvent, now: float) -> list[WorkerAction]:
        """Take one event; returns what to do, in order. Does nothing once the session is GONE."""
        if self._is_gone():
            return []
        actions = _ON_EVENT[type(event)](self, event, now)
        return actions if self._is_gone() else [*actions, *self._due(now)]

    def next_deadline(self) -> float:
        """When a `WorkerTick` is due if nothing else happens."""
        times = [self._heard_at + self._limits.orphan_s]
        if self._ending:
            times.append(self._end_by)
        if self.phase is WorkerPhase.REGISTERING:
            times.append(self._reply_by)
        if self.phase is WorkerPhase.JOINED:
            times.append(self._heartbeat_at)
            if self.work.flush_at is not None:
                times.append(self.work.flush_at)
        return min(times)

    @property
    def may_generate(self) -> bool:
        """False while too much is held that may be lost: the engine then pauses."""
        return self._ending is None and self.work.leases.unacked() < self._limits.max_unacked

    @property
    def leaving(self) -> EndWorker | None:
        """How it is about to end; None: it stays."""
        return self._ending

    # ------------------------------------------------------------ connection

    def _is_gone(self) -> bool:
        return self.phase is WorkerPhase.GONE

    def _enter(self, phase: WorkerPhase) -> None:
        if phase not in PHASE_TRANSITIONS[self.phase]:
            raise IllegalWorkerPhase(f"the session cannot go from {self.phase.value} to {phase.value}")
        self.phase = phase
        self.work.hears = phase is WorkerPhase.JOINED

    def _connected(self, _event: Connected, now: float) -> list[WorkerAction]:
        return self._register(now)

    def _unreachable(self, event: Unreachable, now: float) -> list[WorkerAction]:
        return [LogNote("unreachable", event.reason), *self._reconnect(now)]

    def _register(self, now: float) -> list[WorkerAction]:
        if self.phase is not WorkerPhase.REGISTERING:  # else the hello goes over yet another new socket
            self._enter(WorkerPhase.REGISTERING)
        self._reply_by = now + self._limits.hello_s
        me = self._identity
        hello = messages.WorkerHello(
            protocol=messages.PROTOCOL,
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
            loaded_version=self.work.loaded_version,
            held=self.work.held(),
            slot=me.slot,
            leaving=self._ending is not None,
            loaded_root=self.work.loaded_root,
            loaded_merged=self.work.loaded_merged,
            ledger=self.work.ledger,
            cache_tokens=self.work.cache_tokens,
            best_batch=self.work.best_batch,
            memory=self.work.memory,
            memory_order=self.work.memory_order,
            bytes_held=self.work.bytes_held,
            lease_limit=self.work.lease_limit,
        )
        return [SendMessage(hello)]

    def _register_again(self, message: messages.HelloAgain, now: float) -> list[WorkerAction]:
        # The daemon answers each message so; one hello is enough for all.
        return (
            [LogNote("hello-again", message.reason), *self._register(now)]
            if self.phase is WorkerPhase.JOINED
            else []
        )

    def _key_refused(self, event: KeyRefused, now: float) -> list[WorkerAction]:
        if self._ending is not None and self._ending.hands_to:
            return self._gone(self._ending)  # the key of the run that it leaves is over: what is durable is
        self._refusals += 1
        if self._refusals >= self._limits.refusals:
            return self._gone(
                EndWorker(
                    EXIT_REFUSED,
                    event.reason,
                    "a key is minted for one job and dies with it; submit a new job",
                )
            )
        return [LogNote("key-refused", event.reason), *self._reconnect(now)]

    def _reconnect(self, now: float) -> list[WorkerAction]:
        self._enter(WorkerPhase.CONNECTING)
        limits = self._limits
        self._attempts += 1
        delay = backoff_s(limits.backoff_s, limits.backoff_max_s, self._attempts)
        # Half of the wait is spread by the session's own number, lest a whole fleet come back in one instant.
        return [Connect(delay * (0.5 + 0.5 * self._identity.jitter))]

    def _welcomed(self, welcome: messages.Welcome, now: float) -> list[WorkerAction]:
        if self.phase is not WorkerPhase.REGISTERING:
            return [LogNote("stray-welcome", self.phase.value)]
        if self._spec is not None and welcome.engine != self._spec:
            return self._gone(EndWorker(EXIT_PREEMPTED, "the run's engine changed; a fresh worker is needed"))
        self._enter(WorkerPhase.JOINED)
        first, self._welcome = self._spec is None, welcome
        self._attempts = self._unanswered = self._refusals = 0
        self._heartbeat_at = now + welcome.heartbeat_s
        self._turned_away = None
        void = self.work.welcomed(welcome, now)
        note = LogNote(
            "welcome", f"worker {welcome.worker_id} of run {welcome.run}, generation {welcome.generation}"
        )
        if self._ending:
            return [note, *void, *self._farewell()]
        if first:
            self._spec = welcome.engine
            asleep = self.work.bound(0, now, built=True) if self.work.lease_limit == 0 else []
            return [note, Build(welcome.engine), *asleep]
        return [note, *void, *self.work.resume()]

    def _rejected(self, message: messages.Rejected, now: float) -> list[WorkerAction]:
        if message.retry:
            # Said once: a worker that came before its run, or its allocation's record, is turned away until that is there.
            news = self._turned_away is None or self._turned_away.reason != message.reason
            self._turned_away = message
            note = [LogNote("rejected", f"{message.reason}; trying again")] if news else []
            return [*note, *self._reconnect(now)]
        return self._gone(EndWorker(EXIT_REFUSED, message.reason, message.remedy))

    def _received(self, event: Received, now: float) -> list[WorkerAction]:
        message = event.message
        if not isinstance(message, messages.Rejected):
            self._heard_at = now  # a refusal does not count: `orphan_s` bounds refusals too
        self._unanswered = 0
        if self._spec is None and isinstance(message, _ENGINE_COMMANDS):
            # It follows a Welcome that came too late to be accepted. There is no engine yet, and the daemon will repeat the order.
            return [LogNote("command-without-engine", type(message).__name__)]
        return _ON_MESSAGE[type(message)](self, message, now)

    # ------------------------------------------------------------ time

    def _due(self, now: float) -> list[WorkerAction]:
        """What time alone asks for."""
        if self._ending and now >= self._end_by:
            return self._gone(self._ending)
        if now - self._heard_at >= self._limits.orphan_s:
            return self._gone(self._orphaned())
        if self.phase is WorkerPhase.REGISTERING and now >= self._reply_by:
            return [LogNote("no-answer", "the hello was not answered"), *self._reconnect(now)]
        if self.phase is not WorkerPhase.JOINED or self._welcome is None:
            return []
        if now >= self._heartbeat_at:
            return self._heartbeat(self._welcome.heartbeat_s, now)
        if self.work.flush_at is not None and now >= self.work.flush_at:
            return self.work.flush()
        return []

    def _orphaned(self) -> EndWorker:
        waited, away = f"for {self._limits.orphan_s:g} s", self._turned_away
        if away is not None:
            return EndWorker(EXIT_NO_DAEMON, f"turned away {waited}: {away.reason}", away.remedy)
        return EndWorker(EXIT_NO_DAEMON, f"no daemon {waited}", "start it: `scavenger daemon`")

    def _heartbeat(self, heartbeat_s: float, now: float) -> list[WorkerAction]:
        # Heartbeats are counted, not timed: after a SIGSTOP the answers may be waiting in the socket.
        if self._unanswered >= self._limits.missed_heartbeats:
            return [
                LogNote("silent", f"{self._unanswered} heartbeats without an answer"),
                *self._reconnect(now),
            ]
        self._unanswered += 1
        self._heartbeat_at = now + heartbeat_s
        unacked_s = self._limits.missed_heartbeats * heartbeat_s
        return self.work.beat(self.progress, now, unacked_s, self.speculated)

    # ------------------------------------------------------------ leaving

    def _begin_end(self, end: EndWorker, within_s: float, now: float) -> list[WorkerAction]:
        """Flush, say goodbye, go when it is acked or after `within_s`. A later reason only brings the deadline nearer; one to end for good
        stands before one to change hands."""
        if self._ending is not None:
            self._end_by = min(self._end_by, now + within_s)
            if self._ending.hands_to and not end.hands_to:
                self._ending = end
            return []
        self._ending, self._end_by = end, now + within_s
        abort = self.work.close(keep=end.code != EXIT_ENGINE_FAILED)
        # That the engine died is worth a reconnect: the samples that it held may have killed it.
        to_say = self.work.leases.unacked() or end.code == EXIT_ENGINE_FAILED
        if self.phase is WorkerPhase.CONNECTING and not to_say:
            return self._gone(end)  # no daemon knows of this worker, or it has all the tokens
        return [*(self._farewell() if self.phase is WorkerPhase.JOINED else []), *abort]

    def _load_failed(self, event: LoadFailed, now: float) -> list[WorkerAction]:
        """The second mismatch in a row ends the engine, and counts against its node: the weights in memory were checked in between."""
        actions = self.work.load_failed(event, now)
        died = self.work.mismatches >= MAX_MISMATCHES
        return [
            *actions,
            *(
                self._begin_end(EndWorker(EXIT_ENGINE_FAILED, event.reason), self._limits.drain_s, now)
                if died
                else []
            ),
        ]

    def _bounded(self, event: Bounded, now: float) -> list[WorkerAction]:
        """The daemon is told of another number at once, and not only with the next heartbeat. Its host repeats one to hear what runs."""
        news = event.leases != self.work.lease_limit
        actions = self.work.bound(event.leases, now, built=self._spec is not None)
        if news and self.phase is WorkerPhase.JOINED:
            self._heartbeat_at = now
        return actions

    def _farewell(self) -> list[WorkerAction]:
        assert self._ending is not None
        code = self._ending.code
        goodbye = messages.Goodbye(
            messages.words(self._ending.reason),
            notice=code == EXIT_PREEMPTED,
            failed=code == EXIT_ENGINE_FAILED,
        )
        return [*self.work.flush(), SendMessage(goodbye)]

    def _goodbye_acked(self, message: messages.GoodbyeAck, now: float) -> list[WorkerAction]:
        """All is durable. Who goes on with its samples may still want their KV blocks, for a moment, and those of turns that ended here."""
        if self._ending is None or (self._goodbye_is_acked and not message.wanted):
            return []  # an answer to a goodbye that was said again: what the first one named is waited for yet
        if not self.work.kv_kept and not message.wanted:
            return self._gone(self._ending)
        self._end_by, self._goodbye_is_acked = min(self._end_by, now + self._limits.kv_s), True
        self._names_wanted = bool(message.wanted)
        return [LeaveKv(message.wanted)] if message.wanted else []

    def _kv_taken(self, event: KvTaken, _now: float) -> list[WorkerAction]:
        """None is left: it goes. A count that was on its way when the daemon named blocks to wait for has none of these."""
        self.work.kv_taken(event)
        counts_all = event.wanted_named or not self._names_wanted
        if self._ending is not None and self._goodbye_is_acked and counts_all and not event.left:
            return self._gone(self._ending)
        return []

    def _gone(self, end: EndWorker) -> list[WorkerAction]:
        self._enter(WorkerPhase.GONE)
        return [end]


_Handler = Callable[[Session, Any, float], list[WorkerAction]]
#: Messages that need an engine.
_ENGINE_COMMANDS = (
    messages.UseWeights,
    messages.PullAhead,
    messages.Assign,
    messages.SiblingTokens,
    messages.FetchKv,
    messages.DropKv,
    messages.Yield,
    messages.Revoke,
    messages.Sleep,
    messages.Wake,
    messages.LendSlots,
)

_ON_EVENT: dict[type[WorkerEvent], _Handler] = {
    Received: Session._received,
    Connected: Session._connected,
    Unreachable: Session._unreachable,
    KeyRefused: Session._key_refused,
    Generated: lambda s, e, now: s.work.generated(e, now),
    AddRefused: lambda s, e, now: s.work.add_refused(e, now),
    EngineCrashed: lambda s, e, now: s._begin_end(
        EndWorker(EXIT_ENGINE_FAILED, e.reason), s._limits.drain_s, now
    ),
    Loaded: lambda s, e, now: s.work.loaded(e, now),
    LoadFailed: Session._load_failed,
    PullFailed: lambda s, e, now: s.work.pull_failed(e, now),
    Built: lambda s, e, now: s.work.built(e, now),
    Woken: lambda s, e, now: s.work.woken(e, now),
    Serves: lambda s, e, now: s.work.serves(e, now),
    Bounded: Session._bounded,
    Slept: lambda s, e, now: s.work.fell_asleep(e, now),
    KvLoaded: lambda s, e, now: s.work.kv_loaded(e, now),
    KvTaken: Session._kv_taken,
    TurnKvKept: lambda s, e, now: s.work.turn_kv_kept(e, now),
    Terminate: lambda s, e, now: s._begin_end(EndWorker(EXIT_PREEMPTED, e.reason), s._limits.notice_s, now),
    WorkerTick: lambda _s, _e, _now: [],
}
_ON_MESSAGE: dict[type[messages.Message], _Handler] = {
    messages.Welcome: Session._welcomed,
    messages.Rejected: Session._rejected,
    messages.HelloAgain: Session._register_again,
    messages.HeartbeatAck: lambda s, m, now: s.work.beat_acked(m, now),
    messages.UseWeights: lambda s, m, now: s.work.use_weights(m, now),
    messages.PullAhead: lambda s, m, now: s.work.pull_ahead(m, now),
    messages.Assign: lambda s, m, now: s.work.assign(m, now),
    messages.Yield: lambda s, m, now: s.work.yield_(m, now),
    messages.Revoke: lambda s, m, now: s.work.revoked(m, now),
    messages.Ack: lambda s, m, now: s.work.acked(m, now),
    messages.SiblingTokens: lambda s, m, now: s.work.siblings(m, now),
    messages.FetchKv: lambda s, m, now: s.work.fetch_kv(m, now),
    messages.DropKv: lambda s, m, now: s.work.drop_kv(m, now),
    messages.Sleep: lambda s, m, now: s.work.sleep(m, now),
    messages.Wake: lambda s, m, now: s.work.wake(m, now),
    messages.Drain: lambda s, m, now: s._begin_end(EndWorker(EXIT_DRAINED, m.reason), s._limits.drain_s, now),
    messages.ChangeRun: lambda s, m, now: s._begin_end(
        EndWorker(EXIT_DRAINED, m.reason, hands_to=m.public_key), s._limits.drain_s, now
    ),
    messages.LendSlots: lambda s, m, now: s.work.lend(m, now),
    messages.GoodbyeAck: Session._goodbye_acked,
}
