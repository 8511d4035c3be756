"""What the documentation names must exist: links, scripts, SQL, examples and source files."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.pages import commands

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])

LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
HTML_LINK = re.compile(r"""(?:src|href)=["']([^"']+)["']""")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
# A path of ours, wherever prose or a command names it; <placeholder>, * and { mark a pattern, not a path.
NAMED = re.compile(r"(?<![\w./<$}-])(?:\./)?((?:scripts|sql|examples|benchmarks)/[\w./-]+)(?![\w<*{-])")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)


def identify(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """The fragment of each heading, as GitHub makes it."""
    headings = HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    bare = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in bare}


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    broken = []
    for target in [*LINK.findall(prose), *HTML_LINK.findall(prose)]:
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        name, _, fragment = target.partition("#")
        aim = (page.parent / unquote(name)).resolve() if name else page
        missing_anchor = fragment and aim.suffix == ".md" and aim.exists() and fragment not in anchors(aim)
        if not aim.exists() or missing_anchor or not aim.is_relative_to(ROOT):
            broken.append(target)
    assert not broken, f"{identify(page)} links to {broken}"


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_every_script_and_query_it_names_exists(page: Path) -> None:
    named = {name.rstrip(".") for name in NAMED.findall(page.read_text(encoding="utf-8"))}
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert not missing, f"{identify(page)} names {missing}"


def test_the_tour_counts_the_files_of_both_ways() -> None:
    """Issue: a chunk crosses at most 22 files and an idle GPU at most 20."""
    text = (ROOT / "docs/tour.md").read_text()
    chunk, gpu = text.split("## Walk 2")
    walks = [re.findall(r"^\| (\d+)\. `([\w/]+\.py)`", walk, re.MULTILINE) for walk in (chunk, gpu)]
    for walk, most in zip(walks, (22, 20), strict=True):
        assert [int(number) for number, _ in walk] == list(range(1, len(walk) + 1))
        assert len({path for _, path in walk}) == len(walk) <= most
        assert f"({len(walk)} files)" in text


def test_no_page_asks_for_sudo() -> None:
    """Who runs a command is said as a user: how an admin becomes that user is the site's own affair."""
    history = ("CHANGELOG.md", "docs/changelog-archive.md")
    asking = [
        page
        for page in map(identify, PAGES)
        if page not in history and re.search(r"\bsudo\b", (ROOT / page).read_text())
    ]
    assert asking == []


#: Pixels: the width that GitHub gives a README, and the most that its picture may take of a screen's height.
README_WIDTH, PICTURE_HEIGHT = 846, 320


def test_the_readme_fits_on_one_screen() -> None:
    """Issue: what it is, a picture of the real page, two commands, three links."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(commands.blocks(text)) == 2
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert len(LINK.findall(FENCE.sub("", text))) - len(pictures) == 3
    (picture,) = pictures
    assert Path(picture).stem in (ROOT / "tests/web/test_pictures.py").read_text(encoding="utf-8")
    width, height = struct.unpack(">II", (ROOT / picture).read_bytes()[16:24])  # a PNG's head
    assert height * min(1.0, README_WIDTH / width) <= PICTURE_HEIGHT
    assert len(text.splitlines()) <= 24
