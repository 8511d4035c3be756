"""Every message between processes: msgspec structs, tagged, typed and size-bounded. Theory of operation:

    worker  (DEALER)  <->  daemon (ROUTER)  <->  trainer (DEALER)         CURVE on every socket, one MessagePack frame a message

    worker  -> daemon   WorkerHello, then Chunks / Heartbeat / WeightsLoaded / SampleFailed / Yielded / Asleep / Goodbye
    daemon  -> worker   Welcome or Rejected, then UseWeights / Assign / Yield / Revoke / Ack / Sleep / Wake / Drain / GoodbyeAck
    trainer -> daemon   Call(id, attempt, body), answered by Reply(id, body) with the same id; an unanswered call is repeated: all but
                         OpenRun, which then grants a further attempt, change nothing the second time
    daemon  -> trainer  Reply; GroupDone, Fleet and RunStopped come unasked

Owns the vocabulary, the packing of tokens and the bounds. Knows no socket, no clock and no policy. Token ids travel as little-endian
int32 arrays and logprobs as little-endian float32 arrays, so that the core may treat both as opaque bytes: `nbytes = 4 * tokens`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import msgspec

from scavenger.errors import WireError

#: 2: a peer says which ledger its leases, its weights and its attempt come from; a reward says which function gave it.
#: 3: a worker gives leases back, with all that it generated, when asked or when a lease's bound is reached.
PROTOCOL = 3
#: The oldest protocol that a daemon of this version still accepts from a worker.
OLDEST_PROTOCOL = 1
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
#: What an unauthenticated or not yet greeted peer may send at most.
MAX_HELLO_BYTES = 64 * 1024


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=False, gc=False):
    """Base of all messages: immutable, tagged by class name; unknown fields of a newer peer are ignored."""


class Part(msgspec.Struct, frozen=True, gc=False):
    """Base of what messages are made of."""


RUN_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
RunName = Annotated[str, msgspec.Meta(pattern=RUN_NAME_PATTERN)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
MAX_WORDS = 4096
Words = Annotated[str, msgspec.Meta(max_length=MAX_WORDS)]
#: Bounds keep NaN out too: no comparison with it is true.
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]

# ---------------------------------------------------------------- shared parts


class SampleKey(Part, frozen=True):
    """Names a sample's random stream. Never a database id, so a rerun draws the same numbers."""

    purpose: str
    step: int
    prompt: int
    index: int


class Sampling(Part, frozen=True):
    """How tokens are drawn. `max_tokens` is the budget of the whole sample, over all its leases. `top_k` 0 = off."""

    max_tokens: Positive
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 1.0
    top_p: Share = 1.0
    top_k: Count = 0
    stop_token_ids: tuple[int, ...] = ()


class Lease(Part, frozen=True):
    """One sample assigned to one worker: go on after `prompt + accepted`. Token fields are packed int32.

    `most_tokens`: when it has so many new tokens the worker gives it back (`Yielded`); 0 = it keeps it to its end.
    """

    sample_id: int
    epoch: int
    version: int
    prompt: bytes
    accepted: bytes
    sampling: Sampling
    seed: int
    key: SampleKey
    most_tokens: Count = 0


class Held(Part, frozen=True):
    """What a worker says of a lease that it holds: `length` counts every token it has of the sample, accepted ones included."""

    sample_id: int
    epoch: int
    length: int


class Chunk(Part, frozen=True):
    """Consecutive tokens of a sample: the token at `offset` is the first. `finish` ("stop" | "length") is set on the last chunk only.

    `logprobs` are under the sampling distribution, `raw_logprobs` under the raw model; both packed float32, as long as `tokens`.
    """

    sample_id: int
    epoch: int
    offset: int
    version: int
    tokens: bytes
    logprobs: bytes
    raw_logprobs: bytes
    finish: str | None = None


class EngineSpec(Part, frozen=True):
    """What a worker needs to build its engine, besides weights. `model_config` is the text of a Hugging Face config.json."""

    name: RunName
    model_config: str
    dtype: str
    max_batch: Positive
    context_length: Positive
    pace: Rate = 0.0  # tokens a second and sample at most; 0 = as fast as it goes


