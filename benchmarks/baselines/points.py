"""The published points to be reproduced: each a row with its source and setting, and the constants that all rows share. Pure data.

The system is RLBoost (arXiv 2510.19225); its code is PolyRL (github.com/Terra-Flux/PolyRL). `benchmarks/published.py` simulates each
row and prints it against the published value. What the scripts fix is taken from them. What nobody published (lengths, training
efficiency, an engine's step beside the GPU's, toggles) is in `STACK`, one set for all rows; it was chosen by the rows marked
`calibrates`, and the others are reported as they come out. Knows nothing of policies' code: a row names its policy and switches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from scavenger.simulate import presets
from scavenger.simulate.decode import SimulatedEngine
from scavenger.simulate.fleet import FleetTrace
from scavenger.simulate.lengths import Lognormal
from scavenger.simulate.outcome import SimulationOutcome
from scavenger.simulate.presets import STACK, Stack, trainer_of
from scavenger.simulate.scenario import Scenario
from scavenger.simulate.trainer_model import TrainerSpec

# PolyRL REPRODUCE.md: 8 x H100 reserved $83.79 an hour, 8 spot ones $21.28: a pair $5.32.
RESERVED_PRICE_PER_8_H = 83.79
SPOT_PRICE_PER_PAIR_H = 5.32


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on so many reserved H100, with `pairs` of spot ones that stay, or those of a spot trace's segments."""

    model: str = "Qwen3-8B"
    reserved_gpus: int = 8
    pairs: int = 0
    spot_segments: bool = False

    def engine(self, stack: Stack = STACK) -> SimulatedEngine:
        """Reserved and spot engines are alike: the scripts give both the same share of memory, the state is offloaded while they run."""
        efficiency = replace(
            presets.VLLM_H100, memory_share=stack.memory_share, overhead_s=stack.engine_overhead_s
        )
        spec = presets.engine(self.model, "H100", stack.engine_gpus, efficiency)
        return replace(spec, max_sequences=stack.max_sequences)

    def trainer(self, stack: Stack = STACK) -> TrainerSpec:
        return trainer_of(presets.model(self.model), presets.H100, self.reserved_gpus, stack)

    def lengths(self, stack: Stack = STACK) -> Lognormal:
        return Lognormal.with_mean(stack.mean_tokens, stack.sigma, stack.cap, stack.correlation)

    def dollars_per_hour(self, mean_pairs: float) -> float:
        return self.reserved_gpus / 8 * RESERVED_PRICE_PER_8_H + mean_pairs * SPOT_PRICE_PER_PAIR_H


class Quantity(Enum):
    """What a row publishes. All but the first compare `policy` with `against` in the same setting."""

    TOKENS_PER_S = "tok/s"  # prompts and completions, over the whole step: veRL's perf/throughput times GPUs
    SPEED_UP = "times the throughput"
    CHANGE = "change of throughput"
    TOKENS_PER_DOLLAR = "change of tokens per dollar"


@dataclass(frozen=True, slots=True)
class PublishedPoint:
    """One published point. `switches`: what the policy is run without or with. `calibrates`: `STACK` was chosen with it."""

    name: str
    setting: Setting
    policy: str
    quantity: Quantity
    value: float
    source: str
    switches: Mapping[str, bool]
    against: str = ""
    calibrates: bool = False

    def error(self, simulated: float) -> float:
        """Relative; of changes, the difference of the factors (1.34 against 1.20: -10 %)."""
        if self.quantity in (Quantity.CHANGE, Quantity.TOKENS_PER_DOLLAR):
            return (1 + simulated) / (1 + self.value) - 1
        return simulated / self.value - 1


_README = "PolyRL REPRODUCE.md"
_PAPER = "arXiv 2510.19225, evaluation"
_PAIRS = ((1, 12_000.0), (2, 14_000.0), (3, 16_000.0), (4, 18_000.0))
_SPOT = (
    (Setting("Qwen3-8B", 8, spot_segments=True), 1.66, 0.34),
    (Setting("Qwen3-14B", 8, spot_segments=True), 1.97, 0.49),
    (Setting("Qwen3-32B", 16, spot_segments=True), 1.51, 0.28),
)


def _rows() -> tuple[PublishedPoint, ...]:
    rows = [
        PublishedPoint(
            "colocated", Setting(), "colocated", Quantity.TOKENS_PER_S, 10_000.0, _README, {}, calibrates=True
        )
    ]
    for pairs, value in _PAIRS:
        name = f"rlboost, {pairs} pair{'s' if pairs > 1 else ''}"
        setting = Setting(pairs=pairs)
        rows.append(
            PublishedPoint(
                name,
                setting,
                "rlboost",
                Quantity.TOKENS_PER_S,
                value,
                _README,
                {},
                calibrates=pairs in (1, 4),
            )
        )
    for setting, factor, _ in _SPOT:
        rows.append(
            PublishedPoint(
                f"rlboost, {setting.model}, spot",
                setting,
                "rlboost",
                Quantity.SPEED_UP,
                factor,
                _PAPER,
                {},
                "colocated",
            )
        )
    base = _SPOT[0][0]
    rows.append(
        PublishedPoint(
            "rlboost without seeding",
            base,
            "rlboost",
            Quantity.CHANGE,
            -0.19,
            _PAPER,
            {"seeding": False},
            "rlboost",
        )
    )
    rows.append(
        PublishedPoint(
            "rlboost with the memo",
            base,
            "rlboost",
            Quantity.CHANGE,
            0.06,
            _PAPER,
            {"memo": True},
            "rlboost without memo",
        )
    )
    for setting, _, gain in _SPOT:
        name = f"rlboost, {setting.model}, per dollar"
        rows.append(
            PublishedPoint(
                name, setting, "rlboost", Quantity.TOKENS_PER_DOLLAR, gain, _PAPER, {}, "colocated"
            )
        )
    return tuple(rows)


ROWS = _rows()


#: Of a simulation's steps, what is left out at its start: policies learn.
WARM_UP = 0.25


def steady(pairs: int, end_s: float) -> FleetTrace:
    """Pairs that are there all the time; at least one node, since a fleet has some."""
    capacity = {f"spot-{index:02}": STACK.engine_gpus for index in range(max(1, pairs))}
    return FleetTrace(
        f"{pairs} pairs", end_s, capacity, dict.fromkeys(capacity, STACK.engine_gpus if pairs else 0), ()
    )


def scenario(setting: Setting, fleet: FleetTrace, steps: int, seed: int) -> Scenario:
    engine = setting.engine()
    return Scenario(
        reserved=engine,
        reserved_engines=setting.reserved_gpus // STACK.engine_gpus,
        harvested=engine,
        trainer=setting.trainer(),
        lengths=setting.lengths(),
        fleet=fleet,
        prompts=STACK.prompts,
        samples=STACK.samples_per_prompt,
        prompt_tokens=STACK.prompt_tokens,
        steps=steps,
        horizon_s=fleet.end_s,
        max_engines=64,
        max_batch=STACK.max_sequences,
        engine_bytes_s=STACK.engine_bytes_s,
        relay=False,
        offload=STACK.offload_optimizer,
        round_tokens=STACK.token_budget,
        seed=seed,
    )


def throughput(out: SimulationOutcome) -> float:
    """Tokens a second, prompts included, without the first steps."""
    steps = out.steps[int(len(out.steps) * WARM_UP) :]
    tokens = sum(step.tokens + step.samples * STACK.prompt_tokens for step in steps)
    return tokens / (steps[-1].end_s - steps[0].start_s)
