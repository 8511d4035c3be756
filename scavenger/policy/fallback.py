"""A run's policy whose fault ends nothing: the run goes on with the standard one. Pure.

Boundary: the failure of a site's own policy.

What a policy learns from comes from peers, and what it does with it is much arithmetic. A fault in it concerns one run's speed and must not
end the daemon of all. In tests and in the simulator policies are not guarded: there a fault is to be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from scavenger.policy.admission import Pace
from scavenger.policy.fleet_size import Benefit
from scavenger.policy.interface import (
    Explains,
    Fact,
    Inputs,
    NewPolicy,
    Paces,
    RouterPolicy,
    RunView,
    SampleMove,
    SamplePlacement,
    Standard,
    Weighs,
    WindowDecision,
)

T = TypeVar("T")
#: Called once for each fault with the run's name and what was raised.
FaultReport = Callable[[str, Exception], None]


class PolicyWithFallback:
    """A `RouterPolicy`: `inner` as long as it answers, and `Standard` from its first fault on."""

    def __init__(self, run: str, inner: RouterPolicy, report: FaultReport) -> None:
        self._run, self._report = run, report
        self.inner = inner

    @property
    def every_s(self) -> float:
        return self.inner.every_s

    def place(self, view: RunView, now: float) -> Sequence[SamplePlacement]:
        return self._ask(lambda policy: policy.place(view, now))

    def rebalance(self, view: RunView, now: float) -> Sequence[SampleMove]:
        return self._ask(lambda policy: policy.rebalance(view, now))

    def window(self, view: RunView, now: float) -> WindowDecision | None:
        return self._ask(lambda policy: policy.window(view, now))

    def engines(self, view: RunView, now: float) -> tuple[int, str]:
        return self._ask(lambda policy: policy.engines(view, now))

    def benefit(self) -> Benefit | None:
        return self._ask(lambda policy: policy.benefit() if isinstance(policy, Weighs) else None)

    def pace(self, view: RunView) -> Pace | None:
        return self._ask(lambda policy: policy.pace(view) if isinstance(policy, Paces) else None)

    def placed_by(self, answers: Sequence[SamplePlacement]) -> Inputs:
        return self._ask(lambda policy: policy.placed_by(answers) if isinstance(policy, Explains) else {})

    def moved_by(self, moves: Sequence[SampleMove]) -> Inputs:
        return self._ask(lambda policy: policy.moved_by(moves) if isinstance(policy, Explains) else {})

    def sized_by(self) -> Inputs:
        return self._ask(lambda policy: policy.sized_by() if isinstance(policy, Explains) else {})

    def observe(self, fact: Fact, now: float) -> None:
        self._ask(lambda policy: policy.observe(fact, now))

    def _ask(self, question: Callable[[RouterPolicy], T]) -> T:
        try:
            return question(self.inner)
        except Exception as error:
            if type(self.inner) is Standard:  # nothing is left to go on with
                raise
            self._report(self._run, error)
            self.inner = Standard()
            return question(self.inner)


def with_fallback(new: NewPolicy, report: FaultReport) -> NewPolicy:
    """The same policies, guarded."""
    return lambda run: PolicyWithFallback(run, new(run), report)
