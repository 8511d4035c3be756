"""What a worker and the daemon say to each other. Knows nothing of trainers, nor of how a message becomes a frame."""

from __future__ import annotations

from typing import Annotated

import msgspec

from scavenger.protocol.messages.common import (
    MAX_KV_OFFERS,
    MAX_SIBLING_PIECES,
    MAX_SIBLING_TOKENS,
    BoundedText,
    Count,
    Digest,
    EngineSpec,
    HelloAgain,
    KvSource,
    Memory,
    Message,
    MessagePart,
    Nbytes,
    Positive,
    Rate,
    Rejected,
    Sampling,
    Total,
    WeightSource,
)

# ---------------------------------------------------------------- parts


#: `SampleKey.purpose` of an agent's turn: somebody waits for each of its tokens.
TURN = "turn"


class SampleKey(MessagePart, frozen=True):
    """Names a sample's random stream. Never a database id, so a rerun draws the same numbers."""

    purpose: str
    step: int
    prompt: int
    index: int


class Lease(MessagePart, frozen=True):
    """One sample assigned to one worker: go on after `prompt + accepted`. Token fields are packed int32.

    `begun_version`: under which the sample was begun, where its engine may use what its KV cache has of samples begun so, though other
    weights made it (`algorithm.kv`); -1: what `version` made alone. `kv`: where the blocks of its first tokens are said to be; a hint.
    `leaves_kv`: once it is finished its blocks are to be kept for the episode's next turn.
    """

    sample_id: int
    epoch: int
    version: int
    prompt: bytes
    accepted: bytes
    sampling: Sampling
    seed: int
    key: SampleKey
    begun_version: int = -1
    kv: KvSource | None = None
    leaves_kv: bool = False


class Held(MessagePart, frozen=True):
    """A lease that the worker holds. `length` counts every token that it has of the sample, accepted ones included."""

    sample_id: int
    epoch: int
    length: Count


class Chunk(MessagePart, frozen=True):
    """Consecutive tokens of a sample: the token at `offset` is the first. `finish` ("stop" | "length") is set on the last chunk only.

    `logprobs` are under the sampling distribution, `raw_logprobs` under the raw model; both packed float32, as long as `tokens`.
    `routing`: which experts each token went to, `EngineSpec.routing` bytes a token; b"" where engines do not report it.
    """

    sample_id: int
    epoch: int
    offset: int
    version: int
    tokens: bytes
    logprobs: bytes
    raw_logprobs: bytes
    finish: str | None = None
    routing: bytes = b""


class SiblingPiece(MessagePart, frozen=True, array_like=True):
    """So many consecutive tokens of a sample that is generated elsewhere, or was: the token at `offset` is the first. An array on the wire:
    most pieces are of a few tokens."""

    sample_id: int
    purpose: str  # this and the next three: its `SampleKey`
    step: int
    prompt: int
    index: int
    offset: Count
    count: Positive

    @property
    def key(self) -> SampleKey:
        return SampleKey(self.purpose, self.step, self.prompt, self.index)

    @classmethod
    def of(cls, sample_id: int, key: SampleKey, offset: int, count: int) -> SiblingPiece:
        """Of the sample with this key."""
        return cls(sample_id, key.purpose, key.step, key.prompt, key.index, offset, count)


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
    node: BoundedText
    gpus: int
    engine: BoundedText
    code_version: BoundedText
    pid: int
    loaded_version: int = -1
    held: tuple[Held, ...] = ()
    slot: str = ""  # which reserved engine of its training job; a new session in the same slot proves the earlier one dead
    leaving: bool = False  # it joins only to say goodbye, and takes no lease
    loaded_root: bytes = (
        b""  # root hash of `loaded_version`, which is believed only if it is the ledger's too
    )
    ledger: str = ""  # `Welcome.ledger` of the daemon that granted `held`; "" = none did
    cache_tokens: Count = 0  # as in `WeightsLoaded`, once the engine is built
    best_batch: Count = 0
    loaded_merged: Digest = b""  # as in `WeightsLoaded`, of `loaded_version`
    memory: Memory = "awake"  # these three, and `lease_limit`, as in `Heartbeat`
    memory_order: Count = 0
    bytes_held: Nbytes = 0
    lease_limit: Count | None = None


class Chunks(Message, frozen=True):
    """All new chunks of one flush, of all samples of the worker."""

    chunks: tuple[Chunk, ...]


