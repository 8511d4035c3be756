"""The rows of the router's tables: runs, groups, samples, workers. Pure.

    Run -> Group -> Sample      what a trainer asked for; `Run.queue` holds the samples that wait for a worker
    Run -> Worker -> Sample     who generates: `Worker.leases`

Owns the rows; `tables.Core` holds them, and `transitions` says what may become of them. Decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from scavenger.errors import ONE_RELEASE
from scavenger.policy import placement
from scavenger.policy.interface import RouterPolicy, SampleView, Standard
from scavenger.policy.placement import Slots
from scavenger.protocol.messages import EngineSpec, Fleet, OpenRun, SampleKey, Sampling, Trained, WeightSource
from scavenger.router.core.row_budget import Budget
from scavenger.router.core.transitions import (
    MEMORY_TRANSITIONS,
    SAMPLE_TRANSITIONS,
    UNFINISHED,
    WORKER_TRANSITIONS,
    IllegalTransition,
    Memory,
    MemoryStep,
    SampleStatus,
    SampleStep,
    WorkerStatus,
    WorkerStep,
)
from scavenger.weights.directory import Directory


@dataclass(slots=True)
class RowBudget:
    """What of a run's decisions was told: budgets by kind, and the number of engines last said."""

    budgets: dict[str, Budget] = field(default_factory=dict)
    engines: int | None = None
    closed_in: tuple[str, int] | None = None  # the step in which the window was closed last


Key = tuple[bool, int, int, int]
#: Above this share of the queue a scan costs less than to find each sample by itself.
_MANY = 1 / 16


def _key(sample: Sample) -> Key:
    group = sample.group
    return placement.priority(sample.accepted, group.step, group.id, sample.id)


class Queue:
    """The samples of a run that wait for a worker, by weight version and in the order in which they shall be placed.

    Owns the order (`placement.priority`) and keeps it as samples come and go: one that comes or goes alone costs no scan of the others,
    and many at once (a fleet is lost, a step is submitted) cost one scan together. Each version has a sorted list of keys and those that
    came since it was sorted. A sample's version and length must not change while it waits: take it out first.
    """

    def __init__(self) -> None:
        self._samples: dict[int, Sample] = {}
        self._order: dict[int, list[Key]] = {}
        self._fresh: dict[int, list[Key]] = {}
        self.came = 0  # samples that ever came

    def add(self, sample: Sample) -> None:
        self._samples[sample.id] = sample
        self.came += 1
        version = sample.group.version
        fresh = self._fresh.get(version)
        if fresh is None:
            fresh = self._fresh[version] = []
        fresh.append(_key(sample))

    def discard(self, sample: Sample) -> None:
        """Take a sample out; does nothing when it does not wait."""
        if self._samples.pop(sample.id, None) is None:
            return
        version, key = sample.group.version, _key(sample)
        order = self._sorted(version)
        at = bisect_left(order, key)
        assert order[at] == key, f"sample {sample.id} changed while it waited"
        del order[at]
        if not order:
            del self._order[version]

    def discard_all(self, samples: Sequence[Sample]) -> None:
        """Take samples out, all of which wait for the same version."""
        if not samples:
            return
        version = samples[0].group.version
        order = self._sorted(version)
        if len(samples) < len(order) * _MANY:
            for sample in samples:
                self.discard(sample)
            return
        for sample in samples:
            del self._samples[sample.id]
        left = [key for key in order if key[3] in self._samples]
        assert len(left) == len(order) - len(samples), "samples changed while they waited"
        if left:
            self._order[version] = left
        else:
            del self._order[version]

    def versions(self) -> Set[int]:
        """Versions that samples wait for."""
        return self._order.keys() | self._fresh.keys() if self._fresh else self._order.keys()

    def waiting(self, version: int) -> Iterator[Sample]:
        """The samples that wait for a version, first come those to be placed first."""
        for key in self._sorted(version):
            yield self._samples[key[3]]

    def waits_for(self, sample_id: int, version: int) -> bool:
        """Whether a sample waits, and for this version."""
        sample = self._samples.get(sample_id)
        return sample is not None and sample.group.version == version

    def _sorted(self, version: int) -> list[Key]:
        fresh = self._fresh.pop(version, None)
        order = self._order.get(version, [])
        if fresh:
            self._order[version] = order
            if len(fresh) < len(order) * _MANY:
                for key in fresh:
                    insort(order, key)
            else:
                order += fresh
                order.sort()
        return order

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._samples

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples.values())


