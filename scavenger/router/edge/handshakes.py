"""Bounds connections: those that have not proved a key yet, so that a client that reaches the port cannot take the daemon's descriptors,
and those of one owner.

A connection is *unproven* from its accept until its first message, which only a key that the daemon knows can send.
Each one is left alone for `GRACE_S`. Beyond that it lasts until it is in the way: one more of the same address than
`per_address`, or than `in_all`, ends the oldest; where none is older than `GRACE_S` the new one is ended. A peer of
ours that is ended so connects again by itself. libzmq ends a handshake that is not finished in 5 s (`RouterServer.bind`). Of those
that proved a key an owner (or a worker) may have `per_owner`; one more is ended.

`Handshakes` decides, and is pure. `HandshakeGuard` runs it in a thread of its own over libzmq's monitor of the
socket, because accepts are libzmq's thread's and wait for no event loop. It ends a connection by shutting down its
descriptor, which libzmq then closes.

Boundary: a thread over libzmq's monitor.
"""

from __future__ import annotations

import contextlib
import socket as sockets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

log = structlog.get_logger()

#: A peer across a slow network, or of a daemon that has a thousand of them at once, has proved its key by then.
GRACE_S = 2.0
#: However many descriptors there are, no more may be unproven.
MOST = 4096
#: Of all unproven connections the share that one address may have: a login node or a NAT has many peers behind it.
ADDRESS_SHARE = 4
#: Of all connections the share that one owner's keys may have, and what is never refused: a trainer, its heartbeat and reserved engines.
OWNER_SHARE, OWNER_LEAST = 4, 64
#: How often it is logged that connections were ended.
LOG_S = 60.0
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_MONITOR_STOPPED


@dataclass(frozen=True, slots=True)
class HandshakeLimits:
    """Unproven connections at a time. `last_fd`: descriptors from this number on are the daemon's own reserve. `per_owner`: proven ones."""

    in_all: int
    per_address: int
    last_fd: int
    per_owner: int = OWNER_LEAST


