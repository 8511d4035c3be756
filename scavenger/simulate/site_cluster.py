"""Slurm and the harvest driver in virtual time: others' jobs by the fleet, ours by the real `harvest.policy.decide`.

Others always win: when they take GPUs that ours hold, the engines on that node that started last are preempted, flush within their grace,
and their jobs are requeued. A job starts `schedule_s` after it was submitted or after GPUs became free. Owns who holds which GPU.

For whom `gates` holds the harvester is the live daemon's with its defaults: `Idling` watches for how long GPUs are idle and how long such
last, the policy says what an engine saves, each job is submitted for one node, and one whose node does not
come moves (`harvest.decide.standby`). It
begins as a restarted daemon does, with nothing seen. Who has none takes whatever is idle, wherever Slurm puts it.

Boundary: virtual Slurm.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from scavenger.cluster.model import ClusterView, Job, JobState, Node, Partition, PreemptMode
from scavenger.config.site import HarvestSection
from scavenger.errors import SimulationError
from scavenger.harvest.decide import decide
from scavenger.harvest.decide.actions import Caps, Code, DrainKind, Limits, OurJob, Placement
from scavenger.policy.fleet_size import Demand
from scavenger.policy.idle_gpus import Idling
from scavenger.router.core.events import IntentRevoked, JobGone
from scavenger.simulate.clock import Simulation, Timer
from scavenger.simulate.fleet import Fleet, FleetChange
from scavenger.simulate.outcome import EngineOutcome
from scavenger.simulate.site_daemon import SimDaemon
from scavenger.simulate.site_engine import SimEngine

PARTITION = "scavenge"
_MIXED, _PARTITIONS = frozenset({"mixed"}), frozenset({PARTITION})
_CPUS, _MEMORY_MB = 1024, 1 << 24  # never what is short
_LIVE = HarvestSection()
_MANY = 1 << 20
#: However quiet it is, for how long GPUs are idle is told so often: a small part of `idling.PIECE_S`.
_QUIET_S = 60.0

#: Make an engine for (intent, incarnation, node); it is told when it is built.
StartEngine = Callable[[str, int, str], SimEngine]


@dataclass(slots=True)
class _Job:
    intent_id: str
    run_id: int
    job_id: int
    gpus: int
    eligible_s: float
    node: str = ""
    started_s: float = 0.0
    incarnation: int = -1
    engine: SimEngine | None = None
    why: str = ""  # it leaves
    leaving: DrainKind = DrainKind.NO
    asked_at: float = 0.0
    since: float = 0.0  # it waits, or runs
    pinned: str = ""  # the one node on which it may start

    @property
    def waits(self) -> bool:
        return self.engine is None


class SimCluster:
    """See the module. `engines` lists every incarnation that ended, `levels` who held what. `most`: engines at once."""

    def __init__(
        self,
        sim: Simulation,
        daemon: SimDaemon,
        fleet: Fleet,
        start: StartEngine,
        schedule_s: float,
        requeue_s: float,
        most: int,
        gates: bool,
    ) -> None:
        self._sim, self._daemon, self._fleet, self._start_engine = sim, daemon, fleet, start
        live = Placement(pin=_LIVE.placement == "node", fresh_after_s=_LIVE.fresh_after_s)
        self._limits = Limits(PARTITION, Caps(most or _MANY, _MANY), placement=live if gates else Placement())
        self._idling = Idling() if gates else None
        self._schedule_s, self._requeue_s = schedule_s, requeue_s
        self._idle = dict(fleet.initial)  # what others leave
        self._used = dict.fromkeys(fleet.initial, 0)
        self._jobs: dict[str, _Job] = {}
        self._number = 0
        self._changes = iter(fleet.changes)
        self._schedule_timer: Timer | None = None
        self._changed = True
        self._demand: tuple[tuple[int, int], ...] = ()
        self._waits = False  # a job of ours, or a demand for GPUs to be old enough: what was decided may be another with time alone
        self._polled_at = -math.inf
        self.engines: list[EngineOutcome] = []
        self.levels: list[tuple[float, int, int]] = []
        self.decided = 0
        self._note()
        self._await(next(self._changes, None))

    @property
    def live(self) -> list[SimEngine]:
        return [job.engine for job in self._jobs.values() if job.engine is not None]

    # ---------------------------------------------------------------- others

    def _await(self, change: FleetChange | None) -> None:
        if change is not None:
            self._sim.at(change.t_s, lambda: self._other_users_job(change), priority=-1)

    def _other_users_job(self, change: FleetChange) -> None:
        """Somebody else's job began or ended on a node; preempt what is in its way."""
        self._idle[change.node] = change.idle
        while self._used[change.node] > change.idle:
            mine = [job for job in self._jobs.values() if job.node == change.node and job.engine is not None]
            last = max(mine, key=lambda job: (job.started_s, job.intent_id))
            self._end_engine(last, "preempted")
        self._note()
        if change.delta > 0:
            self._schedule_in(self._schedule_s)
        self._await(next(self._changes, None))

    def _note(self) -> None:
        self._changed = True
        level = (self._sim.now, sum(self._used.values()), sum(self._idle.values()))
        if self.levels and self.levels[-1][0] == level[0]:
            self.levels.pop()
        self.levels.append(level)

    # ---------------------------------------------------------------- jobs of ours

    def _end_engine(self, job: _Job, why: str) -> None:
        assert job.engine is not None
        job.why = why
        job.engine.shut_down(f"the job was {why}")  # calls `left`

    def left(self, engine: SimEngine) -> None:
        """An engine's process ended: its job is requeued if it was preempted, and over otherwise."""
        job = next(job for job in self._jobs.values() if job.engine is engine)
        self._end_allocation(job, job.why or "given back")
        preempted = job.why == "preempted"
        self._daemon.post(JobGone(job.intent_id, job.incarnation, job.why or "given back", crashed=False))
        if preempted and job.leaving is DrainKind.NO:
            job.why, job.eligible_s, job.since = "", self._sim.now + self._requeue_s, self._sim.now
            self._schedule_in(self._requeue_s)
        else:
            del self._jobs[job.intent_id]
        self._note()
        self._schedule_in(self._schedule_s)

    def _end_allocation(self, job: _Job, why: str) -> None:
        engine = job.engine
        assert engine is not None
        self._used[job.node] -= job.gpus
        self.engines.append(
            EngineOutcome(
                job.node,
                job.gpus,
                job.started_s,
                self._sim.now,
                engine.ready_s,
                engine.busy_s,
                engine.batch.decoded_tokens,
                why,
            )
        )
        job.engine, job.node = None, ""

    def close(self) -> None:
        """The simulation is over."""
        for job in list(self._jobs.values()):
            if job.engine is not None:
                job.engine.close()
                self._end_allocation(job, "running")

    def _schedule_in(self, delay_s: float) -> None:
        due = self._sim.now + delay_s
        if (
            self._schedule_timer is not None
            and self._schedule_timer.pending
            and self._schedule_timer.time_s <= due
        ):
            return
        if any(job.waits for job in self._jobs.values()):
            self._schedule_timer = self._sim.at(due, self._start_pending)

    def _start_pending(self) -> None:
        """Start waiting jobs, oldest first, each on the node that it asked for, or in the smallest gap that fits."""
        self._schedule_timer = None
        pending = sorted(
            (job for job in self._jobs.values() if job.waits), key=lambda job: (job.eligible_s, job.intent_id)
        )
        later = [job.eligible_s for job in pending if job.eligible_s > self._sim.now]
        for job in pending:
            nodes = (job.pinned,) if job.pinned else self._idle
            gaps = [(gap, node) for node in nodes if (gap := self._idle[node] - self._used[node]) >= job.gpus]
            if job.eligible_s <= self._sim.now and gaps:
                self._start(job, min(gaps)[1])
        if later:
            self._schedule_in(min(later) - self._sim.now)

    def _start(self, job: _Job, node: str) -> None:
        job.node, job.started_s, job.since, job.incarnation = (
            node,
            self._sim.now,
            self._sim.now,
            job.incarnation + 1,
        )
        self._used[node] += job.gpus
        if self._used[node] > self._idle[node]:
            raise SimulationError(
                f"node {node} has {self._idle[node]} idle GPUs and ours hold {self._used[node]}"
            )
        job.engine = self._start_engine(job.intent_id, job.incarnation, node)
        self._note()

    # ---------------------------------------------------------------- the harvest driver

    def observe(self) -> None:
        """Look at the queue and decide, unless neither it nor the demand changed, and no age matters."""
        demand = self._daemon.router.demand(self._sim.now)
        wanted = tuple((one.run_id, one.engines) for one in demand)
        asked = any(job.leaving is not DrainKind.NO for job in self._jobs.values())
        now = self._sim.now
        aged = self._idling is not None and (self._waits or now - self._polled_at >= _QUIET_S)
        if not (aged or self._changed or asked or wanted != self._demand):
            return
        self._changed, self._demand, self._polled_at = False, wanted, now
        self.decided += 1
        view, limits = self._view(), self._limits
        if self._idling is not None:
            self._idling.observe(view, PARTITION, self._used, now)
            limits = replace(limits, idle=self._idling.known(_LIVE.min_expected_life, now))
        decision = decide.decide(view, demand, self._ours(), limits, now)
        self._waits = decision.code is Code.SETTLING or any(job.waits for job in self._jobs.values())
        for action in decision.actions:
            self._perform(action, demand)

    def _perform(self, action: decide.Action, demand: Sequence[Demand]) -> None:
        match action:
            case decide.Submit(nodelist=nodelist):
                self._number += 1
                intent_id = f"intent-{self._number:06}"
                run_id = next(one.run_id for one in demand if one.run_id == action.run_id)
                now, pinned = self._sim.now, nodelist[0] if nodelist else ""
                job = _Job(
                    intent_id,
                    run_id,
                    self._number,
                    action.gpus,
                    now + self._schedule_s,
                    since=now,
                    pinned=pinned,
                )
                self._jobs[intent_id] = job
                self._schedule_in(self._schedule_s)
            case decide.DrainAllocated(intent_id=intent_id, reason=reason):
                self._request_end(intent_id, DrainKind.DRAINING)
                self._daemon.post(IntentRevoked(intent_id, reason))
            case decide.CancelPending(intent_id=intent_id):
                self._jobs.pop(intent_id, None)
            case decide.Cancel(intent_id=intent_id):
                self._request_end(intent_id, DrainKind.CANCELLED)
                found = self._jobs.get(intent_id)
                if found is not None and found.engine is not None:
                    self._end_engine(found, "given back")
        self._changed = True

    def _request_end(self, intent_id: str, how: DrainKind) -> None:
        job = self._jobs.get(intent_id)
        if job is not None:
            job.leaving, job.asked_at = how, self._sim.now

    def _view(self) -> ClusterView:
        nodes = tuple(
            [
                _node(name, gpus, gpus - self._idle[name] + self._used[name])
                for name, gpus in self._fleet.capacity.items()
            ]
        )
        jobs = tuple(
            Job(
                job.job_id,
                "scavenger",
                PARTITION,
                JobState.PENDING if job.waits else JobState.RUNNING,
                comment=job.intent_id,
                reason="BeginTime" if job.waits and job.eligible_s > self._sim.now else "",
                eligible_time=job.eligible_s,
                nodes=(job.node,) if job.node else (),
                gpus=job.gpus,
                gpus_by_node=((job.node, job.gpus),) if job.node else (),
            )
            for job in self._jobs.values()
        )
        part = Partition(PARTITION, frozenset(self._fleet.capacity), 1, PreemptMode.REQUEUE, 30.0, 0.0)
        return ClusterView(self._sim.now, nodes, jobs, (part,))

    def _ours(self) -> list[OurJob]:
        workers = {
            worker.process.intent_id: worker
            for worker in self._daemon.router.core.workers.values()
            if worker.process.intent_id
        }
        found = []
        for job in self._jobs.values():
            worker = workers.get(job.intent_id)
            found.append(
                OurJob(
                    job.intent_id,
                    job.run_id,
                    job.job_id,
                    job.gpus,
                    job.waits,
                    job.node,
                    "",
                    job.leaving,
                    job.asked_at,
                    worker is not None,
                    len(worker.leases) if worker else 0,
                    worker.idle_since if worker else 0.0,
                    job.pinned,
                    job.since,
                )
            )
        return found


@functools.lru_cache(maxsize=65_536)
def _node(name: str, gpus: int, allocated: int) -> Node:
    """Few of a site's nodes change between two looks at it."""
    return Node(name, _MIXED, _PARTITIONS, "", gpus, allocated, _CPUS, 0, _MEMORY_MB, 0)
