"""The readings of a service's metrics that a window needs, and what their differences say. Pure, for live guests and simulated ones.

Boundary: no HTTP and no clock; the caller says what was read, and when.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from scavenger.guest.metrics import ServiceReading
from scavenger.policy.serving import ServiceView

#: What "now" is at least (s), where readings come more often: a median of a few tokens jumps.
NOW_S = 0.9


@dataclass(slots=True)
class Window:
    """The readings of the last `window_s`, by when they were read, and the most samples of ours between two."""

    window_s: float
    _readings: deque[tuple[float, ServiceReading, int]] = field(default_factory=deque)

    def view(self, now: float, reading: ServiceReading, peak: int, generating: int = 0) -> ServiceView | None:
        """What is known now; None with the first reading, which has nothing to be compared with. `peak`: samples since the last one, and
        `generating`: at this moment.

        A reading is the first one too when the last is older than the window: this process was stopped, or the service could not be read.
        What was counted meanwhile is not of the window. And where none in the window has its bounds: of histograms that are not alike there
        is no difference.
        """
        kept = self._readings
        if kept and now - kept[-1][0] > self.window_s:
            kept.clear()
        kept.append((now, reading, peak))
        while len(kept) > 2 and kept[1][0] <= now - self.window_s:
            kept.popleft()
        earlier = [(at, one) for at, one, _ in list(kept)[:-1] if _alike(one, reading)]
        if not earlier:
            return None
        first = earlier[0][1]
        last = next((one for at, one in reversed(earlier) if at <= now - NOW_S), first)
        return ServiceView(
            reading.ttft.since(first.ttft).quantile(0.99),
            reading.tpot.since(first.tpot).quantile(0.99),
            reading.waiting,
            reading.running,
            max(most for _, _, most in list(kept)[1:]),
            reading.ttft.since(last.ttft).quantile(0.5),
            reading.tpot.since(last.tpot).quantile(0.5),
            reading.oldest_s,
            generating,
        )

    def begin_anew(self) -> None:
        """With the newest reading."""
        while len(self._readings) > 1:
            self._readings.popleft()


def _alike(one: ServiceReading, other: ServiceReading) -> bool:
    """Whether the histograms of both have the same bounds; one that has none yet counted nothing."""
    return all(
        not a.bounds or not b.bounds or a.bounds == b.bounds
        for a, b in ((one.ttft, other.ttft), (one.tpot, other.tpot))
    )
