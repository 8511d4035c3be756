"""The reports' pages and their small SVG plots: stacked areas, a line, bars. Pure: numbers in, markup out.

Owns the rendering of the Jinja2 templates and the positions of a plot's marks; `plots.html.j2` has the marks, `page.html.j2` the page
around a report. Every function here that draws returns markup that templates do not escape again; any other value they escape. Knows
nothing of what is plotted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jinja2

from scavenger import resources

WIDTH, HEIGHT = 860, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 34


@dataclass(frozen=True, slots=True)
class Axes:
    """Where a plot lies in its picture, in SVG units. Ticks are (position, label)."""

    x_label: str
    y_label: str
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...] = ()
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP

    @property
    def bottom(self) -> int:
        return self.height - BOTTOM


def _x(value: float, low: float, high: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / max(high - low, 1e-9)


def _y(value: float, high: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / max(high, 1e-9)


def _axes(low: float, high: float, top: float, x_label: str, y_label: str) -> Axes:
    x_ticks = tuple((_x(tick, low, high), tick_label(tick)) for tick in nice_ticks(high, 8) if tick >= low)
    return Axes(
        x_label, y_label, x_ticks, tuple((_y(tick, top), tick_label(tick)) for tick in nice_ticks(top))
    )


def stacked(
    times: Sequence[float], series: Sequence[tuple[str, str, Sequence[float]]], x_label: str, y_label: str
) -> str:
    """Areas on top of one another; each series is (label, colour, values), as long as `times`. Values hold until the next time."""
    if len(times) < 2:
        return _draw("empty", "No observations.")
    totals = [sum(values[i] for _, _, values in series) for i in range(len(times))]
    top = max(totals) or 1
    base = [0.0] * len(times)
    areas = []
    for _, colour, values in series:
        upper = [b + v for b, v in zip(base, values, strict=True)]
        points = _steps(times, upper, top) + _steps(times, base, top)[::-1]
        areas.append((colour, " ".join(points)))
        base = upper
    legend = [(label, colour) for label, colour, _ in series]
    return _draw("stacked", _axes(times[0], times[-1], top, x_label, y_label), areas, legend)


def _steps(times: Sequence[float], values: Sequence[float], top: float) -> list[str]:
    low, high = times[0], times[-1]
    points = []
    for i, value in enumerate(values):
        points.append(f"{_x(times[i], low, high):.1f},{_y(value, top):.1f}")
        if i + 1 < len(times):
            points.append(f"{_x(times[i + 1], low, high):.1f},{_y(value, top):.1f}")
    return points


def line(
    xs: Sequence[float], ys: Sequence[float], x_label: str, y_label: str, top: float | None = None
) -> str:
    if len(xs) < 2:
        return _draw("empty", "No steps.")
    high = top or max(ys) or 1
    points = [(_x(x, xs[0], xs[-1]), _y(y, high)) for x, y in zip(xs, ys, strict=True)]
    return _draw("line", _axes(xs[0], xs[-1], high, x_label, y_label), points)


def bars(values: Sequence[float], x_label: str, y_label: str) -> str:
    if not values:
        return _draw("empty", "No engine was lost.")
    top = max(values) or 1
    width = (WIDTH - LEFT - RIGHT) / len(values)
    marks = [
        (LEFT + i * width + 1, max(width - 2, 1), _y(v, top), _y(0, top) - _y(v, top), f"{v:,.0f}")
        for i, v in enumerate(values)
    ]
    return _draw("bars", _axes(1, max(len(values), 2), top, x_label, y_label), marks)


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of `across`: parts laid end to end, as (name, value); `low` and `high` bound their sum (equal: no bounds are drawn)."""

    label: str
    parts: tuple[tuple[str, float], ...]
    low: float = 0.0
    high: float = 0.0
    note: str = ""

    @property
    def total(self) -> float:
        return sum(value for _, value in self.parts)


@dataclass(frozen=True, slots=True)
class _Row:
    """A bar's marks. `parts`: (colour, x, width, title); `bounds`: the ends of the interval; `end`: where the note begins."""

    label: str
    y: float
    parts: tuple[tuple[str, float, float, str], ...]
    bounds: tuple[float, float] | None
    end: float
    note: str


def across(bars: Sequence[Bar], colours: Sequence[tuple[str, str]], x_label: str) -> str:
    """Horizontal bars, one a row, with their total written behind. `colours`: (part, colour) of every part, in the legend's order."""
    if not bars:
        return _draw("empty", "Nothing to compare.")
    row, left, right = 26, 190, 96
    top = max(max(bar.total, bar.high) for bar in bars) or 1.0
    scale = (WIDTH - left - right) / top
    ticks = tuple((left + tick * scale, tick_label(tick)) for tick in nice_ticks(top))
    axes = Axes(x_label, "", ticks, height=TOP + row * len(bars) + BOTTOM, left=left, right=WIDTH - right)
    shade = dict(colours)
    rows = [_row(bar, TOP + index * row, left, scale, shade) for index, bar in enumerate(bars)]
    return _draw("across", axes, rows, colours)


def _row(bar: Bar, y: float, left: float, scale: float, shade: dict[str, str]) -> _Row:
    parts, x = [], float(left)
    for part, value in bar.parts:
        parts.append((shade[part], x, value * scale, f"{bar.label}, {part}: {number(value)}"))
        x += value * scale
    bounds = (left + bar.low * scale, left + bar.high * scale) if bar.high > bar.low else None
    end = max(x, bounds[1]) if bounds else x
    return _Row(bar.label, y, tuple(parts), bounds, end, bar.note or number(bar.total))


def nice_ticks(top: float, most: int = 6) -> list[float]:
    """From 0 to at most `top` in steps of 1, 2 or 5 times a power of ten."""
    rough = max(top, 1e-9) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [step * index for index in range(int(top / step + 1e-9) + 1)]


def tick_label(tick: float) -> str:
    """As short as it can be: ticks are round already."""
    return f"{tick:,.0f}" if tick == int(tick) else f"{tick:.4g}"


def number(value: float) -> str:
    """Three digits that count, and no more than four decimals."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.4g}"


#: A template is named as the repository names its file.
TEMPLATES = jinja2.Environment(
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    loader=jinja2.FunctionLoader(resources.text),
)
TEMPLATES.filters["px"] = "{:.1f}".format
TEMPLATES.filters["number"] = number


def render(template: str, **values: object) -> str:
    """The text of `template` with `values`. One that extends `page.html.j2` needs `title` and `subtitle` too."""
    return TEMPLATES.get_template(template).render(values)


def _draw(mark: str, *arguments: object) -> str:
    """What the macro `mark` of `plots.html.j2` makes of its arguments: markup, which a page does not escape again."""
    drawn: str = getattr(TEMPLATES.get_template("scavenger/observe/plots.html.j2").module, mark)(*arguments)
    return drawn
