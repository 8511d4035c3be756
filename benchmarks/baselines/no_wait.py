"""The bound in which no GPU of a run ever waits: what its GPUs could train at most, whoever schedules them. Pure.

Harvested engines generate for as long as they are there. Each reserved GPU trains or generates, and changes between the two at no cost. A
full engine generates at its rate for as many samples as it may hold, each of the context that a sample has on average over time; nothing is
prefilled, nothing lost. With N steps of S tokens in T seconds, of which the trainer needs `train_s` each,

    N S = G_h + E_r g_r (T - N train_s)      and      N train_s <= T

where G_h are the tokens that harvested engines can generate in T, E_r the reserved engines, and g_r the rate of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.baselines.asynchronous_run import Life
from benchmarks.baselines.registry import running_context
from scavenger.simulate.decode import SimulatedEngine
from scavenger.simulate.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Had:
    """What a run had between two moments: `seconds` from the one to the other, `harvested_s` of engines together in it; `step_tokens` and
    `train_s` of a mean step."""

    seconds: float
    harvested_s: float
    step_tokens: float
    train_s: float


def harvested_s(lives: Sequence[Life], since_s: float, until_s: float) -> float:
    """Seconds of engines between two moments."""
    return sum(max(0.0, min(one.end_s, until_s) - max(one.start_s, since_s)) for one in lives)


def full_rate(engine: SimulatedEngine, max_batch: int, context: float) -> float:
    """Tokens a second of an engine that is full."""
    return engine.tokens_per_s(min(max_batch, engine.max_batch(context)), context)


def tokens_per_s(scenario: Scenario, had: Had) -> float:
    """The bound, in tokens trained a second."""
    context = running_context(scenario)
    harvested = had.harvested_s * full_rate(scenario.harvested, scenario.max_batch, context)
    reserved = scenario.reserved_engines * full_rate(scenario.reserved, scenario.max_batch, context)
    steps = (harvested + reserved * had.seconds) / (had.step_tokens + reserved * had.train_s)
    return min(steps, had.seconds / had.train_s) * had.step_tokens / had.seconds
