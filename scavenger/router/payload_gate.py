"""Between sockets and core: messages wait here, each connection's in order, while tokens that they need are read from the ledger.

Owns which tokens an event or a message needs, and that the core is never handed a resend that it could not compare, nor a peer a message
without its tokens. `lacking` and `lacking_message` are pure, and shared with the tests' bench; decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from scavenger.router.core import Core
from scavenger.router.deliveries import Deliveries
from scavenger.router.events import Fill, RouterEvent, Send, WorkerSaid
from scavenger.router.ordered_reads import Fetcher, Lines, ReadPayloads
from scavenger.router.payloads import Payload, PayloadStore, fill_group, fill_leases, missing, needed
from scavenger.router.samples import overlaps
from scavenger.wire import Assign, Chunks, GroupDone, Message

#: Messages, other than groups, that may stand behind a group in one connection's line before further ones are dropped.
MOST_WAITING = 4000


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

    None when nothing is left of it; of a group all is needed.
    """
    message, lengths = action.message, action.lengths
    if isinstance(message, Assign):
        leases = fill_leases(message, lengths, store)
        return Assign(tuple(leases)) if leases else None
    if missing(message, lengths, store):
        return None
    group = fill_group(message, lengths, store)
    store.cool(needed(message, lengths))  # nobody asks again, unless its trainer is lost
    return group


def take_back(core: Core, store: PayloadStore, sample_id: int, payload: Payload) -> None:
    """Load what the ledger gave for a sample, if the core still has it."""
    sample = core.samples.get(sample_id)
    if sample is not None:
        store.load(sample_id, payload, sample.accepted)


class PayloadGate:
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
        self.deliveries = Deliveries()
        self._post, self._send, self._connected = post, send, connected
        self._fetcher = Fetcher(read, lambda sample_id, payload: take_back(core, store, sample_id, payload))
        self._in: Lines[RouterEvent] = Lines(lambda event: lacking(core, store, event), self._take, self._fetcher, failed)
        self._out: Lines[Send | Fill] = Lines(self._lacks, self._give, self._fetcher, failed, self._has_room)

    def receive(self, conn: int, event: RouterEvent, nbytes: int) -> bool:
        """Hand a peer's event of `nbytes` to the core; False when it has to wait."""
        return self._in.put(conn, event, nbytes)

    def give(self, action: Send | Fill) -> None:
        """Send, behind what this connection still waits for."""
        if self._out.waiting(action.conn) >= MOST_WAITING and not isinstance(action.message, GroupDone):
            self._core.count("messages_dropped")  # as a queue of the transport that is full does: every protocol survives a lost message
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

    def _has_room(self, action: Send | Fill) -> bool:
        if not isinstance(action.message, GroupDone) or not self._connected(action.conn):
            return True
        return self.deliveries.room(action.conn, self.run_of(action.message))

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
            self._core.count("messages_outdated")
            return True
        if isinstance(message, Assign) and len(message.leases) < len(action.lengths):
            self._core.count("leases_outdated", len(action.lengths) - len(message.leases))
        return self._send(action.conn, message) or not isinstance(message, GroupDone)
