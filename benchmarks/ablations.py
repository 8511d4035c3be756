"""What each controller is worth, and how far the best schedules are from what is possible at all, on a few cells of the policies' table.

    python -m benchmarks.ablations --traces DIR [--seeds 3] [--jobs 2] [--cells earth-volatile:Qwen3-8B:4,...]

First: every mixture and ablation of `policies/registry.py` with rlboost, tokens a second over ours', seed by seed: the median, and the
lowest and highest seed. Then: step times of the clairvoyant and of ours over the oracle's bound (`oracle.bound`, for all engines that the
fleet has room for at each moment), without the first step, which waits for engines that start. Pairs 0: uncapped. Under five minutes on
two cores.
"""

from __future__ import annotations

import argparse
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.baselines.registry import ABLATIONS, MIXTURES, simulated_policy
from benchmarks.many import each, ratio, spread
from benchmarks.oracle_site import SiteBound
from benchmarks.policies_cells import fleet_of, scenario_of
from benchmarks.policies_table import Unit
from scavenger.simulate.driver import simulate
from scavenger.simulate.outcome import StepOutcome
from scavenger.simulate.scenario import Scenario

CELLS = "earth-volatile:Qwen3-8B:4,spot-volatile:Qwen3-14B:0,earth-median:Qwen3-32B:8"
BOUNDED = ("clairvoyant", "ours")
POLICIES = ("ours", "rlboost", *MIXTURES, *ABLATIONS, "clairvoyant")


@dataclass(frozen=True, slots=True)
class UnitResult:
    """`over_bound`: seconds of the steps after the first over the least that they could have taken; 0 where that was not asked."""

    tokens_per_s: float
    over_bound: float = 0.0
    bound_by: str = ""


def over_bound(scenario: Scenario, steps: Sequence[StepOutcome]) -> tuple[float, str]:
    """Seconds of these steps over their bounds', and what bounds most of them."""
    site = SiteBound(scenario)
    least = [site.of(step.step, step.start_s, step.end_s) for step in steps]
    [(reason, _)] = Counter(one.reason for one in least).most_common(1)
    return sum(step.seconds for step in steps) / sum(one.total_s for one in least), reason


def simulate_unit(folder: Path, asked: tuple[Unit, str]) -> UnitResult:
    unit, name = asked
    scenario = scenario_of(unit, fleet_of(folder, unit.segment, unit.seed))
    out = simulate(scenario, simulated_policy(name, scenario))
    if name not in BOUNDED or len(out.steps) < 2:
        return UnitResult(out.tokens_per_s)
    return UnitResult(out.tokens_per_s, *over_bound(scenario, out.steps[1:]))


Found = Mapping[tuple[Unit, str], UnitResult]


def table(found: Found, cells: Sequence[str], seeds: int) -> Iterator[str]:
    """Tokens a second over ours'."""
    yield "| tok/s over ours' | " + " | ".join(cells) + " |"
    yield "| --- " * (1 + len(cells)) + "|"
    for name in POLICIES:
        values = [[found[unit, name].tokens_per_s for unit in units_of(cell, seeds)] for cell in cells]
        ours = [[found[unit, "ours"].tokens_per_s for unit in units_of(cell, seeds)] for cell in cells]
        row = [
            f"{spread(mine, 0)} tok/s"
            if name == "ours"
            else spread([ratio(*both) for both in zip(mine, base, strict=True)], 3)
            for mine, base in zip(values, ours, strict=True)
        ]
        yield f"| {name} | " + " | ".join(row) + " |"


def distances(found: Found, cells: Sequence[str], seeds: int) -> Iterator[str]:
    """Step times over the bound."""
    yield "| step time over the bound | " + " | ".join(BOUNDED) + " | bounded by |"
    yield "| --- " * (2 + len(BOUNDED)) + "|"
    for cell in cells:
        results = {name: [found[unit, name] for unit in units_of(cell, seeds)] for name in BOUNDED}
        row = [
            spread([ratio(one.over_bound, 1.0 if one.over_bound else 0.0) for one in results[name]], 3)
            for name in BOUNDED
        ]
        reasons = Counter(one.bound_by for one in results["clairvoyant"] if one.bound_by)
        yield f"| {cell} | " + " | ".join(row) + f" | {', '.join(reasons) or '-'} |"


def units_of(cell: str, seeds: int) -> list[Unit]:
    segment, model, pairs = cell.split(":")
    return [Unit(segment, model, int(pairs), seed) for seed in range(seeds)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--traces", type=Path, required=True, help="folder of the traces named in segments.json"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cells", default=CELLS, help="segment:model:pairs, with commas between")
    asked = parser.parse_args()
    cells = asked.cells.split(",")
    todo = [(unit, name) for cell in cells for unit in units_of(cell, asked.seeds) for name in POLICIES]
    found = dict(each(functools.partial(simulate_unit, asked.traces.resolve()), todo, asked.jobs))
    print("\n".join([*table(found, cells, asked.seeds), "", *distances(found, cells, asked.seeds)]))


if __name__ == "__main__":
    main()
