"""The rows of the router's tables: runs, groups, samples, workers. Pure.

    ActiveRun -> Group -> Sample      what a trainer asked for; `ActiveRun.queue` holds the samples that wait for a worker
    ActiveRun -> Worker -> Sample     who generates: `Worker.leases`
    ActiveRun -> Episode -> Group     what a gateway asked for: each turn is a group, with a `Turn` beside it

Owns the rows; `tables.Core` holds them, and `transitions` says what may become of them. Decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scavenger.errors import ONE_RELEASE
from scavenger.policy import placement
from scavenger.policy.admission import Admission
from scavenger.policy.affinity import Speeds
from scavenger.policy.agreement import DEFAULT_RULES, AgreementRules, SpanWindow
from scavenger.policy.interface import RouterPolicy, SampleView, Standard
from scavenger.policy.kv import KvRates
from scavenger.policy.placement import Slots
from scavenger.protocol.messages import (
    GUEST_INTENT,
    DeliveredRow,
    EngineSpec,
    Fleet,
    LendSlots,
    OpenRun,
    SampleKey,
    Sampling,
    Trained,
    WantDeliveries,
    WeightSource,
)
from scavenger.protocol.worker.events import NOT_SPECULATED, Speculated
from scavenger.router.core.prefixes import NO_PARENT, Parent, Prefixes, TokenHash
from scavenger.router.core.row_budget import Budget
from scavenger.router.core.siblings import SiblingBacklog
from scavenger.router.core.transitions import (
    DELIVERY_TRANSITIONS,
    EPISODE_TRANSITIONS,
    MEMORY_TRANSITIONS,
    SAMPLE_TRANSITIONS,
    TOOL_TRANSITIONS,
    UNFINISHED,
    WORKER_TRANSITIONS,
    DeliveryStatus,
    DeliveryStep,
    EpisodeStatus,
    EpisodeStep,
    GpuMemoryState,
    IllegalTransition,
    MemoryStep,
    SampleStatus,
    SampleStep,
    ToolStatus,
    ToolStep,
    WorkerStatus,
    WorkerStep,
)
from scavenger.weights.directory import WeightDirectory

if TYPE_CHECKING:
    from scavenger.config import DaemonConfig

Key = tuple[bool, int, int, int]
#: Of a turn: how many of the turns before it are looked at.
MAX_ANCESTORS = 64
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


class TurnQueue:
    """The samples of turns that wait for a worker: those with tokens first, then the oldest. No policy sees them (`turns.place`)."""

    def __init__(self) -> None:
        self._samples: dict[int, Sample] = {}
        self._versions: dict[int, int] = {}  # version -> how many wait for it
        #: Sample -> since when it waits for the engine that has its prefix, though another may have been free (Unix s).
        self.held_since: dict[int, float] = {}

    def add(self, sample: Sample) -> None:
        self._samples[sample.id] = sample
        self._versions[sample.group.version] = self._versions.get(sample.group.version, 0) + 1

    def discard(self, sample: Sample) -> None:
        """Take a sample out; does nothing when it does not wait. Its version must not change while it waits."""
        if self._samples.pop(sample.id, None) is None:
            return
        self.held_since.pop(sample.id, None)
        version = sample.group.version
        self._versions[version] -= 1
        if not self._versions[version]:
            del self._versions[version]

    def versions(self) -> Set[int]:
        return self._versions.keys()

    def groups(self) -> Iterator[Group]:
        """The turns that its samples are of, in no order and once for each sample."""
        return (sample.group for sample in self._samples.values())

    def waiting(self) -> list[Sample]:
        return sorted(self._samples.values(), key=lambda sample: (sample.accepted == 0, sample.id))

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._samples

    def __len__(self) -> int:
        return len(self._samples)


@dataclass(frozen=True, slots=True)
class KvOffered:
    """A worker keeps a sample's KV blocks: of `tokens` tokens, made by the weights of `version`. `at`: when it said so (Unix s)."""

    worker_id: int
    source: WeightSource
    number: int
    tokens: int
    token_nbytes: int
    version: int
    at: float


@dataclass(frozen=True, slots=True)
class KvUnderWay:
    """A lease names blocks that its engine fetches, until it says what came of them, or for `within_s` from `at` (Unix s) at most. `ahead`:
    bytes that had the same way before them."""

    holder: str
    reader_id: int
    nbytes: int
    ahead: int
    at: float
    within_s: float
    is_here: bool = False  # its engine keeps them itself: they cross no network
    of: int = 0  # the sample whose blocks they are; 0: its own
    number: int = 0  # under which they are kept


