"""Commands that the pages show exist as they are written: the command, each of its options, and no argument too many.

They are parsed here, on every page; tests/pages runs them.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from scavenger.cli.main import app
from scavenger.cli.simulate import _default

ROOT = Path(__file__).resolve().parents[1]
#: What a release did then is no command of today.
HISTORY = {"CHANGELOG.md", "docs/changelog-archive.md", "docs/benchmarks-archive.md", "docs/cli.md"}
PAGES = [
    page
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    if page.relative_to(ROOT).as_posix() not in HISTORY
]
FENCE = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
# Not `user scavenger`: an account of that name.
BEGIN = re.compile(r"(?:^|(?<!user)[\s(;&|])(scavenger (?:[a-z].*))$")


def commands(text: str) -> list[str]:
    """Each `scavenger ...` of a page's code, up to what ends it in a shell."""
    code = [line for block in FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    code += [" ".join(said.split()) for said in INLINE.findall(FENCE.sub("", text))]
    found = []
    for line in code:
        match = BEGIN.search(re.sub(r"^[\w.@-]*[$#] ", "", line).split("#")[0].rstrip())
        if match is not None and match.start(1) < 60:
            found.append(re.split(r"[;|>&)]| 2>", match[1])[0].strip())
    return found


ROOT_COMMAND = typer.main.get_command(app)


def resolved(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words begin with, and the words after its name."""
    command: Any = ROOT_COMMAND
    at = 1
    while (inside := getattr(command, "commands", None)) is not None:
        if at >= len(words) or (words[at].startswith("-") and command.name != "simulate"):
            break
        inner = inside.get(words[at])
        if inner is None and command.name == "simulate":  # a survey, or a run's file, needs no name
            return inside[_default(words[at:])], words[at:]
        assert inner is not None, f"there is no command {' '.join(words[: at + 1])!r}"
        command, at = inner, at + 1
    return command, words[at:]


def wrong(line: str) -> str:
    """Why a command cannot be given as it is written; "" where it can."""
    try:
        words = shlex.split(line)
        command, rest = resolved(words)
    except (AssertionError, ValueError) as error:
        return str(error)
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
    for word in rest:
        name = word.split("=")[0]
        if re.match(r"--?[a-zA-Z]", word) and name not in known:
            return f"{line!r} has no option {name}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_each_command_of_a_page_can_be_given_as_it_is_written(page: Path) -> None:
    found = commands(page.read_text(encoding="utf-8"))
    assert [said for said in map(wrong, found) if said] == []


def test_commands_are_found_and_wrong_ones_are_told() -> None:
    text = "```\nscavenger web --sokket x   # a note\nexport A=b && scavenger samples RUN --best\n```\n"
    text += "and `scavenger\nnothing`, `scavenger top --once`"
    assert commands(text) == [
        "scavenger web --sokket x",
        "scavenger samples RUN --best",
        "scavenger nothing",
        "scavenger top --once",
    ]
    assert [bool(wrong(one)) for one in commands(text)] == [True, False, True, False]
    assert sum(len(commands(page.read_text(encoding="utf-8"))) for page in PAGES) > 150
