"""A router's core on a bench: short ways to say what workers and trainers say, a ledger in memory, and an audit after every event.

`Ledger` applies the core's records to plain rows and gives the snapshot that a restarted daemon reads; it holds what the real one holds and
no more. Commits happen when the test says so, unless `auto` is on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from scavenger.ledger import reader, store, transaction
from scavenger.ledger import records as rec
from scavenger.ledger.moves import MoveLog
from scavenger.router import audit
from scavenger.router.events import (
    Committed,
    Fill,
    HelloReceived,
    HistoryRead,
    Identity,
    ReadHistory,
    RouterAction,
    RouterEvent,
    Send,
    Tick,
    TrainerCalled,
    Write,
)
from scavenger.router.machine import Router
from scavenger.router.payload_check import checked
from scavenger.router.payload_gate import filled, lacking, lacking_message, take_back
from scavenger.router.payloads import Payload, PayloadStore
from scavenger.router.state import Limits
from scavenger.weights import manifest as manifests
from scavenger.wire import (
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

OWNER = Identity("owner", "owner-key")
SPEC = EngineSpec("reference", "{}", "float32", max_batch=4, context_length=64)
SOURCE = WeightSource("tcp://127.0.0.1:1", "key", b"token")
M = TypeVar("M", bound=Message)
CONFIG = {"run": {"harvest": True, "max_engines": 8, "gpus_per_engine": 1, "poison_after": 3, "on_poison": "stop"}}


def root(version: int) -> bytes:
    return b"root-%d" % version


def token(sample_id: int, position: int) -> int:
    """The one right token of a sample at a position, whoever generates it."""
    return (sample_id * 31 + position * 7) % 97


def payload(sample_id: int, offset: int, n: int) -> tuple[bytes, bytes, bytes]:
    tokens = [token(sample_id, offset + i) for i in range(n)]
    return pack_tokens(tokens), pack_logprobs([-0.5 - t for t in tokens]), pack_logprobs([-0.25 - t for t in tokens])


def chunk_of(sample_id: int, epoch: int, version: int, offset: int, n: int, finish: str | None = None) -> Chunk:
    return Chunk(sample_id, epoch, offset, version, *payload(sample_id, offset, n), finish=finish)


def open_body(
    resume_step: int = 0, *, on_poison: str = "stop", poison_after: int = 3, harvest: bool = True, job_id: int = 1, encrypt: bool = False
) -> OpenRun:
    run = CONFIG["run"] | {"on_poison": on_poison, "poison_after": poison_after, "harvest": harvest}
    config = json.dumps({"run": run, "weights": {"encrypt": encrypt}})
    return OpenRun(PROTOCOL, "r", 7, config, SPEC, "", harvest, 8, 1, resume_step, "host", job_id, poison_after, on_poison, encrypt)


def specs(prompts: int, n: int = 2, max_tokens: int = 8) -> tuple[GroupSpec, ...]:
    return tuple(GroupSpec(i, pack_tokens([1, 2, 3]), n, Sampling(max_tokens, stop_token_ids=(0,))) for i in range(prompts))


# ---------------------------------------------------------------- a ledger in memory


@dataclass
class Row:
    """A sample's row."""

    group_id: int
    index: int
    state: str = "open"
    epoch: int = 0
    moves: int = 0
    tokens: bytes = b""
    logprobs: bytes = b""
    raw_logprobs: bytes = b""
    finish: str = ""
    reward: float | None = None
    lease: tuple[int, int, int] | None = None
    step: int = 0
    attempt: int = 0
    reason: str = ""
    ends: list[str] = field(default_factory=list)


def plain(records: Iterable[rec.Record]) -> Iterator[rec.Record]:
    """The records, with a move as the end and the grant that it is."""
    for record in records:
        if isinstance(record, rec.LeaseMoved):
            yield rec.LeaseEnded(record.sample_id, record.epoch, record.reason, record.length, record.regenerated, record.at)
            yield rec.LeaseGranted(record.sample_id, record.epoch + 1, record.worker_id, record.version, record.length, record.at)
        else:
            yield record


