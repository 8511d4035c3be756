"""One simulated site: daemons on one ledger, workers, trainers, connections, a disk. Every event is an *op*: a list of a name and plain
values, which means the same whenever it is applied; one that names what is not there does nothing. So any part of a log is a log.

The daemon's clock never goes back (the driver's is monotonic by construction) but may jump ahead; each worker has a clock of its own, which
may jump either way. Nothing here draws random numbers: `draw` does, `schedule` plays, `shrink` shortens.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from rollout import events as ev
from scavenger.router import audit
from scavenger.router.events import (
    Committed,
    HelloReceived,
    HistoryRead,
    Identity,
    IntentRevoked,
    JobGone,
    ReadHistory,
    RouterAction,
    RouterEvent,
    Send,
    TrainerCalled,
    WorkerSaid,
    Write,
)
from scavenger.router.state import Limits, WorkerStatus
from scavenger.wire import Call, Chunks, Denied, Message, OpenRun, Reply, WorkerHello
from tests.router.checks import Truth, Watch, audit_groups, audit_ledger
from tests.router.coverage import Coverage
from tests.router.engines import LIES, SimWorker, forged
from tests.router.harness import OWNER, Bench, Ledger
from tests.router.links import Link
from tests.router.trainers import Campaign, SimTrainer

Op = list[Any]
#: Half-seconds within which every run must have taken its next step once nothing disturbs: time to find out who is dead, and to work.
CALM_MOMENTS = 120
LIMITS = Limits(stalled_s=300.0)
POISON = {"r": "stop", "q": "mask"}


class Daemon(Bench):
    """A daemon of the world: sends into its links, and is watched. A stalled one that was superseded commits nothing any more."""

    def __init__(self, world: World, generation: int) -> None:
        super().__init__(auto=False, limits=LIMITS)
        self.world, self.ledger, self.generation = world, world.truth.ledger, generation
        self.watch = Watch(world.truth)
        self.answers: list[int] = []
        self.fenced = False

    def handle(self, event: RouterEvent) -> list[RouterAction]:
        before = self.world.cover.workers_before(self.router.core)
        actions = super().handle(event)
        self.world.events += 1
        self.world.cover.workers_after(self.router.core, before)
        if not self.fenced:
            self.watch.after(self.router.core, event)
        return actions

    def perform(self, actions: list[RouterAction]) -> None:
        for action in actions:
            match action:
                case Send(conn=conn, message=message):
                    self.watch.promised(conn, message)
                    link = self.world.links.get(conn)
                    if link is not None and not link.old:
                        link.down.append(message)
                case Write():
                    self.writes.append(action)
                case ReadHistory():
                    self.reads.append(action)

    def commit(self, most: int | None = None) -> None:
        """The next writes become durable; the daemon does not know it yet."""
        batch = self.writes[: most or len(self.writes)]
        del self.writes[: len(batch)]
        for write in batch:
            self.world.truth.commit(write.records)
        if batch:
            self.answers.append(batch[-1].ticket)

    def answer(self) -> None:
        if self.answers:
            self.handle(Committed(self.answers.pop(0)))

    def read(self) -> None:
        ask = self.reads.pop(0)
        self.handle(HistoryRead(ask.run_id, ask.attempt, self.ledger.history(ask.run_id, ask.after_step)))

    def settle(self) -> None:
        while self.writes or self.reads or self.answers:
            if self.writes:
                self.commit()
            elif self.answers:
                self.answer()
            else:
                self.read()

    def restart(self) -> None:
        self.watch = Watch(self.world.truth)
        self.answers = []
        super().restart()
        for worker in self.router.core.workers.values():
            self.world.cover.workers["-", worker.status.value] += 1
        self.watch.restored(self.router.core)
        audit.check(self.router.core)


class World:
    """See the module."""

    def __init__(self, cover: Coverage | None = None, ledger: Ledger | None = None) -> None:
        self.cover = cover or Coverage()
        self.truth = Truth(ledger or Ledger())
        self.links: dict[int, Link] = {}
        self.conns = 100
        self.events = 0
        self.log: list[Op] = []
        self.daemon = Daemon(self, 1)
        self.ghost: Daemon | None = None
        self.workers: dict[int, SimWorker] = {}
        self.trainers: dict[int, SimTrainer] = {}
        self.campaigns: dict[str, Campaign] = {}
        self.incarnations: dict[str, tuple[int, str, str]] = {}  # intent -> (newest incarnation, run, node)
        self.outage = self.spares = 0

    def apply(self, op: Op) -> None:
        """Let one thing happen."""
        self.log.append(op)
        name, *args = op
        getattr(self, f"on_{name}")(*args)

    # ---- connections

    def open_link(self, who: Identity) -> Link:
        self.conns += 1
        link = self.links[self.conns] = Link(self.conns, who, self.daemon.generation)
        return link

    def _rebind(self, link: Link) -> None:
        """Its connection broke below it: the daemon sees a new one, the peer does not notice."""
        self.conns += 1
        self.links.pop(link.conn, None)
        link.conn, link.generation = self.conns, self.daemon.generation
        self.links[link.conn] = link

    def _daemon_of(self, link: Link) -> Daemon | None:
        if link.generation == self.daemon.generation:
            return self.daemon
        return self.ghost if self.ghost is not None and self.ghost.generation == link.generation else None

    def _deliver_up(self, link: Link) -> None:
        message, daemon = link.up.popleft(), self._daemon_of(link)
        if daemon is None:
            return
        if isinstance(message, Call):
            self._call_up(daemon, link, message)
        elif isinstance(message, WorkerHello):
            daemon.handle(HelloReceived(link.conn, link.who, message))
        else:
            daemon.handle(WorkerSaid(link.conn, message))

    def _call_up(self, daemon: Daemon, link: Link, call: Call) -> None:
        run = daemon.router.core.runs.get(call.run)
        old = run is not None and not isinstance(call.body, OpenRun) and call.attempt != run.attempt
        records = len(daemon.writes)
        actions = daemon.handle(TrainerCalled(link.conn, link.who, call))
        if old:
            denied = [a for a in actions if isinstance(a, Send) and isinstance(a.message, Reply) and isinstance(a.message.body, Denied)]
            assert denied, f"attempt {call.attempt} was fenced, and its {type(call.body).__name__} was taken (I3)"
            assert len(daemon.writes) == records, f"attempt {call.attempt} was fenced, and its {type(call.body).__name__} was written (I3)"

    def _peer(self, name: int) -> SimWorker | SimTrainer | None:
        """A worker's or trainer's name; a stopped process neither reads nor writes."""
        worker = self.workers.get(name)
        if worker is not None:
            return None if worker.stopped else worker
        return self.trainers.get(name)

    def _hear(self, peer: SimWorker | SimTrainer, message: Message) -> None:
        if isinstance(peer, SimTrainer):
            if peer.hear(message):
                self.on_reconnect(peer.name)
            return
        peer.feed(ev.Received(message))  # type: ignore[arg-type]
        self._bury(peer)

    def on_up(self, name: int, most: int) -> None:
        """Messages of a peer arrive at the daemon. What a stopped process wrote before arrives too."""
        peer = self.workers.get(name) or self.trainers.get(name)
        if peer is not None and peer.link is not None:
            link = peer.link
            for _ in range(min(most, len(link.up))):
                self._deliver_up(link)

    def on_down(self, name: int, most: int) -> None:
        for _ in range(most):
            peer = self._peer(name)
            if peer is None or peer.link is None or not peer.link.down:
                return
            self._hear(peer, peer.link.down.popleft())

    def on_lose(self, name: int, way: str, most: int) -> None:
        link = self._link(name)
        queue: deque[Message] = (link.up if way == "up" else link.down) if link is not None else deque()
        for _ in range(min(most, len(queue))):
            self.cover.fault("lost", self._kind(queue.popleft()))

    def on_twice(self, name: int, way: str) -> None:
        link = self._link(name)
        if link is not None and (queue := link.up if way == "up" else link.down):
            if self._kind(queue[0]) == "Attach":
                return  # said once over each connection, and no connection doubles what it carries
            self.cover.fault("doubled", self._kind(queue[0]))
            queue.appendleft(queue[0])

    def on_late(self, conn: int) -> None:
        """A message arrives over a connection that its peer gave up."""
        link = self.links.get(conn)
        if link is not None and link.old and link.up:
            self.cover.fault("late", self._kind(link.up[0]))
            self._deliver_up(link)
            if not link.up:
                del self.links[conn]

    def _link(self, name: int) -> Link | None:
        peer = self.workers.get(name) or self.trainers.get(name)
        return peer.link if peer is not None else None

    @staticmethod
    def _kind(message: Message) -> str:
        return type(message.body).__name__ if isinstance(message, Call | Reply) else type(message).__name__

    # ---- time

    def on_tick(self, seconds: float) -> None:
        """Time passes for everybody; the daemon looks around."""
        for worker in self.workers.values():
            worker.clock += seconds
        if self.ghost is not None:
            self.ghost.now = self.daemon.now + seconds
        self.daemon.tick(seconds, step=max(seconds, 0.25))

    def on_jump(self, seconds: float) -> None:
        """The daemon's host slept: its clock, and nobody else's, is ahead."""
        self._sample_fault("clock of the daemon jumps")
        self.daemon.tick(seconds, step=seconds)

    def on_clock(self, name: int, seconds: float) -> None:
        if name in self.workers:
            self._worker_fault("clock jumps", name)
            self.workers[name].clock += seconds

    # ---- the disk and the daemon

    def on_commit(self, most: int) -> None:
        if self.outage:
            self.outage -= 1
        else:
            self.daemon.commit(most)

    def on_answer(self) -> None:
        self.daemon.answer()

    def on_read(self) -> None:
        if self.daemon.reads and not self.outage:
            self.daemon.read()

    def on_fail(self, times: int) -> None:
        """The disk is full, or the database away: the writer tries again."""
        if self.daemon.writes:
            self._sample_fault("commit fails")
        self.outage = times

    def on_crash(self, keep: bool) -> None:
        """The daemon is killed and started again at once. `keep`: what was under way arrives all the same."""
        daemon = self.daemon
        self._sample_fault("daemon killed")
        if daemon.writes:
            self._sample_fault("daemon killed before its commit")
        if daemon.answers:
            self._sample_fault("daemon killed before the commit's answer")
        bound = [link for link in self.links.values() if link.generation == daemon.generation]
        daemon.restart()
        for link in bound:
            self._rebind(link)
            if not keep:
                link.up.clear()
                link.down.clear()

    def on_succeed(self) -> None:
        """The daemon stops (SIGSTOP) and another takes over; it goes on later, fenced, with the connections that it had."""
        self._sample_fault("daemon superseded")
        ghost, self.ghost = self.daemon, self.daemon
        ghost.fenced = True
        self.daemon = Daemon(self, ghost.generation)
        self.daemon.now = ghost.now
        self.daemon.restart()

    def on_fence(self) -> None:
        """The old daemon tries to commit, is refused, and ends."""
        if self.ghost is not None:
            ghost, self.ghost = self.ghost, None
            for link in list(self.links.values()):
                if link.generation == ghost.generation:
                    self._rebind(link)

    def _sample_fault(self, kind: str) -> None:
        for status in {s.status for s in self.daemon.router.core.samples.values()} or {None}:
            self.cover.fault(kind, f"sample {status.value}" if status is not None else "no sample")

    # ---- jobs and workers

    def on_spawn(self, name: int, kind: str, run: str, intent: str, node: str) -> None:
        """A job starts, or is started again (requeued): one incarnation more."""
        if name in self.workers or run not in self.campaigns:
            return
        incarnation = 0
        if kind == "harvested":
            if intent in self.incarnations:
                incarnation = self.incarnations[intent][0] + 1
            self.incarnations[intent] = (incarnation, run, node)
        slot = f"slot {intent}" if kind == "reserved" else ""
        for other in [w for w in self.workers.values() if slot and (w.run, w.identity.slot) == (run, slot)]:
            self.on_kill(other.name)  # its launcher starts one engine in a slot, and another when that has ended
        me = ev.Identity(kind, run, f"s{name}", incarnation, name, node, 1, "reference", "0", 1, slot=slot)
        worker = SimWorker(name, me, intent if kind == "harvested" else "", self.daemon.now, self.cover.phase)
        self.workers[name] = worker

    def _who(self, worker: SimWorker) -> Identity:
        return Identity("worker", f"key-{worker.intent}", worker.run, worker.intent) if worker.intent else OWNER

    def on_do(self, name: int) -> None:
        """A worker's driver does the next thing that its session asked for; with nothing to do it looks at the clock."""
        worker = self.workers.get(name)
        if worker is None or worker.stopped:
            return
        if not worker.todo:
            worker.feed(ev.Tick())
        else:
            match worker.todo.popleft():
                case ev.Connect():
                    worker.link = self.open_link(self._who(worker))
                    worker.feed(ev.Connected())
                case ev.Load(weights=weights):
                    root = self._root(worker.run, weights.version)
                    worker.feed(ev.Loaded(weights.version, root, 0.1, 0.1))
                case ev.SleepEngine():
                    worker.feed(ev.Slept())
        self._bury(worker)

    def _root(self, run: str, version: int) -> bytes:
        return self.truth.roots[self.truth.runs[run], version]

    def on_trip(self, name: int) -> None:
        """The next thing that a worker's session asked for fails; with nothing to do its engine gives a request up."""
        worker = self.workers.get(name)
        if worker is None or worker.stopped:
            return
        match worker.todo[0] if worker.todo else None:
            case ev.Connect():
                self._worker_fault("daemon unreachable", name)
                worker.todo.popleft()
                worker.feed(ev.Unreachable("no daemon has announced itself"))
            case ev.Load(weights=weights):
                self._worker_fault("load fails", name)
                worker.todo.popleft()
                worker.feed(ev.LoadFailed(weights.version, "the network broke"))
            case None if worker.requests:
                self._worker_fault("request fails", name)
                worker.break_request()
        self._bury(worker)

    def on_gen(self, name: int, tokens: int) -> None:
        worker = self.workers.get(name)
        if worker is not None and not worker.stopped:
            worker.generate(tokens)

    def on_turn(self, name: int, tokens: int) -> None:
        """An undisturbed moment of a worker: it reads, does what it was asked, generates, looks at the clock, is heard."""
        if name in self.workers and not self.workers[name].stopped:
            self.on_down(name, 100)
            for _ in range(3):
                self.on_do(name)
            self.on_gen(name, tokens)
            if name in self.workers:
                self.workers[name].feed(ev.Tick())
                self._bury(self.workers[name])
            self.on_up(name, 100)

    def _bury(self, worker: SimWorker) -> None:
        """A worker that left is over; what it sent last may still arrive."""
        if worker.left is not None and worker.name in self.workers:
            del self.workers[worker.name]
            if worker.link is not None:
                worker.link.old = True

    def on_kill(self, name: int) -> None:
        """SIGKILL."""
        worker = self.workers.get(name)
        if worker is not None:
            self._worker_fault("killed", name)
            worker.left = ev.Leave(0, "killed")
            self._bury(worker)

    def on_term(self, name: int) -> None:
        self._end(name, "SIGTERM", ev.Terminate("SIGTERM"))

    def on_die(self, name: int) -> None:
        self._end(name, "engine dies", ev.EngineDied("out of memory"))

    def _end(self, name: int, kind: str, event: ev.Event) -> None:
        worker = self.workers.get(name)
        if worker is not None and not worker.stopped:
            self._worker_fault(kind, name)
            worker.feed(event)
            self._bury(worker)

    def on_stop(self, name: int) -> None:
        """SIGSTOP: it says nothing, and what was sent to it waits."""
        if name in self.workers and not self.workers[name].stopped:
            self._worker_fault("stopped", name)
            self.workers[name].stopped = True

    def on_cont(self, name: int) -> None:
        if name in self.workers and self.workers[name].stopped:
            self._worker_fault("goes on", name)
            self.workers[name].stopped = False

    def on_cut(self, name: int, lost: bool) -> None:
        """A worker's connection breaks and is made again below its session. `lost`: with all that was under way."""
        link = self.workers[name].link if name in self.workers else None
        if link is not None and link.generation == self.daemon.generation:
            self._worker_fault("connection lost", name)
            self._rebind(link)
            if lost:
                link.up.clear()
                link.down.clear()

    def on_again(self, name: int, which: int) -> None:
        """A worker repeats what it sent long ago."""
        worker = self.workers.get(name)
        if worker is not None and worker.link is not None and worker.said:
            self._worker_fault("old chunks again", name)
            worker.link.up.append(worker.said[which % len(worker.said)])

    def on_lie(self, name: int, kind: int) -> None:
        """A worker forges a chunk: nothing may be accepted of it (I1, I4, I5)."""
        worker = self.workers.get(name)
        core = self.daemon.router.core
        if worker is None or worker.link is None or worker.link.generation != self.daemon.generation:
            return
        held = next((h for h in worker.session.work.held() if h.sample_id in core.samples), None)
        if held is None:
            return
        sample = core.samples[held.sample_id]
        if LIES[kind] == "another answer" and not sample.accepted:
            return
        self._worker_fault(f"lies: {LIES[kind]}", name)
        chunk = forged(LIES[kind], sample.id, held.epoch, sample.lease_version, sample.accepted)
        before = {i: s.accepted for i, s in core.samples.items()}
        self.daemon.handle(WorkerSaid(worker.link.conn, Chunks((chunk,))))
        after = {i: s.accepted for i, s in core.samples.items()}
        assert after == before, f"sample {sample.id}: a chunk with {LIES[kind]} was accepted (I1, I4, I5)"

    def on_gone(self, intent: str, incarnation: int, reason: str, crashed: bool) -> None:
        """The scheduler says that a job's incarnation is over: soon, late, or while its process still runs."""
        if intent in self.incarnations and incarnation <= self.incarnations[intent][0]:
            self._intent_fault(f"scheduler: {reason}", intent)
            self.daemon.handle(JobGone(intent, incarnation, reason, crashed))

    def on_revoke(self, intent: str) -> None:
        if intent in self.incarnations:
            self._intent_fault("given back", intent)
            self.daemon.handle(IntentRevoked(intent, "other users wait"))

    def _intent_fault(self, kind: str, intent: str) -> None:
        states = [w.status.value for w in self.daemon.router.core.workers.values() if w.intent_id == intent]
        self.cover.fault(kind, f"worker {states[0]}" if states else "worker unknown")

    def _worker_fault(self, kind: str, name: int) -> None:
        session = f"s{name}"
        found = next((w.status.value for w in self.daemon.router.core.workers.values() if w.session == session), "unknown")
        self.cover.fault(kind, f"worker {found}")

    # ---- trainers

    def on_train(self, name: int, run: str, back: int, other: bool) -> None:
        """A trainer of a run starts: the first, or one more, from a checkpoint; `other`: its weights come out different."""
        if name in self.trainers:
            return
        campaign = self.campaigns.setdefault(run, Campaign(run, POISON[run]))
        alive = [t for t in self.trainers.values() if t.campaign is campaign and not t.dead]
        for one in alive:
            self.cover.fault("second trainer", f"trainer {one.phase}")
        kept = campaign.kept
        resume = kept[max(len(kept) - 1 - back, 0)]
        if resume != kept[-1]:
            self.cover.fault("resumed from an older checkpoint", "trainer open")
        campaign.kept = [step for step in kept if step <= resume]  # later ones are set aside
        campaign.salt += other
        self.trainers[name] = SimTrainer(name, campaign, resume, self.open_link(OWNER), self.truth)

    def on_act(self, name: int) -> None:
        trainer = self.trainers.get(name)
        if trainer is not None and trainer.act():
            self.on_reconnect(name)

    def on_move(self, name: int) -> None:
        """An undisturbed moment of a trainer."""
        self.on_down(name, 100)
        self.on_act(name)
        self.on_up(name, 100)

    def on_reconnect(self, name: int) -> None:
        trainer = self.trainers.get(name)
        if trainer is not None and not trainer.dead:
            self.cover.fault("trainer connects again", f"trainer {trainer.phase}")
            trainer.connected(self.open_link(OWNER))

    def on_tkill(self, name: int) -> None:
        trainer = self.trainers.pop(name, None)
        if trainer is not None:
            self.cover.fault("trainer killed", f"trainer {trainer.phase}")
            trainer.link.old = True

    def on_checkpoint(self, name: int) -> None:
        if name in self.trainers:
            self.trainers[name].checkpoint()

    def on_reserved(self, name: int, awake: bool) -> None:
        trainer = self.trainers.get(name)
        if trainer is not None and trainer.attempt and not trainer.dead:
            trainer.set_reserved(awake)

    def on_close(self, name: int) -> None:
        trainer = self.trainers.get(name)
        if trainer is not None and not trainer.dead:
            self.cover.fault("run closed", f"trainer {trainer.phase}")
            trainer.close()

    def on_serve(self, moments: int) -> None:
        """Nothing goes wrong for some moments: everybody works."""
        for _ in range(moments):
            self._calm_moment(1, 0.25)

    # ---- the end

    def make_calm(self, alone: bool) -> None:
        """No more trouble: what is left must take every run's next step. `alone`: without a single harvested engine (I11)."""
        self.outage = 0
        self.on_fence()
        for worker in list(self.workers.values()):
            if worker.stopped or worker.session._leaving is not None or (alone and worker.intent):
                self.on_kill(worker.name)
        goals: dict[str, int] = {}
        for moment in range(CALM_MOMENTS):
            self._staff("reserved" if alone else "harvested")
            self._revive(goals, awake=alone)
            if len(goals) == len(self.campaigns) and all(self._step(run) >= goal for run, goal in goals.items()) and self._all_serve():
                self._audit()
                self.cover.moments = max(self.cover.moments, moment)
                return
            self._calm_moment()
        raise AssertionError(f"a run does not go on, or an engine serves nobody (I6)\n{self._standstill()}")

    def _staff(self, kind: str) -> None:
        for run in self.campaigns:
            if not any(w.run == run and w.identity.kind == kind for w in self.workers.values()):
                self.spares += 1
                self.on_spawn(8_000_000 + self.spares, kind, run, f"calm-{run}", "calm")

    def _calm_moment(self, tokens: int = 4, seconds: float = 0.5) -> None:
        daemon = self.daemon
        daemon.settle()
        for name in list(self.trainers):
            self.on_move(name)
        daemon.settle()
        for name in list(self.workers):
            self.on_turn(name, tokens)
        for link in [link for link in self.links.values() if link.old and not link.up]:
            del self.links[link.conn]
        self.on_tick(seconds)

    def _revive(self, goals: dict[str, int], *, awake: bool) -> None:
        for run, campaign in self.campaigns.items():
            mine = [t for t in self.trainers.values() if t.campaign is campaign and not t.dead and t.phase != "over"]
            if not mine:
                self.spares += 1
                self.on_train(9_000_000 + self.spares, run, 0, False)
            elif len(mine) == 1 and mine[0].attempt and run not in goals:
                goals[run] = mine[0].step + 1
                if awake or mine[0].reserved is not None:
                    mine[0].set_reserved(True)

    def _all_serve(self) -> bool:
        """Whether the core counts on every process that is there: ready to generate, or asleep as asked."""
        status = {w.session: w.status for w in self.daemon.router.core.workers.values()}
        useful = (WorkerStatus.READY, WorkerStatus.ASLEEP)
        return all(status.get(w.identity.session) in useful for w in self.workers.values())

    def _step(self, run: str) -> int:
        return max((t.step for t in self.trainers.values() if t.campaign.run == run and not t.dead), default=0)

    def _audit(self) -> None:
        self.daemon.settle()
        for run, campaign in self.campaigns.items():
            assert campaign.run == run
            audit_groups(self.truth.ledger, self.truth.runs[run], self._step(run))
        audit_ledger(self.truth)

    def _standstill(self) -> str:
        open_samples = [(s.id, s.status.value, s.worker_id) for s in self.daemon.router.core.samples.values() if not s.done]
        trainers = [(t.name, t.phase, t.step, t.dead, t.pending) for t in self.trainers.values()]
        core = self.daemon.router.core
        workers = [(w.session, w.status.value, w.loaded_version, w.asked_version, sorted(w.leases)) for w in core.workers.values()]
        return f"open samples {open_samples}\ntrainers {trainers}\nthe core's workers {workers}\nworkers {sorted(self.workers)}"
