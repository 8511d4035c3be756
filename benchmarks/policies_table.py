"""The table of policies as text: rows with 95 % confidence, goals, each miss with its reason, and engines' starts. Pure.

The goals' reference is, unit by unit, the better of two feasible schedules: the clairvoyant scheduler's and ours, which who knows
everything could have played too. Owns what a unit and its result are, and the words of `policies.md`. Knows nothing of how one is played.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from scavenger.simulate.comparison import estimate

COMPARED = ("colocated", "polyrl", "rlboost", "ours", "clairvoyant")
FEASIBLE = ("clairvoyant", "ours")
GAP = 1.01  # of the reference over colocated, from which on there is a gap to close
PARTS = ("window_s", "wait_s", "train_s")


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
    cpu_s: float = 0.0  # that it took to play; 0: it was known already


By = Mapping[str, Result]  # what each policy did in one unit
Metric = Callable[[By], float]  # NaN where there is none
Found = dict[Unit, dict[str, Result]]
Cell = tuple[str, str, int]  # segment, model, pairs


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values) if values else 0.0


def interval(values: Sequence[float]) -> str:
    """Mean and half the width of its 95 % confidence interval over the seeds that have a value; how many, where not all have one."""
    there = [value for value in values if not math.isnan(value)]
    if not there:
        return "-"
    found = estimate(there)
    digits = 0 if found.value >= 1000 else 2
    summary = f"{found.value:,.{digits}f}" + (
        f" ± {found.high - found.value:,.{digits}f}" if len(there) > 1 else ""
    )
    return summary + (f" ({len(there)} of {len(values)} seeds)" if len(there) < len(values) else "")


def reference(by: By) -> Result:
    """The faster of the two feasible schedules."""
    return max((by[name] for name in FEASIBLE), key=lambda one: one.tokens_per_s)


def gap_closed(by: By) -> float:
    """(ours - colocated) / (reference - colocated) in tokens a second, 1 at most. NaN where there is no gap to close."""
    ours, colocated, best = by["ours"].tokens_per_s, by["colocated"].tokens_per_s, reference(by).tokens_per_s
    return (ours - colocated) / (best - colocated) if best > GAP * colocated else math.nan


def _over(value: float, base: float) -> float:
    return value / base if base > 0 else math.nan  # 0: not one whole step in two hours (32B over one pair)


def _ratio(first: str, second: str) -> Metric:
    return lambda by: _over(by[first].tokens_per_s, by[second].tokens_per_s)


def _best_over(second: str) -> Metric:
    return lambda by: _over(reference(by).tokens_per_s, by[second].tokens_per_s)


def _per_dollar(name: str) -> Metric:
    return lambda by: _over(by[name].tokens_per_dollar, by["colocated"].tokens_per_dollar)


def _best_per_dollar(by: By) -> float:
    """Of either schedule the one that makes more of a dollar."""
    return max(_per_dollar(name)(by) for name in FEASIBLE)


def _throughput_of(name: str) -> Metric:
    return lambda by: by[name].tokens_per_s


def rows(found: Found, policies: Sequence[str], of_other_code: Set[Unit] = frozenset()) -> Iterator[str]:
    """`of_other_code`: units that another code played."""
    columns: list[tuple[str, Metric]] = []
    columns += [(f"{name} tok/s", _throughput_of(name)) for name in policies]
    if "ours" in policies:
        columns += [(f"ours / {name}", _ratio("ours", name)) for name in policies if name != "ours"]
        if {"colocated", "clairvoyant"} <= set(policies):
            columns.append(("gap closed", gap_closed))
        if "colocated" in policies:
            columns.append(("tokens/$ over colocated", _per_dollar("ours")))
            columns.append(
                (
                    "the same at no price",
                    lambda by: _over(
                        by["ours"].tokens_per_dollar_free, by["colocated"].tokens_per_dollar_free
                    ),
                )
            )
    yield "| segment | model | pairs | seeds | " + " | ".join(name for name, _ in columns) + " |"
    yield "| --- " * (4 + len(columns)) + "|"
    stale = {(unit.segment, unit.model, unit.pairs) for unit in of_other_code}
    for cell, by_seed in _cells(found).items():
        values = [interval([of(one) for one in by_seed]) for _, of in columns]
        yield (
            f"| {_named(cell)} | {len(by_seed)}{STALE if cell in stale else ''} | "
            + " | ".join(values)
            + " |"
        )


#: Marks a cell of which some unit was played by another code than the page's.
STALE = "\\*"


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that shall be at least `least` in the cells where the reference's, `of_best`, is `allowed` or more (0: everywhere).

    `same`: `of_best` is the same figure of the reference, so that who knows everything may miss the goal itself.
    """

    name: str
    metric: Metric
    least: float
    of_best: Metric
    allowed: float
    same: bool = True

    @property
    def summary(self) -> str:
        where = f", where the reference has {self.allowed:g} or more" if self.allowed and self.same else ""
        return f"{self.name} >= {self.least:g}{where}"


