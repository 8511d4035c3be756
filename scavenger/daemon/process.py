"""Settings of the daemon's Python process, and its clock. Owns how threads share the interpreter and how seldom garbage is collected.

The router's loop and the ledger's writer share the interpreter's lock, and a full collection stops both: with 64,000 samples in the
tables it takes 50 ms and more, and every commit waits for it. The tables free what they forget by themselves
(`router.core.samples.forget`).

Boundary: the Python interpreter's settings and clocks; benchmarks use them without a daemon.
"""

from __future__ import annotations

import gc
import sys
import time


class UnixClock:
    """Unix seconds that never run backwards: wall time once, monotonic time from there on."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._offset


#: How long a busy thread keeps the interpreter from another one that waits for it. With Python's 5 ms a commit, which takes the lock
#: again after each of its statements, stands still for most of its time while the loop is busy, and so do the leases that wait for it.
SWITCH_S = 0.0005
#: gc.set_threshold: new containers before a collection of the youngest; how many of these to one of the next generation; and of the oldest.
GC_THRESHOLDS = (20_000, 20, 50)


def tune() -> None:
    """Once in the life of a process, when what it restored is in memory: that is not collected again."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
