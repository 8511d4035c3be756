"""A run that was lived, played again from its ledger by the real core: what the simulator says of its step times, and by how much it errs.

    ledger --Recording--> fit on every other step --Machines--> play all steps --> step times of the steps that were not fitted

Taken from the recording: how long each completion was and which groups had nothing to teach, when engines registered, were ready and were
lost. Those times count from the beginning of their step, so that a step is played with the fleet that it had although those before it took
longer or shorter. A step that is played slower than life may so lose its last engine with samples left: the next ones of the recording then
come in it, as long after its beginning as they came. Computed: who generates what, the window, moves, queues, the trainer's waiting, and
with them the step's time.

Owns the play and the comparison. `fit` says what machines cost; the parts are the simulator's.

A replay as a reader meets it: each step as it was and as it was played, and how good that is. Pure: a `Replay` in, text out.

The trainer of a replay: the simulator's, with the seconds that were measured of the one that lived. Pure.

Groups without anything to teach are scored and not trained, as they were. Owns nothing but these seconds.

Boundary: a ledger's run; `play` has a scenario.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from statistics import median

from scavenger.config import RunConfig
from scavenger.errors import ConfigError, SimulationError
from scavenger.policy import registry
from scavenger.policy.history import EngineLifetime, RunHistory, Step
from scavenger.protocol.messages import Goodbye, SampleKey
from scavenger.router.core.events import PeerIdentity, WorkerSent
from scavenger.simulate.clock import Simulation, Streams
from scavenger.simulate.fleet import FleetTrace
from scavenger.simulate.outcome import StepOutcome
from scavenger.simulate.policies import SimulatedPolicy
from scavenger.simulate.replay.fit import Machines, config_of, fit, trained_groups
from scavenger.simulate.scenario import Scenario
from scavenger.simulate.site_daemon import SimDaemon
from scavenger.simulate.site_engine import SimEngine, WeightDelays
from scavenger.simulate.site_trainer import OWNER, RUN, SimTrainer, Under
from scavenger.simulate.survey.text import TableRow
from scavenger.simulate.trainer_model import TrainerSpec


def rows(found: Replay) -> tuple[TableRow, ...]:
    machines, rest = found.machines, [pair for pair in found.pairs if not pair.fitted]
    engines = ", ".join(
        f"{kind} {spec.step_s(8, 8 * 64) * 1e3:.1f} ms" for kind, spec in sorted(machines.engines.items())
    )
    curves = f"a decode step of 8 samples of 64 tokens: {engines}; error {machines.rms_error:.1%} rms"
    return (
        TableRow(
            "median error",
            f"{found.median_error:.1%}",
            f"of the times of the {len(rest)} steps that nothing was fitted to",
        ),
        TableRow("error of their sum", f"{found.total_error:+.1%}", ""),
        TableRow(
            "a guess would err by", f"{found.guess_error:.1%}", "the fitted steps' median for every step"
        ),
        TableRow("engines", f"{machines.points} stretches", curves),
        TableRow(
            "trainer",
            f"{machines.ranks} ranks",
            f"{machines.train_token_s * 1e6:,.1f} us a trained token, {machines.score_group_s * 1e3:,.1f} ms a group to score, "
            f"{machines.update_s:.2f} s an update, {machines.publish_s:.2f} s a publication",
        ),
    )


def steps(found: Replay) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """(columns, cells)."""
    cells = tuple(
        (
            str(pair.step),
            f"{pair.live_s:.2f}",
            f"{pair.replayed_s:.2f}",
            f"{pair.error:+.0%}",
            "fitted" if pair.fitted else "",
        )
        for pair in found.pairs
    )
    return ("step", "live s", "replayed s", "error", ""), cells


class ReplayedTrainer(SimTrainer):
    """`trained`: by step, the prompts that had something to teach."""

    def __init__(
        self,
        sim: Simulation,
        daemon: SimDaemon,
        scenario: Scenario,
        simulated_policy: SimulatedPolicy,
        published: Callable[[int], None],
        finished: Callable[[StepOutcome], None],
        machines: Machines,
        trained: Mapping[int, Set[int]],
    ) -> None:
        super().__init__(sim, daemon, scenario, simulated_policy, published, finished)
        self._machines, self._taught = machines, trained

    @property
    def wake_s(self) -> float:
        return 0.0

    def _to_training_s(self) -> float:
        return 0.0

    def _train_s(self, under: Under) -> float:
        """All groups that wait: rank 0 scores them one by one, and those that teach something are trained."""
        groups, under.ready = list(under.ready), deque()
        taught = self._taught[under.step]
        tokens = sum(
            self._scenario.prompt_tokens + length
            for group in groups
            if group.prompt_index in taught
            for length in self._lengths[group.group_id]
        )
        return self._machines.score_group_s * len(groups) + self._machines.train_token_s * tokens

    def _update_s(self) -> float:
        return self._machines.update_s

    def _publish_s(self) -> float:
        return self._machines.publish_s


#: The live daemon's own: seconds between ticks and between heartbeats.
TICK_S, HEARTBEAT_S = 0.25, 1.0
LEAST_STEPS = 4
#: A step that lasts longer than this many times what it took, and than this many seconds, will not end.
FOREVER, FOREVER_S = 100.0, 600.0


@dataclass(frozen=True, slots=True)
class StepPair:
    """A step as it was and as it was played, in seconds. `fitted`: the machines were fitted to it."""

    step: int
    live_s: float
    replayed_s: float
    fitted: bool

    @property
    def error(self) -> float:
        return self.replayed_s / self.live_s - 1


@dataclass(frozen=True, slots=True)
class Replay:
    pairs: tuple[StepPair, ...]
    machines: Machines
    policy: str

    @property
    def median_error(self) -> float:
        """The median of the absolute relative errors over the steps that were not fitted."""
        return median(abs(pair.error) for pair in self.pairs if not pair.fitted)

    @property
    def guess_error(self) -> float:
        """What `median_error` would be of a guess that knows no fleet and no length: the fitted steps' median, every time."""
        guess = median(pair.live_s for pair in self.pairs if pair.fitted)
        return median(abs(guess / pair.live_s - 1) for pair in self.pairs if not pair.fitted)

    @property
    def total_error(self) -> float:
        """Of the time of all steps that were not fitted."""
        rest = [pair for pair in self.pairs if not pair.fitted]
        return sum(pair.replayed_s for pair in rest) / sum(pair.live_s for pair in rest) - 1


