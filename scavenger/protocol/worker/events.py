"""The vocabulary of a worker's session: events in, actions out, an engine's requests and tokens, limits, exit codes. Data only.

Exit codes of the worker's process, which the job script acts on:

    0   drained        the daemon let it go: the job ends
    69  no daemon      none answered, or accepted it, for `orphan_s`: the job ends rather than hold an idle GPU
    70  engine failed  the engine died, could not be built, or cannot serve weights: the job ends
    72  cannot start   what it needs is missing or wrong, as a key file on a file system that is not mounted, or (the job script says so)
                       its Python cannot import it: the job ends
    75  preempted      SIGTERM: the job script requeues its own job
    78  refused        the daemon refused key, run or protocol, or the job was submitted for another release: trying again would not
                       help, the job ends, no node is blamed

An engine that ends with 69, 70 or 72 before it could work blames the set-up; a node only where others do better
(`scavenger.harvest.track.set_up`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from scavenger.protocol import messages
from scavenger.protocol.messages import KvSource, SampleKey, Sampling, WeightSource

EXIT_DRAINED = 0
EXIT_NO_DAEMON = 69
EXIT_ENGINE_FAILED = 70
EXIT_CANNOT_START = 72
EXIT_PREEMPTED = 75
EXIT_REFUSED = 78


# ---------------------------------------------------------------- between session and engine


@dataclass(frozen=True, slots=True)
class Request:
    """One lease's work: go on after `prompt + accepted` until a stop token or until `max_new_tokens` more were sampled.

    `handle` is the worker's own id for the lease. `seed` and `key` name the sample's random stream. An engine with draws of its own
    ("reference") draws the token at position p (0 = first completion token, whichever lease produced it) from (seed, key, p) alone. An
    engine that takes one seed per request ("vllm") gets one made of (seed, key, number of accepted tokens). `begun_version`: as in
    `Lease`. `history`: of the ledger, in which versions have their numbers. `kv`: where the blocks of its first tokens may be had.
    `leaves_kv`: once it is finished the engine has its blocks until they are taken, or it is aborted.
    """

    handle: int
    prompt: tuple[int, ...]
    accepted: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    seed: int
    key: SampleKey
    begun_version: int = -1
    history: str = ""
    kv: KvSource | None = None
    leaves_kv: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one request, in order; all three have equal length. For `token_ids[i]`

    `logprobs[i]`      is its logprob under the sampling distribution (after temperature, top-k, top-p), and
    `raw_logprobs[i]`  that under the raw model (temperature 1, no truncation).

    `finish` is "stop" (the last token is the sampled stop token), "length", or None while it goes on. `error` ends the
    request without a finish: the tokens are refused and the sample is generated elsewhere. `routing`: as in `Chunk`.
    """

    handle: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    finish: str | None = None
    error: str | None = None
    routing: bytes = b""


@dataclass(frozen=True, slots=True)
class Speculated:
    """Totals of an engine since it was built. `verifications`: passes of one sample in which a draft was verified. Each made a token more
    than it accepted, because the model's own next token comes with it."""

    drafted: int = 0
    accepted: int = 0
    verifications: int = 0


#: Of an engine that does not, or has not yet.
NOT_SPECULATED = Speculated()


# ---------------------------------------------------------------- the session


class WorkerPhase(Enum):
    """How far the present connection has come."""

    CONNECTING = "connecting"
    REGISTERING = "registering"
    JOINED = "joined"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Who this worker is, for its hello.

    `jitter` in [0, 1) spreads reconnects of a fleet. `slot` names a reserved engine's place in its training job; "" for a harvested one.
    """

    kind: str
    run: str
    session: str
    incarnation: int
    job_id: int
    node: str
    gpus: int
    engine: str
    code_version: str
    pid: int
    jitter: float = 0.0
    slot: str = ""
    guest: bool = False  # bounded by its host (`Bounded`): it takes no lease before that says how many


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Bounds of a session.

    `max_unacked` tokens (12 bytes each) may await their ack before the engine pauses: minutes of a daemon's absence.
    `refusals` of the key, in a row, end the worker; fewer do not, because the daemon may still be reading its list of keys.
    `orphan_s` bounds the time without a daemon, and the time during which one refuses the worker with `retry`.
    `kv_s` bounds how long a worker whose goodbye was acked stays for those who take its samples' KV blocks, within the goodbye's own bound.
    `notice_s` bounds a goodbye after SIGTERM. Where Slurm gives no grace, slurmd checks 0.17, 0.67 and 1.67 s after its signal whether a
    job's processes are gone. A worker whose daemon is slow to answer is gone by the second check, and its last messages are on their way.
    """

    hello_s: float = 2.0
    backoff_s: float = 0.1
    backoff_max_s: float = 5.0
    missed_heartbeats: int = 3
    refusals: int = 3
    orphan_s: float = 900.0
    notice_s: float = 0.45
    drain_s: float = 5.0
    kv_s: float = 0.45
    max_unacked: int = 1 << 18
    message_tokens: int = 1 << 16


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """Base of what happens to a session."""


