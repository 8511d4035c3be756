"""The KV blocks of samples that left this engine: kept in host memory, given to the engines that go on with them, and fetched there.

    the engine is told to give a sample back,
    or has finished an agent's turn           --keep-->  `KvShelf` (this process's host memory, `MOST_NBYTES`)
    the next engine                           --fetch--> header, then chunks, over CURVE as encrypted weights go; or from its own shelf
    a shelf of an engine that leaves          --fetch--> another engine's shelf, where the turn that goes on will find them

Owns the shelf, its server and the reader; `KvMover` is what a worker has of it. Every byte is checked against the header, and the header
against what the reader's own lease, engine and weights say (`protocol.kv`). Whatever does not come, comes late or differs raises
`KvError`: then the tokens are prefilled.

Boundary: blocks between the processes of two engines; knows no model, and decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from dataclasses import dataclass

import zmq

from rollout.engines.base import Kv, MovesKv
from scavenger.errors import ScavengerError, WeightsError, WireError
from scavenger.protocol import kv, messages
from scavenger.protocol.keys import KeyPair
from scavenger.protocol.kv import MOST_NBYTES, KvBinding, KvHeader
from scavenger.protocol.worker.events import KeepKv, KeepOtherKv, KvLoaded, KvTaken, Request, TurnKvKept
from scavenger.weights import protocol
from scavenger.weights.channel import SharedContext, ZmqChannel
from scavenger.weights.protocol import AvailableChunks, ChunkPart, Get, Have, NoSuch, SourceRequest
from scavenger.weights.source_zmq import CurveServer
from scavenger.weights.version_store import SourceStats, StoreReply

#: Between two questions for a header that its holder is still making.
ASK_AGAIN_S = 0.005
#: Chunks that are asked for ahead.
AHEAD = 4
_HEADER = 0  # chunk 0 of the wire is the header; the blocks' own chunks follow


class KvError(ScavengerError):
    """Blocks that cannot be had or may not be loaded. The sample's tokens are prefilled instead."""


@dataclass(slots=True)
class _Kept:
    nbytes: int
    header: KvHeader | None = None  # None: the engine is still giving it out
    frame: bytes = b""
    data: memoryview | None = None
    of_turn: bool = (
        False  # several turns may go on from it: it stays when it is taken, until its process leaves
    )
    awaited: bool = False  # another worker was told to fetch it before this one leaves


