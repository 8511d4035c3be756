"""The policy that predicts: window, placement, rebalancing, tails and fleet size out of one forecast. Pure.

    facts  --> Forecast (what was learned)
    view   --> Picture  (what everybody has, and what is to come)
                 |-- window.solve            whether reserved engines go on generating
                 |-- placement.order/assign  which queued sample goes where
                 |-- window.serve            in which order, and how many an engine serves at a time
                 |-- offload.rebalance/merge which running sample changes engines
                 '-- window.size_fleet, autoscale   how many harvested engines

A run asks often: what is dear is done again only when the fleet or the step changed, or after a while. Every controller can be switched off
(`Settings`) and is then `Standard`. Owns when to think again, and the memory of one step. Every answer says what it was made of.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from scavenger.router import offload, placement
from scavenger.router import window as windows
from scavenger.router.forecast import Forecast
from scavenger.router.forecast_lengths import Belief
from scavenger.router.forecast_speed import Curve
from scavenger.router.forecast_step import StepModel
from scavenger.router.placement import Ranked
from scavenger.router.policy import (
    Fact,
    Move,
    Placement,
    RunView,
    SampleFinished,
    Standard,
    StepFinished,
    StepSubmitted,
    TrainedGroups,
    WindowDecision,
    WindowMoved,
    WorkerJoined,
    WorkerLost,
    WorkerReady,
    WorkerView,
)
from scavenger.router.predictive_fleet import FleetSizer
from scavenger.router.predictive_serving import Service
from scavenger.router.predictive_settings import Settings
from scavenger.router.predictive_view import Picture

#: Nothing is solved again sooner than this, whatever happened (but a new step); nor than this share of a step, where that is less.
PAUSE_S, PAUSE_SHARE = 3.0, 1 / 40
#: A window that ends this soon ends now: asking again would take as long.
SOON_S = 1.0
#: Ask again after this share of the time to the window's end, but within these.
AGAIN_SHARE, AGAIN_MIN_S, AGAIN_MAX_S = 0.5, 4.0, 60.0
#: A ranking of queued samples serves this long.
RANKING_S = 10.0
#: No sample is moved onto reserved engines that will sleep within this.
OPEN_LEAST_S = 30.0


#: So many samples of a lost engine are not weighed one by one: they go on at once, evenly, and move again where that gains something.
MANY_LOST = 256


class Predictive:
    """A `RouterPolicy`. One for each run; what it has learned goes with it."""

    def __init__(self, name: str, settings: Settings | None = None, forecast: Forecast | None = None) -> None:
        self.name = name
        self.settings = settings or Settings()
        self.forecast = forecast or Forecast()
        self._standard = Standard()
        self._beliefs: dict[int, tuple[object, Belief]] = {}
        self._decision: WindowDecision | None = None
        self._plan: windows.Plan | None = None
        self._solved_at = self._rebalanced_at = -math.inf
        self._new_step = self._changed = self._shifted = True
        self._step, self._unfinished = -1, 0
        self._ranked: list[Ranked] = []
        self._ranked_ids: frozenset[int] = frozenset()
        self._ranked_at = -math.inf
        self._ranked_came: object = None  # `RunView.came` for which the ranking is known to hold all that wait
        self._ranked_from = 0  # those before this one in the ranking wait no more
        self._service = Service()
        self._limits: dict[int, int] = {}
        self._shared: Picture | None = None  # of this moment, for the next who asks in it
        self._share = 0
        self._serving = 0
        self._trained = 0.0
        self._trained_at: float | None = None
        self._lost_at, self._lost = -math.inf, 0  # when engines were lost last, with how many samples
        self._fleet = FleetSizer(self.settings.least_saving, self.settings.rules, self.settings.price)
        self._asked: tuple[int, str] | None = None
        self._retired: set[int] = set()
        self._left: dict[int, frozenset[int]] = {}  # sample -> engines that it was taken from in this step

    @property
    def every_s(self) -> float:
        return self.settings.every_s if self.settings.rebalance or self.settings.tails else math.inf

    def _within(self, seconds: float) -> float:
        """A pause that suits steps of minutes, shortened for a run whose steps take seconds."""
        last = self.forecast.last
        return seconds if last is None else min(seconds, seconds / PAUSE_S * PAUSE_SHARE * last.seconds)

    # ---------------------------------------------------------------- facts

    def observe(self, fact: Fact, now: float) -> None:
        self.forecast.observe(fact, now)
        self._shared = None
        match fact:
            case StepSubmitted():
                self._begin_step(fact)
            case SampleFinished() if fact.step == self._step:
                self._unfinished -= 1
                self._new_step |= self._unfinished == 0  # the window ends at once
            case WindowMoved():
                self._changed = self._service.changed = True
                self._trained_at = None if fact.awake else now + self.forecast.sleep_s
            case TrainedGroups() if fact.step == self._step:
                self._trained = float(fact.tokens)
                self._trained_at = now if self._trained_at is not None else None
            case WorkerReady() | WorkerLost() | WorkerJoined():
                self._changed = self._shifted = self._service.changed = True
                if isinstance(fact, WorkerLost):
                    self._lost = fact.samples + (self._lost if self._lost_at == now else 0)
                    self._lost_at = now
                    self._retired.clear()  # the load of those that are left is another
            case StepFinished() if fact.purpose == "train":
                if self.forecast.last is not None and self.forecast.last.step == fact.step:
                    self._fleet.step_ended(self.forecast.last.wait)

    def _begin_step(self, fact: StepSubmitted) -> None:
        self._step, self._unfinished = fact.step, fact.samples
        self._new_step = self._changed = self._shifted = True
        self._decision = self._plan = None
        self._service.begin_step()
        self._beliefs.clear()
        self._retired.clear()
        self._left.clear()
        self._trained = 0.0
        self._ranked_at = -math.inf

    def _picture(self, view: RunView, now: float) -> Picture:
        if self._shared is not None and self._shared.now == now:
            return self._shared
        picture = self._shared = Picture(view, self.forecast, now, self._beliefs)
        if self._trained_at is not None and not picture.step.reserved_awake and now > self._trained_at:
            done = self._trained + (now - self._trained_at) / max(self._train_s(picture), 1e-12)
            self._trained, self._trained_at = min(picture.delivered_tokens[1], done), now
        return picture

    def _curve_of(self, picture: Picture) -> Curve:
        return self.forecast.curve("harvested", picture.harvested[0].gpus if picture.harvested else 1)

    def _train_s(self, picture: Picture) -> float:
        """Seconds to train a token."""
        engine_gpus = picture.harvested[0].gpus if picture.harvested else 1
        return self.forecast.costs(self._curve_of(picture), engine_gpus, sum(w.gpus for w in picture.reserved)).train_s

    # ---------------------------------------------------------------- window

    def window(self, view: RunView, now: float) -> WindowDecision | None:
        if not self.settings.window:
            return None
        known = self._decision
        if known is not None and not self._new_step:
            if now < known.again_at and not self._changed:
                return known
            pause_s = self._within(PAUSE_S)
            if now < self._solved_at + pause_s:
                return replace(known, again_at=self._solved_at + pause_s)
        self._decision = self._decide(view, now)
        self._solved_at, self._new_step, self._changed = now, False, False
        return self._decision

    def _decide(self, view: RunView, now: float) -> WindowDecision | None:
        step = view.step
        if step.purpose != "train" or not step.samples or not any(w.kind == "reserved" for w in view.workers):
            self._plan = None
            return None
        if step.finished >= step.samples:
            self._plan = None
            return WindowDecision(True, f"all {step.samples} samples of step {step.step} are done")
        picture = self._picture(view, now)
        queued = [ranking.job.sample_id for ranking in self._ranked]
        plan = self._plan = windows.solve(picture.situation(self._trained, queued, self._service.by.limit))
        awake = picture.step.reserved_awake
        why = f"step {step.step}: {plan.reason}" + (f"; {self._service.by.reason}" if self._service.by.reason else "")
        soon_s = self._within(SOON_S)
        if awake and plan.awake and plan.close_after_s <= soon_s:
            return WindowDecision(True, why, now + AGAIN_MAX_S)
        left = min(plan.until_s if plan.awake else plan.step_s, AGAIN_MAX_S / AGAIN_SHARE)
        again = min(AGAIN_MAX_S, max(self._within(AGAIN_MIN_S), AGAIN_SHARE * left))
        if plan.awake and plan.close_after_s < again:
            again = max(soon_s, plan.close_after_s)
        return WindowDecision(not plan.awake, why, now + again)

    # ---------------------------------------------------------------- placement

    def place(self, view: RunView, now: float) -> Sequence[Placement]:
        if not self.settings.placement:
            return self._standard.place(view, now)
        free = [s for s in view.slots() if s.leases < self._limit(s)]
        if not free:
            return ()
        if now == self._lost_at and self._lost >= MANY_LOST:
            why = f"engines were lost with {self._lost} samples at once: to the emptiest"
            moved = itertools.islice(view.waiting(), self._lost)  # what has tokens comes first
            return [Placement(sample, worker, None, why) for sample, worker in placement.place(moved, self._within_limits(free))]
        if now < self._ranked_at + RANKING_S and self._all_ranked(view):
            return self._place_ranked(view, free)
        return self._place_anew(view, now)

    def _all_ranked(self, view: RunView) -> bool:
        """Whether all that wait are in the ranking. They were, and nobody came since, in all but a few cases."""
        came = view.came
        if came != self._ranked_came:
            if not self._ranked_ids.issuperset(sample.sample_id for sample in view.waiting()):
                return False
            self._ranked_came, self._ranked_from = came, 0  # who was placed may wait again
        return True

    def _limit(self, slots: placement.Slots) -> int:
        """Leases that a worker gets by the last ranking; one that was not there then gets the share that was kept for it."""
        known = self._limits.get(slots.worker_id, self._share or slots.max_batch)
        return int(min(slots.max_batch, known, self._service.by.limit))

    def _within_limits(self, free: Sequence[placement.Slots]) -> list[placement.Slots]:
        return [placement.Slots(s.worker_id, s.leases, self._limit(s), s.node) for s in free]

    def _place_ranked(self, view: RunView, free: Sequence[placement.Slots]) -> list[Placement]:
        """A slot or two came free: the next of the ranking, to the emptiest."""
        ranked, first = self._ranked, self._ranked_from
        while first < len(ranked) and not view.is_waiting(ranked[first].job.sample_id):
            first += 1
        self._ranked_from = first
        rest = (ranked[at].job for at in range(first, len(ranked)))
        queue = (placement.Waiting(job.sample_id, job.avoid) for job in rest if view.is_waiting(job.sample_id))
        slots = self._within_limits(free)
        return [Placement(s, w, None, "next in the ranking, to the emptiest engine") for s, w in placement.place(queue, slots)]

    def _place_anew(self, view: RunView, now: float) -> list[Placement]:
        self._shared = None  # leases may have ended since it was made, at this very moment
        picture = self._picture(view, now)
        self._shared = None
        expected = picture.expected
        queued = view.queued
        jobs = [
            placement.Job(s.id, s.group_id, s.prompt_tokens + s.length, expected[s.id], s.length > 0, s.avoid)
            for s in queued
            if s.id in expected
        ]
        begun = {g for g, group in picture.groups.items() if group.finished or any(s.worker_id or s.length for s in group.running)}
        to_whole = {g: max((expected[s.id] for s in group.running), default=0.0) for g, group in picture.groups.items()}
        longest = placement.order(jobs, begun, to_whole, self._starved(picture))
        self._ranked = self._service.queue(picture, longest, jobs, self._trained, now) if self.settings.limits else longest
        self._ranked_ids, self._ranked_at = frozenset(job.sample_id for job in jobs), now
        self._ranked_came, self._ranked_from = view.came if len(jobs) == len(queued) else None, 0
        engines = {engine.worker_id: engine for engine in self._engines_of(picture)}
        self._limits, self._share = {worker_id: engine.limit for worker_id, engine in engines.items()}, picture.fair_share
        leases = placement.assign(self._ranked, engines.values())
        have = {job.sample_id: job for job in jobs}
        workers = {w.id: w for w in picture.workers}
        return [Placement(s, w, self._bound(have[s], engines[w], workers[w], len(engines)), why) for s, w, why in leases]

    def _starved(self, picture: Picture) -> float:
        """How much the trainer lacks whole groups: 0 while it does not train, and while it has half a minute's work."""
        if picture.step.reserved_awake or not picture.reserved:
            return 0.0
        return max(0.0, 1 - self._ready_s(picture) / OPEN_LEAST_S)

    def _engines_of(self, picture: Picture) -> list[placement.Engine]:
        expected = picture.expected
        open_s = self._plan.close_after_s if self._plan is not None and self._plan.awake else math.inf
        engines, share = [], picture.fair_share
        most = min(self._service.by.limit, 1 << 20)
        for worker in picture.workers:
            if not worker.serves:
                continue
            curve = picture.curve(worker)
            held = [(s.prompt_tokens + s.length, expected[s.id]) for s in picture.held.get(worker.id, ())]
            each = [have + rest / 2 for have, rest in held] or [self.forecast.prompt.value + self._mean(picture) / 2]
            plateau = curve.plateau(sum(each) / len(each), self.settings.plateau)
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
                    reload_s=self.forecast.prefill_s(curve),
                )
            )
        return engines

    def _mean(self, picture: Picture) -> float:
        """Expected tokens of a fresh answer."""
        return picture.table.expected(Belief(), 0)

    def _bound(self, job: placement.Job, engine: placement.Engine, worker: WorkerView, engines: int) -> int | None:
        """Only where a lease cannot be asked back later, and where there is another engine to go to."""
        if not self.settings.bounds or worker.yields or engines < 2:
            return None
        batch = max(1, engine.leases)
        step_s = engine.curve.step_s(batch, engine.context)
        return offload.lease_bound(job.have, job.rest, step_s, batch, self._price(engine.reload_s)).tokens

    def _price(self, prefill_s: float) -> offload.Price:
        return offload.Price(prefill_s, self.forecast.transfer_s, self.settings.margin)

    # ---------------------------------------------------------------- moves

    def rebalance(self, view: RunView, now: float) -> Sequence[Move]:
        if not (self.settings.rebalance or self.settings.tails) or now < self._rebalanced_at + self._within(PAUSE_S):
            return ()
        serving = len(view.slots())
        if now < self._rebalanced_at + self.settings.every_s and not self._shifted and serving == self._serving:
            return ()
        self._serving, step = serving, view.step
        if view.waits or step.finished >= step.samples:
            return ()  # what waits is placed first: it moves for nothing
        self._rebalanced_at, self._shifted = now, False
        picture = self._picture(view, now)
        loads = self._loads(picture, now)
        if len(loads) < 2:
            return ()
        price = self._price(self.forecast.prefill_s(loads[0].curve))
        shifts: Sequence[offload.Shift] = ()
        if self.settings.rebalance:
            shifts = offload.rebalance(loads, price, self._ready_s(picture))
        if not shifts and self.settings.tails:
            shifts = self._merge(picture, loads, price)
        if shifts:
            self._shared = None
        for shift in shifts:
            self._left[shift.sample_id] = self._left.get(shift.sample_id, frozenset()) | {shift.source}
        return [Move(shift.sample_id, shift.source, shift.target, shift.reason) for shift in shifts]

    def _loads(self, picture: Picture, now: float) -> list[offload.Load]:
        expected = picture.expected
        closes = self._plan is not None and self._plan.awake and self._plan.close_after_s < OPEN_LEAST_S
        left, nowhere = self._left, frozenset[int]()
        settled = now - self.settings.every_s  # what was leased since stays: its prefill is not even paid back
        loads = []
        for worker in picture.workers:
            if not worker.serves:
                continue
            running = tuple([
                offload.Running(
                    s.id,
                    s.prompt_tokens + s.length,
                    expected[s.id],
                    s.moving or (s.moves > 0 and s.leased_at > settled),
                    left.get(s.id, nowhere),
                )
                for s in picture.held.get(worker.id, ())
            ])  # fmt: skip
            takes = worker.id not in self._retired and not (closes and worker.kind == "reserved")
            loads.append(offload.Load(worker.id, worker.node, picture.curve(worker), worker.max_batch, running, True, takes))
        return loads

    def _ready_s(self, picture: Picture) -> float:
        """The trainer's work in hand: nothing that comes sooner can end the step sooner. 0 while it does not train."""
        if picture.step.reserved_awake or not picture.reserved:
            return 0.0
        return self._train_s(picture) * max(0.0, picture.delivered_tokens[1] - self._trained)

    def _merge(self, picture: Picture, loads: Sequence[offload.Load], price: offload.Price) -> Sequence[offload.Shift]:
        """Free engines whose samples fit elsewhere, once reserved engines train: until then every engine is needed.

        What is merged has to be done by the step's expected end even if its samples turn out long; and the step must not be predicted
        longer without the freed engines, the trainer's rounds included.
        """
        if picture.step.reserved_awake and picture.reserved:
            return ()
        harvested = {w.id for w in picture.harvested}
        able = [load for load in loads if load.worker_id in harvested and load.samples]
        end_s, worth_s = max(offload.drains(able).values(), default=0.0), self.forecast.start.value
        if len(able) < 2 or end_s < worth_s:
            return ()
        views = {s.id: s for samples in picture.held.values() for s in samples}
        rests = {sample_id: picture.longest(view) for sample_id, view in views.items()}
        long = [replace(one, samples=tuple(_with_rest(s, rests[s.sample_id]) for s in one.samples)) for one in able]
        merged = offload.merge(long, price, end_s, worth_s)
        if not merged.emptied:
            return ()
        now = picture.situation(self._trained)
        fewer = replace(now, harvested=replace(now.harvested, engines=now.harvested.engines - len(merged.emptied)))
        if StepModel(fewer).asleep_s() > (1 + windows.ALIKE) * StepModel(now).asleep_s():
            return ()
        self._retired |= set(merged.emptied)
        return merged.shifts

    # ---------------------------------------------------------------- engines

    def engines(self, view: RunView, now: float) -> tuple[int, str]:
        if not self.settings.fleet:
            return self._standard.engines(view, now)
        if view.step.purpose != "train" and self._asked is not None:
            return self._asked  # engines stay over an evaluation
        if not view.step.samples or self.forecast.lengths is None:
            return self._standard.engines(view, now)
        target, why = self._fleet.engines(view, self.forecast, now)
        retired = len(self._retired & {w.id for w in view.workers})
        self._asked = max(0, target - retired), f"{why}; {retired} were freed by merging the step's tail" if retired else why
        return self._asked


def _with_rest(sample: offload.Running, rest: float) -> offload.Running:
    return msgspec.structs.replace(sample, rest=rest)
