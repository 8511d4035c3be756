"""The way of a message between the sockets and the core, read top-down: bytes in, checked event, core, actions, message with its tokens.

    frame --event_of--> event --line of its connection--> core.handle --> Write, to the ledger's writer
                                  |  waits for tokens                --> Send, Fill --line of its connection--> filled --> frame
                                  v  that it is compared with                          |  waits for its tokens,
                               Fetcher: read from the ledger in a thread <-------------+  and for room at a slow peer (`Deliveries`)

`event_of` decodes, and checks what the core does not: that integers fit the ledger's columns, that token ids and logprobs can be. Lengths,
leases and budgets are the core's (`router.core.samples`), which takes a fault found here as its last reason to refuse a chunk.

A resend is compared with what was accepted, a moved sample is sent with its tokens, a group with all of them. Tokens that left memory are
read back from the ledger; meanwhile that connection's messages wait in order, and other connections never do. A ledger that cannot be
read for the moment is asked again; anything else that a read or a handler raises goes to `failed`, and ends the daemon.

Boundary: sans-IO; the server owns the sockets and performs what it says.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec
import numpy as np
import structlog

from scavenger.errors import LedgerError, LedgerUnavailable, WireError
from scavenger.protocol.messages import (
    Assign,
    Call,
    Chunk,
    Chunks,
    GroupDone,
    Message,
    SiblingTokens,
    SubmitGroups,
    ToDaemon,
    TurnTokens,
    WorkerHello,
    decode_to_daemon,
)
from scavenger.router.core.events import (
    Fill,
    HelloReceived,
    PeerIdentity,
    RouterEvent,
    Send,
    TrainerCalled,
    WorkerSent,
)
from scavenger.router.core.payloads import (
    Payload,
    PayloadStore,
    fill_group,
    fill_leases,
    fill_siblings,
    fill_tokens,
    missing,
    needed,
)
from scavenger.router.core.samples import overlaps
from scavenger.router.core.tables import Core

log = structlog.get_logger()


T = TypeVar("T")


R = TypeVar("R")


ReadPayloads = Callable[[Sequence[int]], Awaitable[Mapping[int, Payload]]]


#: Messages, other than groups, that may stand behind a group in one connection's line before further ones are dropped.
MOST_WAITING = 4000


class PayloadPipeline:
    """Two lines over one store. `post(event)` hands to the core; `send(conn, message)` to a peer, where `connected(conn)`.

    `send` gives False for a group that the peer's queue did not take: it is tried again. Of other messages it is the last word.
    """

    def __init__(
        self,
        core: Core,
        store: PayloadStore,
        read: ReadPayloads,
        *,
        post: Callable[[RouterEvent], None],
        send: Callable[[int, Message], bool],
        connected: Callable[[int], bool],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._core, self._store = core, store
        self.counters: Counter[str] = Counter()  # messages that were not sent, by why
        self.deliveries = Deliveries()
        self._post, self._send, self._connected = post, send, connected
        self._fetcher = Fetcher(read, lambda sample_id, payload: take_back(core, store, sample_id, payload))
        self._in: ConnectionLines[RouterEvent] = ConnectionLines(
            lambda event: lacking(core, store, event), self._take, self._fetcher, failed
        )
        self._out: ConnectionLines[Send | Fill] = ConnectionLines(
            self._lacks, self._give, self._fetcher, failed, self._has_headroom
        )

    def receive(self, conn: int, event: RouterEvent, nbytes: int) -> bool:
        """Hand a peer's event of `nbytes` to the core; False when it has to wait."""
        return self._in.put(conn, event, nbytes)

    def give(self, action: Send | Fill) -> None:
        """Send, behind what this connection still waits for."""
        if self._out.waiting(action.conn) >= MOST_WAITING and not isinstance(action.message, GroupDone):
            self.counters["messages_dropped"] += (
                1  # as a queue of the transport that is full does: every protocol survives a lost message
            )
        else:
            self._out.put(action.conn, action)

    @property
    def waiting_bytes(self) -> int:
        """Of peers' messages that wait."""
        return self._in.nbytes

    @property
    def reads(self) -> int:
        """How often the ledger was asked for tokens."""
        return self._fetcher.reads

    async def close(self) -> None:
        await self._in.close()
        await self._out.close()

    def _take(self, event: RouterEvent) -> None:
        self._post(event)
        self._store.trim()

    def _has_headroom(self, action: Send | Fill) -> bool:
        if not isinstance(action.message, GroupDone) or not self._connected(action.conn):
            return True
        return self.deliveries.has_headroom(action.conn, self.run_of(action.message))

    def run_of(self, message: GroupDone) -> int:
        """Whose group this is; 0 when it was forgotten."""
        group = self._core.groups.get(message.group_id)
        return group.run.id if group is not None else 0

    def _lacks(self, action: Send | Fill) -> dict[int, int]:
        if isinstance(action, Send) or not self._connected(action.conn):
            return {}
        return lacking_message(self._core, self._store, action)

    def _give(self, action: Send | Fill) -> bool:
        """False: not now."""
        if isinstance(action, Send):
            return self._send(action.conn, action.message) or not isinstance(action.message, GroupDone)
        if not self._connected(action.conn):
            return True
        message = filled(self._store, action)
        self._store.trim()
        if message is None:
            self.counters["messages_outdated"] += 1
            return True
        if isinstance(message, Assign) and len(message.leases) < len(action.lengths):
            self.counters["leases_outdated"] += len(action.lengths) - len(message.leases)
        if isinstance(message, SiblingTokens):
            self.counters["sibling_bytes_sent"] += len(message.tokens)
        return self._send(action.conn, message) or not isinstance(message, GroupDone)


