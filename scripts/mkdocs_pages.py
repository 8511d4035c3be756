"""A hook of MkDocs (mkdocs.yml): pages that lie outside `docs/` are pages of the site too, under `project/`.

In the repository they stay where their readers look for them: beside the code, or where GitHub expects them.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PREFIX = "project/"
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/policies.md",
    "benchmarks/policies-live.md",
)
#: The README is the site's first page, in other words.
ELSEWHERE = {"README.md": "index.md", "AGENTS.md": f"{PREFIX}CONTRIBUTING.md"}

#: History, licences and what is made of the code: a search shows them last, so that a page that answers comes first.
LAST_FOUND = (
    "benchmarks-archive.md",
    "changelog-archive.md",
    "client.md",
    "decisions/",
    "licences.md",
    "schema.md",
    f"{PREFIX}CHANGELOG.md",
    f"{PREFIX}benchmarks/",
)
#: The least weight of a page's hits that still finds it (Material's `search: boost`).
LAST_BOOST = 0.01

LINK = re.compile(r"(?<=\]\()([^)\s#]+\.(?:md|svg))(?=[#)])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of `OUTSIDE`."""
    for name in OUTSIDE:
        files.append(File.generated(config, PREFIX + name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between both trees lead to the pages' places on the site, and the search puts some pages last. In the list of pages
    (sitemap.xml) the first one is the folder: Material's switch of versions finds the others from there.
    """
    if page.is_homepage and page.canonical_url:
        page.canonical_url = page.canonical_url.removesuffix("index.html")
    here = page.file.src_uri
    if here.startswith(LAST_FOUND):
        page.meta["search"] = {"boost": LAST_BOOST}
    outside = here.startswith(PREFIX)
    source = here.removeprefix(PREFIX) if outside else f"docs/{here}"

    def moved(match: re.Match[str]) -> str:
        aim = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        if aim.startswith("docs/"):
            aim = aim.removeprefix("docs/")
        elif aim in OUTSIDE:
            aim = PREFIX + aim
        elif aim in ELSEWHERE:
            aim = ELSEWHERE[aim]
        else:
            return match[1]
        return posixpath.relpath(aim, posixpath.dirname(here) or ".")

    return LINK.sub(moved, markdown)
