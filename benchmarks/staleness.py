"""What bounded staleness brings: throughput at k = 0, 1, 2, 4, 8 beside k = 0 and beside three asynchronous trainers.

    python -m benchmarks.staleness --traces DIR [--ks 0,1,2,4,8] [--seeds 2] [--hours 0.75] [--cells ...] [--jobs 1]
        [--on-new-version switch] [--kv recompute] [--reward-s 0]
    python -m benchmarks.staleness --traces DIR --speculation checked,text,seer [--seeds 2] [--hours 0.75]
    python -m benchmarks.staleness --traces DIR --all checked,text,seer [--ks 4] [--seeds 2] [--hours 0.75]

Simulated: the live router, policy, admission, train-step machine and harvester over virtual engines and a virtual Slurm. A cell is one
of the policies' table (`policies_cells`) in its live setting: segment, model, most engines. Each line has the median over seeds of the
ratio to k = 0 of the same seed, with the lowest and the highest, where a step's seconds went, what was thrown away for age, and how old
what was trained is. With `--speculation` k = 0 with `engine.speculation = "group"` over k = 0 without, and Seer's scheduler
(`baselines.seer`) beside it. Below each cell the asynchronous trainers (`baselines.asynchronous`) over the engines that k = 0 had there:
the same starts and preemptions.
`--all`: k with all that this system has for the tail (speculation, kept KV), over k = 0 without any of it, beside the asynchronous trainers
as they are, and as they would be had they these drafts too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.baselines import asynchronous, asynchronous_run, no_wait, seer
from benchmarks.baselines.asynchronous import Rule
from benchmarks.live_setting import LiveSetting, live_scenario
from benchmarks.many import each, median
from benchmarks.policies_cells import HEARTBEAT_S, MODELS, SETTINGS, fleet_of
from benchmarks.policies_table import Unit
from scavenger.simulate.driver import simulate
from scavenger.simulate.outcome import SimulationOutcome
from scavenger.simulate.policies import SIMULATED_POLICIES
from scavenger.simulate.scenario import Scenario
from scavenger.simulate.speculation import CURVES

#: (segment, model, most engines): each kind of trace, each model, few and many engines.
CELLS = {
    "earth-volatile 8B, 4": ("earth-volatile", "Qwen3-8B", 4),
    "spot-volatile 8B, 1": ("spot-volatile", "Qwen3-8B", 1),
    "spot-busy 14B, 2": ("spot-busy", "Qwen3-14B", 2),
    "earth-median 32B, 8": ("earth-median", "Qwen3-32B", 8),
}
#: Of the run, which is not counted: before it the fleet is not there, and nothing is learned.
WARM_UP = 0.2
#: What the asynchronous trainers of the table are allowed: as much as ours with this k, but for prime-rl, whose bound is 8.
AHEAD = 4
#: prime-rl has no rule for its pool: the best of these, in batches.
POOLS = (1, 2, 4)
GOAL, FLOOR = 1.3, 0.98
#: Of k = 4 over the best asynchronous trainer; over the bound in which no GPU ever waits (`baselines.no_wait`).
ASYNCHRONOUS_GOAL, BOUND_GOAL = 1.15, 0.9
#: With speculation, of cells with two engines or more; no cell may be below `FLOOR`. Live it is for engines of one GPU, which hold
#: these models.
SPECULATION_GOAL = 1.15
SPECULATION_CELLS = ("earth-volatile 8B, 4", "spot-volatile 8B, 1", "spot-busy 14B, 2")
SEER = "Seer, synchronous"
CHUNKS = (2048, 8192)


@dataclass(frozen=True, slots=True)
class Play:
    """One simulation of ours, and of what is played beside it over the engines that it had."""

    cell: str
    k: int
    seed: int
    hours: float
    traces: str
    on_new_version: str
    kv: str
    reward_s: float
    engine_gpus: int = 0  # of each engine; 0: the live setting's
    speculation: str = ""  # a curve's name; "": `engine.speculation = "none"`
    beside: str = ""  # which schedulers are played over its engines: "asynchronous", "seer", or none
    drafted: tuple[str, ...] = ()  # curves with which the asynchronous ones are played as well


@dataclass(frozen=True, slots=True)
class Found:
    """Of one simulation, after its warm-up: tokens trained a second; means a step, in seconds; `thrown`: samples that were thrown away for
    age; `age`: mean and oldest of what was trained, in optimizer steps; `others`: of each asynchronous trainer (tokens a second, thrown,
    ages)."""

    tokens_per_s: float
    step_s: float
    seed_s: float
    toggle_s: float
    wait_s: float
    train_s: float
    preemptions: int
    thrown: int
    prefilled: float
    age: tuple[float, int]
    others: dict[str, tuple[float, int, float, int]]
    bound: float  # tokens a second if no GPU that it had ever waited


def scenario_of(play: Play) -> Scenario:
    segment, model, engines = CELLS[play.cell]
    unit = Unit(segment, model, engines, play.seed)
    fleet = fleet_of(Path(play.traces), segment, play.seed)
    if play.engine_gpus:
        setting = LiveSetting(model, MODELS[model], play.engine_gpus)
        cell = live_scenario(setting.plan(engines), unit, fleet, HEARTBEAT_S)
    else:
        cell = SETTINGS["live"](unit, fleet)
    cell = cell.speculating(CURVES[play.speculation] if play.speculation else None)
    return replace(
        cell,
        horizon_s=min(cell.horizon_s, play.hours * 3600.0),
        max_off_policy_steps=play.k,
        on_new_version="finish" if play.on_new_version == "finish" else "switch",
        kv="keep" if play.kv == "keep" and play.k else "recompute",
        reward_s=play.reward_s,
    )


def rules(prompts: int, samples: int) -> dict[str, Sequence[Rule]]:
    """By the name in the table, what is tried: the best of them counts. `samples` of each prompt."""
    return {
        "prime-rl, bound 8": [asynchronous.PrimeRL(prompts * samples * pool) for pool in POOLS],
        f"verl, threshold {AHEAD}, waits": [asynchronous.Verl(AHEAD)],
        f"verl, threshold {AHEAD}, drops": [asynchronous.Verl(AHEAD, "drop")],
        f"AReaL, staleness {AHEAD}": [asynchronous.AReaL(AHEAD, sys.maxsize)],
    }


Other = tuple[float, int, float, int]


def others_of(play: Play, scenario: Scenario, out: SimulationOutcome, since: float) -> dict[str, Other]:
    lives = asynchronous_run.lives_of(out.engines)
    if play.beside == "seer":
        plays = [asynchronous_run.synchronous(scenario, seer.Seer(chunk), lives) for chunk in CHUNKS]
        one = max(plays, key=lambda played: played.tokens_per_s(since))
        return {SEER: (one.tokens_per_s(since), one.thrown, 0.0, 0)}
    if play.beside != "asynchronous":
        return {}
    found = asynchronous_of(scenario, lives, since)
    for name in play.drafted:
        drafted = asynchronous_of(scenario.speculating(CURVES[name]), lives, since)
        found |= {f"{other}, drafts of {name}": one for other, one in drafted.items()}
    return found


def asynchronous_of(
    scenario: Scenario, lives: Sequence[asynchronous_run.Life], since: float
) -> dict[str, Other]:
    found = {}
    for name, some in rules(scenario.prompts, scenario.samples).items():
        tried = [asynchronous_run.best(scenario, rule, lives, since) for rule in some]
        one = max(tried, key=lambda played: played.tokens_per_s(since))
        ages = [step.age_mean for step in one.steps] or [0.0]
        most = max([step.age_most for step in one.steps], default=0)
        found[name] = (one.tokens_per_s(since), one.thrown, statistics.mean(ages), most)
    return found


def played(play: Play) -> Found:
    scenario = scenario_of(play)
    out = simulate(scenario, SIMULATED_POLICIES["ours"])
    since = WARM_UP * scenario.horizon_s
    ends = [step for step in out.steps if step.end_s >= since]
    steps = ends[1:]
    if not steps:
        raise SystemExit(f"{play.cell}, k = {play.k}: no whole step after {since:.0f} s: give more --hours")
    seconds = steps[-1].end_s - ends[0].end_s

    def mean(part: str) -> float:
        return statistics.mean(float(getattr(step, part)) for step in steps)

    return Found(
        sum(step.tokens for step in steps) / seconds,
        seconds / len(steps),
        mean("seed_s"),
        mean("toggle_s"),
        mean("wait_s"),
        mean("train_s"),
        out.preemptions,
        scenario.prompts * scenario.samples * len(out.steps) - sum(step.samples for step in out.steps),
        out.prefilled / max(1, out.tokens),
        (mean("age_mean"), max(step.age_most for step in steps)),
        others_of(play, scenario, out, since),
        no_wait.tokens_per_s(
            scenario,
            no_wait.Had(
                seconds,
                no_wait.harvested_s(asynchronous_run.lives_of(out.engines), ends[0].end_s, steps[-1].end_s),
                mean("tokens"),
                mean("train_s") + mean("update_s") + mean("publish_s"),
            ),
        ),
    )


def spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def rows(cell: str, ks: Sequence[int], found: dict[Play, Found]) -> list[str]:
    """A cell's lines of the table."""
    base = {play.seed: one for play, one in found.items() if (play.cell, play.k) == (cell, 0)}
    lines = []
    for k in ks:
        mine = {play.seed: one for play, one in found.items() if (play.cell, play.k) == (cell, k)}
        if not mine:
            continue
        ratios = [mine[seed].tokens_per_s / base[seed].tokens_per_s for seed in sorted(mine)]
        best = [
            mine[seed].tokens_per_s / max(other[0] for other in base[seed].others.values())
            for seed in sorted(mine)
        ]
        parts = " | ".join(
            f"{median([getattr(one, part) for one in mine.values()]):,.0f}"
            for part in ("tokens_per_s", "step_s", "seed_s", "toggle_s", "wait_s", "train_s")
        )
        thrown = sum(one.thrown for one in mine.values())
        prefilled = median([one.prefilled for one in mine.values()])
        age, oldest = median([one.age[0] for one in mine.values()]), max(one.age[1] for one in mine.values())
        parts += f" | {prefilled:.2f} | {thrown} | {age:.1f}, at most {oldest}"
        bound = spread([one.tokens_per_s / one.bound for one in mine.values()])
        lines.append(f"| {cell} | ours, k = {k} | {spread(ratios)} | {spread(best)} | {bound} | {parts} |")
    for name in next(iter(base.values())).others:
        theirs = {seed: one.others[name] for seed, one in base.items()}
        ratios = [theirs[seed][0] / base[seed].tokens_per_s for seed in sorted(base)]
        rate, mean = (median([one[at] for one in theirs.values()]) for at in (0, 2))
        thrown, most = sum(one[1] for one in theirs.values()), max(one[3] for one in theirs.values())
        lines.append(
            f"| {cell} | {name} | {spread(ratios)} | | | {rate:,.0f} | | | | | | | {thrown:,} | {mean:.1f}, at most {most} |"
        )
    return lines


