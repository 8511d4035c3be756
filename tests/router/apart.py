"""That runs on one daemon stay apart: what is of one run reaches no engine, trainer or owner of another. Of every schedule.

`Apart.committed` looks at what the ledger is told, `Apart.sent` at what a daemon says, and to whom: by the key of the connection, which is
of one run (an engine's) or of one owner, who has one run here.
"""

from __future__ import annotations

from collections.abc import Sequence

from scavenger.ledger import records as rec
from scavenger.protocol.messages import Ack, Assign, GroupDone, Message, PullAhead, UseWeights, Welcome
from scavenger.router.core.events import PeerIdentity

_OWNS = "owner of "


def owner_of(run: str) -> PeerIdentity:
    """Each run has an owner of its own."""
    return PeerIdentity("owner", _OWNS + run)


def run_of(who: PeerIdentity) -> str:
    return who.run or who.public_key.removeprefix(_OWNS)


def manifest_of(run: str) -> bytes:
    return b"manifest of " + run.encode()


class Apart:
    """See the module. `encrypted`: runs whose weights may cross a link to another cluster."""

    def __init__(self) -> None:
        self.encrypted: set[str] = set()
        self._runs: dict[int, str] = {}
        self._of_sample: dict[int, str] = {}
        self._of_group: dict[int, str] = {}
        self._of_worker: dict[int, str] = {}

    def committed(self, records: Sequence[rec.Record]) -> None:
        """One write: a lease that moved may stand in it before the engine that it moved to."""
        for record in records:
            self._learn(record)
        for record in records:
            if isinstance(record, rec.LeaseGranted | rec.ChunkAccepted):
                run, engine = self._of_sample[record.sample_id], self._of_worker[record.worker_id]
                what = "a lease of it went to" if isinstance(record, rec.LeaseGranted) else "tokens came from"
                assert run == engine, (
                    f"sample {record.sample_id} of run {run}: {what} an engine of run {engine}"
                )

    def _learn(self, record: rec.Record) -> None:
        match record:
            case rec.RunCreated():
                self._runs[record.run_id] = record.name
            case rec.GroupCreated():
                run = self._of_group[record.group_id] = self._runs[record.run_id]
                samples = range(record.first_sample_id, record.first_sample_id + record.n)
                self._of_sample |= dict.fromkeys(samples, run)
            case rec.WorkerJoined():
                self._of_worker[record.worker_id] = self._runs[record.run_id]

    def sent(self, who: PeerIdentity, message: Message) -> None:
        run, to = run_of(who), f"a {who.role} of run {run_of(who)}"
        match message:
            case Assign(leases=held) | Ack(durable=held):
                for one in held:
                    of = self._of_sample[one.sample_id]
                    assert of == run, f"sample {one.sample_id} of run {of} was told to {to}"
            case GroupDone(group_id=group_id):
                of = self._of_group[group_id]
                assert of == run, f"group {group_id} of run {of} was sent to {to}"
            case UseWeights() | PullAhead():
                order = message.weights if isinstance(message, PullAhead) else message
                assert order.manifest in (b"", manifest_of(run)), (
                    f"weights with the {order.manifest.decode()} were sent to {to}"
                )
                assert not who.cluster or run in self.encrypted, (
                    f"version {order.version} of run {run} was to cross to cluster {who.cluster} in the clear"
                )
            case Welcome(run=of):
                assert of == run, f"the welcome of run {of} was sent to {to}"
