"""What a run's samples, engines and window are decided by: the questions, what may be known, and today's answers. Pure.

    policy_driver.py  --RunView-->  place / rebalance / window / engines  --answers with reasons-->  leases, moves, Fleet, Demand
                      --Fact----->  observe                               (what a policy may learn from)

Views and facts hold what a live daemon knows: lengths so far, never a length to come; rates that were measured, never an engine's
parameters. Owns the vocabulary. Decides nothing but `Standard`, the default, which learns nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from scavenger.policy import placement
from scavenger.policy.admission import Pace
from scavenger.policy.fleet_size import Benefit
from scavenger.policy.placement import QueuedSamples, Slots

# ---------------------------------------------------------------- what may be known


class PolicyView(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Base of the views: immutable, and made by the thousand."""


class SampleView(PolicyView, frozen=True):
    """A sample of the run that is not consumed. Lengths are in tokens of the completion.

    `accepted`: what the core has; `length`: what was last reported, never less. `worker_id`: the lease's holder, 0 = it waits or is done.
    `lease_offset`: the length with which the present lease began.
    `moving`: its holder was asked to give it back. `cap`: the most it may have. `avoid`: nodes where engines failed on it.
    """

    id: int
    group_id: int
    index: int
    prompt_tokens: int
    cap: int
    accepted: int = 0
    length: int = 0
    worker_id: int = 0
    leased_at: float = 0.0
    lease_offset: int = 0
    moving: bool = False
    moves: int = 0
    done: bool = False
    avoid: frozenset[str] = frozenset()


class WorkerView(PolicyView, frozen=True):
    """One engine of the run. `serves`: it may take leases of the version wanted now. `status`: the router's own word for it.

    `leases` of at most `max_batch`. `tokens_per_s`: over its last heartbeats, all samples together; 0 = not measured. Times in Unix s;
    `idle_since` counts only while it has no lease. `warm`: it has had weights, so the next are soon there.
    `beat_at`: of its last heartbeat. `ahead`: leases of later steps, which `leases` leaves out.
    As it said itself, 0 = it did not: `cache_tokens` of all its
    samples together fit its KV cache; with more than `best_batch` samples it makes no more tokens a second.
    `bounded`: it lives beside a service that may take its memory at any moment. It generates, and nothing may be built upon it.
    """

    id: int
    kind: str  # "reserved" | "harvested"
    node: str
    gpus: int
    status: str
    serves: bool
    leases: int
    max_batch: int
    joined_at: float = 0.0
    idle_since: float = 0.0
    tokens_per_s: float = 0.0
    warm: bool = True
    beat_at: float = 0.0
    cache_tokens: int = 0
    best_batch: int = 0
    ahead: int = 0
    bounded: bool = False

    @property
    def harvested(self) -> bool:
        """Whether it is one of the run's harvested engines: reserved ones may sleep for it, and the fleet is sized by it."""
        return self.kind != "reserved" and not self.bounded


class StepView(PolicyView, frozen=True):
    """The newest step that was submitted, and the window. `step` 0: none yet. Counts are of samples and groups.

    `delivered`: groups that its trainer was sent. `reserved_awake`: what the trainer last asked for, since `window_since`.
    `decided`: what the policy last said of the window: "open", "close" or "" (nothing). With steps in advance it is the step that the
    trainer works at; `ahead`: samples of later steps that are not done; `before`: of the step, those that were done when it began.
    `max_off_policy_steps`: how many steps are generated in advance at most.
    """

    step: int = 0
    purpose: str = "train"
    version: int = -1
    submitted_at: float = 0.0
    samples: int = 0
    finished: int = 0
    groups: int = 0
    delivered: int = 0
    reserved_awake: bool = True
    window_since: float = 0.0
    decided: str = ""
    ahead: int = 0
    before: int = 0
    max_off_policy_steps: int = 0


