"""What lies between the processes of a simulated site: daemons on one ledger, their disk, connections, clocks. `world` adds the rest."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from scavenger.policy.agreement import AgreementRules
from scavenger.protocol.messages import (
    Assign,
    Call,
    Chunks,
    Denied,
    Drain,
    GroupDone,
    Message,
    OpenRun,
    Reply,
    Revoke,
    SiblingTokens,
    Sleep,
    UseWeights,
    Wake,
    WeightSource,
    WorkerHello,
)
from scavenger.protocol.worker import events as ev
from scavenger.router.core import audit
from scavenger.router.core.events import (
    Committed,
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
from scavenger.router.core.state import RouterLimits
from scavenger.router.edge.pipeline import checked, lacking
from tests.router import blocks
from tests.router.blocks import KeptBlocks
from tests.router.checks import Truth, Watch
from tests.router.coverage import Coverage
from tests.router.engines import SimWorker
from tests.router.harness import Bench
from tests.router.links import Link
from tests.router.memory_ledger import Ledger
from tests.router.trainers import Campaign, SimTrainer

Op = list[Any]
#: Steps are of a few samples, and what is wrong is wrong by far.
LIMITS = RouterLimits(stalled_s=300.0, agreement=AgreementRules(samples=2, tokens=2, peers=2, z=4.0))
ORDERS = (UseWeights, Sleep, Wake, Drain, Assign, Revoke)
POISON = {"r": "stop", "q": "mask", "p": "stop"}


class Daemon(Bench):
    """A daemon of the world: sends into its links, and is watched. A stalled one that was superseded commits nothing any more."""

    def __init__(self, world: Site, generation: int) -> None:
        super().__init__(auto=False, limits=world.limits)
        self.world, self.ledger, self.generation = world, world.truth.ledger, generation
        self.watch = Watch(world.truth)
        self.answers: list[int] = []
        self.fenced = False

    def handle(self, event: RouterEvent) -> list[RouterAction]:
        core = self.router.core
        if self.fenced and (needed := lacking(core, self.store, event)):
            self._load(needed)
            if lacking(core, self.store, event):
                return []  # its successor's tokens are in the ledger: it finds none that fit its own, waits with this, and ends
        before = self.world.cover.workers_before(core)
        actions = super().handle(event)
        self.world.events += 1
        self.world.cover.workers_after(self.router.core, before)
        if not self.fenced:
            self.watch.after(self.router.core, event)
        return actions

    def perform(self, actions: list[RouterAction]) -> None:
        for action in self.filled(actions):
            match action:
                case Send(conn=conn, message=message):
                    self.watch.promised(conn, message)
                    if isinstance(message, GroupDone):
                        self._delivered(conn, message)
                    link = self.world.links.get(conn)
                    if link is not None:
                        self.world.truth.apart.sent(link.who, message)
                    if link is not None and not link.old:
                        link.down.append(message)
                        if isinstance(message, SiblingTokens):
                            self.world.note_told(link, message)
                case Write():
                    self.writes.append(action)
                case ReadHistory():
                    self.reads.append(action)

    def _delivered(self, conn: int, group: GroupDone) -> None:
        """What a newer attempt, or the run's end, gave up may still go to who asked for it, and to nobody else."""
        ledger = self.world.truth.ledger
        run = ledger.runs[ledger.groups[group.group_id].run_id]
        if run["ended"] or {ledger.samples[s.sample_id].state for s in group.samples}.isdisjoint(
            ("superseded", "surplus")
        ):
            return
        for trainer in self.world.trainers.values():
            fenced = trainer.link.conn != conn or trainer.attempt < run["attempt"]  # type: ignore[operator]
            assert fenced, (
                f"group {group.group_id} was given up, and sent to attempt {trainer.attempt}, which stands (I3)"
            )

    def commit(self, most: int | None = None) -> None:
        """The next writes become durable; the daemon does not know it yet."""
        batch = self.writes[: most or len(self.writes)]
        del self.writes[: len(batch)]
        for write in batch:
            self.world.truth.commit(write.records)
        if batch:
            self.answers.append(batch[-1].ticket)

    def answer(self) -> None:  # type: ignore[override]  # of an oldest commit, not of a call
        if self.answers:
            self.handle(Committed(self.answers.pop(0)))

    def read(self) -> None:
        ask = self.reads.pop(0)
        groups = self.ledger.history(ask.run_id, ask.after_step)
        taken = self.ledger.taken_deliveries(ask.run_id, ask.after_step)
        ended = self.ledger.ended_episodes(ask.run_id, ask.ended_episodes)
        self.handle(HistoryRead(ask.run_id, ask.attempt, groups, (), taken, ended))

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
            self.world.cover.events["-", worker.status.value] += 1
        self.watch.restored(self.router.core)
        audit.check(self.router.core)


