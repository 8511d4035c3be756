"""The report is one page that needs nothing else, shows what it was given to scale, and leaves out what it was not given."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scavenger.observe import plots
from scavenger.simulate.report import (
    Estimate,
    HourOfDay,
    PolicyMetrics,
    Series,
    SimulationReport,
    colours,
    html,
    owners_plot,
    thinned,
)

PARTS = (("window", 60.0), ("toggle", 5.0), ("wait", 15.0), ("train", 120.0))
OWNERS = Series(
    "ours",
    (0.0, 1800.0),
    (("other users", (6.0, 2.0)), ("harvested", (0.0, 4.0)), ("idle", (2.0, 2.0))),
    7200.0,
)
FULL = SimulationReport(
    title="a run",
    subtitle="Qwen3-8B",
    facts=(("idle", "3 GPU-hours", "of 8"),),
    owners=(OWNERS,),
    hours=(HourOfDay(23, 3.5),),
    policies=(
        PolicyMetrics(
            "colocated", Estimate(10_000, 10_000, 10_000), PARTS, Estimate(400_000, 400_000, 400_000)
        ),
        PolicyMetrics("ours", Estimate(20_000, 19_000, 21_000), PARTS[:1], None, "two seeds"),
    ),
    prices="at $10.47 a reserved GPU-hour",
    notes=("trace-driven, simulated placement",),
)
HEADINGS = (
    "Throughput by policy",
    "Where a step's time goes",
    "Tokens per dollar",
    "Figures",
    "GPUs by owner over time: ours",
    "Engines at work, by hour of the day",
    "What to know",
)


class Page(HTMLParser):
    """Open tags, the text under headings, and every attribute that could fetch something."""

    VOID = {"meta", "!doctype"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.fetched += [
            f"{tag} {name}"
            for name, _ in attrs
            if name in ("src", "href", "srcset", "data", "xlink:href") or name.startswith("on")
        ]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def drawings(text: str) -> list[ET.Element]:
    return [ET.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def test_the_page_needs_nothing_from_elsewhere_and_is_well_formed() -> None:
    text = html(FULL)
    page = Page(text)
    assert page.open == []
    assert page.fetched == []
    assert not re.search(r"https?:|<script|@import|url\(", text)
    assert len(drawings(text)) == 5  # each is XML, or this raises
    assert page.headings == list(HEADINGS)


def test_what_is_not_given_is_left_out() -> None:
    assert Page(html(SimulationReport("nothing", "yet"))).headings == []
    no_parts = SimulationReport("t", "s", policies=(PolicyMetrics("ours", Estimate(1.0, 1.0, 1.0)),))
    assert Page(html(no_parts)).headings == ["Throughput by policy", "Figures"]


def test_every_text_is_escaped() -> None:
    evil = "<b onclick=x>&"
    report = SimulationReport(
        evil,
        evil,
        ((evil, evil, evil),),
        (Series(evil, (0.0, 9.0), ((evil, (1.0, 1.0)),), 10.0),),
        policies=(
            PolicyMetrics(evil, Estimate(1.0, 0.5, 2.0), ((evil, 3.0),), Estimate(1.0, 0.5, 2.0), evil),
        ),
        prices=evil,
        notes=(evil,),
    )
    text = html(report)
    assert "<b " not in text
    assert Page(text).fetched == []
    assert drawings(text)


def test_bars_are_to_scale_and_bounds_stand_where_they_belong() -> None:
    bars = [plots.Bar("a", (("x", 30.0), ("y", 10.0))), plots.Bar("b", (("x", 20.0),), 15.0, 25.0)]
    (drawn,) = drawings(plots.across(bars, [("x", "red"), ("y", "blue")], "s"))
    rects = [
        (float(one.attrib["x"]), float(one.attrib["width"]), one.attrib["fill"]) for one in drawn.iter("rect")
    ]
    (x1, w1, f1), (x2, w2, f2), (x3, w3, _) = rects
    assert (f1, f2) == ("red", "blue")
    assert x2 == pytest.approx(x1 + w1, abs=0.2)
    assert w1 / w2 == pytest.approx(3, rel=0.01)
    assert w1 / w3 == pytest.approx(1.5, rel=0.01)
    spread = [one for one in drawn.iter("line") if one.attrib["class"] == "spread"]
    whole = next(one for one in spread if one.attrib["x1"] != one.attrib["x2"])
    assert (float(whole.attrib["x1"]) - x3) / w3 == pytest.approx(15 / 20, rel=0.01)
    assert (float(whole.attrib["x2"]) - x3) / w3 == pytest.approx(25 / 20, rel=0.01)


def test_a_policy_without_bounds_has_none_drawn() -> None:
    (drawn,) = drawings(plots.across([plots.Bar("a", (("x", 3.0),), 3.0, 3.0)], [("x", "red")], "s"))
    assert not [one for one in drawn.iter("line") if one.attrib["class"] == "spread"]


def test_the_table_has_every_figure() -> None:
    text = html(FULL)
    cells = [re.sub(r"<.*?>", "", cell) for cell in re.findall(r"<td.*?</td>", text, re.DOTALL)]
    row = cells.index("ours")
    assert cells[row : row + 8] == ["ours", "20,000", "19,000 - 21,000", "", "60", "0", "0", "0"]
    assert "<li>ours: two seeds</li>" in text


def test_the_same_owner_has_the_same_colour_whatever_stands_beside_it() -> None:
    assert (
        dict(colours(["idle", "other users"]))["other users"]
        == dict(colours(["other users", "new"]))["other users"]
    )
    first, second = colours(["unheard", "of"])
    assert first[1] != second[1]


def test_hours_are_the_unit_of_long_series_and_minutes_of_short_ones() -> None:
    assert ">minutes</text>" in owners_plot(OWNERS)
    assert ">hours</text>" in owners_plot(Series("", (0.0,), (("idle", (1.0,)),), 86_400.0))


@given(
    st.lists(st.tuples(st.floats(0.01, 50.0), st.integers(0, 9)), min_size=1, max_size=60),
    st.floats(0, 100),
    st.integers(1, 12),
)
def test_thinning_keeps_every_area(steps: list[tuple[float, int]], start: float, points: int) -> None:
    edges = [start]
    for length, _ in steps:
        edges.append(edges[-1] + length)
    values = [float(value) for _, value in steps]
    times, (kept,) = thinned(edges[:-1], [values], edges[-1], points)
    assert times[0] == start
    assert times[-1] == edges[-1]
    assert len(kept) == len(times) <= max(points, 2) + 1
    area = sum(value * length for (length, _), value in zip(steps, values, strict=True))
    drawn = sum(value * (stop - begin) for value, (begin, stop) in zip(kept, pairwise(times), strict=False))
    assert drawn == pytest.approx(area, rel=1e-6, abs=1e-6)
    assert max(kept) <= max(values) + 1e-9


@pytest.mark.parametrize(
    ("top", "ticks"),
    [
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (856, [0, 200, 400, 600, 800]),
        (72, [0, 20, 40, 60]),
        (0.05, [0, 0.01, 0.02, 0.03, 0.04, 0.05]),
    ],
)
def test_ticks_are_round_numbers(top: float, ticks: list[float]) -> None:
    assert plots.nice_ticks(top) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("value", "text"),
    [(12345.6, "12,346"), (99.44, "99.4"), (9.5, "9.50"), (4, "4"), (0.25, "0.25"), (0.0, "0")],
)
def test_numbers_have_the_digits_that_count(value: float, text: str) -> None:
    assert plots.number(value) == text