class RunView(Protocol):
    """A run as its daemon knows it. In order of ids, but `queued` as `placement.priority` has it. Sequences are made when asked for."""

    @property
    def name(self) -> str: ...

    @property
    def step(self) -> StepView: ...

    @property
    def samples(self) -> Sequence[SampleView]:
        """All samples that no step has consumed yet, the done ones included. With steps in advance: of what the trainer works at."""

    @property
    def next_samples(self) -> Sequence[SampleView]:
        """Of the step after it, where steps are generated in advance; the done ones included."""

    @property
    def queued(self) -> Sequence[SampleView]:
        """Samples that wait for the version that is served now: what `place` may place."""

    @property
    def workers(self) -> Sequence[WorkerView]: ...

    @property
    def harvest(self) -> bool:
        """Whether the run may have harvested engines at all."""

    @property
    def max_engines(self) -> int: ...

    @property
    def max_batch(self) -> int:
        """Leases that one engine may hold."""

    @property
    def waits(self) -> int:
        """Samples that wait for any version."""

    @property
    def came(self) -> object:
        """While it stays equal no sample is in `queued` that was not before."""

    def is_waiting(self, sample_id: int) -> bool:
        """Whether a sample is in `queued`."""

    def waiting(self) -> Iterator[QueuedSamples]:
        """`queued` in short, for who needs no more: costs nothing until it is read."""

    def slots(self) -> Sequence[Slots]:
        """Workers that serve, in short."""


# ---------------------------------------------------------------- what may be learned from


class SampleFinished(msgspec.Struct, frozen=True, gc=False):
    """A sample has its last token. `seconds`: since its lease began; `capped`: it ended at its budget."""

    sample_id: int
    group_id: int
    step: int
    length: int
    prompt_tokens: int
    capped: bool
    worker_id: int
    kind: str
    node: str


class EngineProgress(msgspec.Struct, frozen=True, gc=False):
    """Between two heartbeats an engine ran the same `batch` samples throughout, and generated `tokens` for them in `seconds`. With steps
    in advance some came and went: `batch` is how many there were, on average, and `tokens` what they made at the pace of those that stayed.

    `context`: tokens of prompts and completions that they had together, on average over that time.
    """

    worker_id: int
    kind: str
    node: str
    gpus: int
    batch: int
    context: float
    tokens: int
    seconds: float
    bounded: bool = False  # here and below as in `WorkerView`: such an engine says nothing of the others


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """An engine registered: its weights come next."""

    worker_id: int
    kind: str
    node: str
    gpus: int
    bounded: bool = False


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """An engine loaded `version`. `start_s`: since it registered, where this is its first; `pull_s`, `load_s` as it measured them."""

    worker_id: int
    kind: str
    node: str
    gpus: int
    version: int
    first: bool
    start_s: float
    pull_s: float
    load_s: float
    bounded: bool = False


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """An engine is gone, with `samples` that it held. `life_s`: since it registered. `preempted`: another job took its GPUs; else it
    drained, or it failed."""

    worker_id: int
    kind: str
    node: str
    gpus: int
    life_s: float
    preempted: bool
    reason: str
    samples: int = 0
    bounded: bool = False


@dataclass(frozen=True, slots=True)
class StepSubmitted:
    """A step's groups were asked for, or one that was asked for in advance begins. `cap`: the most tokens that a completion may have; 0:
    not known. `finished`: of the samples, those that were generated in advance."""

    step: int
    purpose: str
    samples: int
    groups: int
    cap: int = 0
    finished: int = 0


@dataclass(frozen=True, slots=True)
class StepFinished:
    """The trainer committed a step. `metrics` are its own figures: `seconds`, `seconds_wait`, `seconds_train`, `tokens`, …"""

    step: int
    purpose: str
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class WindowMoved:
    """The trainer woke the reserved engines, or put them to sleep."""

    awake: bool


@dataclass(frozen=True, slots=True)
class Toggled:
    """A reserved engine fell asleep (its GPU is the trainer's), or woke: seconds from being told until it was so."""

    worker_id: int
    awake: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class TrainedGroups:
    """So far the trainer took in these whole groups of the step under way: their tokens, prompts included, and what they cost it.

    `scored`: whole groups that have their rewards, -1 = it does not say; `reward_s`: seconds from a group's arrival to its rewards.
    """

    step: int
    groups: int
    tokens: int
    seconds: float
    scored: int = -1
    reward_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EnginesAsked:
    """The policy of the daemon before this one aimed at so many harvested engines when that ended: a restart alone changes nothing."""

    engines: int


