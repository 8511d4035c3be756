"""A run's pages as one HTML file, for one who has neither the ledger nor a server.

Boundary: what is worth a file's bytes, which no other part decides.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa

from scavenger.errors import ConfigError, LedgerError
from scavenger.ledger import store
from scavenger.ledger.read.reader import reading
from scavenger.protocol import keys
from scavenger.web import pages, questions, render
from scavenger.web.pages import Page, ask
from scavenger.web.questions import filled

#: Characters of text and cells that a file has of groups and samples.
MOST_CHARS = 8_000_000


def write(url: str, run: str, out: Path) -> dict[str, Page]:
    """Write the pages of the newest run of this name to `out`, mode 0600, and give them by their paths.

    Those of the run and its steps, other users' waits and the newest decisions; then groups and samples, the newest step's first, as
    many as `MOST_CHARS` allow. Raises `ConfigError` where `out` is there, `LedgerError`.
    """
    if out.exists():
        raise ConfigError(f"{out} is there already", "remove it, or name another file")
    engine, contents = store.open_readonly(url), pages.Contents()
    try:
        with reading(engine) as connection:
            store.require_head(connection)
            shown = collected(connection, contents, run, MOST_CHARS)
    finally:
        engine.dispose()
    keys.write_private(out, "".join(render.one_file(shown, f"run {pages.clean(run, 60)}")).encode())
    return shown


def collected(connection: sa.Connection, contents: pages.Contents, run: str, most: int) -> dict[str, Page]:
    """Pages by their paths, the run's own first. Raises `LedgerError` where there is no run of this name."""
    number = _newest(connection, run)
    steps = ask(connection, filled(questions.STEPS, run_id=number, most=questions.MOST_STEPS))
    shown = {
        f"/runs/{number}": pages.run(connection, number),
        "/": pages.overview(connection),
        "/harm": pages.harm(connection),
        "/decisions": pages.decisions(connection),
    }
    for row in steps:
        shown[f"/runs/{number}/steps/{row['step']}"] = pages.step(connection, number, row["step"])
    left = most
    for row in steps:
        asked = filled(questions.GROUPS, run_id=number, step=row["step"], most=questions.MOST_SAMPLES)
        for found in ask(connection, asked):
            path, build = _page_of(found, contents)
            made = build(connection)
            left -= _size(made)
            if left < 0:
                return shown
            shown[path] = made
    return shown


def _page_of(found: pages.Row, contents: pages.Contents) -> tuple[str, Callable[[sa.Connection], Page]]:
    if found["kind"] == "group":
        return f"/groups/{found['id']}", lambda c: pages.group(c, contents, found["id"])
    return f"/samples/{found['id']}", lambda c: pages.sample(c, contents, found["id"])


def _newest(connection: sa.Connection, run: str) -> int:
    statement = sa.text("SELECT run_id FROM v_runs WHERE name = :name ORDER BY run_id DESC LIMIT 1")
    found = connection.execute(statement, {"name": run}).scalar()
    if found is None:
        raise LedgerError(f"the ledger has no run {pages.clean(run, 60)!r}", "`scavenger web` lists its runs")
    return int(found)


def _size(page: Page) -> int:
    """Characters of a page, about."""
    texts = sum(
        len(one.body) + sum(60 + len(piece) for piece, _, _ in one.pieces)
        for panel in page.panels
        for one in panel.texts
    )
    return texts + sum(20 + len(cell.text) for panel in page.panels for row in panel.body for cell in row)
