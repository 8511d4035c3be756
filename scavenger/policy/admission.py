"""When samples of later steps begin: how many samples an engine holds while a step is trained. Pure.

With k steps in advance an engine that the step under way leaves idle generates samples of later steps. The fuller it is the more tokens
it makes a second, and the slower each sample is. A sample of the step under way that is slowed makes the trainer wait; a fleet that is
not full makes it wait later. So groups are admitted at the pace at which they will be trained. With b samples on every engine a step
takes, in the long run,

    T(b) = max( generated(b)   its tokens, by engines of which the reserved ones are the trainer's for `busy_s` of each step
                longest(b)     its longest completion, which has k + `WITHIN` steps from its first token to its training
                busy_s )       what the trainer needs

`generated` falls with b and `longest` grows with it. The limit is the least b whose T is within `NEAR` of the least T: nothing is begun
earlier than it must be, so that no weights are older than they must be. Slots go to the earliest step first (`policy_driver.admit`).

Reserved engines and training share GPUs. On policy a step ends with its longest completion, and the trainer begins early with what is
whole (`seed_window`). With steps in advance it need not: whoever waits for that completion generates for later steps. So reserved engines
generate while the trainer would wait (`window`), and sleep once what is whole keeps it busy until the last sample comes.

Knows no sample, no worker and no clock; `Pace` comes from the run's policy, which forecasts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from scavenger.policy.forecast.speed import SpeedCurve

#: A step's samples begin over about one step: the middle one has k and a half steps until its step is over.
WITHIN = 0.5
#: A limit is as good as another whose step is shorter by less than this share.
NEAR = 0.02


@dataclass(frozen=True, slots=True)
class Pace:
    """What is forecast of a step. `tokens`: of its completions. `longest`: of the longest one. `context`: of a sample on an engine, prompt
    included, on average over time. `curve`: of one engine. `busy_s`: of the trainer's GPUs a step, changes of the window included."""

    tokens: float
    longest: float
    context: float
    curve: SpeedCurve
    busy_s: float


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """`harvested`, `reserved`: engines that generate, or may. `pace`: None while nothing is known."""

    ahead: int
    max_batch: int
    harvested: int
    reserved: int
    pace: Pace | None


@dataclass(frozen=True, slots=True)
class Admission:
    """Samples of all steps that an engine may hold before one of a later step is refused a slot; why; and with which numbers."""

    limit: int
    reason: str
    inputs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Window:
    """Whether reserved engines shall sleep, and why. `again_s`: ask again after so many seconds. `keep_open`: they go on although every
    sample of the step has come."""

    close: bool
    reason: str
    again_s: float
    inputs: Mapping[str, float] = field(default_factory=dict)
    keep_open: bool = False


#: From so many steps in advance reserved engines may generate on for the next step. They do so for about as long as its longest completion
#: takes, with the same weights, and then some k steps are trained without a change. With fewer steps engines run out of samples that these
#: weights may generate: simulated, k = 2 and 3 lost up to a fifth.
KEEP_OPEN_FROM = 4
#: Ask again after this share of the time in which the answer may change, but within these.
AGAIN_SHARE, AGAIN_LEAST_S, AGAIN_MOST_S = 0.5, 2.0, 30.0


@dataclass(frozen=True, slots=True)
class NextStep:
    """The step after the one under way. `left`: of its samples, those that are not done; `elsewhere`: of these, those that no harvested
    engine has. `rest_s`: until the last of them can be trained, if reserved engines generate no more. `train_s`: what the trainer has to do
    until it comes to this step. `kept_open`: for it reserved engines go on already."""

    left: int
    elsewhere: int
    rest_s: float
    train_s: float
    kept_open: bool

    def late_s(self, sleep_s: float) -> float:
        """How long the trainer would wait for it if it began to train now. Once reserved engines go on they do so until harvested engines
        have all that is left: what they would give back is prefilled again, and waits for slots."""
        if self.kept_open and self.elsewhere:
            return math.inf
        return self.rest_s - sleep_s - self.train_s


def may_keep_open(ahead: int, harvested_gpus: int, reserved_gpus: int) -> bool:
    """Whether reserved engines may generate on for the next step, with `ahead` steps in advance. Only where they have more GPUs than the
    harvested engines that generate: else those make most of the next step while this one is trained, and training later gains nothing
    (simulated, four cells with k = 4: 15 % where they are four and two times as many, 5 and -1 % where they are as many)."""
    return ahead >= KEEP_OPEN_FROM and 0 < harvested_gpus < reserved_gpus


