"""Writes docs/licences.md: name, version and licence of every package in constraints.txt, as the installed packages declare them.

    .venv/bin/python scripts/licences.py > docs/licences.md

Run it after constraints.txt changed, in the environment that scripts/bootstrap made. A package that is not installed is looked up in the
page as it stands, so that one machine's set does not unlearn another's.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/licences.md"
UNKNOWN = "not declared: see its own files"
ROW = re.compile(r"^\| ([\w.-]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
HEAD = """\
# Licences of what is installed beside it

Scavenger is under the Apache License 2.0. It contains no other project's code. These are the packages that it
was tested with (`constraints.txt`, all extras), each with the licence that it declares; pip installs them from
their own authors. The [Debian package](install.md#debian-and-ubuntu) carries those of the base, `[postgres]` and `[top]`, each
with its licence's text in its `*.dist-info` folder. Made by `scripts/licences.py`.

"""


def pinned() -> dict[str, str]:
    """Name to version, of constraints.txt."""
    lines = (
        line.split("#")[0].split(";")[0].strip()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    )
    return dict(line.split("==", 1) for line in lines if "==" in line)


def declared(name: str) -> str | None:
    """The licence that an installed package declares: its expression, its classifiers, or the first line of its text."""
    try:
        about = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
    classifiers = [
        one.rsplit(" :: ", 1)[-1] for one in about.get_all("Classifier") or () if one.startswith("License ::")
    ]
    words = about.get("License-Expression") or " and ".join(
        one for one in classifiers if one != "OSI Approved"
    )
    said = words or (about.get("License") or "").strip().split("\n")[0]
    return said.replace("|", "/")[:80] if said and said != "UNKNOWN" else UNKNOWN


def page() -> str:
    before = {name: licence for name, _, licence in ROW.findall(PAGE.read_text() if PAGE.exists() else "")}
    rows = [
        f"| {name} | {version} | {declared(name) or before.get(name, UNKNOWN)} |"
        for name, version in sorted(pinned().items(), key=lambda one: one[0].lower())
    ]
    return HEAD + "\n".join(["| package | version | licence |", "| --- | --- | --- |", *rows]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
