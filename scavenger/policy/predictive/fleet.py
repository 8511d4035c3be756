"""How many harvested engines a run asks for, from one step to the next. Pure.

Boundary: the size of the fleet; pure.

Sizes the fleet on a whole step with lengths from the forecast (`seed_window.size_fleet`), asks for no engine that saves less over its
expected life than its start costs (`fleet_size.worth`), and goes there by the share of the step that the trainer waited
(`fleet_size.step_ended`). Owns when the size is solved again: after a step in which engines came or were lost, after some
steps else, and when the step or the limit is another. (What comes or goes changes how long engines last, and the window at once.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from scavenger.policy import fleet_size
from scavenger.policy import seed_window as windows
from scavenger.policy.forecast.step import EnginePool
from scavenger.policy.interface import Inputs, RunView
from scavenger.policy.predictive.learned import Forecast, node_class
from scavenger.policy.predictive.view import LOADING, cache_of, whole_step

#: Who asks for no engine learns nothing of engines: after so long, one shows whether starts and lives are still what they were.
TRIAL_S = 1800.0


#: The fleet is sized again after so many steps in which no engine came or was lost.
SIZE_STEPS = 4


@dataclass(slots=True)
class FleetSizer:
    """One run's fleet. `least_saving`: what an engine must shorten a step by, at least, whatever its start costs; `price` as in `worth`."""

    least_saving: float
    rules: fleet_size.FleetSizeRules
    price: float = 1.0
    useful: int = 0
    reason: str = ""
    benefit: fleet_size.Benefit | None = None  # of one of the engines that are asked for, on average
    state: fleet_size.State = field(default_factory=fleet_size.State)
    _steps: int = 0  # since it was sized
    _changed: bool = False
    _sized_for: tuple[int, int] = (-1, -1)
    _waits: list[float] = field(default_factory=list)
    _sized: dict[str, float] = field(default_factory=dict)
    _none_since: float | None = None
    _alone_since: float | None = None

    def fleet_changed(self) -> None:
        """An engine came or was lost."""
        self._changed = True

    def step_ended(self, wait_share: float) -> None:
        """The trainer waited for this share of the step."""
        self._steps += 1
        self._waits.append(wait_share)

    def restarted(self, asked: int) -> None:
        """The steps told of so far were answered by `asked` engines, before a restart: they tell of the wait, and change nothing again."""
        self.state = fleet_size.restarted(self.state, self._waits, asked, self.rules)
        self._waits.clear()

    def engines(self, view: RunView, forecast: Forecast, now: float, asked: int = 0) -> tuple[int, str]:
        """The number asked for, at most the run's own limit, and why. `asked`: what was asked for before the run's first step."""
        stale = self._steps > 0 and (self._changed or self._steps >= SIZE_STEPS or self.state.wait is None)
        if stale or (view.step.samples, view.max_engines) != self._sized_for:
            self._size(view, forecast, now)
        self.state = fleet_size.start_with(self.state, self.useful, asked)
        for wait in self._waits:
            self.state = fleet_size.step_ended(self.state, wait, self.useful, self.rules)
        self._waits.clear()
        return self._or_trial(view, min(view.max_engines, self.state.target), now)

    def figures(self) -> Inputs:
        """What the last answer was reckoned with. Seconds, and shares of a step: `needed` is what an engine must save at least."""
        return self._sized if self.state.wait is None else {"wait": self.state.wait, **self._sized}

    def _or_trial(self, view: RunView, target: int, now: float) -> tuple[int, str]:
        why = f"{self.state.reason}; {self.reason}"
        here = [worker.status for worker in view.workers if worker.harvested]
        if here or not target:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since >= TRIAL_S:
            # There may be no room. Or no idle GPU is worth a start by what was seen of them, and nothing else would ever show otherwise.
            return self._trial(f"none came in {TRIAL_S / 60:.0f} min: one engine on trial; {why}")
        if target or not view.max_engines:
            self._none_since = None
        elif any(status in LOADING for status in here):
            self._none_since = None
            return self._trial(f"one engine on trial is starting; {why}")
        elif here or self._none_since is None:
            self._none_since = now
        elif now - self._none_since >= TRIAL_S:
            return self._trial(f"none was asked for in {TRIAL_S / 60:.0f} min: one engine on trial; {why}")
        return target, why

    def _trial(self, why: str) -> tuple[int, str]:
        if self.benefit is not None:
            self.benefit = replace(self.benefit, saving=None)
        return 1, why

    def _size(self, view: RunView, forecast: Forecast, now: float) -> None:
        step, lengths = view.step, forecast.lengths
        assert lengths is not None, "sized before any sample was seen"
        reserved = [w for w in view.workers if w.kind == "reserved"]
        harvested = [w for w in view.workers if w.harvested]
        gpus = (harvested or reserved)[0].gpus if harvested or reserved else 1
        run_gpus = sum(w.gpus for w in reserved)
        curve = forecast.curve("harvested", gpus)
        own = forecast.curve("reserved", reserved[0].gpus) if reserved else curve
        whole = whole_step(
            lengths.table(),
            forecast,
            step.samples,
            step.groups,
            EnginePool(own, float(len(reserved)), view.max_batch, cache_of(reserved)),
            EnginePool(curve, 0.0, view.max_batch, cache_of(harvested or reserved)),
            forecast.costs(curve, gpus, run_gpus),
        )
        life, start_s = forecast.survival.curve(node_class(gpus), now), forecast.start.value
        needed = fleet_size.break_even(max(run_gpus, gpus), gpus, start_s, life, self.price)
        least = max(self.least_saving, needed)
        size = windows.size_fleet(whole, view.max_engines, least)
        verdict = fleet_size.worth(size.saving, max(run_gpus, gpus), gpus, start_s, life, price=self.price)
        self.benefit = fleet_size.Benefit(
            size.each, max(run_gpus, gpus), gpus, start_s, self.price, size.curve
        )
        self._steps, self._changed, self._sized_for = 0, False, (step.samples, view.max_engines)
        self.useful = size.engines if verdict.ask else 0
        self.reason = f"{size.reason}; the last one {verdict.reason}"
        found = {
            "useful": self.useful,
            "step_s": size.step_s,
            "alone_s": size.alone_s,
            "saving": size.saving,
            "needed": least,
            "expected_life_s": life.expected_s(0.0),
        }
        self._sized = {name: value for name, value in found.items() if value < math.inf}
