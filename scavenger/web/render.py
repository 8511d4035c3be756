"""Pages as HTML: one as a server's reply, or many as one file that needs no server.

Boundary: jinja2 is imported here and nowhere else in this folder.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import jinja2

from scavenger.web import texts
from scavenger.web.panels import Page

HERE = Path(__file__).parent
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)
_TEMPLATES.globals.update(levels=texts.LEVELS, apart=texts.APART)
#: One page of the file shows at a time: the one that the address names after `#`, or a statement of, else the first.
_ONE_AT_A_TIME = """
main { display: none; } main:target, main:has(:target) { display: block; }
body:not(:has(main:target, main :target)) main:first-of-type { display: block; }
"""


def served(page: Page, prefix: str, here: str) -> str:
    """A page of the server. `prefix` stands before each path; `here`: this page's path."""

    def address(path: str) -> str:
        return f"{prefix}{path}" if path else ""

    return _TEMPLATES.get_template("page.html.j2").render(page=page, base=prefix, here=here, address=address)


def one_file(shown: Mapping[str, Page], title: str, left_out: str) -> Iterator[str]:
    """Parts of one HTML file with all these pages by their paths; a link to any other page is plain text. No script, nothing loaded. Each
    statement is printed once, on the first page that was made of it, and others lead there.

    `left_out`: what its head says of pages that are not there.
    """
    style = (HERE / "static/web.css").read_text(encoding="utf-8") + _ONE_AT_A_TIME
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()

    def address(path: str) -> str:
        return f"#{path}" if path in shown else ""

    known: dict[str, str] = {}

    def printed(sql: str) -> list[tuple[str, str, bool]]:
        """(the statement or its first line, where it is, whether that is here) of each statement of a panel."""
        found = []
        for one in filter(None, (f"{part.strip().rstrip(';')};" for part in sql.split(";\n\n"))):
            here = one not in known
            at = known.setdefault(one, f"q{len(known)}")
            found.append((one if here else one.splitlines()[0].removeprefix("-- "), at, here))
        return found

    pages: Iterable[tuple[str, Page]] = shown.items()
    yield from _TEMPLATES.get_template("file.html.j2").stream(
        shown=pages,
        title=title,
        left_out=left_out,
        style=style,
        digest=digest,
        address=address,
        printed=printed,
    )
