"""Where ours wins and loses as answers and fleets change: one axis at a time, and the corners. Prints the cells where we lose.

    python benchmarks/sensitivity.py [--seeds 3] [--steps 8] [--policies colocated,rlboost,polyrl,ours] [--axes sigma,volatility] [--json F]

The base is Qwen3-8B on 8 H100 with engines of one GPU, on a synthetic fleet. `ours` needs scavenger/router/predictive.py; a policy that is
not there is an error, not a gap in the table.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from scavenger.errors import ConfigError
from scavenger.simulate import presets, synthetic
from scavenger.simulate.contender import Contender
from scavenger.simulate.driver import simulate
from scavenger.simulate.engine import Streams
from scavenger.simulate.fleet import Fleet
from scavenger.simulate.lengths import Lognormal
from scavenger.simulate.scenario import Scenario
from scavenger.simulate.trainer_model import TrainerSpec

# Contenders by name: module and attribute. `ours` is made by its module when there is one.
KNOWN = {
    "colocated": ("scavenger.simulate.policies.colocated", "COLOCATED"),
    "disaggregated": ("scavenger.simulate.policies.disaggregated", "DISAGGREGATED"),
    "rlboost": ("scavenger.simulate.policies.rlboost", "RLBOOST"),
    "polyrl": ("scavenger.simulate.policies.polyrl", "POLYRL"),
    "ours": ("scavenger.simulate.policies.ours", "OURS"),
}
WARM_UP = 0.25
LENGTH_S = 4 * 3600.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of answers and one kind of fleet.

    `capped`: the share of answers that reach the cap; 0 stands for one in a thousand. `drift`: the change of log length a step.
    `volatility`: how many times faster than the trace's statistics the synthetic fleet's GPUs change hands.
    """

    sigma: float = 0.8
    correlation: float = 0.5
    capped: float = 0.05
    drift: float = 0.0
    volatility: float = 1.0

    def lengths(self, cap: int) -> Lognormal:
        return Lognormal.with_capped_share(self.sigma, cap, max(self.capped, 1e-3), self.correlation, self.drift)

    def fleet(self, seed: int) -> Fleet:
        """A slice of a synthetic site, its clock run faster: the same idle GPUs on average, taken back so much more often."""
        made = synthetic.generate(Streams(seed), LENGTH_S * self.volatility)
        faster = tuple(replace(change, t_s=change.t_s / self.volatility) for change in made.changes)
        return Fleet(f"{made.origin}, {self.volatility:g} times as fast", LENGTH_S, made.capacity, made.initial, faster)

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
    "volatility": (0.25, 0.5, 1.0, 2.0, 4.0),
}


def cells(axes: tuple[str, ...] = tuple(AXES)) -> Iterator[Cell]:
    """The base, each axis by itself, and all corners of the first and last values: each cell once."""
    base = Cell()
    along = [replace(base, **{axis: value}) for axis in axes for value in AXES[axis]]
    ends = itertools.product(*((AXES[axis][0], AXES[axis][-1]) for axis in axes))
    corners = [replace(base, **dict(zip(axes, corner, strict=True))) for corner in ends]
    yield from dict.fromkeys([base, *along, *corners])


def contender(name: str) -> Contender:
    if name not in KNOWN:
        raise ConfigError(f"no policy {name!r}", f"use some of {', '.join(KNOWN)}")
    module, attribute = KNOWN[name]
    found = getattr(importlib.import_module(module), attribute)
    assert isinstance(found, Contender)
    return found


def scenario(cell: Cell, seed: int, steps: int) -> Scenario:
    engine = presets.engine("Qwen3-8B", "H100")
    trainer = TrainerSpec(engine.model, engine.gpu, 8, 0.45, 400e9, 25e9, overhead_s=0.3, sleep_s=2.0, wake_s=3.0, hash_bytes_s=2e9)
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


def tokens_per_s(cell: Cell, name: str, seed: int, steps: int) -> float:
    done = simulate(scenario(cell, seed, steps), contender(name)).steps
    kept = done[int(len(done) * WARM_UP) :]
    return sum(step.tokens for step in kept) / (kept[-1].end_s - kept[0].start_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--policies", default="colocated,rlboost,polyrl,ours")
    parser.add_argument("--axes", default=",".join(AXES))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    names = asked.policies.split(",")
    table = []
    lost = []
    for cell in cells(tuple(asked.axes.split(","))):
        speeds = {name: [tokens_per_s(cell, name, seed, asked.steps) for seed in range(asked.seeds)] for name in names}
        means = {name: statistics.mean(values) for name, values in speeds.items()}
        table.append({"cell": cell.name, **means})
        print(f"{cell.name}: " + ", ".join(f"{name} {mean:,.0f}" for name, mean in means.items()), flush=True)
        if "ours" in means and max(means, key=lambda name: means[name]) != "ours":
            best = max(means, key=lambda name: means[name])
            lost.append(f"{cell.name}: {best} is {means[best] / means['ours'] - 1:.1%} ahead")
    if "ours" in names:
        print(f"ours loses in {len(lost)} of {len(table)} cells", *lost, sep="\n  ")
    if asked.json:
        asked.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
