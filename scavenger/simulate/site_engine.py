"""One engine's process in virtual time: the worker's own session (`protocol.worker.session`) drives an `EngineBatch`.

    daemon --message--> Session --Add, Abort, LoadWeights, SleepEngine...--> EngineBatch, weights
       ^------Send-------- Session <--Generated, Loaded, Slept, Terminate----'

What only a simulation has is here: how fast it decodes, and when it hands over. Flushes are not played out: a live engine flushes ten times
a second, so whatever it generated is handed over at the instant at which anybody needs it (a finish, a yield, sleep, notice of preemption).
Heartbeats tell lengths between. Tokens are counted, not kept. Owns what was lost with the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from scavenger.errors import SimulationError
from scavenger.protocol.messages import (
    Assign,
    ChangeRun,
    Drain,
    KvSource,
    LendSlots,
    Message,
    SampleKey,
    SiblingTokens,
    Sleep,
    WeightSource,
    Welcome,
    WorkerHello,
    Yield,
    reserved_name,
)
from scavenger.protocol.worker import events as worker
from scavenger.protocol.worker.session import Session
from scavenger.protocol.worker.work import TokenBuffer
from scavenger.router.core.events import HelloReceived, PeerIdentity, WorkerSent
from scavenger.simulate.clock import Simulation, Timer
from scavenger.simulate.decode import SimulatedEngine
from scavenger.simulate.kv import BLOCK, KvTransfers
from scavenger.simulate.sequences import EngineBatch, Finished, Joined, SimulatedRequest
from scavenger.simulate.shared_batch import BatchPart, SharedBatch
from scavenger.simulate.site_daemon import SimDaemon

Truth = Callable[[SampleKey], int]  # how long a completion will be: known here, and to nobody who decides
_ZEROS = bytes(4 * 131_072)
_SOON_S = 1e-3
#: No message is lost here and no daemon is silent: an engine ends when it is asked to, or dies with its job.
_LIMITS = worker.WorkerLimits(orphan_s=math.inf, hello_s=math.inf, notice_s=math.inf, drain_s=math.inf)


def zeros(tokens: int) -> bytes:
    """Packed tokens, or logprobs, of which only the number matters."""
    return _ZEROS[: 4 * tokens] if tokens <= 131_072 else bytes(4 * tokens)


def _counted(tokens: int) -> tuple[int, ...]:
    """So many tokens, of which only the number is asked."""
    return cast("tuple[int, ...]", range(tokens))


def _prompt_of(key: SampleKey) -> int:
    return key.step * 1_000_000 + key.prompt


def root_of(version: int) -> bytes:
    """What names a version's bytes."""
    return b"%d" % version


