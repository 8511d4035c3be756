"""What a run's controllers reckon with together: what was learned, the moment's picture, the window's plan, how far training is. Pure.

Several controllers ask about the same moment and about the same step, so that it is looked at once. Owns the memory of one step that more
than one of them needs, and how often any of them may think again; decides nothing.
"""

from __future__ import annotations

from scavenger.policy.forecast.lengths import Belief
from scavenger.policy.forecast.speed import SpeedCurve
from scavenger.policy.interface import Fact, RunView, StepSubmitted, TrainedGroups, WindowMoved
from scavenger.policy.predictive.learned import Forecast
from scavenger.policy.predictive.view import Picture
from scavenger.policy.seed_window import SeedWindowPlan

#: Nothing is solved again sooner than this, whatever happened (but a new step); nor than this share of a step, where that is less.
PAUSE_S, PAUSE_SHARE = 3.0, 1 / 40
#: Nor sooner than this, however short the steps: the daemon serves engines meanwhile, and looks at nothing sooner by itself.
PAUSE_LEAST_S = 0.25


class _NextView:
    """The part of a `RunView` that a picture needs, with the next step's samples."""

    def __init__(self, view: RunView) -> None:
        self.step, self.workers, self.samples = view.step, view.workers, view.next_samples


class PolicyForecast:
    """One run's. `plan`: what the window was decided by, None while no policy decides it. `trained`: tokens of the step that are trained.

    `decided_by`: the moment by which leases were given or moved last.
    """

    def __init__(self, forecast: Forecast) -> None:
        self.forecast = forecast
        self.plan: SeedWindowPlan | None = None
        self.step = -1
        self._beliefs: dict[int, tuple[object, Belief]] = {}
        self.decided_by: Picture | None = None
        self._picture: Picture | None = None  # of this moment, for the next who asks in it
        self._trained = 0.0
        self._scored = -1  # whole groups of the step that have their rewards; -1: the trainer did not say
        self.reward_s = 0.0  # from a group's last token to its rewards, as the trainer measured it last
        self._trained_at: float | None = None  # until when it is counted; None: the trainer does not train

    @property
    def trained(self) -> float:
        return self._trained

    def scored(self, whole: int) -> int:
        """Of so many whole groups of the step, those that have their rewards: all, where the trainer did not say."""
        return whole if self._scored < 0 else min(whole, self._scored)

    def pause_s(self, seconds: float = PAUSE_S) -> float:
        """A pause that suits steps of minutes, shortened for a run whose steps take seconds."""
        last = self.forecast.last
        short = seconds if last is None else min(seconds, seconds / PAUSE_S * PAUSE_SHARE * last.seconds)
        return max(short, PAUSE_LEAST_S)

    # ---------------------------------------------------------------- facts

    def observe(self, fact: Fact, now: float, *, begins: bool) -> None:
        """What `forecast` has learned already. `begins`: a step begins with this."""
        self._picture = None
        match fact:
            case StepSubmitted() if begins:
                self.step, self.plan, self._trained, self._scored = fact.step, None, 0.0, -1
                self._beliefs.clear()
            case WindowMoved():
                self._trained_at = None if fact.awake else now + self.forecast.sleep_s
            case TrainedGroups() if fact.step == self.step:
                self._trained = float(fact.tokens)
                self._scored, self.reward_s = fact.scored, fact.reward_s
                self._trained_at = now if self._trained_at is not None else None

    # ---------------------------------------------------------------- the moment

    def picture(self, view: RunView, now: float) -> Picture:
        if self._picture is not None and self._picture.now == now:
            return self._picture
        picture = self._picture = Picture(view, self.forecast, now, self._beliefs)
        if self._trained_at is not None and not picture.step.reserved_awake and now > self._trained_at:
            done = self._trained + (now - self._trained_at) / max(self.train_s(picture), 1e-12)
            self._trained, self._trained_at = min(picture.delivered_tokens[1], done), now
        return picture

    def next_picture(self, view: RunView, now: float) -> Picture:
        """The same moment, of the step after the one under way."""
        return Picture(_NextView(view), self.forecast, now, self._beliefs)

    def fresh_picture(self, view: RunView, now: float) -> Picture:
        """Leases may have ended since the last one was made, at this very moment."""
        self._picture = None
        return self.picture(view, now)

    def changed(self) -> None:
        """Leases are about to begin, end or move by what was decided: the next who asks looks again."""
        self.decided_by, self._picture = self._picture, None

    def curve(self, picture: Picture) -> SpeedCurve:
        return self.forecast.curve("harvested", picture.harvested[0].gpus if picture.harvested else 1)

    def train_s(self, picture: Picture) -> float:
        """Seconds to train a token, its share of a round's own cost included."""
        engine_gpus = picture.harvested[0].gpus if picture.harvested else 1
        return self.forecast.train_s(self.curve(picture), engine_gpus, sum(w.gpus for w in picture.reserved))

    def ready_s(self, picture: Picture) -> float:
        """The trainer's work in hand: nothing that comes sooner can end the step sooner. 0 while it does not train."""
        if picture.step.reserved_awake or not picture.reserved:
            return 0.0
        return self.train_s(picture) * max(0.0, picture.delivered_tokens[1] - self._trained)