class Heartbeat(Message, frozen=True):
    """Sent every `heartbeat_s`. Both sides reconcile `held`, so any message may be lost.

    `heard`: number of the last `HeartbeatAck` since the present Welcome. What was sent before that one and is not held never came.
    `wake_s`: what its engine's last waking took; 0 = it was never woken.
    `memory`: what it does with its GPUs' memory, by the last order (Sleep, Wake) that reached it, whose number is `memory_order`;
    `bytes_held`: of that memory, as its engine said last. `weights_pause_s`: between the last token under one version and the first under
    the next, last time; 0 = there was none yet. `ahead`: the version of the last `PullAhead` that reached it since it last loaded one, if
    that is here or on its way; -1: none, or its pull failed. `drafted`, `accepted`, `verifications`: of its engine's speculation so far, as
    in `events.Speculated`. `lease_limit`: leases that it takes at most, of a worker that is bounded by its host; more are given back.
    None: not bounded.
    """

    held: tuple[Held, ...]
    progress: int
    loaded_version: int
    tokens_per_s: Rate = 0.0
    heard: int = 0
    wake_s: Rate = 0.0
    memory: Memory = "awake"
    memory_order: Count = 0
    bytes_held: Nbytes = 0
    weights_pause_s: Rate = 0.0
    ahead: int = -1
    drafted: Total = 0
    accepted: Total = 0
    verifications: Total = 0
    lease_limit: Count | None = None
    lends: BoundedText = (
        ""  # the key of the last `LendSlots` that reached it, whatever became of that loan; "" = none did
    )


class WeightsLoaded(Message, frozen=True):
    """The engine now generates with `version`, verified against the manifest with this root hash.

    `verify_s`: seconds of threads, within `pull_s`, that went into checking hashes.
    `cache_tokens`: tokens of all samples together that its KV cache holds; `best_batch`: samples beyond which it measured no more tokens a
    second. 0 = it does not know.
    `chosen`: whether its bytes came whole or as deltas, and by which predicted seconds.
    `merged`: of a version whose manifest states what its adapters make of their base, the digest of what sits in this engine.
    """

    version: int
    root: bytes
    pull_s: Rate = 0.0
    load_s: Rate = 0.0
    cache_tokens: Count = 0
    best_batch: Count = 0
    verify_s: Rate = 0.0
    merged: Digest = b""
    chosen: BoundedText = ""


class WeightsFailed(Message, frozen=True):
    """A version could not be completed or verified; the old one (or none) is in place.

    `refused`: every byte came and was verified, and the engine does not serve them. They are not its model's, or the engine holds other
    values than it was given.
    """

    version: int
    reason: BoundedText
    refused: bool = False


class Serving(Message, frozen=True):
    """This worker serves a version to others, or the part of it that has come so far; None: no longer. Sent again after each Welcome."""

    version: int
    root: bytes
    source: WeightSource | None


class SampleFailed(Message, frozen=True):
    """The engine could not go on with this sample (NaN logprobs, …); its lease is over, accepted tokens stay."""

    sample_id: int
    epoch: int
    reason: BoundedText


class Yielded(Message, frozen=True):
    """These leases are given back. All their tokens (`length`) were flushed before this message, and no more will be generated.

    The worker keeps their tokens until a Revoke tells it that they are durable.
    """

    leases: tuple[Held, ...]


class KvOffer(MessagePart, frozen=True):
    """The KV blocks of a lease that is given back, or of a turn that is finished: of `tokens` tokens, prompt included, `token_nbytes` bytes
    each, under this number."""

    sample_id: int
    epoch: int
    number: Count
    tokens: Count
    token_nbytes: Nbytes


class KvKept(Message, frozen=True):
    """This worker keeps the blocks of these leases for who goes on with them, and gives them out at `source`. Sent before the Yielded or
    Goodbye that gives the leases back; of turns (`Lease.leaves_kv`, `FetchKv`) once they are here. It may be lost, and what it offers may
    be gone when somebody asks."""

    offers: Annotated[tuple[KvOffer, ...], msgspec.Meta(max_length=MAX_KV_OFFERS)]
    source: WeightSource


class KvTried(Message, frozen=True):
    """What came of the blocks that a lease or a `FetchKv` named: `nbytes` bytes in `seconds`. `fault`: why they were not loaded, or not
    kept; "" = they were."""

    sample_id: int
    epoch: int
    tokens: Count
    nbytes: Nbytes
    seconds: Rate
    fault: BoundedText = ""


class Asleep(Message, frozen=True):
    """The order to sleep of this number is carried out.

    Everything generated was flushed before this message, the worker holds no lease, and the engine gave its memory back. `bytes_held`: what
    the engine still holds of its GPUs' memory.
    """

    order: Count
    bytes_held: Nbytes


class Awake(Message, frozen=True):
    """The order to wake of this number is carried out: the engine has its weights and its memory again, `bytes_held` bytes."""

    order: Count
    bytes_held: Nbytes


class Goodbye(Message, frozen=True):
    """Everything generated was flushed before this message; the worker leaves when acked or after its deadline.

    `notice`: it was asked to leave (SIGTERM, Drain). `failed`: its engine died; what it held counts as having killed it.
    """

    reason: BoundedText
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
    relay: bool = False  # it keeps a directory of who holds which weights: say what you serve


class HeartbeatAck(Message, frozen=True):
    generation: int
    number: int = 0  # grows by one per worker; its next heartbeat says the last one that it heard


