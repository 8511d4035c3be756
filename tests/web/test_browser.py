"""The web pages in a real Chromium: each is drawn without a complaint, light and dark, and axe finds nothing that shuts somebody out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

pytest.importorskip("starlette")
pytest.importorskip("playwright")

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from scavenger.ledger import store
from scavenger.web import export
from tests.web.servers import serving
from tests.web.sites import ledger
from tests.web.test_app import PATHS, TOKEN

pytestmark = pytest.mark.browser
# A sample's page starts a process: on a busy machine that takes longer than the 5 s that are the default.
expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Root in a container has no user namespaces: Chromium's own sandbox cannot be had there.
        opened = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(ledger(tmp_path_factory.mktemp("site")), TOKEN) as port:
        yield f"http://127.0.0.1:{port}"


_CUT = """() => [...document.querySelectorAll("svg text")].filter((one) => {
  const box = one.getBBox(), view = one.ownerSVGElement.viewBox.baseVal;
  return box.x < 0 || box.x + box.width > view.width + 0.5;
}).map((one) => one.textContent)"""


def opened(context: BrowserContext, complaints: list[str]) -> Page:
    page = context.new_page()
    page.on("console", lambda message: complaints.append(f"{page.url}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"{page.url}: {error}"))
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_drawn_without_a_complaint_and_shuts_nobody_out(
    browser: Browser, served: str, scheme: str
) -> None:
    complaints: list[str] = []
    context = browser.new_context(color_scheme="dark" if scheme == "dark" else "light")
    page = opened(context, complaints)
    page.goto(f"{served}/?token={TOKEN}")
    assert TOKEN not in page.url
    for path in PATHS:
        page.goto(served + path)
        expect(page.locator("h1")).to_be_visible()
        found = Axe().run(page)
        assert found.violations_count == 0, (path, scheme, found.generate_report())
        assert page.evaluate("document.body.scrollWidth <= innerWidth"), f"{path} is wider than the window"
        assert page.evaluate(_CUT) == [], f"{path}: labels that their chart cuts"
    context.close()
    assert complaints == []


def test_a_reader_goes_from_a_run_to_a_token_by_keyboard(browser: Browser, served: str) -> None:
    complaints: list[str] = []
    context = browser.new_context()
    page = opened(context, complaints)
    page.goto(f"{served}/?token={TOKEN}")
    for name, heading in (("sorting", "Run sorting"), ("1", "Step 1"), ("11", "Sample 11")):
        page.get_by_role("link", name=name, exact=True).first.focus()
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_have_text(heading)
    expect(page.locator("pre .p3").first).to_have_attribute("title", "0.00409; +1.25")
    page.go_back()
    page.go_back()
    page.get_by_label("Text").fill("w11003")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Search")
    expect(page.get_by_role("link", name="11", exact=True)).to_be_visible()
    context.close()
    assert complaints == []


#: Headless, every page is taken for one that is seen.
_HIDE = """(hidden) => {
  Object.defineProperty(document, "visibilityState", {configurable: true, get: () => hidden ? "hidden" : "visible"});
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_many_pages_keep_no_other_one_from_loading_and_one_that_is_seen_again_is_renewed(
    browser: Browser, tmp_path: Path
) -> None:
    """A browser has six connections for all pages of a host, and each page that follows takes one."""
    url, complaints = ledger(tmp_path), list[str]()
    with serving(url, TOKEN) as port:
        context = browser.new_context(base_url=f"http://127.0.0.1:{port}")
        first = opened(context, complaints)
        first.goto(f"/?token={TOKEN}")
        first.goto("/runs/1")
        first.evaluate(_HIDE, True)
        for _ in range(8):
            page = opened(context, complaints)
            page.goto("/samples/11", timeout=60_000)
            expect(page.locator("h1")).to_have_text("Sample 11")
            page.evaluate(_HIDE, True)
        rename(url, "renamed")
        assert first.locator("h1").inner_text() == "Run sorting"
        first.evaluate(_HIDE, False)
        expect(first.locator("h1")).to_have_text("Run renamed", timeout=60_000)
        context.close()
    assert complaints == []


def rename(url: str, name: str) -> None:
    """The run, as a transaction of the ledger's writer."""
    engine = store.open_engine(url)
    try:
        with engine.begin() as connection:
            connection.execute(sa.text("UPDATE runs SET name = :name"), {"name": name})
            connection.exec_driver_sql("UPDATE generations SET batch = batch + 1")
    finally:
        engine.dispose()


def test_a_page_whose_server_starts_again_says_so_and_is_live_again_with_the_token(
    browser: Browser, tmp_path: Path
) -> None:
    """The new server knows no cookie of the old one: it refuses the news until some page of this browser brings the token."""
    url, errors = ledger(tmp_path), list[str]()
    context = browser.new_context()
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    lost = page.locator("#lost")
    with serving(url, TOKEN, interval_s=0.1) as port:
        site = f"http://127.0.0.1:{port}"
        page.goto(f"{site}/?token={TOKEN}")
        page.goto(f"{site}/runs/1")
        page.wait_for_function("seen !== null")
        expect(lost).to_be_hidden()
    expect(lost).to_have_text("Not live: the server does not answer")
    rename(url, "renamed")
    with serving(url, TOKEN, port=port, interval_s=0.1):
        expect(lost).to_have_text("Not live: refused; open the address with the token again")
        page.evaluate("() => renew()")
        expect(lost).to_have_text("Not live: open the address with the token again")
        other = context.new_page()
        other.goto(f"{site}/?token={TOKEN}")
        expect(page.locator("h1")).to_have_text("Run renamed")
        expect(lost).to_be_hidden()
        page.wait_for_function("news !== null && news.readyState === EventSource.OPEN")
        rename(url, "again")
        expect(page.locator("h1")).to_have_text("Run again")
        context.close()
    assert errors == []


@pytest.mark.parametrize("page_of", ["/samples/11", "/groups/10"])
def test_the_reader_chooses_what_marks_the_tokens_and_keeps_it_when_the_page_is_renewed(
    browser: Browser, tmp_path: Path, page_of: str
) -> None:
    """By keyboard. The fourth token is 0.03 likely, and three quarters of a nat likelier to the trainer; the third is less likely to it."""
    complaints: list[str] = []

    def colour(page: Page, token: int) -> str:
        one = page.locator(f'span[title*=";"]:text("<w{token}>")')
        return str(one.evaluate("e => getComputedStyle(e).backgroundColor"))

    clear = "rgba(0, 0, 0, 0)"
    url = ledger(tmp_path)
    with serving(url, TOKEN) as port:
        context = browser.new_context(base_url=f"http://127.0.0.1:{port}")
        page = opened(context, complaints)
        page.goto(f"/?token={TOKEN}")
        page.goto(page_of)
        page.get_by_role("radio", name="none").check()
        assert {colour(page, 11_000 + i) for i in range(9)} == {clear}
        expect(page.locator(".key:visible")).to_have_count(0)
        page.get_by_role("radio", name="how likely each token was").check()
        likely = [colour(page, 11_000 + i) for i in range(9)]
        assert likely[0] == clear
        assert len(set(likely)) == 4, "as many marks as levels"
        page.keyboard.press("ArrowLeft" if page_of == "/samples/11" else "ArrowRight")
        page.get_by_role("radio", name="trainer - engine").check()
        expect(page.locator(".key.apart")).to_be_visible()
        apart = [colour(page, 11_000 + i) for i in range(9)]
        assert apart[0] == clear
        assert len({apart[1], apart[2], apart[3]} - {clear}) == 3, "two sides, and two strengths of one"
        assert apart[3] == apart[5]
        assert apart[2] == apart[4] != apart[3]
        assert Axe().run(page).violations_count == 0
        page.locator("body").evaluate("() => document.activeElement.blur()")
        page.evaluate("() => renew()")
        expect(page.get_by_role("radio", name="trainer - engine")).to_be_checked()
        assert [colour(page, 11_000 + i) for i in range(9)] == apart
        context.close()
    assert complaints == []


def test_the_sql_of_a_panel_is_copied(browser: Browser, served: str) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(f"{served}/?token={TOKEN}")
    page.locator("summary").first.click()
    page.get_by_role("button", name="Copy").first.click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == page.locator("details pre").first.inner_text()
    context.close()


def test_a_viewer_without_the_token_sees_nothing(browser: Browser, served: str) -> None:
    context = browser.new_context()
    page = context.new_page()
    reply = page.goto(served)
    assert reply is not None
    assert reply.status == 401
    assert page.inner_text("body").strip() == "401: no token"
    context.close()


def test_the_file_shows_one_page_at_a_time_from_the_disk(browser: Browser, tmp_path: Path) -> None:
    out = tmp_path / "run.html"
    export.write(ledger(tmp_path), "sorting", out)
    complaints: list[str] = []
    context = browser.new_context()
    page = opened(context, complaints)
    page.goto(out.as_uri())
    assert page.locator("main:visible h1").all_inner_texts() == ["Run sorting"]
    page.get_by_role("link", name="1", exact=True).first.click()
    assert page.locator("main:visible h1").all_inner_texts() == ["Step 1"]
    # A statement that several panels were made of is printed once: others lead there.
    page.locator("main:visible summary").nth(1).click()
    page.locator("main:visible details[open] a").first.click()
    expect(page.locator("pre:target")).to_be_visible()
    assert page.locator("main:visible h1").all_inner_texts() == ["Step 1"]
    page.locator("main:visible").get_by_role("link", name="11", exact=True).first.click()
    assert page.locator("main:visible h1").all_inner_texts() == ["Sample 11"]
    page.locator("main:visible").get_by_role("link", name="prompt and completion").click()
    assert page.locator("main:visible h1").all_inner_texts()[0].startswith("Episode 1: ")
    page.locator("main:visible").get_by_role("radio", name="trainer - engine").check()
    expect(page.locator("main:visible .key.apart")).to_be_visible()
    assert Axe().run(page).violations_count == 0
    context.close()
    assert complaints == []


#: Words of up to twelve letters of a table's cells that stand on two lines.
_BROKEN = r"""() => {
  const found = [];
  for (const cell of document.querySelectorAll("td, th")) {
    const walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    for (let node = walk.nextNode(); node; node = walk.nextNode())
      for (const word of node.data.matchAll(/(?<![^\s])[A-Za-z]{2,12}(?![^\s.,:;])/g)) {
        const range = document.createRange();
        range.setStart(node, word.index);
        range.setEnd(node, word.index + word[0].length);
        if (new Set([...range.getClientRects()].map((one) => Math.round(one.top))).size > 1) found.push(word[0]);
      }
  }
  return found;
}"""


@pytest.mark.parametrize("width", [1280, 800])
def test_no_word_of_a_table_is_broken(browser: Browser, served: str, width: int) -> None:
    """`harveste d` was seen in a table of engines."""
    context = browser.new_context(viewport={"width": width, "height": 900})
    page = opened(context, [])
    page.goto(f"{served}/?token={TOKEN}")
    for path in PATHS:
        page.goto(served + path)
        expect(page.locator("h1")).to_be_visible()
        assert page.evaluate(_BROKEN) == [], path
    context.close()
