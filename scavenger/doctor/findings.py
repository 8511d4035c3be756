"""What one check of a site found. Pure. Owns the levels, their exit codes, and how a report is laid out; knows no rule."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from enum import StrEnum

import msgspec


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"  # it works, at a loss or with a risk that is named
    PROBLEM = "problem"  # harvesting would not work, or would be in others' way
    UNKNOWN = "unknown"  # it could not be asked: no statement


class SiteFinding(msgspec.Struct, frozen=True):
    """`observed`: what was found and what follows from it. `remedy`: what to do, "" where nothing need be done.

    `missing`: why the facts that the check needs could not be had, "" where they could. Checks with the same reason are printed as one.
    """

    check: str
    level: Level
    observed: str
    remedy: str = ""
    missing: str = ""


#: For scripts: the worst of all findings.
EXIT = {Level.OK: 0, Level.UNKNOWN: 1, Level.WARNING: 1, Level.PROBLEM: 2}


def exit_code(findings: Sequence[SiteFinding]) -> int:
    return max((EXIT[one.level] for one in findings), default=0)


def lines(findings: Sequence[SiteFinding], width: int = 118) -> list[str]:
    """For a terminal. Checks that lack facts for the same reason share one line, at the place of the first, with their names."""
    observed = []
    pad = max((len(one.check) for one in findings), default=0) + 2
    indent = " " * (9 + pad)
    for one in findings:
        alike = [other.check for other in findings if one.missing and other.missing == one.missing]
        if alike[1:] and alike[0] != one.check:
            continue
        name, text = (f"{len(alike)} checks", one.missing) if alike[1:] else (one.check, one.observed)
        observed += textwrap.wrap(
            text,
            width,
            initial_indent=f"{one.level:<9}{name:<{pad}}",
            subsequent_indent=indent,
            break_long_words=False,
        )
        below = ["-> " + one.remedy] if one.remedy else []
        for text in [*below, "not checked: " + ", ".join(alike)] if alike[1:] else below:
            observed += textwrap.wrap(
                text, width, initial_indent=indent, subsequent_indent=indent + "   ", break_long_words=False
            )
    count = {level: sum(one.level is level for one in findings) for level in Level}
    observed.append(", ".join(f"{n} {level}" for level, n in count.items() if n))
    return observed


def as_json(findings: Sequence[SiteFinding]) -> bytes:
    """One object: the exit code, and every finding with its check, level, text and remedy."""
    return msgspec.json.format(
        msgspec.json.encode({"exit_code": exit_code(findings), "findings": list(findings)})
    )