class KvShelf:
    """What this process keeps, by number. Thread-safe: the server's thread reads it. Turns' blocks make room first, the oldest before all:
    a sample that moves is sure to want its own."""

    def __init__(self, most_nbytes: int = MOST_NBYTES) -> None:
        self.stats = SourceStats()
        self.token = secrets.token_bytes(protocol.TOKEN_NBYTES)
        self._most = most_nbytes
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._lock = threading.Lock()
        self._leaves = False
        self._wanted_named = False
        self._on_taken: Callable[[], None] = lambda: None

    def when_taken(self, call: Callable[[], None]) -> None:
        """`call` is called, from the server's thread, each time that a reader has all of something."""
        self._on_taken = call

    def expect(self, number: int, nbytes: int, *, of_turn: bool = False) -> bool:
        """Something of this size is about to come: readers are told to ask again. False: it is too large to be kept."""
        with self._lock:
            if nbytes > self._most:
                return False
            self._kept[number] = _Kept(nbytes, of_turn=of_turn)
            while sum(one.nbytes for one in self._kept.values()) > self._most:
                turns = (other for other, one in self._kept.items() if one.of_turn)
                del self._kept[next(turns, next(iter(self._kept)))]
            return number in self._kept

    def leave(self, wanted: Iterable[int]) -> None:
        """This process leaves: what is taken goes. Of turns' blocks those of `wanted` are waited for."""
        with self._lock:
            self._leaves = True
            for number in wanted:
                self._wanted_named = True
                if number in self._kept:
                    self._kept[number].awaited = True

    def put(self, number: int, binding: KvBinding, data: memoryview) -> None:
        """It is here. Hashes every byte; nothing happens where it was let go meanwhile."""
        header = kv.header_of(binding, data)
        with self._lock:
            kept = self._kept.get(number)
            if kept is not None and data.nbytes <= kept.nbytes:
                kept.header, kept.frame = header, kv.encode_header(header)
                kept.nbytes, kept.data = data.nbytes, data.toreadonly()

    def drop(self, number: int) -> None:
        """It will not come, or is not needed."""
        with self._lock:
            self._kept.pop(number, None)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()

    def nbytes(self) -> int:
        with self._lock:
            return sum(one.nbytes for one in self._kept.values())

    def taken(self) -> KvTaken:
        """How many that are kept another worker is to take yet."""
        with self._lock:
            left = sum(one.awaited or not one.of_turn for one in self._kept.values())
            return KvTaken(left, self._wanted_named)

    def own(self, number: int) -> tuple[KvHeader, memoryview] | None:
        """For this process's own engine; None: not here, or not yet. It is taken."""
        with self._lock:
            kept = self._kept.get(number)
            if kept is None or kept.header is None or kept.data is None:
                return None
            self._take(number, kept)
            return kept.header, kept.data

    def _take(self, number: int, kept: _Kept) -> None:
        if self._leaves or not kept.of_turn:
            del self._kept[number]

    def has(self, number: int) -> bool:
        """Whether it is here or on its way."""
        with self._lock:
            return number in self._kept

    def reply(self, request: SourceRequest, _reader: Hashable) -> StoreReply:
        """What to answer a reader: chunk 0 is the header. `Have` is its receipt: it has all of it, verified."""
        chunk = request.chunk if isinstance(request, Get) else -1
        with self._lock:
            kept = self._kept.get(request.version)
            if not protocol.proven(request, self.token) or kept is None:
                self.stats.refused += 1
                return NoSuch(request.version, chunk, "no such blocks are kept here under this token"), None
            if isinstance(request, Have):
                self._take(request.version, kept)
            elif kept.header is None:
                return NoSuch(request.version, chunk, "the blocks are not here yet", absent=True), None
        if isinstance(request, Have):
            self._on_taken()
            return AvailableChunks(request.version, complete=True), None
        if chunk == _HEADER:
            return ChunkPart(request.version, chunk, len(kept.frame)), memoryview(kept.frame)
        if kept.header is None or kept.data is None or not 0 < chunk <= len(kept.header.hashes):
            self.stats.refused += 1
            return NoSuch(request.version, chunk, "there is no such chunk"), None
        start, stop = kv.chunk_range(chunk - 1, kept.data.nbytes)
        return ChunkPart(request.version, chunk, stop - start), kept.data[start:stop]


class KvServer:
    """A shelf and the socket on which others read it."""

    def __init__(self, shelf: KvShelf, address: str, on_fault: Callable[[WeightsError], None]) -> None:
        """Raises `WeightsError` when the address cannot be bound."""
        self._server = CurveServer(shelf, address, on_fault)
        self.source = messages.WeightSource(
            f"tcp://{address}:{self._server.port}", self._server.server_key, shelf.token
        )

    def close(self) -> None:
        self._server.close()