class Ledger:
    """What commits leave behind. Refuses what a real ledger's audit would."""

    def __init__(self) -> None:
        self.runs: dict[int, dict[str, object]] = {}
        self.versions: list[rec.VersionPublished] = []
        self.groups: dict[int, rec.GroupCreated] = {}
        self.group_versions: dict[int, int] = {}
        self.samples: dict[int, Row] = {}
        self.workers: dict[int, rec.WorkerJoined] = {}
        self.delivered: dict[int, int] = {}
        self.taken: set[tuple[int, str, int]] = set()  # (run, purpose, step) of steps that were taken and not rewound
        self.events: list[rec.Event] = []
        self.log: list[rec.Record] = []
        self.consumed: dict[int, int] = {}  # sample -> times consumed and not reopened

    def apply(self, records: tuple[rec.Record, ...]) -> None:
        for record in plain(records):
            self.log.append(record)
            self._apply(record)

    def _apply(self, record: rec.Record) -> None:
        match record:
            case rec.RunCreated():
                assert record.run_id not in self.runs
                fresh = {"created": record, "attempt": 0, "resume": 0, "last": 0, "config": "", "engine": "", "ended": False}
                self.runs[record.run_id] = fresh
            case rec.AttemptGranted():
                run = self.runs[record.run_id]
                assert record.attempt == run["attempt"] + 1, "an attempt was granted twice"  # type: ignore[operator]
                run |= {"attempt": record.attempt, "resume": record.resume_step, "config": record.config, "engine": record.engine}
                run["ended"] = False
            case rec.StepsRewound():
                self.runs[record.run_id]["last"] = record.to_step
                self.taken = {t for t in self.taken if t[0] != record.run_id or t[2] <= record.to_step}
            case rec.RunEnded():
                self.runs[record.run_id]["ended"] = True
            case rec.VersionPublished():
                self.versions.append(record)
            case rec.StepCommitted():
                self.taken.add((record.run_id, record.purpose, record.step))
                if record.purpose == "train":
                    self.runs[record.run_id]["last"] = record.step
            case rec.GroupCreated():
                assert record.group_id not in self.groups
                self.groups[record.group_id], self.group_versions[record.group_id] = record, record.version
                for index in range(record.n):
                    assert record.first_sample_id + index not in self.samples
                    self.samples[record.first_sample_id + index] = Row(record.group_id, index)
            case rec.GroupAdopted():
                self.group_versions[record.group_id] = record.version
            case rec.GroupDelivered():
                self.delivered[record.group_id] = record.attempt
            case rec.WorkerJoined():
                assert record.worker_id not in self.workers
                self.workers[record.worker_id] = record
            case rec.WorkerLeft():
                del self.workers[record.worker_id]
            case rec.Event():
                self.events.append(record)
            case _:
                self._apply_sample(record)

    def _apply_sample(self, record: rec.Record) -> None:
        match record:
            case rec.LeaseGranted():
                row = self.samples[record.sample_id]
                assert row.lease is None, f"sample {record.sample_id} is leased twice"
                assert record.epoch == row.epoch + 1, f"sample {record.sample_id}: epoch {record.epoch} after {row.epoch}"
                assert record.offset == len(row.tokens) // 4, f"sample {record.sample_id}: leased at another length than it has"
                row.epoch, row.lease = record.epoch, (record.epoch, record.worker_id, record.version)
                row.moves += record.offset > 0
            case rec.LeaseEnded():
                row = self.samples[record.sample_id]
                assert row.lease is not None, f"sample {record.sample_id}: no lease to end"
                assert row.lease[0] == record.epoch, f"sample {record.sample_id}: another lease ended"
                assert record.length == len(row.tokens) // 4
                row.lease = None
            case rec.ChunkAccepted():
                row = self.samples[record.sample_id]
                assert row.lease == (record.epoch, record.worker_id, record.version), f"sample {record.sample_id}: a chunk without a lease"
                assert record.offset == len(row.tokens) // 4, f"sample {record.sample_id}: a gap"
                row.tokens += record.tokens
                row.logprobs += record.logprobs
                row.raw_logprobs += record.raw_logprobs
            case rec.SampleFinished():
                row = self.samples[record.sample_id]
                assert row.state == "open"
                row.state, row.finish = "complete", record.finish
            case rec.SampleEnded():
                row = self.samples[record.sample_id]
                row.state, row.reward, row.step = record.state, record.reward, record.step
                row.attempt, row.reason = record.attempt, record.reason
                row.ends.append(record.state)
                if record.state == "consumed":
                    self.consumed[record.sample_id] = self.consumed.get(record.sample_id, 0) + 1
                    assert self.consumed[record.sample_id] == 1, f"sample {record.sample_id} was consumed twice"
                elif record.state == "superseded":
                    self.consumed.pop(record.sample_id, None)
            case rec.SampleReopened():
                row = self.samples[record.sample_id]
                row.state, row.step, row.attempt, row.reason = "complete", 0, 0, ""
                row.ends.append("reopened")
                self.consumed.pop(record.sample_id, None)

    # ---- reading

    def _state(self, group_id: int) -> rec.GroupState:
        made = self.groups[group_id]
        rows = ((i, self.samples[i]) for i in range(made.first_sample_id, made.first_sample_id + made.n))
        return rec.GroupState(
            made,
            self.group_versions[group_id],
            tuple(
                rec.SampleState(
                    i,
                    r.index,
                    r.state,
                    r.epoch,
                    r.moves,
                    len(r.tokens) // 4,
                    r.finish,
                    r.reward,
                    r.lease,
                    r.step,
                    r.attempt,
                    r.reason,
                )
                for i, r in rows
            ),
        )

    def _wanted(self, run_id: int, after: int) -> tuple[rec.GroupState, ...]:
        ends = ("consumed", "filtered", "masked", "evaluated")
        found = {
            row.group_id
            for row in self.samples.values()
            if self.groups[row.group_id].run_id == run_id
            and (row.state in ("open", "complete") or (row.state in ends and row.step > after) or self._untaken_poison(row))
        }
        return tuple(self._state(i) for i in sorted(found))

    def _untaken_poison(self, row: Row) -> bool:
        made = self.groups[row.group_id]
        return row.state == "poisoned" and (made.run_id, made.purpose, made.step) not in self.taken

    def _takes(self) -> tuple[tuple[int, str, int, int, int], ...]:
        newest: dict[tuple[int, str, int, int], int] = {}
        for row in self.samples.values():
            if row.state in ("superseded", "poisoned", "surplus"):
                made = self.groups[row.group_id]
                key = (made.run_id, made.purpose, made.step, made.prompt_index)
                newest[key] = max(made.take, newest.get(key, 0))
        return tuple((*key, take) for key, take in newest.items())

    def history(self, run_id: int, after_step: int) -> tuple[rec.GroupState, ...]:
        return self._wanted(run_id, after_step)

    def payloads(self, sample_ids: list[int]) -> dict[int, Payload]:
        return {i: (r.tokens, r.logprobs, r.raw_logprobs) for i in sample_ids if (r := self.samples.get(i)) is not None}

    def _versions(self, run_id: int) -> tuple[rec.VersionPublished, ...]:
        """As the real one gives them: of an active run the newest four manifests, and those of their bases."""
        mine = [v for v in self.versions if v.run_id == run_id]
        newest = max((v.version for v in mine), default=0) - 4 if not self.runs[run_id]["ended"] else math.inf
        bases = {manifests.base_of(v.manifest) for v in mine if v.version > newest} - {b""}
        return tuple(v if v.version > newest or v.root in bases else msgspec.structs.replace(v, manifest=b"") for v in mine)

    def snapshot(self) -> rec.Snapshot:
        active = [i for i, run in self.runs.items() if not run["ended"]]
        runs = tuple(
            rec.RunState(
                run["created"], run["attempt"], run["resume"], run["last"], run["engine"], run["config"],  # type: ignore[arg-type]
                self._versions(i), (), bool(run["ended"]),
            )
            for i, run in self.runs.items()
        )  # fmt: skip
        groups = tuple(g for i in active for g in self._wanted(i, -1))
        workers = tuple(rec.WorkerState(w) for w in self.workers.values())

        def after(ids: object) -> int:
            return max(ids, default=0) + 1  # type: ignore[call-overload, no-any-return]

        joined = [r.worker_id for r in self.log if isinstance(r, rec.WorkerJoined)]
        ids = (after(self.runs), after(self.groups), after(self.samples), after(joined))
        return rec.Snapshot(*ids, runs, groups, workers, (), self._takes())


