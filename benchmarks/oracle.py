"""How fast a step could be at best: a lower bound on its time for whoever knows every length and the fleet's future. Pure.

The step begins at 0, when its samples are submitted, and ends when its version is published. Reserved engines and the trainer share
GPUs. `bound` is the largest of three bounds; no schedule on `EngineBatch` engines and the trainer model beats any of them:

**longest** and **train**. A sample needs its prompt's prefill somewhere, and then for each of its tokens, the first included, a step that
costs at least a step of batch 1 on the fastest engine kind (`EngineBatch`'s prefill yields no token; a real engine's yields the first, a
step sooner): so group g is complete no sooner than r_g, when its longest sample is. Sort groups by r. All
micro-steps with tokens of the groups from the k-th on start after r_k, one after the other, and a micro-step takes at least the mean over
ranks of its work, its longest sequence, and its traffic. Hence, with R_k the least time to train the groups from k on,

    T >= r_k + R_k + optimizer + publish   for every k.

k = 1 is "trainer work after the first possible group completion"; the last k is "the longest sample at batch-1 speed".

**work**. In a step of B sequences with contexts c_j an engine spends at least  a + K B + s sum(c_j - 1)  seconds: the steeper line of its
roofline (`DecodeCurve`). The -1: `Stretch` interpolates within a step, where its cost is the line's at half a step before; what it
interpolates over a bend is bounded by a whole one. (Or the flatter line at no context at all.) Take any y > 0 a kind of engine, and z >= 0.
Then over the whole schedule

    sum over steps of  step_s (y + z B)   <=   sum over engines of y * its time  +  z * (seconds that samples spent in batches)

because a step lasts `step_s` on one engine and for B samples. On the left, with S = sum of c_j - 1,

    (a + s S)(y + z B) = a z B + y s S + (a y + z s B S) >= a z B + y s S + 2 sqrt(a y z s) sqrt(B S)   and   sqrt(B S) >= sum sqrt(c_j - 1)

(arithmetic and geometric mean, then Cauchy), and K B (y + z B) >= K B (y + z). So every token at context c costs at least

    f(c) = y K + z (a + K) + y s (c - 1) + 2 sqrt(a y z s (c - 1)),   the least over kinds of engine,

wherever and in whatever company it is generated. Its meaning: z prices that there are only so many samples to batch. With z = 0 the
batch's limits bound it instead, 1 >= u B / max_sequences + (1 - u) stored / capacity for u in [0, 1]:

    f(c) = y (K + s (c - 1) + a (u / max_sequences + (1 - u) stored / capacity)),   linear in u, so u = 0 or 1,

`stored` being the sample's own tokens and its share of the prompt. That is the concave capacity envelope: tokens a second of an engine
are concave in its batch, of a fleet in its samples, and each (y, z) is one of its tangents. On the right, within T: no engine works before
it is there or after it is gone, nor when the last group must be in training; samples are at most N; and reserved GPUs also train, so that
their engines have at most T - R_1 - optimizer - publish - toggles. The right side grows with T; the least T at which it reaches the left
one is a bound, for every (y, z) tried. Prefill counts at its FLOPs: each prompt once, a token for each sibling.

Knows nothing of policies and of how a schedule is found: `clairvoyant.py` finds one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from scavenger.errors import ConfigError
from scavenger.simulate.decode import SimulatedEngine
from scavenger.simulate.trainer_model import TrainerSpec, gather_s, optimizer_s, rank_s

Array = NDArray[np.float64]

# Floats, and what `EngineBatch` may round up: a millionth of a token at each move.
_ROUNDING = 1e-6
_BATCHES = tuple(1.3**power for power in range(26))  # 1 to 700: where z puts the tangent
_SKEWS = (0.6, 0.8, 1.0, 1.25, 1.6)  # of one kind's y against the others'


@dataclass(frozen=True, slots=True)
class OracleGroup:
    """A prompt and the lengths that its completions will have, in tokens."""

    prompt_tokens: int
    targets: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or not self.targets or min(self.targets) < 1:
            raise ConfigError(
                f"a group with {self.prompt_tokens} prompt tokens and completions of {self.targets[:3]} tokens"
            )


@dataclass(frozen=True, slots=True)
class OracleEngine:
    """When it can generate: from having its weights to being taken. `reserved`: it shares the trainer's GPUs."""

    spec: SimulatedEngine
    intervals: tuple[tuple[float, float], ...] = ((0.0, math.inf),)
    reserved: bool = False

    def seconds(self, until: float) -> float:
        return sum(max(0.0, min(end, until) - start) for start, end in self.intervals)