def fetch(
    order: messages.KvSource,
    fault_of: Callable[[KvHeader], str],
    keypair: KeyPair,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[KvHeader, memoryview]:
    """The blocks that an order names, each byte as their header says, in which `fault_of` finds none. Takes `order.within_s` at most:
    call it in a thread.

    Raises `KvError` where they do not come in time, or are not just that.
    """
    reader = _Reader(order, keypair, clock() + order.within_s, cancelled, clock)
    try:
        header = reader.header()
        if fault := fault_of(header):
            raise KvError(fault)
        data = reader.chunks(header)
        reader.receipt()
        return header, data
    except (OSError, WireError, zmq.ZMQError) as error:
        raise KvError(f"the holder cannot be read: {error}") from error
    finally:
        reader.close()


def checked(found: tuple[KvHeader, memoryview] | None, expected: KvBinding, nbytes: int) -> memoryview:
    """What this process itself kept, if it is `expected`. Raises `KvError`."""
    if found is None:
        raise KvError("the blocks are not kept here any more")
    header, data = found
    if fault := kv.mismatch(header, expected, nbytes):
        raise KvError(fault)
    return data


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: object) -> None:
    """From another thread, unless the loop is over."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)


class KvMover:
    """The KV blocks of one worker's engine: those that it gives out, and those that its requests bring along. One event loop.

    `loaded` says, in the order of the engine's commands, which weights it has; blocks of others are let go of. `report` gets what came of
    each request's blocks, and of each turn's; `taken` how many another worker is to take yet.
    """

    def __init__(
        self,
        engine: MovesKv,
        spec: messages.EngineSpec,
        run: str,
        keypair: KeyPair,
        address: str,
        *,
        report: Callable[[KvLoaded | TurnKvKept], None],
        taken: Callable[[KvTaken], None],
        on_fault: Callable[[WeightsError], None],
        clock: Callable[[], float],
        most_nbytes: int = MOST_NBYTES,
    ) -> None:
        """Raises `WeightsError` when `address` cannot be bound."""
        self._most = most_nbytes
        self._coming: dict[int, int] = {}  # handle -> bytes that it brings, until the engine has used them
        self._engine, self._run, self._keypair, self._clock = engine, run, keypair, clock
        self._model = kv.model_digest(spec.model_config)
        self._report, self._taken = report, taken
        self._version, self._root = -1, b""
        self._fetching: dict[int, threading.Event] = {}  # handle -> set when its lease is over
        self._shelving: set[asyncio.Task[None]] = set()
        self._closed = threading.Event()
        loop = asyncio.get_running_loop()
        self.shelf = KvShelf(most_nbytes)
        self.shelf.when_taken(lambda: _soon(loop, self._say_taken))
        self._server = KvServer(self.shelf, address, on_fault)
        self.source = self._server.source

    def _say_taken(self) -> None:
        self._taken(self.shelf.taken())

    def loaded(self, version: int, root: bytes) -> None:
        """What was begun before is over, and its blocks with it, but for those that a thread still fetches."""
        self._version, self._root = version, root
        self.shelf.clear()
        self.used([handle for handle in self._coming if handle not in self._fetching])

    def expects(self, order: KeepKv) -> bool:
        """Whether a running request's blocks can be kept. Then readers who come before they are copied out wait: `keep` follows, and many
        samples that leave at once have their turn there."""
        count = self._engine.kv_tokens(order.tokens)
        nbytes = count * self._engine.kv_token_nbytes()
        return count > 0 and self.shelf.expect(order.handle, nbytes, of_turn=order.of_turn)

    async def keep(self, order: KeepKv) -> None:
        """Copy out of the engine the blocks of a request that is expected; they are hashed while that goes on."""
        if not self.shelf.has(order.handle) and not order.of_turn:
            return
        # Of a turn the engine lets go when they are taken, wanted still or not.
        found = await self._engine.take_kv(order.handle, order.tokens)
        if found is None:
            self.shelf.drop(order.handle)
            self._say_taken()
            self._not_kept(order, "the engine has not all of them")
            return
        binding = self._binding(order.history, found.tokens)
        self._in_background(self._shelve(order, binding, found.data))

    def _in_background(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._shelving.add(task)
        task.add_done_callback(self._shelving.discard)

    async def _shelve(self, order: KeepKv, binding: KvBinding, data: memoryview) -> None:
        began = self._clock()
        await asyncio.to_thread(self.shelf.put, order.handle, binding, data)
        if not self.shelf.has(order.handle):
            self._not_kept(order, "they made room for others")
        elif order.of_turn:
            self._report(TurnKvKept(order.handle, data.nbytes, self._clock() - began))

    def _not_kept(self, order: KeepKv, fault: str) -> None:
        if order.of_turn:
            self._report(TurnKvKept(order.handle, 0, 0.0, fault))

    def keep_other(self, order: KeepOtherKv) -> None:
        """Fetch what another worker keeps of a turn, and keep it."""
        self._in_background(self._keep_other(order))

    async def _keep_other(self, order: KeepOtherKv) -> None:
        count = self._engine.kv_tokens(order.order.tokens)
        nbytes, began, fault = count * self._engine.kv_token_nbytes(), self._clock(), ""
        own = self._binding_of(order.history, count, b"")
        try:
            if not count or not self.shelf.expect(order.handle, nbytes, of_turn=True):
                raise KvError(f"{nbytes} bytes of {count} tokens are not kept here")
            _, data = found = await asyncio.to_thread(self._fetch_other, order.order, own)
            await asyncio.to_thread(self.shelf.put, order.handle, found[0].binding, data)
            if (self._version, self._root) != (own.version, own.root) or not self.shelf.has(order.handle):
                raise KvError("other weights were loaded, or they made room for others")
        except KvError as error:
            fault = error.cause
            self.shelf.drop(order.handle)
        self._report(TurnKvKept(order.handle, nbytes, self._clock() - began, fault))

    def _fetch_other(self, order: messages.KvSource, own: KvBinding) -> tuple[KvHeader, memoryview]:
        token_nbytes = self._engine.kv_token_nbytes()
        return fetch(
            order,
            lambda header: kv.mismatch_of_other(header, own, token_nbytes),
            self._keypair,
            cancelled=self._closed.is_set,
            clock=self._clock,
        )

    def leave(self, wanted: Iterable[int]) -> None:
        """This worker leaves; of what turns left, others were told to fetch `wanted`."""
        self.shelf.leave(wanted)
        self._say_taken()

    def drop(self, numbers: Iterable[int]) -> None:
        """No turn will want these."""
        for number in numbers:
            self.shelf.drop(number)

    def _binding(self, history: str, tokens: Sequence[int]) -> KvBinding:
        return self._binding_of(history, len(tokens), kv.digest_of(tokens))

    def _binding_of(self, history: str, tokens: int, digest: bytes) -> KvBinding:
        layout = self._engine.kv_layout()
        return KvBinding(self._run, history, self._version, self._root, self._model, layout, tokens, digest)

    def begins(self, request: Request) -> bool:
        """Whether the blocks that it names are of its first tokens, and there is memory for them. Then they are to be `fetched`, unless the
        lease ends. The last token's are never needed: the next one is drawn from what it computes."""
        if (
            request.kv is None
            or request.begun_version not in (-1, self._version)
            or not 0 < request.kv.tokens < len(request.prompt) + len(request.accepted)
            or not self._engine.kv_tokens(request.kv.tokens)
        ):
            return False
        tokens = self._engine.kv_tokens(request.kv.tokens)
        nbytes, coming = tokens * self._engine.kv_token_nbytes(), sum(self._coming.values())
        if nbytes + coming > self._most:
            fault = f"{nbytes} bytes beside {coming} that come already are over the limit of {self._most}"
            self._report(KvLoaded(request.handle, tokens, nbytes, 0.0, fault))
            return False
        self._fetching[request.handle] = threading.Event()
        self._coming[request.handle] = nbytes
        return True

    async def fetched(self, request: Request) -> Kv | None:
        """The blocks that a request names, verified; None: prefill it. Reports what came of them. Ends early once its lease is over."""
        assert request.kv is not None
        began, over = self._clock(), self._fetching[request.handle]
        text = request.prompt + request.accepted
        tokens = text[: self._engine.kv_tokens(request.kv.tokens)]
        nbytes = len(tokens) * self._engine.kv_token_nbytes()
        fault, data = "", None
        try:
            data = await asyncio.to_thread(self._fetch, request, tokens, nbytes, over)
        except KvError as error:
            fault = error.cause
        if data is None or over.is_set():
            self.used((request.handle,))
        if over.is_set():
            return None
        self._report(KvLoaded(request.handle, len(tokens), nbytes, self._clock() - began, fault))
        return None if data is None else Kv(tokens, data)

    def _fetch(
        self, request: Request, tokens: tuple[int, ...], nbytes: int, over: threading.Event
    ) -> memoryview:
        order = request.kv
        assert order is not None
        expected = self._binding(request.history, tokens)
        if order.source.server_key == self.source.server_key:
            return checked(self.shelf.own(order.number), expected, nbytes)
        _, data = fetch(
            order,
            lambda header: kv.mismatch(header, expected, nbytes),
            self._keypair,
            cancelled=over.is_set,
            clock=self._clock,
        )
        return data

    def is_over(self, handle: int) -> bool:
        """Whether the lease ended while its blocks were on their way. Asked once, when they have come."""
        event = self._fetching.pop(handle, None)
        over = event is not None and event.is_set()
        if over:
            self.used((handle,))
        return over

    def forget(self, handles: Iterable[int]) -> None:
        """These leases are over. What a thread still fetches of them counts until it ends."""
        for handle in handles:
            if handle in self._fetching:
                self._fetching[handle].set()
            else:
                self.used((handle,))

    def used(self, handles: Iterable[int]) -> None:
        """These have their first tokens, or will have none: what they brought takes no more memory here or in the engine."""
        for handle in handles:
            self._coming.pop(handle, None)

    def close(self) -> None:
        self._closed.set()
        self.forget(list(self._fetching))
        self._server.close()


