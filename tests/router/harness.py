"""A router's core on a bench: short ways to say what workers and trainers say, a ledger in memory, and an audit after every event.

Commits happen when the test says so, unless `auto` is on.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from scavenger.ledger import records as rec
from scavenger.protocol.messages import (
    PROTOCOL,
    Attach,
    Call,
    CallBody,
    Chunk,
    Chunks,
    CommitStep,
    EngineSpec,
    GroupSpec,
    Held,
    Lease,
    Message,
    OpenRun,
    PublishVersion,
    Reply,
    ReplyBody,
    SampleOutcome,
    Sampling,
    SubmitGroups,
    WeightsLoaded,
    WeightSource,
    WorkerHello,
    pack_logprobs,
    pack_tokens,
)
from scavenger.router.core import audit
from scavenger.router.core.events import (
    Committed,
    CoreTick,
    Fill,
    HelloReceived,
    HistoryRead,
    PeerIdentity,
    ReadHistory,
    RouterAction,
    RouterEvent,
    Send,
    TrainerCalled,
    Write,
)
from scavenger.router.core.machine import Router
from scavenger.router.core.payloads import PayloadStore
from scavenger.router.core.state import RouterLimits
from scavenger.router.edge.pipeline import checked, filled, lacking, lacking_message, take_back
from tests.router.memory_ledger import Ledger

OWNER = PeerIdentity("owner", "owner-key")
SPEC = EngineSpec(
    "reference", "{}", "float32", max_batch=4, context_length=64, speculation="group", move_kv=True
)
SOURCE = WeightSource("tcp://127.0.0.1:1", "key", b"token")
M = TypeVar("M", bound=Message)
CONFIG = {
    "run": {"harvest": True, "max_engines": 8, "gpus_per_engine": 1, "poison_after": 3, "on_poison": "stop"}
}


def root(version: int) -> bytes:
    return b"root-%d" % version


def token(sample_id: int, position: int) -> int:
    """The one right token of a sample at a position, whoever generates it."""
    return (sample_id * 31 + position * 7) % 97


def payload(sample_id: int, offset: int, n: int) -> tuple[bytes, bytes, bytes, bytes]:
    tokens = [token(sample_id, offset + i) for i in range(n)]
    return (
        pack_tokens(tokens),
        pack_logprobs([-0.5 - t for t in tokens]),
        pack_logprobs([-0.25 - t for t in tokens]),
        b"",
    )


def chunk_of(
    sample_id: int, epoch: int, version: int, offset: int, n: int, finish: str | None = None
) -> Chunk:
    tokens, logprobs, raw_logprobs, routing = payload(sample_id, offset, n)
    return Chunk(sample_id, epoch, offset, version, tokens, logprobs, raw_logprobs, finish, routing)


def open_body(
    resume_step: int = 0,
    *,
    on_poison: str = "stop",
    poison_after: int = 3,
    harvest: bool = True,
    job_id: int = 1,
    encrypt: bool = False,
    ahead: int = 0,
    on_new_version: str = "switch",
    kv: str = "recompute",
    environment_jobs: int = 0,
    budget: dict[str, float] | None = None,
) -> OpenRun:
    """`budget`: of each episode, as keys of the run's `[data]`."""
    run = CONFIG["run"] | {"on_poison": on_poison, "poison_after": poison_after, "harvest": harvest}
    algorithm = {"max_off_policy_steps": ahead, "on_new_version": on_new_version, "kv": kv}
    sections = {"run": run, "weights": {"encrypt": encrypt}, "algorithm": algorithm, "data": budget or {}}
    return OpenRun(
        PROTOCOL,
        "r",
        7,
        json.dumps(sections),
        SPEC,
        "",
        harvest,
        8,
        1,
        resume_step,
        "host",
        job_id,
        poison_after,
        on_poison,
        encrypt,
        max_off_policy_steps=ahead,
        on_new_version=on_new_version,  # type: ignore[arg-type]
        keeps_cache=kv == "keep",
        environment_jobs=environment_jobs,
        environment_file="/out/environment-workers.json" if environment_jobs else "",
        **budget or {},  # type: ignore[arg-type]  # of ints, and one float
    )


def specs(prompts: int, n: int = 2, max_tokens: int = 8) -> tuple[GroupSpec, ...]:
    return tuple(
        GroupSpec(i, pack_tokens([1, 2, 3]), n, Sampling(max_tokens, stop_token_ids=(0,)))
        for i in range(prompts)
    )


