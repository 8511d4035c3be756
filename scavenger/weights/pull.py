"""Fetches one version from all its holders and gives it out only when every byte is verified (I8).

Owns the threads and connections of one pull; `transfer` decides. One thread a connection: receiving, hashing and copying run outside the
interpreter's lock, so they overlap. A chunk is received into the thread's own memory, hashed there, and only then copied into place.
Every wait ends: a connection is closed when it is silent for `stall_s`, the pull at its deadline, with what is missing and why; what comes
at `LEAST_NBYTES_PER_S` or faster puts the deadline off. A thread
that cannot be woken (a read of a filesystem that is gone) is left behind; it changes nothing any more.
Boundary: threads and connections of one pull; IO.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import structlog

from scavenger.asyncio_helpers import within
from scavenger.errors import WeightsError, WireError
from scavenger.protocol import messages
from scavenger.protocol.keys import KeyPair
from scavenger.weights import channel as channels
from scavenger.weights import choice, delta
from scavenger.weights.channel import Channel, FileChannel, SharedContext, TcpChannel, ZmqChannel, is_near
from scavenger.weights.channel_rdma import RdmaChannel
from scavenger.weights.choice import DeltaOffer, Form, RateBook, Rates
from scavenger.weights.delta_store import Chains
from scavenger.weights.manifest import Manifest
from scavenger.weights.memory import Buffer
from scavenger.weights.pace import LEAST_NBYTES_PER_S, NodePace
from scavenger.weights.protocol import AvailableChunks, ChunkPart, NoSuch, OfferedDeltas, Reached, SourceReply
from scavenger.weights.spool import SCHEME
from scavenger.weights.transfer import ChunkOutcome, Transfer, TransferLimits

_log = structlog.get_logger(__name__)
_IDLE_S = 0.02  # how soon a connection without work looks whether there is some again
_POLL_S = channels.POLL_S  # also how often a partial holder is asked what it has
MAX_SOURCES = 16  # at a time; the ranks of a large training job take turns
#: Of a smaller version each engine fetches its own: it would wait longer for its node's leader than its bytes take.
LED_NBYTES = 32 << 20
JOIN_S = 1.0  # how long a pull that is over waits for its connections to end
#: A pull waits so long in all for deltas that are nearly made, where that is predicted to be quicker: a quarter of its usual deadline.
MOST_WAIT_S = 30.0
_ASKED_AT_ONCE = 2  # chunks of each connection, before it delivered any
#: Of a version of so many chunks, each connection asks for its first one the other way, so that both ways stay measured.
PROBED_CHUNKS = 256
_LOGGED = 4  # decisions of a pull: where both ways take as long, it may change its mind often
_RECHOOSE = 16  # chunks after which what was measured meanwhile is looked at
Apply = Callable[[memoryview, memoryview, memoryview], None]


class Pull:
    """One version on its way here. Connections begin with `offer`; what arrived stays when they end, so a pull can be gone on with."""

    def __init__(
        self,
        manifest: Manifest,
        keypair: KeyPair,
        *,
        limits: TransferLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
        arrived: Callable[[int], None] | None = None,
        base: tuple[Manifest, Buffer] | None = None,
        buffer: Buffer | None = None,
        no_nixl: FailedEndpoints | None = None,
        relay: Chains | None = None,
        pace: NodePace | None = None,
        rates: RateBook | None = None,
        apply: Apply | None = None,
    ) -> None:
        """`arrived` is told each verified chunk, from any thread. `seed`: this receiver's own order of chunks; None = random.

        `base`: verified weights that are here, which deltas may start from. `buffer`: memory of the version's size that has no reader.
        `no_nixl`: endpoints not to be read by NIXL; those with which it fails are added. `relay` keeps the deltas that came.
        `pace`: of what comes from other machines. `rates`: what earlier pulls measured; this one adds to them. `apply`: what does as
        `delta.apply_chain` does, from several threads.
        """
        self.manifest = manifest
        self.buffer = buffer or Buffer(manifest.total_nbytes)
        self.base = base if base is not None and delta.same_layout(base[0], manifest) else None
        self.relay, self._parent = relay, self.base[0].root if self.base is not None else b""
        self.deltas, self.nbytes, self.verify_s = (
            0,
            0,
            0.0,
        )  # chunks that came as deltas; bytes that came; threads' seconds of hashing
        self.keypair = keypair
        self.limits = limits or TransferLimits()
        self.clock = clock
        self.arrived = arrived or (lambda _chunk: None)
        self.lock = threading.Lock()
        self.ended = threading.Event()
        seed = random.getrandbits(32) if seed is None else seed
        self.transfer = Transfer(manifest, 0, self.limits, clock(), blob=self.buffer.view, seed=seed)
        self.context = SharedContext()
        self.no_nixl = no_nixl if no_nixl is not None else FailedEndpoints()
        self.pace = pace or NodePace()
        self.rates, self.apply = rates or RateBook(), apply or delta.apply_chain
        self.choice = choice.choose(manifest.total_nbytes, None, Rates())
        self._offers: dict[messages.WeightSource, tuple[OfferedDeltas, float]] = {}  # and when each came
        self._waiting_since: float | None = None  # for deltas to be made
        self._changes = 0  # of the choice
        self.reported_to: set[str] = set()  # endpoints that know what was measured
        self._sources: list[messages.WeightSource] = []
        self._numbers: dict[messages.WeightSource, int] = {}
        # Whether it is kept for when the others deliver nothing, and for how long (0: as usual).
        self._last: dict[messages.WeightSource, tuple[bool, float]] = {}
        self._streams: list[_Stream] = []
        self._stuck: list[_Stream] = []  # of earlier tries
        self._waiting: deque[messages.WeightSource] = deque()  # for one of `MAX_SOURCES` places
        self._notify: Callable[[], None] = lambda: None

    def offer(self, sources: Sequence[messages.WeightSource], version: int | None = None) -> None:
        """Pull from these too, which call it `version` (None: as the manifest does). A known one goes on, or is tried again if given up."""
        kept = self.manifest.total_nbytes >= LED_NBYTES
        last = {
            _plain(source): (
                source.last and not is_near(source) and (kept or source.after_s > 0),
                source.after_s,
            )
            for source in sources
        }
        sources = sorted(last, key=lambda source: last[source][0])
        with self.lock:
            self._last.update(last)
            for number, source in enumerate(self._sources):
                self.transfer.keep_for_last(number, *self._last[source])
            self._numbers.update(
                dict.fromkeys(sources, self.manifest.version if version is None else version)
            )
            busy = {stream.source for stream in (*self._streams, *self._stuck) if stream.is_alive()}
            waiting = set(self._waiting)  # thousands, of a large training job
            fresh = [source for source in sources if source not in busy and source not in waiting]
            free = max(0, MAX_SOURCES - len(busy))
            first, share = not self._sources, max(1, self.limits.streams // max(1, len(fresh[:free])))
            for source in fresh[:free]:
                self._begin(source, share if source.complete or first else 1)
            self._waiting.extend(fresh[free:])

    def _begin(self, source: messages.WeightSource, connections: int) -> None:  # under the lock
        self._streams = [stream for stream in self._streams if stream.is_alive()]
        self._sources.append(source)
        self.transfer.keep_for_last(len(self._sources) - 1, *self._last[source])
        for _ in range(connections):
            stream = _Stream(self, self.transfer.add_holder(len(self._sources) - 1, self.clock()), source)
            self._streams.append(stream)
            stream.start()

    def yield_slot(self, stream: _Stream) -> None:
        """A source that has nothing for us now makes room for one that waits, where one does; its turn comes again."""
        with self.lock:
            if self._waiting and not stream.left and not self.ended.is_set():
                self._waiting.append(stream.source)
                self.transfer.abandon(stream.index, "")  # ends the stream
                self._begin(self._waiting.popleft(), 1)

    async def finish(self, deadline_s: float) -> Buffer:
        """Wait until every byte is here and verified. Raises `WeightsError` otherwise; the pull can then be gone on with (`again`).

        `deadline_s` is for what comes slower than `LEAST_NBYTES_PER_S`: each verified byte earns the time that it takes at that rate.
        """
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            loop.call_soon_threadsafe(news.set)

        self._notify = notify
        threading.Thread(target=self._prepare, name="weights-memory", daemon=True).start()
        before, earned_s = self.transfer.here_nbytes(), 0.0
        try:
            async with asyncio.timeout(deadline_s) as limit:
                until = loop.time() + deadline_s
                while not self.transfer.complete() and any(stream.is_alive() for stream in self._streams):
                    await within(news, _POLL_S)
                    news.clear()
                    earned_s = (self.transfer.here_nbytes() - before) / LEAST_NBYTES_PER_S
                    limit.reschedule(until + earned_s)
        except TimeoutError as error:
            raise WeightsError(
                f"version {self.manifest.version} not complete after {deadline_s + earned_s:.3g} s: {self._summary()}"
            ) from error
        finally:
            await self._end()
        if self.transfer.complete():
            return self.buffer
        if not self._sources:
            raise WeightsError(
                f"version {self.manifest.version} has no source",
                "the trainer publishes it again when it reconnects",
            )
        raise WeightsError(f"version {self.manifest.version}: every source was given up: {self._summary()}")

    def here(self) -> list[int]:
        """The chunks that are here and verified."""
        with self.lock:
            return [int(chunk) for chunk in np.flatnonzero(self.transfer.here)]

    def coming(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which chunks were asked of a holder and are not here yet."""
        with self.lock:
            return self.transfer.coming()

    def again(self, manifest: Manifest | None = None) -> None:
        """Make a pull that ended ready for further sources; what is here stays. `manifest`: the same weights under another number."""
        self.manifest = manifest or self.manifest
        self.ended.clear()
        self._stuck = [stream for stream in (*self._stuck, *self._streams) if stream.is_alive()]
        self._sources, self._streams, self._waiting = [], [], deque()
        self.transfer = self.transfer.resumed(self.manifest, self.clock())

    # ---------------------------------------------------------------- whole, as deltas, or not yet

    def offered(self, source: messages.WeightSource, deltas: OfferedDeltas | None) -> None:
        """A source said what deltas it has, or that it has none. Called under the lock."""
        if deltas is None or not deltas.of_nbytes:
            self._offers.pop(source, None)
        else:
            self._offers[source] = deltas, self.clock()
        self.rechoose()

    def known_rates(self) -> Rates:
        """Of the connections that there are. Called under the lock."""
        far = [stream for stream in self._streams if stream.is_alive() and not is_near(stream.source)]
        cores = len(os.sched_getaffinity(0))
        return self.rates.rates([host_of(stream.source) for stream in far], cores, self.pace.nbytes_per_s)

    def rechoose(self) -> None:
        """Decide once more, from what is offered and measured by now. Called under the lock."""
        now, full = self.clock(), self.manifest.total_nbytes
        waited_s = now - self._waiting_since if self._waiting_since is not None else 0.0
        found = choice.choose(
            full,
            self._offer(now) if self.base is not None else None,
            self.known_rates(),
            ahead_nbytes=_ASKED_AT_ONCE * len(self._streams) * self.manifest.chunk_nbytes,
            waited_s=waited_s,
            most_wait_s=MOST_WAIT_S,
        )
        if found.form is Form.NOTHING_YET and self._waiting_since is None:
            self._waiting_since = now
        if found.form is not self.choice.form or (found.delta_s is not None and self.choice.delta_s is None):
            self._changes += 1
            if self._changes <= _LOGGED:
                _log.info("weights.chosen", version=self.manifest.version, reason=found.reason)
        self.choice = found

    def _offer(self, now: float) -> DeltaOffer | None:
        """All sources' offers together: each is of the chunks that it has."""
        offers = list(self._offers.values())
        if not offers:
            return None
        of_nbytes = sum(one.of_nbytes for one, _ in offers)
        share = sum(one.nbytes for one, _ in offers) / of_nbytes
        pending_s = 0.0
        for one, at in offers:
            left_s = one.left_nbytes / one.nbytes_per_s if one.nbytes_per_s else math.inf
            pending_s = max(pending_s, left_s - (now - at) if one.left_nbytes else 0.0)
        return DeltaOffer(share * self.manifest.total_nbytes, max(one.steps for one, _ in offers), pending_s)

    def _prepare(self) -> None:
        """Make memory ahead of what comes; ends with the pull."""
        for upto in range(0, self.manifest.total_nbytes + (64 << 20), 64 << 20):
            if self.ended.is_set():
                return
            self.buffer.prepare(upto)

    def _summary(self) -> str:
        with self.lock:
            return self.transfer.summary()

    async def _end(self) -> None:
        self.ended.set()
        with self.lock:
            streams = list(self._streams)
        for stream in streams:
            stream.hang_up()
        await asyncio.shield(asyncio.to_thread(self._join, streams))

    def _join(self, streams: Sequence[_Stream]) -> None:
        """A read of a filesystem that is gone never ends: such a stream is left behind, and with it what it refers to.

        It refers to this pull and so has a view of the memory, which the pool does not give out again as long as it does.
        """
        until = time.monotonic() + JOIN_S
        for stream in streams:
            stream.join(max(0.0, until - time.monotonic()))
        with self.lock:
            stuck = [stream for stream in streams if stream.is_alive()]
            for stream in stuck:
                stream.left = True
            self._streams = stuck  # those that ended would hold, through this pull, a view of the memory until a collector comes
        for stream in stuck:
            _log.warning(
                "weights.stuck", source=stream.source.endpoint, reason=f"it did not end within {JOIN_S:g} s"
            )

    def news(self) -> None:
        with contextlib.suppress(RuntimeError):  # the waiter's loop is over
            self._notify()


