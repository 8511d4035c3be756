"""How long reserved engines shall generate before they train, and how many harvested engines are worth having. Pure.

The window is the end of the open phase with the least predicted step time (`forecast.step`), found over a coarse grid and then by golden
section between its best point's neighbours. Solved again whenever the fleet or the forecast changed: seconds count from that moment.

A window that has closed stays closed once a sample of the step is done. Should harvested engines all be lost then, the trainer wakes the
reserved ones (`protocol.train_step`). Opening it again by prediction as well was measured to gain nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from scavenger.policy.forecast.service import columns
from scavenger.policy.forecast.step import NEVER, Situation, StepModel

GRID = 10
REFINEMENTS = 5
#: Predictions this near each other (a share of the step) are alike: closing now is then preferred where it would be soon anyway.
ALIKE = 0.003
#: Soon: the difference is at most this share of the step. Till then all may change.
AT_ONCE = 0.05
#: While a round waits for the trainer, closing now is preferred where later ends the step sooner by less than this share: what is trained
#: is done, and completions turn out longer than was thought, so that a later end moves on while the step is under way.
MIN_BENEFIT = 0.02
#: Of windows that are alike to this share of the step the latest: a window that is open can still close, one that closed stays so.
LATER = 0.005
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class SeedWindowPlan:
    """The best that is predicted. `close_after_s`: 0 = train now, NEVER = generate to the end (or, when asleep: stay so, `awake` False).

    `step_s`: what is left of the step then. `until_s`: how long they generate, also where that is to the end.
    """

    awake: bool
    close_after_s: float
    step_s: float
    reason: str
    until_s: float = 0.0


def predict(situation: Situation, window_s: float) -> float:
    """Seconds left of the step when the window (open already, or opened now) closes after `window_s`; inf when it would never end."""
    return StepModel(situation).close_s(window_s)


def solve(situation: Situation) -> SeedWindowPlan:
    """The window with the least predicted step time; keeps the present state where that is as good."""
    model = StepModel(situation)
    if not situation.awake:
        return _solve_asleep(model, model.asleep_s())
    window, best, now_s = _search(model)
    summary = situation.summary()
    waits = situation.ready_groups >= situation.costs.round_groups
    if now_s <= best * (1 + (MIN_BENEFIT if waits else ALIKE)) and (waits or window <= AT_ONCE * best):
        return SeedWindowPlan(
            False,
            0.0,
            now_s,
            f"training from now on ends the step in {now_s:.1f} s, no later window much sooner ({summary})",
        )
    when = f"closing in {window:.1f} s" if window < model.end_s else f"generating to the end, {window:.1f} s,"
    why = f"{when} ends the step in {best:.1f} s, closing now in {now_s:.1f} s ({summary})"
    return SeedWindowPlan(True, window if window < model.end_s else NEVER, best, why, window)


def _solve_asleep(model: StepModel, stay: float, refinements: int = REFINEMENTS) -> SeedWindowPlan:
    summary = model.situation.summary()
    if not model.situation.samples or not model.situation.reserved.engines:
        return SeedWindowPlan(
            False, NEVER, stay, f"nothing is left for reserved engines to generate ({summary})"
        )
    if model.situation.closed:
        why = f"the window is closed, training on ends the step in {stay:.1f} s ({summary})"
        return SeedWindowPlan(False, NEVER, stay, why)
    window, best, _ = _search(model, refinements)
    if best < stay:
        why = f"generating for {window:.1f} s ends the step in {best:.1f} s, training from now on in {stay:.1f} s ({summary})"
        return SeedWindowPlan(True, window if window < model.end_s else NEVER, best, why, window)
    why = f"training from now on ends the step in {stay:.1f} s, generating before in {best:.1f} s at best ({summary})"
    return SeedWindowPlan(False, NEVER, stay, why)


def _step_s(situation: Situation, refinements: int = REFINEMENTS) -> float:
    """The step time with the best window. While asleep none is looked at where training alone takes too long for any to be worth it."""
    model = StepModel(situation)
    if situation.awake:
        return _search(model, refinements)[1]
    stay = model.asleep_s()
    if situation.closed or model.least_s(0.0) >= stay:
        return stay
    return _solve_asleep(model, stay, refinements).step_s


def _search(model: StepModel, refinements: int = REFINEMENTS) -> tuple[float, float, float]:
    """(window, step time with it, step time when closed now)."""
    end = model.end_s if model.end_s < NEVER else 0.0
    known: dict[float, float] = {}

    def at(window: float) -> float:
        if window not in known:
            known[window] = model.close_s(window)
        return known[window]

    grid = sorted({*(end * i / GRID for i in range(GRID)), end})
    best = grid[0]
    for window in grid[1:]:
        # With all the training behind it, this one and all later ones cannot even be alike to the best.
        if model.least_s(window) > at(best) * (1 + LATER):
            break
        best = min((best, window), key=lambda w: (at(w), w))
    index = grid.index(best)
    low, high = grid[max(0, index - 1)], grid[min(len(grid) - 1, index + 1)]

    def no_later(left: float, right: float) -> bool:
        """Whether the earlier of two is as good: without a look at the later, where that cannot be even alike to the best."""
        return model.least_s(right) > max(at(left), at(best) * (1 + LATER)) or at(left) <= at(right)

    if refinements:
        left, right = golden(no_later, low, high, refinements)
        best = min((best, left if no_later(left, right) else right), key=lambda w: (at(w), w))
    least = at(best)
    later = (
        max((w for w in known if w < end and known[w] <= least * (1 + LATER)), default=best)
        if best < end
        else best
    )
    return later, known[later], at(0.0)


def golden(
    no_later: Callable[[float, float], bool], low: float, high: float, times: int
) -> tuple[float, float]:
    """Golden section search for the least value between two points: the two that are looked at next, after so many comparisons.

    `no_later(left, right)`: whether the value at the first of two is no greater than at the second.
    """
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    for _ in range(times):
        if no_later(left, right):
            high, right = right, left
            left = high - _GOLDEN * (high - low)
        else:
            low, left = left, right
            right = low + _GOLDEN * (high - low)
    return left, right


#: Samples that each engine serves at a time, as shares of an even share of all that is left: what `serve` tries.
SHARES = (0.85, 0.7, 0.6, 0.5, 0.42, 0.35)
#: Fewer than so many at a time leave an engine mostly unused, whatever is predicted.
LEAST_SERVED = 8
#: Another order or limit than the usual one must end the step sooner by this share: of nine predictions the best one flatters itself.
SERVE_GAIN = 0.02


@dataclass(frozen=True, slots=True)
class ServingOrder:
    """In which order samples go to engines, the `order`-th of those given, and how many each engine serves at a time (NEVER: all).

    `share`: the limit as a share of an even one.
    """

    order: int = 0
    limit: float = NEVER
    share: float = NEVER
    reason: str = ""


def serve(
    orders: Sequence[Situation], usual: ServingOrder = ServingOrder(), shares: Sequence[float] = SHARES
) -> ServingOrder:
    """The order and the limit with the least predicted step time, each with the best of a few windows; `usual` where that is about as good.

    `orders`: the same situation with its samples in several orders. Fewer samples at a time make the first groups whole sooner, so that the
    window may close sooner; more make better use of engines.
    """
    fair = _fair(orders[0])

    def at(order: int, share: float) -> ServingOrder:
        return _serving(order, share, fair)

    tried: dict[ServingOrder, float] = {}
    known_s: dict[tuple[int, float], float] = {}  # shares may be alike in samples

    def best_of(candidates: Iterable[ServingOrder]) -> ServingOrder:
        for one in candidates:
            if (one.order, one.limit) not in known_s:
                known_s[one.order, one.limit] = _step_s(replace(orders[one.order], limit=one.limit), 0)
            tried[one] = known_s[one.order, one.limit]
        return min(tried, key=lambda one: (tried[one], one.order, -one.limit))

    known = at(usual.order, usual.share)
    best = best_of([known, ServingOrder(), *(at(usual.order, share) for share in shares)])
    best = best_of(at(order, best.share) for order in range(len(orders)))
    if tried[known] * (1 - SERVE_GAIN) <= tried[best]:
        best = known
    return replace(
        best,
        reason=f"{_at_a_time(best)} end the step in {tried[best]:.1f} s, all in {tried[ServingOrder()]:.1f} s",
    )


def carried(situation: Situation, usual: ServingOrder) -> ServingOrder:
    """The order and the share of an earlier decision, for these samples and engines: costs no prediction."""
    kept = _serving(usual.order, usual.share, _fair(situation))
    return replace(kept, reason=f"{_at_a_time(kept)}, as was decided for a step before")


def limit_of(situation: Situation, share: float) -> float:
    """A share of an even one in samples, for each engine that generates or will; NEVER where that is no less than an even share."""
    return _limit(share, _fair(situation))


def _fair(situation: Situation) -> float:
    """Samples for each engine that generates, or will."""
    coming = sum(more for _, more in situation.arrivals if more > 0)
    engines = situation.harvested.engines + coming + situation.awake * situation.reserved.engines
    return len(situation.samples) / max(1.0, engines)


def _serving(order: int, share: float, fair: float) -> ServingOrder:
    limit = _limit(share, fair)
    return ServingOrder(order, limit, share if limit < NEVER else NEVER)


def _limit(share: float, fair: float) -> float:
    limit = max(LEAST_SERVED, math.ceil(share * fair)) if share < NEVER else NEVER
    return limit if limit < fair else NEVER


def _at_a_time(serving: ServingOrder) -> str:
    return (
        f"{serving.limit:.0f} samples an engine at a time"
        if serving.limit < NEVER
        else "all samples at a time"
    )


@dataclass(frozen=True, slots=True)
class FleetSize:
    """How many harvested engines are worth having, the step time with so many and with none, and what the last of them saves.

    `curve`: (engines, step time) of every number that was tried; at least none, 1 and all that are worth having.
    """

    engines: int
    step_s: float
    alone_s: float
    saving: float
    reason: str
    curve: tuple[tuple[int, float], ...] = ()

    @property
    def each(self) -> float:
        """What an engine saves of a step on average over all of them, as a share: `saving` is the last one's, which is the least."""
        if not self.engines or self.alone_s == NEVER:
            return self.saving
        return 1.0 - math.pow(self.step_s / self.alone_s, 1 / self.engines)


