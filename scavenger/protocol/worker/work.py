"""A worker's state for its run: the weights it holds, the leases it serves, whether it sleeps, and what the daemon knows of that.

Sans-IO, like `session`, which passes messages on and keeps two flags: `hears` (the daemon listens) and `closed` (the worker leaves, and
begins nothing new). What cannot be sent now is sent after the next Welcome.

`LeaseTable` keeps the tokens between the engine and the daemon, until they are durable. Lengths count from the sample's first completion
token: `durable <= sent <= length`. Tokens below `durable` are forgotten, all others are kept, however often they were sent.

Knows nothing of connections, retries or goodbyes; `now` is monotonic seconds.

Boundary: what is served, apart from how the connection is kept.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from scavenger.errors import WireError
from scavenger.protocol import messages
from scavenger.protocol.kv import MOST_NBYTES
from scavenger.protocol.messages import (
    Chunk,
    Held,
    Lease,
    pack_logprobs,
    pack_tokens,
    unpack_tokens,
    unsqueeze_tokens,
)
from scavenger.protocol.worker.events import (
    NOT_SPECULATED,
    Abort,
    Add,
    AddRefused,
    Built,
    Delta,
    DropTurnKv,
    Generated,
    GroupName,
    HearSiblings,
    KeepKv,
    KeepOtherKv,
    KvLoaded,
    KvTaken,
    LeaveKv,
    Lend,
    Loaded,
    LoadFailed,
    LoadWeights,
    LogNote,
    MoreHolders,
    PullFailed,
    PullWeights,
    Request,
    SendMessage,
    Serves,
    SiblingSaid,
    SleepEngine,
    Slept,
    Speculated,
    TurnKvKept,
    WakeEngine,
    Woken,
    WorkerAction,
)

#: Of a chunk: an id and two logprobs.
TOKEN_NBYTES = 12
#: A group's samples have one prompt, and come to an engine one after the other.
_prompt_tokens = functools.lru_cache(maxsize=64)(unpack_tokens)


class TokenBuffer:
    """The tokens of one lease that are not durable yet, with both logprobs of each, in order. The simulator's only counts."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._raw: list[float] = []
        self._routing = bytearray()  # as many bytes for each token

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, delta: Delta) -> None:
        self._tokens += delta.token_ids
        self._logprobs += delta.logprobs
        self._raw += delta.raw_logprobs
        self._routing += delta.routing

    def forget(self, count: int) -> None:
        """The first `count` are durable."""
        del self._routing[: count * self._width]
        del self._tokens[:count], self._logprobs[:count], self._raw[:count]

    @property
    def _width(self) -> int:
        """Bytes of routing a token."""
        return len(self._routing) // len(self._tokens) if self._tokens else 0

    def unpacked(self, accepted: bytes) -> tuple[int, ...]:
        """The tokens that the sample had when it was leased, for the engine."""
        return unpack_tokens(accepted)

    def packed(self, first: int, stop: int) -> tuple[bytes, bytes, bytes, bytes]:
        """Tokens `first` up to `stop` as a chunk has them: ids, logprobs, raw logprobs, routing."""
        return (
            pack_tokens(self._tokens[first:stop]),
            pack_logprobs(self._logprobs[first:stop]),
            pack_logprobs(self._raw[first:stop]),
            bytes(self._routing[first * self._width : stop * self._width]),
        )