HEAD = (
    "| cell | who | ratio to k = 0 | to the best of the others | of the bound | tokens/s | step s | generating | toggling | waiting | "
    "training | prefilled a token | thrown away | age |"
)


def missed(ks: Sequence[int], found: dict[Play, Found]) -> list[str]:
    """Goals of k = 4, and the floor of each k, that a cell misses."""
    lines = []
    for cell in dict.fromkeys(play.cell for play in found):
        base = {play.seed: one for play, one in found.items() if (play.cell, play.k) == (cell, 0)}
        for k in ks:
            mine = {play.seed: one for play, one in found.items() if (play.cell, play.k) == (cell, k)}
            if not k or not mine:
                continue
            ratio = median([mine[seed].tokens_per_s / base[seed].tokens_per_s for seed in mine])
            wanted = GOAL if k == AHEAD else FLOOR
            if ratio < wanted:
                lines.append(f"- {cell}, k = {k}: {ratio:.2f}, wanted {wanted}")
            bound = median([one.tokens_per_s / one.bound for one in mine.values()])
            if k == AHEAD and bound < BOUND_GOAL:
                lines.append(
                    f"- {cell}, k = {k}: {bound:.2f} of the bound in which no GPU waits, wanted {BOUND_GOAL}"
                )
            others = [seed for seed in mine if base[seed].others]
            best = [mine[seed].tokens_per_s / best_other(base[seed].others, "") for seed in others]
            if k == AHEAD and best and median(best) < ASYNCHRONOUS_GOAL:
                lines.append(
                    f"- {cell}, k = {k}: {median(best):.2f} of the best of the others, wanted {ASYNCHRONOUS_GOAL}"
                )
    return lines


