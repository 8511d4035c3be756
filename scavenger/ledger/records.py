"""What the ledger keeps: one frozen struct for each kind of fact, and the state that they add up to. Pure.

The core (router machine, harvest tracker) emits records. `ledger.write.writer` writes many of them in one transaction, and reports the
ticket of the last one committed. A restarted daemon reads a `Snapshot`. No SQL here.

`at` is Unix seconds everywhere. Tokens and logprobs are packed arrays, as in `protocol.messages.codec`. The core gives the ids (the writer
never invents one), so records can refer to rows of the same transaction.
"""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Base of all records; the tag is the class name."""


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
    """`kept`: steps of the checkpoints that the trainer keeps from now on, ascending, as JSON; "": the trainer did not say."""

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
    sampling: str  # protocol.messages.Sampling as JSON
    meta: str
    at: float


class GroupAdopted(Record, frozen=True):
    """An existing group goes on under a new version with an equal root hash (a replay after a trainer's restart)."""

    group_id: int
    version: int
    at: float


class GroupDeferred(Record, frozen=True):
    """A group that came late is trained in this later step (`algorithm.on_late`)."""

    group_id: int
    step: int
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

    `worker_id`: the worker that has it now. One record in place of `LeaseEnded` and `LeaseGranted`, because all samples of a lost fleet
    move at once.
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
    routing: bytes = b""


class SampleFinished(Record, frozen=True):
    """The sample's last token was accepted. `finish`: "stop" | "length"."""

    sample_id: int
    finish: str
    length: int
    at: float


class SampleEnded(Record, frozen=True):
    """A final or replayable end. `state`: consumed | filtered | masked | evaluated | served | surplus | superseded | poisoned.

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


class DifferencesRecorded(Record, frozen=True):
    """How far trainer and engine were apart at each token of a sample that a step trained (`messages.TokenDifferences`).

    `differences`: packed float16, one for each of its `n_tokens`. `mean`: of their absolute values.
    """

    sample_id: int
    step: int
    attempt: int
    n_tokens: int
    mean: float
    differences: bytes


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


# ---------------------------------------------------------------- episodes


class EpisodeBegun(Record, frozen=True):
    """A gateway asked for the first turn of an episode. `name`: the gateway's, of no other episode of the run."""

    episode_id: int
    run_id: int
    name: str
    at: float


class EpisodeEnded(Record, frozen=True):
    """`state`: "ended" by its gateway, or "stopped" with its run. `worker`: the environment worker that played it; "": none is known."""

    episode_id: int
    state: str
    reason: str
    at: float
    worker: str = ""


class EpisodeSpent(Record, frozen=True):
    """All that other policies had of the episode's budget whose part in it is over, while it goes on."""

    episode_id: int
    turns: int
    tokens: int


class TurnBegun(Record, frozen=True):
    """A group is the `number`th turn of an episode. `request`, `content`: SHA-256 of what names the request, and of what it asks for.

    `parent_id`: the sample with whose prompt and completion its prompt begins, for `prefix_len` tokens; its `GroupCreated` has the rest.
    `prompt_tokens`, `prompt_sha256`: of the whole prompt.
    """

    group_id: int
    episode_id: int
    run_id: int
    number: int
    request: bytes
    content: bytes
    parent_id: int  # 0: none
    prefix_len: int
    prompt_tokens: int
    prompt_sha256: bytes
    at: float


class TurnRewarded(Record, frozen=True):
    """The environment says which part of its episode's reward this turn earned."""

    group_id: int
    reward: float


class TurnSampleFinished(Record, frozen=True):
    """A turn's sample is complete. `sha256`: of the tokens of its prompt and completion, which a later turn may begin with."""

    sample_id: int
    sha256: bytes


class ToolAsked(Record, frozen=True):
    """An agent asks a tool whose effects are outside. `call`: names the call within the episode; `asker`: the life that asks it."""

    call_id: int
    episode_id: int
    run_id: int
    call: str
    tool: str
    asker: bytes
    at: float


class ToolAnswered(Record, frozen=True):
    """It answered: the first answer, which stays."""

    call_id: int
    answer: bytes
    at: float


# ---------------------------------------------------------------- deliveries


class Delivered(Record, frozen=True):
    """What a run's policy said in one episode that another run plays is for the run's trainer. `state`: "due", or "served" where it takes
    no steps. `rows`: MessagePack of what is trained. `group`: the first delivery of the same group.
    """

    delivery_id: int
    run_id: int
    source_run_id: int
    episode_id: int  # the run's own, which has the turns
    group: int
    step: int  # of the run that plays
    prompt_index: int
    episode_index: int
    reward: float
    version: int
    rows: bytes
    state: str
    reason: str
    at: float


class TurnDelivered(Record, frozen=True):
    """A turn is of this delivery, and of no other one."""

    group_id: int
    run_id: int
    delivery_id: int


class DeliveryTaken(Record, frozen=True):
    """A step was taken with it. `outcome`: "consumed" | "filtered" | "masked"."""

    delivery_id: int
    outcome: str
    reason: str
    step: int
    attempt: int
    advantage: float
    at: float


class DeliveredTurnTaken(Record, frozen=True):
    """A step was taken with a turn that the environment rewards: its advantage there; None: the step is taken back."""

    group_id: int
    advantage: float | None


class DeliveryReopened(Record, frozen=True):
    """A later attempt goes on from before the step that took it: it is due again."""

    delivery_id: int
    attempt: int
    at: float


class DeliveryEnded(Record, frozen=True):
    """No step will take it. `state`: "stale" | "dropped"."""

    delivery_id: int
    state: str
    reason: str
    at: float


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
    cluster: str = ""  # as its key says


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
    """Written before the submission, so that no job of ours is ever unknown. `gpus`: on all of its `nodes`. `pinned`: the nodes that it is
    for, joined by ","; "": Slurm chooses. `kind`: "engine" or "environment"; the latter has no `worker_key`."""

    intent_id: str
    run_id: int
    partition: str
    gpus: int
    worker_key: str
    at: float
    pinned: str = ""
    nodes: int = 1
    cluster: str = ""  # "" = the daemon's own
    kind: str = "engine"


class JobChangedHands(Record, frozen=True):
    """The job's engine works for `run_id` from `at` on. It worked for `run_before` since `since`. `worker_key`: its new public key."""

    intent_id: str
    run_id: int
    worker_key: str
    run_before: int
    since: float
    at: float


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
    """A harvested job got its GPUs; `(intent_id, restart_count)` names the allocation. `gpus`: on all of its nodes, which `node` names,
    joined by ",".
    """

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
    cluster: str = ""


class OtherUserWaits(Record, frozen=True):
    """Another user's job is seen to wait for GPUs of nodes that are the harvest partition's, or of which we hold some.

    Times are Slurm's; `at` is ours. `harvested_gpus`: ours on its partitions' nodes as it is first seen.
    """

    job_id: int
    user_name: str
    partition: str
    gpus: int
    submitted_at: float
    eligible_at: float
    at: float
    cluster: str = ""
    harvested_gpus: int = 0


class OtherUserWaited(Record, frozen=True):
    """That wait is over. `started_at`: Slurm's, None where the job did not start or its start was not observed.

    `harvested_gpus`: the most that we held meanwhile on the nodes of its partitions; `harvested_gpu_s`: for how long.
    """

    job_id: int
    submitted_at: float
    outcome: (
        str  # started | held (or waits for something else than GPUs) | requeued | cancelled | left | unseen
    )
    started_at: float | None
    harvested_gpus: int
    harvested_gpu_s: float
    at: float
    cluster: str = ""


class TrainingJobStarted(Record, frozen=True):
    """A run's training job holds GPUs of its own since `at` (Slurm's time). `account`: Slurm's; empty where it has none."""

    run_id: int
    job_id: int
    user_name: str
    nodes: int
    gpus: int
    at: float
    account: str = ""


class TrainingJobEnded(Record, frozen=True):
    run_id: int
    job_id: int
    at: float


class EngineDied(Record, frozen=True):
    """A harvested job ended by its own fault or its node's. `exit_code`: the shell's view; None: Slurm did not say."""

    node: str
    run_id: int
    intent_id: str
    job_id: int
    restart_count: int
    exit_code: int | None
    reason: str
    lived_s: float
    at: float
    cluster: str = ""


class NodeQuarantined(Record, frozen=True):
    """A node gets no engine until `until_at`."""

    node: str
    reason: str
    until_at: float
    at: float
    cluster: str = ""


class NodeReleased(Record, frozen=True):
    node: str
    at: float
    cluster: str = ""


class Decision(Record, frozen=True):
    """One decision of a policy with its reason; `inputs` is JSON.

    `code`: the reason in a word, for reports (a `HarvestCode` or a `PolicyCode`).
    """

    policy: str
    action: str
    subject: str
    reason: str
    inputs: str
    at: float
    code: str = ""
    cluster: str = ""  # whose queue it was decided from; "" = the daemon's own, or none


class Event(Record, frozen=True):
    """Anything else worth keeping: a refused chunk, an unreachable scheduler, a quarantined node. `detail` is JSON."""

    kind: str
    run_id: int
    subject: str
    reason: str
    detail: str
    at: float


class Heartbeat(Record, frozen=True):
    """Nothing happened, and the daemon is alive. It has no row of its own: its transaction updates the generation's `committed_at`."""

    at: float


# ---------------------------------------------------------------- what a restarted daemon reads


class RunState(msgspec.Struct, frozen=True):
    """A run as the ledger has it. Only the newest versions, and those that their adapters are merged with, come with their manifest."""

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
    """A sample of a group that may still be delivered. `length` counts its accepted tokens; the tokens are read when they are needed.

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
    spans: tuple[tuple[int, int], ...] = ()  # (worker, tokens) of those who generated it, in order
    versions: tuple[tuple[int, int], ...] = ()  # (weight version, tokens), likewise


class OpenGroup(msgspec.Struct, frozen=True):
    created: GroupCreated
    version: int
    samples: tuple[SampleState, ...]


class EpisodeState(msgspec.Struct, frozen=True):
    """An episode of an unfinished run: open, or one of the newest that ended."""

    episode_id: int
    run_id: int
    name: str
    state: str
    begun_at: float
    delivered: bool = False  # its turns, to its run's trainer
    spent_turns: int = 0
    spent_tokens: int = 0


class DeliveryState(msgspec.Struct, frozen=True):
    """A delivery that is due, or that a step took which a resume takes back. `state`: "due", or as of `DeliveryTaken`. `rows`: empty where
    they were left out of what is read."""

    delivery_id: int
    run_id: int
    source: str
    group: int
    step: int
    prompt_index: int
    episode_index: int
    episode: str
    reward: float
    version: int
    rows: bytes
    state: str
    ended_step: int


class ToolCallState(msgspec.Struct, frozen=True):
    """A tool's call of an open episode. `answer`: None where none is known."""

    call_id: int
    episode_id: int
    call: str
    tool: str
    asker: bytes
    answer: bytes | None


class WorkerState(msgspec.Struct, frozen=True):
    """A worker that joined and is not known to have left."""

    joined: WorkerJoined


class EngineLife(msgspec.Struct, frozen=True):
    """One life of a job by its engine: registered, and known to have been there until `seen_at` (Unix s)."""

    incarnation: int
    node: str
    joined_at: float
    seen_at: float


class OpenIntent(msgspec.Struct, frozen=True):
    """A job intent that has not ended.

    `job_id` 0: intended, not known to be submitted. `last_allocation`: the restart count of its newest allocation, -1 where it has none.
    `free_since`: the last moment (Unix s) at which it is known to have had no GPU. `lives`: engines of lives that have no allocation, or
    have one that is open.
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
    run_since: float = 0.0  # Unix s, when its engine changed hands last; 0 = it never did


class Snapshot(msgspec.Struct, frozen=True):
    """Everything a restarted daemon needs. `next_*` are greater than every id in use.

    `waits`, `training_jobs` and `quarantined` (cluster and node): those that had not ended.

    `groups`: those of unfinished runs that are open, complete but not final, or consumed by steps later than the oldest kept checkpoint's.
    `retries`: (run_id, purpose, step, prompt_index, retry) of the newest group given up.
    """

    next_run_id: int
    next_group_id: int
    next_sample_id: int
    next_worker_id: int
    runs: tuple[RunState, ...]
    groups: tuple[OpenGroup, ...]
    workers: tuple[WorkerState, ...]
    jobs: tuple[OpenIntent, ...]
    retries: tuple[tuple[int, str, int, int, int], ...] = ()
    waits: tuple[OtherUserWaits, ...] = ()
    training_jobs: tuple[TrainingJobStarted, ...] = ()
    quarantined: tuple[tuple[str, str], ...] = ()
    next_episode_id: int = 1
    episodes: tuple[EpisodeState, ...] = ()
    turns: tuple[TurnBegun, ...] = ()  # of open episodes, in the order of their numbers
    turn_samples: tuple[TurnSampleFinished, ...] = ()  # of these
    next_tool_call_id: int = 1
    tool_calls: tuple[ToolCallState, ...] = ()  # of open episodes
    #: (sample, accepted tokens) of turns' samples that are under way; their groups have whole prompts, those of other turns none.
    turn_tokens: tuple[tuple[int, bytes], ...] = ()
    next_delivery_id: int = 1
    deliveries: tuple[DeliveryState, ...] = ()
