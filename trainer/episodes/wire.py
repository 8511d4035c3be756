"""What rank 0 and an environment worker say to each other, in length-prefixed MessagePack over pipes (`rewards.framed`).

    rank 0 -> worker   Setup once, then Play for each episode
    worker -> rank 0   Ready once, then Played for each episode, in the order in which they end

A worker in a job of its own is reached by a socket, one message a frame, with these around the above (`remote`, `remote_worker`):

    worker -> rank 0   Hello first; Alive every `BEAT_S`; Goodbye last
    rank 0 -> worker   Alive every `BEAT_S`; Leave at the pool's end; Refused in the place of anything else

Boundary: the wire, so that a worker's interpreter needs nothing else of the trainer.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from scavenger.errors import WireError
from scavenger.protocol.messages import MAX_POLICIES, RowTurns, fault_of_numbers, fault_of_turns
from scavenger.protocol.messages.common import MAX_HELLO_BYTES, MAX_MESSAGE_BYTES, BoundedText, RunName

#: Names of the environments that are built in begin so (`builtin`).
BUILT_IN = "builtin:"
#: `Played.stopped_by` of an episode that has used up its budget.
OVER_BUDGET = "budget"
#: Between two signs of life over a socket, and the silence after which the other side counts as lost.
BEAT_S, LEASE_S = 2.0, 15.0
#: Of an environment's words that a message quotes.
MOST_WORDS = 1 << 20
#: Model calls of one episode, and rows of it.
MOST_CALLS = 1 << 16
#: Of an environment's agents, those that a worker tells of.
MOST_ROLES = 64


Words = Annotated[str, msgspec.Meta(max_length=MOST_WORDS)]


class Sandbox(msgspec.Struct, frozen=True):
    """The boxes in which plain processes run. Limits as `trainer.sandbox.plan.Limits`; `readable`, `hidden`: paths."""

    memory_mb: int
    processes: int
    disk_mb: int
    output_mb: int
    cpu_s: float
    readable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """Of a run. `arguments`, `renderer`: JSON. `seconds`, `turns`, `tokens`: of an agent in an episode at most, 0 = no bound."""

    environment: str
    arguments: str
    renderer: str
    model: str  # the model's folder
    name: str  # by which the gateway knows it
    context_length: int
    endpoint: str  # of the gateway
    on_divergence: str
    turns: int
    tokens: int
    seconds: float
    sandbox: Sandbox | None = None
    effects: str = "none"
    on_doubt: str = "fail"
    policies: dict[str, RunName] = {}  # agent -> the other run that answers for it


class Play(msgspec.Struct, frozen=True, tag="play"):
    """Play one episode. `episode`, `key`: of the gateway. `task`: its place in the task set. `sampling`: by vLLM's names."""

    episode: str
    key: str
    task: int
    seed: int
    sampling: dict[str, float | int | list[str]]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The environment is loaded, or (`error`) it cannot be. `tasks`: how many, 0 = without end. `digest`: of tasks and environment.

    `roles`: of its agents, with the type of runtime that each has; of a built-in environment none, since they run no programs.
    """

    tasks: int = 0
    digest: BoundedText = ""
    version: BoundedText = ""
    roles: Annotated[dict[BoundedText, BoundedText], msgspec.Meta(max_length=MOST_ROLES)] = {}
    error: Words = ""
    remedy: Words = ""
    output: Words = ""


class Branch(msgspec.Struct, frozen=True):
    """One row to train: as `trainer.data.batching.TrainRow`. `trained`: how many of its tokens are. `turns`: which turns these are of, and
    what each earned; empty: the environment does not reward turns.
    """

    prompt: bytes
    completion: bytes
    mask: bytes
    behaviour: bytes
    trained: int
    turns: RowTurns = ()

    def __post_init__(self) -> None:
        if fault := fault_of_turns(self.turns, self.trained):
            raise ValueError(fault)


class PolicyPart(msgspec.Struct, frozen=True):
    """What agents of another run's said in an episode: its name, their reward (the mean, of several), rows and calls, as in `Played`."""

    run: RunName
    reward: Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
    branches: Annotated[tuple[Branch, ...], msgspec.Meta(max_length=MOST_CALLS)]
    calls: Annotated[tuple[BoundedText, ...], msgspec.Meta(max_length=MOST_CALLS)]

    def __post_init__(self) -> None:
        if fault := fault_of_numbers(branch.turns for branch in self.branches):
            raise ValueError(fault)