class CountedTokens(TokenBuffer):
    """How many tokens there are: here all are alike."""

    def __init__(self) -> None:
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, delta: worker.Delta) -> None:
        self._count += len(delta.token_ids)

    def forget(self, count: int) -> None:
        self._count -= count

    def unpacked(self, accepted: bytes) -> tuple[int, ...]:
        return _counted(len(accepted) // 4)

    def packed(self, first: int, stop: int) -> tuple[bytes, bytes, bytes, bytes]:
        tokens = zeros(stop - first)
        return tokens, tokens, tokens, b""


@dataclass(frozen=True, slots=True)
class WeightDelays:
    """How long weights take to be there. `load_s`: from host memory into the engine, once pulled; `wake_s`: from sleep to generating.
    `again_s`: as `load_s`, of a later version, where that is adapters of weights that are there; None: as the first one."""

    load_s: float
    wake_s: float = 0.0
    again_s: float | None = None


@dataclass(frozen=True, slots=True)
class BorrowedSlots:
    """Of another run's engine: so many, and this run's part of its batch."""

    slots: int
    part: BatchPart


@dataclass(slots=True)
class _Request:
    """One of the session's requests: it has been given the completion's first `given` tokens; the completion ends at `target`."""

    prompt: int
    given: int
    target: int
    asked: worker.Request
    done: bool = False  # it reached `target`, and waits for its group


class SimEngine:
    """See the module. `fetch(engine, version, done)` gets weights; `kv`: moves its samples' blocks; `whole_groups` as in
    `SimulatedPolicy`: of a group's completions none is handed over before all are complete, or longer than the shortest of them.
    `hangs_at`: it hangs when it is told to sleep for so many times; 0 = it never does. `lend`: carries out an order to lend slots.
    `borrows`: it is a worker in another one's process, in slots of that one's engine.
    """

    def __init__(
        self,
        sim: Simulation,
        daemon: SimDaemon,
        spec: SimulatedEngine,
        pace: WeightDelays,
        truth: Truth,
        fetch: Callable[[SimEngine, int, Callable[[], None]], None],
        left: Callable[[SimEngine], None],
        *,
        kind: str,
        node: str,
        identity: PeerIdentity,
        run: str,
        incarnation: int = 0,
        slot: str = "",
        whole_groups: bool = False,
        hangs_at: int = 0,
        kv: KvTransfers | None = None,
        lend: Callable[[SimEngine, LendSlots], None] | None = None,
        borrows: BorrowedSlots | None = None,
    ) -> None:
        self._sim, self._daemon, self.spec, self._pace, self._truth = sim, daemon, spec, pace, truth
        self._fetch, self._left = fetch, left
        self.kind, self.node, self.identity, self.incarnation = kind, node, identity, incarnation
        self.run = run
        self.slot, self.name = slot, reserved_name(slot, f"{slot}.{incarnation}")
        self._sleeps_until_hang, self._hangs = hangs_at, False
        self._whole_groups = whole_groups
        self._kv = kv
        session = f"{identity.intent_id or slot}.{incarnation}"
        me = worker.WorkerIdentity(
            kind,
            run,
            session,
            incarnation,
            1,
            node,
            spec.gpus,
            "simulated",
            "0",
            1,
            slot=slot,
            guest=borrows is not None,
        )
        self._session = Session(me, _LIMITS, sim.now, CountedTokens)
        self.conn = daemon.connect(self._receive)
        self.batch: EngineBatch | BatchPart = EngineBatch(spec, sim.now)
        self._lend, self._borrows = lend, borrows
        self.borrower: SimEngine | None = None  # which has slots of its engine
        if borrows is not None:
            self.batch = borrows.part
            borrows.part.changed = self._batch_moved
        self._wanted, self._wanted_at = -1, sim.now  # the version that was asked for last
        self._ahead, self._ahead_is_here = -1, False  # the one that is pulled beside its work
        self._pull_s = 0.0
        self._built_at = sim.now
        self._awake_at = sim.now
        self._requests: dict[int, _Request] = {}  # by the session's handles, in the order in which they came
        self._siblings: dict[int, dict[int, None]] = {}  # prompt -> its requests, where groups move as one
        self._buffer: list[SimulatedRequest] = []  # until it is awake
        self._bringing: dict[int, SimulatedRequest] = {}  # until their KV blocks have come
        self._cached: dict[
            SampleKey, int
        ] = {}  # tokens of samples that left, which its KV cache has yet; the oldest first
        self._ended_siblings: set[SampleKey] = set()  # whose whole completions the engine has for its drafts
        self._timer: Timer | None = None
        self._busy_since: float | None = None
        self.alive = True
        self.handed_to = ""  # the run for which its process goes on when it has ended
        self.lost = 0
        self.tokens = 0
        self.busy_s = 0.0
        self.ready_s = -1.0

    # ---------------------------------------------------------------- life

    def register(self, built_at: float) -> None:
        """Say hello. Weights may be pulled from now on; it can generate from `built_at`."""
        self._built_at = built_at
        if self._borrows is not None:
            self._tell(worker.Bounded(self._borrows.slots))
        self._tell(worker.Connected())

    def shut_down(self, reason: str, notice: bool = True) -> None:
        """End by SIGTERM. `notice`: it hands over what it has, and says goodbye; else it dies with all that it had not handed over."""
        if not self.alive:
            return
        if self.borrower is not None:
            self.borrower.shut_down(reason, notice)
        if notice and not self._hangs:
            self._give_all()
            self._tell(worker.Terminate(reason))
            self._leave_blocks()
        else:
            self._abort(list(self._requests))
            self._end()

    def _end(self) -> None:
        """The process is gone, and who borrows of its engine with it."""
        if self.borrower is not None:
            self.borrower.shut_down("the worker of the run whose engine this is has ended")
        if self._borrows is not None:
            self._abort(list(self._requests))  # its engine goes on
        self.alive = False
        self._mark_idle()
        self._disarm()
        self._daemon.disconnect(self.conn)
        self._left(self)

    def close(self) -> None:
        """The simulation is over: hand over what there is, so that every token is accounted for."""
        if self.alive:
            if self.borrower is not None:
                self.borrower.close()
            self._give_all()
            self._abort(list(self._requests))
            self._mark_idle()

    # ---------------------------------------------------------------- slots that are lent

    def begin_loan(self) -> SharedBatch:
        """Its batch is for samples of another run too, from now on."""
        assert isinstance(self.batch, EngineBatch)
        shared = SharedBatch(self.batch, self._batch_moved)
        self.batch = shared.lender
        return shared

    def loan_over(self) -> None:
        """Its borrower has left."""
        self.borrower = None
        if self.alive:
            self._wake()  # what the borrower saw happen first
        assert isinstance(self.batch, BatchPart)
        self.batch = self.batch.whole
        if self.alive:
            self._arm()

    def _batch_moved(self) -> None:
        """The other run's worker did something in it: it goes on at another time."""
        if self.alive:
            if self.batch.size and self._busy_since is None:
                self._busy_since = self._sim.now
            self._arm()

    # ---------------------------------------------------------------- the session

    def _receive(self, message: Message, lengths: Sequence[int]) -> None:
        if not self.alive or self._hangs:
            return
        if isinstance(message, Sleep):
            self._sleeps_until_hang -= 1
            if self._sleeps_until_hang == 0:
                self._hang()
                return
        match message:
            case SiblingTokens():
                self._hear(message)
                return  # there are no tokens here for the session to read
            case Welcome():  # it beats when `beat` says so, and sends at once what `_give` gives
                message = msgspec.structs.replace(message, heartbeat_s=math.inf, flush_tokens=0)
            case Assign(leases=leases):
                with_tokens = (
                    msgspec.structs.replace(lease, accepted=zeros(length)) if length else lease
                    for lease, length in zip(leases, lengths or (0,) * len(leases), strict=True)
                )
                message = Assign(tuple(with_tokens))
            case Yield(leases=leases):
                found = (self._session.work.leases.find(*name) for name in leases)
                self._give([held.handle for held in found if held is not None])
            case Sleep() | Drain() | ChangeRun():
                self._give_all()
                self._cached.clear()
        self._tell(worker.Received(message))  # type: ignore[arg-type]  # the core sends workers nothing else
        if isinstance(message, Drain):
            self._leave_blocks()

    def _leave_blocks(self) -> None:
        """It is told to leave: its process stays for readers (`KvTransfers.leaves`), and its GPU is free at once."""
        if self._kv is not None:
            self._kv.leaves(self.name_of_blocks, self._sim.now)
            if self.alive:
                self._tell(worker.KvTaken(0))

    def _hear(self, message: SiblingTokens) -> None:
        """Which siblings ended on other engines: the batch counts them as it counts its own."""
        for piece in message.pieces:
            key = piece.key
            if piece.offset + piece.count >= self._truth(key) and key not in self._ended_siblings:
                self._ended_siblings.add(key)
                self.batch.sibling_ended(_prompt_of(key), self._sim.now)
        self._arm()

    def _hang(self) -> None:
        """Hear and make nothing more, and keep the GPU, until it is ended."""
        self._hangs = True
        self._abort(list(self._requests))

    def _tell(self, event: worker.WorkerEvent) -> None:
        self._perform(self._session.handle(event, self._sim.now))

    def _perform(self, actions: Sequence[worker.WorkerAction]) -> None:
        """Do what the session asks. What is aborted goes first: the daemon's reply to what is sent may be new work for this engine."""
        for action in actions:
            if type(action) is worker.Abort:
                self._abort(action.handles)
        added = []
        for action in actions:
            match action:
                case worker.SendMessage(message=message):
                    self._send(message)
                case worker.Add(request=request):
                    one = self._begin(request)
                    if request.kv is None or self._kv is None:
                        added.append(one)
                    else:
                        self._fetch_blocks(request, request.kv, one)
                case worker.LoadWeights(weights=weights):
                    self._load(weights.version)
                case worker.PullWeights(weights=weights):
                    self._pull_ahead(weights.version)
                case worker.Build():
                    self._sim.at(max(self._sim.now, self._built_at), self._built)
                case worker.SleepEngine(order=order):
                    self._tell(worker.Slept(order, 0))
                case worker.WakeEngine(order=order):
                    self._wake_up(order)
                case worker.KeepKv(handle=handle, tokens=tokens):
                    self._keep(handle, tokens)
                case worker.EndWorker(hands_to=run):
                    self.handed_to = run
                    self._end()
                case worker.Lend(order=order):
                    if self._lend is not None:
                        self._lend(self, order)
                case worker.Connect():
                    raise SimulationError(f"the engine on {self.node} lost its daemon, and none is lost here")
        if added:
            self._add(added)

    def _send(self, message: Message) -> None:
        if isinstance(message, WorkerHello):
            self._daemon.post(HelloReceived(self.conn, self.identity, message))
        else:
            self._daemon.post(WorkerSent(self.conn, message))

    def beat(self) -> None:
        """Tell what is held, and how far it is. One that holds nothing has nothing to tell, and nobody doubts that it lives."""
        if self.borrower is not None:
            self.borrower.beat()
        if not (self.alive and self._requests) or self._hangs:
            return
        lengths = self.batch.progress(self._sim.now)
        total = self.tokens
        for handle, one in self._requests.items():
            if one.done:
                lengths[handle] = one.target
            total += lengths.get(handle, one.given)
        self._send(self._session.work.heartbeat(total, 0.0, lengths))

    # ---------------------------------------------------------------- weights, sleep

    def _built(self) -> None:
        """With what vLLM says of itself: the tokens for which its KV cache has room, and no best batch, which nobody measured."""
        if not self.alive:
            return
        if self._kv is None:
            self._tell(worker.Built(self.spec.kv_capacity, 0))
        else:
            here = WeightSource(f"tcp://{self.name_of_blocks}:1", self.name_of_blocks, b"token")
            self._tell(worker.Built(self.spec.kv_capacity, 0, here, self.spec.model.kv_bytes_per_token))

    def _load(self, version: int) -> None:
        self._wanted, self._wanted_at = version, self._sim.now
        if version != self._ahead:
            self._ahead = -1
            self._fetch(self, version, lambda: self._pulled(version))
        elif self._ahead_is_here:
            self._pulled(version)

    def _pull_ahead(self, version: int) -> None:
        """Beside what it generates; a load of it waits for what is on its way."""
        self._ahead, self._ahead_is_here = version, False
        self._fetch(self, version, lambda: self._came(version))

    def _came(self, version: int) -> None:
        self._ahead_is_here |= version == self._ahead
        if version == self._wanted:
            self._pulled(version)

    def _pulled(self, version: int) -> None:
        if version == self._wanted:
            self._pull_s = self._sim.now - self._wanted_at
        pace = self._pace
        load_s = pace.load_s if self.ready_s < 0 or pace.again_s is None else pace.again_s
        ready = max(self._sim.now, self._built_at, self._awake_at) + load_s
        self._sim.at(ready, lambda: self._ready(version))

    def _ready(self, version: int) -> None:
        if not self.alive or self._hangs or version != self._wanted:
            return
        if self.ready_s < 0:
            self.ready_s = self._sim.now
        if self._kv is not None:
            self._kv.clear(self.name_of_blocks)
        self._tell(worker.Loaded(version, root_of(version), self._pull_s, 0.0))

    def _wake_up(self, order: int) -> None:
        self._awake_at = max(self._awake_at, self._sim.now + self._pace.wake_s)
        took_s = max(self._pace.wake_s, _SOON_S)
        self._sim.at(self._awake_at, lambda: self._awake(order, took_s))

    def _awake(self, order: int, took_s: float) -> None:
        if self.alive and not self._hangs:
            self._tell(worker.Woken(order, took_s, 0))

    # ---------------------------------------------------------------- requests

    def _begin(self, request: worker.Request) -> SimulatedRequest:
        key, given = request.key, len(request.accepted)
        prompt, target = _prompt_of(key), self._truth(key)
        self._requests[request.handle] = _Request(prompt, given, target, request)
        if self._whole_groups:
            self._siblings.setdefault(prompt, {})[request.handle] = None
        cached = min(self._cached.pop(key, 0), len(request.prompt) + given)
        return SimulatedRequest(request.handle, prompt, len(request.prompt), given, target, cached)

    # ---------------------------------------------------------------- KV blocks that move

    @property
    def name_of_blocks(self) -> str:
        """Names this process to those who read its blocks."""
        return f"{self.kind}-{self.conn}"

    def _keep(self, handle: int, tokens: int) -> None:
        if self._kv is not None:
            whole = tokens // BLOCK * BLOCK
            nbytes = whole * self.spec.model.kv_bytes_per_token
            self._kv.keep(self.name_of_blocks, handle, nbytes, self._sim.now)

    def _fetch_blocks(self, asked: worker.Request, order: KvSource, request: SimulatedRequest) -> None:
        """It begins when they have come, or when it is known that they will not."""
        assert self._kv is not None
        began, tokens = self._sim.now, order.tokens // BLOCK * BLOCK
        nbytes, handle = tokens * self.spec.model.kv_bytes_per_token, asked.handle
        me, holder = self.name_of_blocks, order.source.server_key
        found = self._kv.fetch(me, handle, holder, order.number, nbytes, order.within_s, began)
        self._bringing[handle] = request

        def come() -> None:
            assert self._kv is not None
            self._kv.over(me, handle)
            if self._bringing.pop(handle, None) is None or not self.alive or self._hangs:
                return
            self._tell(worker.KvLoaded(handle, tokens, nbytes, self._sim.now - began, found.fault))
            cached = request.cached if found.fault else max(request.cached, tokens)
            self._add([msgspec.structs.replace(request, cached=cached)])

        self._sim.at(found.at_s, come)

    def _flush_first(self, keys: Sequence[int]) -> None:
        """Hand over the first tokens of requests, as a live engine's next flush does: the router times prefills by them."""
        if not self.alive or self._hangs:
            return
        mine = [
            key
            for key in keys
            if (one := self._requests.get(key)) is not None
            and not one.done
            and one.given == len(one.asked.accepted)
            and key in self.batch
        ]
        self._give(mine)
        late = [key for key in mine if self._requests[key].given == len(self._requests[key].asked.accepted)]
        if late:
            self._sim.after(self._daemon.flush_s, lambda: self._flush_first(late))

    # ---------------------------------------------------------------- requests, in the batch

    def _add(self, requests: list[SimulatedRequest]) -> None:
        if self._awake_at > self._sim.now:
            if not self._buffer:
                self._sim.at(self._awake_at, self._start_buffered)
            self._buffer += requests
            return
        self._wake()
        self.batch.add(requests, self._sim.now)
        while self._cached and sum(self._cached.values()) > self.batch.room:
            del self._cached[next(iter(self._cached))]
        self._arm()

    def _start_buffered(self) -> None:
        requests, self._buffer = self._buffer, []
        if self.alive and requests:
            self._add(requests)

    def _abort(self, handles: Iterable[int]) -> None:
        """They are over: what was not handed over is lost."""
        for handle in handles:
            one = self._requests.pop(handle)
            if self._whole_groups:
                self._siblings.get(one.prompt, {}).pop(handle, None)
            if self._bringing.pop(handle, None) is not None:
                continue  # it made nothing
            before = len(self._buffer)
            self._buffer = [r for r in self._buffer if r.key != handle] if self._buffer else self._buffer
            if one.done:
                self.lost += one.target - one.given
            elif len(self._buffer) == before:
                stays = one.asked.begun_version >= 0 and self.batch.is_running(handle)
                length = self.batch.remove(handle, self._sim.now)
                self.lost += length - one.given
                if stays:
                    self._cached[one.asked.key] = len(one.asked.prompt) + length
        self._arm()

    def _give(self, handles: Iterable[int]) -> None:
        """Hand the session what was generated for these, which it sends at once."""
        self._hand_over({handle: self._length(handle) for handle in handles})

    def _give_all(self) -> None:
        """The same for all. A group that moves as one is cut to its shortest completion."""
        lengths = {handle: self._length(handle) for handle in self._requests}
        if self._whole_groups:
            shortest: dict[int, int] = {}
            for handle, length in lengths.items():
                prompt = self._requests[handle].prompt
                shortest[prompt] = min(shortest.get(prompt, length), length)
            lengths = {handle: max(one.given, shortest[one.prompt]) for handle, one in self._requests.items()}
        self._hand_over(lengths)

    def _length(self, handle: int) -> int:
        """How long this completion is by now."""
        one = self._requests[handle]
        if one.done:
            return one.target
        at_rest = handle in self._bringing or any(request.key == handle for request in self._buffer)
        return one.given if at_rest else self.batch.generated(handle, self._sim.now)

    def _hand_over(self, lengths: dict[int, int]) -> None:
        """Generated, of these requests, up to these lengths."""
        deltas = []
        for handle, length in lengths.items():
            one = self._requests[handle]
            new = _counted(length - one.given)
            finish = "stop" if length == one.target else None
            if new or finish:
                deltas.append(worker.Delta(handle, new, new, new, finish))
                self.tokens += len(new)
                one.given = length
            if finish:
                self._ended_siblings.add(one.asked.key)
                del self._requests[handle]
        if deltas:
            self._tell(worker.Generated(tuple(deltas)))

    # ---------------------------------------------------------------- decoding

    def _arm(self) -> None:
        """One timer, at the next thing that happens in the batch."""
        self._disarm()
        if not self.batch.size:
            self._mark_idle()
        due = self.batch.next_time()
        if due < float("inf"):
            self._timer = self._sim.at(max(due, self._sim.now), self._wake)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        self._timer = None if self._timer is not None and not self._timer.pending else self._timer
        if self._busy_since is None:
            self._busy_since = self._sim.now
        happened = self.batch.advance(self._sim.now)
        ended = [one.key for one in happened if isinstance(one, Finished)]
        joined = [key for one in happened if isinstance(one, Joined) for key in one.keys]
        if joined and self._kv is not None:
            self._sim.after(self._daemon.flush_s, lambda: self._flush_first(joined))
        if ended:
            self._ended(ended)
        self._arm()

    def _mark_idle(self) -> None:
        if self._busy_since is not None:
            self.busy_s += self._sim.now - self._busy_since
            self._busy_since = None

    def _ended(self, handles: Sequence[int]) -> None:
        """Requests reached their ends."""
        whole = list(handles)
        if self._whole_groups:
            for handle in handles:
                self._requests[handle].done = True
            prompts = dict.fromkeys(self._requests[handle].prompt for handle in handles)
            whole = [handle for prompt in prompts for handle in self._complete_group(prompt)]
        self._hand_over({handle: self._requests[handle].target for handle in whole})

    def _complete_group(self, prompt: int) -> list[int]:
        """The requests of this prompt, if none is left to generate here."""
        mine = [handle for handle in self._siblings[prompt] if handle in self._requests]
        if not all(self._requests[handle].done for handle in mine):
            return []
        del self._siblings[prompt]
        return mine