def window(
    *,
    awake: bool,
    rest_s: float,
    ready_s: float,
    sleep_s: float,
    wake_s: float,
    left: int,
    unscored: int = 0,
    following: NextStep | None = None,
) -> Window:
    """Whether reserved engines shall sleep. `rest_s`: until the last sample of the step under way can be trained without them; `ready_s`:
    the trainer's work that is there; `sleep_s`, `wake_s`: what a change costs; `left`: samples of the step that are not done;
    `unscored`: its groups that are whole and have no rewards yet. The trainer can do nothing with those: they are no work that is there.

    A change back must win what both changes cost. A change that can be saved is: where the trainer would soon wait for the next step as
    well (`following`), reserved engines that are awake generate on until it would not, and both steps are trained one after the other.
    """
    inputs = {
        "rest_s": rest_s,
        "ready_s": ready_s,
        "sleep_s": sleep_s,
        "wake_s": wake_s,
        "left": float(left),
        "unscored": float(unscored),
    }
    if awake and following is not None and (late_s := following.late_s(sleep_s)) > 0:
        return _keep_open(following, late_s, inputs)
    need = ready_s + sleep_s + (0.0 if awake else wake_s + sleep_s)
    again = min(AGAIN_MOST_S, max(AGAIN_LEAST_S, AGAIN_SHARE * abs(rest_s - need)))
    what = f"{left} samples of the step are"
    if unscored:
        what = f"{left} samples of the step and the rewards of {unscored} groups are"
    figures = f"{what} {rest_s:.1f} s from done, the trainer has {ready_s:.1f} s to do"
    if not left and not unscored:
        return Window(True, "every sample of the step is done", AGAIN_MOST_S, inputs)
    if rest_s <= need:
        return Window(True, f"{figures}: it would not wait", again, inputs)
    return Window(False, f"{figures}: its GPUs generate for later steps meanwhile", again, inputs)


def _keep_open(following: NextStep, late_s: float, inputs: Mapping[str, float]) -> Window:
    why = (
        f"{following.left} samples of the next step are {following.rest_s:.1f} s from done without reserved engines, and "
        f"{following.elsewhere} of them are on no harvested engine; training this step takes {following.train_s:.1f} s: "
        "reserved engines generate on, and both steps are trained one after the other"
    )
    more = {
        "next_left": float(following.left),
        "next_elsewhere": float(following.elsewhere),
        "next_rest_s": following.rest_s,
        "train_s": following.train_s,
    }
    again = (
        AGAIN_LEAST_S if late_s == math.inf else min(AGAIN_MOST_S, max(AGAIN_LEAST_S, AGAIN_SHARE * late_s))
    )
    return Window(False, why, again, {**inputs, **more}, keep_open=True)


def generated_s(view: AdmissionView, pace: Pace, batch: int) -> float:
    """Seconds in which the engines make a step's tokens with `batch` samples each."""
    rate = pace.curve.tokens_per_s(batch, pace.context)
    alone = pace.tokens / (rate * view.harvested) if view.harvested else math.inf
    if alone <= pace.busy_s or not view.reserved:
        return alone
    return (pace.tokens / rate + view.reserved * pace.busy_s) / (view.harvested + view.reserved)


def longest_s(view: AdmissionView, pace: Pace, batch: int) -> float:
    """Seconds that a step lasts at least for its longest completion to be whole in time."""
    return pace.longest * pace.curve.step_s(batch, batch * pace.context) / (view.ahead + WITHIN)


def step_s(view: AdmissionView, pace: Pace, batch: int) -> float:
    return max(generated_s(view, pace, batch), longest_s(view, pace, batch), pace.busy_s)


def limit(view: AdmissionView) -> Admission:
    """How many samples an engine may hold for later steps' sake."""
    pace = view.pace
    if pace is None:
        return Admission(view.max_batch, "nothing is forecast yet: every slot is used")
    if view.harvested + view.reserved < 1:
        return Admission(view.max_batch, "no engine generates")
    predicted = {batch: step_s(view, pace, batch) for batch in range(1, view.max_batch + 1)}
    least = min(predicted.values())
    chosen = next(batch for batch, seconds in predicted.items() if seconds <= least * (1 + NEAR))
    parts = {
        "generating": generated_s(view, pace, chosen),
        "the longest completion": longest_s(view, pace, chosen),
        "training": pace.busy_s,
    }
    bound = max(parts, key=lambda part: parts[part])
    reason = (
        f"{chosen} samples an engine: a step takes {predicted[chosen]:.0f} s, by {bound} "
        f"({', '.join(f'{part} {seconds:.0f} s' for part, seconds in parts.items())}); "
        f"{predicted[view.max_batch]:.0f} s with {view.max_batch}"
    )
    inputs = {
        "limit": float(chosen),
        "step_s": predicted[chosen],
        "generated_s": parts["generating"],
        "longest_s": parts["the longest completion"],
        "busy_s": pace.busy_s,
        "full_s": predicted[view.max_batch],
        "tokens": pace.tokens,
        "longest": pace.longest,
        "harvested": float(view.harvested),
        "reserved": float(view.reserved),
        "ahead": float(view.ahead),
    }
    return Admission(chosen, reason, inputs)
