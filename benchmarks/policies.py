"""Policies against each other: every cell of (segment x model x fleet cap), many seeds, with 95 % confidence. Writes `policies.md`.

    python benchmarks/policies.py --traces DIR [--seeds 10] [--jobs 2] [--reduced] [--policy ours,rlboost,...] [--out FILE.md]

Cells are never averaged over segments, whose starts are fixed in `segments.json`. The setting is that of the published points
(`published.STACK`), whatever the policy. A unit of work is one cell with one seed: all its policies meet the same fleet, lengths and cold
starts, so ratios are taken seed by seed. `--jobs` processes share the units; what they find is kept in `--keep FILE`, from which an ended
run goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scavenger.simulate import traces
from scavenger.simulate.clairvoyant_site import clairvoyant
from scavenger.simulate.driver import simulate
from scavenger.simulate.engine import Streams
from scavenger.simulate.fleet import Fleet
from scavenger.simulate.outcome import Outcome
from scavenger.simulate.policies.registry import CONTENDERS
from scavenger.simulate.published import STACK, Setting, scenario
from scavenger.simulate.scenario import Scenario

SEGMENTS = Path(__file__).with_name("segments.json")
MODELS = {"Qwen3-8B": 8, "Qwen3-14B": 8, "Qwen3-32B": 16}  # -> reserved GPUs
CAPS = (1, 2, 4, 8, 0)  # pairs; 0 = uncapped
UNCAPPED = 128
EARTH_END_S = 72 * 3600.0
PRICES = (10.47, 2.66)  # dollars an hour of a reserved and of a harvested GPU
COMPARED = ("colocated", "disaggregated", "polyrl", "rlboost", "ours", "clairvoyant")
# Student's t for two-sided 95 %, by degrees of freedom; beyond the table the normal's.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """One cell with one seed."""

    segment: str
    model: str
    pairs: int
    seed: int


@dataclass(frozen=True, slots=True)
class Result:
    """What one policy did in one unit."""

    tokens_per_s: float
    tokens_per_dollar: float
    tokens_per_dollar_free: float  # harvested GPUs at no price
    steps: int
    starts: int
    wasted: int
    preemptions: int
    harvested_gpu_hours: float


def fleet_of(folder: Path, name: str, seed: int) -> Fleet:
    """The segment's fleet. Of spot instances the trace has only the number: which one goes is drawn by the seed."""
    described = json.loads(SEGMENTS.read_text())
    one = next(one for one in described["segments"] if one["name"] == name)
    path = folder / one["trace"]
    if "source" in one:
        whole = traces.read_spot(path, one["source"], STACK.engine_gpus, Streams(seed).stream("instances"))
    else:
        whole = traces.read_nodes(path, 8, EARTH_END_S)
    return whole.segment(one["start_s"], described["length_s"])


def scenario_of(unit: Unit, fleet: Fleet) -> Scenario:
    """The published setting over the whole segment, with as many engines as the cell allows; weights are relayed, for all policies."""
    setting = Setting(unit.model, MODELS[unit.model])
    return replace(scenario(setting, fleet, steps=0, seed=unit.seed), max_engines=unit.pairs or UNCAPPED, relay=True)


def result_of(out: Outcome) -> Result:
    reserved, harvested = PRICES
    return Result(
        out.tokens_per_s, out.tokens_per_dollar(reserved, harvested), out.tokens_per_dollar(reserved, 0.0), len(out.steps), out.starts,
        out.wasted_starts, out.preemptions, out.harvested_gpu_hours,
    )  # fmt: skip


def play(unit: Unit, folder: Path, policies: Sequence[str]) -> dict[str, Result]:
    cell = scenario_of(unit, fleet_of(folder, unit.segment, unit.seed))
    return {
        name: result_of(simulate(cell, clairvoyant(cell) if name == "clairvoyant" else CONTENDERS[name])) for name in policies
    }


# ---------------------------------------------------------------- processes


def work(folder: Path, policies: Sequence[str]) -> None:
    """A worker process: units come as JSON lines, results leave as JSON lines."""
    for line in sys.stdin:
        unit = Unit(**json.loads(line))
        found = play(unit, folder, policies)
        print(json.dumps({"unit": asdict(unit), "found": {name: asdict(one) for name, one in found.items()}}), flush=True)


Found = dict[Unit, dict[str, Result]]


def read(line: str, into: Found) -> None:
    one = json.loads(line)
    into[Unit(**one["unit"])] = {name: Result(**result) for name, result in one["found"].items()}


def spread(units: Sequence[Unit], jobs: int, folder: Path, policies: Sequence[str], keep: Path | None) -> Iterator[str]:
    """Deal the units out to processes; yields their lines as each process ends its share, and appends them to `keep` before."""
    argv = [sys.executable, __file__, "--traces", str(folder), "--policy", ",".join(policies), "--worker"]
    shares = [units[place::jobs] for place in range(jobs)]
    workers = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in shares]
    try:
        for worker, share in zip(workers, shares, strict=True):
            assert worker.stdin is not None
            worker.stdin.write("".join(json.dumps(asdict(unit)) + "\n" for unit in share))
            worker.stdin.close()
        for worker in workers:
            assert worker.stdout is not None
            for line in worker.stdout:
                if keep is not None:
                    with keep.open("a") as file:
                        file.write(line)
                yield line
            if worker.wait():
                raise SystemExit(f"a worker ended with {worker.returncode}")
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()