class WorkerLease:
    """One lease. `handle` names it to the engine."""

    def __init__(self, lease: Lease, handle: int, buffer: TokenBuffer) -> None:
        self.lease = lease
        self.handle = handle
        self.base = len(lease.accepted) // 4
        self.durable = self.base
        self.sent = self.base
        self.finish: str | None = None
        self.finish_sent = False
        self.yielded = False  # nothing more is generated under it; its tokens stay until a Revoke says that they are durable
        self.yield_sent = False
        self._finish_acked = False
        self._buffer = buffer
        if self.base and unpack_tokens(lease.accepted[-4:])[0] in lease.sampling.stop_token_ids:
            self.finish = "stop"
        elif self.base >= lease.sampling.max_tokens:
            self.finish = "length"

    @property
    def length(self) -> int:
        """All tokens of the sample that the worker has, accepted ones included."""
        return self.durable + len(self._buffer)

    @property
    def unacked(self) -> int:
        return len(self._buffer)

    @property
    def pending(self) -> int:
        """Tokens never sent on this connection."""
        return self.length - self.sent

    @property
    def runs(self) -> bool:
        """Whether the engine works on it."""
        return self.finish is None and not self.yielded

    @property
    def finished_and_durable(self) -> bool:
        """Nothing is left to do: it is complete and durable. A finish is durable with the token that it came with."""
        return (
            self.finish is not None and not self.unacked and (self.length > self.base or self._finish_acked)
        )

    def request(self, history: str) -> Request:
        """The engine's request: what is left of the sample's one token budget. `history`: of the ledger."""
        lease = self.lease
        return Request(
            handle=self.handle,
            prompt=_prompt_tokens(lease.prompt),
            accepted=self._buffer.unpacked(lease.accepted),
            max_new_tokens=lease.sampling.max_tokens - self.base,
            sampling=lease.sampling,
            seed=lease.seed,
            key=lease.key,
            begun_version=lease.begun_version,
            history=history,
            kv=lease.kv,
            leaves_kv=lease.leaves_kv,
        )

    @property
    def cached(self) -> int:
        """Tokens of its context whose KV blocks the engine has, when that has made all that came of it: all but the last."""
        return len(self.lease.prompt) // 4 + self.length - 1

    def held(self) -> Held:
        return Held(self.lease.sample_id, self.lease.epoch, self.length)

    def extend(self, delta: Delta) -> None:
        self._buffer.extend(delta)
        self.finish = delta.finish

    def acked(self, length: int) -> bool:
        """Tokens below `length` are durable. True when that is news."""
        self._finish_acked = self._finish_acked or (self.finish_sent and length >= self.length)
        # Never beyond what we have: the rest of it is another worker's, and a Revoke is on its way.
        news = min(length, self.length) - self.durable
        if news <= 0:
            return False
        self._buffer.forget(news)
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
        first, stop = self.sent - self.durable, min(self.sent - self.durable + most, len(self._buffer))
        finish = self.finish if stop == len(self._buffer) else None
        tokens, logprobs, raw_logprobs, routing = self._buffer.packed(first, stop)
        chunk = Chunk(
            sample_id=self.lease.sample_id,
            epoch=self.lease.epoch,
            offset=self.sent,
            version=self.lease.version,
            tokens=tokens,
            logprobs=logprobs,
            raw_logprobs=raw_logprobs,
            finish=finish,
            routing=routing,
        )
        self.sent = self.durable + stop
        self.finish_sent = finish is not None
        return chunk


class LeaseTable:
    """All leases of a worker, by sample and by engine handle. At most one lease a sample; the newest epoch wins.

    `changed` must be called with a lease that got tokens, ended or was given back: it is then *unsent* until the next flush, and *owed* an
    ack until all its tokens are durable and it runs.
    """

    def __init__(self, new_buffer: Callable[[], TokenBuffer]) -> None:
        self._new_buffer = new_buffer
        self._by_sample: dict[int, WorkerLease] = {}
        self._by_handle: dict[int, WorkerLease] = {}
        self._unsent: dict[int, WorkerLease] = {}  # by handle
        self._owed: dict[int, WorkerLease] = {}  # by handle
        self._handles = 0

    def all(self) -> tuple[WorkerLease, ...]:
        return tuple(self._by_sample.values())

    def running(self) -> list[WorkerLease]:
        """Those that the engine generates."""
        return [held for held in self._by_sample.values() if held.runs]

    def find(self, sample_id: int, epoch: int | None = None) -> WorkerLease | None:
        """The lease of a sample, if it is of this epoch."""
        held = self._by_sample.get(sample_id)
        return held if held is not None and epoch in (None, held.lease.epoch) else None

    def of_handle(self, handle: int) -> WorkerLease | None:
        return self._by_handle.get(handle)

    def new_handle(self) -> int:
        """Another one than all before."""
        self._handles += 1
        return self._handles

    def take(self, lease: Lease) -> WorkerLease:
        held = WorkerLease(lease, self.new_handle(), self._new_buffer())
        self._by_sample[lease.sample_id] = held
        self._by_handle[held.handle] = held
        if not held.runs:
            self.changed(held)
        return held

    def drop(self, held: WorkerLease) -> None:
        del self._by_sample[held.lease.sample_id]
        del self._by_handle[held.handle]
        self._unsent.pop(held.handle, None)
        self._owed.pop(held.handle, None)

    def changed(self, held: WorkerLease) -> None:
        """There may be something to send of it, and to be acked."""
        self._unsent[held.handle] = self._owed[held.handle] = held

    def acked(self, held: WorkerLease, length: int) -> bool:
        """Its tokens below `length` are durable. True when that is news. Drops it when nothing is left to do."""
        news = held.acked(length)
        if held.finished_and_durable:
            self.drop(held)
        elif held.runs and not held.unacked:
            self._owed.pop(held.handle, None)
        return news

    def rewind(self) -> None:
        """Send again whatever may have been lost."""
        for held in self._owed.values():
            held.rewind()
            self._unsent[held.handle] = held

    def unacked(self) -> int:
        """Tokens kept because they are not durable yet."""
        return sum(held.unacked for held in self._owed.values())

    def ack_owed(self) -> bool:
        """Whether the daemon owes an ack."""
        return bool(self._owed)

    def take_yields(self) -> list[WorkerLease]:
        """Leases to give back whose Yielded is not sent. Counts it as sent. Call it when all `chunks` are: nothing is unsent then."""
        found = [
            held
            for held in self._unsent.values()
            if held.yielded and not held.yield_sent and held.finish is None
        ]
        self._unsent.clear()
        for held in found:
            held.yield_sent = True
        return found

    def held(self, ahead: Mapping[int, int] = MappingProxyType({})) -> tuple[Held, ...]:
        return tuple(
            [
                Held(held.lease.sample_id, held.lease.epoch, ahead.get(held.handle) or held.length)
                for held in self._by_sample.values()
            ]
        )

    def chunks(self, most: int) -> list[Chunk]:
        """At most `most` tokens to send, of all samples that have any."""
        found = []
        for held in self._unsent.values():
            if most <= 0:
                break
            chunk = held.chunk(most)
            if chunk is not None:
                found.append(chunk)
                most -= len(chunk.tokens) // 4
        return found


