"""`scavenger doctor --harvest-one`: harvests one engine for a minute, as the daemon would, without a daemon and without a training run.

    checked -> submitted -> started -> connected -> loaded -> generated -> drained -> cleaned up

The job is the site's own: its template, partition, key, Python and container. The engine is real, its model tiny and of random weights.
It connects to a socket of this process at the address that the daemon announces, at a port of its own: a daemon that starts meanwhile
finds its port free. `daemon_port`: at the daemon's, where a firewall opens no other.

Owns the stages, a folder of its own below the state directory, and the job. Whatever happens, the job is cancelled and the folder removed;
SIGTERM and SIGHUP end it as Ctrl-C does. After a SIGKILL the job's time limit ends the job, and the next canary removes the folder.
A daemon beside it goes on: the job carries another ledger's id. Nothing is written to a ledger.

Boundary: a job, a socket and files; all that it says is in findings.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TypeVar

import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator

from scavenger.cluster import choose, job_logs, reach
from scavenger.cluster.model import Job, JobState
from scavenger.cluster.port import Cluster
from scavenger.cluster.proxy import client
from scavenger.config import DaemonConfig
from scavenger.doctor.findings import Level, SiteFinding
from scavenger.errors import ClusterError, ClusterUnavailable, ScavengerError, SubmitUnknown, WireError
from scavenger.harvest.decide import decide
from scavenger.harvest.decide.actions import Submit, intent_name
from scavenger.harvest.execute import job_script
from scavenger.harvest.harvester import DRAIN_NOTICE_S
from scavenger.harvest.limits import StopState, limits_of
from scavenger.harvest.track import observed_jobs, set_up
from scavenger.harvest.track.node_health import Health, HealthRules
from scavenger.protocol import keys, messages
from scavenger.weights import manifest as manifests
from scavenger.weights.spool import Spool

RUN = "canary"
TOKENS = 8
START_S, CONNECT_S, LOAD_S, GENERATE_S, DRAIN_S = 180.0, 180.0, 300.0, 120.0, 60.0
#: The job's time limit: nothing of it outlives a canary that was killed for long.
MOST_S = 900.0
POLL_S = 2.0
#: How long a job is looked for of which it is not known whether Slurm has it.
FIND_S = 10.0
FOLDER = re.compile(r"canary-[0-9a-f]{8}")
SIGNALS = (signal.SIGTERM, signal.SIGHUP)
HEARTBEAT_S = 5.0
BUSY_REASONS = ("Resources", "Priority", "None", "")
CHECK_LOG = "its log is above; `scavenger doctor --submit` tries the paths and the engines' Python one by one"
#: A Llama of two layers that every engine can hold; its vocabulary has no text.
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
M = TypeVar("M", bound=messages.Message)


class _Failed(Exception):
    """A stage did not come. `busy`: nothing is wrong with the site."""

    def __init__(self, why: str, remedy: str, *, busy: bool = False) -> None:
        super().__init__(why)
        self.why, self.remedy, self.busy = why, remedy, busy


def weights(dtype: str = "float32") -> tuple[manifests.Manifest, memoryview]:
    """The model's, random and small."""
    hidden, inner, vocab = 128, 256, 64
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for n in range(2):
        layer = f"model.layers.{n}"
        shapes |= {f"{layer}.self_attn.{one}_proj.weight": (hidden, hidden) for one in "qkvo"}
        shapes |= {f"{layer}.mlp.{one}_proj.weight": (inner, hidden) for one in ("gate", "up")}
        shapes |= {
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }
    random = np.random.default_rng(0)
    tensors = {
        name: (dtype, shape, (random.standard_normal(shape) * 0.02).astype(np.float32).data)
        for name, shape in sorted(shapes.items())
    }
    return manifests.build(1, tensors)


class _Allowed:
    def __init__(self, public: str) -> None:
        self._public = public

    def callback(self, _domain: str, key: bytes) -> bool:
        return key.decode() == self._public


@dataclass
class _Daemon:
    """What the engine needs of a daemon: a socket under CURVE that one key may use, and answers to its heartbeats."""

    router: zmq.Socket[bytes]
    endpoint: str
    inbox: list[messages.Message] = field(default_factory=list)
    peer: bytes = b""

    def receive(self, timeout_s: float) -> None:
        if not self.router.poll(int(timeout_s * 1000)):
            return
        peer, frame = self.router.recv_multipart()[:2]
        try:
            message = messages.decode_to_daemon(frame)
        except WireError:
            return
        self.peer = peer
        if isinstance(message, messages.Heartbeat):
            self.send(messages.HeartbeatAck(1))
        else:
            self.inbox.append(message)

    def send(self, message: messages.Message) -> None:
        self.router.send_multipart([self.peer, messages.encode(message)])

    def take(self, kind: type[M]) -> M | None:
        """The first message of this kind that has come; what came before it is dropped."""
        for n, message in enumerate(self.inbox):
            if isinstance(message, kind):
                del self.inbox[: n + 1]
                return message
        return None


