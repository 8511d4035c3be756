"""How many samples a rollout engine may generate on the GPUs of an inference service, so that the service keeps its objective. Pure.

The owner of a service states an objective: the 99th percentile of the time to first token (TTFT) and of the time per output token (TPOT).
Each second or so the service's own metrics say what both were, and how many requests run and wait. `decide` turns that into
a budget: samples that may be generated beside the service. 0 means that the engine sleeps.

    slack of prefill = 1 - ttft_p99 / objective          slack of decode = 1 - tpot_p99 / objective

    slack, the lesser of the two        budget
    ----------------------------        ------
    0 or less, or a burst               0 at once. It stays 0 for `hold_s`, and twice as long each time that this happens again soon
    below `margin`                      half, once in `ease_every_s`
    below `margin + raise_slack`        as it is: what raises it and what lowers it are apart, so that it does not swing
    more, for `steady_s`                `raise_step` more each `raise_every_s`, up to the ceiling

The p99s are of a window of half a minute or so: a p99 allows one request of a hundred to be late, and a second has only a few. A burst is
seen at once: `burst_waiting` requests wait, or the median of the newest second is beyond the objective less the margin. When the
samples of a cut have ended the window begins anew: what they slowed says nothing of the slack without them.

Where the metrics cannot be read for `blind_s` it is 0 as well. A cut to 0 lowers the ceiling to `ceiling_cut` of the budget that was too
much; it rises by a step for each `probe_s` in which it was reached.

A service that is slow while the engine generates nothing is slow by itself. The budget is 0 then too, and neither the ceiling nor the hold
changes: nobody is blamed for what he did not do.

Knows no metric's name, no engine and no clock; the caller says what it read and when.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from scavenger.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Objective:
    """What the service promises, in seconds. None: of that nothing is promised; one of the two is."""

    ttft_p99_s: float | None = None
    tpot_p99_s: float | None = None

    def __post_init__(self) -> None:
        stated = [value for value in (self.ttft_p99_s, self.tpot_p99_s) if value is not None]
        if not stated or not all(0 < value < math.inf for value in stated):
            raise ConfigError(
                f"objective ttft_p99={self.ttft_p99_s}, tpot_p99={self.tpot_p99_s}: no finite time above 0",
                'state one or both, as in "ttft_p99=500ms tpot_p99=60ms"',
            )


_UNITS = {"ms": 1e-3, "s": 1.0}
_TERM = re.compile(r"(ttft_p99|tpot_p99)=([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s)")


def objective_of(text: str) -> Objective:
    """An objective as its owner writes it: "ttft_p99=500ms tpot_p99=60ms", one of the two or both. Raises `ConfigError`."""
    stated: dict[str, float] = {}
    for word in text.replace(",", " ").split():
        term = _TERM.fullmatch(word)
        if term is None or term[1] in stated:
            raise ConfigError(
                f"objective {text!r}: {word!r} is stated twice"
                if term is not None
                else f"objective {text!r}: {word!r} is no promise",
                'state one or both once, with ms or s, as in "ttft_p99=500ms tpot_p99=60ms"',
            )
        stated[term[1]] = float(term[2]) * _UNITS[term[3]]
    return Objective(stated.get("ttft_p99"), stated.get("tpot_p99"))


@dataclass(frozen=True, slots=True)
class ServingRules:
    """How careful to be. Times in seconds, slack as a share of the objective, budgets in samples."""

    most: int = 32  # samples that the engine holds at most
    margin: float = 0.15  # of the objective that is left to the service in any case
    raise_slack: float = 0.15
    steady_s: float = 3.0
    ease_every_s: float = 15.0
    raise_step: int = 2
    raise_every_s: float = 1.0
    burst_waiting: int = 3
    hold_s: float = 5.0
    hold_most_s: float = 120.0
    forgive_s: float = 60.0  # after a hold: a cut that comes later is held for `hold_s` again
    ceiling_cut: float = 0.75
    probe_s: float = 5.0
    blind_s: float = 5.0

    def __post_init__(self) -> None:
        times = (
            self.steady_s,
            self.raise_every_s,
            self.ease_every_s,
            self.hold_s,
            self.forgive_s,
            self.probe_s,
            self.blind_s,
        )
        if not (
            self.most >= 1
            and 0 <= self.margin < 1
            and 0 < self.raise_slack < 1 - self.margin
            and self.raise_step >= 1
            and self.burst_waiting >= 1
            and all(0 <= time < math.inf for time in times)
            and self.hold_s <= self.hold_most_s < math.inf
            and 0 < self.ceiling_cut < 1
        ):
            raise ConfigError(
                f"{self}: values that cannot be",
                "most, raise_step and burst_waiting are 1 or more; margin + raise_slack is below 1; ceiling_cut lies between 0 and 1; "
                "hold_s is at most hold_most_s",
            )


@dataclass(frozen=True, slots=True)
class ServiceView:
    """What the service's metrics say. Latencies in seconds; None: no token of that sort came.

    `ttft_p99_s`, `tpot_p99_s`: of the window. `ttft_now_s`, `tpot_now_s`: medians since the last view. `waiting`, `running`: requests at
    this moment. `samples`: the most that the engine generated at once within the window, by its own word. `oldest_s`: age of the oldest
    request without a first token, 0 where nobody says it: its TTFT will be more. `generating`: samples at this moment, those of a cut that
    the engine has not heard of yet included.
    """

    ttft_p99_s: float | None
    tpot_p99_s: float | None
    waiting: int
    running: int
    samples: int
    ttft_now_s: float | None = None
    tpot_now_s: float | None = None
    oldest_s: float = 0.0
    generating: int = 0


class Verdict(StrEnum):
    """Why a budget is what it is."""

    RAISED = "raised"
    KEPT = "kept"  # slack lies between what lowers and what raises
    EASED = "eased"  # slack is less than the margin
    FULL = "full"  # the most that rules or the ceiling allow
    HELD = "held"  # a cut was too short a time ago
    STEADYING = "steadying"  # slack is there, not for long enough yet
    SLOW = "slow"  # cut: slack is gone
    BURST = "burst"  # cut: requests wait
    SLOW_ALONE = "slow-alone"  # as these two, without any sample of ours
    BLIND = "blind"  # cut: nothing was read for too long


CUTS = frozenset({Verdict.SLOW, Verdict.BURST, Verdict.SLOW_ALONE, Verdict.BLIND})


@dataclass(frozen=True, slots=True)
class ServingState:
    """What is remembered from one decision to the next. Times in the caller's seconds.

    `read_at`: when the metrics were last read; until `was_read`, when the guest began. `ceiling`: the budget beyond which the service was
    slow, or `ServingRules.most`. `ceiling_at`: since when it is reached and held.
    `steady_at`: since when there has been slack to raise by; None: there is none. `wait_at`: since when requests wait and none has begun.
    `stopping`: a cut's samples may generate yet.
    """

    budget: int
    ceiling: int
    read_at: float
    raised_at: float = -math.inf
    eased_at: float = -math.inf
    held_until: float = -math.inf
    hold_s: float = 0.0
    steady_at: float | None = None
    ceiling_at: float | None = None
    wait_at: float | None = None
    was_read: bool = False
    stopping: bool = False


@dataclass(frozen=True, slots=True)
class ServingDecision:
    """The budget from now on, in samples; why; by which numbers; and what to remember. `window_anew`: the next view's window begins with
    the reading that this one was made of."""

    state: ServingState
    verdict: Verdict
    reason: str
    inputs: Mapping[str, float] = field(default_factory=dict)
    window_anew: bool = False

    @property
    def budget(self) -> int:
        return self.state.budget


def begin(rules: ServingRules, now: float) -> ServingState:
    """Nothing is known yet: the engine sleeps."""
    return ServingState(budget=0, ceiling=rules.most, read_at=now, hold_s=rules.hold_s)


def first_read(state: ServingState, now: float) -> ServingState:
    """The service was read, and there is nothing to compare the reading with: the first one, or the first after a long pause. Nothing is
    decided by it. How long requests wait counts from now, not from a reading before the pause."""
    return replace(state, read_at=now, was_read=True, wait_at=None)


def slacks(
    view: ServiceView, objective: Objective, waited_s: float = 0.0
) -> tuple[float | None, float | None]:
    """Slack of prefill and of decode, as a share of each objective; None where nothing is promised.

    `waited_s`: for so long requests have waited while none began: the first of them will have had at least that TTFT. An interval without
    any token of a sort has all the slack of that sort.
    """
    prefill = decode = None
    if objective.ttft_p99_s is not None:
        prefill = 1 - max(view.ttft_p99_s or 0.0, waited_s) / objective.ttft_p99_s
    if objective.tpot_p99_s is not None:
        decode = 1 - (view.tpot_p99_s or 0.0) / objective.tpot_p99_s
    return prefill, decode


def decide(
    state: ServingState, view: ServiceView | None, objective: Objective, rules: ServingRules, now: float
) -> ServingDecision:
    """The budget from `now` on. `view` None: the service's metrics could not be read this time. `now` never goes back."""
    if view is None:
        return _unread(state, rules, now)
    waits_unserved = view.waiting > 0 and view.ttft_now_s is None
    wait_at = (state.read_at if state.wait_at is None else state.wait_at) if waits_unserved else None
    waited_s = max(view.oldest_s, 0.0 if wait_at is None else now - wait_at)
    prefill, decode = slacks(view, objective, waited_s)
    least = min(slack for slack in (prefill, decode) if slack is not None)
    state = replace(state, read_at=now, was_read=True, wait_at=wait_at)
    inputs = _inputs(state, view, prefill, decode, waited_s)
    figures = _figures(view, objective, waited_s)
    anew = state.stopping and view.generating == 0
    state = replace(state, stopping=state.stopping and not anew)
    if least <= 0 or _bursts(view, objective, rules):
        decision = _cut(state, view, rules, now, slow=least <= 0, figures=figures, inputs=inputs)
    else:
        decision = _with_slack(state, view, rules, now, least, figures, inputs)
    return replace(decision, window_anew=anew)