class _Reader:
    """One connection to a holder, for one sample's blocks."""

    def __init__(
        self,
        order: messages.KvSource,
        keypair: KeyPair,
        deadline: float,
        cancelled: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._order = order
        self._deadline, self._cancelled, self._clock = deadline, cancelled, clock
        self._channel = ZmqChannel(order.source, order.number, keypair, SharedContext(), kv.CHUNK_NBYTES)

    def header(self) -> KvHeader:
        """Asks until its holder has it."""
        into = memoryview(bytearray(kv.MAX_HEADER_BYTES))
        while True:
            self._channel.ask(_HEADER)
            reply = self._reply(into)
            if isinstance(reply, ChunkPart) and reply.chunk == _HEADER:
                return kv.decode_header(into[: reply.nbytes])
            if not (isinstance(reply, NoSuch) and reply.absent):
                raise KvError(
                    reply.reason if isinstance(reply, NoSuch) else "the holder answers another question"
                )
            time.sleep(ASK_AGAIN_S)  # the holder's engine gives it out meanwhile: no message says when

    def chunks(self, header: KvHeader) -> memoryview:
        """All bytes, each checked against the header."""
        data = memoryview(bytearray(header.nbytes))
        count, asked = len(header.hashes), 0
        for chunk in range(count):
            while asked < min(count, chunk + AHEAD):
                asked += 1
                self._channel.ask(asked)  # chunk 0 is the header
            into = data[slice(*kv.chunk_range(chunk, header.nbytes))]
            reply = self._reply(into)
            if not isinstance(reply, ChunkPart) or reply.chunk != chunk + 1:
                raise KvError(
                    reply.reason if isinstance(reply, NoSuch) else "the holder answers another question"
                )
            if fault := kv.chunk_fault(header, chunk, into[: reply.nbytes]):
                raise KvError(fault)
        return data

    def receipt(self) -> None:
        """Tell the holder that it need not keep them; its answer shows that it heard."""
        self._channel.ask_have()
        self._reply(memoryview(b""))

    def _reply(self, into: memoryview) -> protocol.SourceReply:
        while True:
            if self._cancelled():
                raise KvError("the lease is over")
            if self._clock() >= self._deadline:
                raise KvError(f"the blocks did not come within {self._order.within_s:.3f} s")
            reply = self._channel.reply(into, lambda: None)
            if reply is not None:
                return reply

    def close(self) -> None:
        self._channel.close()
        self._channel.end()