@contextlib.contextmanager
def _ending_cleanly() -> Iterator[Callable[[], None]]:
    """SIGTERM and SIGHUP raise `KeyboardInterrupt`, once. What it gives: from then on they are ignored, for cleaning up is under way.
    One that was ignored before stays so (nohup)."""
    kept = {number: signal.getsignal(number) for number in SIGNALS}
    ours = [number for number, handler in kept.items() if handler is not signal.SIG_IGN]

    def ignore() -> None:
        for number in ours:
            signal.signal(number, signal.SIG_IGN)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        ignore()
        raise KeyboardInterrupt

    try:
        for number in ours:
            signal.signal(number, interrupt)
        yield ignore
    finally:
        for number in ours:
            signal.signal(number, kept[number] or signal.SIG_DFL)


def sweep(state_dir: Path, now: float) -> None:
    """Remove the folders of canaries that were killed: no canary, and no job of one, lives for so long."""
    with contextlib.suppress(FileNotFoundError):
        for folder in state_dir.iterdir():
            if FOLDER.fullmatch(folder.name) and now - folder.lstat().st_mtime > 2 * MOST_S:
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _serving(
    config: DaemonConfig, folder: Path, worker: keys.KeyPair, fixed_port: int, *, public: bool
) -> Iterator[_Daemon]:
    d = config.daemon
    host = reach.announced(d.listen, d.advertise, socket.gethostname())
    pair, context = keys.generate(), zmq.Context()
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    router = context.socket(zmq.ROUTER)
    try:
        authenticator.configure_curve_callback("*", _Allowed(worker.public))
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
        router.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
        router.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        router.setsockopt(zmq.LINGER, 0)
        interface = socket.gethostbyname(d.listen)
        try:
            router.bind(f"tcp://{interface}:{fixed_port or '*'}")
        except zmq.ZMQError as error:
            where = f"{d.listen} port {fixed_port}" if fixed_port else d.listen
            remedy = (
                "a daemon serves there? Then leave --daemon-port out"
                if fixed_port
                else "daemon.listen must be an address of this host"
            )
            raise _Failed(f"cannot listen on {where}: {error}", remedy) from error
        bound = router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        port = int(bound.rstrip(b"\0").rpartition(b":")[2])
        endpoint = f"tcp://{host}:{port}"
        keys.write_rendezvous(
            folder,
            keys.Rendezvous(endpoint, pair.public, 1, os.getpid(), socket.gethostname()),
            public=public,
        )
        yield _Daemon(router, endpoint)
    finally:
        router.close(linger=0)
        authenticator.stop()
        context.destroy(linger=0)


def stopped(config: DaemonConfig, now: float) -> str:
    """Why a daemon would start no engine now: a stop file, a blackout, or limits of none. "" when it would."""
    harvest, stops = config.harvest, StopState(lambda: config)
    stops.poll()
    health = Health(HealthRules(harvest.quarantine_after, harvest.quarantine_s, harvest.backoff_s))
    limits = limits_of(config, health, DRAIN_NOTICE_S, now, stop=stops.stop_read)
    if closed := decide.harvesting_closed(limits, now):
        return f"nothing may be harvested now: {closed[1]}"
    if stops.files.paused:
        return f"whether harvesting is stopped is not known: {stops.files.paused}"
    for one in limits.blackouts[:1]:
        if now + MOST_S > one.start - harvest.drain_before_s:
            return f"a blackout begins in {one.start - now:.0f} s ({one.words}), and a canary may take {MOST_S:g} s"
    for name, most in (("max_engines", limits.caps.max_engines), ("max_gpus", limits.caps.max_gpus)):
        if most == 0:
            return f"harvest.{name} is 0 now"
    return ""


