"""What goes into the router's core and what comes out: frozen structs. Pure.

A connection is an integer that the driver gives (`conn`); the core never sees a socket or a routing id. Authority is `Identity`, which the
driver takes from the connection's CURVE key, never from what a message says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from scavenger.ledger.records import GroupState, Record
from scavenger.wire import Assign, Call, GroupDone, Message, WorkerHello


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is at the other end. `owner`: an enrolled public key, may own runs. `worker`: a key minted for one job of one run."""

    role: str  # "owner" | "worker"
    public_key: str
    run: str = ""
    intent_id: str = ""


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class HelloReceived:
    conn: int
    identity: Identity
    hello: WorkerHello


class WorkerSaid(msgspec.Struct, frozen=True, gc=False):
    """Any message of a worker after its hello. `faults`: what `payload_check` found, by position of the chunk in the message.

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
    identity: Identity
    call: Call


class Committed(msgspec.Struct, frozen=True, gc=False):
    """Every record up to and including this ticket is durable."""

    ticket: int


@dataclass(frozen=True, slots=True)
class HistoryRead:
    """The ledger's answer to `ReadHistory`: groups that steps after the resumed checkpoint had consumed."""

    run_id: int
    attempt: int
    groups: tuple[GroupState, ...]


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


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time passed."""


RouterEvent = HelloReceived | WorkerSaid | Heard | TrainerCalled | Committed | HistoryRead | JobGone | IntentRevoked | Tick

# ---------------------------------------------------------------- actions


class Send(msgspec.Struct, frozen=True, gc=False):
    conn: int
    message: Message


class Fill(msgspec.Struct, frozen=True, gc=False):
    """Send the message, in its place among what goes to this connection, with the first `lengths[i]` tokens of its i-th lease or sample.

    All of them are durable: what is not in memory can be read from the ledger.
    """

    conn: int
    message: Assign | GroupDone
    lengths: tuple[int, ...]


class Write(msgspec.Struct, frozen=True, gc=False):
    """Commit these records in this order; answer `Committed(ticket)`. Tickets grow by one."""

    ticket: int
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class ReadHistory:
    """Read what steps after `after_step` consumed, and answer `HistoryRead`."""

    run_id: int
    attempt: int
    after_step: int


RouterAction = Send | Fill | Write | ReadHistory
