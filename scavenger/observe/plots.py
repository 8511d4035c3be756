"""Small SVG plots for the reports of demo and simulator: stacked areas, a line, bars. Pure: numbers in, markup out.

Owns the marks and the pages' style. Nothing in it is fetched: no scripts, no fonts from elsewhere. Knows nothing of what is plotted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 34
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:900px;margin:2rem auto;padding:0 1rem;color:#1d2330}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse}td,th{padding:.2rem .9rem .2rem 0;text-align:left}
svg{width:100%;background:#fafbfc;border:1px solid #e3e6ea}svg text{font-size:11px;fill:#5a6372}.grid{stroke:#e3e6ea}
.curve{fill:none;stroke:#5b6ee1;stroke-width:1.6}circle{fill:#5b6ee1}.bar{fill:#37a66b}.spread{stroke:#1d2330;stroke-width:1.2}
.legend span{margin-right:1rem}.legend i{display:inline-block;width:.8rem;height:.8rem;margin-right:.3rem}
pre{background:#f3f4f6;padding:.8rem;white-space:pre-wrap;overflow-wrap:anywhere}
"""


def _x(value: float, low: float, high: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / max(high - low, 1e-9)


def _y(value: float, high: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / max(high, 1e-9)


def _frame(body: str, low: float, high: float, top: float, x_label: str, y_label: str) -> str:
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)} over {escape(x_label)}">'
    ]
    for tick in nice_ticks(top):
        y = _y(tick, top)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick_label(tick)}</text>')
    for tick in nice_ticks(high, 8):
        if tick >= low:
            parts.append(
                f'<text x="{_x(tick, low, high):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick_label(tick)}</text>'
            )
    parts.append(body)
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text></svg>'
    )
    return "".join(parts)


def stacked(
    times: Sequence[float], series: Sequence[tuple[str, str, Sequence[float]]], x_label: str, y_label: str
) -> str:
    """Areas on top of one another; each series is (label, colour, values), as long as `times`. Values hold until the next time."""
    if len(times) < 2:
        return "<p>No observations.</p>"
    totals = [sum(values[i] for _, _, values in series) for i in range(len(times))]
    top = max(totals) or 1
    base = [0.0] * len(times)
    areas, legend = [], []
    for label, colour, values in series:
        upper = [b + v for b, v in zip(base, values, strict=True)]
        points = _steps(times, upper, top) + _steps(times, base, top)[::-1]
        areas.append(f'<polygon fill="{colour}" points="{" ".join(points)}"/>')
        legend.append(f'<span><i style="background:{colour}"></i>{escape(label)}</span>')
        base = upper
    return (
        _frame("".join(areas), times[0], times[-1], top, x_label, y_label)
        + f'<p class="legend">{"".join(legend)}</p>'
    )


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
        return "<p>No steps.</p>"
    high = top or max(ys) or 1
    points = " ".join(f"{_x(x, xs[0], xs[-1]):.1f},{_y(y, high):.1f}" for x, y in zip(xs, ys, strict=True))
    dots = "".join(
        f'<circle r="2" cx="{_x(x, xs[0], xs[-1]):.1f}" cy="{_y(y, high):.1f}"/>'
        for x, y in zip(xs, ys, strict=True)
    )
    return _frame(f'<polyline class="curve" points="{points}"/>{dots}', xs[0], xs[-1], high, x_label, y_label)


def bars(values: Sequence[float], x_label: str, y_label: str) -> str:
    if not values:
        return "<p>No engine was lost.</p>"
    top = max(values) or 1
    width = (WIDTH - LEFT - RIGHT) / len(values)
    body = "".join(
        f'<rect class="bar" x="{LEFT + i * width + 1:.1f}" width="{max(width - 2, 1):.1f}" '
        f'y="{_y(v, top):.1f}" height="{_y(0, top) - _y(v, top):.1f}"><title>{v:,.0f}</title></rect>'
        for i, v in enumerate(values)
    )
    return _frame(body, 1, max(len(values), 2), top, x_label, y_label)


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


def across(bars: Sequence[Bar], colours: Sequence[tuple[str, str]], x_label: str) -> str:
    """Horizontal bars, one a row, with their total written behind. `colours`: (part, colour) of every part, in the legend's order."""
    if not bars:
        return "<p>Nothing to compare.</p>"
    row, left, right = 26, 190, 96
    height = TOP + row * len(bars) + BOTTOM
    top = max(max(bar.total, bar.high) for bar in bars) or 1.0
    scale = (WIDTH - left - right) / top
    shade = dict(colours)
    body = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(x_label)}">']
    for tick in nice_ticks(top):
        x = left + tick * scale
        body.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        body.append(
            f'<text x="{x:.1f}" y="{height - BOTTOM + 14}" text-anchor="middle">{tick_label(tick)}</text>'
        )
    for index, bar in enumerate(bars):
        body.append(_row(bar, TOP + index * row, left, scale, shade))
    body.append(f'<text x="{WIDTH / 2}" y="{height - 4}" text-anchor="middle">{escape(x_label)}</text></svg>')
    if len(colours) < 2:
        return "".join(body)
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{escape(part)}</span>' for part, colour in colours
    )
    return "".join(body) + f'<p class="legend">{legend}</p>'


def _row(bar: Bar, y: float, left: float, scale: float, shade: dict[str, str]) -> str:
    marks = [f'<text x="{left - 8}" y="{y + 15:.1f}" text-anchor="end">{escape(bar.label)}</text>']
    x = float(left)
    for part, value in bar.parts:
        title = f"<title>{escape(bar.label)}, {escape(part)}: {number(value)}</title>"
        marks.append(
            f'<rect fill="{shade[part]}" x="{x:.1f}" y="{y + 3:.1f}" width="{value * scale:.1f}" height="18">{title}</rect>'
        )
        x += value * scale
    if bar.high > bar.low:
        ends = (left + bar.low * scale, left + bar.high * scale)
        marks.append(
            f'<line class="spread" x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{y + 12:.1f}" y2="{y + 12:.1f}"/>'
        )
        marks += [
            f'<line class="spread" x1="{end:.1f}" x2="{end:.1f}" y1="{y + 8:.1f}" y2="{y + 16:.1f}"/>'
            for end in ends
        ]
        x = max(x, ends[1])
    marks.append(f'<text x="{x + 6:.1f}" y="{y + 15:.1f}">{escape(bar.note or number(bar.total))}</text>')
    return "".join(marks)


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
