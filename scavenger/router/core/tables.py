"""What the router holds, and the effects of the event under way: records to write, messages to send now or once they are durable.

Pure. Owns the queue of effects that wait for a commit. Holds lengths and stop flags; tokens pass through it unseen, from a chunk to
`Payloads` and to the ledger. Decides nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import msgspec

from scavenger.ledger import records as rec
from scavenger.policy.interface import NewPolicy, Standard
from scavenger.protocol.messages import Assign, GroupDone, Message
from scavenger.router.core.events import Fill, ReadHistory, RouterAction, Send, WorkerLife, Write
from scavenger.router.core.payloads import Payloads
from scavenger.router.core.row_budget import MAX_KEYS, PEER_BURST, PEER_EVERY_S, REFUSALS_LOGGED, Budget
from scavenger.router.core.state import Group, RouterLimits, Run, Sample, Worker

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
        payloads: Payloads,
        ledger: str = "",
        restored: bool = False,
    ) -> None:
        self.limits = limits
        self.payloads = payloads
        self.generation = int(generation)
        self.ledger = ledger  # the history that this ledger is in; a restored backup begins another
        self.restored = (
            restored  # it did begin with a backup: then a peer that names none may be of the other one
        )
        self.runs: dict[str, Run] = {}
        self.groups: dict[int, Group] = {}
        self.samples: dict[int, Sample] = {}
        self.workers: dict[int, Worker] = {}
        self.by_conn: dict[int, Worker] = {}
        self.departed: OrderedDict[int, None] = (
            OrderedDict()
        )  # connections that said goodbye: the newest of them
        self.lived: deque[WorkerLife] = deque(
            maxlen=MAX_LIVED
        )  # harvested engines that are gone, for who accounts for their GPUs
        self.ticked_at: float | None = None
        self.committed_at = 0.0
        self.next_run_id = self.next_group_id = self.next_sample_id = self.next_worker_id = 1
        self.counters: dict[str, int] = {}
        self.new_policy: NewPolicy = lambda _run: Standard()
        self.switches: dict[str, str] = {}  # node -> its switch, where the cluster's topology is known
        self.nonsense: OrderedDict[str, int] = (
            OrderedDict()
        )  # public key -> what it sent and nobody could use
        self._budgets: OrderedDict[str, Budget] = OrderedDict()  # what each peer's rows may still be
        self.now = 0.0
        self._ticket = self._settled = 0
        self._records: list[rec.Record] = []
        self._ends: dict[int, int] = {}  # sample -> where among the records its lease's end is
        self._sends: list[RouterAction] = []
        self._deferred: OrderedDict[int, list[RouterAction]] = OrderedDict()
        self._awaiting: OrderedDict[int, list[tuple[Sample, int]]] = (
            OrderedDict()
        )  # ticket -> (sample, length)
        self._lengths: list[tuple[Sample, int]] = []
        self._granted: OrderedDict[int, list[tuple[Sample, int]]] = OrderedDict()  # ticket -> (sample, epoch)
        self._grants: list[tuple[Sample, int]] = []
        self._waiting: list[RouterAction] = []

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
            self._waiting.append(Send(conn, message))

    def send_filled(self, conn: int | None, message: Assign | GroupDone, lengths: tuple[int, ...]) -> None:
        """As `send_durable`, with the first `lengths[i]` tokens of the i-th sample, which are durable by then."""
        if conn is not None:
            self._waiting.append(Fill(conn, message, lengths) if any(lengths) else Send(conn, message))

    def read_history(self, run: Run) -> None:
        self._waiting.append(ReadHistory(run.id, run.attempt, run.step.resumed_after))

    def length_accepted(self, sample: Sample) -> None:
        """The sample's accepted length becomes durable with this event's records."""
        self._lengths.append((sample, sample.accepted))

    def lease_granted(self, sample: Sample) -> None:
        """The sample's lease is sent when this event's records are durable; only then can its worker hold it."""
        self._grants.append((sample, sample.epoch))

    def event(self, kind: str, run_id: int, subject: str, reason: str, **detail: Any) -> None:
        """Count something, and write it to the ledger's events."""
        self.count(kind)
        self.record(rec.Event(kind, run_id, subject, reason, msgspec.json.encode(detail).decode(), self.now))

    def connection_event(self, peer: Worker, kind: str, subject: str, reason: str, **detail: Any) -> None:
        """An event that a worker can cause as often as it likes: of each kind and key the first ones are written, then fewer and fewer."""
        if self.logs_refusal(f"{peer.process.intent_id or peer.run.owner_key} {kind}"):
            self.event(kind, peer.run.id, subject, reason, **detail)
        else:
            self.count(kind)

    def logs_refusal(self, public_key: str) -> bool:
        """Count what is refused of a key, and say whether to write it down.

        Written are the first 100, then the 200th, 400th, 800th and so on: one key must not fill the ledger.
        """
        so_far = self.nonsense[public_key] = self.nonsense.pop(public_key, 0) + 1
        if len(self.nonsense) > MAX_KEYS:
            self.nonsense.popitem(last=False)
        return is_reported(so_far)

    def affords(self, peer: str, burst: int = 0) -> bool:
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
        if self._ticket <= self._settled:  # all that was ever written is durable
            if self._waiting:
                actions += self._waiting
                self._waiting = []
            self._lengths, self._grants = [], []
            return actions
        if self._waiting:
            self._deferred.setdefault(self._ticket, []).extend(self._waiting)
            self._waiting = []
        if self._lengths:
            self._awaiting.setdefault(self._ticket, []).extend(self._lengths)
            self._lengths = []
        if self._grants:
            self._granted.setdefault(self._ticket, []).extend(self._grants)
            self._grants = []
        return actions

    def settle(self, ticket: int) -> list[tuple[Sample, int]]:
        """Records up to `ticket` are durable: release what waited for them; returns (sample, durable length) pairs."""
        self._settled = max(self._settled, ticket)
        self.committed_at = self.now
        lengths: list[tuple[Sample, int]] = []
        while self._awaiting and next(iter(self._awaiting)) <= ticket:
            lengths.extend(self._awaiting.popitem(last=False)[1])
        while self._deferred and next(iter(self._deferred)) <= ticket:
            self._sends.extend(self._deferred.popitem(last=False)[1])
        workers, now = self.workers, self.now
        while self._granted and next(iter(self._granted)) <= ticket:
            for sample, epoch in self._granted.popitem(last=False)[1]:
                if sample.epoch == epoch:
                    holder = workers.get(sample.worker_id)
                    sample.assigned_at, sample.assigned_after = now, holder.heartbeat.acks if holder else 0
        return lengths

    @property
    def unsettled(self) -> int:
        """Tickets handed out and not yet committed."""
        return self._ticket - self._settled
