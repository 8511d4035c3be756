"""The table of policies as text: rows with 95 % confidence, goals, and each miss with its reason. Pure.

Owns what a unit and its result are, and the words of `policies.md`. Knows nothing of simulations, processes and files.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

COMPARED = ("colocated", "polyrl", "rlboost", "ours", "clairvoyant")
# Student's t for two-sided 95 %, by degrees of freedom; beyond the table the normal's.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
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


Found = dict[Unit, dict[str, Result]]


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values) if values else 0.0


def interval(values: Sequence[float]) -> str:
    """Mean and half the width of its 95 % confidence interval over seeds, of those seeds for which there is a value."""
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return "-"
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
    def of(found: Mapping[str, Result]) -> float:
        slower = found[second].tokens_per_s  # 0: not one whole step in two hours (32B over one pair)
        return found[first].tokens_per_s / slower if slower > 0 else math.nan

    return of


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
    for (segment, model, pairs), by_seed in _cells(found).items():
        values = [interval([of(one) for one in by_seed]) for _, of in columns]
        yield f"| {segment} | {model} | {pairs or 'all'} | {len(by_seed)} | " + " | ".join(values) + " |"


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that shall be at least `least` wherever the clairvoyant reaches `allowed` of what `of_best` says.

    `same`: `of_best` is that figure of the clairvoyant, so that who knows everything may miss the goal itself.
    """

    name: str
    figure: Callable[[Mapping[str, Result]], float]
    least: float
    of_best: Callable[[Mapping[str, Result]], float]
    allowed: float
    same: bool = True


def _per_dollar(name: str) -> Callable[[Mapping[str, Result]], float]:
    return lambda by: by[name].tokens_per_dollar / by["colocated"].tokens_per_dollar


GOALS = (
    Goal("gap closed", gap_closed, 0.9, lambda by: by["clairvoyant"].tokens_per_s / by["colocated"].tokens_per_s, 1.01, same=False),
    Goal("ours / rlboost", _ratio("ours", "rlboost"), 1.15, _ratio("clairvoyant", "rlboost"), 1.15),
    Goal("ours / polyrl", _ratio("ours", "polyrl"), 1.3, _ratio("clairvoyant", "polyrl"), 1.3),
    Goal("ours / colocated", _ratio("ours", "colocated"), 2.2, _ratio("clairvoyant", "colocated"), 2.4),
    Goal("tokens/$ over colocated", _per_dollar("ours"), 1.6, _per_dollar("clairvoyant"), 0.0),
)


def missed(found: Found) -> Iterator[str]:
    """Goals by cell: met, missed, or out of the clairvoyant's reach; and each that is not met, with its figures and the reason."""
    lines, counts = [], {goal.name: [0, 0, 0] for goal in GOALS}
    for (segment, model, pairs), by_seed in _cells(found).items():
        for goal in GOALS:
            figures, best = ([value for one in by_seed if not math.isnan(value := of(one))] for of in (goal.figure, goal.of_best))
            if not figures:  # no gap to close with any seed
                continue
            met, allowed = _mean(figures) >= goal.least, _mean(best) >= goal.allowed
            counts[goal.name][0 if met else 1 if allowed else 2] += 1
            if not met:
                told = f"{interval(figures)} of {goal.least:g} (clairvoyant {_mean(best):.2f})"
                why = _reason(by_seed, goal, _mean(best))
                lines.append(f"| {segment} | {model} | {pairs or 'all'} | {goal.name} | {told} | {why} | {_seconds(by_seed)} |")
    yield "| goal | cells that meet it | miss it | miss it where the clairvoyant does |"
    yield "| --- | --- | --- | --- |"
    for goal in GOALS:
        met_, missed_, beyond = counts[goal.name]
        yield f"| {goal.name} >= {goal.least:g} | {met_} | {missed_} | {beyond} |"
    if lines:
        yield ""
        yield "| segment | model | pairs | goal | reached | why | a step's seconds: all = window + wait + train + rest |"
        yield "| --- | --- | --- | --- | --- | --- | --- |"
        yield from lines


def _cells(found: Found) -> dict[tuple[str, str, int], list[Mapping[str, Result]]]:
    cells: dict[tuple[str, str, int], list[Mapping[str, Result]]] = {}
    for unit in sorted(found):
        cells.setdefault((unit.segment, unit.model, unit.pairs), []).append(found[unit])
    return cells


def _parts(by_seed: Sequence[Mapping[str, Result]], name: str) -> tuple[float, ...]:
    """Seconds of a step, and of its window, waiting, training and the rest."""
    whole, *parts = [_mean([getattr(one[name], part) for one in by_seed]) for part in ("step_s", *PARTS)]
    return whole, *parts, whole - sum(parts)


def _reason(by_seed: Sequence[Mapping[str, Result]], goal: Goal, best: float) -> str:
    """Who knows everything misses it too, or where ours spends most more of a step than that one does."""
    if best < max(goal.allowed, goal.least if goal.same else 0.0):
        return "out of the clairvoyant's reach"
    whole, *more = [mine - its for mine, its in zip(_parts(by_seed, "ours"), _parts(by_seed, "clairvoyant"), strict=True)]
    most, part = max(zip(more, ("its window", "waiting for groups", "training", "toggles, update and publication"), strict=True))
    why = f"a step takes {whole:.0f} s more than the clairvoyant's, {part} {most:.0f} s"
    if goal.name.startswith("tokens/$"):
        held = [_mean([one[name].harvested_gpu_hours for one in by_seed]) for name in ("ours", "clairvoyant")]
        why += f"; {held[0]:.0f} harvested GPU-hours, the clairvoyant {held[1]:.0f}"
    return why


def _seconds(by_seed: Sequence[Mapping[str, Result]]) -> str:
    told = []
    for name in ("ours", "clairvoyant", "rlboost"):
        whole, window, wait, train, rest = _parts(by_seed, name)
        told.append(f"{name} {whole:.0f} = {window:.0f} + {wait:.0f} + {train:.0f} + {rest:.0f}")
    return "; ".join(told)


def cpu(found: Found, policies: Sequence[str]) -> str:
    """CPU seconds of a unit, by policy: what was known already counts as nothing."""
    each = {name: _mean([by[name].cpu_s for by in found.values()]) for name in policies}
    return f"{sum(each.values()):.1f} CPU s a unit (" + ", ".join(f"{name} {seconds:.1f}" for name, seconds in each.items()) + ")"


def page(found: Found, policies: Sequence[str], month: str, told: Sequence[str]) -> str:
    """`told`: what else there is to say of how these results came about, a line each."""
    seeds = sorted({unit.seed for unit in found})
    head = [
        "# Policies in simulation",
        "",
        f"*Simulated*, {month}, with the router, harvest policy and step machine that run live, over traces;",
        "placement on the Earth segments is simulated. Mean over seeds ± half the 95 % confidence interval, ratios seed by seed. Setting:",
        f"`scavenger/simulate/published.py`, heartbeats and looks at Slurm every 10 s. Seeds {seeds[0]} to {seeds[-1]};",
        "`pairs`: engines of two GPUs that the run may have.",
        "",
        *told,
        "",
    ]
    goals = ["", "## Goals", "", *missed(found)] if set(COMPARED) <= set(policies) else []
    return "\n".join([*head, *rows(found, policies), *goals, ""])
