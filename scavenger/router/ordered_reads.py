"""Order at the edge while tokens are read back from the ledger: one line for each connection, in which an item may wait for its tokens.

    put(conn, item) -> nothing of the connection waits, and the item's tokens are in memory: handled at once
                    -> else it stands in line; its tokens are read in a thread, then it is handled, then those behind it

The server has two: of events on their way to the core (a resend is compared with what was accepted), and of messages on their way to a
peer (a moved sample goes with its tokens, a whole group is delivered), which also wait for room at a peer that takes too little (`room`).
Other connections never wait. A ledger that cannot be read for the
moment is asked again; anything else that a read or a handler raises goes to `failed`, and ends the daemon.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

import structlog

from scavenger.errors import LedgerError, LedgerUnavailable
from scavenger.router.payloads import Payload

log = structlog.get_logger()

#: Reads of the ledger at once: each may hold one message's tokens (64 MiB at most) beside the store.
READS = 4
FIRST_PAUSE_S, MOST_PAUSE_S = 0.05, 5.0
#: How often a peer without room is looked at again: a transport says of nothing when it gave it to the network.
ROOM_PAUSE_S = 0.02
ReadPayloads = Callable[[Sequence[int]], Awaitable[Mapping[int, Payload]]]
T = TypeVar("T")
R = TypeVar("R")


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


class Lines(Generic[T]):
    """See the module. `wanted(item)`: the tokens that an item lacks now, {} for none; `handle(item)`: called for each, in order.

    `room(item)`: whether an item may be handled now. `handle` is called once for an item, and again later where it gave False: not now.
    """

    def __init__(
        self,
        wanted: Callable[[T], Mapping[int, int]],
        handle: Callable[[T], bool | None],
        fetcher: Fetcher,
        failed: Callable[[BaseException], None],
        room: Callable[[T], bool] = lambda _: True,
    ) -> None:
        self._wanted, self._handle, self._fetcher, self._failed, self._room = wanted, handle, fetcher, failed, room
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
            if self._room(item) and not self._wanted(item) and self._handle(item) is not False:
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
            while not self._room(item):
                await asyncio.sleep(ROOM_PAUSE_S)
            # What was read may be evicted by others' commits while more is read: `wanted` then names all that the item needs, again.
            # The ledger of a superseded daemon never has what it needs: it asks without haste until it learns that it is fenced.
            pause = 0.0
            while wanted := self._wanted(item):
                await asyncio.sleep(pause)
                await self._fetcher.fetch(wanted)
                pause = FIRST_PAUSE_S
            if self._handle(item) is False:
                await asyncio.sleep(ROOM_PAUSE_S)
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