class BaseWeights(MessagePart, frozen=True):
    """The version whose weights adapters are merged with, and who holds it. `manifest` as in `UseWeights`; empty where `more` is.

    `root` names the weights: a trainer that restarted publishes equal ones under another number. Empty: an older daemon's.
    """

    version: int
    manifest: bytes
    sources: tuple[WeightSource, ...]
    root: bytes = b""


class UseWeights(Message, frozen=True):
    """Load this version before anything else is generated. `manifest` is an encoded weights.manifest.Manifest.

    `more`: the version is being pulled already, and these are its holders now; no manifest. `keep`: versions that no other worker holds
    and that are still needed, and of a `PullAhead` the one that is generated with; go on serving them. `encrypt`: the run's weights cross
    no network in the clear, whatever the sources are. `base`: of a version that holds adapters, what they are merged with;
    pulled first by who lacks it.
    """

    version: int
    manifest: bytes
    sources: tuple[WeightSource, ...]
    keep: tuple[int, ...] = ()
    more: bool = False
    encrypt: bool = False
    base: BaseWeights | None = None


class PullAhead(Message, frozen=True):
    """Have this version's bytes here while the engine still generates with its own: an order to load it is to be expected. Nothing
    that runs is disturbed; heartbeats say whether it came and goes on (`ahead`)."""

    weights: UseWeights


class Assign(Message, frozen=True):
    leases: tuple[Lease, ...]


class SiblingTokens(Message, frozen=True):
    """What siblings of leased samples said on other engines: drafts, where `EngineSpec.speculation` is "group". A guess and no more:
    it may be lost, late, doubled or wrong, and is never acknowledged.

    `tokens`: of all pieces, one after the other, as `squeeze_tokens` makes them; together `MAX_SIBLING_TOKENS` at most.
    """

    pieces: Annotated[tuple[SiblingPiece, ...], msgspec.Meta(max_length=MAX_SIBLING_PIECES)]
    tokens: Annotated[bytes, msgspec.Meta(max_length=5 * MAX_SIBLING_TOKENS)] = b""


class FetchKv(Message, frozen=True):
    """Another worker, which leaves, keeps the blocks of this turn's sample: keep them in its place. Answer KvTried, and KvKept where
    they came."""

    sample_id: int
    epoch: int
    order: KvSource


class DropKv(Message, frozen=True):
    """No turn will want the blocks that this worker keeps under these numbers."""

    numbers: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_KV_OFFERS)]


class Revoke(Message, frozen=True):
    """These leases are over: stop generating, drop what is held of them."""

    leases: tuple[tuple[int, int], ...]  # (sample_id, epoch)
    reason: str


class Yield(Message, frozen=True):
    """Stop generating these, flush, answer Yielded. May be repeated."""

    leases: tuple[tuple[int, int], ...]  # (sample_id, epoch)
    reason: BoundedText


class Ack(Message, frozen=True):
    """Durable lengths: tokens below `length` are committed and need not be kept."""

    durable: tuple[Held, ...]


class Sleep(Message, frozen=True):
    """Flush, stop generating, give the GPU's memory back, answer Asleep with this number.

    The numbers of a worker's orders grow. A repeated order has the same number, and is answered again.
    """

    order: Count


class Wake(Message, frozen=True):
    """Take the GPU's memory again, answer Awake with this number. Sleep and Wake are numbered together."""

    order: Count


class Drain(Message, frozen=True):
    """Flush, say goodbye and exit with status 0: the job shall not come back."""

    reason: str


class ChangeRun(Message, frozen=True):
    """Flush, say goodbye, drop all that is of this run, and register anew for the run whose key pair lies in this worker's key file.

    `public_key`: of that pair, which the daemon wrote before: an older file is waited out. A worker that cannot change (its engine does not
    fit the other run, or is none yet) leaves as after a Drain.
    """

    public_key: BoundedText
    reason: BoundedText


class LendSlots(Message, frozen=True):
    """Let another run generate samples in so many slots of this engine, beside this run's. The borrower registers at the daemon as a worker
    of its own, under the key pair whose public half this is and whose file lies beside this worker's key file. It is one at a time: another
    key ends the loan before, and none ("") ends it without another.
    """

    public_key: BoundedText
    run: BoundedText
    slots: Count
    reason: BoundedText


class GoodbyeAck(Message, frozen=True):
    """All that was flushed is durable. `wanted`: numbers of turns' blocks that another worker was told to fetch from this one."""

    wanted: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_KV_OFFERS)] = ()


WorkerMessage = (
    WorkerHello
    | Chunks
    | Heartbeat
    | WeightsLoaded
    | WeightsFailed
    | Serving
    | SampleFailed
    | Yielded
    | KvKept
    | KvTried
    | Asleep
    | Awake
    | Goodbye
)
ToWorker = (
    Welcome
    | Rejected
    | HelloAgain
    | HeartbeatAck
    | UseWeights
    | PullAhead
    | Assign
    | SiblingTokens
    | FetchKv
    | DropKv
    | Yield
    | Revoke
    | Ack
    | Sleep
    | Wake
    | Drain
    | ChangeRun
    | LendSlots
    | GoodbyeAck
)
