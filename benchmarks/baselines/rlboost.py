"""RLBoost (arXiv 2510.19225), as the paper describes it, over our core: same fleet, cold starts, weights and token-level migration.

- window and instance limit: `seeding`.
- load balancing: a request goes to the instance with the shortest queue among those with fewer than Theta pending ones; the others wait at
  the router. An instance whose queue is empty gets pending requests of others; an idle one also max(m_exec - B, 0) of those that another
  instance executes, B being the batch beyond which more requests hardly add throughput, which is profiled (`registry.profiled`):
  `balancing`.
- an instance that loads the step's weights counts among the queues, so that the first to have them does not get everything.
- micro-batches are trained in any order (all policies do).

The paper's instances tell at once what they execute, ours with a heartbeat. A request is thus *pending* from the moment it is given until
a token of it was heard of, or until the time of a first token is over while it is one of its instance's first B, which are taken to fit.
Instances serve in order: one that had the time to prefill all that it was given, and then spoke of no token of the first, executes none
of them. Nothing else is profiled but B, Theta and how fast an engine prefills.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.baselines.balancing import Balancer, Instance
from benchmarks.baselines.seeding import Seeding
from scavenger.policy.interface import (
    Fact,
    RunView,
    SampleMove,
    SamplePlacement,
    SampleView,
    StepSubmitted,
    WindowDecision,
)
from scavenger.policy.placement import Slots
from scavenger.simulate.policies import EvenShare, SimulatedPolicy

#: A request that is executed has its first token after this, and the prefill of all that its instance was given.
FIRST_TOKEN_S = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """The paper's eta and floor. What depends on the engine is profiled (`registry.profiled`); here for who knows nothing of it."""

    eta: float = 1 / 3
    floor_s: float = 5.0
    first_s: float = 30.0
    theta: int = 64
    batch: int = 64
    prefill_tokens_s: float = 40_000.0
    memo: bool = True
    seeds: bool = True  # False: reserved GPUs do not generate while there are instances


