"""The terminal of `scavenger top`, driven by keys at 80x24 and 200x50. A pilot presses them; the ledger and the status are real files."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

pytest.importorskip("textual")

from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from scavenger import config
from scavenger.errors import LedgerError
from scavenger.harvest import limits as harvest_limits
from scavenger.observe import status
from scavenger.top import app as apps
from scavenger.top.app import PAGES, Top
from scavenger.top.feed import Feed, SiteFeed
from scavenger.top.recorded import RecordedFeed
from scavenger.top.view import Inputs
from tests.ledger.examples import T0
from tests.top.sites import hostile, site, status_of

NOW = T0 + 30
SIZES = ((80, 24), (200, 50))
Play = Callable[[Top, Pilot[None]], Coroutine[Any, Any, None]]


def play(feed: Feed, what: Play, size: tuple[int, int] = (80, 24), interval_s: float = 60.0) -> None:
    async def run() -> None:
        top = Top(feed, interval_s=interval_s)
        async with top.run_test(size=size) as pilot:
            await until(pilot, lambda: top.view is not None)
            await what(top, pilot)

    asyncio.run(run())


async def until(pilot: Pilot[None], met: Callable[[], object], timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not met():
            await pilot.pause(0.02)
    await pilot.pause()


async def to_page(top: Top, pilot: Pilot[None], name: str) -> None:
    await pilot.press(str(PAGES.index(name) + 1))
    await until(pilot, lambda: top.page == name)
    if name != "overview":
        await until(pilot, lambda: top.focused is not None and top.focused.id == f"{name}-table")


def shown(top: Top, name: str) -> str:
    """What a static widget of the screen on top says."""
    widget = top.screen.query_one(f"#{name}", Static)
    return str(widget.visual)


def picture(top: Top) -> list[str]:
    """The screen as lines of text."""
    width, height = top.size
    lines = top.screen._compositor.render_strips(top.size)
    assert len(lines) == height
    return [strip.text.ljust(width) for strip in lines]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = site(tmp_path)
    status.write(tmp_path / "state", status_of(NOW - 3))
    return found


def feed(path: Path) -> SiteFeed:
    return SiteFeed(config.read_daemon(path), lambda: NOW)


@pytest.mark.parametrize("size", SIZES)
def test_every_page_is_shown_and_every_kind_of_thing_opens(path: Path, size: tuple[int, int]) -> None:
    async def what(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "Undrain" in picture(top)[-1])
        whole = "\n".join(picture(top))
        for said in (
            "generation 3",
            "Why not more engines now: max_engines = 2",
            "#d..",
            "sorting",
            "KV use",
            "enter Open",
        ):
            assert said in whole, whole
        opened = {
            "nodes": "node node0",
            "runs": "run sorting",
            "engines": "node node0",
            "samples": "sample 21",
            "events": "sample 31",
            "decisions": "decision 2",
        }
        for name in PAGES[1:]:
            await to_page(top, pilot, name)
            table = top.query_one(f"#{name}-table", DataTable)
            assert table.row_count > 0, name
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(top.screen, apps.Detail))
            assert opened[name] in "\n".join(picture(top)), (name, picture(top))
            await pilot.press("down", "pagedown", "up", "escape")
            await until(pilot, lambda: not isinstance(top.screen, apps.Detail))

    play(feed(path), what, size)


@pytest.mark.parametrize("size", SIZES)
def test_hostile_text_is_text_on_every_page(tmp_path: Path, size: tuple[int, int]) -> None:
    path = site(tmp_path, hostile())
    status.write(tmp_path / "state", status_of(NOW - 3, evil=True))

    async def what(top: Top, pilot: Pilot[None]) -> None:
        seen = ""
        for name in PAGES:
            await to_page(top, pilot, name)
            seen += "\n".join(picture(top))
            if name == "overview":
                continue
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(top.screen, apps.Detail))
            seen += "\n".join(picture(top))
            await pilot.press("escape")
            await until(pilot, lambda: not isinstance(top.screen, apps.Detail))
        assert "[bold red]x[/]" in seen
        assert not set(seen) & set("\x1b\x07\r\u202e\u2066"), "no control character"
        assert top.is_running, "a click that a name asks for is none"

    play(feed(path), what, size)


def test_a_daemon_goes_and_returns_and_the_ledger_with_it(path: Path, tmp_path: Path) -> None:
    async def what(top: Top, pilot: Pilot[None]) -> None:
        state = tmp_path / "state"
        assert "generation 3" in shown(top, "head")
        status.path(state).rename(state / "away")
        await until(pilot, lambda: "NO STATUS" in shown(top, "head"))
        assert "its last decision" in shown(top, "why")
        assert top.view is not None
        assert top.view.runs, "the ledger is there"
        (state / "ledger.sqlite3").rename(state / "gone")
        await until(pilot, lambda: top.view is not None and len(top.view.problems) == 2)
        (state / "ledger.sqlite3").write_text("no database at all")
        await until(pilot, lambda: top.view is not None and "not read" in top.view.problems[-1])
        (state / "gone").replace(state / "ledger.sqlite3")
        (state / "away").rename(status.path(state))
        await until(pilot, lambda: top.view is not None and not top.view.problems)
        assert "generation 3" in shown(top, "head")

    play(feed(path), what, interval_s=0.05)


class Failing:
    """A feed that can be told to fail."""

    def __init__(self, feed: Feed) -> None:
        self.fails, self._feed = False, feed
        self.sample, self.node, self.decision = feed.sample, feed.node, feed.decision
        self.may_not_drain, self.drain = feed.may_not_drain, feed.drain

    def read(self) -> Inputs:
        if self.fails:
            raise LedgerError("the disk [bold]is gone[/]")
        return self._feed.read()


def test_a_refresh_that_fails_says_why_and_leaves_what_was_shown() -> None:
    reader = Failing(RecordedFeed(lambda: NOW))

    async def what(top: Top, pilot: Pilot[None]) -> None:
        before = top.view
        reader.fails = True
        await pilot.press("r")
        await until(pilot, lambda: top.failed)
        assert "the disk [bold]is gone[/]" in shown(top, "said")
        assert top.view is before
        assert "R" in shown(top, "page")
        reader.fails = False
        await pilot.press("r")
        await until(pilot, lambda: not top.failed)
        await until(pilot, lambda: "is gone" not in shown(top, "said"))

    play(reader, what)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(12, "Cannot allocate memory"), "Cannot allocate memory"),
        (TypeError("no [bold]number[/]\x1b[2J"), "no [bold]number[/]"),
    ],
)
def test_a_detail_that_cannot_be_shown_says_why_and_ends_nothing(error: Exception, said: str) -> None:
    class Broken(RecordedFeed):
        def decision(self, decision_id: int) -> list[Text]:
            raise error

    async def what(top: Top, pilot: Pilot[None]) -> None:
        await to_page(top, pilot, "decisions")
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(top.screen, apps.Detail))
        whole = "\n".join(picture(top))
        assert said in whole, whole
        assert "\x1b" not in whole
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(top.screen, apps.Detail))
        assert top.is_running

    play(Broken(lambda: NOW), what)


def test_a_value_of_another_type_than_its_column_is_named_and_ends_nothing(
    path: Path, tmp_path: Path
) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "state/ledger.sqlite3")) as ledger, ledger:
        ledger.execute("UPDATE leases SET granted_at = 'abc'")

    with pytest.raises(LedgerError, match="holds str in a column granted_at"):
        feed(path).sample(21)

    async def what(top: Top, pilot: Pilot[None]) -> None:
        await to_page(top, pilot, "samples")
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(top.screen, apps.Detail))
        whole = " ".join(" ".join(picture(top)).split())
        assert "the ledger holds str in a column granted_at" in whole, whole

    play(feed(path), what)


def test_the_cursor_stays_on_its_row_while_others_come_and_go() -> None:
    clock = [NOW]
    reader = RecordedFeed(lambda: clock[0])

    async def what(top: Top, pilot: Pilot[None]) -> None:
        await to_page(top, pilot, "decisions")
        await pilot.press("down", "down")
        chosen, rows = top._chosen("decisions"), list(top._shown["decisions"])
        clock[0] += 20
        await pilot.press("r")
        await until(pilot, lambda: top._shown["decisions"] != rows)
        assert top._chosen("decisions") == chosen
        assert top.query_one("#decisions-table", DataTable).cursor_row > 2

    play(reader, what)


def test_a_node_is_drained_and_undrained_only_after_yes(path: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"

    async def what(top: Top, pilot: Pilot[None]) -> None:
        await to_page(top, pilot, "nodes")
        await pilot.press("down", "d")
        await until(pilot, lambda: isinstance(top.screen, apps.Confirm))
        assert "Drain the engines on node node1?" in "\n".join(picture(top))
        await pilot.press("n")
        await until(pilot, lambda: "nothing was changed" in shown(top, "said"))
        assert harvest_limits.drained_nodes(state) == {}
        await pilot.press("d", "y")
        await until(pilot, lambda: "drains engines on node1" in shown(top, "said"))
        assert "(scavenger top)" in harvest_limits.drained_nodes(state)["node1"]
        await pilot.press("u", "y")
        await until(pilot, lambda: "may start there again" in shown(top, "said"))
        assert harvest_limits.drained_nodes(state) == {}
        await to_page(top, pilot, "engines")
        await pilot.press("down", "down", "d", "y")
        await until(pilot, lambda: set(harvest_limits.drained_nodes(state)) == {"node2"})
        await to_page(top, pilot, "overview")
        await pilot.press("d", "y")
        await until(pilot, lambda: harvest_limits.drain_path(state).exists())
        await pilot.press("u", "y")
        await until(pilot, lambda: not harvest_limits.drain_path(state).exists())

    play(feed(path), what)


def test_who_may_not_drain_is_told_why_and_not_asked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SiteFeed, "may_not_drain", lambda _self: "ann may not write to /x")

    async def what(top: Top, pilot: Pilot[None]) -> None:
        await pilot.press("d")
        await until(pilot, lambda: "not allowed: ann may not write" in shown(top, "said"))
        assert not isinstance(top.screen, apps.Confirm)
        await to_page(top, pilot, "runs")
        await pilot.press("d")
        await until(pilot, lambda: "choose a node" in shown(top, "said"))

    play(feed(path), what)


def test_the_demo_runs_without_anything() -> None:
    async def what(top: Top, pilot: Pilot[None]) -> None:
        assert "demo  active" in shown(top, "page")
        await to_page(top, pilot, "nodes")
        await pilot.press("down", "d", "y")
        await until(pilot, lambda: "drains gpu01" in shown(top, "said"))
        await pilot.press("q")

    play(RecordedFeed(lambda: NOW), what)


def test_a_cell_that_is_too_wide_is_cut_and_nothing_else() -> None:
    cells = (Text("x" * 100), Text("ok"), Text("y" * 100))
    assert [cell.cell_len for cell in apps._bounded(cells, 400)] == [60, 2, 100]
    assert [cell.cell_len for cell in apps._bounded(cells, 80)] == [20, 2, 100]


def test_textual_is_loaded_by_nothing_but_top() -> None:
    """`scavenger --help` and each other command start without it."""
    code = (
        "import sys, scavenger.cli.main, scavenger.top.feed, scavenger.top.recorded;"
        "print([name for name in sys.modules if name.startswith('textual')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    code = "import sys, scavenger.cli.main; print([n for n in sys.modules if n.startswith('scavenger.top')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_the_extra_the_command_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from scavenger.cli.main import app

    monkeypatch.delitem(sys.modules, "scavenger.top.app", raising=False)
    monkeypatch.delattr("scavenger.top.app", raising=False)
    monkeypatch.setitem(sys.modules, "textual", None)
    monkeypatch.setitem(sys.modules, "textual.app", None)
    done = CliRunner().invoke(app, ["top", "--demo"])
    assert "pip install 'scavenger[top]'" in str(done.exception)
