"""The terminal of `scavenger top`, in Textual (the extra `top`): pages, tables, keys, and a refresh beside them.

    every `interval_s`: a thread reads the feed and builds the view --> the page that is shown is drawn from it

Owns keys and widgets. What is shown is `view`'s, how it reads `text`'s. A refresh that fails leaves what was shown and says why.

Boundary: Textual is an extra, and is imported here alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.css.query import NoMatches
from textual.screen import ModalScreen
from textual.timer import Timer
from textual.widgets import DataTable, Footer, Static, TabbedContent, TabPane

from scavenger.errors import ScavengerError
from scavenger.top import text
from scavenger.top.feed import Feed
from scavenger.top.view import View, build, clean

INTERVAL_S = 2.0
#: Of the time between two refreshes a refresh takes at most this share.
MOST_SHARE = 0.1
#: Columns are no wider, so that one long name does not hide all others.
_LEAST_CELL, _CELL = 16, 60
_REASON = 2_000


@dataclass(frozen=True, slots=True)
class _Table:
    """One page's table: its columns, its rows of a view with their keys, and which row a key stands for."""

    title: str
    columns: tuple[str, ...]
    rows: Callable[[View], list[tuple[str, text.Cells]]]


def _node_rows(view: View) -> list[tuple[str, text.Cells]]:
    return [(node.name, text.node_cells(node)) for node in view.nodes]


def _run_rows(view: View) -> list[tuple[str, text.Cells]]:
    return [(f"{run.run_id} {run.name}", text.run_cells(run)) for run in view.runs]


def _engine_rows(view: View) -> list[tuple[str, text.Cells]]:
    return [(str(engine.worker_id), text.engine_cells(engine)) for engine in view.engines]


def _sample_rows(view: View) -> list[tuple[str, text.Cells]]:
    return [(str(sample.sample_id), text.sample_cells(sample)) for sample in view.samples]


def _event_rows(view: View) -> list[tuple[str, text.Cells]]:
    """Equal ones are told apart by their number among themselves, so that a newer event changes no other's key."""
    rows, seen = [], Counter[str]()
    for event in reversed(view.events):
        key = f"{event.at} {event.kind} {event.sample_id} {event.text}"
        seen[key] += 1
        rows.append((f"{key} {seen[key]}", text.event_cells(event)))
    return rows[::-1]


def _decision_rows(view: View) -> list[tuple[str, text.Cells]]:
    return [(str(decision.id), text.decision_cells(decision)) for decision in view.decisions]


TABLES: dict[str, _Table] = {
    "nodes": _Table("Nodes", text.NODES, _node_rows),
    "runs": _Table("Runs", text.RUNS, _run_rows),
    "engines": _Table("Engines", text.ENGINES, _engine_rows),
    "samples": _Table("Samples", text.SAMPLES, _sample_rows),
    "events": _Table("Events", text.EVENTS, _event_rows),
    "decisions": _Table("Decisions", text.DECISIONS, _decision_rows),
}
PAGES = ("overview", *TABLES)


class Detail(ModalScreen[None]):
    """One thing in full; scrolls. Escape, q or Enter closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "close", "Close"),
        Binding("down,j", "scroll(1)", "Down", show=False),
        Binding("up,k", "scroll(-1)", "Up", show=False),
        Binding("pagedown,space", "scroll(10)", "Page down", show=False),
        Binding("pageup", "scroll(-10)", "Page up", show=False),
    ]
    CSS = """
    Detail { align: center middle; }
    #box { width: 94%; height: 90%; border: round $accent; background: $surface; padding: 0 1; }
    """

    def __init__(self, lines: Sequence[Text]) -> None:
        super().__init__()
        self._lines = lines

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="box"):
            yield Static(Text("\n").join(self._lines), id="detail")
        yield Footer()

    def action_close(self) -> None:
        self.dismiss(None)

    def action_scroll(self, lines: int) -> None:
        self.query_one("#box").scroll_relative(y=lines, animate=False)


class Confirm(ModalScreen[bool]):
    """A question that only `y` answers with yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,q,enter", "answer(False)", "No"),
    ]
    CSS = """
    Confirm { align: center middle; }
    #question { width: 70; max-width: 94%; height: auto; border: round $warning; background: $surface; padding: 1 2; }
    """

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(id="question"):
            yield Static(Text(f"{self._question}\n\ny: yes    n: no"))
        yield Footer()

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


