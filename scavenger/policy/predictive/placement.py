"""Which queued sample goes where, from one decision to the next. Pure.

Boundary: which engine gets a sample; pure.

    anew     a look at every sample of the step: the order (`placement.order` or what `Service` finds better), each to the engine that
             would be done with it first; at a step's start, after a loss and every `RANKING_S`
    ranked   the next of that order to the emptiest engine: what a free slot costs. Who came back since (an engine fell asleep or was
             lost) goes first, until the order is found anew, which a pause bounds
    at once  the samples of an engine that was lost with very many

Owns when which of them is done, and how many leases each engine gets by the last look.

Who of those that wait is next: an order that was found once and serves for a while. Pure.

    renew    the order of all that wait, found by expected lengths (`placement.order`, `placement.in_turn`)
    admit    who came since, without finding it anew: who was begun goes first (its group has waited most), who is new goes last
    next     who waits yet, in that order

An order costs a look at every sample of the step, and a slot comes free with every sample that ends. Owns the order and who is known to be
in it; knows no engine, no length, and no clock but the time of the last `renew`.

In which order queued samples go, and how many an engine serves at a time, from one decision to the next. Pure.

Two orders are tried (`placement.order`, the longest first, and `placement.in_turn`, group after group), each with several limits, and what
`seed_window.serve` predicts to end the step soonest is kept until the fleet or the window is another. That costs ten solutions of the
window, and no sample is placed meanwhile: a run of short steps decides it for several steps at once. Owns that memory, and nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

from scavenger.policy import placement
from scavenger.policy import seed_window as windows
from scavenger.policy.forecast.lengths import Belief
from scavenger.policy.interface import (
    Fact,
    RunView,
    SamplePlacement,
    StepSubmitted,
    WindowMoved,
    WorkerJoined,
    WorkerLost,
    WorkerReady,
)
from scavenger.policy.placement import QueuedSample, QueuedSamples, Ranked
from scavenger.policy.predictive.policy_forecast import PolicyForecast
from scavenger.policy.predictive.settings import PredictiveSettings
from scavenger.policy.predictive.view import Picture

_NOWHERE: Set[str] = frozenset()


class Ranking:
    """`at`: when the order was found; -inf: never, or a step began since. `order`: of ids, who waits no more included."""

    def __init__(self) -> None:
        self.at = -math.inf
        self.order: list[int] = []
        self._known: set[int] = set()
        self._avoid: dict[
            int, Set[str]
        ] = {}  # where a sample must not go: it may have failed there since it was ranked
        self._came: object = None  # `RunView.came` for which all that wait are known to be in the order
        self._first = 0  # those before this one wait no more

    def forget(self) -> None:
        """Another step: the order says nothing of it."""
        self.at = -math.inf

    def renew(self, ranked: Iterable[Ranked], came: object, now: float) -> None:
        """The order of those that wait. `came`: `RunView.came` if these are all, else None."""
        jobs = [one.job for one in ranked]
        self.order = [job.sample_id for job in jobs]
        self._known = set(self.order)
        self._avoid = {job.sample_id: job.avoid for job in jobs if job.avoid}
        self._came, self._first, self.at = came, 0, now

    def has_all(self, view: RunView) -> bool:
        """Whether all that wait are in the order. They were, and no sample came since, in all but a few cases."""
        came = view.came
        if came != self._came:
            waiting = list(view.waiting())
            if not self._known.issuperset(one.sample_id for one in waiting):
                return False
            self._avoid = {one.sample_id: one.avoid for one in waiting if one.avoid}
            self._came, self._first = came, 0  # who was placed may wait again
        return True

    def admit(self, view: RunView) -> int:
        """Put who came since where it goes, and return how many those are."""
        new = [sample for sample in view.queued if sample.id not in self._known]
        begun = [sample.id for sample in new if sample.moves or sample.length]
        fresh = [sample.id for sample in new if not (sample.moves or sample.length)]
        self.order = [*begun, *self.order, *fresh]
        self._known.update(begun, fresh)
        self._came = None
        self.has_all(view)
        return len(new)

    def next(self, view: RunView) -> Iterator[QueuedSamples]:
        """Who waits, first come first. Only for an order that has all that wait."""
        order, first = self.order, self._first
        while first < len(order) and not view.is_waiting(order[first]):
            first += 1
        self._first = first
        rest = (order[at] for at in range(first, len(order)))
        return (
            QueuedSamples(sample_id, self._avoid.get(sample_id, _NOWHERE))
            for sample_id in rest
            if view.is_waiting(sample_id)
        )


#: It is decided no sooner again than this, also where a step has begun since.
AGAIN_S = 10.0
#: The place of that order among the two. Once reserved engines train it is taken where both end the step as soon: groups are whole sooner.
IN_TURN = 1


@dataclass(slots=True)
class Service:
    """`by`: what was decided last; a new step begins with it. `changed`: the fleet, the window or the step is another."""

    by: windows.ServingOrder = field(default_factory=windows.ServingOrder)
    changed: bool = True
    _at: float = -math.inf
    _begun: bool = False  # a step for which nothing was said yet

    def begin_step(self) -> None:
        self.changed = self._begun = True

    def queue(
        self,
        picture: Picture,
        longest: list[Ranked],
        jobs: Sequence[QueuedSample],
        trained: float,
        now: float,
    ) -> list[Ranked]:
        """The order in which these go now. `longest`: the longest first; `trained`: tokens of whole groups that are trained."""
        # What reserved engines held is about to be queued, and is what there is to put in order.
        coming = not picture.step.reserved_awake and any(
            worker.id in picture.held for worker in picture.reserved
        )
        if self.changed and picture.step.purpose == "train" and picture.reserved and not coming:
            if now >= self._at + AGAIN_S:
                in_turn = _in_turn(picture, jobs)
                orders = [[ranking.job.sample_id for ranking in order] for order in (longest, in_turn)]
                usual = self.by if picture.step.reserved_awake else replace(self.by, order=IN_TURN)
                self.by = windows.serve([picture.situation(trained, order) for order in orders], usual)
                self.changed, self._at = False, now
            elif self._begun:
                self.by = windows.carried(picture.situation(trained), self.by)
            self._begun = False
        return _in_turn(picture, jobs) if self.by.order else longest


def _in_turn(picture: Picture, jobs: Sequence[QueuedSample]) -> list[Ranked]:
    expected = picture.expected
    to_come = {
        group_id: sum([expected[s.id] for s in group.running]) for group_id, group in picture.groups.items()
    }
    return placement.in_turn(jobs, to_come)


#: An order of queued samples serves this long.
RANKING_S = 10.0
#: So many samples of a lost engine are not weighed one by one: they go on at once, evenly, and move again where that gains something.
MANY_LOST = 256


class Placer:
    """One run's. `service`: how many samples at a time an engine serves, and in which order."""

    def __init__(self, settings: PredictiveSettings, policy_forecast: PolicyForecast) -> None:
        self._settings, self._policy_forecast = settings, policy_forecast
        self.service = Service()
        self.ranking = Ranking()
        self._limits: dict[int, int] = {}
        self._share = 0
        self._kept_free = False  # slots, for engines that were about to be ready
        self._fewer = False  # engines than when the limits were made
        self._lost_at, self._lost = -math.inf, 0  # when engines were lost last, with how many samples

    def observe(self, fact: Fact, now: float, *, begins: bool) -> None:
        """`begins`: a step begins with this."""
        match fact:
            case StepSubmitted() if begins:
                self.service.begin_step()
                self.ranking.forget()
            case WindowMoved():
                self.service.changed = True
            case WorkerReady() | WorkerLost() | WorkerJoined():
                self.service.changed = True
                if isinstance(fact, WorkerLost):
                    self._fewer = True
                    self._lost = fact.samples + (self._lost if self._lost_at == now else 0)
                    self._lost_at = now

    def place(self, view: RunView, now: float) -> Sequence[SamplePlacement]:
        # The limits were made for engines of which one is lost, or for some that did not come: samples would wait beside free slots.
        self._fewer |= self._kept_free and now >= self.ranking.at + RANKING_S
        anew = self._fewer and now >= self.ranking.at + self._policy_forecast.pause_s()
        free = [s for s in view.slots() if s.leases < (s.max_batch if anew else self._limit(s))]
        if not free:
            return ()
        if now == self._lost_at and self._lost >= MANY_LOST:
            why = f"engines were lost with {self._lost} samples at once: to the emptiest"
            moved = itertools.islice(view.waiting(), self._lost)  # what has tokens comes first
            return [
                SamplePlacement(sample, worker, why)
                for sample, worker in placement.place(moved, self._within_limits(free))
            ]
        if anew or now >= self.ranking.at + RANKING_S:
            return self._anew(view, now)
        if self.ranking.has_all(view):
            return self._ranked(view, free, "next in the ranking")
        if now >= self.ranking.at + self._policy_forecast.pause_s():
            return self._anew(view, now)
        came = self.ranking.admit(view)
        return self._ranked(view, free, f"next in the ranking, which {came} joined")

    # ---------------------------------------------------------------- by the order that is known

    def _limit(self, slots: placement.Slots) -> int:
        """Leases that a worker gets by the last look; one that was not there then gets the share that was kept for it."""
        known = self._limits.get(slots.worker_id, self._share or slots.max_batch)
        return int(min(slots.max_batch, known, self.service.by.limit))

    def _within_limits(self, free: Sequence[placement.Slots]) -> list[placement.Slots]:
        return [placement.Slots(s.worker_id, s.leases, self._limit(s), s.node) for s in free]

    def _ranked(self, view: RunView, free: Sequence[placement.Slots], why: str) -> list[SamplePlacement]:
        """A slot or two came free: the next of the order, to the emptiest."""
        placed = placement.place(self.ranking.next(view), self._within_limits(free))
        return [
            SamplePlacement(sample, worker, f"{why}, to the emptiest engine") for sample, worker in placed
        ]

    # ---------------------------------------------------------------- anew

    def _anew(self, view: RunView, now: float) -> list[SamplePlacement]:
        picture = self._policy_forecast.fresh_picture(view, now)
        self._policy_forecast.changed()
        expected, queued = picture.expected, view.queued
        jobs = [
            placement.QueuedSample(
                s.id, s.group_id, s.prompt_tokens + s.length, expected[s.id], s.length > 0, s.avoid
            )
            for s in queued
            if s.id in expected
        ]
        ranked = self._order(picture, jobs, now)
        self.ranking.renew(ranked, view.came if len(jobs) == len(queued) else None, now)
        self._fewer = False
        engines = self._engines_of(picture)
        self._limits = {engine.worker_id: engine.limit for engine in engines}
        self._share = picture.fair_share
        self._kept_free = picture.keeps_free
        return [
            SamplePlacement(sample, worker, why) for sample, worker, why in placement.assign(ranked, engines)
        ]

    def _order(self, picture: Picture, jobs: Sequence[placement.QueuedSample], now: float) -> list[Ranked]:
        longest = placement.order(jobs)
        return (
            self.service.queue(picture, longest, jobs, self._policy_forecast.trained, now)
            if self._settings.limits
            else longest
        )

    def _engines_of(self, picture: Picture) -> list[placement.OpenEngine]:
        expected, plan, forecast = (
            picture.expected,
            self._policy_forecast.plan,
            self._policy_forecast.forecast,
        )
        open_s = plan.close_after_s if plan is not None and plan.awake else math.inf
        engines, share = [], picture.fair_share
        most = min(self.service.by.limit, 1 << 20)
        for worker in picture.workers:
            if not worker.serves:
                continue
            curve = picture.curve(worker)
            held = [(s.prompt_tokens + s.length, expected[s.id]) for s in picture.held.get(worker.id, ())]
            each = [have + rest / 2 for have, rest in held] or [
                forecast.prompt.value + picture.table.expected(Belief(), 0) / 2
            ]
            plateau = max(windows.LEAST_SERVED, curve.plateau(sum(each) / len(each), self._settings.plateau))
            if not forecast.paced_lately(worker.kind, worker.gpus):
                plateau = worker.max_batch
            engines.append(
                placement.OpenEngine(
                    worker_id=worker.id,
                    node=worker.node,
                    leases=worker.leases,
                    limit=int(
                        max(1, min(worker.max_batch, share, most, plateau, worker.best_batch or plateau))
                    ),
                    curve=curve,
                    cache=float(worker.cache_tokens) or math.inf,
                    longest=max([rest for _, rest in held], default=0.0),
                    work_s=curve.works_s(held),
                    context=sum(each) if held else 0.0,
                    open_s=open_s if worker.kind == "reserved" else math.inf,
                    reload_s=forecast.prefill_s(curve),
                )
            )
        return engines