def replay(run_history: RunHistory, policy: str = "", ranks: int = 0) -> Replay:
    """Play a recorded run. `policy` "": the one that it ran under. Raises `ConfigError` when the recording does not tell enough."""
    steps = whole_steps(run_history)
    if len(steps) < LEAST_STEPS:
        raise ConfigError(
            f"{len(steps)} whole steps are in the ledger", f"replay a run that took at least {LEAST_STEPS}"
        )
    fitted = {step.step for step in steps[::2]}
    machines = fit(run_history, fitted, ranks)
    name = policy or run_history.policy
    outcomes = _ReplayedSite(run_history, steps, machines, name).run()
    pairs = [
        StepPair(step.step, live_s(step), outcome.seconds, step.step in fitted)
        for step, outcome in zip(steps, outcomes, strict=True)
    ]
    return Replay(tuple(pairs), machines, name)


def whole_steps(run_history: RunHistory) -> list[Step]:
    """Committed steps of the run's usual size. Raises `ConfigError` for one in between that is not."""
    steps = [step for step in run_history.steps if step.committed_at is not None]
    sizes = {
        (len(step.completions), len({completion.group_id for completion in step.completions}))
        for step in steps
    }
    if len(sizes) > 1:
        raise ConfigError(
            f"steps of several sizes: {sorted(sizes)} samples and groups",
            "a run with poisoned samples cannot be replayed",
        )
    return steps


def live_s(step: Step) -> float:
    """From a step's submission to the publication of the next weights, as the trainer had it."""
    return step.metrics["seconds"] + step.metrics.get("seconds_publish", 0.0)


# ---------------------------------------------------------------- what was, for the simulator's parts


@dataclass(frozen=True, slots=True)
class HistoryLengths:
    """Completion lengths by step, place of the prompt in its step, and index."""

    cap: int
    completions: dict[tuple[int, int, int], int]

    def group(self, streams: Streams, step: int, prompt: int, samples: int) -> tuple[int, ...]:
        return tuple(self.completions[step, prompt, index] for index in range(samples))


def _lengths(steps: Sequence[Step]) -> tuple[HistoryLengths, dict[int, frozenset[int]]]:
    """Lengths by place, with steps counted from 1; and each step's places whose groups were trained."""
    completions: dict[tuple[int, int, int], int] = {}
    trained = {}
    for number, step in enumerate(steps, 1):
        positions = {
            prompt: position
            for position, prompt in enumerate(
                sorted({completion.prompt_index for completion in step.completions})
            )
        }
        for completion in step.completions:
            completions[number, positions[completion.prompt_index], completion.index] = max(
                1, completion.length
            )
        trained[number] = frozenset(positions[prompt] for prompt in trained_groups(step))
    return HistoryLengths(max(step.cap for step in steps), completions), trained


