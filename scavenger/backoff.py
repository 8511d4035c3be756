"""How long to wait after the n-th failure in a row: doubling up to a bound. Pure; chance and clocks are the caller's."""

from __future__ import annotations

#: Doublings beyond this change nothing, and a float must not overflow.
MOST_DOUBLINGS = 30


def backoff_s(first_s: float, most_s: float, failures: int) -> float:
    """Seconds to wait after `failures` (>= 1) failures in a row: `first_s`, doubled with each further one, at most `most_s`."""
    return min(most_s, first_s * 2.0 ** min(failures - 1, MOST_DOUBLINGS))
