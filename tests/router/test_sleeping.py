"""A reserved worker is asleep when it said so, of the newest order, and not before; who was lost without a word may hold its memory."""

from __future__ import annotations

import pytest

from scavenger.protocol.messages import (
    Asleep,
    Attach,
    Awake,
    Denied,
    EndReserved,
    Fleet,
    Goodbye,
    Heartbeat,
    HelloAgain,
    Ok,
    Rejected,
    SetReserved,
    Sleep,
    UseWeights,
    Wake,
    reserved_name,
)
from scavenger.router.core.state import Worker
from scavenger.router.core.transitions import (
    MEMORY_TRANSITIONS,
    GpuMemoryState,
    IllegalTransition,
    MemoryStep,
)
from tests.router.harness import Bench, started

W1, W2 = 50, 51
#: The engine in slot "0" over these connections.
NAME, NEXT = reserved_name("0", f"s{W1}"), reserved_name("0", f"s{W2}")


def told_to_sleep(**how: object) -> Bench:
    """A bench whose one reserved engine, in slot "0", was told to sleep by its trainer's first word, and is at it."""
    bench = started(n=1, **how)  # type: ignore[arg-type]
    bench.join(W1, kind="reserved", slot="0")
    bench.call(SetReserved(False, 1))
    assert bench.take(W1, Sleep) == [Sleep(1)]
    return bench


def fleet(bench: Bench) -> Fleet:
    """What the trainer heard last."""
    bench.tick()
    found = bench.router.core.runs["r"].trainer.fleet
    assert found is not None
    return found


def memory(bench: Bench) -> tuple[int, tuple[str, ...], tuple[str, ...], int]:
    seen = fleet(bench)
    return seen.order, seen.asleep, seen.holding, seen.bytes_held


def worker(bench: Bench) -> Worker:
    (found,) = bench.router.core.workers.values()
    return found


def test_a_worker_is_asleep_once_it_acknowledged_and_not_once_it_was_told() -> None:
    bench = told_to_sleep()
    assert memory(bench) == (1, (), (NAME,), 0)
    bench.say(W1, Asleep(1, 512))
    assert memory(bench) == (1, (NAME,), (), 512)
    bench.call(SetReserved(True, 2, 7))
    assert bench.router.core.runs["r"].reserved.trainer_bytes == 7, "as the status shows it"
    assert bench.take(W1, Wake) == [Wake(2)]
    assert memory(bench) == (2, (), (NAME,), 0)
    assert worker(bench).memory.state is GpuMemoryState.WAKING
    bench.say(W1, Awake(2, 4096))
    assert worker(bench).memory.state is GpuMemoryState.AWAKE


def test_the_trainer_is_told_at_once_and_not_at_the_next_tick() -> None:
    bench = told_to_sleep()
    bench.take(1, Fleet)
    bench.say(W1, Asleep(1, 512))
    assert [(f.asleep, f.holding) for f in bench.take(1, Fleet)] == [((NAME,), ())]


def test_the_acknowledgement_of_an_older_order_is_none_of_the_newest() -> None:
    """It was woken in between: its memory is taken before it is given back."""
    bench = told_to_sleep()
    bench.say(W1, Asleep(1, 512))
    bench.call(SetReserved(True, 2))
    bench.call(SetReserved(False, 3))
    assert bench.take(W1, Sleep) == [Sleep(3)]
    for late in (Asleep(1, 512), Heartbeat((), 0, 1, memory="asleep", memory_order=1), Asleep(2, 512)):
        bench.say(W1, late)
        assert memory(bench) == (3, (), (NAME,), 0)
    bench.say(W1, Asleep(3, 256))
    assert memory(bench) == (3, (NAME,), (), 256)


def test_no_wake_is_sent_before_the_engine_sleeps_nor_before_the_trainer_says_that_it_gave_its_memory_back() -> (
    None
):
    bench = told_to_sleep()
    bench.call(SetReserved(True, 2))
    assert bench.take(W1, Wake) == [], "it is falling asleep"
    bench.say(W1, Asleep(1, 512))
    assert bench.take(W1, Wake) == [Wake(2)]


def test_an_acknowledgement_that_was_lost_is_in_the_next_heartbeat_and_a_lost_order_is_repeated() -> None:
    bench = told_to_sleep()
    bench.say(W1, Heartbeat((), 0, 1))
    assert bench.take(W1, Sleep) == [Sleep(1)], "it has heard of none"
    bench.say(W1, Heartbeat((), 0, 1, memory="falling-asleep", memory_order=1))
    assert (bench.take(W1, Sleep), memory(bench)[2]) == ([], (NAME,))
    bench.say(W1, Heartbeat((), 0, 1, memory="asleep", memory_order=1, bytes_held=99))
    assert memory(bench) == (1, (NAME,), (), 99)
    bench.call(SetReserved(True, 2))
    bench.take(W1, Wake)
    bench.say(W1, Heartbeat((), 0, 1, memory="asleep", memory_order=1))
    assert bench.take(W1, Wake) == [Wake(2)]
    bench.say(W1, Heartbeat((), 0, 1, memory="awake", memory_order=2))
    assert (bench.take(W1, Wake), worker(bench).memory.state) == ([], GpuMemoryState.AWAKE)


def test_an_engine_that_is_silent_or_lost_without_a_word_holds_its_memory_until_its_trainer_says_that_it_is_gone() -> (
    None
):
    bench = told_to_sleep()
    bench.tick(5.0)
    assert memory(bench) == (1, (), (NAME,), 0), "suspect"
    bench.tick(10.0)
    assert bench.router.core.workers == {}
    assert memory(bench) == (1, (), (NAME,), 0)
    assert isinstance(bench.call(EndReserved((NAME,), "no acknowledgement within 60 s")), Ok)
    assert memory(bench) == (1, (), (), 0)


