"""The question every site asks: what would our idle GPUs give, how often would engines be taken, and what would others notice? Pure.

    Fleet --replay--> engines --ready_s--> working engines by hour, preemptions, jobs that found an engine in their place

Owns the answers to what idle GPUs alone tell. What a training run gains needs a run: `SpeedUp` is the driver's to compute and is handed in;
without one the answer says why. Knows nothing of files, screens and how a fleet was observed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, tzinfo

from scavenger.errors import ConfigError
from scavenger.simulate.decode import SimulatedEngine
from scavenger.simulate.fleet import FleetTrace, Occupation
from scavenger.simulate.fleet_stats import HOUR_S, idle_time_outlasting, measure
from scavenger.simulate.survey.engines import Hour, SurveyedEngine, by_hour, replay, working_s
from scavenger.simulate.survey.waits import Delayed, Timing, delayed


@dataclass(frozen=True, slots=True)
class Observed:
    """A fleet, and what else its source knows. `since`: Unix s of time 0, None for a trace without a date. `notes`: print them.

    `jobs` are others'; `waits_s` what those that started waited. Both empty where the source has no jobs.
    """

    fleet: FleetTrace
    since: float | None = None
    jobs: tuple[Occupation, ...] = ()
    waits_s: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask of a fleet. `most`: engines at once (None: as many as fit). `notice_s`: until the daemon has seen an idle GPU."""

    spec: SimulatedEngine
    cold_start_s: float
    notice_s: float = 60.0
    most: int | None = None
    timing: Timing = field(default_factory=Timing)
    zone: tzinfo = UTC

    @property
    def ready_s(self) -> float:
        """From a GPU that turns idle to an engine that generates on it."""
        return self.notice_s + self.cold_start_s


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Tokens a second of a named run with and without harvesting, on this fleet, as the driver played it. `low`, `high`: its 95 % CI.

    `setting` names model, reserved GPUs, prompts, cap and seeds: a factor without them means nothing. `notes`: what was assumed.
    """

    factor: float
    low: float
    high: float
    alone_tokens_per_s: float
    with_tokens_per_s: float
    setting: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TraceSurvey:
    """The answers. GPU-hours are over the whole period; `*_per_h` are rates over it.

    `outlasting`: share of idle GPU time in idle slices longer than `ready_s`. `usable_gpu_h`: what engines would have had to generate with,
    start-ups paid and only whole engines counted. `wasted_starts`: share of started engines that never got to generate.
    """

    observed: Observed
    question: Question
    hours: float
    gpus: int
    idle_gpu_h: float
    idle_mean: float
    outlasting: float
    usable_gpu_h: float
    engines: tuple[SurveyedEngine, ...]
    started: int
    wasted: int
    preemptions_per_h: float
    typical_life_s: float
    by_hour: tuple[Hour, ...]
    delayed: Delayed | None

    @property
    def wasted_starts(self) -> float:
        return self.wasted / self.started if self.started else 0.0

    @property
    def engines_mean(self) -> float:
        return self.usable_gpu_h / self.question.spec.gpus / self.hours


def survey(observed: Observed, question: Question) -> TraceSurvey:
    """Every answer that the idle GPUs give."""
    fleet = observed.fleet
    if max(fleet.capacity.values()) < question.spec.gpus:
        what = f"no node has {question.spec.gpus} GPUs, which an engine takes: the largest has {max(fleet.capacity.values())}"
        raise ConfigError(what, "an engine is on one node: give fewer --gpus-per-engine")
    engines = replay(fleet, question.spec.gpus, question.most)
    started = [engine for engine in engines if engine.length_s > question.notice_s]
    wasted = [engine for engine in started if engine.lost and engine.length_s <= question.ready_s]
    preempted = [engine for engine in started if engine.lost and engine.length_s > question.ready_s]
    ended = sorted(engine.length_s - question.ready_s for engine in preempted)
    hours = fleet.end_s / HOUR_S
    statistics = measure(fleet)
    return TraceSurvey(
        observed=observed,
        question=question,
        hours=hours,
        gpus=fleet.gpus,
        idle_gpu_h=statistics.idle_mean * hours,
        idle_mean=statistics.idle_mean,
        outlasting=idle_time_outlasting(fleet, question.ready_s),
        usable_gpu_h=working_s(engines, question.ready_s) * question.spec.gpus / HOUR_S,
        engines=engines,
        started=len(started),
        wasted=len(wasted),
        preemptions_per_h=len(preempted) / hours,
        typical_life_s=ended[len(ended) // 2] if ended else 0.0,
        by_hour=by_hour(engines, question.ready_s, fleet.end_s, observed.since or 0.0, question.zone),
        delayed=delayed(observed.jobs, engines, observed.waits_s, question.notice_s)
        if observed.jobs
        else None,
    )