@dataclass(slots=True)
class Sample:
    id: int
    group: Group
    index: int
    status: SampleStatus = SampleStatus.NEW  # changed by `step` only
    epoch: int = 0
    worker_id: int = 0  # holder of the lease; 0 = none
    last_worker_id: int = 0  # who generated last: gets the acks
    lease_version: int = 0
    lease_offset: int = 0
    leased_at: float = 0.0
    assigned_at: float | None = None  # when its lease was durable and sent; None: not yet
    assigned_after: int = 0  # heartbeat acks that its worker had been sent by then
    accepted: int = 0
    durable: int = 0
    finish: str = ""
    moves: int = 0
    reward: float | None = None
    reward_version: str = ""
    error: str | None = None
    failures: int = 0
    failed_nodes: frozenset[str] = frozenset()
    reported: int = 0  # length in the worker's last heartbeat
    chunk_at: float = 0.0
    largest_flush: int = 0  # tokens of the largest chunk of this lease
    by_reserved: int = 0  # accepted tokens by who generated them, since this daemon began
    by_harvested: int = 0
    regenerated: int = 0  # tokens that died with a worker, since then
    seen: SampleView | None = (
        None  # how policies see it (`views`), until any of that changes; `audit` makes it anew and compares
    )

    def step(self, step: SampleStep) -> None:
        """Take one legal step, or raise and change nothing."""
        target = SAMPLE_TRANSITIONS.get((self.status, step))
        if target is None:
            raise IllegalTransition(f"sample {self.id} is {self.status} and cannot {step}")
        self.seen = None
        group = self.group
        if target in UNFINISHED:  # and so was where it came from: what is done is not opened again
            self.status = target
        else:
            before = self.done
            self.status = target
            group.unfinished += before - self.done
        group.run.stirred = True

    def give_up(self, cause: str) -> None:
        """It ended without an answer: nothing more will be generated, and its group goes on without it."""
        before, self.seen = self.done, None
        self.error = cause
        self.group.unfinished += before - self.done

    @property
    def key(self) -> SampleKey:
        return SampleKey(self.group.purpose, self.group.step, self.group.prompt_index, self.index)

    @property
    def done(self) -> bool:
        """Nothing more will be generated for it: complete, or given up and masked."""
        return self.status is SampleStatus.COMPLETE or (
            self.status is SampleStatus.ENDED and self.error is not None
        )


@dataclass(slots=True)
class Group:
    """`delivered_to`: the attempt that was sent the group, 0 = none. `orphaned`: left by an older attempt, not yet adopted.

    `unfinished` counts the samples that are not done: nobody who asks has to look at them all.
    """

    id: int
    run: Run
    purpose: str
    step: int
    prompt_index: int
    retry: int
    version: int
    root: bytes
    prompt: bytes
    meta: str
    sampling: Sampling
    samples: list[Sample] = field(default_factory=list)
    delivered_to: int = 0
    orphaned: bool = False
    unfinished: int = 0

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        self.unfinished += not sample.done

    @property
    def key(self) -> tuple[str, int, int]:
        return (self.purpose, self.step, self.prompt_index)

    @property
    def done(self) -> bool:
        return not self.unfinished

    @property
    def durable(self) -> bool:
        return all(s.durable == s.accepted for s in self.samples)


@dataclass(slots=True)
class Version:
    version: int
    step: int
    root: bytes
    manifest: bytes
    sources: tuple[
        WeightSource, ...
    ] = ()  # none: published before the daemon restarted, not announced again yet
    base: bytes = b""  # root of the version that its adapters are merged with; empty: it holds weights
    merged: bytes = (
        b""  # digest of what its trainer makes of both; empty: it states none, and nothing is compared
    )
    proved: bool = False  # an engine holds it as it was published
    refusers: dict[int, str] = field(
        default_factory=dict
    )  # engines that had all of it and would not serve it -> nodes; until one does


