"""What samples gain that take their KV blocks along, and prompts that are shared, with speculation and without. Simulated.

    python -m benchmarks.kv_moves --traces DIR [--seeds 2] [--hours 0.5] [--cells ...] [--gb-per-s 0.83,50] [--jobs 1]

The live router with its own decision for each move (`policy.kv`), fed with what virtual engines report, in the live setting with engines
of one GPU, as `engine.move_kv` and `engine.speculation` need. k = 0. A cell is one of `benchmarks.staleness`. `--gb-per-s`: what
one reader's connection carries; the first is the simulator's, under CURVE as measured on two cores. Each
line has the median over seeds of the ratio to the same seed without any of it, with the lowest and the highest; tokens that were prefilled
for a token trained; tokens that were not, because their blocks came; seconds of all prefills; and samples whose blocks moved, were
predicted to be slower, or did not come.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks import staleness
from benchmarks.many import each, median
from benchmarks.staleness import CELLS, FLOOR, SPECULATION_CELLS, SPECULATION_GOAL, spread
from scavenger.simulate.driver import simulate
from scavenger.simulate.policies import SIMULATED_POLICIES
from scavenger.simulate.scenario import KV_BYTES_S, Scenario
from scavenger.simulate.speculation import CURVES

#: Name -> (`engine.move_kv`, `router.share_prompts`, speculation).
WAYS = {
    "none": (False, False, False),
    "KV": (True, False, False),
    "prompts": (False, True, False),
    "KV, prompts": (True, True, False),
    "speculation": (False, False, True),
    "speculation, KV, prompts": (True, True, True),
}
BASE, ALL = "none", "speculation, KV, prompts"


@dataclass(frozen=True, slots=True)
class Play:
    cell: str
    way: str
    seed: int
    hours: float
    traces: str
    curve: str
    gb_per_s: float  # of one reader's connection

    def scenario(self) -> Scenario:
        moves, shares, speculates = WAYS[self.way]
        drafts = self.curve if speculates else ""
        play = staleness.Play(
            self.cell, 0, self.seed, self.hours, self.traces, "switch", "recompute", 0.0, 1, drafts
        )
        cell, rate = staleness.scenario_of(play), self.gb_per_s * 1e9
        # A faster connection than an engine's interface means a faster interface for blocks alone: weights go as before.
        return replace(cell, move_kv=moves, share_prompts=shares, kv_bytes_s=rate)


@dataclass(frozen=True, slots=True)
class Found:
    """After the warm-up: tokens trained a second. Of the whole simulation: tokens prefilled for each trained, tokens whose blocks came,
    seconds of prefills, and samples whose blocks moved, were left, or did not come."""

    tokens_per_s: float
    prefilled: float
    saved: int
    prefill_s: float
    moved: int
    left: int
    lost: int


def played(play: Play) -> Found:
    scenario = play.scenario()
    out = simulate(scenario, SIMULATED_POLICIES["ours"])
    since = staleness.WARM_UP * scenario.horizon_s
    ends = [step for step in out.steps if step.end_s >= since]
    if len(ends) < 2:
        raise SystemExit(f"{play.cell}: no whole step after {since:.0f} s: give more --hours")
    tokens, seconds = sum(step.tokens for step in ends[1:]), ends[-1].end_s - ends[0].end_s
    kv = out.kv
    return Found(
        tokens / seconds,
        out.prefilled / max(1, out.tokens),
        kv.tokens if kv else 0,
        out.prefill_s,
        kv.moved if kv else 0,
        kv.prefilled if kv else 0,
        kv.refused + kv.gone if kv else 0,
    )


HEAD = (
    "| cell | with | GB/s | ratio to none | prefilled a token | tokens whose blocks came | prefills, s | moved, left, not come |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
)


def table(found: dict[Play, Found]) -> list[str]:
    lines, short = [*HEAD], []
    for cell in dict.fromkeys(play.cell for play in found):
        base = {play.seed: one for play, one in found.items() if (play.cell, play.way) == (cell, BASE)}
        ways = dict.fromkeys((play.way, play.gb_per_s) for play in found if play.cell == cell)
        for way, rate in ways:
            mine = {
                play.seed: one
                for play, one in found.items()
                if (play.cell, play.way, play.gb_per_s) == (cell, way, rate)
            }
            ratios = [mine[seed].tokens_per_s / base[seed].tokens_per_s for seed in sorted(mine)]
            some = list(mine.values())
            counts = (sum(getattr(one, name) for one in some) for name in ("moved", "left", "lost"))
            lines.append(
                f"| {cell} | {way} | {f'{rate:g}' if WAYS[way][0] else ''} | {spread(ratios)} | "
                f"{median([one.prefilled for one in some]):.3f} | {sum(one.saved for one in some):,} | "
                f"{statistics.fmean(one.prefill_s for one in some):,.0f} | {', '.join(map(str, counts))} |"
            )
            if way == ALL and CELLS[cell][2] > 1 and median(ratios) < SPECULATION_GOAL:
                short.append(
                    f"- {cell}, {way}, {rate:g} GB/s: {median(ratios):.2f}, wanted {SPECULATION_GOAL}"
                )
            if min(ratios) < FLOOR:
                short.append(f"- {cell}, {way}, {rate:g} GB/s: a seed at {min(ratios):.2f}, below {FLOOR}")
    return [*lines, "", *(short or ["Every cell meets its goals."])]


def plays_of(args: argparse.Namespace, rates: Sequence[float]) -> list[Play]:
    return [
        Play(cell, way, seed, args.hours, args.traces, args.curve, rate)
        for seed in range(args.seeds)
        for cell in args.cells.split(";")
        for way in args.ways.split(";")
        for rate in (rates if WAYS[way][0] else rates[:1])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", required=True, help="folder of the traces named in segments.json")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--hours", type=float, default=0.5)
    parser.add_argument("--cells", default=";".join(SPECULATION_CELLS), help="with semicolons between them")
    parser.add_argument(
        "--curve", default="text", choices=tuple(CURVES), help="what siblings' drafts are worth"
    )
    parser.add_argument("--ways", default=";".join(WAYS), help=f"with semicolons; {BASE} among them")
    parser.add_argument("--gb-per-s", default=f"{KV_BYTES_S / 1e9:g},50")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    found = {}
    for play, one in each(
        played, plays_of(args, [float(rate) for rate in args.gb_per_s.split(",")]), args.jobs
    ):
        found[play] = one
        print(
            f"{play.cell} {play.way} {play.gb_per_s:g} seed {play.seed}: {one}", file=sys.stderr, flush=True
        )
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
