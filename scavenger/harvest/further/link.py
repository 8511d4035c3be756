"""The daemon's end of the links to further clusters: a ROUTER socket of its own under CURVE, in a thread of its own, and who asks over it.

    harvester's process --dials in--> ClusterLink <--ask-- LinkLine <-- LinkedCluster, EnginesUser <-- the daemon's Harvester

Owns the socket, whose key is which cluster's, one request at a time for each cluster, and what a request that got no answer counts as.
A harvester that is not heard is a Slurm that does not answer: `ClusterUnavailable`. A submission whose answer is missing may have taken
place, `SubmitUnknown`; one that was not sent, or not carried out, did not. What a harvester sends is typed and bounded, and else dropped.

Boundary: a socket and the thread that has it.
"""

from __future__ import annotations

import contextlib
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import structlog
import zmq
from zmq.auth.thread import ThreadAuthenticator

from scavenger.cluster.error_kind import ErrorKind
from scavenger.cluster.model import ClusterInfo, ClusterView, Job, JobLife, JobSpec
from scavenger.cluster.port import RpcCounter
from scavenger.cluster.proxy import client
from scavenger.cluster.proxy import messages as proxy
from scavenger.errors import AuthError, ClusterError, ClusterUnavailable, SubmitUnknown
from scavenger.harvest.decide.actions import Submit
from scavenger.harvest.further import messages as wire
from scavenger.harvest.further import plausible
from scavenger.host import descriptors, listening
from scavenger.parsing import MALFORMED
from scavenger.protocol.keys import KeyPair, Rendezvous
from scavenger.router.edge.handshakes import HandshakeGuard, HandshakeLimits, limits_for

log = structlog.get_logger()
R = TypeVar("R")
P = TypeVar("P", ClusterInfo, ClusterView, tuple[Job, ...], tuple[JobLife, ...])
#: Links are few.
MOST_UNPROVEN, MOST_PER_ADDRESS, MOST_PER_KEY = 64, 16, 64
#: Messages of one harvester that wait to be read: the pieces of an answer that it may send ahead, and two more.
MOST_UNREAD = wire.WINDOW_BYTES // wire.PIECE_BYTES + 2
#: The thread looks for silence so often, seconds.
TICK_S = 0.5
#: How often a fault of one harvester is logged, seconds.
LOG_S = 60.0


class _NotCarriedOut(Exception):
    """The request did nothing."""


class _Unanswered(Exception):
    """It may have been carried out."""


@dataclass(slots=True)
class _Pending:
    request: wire.Request
    answer: Future[bytearray] = field(default_factory=Future)
    pieces: bytearray = field(default_factory=bytearray)  # of the answer, as far as they came
    progress_at: float = float("-inf")  # when the last of them came

    def waited_until(self, began: float, timeout_s: float) -> float:
        """Until when the asker waits, by what is here."""
        earned_s = len(self.pieces) / wire.LEAST_ANSWER_BYTES_PER_S
        return min(self.progress_at + timeout_s, began + timeout_s + earned_s)


@dataclass(slots=True)
class _Peer:
    """One cluster's harvester. `session`: the process that has the key, until `lease_until` (of the clock). `free`: the number under which
    it takes a request now, None while it has one, or has reported nothing."""

    routing_id: bytes = b""
    session: str = ""
    lease_until: float = float("-inf")
    ready: wire.Ready | None = None
    heard: float = float("-inf")
    free: int | None = None
    asked: _Pending | None = None
    asked_as: tuple[str, int] = ("", 0)
    waiting: deque[_Pending] = field(default_factory=deque)
    logged: float = float("-inf")


