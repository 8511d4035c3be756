"""Random schedules for the router's core: workers that join, crash, stall and repeat themselves, a trainer that is killed and resumes,
a daemon that is restarted, a disk that is slow, and messages that get lost. Everything is drawn from one seed.

`run(seed, events)` plays a schedule, then calms the world and demands that every submitted step gets done. What the core sends is
checked as it is sent against the ledger that commits made (I2); what it commits is checked by `harness.Ledger` (I1, I3).
A failure names its seed and keeps the log of events: `replay` feeds them to a fresh core.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from scavenger.router.events import Committed, HistoryRead, JobGone, RouterAction, RouterEvent, Send
from scavenger.router.machine import Router
from scavenger.router.state import Limits
from scavenger.wire import (
    Ack,
    Asleep,
    Assign,
    Attach,
    Call,
    CallBody,
    Chunk,
    Chunks,
    CommitStep,
    Denied,
    Drain,
    Goodbye,
    GoodbyeAck,
    GroupDone,
    Heartbeat,
    HeartbeatAck,
    Held,
    HelloAgain,
    Lease,
    Message,
    OpenRun,
    Ping,
    PublishVersion,
    Rejected,
    Reply,
    Revoke,
    RunOpened,
    SampleOutcome,
    SetReserved,
    Sleep,
    SubmitGroups,
    UseWeights,
    Wake,
    WeightsFailed,
    WeightsLoaded,
    Welcome,
)
from tests.router.harness import OWNER, SOURCE, Bench, Ledger, chunk_of, open_body, payload, root, specs

MAX_TOKENS = 8
PROMPTS, N = 3, 2
NODES = ("n0", "n1", "n2", "n3")


def goal(sample_id: int) -> int:
    """Length of a sample's whole answer."""
    return 1 + (sample_id * 5) % MAX_TOKENS


def finish_at(sample_id: int, length: int) -> str | None:
    if length < goal(sample_id):
        return None
    return "length" if length == MAX_TOKENS else "stop"


