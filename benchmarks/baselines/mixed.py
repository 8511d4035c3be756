"""Parts of two policies put together, to separate their effects: who places and moves, who decides the window, who asks for engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scavenger.policy.fleet_size import Benefit
from scavenger.policy.interface import (
    Fact,
    RouterPolicy,
    RunView,
    SampleMove,
    SamplePlacement,
    Weighs,
    WindowDecision,
)
from scavenger.simulate.policies import SimulatedPolicy


class Mixed:
    """Each question goes to its policy; all hear everything once."""

    def __init__(self, placing: RouterPolicy, seeding: RouterPolicy, growing: RouterPolicy) -> None:
        self._placing, self._seeding, self._growing = placing, seeding, growing
        self._all = list({id(one): one for one in (placing, seeding, growing)}.values())

    @property
    def every_s(self) -> float:
        return self._placing.every_s

    def place(self, view: RunView, now: float) -> Sequence[SamplePlacement]:
        return self._placing.place(view, now)

    def rebalance(self, view: RunView, now: float) -> Sequence[SampleMove]:
        return self._placing.rebalance(view, now)

    def window(self, view: RunView, now: float) -> WindowDecision | None:
        return self._seeding.window(view, now)

    def engines(self, view: RunView, now: float) -> tuple[int, str]:
        return self._growing.engines(view, now)

    def benefit(self) -> Benefit | None:
        return self._growing.benefit() if isinstance(self._growing, Weighs) else None

    def observe(self, fact: Fact, now: float) -> None:
        for one in self._all:
            one.observe(fact, now)


Maker = Callable[[], RouterPolicy]


def mixed(name: str, placing: Maker, seeding: Maker, growing: Maker) -> SimulatedPolicy:
    """A contender of parts over our harvester; equal makers share one policy."""

    def make() -> RouterPolicy:
        made = {maker: maker() for maker in (placing, seeding, growing)}
        return Mixed(made[placing], made[seeding], made[growing])

    return SimulatedPolicy(name, make, start_benefits=True)
