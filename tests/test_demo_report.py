"""The demo's report is one page that needs nothing else and escapes every text, whatever a node or a title is called."""

from __future__ import annotations

import io
import os
import re
import xml.etree.ElementTree as ET

from scavenger import resources
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


#: A demo's last moment in November 2026, and its rewards in eighths, as its display drew them.
EIGHTHS = "22445454556666666777777777777767776677777777777777777778777"
REWARDS = [*(int(one) / 8 for one in EIGHTHS), 0.879]
LAST = DemoMetrics(
    Now(288, 288, 1627, 3, 4, 52, 11_047, 0, 113_943),
    (GpuCounts(299.0, 6, 3, 3, 4, 0),),
    tuple(StepMetrics("train", step, {"reward": one}, 5.0 * step) for step, one in enumerate(REWARDS)),
    (),
    Moves(samples=15_360, trained=15_360, filtered=0, moved=2865, most=3),
)


def test_the_demo_looks_as_its_picture_in_the_documentation() -> None:
    frame = report.display(LAST, elapsed_s=299.0, phase="training while others take GPUs back", steps=60)
    shown = io.StringIO()
    drawn = report.drawing(frame, shown)
    picture = resources.path("docs") / "demo.svg"
    if os.environ.get("SCAVENGER_PICTURES") == "write":
        picture.write_text(drawn, encoding="utf-8")
    assert drawn == picture.read_text(encoding="utf-8"), "SCAVENGER_PICTURES=write pytest " + __file__
    assert "52 · 11,047 tokens salvaged · 0 generated again" in shown.getvalue()
    assert "60 of 60" in shown.getvalue()
    ET.fromstring(drawn)
    assert not re.search(r"url\([^#]|<script|@import|href", drawn)
