"""The router's edge: one ZeroMQ ROUTER socket under CURVE, the core behind it, the ledger's writer beside it.

Owns sockets, connections and the order in which events reach the core. Authority is read from each frame's CURVE User-Id, never from what
a message says. Decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket as sockets
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from scavenger.errors import AuthError, Fenced, WireError
from scavenger.host import descriptors, listening
from scavenger.ledger.records import DeliveryState, Event, OpenGroup, Record
from scavenger.protocol import messages
from scavenger.protocol.keys import KeyPair
from scavenger.router.core.events import (
    Committed,
    CoreTick,
    Fill,
    GarbageReceived,
    Heard,
    HistoryRead,
    ReadHistory,
    RouterAction,
    RouterEvent,
    Send,
    Write,
)
from scavenger.router.core.machine import Router
from scavenger.router.core.payloads import PayloadStore
from scavenger.router.core.tables import is_reported
from scavenger.router.edge.handshakes import HandshakeGuard, limits_for
from scavenger.router.edge.keyring import KeyRing
from scavenger.router.edge.pipeline import PayloadPipeline, ReadPayloads, event_of, patiently

__all__ = ["KeyRing", "LedgerWriter", "RouterServer"]

log = structlog.get_logger()

TICK_S = 0.25
#: Messages that may wait for one slow peer before further ones are dropped (every protocol survives a lost message). Groups are bounded
#: in bytes, and never dropped: `pipeline.Deliveries`.
CONNECTION_QUEUE = 4000
#: Bytes that may wait for the disk before the server stops reading: workers keep their tokens, nothing is dropped.
MAX_BACKLOG_BYTES = 256 * 1024 * 1024
#: Events handled before the loop lets others run.
BATCH = 64
#: How often connections are looked through, and the silence after which one without a worker or run is forgotten.
SWEEP_S = 60.0
FORGET_S = 3600.0


@dataclass(slots=True)
class _Connection:
    """One connection: its number for the core, the key it proved, and when it last said anything."""

    conn: int
    public_key: str
    heard: float


class LedgerWriter(Protocol):
    """What the server needs of `ledger.writer.Writer`."""

    @property
    def backlog_bytes(self) -> int: ...

    def submit(self, ticket: int, records: Sequence[Record]) -> None: ...

    def go(self) -> None: ...


#: As `RunOpened.pass_rates`.
PassRates = tuple[tuple[int, int, int, int], ...]


class RouterServer:
    """Serves workers and trainers until it is stopped. `clock()` gives Unix seconds that never run backwards."""

    def __init__(
        self,
        router: Router,
        writer: LedgerWriter,
        keyring: KeyRing,
        keys: KeyPair,
        clock: Callable[[], float],
        read_history: Callable[[int, int], Awaitable[tuple[OpenGroup, ...]]],
        store: PayloadStore,
        read_payloads: ReadPayloads,
        read_pass_rates: Callable[[int, int, float], Awaitable[PassRates]] | None = None,
        read_taken: Callable[[int, int], Awaitable[tuple[DeliveryState, ...]]] | None = None,
        read_ended_episodes: Callable[[int, int], Awaitable[tuple[str, ...]]] | None = None,
    ) -> None:
        assert router.core.payloads is store
        self.router = router
        self.pipeline = PayloadPipeline(
            router.core,
            store,
            read_payloads,
            post=self._from_connection,
            send=self._send,
            connected=lambda conn: conn in self._routes,
            failed=self._fail,
        )
        self.keyring = keyring
        self._writer = writer
        self._keys = keys
        self._clock = clock
        self._read_history = read_history
        self._read_pass_rates = read_pass_rates
        self._read_taken = read_taken
        self._read_ended_episodes = read_ended_episodes
        self._context = zmq.asyncio.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._drain_due = self._go_due = False
        self._failure: asyncio.Future[None] | None = None
        self._auth: AsyncioAuthenticator | None = None
        self.guard: HandshakeGuard | None = None  # from `bind` on
        self._conns: dict[bytes, _Connection] = {}  # by routing id
        self._swept_at = clock()
        self._routes: dict[int, bytes] = {}
        self._next_conn = 1
        self._tickets: deque[tuple[int, int]] = deque()  # (writer's ticket, core's ticket)
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._ticket = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self.turns = 0  # of the loop that ticks the core, so that a watchdog can see it go round

    # ---------------------------------------------------------------- life

    def bind(self, listen: str, port: int) -> int:
        """Bind the socket and return its port. Raises what `listening.refused` gives, `AuthError` for a libzmq without CURVE."""
        if not zmq.has("curve"):
            raise AuthError("this libzmq has no CURVE", "install pyzmq from PyPI: its wheel has it")
        self._auth = AsyncioAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback(domain="*", credentials_provider=self.keyring)
        socket: zmq.Socket[bytes] = zmq.Context.shadow(self._context.underlying).socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = (
            self._keys.public.encode(),
            self._keys.secret.encode(),
        )
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.SNDHWM, CONNECTION_QUEUE)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.BACKLOG, listening.ACCEPT_QUEUE)
        socket.setsockopt(
            zmq.HANDSHAKE_IVL, 5000
        )  # a peer that connects and says nothing costs a descriptor for this long only
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)
        try:
            address = sockets.gethostbyname(listen)
            socket.bind(f"tcp://{address}:{port or '*'}")
        except (zmq.ZMQError, OSError) as error:
            socket.close(linger=0)  # or the context would wait for it without end
            self._auth.stop()
            self._auth = None
            cause = error if isinstance(error, OSError) else OSError(error.errno, error.strerror)
            raise listening.refused(listening.ROUTER, listen, port, cause) from error
        self._socket = socket
        most = descriptors.limit()
        self.guard = HandshakeGuard(socket, limits_for(most, descriptors.reserved(most)))
        return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set."""
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        descriptor = int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(descriptor, self._drain)
        self._check_again()
        self._failure = failure = loop.create_future()
        tasks: list[asyncio.Future[Any]] = [
            asyncio.create_task(self._tick()),
            asyncio.create_task(stop.wait()),
            failure,
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a crash of a loop ends the daemon with its traceback
        finally:
            loop.remove_reader(descriptor)
            for task in [*tasks, *self._tasks]:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await self.pipeline.close()

    def close(self) -> None:
        if self._auth is not None:
            self._auth.stop()
        if self.guard is not None:
            self.guard.close()
        if self._socket is not None:
            self._socket.close()
        self._context.term()

    # ---------------------------------------------------------------- events in

    def _drain(self) -> None:
        """Read what is there, a batch at a time; more is read after others had their turn.

        The socket is a plain one on its file descriptor, which is edge-triggered: sending may swallow the edge, so this runs again after
        whatever touched the socket until nothing is left.
        """
        self._drain_due = False
        with self._fatal():
            self._drain_some()

    def _drain_some(self) -> None:
        socket = self._socket
        if socket is None or self._full:
            return  # `committed` and `_from_connection` look again when the disk has caught up
        for _ in range(BATCH):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._frame(frames)
        self._check_again()

    @contextlib.contextmanager
    def _fatal(self) -> Iterator[None]:
        """An error in a callback ends the daemon: half an event performed is a state that only the ledger can mend."""
        try:
            yield
        except Fenced as error:  # no bug: the daemon ends with that reason
            self._fail(error)
        except Exception as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    @property
    def _full(self) -> bool:
        """Whether as much waits for the disk, to be written or to be read, as may."""
        return self._writer.backlog_bytes + self.pipeline.waiting_bytes > MAX_BACKLOG_BYTES

    def _check_again(self) -> None:
        if not self._drain_due:
            self._drain_due = True
            asyncio.get_running_loop().call_soon(self._drain)

    def _frame(self, frames: Sequence[Any]) -> None:
        """One message of a peer: find out who it is, and put it on its way to the core."""
        if len(frames) != 2:
            return  # not from a DEALER of ours; CURVE let it in, but it speaks another pattern
        routing_id, body = bytes(frames[0]), frames[1]
        public_key = str(body.get("User-Id"))
        identity = self.keyring.identity(public_key)
        if identity is None:
            self._push(
                routing_id,
                messages.encode(
                    messages.Rejected(
                        "this key was revoked",
                        "have another one: `scavenger join PUBLIC_DIR --new`, or from the admin "
                        "(`scavenger enroll`; for a guest `scavenger keys guest`)",
                    )
                ),
            )
            return
        if self.guard:  # something is unproven
            self.guard.heard(int(body.get(zmq.SRCFD)), identity.public_key)
        peer = self._conns.get(routing_id)
        if peer is None or peer.public_key != public_key:
            peer = self._connect(routing_id, public_key)
        peer.heard, conn = self._clock(), peer.conn
        registered = conn in self.router.core.by_conn or identity.role == "owner"
        limit = messages.MAX_MESSAGE_BYTES if registered else messages.MAX_HELLO_BYTES
        try:
            event = event_of(conn, identity, body.buffer, limit)
        except WireError as error:
            self._garbage(routing_id, public_key, error, retry=not registered and len(body.buffer) > limit)
            return
        if not self.pipeline.receive(conn, event, len(body.buffer)):
            self.post(Heard(conn))

    def _from_connection(self, event: RouterEvent) -> None:
        self.post(event)
        self._check_again()

    def _connect(self, routing_id: bytes, public_key: str) -> _Connection:
        before = self._conns.get(routing_id)
        if before is not None:
            self._routes.pop(
                before.conn, None
            )  # a routing id is the peer's choice: what was meant for another key stays unsent
        peer = self._conns[routing_id] = _Connection(self._next_conn, public_key, self._clock())
        self._next_conn += 1
        self._routes[peer.conn] = routing_id
        return peer

    def _sweep(self, now: float) -> None:
        """Forget peers that vanished: ZeroMQ says nothing of a closed connection. One that is in use stays, however silent."""
        if now - self._swept_at < SWEEP_S:
            return
        listened = (
            now - self._swept_at < 2 * SWEEP_S
        )  # else this daemon was away, or did not read: their silence means nothing
        self._swept_at = now
        core = self.router.core
        used = core.by_conn.keys() | {run.trainer.conn for run in core.runs.values()}
        for routing_id, peer in list(self._conns.items()):
            if not listened:
                peer.heard = now
            elif now - peer.heard > FORGET_S and peer.conn not in used:
                del self._conns[routing_id]
                self._routes.pop(peer.conn, None)

    def _garbage(self, routing_id: bytes, public_key: str, error: WireError, *, retry: bool) -> None:
        """Refuse and record. `retry`: too large before a hello, as the tokens of a worker whose daemon was restarted under it may be."""
        self.post(GarbageReceived(public_key, error.cause))
        so_far = self.router.core.nonsense[public_key]
        if is_reported(so_far):
            log.warning("garbage", key=public_key, cause=error.cause, so_far=so_far)
        self._push(
            routing_id,
            messages.encode(
                messages.Rejected(error.cause, "run workers, trainer and daemon of one release", retry)
            ),
        )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if not self._full:  # else no message is read, and silence means nothing
                self.post(CoreTick())
                self._sweep(self._clock())
            self.turns += 1

    def post(self, event: RouterEvent) -> None:
        """Hand an event to the core and perform what it answers. Only from the event loop's thread."""
        self.perform(self.router.handle(event, self._clock()))

    # ---------------------------------------------------------------- actions out

    def perform(self, actions: Sequence[RouterAction]) -> None:
        for action in actions:
            match action:
                case Send() | Fill():
                    self.pipeline.give(action)
                case Write(ticket=ticket, records=records):
                    self._tickets.append((self.write(records), ticket))
                case ReadHistory():
                    task = asyncio.get_running_loop().create_task(self._history(action))
                    self._tasks.add(task)
                    task.add_done_callback(self._history_done)

    async def _history(self, action: ReadHistory) -> None:
        groups = await patiently(
            lambda: self._read_history(action.run_id, action.after_step), f"groups of run {action.run_id}"
        )
        rates: PassRates = ()
        if (solved_at := action.solved_at) is not None and self._read_pass_rates is not None:
            read = self._read_pass_rates
            rates = await patiently(
                lambda: read(action.run_id, action.after_step, solved_at),
                f"pass rates of run {action.run_id}",
            )
        taken: tuple[DeliveryState, ...] = ()
        if (read_taken := self._read_taken) is not None:
            taken = await patiently(
                lambda: read_taken(action.run_id, action.after_step), f"deliveries to run {action.run_id}"
            )
        ended: tuple[str, ...] = ()
        if most := action.ended_episodes:
            read_ended = self._read_ended_episodes
            assert read_ended is not None, (
                f"run {action.run_id} is opened again, and nobody reads its episodes"
            )
            ended = await patiently(
                lambda: read_ended(action.run_id, most), f"ended episodes of run {action.run_id}"
            )
        self.post(HistoryRead(action.run_id, action.attempt, groups, rates, taken, ended))

    def _history_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)  # ends the daemon: a ledger that is corrupt is no ledger

    def _send(self, conn: int, message: messages.Message) -> bool:
        """Send without waiting. False when the peer's queue is full; a message that it drops is made good by the protocol."""
        routing_id = self._routes.get(conn)
        if routing_id is None or self.keyring.identity(self._conns[routing_id].public_key) is None:
            return True  # gone, or its key was revoked
        try:
            body = messages.encode(message)
        except WireError as error:  # ours to prevent, and one run's trouble: the daemon of all goes on
            log.error("a message was not sent", kind=type(message).__name__, cause=error.cause)
            self.write(
                [Event("message_too_large", 0, type(message).__name__, error.cause, "{}", self._clock())]
            )
            return True
        # Of a group not a copy: its bytes are counted until they are on the network. A frame kept here would keep them.
        frame = (
            zmq.Frame(body, track=True, copy=False, copy_threshold=0)
            if isinstance(message, messages.GroupDone)
            else body
        )
        taken = self._push(routing_id, frame)
        if taken is None:
            self._conns.pop(routing_id, None)
            self._routes.pop(conn, None)
        elif taken and isinstance(frame, zmq.Frame):
            tracker = frame.tracker
            run = self.pipeline.run_of(message) if isinstance(message, messages.GroupDone) else 0
            self.pipeline.deliveries.sent(conn, len(body), lambda: bool(tracker.done), run)
        return taken is not False

    def _push(self, routing_id: bytes, frame: bytes | zmq.Frame) -> bool | None:
        """Whether the peer's queue took a frame; None when the peer is gone."""
        assert self._socket is not None
        try:
            self._socket.send_multipart(
                [routing_id, frame], zmq.NOBLOCK, copy=not isinstance(frame, zmq.Frame)
            )
        except zmq.Again:
            self.pipeline.counters["messages_dropped"] += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return None
        finally:
            self._check_again()
        return True

    # ---------------------------------------------------------------- the ledger

    def write(self, records: Sequence[Record]) -> int:
        """Submit records to the writer; returns the writer's ticket."""
        self._ticket += 1
        self._writer.submit(self._ticket, records)
        if not self._go_due:
            self._go_due = True
            asyncio.get_running_loop().call_soon(self._go)
        return self._ticket

    def _go(self) -> None:
        """What came together was handled: the writer need not wait for more of it."""
        self._go_due = False
        self._writer.go()

    async def commit(self, records: Sequence[Record]) -> None:
        """Submit records and wait until they are durable."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((self.write(records), future))
        await future

    def committed(self, ticket: int) -> None:
        """The writer made everything up to `ticket` durable. Only from the event loop's thread."""
        while self._waiters and self._waiters[0][0] <= ticket:
            future = self._waiters.popleft()[1]
            if not future.done():
                future.set_result(None)
        settled = 0
        while self._tickets and self._tickets[0][0] <= ticket:
            settled = self._tickets.popleft()[1]
        if settled:
            with self._fatal():
                self.post(Committed(settled))
        if not self._full:
            self._check_again()
