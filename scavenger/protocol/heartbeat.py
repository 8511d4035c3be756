"""The trainer's heartbeat: a thread with a socket of its own that pings the daemon every second while the main thread computes.

Knows when the daemon last answered, and nothing of groups or steps. A daemon that answers these pings and no call cannot commit: replies to
calls wait for the ledger, pongs do not.

Boundary: a thread with a socket of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import structlog
import zmq

from scavenger.errors import ScavengerError
from scavenger.protocol import messages

log = structlog.get_logger()

HEARTBEAT_S = 1.0
#: Silence after which the thread reads the rendezvous file again and makes a new socket.
RECONNECT_AFTER_S = 4.0


class HeartbeatThread(threading.Thread):
    """Pings for a run until `stop`. `open_socket()`: a fresh DEALER to the present daemon, for this thread alone.

    Until `attempt` is set the run is being opened, and any reply shows that the daemon lives. Later only a pong does. The thread ends when
    the daemon has granted a newer attempt.
    """

    def __init__(self, open_socket: Callable[[], zmq.Socket[bytes]], run: str) -> None:
        super().__init__(name=f"keep-alive {run}", daemon=True)
        self._open = open_socket
        self._run_name = run
        self._halt = threading.Event()
        self._socket: zmq.Socket[bytes] | None = None
        self._tried_at = float("-inf")
        self.attempt = 0
        #: Monotonic seconds when the daemon last answered.
        self.answered_at = float("-inf")

    def stop(self) -> None:
        """End the thread and its socket. May be called twice."""
        self._halt.set()
        if self.ident is not None:
            self.join()

    def run(self) -> None:
        try:
            while not self._halt.is_set():
                self._ping()
                self._halt.wait(HEARTBEAT_S)
                self._hear()
        finally:
            if self._socket is not None:
                self._socket.close(linger=0)

    def _ping(self) -> None:
        now = time.monotonic()
        if self._socket is None or now - max(self.answered_at, self._tried_at) > RECONNECT_AFTER_S:
            self._tried_at = now
            self._reconnect()
        if self._socket is not None:
            attempt = self.attempt
            ping = messages.Call(
                attempt, self._run_name, attempt, messages.Ping(aside=True)
            )  # the reply's id says what it is about
            with contextlib.suppress(zmq.Again):  # the queue is full of pings already
                self._socket.send(messages.encode(ping), zmq.NOBLOCK)

    def _reconnect(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
        try:
            self._socket = self._open()
        except (
            ScavengerError,
            OSError,
        ) as error:  # between two daemons; the trainer's own thread decides when to give up
            log.debug("no daemon to ping", run=self._run_name, cause=str(error))

    def _hear(self) -> None:
        while self._socket is not None and self._socket.poll(0):
            message = messages.decode_to_trainer(self._socket.recv())
            if not isinstance(message, messages.Reply):
                continue
            if isinstance(message.body, messages.Pong) or message.id == 0:
                self.answered_at = time.monotonic()
            elif isinstance(message.body, messages.Denied) and message.body.code == "stale":
                self._halt.set()
