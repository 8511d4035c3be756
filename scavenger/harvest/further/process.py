"""The harvester of a further cluster, as a process there: `scavenger harvester`. It dials out to the daemon and asks for work.

    daemon --Ask--> HarvesterLoop --one at a time--> SiteRole --> role submit, role view (`cluster.proxy.server`) --> Slurm

Owns the connection, what is carried out here, and that this cluster's own configuration, stop files and drained nodes bound it: they are
read here, reported to the daemon so that it decides within them, and held to each submission again, whatever the daemon says. It decides
nothing, and keeps nothing but engines' keys and logs: killed and started again it goes on. Jobs outlive it.

Boundary: a process on another cluster, which the command line starts; IO.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import structlog
import zmq

from scavenger.cluster import choose, partition_check
from scavenger.cluster.model import Job
from scavenger.cluster.port import Cluster
from scavenger.cluster.proxy import messages as proxy
from scavenger.cluster.proxy import server
from scavenger.cluster.proxy.client import jobs_user
from scavenger.config import DaemonConfig
from scavenger.errors import AuthError, ClusterError, ConfigError, DaemonUnavailable, ScavengerError
from scavenger.harvest.decide import decide
from scavenger.harvest.decide.actions import HarvestLimits, Submit
from scavenger.harvest.execute import job_script
from scavenger.harvest.further import messages as wire
from scavenger.harvest.limits import Stop, drain_path, drained_nodes, limits_of, read_stop, rules_of
from scavenger.harvest.track.node_health import Health
from scavenger.harvest.track.observed_jobs import intent_in
from scavenger.parsing import MALFORMED
from scavenger.protocol import keys

log = structlog.get_logger()

RETRY_S = 2.0
#: A process that ends waits so long at most for its last word to leave.
LEAVING_MS = 1000


def limits_json(config: DaemonConfig) -> bytes:
    """The limits of this cluster as they are reported to the daemon. Raises `ConfigError` for more than it takes. Pure."""
    harvest = set(type(config.harvest).model_fields) - wire.HARVEST_KEYS_THERE
    limits = config.model_dump_json(include={"cluster": set(wire.CLUSTER_KEYS), "harvest": harvest}).encode()
    if len(limits) > wire.MAX_LIMITS_BYTES:
        raise ConfigError(
            f"[harvest] has {len(limits)} bytes, and the daemon takes {wire.MAX_LIMITS_BYTES}",
            "shorten its lists: blackouts, schedule, limits by partition",
        )
    return limits


def refusal(
    engine: Submit, limits: HarvestLimits, ours: Sequence[Job], started: Mapping[int, int], now: float
) -> str:
    """Why this engine may not start here; "" = it may. `ours`: engines' jobs that the queue showed last; `started`: GPUs of jobs that were
    submitted since, by id. Pure."""
    closed, caps = decide.harvesting_closed(limits, now), limits.caps
    new = [gpus for job_id, gpus in started.items() if job_id not in {job.job_id for job in ours}]
    engines, gpus = len(ours) + len(new) + 1, sum(job.gpus for job in ours) + sum(new)
    gpus += engine.gpus * engine.nodes
    drained = sorted(set(engine.nodelist) & {node for node, _ in limits.restrictions.drained})
    if closed is not None:
        return closed[1]
    if engine.partition != limits.partition:
        return f"partition {engine.partition!r} is not harvest.partition = {limits.partition!r}"
    if engines > caps.max_engines:
        return f"it would be engine {engines}, and harvest.max_engines = {caps.max_engines}"
    if caps.max_gpus is not None and gpus > caps.max_gpus:
        return f"engines would have {gpus} GPUs, and harvest.max_gpus = {caps.max_gpus}"
    if engine.nodes > caps.max_nodes_per_engine:
        return f"{engine.nodes} nodes for an engine, and harvest.max_nodes_per_engine = {caps.max_nodes_per_engine}"
    if sum(job.waits for job in ours) + len(new) >= caps.max_pending and not engine.standby:
        return f"{caps.max_pending} engines' jobs are pending: harvest.max_pending"
    if drained:
        return f"node {drained[0]} is drained here"
    return ""


@contextlib.contextmanager
def sole(state_dir: Path, what: str) -> Iterator[None]:
    """This process is the only harvester that has the folder: engines find their daemon by a file in it. `what`: to be shown to another.
    Raises `ConfigError`."""
    path = state_dir / "harvester.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            held = os.pread(descriptor, 1000, 0).decode("utf-8", "replace")
            raise ConfigError(
                f"daemon.state_dir {state_dir}: another harvester has it ({held or 'or its file system has no locks'})",
                "end that one; for another daemon's harvester write another state_dir in a TOML of its own",
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{what}; {process_name()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def process_name() -> str:
    return f"{os.uname().nodename[:255]}, pid {os.getpid()}"


class SiteRole:
    """What the daemon may have done here. `reread` gives the configuration as its file has it now."""

    def __init__(
        self, config: DaemonConfig, cluster: Cluster, reread: Callable[[], DaemonConfig] | None = None
    ) -> None:
        if config.cluster.submit_socket is not None:
            raise ConfigError(
                "cluster.submit_socket is set: this process submits by itself",
                "run it as the Unix user of the engines (User= of its unit), without submit_socket and engines_user",
            )
        limits_json(config)
        self.config, self._cluster, self._reread = config, cluster, reread
        self._home = config.engines_home
        server.prepare(self._home)
        self._view = server.ViewRole(cluster)
        self._submit = server.SubmitRole(
            cluster, self._home, lambda _spec: None
        )  # our own job: `_allowed` was asked
        self._backend = ""
        self._ours: tuple[Job, ...] = ()
        self._started: dict[int, int] = {}
        self.uid = ""  # by what the daemon knows its jobs here; "" = not known yet
        self.user = jobs_user(config)

    # ---------------------------------------------------------------- what bounds it

    def reload(self) -> None:
        """Take over [harvest] where its file changed. A file that cannot be used changes nothing."""
        if self._reread is None:
            return
        try:
            fresh = self._reread()
            limits_json(fresh)
        except ScavengerError as error:
            log.error("configuration not reloaded; the one in force stays", reason=error.cause)
            return
        if fresh.harvest != self.config.harvest:
            log.info("configuration reloaded")
            self.config = self.config.model_copy(update={"harvest": fresh.harvest})

    def stop(self) -> str:
        """What this cluster's admin ordered, as a stop file says it; "" = nothing."""
        if not self.config.harvest.enabled:
            return "drain harvest.enabled = false there"
        found = [
            read_stop(path, what)
            for path, what in (
                (self.config.harvest.stop_file, "the stop file there"),
                (drain_path(self.config.daemon.state_dir), "scavenger drain there"),
            )
        ]
        stops = sorted((stop for stop in found if stop is not None), key=lambda stop: not stop.at_once)
        return f"{'now' if stops[0].at_once else 'drain'} {stops[0].reason}"[:1000] if stops else ""

    def drained(self) -> dict[str, str]:
        with contextlib.suppress(OSError):
            return {node: why[:200] for node, why in drained_nodes(self.config.daemon.state_dir).items()}
        return {}

    def _limits(self, now: float) -> HarvestLimits:
        config = self.config
        stop = None
        if order := self.stop():
            word, _, reason = order.partition(" ")
            stop = Stop(reason, word == "now")
        health = Health(rules_of(config, "", self.user).health)
        return limits_of(config, health, 0.0, now, user=self.user, stop=stop, drained=self.drained())

    # ---------------------------------------------------------------- what is carried out

    def answer(self, request: wire.Request) -> proxy.ProxyAnswer:
        """What came of it, a failure too."""
        try:
            answer = self._answer(request)
        except (ScavengerError, OSError) as error:
            answer = proxy.ProxyAnswer(server.failed(error))
        if isinstance(answer.reply, proxy.FailedReply):
            log.warning("failed", request=type(request).__name__, reason=answer.reply.cause)
        return answer

    def _answer(self, request: wire.Request) -> proxy.ProxyAnswer:
        match request:
            case wire.SubmitEngine(uid, intent, engine):
                return self._start(uid, intent, engine)
            case proxy.GetInfo() | proxy.GetView() | proxy.GetJobs() | proxy.GetAccounting():
                answer = self._view.answer(request)
                if isinstance(answer.reply, proxy.ViewReply):
                    self._see(answer.reply.view.jobs)
                elif isinstance(answer.reply, proxy.JobsReply):
                    self._see(answer.reply.jobs)
                return answer
            case proxy.CancelJobs(job_ids):  # one that is unknown here has ended, or is none of an engine
                known = tuple(job_id for job_id in job_ids if self._is_engine(job_id))
                return (
                    self._submit.answer(proxy.CancelJobs(known))
                    if known
                    else proxy.ProxyAnswer(proxy.DoneReply())
                )
            case proxy.RequeueJob(job_id) | proxy.ReleaseJob(job_id):
                if not self._is_engine(job_id):
                    raise ClusterError(f"job {job_id} is none of an engine, as the queue was seen here last")
                return self._submit.answer(request)
            case proxy.Tidy(live, _):
                return self._submit.answer(proxy.Tidy(live, self.config.harvest.logs_mb * 2**20))
            case _:
                return self._submit.answer(request)

    def _is_engine(self, job_id: int) -> bool:
        return job_id in self._started or any(job.job_id == job_id for job in self._ours)

    def _see(self, jobs: Sequence[Job]) -> None:
        self._ours = tuple(
            job
            for job in jobs
            if job.user == self.user and intent_in(job, self.uid)[0] and (job.waits or job.has_gpus_allocated)
        )
        self._started.clear()

    def _start(self, uid: str, intent: str, engine: Submit) -> proxy.ProxyAnswer:
        now, self.uid = time.time(), uid
        self.reload()
        if why := refusal(engine, self._limits(now), self._ours, self._started, now):
            raise ClusterError(f"refused there: {why}")
        if not self._backend:
            self._backend = self._cluster.info().backend
        template = job_script.read_template(self.config.harvest.job_template)
        spec = job_script.job_spec(self.config, template, self._backend, uid, intent, engine)
        answer = self._submit.answer(proxy.SubmitJob(spec))
        if isinstance(answer.reply, proxy.SubmitReply):
            self._started[answer.reply.job_id] = engine.gpus * engine.nodes
        return answer