class Work:
    """The work of one session. Every method returns what to do, in order."""

    def __init__(
        self,
        message_tokens: int,
        now: float,
        new_buffer: Callable[[], TokenBuffer] = TokenBuffer,
        lease_limit: int | None = None,
    ) -> None:
        self.leases = LeaseTable(new_buffer)
        self.loaded_version = -1
        self.hears = False
        self.closed = False
        self.flush_at: float | None = None
        self.loaded_root = self.loaded_merged = b""
        self.mismatches = 0  # versions in a row of which the engine held other weights than were published
        self._wanted: messages.UseWeights | None = None  # being pulled or loaded
        self._ahead = -1  # version that was pulled beside the work, or is on its way
        self._serving: dict[int, messages.Serving] = {}  # what is given out to other workers
        #: Of groups of whose siblings the engine was told, by their key without its index; and when a sample of each was last running.
        self._told: dict[tuple[str, int, int], tuple[GroupName, float]] = {}
        self._waiting: list[messages.Lease] = []  # assigned for the version that is being loaded
        self.memory: messages.Memory = "awake"  # of its GPUs: what the engine does with it
        self.memory_order = 0  # number of the last order to sleep or wake that came
        self.bytes_held = 0  # as the engine said last
        self._engine_order = (
            0  # of the last Sleep or Wake that the engine was given; its older answers are ignored
        )
        self.lease_limit = lease_limit  # leases that its host lets it have; None: it has no such host
        self.lends = ""  # the key of the last order to lend slots
        self._terms: messages.Welcome | None = None
        self._message_tokens = message_tokens
        self._acked_at = now
        self._rate_tokens = self.generated_tokens = 0
        self._rate_since = now
        self.cache_tokens = self.best_batch = 0  # as the engine says, once it is built
        self._wake_s = 0.0
        self._heard = 0  # number of the last heartbeat ack of this conversation
        #: Between the last token under one version and the first under the next, last time.
        self.weights_pause_s = 0.0
        self._token_at: float | None = None  # when the last token came; None: none since the engine slept
        self._paused_at: float | None = None  # when the last one under an older version came, and none since
        self._kv_source: messages.WeightSource | None = (
            None  # where others get what this worker keeps of its KV cache
        )
        self._kv_token_nbytes = 0
        self._kv_offers: list[messages.KvOffer] = []  # not said yet
        self.kv_kept = 0  # samples whose blocks are kept here, and nobody has taken
        self._turn_kv: dict[
            int, messages.KvOffer
        ] = {}  # by number, of turns: on their way to where they are kept
        self._turn_offers: list[messages.KvOffer] = []  # kept, and not said yet
        self._fetched_for: set[int] = set()  # numbers of what another worker keeps yet

    # ------------------------------------------------------------ the conversation

    def welcomed(self, welcome: messages.Welcome, now: float) -> list[WorkerAction]:
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
        self._wanted, self._waiting, self.loaded_version, self._ahead = None, [], -1, -1
        self._turn_kv, self._turn_offers = {}, []
        self._fetched_for.clear()
        self.loaded_root = self.loaded_merged = b""
        return [
            LogNote(
                "ledger-restored",
                f"{len(dropped)} leases and the loaded weights are of its other history: dropped",
            ),
            *actions,
        ]

    @property
    def ledger(self) -> str:
        """Which history of the ledger all of this is of."""
        return self._terms.ledger if self._terms is not None else ""

    def resume(self) -> list[WorkerAction]:
        """Send what waited for a connection; the hello has the rest."""
        return [
            *self.flush(),
            *self._acknowledge_memory_order(),
            *(action for serving in self._serving.values() for action in self._say_serving(serving)),
        ]

    def close(self, *, keep: bool) -> list[WorkerAction]:
        """The worker leaves: stop the engine's requests. Their tokens stay until they are durable; with `keep` their KV blocks too."""
        self.closed, self._waiting = True, []
        running = self.leases.running()
        kept = self._keep_kv(running) if keep else []
        leave: list[WorkerAction] = [LeaveKv()] if self._kv_source is not None else []
        handles = tuple(held.handle for held in running)
        # `LeaveKv` is answered with how much is waited for: what is kept now is counted in.
        return [*kept, *leave, *([Abort(handles)] if handles else [])]

    def beat(
        self, progress: int, now: float, unacked_s: float, speculated: Speculated = NOT_SPECULATED
    ) -> list[WorkerAction]:
        """The heartbeat, after all that is unsent; everything is unsent again when no ack came for `unacked_s`."""
        rate = self._rate_tokens / max(now - self._rate_since, 1e-9)
        self._rate_tokens, self._rate_since = 0, now
        if self.leases.ack_owed() and now - self._acked_at >= unacked_s:
            # The daemon answers and yet acks nothing: a message was lost. Sending again is a no-op if it was not.
            self._rewind(now)
        beat = SendMessage(self.heartbeat(progress, rate, speculated=speculated))
        return [*self._forget_groups(now), *self.flush(), beat]

    def heartbeat(
        self,
        progress: int,
        rate: float,
        ahead: Mapping[int, int] = MappingProxyType({}),
        speculated: Speculated = NOT_SPECULATED,
    ) -> messages.Heartbeat:
        """What a heartbeat says now. `ahead`: lengths, by handle, of requests of which the engine has not given all that it generated."""
        memory = (self.memory, self.memory_order, self.bytes_held)
        return messages.Heartbeat(
            self.held(ahead),
            progress,
            self.loaded_version,
            rate,
            self._heard,
            self._wake_s,
            *memory,
            self.weights_pause_s,
            self._ahead,
            speculated.drafted,
            speculated.accepted,
            speculated.verifications,
            self.lease_limit,
            self.lends,
        )

    def lend(self, message: messages.LendSlots, _now: float) -> list[WorkerAction]:
        """Once for each key: orders are repeated until a heartbeat names it."""
        if message.public_key == self.lends or self.closed:
            return []
        self.lends = message.public_key
        return [Lend(message)]

    def beat_acked(self, message: messages.HeartbeatAck, _now: float) -> list[WorkerAction]:
        self._heard = message.number
        return []

    def held(self, ahead: Mapping[int, int] = MappingProxyType({})) -> tuple[messages.Held, ...]:
        """Every lease that was received and not given back, those that wait for their version among them."""
        waiting = (messages.Held(w.sample_id, w.epoch, len(w.accepted) // 4) for w in self._waiting)
        return (*self.leases.held(ahead), *waiting)

    def flush(self) -> list[WorkerAction]:
        """Everything not yet sent on this connection, in messages of bounded size."""
        self.flush_at = None
        if not self.hears:
            return []
        actions: list[WorkerAction] = []
        most = self._tokens_a_message()
        while chunks := self.leases.chunks(most):
            actions.append(SendMessage(messages.Chunks(tuple(chunks))))
            if sum([len(chunk.tokens) for chunk in chunks]) < 4 * most:
                break  # it had room for more, and there was none
        actions += self._offer_kv()
        back = self.leases.take_yields()
        if back:
            actions.append(SendMessage(messages.Yielded(tuple(held.held() for held in back))))
        return actions

    def _tokens_a_message(self) -> int:
        routing = self._terms.engine.routing if self._terms is not None else 0
        return max(1, self._message_tokens * TOKEN_NBYTES // (TOKEN_NBYTES + routing))

    def _send(self, message: messages.WorkerMessage) -> list[WorkerAction]:
        return [SendMessage(message)] if self.hears else []

    def _rewind(self, now: float) -> None:
        self._acked_at = now
        self.leases.rewind()

    # ------------------------------------------------------------ tokens

    def generated(self, event: Generated, now: float) -> list[WorkerAction]:
        actions: list[WorkerAction] = []
        terms = self._terms
        if not self.leases.ack_owed():
            self._acked_at = now  # nothing was owed until now
        for delta in event.deltas:
            held = self.leases.of_handle(delta.handle)
            if held is None or held.yielded or self.closed:
                continue  # revoked or given back while the engine worked on it, or too late for the goodbye
            if delta.error is not None:
                actions += self._fail(held, delta.error)
                continue
            waited_for = held.lease.key.purpose == messages.TURN and (
                held.length == held.base or delta.finish is not None
            )
            held.extend(delta)
            self.leases.changed(held)
            if delta.finish is not None and held.lease.leaves_kv:
                actions += self._keep_turn_kv(held)
            self._rate_tokens += len(delta.token_ids)
            self.generated_tokens += len(delta.token_ids)
            if delta.token_ids:
                self._token_at = now
                actions += self._resumed(now)
            if waited_for or (terms is not None and held.pending >= terms.flush_tokens):
                self.flush_at = now  # an agent waits for the first token of its turn, and for the last
        if self.flush_at is None and terms is not None:
            self.flush_at = now + terms.flush_ms / 1000.0
        return actions

    def _resumed(self, now: float) -> list[WorkerAction]:
        """A token came: if it is the first under its version, the load of that cost the time since the last one before."""
        if self._paused_at is None:
            return []
        self.weights_pause_s, self._paused_at = now - self._paused_at, None
        return [LogNote("weights-pause", f"{self.weights_pause_s:.3f} s to version {self.loaded_version}")]

    def acked(self, message: messages.Ack, now: float) -> list[WorkerAction]:
        for durable in message.durable:
            held = self.leases.find(durable.sample_id, durable.epoch)
            if held is not None and self.leases.acked(held, durable.length):
                self._acked_at = now
        return []

    def add_refused(self, event: AddRefused, _now: float) -> list[WorkerAction]:
        held = self.leases.of_handle(event.handle)
        return self._fail(held, event.reason) if held is not None else []

    def _fail(self, held: WorkerLease, reason: str) -> list[WorkerAction]:
        actions = self.flush()  # what it made before stays
        self.leases.drop(held)
        return [
            *actions,
            *self._send(
                messages.SampleFailed(held.lease.sample_id, held.lease.epoch, messages.words(reason))
            ),
        ]

    # ------------------------------------------------------------ leases

    def assign(self, message: messages.Assign, now: float) -> list[WorkerAction]:
        if self.closed:
            return []  # not held: the goodbye, and every heartbeat, says so
        if self.lease_limit is not None:
            return self._assigned_within(self.lease_limit, message.leases, now)
        if self.memory in (
            "falling-asleep",
            "asleep",
        ):  # the order to wake was lost, and is repeated: nothing else may wake it
            return [LogNote("asleep", f"{len(message.leases)} leases came to an engine that sleeps")]
        return [action for lease in message.leases for action in self._assigned(lease, now)]

    def _assigned_within(
        self, lease_limit: int, leases: Sequence[messages.Lease], now: float
    ) -> list[WorkerAction]:
        """What does not fit any more goes back untouched: the daemon assigned it before it knew."""
        actions: list[WorkerAction] = []
        back = []
        for lease in leases:
            known = self.leases.find(lease.sample_id, lease.epoch) is not None
            if known or len(self.leases.running()) + len(self._waiting) < lease_limit:
                actions += self._assigned(lease, now)
            else:
                back.append(messages.Held(lease.sample_id, lease.epoch, len(lease.accepted) // 4))
        return [*actions, *(self._send(messages.Yielded(tuple(back))) if back else [])]

    def _assigned(self, lease: messages.Lease, now: float) -> list[WorkerAction]:
        present = self.leases.find(lease.sample_id)
        if present is not None and present.lease.epoch >= lease.epoch:
            return []  # a repeat
        if self._wanted is not None and lease.version == self._wanted.version:
            self._waiting = [w for w in self._waiting if w.sample_id != lease.sample_id] + [lease]
            return []
        if lease.version != self.loaded_version:
            return [
                LogNote(
                    "wrong-version",
                    f"sample {lease.sample_id} needs {lease.version}, loaded is {self.loaded_version}",
                )
            ]
        actions = self._forget([present]) if present is not None else []
        held = self.leases.take(lease)
        if held.finish is None:
            return [*actions, Add(held.request(self.ledger))]
        self.flush_at = now  # complete already: say so
        return actions

    def _forget(self, leases: Iterable[WorkerLease]) -> list[WorkerAction]:
        """Drop leases with all their tokens."""
        handles = []
        for held in leases:
            self.leases.drop(held)
            if held.runs:
                handles.append(held.handle)
        return [Abort(tuple(handles))] if handles else []

    def _yield_leases(self, leases: Iterable[WorkerLease], now: float) -> list[WorkerAction]:
        given = list(leases)
        kept = self._keep_kv(given)
        for held in given:
            held.yielded = True
            self.leases.changed(held)
        self.flush_at = now
        return [*kept, Abort(tuple(held.handle for held in given))] if given else []

    # ------------------------------------------------------------ KV blocks that move

    def _keep_kv(self, leases: Sequence[WorkerLease]) -> list[WorkerAction]:
        """Have the engine's blocks of these kept, and offer them with the next flush. None of which another version made a part."""
        if self._kv_source is None:
            return []
        able = [held for held in leases if held.runs and self._is_of_one_version(held) and held.cached > 0][
            : messages.MAX_KV_OFFERS - len(self._kv_offers)
        ]
        # What is kept beyond the bound pushes out what was kept before it: who comes for that would come in vain.
        room = MOST_NBYTES - sum(offer.tokens * offer.token_nbytes for offer in self._kv_offers)
        total = itertools.accumulate(held.cached * self._kv_token_nbytes for held in able)
        able = able[: sum(nbytes <= room for nbytes in total)]
        self._kv_offers += [
            messages.KvOffer(
                held.lease.sample_id, held.lease.epoch, held.handle, held.cached, self._kv_token_nbytes
            )
            for held in able
        ]
        self.kv_kept += len(able)
        return [KeepKv(held.handle, held.cached, self.ledger) for held in able]

    def _is_of_one_version(self, held: WorkerLease) -> bool:
        """Whether what is loaded made all entries of a lease."""
        of = (held.lease.version, held.lease.begun_version)
        return of[0] == self.loaded_version and of[1] in (-1, self.loaded_version)

    def _keep_turn_kv(self, held: WorkerLease) -> list[WorkerAction]:
        """Have the blocks of a turn that has its last token kept for the turns behind it; else the engine may forget them."""
        if self._kv_source is None or not self._is_of_one_version(held):
            return [Abort((held.handle,))]
        self._turn_kv[held.handle] = messages.KvOffer(
            held.lease.sample_id, held.lease.epoch, held.handle, held.cached, self._kv_token_nbytes
        )
        return [KeepKv(held.handle, held.cached, self.ledger, of_turn=True)]

    def turn_kv_kept(self, event: TurnKvKept, now: float) -> list[WorkerAction]:
        """A turn's blocks are here, or will not come; say so of those that another worker had."""
        offer = self._turn_kv.pop(event.handle, None)
        if offer is None:
            return []
        if not event.fault:
            self._turn_offers.append(offer)
        note: list[WorkerAction] = (
            [LogNote("turn-kv-not-kept", f"sample {offer.sample_id}: {event.fault}")] if event.fault else []
        )
        if event.handle not in self._fetched_for:
            self.flush_at = self.flush_at if event.fault else now
            return note
        self._fetched_for.discard(event.handle)
        tried = messages.KvTried(
            offer.sample_id,
            offer.epoch,
            offer.tokens,
            event.nbytes,
            event.seconds,
            messages.words(event.fault),
        )
        return [*note, *self._send(tried), *self._offer_kv()]

    def fetch_kv(self, message: messages.FetchKv, _now: float) -> list[WorkerAction]:
        """Keep what another worker kept, which leaves."""
        order = message.order
        if self.closed or self._kv_source is None:
            why = "this worker leaves" if self.closed else "this worker keeps no blocks"
            return self._send(messages.KvTried(message.sample_id, message.epoch, order.tokens, 0, 0.0, why))
        number = self.leases.new_handle()
        self._turn_kv[number] = messages.KvOffer(
            message.sample_id, message.epoch, number, order.tokens, self._kv_token_nbytes
        )
        self._fetched_for.add(number)
        return [KeepOtherKv(number, order, self.ledger)]

    def drop_kv(self, message: messages.DropKv, _now: float) -> list[WorkerAction]:
        return [DropTurnKv(message.numbers)]

    def _offer_kv(self) -> list[WorkerAction]:
        """What is kept and was not said, in messages of bounded size."""
        offers = (*self._kv_offers, *self._turn_offers)
        self._kv_offers, self._turn_offers = [], []
        source, most = self._kv_source, messages.MAX_KV_OFFERS
        if source is None:
            return []
        return [
            SendMessage(messages.KvKept(offers[at : at + most], source)) for at in range(0, len(offers), most)
        ]

    def kv_loaded(self, event: KvLoaded, _now: float) -> list[WorkerAction]:
        """Say what came of the blocks that a lease named."""
        held = self.leases.of_handle(event.handle)
        if held is None:
            return []
        name = (held.lease.sample_id, held.lease.epoch)
        tried = messages.KvTried(
            *name, event.tokens, event.nbytes, event.seconds, messages.words(event.fault)
        )
        note = [LogNote("kv-prefilled", f"sample {name[0]}: {event.fault}")] if event.fault else []
        return [*note, *self._send(tried)]

    def kv_taken(self, event: KvTaken) -> None:
        self.kv_kept = event.left

    # ------------------------------------------------------------ leases go back

    def yield_(self, message: messages.Yield, now: float) -> list[WorkerAction]:
        """Give leases back. One that is complete meanwhile stays complete; one that waits for its version goes back unchanged."""
        asked = set(message.leases)
        waiting = [w for w in self._waiting if (w.sample_id, w.epoch) in asked]
        self._waiting = [w for w in self._waiting if (w.sample_id, w.epoch) not in asked]
        untouched = tuple(messages.Held(w.sample_id, w.epoch, len(w.accepted) // 4) for w in waiting)
        found = [held for name in message.leases if (held := self.leases.find(*name)) is not None]
        for held in found:
            held.yield_sent = False  # asked again: said again
            self.leases.changed(held)
        abort = self._yield_leases([held for held in found if held.runs], now)
        return [*abort, *self.flush(), *(self._send(messages.Yielded(untouched)) if untouched else [])]

    def revoked(self, message: messages.Revoke, _now: float) -> list[WorkerAction]:
        over = set(message.leases)
        self._waiting = [w for w in self._waiting if (w.sample_id, w.epoch) not in over]
        found = (self.leases.find(sample_id, epoch) for sample_id, epoch in message.leases)
        return self._forget([held for held in found if held is not None])

    # ------------------------------------------------------------ siblings elsewhere

    def siblings(self, message: messages.SiblingTokens, now: float) -> list[WorkerAction]:
        """Drafts for samples that run here; what no running sample asks for is dropped, and what cannot be read."""
        count = sum(piece.count for piece in message.pieces)
        if self.closed or count > messages.MAX_SIBLING_TOKENS:
            return []
        running = {_group_key(held.lease.key): held.lease for held in self.leases.running()}
        try:
            tokens = unpack_tokens(unsqueeze_tokens(message.tokens, count))
        except WireError as error:
            return [LogNote("siblings-unreadable", error.cause)]
        said, at = [], 0
        for piece in message.pieces:
            new = tokens[at : at + piece.count]
            at += piece.count
            lease = running.get(_group_key(piece.key))
            if lease is None or min(new) < 0:
                continue
            group = GroupName(lease.key, _prompt_tokens(lease.prompt))
            self._told[_group_key(lease.key)] = group, now
            said.append(SiblingSaid(group, piece.key.index, piece.offset, new))
        return [HearSiblings(tuple(said))] if said else []

    def _forget_groups(self, now: float) -> list[WorkerAction]:
        """Those whose last sample here is over for a while."""
        if not self._told:
            return []
        running = {_group_key(held.lease.key) for held in self.leases.running()}
        over = []
        for key, (group, seen_at) in list(self._told.items()):
            if key in running:
                self._told[key] = group, now
            elif now - seen_at >= messages.KEEP_SIBLINGS_S:
                over.append(self._told.pop(key)[0])
        return [HearSiblings(over=tuple(over))] if over else []

    # ------------------------------------------------------------ weights, sleep

    def use_weights(self, message: messages.UseWeights, _now: float) -> list[WorkerAction]:
        if self.closed:
            return []
        if self._wanted is not None and self._wanted.version == message.version:
            return [MoreHolders(message)] if _holders(message) != _holders(self._wanted) else []
        if message.more and message.version == self._ahead:
            return [MoreHolders(message)]
        if message.more:
            return []  # holders of a version that is here by now, or that was given up
        if message.version == self.loaded_version:
            return self._send(self._loaded_message(message.version, 0.0, 0.0))
        # Its tokens end here: a sample never mixes versions. What is finished or given back stays until it is durable.
        actions = [*self.flush(), *self._forget([held for held in self.leases.all() if held.runs])]
        self._wanted, self._waiting, self.loaded_version, self._ahead = message, [], -1, -1
        return [*actions, LoadWeights(message)]

    def pull_ahead(self, message: messages.PullAhead, _now: float) -> list[WorkerAction]:
        if self.closed or self._wanted is not None or message.weights.version == self.loaded_version:
            return []
        self._ahead = message.weights.version
        return [PullWeights(message.weights)]

    def pull_failed(self, event: PullFailed, _now: float) -> list[WorkerAction]:
        """The next heartbeat says so, and the daemon asks again, if the version is still wanted."""
        if event.version == self._ahead:
            self._ahead = -1
        return []

    def loaded(self, event: Loaded, now: float) -> list[WorkerAction]:
        self.mismatches = 0
        if self._wanted is None or event.version != self._wanted.version:
            return [LogNote("superseded", f"version {event.version} was loaded after a newer one was wanted")]
        self.loaded_version, self.loaded_root, self.loaded_merged, self._wanted = (
            event.version,
            event.root,
            event.merged,
            None,
        )
        waiting, self._waiting = self._waiting, []
        self._paused_at = self._token_at if self._paused_at is None else self._paused_at
        loaded = self._loaded_message(event.version, event.pull_s, event.load_s, event.verify_s, event.chosen)
        actions = self._send(loaded)
        return actions + [a for lease in waiting for a in self._assigned(lease, now)]

    def _loaded_message(
        self, version: int, pull_s: float, load_s: float, verify_s: float = 0.0, chosen: str = ""
    ) -> messages.WeightsLoaded:
        known = (self.cache_tokens, self.best_batch)
        return messages.WeightsLoaded(
            version,
            self.loaded_root,
            pull_s,
            load_s,
            *known,
            verify_s,
            self.loaded_merged,
            messages.words(chosen),
        )

    def built(self, event: Built, _now: float) -> list[WorkerAction]:
        self.cache_tokens, self.best_batch = event.cache_tokens, event.best_batch
        self._kv_source, self._kv_token_nbytes = event.kv_source, event.kv_token_nbytes
        return []

    def woken(self, event: Woken, _now: float) -> list[WorkerAction]:
        self._wake_s = event.seconds
        if event.order != self._engine_order:
            return []  # told to sleep meanwhile: the engine does both in order
        self.memory, self.bytes_held = "awake", event.bytes_held
        return self._acknowledge_memory_order()

    def serves(self, event: Serves, _now: float) -> list[WorkerAction]:
        """Others may pull a version from here, or may not any more."""
        serving = event.serving
        if serving.source is None:
            self._serving.pop(serving.version, None)
        else:
            self._serving[serving.version] = serving
        return self._say_serving(serving)

    def _say_serving(self, serving: messages.Serving) -> list[WorkerAction]:
        wanted = self._terms is not None and self._terms.relay
        return self._send(serving) if wanted else []

    def load_failed(self, event: LoadFailed, _now: float) -> list[WorkerAction]:
        self.mismatches += event.differs
        if self._wanted is None or event.version != self._wanted.version:
            return []
        self._wanted, self._waiting = None, []
        failed = messages.WeightsFailed(event.version, messages.words(event.reason), event.refused)
        return [LogNote("weights-failed", event.reason), *self._send(failed)]

    def sleep(self, message: messages.Sleep, now: float) -> list[WorkerAction]:
        """Give all leases back and free the memory. Tokens that are not durable yet stay here until they are."""
        if message.order <= self.memory_order:
            return self._acknowledge_memory_order()  # a repeat
        self.memory_order = message.order
        if self.memory in ("falling-asleep", "asleep"):
            return self._acknowledge_memory_order()  # the order to wake in between was lost
        self.memory, self._engine_order, self._waiting = "falling-asleep", message.order, []
        self._token_at = self._paused_at = None  # what it does not generate asleep, no load costs
        return [
            *self._yield_leases([held for held in self.leases.all() if held.runs], now),
            *self.flush(),
            SleepEngine(message.order),
        ]

    def wake(self, message: messages.Wake, _now: float) -> list[WorkerAction]:
        if message.order <= self.memory_order:
            return self._acknowledge_memory_order()
        self.memory_order = message.order
        if self.memory in ("waking", "awake"):
            return self._acknowledge_memory_order()
        self.memory, self._engine_order = "waking", message.order
        return [WakeEngine(message.order)]

    def bound(self, lease_limit: int, now: float, *, built: bool) -> list[WorkerAction]:
        """So many leases at most from now on. Those beyond go back with their tokens, the shortest first: they cost least to prefill
        again. With none the engine gives its memory back; with some it takes it again. `built`: there is an engine.
        """
        self.lease_limit = lease_limit
        actions = self._yield_beyond(lease_limit, now)
        if not built:
            return actions
        if lease_limit == 0 and self.memory in ("awake", "waking"):
            self.memory, self._engine_order = "falling-asleep", self._engine_order - 1
            self._token_at = self._paused_at = None
            actions.append(SleepEngine(self._engine_order))
        elif lease_limit > 0 and self.memory in ("falling-asleep", "asleep"):
            self.memory, self._engine_order = "waking", self._engine_order - 1
            actions.append(WakeEngine(self._engine_order))
        return actions

    def _yield_beyond(self, lease_limit: int, now: float) -> list[WorkerAction]:
        running = sorted(self.leases.running(), key=lambda held: (held.length, held.lease.sample_id))
        over = len(running) + len(self._waiting) - lease_limit
        if over <= 0:
            return []
        waiting, self._waiting = self._waiting[:over], self._waiting[over:]
        untouched = tuple(messages.Held(w.sample_id, w.epoch, len(w.accepted) // 4) for w in waiting)
        back = running[: max(0, over - len(waiting))]
        return [
            *self._yield_leases(back, now),
            *self.flush(),
            *(self._send(messages.Yielded(untouched)) if untouched else []),
        ]

    def fell_asleep(self, event: Slept, _now: float) -> list[WorkerAction]:
        if event.order != self._engine_order:
            return []  # woken meanwhile: the engine does both in order
        self.memory, self.bytes_held = "asleep", event.bytes_held
        return self._acknowledge_memory_order()

    def _acknowledge_memory_order(self) -> list[WorkerAction]:
        """Say that the last order is carried out, if it is: the daemon takes the engine for neither asleep nor awake before."""
        if not self.memory_order:
            return []  # the daemon gave no such order: its host did, if any
        match self.memory:
            case "asleep":
                return self._send(messages.Asleep(self.memory_order, self.bytes_held))
            case "awake":
                return self._send(messages.Awake(self.memory_order, self.bytes_held))
        return []


def _group_key(key: messages.SampleKey) -> tuple[str, int, int]:
    return key.purpose, key.step, key.prompt


def _holders(weights: messages.UseWeights) -> tuple[tuple[messages.WeightSource, ...], ...]:
    """Of the version, and of its base."""
    return weights.sources, weights.base.sources if weights.base is not None else ()