class RLBoost:
    """See the module."""

    every_s = 5.0

    def __init__(self, settings: Settings = Settings()) -> None:
        self._settings = settings
        self._seeding = Seeding(
            settings.eta, settings.floor_s if settings.seeds else 0.0, settings.first_s, memo=settings.memo
        )
        self._balancer = Balancer(settings.theta, settings.batch)
        self._share = EvenShare()
        # By instance: of whom no token was heard at the last look, and who was given since. It is never too few.
        self._unheard: dict[int, int] = defaultdict(int)
        self._waiting: set[int] = set()  # instances that executed none of these at the last look
        self._sent: deque[tuple[float, int]] = deque()  # (when, to whom) within `FIRST_TOKEN_S`
        self._counted_at = -math.inf
        self._coming: dict[
            int, int
        ] = {}  # samples that were asked back for an instance, and are not there yet

    def observe(self, fact: Fact, now: float) -> None:
        self._seeding.observe(fact, now)
        self._share.observe(fact)
        if isinstance(fact, StepSubmitted):
            self._balancer.forget()

    def _pending(self, view: RunView, now: float) -> list[tuple[Slots, int]]:
        """The instances, each with how many are pending there."""
        self._count_unheard(view, now)
        while self._sent and self._sent[0][0] <= now - FIRST_TOKEN_S:
            self._sent.popleft()
        fresh = Counter(worker_id for _, worker_id in self._sent)
        found = []
        for slot in view.slots():
            here = slot.worker_id
            most = self._unheard[here]
            if most > slot.leases:  # who holds nothing says nothing, and need not be waited for
                most = min(most, slot.leases + sum(to == here for to in self._coming.values()))
            if here not in self._waiting:
                most = min(most, max(slot.leases - self._settings.batch, fresh[here]))
            found.append((slot, most))
        return found

    def _note_sent(self, worker_id: int, now: float) -> None:
        self._unheard[worker_id] += 1
        self._sent.append((now, worker_id))

    def _count_unheard(self, view: RunView, now: float) -> None:
        """Count anew what is not heard of, if an instance with such requests has spoken since that was last done."""
        if not any(self._unheard[slot.worker_id] for slot in view.slots()):
            return
        if not any(
            self._unheard[worker.id] and worker.beat_at >= self._counted_at for worker in view.workers
        ):
            return
        queues, unheard, coming = defaultdict[int, list[SampleView]](list), defaultdict[int, int](int), {}
        for sample in view.samples:
            if sample.moving and sample.id in self._coming:
                coming[sample.id] = self._coming[sample.id]
                unheard[coming[sample.id]] += 1
            if sample.worker_id and sample.length <= sample.lease_offset:
                queues[sample.worker_id].append(sample)
                unheard[sample.worker_id] += 1
        self._unheard, self._coming, self._counted_at = unheard, coming, now
        self._waiting = {
            worker.id
            for worker in view.workers
            if worker.id in queues and self._waits(queues[worker.id], worker.beat_at)
        }

    def _waits(self, queue: Sequence[SampleView], beat_at: float) -> bool:
        prefill_s = (
            sum(sample.prompt_tokens + sample.lease_offset for sample in queue)
            / self._settings.prefill_tokens_s
        )
        return min(sample.leased_at for sample in queue) + FIRST_TOKEN_S + prefill_s < beat_at

    def place(self, view: RunView, now: float) -> Sequence[SamplePlacement]:
        theta, share = self._settings.theta, self._share.each
        pending = self._pending(view, now)
        candidates = [
            (slot.leases, slot.worker_id, min(slot.max_batch, share, slot.leases + theta - count))
            for slot, count in pending
        ]
        heap = [candidate for candidate in candidates if candidate[0] < candidate[2]]
        heapq.heapify(heap)
        found = []
        for waiting in view.waiting():
            if not heap:
                break
            leases, worker_id, most = heapq.heappop(heap)
            found.append(SamplePlacement(waiting.sample_id, worker_id))
            self._note_sent(worker_id, now)
            if leases + 1 < most:
                heapq.heappush(heap, (leases + 1, worker_id, most))
        return found

    def rebalance(self, view: RunView, now: float) -> Sequence[SampleMove]:
        batch = self._settings.batch
        instances = {
            slot.worker_id: Instance(slot.worker_id, slot.leases, count)
            for slot, count in self._pending(view, now)
        }
        empty = [one for one in instances.values() if not one.pending]
        excess = any(not one.leases for one in empty) and any(
            one.leases > batch for one in instances.values()
        )
        waiting = [
            one
            for one in instances.values()
            if one.pending and (one.leases > batch or one.id in self._waiting)
        ]
        if not excess and not (empty and waiting):  # nobody to take, or nobody to give
            return ()
        for sample in view.samples:
            if not sample.moving and (holder := instances.get(sample.worker_id)) is not None:
                (holder.executed if sample.length > sample.lease_offset else holder.waiting).append(sample)
        for one in instances.values():
            one.waiting.sort(key=lambda sample: (sample.leased_at, sample.id))
            if one.id not in self._waiting:
                del one.waiting[
                    : max(0, len(one.waiting) - max(0, one.leases - batch))
                ]  # these have begun, or will at once
        found = self._balancer.moves(list(instances.values()))
        for move in found:
            self._coming[move.sample_id] = move.to_worker
            self._note_sent(move.to_worker, now)
        return found

    def window(self, view: RunView, now: float) -> WindowDecision | None:
        if not self._settings.seeds:
            return WindowDecision(True, "no seeding")
        decision = self._seeding.window(view, now)
        if view.waits and self._sent:  # who waits may be placed when those have begun
            return replace(decision, again_at=min(decision.again_at, now + FIRST_TOKEN_S))
        return decision

    def engines(self, view: RunView, now: float) -> tuple[int, str]:
        return self._seeding.cap(sum(w.kind == "reserved" for w in view.workers), view.max_engines)


def rlboost(settings: Settings = Settings(), name: str = "rlboost") -> SimulatedPolicy:
    return SimulatedPolicy(name, functools.partial(RLBoost, settings))


RLBOOST = rlboost()
