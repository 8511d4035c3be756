"""What can be written to the ledger: one frozen struct for each kind of fact. Pure.

The core (router machine, harvest tracker) emits records; `ledger.write.writer` turns each into SQL, many records in one transaction, and
reports the ticket of the last one committed. Owns no SQL. `at` is Unix seconds everywhere. Token and logprob payloads are opaque packed
arrays (see `wire`). Ids are given by the core (the writer never invents one), so records can refer to rows of the same transaction.
"""

from __future__ import annotations

from scavenger.ledger.records.base import Record
from scavenger.ledger.records.cluster import (
    AllocationCorrected,
    AllocationEnded,
    AllocationStarted,
    ClusterPolled,
    Decision,
    Event,
    Heartbeat,
    JobEnded,
    JobIntended,
    JobObserved,
    JobSubmitted,
    WorkerJoined,
    WorkerLeft,
)
from scavenger.ledger.records.runs import (
    AttemptGranted,
    CheckpointRecorded,
    ChunkAccepted,
    ContentsReduced,
    GroupAdopted,
    GroupCreated,
    GroupDelivered,
    LeaseEnded,
    LeaseGranted,
    LeaseMoved,
    RunCreated,
    RunEnded,
    SampleEnded,
    SampleFinished,
    SampleReopened,
    StepCommitted,
    StepsRewound,
    VersionPublished,
)
from scavenger.ledger.records.snapshot import (
    EngineLife,
    GroupState,
    JobState,
    RunState,
    SampleState,
    Snapshot,
    WorkerState,
)

__all__ = [
    "AllocationCorrected",
    "AllocationEnded",
    "AllocationStarted",
    "AttemptGranted",
    "CheckpointRecorded",
    "ChunkAccepted",
    "ClusterPolled",
    "ContentsReduced",
    "Decision",
    "EngineLife",
    "Event",
    "GroupAdopted",
    "GroupCreated",
    "GroupDelivered",
    "GroupState",
    "Heartbeat",
    "JobEnded",
    "JobIntended",
    "JobObserved",
    "JobState",
    "JobSubmitted",
    "LeaseEnded",
    "LeaseGranted",
    "LeaseMoved",
    "Record",
    "RunCreated",
    "RunEnded",
    "RunState",
    "SampleEnded",
    "SampleFinished",
    "SampleReopened",
    "SampleState",
    "Snapshot",
    "StepCommitted",
    "StepsRewound",
    "VersionPublished",
    "WorkerJoined",
    "WorkerLeft",
    "WorkerState",
]
