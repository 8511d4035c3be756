"""Where ours wins and loses as completions and fleets change: one axis at a time, and the corners. Prints the cells where we lose.

    python -m benchmarks.sensitivity [--seeds 3] [--corner-seeds 1] [--steps 6] [--policies colocated,rlboost,polyrl,ours] [--jobs 2]

The base is Qwen3-8B on 8 H100 with up to 16 engines of one GPU, on a synthetic fleet. Each axis by itself with `--seeds`; all 32 corners of
the first and last values with `--corner-seeds` (0: none). Ratios are taken seed by seed: the median, and the lowest and highest seed. Under
five minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks import synthetic
from benchmarks.baselines.registry import SIMULATED_POLICIES, simulated_policy
from benchmarks.many import each, median, ratio, spread
from scavenger.errors import ConfigError
from scavenger.simulate import presets
from scavenger.simulate.clock import Streams
from scavenger.simulate.driver import simulate
from scavenger.simulate.fleet import FleetTrace
from scavenger.simulate.lengths import Lognormal
from scavenger.simulate.scenario import Scenario
from scavenger.simulate.trainer_model import TrainerSpec

WARM_UP = 0.25
LENGTH_S = 4 * 3600.0
#: The trace's statistics at every hour, without the GPUs that nobody ever takes: the few engines of one run would sit on those.
SITE = replace(synthetic.EARTH_LIKE, constant_idle=(), day=0.0)


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of completions and one kind of fleet.

    `capped`: the share of completions that reach the cap; 0 stands for one in a thousand. `drift`: the change of log length a step.
    `volatility`: how many times faster than the trace's statistics the synthetic fleet's GPUs change hands (at 1 others take an engine
    every one to two hours, at 16 every half an hour).
    """

    sigma: float = 0.8
    correlation: float = 0.5
    capped: float = 0.05
    drift: float = 0.0
    volatility: float = 1.0

    def lengths(self, cap: int) -> Lognormal:
        return Lognormal.with_capped_share(
            self.sigma, cap, max(self.capped, 1e-3), self.correlation, self.drift
        )

    def fleet(self, seed: int) -> FleetTrace:
        """A slice of a synthetic site, its clock run faster: the same idle GPUs on average, taken back so much more often."""
        made = synthetic.generate(Streams(seed), LENGTH_S * self.volatility, SITE)
        faster = tuple(replace(change, t_s=change.t_s / self.volatility) for change in made.changes)
        return FleetTrace(
            f"{made.origin}, {self.volatility:g} times as fast", LENGTH_S, made.capacity, made.initial, faster
        )

    @property
    def name(self) -> str:
        return (
            f"sigma {self.sigma:g}, correlation {self.correlation:g}, capped {self.capped:.0%}, "
            f"drift {self.drift:+g}, volatility {self.volatility:g}"
        )


AXES: dict[str, tuple[float, ...]] = {
    "sigma": (0.4, 0.6, 0.8, 1.0, 1.2),
    "correlation": (0.0, 0.3, 0.5, 0.7, 0.9),
    "capped": (0.0, 0.02, 0.05, 0.1, 0.2),
    "drift": (-0.05, -0.02, 0.0, 0.02, 0.05),
    "volatility": (0.25, 1.0, 4.0, 8.0, 16.0),
}


def along(axes: Sequence[str] = tuple(AXES)) -> list[Cell]:
    """The base and each axis by itself: each cell once."""
    return list(
        dict.fromkeys([Cell(), *(replace(Cell(), **{axis: value}) for axis in axes for value in AXES[axis])])
    )


def corners(axes: Sequence[str] = tuple(AXES)) -> Iterator[Cell]:
    """All combinations of the axes' first and last values."""
    for corner in itertools.product(*((AXES[axis][0], AXES[axis][-1]) for axis in axes)):
        yield replace(Cell(), **dict(zip(axes, corner, strict=True)))