class Top(App[None]):
    """See the module."""

    TITLE = "scavenger top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head, #why { height: auto; }
    #why { min-height: 2; }
    #said { height: auto; }
    TabbedContent { height: 1fr; }
    TabPane { padding: 0; }
    DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(n), f"page('{name}')", name.title(), show=False) for n, name in enumerate(PAGES, 1)),
        Binding("1-7", "none", "Pages", key_display="1-7"),
        Binding("o", "open", "Open", key_display="enter"),
        Binding("d", "drain(False)", "Drain"),
        Binding("u", "drain(True)", "Undrain"),
        Binding("r", "refresh_now", "Refresh"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, feed: Feed, interval_s: float = INTERVAL_S) -> None:
        super().__init__()
        self._feed, self._interval_s = feed, interval_s
        self._shown: dict[str, list[str]] = {name: [] for name in TABLES}
        self._rows: dict[str, list[text.Cells]] = {name: [] for name in TABLES}
        self.view: View | None = None
        self.failed = ""
        self._next: Timer | None = None

    # ---------------------------------------------------------------- what is on it

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="why")
        with TabbedContent(initial="overview"):
            with TabPane("Overview", id="overview"):
                yield Static(id="page")
            for name, table in TABLES.items():
                with TabPane(table.title, id=name):
                    yield DataTable(id=f"{name}-table", cursor_type="row", zebra_stripes=True)
        yield Static(id="said")
        yield Footer()

    def on_mount(self) -> None:
        for name, table in TABLES.items():
            widget = self._table(name)
            for column in table.columns:
                widget.add_column(column, key=column)
        self._read()

    # ---------------------------------------------------------------- refresh

    def _read(self) -> None:
        self.run_worker(self._read_feed, thread=True, group="read", exclusive=True, exit_on_error=False)

    def _read_feed(self) -> None:
        """In a thread: a ledger may take its time, and the keys do not wait for it."""
        began = time.monotonic()
        try:
            view, failed = build(self._feed.read()), ""
        except Exception as error:  # noqa: BLE001 - what was shown stays, and the next refresh may succeed
            view, failed = None, f"not refreshed: {error}"
        took = time.monotonic() - began
        if self.is_running:
            self.call_from_thread(self._take, view, failed, took)

    def _take(self, view: View | None, failed: str, took_s: float) -> None:
        if failed or self.failed:
            self._say(failed, "red")
        self.view, self.failed = view or self.view, failed
        self._draw()
        if self._next is not None:
            self._next.stop()
        self._next = self.set_timer(max(self._interval_s, took_s / MOST_SHARE), self._read)

    def on_resize(self) -> None:
        self._draw()

    def on_tabbed_content_tab_activated(self) -> None:
        self._draw()
        if self.page != "overview":
            self._table(self.page).focus()

    @property
    def page(self) -> str:
        """Which one is shown."""
        return self.screen_stack[0].query_one(TabbedContent).active or "overview"

    def _table(self, name: str) -> DataTable[Text]:
        return self.screen_stack[0].query_one(f"#{name}-table", DataTable)

    def _draw(self) -> None:
        try:
            width = self.size.width
            if self.view is None or width <= 0:
                return
            self.screen_stack[0].query_one("#head", Static).update(text.head(self.view, width))
            why = text.why(self.view, width, 2 if self.size.height < 30 else 4)
            self.screen_stack[0].query_one("#why", Static).update(Text("\n").join(why))
            if self.page == "overview":
                height = max(6, self.size.height - 3 - max(2, len(why)) - 1)
                page = Text("\n").join(text.overview(self.view, width, height))
                self.screen_stack[0].query_one("#page", Static).update(page)
            else:
                self._fill(self.page, TABLES[self.page].rows(self.view))
        except NoMatches:
            return  # it is not composed yet, or is going

    def _fill(self, name: str, rows: list[tuple[str, text.Cells]]) -> None:
        """The cursor stays on what it was on: a row is known by its key. Cells are changed in place where the rows are the same."""
        width = self.size.width
        table, keys, cells = (
            self._table(name),
            [key for key, _ in rows],
            [_bounded(row, width) for _, row in rows],
        )
        columns = TABLES[name].columns
        if keys == self._shown[name]:
            for number, (old, new) in enumerate(zip(self._rows[name], cells, strict=True)):
                for column, was, now in zip(columns, old, new, strict=True):
                    if was != now:
                        table.update_cell(f"{number}", column, now, update_width=True)
        else:
            chosen = self._chosen(name)
            at = keys.index(chosen) if chosen in keys else min(table.cursor_row, max(0, len(keys) - 1))
            table.clear()
            for number, row in enumerate(cells):
                table.add_row(*row, key=f"{number}")
            if keys:
                table.move_cursor(row=at, animate=False)
        self._shown[name], self._rows[name] = keys, cells

    def _chosen(self, name: str) -> str:
        """The key of the row under the cursor; "" where there is none."""
        row, keys = self._table(name).cursor_row, self._shown[name]
        return keys[row] if 0 <= row < len(keys) else ""

    # ---------------------------------------------------------------- keys

    def action_page(self, name: str) -> None:
        self.screen_stack[0].query_one(TabbedContent).active = name

    def action_none(self) -> None:
        """A hint in the footer."""

    def action_refresh_now(self) -> None:
        self._read()

    def on_data_table_row_selected(self) -> None:
        self.action_open()

    def action_open(self) -> None:
        """Open what is under the cursor."""
        name = self.page
        if self.view is None or name == "overview" or not self._shown[name]:
            return
        row = self._table(name).cursor_row
        look = self._look(name, row)
        if look is not None:
            self.run_worker(lambda: self._open(look), thread=True, group="open", exclusive=True)

    def _look(self, name: str, row: int) -> Callable[[], list[Text]] | None:
        view, feed = self.view, self._feed
        if view is None:
            return None
        key = self._chosen(name)
        if name == "nodes":
            return lambda: feed.node(key)
        if name == "samples":
            return lambda: feed.sample(int(key))
        if name == "decisions":
            return lambda: feed.decision(int(key))
        if name == "runs":
            found = [run for run in view.runs if f"{run.run_id} {run.name}" == key]
            return (lambda: text.run_detail(found[0])) if found else None
        if name == "engines":
            node = self._node_of_engine(key)
            return (lambda: feed.node(node)) if node else None
        if row >= len(view.events):
            return None
        event = view.events[row]
        if event.sample_id:
            return lambda: feed.sample(event.sample_id)
        if event.node:
            return lambda: feed.node(event.node)
        return lambda: text.detail(
            event.kind, {"at": text.moment(event.at), "run": event.run, "what": event.text}
        )

    def _node_of_engine(self, worker_id: str) -> str:
        engines = self.view.engines if self.view is not None else ()
        return next((engine.node for engine in engines if str(engine.worker_id) == worker_id), "")

    def _open(self, look: Callable[[], list[Text]]) -> None:
        try:
            lines = look()
        except ScavengerError as error:
            lines = [Text(f"{error.cause}\n{error.remedy}")]
        except Exception as error:  # noqa: BLE001 - one thing that cannot be shown does not end the terminal
            lines = [Text(clean(f"not shown: {type(error).__name__}: {error}"))]
        if self.is_running:
            self.call_from_thread(self.push_screen, Detail(lines))

    def action_drain(self, off: bool) -> None:
        """Of the node, or the engine's node, under the cursor; on the first page of all."""
        name = self.page
        if name == "overview":
            node, what = "", "EVERY harvested engine"
        elif name in ("nodes", "engines"):
            key = self._chosen(name)
            node = key if name == "nodes" else self._node_of_engine(key)
            what = f"the engines on node {node}"
        else:
            self._say("drain: choose a node or an engine; on Overview it is all of them")
            return
        if not node and name != "overview":
            return
        if why := self._feed.may_not_drain():
            self._say(f"not allowed: {why}")
            return
        question = f"Undrain {what}: may engines start there again?" if off else f"Drain {what}?"

        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(lambda: self._drain(node, off), thread=True, group="drain")
            else:
                self._say("nothing was changed")

        self.push_screen(Confirm(question), answered)

    def _drain(self, node: str, off: bool) -> None:
        try:
            said = self._feed.drain(node, off=off)
        except ScavengerError as error:
            said = f"{error.cause} {error.remedy}"
        if self.is_running:
            self.call_from_thread(self._say, said)
            self.call_from_thread(self._read)

    def _say(self, said: str, style: str = "") -> None:
        line = text.fitted(clean(said), max(10, self.size.width)).rstrip()
        self.screen_stack[0].query_one("#said", Static).update(Text(line, style=style))


def _bounded(row: text.Cells, width: int) -> text.Cells:
    """No cell but the last takes more than a quarter of the screen."""
    most = min(_CELL, max(_LEAST_CELL, width // 4))
    return (*(_cut(cell, most) for cell in row[:-1]), _cut(row[-1], _REASON))


def _cut(cell: Text, most: int) -> Text:
    if cell.cell_len <= most:
        return cell
    short = cell.copy()
    short.truncate(most, overflow="ellipsis")
    return short


def run(feed: Feed, **options: Any) -> None:
    """Until the user quits."""
    Top(feed, **options).run()
