"""Which running samples change engines: rebalancing, and the merging of tails. Pure.

Both reckon with when an engine is done: `SpeedCurve.drain_s` of what it holds (`forecast.speed`), given expected lengths. A move costs its
target the prefill of the sample's whole context, and a transfer.

    rebalance  take from the engine that is done last, give to those that are done first, while each move ends the later of two sooner
               by more than it costs, and all of them together by a margin that forecasts cannot be trusted below
    merge      empty engines whose samples fit on others that would be done before the step's end anyway

No oscillation: every move lowers the later of two engines' ends, so that while forecasts stay where they are the ends, sorted, only
fall and no state comes twice; and whatever forecasts do, no sample returns to an engine that it was taken from (`Running.left`, which the
caller keeps). Knows no clock, lease epoch or message.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import msgspec

from scavenger.policy.forecast.speed import SpeedCurve


class Running(msgspec.Struct, frozen=True, gc=False):
    """A leased sample. `have`: tokens of context, prompt included; `rest`: expected tokens to come.

    `fixed`: it may not move now. `left`: engines that it was taken from before; it never goes back to one.
    """

    sample_id: int
    have: float
    rest: float
    fixed: bool = False
    left: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine and what it holds. `limit`: samples at most; `gives`, `takes`: samples may leave it, may come to it.

    `cache`: tokens of context that its KV cache holds; with more it would recompute what it preempts.
    """

    worker_id: int
    node: str
    curve: SpeedCurve
    limit: int
    samples: tuple[Running, ...]
    gives: bool = True
    takes: bool = True
    cache: float = math.inf


@dataclass(frozen=True, slots=True)
class Price:
    """What a move costs its target: seconds a token of context and seconds a move.

    `margin`: how much sooner an engine must be done for taking from it, a share of when it would be.
    """

    token_s: float
    move_s: float
    margin: float = 0.1

    def of(self, sample: Running) -> float:
        return self.move_s + self.token_s * sample.have


@dataclass(frozen=True, slots=True)
class Shift:
    """One sample from one engine to another, and why."""

    sample_id: int
    source: int
    target: int
    gain_s: float
    reason: str


class _Work:
    """One engine while moves are tried. `extra_s`: prefills of samples that came; `drain_s`: when it is done with all it has.

    Whatever changes what it has ends with `_settle`.
    """

    def __init__(self, load: EngineLoad) -> None:
        self.load = load
        self.samples = {s.sample_id: s for s in load.samples}
        held = [(s.have, s.rest) for s in load.samples]
        self.work_s = load.curve.works_s(held)
        self.context = sum([have + rest / 2 for have, rest in held])
        self.extra_s = 0.0
        self.longest = max([rest for _, rest in held], default=0.0)
        self._settle()

    def _settle(self) -> None:
        self.drain_s = self.load.curve.base * self.longest + self.work_s + self.extra_s

    def without_s(self, sample: Running, longest: float) -> float:
        """When it is done without this one; `longest` of the others."""
        curve = self.load.curve
        return curve.base * longest + self.work_s - curve.work_s(sample.have, sample.rest) + self.extra_s

    def with_s(self, sample: Running, price: Price, longest: float) -> float:
        curve = self.load.curve
        more = curve.work_s(sample.have, sample.rest) + price.of(sample)
        return curve.base * max(longest, sample.rest) + self.work_s + more + self.extra_s

    def has_capacity(self, sample: Running, beside: Sequence[Running] = ()) -> bool:
        """`beside`: what is to come here with it."""
        held = len(self.samples) + len(beside)
        context = self.context + sum([one.have + one.rest / 2 for one in (*beside, sample)])
        may = self.load.takes and self.load.worker_id not in sample.left
        return may and held < self.load.limit and (context <= self.load.cache or not held)

    def give(self, sample: Running) -> None:
        del self.samples[sample.sample_id]
        self.work_s -= self.load.curve.work_s(sample.have, sample.rest)
        self.context -= sample.have + sample.rest / 2
        if sample.rest >= self.longest:
            self.longest = max([s.rest for s in self.samples.values()], default=0.0)
        self._settle()

    def put_back(self, sample: Running) -> None:
        self.samples[sample.sample_id] = sample
        self.work_s += self.load.curve.work_s(sample.have, sample.rest)
        self.context += sample.have + sample.rest / 2
        self.longest = max(self.longest, sample.rest)
        self._settle()

    def undo(self, sample: Running, price: Price) -> None:
        self.give(sample)
        self.extra_s -= price.of(sample)
        self._settle()

    def take(self, sample: Running, price: Price) -> None:
        self.put_back(sample)
        self.extra_s += price.of(sample)
        self._settle()