def scenario(cell: Cell, seed: int, steps: int) -> Scenario:
    engine = presets.engine("Qwen3-8B", "H100")
    trainer = TrainerSpec(
        engine.model,
        engine.gpu,
        8,
        0.45,
        400e9,
        25e9,
        overhead_s=0.3,
        sleep_s=2.0,
        wake_s=3.0,
        hash_bytes_s=2e9,
    )
    return Scenario(
        reserved=engine,
        reserved_engines=8,
        harvested=engine,
        trainer=trainer,
        lengths=cell.lengths(14_336),
        fleet=cell.fleet(seed),
        prompt_tokens=180,
        steps=steps,
        horizon_s=LENGTH_S,
        max_engines=16,
        seed=seed,
    )


@dataclass(frozen=True, slots=True)
class Unit:
    """One cell with one seed, played with each policy."""

    cell: Cell
    seed: int
    steps: int
    policies: tuple[str, ...]


def simulate_unit(unit: Unit) -> dict[str, float]:
    """Tokens a second by policy, without the first steps: policies learn. 0: no step ended."""
    found = {}
    for name in unit.policies:
        simulated = scenario(unit.cell, unit.seed, unit.steps)
        done = simulate(simulated, simulated_policy(name, simulated)).steps
        kept = done[int(len(done) * WARM_UP) :]
        found[name] = sum(step.tokens for step in kept) / (kept[-1].end_s - kept[0].start_s) if kept else 0.0
    return found


By = Mapping[Cell, Sequence[Mapping[str, float]]]  # what each seed of a cell found


def ratios(by_seed: Sequence[Mapping[str, float]], other: str) -> list[float]:
    return [ratio(found["ours"], found[other]) for found in by_seed]


def table(found: By, policies: Sequence[str]) -> Iterator[str]:
    baselines = [name for name in policies if name != "ours"]
    yield "| cell | seeds | ours tok/s | " + " | ".join(f"ours / {name}" for name in baselines) + " |"
    yield "| --- " * (3 + len(baselines)) + "|"
    for cell, by_seed in found.items():
        row = [
            spread([one["ours"] for one in by_seed], 0),
            *(spread(ratios(by_seed, name)) for name in baselines),
        ]
        yield f"| {cell.name} | {len(by_seed)} | " + " | ".join(row) + " |"


def lost(found: By, policies: Sequence[str]) -> Iterator[str]:
    """The cells in which another policy is ahead by the median, worst first."""
    behind = []
    for cell, by_seed in found.items():
        for name in policies:
            values = ratios(by_seed, name) if name != "ours" else []
            if not math.isnan(middle := median(values)) and middle < 1:
                seeds = sum(value < 1 for value in values)
                behind.append(
                    (
                        middle,
                        f"{cell.name}: ours / {name} {spread(values, 3)}, behind with {seeds} of {len(values)} seeds",
                    )
                )
    yield (
        f"ours is behind in {len(behind)} of {len(found) * (len(policies) - 1)} comparisons ({len(found)} cells)"
        + ":" * bool(behind)
    )
    yield from (f"- {line}" for _, line in sorted(behind))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--corner-seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--policies", default="colocated,rlboost,polyrl,ours")
    parser.add_argument("--axes", default=",".join(AXES))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    policies, axes = tuple(asked.policies.split(",")), asked.axes.split(",")
    unknown = [name for name in policies if name not in SIMULATED_POLICIES]
    if unknown or "ours" not in policies:
        raise ConfigError(
            f"no policy {unknown[0]!r}" if unknown else "ours is compared with others",
            f"there are {', '.join(SIMULATED_POLICIES)}",
        )
    units = [Unit(cell, seed, asked.steps, policies) for seed in range(asked.seeds) for cell in along(axes)]
    units += [
        Unit(cell, seed, asked.steps, policies)
        for seed in range(asked.corner_seeds)
        for cell in corners(axes)
    ]
    found: dict[Cell, list[Mapping[str, float]]] = {}
    for unit, speeds in each(simulate_unit, list(dict.fromkeys(units)), asked.jobs):
        found.setdefault(unit.cell, []).append(speeds)
    if asked.json:
        asked.json.write_text(
            json.dumps(
                [{"cell": asdict(cell), "found": by_seed} for cell, by_seed in found.items()], indent=1
            )
            + "\n"
        )
    print("\n".join([*table(found, policies), "", *lost(found, policies)]))


if __name__ == "__main__":
    main()
