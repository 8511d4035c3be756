"""KV blocks in the worker's session: offered before the goodbye, kept for a moment behind it, and never of two versions."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from rollout.kv import KvShelf
from scavenger.protocol import messages as wire
from scavenger.protocol.kv import MOST_NBYTES
from scavenger.protocol.messages import KvKept, KvOffer, KvTried, WeightSource
from scavenger.protocol.worker.events import (
    EXIT_PREEMPTED,
    Abort,
    Add,
    Built,
    Delta,
    DropTurnKv,
    EndWorker,
    EngineCrashed,
    Generated,
    KeepKv,
    KeepOtherKv,
    KvLoaded,
    KvTaken,
    LeaveKv,
    Terminate,
    TurnKvKept,
)
from tests.rollout.talk import LIMITS, Talk, lease, of, sent

HERE = WeightSource("tcp://node1:5", "key", b"token")


def keeping() -> Talk:
    """A worker whose engine gives out blocks of 64 bytes a token, with a sample of three tokens beyond its two of prompt."""
    t = Talk().joined()
    t.do(Built(0, 0, HERE, 64))
    t.assign(lease(1), lease(2))
    t.made(1, 11, 12, 13)
    return t


def test_a_worker_that_is_preempted_offers_its_samples_blocks_before_its_goodbye_and_the_goodbye_waits_for_none() -> (
    None
):
    t = keeping()
    actions = t.do(Terminate("SIGTERM"))
    said = sent(actions)
    assert [type(one) for one in said] == [wire.Chunks, KvKept, wire.Goodbye]
    assert said[1] == KvKept((KvOffer(1, 1, 1, 4, 64), KvOffer(2, 1, 2, 1, 64)), HERE)
    assert of(KeepKv, actions) == [KeepKv(1, 4, ""), KeepKv(2, 1, "")]
    kinds = [type(action) for action in actions]
    assert kinds.index(KeepKv) < kinds.index(Abort), "the engine has them until it is told to forget"


def test_it_stays_for_its_readers_and_goes_with_the_last_of_them() -> None:
    t = keeping()
    t.do(Terminate("SIGTERM"))
    assert of(EndWorker, t.hear(wire.GoodbyeAck())) == []
    assert of(EndWorker, t.do(KvTaken(1))) == []
    (end,) = of(EndWorker, t.do(KvTaken(0)))
    assert end.code == EXIT_PREEMPTED


def test_it_stays_for_its_readers_where_its_shelf_says_at_once_what_is_waited_for() -> None:
    t, shelf, said = keeping(), KvShelf(), []
    for action in t.do(Terminate("SIGTERM")):
        if isinstance(action, KeepKv):
            assert shelf.expect(action.handle, 64 * action.tokens)
        elif isinstance(action, LeaveKv):
            shelf.leave(action.wanted)
            said.append(shelf.taken())
    for one in said:
        t.do(one)
    assert of(EndWorker, t.hear(wire.GoodbyeAck())) == []
    assert len(of(EndWorker, t.do(KvTaken(0)))) == 1


def test_it_stays_no_longer_than_its_bound_and_never_beyond_the_goodbye_s_own() -> None:
    t = keeping()
    t.do(Terminate("SIGTERM"))
    t.now += 0.3
    t.hear(wire.GoodbyeAck())
    assert of(EndWorker, t.wait(LIMITS.notice_s - 0.31)) == []
    assert len(of(EndWorker, t.wait(0.02))) == 1

    t = keeping()
    t.hear(wire.Drain("enough"))
    t.hear(wire.GoodbyeAck())
    assert of(EndWorker, t.wait(LIMITS.kv_s - 0.01)) == []
    assert len(of(EndWorker, t.wait(0.02))) == 1


def test_readers_that_were_quicker_than_the_goodbye_s_ack_are_not_waited_for() -> None:
    t = keeping()
    t.do(Terminate("SIGTERM"))
    t.do(KvTaken(0))
    assert len(of(EndWorker, t.hear(wire.GoodbyeAck()))) == 1


def test_an_engine_that_died_gives_nothing_out() -> None:
    t = keeping()
    actions = t.do(EngineCrashed("out of memory"))
    assert of(KeepKv, actions) == []
    assert KvKept not in [type(one) for one in sent(actions)]


def test_leases_that_are_asked_back_are_offered_before_they_are_given() -> None:
    t = keeping()
    actions = t.hear(wire.Yield(((1, 1),), "moved"))
    assert [type(one) for one in sent(actions)] == [wire.Chunks, KvKept, wire.Yielded]
    assert of(KeepKv, t.hear(wire.Yield(((1, 1),), "asked before"))) == [], "once"


def test_blocks_that_another_version_had_a_part_in_stay() -> None:
    t = Talk().joined()
    t.do(Built(0, 0, HERE, 64))
    t.assign(
        msgspec.structs.replace(lease(1), begun_version=3), msgspec.structs.replace(lease(2), begun_version=7)
    )
    assert [one.handle for one in of(KeepKv, t.do(Terminate("SIGTERM")))] == [2]


def test_without_a_place_to_give_them_out_nothing_is_kept() -> None:
    t = Talk().joined()
    t.do(Built(0, 0))
    t.assign(lease(1))
    actions = t.do(Terminate("SIGTERM"))
    assert of(KeepKv, actions) == []
    assert len(of(EndWorker, t.hear(wire.GoodbyeAck()))) == 1


def test_a_request_says_where_its_blocks_are_and_the_daemon_hears_what_came_of_them() -> None:
    t = keeping()
    there = wire.KvSource(HERE, 4, 5, 0.5)
    (add,) = of(Add, t.assign(msgspec.structs.replace(lease(3, accepted=(1, 2, 3, 4)), kv=there)))
    assert add.request.kv == there
    (said,) = sent(t.do(KvLoaded(add.request.handle, 5, 320, 0.25, "of another version")))
    assert said == KvTried(3, 1, 5, 320, 0.25, "of another version")
    t.hear(wire.Revoke(((3, 1),), "moved on"))
    assert sent(t.do(KvLoaded(add.request.handle, 5, 320, 0.25))) == [], "its lease is over"


def test_no_more_is_offered_than_is_kept() -> None:
    """Who came for what was pushed out by the rest would come in vain."""
    t = keeping()
    t.do(Built(0, 0, HERE, MOST_NBYTES // 4))  # four tokens of the first fill it
    actions = t.do(Terminate("SIGTERM"))
    (kept,) = [one for one in sent(actions) if isinstance(one, KvKept)]
    assert [one.sample_id for one in kept.offers] == [1]
    assert [one.handle for one in of(KeepKv, actions)] == [1]


def test_offers_have_a_bound_as_each_message_has() -> None:
    t = Talk(replace(LIMITS, message_tokens=1 << 16)).joined()
    t.do(Built(0, 0, HERE, 64))
    t.assign(*[lease(sample) for sample in range(1, wire.MAX_KV_OFFERS + 3)])
    actions = t.do(Terminate("SIGTERM"))
    (kept,) = [one for one in sent(actions) if isinstance(one, KvKept)]
    assert len(kept.offers) == wire.MAX_KV_OFFERS == len(of(KeepKv, actions))
    wire.decode_to_daemon(wire.encode(kept))


# ---------------------------------------------------------------- what turns leave


def turn(sample: int, **changed: object) -> wire.Lease:
    given = lease(sample, most=3)
    key = msgspec.structs.replace(given.key, purpose=wire.TURN)
    return msgspec.structs.replace(given, key=key, leaves_kv=True, **changed)


def finished(t: Talk, sample: int = 3, **changed: object) -> KeepKv:
    """A turn has its last token; what its worker asks of the engine."""
    (add,) = of(Add, t.assign(turn(sample, **changed)))
    assert add.request.leaves_kv
    given = Delta(add.request.handle, (21, 22, 23), (0.0,) * 3, (0.0,) * 3, "length")
    (keep,) = of(KeepKv, t.do(Generated((given,))))
    return keep


def test_what_a_finished_turn_leaves_is_offered_once_it_is_kept() -> None:
    t = keeping()
    keep = finished(t)
    assert keep == KeepKv(3, 4, "", of_turn=True)
    t.hear(wire.Ack((wire.Held(3, 1, 3),)))  # its lease is over
    assert [one for one in sent(t.wait(1.0)) if isinstance(one, KvKept)] == []
    said = sent(t.do(TurnKvKept(3, 256, 0.01)))
    assert said == [KvKept((KvOffer(3, 1, 3, 4, 64),), HERE)]
    assert t.session.work.kv_kept == 0, "a goodbye waits for none"


def test_what_was_not_kept_is_not_offered() -> None:
    t = keeping()
    finished(t)
    assert sent(t.do(TurnKvKept(3, 0, 0.0, "there is no room for them"))) == []


def test_a_turn_that_two_versions_had_a_part_in_leaves_nothing_and_the_engine_need_not_keep_it() -> None:
    t = keeping()
    (add,) = of(Add, t.assign(turn(3, begun_version=3)))
    given = Delta(add.request.handle, (21, 22, 23), (0.0,) * 3, (0.0,) * 3, "length")
    actions = t.do(Generated((given,)))
    assert of(KeepKv, actions) == []
    assert of(Abort, actions) == [Abort((add.request.handle,))]


def test_an_order_to_fetch_is_answered_whatever_comes_of_it() -> None:
    t = keeping()
    order = wire.KvSource(WeightSource("tcp://node2:5", "key", b"token"), 4, 30, 0.4)
    (fetch,) = of(KeepOtherKv, t.hear(wire.FetchKv(9, 2, order)))
    assert (fetch.order, fetch.handle) == (order, 3), "under a number of its own"
    assert sent(t.do(TurnKvKept(3, 30 * 64, 0.25))) == [
        KvTried(9, 2, 30, 30 * 64, 0.25),
        KvKept((KvOffer(9, 2, 3, 30, 64),), HERE),
    ]
    (fetch,) = of(KeepOtherKv, t.hear(wire.FetchKv(10, 1, order)))
    assert sent(t.do(TurnKvKept(4, 0, 0.4, "they did not come"))) == [
        KvTried(10, 1, 30, 0, 0.4, "they did not come")
    ]
    (add,) = of(Add, t.assign(lease(11)))
    assert add.request.handle == 5, "no lease has a number of theirs"
    t.do(Terminate("SIGTERM"))
    (said,) = sent(t.hear(wire.FetchKv(12, 1, order)))
    assert isinstance(said, KvTried)
    assert said.fault == "this worker leaves"


def test_a_goodbye_waits_for_those_that_were_told_to_fetch_and_for_no_other() -> None:
    t = Talk().joined()
    t.do(Built(0, 0, HERE, 64))
    finished(t, 1)
    t.do(TurnKvKept(1, 256, 0.01))
    assert LeaveKv() in t.do(Terminate("SIGTERM"))
    assert len(of(EndWorker, t.hear(wire.GoodbyeAck()))) == 1

    t = Talk().joined()
    t.do(Built(0, 0, HERE, 64))
    finished(t, 1)
    t.do(TurnKvKept(1, 256, 0.01))
    t.do(Terminate("SIGTERM"))
    actions = t.hear(wire.GoodbyeAck((1,)))
    assert of(LeaveKv, actions) == [LeaveKv((1,))]
    assert of(EndWorker, actions) == of(EndWorker, t.do(KvTaken(1, wanted_named=True))) == []
    assert len(of(EndWorker, t.do(KvTaken(0, wanted_named=True)))) == 1


def test_a_second_acknowledgement_that_names_nothing_does_not_end_the_wait_for_what_the_first_named() -> None:
    """The daemon answers a goodbye that is said again, and knows no worker any more for whose blocks another one waits."""
    t = Talk().joined()
    t.do(Built(0, 0, HERE, 64))
    finished(t, 1)
    t.do(TurnKvKept(1, 256, 0.01))
    t.do(Terminate("SIGTERM"))
    t.hear(wire.GoodbyeAck((1,)))
    assert t.hear(wire.GoodbyeAck()) == [], "it comes before the order to wait is carried out"
    assert of(EndWorker, t.do(KvTaken(0))) == [], "a count from before that order"
    assert of(EndWorker, t.do(KvTaken(1, wanted_named=True))) == []
    assert len(of(EndWorker, t.do(KvTaken(0, wanted_named=True)))) == 1


def test_a_take_that_was_refused_just_before_the_acknowledgement_does_not_end_the_wait_for_those_told_to_fetch() -> (
    None
):
    t, shelf = Talk().joined(), KvShelf()
    t.do(Built(0, 0, HERE, 64))
    finished(t, 1)
    t.do(TurnKvKept(1, 256, 0.01))
    assert shelf.expect(1, 256, of_turn=True)
    t.do(Terminate("SIGTERM"))
    shelf.leave(())
    refused = shelf.taken()
    assert refused.left == 0, "of turns none is waited for yet"
    (leave,) = of(LeaveKv, t.hear(wire.GoodbyeAck((1,))))
    assert of(EndWorker, t.do(refused)) == [], "it was counted before the daemon named one"
    shelf.leave(leave.wanted)
    assert of(EndWorker, t.do(shelf.taken())) == []
    shelf.drop(1)
    assert len(of(EndWorker, t.do(shelf.taken()))) == 1


def test_what_no_turn_will_want_is_dropped() -> None:
    t = keeping()
    assert of(DropTurnKv, t.hear(wire.DropKv((5, 6)))) == [DropTurnKv((5, 6))]