class HarvesterLoop:
    """The process: dials, reports what it may do, carries out what it is asked, and dials again when it is not heard. `folder`: where the
    daemon announces itself (its public folder, or a copy). Runs until `stop` is set."""

    def __init__(
        self,
        cluster: str,
        role: SiteRole,
        pair: keys.KeyPair,
        folder: Path,
        *,
        ready_s: float = wire.READY_S,
        silent_s: float = wire.SILENT_S,
    ) -> None:
        self._cluster, self._role, self._pair, self._folder = cluster, role, pair, folder
        self._ready_s, self._silent_s = ready_s, silent_s
        self._session, self._number, self._done = secrets.token_hex(8), 0, 0
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slurm")
        self._work: Future[bytes] | None = None
        self._context = zmq.Context()
        self._noted: keys.Rendezvous | None = None
        self._logged = ""
        self._answer = b""  # compressed, on its way to the daemon
        self._sent = self._received = 0  # bytes of it

    def run(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                try:
                    with self._dialled(self._rendezvous()) as socket:
                        self._serve(socket, stop)
                except (DaemonUnavailable, AuthError, OSError, zmq.ZMQError) as error:
                    self._warn_once(f"no link: {error}")
                stop.wait(RETRY_S)
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._context.destroy(linger=LEAVING_MS)

    def _warn_once(self, words: str) -> None:
        """Once, until there is something else to log."""
        if words != self._logged:
            self._logged = words
            log.warning(words)

    def _rendezvous(self) -> keys.Rendezvous:
        """The newer of the folder's and the daemon's last."""
        try:
            there = keys.read_rendezvous(self._folder)
        except (DaemonUnavailable, OSError):
            if self._noted is None:
                raise
            there = self._noted
        if self._noted is not None and self._noted.generation > there.generation:
            there = self._noted
        if not there.clusters:
            raise DaemonUnavailable(
                "the daemon takes no harvesters of further clusters", "set daemon.clusters_port there"
            )
        return there

    @contextlib.contextmanager
    def _dialled(self, there: keys.Rendezvous) -> Any:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        try:
            keys.secure(socket, there.server_key, self._pair)
            socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_ASK_BYTES)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing waits for a link that is down: it would come late
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.HEARTBEAT_IVL, wire.HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, wire.HEARTBEAT_TIMEOUT_MS)
            socket.connect(there.clusters)
            self._sent = self._received
            yield socket
            self._send(socket, wire.Leaving(self._session))
            socket.close(linger=LEAVING_MS)
        finally:
            socket.close(linger=0)

    def _serve(self, socket: zmq.Socket[bytes], stop: threading.Event) -> None:
        """Until the daemon is not heard any more."""
        heard, sent = time.monotonic(), float("-inf")
        while not stop.is_set():
            if self._work is not None and self._work.done():
                self._answer, self._work, self._done = self._work.result(), None, self._number
                self._sent = self._received = 0
            now = time.monotonic()
            if self._answer:
                self._send_pieces(socket)
                sent = float("-inf")
            elif now - sent >= self._ready_s:
                self._send_state(socket)
                sent = now
            if socket.poll(50 if self._work is not None else int(min(self._ready_s, 0.5) * 1000)):
                heard = time.monotonic()
                self._receive(socket.recv())
            if time.monotonic() - heard > self._silent_s:
                raise DaemonUnavailable(f"the daemon is not heard for {self._silent_s:g} s: dialling again")

    def _send_pieces(self, socket: zmq.Socket[bytes]) -> None:
        """As much of the answer as may be ahead of what the daemon has."""
        nbytes = len(self._answer)
        with contextlib.suppress(zmq.Again):  # no connection
            while self._sent < min(nbytes, self._received + wire.WINDOW_BYTES):
                data = self._answer[self._sent : self._sent + wire.PIECE_BYTES]
                piece = wire.AnswerPiece(self._session, self._number, self._sent, nbytes, data)
                socket.send(msgspec.msgpack.encode(piece), zmq.NOBLOCK)
                self._sent += len(data)

    def _send_state(self, socket: zmq.Socket[bytes]) -> None:
        if self._work is not None:
            self._send(socket, wire.Busy(self._session, self._number))
            return
        self._number += 1
        role = self._role
        role.reload()
        stop, drained, limits = role.stop(), role.drained(), limits_json(role.config)
        self._send(
            socket,
            wire.Ready(
                self._session,
                self._number,
                self._done,
                self._cluster,
                role.user,
                limits,
                stop,
                process_name(),
                drained,
            ),
        )

    def _receive(self, body: bytes) -> None:
        try:
            message = wire.from_daemon.decode(body)
        except MALFORMED as error:
            log.warning("a malformed message of the daemon", reason=str(error))
            return
        match message:
            case wire.Refused(reason):
                self._warn_once(f"refused: {reason}")
            case wire.Noted(rendezvous, uid):
                self._role.uid = uid
                self._note(rendezvous)
            case wire.Ask(session, number, request):
                if (session, number) == (self._session, self._number) and not (self._work or self._answer):
                    self._work = self._pool.submit(self._carry_out, request)
            case wire.Received(session, number, upto):
                if (session, number) == (self._session, self._number) and self._answer:
                    self._received = max(self._received, upto)
                    if self._received >= len(self._answer):
                        self._answer = b""

    def _note(self, rendezvous: keys.Rendezvous) -> None:
        """Engines here find the daemon by it."""
        if rendezvous != self._noted:
            keys.write_rendezvous(self._role.config.daemon.state_dir, rendezvous)
            self._noted, self._logged = rendezvous, ""
            log.info("linked", daemon=rendezvous.clusters, generation=rendezvous.generation)

    def _carry_out(self, request: wire.Request) -> bytes:
        answer = self._role.answer(request)
        try:
            return wire.packed(answer)
        except ValueError as error:
            return wire.packed(proxy.ProxyAnswer(proxy.FailedReply("unavailable", str(error))))

    def _send(self, socket: zmq.Socket[bytes], message: msgspec.Struct) -> None:
        with contextlib.suppress(zmq.Again):  # no connection: `done` shows later what was carried out
            socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)


def require_harmless(config: DaemonConfig, cluster: Cluster) -> None:
    """Raises `ConfigError` for a partition whose jobs could block others'; nothing where Slurm does not answer: the daemon asks again."""
    with contextlib.suppress(ClusterError):
        partition_check.check(
            choose.answer(cluster), cluster.view().partitions, config.harvest.partition, config.harvest.qos
        )
