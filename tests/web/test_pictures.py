"""The pictures of the pages, in `docs/` and beside these tests: a real Chromium draws each page as its picture has it, in one font.

To make them again after a change of the pages: SCAVENGER_PICTURES=write pytest tests/web/test_pictures.py, and look at them.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("starlette")
pytest.importorskip("playwright")

from playwright.sync_api import Browser, Page, expect, sync_playwright

from scavenger import resources
from tests.web import pictured
from tests.web.servers import serving
from tests.web.sites import ledger

pytestmark = pytest.mark.browser
# A sample's page starts a process: on a busy machine that takes longer than the 5 s that are the default.
expect.set_options(timeout=60_000)
TOKEN = "t" * 32


class Picture(NamedTuple):
    """A page and its window's height in pixels; `section`: of it only the part with this heading. `marks`: what marks its tokens. `of`:
    the ledger that it shows, of `LEDGERS`."""

    path: str
    height: int
    section: str = ""
    marks: str = ""
    of: str = "finished"
    dark: bool = False
    #: What of it depends on the clock, and is hidden in the picture.
    clocked: str = ""


#: Those of the documentation, by their names there.
PICTURES = {
    "web-run": Picture("/runs/1", 720),
    "web-step": Picture("/runs/1/steps/40", 1060),
    "web-group": Picture("/groups/20", 740, marks="trainer - engine"),
    "web-sample": Picture("/samples/400", 920),
    # The README's: all of it is to fit on one screen.
    "web-moved": Picture("/samples/400", 920, "Engines"),
}
#: Of all other kinds of page, in `KEPT`.
OTHERS = {
    "overview": Picture("/", 720),
    "compare": Picture("/compare?runs=1", 720),
    "search": Picture("/runs/1/search?q=115578", 500),
    "sample-dark": Picture("/samples/400", 920, dark=True),
    "evaluation": Picture("/runs/1/evals/1", 1000, of="small"),
    "episode": Picture("/episodes/1", 900, of="small"),
    "harm": Picture(
        "/harm", 900, of="small", clocked="section:first-of-type td:nth-child(3)"
    ),  # hours until now
    "decisions": Picture("/decisions", 500, of="small"),
}
LEDGERS: dict[str, Callable[[Path], str]] = {"finished": pictured.ledger, "small": ledger}
KEPT = Path(__file__).parent / "pictures"
WIDTH = 1180
#: Two pictures are alike where the machines draw the same letters: those of one font, unhinted, in grey.
ARGUMENTS = ["--no-sandbox", "--font-render-hinting=none", "--disable-lcd-text", "--force-color-profile=srgb"]
#: Debian's fontconfig brings it, and so does Chromium there.
FONT = "DejaVu Sans"
FONTS = f"* {{ font-family: '{FONT}' !important; }} pre, pre * {{ font-family: '{FONT} Mono' !important; }}"
#: Both pictures are compared as a grid of cells of so many pixels, each the mean of its pixels: edges of letters and lines are smoothed in
#: more than one way.
CELL = 6
#: A cell is another one where a channel differs by more than this of 255; of all cells so many may. The mark of one
#: token that is gone is more.
DIFFERS, MOST = 16, 0.0001
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
        opened = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def pages(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Page]]:
    """A page of each ledger's server."""
    with contextlib.ExitStack() as stack:
        found, folders = {}, {name: tmp_path_factory.mktemp(name) for name in LEDGERS}
        # The finished run's tokenizer is named as it lies below the working directory.
        stack.enter_context(contextlib.chdir(folders["finished"]))
        for name, made in LEDGERS.items():
            port = stack.enter_context(serving(made(folders[name]), TOKEN))
            context = browser.new_context(
                base_url=f"http://127.0.0.1:{port}",
                reduced_motion="reduce",
                viewport={"width": WIDTH, "height": 900},
            )
            stack.callback(context.close)
            found[name] = context.new_page()
            found[name].goto(f"/?token={TOKEN}")
        yield found


#: The page's own policy allows no style of others in its text; a sheet that the browser itself makes is none.
_STYLED = """(css) => {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(css);
  document.adoptedStyleSheets = [sheet];
}"""


