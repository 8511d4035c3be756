"""How many rows of a kind may still be written: a token bucket, and the numbers that bound what one peer can write.

A worker or a trainer can repeat most of what it says as often as it likes. None of it may fill the ledger. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Refusals of one worker, or of one key, that become events; after these the 200th, 400th, 800th and so on do, the others are counted.
REFUSALS_LOGGED = 100
#: Keys whose nonsense and budgets are remembered: those that were heard of last.
MAX_KEYS = 4096
#: Rows that a peer's registrations, or a trainer's calls between two committed steps, may make at once; later ones are this far apart.
PEER_BURST, PEER_EVERY_S = 1000, 30.0
#: Registrations of all reserved engines of one owner, in slots that they name themselves, between two steps that any of its runs commits.
OWNER_BURST = 100 * PEER_BURST
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
