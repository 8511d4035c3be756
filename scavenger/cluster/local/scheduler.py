"""Pure: a small partition-priority scheduler with preemption and requeue, in Slurm's terms.

Boundary: scheduling itself; pure.

Events in, actions out: `Scheduler.step(event, now) -> actions`. No IO, no clock, no randomness; everything is sorted
before it is decided on, so equal events give equal actions. `local` drives real processes with it; a simulator may drive
virtual ones.

What it models, and how it differs from Slurm:
- Jobs are considered by PriorityTier, then priority (first come first served, less `nice`). The first job of a partition
  that cannot start blocks the rest of that partition; there is no backfill within a partition.
- Preemption by partition priority: a higher tier takes GPUs from partitions of a lower tier whose PreemptMode is REQUEUE
  or CANCEL. GraceTime > 0: notice now, the end after the grace. GraceTime = 0: the end now. "The end" is TERM, then KILL
  after KillWait. A job that exits during the grace has simply ended, unless it put itself back (`JobRequeue`) first.
- A requeued job keeps its id, its restart count grows by one, and it may not start again for `requeue_delay_s`.
- A lost node kills its jobs at once and with no notice; they are requeued.
- Memory is not counted. CPUs are.

Pure: the vocabulary of `scheduler`: a job's phases and their legal moves, its record, events in and actions out.

Knows nothing of how decisions are made, of IO or of clocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from scavenger.cluster.layout import ClusterLayout, PartitionLayout
from scavenger.cluster.model import ClusterView, Job, JobFlag, JobSpec, JobState, Node, Partition, PreemptMode
from scavenger.errors import ClusterError

_TOP_PRIORITY = 4_294_901_760  # Slurm's own first priority/basic value


class JobPhase(StrEnum):
    """Where a job is in its life. GRACE and STOPPING still hold GPUs."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    GRACE = "GRACE"
    STOPPING = "STOPPING"
    ENDED = "ENDED"


_LEGAL: dict[JobPhase, frozenset[JobPhase]] = {
    JobPhase.PENDING: frozenset({JobPhase.RUNNING, JobPhase.ENDED}),
    JobPhase.RUNNING: frozenset({JobPhase.GRACE, JobPhase.STOPPING, JobPhase.ENDED}),
    JobPhase.GRACE: frozenset({JobPhase.STOPPING, JobPhase.ENDED}),
    JobPhase.STOPPING: frozenset({JobPhase.ENDED, JobPhase.PENDING}),
    JobPhase.ENDED: frozenset(),
}
HOLDING = frozenset({JobPhase.RUNNING, JobPhase.GRACE, JobPhase.STOPPING})


class JobSignal(StrEnum):
    """What a job's processes are sent. STEPS: TERM to all but the batch shell (Slurm's notice reaches steps only)."""

    STEPS = "STEPS"
    TERM = "TERM"
    KILL = "KILL"


# ---- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobSubmission:
    spec: JobSpec
    user: str


@dataclass(frozen=True, slots=True)
class JobCancellation:
    job_id: int


@dataclass(frozen=True, slots=True)
class JobRequeue:
    job_id: int


@dataclass(frozen=True, slots=True)
class JobRelease:
    """A waiting job may begin now, and only on this node."""

    job_id: int
    node: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The processes of one incarnation are all gone. `exit_code` is the shell's view: 128 + signal for a killed one."""

    job_id: int
    restart_count: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class NodeDown:
    node: str


@dataclass(frozen=True, slots=True)
class NodeUp:
    node: str


@dataclass(frozen=True, slots=True)
class SchedulerTick:
    """Time has passed; see `Scheduler.next_wakeup`."""


Event = JobSubmission | JobCancellation | JobRequeue | JobRelease | Exited | NodeDown | NodeUp | SchedulerTick


# ---- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    job_id: int


@dataclass(frozen=True, slots=True)
class Start:
    """Start the job's script on its first node. `gpus` are the indices it holds on each node."""

    job_id: int
    restart_count: int
    spec: JobSpec
    gpus: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Signal:
    job_id: int
    restart_count: int
    notice: JobSignal
    reason: str


