"""Which engine a turn goes to: the one that has its prefix in its KV cache, where that is worth more than a free slot elsewhere. Pure.

    holder's slot is free     saved_s > decode_s                      go there      (CACHED)
                              else                                    elsewhere     (ELSEWHERE)
    holder is full            saved_s - waited_s > queue_s + decode_s wait for it   (nothing is placed)
                              else                                    elsewhere     (ELSEWHERE)

    saved_s    prefill of the tokens that the holder has and another engine would have to compute
    queue_s    until the holder is expected to have a free slot; those that wait for it already come first
    decode_s   what the completion takes longer on the holder than on the engine that would have it else
    waited_s   for how long the turn has waited already: it never waits for longer than the cache is worth

No number that is not known is guessed in the cache's favour: an engine whose speed was never measured has an endless queue once it is
full, and a prefill costs `PRIOR_PREFILL_S` a token until it was measured. Where no other engine has a free slot a turn waits as any turn
does, and is looked at again with the first that comes free.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

#: Seconds to prefill a token, until one was measured: a fast engine's, so that nothing waits for little.
PRIOR_PREFILL_S = 2e-5
#: Tokens of a completion, until one was seen.
PRIOR_COMPLETION = 256.0
#: A prefill is measured from so many tokens on.
LEAST_TOKENS = 256
#: What was known of an engine's seconds a token weighs as much as so many completions.
KNOWN = 3.0
#: Weight of a measurement that is faster than what is known, and of one that is slower: what else the engine did is in the slow ones.
FASTER, SLOWER = 0.3, 0.03


class Engine(NamedTuple):
    """An engine that may take leases of the version wanted. `token_s`: seconds a token of one sample takes on it; 0: not known."""

    worker_id: int
    leases: int
    max_batch: int
    node: str = ""
    token_s: float = 0.0


class Waiting(NamedTuple):
    """A sample that waits for an engine.

    `context`: tokens that it is generated from, accepted ones included. `cached`: (worker, how many of the first of them that has in its KV
    cache). `avoid`: nodes where engines failed on it.
    """

    sample_id: int
    context: int
    waited_s: float
    cached: Sequence[tuple[int, int]] = ()
    avoid: Set[str] = frozenset()


class Placed(NamedTuple):
    """A sample goes to a worker now, or (`waits`) stays in the queue until that one has a free slot. Seconds and tokens: see the module.

    `cached`: of the context, on the worker that has most of it.
    """

    sample_id: int
    worker_id: int
    reason: str
    waits: bool = False
    holder_id: int = 0
    context: int = 0
    cached: int = 0
    saved_s: float = 0.0
    queue_s: float = 0.0
    decode_s: float = 0.0
    waited_s: float = 0.0


@dataclass(slots=True)
class Speeds:
    """What was measured of a run's engines and turns: seconds to prefill a token, tokens of a completion."""

    prefill_s: float = PRIOR_PREFILL_S
    completion: float = PRIOR_COMPLETION
    prefills: int = 0
    completions: int = 0

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A lease's first token came `seconds` after the lease, for which so many tokens had to be prefilled."""
        if tokens < LEAST_TOKENS or seconds <= 0:
            return
        each = seconds / tokens
        weight = 1.0 if not self.prefills else FASTER if each < self.prefill_s else SLOWER
        self.prefill_s += weight * (each - self.prefill_s)
        self.prefills += 1

    def completed(self, tokens: int) -> None:
        """A turn's sample ended with so many tokens."""
        self.completions += 1
        self.completion += max(0.05, 1 / self.completions) * (tokens - self.completion)

    def paced(self, before_s: float, tokens: int, seconds: float, prefilled: int) -> float:
        """An engine's seconds a token, of what was known (0: nothing) and of a lease that took `seconds` for so many tokens, for which
        `prefilled` had to be prefilled."""
        if tokens <= 0 or seconds <= 0:
            return before_s
        each = max(0.0, seconds - prefilled * self.prefill_s) / tokens
        weight = tokens / (tokens + KNOWN * self.completion) if before_s else 1.0
        return before_s + weight * (each - before_s)


def place(waiting: Iterable[Waiting], engines: Iterable[Engine], speeds: Speeds) -> Iterator[Placed]:
    """What becomes of each sample, in the order given, until no engine has a free slot.

    Among engines that have nothing of a sample the one with the smallest share of its slots taken gets it, the lower id first.
    """
    fleet = _Fleet(engines)
    for sample in waiting:
        if not fleet.free:
            return
        holders = [(cached, fleet.by_id[w]) for w, cached in sample.cached if w in fleet.by_id and cached]
        found = _choose(sample, holders, fleet, speeds)
        if found is None:
            continue
        if found.waits:
            fleet.wait(found.worker_id)
        else:
            fleet.take(found.worker_id)
        yield found


