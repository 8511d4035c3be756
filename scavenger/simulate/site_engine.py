"""One engine's process in virtual time: it speaks the worker's protocol with the core, and decodes with an `EngineBatch`.

Flushes are not played out: a live engine flushes ten times a second, so whatever it generated is handed over at the instant at which
anybody needs it (a finish, a yield, sleep, notice of preemption). Heartbeats tell lengths between. Owns what was lost with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from scavenger.protocol.messages import (
    PROTOCOL,
    Ack,
    Asleep,
    Assign,
    Chunk,
    Chunks,
    Drain,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Held,
    Lease,
    Memory,
    Message,
    Revoke,
    SampleKey,
    Sleep,
    UseWeights,
    Wake,
    WeightsLoaded,
    WorkerHello,
    Yield,
    Yielded,
)
from scavenger.router.core.events import HelloReceived, Identity, WorkerSent
from scavenger.simulate.clock import Simulation, Timer
from scavenger.simulate.decode import EngineSpec
from scavenger.simulate.sequences import EngineBatch, Finished, SimulatedRequest
from scavenger.simulate.site_daemon import SimDaemon

Truth = Callable[[SampleKey], int]  # how long an answer will be: known here, and to nobody who decides
_ZEROS = bytes(4 * 131_072)
_SOON_S = 1e-3


def zeros(tokens: int) -> bytes:
    """Packed tokens, or logprobs, of which only the number matters."""
    return _ZEROS[: 4 * tokens] if tokens <= 131_072 else bytes(4 * tokens)


@dataclass(frozen=True, slots=True)
class WeightDelays:
    """How long weights take to be there. `load_s`: from host memory into the engine, once pulled; `wake_s`: from sleep to generating."""

    load_s: float
    wake_s: float = 0.0


@dataclass(slots=True)
class _EngineLease:
    """A lease here: the first `sent` tokens are the core's; the answer ends at `target`."""

    lease: Lease
    sent: int
    target: int
    done: bool = False  # it reached `target`, and waits for its group


