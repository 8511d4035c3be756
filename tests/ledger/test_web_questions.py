"""The statements of `scavenger web` on both databases: what a reader copies is what the page was made of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import sqlalchemy as sa

from scavenger.ledger import store
from scavenger.ledger.read.reader import reading
from scavenger.web import pages, questions
from scavenger.web.questions import filled
from tests.ledger.examples import everything, written


class _NoContents(pages.Contents):
    def read(self, connection: sa.Connection, sample_ids: Sequence[int], tokenizer: str) -> list[pages.Read]:
        return [pages.Read("", f"text of {one}") for one in sample_ids]


def test_each_page_is_the_same_on_both_databases_and_its_sql_runs_as_copied(url: str) -> None:
    written(url, everything())
    engine, contents = store.open_readonly(url), _NoContents()
    try:
        with reading(engine) as c:
            shown = {
                "overview": pages.overview(c),
                "run": pages.run(c, 1),
                "step": pages.step(c, 1, 1, "best", 0),
                "group": pages.group(c, contents, 10),
                "sample": pages.sample(c, contents, 11),
                "episode": pages.episode(c, contents, 1),
                "harm": pages.harm(c),
                "decisions": pages.decisions(c),
                "decision": pages.decision(c, 1),
            }
            for name, page in shown.items():
                for panel in page.panels:
                    for statement in filter(str.strip, panel.sql.split(";\n\n")):
                        assert ":" not in "".join(
                            line for line in statement.splitlines() if not line.startswith("--")
                        ), "no parameter is left"
                        pages.ask(c, statement)
                assert any(panel.body or panel.texts for panel in page.panels), name
            assert ("1", "/runs/1") in {
                (cell.text, cell.href) for cell in shown["overview"].panels[0].body[0]
            }
            moved = shown["sample"].panels[1].charts[0]
            assert [bar.tone for bar in moved.bars] == list(range(len(moved.bars))), "a colour for each epoch"
            assert len(moved.bars) >= 2, "the sample moved"
    finally:
        engine.dispose()


@pytest.mark.parametrize("chosen", pages.FILTERS)
def test_each_filter_keeps_what_it_says(url: str, chosen: str) -> None:
    written(url, everything())
    engine = store.open_readonly(url)
    try:
        with reading(engine) as c:
            every = pages.step(c, 1, 1).panels[3]
            kept = pages.step(c, 1, 1, chosen).panels[3]
    finally:
        engine.dispose()
    column = {name: i for i, name in enumerate(every.head)}

    def ids(panel: pages.Panel) -> set[str]:
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
