"""Policies side by side: means, confidence, factors seed by seed, dollars; hand-computed."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from scavenger.cli.tables import print_comparison, run_all
from scavenger.errors import ConfigError
from scavenger.simulate.comparison import (
    Prices,
    SimulationResult,
    by_policy,
    estimate,
    policy_metrics,
    report,
    span,
    speed_up,
    table,
    verdict,
)
from scavenger.simulate.report import Series, html

PRICES = Prices(reserved=10.0, harvested=2.0)
OWNERS = Series("", (0.0,), (("reserved", (2.0,)), ("harvested", (1.0,)), ("idle", (5.0,))), 60.0)


def run(
    policy: str, seed: int, tokens: int, harvested_gpu_s: float = 0.0, **more: object
) -> SimulationResult:
    parts = (("window", 20.0), ("train", 80.0))
    return SimulationResult(policy, seed, 2, 100.0, tokens, 3600.0, harvested_gpu_s, parts, **more)  # type: ignore[arg-type]


ALONE = (run("colocated", 0, 1000), run("colocated", 1, 3000))
OURS = (
    run("ours", 1, 6000, 7200.0, starts=4, wasted=1, preemptions=1, moves=6),
    run("ours", 0, 2200, 7200.0, owners=OWNERS),
)


def test_the_interval_is_student_s() -> None:
    # mean 2, standard deviation 1, n = 3: 4.303 / sqrt(3)
    found = estimate([1.0, 2.0, 3.0])
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2 - 2.4843, 2 + 2.4843), abs=1e-3)
    many = estimate([1.0, 3.0] * 50)
    assert many.high - many.value == pytest.approx(1.960 * 1.00504 / 10, abs=1e-3)
    alone = estimate([4.0])
    assert alone.low == alone.high == 4.0


def test_the_verdict_names_what_chance_may_explain() -> None:
    assert verdict([*ALONE, *OURS])[0] == "ours cannot be told from colocated by 2 seeds: use more (--seeds)"
    clear = [
        run(name, seed, 1000 * factor + seed)
        for name, factor in (("colocated", 1), ("ours", 2))
        for seed in (0, 1, 2)
    ]
    assert verdict(clear)[0] == "ours is the fastest here, beyond chance"
    assert "--from" in verdict(clear)[1]
    assert verdict([clear[0], clear[3]]) == ("one seed tells nothing of chance: use --seeds 3 or more",)
    assert verdict(ALONE) == ()


def test_how_much_was_played_is_said_with_what_was_too_short() -> None:
    assert span(ALONE, 2, 5.0) == ("each run took 2 steps, in 1.7 to 1.7 min",)
    notes = span(ALONE, 10, 100.0)
    assert "the trace ended before 10 steps" in notes[1]
    assert "cold start of 100 s" in notes[2]


def test_prices_say_where_they_are_from() -> None:
    assert "list prices of an H100" in Prices().summary()
    assert "as given" in PRICES.summary()


def test_figures_are_means_over_seeds() -> None:
    alone, ours = policy_metrics((*ALONE, *OURS), PRICES)
    assert (alone.tokens_per_s.value, ours.tokens_per_s.value) == (20.0, 41.0)
    assert alone.tokens_per_dollar is not None
    assert ours.tokens_per_dollar is not None
    # one reserved GPU-hour at $10, two harvested ones at $2
    assert alone.tokens_per_dollar.value == pytest.approx((100 + 300) / 2)
    assert ours.tokens_per_dollar.value == pytest.approx((2200 / 14 + 6000 / 14) / 2)
    assert alone.step_parts == (("window", 10.0), ("train", 40.0))
    assert alone.note == "no engine was harvested"
    assert ours.note == "2.0 engine starts, 25% in vain, 18.0 preemptions an hour, 3 samples moved"


def test_factors_are_taken_seed_by_seed() -> None:
    found = speed_up((*ALONE, *OURS), "ours", "colocated", "8 H100")
    # 2.2 with one seed, 2 with the other; the ratio of the means would be 2.05
    assert found.factor == pytest.approx(2.1)
    assert (found.alone_tokens_per_s, found.with_tokens_per_s, found.setting) == (20.0, 41.0, "8 H100")
    assert found.low < 2.1 < found.high
    with pytest.raises(ConfigError, match="polyrl was not played"):
        speed_up(ALONE, "polyrl", "colocated", "")


def test_policies_with_different_seeds_are_not_compared() -> None:
    with pytest.raises(ConfigError, match="different seeds"):
        by_policy((*ALONE, OURS[0]))


def test_the_table_and_the_page_have_them() -> None:
    columns, rows = table((*ALONE, *OURS), PRICES)
    assert columns[3] == "x colocated"
    assert [row[0] for row in rows] == ["colocated", "ours"]
    assert [(row[1], row[3], row[5]) for row in rows] == [("20", "1.00", "50"), ("41", "2.10 ± 1.27", "50")]
    page = report((*ALONE, *OURS), PRICES, "a run", notes=("trace-driven",))
    own, everything = page.owners
    assert (own.name, own.by_owner) == ("ours, the run's own", (("reserved", (2.0,)), ("harvested", (1.0,))))
    assert (everything.name, everything.by_owner) == ("ours, all", OWNERS.by_owner)
    text = html(page)
    assert "$10 a reserved and $2 a harvested GPU-hour" in text
    assert "trace-driven" in text


def test_one_seed_has_no_interval() -> None:
    _, rows = table(ALONE[:1], PRICES)
    assert rows[0][2] == "one seed"


def test_every_policy_is_played_with_every_seed_and_tells_how_far_it_is() -> None:
    asked = []

    def run_policy(policy: str, seed: int, progress: Callable[[float], None]) -> SimulationResult:
        asked.append((policy, seed))
        progress(0.5)
        return run(policy, seed, 1000)

    results = run_all(run_policy, ("colocated", "ours"), seeds=2)
    assert asked == [("colocated", 0), ("colocated", 1), ("ours", 0), ("ours", 1)]
    assert [(one.policy, one.seed) for one in results] == asked


def test_what_was_played_is_printed_and_written(tmp_path: Path) -> None:
    screen = Console(file=io.StringIO(), width=160, highlight=False)
    page = tmp_path / "page.html"
    print_comparison(screen, (*ALONE, *OURS), PRICES, "8 [reserved] H100", ("trace-driven",), page)
    assert isinstance(screen.file, io.StringIO)
    text = screen.file.getvalue()
    assert text.startswith("8 [reserved] H100")
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.split()}
    assert (rows["colocated"][1], rows["ours"][1]) == ("20", "41")
    assert "note: trace-driven" in text
    assert "note: ours: 2.0 engine starts, 25% in vain" in text
    assert f"wrote {page}" in text.replace("\n", "")
    assert "8 [reserved] H100" in page.read_text(encoding="utf-8")
