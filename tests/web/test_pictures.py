"""The pictures of the pages in `docs/`: a real Chromium draws each page as its picture has it, whatever the fonts.

To make them again after a change of the pages: SCAVENGER_PICTURES=write pytest tests/web/test_pictures.py, and look at them.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("starlette")
pytest.importorskip("playwright")

from playwright.sync_api import Browser, Page, expect, sync_playwright

from scavenger import resources
from tests.web import pictured
from tests.web.servers import serving

pytestmark = pytest.mark.browser
# A sample's page starts a process: on a busy machine that takes longer than the 5 s that are the default.
expect.set_options(timeout=60_000)
TOKEN = "t" * 32


class Picture(NamedTuple):
    """A page and its window's height in pixels; `section`: of it only the part with this heading. `marks`: what marks its tokens."""

    path: str
    height: int
    section: str = ""
    marks: str = ""


PICTURES = {
    "web-run": Picture("/runs/1", 720),
    "web-step": Picture("/runs/1/steps/40", 1060),
    "web-group": Picture("/groups/20", 740, marks="trainer - engine"),
    "web-sample": Picture("/samples/400", 920),
    # The README's: all of it is to fit on one screen.
    "web-moved": Picture("/samples/400", 920, "Engines"),
}
WIDTH = 1180
#: Both pictures are compared as a grid of cells of so many pixels, each the mean of its pixels: letters of another font are about as dark.
CELL = 20
#: A cell is another one where a channel differs by more than this of 255; of all cells so many may.
DIFFERS, MOST = 32, 0.02
COMPARE = """async ([one, other, cell]) => {
  const cells = async (data) => {
    const image = new Image();
    image.src = "data:image/png;base64," + data;
    await image.decode();
    const [w, h] = [Math.floor(image.width / cell), Math.floor(image.height / cell)];
    const canvas = new OffscreenCanvas(image.width, image.height);
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    const pixels = context.getImageData(0, 0, image.width, image.height).data;
    const sums = new Float64Array(w * h * 3);
    for (let y = 0; y < h * cell; y++) for (let x = 0; x < w * cell; x++) for (let c = 0; c < 3; c++)
      sums[(Math.floor(y / cell) * w + Math.floor(x / cell)) * 3 + c] += pixels[(y * image.width + x) * 4 + c];
    return [w, h, sums.map((sum) => sum / (cell * cell))];
  };
  const [w, h, a] = await cells(one), [w2, h2, b] = await cells(other);
  if (w !== w2 || h !== h2) return [];
  const out = [];
  for (let i = 0; i < w * h; i++) out.push(Math.max(...[0, 1, 2].map((c) => Math.abs(a[3 * i + c] - b[3 * i + c]))));
  return out;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Root in a container has no user namespaces: Chromium's own sandbox cannot be had there.
        opened = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("site")
    with contextlib.chdir(folder), serving(pictured.ledger(folder), TOKEN) as port:
        context = browser.new_context(
            base_url=f"http://127.0.0.1:{port}",
            color_scheme="light",
            reduced_motion="reduce",
            viewport={"width": WIDTH, "height": 900},
        )
        page = context.new_page()
        page.goto(f"/?token={TOKEN}")
        yield page
        context.close()


def drawn(page: Page, name: str, style: str = "") -> bytes:
    path, height, section, marks = PICTURES[name]
    page.set_viewport_size({"width": WIDTH, "height": height})
    page.goto(path)
    expect(page.locator("h1")).to_be_visible()
    if marks:
        page.get_by_role("radio", name=marks).check()
        page.locator("body").evaluate("() => document.activeElement.blur()")
    if style:  # the page's own policy allows no style of others: a property is set by the browser itself
        page.evaluate(
            "(style) => { for (const e of document.querySelectorAll(style[0])) e.style.setProperty(style[1], style[2]); }",
            style.split("|"),
        )
    part = page.locator("section", has=page.get_by_role("heading", name=section, exact=True))
    return (part if section else page).screenshot(animations="disabled", caret="hide")


def kept(name: str) -> Path:
    return resources.path("docs") / f"{name}.png"


@pytest.fixture(scope="module")
def empty(browser: Browser) -> Iterator[Page]:
    """Ours shows no picture of elsewhere, nor those that are compared."""
    page = browser.new_page()
    yield page
    page.close()


def differing(empty: Page, one: bytes, other: bytes) -> float:
    """Share of the cells that are others."""
    found = empty.evaluate(COMPARE, [*(base64.b64encode(some).decode() for some in (one, other)), CELL])
    return sum(cell > DIFFERS for cell in found) / len(found) if found else 1.0


@pytest.mark.parametrize("name", PICTURES)
def test_a_page_looks_as_its_picture_in_the_documentation(page: Page, empty: Page, name: str) -> None:
    shown = drawn(page, name)
    if os.environ.get("SCAVENGER_PICTURES") == "write":
        kept(name).write_bytes(shown)
    share = differing(empty, shown, kept(name).read_bytes())
    assert share <= MOST, (
        f"{share:.1%} of docs/{name}.png differ. Look at the page; if it is right, make the pictures again: "
        "SCAVENGER_PICTURES=write pytest tests/web/test_pictures.py"
    )


@pytest.mark.parametrize(
    ("style", "same"),
    [
        ("*|font-family|serif", True),
        ("*|font-family|monospace", True),
        ("figure|display|none", False),  # charts are gone
        ("section:nth-of-type(1)|margin-top|40px", False),  # all below is elsewhere
        ("rect|fill|red", False),
        ("body|background|black", False),
    ],
)
def test_another_font_is_the_same_picture_and_another_layout_is_not(
    page: Page, empty: Page, style: str, same: bool
) -> None:
    share = differing(empty, drawn(page, "web-step", style), kept("web-step").read_bytes())
    print(style, share)
    assert (share <= MOST) is same, share
