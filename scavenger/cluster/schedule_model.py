"""Pure: the vocabulary of `scheduler`: a job's phases and their legal moves, its record, events in and actions out.

Knows nothing of how decisions are made, of IO or of clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from scavenger.cluster.model import JobSpec, JobState
from scavenger.errors import ClusterError

_TOP_PRIORITY = 4_294_901_760  # Slurm's own first priority/basic value


class Phase(StrEnum):
    """Where a job is in its life. GRACE and STOPPING still hold GPUs."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    GRACE = "GRACE"
    STOPPING = "STOPPING"
    ENDED = "ENDED"


_LEGAL: dict[Phase, frozenset[Phase]] = {
    Phase.PENDING: frozenset({Phase.RUNNING, Phase.ENDED}),
    Phase.RUNNING: frozenset({Phase.GRACE, Phase.STOPPING, Phase.ENDED}),
    Phase.GRACE: frozenset({Phase.STOPPING, Phase.ENDED}),
    Phase.STOPPING: frozenset({Phase.ENDED, Phase.PENDING}),
    Phase.ENDED: frozenset(),
}
HOLDING = frozenset({Phase.RUNNING, Phase.GRACE, Phase.STOPPING})


class Notice(StrEnum):
    """What a job's processes are sent. STEPS: TERM to all but the batch shell (Slurm's notice reaches steps only)."""

    STEPS = "STEPS"
    TERM = "TERM"
    KILL = "KILL"


# ---- events ---------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Submit:
    spec: JobSpec
    user: str


@dataclass(frozen=True, slots=True)
class Cancel:
    job_id: int


@dataclass(frozen=True, slots=True)
class Requeue:
    job_id: int


@dataclass(frozen=True, slots=True)
class Release:
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
class Tick:
    """Time has passed; see `Scheduler.next_wakeup`."""


Event = Submit | Cancel | Requeue | Release | Exited | NodeDown | NodeUp | Tick


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
    notice: Notice
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
class Record:
    """One job. `stop_as` is what it becomes once its processes are gone; `deadline` the next time something is due."""

    job_id: int
    spec: JobSpec
    user: str
    submit_time: float
    eligible_time: float
    phase: Phase = Phase.PENDING
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

    def move(self, phase: Phase) -> None:
        if phase not in _LEGAL[self.phase]:
            raise ClusterError(f"job {self.job_id}: illegal move {self.phase} -> {phase}")
        self.phase = phase
