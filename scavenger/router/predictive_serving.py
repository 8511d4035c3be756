"""In which order queued samples go, and how many an engine serves at a time, from one decision to the next. Pure.

Two orders are tried (`placement.order`, the longest first, and `placement.in_turn`, group after group), each with several limits, and what
`window.serve` predicts to end the step soonest is kept until the fleet or the window is another. That costs ten solutions of the window,
and nobody is served meanwhile: a run of short steps decides it for several steps at once. Owns that memory, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from scavenger.router import placement
from scavenger.router import window as windows
from scavenger.router.placement import Job, Ranked
from scavenger.router.predictive_view import Picture

#: It is decided no sooner again than this, also where a step has begun since.
AGAIN_S = 10.0
#: The place of that order among the two. Once reserved engines train it is taken where both end the step as soon: groups are whole sooner.
IN_TURN = 1


@dataclass(slots=True)
class Service:
    """`by`: what was decided last; a new step begins with it. `changed`: the fleet, the window or the step is another."""

    by: windows.Serving = field(default_factory=windows.Serving)
    changed: bool = True
    _at: float = -math.inf
    _begun: bool = False  # a step for which nothing was said yet

    def begin_step(self) -> None:
        self.changed = self._begun = True

    def queue(self, picture: Picture, longest: list[Ranked], jobs: Sequence[Job], trained: float, now: float) -> list[Ranked]:
        """The order in which these go now. `longest`: the longest first; `trained`: tokens of whole groups that are trained."""
        expected = picture.expected
        to_come = {group_id: sum(expected[s.id] for s in group.running) for group_id, group in picture.groups.items()}
        in_turn = placement.in_turn(jobs, to_come)
        # What reserved engines held is about to be queued, and is what there is to put in order.
        coming = not picture.step.reserved_awake and any(worker.id in picture.held for worker in picture.reserved)
        if self.changed and picture.step.purpose == "train" and picture.reserved and not coming:
            if now >= self._at + AGAIN_S:
                orders = [[ranking.job.sample_id for ranking in order] for order in (longest, in_turn)]
                usual = self.by if picture.step.reserved_awake else replace(self.by, order=IN_TURN)
                self.by = windows.serve([picture.situation(trained, order) for order in orders], usual)
                self.changed, self._at = False, now
            elif self._begun:
                self.by = windows.carried(picture.situation(trained), self.by)
            self._begun = False
        return in_turn if self.by.order else longest
