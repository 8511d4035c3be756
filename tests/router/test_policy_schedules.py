"""A policy that moves samples about without sense or end, over the schedules of lost messages, deaths and restarts: nothing is lost."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import pytest

from scavenger.policy.interface import RunView, SampleMove, Standard
from scavenger.protocol.worker.work import Work
from scavenger.router.core import policy_driver
from scavenger.router.core.machine import Router
from tests.router import harness, schedule

MOST_MOVES = 6  # of one sample: a schedule has to end


class Restless(Standard):
    """Moves whatever it can to some other engine or to the queue."""

    every_s = 0.3

    def rebalance(self, view: RunView, now: float) -> Sequence[SampleMove]:
        serving = [worker.id for worker in view.workers if worker.serves]
        movable = [
            s
            for s in view.samples
            if s.worker_id and not s.moving and s.moves < MOST_MOVES and (s.id + int(now * 4)) % 3 == 0
        ]
        targets = [0, *serving]
        return [
            SampleMove(s.id, s.worker_id, targets[(s.id + int(now)) % len(targets)], "why not")
            for s in movable
        ]


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The schedules' daemons have this policy; counts what the seam's two sides did."""
    found: Counter[str] = Counter()
    handed_back, yielding = policy_driver.handed_back, Work.yield_

    def counted(*args):  # type: ignore[no-untyped-def]
        found["handed back"] += len(args[2])
        handed_back(*args)

    def asked(self, message, now):  # type: ignore[no-untyped-def]
        found["asked"] += len(message.leases)
        return yielding(self, message, now)

    monkeypatch.setattr(policy_driver, "handed_back", counted)
    monkeypatch.setattr(Work, "yield_", asked)
    monkeypatch.setattr(harness, "Router", functools.partial(Router, new_policy=lambda _run: Restless()))
    return found


@pytest.mark.parametrize("first", [0, 10])
def test_moves_keep_every_promise(met: Counter[str], first: int) -> None:
    for seed in range(first, first + 10):
        schedule.run(seed, ops=200)
    assert met["asked"] > 50
    assert met["handed back"] > 50


@pytest.mark.long
def test_moves_keep_every_promise_over_many_schedules(met: Counter[str]) -> None:
    for seed in range(1000, 1400):
        schedule.run(seed, ops=300)