def _scenario(
    config: RunConfig,
    steps: Sequence[Step],
    machines: Machines,
    lengths: HistoryLengths,
    lives: Sequence[EngineLifetime],
) -> Scenario:
    first = steps[0].completions
    groups = len({completion.group_id for completion in first})
    spec = machines.engines["reserved"]
    trainer = TrainerSpec(spec.model, spec.gpu, machines.ranks, 1.0, math.inf, math.inf)
    return Scenario(
        reserved=spec,
        reserved_engines=config.reserved.workers,
        harvested=machines.engines["harvested"],
        trainer=trainer,
        lengths=lengths,
        fleet=FleetTrace("recorded", math.inf, {"recorded": 1}, {"recorded": 0}, ()),
        prompts=groups,
        samples=len(first) // groups,
        prompt_tokens=max(1, round(sum(completion.prompt_tokens for completion in first) / len(first))),
        steps=len(steps),
        max_engines=config.run.max_engines,
        max_batch=config.engine.max_batch,
        wake_after_s=config.reserved.wake_after_s,
        heartbeat_s=HEARTBEAT_S,
        tick_s=TICK_S,
    )


# ---------------------------------------------------------------- the play


@dataclass(slots=True)
class _ReplayedEngine:
    """A recorded engine. `waiting`: what to call when it is ready, should it have been asked to load before."""

    life: EngineLifetime
    sim: SimEngine | None = None
    ready: bool = False
    waiting: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class _Due:
    """Something that happened to an engine at `at` (Unix s), so long after its step began."""

    after_s: float
    what: str  # "register" | "ready" | "lost"
    engine: _ReplayedEngine
    at: float


@dataclass(slots=True)
class _Calendar:
    """What is to happen in each step (from 1). What its step was too short for happens as the next one begins."""

    by_step: dict[int, list[_Due]] = field(default_factory=dict)
    pending: list[_Due] = field(default_factory=list)