@dataclass(frozen=True, slots=True)
class KvHandedOver:
    """A worker was told to fetch what a turn left from one that leaves. `at`: Unix s; `ahead`: bytes that went the same way before."""

    worker_id: int
    at: float
    ahead: int


@dataclass(slots=True)
class KvMoves:
    """What became of KV blocks since this daemon began, in samples; `tokens`, `nbytes` and `seconds` are of those that moved.

    `prefilled`: a prefill was predicted to be no slower; `gone`: not all were there any more; `refused`: by the engine that read them.
    """

    rates: KvRates = field(default_factory=KvRates)
    under_way: dict[int, KvUnderWay] = field(default_factory=dict)  # by sample
    #: By sample of a turn that is whole: who keeps its blocks for the turns behind it (`kv_turns`).
    turns: dict[int, KvOffered] = field(default_factory=dict)
    turns_nbytes: Counter[int] = field(default_factory=Counter)  # of these, by worker
    handed: dict[int, KvHandedOver] = field(
        default_factory=dict
    )  # by the same, while they go from engine to engine
    token_nbytes: int = 0  # of a token in its engines' blocks; 0: none has said it
    keeps_turns: bool | None = None  # as was decided last
    turns_kept: int = 0
    turns_handed: int = 0
    offered: int = 0
    moved: int = 0
    prefilled: int = 0
    gone: int = 0
    refused: int = 0
    tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0


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
    #: (worker, tokens) of those who generated it, in the order of its tokens.
    spans: list[tuple[int, int]] = field(default_factory=list)
    #: (version, tokens) in the order of its tokens; empty where its group's version is that of all (`staleness.mixture`).
    versions: tuple[tuple[int, int], ...] = ()
    regenerated: int = 0  # tokens that died with a worker, since then
    kv: KvOffered | None = None  # who keeps its KV blocks for its next lease (`kv_moves`)
    brings_kv: bool = False  # its lease names blocks
    #: How policies see it (`policy_view`), until any of that changes. `audit` makes it anew and compares.
    cached_view: SampleView | None = None

    def view_changed(self) -> None:
        """Something changed that policies see of it."""
        self.cached_view = None

    def transition(self, step: SampleStep) -> None:
        """Take one legal step, or raise and change nothing."""
        target = SAMPLE_TRANSITIONS[self.status].get(step)
        if target is None:
            raise IllegalTransition(f"sample {self.id} is {self.status} and cannot {step}")
        self.cached_view = None
        group = self.group
        if target in UNFINISHED:  # and so was where it came from: what is done is not opened again
            self.status = target
        else:
            before = self.done
            self.status = target
            group.unfinished += before - self.done
        group.run.due.samples = True

    def give_up(self, cause: str) -> None:
        """It ended without an answer: nothing more will be generated, and its group goes on without it."""
        before, self.cached_view = self.done, None
        self.error = cause
        self.group.unfinished += before - self.done

    @property
    def key(self) -> SampleKey:
        group = self.group
        if (
            group.turn is not None
        ):  # by its request, so that it does not depend on the order in which episodes ask
            request = group.turn.request
            numbers = int.from_bytes(request[:7], "big"), int.from_bytes(request[7:14], "big")
            return SampleKey(group.purpose, *numbers, self.index)
        return SampleKey(group.purpose, group.step, group.prompt_index, self.index)

    @property
    def queue(self) -> Queue | TurnQueue:
        """Where it waits for a worker."""
        run = self.group.run
        return run.queue if self.group.turn is None else run.turns.queue

    @property
    def done(self) -> bool:
        """Nothing more will be generated for it: complete, or given up and masked."""
        return self.status is SampleStatus.COMPLETE or (
            self.status is SampleStatus.ENDED and self.error is not None
        )


@dataclass(slots=True)
class Group:
    """`delivered_to`: the attempt that was sent the group, 0 = none. `orphaned`: left by an older attempt, not yet adopted.

    `unfinished` counts the samples that are not done, so that no caller has to visit them all.
    """

    id: int
    run: ActiveRun
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
    turn: Turn | None = None  # what it is of an episode; None: of a step
    holders: dict[int, int] = field(default_factory=dict)  # worker -> leases of the group that it holds

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


# ---------------------------------------------------------------- episodes


@dataclass(frozen=True, slots=True)
class CachedAt:
    """A worker had a turn's prompt and completion in its KV cache. `era`, `entered`: the worker's by then."""

    worker_id: int
    era: tuple[int, int]
    entered: int


