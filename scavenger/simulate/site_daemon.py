"""The daemon in virtual time: the real router's core, fed with events; its messages are delivered, its records committed, at once.

Owns the order in which events are handled, and the count of tokens that were recorded. Peers are functions; a message takes no time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from scavenger.config.site import RouterSection
from scavenger.ledger.records import ChunkAccepted, Record
from scavenger.ledger.records import Decision as Decided
from scavenger.policy.interface import RouterPolicy
from scavenger.protocol.messages import Message
from scavenger.router.core.events import (
    Committed,
    CoreTick,
    Fill,
    HistoryRead,
    ReadHistory,
    RouterEvent,
    Send,
    Write,
)
from scavenger.router.core.machine import Router
from scavenger.router.core.payloads import NoPayloads
from scavenger.router.core.state import RouterLimits
from scavenger.simulate.clock import Simulation

#: A peer takes a message and, for each of its leases or samples, how many tokens go with it.
Peer = Callable[[Message, Sequence[int]], None]
SOON_S = 0.25  # a live daemon's tick: no policy is asked more often than that by time alone
# The last events at one instant: what others do there comes first.
_TICKS_LAST = 5


class SimDaemon:
    """One daemon. `new_policy`: that of the run with this name."""

    def __init__(
        self,
        sim: Simulation,
        new_policy: Callable[[str], RouterPolicy],
        tick_s: float,
        heartbeat_s: float,
        share_prompts: bool = False,
    ) -> None:
        self._sim, self._tick_s = sim, tick_s
        limits = RouterLimits(
            heartbeat_s=heartbeat_s,
            suspect_s=math.inf,
            dead_s=math.inf,
            stalled_s=math.inf,
            sibling_bytes_per_s=RouterSection().sibling_bytes_per_s,
            share_prompts=share_prompts,
        )  # engines here fall silent only with a goodbye, or with their jobs
        self.flush_s = limits.flush_ms / 1000
        self.router = Router(limits, 1, NoPayloads(), new_policy=new_policy)
        self._peers: dict[int, Peer] = {}
        self._events: deque[RouterEvent] = deque()
        self._busy = False
        self._ticket = 0
        self._next_tick = sim.now
        self._next_conn = 1
        self.recorded = 0
        self.handled = 0
        self.decisions: dict[str, int] = {}
        self._tick()

    def connect(self, peer: Peer) -> int:
        """A new connection's number."""
        conn, self._next_conn = self._next_conn, self._next_conn + 1
        self._peers[conn] = peer
        return conn

    def disconnect(self, conn: int) -> None:
        self._peers.pop(conn, None)

    def post(self, event: RouterEvent) -> None:
        """Handle an event and all that it leads to; one that comes from within waits its turn."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events or self.router.core.uncommitted:
                self._handle(self._events.popleft() if self._events else Committed(self._ticket))
        finally:
            self._busy = False
        self._tick_in_time()

    def _handle(self, event: RouterEvent) -> None:
        self.handled += 1
        for action in self.router.handle(event, self._sim.now):
            match action:
                case Send(conn=conn, message=message):
                    self._deliver(conn, message, ())
                case Fill(conn=conn, message=message, lengths=lengths):
                    self._deliver(conn, message, lengths)
                case Write(ticket=ticket, records=records):
                    self._ticket = ticket
                    self._count(records)
                case ReadHistory():
                    self._events.append(HistoryRead(action.run_id, action.attempt, ()))

    def _deliver(self, conn: int, message: Message, lengths: Sequence[int]) -> None:
        peer = self._peers.get(conn)
        if peer is not None:
            peer(message, lengths)

    def _count(self, records: Sequence[Record]) -> None:
        for record in records:
            if type(record) is ChunkAccepted:
                self.recorded += len(record.tokens) // 4
            elif type(record) is Decided:
                self.decisions[record.policy] = self.decisions.get(record.policy, 0) + 1

    # ---------------------------------------------------------------- time

    def _tick(self) -> None:
        self._next_tick = self._sim.now + self._tick_s
        self._sim.at(self._next_tick, self._tick, priority=_TICKS_LAST)
        self.post(CoreTick())

    def _tick_in_time(self) -> None:
        """A tick when the policy wants to be asked, should the next one come later than that."""
        wanted = max(self.router.ask_at(), self._sim.now + SOON_S)
        if wanted < self._next_tick:
            self._next_tick = wanted
            self._sim.at(wanted, self._extra_tick, priority=_TICKS_LAST)

    def _extra_tick(self) -> None:
        self._next_tick = self._sim.now + self._tick_s
        self.post(CoreTick())