def rebalance(
    loads: Iterable[EngineLoad], price: Price, critical_s: float = 0.0, most: int = 64
) -> list[Shift]:
    """Moves, each worth it after those before it. Engines done before `critical_s` (when the step cannot end sooner) are left alone.

    Each round looks at the engine that is done last and takes from it, sample by sample, what ends the later of it and its target sooner
    by more than the move costs; all of that is kept when the engine is done sooner by the margin, else nothing of it. After `most` moves
    or engines no further one is looked at.
    """
    works = {load.worker_id: _Work(load) for load in sorted(loads, key=lambda load: load.worker_id)}
    late = [
        (-work.drain_s, worker_id) for worker_id, work in works.items() if work.load.gives and work.samples
    ]
    heapq.heapify(late)
    shifts: list[Shift] = []
    moved: set[int] = set()
    rounds = itertools.count()
    while late and len(shifts) < most and next(rounds) < most:
        ends_s, worker_id = heapq.heappop(late)
        if -ends_s <= critical_s:
            break
        source = works[worker_id]
        first = min(
            (work.drain_s for work in works.values() if work is not source and work.load.takes),
            default=-ends_s,
        )
        if -ends_s - max(first, critical_s) <= price.margin * -ends_s:
            break  # it cannot be done sooner by the margin, and the others, done earlier, still less
        taken = _relieve(source, works.values(), price, moved, critical_s)
        if -ends_s - max(source.drain_s, critical_s) <= price.margin * -ends_s:
            for _, sample, target in reversed(taken):
                target.undo(sample, price)
                source.put_back(sample)
            continue
        moved |= {sample.sample_id for _, sample, _ in taken}
        shifts += [shift for shift, _, _ in taken]
    return shifts


Taken = tuple[Shift, Running, _Work]


def _relieve(
    source: _Work, works: Iterable[_Work], price: Price, moved: Set[int], critical_s: float
) -> list[Taken]:
    """Take samples from one engine while each one's move ends both engines sooner, by more than it costs."""
    others = [work for work in works if work is not source and work.load.takes]
    taken: list[Taken] = []
    while source.samples and source.drain_s > critical_s:
        found = _best_shift(source, others, price, moved, critical_s)
        if found is None:
            break
        _, sample, target = found
        source.give(sample)
        target.take(sample, price)
        taken.append(found)
    return taken


def _best_shift(
    source: _Work, others: Sequence[_Work], price: Price, moved: Set[int], critical_s: float
) -> Taken | None:
    """The sample whose move to the engine that is done first gains most, or None when none gains enough."""
    targets = [work for work in others if len(work.samples) < work.load.limit]
    if not targets:
        return None
    target = min(targets, key=lambda work: (work.drain_s, work.load.worker_id))
    before, there, longest_there = source.drain_s, target.drain_s, target.longest
    rests = heapq.nlargest(2, [sample.rest for sample in source.samples.values()])
    second = rests[1] if len(rests) > 1 else 0.0
    best: tuple[float, int, Running] | None = None
    for sample in source.samples.values():
        if sample.fixed or sample.sample_id in moved:
            continue
        left_s = source.without_s(sample, rests[0] if sample.rest < rests[0] else second)
        if best is not None and left_s > best[0]:
            continue  # whatever it costs there
        if not target.has_capacity(sample):
            continue
        after = max(left_s, target.with_s(sample, price, longest_there), critical_s)
        if best is None or (after, sample.sample_id) < best[:2]:
            best = (after, sample.sample_id, sample)
    if best is None:
        return None
    after, _, sample = best
    gain, cost = before - after, price.of(sample)
    if gain <= cost:  # `after` holds the price already: it has to be won twice
        return None
    why = (
        f"worker {source.load.worker_id} is done in {before:.1f} s and worker {target.load.worker_id} in {there:.1f} s: "
        f"moving {sample.rest:.0f} expected tokens ends both in {after:.1f} s, for {cost:.2f} s of prefill and transfer"
    )
    return Shift(sample.sample_id, source.load.worker_id, target.load.worker_id, gain, why), sample, target