GOALS = (
    Goal("gap closed", gap_closed, 0.9, _best_over("colocated"), GAP, same=False),
    Goal("ours / rlboost", _ratio("ours", "rlboost"), 1.15, _best_over("rlboost"), 1.15),
    Goal("ours / polyrl", _ratio("ours", "polyrl"), 1.3, _best_over("polyrl"), 1.3),
    Goal("ours / colocated", _ratio("ours", "colocated"), 2.2, _best_over("colocated"), 2.4),
    Goal("tokens/$ over colocated", _per_dollar("ours"), 1.6, _best_per_dollar, 0.0),
)


class _Verdict(NamedTuple):
    """What became of a goal in one cell. `outcome` is its column: 0 met, 1 missed, 2 not asked, 3 no figure."""

    outcome: int
    metrics: list[float]  # of the seeds that have a figure
    best: float  # the reference's mean over the same seeds


def _verdict(by_seed: Sequence[By], goal: Goal) -> _Verdict:
    both = [
        (metric, best)
        for one in by_seed
        if not math.isnan(metric := goal.metric(one)) and not math.isnan(best := goal.of_best(one))
    ]
    if not both:
        return _Verdict(3, [], math.nan)
    metrics, best = [metric for metric, _ in both], _mean([best for _, best in both])
    met, asked = _mean(metrics) >= goal.least, best >= goal.allowed
    return _Verdict(0 if met else 1 if asked else 2, metrics, best)


def in_short(found: Found) -> Iterator[str]:
    """The page on one screen: each goal's figure over all cells, and in how many of them it is met."""
    cells = _cells(found)
    yield "*Simulated*: tokens a second of our policy (*ours*) beside four others, and what of its goals is met."
    yield ""
    yield "| mean of a cell | lowest | median | highest | goal | cells that meet it | miss it | not asked | no figure |"
    yield "| --- " * 9 + "|"
    for goal in GOALS:
        verdicts = [_verdict(by_seed, goal) for by_seed in cells.values()]
        counts = Counter(verdict.outcome for verdict in verdicts)
        means = [_mean(verdict.metrics) for verdict in verdicts if verdict.metrics]
        span = [f"{of(means):.2f}" for of in (min, statistics.median_low, max)] if means else ["-", "-", "-"]
        columns = [*span, f"{goal.least:g}", *(str(counts[outcome]) for outcome in range(4))]
        yield f"| {goal.name} | " + " | ".join(columns) + " |"
    yield ""
    yield from IN_SHORT


def missed(found: Found) -> Iterator[str]:
    """Goals by cell: met, missed, not asked, or without a figure; and each that is not met, with its figures and the reason."""
    lines: list[str] = []
    none: dict[str, list[str]] = {}
    counts = {goal.name: [0, 0, 0, 0] for goal in GOALS}
    for cell, by_seed in _cells(found).items():
        for goal in GOALS:
            outcome, metrics, best = _verdict(by_seed, goal)
            counts[goal.name][outcome] += 1
            if not metrics:
                none.setdefault(_comma(cell), []).append(goal.name)
            elif outcome:
                blank = [math.nan] * (len(by_seed) - len(metrics))
                summary = f"{interval([*metrics, *blank])} of {goal.least:g} (reference {best:.2f})"
                why = _reason(by_seed, goal, best)
                lines.append(f"| {_named(cell)} | {goal.name} | {summary} | {why} | {_seconds(by_seed)} |")
    yield "| goal | cells that meet it | miss it | are under it, and not asked: the reference has too little | have no figure |"
    yield "| --- | --- | --- | --- | --- |"
    for goal in GOALS:
        yield f"| {goal.summary} | " + " | ".join(map(str, counts[goal.name])) + " |"
    if none:
        yield ""
        cells = "; ".join(f"{cell} ({', '.join(names)})" for cell, names in none.items())
        yield f"No figure: the other policy ended no step, or of the gap, that there is none to close. {cells}."
    if lines:
        yield ""
        yield "| segment | model | pairs | goal | reached | why | a step's seconds: all = window + wait + train + rest |"
        yield "| --- | --- | --- | --- | --- | --- | --- |"
        yield from lines


