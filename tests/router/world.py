"""One simulated site: daemons on one ledger, workers, trainers, connections, a disk. Every event is an *op*: a list of a name and plain
values, which means the same whenever it is applied; one that names what is not there does nothing. So any part of a log is a log.

The daemon's clock never goes back (the driver's is monotonic by construction) but may jump ahead; each worker has a clock of its own, which
may jump either way. Nothing here draws random numbers: `draw` does, `schedule` plays, `shrink` shortens.
"""

from __future__ import annotations

from dataclasses import replace

from scavenger.protocol.messages import Call, Chunks, OpenRun, reserved_name
from scavenger.protocol.worker import events as ev
from scavenger.router.core.events import IntentHandedOver, IntentRevoked, JobGone, PeerIdentity
from scavenger.router.core.transitions import WorkerStatus
from scavenger.router.edge.pipeline import checked
from tests.router.apart import owner_of
from tests.router.checks import audit_groups, audit_ledger
from tests.router.drafts import FORGED, Truths
from tests.router.engines import LIES, SimWorker, answer, forged
from tests.router.site import POISON, Op, Site
from tests.router.trainers import Campaign, SimTrainer

#: Between the names of the workers of one process that changes hands.
HANDED = 100_000_000
#: Half-seconds within which every run must have taken its next step once nothing disturbs: time to find out who is dead, and to work.
CALM_MOMENTS = 120


