"""Log lines: logfmt for people, JSON with a priority for journald."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, structlog
from scavenger.observe import logs
logs.configure(os.environ)
log = structlog.get_logger()
log.info("hidden below warning", n=1)
log.warning("two\\nlines", where=sys.executable.__class__, key="ü")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


def lines(journal: bool, **environ: str) -> list[str]:
    """What a process whose standard error is a pipe, of the journal or not, writes into it."""
    reading, writing = os.pipe()
    where = os.fstat(writing)
    env = {**os.environ, "SCAVENGER_LOG": "WARNING", **environ} | (
        {"JOURNAL_STREAM": f"{where.st_dev}:{where.st_ino}"} if journal else {}
    )
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, stderr=writing)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    assert process.wait(30) == 0, text
    return text.splitlines()


def test_the_journal_gets_one_json_object_a_line_with_its_priority() -> None:
    warning, error = lines(journal=True)
    assert warning.startswith("<4>{")
    assert error.startswith("<3>{")
    told = json.loads(warning[3:])
    assert (told["event"], told["level"], told["key"]) == ("two\nlines", "warning", "ü")
    assert "ZeroDivisionError" in json.loads(error[3:])["exception"]


def test_a_pipe_that_is_not_the_journal_s_gets_logfmt() -> None:
    first = lines(journal=False)[0]
    assert first.startswith("timestamp=")
    assert "level=warning" in first


@pytest.mark.parametrize(("wanted", "start"), [("json", "{"), ("logfmt", "timestamp=")])
def test_a_format_can_be_asked_for(wanted: str, start: str) -> None:
    assert lines(journal=False, SCAVENGER_LOG_FORMAT=wanted)[0].startswith(start)


def test_a_journal_stream_of_another_process_is_not_ours() -> None:
    assert lines(journal=False, JOURNAL_STREAM="1:1")[0].startswith("timestamp=")
