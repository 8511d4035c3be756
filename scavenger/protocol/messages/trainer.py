"""What a trainer and the daemon say to each other: calls, their replies, and what comes unasked. Knows nothing of workers' messages."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from scavenger.protocol.messages.common import (
    MAX_CALL_SAMPLES,
    MAX_CONFIG_CHARS,
    MAX_SPAN_SUMS,
    MAX_SPANS,
    MAX_VERSIONS,
    BoundedText,
    Count,
    EngineSpec,
    HelloAgain,
    Message,
    MessagePart,
    Nbytes,
    OtherRun,
    Positive,
    Rate,
    Rejected,
    RunName,
    Sampling,
    Slots,
    Total,
    WeightSource,
)
from scavenger.protocol.messages.deliveries import (
    Deliver,
    DeliveredGroup,
    EpisodesOver,
    TurnReward,
    WantDeliveries,
)
from scavenger.protocol.messages.gateway import (
    AnswerTool,
    AskTool,
    EndEpisode,
    EpisodeName,
    GatewayPing,
    OpenTurn,
    Sha256,
    ToolState,
    TurnAccepted,
    TurnTokens,
)

#: Of one episode: as many as it may have.
MAX_USED_TURNS = 4096
#: Of one step's decisions about its data: how many, and figures and groups of each.
MAX_DATA_DECISIONS = 4
MAX_DECISION_INPUTS = 16
MAX_DECISION_GROUPS = 1024
#: Figures of one step. The ledger keeps fewer (`ledger.redaction.MOST_METRICS`), and says so.
MAX_METRICS = 65_536
#: Bytes of the differences of one step.
MAX_DIFFERENCES_BYTES = 16 << 20
#: Pass rates that an opened run is told: the newest.
MAX_PASS_RATES = 1_000_000
#: Runs that answer for agents of one environment.
MAX_POLICIES = 64

# ---------------------------------------------------------------- trainer -> daemon (bodies of Call)


class OpenRun(Message, frozen=True):
    """Become the trainer of `run`: the ledger grants a new attempt and fences older ones. The run is made if it is new.

    `resume_step` is the step of the checkpoint that was loaded (0 = from the start). Samples consumed by later steps are
    offered again as I3 says.
    """

    protocol: int
    run: RunName
    seed: int
    config: Annotated[str, msgspec.Meta(max_length=MAX_CONFIG_CHARS)]  # the run.toml as JSON, for the ledger
    engine: EngineSpec
    tokenizer: BoundedText  # path of tokenizer.json, for `scavenger samples`
    harvest: bool
    max_engines: Count
    gpus_per_engine: Positive
    resume_step: Count
    host: BoundedText
    job_id: int
    poison_after: Positive = 3
    on_poison: str = "stop"  # "stop" | "mask"
    encrypt: bool = False  # its weights travel over a network under CURVE only
    nodes_per_engine: Positive = 1
    #: Steps that the weights of a sample may be older than those that train it.
    max_off_policy_steps: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    on_new_version: Literal["switch", "finish"] = (
        "switch"  # with the above: whether engines that generate change weights at once
    )
    keeps_cache: bool = False  # and whether a sample goes on where its KV cache is (`algorithm.kv`)
    #: Answer with the pass rates of the prompts that steps up to `resume_step` trained: a reward of this or more passes. None: do not.
    solved_at: Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)] | None = None
    #: Environment workers in jobs that may join its trainer, and the file by which they do ("": it has none).
    environment_jobs: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    environment_file: BoundedText = ""
    #: Other runs that answer for agents of its environment.
    policies: Annotated[tuple[RunName, ...], msgspec.Meta(max_length=MAX_POLICIES)] = ()
    episodes_of: OtherRun = ""  # the run whose episodes its steps are filled from
    serves_only: bool = False  # it takes no step: its weights answer, and stay as they are
    isolation: Literal["memory", "process"] = (
        "memory"  # whether its engines may have worked, and go on, for other runs
    )
    #: Of each of its episodes, over all agents and policies: turns, generated tokens, seconds. 0: no bound.
    budget_turns: Count = 0
    budget_tokens: Count = 0
    budget_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0


class Attach(Message, frozen=True):
    """Go on as this attempt after a reconnect. `have` lists groups received and not yet committed: they are not sent again.

    `wants` lists groups submitted by this attempt and not received yet. Groups in neither belong to older attempts.
    """

    run: RunName
    have: tuple[int, ...]
    wants: tuple[int, ...] = ()
    ledger: str = ""  # `RunOpened.ledger`: in another history of the ledger this attempt was never granted


class PublishVersion(Message, frozen=True):
    """Offer a weight version. Repeating it with the same root re-announces its sources (after a daemon restart)."""

    version: int
    step: int
    root: bytes
    manifest: bytes
    sources: tuple[WeightSource, ...]
    nbytes: int = 0  # of the weights, for the ledger


class GroupSpec(MessagePart, frozen=True):
    """A prompt to sample n times. `meta` is JSON that comes back with the group (the answer to verify against, …)."""

    prompt_index: int
    prompt: bytes
    n: int
    sampling: Sampling
    meta: str = "{}"


class SubmitGroups(Message, frozen=True):
    """Generate these groups with `version`. A group that exists already under an equal root hash is reused, not generated again."""

    step: int
    version: int
    purpose: str  # "train" | "eval"
    groups: tuple[GroupSpec, ...]


class SetReserved(Message, frozen=True):
    """Wake the run's reserved workers, or put them to sleep (their unfinished samples move with all tokens).

    `order` grows by one each time; `Fleet` repeats it. 0: a trainer that does not wait for them. `awake` acknowledges that the trainer gave
    back what it could of its GPUs' memory: no worker is woken before. `bytes_held`: what it holds yet.
    """

    awake: bool
    order: Count = 0
    bytes_held: Nbytes = 0


class EndReserved(Message, frozen=True):
    """These processes of reserved engines are gone, and hold no memory. They ended, or the trainer, which owns them, ended them.

    Their samples move with every token that was accepted.
    """

    engines: Slots  # names (`reserved_name`)
    reason: BoundedText


class SampleOutcome(MessagePart, frozen=True):
    """What became of a delivered sample. `outcome`: "consumed" | "filtered" | "masked" | "evaluated"."""

    sample_id: int
    outcome: str
    reward: float
    advantage: float
    reason: BoundedText = ""
    reward_version: BoundedText = ""  # of the function that gave the reward


class TurnAdvantage(MessagePart, frozen=True):
    """The advantage, in a step, of the turn with this number (`RowTurn`)."""

    number: Count
    advantage: float


class DeliveryOutcome(SampleOutcome, frozen=True):
    """What became of a delivery, which `sample_id` names. `turns`: of those that the environment rewards; `advantage` is then that of the
    whole reward.
    """

    turns: Annotated[tuple[TurnAdvantage, ...], msgspec.Meta(max_length=MAX_USED_TURNS)] = ()


class TokenDifferences(MessagePart, frozen=True):
    """How far trainer and engine are apart at each token of one sample, in the step that trains it.

    `values`: the trainer's logprob (proximal: under the weights at the step's start) less the engine's (behaviour), in nats, packed
    float16: 2 bytes a token, all tokens of the completion. `mean`: of their absolute values. `turn`: of an episode's turn, SHA-256 of the
    tokens of its prompt and completion, which names its sample; `sample_id` says nothing then.
    """

    sample_id: int
    values: Annotated[bytes, msgspec.Meta(min_length=2, max_length=MAX_DIFFERENCES_BYTES)]
    mean: Rate
    turn: Annotated[bytes, msgspec.Meta(max_length=32)] = b""


class TurnOutcome(MessagePart, frozen=True):
    """What a turn earned, and its advantage in the step, where the environment rewards turns. `turn`: as in `TokenDifferences`."""

    turn: Sha256
    reward: TurnReward
    advantage: float


class EpisodeOutcome(MessagePart, frozen=True):
    """What became of an episode, and so of its turns: as `SampleOutcome`. It ends with the step that names it.

    `used`: requests (`OpenTurn.request`) of the turns that the step took. Its other turns are surplus: they led to nothing, because the
    environment answered otherwise when the episode was played again, say. An episode that no turn was asked of may be named too.
    `worker`: the environment worker that played it. `differences`: of its turns, as in `CommitStep`. `turns`: those that were rewarded by
    themselves; `advantage` is then that of the episode's whole reward.
    """

    episode: EpisodeName
    outcome: str
    reward: float
    advantage: float
    reason: BoundedText = ""
    reward_version: BoundedText = ""
    used: Annotated[tuple[Sha256, ...], msgspec.Meta(max_length=MAX_USED_TURNS)] = ()
    worker: Annotated[str, msgspec.Meta(max_length=512)] = ""
    differences: Annotated[tuple[TokenDifferences, ...], msgspec.Meta(max_length=MAX_USED_TURNS)] = ()
    turns: Annotated[tuple[TurnOutcome, ...], msgspec.Meta(max_length=MAX_USED_TURNS)] = ()


class SpanSums(MessagePart, frozen=True):
    """How the trainer's logprobs and an engine's agree on the tokens of one sample that one worker generated: sums over these tokens.

    d is the trainer's logprob (proximal) less the engine's (behaviour), in nats. `signed`: of d; `absolute`: of |d|; `k3`: of
    exp(d) - d - 1.
    """

    sample_id: int
    worker_id: int
    tokens: Positive
    signed: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
    absolute: Rate
    k3: Rate


class ReportAgreement(Message, frozen=True):
    """How engines agree with the trainer on samples that `step` trains. Answered by `Suspects`; a span that is said again counts once."""

    step: int
    spans: Annotated[tuple[SpanSums, ...], msgspec.Meta(max_length=MAX_SPAN_SUMS)]


class DataDecision(MessagePart, frozen=True):
    """Which groups or prompts a step trains (`trainer.data`), in numbers alone: the ledger says the rest in words of its own.

    "filter": of the step's groups, by their rewards. "curriculum": prompts, by their measured pass rates. "replay": groups of earlier
    steps, once more; `groups` names them. `inputs`: what it was decided by.
    """

    policy: Literal["filter", "curriculum", "replay"]
    taken: Count
    left_out: Count
    inputs: Annotated[dict[str, float], msgspec.Meta(max_length=MAX_DECISION_INPUTS)]
    groups: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_DECISION_GROUPS)] = ()


class CommitStep(Message, frozen=True):
    """The optimizer step `step` was taken with exactly these samples (purpose "train"), or an evaluation was made ("eval").

    `episodes`: that it was taken with, of an environment; they end. Such a step submitted no groups. `differences`: of some of its
    samples; what fits none of them is left out, and an event says how much. `deliveries`: of another run's episodes, whole groups that
    the step was taken with.
    """

    step: int
    version: int
    purpose: str
    outcomes: tuple[SampleOutcome, ...]
    metrics: Annotated[dict[BoundedText, float], msgspec.Meta(max_length=MAX_METRICS)]
    episodes: tuple[EpisodeOutcome, ...] = ()
    decisions: Annotated[tuple[DataDecision, ...], msgspec.Meta(max_length=MAX_DATA_DECISIONS)] = ()
    differences: Annotated[tuple[TokenDifferences, ...], msgspec.Meta(max_length=MAX_CALL_SAMPLES)] = ()
    deliveries: Annotated[tuple[DeliveryOutcome, ...], msgspec.Meta(max_length=MAX_CALL_SAMPLES)] = ()


class RecordCheckpoint(Message, frozen=True):
    """A checkpoint that covers `step` is complete on disk: what it consumed is final. `root` is its published weights' hash.

    `kept`: the steps whose checkpoints are on disk and stay there, `step` among them. One that the trainer is about to delete is not
    named any more, so this comes before the deletion. None: it does not say, and the ledger goes by `checkpoint.keep` of its configuration.
    """

    step: int
    version: int
    root: bytes
    path: str
    kept: tuple[Count, ...] | None = None


class CloseRun(Message, frozen=True):
    """The run is over: harvested engines leave at once."""

    state: str  # "finished" | "failed" | "stopped"
    reason: BoundedText = ""


class Trained(MessagePart, frozen=True):
    """A step's progress: whole groups that were trained, their tokens (prompts included), and the seconds that this took.

    `scored`: whole groups of the step that have their rewards, -1 = the trainer does not say. `reward_s`: seconds from a group's arrival to
    its rewards, on average over those that came lately.
    """

    step: int
    groups: Count
    tokens: Count
    seconds: Rate
    scored: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] = -1
    reward_s: Rate = 0.0


class Ping(Message, frozen=True):
    """Keep-alive of a trainer. The reply is Pong, and Fleet follows when it changed; on a connection that is not attached it is Denied.

    `aside`: from the heartbeat's own connection, which is never attached. `trained`: the present step's progress, None = none yet.
    """

    aside: bool = False
    trained: Trained | None = None


class DeferLate(Message, frozen=True):
    """The trainer has nothing to do but to wait for these groups of `step`: may a later step train them? Answered by `Deferred`.

    Asked again, it names those that are of the later step by now.
    """

    step: int
    groups: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_CALL_SAMPLES)]


CallBody = (
    OpenRun
    | Attach
    | PublishVersion
    | SubmitGroups
    | SetReserved
    | EndReserved
    | ReportAgreement
    | DeferLate
    | Deliver
    | WantDeliveries
    | CommitStep
    | RecordCheckpoint
    | CloseRun
    | Ping
    | OpenTurn
    | AskTool
    | AnswerTool
    | EndEpisode
    | GatewayPing
)
#: A gateway's bodies, which need no attempt.
GATEWAY_BODIES = (OpenTurn, AskTool, AnswerTool, EndEpisode, GatewayPing)


class Call(Message, frozen=True):
    """A trainer's request. `attempt` is 0 in OpenRun and in a gateway's calls; an older attempt than the newest is refused (`stale`)."""

    id: int
    run: RunName
    attempt: int
    body: CallBody


# ---------------------------------------------------------------- daemon -> trainer


class Ok(Message, frozen=True):
    pass


class Pong(Message, frozen=True):
    generation: int


class RunOpened(Message, frozen=True):
    """`next_version`: versions go on from here. `last_step`: the last committed step. `versions`: (step, version, root).

    `pass_rates`: (step, prompt index, completions that passed, completions with a reward) of groups that steps up to the resumed one
    trained, where `OpenRun.solved_at` asked for it.
    """

    run_id: int
    attempt: int
    generation: int
    next_version: int
    last_step: int
    versions: tuple[tuple[int, int, bytes], ...]
    ledger: str = ""
    pass_rates: Annotated[
        tuple[tuple[int, int, Count, Count], ...], msgspec.Meta(max_length=MAX_PASS_RATES)
    ] = ()


class Denied(Message, frozen=True):
    """The call was refused. `code`: "stale" | "unknown-run" | "not-owner" | "invalid" | "detached" | "restored" | "ahead"; of a
    gateway's also "conflict" (the request was another one before), "ended" (its episode is over), "full" (too much is open, or the run
    is being opened again), "budget" (its episode has used up its budget).

    "restored": the ledger was put back to an earlier state, in which this attempt does not exist. "ahead": the checkpoint of
    `resume_step` is later than the ledger, which ends at `last_step`.
    """

    code: str
    reason: str
    remedy: str = ""
    last_step: int = 0


class Accepted(Message, frozen=True):
    """Answer to SubmitGroups: ids in the order of the request."""

    group_ids: tuple[int, ...]


class Suspect(MessagePart, frozen=True):
    """A worker that was set aside, since its logprobs disagree with the trainer's more than its peers' do."""

    worker_id: int
    node: BoundedText
    reason: BoundedText


class Suspects(Message, frozen=True):
    """Answer to ReportAgreement: every worker of the run that this daemon set aside. What they generated is not to be trained."""

    suspects: tuple[Suspect, ...]


class Deferred(Message, frozen=True):
    """Answer to DeferLate: of the groups that were named, those that are of the step after it now; and why these, or none."""

    groups: tuple[int, ...]
    reason: BoundedText


ReplyBody = Ok | Pong | RunOpened | Denied | Accepted | Suspects | Deferred | TurnAccepted | ToolState


class Reply(Message, frozen=True):
    id: int
    body: ReplyBody


class DoneSample(MessagePart, frozen=True):
    """A complete sample. `error` is set when it was poisoned and masked: it then has no usable tokens.

    `reward` is the one recorded by an earlier attempt, or None. `by_reserved`, `by_harvested`: who generated its tokens, as far as the
    present daemon saw it; the ledger has it all. `regenerated`: tokens that were lost with a worker and generated again, likewise.
    `spans`: (worker id, tokens) of those who generated it, in the order of its tokens; empty where there were more than `MAX_SPANS`.
    `routing`: as in `Chunk`.
    `versions`: (version, the step after which it was published, tokens) of the weights that generated it, in the order of its tokens;
    empty where all samples of a step have the group's version (`OpenRun.max_off_policy_steps` = 0).
    """

    sample_id: int
    index: int
    tokens: bytes
    logprobs: bytes
    raw_logprobs: bytes
    finish: str
    moves: int
    reward: float | None = None
    error: str | None = None
    reward_version: str = ""
    by_reserved: int = 0
    by_harvested: int = 0
    regenerated: int = 0
    spans: Annotated[tuple[tuple[int, Positive], ...], msgspec.Meta(max_length=MAX_SPANS)] = ()
    routing: bytes = b""
    versions: Annotated[tuple[tuple[int, int, Positive], ...], msgspec.Meta(max_length=MAX_VERSIONS)] = ()


class GroupDone(Message, frozen=True):
    """A group whose every sample is complete and committed to the ledger."""

    group_id: int
    step: int
    version: int
    purpose: str
    prompt_index: int
    prompt: bytes
    meta: str
    samples: tuple[DoneSample, ...]


class Fleet(Message, frozen=True):
    """The run's workers now. `harvested` counts harvested workers with weights loaded; `outstanding` counts samples not complete.

    `window`: whether reserved engines shall generate, "open" or "close", and why; "" = the trainer's own rule decides.
    `keep_open`: they go on although every sample of the step has come, for the next step; only beside "open".
    `order`: the last `SetReserved.order` that this answers. `asleep`: names (`reserved_name`) of the reserved workers that
    acknowledged their order to sleep, with `bytes_held` bytes in all; `holding`: of all others, of which some may be
    silent, or lost without a word. `drafted`, `accepted`, `verifications`: totals of the run's engines since the daemon began, as in a
    worker's heartbeat.
    """

    harvested: int
    reserved_awake: int
    reserved_asleep: int
    outstanding: int
    outstanding_reserved: int
    window: str = ""
    window_reason: BoundedText = ""
    order: Count = 0
    asleep: Slots = ()
    holding: Slots = ()
    bytes_held: Nbytes = 0
    drafted: Total = 0
    accepted: Total = 0
    verifications: Total = 0
    keep_open: bool = False


class RunStopped(Message, frozen=True):
    """The run cannot go on (a poisoned sample, an operator's stop). The trainer exits with this reason."""

    reason: str
    remedy: str = ""


ToTrainer = (
    Reply
    | GroupDone
    | DeliveredGroup
    | EpisodesOver
    | Fleet
    | RunStopped
    | Rejected
    | HelloAgain
    | TurnTokens
)