# ---------------------------------------------------------------- tails


@dataclass(frozen=True, slots=True)
class Merge:
    """Moves that leave `emptied` without a sample, the step's end unchanged."""

    shifts: tuple[Shift, ...]
    emptied: tuple[int, ...]
    reason: str


#: Merged engines are done by this share of the time that is left, so that an error of the forecast does not lengthen the step.
MERGE_SHARE = 0.9
#: After so many engines in a row that fit nowhere no further one is tried: those of a thousand hold about as much.
REFUSALS = 8


def merge(loads: Iterable[EngineLoad], price: Price, end_s: float, worth_s: float) -> Merge:
    """Empty as many engines as fit on others by `MERGE_SHARE * end_s`, `end_s` being when the step is expected to have all samples.

    Nothing is moved when less than `worth_s` is left: a freed GPU would be idle for less than it costs to start an engine on it again.
    Engines of the node that holds the fewest samples go first, so that whole nodes become free.
    """
    if end_s < worth_s:
        return Merge(
            (), (), f"{end_s:.1f} s are left, under the {worth_s:.1f} s for which freeing an engine pays"
        )
    works = {load.worker_id: _Work(load) for load in sorted(loads, key=lambda load: load.worker_id)}
    limit_s = MERGE_SHARE * end_s
    by_node: dict[str, int] = {}
    for work in works.values():
        by_node[work.load.node] = by_node.get(work.load.node, 0) + len(work.samples)
    ranks = sorted(
        works,
        key=lambda w: (
            by_node[works[w].load.node],
            works[w].load.node,
            len(works[w].samples),
            works[w].drain_s,
            w,
        ),
    )
    shifts: list[Shift] = []
    emptied: list[int] = []
    came: set[int] = set()
    refused = 0
    for worker_id in ranks:
        if refused == REFUSALS:
            break
        source = works[worker_id]
        if (
            not source.samples
            or not source.load.gives
            or any(s.fixed or s.sample_id in came for s in source.samples.values())
        ):
            continue
        targets = [
            works[w] for w in reversed(ranks) if w != worker_id and w not in emptied and works[w].samples
        ]
        placed = _fit(source, targets, price, limit_s)
        refused = refused + 1 if placed is None else 0
        for sample, target in placed or ():
            source.give(sample)
            target.take(sample, price)
            came.add(sample.sample_id)
            why = f"worker {worker_id} is emptied: worker {target.load.worker_id} ends in {target.drain_s:.1f} s of {end_s:.1f} s with it"
            shifts.append(Shift(sample.sample_id, worker_id, target.load.worker_id, 0.0, why))
        if placed is not None:
            emptied.append(worker_id)
    why = f"{len(emptied)} engines are emptied by {len(shifts)} moves, all done in {limit_s:.1f} s of {end_s:.1f} s"
    return Merge(tuple(shifts), tuple(emptied), why)


def _fit(
    source: _Work, targets: Sequence[_Work], price: Price, limit_s: float
) -> list[tuple[Running, _Work]] | None:
    """An engine for each sample of `source`, the longest first, each to the fullest that has time for it; None when one finds none."""
    added: dict[int, list[Running]] = {target.load.worker_id: [] for target in targets}
    placed = []
    for sample in sorted(source.samples.values(), key=lambda s: (-s.rest, s.sample_id)):
        best: tuple[float, int, _Work] | None = None
        for target in targets:
            mine = added[target.load.worker_id]
            if not target.has_capacity(sample, mine):
                continue
            ends = _with_all(target, [*mine, sample], price)
            if ends <= limit_s and (best is None or (-ends, target.load.worker_id) < best[:2]):
                best = (-ends, target.load.worker_id, target)
        if best is None:
            return None
        added[best[1]].append(sample)
        placed.append((sample, best[2]))
    return placed


def _with_all(target: _Work, samples: Sequence[Running], price: Price) -> float:
    curve = target.load.curve
    longest = max(target.longest, *(s.rest for s in samples))
    more = sum(curve.work_s(s.have, s.rest) + price.of(s) for s in samples)
    return curve.base * longest + target.work_s + more + target.extra_s


def drains(loads: Iterable[EngineLoad]) -> Mapping[int, float]:
    """When each engine is done, by worker id."""
    return {load.worker_id: load.curve.drain_s([(s.have, s.rest) for s in load.samples]) for load in loads}