def limits_for(descriptors: int, reserved: int) -> HandshakeLimits:
    """For a process that may have `descriptors` open, `reserved` of which are for its own files and commands. Pure."""
    free = max(8, descriptors - reserved)
    in_all = max(4, min(MOST, free // 2))
    return HandshakeLimits(
        in_all, max(2, in_all // ADDRESS_SHARE), free, max(OWNER_LEAST, free // OWNER_SHARE)
    )


@dataclass(slots=True)
class Handshakes:
    """Pure, but for being told. Times are seconds of one clock; a descriptor names a connection until it is closed."""

    limits: HandshakeLimits
    _since: OrderedDict[int, tuple[str, float]] = field(
        default_factory=OrderedDict
    )  # fd -> (address, accepted at), the oldest first
    _of: dict[str, OrderedDict[int, None]] = field(
        default_factory=dict
    )  # address -> its descriptors, the oldest first
    _owner: dict[int, str] = field(default_factory=dict)  # fd -> whose key it proved
    _proven: Counter[str] = field(default_factory=Counter)  # connections by owner

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, fd: int) -> bool:
        return fd in self._since

    def accepted(self, fd: int, address: str, now: float) -> tuple[int, ...]:
        """A connection came. Returns those to end, perhaps itself; they are forgotten here."""
        self.forget(fd)  # its number was used before, and the end of that one was not told
        self._since[fd] = (address, now)
        self._of.setdefault(address, OrderedDict())[fd] = None
        ends: list[int] = []
        if len(self._of[address]) > self.limits.per_address:
            ends.append(self._end(next(iter(self._of[address])), fd, now))
        if len(self._since) > self.limits.in_all or (fd >= self.limits.last_fd and not ends):
            ends.append(self._end(next(iter(self._since)), fd, now))
        return tuple(ends)

    def _end(self, oldest: int, newest: int, now: float) -> int:
        ended = (
            oldest if now - self._since[oldest][1] >= GRACE_S else newest if newest in self._since else oldest
        )
        self.forget(ended)
        return ended

    def proved(self, fd: int, owner: str) -> bool:
        """It proved a key of this owner's. False where the owner has too many: it is to end, and is forgotten here."""
        self.forget(fd)
        if self._proven[owner] >= self.limits.per_owner:
            return False
        self._owner[fd] = owner
        self._proven[owner] += 1
        return True

    def forget(self, fd: int) -> None:
        """It is gone."""
        owner = self._owner.pop(fd, None)
        if owner is not None:
            self._proven[owner] -= 1
            if not self._proven[owner]:
                del self._proven[owner]
        known = self._since.pop(fd, None)
        if known is not None:
            same = self._of[known[0]]
            same.pop(fd, None)
            if not same:
                del self._of[known[0]]


class HandshakeGuard:
    """See the module. The event loop calls `heard`; `close` is called before the socket is closed."""

    def __init__(
        self, socket: zmq.Socket[bytes], limits: HandshakeLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits
        self.ended = 0  # connections, since the daemon started
        self._port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._handshakes, self._lock, self._clock = Handshakes(limits), threading.Lock(), clock
        self._logged_at, self._ended_logged, self._refused_at = float("-inf"), 0, float("-inf")
        self._socket = socket
        where = f"inproc://handshakes-{id(self)}"
        socket.monitor(where, _EVENTS)
        self._monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        self._monitor.setsockopt(
            zmq.RCVHWM, 0
        )  # libzmq's thread would wait for us, and all connections with it
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.connect(where)
        self._thread = threading.Thread(target=self._run, name="handshakes", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._handshakes)

    def heard(self, fd: int, owner: str) -> None:
        """A message came over this descriptor: its peer has a key of this owner's. Cheap where nothing is unproven.

        One connection too many of the owner's is ended. What it said counts.
        """
        if fd not in self._handshakes:
            return
        with self._lock:
            if fd not in self._handshakes or self._handshakes.proved(fd, owner):
                return
        _shut(fd, self._port)
        self.ended += 1
        if self._clock() - self._refused_at >= LOG_S:
            self._refused_at = self._clock()
            log.warning("an owner has too many connections", key=owner, most=self.limits.per_owner)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._monitor):
            while True:
                event = recv_monitor_message(self._monitor)
                kind, fd = int(event["event"]), int(event["value"])
                if kind == zmq.EVENT_MONITOR_STOPPED:
                    return
                if kind == zmq.EVENT_ACCEPTED:
                    self._accepted(fd)
                else:
                    with self._lock:
                        self._handshakes.forget(fd)

    def _accepted(self, fd: int) -> None:
        address = _peer(fd, self._port)
        if address is None:
            return  # closed already: nothing is left to bound
        with self._lock:
            ends = self._handshakes.accepted(fd, address, self._clock())
        for one in ends:
            _shut(one, self._port)
            self.ended += 1
        if ends and self._clock() - self._logged_at >= LOG_S:
            self._logged_at, ended = self._clock(), self.ended - self._ended_logged
            self._ended_logged = self.ended
            log.warning(
                "connections without a key ended",
                ended=ended,
                newest_from=address,
                unproven=len(self._handshakes),
                remedy="see who connects to daemon.port; a firewall keeps them out",
            )


def _peer(fd: int, port: int) -> str | None:
    """The address that a descriptor is connected with; None where it is no connection of `port`, or is closed."""
    try:
        connection = sockets.socket(fileno=fd)
    except OSError:
        return None
    try:
        return str(connection.getpeername()[0]) if connection.getsockname()[1] == port else None
    except (OSError, IndexError, TypeError):
        return None
    finally:
        connection.detach()  # libzmq's to close


def _shut(fd: int, port: int) -> None:
    """End a connection of `port`. Its number may be another file's by now: that one is left alone."""
    if _peer(fd, port) is None:
        return
    try:
        connection = sockets.socket(fileno=fd)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):
            connection.shutdown(sockets.SHUT_RDWR)
    finally:
        connection.detach()
