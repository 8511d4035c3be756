"""How many rows may still be written of what repeats: a run's decisions by kind (`telling`), a peer's rows by key (`core`). Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Rows of one kind that a run writes at once, and the seconds for each in the long run.
BURST, EVERY_S = 8, 5.0


@dataclass(slots=True)
class Budget:
    """Rows of one kind that may still be written: `burst` at once, and one in `every_s` seconds in the long run."""

    rows: float = BURST
    at: float = 0.0
    left_out: int = 0
    burst: int = BURST
    every_s: float = EVERY_S

    def take(self, now: float) -> bool:
        """Whether one may be written now."""
        self.rows = min(float(self.burst), self.rows + max(0.0, now - self.at) / self.every_s)
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
