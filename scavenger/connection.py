"""A connection to the daemon that a state directory's rendezvous file names: its socket, whose word it is, and how long it may be silent.

For one thread; a second one opens a socket of its own (`keepalive`). Owns sending and receiving. Knows nothing of runs, and decides not
when to try again: `client` does.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Self

import zmq

from scavenger import keys, wire
from scavenger.errors import DaemonUnavailable
from scavenger.patience import SILENT_S, Patience


class Connection:
    """See the module. `give_up_s`: how long a daemon may be away."""

    def __init__(self, state_dir: Path, key: keys.KeyPair, give_up_s: float = 600.0) -> None:
        self._state_dir = state_dir
        self._key = key
        self.give_up_s = give_up_s
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._refusals: zmq.Socket[bytes] | None = None
        self._next_id = 1
        self.generation = 0
        self.patience = Patience(time.monotonic())
        self._rendezvous: keys.Rendezvous | None = None

    @classmethod
    def connect(cls, state_dir: Path, key_path: Path | None = None, give_up_s: float = 600.0) -> Self:
        """Read the key (default: the owner's) and connect. Raises `AuthError`, `DaemonUnavailable`."""
        one = cls(state_dir, keys.read_keypair(key_path or keys.owner_key_path(state_dir)), give_up_s)
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
        self.patience.connected(time.monotonic())

    def is_silent(self) -> bool:
        """Whether to give this connection up: nothing came for as long as it may take, or the daemon is another one by now."""
        silent = self.patience.silence(time.monotonic())
        return silent > self.patience.limit or (silent > SILENT_S and self._is_elsewhere())

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
        socket.curve_serverkey = rendezvous.server_key.encode()
        socket.curve_publickey, socket.curve_secretkey = self._key.public.encode(), self._key.secret.encode()
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RCVHWM, 0)  # completed groups wait here while the trainer computes
        return socket

    def send(self, run: str, attempt: int, body: wire.CallBody) -> int:
        """Send one call and return its id. Never waits: where nobody takes it, the silence that follows tells."""
        assert self._socket is not None
        call = wire.Call(self._next_id, run, attempt, body)
        self._next_id += 1
        with contextlib.suppress(zmq.Again):  # a refused key has no way out of here any more
            self._socket.send(wire.encode(call), zmq.NOBLOCK)
        self.patience.asked(time.monotonic())
        return call.id

    def receive(self, timeout_s: float) -> wire.ToTrainer | None:
        """The next message, or None after `timeout_s`."""
        assert self._socket is not None
        if not self._socket.poll(max(0, int(timeout_s * 1000))):
            return None
        message = wire.decode_to_trainer(self._socket.recv())
        self.patience.heard(time.monotonic(), group=isinstance(message, wire.GroupDone))
        return message