class WeightSource(Part, frozen=True):
    """Where the bytes of a version lie. `token` opens exactly this version to whoever presents it."""

    endpoint: str
    server_key: str
    token: bytes


# ---------------------------------------------------------------- worker -> daemon


class WorkerHello(Message, frozen=True):
    """First message of a connection. Authority comes from the CURVE key; the rest describes.

    `session` is random per worker process: the same session after a reconnect is the same worker with all it holds;
    a new session under the same key is a later incarnation, and proves the earlier one dead.
    """

    protocol: int
    kind: str  # "harvested" | "reserved"
    run: str
    session: str
    incarnation: int
    job_id: int
    node: Words
    gpus: int
    engine: Words
    code_version: Words
    pid: int
    loaded_version: int = -1
    held: tuple[Held, ...] = ()
    slot: str = ""  # which reserved engine of its training job; a new session in the same slot proves the earlier one dead
    leaving: bool = False  # it greets only to say goodbye: no lease, please
    loaded_root: bytes = b""  # root hash of `loaded_version`, which is believed only if it is the ledger's too
    ledger: str = ""  # `Welcome.ledger` of the daemon that granted `held`; "" = none did, or protocol 1


class Chunks(Message, frozen=True):
    """All new chunks of one flush, of all samples of the worker."""

    chunks: tuple[Chunk, ...]


class Heartbeat(Message, frozen=True):
    """Sent every `heartbeat_s`. Both sides reconcile `held`, so any message may be lost.

    `heard`: number of the last `HeartbeatAck` since the present Welcome. What was sent before that one and is not held never came.
    """

    held: tuple[Held, ...]
    progress: int
    loaded_version: int
    tokens_per_s: float = 0.0
    heard: int = 0


class WeightsLoaded(Message, frozen=True):
    """The engine now generates with `version`, verified against the manifest with this root hash."""

    version: int
    root: bytes
    pull_s: float = 0.0
    load_s: float = 0.0


class WeightsFailed(Message, frozen=True):
    """A version could not be completed or verified; the old one (or none) is in place."""

    version: int
    reason: Words


class SampleFailed(Message, frozen=True):
    """The engine could not go on with this sample (NaN logprobs, …); its lease is over, accepted tokens stay."""

    sample_id: int
    epoch: int
    reason: Words


class Yielded(Message, frozen=True):
    """These leases are given back: all that was generated of them (`length`) was flushed before this message, nothing more will be.

    The worker keeps their tokens until it is told, by a Revoke, that they are durable.
    """

    leases: tuple[Held, ...]


class Asleep(Message, frozen=True):
    """Answer to Sleep: everything generated was flushed before this message and nothing is held any more."""


class Goodbye(Message, frozen=True):
    """Everything generated was flushed before this message; the worker leaves when acked or after its deadline.

    `notice`: it was asked to leave (SIGTERM, Drain). `failed`: its engine died; what it held counts as having killed it.
    """

    reason: Words
    notice: bool
    failed: bool = False


# ---------------------------------------------------------------- daemon -> worker


class Welcome(Message, frozen=True):
    worker_id: int
    generation: int
    run: str
    engine: EngineSpec
    heartbeat_s: float
    flush_ms: float
    flush_tokens: int
    ledger: str = ""  # the ledger's history: another one than before means that what was leased and loaded under that one is void


class Rejected(Message, frozen=True):
    """The hello was not accepted: the worker prints both and exits, unless `retry`."""

    reason: str
    remedy: str
    retry: bool = False


class HelloAgain(Message, frozen=True):
    """The daemon does not know this connection (it was restarted, or declared the worker dead): greet again, same session."""

    reason: str


class HeartbeatAck(Message, frozen=True):
    generation: int
    number: int = 0  # grows by one per worker; its next heartbeat says the last one that it heard


class UseWeights(Message, frozen=True):
    """Load this version before anything else is generated. `manifest` is an encoded weights.manifest.Manifest."""

    version: int
    manifest: bytes
    sources: tuple[WeightSource, ...]


