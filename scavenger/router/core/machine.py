"""The router's core: one state machine over runs, samples, leases and workers. Theory of operation:

    driver (server.py live, simulate/ in virtual time)          core (this package, pure)
    -----------------------------------------------------       -------------------------------------------------
    HelloReceived / WorkerSent / TrainerCalled / JobGone  --->  handle(event, now) -> [Write(ticket, records), Send, Fill, ...]
    commit of a ticket: Committed(ticket)                 --->  releases what waited: leases, acks, replies, deliveries
    LedgerRead / PastRead / TopologyRead                  --->  what the ledger and the scheduler know, read by the driver

`handle` is the only door: nothing else changes the core, so the log of events, each with its time, makes an equal core again. What the
payload store answers, when it compares a resend with what was accepted, is the one input beside it.

Nothing that promises durability is sent before the commit that makes it true: a lease (its epoch must never be granted twice), an ack,
a reply to the trainer, a complete group. The core reads no clock and draws no random number; ties are broken by ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b

import msgspec

from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import Demand, EnvironmentDemand
from scavenger.policy.interface import NewPolicy
from scavenger.protocol import engine_options
from scavenger.protocol.messages import (
    AnswerTool,
    AskTool,
    Asleep,
    Awake,
    Chunks,
    EndEpisode,
    EngineSpec,
    GatewayPing,
    Goodbye,
    Heartbeat,
    KvKept,
    KvTried,
    LendSlots,
    Message,
    OpenTurn,
    Ping,
    SampleFailed,
    Serving,
    WeightsFailed,
    WeightsLoaded,
    Yielded,
    words,
)
from scavenger.router.core import (
    audit,
    guests,
    kv_moves,
    policy_driver,
    registration,
    restore,
    returns,
    runs,
    samples,
    siblings,
    turns,
    worker_commands,
    worker_counts,
    workers,
)
from scavenger.router.core.events import (
    Committed,
    CoreTick,
    DemandAsked,
    DemandStated,
    GarbageReceived,
    Heard,
    HelloReceived,
    HistoryRead,
    IntentHandedOver,
    IntentRevoked,
    JobGone,
    LedgerRead,
    PastRead,
    RouterAction,
    RouterEvent,
    SlotsLent,
    TopologyRead,
    TrainerCalled,
    WorkerSent,
)
from scavenger.router.core.payloads import PayloadPort
from scavenger.router.core.state import ActiveRun, ReservedMemory, RouterLimits, Worker
from scavenger.router.core.tables import Core

#: The frequent events, whose few consequences mark the run themselves (`state.Due`). Any other event counts as if it had set `due.fleet` of
#: every run.
_QUIET = frozenset({Committed, CoreTick, Heard, TopologyRead, GarbageReceived})
_QUIET_MESSAGES = frozenset(
    {
        Chunks,
        Heartbeat,
        Yielded,
        KvKept,
        KvTried,
        WeightsLoaded,
        Awake,
        Ping,
        OpenTurn,
        AskTool,
        AnswerTool,
        EndEpisode,
        GatewayPing,
    }
)


class Router:
    """The state machine behind one door, `handle`. A core that has just begun is given `LedgerRead` first where there is a ledger."""

    def __init__(
        self,
        limits: RouterLimits,
        generation: int,
        payloads: PayloadPort,
        ledger: str = "",
        restored: bool = False,
        new_policy: NewPolicy | None = None,
    ) -> None:
        self.core = Core(limits, generation, payloads, ledger, restored)
        if new_policy is not None:
            self.core.new_policy = new_policy

    def handle(self, event: RouterEvent, now: float) -> list[RouterAction]:
        """Apply one event at `now` (Unix s); returns the actions to perform, in order. `IllegalTransition` is a bug: discard this core."""
        core = self.core
        core.now = now
        match event:
            case WorkerSent(conn=conn, message=message, faults=faults):
                self._worker_sent(conn, message, faults)
            case Heard(conn=conn):
                workers.heard(core, conn)
            case Committed(ticket=ticket):
                samples.confirm_durable(core, core.committed(ticket))
            case HelloReceived(conn=conn, identity=identity, hello=hello):
                registration.hello(core, conn, identity, hello)
            case TrainerCalled(conn=conn, identity=identity, call=call):
                runs.called(core, conn, identity, call)
            case HistoryRead():
                restore.history_read(core, event)
            case JobGone():
                self._job_gone(event)
            case IntentRevoked():
                for worker in self._of_intent(event.intent_id):
                    worker_commands.drain(core, worker, event.reason)
            case IntentHandedOver():
                for worker in self._of_intent(event.intent_id):
                    worker_commands.hand_over(core, worker, event.public_key, event.reason)
            case SlotsLent():
                if not event.public_key:
                    guests.loan_over(core, event.intent_id)
                for worker in self._of_intent(event.intent_id):
                    order = LendSlots(event.public_key, event.run, event.slots, words(event.reason))
                    worker_commands.lend(core, worker, order)
            case CoreTick():
                self._tick()
            case TopologyRead(switches=switches):
                core.switches.update(switches)
            case GarbageReceived(public_key=public_key, cause=cause):
                if core.count_refusal(public_key):
                    core.event("garbage", 0, public_key, cause)
                else:
                    core.count("garbage")
            case DemandAsked():
                return [DemandStated(self._demand())]  # its rows go with those of the next event
            case LedgerRead(snapshot=snapshot):
                restore.restore(core, snapshot)
                return core.finish_event()  # more is read before anything is decided
            case PastRead(facts=facts):
                policy_driver.learn(core, facts)
                return core.finish_event()
        self._do_what_is_due(event)
        return core.finish_event()

    def _worker_sent(self, conn: int, message: Message, faults: Mapping[int, str] | None) -> None:
        """A message of a registered worker. `faults`: what is wrong with a chunk's values, by its place among the chunks."""
        core = self.core
        worker = workers.sender(core, conn, leaves=isinstance(message, Goodbye))
        if worker is None:
            return
        match message:
            case Chunks(chunks=chunks):
                for at, chunk in enumerate(chunks):
                    samples.accept_chunk(core, worker, chunk, faults.get(at, "") if faults else "")
                guests.judge(core, worker)
            case Heartbeat():
                workers.heartbeat(core, worker, message)
            case Yielded(leases=leases):
                policy_driver.handed_back(core, worker, leases)
            case KvKept():
                kv_moves.offered(core, worker, message)
            case KvTried():
                kv_moves.tried(core, worker, message)
            case WeightsLoaded(version=version):
                worker_commands.loaded(core, worker, message, version)
            case WeightsFailed():
                worker_commands.load_failed(core, worker, message)
            case Serving():
                worker_commands.serving(core, worker, message)
            case SampleFailed():
                workers.sample_failed(core, worker, message)
                guests.judge(core, worker)
            case Asleep(order=order, bytes_held=bytes_held):
                worker_commands.asleep(core, worker, order, bytes_held)
            case Awake(order=order, bytes_held=bytes_held):
                worker_commands.awake(core, worker, order, bytes_held)
            case Goodbye():
                workers.goodbye(core, conn, worker, message)

    def _do_what_is_due(self, event: RouterEvent) -> None:
        """Idle workers load what is needed, queued samples find a worker, the trainer learns of changes.

        A run is visited when its `due.fleet` or `due.samples` is set, on each Tick, and after each event that is not in `_QUIET`. Quiet
        events set `due` themselves where it matters, so that a chunk costs the same with one worker as with a thousand; `audit.check`
        fails where a run that was not visited had something due.
        """
        timed = isinstance(event, CoreTick)
        any_may_be_due = _may_change_anything(event)
        for run in self.core.runs.values():
            if run.ended or not (run.due.fleet or run.due.samples or timed or any_may_be_due):
                continue
            fleet = run.due.fleet or any_may_be_due
            if fleet or timed or run.due.changed_workers:
                run.cached.serving = None
            if fleet or run.due.samples:
                self._steer_idle(run, anyway=fleet)
                if run.due.changed_workers:
                    run.cached.serving = None
            if timed:
                turns.watch(self.core, run)
            if run.turns.open and (fleet or timed):
                turns.switch_busy_workers(self.core, run)
            if run.turns.queue:  # before any step's samples: a caller waits for them
                turns.place(self.core, run)
                self._steer_idle(run, anyway=False)  # what waited for older weights may be placed
                if run.due.changed_workers:
                    run.cached.serving = None
            if run.settings.max_off_policy_steps:
                returns.expire(self.core, run)
                policy_driver.switch(self.core, run)
            if fleet or run.due.samples or run.queue:
                policy_driver.place_queued(self.core, run)
                policy_driver.give_way(self.core, run)
                policy_driver.admit(self.core, run)
            self._ask_policy(run, fleet=fleet, timed=timed)
            run.due.fleet = run.due.samples = False  # what this itself changed is done
            self._notify_trainer(run, timed=timed)

    def _steer_idle(self, run: ActiveRun, *, anyway: bool) -> None:
        """Idle workers load what is wanted now: all of them where that or the fleet changed, else those that became idle."""
        target = samples.target_version(run)
        everyone = anyway or target != run.cached.target
        idle = run.workers.values() if everyone else run.due.idle_workers
        run.cached.target, run.due.idle_workers = target, []
        for worker in idle:
            if not worker.leases and worker.id in run.workers:
                worker_commands.steer(self.core, worker, target)

    def _ask_policy(self, run: ActiveRun, *, fleet: bool, timed: bool) -> None:
        """Moves and the window are asked for when the fleet, the step or the window changed, and when it is time."""
        sizes = (
            worker_counts.counted(run)
            if fleet or timed
            else worker_counts.counted_again(run)
            if run.due.recount
            else run.cached.sizes
        )
        run.due.recount = False
        fresh = run.due.ask or sizes != run.cached.sizes
        run.due.ask, run.cached.sizes = False, sizes
        if fresh or timed:
            policy_driver.rebalance(self.core, run, timed=not fresh)
            policy_driver.window(self.core, run, timed=not fresh)

    def _notify_trainer(self, run: ActiveRun, *, timed: bool) -> None:
        if run.trainer.conn is None:
            return
        last = run.trainer.fleet
        sent = (
            None
            if last is None
            else (last.harvested, last.reserved_awake, last.reserved_asleep, last.window, last.keep_open)
        )
        memory = worker_counts.memory_counted(run)
        known = (
            None if last is None else ReservedMemory(last.order, last.asleep, last.holding, last.bytes_held)
        )
        moved = sent != (*run.cached.sizes, run.decisions.window, run.decisions.keep_open) or known != memory
        if not moved and not timed:
            return
        fleet = worker_counts.fleet_of(run)
        if fleet != last:
            run.trainer.fleet = fleet
            self.core.send(run.trainer.conn, fleet)

    def _of_intent(self, intent_id: str) -> list[Worker]:
        return [w for w in self.core.workers.values() if w.process.intent_id == intent_id]

    def _job_gone(self, event: JobGone) -> None:
        self.core.handed.discard(event.intent_id)
        self.core.life_over(event.intent_id, event.incarnation)
        for worker in self._of_intent(event.intent_id):
            if worker.process.incarnation <= event.incarnation:
                workers.gone(self.core, worker, event.reason, crashed=event.crashed)

    def _tick(self) -> None:
        core = self.core
        # While this daemon itself did not run (stopped, swapped out, waiting for its disk), no peer's silence counts.
        absent = core.now - (core.ticked_at if core.ticked_at is not None else core.now)
        core.ticked_at = core.now
        if absent > core.limits.suspect_s:
            for worker in core.workers.values():
                worker.last_seen = min(core.now, worker.last_seen + absent)
                worker.engine.moved_at = min(core.now, worker.engine.moved_at + absent)
            for run in core.runs.values():
                run.trainer.seen_at = min(core.now, run.trainer.seen_at + absent)
        if core.uncommitted and core.now - core.committed_at > core.limits.suspect_s:
            # The ledger's disk stalls, and engines wait for its acknowledgements: none of them hangs.
            for worker in core.workers.values():
                worker.engine.moved_at = core.now
        for worker in list(self.core.workers.values()):
            workers.watch(self.core, worker)
        siblings.send_due(self.core, self.core.workers.values())

    def demand(self, now: float) -> list[Demand]:
        """How many harvested engines each run can use. Between two steps it is what the last step could use: engines stay."""
        (stated,) = self.handle(DemandAsked(), now)
        assert isinstance(stated, DemandStated)
        return list(stated.demand)

    def _demand(self) -> tuple[Demand, ...]:
        wanted = []
        for run in sorted(self.core.runs.values(), key=lambda r: r.id):
            engines, reason = policy_driver.engines_for(self.core, run, self.core.now, self.core.limits)
            wanted.append(
                Demand(
                    run.id,
                    run.name,
                    engines,
                    run.settings.gpus_per_engine,
                    reason,
                    run.engine.name,
                    policy_driver.benefit(run),
                    run.owner_key,
                    nodes_per_engine=run.settings.nodes_per_engine,
                    encrypts=run.settings.encrypt,
                    hands=_hands_of(run),
                    shares=_shares_of(run),
                    max_batch=run.engine.max_batch,
                    queued=len(run.queue),
                )
            )
        return tuple(wanted)

    def environments(self, now: float) -> list[EnvironmentDemand]:
        """How many environment workers in jobs each run lets join: none, where its trainer is taken for dead."""
        gone_s = self.core.limits.trainer_gone_s
        return [
            EnvironmentDemand(
                run.id, run.name, run.settings.environment_jobs, run.settings.environment_file, run.owner_key
            )
            for run in sorted(self.core.runs.values(), key=lambda r: r.id)
            if run.settings.environment_jobs and run.settings.environment_file
            if not (run.ended or run.stopped) and now - run.trainer.seen_at <= gone_s
        ]

    def ask_at(self) -> float:
        """When a policy wants to be asked again at the latest (s): a driver in virtual time ticks then. Live, ticks come anyway."""
        return min(
            [run.decisions.ask_window_at for run in self.core.runs.values() if not run.ended],
            default=math.inf,
        )

    def restore(self, snapshot: rec.Snapshot, now: float) -> list[RouterAction]:
        """Rebuild the tables from the ledger after a restart; open leases stay with their holders until `reconnect_s` is over."""
        return self.handle(LedgerRead(snapshot), now)

    def check(self) -> None:
        """Raise AssertionError when the tables contradict each other. For tests: call it after every event."""
        audit.check(self.core)


