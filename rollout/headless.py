r"""The process of an engine's further node: it holds its share of the model, and computes as vLLM's core on the first node says.

    waits for the first node --Joined--> Start  --> `FurtherEngine` is built
    Fetch, Place, Forget                        --> each version's bytes are pulled here and verified, as on the first node
    the first node is gone, or says Leave       --> ends with 0
    its own part of the engine died             --> `Failed` to the first node, and ends with 70

It speaks to no daemon and has no samples. SIGTERM reaches all processes of the job: the worker then needs the engine for a moment more, so
this one stays until the worker is gone, `LEAVE_S` at most. Its code never hides the worker's: the job script takes the highest.

Owns that life. Decides nothing about samples or weights.

Boundary: the process on an engine's further nodes; IO.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from rollout import fetching
from rollout.engines.base import EngineHost, Weight
from rollout.node_link import (
    ALIVE_S,
    JOIN_S,
    SILENT_S,
    Alive,
    Done,
    Failed,
    Fetch,
    Forget,
    Joined,
    Leave,
    Place,
    Start,
    Started,
    ToFurther,
    encode,
    for_further,
    further_socket,
)
from rollout.nodes import EngineNodes, JobNode
from scavenger import __version__
from scavenger.errors import EngineError, ScavengerError, WeightsError, describe
from scavenger.protocol.keys import KeyPair
from scavenger.protocol.messages import EngineSpec
from scavenger.protocol.messages.common import MAX_TEXT, Message
from scavenger.protocol.worker.events import EXIT_CANNOT_START, EXIT_DRAINED, EXIT_ENGINE_FAILED
from scavenger.weights.engine_store import Store
from scavenger.weights.pace import NodePace

_log = structlog.get_logger(__name__)

#: How long it outlives SIGTERM while the first node's worker is still there. Slurm's own grace may be shorter, and ends it then.
LEAVE_S = 30.0
#: Versions that were fetched and not placed: the one that is to be loaded, and one that is pulled ahead of its order.
VERSIONS_KEPT = 2


class FurtherEngine(Protocol):
    """The part of an engine that one of its further nodes holds."""

    def place(self, version: int, views: Sequence[Weight]) -> None:
        """Lay a version out where this part's processes read it when the engine loads. Raises `EngineError`."""
        ...

    def forget(self) -> None:
        """What was laid out is not read again."""
        ...

    async def died(self) -> str:
        """Returns, with the reason, when this part cannot go on."""
        ...

    def close(self) -> None:
        """End its processes at once."""
        ...


Build = Callable[[EngineSpec, EngineHost], FurtherEngine]


def vllm_part(spec: EngineSpec, host: EngineHost) -> FurtherEngine:
    """The only engine that spans nodes. Blocks until this node's processes are in place. Raises `EngineError`."""
    if spec.name != "vllm":
        raise EngineError(
            f"engine {spec.name!r} computes on one node", "set run.nodes_per_engine = 1, or use vLLM"
        )
    from rollout.engines.vllm import further

    return further.build(spec, host)


@dataclass(frozen=True, slots=True)
class HeadlessOptions:
    here: JobNode
    keypair: KeyPair
    node: str
    pull_nbytes_per_s: float = 0.0
    join_s: float = JOIN_S
    silent_s: float = SILENT_S
    leave_s: float = LEAVE_S


