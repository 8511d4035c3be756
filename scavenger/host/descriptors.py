"""How many files and connections this process may have open, how many it has, and what that means.

Owns the limit (RLIMIT_NOFILE). A login shell's soft limit is often 1,024, far below what the kernel allows; each engine and each trainer
is a connection.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import structlog

log = structlog.get_logger()

#: For the ledger, the state directory's files, and pipes of Slurm's commands: connections never get these.
RESERVED = 256
#: Below this a site with some hundreds of engines runs out.
FEW = 4096
#: The share in use from which `scavenger status` says so.
HIGH = 0.8
_OPEN = Path("/proc/self/fd")


@dataclass(frozen=True, slots=True)
class Descriptors:
    """`most` may be open, and `used` are; 0 where that cannot be told."""

    used: int
    most: int


def raise_limit() -> int:
    """Raise the soft limit to the hard one, and log where that is little. Returns what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # a container may forbid it
            log.warning("the limit on open files stays", limit=soft, hard=hard, reason=str(error))
    most = limit()
    if most < FEW:
        log.warning(
            "few open files are allowed",
            limit=most,
            remedy="raise it: LimitNOFILE=65536 in the unit, `ulimit -Hn 65536`",
        )
    return most


def limit() -> int:
    """How many descriptors this process may have. Never "unlimited": the kernel has its own bound on a process."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**20 if soft == resource.RLIM_INFINITY else soft


def reserved(most: int) -> int:
    """How many of `most` are kept for what is no connection. Pure."""
    return min(RESERVED, most // 4)


def now() -> Descriptors:
    """What this process has open."""
    try:
        used = len(os.listdir(_OPEN))
    except OSError:  # no /proc, or nothing is left to look with
        used = 0
    return Descriptors(used, limit())
