"""Which queued sample goes to which worker. Pure.

Two forms. `place` knows no lengths: samples that already have tokens first (their group waits for them), then in the order of step
and prompt; each to the worker with the smallest share of its slots taken, so that the fleet fills evenly and a preemption takes as few
samples as it can. In both forms a sample never goes back to a node where an engine failed on it while another node serves: one sick
engine, always the emptiest, would otherwise draw every sample to itself until they count as poisoned.

`order` and `assign` go by expected lengths:

    order    samples that moved; then longest first, mixed with the oldest (so that none starves)
    assign   each to the engine that would be done with it first, as long as that engine is below its plateau and its cache
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from scavenger.policy.forecast.speed import SpeedCurve

Slot = tuple[float, int, int, int, str]  # share taken, worker id, leases, max_batch, node


class QueuedSamples(NamedTuple):
    """A sample that waits. `avoid`: nodes where engines failed on it."""

    sample_id: int
    avoid: Set[str] = frozenset()


class Slots(NamedTuple):
    """A worker that may take leases of the version wanted."""

    worker_id: int
    leases: int
    max_batch: int
    node: str = ""


def priority(accepted: int, step: int, order: int, sample_id: int) -> tuple[bool, int, int, int]:
    """The order in which samples are placed, smallest first."""
    return (accepted == 0, step, order, sample_id)


def place(waiting: Iterable[QueuedSamples], workers: Iterable[Slots]) -> Iterator[tuple[int, int]]:
    """Yield (sample id, worker id) until samples or slots run out; `waiting` comes in the order of `priority`.

    Ties between workers go to the lower id: the order of arrival never decides.
    """
    serving = list(workers)
    nodes = {w.node for w in serving}
    heap: list[Slot] = [
        (w.leases / w.max_batch, w.worker_id, w.leases, w.max_batch, w.node)
        for w in serving
        if w.leases < w.max_batch
    ]
    heapq.heapify(heap)
    for sample in waiting:
        if not heap:
            return
        slot = heapq.heappop(heap) if not sample.avoid or nodes <= sample.avoid else _pop(heap, sample.avoid)
        if slot is None:
            continue
        _, worker_id, leases, max_batch, node = slot
        yield sample.sample_id, worker_id
        if leases + 1 < max_batch:
            heapq.heappush(heap, ((leases + 1) / max_batch, worker_id, leases + 1, max_batch, node))


def _pop(heap: list[Slot], avoid: Set[str]) -> Slot | None:
    """Take the emptiest worker that is not on a node to avoid."""
    skipped: list[Slot] = []
    found = None
    while heap and found is None:
        slot = heapq.heappop(heap)
        if slot[-1] in avoid:
            skipped.append(slot)
        else:
            found = slot
    for slot in skipped:
        heapq.heappush(heap, slot)
    return found


# ---------------------------------------------------------------- by expected lengths

#: At least every so many placements go to the sample that came first: none is overtaken for ever.
OLDEST_EVERY = 8


class QueuedSample(msgspec.Struct, frozen=True, gc=False):
    """A queued sample as the forecast sees it. `have`: tokens of context, prompt included; `rest`: expected tokens to come.

    `moved`: it was begun elsewhere. Ids grow with age.
    """

    sample_id: int
    group_id: int
    have: float
    rest: float
    moved: bool = False
    avoid: Set[str] = frozenset()


class Ranked(msgspec.Struct, frozen=True, gc=False):
    """A sample and why it is next."""

    job: QueuedSample
    why: str


def order(jobs: Iterable[QueuedSample]) -> list[Ranked]:
    """In which order to place."""
    todo = sorted(jobs, key=lambda job: (job.group_id, job.sample_id))
    ranked = [
        Ranked(job, "moved")
        for job in sorted((j for j in todo if j.moved), key=lambda j: (-j.rest, j.sample_id))
    ]
    rest = [job for job in todo if not job.moved]
    return ranked + _mixed(rest)


def in_turn(jobs: Iterable[QueuedSample], group_rest: Mapping[int, float]) -> list[Ranked]:
    """Group after group, the one with the least to come first: groups become whole all the time, and few are open at once.

    `group_rest`: tokens to come of all samples of each group, running ones included. What moved goes first, its group has waited most.
    """
    todo = sorted(
        jobs,
        key=lambda job: (
            not job.moved,
            group_rest.get(job.group_id, job.rest),
            job.group_id,
            -job.rest,
            job.sample_id,
        ),
    )
    return [Ranked(job, "moved" if job.moved else "its group has the least to come") for job in todo]


def _mixed(jobs: Sequence[QueuedSample]) -> list[Ranked]:
    """Longest first, with every `OLDEST_EVERY`-th place given to the oldest."""
    longest = deque(sorted(jobs, key=lambda job: (-job.rest, job.group_id, job.sample_id)))
    oldest = deque(jobs)
    ranked: list[Ranked] = []
    taken: set[int] = set()
    while len(ranked) < len(jobs):
        if len(ranked) % OLDEST_EVERY == OLDEST_EVERY - 1:
            source, why = oldest, "oldest"
        else:
            source, why = longest, "longest expected"
        while source[0].sample_id in taken:
            source.popleft()
        job = source.popleft()
        taken.add(job.sample_id)
        ranked.append(Ranked(job, why))
    return ranked


@dataclass(slots=True)
class OpenEngine:
    """An engine that may take leases, with what it has. `limit`: leases up to its plateau; `cache`: tokens that its KV cache holds.

    `longest`: tokens to come of its longest sample; `work_s`: `SpeedCurve.work_s` over its samples; `context`: their tokens, half of what
    is to come included. `open_s`: how long it will generate yet (a reserved one is put to sleep); `reload_s`: a token's prefill elsewhere.
    """

    worker_id: int
    node: str
    leases: int
    limit: int
    curve: SpeedCurve
    cache: float = math.inf
    longest: float = 0.0
    work_s: float = 0.0
    context: float = 0.0
    open_s: float = math.inf
    reload_s: float = 0.0

    @property
    def drain_s(self) -> float:
        return self.curve.base * self.longest + self.work_s

    def with_s(self, job: QueuedSample) -> float:
        """When it would be done with this one too. What outlasts its window is prefilled elsewhere, which counts."""
        done = (
            self.curve.base * max(self.longest, job.rest)
            + self.work_s
            + self.curve.work_s(job.have, job.rest)
        )
        return done if done <= self.open_s else done + (job.have + job.rest) * self.reload_s

    def has_capacity_for(self, job: QueuedSample) -> bool:
        fits = self.context + job.have + job.rest / 2 <= self.cache or not self.leases
        return fits and self.leases < self.limit

    def take(self, job: QueuedSample) -> None:
        self.leases += 1
        self.longest = max(self.longest, job.rest)
        self.work_s += self.curve.work_s(job.have, job.rest)
        self.context += job.have + job.rest / 2


Entry = tuple[float, int, int, OpenEngine]  # when it is done, leases, worker id (unique), engine


def assign(ranked: Iterable[Ranked], engines: Iterable[OpenEngine]) -> Iterator[tuple[int, int, str]]:
    """Yield (sample id, worker id, reason) until samples or room run out. Changes the engines given as it fills them.

    List scheduling: each sample to the engine that would be done first with all it holds. Among engines alike that is the one done first
    now, so that only the first of each kind is looked at. Where a sample more costs no time at all (a paced engine) the one with the fewest
    gets it: then a preemption takes as few as it can.
    """
    fleet = sorted(engines, key=lambda e: e.worker_id)
    nodes = {engine.node for engine in fleet}
    kinds: dict[tuple[SpeedCurve, float, int, float], list[Entry]] = {}
    for engine in fleet:
        if engine.leases < engine.limit:
            alike = (engine.curve, engine.open_s, engine.limit, engine.cache)
            kinds.setdefault(alike, []).append((engine.drain_s, engine.leases, engine.worker_id, engine))
    heaps = list(kinds.values())
    for heap in heaps:
        heapq.heapify(heap)
    for ranking in ranked:
        if not any(heaps):
            return
        job = ranking.job
        avoid = job.avoid if nodes - job.avoid else frozenset()
        found = [
            (entry[-1].with_s(job), entry[1], entry[2], entry, heap)
            for heap in heaps
            if (entry := _first(heap, job, avoid))
        ]
        if not found:
            continue
        done_s, _, worker_id, entry, heap = min(found, key=lambda f: f[:3])
        engine = entry[-1]
        engine.take(job)
        _replace(
            heap,
            entry,
            (engine.drain_s, engine.leases, worker_id, engine) if engine.leases < engine.limit else None,
        )
        yield (
            job.sample_id,
            worker_id,
            f"{ranking.why}, {job.rest:.0f} tokens expected; worker {worker_id} would be done in {done_s:.1f} s",
        )


def _first(heap: list[Entry], job: QueuedSample, avoid: Set[str]) -> Entry | None:
    """The entry that is done first among those that have room, not on a node to avoid. Mostly the heap's top."""
    if heap and heap[0][-1].node not in avoid and heap[0][-1].has_capacity_for(job):
        return heap[0]
    return min(
        (entry for entry in heap if entry[-1].node not in avoid and entry[-1].has_capacity_for(job)),
        default=None,
    )


def _replace(heap: list[Entry], old: Entry, new: Entry | None) -> None:
    if heap[0] is old:
        heapq.heappop(heap)
    else:
        heap.remove(old)
        heapq.heapify(heap)
    if new is not None:
        heapq.heappush(heap, new)