class StoredLedger(Ledger):
    """The same, kept in a real SQLite ledger as well: what a restart or a resume reads comes from there."""

    def __init__(self, url: str) -> None:
        super().__init__()
        store.upgrade(url)
        self._engine = store.open_engine(url)
        self._connection = transaction.open_connection(self._engine)
        self._take_over()

    def _take_over(self) -> None:
        """As a daemon that starts: what the one before it left in the log of moves is folded."""
        self._generation = transaction.grant_generation(self._engine, "host", 1, "test", 0.0)
        self._batch, self._moves = 0, MoveLog()

    def apply(self, records: tuple[rec.Record, ...]) -> None:
        super().apply(records)
        self._batch += 1
        now = 0.3 * self._batch  # logged moves wait for a few transactions
        plan = self._moves.plan(records, now)
        transaction.commit_batch(self._connection, self._generation, self._batch, records, now, plan)
        self._moves.done(plan, now)

    def history(self, run_id: int, after_step: int) -> tuple[rec.GroupState, ...]:
        return reader.replay_groups(self._engine, run_id, after_step)

    def payloads(self, sample_ids: list[int]) -> dict[int, Payload]:
        return reader.read_payloads(self._engine, sample_ids)

    def snapshot(self) -> rec.Snapshot:
        self._take_over()
        return reader.read_snapshot(self._engine)

    def close(self) -> None:
        self._connection.close()
        self._engine.dispose()


