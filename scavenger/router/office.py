"""Between sockets and core: messages wait here, each connection's in order, while tokens that they need are read from the ledger.

Owns which tokens an event or a message needs, and that the core is never handed a resend that it could not compare, nor a peer a message
without its tokens. `lacking` and `lacking_message` are pure, and shared with the tests' bench; decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from scavenger.router.events import Fill, RouterEvent, Send, WorkerSaid
from scavenger.router.lines import Fetcher, Lines, ReadPayloads
from scavenger.router.payloads import Payload, PayloadStore, fill, wanted
from scavenger.router.samples import overlaps
from scavenger.router.state import Core
from scavenger.wire import Chunks, GroupDone, Message


def lacking(core: Core, store: PayloadStore, event: RouterEvent) -> dict[int, int]:
    """What must be loaded before the core may see an event: sample -> length that the ledger has at least. {}: nothing."""
    if not isinstance(event, WorkerSaid) or not isinstance(event.message, Chunks):
        return {}
    compared = overlaps(core, event.conn, event.message.chunks)
    starts = {sample_id: store.start(sample_id) for sample_id, _, _ in compared}
    if all((start := starts[sample_id]) is not None and start <= offset for sample_id, offset, _ in compared):
        return {}
    # What is not in memory is durable: up to where memory begins, or all that was accepted.
    return {sample_id: accepted if (start := starts[sample_id]) is None else start for sample_id, _, accepted in compared}


def lacking_message(core: Core, store: PayloadStore, action: Fill) -> dict[int, int]:
    """What must be loaded before a message can be filled. {} also for one that nobody needs any more: `filled` drops it."""
    needed = wanted(action.message, action.lengths)
    if all(store.has(sample_id, length) for sample_id, length in needed.items()):
        return {}
    # Superseded or ended meanwhile: its peer is told so by the message behind this one.
    return needed if all(sample_id in core.samples for sample_id in needed) else {}


def filled(store: PayloadStore, action: Fill) -> Message | None:
    """The message with its tokens, which are in memory; None when its samples were forgotten before these could be read."""
    needed = wanted(action.message, action.lengths)
    if not all(store.has(sample_id, length) for sample_id, length in needed.items()):
        return None
    message = fill(action.message, action.lengths, store.take)
    if isinstance(message, GroupDone):
        store.cool(needed)  # nobody asks again, unless its trainer is lost
    return message


def take_back(core: Core, store: PayloadStore, sample_id: int, payload: Payload) -> None:
    """Load what the ledger gave for a sample, if the core still has it."""
    sample = core.samples.get(sample_id)
    if sample is not None:
        store.load(sample_id, payload, sample.accepted)


class Office:
    """Two lines over one store. `post(event)` hands to the core; `send(conn, message)` to a peer, where `connected(conn)`."""

    def __init__(
        self,
        core: Core,
        store: PayloadStore,
        read: ReadPayloads,
        *,
        post: Callable[[RouterEvent], None],
        send: Callable[[int, Message], None],
        connected: Callable[[int], bool],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._core, self._store = core, store
        self._post, self._send, self._connected = post, send, connected
        self._fetcher = Fetcher(read, lambda sample_id, payload: take_back(core, store, sample_id, payload))
        self._in: Lines[RouterEvent] = Lines(lambda event: lacking(core, store, event), self._take, self._fetcher, failed)
        self._out: Lines[Send | Fill] = Lines(self._lacks, self._give, self._fetcher, failed)

    def receive(self, conn: int, event: RouterEvent, nbytes: int) -> bool:
        """Hand a peer's event of `nbytes` to the core; False when it has to wait."""
        return self._in.put(conn, event, nbytes)

    def give(self, action: Send | Fill) -> None:
        """Send, behind what this connection still waits for."""
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

    def _lacks(self, action: Send | Fill) -> dict[int, int]:
        if isinstance(action, Send) or not self._connected(action.conn):
            return {}
        return lacking_message(self._core, self._store, action)

    def _give(self, action: Send | Fill) -> None:
        if isinstance(action, Send):
            self._send(action.conn, action.message)
        elif self._connected(action.conn):
            message = filled(self._store, action)
            self._store.trim()
            if message is not None:
                self._send(action.conn, message)
            else:
                self._core.count("messages_outdated")
