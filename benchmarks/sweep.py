"""RLBoost's eta, floor, Theta and B swept, one at a time: the best beside the paper's, and ours over both. Prints Markdown.

    python -m benchmarks.sweep --traces DIR [--segments A,B] [--models M,N] [--pairs 4] [--seeds 3] [--jobs 2]

Cells, scenario and lengths are those of `policies.py`. The paper gives eta and the floor; Theta and B are multiples of what is profiled
(`baselines.registry.profiled`). A unit of work is one cell with one seed, all variants on the same fleet and lengths; ratios are taken seed
by seed. The best is chosen for each cell by its median over the seeds, after the fact: what a user could gain by tuning for this very cell.
The default takes under 5 minutes on two cores; interrupted, it prints what it has.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.baselines.registry import profiled
from benchmarks.baselines.rlboost import Settings, rlboost
from benchmarks.policies import spread
from benchmarks.policies_cells import MODELS, fleet_of, scenario_of
from benchmarks.policies_table import Unit
from scavenger.simulate.driver import simulate
from scavenger.simulate.policies import OURS
from scavenger.simulate.scenario import Scenario

PAPER = "the paper's"
ETAS = {"1/6": 1 / 6, "2/3": 2 / 3, "1": 1.0}
FLOORS_S = (1.0, 20.0)
TIMES = {"1/4": 1 / 4, "1/2": 1 / 2, "2": 2.0, "4": 4.0}

Speeds = dict[Unit, Mapping[str, float]]  # tok/s of each variant, and of ours


def variants(paper: Settings) -> Iterator[tuple[str, Settings]]:
    """The paper's, then each factor by itself."""
    yield PAPER, paper
    for name, eta in ETAS.items():
        yield f"eta = {name}", replace(paper, eta=eta)
    for floor_s in FLOORS_S:
        yield f"floor = {floor_s:g} s", replace(paper, floor_s=floor_s)
    for name, times in TIMES.items():
        yield f"Theta x {name}", replace(paper, theta=max(1, round(paper.theta * times)))
    for name, times in TIMES.items():
        yield f"B x {name}", replace(paper, batch=max(1, round(paper.batch * times)))


def simulate_cell(cell: Scenario) -> dict[str, float]:
    found = {
        name: simulate(cell, rlboost(settings)).tokens_per_s for name, settings in variants(profiled(cell))
    }
    return found | {OURS.name: simulate(cell, OURS).tokens_per_s}


def work(folder: Path) -> None:
    """A worker process: units come as JSON lines, speeds leave as JSON lines."""
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)  # as `policies.work`: samples name no cycle that is not taken apart
    for line in sys.stdin:
        unit = Unit(**json.loads(line))
        speeds = simulate_cell(scenario_of(unit, fleet_of(folder, unit.segment, unit.seed)))
        print(json.dumps({"unit": asdict(unit), "speeds": speeds}), flush=True)


# ---------------------------------------------------------------- what is printed


def page(found: Speeds) -> str:
    """Two tables: the best beside the paper's, and each variant over the paper's."""
    cells: dict[str, list[Mapping[str, float]]] = {}
    for unit, speeds in sorted(found.items(), key=lambda item: str(item[0])):
        cells.setdefault(f"{unit.segment}, {unit.model}, {unit.pairs or 'all'} pairs", []).append(speeds)
    lines = [
        "| cell | seeds | the paper's, tok/s | best | best, tok/s | best / paper's | ours / paper's | ours / best |"
    ]
    lines += ["| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |"]
    for cell, seeds in cells.items():
        speed, name = max((_median(seeds, name), name) for name in _names(seeds))
        text = f"{_median(seeds, PAPER):,.0f} | {name} | {speed:,.0f}"
        ratios = " | ".join(
            _ratio(seeds, *pair) for pair in ((name, PAPER), (OURS.name, PAPER), (OURS.name, name))
        )
        lines.append(f"| {cell} | {len(seeds)} | {text} | {ratios} |")
    lines += ["", f"| over the paper's | {' | '.join(cells)} |", f"| --- |{' ---: |' * len(cells)}"]
    for name in _names(next(iter(cells.values()))):
        if name != PAPER:
            lines.append(f"| {name} | {' | '.join(_ratio(seeds, name, PAPER) for seeds in cells.values())} |")
    return "\n".join([*lines, "", "Medians over the seeds, in brackets the least and the most."])


def _names(seeds: Sequence[Mapping[str, float]]) -> list[str]:
    return [name for name in seeds[0] if name != OURS.name]


def _median(seeds: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(speeds[name] for speeds in seeds)


def _ratio(seeds: Sequence[Mapping[str, float]], above: str, below: str) -> str:
    """A step that nobody finished has no speed, and no ratio."""
    ratios = [speeds[above] / speeds[below] for speeds in seeds if speeds[below]]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})" if ratios else "-"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--traces", type=Path, required=True, help="folder of the traces named in segments.json"
    )
    parser.add_argument("--segments", default="earth-volatile,spot-volatile")
    parser.add_argument("--models", default="Qwen3-8B,Qwen3-14B", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--pairs", default="4", help="fleet caps, comma separated; 0: none")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked.traces)
        return
    units = [
        Unit(segment, model, int(pairs), seed)
        for seed in range(asked.seeds)
        for segment in asked.segments.split(",")
        for model in asked.models.split(",")
        for pairs in asked.pairs.split(",")
    ]
    argv = [sys.executable, "-m", "benchmarks.sweep", "--traces", str(asked.traces.resolve()), "--worker"]
    found: Speeds = {}
    try:
        for line in spread(units, max(1, min(asked.jobs, len(units))), argv):
            entry = json.loads(line)
            found[Unit(**entry["unit"])] = entry["speeds"]
            print(f"{len(found)} of {len(units)} units", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"ended after {len(found)} of {len(units)} units")
    if found:
        print(page(found))


if __name__ == "__main__":
    main()
