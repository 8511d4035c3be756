"""Records of workers, jobs and the cluster, and of what was decided about them. Pure."""

from __future__ import annotations

from scavenger.ledger.records.base import Record

# ---------------------------------------------------------------- workers, jobs, cluster


class WorkerJoined(Record, frozen=True):
    """`slot`: what the trainer knows a reserved engine by; "" for harvested ones and for one that names none."""

    worker_id: int
    run_id: int
    kind: str
    intent_id: str  # "" for reserved workers
    session: str
    incarnation: int
    job_id: int
    node: str
    gpus: int
    engine: str
    at: float
    slot: str = ""


class WorkerLeft(Record, frozen=True):
    """`notice`: it said goodbye before it went. `salvaged`: accepted tokens of its unfinished samples; `regenerated`: tokens lost."""

    worker_id: int
    reason: str
    notice: bool
    samples: int
    salvaged: int
    regenerated: int
    at: float


class JobIntended(Record, frozen=True):
    """Written before the submission, so that no job of ours is ever unknown. `pinned`: the one node that it is for; "": Slurm chooses."""

    intent_id: str
    run_id: int
    partition: str
    gpus: int
    worker_key: str
    at: float
    pinned: str = ""


class JobSubmitted(Record, frozen=True):
    intent_id: str
    job_id: int
    at: float


class JobObserved(Record, frozen=True):
    """The job's state changed since the last observation. `flags` are joined by ','."""

    intent_id: str
    job_id: int
    state: str
    flags: str
    reason: str
    node: str
    restart_count: int
    at: float


class JobEnded(Record, frozen=True):
    intent_id: str
    state: str
    reason: str
    at: float


class AllocationStarted(Record, frozen=True):
    """A harvested job got its GPUs; `(intent_id, restart_count)` names the allocation."""

    intent_id: str
    restart_count: int
    job_id: int
    node: str
    gpus: int
    at: float


class AllocationEnded(Record, frozen=True):
    intent_id: str
    restart_count: int
    reason: str  # preempted | cancelled | completed | failed | node_fail | timeout | requeued | unknown
    at: float


class AllocationCorrected(Record, frozen=True):
    """Slurm's accounting has the times of an allocation that no poll saw.

    `started_at`, `ended_at`: Slurm's; `at`: when it replied.
    """

    intent_id: str
    restart_count: int
    node: str
    gpus: int
    started_at: float
    ended_at: float
    reason: str
    at: float


class ClusterPolled(Record, frozen=True):
    """GPUs by owner at one poll of the cluster. `gpus_reserved`: on nodes outside the harvest partition."""

    gpus_idle: int
    gpus_harvested: int
    gpus_other_users: int
    gpus_reserved: int
    gpus_unusable: int
    jobs_pending_other_users: int
    at: float


class Decision(Record, frozen=True):
    """One decision of a policy with its reason; `inputs` is JSON.

    `code`: the reason in a word, for reports (a `Code` of the harvester or of the router).
    """

    policy: str
    action: str
    subject: str
    reason: str
    inputs: str
    at: float
    code: str = ""


class Event(Record, frozen=True):
    """Anything else worth keeping: a refused chunk, an unreachable scheduler, a quarantined node. `detail` is JSON."""

    kind: str
    run_id: int
    subject: str
    reason: str
    detail: str
    at: float


class Heartbeat(Record, frozen=True):
    """Nothing happened, and the daemon is there: a transaction without a row of its own, which moves its generation's `committed_at`."""

    at: float
