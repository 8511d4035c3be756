"""The clairvoyant policy's search: when the window closes, and how many samples an engine serves at a time. Pure.

The predictions are those that all controllers reckon with (`policy.forecast.step`), told the truth; golden section and what a share is in
samples are `seed_window`'s: a formula has one home. The search is its own: what the live controller's is tuned to must not move the
yardstick that it is measured by. It looks where the last solution was and in a coarse grid, goes downhill from the best of these, and looks
at no window that cannot win:

    asleep    waking costs both toggles, and all that is left must be trained: where that alone takes as long as to train on, no window is
              looked at. Nor is more than a coarse grid where its best is far from worth it.
    serving   all shares are tried, each from where the one before had its window
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from scavenger.policy.forecast.speed import SpeedCurve
from scavenger.policy.forecast.step import NEVER, Situation, StepModel
from scavenger.policy.seed_window import golden, limit_of
from scavenger.simulate.decode import SimulatedEngine

GRID = 5
#: Downhill by this share of the time in which all is generated, then to a fraction of it by golden section.
STRIDE = 0.1
REFINEMENTS = 3
#: Predictions so near (a share of the step) are alike: closing now is then preferred where it would be soon anyway, else the latest window.
ALIKE = 0.003
AT_ONCE = 0.05
#: While a round waits for the trainer, closing now is preferred where later ends the step sooner by less than this share: the model
#: flatters late windows, also when told the truth (measured: .5 % more throughput than with `ALIKE`, 4 % on a small site).
WORTH = 0.02
LATER = 0.005
#: Waking must save this share of what is left, once samples are done.
REOPEN_GAIN = 0.05
#: A coarse grid's best may be so much above the very best.
COARSE = 0.03
#: Samples at a time, as shares of an even share of all that is left, and what another share must save of the step.
SHARES = (NEVER, 0.85, 0.7, 0.6, 0.5, 0.42, 0.35)
SERVE_GAIN = 0.01


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Generate (`awake`) for `window_s` more, to the end where that is NEVER, and then train: `step_s` is left of the step."""

    awake: bool
    window_s: float
    step_s: float
    reason: str


@dataclass(slots=True)
class _Search:
    """The step's time by window, each looked at once."""

    model: StepModel
    known: dict[float, float] = field(default_factory=dict)

    @property
    def end_s(self) -> float:
        return self.model.end_s if self.model.end_s < NEVER else 0.0

    def at(self, window_s: float) -> float:
        if window_s not in self.known:
            self.known[window_s] = self.model.close_s(window_s)
        return self.known[window_s]

    def coarse(self) -> float:
        """The best of a coarse grid."""
        best = 0.0
        for window in [self.end_s * i / GRID for i in range(1, GRID + 1)]:
            if self.model.least_s(window) > self.at(best) * (1 + LATER):
                break  # nor can a later one be the best, or alike
            best = self._best([best, window])
        return best

    def fine(self, start_s: float) -> float:
        """The best of all looked at, after going downhill from `start_s`."""
        end = self.end_s
        best = self._best([0.0, min(max(start_s, 0.0), end), end])
        stride = STRIDE * end
        while stride > 0:
            nearer = self._best([max(0.0, best - stride), best, min(end, best + stride)])
            if nearer == best:
                break
            best = nearer
        low, high = max(0.0, best - stride), min(end, best + stride)
        golden(
            lambda left, right: self.at(left) <= self.at(right), low, high, REFINEMENTS if high > low else 0
        )
        return self._best(self.known)

    def latest(self, best: float) -> float:
        """Of those alike to the best the latest: a window that is open can still close, one that closed costs a toggle."""
        end, least = self.end_s, self.at(best) * (1 + LATER)
        return (
            max((w for w in self.known if w < end and self.known[w] <= least), default=best)
            if best < end
            else best
        )

    def _best(self, windows: Iterable[float]) -> float:
        return min(windows, key=lambda w: (self.at(w), w))