# ---------------------------------------------------------------- in: bytes to a checked event


#: A logprob is not positive; float32 may round one that is near 0 to just above it.
MOST_LOGPROB = np.float32(1e-3)


_LEAST_LOGPROB = np.finfo(np.float32).min


_INT64 = 2**63


def event_of(conn: int, identity: PeerIdentity, frame: memoryview, limit: int) -> RouterEvent:
    """What a peer's frame of at most `limit` bytes means to the core. Raises `WireError` for one that is no message."""
    message = decode_to_daemon(frame, limit)
    if not fits(message):
        raise WireError(f"a {type(message).__name__} with numbers over 64 bits")
    if isinstance(message, WorkerHello):
        return HelloReceived(conn, identity, message)
    if isinstance(message, Call):
        return TrainerCalled(conn, identity, message)
    return checked(conn, message)


def fits(message: ToDaemon) -> bool:
    """Whether every integer that the ledger may be asked to keep fits its 64-bit columns. Others arrive checked or as text."""
    if isinstance(message, Call):
        body = message.body
        parts = [body, *body.groups] if isinstance(body, SubmitGroups) else [body]
        return all(
            _INT64 > value >= -_INT64
            for part in parts
            for value in msgspec.structs.astuple(part)
            if isinstance(value, int)
        )
    return True


def checked(conn: int, message: Message) -> WorkerSent:
    """What a worker said, with the faults of its chunks' payloads."""
    return WorkerSent(conn, message, payload_faults(message.chunks) if isinstance(message, Chunks) else None)


def payload_faults(chunks: Sequence[Chunk]) -> Mapping[int, str] | None:
    """Position of a chunk -> what is wrong with its values; None: nothing is. Says nothing of a chunk whose lengths do not fit."""
    columns = [c.tokens for c in chunks], [c.logprobs for c in chunks], [c.raw_logprobs for c in chunks]
    aligned = not any(len(data) & 3 for column in columns for data in column)
    if aligned and _sound(b"".join(columns[0]), b"".join(columns[1] + columns[2])):
        return None
    faults = {at: fault for at, chunk in enumerate(chunks) if (fault := _fault(chunk))}
    return faults or None


def _sound(tokens: bytes, logprobs: bytes) -> bool:
    ids, values = np.frombuffer(tokens, "<i4"), np.frombuffer(logprobs, "<f4")
    if ids.size and ids.min() < 0:
        return False
    # A NaN is neither: every comparison with it is false, and `min` and `max` hand it on.
    return not values.size or bool(values.max() <= MOST_LOGPROB and values.min() >= _LEAST_LOGPROB)


def _fault(chunk: Chunk) -> str:
    if any(len(data) % 4 for data in (chunk.tokens, chunk.logprobs, chunk.raw_logprobs)):
        return ""  # the core refuses it for its lengths
    for payload in (chunk.logprobs, chunk.raw_logprobs):
        values = np.frombuffer(payload, "<f4")
        if not np.isfinite(values).all():
            return "logprobs that are not finite"
        if (values > MOST_LOGPROB).any():
            return "a positive logprob"
    return "a negative token id" if (np.frombuffer(chunk.tokens, "<i4") < 0).any() else ""


# ---------------------------------------------------------------- which tokens an event or a message needs, and a message with them


