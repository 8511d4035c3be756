"""Where marks of a chart lie, in the units of an SVG view box. Pure; knows no HTML.

Boundary: geometry without rows of a ledger.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

WIDTH, HEIGHT = 1000.0, 150.0
#: Left of the axis are its numbers, of ten characters at most ("-1.234e-05"), and left of lanes their names, of 28: with the page's
#: letters of 12 units each takes 8 at most.
LEFT, RIGHT, TOP, BOTTOM, NAMES = 88.0, 12.0, 10.0, 24.0, 236.0
MOST_NAME = 28


@dataclasses.dataclass(frozen=True)
class Label:
    x: float
    y: float
    text: str
    anchor: str = "start"


@dataclasses.dataclass(frozen=True)
class Bar:
    x: float
    y: float
    width: float
    height: float
    title: str
    tone: int = 0
    href: str = ""


@dataclasses.dataclass(frozen=True)
class Chart:
    """`raw` and `smooth`: polylines as "x,y x,y"; `marks`: x of vertical lines with their titles; `bars`: of a histogram or Gantt.

    `lines`: polylines of several things with their tones.
    """

    label: str
    height: float = HEIGHT
    raw: str = ""
    smooth: str = ""
    dots: tuple[tuple[float, float], ...] = ()
    marks: tuple[tuple[float, str], ...] = ()
    bars: tuple[Bar, ...] = ()
    lines: tuple[tuple[str, int], ...] = ()
    labels: tuple[Label, ...] = ()
    width: float = WIDTH
    left: float = LEFT
    right: float = WIDTH - RIGHT
    base: float = HEIGHT - BOTTOM


def number(value: object) -> str:
    """Short, for a reader; "-" for none."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e6 else f"{value:.3e}"
    return str(value)


def smoothed(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Exponential moving average, its start corrected as in Adam (Kingma and Ba 2015, section 3)."""
    out, mean, rest = [], 0.0, 1.0
    for value in values:
        mean, rest = weight * mean + (1 - weight) * value, rest * weight
        out.append(mean / (1 - rest))
    return out


def _scale(value: float, low: float, high: float, start: float, end: float) -> float:
    share = (value - low) / (high - low) if high > low else 0.5
    return round(start + (end - start) * min(1.0, max(0.0, share)), 1)


def span(seconds: float) -> str:
    """A length of time."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def series(
    label: str,
    points: Sequence[tuple[float, float]],
    marks: Sequence[tuple[float, str]],
    begin: float,
    end: float,
    ends: tuple[str, str] | None = None,
) -> Chart:
    """Values on an axis of [`begin`, `end`]; what is not finite is left out. `ends`: what stands below the axis; None: it is time, in s."""
    kept = [(at, value) for at, value in points if math.isfinite(at) and math.isfinite(value)]
    values = [value for _, value in kept]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    xs = [_scale(at, begin, end, LEFT, WIDTH - RIGHT) for at, _ in kept]

    def ys(of: Sequence[float]) -> list[float]:
        return [_scale(value, low, high, HEIGHT - BOTTOM, TOP) for value in of]

    def line(of: Sequence[float]) -> str:
        return " ".join(f"{x},{y}" for x, y in zip(xs, ys(of), strict=True))

    return Chart(
        label,
        raw=line(values),
        smooth=line(smoothed(values)),
        dots=tuple(zip(xs, ys(values), strict=True)) if len(values) <= 60 else (),
        marks=tuple(
            (_scale(at, begin, end, LEFT, WIDTH - RIGHT), title) for at, title in marks if begin <= at <= end
        ),
        labels=(
            Label(LEFT - 6, TOP + 8 if high > low else ys([high])[0] + 4, number(high), "end"),
            *((Label(LEFT - 6, HEIGHT - BOTTOM, number(low), "end"),) if high > low else ()),
            Label(LEFT, HEIGHT - 6, ends[0] if ends else "0 s"),
            Label(WIDTH - RIGHT, HEIGHT - 6, ends[1] if ends else span(end - begin), "end"),
        ),
    )


def edges(low: float, high: float, most: int = 20) -> list[float]:
    """Edges of equal bins from `low` to `high`, one more than bins: each holds its lower edge, and the last one also `high`. None where a
    double holds no such edges."""
    width = (high - low) / most or 1.0
    last = math.nextafter(high, math.inf)
    if not (math.isfinite(width) and math.isfinite(last)):
        return []
    found = [low + width * i for i in range(most if high > low else 1)] + [last]
    return found if all(a < b for a, b in itertools.pairwise(found)) else [low, last]


def bins(values: Sequence[float]) -> list[tuple[float, float, int]]:
    """(low, high, how many) of equal bins over finite values."""
    kept = [value for value in values if math.isfinite(value)]
    between = itertools.pairwise(edges(min(kept), max(kept)) if kept else [])
    return [(a, b, sum(a <= value < b for value in kept)) for a, b in between]


