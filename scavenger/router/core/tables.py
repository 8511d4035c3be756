"""What the router holds, and the effects of the event under way: records to write, messages to send now or once they are durable.

Pure. Owns the queue of effects that wait for a commit. Holds lengths and stop flags; tokens pass through it unseen, from a chunk to
`PayloadPort` and to the ledger. Decides nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import msgspec

from scavenger.ledger import records as rec
from scavenger.policy.interface import NewPolicy, Standard
from scavenger.protocol.messages import Assign, GroupDone, Message, SiblingTokens, TurnTokens
from scavenger.router.core.events import (
    CondemnedEngine,
    Fill,
    ReadHistory,
    RouterAction,
    Send,
    WorkerLife,
    Write,
)
from scavenger.router.core.payloads import PayloadPort
from scavenger.router.core.row_budget import MAX_KEYS, PEER_BURST, PEER_EVERY_S, REFUSALS_LOGGED, Budget
from scavenger.router.core.state import ActiveRun, Group, RouterLimits, Sample, Worker

#: Engines that are gone and still told of: more than a fleet loses between two looks at Slurm.
MAX_LIVED = 4096


def is_reported(so_far: int) -> bool:
    """Whether the last of so many refusals of one peer is written down."""
    hundreds, rest = divmod(so_far, REFUSALS_LOGGED)
    return so_far <= REFUSALS_LOGGED or (rest == 0 and hundreds & (hundreds - 1) == 0)


class Core:
    """The tables and the effects under way. One per daemon."""

    def __init__(
        self,
        limits: RouterLimits,
        generation: int,
        payloads: PayloadPort,
        ledger: str = "",
        restored: bool = False,
    ) -> None:
        self.limits = limits
        self.payloads = payloads
        self.generation = int(generation)
        self.ledger = ledger  # the history that this ledger is in; a restored backup begins another
        self.restored = (
            restored  # it began with a backup: a peer that names no history may be of the other one
        )
        self.runs: dict[str, ActiveRun] = {}
        self.groups: dict[int, Group] = {}
        self.samples: dict[int, Sample] = {}
        self.workers: dict[int, Worker] = {}
        self.by_conn: dict[int, Worker] = {}
        # Connections that said goodbye: the newest of them.
        self.departed: OrderedDict[int, None] = OrderedDict()
        # Harvested engines that are gone, for the harvester, which accounts for their GPUs.
        self.lived: deque[WorkerLife] = deque(maxlen=MAX_LIVED)
        # Nodes of harvested engines that were set aside, for the harvester, which chooses nodes.
        self.condemned: deque[CondemnedEngine] = deque(maxlen=MAX_LIVED)
        # Intents whose process was told to go on for another run, and has not registered there.
        self.handed: set[str] = set()
        # Of harvested engines' intents: the newest incarnation that the scheduler said is over, and where each life was counted.
        self._over: OrderedDict[str, int] = OrderedDict()
        self._counted: OrderedDict[tuple[str, int], str] = OrderedDict()
        self.ticked_at: float | None = None
        self.committed_at = 0.0
        self.next_run_id = self.next_group_id = self.next_sample_id = self.next_worker_id = 1
        self.next_episode_id = self.next_tool_call_id = self.next_delivery_id = 1
        self.counters: dict[str, int] = {}
        self.new_policy: NewPolicy = lambda _run: Standard()
        self.switches: dict[str, str] = {}  # node -> its switch, where the cluster's topology is known
        # Public key -> how often it sent what could not be used.
        self.nonsense: OrderedDict[str, int] = OrderedDict()
        self._budgets: OrderedDict[str, Budget] = OrderedDict()  # how many rows each peer may still cause
        self.now = 0.0

        self._ticket = self._committed = 0  # the last that was handed out, and the last that is durable
        self._records: list[rec.Record] = []
        self._ends: dict[int, int] = {}  # sample -> where among the records its lease's end is
        self._sends: list[RouterAction] = []
        # What waits for a commit: collected during the event (`_event_*`), filed under its ticket by `finish_event`, released by
        # `committed`. Lengths are (sample, tokens that become durable), grants (sample, epoch).
        self._event_actions: list[RouterAction] = []
        self._event_lengths: list[tuple[Sample, int]] = []
        self._event_grants: list[tuple[Sample, int]] = []
        self._actions_by_ticket: OrderedDict[int, list[RouterAction]] = OrderedDict()
        self._lengths_by_ticket: OrderedDict[int, list[tuple[Sample, int]]] = OrderedDict()
        self._grants_by_ticket: OrderedDict[int, list[tuple[Sample, int]]] = OrderedDict()

    # ---- lives

    def life_over(self, intent_id: str, incarnation: int) -> None:
        """The scheduler says so."""
        self._over[intent_id] = max(incarnation, self._over.pop(intent_id, -1))
        if len(self._over) > MAX_LIVED:
            self._over.popitem(last=False)

    def life_of(self, worker: Worker) -> tuple[tuple[str, int], str]:
        """As which engine and on which node a worker's failures count.

        A harvested engine's hello says its incarnation and its node; whoever has its key could name others each time and pass for many
        engines. Of one key another life begins when the scheduler has said that the one before is over, and a life has one node.
        """
        intent_id = worker.process.intent_id
        if not intent_id:
            return ("", worker.id), worker.place
        life = (intent_id, min(worker.process.incarnation, self._over.get(intent_id, -1) + 1))
        node = self._counted.setdefault(life, worker.place)
        if len(self._counted) > MAX_LIVED:
            self._counted.popitem(last=False)
        return life, node

    # ---- effects of the event being handled

    def foreign(self, ledger: str) -> bool:
        """Whether a peer's leases, weights or attempt are of another history of the ledger. A new peer names none."""
        return ledger != self.ledger and (bool(ledger) or self.restored)

    def record(self, *records: rec.Record) -> None:
        self._records.extend(records)

    def record_end(self, end: rec.LeaseEnded) -> None:
        """A lease is over. Should the sample be leased again within this event, one record will say both."""
        self._ends[end.sample_id] = len(self._records)
        self._records.append(end)

    def record_grant(self, grant: rec.LeaseGranted) -> None:
        """A lease begins; what waits for its commit is `lease_granted`'s."""
        at = self._ends.pop(grant.sample_id, None)
        if at is None:
            self._records.append(grant)
            return
        end = self._records[at]
        assert isinstance(end, rec.LeaseEnded)
        assert (end.epoch + 1, end.length) == (grant.epoch, grant.offset), (
            f"sample {grant.sample_id}: a lease in between"
        )
        self._records[at] = rec.LeaseMoved(
            end.sample_id,
            end.epoch,
            end.reason,
            end.length,
            end.regenerated,
            grant.worker_id,
            grant.version,
            grant.at,
        )

    def send(self, conn: int | None, message: Message) -> None:
        """Send at once: for what promises nothing durable."""
        if conn is not None:
            self._sends.append(Send(conn, message))

    def send_durable(self, conn: int | None, message: Message) -> None:
        """Send when the records of this event are committed: for what promises that they are."""
        if conn is not None:
            self._event_actions.append(Send(conn, message))

    def send_filled(self, conn: int | None, message: Assign | GroupDone, lengths: tuple[int, ...]) -> None:
        """As `send_durable`, with the first `lengths[i]` tokens of the i-th sample, which are durable by then."""
        if conn is not None:
            self._event_actions.append(Fill(conn, message, lengths) if any(lengths) else Send(conn, message))

    def send_siblings(self, conn: int, message: SiblingTokens) -> None:
        """Send tokens for drafts, behind the leases that were granted before: their worker drops what no lease of it asks for."""
        ends = tuple(piece.offset + piece.count for piece in message.pieces)
        self._event_actions.append(Fill(conn, message, ends))

    def send_tokens(self, conn: int, message: TurnTokens, length: int) -> None:
        """Send tokens of a turn that are durable already, up to the sample's first `length`. Its end goes with the event's commit."""
        action = Fill(conn, message, (length,)) if length > message.offset else Send(conn, message)
        (self._event_actions if message.finish or message.error is not None else self._sends).append(action)

    def read_history(self, run: ActiveRun, solved_at: float | None, ended_episodes: int) -> None:
        after = run.progress.resumed_after
        self._event_actions.append(ReadHistory(run.id, run.attempt, after, solved_at, ended_episodes))

    def length_accepted(self, sample: Sample) -> None:
        """The sample's accepted length becomes durable with this event's records."""
        self._event_lengths.append((sample, sample.accepted))

    def lease_granted(self, sample: Sample) -> None:
        """The sample's lease is sent when this event's records are durable; only then can its worker hold it."""
        self._event_grants.append((sample, sample.epoch))

    def event(self, kind: str, run_id: int, subject: str, reason: str, **detail: Any) -> None:
        """Count something, and write it to the ledger's events."""
        self.count(kind)
        self.record(rec.Event(kind, run_id, subject, reason, msgspec.json.encode(detail).decode(), self.now))

    def connection_event(self, peer: Worker, kind: str, subject: str, reason: str, **detail: Any) -> None:
        """An event that a worker can cause as often as it likes: of each kind and key the first ones are written, then fewer and fewer."""
        if self.count_refusal(f"{peer.process.intent_id or peer.run.owner_key} {kind}"):
            self.event(kind, peer.run.id, subject, reason, **detail)
        else:
            self.count(kind)

    def count_refusal(self, public_key: str) -> bool:
        """Count what is refused of a key, and say whether to write it down.

        Written are the first 100, then the 200th, 400th, 800th and so on: one key must not fill the ledger.
        """
        so_far = self.nonsense[public_key] = self.nonsense.pop(public_key, 0) + 1
        if len(self.nonsense) > MAX_KEYS:
            self.nonsense.popitem(last=False)
        return is_reported(so_far)

    def charge_row(self, peer: str, burst: int = 0) -> bool:
        """Charge a row that this peer may make as often as it likes. False: it made too many, and is to be refused."""
        most = burst or PEER_BURST
        budget = self._budgets.pop(peer, None) or Budget(most, self.now, burst=most, every_s=PEER_EVERY_S)
        self._budgets[peer] = budget
        if len(self._budgets) > MAX_KEYS:
            self._budgets.popitem(last=False)
        return budget.take(self.now)

    def advanced(self, peer: str) -> None:
        """What it asked for came to something: it begins anew."""
        self._budgets.pop(peer, None)

    def count(self, name: str, by: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + by

    # ---- the driver's side

    def finish_event(self) -> list[RouterAction]:
        """Close the event: hand out its actions, keep what waits for its commit."""
        actions, self._sends = self._sends, []
        if self._records:
            self._ticket += 1
            actions.insert(0, Write(self._ticket, tuple(self._records)))
            self._records = []
            self._ends.clear()
        if self._ticket <= self._committed:  # all that was ever written is durable
            if self._event_actions:
                actions += self._event_actions
                self._event_actions = []
            self._event_lengths, self._event_grants = [], []
            return actions
        if self._event_actions:
            self._actions_by_ticket.setdefault(self._ticket, []).extend(self._event_actions)
            self._event_actions = []
        if self._event_lengths:
            self._lengths_by_ticket.setdefault(self._ticket, []).extend(self._event_lengths)
            self._event_lengths = []
        if self._event_grants:
            self._grants_by_ticket.setdefault(self._ticket, []).extend(self._event_grants)
            self._event_grants = []
        return actions

    def committed(self, ticket: int) -> list[tuple[Sample, int]]:
        """Records up to `ticket` are durable: release what waited for them; returns (sample, durable length) pairs."""
        self._committed = max(self._committed, ticket)
        self.committed_at = self.now
        lengths: list[tuple[Sample, int]] = []
        while self._lengths_by_ticket and next(iter(self._lengths_by_ticket)) <= ticket:
            lengths.extend(self._lengths_by_ticket.popitem(last=False)[1])
        while self._actions_by_ticket and next(iter(self._actions_by_ticket)) <= ticket:
            self._sends.extend(self._actions_by_ticket.popitem(last=False)[1])
        workers, now = self.workers, self.now
        while self._grants_by_ticket and next(iter(self._grants_by_ticket)) <= ticket:
            for sample, epoch in self._grants_by_ticket.popitem(last=False)[1]:
                if sample.epoch == epoch:
                    holder = workers.get(sample.worker_id)
                    sample.assigned_at, sample.assigned_after = now, holder.heartbeat.acks if holder else 0
        return lengths

    @property
    def uncommitted(self) -> int:
        """Tickets handed out and not yet committed."""
        return self._ticket - self._committed
