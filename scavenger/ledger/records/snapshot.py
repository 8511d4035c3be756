"""What a restarted daemon reads: the state that the records of before add up to. Pure.

Boundary: what is read back, beside what is written.
"""

from __future__ import annotations

import msgspec

from scavenger.ledger.records.cluster import JobIntended, WorkerJoined
from scavenger.ledger.records.runs import CheckpointRecorded, GroupCreated, RunCreated, VersionPublished


class RunState(msgspec.Struct, frozen=True):
    """A run as the ledger has it. Versions come without their manifest, but for the newest few and what their adapters are merged with."""

    created: RunCreated
    attempt: int
    resume_step: int
    last_step: int
    engine: str
    config: str
    versions: tuple[VersionPublished, ...]
    checkpoints: tuple[CheckpointRecorded, ...]
    ended: bool = False
    job_id: int = 0  # Slurm's, of the newest attempt's trainer


class SampleState(msgspec.Struct, frozen=True):
    """A sample of a group that may still be delivered. `length`: its accepted tokens; what they are is read when it is needed.

    `state`: "open" (not complete), "complete", or an end that a replay may reopen. `lease`: the open lease's (epoch, worker_id, version).
    `epoch`: the highest ever granted.
    """

    sample_id: int
    index: int
    state: str
    epoch: int
    moves: int
    length: int
    finish: str
    reward: float | None
    lease: tuple[int, int, int] | None
    ended_step: int = 0
    ended_attempt: int = 0
    reason: str = ""  # why it ended
    reward_version: str = ""


class GroupState(msgspec.Struct, frozen=True):
    created: GroupCreated
    version: int
    samples: tuple[SampleState, ...]


class WorkerState(msgspec.Struct, frozen=True):
    """A worker that joined and is not known to have left."""

    joined: WorkerJoined


class EngineLife(msgspec.Struct, frozen=True):
    """One life of a job by its engine: registered, and known to have been there until `seen_at` (Unix s)."""

    incarnation: int
    node: str
    joined_at: float
    seen_at: float


class JobState(msgspec.Struct, frozen=True):
    """A job intent that has not ended. `job_id` 0: intended, not known to be submitted. `last_allocation`:
    the restart count of its newest allocation,
    -1 where it has none; `free_since`: the last moment (Unix s) at which it is known to have had no GPU. `lives`: engines of lives that
    have no allocation, or have one that is open.
    """

    intended: JobIntended
    job_id: int
    last_state: str
    restart_count: int
    node: str
    allocation_open: bool
    allocated_since: float = 0.0  # Unix s; 0 = it has no allocation
    last_allocation: int = -1
    free_since: float = 0.0
    lives: tuple[EngineLife, ...] = ()
    polled_at: float = 0.0  # Unix s, the last poll of the whole cluster, at which an open allocation was one


class Snapshot(msgspec.Struct, frozen=True):
    """Everything a restarted daemon needs. Groups: all of unfinished runs that are open, complete but not final,
    or consumed by steps later than the oldest kept checkpoint's. `next_*` are greater than every id in use."""

    next_run_id: int
    next_group_id: int
    next_sample_id: int
    next_worker_id: int
    runs: tuple[RunState, ...]
    groups: tuple[GroupState, ...]
    workers: tuple[WorkerState, ...]
    jobs: tuple[JobState, ...]
    retries: tuple[
        tuple[int, str, int, int, int], ...
    ] = ()  # (run_id, purpose, step, prompt_index, retry) of the newest group given up