@dataclass(frozen=True, slots=True)
class WorkerTick(WorkerEvent):
    """Time passed."""


@dataclass(frozen=True, slots=True)
class Connected(WorkerEvent):
    """There is a new socket, and no message was sent on it yet."""


@dataclass(frozen=True, slots=True)
class Unreachable(WorkerEvent):
    """No socket could be made: no daemon has announced itself."""

    reason: str


@dataclass(frozen=True, slots=True)
class KeyRefused(WorkerEvent):
    """The daemon does not accept this worker's key."""

    reason: str


@dataclass(frozen=True, slots=True)
class Received(WorkerEvent):
    message: messages.ToWorker


@dataclass(frozen=True, slots=True)
class Generated(WorkerEvent):
    deltas: tuple[Delta, ...]


@dataclass(frozen=True, slots=True)
class AddRefused(WorkerEvent):
    """The engine can never serve this request."""

    handle: int
    reason: str


@dataclass(frozen=True, slots=True)
class EngineCrashed(WorkerEvent):
    reason: str


@dataclass(frozen=True, slots=True)
class Loaded(WorkerEvent):
    version: int
    root: bytes
    pull_s: float
    load_s: float
    verify_s: float = 0.0
    merged: bytes = b""  # digest of what was merged, where its trainer states one
    chosen: str = ""  # how its bytes came, and why


@dataclass(frozen=True, slots=True)
class Built(WorkerEvent):
    """The engine was built, without weights. Fields as in `EngineInfo`."""

    cache_tokens: int
    best_batch: int
    kv_source: WeightSource | None = (
        None  # where others get the KV blocks that this worker keeps; None: it keeps none
    )
    kv_token_nbytes: int = 0  # of a token in them


@dataclass(frozen=True, slots=True)
class LoadFailed(WorkerEvent):
    """`refused`: all bytes came, and the engine does not serve them. `differs`: because it holds other weights than were published."""

    version: int
    reason: str
    differs: bool = False
    refused: bool = False


@dataclass(frozen=True, slots=True)
class PullFailed(WorkerEvent):
    """What `PullWeights` asked for did not come."""

    version: int


@dataclass(frozen=True, slots=True)
class Serves(WorkerEvent):
    """This worker began or ended to serve a version to others, or a part of one."""

    serving: messages.Serving


@dataclass(frozen=True, slots=True)
class Bounded(WorkerEvent):
    """So many leases at most from now on, as the host of this worker says (`scavenger guest`). 0: the engine shall give its memory back."""

    leases: int


@dataclass(frozen=True, slots=True)
class Slept(WorkerEvent):
    """The engine gave its memory back, as `SleepEngine` of this order asked. `bytes_held`: what it still holds."""

    order: int
    bytes_held: int


@dataclass(frozen=True, slots=True)
class Woken(WorkerEvent):
    """The engine has its weights and its memory again, as `WakeEngine` of this order asked. `seconds`: what that took."""

    order: int
    seconds: float
    bytes_held: int


@dataclass(frozen=True, slots=True)
class KvLoaded(WorkerEvent):
    """What came of the blocks that the request of a handle named. As in `messages.KvTried`."""

    handle: int
    tokens: int
    nbytes: int
    seconds: float
    fault: str = ""


@dataclass(frozen=True, slots=True)
class TurnKvKept(WorkerEvent):
    """A turn's blocks, which `KeepKv` or `KeepOtherKv` of this handle asked for, are kept here: `nbytes` bytes, which took `seconds`.
    `fault`: why they are not; "" = they are."""

    handle: int
    nbytes: int
    seconds: float
    fault: str = ""