@dataclass(slots=True)
class Turn:
    """What a group is of an episode. `followers`: the connections that its tokens are sent to, the newest last."""

    episode: Episode
    number: int
    request: bytes  # names the caller's request: asked for again, it is not generated again
    content: bytes  # hash of what was asked for
    prompt_sha256: bytes  # of the prompt's tokens, which leave memory when the turn is complete
    prompt_tokens: int
    parent: Parent = NO_PARENT  # whose prompt and completion the prompt begins with, and for how many tokens
    #: By index of its samples that are not complete: the hash of the prompt and of what is accepted.
    hashes: dict[int, TokenHash] = field(default_factory=dict)
    #: By index of its complete samples: SHA-256 of the tokens of prompt and completion.
    ends: dict[int, bytes] = field(default_factory=dict)
    #: By index of its samples, who generated the last token of each that is complete, and what it had cached by then.
    cached_at: dict[int, CachedAt] = field(default_factory=dict)
    #: By index of its leased samples: tokens of the context that the engine is believed to have had.
    found_cached: dict[int, int] = field(default_factory=dict)
    unserved_since: float | None = None  # since when nobody has the weights that its tokens are of (Unix s)
    followers: OrderedDict[int, None] = field(default_factory=OrderedDict)


def ancestors(samples: Mapping[int, Sample], turn: Turn) -> Iterator[tuple[Sample, int]]:
    """The samples before a turn that are in memory, the nearest first, each with how many tokens of its prompt and completion the turn's
    prompt begins with."""
    parent, length = turn.parent, turn.parent.length
    for _ in range(MAX_ANCESTORS):
        sample = samples.get(parent.sample_id)
        if sample is None or not length:
            return
        before = sample.group.turn
        assert before is not None
        yield sample, length
        parent, length = before.parent, min(length, before.parent.length)


@dataclass(frozen=True, slots=True)
class EpisodeSpent:
    """Of an episode's budget, by turns that are not in memory any more."""

    turns: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Episode:
    """One agent on one task. `turns`: by request, in the order in which they were asked for; none once it has ended."""

    id: int
    name: str
    begun_at: float  # Unix s
    status: EpisodeStatus = EpisodeStatus.NEW  # changed by `transition` only
    turns: dict[bytes, Group] = field(default_factory=dict)
    numbers: int = 0  # the number of its last turn
    prefixes: Prefixes = field(default_factory=Prefixes)  # what its next prompts may begin with
    tools: dict[str, ToolCall] = field(default_factory=dict)  # by their names
    delivered: bool = False  # what this run's policy said in it, to the run's trainer
    #: What other policies had whose part in it is over, while this run, which plays it, goes on.
    spent: EpisodeSpent = EpisodeSpent()

    def transition(self, step: EpisodeStep) -> None:
        """Take one legal step, or raise and change nothing."""
        target = EPISODE_TRANSITIONS[self.status].get(step)
        if target is None:
            raise IllegalTransition(f"episode {self.id} is {self.status} and cannot {step}")
        self.status = target


@dataclass(slots=True)
class ToolCall:
    """A call of a tool with effects outside. `asker`: the life of the environment worker that asks it. `answer`: JSON, once it is known."""

    id: int
    tool: str
    asker: bytes
    answer: bytes = b""
    status: ToolStatus = ToolStatus.NEW  # changed by `transition` only
    in_doubt: bool = False  # another life has asked for it: told once

    def transition(self, step: ToolStep) -> None:
        """Take one legal step, or raise and change nothing."""
        target = TOOL_TRANSITIONS[self.status].get(step)
        if target is None:
            raise IllegalTransition(f"call {self.id} of a tool is {self.status} and cannot {step}")
        self.status = target


@dataclass(slots=True)
class RunTurns:
    """The episodes of a run. `open`: groups of turns with samples that are not done. `peak`, `peak_at`: the most samples that were
    open at once of late, and when (Unix s). `leased`: weight version -> open leases of turns that name it, which `ActiveRun.leased` counts
    too. `ended`: names of those that ended, the newest last. Those of a run that is closed are in the ledger alone: `ended_known` is false
    until they are read.
    """

    episodes: dict[str, Episode] = field(default_factory=dict)
    ended: OrderedDict[str, None] = field(default_factory=OrderedDict)
    ended_known: bool = True
    groups: int = 0  # turns in memory
    answer_bytes: int = 0  # of tools' answers in memory
    open: dict[int, Group] = field(default_factory=dict)
    queue: TurnQueue = field(default_factory=TurnQueue)
    leased: dict[int, int] = field(default_factory=dict)
    peak: int = 0
    peak_at: float = 0.0
    speeds: Speeds = field(default_factory=Speeds)  # what routing by caches reckons with