Fact = (
    SampleFinished
    | EngineProgress
    | WorkerJoined
    | WorkerReady
    | WorkerLost
    | StepSubmitted
    | StepFinished
    | WindowMoved
    | Toggled
    | TrainedGroups
    | EnginesAsked
)

# ---------------------------------------------------------------- answers


class SamplePlacement(NamedTuple):
    """Lease a queued sample to a worker."""

    sample_id: int
    worker_id: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SampleMove:
    """Take a sample from a worker that generates it and give it to another (0: to the queue). `merges`: so that its engine may go.

    `gain_s`: by how much sooner the later of the two is done. `whole`: why all moves of this answer together.
    """

    sample_id: int
    from_worker: int
    to_worker: int
    reason: str
    merges: bool = False
    gain_s: float = 0.0
    whole: str = ""


@dataclass(frozen=True, slots=True)
class WindowDecision:
    """Whether reserved engines stop generating and train. `again_at`: when to ask again at the latest, if nothing else changes (Unix s).

    `keep_open`: those that generate go on although every sample of the step has come, for the next step; not where `close` is.
    `inputs`: what it was reckoned with, for the record.
    """

    close: bool
    reason: str
    again_at: float = math.inf
    inputs: Mapping[str, float] = field(default_factory=dict)
    keep_open: bool = False


class RouterPolicy(Protocol):
    """What decides for one run. Asked after events that may change an answer, never at a mere chunk; equal views get equal answers.

    `every_s`: how often `rebalance` is asked while nothing but time passes. An answer that cannot be followed any more (the sample is
    done, the worker is full or gone) is dropped: it is asked again.
    """

    @property
    def every_s(self) -> float: ...

    def place(self, view: RunView, now: float) -> Sequence[SamplePlacement]:
        """Which queued samples go where. What is left out waits until it is asked again."""

    def rebalance(self, view: RunView, now: float) -> Sequence[SampleMove]:
        """Leases to take from one worker and give to another."""

    def window(self, view: RunView, now: float) -> WindowDecision | None:
        """Whether reserved engines go on generating. None: the trainer's own rule decides."""

    def engines(self, view: RunView, now: float) -> tuple[int, str]:
        """How many harvested engines the run could use, and why."""

    def observe(self, fact: Fact, now: float) -> None:
        """Something happened that may be learned from."""


@runtime_checkable
class Weighs(Protocol):
    """A policy that also says what an engine is worth, for the harvester to weigh its start by."""

    def benefit(self) -> Benefit | None:
        """Of one more engine than `engines` answered last; None while nothing is known."""


@runtime_checkable
class Paces(Protocol):
    """A policy that forecasts what a step takes, for samples of later steps to begin at the pace at which they will be trained."""

    def pace(self, view: RunView) -> Pace | None:
        """None while nothing is known."""


#: What an answer was reckoned with, for the record.
Inputs = Mapping[str, float | str]


@runtime_checkable
class Explains(Protocol):
    """A policy that says what its answers were reckoned with. Asked right after an answer, and only where a row of the ledger has room."""

    def placed_by(self, answers: Sequence[SamplePlacement]) -> Inputs: ...

    def moved_by(self, moves: Sequence[SampleMove]) -> Inputs: ...

    def sized_by(self) -> Inputs: ...


NewPolicy = Callable[[str], RouterPolicy]  # of the run with this name


class Standard:
    """The evenly filled fleet: `placement.place`, no moves, and the trainer's own window."""

    every_s = math.inf

    def place(self, view: RunView, now: float) -> Sequence[SamplePlacement]:
        return [
            SamplePlacement(sample_id, worker_id)
            for sample_id, worker_id in placement.place(view.waiting(), view.slots())
        ]

    def rebalance(self, view: RunView, now: float) -> Sequence[SampleMove]:
        return ()

    def window(self, view: RunView, now: float) -> WindowDecision | None:
        return None

    def engines(self, view: RunView, now: float) -> tuple[int, str]:
        # Below a quarter of its slots an engine's decode step costs almost as much as a full one: more engines would not help.
        samples = view.step.samples
        useful = -(-max(samples, view.waits) // max(1, view.max_batch // 4))
        engines = min(view.max_engines, useful)
        return (
            engines,
            f"{samples} samples a step can use {useful} engines, run.max_engines = {view.max_engines}",
        )

    def observe(self, fact: Fact, now: float) -> None:
        pass
