"""What must hold, checked while a schedule runs. Which check proves which invariant:

    I1   `Truth.committed` (each chunk under the lease in force, in order, the sample's own tokens), `Watch.after` (lengths only grow),
         `World.lie` (what must be refused changes nothing)
    I2   `Watch.promised`: acks, leases, welcomes, weights, groups, goodbyes and replies against what is committed when they are sent
    I3   `harness.Ledger` (consumed once), `Truth.committed` (versions are never reused), `SimTrainer._arrived` (own weights),
         `World.call_up` (an older attempt is refused), `audit_groups` (each prompt of a step stands once)
    I4   `Truth.committed`: a chunk's version has the root hash of its group's; with steps in advance it is young enough for its step, and
         `Watch.promised`: the trainer is told the versions that the chunks named
    I5   `Truth.committed` (one budget), `SimWorker._add` (the budget that a lease names), `audit` (accepted <= max_tokens)
    I6   `Watch.after` (no open sample is forgotten), `Truth.committed` (every end has its reason; poisoned only after enough engines),
         `World.make_calm` (every submitted step gets done)
    I10  `Watch.restored` (a restart has every committed token), `Watch.promised` (nothing is sent twice), `harness.Ledger`
    I11  `World.make_calm(alone=True)`: reserved engines finish alone
    -    `apart.Apart`: no lease, token, version or group of one run reaches an engine or a trainer of another
    -    `Fleet.apply`, `Fleet._hear`: no guest generates beyond its bound; an engine that changes hands in peace loses no token
    -    `World.apply`: no trainer is at work while one of its reserved engines has its memory, or is about to take it
    I12  `audit_ledger`: every lease, worker and token of the ledger is explained by its rows

`Truth` follows the ledger across daemons; `Watch` looks at one daemon. Samples' contents are read from the ledger's rows alone.
"""

from __future__ import annotations

from scavenger.ledger import records as rec
from scavenger.protocol.messages import (
    Accepted,
    Ack,
    Assign,
    DoneSample,
    GoodbyeAck,
    GroupDone,
    Lease,
    Message,
    Reply,
    RunOpened,
    UseWeights,
    Welcome,
)
from scavenger.router.core import staleness
from scavenger.router.core.events import Committed, RouterEvent
from scavenger.router.core.tables import Core
from tests.router.apart import Apart
from tests.router.engines import MAX_TOKENS, payload
from tests.router.memory_ledger import Ledger, plain

ENDS = {"consumed", "filtered", "masked", "evaluated", "superseded", "poisoned", "surplus"}
STANDING = ENDS - {"superseded", "poisoned", "surplus"} | {"open", "complete"}


def is_wrong(session: str) -> bool:
    """Whether an engine's numbers are wrong: of every sixth process, by its name."""
    return int(session.removeprefix("s")) % 6 == 0


