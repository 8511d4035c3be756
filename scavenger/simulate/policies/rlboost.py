"""RLBoost (arXiv 2510.19225), as the paper describes it, over our core: same fleet, cold starts, weights and token-level migration.

- window and instance limit: `seeding`.
- load balancing: a request goes to the instance with the shortest queue among those with fewer than Theta pending ones; the others wait at
  the router. An instance whose queue is empty gets pending requests of others; an idle one also max(m_exec - B, 0) of those that a peer
  executes, B being the batch beyond which more requests hardly add throughput (profiled).
- an instance that loads the step's weights counts among the queues, so that the first to have them does not get everything.
- micro-batches are trained in any order (all contenders do).

A lease is *pending* when its instance has reported since it was given, and no token of it.
"""

from __future__ import annotations

import functools
import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scavenger.router.policy import Fact, Move, Placement, RunView, SampleView, WindowDecision
from scavenger.simulate.contender import Contender
from scavenger.simulate.policies.even import Share
from scavenger.simulate.policies.seeding import Seeding

#: A request that is executed has its first token after this at the latest.
PREFILL_S = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """The paper's eta and floor; its Theta and B depend on the engine (these fit Qwen3-8B on H100), all are swept."""

    eta: float = 1 / 3
    floor_s: float = 5.0
    first_s: float = 30.0
    theta: int = 64
    batch: int = 64
    memo: bool = True
    seeds: bool = True  # False: reserved GPUs do not generate while there are instances


class RLBoost:
    """See the module."""

    every_s = 5.0

    def __init__(self, settings: Settings = Settings()) -> None:
        self._settings = settings
        self._seeding = Seeding(settings.eta, settings.floor_s if settings.seeds else 0.0, settings.first_s, memo=settings.memo)
        self._share = Share()
        self._pending: dict[int, int] = defaultdict(int)  # by worker: as of the last look, and given since

    def observe(self, fact: Fact, now: float) -> None:
        self._seeding.observe(fact, now)
        self._share.observe(fact)

    def place(self, view: RunView, now: float) -> Sequence[Placement]:
        if not self._pending_known(view):
            self._count(view)
        theta, share = self._settings.theta, self._share.each
        slots = [(s.leases, s.worker_id, min(s.max_batch, share)) for s in view.slots() if self._pending[s.worker_id] < theta]
        heap = [slot for slot in slots if slot[0] < slot[2]]
        heapq.heapify(heap)
        found = []
        for waiting in view.waiting():
            if not heap:
                break
            leases, worker_id, most = heapq.heappop(heap)
            found.append(Placement(waiting.sample_id, worker_id))
            self._pending[worker_id] += 1
            if leases + 1 < most and self._pending[worker_id] < theta:
                heapq.heappush(heap, (leases + 1, worker_id, most))
        return found

    def _pending_known(self, view: RunView) -> bool:
        """Whether no instance is held back by what was pending at the last look: then a new look cannot change anything."""
        return all(self._pending[slot.worker_id] < self._settings.theta for slot in view.slots())

    def _count(self, view: RunView) -> None:
        self._pending = defaultdict(int)
        beats = {worker.id: worker.beat_at for worker in view.workers}
        for sample in view.samples:
            if sample.worker_id and _pends(sample, beats):
                self._pending[sample.worker_id] += 1

    def rebalance(self, view: RunView, now: float) -> Sequence[Move]:
        idle = [slot.worker_id for slot in view.slots() if not slot.leases]
        self._pending = defaultdict(int) if not view.waits else self._pending
        fullest = max((slot.leases for slot in view.slots()), default=0)
        if not idle or view.waits or fullest <= self._settings.batch // 4:  # so few are all executed
            return ()
        beats = {worker.id: worker.beat_at for worker in view.workers}
        queues: dict[int, list[SampleView]] = defaultdict(list)
        for sample in view.samples:
            if sample.worker_id and not sample.moving:
                queues[sample.worker_id].append(sample)
        spare = []  # (how many its instance has, sample): the fullest instance gives first
        for held in queues.values():
            pending = [s for s in held if _pends(s, beats)]
            executing = len(held) - len(pending)
            excess = max(0, executing - self._settings.batch)
            running = sorted((s for s in held if not _pends(s, beats)), key=lambda s: (s.length, s.id))  # the least to prefill again
            spare += [(len(held), s) for s in [*pending, *running[:excess]]]
        spare.sort(key=lambda pair: (-pair[0], pair[1].id))
        return [
            Move(sample.id, sample.worker_id, idle[index % len(idle)], f"instance {sample.worker_id} has {held}, the other none")
            for index, (held, sample) in enumerate(spare)
        ]

    def window(self, view: RunView, now: float) -> WindowDecision | None:
        if not self._settings.seeds:
            return WindowDecision(True, "no seeding")
        return self._seeding.window(view, now)

    def engines(self, view: RunView, now: float) -> tuple[int, str]:
        return self._seeding.cap(sum(w.kind == "reserved" for w in view.workers), view.max_engines)


def _pends(sample: SampleView, beats: Mapping[int, float]) -> bool:
    return sample.length <= sample.lease_offset and beats.get(sample.worker_id, 0.0) > sample.leased_at + PREFILL_S


def rlboost(settings: Settings = Settings(), name: str = "rlboost") -> Contender:
    return Contender(name, functools.partial(RLBoost, settings))


RLBOOST = rlboost()
