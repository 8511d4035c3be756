"""How much of the idle GPU time that outlasts a cold start can be harvested, and how many starts are wasted, on a trace. Demand unbounded.

    python benchmarks/harvest.py --trace earth_node_idle_72h.csv.gz [--cold-start 115] [--observe 10] [--hours 12]

A *slice* is one GPU's idle time from s to e (`fleet_stats.slices`: what was freed last is taken first). With a cold start of C seconds and
an engine of one GPU that starts on it at a:

    harvested    sum of max(0, e - a) over slices with e - s > C,   over the sum of e - s of the same slices
    generating   the same with a + C for a: the cold start does not count
    wasted       starts with e - a < C (another job took the GPU before it generated), over all starts; those cut off by the end count in
    neither

The rule is the daemon's (`harvest.min_expected_life`): at each poll a GPU is taken once it has been idle for
`survival.settle_s`: the least age at
which it outlasts a cold start with probability `share`, within bounds, by the curves that were learned until then and nothing else
(`policy.forecast.survival`; running slices count as lives at risk). Before `idle_gpus.LEAST_LOST` lives were
seen, and with share 0, each is taken at
once. This replays GPUs, not jobs: Slurm's queue and engines of several GPUs are not in it. Figures are given
for the whole trace, and as the median and range of its segments of `--hours`, by when slices began.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from scavenger.config.site import ClusterSection, HarvestSection
from scavenger.policy.forecast.survival import ObservedLife, Survival, SurvivalCurve, settle_s
from scavenger.policy.idle_gpus import LEAST_LOST
from scavenger.simulate import traces
from scavenger.simulate.fleet import FleetTrace
from scavenger.simulate.fleet_stats import Slice, slices

HOUR_S = 3600.0
PIECE_S = 900.0  # running slices are told to the curves this often
CLASS = "one GPU"
COLD_S = 115.0
POLL_INTERVAL_S: float = ClusterSection.model_fields["poll_interval_s"].default
MIN_EXPECTED_LIFE: float = HarvestSection.model_fields["min_expected_life"].default
LEAST_HARVESTED, MOST_WASTED = 0.92, 0.05
SHARES = (0.0, 0.5, 0.9, 0.95, 0.97, 0.98, 0.985, 0.99)


@dataclass(slots=True, eq=False)
class Gpu:
    """A slice under way: `reported_s`, the age up to which the curves know it; `start_s`, when an engine was started on it."""

    slice: Slice
    reported_s: float = 0.0
    start_s: float = math.inf


def replay(fleet: FleetTrace, share: float, cold_s: float, poll_s: float, schedule_s: float) -> list[Gpu]:
    """When each GPU is taken, decided at each look with what is known then."""
    survival, coming = (
        Survival(),
        [Gpu(one) for one in sorted(slices(fleet), key=lambda one: (one.start_s, one.end_s, one.node))],
    )
    ends: list[tuple[float, int]] = []  # of those that idle
    waiting: dict[int, Gpu] = {}
    idle: dict[int, Gpu] = {}
    first, reported_at, now, lost = 0, 0.0, 0.0, 0
    settled: tuple[SurvivalCurve, float] | None = None  # for the newest curve
    while now <= fleet.end_s:
        while first < len(coming) and coming[first].slice.start_s <= now:
            idle[first] = waiting[first] = coming[first]
            heapq.heappush(ends, (coming[first].slice.end_s, first))
            first += 1
        while ends and ends[0][0] <= now:
            end_s, index = heapq.heappop(ends)
            gpu = idle.pop(index)
            waiting.pop(index, None)
            survival.observe(CLASS, end_s, ObservedLife(gpu.slice.length_s, True, gpu.reported_s))
            lost += 1
        if now - reported_at >= PIECE_S:
            reported_at = now
            _tell_running(survival, idle, now)
        if waiting:
            curve = survival.curve(CLASS, now)
            if settled is None or settled[0] is not curve:
                settled = (curve, settle_s(curve, cold_s, share))
            needed = settled[1] if share and lost >= LEAST_LOST else 0.0
            for index in [index for index, gpu in waiting.items() if now - gpu.slice.start_s >= needed]:
                waiting.pop(index).start_s = now + schedule_s
        now += poll_s
    return coming


def _tell_running(survival: Survival, idle: dict[int, Gpu], now: float) -> None:
    for gpu in idle.values():
        age = now - gpu.slice.start_s
        if age - gpu.reported_s >= PIECE_S:
            survival.observe(CLASS, now, ObservedLife(age, False, gpu.reported_s))
            gpu.reported_s = age


@dataclass(frozen=True, slots=True)
class Measured:
    harvested: float
    generating: float
    wasted: float
    starts: int


def measure(gpus: list[Gpu], cold_s: float, end_s: float) -> Measured:
    """The figures of the module's docstring."""
    long = [gpu for gpu in gpus if gpu.slice.length_s > cold_s]
    whole = sum(gpu.slice.length_s for gpu in long)
    held = sum(max(0.0, gpu.slice.end_s - gpu.start_s) for gpu in long)
    busy = sum(max(0.0, gpu.slice.end_s - gpu.start_s - cold_s) for gpu in long)
    cut = [gpu for gpu in gpus if gpu.slice.end_s >= end_s and end_s - gpu.start_s < cold_s]
    started = [gpu for gpu in gpus if gpu.start_s < gpu.slice.end_s and gpu not in cut]
    lost = sum(gpu.slice.end_s - gpu.start_s < cold_s for gpu in started)
    return Measured(held / whole, busy / whole, lost / max(1, len(started)), len(started))


