"""The worker's session as a pure state machine: what is held, sent, resent and said, without a socket."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest

from scavenger.protocol import messages as wire
from scavenger.protocol.messages import Held, unpack_tokens
from scavenger.protocol.worker.events import (
    Abort,
    Add,
    AddRefused,
    Build,
    Built,
    Connect,
    Connected,
    Delta,
    Generated,
    Loaded,
    LoadFailed,
    LoadWeights,
    LogNote,
    MoreHolders,
    PullFailed,
    PullWeights,
    SendMessage,
    SleepEngine,
    Slept,
    Unreachable,
    WakeEngine,
    Woken,
    WorkerAction,
    WorkerLimits,
    WorkerPhase,
    WorkerTick,
)
from scavenger.protocol.worker.session import PHASE_TRANSITIONS, IllegalWorkerPhase, Session
from tests.rollout.talk import LIMITS, ME, SPEC, WELCOME, Talk, chunks, lease, of, sent


def test_a_first_connection_registers_builds_loads_and_works() -> None:
    t = Talk()
    (hello,) = sent(t.do(Connected()))
    assert isinstance(hello, wire.WorkerHello)
    assert (hello.session, hello.loaded_version, hello.held) == ("5e55", -1, ())
    assert Build(SPEC) in t.hear(WELCOME)
    use = wire.UseWeights(7, b"m", ())
    assert LoadWeights(use) in t.hear(use)
    assert t.assign(lease(1)) == []  # waits for its version
    actions = t.do(Loaded(7, b"root", 1.0, 2.0))
    assert sent(actions) == [wire.WeightsLoaded(7, b"root", 1.0, 2.0)]
    (add,) = of(Add, actions)
    assert (add.request.prompt, add.request.accepted, add.request.max_new_tokens) == ((1, 2), (), 10)


def test_a_late_welcome_and_its_orders_do_nothing_and_the_next_welcome_builds() -> None:
    """The daemon answered a hello after it was given up (its database was away): the orders behind it have no engine yet."""
    t = Talk()
    t.do(Connected())
    t.wait(LIMITS.hello_s + 0.1)
    assert t.session.phase is WorkerPhase.CONNECTING
    for late in (
        WELCOME,
        wire.UseWeights(7, b"", ()),
        wire.Sleep(1),
        wire.Wake(2),
        wire.Assign((lease(1),)),
        wire.Revoke(((1, 1),), ""),
    ):
        assert (
            of(Build, t.hear(late))
            == of(SleepEngine, t.log)
            == of(LoadWeights, t.log)
            == of(WakeEngine, t.log)
            == []
        )
    t.do(Connected())
    assert Build(SPEC) in t.hear(WELCOME)
    assert SleepEngine(1) in t.hear(wire.Sleep(1))


def test_tokens_leave_after_flush_ms_or_flush_tokens_in_one_message() -> None:
    t = Talk().joined()
    t.assign(lease(1), lease(2))
    assert not sent(t.made(1, 11))
    assert not sent(t.made(2, 21))
    t.now += 0.09
    assert not sent(t.do(WorkerTick()))
    t.now += 0.01
    (message,) = sent(t.do(WorkerTick()))
    assert isinstance(message, wire.Chunks)
    assert [(c.sample_id, c.offset, unpack_tokens(c.tokens)) for c in message.chunks] == [
        (1, 0, (11,)),
        (2, 0, (21,)),
    ]
    (chunk,) = chunks(t.made(1, 12, 13, 14, 15))
    assert (chunk.offset, unpack_tokens(chunk.tokens), chunk.version, chunk.epoch) == (
        1,
        (12, 13, 14, 15),
        7,
        1,
    )
    assert wire.unpack_logprobs(chunk.logprobs) == (-12.0, -13.0, -14.0, -15.0)


def test_a_turn_s_first_and_last_tokens_leave_at_once_and_those_between_wait() -> None:
    """Somebody waits for the first one, and cannot use its tool before the last."""
    t = Talk().joined()
    t.assign(lease(1, purpose="turn"), lease(2), lease(3, accepted=(1, 2), purpose="turn"))
    assert not sent(t.made(2, 21))

    def left(actions: list[WorkerAction]) -> list[tuple[int, int, tuple[int, ...]]]:
        return [(c.sample_id, c.offset, unpack_tokens(c.tokens)) for c in chunks(actions)]

    assert left(t.made(1, 11)) == [(2, 0, (21,)), (1, 0, (11,))]
    assert left(t.made(1, 12)) == []
    # the first of this engine, of a turn that moved here
    assert left(t.made(3, 31)) == [(1, 1, (12,)), (3, 2, (31,))]
    assert left(t.made(1, 13, finish="stop")) == [(1, 2, (13,))]


@pytest.mark.parametrize(("most", "parts"), [(1, 9), (2, 5), (3, 3), (4, 3), (9, 1), (50, 1)])
def test_all_that_is_unsent_leaves_in_messages_of_bounded_size(most: int, parts: int) -> None:
    """Messages that are just full, and an ending that came without a token, included."""
    t = Talk(dataclasses.replace(LIMITS, message_tokens=most)).joined()
    t.assign(lease(1), lease(2), lease(3))
    t.made(1, 1, 2, 3)
    t.made(2, 4, 5)
    t.made(3, 6, 7, 8)
    t.made(1, 9, finish="stop")
    t.wait(0.5)
    messages_ = [message for message in sent(t.log) if isinstance(message, wire.Chunks)]
    found = [chunk for message in messages_ for chunk in message.chunks]
    assert [sum(len(c.tokens) for c in message.chunks) <= 4 * most for message in messages_] == [True] * parts
    by_sample: dict[int, list[int]] = {}
    for chunk in found:
        by_sample.setdefault(chunk.sample_id, []).extend(unpack_tokens(chunk.tokens))
    assert by_sample == {1: [1, 2, 3, 9], 2: [4, 5], 3: [6, 7, 8]}
    assert [chunk.finish for chunk in found if chunk.finish] == ["stop"]
    assert not [m for m in sent(t.wait(0.2)) if isinstance(m, wire.Chunks)]
    t.made(2, finish="stop")
    (last,) = chunks(t.wait(0.5))
    assert (last.sample_id, last.offset, last.tokens, last.finish) == (2, 2, b"", "stop")


def test_a_continued_sample_counts_offsets_from_its_accepted_tokens() -> None:
    t = Talk().joined()
    (add,) = of(Add, t.assign(lease(1, epoch=4, accepted=(8, 9))))
    assert (add.request.accepted, add.request.max_new_tokens) == ((8, 9), 8)
    (chunk,) = chunks(t.made(1, 1, 2, 3, 4))
    assert (chunk.offset, chunk.epoch) == (2, 4)
    (beat,) = [m for m in sent(t.wait(1.0)) if isinstance(m, wire.Heartbeat)]
    assert beat.held == (Held(1, 4, 6),)


def test_a_finished_lease_is_held_until_all_of_it_is_durable() -> None:
    t = Talk().joined()
    t.assign(lease(1))
    t.made(1, 1, 2, 3, 4, 5, finish="stop")
    (chunk,) = chunks(t.log)
    assert chunk.finish == "stop"
    t.hear(wire.Ack((Held(1, 1, 4),)))
    assert t.session.work.leases.held() == (Held(1, 1, 5),)
    t.hear(wire.Ack((Held(1, 2, 5),)))  # another epoch's
    assert t.session.work.leases.held() == (Held(1, 1, 5),)
    t.hear(wire.Ack((Held(1, 1, 5),)))
    assert t.session.work.leases.held() == ()


@pytest.mark.parametrize(("accepted", "finish"), [((1, 2, 3), "length"), ((1, 9), "stop")])
def test_a_sample_that_is_complete_already_says_so_without_a_token(
    accepted: tuple[int, ...], finish: str
) -> None:
    t = Talk().joined()
    actions = t.assign(lease(1, accepted=accepted, most=3, stop=(9,)))
    assert not of(Add, actions)
    (chunk,) = chunks(actions)
    assert (chunk.offset, chunk.tokens, chunk.finish) == (len(accepted), b"", finish)
    assert t.session.work.leases.held()
    t.hear(wire.Ack((Held(1, 1, len(accepted)),)))
    assert t.session.work.leases.held() == ()


def test_after_a_reconnect_everything_above_the_durable_length_is_sent_again() -> None:
    t = Talk().joined()
    t.assign(lease(1))
    before = chunks(t.made(1, 1, 2, 3, 4))
    t.hear(wire.Ack((Held(1, 1, 2),)))
    (hello,) = sent(t.hear(wire.HelloAgain("restarted")))
    assert isinstance(hello, wire.WorkerHello)
    assert (hello.session, hello.loaded_version, hello.held) == ("5e55", 7, (Held(1, 1, 4),))
    assert not sent(t.made(1, 5, 6, 7, 8))  # kept: nobody listens
    after = chunks(t.hear(WELCOME))
    assert not of(Build, t.log)
    assert [(c.offset, unpack_tokens(c.tokens)) for c in after] == [(2, (3, 4, 5, 6, 7, 8))]
    assert before[0].tokens[8:] == after[0].tokens[:8]
    assert before[0].logprobs[8:] == after[0].logprobs[:8]


def test_under_another_history_of_the_ledger_every_lease_and_the_weights_are_void() -> None:
    """An older ledger was restored: sample 1, epoch 1 and version 7 now name something else, even if every Revoke is lost."""
    talk = Talk()
    talk.do(Connected())
    talk.hear(msgspec.structs.replace(WELCOME, ledger="before"))
    talk.hear(wire.UseWeights(7, b"", ()))
    talk.do(Loaded(7, b"root", 0.1, 0.1))
    talk.assign(lease(1))
    talk.made(1, 11, 12)
    (hello,) = sent(talk.hear(wire.HelloAgain("restarted")))
    assert isinstance(hello, wire.WorkerHello)
    assert (hello.ledger, hello.loaded_version, hello.loaded_root, len(hello.held)) == (
        "before",
        7,
        b"root",
        1,
    )
    again = talk.hear(msgspec.structs.replace(WELCOME, ledger="after"))
    assert of(Abort, again) == [Abort((1,))]
    assert chunks(again) == []
    assert talk.session.work.held() == ()
    (load,) = of(LoadWeights, talk.hear(wire.UseWeights(7, b"", ())))
    assert load.weights.version == 7, "version 7 is another one now"
    talk.do(Loaded(7, b"other", 0.1, 0.1))
    (add,) = of(Add, talk.assign(lease(1)))
    assert add.request.accepted == (), "the same numbers begin anew"
    (hello,) = sent(talk.hear(wire.HelloAgain("restarted")))
    assert isinstance(hello, wire.WorkerHello)
    assert (hello.ledger, hello.loaded_root) == ("after", b"other")
    again = talk.hear(msgspec.structs.replace(WELCOME, ledger="after"))
    assert of(Abort, again) == [], "a restart of the daemon alone voids nothing"


def test_three_unanswered_heartbeats_mean_a_new_socket() -> None:
    t = Talk().joined()
    actions = t.wait(3.5)
    assert len([m for m in sent(actions) if isinstance(m, wire.Heartbeat)]) == 3
    assert not of(Connect, actions)
    (connect,) = of(Connect, t.wait(1.0))
    assert connect.delay_s <= LIMITS.backoff_s
    assert t.session.phase is WorkerPhase.CONNECTING


def test_any_answer_keeps_the_connection() -> None:
    t = Talk().joined()
    for _ in range(20):
        assert not of(Connect, t.wait(1.0))
        t.hear(wire.HeartbeatAck(1))


def test_a_stopped_process_goes_on_after_sigcont_without_a_new_socket() -> None:
    t = Talk().joined()
    t.now += 300.0
    assert not of(Connect, t.do(WorkerTick()))
    t.hear(wire.HeartbeatAck(1))
    assert t.session.phase is WorkerPhase.JOINED


def test_lost_chunks_are_sent_again_while_the_daemon_answers() -> None:
    t = Talk().joined()
    t.assign(lease(1))
    t.made(1, 1, 2, 3, 4)
    t.log.clear()
    for _ in range(4):
        t.wait(1.0)
        t.hear(wire.HeartbeatAck(1))
    again = chunks(t.log)
    assert [(c.offset, unpack_tokens(c.tokens)) for c in again][:1] == [(0, (1, 2, 3, 4))]


def test_waits_between_connects_grow_to_a_bound() -> None:
    t, delays = Talk(), []
    for _ in range(12):
        delays += [a.delay_s for a in of(Connect, t.do(Unreachable("no file")))]
    assert delays == sorted(delays)
    assert delays[-1] == LIMITS.backoff_max_s / 2  # jitter 0 takes the lower half
    t.do(Connected())
    assert of(Connect, t.wait(LIMITS.hello_s))


def test_the_engine_pauses_at_the_bound_of_unacked_tokens_and_goes_on_after_the_ack() -> None:
    t = Talk(WorkerLimits(max_unacked=8)).joined()
    t.assign(lease(1, most=100))
    t.made(1, *range(7))
    assert t.session.may_generate
    t.made(1, 7)
    assert not t.session.may_generate
    t.hear(wire.Ack((Held(1, 1, 8),)))
    assert t.session.may_generate


def test_a_revoke_drops_at_once_and_only_its_epoch() -> None:
    t = Talk().joined()
    t.assign(lease(1), lease(2, epoch=3))
    t.made(1, 1)
    handle = t.session.work.leases.find(1).handle  # type: ignore[union-attr]
    assert of(Abort, t.hear(wire.Revoke(((1, 1), (2, 2)), "moved"))) == [Abort((handle,))]
    assert t.session.work.leases.held() == (Held(2, 3, 0),)
    t.do(Generated((Delta(handle, (5,), (0.0,), (0.0,)),)))  # was under way
    assert not chunks(t.wait(0.2))


def test_a_later_epoch_of_a_held_sample_replaces_it_and_a_repeat_does_nothing() -> None:
    t = Talk().joined()
    t.assign(lease(1))
    t.made(1, 1, 2)
    assert t.assign(lease(1)) == []
    actions = t.assign(lease(1, epoch=2, accepted=(1,)))
    assert of(Abort, actions)
    assert of(Add, actions)
    assert t.session.work.leases.held() == (Held(1, 2, 1),)
    assert t.assign(lease(1)) == []


def test_an_assignment_for_another_version_is_not_held() -> None:
    t = Talk().joined()
    assert not of(Add, t.assign(lease(1, version=6)))
    assert t.session.work.leases.held() == ()


def test_new_weights_end_running_leases_flush_first_and_keep_finished_ones() -> None:
    t = Talk().joined()
    t.assign(lease(1), lease(2))
    t.made(1, 1)
    t.made(2, 2, finish="stop")
    actions = t.hear(wire.UseWeights(8, b"m", ()))
    assert {c.sample_id for c in chunks(actions)} == {1, 2}
    assert len(of(Abort, actions)) == len(of(LoadWeights, actions)) == 1
    assert t.session.work.leases.held() == (Held(2, 1, 1),)
    assert t.hear(wire.UseWeights(8, b"m", ())) == []  # a repeat while it loads
    t.do(Loaded(8, b"r8", 0.0, 0.0))
    assert sent(t.hear(wire.UseWeights(8, b"m", ()))) == [wire.WeightsLoaded(8, b"r8")]


def test_the_next_version_is_pulled_ahead_and_disturbs_no_lease() -> None:
    t = Talk().joined()
    t.assign(lease(1))
    t.made(1, 1)
    ahead = wire.UseWeights(8, b"m", ())
    assert of(PullWeights, t.hear(wire.PullAhead(ahead))) == [PullWeights(ahead)]
    assert t.session.work.leases.held() == (Held(1, 1, 1),)
    assert t.session.work.loaded_version == 7
    more = wire.UseWeights(8, b"", (wire.WeightSource("tcp://engine2:1", "", b"t"),), more=True)
    assert of(MoreHolders, t.hear(more)) == [MoreHolders(more)], "who holds it by now"
    assert t.hear(wire.UseWeights(6, b"", more.sources, more=True)) == [], "an older one"
    assert t.hear(wire.PullAhead(wire.UseWeights(7, b"m", ()))) == [], "it has that one"
    assert of(LoadWeights, t.hear(ahead))
    assert t.hear(wire.PullAhead(wire.UseWeights(9, b"m", ()))) == [], "a load is not disturbed"


def test_heartbeats_say_which_version_is_pulled_ahead_until_that_fails_or_a_load_is_ordered() -> None:
    t = Talk().joined()

    def said() -> int:
        (beat,) = [
            message for message in sent(t.wait(WELCOME.heartbeat_s)) if isinstance(message, wire.Heartbeat)
        ]
        t.hear(wire.HeartbeatAck(1, beat.heard + 1))
        return beat.ahead

    assert said() == -1
    for version in (8, 9):
        t.hear(wire.PullAhead(wire.UseWeights(version, b"m", ())))
    assert said() == 9
    t.do(PullFailed(8))
    assert said() == 9, "the newest order counts"
    t.do(PullFailed(9))
    assert said() == -1
    t.hear(wire.PullAhead(wire.UseWeights(9, b"m", ())))
    assert said() == 9
    t.hear(wire.UseWeights(9, b"m", ()))
    assert said() == -1
    t.hear(wire.PullAhead(wire.UseWeights(10, b"m", ())))
    assert said() == -1, "an order that a load keeps from being done is repeated"


def test_the_time_from_a_version_s_last_token_to_the_next_one_s_first_is_told() -> None:
    t = Talk().joined()

    def pause() -> float:
        return t.session.work.heartbeat(0, 0.0).weights_pause_s

    t.assign(lease(1))
    t.made(1, 1)
    assert pause() == 0.0, "the first load of all paused nothing"
    t.now += 1.0
    t.made(1, 2, finish="stop")
    t.now += 0.25
    t.hear(wire.UseWeights(8, b"m", ()))
    t.now += 2.0
    t.do(Loaded(8, b"r8", 1.5, 0.5))
    t.assign(lease(2, version=8))
    t.now += 0.25
    notes = of(LogNote, t.made(2, 1))
    assert pause() == pytest.approx(2.5)
    assert [note.detail for note in notes] == ["2.500 s to version 8"]
    t.now += 1.0
    t.made(2, 2)
    assert pause() == pytest.approx(2.5), "only the first token counts"
    t.hear(wire.Sleep(1))
    t.do(Slept(1, 0))
    t.now += 50.0
    t.hear(wire.Wake(2))
    t.do(Woken(2, 1.0, 0))
    t.hear(wire.UseWeights(9, b"m", ()))
    t.do(Loaded(9, b"r9", 0.0, 0.0))
    t.assign(lease(3, version=9))
    t.made(3, 1)
    assert pause() == pytest.approx(2.5), "what it slept, no load cost"


def test_a_version_that_was_superseded_while_loading_is_not_announced() -> None:
    t = Talk().joined()
    t.hear(wire.UseWeights(8, b"", ()))
    t.hear(wire.UseWeights(9, b"", ()))
    assert not sent(t.do(Loaded(8, b"r8", 0.0, 0.0)))
    assert sent(t.do(Loaded(9, b"r9", 0.0, 0.0))) == [wire.WeightsLoaded(9, b"r9")]


def test_weights_that_fail_are_reported_and_may_be_asked_again() -> None:
    t = Talk().joined()
    t.hear(wire.UseWeights(8, b"", ()))
    assert sent(t.do(LoadFailed(8, "hash"))) == [wire.WeightsFailed(8, "hash")]
    assert of(LoadWeights, t.hear(wire.UseWeights(8, b"", ())))


def test_sleep_flushes_then_aborts_then_answers() -> None:
    t = Talk().joined()
    t.assign(lease(1))
    t.made(1, 1)
    actions = t.hear(wire.Sleep(1))
    assert [type(a) for a in actions] == [Abort, SendMessage, SendMessage, SleepEngine]
    assert [type(m) for m in sent(actions)] == [wire.Chunks, wire.Yielded], "all tokens, then the lease"
    t.hear(wire.Revoke(((1, 1),), "given back"))
    assert t.session.work.leases.held() == ()
    assert sent(t.hear(wire.Sleep(1))) == [], "repeated while the engine is at it"
    assert sent(t.do(Slept(1, 512))) == [wire.Asleep(1, 512)]
    assert sent(t.hear(wire.Sleep(1))) == [wire.Asleep(1, 512)]
    assert of(WakeEngine, t.hear(wire.Wake(2)))
    assert t.hear(wire.Wake(2)) == []
    assert of(Add, t.assign(lease(1, epoch=2)))
    assert sent(t.do(Woken(2, 0.5, 4096))) == [wire.Awake(2, 4096)]
    assert sent(t.hear(wire.Sleep(1))) == [wire.Awake(2, 4096)], "an order that comes late is none"


def test_an_order_is_acknowledged_by_what_the_engine_did_for_it_and_not_for_one_before() -> None:
    """Told to sleep, wake and sleep again before the engine was done with the first: its memory is taken in between."""
    t = Talk().joined()
    assert [a for order in (wire.Sleep(1), wire.Wake(2), wire.Sleep(3)) for a in t.hear(order)] == [
        SleepEngine(1),
        WakeEngine(2),
        SleepEngine(3),
    ]
    assert sent(t.do(Slept(1, 512))) == []
    assert t.session.work.memory == "falling-asleep"
    assert sent(t.do(Woken(2, 0.5, 4096))) == []
    assert sent(t.do(Slept(3, 256))) == [wire.Asleep(3, 256)]


def test_an_order_in_between_that_was_lost_changes_nothing_but_the_number() -> None:
    t = Talk().joined()
    t.hear(wire.Sleep(1))
    assert t.hear(wire.Sleep(3)) == []
    assert sent(t.do(Slept(1, 512))) == [wire.Asleep(3, 512)]
    assert sent(t.hear(wire.Sleep(5))) == [wire.Asleep(5, 512)]


def test_falling_asleep_while_disconnected_is_told_after_the_welcome() -> None:
    t = Talk().joined()
    t.hear(wire.Sleep(1))
    (hello,) = [m for m in sent(t.hear(wire.HelloAgain("restarted"))) if isinstance(m, wire.WorkerHello)]
    assert (hello.memory, hello.memory_order) == ("falling-asleep", 1)
    assert not sent(t.do(Slept(1, 512)))
    assert wire.Asleep(1, 512) in sent(t.hear(WELCOME))


def test_what_a_sleeper_generated_is_sent_again_until_it_is_durable() -> None:
    """The daemon dies between the flush and its commit: what only the sleeper has is not generated again."""
    t = Talk().joined()
    t.assign(lease(1))
    t.made(1, 1, 2, 3)
    t.hear(wire.Sleep(1))
    t.do(Slept(1, 512))
    (hello,) = [m for m in sent(t.hear(wire.HelloAgain("restarted"))) if isinstance(m, wire.WorkerHello)]
    assert [(held.sample_id, held.length) for held in hello.held] == [(1, 3)]
    again = sent(t.hear(WELCOME))
    (chunks,) = [m for m in again if isinstance(m, wire.Chunks)]
    assert [(c.offset, len(c.tokens) // 4) for c in chunks.chunks] == [(0, 3)]
    assert [m.leases for m in again if isinstance(m, wire.Yielded)] == [(wire.Held(1, 1, 3),)]
    assert t.session.work.memory == "asleep"


def test_nothing_but_the_order_wakes_a_sleeper() -> None:
    """Work for it means that the order was lost: it is repeated, and the leases are assigned again."""
    t = Talk().joined()
    t.hear(wire.Sleep(1))
    t.do(Slept(1, 512))
    assert [type(a) for a in t.assign(lease(1))] == [LogNote]
    (beat,) = [m for m in sent(t.wait(1.0)) if isinstance(m, wire.Heartbeat)]
    assert (beat.held, beat.memory, beat.memory_order, beat.bytes_held) == ((), "asleep", 1, 512)


def test_a_failed_sample_leaves_what_it_made_before() -> None:
    t = Talk().joined()
    t.assign(lease(1), lease(2))
    t.made(1, 1)
    handle = t.session.work.leases.find(1).handle  # type: ignore[union-attr]
    messages = sent(t.do(Generated((Delta(handle, (), (), (), error="NaN"),))))
    assert [type(m) for m in messages] == [wire.Chunks, wire.SampleFailed]
    assert messages[1] == wire.SampleFailed(1, 1, "NaN")
    handle = t.session.work.leases.find(2).handle  # type: ignore[union-attr]
    assert sent(t.do(AddRefused(handle, "too long"))) == [wire.SampleFailed(2, 1, "too long")]


def test_a_reserved_engine_names_its_slot_in_every_hello() -> None:
    session = Session(dataclasses.replace(ME, kind="reserved", slot="engine-1"), LIMITS, 0.0)
    for _ in range(2):
        (hello,) = sent(session.handle(Connected(), 0.0))
        assert isinstance(hello, wire.WorkerHello)
        assert hello.slot == "engine-1"


def test_the_table_of_phases_is_kept() -> None:
    assert set(PHASE_TRANSITIONS) == set(WorkerPhase)
    t = Talk()
    with pytest.raises(IllegalWorkerPhase):
        t.session._enter(WorkerPhase.JOINED)
    assert t.session.phase is WorkerPhase.CONNECTING


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_lost_every_token_arrives_once_and_in_order(seed: int) -> None:
    """A lossy link and a daemon that accepts only what continues what it has: the samples come out whole."""
    rng, t = random.Random(seed), Talk().joined()
    truth = {s: list(range(s * 100, s * 100 + rng.randrange(1, 40))) for s in range(6)}
    got: dict[int, list[int]] = {s: [] for s in truth}
    made = dict.fromkeys(truth, 0)
    done: set[int] = set()
    t.assign(*(lease(s, most=50) for s in truth))
    t.log.clear()
    for _ in range(3000):
        if len(done) == len(truth) and not t.session.work.leases.held():
            break
        t.wait(rng.random() * 0.3)
        for s in rng.sample(sorted(truth), 2):
            if made[s] < len(truth[s]) and t.session.may_generate:
                step = rng.randrange(1, 4)
                part = truth[s][made[s] : made[s] + step]
                made[s] += len(part)
                t.made(s, *part, finish="stop" if made[s] == len(truth[s]) else None)
        outbox, t.log = t.log, []
        for action in outbox:
            if isinstance(action, Connect):
                t.do(Connected())
            if not isinstance(action, SendMessage) or rng.random() < 0.3:
                continue
            if isinstance(action.message, wire.WorkerHello):
                t.hear(WELCOME)
            elif isinstance(action.message, wire.Heartbeat):
                answers: list[wire.ToWorker] = [wire.HeartbeatAck(1), wire.HelloAgain("?")]
                t.hear(rng.choice(answers))
            elif isinstance(action.message, wire.Chunks):
                for c in action.message.chunks:
                    tokens, have = unpack_tokens(c.tokens), got[c.sample_id]
                    if c.offset <= len(have):
                        assert list(tokens[: len(have) - c.offset]) == have[c.offset : c.offset + len(tokens)]
                        have += tokens[len(have) - c.offset :]
                        if c.finish:
                            done.add(c.sample_id)
                    if rng.random() < 0.7:
                        t.hear(wire.Ack((Held(c.sample_id, 1, len(have)),)))
    assert got == truth
    assert done == set(truth)
    assert not t.session.work.leases.held()


def test_what_the_engine_says_of_itself_is_told_with_its_weights_and_when_it_registers_again() -> None:
    t = Talk()
    t.do(Connected())
    t.hear(WELCOME)
    t.do(Built(cache_tokens=4096, best_batch=48))
    t.hear(wire.UseWeights(7, b"", ()))
    (loaded,) = [m for m in sent(t.do(Loaded(7, b"root", 0.1, 0.2))) if isinstance(m, wire.WeightsLoaded)]
    assert (loaded.cache_tokens, loaded.best_batch, loaded.pull_s, loaded.load_s) == (4096, 48, 0.1, 0.2)
    (again,) = [m for m in sent(t.hear(wire.UseWeights(7, b"", ()))) if isinstance(m, wire.WeightsLoaded)]
    assert again.cache_tokens == 4096
    (hello,) = [m for m in sent(t.hear(wire.HelloAgain("restarted"))) if isinstance(m, wire.WorkerHello)]
    assert (hello.cache_tokens, hello.best_batch) == (4096, 48)


def test_heartbeats_say_what_the_last_waking_took() -> None:
    t = Talk().joined()
    (before,) = [m for m in sent(t.wait(1.0)) if isinstance(m, wire.Heartbeat)]
    t.hear(wire.Sleep(1))
    t.do(Slept(1, 0))
    t.hear(wire.Wake(2))
    t.do(Woken(2, 0.75, 0))
    (after,) = [m for m in sent(t.wait(1.0)) if isinstance(m, wire.Heartbeat)]
    assert (before.wake_s, after.wake_s) == (0.0, 0.75)