@dataclass(frozen=True, slots=True)
class KvTaken(WorkerEvent):
    """Others took some of the blocks that this worker keeps; `left`: how many are yet to be taken. `wanted_named`: those that a `LeaveKv`
    named are among them; before it was carried out they are not."""

    left: int
    wanted_named: bool = False


@dataclass(frozen=True, slots=True)
class Terminate(WorkerEvent):
    """SIGTERM."""

    reason: str


# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class WorkerAction:
    """Base of what a session asks of its driver."""


@dataclass(frozen=True, slots=True)
class SendMessage(WorkerAction):
    message: messages.WorkerMessage


@dataclass(frozen=True, slots=True)
class Connect(WorkerAction):
    """Drop the socket, wait, read the rendezvous again, make a new one; answer Connected or Unreachable."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Build(WorkerAction):
    """Make the engine, without weights; answer Built, or EngineDied."""

    spec: messages.EngineSpec


@dataclass(frozen=True, slots=True)
class LoadWeights(WorkerAction):
    """Pull, verify and load; supersedes a load in progress. Answer Loaded or LoadFailed."""

    weights: messages.UseWeights


@dataclass(frozen=True, slots=True)
class PullWeights(WorkerAction):
    """Pull and verify beside what the engine does, behind what is being pulled already; supersedes one that has not begun. Answer
    PullFailed where it fails."""

    weights: messages.UseWeights


@dataclass(frozen=True, slots=True)
class MoreHolders(WorkerAction):
    """The load in progress may pull from these too."""

    weights: messages.UseWeights


@dataclass(frozen=True, slots=True)
class GroupName:
    """Which group of samples: the key of any of them, and their prompt."""

    key: messages.SampleKey
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SiblingSaid:
    """Tokens of a group's sample (`index`) on another engine, from `offset` of its completion on. A draft: it may be wrong, late or
    doubled, and hold any number that is not negative."""

    group: GroupName
    index: int
    offset: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HearSiblings(WorkerAction):
    """Drafts for the samples of these groups. `over`: groups of which no sample is generated here any more."""

    said: tuple[SiblingSaid, ...] = ()
    over: tuple[GroupName, ...] = ()


@dataclass(frozen=True, slots=True)
class Add(WorkerAction):
    """Begin this request; answer Generated, or AddRefused."""

    request: Request


@dataclass(frozen=True, slots=True)
class KeepKv(WorkerAction):
    """Keep the blocks of a running request for who goes on with its sample, under its handle as their number. Answer KvTaken when somebody
    has them. `tokens`: of the sample's context whose entries are to be kept; `history`: of the ledger. `of_turn`: of a finished request,
    for the turns that follow it: they stay when they are taken. Answer TurnKvKept."""

    handle: int
    tokens: int
    history: str
    of_turn: bool = False


@dataclass(frozen=True, slots=True)
class KeepOtherKv(WorkerAction):
    """Fetch a turn's blocks from another worker and keep them under this handle. Answer TurnKvKept. `history`: of the ledger."""

    handle: int
    order: KvSource
    history: str


@dataclass(frozen=True, slots=True)
class DropTurnKv(WorkerAction):
    """Let go of turns' blocks, by their numbers; nothing is answered."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LeaveKv(WorkerAction):
    """This worker leaves: from now on turns' blocks go with the first that takes them. Those of `wanted` are waited for: answer KvTaken."""

    wanted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Abort(WorkerAction):
    """Forget these requests; nothing is answered."""

    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SleepEngine(WorkerAction):
    """Answer Slept, of the same order."""

    order: int


@dataclass(frozen=True, slots=True)
class WakeEngine(WorkerAction):
    """Answer Woken, of the same order."""

    order: int


@dataclass(frozen=True, slots=True)
class EndWorker(WorkerAction):
    """End the process with `code`. `hands_to`: or go on with the same engine for the run that this public key is of; "" = no."""

    code: int
    reason: str
    remedy: str = ""
    hands_to: str = ""


@dataclass(frozen=True, slots=True)
class Lend(WorkerAction):
    """Let a run borrow slots of the engine, or end the loan ("" as the key), as the order says."""

    order: messages.LendSlots


@dataclass(frozen=True, slots=True)
class LogNote(WorkerAction):
    """A line for the log."""

    event: str
    detail: str
