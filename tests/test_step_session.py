"""What was seen last of the reserved engines' memory counts at once, whatever waits before it in the driver's queue."""

from __future__ import annotations

from collections import deque

from scavenger.protocol import reserved_memory
from scavenger.protocol import train_step as ts
from scavenger.protocol.messages import Fleet
from scavenger.protocol.reserved_memory import ReservedObservation
from scavenger.protocol.step_session import StepSession
from trainer.engine_control import Present

FREE = ReservedObservation(ts.ReservedAsleep(1, 0))
HOLDS = ReservedObservation(ts.ReservedHolds(("0.a",)))


def plan(samples: int, groups: int) -> ts.StepPlan:
    return ts.StepPlan(
        samples=samples, groups=groups, window=0.0, wake_after_s=1.0, harvest=True, reserved=True
    )


def test_no_round_begins_once_it_was_seen_that_an_engine_holds_memory() -> None:
    """`Trained` comes before what was seen meanwhile, in every round."""
    fleet = Fleet(1, 0, 1, 0, 0, order=1, asleep=("0.a",))
    session = StepSession(plan(4, 4), fleet, FREE, reserved_awake=False, now=0.0)
    events: deque[ts.Event] = deque([ts.GroupsCompleted(4, 4)])
    trained = 0
    while events and not session.finished:
        if trained:
            events.extend(session.observe(fleet, HOLDS))
        for action in session.react(events.popleft(), 1.0):
            if isinstance(action, ts.TrainReady):
                trained += 1
                events.appendleft(ts.Trained(1))
    assert (trained, session.finished, session.state.phase) == (1, False, ts.StepPhase.SLEEP)
    again = [event for _ in range(2) for event in session.observe(fleet, FREE)]
    assert again == [FREE.event], "told once"
    (action,) = session.react(again[0], 2.0)
    assert isinstance(action, ts.TrainReady)


def test_an_acknowledgement_that_is_here_is_taken_in_before_its_deadline_is_judged() -> None:
    """Rank 0 hears nothing for 61 s (a daemon that was away, a call that waited); then all comes at once."""
    held = Fleet(2, 0, 0, 8, 0, order=1, holding=("0.a",))
    session = StepSession(plan(8, 1), held, None, reserved_awake=True, now=0.0)
    assert [type(action) for action in session.first] == [ts.SleepReserved]
    asleep = Fleet(1, 0, 1, 8, 0, order=1, asleep=("0.a",))
    memory = reserved_memory.observe(asleep, 1, Present(1, ("0",), ("0.a",)), launched=True)
    actions = [action for event in session.observe(asleep, memory) for action in session.react(event, 61.0)]
    assert not [action for action in actions if isinstance(action, ts.EndReserved)]


def test_what_was_seen_before_an_order_is_no_answer_to_it() -> None:
    fleet = Fleet(1, 0, 1, 8, 0, order=1, asleep=("0.a",))
    session = StepSession(plan(8, 1), fleet, None, reserved_awake=True, now=0.0)
    assert [type(action) for action in session.first] == [ts.SleepReserved]
    (seen,) = session.observe_memory(FREE)
    assert session.react(seen, 1.0) == ()
    assert session.state.sleep_ack == FREE.event
    assert session.react(ts.FleetChanged(0, 1), 2.0) == ()
    assert [type(one) for one in session.react(ts.StepTick(), 4.0)] == [ts.WakeReserved]
    assert session.react(ts.FleetChanged(1, 1), 5.0) == ()
    assert [type(one) for one in session.react(ts.StepTick(), 7.0)] == [ts.SleepReserved]
    assert session.react(seen, 7.0) == ()
    assert session.state.sleep_ack is None, "it is the older order's"
    assert session.observe_memory(FREE) == [seen], "said anew, it counts"


def test_that_a_window_is_held_is_told_once_and_not_of_a_step_that_heeds_none() -> None:
    fleet = Fleet(1, 1, 0, 4, 0, window="open", window_reason="on")
    session = StepSession(plan(4, 4), fleet, None, reserved_awake=True, now=0.0)
    held = Fleet(1, 1, 0, 4, 0, window="open", window_reason="for the next step", keep_open=True)
    (said,) = session.observe(held, None)
    assert said == ts.WindowDecided(ts.SeedWindowState.OPEN, "for the next step", keep_open=True)
    session.react(said, 1.0)
    assert session.observe(held, None) == []
    assert session.observe(fleet, None) == [ts.WindowDecided(ts.SeedWindowState.OPEN, "on")]
    deaf = StepSession(plan(4, 4), held, None, reserved_awake=True, now=0.0, heeds_window=False)
    assert (deaf.state.keep_open, deaf.observe(fleet, None)) == (False, [])