def _hidden(what: str) -> str:
    return f"{what} {{ visibility: hidden !important; }}"


def drawn(pages: dict[str, Page], name: str, css: str = "") -> bytes:
    path, height, section, marks, of, dark, clocked = {**PICTURES, **OTHERS}[name]
    page = pages[of]
    page.emulate_media(color_scheme="dark" if dark else "light")
    page.set_viewport_size({"width": WIDTH, "height": height})
    page.goto(path)
    expect(page.locator("h1")).to_be_visible()
    page.evaluate(_STYLED, FONTS + css + (_hidden(clocked) if clocked else ""))
    if marks:
        page.get_by_role("radio", name=marks).check()
        page.locator("body").evaluate("() => document.activeElement.blur()")
    part = page.locator("section", has=page.get_by_role("heading", name=section, exact=True))
    return (part if section else page).screenshot(animations="disabled", caret="hide")


def kept(name: str) -> Path:
    return resources.path("docs") / f"{name}.png" if name in PICTURES else KEPT / f"{name}.png"


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


def test_the_font_of_the_pictures_is_there(empty: Page) -> None:
    """Without it all pictures would differ, and none would say why."""
    width = """(font) => {
      const context = new OffscreenCanvas(1, 1).getContext("2d");
      context.font = `20px ${font}`;
      return context.measureText("Scavenger 0123 mmm iii").width;
    }"""
    for name in (FONT, f"{FONT} Mono"):
        found = {empty.evaluate(width, f"'{name}', {other}") for other in ("serif", "monospace", "cursive")}
        assert len(found) == 1, f"no {name}: install fonts-dejavu-core"


@pytest.mark.parametrize("name", [*PICTURES, *OTHERS])
def test_a_page_looks_as_its_picture(pages: dict[str, Page], empty: Page, name: str) -> None:
    shown = drawn(pages, name)
    if os.environ.get("SCAVENGER_PICTURES") == "write":
        kept(name).parent.mkdir(exist_ok=True)
        kept(name).write_bytes(shown)
    share = differing(empty, shown, kept(name).read_bytes())
    assert share <= MOST, (
        f"{share:.2%} of {kept(name).name} differ. Look at the page; if it is right, make the pictures again: "
        "SCAVENGER_PICTURES=write pytest tests/web/test_pictures.py"
    )


@pytest.mark.parametrize(
    ("name", "css", "same"),
    [
        # As other machines draw the same letters: bolder, and at other parts of a pixel.
        ("web-step", "* { -webkit-text-stroke: 0.1px; }", True),
        ("web-group", "* { -webkit-text-stroke: 0.1px; }", True),
        ("sample-dark", "main { transform: translate(0.2px, 0.2px); }", True),
        ("web-run", _hidden("polyline.smooth"), False),
        ("web-run", _hidden("polyline.raw"), False),
        ("web-run", _hidden(".mark"), False),
        ("web-run", _hidden("svg text"), False),
        ("compare", _hidden("polyline"), False),
        ("overview", _hidden(".mark"), False),
        ("web-step", _hidden("svg text"), False),
        ("web-step", "td { color: transparent !important; }", False),
        ("web-sample", "td:not(.r) { color: transparent !important; }", False),
        ("web-sample", _hidden(".note"), False),
        ("web-group", _hidden(".note"), False),
        ("web-group", "pre span { background: none !important; }", False),
        ("web-sample", "pre span { background: none !important; }", False),
        ("sample-dark", "pre { color: transparent !important; }", False),
        ("search", "td { color: transparent !important; }", False),
        ("web-step", "figure { display: none !important; }", False),
        ("web-step", "section:nth-of-type(1) { margin-top: 40px !important; }", False),
        ("web-step", "rect { fill: red !important; }", False),
        ("web-step", "body { background: black !important; }", False),
    ],
)
def test_what_a_page_lost_is_another_picture_and_another_machine_s_letters_are_not(
    pages: dict[str, Page], empty: Page, name: str, css: str, same: bool
) -> None:
    share = differing(empty, drawn(pages, name, css), kept(name).read_bytes())
    print(name, css, share)
    assert (share <= MOST) is same, share