class Truth:
    """What was committed, and whether it may have been."""

    def __init__(self, ledger: Ledger, ahead: int = 0) -> None:
        self.ledger = ledger
        self.ahead = ahead  # steps that weights may be older than those that train their tokens
        self.published_in: dict[int, list[tuple[int, int, bytes]]] = {}  # run -> (version, step, root)
        self.mixed = self.stale = 0  # samples delivered with tokens of several versions, and of older weights
        self.granted: dict[tuple[int, int], rec.LeaseGranted] = {}
        self.roots: dict[tuple[int, int], bytes] = {}
        self.open: set[int] = set()
        self.joined: set[int] = set()
        self.wrong: set[int] = set()  # workers whose numbers are wrong
        self.set_aside: set[int] = set()
        self.left: set[int] = set()
        self.ended: dict[tuple[int, int], rec.LeaseEnded] = {}
        self.chunks: dict[int, int] = {}
        self.runs: dict[str, int] = {}
        self.apart = Apart()

    def commit(self, records: tuple[rec.Record, ...]) -> None:
        told = tuple(plain(records))
        self.apart.committed(told)
        for record in told:
            self._committed(record)
        self.ledger.apply(records)
        self.open -= {r.sample_id for r in records if isinstance(r, rec.SampleEnded)}

    def _committed(self, record: rec.Record) -> None:
        match record:
            case rec.ChunkAccepted():
                self._chunk(record)
            case rec.LeaseGranted():
                self.granted[record.sample_id, record.epoch] = record
            case rec.LeaseEnded():
                assert record.reason, f"sample {record.sample_id}: a lease ended without a reason (I12)"
                self.ended[record.sample_id, record.epoch] = record
            case rec.GroupCreated():
                self.open |= set(range(record.first_sample_id, record.first_sample_id + record.n))
            case rec.SampleEnded():
                self._end(record)
            case rec.VersionPublished():
                key = (record.run_id, record.version)
                assert key not in self.roots, (
                    f"version {record.version} of run {record.run_id} was used twice (I3)"
                )
                self.roots[key] = record.root
                self.published_in.setdefault(record.run_id, []).append(
                    (record.version, record.step, record.root)
                )
            case rec.RunCreated():
                self.runs[record.name] = record.run_id
            case rec.WorkerJoined():
                self.joined.add(record.worker_id)
                if is_wrong(record.session):
                    self.wrong.add(record.worker_id)
            case rec.Event(kind="engine_set_aside"):
                worker_id = int(record.subject.removeprefix("worker "))
                assert worker_id in self.wrong, (
                    f"{record.subject} was set aside and is healthy: {record.reason}"
                )
                self.set_aside.add(worker_id)
            case rec.WorkerLeft():
                assert record.reason, f"worker {record.worker_id} left without a reason (I12)"
                self.left.add(record.worker_id)

    def _chunk(self, chunk: rec.ChunkAccepted) -> None:
        mine, first, n = payload(chunk.sample_id), 4 * chunk.offset, len(chunk.tokens)
        assert chunk.offset + n // 4 <= MAX_TOKENS, f"sample {chunk.sample_id}: over its budget (I5)"
        got = (chunk.tokens, chunk.logprobs, chunk.raw_logprobs)
        again = (
            first and chunk.tokens and any(mine[0][at : at + n] == chunk.tokens for at in range(0, first, 4))
        )
        assert not again, f"sample {chunk.sample_id}: some of its tokens were accepted twice (I1)"
        assert got == tuple(p[first : first + n] for p in mine), (
            f"sample {chunk.sample_id}: others' tokens were accepted (I1)"
        )
        group = self.ledger.samples[chunk.sample_id].group_id
        made = self.ledger.groups[group]
        if self.ahead and made.purpose == "train":
            self.young_enough(made.run_id, made.step, chunk.version, chunk.sample_id)
        else:
            root = self.roots[made.run_id, chunk.version]
            assert root == self.root_of_group(group), (
                f"sample {chunk.sample_id}: a chunk of other weights (I4)"
            )
        self.chunks[chunk.sample_id] = self.chunks.get(chunk.sample_id, 0) + n // 4

    def _end(self, end: rec.SampleEnded) -> None:
        assert end.state in ENDS, end
        if end.state in ("superseded", "poisoned", "surplus"):
            assert end.reason, f"sample {end.sample_id}: {end.state} without a reason (I6)"
        if end.state == "poisoned":
            failures = sum(key[0] == end.sample_id for key in self.ended)
            assert failures >= 3, f"sample {end.sample_id}: given up after {failures} leases (I6)"

    # ---- asked by the others

    def young_enough(self, run_id: int, step: int, version: int, sample_id: int) -> int:
        """How many steps older the version's weights are than those that train the step."""
        (of_step,) = [s for v, s, _ in self.published_in[run_id] if v == version]
        old = step - 1 - of_step
        assert 0 <= old <= self.ahead, f"sample {sample_id}: weights {old} steps too old for step {step} (I4)"
        return old

    def standing(self, run_id: int) -> set[int]:
        """Versions whose weights no restart from an older checkpoint took back."""
        found, least, roots = set(), 1 << 30, dict[int, bytes]()
        for version, step, root in reversed(self.published_in[run_id]):
            if step < least or (step in roots and roots[step] == root and step == least):
                found.add(version)
                least, roots[step] = min(step, least), root
        return found

    def root_of_group(self, group_id: int) -> bytes:
        made = self.ledger.groups[group_id]
        return self.roots[made.run_id, made.version]

    def published(self, run: str, version: int) -> bool:
        return (self.runs.get(run, 0), version) in self.roots

    def taken(self, run: str, purpose: str, step: int) -> bool:
        """Whether a step stands; an older attempt's may have been rewound before its answer arrived."""
        run_id = self.runs[run]
        return any(
            isinstance(r, rec.StepCommitted) and (r.run_id, r.purpose, r.step) == (run_id, purpose, step)
            for r in self.ledger.log
        )


