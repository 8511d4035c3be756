"""A run's pages as one HTML file, for one who has neither the ledger nor a server.

Boundary: what is worth a file's bytes, which no other part decides.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa

from scavenger.errors import ConfigError, NotInLedger
from scavenger.ledger import store
from scavenger.ledger.read.reader import kept
from scavenger.protocol import keys
from scavenger.web import pages, questions, render, texts
from scavenger.web import steps as step_pages
from scavenger.web.panels import Page, Row, ask, clean
from scavenger.web.questions import filled

T = TypeVar("T")
#: Makes a page with a connection of the ledger.
Build = Callable[[sa.Connection], Page]


class Reader(Protocol):
    """Gives what is made with a connection of the ledger."""

    def __call__(self, build: Callable[[sa.Connection], T], /) -> T: ...


#: Characters of text and cells that a file has of what is not a run's, a step's or an evaluation's own page.
MOST_CHARS = 8_000_000
LEFT_OUT = (
    "Not in this file: a search of the completions, how each completion begins in the tables of samples, the row of an agent's prompt, "
    "prompts whose rewards changed since an earlier step, older decisions, and what is "
    f"beyond {MOST_CHARS // 1_000_000} MB of texts and tables, of the oldest steps first. A link that is missing leads there. "
)
NOT_MOVED = (
    "Pages of {count:,} samples that never moved to another engine are left out: what they said is on their groups' and episodes' pages; "
    "`scavenger web --export FILE --run RUN --every-sample` has them too, as far as there is room. "
)
MISSING = "Of what could be in this file there is no page of {what}. "


def write(url: str, run: str, out: Path, *, every_sample: bool = False) -> dict[str, Page]:
    """Write the pages of the newest run of this name to `out`, mode 0600, and give them by their paths.

    Those of the run, its steps and evaluations, all runs and their comparison, other users' waits and the newest decisions; then, as many
    as `MOST_CHARS` allow, each decision, the newest episodes, and of each step, the newest first, what each filter and each bin of rewards
    keeps, its groups, its samples that moved (or, `every_sample`, all) and their episodes.
    Raises `ConfigError` where `out` is there, `LedgerError`.
    """
    if out.exists():
        raise ConfigError(f"{out} is there already", "remove it, or name another file")
    engine = store.open_readonly(url)
    try:
        # One connection for thousands of pages, and a transaction for each: the daemon's log cannot be written back during one.
        with kept(engine) as read:

            def ask_for(build: Callable[[sa.Connection], T]) -> T:
                with read() as connection:
                    return build(connection)

            ask_for(store.require_head)
            with texts.Child() as child:
                found = collected(ask_for, pages.Contents(child), run, MOST_CHARS, every_sample=every_sample)
    finally:
        engine.dispose()
    html = render.one_file(found.pages, f"run {clean(run, 60)}", left_out(found))
    keys.write_private(out, "".join(html).encode())
    return found.pages


def left_out(found: Collected) -> str:
    """What a file's head says of pages that are not there. Pure."""
    cut = [f"{missing:,} of {there:,} {what}" for what, missing, there in found.missing if missing]
    return (
        LEFT_OUT
        + (MISSING.format(what=", ".join(cut)) if cut else "")
        + (NOT_MOVED.format(count=found.not_moved) if found.not_moved else "")
    )


class _Room:
    """Takes pages into `shown` until they have so many characters."""

    def __init__(self, ask_for: Reader, shown: dict[str, Page], most: int) -> None:
        self._ask_for, self._shown, self.left = ask_for, shown, most

    def take(self, path: str, build: Build) -> bool:
        """Whether there was room; from the first one that has none on none is taken. What the ledger does not have, such as an episode
        without a turn yet, or a sample that was purged meanwhile, takes none."""
        if path in self._shown:
            return True
        try:
            made = self._ask_for(build)
        except NotInLedger:
            return True
        return self.take_all({path: made})

    def take_each(self, made: Iterable[tuple[str, Build]]) -> None:
        """One after another, until there is no room."""
        for path, build in made:
            if not self.take(path, build):
                return

    def take_all(self, made: dict[str, Page]) -> bool:
        """All of them or none."""
        size = sum(map(_size, made.values()))
        if size > self.left:
            self.left = 0
            return False
        self.left -= size
        self._shown |= made
        return True