class Bench:
    """A core, its ledger, its mail and a clock that moves when told.

    `payload_bytes` bounds the tokens in memory: so few, by default, that most are evicted as soon as they are durable, and read back.
    """

    def __init__(
        self, *, auto: bool = True, limits: RouterLimits | None = None, payload_bytes: int = 2_000
    ) -> None:
        self.limits = limits or RouterLimits()
        self.ledger = Ledger()
        self.now = 1000.0
        self.auto = auto
        self.generation = 1
        self.payload_bytes = payload_bytes
        self.read_back = 0  # samples whose tokens were read from the ledger
        self.router = self._router()
        self.writes: list[Write] = []  # not committed
        self.reads: list[ReadHistory] = []
        self.mail: dict[int, list[Message]] = {}
        self.call_id = 0
        self.attempt = 0
        self.trainer = 1
        self.sessions = 0

    def _router(self) -> Router:
        self.store = PayloadStore(self.payload_bytes)
        return Router(self.limits, self.generation, self.store)

    def handle(self, event: RouterEvent) -> list[RouterAction]:
        core = self.router.core
        self._load(lacking(core, self.store, event))
        actions = self.router.handle(event, self.now)
        self.store.trim()
        audit.check(core)
        self.store.check({s.id: (s.accepted, s.durable) for s in core.samples.values()})
        self.perform(actions)
        return actions

    def _load(self, wanted: dict[int, int]) -> None:
        """As the edge does, but at once."""
        for sample_id, payload in self.ledger.payloads(list(wanted)).items():
            self.read_back += 1
            assert len(payload[0]) // 4 >= wanted[sample_id], (
                f"sample {sample_id}: evicted before it was durable"
            )
            take_back(self.router.core, self.store, sample_id, payload)

    def filled(self, actions: list[RouterAction]) -> list[RouterAction]:
        """The actions with their messages' tokens."""
        found: list[RouterAction] = []
        for action in actions:
            if isinstance(action, Fill):
                self._load(lacking_message(self.router.core, self.store, action))
                message = filled(self.store, action)
                self.store.trim()
                found += [Send(action.conn, message)] if message is not None else []
            else:
                found.append(action)
        return found

    def perform(self, actions: list[RouterAction]) -> None:
        for action in self.filled(actions):
            match action:
                case Send(conn=conn, message=message):
                    self.mail.setdefault(conn, []).append(message)
                case Write():
                    self.writes.append(action)
                case ReadHistory():
                    self.reads.append(action)
        if self.auto:
            self.settle()

    def settle(self) -> None:
        """Commit everything, and answer what reads the ledger."""
        while self.writes or self.reads:
            if self.writes:
                self.commit()
            else:
                self.read()

    def commit(self, most: int | None = None) -> None:
        """Make the next `most` writes durable, all by default."""
        batch = self.writes[: most or len(self.writes)]
        del self.writes[: len(batch)]
        for write in batch:
            self.ledger.apply(write.records)
        self.handle(Committed(batch[-1].ticket))

    def read(self) -> None:
        ask = self.reads.pop(0)
        history = self.ledger.history(ask.run_id, ask.after_step)
        rates = (
            () if ask.solved_at is None else self.ledger.pass_rates(ask.run_id, ask.after_step, ask.solved_at)
        )
        taken = self.ledger.taken_deliveries(ask.run_id, ask.after_step)
        ended = self.ledger.ended_episodes(ask.run_id, ask.ended_episodes)
        self.handle(HistoryRead(ask.run_id, ask.attempt, history, rates, taken, ended))

    def restart(self) -> None:
        """The daemon dies; another starts from what was committed. Every connection is gone."""
        self.generation += 1
        self.writes, self.reads, self.mail = [], [], {}
        self.router = self._router()
        actions = self.router.restore(self.ledger.snapshot(), self.now)
        audit.check(self.router.core)
        self.perform(actions)

    def tick(self, seconds: float = 0.0, step: float = 0.25) -> None:
        """Let time pass as a living daemon sees it."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            self.handle(CoreTick())
        if not seconds:
            self.handle(CoreTick())

    def take(self, conn: int, kind: type[M]) -> list[M]:
        """Messages of a kind that came for a connection since the last look."""
        box = self.mail.get(conn, [])
        found = [m for m in box if isinstance(m, kind)]
        self.mail[conn] = [m for m in box if not isinstance(m, kind)]
        return found

    # ---- the trainer

    def call(
        self,
        body: CallBody,
        *,
        attempt: int | None = None,
        conn: int | None = None,
        who: PeerIdentity = OWNER,
    ) -> ReplyBody | None:
        """Make a call; its answer if it came at once."""
        self.call_id += 1
        at = conn or self.trainer
        fenced = 0 if isinstance(body, OpenRun) else self.attempt if attempt is None else attempt
        self.handle(TrainerCalled(at, who, Call(self.call_id, "r", fenced, body)))
        return self.answer(self.call_id, at)

    def answer(self, call_id: int, conn: int | None = None) -> ReplyBody | None:
        box = self.mail.get(conn or self.trainer, [])
        return next((m.body for m in box if isinstance(m, Reply) and m.id == call_id), None)

    def open(self, resume_step: int = 0, **options: object) -> None:
        self.call(open_body(resume_step, **options))  # type: ignore[arg-type]
        self.attempt += 1

    def publish(self, version: int = 1, step: int = 0, root_of: int | None = None) -> ReplyBody | None:
        named = root(version if root_of is None else root_of)
        return self.call(PublishVersion(version, step, named, b"manifest", (SOURCE,)))

    def submit(
        self,
        step: int = 1,
        version: int = 1,
        groups: tuple[GroupSpec, ...] | None = None,
        purpose: str = "train",
    ) -> ReplyBody | None:
        return self.call(SubmitGroups(step, version, purpose, specs(1) if groups is None else groups))

    def attach(
        self, have: tuple[int, ...] = (), wants: tuple[int, ...] = (), conn: int | None = None
    ) -> ReplyBody | None:
        self.trainer = conn or self.trainer
        return self.call(Attach("r", have, wants))

    def commit_step(
        self,
        step: int,
        samples: list[int],
        version: int = 1,
        outcome: str = "consumed",
        purpose: str = "train",
    ) -> ReplyBody | None:
        outcomes = tuple(SampleOutcome(i, outcome, 1.0, 0.5) for i in samples)
        return self.call(CommitStep(step, version, purpose, outcomes, {}))

    # ---- workers

    def hello(
        self,
        conn: int,
        *,
        session: str = "",
        intent: str = "",
        kind: str = "harvested",
        incarnation: int = 0,
        node: str = "",
        held: tuple[Held, ...] = (),
        loaded: int = -1,
        cluster: str = "",
        **other: object,
    ) -> None:
        intent = intent or f"job{conn}"
        who = PeerIdentity("worker", f"key-{intent}", "r", intent, cluster) if kind == "harvested" else OWNER
        registration = {
            "protocol": PROTOCOL,
            "kind": kind,
            "run": "r",
            "session": session or f"s{conn}",
            "incarnation": incarnation,
            "job_id": conn,
            "node": node or f"n{conn}",
            "gpus": 1,
            "engine": "reference",
            "code_version": "0",
            "pid": 1,
            "loaded_version": loaded,
            "held": held,
        }
        self.handle(HelloReceived(conn, who, WorkerHello(**(registration | other))))  # type: ignore[arg-type]

    def say(self, conn: int, message: Message) -> None:
        self.handle(checked(conn, message))

    def join(self, conn: int, version: int = 1, **how: object) -> list[Lease]:
        """A worker registers and loads; returns the leases that it is given."""
        self.hello(conn, **how)  # type: ignore[arg-type]
        self.say(conn, WeightsLoaded(version, root(version)))
        return self.leases(conn)

    def leases(self, conn: int) -> list[Lease]:
        from scavenger.protocol.messages import Assign

        return [lease for m in self.take(conn, Assign) for lease in m.leases]

    def chunk(self, conn: int, lease: Lease, offset: int, n: int, finish: str | None = None) -> None:
        self.say(conn, Chunks((chunk_of(lease.sample_id, lease.epoch, lease.version, offset, n, finish),)))

    def sample(self, sample_id: int):  # type: ignore[no-untyped-def]
        return self.router.core.samples[sample_id]

    def events(self, kind: str) -> list[rec.Event]:
        return [e for e in self.ledger.events if e.kind == kind]


def started(*, auto: bool = True, prompts: int = 1, n: int = 2, max_tokens: int = 8, **options: Any) -> Bench:
    """A bench whose run is open, has version 1 published and step 1 submitted."""
    bench = Bench()
    bench.open(**options)
    bench.publish()
    bench.submit(groups=specs(prompts, n, max_tokens))
    bench.auto = auto
    return bench
