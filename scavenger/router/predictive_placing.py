"""Which queued sample goes where, from one decision to the next. Pure.

    anew     a look at every sample of the step: the order (`placement.order` or what `Service` finds better), each to the engine that
             would be done with it first; at a step's start, after a loss and every `RANKING_S`
    ranked   the next of that order to the emptiest engine: what a free slot costs. Who came back since (an engine fell asleep or was
             lost) goes first, until the order is found anew, which a pause bounds
    at once  the samples of an engine that was lost with very many

Owns when which of them is done, and how many leases each engine gets by the last look.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from scavenger.router import offload, placement
from scavenger.router import window as windows
from scavenger.router.forecast_lengths import Belief
from scavenger.router.placement import Ranked
from scavenger.router.policy import (
    Fact,
    Placement,
    RunView,
    StepSubmitted,
    WindowMoved,
    WorkerJoined,
    WorkerLost,
    WorkerReady,
    WorkerView,
)
from scavenger.router.predictive_outlook import Outlook
from scavenger.router.predictive_serving import Service
from scavenger.router.predictive_settings import Settings
from scavenger.router.predictive_view import Picture
from scavenger.router.ranking import Ranking

#: An order of queued samples serves this long.
RANKING_S = 10.0
#: So many samples of a lost engine are not weighed one by one: they go on at once, evenly, and move again where that gains something.
MANY_LOST = 256
#: With so many seconds of work in hand the trainer lacks nothing.
FED_S = 30.0


class Placer:
    """One run's. `service`: how many samples at a time an engine serves, and in which order."""

    def __init__(self, settings: Settings, outlook: Outlook) -> None:
        self._settings, self._outlook = settings, outlook
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

    def place(self, view: RunView, now: float) -> Sequence[Placement]:
        # The limits were made for engines of which one is lost, or for some that did not come: samples would wait beside free slots.
        self._fewer |= self._kept_free and now >= self.ranking.at + RANKING_S
        anew = self._fewer and now >= self.ranking.at + self._outlook.pause_s()
        free = [s for s in view.slots() if s.leases < (s.max_batch if anew else self._limit(s))]
        if not free:
            return ()
        if now == self._lost_at and self._lost >= MANY_LOST:
            why = f"engines were lost with {self._lost} samples at once: to the emptiest"
            moved = itertools.islice(view.waiting(), self._lost)  # what has tokens comes first
            return [Placement(sample, worker, None, why) for sample, worker in placement.place(moved, self._within_limits(free))]
        if anew or now >= self.ranking.at + RANKING_S:
            return self._anew(view, now)
        if self.ranking.has_all(view):
            return self._ranked(view, free, "next in the ranking")
        if now >= self.ranking.at + self._outlook.pause_s():
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

    def _ranked(self, view: RunView, free: Sequence[placement.Slots], why: str) -> list[Placement]:
        """A slot or two came free: the next of the order, to the emptiest."""
        placed = placement.place(self.ranking.next(view), self._within_limits(free))
        return [Placement(sample, worker, None, f"{why}, to the emptiest engine") for sample, worker in placed]

    # ---------------------------------------------------------------- anew

    def _anew(self, view: RunView, now: float) -> list[Placement]:
        picture = self._outlook.fresh_picture(view, now)
        self._outlook.changed()
        expected, queued = picture.expected, view.queued
        jobs = [
            placement.Job(s.id, s.group_id, s.prompt_tokens + s.length, expected[s.id], s.length > 0, s.avoid)
            for s in queued
            if s.id in expected
        ]
        ranked = self._order(picture, jobs, now)
        self.ranking.renew(ranked, view.came if len(jobs) == len(queued) else None, now)
        self._fewer = False
        engines = {engine.worker_id: engine for engine in self._engines_of(picture)}
        self._limits, self._share = {worker_id: engine.limit for worker_id, engine in engines.items()}, picture.fair_share
        self._kept_free = picture.keeps_free
        leases = placement.assign(ranked, engines.values())
        have = {job.sample_id: job for job in jobs}
        workers = {w.id: w for w in picture.workers}
        found = []
        for sample_id, worker_id, why in leases:
            bound = self._bound(have[sample_id], engines[worker_id], workers[worker_id], len(engines))
            why += f"; {bound.reason}" if bound is not None else ""
            found.append(Placement(sample_id, worker_id, bound.tokens if bound is not None else None, why))
        return found

    def _order(self, picture: Picture, jobs: Sequence[placement.Job], now: float) -> list[Ranked]:
        expected = picture.expected
        probes = self._settings.probes
        begun = {
            g for g, group in picture.groups.items() if not probes or group.finished or any(s.worker_id or s.length for s in group.running)
        }
        to_whole = {g: max((expected[s.id] for s in group.running), default=0.0) for g, group in picture.groups.items()}
        longest = placement.order(jobs, begun, to_whole, self._starved(picture) if self._settings.feed else 0.0)
        return self.service.queue(picture, longest, jobs, self._outlook.trained, now) if self._settings.limits else longest

    def _starved(self, picture: Picture) -> float:
        """How much the trainer lacks whole groups: 0 while it does not train, and while it has half a minute's work."""
        if picture.step.reserved_awake or not picture.reserved:
            return 0.0
        return max(0.0, 1 - self._outlook.ready_s(picture) / FED_S)

    def _engines_of(self, picture: Picture) -> list[placement.Engine]:
        expected, plan, forecast = picture.expected, self._outlook.plan, self._outlook.forecast
        open_s = plan.close_after_s if plan is not None and plan.awake else math.inf
        engines, share = [], picture.fair_share
        most = min(self.service.by.limit, 1 << 20)
        for worker in picture.workers:
            if not worker.serves:
                continue
            curve = picture.curve(worker)
            held = [(s.prompt_tokens + s.length, expected[s.id]) for s in picture.held.get(worker.id, ())]
            each = [have + rest / 2 for have, rest in held] or [forecast.prompt.value + picture.table.expected(Belief(), 0) / 2]
            plateau = max(windows.LEAST_SERVED, curve.plateau(sum(each) / len(each), self._settings.plateau))
            if not forecast.paced_lately(worker.kind, worker.gpus):
                plateau = worker.max_batch
            engines.append(
                placement.Engine(
                    worker_id=worker.id,
                    node=worker.node,
                    leases=worker.leases,
                    limit=int(max(1, min(worker.max_batch, share, most, plateau, worker.best_batch or plateau))),
                    curve=curve,
                    cache=float(worker.cache_tokens) or math.inf,
                    longest=max((rest for _, rest in held), default=0.0),
                    work_s=sum(curve.work_s(have, rest) for have, rest in held),
                    context=sum(each) if held else 0.0,
                    open_s=open_s if worker.kind == "reserved" else math.inf,
                    reload_s=forecast.prefill_s(curve),
                )
            )
        return engines

    def _bound(self, job: placement.Job, engine: placement.Engine, worker: WorkerView, engines: int) -> offload.Bound | None:
        """Only where a lease cannot be asked back later, and where there is another engine to go to."""
        if not self._settings.bounds or worker.yields or engines < 2:
            return None
        batch = max(1, engine.leases)
        price = offload.Price(engine.reload_s, self._outlook.forecast.transfer_s, self._settings.margin)
        return offload.lease_bound(job.have, job.rest, engine.curve.step_s(batch, engine.context), batch, price)
