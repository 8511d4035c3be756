"""A connection to the daemon that a state directory's rendezvous file names: its socket, whose word it is, and how long it may be silent.

For one thread; a second one opens a socket of its own (`keepalive`). Owns sending and receiving. Knows nothing of runs, and decides not
when to try again: `client` does.

How long a client listens to a silent daemon before it connects anew. Pure: the time is given.

Only whole messages are heard, and over a slow link one group may take long: whoever gives up after the same silence each time has the
group sent again each time, and never gets it. Owns these seconds; knows nothing of sockets, and of messages only which are groups.

Boundary: a socket; the client above it has none.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Self

import zmq

from scavenger.errors import DaemonUnavailable
from scavenger.protocol import keys, messages

#: The patience to begin with, which is the least: the daemon answers a ping at once.
SILENT_S = 4.0
#: It doubles with each connection that is given up for silence, up to this.
MOST_SILENT_S = 64.0
#: A call that is not answered while other messages come: its reply was lost.
LOST_REPLY_S = 20.0


class ClientTimeout:
    """Of one client, over all its connections."""

    def __init__(self, now: float) -> None:
        self.limit = SILENT_S
        self.heard_at = self._asked_at = self._connected_at = now

    def connected(self, now: float) -> None:
        self.heard_at = self._connected_at = now

    def asked(self, now: float) -> None:
        """Something was said that is to be answered: silence before it means nothing."""
        self._asked_at = now

    def heard(self, now: float, *, group: bool) -> None:
        """Back by halves while messages come, and never below twice what one was waited for.

        What comes right after connecting proves nothing: the answer to an Attach is short, and the group behind it may be long.
        """
        if group or now - self._connected_at > self.limit:
            self.limit = min(max(SILENT_S, 2 * self.silence(now), self.limit / 2), MOST_SILENT_S)
        self.heard_at = now

    def silence(self, now: float) -> float:
        return now - max(self.heard_at, self._asked_at)

    def is_lost(self, now: float, sent_at: float) -> bool:
        """Whether the reply to what was sent then is taken for lost, though other messages come."""
        return now - sent_at > max(LOST_REPLY_S, 2 * self.limit)

    def gave_up(self) -> None:
        """A connection was given up for silence."""
        self.limit = min(2 * self.limit, MOST_SILENT_S)


class Connection:
    """See the module. `connect_timeout_s`: how long a daemon may be away."""

    def __init__(self, state_dir: Path, key: keys.KeyPair, connect_timeout_s: float = 600.0) -> None:
        self._state_dir = state_dir
        self._key = key
        self.connect_timeout_s = connect_timeout_s
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._refusals: zmq.Socket[bytes] | None = None
        self._next_id = 1
        self.generation = 0
        self.timeout = ClientTimeout(time.monotonic())
        self._rendezvous: keys.Rendezvous | None = None

    @classmethod
    def connect(cls, state_dir: Path, key_path: Path | None = None, connect_timeout_s: float = 600.0) -> Self:
        """Read the key (default: the owner's) and connect. Raises `AuthError`, `DaemonUnavailable`."""
        one = cls(state_dir, keys.read_keypair(key_path or keys.owner_key_path(state_dir)), connect_timeout_s)
        try:
            one.reconnect()
        except BaseException:  # a Ctrl-C too: its context would outlive it
            one.close()
            raise
        return one

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._drop(linger_ms=500)
        self._context.term()

    def _drop(self, linger_ms: int) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=linger_ms)
            self._socket = None
        if self._refusals is not None:
            self._refusals.close(linger=0)
            self._refusals = None

    def reconnect(self) -> None:
        """A fresh socket to whatever daemon the rendezvous file names now."""
        rendezvous = keys.read_rendezvous(self._state_dir)
        self._drop(linger_ms=0)
        self._socket = self._made(rendezvous)
        # Before the connection: a refusal that nobody watches for is not told again.
        self._refusals = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self._socket.connect(rendezvous.endpoint)
        self.generation, self._rendezvous = rendezvous.generation, rendezvous
        self.timeout.connected(time.monotonic())

    def is_silent(self) -> bool:
        """Whether to give this connection up: nothing came for as long as it may take, or the daemon is another one by now."""
        silent = self.timeout.silence(time.monotonic())
        return silent > self.timeout.limit or (silent > SILENT_S and self._is_elsewhere())

    def is_refused(self) -> bool:
        """Whether the daemon would not have this key when the present connection was made: no answer comes over it."""
        return self._refusals is not None and bool(self._refusals.poll(0))

    def _is_elsewhere(self) -> bool:
        try:
            return keys.read_rendezvous(self._state_dir) != self._rendezvous
        except DaemonUnavailable:
            return True

    def _open(self) -> zmq.Socket[bytes]:
        """One more, for another thread."""
        rendezvous = keys.read_rendezvous(self._state_dir)
        socket = self._made(rendezvous)
        socket.connect(rendezvous.endpoint)
        return socket

    def _made(self, rendezvous: keys.Rendezvous) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        keys.secure(socket, rendezvous.server_key, self._key)
        socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RCVHWM, 0)  # completed groups wait here while the trainer computes
        return socket

    def send(self, run: str, attempt: int, body: messages.CallBody) -> int:
        """Send one call and return its id. Never waits: where nobody takes it, the silence that follows tells."""
        assert self._socket is not None
        call = messages.Call(self._next_id, run, attempt, body)
        self._next_id += 1
        with contextlib.suppress(zmq.Again):  # a refused key has no way out of here any more
            self._socket.send(messages.encode(call), zmq.NOBLOCK)
        self.timeout.asked(time.monotonic())
        return call.id

    def receive(self, timeout_s: float) -> messages.ToTrainer | None:
        """The next message, or None after `timeout_s`."""
        assert self._socket is not None
        if not self._socket.poll(max(0, int(timeout_s * 1000))):
            return None
        message = messages.decode_to_trainer(self._socket.recv())
        self.timeout.heard(time.monotonic(), group=isinstance(message, messages.GroupDone))
        return message
