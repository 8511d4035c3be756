"""The worker's socket to the daemon: made anew at each connect from the rendezvous file, which may name another host by then.

Owns one DEALER under CURVE, its receiver and its monitor. Knows the frames' codec, not their meaning.
Boundary: the worker's ZeroMQ socket; IO.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable
from pathlib import Path

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from rollout.background_tasks import spawn
from scavenger.errors import ScavengerError, WireError
from scavenger.protocol import messages
from scavenger.protocol.keys import KeyPair, read_rendezvous, secure
from scavenger.protocol.worker.events import Connected, Event, KeyRefused, Received, Unreachable

_log = structlog.get_logger(__name__)
_ZAP_REFUSED = 400  # https://rfc.zeromq.org/spec/27: 300 = try again later, 400 = refused


class Link:
    """One connection after another; `post` gets what arrives."""

    def __init__(self, state_dir: Path, keypair: KeyPair, post: Callable[[Event], None]) -> None:
        self._state_dir = state_dir
        self._keypair = keypair
        self._post = post
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._monitor: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self, delay_s: float) -> None:
        """Drop the present connection, wait, make the next; posts Connected or Unreachable, and Unreachable when it breaks later."""
        self._drop(linger_ms=0)
        await asyncio.sleep(delay_s)
        try:
            rendezvous = read_rendezvous(self._state_dir)
            socket, monitor = self._open(rendezvous.endpoint, rendezvous.server_key)
        except (ScavengerError, zmq.ZMQError) as error:
            self._post(Unreachable(str(error)))
            return
        self._socket, self._monitor = socket, monitor
        broken = functools.partial(self._broken, socket)
        self._tasks = [spawn(self._receive(socket), broken), spawn(self._watch(monitor), broken)]
        self._post(Connected())

    def own_address(self) -> str:
        """This host's address on the way to the daemon's. Raises `OSError` or `ScavengerError` where there is none."""
        host, _, port = read_rendezvous(self._state_dir).endpoint.removeprefix("tcp://").rpartition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])

    def send(self, message: messages.WorkerMessage) -> None:
        """Queue a message. Nothing is lost by a dropped connection that the session does not send again."""
        if self._socket is not None:
            self._socket.send(messages.encode(message))

    def close(self, linger_ms: int) -> None:
        """Give queued messages `linger_ms` to leave, then drop them."""
        self._drop(linger_ms)
        self._context.destroy(linger_ms)

    def _open(self, endpoint: str, server_key: str) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]:
        socket = self._context.socket(zmq.DEALER)
        secure(socket, server_key, self._keypair)
        socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        # Unbounded here, bounded by the session: what it may keep, and heartbeats that stop at the third unanswered one.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        # Before the connection: a refusal that nobody watches for is not told again.
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)
            raise
        return socket, monitor

    def _broken(self, socket: zmq.asyncio.Socket, reason: str) -> None:
        # A connection that was dropped meanwhile needs no other in its place.
        if socket is self._socket:
            self._post(Unreachable(reason))

    def _drop(self, linger_ms: int) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=linger_ms)
            self._socket = None
        if self._monitor is not None:
            self._monitor.close(linger=0)
            self._monitor = None

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frame = await socket.recv()
            try:
                self._post(Received(messages.decode_to_worker(frame)))
            except WireError as error:
                _log.warning("wire.garbage", reason=error.cause)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())
            if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                return
            if event["value"] == _ZAP_REFUSED:
                self._post(KeyRefused("the daemon does not accept this worker's key"))
