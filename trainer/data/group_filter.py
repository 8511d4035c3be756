"""Which groups are trained, by their rewards. Pure; the same for every order of arrival, and after a restart.

A group that is filtered is as one that was not asked for: it counts in no denominator, and dynamic sampling replaces it. Its samples end
as "filtered", with the reason that is given here. (A group whose rewards are all equal has no gradient without a filter either. It
counts, then.)

Boundary: rewards of one group; no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """Bounds on a group's rewards, in the reward's own unit. `min_spread`: of greatest less least. None and 0: no bound."""

    min_spread: float = 0.0
    min_mean: float | None = None
    max_mean: float | None = None

    def fault(self, rewards: Sequence[float]) -> str:
        """Why a group with these rewards of its usable samples is not trained; "": it is. One without usable samples is not judged.

        `scavenger.ledger.redaction` knows these reasons: they name numbers alone.
        """
        if not rewards:
            return ""
        spread, mean = max(rewards) - min(rewards), sum(sorted(rewards)) / len(rewards)
        if spread < self.min_spread:
            return f"rewards differ by {spread:.6g}, less than data.filter_min_spread = {self.min_spread:.6g}"
        if self.min_mean is not None and mean < self.min_mean:
            return f"mean reward {mean:.6g} is below data.filter_mean_min = {self.min_mean:.6g}"
        if self.max_mean is not None and mean > self.max_mean:
            return f"mean reward {mean:.6g} is above data.filter_mean_max = {self.max_mean:.6g}"
        return ""


#: Trains every group.
NO_FILTER = GroupFilter()