class WatchedBench(Bench):
    """A bench that keeps every event for a replay and holds each message to what is durable when it is sent."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        super().__init__(auto=False, limits=Limits())
        self.ledger = ledger or self.ledger
        self.log: list[tuple[float, RouterEvent | str]] = []

    def handle(self, event: RouterEvent) -> list[RouterAction]:
        self.log.append((self.now, event))
        return super().handle(event)

    def restart(self) -> None:
        self.log.append((self.now, "restart"))
        super().restart()

    def perform(self, actions: list[RouterAction]) -> None:
        actions = self.filled(actions)
        for action in actions:
            if isinstance(action, Send):
                self._promised(action.message)
        super().perform(actions)

    def _promised(self, message: Message) -> None:
        rows = self.ledger.samples
        match message:
            case Ack(durable=durable):
                for held in durable:
                    assert held.length * 4 <= len(rows[held.sample_id].tokens), f"sample {held.sample_id}: acked before its commit (I2)"
            case Assign(leases=leases):
                for lease in leases:
                    row = rows[lease.sample_id]
                    assert lease.epoch <= row.epoch, f"sample {lease.sample_id}: leased before its commit (I2)"
                    assert row.tokens[: len(lease.accepted)] == lease.accepted
                    if lease.epoch == row.epoch and row.lease is not None:
                        mine = payload(lease.sample_id, 0, len(lease.accepted) // 4)[0]
                        granted_at = next(
                            r.offset for r in reversed(self.ledger.log)
                            if type(r).__name__ == "LeaseGranted" and (r.sample_id, r.epoch) == (lease.sample_id, lease.epoch)  # type: ignore[attr-defined]
                        )  # fmt: skip
                        assert lease.accepted == mine, f"sample {lease.sample_id}: moved without its own tokens (I6)"
                        assert len(lease.accepted) == 4 * granted_at, f"sample {lease.sample_id}: moved without its own tokens (I6)"
            case GroupDone(samples=samples):
                for done in samples:
                    row = rows[done.sample_id]
                    assert row.state == "complete", f"sample {done.sample_id}: delivered while {row.state} in the ledger (I2)"
                    assert (row.tokens, row.logprobs, row.finish) == (done.tokens, done.logprobs, done.finish)
            case Reply(body=RunOpened(attempt=attempt)):
                assert self.ledger.runs[1]["attempt"] == attempt, "an attempt was answered before its commit (I2)"


# ---------------------------------------------------------------- workers


@dataclass
class Piece:
    """A lease as its worker has it."""

    lease: Lease
    base: int
    length: int
    durable: int
    sent: int

    @property
    def finish(self) -> str | None:
        return finish_at(self.lease.sample_id, self.length)


@dataclass
class SimWorker:
    """A worker that does what `rollout.session` does, in a few lines. `stalled` ones say nothing and may come back as zombies."""

    conn: int
    session: str
    intent: str
    incarnation: int
    node: str
    kind: str
    greeted: bool = False
    loaded: int = -1
    wanted: int = -1
    asleep: bool = False
    leaving: bool = False
    stalled: bool = False
    heard: int = 0
    held: dict[int, Piece] = field(default_factory=dict)
    old: list[Chunk] = field(default_factory=list)  # sent before: may be sent again

    def held_list(self) -> tuple[Held, ...]:
        return tuple(Held(i, p.lease.epoch, p.length) for i, p in self.held.items())


class World:
    """One schedule. `calm` switches every disturbance off."""

    def __init__(self, seed: int, ledger: Ledger | None = None) -> None:
        self.rng = random.Random(seed)
        self.bench = WatchedBench(ledger)
        self.calm = False
        self.conns = 100
        self.workers: list[SimWorker] = []
        self.intents = 0
        self.trainer = SimTrainer(self)

    def conn(self) -> int:
        self.conns += 1
        return self.conns

    def chance(self, share: float) -> bool:
        return not self.calm and self.rng.random() < share

    # ---- one event

    def step(self) -> None:
        roll = self.rng.random()
        live = [w for w in self.workers if not w.stalled]
        if roll < 0.10:
            self.bench.tick(self.rng.choice((0.1, 0.25, 0.5, 1.0)))
        elif roll < 0.24:
            self.disk()
        elif roll < 0.40:
            self.trainer.act()
        elif roll < 0.46 or not live:
            self.disturb()
        else:
            self.worker_acts(self.rng.choice(live))

    def disk(self) -> None:
        bench = self.bench
        if bench.reads and not bench.writes:
            bench.read()
        elif bench.writes:
            bench.commit(self.rng.randint(1, len(bench.writes)))

    def disturb(self) -> None:
        rng = self.rng
        kind = rng.choices(("join", "reserved", "crash", "leave", "stall", "daemon", "trainer", "break"), (8, 2, 3, 2, 2, 1, 2, 3))[0]
        victim = rng.choice(self.workers) if self.workers else None
        if kind == "join" and len(self.workers) < 6:
            self.spawn("harvested")
        elif kind == "reserved" and sum(w.kind == "reserved" for w in self.workers) < 2:
            self.spawn("reserved")
        elif kind == "daemon":
            self.bench.restart()
        elif kind == "trainer":
            self.trainer.die()
        elif victim is None:
            return
        elif kind == "crash":
            self.crash(victim)
        elif kind == "leave":
            self.leave(victim)
        elif kind == "stall":
            victim.stalled = not victim.stalled
        elif kind == "break":
            victim.conn, victim.greeted = self.conn(), False

    def spawn(self, kind: str, intent: str = "", incarnation: int = 0, node: str = "") -> None:
        if kind == "harvested" and not intent:
            self.intents += 1
            intent = f"i{self.intents}"
        conn = self.conn()
        self.workers.append(SimWorker(conn, f"s{conn}", intent, incarnation, node or self.rng.choice(NODES), kind))

    def crash(self, worker: SimWorker) -> None:
        """Without a word. Its job may be requeued; the scheduler may say so before or after, or never."""
        self.workers.remove(worker)
        if worker.kind != "harvested":
            return
        if self.rng.random() < 0.5:
            self.bench.handle(JobGone(worker.intent, worker.incarnation, "PREEMPTED", False))
        if self.rng.random() < 0.6:
            self.spawn("harvested", worker.intent, worker.incarnation + 1, worker.node)

    def leave(self, worker: SimWorker) -> None:
        if not worker.greeted or worker.stalled:
            return
        self.flush(worker)
        worker.leaving = True
        self.bench.say(worker.conn, Goodbye("SIGTERM", True))

    # ---- a worker's turn

    def worker_acts(self, worker: SimWorker) -> None:
        self.read_mail(worker)
        if worker not in self.workers:
            return
        if not worker.greeted:
            self.greet(worker)
            return
        roll = self.rng.random()
        if roll < 0.25:
            self.heartbeat(worker)
        elif worker.wanted >= 0 and worker.wanted != worker.loaded:
            self.load(worker)
        elif worker.held and not worker.asleep and not worker.leaving:
            self.generate(worker)
        if worker.old and self.chance(0.06):
            self.bench.say(worker.conn, Chunks((self.rng.choice(worker.old),)))  # a duplicate, or a zombie's
        if worker.held and self.chance(0.02):
            self.lie(worker)

    def greet(self, worker: SimWorker) -> None:
        if worker.kind == "reserved":
            self.bench.hello(
                worker.conn, session=worker.session, kind="reserved", node=worker.node, held=worker.held_list(), loaded=worker.loaded,
                leaving=worker.leaving,
            )  # fmt: skip
        else:
            self.bench.hello(
                worker.conn, session=worker.session, intent=worker.intent, incarnation=worker.incarnation, node=worker.node,
                held=worker.held_list(), loaded=worker.loaded, leaving=worker.leaving,
            )  # fmt: skip

    def load(self, worker: SimWorker) -> None:
        if self.chance(0.1):
            worker.wanted, failed = -1, worker.wanted
            self.bench.say(worker.conn, WeightsFailed(failed, "the network broke"))
            return
        worker.loaded = worker.wanted
        self.bench.say(worker.conn, WeightsLoaded(worker.loaded, self.root_of(worker.loaded)))

    def root_of(self, version: int) -> bytes:
        return next(v.root for r in self.bench.router.core.runs.values() for v in r.versions.values() if v.version == version)

    def generate(self, worker: SimWorker) -> None:
        for piece in list(worker.held.values()):
            if piece.finish is None and self.rng.random() < 0.7:
                piece.length += self.rng.randint(1, min(3, goal(piece.lease.sample_id) - piece.length))
        if self.rng.random() < 0.8:
            self.flush(worker)

    def flush(self, worker: SimWorker) -> None:
        chunks = []
        for piece in worker.held.values():
            n = piece.length - piece.sent
            if n:
                lease = piece.lease
                chunks.append(chunk_of(lease.sample_id, lease.epoch, lease.version, piece.sent, n, piece.finish))
                piece.sent = piece.length
        worker.old += chunks
        if chunks:
            self.bench.say(worker.conn, Chunks(tuple(chunks)))

    def lie(self, worker: SimWorker) -> None:
        """What no honest worker sends: it must change nothing."""
        piece = self.rng.choice(list(worker.held.values()))
        lease = piece.lease
        rows = self.bench.ledger.samples[lease.sample_id]
        before = len(rows.tokens)
        chunk = self.rng.choice(
            (
                chunk_of(lease.sample_id, lease.epoch - 1, lease.version, before // 4, 1),
                chunk_of(lease.sample_id, lease.epoch, lease.version + 1, before // 4, 1),
                chunk_of(lease.sample_id, lease.epoch, lease.version, piece.sent, MAX_TOKENS + 1),
            )
        )
        accepted = {i: s.accepted for i, s in self.bench.router.core.samples.items()}
        self.bench.say(worker.conn, Chunks((chunk,)))
        now = {i: s.accepted for i, s in self.bench.router.core.samples.items()}
        assert now == accepted, f"sample {lease.sample_id}: a chunk that must be refused was accepted (I1, I5)"

    def heartbeat(self, worker: SimWorker) -> None:
        if self.rng.random() < 0.3:
            for piece in worker.held.values():
                piece.sent = piece.durable
        self.flush(worker)
        self.bench.say(worker.conn, Heartbeat(worker.held_list(), 0, worker.loaded, heard=worker.heard))

    def read_mail(self, worker: SimWorker) -> None:
        box = self.bench.mail.pop(worker.conn, [])
        for message in box:
            if not self.chance(0.03) or isinstance(message, Welcome):
                self.hear(worker, message)

    def hear(self, worker: SimWorker, message: Message) -> None:
        match message:
            case Welcome():
                worker.greeted, worker.heard = True, 0
                for piece in worker.held.values():
                    piece.sent = piece.durable
                if worker.leaving:
                    self.bench.say(worker.conn, Goodbye("SIGTERM", True))
            case HelloAgain():
                worker.greeted = False
            case HeartbeatAck(number=number):
                worker.heard = number
            case Rejected(retry=retry):
                worker.greeted = False
                if not retry and worker in self.workers:
                    self.workers.remove(worker)
            case GoodbyeAck() if worker in self.workers:
                self.workers.remove(worker)
            case Drain() if not worker.leaving:
                self.leave(worker)
            case UseWeights(version=version):
                if version == worker.loaded:
                    self.bench.say(worker.conn, WeightsLoaded(version, self.root_of(version)))
                elif version != worker.wanted or worker.loaded != -1:
                    worker.held = {i: p for i, p in worker.held.items() if p.finish is not None}
                    worker.wanted, worker.loaded = version, -1
            case Assign(leases=leases):
                for lease in leases:
                    self.assigned(worker, lease)
            case Revoke(leases=leases):
                for sample_id, epoch in leases:
                    if sample_id in worker.held and worker.held[sample_id].lease.epoch == epoch:
                        del worker.held[sample_id]
            case Ack(durable=durable):
                for held in durable:
                    piece = worker.held.get(held.sample_id)
                    if piece is not None and piece.lease.epoch == held.epoch:
                        piece.durable = max(piece.durable, min(held.length, piece.length))
                        piece.sent = max(piece.sent, piece.durable)
                        if piece.finish is not None and piece.durable == piece.length:
                            del worker.held[held.sample_id]
            case Sleep():
                self.flush(worker)
                worker.held, worker.asleep = {}, True
                self.bench.say(worker.conn, Asleep())
            case Wake():
                worker.asleep = False

    def assigned(self, worker: SimWorker, lease: Lease) -> None:
        known = worker.held.get(lease.sample_id)
        if worker.leaving or worker.asleep or lease.version != worker.loaded or (known is not None and known.lease.epoch >= lease.epoch):
            return
        base = len(lease.accepted) // 4
        worker.held[lease.sample_id] = Piece(lease, base, base, base, base)

    # ---- the end

    def make_calm(self) -> None:
        """No more trouble: stalled workers end, those that are left must do, nothing is lost any more."""
        self.calm = True
        for worker in [w for w in self.workers if w.stalled or w.leaving]:
            self.workers.remove(worker)
        if not any(w.kind == "harvested" for w in self.workers):
            self.spawn("harvested")
        for _ in range(600):
            if self.trainer.satisfied():
                self.bench.settle()
                self.audit_groups()
                return
            self.bench.settle()
            self.trainer.act()
            for worker in list(self.workers):
                self.worker_acts(worker)
                if worker in self.workers and worker.greeted:
                    self.heartbeat(worker)
            self.bench.tick(0.25)
        lost = [(s.id, str(s.status), s.worker_id) for s in self.bench.router.core.samples.values() if not s.done]
        raise AssertionError(f"the run does not go on: {self.trainer}, open samples {lost}, workers {self.workers}")


    def audit_groups(self) -> None:
        """Each prompt of a step has one group that stands (I3), and its takes are numbered without a gap or a repeat."""
        ledger = self.bench.ledger
        standing: dict[tuple[int, int], list[int]] = {}
        takes: dict[tuple[int, int], list[int]] = {}
        for group_id, made in sorted(ledger.groups.items()):
            key = (made.step, made.prompt_index)
            states = {ledger.samples[made.first_sample_id + i].state for i in range(made.n)}
            standing.setdefault(key, []).extend([group_id] if states != {"superseded"} else [])
            takes.setdefault(key, []).append(made.take)
        for key, numbers in takes.items():
            assert numbers == list(range(len(numbers))), f"step and prompt {key}: takes {numbers}"
        for (step, prompt), groups in standing.items():
            least = 1 if step < self.trainer.step else 0
            assert least <= len(groups) <= 1, f"step {step}, prompt {prompt}: groups {groups} stand (I3)"


# ---------------------------------------------------------------- the trainer


class SimTrainer:
    """Takes steps: publish, submit, collect, commit; now and then a checkpoint. Killed, it resumes from one, with equal weights or not."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.attempt = 0
        self.conn = world.conn()
        self.salt = 0
        self.checkpoint = 0
        self.job = 0
        self.steps_done = 0
        self.goal: int | None = None
        self.reset()

    def __repr__(self) -> str:
        return f"attempt {self.attempt} step {self.step} awaits {self.pending} submitted {self.submitted} have {sorted(self.have)}"

    def reset(self) -> None:
        self.step = self.checkpoint + 1
        self.version = 0
        self.next_version = 1
        self.have: dict[int, GroupDone] = {}
        self.seen: set[tuple[int, int]] = set()  # (connection, group): nothing comes twice over one connection
        self.submitted: tuple[int, ...] = ()
        self.phase = "open"
        self.pending: tuple[int, CallBody] | None = None
        self.published: PublishVersion | None = None
        self.reserved: SetReserved | None = None
        self.waited = 0
        self.attempt = 0
        self.committing = False

    def root(self) -> bytes:
        return root(1000 * self.salt + self.step)

    def satisfied(self) -> bool:
        if self.goal is None:
            self.goal = self.step + 2 if self.phase != "open" else None
        return self.goal is not None and self.step >= self.goal

    def die(self) -> None:
        """Killed; its successor resumes from the last checkpoint, with the same weights or, now and then, others."""
        self.job += 1
        if self.world.rng.random() < 0.3:
            self.salt += 1
        self.conn = self.world.conn()
        self.reset()

    def call(self, body: CallBody) -> None:
        bench = self.world.bench
        bench.call_id += 1
        self.pending, self.waited = (bench.call_id, body), 0
        self.send(bench.call_id, body)
        if self.world.chance(0.1):
            self.send(bench.call_id, body)  # twice

    def send(self, call_id: int, body: CallBody) -> None:
        from scavenger.router.events import TrainerCalled

        if not self.world.chance(0.03):
            attempt = 0 if isinstance(body, OpenRun) else self.attempt
            self.world.bench.handle(TrainerCalled(self.conn, OWNER, Call(call_id, "r", attempt, body)))

    def recover(self) -> None:
        """Connect again, as the client does."""
        self.conn = self.world.conn()
        bodies: list[CallBody] = []
        if self.attempt:
            bodies = [Attach("r", tuple(self.have), tuple(set(self.submitted) - set(self.have)))]
            bodies += [b for b in (self.published, self.reserved) if b is not None]
        bench = self.world.bench
        for body in bodies:
            bench.call_id += 1
            self.send(bench.call_id, body)
        if self.pending is not None:
            self.call(self.pending[1])

    def act(self) -> None:
        self.read()
        if self.pending is not None:
            self.waited += 1
            if self.waited > 12:
                self.recover()
            return
        if self.world.chance(0.05):
            self.reserved = SetReserved(self.world.rng.random() < 0.5)
            self.call(self.reserved)
            return
        groups = specs(PROMPTS, N, MAX_TOKENS)
        if self.phase == "open":
            self.call(open_body(self.checkpoint, job_id=self.job))
        elif self.phase == "publish":
            self.call(PublishVersion(self.next_version, self.step - 1, self.root(), b"m", (SOURCE,)))
        elif self.phase == "submit":
            self.call(SubmitGroups(self.step, self.version, "train", groups))
        elif len(self.have) == len(self.submitted):
            done = [s.sample_id for g in self.have.values() for s in g.samples]
            self.call(CommitStep(self.step, self.version, "train", tuple(SampleOutcome(i, "consumed", 1.0, 0.1) for i in done), {}))
        else:
            self.call(Ping())
            self.idle = getattr(self, "idle", 0) + 1
            if self.idle % 25 == 0:
                self.recover()  # groups may have been lost on their way

    def read(self) -> None:
        for message in self.world.bench.mail.pop(self.conn, []):
            if self.world.chance(0.02):
                continue
            if isinstance(message, GroupDone):
                self.arrived(message)
            elif isinstance(message, HelloAgain):
                self.recover()
                return
            elif isinstance(message, Reply) and self.pending is not None and message.id == self.pending[0]:
                body, self.pending = self.pending[1], None
                self.answered(body, message.body)

    def arrived(self, group: GroupDone) -> None:
        assert (self.conn, group.group_id) not in self.seen, f"group {group.group_id} came twice over one connection"
        self.seen.add((self.conn, group.group_id))
        assert group.step == self.step or not self.submitted, f"group {group.group_id} of step {group.step} in step {self.step}"
        for sample in group.samples:
            n = goal(sample.sample_id)
            want = payload(sample.sample_id, 0, n)
            assert (sample.tokens, sample.logprobs, sample.raw_logprobs) == want, f"sample {sample.sample_id} has others' tokens"
            assert sample.finish == finish_at(sample.sample_id, n)
        made = self.world.bench.ledger.groups[group.group_id]
        made_with = next(v.root for v in self.world.bench.ledger.versions if v.version == made.version)
        assert made_with == self.root(), f"group {group.group_id} was generated by other weights (I3)"
        self.have[group.group_id] = group

    def answered(self, body: CallBody, answer: Message) -> None:
        denied = isinstance(answer, Denied)
        assert not denied or answer.code in ("stale", "unknown-run", "detached"), answer  # type: ignore[union-attr]
        if denied:
            if answer.code == "detached":  # type: ignore[union-attr]
                self.recover()
            elif self.attempt or answer.code == "stale":  # type: ignore[union-attr]
                self.die()  # fenced by a repeat of its own opening, or opened on a daemon that forgot the run
            return
        match body:
            case OpenRun():
                assert isinstance(answer, RunOpened)
                self.attempt, self.next_version, self.phase = answer.attempt, answer.next_version, "publish"
            case PublishVersion():
                self.version, self.next_version, self.published, self.phase = body.version, body.version + 1, body, "submit"
            case SubmitGroups():
                self.submitted, self.phase = answer.group_ids, "collect"  # type: ignore[union-attr]
                self.have = {i: g for i, g in self.have.items() if i in self.submitted}
            case CommitStep():
                if self.world.rng.random() < 0.3:
                    self.checkpoint = self.step
                self.step, self.phase = self.step + 1, "publish"
                self.have, self.submitted = {}, ()
                self.steps_done += 1
            case _:
                pass