@dataclass(frozen=True, slots=True)
class OracleStep:
    """All that a clairvoyant knows of a step.

    `token_budget`: the most tokens a rank packs into a micro-step. `to_training_s`, `to_generating_s`: the toggle, each way; `awake`:
    reserved engines generate already when the step begins. `reward_s`: from a group's last token until it can be trained.
    """

    groups: tuple[OracleGroup, ...]
    engines: tuple[OracleEngine, ...]
    trainer: TrainerSpec
    token_budget: int
    to_training_s: float = 0.0
    to_generating_s: float = 0.0
    awake: bool = True
    publish_s: float = 0.0
    reward_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.groups or not self.engines:
            raise ConfigError(f"a step of {len(self.groups)} groups on {len(self.engines)} engines")

    @property
    def samples(self) -> int:
        return sum(len(group.targets) for group in self.groups)

    @property
    def end_s(self) -> float:
        """What follows the last micro-step."""
        return optimizer_s(self.trainer) + self.publish_s


@dataclass(frozen=True, slots=True)
class StepBound:
    """No step is shorter than `total_s`, the largest of the others. Infinite when the engines cannot finish it at all."""

    longest_s: float
    work_s: float
    train_s: float

    @property
    def total_s(self) -> float:
        return max(self.longest_s, self.work_s, self.train_s)

    @property
    def reason(self) -> str:
        names = {
            "the longest sample": self.longest_s,
            "the fleet's capacity": self.work_s,
            "training": self.train_s,
        }
        return max(names, key=lambda name: names[name])


def bound(step: OracleStep) -> StepBound:
    """The lower bound of the module's docstring, in seconds from the step's submission to its published version."""
    ready = _earliest_completions(step)
    order = sorted(range(len(ready)), key=lambda index: (ready[index], index))
    first_toggle = (
        step.to_training_s if step.awake and any(engine.reserved for engine in step.engines) else 0.0
    )
    trains = least_training_s(step, order)
    ends = [
        max(ready[index], first_toggle) + trains[position] + step.end_s
        for position, index in enumerate(order)
    ]
    work = _work_bound(step, trains[0])
    exact = 1 - _ROUNDING
    return StepBound(longest_s=exact * ends[-1], work_s=exact * work, train_s=exact * max(ends))


# ---------------------------------------------------------------- longest, train


def _earliest_completions(step: OracleStep) -> list[float]:
    """r_g: when each group is complete at the soonest, its reward included."""
    contexts = _contexts(step)
    fastest = np.min([_alone(engine.spec, contexts) for engine in _kinds(step)], axis=0)
    spent = np.concatenate(([0.0], np.cumsum(fastest)))
    here = min(_first(step, engine) for engine in step.engines)
    ready = []
    for group in step.groups:
        prefill = min(engine.spec.prefill_s(group.prompt_tokens) for engine in _kinds(step))
        decode = spent[group.prompt_tokens + max(group.targets)] - spent[group.prompt_tokens]
        ready.append(here + prefill + float(decode) + step.reward_s)
    return ready


def _first(step: OracleStep, engine: OracleEngine) -> float:
    asleep = engine.reserved and not step.awake
    return max(min(start for start, _ in engine.intervals), step.to_generating_s if asleep else 0.0)


def _alone(spec: SimulatedEngine, contexts: Array) -> Array:
    """Seconds of a step of batch 1 at each context: not more than what `EngineBatch` takes."""
    return np.maximum(
        *(line.base + line.sequence + line.slope * np.maximum(contexts - 1, 0.0) for line in _lines(spec))
    )


def least_training_s(step: OracleStep, order: Sequence[int]) -> list[float]:
    """R_k for each k: the least time of all micro-steps with tokens of the groups `order[k:]`."""
    trainer = step.trainer
    work, tokens, longest = 0.0, 0, 0
    biggest = max(group.prompt_tokens + max(group.targets) for group in step.groups)
    capacity = trainer.ranks * max(step.token_budget, biggest)
    least = []
    for index in reversed(order):
        lengths = [step.groups[index].prompt_tokens + target for target in step.groups[index].targets]
        work += rank_s(trainer, lengths) / trainer.ranks
        tokens += sum(lengths)
        longest = max(longest, *lengths)
        micro_steps = math.ceil(tokens / capacity)
        least.append(
            max(work, rank_s(trainer, [longest]), micro_steps * gather_s(trainer))
            + micro_steps * trainer.overhead_s
        )
    return least[::-1]


