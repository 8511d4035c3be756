"""Records of runs, their groups and their samples. Pure."""

from __future__ import annotations

from scavenger.ledger.records.base import Record

# ---------------------------------------------------------------- runs


class RunCreated(Record, frozen=True):
    run_id: int
    name: str
    owner_key: str
    seed: int
    config: str
    engine: str  # EngineSpec as JSON
    tokenizer: str
    at: float


class AttemptGranted(Record, frozen=True):
    """`resume_step`: the step of the checkpoint it starts from. The run's config and engine are those of the newest attempt."""

    run_id: int
    attempt: int
    host: str
    job_id: int
    resume_step: int
    config: str
    engine: str
    at: float


class RunEnded(Record, frozen=True):
    run_id: int
    state: str  # "finished" | "failed" | "stopped"
    reason: str
    at: float


class VersionPublished(Record, frozen=True):
    run_id: int
    version: int
    step: int
    attempt: int
    root: bytes
    manifest: bytes
    nbytes: int
    at: float


class StepCommitted(Record, frozen=True):
    """An optimizer step (purpose "train") or an evaluation ("eval"). `metrics` is JSON."""

    run_id: int
    step: int
    purpose: str
    attempt: int
    version: int
    metrics: str
    at: float


class StepsRewound(Record, frozen=True):
    """A new attempt starts from the checkpoint of `to_step`: later commits did not survive."""

    run_id: int
    attempt: int
    to_step: int
    at: float


class CheckpointRecorded(Record, frozen=True):
    """`kept`: steps of the checkpoints that the trainer keeps from now on, ascending, as JSON; "" = it did not say (earlier releases)."""

    run_id: int
    step: int
    version: int
    root: bytes
    path: str
    at: float
    kept: str = ""


# ---------------------------------------------------------------- groups and samples


class GroupCreated(Record, frozen=True):
    """A group and its n samples, whose ids are `first_sample_id .. first_sample_id + n - 1` in the order of their index.

    `retry` counts how often this (run, purpose, step, prompt_index) was given up before:
    0, and one more after each supersession.
    """

    group_id: int
    run_id: int
    purpose: str
    step: int
    prompt_index: int
    retry: int
    version: int
    prompt: bytes
    n: int
    first_sample_id: int
    sampling: str  # wire.Sampling as JSON
    meta: str
    at: float


class GroupAdopted(Record, frozen=True):
    """An existing group goes on under a new version with an equal root hash (a replay after a trainer's restart)."""

    group_id: int
    version: int
    at: float


class LeaseGranted(Record, frozen=True):
    sample_id: int
    epoch: int
    worker_id: int
    version: int
    offset: int
    at: float


class LeaseEnded(Record, frozen=True):
    """`length`: accepted tokens of the sample then. `regenerated`: tokens known to be lost with it (heartbeat length - accepted)."""

    sample_id: int
    epoch: int
    reason: str
    length: int
    regenerated: int
    at: float


class LeaseMoved(Record, frozen=True):
    """A lease's end and, in the same event, the grant of the next one: `epoch` ended with `length` tokens, `epoch + 1` goes on from there.

    `worker_id`: who has it now. It says what `LeaseEnded` and `LeaseGranted` say, for less work: a lost fleet's samples move at once.
    """

    sample_id: int
    epoch: int
    reason: str
    length: int
    regenerated: int
    worker_id: int
    version: int
    at: float


class ChunkAccepted(Record, frozen=True):
    sample_id: int
    epoch: int
    offset: int
    tokens: bytes
    logprobs: bytes
    raw_logprobs: bytes
    version: int
    worker_id: int
    at: float


class SampleFinished(Record, frozen=True):
    """The sample's last token was accepted. `finish`: "stop" | "length"."""

    sample_id: int
    finish: str
    length: int
    at: float


class SampleEnded(Record, frozen=True):
    """A final or replayable end. `state`: consumed | filtered | masked | evaluated | surplus | superseded | poisoned.

    `step` and `attempt` are those of the commit (0 where none was). A later record for the same sample replaces the earlier one.
    """

    sample_id: int
    state: str
    reason: str
    step: int
    attempt: int
    reward: float | None
    advantage: float | None
    at: float
    reward_version: str = ""  # of the function that gave the reward


class SampleReopened(Record, frozen=True):
    """A consumed sample is offered again to a later attempt (I3); its reward stays."""

    sample_id: int
    attempt: int
    at: float


class ContentsReduced(Record, frozen=True):
    """Final samples' chunks become one row a lease: `to` "compacted" with their payload, "dropped" without.

    `attempt`: the run's newest when this was planned. A later one may resume from where these samples are wanted: then nothing is done.
    """

    run_id: int
    attempt: int
    sample_ids: tuple[int, ...]
    to: str
    at: float


class GroupDelivered(Record, frozen=True):
    group_id: int
    attempt: int
    at: float
