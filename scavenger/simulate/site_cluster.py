"""Slurm in virtual time, and the live harvester's session over it.

    fleet --other users' jobs--> VirtualSlurm --view--> HarvestSession --submit, cancel--> VirtualSlurm
                                      |                       '--JobGone, IntentRevoked--> daemon
                                      '--starts, preempts--> SimEngine

Other users come first: when they take GPUs that ours hold, the engines on that node that started last are preempted, flush within their
grace, and their jobs are requeued. A job starts `schedule_s` after it was submitted or after GPUs became free.

`VirtualSlurm` owns who holds which GPU. `SimHarvester` drives the session in place of `harvest.harvester`: it owns when to poll, the
limits, and commands that never fail. With `start_benefits` the limits are the live defaults, but for standby jobs, which a virtual Slurm
does not have: an idle GPU is taken once it is expected to last, by what the policy says that an engine saves; each job is submitted for
one node, and one whose node does not come moves (`harvest.decide.standby`). It begins as a restarted daemon does, with nothing observed.
Without, it takes whatever is idle, wherever Slurm puts it.

Boundary: virtual Slurm.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from scavenger.cluster.model import ClusterView, Job, JobState, Node, Partition, PreemptMode
from scavenger.config.site import ClusterSection, HarvestSection
from scavenger.errors import SimulationError
from scavenger.harvest.decide.actions import (
    Caps,
    DrainKind,
    HandsRules,
    HarvestCode,
    HarvestLimits,
    JobPlacement,
    LendingRules,
    OwnerRule,
    comment_of,
    intent_name,
)
from scavenger.harvest.session import (
    CancelJobs,
    Command,
    HarvestSession,
    Outcome,
    ReleaseJob,
    Report,
    SubmitJob,
    resume,
)
from scavenger.harvest.track.node_health import HealthRules
from scavenger.harvest.track.observed_jobs import Stage
from scavenger.harvest.track.tracker import TrackerRules
from scavenger.policy.division import DivisionRules
from scavenger.policy.fleet_size import Demand
from scavenger.router.core import workers
from scavenger.simulate.clock import Simulation, Timer
from scavenger.simulate.fleet import FleetChange, FleetTrace
from scavenger.simulate.outcome import EngineOutcome
from scavenger.simulate.site_daemon import SimDaemon
from scavenger.simulate.site_engine import SimEngine

PARTITION = "scavenge"
_USER, _UID = "scavenger", "simulated"
_MIXED, _PARTITIONS = frozenset({"mixed"}), frozenset({PARTITION})
_CPUS, _MEMORY_MB = 1024, 1 << 24  # never what is short
_LIVE = HarvestSection()
_HEALTH = HealthRules(_LIVE.quarantine_after, _LIVE.quarantine_s, _LIVE.backoff_s)
_MANY = 1 << 20
#: Slurm forgets a job that ended so long ago (MinJobAge, its default).
_LISTED_S = 300.0
#: However quiet it is, for how long GPUs are idle is told so often: a small part of `idle_gpus.PIECE_S`.
_QUIET_S = 60.0

#: Make an engine for (job's number, intent, incarnation, node, run, seconds until it registers, where its process worked for another run
#: before; None: it is a new one's); it is told when it is built.
StartEngine = Callable[[int, str, int, str, str, float | None], SimEngine]


@dataclass(slots=True)
class _Job:
    """A job of ours as Slurm has it. `pinned`: the one node on which it may start. `ending`: why its processes are being ended."""

    job_id: int
    name: str
    gpus: int
    pinned: str
    submit_s: float
    eligible_s: float
    run: str = ""
    state: JobState = JobState.PENDING
    restarts: int = 0
    node: str = ""
    start_s: float = 0.0
    end_s: float = 0.0
    engine: SimEngine | None = None
    ending: str = ""

    @property
    def waits(self) -> bool:
        return self.state is JobState.PENDING


class VirtualSlurm:
    """See the module. `engines` lists every incarnation that ended, `levels` who held what. `changed` is for its reader to clear."""

    def __init__(
        self,
        sim: Simulation,
        fleet: FleetTrace,
        start: StartEngine,
        schedule_s: float,
        requeue_s: float,
        forget_s: float = 0.0,
    ) -> None:
        self._forget_s = forget_s
        self._sim, self._fleet, self._start_engine = sim, fleet, start
        self._schedule_s, self._requeue_s = schedule_s, requeue_s
        self._idle = dict(fleet.initial)  # what other users leave
        self._used = dict.fromkeys(fleet.initial, 0)
        self._jobs: dict[int, _Job] = {}
        self._number = 0
        self._changes = iter(fleet.changes)
        self._schedule_timer: Timer | None = None
        self.changed = True
        self.engines: list[EngineOutcome] = []
        self.levels: list[tuple[float, int, int]] = []
        self._note()
        self._await(next(self._changes, None))

    @property
    def running(self) -> list[SimEngine]:
        return [job.engine for job in self._jobs.values() if job.engine is not None]

    # ---------------------------------------------------------------- other users

    def _await(self, change: FleetChange | None) -> None:
        if change is not None:
            self._sim.at(change.t_s, lambda: self._other_users_job(change), priority=-1)

    def _other_users_job(self, change: FleetChange) -> None:
        """Somebody else's job began or ended on a node; preempt what is in its way."""
        self._idle[change.node] = change.idle
        while self._used[change.node] > change.idle:
            mine = [job for job in self._jobs.values() if job.node == change.node and job.engine is not None]
            self._end_engine(max(mine, key=lambda job: (job.start_s, job.name)), "preempted")
        self._note()
        if change.delta > 0:
            self._schedule_in(self._schedule_s)
        self._await(next(self._changes, None))

    def _note(self) -> None:
        self.changed = True
        level = (self._sim.now, sum(self._used.values()), sum(self._idle.values()))
        if self.levels and self.levels[-1][0] == level[0]:
            self.levels.pop()
        self.levels.append(level)

    # ---------------------------------------------------------------- sbatch, scancel

    def next_number(self) -> int:
        """The number of the job that is submitted next."""
        return self._number + 1

    def submit(self, name: str, gpus: int, pinned: str, run: str) -> int:
        self._number += 1
        now = self._sim.now
        self._jobs[self._number] = _Job(self._number, name, gpus, pinned, now, now + self._schedule_s, run)
        self._schedule_in(self._schedule_s)
        return self._number

    def cancel(self, job_id: int) -> None:
        job = self._jobs[job_id]
        if job.engine is not None:
            self._end_engine(job, "given back")
        elif job.waits:
            self._finish(job, JobState.CANCELLED)

    # ---------------------------------------------------------------- jobs of ours

    def _end_engine(self, job: _Job, why: str) -> None:
        assert job.engine is not None
        job.ending = why
        job.engine.shut_down(f"the job was {why}")  # calls `left`

    def left(self, engine: SimEngine) -> None:
        """An engine's process ended: its job is requeued if it was preempted, and over otherwise; or it goes on for another run."""
        job = next(job for job in self._jobs.values() if job.engine is engine)
        now, ending = self._sim.now, job.ending
        if engine.handed_to and not ending:
            self._end_allocation(job, "handed over")
            job.run = engine.handed_to
            self._begin(job, self._forget_s)
            return
        self._end_allocation(job, ending or "given back")
        if ending == "preempted":
            job.state, job.ending, job.node, job.restarts = JobState.PENDING, "", "", job.restarts + 1
            job.submit_s, job.eligible_s = now, now + self._requeue_s
            self._schedule_in(self._requeue_s)
        else:
            self._finish(job, JobState.CANCELLED if ending else JobState.COMPLETED)
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
                job.start_s,
                self._sim.now,
                engine.ready_s,
                engine.busy_s,
                engine.batch.decoded_tokens,
                why,
                job.run,
            )
        )
        job.engine = None

    def _finish(self, job: _Job, state: JobState) -> None:
        job.state, job.end_s = state, self._sim.now
        self.changed = True

    def close(self) -> None:
        """The simulation is over."""
        for job in self._jobs.values():
            if job.engine is not None:
                job.engine.close()
                self._end_allocation(job, "running")

    def _schedule_in(self, delay_s: float) -> None:
        due, timer = self._sim.now + delay_s, self._schedule_timer
        if timer is not None and timer.pending and timer.time_s <= due:
            return
        if any(job.waits for job in self._jobs.values()):
            self._schedule_timer = self._sim.at(due, self._start_pending)

    def _start_pending(self) -> None:
        """Start waiting jobs, oldest first, each on the node that it asked for, or in the smallest gap that fits."""
        self._schedule_timer = None
        pending = sorted(
            (job for job in self._jobs.values() if job.waits), key=lambda job: (job.eligible_s, job.name)
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
        job.state, job.node = JobState.RUNNING, node
        self._begin(job, None)

    def _begin(self, job: _Job, forget_s: float | None) -> None:
        """Its engine takes its GPUs."""
        node, job.start_s = job.node, self._sim.now
        self._used[node] += job.gpus
        if self._used[node] > self._idle[node]:
            raise SimulationError(
                f"node {node} has {self._idle[node]} idle GPUs and ours hold {self._used[node]}"
            )
        job.engine = self._start_engine(job.job_id, job.name, job.restarts, node, job.run, forget_s)
        self._note()

    # ---------------------------------------------------------------- squeue, scontrol show

    def view(self) -> ClusterView:
        """The cluster as the harvester sees it now. Of other users only the GPUs that they hold are known."""
        now = self._sim.now
        forgotten = [job.job_id for job in self._jobs.values() if job.end_s and now - job.end_s > _LISTED_S]
        for job_id in forgotten:
            del self._jobs[job_id]
        nodes = tuple(
            [
                _node(name, gpus, gpus - self._idle[name] + self._used[name])
                for name, gpus in self._fleet.capacity.items()
            ]
        )
        jobs = tuple([self._listed(job) for job in self._jobs.values()])
        part = Partition(PARTITION, frozenset(self._fleet.capacity), 1, PreemptMode.REQUEUE, 30.0, 0.0)
        return ClusterView(now, nodes, jobs, (part,))

    def _listed(self, job: _Job) -> Job:
        return Job(
            job.job_id,
            _USER,
            PARTITION,
            job.state,
            reason="BeginTime" if job.waits and job.eligible_s > self._sim.now else "",
            name=job.name,
            comment=comment_of(_UID, job.name),
            nodes=(job.node,) if job.node else (),
            gpus=job.gpus,
            gpus_by_node=((job.node, job.gpus),) if job.engine is not None else (),
            restart_count=job.restarts,
            submit_time=job.submit_s,
            eligible_time=job.eligible_s,
            start_time=0.0 if job.waits else job.start_s,
            end_time=job.end_s,
        )


@dataclass(frozen=True, slots=True)
class SimulatedDivision:
    """How runs share a fleet. `rules`: by value; None: by shares (`owners`), where nobody gives up what it has. `first_come`: who was there
    first is served first, in full; the others start nothing before. `hands`: engines change hands, and register `forget_s` later.
    `lend_slots`: that an engine lends at most to another run's samples (`harvest.lend_slots`)."""

    rules: DivisionRules | None = None
    owners: tuple[OwnerRule, ...] = ()
    first_come: bool = False
    hands: HandsRules | None = None
    forget_s: float = 2.0
    lend_slots: int = 0


def in_order(demand: Sequence[Demand], have: Mapping[int, int]) -> list[Demand]:
    """The demand of runs that come one after the other: who waits behind one that is not served keeps what it has."""
    found, served = list[Demand](), True
    for want in sorted(demand, key=lambda want: want.run_id):
        held = have.get(want.run_id, 0)
        found.append(want if served else replace(want, engines=min(want.engines, held)))
        served = served and held >= want.engines
    return found


class SimHarvester:
    """See the module. `most`: engines at once, 0: any number. `division`: among several runs."""

    def __init__(
        self,
        sim: Simulation,
        daemon: SimDaemon,
        slurm: VirtualSlurm,
        most: int,
        start_benefits: bool,
        division: SimulatedDivision | None = None,
    ) -> None:
        self._division = division or SimulatedDivision()
        self._sim, self._daemon, self._slurm = sim, daemon, slurm
        live = JobPlacement(pin=_LIVE.placement == "node", fresh_after_s=_LIVE.fresh_after_s)
        self._limits = HarvestLimits(
            PARTITION, Caps(most or _MANY, _MANY), placement=live if start_benefits else JobPlacement()
        )
        self._limits = replace(
            self._limits,
            division=self._division.rules,
            owners=self._division.owners,
            hands=self._division.hands,
            lending=LendingRules(self._division.lend_slots) if self._division.lend_slots else None,
        )
        self._min_expected_life = _LIVE.min_expected_life if start_benefits else None
        self._session = HarvestSession(
            TrackerRules(_UID, _USER, ClusterSection().absent_s, _HEALTH),
            self._mint,
            lambda run, _intent: run,  # no key is needed here: an engine goes on for the run that it is told
        )
        self._waits = False  # a job of ours, or a demand for GPUs to be old enough: what was decided may be another with time alone
        self._polled_at = -math.inf
        self.decided = 0

    def poll(self) -> None:
        """Look at the queue and decide, unless neither it nor the demand changed, and no age matters."""
        now, router, session = self._sim.now, self._daemon.router, self._session
        asked = router.demand(now)
        aged = self._min_expected_life is not None and (self._waits or now - self._polled_at >= _QUIET_S)
        lends = self._limits.lending is not None  # whose samples wait is another at each poll
        if not (aged or lends or self._slurm.changed or self._leaving() or session.moved(asked)):
            return
        self._slurm.changed, self._polled_at = False, now
        self.decided += 1
        view, core = self._slurm.view(), router.core
        output = session.observe(view, workers.leases(core), workers.lives(core), core.condemned, now)
        self._do(Report(output.records, output.gone))
        demand = session.take_demand(asked, lambda _owner: None, "", now)
        if self._division.first_come:
            have = Counter(job.run_id for job in session.tracker.jobs({}) if job.drain_kind is DrainKind.NO)
            demand = in_order(demand, have)
        decision = session.decide(
            view, demand, workers.leases(core), self._limits, self._min_expected_life, now
        )
        procedure = session.perform(decision, demand, output.orphaned_jobs, now)
        outcome = None
        while (command := resume(procedure, outcome)) is not None:
            outcome = self._do(command)
        self._slurm.changed |= bool(decision.actions)
        self._waits = decision.code is HarvestCode.SETTLING or any(
            job.waits for job in session.tracker.jobs({})
        )

    def _leaving(self) -> bool:
        return any(
            one.drain_kind is not DrainKind.NO and one.stage is not Stage.OVER
            for one in self._session.tracker.intents.values()
        )

    def _mint(self, _run: str) -> tuple[str, str]:
        return intent_name(f"{self._slurm.next_number():016x}"), ""

    def _do(self, command: Command) -> Outcome:
        """A virtual ledger is durable at once, and a virtual Slurm refuses nothing."""
        job_id = 0
        match command:
            case Report(_, events):
                for event in events:
                    self._daemon.post(event)
            case CancelJobs(job_ids):
                for one in job_ids:
                    self._slurm.cancel(one)
            case SubmitJob(intent_id, action):
                pinned = action.nodelist[0] if action.nodelist else ""
                job_id = self._slurm.submit(intent_id, action.gpus, pinned, action.run)
            case ReleaseJob():
                raise SimulationError("a standby job is released, and none is submitted here")
        return Outcome(self._sim.now, job_id=job_id)


@functools.lru_cache(maxsize=65_536)
def _node(name: str, gpus: int, allocated: int) -> Node:
    """Few of a site's nodes change between two looks at it."""
    return Node(name, _MIXED, _PARTITIONS, "", gpus, allocated, _CPUS, 0, _MEMORY_MB, 0)
