"""The policies that `scavenger simulate` compares, and what a policy may do in simulation.

    colocated       all generation on the reserved GPUs, then training, as veRL does; no harvested engines
    disaggregated   reserved GPUs only train, harvested engines only generate, each with an even share of the samples
    ours            the controllers of the live daemon, as they are (`policy.predictive.policy`)

Knows nothing of any scenario. The published systems that we compare ourselves with are in `benchmarks/baselines`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scavenger.policy import placement
from scavenger.policy.interface import (
    Fact,
    RouterPolicy,
    RunView,
    SampleFinished,
    SamplePlacement,
    Standard,
    StepSubmitted,
    WindowMoved,
    WorkerJoined,
    WorkerLost,
    WorkerReady,
)
from scavenger.policy.placement import Slots
from scavenger.policy.predictive.policy import Predictive
from scavenger.policy.predictive.settings import PredictiveSettings


@dataclass(frozen=True, slots=True)
class SimulatedPolicy:
    """A policy with what it may do. `new_policy` makes one for each simulation: it learns from nothing but what it is told.

    `harvest`: it uses harvested engines at all; `reserved`: reserved GPUs generate too. `window`: the trainer's own rule where the policy
    decides nothing, a share of samples. `whole_groups`: engines serve a group as one request, whose completions are only handed over when
    all are done, and which moves as one, cut to its shortest completion (PolyRL). `sleeps`: while the window is open the trainer takes
    nothing in.

    `start_benefits`: its engines are asked for through our harvester as it runs live, which starts none on a GPU that is not worth it, and
    chooses nodes (`site_cluster`). Ours, its ablations, and what is named "our harvest". The published systems take instances as they
    come. So does the clairvoyant one: it asks for all that it may have, for what an engine costs is not its objective, and no start-benefit
    check makes a step shorter.
    """

    name: str
    new_policy: Callable[[], RouterPolicy]
    harvest: bool = True
    reserved: bool = True
    window: float = 0.0
    whole_groups: bool = False
    sleeps: bool = False
    start_benefits: bool = False


# ---------------------------------------------------------------- colocated


class StaticSplit(Standard):
    """veRL's dispatch: the batch is cut into consecutive parts of whole groups, one an engine; nothing moves.

    Group i of G goes to engine floor(i * N / G) of N.
    """

    def place(self, view: RunView, now: float) -> Sequence[SamplePlacement]:
        engines = [worker for worker in view.workers if worker.kind == "reserved"]
        rank = {
            group: index for index, group in enumerate(sorted({sample.group_id for sample in view.samples}))
        }
        free = {worker.id: worker.max_batch - worker.leases for worker in engines if worker.serves}
        found = []
        for sample in view.queued:
            engine = engines[rank[sample.group_id] * len(engines) // len(rank)]
            if free.get(engine.id, 0) > 0:
                free[engine.id] -= 1
                found.append(SamplePlacement(sample.id, engine.id))
        return found


COLOCATED = SimulatedPolicy("colocated", StaticSplit, harvest=False, reserved=True)


# ---------------------------------------------------------------- disaggregated


#: Engines that generate, or will as soon as their weights are there.
COMING = ("loading", "ready")


def even_share(view: RunView) -> int:
    """`EvenShare` from one view: for who asks seldom."""
    coming = [worker.warm for worker in view.workers if worker.status in COMING]
    return -(-(view.step.samples - view.step.finished) // max(1, sum(coming) or len(coming)))


class EvenShare:
    """Unfinished samples an engine: over those that generate or load the next weights; over cold ones too while there are no others.

    Counted from facts alone, so that asking costs nothing.
    """

    def __init__(self) -> None:
        self._left = 0
        self._cold: set[int] = set()
        self._warm: dict[str, set[int]] = {"reserved": set(), "harvested": set()}
        self._awake = True

    def observe(self, fact: Fact) -> None:
        match fact:
            case SampleFinished():
                self._left -= 1
            case StepSubmitted(samples=samples):
                self._left = samples
            case WindowMoved(awake=awake):
                self._awake = awake
            case WorkerJoined(worker_id=worker_id):
                self._cold.add(worker_id)
            case WorkerReady(worker_id=worker_id, kind=kind):
                self._cold.discard(worker_id)
                self._warm[kind].add(worker_id)
            case WorkerLost(worker_id=worker_id, kind=kind):
                self._cold.discard(worker_id)
                self._warm[kind].discard(worker_id)

    @property
    def each(self) -> int:
        warm = len(self._warm["harvested"]) + self._awake * len(self._warm["reserved"])
        return -(-max(1, self._left) // max(1, warm or len(self._cold)))


class Even(Standard):
    """Places by `placement.place`, but no engine gets more than its share of the step's unfinished samples."""

    def __init__(self) -> None:
        self._share = EvenShare()

    def place(self, view: RunView, now: float) -> Sequence[SamplePlacement]:
        share = self._share.each
        slots = [
            Slots(one.worker_id, one.leases, min(one.max_batch, share), one.node) for one in view.slots()
        ]
        return [
            SamplePlacement(sample_id, worker_id)
            for sample_id, worker_id in placement.place(view.waiting(), slots)
        ]

    def observe(self, fact: Fact, now: float) -> None:
        self._share.observe(fact)


DISAGGREGATED = SimulatedPolicy("disaggregated", Even, harvest=True, reserved=False)


# ---------------------------------------------------------------- ours


_ALL_ON = PredictiveSettings()
#: A run's own rule where no policy decides its window: `reserved.window` in run.toml, as it is by default.
LIVE_WINDOW = 0.5


def predictive(settings: PredictiveSettings = _ALL_ON) -> RouterPolicy:
    return Predictive("run", settings)


def ours(
    settings: PredictiveSettings = _ALL_ON, name: str = "ours", *, start_benefits: bool = True
) -> SimulatedPolicy:
    return SimulatedPolicy(
        name, functools.partial(predictive, settings), window=LIVE_WINDOW, start_benefits=start_benefits
    )


OURS = ours()

SIMULATED_POLICIES: Mapping[str, SimulatedPolicy] = {
    one.name: one for one in (COLOCATED, DISAGGREGATED, OURS)
}
