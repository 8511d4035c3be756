"""Pure: what kind of trouble a failed observation was, by Slurm's own words. The ledger and the metrics carry these names.

None of them says anything about jobs: after every one the last view stands, nothing is decided, and the watcher tries again later.
"""

from __future__ import annotations

import re
from enum import StrEnum


class ErrorKind(StrEnum):
    """Added to, never renamed: ledgers hold them."""

    NO_REPLY = "no_answer"  # the controller hangs, or is slower than the command's deadline
    DOWN = "down"  # no process listens where the controller should be: stopped, restarting
    FAILING_OVER = "failing_over"  # a backup controller answers that has not taken over yet
    AUTH = "auth"  # munge is down, or the clocks differ too far for its credentials
    RATE_LIMITED = "rate_limited"  # Slurm itself asks for fewer RPCs (SlurmctldParameters=rl_enable)
    PARTIAL = "partial"  # an answer that is cut off, malformed, or leaves out what it must hold
    BACKEND = "backend"  # our own helper process ended or hung
    NOT_SENT = "not_sent"  # the request never left us: nothing came of it


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


#: munge refuses a credential that is older, or as much newer (its default).
CLOCKS_S = 300
CLOCK_REMEDY = (
    "compare `date` on this host and on the controller's, and let NTP set both; if they agree, compare munge's key and restart munged "
    "(`munge -n | unmunge`)"
)


def about_clocks(words: str) -> str:
    """What Slurm's complaint says of clocks, where it may be about them; else "".

    A client whose credential slurmctld refuses for its age is told nothing: the connection is closed, which it calls "Zero Bytes".
    """
    if re.search(r"Rewound credential", words, re.I):
        return "the clock of the host that sent it is ahead of the other's"
    if re.search(r"Expired credential", words, re.I):
        return f"the two hosts' clocks are over {CLOCKS_S} s apart, or the request waited for as long"
    if re.search(r"Zero Bytes", words, re.I):
        return (
            f"slurmctld closed the connection, as it does when this host's clock is over {CLOCKS_S} s off the controller's "
            "(by how much it does not say), or munge's keys differ"
        )
    return ""
