"""How a rank comes to end that did not finish: rank 0 is told to, or a thread of any rank's met a fault that the rank cannot go on with.

Told: by SIGTERM, or SIGUSR1, which launchers of MPI pass on to ranks where SIGTERM would kill them soon after. Owns the signals of rank 0
and nothing of what is done then. Both are noted when they come and looked at by the main thread; rank 0's where parameters are those of a
whole step, so what is written then is a checkpoint like any other.
"""

from __future__ import annotations

import signal
from types import FrameType

from scavenger.errors import ScavengerError

#: What rank 0 ends with when it was told to, as a shell says it of SIGTERM: the run is open and can be resumed.
SIGTERM_EXIT = 128 + signal.SIGTERM
#: The same at a terminal, where a person pressed Ctrl-C.
SIGINT_EXIT = 128 + signal.SIGINT
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class EndRequested(Exception):
    """A signal asked this trainer to end; the text is its name."""


class Ending:
    """`check` raises once a signal came, or a fault. Before `listen` no signal is noted, and signals do what they do."""

    def __init__(self) -> None:
        self._by = ""
        self._fault: ScavengerError | None = None

    def listen(self, *, terminal: bool = False) -> None:
        """From the main thread, once. `terminal`: Ctrl-C ends this process too; under a launcher that is the launcher's."""
        for number in (*SIGNALS, *((signal.SIGINT,) if terminal else ())):
            signal.signal(number, self.note)

    def note(self, number: int, frame: FrameType | None) -> None:
        """A second Ctrl-C ends at once, by `KeyboardInterrupt`."""
        if number == signal.SIGINT and self._by:
            raise KeyboardInterrupt
        self._by = self._by or signal.Signals(number).name

    def fail(self, fault: ScavengerError) -> None:
        """From any thread: what the main thread shall raise."""
        self._fault = self._fault or fault

    def check(self) -> None:
        """Raises the fault that was noted, else `EndRequested`."""
        if self._fault is not None:
            raise self._fault
        if self._by:
            raise EndRequested(self._by)


def ignore() -> None:
    """On every rank but 0: they end when rank 0 says so, or when it is gone."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
