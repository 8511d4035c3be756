"""What bounded staleness brings: throughput at k = 0, 1, 2, 4, 8 as ratios to k = 0 on the same fleet, lengths and cold starts.

    python -m benchmarks.staleness [--ks 0,1,2,4,8] [--seeds 3] [--hours 2] [--cells few,many] [--on-new-version switch] [--jobs 1]

Simulated: the live router, policy, admission, train-step machine and harvester over virtual engines and a virtual Slurm. A cell is a small
run of Qwen3-8B on 4 H100, 256 heavy-tailed completions a step, on idle GPUs that other users take back every quarter of an hour. Each
line: the median over seeds of the ratio to k = 0 of the same seed, and the lowest and highest seed; then, as medians, where a step's
seconds went, how old its samples were, and what was thrown away for age, which is counted and must be 0.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.many import each, median
from benchmarks.sensitivity import Cell
from scavenger.simulate import presets
from scavenger.simulate.driver import simulate
from scavenger.simulate.lengths import Lognormal
from scavenger.simulate.policies import SIMULATED_POLICIES
from scavenger.simulate.scenario import Scenario
from scavenger.simulate.trainer_model import TrainerSpec

ENGINE = presets.engine("Qwen3-8B", "H100")
TRAINER = TrainerSpec(ENGINE.model, ENGINE.gpu, 4, 0.4, 100e9, 25e9, sleep_s=1.0, wake_s=2.0)
CAP = 14_336
#: Name -> (harvested engines at most, how many times faster than the trace's GPUs change hands)
CELLS = {"alone": (1, 16.0), "few": (4, 16.0), "many": (16, 16.0)}
#: Of the run, which is not counted: before it the fleet is not there, and nothing is learned.
WARM_UP = 0.15


@dataclass(frozen=True, slots=True)
class Unit:
    """One simulation."""

    cell: str
    k: int
    seed: int
    hours: float
    on_new_version: str


@dataclass(frozen=True, slots=True)
class Found:
    """Of one simulation, after its warm-up: tokens trained a second; means a step, in seconds; preemptions; steps."""

    tokens_per_s: float
    step_s: float
    seed_s: float
    wait_s: float
    train_s: float
    toggle_s: float
    preemptions: int
    steps: int
    prefilled: float  # tokens prefilled a token trained
    beyond: (
        int  # samples that were generated whole and not trained, of steps that were committed: thrown away
    )


def scenario_of(unit: Unit) -> Scenario:
    engines, volatility = CELLS[unit.cell]
    end_s = unit.hours * 3600.0
    fleet = Cell(volatility=volatility).fleet(unit.seed)
    return Scenario(
        ENGINE,
        4,
        ENGINE,
        TRAINER,
        Lognormal.with_mean(3000, 1.0, CAP, 0.5),
        fleet,
        prompts=32,
        samples=8,
        horizon_s=min(end_s, fleet.end_s),
        max_engines=engines,
        max_batch=128,
        heartbeat_s=10.0,
        tick_s=5.0,
        poll_interval_s=10.0,
        max_off_policy_steps=unit.k,
        on_new_version="finish" if unit.on_new_version == "finish" else "switch",
        seed=unit.seed,
    )


def played(unit: Unit) -> Found:
    scenario = scenario_of(unit)
    out = simulate(scenario, SIMULATED_POLICIES["ours"])
    since = WARM_UP * scenario.horizon_s
    steps = [step for step in out.steps if step.start_s >= since]
    seconds = steps[-1].end_s - steps[0].start_s
    tokens = sum(step.tokens for step in steps)

    def mean(part: str) -> float:
        return statistics.mean(float(getattr(step, part)) for step in steps)

    return Found(
        tokens / seconds,
        seconds / len(steps),
        mean("seed_s"),
        mean("wait_s"),
        mean("train_s"),
        mean("toggle_s"),
        out.preemptions,
        len(steps),
        out.prefilled / max(1, out.tokens),
        sum(scenario.prompts * scenario.samples - step.samples for step in out.steps),
    )


def table(ks: Sequence[int], found: dict[Unit, Found]) -> list[str]:
    lines = [
        "cell    k   ratio to k=0 (lowest, highest)   tokens/s   step   seed   wait  train  thrown away  preemptions  prefilled"
    ]
    for cell in dict.fromkeys(unit.cell for unit in found):
        for k in ks:
            mine = {unit.seed: one for unit, one in found.items() if (unit.cell, unit.k) == (cell, k)}
            base = {unit.seed: one for unit, one in found.items() if (unit.cell, unit.k) == (cell, 0)}
            ratios = [mine[seed].tokens_per_s / base[seed].tokens_per_s for seed in sorted(mine)]
            parts = [
                median([getattr(one, part) for one in mine.values()])
                for part in ("tokens_per_s", "step_s", "seed_s", "wait_s", "train_s")
            ]
            thrown, lost = (
                sum(getattr(one, part) for one in mine.values()) for part in ("beyond", "preemptions")
            )
            low, high = min(ratios), max(ratios)
            lines.append(
                f"{cell:6} {k:2}   {median(ratios):.2f}x ({low:.2f}, {high:.2f})               "
                f"{parts[0]:8.0f} {parts[1]:6.0f} {parts[2]:6.0f} {parts[3]:6.0f} {parts[4]:6.0f} {thrown:8} {lost:12}"
                f"   {median([one.prefilled for one in mine.values()]):.2f}"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ks", default="0,1,2,4,8")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--cells", default="few,many")
    parser.add_argument("--on-new-version", default="switch", choices=("switch", "finish"))
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    ks = sorted({0, *(int(k) for k in args.ks.split(","))})
    units = [
        Unit(cell, k, seed, args.hours, args.on_new_version)
        for cell in args.cells.split(",")
        for seed in range(args.seeds)
        for k in ks
    ]
    found = {}
    for unit, one in each(played, units, args.jobs):
        found[unit] = one
        print(f"{unit.cell} k={unit.k} seed {unit.seed}: {one}", file=sys.stderr)
    print("\n".join(table(ks, found)))


if __name__ == "__main__":
    main()