def table(ks: Sequence[int], found: dict[Play, Found]) -> list[str]:
    lines = [HEAD, "| --- " * (HEAD.count("|") - 1) + "|"]
    for cell in dict.fromkeys(play.cell for play in found):
        lines += rows(cell, ks, found)
    return lines


def speculation_table(names: Sequence[str], found: dict[Play, Found]) -> list[str]:
    """k = 0 with speculation over k = 0 without, in the same setting and seed, and Seer's scheduler with the same drafts beside it."""
    lines = [
        "| cell | acceptance | with / without | ours / Seer | tokens/s | step s | generating | waiting | training |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    short = []
    for cell in dict.fromkeys(play.cell for play in found):
        base = {play.seed: one for play, one in found.items() if (play.cell, play.speculation) == (cell, "")}
        for name in ("", *names):
            mine = {
                play.seed: one for play, one in found.items() if (play.cell, play.speculation) == (cell, name)
            }
            ratios = [mine[seed].tokens_per_s / base[seed].tokens_per_s for seed in sorted(mine)]
            beside = [mine[seed].tokens_per_s / mine[seed].others[SEER][0] for seed in sorted(mine) if name]
            parts = " | ".join(
                f"{median([getattr(one, part) for one in mine.values()]):,.0f}"
                for part in ("tokens_per_s", "step_s", "seed_s", "wait_s", "train_s")
            )
            lines.append(
                f"| {cell} | {name or 'none'} | {spread(ratios)} | {spread(beside) if beside else ''} | {parts} |"
            )
            wanted = SPECULATION_GOAL if CELLS[cell][2] > 1 else FLOOR
            if name and median(ratios) < wanted:
                short.append(f"- {cell}, {name}: {median(ratios):.2f}, wanted {wanted}")
            if name and min(ratios) < FLOOR:
                short.append(f"- {cell}, {name}: a seed at {min(ratios):.2f}, below {FLOOR}")
    return [*lines, "", *(short or ["Every cell meets its goals."])]


def all_plays(args: argparse.Namespace, ks: Sequence[int], names: Sequence[str]) -> list[Play]:
    """Of each cell and seed k = 0 without anything, with the asynchronous trainers beside it, and each k with everything."""
    plays = []
    for seed in range(args.seeds):
        for cell in args.cells.split(";"):
            of = (seed, args.hours, args.traces, "switch", "keep", args.reward_s, 1)
            plays.append(Play(cell, 0, *of, beside="asynchronous", drafted=tuple(names)))
            plays += [Play(cell, k, *of, speculation=name) for k in ks if k for name in names]
    return plays


def all_table(ks: Sequence[int], names: Sequence[str], found: dict[Play, Found]) -> list[str]:
    """Each k with everything, over k = 0 without, over the best asynchronous trainer, and over the best of them with the same drafts."""
    lines = [
        "| cell | acceptance | who | ratio to k = 0 | to the best as they are | to the best with these drafts | tokens/s | step s | "
        "thrown away |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    short = []
    for cell in dict.fromkeys(play.cell for play in found):
        base = {play.seed: one for play, one in found.items() if (play.cell, play.k) == (cell, 0)}
        for name, k in ((name, k) for name in names for k in ks if k):
            mine = {
                play.seed: one
                for play, one in found.items()
                if (play.cell, play.k, play.speculation) == (cell, k, name)
            }
            to_base = [one.tokens_per_s / base[seed].tokens_per_s for seed, one in mine.items()]
            plain = [one.tokens_per_s / best_other(base[seed].others, "") for seed, one in mine.items()]
            drafted = [one.tokens_per_s / best_other(base[seed].others, name) for seed, one in mine.items()]
            rate, step = (
                median([getattr(one, part) for one in mine.values()]) for part in ("tokens_per_s", "step_s")
            )
            thrown = sum(one.thrown for one in mine.values())
            lines.append(
                f"| {cell} | {name} | ours, k = {k} | {spread(to_base)} | {spread(plain)} | {spread(drafted)} | {rate:,.0f} | "
                f"{step:,.0f} | {thrown} |"
            )
            if k == AHEAD and (median(to_base) < GOAL or median(plain) < ASYNCHRONOUS_GOAL):
                short.append(
                    f"- {cell}, {name}: {median(to_base):.2f} of k = 0, wanted {GOAL}; {median(plain):.2f} of the best, wanted "
                    f"{ASYNCHRONOUS_GOAL}"
                )
        for other in next(iter(base.values())).others:
            theirs = {seed: one.others[other] for seed, one in base.items()}
            ratios = [theirs[seed][0] / base[seed].tokens_per_s for seed in theirs]
            rate, thrown = median([one[0] for one in theirs.values()]), sum(one[1] for one in theirs.values())
            lines.append(f"| {cell} | | {other} | {spread(ratios)} | | | {rate:,.0f} | | {thrown:,} |")
    return [*lines, "", *(short or ["Every cell meets its goals."])]


def best_other(others: dict[str, Other], drafts: str) -> float:
    """Tokens a second of the best asynchronous trainer, without drafts (""), or with those of a curve."""
    suffix = f", drafts of {drafts}"
    names = [name for name in others if (name.endswith(suffix) if drafts else ", drafts of " not in name)]
    return max(others[name][0] for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", required=True, help="folder of the traces named in segments.json")
    parser.add_argument("--ks", default="0,1,2,4,8")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--hours", type=float, default=0.75)
    parser.add_argument("--cells", default=";".join(CELLS), help="names, with semicolons between them")
    parser.add_argument("--on-new-version", default="switch", choices=("switch", "finish"))
    parser.add_argument("--kv", default="recompute", choices=("recompute", "keep"), help="where k is above 0")
    parser.add_argument("--reward-s", type=float, default=0.0)
    parser.add_argument(
        "--speculation",
        default="",
        help=f"instead of --ks: k = 0 with each of these acceptance curves ({','.join(CURVES)}) over k = 0 without, engines of one GPU",
    )
    parser.add_argument(
        "--all",
        default="",
        help="each k above 0 with each of these acceptance curves and kept KV, engines of one GPU, beside the asynchronous trainers",
    )
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    names = [name for name in (args.speculation or args.all).split(",") if name]
    if unknown := set(names) - CURVES.keys():
        parser.error(f"{sorted(unknown)} is no acceptance curve; there are {', '.join(CURVES)}")
    ks = sorted({0, *(int(k) for k in args.ks.split(","))})
    if args.all:
        if args.cells == ";".join(CELLS):
            args.cells = ";".join(SPECULATION_CELLS)
        table_of(all_plays(args, ks, names), args.jobs, lambda found: all_table(ks, names, found))
        return
    if names:
        cells = args.cells.split(";") if args.cells != ";".join(CELLS) else SPECULATION_CELLS
        speculated = [
            Play(
                cell,
                0,
                seed,
                args.hours,
                args.traces,
                "switch",
                "recompute",
                args.reward_s,
                1,
                name,
                "seer" if name else "",
            )
            for seed in range(args.seeds)
            for cell in cells
            for name in ("", *names)
        ]
        table_of(speculated, args.jobs, lambda found: speculation_table(names, found))
        return
    plays = [
        Play(
            cell,
            k,
            seed,
            args.hours,
            args.traces,
            args.on_new_version,
            args.kv,
            args.reward_s,
            beside="" if k else "asynchronous",
        )
        for seed in range(args.seeds)
        for cell in args.cells.split(";")
        for k in ks
    ]
    table_of(
        plays,
        args.jobs,
        lambda found: [*table(ks, found), "", *(missed(ks, found) or ["Every cell meets its goals."])],
    )


def table_of(plays: Sequence[Play], jobs: int, lines: Callable[[dict[Play, Found]], list[str]]) -> None:
    found = {}
    for play, one in each(played, plays, jobs):
        found[play] = one
        print(
            f"{play.cell} k={play.k} {play.speculation} seed {play.seed}: {one}", file=sys.stderr, flush=True
        )
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
