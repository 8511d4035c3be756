r"""The preemptible worker: performs what `session` decides, on a real socket, a real engine and a real clock. Decides nothing itself.

    Received   from the socket  \                                       / Send            to the socket
    Generated  from the engine   >  inbox -> Session.handle -> _perform <  Add, Abort, ... to the engine, in order (`_drive_engine`)
    Loaded, Slept, ...: done    /                                       \ LoadWeights     to a task that fetches weights (`_pull`)

`RolloutWorker` owns the event loop's tasks. The loop never blocks: computing happens in the engine's own thread. `Link` is the socket to
the daemon, made anew at each connect from the rendezvous file, which may name another host by then.

Boundary: the process that performs what the session decides; IO.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from rollout import fetching, processes
from rollout.engines.base import Engine, EngineHost, Kv, MovesKv, refuse_held
from rollout.engines.registry import Build as BuildEngine
from rollout.engines.registry import builder
from rollout.fetching import Pulled
from rollout.host_pipe import HostPipe
from rollout.kv import KvMover
from rollout.lending import Lending
from rollout.node_link import FurtherNodes
from rollout.nodes import JobNode
from scavenger.errors import EngineError, ScavengerError, WeightsDiffer, WeightsError, WireError, describe
from scavenger.protocol import messages
from scavenger.protocol.keys import KeyPair, read_rendezvous, secure
from scavenger.protocol.worker.events import (
    EXIT_PREEMPTED,
    Abort,
    Add,
    AddRefused,
    Bounded,
    Build,
    Built,
    Connect,
    Connected,
    DropTurnKv,
    EndWorker,
    EngineCrashed,
    Generated,
    HearSiblings,
    KeepKv,
    KeepOtherKv,
    KeyRefused,
    LeaveKv,
    Lend,
    Loaded,
    LoadFailed,
    LoadWeights,
    LogNote,
    MoreHolders,
    PullFailed,
    PullWeights,
    Received,
    Request,
    SendMessage,
    Serves,
    SleepEngine,
    Slept,
    Terminate,
    TurnKvKept,
    Unreachable,
    WakeEngine,
    Woken,
    WorkerAction,
    WorkerEvent,
    WorkerIdentity,
    WorkerLimits,
    WorkerTick,
)
from scavenger.protocol.worker.session import Session
from scavenger.weights.engine_store import Store
from scavenger.weights.manifest import Manifest
from scavenger.weights.pace import NodePace

_log = structlog.get_logger(__name__)

#: How long messages may take to leave when the worker ends.
LINGER_MS = 100
#: How long what an engine held of a GPU may take to be free once the engine was ended, where the next one is to be built there.
GPU_FREE_S = 60.0
_ZAP_REFUSED = 400  # https://rfc.zeromq.org/spec/27: 300 = try again later, 400 = refused


def spawn(work: Coroutine[object, object, None], on_error: Callable[[str], None]) -> asyncio.Task[None]:
    """Start a task that is not awaited. If it raises, whatever it raises, `on_error` gets the reason; not if it is cancelled.

    The reason goes to the ledger, so it holds nothing that an engine quoted; the log has that.
    """

    def ended(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if (
            not isinstance(error, ScavengerError) or error.quoted
        ):  # a bug, ours or a library's: it keeps its traceback
            _log.error("task.failed", exc_info=error)
        on_error(describe(error))

    task = asyncio.create_task(work)
    task.add_done_callback(ended)
    return task


class Link:
    """One connection after another: a DEALER under CURVE, its receiver and its monitor. `post` gets what arrives, as events."""

    def __init__(self, state_dir: Path, keypair: KeyPair, post: Callable[[WorkerEvent], None]) -> None:
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
        """Queue a message. A dropped connection may lose it; the session sends again what matters."""
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
        # Unbounded here; the session bounds the tokens that it keeps, and its heartbeats stop at the third unanswered one.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        # Before the connection: a monitor that is made later misses the refusal.
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
        # A connection that was dropped meanwhile is not replaced.
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


@dataclass(frozen=True, slots=True)
class _Brought:
    """A request whose KV blocks were fetched, or could not be."""

    request: Request
    kv: Kv | None


@dataclass(frozen=True, slots=True)
class KeptEngine:
    """The engine of a worker that changes hands, and what it was built from. Nothing calls it any more."""

    spec: messages.EngineSpec
    engine: Engine


@dataclass
class _Settle:
    """Behind all commands that the engine still gets: `done` says that it carried them out."""

    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Options:
    """What a worker is started with."""

    state_dir: Path
    keypair: KeyPair
    identity: WorkerIdentity
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    pull_s: float = 120.0
    pull_nbytes_per_s: float = 0.0  # of all engines of this user on this node together; 0 = no bound
    started_at: float = 0.0  # monotonic seconds at which the process began, for the cold-start figures
    memory_share: float = 0.0  # of its GPU, of a guest; 0 = what the run says
    slots: int = 0  # that it borrows of another run's engine; 0: the engine is its own
    lent_key: Path | None = (
        None  # the key file of the borrower of slots of this one's engine; None: it lends none
    )
    here: JobNode | None = None  # of an engine over several nodes, whose first one this is
    #: Of a borrower: how large its weights may be, once the run whose engine it is has its own.
    bound: Callable[[], Awaitable[fetching.WeightsBound]] | None = None


class RolloutWorker:
    """One process's worker of one run. `run()` returns the `EndWorker` that ended it.

    All that a process has of a run is in this object, but for the engine. `kept`: that of a worker that changed hands, which forgot its
    run. Afterwards `kept` is what this one leaves: None unless it changes hands itself.
    """

    def __init__(
        self,
        options: Options,
        *,
        builder: Callable[[str], BuildEngine] = builder,
        clock: Callable[[], float] = time.monotonic,
        kept: KeptEngine | None = None,
    ) -> None:
        self.kept = kept
        self._options = options
        self._builder = builder
        self._clock = clock
        self._inbox: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        self._commands: asyncio.Queue[WorkerAction | Pulled | _Brought | _Settle] = asyncio.Queue()
        self._session = Session(options.identity, options.limits, clock())
        self._link = Link(options.state_dir, options.keypair, self._inbox.put_nowait)
        pace = NodePace(options.pull_nbytes_per_s)
        self._store = Store(
            options.keypair,
            self._serves,
            self._near_daemon,
            clock=clock,
            pace=pace,
            on_fault=self._cannot_serve,
        )
        self._host = (
            HostPipe(self._inbox.put_nowait) if options.identity.guest and not options.slots else None
        )
        self._lending = Lending(options.lent_key, self._new_borrower)
        self._base: Manifest | None = None  # of the weights in the engine
        self._has_base = asyncio.Event()
        self._further: FurtherNodes | None = None  # of an engine over several nodes
        self._main: asyncio.AbstractEventLoop | None = None  # once it runs
        self._may_generate = asyncio.Event()
        self._engine: Engine | None = None
        self._spec: messages.EngineSpec | None = None  # from which it was built
        self._kv: KvMover | None = None  # of a run whose samples take their KV blocks along
        self._bringing: set[asyncio.Task[None]] = set()
        self._connecting: asyncio.Task[None] | None = None
        self._pulling: asyncio.Task[None] | None = None
        self._ahead: asyncio.Task[None] | None = None  # a pull beside generation
        self._ahead_version = -1
        self._next_ahead: messages.UseWeights | None = None  # the newest order, behind what is being pulled
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> EndWorker:
        """Work until the session says to leave."""
        self._main = loop = asyncio.get_running_loop()
        if self._options.slots:
            self._inbox.put_nowait(Bounded(self._options.slots))  # signals are for the lender
        else:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(
                    number, self._inbox.put_nowait, Terminate(signal.Signals(number).name)
                )
        if self._options.here is not None:
            self._further = FurtherNodes(self._options.here, self._options.keypair, self._node_lost)
            self._further.open()
        if self._host is not None:
            self._tasks.append(self._spawn(self._host.read(), Terminate))
        # The import takes longer than the connection: both at once. Its errors appear again at Build, which reports them.
        preload = loop.run_in_executor(None, self._preload)
        driving = self._spawn(self._drive_engine(), EngineCrashed)
        self._tasks.append(driving)
        self._perform(Connect(0.0))
        leaves: KeptEngine | None = None
        try:
            end = await self._loop()
            await self._lending.end(end.reason)
            if end.hands_to and self._further is None and self._host is None:
                leaves = await self._settled(driving)
                end = self._noticed() or end
                leaves = leaves if end.hands_to else None
            return end
        finally:
            try:
                await self._lending.end("the worker of the run whose engine this is has ended")
            finally:
                await self._close(preload, leaves)

    async def _close(self, preload: asyncio.Future[None], leaves: KeptEngine | None) -> None:
        """Let go of everything but the engine that goes on for another run."""
        preload.cancel()
        self._next_ahead = None
        for task in (*self._tasks, *self._bringing, self._connecting, self._pulling, self._ahead):
            if task is not None:
                task.cancel()
        if self._further is not None:
            await self._further.close()
        if self.kept is not None:
            await self.kept.engine.close()  # it was never asked for
        if self._engine is not None and leaves is None:
            await self._engine.close()
        self.kept = leaves
        if self._kv is not None:
            self._kv.close()
        self._link.close(LINGER_MS)
        self._store.close()
        if leaves is not None:
            self._store.forget()

    def leave(self, reason: str) -> None:
        """As at SIGTERM."""
        self._inbox.put_nowait(Terminate(reason))

    def _new_borrower(
        self, pair: KeyPair, spec: messages.EngineSpec, engine: Engine, slots: int
    ) -> RolloutWorker:
        """A worker of another run in slots of this one's engine. It shares nothing else."""
        me = self._options.identity
        identity = replace(me, run=pair.run, session=secrets.token_hex(16), guest=True)
        options = replace(
            self._options,
            keypair=pair,
            identity=identity,
            started_at=self._clock(),
            slots=slots,
            lent_key=None,
            bound=functools.partial(self._bound_beside, spec.adapter_rank),
        )
        return RolloutWorker(options, builder=self._builder, clock=self._clock, kept=KeptEngine(spec, engine))

    async def _bound_beside(self, rank: int) -> fetching.WeightsBound:
        """How large a borrower's weights may be. It waits for this run's own: its base is what both have."""
        await self._has_base.wait()
        assert self._base is not None
        return fetching.WeightsBound.beside(self._base, rank)

    async def _settled(self, driving: asyncio.Task[None]) -> KeptEngine | None:
        """The engine, once it has carried out what was under way when the session ended: a load that is broken off would leave half of a
        version behind, and its memory in use. None: there is none, or it died of it."""
        for task in (*self._bringing, self._pulling, self._ahead):
            if task is not None:
                task.cancel()
        while not self._commands.empty():
            self._commands.get_nowait()  # none of it is needed any more
        settle = _Settle()
        self._commands.put_nowait(settle)
        settled = asyncio.create_task(settle.done.wait())
        heard = asyncio.create_task(self._until_notice())
        await asyncio.wait((driving, settled, heard), return_when=asyncio.FIRST_COMPLETED)
        settled.cancel()
        heard.cancel()
        if driving.done() or self._engine is None or self._spec is None:
            return None
        return KeptEngine(self._spec, self._engine)

    async def _until_notice(self) -> None:
        while not isinstance(event := await self._inbox.get(), Terminate):
            pass
        self._inbox.put_nowait(event)

    def _noticed(self) -> EndWorker | None:
        """How it ends that was asked to leave while it was about to change hands."""
        while not self._inbox.empty():
            if isinstance(event := self._inbox.get_nowait(), Terminate):
                return EndWorker(EXIT_PREEMPTED, event.reason)
        return None

    async def _loop(self) -> EndWorker:
        session = self._session
        while True:
            event = await self._next_event(session.next_deadline() - self._clock())
            if self._engine is not None:
                session.progress = self._engine.progress()
                session.speculated = self._engine.speculated()
            for action in session.handle(event, self._clock()):
                if isinstance(action, EndWorker):
                    return action
                self._perform(action)
            if (leaving := session.leaving) is not None:
                self._lending.leave(leaving.reason)
            if self._host is not None:
                if isinstance(event, Bounded):
                    self._host.heard()
                work = session.work
                self._host.report(len(work.leases.running()), work.memory, work.generated_tokens)
            if session.may_generate:
                self._may_generate.set()
            else:
                self._may_generate.clear()

    async def _next_event(self, timeout_s: float) -> WorkerEvent:
        if not self._inbox.empty():
            return self._inbox.get_nowait()
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                return await self._inbox.get()
        except TimeoutError:
            return WorkerTick()

    def _perform(self, action: WorkerAction) -> None:
        if isinstance(action, SendMessage):
            self._link.send(action.message)
        elif isinstance(action, Connect):
            if self._connecting is not None:
                self._connecting.cancel()
            self._connecting = self._spawn(self._link.connect(action.delay_s), Unreachable)
        elif isinstance(action, LoadWeights):
            ahead = self._ahead if self._ahead_version == action.weights.version else None
            for task in (self._pulling, self._ahead):
                if task is not None and task is not ahead:
                    task.cancel()
            self._next_ahead = None
            self._store.offer(action.weights)
            self._pulling = self._spawn(
                self._pull(action.weights, ahead), functools.partial(LoadFailed, action.weights.version)
            )
            self._pulling.add_done_callback(lambda _task: self._begin_ahead())
        elif isinstance(action, PullWeights):
            self._next_ahead = action.weights
            self._begin_ahead()
        elif isinstance(action, KeepKv):
            if self._kv is not None and self._kv.expects(action):
                self._commands.put_nowait(action)
            elif action.of_turn:
                self._commands.put_nowait(Abort((action.handle,)))  # the engine need not have them for longer
                self._inbox.put_nowait(TurnKvKept(action.handle, 0, 0.0, "there is no room for them"))
        elif isinstance(action, KeepOtherKv | DropTurnKv | LeaveKv):
            if self._kv is not None:
                _move_turns(self._kv, action)
        elif isinstance(action, MoreHolders):
            self._store.offer(action.weights)
        elif isinstance(action, LogNote):
            _log.info(f"session.{action.event}", detail=action.detail)
        else:
            self._commands.put_nowait(action)

    def _begin_ahead(self) -> None:
        """Pull by the newest order, once nothing else is being pulled: were that given up for it, quick versions would never come whole."""
        order = self._next_ahead
        under_way = self._ahead is not None and not self._ahead.done()
        if order is None or (self._pulling is not None and not self._pulling.done()):
            return
        if under_way and order.version == self._ahead_version:
            self._next_ahead = None
            self._store.offer(order)
        elif not under_way:
            self._next_ahead, self._ahead_version = None, order.version
            self._ahead = spawn(self._fetched_ahead(order), functools.partial(self._not_ahead, order.version))
            self._ahead.add_done_callback(lambda _task: self._begin_ahead())

    def _not_ahead(self, version: int, reason: str) -> None:
        """The order to load it pulls what is missing, and reports what fails then."""
        _log.warning("weights.not_pulled_ahead", version=version, reason=reason)
        self._inbox.put_nowait(PullFailed(version))

    def _spawn(
        self, work: Coroutine[object, object, None], failed: Callable[[str], WorkerEvent]
    ) -> asyncio.Task[None]:
        """A task whose every error, foreseen or not, becomes the session's event."""
        return spawn(work, lambda reason: self._inbox.put_nowait(failed(reason)))

    def _preload(self) -> None:
        with contextlib.suppress(EngineError, ImportError):
            self._builder(self._options.identity.engine)

    # ------------------------------------------------------------ engine

    async def _drive_engine(self) -> None:
        """Call the engine, one command after another, in the session's order. An error here means that the engine died."""
        while True:
            command = await self._commands.get()
            if isinstance(command, _Settle):
                command.done.set()
            elif isinstance(command, Build):
                await self._build(command.spec)
            elif self._engine is None:
                raise EngineError(f"{type(command).__name__} before the engine was built")
            elif isinstance(command, Add):
                await self._add(self._engine, command)
            elif isinstance(command, _Brought):
                await self._add_brought(self._engine, command)
            elif isinstance(command, KeepKv):
                if self._kv is not None:
                    await self._kv.keep(command)
            elif isinstance(command, Abort):
                if self._kv is not None:
                    self._kv.forget(command.handles)
                await self._engine.abort(command.handles)
            elif isinstance(command, Lend):
                assert self._spec is not None  # the engine was built of it
                self._lending.order(command.order, self._engine, self._spec)
            elif isinstance(command, HearSiblings):
                await self._engine.hear(command)
            elif isinstance(command, Pulled):
                await self._load(self._engine, command)
            elif isinstance(command, SleepEngine):
                await self._engine.sleep()
                held = await self._engine.bytes_held()
                refuse_held(held, self._engine.info().gpu_nbytes)
                self._inbox.put_nowait(Slept(command.order, sum(held)))
            elif isinstance(command, WakeEngine):
                began = self._clock()
                await self._engine.wake()
                self._inbox.put_nowait(
                    Woken(command.order, self._clock() - began, sum(await self._engine.bytes_held()))
                )
            del command  # else it would keep a version's memory while it waits for the next command

    async def _build(self, spec: messages.EngineSpec) -> None:
        began = self._clock()
        try:
            build = await asyncio.get_running_loop().run_in_executor(None, self._builder, spec.name)
        except ImportError as error:
            raise EngineError(
                f"engine {spec.name!r} cannot be imported: {error}", "install its extra"
            ) from error
        imported = self._clock()
        me = self._options.identity
        if self._options.memory_share:
            spec = msgspec.structs.replace(spec, memory_share=self._options.memory_share)
        self._spec = spec
        kept = False
        if self.kept is not None and self.kept.spec == spec:  # no other name for it: `_end_kept` drops it
            self._engine, self.kept, kept = self.kept.engine, None, True
        elif self._options.slots:
            raise EngineError(
                "this run's engine is another one than that whose slots it borrows",
                "only runs of one base model, with equal [engine] settings and lora.rank, share an engine",
            )
        else:
            await self._end_kept()
            nodes = await self._further.start(spec, me.run, me.gpus) if self._further is not None else None
            host = EngineHost(me.run, me.gpus, sleeps=me.kind == "reserved" or me.guest, nodes=nodes)
            self._engine = await build(spec, host)
        info = self._engine.info()
        if info.device:
            # It needs torch, which the engine has loaded by now.
            from rollout.engines.device_delta import DeviceApply

            self._store.apply = DeviceApply(info.device)
        if spec.move_kv and isinstance(self._engine, MovesKv) and self._engine.kv_token_nbytes():
            self._kv = self._mover(self._engine, spec)
        built = Built(info.cache_tokens, info.best_batch)
        if self._kv is not None and isinstance(self._engine, MovesKv):
            built = Built(info.cache_tokens, info.best_batch, self._kv.source, self._engine.kv_token_nbytes())
        self._inbox.put_nowait(built)
        _log.info(
            "engine.built",
            name=info.name,
            vocab=info.vocab_size,
            kept=kept,
            welcome_s=round(began - self._options.started_at, 3),
            import_wait_s=round(imported - began, 3),
            build_s=round(self._clock() - imported, 3),
        )
        self._tasks.append(self._spawn(self._generate(self._engine), EngineCrashed))

    async def _end_kept(self) -> None:
        """The engine of the run before, of which this run needs another one: its memory is free again when that is built."""
        if self.kept is None:
            return
        began = self._clock()
        pids = await asyncio.to_thread(lambda: processes.with_gpus(processes.below(os.getpid())))
        with processes.watched(pids) as held:
            await self.kept.engine.close()
            freed = await processes.gone(held, GPU_FREE_S)
        self.kept = None
        gc.collect()  # models are in cycles: it would lie beside the next engine for a while
        if not freed:
            raise EngineError(
                f"processes of the engine of the run before hold a GPU {GPU_FREE_S:g} s after their end",
                "the job ends, and another starts",
            )
        _log.info(
            "engine.not_kept",
            reason="the run's engine is another one",
            close_s=round(self._clock() - began, 3),
        )

    def _node_lost(self, reason: str) -> None:
        """One of the engine's further nodes: the engine cannot go on without it."""
        _log.error("engine.node_lost", reason=reason)
        self._inbox.put_nowait(EngineCrashed(reason))

    def _mover(self, engine: MovesKv, spec: messages.EngineSpec) -> KvMover | None:
        """None where others cannot reach this host: its samples are prefilled elsewhere, as they would be without."""
        try:
            return KvMover(
                engine,
                spec,
                self._options.identity.run,
                self._options.keypair,
                self._link.own_address(),
                report=self._inbox.put_nowait,
                taken=self._inbox.put_nowait,
                on_fault=self._cannot_serve,
                clock=self._clock,
            )
        except (OSError, ScavengerError) as error:
            _log.warning("kv.not_served", reason=str(error))
            return None

    async def _add(self, engine: Engine, command: Add) -> None:
        """At once, or when its KV blocks have come: nothing else waits for them."""
        request = command.request
        if self._kv is not None and self._kv.begins(request):
            task = self._spawn(self._bring(self._kv, request), functools.partial(AddRefused, request.handle))
            self._bringing.add(task)
            task.add_done_callback(self._bringing.discard)
        else:
            await self._add_brought(engine, _Brought(request, None))

    async def _bring(self, mover: KvMover, request: Request) -> None:
        self._commands.put_nowait(_Brought(request, await mover.fetched(request)))

    async def _add_brought(self, engine: Engine, brought: _Brought) -> None:
        request = brought.request
        if self._kv is not None and self._kv.is_over(request.handle):
            return
        try:
            if brought.kv is not None and isinstance(engine, MovesKv):
                await engine.add_with_kv(request, brought.kv)
            else:
                await engine.add(request)
        except EngineError as error:
            if self._kv is not None:
                self._kv.used((request.handle,))
            self._inbox.put_nowait(AddRefused(request.handle, describe(error)))

    async def _generate(self, engine: Engine) -> None:
        while True:
            await self._may_generate.wait()
            deltas = tuple(await engine.next())
            if self._kv is not None:
                self._kv.used(delta.handle for delta in deltas)
            self._inbox.put_nowait(Generated(deltas))

    # ------------------------------------------------------------ weights

    def _serves(self, serving: messages.Serving) -> None:
        self._inbox.put_nowait(Serves(serving))

    def _cannot_serve(self, fault: WeightsError) -> None:
        """Called in the thread that serves. The worker ends as failed, because other engines would go on asking this process."""
        _log.error("worker.cannot_serve", reason=fault.log_text)
        assert self._main is not None  # nothing is served before
        self._main.call_soon_threadsafe(self._inbox.put_nowait, EngineCrashed(describe(fault)))

    def _near_daemon(self) -> str:
        """The address of this host that the daemon's host can reach, and so other workers too."""
        return self._link.own_address()

    async def _pull(self, weights: messages.UseWeights, ahead: asyncio.Task[None] | None) -> None:
        """Bytes that are on their way here already are waited for; what came of them when that failed stays."""
        began = self._clock()
        if ahead is not None:
            try:
                await asyncio.wait((ahead,))
            except asyncio.CancelledError:
                ahead.cancel()
                raise
        self._commands.put_nowait(await self._fetched(weights, began))

    async def _fetched_ahead(self, weights: messages.UseWeights) -> None:
        pulled = await self._fetched(weights, self._clock())
        _log.info("weights.pulled_ahead", version=weights.version, pull_s=round(pulled.pull_s, 4))

    async def _fetched(self, weights: messages.UseWeights, began: float) -> Pulled:
        """Here, and meanwhile on the engine's further nodes."""
        pull_s, bound = self._options.pull_s, self._options.bound
        most = await bound() if bound is not None else None
        mine = fetching.fetch(self._store, weights, pull_s, began, self._clock, most)
        if self._further is None:
            return await mine
        most_s = fetching.longest_s(weights, pull_s, self._options.pull_nbytes_per_s)
        here = asyncio.create_task(mine)
        there = asyncio.create_task(self._further.fetch(weights, pull_s, most_s))
        try:
            pulled, _ = await asyncio.gather(here, there)
            return pulled
        finally:
            here.cancel()
            there.cancel()

    async def _load(self, engine: Engine, pulled: Pulled) -> None:
        began, version = self._clock(), pulled.weights.version
        try:
            if self._further is not None:
                await self._further.place(version, pulled.manifest.root)
            merged = await _put_in(engine, pulled)
            if self._further is not None:
                await self._further.forget(version)
        except WeightsError as error:
            self._inbox.put_nowait(LoadFailed(version, describe(error)))
            return
        except EngineError as error:
            failed = LoadFailed(version, describe(error), isinstance(error, WeightsDiffer), refused=True)
            # Before the failure is reported, so that the next try finds only weights that are as published.
            if failed.differs:
                await self._store.recheck(
                    {pulled.manifest.root, *([pulled.base[0].root] if pulled.base is not None else [])}
                )
            self._inbox.put_nowait(failed)
            return
        if self._kv is not None:
            self._kv.loaded(version, pulled.manifest.root)
        self._base = pulled.of_base
        self._has_base.set()
        load_s = self._clock() - began
        self._store.loaded(pulled.nbytes, load_s)
        _log.info(
            "weights.loaded",
            version=version,
            nbytes=pulled.manifest.total_nbytes,
            pull_s=round(pulled.pull_s, 4),
            verify_s=round(pulled.verify_s, 4),
            load_s=round(load_s, 4),
            chosen=pulled.chosen,
            since_start_s=round(self._clock() - self._options.started_at, 3),
        )
        self._inbox.put_nowait(
            Loaded(
                version, pulled.manifest.root, pulled.pull_s, load_s, pulled.verify_s, merged, pulled.chosen
            )
        )


def _move_turns(mover: KvMover, action: KeepOtherKv | DropTurnKv | LeaveKv) -> None:
    if isinstance(action, KeepOtherKv):
        mover.keep_other(action)
    elif isinstance(action, DropTurnKv):
        mover.drop(action.numbers)
    else:
        mover.leave(action.wanted)


async def _put_in(engine: Engine, pulled: Pulled) -> bytes:
    """Load the version. Returns the digest of the engine's weights where the trainer states one (the two are equal), else b"".

    Raises `EngineError`; `WeightsDiffer` where the digests differ.
    """
    manifest = pulled.manifest
    if not manifest.merged:
        await engine.load(manifest.version, fetching.views(pulled))
        return b""
    from rollout.engines import merging  # needs torch, which the engine has loaded by now

    found = await engine.load(manifest.version, fetching.views(pulled), summed=True)
    merging.refuse_other(manifest, found)
    return found
