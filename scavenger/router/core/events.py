"""What goes into the router's core and what comes out: frozen structs. Pure.

A connection is an integer that the driver gives (`conn`); the core never sees a socket or a routing id. Authority is `PeerIdentity`, which
the driver takes from the connection's CURVE key, never from what a message says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from scavenger.ledger.records import DeliveryState, OpenGroup, Record, Snapshot
from scavenger.policy.fleet_size import Demand
from scavenger.policy.interface import Fact
from scavenger.protocol.messages import (
    Assign,
    Call,
    GroupDone,
    Message,
    SiblingTokens,
    TurnTokens,
    WorkerHello,
)


@dataclass(frozen=True, slots=True)
class CondemnedEngine:
    """A harvested engine of this run was set aside: its numbers are wrong. `number`: grows by one; `at`: Unix seconds. On which node it ran
    is for the scheduler to say: what its hello named may be another's."""

    number: int
    intent_id: str
    incarnation: int
    run_id: int
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class WorkerLife:
    """One engine of a harvested job, which shows that the job held GPUs. `seen_at`: when it was last heard, its goodbye too. Unix s.

    `here`: it has not left, nor been given up. `ready`: it has loaded weights, so that it could work. `run_id`: for which it worked; 0: not
    known, it was an earlier daemon's. `ready_at`: when it had loaded its first weights for that run; 0: not yet.
    """

    intent_id: str
    incarnation: int
    node: str
    joined_at: float
    seen_at: float
    here: bool = False
    ready: bool = False
    run_id: int = 0
    ready_at: float = 0.0


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Who is at the other end. `owner`: an enrolled public key, may own runs. `worker`: a key minted for one job of one run, on the further
    `cluster`; "" = the daemon's own."""

    role: str  # "owner" | "worker"
    public_key: str
    run: str = ""
    intent_id: str = ""
    cluster: str = ""


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class HelloReceived:
    conn: int
    identity: PeerIdentity
    hello: WorkerHello


class WorkerSent(msgspec.Struct, frozen=True, gc=False):
    """Any message of a worker after its hello. `faults`: what the pipeline's `checked` found, by position of the chunk in the message.

    The tokens that the core compares (`samples.overlaps`) are in memory.
    """

    conn: int
    message: Message
    faults: Mapping[int, str] | None = None


class Heard(msgspec.Struct, frozen=True, gc=False):
    """Something came from this connection, and waits until tokens are read back from the ledger: its worker lives."""

    conn: int


class TrainerCalled(msgspec.Struct, frozen=True, gc=False):
    conn: int
    identity: PeerIdentity
    call: Call


class Committed(msgspec.Struct, frozen=True, gc=False):
    """Every record up to and including this ticket is durable."""

    ticket: int


@dataclass(frozen=True, slots=True)
class HistoryRead:
    """The ledger's answer to `ReadHistory`: groups and deliveries that steps after the resumed checkpoint had consumed,
    `RunOpened.pass_rates`, and the names of episodes that ended, the newest last."""

    run_id: int
    attempt: int
    groups: tuple[OpenGroup, ...]
    pass_rates: tuple[tuple[int, int, int, int], ...] = ()
    deliveries: tuple[DeliveryState, ...] = ()
    ended_episodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobGone:
    """The scheduler says that a harvested job's incarnation is over. `crashed`: neither preempted, cancelled nor a lost node."""

    intent_id: str
    incarnation: int
    reason: str
    crashed: bool


@dataclass(frozen=True, slots=True)
class IntentRevoked:
    """A harvested job was given back by policy: its worker is drained."""

    intent_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class IntentHandedOver:
    """A harvested job works for another run from now on: its worker leaves this one, and its process registers there under `public_key`."""

    intent_id: str
    public_key: str
    reason: str


@dataclass(frozen=True, slots=True)
class SlotsLent:
    """Slots of a harvested job's engine are lent to the run of this key; "" as the key: no longer."""

    intent_id: str
    public_key: str
    run: str
    slots: int
    reason: str


class CoreTick(msgspec.Struct, frozen=True, gc=False):
    """Time passed."""


@dataclass(frozen=True, slots=True)
class LedgerRead:
    """What the ledger holds, for a core that has just begun."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class PastRead:
    """What the policies of runs are to learn again after a restart: run -> facts, each with the time (Unix s) at which it became known."""

    facts: Mapping[int, tuple[tuple[float, Fact], ...]]


@dataclass(frozen=True, slots=True)
class TopologyRead:
    """The scheduler's topology: (node, its switch)."""

    switches: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class GarbageReceived:
    """A peer sent what no message is."""

    public_key: str
    cause: str


class DemandAsked(msgspec.Struct, frozen=True, gc=False):
    """How many harvested engines can each run use? Answered by `DemandStated`; a policy may learn from being asked."""


RouterEvent = (
    HelloReceived
    | WorkerSent
    | Heard
    | TrainerCalled
    | Committed
    | HistoryRead
    | JobGone
    | IntentRevoked
    | IntentHandedOver
    | SlotsLent
    | CoreTick
    | LedgerRead
    | PastRead
    | TopologyRead
    | GarbageReceived
    | DemandAsked
)

# ---------------------------------------------------------------- actions


class Send(msgspec.Struct, frozen=True, gc=False):
    conn: int
    message: Message


class Fill(msgspec.Struct, frozen=True, gc=False):
    """Send the message, in its place among what goes to this connection, with the first `lengths[i]` tokens of its i-th lease or sample;
    a turn's with those from its offset on.

    All of them are durable: what is not in memory can be read from the ledger. Of `SiblingTokens` `lengths[i]` is where the i-th piece
    ends; what is not in memory of them is left out.
    """

    conn: int
    message: Assign | GroupDone | TurnTokens | SiblingTokens
    lengths: tuple[int, ...]


class Write(msgspec.Struct, frozen=True, gc=False):
    """Commit these records in this order; answer `Committed(ticket)`. Tickets grow by one."""

    ticket: int
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class ReadHistory:
    """Read what steps after `after_step` consumed, and answer `HistoryRead`. `solved_at`: with the pass rates of those before.
    `ended_episodes`: of so many episodes the names, the newest that ended; 0: none are wanted.
    """

    run_id: int
    attempt: int
    after_step: int
    solved_at: float | None = None
    ended_episodes: int = 0


@dataclass(frozen=True, slots=True)
class DemandStated:
    """The answer to `DemandAsked`: the runs by their ids."""

    demand: tuple[Demand, ...]


RouterAction = Send | Fill | Write | ReadHistory | DemandStated
