from __future__ import annotations

import random
from dataclasses import replace

import pytest

from scavenger.protocol.train_step import (
    RULES,
    Action,
    EndReserved,
    Event,
    FinishStep,
    FleetChanged,
    GroupsCompleted,
    GroupsDeferred,
    ReservedAsleep,
    ReservedHolds,
    SeedWindowState,
    SleepReserved,
    StepPhase,
    StepPlan,
    StepState,
    StepTick,
    Trained,
    TrainReady,
    WakeReserved,
    WindowDecided,
    begin,
    react,
)

PLAN = StepPlan(samples=16, groups=4, window=0.5, wake_after_s=5.0, harvest=True, reserved=True)


def kinds(actions: tuple[Action, ...]) -> list[str]:
    return [type(action).__name__ for action in actions]


#: What all reserved engines acknowledge together.
ASLEEP = ReservedAsleep(1, 512)


def play(step: StepState, *events: tuple[Event, float], acks: bool = True) -> tuple[StepState, list[str]]:
    """`acks`: reserved engines acknowledge at once that they sleep."""
    done = []
    for event, now in events:
        step, actions = react(step, event, now)
        assert all(action.reason for action in actions)
        done += kinds(actions)
        if (
            acks
            and done[-1:] == ["SleepReserved"]
            and isinstance(actions[-1] if actions else None, SleepReserved)
        ):
            step, actions = react(step, ASLEEP, now)
            done += kinds(actions)
    return step, done


def test_reserved_engines_seed_then_sleep_at_the_window_while_harvested_ones_live() -> None:
    step, actions = begin(PLAN, harvested=2, reserved_awake=False, now=0.0)
    assert kinds(actions) == ["WakeReserved"]
    step, done = play(step, (GroupsCompleted(1, 4), 1.0))
    assert (step.phase, done) == (StepPhase.SEED, [])
    step, done = play(step, (GroupsCompleted(1, 4), 2.0))
    assert done == ["SleepReserved", "TrainReady"]
    assert step.phase is StepPhase.TRAIN


def test_without_harvested_engines_reserved_ones_generate_everything_first() -> None:
    step, _ = begin(PLAN, harvested=0, reserved_awake=True, now=0.0)
    step, done = play(step, (GroupsCompleted(3, 12), 100.0), (StepTick(), 200.0))
    assert (step.phase, done) == (StepPhase.SEED, [])
    step, done = play(step, (GroupsCompleted(1, 4), 201.0), *[(Trained(1), 202.0)] * 4)
    assert done == ["SleepReserved", *["TrainReady"] * 4, "FinishStep"]
    assert step.phase is StepPhase.FINISH


def test_harvest_off_ignores_harvested_engines() -> None:
    step, _ = begin(replace(PLAN, harvest=False), harvested=3, reserved_awake=True, now=0.0)
    step, done = play(step, (FleetChanged(5, 1), 1.0), (GroupsCompleted(3, 12), 2.0))
    assert (step.phase, done) == (StepPhase.SEED, [])


def test_harvested_engines_that_come_after_the_window_let_the_reserved_sleep() -> None:
    step, _ = begin(PLAN, harvested=0, reserved_awake=True, now=0.0)
    step, done = play(step, (GroupsCompleted(2, 8), 1.0), (FleetChanged(1, 1), 2.0))
    assert done == ["SleepReserved", "TrainReady"]


def test_reserved_engines_wake_within_the_step_when_harvested_ones_are_gone() -> None:
    """I11: all harvested workers die right after the window closes and none returns; the step completes."""
    step, _ = begin(PLAN, harvested=2, reserved_awake=True, now=0.0)
    step, _ = play(
        step, (GroupsCompleted(2, 8), 1.0), (Trained(1), 1.5), (Trained(1), 2.0), (FleetChanged(0, 1), 3.0)
    )
    step, done = play(step, (StepTick(), 7.9))
    assert (step.phase, done) == (StepPhase.TRAIN, [])
    step, done = play(step, (StepTick(), 8.0))
    assert (step.phase, done) == (StepPhase.WAKE, ["WakeReserved"])
    assert "no harvested engine for 5.0 s with 8 samples outstanding" in step.log[-1]
    step, done = play(step, (GroupsCompleted(1, 4), 9.0))
    assert done == [], "the GPUs belong to the engines now"
    step, done = play(step, (GroupsCompleted(1, 4), 10.0), (Trained(1), 11.0), (Trained(1), 12.0))
    assert done == ["SleepReserved", "TrainReady", "TrainReady", "FinishStep"]


