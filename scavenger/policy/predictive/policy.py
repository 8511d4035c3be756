"""The policy that predicts: window, placement, rebalancing, tails and fleet size out of one forecast. Pure.

    facts  --> Forecast (what was learned)
    view   --> Picture  (the moment: what each engine has, and what is to come; the window's plan)
                 |-- seed_window.solve     whether reserved engines go on generating
                 |-- Placer             which queued sample goes where, in which order, how many an engine serves at a time
                 |-- Mover              which running sample changes engines
                 '-- FleetSizer         how many harvested engines

A run asks often: what is dear is done again only when the fleet or the step changed, or after a while. Every controller can be switched off
(`PredictiveSettings`) and is then `Standard`. Owns when the window is solved again. Every answer says what it was made of.

What leases and moves were reckoned with, in numbers for the ledger: expected tokens, engines' curves, the price of a move. Pure.

Looks at the moment by which they were decided (`PolicyForecast.decided_by`) and at nothing anew, so that
being asked changes no answer and costs little. Decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from scavenger.policy import admission, migration
from scavenger.policy import seed_window as windows
from scavenger.policy.admission import NextStep, Pace
from scavenger.policy.fleet_size import Benefit
from scavenger.policy.forecast.lengths import Belief
from scavenger.policy.interface import (
    EnginesAsked,
    Fact,
    Inputs,
    RunView,
    SampleFinished,
    SampleMove,
    SamplePlacement,
    Standard,
    StepFinished,
    StepSubmitted,
    WindowDecision,
    WindowMoved,
    WorkerJoined,
    WorkerLost,
    WorkerReady,
)
from scavenger.policy.predictive.fleet import FleetSizer
from scavenger.policy.predictive.learned import Forecast
from scavenger.policy.predictive.migration import Mover
from scavenger.policy.predictive.placement import Placer
from scavenger.policy.predictive.policy_forecast import PolicyForecast
from scavenger.policy.predictive.settings import PredictiveSettings
from scavenger.policy.predictive.view import Picture
from scavenger.policy.seed_window import ServingOrder

DECISION_KINDS = ("longest first", "group after group")  # as `predictive.placement` numbers them


def of_placements(
    answers: Sequence[SamplePlacement], policy_forecast: PolicyForecast, service: ServingOrder
) -> Inputs:
    """`looked_at`: when the order was found. Of the first answer its expected tokens and its engine; of all what is expected together."""
    picture = policy_forecast.decided_by
    if picture is None:
        return {}
    first = answers[0]
    return {
        "looked_at": picture.now,
        "order": DECISION_KINDS[service.order],
        "limit": service.reason or "all samples at a time",
        **_expected(picture, [answer.sample_id for answer in answers]),
        **_engine(policy_forecast, picture, first.worker_id, ""),
    }


def of_moves(moves: Sequence[SampleMove], policy_forecast: PolicyForecast, margin: float) -> Inputs:
    """What the moves cost their targets, and the first one's two engines. `margin`: what all moves off an engine must win of its time."""
    picture = policy_forecast.decided_by
    if picture is None:
        return {}
    first, leaving = moves[0], {move.sample_id for move in moves}
    curves = {worker.id: picture.curve(worker) for worker in picture.workers if worker.serves}
    cost: dict[str, float] = {}
    if curves:
        price = migration.Price(
            policy_forecast.forecast.prefill_s(next(iter(curves.values()))),
            policy_forecast.forecast.transfer_s,
            margin,
        )
        held = [
            sample
            for worker_id in {move.from_worker for move in moves}
            for sample in picture.held.get(worker_id, ())
        ]
        have = sum(sample.prompt_tokens + sample.length for sample in held if sample.id in leaving)
        cost = {
            "prefill_s": price.token_s,
            "transfer_s": price.move_s,
            "cost_s": price.move_s * len(moves) + price.token_s * have,
        }
    return {
        "looked_at": picture.now,
        "margin": margin,
        **cost,
        **_expected(picture, sorted(leaving)),
        **_engine(policy_forecast, picture, first.from_worker, "from_"),
        **_engine(policy_forecast, picture, first.to_worker, "to_"),
    }


def _expected(picture: Picture, sample_ids: Sequence[int]) -> dict[str, float]:
    known = [picture.expected[sample_id] for sample_id in sample_ids if sample_id in picture.expected]
    return {"expected_tokens": sum(known), "longest_expected": max(known)} if known else {}


