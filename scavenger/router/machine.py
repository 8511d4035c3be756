"""The router's core: one state machine over runs, samples, leases and workers. Theory of operation:

    driver (server.py live, simulate/ in virtual time)          core (this package, pure)
    -----------------------------------------------------       -------------------------------------------------
    HelloReceived / WorkerSaid / TrainerCalled / JobGone  --->  handle(event, now) -> [Write(ticket, records), Send, ...]
    commit of a ticket: Committed(ticket)                 --->  releases what waited: leases, acks, replies, deliveries

Nothing that promises durability is sent before the commit that makes it true: a lease (its epoch must never be granted twice), an ack,
a reply to the trainer, a complete group. The core reads no clock and draws no random number; ties are broken by ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from scavenger.ledger import records as rec
from scavenger.router import runs, workers
from scavenger.router import samples as sm
from scavenger.router.events import (
    Committed,
    HelloReceived,
    HistoryRead,
    IntentRevoked,
    JobGone,
    RouterAction,
    RouterEvent,
    Tick,
    TrainerCalled,
    WorkerSaid,
)
from scavenger.router.state import Core, Limits, Run, SampleStatus, Version, Worker, WorkerStatus
from scavenger.wire import EngineSpec


@dataclass(frozen=True, slots=True)
class Demand:
    """What a run could use now: `engines` harvested ones, of `gpus_per_engine` each. `reason` explains the number."""

    run_id: int
    run: str
    engines: int
    gpus_per_engine: int
    reason: str


class Router:
    """Feed it events in any order; perform the actions it returns, in order."""

    def __init__(self, limits: Limits, generation: int) -> None:
        self.core = Core(limits, generation)

    def handle(self, event: RouterEvent, now: float) -> list[RouterAction]:
        core = self.core
        core.now = now
        match event:
            case WorkerSaid(conn=conn, message=message):
                workers.said(core, conn, message)
            case Committed(ticket=ticket):
                sm.confirm_durable(core, core.settle(ticket))
            case HelloReceived(conn=conn, identity=identity, hello=hello):
                workers.hello(core, conn, identity, hello)
            case TrainerCalled(conn=conn, identity=identity, call=call):
                runs.called(core, conn, identity, call)
            case HistoryRead(run_id=run_id, attempt=attempt, groups=groups):
                runs.history_read(core, run_id, attempt, groups)
            case JobGone():
                self._job_gone(event)
            case IntentRevoked():
                for worker in self._of_intent(event.intent_id):
                    workers.drain(core, worker, event.reason)
            case Tick():
                self._tick()
        self._settle_fleet(event)
        return core.finish_event()

    def _settle_fleet(self, event: RouterEvent) -> None:
        """After every event: idle workers load what is needed, queued samples find a worker, the trainer learns of changes."""
        for run in self.core.runs.values():
            if run.ended:
                continue
            for worker in run.workers.values():
                if not worker.leases:
                    workers.steer(self.core, worker)
            sm.place_queued(self.core, run)
            self._tell_trainer(run, timed=isinstance(event, Tick))

    def _tell_trainer(self, run: Run, *, timed: bool) -> None:
        if run.conn is None:
            return
        fleet = runs.fleet_of(run)
        last = run.fleet
        moved = last is None or (fleet.harvested, fleet.reserved_awake, fleet.reserved_asleep) != (
            last.harvested, last.reserved_awake, last.reserved_asleep,
        )  # fmt: skip
        if moved or (timed and fleet != last):
            run.fleet = fleet
            self.core.send(run.conn, fleet)

    def _of_intent(self, intent_id: str) -> list[Worker]:
        return [w for w in self.core.workers.values() if w.intent_id == intent_id]

    def _job_gone(self, event: JobGone) -> None:
        for worker in self._of_intent(event.intent_id):
            if worker.incarnation <= event.incarnation:
                workers.gone(self.core, worker, event.reason, crashed=event.crashed)

    def _tick(self) -> None:
        for worker in list(self.core.workers.values()):
            workers.watch(self.core, worker)

    def demand(self, now: float) -> list[Demand]:
        """How many harvested engines each run can use. Between two steps it is what the last step could use: engines stay."""
        wanted = []
        for run in sorted(self.core.runs.values(), key=lambda r: r.id):
            engines, reason = _engines_for(run, now, self.core.limits.trainer_silent_s)
            wanted.append(Demand(run.id, run.name, engines, run.gpus_per_engine, reason))
        return wanted

    def restore(self, snapshot: rec.Snapshot, now: float) -> list[RouterAction]:
        """Rebuild the tables from the ledger after a restart; open leases stay with their holders until `reconnect_s` is over."""
        core = self.core
        core.now = now
        core.next_run_id, core.next_group_id = snapshot.next_run_id, snapshot.next_group_id
        core.next_sample_id, core.next_worker_id = snapshot.next_sample_id, snapshot.next_worker_id
        by_id: dict[int, Run] = {}
        for state in snapshot.runs:
            run = _restore_run(state, now)
            core.runs[run.name] = by_id[run.id] = run
        for worker_state in snapshot.workers:
            if worker_state.joined.run_id in by_id:
                _restore_worker(core, by_id[worker_state.joined.run_id], worker_state.joined)
        for group_state in snapshot.groups:
            open_or_whole = any(s.state in ("open", "complete") for s in group_state.samples)
            if group_state.created.run_id in by_id and open_or_whole:
                runs.adopt_state(core, by_id[group_state.created.run_id], group_state)
        return core.finish_event()

    def check(self) -> None:
        """Raise AssertionError when the tables contradict each other. For tests: call it after every event."""
        for sample in self.core.samples.values():
            leased = sample.status in (SampleStatus.LEASED, SampleStatus.UNCONFIRMED)
            assert leased == bool(sample.worker_id), f"sample {sample.id}: {sample.status} with worker {sample.worker_id}"
            if leased:
                assert self.core.workers[sample.worker_id].leases.get(sample.id) is sample, f"sample {sample.id}: lease not held"
            queued = sample.id in sample.group.run.queue
            assert queued == (sample.status is SampleStatus.QUEUED), f"sample {sample.id}: {sample.status}, in queue: {queued}"
            assert len(sample.tokens) == 4 * sample.accepted == len(sample.logprobs), f"sample {sample.id}: payload and length differ"
            assert sample.durable <= sample.accepted <= sample.group.sampling.max_tokens, f"sample {sample.id}: lengths out of order"
        for worker in self.core.workers.values():
            for sample in worker.leases.values():
                assert sample.worker_id == worker.id, f"worker {worker.id} holds sample {sample.id} of worker {sample.worker_id}"


def _engines_for(run: Run, now: float, silent_s: float) -> tuple[int, str]:
    if run.ended or run.stopped:
        return 0, "the run is over"
    if not run.harvest:
        return 0, "run.harvest = false"
    if not run.versions:
        return 0, "no weights are published yet"
    if now - run.trainer_seen > silent_s and not run.queue:
        return 0, f"its trainer was silent for {silent_s:g} s"
    # Below a quarter of its slots an engine's decode step costs almost as much as a full one: more engines would not help.
    useful = -(-max(run.step_samples, len(run.queue)) // max(1, run.engine.max_batch // 4))
    engines = min(run.max_engines, useful)
    return engines, f"{run.step_samples} samples a step can use {useful} engines, run.max_engines = {run.max_engines}"


def _restore_run(state: rec.RunState, now: float) -> Run:
    made = state.created
    run = Run(made.run_id, made.name, made.owner_key, made.seed, msgspec.json.decode(state.engine.encode(), type=EngineSpec))
    config = msgspec.json.decode(state.config.encode())
    section = config.get("run", {})
    run.harvest = bool(section.get("harvest", True))
    run.max_engines, run.gpus_per_engine = int(section.get("max_engines", 0)), int(section.get("gpus_per_engine", 1))
    run.poison_after, run.on_poison = int(section.get("poison_after", 3)), str(section.get("on_poison", "stop"))
    run.attempt, run.resume_step, run.last_step = state.attempt, state.resume_step, state.last_step
    run.trainer_seen = now
    for v in state.versions:
        run.versions[v.version] = Version(v.version, v.step, v.root, v.manifest)
    run.next_version = max(run.versions, default=0) + 1
    return run


def _restore_worker(core: Core, run: Run, joined: rec.WorkerJoined) -> None:
    worker = Worker(
        joined.worker_id, run, joined.kind, joined.intent_id, joined.session, joined.incarnation,
        joined.job_id, joined.node, joined.gpus, None, WorkerStatus.AWAY, core.now, idle_since=core.now,
    )  # fmt: skip
    core.workers[worker.id] = run.workers[worker.id] = worker