@dataclass(slots=True)
class Delivery:
    """What the run's policy said in one episode that another run plays. `group`: the id of the first delivery of its group. `version`: the
    oldest weights that its turns are of.
    """

    id: int
    group: int
    source: str
    step: int  # of the run that plays
    prompt_index: int
    index: int
    episode: str
    reward: float
    version: int
    rows: tuple[DeliveredRow, ...]
    status: DeliveryStatus = DeliveryStatus.NEW  # changed by `transition` only

    def transition(self, step: DeliveryStep) -> None:
        """Take one legal step, or raise and change nothing."""
        target = DELIVERY_TRANSITIONS[self.status].get(step)
        if target is None:
            raise IllegalTransition(f"delivery {self.id} is {self.status} and cannot {step}")
        self.status = target

    @property
    def nbytes(self) -> int:
        return sum(
            len(row.prompt) + len(row.completion) + len(row.mask) + len(row.behaviour) for row in self.rows
        )


@dataclass(slots=True)
class RunDeliveries:
    """What is due to the run's trainer. `by_id`: nothing else, for the ledger has what steps took. `wanted`: what the trainer asked for
    last; `held`: groups that it has. `over_sent`: it knows that no further one comes.
    """

    by_id: dict[int, Delivery] = field(default_factory=dict)
    wanted: WantDeliveries | None = None
    held: set[int] = field(default_factory=set)
    over_sent: bool = False

    def due(self) -> dict[int, list[Delivery]]:
        """By group, the oldest first."""
        found: dict[int, list[Delivery]] = {}
        for one in self.by_id.values():
            if one.status is DeliveryStatus.DUE:
                found.setdefault(one.group, []).append(one)
        return dict(sorted(found.items()))


# ---------------------------------------------------------------- run


@dataclass(slots=True)
class Version:
    """One published version of a run's weights, and who can give it out."""

    version: int
    step: int
    root: bytes
    manifest: bytes
    #: Empty: published before the daemon restarted, and not announced again yet.
    sources: tuple[WeightSource, ...] = ()
    base: bytes = b""  # root of the version that its adapters are merged with; empty: it holds weights
    #: Digest of what its trainer makes of adapters and base; empty: it states none, and nothing is compared.
    merged: bytes = b""
    proved: bool = False  # an engine holds it as it was published
    #: Life (`Core.life_of`) -> node of the engines that had all of it and would not serve it; empty as soon as one does.
    refusers: dict[tuple[str, int], str] = field(default_factory=dict)
    nbytes: int = 0  # 0: not known


@dataclass(frozen=True, slots=True)
class EpisodeBudget:
    """Of a whole episode, over all its agents and policies. 0: no bound."""

    turns: int = 0
    tokens: int = 0  # that are generated
    seconds: float = 0.0  # since its first turn was asked for


#: Nothing is lent.
NO_LOAN = LendSlots("", "", 0, "")


@dataclass(slots=True)
class RunSettings:
    """What the run's configuration says of its engines; each attempt states it anew."""

    harvest: bool = True
    max_engines: int = 0
    gpus_per_engine: int = 1
    poison_after: int = 3  # failures on different nodes after which a sample is given up
    on_poison: str = "stop"  # "stop" | "mask"
    encrypt: bool = False  # its weights go over no network in the clear
    nodes_per_engine: int = 1
    max_off_policy_steps: int = 0  # steps that the weights of a sample may be older than those that train it
    on_new_version: str = "switch"  # "switch" | "finish"; see `staleness.to_switch`
    keeps_cache: bool = False  # an engine's KV cache outlives a load of weights; see `returns`
    environment_jobs: int = 0  # environment workers in jobs that may join its trainer
    environment_file: str = ""  # by which they do
    policies: tuple[str, ...] = ()  # other runs that answer for agents of its environment
    episodes_of: str = ""  # the run whose episodes its steps are filled from
    serves_only: bool = False  # it takes no steps
    isolation: str = "memory"  # "memory" | "process"; the latter: no process works for it and for another run
    budget: EpisodeBudget = EpisodeBudget()  # of each of its episodes


@dataclass(slots=True)
class TrainerLink:
    """The connection to the run's trainer, and what passed over it last. Times: Unix seconds."""

    conn: int | None = None
    #: (conn, call id, body) of an OpenRun that waits for its history.
    opening: tuple[int, int, OpenRun] | None = None
    seen_at: float = 0.0
    job_id: int = 0  # Slurm's, of the newest attempt's trainer; 0 = of no job
    fleet: Fleet | None = None  # the last one sent