class Site:
    """See the module."""

    def __init__(
        self,
        cover: Coverage | None = None,
        ledger: Ledger | None = None,
        ahead: int = 0,
        switch: bool = True,
        kv: str = "recompute",
    ) -> None:
        self.cover = cover or Coverage()
        self.truth = Truth(ledger or Ledger(), ahead)
        self.limits = LIMITS
        self.ahead, self.on_new_version = ahead, "switch" if switch else "finish"
        self.kv = kv if switch else "recompute"
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
        self.rekeyed: dict[str, int] = {}  # intent -> the daemon that had it change hands last
        self.outage = self.spares = self.spawned = 0
        self.moves_kv = False

    def apply(self, op: Op) -> None:
        """Let one thing happen."""
        self.log.append(op)
        name, *args = op
        getattr(self, f"on_{name}")(*args)

    def on_speculate(self, bytes_per_s: float) -> None:
        """Daemons that begin from now on send engines their samples' siblings' tokens; so does the first, if nothing happened yet."""
        self.limits = replace(self.limits, sibling_bytes_per_s=bytes_per_s)
        if not self.events:
            self.daemon = Daemon(self, self.daemon.generation)

    def on_move_kv(self) -> None:
        """Engines that are built from now on keep the KV blocks of samples that leave them, and read what others kept."""
        self.moves_kv = True

    def read_blocks(self, source: WeightSource, number: int, fate: str) -> KeptBlocks | None:
        """What a reader finds at a holder, which is told when it has all of it."""
        holder = next((w for w in self.workers.values() if blocks.source_of(w.name) == source), None)
        if holder is None or holder.stopped:
            return None
        others = [b for w in self.workers.values() for n, b in w.kept.items() if (w, n) != (holder, number)]
        found = blocks.on_the_way(holder.kept.get(number), fate, others[-1] if others else None)
        if found is not None and holder.kept.pop(number, None) is not None:
            holder.feed(ev.KvTaken(len(holder.kept)))
        return found

    def note_told(self, link: Link, message: SiblingTokens) -> None:
        self.cover.siblings["told"] += sum(piece.count for piece in message.pieces)
        for worker in self.workers.values():
            if worker.link is link:
                worker.told.append(message)

    # ---- connections

    def open_link(self, who: PeerIdentity) -> Link:
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
            daemon.handle(checked(link.conn, message))

    def _call_up(self, daemon: Daemon, link: Link, call: Call) -> None:
        run = daemon.router.core.runs.get(call.run)
        old = run is not None and not isinstance(call.body, OpenRun) and call.attempt != run.attempt
        records = len(daemon.writes)
        actions = daemon.handle(TrainerCalled(link.conn, link.who, call))
        if old:
            denied = [
                a
                for a in actions
                if isinstance(a, Send) and isinstance(a.message, Reply) and isinstance(a.message.body, Denied)
            ]
            assert denied, (
                f"attempt {call.attempt} was fenced, and its {type(call.body).__name__} was taken (I3)"
            )
            assert len(daemon.writes) == records, (
                f"attempt {call.attempt} was fenced, and its {type(call.body).__name__} was written (I3)"
            )

    def _peer(self, name: int) -> SimWorker | SimTrainer | None:
        """A worker's or trainer's name; a stopped process neither reads nor writes."""
        worker = self.workers.get(name)
        if worker is not None:
            return None if worker.stopped else worker
        return self.trainers.get(name)

    def _hear(self, peer: SimWorker | SimTrainer, message: Message) -> None:
        if isinstance(peer, SimTrainer):
            if peer.hear(message):
                self.on_reconnect(peer.name)  # type: ignore[attr-defined]  # a World's
            return
        peer.feed(ev.Received(message))  # type: ignore[arg-type]
        self._bury(peer)  # type: ignore[attr-defined]  # a World's

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
            self.cover.fault("lost", self._kind(message := queue.popleft()))
            if link is not None and isinstance(message, Chunks):
                link.lossy = True

    def on_unordered(self, name: int, which: int) -> None:
        """An order to a worker is lost; what was sent before and after it arrives."""
        link = self._link(name)
        orders = (
            [at for at, message in enumerate(link.down) if isinstance(message, ORDERS)]
            if link is not None
            else []
        )
        if link is not None and orders:
            at = orders[which % len(orders)]
            self.cover.fault("lost", self._kind(link.down[at]))
            del link.down[at]

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
            self._worker_fault("clock jumps", name)  # type: ignore[attr-defined]  # a World's
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
        for status in {s.status for s in self.daemon.router.core.samples.values()} or [None]:
            self.cover.fault(kind, f"sample {status.value}" if status is not None else "no sample")