def test_a_wake_ends_when_harvested_engines_have_lived_long_enough() -> None:
    step, _ = begin(PLAN, harvested=1, reserved_awake=True, now=0.0)
    step, _ = play(step, (GroupsCompleted(2, 8), 1.0), (FleetChanged(0, 1), 2.0), (StepTick(), 8.0))
    assert step.phase is StepPhase.WAKE
    step, done = play(
        step,
        (FleetChanged(1, 1), 9.0),
        (FleetChanged(0, 1), 10.0),
        (FleetChanged(1, 1), 11.0),
        (StepTick(), 15.9),
    )
    assert (step.phase, done) == (StepPhase.WAKE, [])
    step, done = play(step, (StepTick(), 16.0))
    assert done == ["SleepReserved", "TrainReady"]


def test_without_reserved_engines_training_streams_from_the_start() -> None:
    step, actions = begin(replace(PLAN, reserved=False), harvested=0, reserved_awake=False, now=0.0)
    assert (step.phase, actions) == (StepPhase.TRAIN, ())
    step, done = play(step, (GroupsCompleted(1, 4), 1.0), (Trained(1), 2.0), (StepTick(), 100.0))
    assert (step.phase, done) == (StepPhase.TRAIN, ["TrainReady"])


def test_a_round_waits_for_a_group_a_rank_until_the_last_sample() -> None:
    step, _ = begin(replace(PLAN, reserved=False, round_groups=2), harvested=1, reserved_awake=False, now=0.0)
    step, done = play(step, (GroupsCompleted(1, 4), 1.0))
    assert done == []
    step, done = play(
        step,
        (GroupsCompleted(1, 4), 2.0),
        (Trained(2), 3.0),
        (GroupsCompleted(2, 8, untrained=1), 4.0),
        (Trained(1), 5.0),
    )
    assert done == ["TrainReady", "TrainReady", "FinishStep"]


def test_a_step_of_untrained_groups_finishes() -> None:
    step, _ = begin(PLAN, harvested=1, reserved_awake=True, now=0.0)
    step, done = play(step, (GroupsCompleted(4, 16, untrained=4), 1.0))
    assert done == ["SleepReserved", "FinishStep"]


def test_a_step_ends_without_the_groups_that_a_later_one_trains() -> None:
    state, _ = begin(PLAN, harvested=1, reserved_awake=False, now=0.0, sleep_ack=ASLEEP)
    state, _ = react(state, WindowDecided(SeedWindowState.CLOSED, "now"), 0.5)
    state, _ = react(state, ASLEEP, 0.7)
    state, actions = react(state, GroupsCompleted(3, 12), 1.0)
    assert kinds(actions) == ["TrainReady"]
    assert not state.waits_for_samples, "it trains"
    state, actions = react(state, Trained(3), 2.0)
    assert (kinds(actions), state.waits_for_samples) == ([], True)
    with pytest.raises(ValueError, match="only 4 samples"):
        react(state, GroupsDeferred(2, 8), 3.0)
    state, actions = react(state, GroupsDeferred(1, 4), 3.0)
    assert kinds(actions) == ["FinishStep"]
    assert not state.waits_for_samples


@pytest.mark.parametrize("event", [GroupsCompleted(5, 16), GroupsCompleted(1, 17), Trained(1)])
def test_an_impossible_event_raises(event: Event) -> None:
    step, _ = begin(PLAN, harvested=1, reserved_awake=True, now=0.0)
    with pytest.raises(ValueError):
        react(step, event, 1.0)


def ordered_to_sleep(plan: StepPlan = PLAN) -> StepState:
    """Half of the samples are there, so reserved engines were told to sleep, at 1.0; two groups wait to be trained."""
    step, _ = begin(plan, harvested=2, reserved_awake=True, now=0.0)
    step, done = play(step, (GroupsCompleted(2, 8), 1.0), acks=False)
    assert (step.phase, done, step.reserved_awake) == (StepPhase.SLEEP, ["SleepReserved"], False)
    return step