def ahead(found: Found) -> str:
    """How often ours was the reference."""
    ratios = {unit: _ratio("ours", "clairvoyant")(by) for unit, by in found.items()}
    more = {unit: ratio for unit, ratio in ratios.items() if ratio > 1}
    summary = f"Ours was ahead of the clairvoyant scheduler in {len(more)} of {len(found)} units"
    if more:
        most = max(more, key=lambda unit: more[unit])
        summary += f", by {more[most] - 1:.1%} at most ({_comma((most.segment, most.model, most.pairs))}, seed {most.seed})"
    return summary + "."


def starts(found: Found, policies: Sequence[str]) -> Iterator[str]:
    """Engine starts, the share of them that ended before a token, and preemptions: means over seeds, a column for each cap."""
    cells = _cells(found)
    caps = sorted({pairs for _, _, pairs in cells}, key=lambda pairs: pairs or math.inf)
    yield (
        "| segment | model | policy | "
        + " | ".join(f"{pairs or 'all'} pairs" if pairs != 1 else "1 pair" for pairs in caps)
        + " |"
    )
    yield "| --- " * (3 + len(caps)) + "|"
    for segment, model in dict.fromkeys((segment, model) for segment, model, _ in cells):
        for name in policies:
            summary = [
                _started([by[name] for by in cells.get((segment, model, pairs), ())]) for pairs in caps
            ]
            yield f"| {segment} | {model} | {name} | " + " | ".join(summary) + " |"
    yield ""
    for name in policies:
        all_, wasted = (
            sum(getattr(by[name], what) for by in found.values()) for what in ("starts", "wasted")
        )
        yield f"- {name}: {_share(wasted, all_)} of all {all_:,} starts were wasted (wanted: under 5 %)"


def _started(results: Sequence[Result]) -> str:
    if not results:
        return ""
    all_, wasted = (sum(getattr(one, what) for one in results) for what in ("starts", "wasted"))
    return f"{all_ / len(results):.0f}, {_share(wasted, all_)}, {_mean([one.preemptions for one in results]):.0f}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _cells(found: Found) -> dict[Cell, list[By]]:
    cells: dict[Cell, list[By]] = {}
    for unit in sorted(found):
        cells.setdefault((unit.segment, unit.model, unit.pairs), []).append(found[unit])
    return cells


def _cell_columns(cell: Cell) -> tuple[str, str, int | str]:
    segment, model, pairs = cell
    return segment, model, pairs or "all"


def _comma(cell: Cell) -> str:
    return ", ".join(map(str, _cell_columns(cell)))


def _named(cell: Cell) -> str:
    return " | ".join(map(str, _cell_columns(cell)))


def _parts(results: Sequence[Result]) -> tuple[float, ...]:
    """Seconds of a step, and of its window, waiting, training and the rest."""
    whole, *parts = [_mean([getattr(one, part) for one in results]) for part in ("step_s", *PARTS)]
    return whole, *parts, whole - sum(parts)


def _reason(by_seed: Sequence[By], goal: Goal, best: float) -> str:
    """The reference has too little itself, or where ours spends most more of a step than it does."""
    if goal.same and best < goal.least:
        return "out of reach: the reference has less too"
    if best < goal.allowed:
        return f"not asked: the reference has less than {goal.allowed:g}"
    mine, its = [by["ours"] for by in by_seed], [reference(by) for by in by_seed]
    whole, *more = [my - its_ for my, its_ in zip(_parts(mine), _parts(its), strict=True)]
    most, part = max(
        zip(
            more,
            ("its window", "waiting for groups", "training", "toggles, update and publication"),
            strict=True,
        )
    )
    why = f"a step takes {whole:.0f} s more than the reference's, {part} {most:.0f} s"
    if goal.name.startswith("tokens/$"):
        held = [_mean([one.harvested_gpu_hours for one in results]) for results in (mine, its)]
        why += f"; {held[0]:.0f} harvested GPU-hours, the reference {held[1]:.0f}"
    return why


