"""What a slow peer has not taken yet of the large messages that it was sent: groups on their way to a trainer. Pure tables, no IO.

A group is a few MB, and the transport's queue is bounded by number. So the bytes handed to it are counted until it has given them to the
network; while those of a connection exceed the bound, its further messages stand in line (`router.ordered_reads`), as few words each: their
tokens are in the ledger. Nothing is dropped. Knows no socket: `gone()` of a parcel says that its bytes are freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

#: Of groups that one connection was sent and its network has not taken. One more message may lie beyond it: the one that crossed it.
MOST_BYTES = 64 * 1024 * 1024
#: The same of a run over all its connections, in multiples of that: a trainer that connects anew leaves one behind that is not yet known
#: to be dead, and one that does so again and again must not take this daemon's memory.
RUN_MULTIPLE = 2


class Deliveries:
    """Bytes under way, by connection and in the order in which they were sent. `run`: whose they are, 0 = not known."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._under_way: dict[int, deque[tuple[int, Callable[[], bool], int]]] = {}
        self._nbytes: dict[int, int] = {}
        self._of_run: dict[int, int] = {}

    def sent(self, conn: int, nbytes: int, gone: Callable[[], bool], run: int = 0) -> None:
        """A large message was handed to the transport."""
        self._under_way.setdefault(conn, deque()).append((nbytes, gone, run))
        self._nbytes[conn] = self._nbytes.get(conn, 0) + nbytes
        self._of_run[run] = self._of_run.get(run, 0) + nbytes

    def room(self, conn: int, run: int = 0) -> bool:
        """Whether this connection may be sent another one of that run now."""
        if not self._under_way:
            return True
        self._look()
        of_run = self._of_run.get(run, 0) if run else 0
        return self._nbytes.get(conn, 0) < self.most_bytes and of_run < RUN_MULTIPLE * self.most_bytes

    @property
    def nbytes(self) -> int:
        """Under way to all connections, when `room` was asked last."""
        return sum(self._nbytes.values())

    def _look(self) -> None:
        for conn, parcels in list(self._under_way.items()):
            while parcels and parcels[0][1]():
                nbytes, _, run = parcels.popleft()
                self._nbytes[conn] -= nbytes
                self._of_run[run] -= nbytes
                if not self._of_run[run]:
                    del self._of_run[run]
            if not parcels:
                del self._under_way[conn], self._nbytes[conn]