def host_of(source: messages.WeightSource) -> str:
    """What its rate is kept under: the host, of whatever port; a disk is one of its own."""
    if source.endpoint.startswith(SCHEME):
        return SCHEME
    return source.endpoint.removeprefix("tcp://").rpartition(":")[0]


def _plain(source: messages.WeightSource) -> messages.WeightSource:
    return msgspec.structs.replace(source, last=False, after_s=0.0)


async def pull(
    manifest: Manifest,
    sources: Sequence[messages.WeightSource],
    keypair: KeyPair,
    deadline_s: float,
    *,
    limits: TransferLimits | None = None,
    clock: Callable[[], float] = time.monotonic,
    seed: int | None = None,
) -> Buffer:
    """The version's complete, verified bytes.

    Raises `WeightsError`, naming what is missing and each source's last failure, after `deadline_s` or as soon as every source
    has refused or sent wrong bytes too often. Nothing is returned unverified; nothing is left behind.
    """
    work = Pull(manifest, keypair, limits=limits, clock=clock, seed=seed)
    work.offer(sources)
    return await work.finish(deadline_s)


class _Stream(threading.Thread):
    """One connection to one source. All that it knows of the version is in the pull's transfer."""

    def __init__(self, pull: Pull, index: int, source: messages.WeightSource) -> None:
        super().__init__(name=f"weights-pull-{index}", daemon=True)
        self.source = source
        self._pull = pull
        self.index = index
        self._manifest = msgspec.structs.replace(
            pull.manifest, version=pull._numbers.get(source, pull.manifest.version)
        )
        self._transfer = pull.transfer  # not the next one's, when this is left behind
        self.left = False  # the pull went on without it (under its lock): what it still gets is of no use
        self._channel: Channel | None = None
        self._connections = ConnectionFactory(
            source, pull.keypair, pull.context, pull.limits.stall_s, pull.no_nixl
        )
        self._into = memoryview(bytearray(pull.manifest.chunk_nbytes))
        self._made: memoryview | None = None  # where deltas are applied
        self._bad_deltas = 0
        self._have_at: float | None = None  # when it was last asked what it has; None: not on this connection
        self._have_due = False
        self._complaint = ""  # what its connection was last lost for
        self._asked_at = pull.clock()  # when it last had anything for us
        self._known = False  # whether it said on this connection what it has: nothing is asked of it before
        self._probed = len(pull.manifest.chunk_hashes) < PROBED_CHUNKS
        self._whole_at: float | None = None  # when a whole chunk was last done with; None: the last was none
        self._taken = 0

    def hang_up(self) -> None:
        if (channel := self._channel) is not None:
            channel.close()

    def run(self) -> None:
        """Ask and take until the version is complete, the pull ends or this source is given up."""
        pull, index = self._pull, self.index
        holder = self._transfer.holders[index]
        try:
            while not (self.left or pull.ended.is_set() or self._transfer.complete() or holder.given_up):
                resting = holder.resting_until - pull.clock()
                if resting > 0:
                    pull.ended.wait(min(resting, _POLL_S))
                    if holder.resting_until <= pull.clock():
                        pull.yield_slot(self)
                    continue
                if self._channel is None and self._transfer.is_kept_back(index, pull.clock()):
                    pull.ended.wait(_POLL_S)
                    pull.yield_slot(self)
                    continue
                try:
                    self._turn()
                except (OSError, WireError) as error:
                    self._lost(str(error))
        finally:
            self._disconnect()
            pull.news()

    def _lost(self, reason: str) -> None:
        channel = self._channel
        self._disconnect()
        if isinstance(channel, RdmaChannel) and channel.failed:
            self._connections.nixl_failed(reason)
            self._into = memoryview(
                bytearray(self._pull.manifest.chunk_nbytes)
            )  # a read that failed may write the old one yet
        pull = self._pull
        if not (self.left or pull.ended.is_set()):
            if reason != self._complaint:  # once, not each time that it is tried again
                _log.warning("weights.lost", source=self.source.endpoint, reason=reason)
            self._complaint = reason
            with pull.lock:
                self._transfer.lost(self.index, f"{self.source.endpoint}: {reason}", pull.clock())

    def _turn(self) -> None:
        """Ask what can be asked; take one answer, or wait a moment."""
        pull, index = self._pull, self.index
        channel = self._connected()
        if self.left:
            return
        now = pull.clock()
        with pull.lock:
            waits = pull.choice.form is Form.NOTHING_YET and not self._reads_memory(channel)
            chunks = self._transfer.ask(index, now) if self._known and not waits else []
            partial = self._transfer.is_partial(self._transfer.holders[index].source)
            asked = bool(self._transfer.holders[index].asked)
            parent = pull.base[0].root if pull.base is not None else b""
            whole = pull.choice.form is Form.FULL
        again = partial or (waits and self._known)
        if self._have_at is None or (again and not self._have_due and now - self._have_at >= _POLL_S):
            self._ask_have(channel, parent)
            self._have_at, self._have_due = now, True
        for chunk in chunks:
            probe, self._probed = not self._probed, True
            channel.ask(chunk, b"" if whole != probe else parent)
        if not asked and not self._have_due:
            if partial and (self._transfer.holders[index].chunks or now - self._asked_at >= _POLL_S):
                pull.yield_slot(self)
            # What a partial holder has is known until it is asked again.
            pull.ended.wait(max(_IDLE_S, (self._have_at or now) + _POLL_S - now) if again else _IDLE_S)
            return
        self._asked_at = now if asked else self._asked_at
        reply = channel.reply(self._into, self._heard)
        if reply is not None:
            self._take(reply)
            if isinstance(reply, ChunkPart) and not self._connections.near:
                pull.pace.take(reply.nbytes, pull.ended)  # what comes meanwhile waits with its sender
            return
        with pull.lock:
            heard_at = self._transfer.holders[index].heard_at
            silent = self._transfer.stalled(index, pull.clock())
        if silent:
            _log.warning("weights.stalled", source=self.source.endpoint)
            self._disconnect()
        # It answers in turn: while chunks come, what it has is said behind them.
        elif self._have_due and pull.clock() - max(self._have_at or now, heard_at) >= pull.limits.stall_s:
            raise WireError(f"no answer for {pull.limits.stall_s:g} s")

    def _reads_memory(self, channel: Channel) -> bool:
        """Whether it has no deltas: it reads a neighbour's memory, a disk, or a holder's memory by NIXL."""
        return isinstance(channel, FileChannel | RdmaChannel)

    def _ask_have(self, channel: Channel, parent: bytes) -> None:
        """Also tell, once a pull and source, what was measured: a publisher that is told decides by it whether to make deltas, and each of
        a version's ranks decides for its part."""
        pull, link, applying = self._pull, 0.0, 0.0
        with pull.lock:
            rates = pull.known_rates()
            if parent and rates.link.count and self.source.endpoint not in pull.reported_to:
                pull.reported_to.add(self.source.endpoint)
                link = rates.link.per_s
                applying = rates.applying.per_s * rates.threads if rates.applying.count else 0.0
        channel.ask_have(parent, link, applying)

    def _heard(self) -> None:
        self._transfer.heard(self.index, self._pull.clock())

    def _take(self, reply: SourceReply) -> None:
        pull, index = self._pull, self.index
        if reply.version != self._manifest.version or isinstance(reply, Reached):
            raise WireError("an answer that was not asked for")
        if isinstance(reply, AvailableChunks):
            self._have_due, self._known = False, True
            found = channels.here(reply, len(pull.manifest.chunk_hashes))
            coming = channels.coming(reply, len(pull.manifest.chunk_hashes))
            with pull.lock:
                source = self._transfer.holders[index].source
                if found is not None:
                    self._transfer.expect(source, found, coming, pull.clock())
                self._transfer.know(source, found)
                pull.offered(self.source, reply.deltas)
            return
        if isinstance(reply, NoSuch):
            with pull.lock:
                if reply.absent:
                    self._transfer.absent(index, reply.chunk, pull.clock())
                else:
                    self._transfer.refused(index, reply.chunk, reply.reason, pull.clock())
            if reply.chunk < 0:
                self._disconnect()  # it is asked again on the next one
            return
        data = self._into[: reply.nbytes]
        pull.nbytes += reply.nbytes
        self._measure_link(reply)
        if reply.delta:
            if (
                reply.chunk not in self._transfer.holders[index].asked
            ):  # only this thread asks on it and takes back
                raise WireError("a delta that was not asked for")
            data = self._from_delta(reply.chunk, data)
        began = time.monotonic()
        good = self._transfer.matches(reply.chunk, data)
        took_s = time.monotonic() - began
        pull.verify_s += took_s
        if reply.delta and not good and self._bad_deltas < 2 * pull.limits.window:
            # Whether the delta or what is here is wrong: whole chunks are right. Those that are under way already are let go.
            pull.base, self._bad_deltas = None, self._bad_deltas + 1
            with pull.lock:
                self._transfer.returned(index, reply.chunk, pull.clock())
            return
        if good and not self._transfer.here[reply.chunk]:
            self._transfer.write(reply.chunk, data)
        self._whole_at = None if reply.delta else pull.clock()
        self._taken += 1
        with pull.lock:
            if self.left:  # what is here is shared with the transfer that goes on
                return
            pull.rates.hashing = pull.rates.hashing.measured(len(data), took_s)
            if self._taken % _RECHOOSE == 0:
                pull.rechoose()
            verdict = self._transfer.settle(index, reply.chunk, good, pull.clock())
        if verdict is ChunkOutcome.CORRUPT:
            _log.warning("weights.corrupt", source=self.source.endpoint, chunk=reply.chunk)
        elif verdict is ChunkOutcome.ACCEPTED:
            if reply.delta and pull.relay is not None:
                pull.relay.add(
                    pull._parent, pull.manifest.root, reply.chunk, bytes(self._into[: reply.nbytes])
                )
            pull.arrived(reply.chunk)

    def _from_delta(self, chunk: int, encoded: memoryview) -> memoryview:
        """The chunk that a delta makes of the one that is here; whether it is the right one its hash will say."""
        base, manifest = self._pull.base, self._pull.manifest
        if base is None or not 0 <= chunk < len(manifest.chunk_hashes):
            return encoded[:0]
        if self._made is None:
            self._made = memoryview(bytearray(manifest.chunk_nbytes))
        start, stop = manifest.chunk_range(chunk)
        made = self._made[: stop - start]
        began, steps = time.monotonic(), delta.links(encoded)
        try:
            self._pull.apply(base[1].view[start:stop], encoded, made)
        except (WeightsError, MemoryError) as error:
            reason = error.cause if isinstance(error, WeightsError) else "no memory to unpack it"
            _log.warning("weights.bad_delta", source=self.source.endpoint, chunk=chunk, reason=reason)
            return encoded[:0]
        pull = self._pull
        with pull.lock:
            pull.deltas += 1
            pull.rates.applying = pull.rates.applying.measured(
                steps * (stop - start), time.monotonic() - began
            )
        return made

    def _measure_link(self, reply: ChunkPart) -> None:
        """What this connection carries, by whole chunks that came right after one another, or first. A delta's bytes wait in the socket
        while the one before is applied, and would say that they took no time."""
        pull = self._pull
        asked_at = self._transfer.holders[self.index].asked.get(reply.chunk)
        if (
            reply.delta
            or asked_at is None
            or self._connections.near
            or (self._taken and self._whole_at is None)
        ):
            return
        since = asked_at if self._whole_at is None else max(asked_at, self._whole_at)
        with pull.lock:
            pull.rates.delivered(host_of(self.source), reply.nbytes, pull.clock() - since)

    # ---------------------------------------------------------------- connection

    def _connected(self) -> Channel:
        if self._channel is None:
            self._have_at, self._have_due, self._known = None, False, False
            self._channel = self._connections.open(self._manifest)
        return self._channel

    def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is None:
            return
        channel.close()
        if isinstance(channel, ZmqChannel | RdmaChannel):
            channel.end()
        with self._pull.lock:
            self._transfer.hung_up(self.index)