def _bursts(view: ServiceView, objective: Objective, rules: ServingRules) -> bool:
    now_and_promised = ((view.ttft_now_s, objective.ttft_p99_s), (view.tpot_now_s, objective.tpot_p99_s))
    return view.waiting >= rules.burst_waiting or any(
        now is not None and promised is not None and now > promised * (1 - rules.margin)
        for now, promised in now_and_promised
    )


def _unread(state: ServingState, rules: ServingRules, now: float) -> ServingDecision:
    silent_s = now - state.read_at
    inputs = {"silent_s": silent_s, "budget_before": float(state.budget)}
    read = f"last read {silent_s:.1f} s ago" if state.was_read else f"not read yet, for {silent_s:.1f} s"
    if silent_s < rules.blind_s:
        reason = f"the service's metrics were {read}; the budget stays {state.budget}"
        return ServingDecision(replace(state, steady_at=None), Verdict.KEPT, reason, inputs)
    reason = f"the service's metrics were {read}: nothing is known of its slack"
    shut = replace(state, budget=0, steady_at=None, ceiling_at=None, wait_at=None)
    return ServingDecision(shut, Verdict.BLIND, reason, inputs)


def _cut(
    state: ServingState,
    view: ServiceView,
    rules: ServingRules,
    now: float,
    *,
    slow: bool,
    figures: str,
    inputs: Mapping[str, float],
) -> ServingDecision:
    shut = replace(state, budget=0, steady_at=None, ceiling_at=None)
    if view.samples == 0:
        return ServingDecision(
            shut, Verdict.SLOW_ALONE, f"{figures}: slow without any sample of ours", inputs
        )
    verdict = Verdict.SLOW if slow else Verdict.BURST
    if state.budget == 0:  # the cut was made; what it stopped is in this interval's figures yet
        return ServingDecision(
            shut, verdict, f"{figures}: cut before, {view.samples} samples of ours ran", inputs
        )
    again = now - state.held_until < rules.forgive_s
    hold_s = min(rules.hold_most_s, state.hold_s * 2) if again else rules.hold_s
    ceiling = max(1, math.floor(state.budget * rules.ceiling_cut))
    shut = replace(
        shut, ceiling=min(state.ceiling, ceiling), held_until=now + hold_s, hold_s=hold_s, stopping=True
    )
    reason = f"{figures}: the budget is cut from {state.budget} to 0 for {hold_s:g} s at least"
    return ServingDecision(shut, verdict, reason, inputs)