def _seconds(by_seed: Sequence[By]) -> str:
    summary = []
    for name in ("ours", "clairvoyant", "rlboost"):
        whole, window, wait, train, rest = _parts([by[name] for by in by_seed])
        summary.append(f"{name} {whole:.0f} = {window:.0f} + {wait:.0f} + {train:.0f} + {rest:.0f}")
    return "; ".join(summary)


def cpu(found: Found, policies: Sequence[str]) -> str:
    """CPU seconds of a unit, by policy: what was known already counts as nothing."""
    each = {name: _mean([by[name].cpu_s for by in found.values()]) for name in policies}
    return (
        f"{sum(each.values()):.1f} CPU s a unit ("
        + ", ".join(f"{name} {seconds:.1f}" for name, seconds in each.items())
        + ")"
    )


#: What the figures rest on, and no column says.
RESTS_ON = (
    "- Cold starts are warm: the site's compile cache is filled, and an engine takes a median of 60 s beside loading its weights"
    " (`presets.WARM_CACHE`; with nothing compiled before 96 s).",
    "- Weights go by TCP, from the trainer and on from engines that have them (a relay), for all policies alike.",
    "- On the Earth segments all seeds meet the same fleet: the interval holds completion lengths and cold starts, and says nothing of"
    " other fleets. On the spot segments which instance goes is drawn by the seed too.",
    "- Ours begins with a prior for how long GPUs last, .63 losses an hour with the"
    " trust of 8 lives (`scavenger/policy/forecast/survival.py`),"
    " which is the Earth trace's own hazard; all else it learns within each simulation.",
)


#: The setting of the page that the other systems' published points have, too.
PUBLISHED = (
    "Setting: the published one, `scavenger/simulate/presets.py`, heartbeats and polls of Slurm every 10 s.",
)


def page(
    found: Found,
    policies: Sequence[str],
    month: str,
    summary: Sequence[str],
    of_other_code: Set[Unit] = frozenset(),
    setting: Sequence[str] = PUBLISHED,
) -> str:
    """`summary`: what else there is to say of how these results came about, a line each. `of_other_code`:
    units that another code played. `setting`: what all policies meet, lines."""
    seeds = sorted({unit.seed for unit in found})
    compared = set(COMPARED) <= set(policies)
    head = [
        "# Policies in simulation",
        "",
        *([*in_short(found), ""] if compared else []),
        f"*Simulated*, {month}, with the router, harvest policy and train-step machine that run live, over traces;",
        "placement on the Earth segments is simulated. Mean over seeds ± half the 95 % confidence interval, ratios seed by seed.",
        f"Seeds {seeds[0]} to {seeds[-1]}; `pairs`: engines of two GPUs that the run may have.",
        "",
        *setting,
        "",
        *summary,
        "",
        *RESTS_ON,
        "",
    ]
    goals = ["", "## Goals", "", *REFERENCE, ahead(found), "", *missed(found)] if compared else []
    counted = [name for name in ("ours", "rlboost") if name in policies]
    engines = ["", "## Engines", "", *STARTS, "", *starts(found, counted)] if counted else []
    return "\n".join([*head, *rows(found, policies, of_other_code), *goals, *engines, ""])


IN_SHORT = (
    "A cell is one segment of a trace, one model and one cap of the fleet. *Gap closed* is the share of what the",
    "best known schedule gains over training on the reserved GPUs alone (*colocated*). *Not asked*: that schedule",
    "has too little itself. *No figure*: the other policy ended no step. Below: how the figures were made, every",
    "cell, [each miss with its reason](#goals), [engine starts](#engines).",
)
REFERENCE = (
    "The reference is, unit by unit, the better of two feasible schedules: the clairvoyant scheduler's, which knows lengths, curves and",
    "losses to come, and ours (who knows everything could have done what ours did). So a gap closed is 1 at most. Neither is the best",
    "there is: `python -m benchmarks.ablations` prints how far both are from a proven bound.",
)
STARTS = (
    "Engines started in two hours, the share of them that was gone before it made a token, and engines that others took; mean over seeds.",
)