# ---------------------------------------------------------------- the table


def interval(values: Sequence[float]) -> str:
    """Mean and half the width of its 95 % confidence interval over seeds."""
    mean = statistics.mean(values)
    digits = 0 if mean >= 1000 else 2
    if len(values) < 2:
        return f"{mean:,.{digits}f}"
    freedom = len(values) - 1
    t = T95[freedom - 1] if freedom <= len(T95) else 1.96
    return f"{mean:,.{digits}f} ± {t * statistics.stdev(values) / math.sqrt(len(values)):,.{digits}f}"


def gap_closed(by_name: Mapping[str, Result]) -> float:
    """(ours - colocated) / (clairvoyant - colocated) in tokens a second. NaN where there is no gap to close."""
    ours, colocated, best = (by_name[name].tokens_per_s for name in ("ours", "colocated", "clairvoyant"))
    return (ours - colocated) / (best - colocated) if best > 1.01 * colocated else math.nan


def _ratio(first: str, second: str) -> Callable[[Mapping[str, Result]], float]:
    return lambda found: found[first].tokens_per_s / found[second].tokens_per_s


def _throughput_of(name: str) -> Callable[[Mapping[str, Result]], float]:
    return lambda found: found[name].tokens_per_s


def rows(found: Found, policies: Sequence[str]) -> Iterator[str]:
    columns: list[tuple[str, Callable[[Mapping[str, Result]], float]]] = []
    columns += [(f"{name} tok/s", _throughput_of(name)) for name in policies]
    if "ours" in policies:
        columns += [(f"ours / {name}", _ratio("ours", name)) for name in policies if name != "ours"]
        if {"colocated", "clairvoyant"} <= set(policies):
            columns.append(("gap closed", gap_closed))
        if "colocated" in policies:
            columns.append(("tokens/$ over colocated", lambda by: by["ours"].tokens_per_dollar / by["colocated"].tokens_per_dollar))
            columns.append(("the same at no price", lambda by: by["ours"].tokens_per_dollar_free / by["colocated"].tokens_per_dollar_free))
    yield "| segment | model | pairs | seeds | " + " | ".join(name for name, _ in columns) + " |"
    yield "| --- " * (4 + len(columns)) + "|"
    cells: dict[tuple[str, str, int], list[Mapping[str, Result]]] = {}
    for unit in sorted(found):
        cells.setdefault((unit.segment, unit.model, unit.pairs), []).append(found[unit])
    for (segment, model, pairs), by_seed in cells.items():
        values = [interval([of(one) for one in by_seed]) for _, of in columns]
        yield f"| {segment} | {model} | {pairs or 'all'} | {len(by_seed)} | " + " | ".join(values) + " |"


def page(found: Found, policies: Sequence[str], seconds: float) -> str:
    head = [
        "# Policies in simulation",
        "",
        "Trace-driven; of the Earth segments with simulated placement. Mean over seeds ± half the 95 % confidence interval; ratios seed by",
        f"seed. Made by `benchmarks/policies.py` in {seconds / 60:.0f} min. The setting is that of `scavenger/simulate/published.py`.",
        "",
    ]
    return "\n".join([*head, *rows(found, policies), ""])


def units_of(asked: argparse.Namespace) -> list[Unit]:
    segments = [one["name"] for one in json.loads(SEGMENTS.read_text())["segments"]]
    if asked.reduced:
        return [Unit(segment, "Qwen3-8B", 4, seed) for segment in ("earth-volatile", "spot-volatile") for seed in range(2)]
    return [Unit(segment, model, cap, seed) for seed in range(asked.seeds) for segment in segments for model in MODELS for cap in CAPS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces named in segments.json")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--reduced", action="store_true", help="two cells, two seeds: minutes")
    parser.add_argument("--policy", default=",".join(COMPARED))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    parser.add_argument("--keep", type=Path, help="file of results: read first, added to")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    policies = asked.policy.split(",")
    unknown = [name for name in policies if name not in CONTENDERS and name != "clairvoyant"]
    if unknown:
        parser.error(f"no policy {unknown[0]!r}: there are {', '.join([*CONTENDERS, 'clairvoyant'])}")
    if asked.worker:
        work(asked.traces, policies)
        return
    found: Found = {}
    for line in asked.keep.read_text().splitlines() if asked.keep and asked.keep.exists() else ():
        read(line, found)
    started = time.monotonic()
    todo = [unit for unit in units_of(asked) if unit not in found]
    for line in spread(todo, max(1, min(asked.jobs, len(todo))), asked.traces, policies, asked.keep) if todo else ():
        read(line, found)
        print(f"{len(found)} units, {time.monotonic() - started:.0f} s", file=sys.stderr)
    text = page(found, policies, time.monotonic() - started)
    asked.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
