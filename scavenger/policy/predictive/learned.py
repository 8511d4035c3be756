"""All that a run's controllers have learned, from facts alone: lengths, engines, the trainer, starts, lives. Pure.

Each part states its own prior (`policy.forecast`: `lengths`, `speed`, `survival`); here are the priors of plain durations. They say what a
mid-size model on one GPU takes, and matter until the first step is over (`speed.Average`). Knows facts (`interface.Fact`) and no view,
decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scavenger.policy.forecast.lengths import LengthForecast
from scavenger.policy.forecast.speed import PREFILL_SHARE, Average, Curves, Ratio, RoundFit, SpeedCurve
from scavenger.policy.forecast.step import Costs
from scavenger.policy.forecast.survival import ObservedLife, Survival
from scavenger.policy.interface import (
    EngineProgress,
    Fact,
    SampleFinished,
    StepFinished,
    StepSubmitted,
    Toggled,
    TrainedGroups,
    WorkerJoined,
    WorkerLost,
    WorkerReady,
)

PRIOR_START_S = 60.0
PRIOR_LOAD_S = 10.0
PRIOR_FINISH_S = 10.0
PRIOR_TOGGLE_S = 5.0
PRIOR_TRANSFER_S = 0.1
#: Training a token takes so many prefills of it on one GPU: four passes of the weights for its one, at less of the peak.
TRAIN_PREFILLS = 6.0
#: The prior is worth so many trained tokens while the first step is under way: a round or two of short completions say little.
TRAIN_PRIOR_TOKENS = 10_000.0
#: A step that trains for less tells nothing of rounds. (None trains fewer tokens than rounds either: figures come from peers.)
LEAST_TRAIN_S = 1e-6
#: Pieces of a running engine's life are reported_s to the survival curves this often, so that they count as lives at risk.
LIFE_PIECE_S = 900.0
#: Lives are not reported_s apart below this.
LOSS_LEAST_S = 10.0


@dataclass(frozen=True, slots=True)
class LiveEngine:
    """An engine that lives. `reported_s`: the age up to which its life is in the survival curves."""

    kind: str
    node: str
    gpus: int
    joined_at: float
    reported_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepSeen:
    """What a committed step was like. `wait`: the share of it that its GPUs did not train: they generated, changed over or idled."""

    step: int
    seconds: float
    wait: float
    tokens: float


#: A pace that was measured so many training steps ago says nothing of how many samples an engine can serve.
STALE_STEPS = 2


def engine_class(kind: str, gpus: int) -> str:
    """Engines that are taken for alike: kind and GPUs. (Reserved ones have less memory than harvested ones.)"""
    return f"{kind} x{gpus}"


def node_class(gpus: int) -> str:
    """Nodes whose lives are taken for alike."""
    return f"{gpus} GPUs"


@dataclass(slots=True)
class Forecast:
    """Feed it every fact, in order. `lengths` is None until the cap is known (`capped`).

    `train`: seconds a token, rounds included; `rounds`: the same reported_s apart, where the trainer says how many rounds there were.
    `sleep`, `wake`: what toggles cost engines; `to_training`, `to_generating`: what they cost the trainer, where it says so in its metrics.
    """

    curves: Curves = field(default_factory=Curves)
    survival: Survival = field(default_factory=Survival)
    start: Average = field(default_factory=lambda: Average(PRIOR_START_S))
    loads: dict[str, Average] = field(default_factory=dict)
    finish: Average = field(default_factory=lambda: Average(PRIOR_FINISH_S))
    train: Ratio = field(default_factory=lambda: Ratio(0.0, 20.0))
    rounds: RoundFit = field(default_factory=RoundFit)
    sleep: Average = field(default_factory=lambda: Average(PRIOR_TOGGLE_S))
    wake: Average = field(default_factory=lambda: Average(PRIOR_TOGGLE_S))
    to_training: Average = field(default_factory=lambda: Average(0.0, 1e-6))
    to_generating: Average = field(default_factory=lambda: Average(0.0, 1e-6))
    transfer_s: float = PRIOR_TRANSFER_S
    lengths: LengthForecast | None = None
    last: StepSeen | None = None
    engines: dict[int, LiveEngine] = field(default_factory=dict)
    prompt: Average = field(default_factory=lambda: Average(0.0, 1e-6, 500.0))
    _training: TrainedGroups | None = None  # how far the step under way is, while no step was seen whole
    _step: StepSubmitted | None = None  # the newest, as it was asked for last
    _submitted_at: float | None = None
    _evaluating: bool = False
    _begun: int = 0  # training steps
    _paced: dict[str, int] = field(
        default_factory=dict
    )  # class of engines -> how many had begun when its pace was measured last
    _versions: dict[int, int] = field(default_factory=dict)  # worker -> what it loaded last
    _groups: dict[int, dict[int, list[int]]] = field(
        default_factory=dict
    )  # step -> group -> lengths of its finished samples
    _tokens: dict[int, int] = field(
        default_factory=dict
    )  # step -> tokens of finished samples, prompts included

    def capped(self, cap: int) -> LengthForecast:
        """The lengths' forecast for completions of at most `cap` tokens, or of the most that was asked for before: an evaluation or a
        prompt with a cap of its own unlearns nothing."""
        if self.lengths is None:
            self.lengths = LengthForecast(cap)
            for groups in self._groups.values():
                for length in (length for group in groups.values() for length in group):
                    self.lengths.finished(min(length, cap))
        elif cap > self.lengths.cap:
            self.lengths = self.lengths.widened(cap)
        return self.lengths

    def observe(self, fact: Fact, now: float) -> None:
        match fact:
            case (
                EngineProgress(bounded=True)
                | WorkerJoined(bounded=True)
                | WorkerReady(bounded=True)
                | WorkerLost(bounded=True)
            ):
                pass  # how fast it is, and how long it lives, is the doing of the service beside it
            case SampleFinished():
                if not self._evaluating:  # its sampling, and so its lengths, are others
                    self._sample_finished(fact)
            case EngineProgress():
                if fact.batch > 0 and fact.tokens > 0 and fact.seconds > 0:
                    kind = engine_class(fact.kind, fact.gpus)
                    self.curves.observe(
                        kind, fact.batch, fact.context, fact.seconds * fact.batch / fact.tokens
                    )
                    self._paced[kind] = self._begun
            case WorkerJoined():
                self.engines[fact.worker_id] = LiveEngine(fact.kind, fact.node, fact.gpus, now)
            case WorkerReady():
                self._worker_ready(fact, now)
                if fact.worker_id not in self.engines:
                    self.engines[fact.worker_id] = LiveEngine(
                        fact.kind, fact.node, fact.gpus, now - fact.start_s
                    )
            case WorkerLost():
                self._worker_lost(fact, now)
            case Toggled():
                (self.wake if fact.awake else self.sleep).observe(fact.seconds)
            case StepSubmitted():
                if self.begins(fact):
                    self._submitted_at, self._evaluating = now, fact.purpose != "train"
                    self._begun += not self._evaluating
                self._step = fact
                if fact.cap and not self._evaluating:
                    self.capped(fact.cap)
            case TrainedGroups() if not self.train.seen:
                self._training = fact
            case StepFinished():
                self._step_finished(fact)
                self._report_lives(now)

    def begins(self, fact: StepSubmitted) -> bool:
        """Whether a step begins with this, asked before it is observed.

        A step that asks for more samples (replacements, another call's share) goes on; one that asks for no more is another attempt's.
        """
        known = self._step
        return (
            known is None
            or (fact.step, fact.purpose) != (known.step, known.purpose)
            or fact.samples <= known.samples
        )

    @property
    def sleep_s(self) -> float:
        """From the window's end until the trainer computes: engines give memory back while it takes its state, and the later one counts."""
        return max(self.sleep.value, self.to_training.value)

    @property
    def wake_s(self) -> float:
        return max(self.wake.value, self.to_generating.value)

    def load_s(self, kind: str) -> float:
        """From a step's submission until an engine of this kind has its weights."""
        known = self.loads.get(kind)
        return known.value if known else PRIOR_LOAD_S

    # ---------------------------------------------------------------- what costs follow

    def paced_lately(self, kind: str, gpus: int) -> bool:
        """Whether such engines' pace was measured in this step or the one before, or never.

        An engine is measured while it holds the same samples from one heartbeat to the next. Where completions are shorter than that it is
        so only while the machine is slow, and what was found then would hold for good: with the few samples that it allows none is
        measured.
        """
        return self._begun - self._paced.get(engine_class(kind, gpus), self._begun) < STALE_STEPS

    def curve(self, kind: str, gpus: int) -> SpeedCurve:
        return self.curves.curve(engine_class(kind, gpus))

    def prefill_s(self, curve: SpeedCurve) -> float:
        """Seconds to prefill a token on such an engine."""
        return PREFILL_SHARE * curve.base

    def train_s(self, curve: SpeedCurve, engine_gpus: int, trainer_gpus: int) -> float:
        """Seconds to train a token, with what its round costs shared among them all. In the first step: by what was trained of it."""
        prior = TRAIN_PREFILLS * self.prefill_s(curve) * engine_gpus / max(1, trainer_gpus)
        if self._training is not None and self._training.tokens > 0:
            known = Ratio(prior, TRAIN_PRIOR_TOKENS)
            known.observe(self._training.tokens, self._training.seconds)
            return known.value()
        return self.train.value(prior)

    def costs(self, curve: SpeedCurve, engine_gpus: int, trainer_gpus: int) -> Costs:
        """What the trainer and a change of the window cost; `curve` of the engines that prefill, `trainer_gpus` = the trainer's ranks."""
        round_s, train_s = self.rounds.costs() or (0.0, self.train_s(curve, engine_gpus, trainer_gpus))
        return Costs(
            prefill_s=self.prefill_s(curve),
            train_s=train_s,
            round_s=round_s,
            round_groups=max(1, trainer_gpus),
            sleep_s=self.sleep_s,
            wake_s=self.wake_s,
            finish_s=self.finish.value,
        )

    def loss_per_s(self, gpus: int, now: float) -> float:
        """The hazard that a harvested engine is lost, over the next step (at most a quarter of an hour) of one of unknown age.

        Where engines live for seconds, all that outlast a quarter of an hour say nothing of a step that takes seconds too.
        """
        horizon_s = (
            LIFE_PIECE_S if self.last is None else min(LIFE_PIECE_S, max(LOSS_LEAST_S, self.last.seconds))
        )
        return self.survival.curve(node_class(gpus), now).hazard_to(horizon_s) / horizon_s

    # ---------------------------------------------------------------- facts

    def _sample_finished(self, fact: SampleFinished) -> None:
        self._groups.setdefault(fact.step, {}).setdefault(fact.group_id, []).append(fact.length)
        self._tokens[fact.step] = self._tokens.get(fact.step, 0) + fact.length + fact.prompt_tokens
        self.prompt.observe(fact.prompt_tokens)
        if self.lengths is not None:
            self.lengths.finished(fact.length)

    def _worker_ready(self, fact: WorkerReady, now: float) -> None:
        repeated = (
            self._versions.get(fact.worker_id) == fact.version
        )  # asked again while its answer was on the way
        self._versions[fact.worker_id] = fact.version
        if fact.first:
            self.start.observe(fact.start_s)
        elif not repeated and self._submitted_at is not None and now >= self._submitted_at:
            self.loads.setdefault(fact.kind, Average(PRIOR_LOAD_S)).observe(now - self._submitted_at)

    def _worker_lost(self, fact: WorkerLost, now: float) -> None:
        engine = self.engines.pop(fact.worker_id, None)
        self._versions.pop(fact.worker_id, None)
        if fact.kind == "harvested":
            reported_s = engine.reported_s if engine else 0.0
            self.survival.observe(
                node_class(fact.gpus),
                now,
                ObservedLife(max(fact.life_s, reported_s), fact.preempted, reported_s),
            )

    def _report_lives(self, now: float) -> None:
        for worker_id, engine in sorted(self.engines.items()):
            age = now - engine.joined_at
            if engine.kind == "harvested" and age - engine.reported_s >= LIFE_PIECE_S:
                self.survival.observe(
                    node_class(engine.gpus), now, ObservedLife(age, False, engine.reported_s)
                )
                self.engines[worker_id] = LiveEngine(
                    engine.kind, engine.node, engine.gpus, engine.joined_at, age
                )

    def _step_finished(self, fact: StepFinished) -> None:
        groups = self._groups.pop(fact.step, {})
        tokens = float(self._tokens.pop(fact.step, 0))
        for step in [step for step in self._groups if step < fact.step]:  # given up, or of an earlier attempt
            del self._groups[step]
            self._tokens.pop(step, None)
        if fact.purpose != "train":
            return
        if self.lengths is not None:
            self.lengths.step_ended([groups[key] for key in sorted(groups)])
        seconds, metrics = fact.metrics.get("seconds", 0.0), fact.metrics
        if "seconds_train" in metrics and tokens > 0:
            self.train.observe(tokens, metrics["seconds_train"])
            self._training = None
            if 0 < metrics.get("rounds", 0.0) <= tokens and metrics["seconds_train"] > LEAST_TRAIN_S:
                self.rounds.observe(metrics["rounds"], tokens, metrics["seconds_train"])
        if "seconds_update" in metrics:
            self.finish.observe(metrics["seconds_update"] + metrics.get("seconds_publish", 0.0))
        if "seconds_to_training" in metrics:
            self.to_training.observe(metrics["seconds_to_training"])
        if "seconds_to_generating" in metrics:
            self.to_generating.observe(metrics["seconds_to_generating"])
        if seconds > 0:
            busy = metrics.get("seconds_train", 0.0) + metrics.get("seconds_update", 0.0)
            wait = min(1.0, max(0.0, 1 - busy / seconds))
            self.last = StepSeen(fact.step, seconds, wait, tokens)
