"""The rows of the router's tables: runs, groups, samples, workers, and what may become of a sample. Pure.

Owns the rows and the legal transitions; `core` has the tables. Decides nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

from scavenger.errors import ONE_RELEASE
from scavenger.router.placement import Slots
from scavenger.router.policy import RouterPolicy, SampleView, Standard
from scavenger.router.queue import Queue
from scavenger.router.told import Told
from scavenger.weights.directory import Directory
from scavenger.wire import EngineSpec, Fleet, OpenRun, SampleKey, Sampling, Trained, WeightSource

#: Refusals of one worker, or of one key, that become events; after these the 200th, 400th, 800th and so on do, the others are counted.
REFUSALS_TOLD = 100
#: Keys whose nonsense and budgets are remembered: those that were heard of last.
MAX_KEYS = 4096
#: Rows that a peer's greetings, or a trainer's calls between two committed steps, may make at once; later ones are this far apart.
PEER_BURST, PEER_EVERY_S = 1000, 30.0
#: Greetings of all reserved engines of one owner, in slots that they name themselves, between two steps that any of its runs commits.
OWNER_BURST = 100 * PEER_BURST


class IllegalTransition(Exception):
    """A bug: the core tried a step that the table does not hold. Names the sample, its state and the step; nothing was changed."""


class SampleStatus(StrEnum):
    QUEUED = "queued"  # waits for a worker
    LEASED = "leased"  # a worker generates it
    UNCONFIRMED = "unconfirmed"  # leased before the daemon restarted; its worker has not come back yet
    COMPLETE = "complete"  # last token accepted
    ENDED = "ended"  # consumed, filtered, masked, evaluated, superseded, poisoned or surplus


#: What may happen to a sample: (state, step) -> state. Anything else is a bug.
TRANSITIONS: dict[tuple[SampleStatus, str], SampleStatus] = {
    (SampleStatus.QUEUED, "lease"): SampleStatus.LEASED,
    (SampleStatus.LEASED, "release"): SampleStatus.QUEUED,
    (SampleStatus.LEASED, "finish"): SampleStatus.COMPLETE,
    (SampleStatus.UNCONFIRMED, "confirm"): SampleStatus.LEASED,
    (SampleStatus.UNCONFIRMED, "release"): SampleStatus.QUEUED,
    (SampleStatus.QUEUED, "finish"): SampleStatus.COMPLETE,  # every token was durable, only the flag was lost
    (SampleStatus.COMPLETE, "end"): SampleStatus.ENDED,
    (SampleStatus.ENDED, "reopen"): SampleStatus.COMPLETE,
    (SampleStatus.QUEUED, "abandon"): SampleStatus.ENDED,
    (SampleStatus.LEASED, "abandon"): SampleStatus.ENDED,
    (SampleStatus.UNCONFIRMED, "abandon"): SampleStatus.ENDED,
    (SampleStatus.COMPLETE, "abandon"): SampleStatus.ENDED,
}
_OPEN = frozenset({SampleStatus.QUEUED, SampleStatus.LEASED, SampleStatus.UNCONFIRMED})


class WorkerStatus(StrEnum):
    LOADING = "loading"  # connected, without the version that its run needs
    READY = "ready"
    SLEEPING = "sleeping"  # asked to sleep, has not answered
    ASLEEP = "asleep"
    DRAINING = "draining"  # asked to leave
    AWAY = "away"  # restored from the ledger, has not come back yet


@dataclass(slots=True)
class Sample:
    id: int
    group: Group
    index: int
    status: SampleStatus = SampleStatus.QUEUED
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
    limit: int = 0  # new tokens after which this lease is handed back; 0 = never
    seen: SampleView | None = None  # how policies see it (`views`), until any of that changes; `audit` makes it anew and compares

    def step(self, step: str) -> None:
        """Take one legal step, or raise and change nothing."""
        target = TRANSITIONS.get((self.status, step))
        if target is None:
            raise IllegalTransition(f"sample {self.id} is {self.status} and cannot {step}")
        self.seen = None
        group = self.group
        if target in _OPEN:  # and so was where it came from: what is done is not opened again
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
        return self.status is SampleStatus.COMPLETE or (self.status is SampleStatus.ENDED and self.error is not None)


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
    take: int
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
    sources: tuple[WeightSource, ...] = ()  # none: published before the daemon restarted, not announced again yet
    base: bytes = b""  # root of the version that its adapters are merged with; empty: it holds weights
    merged: bytes = b""  # digest of what its trainer makes of both; empty: it states none, and nothing is compared
    proved: bool = False  # an engine holds it as it was published
    refusers: dict[int, str] = field(default_factory=dict)  # engines that had all of it and would not serve it -> nodes; until one does


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
    opening: tuple[int, int, OpenRun] | None = None  # (conn, call id, body) of an OpenRun that waits for its history
    versions: dict[int, Version] = field(default_factory=dict)
    directory: Directory = field(default_factory=Directory)  # engines that serve its versions on
    next_version: int = 1
    last_step: int = 0
    resume_step: int = 0
    by_key: dict[tuple[str, int, int], Group] = field(default_factory=dict)
    queue: Queue = field(default_factory=Queue)
    leased: dict[int, int] = field(default_factory=dict)  # weight version -> open leases that name it
    takes: dict[tuple[str, int, int], int] = field(default_factory=dict)  # group key -> the next take, where one was superseded
    dirty: bool = True  # something changed that may let a worker load, or a sample be placed
    stirred: bool = True  # the same, but only samples changed, and no worker
    recount: bool = True  # its fleet's sizes may have changed
    serving: tuple[int, list[Worker]] | None = None  # version and who serves it, until a worker is another
    restated: list[Worker] = field(default_factory=list)  # workers that one by one took another status since these were counted
    target: int = -1  # version that idle workers were last asked for
    idled: list[Worker] = field(default_factory=list)  # workers whose last lease ended since
    workers: dict[int, Worker] = field(default_factory=dict)
    reserved_awake: bool = True
    stopped: str = ""
    stop_remedy: str = ""
    ended: bool = False
    step_samples: int = 0  # samples of the newest submitted step: what the fleet is sized for
    trainer_seen: float = 0.0
    fleet: Fleet | None = None  # last one sent
    silenced: dict[str, Silenced] = field(default_factory=dict)  # slot -> what a reserved engine held when it fell silent for good
    slots: dict[str, str] = field(default_factory=dict)  # slot -> session of the reserved engine that greeted in it last
    evicted: OrderedDict[str, None] = field(default_factory=OrderedDict)  # sessions that lost their slots: the newest of them
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
    told: Told = field(default_factory=Told)  # of its policy's decisions, to the ledger
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
        equal = [known for known in self.versions.values() if version.base and known.root == version.base and known.manifest]
        return next((known for known in reversed(equal) if known.sources or self.directory.available(known.version)), None)


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
    status: WorkerStatus
    last_seen: float
    protocol: int = 0  # that it greeted with last
    acks: int = 0  # heartbeat acks sent to it: their numbers order what else it was sent
    loaded_version: int = -1
    asked_version: int = -1
    asked_at: float = 0.0
    offered: tuple[int, ...] = ()  # revision of the directory that its holders were chosen from
    offered_at: float = 0.0
    load_failures: int = 0
    drain_reason: str = ""
    lost_assignments: int = 0
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
    told_at: float = 0.0  # when it was last told to sleep
    no_holder: str = ""  # why its offer to serve weights was refused, as the ledger was told last
    wake_s: float = 0.0  # as it last said


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


