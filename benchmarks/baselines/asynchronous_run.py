"""Plays an asynchronous trainer (`asynchronous`) over the engines that a run of ours had: the same starts and preemptions.

    groups --Rule.admit--> engines --whole--> queue --Rule.first, a batch--> trainer --> new version --> engines load it

As those systems are laid out, rollout and training have GPUs of their own: of the reserved GPUs some generate throughout, the others train.
`best` takes the split with the most tokens a second, so that none of them is judged by a poor one. In their favour: weights come to all
engines at once at each one's full rate while it generates, a request goes to the emptiest engine, nothing else costs anything. An engine
that is lost costs its samples all of their tokens (none of the three has them anywhere else); they begin again elsewhere.

Lengths, decode speed and the trainer's cost are the simulator's (`decode`, `lengths`, `trainer_model`).
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from benchmarks.baselines.asynchronous import Counts, Queued, Rule
from benchmarks.baselines.registry import running_context
from scavenger.simulate import trainer_model as cost
from scavenger.simulate.clock import Streams
from scavenger.simulate.decode import DecodeCurve, SimulatedEngine, Stretch
from scavenger.simulate.outcome import EngineOutcome
from scavenger.simulate.scenario import Scenario
from scavenger.simulate.trainer_model import TrainerSpec

#: Of a GPU's memory, what training state may take at most: activations and gathered parameters need the rest.
STATE_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Life:
    """An engine generates from `start_s` to `end_s`."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StepPlayed:
    """`age`: versions between a trained group's first token and the weights that train it: the mean and the most."""

    end_s: float
    tokens: int
    age_mean: float
    age_most: int


@dataclass(frozen=True, slots=True)
class Played:
    """`thrown`: samples whose tokens were thrown away for age; `lost_tokens`: with engines. `generating`: reserved engines that do."""

    steps: tuple[StepPlayed, ...]
    thrown: int
    lost_tokens: int
    generating: int

    def tokens_per_s(self, since_s: float) -> float:
        """Of the steps that began after `since_s`; 0 where there are fewer than two ends."""
        ends = [step for step in self.steps if step.end_s >= since_s]
        return sum(s.tokens for s in ends[1:]) / (ends[-1].end_s - ends[0].end_s) if len(ends) > 1 else 0.0


@dataclass(slots=True, eq=False)
class _Sample:
    group: int
    length: int
    index: int = 0
    generated: int = 0  # in chunks that are done
    done: bool = False


@dataclass(slots=True)
class _Engine:
    """What it holds runs in step: a sample is whole when `steps` reaches its place in `ends`. `at`: up to when that is reckoned."""

    spec: SimulatedEngine
    most: int
    at: float
    steps: float = 0.0
    context: float = 0.0
    ends: list[tuple[float, int, _Sample]] = field(default_factory=list)
    began: dict[int, float] = field(default_factory=dict)  # id of a sample's entry -> `steps` when it came
    turn: int = 0  # what was planned before is void
    siblings: Callable[[int], int] = lambda group: (
        0
    )  # of a group, those that are done: what speculation drafts from
    _curve: tuple[int, int, DecodeCurve] | None = None  # (turn, batch, curve) with speculation

    def _stretch(self) -> Stretch:
        batch = len(self.ends)
        if self.spec.acceptance is None:
            return Stretch(self.spec.curve(batch), batch, self.context)
        if self._curve is None or self._curve[:2] != (self.turn, batch):
            known = sum(self.siblings(sample.group) for _, _, sample in self.ends) / batch
            self._curve = (self.turn, batch, self.spec.token_curve(batch, self.context, known)[0])
        return Stretch(self._curve[2], batch, self.context)

    def advance(self, now: float) -> None:
        if now > self.at and self.ends:
            steps = self._stretch().steps(now - self.at)
            self.steps += steps
            self.context += steps * len(self.ends)
        self.at = max(self.at, now)

    def stall(self, seconds: float) -> None:
        self.at += seconds

    def next_s(self) -> float:
        return self.at + self._stretch().seconds(max(0.0, self.ends[0][0] - self.steps))


