"""The daemon's clock: Unix seconds that never run backwards, whatever is done to the host's wall clock."""

from __future__ import annotations

import time


class Clock:
    """Unix seconds that never run backwards: wall time once, monotonic time from there on."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._offset