@dataclass(slots=True)
class Run:
    id: int
    name: str
    owner_key: str
    seed: int
    engine: EngineSpec
    attempt: int = 0
    harvest: bool = True
    max_engines: int = 0
    gpus_per_engine: int = 1
    poison_after: int = 3
    on_poison: str = "stop"
    encrypt: bool = False  # its weights go over no network in the clear
    conn: int | None = None
    opening: tuple[int, int, OpenRun] | None = (
        None  # (conn, call id, body) of an OpenRun that waits for its history
    )
    versions: dict[int, Version] = field(default_factory=dict)
    directory: Directory = field(default_factory=Directory)  # engines that serve its versions on
    next_version: int = 1
    last_step: int = 0
    resume_step: int = 0
    by_key: dict[tuple[str, int, int], Group] = field(default_factory=dict)
    queue: Queue = field(default_factory=Queue)
    leased: dict[int, int] = field(default_factory=dict)  # weight version -> open leases that name it
    retries: dict[tuple[str, int, int], int] = field(
        default_factory=dict
    )  # group key -> the next retry's number, where one was superseded
    dirty: bool = True  # something changed that may let a worker load, or a sample be placed
    stirred: bool = True  # the same, but only samples changed, and no worker
    recount: bool = True  # its fleet's sizes may have changed
    serving: tuple[int, list[Worker]] | None = None  # version and who serves it, until a worker is another
    restated: list[Worker] = field(
        default_factory=list
    )  # workers that one by one took another status since these were counted
    target: int = -1  # version that idle workers were last asked for
    idled: list[Worker] = field(default_factory=list)  # workers whose last lease ended since
    workers: dict[int, Worker] = field(default_factory=dict)
    reserved_awake: bool = True
    reserved_told: bool = (
        True  # false: the daemon restarted, and the trainer has not said again whether they are to be awake
    )
    reserved_order: int = 0  # number of its last word on that
    silent_engines: dict[str, tuple[str, str]] = field(
        default_factory=dict
    )  # name -> slot and session of a reserved engine lost without a word: it may hold memory
    memory_told: MemoryTold = field(default_factory=lambda: MemoryTold())  # as counted last
    memory_changed: bool = True  # since then
    stopped: str = ""
    stop_remedy: str = ""
    ended: bool = False
    step_samples: int = 0  # samples of the newest submitted step: what the fleet is sized for
    trainer_seen: float = 0.0
    job_id: int = 0  # Slurm's, of the newest attempt's trainer; 0 = of no job
    fleet: Fleet | None = None  # last one sent
    silenced: dict[str, Silenced] = field(
        default_factory=dict
    )  # slot -> what a reserved engine held when it fell silent for good
    slots: dict[str, str] = field(
        default_factory=dict
    )  # slot -> session of the reserved engine that greeted in it last
    evicted: OrderedDict[str, None] = field(
        default_factory=OrderedDict
    )  # sessions that lost their slots: the newest of them
    policy: RouterPolicy = field(default_factory=Standard)
    newest: tuple[str, int] = ("train", 0)  # (purpose, step) that was submitted last, at `submitted_at`
    submitted_at: float = 0.0
    window: str = ""  # what the policy last said of it: "open" | "close" | "" = nothing
    window_reason: str = ""
    window_since: float = 0.0  # when the trainer last changed `reserved_awake`
    ask_window_at: float = 0.0
    sizes: tuple[int, int, int] = (0, 0, 0)  # of its fleet, when its policy was asked last
    fresh: bool = True  # its step or its window changed since
    rebalanced_at: float = 0.0
    told: RowBudget = field(default_factory=RowBudget)  # of its policy's decisions, to the ledger
    trained: Trained | None = None  # what its trainer last said of the step under way

    def unproved(self, version: int, root: bytes, merged: bytes) -> str:
        """Why an engine that says so of itself does not hold this version as it was published; empty where it does (I8).

        After an older ledger was restored, one number may name two sets of weights.
        """
        known = self.versions.get(version)
        if known is None or known.root != root:
            return f"loaded version {version} under another root hash: it holds weights that nobody published"
        if known.merged and known.merged != merged:
            holds = merged.hex()[:16] or "says nothing of its sum"
            theirs = known.merged.hex()[:16]
            return f"merged the adapters of version {version} to other weights ({holds}) than its trainer ({theirs}): {ONE_RELEASE}"
        return ""

    def held(self, version: int) -> bool:
        """Whether anybody can give out this version's bytes: its trainer, a disk or an engine."""
        known = self.versions.get(version)
        if known is None or not (known.sources or (known.manifest and self.directory.available(version))):
            return False
        return not known.base or self.base_of(known) is not None

    def base_of(self, version: Version) -> Version | None:
        """The version whose weights this one's adapters are merged with, the newest of equal ones; None where nobody can give it out."""
        equal = [
            known
            for known in self.versions.values()
            if version.base and known.root == version.base and known.manifest
        ]
        return next(
            (known for known in reversed(equal) if known.sources or self.directory.available(known.version)),
            None,
        )


