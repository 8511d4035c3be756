"""What came out of one simulation: steps, engines, totals. Pure data and arithmetic; knows nothing of how it was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One optimizer step, in seconds. `seed`: reserved GPUs generated and nothing was trained; `toggle`: they changed over;

    `wait`: training GPUs idled for groups; `train` and `update`: computing; `publish`: until the next version was there.
    `window`: seconds from the start until reserved engines first went to sleep. `tokens`: of completions consumed. `age_mean`, `age_most`:
    optimizer steps between the weights that generated its tokens and those that train them; 0 on policy.
    """

    step: int
    start_s: float
    end_s: float
    seed_s: float
    toggle_s: float
    wait_s: float
    train_s: float
    update_s: float
    publish_s: float
    window_s: float
    tokens: int
    samples: int
    moves: int
    harvested: int  # the most engines that were ready at once
    age_mean: float = 0.0
    age_most: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class EngineOutcome:
    """One incarnation of a harvested engine. It held its GPUs from `start_s` to `end_s`. `ready_s` -1: never ready.

    `tokens`: that it made, whatever became of them. `why`: "preempted", "given back", "handed over" (it went on for another run),
    "running" (at the simulation's end). `run`: whose.
    """

    node: str
    gpus: int
    start_s: float
    end_s: float
    ready_s: float
    busy_s: float
    tokens: int
    why: str
    run: str = ""

    @property
    def allocated_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class KvOutcome:
    """What became of the KV blocks of samples that moved, as the router counts it: samples whose blocks were offered; moved; prefilled
    because that was predicted to be quicker; gone or not of all tokens; refused. `tokens`, `nbytes`, `seconds`: of those moved."""

    offered: int
    moved: int
    prefilled: int
    gone: int
    refused: int
    tokens: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReservedOutcome:
    """What a run's reserved GPUs did over the whole simulation: their engines could generate for `awake_s`, and had samples for `busy_s`
    (engine-seconds); `waits`: each time that they slept and nothing was trained (s)."""

    gpus: int
    engines: int
    awake_s: float
    busy_s: float
    waits: tuple[float, ...]

    @property
    def idle_gpu_s(self) -> float:
        """GPU-seconds in which they neither trained nor generated, and changed over to neither."""
        without = max(0.0, self.engines * self.awake_s - self.busy_s)
        return self.gpus * (sum(self.waits) + without / max(1, self.engines))

    def waited_longer(self, least_s: float) -> float:
        """GPU-seconds of the waits of at least so long."""
        return self.gpus * sum(wait for wait in self.waits if wait >= least_s)


@dataclass(frozen=True, slots=True)
class SimulationOutcome:
    """`seconds`: simulated. `level`: (time, GPUs held by harvested engines, idle GPUs of the fleet, ours included) at each change."""

    policy: str
    seconds: float
    gpus_reserved: int
    steps: tuple[StepOutcome, ...]
    engines: tuple[EngineOutcome, ...]
    levels: tuple[tuple[float, int, int], ...]
    generated: int
    recorded: int
    regenerated: int
    prefilled: int
    moves: int
    overflows: int
    events: int
    decisions: Mapping[str, int] = field(default_factory=dict)
    since_s: float = 0.0  # when the run came
    prefill_s: float = 0.0  # of all engines
    kv: KvOutcome | None = None  # with `move_kv`
    reserved: ReservedOutcome | None = None
    loans: int = 0  # of slots of other runs' engines, and the tokens that were made in them
    borrowed_tokens: int = 0

    @property
    def step_seconds(self) -> float:
        """Time over which the finished steps ran."""
        return self.steps[-1].end_s - self.since_s if self.steps else 0.0

    @property
    def tokens(self) -> int:
        return sum(step.tokens for step in self.steps)

    @property
    def tokens_per_s(self) -> float:
        """Training throughput: completion tokens of finished steps a second."""
        return self.tokens / self.step_seconds if self.steps else 0.0

    @property
    def reserved_gpu_hours(self) -> float:
        return self.gpus_reserved * self.step_seconds / HOUR_S

    def _in_steps(self, engine: EngineOutcome) -> float:
        """Seconds that an engine held GPUs while the finished steps ran."""
        return max(0.0, min(engine.end_s, self.since_s + self.step_seconds) - engine.start_s)

    @property
    def harvested_gpu_hours(self) -> float:
        return sum(engine.gpus * self._in_steps(engine) for engine in self.engines) / HOUR_S

    @property
    def idle_allocated_gpu_hours(self) -> float:
        """GPU-hours that harvested engines held without generating: cold starts, weights, waiting. Over the whole simulation."""
        return sum(engine.gpus * (engine.allocated_s - engine.busy_s) for engine in self.engines) / HOUR_S

    @property
    def starts(self) -> int:
        return len(self.engines)

    @property
    def wasted_starts(self) -> int:
        """Engines that were gone before they made a token."""
        return sum(engine.why != "running" and not engine.tokens for engine in self.engines)

    @property
    def preemptions(self) -> int:
        return sum(engine.why == "preempted" for engine in self.engines)

    def dollars(self, reserved_gpu_hour: float, harvested_gpu_hour: float) -> float:
        """What the finished steps cost; harvested GPUs are paid from their jobs' start to their end."""
        return self.reserved_gpu_hours * reserved_gpu_hour + self.harvested_gpu_hours * harvested_gpu_hour

    def tokens_per_dollar(self, reserved_gpu_hour: float, harvested_gpu_hour: float) -> float:
        return self.tokens / self.dollars(reserved_gpu_hour, harvested_gpu_hour) if self.steps else 0.0