def test_nothing_is_trained_before_every_reserved_engine_acknowledged_that_its_memory_is_free() -> None:
    step, done = play(
        ordered_to_sleep(),
        (GroupsCompleted(1, 4), 2.0),
        (StepTick(), 50.0),
        (ReservedHolds(("1",)), 50.5),
        acks=False,
    )
    assert (step.phase, done) == (StepPhase.SLEEP, [])
    step, done = play(step, (ASLEEP, 51.0))
    assert (step.phase, done) == (StepPhase.TRAIN, ["TrainReady"])
    assert step.log[-1] == "sleep -> train: 1 reserved engines sleep and hold 512 bytes"


def test_an_engine_that_does_not_acknowledge_in_time_is_ended_by_name_and_its_end_is_as_good() -> None:
    step, done = play(ordered_to_sleep(), (ReservedHolds(("0", "3")), 2.0), (StepTick(), 60.9), acks=False)
    assert done == []
    step, actions = react(step, StepTick(), 61.0)
    assert actions == (EndReserved("no acknowledgement within 60 s of being told to sleep: 0, 3"),)
    assert step.log[-1] == f"sleep: ended: {actions[0].reason}"
    step, done = play(step, (ReservedHolds(("3",)), 62.0), (StepTick(), 70.0), acks=False)
    assert (step.phase, done) == (StepPhase.SLEEP, []), "its process is not gone yet"
    step, done = play(step, (ReservedAsleep(1, 0), 71.0))
    assert (step.phase, done) == (StepPhase.TRAIN, ["TrainReady"])


def test_an_engine_whose_end_did_not_help_is_to_be_ended_again_which_says_so() -> None:
    step, _ = play(ordered_to_sleep(), (ReservedHolds(("0",)), 2.0), (StepTick(), 61.0), acks=False)
    step, done = play(step, (StepTick(), 90.9))
    assert done == []
    step, actions = react(step, StepTick(), 91.0)
    assert actions == (EndReserved("still there 30 s after they were to be ended: 0", again=True),)


def test_an_engine_that_takes_its_memory_again_stops_the_training_until_it_sleeps() -> None:
    step, done = play(
        ordered_to_sleep(),
        (ASLEEP, 2.0),
        (ReservedHolds(("0",)), 3.0),
        (Trained(2), 3.5),
        (GroupsCompleted(1, 4), 4.0),
    )
    assert (step.phase, done) == (StepPhase.SLEEP, ["TrainReady"]), "the round under way was begun before"
    step, done = play(step, (StepTick(), 62.9), acks=False)
    assert done == []
    step, done = play(step, (StepTick(), 63.0), (ASLEEP, 64.0))
    assert done == ["EndReserved", "TrainReady"], "its time runs from when it took the memory"


def test_an_acknowledgement_that_comes_late_is_none_once_the_engines_are_to_wake() -> None:
    step, done = play(
        ordered_to_sleep(),
        (WindowDecided(SeedWindowState.OPEN, "they are slow"), 2.0),
        (ASLEEP, 3.0),
        acks=False,
    )
    assert (step.phase, done) == (StepPhase.WAKE, ["WakeReserved"])
    step, done = play(
        step, (WindowDecided(SeedWindowState.CLOSED, "they are back"), 4.0), (StepTick(), 5.0), acks=False
    )
    assert (step.phase, done) == (StepPhase.SLEEP, ["SleepReserved"]), "that was the order before"


def test_engines_are_woken_while_they_fall_asleep_when_harvested_ones_are_gone() -> None:
    step, done = play(ordered_to_sleep(), (FleetChanged(0, 1), 2.0), (StepTick(), 7.0), acks=False)
    assert (step.phase, done) == (StepPhase.WAKE, ["WakeReserved"])