class _Play:
    def __init__(self, scenario: Scenario, rule: Rule, lives: Sequence[Life], trainer: TrainerSpec) -> None:
        self._sc, self._rule, self._trainer = scenario, rule, trainer
        self._streams = Streams(scenario.seed)
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._engines: list[_Engine] = []
        self._waiting: deque[_Sample] = deque()
        self._groups: dict[int, list[_Sample]] = {}  # in flight
        self._longest: dict[int, int] = {}  # of a group in flight: its longest completion that ended
        self._began: dict[int, int] = {}  # group -> the version with which it began
        self._queue: list[Queued] = []  # in the order in which they became whole
        self._whole_samples: dict[int, list[_Sample]] = {}  # of each queued group
        self._version = self._accepted = self._since = self._next = self._in_flight = 0
        self._training = False
        self.steps: list[StepPlayed] = []
        self.thrown = self.lost_tokens = 0
        context = running_context(scenario)
        self._most = min(scenario.max_batch, scenario.harvested.max_batch(context))
        for life in lives:
            self._at(life.start_s, partial(self._joins, life=life))

    def run(self, end_s: float) -> None:
        self._admit(0.0)
        while self._events and self._events[0][0] <= end_s:
            at, _, act = heapq.heappop(self._events)
            act(at)

    def _at(self, at: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), act))

    # ---------------------------------------------------------------- groups

    def _counts(self) -> Counts:
        return Counts(
            self._version,
            len(self._groups),
            len(self._queue),
            self._accepted,
            self._since,
            self._sc.prompts,
            self._in_flight,
            self._sc.samples,
            self._training,
        )

    def _admit(self, now: float) -> None:
        sc = self._sc
        for _ in range(self._rule.admit(self._counts())):
            step, prompt = divmod(self._next, sc.prompts)
            lengths = sc.lengths.group(self._streams, step + 1, prompt, sc.samples)
            samples = [_Sample(self._next, length, index) for index, length in enumerate(lengths)]
            self._groups[self._next], self._began[self._next] = samples, self._version
            self._waiting.extend(samples)
            self._in_flight += len(samples)
            self._next += 1
            self._since += 1
        self._place(now)

    def _place(self, now: float) -> None:
        came: dict[int, list[_Sample]] = {}
        while self._waiting and self._engines:
            index, engine = min(enumerate(self._engines), key=lambda one: len(one[1].ends))
            if len(engine.ends) >= self._most:
                break
            at = self._rule.pick(self._waiting, self._longest)
            sample = self._waiting[at]
            del self._waiting[at]
            engine.advance(now)
            number = next(self._numbers)
            engine.began[number] = engine.steps
            left = sample.length - sample.generated
            chunk = min(left, self._rule.chunk_tokens or left)
            heapq.heappush(engine.ends, (engine.steps + chunk, number, sample))
            engine.context += self._sc.prompt_tokens + sample.generated
            came.setdefault(index, []).append(sample)
        for index, some in came.items():
            engine = self._engines[index]
            new = sum(not sample.generated for sample in some)
            engine.stall(engine.spec.prefill_many_s([(self._sc.prompt_tokens, 0)] * new))
            self._plan(engine)

    # ---------------------------------------------------------------- engines

    def _joins(self, now: float, life: Life) -> None:
        engine = _Engine(self._sc.harvested, self._most, now, siblings=self._done_of)
        self._engines.append(engine)
        self._at(life.end_s, lambda at: self._leaves(at, engine))
        self._place(now)

    def _leaves(self, now: float, engine: _Engine) -> None:
        engine.advance(now)
        self._engines.remove(engine)
        engine.turn += 1
        for _, number, sample in sorted(engine.ends, key=lambda one: one[1], reverse=True):
            self.lost_tokens += int(engine.steps - engine.began[number])
            self._waiting.appendleft(sample)
        engine.ends = []
        self._place(now)

    def _plan(self, engine: _Engine) -> None:
        engine.turn += 1
        if engine.ends:
            turn = engine.turn
            self._at(engine.next_s(), lambda at: self._finishes(at, engine, turn))

    def _finishes(self, now: float, engine: _Engine, turn: int) -> None:
        if turn != engine.turn:
            return
        engine.advance(now)
        while engine.ends and engine.ends[0][0] <= engine.steps + 1e-6:
            end, number, sample = heapq.heappop(engine.ends)
            made = end - engine.began.pop(number)
            engine.context -= self._sc.prompt_tokens + sample.generated + made
            sample.generated += round(made)
            if sample.generated < sample.length:
                self._waiting.append(sample)
                continue
            sample.done = True
            self._in_flight -= 1
            self._longest[sample.group] = max(sample.length, self._longest.get(sample.group, 0))
            self._whole(sample.group)
        self._plan(engine)
        self._train(now)
        self._admit(now)

    def _done_of(self, group: int) -> int:
        return sum(sample.done for sample in self._groups[group])

    def _whole(self, group: int) -> None:
        if not all(sample.done for sample in self._groups[group]):
            return
        began, samples = self._began.pop(group), self._groups.pop(group)
        self._longest.pop(group, None)
        if self._rule.too_old(began, self._counts()):
            self.thrown += len(samples)
            return
        self._queue.append(Queued(group, began))
        self._whole_samples[group] = samples
        self._accepted += 1
        for _ in range(self._rule.overflow(self._counts())):
            self._drop(self._queue[0])

    def _drop(self, one: Queued) -> None:
        """A whole group is thrown away."""
        self._queue.remove(one)
        self.thrown += len(self._whole_samples.pop(one.group))
        self._accepted -= 1

    # ---------------------------------------------------------------- the trainer

    def _train(self, now: float) -> None:
        sc, spec = self._sc, self._trainer
        if self._training or len(self._queue) < sc.prompts:
            return
        self._training = True
        taken = self._rule.first(self._queue)[: sc.prompts]
        self._queue = [one for one in self._queue if one not in taken]
        samples = [sample for one in taken for sample in self._whole_samples.pop(one.group)]
        lengths = [sc.prompt_tokens + sample.length for sample in samples]
        packed = cost.pack(spec.model, lengths, spec.ranks, sc.round_tokens)
        seconds = sum(cost.micro_step_s(spec, by_rank) for by_rank in packed)
        seconds += cost.optimizer_s(spec) + cost.publish_s(spec)
        ages = [self._version - one.began for one in taken]
        tokens = sum(sample.length for sample in samples)
        self._at(now + seconds, lambda at: self._trained(at, tokens, ages))

    def _trained(self, now: float, tokens: int, ages: Sequence[int]) -> None:
        self._training = False
        self.steps.append(StepPlayed(now, tokens, statistics.mean(ages), max(ages)))
        self._version += 1
        self._since = len(self._groups) + len(self._queue)
        old = {group: self._version - version for group, version in self._began.items()}
        for group in self._rule.cancel(old, self._counts()):
            self._cancel(now, group)
        pull_s = self._sc.harvested.model.weight_bytes / min(
            self._sc.engine_bytes_s, self._sc.trainer.nic_bytes_s
        )
        for engine in self._engines:
            self._at(now + pull_s, partial(self._loads, engine=engine))
        self._train(now)
        self._admit(now)

    def _loads(self, now: float, engine: _Engine) -> None:
        if not engine.ends or engine not in self._engines:
            return
        engine.advance(now)
        spec = engine.spec
        engine.stall(spec.model.weight_bytes / spec.gpus / spec.gpu.host_bytes_s)
        if self._rule.prefills:
            parts = [
                (int(self._sc.prompt_tokens + engine.steps - engine.began[number]), 0)
                for _, number, _ in engine.ends
            ]
            engine.stall(spec.prefill_many_s(parts))
        self._plan(engine)

    def _cancel(self, now: float, group: int) -> None:
        gone = self._groups.pop(group)
        self._longest.pop(group, None)
        del self._began[group]
        self.thrown += len(gone)
        self._in_flight -= sum(not sample.done for sample in gone)
        self._waiting = deque(sample for sample in self._waiting if sample.group != group)
        for engine in self._engines:
            mine = [one for one in engine.ends if one[2].group == group]
            if mine:
                engine.advance(now)
                for _, number, sample in mine:
                    made = engine.steps - engine.began.pop(number)
                    engine.context -= self._sc.prompt_tokens + sample.generated + made
                engine.ends = [one for one in engine.ends if one[2].group != group]
                heapq.heapify(engine.ends)
                self._plan(engine)


