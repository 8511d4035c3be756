"""Simulates the published points and prints simulated against published, with the error: one set of constants for all rows.

    python benchmarks/published.py [--spot spot_bamboo.csv.gz] [--steps 12] [--seeds 2] [--rows colocated,rlboost] [--json out.json]

Rows with constant pairs need no trace. Those on spot segments need the spot trace; without --spot they are left out and named. They run the
three spot segments of benchmarks/segments.json with half their instances, a pair of GPUs each. Throughput counts prompts and completions,
as veRL's perf/throughput does, over whole steps after the first quarter (the policies' own learning).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Not this file's folder: a benchmark in it has the name of a package.
sys.path[:] = [str(ROOT), *(place for place in sys.path if Path(place).resolve() != ROOT / "benchmarks")]

from benchmarks.baselines.points import ROWS, PublishedPoint, Quantity, Setting, scenario, steady, throughput  # noqa: E402  after the path, as all that follows
from benchmarks.baselines.registry import profiled  # noqa: E402
from benchmarks.baselines.rlboost import rlboost  # noqa: E402
from scavenger.simulate import traces  # noqa: E402
from scavenger.simulate.clock import Streams  # noqa: E402
from scavenger.simulate.driver import simulate  # noqa: E402
from scavenger.simulate.fleet import FleetTrace  # noqa: E402
from scavenger.simulate.outcome import SimulationOutcome  # noqa: E402
from scavenger.simulate.policies import COLOCATED, SimulatedPolicy  # noqa: E402
from scavenger.simulate.presets import STACK  # noqa: E402
from scavenger.simulate.scenario import Scenario  # noqa: E402

SEGMENTS = Path(__file__).with_name("segments.json")
PAIR = STACK.engine_gpus


def policy_of(policy: str, cell: Scenario) -> SimulatedPolicy:
    """As in a row, with what is profiled for its scenario."""
    if policy == "colocated":
        return COLOCATED
    settings = profiled(cell)
    return rlboost(
        replace(settings, seeds=policy != "rlboost without seeding", memo=policy != "rlboost without memo"),
        policy,
    )


def spot_fleets(path: Path, seed: int) -> list[FleetTrace]:
    """The three spot segments, each with half its instances (every other one, by name)."""
    fleets = []
    described = json.loads(SEGMENTS.read_text())
    for one in described["segments"]:
        if one["trace"].startswith("spot"):
            fleet = traces.read_spot(path, one["source"], PAIR, Streams(seed).stream("instances"))
            fleets.append(
                fleet.only(sorted(fleet.capacity)[::2]).segment(one["start_s"], described["length_s"])
            )
    return fleets


def mean_pairs(out: SimulationOutcome) -> float:
    return out.harvested_gpu_hours * 3600 / out.step_seconds / PAIR


class Bench:
    """Runs what rows need, once."""

    def __init__(self, spot: Path | None, steps: int, seeds: int) -> None:
        self._spot, self._steps, self._seeds = spot, steps, seeds
        self._known: dict[tuple[str, Setting], list[SimulationOutcome]] = {}

    def outcomes(self, policy: str, setting: Setting) -> list[SimulationOutcome]:
        if (policy, setting) not in self._known:
            outs = []
            for seed in range(self._seeds):
                for fleet, steps in self._fleets(setting, seed):
                    cell = scenario(setting, fleet, steps, seed)
                    outs.append(simulate(cell, policy_of(policy, cell)))
            self._known[policy, setting] = outs
        return self._known[policy, setting]

    def _fleets(self, setting: Setting, seed: int) -> list[tuple[FleetTrace, int]]:
        """Segments are run to their end, constant fleets for so many steps."""
        if not setting.spot_segments:
            return [(steady(setting.pairs, 30 * 86_400.0), self._steps)]
        assert self._spot is not None
        return [(fleet, 0) for fleet in spot_fleets(self._spot, seed)]

    def value(self, row: PublishedPoint) -> float:
        ours = self.outcomes(row.policy if not _without(row) else _without(row), row.setting)
        speed = _mean(throughput, ours)
        if row.quantity is Quantity.TOKENS_PER_S:
            return speed
        base = self.outcomes(row.against, row.setting)
        factor = statistics.mean(
            throughput(mine) / throughput(other) for mine, other in zip(ours, base, strict=True)
        )
        if row.quantity is Quantity.SPEED_UP:
            return factor
        if row.quantity is Quantity.CHANGE:
            return factor - 1
        price = [
            row.setting.dollars_per_hour(mean_pairs(mine)) / row.setting.dollars_per_hour(0.0)
            for mine in ours
        ]
        gains = [
            throughput(mine) / throughput(other) / paid
            for mine, other, paid in zip(ours, base, price, strict=True)
        ]
        return statistics.mean(gains) - 1


def _without(row: PublishedPoint) -> str:
    """The contender's name where the row switches something off."""
    off = [switch for switch, on in row.switches.items() if not on]
    return f"{row.policy} without {off[0]}" if off else ""


def _mean(of: Callable[[SimulationOutcome], float], outs: list[SimulationOutcome]) -> float:
    return statistics.mean(of(out) for out in outs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spot", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument(
        "--rows", default="", help="only rows whose names begin with one of these, comma separated"
    )
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    wanted = tuple(name for name in asked.rows.split(",") if name)
    rows = [row for row in ROWS if not wanted or row.name.startswith(wanted)]
    bench = Bench(asked.spot, asked.steps, asked.seeds)
    found, left_out = [], []
    print(f"{'row':34} {'published':>10} {'simulated':>10} {'error':>7}  source")
    for row in rows:
        if row.setting.spot_segments and asked.spot is None:
            left_out.append(row.name)
            continue
        started = time.perf_counter()
        value = bench.value(row)
        found.append(
            {
                "row": row.name,
                "published": row.value,
                "simulated": value,
                "error": row.error(value),
                "calibrates": row.calibrates,
            }
        )
        form = ",.0f" if row.quantity is Quantity.TOKENS_PER_S else ".2f"
        marked = row.name + (" *" if row.calibrates else "")
        took = time.perf_counter() - started
        print(
            f"{marked:34} {row.value:>10{form}} {value:>10{form}} {row.error(value):>+7.1%}  {row.source} ({took:.0f} s)",
            flush=True,
        )
    print("* calibrates: the constants were chosen with these rows")
    if left_out:
        print(f"left out, they need --spot: {'; '.join(left_out)}")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
