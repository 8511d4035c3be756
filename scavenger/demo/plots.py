"""Small SVG plots for the report: stacked areas, a line, bars. Pure: numbers in, markup out. No scripts, no fonts from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 860, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 34


def _x(value: float, low: float, high: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / max(high - low, 1e-9)


def _y(value: float, high: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / max(high, 1e-9)


def _ticks(high: float, count: int = 4) -> list[float]:
    return [high * i / count for i in range(count + 1)]


def _frame(body: str, low: float, high: float, top: float, x_label: str, y_label: str) -> str:
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)} over {escape(x_label)}">']
    for tick in _ticks(top):
        y = _y(tick, top)
        label = f"{tick:.2f}" if top <= 2 else f"{tick:,.0f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for i in range(6):
        value = low + (high - low) * i / 5
        parts.append(f'<text x="{_x(value, low, high):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:,.0f}</text>')
    parts.append(body)
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text></svg>')
    return "".join(parts)


def stacked(times: Sequence[float], series: Sequence[tuple[str, str, Sequence[float]]], x_label: str, y_label: str) -> str:
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
    return _frame("".join(areas), times[0], times[-1], top, x_label, y_label) + f'<p class="legend">{"".join(legend)}</p>'


def _steps(times: Sequence[float], values: Sequence[float], top: float) -> list[str]:
    low, high = times[0], times[-1]
    points = []
    for i, value in enumerate(values):
        points.append(f"{_x(times[i], low, high):.1f},{_y(value, top):.1f}")
        if i + 1 < len(times):
            points.append(f"{_x(times[i + 1], low, high):.1f},{_y(value, top):.1f}")
    return points


def line(xs: Sequence[float], ys: Sequence[float], x_label: str, y_label: str, top: float | None = None) -> str:
    if len(xs) < 2:
        return "<p>No steps.</p>"
    high = top or max(ys) or 1
    points = " ".join(f"{_x(x, xs[0], xs[-1]):.1f},{_y(y, high):.1f}" for x, y in zip(xs, ys, strict=True))
    dots = "".join(f'<circle r="2" cx="{_x(x, xs[0], xs[-1]):.1f}" cy="{_y(y, high):.1f}"/>' for x, y in zip(xs, ys, strict=True))
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