def test_a_step_that_begins_beside_sleepers_trains_by_what_they_acknowledged_before() -> None:
    """A run that goes on without a window: closed from the start."""
    how = {
        "harvested": 1,
        "reserved_awake": False,
        "now": 0.0,
        "decided": SeedWindowState.CLOSED,
        "window_reason": "closed",
    }
    step, actions = begin(PLAN, sleep_ack=ASLEEP, **how)  # type: ignore[arg-type]
    assert (step.phase, actions) == (StepPhase.TRAIN, ())
    step, actions = begin(PLAN, **how)  # type: ignore[arg-type]
    assert (step.phase, actions) == (StepPhase.SLEEP, ()), "one of them came meanwhile, say"
    assert play(step, (ASLEEP, 1.0), (GroupsCompleted(1, 4), 2.0))[1] == ["TrainReady"]


def test_any_schedule_ends_and_never_trains_beside_awake_reserved_engines() -> None:
    """`awake`: an engine has its memory, which it gives back some time after it was told to, or when it is ended."""
    ended = kept_open = 0
    for seed in range(300):
        draw = random.Random(seed)
        holds = draw.random() < 0.5  # sometimes it is decided that they go on for the next step
        plan = replace(
            PLAN,
            window=draw.choice([0.0, 0.5, 1.0]),
            reserved=draw.random() < 0.8,
            round_groups=draw.choice([1, 2, 3]),
            ahead=holds,
        )
        now, waiting, awake = 0.0, 4, draw.random() < 0.5
        told, late = awake, draw.random() < 0.1  # what it was told; whether it never acknowledges
        step, actions = begin(plan, harvested=draw.randint(0, 2), reserved_awake=awake, now=now)
        for at in range(400):
            trained = 0
            kept_open += step.kept_open and step.outstanding == 0
            for action in actions:
                match action:
                    case SleepReserved():
                        told = False
                    case WakeReserved():
                        told = awake = True
                    case EndReserved():
                        told = awake = False
                        ended += 1
                    case TrainReady():
                        assert not (awake and plan.reserved)
                        trained = min(plan.round_groups, step.ready_groups)
                    case FinishStep():
                        pass
            if step.phase is StepPhase.FINISH:
                break
            now += draw.random() * 3
            event: Event = Trained(trained) if trained else StepTick()
            if not trained and not told and draw.random() < 0.3:
                awake = awake and (late or draw.random() < 0.5)
                event = ReservedHolds(("0",)) if awake else ReservedAsleep(1, 0)
            elif not trained and holds and draw.random() < 0.2:
                window = SeedWindowState.OPEN if waiting or at < 100 else SeedWindowState.UNDECIDED
                event = WindowDecided(window, "drawn", keep_open=draw.random() < 0.5)
            elif not trained and draw.random() < 0.5:
                event = FleetChanged(draw.randint(0, 2), 1)
            elif not trained and waiting and (awake or step.harvested or not plan.reserved):
                waiting -= 1
                event = GroupsCompleted(1, 4)
            step, actions = react(step, event, now)
        assert step.phase is StepPhase.FINISH, f"seed {seed}: {step}"
    assert ended > 10, "hardly any engine was late: the schedules prove nothing of that"
    assert kept_open > 10, "hardly any window was kept open: the schedules prove nothing of that"


def test_every_phase_but_the_last_has_a_rule() -> None:
    assert {rule.phase for rule in RULES} == set(StepPhase) - {StepPhase.FINISH}


def test_a_decision_closes_and_opens_the_window_whatever_the_share() -> None:
    step, _ = begin(PLAN, harvested=2, reserved_awake=True, now=0.0)
    step, done = play(
        step, (WindowDecided(SeedWindowState.OPEN, "nearly there"), 1.0), (GroupsCompleted(3, 12), 2.0)
    )
    assert (step.phase, done) == (StepPhase.SEED, []), "held open beyond the share"
    step, done = play(step, (WindowDecided(SeedWindowState.CLOSED, "the others are faster"), 3.0))
    assert done == ["SleepReserved", "TrainReady"]
    assert "decided: the others are faster" in step.log[-2]
    step, done = play(
        step, (Trained(3), 4.0), (WindowDecided(SeedWindowState.OPEN, "they are slow now"), 5.0)
    )
    assert (step.phase, done) == (StepPhase.WAKE, ["WakeReserved"])
    step, done = play(step, (WindowDecided(SeedWindowState.CLOSED, "they are back"), 6.0))
    assert (step.phase, done) == (StepPhase.TRAIN, ["SleepReserved"])


