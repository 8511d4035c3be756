"""Which running samples change engines, from one decision to the next: rebalancing, and merging a step's tail. Pure.

Boundary: which samples move; pure.

Asks `policy.migration.rebalance` and `merge` with what the forecast expects of every lease. Owns when they are asked, and the memory of one
step that keeps samples from going back and forth: where each was taken from, and which engines were emptied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from scavenger.policy import migration
from scavenger.policy.forecast.step import StepModel
from scavenger.policy.interface import (
    Fact,
    RunView,
    SampleMove,
    StepSubmitted,
    WorkerJoined,
    WorkerLost,
    WorkerReady,
)
from scavenger.policy.predictive.policy_forecast import PolicyForecast
from scavenger.policy.predictive.settings import PredictiveSettings
from scavenger.policy.predictive.view import Picture, cache_of

#: No sample is moved onto reserved engines that will sleep within this.
OPEN_LEAST_S = 30.0
#: A step is no longer without engines that are freed, where it is predicted longer by less than this share.
LONGER = 0.003


class Mover:
    """One run's. `retired`: engines that were emptied in this step, gone or not, and are not to be filled again."""

    def __init__(self, settings: PredictiveSettings, policy_forecast: PolicyForecast) -> None:
        self._settings, self._policy_forecast = settings, policy_forecast
        self.retired: set[int] = set()
        self._left: dict[int, frozenset[int]] = {}  # sample -> engines that it was taken from in this step
        self._at = -math.inf
        self._shifted = True
        self._serving = 0

    def observe(self, fact: Fact, *, begins: bool) -> None:
        """`begins`: a step begins with this."""
        match fact:
            case StepSubmitted() if begins:
                self._shifted = True
                self.retired.clear()
                self._left.clear()
            case WorkerReady() | WorkerLost() | WorkerJoined():
                self._shifted = True
                if isinstance(fact, WorkerLost) and fact.worker_id not in self.retired:
                    self.retired.clear()  # the load of those that are left is another

    def moves(self, view: RunView, now: float) -> Sequence[SampleMove]:
        settings, policy_forecast = self._settings, self._policy_forecast
        if not (settings.rebalance or settings.tails) or now < self._at + policy_forecast.pause_s():
            return ()
        serving = len(view.slots())
        if now < self._at + settings.every_s and not self._shifted and serving == self._serving:
            return ()
        self._serving, step = serving, view.step
        if view.waits or step.finished >= step.samples:
            return ()  # what waits is placed first: it moves for nothing
        self._at, self._shifted = now, False
        picture = policy_forecast.picture(view, now)
        loads = self._loads(picture, now)
        if len(loads) < 2:
            return ()
        price = migration.Price(
            policy_forecast.forecast.prefill_s(loads[0].curve),
            policy_forecast.forecast.transfer_s,
            settings.margin,
        )
        shifts: Sequence[migration.Shift] = ()
        if settings.rebalance:
            shifts = migration.rebalance(loads, price, policy_forecast.ready_s(picture))
        # An engine that is freed would be filled with samples of the next steps, or given back while these wait.
        merges, whole = not shifts and settings.tails and not step.ahead, ""
        if merges:
            shifts, whole = self._merge(picture, loads, price)
        if shifts:
            policy_forecast.changed()
        for shift in shifts:
            self._left[shift.sample_id] = self._left.get(shift.sample_id, frozenset()) | {shift.source}
        return [
            SampleMove(shift.sample_id, shift.source, shift.target, shift.reason, merges, shift.gain_s, whole)
            for shift in shifts
        ]

    def _loads(self, picture: Picture, now: float) -> list[migration.EngineLoad]:
        expected, plan = picture.expected, self._policy_forecast.plan
        closes = plan is not None and plan.awake and plan.close_after_s < OPEN_LEAST_S
        left, nowhere = self._left, frozenset[int]()
        settled = (
            now - self._settings.every_s
        )  # what was leased since stays: its prefill is not even paid back
        loads = []
        for worker in picture.workers:
            if not worker.serves:
                continue
            running = tuple(
                [
                    migration.Running(
                        s.id,
                        s.prompt_tokens + s.length,
                        expected[s.id],
                        s.moving or (s.moves > 0 and s.leased_at > settled),
                        left.get(s.id, nowhere),
                    )
                    for s in picture.held.get(worker.id, ())
                ]
            )
            takes = worker.id not in self.retired and not (closes and worker.kind == "reserved")
            most = min(worker.max_batch, worker.best_batch or worker.max_batch)
            loads.append(
                migration.EngineLoad(
                    worker.id,
                    worker.node,
                    picture.curve(worker),
                    most,
                    running,
                    takes=takes,
                    cache=cache_of((worker,)),
                )
            )
        return loads

    def _merge(
        self, picture: Picture, loads: Sequence[migration.EngineLoad], price: migration.Price
    ) -> tuple[Sequence[migration.Shift], str]:
        """Free engines whose samples fit elsewhere, once reserved engines train: until then every engine is needed.

        What is merged has to be done by the step's expected end even if its samples turn out long; and the step must not be predicted
        longer without the freed engines, the trainer's rounds included.
        """
        if picture.step.reserved_awake and picture.reserved:
            return (), ""
        harvested = {w.id for w in picture.harvested}
        able = [load for load in loads if load.worker_id in harvested and load.samples]
        end_s, worth_s = (
            max(migration.drains(able).values(), default=0.0),
            self._policy_forecast.forecast.start.value,
        )
        if len(able) < 2 or end_s < worth_s:
            return (), ""
        views = {s.id: s for samples in picture.held.values() for s in samples}
        rests = {sample_id: picture.longest(view) for sample_id, view in views.items()}
        long = [
            replace(one, samples=tuple(_with_rest(s, rests[s.sample_id]) for s in one.samples))
            for one in able
        ]
        merged = migration.merge(long, price, end_s, worth_s)
        if not merged.emptied:
            return (), ""
        now = picture.situation(self._policy_forecast.trained)
        fewer = replace(
            now, harvested=replace(now.harvested, engines=now.harvested.engines - len(merged.emptied))
        )
        if StepModel(fewer).asleep_s() > (1 + LONGER) * StepModel(now).asleep_s():
            return (), ""
        self.retired |= set(merged.emptied)
        return merged.shifts, merged.reason


def _with_rest(sample: migration.Running, rest: float) -> migration.Running:
    return msgspec.structs.replace(sample, rest=rest)