class _ReplayedSite:
    def __init__(
        self, run_history: RunHistory, steps: Sequence[Step], machines: Machines, policy: str
    ) -> None:
        config = config_of(run_history)
        lengths, trained = _lengths(steps)
        self._steps, self._machines = steps, machines
        self._sim = Simulation()
        self._truth = lengths.completions
        self._scenario = _scenario(config, steps, machines, lengths, run_history.lives)
        maker = registry.named(policy)
        simulated_policy = SimulatedPolicy(
            policy,
            lambda: maker(RUN),
            config.run.harvest,
            config.reserved.workers > 0,
            config.reserved.window,
        )
        self._daemon = SimDaemon(self._sim, lambda _run: simulated_policy.new_policy(), TICK_S, HEARTBEAT_S)
        self._trainer = ReplayedTrainer(
            self._sim,
            self._daemon,
            self._scenario,
            simulated_policy,
            lambda _version: None,
            self._step_done,
            machines,
            trained,
        )
        self._engines = [_ReplayedEngine(life) for life in run_history.lives]
        self._calendar = self._plan()
        self._alive: list[SimEngine] = []
        self._outcomes: list[StepOutcome] = []
        self._began_s = 0.0

    def run(self) -> list[StepOutcome]:
        self._begin(1)
        self._trainer.open()
        self._beat()
        while len(self._outcomes) < len(self._steps):
            self._sim.step()  # heartbeats never end
        return self._outcomes

    def _step_done(self, outcome: StepOutcome) -> None:
        self._outcomes.append(outcome)
        if len(self._outcomes) == len(self._steps):
            self._trainer.stopped = True
        else:
            self._begin(len(self._outcomes) + 1)

    def _beat(self) -> None:
        self._sim.after(HEARTBEAT_S, self._beat, priority=3)
        for engine in self._alive:
            engine.beat()
        if self._stuck():
            self._bring_forward()
        self._going_on()

    def _stuck(self) -> bool:
        """Samples wait, and no engine works or will in this step."""
        able = any(engine.ready and engine.sim is not None and engine.sim.alive for engine in self._engines)
        coming = any(due.what == "ready" for due in self._calendar.pending)
        return not able and not coming and any(run.queue for run in self._daemon.router.core.runs.values())

    def _going_on(self) -> None:
        replayed_s, step = self._sim.now - self._began_s, self._steps[len(self._outcomes)]
        if replayed_s > max(FOREVER * live_s(step), FOREVER_S):
            raise SimulationError(
                f"step {step.step} has been played for {replayed_s:,.0f} s and took {live_s(step):.1f} s: it does not end",
                "this is a bug of the replay: report it with the ledger",
            )

    def _bring_forward(self) -> None:
        """The next engine to be ready comes in this step, so long after its beginning as it came."""
        step = len(self._outcomes) + 1
        later = [
            due for number, dues in sorted(self._calendar.by_step.items()) if number > step for due in dues
        ]
        first = min((due for due in later if due.what == "ready"), key=lambda due: due.at, default=None)
        if first is None:
            name = self._steps[step - 1].step
            raise SimulationError(
                f"step {name} is played slower than it was: its last engine is lost with samples left, and no other comes",
                "how long it would have taken is not known: replay another run",
            )
        moved = [due for due in later if due.engine is first.engine and due.what != "lost"]
        for number, dues in self._calendar.by_step.items():
            self._calendar.by_step[number] = [
                due for due in dues if number <= step or all(due is not one for one in moved)
            ]
        start = self._steps[step - 1].submitted_at
        self._schedule(moved, [max(0.0, due.at - start - (self._sim.now - self._began_s)) for due in moved])

    # ---------------------------------------------------------------- engines

    def _plan(self) -> _Calendar:
        starts = [step.submitted_at for step in self._steps]
        calendar = _Calendar()

        def put(at: float, what: str, engine: _ReplayedEngine) -> None:
            step = max(1, bisect_right(starts, at))
            calendar.by_step.setdefault(step, []).append(
                _Due(max(0.0, at - starts[step - 1]), what, engine, at)
            )

        for engine in self._engines:
            life = engine.life
            put(life.joined_at, "register", engine)
            if life.loads:
                put(life.loads[0].at, "ready", engine)
            if life.left_at is not None:
                put(life.left_at, "lost", engine)
        return calendar

    def _begin(self, step: int) -> None:
        """A step begins: what is left of the one before happens now, and this one's is scheduled."""
        self._began_s = self._sim.now
        left, self._calendar.pending = self._calendar.pending, []
        for due in left:
            self._happen(due)
        coming = sorted(
            self._calendar.by_step.get(step, ()), key=lambda due: due.after_s
        )  # stable: register, ready, lost
        self._schedule(coming, [due.after_s for due in coming])

    def _schedule(self, coming: Sequence[_Due], delays_s: Sequence[float]) -> None:
        self._calendar.pending += coming
        for due, delay_s in zip(coming, delays_s, strict=True):
            self._sim.after(delay_s, functools.partial(self._in_time, due))

    def _in_time(self, due: _Due) -> None:
        if any(due is one for one in self._calendar.pending):
            self._calendar.pending = [one for one in self._calendar.pending if one is not due]
            self._happen(due)

    def _happen(self, due: _Due) -> None:
        engine = due.engine
        if due.what == "register":
            engine.sim = self._start(engine)
            self._alive.append(engine.sim)
            engine.sim.register(self._sim.now)
        elif due.what == "ready":
            engine.ready, done = True, engine.waiting
            if done is not None:
                engine.waiting = None
                done()
        elif engine.sim is not None:
            engine.sim.shut_down(engine.life.reason, notice=engine.life.notice)
            if not engine.life.notice:  # the scheduler said so, or its silence
                self._daemon.post(WorkerSent(engine.sim.conn, Goodbye(engine.life.reason, notice=False)))

    def _start(self, engine: _ReplayedEngine) -> SimEngine:
        life = engine.life
        reserved = life.kind == "reserved"
        key = life.intent_id or f"worker-{life.worker_id}"
        identity = OWNER if reserved else PeerIdentity("worker", f"key-{key}", RUN, key)
        return SimEngine(
            self._sim,
            self._daemon,
            self._machines.engines[life.kind],
            WeightDelays(0.0),
            self._length,
            lambda _sim, _version, done: self._fetch(engine, done),
            self._left,
            kind=life.kind,
            node=life.node,
            identity=identity,
            run=RUN,
            incarnation=life.incarnation,
            slot=f"slot-{life.worker_id}" if reserved else "",
        )

    def _fetch(self, engine: _ReplayedEngine, done: Callable[[], None]) -> None:
        """Its first weights are there when they were; later ones after what that usually takes."""
        if engine.ready:
            self._sim.after(self._machines.load_s[engine.life.kind], done)
        else:
            engine.waiting = done

    def _left(self, engine: SimEngine) -> None:
        self._alive = [one for one in self._alive if one is not engine]

    def _length(self, key: SampleKey) -> int:
        return self._truth[key.step, key.prompt, key.index]
