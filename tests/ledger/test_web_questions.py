"""The statements of `scavenger web` on both databases: what a reader copies is what the page was made of."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from scavenger.errors import LedgerError
from scavenger.ledger import records as r
from scavenger.ledger import store
from scavenger.ledger.read.reader import reading
from scavenger.web import charts, pages, questions, steps
from scavenger.web.panels import Page, Panel, ask
from scavenger.web.questions import filled
from tests.ledger.examples import T0, consumed, everything, moved_group, preempted, prologue, written


class _NoContents(pages.Contents):
    def read(
        self, connection: sa.Connection, sample_ids: Sequence[int], tokenizer: str, skip: Sequence[int] = ()
    ) -> list[pages.Read]:
        return [pages.Read("", f"text of {one}") for one in sample_ids]


def test_each_page_is_the_same_on_both_databases_and_its_sql_runs_as_copied(url: str) -> None:
    written(url, everything())
    engine, contents = store.open_readonly(url), _NoContents()
    try:
        with reading(engine) as c:
            shown = {
                "overview": pages.overview(c),
                "run": pages.run(c, 1),
                "step": steps.step(c, 1, 1, "best", 0),
                "group": pages.group(c, contents, 10),
                "sample": pages.sample(c, contents, 11),
                "episode": pages.episode(c, contents, 1),
                "compare": pages.compare(c, [1]),
                "changed": steps.changed(c, 1, 2, 1),
                "harm": pages.harm(c),
                "decisions": pages.decisions(c),
                "decision": pages.decision(c, 1),
            }
            for name, page in shown.items():
                assert all(panel.sql or panel.search for panel in page.panels), (
                    f"a panel of {name} has no SQL"
                )
                for panel in page.panels:
                    for statement in filter(str.strip, panel.sql.split(";\n\n")):
                        assert ":" not in "".join(
                            line for line in statement.splitlines() if not line.startswith("--")
                        ), "no parameter is left"
                        ask(c, statement)
                assert any(panel.body or panel.texts for panel in page.panels), name
            assert ("1", "/runs/1") in {
                (cell.text, cell.href) for cell in shown["overview"].panels[0].body[0]
            }
            moved = shown["sample"].panels[1].charts[0]
            assert [bar.tone for bar in moved.bars] == list(range(len(moved.bars))), "a colour for each epoch"
            assert len(moved.bars) >= 2, "the sample moved"
    finally:
        engine.dispose()


def statements(page: Page) -> list[str]:
    parts = [one.strip().rstrip(";\n") for panel in page.panels for one in panel.sql.split(";\n\n")]
    return [f"{one};" for one in parts if one]


def test_what_a_reader_copies_runs_unchanged_in_sqlite3_and_psql(url: str, tmp_path: Path) -> None:
    """The programs themselves: they expand variables, and take a statement for what ends it."""
    written(url, everything())
    engine, contents = store.open_readonly(url), _NoContents()
    try:
        with reading(engine) as c:
            shown = [
                pages.overview(c),
                pages.run(c, 1),
                pages.compare(c, [1]),
                steps.step(c, 1, 1, "best", 0),
                steps.changed(c, 1, 2, 1),
                pages.group(c, contents, 10),
                pages.sample(c, contents, 11),
                pages.episode(c, contents, 1),
                pages.harm(c),
                pages.decisions(c),
                pages.decision(c, 1),
            ]
            asked = list(dict.fromkeys(one for page in shown for one in statements(page)))
            rows = [len(ask(c, one)) for one in asked]
    finally:
        engine.dispose()
    # A line after each statement's rows, so that they can be counted.
    script = "".join(f"{one}\nSELECT 'end of one';\n" for one in asked)
    parts = sa.make_url(url)
    if parts.get_backend_name() == "sqlite":
        argv = ["sqlite3", "-readonly", "-bail", "-cmd", ".mode quote", str(parts.database)]
    else:
        plain = parts.set(drivername="postgresql").render_as_string(hide_password=False)
        argv = [
            "psql",
            "--no-psqlrc",
            "--quiet",
            "--tuples-only",
            "--no-align",
            "--set=ON_ERROR_STOP=1",
            plain,
        ]
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not installed")
    done = subprocess.run(argv, input=script, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    counted, n = [], 0
    for line in done.stdout.splitlines():
        if line.strip("'") == "end of one":
            counted.append(n)
            n = 0
        elif line:
            n += 1
    assert len(asked) > 20
    assert counted == rows


def table(panel: Panel) -> list[dict[str, str]]:
    return [dict(zip(panel.head, (cell.text for cell in row), strict=True)) for row in panel.body]


def test_a_step_says_where_each_gpu_s_seconds_went(url: str) -> None:
    """Sample 11 was on engine 1 from 6 s to 8 s, when it left, and on engine 2 from 9 s; sample 12 on engine 2 from 6 s to 10 s."""
    written(url, [prologue(), moved_group(), preempted(), consumed()])
    engine = store.open_readonly(url)
    try:
        with reading(engine) as c:
            shown = {panel.title: panel for panel in steps.step(c, 1, 1).panels}
    finally:
        engine.dispose()
    panel = shown["Where each GPU's seconds went"]
    assert [list(row.values()) for row in table(panel)] == [
        ["2", "reserved", "n0", "1", "6", "4", "2", "8"],
        ["1", "harvested", "n3", "1", "2", "2", "0", "5"],
    ]
    assert "6.0 s" in panel.note
    drawn = panel.charts[0].bars
    assert [bar.tone for bar in drawn] == [5, 0, 5, 0]
    assert round(drawn[1].width / drawn[0].width, 2) == 0.67


def test_prompts_that_came_before_are_found_and_those_that_changed_most_stand_first(url: str) -> None:
    second = [*moved_group(20, 21, 2, 1), *consumed(20, 21, 2)]
    other = r.GroupCreated(40, 1, "train", 2, 0, 0, 1, b"\1\0\0\0", 1, 41, '{"max_tokens": 64}', "{}", T0)
    better = [
        msgspec.structs.replace(one, reward=1.0) if isinstance(one, r.SampleEnded) else one for one in second
    ]
    written(url, [prologue(), moved_group(), consumed(), [*better, other]])
    engine = store.open_readonly(url)
    try:
        with reading(engine) as c:
            before = steps.step(c, 1, 2).panels[-1]
            found = table(steps.changed(c, 1, 2, 1).panels[0])
            assert steps.changed(c, 1, 2, 7).panels[0].body == ()
            with pytest.raises(LedgerError, match="no run 9"):
                steps.changed(c, 9, 2, 1)
    finally:
        engine.dispose()
    assert table(before) == [{"since step": "1", "purpose": "train", "prompts": "1"}]
    assert before.body[0][0].href == "/runs/1/steps/2/since/1"
    assert [(one["group then"], one["group now"], one["change"]) for one in found] == [("10", "20", "0.375")]


def test_a_step_s_parts_follow_one_another_and_runs_are_compared_by_step() -> None:
    (drawn,) = steps.parts(
        {"seconds_seed": 4.0, "seconds_to_training": 1.0, "seconds_train": 2.0, "seconds_publish": 2.0}
    )
    seed, sleep, train, publish = drawn.bars
    assert sleep.x == train.x == seed.x + seed.width, "engines go to sleep while it trains"
    assert publish.x == train.x + train.width
    assert publish.width == train.width == seed.width / 2
    assert steps.parts({"seconds": 4.0}) == ()
    both = charts.compared(
        "reward", [("1 a", [(1, 0.0), (3, 1.0)]), ("2 b", [(2, 0.5), (3, math.nan)])], "step"
    )
    assert [tone for _, tone in both.lines] == [0, 1]
    assert both.lines[1][0].startswith(f"{charts.LEFT + (charts.WIDTH - charts.LEFT - charts.RIGHT) / 2}")
    assert charts.compared("reward", [("1 a", [])], "step").lines == (("", 0),)
    assert charts.merged([(5, 6), (1, 2), (2, 3), (3.5, 4)], 0.6) == [(1, 4), (5, 6)]


@pytest.mark.parametrize("chosen", steps.FILTERS)
def test_each_filter_keeps_what_it_says(url: str, chosen: str) -> None:
    written(url, everything())
    engine = store.open_readonly(url)
    try:
        with reading(engine) as c:
            every, kept = (
                next(panel for panel in steps.step(c, 1, 1, name).panels if panel.title == "Samples")
                for name in ("all", chosen)
            )
    finally:
        engine.dispose()
    column = {name: i for i, name in enumerate(every.head)}

    def ids(panel: Panel) -> set[str]:
        return {row[0].text for row in panel.body}

    expected = {
        "moved": lambda row: row[column["moves"]].text != "0",
        "masked": lambda row: row[column["state"]].text == "masked",
        "cut off": lambda row: row[column["finish"]].text == "length",
    }.get(chosen, lambda row: True)
    assert ids(kept) == {row[0].text for row in every.body if expected(row)}
    if chosen in ("best", "worst"):
        rewards = [
            float(row[column["reward"]].text) for row in kept.body if row[column["reward"]].text != "-"
        ]
        assert rewards == sorted(rewards, reverse=chosen == "best")


def test_only_numbers_are_filled_in() -> None:
    with pytest.raises(TypeError):
        filled(questions.RUN, run_id="1; DROP TABLE runs")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        filled(questions.RUN, run_id=float("inf"))
