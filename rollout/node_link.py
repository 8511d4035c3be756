"""What the processes of one engine say to each other, over its job's nodes: messages, and the first node's end.

    further node                       first node (the worker)
    Joined(place, release)  ------->   waits for all of them, then
                            <-------   Start(spec, port)         each builds its part of the engine
                            <-------   Fetch(version)            each pulls it, while the worker does
    Fetched | Failed        ------->
                            <-------   Place(version)            each lays it where its part of the engine reads it
    Placed | Failed         ------->   then the engine loads
    Alive                   <------>   each second
                            <-------   Leave

Both ends prove the job's key (CURVE): nobody else can join, or be taken for the first node. A further node that is gone, or silent for
`SILENT_S`, ends the engine: `on_fault` is called once. A first node that is gone ends the others.

Owns the conversation. Knows no engine and no daemon.

Boundary: sockets between the nodes of one engine; IO.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket as sockets
import time
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from rollout.nodes import EngineNodes, JobNode
from scavenger import __version__
from scavenger.errors import EngineError, WeightsError, describe
from scavenger.protocol.keys import KeyPair, secure
from scavenger.protocol.messages import MAX_MESSAGE_BYTES, EngineSpec, UseWeights
from scavenger.protocol.messages.common import BoundedText, Count, Message

ALIVE_S = 1.0
SILENT_S = 20.0  # importing vLLM may hold a process up for seconds
JOIN_S = 300.0  # from the first process of an engine to the last: a node may have to read its Python from a slow file system
PLACE_S = 300.0
_log = structlog.get_logger(__name__)


class Joined(Message, frozen=True):
    place: Count
    node: BoundedText
    code: BoundedText


class Start(Message, frozen=True):
    """Build your part of the engine. `gpus`: of the whole engine. `port`: of vLLM's own exchange on the first node."""

    spec: EngineSpec
    run: BoundedText
    gpus: Count
    port: Count


class Started(Message, frozen=True):
    pass


class Fetch(Message, frozen=True):
    order: Count
    weights: UseWeights
    pull_s: float


class Place(Message, frozen=True):
    """Lay out what was fetched for this version, so that the engine's processes here find it."""

    order: Count
    version: Count
    root: bytes


class Forget(Message, frozen=True):
    """The engine has loaded it: what was laid out is not read again."""

    version: Count


class Done(Message, frozen=True):
    """`order` was carried out."""

    order: Count


class Failed(Message, frozen=True):
    """`order` failed; 0: this part of the engine did, or could not be built."""

    order: Count
    reason: BoundedText


class Alive(Message, frozen=True):
    pass


class Leave(Message, frozen=True):
    pass


ToFirst = Joined | Started | Done | Failed | Alive
ToFurther = Start | Fetch | Place | Forget | Alive | Leave
_to_first: msgspec.msgpack.Decoder[ToFirst] = msgspec.msgpack.Decoder(ToFirst)
_to_further: msgspec.msgpack.Decoder[ToFurther] = msgspec.msgpack.Decoder(ToFurther)
encode = msgspec.msgpack.Encoder().encode


def for_further(frame: bytes) -> ToFurther:
    """Raises `msgspec.MsgspecError` for what the first node does not say."""
    return _to_further.decode(frame)


class _OneKey:
    """ZAP: the job's own key, and no other."""

    def __init__(self, public_key: str) -> None:
        self._key = public_key.encode()

    def callback(self, _domain: str, key: bytes) -> bool:
        return key == self._key


