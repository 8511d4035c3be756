"""Pure: asking Slurm for its reservations and reading the answer. A malformed record fails the observation, like any other.

What a reservation means for harvested engines is `harvest`'s.
"""

from __future__ import annotations

import re

from scavenger.cluster.model import Reservation
from scavenger.cluster.slurm.hostlist import expand
from scavenger.errors import ClusterUnavailable

_NONE = "No reservations in the system"


def argv() -> list[str]:
    return ["scontrol", "-a", "-o", "show", "reservation"]


def parse(stdout: str) -> tuple[Reservation, ...]:
    """Reservations that hold whole nodes or parts of them, by name. A floating one, or one of licences alone, has no nodes."""
    lines = [record for record in re.split(r"^(?=ReservationName=)", stdout, flags=re.M) if record.strip()]
    if not stdout.endswith("\n"):
        raise ClusterUnavailable("scontrol show reservation: the answer is empty or truncated")
    if any(line.startswith(_NONE) for line in lines):
        return ()
    return tuple(sorted((_one(line) for line in lines), key=lambda reservation: reservation.name))


def _one(line: str) -> Reservation:
    row = dict(
        reversed(re.findall(r"(?:^| )([A-Za-z]+)=(\S*)", line))
    )  # the first of each counts: a comment, last, may hold anything
    try:
        nodes = frozenset(expand(row["Nodes"])) if row["Nodes"] not in ("", "(null)") else frozenset[str]()
        start, end = float(int(row["StartTime"])), float(int(row["EndTime"]))
        return Reservation(row["ReservationName"], nodes, start, end, "MAINT" in row["Flags"].split(","))
    except (KeyError, ValueError) as error:
        raise ClusterUnavailable(
            f"a reservation's record cannot be read ({error}): {line[:120]!r}"
        ) from error