class Played(msgspec.Struct, frozen=True, tag="played"):
    """An episode is over. `error`: why it counts for nothing. `again`: why it must be played anew, under another name; `gone`: because the
    ledger has ended this one. `final`: nor is another try made of one that failed. `note`: what else was found, such as where it branched.

    `calls`: names of the model calls that it consists of; `versions`: of the weights that answered them, in the same order. `finish`:
    "length" where a limit ended it, else "stop".
    `stopped_by`: what ended an agent before its own end; a sandbox's limit is `sandbox:LIMIT`. `worker`: who played it; the pool says so.
    `others`: what agents said for which another run answers; the rest is of this run's agents alone. `agents`: how many of them trained,
    0 = not told: `branches` are more where one's history did not go on. `seconds_model`: of its model calls, added up; `seconds_rest`: of
    the episode's, those in which it waited for none.
    """

    episode: str
    reward: Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)] = 0.0
    parts: dict[str, float] = {}
    branches: Annotated[tuple[Branch, ...], msgspec.Meta(max_length=MOST_CALLS)] = ()
    calls: Annotated[tuple[BoundedText, ...], msgspec.Meta(max_length=MOST_CALLS)] = ()
    versions: Annotated[tuple[int, ...], msgspec.Meta(max_length=MOST_CALLS)] = ()
    finish: str = "stop"
    stopped_by: str = ""
    seconds: float = 0.0
    seconds_model: float = 0.0
    seconds_rest: float = 0.0
    error: Words = ""
    output: Words = ""
    again: Words = ""
    gone: bool = False
    final: bool = False
    note: Words = ""
    worker: str = ""
    others: Annotated[tuple[PolicyPart, ...], msgspec.Meta(max_length=MAX_POLICIES)] = ()
    agents: Annotated[int, msgspec.Meta(ge=0, le=MOST_CALLS)] = 0

    def __post_init__(self) -> None:
        if len(self.calls) != len(self.versions):
            raise ValueError(f"{len(self.calls)} calls with {len(self.versions)} versions")
        if fault := fault_of_numbers(branch.turns for branch in self.branches):
            raise ValueError(fault)


# ---------------------------------------------------------------- over a socket


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A worker's first message. `release`: both ends are of one. `host`, `job`: where it runs; `job` is Slurm's id, "" outside one."""

    release: Annotated[str, msgspec.Meta(max_length=64)]
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    job: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The sender is there."""


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The worker leaves: what it played is for others. `failed`: its process ended by itself, which an episode may have caused."""

    reason: BoundedText
    failed: bool = False


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The pool closes."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Rank 0 gives this worker nothing. `again`: it may join once more."""

    reason: BoundedText
    remedy: BoundedText = ""
    again: bool = False


FromRemote = Hello | Ready | Played | Alive | Goodbye
ToRemote = Setup | Play | Alive | Leave | Refused

to_worker: msgspec.msgpack.Decoder[Setup | Play] = msgspec.msgpack.Decoder(Setup | Play)
to_trainer: msgspec.msgpack.Decoder[Ready | Played] = msgspec.msgpack.Decoder(Ready | Played)
_from_remote: msgspec.msgpack.Decoder[FromRemote] = msgspec.msgpack.Decoder(FromRemote)
_to_remote: msgspec.msgpack.Decoder[ToRemote] = msgspec.msgpack.Decoder(ToRemote)
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def from_remote(frame: bytes, most_bytes: int = MAX_MESSAGE_BYTES) -> FromRemote:
    """What a worker sent over a socket. Raises `WireError`."""
    return _decoded(_from_remote, frame, most_bytes)


def hello_of(frame: bytes) -> Hello:
    """A worker's first message. Raises `WireError` for any other one."""
    found = _decoded(_from_remote, frame, MAX_HELLO_BYTES)
    if not isinstance(found, Hello):
        raise WireError(f"{type(found).__name__} before Hello")
    return found


def to_remote(frame: bytes) -> ToRemote:
    """What rank 0 sent over a socket. Raises `WireError`."""
    return _decoded(_to_remote, frame, MAX_MESSAGE_BYTES)


def _decoded(decoder: msgspec.msgpack.Decoder[T], frame: bytes, most_bytes: int) -> T:
    if len(frame) > most_bytes:
        raise WireError(f"a message of {len(frame):,} bytes is over the limit of {most_bytes:,}")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise WireError(f"not a message of an environment worker: {error}") from error