def free_port() -> int:
    """A port that nobody listens on now."""
    with sockets.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class FurtherNodes:
    """The first node's end. `on_fault`: called once, with why the engine cannot go on."""

    def __init__(
        self,
        here: JobNode,
        keypair: KeyPair,
        on_fault: Callable[[str], None],
        *,
        silent_s: float = SILENT_S,
        join_s: float = JOIN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._here, self._keypair, self._on_fault = here, keypair, on_fault
        self._silent_s, self._join_s, self._clock = silent_s, join_s, clock
        self._context = zmq.asyncio.Context()
        self._auth: AsyncioAuthenticator | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._routes: dict[int, bytes] = {}  # place -> route, of who has joined
        self._names: dict[int, str] = {}
        self._heard: dict[int, float] = {}
        self._met = asyncio.Event()  # all have joined, or never will
        self._orders: dict[
            int, tuple[set[int], asyncio.Future[None]]
        ] = {}  # order -> who has not done it yet
        self._order = 0
        self._fault = ""
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> int:
        """Listen, and return the port. Raises `EngineError` where no port of the job's is free."""
        self._auth = AsyncioAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback(domain="*", credentials_provider=_OneKey(self._keypair.public))
        socket = self._socket = self._context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_publickey = self._keypair.public.encode()
        socket.curve_secretkey = self._keypair.secret.encode()
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        for port in self._here.ports:
            with contextlib.suppress(zmq.ZMQError):
                socket.bind(f"tcp://*:{port}")
                self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
                for task in self._tasks:
                    task.add_done_callback(self._ended)
                return port
        raise EngineError(
            f"none of the ports {self._here.ports[0]} to {self._here.ports[-1]} is free on the engine's first node",
            "the job is submitted again with others",
        )

    async def start(self, spec: EngineSpec, run: str, gpus: int) -> EngineNodes:
        """Wait for the other nodes, and let each build its part; the first node's own is to be built next. Raises `EngineError`."""
        try:
            async with asyncio.timeout(self._join_s):
                await self._met.wait()
        except TimeoutError:
            missing = sorted(set(range(1, self._here.nodes)) - self._routes.keys())
            raise EngineError(
                f"{len(missing)} of the engine's {self._here.nodes} nodes did not join within {self._join_s:.0f} s",
                "its job's log says what happened there; nodes must reach each other on ports 20000 to 32000",
            ) from None
        if self._fault:
            raise EngineError(self._fault)
        port = free_port()
        await self._tell(Start(spec, run, gpus, port))
        return EngineNodes(self._here.nodes, 0, self._here.first, port)

    async def fetch(self, weights: UseWeights, pull_s: float, most_s: float) -> None:
        """Have each further node pull this version. Raises `WeightsError` when one cannot. `most_s`: after which its pull has ended in any
        case; a node that is gone is noticed sooner."""
        await self._ordered(lambda order: Fetch(order, weights, pull_s), most_s + self._silent_s)

    async def place(self, version: int, root: bytes) -> None:
        """Have each lay out what it fetched. Raises `WeightsError`."""
        await self._ordered(lambda order: Place(order, version, root), PLACE_S)

    async def forget(self, version: int) -> None:
        await self._tell(Forget(version))

    async def close(self) -> None:
        """Tell the others to leave, and end. They see this process end as well."""
        for task in self._tasks:
            task.cancel()
        if self._socket is not None:
            with contextlib.suppress(zmq.ZMQError, TimeoutError):
                async with asyncio.timeout(0.2):
                    await self._tell(Leave())
            self._socket.close(linger=100)
        if self._auth is not None:
            self._auth.stop()
        self._context.destroy(linger=100)

    async def _ordered(self, made: Callable[[int], Message], within_s: float) -> None:
        await self._met.wait()  # `start` bounds it
        if self._fault:
            raise WeightsError(self._fault)
        self._order += 1
        order, done = self._order, asyncio.get_running_loop().create_future()
        self._orders[order] = set(self._routes), done
        try:
            async with asyncio.timeout(within_s):
                await self._tell(made(order))
                await done
        except TimeoutError:
            waits = ", ".join(sorted(self._names[place] for place in self._orders[order][0]))
            raise WeightsError(f"no answer from {waits} of this engine within {within_s:.0f} s") from None
        finally:
            del self._orders[order]

    async def _tell(self, message: Message) -> None:
        assert self._socket is not None
        frame = encode(message)
        for place, route in list(self._routes.items()):
            try:
                await self._socket.send_multipart([route, frame])
            except zmq.ZMQError as error:
                self._broken(f"{self._names[place]} of this engine is gone ({error.strerror})")

    async def _receive(self) -> None:
        assert self._socket is not None
        while True:
            route, frame = await self._socket.recv_multipart()
            try:
                message = _to_first.decode(frame)
            except msgspec.MsgspecError as error:
                _log.warning("nodes.garbage", reason=str(error))
                continue
            if isinstance(message, Joined):
                self._joined(route, message)
                with contextlib.suppress(zmq.ZMQError):  # it has gone again
                    await self._socket.send_multipart([route, encode(Alive())])
                continue
            place = next((place for place, known in self._routes.items() if known == route), 0)
            if place:
                self._heard[place] = self._clock()
                self._hear(place, message)

    def _joined(self, route: bytes, message: Joined) -> None:
        place = message.place
        if not 0 < place < self._here.nodes:
            return
        if message.code != __version__:
            self._broken(
                f"{message.node} has release {message.code}, and the engine's first node has {__version__}"
            )
        elif self._routes.setdefault(place, route) != route:
            self._broken(f"{message.node} of this engine was started again: what it held is lost")
        self._names[place], self._heard[place] = message.node, self._clock()
        if len(self._routes) == self._here.nodes - 1 or self._fault:
            self._met.set()

    def _hear(self, place: int, message: ToFirst) -> None:
        if isinstance(message, Done):
            waiting, done = self._orders.get(message.order, (set(), None))
            waiting.discard(place)
            if done is not None and not waiting and not done.done():
                done.set_result(None)
        elif isinstance(message, Failed):
            why = f"{self._names[place]} of this engine: {message.reason}"
            _, failed = self._orders.get(message.order, (set(), None))
            if not message.order:
                self._broken(why)
            elif failed is not None and not failed.done():
                failed.set_exception(WeightsError(why))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(ALIVE_S, self._silent_s / 4))
            await self._tell(Alive())
            for place, at in self._heard.items():
                if self._clock() - at > self._silent_s:
                    self._broken(f"{self._names[place]} of this engine was silent for {self._silent_s:g} s")

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("task.failed", exc_info=error)
            self._broken(describe(error))

    def _broken(self, why: str) -> None:
        if self._fault:
            return
        self._fault = why
        self._met.set()
        for _, done in self._orders.values():
            if not done.done():
                done.set_exception(WeightsError(why))
        self._on_fault(why)


def further_socket(context: zmq.asyncio.Context, keypair: KeyPair) -> Any:
    """The other end, before it connects to the first node's ports. Only whoever has the job's key is spoken to, on whichever that is."""
    socket = context.socket(zmq.DEALER)
    secure(socket, keypair.public, keypair)  # the first node proves the same key
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 200)
    return socket