class Assign(Message, frozen=True):
    leases: tuple[Lease, ...]


class Revoke(Message, frozen=True):
    """These leases are over: stop generating, drop what is held of them."""

    leases: tuple[tuple[int, int], ...]  # (sample_id, epoch)
    reason: str


class Yield(Message, frozen=True):
    """Stop generating these, flush, answer Yielded. May be repeated."""

    leases: tuple[tuple[int, int], ...]  # (sample_id, epoch)
    reason: Words


class Ack(Message, frozen=True):
    """Durable lengths: tokens below `length` are committed and need not be kept."""

    durable: tuple[Held, ...]


class Sleep(Message, frozen=True):
    """Flush, stop generating, give the GPU's memory back, answer Asleep."""


class Wake(Message, frozen=True):
    """Take the GPU's memory again."""


class Drain(Message, frozen=True):
    """Flush, say goodbye and exit with status 0: the job shall not come back."""

    reason: str


class GoodbyeAck(Message, frozen=True):
    """All that was flushed is durable."""


# ---------------------------------------------------------------- trainer -> daemon (bodies of Call)


class OpenRun(Message, frozen=True):
    """Become the trainer of `run`: the ledger grants a new attempt and fences older ones. The run is made if it is new.

    `resume_step` is the step of the checkpoint that was loaded (0 = from the start). Samples consumed by later steps are
    offered again as I3 says.
    """

    protocol: int
    run: RunName
    seed: int
    config: str  # the run.toml as JSON, for the ledger
    engine: EngineSpec
    tokenizer: str  # path of tokenizer.json, for `scavenger samples`
    harvest: bool
    max_engines: Count
    gpus_per_engine: Positive
    resume_step: Count
    host: Words
    job_id: int
    poison_after: Positive = 3
    on_poison: str = "stop"  # "stop" | "mask"


class Attach(Message, frozen=True):
    """Go on as this attempt after a reconnect. `have` lists groups received and not yet committed: they are not sent again.

    `wants` lists groups submitted by this attempt and not received yet. Groups in neither belong to older attempts.
    """

    run: str
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


class GroupSpec(Part, frozen=True):
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
    """Wake the run's reserved workers, or put them to sleep (their unfinished samples move with all tokens)."""

    awake: bool


class SampleOutcome(Part, frozen=True):
    """What became of a delivered sample. `outcome`: "consumed" | "filtered" | "masked" | "evaluated"."""

    sample_id: int
    outcome: str
    reward: float
    advantage: float
    reason: Words = ""
    reward_version: Words = ""  # of the function that gave the reward


class CommitStep(Message, frozen=True):
    """The optimizer step `step` was taken with exactly these samples (purpose "train"), or an evaluation was made ("eval")."""

    step: int
    version: int
    purpose: str
    outcomes: tuple[SampleOutcome, ...]
    metrics: dict[str, float]


class RecordCheckpoint(Message, frozen=True):
    """A checkpoint that covers `step` is complete on disk: what it consumed is final. `root` is its published weights' hash."""

    step: int
    version: int
    root: bytes
    path: str


class CloseRun(Message, frozen=True):
    """The run is over: harvested engines leave at once."""

    state: str  # "finished" | "failed" | "stopped"
    reason: Words = ""


class Ping(Message, frozen=True):
    """Keep-alive of a trainer; answered by Pong, and by Fleet when it changed. One whose connection is not attached is told so.

    `aside`: from a second connection, which only says that the process lives, and is never attached.
    """

    aside: bool = False


CallBody = (
    OpenRun | Attach | PublishVersion | SubmitGroups | SetReserved | CommitStep | RecordCheckpoint | CloseRun | Ping
)


class Call(Message, frozen=True):
    """A trainer's request. `attempt` is 0 in OpenRun only; an older attempt than the newest is refused (`stale`)."""

    id: int
    run: str
    attempt: int
    body: CallBody


# ---------------------------------------------------------------- daemon -> trainer


class Ok(Message, frozen=True):
    pass


class Pong(Message, frozen=True):
    generation: int


