"""The discrete-event engine: virtual time on a heap, timers that can be cancelled, random streams by name.

Owns the order of events: by time, then priority (smaller first), then the order of scheduling. Two simulations that schedule
the same things run the same, whatever the machine. Knows nothing of what an event means; reads no clock and no global randomness.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

TimerCallback = Callable[[], None]


@dataclass(eq=False, slots=True)
class Timer:
    """A scheduled action. `cancel()` may be called at any time, any number of times; a timer that has fired stays fired."""

    time_s: float
    priority: int
    sequence: int
    action: TimerCallback | None
    _owner: Simulation

    @property
    def pending(self) -> bool:
        return self.action is not None

    def cancel(self) -> None:
        if self.action is not None:
            self.action = None
            self._owner._forget()


@dataclass(slots=True)
class Simulation:
    """Virtual time from `now` on (s). An action may schedule and cancel; one at the present time runs before time goes on."""

    now: float = 0.0
    executed: int = 0
    _heap: list[tuple[float, int, int, Timer]] = field(default_factory=list)
    _sequence: int = 0
    _cancelled: int = 0
    _running: bool = False

    def at(self, time_s: float, action: TimerCallback, priority: int = 0) -> Timer:
        """Run `action` at `time_s`. Raises `ValueError` for a time in the past, infinite or not a number."""
        if not math.isfinite(time_s) or time_s < self.now:
            raise ValueError(f"cannot schedule at {time_s} s: it is {self.now} s")
        self._sequence += 1
        timer = Timer(time_s, priority, self._sequence, action, self)
        heapq.heappush(self._heap, (time_s, priority, timer.sequence, timer))
        return timer

    def after(self, delay_s: float, action: TimerCallback, priority: int = 0) -> Timer:
        """Run `action` in `delay_s` seconds from now."""
        return self.at(self.now + delay_s, action, priority)

    @property
    def pending(self) -> int:
        """Timers that are scheduled and not cancelled."""
        return len(self._heap) - self._cancelled

    def next_time(self) -> float:
        """When the next event is due; infinity when there is none."""
        self._drop_cancelled()
        return self._heap[0][0] if self._heap else math.inf

    def step(self) -> bool:
        """Run the next event; False when there is none."""
        self._drop_cancelled()
        if not self._heap:
            return False
        self.now, _, _, timer = heapq.heappop(self._heap)
        action, timer.action = timer.action, None
        assert action is not None  # cancelled ones were dropped
        self.executed += 1
        action()
        return True

    def run(self, until_s: float = math.inf, max_events: int | None = None) -> None:
        """Run all events up to and including `until_s`; then, if that is finite, it is `until_s`.

        Raises `RuntimeError` after `max_events`: a simulation that never ends is a bug of who schedules.
        """
        if self._running:
            raise RuntimeError("run() was called by an action: schedule instead")
        self._running = True
        try:
            last = math.inf if max_events is None else self.executed + max_events
            while self.next_time() <= until_s and self._heap:
                if self.executed >= last:
                    raise RuntimeError(f"{max_events} events ran and it is only {self.now} s")
                self.step()
            if math.isfinite(until_s):
                self.now = max(self.now, until_s)
        finally:
            self._running = False

    def _drop_cancelled(self) -> None:
        while self._heap and not self._heap[0][3].pending:
            heapq.heappop(self._heap)
            self._cancelled -= 1

    def _forget(self) -> None:
        self._cancelled += 1
        # Timers that are set and cancelled all the time (one for each engine's next finish) must not fill the heap.
        if self._cancelled > 1024 and self._cancelled * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[3].pending]
            heapq.heapify(self._heap)
            self._cancelled = 0


@dataclass(frozen=True, slots=True)
class Streams:
    """Independent random streams under one seed, each found by its name: who draws first does not change what is drawn.

    `stream("lengths", step, prompt)` is the same generator state however many others were used before it.
    """

    seed: int

    def stream(self, *name: str | int) -> np.random.Generator:
        """A fresh generator at the start of the stream of this name. Keep it to go on drawing; ask again to draw the same."""
        if not name:
            raise ValueError("a stream needs a name")
        text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (self.seed, *name))
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
