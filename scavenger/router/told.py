"""How much of a run's decisions was told: rows of each kind that it may still write. Pure; kept with the run, used by `telling`."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Rows of one kind that a run writes at once, and the seconds for each in the long run.
BURST, EVERY_S = 8, 5.0


@dataclass(slots=True)
class Budget:
    """Rows of one kind that a run may still write."""

    rows: float = BURST
    at: float = 0.0
    left_out: int = 0

    def take(self, now: float) -> bool:
        """Whether one may be written now."""
        self.rows = min(float(BURST), self.rows + max(0.0, now - self.at) / EVERY_S)
        self.at = now
        if self.rows < 1:
            self.left_out += 1
            return False
        self.rows -= 1
        return True


@dataclass(slots=True)
class Told:
    """What of a run's decisions was told: budgets by kind, and the number of engines last said."""

    budgets: dict[str, Budget] = field(default_factory=dict)
    engines: int | None = None
    closed_in: tuple[str, int] | None = None  # the step in which the window was closed last
