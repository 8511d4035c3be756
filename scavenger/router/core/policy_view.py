"""A run as its policy may see it, made from the core's tables. Pure; reads them, and changes nothing.

Each part is computed when the policy first reads it. A view is valid for the one call that it was made for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from scavenger.policy.interface import SampleView, StepView, WorkerView
from scavenger.policy.placement import QueuedSamples, Slots
from scavenger.router.core import samples, staleness
from scavenger.router.core.state import ActiveRun, Group, Sample, Worker
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import SampleStatus


class LiveView:
    """A `policy.interface.RunView` of the present moment."""

    def __init__(self, core: Core, run: ActiveRun) -> None:
        self._core, self._run = core, run

    @property
    def name(self) -> str:
        return self._run.name

    @property
    def harvest(self) -> bool:
        return self._run.settings.harvest

    @property
    def max_engines(self) -> int:
        return self._run.settings.max_engines

    @property
    def max_batch(self) -> int:
        return self._run.engine.max_batch

    @property
    def waits(self) -> int:
        """Of what the trainer works at."""
        run = self._run
        if not run.settings.max_off_policy_steps:
            return len(run.queue)
        return sum(staleness.is_now(run, one.group) for one in run.queue if one.id not in run.returning)

    @cached_property
    def version(self) -> int:
        return samples.queued_version(self._run)

    @cached_property
    def step(self) -> StepView:
        run = self._run
        purpose, step = run.progress.newest
        version = -1
        groups = finished = delivered = 0
        for group in run.by_key.values():
            if group.step != step or group.purpose != purpose or group.orphaned:
                continue
            if not groups:
                version = group.version
            groups += 1
            finished += len(group.samples) - group.unfinished
            delivered += group.delivered_to == run.attempt
        return StepView(
            step=step,
            purpose=purpose,
            version=version,
            submitted_at=run.progress.submitted_at,
            samples=run.progress.samples,
            finished=finished,
            groups=groups,
            delivered=delivered,
            reserved_awake=run.reserved.awake,
            window_since=run.reserved.awake_since,
            decided=run.decisions.window,
            before=run.progress.finished_before,
            max_off_policy_steps=run.settings.max_off_policy_steps,
            ahead=self._ahead(step) if run.settings.max_off_policy_steps else 0,
        )

    def _ahead(self, step: int) -> int:
        groups = self._run.by_key.values()
        return sum(g.unfinished for g in groups if g.purpose == "train" and g.step > step and not g.orphaned)

    @cached_property
    def samples(self) -> Sequence[SampleView]:
        """Of what the trainer works at; samples of later steps get the slots that these leave (`admit`)."""
        groups = self._run.by_key.values()
        return _views(g for g in groups if not g.orphaned and staleness.is_now(self._run, g))

    @cached_property
    def next_samples(self) -> Sequence[SampleView]:
        if not self._run.settings.max_off_policy_steps:
            return ()
        wanted, groups = self.step.step + 1, self._run.by_key.values()
        return _views(g for g in groups if g.purpose == "train" and g.step == wanted and not g.orphaned)

    @cached_property
    def queued(self) -> Sequence[SampleView]:
        return [sample.cached_view or sample_view(sample) for sample in self._waiting()]

    def _waiting(self) -> Iterator[Sample]:
        waiting = self._run.queue.waiting(self.version)
        if not self._run.settings.max_off_policy_steps:
            return waiting
        away, run = self._run.returning, self._run
        return (one for one in waiting if one.id not in away and staleness.is_now(run, one.group))

    @cached_property
    def workers(self) -> Sequence[WorkerView]:
        return [self._worker(worker) for _, worker in sorted(self._run.workers.items())]

    @property
    def came(self) -> object:
        run = self._run
        if not run.settings.max_off_policy_steps:
            return self.version, run.queue.came
        return self.version, run.queue.came, run.progress.newest, tuple(run.returning)

    def is_waiting(self, sample_id: int) -> bool:
        waits = self._run.queue.waits_for(sample_id, self.version) and sample_id not in self._run.returning
        return waits and staleness.is_now(self._run, self._core.samples[sample_id].group)

    def waiting(self) -> Iterator[QueuedSamples]:
        return (QueuedSamples(s.id, s.failed_nodes) for s in self._waiting())

    def slots(self) -> Sequence[Slots]:
        return self._slots

    @cached_property
    def _slots(self) -> Sequence[Slots]:
        version = self.version
        run = self._run
        if run.cached.serving is None or run.cached.serving[0] != version:
            run.cached.serving = version, samples.serving(run, version)
        if run.settings.max_off_policy_steps:
            # Samples of later steps take no slot from what the trainer works at: an engine that is full is found by the driver.
            return [Slots(w.id, self._leases(w), w.most_leases, w.place) for w in run.cached.serving[1]]
        return [
            w.cached_slots
            if w.cached_slots is not None and w.cached_slots.max_batch == w.most_leases
            else _slots_of(w, w.most_leases)
            for w in run.cached.serving[1]
        ]

    def _leases(self, worker: Worker) -> int:
        """Of what the trainer works at."""
        if not self._run.settings.max_off_policy_steps:
            return len(worker.leases)
        return sum(staleness.is_now(self._run, sample.group) for sample in worker.leases.values())

    def _worker(self, worker: Worker) -> WorkerView:
        return WorkerView(
            id=worker.id,
            kind=worker.kind,
            node=worker.place,
            gpus=worker.gpus,
            status=worker.status.value,
            serves=samples.serves_now(worker, self.version),
            leases=self._leases(worker),
            ahead=len(worker.leases) - self._leases(worker),
            max_batch=max(1, worker.most_leases),  # one that has no room does not serve
            joined_at=worker.joined_at,
            idle_since=worker.idle_since,
            tokens_per_s=worker.engine.tokens_per_s,
            warm=worker.weights.loads > 0,
            beat_at=worker.heartbeat.at,
            cache_tokens=worker.engine.cache_tokens,
            best_batch=worker.engine.best_batch,
            bounded=worker.bounded,
        )


def _slots_of(worker: Worker, most: int) -> Slots:
    slots = worker.cached_slots = Slots(worker.id, len(worker.leases), most, worker.place)
    return slots


def _views(groups: Iterable[Group]) -> list[SampleView]:
    """Samples that were not ended, in the order of their groups' ids."""
    ended = SampleStatus.ENDED
    return [
        sample.cached_view or sample_view(sample)
        for group in sorted(groups, key=lambda group: group.id)
        for sample in group.samples
        if sample.status is not ended
    ]


def sample_view(sample: Sample) -> SampleView:
    """The sample as policies see it, cached until it changes: a step has a thousand samples, and policies read them every few seconds."""
    if sample.cached_view is None:
        sample.cached_view = fresh_view(sample)
    return sample.cached_view


def fresh_view(sample: Sample) -> SampleView:
    group, length, accepted, worker_id = sample.group, sample.reported, sample.accepted, sample.worker_id
    cap = group.sampling.max_tokens
    if length > cap:
        length = cap
    holder = group.run.workers.get(worker_id) if worker_id else None
    return SampleView(
        id=sample.id,
        group_id=group.id,
        index=sample.index,
        prompt_tokens=len(group.prompt) // 4,
        cap=cap,
        accepted=accepted,
        length=length if length > accepted else accepted,
        worker_id=worker_id,
        leased_at=sample.leased_at,
        lease_offset=sample.lease_offset,
        moving=holder is not None and bool(holder.yielding) and sample.id in holder.yielding,
        moves=sample.moves,
        done=sample.done,
        avoid=sample.failed_nodes,
    )