#: A kind of page, how many of them are missing, and of how many.
Missing = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class Collected:
    """Pages by their paths, the run's own first; of how many samples there is none because they never moved; and of each kind of page how
    many are missing, of how many."""

    pages: dict[str, Page]
    not_moved: int
    missing: tuple[Missing, ...] = ()


def collected(
    ask_for: Reader, contents: pages.Contents, run: str, most: int, *, every_sample: bool = False
) -> Collected:
    """What a file has. Raises `LedgerError` where there is no run of this name."""
    number = ask_for(lambda c: _newest(c, run))
    whole = ask_for(lambda c: pages.run(c, number))
    shown = _of_the_site(ask_for, number, whole)
    there = _of_the_run(ask_for, shown, number)
    listed = _linked(shown["/decisions"], "/decisions/")
    # Decisions and episodes leave room for the steps'.
    some = _Room(ask_for, shown, most // 4)
    some.take_each((path, functools.partial(pages.decision, number=_id(path))) for path in listed)
    some.take_each(_episodes_of(whole, contents))
    room = _Room(ask_for, shown, most - most // 4 + some.left)
    narrowed, moved = 0, set[str]()
    for step, evaluation in there:
        room.take_each(_episodes_of(shown[_path_of(number, step, evaluation)], contents))
        found = _found_of(ask_for, room, number, step, evaluation)
        narrowed += bool(room.left)
        moved |= {f"/samples/{one['id']}" for one in found if one["kind"] == "sample" and one["moves"]}
        room.take_each(page for one in found for page in _pages_of(one, contents, every_sample))
        if not room.left:
            break
    narrow = ("filters of steps and evaluations", len(there) - narrowed, len(there))
    counts = _counts(ask_for, number)
    return _counted(shown, counts, moved, len(listed), narrow, every_sample=every_sample)


def _of_the_site(ask_for: Reader, run: int, whole: Page) -> dict[str, Page]:
    """The run's own page `whole`, without its search, and those of all runs, in the order of the file."""
    shown = {
        f"/runs/{run}": dataclasses.replace(
            whole, panels=tuple(panel for panel in whole.panels if not panel.search)
        ),
        "/": ask_for(pages.overview),
        "/harm": ask_for(pages.harm),
        "/decisions": ask_for(pages.decisions),
    }
    compared = [path for _, path, _ in shown["/"].panels[0].choices if path.startswith("/compare")]
    for path in compared:
        together = [int(one) for one in path.partition("=")[2].split(",")]
        shown[path] = ask_for(functools.partial(pages.compare, run_ids=together))
    return shown


def _of_the_run(ask_for: Reader, shown: dict[str, Page], run: int) -> list[tuple[int, bool]]:
    """Take the page of each step and each evaluation. What they are, the newest first: (step, whether it is the evaluation after it)."""
    there = set[tuple[int, bool]]()
    for sql, evaluation, build in (
        (questions.STEPS, False, step_pages.step),
        (questions.EVALUATIONS, True, step_pages.evaluation),
    ):
        asked = filled(sql, run_id=run, before=questions.NO_STEP, most=questions.MOST_STEPS)
        for row in ask_for(functools.partial(ask, sql=asked)):
            there.add((row["step"], evaluation))
            made = functools.partial(build, run_id=run, number=row["step"])
            shown[_path_of(run, row["step"], evaluation)] = ask_for(made)
    return sorted(there, key=lambda one: (-one[0], one[1]))


def _path_of(run: int, step: int, evaluation: bool) -> str:
    return f"/runs/{run}/{'evals' if evaluation else 'steps'}/{step}"


def _episodes_of(page: Page, contents: pages.Contents) -> Iterator[tuple[str, Build]]:
    """The episodes that a page names."""
    for path in _linked(page, "/episodes/"):
        yield path, functools.partial(pages.episode, contents=contents, episode_id=_id(path))


def _counts(ask_for: Reader, run: int) -> Row:
    """How many of each kind of page the ledger could have."""
    found: dict[str, Any] = {}
    for sql in (questions.KEPT, questions.COUNTS):
        found |= ask_for(functools.partial(ask, sql=filled(sql, run_id=run)))[0]
    return found


def _counted(
    shown: dict[str, Page],
    there: Row,
    moved: set[str],
    decisions: int,
    narrow: Missing,
    *,
    every_sample: bool,
) -> Collected:
    """What is missing, as the ledger counts what is there. `moved`: paths of samples that did; `decisions`: how many are listed."""
    own = {path for path in shown if path.startswith("/samples/")}
    unmoved = int(there["unmoved"]) - len(own - moved)

    def missing(what: str, within: str, most: int) -> Missing:
        own_pages = [path for path in shown if within in path and "?" not in path]
        return what, max(0, most - len(own_pages)), most

    return Collected(
        shown,
        0 if every_sample else unmoved,
        (
            missing("steps", "/steps/", int(there["steps"])),
            missing("evaluations", "/evals/", int(there["evaluations"])),
            missing("groups", "/groups/", int(there["groups"])),
            missing("episodes", "/episodes/", int(there["episodes"])),
            ("samples that moved", int(there["moved"]) - len(own & moved), int(there["moved"])),
            *(
                (("samples that never moved", max(0, unmoved), int(there["unmoved"])),)
                if every_sample
                else ()
            ),
            missing("decisions that are listed", "/decisions/", decisions),
            narrow,
        ),
    )


def _found_of(ask_for: Reader, room: _Room, run: int, step: int, evaluation: bool) -> list[Row]:
    """The groups and samples of a step, or its evaluation, whose filters' pages are taken; none where these have no room."""
    narrowed = functools.partial(step_pages.narrowed, run_id=run, number=step, evaluation=evaluation)
    if not room.left or not room.take_all(ask_for(narrowed)):
        return []
    groups = questions.EVALUATION_GROUPS if evaluation else questions.GROUPS
    asked = filled(groups, run_id=run, step=step, most=questions.MOST_SAMPLES)
    return ask_for(functools.partial(ask, sql=asked))


def _pages_of(found: Row, contents: pages.Contents, every_sample: bool) -> Iterator[tuple[str, Build]]:
    """A text is on one page: an episode's where it is of one, else its group's."""
    number, episode = int(found["id"]), int(found["episode_id"])
    if episode:
        yield f"/episodes/{episode}", functools.partial(pages.episode, contents=contents, episode_id=episode)
    elif found["kind"] == "group":
        yield f"/groups/{number}", functools.partial(pages.group, contents=contents, group_id=number)
    if found["kind"] == "sample" and (found["moves"] or every_sample):
        yield f"/samples/{number}", functools.partial(pages.sample, contents=None, sample_id=number)


def _linked(page: Page, below: str) -> list[str]:
    """Paths of its tables' links that begin so, each once, in their order."""
    found = [cell.href for panel in page.panels for row in panel.body for cell in row]
    return [path for path in dict.fromkeys(found) if path.startswith(below)]


def _id(path: str) -> int:
    return int(path.rpartition("/")[2])


def _newest(connection: sa.Connection, run: str) -> int:
    statement = sa.text("SELECT run_id FROM v_runs WHERE name = :name ORDER BY run_id DESC LIMIT 1")
    found = connection.execute(statement, {"name": run}).scalar()
    if found is None:
        raise NotInLedger(f"the ledger has no run {clean(run, 60)!r}", "`scavenger web` lists its runs")
    return int(found)


def _size(page: Page) -> int:
    """Characters of a page's HTML, about; but for its statements, which many pages share."""
    drawn = sum(
        120 * len(chart.bars) + 60 * len(chart.labels + chart.dots) + len(chart.raw) + len(chart.smooth)
        for panel in page.panels
        for chart in panel.charts
    )
    texts = sum(
        len(one.body if not one.pieces else one.rest) + sum(34 + len(piece.text) for piece in one.pieces)
        for panel in page.panels
        for one in panel.texts
    )
    cells = sum(
        20 + len(cell.text) + len(cell.href) for panel in page.panels for row in panel.body for cell in row
    )
    return texts + drawn + cells
