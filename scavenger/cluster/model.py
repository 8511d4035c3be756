"""What a cluster looks like to us: frozen dataclasses in Slurm's own terms.

Owns the vocabulary that `port`, `harvest` and `simulate` share. Knows nothing of how it is observed: no commands, no clock.
All times are Unix seconds (float); all durations end in `_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, NamedTuple

import msgspec

#: As Slurm numbers jobs, in 32 bits. Where a message holds it, another process wrote it: the ledger takes no larger integer than 2**63.
JobId = Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


def nodes_in(text: str) -> tuple[str, ...]:
    """The nodes of one job, as `","`-joined text names them; () for ""."""
    return tuple(text.split(",")) if text else ()


class JobState(StrEnum):
    """Base job states, spelled as Slurm spells them."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"


class JobFlag(StrEnum):
    """State flags that may accompany a base state (or stand for it in `squeue`)."""

    COMPLETING = "COMPLETING"
    CONFIGURING = "CONFIGURING"
    REQUEUED = "REQUEUED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    REQUEUE_FED = "REQUEUE_FED"
    RESIZING = "RESIZING"
    SIGNALING = "SIGNALING"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    STAGE_OUT = "STAGE_OUT"
    STOPPED = "STOPPED"
    REVOKED = "REVOKED"
    RESV_DEL_HOLD = (
        "RESV_DEL_HOLD"  # its reservation ended, or was deleted, while it waited: held until its user acts
    )
    LAUNCH_FAILED = "LAUNCH_FAILED"  # from here on: releases after 22.05
    RECONFIG_FAIL = "RECONFIG_FAIL"
    POWER_UP_NODE = "POWER_UP_NODE"
    EXPEDITING = "EXPEDITING"


class PreemptMode(StrEnum):
    """What a partition (or the cluster) does to a job that is preempted."""

    OFF = "OFF"
    REQUEUE = "REQUEUE"
    CANCEL = "CANCEL"
    SUSPEND = "SUSPEND"


class Unread(NamedTuple):
    """A field of one record that cannot be read: its name as Slurm has it, and its value. It is unknown there."""

    field: str
    value: str


#: States beside which new jobs may start. A word in neither list is of an unknown release: the node is not usable.
_USABLE = frozenset(
    {
        "idle",
        "mixed",
        "allocated",
        "planned",
        "completing",
        "cloud",
        "dynamic_norm",
        "undrain",
        "resume",
        "reboot_canceled",
        "perfctrs",
    }
)
_UNUSABLE = frozenset(
    {
        "down",
        "drain",
        "drained",
        "draining",
        "fail",
        "failing",
        "maint",
        "reserved",
        "not_responding",
        "unknown",
        "error",
        "power_down",
        "powered_down",
        "powering_down",
        "powering_up",
        "reboot",
        "reboot_issued",
        "reboot_requested",
        "planned_down",
        "invalid_reg",
        "inval",
        "future",
        "maintenance",
        "blocked",
        "power_up",
        "power_drain",
        "dynamic_future",
        "external",
    }
)
KNOWN_NODE_STATES = _USABLE | _UNUSABLE


@dataclass(frozen=True, slots=True)
class NodeHost:
    """On which host a node's slurmd runs, as Slurm knows it: its name there, and the address at which slurmctld finds it."""

    hostname: str
    address: str