@dataclass(slots=True)
class PublishedWeights:
    """The versions that the run's trainer published, and which of them can be had from whom."""

    versions: dict[int, Version] = field(default_factory=dict)
    directory: WeightDirectory = field(default_factory=WeightDirectory)  # engines that serve versions on
    next_version: int = 1

    def unproved(self, version: int, root: bytes, merged: bytes) -> str:
        """Why an engine that loaded this root does not hold the version as it was published; empty where it does (I8).

        After an older ledger was restored, one number may name two sets of weights.
        """
        known = self.versions.get(version)
        if known is None or known.root != root:
            return (
                f"loaded version {version} under another root hash: it holds weights that were not published"
            )
        if known.merged and known.merged != merged:
            holds = merged.hex()[:16] or "says nothing of its sum"
            theirs = known.merged.hex()[:16]
            return f"merged the adapters of version {version} to other weights ({holds}) than its trainer ({theirs}): {ONE_RELEASE}"
        return ""

    def available(self, version: int) -> bool:
        """Whether the trainer, a disk or an engine can give out this version's bytes, and its base's."""
        known = self.versions.get(version)
        if known is None or not (known.sources or (known.manifest and self.directory.available(version))):
            return False
        return not known.base or self.base_of(known) is not None

    def drop_trainer(self, kept: int, *numbers: int) -> None:
        """A trainer serves its `kept` newest versions and bases. Who needs another one has it from a disk or an engine. `numbers`: look at
        these only."""
        bases = {version.base for version in self.versions.values()}
        dropped = sorted(v for v, known in self.versions.items() if known.root not in bases)[:-kept]
        for number in set(dropped).intersection(numbers or dropped):
            known = self.versions[number]
            known.sources = tuple(source for source in known.sources if source.endpoint.startswith("file:"))

    def base_of(self, version: Version) -> Version | None:
        """The version whose weights this one's adapters are merged with, the newest of equal ones; None where none can be had."""
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
class StepProgress:
    """Which step the run is at. Steps are numbers of its optimizer steps; times are Unix seconds."""

    newest: tuple[str, int] = ("train", 0)  # (purpose, step) that was submitted last
    submitted_at: float = 0.0
    samples: int = 0  # of the newest step: what the fleet is sized for
    finished_before: int = 0  # of them, those that were generated before the step began
    trained: Trained | None = None  # what the trainer last said of the step under way
    last_committed: int = 0
    resumed_after: int = 0  # the step of the checkpoint that this attempt began with


@dataclass(frozen=True, slots=True)
class ReservedMemory:
    """The GPU memory of a run's reserved engines, by name: which acknowledged that they sleep, and all others. Names are sorted."""

    order: int = 0  # number of the trainer's last word on whether they are to be awake
    asleep: tuple[str, ...] = ()
    holding: tuple[str, ...] = ()
    bytes_held: int = 0  # by those asleep


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A reserved engine that was given up for its silence, and the ids of the samples that it held."""

    attempt: int
    node: str
    samples: tuple[int, ...]


@dataclass(slots=True)
class ReservedEngines:
    """The engines on the trainer's own GPUs: whether they are to be awake, what memory they hold, who has which slot."""

    awake: bool = True  # what the trainer wants
    #: False: the daemon restarted, and the trainer has not said again whether they are to be awake.
    awake_stated: bool = True
    awake_since: float = 0.0  # when the trainer last changed `awake`, Unix seconds
    order: int = 0  # number of the trainer's last word on that
    trainer_bytes: int = (
        0  # of its GPUs' memory that the trainer held yet when it last had them woken, by its own word
    )
    counted_memory: ReservedMemory = field(default_factory=ReservedMemory)  # as counted last
    memory_changed: bool = True  # since then
    sessions: dict[str, str] = field(default_factory=dict)  # slot -> session that registered in it last
    #: Sessions that lost their slots: the newest of them.
    evicted: OrderedDict[str, None] = field(default_factory=OrderedDict)
    #: Name -> slot and session of an engine lost without a goodbye: it may hold memory still.
    unaccounted: dict[str, tuple[str, str]] = field(default_factory=dict)
    given_up: dict[str, GivenUp] = field(default_factory=dict)  # slot -> what its silent engine held
    #: Slot -> how many engines in it were set aside for disagreeing, within this attempt.
    set_aside: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class PolicyDecisions:
    """What the run's policy decided last, and how much of it may still be written to the ledger. Times: Unix seconds."""

    window: str = ""  # "open" | "close" | "" = the trainer's own rule decides
    window_reason: str = ""
    keep_open: bool = False  # beside "open": they generate on although every sample of the step has come
    ask_window_at: float = 0.0
    rebalanced_at: float = 0.0
    engines: int | None = None  # number of harvested engines, as written last
    #: How many samples an engine may hold for later steps' sake, and until when that serves.
    admission: Admission | None = None
    admit_again_at: float = 0.0
    budgets: dict[str, Budget] = field(default_factory=dict)  # kind of decision -> rows that may be written


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker is or was: the GPU of one that has left may be the wrong one. `node`: as its hello named it."""

    kind: str
    node: str
    slot: str
    intent_id: str
    incarnation: int
    job_id: int


@dataclass(slots=True)
class GuestStanding:
    """What a run knows of one guest's key (`guests`), since this daemon began or since the key was renewed."""

    public_key: str
    first_worker: int  # what an earlier one did was done under an earlier key
    failures: int = 0  # samples that it could not generate, or sent again and differently
    last_failure: str = ""
    refused: str = ""  # why its workers are refused; "": they are not


