"""Policies against each other: every cell of (segment x model x fleet cap), many seeds, with 95 % confidence. Writes `policies.md`.

    python benchmarks/policies.py --traces DIR [--seeds 10] [--jobs 2] [--reduced] [--policy ours,rlboost,...] [--out FILE.md]

Cells are never averaged over segments, whose starts are fixed in `segments.json`. The setting is that of the published points
(`published.STACK`), whatever the policy. A unit of work is one cell with one seed: all its policies meet the same fleet, lengths and cold
starts, so ratios are taken seed by seed. Colocated, which uses no fleet, is played once for a model and a seed. `--jobs` processes take one
unit after the other; what they find is kept in `--keep FILE`, from which an ended run goes on.

The page ends with the rows that miss a goal (`GOALS`), each with what the clairvoyant reaches there and where the step's seconds went.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import json
import math
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scavenger.simulate import traces
from scavenger.simulate.clairvoyant_site import clairvoyant
from scavenger.simulate.driver import simulate
from scavenger.simulate.engine import Streams
from scavenger.simulate.fleet import Fleet
from scavenger.simulate.lengths import Remembered
from scavenger.simulate.outcome import Outcome
from scavenger.simulate.policies.registry import CONTENDERS
from scavenger.simulate.published import STACK, Setting, scenario
from scavenger.simulate.scenario import Scenario

SEGMENTS = Path(__file__).with_name("segments.json")
MODELS = {"Qwen3-8B": 8, "Qwen3-14B": 8, "Qwen3-32B": 16}  # -> reserved GPUs
CAPS = (1, 2, 4, 8, 0)  # pairs; 0 = uncapped
UNCAPPED = 128
#: A live daemon's heartbeats come every second or so, and Slurm is looked at as often as the site allows: for all policies alike.
HEARTBEAT_S = OBSERVE_S = 10.0
EARTH_END_S = 72 * 3600.0
PRICES = (10.47, 2.66)  # dollars an hour of a reserved and of a harvested GPU
COMPARED = ("colocated", "polyrl", "rlboost", "ours", "clairvoyant")
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
    step_s: float  # of the mean step, and its parts
    window_s: float
    wait_s: float
    train_s: float


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


@functools.cache
def lengths_of(setting: Setting) -> Remembered:
    return Remembered(setting.lengths())


def scenario_of(unit: Unit, fleet: Fleet) -> Scenario:
    """The published setting over the whole segment, with as many engines as the cell allows; weights are relayed, for all policies."""
    setting = Setting(unit.model, MODELS[unit.model])
    return replace(
        scenario(setting, fleet, steps=0, seed=unit.seed), max_engines=unit.pairs or UNCAPPED, relay=True, heartbeat_s=HEARTBEAT_S,
        observe_s=OBSERVE_S, lengths=lengths_of(setting),
    )  # fmt: skip


def result_of(out: Outcome) -> Result:
    reserved, harvested = PRICES
    return Result(
        out.tokens_per_s, out.tokens_per_dollar(reserved, harvested), out.tokens_per_dollar(reserved, 0.0), len(out.steps), out.starts,
        out.wasted_starts, out.preemptions, out.harvested_gpu_hours, out.step_seconds / max(1, len(out.steps)),
        *(_mean([getattr(step, part) for step in out.steps]) for part in ("seed_s", "wait_s", "train_s")),
    )  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values) if values else 0.0


Alone = dict[tuple[str, int], Result]


def play(unit: Unit, folder: Path, policies: Sequence[str], alone: Alone) -> dict[str, Result]:
    """`alone`: what colocated did by model and seed; added to."""
    cell = scenario_of(unit, fleet_of(folder, unit.segment, unit.seed))
    found = {}
    for name in policies:
        known = alone.get((unit.model, unit.seed)) if name == "colocated" else None
        found[name] = known or result_of(simulate(cell, clairvoyant(cell) if name == "clairvoyant" else CONTENDERS[name]))
    if "colocated" in found:
        alone[unit.model, unit.seed] = found["colocated"]
    return found


# ---------------------------------------------------------------- processes


def work(folder: Path, policies: Sequence[str]) -> None:
    """A worker process: units come as JSON lines, results leave as JSON lines."""
    alone: Alone = {}
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)  # samples live for a step, and name no cycle that is not taken apart
    for line in sys.stdin:
        unit = Unit(**json.loads(line))
        found = play(unit, folder, policies, alone)
        print(json.dumps({"unit": asdict(unit), "found": {name: asdict(one) for name, one in found.items()}}), flush=True)


Found = dict[Unit, dict[str, Result]]


def read(line: str, into: Found) -> None:
    one = json.loads(line)
    into[Unit(**one["unit"])] = {name: Result(**result) for name, result in one["found"].items()}


def spread(units: Sequence[Unit], jobs: int, folder: Path, policies: Sequence[str], keep: Path | None) -> Iterator[str]:
    """Hand the units to processes, each the next one when it is done with one; yields their lines, and appends them to `keep` before."""
    argv = [sys.executable, __file__, "--traces", str(folder), "--policy", ",".join(policies), "--worker"]
    todo, lines = deque(units), queue.Queue[str | None]()
    workers = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in range(jobs)]
    threads = [threading.Thread(target=_feed, args=(worker, todo, lines), daemon=True) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        for _ in units:
            line = lines.get()
            if line is None:
                raise SystemExit("a process ended before its unit: see its error above")
            if keep is not None:
                with keep.open("a") as file:
                    file.write(line)
            yield line
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        for thread in threads:
            thread.join()


def _feed(worker: subprocess.Popen[str], todo: deque[Unit], lines: queue.Queue[str | None]) -> None:
    """One process's units, one at a time. `None` when it has ended without an answer."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    while todo:
        try:
            unit = todo.popleft()
        except IndexError:  # another process took the last one
            return
        try:
            worker.stdin.write(json.dumps(asdict(unit)) + "\n")
            worker.stdin.flush()
        except BrokenPipeError:
            lines.put(None)
            return
        answer = worker.stdout.readline()
        lines.put(answer or None)
        if not answer:
            return


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


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that shall be at least `least` wherever the clairvoyant reaches `allowed` of what `of_best` says."""

    name: str
    figure: Callable[[Mapping[str, Result]], float]
    least: float
    of_best: Callable[[Mapping[str, Result]], float]
    allowed: float


def _per_dollar(name: str) -> Callable[[Mapping[str, Result]], float]:
    return lambda by: by[name].tokens_per_dollar / by["colocated"].tokens_per_dollar


GOALS = (
    Goal("gap closed", gap_closed, 0.9, lambda by: by["clairvoyant"].tokens_per_s / by["colocated"].tokens_per_s, 1.01),
    Goal("ours / rlboost", _ratio("ours", "rlboost"), 1.15, _ratio("clairvoyant", "rlboost"), 1.15),
    Goal("ours / polyrl", _ratio("ours", "polyrl"), 1.3, _ratio("clairvoyant", "polyrl"), 1.3),
    Goal("ours / colocated", _ratio("ours", "colocated"), 2.2, _ratio("clairvoyant", "colocated"), 2.4),
    Goal("tokens/$ over colocated", _per_dollar("ours"), 1.6, _per_dollar("clairvoyant"), 0.0),
)


def missed(found: Found) -> Iterator[str]:
    """Goals by cell: met, missed, or out of the clairvoyant's reach; and each that is not met, with its figures."""
    cells: dict[tuple[str, str, int], list[Mapping[str, Result]]] = {}
    for unit in sorted(found):
        cells.setdefault((unit.segment, unit.model, unit.pairs), []).append(found[unit])
    lines, counts = [], {goal.name: [0, 0, 0] for goal in GOALS}
    for (segment, model, pairs), by_seed in cells.items():
        for goal in GOALS:
            figure, best = (_mean([value for one in by_seed if not math.isnan(value := of(one))]) for of in (goal.figure, goal.of_best))
            met, allowed = figure >= goal.least, best >= goal.allowed
            counts[goal.name][0 if met else 1 if allowed else 2] += 1
            if not met:
                what = "" if allowed else ", out of the clairvoyant's reach"
                told = f"{figure:.2f} of {goal.least:g} (clairvoyant {best:.2f}{what})"
                lines.append(f"| {segment} | {model} | {pairs or 'all'} | {goal.name} | {told} | {_seconds(by_seed)} |")
    yield "| goal | cells that meet it | miss it | miss it where the clairvoyant does |"
    yield "| --- | --- | --- | --- |"
    for goal in GOALS:
        met_, missed_, beyond = counts[goal.name]
        yield f"| {goal.name} >= {goal.least:g} | {met_} | {missed_} | {beyond} |"
    if lines:
        yield ""
        yield "| segment | model | pairs | goal | reached | a step's seconds: all = window + wait + train + rest |"
        yield "| --- | --- | --- | --- | --- | --- |"
        yield from lines