class World(Site):
    """A site with its workers and trainers. See the module."""

    # ---- jobs and workers

    def on_spawn(self, name: int, kind: str, run: str, intent: str, node: str) -> None:
        """A job starts, or is started again (requeued): one incarnation more."""
        if name in self.workers or run not in self.campaigns:
            return
        assert name not in self.trainers, f"{name} is a trainer's name: ops on it would reach the wrong peer"
        incarnation = 0
        if kind == "harvested":
            if intent in self.incarnations:
                incarnation = self.incarnations[intent][0] + 1
            self.incarnations[intent] = (incarnation, run, node)
        slot = f"slot {intent}" if kind == "reserved" else ""
        if slot and any(
            trainer.reserved is not None and not trainer.reserved.awake for trainer in self._standing(run)
        ):
            return  # a launcher starts none while its trainer may be at work
        for other in [
            w for w in self.workers.values() if slot and name % 2 and (w.run, w.identity.slot) == (run, slot)
        ]:
            self.on_kill(
                other.name
            )  # its launcher starts one engine in a slot; an even name is one whose launcher lost another, alive
        me = ev.WorkerIdentity(
            kind, run, f"s{name}", incarnation, name, node, 1, "reference", "0", 1, slot=slot
        )
        worker = SimWorker(name, me, intent if kind == "harvested" else "", self.daemon.now, self.cover.phase)
        worker.moves_kv, worker.read = self.moves_kv, self.read_blocks
        self.spawned += 1
        worker.spawned = self.spawned
        self.workers[name] = worker

    def _who(self, worker: SimWorker) -> PeerIdentity:
        return (
            PeerIdentity("worker", f"key-{worker.intent}", worker.run, worker.intent)
            if worker.intent
            else owner_of(worker.run)
        )

    def on_hands(self, intent: str, run: str) -> None:
        """A job's engine is to go on for another run: its key file is rewritten, and its worker told."""
        if (
            intent not in self.incarnations
            or run not in self.campaigns
            or self.incarnations[intent][1] == run
        ):
            return
        self._intent_fault("changes hands", intent)
        incarnation, _, node = self.incarnations[intent]
        self.incarnations[intent] = (incarnation, run, node)
        self.rekeyed[intent] = self.daemon.generation
        self.daemon.handle(IntentHandedOver(intent, f"key of {run}", f"run {run} gains more"))

    def _go_on(self, worker: SimWorker) -> None:
        """Its process works for the run of its key file now, as a new worker that holds nothing."""
        incarnation, run, _ = self.incarnations[worker.intent]
        if incarnation != worker.identity.incarnation:
            return  # its job was started again meanwhile: this process is a leftover
        name = worker.name + HANDED
        me = replace(worker.identity, run=run, session=f"s{name}", job_id=name)
        again = SimWorker(name, me, worker.intent, self.daemon.now, self.cover.phase)
        again.moves_kv, again.read = self.moves_kv, self.read_blocks
        self.spawned += 1
        again.spawned = self.spawned
        self.workers[name] = again

    def _is_over(self, worker: SimWorker) -> bool:
        """Whether the key that it has is of a run that its process was to leave, and a later daemon lets in the new one only."""
        if worker.intent not in self.incarnations or worker.run == self.incarnations[worker.intent][1]:
            return False
        return self.daemon.generation > self.rekeyed.get(worker.intent, self.daemon.generation)

    def on_do(self, name: int) -> None:
        """A worker's driver does the next thing that its session asked for; with nothing to do it looks at the clock."""
        worker = self.workers.get(name)
        if worker is None or worker.stopped:
            return
        if not worker.todo:
            worker.feed(ev.WorkerTick())
        else:
            match worker.todo.popleft():
                case ev.Connect() if self._is_over(worker):
                    worker.feed(ev.KeyRefused("the daemon does not accept this worker's key"))
                case ev.Connect():
                    worker.link = self.open_link(self._who(worker))
                    worker.feed(ev.Connected())
                case ev.LoadWeights(weights=weights):
                    root = self._root(worker.run, weights.version)
                    worker.kept.clear()
                    worker.feed(ev.Loaded(weights.version, root, 0.1, 0.1))
                case ev.SleepEngine(order=order):
                    worker.awake = False
                    worker.feed(ev.Slept(order, 512))
                case ev.WakeEngine(order=order):
                    worker.awake = True
                    worker.feed(ev.Woken(order, 0.1, 4096))
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
            case ev.LoadWeights(weights=weights):
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
                self.workers[name].feed(ev.WorkerTick())
                self._bury(self.workers[name])
            self.on_up(name, 100)

    def _bury(self, worker: SimWorker) -> None:
        """A worker that left is over; what it sent last may still arrive."""
        if worker.left is not None and worker.name in self.workers:
            del self.workers[worker.name]
            if worker.left.hands_to and worker.intent:
                self._go_on(worker)
            self.note_drafts(worker)
            if worker.link is not None:
                worker.link.old = True

    def on_kill(self, name: int) -> None:
        """SIGKILL."""
        worker = self.workers.get(name)
        if worker is not None:
            self._worker_fault("killed", name)
            worker.left = ev.EndWorker(0, "killed")
            self._bury(worker)

    def on_term(self, name: int) -> None:
        self._end(name, "SIGTERM", ev.Terminate("SIGTERM"))

    def on_die(self, name: int) -> None:
        self._end(name, "engine dies", ev.EngineCrashed("out of memory"))

    def _end(self, name: int, kind: str, event: ev.WorkerEvent) -> None:
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
        self.daemon.handle(checked(worker.link.conn, Chunks((chunk,))))
        after = {i: s.accepted for i, s in core.samples.items()}
        assert after == before, f"sample {sample.id}: a chunk with {LIES[kind]} was accepted (I1, I4, I5)"

    def on_draft(self, name: int, kind: str) -> None:
        """Siblings' tokens reach a worker that are wrong, late or another group's: no token may change (`Truth.committed`)."""
        worker = self.workers.get(name)
        if worker is None or worker.link is None or not worker.requests:
            return
        held = worker.session.work.leases.of_handle(min(worker.requests))
        assert held is not None
        mine, another = answer(held.lease.sample_id), answer(held.lease.sample_id + 57)
        truths = Truths(held.lease, mine, another, tuple(worker.told))
        message = FORGED[kind](truths)
        if message is not None:
            self.cover.siblings[kind] += 1
            worker.link.down.append(message)

    def on_fate(self, name: int, fate: str) -> None:
        """What the next KV blocks that a worker reads come as."""
        if name in self.workers:
            self.workers[name].fate.append(fate)

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
        states = [
            w.status.value for w in self.daemon.router.core.workers.values() if w.process.intent_id == intent
        ]
        self.cover.fault(kind, f"worker {states[0]}" if states else "worker unknown")

    def _worker_fault(self, kind: str, name: int) -> None:
        session = f"s{name}"
        found = next(
            (
                w.status.value
                for w in self.daemon.router.core.workers.values()
                if w.process.session == session
            ),
            "unknown",
        )
        self.cover.fault(kind, f"worker {found}")

    # ---- trainers

    def on_train(self, name: int, run: str, back: int, other: bool) -> None:
        """A trainer of a run starts: the first, or one more, from a checkpoint; `other`: its weights come out different."""
        if name in self.trainers:
            return
        assert name not in self.workers, f"{name} is a worker's name: ops on it would reach the wrong peer"
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
        self.trainers[name] = SimTrainer(
            name,
            campaign,
            resume,
            self.open_link(owner_of(run)),
            self.truth,
            self.ahead,
            self.on_new_version,
            self.kv,
        )

    def _standing(self, run: str) -> list[SimTrainer]:
        """The trainer of the run's newest attempt, if it is there: an older one's engines are no business of its GPUs."""
        newest = self.truth.ledger.runs[self.truth.runs[run]]["attempt"] if run in self.truth.runs else 0
        return [
            t
            for t in self.trainers.values()
            if t.campaign.run == run and not t.dead and t.attempt and t.attempt == newest
        ]

    def _engines(self, run: str) -> dict[str, SimWorker]:
        """Processes of the run's reserved engines by name: of each slot the newest, which its launcher knows of."""
        mine = [w for w in self.workers.values() if w.run == run and w.identity.kind == "reserved"]
        newest = {w.identity.slot: w for w in sorted(mine, key=lambda w: w.spawned)}
        return {reserved_name(slot, w.identity.session): w for slot, w in newest.items()}

    def apply(self, op: Op) -> None:
        """Let one thing happen, after which no trainer is at work beside an engine that has its memory, or is about to take it."""
        super().apply(op)
        for run in self.campaigns:
            engines = self._engines(run)
            for trainer in self._standing(run):
                if not trainer.trains(tuple(engines)):
                    continue
                self.cover.trained_beside += bool(engines)
                for name, engine in engines.items():
                    awake = engine.awake or any(isinstance(action, ev.WakeEngine) for action in engine.todo)
                    assert not awake, f"trainer {trainer.name} trains beside an engine that is awake: {name}"

    def _tend(self, trainer: SimTrainer) -> None:
        engines = self._engines(trainer.campaign.run)
        for name in trainer.tend(tuple(engines)):
            self.cover.ended_late += 1
            self.on_kill(engines[name].name)

    def on_act(self, name: int) -> None:
        trainer = self.trainers.get(name)
        if trainer is not None and trainer in self._standing(trainer.campaign.run):
            self._tend(trainer)
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
            trainer.connected(self.open_link(owner_of(trainer.campaign.run)))

    def on_tkill(self, name: int) -> None:
        trainer = self.trainers.pop(name, None)
        if trainer is not None:
            self.cover.fault("trainer killed", f"trainer {trainer.phase}")
            trainer.link.old = True

    def on_checkpoint(self, name: int) -> None:
        if name in self.trainers:
            self.trainers[name].checkpoint()

    def on_zombie(self, name: int) -> None:
        """The process of the attempt before, which was stopped and goes on, says what the present one is about to say."""
        trainer = self.trainers.get(name)
        run = self.daemon.router.core.runs.get(trainer.campaign.run) if trainer is not None else None
        if (
            trainer is None
            or run is None
            or trainer.dead
            or trainer.attempt != run.attempt
            or trainer.attempt < 2
        ):
            return
        body = trainer.next_body()
        if body is not None and not isinstance(body, OpenRun):
            self.cover.fault("an older attempt speaks", f"trainer {trainer.phase}")
            link = self.open_link(owner_of(trainer.campaign.run))
            link.old = True
            self._call_up(self.daemon, link, Call(1, trainer.campaign.run, trainer.attempt - 1, body))

    def on_reserved(self, name: int, awake: bool) -> None:
        trainer = self.trainers.get(name)
        if trainer is not None and trainer.attempt and not trainer.dead:
            trainer.set_reserved(awake)

    def on_toggle(self, name: int) -> None:
        """A trainer wakes its engines and at once has them sleep again."""
        self.on_reserved(name, True)
        self.on_reserved(name, False)
        self.on_up(name, 100)

    def on_close(self, name: int) -> None:
        trainer = self.trainers.get(name)
        if trainer is not None and not trainer.dead:
            self.cover.fault("run closed", f"trainer {trainer.phase}")
            trainer.close()

    def on_serve(self, moments: int) -> None:
        """Nothing goes wrong for some moments: everybody works."""
        for _ in range(moments):
            self._calm_moment(1, 0.25)

    def note_drafts(self, worker: SimWorker) -> None:
        self.cover.blocks.update(worker.moves)
        self.cover.siblings["drafted"] += worker.drafted
        self.cover.siblings["accepted"] += worker.accepted

    # ---- the end

    def make_calm(self, alone: bool) -> None:
        """No more trouble: what is left must take every run's next step. `alone`: without a single harvested engine (I11)."""
        self.outage = 0
        self.on_fence()
        for worker in list(self.workers.values()):
            if worker.stopped or worker.session._ending is not None or (alone and worker.intent):
                self.on_kill(worker.name)
        goals: dict[str, int] = {}
        for moment in range(CALM_MOMENTS):
            self._staff("reserved" if alone else "harvested")
            self._revive(goals, awake=alone)
            if (
                len(goals) == len(self.campaigns)
                and all(self._step(run) >= goal for run, goal in goals.items())
                and self._all_serve()
            ):
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
            mine = [
                t
                for t in self.trainers.values()
                if t.campaign is campaign and not t.dead and t.phase != "over"
            ]
            if not mine:
                self.spares += 1
                self.on_train(9_000_000 + self.spares, run, 0, False)
            elif len(mine) == 1 and mine[0].attempt and run not in goals:
                goals[run] = mine[0].step + 1
                if awake or mine[0].reserved is not None:
                    mine[0].set_reserved(True)

    def _all_serve(self) -> bool:
        """Whether the core counts on every process that is there: ready to generate, or asleep as asked."""
        status = {w.process.session: w.status for w in self.daemon.router.core.workers.values()}
        useful = (WorkerStatus.READY, WorkerStatus.ASLEEP)
        return all(status.get(w.identity.session) in useful for w in self.workers.values())

    def _step(self, run: str) -> int:
        return max(
            (t.step for t in self.trainers.values() if t.campaign.run == run and not t.dead), default=0
        )

    def _audit(self) -> None:
        self.daemon.settle()
        for run, campaign in self.campaigns.items():
            assert campaign.run == run
            audit_groups(self.truth.ledger, self.truth.runs[run], self._step(run))
        audit_ledger(self.truth)

    def _standstill(self) -> str:
        open_samples = [
            (s.id, s.status.value, s.worker_id)
            for s in self.daemon.router.core.samples.values()
            if not s.done
        ]
        trainers = [(t.name, t.phase, t.step, t.dead, t.pending) for t in self.trainers.values()]
        core = self.daemon.router.core
        workers = [
            (w.process.session, w.status.value, w.weights.loaded, w.weights.asked, sorted(w.leases))
            for w in core.workers.values()
        ]
        return f"open samples {open_samples}\ntrainers {trainers}\nthe core's workers {workers}\nworkers {sorted(self.workers)}"