# ---------------------------------------------------------------- the bench


class Bench:
    """A core, its ledger, its mail and a clock that moves when told.

    `payload_bytes` bounds the tokens in memory: so few, by default, that most are evicted as soon as they are durable, and read back.
    """

    def __init__(self, *, auto: bool = True, limits: Limits | None = None, payload_bytes: int = 2_000) -> None:
        self.limits = limits or Limits()
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
            assert len(payload[0]) // 4 >= wanted[sample_id], f"sample {sample_id}: evicted before it was durable"
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
        self.handle(HistoryRead(ask.run_id, ask.attempt, self.ledger.history(ask.run_id, ask.after_step)))

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
            self.handle(Tick())
        if not seconds:
            self.handle(Tick())

    def take(self, conn: int, kind: type[M]) -> list[M]:
        """Messages of a kind that came for a connection since the last look."""
        box = self.mail.get(conn, [])
        found = [m for m in box if isinstance(m, kind)]
        self.mail[conn] = [m for m in box if not isinstance(m, kind)]
        return found

    # ---- the trainer

    def call(self, body: CallBody, *, attempt: int | None = None, conn: int | None = None, who: Identity = OWNER) -> ReplyBody | None:
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
        self, step: int = 1, version: int = 1, groups: tuple[GroupSpec, ...] | None = None, purpose: str = "train"
    ) -> ReplyBody | None:
        return self.call(SubmitGroups(step, version, purpose, specs(1) if groups is None else groups))

    def attach(self, have: tuple[int, ...] = (), wants: tuple[int, ...] = (), conn: int | None = None) -> ReplyBody | None:
        self.trainer = conn or self.trainer
        return self.call(Attach("r", have, wants))

    def commit_step(
        self, step: int, samples: list[int], version: int = 1, outcome: str = "consumed", purpose: str = "train"
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
        **other: object,
    ) -> None:
        intent = intent or f"job{conn}"
        who = Identity("worker", f"key-{intent}", "r", intent) if kind == "harvested" else OWNER
        greeting = {
            "protocol": PROTOCOL, "kind": kind, "run": "r", "session": session or f"s{conn}", "incarnation": incarnation,
            "job_id": conn, "node": node or f"n{conn}", "gpus": 1, "engine": "reference", "code_version": "0", "pid": 1,
            "loaded_version": loaded, "held": held,
        }  # fmt: skip
        self.handle(HelloReceived(conn, who, WorkerHello(**(greeting | other))))  # type: ignore[arg-type]

    def say(self, conn: int, message: Message) -> None:
        self.handle(checked(conn, message))

    def join(self, conn: int, version: int = 1, **how: object) -> list[Lease]:
        """A worker greets and loads; returns the leases that it is given."""
        self.hello(conn, **how)  # type: ignore[arg-type]
        self.say(conn, WeightsLoaded(version, root(version)))
        return self.leases(conn)

    def leases(self, conn: int) -> list[Lease]:
        from scavenger.wire import Assign

        return [lease for m in self.take(conn, Assign) for lease in m.leases]

    def chunk(self, conn: int, lease: Lease, offset: int, n: int, finish: str | None = None) -> None:
        self.say(conn, Chunks((chunk_of(lease.sample_id, lease.epoch, lease.version, offset, n, finish),)))

    def sample(self, sample_id: int):  # type: ignore[no-untyped-def]
        return self.router.core.samples[sample_id]

    def events(self, kind: str) -> list[rec.Event]:
        return [e for e in self.ledger.events if e.kind == kind]


def started(*, auto: bool = True, prompts: int = 1, n: int = 2, max_tokens: int = 8, **options: object) -> Bench:
    """A bench whose run is open, has version 1 published and step 1 submitted."""
    bench = Bench()
    bench.open(**options)
    bench.publish()
    bench.submit(groups=specs(prompts, n, max_tokens))
    bench.auto = auto
    return bench