def plan(situation: Situation, near_s: float | None = None) -> WindowPlan:
    """The window with the least predicted step time. `near_s`: the last answer, where little has changed since."""
    search = _Search(StepModel(situation))
    if not situation.awake:
        return _asleep(search)
    best = search.fine(search.coarse() if near_s is None else near_s)
    now_s, least = search.at(0.0), search.at(best)
    window = search.latest(best)
    waits = situation.ready_groups >= situation.costs.round_groups
    told = situation.summary()
    if now_s <= least * (1 + (WORTH if waits else ALIKE)) and (waits or window <= AT_ONCE * least):
        return WindowPlan(
            False,
            0.0,
            now_s,
            f"training from now on ends the step in {now_s:.1f} s, no later window much sooner ({told})",
        )
    when = (
        f"closing in {window:.1f} s"
        if window < search.model.end_s
        else f"generating to the end, {window:.1f} s,"
    )
    why = f"{when} ends the step in {search.at(window):.1f} s, closing now in {now_s:.1f} s ({told})"
    return WindowPlan(True, window if window < search.model.end_s else NEVER, search.at(window), why)


def _asleep(search: _Search) -> WindowPlan:
    situation = search.model.situation
    stay, told = search.model.asleep_s(), situation.summary()
    worth = stay * (1 - (REOPEN_GAIN if _trainer_has_work(situation) else 0.0))
    if not situation.samples or not situation.reserved.engines:
        return WindowPlan(False, NEVER, stay, f"nothing is left for reserved engines to generate ({told})")
    if search.model.least_s(0.0) >= worth:
        return WindowPlan(
            False,
            NEVER,
            stay,
            f"training on ends the step in {stay:.1f} s, and training alone takes as long ({told})",
        )
    start = search.coarse()
    if search.at(start) >= worth * (1 + COARSE):
        best = search.at(start)
        return WindowPlan(
            False,
            NEVER,
            stay,
            f"training on ends the step in {stay:.1f} s, generating again in about {best:.1f} s ({told})",
        )
    window = search.latest(search.fine(start))
    best = search.at(window)
    if best < worth:
        why = f"generating again for {window:.1f} s ends the step in {best:.1f} s, training on in {stay:.1f} s ({told})"
        return WindowPlan(True, window if window < search.model.end_s else NEVER, best, why)
    return WindowPlan(
        False,
        NEVER,
        stay,
        f"training on ends the step in {stay:.1f} s, generating again in {best:.1f} s at best ({told})",
    )


def _trainer_has_work(situation: Situation) -> bool:
    """Whether a sample is done of what is not trained: waking would interrupt that."""
    return situation.ready_groups > 0 or any((situation.group_tokens or {}).values())


def share_of(situation: Situation, usual: float) -> float:
    """What each engine serves at a time (a share, see `limit_of`) for the least predicted step time; `usual`, where that is about as good.

    Fewer at a time make the first groups whole sooner, so that the window may close sooner; more make better use of engines.
    """
    found: dict[float, WindowPlan] = {}  # by limit
    tried: dict[float, float] = {}  # share -> step time
    near_s: float | None = None
    for share in dict.fromkeys((usual, *SHARES)):
        limit = limit_of(situation, share)
        if limit not in found:
            found[limit] = plan(replace(situation, limit=limit), near_s)
        tried[share], near_s = found[limit].step_s, found[limit].window_s
    best = min(tried, key=lambda share: (tried[share], -share))
    return usual if tried[usual] * (1 - SERVE_GAIN) <= tried[best] else best


def line(spec: SimulatedEngine) -> SpeedCurve:
    """The steeper line of the engine's roofline: the seconds of a decode step by batch and context."""
    one, two = spec.curve(1), spec.curve(2)
    more = two.overhead - one.overhead
    base = one.overhead - more
    if one.memory_slope >= one.compute_slope:
        return SpeedCurve(base + one.memory, more, one.memory_slope)
    return SpeedCurve(base, more + one.compute, one.compute_slope)