# ---------------------------------------------------------------- running and replaying


class Failed(AssertionError):
    """A schedule that broke an invariant: its seed, and the log that `replay` takes."""

    def __init__(self, seed: int, log: list[tuple[float, RouterEvent | str]], cause: BaseException) -> None:
        super().__init__(f"seed {seed} after {len(log)} events: {type(cause).__name__}: {cause}")
        self.seed, self.log = seed, log


def run(seed: int, events: int = 200, ledger: Ledger | None = None) -> World:
    """Play one schedule, over a ledger in memory unless another is given; raises `Failed`."""
    world = World(seed, ledger)
    try:
        for _ in range(events):
            world.step()
        world.make_calm()
    except Exception as error:
        raise Failed(seed, world.bench.log, error) from error
    return world


def replay(log: list[tuple[float, RouterEvent | str]]) -> Router:
    """Feed a log to a fresh core, commits and restarts where they were; raises what the schedule raised."""
    bench = WatchedBench()
    for now, event in log:
        bench.now = now
        if isinstance(event, str):
            bench.restart()
            continue
        if isinstance(event, Committed):
            while bench.writes and bench.writes[0].ticket <= event.ticket:
                bench.ledger.apply(bench.writes.pop(0).records)
        elif isinstance(event, HistoryRead):
            bench.reads.pop(0)
        bench.handle(event)
    return bench.router
