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

import numpy as np
from numpy.typing import NDArray

from scavenger.policy.forecast import lengths_of_step
from scavenger.policy.forecast.lengths import Belief, GroupLengths, LengthTable, impute
from scavenger.policy.forecast.service import Outstanding, Samples
from scavenger.policy.forecast.speed import SpeedCurve
from scavenger.policy.forecast.step import NEVER, Costs, EnginePool, Situation
from scavenger.policy.interface import RunView, SampleView, WorkerView
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

    def key(self) -> GroupLengths:
        return GroupLengths(tuple(self.finished), tuple([sample.length for sample in self.running]))


class Picture:
    """Everything is in order of ids."""

    def __init__(
        self, view: RunView, forecast: Forecast, now: float, beliefs: dict[int, tuple[object, Belief]]
    ) -> None:
        self.now = now
        self.step = view.step
        self.workers: Sequence[WorkerView] = view.workers
        self._forecast = forecast
        self._known = beliefs
        self.groups: dict[int, GroupProgress] = {}
        self.held: dict[int, list[SampleView]] = {}
        groups, held, cap = self.groups, self.held, 1
        for sample in view.samples:
            group = groups.get(sample.group_id)
            if group is None:
                group = groups[sample.group_id] = GroupProgress()
            if sample.done:
                group.finished.append(sample.length)
                group.done_tokens += sample.length + sample.prompt_tokens
                continue
            if sample.cap > cap:
                cap = sample.cap
            group.running.append(sample)
            worker_id = sample.worker_id
            if worker_id:
                if worker_id in held:
                    held[worker_id].append(sample)
                else:
                    held[worker_id] = [sample]
        self._cap = cap
        self.reserved = [w for w in self.workers if w.kind == "reserved"]
        self.harvested = [w for w in self.workers if w.kind != "reserved"]

    @cached_property
    def table(self) -> LengthTable:
        lengths = self._forecast.capped(self._cap)
        return lengths.table(
            [sample.length for group in self.groups.values() for sample in group.running if sample.length]
        )

    @cached_property
    def expected(self) -> dict[int, float]:
        """Expected tokens to come of each sample that is not done."""
        lengths = lengths_of_step.expected(
            self.table, [(belief, self._keys[group].running) for group, belief in self.beliefs.items()]
        )
        views, have = self._unfinished
        return dict(zip([sample.id for sample in views], (lengths - have).tolist(), strict=True))

    @cached_property
    def imputed(self) -> NDArray[np.float64]:
        """One plausible number of tokens to come of each sample that is not done, group after group."""
        lengths = lengths_of_step.impute(
            self.table, [(group, belief, self._keys[group]) for group, belief in self.beliefs.items()]
        )
        return lengths - self._unfinished[1]

    @cached_property
    def _unfinished(self) -> tuple[list[SampleView], NDArray[np.float64]]:
        """What is not done, group after group, and the tokens that each has."""
        views = [sample for group in self.groups.values() for sample in group.running]
        return views, np.array([sample.length for sample in views], np.float64)

    @cached_property
    def _keys(self) -> dict[int, GroupLengths]:
        return {group_id: self.groups[group_id].key() for group_id in self.beliefs}

    def longest(self, sample: SampleView) -> float:
        """Tokens to come that this sample exceeds in one of ten cases only."""
        return self.table.at(self.beliefs[sample.group_id], sample.length, SAFE) - sample.length

    @cached_property
    def beliefs(self) -> dict[int, Belief]:
        """Of each group that is not whole."""
        return {
            group_id: self._belief(group_id, group)
            for group_id, group in self.groups.items()
            if group.running
        }

    def _belief(self, group_id: int, group: GroupProgress) -> Belief:
        """Solved again when a sibling finished, or one has grown by about a quarter."""
        if self._cap <= LONG:
            octaves = _octaves(self._cap.bit_length())
            grown = tuple([octaves[s.length] for s in group.running])
        else:
            grown = tuple([_octave(s.length) for s in group.running])
        stamp = (len(group.finished), grown, self._likeness)
        known = self._known.get(group_id)
        if known is not None and known[0] == stamp:
            return known[1]
        belief = self.table.belief(group.key())
        self._known[group_id] = (stamp, belief)
        return belief

    @cached_property
    def _likeness(self) -> float:
        return round(self.table.correlation, 2)

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
        waits = [self.ready_in_s(w) for w in self.workers if not w.serves and w.status in LOADING]
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
    def _running(self) -> tuple[list[SampleView], Samples, NDArray[np.int64], NDArray[np.bool_]]:
        """What is not done: views, with imputed lengths in columns, ids, and whether it waits. Group after group."""
        views, lengths = self._unfinished
        groups, place = np.unique(
            np.array([sample.group_id for sample in views], np.int64), return_inverse=True
        )
        have = np.array([sample.prompt_tokens for sample in views], np.float64) + lengths
        waits = np.array([not sample.worker_id for sample in views], np.bool_)
        ids = np.array([sample.id for sample in views], np.int64)
        return views, Samples(have, self.imputed, place, tuple(groups.tolist())), ids, waits

    def in_order(self, queued: Sequence[int] = ()) -> Samples:
        """What is not done, with imputed lengths: what engines hold, then what waits, in the order of `queued` where it is there."""
        views, all_, ids, waits = self._running
        late = len(queued)
        turn = np.full(len(ids), late)
        if late:
            turns = {sample_id: place for place, sample_id in enumerate(queued)}
            turn = np.array([turns.get(sample.id, late) for sample in views])
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
        slots = max([w.max_batch for w in self.workers], default=1)
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
def _octaves(bits: int) -> tuple[int, ...]:
    """Of each length of so many bits: looked up for every sample at every look at a step."""
    return tuple(_octave(length) for length in range(1 << bits))


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