@dataclass(frozen=True, slots=True)
class Requeued:
    job_id: int
    restart_count: int
    eligible_time: float
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    job_id: int
    state: JobState
    exit_code: int
    reason: str


Action = Submitted | Start | Signal | Requeued | Ended


@dataclass(slots=True)
class JobRecord:
    """One job. `stop_as` is what it becomes once its processes are gone; `deadline` the next time something is due."""

    job_id: int
    spec: JobSpec
    user: str
    submit_time: float
    eligible_time: float
    phase: JobPhase = JobPhase.PENDING
    state: JobState = JobState.PENDING
    reason: str = "None"
    restart_count: int = 0
    start_time: float = 0.0
    end_time: float = 0.0
    exit_code: int = 0
    stop_as: JobState | None = None
    requeue: bool = False
    kill_sent: bool = False
    deadline: float = float("inf")
    gpus: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ran_on: tuple[str, ...] = ()  # where an ended job was: Slurm goes on listing its nodes

    @property
    def priority(self) -> int:
        return max(1, _TOP_PRIORITY - self.job_id - self.spec.nice)

    @property
    def cpus_per_node(self) -> int:
        return -(-self.spec.tasks * self.spec.cpus_per_task // self.spec.nodes)

    def move(self, phase: JobPhase) -> None:
        if phase not in _LEGAL[self.phase]:
            raise ClusterError(f"job {self.job_id}: illegal move {self.phase} -> {phase}")
        self.phase = phase


_KEEP_ENDED_S = 300.0  # MinJobAge


@dataclass(slots=True)
class _FreeNode:
    """What one node can still give in one pass. `soon` counts free GPUs and those of jobs that are on their way out."""

    free: int
    soon: int
    cpus: int
    soon_cpus: int


class Scheduler:
    """The state of one cluster, and `step`. One object per cluster; not shared between threads."""

    def __init__(self, layout: ClusterLayout) -> None:
        self.layout = layout.check()
        self.jobs: dict[int, JobRecord] = {}
        self.down: set[str] = set()
        self._next_id = 1
        self._parts = {part.name: part for part in layout.partitions}

    def step(self, event: Event, now: float) -> tuple[Action, ...]:
        """Apply one event. Raises `ClusterError` for what Slurm would refuse; then nothing has changed."""
        actions: list[Action] = []
        match event:
            case JobSubmission():
                actions += self._submit(event, now)
            case JobCancellation():
                actions += self._cancel(self._find(event.job_id), now)
            case JobRequeue():
                actions += self._requeue(self._find(event.job_id), now)
            case JobRelease():
                self._release(self._find(event.job_id), self._node(event.node), now)
            case Exited():
                actions += self._exited(event, now)
            case NodeDown():
                actions += self._node_down(self._node(event.node), now)
            case NodeUp():
                self.down.discard(self._node(event.node))
            case SchedulerTick():
                pass
        actions += self._expire(now)
        actions += self._schedule(now)
        return tuple(actions)

    def next_wakeup(self) -> float:
        """When to send the next `SchedulerTick` if nothing else happens; infinite when nothing is due."""
        eligible = (
            job.eligible_time
            for job in self.jobs.values()
            if job.phase is JobPhase.PENDING and job.reason == "BeginTime"
        )
        deadlines = (job.deadline for job in self.jobs.values() if job.phase in HOLDING)
        return min((*eligible, *deadlines), default=float("inf"))

    # ---- events

    def _find(self, job_id: int) -> JobRecord:
        job = self.jobs.get(job_id)
        if job is None:
            raise ClusterError(f"Invalid job id specified: {job_id}")
        return job

    def _node(self, name: str) -> str:
        if name not in self.layout.nodes:
            raise ClusterError(
                f"Invalid node name specified: {name}", f"use one of {', '.join(self.layout.nodes)}"
            )
        return name

    def _submit(self, event: JobSubmission, now: float) -> list[Action]:
        spec = event.spec
        part = self._parts.get(spec.partition)
        if part is None:
            raise ClusterError(
                f"Invalid partition name specified: {spec.partition}", f"use one of {', '.join(self._parts)}"
            )
        if not spec.script.startswith("#!"):
            raise ClusterError("This does not look like a batch script: its first line must start with #!")
        job = JobRecord(self._next_id, spec, event.user, submit_time=now, eligible_time=now + spec.begin_s)
        job.reason = "BeginTime" if spec.begin_s > 0 else job.reason
        fits = spec.gpus <= self.layout.gpus and job.cpus_per_node <= self.layout.cpus
        kind = spec.gpu_type in ("", self.layout.gpu_type)
        if not (fits and kind and len(self._allowed(job)) >= spec.nodes):
            raise ClusterError("Requested node configuration is not available")
        self.jobs[job.job_id] = job
        self._next_id += 1
        return [Submitted(job.job_id)]

    def _cancel(self, job: JobRecord, now: float) -> list[Action]:
        if job.phase is JobPhase.PENDING:
            return [self._end(job, JobState.CANCELLED, 0, "cancelled", now)]
        if job.phase in (JobPhase.RUNNING, JobPhase.GRACE):
            return self._stop(job, JobState.CANCELLED, "cancelled", now)
        if job.phase is JobPhase.STOPPING and job.requeue:  # a cancellation beats a requeue that is under way
            job.requeue, job.stop_as = False, JobState.CANCELLED
        return []

    def _requeue(self, job: JobRecord, now: float) -> list[Action]:
        if job.phase not in (JobPhase.RUNNING, JobPhase.GRACE) or not job.spec.requeue:
            raise ClusterError(
                f"Job {job.job_id} cannot be requeued: {job.phase}, requeue={job.spec.requeue}"
            )
        return self._stop(job, JobState.PREEMPTED, "requeued", now, requeue=True)

    def _release(self, job: JobRecord, node: str, now: float) -> None:
        if job.phase is not JobPhase.PENDING:
            raise ClusterError(f"Job {job.job_id} is no longer pending execution")
        job.spec, job.eligible_time = replace(job.spec, nodelist=(node,)), now

    def _exited(self, event: Exited, now: float) -> list[Action]:
        job = self._find(event.job_id)
        if job.phase not in HOLDING or job.restart_count != event.restart_count:
            raise ClusterError(
                f"job {event.job_id} restart {event.restart_count} does not run: "
                f"{job.phase}, restart {job.restart_count}"
            )
        if job.phase is not JobPhase.STOPPING:
            state = JobState.FAILED if event.exit_code else JobState.COMPLETED
            return [
                self._end(job, state, event.exit_code, "NonZeroExitCode" if event.exit_code else "None", now)
            ]
        if not job.requeue:
            return [self._end(job, job.stop_as or JobState.FAILED, event.exit_code, job.reason, now)]
        job.move(JobPhase.PENDING)
        job.gpus, job.deadline, job.kill_sent, job.stop_as, job.requeue = {}, float("inf"), False, None, False
        why, job.state, job.reason = job.reason, JobState.PENDING, "BeginTime"
        job.restart_count += 1
        job.submit_time, job.eligible_time = now, now + self.layout.requeue_delay_s
        return [Requeued(job.job_id, job.restart_count, job.eligible_time, why)]

    def _node_down(self, node: str, now: float) -> list[Action]:
        self.down.add(node)
        hit = [
            job for job in self._in_order() if node in job.gpus and job.phase in HOLDING and not job.kill_sent
        ]
        return [action for job in hit for action in self._lose(job, f"node {node} failed", now)]

    def _lose(self, job: JobRecord, why: str, now: float) -> list[Action]:
        if job.phase is JobPhase.STOPPING:  # keeps what it was stopped as, but no longer gets its KillWait
            job.kill_sent, job.deadline = True, float("inf")
            return [Signal(job.job_id, job.restart_count, JobSignal.KILL, why)]
        return self._stop(job, JobState.NODE_FAIL, why, now, requeue=job.spec.requeue, at_once=True)

    # ---- moves

    def _end(self, job: JobRecord, state: JobState, exit_code: int, reason: str, now: float) -> Ended:
        job.move(JobPhase.ENDED)
        job.state, job.exit_code, job.reason, job.end_time = state, exit_code, reason, now
        job.ran_on = tuple(sorted(job.gpus))
        job.gpus, job.deadline = {}, now + _KEEP_ENDED_S
        return Ended(job.job_id, state, exit_code, reason)

    def _stop(
        self,
        job: JobRecord,
        stop_as: JobState,
        reason: str,
        now: float,
        *,
        requeue: bool = False,
        at_once: bool = False,
    ) -> list[Action]:
        job.move(JobPhase.STOPPING)
        job.stop_as, job.requeue, job.reason, job.kill_sent = stop_as, requeue, reason, at_once
        job.deadline = float("inf") if at_once else now + self.layout.kill_wait_s
        return [Signal(job.job_id, job.restart_count, JobSignal.KILL if at_once else JobSignal.TERM, reason)]

    def _preempt(self, victim: JobRecord, preemptor: JobRecord, now: float) -> list[Action]:
        why = f"preempted by job {preemptor.job_id}"
        grace = self._parts[victim.spec.partition].grace_s
        if grace > 0:
            victim.move(JobPhase.GRACE)
            victim.deadline = min(victim.deadline, now + grace)
            victim.reason = why
            return [Signal(victim.job_id, victim.restart_count, JobSignal.STEPS, why)]
        return self._end_preempted(victim, why, now)

    def _end_preempted(self, job: JobRecord, why: str, now: float) -> list[Action]:
        mode = self._parts[job.spec.partition].preempt_mode
        back = mode is PreemptMode.REQUEUE and job.spec.requeue
        return self._stop(job, JobState.PREEMPTED, why, now, requeue=back)

    def _expire(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for job in self._in_order():
            if job.deadline > now:
                continue
            if job.phase is JobPhase.ENDED:
                del self.jobs[job.job_id]
            elif job.phase is JobPhase.RUNNING:
                actions += self._stop(job, JobState.TIMEOUT, "TimeLimit", now)
            elif job.phase is JobPhase.GRACE:
                actions += self._end_preempted(job, job.reason, now)
            elif job.phase is JobPhase.STOPPING:
                job.kill_sent, job.deadline = True, float("inf")
                actions.append(
                    Signal(job.job_id, job.restart_count, JobSignal.KILL, f"KillWait is over ({job.reason})")
                )
        return actions

    # ---- scheduling

    def _in_order(self) -> list[JobRecord]:
        return sorted(self.jobs.values(), key=lambda job: job.job_id)

    def _part(self, job: JobRecord) -> PartitionLayout:
        return self._parts[job.spec.partition]

    def _allowed(self, job: JobRecord) -> list[str]:
        """Nodes the job may use at all, in the layout's order."""
        inside, only = set(self._part(job).nodes), set(job.spec.nodelist)
        return [
            name
            for name in self.layout.nodes
            if name in inside and name not in job.spec.exclude and (not only or name in only)
        ]

    def _free_nodes(self) -> dict[str, _FreeNode]:
        gpus, cpus = self.layout.gpus, self.layout.cpus
        free_nodes = {
            name: _FreeNode(gpus, gpus, cpus, cpus) for name in self.layout.nodes if name not in self.down
        }
        for job in self.jobs.values():
            for node, held in job.gpus.items():
                if node in free_nodes:
                    free_node, leaving = free_nodes[node], job.phase in (JobPhase.GRACE, JobPhase.STOPPING)
                    free_node.free -= len(held)
                    free_node.cpus -= job.cpus_per_node
                    free_node.soon -= 0 if leaving else len(held)
                    free_node.soon_cpus -= 0 if leaving else job.cpus_per_node
        return free_nodes

    def _schedule(self, now: float) -> list[Action]:
        """One pass over the queue: start what fits, preempt for what does not, and hold what a waiting job will take."""
        pending = [
            job for job in self.jobs.values() if job.phase is JobPhase.PENDING and job.eligible_time <= now
        ]
        pending.sort(key=lambda job: (-self._part(job).priority_tier, -job.priority, job.job_id))
        free_nodes = self._free_nodes()
        blocked: dict[str, JobRecord] = {}
        actions: list[Action] = []
        for job in pending:
            if job.spec.partition in blocked:
                job.reason = "Priority"
                continue
            names = [
                name
                for name in self._allowed(job)
                if name in free_nodes and not self._held(job, name, blocked)
            ]
            if self._part(job).spread:
                names.sort(key=lambda name: -free_nodes[name].free)  # stable: ties stay in the layout's order
            fit = [name for name in names if self._fits(job, free_nodes[name].free, free_nodes[name].cpus)][
                : job.spec.nodes
            ]
            if len(fit) == job.spec.nodes:
                actions.append(self._start(job, fit, free_nodes, now))
                continue
            blocked[job.spec.partition] = job
            job.reason = "Resources"
            actions += self._preempt_for(job, names, free_nodes, now)
        return actions

    @staticmethod
    def _fits(job: JobRecord, gpus: int, cpus: int) -> bool:
        return gpus >= job.spec.gpus and cpus >= job.cpus_per_node

    def _held(self, job: JobRecord, node: str, blocked: dict[str, JobRecord]) -> bool:
        """Whether a waiting job that could not take this job's place again has a right to the node before it."""
        return any(
            node in self._allowed(waiting) and not self._may_preempt(waiting, job)
            for waiting in blocked.values()
        )

    def _may_preempt(self, strong: JobRecord, weak: JobRecord) -> bool:
        victim = self._part(weak)
        return (
            victim.preempt_mode in (PreemptMode.REQUEUE, PreemptMode.CANCEL)
            and self._part(strong).priority_tier > victim.priority_tier
        )

    def _start(
        self, job: JobRecord, nodes: Iterable[str], free_nodes: dict[str, _FreeNode], now: float
    ) -> Start:
        taken: dict[str, tuple[int, ...]] = {}
        for node in nodes:
            used = {index for other in self.jobs.values() for index in other.gpus.get(node, ())}
            taken[node] = tuple(index for index in range(self.layout.gpus) if index not in used)[
                : job.spec.gpus
            ]
            _take(free_nodes[node], job)
        job.move(JobPhase.RUNNING)
        job.gpus, job.state, job.reason, job.start_time = taken, JobState.RUNNING, "None", now
        limit = self._limit_s(job)
        job.deadline = now + limit if limit else float("inf")
        return Start(job.job_id, job.restart_count, job.spec, tuple(sorted(taken.items())))

    def _limit_s(self, job: JobRecord) -> float:
        limits = [limit for limit in (job.spec.time_s, self._part(job).max_time_s) if limit]
        return min(limits, default=0.0)

    def _preempt_for(
        self, job: JobRecord, names: list[str], free_nodes: dict[str, _FreeNode], now: float
    ) -> list[Action]:
        """Preempt the fewest GPUs' worth of jobs that lets `job` start, and hold the room; nothing if it cannot be had."""
        options = []
        for order, name in enumerate(names):
            victims = self._victims(job, name, free_nodes[name])
            if victims is not None:
                cost = sum(len(victim.gpus[name]) for victim in victims)
                options.append((cost, len(victims), order, name, victims))
        options.sort(key=lambda option: option[:3])
        if len(options) < job.spec.nodes:
            return []
        actions: list[Action] = []
        for _, _, _, name, victims in options[: job.spec.nodes]:
            for victim in victims:
                if victim.phase is JobPhase.RUNNING:
                    for node, held in victim.gpus.items():
                        if node in free_nodes:
                            free_nodes[node].soon += len(held)
                            free_nodes[node].soon_cpus += victim.cpus_per_node
                    actions += self._preempt(victim, job, now)
            _take(free_nodes[name], job)
        return actions

    def _victims(self, job: JobRecord, node: str, free_node: _FreeNode) -> tuple[JobRecord, ...] | None:
        """The jobs to preempt on one node: lowest tier, then youngest first; empty when it is enough to wait, None if no."""
        gpus, cpus = free_node.soon, free_node.soon_cpus
        running = [
            other
            for other in self.jobs.values()
            if node in other.gpus and other.phase is JobPhase.RUNNING and self._may_preempt(job, other)
        ]
        running.sort(key=lambda other: (self._part(other).priority_tier, -other.start_time, -other.job_id))
        chosen: list[JobRecord] = []
        for other in running:
            if self._fits(job, gpus, cpus):
                break
            if (gpus < job.spec.gpus and other.gpus[node]) or cpus < job.cpus_per_node:
                chosen.append(other)
                gpus += len(other.gpus[node])
                cpus += other.cpus_per_node
        return tuple(chosen) if self._fits(job, gpus, cpus) else None

    # ---- observation

    def view(self, now: float) -> ClusterView:
        """The cluster as Slurm would show it. A job on its way out is RUNNING with the flag COMPLETING."""
        return ClusterView(
            observed_at=now,
            nodes=tuple(self._view_node(name) for name in sorted(self.layout.nodes)),
            jobs=tuple(self._view_job(job) for job in self._in_order()),
            partitions=tuple(
                Partition(
                    name=part.name,
                    nodes=frozenset(part.nodes),
                    priority_tier=part.priority_tier,
                    preempt_mode=part.preempt_mode,
                    grace_s=part.grace_s,
                    max_time_s=part.max_time_s or float("inf"),
                )
                for part in sorted(self.layout.partitions, key=lambda part: part.name)
            ),
        )

    def _view_node(self, name: str) -> Node:
        here = [job for job in self._in_order() if name in job.gpus]
        gpus, cpus = sum(len(job.gpus[name]) for job in here), sum(job.cpus_per_node for job in here)
        load = "idle" if not here else "allocated" if cpus >= self.layout.cpus else "mixed"
        return Node(
            name=name,
            states=frozenset({"down" if name in self.down else load}),
            partitions=frozenset(part.name for part in self.layout.partitions if name in part.nodes),
            gpu_type=self.layout.gpu_type,
            gpus=self.layout.gpus,
            gpus_allocated=gpus,
            cpus=self.layout.cpus,
            cpus_allocated=cpus,
            memory_mb=1_000_000,
            memory_allocated_mb=0,
        )

    def _view_job(self, job: JobRecord) -> Job:
        stopping = job.phase is JobPhase.STOPPING
        return Job(
            job_id=job.job_id,
            user=job.user,
            partition=job.spec.partition,
            state=job.state,
            flags=frozenset({JobFlag.COMPLETING}) if stopping else frozenset(),
            reason="" if job.reason == "None" else job.reason,
            name=job.spec.name,
            comment=job.spec.comment,
            nodes=tuple(sorted(job.gpus)) or job.ran_on,
            gpus=job.spec.gpus * job.spec.nodes,
            gpus_by_node=tuple((node, len(held)) for node, held in sorted(job.gpus.items()) if held),
            n_nodes=job.spec.nodes,
            cpus=job.spec.tasks * job.spec.cpus_per_task,
            priority=job.priority,
            restart_count=job.restart_count,
            submit_time=job.submit_time,
            eligible_time=job.eligible_time,
            start_time=job.start_time,
            end_time=job.end_time,
            time_limit_s=self._limit_s(job) or float("inf"),
            exit_code=job.exit_code,
        )


def _take(free_node: _FreeNode, job: JobRecord) -> None:
    """Promise the job its share of a node: out of what is free first, so that no later job starts on it."""
    free_node.free, free_node.soon = max(0, free_node.free - job.spec.gpus), free_node.soon - job.spec.gpus
    free_node.cpus, free_node.soon_cpus = (
        max(0, free_node.cpus - job.cpus_per_node),
        free_node.soon_cpus - job.cpus_per_node,
    )
