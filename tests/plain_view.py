"""A policy's view of a run, made of given parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from scavenger.policy.interface import SampleView, StepView, WorkerView
from scavenger.policy.placement import QueuedSamples, Slots


@dataclass(frozen=True, slots=True)
class PlainView:
    """`samples`, `queued` and `workers` as a daemon would have them; what else a view says follows from these."""

    name: str = "r"
    step: StepView = field(default_factory=StepView)
    samples: Sequence[SampleView] = ()
    queued: Sequence[SampleView] = ()
    workers: Sequence[WorkerView] = ()
    harvest: bool = True
    max_engines: int = 64
    max_batch: int = 64
    next_samples: Sequence[SampleView] = ()

    @property
    def waits(self) -> int:
        return len(self.queued)

    @property
    def came(self) -> object:
        return frozenset(sample.id for sample in self.queued)

    def is_waiting(self, sample_id: int) -> bool:
        return any(sample.id == sample_id for sample in self.queued)

    def waiting(self) -> Iterator[QueuedSamples]:
        return (QueuedSamples(sample.id, sample.avoid) for sample in self.queued)

    def slots(self) -> Sequence[Slots]:
        return [Slots(w.id, w.leases, w.max_batch, w.node) for w in self.workers if w.serves]
