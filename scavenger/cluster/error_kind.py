"""Pure: what kind of trouble a failed observation was, by Slurm's own words. The ledger and the metrics carry these names.

None of them says anything about jobs: after every one the last view stands, nothing is decided, and the watcher tries again later.
"""

from __future__ import annotations

import re
from enum import StrEnum


class ErrorKind(StrEnum):
    """Added to, never renamed: ledgers hold them."""

    NO_REPLY = "no_answer"  # the controller hangs, or is slower than the command's deadline
    DOWN = "down"  # nobody listens where the controller should be: stopped, restarting
    FAILING_OVER = "failing_over"  # a backup controller answers that has not taken over yet
    AUTH = "auth"  # munge is down, or the clocks differ too far for its credentials
    RATE_LIMITED = "rate_limited"  # Slurm itself asks for fewer RPCs (SlurmctldParameters=rl_enable)
    PARTIAL = "partial"  # an answer that is cut off, malformed, or leaves out what it must hold
    BACKEND = "backend"  # our own helper process ended or hung


# First match counts: a failure of munge also says "Protocol authentication error", one of the network often more than one thing.
_WORDS: tuple[tuple[ErrorKind, re.Pattern[str]], ...] = (
    (ErrorKind.RATE_LIMITED, re.compile(r"rate limit", re.I)),
    (
        ErrorKind.AUTH,
        re.compile(
            r"munge|Protocol authentication|authentication credential|Rewound credential|Expired credential",
            re.I,
        ),
    ),
    (ErrorKind.FAILING_OVER, re.compile(r"standby|backup controller|temporarily unable", re.I)),
    (ErrorKind.NO_REPLY, re.compile(r"timed out|Zero Bytes", re.I)),
    (
        ErrorKind.DOWN,
        re.compile(
            r"Unable to contact slurm controller|Connection (refused|reset)|Communication connection failure|"
            r"Transport endpoint|Unable to establish (controller|configuration)|No route to host|Name or service",
            re.I,
        ),
    ),
    (ErrorKind.PARTIAL, re.compile(r"Header lengths|Incomplete packet|Unexpected message", re.I)),
)


def error_kind_of(words: str) -> ErrorKind | None:
    """What Slurm's complaint means, or None: then it is a refusal, and trying again changes nothing."""
    return next((error_kind for error_kind, pattern in _WORDS if pattern.search(words)), None)