def test_an_engine_that_fell_silent_asleep_holds_nothing_and_another_one_in_its_slot_takes_its_place() -> (
    None
):
    bench = told_to_sleep()
    bench.say(W1, Asleep(1, 512))
    bench.tick(20.0)
    assert memory(bench) == (1, (), (), 0)
    bench.hello(W2, kind="reserved", slot="0")
    assert bench.take(W2, Sleep) == [Sleep(1)]
    assert memory(bench) == (1, (), (NEXT,), 0)


def test_an_engine_that_says_goodbye_holds_nothing() -> None:
    bench = told_to_sleep()
    bench.say(W1, Goodbye("SIGTERM", True))
    assert memory(bench) == (1, (), (), 0)


def test_an_ended_engine_s_samples_go_on_elsewhere_with_their_tokens_and_it_is_let_in_no_more() -> None:
    bench = started(n=1)
    (lease,) = bench.join(W1, kind="reserved", slot="0")
    bench.call(SetReserved(False, 1))
    bench.chunk(W1, lease, 0, 4)
    bench.join(W2)
    bench.call(EndReserved((NAME,), "no acknowledgement within 60 s of being told to sleep: 0"))
    (moved,) = bench.leases(W2)
    assert (moved.sample_id, len(moved.accepted)) == (lease.sample_id, 16)
    (told,) = bench.events("reserved_ended")
    assert "no acknowledgement within 60 s" in told.reason
    bench.say(W1, Heartbeat((), 0, 1))
    assert len(bench.take(W1, HelloAgain)) == 1
    bench.hello(W1, kind="reserved", slot="0", session=f"s{W1}")
    assert "another engine has its slot" in bench.take(W1, Rejected)[0].reason


def test_who_sleeps_since_before_the_daemon_restarted_is_woken_when_the_trainer_says_so_and_not_before() -> (
    None
):
    """The trainer may be at work on its GPUs: until it is heard, nothing is known of what it wants."""
    bench = told_to_sleep()
    bench.say(W1, Asleep(1, 512))
    bench.restart()
    bench.hello(
        W2,
        kind="reserved",
        slot="0",
        session=f"s{W1}",
        loaded=1,
        memory="asleep",
        memory_order=1,
        bytes_held=512,
    )
    bench.call(Attach("r", ()), conn=2)
    assert (bench.take(W2, Wake), bench.take(W2, Sleep)) == ([], [])
    assert worker(bench).memory.state is GpuMemoryState.ASLEEP
    bench.call(SetReserved(True, 2), conn=2)
    assert bench.take(W2, Wake) == [Wake(2)]


def test_who_is_awake_when_the_daemon_restarts_is_not_put_to_sleep_before_the_trainer_says_so() -> None:
    bench = told_to_sleep()
    bench.restart()
    bench.hello(W2, kind="reserved", slot="0", session=f"s{W1}", loaded=1, memory="waking", memory_order=4)
    assert bench.take(W2, Sleep) == []
    bench.call(Attach("r", ()), conn=2)
    bench.call(SetReserved(False, 3), conn=2)
    assert bench.take(W2, Sleep) == [Sleep(5)], "its numbers go on"


def test_a_restarted_daemon_knows_an_engine_that_does_not_come_back_by_its_trainer_s_name() -> None:
    bench = told_to_sleep()
    bench.restart()
    bench.call(Attach("r", ()), conn=2)
    bench.call(SetReserved(False, 2), conn=2)
    bench.tick(60.0)
    assert bench.router.core.workers == {}
    run = bench.router.core.runs["r"]
    assert run.trainer.fleet is not None
    assert run.trainer.fleet.holding == (NAME,)
    bench.call(EndReserved((NAME,), "its process ended"), conn=2)
    bench.tick()
    assert run.trainer.fleet.holding == ()


def test_weights_that_an_engine_was_to_load_before_it_slept_are_asked_for_again() -> None:
    bench = started(n=1)
    (lease,) = bench.join(W1, kind="reserved", slot="0")
    bench.chunk(W1, lease, 0, 4, finish="stop")
    bench.publish(2, step=1)
    bench.commit_step(1, [lease.sample_id])
    bench.submit(step=2, version=2)
    for order in (1, 3):
        assert bench.take(W1, UseWeights)[-1].version == 2, "it may never have come"
        bench.call(SetReserved(False, order))
        bench.say(W1, Asleep(order, 512))
        bench.call(SetReserved(True, order + 1))
        assert bench.take(W1, Wake) == [Wake(order + 1)]


def test_a_word_of_the_trainer_that_comes_late_changes_nothing() -> None:
    bench = told_to_sleep()
    bench.call(SetReserved(True, 2))
    bench.call(SetReserved(False, 1))
    assert bench.router.core.runs["r"].reserved.awake
    assert fleet(bench).order == 2


def test_only_the_run_s_own_trainer_says_that_an_engine_is_gone() -> None:
    bench = told_to_sleep()
    assert isinstance(bench.call(EndReserved((NAME,), "gone"), attempt=0), Denied)
    assert memory(bench)[2] == (NAME,)


def test_what_the_memory_s_table_does_not_hold_raises_and_changes_nothing() -> None:
    bench = started(n=1)
    bench.join(W1, kind="reserved", slot="0")
    one = worker(bench)
    for state in GpuMemoryState:
        for step in MemoryStep:
            one.memory.state = state
            if step in MEMORY_TRANSITIONS[state]:
                one.transition_memory(step)
                assert one.memory.state is MEMORY_TRANSITIONS[state][step]
            else:
                with pytest.raises(IllegalTransition, match=f"{state} and cannot {step}"):
                    one.transition_memory(step)
                assert one.memory.state is state