@dataclass(slots=True)
class Agreement:
    """How the run's engines agree with its trainer. Both tables keep the newest workers."""

    window: SpanWindow
    places: OrderedDict[int, Place] = field(default_factory=OrderedDict)  # by worker id
    suspects: OrderedDict[int, tuple[str, str]] = field(
        default_factory=OrderedDict
    )  # worker id -> node, reason


@dataclass(slots=True)
class Due:
    """What may be due since the run was settled last: `Router._do_what_is_due` reads it after an event, and clears it.

    flag             set when                                              by                              triggers
    fleet            a worker came, left, or fell silent, or its order     registration, workers,          orders to all idle workers,
                     changed; a version can be pulled, or no more          worker_commands, runs           placement, a new count
    samples          a sample took another status, a worker has loaded     Sample, worker_commands         orders to `idle_workers`,
                                                                                                           placement
    recount          a worker has loaded                                   worker_commands                 sizes corrected
    ask              a step was submitted, reserved engines were           steps, runs                     rebalancing and the window asked
                     told to sleep or to wake                                                              of the policy
    changed_workers  a worker was given an order or has loaded it          worker_commands                 sizes corrected for these alone,
                                                                                                           serving workers found again
    idle_workers     a worker's last lease ended                           samples                         orders to these alone
    """

    fleet: bool = True
    samples: bool = True
    recount: bool = True
    ask: bool = True
    changed_workers: list[Worker] = field(default_factory=list)
    idle_workers: list[Worker] = field(default_factory=list)


@dataclass(slots=True)
class FleetCache:
    """Facts about the run's workers as computed last, so that an event need not visit them all."""

    serving: tuple[int, list[Worker]] | None = None  # a version and the workers that serve it
    target: int = -1  # the version that idle workers were last asked for
    sizes: tuple[int, int, int] = (0, 0, 0)  # `worker_counts.fleet_sizes`


@dataclass(slots=True)
class ActiveRun:
    """A run of a trainer over all its attempts, with everything in flight for it."""

    id: int
    name: str
    owner_key: str
    seed: int
    engine: EngineSpec
    attempt: int = 0
    settings: RunSettings = field(default_factory=RunSettings)
    policy: RouterPolicy = field(default_factory=Standard)
    trainer: TrainerLink = field(default_factory=TrainerLink)
    weights: PublishedWeights = field(default_factory=PublishedWeights)
    progress: StepProgress = field(default_factory=StepProgress)
    speculated: Speculated = NOT_SPECULATED  # by all its engines since this daemon began, by their word
    kv: KvMoves = field(default_factory=KvMoves)
    siblings_sent: int = 0  # siblings' tokens sent to engines for drafts, since this daemon began
    #: (purpose, step, prompt index) -> the group in flight.
    by_key: dict[tuple[str, int, int], Group] = field(default_factory=dict)
    #: The same key -> the next retry's number, where a group was superseded.
    retries: dict[tuple[str, int, int], int] = field(default_factory=dict)
    queue: Queue = field(default_factory=Queue)
    turns: RunTurns = field(default_factory=RunTurns)
    deliveries: RunDeliveries = field(default_factory=RunDeliveries)
    leased: dict[int, int] = field(default_factory=dict)  # weight version -> open leases that name it
    workers: dict[int, Worker] = field(default_factory=dict)
    reserved: ReservedEngines = field(default_factory=ReservedEngines)
    #: Sample -> (worker that loads newer weights and has its KV cache, since when it is waited for): see `returns`.
    returning: dict[int, tuple[int, float]] = field(default_factory=dict)
    decisions: PolicyDecisions = field(default_factory=PolicyDecisions)
    agreement: Agreement = field(default_factory=lambda: Agreement(SpanWindow(DEFAULT_RULES)))
    guests: dict[str, GuestStanding] = field(
        default_factory=dict
    )  # by intent; no more than the admin invited, and slots are lent
    due: Due = field(default_factory=Due)
    cached: FleetCache = field(default_factory=FleetCache)
    stopped: str = ""  # why it cannot go on; empty: it can
    stop_remedy: str = ""
    ended: bool = False

    def count_lease(self, group: Group, version: int, more: int) -> None:
        """So many more leases of the group, which name this version, are open."""
        for counts in (self.leased,) if group.turn is None else (self.leased, self.turns.leased):
            counts[version] = counts.get(version, 0) + more
            if not counts[version]:
                del counts[version]

    def failed_beside(self, worker: Worker, reason: str) -> None:
        """A sample failed on an engine beside a service: counted against its key, which `guests` judges."""
        standing = self.guests.setdefault(worker.process.intent_id, GuestStanding("", 0))
        standing.failures, standing.last_failure = standing.failures + 1, reason


