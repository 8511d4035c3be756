"""Serves the bytes of published versions to whoever holds a version's token.

Owns one thread, one ROUTER socket and the newest few versions. Knows nothing of tensors, engines or the daemon. Every receiver
asks for chunks one by one (`protocol.Get`), so the receiver sets the pace: a stalled one has at most `SEND_QUEUE` answers
waiting, further ones are dropped, and it asks again. Answers refer to the blob and are never copied into a queue.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections import OrderedDict
from dataclasses import dataclass

import structlog
import zmq

from scavenger import wire
from scavenger.errors import WeightsError, WireError
from scavenger.weights.manifest import Manifest
from scavenger.weights.protocol import MAX_REQUEST_BYTES, TOKEN_NBYTES, NoSuch, Part, decode_request, encode

SEND_QUEUE = 16  # answers that may wait for one receiver
_POLL_MS = 1000
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Published:
    manifest: Manifest
    blob: memoryview
    token: bytes


@dataclass(slots=True)
class SourceStats:
    """Counters since the start."""

    parts: int = 0
    nbytes: int = 0
    refused: int = 0
    malformed: int = 0
    dropped: int = 0


class WeightSource:
    """A server thread. `publish`, `retire` and `close` may be called from any thread."""

    def __init__(self, listen: str = "127.0.0.1", advertise: str = "", keep: int = 2) -> None:
        """Bind a port that the system gives on the interface `listen`; receivers are told to connect to `advertise`.

        `keep` versions are served; publishing one more retires the oldest. Raises `WeightsError` when the bind fails.
        """
        self._keep = keep
        self._versions: OrderedDict[int, _Published] = OrderedDict()
        self._lock = threading.Lock()
        self.stats = SourceStats()
        self._context = zmq.Context()
        public, secret = zmq.curve_keypair()
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, secret)
        router.setsockopt(zmq.CURVE_PUBLICKEY, public)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue is then an error that we count, not a silent drop
        router.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        router.setsockopt(zmq.RCVHWM, 1024)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
        try:
            port = router.bind_to_random_port(f"tcp://{socket.gethostbyname(listen)}")
        except (zmq.ZMQError, OSError) as error:
            router.close()
            self._context.term()
            cause = f"the weights source cannot bind {listen}: {error}"
            raise WeightsError(cause, "set weights.listen to an interface of this host") from error
        host = advertise or (socket.gethostname() if listen == "0.0.0.0" else listen)
        self.endpoint = f"tcp://{host}:{port}"
        self.server_key = public.decode()
        self._wake, wake_end = self._pair()
        self._thread = threading.Thread(target=self._serve, args=(router, wake_end), name="weights-source", daemon=True)
        self._thread.start()

    def publish(self, manifest: Manifest, blob: bytes | bytearray | memoryview) -> wire.WeightSource:
        """Serve a version; the caller must not change `blob` before the version is retired and its readers are done.

        Publishing a version again with the same root returns the source it has. Raises `WeightsError` otherwise.
        """
        view = memoryview(blob).cast("B")
        if view.nbytes != manifest.total_nbytes:
            raise WeightsError(f"version {manifest.version}: {view.nbytes} bytes given, the manifest names {manifest.total_nbytes}")
        if not self._thread.is_alive():
            raise WeightsError("the weights source has stopped", "the trainer's log says why; restart the trainer")
        with self._lock:
            present = self._versions.get(manifest.version)
            if present is not None and present.manifest.root != manifest.root:
                raise WeightsError(f"version {manifest.version} was published with other weights", "versions are never reused")
            if present is None:
                present = _Published(manifest, view.toreadonly(), secrets.token_bytes(TOKEN_NBYTES))
                self._versions[manifest.version] = present
                while len(self._versions) > self._keep:
                    self._versions.popitem(last=False)
        return wire.WeightSource(self.endpoint, self.server_key, present.token)

    def retire(self, version: int) -> None:
        """Serve this version no longer. Answers already queued still hold its bytes until they are sent or dropped."""
        with self._lock:
            self._versions.pop(version, None)

    def close(self) -> None:
        """Stop serving and release the port. Idempotent."""
        if self._thread.is_alive():
            self._wake.send(b"")
            self._thread.join()
        self._wake.close()
        self._context.term()

    def __enter__(self) -> WeightSource:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

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
            while True:
                ready = dict(poller.poll(_POLL_MS))
                if wake in ready:
                    return
                if router in ready:
                    self._answer(router, router.recv_multipart())
        finally:
            router.close()
            wake.close()

    def _answer(self, router: zmq.Socket[bytes], frames: list[bytes]) -> None:
        try:
            if len(frames) != 2:
                raise WireError(f"a weights request of {len(frames) - 1} frames, not 1")
            request = decode_request(frames[1])
        except WireError as error:
            self.stats.malformed += 1
            _log.warning("weights.malformed", reason=error.cause)
            return
        with self._lock:
            held = self._versions.get(request.version)
        allowed = secrets.compare_digest(request.token, held.token if held else bytes(TOKEN_NBYTES))
        if held is None or not allowed:
            self.stats.refused += 1
            reply = NoSuch(request.version, request.chunk, f"version {request.version} is not served here under this token")
            self._send(router, [frames[0], encode(reply)], 0)
        elif not 0 <= request.chunk < len(held.manifest.chunk_hashes):
            self.stats.refused += 1
            self._send(router, [frames[0], encode(NoSuch(request.version, request.chunk, "the version has no such chunk"))], 0)
        else:
            start, stop = held.manifest.chunk_range(request.chunk)
            header = encode(Part(request.version, request.chunk))
            self._send(router, [frames[0], header, held.blob[start:stop]], stop - start)

    def _send(self, router: zmq.Socket[bytes], frames: list[bytes | memoryview], nbytes: int) -> None:
        try:
            router.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self.stats.dropped += 1  # the receiver's queue is full: it asks again when it has caught up
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.stats.dropped += 1  # the receiver is gone
        else:
            if nbytes:
                self.stats.parts += 1
                self.stats.nbytes += nbytes