class Canary:
    """One engine's life. `say` gets each finding as it comes. `daemon_port`: see the module."""

    def __init__(
        self,
        config: DaemonConfig,
        cluster: Cluster,
        say: Callable[[SiteFinding], None],
        engine: str = "reference",
        *,
        daemon_port: bool = False,
    ) -> None:
        self._cluster, self._say, self._engine = cluster, say, engine
        self._config, self._found = config, list[SiteFinding]()
        self._uid = secrets.token_hex(4)  # no ledger's
        self._intent = intent_name(secrets.token_hex(8))
        self._stage, self._began = "", time.monotonic()
        self._job_id, self._asked = 0, False  # `_asked`: Slurm may have a job, known or not
        self._port = config.daemon.port if daemon_port else 0
        # Engines of another user find it where they find the daemon; their key and their log are that user's.
        self._engines = client.engines_user_of(config)
        home = config.daemon.state_dir if self._engines is None else config.daemon.public_dir
        assert home is not None  # by the configuration
        home = home.resolve()
        self._folder, self._new = home / f"canary-{secrets.token_hex(4)}", not home.exists()
        daemon = config.daemon.model_copy(update={"state_dir": self._folder, "public_dir": self._folder})
        self._own = config.model_copy(update={"daemon": daemon})

    def run(self) -> list[SiteFinding]:
        """All stages, or those up to the one that failed. Nothing is raised for what a site may have wrong."""
        with _ending_cleanly() as cleaning_up:
            return self._run(cleaning_up)

    def _run(self, cleaning_up: Callable[[], None]) -> list[SiteFinding]:
        try:
            self._stages()
        except _Failed as failed:
            level = Level.UNKNOWN if failed.busy else Level.PROBLEM
            self._tell(level, failed.why, failed.remedy)
        except ScavengerError as error:
            self._tell(
                Level.PROBLEM, error.cause, error.remedy or "see the reason; try again when it is mended"
            )
        except OSError as error:
            self._tell(
                Level.PROBLEM, f"{error}", "the state directory must be writable, and its address this host's"
            )
        finally:
            cleaning_up()
            self._clean_up()
        return self._found

    # ---------------------------------------------------------------- stages

    def _stages(self) -> None:
        self._enter("checked")
        sweep(self._folder.parent, time.time())
        # What a daemon would harvest once it is enabled, and this does now, is checked in any case.
        enabled = self._config.harvest.model_copy(update={"enabled": True})
        choose.preflight(self._config.model_copy(update={"harvest": enabled}), self._cluster)
        if why := stopped(self._config, time.time()):
            raise _Failed(why, "ask again when that is over (`scavenger status`, check-config)", busy=True)
        worker = keys.generate(RUN, self._intent)
        if self._engines is not None and self._new:
            why = f"the public folder {self._folder.parent} is not there"
            raise _Failed(why, "start the daemon once, which makes it: engines look for the daemon there")
        (self._folder / "logs").mkdir(mode=0o700, parents=True)
        manifest, blob = weights()
        source = Spool(self._folder / "weights").write(manifest, blob)
        if self._engines is None:
            keys.write_keypair(keys.worker_key_path(self._folder, self._intent), worker)
        else:
            self._engines.put_key(worker)
            for path in (self._folder, *self._folder.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)  # weights that chance drew
        with _serving(
            self._config, self._folder, worker, self._port, public=self._engines is not None
        ) as daemon:
            self._done(f"partition {self._config.harvest.partition}; engines connect to {daemon.endpoint}")
            self._enter("submitted")
            self._submit()
            self._enter("started")
            node = self._start(daemon)
            self._enter("connected")
            hello = self._expect(daemon, messages.WorkerHello, CONNECT_S, self._no_word(daemon, node))
            self._done(f"release {hello.code_version} on {hello.node}, under its job's key")
            self._enter("loaded")
            spec = messages.EngineSpec(self._engine, json.dumps(MODEL), "float32", 1, 64)
            daemon.send(messages.Welcome(1, 1, RUN, spec, HEARTBEAT_S, 50.0, 1))
            daemon.send(messages.UseWeights(1, manifests.encode(manifest), (source,)))
            loaded = self._expect(
                daemon,
                messages.WeightsLoaded,
                LOAD_S,
                (f"engine {self._engine} loaded no weights", CHECK_LOG),
            )
            if loaded.root != manifest.root:
                raise _Failed("the engine loaded other weights than it was given", CHECK_LOG)
            self._done(
                f"engine {self._engine} built, and {manifest.total_nbytes / 2**20:.1f} MiB of weights loaded"
            )
            self._enter("generated")
            self._generate(daemon)
            self._enter("drained")
            self._drain(daemon)

    def _submit(self) -> None:
        harvest, cluster = self._config.harvest, self._cluster
        share = [
            node.memory_mb // node.gpus
            for node in cluster.view().nodes
            if harvest.partition in node.partitions and node.gpus
        ]
        submit = Submit(
            0,
            RUN,
            harvest.partition,
            1,
            "canary",
            engine=self._engine,
            memory_mb=harvest.memory_mb_per_engine
            or (min(share, default=0) if min(share, default=0) >= 64 else 0),
            most_s=MOST_S,
        )
        backend = "local" if choose.is_local(self._config) else "slurm"
        template = job_script.read_template(harvest.job_template)
        spec = job_script.job_spec(self._own, template, backend, self._uid, self._intent, submit)
        self._asked = True
        try:
            self._job_id = cluster.submit(spec)
        except (SubmitUnknown, ClusterUnavailable):
            raise
        except ClusterError:
            self._asked = False  # refused: there is no job
            raise
        self._done(f"job {self._job_id} ({self._intent})")

    def _start(self, daemon: _Daemon) -> str:
        deadline = time.monotonic() + START_S
        while True:
            job = self._job()
            if job is not None and job.has_gpus_allocated and job.nodes:
                self._done(f"on {job.nodes[0]}")
                return job.nodes[0]
            if job is not None and not job.waits:
                raise self._ended(job)
            if time.monotonic() >= deadline:
                reason = job.reason if job is not None else "not in the queue"
                if job is not None and reason in BUSY_REASONS:
                    why = f"job {self._job_id} found no idle GPU within {START_S:g} s ({reason or 'no reason given'})"
                    raise _Failed(why, "ask again when one of the partition's GPUs is idle", busy=True)
                raise _Failed(
                    f"job {self._job_id} does not start: {reason}",
                    "`scavenger doctor` explains the partition's limits; squeue tells more of the job",
                )
            daemon.receive(POLL_S)

    def _generate(self, daemon: _Daemon) -> None:
        key = messages.SampleKey("train", 0, 0, 0)
        lease = messages.Lease(
            1,
            1,
            1,
            messages.pack_tokens([3, 4, 5]),
            b"",
            messages.Sampling(TOKENS, min_tokens=TOKENS),
            1,
            key,
        )
        daemon.send(messages.Assign((lease,)))
        have, deadline = 0, time.monotonic() + GENERATE_S
        while have < TOKENS:
            left = deadline - time.monotonic()
            chunks = self._expect(
                daemon, messages.Chunks, max(0.0, left), (f"{have} of {TOKENS} tokens came", CHECK_LOG)
            )
            for chunk in chunks.chunks:
                have = max(have, chunk.offset + len(messages.unpack_tokens(chunk.tokens)))
        self._done(f"{have} tokens")

    def _drain(self, daemon: _Daemon) -> None:
        daemon.send(messages.Ack((messages.Held(1, 1, TOKENS),)))
        daemon.send(messages.Drain("the canary is over"))
        self._expect(
            daemon, messages.Goodbye, DRAIN_S, ("the engine did not say goodbye", CHECK_LOG), ends=True
        )
        daemon.send(messages.GoodbyeAck())
        deadline = time.monotonic() + DRAIN_S
        while (job := self._job()) is not None and (job.has_gpus_allocated or job.waits):
            if time.monotonic() >= deadline:
                raise _Failed(
                    f"job {self._job_id} still holds its GPU {DRAIN_S:g} s after its engine left",
                    "see what keeps it: an epilog, or a job template that does not exit with its worker",
                )
            daemon.receive(POLL_S)
        if job is not None and job.state is not JobState.COMPLETED:
            raise self._ended(job)
        self._done("the engine left when it was told to, and its job ended")

    # ---------------------------------------------------------------- waiting

    def _expect(
        self, daemon: _Daemon, kind: type[M], within_s: float, silent: tuple[str, str], *, ends: bool = False
    ) -> M:
        """The next message of this kind. `silent`: what is wrong when none comes, and the remedy. `ends`: its job may be over by then."""
        deadline, look_at = time.monotonic() + within_s, time.monotonic() + POLL_S
        while (found := daemon.take(kind)) is None:
            failed = next(
                (
                    one
                    for one in daemon.inbox
                    if isinstance(one, messages.WeightsFailed | messages.SampleFailed)
                ),
                None,
            )
            if failed is not None:
                raise _Failed(failed.reason, CHECK_LOG)
            now = time.monotonic()
            if now >= deadline:
                raise _Failed(f"{silent[0]} within {within_s:.0f} s{self._log()}", silent[1])
            if now >= look_at:
                job, look_at = self._job(), now + POLL_S
                if job is not None and (job.restart_count or job.waits):
                    why = f"job {self._job_id} was preempted: another user's job needed its GPU"
                    raise _Failed(why, "ask again when one of the partition's GPUs is idle", busy=True)
                if not ends and (job is None or not (job.has_gpus_allocated or job.waits)):
                    daemon.receive(0.0)
                    if daemon.take(kind) is None:
                        raise self._ended(job)
            daemon.receive(min(0.5, max(0.0, deadline - now)))
        return found

    def _job(self) -> Job | None:
        """As the queue shows it; a poll that fails is tried again at the next."""
        with contextlib.suppress(ClusterError):
            return next((job for job in self._cluster.jobs() if job.job_id == self._job_id), None)
        return Job(self._job_id, "", "", JobState.RUNNING, frozenset())

    def _ended(self, job: Job | None) -> _Failed:
        code = job.exit_code if job is not None else None
        how = f"{job.state}" if job is not None else "gone from the queue"
        words = set_up.CANNOT_BEGIN.get(code, "") if code is not None else ""
        why = f"job {self._job_id} is {how}" + (
            f" (exit code {code}{': ' + words if words else ''})" if code else ""
        )
        remedy = set_up.REMEDIES.get(code, CHECK_LOG) if code is not None else CHECK_LOG
        return _Failed(why + self._log(), remedy)

    def _no_word(self, daemon: _Daemon, node: str) -> tuple[str, str]:
        remedy, fixed = set_up.REMEDIES[set_up.NO_DAEMON], self._config.daemon.port
        if fixed and not self._port:
            remedy += f". Does a firewall open daemon.port = {fixed} alone? Then add --daemon-port while no daemon runs"
        return (f"job {self._job_id} runs on {node}, and its engine did not reach {daemon.endpoint}", remedy)

    def _log(self) -> str:
        with contextlib.suppress(OSError, ClusterError):
            if self._engines is not None:
                words = job_logs.words_of(self._engines.end_of_log(self._intent))
            else:
                words = job_logs.last_words(job_script.log_path(self._folder, self._intent))
            if words:
                return f"; its log ends: {words}"
        return "; it wrote no log: its node may not see the state directory"

    # ---------------------------------------------------------------- words, and the end

    def _enter(self, stage: str) -> None:
        self._stage, self._began = stage, time.monotonic()

    def _done(self, what: str) -> None:
        self._tell(Level.OK, what)

    def _tell(self, level: Level, what: str, remedy: str = "") -> None:
        took = f"{time.monotonic() - self._began:.1f} s: "
        self._found.append(SiteFinding(self._stage, level, took + what, remedy))
        self._say(self._found[-1])

    def _cancel(self) -> str:
        """Cancel the job; what may be left of it, "" for nothing."""
        try:
            if self._asked and not self._job_id and not self._find():
                return f"perhaps job {self._intent}: its submission got no answer, and the queue does not list it"
            if self._job_id and (job := self._job()) is not None and (job.has_gpus_allocated or job.waits):
                self._cluster.cancel((self._job_id,))
        except ClusterError as error:
            return f"job {self._job_id or self._intent} ({error.cause})"
        return ""

    def _find(self) -> bool:
        """Whether the queue lists the job by now. Raises the last poll's `ClusterError`."""
        deadline = time.monotonic() + FIND_S
        while True:
            over = time.monotonic() >= deadline
            try:
                jobs = self._cluster.jobs()
                named = [
                    job for job in jobs if observed_jobs.intent_in(job, self._uid) == (self._intent, True)
                ]
                if named:
                    self._job_id = named[0].job_id
                    return True
            except ClusterError:
                if over:
                    raise
            if over:
                return False
            time.sleep(min(POLL_S, FIND_S))

    def _clean_up(self) -> None:
        self._enter("cleaned up")
        left = []
        if why := self._cancel():
            left.append(f"{why}; once it runs, it ends by itself within {MOST_S / 60:g} minutes")
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._folder.exists():
            left.append(str(self._folder))
        if self._new:
            with contextlib.suppress(OSError):  # another process put a file there meanwhile: it stays
                self._folder.parent.rmdir()
        if left:
            remedy = f"remove it: scancel --name={self._intent}, rm -r"
            self._tell(Level.WARNING, f"left: {', '.join(left)}", remedy)
        else:
            self._done("job and folder are gone")


def line(finding: SiteFinding) -> str:
    """For a terminal, as each comes."""
    text = f"{finding.level:<9}{finding.check:<12}{finding.observed}"
    return f"{text}\n{'':21}-> {finding.remedy}" if finding.remedy else text