# ---------------------------------------------------------------- worker


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """Which process a worker is, by its key and its hello."""

    intent_id: str  # of the harvested job; empty for a reserved engine
    session: str
    incarnation: int  # of the harvested job: Slurm may start it again
    job_id: int  # Slurm's
    cluster: str = ""  # by its key; "" = the daemon's own


@dataclass(slots=True)
class WorkerWeights:
    """Which version a worker has loaded, which it was asked to load, and whom it may pull it from. Times: Unix seconds."""

    loaded: int = -1  # -1: none that is proved
    asked: int = -1
    asked_at: float = 0.0
    loads: int = 0  # versions that it ever loaded
    first_at: float = 0.0  # when this daemon heard that it had loaded its first; 0: not yet
    failures: int = 0  # loads that failed since the last that did not
    offered: tuple[int, ...] = ()  # revision of the directory that its sources were chosen from
    offered_at: float = 0.0
    #: Version that it was asked to pull beside its work; -1: none since its last load, or it did not come.
    ahead: int = -1
    ahead_after: int = 0  # heartbeat acks that it had been sent when it was asked
    ahead_at: float = 0.0  # when it was asked
    ahead_failed_at: float = 0.0  # when it was found that one did not come
    switches: bool = False  # it gives its leases back, or takes no other turn, to load other weights at once
    pause_s: float = (
        0.0  # between the last token under one version and the first under the next, by its own word
    )
    serving_refused: str = ""  # why its offer to serve weights was refused, as written to the ledger last


@dataclass(slots=True)
class WorkerMemory:
    """What a worker does with its GPUs' memory: the orders it was sent, and what it acknowledged."""

    state: GpuMemoryState = GpuMemoryState.AWAKE  # changed by `Worker.transition_memory` only
    order: int = 0  # number of the last order to sleep or wake
    sleep_ordered_at: float = 0.0  # Unix seconds
    bytes_held: int = 0  # as it last said
    wake_s: float = 0.0  # seconds that it last took to wake, by its own word


@dataclass(slots=True)
class EngineMetrics:
    """What the engine inside a worker does and can do."""

    tokens_per_s: float = 0.0  # measured between its last two heartbeats
    turn_token_s: float = 0.0  # of the turns that ended here of late, seconds a token; 0 = not known
    progress: int = 0  # its own counter of engine steps, in its last heartbeat
    moved_at: float = 0.0  # when it was last seen to do anything, Unix seconds
    cache_tokens: int = 0  # size of its KV cache, by its own word; 0 = unknown
    best_batch: int = 0  # samples at which it is fastest, by its own word; 0 = unknown
    lease_limit: int | None = (
        None  # leases that its host lets it have, by its own word; None: it is not bounded
    )
    entered: int = 0  # tokens that went into its KV cache, by what it was leased and generated
    speculated: Speculated | None = (
        NOT_SPECULATED  # in its last heartbeat; None: it is of before this daemon began
    )


@dataclass(slots=True)
class HeartbeatState:
    """The heartbeats of a worker: when the last one came, and what happened since."""

    at: float = 0.0  # Unix seconds
    acks: int = 0  # acks sent to it: their numbers order what else it was sent
    leases_changed: bool = True  # whether a lease came or went since
    batch: int = 0  # its leases when the last one came


@dataclass(slots=True)
class Departure:
    """Why a worker leaves, and whether Slurm gave it notice. `hands_to`: the public key with which its process goes on for another run."""

    reason: str = ""
    notice: bool = False
    hands_to: str = ""


@dataclass(frozen=True, slots=True)
class SampleYield:
    """A lease that its worker was asked to yield, and for whom (0: for the queue)."""

    epoch: int
    to_worker: int
    reason: str
    at: float