def why(gpus: list[Gpu], cold_s: float) -> str:
    """Where the time that was not harvested went, and how old GPUs were that were lost before they generated."""
    long = [gpu for gpu in gpus if gpu.slice.length_s > cold_s]
    whole = sum(gpu.slice.length_s for gpu in long)
    never = sum(gpu.slice.length_s for gpu in long if gpu.start_s >= gpu.slice.end_s)
    before = sum(gpu.start_s - gpu.slice.start_s for gpu in long if gpu.start_s < gpu.slice.end_s)
    ages = Counter(
        "under 1 min"
        if age < 60
        else "1 to 5 min"
        if age < 300
        else "5 to 15 min"
        if age < 900
        else "over 15 min"
        for gpu in gpus
        if 0 < gpu.slice.end_s - gpu.start_s < cold_s
        for age in [gpu.start_s - gpu.slice.start_s]
    )
    listed = ", ".join(f"{count} at {age}" for age, count in ages.most_common()) or "none"
    return (
        f"not harvested: {before / whole:.1%} before a start, {never / whole:.1%} in "
        f"slices never taken; wasted by the GPU's age: {listed}"
    )


def of_trace(
    path: Path, poll_s: float = POLL_INTERVAL_S, cold_s: float = COLD_S, schedule_s: float = 2.0
) -> Measured:
    """A trace of node idle times, whole, by the share that the daemon's configuration begins with."""
    fleet = traces.read_nodes(path, 8, 72 * HOUR_S)
    return measure(replay(fleet, MIN_EXPECTED_LIFE, cold_s, poll_s, schedule_s), cold_s, fleet.end_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--cold-start", type=float, default=COLD_S)
    parser.add_argument("--poll-interval", type=float, default=10.0)
    parser.add_argument("--schedule", type=float, default=2.0)
    parser.add_argument("--hours", type=float, default=12.0)
    asked = parser.parse_args()
    fleet, cold_s = traces.read_nodes(asked.trace, 8, 72 * HOUR_S), asked.cold_start
    print(
        f"{fleet.origin}: {fleet.gpus} GPUs, cold start {cold_s:g} s, polls every {asked.poll_interval:g} s; "
        "goal: 92 % harvested, under 5 % wasted"
    )
    for share in SHARES:
        gpus = replay(fleet, share, cold_s, asked.poll_interval, asked.schedule)
        all_of = measure(gpus, cold_s, fleet.end_s)
        segments = [
            measure(part, cold_s, fleet.end_s)
            for k in range(math.ceil(fleet.end_s / HOUR_S / asked.hours))
            if (
                part := [
                    gpu
                    for gpu in gpus
                    if k * asked.hours <= gpu.slice.start_s / HOUR_S < (k + 1) * asked.hours
                ]
            )
        ]
        spread = [[getattr(one, name) for one in segments] for name in ("harvested", "generating", "wasted")]
        parts = "; ".join(f"{median(values):.1%} ({min(values):.1%}-{max(values):.1%})" for values in spread)
        met = all_of.harvested >= LEAST_HARVESTED and all_of.wasted < MOST_WASTED
        print(
            f"share {share:.3f}: harvested {all_of.harvested:.1%}, generating {all_of.generating:.1%}, wasted {all_of.wasted:.1%} of "
            f"{all_of.starts} starts: {'met' if met else 'MISSED'}\n  segments of {asked.hours:g} h: {parts}\n  {why(gpus, cold_s)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
