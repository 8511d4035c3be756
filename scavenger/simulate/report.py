"""The simulator's report: one self-contained HTML page from plain series and figures. Pure: dataclasses in, HTML out.

Owns what the page shows and in which order. Knows nothing of policies, fleets and how anything was computed; the caller fills a
`SimulationReport`, and what is empty is left out of the page.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from scavenger.observe import plots

#: Colours by name, so that the same thing looks the same in every plot. Names that are not here take the next of `OTHER_COLOURS`.
COLOURS = {
    "reserved": "#5b6ee1",
    "other users": "#d9634c",
    "harvested": "#37a66b",
    "starting": "#a8d8bd",
    "idle": "#d8dce3",
    "window": "#5b6ee1",
    "toggle": "#8a8f98",
    "wait": "#d9634c",
    "train": "#37a66b",
    "publish": "#e0b13c",
}
OTHER_COLOURS = ("#7a4fb5", "#2f9fb0", "#b5714f", "#4f6fb5", "#9fb02f")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % confidence interval; `low == high` where there was one run only."""

    value: float
    low: float
    high: float

    @property
    def interval(self) -> str:
        return f"{plots.number(self.low)} - {plots.number(self.high)}" if self.high > self.low else ""


@dataclass(frozen=True, slots=True)
class Series:
    """GPUs by owner: each of `by_owner` is (owner, GPUs at each of `times_s`), which hold until the next time, the last until `end_s`."""

    name: str
    times_s: tuple[float, ...]
    by_owner: tuple[tuple[str, tuple[float, ...]], ...]
    end_s: float


@dataclass(frozen=True, slots=True)
class HourOfDay:
    hour: int
    engines: float


@dataclass(frozen=True, slots=True)
class PolicyMetrics:
    """One policy's results. `step_parts`: (what, mean seconds a step), in the order in which a step goes through them."""

    name: str
    tokens_per_s: Estimate
    step_parts: tuple[tuple[str, float], ...] = ()
    tokens_per_dollar: Estimate | None = None
    note: str = ""

    def seconds(self, part: str) -> float:
        return sum(value for name, value in self.step_parts if name == part)


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """The page. `facts`: (name, value, meaning). `prices`: what tokens per dollar assume; it stands under the plots."""

    title: str
    subtitle: str
    facts: tuple[tuple[str, str, str], ...] = ()
    owners: tuple[Series, ...] = ()
    hours: tuple[HourOfDay, ...] = ()
    policies: tuple[PolicyMetrics, ...] = ()
    prices: str = ""
    notes: tuple[str, ...] = ()


def html(report: SimulationReport) -> str:
    """The page. Nothing in it is fetched from elsewhere, and every text in it is escaped."""
    parts = list(dict.fromkeys(name for policy in report.policies for name, _ in policy.step_parts))
    return plots.render(
        "scavenger/simulate/report.html.j2",
        title=report.title,
        subtitle=report.subtitle,
        facts=report.facts,
        policies=report.policies,
        prices=report.prices,
        notes=report.notes,
        owners=[(series.name, owners_plot(series)) for series in report.owners],
        hours=_hours(report.hours),
        throughput=_estimates(
            [(policy.name, policy.tokens_per_s) for policy in report.policies], "tokens a second"
        ),
        steps=_steps(report.policies, parts) if parts else "",
        dollars=_estimates(
            [(p.name, p.tokens_per_dollar) for p in report.policies if p.tokens_per_dollar],
            "tokens per dollar",
        ),
        parts=parts,
    )


def owners_plot(series: Series, points: int = 600) -> str:
    """Stacked areas over hours (minutes for less than three hours), thinned to what a screen can show."""
    unit, name = (3600.0, "hours") if series.end_s >= 3 * 3600 else (60.0, "minutes")
    times, values = thinned(series.times_s, [value for _, value in series.by_owner], series.end_s, points)
    shades = colours([owner for owner, _ in series.by_owner])
    stack = [(owner, shade, line) for (owner, shade), line in zip(shades, values, strict=True)]
    return plots.stacked([time / unit for time in times], stack, name, "GPUs")


def thinned(
    times_s: Sequence[float], lines: Sequence[Sequence[float]], end_s: float, points: int
) -> tuple[list[float], list[list[float]]]:
    """At most `points` equal buckets, each with the mean over its time: areas stay what they are. The last time is `end_s`."""
    if not times_s:
        return [], [[] for _ in lines]
    if len(times_s) < points:
        return [*times_s, end_s], [[*line, line[-1]] for line in lines]
    width = (end_s - times_s[0]) / points
    edges = [times_s[0] + width * index for index in range(points)] + [end_s]
    means = [[0.0] * points for _ in lines]
    spans = itertools.pairwise([*times_s, end_s])
    for index, (start, stop) in enumerate(spans):
        at = start
        while at < stop:
            bucket = min(points - 1, int((at - edges[0]) / width))
            until = min(stop, edges[bucket + 1])
            if until <= at:  # `at` lies on an edge and rounding put it in the bucket before
                bucket, until = min(points - 1, bucket + 1), min(stop, edges[min(points, bucket + 2)])
            for mean, line in zip(means, lines, strict=True):
                mean[bucket] += line[index] * (until - at) / width
            at = until
    return edges, [[*mean, mean[-1]] for mean in means]


def colours(names: Sequence[str]) -> list[tuple[str, str]]:
    """(name, colour) for each name, the same name always alike."""
    others = itertools.cycle(OTHER_COLOURS)
    return [(name, COLOURS.get(name) or next(others)) for name in names]


def _hours(hours: Sequence[HourOfDay]) -> str:
    if not hours:
        return ""
    bars = [
        plots.Bar(f"{one.hour:02}-{(one.hour + 1) % 24:02}", (("engines", one.engines),)) for one in hours
    ]
    return plots.across(bars, [("engines", COLOURS["harvested"])], "engines at work on average")


def _estimates(found: Sequence[tuple[str, Estimate]], label: str) -> str:
    bars = [plots.Bar(name, ((label, one.value),), one.low, one.high) for name, one in found]
    return plots.across(bars, [(label, COLOURS["harvested"])], label) if bars else ""


def _steps(policies: Sequence[PolicyMetrics], parts: Sequence[str]) -> str:
    bars = [plots.Bar(policy.name, policy.step_parts) for policy in policies if policy.step_parts]
    return plots.across(bars, colours(parts), "seconds a step, on average")