class FailedEndpoints:
    """The endpoints with which NIXL failed, for the threads of all pulls of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._endpoints: set[str] = set()

    def __contains__(self, endpoint: str) -> bool:
        return endpoint in self._endpoints

    def add(self, endpoint: str) -> bool:
        """Whether it is new: of the threads that read from one source, one reports the failure."""
        with self._lock:
            new = endpoint not in self._endpoints
            self._endpoints.add(endpoint)
            return new


class ConnectionFactory:
    """How a receiver connects to one source: the nearest way that works, and no word twice of one that does not. For one thread.

        on this machine   the holder's memory, by a descriptor that it passes
        a spool           its file
        else              under CURVE where the source has a key; by NIXL where both have it; TCP

    Owns no connection. Errors of a connection are `OSError` or `WireError`.

    `no_nixl`: the endpoints with which NIXL failed, shared by all who open; a holder that starts anew has another.
    """

    def __init__(
        self,
        source: messages.WeightSource,
        keypair: KeyPair,
        context: SharedContext,
        timeout_s: float,
        no_nixl: FailedEndpoints,
    ) -> None:
        self._source, self._keypair, self._context, self._timeout_s = source, keypair, context, timeout_s
        self.near = is_near(source)
        self._reported = False  # that its memory could not be had
        self._no_nixl = not source.nixl
        self._failed = no_nixl

    def open(self, manifest: Manifest) -> Channel:
        source = self._source
        if source.endpoint.startswith(SCHEME):
            return FileChannel.open(source.endpoint.removeprefix(SCHEME), manifest)
        found = self._neighbour(manifest)
        if found is not None:
            return found
        if source.server_key:
            return ZmqChannel(source, manifest.version, self._keypair, self._context, manifest.chunk_nbytes)
        return self._by_nixl(manifest) or TcpChannel.connect(source, manifest.version, self._timeout_s)

    def nixl_failed(self, reason: str) -> None:
        """It connected, and then did not carry the bytes: TCP from here on, or it would connect and fail for ever."""
        if self._failed.add(self._source.endpoint):
            _log.warning(
                "weights.nixl_failed",
                source=self._source.endpoint,
                reason=f"{reason}; it is read by TCP from here on",
            )

    def _neighbour(self, manifest: Manifest) -> Channel | None:
        if not self.near:
            return None
        try:
            return FileChannel.neighbour(self._source, manifest, self._timeout_s)
        except (OSError, WireError) as error:  # another network namespace, perhaps: the network remains
            if not self._reported:  # it is tried again with each connection
                _log.info("weights.no_shared_memory", source=self._source.endpoint, reason=str(error))
            self._reported = True
            return None

    def _by_nixl(self, manifest: Manifest) -> Channel | None:
        if self._no_nixl or self._source.endpoint in self._failed:
            return None
        try:
            return RdmaChannel.connect(self._source, manifest, self._timeout_s)
        except (OSError, WireError, WeightsError) as error:  # not installed here, perhaps: TCP remains
            self._no_nixl = True
            _log.info("weights.no_nixl", source=self._source.endpoint, reason=str(error))
            return None
