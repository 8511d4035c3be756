"""Events run in the order of time, priority and scheduling; cancelled ones never; random streams do not depend on who draws when."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.simulate.clock import Simulation, Streams


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 1), st.booleans()), max_size=40))
def test_events_run_by_time_then_priority_then_order_of_scheduling_and_cancelled_ones_never(
    plan: list[tuple[int, int, bool]],
) -> None:
    simulation = Simulation()
    ran: list[int] = []
    timers = [
        simulation.at(time, partial(ran.append, i), priority) for i, (time, priority, _) in enumerate(plan)
    ]
    for timer, (_, _, cancelled) in zip(timers, plan, strict=True):
        if cancelled:
            timer.cancel()
            timer.cancel()
    kept = [i for i, (_, _, cancelled) in enumerate(plan) if not cancelled]
    assert simulation.pending == len(kept)
    simulation.run()
    assert ran == sorted(kept, key=lambda i: (plan[i][0], plan[i][1], i))
    assert simulation.pending == 0
    assert simulation.executed == len(kept)
    assert not any(timer.pending for timer in timers)


def test_an_action_may_schedule_at_once_and_cancel_what_is_due_at_the_same_instant() -> None:
    simulation = Simulation(now=10.0)
    log: list[tuple[float, str]] = []

    def note(what: str) -> None:
        log.append((simulation.now, what))

    doomed = simulation.at(11.0, lambda: note("doomed"), priority=5)

    def first() -> None:
        note("first")
        doomed.cancel()
        simulation.after(0.0, lambda: note("at once"))
        simulation.after(2.0, lambda: note("later"))

    simulation.at(11.0, first)
    simulation.run()
    assert log == [(11.0, "first"), (11.0, "at once"), (13.0, "later")]


def test_run_until_includes_that_instant_and_leaves_the_clock_there() -> None:
    simulation = Simulation()
    ran: list[float] = []
    for time in (1.0, 2.0, 3.0):
        simulation.at(time, lambda: ran.append(simulation.now))
    simulation.run(until_s=2.0)
    assert (ran, simulation.now, simulation.next_time()) == ([1.0, 2.0], 2.0, 3.0)
    simulation.run(until_s=2.5)
    assert simulation.now == 2.5
    simulation.run()
    assert (ran, simulation.now, simulation.next_time()) == ([1.0, 2.0, 3.0], 3.0, math.inf)
    assert simulation.step() is False


@pytest.mark.parametrize("time", [4.999, math.inf, -math.inf, math.nan])
def test_nothing_is_scheduled_in_the_past_or_never(time: float) -> None:
    simulation = Simulation(now=5.0)
    with pytest.raises(ValueError, match="cannot schedule"):
        simulation.at(time, lambda: None)
    assert simulation.pending == 0


def test_a_simulation_that_never_ends_is_stopped_and_says_when() -> None:
    simulation = Simulation()

    def again() -> None:
        simulation.after(0.0, again)

    again()
    with pytest.raises(RuntimeError, match="100 events"):
        simulation.run(max_events=100)
    assert simulation.executed == 100


def test_an_action_cannot_run_the_simulation_itself_and_its_error_leaves_it_usable() -> None:
    simulation = Simulation()
    simulation.at(1.0, simulation.run)
    simulation.at(2.0, lambda: None)
    with pytest.raises(RuntimeError, match="schedule instead"):
        simulation.run()
    simulation.run()
    assert simulation.now == 2.0


def test_timers_that_are_moved_all_the_time_do_not_fill_the_heap() -> None:
    simulation = Simulation()
    ran: list[int] = []
    timer = simulation.at(1e6, lambda: ran.append(-1))
    for i in range(20_000):
        timer.cancel()
        timer = simulation.at(1e6 + i, partial(ran.append, i))
        assert len(simulation._heap) <= 4096
    simulation.run()
    assert ran == [19_999]


def test_a_stream_is_the_same_whoever_else_drew_and_differs_by_name_and_seed() -> None:
    first = Streams(7).stream("lengths", 3, 14).random(5)
    other = Streams(7)
    other.stream("fleet").random(1000)
    assert np.array_equal(other.stream("lengths", 3, 14).random(5), first)
    for different in (
        Streams(8).stream("lengths", 3, 14),
        Streams(7).stream("lengths", 31, 4),
        Streams(7).stream("lengths", "3", 14),
        Streams(7).stream("lengths", 3),
    ):
        assert not np.array_equal(different.random(5), first)
    with pytest.raises(ValueError, match="name"):
        Streams(7).stream()