def test_no_decision_closes_the_window_while_nobody_else_generates() -> None:
    step, _ = begin(
        PLAN, harvested=0, reserved_awake=True, now=0.0, decided=SeedWindowState.CLOSED, window_reason="wrong"
    )
    assert step.phase is StepPhase.SEED
    step, done = play(
        step, (FleetChanged(1, 1), 1.0), (FleetChanged(0, 1), 2.0), (StepTick(), 7.0), (StepTick(), 100.0)
    )
    assert (step.phase, done) == (StepPhase.WAKE, ["SleepReserved", "WakeReserved"]), (
        "closed, and safely open again when they are gone"
    )
    step, done = play(step, (FleetChanged(1, 1), 101.0))
    assert (step.phase, done) == (StepPhase.TRAIN, ["SleepReserved"])


def test_when_nobody_decides_any_more_the_share_does() -> None:
    step, _ = begin(
        PLAN, harvested=2, reserved_awake=True, now=0.0, decided=SeedWindowState.OPEN, window_reason="stay"
    )
    step, done = play(step, (GroupsCompleted(2, 8), 1.0))
    assert done == []
    step, done = play(step, (WindowDecided(SeedWindowState.UNDECIDED, ""), 2.0))
    assert done == ["SleepReserved", "TrainReady"]


AHEAD = replace(PLAN, ahead=True)
KEEP_OPEN, OPEN, CLOSE = (
    WindowDecided(SeedWindowState.OPEN, "the next step is nearly there", keep_open=True),
    WindowDecided(SeedWindowState.OPEN, "decided otherwise"),
    WindowDecided(SeedWindowState.CLOSED, "the next step is there"),
)


@pytest.mark.parametrize("end", [OPEN, CLOSE])
def test_a_window_is_kept_open_though_every_sample_has_come_and_then_the_step_is_trained(
    end: WindowDecided,
) -> None:
    step, _ = begin(AHEAD, harvested=2, reserved_awake=True, now=0.0)
    step, done = play(step, (KEEP_OPEN, 1.0), (GroupsCompleted(4, 16), 2.0), (StepTick(), 50.0))
    assert (step.phase, done) == (StepPhase.SEED, [])
    step, done = play(step, (end, 51.0))
    assert done == ["SleepReserved", "TrainReady"]


def test_a_window_that_is_kept_open_wakes_no_engine() -> None:
    """What comes too late, after they were told to sleep, would cost two changes more."""
    step, _ = begin(AHEAD, harvested=2, reserved_awake=True, now=0.0)
    step, done = play(step, (GroupsCompleted(4, 16), 1.0), (KEEP_OPEN, 2.0))
    assert (step.phase, set(done)) == (StepPhase.TRAIN, {"SleepReserved", "TrainReady"})
    step, actions = begin(AHEAD, harvested=2, reserved_awake=False, now=0.0, sleep_ack=ASLEEP)
    assert kinds(actions) == ["WakeReserved"], "for the step's own samples"
    asleep = replace(step, reserved_awake=False, sleep_ack=ASLEEP)
    assert "WakeReserved" not in play(asleep, (GroupsCompleted(4, 16), 1.0), (KEEP_OPEN, 2.0))[1]


def test_no_window_is_kept_open_without_steps_in_advance_or_where_harvested_engines_woke_them() -> None:
    step, _ = begin(PLAN, harvested=2, reserved_awake=True, now=0.0)
    assert play(step, (KEEP_OPEN, 1.0), (GroupsCompleted(4, 16), 2.0))[1] == ["SleepReserved", "TrainReady"]
    step, _ = begin(AHEAD, harvested=1, reserved_awake=True, now=0.0)
    step, done = play(step, (CLOSE, 1.0), (FleetChanged(0, 1), 2.0), (StepTick(), 7.0))
    assert step.phase is StepPhase.WAKE
    step, done = play(step, (KEEP_OPEN, 8.0), (GroupsCompleted(4, 16), 9.0))
    assert (step.phase, done) == (StepPhase.WAKE, []), "kept open there, too"
    assert play(step, (CLOSE, 10.0))[1] == ["SleepReserved", "TrainReady"], "every sample has come"
