"""A run as its policy may see it, made from the core's tables. Pure; reads them, and changes nothing.

Made when asked for: a policy that looks at one thing does not pay for the others. A view is good for the one call that it was made for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from scavenger.router import samples as sm
from scavenger.router.placement import Slots, Waiting
from scavenger.router.policy import SampleView, StepView, WorkerView
from scavenger.router.state import Core, Run, Sample, SampleStatus, Worker

#: Since this protocol a worker gives a lease back when asked, with all that it generated.
YIELDS = 3


class LiveView:
    """A `policy.RunView` of the present moment."""

    def __init__(self, core: Core, run: Run) -> None:
        self._core, self._run = core, run

    @property
    def name(self) -> str:
        return self._run.name

    @property
    def harvest(self) -> bool:
        return self._run.harvest

    @property
    def max_engines(self) -> int:
        return self._run.max_engines

    @property
    def max_batch(self) -> int:
        return self._run.engine.max_batch

    @property
    def waits(self) -> int:
        return len(self._run.queue)

    @cached_property
    def version(self) -> int:
        return sm.target_version(self._run)

    @cached_property
    def step(self) -> StepView:
        run = self._run
        mine = [g for g in run.by_key.values() if (g.purpose, g.step) == run.newest and not g.orphaned]
        samples = sum(len(g.samples) for g in mine)
        return StepView(
            step=run.newest[1],
            purpose=run.newest[0],
            version=mine[0].version if mine else -1,
            submitted_at=run.submitted_at,
            samples=run.step_samples,
            finished=samples - sum(g.unfinished for g in mine),
            groups=len(mine),
            delivered=sum(g.delivered_to == run.attempt for g in mine),
            reserved_awake=run.reserved_awake,
            window_since=run.window_since,
            decided=run.window,
        )

    @cached_property
    def samples(self) -> Sequence[SampleView]:
        groups = sorted(self._run.by_key.values(), key=lambda group: group.id)
        return [
            _sample(sample)
            for group in groups
            if not group.orphaned
            for sample in group.samples
            if sample.status is not SampleStatus.ENDED
        ]

    @cached_property
    def queued(self) -> Sequence[SampleView]:
        return [_sample(sample) for sample in self._run.queue.waiting(self.version)]

    @cached_property
    def workers(self) -> Sequence[WorkerView]:
        return [self._worker(worker) for _, worker in sorted(self._run.workers.items())]

    def waiting(self) -> Iterator[Waiting]:
        return (Waiting(s.id, s.failed_nodes) for s in self._run.queue.waiting(self.version))

    def slots(self) -> Sequence[Slots]:
        return self._slots

    @cached_property
    def _slots(self) -> Sequence[Slots]:
        most = self.max_batch
        version = self.version
        return [Slots(w.id, len(w.leases), most, w.node) for w in self._run.workers.values() if sm.servable(w, version)]

    def _worker(self, worker: Worker) -> WorkerView:
        return WorkerView(
            id=worker.id,
            kind=worker.kind,
            node=worker.node,
            gpus=worker.gpus,
            status=worker.status.value,
            serves=sm.servable(worker, self.version),
            leases=len(worker.leases),
            max_batch=self.max_batch,
            joined_at=worker.joined_at,
            idle_since=worker.idle_since,
            tokens_per_s=worker.tokens_per_s,
            warm=worker.loads > 0,
            beat_at=worker.beat_at,
            yields=worker.protocol >= YIELDS,
            cache_tokens=worker.cache_tokens,
            best_batch=worker.best_batch,
        )


def _sample(sample: Sample) -> SampleView:
    group = sample.group
    holder = group.run.workers.get(sample.worker_id)
    return SampleView(
        id=sample.id,
        group_id=group.id,
        index=sample.index,
        prompt_tokens=len(group.prompt) // 4,
        cap=group.sampling.max_tokens,
        accepted=sample.accepted,
        length=max(sample.accepted, min(sample.reported, group.sampling.max_tokens)),
        worker_id=sample.worker_id,
        leased_at=sample.leased_at,
        lease_offset=sample.lease_offset,
        limit=sample.limit,
        moving=holder is not None and sample.id in holder.yielding,
        moves=sample.moves,
        done=sample.done,
        avoid=sample.failed_nodes,
    )