class RunOpened(Message, frozen=True):
    """`next_version`: versions go on from here. `last_step`: the last committed step. `versions`: (step, version, root)."""

    run_id: int
    attempt: int
    generation: int
    next_version: int
    last_step: int
    versions: tuple[tuple[int, int, bytes], ...]
    ledger: str = ""


class Denied(Message, frozen=True):
    """The call was refused. `code`: "stale" | "unknown-run" | "not-owner" | "invalid" | "detached" | "restored" | "ahead".

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


ReplyBody = Ok | Pong | RunOpened | Denied | Accepted


class Reply(Message, frozen=True):
    id: int
    body: ReplyBody


class DoneSample(Part, frozen=True):
    """A complete sample. `error` is set when it was poisoned and masked: it then has no usable tokens.

    `reward` is the one recorded by an earlier attempt, or None.
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
    """

    harvested: int
    reserved_awake: int
    reserved_asleep: int
    outstanding: int
    outstanding_reserved: int
    window: str = ""
    window_reason: Words = ""


class RunStopped(Message, frozen=True):
    """The run cannot go on (a poisoned sample, an operator's stop). The trainer exits with this reason."""

    reason: str
    remedy: str = ""


WorkerMessage = WorkerHello | Chunks | Heartbeat | WeightsLoaded | WeightsFailed | SampleFailed | Yielded | Asleep | Goodbye
ToDaemon = WorkerMessage | Call
ToWorker = (
    Welcome | Rejected | HelloAgain | HeartbeatAck | UseWeights | Assign | Yield | Revoke | Ack | Sleep | Wake | Drain | GoodbyeAck
)
ToTrainer = Reply | GroupDone | Fleet | RunStopped | Rejected | HelloAgain

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
_to_daemon: msgspec.msgpack.Decoder[ToDaemon] = msgspec.msgpack.Decoder(ToDaemon)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_trainer: msgspec.msgpack.Decoder[ToTrainer] = msgspec.msgpack.Decoder(ToTrainer)


def encode(message: Message) -> bytes:
    """One frame. Raises `WireError` when the message is larger than any peer accepts."""
    frame = _encoder.encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"a {type(message).__name__} of {len(frame):,} bytes is over the limit of {MAX_MESSAGE_BYTES:,}",
            "send fewer groups or samples in one message",
        )
    return frame


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes | memoryview, limit: int) -> T:
    if len(frame) > limit:
        raise WireError(f"a message of {len(frame):,} bytes is over the limit of {limit:,}")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise WireError(f"not a message of protocol {PROTOCOL}: {error}") from error


def decode_to_daemon(frame: bytes | memoryview, limit: int = MAX_MESSAGE_BYTES) -> ToDaemon:
    """Decode what a worker or trainer sent. Raises `WireError`."""
    return _decode(_to_daemon, frame, limit)


def decode_to_worker(frame: bytes | memoryview) -> ToWorker:
    """Decode what the daemon sent to a worker. Raises `WireError`."""
    return _decode(_to_worker, frame, MAX_MESSAGE_BYTES)


def decode_to_trainer(frame: bytes | memoryview) -> ToTrainer:
    """Decode what the daemon sent to a trainer. Raises `WireError`."""
    return _decode(_to_trainer, frame, MAX_MESSAGE_BYTES)


def words(text: str) -> str:
    """`text` cut to what a message's reason may hold."""
    return text if len(text) <= MAX_WORDS else text[: MAX_WORDS - 1] + "…"


def _pack(code: str, values: Iterable[Any]) -> bytes:
    packed = array(code, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(code: str, data: bytes) -> tuple[Any, ...]:
    if len(data) % 4:
        raise WireError(f"a packed array of {len(data)} bytes is not a multiple of 4")
    unpacked = array(code)
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return tuple(unpacked)


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian int32."""
    return _pack("i", token_ids)


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """The inverse of `pack_tokens`."""
    return _unpack("i", data)


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """Logprobs as little-endian float32."""
    return _pack("f", logprobs)


def unpack_logprobs(data: bytes) -> tuple[float, ...]:
    """The inverse of `pack_logprobs`."""
    return _unpack("f", data)
