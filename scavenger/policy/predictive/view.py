"""A run at one moment, as its forecasts see it: what every sample has and has to come, what every engine holds. Pure.

Made of a `RunView` and a `Forecast`, for the controllers to reckon with; several ask about the same moment, so it is made once. Two
readings of what is to come: `expected` (the mean, steady from one moment to the next: who goes where) and `imputed` (one plausible
length each, with the spread and the maximum of the whole set: when the step ends). Decides nothing.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from scavenger.policy.forecast import lengths_of_step
from scavenger.policy.forecast.lengths import Belief, GroupLengths, LengthTable, impute
from scavenger.policy.forecast.service import Outstanding, Samples
from scavenger.policy.forecast.speed import SpeedCurve
from scavenger.policy.forecast.step import NEVER, Costs, EnginePool, Situation
from scavenger.policy.interface import SampleView, StepView, WorkerView
from scavenger.policy.predictive.learned import Forecast

LOADING = ("loading", "away")
#: An engine that is late is expected after this share more of what it has been loading for.
LATE = 0.25
#: Samples wait for an engine that is expected within this, rather than crowd those that are there; less where a completion takes less.
COMING_S = 20.0
#: Up to this cap what a length counts as is looked up, not worked out.
LONG = (1 << 17) - 1
#: The quantile that counts where a sample must not be late.
SAFE = 0.9


@dataclass(slots=True)
class GroupProgress:
    """One group's samples. `done_tokens`: of its finished ones, prompts included."""

    finished: list[int] = field(default_factory=list)
    running: list[SampleView] = field(default_factory=list)
    done_tokens: float = 0.0


class _Unfinished(NamedTuple):
    """What is not done, group after group: views, each group's id with the number of its samples, and columns of ids and tokens."""

    views: list[SampleView]
    groups: list[tuple[int, int]]
    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]


_UNKNOWN = Belief()


class Pictured(Protocol):
    """What a picture is made of."""

    @property
    def step(self) -> StepView: ...

    @property
    def workers(self) -> Sequence[WorkerView]: ...

    @property
    def samples(self) -> Sequence[SampleView]: ...


