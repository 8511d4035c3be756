"""Several runs over one fleet: GPUs divided by value against a static division, first-come, and turns by share.

    python -m benchmarks.fleet --keep FILE [--traces DIR] [--runs 2,4,8] [--mix unlike,alike,short,one-model] [--seeds 3] [--hours 2]
    python -m benchmarks.fleet --keep FILE --runs 2,4 --mix lora,lora-unlike --divisions value,lend8,lend64
    python -m benchmarks.fleet --keep FILE --no-run          (the tables of what is there so far)

    static       each run has a part of the nodes to itself, with as many idle GPUs on average
    first-come   all of the fleet; the run that came first is served in full before the next one starts an engine
    turns        all of the fleet; runs take turns for what comes free, and keep what they have (`harvest.division = "shares"`)
    value        all of the fleet, divided by what one more engine saves each run (`harvest.division = "value"`)
    alone        each run has all of the fleet to itself, as if there were no others: more than any division can give all of them
    lendN        value, and engines lend N slots to samples of other runs (`harvest.lend_slots`), by the code that decides it live. For LoRA
                 runs of one base; both runs' samples are in one batch, which costs what their sum costs (`simulate.shared_batch`)
    value+N      value, and a node of N GPUs more that is always idle: what lending so many reserved GPUs could bring at most, where as
                 many are idle on average. Lent ones would cost changes of hands, and be there when it suits their own run

A unit is one mix of runs on one segment with one seed: all divisions meet the same fleet, lengths and cold starts, so ratios are taken unit
by unit. Without `--traces` the fleet is a synthetic one. The trace-driven fleet has simulated placement. What is found is kept in
`--keep FILE`, a line a unit and division.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks import synthetic
from benchmarks.baselines.points import Setting, scenario
from scavenger.config.site import HarvestSection
from scavenger.harvest.limits import division_rules
from scavenger.simulate import traces
from scavenger.simulate.clock import Streams
from scavenger.simulate.driver import SimulatedRun, simulate, simulate_fleet
from scavenger.simulate.fleet import FleetTrace
from scavenger.simulate.lengths import CachedLengths
from scavenger.simulate.outcome import HOUR_S, SimulationOutcome
from scavenger.simulate.policies import OURS
from scavenger.simulate.presets import STACK
from scavenger.simulate.scenario import Scenario
from scavenger.simulate.site_cluster import SimulatedDivision

EARTH, EARTH_END_S = "earth_node_idle_72h.csv.gz", 72 * 3600.0
SEGMENTS = Path(__file__).with_name("segments.json")
HEARTBEAT_S = POLL_S = 15.0
MOST_ENGINES = 128
DIVISIONS = ("static", "first-come", "turns", "value", "alone")
LEND = "lend"
#: Of a step's seconds (`StepOutcome`): in all but `seed` the reserved GPUs belong to training, and in `wait` they do nothing.
STAGES = ("seed", "toggle", "wait", "train", "update", "publish")
#: To take an engine's memory, get another run's weights, and give the memory back takes an 8B's reserved engine about 10 s.
LENT_S = 30.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A run: its model and GPUs, and its step. `short`: its completions are a quarter as long. `lora`: it trains adapters, and shares
    engines; its training is costed as that of all weights."""

    name: str
    model: str
    reserved_gpus: int
    engine_gpus: int
    prompts: int
    short: bool = False
    lora: bool = False


UNLIKE = (
    Kind("14B on 8", "Qwen3-14B", 8, 2, 128),
    Kind("8B on 4, small steps", "Qwen3-8B", 4, 1, 16, short=True),
    Kind("32B on 16", "Qwen3-32B", 16, 8, 128),
    Kind("8B on 8", "Qwen3-8B", 8, 2, 128),
)
#: Of equal runs, long steps and short ones; and of one model, whose engines could change hands: long steps beside short ones.
LORA = (
    Kind("8B LoRA on 8", "Qwen3-8B", 8, 2, 128, lora=True),
    Kind("8B LoRA on 4, small steps", "Qwen3-8B", 4, 2, 16, short=True, lora=True),
)
MIXES = {
    "unlike": UNLIKE,
    "alike": (UNLIKE[3],),
    "short": (UNLIKE[1],),
    "one-model": (UNLIKE[1], UNLIKE[3]),
    "lora": LORA[:1],
    "lora-unlike": LORA,
}
#: Adapters of rank 16 beside an 8B's linear layers are 87 MB of its 16 GB.
ADAPTER_SHARE = 0.005


