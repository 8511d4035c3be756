"""The commands that pages show: lines of their shell blocks, statements of their SQL blocks, and what their prose quotes.

Owns how they are found. Knows nothing of what they do.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^( *)```([a-z]*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
#: Who types a line: a prompt, as `root#` or `scavenger$`.
PROMPT = re.compile(r"^[\w.-]+[$#]\s+")
COMMENT = re.compile(r"\s+#\s.*$")
#: Blocks in no language whose first line begins so: files, formulas, what a program prints, pictures.
NO_COMMANDS = (
    "# slurm.conf",
    "PreemptType=",
    "run math gets",
    "one of run code",
    '{"budget"',
    "step_s =",
    "prompt of a turn =",
    "watchdog: ",
    " ",
    "scavenger/ ",
)
#: Lines of shell blocks that a program replies.
REPLIES = ('{"episode"', '{"client"')
#: What a command quoted in prose begins with. Those of Slurm, systemd and pip are named there to say what they do, seldom to be typed.
PROGRAMS = "scavenger |(?:\\./)?scripts/[\\w-]+ |python (?!3)|sbatch |sqlite3 "


class Command(NamedTuple):
    """`text` without its prompt and its remark; `sql`: a statement."""

    text: str
    sql: bool = False


def shell(block: str) -> list[str]:
    """The commands of a block, one a line; a line that ends in a backslash goes on."""
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    lines = [PROMPT.sub("", line.strip()) for line in lines]
    return [
        COMMENT.sub("", line).strip()
        for line in lines
        if line and not line.startswith("#") and not line.startswith(REPLIES)
    ]


def blocks(page: str) -> list[Command]:
    """The commands of a page's blocks, in order. One of `bash` is one program."""
    found = []
    for match in BLOCK.finditer(page):
        language, text = match[2], match[3]
        if language == "sql":
            found += [Command(f"{one.strip()};", sql=True) for one in text.split(";") if one.strip()]
        elif language == "bash":
            found.append(Command(text.strip()))
        elif language in ("", "sh", "console") and not text.startswith(NO_COMMANDS):
            found += [Command(line) for line in shell(text)]
    return found


def quoted(page: str) -> list[Command]:
    """The commands that a page's prose quotes."""
    said = (" ".join(one.split()) for one in INLINE.findall(BLOCK.sub("", page)))
    return [Command(one) for one in said if re.match(PROGRAMS, one) and "…" not in one and " = " not in one]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")