def histogram(label: str, found: Sequence[tuple[float, float, int]], hrefs: Sequence[str]) -> Chart:
    """Bars of `bins`, each a link."""
    top = max((n for *_, n in found), default=1) or 1
    width = (WIDTH - LEFT - RIGHT) / max(1, len(found))
    floor = HEIGHT - BOTTOM
    bars = []
    for i, ((low, high, n), href) in enumerate(zip(found, hrefs, strict=True)):
        height = round((floor - TOP) * n / top, 1)
        title = f"{number(low)} to {number(high)}: {n:,} samples"
        bars.append(
            Bar(round(LEFT + i * width + 1, 1), floor - height, round(width - 2, 1), height, title, 0, href)
        )
    ends = (number(found[0][0]), number(found[-1][1])) if found else ("", "")
    return Chart(
        label,
        bars=tuple(bars),
        labels=(
            Label(LEFT - 6, TOP + 8, number(top), "end"),
            Label(LEFT, HEIGHT - 6, ends[0]),
            Label(WIDTH - RIGHT, HEIGHT - 6, ends[1], "end"),
        ),
    )


def rows(label: str, spans: Sequence[tuple[str, float, float, str, int]]) -> Chart:
    """A Gantt chart: (name, begin, end, title, tone) a row; times in seconds."""
    begin = min((a for _, a, *_ in spans), default=0.0)
    end = max((b for _, _, b, *_ in spans), default=1.0)
    left, pitch = NAMES, 26.0
    height = TOP + pitch * max(1, len(spans)) + BOTTOM
    bars, labels = [], []
    for i, (name, a, b, title, tone) in enumerate(spans):
        y = TOP + i * pitch
        x = _scale(a, begin, end, left, WIDTH - RIGHT) if end > begin else left
        x2 = _scale(b, begin, end, left, WIDTH - RIGHT) if end > begin else WIDTH - RIGHT
        bars.append(Bar(x, y + 3, round(max(2.0, x2 - x), 1), pitch - 8, title, tone % 6))
        labels.append(Label(left - 8, y + 16, name[:MOST_NAME], "end"))
    labels += [Label(left, height - 6, "0 s"), Label(WIDTH - RIGHT, height - 6, span(end - begin), "end")]
    return Chart(label, height, bars=tuple(bars), labels=tuple(labels), left=left, base=height - BOTTOM)


def compared(label: str, found: Sequence[tuple[str, Sequence[tuple[float, float]]]], unit: str) -> Chart:
    """Smoothed values of several things over one axis, each in its tone, with its name; what is not finite is left out."""
    kept = [
        (name, [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]) for name, points in found
    ]
    xs = [x for _, points in kept for x, _ in points]
    begin, end = (min(xs), max(xs)) if xs else (0.0, 1.0)
    curves = [(name, [x for x, _ in points], smoothed([y for _, y in points])) for name, points in kept]
    ys = [y for *_, values in curves for y in values]
    low, high = (min(ys), max(ys)) if ys else (0.0, 1.0)
    floor, width = HEIGHT - BOTTOM, (WIDTH - LEFT - RIGHT) / max(1, len(curves))
    lines, bars, labels = [], [], []
    for i, (name, across, values) in enumerate(curves):
        at = [
            f"{_scale(x, begin, end, LEFT, WIDTH - RIGHT)},{_scale(y, low, high, floor, TOP)}"
            for x, y in zip(across, values, strict=True)
        ]
        lines.append((" ".join(at), i % 6))
        bars.append(Bar(round(LEFT + i * width, 1), HEIGHT + 6, 14.0, 8.0, name, i % 6))
        labels.append(Label(round(LEFT + i * width + 20, 1), HEIGHT + 14, name[: max(4, int(width / 8))]))
    labels += [
        Label(LEFT - 6, TOP + 8, number(high), "end"),
        Label(LEFT - 6, floor, number(low), "end"),
        Label(LEFT, HEIGHT - 6, f"{unit} {number(begin)}"),
        Label(WIDTH - RIGHT, HEIGHT - 6, number(end), "end"),
    ]
    return Chart(label, HEIGHT + 20, lines=tuple(lines), bars=tuple(bars), labels=tuple(labels))


def lanes(
    label: str, found: Sequence[tuple[str, Sequence[tuple[float, float, str, int]]]], begin: float, end: float
) -> Chart:
    """A row for each name with its (begin, end, title, tone), cut to [`begin`, `end`]; times in seconds."""
    left, pitch = NAMES, 26.0
    height = TOP + pitch * max(1, len(found)) + BOTTOM
    bars, labels = [], []
    for i, (name, spells) in enumerate(found):
        y = TOP + i * pitch
        labels.append(Label(left - 8, y + 16, name[:MOST_NAME], "end"))
        for a, b, title, tone in spells:
            x, x2 = (_scale(at, begin, end, left, WIDTH - RIGHT) if end > begin else left for at in (a, b))
            bars.append(Bar(x, y + 3, round(max(1.0, x2 - x), 1), pitch - 8, title, tone % 6))
    labels += [Label(left, height - 6, "0 s"), Label(WIDTH - RIGHT, height - 6, span(end - begin), "end")]
    return Chart(label, height, bars=tuple(bars), labels=tuple(labels), left=left, base=height - BOTTOM)
