"""How a trainer is told to end: SIGTERM, or SIGUSR1, which launchers of MPI pass on to ranks where SIGTERM would kill them soon after.

Owns the signals of rank 0 and nothing of what is done then. A signal is noted when it comes and looked at where parameters are those of a
whole step, so what is written then is a checkpoint like any other.
"""

from __future__ import annotations

import signal
from types import FrameType

#: What rank 0 ends with when it was told to, as a shell says it of SIGTERM: the run is open and can be resumed.
TOLD_EXIT = 128 + signal.SIGTERM
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class ToldToEnd(Exception):
    """A signal asked this trainer to end."""


class Ending:
    """`check` raises once a signal came. Before `listen` nothing is noted, and signals do what they do."""

    def __init__(self) -> None:
        self._by = ""

    def listen(self) -> None:
        """From the main thread, once."""
        for number in SIGNALS:
            signal.signal(number, self.note)

    def note(self, number: int, frame: FrameType | None) -> None:
        self._by = self._by or signal.Signals(number).name

    def check(self) -> None:
        """Raises `ToldToEnd`."""
        if self._by:
            raise ToldToEnd(self._by)


def ignore() -> None:
    """On every rank but 0: they end when rank 0 says so, or when it is gone."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