def runs_of(mix: str, count: int) -> list[Kind]:
    kinds = MIXES[mix]
    return [kinds[n % len(kinds)] for n in range(count)]


def scenario_of(kind: Kind, fleet: FleetTrace, seed: int) -> Scenario:
    """The published setting, but for what the kind says."""
    tokens = (STACK.mean_tokens / 4, STACK.cap // 4) if kind.short else (STACK.mean_tokens, STACK.cap)
    stack = replace(STACK, engine_gpus=kind.engine_gpus, mean_tokens=tokens[0], cap=tokens[1])
    setting = Setting(kind.model, kind.reserved_gpus)
    made = scenario(setting, fleet, steps=0, seed=seed)
    small = Setting(kind.model, kind.reserved_gpus).engine(
        replace(stack, engine_gpus=min(2, kind.reserved_gpus))
    )
    return replace(
        made,
        reserved=small,
        reserved_engines=kind.reserved_gpus // small.gpus,
        harvested=setting.engine(stack),
        lengths=CachedLengths(setting.lengths(stack)),
        prompts=kind.prompts,
        horizon_s=fleet.end_s,
        max_engines=MOST_ENGINES,
        relay=True,
        heartbeat_s=HEARTBEAT_S,
        poll_interval_s=POLL_S,
        # Engines of long and short steps are of one kind.
        context_tokens=made.prompt_tokens + STACK.cap if kind.lora else 0,
        adapter_share=ADAPTER_SHARE if kind.lora else 0.0,
        share_engines=kind.lora,
    )


def fleet_of(folder: Path | None, segment: str, seed: int, hours: float) -> FleetTrace:
    if folder is None:
        return synthetic.generate(Streams(seed), hours * 3600.0)
    one = next(one for one in json.loads(SEGMENTS.read_text())["segments"] if one["name"] == segment)
    return traces.read_nodes(folder / EARTH, 8, EARTH_END_S).segment(one["start_s"], hours * 3600.0)


def parts(fleet: FleetTrace, count: int) -> list[FleetTrace]:
    """The nodes dealt out, the one with the most idle GPU time first, each to the part that has least."""
    idle_s, level, since = (
        dict.fromkeys(fleet.capacity, 0.0),
        dict(fleet.initial),
        dict.fromkeys(fleet.capacity, 0.0),
    )
    for change in fleet.changes:
        idle_s[change.node] += level[change.node] * (change.t_s - since[change.node])
        level[change.node], since[change.node] = change.idle, change.t_s
    for node in idle_s:
        idle_s[node] += level[node] * (fleet.end_s - since[node])
    nodes: list[set[str]] = [set() for _ in range(count)]
    sums = [0.0] * count
    for node in sorted(idle_s, key=lambda node: (-idle_s[node], node)):
        least = min(range(count), key=lambda n: (sums[n], len(nodes[n]), n))
        nodes[least].add(node)
        sums[least] += idle_s[node]
    return [
        FleetTrace(
            fleet.origin,
            fleet.end_s,
            {node: gpus for node, gpus in fleet.capacity.items() if node in its},
            {node: gpus for node, gpus in fleet.initial.items() if node in its},
            tuple(change for change in fleet.changes if change.node in its),
        )
        for its in nodes
    ]


def with_idle(fleet: FleetTrace, gpus: int) -> FleetTrace:
    """The same, and one node more, whose GPUs are idle all the time."""
    more = {"lent": gpus}
    return replace(fleet, capacity={**fleet.capacity, **more}, initial={**fleet.initial, **more})


@dataclass(frozen=True, slots=True)
class Unit:
    mix: str
    runs: int
    segment: str
    seed: int
    hours: float
    nodes: float  # part of the segment's nodes


@dataclass(frozen=True, slots=True)
class Found:
    """Of each run, in order: tokens a second, GPUs harvested on average, finished steps, starts of engines; `stages`: where the seconds of
    its finished steps went, by `STAGES`; `idle`: its reserved GPUs that did nothing, on average, and `lendable`: those of them in waits of
    `LENT_S` and more; `unused`: harvested GPUs whose engines had no sample, or started; `loans`, `borrowed`: of slots to the run, and
    of its tokens the part that was made in them."""

    tokens_per_s: list[float]
    gpus: list[float]
    steps: list[int]
    starts: list[int]
    given_back: list[int]
    cpu_s: float = 0.0
    stages: list[list[float]] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    lendable: list[float] = field(default_factory=list)
    unused: list[float] = field(default_factory=list)
    loans: list[int] = field(default_factory=list)
    borrowed: list[float] = field(default_factory=list)


def divided(name: str, floor: float | None = None) -> SimulatedDivision:
    slots = int(name[len(LEND) :]) if name.startswith(LEND) else 0
    rules = division_rules(HarvestSection(division="value")) if slots or name == "value" else None
    if rules is not None and floor is not None:
        rules = replace(rules, floor=floor)
    return SimulatedDivision(rules, first_come=name == "first-come", lend_slots=slots)


def play(unit: Unit, folder: Path | None, division: str, floor: float | None = None) -> Found:
    started = time.process_time()
    division, _, more = division.partition("+")
    fleet = parts(fleet_of(folder, unit.segment, unit.seed, unit.hours), round(1 / unit.nodes))[0]
    fleet = with_idle(fleet, int(more)) if more else fleet
    kinds = runs_of(unit.mix, unit.runs)
    seeds = [100 * unit.seed + n for n in range(unit.runs)]
    if division in ("static", "alone"):
        fleets = parts(fleet, unit.runs) if division == "static" else [fleet] * unit.runs
        outs = [
            simulate(scenario_of(kind, part, seed), OURS)
            for kind, part, seed in zip(kinds, fleets, seeds, strict=True)
        ]
    else:
        runs = [
            SimulatedRun(f"r{n}", scenario_of(kind, fleet, seed), OURS, f"owner{n}")
            for n, (kind, seed) in enumerate(zip(kinds, seeds, strict=True))
        ]
        outs = simulate_fleet(runs, divided(division, floor))
    return Found(
        [out.tokens_per_s for out in outs],
        [_gpus(out) for out in outs],
        [len(out.steps) for out in outs],
        [out.starts for out in outs],
        [sum(engine.why == "given back" for engine in out.engines) for out in outs],
        time.process_time() - started,
        [[sum(getattr(step, f"{stage}_s") for step in out.steps) for stage in STAGES] for out in outs],
        [out.reserved.idle_gpu_s / out.seconds for out in outs if out.reserved is not None],
        [out.reserved.waited_longer(LENT_S) / out.seconds for out in outs if out.reserved is not None],
        [out.idle_allocated_gpu_hours * HOUR_S / out.seconds for out in outs],
        [out.loans for out in outs],
        [out.borrowed_tokens / max(1, out.tokens) for out in outs],
    )


def _gpus(out: SimulationOutcome) -> float:
    return sum(engine.gpus * engine.allocated_s for engine in out.engines) / out.seconds


# ---------------------------------------------------------------- tables


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 where all are alike, 1/n where one has all."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


@dataclass(frozen=True, slots=True)
class Ratios:
    """One unit's division against the static one. `total`: tokens of all runs; `mean`: geometric, over the runs' own ratios; `least`: of a
    run; `jain`: of the ratios."""

    total: float
    mean: float
    least: float
    jain: float


def ratios(found: Found, static: Found) -> Ratios:
    each = [
        new / old if old else math.inf
        for new, old in zip(found.tokens_per_s, static.tokens_per_s, strict=True)
    ]
    finite = [max(one, 1e-3) for one in each if one < math.inf]
    return Ratios(
        sum(found.tokens_per_s) / sum(static.tokens_per_s),
        statistics.geometric_mean(finite),
        min(each),
        jain(finite),
    )


Kept = dict[tuple[Unit, str], Found]


def table(kept: Kept) -> Iterator[str]:
    """Median and spread over units, of each mix, number of runs and division."""
    yield "| runs | nodes | division | tokens, all runs | a run, geometric mean | the run that fares worst | Jain's index | units |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    cells_of = {(unit.mix != "unlike", unit.mix, -unit.nodes, unit.runs) for unit, _ in kept}
    for _, mix, part, runs in sorted(cells_of):
        others = {name for _, name in kept if "+" in name or name.startswith(LEND)}
        for division in (*DIVISIONS[1:], *sorted(others)):
            rows = [
                ratios(found, kept[unit, "static"])
                for (unit, name), found in sorted(kept.items(), key=lambda item: repr(item[0]))
                if (unit.mix, -unit.nodes, unit.runs, name) == (mix, part, runs, division)
                and (unit, "static") in kept
            ]
            if rows:
                cells = [
                    _spread([getattr(row, part) for row in rows])
                    for part in ("total", "mean", "least", "jain")
                ]
                yield f"| {runs} {mix} | {-part:g} | {division} | {' | '.join(cells)} | {len(rows)} |"


def lending_table(kept: Kept) -> Iterator[str]:
    """What lending slots brings over the same division without: median and spread over units."""
    heads = "tokens, all runs, against value | a run, geometric mean | the run that fares worst | loans | of a run's tokens, in lent slots"
    yield f"| runs | nodes | slots | {heads} | units |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    lends = [(unit, name) for unit, name in kept if name.startswith(LEND)]
    for mix, part, runs, division in sorted({(one.mix, -one.nodes, one.runs, name) for one, name in lends}):
        rows = [
            (ratios(kept[unit, name], kept[unit, "value"]), kept[unit, name])
            for unit, name in sorted(lends, key=repr)
            if (unit.mix, -unit.nodes, unit.runs, name) == (mix, part, runs, division)
            and (unit, "value") in kept
        ]
        if rows:
            cells = [
                _spread([getattr(row, which) for row, _ in rows]) for which in ("total", "mean", "least")
            ]
            cells.append(_spread([sum(found.loans) for _, found in rows]))
            cells.append(_spread([statistics.mean(found.borrowed) for _, found in rows]))
            slots = division[len(LEND) :]
            yield f"| {runs} {mix} | {-part:g} | {slots} | {' | '.join(cells)} | {len(rows)} |"


def reserved_table(kept: Kept) -> Iterator[str]:
    """Median and spread over units, of all runs together: how many GPUs did nothing, on average, and how much of a step was training."""
    idle = f"reserved GPUs that did nothing | in waits of {LENT_S:.0f} s and more | harvested GPUs without a sample"
    yield f"| runs | nodes | division | {idle} | of a step, training | units |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    cells_of = {(unit.mix != "unlike", unit.mix, -unit.nodes, unit.runs) for unit, _ in kept}
    for _, mix, part, runs in sorted(cells_of):
        for division in DIVISIONS:
            rows = [
                found
                for (unit, name), found in sorted(kept.items(), key=lambda item: repr(item[0]))
                if (unit.mix, -unit.nodes, unit.runs, name) == (mix, part, runs, division) and found.idle
            ]
            if rows:
                trains = [
                    sum(one[STAGES.index("train")] for one in row.stages) / sum(map(sum, row.stages))
                    for row in rows
                ]
                cells = [
                    _spread([sum(getattr(row, which)) for row in rows])
                    for which in ("idle", "lendable", "unused")
                ]
                yield f"| {runs} {mix} | {-part:g} | {division} | {' | '.join(cells)} | {_spread(trains)} | {len(rows)} |"


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def read(path: Path) -> Kept:
    kept: Kept = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        item = json.loads(line)
        kept[Unit(**item["unit"]), item["division"]] = Found(**item["found"])
    return kept


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--runs", default="2,4,8")
    parser.add_argument("--mix", default="unlike,alike")
    parser.add_argument("--segments", default="earth-calm,earth-median,earth-volatile")
    parser.add_argument("--divisions", default=",".join(DIVISIONS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--parts", default="1,0.25", help="of the segment's nodes: 1, 0.5, 0.25")
    parser.add_argument("--floor", type=float, help="in place of harvest.division_floor's default")
    parser.add_argument("--no-run", action="store_true")
    given = parser.parse_args(argv)
    kept = read(given.keep)
    segments = given.segments.split(",") if given.traces else ["synthetic"]
    units = [
        Unit(mix, int(runs), segment, seed, given.hours, float(part))
        for seed in range(given.seeds)
        for mix in given.mix.split(",")
        for runs in given.runs.split(",")
        for part in given.parts.split(",")
        for segment in segments
    ]
    for unit in [] if given.no_run else units:
        for division in given.divisions.split(","):
            if (unit, division) in kept:
                continue
            found = kept[unit, division] = play(unit, given.traces, division, given.floor)
            with given.keep.open("a") as file:
                file.write(
                    json.dumps({"unit": asdict(unit), "division": division, "found": asdict(found)}) + "\n"
                )
            print(unit, division, found, flush=True)
    print("\n".join((*table(kept), "", *reserved_table(kept), "", *lending_table(kept))))


if __name__ == "__main__":
    main()
