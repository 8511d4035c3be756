"""The documentation's site as a folder: a real Chromium opens it without a server, searches it, and asks nothing of any host."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("playwright")

from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
#: What a page loads when it is opened, of another host.
LOADED = re.compile(
    r"""<(?:script|img|iframe)[^>]*\ssrc=["']?(https?://[^"'\s>]+)|<link[^>]*rel=["']?stylesheet[^>]*(https?://[^"'\s>]+)"""
)
#: iframe-worker 1.0.4, `shim/index.js` of its npm package.
IFRAME_WORKER = "e8e412dbcfea9b7e31b5ffa288d7b6035915e714c542f4176a0cdbe262fc9609"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=True,
        timeout=120,
    )
    return folder


@pytest.fixture
def asked(site: Path) -> Iterator[tuple[Page, list[str]]]:
    """A page of a browser, and the addresses that it asked for."""
    with sync_playwright() as playwright:
        # Root in a container has no user namespaces: Chromium's own sandbox cannot be had there.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page, addresses = browser.new_page(), list[str]()
        page.on("request", lambda request: addresses.append(request.url))
        yield page, addresses
        browser.close()


@pytest.mark.browser
@pytest.mark.parametrize("first", ["index.html", "decisions/0003-curve-keys.html"])
def test_a_site_in_a_folder_is_searched_without_a_server(
    site: Path, asked: tuple[Page, list[str]], first: str
) -> None:
    page, addresses = asked
    page.goto((site / first).as_uri())
    page.locator(".md-search__input").click()
    page.keyboard.type("headroom_gpus", delay=20)
    results = page.locator(".md-search-result__link")
    expect(results.filter(has_text="Configuration").first).to_be_visible(timeout=60_000)
    results.filter(has_text="Harmless").first.click()
    expect(page.locator("h1")).to_contain_text("Harmless")
    assert page.url.startswith((site / "harmless.html").as_uri())
    assert [one for one in addresses if one.startswith("file:")]
    assert [one for one in addresses if one.startswith(("http:", "https:", "ws:", "wss:"))] == []


@pytest.mark.browser
def test_a_question_in_plain_words_finds_the_section_that_answers_it(
    site: Path, asked: tuple[Page, list[str]]
) -> None:
    """Each among the first four pages; what is history or made of the code comes after them."""
    page, _ = asked
    page.goto((site / "index.html").as_uri())
    page.locator(".md-search__input").click()
    for words, section in (
        ("key leaked", "SECURITY.html#when-a-key-may-have-leaked"),
        ("exclude node", "recovery.html#engines-die-on-one-node"),
        ("truncated completions", "algorithms.html#truncated-completions"),
        ("offline", "models.html#without-internet"),
        ("maintenance", "admin.html#stop-it-or-empty-nodes"),
        ("real GPUs", "questions.html#has-it-run-on-real-gpus"),
        ("which operating system and CUDA are required?", "install.html#requirements"),
        ("what is lost when GPUs are taken back", "questions.html#what-happens-to-my-samples"),
        ("how do I use my own reward function", "rewards.html#your-own-reward-function"),
        ("how to limit off-policy staleness", "staleness.html#asynchronous"),
        ("how do I install it offline", "install.html#without-internet"),
        ("how can I change the learning rate in the middle of a run?", "checkpoints.html#go-back"),
        ("harvest.gpu_type", "config.html#harvest"),
        ("compared with TRL verl reward curve", "questions.html#are-its-results"),
        ("GPU types GRES A100 L40S", "questions.html#one-run-on-mixed"),
        ("untrusted code reward", "questions.html#my-reward-runs-generated"),
        ("stray processes on a node", "questions.html#what-stays-on-a-node"),
        ("login node memory cpu", "questions.html#is-it-safe-on-a-login-node"),
        ("file permissions of keys", "questions.html#which-files-are-secret"),
        ("no workers started why", "questions.html#my-run-waits"),
        ("engine job time limit --time", "questions.html#which-time-limit"),
        ("cpu cores and memory per worker job", "questions.html#which-time-limit"),
        ("how many jobs per day slurmdbd", "questions.html#how-many-jobs"),
        ("power saving powered down nodes", "questions.html#does-it-wake"),
        ("--dry-run", "questions.html#is-there-a-dry-run"),
        ("telemetry", "questions.html#does-it-send-anything"),
        ("how long does training take", "questions.html#what-do-we-gain"),
    ):
        page.keyboard.press("Control+A")
        page.keyboard.type(words)
        name, fragment = section.split("#")
        link = f"a[href*='{name}'][href*='#{fragment}']"  # between both stands what was searched
        found = page.locator(f".md-search-result__item:nth-child(-n+4) {link}").first
        expect(found).to_be_attached(timeout=60_000)


def test_history_and_reference_are_found_last(site: Path) -> None:
    entries = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))["docs"]
    last = {
        entry["location"].split(".html")[0].split("/")[0] for entry in entries if entry.get("boost") == 0.01
    }
    assert last == {
        *("benchmarks-archive", "changelog-archive", "client", "decisions", "licences", "schema", "project")
    }
    behind = {entry["location"].split("#")[0] for entry in entries if "boost" in entry}
    assert "project/CHANGELOG.html" in behind
    assert not behind & {"project/SECURITY.html", "project/CONTRIBUTING.html", "config.html", "cli.html"}


def test_no_page_of_the_site_loads_anything_of_another_host(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    found = {page.name: LOADED.findall(page.read_text(encoding="utf-8")) for page in pages}
    assert {name: some for name, some in found.items() if some} == {}


def test_the_file_of_another_project_is_as_it_came_and_has_its_licence_beside_it(site: Path) -> None:
    file = site / "assets/iframe-worker.js"
    assert sha256(file.read_bytes()).hexdigest() == IFRAME_WORKER
    assert "Copyright (c) 2020-2022 Martin Donath" in file.with_name("iframe-worker.LICENSE.txt").read_text()
    assert "`docs/assets/iframe-worker.js`" in (ROOT / "docs/licences.md").read_text()