class ClusterLink:
    """See the module. `heard` is called in the link's thread, with each cluster that is `Ready`. `uid_of`: by what the jobs of a cluster
    are known. Thread-safe."""

    def __init__(
        self,
        pair: KeyPair,
        *,
        heard: Callable[[str], None] = lambda _name: None,
        uid_of: Callable[[str], str] = lambda _name: "",
        silent_s: float = wire.SILENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pair, self._heard, self._silent_s, self._clock = pair, heard, silent_s, clock
        self._uid_of = uid_of
        self._names: Mapping[str, str] = {}
        self._rendezvous: Rendezvous | None = None
        self._lock = threading.Lock()  # of the peers
        self._peers: dict[str, _Peer] = {}
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._auth: ThreadAuthenticator | None = None
        self._guard: HandshakeGuard | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._wake_read, self._wake_write = sockets.socketpair()
        self._wake_write.setblocking(False)

    # ---------------------------------------------------------------- life

    def admit(self, names: Mapping[str, str]) -> None:
        """Who may link, from now on: public key -> cluster. It acts on live links."""
        with self._lock:
            self._names = dict(names)
            for name in self._peers.keys() - self._names.values():
                self._fail(self._peers[name], "the key of its harvester was removed")

    def expect(self, name: str, session: str) -> None:
        """The process that had a cluster's key when the last daemon ended: for a while it alone may have it. Call before `bind`."""
        self._peers[name] = _Peer(session=session, lease_until=self._clock() + self._silent_s)

    def announce(self, rendezvous: Rendezvous) -> None:
        """Where engines find the daemon."""
        self._rendezvous = rendezvous

    def callback(self, _domain: str, key: bytes) -> bool:
        """ZAP: pyzmq asks here at each handshake."""
        return key.decode("ascii", "replace") in self._names

    def bind(self, listen: str, port: int) -> int:
        """Serve from now on; returns the port. Raises what `listening.refused` gives, `AuthError` for a libzmq without CURVE."""
        if not zmq.has("curve"):
            raise AuthError("this libzmq has no CURVE", "install pyzmq from PyPI: its wheel has it")
        self._auth = ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback(domain="*", credentials_provider=self)
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = (
            self._pair.public.encode(),
            self._pair.secret.encode(),
        )
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_SENT_BYTES)
        socket.setsockopt(zmq.RCVHWM, MOST_UNREAD)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, wire.HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, wire.HEARTBEAT_TIMEOUT_MS)
        try:
            socket.bind(f"tcp://{sockets.gethostbyname(listen)}:{port or '*'}")
        except (zmq.ZMQError, OSError) as error:
            socket.close(linger=0)
            self._auth.stop()
            self._auth = None
            cause = error if isinstance(error, OSError) else OSError(error.errno, error.strerror)
            raise listening.refused(listening.CLUSTERS, listen, port, cause) from error
        self._socket = socket
        most = descriptors.limit()
        last_fd = limits_for(most, descriptors.reserved(most)).last_fd
        self._guard = HandshakeGuard(
            socket, HandshakeLimits(MOST_UNPROVEN, MOST_PER_ADDRESS, last_fd, MOST_PER_KEY)
        )
        self._thread = threading.Thread(target=self._run, args=(socket,), name="clusters", daemon=True)
        self._thread.start()
        return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    def close(self) -> None:
        """Requests under way end as unanswered."""
        self._stop.set()
        self._wake()
        if self._thread is not None:
            self._thread.join()
        if self._auth is not None:
            self._auth.stop()
        self._context.term()
        self._wake_read.close()
        self._wake_write.close()

    # ---------------------------------------------------------------- of any thread

    def ready(self, name: str) -> tuple[wire.Ready | None, float]:
        """A harvester's last word of its limits, None before the first, and how long ago it was heard (s)."""
        with self._lock:
            peer = self._peers.get(name)
            return (None, float("inf")) if peer is None else (peer.ready, self._clock() - peer.heard)

    def alive(self) -> bool:
        """Whether the link's thread runs, or has not begun."""
        return self._thread is None or self._thread.is_alive()

    def up(self, name: str) -> bool:
        """Whether its harvester was heard lately."""
        return self.ready(name)[1] <= self._silent_s

    def ask(self, name: str, request: wire.Request, timeout_s: float) -> bytearray:
        """The answer to one request, compressed. Blocks, and for longer than `timeout_s` while pieces of it come, no more than `timeout_s`
        apart and no slower than `LEAST_ANSWER_BYTES_PER_S`. Raises `ClusterError` as `port.Cluster` does."""
        pending = _Pending(request)
        who = f"the harvester of cluster {name}"
        with self._lock:
            peer = self._peers.setdefault(name, _Peer())
            silent_s = self._clock() - peer.heard
            if name not in self._names.values():
                raise _not_done(request, f"the key of {who} was removed")
            if self._stop.is_set() or silent_s > self._silent_s:
                since = f"has not been heard for {silent_s:.0f} s" if peer.ready else "has not dialled in"
                raise _not_done(request, f"{who} {since}")
            peer.waiting.append(pending)
        self._wake()
        try:
            left_s, began = timeout_s, self._clock()
            while left_s > 0:
                with contextlib.suppress(TimeoutError):
                    return pending.answer.result(left_s)
                left_s = pending.waited_until(began, timeout_s) - self._clock()
            sent = self._withdraw(peer, pending)
            if sent is None:
                return pending.answer.result()
            why = f"{who} did not answer within {timeout_s:g} s"
            raise _unanswered(request, why) if sent else _not_done(request, why)
        except _Unanswered as error:
            raise _unanswered(request, f"{who}: {error}") from error
        except _NotCarriedOut as error:
            raise _not_done(request, f"{who}: {error}") from error

    def _withdraw(self, peer: _Peer, pending: _Pending) -> bool | None:
        """Nobody waits for it any more. Whether it was sent; None: what became of it is known since this moment."""
        with self._lock:
            if pending.answer.done():
                return None
            sent = peer.asked is pending
            if sent:
                peer.asked = None
            else:
                peer.waiting.remove(pending)
            return sent

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will look
            self._wake_write.send(b"\0")

    # ---------------------------------------------------------------- the link's thread

    def _run(self, socket: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        try:
            while not self._stop.is_set():
                there = dict(poller.poll(int(TICK_S * 1000)))
                if self._wake_read.fileno() in there:
                    self._wake_read.recv(4096)
                if socket in there:
                    self._read(socket)
                with self._lock:
                    for name, peer in self._peers.items():
                        self._give_up_silent(name, peer)
                        self._send_next(socket, peer)
        finally:
            with self._lock:
                for peer in self._peers.values():
                    self._fail(peer, "the daemon stops")
            if self._guard is not None:
                self._guard.close()
            socket.close()

    def _read(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(64):
            try:
                frames: list[Any] = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(frames) != 2:
                continue  # not from a DEALER of ours
            routing_id, body = bytes(frames[0]), frames[1]
            public = str(body.get("User-Id"))
            name = self._names.get(public)
            if name is None:
                self._send(socket, routing_id, wire.Refused("this key was revoked: ask the daemon's admin"))
                continue
            if self._guard is not None:
                self._guard.heard(int(body.get(zmq.SRCFD)), public)
            self._take(socket, routing_id, name, body.buffer)

    def _take(self, socket: zmq.Socket[bytes], routing_id: bytes, name: str, body: memoryview) -> None:
        with self._lock:
            peer = self._peers.setdefault(name, _Peer())
            try:
                message = wire.from_harvester.decode(body)
                if isinstance(message, wire.Ready | wire.Busy) and len(body) > wire.MAX_READY_BYTES:
                    raise msgspec.ValidationError(f"{type(message).__name__} has {len(body)} bytes")
            except MALFORMED as error:
                if self._clock() - peer.logged >= LOG_S:
                    peer.logged = self._clock()
                    log.warning("garbage from a cluster's harvester", cluster=name, reason=str(error))
                return
            if isinstance(message, wire.Ready) and message.cluster != name:
                why = f"this key is of cluster {name}, and not of {message.cluster}: name it with --cluster"
                self._send(socket, routing_id, wire.Refused(why))
                return
            now = self._clock()
            if message.session != peer.session and now <= peer.lease_until:
                self._refuse_second(socket, routing_id, name, peer, message)
                return
            peer.heard, peer.session, peer.lease_until = now, message.session, now + self._silent_s
            match message:
                case wire.AnswerPiece(session, number):
                    upto = self._take_piece(peer, message)
                    self._send(socket, routing_id, wire.Received(session, number, upto))
                case wire.Leaving():
                    self._fail(peer, "its process was ended")
                    peer.heard = peer.lease_until = float("-inf")
                case wire.Ready():
                    self._settle_by(peer, message)
                    peer.routing_id, peer.ready, peer.free = routing_id, message, message.number
                case wire.Busy():
                    peer.free = None
        if isinstance(message, wire.Ready):
            if self._rendezvous is not None:
                self._send(socket, routing_id, wire.Noted(self._rendezvous, self._uid_of(name)))
            self._heard(name)

    def _refuse_second(
        self,
        socket: zmq.Socket[bytes],
        routing_id: bytes,
        name: str,
        peer: _Peer,
        message: wire.FromHarvester,
    ) -> None:
        if not isinstance(message, wire.Ready):
            return
        first, now = peer.ready.process if peer.ready is not None else "", self._clock()
        why = (
            f"another process has the key of cluster {name} ({first or 'from before the daemon started'}): end one of the two; "
            f"this one takes over once that one is silent for {self._silent_s:g} s"
        )
        self._send(socket, routing_id, wire.Refused(why))
        if now - peer.logged >= LOG_S:
            peer.logged = now
            log.warning(
                "a second harvester of a cluster is refused", cluster=name, it=message.process, has=first
            )

    def _take_piece(self, peer: _Peer, piece: wire.AnswerPiece) -> int:
        """Bytes that need not be sent any more."""
        pending = peer.asked
        if pending is None or peer.asked_as != (piece.session, piece.number):
            return piece.nbytes
        pieces, upto = pending.pieces, piece.offset + len(piece.data)
        if upto <= len(pieces):  # its process dialled again, and had not heard that this came
            return len(pieces)
        if piece.offset != len(pieces) or upto > piece.nbytes:
            peer.asked = None
            _fail(pending, _Unanswered("a piece of its answer is missing"))
            return piece.nbytes
        pieces += piece.data
        pending.progress_at = self._clock()
        if upto == piece.nbytes:
            peer.asked = None
            _settle(pending, lambda: pending.answer.set_result(pieces))
        return upto

    def _settle_by(self, peer: _Peer, ready: wire.Ready) -> None:
        """It takes work again: what became of the last request is known by that."""
        if peer.asked is None:
            return
        pending, peer.asked = peer.asked, None
        session, number = peer.asked_as
        if ready.session != session:
            _fail(pending, _Unanswered("its process was started anew"))
        elif ready.done >= number:
            _fail(pending, _Unanswered("its answer was lost"))
        else:
            peer.waiting.appendleft(pending)  # it came too late there, and did nothing

    def _give_up_silent(self, name: str, peer: _Peer) -> None:
        silent_s = self._clock() - peer.heard
        if silent_s > self._silent_s and (peer.asked is not None or peer.waiting):
            self._fail(peer, f"not heard for {silent_s:.0f} s")
            log.warning("link lost", cluster=name, silent_s=round(silent_s))

    def _fail(self, peer: _Peer, why: str) -> None:
        if peer.asked is not None:
            pending, peer.asked = peer.asked, None
            _fail(pending, _Unanswered(why))
        while peer.waiting:
            _fail(peer.waiting.popleft(), _NotCarriedOut(why))
        peer.free = None

    def _send_next(self, socket: zmq.Socket[bytes], peer: _Peer) -> None:
        if peer.free is None or peer.asked is not None or not peer.waiting or peer.ready is None:
            return
        pending = peer.waiting.popleft()
        peer.asked, peer.asked_as, peer.free = pending, (peer.ready.session, peer.free), None
        self._send(socket, peer.routing_id, wire.Ask(*peer.asked_as, pending.request))

    def _send(self, socket: zmq.Socket[bytes], routing_id: bytes, message: msgspec.Struct) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it is gone, or does not read: it sends `Ready` again
            socket.send_multipart([routing_id, msgspec.msgpack.encode(message)], zmq.NOBLOCK)


def _settle(pending: _Pending, act: Callable[[], None]) -> None:
    if not pending.answer.done():
        act()


def _fail(pending: _Pending, error: Exception) -> None:
    _settle(pending, lambda: pending.answer.set_exception(error))


def _not_done(request: wire.Request, cause: str) -> ClusterError:
    """Of a request that did nothing: there is no job to look for."""
    remedy = "see `systemctl status scavenger-harvester` there, and whether it reaches daemon.clusters_port"
    if isinstance(request, wire.SubmitEngine):
        return ClusterError(cause, remedy)
    return ClusterUnavailable(cause, remedy, error_kind=ErrorKind.NO_REPLY)


def _unanswered(request: wire.Request, cause: str) -> ClusterError:
    if isinstance(request, wire.SubmitEngine):
        return SubmitUnknown(cause)
    return _not_done(request, cause)


class LinkLine:
    """`proxy.client.Line` of one cluster. `timeout_s`: of one request, however many commands it takes there."""

    def __init__(self, link: ClusterLink, name: str, timeout_s: float) -> None:
        self._link, self._name, self._timeout_s = link, name, timeout_s
        self.rpc = RpcCounter()

    def ask(self, request: wire.Request | proxy.Request, kind: type[R]) -> R:
        """Raises `ClusterError` as `port.Cluster` does."""
        if isinstance(request, proxy.SubmitJob):
            raise ClusterError("a further cluster takes no job script from elsewhere")
        if len(msgspec.msgpack.encode(request)) > wire.MAX_ASK_BYTES // 2:
            raise ClusterError(f"a {type(request).__name__} is too large for the link")
        who = f"the harvester of cluster {self._name}"
        compressed = self._link.ask(self._name, request, self._timeout_s)
        try:
            answer = wire.unpacked(compressed)
        except MALFORMED as error:
            raise _unanswered(request, f"the reply of {who} is malformed: {error}") from error
        return client.reply_in(answer, request, kind, who, self.rpc)

    def plausible(self, replied: P) -> P:
        """What was replied. Raises `ClusterUnavailable` for what no cluster has."""
        if what := plausible.fault(replied):
            raise ClusterUnavailable(
                f"what the harvester of cluster {self._name} replies is of no cluster: {what}"
            )
        return replied


class LinkedCluster:
    """`port.Cluster` over a link. Engines are submitted as what was decided (`submit_engine`), never as a script."""

    def __init__(self, line: LinkLine) -> None:
        self._line = line

    @property
    def rpc(self) -> RpcCounter:
        return self._line.rpc

    def info(self) -> ClusterInfo:
        return self._line.plausible(self._line.ask(proxy.GetInfo(), proxy.InfoReply).info)

    def view(self) -> ClusterView:
        return self._line.plausible(self._line.ask(proxy.GetView(), proxy.ViewReply).view)

    def jobs(self) -> tuple[Job, ...]:
        return self._line.plausible(self._line.ask(proxy.GetJobs(), proxy.JobsReply).jobs)

    def submit(self, spec: JobSpec) -> int:
        return self._line.ask(proxy.SubmitJob(spec), proxy.SubmitReply).job_id

    def submit_engine(self, uid: str, intent_id: str, engine: Submit) -> int:
        return self._line.ask(wire.SubmitEngine(uid, intent_id, engine), proxy.SubmitReply).job_id

    def cancel(self, job_ids: tuple[int, ...]) -> None:
        self._line.ask(proxy.CancelJobs(job_ids), proxy.DoneReply)

    def requeue(self, job_id: int) -> None:
        self._line.ask(proxy.RequeueJob(job_id), proxy.DoneReply)

    def release(self, job_id: int, node: str) -> None:
        self._line.ask(proxy.ReleaseJob(job_id, node), proxy.DoneReply)

    def accounting(self, job_ids: tuple[int, ...]) -> tuple[JobLife, ...]:
        if not job_ids:
            return ()
        return self._line.plausible(self._line.ask(proxy.GetAccounting(job_ids), proxy.AccountingReply).lives)

    def close(self) -> None:
        """The link is the daemon's to close."""