def lacking(core: Core, store: PayloadStore, event: RouterEvent) -> dict[int, int]:
    """What must be loaded before the core may see an event: sample -> length that the ledger has at least. {}: nothing."""
    if not isinstance(event, WorkerSent) or not isinstance(event.message, Chunks):
        return {}
    compared = overlaps(core, event.conn, event.message.chunks)
    starts = {sample_id: store.start(sample_id) for sample_id, _, _ in compared}
    if all((start := starts[sample_id]) is not None and start <= offset for sample_id, offset, _ in compared):
        return {}
    # What is not in memory is durable: up to where memory begins, or all that was accepted.
    return {
        sample_id: accepted if (start := starts[sample_id]) is None else start
        for sample_id, _, accepted in compared
    }


def lacking_message(core: Core, store: PayloadStore, action: Fill) -> dict[int, int]:
    """What must be loaded before a message can be filled: sample -> length. {} also where `filled` does without.

    A sample that was superseded or ended meanwhile is not read: its peer is told so by the message behind this one.
    """
    absent = missing(action.message, action.lengths, store)
    if not absent:
        return {}
    forgotten = {sample_id for sample_id in absent if sample_id not in core.samples}
    if len(forgotten) == len(absent) or (forgotten and isinstance(action.message, GroupDone)):
        return {}
    return {i: n for i, n in needed(action.message, action.lengths).items() if i in core.samples}


def filled(store: PayloadStore, action: Fill) -> Message | None:
    """The message with its tokens, which are in memory, and without the leases of samples that were forgotten before.

    None when nothing is left of it; of a group all is needed, of a turn's tokens those from its offset on, of siblings' what is there.
    """
    message, lengths = action.message, action.lengths
    if isinstance(message, Assign):
        leases = fill_leases(message, lengths, store)
        return Assign(tuple(leases)) if leases else None
    if isinstance(message, SiblingTokens):
        return fill_siblings(message, lengths, store)
    if missing(message, lengths, store):
        return None
    if isinstance(message, TurnTokens):
        return fill_tokens(message, lengths[0], store)
    group = fill_group(message, lengths, store)
    store.cool(needed(message, lengths))  # it is not asked for again, unless its trainer is lost
    return group


def take_back(core: Core, store: PayloadStore, sample_id: int, payload: Payload) -> None:
    """Load what the ledger gave for a sample, if the core still has it."""
    sample = core.samples.get(sample_id)
    if sample is not None:
        store.load(sample_id, payload, sample.accepted)


# ---------------------------------------------------------------- lines: one a connection, in which an item may wait for its tokens


#: How often a peer without room is looked at again: a transport says of nothing when it gave it to the network.
CAPACITY_PAUSE_S = 0.02