@dataclass(slots=True)
class Worker:
    id: int
    run: Run
    kind: str
    intent_id: str
    session: str
    incarnation: int
    job_id: int
    node: str
    gpus: int
    conn: int | None
    last_seen: float
    status: WorkerStatus = WorkerStatus.NEW  # changed by `step` only
    acks: int = 0  # heartbeat acks sent to it: their numbers order what else it was sent
    loaded_version: int = -1
    asked_version: int = -1
    asked_at: float = 0.0
    offered: tuple[int, ...] = ()  # revision of the directory that its holders were chosen from
    offered_at: float = 0.0
    load_failures: int = 0
    drain_reason: str = ""
    suspect: bool = False
    refused: int = 0  # chunks
    progress: int = 0
    leases: dict[int, Sample] = field(default_factory=dict)
    notice: bool = False
    idle_since: float = 0.0
    slot: str = ""
    attempt: int = 0  # of the run, when the worker greeted last; 0: before the daemon restarted
    moved_at: float = 0.0  # when its engine was last seen to do anything
    joined_at: float = 0.0
    tokens_per_s: float = 0.0  # measured between its last two heartbeats
    beat_at: float = 0.0  # when it sent its last heartbeat
    loads: int = 0  # versions that it loaded
    changed: bool = True  # whether a lease came or went since
    slots: Slots | None = None  # how policies see its leases, until one comes or goes
    role: int = -1  # as what it is counted in its run's sizes: their index, -1 = not at all
    yielding: dict[int, Yielding] = field(default_factory=dict)  # sample -> what it was asked to give back
    cache_tokens: int = 0  # as it said itself; 0 = it did not
    best_batch: int = 0
    commanded_at: float = 0.0  # when it was last told to sleep
    memory: Memory = Memory.AWAKE  # changed by `step_memory` only
    memory_order: int = 0  # number of the last order to sleep or wake
    bytes_held: int = 0  # of its GPUs' memory, as it last said
    no_holder: str = ""  # why its offer to serve weights was refused, as the ledger was told last
    wake_s: float = 0.0  # as it last said

    def step(self, step: WorkerStep) -> None:
        """Take one legal step, or raise and change nothing."""
        target = WORKER_TRANSITIONS.get((self.status, step))
        if target is None:
            raise IllegalTransition(f"worker {self.id} is {self.status} and cannot {step}")
        self.status = target

    def step_memory(self, step: MemoryStep) -> None:
        """Take one legal step, or raise and change nothing."""
        target = MEMORY_TRANSITIONS.get((self.memory, step))
        if target is None:
            raise IllegalTransition(f"worker {self.id}'s memory is {self.memory} and cannot {step}")
        self.memory = target
        self.run.memory_changed = True


@dataclass(frozen=True, slots=True)
class MemoryTold:
    """Of a run's reserved workers: those that acknowledged that they sleep, all others, and what the former hold. Sorted slots."""

    order: int = 0
    asleep: tuple[str, ...] = ()
    holding: tuple[str, ...] = ()
    bytes_held: int = 0


@dataclass(frozen=True, slots=True)
class Yielding:
    """A lease that its worker was asked to give back, and for whom (0: for the queue)."""

    epoch: int
    to_worker: int
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class Silenced:
    """A reserved engine that was given up for its silence, and the samples that it held."""

    attempt: int
    node: str
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the core needs of the daemon's configuration. Seconds; tokens."""

    heartbeat_s: float = 1.0
    suspect_s: float = 4.0
    dead_s: float = 12.0
    reconnect_s: float = 15.0
    flush_ms: float = 100.0
    flush_tokens: int = 32
    trainer_silent_s: float = 60.0
    trainer_gone_s: float = 600.0
    stalled_s: float = 300.0
