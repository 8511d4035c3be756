"""Serves the bytes of versions to receivers that know their tokens: for the publisher, and for engines that pass on what they hold.

Owns the listening sockets and what it tells others of them. Knows nothing of tensors, engines or the daemon. Every receiver asks for
chunks one by one, so it sets the pace; one that does not read, or reads a little now and then, holds up its own connection only, and loses
it (`send_within`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import structlog

from scavenger.errors import WeightsError, WireError
from scavenger.protocol import messages
from scavenger.weights import rdma
from scavenger.weights.channel import machine, read_exactly, send_frame, send_within, set_timeouts
from scavenger.weights.delta import MOST_LINKS
from scavenger.weights.delta_store import Chains, Encoder
from scavenger.weights.directory import VERSIONS_SERVED
from scavenger.weights.manifest import Manifest
from scavenger.weights.memory import Buffer
from scavenger.weights.pace import ByteRateLimit
from scavenger.weights.protocol import (
    MAX_REQUEST_BYTES,
    Map,
    NoSuch,
    Reach,
    Reached,
    SourceReply,
    decode_request,
    encode,
)
from scavenger.weights.source_zmq import CurveServer, end_process
from scavenger.weights.version_store import SourceStats, VersionStore

IDLE_S = 60.0
SEND_S = 30.0
LEASE_S = 15.0
MAX_CONNECTIONS = 256  # over the network; and as many again from this node
UNPROVEN_S = 5.0  # a connection that has not shown that it knows a token ends after so long in all
ACCEPT_AGAIN_S = 0.1  # after an accept that failed
_PIECE = 256 << 10  # a paced source sends so much at a time
_log = structlog.get_logger(__name__)


def is_loopback(host: str) -> bool:
    """Whether a host name or address reaches its own host alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serving_interface(listen: str, daemon_endpoint: str) -> str:
    """`weights.listen`, or where that is "" the interface that engines can reach when they can reach the daemon's `tcp://HOST:PORT`."""
    if listen:
        return listen
    host = daemon_endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return "127.0.0.1" if is_loopback(host) else "0.0.0.0"