def _seconds(by_seed: Sequence[Mapping[str, Result]]) -> str:
    told = []
    for name in ("ours", "clairvoyant", "rlboost"):
        parts = [_mean([getattr(one[name], part) for one in by_seed]) for part in ("step_s", "window_s", "wait_s", "train_s")]
        told.append(f"{name} {parts[0]:.0f} = {parts[1]:.0f} + {parts[2]:.0f} + {parts[3]:.0f} + {parts[0] - sum(parts[1:]):.0f}")
    return "; ".join(told)


def page(found: Found, policies: Sequence[str], seconds: float, command: str) -> str:
    seeds = sorted({unit.seed for unit in found})
    head = [
        "# Policies in simulation",
        "",
        f"*Simulated*, {datetime.date.today():%B %Y}, with the router, harvest policy and step machine that run live, over traces;",
        "placement on the Earth segments is simulated. Mean over seeds ± half the 95 % confidence interval, ratios seed by seed. Setting:",
        f"`scavenger/simulate/published.py`. Seeds {seeds[0]} to {seeds[-1]}; `pairs`: engines of two GPUs that the run may have.",
        "",
        f"`{command}`: {seconds / 60:.0f} min.",
        "",
    ]
    goals = ["", "## Goals", "", *missed(found)] if set(COMPARED) <= set(policies) else []
    return "\n".join([*head, *rows(found, policies), *goals, ""])


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
    command = "python benchmarks/policies.py --traces DIR" + "".join(f" {word}" for word in sys.argv[1:] if word in ("--reduced",))
    command += f" --seeds {asked.seeds}" if not asked.reduced else ""
    text = page(found, policies, time.monotonic() - started, f"{command} --jobs {asked.jobs}")
    asked.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