class ConnectionLines(Generic[T]):
    """See the module. `wanted(item)`: the tokens that an item lacks now, {} for none; `handle(item)`: called for each, in order.

    `ready(item)`: whether an item may be handled now. `handle` is called once for an item, and again later where it gave False: not now.
    """

    def __init__(
        self,
        wanted: Callable[[T], Mapping[int, int]],
        handle: Callable[[T], bool | None],
        fetcher: Fetcher,
        failed: Callable[[BaseException], None],
        ready: Callable[[T], bool] = lambda _: True,
    ) -> None:
        self._wanted, self._handle, self._fetcher, self._failed, self._ready = (
            wanted,
            handle,
            fetcher,
            failed,
            ready,
        )
        self._lines: dict[int, deque[tuple[T, int]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.nbytes = 0  # of what stands in line, as `put` was told

    def __contains__(self, conn: int) -> bool:
        """Whether something of this connection waits."""
        return conn in self._lines

    def waiting(self, conn: int) -> int:
        """How many items of this connection wait."""
        return len(self._lines.get(conn, ()))

    def put(self, conn: int, item: T, nbytes: int = 0) -> bool:
        """Handle an item behind those before it; False when it has to wait. Only from the event loop's thread."""
        line = self._lines.get(conn)
        if line is None:
            if self._ready(item) and not self._wanted(item) and self._handle(item) is not False:
                return True
            line = self._lines[conn] = deque()
            task = asyncio.get_running_loop().create_task(self._serve(conn, line))
            self._tasks.add(task)
            task.add_done_callback(self._done)
        line.append((item, nbytes))
        self.nbytes += nbytes
        return False

    async def _serve(self, conn: int, line: deque[tuple[T, int]]) -> None:
        while line:
            item, nbytes = line[0]
            while not self._ready(item):
                await asyncio.sleep(CAPACITY_PAUSE_S)
            # What was read may be evicted by others' commits while more is read: `wanted` then names all that the item needs, again.
            # The ledger of a superseded daemon never has what it needs: it asks without haste until it learns that it is fenced.
            pause = 0.0
            while wanted := self._wanted(item):
                await asyncio.sleep(pause)
                await self._fetcher.fetch(wanted)
                pause = FIRST_PAUSE_S
            if self._handle(item) is False:
                await asyncio.sleep(CAPACITY_PAUSE_S)
                continue
            line.popleft()
            self.nbytes -= nbytes
            await asyncio.sleep(0)  # a long line must not keep the others waiting
        del self._lines[conn]

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)

    async def close(self) -> None:
        """Stop reading; what stands in line is forgotten, as everything in memory is when a daemon ends."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


# ---------------------------------------------------------------- tokens from the ledger


#: Reads of the ledger at once: each may hold one message's tokens (64 MiB at most) beside the store.
READS = 4


FIRST_PAUSE_S, MOST_PAUSE_S = 0.05, 5.0


async def patiently(read: Callable[[], Awaitable[R]], what: str) -> R:
    """What `read` gives, asked again with growing pauses while the ledger cannot be read."""
    pause = FIRST_PAUSE_S
    while True:
        try:
            return await read()
        except LedgerUnavailable as error:
            log.warning(f"{what}: not read yet", cause=error.cause, remedy=error.remedy, again_s=pause)
        await asyncio.sleep(pause)
        pause = min(MOST_PAUSE_S, 2 * pause)


class Fetcher:
    """Reads tokens of samples from the ledger, few at a time, and again while it cannot be read. `load(sample, payload)` takes them."""

    def __init__(self, read: ReadPayloads, load: Callable[[int, Payload], None]) -> None:
        self._read, self._load = read, load
        self._free = asyncio.Semaphore(READS)
        self.reads = 0

    async def fetch(self, wanted: Mapping[int, int]) -> None:
        """Load every sample of `wanted`, of which the ledger must have so many tokens at least. Raises `LedgerError` where it has not."""
        async with self._free:
            self.reads += 1
            found = await patiently(lambda: self._read(list(wanted)), f"tokens of {len(wanted)} samples")
        for sample_id, least in wanted.items():
            payload = found.get(sample_id)
            length = -1 if payload is None else len(payload[0]) // 4
            if payload is None or length < least:
                what = "no row" if payload is None else f"{length} tokens"
                raise LedgerError(
                    f"sample {sample_id}: the ledger has {what}, {least} tokens were committed",
                    "run `scavenger ledger check`, and restore the last backup if it finds more",
                )
            self._load(sample_id, payload)


# ---------------------------------------------------------------- what a slow peer has not taken yet of the groups that it was sent


#: Of groups that one connection was sent and its network has not taken. One more message may lie beyond it: the one that crossed it.
MOST_BYTES = 64 * 1024 * 1024


#: The same of a run over all its connections, in multiples of that: a trainer that connects anew leaves one behind that is not yet known
#: to be dead, and one that does so again and again must not take this daemon's memory.
RUN_MULTIPLE = 2


class Deliveries:
    """Bytes of groups that were handed to the transport and that the network has not taken, by connection, in order.

    A group is a few MB, and the transport's queue is bounded by number only. While those of a connection exceed `most_bytes`, its further
    messages wait as few words each: their tokens are in the ledger. Nothing is dropped. `gone()` of `sent`: the bytes are freed.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._under_way: dict[int, deque[tuple[int, Callable[[], bool], int]]] = {}
        self._nbytes: dict[int, int] = {}
        self._of_run: dict[int, int] = {}

    def sent(self, conn: int, nbytes: int, gone: Callable[[], bool], run: int = 0) -> None:
        """A large message of this run (0 = not known) was handed to the transport."""
        self._under_way.setdefault(conn, deque()).append((nbytes, gone, run))
        self._nbytes[conn] = self._nbytes.get(conn, 0) + nbytes
        self._of_run[run] = self._of_run.get(run, 0) + nbytes

    def has_headroom(self, conn: int, run: int = 0) -> bool:
        """Whether this connection may be sent another one of that run now."""
        if not self._under_way:
            return True
        self._forget_gone()
        of_run = self._of_run.get(run, 0) if run else 0
        return self._nbytes.get(conn, 0) < self.most_bytes and of_run < RUN_MULTIPLE * self.most_bytes

    @property
    def nbytes(self) -> int:
        """Under way to all connections, when `has_headroom` was asked last."""
        return sum(self._nbytes.values())

    def _forget_gone(self) -> None:
        for conn, parcels in list(self._under_way.items()):
            while parcels and parcels[0][1]():
                nbytes, _, run = parcels.popleft()
                self._nbytes[conn] -= nbytes
                self._of_run[run] -= nbytes
                if not self._of_run[run]:
                    del self._of_run[run]
            if not parcels:
                del self._under_way[conn], self._nbytes[conn]