def size_fleet(situation: Situation, most: int, least_saving: float) -> FleetSize:
    """The most engines of which each one still shortens the step by `least_saving` of it, each step with its own best window.

    `situation`: a whole step, with its harvested engines left out of account. The step time falls ever less with more engines, so that
    doubling and bisection find the number; the saving of one engine is the mean over a few, to even out the search's own error.
    """
    known: dict[int, float] = {}
    whole = replace(situation, samples=columns(situation.samples))  # the same for every size that is tried

    def at(engines: int) -> float:
        if engines not in known:
            sized = replace(whole, harvested=replace(whole.harvested, engines=float(engines)), arrivals=())
            known[engines] = _step_s(sized)
        return known[engines]

    def saving(engines: int) -> float:
        """Of the `engines`-th one, as a share of the step."""
        span = max(1, engines // 4)
        longer = at(engines - span)
        if longer == NEVER:
            return 0.0 if at(engines) == NEVER else 1.0
        return 1.0 - math.pow(at(engines) / longer, 1 / span)

    # The first engine alone may not pay for the toggle where several do: every doubling is looked at.
    doublings = sorted({min(most, 1 << i) for i in range(most.bit_length() + 1)}) if most > 0 else []
    low = max((engines for engines in doublings if saving(engines) >= least_saving), default=0)
    high = min(2 * low, most + 1) if low else 0
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        if saving(middle) >= least_saving:
            low = middle
        else:
            high = middle
    share = saving(low) if low else 0.0
    why = f"{low} engines make a step of {at(low):.0f} s, none {at(0):.0f} s; the last one saves {share:.1%} (least {least_saving:.1%})"
    step_s, alone_s = at(low), at(0)
    return FleetSize(low, step_s, alone_s, share, f"{why}, at most {most}", tuple(sorted(known.items())))