def _engine(
    policy_forecast: PolicyForecast, picture: Picture, worker_id: int, which: str
) -> dict[str, float]:
    """How many leases it had, and its decode step: `step_s` + `sample_s` for each sample + `token_s` for each token of context."""
    worker = next((one for one in picture.workers if one.id == worker_id), None)
    if worker is None:
        return {}
    curve = picture.curve(worker)
    named = {
        "leases": worker.leases,
        "step_s": curve.base,
        "sample_s": curve.per_sample,
        "token_s": curve.per_token,
    }
    return {f"{which}{name}": value for name, value in named.items()}


#: Before so many completions were seen no pace is forecast. A distribution is read at so many quantiles.
LEAST_SEEN, QUANTILES = 16, 32
#: A window that ends this soon ends now: asking again would take as long.
SOON_S = 1.0
#: Ask again after this share of the time to the window's end, but within these.
AGAIN_SHARE, AGAIN_MIN_S, AGAIN_MAX_S = 0.5, 4.0, 60.0


class Predictive:
    """A `RouterPolicy`. One for each run; what it has learned goes with it."""

    def __init__(
        self, name: str, settings: PredictiveSettings | None = None, forecast: Forecast | None = None
    ) -> None:
        self.name = name
        self.settings = settings or PredictiveSettings()
        self.forecast = forecast or Forecast()
        self._standard = Standard()
        self._policy_forecast = PolicyForecast(self.forecast)
        self._placer = Placer(self.settings, self._policy_forecast)
        self._mover = Mover(self.settings, self._policy_forecast)
        self._fleet = FleetSizer(self.settings.least_saving, self.settings.rules, self.settings.price)
        self._decision: WindowDecision | None = None
        self._solved_at = self._finished_at = -math.inf  # when the step's newest sample had its last token
        self._new_step = self._changed = True
        self._asked_for = self._unfinished = 0  # samples of the step
        self._asked: tuple[int, str] | None = None
        self._first_asked = self._target = (
            0  # engines: before the first step, and whatever a merged tail freed or a limit left out
        )
        self._before = 0  # engines, before the daemon's restart

    @property
    def every_s(self) -> float:
        return self.settings.every_s if self.settings.rebalance or self.settings.tails else math.inf

    # ---------------------------------------------------------------- facts

    def observe(self, fact: Fact, now: float) -> None:
        begins = isinstance(fact, StepSubmitted) and self.forecast.begins(fact)
        self.forecast.observe(fact, now)
        self._policy_forecast.observe(fact, now, begins=begins)
        self._placer.observe(fact, now, begins=begins)
        self._mover.observe(fact, begins=begins)
        match fact:
            case StepSubmitted() if begins:
                self._asked_for, self._unfinished = fact.samples, fact.samples - fact.finished
                self._decision = None
                self._new_step = self._changed = True
            case StepSubmitted():
                self._unfinished += fact.samples - self._asked_for
                self._asked_for, self._changed = fact.samples, True
            case SampleFinished() if fact.step == self._policy_forecast.step:
                self._unfinished -= 1
                self._finished_at = now
                self._new_step |= self._unfinished == 0  # the window ends at once
            case WindowMoved() | WorkerReady() | WorkerLost() | WorkerJoined():
                self._changed = True
                left = isinstance(fact, WorkerLost) and not fact.bounded
                if left or (isinstance(fact, WorkerReady) and fact.first and not fact.bounded):
                    self._fleet.fleet_changed()
            case EnginesAsked():
                self._first_asked = self._before = fact.engines
                self._fleet.restarted(fact.engines)
            case StepFinished() if fact.purpose == "train":
                if self.forecast.last is not None and self.forecast.last.step == fact.step:
                    self._fleet.step_ended(self.forecast.last.wait)

    # ---------------------------------------------------------------- window

    def window(self, view: RunView, now: float) -> WindowDecision | None:
        if not self.settings.window:
            return None
        known = self._decision
        if known is not None and not self._new_step:
            if now < known.again_at and not self._changed:
                return known
            pause_s = self._policy_forecast.pause_s()
            if now < self._solved_at + pause_s:
                return replace(known, again_at=self._solved_at + pause_s)
        self._decision = self._decide(view, now)
        self._solved_at, self._new_step, self._changed = now, False, False
        return self._decision

    def _decide(self, view: RunView, now: float) -> WindowDecision | None:
        step, policy_forecast = view.step, self._policy_forecast
        policy_forecast.plan = None
        if step.purpose != "train" or not step.samples or not any(w.kind == "reserved" for w in view.workers):
            return None
        unscored = step.delivered - policy_forecast.scored(step.delivered) if step.ahead else 0
        done = step.finished >= step.samples and not unscored
        pace = self.pace(view) if step.ahead else None
        if done and not (step.reserved_awake and pace is not None):
            return WindowDecision(True, f"all {step.samples} samples of step {step.step} are done")
        picture, service = policy_forecast.picture(view, now), self._placer.service
        if step.ahead:
            return self._window_ahead(view, picture, pace, unscored, now)
        situation = picture.situation(policy_forecast.trained, self._placer.ranking.order, service.by.limit)
        plan, inputs = windows.solve(situation), situation.inputs()
        policy_forecast.plan = plan
        why = f"step {step.step}: {plan.reason}" + (f"; {service.by.reason}" if service.by.reason else "")
        soon_s = policy_forecast.pause_s(SOON_S)
        if picture.step.reserved_awake and plan.awake and plan.close_after_s <= soon_s:
            return WindowDecision(True, why, now + AGAIN_MAX_S, inputs)
        left = min(plan.until_s if plan.awake else plan.step_s, AGAIN_MAX_S / AGAIN_SHARE)
        again = min(AGAIN_MAX_S, max(policy_forecast.pause_s(AGAIN_MIN_S), AGAIN_SHARE * left))
        if plan.awake and plan.close_after_s < again:
            again = max(soon_s, plan.close_after_s)
        return WindowDecision(not plan.awake, why, now + again, inputs)

    def _window_ahead(
        self, view: RunView, picture: Picture, pace: Pace | None, unscored: int, now: float
    ) -> WindowDecision:
        """With samples of later steps to generate. `unscored`: groups that the trainer has and whose rewards it waits for."""
        if pace is None:
            why = f"step {view.step.step}: nothing is forecast yet: every engine generates"
            return WindowDecision(False, why, now + admission.AGAIN_LEAST_S)
        forecast, batch = self.forecast, {w.id: max(1, w.leases + w.ahead) for w in picture.workers}
        serving = [batch[worker.id] for worker in picture.harvested if worker.serves]
        usual = max(serving, default=1)
        running = [sample for group in picture.groups.values() for sample in group.running]
        generate_s = max(
            (
                tokens * pace.curve.step_s(each, each * pace.context)
                for tokens, each in zip(
                    picture.imputed.tolist(), [batch.get(s.worker_id, usual) for s in running], strict=True
                )
            ),
            default=0.0,
        )
        train_s, reward_s = self._policy_forecast.train_s(picture), self._policy_forecast.reward_s
        # Rewards of the samples that run come after them; those of the groups that are whole are on their way.
        due_s = max(0.0, reward_s - (now - self._finished_at)) if unscored else 0.0
        rest_s = max(generate_s + reward_s if running else 0.0, due_s)
        whole, tokens_whole = picture.delivered_tokens
        with_rewards = tokens_whole * (1 - min(whole, unscored) / max(1, whole))
        ready_s = train_s * max(0.0, with_rewards - self._policy_forecast.trained)
        following = self._following(view, picture, pace, now) if view.step.reserved_awake else None
        found = admission.window(
            awake=view.step.reserved_awake,
            rest_s=rest_s,
            ready_s=ready_s,
            sleep_s=forecast.sleep_s,
            wake_s=forecast.wake_s,
            left=len(running),
            unscored=unscored,
            following=following,
        )
        why = f"step {view.step.step}: {found.reason}"
        return WindowDecision(found.close, why, now + found.again_s, found.inputs, found.keep_open)

    def _following(self, view: RunView, picture: Picture, pace: Pace, now: float) -> NextStep | None:
        """The next step, where it may be waited for (`admission.may_keep_open`). Without reserved engines its samples run on the harvested
        ones, after what is left of this step, and as many at a time as the fullest of these has."""
        serving = {worker.id: worker for worker in picture.harvested if worker.serves}
        harvested_gpus, reserved_gpus = (
            sum(worker.gpus for worker in some) for some in (serving.values(), picture.reserved)
        )
        if not admission.may_keep_open(view.step.max_off_policy_steps, harvested_gpus, reserved_gpus):
            return None
        batch = max(1, *(worker.leases + worker.ahead for worker in serving.values()))
        following = self._policy_forecast.next_picture(view, now)
        tokens = following.imputed
        if not len(tokens):
            return None
        together = float(tokens.sum() + picture.imputed.sum())
        passes = max(float(tokens.max()), together / (batch * len(serving)))
        rest_s = passes * pace.curve.step_s(batch, batch * pace.context) + self._policy_forecast.reward_s
        forecast = self.forecast
        trained_s = self._policy_forecast.trained * self._policy_forecast.train_s(picture)
        return NextStep(
            left=len(tokens),
            elsewhere=sum(
                one.worker_id not in serving for g in following.groups.values() for one in g.running
            ),
            rest_s=rest_s,
            train_s=max(0.0, pace.busy_s - forecast.sleep_s - forecast.wake_s - trained_s),
            kept_open=self._decision is not None and self._decision.keep_open,
        )

    # ---------------------------------------------------------------- placement, moves, engines

    def place(self, view: RunView, now: float) -> Sequence[SamplePlacement]:
        return self._placer.place(view, now) if self.settings.placement else self._standard.place(view, now)

    def rebalance(self, view: RunView, now: float) -> Sequence[SampleMove]:
        return self._mover.moves(view, now)

    def engines(self, view: RunView, now: float) -> tuple[int, str]:
        if not self.settings.fleet:
            return self._standard.engines(view, now)
        if view.step.purpose != "train" and self._asked is not None:
            return self._asked  # engines stay over an evaluation
        if not view.step.samples or self.forecast.lengths is None:
            number, why = self._standard.engines(view, now)
            if number < min(self._before, view.max_engines):
                number, why = (
                    min(self._before, view.max_engines),
                    f"{self._before} were asked for before the daemon's restart; {why}",
                )
            self._first_asked = self._target = number
            return number, why
        self._before = 0
        target, why = self._fleet.engines(view, self.forecast, now, self._first_asked)
        self._target = self._fleet.state.target
        retired = (
            self._mover.retired
        )  # those that have left too: their place is not to be filled in this step
        if retired:
            # A run that asks for more than there are would else keep what was freed, and start one more.
            others = sum(worker.harvested and worker.id not in retired for worker in view.workers)
            target = max(0, min(target - len(retired), others))
            why = f"{why}; {len(retired)} were freed by merging the step's tail"
        self._asked = target, why
        return self._asked

    def placed_by(self, answers: Sequence[SamplePlacement]) -> Inputs:
        return (
            of_placements(answers, self._policy_forecast, self._placer.service.by)
            if self.settings.placement
            else {}
        )

    def moved_by(self, moves: Sequence[SampleMove]) -> Inputs:
        return of_moves(moves, self._policy_forecast, self.settings.margin)

    def sized_by(self) -> Inputs:
        return (
            {**self._fleet.figures(), "freed": len(self._mover.retired), "target": self._target}
            if self.settings.fleet
            else {}
        )

    def pace(self, view: RunView) -> Pace | None:
        """Of a step like the one under way. None until lengths are known: the first step is over, or nearly."""
        forecast, step = self.forecast, view.step
        if forecast.lengths is None or forecast.lengths.seen < LEAST_SEEN or not step.samples:
            return None
        engines = [worker for worker in view.workers if worker.harvested]
        reserved = [worker for worker in view.workers if worker.kind == "reserved"]
        like = (engines or reserved)[:1]
        gpus = like[0].gpus if like else 1
        curve = forecast.curve("harvested" if engines else "reserved", gpus)
        table = forecast.lengths.table()
        lengths = [table.at(Belief(), 0, (at + 0.5) / QUANTILES) for at in range(QUANTILES)]
        mean, prompt = sum(lengths) / QUANTILES, forecast.prompt.value
        # A long sample is on its engine for longer: what an engine holds is of lengths weighted by themselves, each half done.
        held = prompt + sum(length * length for length in lengths) / sum(lengths) / 2
        trained = step.samples * (mean + prompt)
        train_s = forecast.train_s(curve, gpus, sum(worker.gpus for worker in reserved))
        return Pace(
            tokens=step.samples * mean,
            longest=table.at(Belief(), 0, 1 - 1 / max(2, step.samples)),
            context=held,
            curve=curve,
            busy_s=train_s * trained + forecast.finish.value + forecast.sleep_s + forecast.wake_s,
        )

    def benefit(self) -> Benefit | None:
        """None until a fleet was sized: on priors alone what is idle is taken."""
        return (
            self._fleet.benefit
            if self.settings.fleet and self._asked is not None and self.forecast.start.seen
            else None
        )