class Picture:
    """Everything is in order of ids."""

    def __init__(
        self, view: Pictured, forecast: Forecast, now: float, beliefs: dict[int, tuple[object, Belief]]
    ) -> None:
        self.now = now
        self.step = view.step
        self.workers: Sequence[WorkerView] = view.workers
        self._forecast = forecast
        self._known = beliefs
        self._samples = view.samples
        self.groups: dict[int, GroupProgress] = {}
        groups, cap, group = self.groups, 1, GroupProgress()
        group_id: int | None = None
        for sample in self._samples:
            if sample.group_id != group_id:  # siblings come one after the other
                group_id = sample.group_id
                group = groups.setdefault(group_id, GroupProgress())
            if sample.done:
                group.finished.append(sample.length)
                group.done_tokens += sample.length + sample.prompt_tokens
                continue
            if sample.cap > cap:
                cap = sample.cap
            group.running.append(sample)
        self._cap = cap
        self.reserved = [w for w in self.workers if w.kind == "reserved"]
        self.harvested = [w for w in self.workers if w.harvested]

    @cached_property
    def held(self) -> dict[int, list[SampleView]]:
        """By worker id, what it holds."""
        held: dict[int, list[SampleView]] = {}
        for sample in self._samples:
            if sample.worker_id and not sample.done:
                held.setdefault(sample.worker_id, []).append(sample)
        return held

    @cached_property
    def table(self) -> LengthTable:
        found, lengths = self._places, self._forecast.capped(self._cap)
        standing = found.at[self._unfinished.lengths > 0]
        return lengths.table_of(np.bincount(standing, minlength=len(lengths.edges) + 1).tolist())

    @cached_property
    def _places(self) -> lengths_of_step.Places:
        lengths = self._forecast.capped(self._cap)
        return lengths_of_step.places(lengths.cap, lengths.edges, lengths.logs, self._unfinished.lengths)

    @cached_property
    def _present(self) -> lengths_of_step.Present:
        return lengths_of_step.Present(self.table, self._unfinished.lengths, self._places)

    @cached_property
    def expected(self) -> dict[int, float]:
        """Expected tokens to come of each sample that is not done."""
        left = self._unfinished
        rest = (
            lengths_of_step.expected(self._present, [(self.beliefs[g], n) for g, n in left.groups])
            - left.lengths
        )
        return dict(zip(left.ids.tolist(), rest.tolist(), strict=True))

    @cached_property
    def imputed(self) -> NDArray[np.float64]:
        """One plausible number of tokens to come of each sample that is not done, group after group."""
        groups = [(group_id, self.beliefs[group_id], count) for group_id, count in self._unfinished.groups]
        return lengths_of_step.impute(self._present, groups) - self._unfinished.lengths

    @cached_property
    def _unfinished(self) -> _Unfinished:
        groups = [(group_id, group.running) for group_id, group in self.groups.items() if group.running]
        views = [sample for _, running in groups for sample in running]
        return _Unfinished(
            views,
            [(group_id, len(running)) for group_id, running in groups],
            np.array([sample.id for sample in views], np.int64),
            np.array([sample.length for sample in views], np.int64),
        )

    def longest(self, sample: SampleView) -> float:
        """Tokens to come that this sample exceeds in one of ten cases only."""
        return self.table.at(self.beliefs[sample.group_id], sample.length, SAFE) - sample.length

    @cached_property
    def beliefs(self) -> dict[int, Belief]:
        """Of each group that is not whole. Solved again when a sibling finished, one has grown by about a quarter, or siblings are found
        to be more or less alike than they were."""
        left, known, likeness = self._unfinished, self._known, round(self.table.correlation, 2)
        grown = self._octaves_of(left.lengths)
        found: dict[int, Belief] = {}
        stale: list[tuple[int, object]] = []
        asked: list[tuple[int, int, Sequence[int]]] = []
        first = 0
        for group_id, count in left.groups:
            finished = self.groups[group_id].finished
            stop = first + count
            stamp = (len(finished), grown[first:stop].tobytes(), likeness)
            last = known.get(group_id)
            if last is not None and last[0] == stamp:
                found[group_id] = last[1]
            else:
                found[group_id] = _UNKNOWN  # so that all stay in their order
                stale.append((group_id, stamp))
                asked.append((first, stop, finished))
            first = stop
        if asked:
            solved = lengths_of_step.beliefs(self._present, asked)
            for (group_id, seen), belief in zip(stale, solved, strict=True):
                found[group_id] = belief
                known[group_id] = (seen, belief)
        return found

    def _octaves_of(self, lengths: NDArray[np.int64]) -> NDArray[np.int16]:
        if self._cap <= LONG:
            return _octaves(self._cap.bit_length())[lengths]
        return np.array([_octave(length) for length in lengths.tolist()], np.int16)

    # ---------------------------------------------------------------- engines

    def curve(self, worker: WorkerView) -> SpeedCurve:
        return self._forecast.curve(worker.kind, worker.gpus)

    def ready_in_s(self, worker: WorkerView) -> float:
        """How long a loading engine will take yet: the mean of such loads, and a share of its delay once it is late."""
        first = not worker.warm or worker.joined_at >= self.step.submitted_at
        since = worker.joined_at if first else self.step.submitted_at
        usual, spent = (
            self._forecast.start.value if first else self._forecast.load_s(worker.kind),
            self.now - since,
        )
        return max(usual - spent, LATE * spent, 0.0)

    @cached_property
    def fair_share(self) -> int:
        """Samples that each engine would hold if those that are about to be ready held as many; all, where to wait does not pay."""
        serving = sum(w.serves for w in self.workers)
        waits = [
            self.ready_in_s(w) for w in self.workers if not w.serves and not w.bounded and w.status in LOADING
        ]
        coming = [wait_s for wait_s in waits if wait_s <= self._coming_s]
        outstanding = sum(len(group.running) for group in self.groups.values())
        if not coming:
            return outstanding
        share = -(-outstanding // max(1, serving + len(coming)))
        return share if self._crowd_s(outstanding, serving, share) > max(coming) else outstanding

    @property
    def keeps_free(self) -> bool:
        """Whether slots are kept free for engines that are about to be ready."""
        return self.fair_share < sum(len(group.running) for group in self.groups.values())

    def _crowd_s(self, outstanding: int, serving: int, share: int) -> float:
        """Seconds by which a completion takes longer where those that serve take all that fit, and not this share."""
        like = next((w for w in self.workers if w.serves), None)
        if like is None:
            return math.inf
        curve, length = self.curve(like), self.table.expected(Belief(), 0)
        crowd = min(like.max_batch, -(-outstanding // serving))
        more = max(0, crowd - share) * (
            curve.per_sample + curve.per_token * (self._forecast.prompt.value + length / 2)
        )
        return more * length

    @cached_property
    def _coming_s(self) -> float:
        """Who waits for longer than a whole completion takes had better begin."""
        like = self.harvested or self.reserved
        return (
            min(COMING_S, self.curve(like[0]).base * self.table.expected(Belief(), 0)) if like else COMING_S
        )

    @cached_property
    def delivered_tokens(self) -> tuple[int, float]:
        """Whole groups, and their tokens."""
        whole = [group for group in self.groups.values() if not group.running]
        return len(whole), sum(group.done_tokens for group in whole)

    @cached_property
    def _running(self) -> tuple[Samples, NDArray[np.bool_]]:
        """What is not done, with imputed lengths in columns, and whether it waits. Group after group."""
        left = self._unfinished
        groups = sorted(group_id for group_id, _ in left.groups)
        place = np.repeat(
            np.searchsorted(
                np.array(groups, np.int64), np.array([group_id for group_id, _ in left.groups], np.int64)
            ),
            [count for _, count in left.groups],
        )
        have = np.array([sample.prompt_tokens for sample in left.views], np.float64) + left.lengths
        waits = np.array([not sample.worker_id for sample in left.views], np.bool_)
        return Samples(have, self.imputed, place, tuple(groups)), waits

    def in_order(self, queued: Sequence[int] = ()) -> Samples:
        """What is not done, with imputed lengths: what engines hold, then what waits, in the order of `queued` where it is there."""
        (all_, waits), ids = self._running, self._unfinished.ids
        late = len(queued)
        turn = np.full(len(ids), late)
        if late:
            turns = {sample_id: place for place, sample_id in enumerate(queued)}
            turn = np.array([turns.get(sample_id, late) for sample_id in ids.tolist()])
        order = np.lexsort((ids, turn, waits))
        return Samples(all_.have[order], all_.rest[order], all_.group[order], all_.groups)

    def situation(self, trained_tokens: float, queued: Sequence[int] = (), limit: float = NEVER) -> Situation:
        """The step under way. `trained_tokens`: about how much of the whole groups was trained. `queued`: the order of what waits."""
        reserved, harvested = self.reserved, self.harvested
        serving = [w for w in harvested if w.serves]
        like = harvested or reserved
        gpus = like[0].gpus if like else 1
        curve = self._forecast.curve("harvested", gpus)
        trainer_gpus = sum(w.gpus for w in reserved)
        groups, tokens = self.delivered_tokens
        ready = max(0.0, tokens - trained_tokens)
        awake = self.step.reserved_awake
        loading = (
            [self.ready_in_s(w) for w in reserved if not w.serves and w.status in LOADING] if awake else []
        )
        slots = max([w.max_batch for w in self.workers if not w.bounded], default=1)
        return Situation(
            reserved=EnginePool(
                self.curve(reserved[0]) if reserved else curve,
                float(len(reserved)),
                slots,
                cache_of(reserved),
            ),
            harvested=EnginePool(curve, float(len(serving)), slots, cache_of(harvested)),
            costs=self._forecast.costs(curve, gpus, trainer_gpus),
            samples=self.in_order(queued),
            limit=limit,
            awake=awake,
            arrivals=self._arrivals(),
            loss_per_s=self._forecast.loss_per_s(gpus, self.now),
            ready_groups=min(groups, round(groups * ready / tokens)) if tokens else 0,
            ready_tokens=ready,
            group_tokens={
                group_id: group.done_tokens for group_id, group in self.groups.items() if group.running
            },
            reserved_after_s=max(loading, default=0.0),
            closed=not awake and self.step.finished > self.step.before and self.step.decided != "open",
        )

    def _arrivals(self) -> tuple[tuple[float, float], ...]:
        """When how many harvested engines more will serve, to the second: a thousand that load would all be asked about one by one."""
        counts = Counter(
            math.ceil(self.ready_in_s(w)) for w in self.harvested if not w.serves and w.status in LOADING
        )
        return tuple((float(after_s), float(more)) for after_s, more in sorted(counts.items()))


def cache_of(workers: Iterable[WorkerView]) -> float:
    """Tokens that each of these engines' caches holds, where they said so."""
    return float(max((worker.cache_tokens for worker in workers), default=0)) or math.inf


def _octave(length: int) -> int:
    """Grows by one each time that a length grows by about a quarter."""
    bits = max(length.bit_length(), 7)
    return bits * 4 + (length >> (bits - 3))


@functools.cache
def _octaves(bits: int) -> NDArray[np.int16]:
    """Of each length of so many bits: looked up for every sample at every look at a step."""
    return np.array([_octave(length) for length in range(1 << bits)], np.int16)


def whole_step(
    table: LengthTable,
    forecast: Forecast,
    samples: int,
    groups: int,
    reserved: EnginePool,
    harvested: EnginePool,
    costs: Costs,
) -> Situation:
    """A step that has not begun, of so many samples in so many groups, with lengths from the forecast."""
    each = max(1, samples // max(1, groups))
    drawn = impute(table, {group: GroupLengths(running=(0,) * each) for group in range(max(1, groups))})
    prompt = forecast.prompt.value
    waiting = tuple(Outstanding(prompt, rest, group) for group in sorted(drawn) for rest in drawn[group])
    return Situation(reserved=reserved, harvested=harvested, costs=costs, samples=waiting)
