"""How log lines look: logfmt for people, JSON with a priority for journald. Owns the choice and structlog's set-up; logs nothing itself.

journald reads a line's priority from a leading `<N>` (SyslogLevelPrefix=, on by default) and keeps the rest, here one JSON object, so that
`journalctl -u scavenger -p warning -o cat | jq` works.

Boundary: the process-wide set-up of structlog.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import IO, Any, TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

#: syslog(3)'s numbers.
PRIORITY = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
FORMATS = ("auto", "logfmt", "json")


def is_journal(environ: Mapping[str, str], stream: IO[Any]) -> bool:
    """Whether `stream` is the one that systemd connected to the journal: JOURNAL_STREAM names its device and inode."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM", "") == f"{found.st_dev}:{found.st_ino}"


def with_priority(logger: WrappedLogger, name: str, event: EventDict) -> str:
    """One line for journald. What JSON has no word for becomes text."""
    level = str(event.get("level", "info"))
    return f"<{PRIORITY.get(level, 6)}>{json.dumps(event, default=str, ensure_ascii=False)}"


def as_json(logger: WrappedLogger, name: str, event: EventDict) -> str:
    return json.dumps(event, default=str, ensure_ascii=False)


def configure(environ: Mapping[str, str], stream: TextIO | None = None) -> None:
    """SCAVENGER_LOG: the least level. SCAVENGER_LOG_FORMAT: auto (JSON for journald, logfmt elsewhere), logfmt or json."""
    stream = stream or sys.stderr
    level = logging.getLevelNamesMapping().get(environ.get("SCAVENGER_LOG", "INFO").upper(), logging.INFO)
    wanted, journal = environ.get("SCAVENGER_LOG_FORMAT", "auto"), is_journal(environ, stream)
    logfmt = structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"])
    if wanted == "logfmt" or (wanted != "json" and not journal):
        renderer: structlog.typing.Processor = logfmt
    else:
        renderer = with_priority if journal else as_json
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(stream),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
    )
