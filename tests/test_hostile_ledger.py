"""A ledger with control characters in every text that others chose drives the terminal of no reading command."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scavenger.cli.main import app
from scavenger.errors import ScavengerError
from scavenger.ledger import queries
from tests.top.sites import EVIL_STORED, hostile, site

CONTROLS = set(map(chr, [*range(9), *range(11, 32), *range(127, 160)])) | set("\u2028\u2029\u202e\u2066")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return site(tmp_path_factory.mktemp("site"), hostile())


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    """A command sets up logging for its process, which is this one."""
    held = logging.root.handlers[:]
    yield
    logging.root.handlers[:] = held


@functools.cache
def said_by(config: Path, *words: str) -> str:
    done = CliRunner().invoke(app, [*words, "--config", str(config)])
    # What a command refuses is printed by the process's entry, through `printable`.
    refused = isinstance(done.exception, ScavengerError) and words[0] in ("samples", "ledger")
    assert done.exit_code == 0 or refused or words[0] in ("status", "top") or words[1] == "check", done.output
    return done.output


@pytest.mark.parametrize(
    "words",
    [
        *(("ledger", "report", name) for name in queries.report_names()),
        *(
            ("ledger", "report", name, "--format", form)
            for name in ("runs", "events")
            for form in ("json", "csv")
        ),
        ("ledger", "check"),
        ("ledger", "tokens", "11"),
        ("ledger", "tokens", "11", "--format", "json"),
        ("samples", EVIL_STORED),
        ("status",),
        ("top", "--once"),
    ],
    ids=lambda words: " ".join(words)[:60].encode("ascii", "replace").decode().replace("\x1b", "?"),
)
def test_what_a_command_prints_of_others_holds_no_control(config: Path, words: tuple[str, ...]) -> None:
    output = said_by(config, *words)
    assert not set(output) & CONTROLS, repr(output[:2000])


def test_the_words_were_there(config: Path) -> None:
    assert (
        sum("[bold red]" in said_by(config, "ledger", "report", name) for name in queries.report_names()) > 8
    )