@dataclass(slots=True)
class Worker:
    """A process with an engine in it, as the router knows it. Times: Unix seconds."""

    id: int
    run: ActiveRun
    kind: str  # "harvested" | "reserved"
    node: str
    gpus: int
    process: WorkerProcess
    conn: int | None
    last_seen: float
    slot: str = ""  # a reserved engine's, as its trainer names it
    joined_at: float = 0.0
    attempt: int = 0  # of the run, when the worker registered last; 0: before the daemon restarted
    status: WorkerStatus = WorkerStatus.NEW  # changed by `step` only
    suspect: bool = False
    leases: dict[int, Sample] = field(default_factory=dict)
    yielding: dict[int, SampleYield] = field(default_factory=dict)  # sample id -> what it was asked to yield
    idle_since: float = 0.0
    refused_chunks: int = 0
    weights: WorkerWeights = field(default_factory=WorkerWeights)
    memory: WorkerMemory = field(default_factory=WorkerMemory)
    engine: EngineMetrics = field(default_factory=EngineMetrics)
    heartbeat: HeartbeatState = field(default_factory=HeartbeatState)
    departure: Departure = field(default_factory=Departure)
    loan: LendSlots = NO_LOAN  # of slots of its engine to another run, as it was last told
    #: The borrower's public key, as the last heartbeat had it, or the order that a newer one took the place of.
    lends: str = ""
    backlog: SiblingBacklog = field(default_factory=SiblingBacklog)  # of tokens for drafts: see `siblings`
    cached_slots: Slots | None = None  # how policies see its leases, until one comes or goes
    counted_as: int = -1  # index in its run's `cached.sizes`; -1 = not counted

    @property
    def place(self) -> str:
        """Its node, told from one of the same name on another cluster."""
        cluster = self.process.cluster
        return f"{cluster}/{self.node}" if cluster else self.node

    @property
    def bounded(self) -> bool:
        """Whether it lives beside a service that may take its memory at any moment, by its key or by its own word."""
        return self.engine.lease_limit is not None or self.process.intent_id.startswith(GUEST_INTENT)

    @property
    def most_leases(self) -> int:
        """That it may hold: what its run's engines take, and no more than its host leaves it."""
        most = self.run.engine.max_batch
        return most if self.engine.lease_limit is None else min(most, self.engine.lease_limit)

    @property
    def cache_era(self) -> tuple[int, int]:
        """Another one than before: its KV cache was emptied since, by other weights or by sleep."""
        return self.weights.loads, self.memory.order

    def leases_altered(self) -> None:
        """A lease of it came or went."""
        self.heartbeat.leases_changed = True
        self.cached_slots = None

    def transition(self, step: WorkerStep) -> None:
        """Take one legal step, or raise and change nothing."""
        target = WORKER_TRANSITIONS[self.status].get(step)
        if target is None:
            raise IllegalTransition(f"worker {self.id} is {self.status} and cannot {step}")
        self.status = target

    def transition_memory(self, step: MemoryStep) -> None:
        """Take one legal step, or raise and change nothing."""
        target = MEMORY_TRANSITIONS[self.memory.state].get(step)
        if target is None:
            raise IllegalTransition(f"worker {self.id}'s memory is {self.memory.state} and cannot {step}")
        self.memory.state = target
        self.run.reserved.memory_changed = True


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """What the core needs of the daemon's configuration: seconds, milliseconds (`flush_ms`) and tokens, as their names say."""

    heartbeat_s: float = 1.0
    suspect_s: float = 4.0
    dead_s: float = 12.0
    reconnect_s: float = 15.0
    flush_ms: float = 100.0
    flush_tokens: int = 32
    trainer_silent_s: float = 60.0
    trainer_gone_s: float = 600.0
    stalled_s: float = 300.0
    vllm_options: tuple[str, ...] = ()
    disagreement: str = "set-aside"  # "set-aside" | "report" | "off"
    agreement: AgreementRules = DEFAULT_RULES
    max_nodes_per_engine: int = 1
    sibling_bytes_per_s: float = 0.0  # to each engine, for its drafts (`siblings`); 0: none are sent
    share_prompts: bool = False  # new samples of one prompt go to one engine (`policy.sharing`)

    @classmethod
    def of(cls, config: DaemonConfig) -> RouterLimits:
        """The limits that the daemon's configuration names."""
        daemon, router = config.daemon, config.router
        return cls(
            daemon.heartbeat_s,
            daemon.suspect_s,
            daemon.dead_s,
            daemon.reconnect_s,
            daemon.flush_ms,
            daemon.flush_tokens,
            daemon.trainer_silent_s,
            daemon.trainer_gone_s,
            daemon.engine_stalled_s,
            config.harvest.vllm_options,
            router.disagreement,
            AgreementRules(samples=router.disagreement_samples, ratio=router.disagreement_ratio),
            config.harvest.max_nodes_per_engine,
            router.sibling_bytes_per_s,
            router.share_prompts,
        )