# ---------------------------------------------------------------- work


@dataclass(frozen=True, slots=True)
class _Line:
    """A step costs at least `base + sequence * B + slope * sum(c - 1)`."""

    base: float
    sequence: float
    slope: float


def _lines(spec: SimulatedEngine) -> tuple[_Line, _Line]:
    """The steeper line of the roofline, and the flatter one without its slope."""
    one, two = spec.curve(1), spec.curve(2)
    reduce = two.overhead - one.overhead  # what one more sequence adds to the all-reduces
    fixed = one.overhead - reduce
    memory = _Line(fixed + one.memory, reduce, one.memory_slope)
    compute = _Line(fixed, reduce + one.compute, one.compute_slope)
    steep, flat = (memory, compute) if memory.slope >= compute.slope else (compute, memory)
    return steep, _Line(flat.base, flat.sequence, 0.0)


def _kinds(step: OracleStep) -> list[OracleEngine]:
    """One engine of each spec, in the order of their first."""
    return list({engine.spec: engine for engine in reversed(step.engines)}.values())[::-1]


def _contexts(step: OracleStep) -> Array:
    return np.arange(max(group.prompt_tokens + max(group.targets) for group in step.groups), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class _Demand:
    """`coverage[c]`: how many tokens are generated at context c. `shared`: prompt tokens that siblings store for each, over tokens."""

    contexts: Array
    coverage: Array
    shared: float


def _demand(step: OracleStep) -> _Demand:
    contexts = _contexts(step)
    delta = np.zeros(len(contexts) + 1)
    shared = 0.0
    for group in step.groups:
        prompt, count = group.prompt_tokens, len(group.targets)
        delta[prompt] += count
        for target in group.targets:
            delta[prompt + target] -= 1
        shared += sum(group.targets) * prompt * (1 - 1 / count)
    return _Demand(contexts, np.cumsum(delta)[:-1], shared)


def _work_bound(step: OracleStep, train_s: float) -> float:
    """The least T at which the fleet's time reaches what the tokens cost, for every tangent tried."""
    kinds = [engine.spec for engine in _kinds(step)]
    demand = _demand(step)
    supply = _Supply(step, kinds, train_s)
    found = 0.0
    for prices in _prices(kinds, demand):
        for cost, z in _tangents(step, kinds, prices, demand):
            if supply.of(found, prices, z) < cost:
                found = _least(supply, prices, z, cost, found)
    return found


def _prices(kinds: Sequence[SimulatedEngine], demand: _Demand) -> Iterator[tuple[float, ...]]:
    """y of each kind: in proportion to its speed at these tokens, and around."""
    speeds = [1 / min(_capped(spec, 1.0, demand)) for spec in kinds]
    top = max(speeds)
    base = [speed / top for speed in speeds]
    if len(kinds) == 1:
        yield (1.0,)
    elif len(kinds) > 3:
        yield tuple(base)
    else:
        for skew in product(_SKEWS, repeat=len(kinds) - 1):
            yield (base[0], *(y * factor for y, factor in zip(base[1:], skew, strict=True)))


def _capped(spec: SimulatedEngine, y: float, demand: _Demand) -> tuple[float, float]:
    """What all tokens cost on this kind alone with z = 0, for u = 1 and u = 0."""
    steep, _ = _lines(spec)
    tokens = float(demand.coverage.sum())
    own = steep.sequence * tokens + steep.slope * float(demand.coverage @ (demand.contexts - 1))
    stored = float(demand.coverage @ demand.contexts) - demand.shared
    return y * (own + steep.base * tokens / spec.max_sequences), y * (
        own + steep.base * stored / spec.kv_capacity
    )


def _tangents(
    step: OracleStep, kinds: Sequence[SimulatedEngine], prices: Sequence[float], demand: _Demand
) -> Iterator[tuple[float, float]]:
    """(what everything costs at least, z) for z = 0 with each limit of the batch, then for z > 0."""
    per_kind = list(zip(kinds, prices, strict=True))
    fills = [_least_of([_with_slots(spec, y, demand.contexts) for spec, y in per_kind], demand)]
    over = max(y * _lines(spec)[0].base / spec.kv_capacity for spec, y in per_kind) * demand.shared
    fills.append(_least_of([_with_cache(spec, y, demand.contexts) for spec, y in per_kind], demand) - over)
    flat = [
        np.full_like(demand.contexts, y * (line.sequence + line.base / spec.max_sequences))
        for spec, y, line in _flats(per_kind)
    ]
    fills.append(_least_of(flat, demand))
    for fill in fills:
        yield fill + _prefill(step, per_kind, 0.0), 0.0
    mean = max(1.0, float(demand.coverage @ demand.contexts) / float(demand.coverage.sum()))
    steep, y = _lines(kinds[0])[0], prices[0]
    for batch in _BATCHES:
        z = y * steep.base / (steep.slope * mean * batch * batch) if steep.slope > 0 else y / batch
        cost = _least_of(
            [_with_company(_lines(spec)[0], price, z, demand.contexts) for spec, price in per_kind], demand
        )
        yield cost + _prefill(step, per_kind, z), z


def _flats(
    per_kind: Sequence[tuple[SimulatedEngine, float]],
) -> Iterator[tuple[SimulatedEngine, float, _Line]]:
    for spec, y in per_kind:
        yield spec, y, _lines(spec)[1]


def _with_slots(spec: SimulatedEngine, y: float, contexts: Array) -> Array:
    steep, _ = _lines(spec)
    return y * (steep.sequence + steep.base / spec.max_sequences + steep.slope * (contexts - 1))


def _with_cache(spec: SimulatedEngine, y: float, contexts: Array) -> Array:
    steep, _ = _lines(spec)
    return np.asarray(
        y * (steep.sequence + steep.base / spec.kv_capacity * contexts + steep.slope * (contexts - 1))
    )


def _with_company(steep: _Line, y: float, z: float, contexts: Array) -> Array:
    before = np.maximum(contexts - 1, 0.0)
    fixed = y * steep.sequence + z * (steep.base + steep.sequence)
    return np.asarray(
        fixed + y * steep.slope * before + 2 * np.sqrt(steep.base * y * z * steep.slope * before)
    )


def _least_of(costs: Sequence[Array], demand: _Demand) -> float:
    return float(demand.coverage @ np.min(costs, axis=0))


def _prefill(step: OracleStep, per_kind: Sequence[tuple[SimulatedEngine, float]], z: float) -> float:
    total = 0.0
    for group in step.groups:
        prompt, siblings = group.prompt_tokens, len(group.targets) - 1
        total += min((y + z) * _prefill_flops_s(spec, prompt, siblings) for spec, y in per_kind)
    return total


def _prefill_flops_s(spec: SimulatedEngine, prompt: int, siblings: int) -> float:
    """A prompt once, and each sibling's one token after it, at the engine's prefill speed."""
    pairs = prompt * (prompt + 1) / 2 + siblings * (prompt + 1)
    work = (
        2 * spec.model.matmul_parameters * (prompt + siblings) + spec.model.attention_flops_per_pair * pairs
    )
    return work / (spec.gpus * spec.gpu.dense_flops * spec.efficiency.prefill_compute)


class _Supply:
    """The right side: engine seconds by price, and the samples' seconds, within a step of T seconds."""

    def __init__(self, step: OracleStep, kinds: Sequence[SimulatedEngine], train_s: float) -> None:
        self._step = step
        self._kind = {spec: index for index, spec in enumerate(kinds)}
        toggles = step.to_training_s + (0.0 if step.awake else step.to_generating_s)
        self._busy = (
            train_s + step.end_s + toggles
        )  # what reserved GPUs do beside generating, if they generate
        alone = [least_training_s(step, [index])[0] for index in range(len(step.groups))]
        self._tail = min(alone) + step.end_s + step.reward_s  # after the last sample, whichever it is
        self._starts = min(_first(step, engine) for engine in step.engines)

    def of(self, total_s: float, prices: Sequence[float], z: float) -> float:
        until = total_s - self._tail
        engines = 0.0
        for engine in self._step.engines:
            seconds = engine.seconds(until)
            if engine.reserved:
                seconds = min(seconds, max(0.0, total_s - self._busy))
            engines += prices[self._kind[engine.spec]] * seconds
        return engines + z * self._step.samples * max(0.0, until - self._starts)


_NEVER_S = 1e9


def _least(supply: _Supply, prices: Sequence[float], z: float, cost: float, low: float) -> float:
    """The least T from `low` on with enough supply; infinity when there is none in 30 years."""
    high = max(1.0, low)
    while supply.of(high, prices, z) < cost:
        low, high = high, 2 * high
        if high > _NEVER_S:
            return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if supply.of(middle, prices, z) < cost else (low, middle)
    return low
