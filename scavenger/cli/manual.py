"""Manual pages, made from the commands' own definitions: `python -m scavenger.cli.manual DIR` writes them.

    DIR/scavenger.1, scavenger-daemon.1, scavenger-ledger-export.1 ...    one a command, in man's own language

Dates come from `SOURCE_DATE_EPOCH`, so that two builds of one release are the same bytes. `scripts/build-deb` ships them.

Boundary: text out of the commands' declarations. It runs no command.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from typer.main import get_command

from scavenger import __version__
from scavenger.cli.main import app
from scavenger.cli.reference import scavenger_codes

NAME = "scavenger"


def pages(date: str) -> dict[str, str]:
    """File name to text (roff, macros of man(7)) of every command that is not hidden. `date`: YYYY-MM-DD."""
    found = dict(_commands(get_command(app), NAME))
    return {
        f"{words.replace(' ', '-')}.1": _page(words, command, context, date, sorted(found))
        for words, (command, context) in found.items()
    }


def escape(text: str) -> str:
    """Text as roff prints it: no character of it is taken for a request or an escape."""
    text = re.sub(r"\s+", " ", text.strip()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text[:1] in (".", "'") else text


def _commands(command: Any, words: str, parent: Any = None) -> Iterator[tuple[str, tuple[Any, Any]]]:
    context = command.make_context(words.rsplit(" ", 1)[-1], [], parent=parent, resilient_parsing=True)
    yield words, (command, context)
    for name, child in sorted(getattr(command, "commands", {}).items()):
        if not child.hidden:
            yield from _commands(child, f"{words} {name}", context)


def _page(words: str, command: Any, context: Any, date: str, known: list[str]) -> str:
    parameters = [one for one in command.get_params(context) if not getattr(one, "hidden", False)]
    arguments = [one for one in parameters if one.param_type_name == "argument"]
    options = [one for one in parameters if one.param_type_name == "option"]
    said = command.help or ""
    lines = [
        f'.TH "{words.replace(" ", "-").upper()}" 1 {date} "scavenger {__version__}" "Scavenger"',
        ".ad l",
        ".SH NAME",
        f"{escape(words.replace(' ', '-'))} \\- {escape(_summary(said))}",
        ".SH SYNOPSIS",
        f".B {escape(words)}",
        *(escape(piece) for piece in command.collect_usage_pieces(context)),
        ".SH DESCRIPTION",
        *_paragraphs(said),
    ]
    for title, group in (("ARGUMENTS", arguments), ("OPTIONS", options)):
        if group:
            lines += [f".SH {title}", *(line for one in group for line in _parameter(one, context))]
    children = [
        one for one in known if one.startswith(f"{words} ") and one.count(" ") == words.count(" ") + 1
    ]
    if children:
        lines.append(".SH COMMANDS")
        for one in children:
            child = command.commands[one.rsplit(" ", 1)[-1]]
            lines += [".TP", f".B {escape(one)}", escape(child.get_short_help_str(200))]
    lines.append(".SH EXIT STATUS")
    for code, meaning in sorted(scavenger_codes().items()):
        lines += [".TP", f".B {code}", escape(f"{meaning[:1].upper()}{meaning[1:]}.")]
    if words == NAME:
        lines += [".SH FILES", ".TP", ".I /etc/scavenger/scavenger.toml", "The daemon's configuration."]
        lines += [".SH ENVIRONMENT", ".TP", ".B SCAVENGER_CONFIG", "Path of the configuration."]
    else:
        lines += [".SH SEE ALSO", f".BR {escape(words.rsplit(' ', 1)[0].replace(' ', '-'))} (1)"]
    return "\n".join(lines) + "\n"


def _summary(text: str) -> str:
    """The first clause of a help text, as `whatis` shows it."""
    clause = re.split(r"(?<=[\w)`])[.:;]\s|\n\s*\n", text.strip(), maxsplit=1)[0].rstrip(".")
    return clause.split(" (", 1)[0] if clause.count("(") > clause.count(")") else clause


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text.strip())):
        if number:
            yield ".PP"
        yield escape(paragraph)


def _parameter(one: Any, context: Any) -> Iterator[str]:
    names, said = one.get_help_record(context) or (one.name, "")
    yield ".TP"
    yield f".B {escape(names)}"
    yield escape(said or "See the description.")


def main(folder: Path, environ: Mapping[str, str]) -> None:
    """Write the pages into `folder`."""
    date = time.strftime("%Y-%m-%d", time.gmtime(int(environ.get("SOURCE_DATE_EPOCH") or time.time())))
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages(date).items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), os.environ)
