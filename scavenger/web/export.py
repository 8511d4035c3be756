"""A run's pages as one HTML file, for one who has neither the ledger nor a server.

Boundary: what is worth a file's bytes, which no other part decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import sqlalchemy as sa

from scavenger.errors import ConfigError, LedgerError
from scavenger.ledger import store
from scavenger.ledger.read.reader import reading
from scavenger.protocol import keys
from scavenger.web import pages, questions, render, texts
from scavenger.web import steps as step_pages
from scavenger.web.panels import Page, Row, ask, clean
from scavenger.web.questions import filled

T = TypeVar("T")


class Reader(Protocol):
    """Gives what is made with a connection of the ledger."""

    def __call__(self, build: Callable[[sa.Connection], T], /) -> T: ...


#: Characters of text and cells that a file has of groups and samples.
MOST_CHARS = 8_000_000


def write(url: str, run: str, out: Path) -> dict[str, Page]:
    """Write the pages of the newest run of this name to `out`, mode 0600, and give them by their paths.

    Those of the run and its steps, other users' waits and the newest decisions; then groups and samples, the newest step's first, as
    many as `MOST_CHARS` allow. Raises `ConfigError` where `out` is there, `LedgerError`.
    """
    if out.exists():
        raise ConfigError(f"{out} is there already", "remove it, or name another file")
    engine = store.open_readonly(url)

    def ask_for(build: Callable[[sa.Connection], T]) -> T:
        """In a transaction of its own: the daemon's log cannot be written back during one."""
        with reading(engine) as connection:
            return build(connection)

    try:
        with reading(engine) as connection:
            store.require_head(connection)
        with texts.Child() as child:
            shown = collected(ask_for, pages.Contents(child), run, MOST_CHARS)
    finally:
        engine.dispose()
    keys.write_private(out, "".join(render.one_file(shown, f"run {clean(run, 60)}")).encode())
    return shown


def collected(ask_for: Reader, contents: pages.Contents, run: str, most: int) -> dict[str, Page]:
    """Pages by their paths, the run's own first. Raises `LedgerError` where there is no run of this name."""
    number = ask_for(lambda c: _newest(c, run))
    steps = ask_for(lambda c: ask(c, filled(questions.STEPS, run_id=number, most=questions.MOST_STEPS)))
    shown = {
        f"/runs/{number}": ask_for(lambda c: pages.run(c, number)),
        "/harm": ask_for(pages.harm),
        "/decisions": ask_for(pages.decisions),
    }
    numbers = [int(row["step"]) for row in steps]
    for step in numbers:
        shown[f"/runs/{number}/steps/{step}"] = ask_for(functools.partial(_step, number, step))
    left = most
    for step in numbers:
        asked = filled(questions.GROUPS, run_id=number, step=step, most=questions.MOST_SAMPLES)
        for found in ask_for(functools.partial(ask, sql=asked)):
            path, build = _page_of(found, contents)
            made = ask_for(build)
            left -= _size(made)
            if left < 0:
                return shown
            shown[path] = made
    return shown


def _step(run: int, step: int, connection: sa.Connection) -> Page:
    return step_pages.step(connection, run, step)


def _page_of(found: Row, contents: pages.Contents) -> tuple[str, Callable[[sa.Connection], Page]]:
    if found["kind"] == "group":
        return f"/groups/{found['id']}", lambda c: pages.group(c, contents, found["id"])
    return f"/samples/{found['id']}", lambda c: pages.sample(c, contents, found["id"])


def _newest(connection: sa.Connection, run: str) -> int:
    statement = sa.text("SELECT run_id FROM v_runs WHERE name = :name ORDER BY run_id DESC LIMIT 1")
    found = connection.execute(statement, {"name": run}).scalar()
    if found is None:
        raise LedgerError(f"the ledger has no run {clean(run, 60)!r}", "`scavenger web` lists its runs")
    return int(found)


def _size(page: Page) -> int:
    """Characters of a page, about."""
    texts = sum(
        len(one.body) + sum(60 + len(piece) for piece, _, _ in one.pieces)
        for panel in page.panels
        for one in panel.texts
    )
    return texts + sum(20 + len(cell.text) for panel in page.panels for row in panel.body for cell in row)
