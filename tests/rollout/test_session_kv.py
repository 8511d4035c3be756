"""KV blocks in the worker's session: offered before the goodbye, kept for a moment behind it, and never of two versions."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from scavenger.protocol import messages as wire
from scavenger.protocol.kv import MOST_NBYTES
from scavenger.protocol.messages import KvKept, KvOffer, KvTried, WeightSource
from scavenger.protocol.worker.events import (
    EXIT_PREEMPTED,
    Abort,
    Add,
    Built,
    EndWorker,
    EngineCrashed,
    KeepKv,
    KvLoaded,
    KvTaken,
    Terminate,
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