class WeightServer:
    """Server threads. Everything may be called from any thread."""

    def __init__(
        self,
        listen: str = "127.0.0.1",
        advertise: str = "",
        keep: int = VERSIONS_SERVED,
        *,
        encrypt: bool = False,
        local: bool = True,
        lease_s: float = LEASE_S,
        nbytes_per_s: float = 0.0,
        deltas: int | Chains = 0,
        nixl: bool = False,
        port: int = 0,
        on_fault: Callable[[WeightsError], None] = end_process,
    ) -> None:
        """Bind `port` (0: one that the system gives) on the interface `listen`; receivers are told to connect to `advertise`.

        `keep` versions are served; publishing one more retires the oldest. `encrypt`: under CURVE. `local`: hand the memory to readers
        on this machine. `deltas`: from so many versions back, made here; or those that came from elsewhere. `nbytes_per_s`: what it
        sends at most, all receivers together; 0 = no bound. `nixl`: let the memory be read by NIXL, never where `encrypt`. `on_fault` is
        called, from a thread of the source's, when it cannot serve any more. Raises `WeightsError` when it cannot bind.
        """
        self._agent = rdma.shared("serve") if nixl and not encrypt else None
        chains = Chains(min(deltas, MOST_LINKS)) if isinstance(deltas, int) else deltas
        self._encoder = Encoder(chains) if isinstance(deltas, int) and deltas else None
        self._store = VersionStore(keep, lease_s, chains=chains, encoder=self._encoder)
        self._pace = ByteRateLimit(nbytes_per_s)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._open: dict[int, _Connection] = {}
        self._listeners: list[tuple[socket.socket, threading.Thread]] = []
        self._closed = threading.Event()
        host = advertise or (socket.gethostname() if listen == "0.0.0.0" else listen)
        self._curve: CurveServer | None = None
        try:
            if encrypt:
                self._curve = CurveServer(self._store, socket.gethostbyname(listen), on_fault, port)
                bound = self._curve.port
            else:
                server = socket.create_server((socket.gethostbyname(listen), port), backlog=64)
                bound = server.getsockname()[1]
                self._listen(server)
            self.local = self._listen_locally() if local else ""
        except (OSError, RuntimeError, WeightsError) as error:  # also: no thread for it
            self.close()
            cause = f"the weights source cannot bind {listen}{f', port {port}' if port else ''}: {error}"
            remedy = "set weights.listen to an interface of this host"
            remedy += ", and weights.port to one that no other run uses there" if port else ""
            raise WeightsError(cause, remedy) from error
        self.endpoint = f"tcp://{host}:{bound}"
        self.server_key = self._curve.server_key if self._curve else ""

    @property
    def stats(self) -> SourceStats:
        return self._store.stats

    @property
    def chains(self) -> Chains:
        return self._store.chains

    def wait_deltas(self) -> None:
        """Wait until the newest version's deltas are made, if they are made here."""
        if self._encoder is not None:
            self._encoder.wait()

    # ---------------------------------------------------------------- what is served

    def publish(
        self,
        manifest: Manifest,
        blob: bytes | bytearray | memoryview | Buffer,
        chunks: Sequence[int] | None = None,
    ) -> messages.WeightSource:
        """Serve a version; the caller must not change the bytes before `free` says that no reader is left.

        `chunks`: those that are in `blob`, whose other bytes mean nothing; None = all. Publishing a version again with the same root
        returns the source it has. Raises `WeightsError` otherwise.
        """
        return self._put(manifest, blob, empty=False, chunks=chunks)

    def publish_empty(
        self, manifest: Manifest, buffer: Buffer, coming: Callable[[], np.ndarray[Any, Any]] | None = None
    ) -> messages.WeightSource:
        """Serve a version as it arrives: `arrived` says which chunk is here and verified, `completed` that all are.

        `coming`: which chunks (a bool each) are on their way; readers wait for those rather than fetch them too. Called from any thread.
        """
        return self._put(manifest, buffer, empty=True, coming=coming)

    def _put(
        self,
        manifest: Manifest,
        blob: bytes | bytearray | memoryview | Buffer,
        *,
        empty: bool,
        chunks: Sequence[int] | None = None,
        coming: Callable[[], np.ndarray[Any, Any]] | None = None,
    ) -> messages.WeightSource:
        buffer = blob if isinstance(blob, Buffer) else None
        view = buffer.view if buffer is not None else memoryview(blob).cast("B")  # type: ignore[arg-type]
        if self._closed.is_set() or not all(thread.is_alive() for _, thread in self._listeners):
            raise WeightsError("the weights source has stopped", "the process's log says why; restart it")
        if self._curve is not None and self._curve.fault is not None:
            raise self._curve.fault
        if chunks is not None and len(chunks) == len(manifest.chunk_hashes):
            chunks = None
        token = self._store.put(manifest, view, buffer, empty=empty, chunks=chunks, coming=coming)
        local = self.local if buffer is not None else ""
        nixl = self._agent is not None and buffer is not None
        return messages.WeightSource(
            self.endpoint, self.server_key, token, local, not empty and chunks is None, nixl
        )

    def arrived(self, version: int, chunk: int) -> None:
        self._store.arrived(version, chunk)

    def completed(self, version: int) -> None:
        self._store.completed(version)

    def versions(self) -> list[int]:
        return self._store.versions()

    def retire(self, version: int) -> None:
        """Serve this version to no new reader. Present readers may go on until their leases run out."""
        self._store.retire(version)

    def withdraw(self, version: int) -> None:
        """Stop serving this version at once, to present readers too. Its memory stays as it is."""
        self._store.withdraw(version)

    def free(self, version: int, timeout_s: float) -> bool:
        """Whether a retired version's memory may be written again, waiting for its readers."""
        return self._store.wait_gone(version, timeout_s)

    def close(self) -> None:
        """Stop serving and release the ports. Idempotent."""
        self._closed.set()
        with self._lock:
            threads = [*self._listeners, *((one.sock, one.thread) for one in self._open.values())]
        for sock, _ in threads:
            with contextlib.suppress(OSError):  # a receiver may have gone
                sock.shutdown(socket.SHUT_RDWR)  # wakes its thread
        for sock, thread in threads:
            thread.join()
            sock.close()  # now: before, the thread might be about to use the number, which may be another socket's by then
        if self._encoder is not None:
            self._encoder.wait(stop=True)
        if self._curve is not None:
            self._curve.close()

    def __enter__(self) -> WeightServer:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # ---------------------------------------------------------------- sockets

    def _listen(self, server: socket.socket) -> None:
        thread = threading.Thread(target=self._accept, args=(server,), name="weights-source", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            server.close()
            raise
        self._listeners.append((server, thread))

    def _listen_locally(self) -> str:
        """A socket in the abstract namespace: no file that could outlive the process."""
        name = f"scavenger-weights-{secrets.token_hex(8)}"
        server = socket.socket(socket.AF_UNIX)
        server.bind("\0" + name)
        server.listen(64)
        self._listen(server)
        return f"{machine()}:{name}"

    def _accept(self, server: socket.socket) -> None:
        complaint = ""
        while not self._closed.is_set():
            try:
                self._welcome(server.accept()[0])
                complaint = ""
            except (
                OSError,
                RuntimeError,
            ) as error:  # no descriptor, no thread, a receiver that went: the next may be served
                if str(error) != complaint and not self._closed.is_set():  # once, not with each try
                    _log.error("weights.not_accepted", reason=str(error))
                complaint = str(error)
                self._closed.wait(ACCEPT_AGAIN_S)

    def _welcome(self, sock: socket.socket) -> None:
        """Raises `RuntimeError` where no thread can be had."""
        number = next(self._numbers)
        with self._lock:
            if self._closed.is_set() or not self._has_free_slot(sock.family):
                self.stats.dropped += 1
                sock.close()
                return
            one = _Connection(sock)
            one.thread = threading.Thread(
                target=self._serve, args=(one, number), name=f"weights-serve-{number}", daemon=True
            )
            self._open[number] = one
            try:
                one.thread.start()
            except RuntimeError:
                del self._open[number]
                self.stats.dropped += 1
                sock.close()
                raise

    def _has_free_slot(self, family: int) -> bool:
        """Whether one more connection of this kind fits; the oldest one without a proof is closed for it. Called under the lock."""
        same = [one for one in self._open.values() if one.sock.family == family and not one.evicted]
        if len(same) < MAX_CONNECTIONS:
            return True
        oldest = next((one for one in same if not one.proven), None)
        if oldest is None:
            return False
        oldest.evicted = True
        self.stats.dropped += 1
        with contextlib.suppress(OSError):  # it is ending by itself
            oldest.sock.shutdown(socket.SHUT_RDWR)
        return True

    def _serve(self, one: _Connection, number: int) -> None:
        sock = one.sock
        try:
            set_timeouts(sock, min(1.0, UNPROVEN_S), UNPROVEN_S)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            frame = memoryview(bytearray(MAX_REQUEST_BYTES))
            while not self._closed.is_set():
                one.check_deadline()
                read_exactly(sock, frame[:4], one.check_deadline, one.timeout_s())
                size = int.from_bytes(frame[:4], "little")
                if size > MAX_REQUEST_BYTES:
                    raise WireError(
                        f"a weights request of {size} bytes is over the limit of {MAX_REQUEST_BYTES}"
                    )
                read_exactly(sock, frame[:size], one.check_deadline, one.timeout_s())
                self._reply(one, frame[:size], number)
        except WireError as error:
            self.stats.malformed += 1
            _log.warning("weights.malformed", reason=error.cause)
        except OSError as error:  # the receiver went, or does not read
            self.stats.dropped += isinstance(error, TimeoutError | BlockingIOError)
        except Exception as error:  # noqa: BLE001 - a fault of ours costs this receiver its connection, and is logged
            self.stats.failed += 1
            _log.error("weights.not_answered", reason=f"{type(error).__name__}: {error}", exc_info=error)
        finally:
            self._store.reader_left(number)
            sock.close()
            with self._lock:
                self._open.pop(number, None)

    def _reply(self, one: _Connection, frame: memoryview, number: int) -> None:
        sock, request = one.sock, decode_request(frame)
        if isinstance(request, Map):
            self._hand_over(one, request, number)
            return
        if isinstance(request, Reach):
            self._report_reach(one, request, number)
            return
        reply, data = self._store.reply(request, number)
        if not isinstance(reply, NoSuch) or reply.absent:
            one.prove()
        send_frame(sock, encode(reply))
        if data is None:
            return
        for start in range(0, len(data), _PIECE if self._pace.bounded else len(data)):
            piece = data[start : start + _PIECE] if self._pace.bounded else data
            self._pace.take(len(piece), self._closed)
            send_within(sock, piece, SEND_S)
        self.stats.parts += 1
        self.stats.nbytes += len(data)

    def _report_reach(self, one: _Connection, request: Reach, number: int) -> None:
        held = self._store.find(request, number)
        if not isinstance(held, NoSuch):
            one.prove()
        reply: SourceReply = NoSuch(request.version, -1, "it is not served by NIXL here", absent=True)
        if not isinstance(held, NoSuch) and self._agent is not None and held.buffer is not None:
            try:
                reply = Reached(request.version, *self._agent.expose(held.buffer, held.ranges()))
            except WeightsError as error:  # the receiver goes on by TCP, on this very connection's address
                self.stats.failed += 1
                _log.error("weights.nixl_not_exposed", reason=error.cause)
        send_frame(one.sock, encode(reply))

    def _hand_over(self, one: _Connection, request: Map, number: int) -> None:
        sock = one.sock
        held = self._store.find(request, number)
        if not isinstance(held, NoSuch):
            one.prove()
        buffer = getattr(held, "buffer", None)
        if sock.family != socket.AF_UNIX or not isinstance(buffer, Buffer):
            sock.sendall(b"\0")
            return
        fd = buffer.readonly_fd()
        with open(fd, "rb"):  # closes our copy
            socket.send_fds(sock, [b"\1"], [fd])
        self.stats.mapped += 1


class _Connection:
    """An accepted connection, and whether its receiver has proven that it knows a version's token."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.thread = threading.current_thread()  # its own, once it is made
        self.proven = self.evicted = False
        self._since = time.monotonic()

    def prove(self) -> None:
        if not self.proven:
            self.proven = True
            set_timeouts(self.sock, 1.0, SEND_S)

    def check_deadline(self) -> None:
        """Raises `TimeoutError` once the connection has lasted for its time without a proof."""
        if not self.proven and time.monotonic() - self._since >= UNPROVEN_S:
            raise TimeoutError(f"nothing proven for {UNPROVEN_S:g} s")

    def timeout_s(self) -> float:
        return IDLE_S if self.proven else max(0.0, self._since + UNPROVEN_S - time.monotonic())