class _Fleet:
    """The engines as they fill."""

    def __init__(self, engines: Iterable[Engine]) -> None:
        self.by_id: dict[int, Engine] = {engine.worker_id: engine for engine in engines}
        self.nodes = {engine.node for engine in self.by_id.values()}
        self.waiting: dict[int, int] = {}  # worker -> samples that wait for it
        self._heap = [
            (e.leases / e.max_batch, e.worker_id) for e in self.by_id.values() if e.leases < e.max_batch
        ]
        heapq.heapify(self._heap)
        self.free = len(self._heap)

    def take(self, worker_id: int) -> None:
        engine = self.by_id[worker_id]
        engine = self.by_id[worker_id] = engine._replace(leases=engine.leases + 1)
        if engine.leases < engine.max_batch:
            heapq.heappush(self._heap, (engine.leases / engine.max_batch, worker_id))
        else:
            self.free -= 1

    def wait(self, worker_id: int) -> None:
        self.waiting[worker_id] = self.waiting.get(worker_id, 0) + 1

    def emptiest(self, avoid: Set[str]) -> Engine | None:
        """The engine with the smallest share taken, not on a node to avoid while there are others."""
        if self.nodes <= avoid:
            avoid = frozenset()
        passed: list[tuple[float, int]] = []
        found: tuple[float, int] | None = None
        while self._heap and found is None:
            share, worker_id = entry = self._heap[0]
            engine = self.by_id[worker_id]
            if engine.leases >= engine.max_batch or engine.leases / engine.max_batch != share:
                heapq.heappop(self._heap)  # it has filled since
            elif engine.node in avoid:
                passed.append(heapq.heappop(self._heap))
            else:
                found = entry
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return None if found is None else self.by_id[found[1]]


def _choose(
    sample: Waiting, holders: Sequence[tuple[int, Engine]], fleet: _Fleet, speeds: Speeds
) -> Placed | None:
    other = fleet.emptiest(sample.avoid)
    offers = [
        _offer(sample, cached, engine, other, fleet, speeds)
        for cached, engine in holders
        if engine.node not in sample.avoid or fleet.nodes <= sample.avoid
    ]
    best = max(offers, key=lambda offer: (_worth(offer), -offer.worker_id), default=None)
    if best is not None and (_worth(best) > 0 or other is None):
        if not best.waits:
            return best
        # Worth its queue; or all that are free are on nodes to avoid.
        return best if _worth(best) > 0 else None
    if other is None:
        return None
    if best is None:
        return Placed(sample.sample_id, other.worker_id, _EMPTIEST, context=sample.context)
    what = "would be free" if best.waits else "is free and slower"
    why = (
        f"elsewhere, worker {best.worker_id} has {best.cached} of {sample.context} tokens ({best.saved_s:.3f} s of prefill) and {what}: "
        f"{_s(best.queue_s)} of queue, {best.decode_s:.3f} s more of decoding, {best.waited_s:.3f} s waited"
    )
    return best._replace(worker_id=other.worker_id, holder_id=best.worker_id, reason=why, waits=False)


_EMPTIEST = "emptiest, no engine has its prefix"


def _offer(
    sample: Waiting, cached: int, engine: Engine, other: Engine | None, fleet: _Fleet, speeds: Speeds
) -> Placed:
    """What it would be to have the sample on an engine that has some of it. `other`: who would have it else, at once."""
    full = engine.leases >= engine.max_batch
    queue_s = 0.0
    if full:  # completions end at random: of `leases` at once the first after a share of their mean time, then the next
        ahead = 1 + fleet.waiting.get(engine.worker_id, 0)
        queue_s = ahead * speeds.completion * engine.token_s / engine.leases if engine.token_s else math.inf
    decode_s = 0.0
    if other is not None and engine.token_s and other.token_s:
        decode_s = speeds.completion * max(0.0, engine.token_s - other.token_s)
    saved_s = cached * speeds.prefill_s
    why = (
        f"cached, worker {engine.worker_id} has {cached} of {sample.context} tokens: {saved_s:.3f} s of prefill saved, "
        f"{_s(queue_s)} of queue, {decode_s:.3f} s more of decoding"
    )
    waited_s = sample.waited_s if full else 0.0
    return Placed(
        sample.sample_id,
        engine.worker_id,
        why,
        full,
        engine.worker_id,
        sample.context,
        cached,
        saved_s,
        queue_s,
        decode_s,
        waited_s,
    )


def _s(seconds: float) -> str:
    return f"{seconds:.3f} s" if math.isfinite(seconds) else "an unknown time"


def _worth(offer: Placed) -> float:
    """Seconds by which the sample is done sooner there than elsewhere."""
    return offer.saved_s - offer.queue_s - offer.decode_s - offer.waited_s


def inputs_of(placed: Iterable[Placed]) -> dict[str, Any]:
    """The numbers of many decisions together: tokens of their contexts, of these cached where they go, and seconds of prefill saved."""
    some = list(placed)
    there = [one for one in some if one.worker_id == one.holder_id]
    return {
        "samples": len(some),
        "to_cache": len(there),
        "context_tokens": sum(one.context for one in some),
        "cached_tokens": sum(one.cached for one in there),
        "saved_s": round(sum(one.saved_s for one in there), 3),
    }
