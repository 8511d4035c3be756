"""The pages as a release publishes them (docs/release.md): two versions in a bare repository, served below a prefix, read in a Chromium."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("mike")
pytest.importorskip("playwright")

from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
PREFIX = "scavenger"
OLD, NEW, LATEST = "0.2", "0.3", "latest"
#: A page that only the newer version has.
ADDED = "docs/added.md"
pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder that is served, and the address of its `PREFIX`."""
    folder = tmp_path_factory.mktemp("www")
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            yield folder, f"http://127.0.0.1:{serving.server_address[1]}/{PREFIX}/"
        finally:
            serving.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def published(server: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Both versions, as the commands of docs/release.md make and push them. Returns the address of all."""
    folder, address = server
    place = tmp_path_factory.mktemp("repository")
    work, bare = place / "work", place / "bare.git"
    work.mkdir()
    for name in ("docs", "scripts", "benchmarks"):
        shutil.copytree(ROOT / name, work / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml"):
        shutil.copy(file, work)
    who = {f"GIT_{one}_{what}": "t@t" for one in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environ = os.environ | who | {"SCAVENGER_DOCS_URL": address, "NO_MKDOCS_2_WARNING": "1"}
    environ |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}

    def run(*argv: object, cwd: Path = work) -> None:
        done = subprocess.run(
            list(map(str, argv)),
            cwd=cwd,
            env=environ,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    mike = (sys.executable, "-c", "from mike.driver import main; main()")
    run("git", "init", "-q", "--bare", bare)
    run("git", "init", "-q", "-b", "main")
    run("git", "add", ".")
    run("git", "commit", "-q", "-m", "the older release")
    run(*mike, "deploy", "--update-aliases", OLD, LATEST)
    run(*mike, "set-default", LATEST)
    (work / ADDED).write_text("# Added since\n\nBy the newer release.\n")
    pages = work / "mkdocs.yml"
    pages.write_text(pages.read_text().replace("  - questions.md\n", "  - questions.md\n  - added.md\n"))
    run("git", "add", ".")
    run("git", "commit", "-q", "-m", "the newer release")
    run(*mike, "deploy", "--update-aliases", NEW, LATEST)
    run("git", "push", "-q", bare, "gh-pages")
    run("git", "clone", "-q", "--branch", "gh-pages", bare, folder / PREFIX)
    return address


@pytest.fixture
def page(published: str) -> Iterator[Page]:
    with sync_playwright() as playwright:
        # Root in a container has no user namespaces: Chromium's own sandbox cannot be had there.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(20_000)
        yield page
        browser.close()


def choose(page: Page, version: str) -> None:
    """The switch in the page's head."""
    page.locator(".md-version__current").focus()
    page.locator(".md-version__link", has_text=version).click()


def test_the_address_of_all_leads_to_the_newest_version(published: str, page: Page) -> None:
    page.goto(published)
    page.wait_for_url(f"{published}{LATEST}/")
    expect(page.locator("h1")).to_contain_text("Scavenger")
    expect(page.locator(".md-version__current")).to_contain_text(NEW)
    expect(page.locator("[data-md-component=outdated]")).to_be_hidden()


def test_an_older_version_says_so_and_leads_to_the_newest(published: str, page: Page) -> None:
    page.goto(f"{published}{OLD}/decisions/0003-curve-keys.html")
    expect(page.locator(".md-version__current")).to_contain_text(OLD)
    banner = page.locator("[data-md-component=outdated]")
    expect(banner).to_be_visible()
    banner.get_by_role("link").click()
    page.wait_for_url(f"{published}{LATEST}/")


def test_the_switch_finds_the_same_page_in_the_other_version(published: str, page: Page) -> None:
    page.goto(f"{published}{LATEST}/decisions/0003-curve-keys.html")
    choose(page, OLD)
    page.wait_for_url(f"{published}{OLD}/decisions/0003-curve-keys.html")
    choose(page, NEW)
    page.wait_for_url(f"{published}{NEW}/decisions/0003-curve-keys.html")
    expect(page.locator("[data-md-component=outdated]")).to_be_hidden()


def test_a_page_that_the_other_version_does_not_have_leads_to_its_first_page(
    published: str, page: Page
) -> None:
    page.goto(f"{published}{LATEST}/added.html")
    expect(page.locator("h1")).to_contain_text("Added since")
    choose(page, OLD)
    page.wait_for_url(f"{published}{OLD}/")
    expect(page.locator("h1")).to_contain_text("Scavenger")


def test_what_is_published_names_its_versions_and_one_of_them_for_search_engines(
    server: tuple[Path, str], published: str
) -> None:
    folder = server[0] / PREFIX
    versions = json.loads((folder / "versions.json").read_text())
    assert [(one["version"], one["aliases"]) for one in versions] == [(NEW, [LATEST]), (OLD, [])]
    assert (folder / LATEST / "config.html").read_bytes() == (folder / NEW / "config.html").read_bytes()
    for version in (OLD, NEW):
        text = (folder / version / "config.html").read_text()
        assert f'<link rel="canonical" href="{published}{LATEST}/config.html">' in text
    assert not (folder / OLD / "added.html").exists()