class Watch:
    """One daemon, event by event."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.lengths: dict[int, tuple[int, int]] = {}  # sample -> (accepted, epoch) when last seen
        self.welcomed: dict[int, int] = {}
        self.delivered: set[tuple[int, int]] = set()  # (connection, group)

    def restored(self, core: Core) -> None:
        rows = self.truth.ledger.samples
        for sample in core.samples.values():
            row = rows[sample.id]
            assert sample.accepted == len(row.tokens) // 4, (
                f"sample {sample.id}: a restart lost committed tokens (I10)"
            )
            assert sample.epoch == row.epoch, f"sample {sample.id}: a restart forgot its epoch (I10)"
            assert sample.spans == row.spans, f"sample {sample.id}: a restart forgot who generated it"
            if staleness.is_bounded(sample.group):
                assert list(staleness.mixture(sample)) == row.versions, (
                    f"sample {sample.id}: a restart forgot the versions of its tokens"
                )
        self._all_known(core)

    def after(self, core: Core, event: RouterEvent) -> None:
        lengths = self.lengths
        for sample in core.samples.values():
            now = (sample.accepted, sample.epoch)
            last = lengths.get(sample.id)
            if last != now:
                assert last is None or (now[0] >= last[0] and now[1] >= last[1]), (
                    f"sample {sample.id}: {last} became {now} (I1)"
                )
                lengths[sample.id] = now
        if isinstance(event, Committed) and not core.uncommitted:
            self._all_known(core)
            rows = self.truth.ledger.samples
            for sample in core.samples.values():
                row = rows[sample.id]
                assert (sample.accepted, sample.epoch) == (len(row.tokens) // 4, row.epoch), (
                    f"sample {sample.id}: not as committed (I12)"
                )

    def _all_known(self, core: Core) -> None:
        forgotten = self.truth.open - core.samples.keys()
        assert not forgotten, f"open samples were forgotten: {sorted(forgotten)} (I6)"

    def promised(self, conn: int, message: Message) -> None:
        """What a message says that the ledger holds, it holds."""
        truth, rows = self.truth, self.truth.ledger.samples
        match message:
            case Ack(durable=durable):
                for held in durable:
                    assert held.length * 4 <= len(rows[held.sample_id].tokens), (
                        f"sample {held.sample_id}: acked before its commit (I2)"
                    )
            case Assign(leases=leases):
                for lease in leases:
                    self._lease(lease)
            case GroupDone(samples=samples):
                assert (conn, message.group_id) not in self.delivered, (
                    f"group {message.group_id} was sent twice over one connection (I10)"
                )
                self.delivered.add((conn, message.group_id))
                assert message.group_id in truth.ledger.delivered, (
                    f"group {message.group_id}: delivered before its record (I2)"
                )
                for done in samples:
                    row = rows[done.sample_id]
                    if truth.ahead and message.purpose == "train" and done.error is None:
                        self._versions(message, done)
                    # What ended it meanwhile (the run was closed, or opened again) may have been committed at once with its delivery.
                    whole = (
                        row.state == "poisoned"
                        if done.error is not None
                        else bool(row.finish) and row.state != "open"
                    )
                    assert whole, f"sample {done.sample_id}: delivered while {row.state} in the ledger (I2)"
                    if done.error is None:
                        same = (row.tokens, row.logprobs, row.finish) == (
                            done.tokens,
                            done.logprobs,
                            done.finish,
                        )
                        assert same, (
                            f"sample {done.sample_id}: delivered with other tokens than the ledger's (I2)"
                        )
            case Welcome(worker_id=worker_id):
                assert worker_id in truth.joined, f"worker {worker_id}: welcomed before its commit (I2)"
                self.welcomed[conn] = worker_id
            case UseWeights(version=version):
                assert any(v == version for _, v in truth.roots), (
                    f"version {version}: named before its commit (I2)"
                )
            case GoodbyeAck():
                worker_id = self.welcomed.get(conn, 0)
                assert worker_id in truth.left, (
                    f"worker {worker_id}: its goodbye was acked before its commit (I2)"
                )
            case Reply(body=RunOpened(run_id=run_id, attempt=attempt)):
                granted = truth.ledger.runs[run_id]["attempt"] if run_id in truth.ledger.runs else 0
                assert attempt <= granted, "an attempt was answered before its commit (I2)"  # type: ignore[operator]
            case Reply(body=Accepted(group_ids=group_ids)):
                assert all(i in truth.ledger.groups for i in group_ids), (
                    f"groups {group_ids}: accepted before their commit (I2)"
                )

    def _versions(self, group: GroupDone, done: DoneSample) -> None:
        truth = self.truth
        told = [(version, tokens) for version, _, tokens in done.versions]
        assert told == truth.ledger.samples[done.sample_id].versions, (
            f"sample {done.sample_id}: its trainer is told versions other than those of its chunks (I4)"
        )
        run_id = truth.ledger.groups[group.group_id].run_id
        ages = [
            truth.young_enough(run_id, group.step, version, done.sample_id) for version, _, _ in done.versions
        ]
        truth.mixed += len(done.versions) > 1
        truth.stale += max(ages) > 0

    def _lease(self, lease: Lease) -> None:
        granted = self.truth.granted.get((lease.sample_id, lease.epoch))
        assert granted is not None, f"sample {lease.sample_id}: leased before its commit (I2)"
        tokens = self.truth.ledger.samples[lease.sample_id].tokens
        whole = 4 * granted.offset == len(lease.accepted) and tokens[: len(lease.accepted)] == lease.accepted
        assert whole, f"sample {lease.sample_id}: moved without its own tokens (I6)"
        assert lease.version == granted.version
        assert lease.sampling.max_tokens == MAX_TOKENS, (
            f"sample {lease.sample_id}: the budget changed with the lease (I5)"
        )


def audit_groups(ledger: Ledger, run_id: int, next_step: int) -> None:
    """Each prompt of a train step has one group that stands (I3), and its retries are numbered without a gap or a repeat."""
    standing: dict[tuple[int, int], list[int]] = {}
    poisoned: set[tuple[int, int]] = set()
    retries: dict[tuple[int, int], list[int]] = {}
    for group_id, made in sorted(ledger.groups.items()):
        if made.run_id != run_id or made.purpose != "train":
            continue
        key = (made.step, made.prompt_index)
        states = {ledger.samples[made.first_sample_id + i].state for i in range(made.n)}
        standing.setdefault(key, []).extend([group_id] if states & STANDING else [])
        poisoned |= {key} if "poisoned" in states else set()
        retries.setdefault(key, []).append(made.retry)
    for key, numbers in retries.items():
        assert numbers == list(range(len(numbers))), f"step and prompt {key}: retries {numbers} (I3)"
    for (step, prompt), groups in standing.items():
        least = 1 if step < next_step and (step, prompt) not in poisoned else 0
        assert least <= len(groups) <= 1, f"step {step}, prompt {prompt}: groups {groups} stand (I3)"


def audit_ledger(truth: Truth) -> None:
    """Every lease, worker and token is explained by rows (I12)."""
    ledger = truth.ledger
    for key in truth.granted:
        row = ledger.samples[key[0]]
        over = key in truth.ended or (row.lease is not None and row.lease[0] == key[1])
        assert over, f"sample {key[0]}: the end of lease {key[1]} is not told (I12)"
    for sample_id, row in ledger.samples.items():
        assert len(row.tokens) // 4 == truth.chunks.get(sample_id, 0), (
            f"sample {sample_id}: tokens without chunks (I12)"
        )
    assert truth.joined == truth.left | ledger.workers.keys(), "a worker's end is not told (I12)"
