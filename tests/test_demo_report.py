"""The demo's report is one page that needs nothing else and escapes every text, whatever a node or a title is called."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from scavenger.demo import report
from scavenger.demo.metrics import DemoMetrics, GpuCounts, LostEngine, Moves, Now, StepMetrics

HOSTILE = "<script>alert('x')</script>&\"><b onclick=x>"
NOW = Now(0, 0, 0, 0, 1, 2, 300, 40, 5000)
MOVES = Moves(samples=10, trained=8, filtered=2, moved=3, most=2)
METRICS = DemoMetrics(
    NOW,
    (GpuCounts(100.0, 2, 0, 1, 1, 0), GpuCounts(103.0, 0, 2, 1, 1, 0)),
    (StepMetrics("train", 0, {"reward": 0.25}, 101.0), StepMetrics("train", 1, {"reward": 0.5}, 102.0)),
    (LostEngine(102.0, HOSTILE, 7, True, HOSTILE, 3, 300, 40),),
    MOVES,
)


def context(name: str) -> report.Context:
    return report.Context(name, f"{name}/ledger.sqlite3", 12.0, 2, 1.5, 30.0)


def test_every_text_is_escaped() -> None:
    text = report.html(METRICS, context(HOSTILE), HOSTILE, HOSTILE)
    assert "<script" not in text
    assert "<b " not in text
    assert text.count("&lt;script&gt;") >= 7  # title, heading, subtitle, backend, queries, node, reason
    assert "&amp;lt;" not in text  # and escaped once only
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(drawing)


def test_the_page_shows_each_plot_and_each_lost_engine() -> None:
    text = report.html(METRICS, context("local"), "a run", "on a laptop")
    assert not re.search(r"https?:|<script|@import|url\(", text)
    assert len(re.findall("<svg", text)) == 3
    assert "<tr><th>tokens salvaged</th><td>300, evaluations included</td></tr>" in text
    assert "<td>2</td>" in text  # seconds after the first observation
    assert "reserved (training job)" in text


def test_what_did_not_happen_is_said_in_words() -> None:
    text = report.html(DemoMetrics(NOW, (), (), (), MOVES), context("local"), "a run", "on a laptop")
    for words in ("No observations.", "No steps.", "No engine was lost."):
        assert f"<p>{words}</p>" in text
