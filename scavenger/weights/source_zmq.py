"""Serves a version store under CURVE, for `weights.encrypt`: one thread, one ROUTER socket.

Owns the socket. A receiver that does not read has at most `SEND_QUEUE` answers waiting; further ones are dropped, and it asks again.
Answers refer to the version's memory and are never copied into a queue.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Hashable
from typing import NoReturn, Protocol

import structlog
import zmq
from zmq.utils import garbage

from scavenger.errors import WeightsError, WireError
from scavenger.host.listening import ACCEPT_QUEUE
from scavenger.weights.protocol import (
    MAX_REQUEST_BYTES,
    Get,
    Map,
    NoSuch,
    Reach,
    SourceRequest,
    decode_request,
    encode,
)
from scavenger.weights.version_store import SourceStats, StoreReply

SEND_QUEUE = 16  # answers that may wait for one receiver
_POLL_MS = 1000
_log = structlog.get_logger(__name__)
# pyzmq makes the context of its own collector of sent memory where that is first asked for. Two threads that ask at once make two: one is
# lost, and with it what it was to free, which then stays for ever; the process may not even end. So it is asked for here, before any thread
# sends.
garbage.gc.context  # noqa: B018


def end_process(fault: WeightsError) -> NoReturn:
    """The default of `on_fault`: end this process at once. A signal would not do: the process may ignore it, or take it for an order."""
    print(f"error: {fault}", file=sys.stderr, flush=True)
    os._exit(fault.exit_code)


class Served(Protocol):
    """What is served: a version store, or KV blocks. Called in the server's thread."""

    @property
    def stats(self) -> SourceStats: ...

    def reply(self, request: SourceRequest, reader: Hashable) -> StoreReply:
        """What to answer: the message, and a chunk's bytes."""
        ...


class CurveServer:
    """`close` may be called from any thread. `fault`: why it serves no more."""

    def __init__(
        self,
        store: Served,
        address: str,
        on_fault: Callable[[WeightsError], None] = end_process,
        port: int = 0,
    ) -> None:
        """`port` 0: one that the system gives. `on_fault` is called once, from the server's thread, when that can serve no more.

        Raises `WeightsError` when the address cannot be bound.
        """
        self._store = store
        self._on_fault = on_fault
        self.fault: WeightsError | None = None
        self._complaint = ""
        self._context = zmq.Context()
        public, secret = zmq.curve_keypair()
        router = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.CURVE_SERVER, 1),
            (zmq.CURVE_SECRETKEY, secret),
            (zmq.CURVE_PUBLICKEY, public),
            (zmq.ROUTER_MANDATORY, 1),  # a full queue is then an error that we count, not a silent drop
            (zmq.SNDHWM, SEND_QUEUE),
            (zmq.RCVHWM, 1024),
            (zmq.MAXMSGSIZE, MAX_REQUEST_BYTES),
            (zmq.LINGER, 0),
            (zmq.HANDSHAKE_IVL, 10_000),
            (zmq.BACKLOG, ACCEPT_QUEUE),
        ):
            router.setsockopt(option, value)
        try:
            if port:
                router.bind(f"tcp://{address}:{port}")
            self.port = port or router.bind_to_random_port(f"tcp://{address}")
        except zmq.ZMQError as error:
            router.close()
            self._context.term()
            raise WeightsError(str(error)) from error
        self.server_key = public.decode()
        self._wake, wake_end = self._pair()
        self._thread = threading.Thread(
            target=self._serve, args=(router, wake_end), name="weights-source-curve", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(zmq.Again):  # it is ending by itself, and its end of the pair is closed
                self._wake.send(b"", zmq.NOBLOCK)
            self._thread.join()
        self._wake.close()
        self._context.term()

    def _pair(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        ours, theirs = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        address = f"inproc://wake-{id(self)}"
        ours.setsockopt(zmq.LINGER, 0)
        theirs.setsockopt(zmq.LINGER, 0)
        ours.bind(address)
        theirs.connect(address)
        return ours, theirs

    def _serve(self, router: zmq.Socket[bytes], wake: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        try:
            # what is no request's fault is the owner's to act on: a source that is silent, and looks well, would keep engines waiting
            while True:
                ready = dict(poller.poll(_POLL_MS))
                if wake in ready:
                    return
                if router in ready:
                    self._attempt(router, router.recv_multipart())
        except Exception as error:  # noqa: BLE001 - whatever it is, the owner is told
            error_text = f"{type(error).__name__}: {error}"
            _log.critical("weights.source_ended", reason=error_text, exc_info=error)
            self.fault = WeightsError(
                "the encrypted weights source cannot serve any more",
                "start this process again",
                quoted=error_text,
            )
            self._on_fault(self.fault)
        finally:
            router.close()
            wake.close()

    def _attempt(self, router: zmq.Socket[bytes], frames: list[bytes]) -> None:
        """Answer one request. If that fails, its receiver gets no answer and asks again or elsewhere; the thread goes on for others."""
        try:
            self._reply(router, frames)
        except Exception as error:  # noqa: BLE001 - a bug in answering one must not end the others' service
            self._store.stats.failed += 1
            error_text = f"{type(error).__name__}: {error}"
            if error_text != self._complaint:  # once, not with each request
                _log.error("weights.not_answered", reason=error_text, exc_info=error)
            self._complaint = error_text

    def _reply(self, router: zmq.Socket[bytes], frames: list[bytes]) -> None:
        try:
            if len(frames) != 2:
                raise WireError(f"a weights request of {len(frames) - 1} frames, not 1")
            request = decode_request(frames[1])
        except WireError as error:
            self._store.stats.malformed += 1
            _log.warning("weights.malformed", reason=error.cause)
            return
        if isinstance(request, Map | Reach):
            self._send(
                router,
                [frames[0], encode(NoSuch(request.version, -1, "memory is handed to neighbours only"))],
                0,
            )
            return
        reply, data = self._store.reply(request, frames[0])
        found: list[bytes | memoryview] = [frames[0], encode(reply)]
        self._send(
            router,
            found if data is None else [*found, data],
            len(data) if data is not None and isinstance(request, Get) else 0,
        )

    def _send(self, router: zmq.Socket[bytes], frames: list[bytes | memoryview], nbytes: int) -> None:
        stats = self._store.stats
        try:
            router.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            stats.dropped += 1  # the receiver's queue is full: it asks again when it has caught up
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            stats.dropped += 1  # the receiver is gone
        else:
            if nbytes:
                stats.parts += 1
                stats.nbytes += nbytes