class HeadlessNode:
    """One further node's process. `run()` returns its exit code."""

    def __init__(
        self,
        options: HeadlessOptions,
        *,
        build: Build = vllm_part,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._build, self._clock = options, build, clock
        self._store = Store(
            options.keypair, lambda _: None, None, clock=clock, pace=NodePace(options.pull_nbytes_per_s)
        )
        self._engine: FurtherEngine | None = None
        self._built = asyncio.Event()
        #: By root: of the next version perhaps, while one is still to be placed.
        self._pulled: dict[bytes, fetching.Pulled] = {}
        self._over: asyncio.Future[int] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._heard_at = 0.0  # from the first node; 0: not yet
        self._endpoint = ""  # on which it was found
        self._context = zmq.asyncio.Context()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_leave)
        self._socket = further_socket(self._context, self._options.keypair)
        # Before the connection: a monitor that is made later misses the handshake.
        monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        for port in self._options.here.ports:
            self._socket.connect(f"tcp://{self._options.here.first}:{port}")
        for work in (self._receive(), self._announce(), self._watch(monitor)):
            self._spawn(work)
        try:
            return await self._over
        finally:
            for task in self._tasks:
                task.cancel()
            if self._engine is not None:
                self._engine.close()
            self._store.close()
            self._socket.disable_monitor()
            monitor.close(linger=0)
            self._socket.close(linger=100)
            self._context.destroy(linger=100)

    # ---------------------------------------------------------------- life

    def _end(self, code: int, reason: str) -> None:
        if self._over is not None and not self._over.done():
            _log.info("headless.left", code=code, reason=reason)
            self._over.set_result(code)

    def _told_to_leave(self) -> None:
        if not self._heard_at:
            self._end(EXIT_DRAINED, "SIGTERM before the first node was found")
            return
        # The worker on the first node sends its last tokens now, and then goes.
        asyncio.get_running_loop().call_later(
            self._options.leave_s,
            self._end,
            EXIT_DRAINED,
            f"SIGTERM, and the first node's worker is still there after {self._options.leave_s:g} s",
        )

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            if not isinstance(error, ScavengerError):
                _log.error("task.failed", exc_info=error)
            self._say(Failed(0, describe(error)[:MAX_TEXT]))
            self._end(EXIT_ENGINE_FAILED, describe(error))

    async def _announce(self) -> None:
        """Say who is here until the first node answers, and that this process lives as long as that one does."""
        options, began = self._options, self._clock()
        joined = Joined(options.here.place, options.node, __version__)
        pause_s = min(ALIVE_S, options.silent_s / 4)
        while not self._heard_at:
            if self._clock() - began > options.join_s:
                self._end(
                    EXIT_CANNOT_START,
                    f"the engine's first node did not answer at {options.here.first} within {options.join_s:g} s",
                )
                return
            with contextlib.suppress(TimeoutError):  # nobody with the job's key listens yet
                async with asyncio.timeout(pause_s):
                    await self._socket.send(encode(joined))
            await asyncio.sleep(pause_s)
        while self._clock() - self._heard_at <= options.silent_s:
            self._say(Alive())
            await asyncio.sleep(pause_s)
        self._end(EXIT_DRAINED, f"the first node was silent for {options.silent_s:g} s")

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())
            where = event["endpoint"].decode()
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._endpoint = where
            elif event["event"] == zmq.EVENT_MONITOR_STOPPED:
                return
            elif where == self._endpoint and self._heard_at:
                self._end(EXIT_DRAINED, "the first node's worker is gone")

    def _say(self, message: Message) -> None:
        self._socket.send(encode(message)).add_done_callback(_drop_error)

    # ---------------------------------------------------------------- orders

    async def _receive(self) -> None:
        while True:
            frame = await self._socket.recv()
            try:
                message = for_further(frame)
            except msgspec.MsgspecError as error:
                _log.warning("nodes.garbage", reason=str(error))
                continue
            self._heard_at = self._clock()
            if not isinstance(message, Alive):
                self._obey(message)

    def _obey(self, message: ToFurther) -> None:
        match message:
            case Leave():
                self._end(EXIT_DRAINED, "the first node's worker leaves")
            case Start():
                self._spawn(self._started(message))
            case Fetch():
                self._spawn(self._done(message.order, self._fetch(message)))
            case Place():
                self._spawn(self._done(message.order, self._place(message)))
            case Forget() if self._engine is not None:
                self._engine.forget()
            case _:
                pass

    async def _started(self, order: Start) -> None:
        if self._engine is not None:
            raise EngineError("the first node's worker started its engine twice")
        here = self._options.here
        nodes = EngineNodes(here.nodes, here.place, here.first, order.port)
        host = EngineHost(order.run, order.gpus, nodes=nodes)
        began = self._clock()
        self._engine = engine = await asyncio.get_running_loop().run_in_executor(
            None, self._build, order.spec, host
        )
        _log.info("headless.built", place=here.place, build_s=round(self._clock() - began, 3))
        self._built.set()
        self._say(Started())
        raise EngineError(await engine.died())

    async def _done(self, order: int, work: Coroutine[object, object, None]) -> None:
        try:
            await work
        except ScavengerError as error:
            self._say(Failed(order, describe(error)[:MAX_TEXT]))
        else:
            self._say(Done(order))

    async def _fetch(self, order: Fetch) -> None:
        self._store.offer(order.weights)
        pulled = await fetching.fetch(self._store, order.weights, order.pull_s, self._clock(), self._clock)
        self._pulled.pop(pulled.manifest.root, None)
        self._pulled[pulled.manifest.root] = pulled
        while len(self._pulled) > VERSIONS_KEPT:
            del self._pulled[next(iter(self._pulled))]

    async def _place(self, order: Place) -> None:
        await self._built.wait()
        pulled, engine = self._pulled.pop(order.root, None), self._engine
        if pulled is None or engine is None:
            raise WeightsError(f"version {order.version} was not fetched here")
        await asyncio.to_thread(_place_in, engine, order.version, pulled)


def _drop_error(sent: asyncio.Future[None]) -> None:
    """What could not be sent had nobody to go to, which shows by itself."""
    if not sent.cancelled():
        sent.exception()


def _place_in(engine: FurtherEngine, version: int, pulled: fetching.Pulled) -> None:
    engine.place(version, fetching.views(pulled))