@dataclass(frozen=True, slots=True)
class Node:
    """One compute node. `states` holds Slurm's lower-case state words, flags included ('idle', 'not_responding').

    `unread`: what could not be read. Then its GPUs count as taken, it is not usable, or its memory is 0.
    """

    name: str
    states: frozenset[str]
    partitions: frozenset[str]
    gpu_type: str
    gpus: Count
    gpus_allocated: Count
    cpus: int
    cpus_allocated: int
    memory_mb: int
    memory_allocated_mb: int
    unread: tuple[Unread, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether new jobs may start here at all. Not beside a state that is not known."""
        return self.states <= _USABLE

    @property
    def idle_gpus(self) -> int:
        return max(0, self.gpus - self.gpus_allocated) if self.usable else 0


@dataclass(frozen=True, slots=True)
class Job:
    """One job as the queue shows it. `gpus` is the total over its nodes; `gpus_by_node` is known only while it holds them.

    `planned`: the nodes on which backfill expects a waiting job to start at `start_time`; () where it plans none.
    `exit_code`: the shell's view, 128 + signal; None where it could not be read.
    `unread`: what could not be read; such a time or priority is 0, such a limit infinite.
    `account`: empty where Slurm has none for it, for one because it keeps no accounts.
    """

    job_id: JobId
    user: str
    partition: str
    state: JobState
    flags: frozenset[JobFlag] = frozenset()
    reason: str = ""
    name: str = ""
    comment: str = ""
    nodes: tuple[str, ...] = ()
    gpus: Count = 0
    gpus_by_node: tuple[tuple[str, Count], ...] = ()
    n_nodes: int = 1
    cpus: int = 1
    priority: int = 0
    restart_count: Count = 0
    submit_time: float = 0.0
    eligible_time: float = 0.0
    start_time: float = 0.0
    end_time: float = 0.0
    time_limit_s: float = 0.0
    exit_code: int | None = 0
    planned: tuple[str, ...] = ()
    unread: tuple[Unread, ...] = ()
    account: str = ""

    @property
    def has_gpus_allocated(self) -> bool:
        """RUNNING, SUSPENDED or COMPLETING: its GPUs cannot be given to another job yet."""
        return self.state in (JobState.RUNNING, JobState.SUSPENDED) or JobFlag.COMPLETING in self.flags

    @property
    def waits(self) -> bool:
        return self.state is JobState.PENDING and JobFlag.COMPLETING not in self.flags


@dataclass(frozen=True, slots=True)
class JobLife:
    """One life of a job as Slurm's accounting has it: a job that was requeued has several. Times are Unix s; `end_time` 0: it goes on.

    `state`: the word of how it ended (PREEMPTED, REQUEUED, CANCELLED, ...).
    """

    job_id: JobId
    name: str
    state: str
    submit_time: float
    start_time: float  # 0: it never started, where it has no nodes either; else Slurm lost it
    end_time: float
    nodes: tuple[str, ...] = ()
    gpus: Count = 0


@dataclass(frozen=True, slots=True)
class Partition:
    name: str
    nodes: frozenset[str]
    priority_tier: int
    preempt_mode: PreemptMode
    grace_s: float
    max_time_s: float
    up: bool = True
    restricted: bool = False  # only named accounts, groups or QOS may use it


@dataclass(frozen=True, slots=True)
class Reservation:
    """Nodes that a reservation sets aside, for maintenance or a course, from `start` to `end` (Unix s)."""

    name: str
    nodes: frozenset[str]
    start: float
    end: float
    maintenance: bool = False


@dataclass(frozen=True, slots=True)
class Qos:
    """One QOS of slurmdbd. `preempts`: names of the QOS whose jobs it may preempt.

    `preempt_mode`: what happens to its jobs when they are preempted; None: what the partition says.
    `exempt_s`: PreemptExemptTime, in place of the cluster's; None: the cluster's.
    `limits`: those that are set, as Slurm spells them.
    """

    name: str
    preempts: frozenset[str]
    preempt_mode: PreemptMode | None = None
    grace_s: float = 0.0
    exempt_s: float | None = None
    usage_factor: float = 1.0
    limits: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """What does not change from one observation to the next (until a reconfigure)."""

    name: str
    backend: str
    version: str
    preempt_type: str
    kill_wait_s: float
    message_timeout_s: float
    user: str
    switches: tuple[tuple[str, str], ...] = ()  # (node, its switch or block); none where no topology is known
    plan_step_s: float = 60.0  # bf_resolution: backfill lets a plan begin at a whole one of these
    exempt_s: float = 0.0  # PreemptExemptTime: how long after its start no job may be preempted
    private: frozenset[str] = (
        frozenset()
    )  # PrivateData: what ordinary users may not see of others ("jobs", "nodes", ...)
    accounting: bool = False  # slurmdbd keeps every life of a job: `port.Cluster.accounting` can be asked
    qos: tuple[Qos, ...] | None = None  # by name; None: the site has no slurmdbd, or it has not replied yet

    @property
    def preempts_by(self) -> str:
        """partition_prio | qos | none"""
        kind = self.preempt_type.rpartition("/")[2].strip("() ").lower()
        return "none" if kind in ("", "null") else kind


@dataclass(frozen=True, slots=True)
class ClusterView:
    """One complete observation. A failed or truncated observation never becomes a view: it raises `ClusterUnavailable`."""

    observed_at: float
    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...]
    partitions: tuple[Partition, ...]
    reservations: tuple[Reservation, ...] = ()

    def partition(self, name: str) -> Partition | None:
        return next((p for p in self.partitions if p.name == name), None)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job to submit. `script` is the whole batch script; `argv` options are built from the fields, never by the caller.

    `gpus` is each node's share (as `--gres`); a `Job`'s is the total over its nodes.
    """

    name: str
    comment: str
    partition: str
    script: str
    gpus: int = 0
    nodes: int = 1
    tasks: int = 1
    cpus_per_task: int = 1
    memory_mb: int = 0
    gpu_type: str = ""
    time_s: float = 0.0
    time_min_s: float = 0.0
    requeue: bool = True
    nice: int = 0
    begin_s: float = 0.0  # it may not begin sooner than so long after its submission, unless it is released
    nodelist: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    output: str = "/dev/null"
    workdir: str = ""
    account: str = ""
    qos: str = ""
    wckey: str = ""
    constraint: str = ""
    environment: dict[str, str] = field(default_factory=dict)
