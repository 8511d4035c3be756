"""A run's pages as one HTML file, for one who has neither the ledger nor a server.

Boundary: what is worth a file's bytes, which no other part decides.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import sqlalchemy as sa

from scavenger.errors import ConfigError, LedgerError, LedgerUnavailable
from scavenger.ledger import store
from scavenger.ledger.read.reader import kept
from scavenger.protocol import keys
from scavenger.web import pages, questions, render, texts
from scavenger.web import steps as step_pages
from scavenger.web.panels import Page, Row, ask, clean
from scavenger.web.questions import filled

T = TypeVar("T")


class Reader(Protocol):
    """Gives what is made with a connection of the ledger."""

    def __call__(self, build: Callable[[sa.Connection], T], /) -> T: ...


#: Characters of text and cells that a file has of what is not a run's, a step's or an evaluation's own page.
MOST_CHARS = 8_000_000
LEFT_OUT = (
    "Not in this file: a search of the completions, prompts whose rewards changed since an earlier step, older decisions, and what is "
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

    def take(self, path: str, build: Callable[[sa.Connection], Page]) -> bool:
        """Whether there was room; from the first one that has none on none is taken. What the ledger does not have, such as an episode
        without a turn yet, or a sample that was purged meanwhile, takes none."""
        if path in self._shown:
            return True
        try:
            made = self._ask_for(build)
        except LedgerError as error:
            if isinstance(error, LedgerUnavailable) or "has no" not in error.cause:
                raise
            return True
        return self.take_all({path: made})

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
    steps, evaluations = (
        ask_for(functools.partial(ask, sql=filled(sql, run_id=number, most=questions.MOST_STEPS)))
        for sql in (questions.STEPS, questions.EVALUATIONS)
    )
    whole = ask_for(lambda c: pages.run(c, number))
    shown = {
        f"/runs/{number}": dataclasses.replace(
            whole, panels=tuple(panel for panel in whole.panels if not panel.search)
        ),
        "/": ask_for(pages.overview),
        "/harm": ask_for(pages.harm),
        "/decisions": ask_for(pages.decisions),
    }
    for _, path, _ in shown["/"].panels[0].choices:
        together = [int(one) for one in path.partition("=")[2].split(",")]
        shown[path] = ask_for(functools.partial(pages.compare, run_ids=together))
    for row in steps:
        path = f"/runs/{number}/steps/{row['step']}"
        shown[path] = ask_for(functools.partial(step_pages.step, run_id=number, number=row["step"]))
    for row in evaluations:
        path = f"/runs/{number}/evals/{row['step']}"
        shown[path] = ask_for(functools.partial(step_pages.evaluation, run_id=number, number=row["step"]))

    # Decisions and episodes leave room for the steps'.
    some = _Room(ask_for, shown, most // 4)
    listed = _linked(shown["/decisions"], "/decisions/")
    for path in listed:
        if not some.take(path, functools.partial(pages.decision, number=_id(path))):
            break
    for path in _linked(whole, "/episodes/"):
        if not some.take(path, functools.partial(pages.episode, contents=contents, episode_id=_id(path))):
            break
    room = _Room(ask_for, shown, most - most // 4 + some.left)
    of = {(row["step"], False) for row in steps} | {(row["step"], True) for row in evaluations}
    narrowed, moved = 0, set[str]()
    for step, evaluation in sorted(of, key=lambda one: (-one[0], one[1])):
        here = shown[f"/runs/{number}/{'evals' if evaluation else 'steps'}/{step}"]
        for path in _linked(here, "/episodes/"):
            room.take(path, functools.partial(pages.episode, contents=contents, episode_id=_id(path)))
        found = _found_of(ask_for, room, number, step, evaluation)
        narrowed += bool(room.left)
        moved |= {f"/samples/{one['id']}" for one in found if one["kind"] == "sample" and one["moves"]}
        if not all(room.take(*page) for one in found for page in _pages_of(one, contents, every_sample)):
            break
        if not room.left:
            break
    (there,) = ask_for(functools.partial(ask, sql=filled(questions.KEPT, run_id=number)))
    narrow = ("filters of steps and evaluations", len(of) - narrowed, len(of))
    return _counted(shown, there, moved, len(listed), narrow, every_sample=every_sample)


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

    def missing(what: str, below: str, most: int) -> Missing:
        return what, max(0, most - sum(path.startswith(below) for path in shown)), most

    return Collected(
        shown,
        0 if every_sample else unmoved,
        (
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


def _pages_of(
    found: Row, contents: pages.Contents, every_sample: bool
) -> Iterator[tuple[str, Callable[[sa.Connection], Page]]]:
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
        raise LedgerError(f"the ledger has no run {clean(run, 60)!r}", "`scavenger web` lists its runs")
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