def lives_of(engines: Sequence[EngineOutcome]) -> list[Life]:
    """When the harvested engines of a run generated, from their first weights to their end."""
    return [
        Life(one.ready_s, math.inf if one.why == "running" else one.end_s)
        for one in engines
        if 0 <= one.ready_s < one.end_s
    ]


def play(scenario: Scenario, rule: Rule, harvested: Sequence[Life], generating: int) -> Played:
    """`generating`: reserved engines that generate throughout; the other reserved GPUs train."""
    end_s = scenario.horizon_s
    ranks = scenario.trainer.ranks - generating * scenario.reserved.gpus
    lives = [Life(0.0, end_s + 1.0)] * generating + list(harvested)
    one = _Play(scenario, rule, lives, replace(scenario.trainer, ranks=ranks))
    one.run(end_s)
    return Played(tuple(one.steps), one.thrown, one.lost_tokens, generating)


def synchronous(scenario: Scenario, rule: Rule, harvested: Sequence[Life]) -> Played:
    """Of a rule under which nothing is generated while a step trains: all reserved GPUs generate, and then all train, at no cost."""
    end_s = scenario.horizon_s
    lives = [Life(0.0, end_s + 1.0)] * scenario.reserved_engines + list(harvested)
    one = _Play(scenario, rule, lives, scenario.trainer)
    one.run(end_s)
    return Played(tuple(one.steps), one.thrown, one.lost_tokens, scenario.reserved_engines)


def splits(scenario: Scenario) -> Iterator[int]:
    """Numbers of reserved engines that may generate: what is left holds the training state."""
    for generating in range(scenario.reserved_engines):
        ranks = scenario.trainer.ranks - generating * scenario.reserved.gpus
        if ranks >= 1:
            spec = replace(scenario.trainer, ranks=ranks)
            if cost.state_bytes_per_gpu(spec) <= STATE_SHARE * spec.gpu.memory_bytes:
                yield generating


def best(scenario: Scenario, rule: Rule, harvested: Sequence[Life], since_s: float) -> Played:
    """The play with the split of the reserved GPUs that trains the most tokens a second after `since_s`."""
    tried = [play(scenario, rule, harvested, generating) for generating in splits(scenario)]
    return max(tried, key=lambda one: one.tokens_per_s(since_s))