def _with_slack(
    state: ServingState,
    view: ServiceView,
    rules: ServingRules,
    now: float,
    least: float,
    figures: str,
    inputs: Mapping[str, float],
) -> ServingDecision:
    if least < rules.margin and state.budget and now - state.eased_at >= rules.ease_every_s:
        eased = replace(state, budget=state.budget // 2, steady_at=None, eased_at=now)
        reason = f"{figures}: slack {least:.2f} of the margin {rules.margin:g}, {eased.budget} samples in place of {state.budget}"
        return ServingDecision(eased, Verdict.EASED, reason, inputs)
    if least < rules.margin + rules.raise_slack:
        reason = f"{figures}: slack {least:.2f} is too little to raise by"
        return ServingDecision(replace(state, steady_at=None), Verdict.KEPT, reason, inputs)
    steady_at = now if state.steady_at is None else state.steady_at
    state = replace(state, steady_at=steady_at)
    if now < state.held_until:
        reason = f"{figures}: held at 0 for {state.held_until - now:.1f} s more"
        return ServingDecision(state, Verdict.HELD, reason, inputs)
    if now - steady_at < rules.steady_s:
        reason = (
            f"{figures}: slack for {now - steady_at:.1f} s of the {rules.steady_s:g} s that are asked for"
        )
        return ServingDecision(state, Verdict.STEADYING, reason, inputs)
    if view.waiting > 0:
        return ServingDecision(state, Verdict.STEADYING, f"{figures}: a request waits", inputs)
    if now - state.raised_at < rules.raise_every_s:
        reason = f"{figures}: raised {now - state.raised_at:.1f} s ago"
        return ServingDecision(state, Verdict.STEADYING, reason, inputs)
    state = _probed(state, rules, now)
    budget = min(state.budget + rules.raise_step, state.ceiling)
    if budget <= state.budget:
        reason = f"{figures}: {state.budget} samples, the most of {rules.most} that has not been too much"
        return ServingDecision(state, Verdict.FULL, reason, inputs)
    raised = replace(state, budget=budget, raised_at=now, stopping=False)
    reason = f"{figures}: slack {least:.2f}, the budget grows from {state.budget} to {budget}"
    return ServingDecision(raised, Verdict.RAISED, reason, inputs)


def _probed(state: ServingState, rules: ServingRules, now: float) -> ServingState:
    """The ceiling a step higher, once it has been reached and held for `probe_s`."""
    if state.budget < state.ceiling or state.ceiling >= rules.most:
        return replace(state, ceiling_at=None)
    if state.ceiling_at is None:
        return replace(state, ceiling_at=now)
    if now - state.ceiling_at < rules.probe_s:
        return state
    return replace(state, ceiling=min(rules.most, state.ceiling + rules.raise_step), ceiling_at=None)


def _inputs(
    state: ServingState, view: ServiceView, prefill: float | None, decode: float | None, waited_s: float
) -> dict[str, float]:
    known = {
        "ttft_p99_s": view.ttft_p99_s,
        "tpot_p99_s": view.tpot_p99_s,
        "ttft_now_s": view.ttft_now_s,
        "tpot_now_s": view.tpot_now_s,
        "prefill_slack": prefill,
        "decode_slack": decode,
    }
    return {
        **{name: value for name, value in known.items() if value is not None},
        "waiting": float(view.waiting),
        "running": float(view.running),
        "samples": float(view.samples),
        "waited_s": waited_s,
        "budget_before": float(state.budget),
        "ceiling_before": float(state.ceiling),
    }


def _figures(view: ServiceView, objective: Objective, waited_s: float) -> str:
    parts = []
    for name, value, promised in (
        ("TTFT", view.ttft_p99_s, objective.ttft_p99_s),
        ("TPOT", view.tpot_p99_s, objective.tpot_p99_s),
    ):
        if promised is not None and value is not None:
            parts.append(f"p99 {name} {1e3 * value:.0f} of {1e3 * promised:.0f} ms")
    if waited_s > view.oldest_s:
        parts.append(f"none begun for {waited_s:.1f} s")
    elif waited_s > (view.ttft_p99_s or 0.0):
        parts.append(f"the oldest has no token for {1e3 * waited_s:.0f} ms")
    parts.append(f"{view.running} run, {view.waiting} wait")
    return ", ".join(parts)