class SimEngine:
    """See the module. `fetch(engine, version, done)` gets weights; `whole_groups` as in `Contender`."""

    def __init__(
        self,
        sim: Simulation,
        daemon: SimDaemon,
        spec: EngineSpec,
        pace: WeightDelays,
        truth: Truth,
        fetch: Callable[[SimEngine, int, Callable[[], None]], None],
        left: Callable[[SimEngine], None],
        *,
        kind: str,
        node: str,
        identity: Identity,
        run: str,
        incarnation: int = 0,
        slot: str = "",
        whole_groups: bool = False,
    ) -> None:
        self._sim, self._daemon, self.spec, self._pace, self._truth = sim, daemon, spec, pace, truth
        self._fetch, self._left = fetch, left
        self.kind, self.node, self.identity, self._run, self.incarnation, self._slot = (
            kind,
            node,
            identity,
            run,
            incarnation,
            slot,
        )
        self._whole_groups = whole_groups
        self.conn = daemon.connect(self._receive)
        self.batch = EngineBatch(spec, sim.now)
        self.loaded = -1
        self._wanted = -1
        self._built_at = sim.now
        self._awake_at = sim.now
        self._wake_s = 0.0  # what its last waking took, for heartbeats to say; 0 = it was never woken
        self._leases: dict[int, _EngineLease] = {}
        self._siblings: dict[int, dict[int, None]] = defaultdict(
            dict
        )  # where groups move as one: prompt -> its samples, in order
        self._buffer: list[SimulatedRequest] = []  # until it is awake
        self._acks = 0
        self._memory: Memory = "awake"
        self._memory_order = 0
        self._timer: Timer | None = None
        self._busy_since: float | None = None
        self.alive = True
        self.registered = False
        self.lost = 0
        self.tokens = 0
        self.busy_s = 0.0
        self.ready_s = -1.0

    # ---------------------------------------------------------------- life

    def register(self, built_at: float) -> None:
        """Say hello. Weights may be pulled from now on; it can generate from `built_at`."""
        self._built_at, self.registered = built_at, True
        session = f"{self.identity.intent_id or self._slot}.{self.incarnation}"
        self._daemon.post(
            HelloReceived(
                self.conn,
                self.identity,
                WorkerHello(
                    PROTOCOL,
                    self.kind,
                    self._run,
                    session,
                    self.incarnation,
                    1,
                    self.node,
                    self.spec.gpus,
                    "simulated",
                    "0",
                    1,
                    slot=self._slot,
                ),
            )
        )

    def shut_down(self, reason: str, notice: bool = True) -> None:
        """Flush, say goodbye and end. `notice`: it was asked to; else it dies with all that it had not handed over."""
        if not self.alive:
            return
        if notice and self.registered:
            self._hand_over()
            self._send(Goodbye(reason, notice=True))
        else:
            self._drop(list(self._leases))
        self.end()

    def end(self) -> None:
        """The process is gone."""
        self.alive = False
        self._mark_idle()
        self._disarm()
        self._daemon.disconnect(self.conn)
        self._left(self)

    def close(self) -> None:
        """The simulation is over: hand over what there is, so that every token is accounted for."""
        if self.alive:
            self._hand_over()
            self._mark_idle()

    # ---------------------------------------------------------------- messages

    def _send(self, message: Message) -> None:
        self._daemon.post(WorkerSent(self.conn, message))

    def _receive(self, message: Message, lengths: Sequence[int]) -> None:
        if not self.alive or type(message) is Ack:  # nothing is kept for a resend: no message is lost here
            return
        match message:
            case Assign(leases=leases):
                self._assigned(leases, lengths or (0,) * len(leases))
            case Yield(leases=leases):
                self._yield([sample_id for sample_id, epoch in leases if self._has_lease(sample_id, epoch)])
            case Revoke(leases=leases):
                self._drop([sample_id for sample_id, epoch in leases if self._has_lease(sample_id, epoch)])
            case UseWeights(version=version):
                self._use(version)
            case Sleep(order=order):
                self._hand_over()
                self._memory_order, self._memory = order, "asleep"
                self._send(Asleep(order, 0))
            case Wake(order=order):
                self._memory_order, self._memory = order, "awake"
                self._awake_at = max(self._awake_at, self._sim.now + self._pace.wake_s)
                self._wake_s = max(self._pace.wake_s, _SOON_S)
            case Drain(reason=reason):
                self.shut_down(reason)
            case HeartbeatAck(number=number):
                self._acks = number

    def _has_lease(self, sample_id: int, epoch: int) -> bool:
        held = self._leases.get(sample_id)
        return held is not None and held.lease.epoch == epoch

    def beat(self) -> None:
        """Tell what is held, and how far it is. One that holds nothing has nothing to tell, and nobody doubts that it lives."""
        if not (self.alive and self._leases):
            return
        length_of, held, total = self.batch.progress(self._sim.now).get, [], self.tokens
        for sample_id, one in self._leases.items():
            length = one.target if one.done else length_of(sample_id, one.sent)
            held.append(Held(sample_id, one.lease.epoch, length))
            total += length
        self._send(
            Heartbeat(
                tuple(held),
                total,
                self.loaded,
                0.0,
                self._acks,
                self._wake_s,
                self._memory,
                self._memory_order,
            )
        )

    # ---------------------------------------------------------------- weights

    def _use(self, version: int) -> None:
        if version == self._wanted:  # asked again: a load under way is not disturbed
            if version == self.loaded:
                self._say_loaded()
            return
        self._drop(list(self._leases))
        self._siblings.clear()
        self._wanted, self.loaded = version, -1
        self._fetch(self, version, lambda: self._pulled(version))

    def _pulled(self, version: int) -> None:
        ready = max(self._sim.now, self._built_at, self._awake_at) + self._pace.load_s
        self._sim.at(ready, lambda: self._ready(version))

    def _ready(self, version: int) -> None:
        if not self.alive or version != self._wanted:
            return
        self.loaded = version
        if self.ready_s < 0:
            self.ready_s = self._sim.now
        self._say_loaded()

    def _say_loaded(self) -> None:
        """With what vLLM says of itself: the tokens for which its KV cache has room, and no best batch, which nobody measured."""
        self._send(WeightsLoaded(self.loaded, root_of(self.loaded), cache_tokens=self.spec.kv_capacity))

    # ---------------------------------------------------------------- leases

    def _assigned(self, leases: Sequence[Lease], accepted: Sequence[int]) -> None:
        requests = []
        for lease, length in zip(leases, accepted, strict=True):
            target = self._truth(lease.key)
            self._leases[lease.sample_id] = _EngineLease(lease, length, target)
            key = lease.key
            prompt = key.step * 1_000_000 + key.prompt
            if self._whole_groups:
                siblings = self._siblings[prompt]
                siblings.pop(lease.sample_id, None)  # who comes back comes last
                siblings[lease.sample_id] = None
            requests.append(SimulatedRequest(lease.sample_id, prompt, len(lease.prompt) // 4, length, target))
        if self._awake_at > self._sim.now:
            if not self._buffer:
                self._sim.at(self._awake_at, self._start_buffered)
            self._buffer += requests
        else:
            self._add(requests)

    def _start_buffered(self) -> None:
        requests, self._buffer = [r for r in self._buffer if r.key in self._leases], []
        if self.alive and requests:
            self._add(requests)

    def _add(self, requests: list[SimulatedRequest]) -> None:
        self._wake()
        self.batch.add(requests, self._sim.now)
        self._arm()

    def _take_out(self, sample_id: int) -> tuple[_EngineLease, int]:
        """Remove a lease; returns it with the tokens that its sample has here."""
        held = self._leases.pop(sample_id)
        if held.done:
            return held, held.target
        before = len(self._buffer)
        self._buffer = [r for r in self._buffer if r.key != sample_id] if self._buffer else self._buffer
        return held, held.sent if len(self._buffer) < before else self.batch.remove(sample_id, self._sim.now)

    def _drop(self, sample_ids: Iterable[int]) -> None:
        """They are over: what was not handed over is lost."""
        for sample_id in sample_ids:
            held, length = self._take_out(sample_id)
            self.lost += length - held.sent
        self._arm()

    def _yield(self, sample_ids: Sequence[int]) -> None:
        found = [self._take_out(sample_id) for sample_id in sample_ids]
        self._flush([(held, length) for held, length in found])
        self._arm()
        if found:
            self._send(
                Yielded(tuple(Held(held.lease.sample_id, held.lease.epoch, length) for held, length in found))
            )

    def _hand_over(self) -> None:
        """Flush everything and hold nothing. A group that moves as one is cut to its shortest answer."""
        found = [self._take_out(sample_id) for sample_id in list(self._leases)]
        if self._whole_groups:
            shortest: dict[int, int] = defaultdict(lambda: 1 << 62)
            for held, length in found:
                shortest[held.lease.key.prompt] = min(shortest[held.lease.key.prompt], length)
            cut = [(held, max(held.sent, shortest[held.lease.key.prompt])) for held, _ in found]
            self.lost += sum(length for _, length in found) - sum(length for _, length in cut)
            found = cut
        self._flush(found)
        self._arm()

    def _flush(self, found: Iterable[tuple[_EngineLease, int]]) -> None:
        """Send the tokens that the core does not have, with the end of what has ended."""
        chunks = []
        for held, length in found:
            finish = "stop" if length == held.target else None
            new = length - held.sent
            if new or finish:
                tokens = zeros(new)
                lease = held.lease
                chunks.append(
                    Chunk(
                        lease.sample_id, lease.epoch, held.sent, lease.version, tokens, tokens, tokens, finish
                    )
                )
                self.tokens += new
        if chunks:
            self._send(Chunks(tuple(chunks)))

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
        if ended:
            self._ended(ended)
        self._arm()

    def _mark_idle(self) -> None:
        if self._busy_since is not None:
            self.busy_s += self._sim.now - self._busy_since
            self._busy_since = None

    def _ended(self, keys: Sequence[int]) -> None:
        """Samples reached their ends."""
        whole = []
        for key in keys:
            held = self._leases[key]
            if self._whole_groups:
                held.done = True
                whole += self._complete_group(held)
            else:
                whole.append(key)
        # All are taken out before the first word is said: the answer to it may be a lease for this very engine.
        over = [self._leases.pop(key) for key in whole]
        self._flush((held, held.target) for held in over)

    def _complete_group(self, held: _EngineLease) -> list[int]:
        """The samples of its group, if none is left to generate here."""
        key = held.lease.key
        prompt = key.step * 1_000_000 + key.prompt
        mine = [sample_id for sample_id in self._siblings[prompt] if sample_id in self._leases]
        if not all(self._leases[sample_id].done for sample_id in mine):
            return []
        del self._siblings[prompt]
        return mine


def root_of(version: int) -> bytes:
    """What names a version's bytes."""
    return b"%d" % version