def _may_change_anything(event: RouterEvent) -> bool:
    if isinstance(event, WorkerSent):
        return type(event.message) not in _QUIET_MESSAGES
    if isinstance(event, TrainerCalled):
        return type(event.call.body) not in _QUIET_MESSAGES
    return type(event) not in _QUIET


def _hands_of(run: ActiveRun) -> str:
    """As `Demand.hands`."""
    return "" if run.settings.isolation == "process" else _built_from(run.engine)


def _shares_of(run: ActiveRun) -> str:
    """As `Demand.shares`. What is named is the base's root hash too: equal ones are equal weights."""
    built, versions = _hands_of(run), run.weights.versions
    if not (run.engine.shareable and built and versions):
        return ""
    newest = versions[max(versions)]
    return f"{built}/{(newest.base or newest.root).hex()}"


@lru_cache(maxsize=256)
def _built_from(engine: EngineSpec) -> str:
    """Names everything that an engine is built from: engines of two runs that are built from the same may change hands. "": those of no
    other may, as an option of vLLM's that an admin allowed may keep what is not known to be forgotten, KV blocks on the host's disk say."""
    if engine_options.fault_of_text(engine.options, harvested=True):
        return ""
    return blake2b(msgspec.json.encode(engine), digest_size=12).hexdigest()
