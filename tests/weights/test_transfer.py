"""The bookkeeping of a pull, without sockets."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest

from scavenger.weights import manifest as manifests
from scavenger.weights.transfer import ChunkOutcome, Transfer, TransferLimits

LIMITS = TransferLimits(window=3, ahead_s=0.3, stall_s=1.0, backoff_s=0.1, backoff_max_s=0.4, failures=3)


def transfer(holders: int, chunks: int = 10) -> tuple[Transfer, memoryview]:
    manifest, blob = manifests.build(
        1, {"w": ("float32", (chunks * 2,), memoryview(os.urandom(chunks * 8)))}, chunk_nbytes=8
    )
    return Transfer(manifest, holders, LIMITS, 0.0), blob


def part(blob: memoryview, chunk: int) -> bytes:
    return bytes(blob[chunk * 8 : chunk * 8 + 8])


def test_a_window_grows_with_what_a_holder_delivers_and_is_bounded() -> None:
    t, blob = transfer(2)
    assert t.ask(0, 0.0) == [0, 1]  # nothing is known of it yet
    assert t.ask(0, 0.0) == []
    assert t.ask(1, 0.0) == [2, 3]
    assert (
        t.delivered(0, 0, part(blob, 0), 0.05) is ChunkOutcome.ACCEPTED
    )  # 20 chunks a second: 6 in 0.3 s, but the window is 3
    assert t.ask(0, 0.05) == [4, 5]
    assert len(t.holders[0].asked) == 3


def test_a_silent_holder_loses_its_chunks_to_the_others() -> None:
    t, _ = transfer(2, chunks=4)
    assert t.ask(0, 0.0) == [0, 1]
    assert not t.stalled(0, 0.9)
    assert t.stalled(0, 1.0)
    assert t.ask(1, 1.0) == [0, 1]
    assert t.ask(0, 1.05) == []  # it rests
    assert t.ask(0, 1.2) == [2]


def test_bytes_of_an_unfinished_chunk_are_not_silence() -> None:
    t, _ = transfer(1)
    t.ask(0, 0.0)
    t.heard(0, 0.8)
    assert not t.stalled(0, 1.5)
    assert t.stalled(0, 1.8)


def test_a_fast_holder_steals_from_a_slow_one_and_never_twice() -> None:
    t, blob = transfer(3, chunks=6)
    assert t.ask(0, 0.0) == [0, 1]  # the slow one
    now = 0.0
    while 1 in t.holders[0].asked and now < 5:
        now += 0.1
        for chunk in t.ask(1, now):
            assert t.delivered(1, chunk, part(blob, chunk), now) in (
                ChunkOutcome.ACCEPTED,
                ChunkOutcome.DUPLICATE,
            )
        if t.complete():
            break
    assert t.complete()
    assert t.stolen == 2
    assert now < 1
    assert t.blob == blob
    assert t.delivered(0, 0, part(blob, 0), 9.0) is ChunkOutcome.DUPLICATE


def test_a_chunk_in_flight_twice_is_stolen_by_nobody_else() -> None:
    t, blob = transfer(3, chunks=3)
    for index in (1, 2):
        (chunk, *rest) = t.ask(index, 0.0)
        t.delivered(index, chunk, part(blob, chunk), 0.01)
        for other in rest:
            t.refused(index, other, "no", 0.01)
    t.ask(0, 0.02)
    first, second = t.ask(1, 0.5), t.ask(2, 0.5)
    assert len(first) == 1
    assert second == []


def test_nothing_is_asked_of_a_partial_holder_that_it_does_not_have() -> None:
    t, _ = transfer(2, chunks=4)
    has = np.array([False, False, True, False])
    t.know(1, has)
    assert t.ask(1, 0.0) == [2]
    t.absent(1, 2, 0.1)
    assert t.ask(1, 0.1) == []
    assert t.ask(0, 0.1) == [0, 1]
    assert not t.holders[1].given_up


def test_what_others_have_is_asked_last_of_a_complete_holder() -> None:
    t, _ = transfer(2, chunks=4)
    t.know(1, np.array([True, True, False, False]))
    assert t.ask(0, 0.0) == [2, 3]


def test_a_transfer_that_is_resumed_keeps_what_is_here() -> None:
    t, blob = transfer(1, chunks=3)
    t.ask(0, 0.0)
    t.delivered(0, 0, part(blob, 0), 0.1)
    again = t.resumed(t.manifest, 1.0)
    index = again.add_holder(0, 1.0)
    assert again.ask(index, 1.0) == [1, 2]
    assert again.missing == 2


def test_a_late_answer_is_still_good() -> None:
    t, blob = transfer(1, chunks=1)
    t.ask(0, 0.0)
    assert t.stalled(0, 1.0)
    assert t.delivered(0, 0, part(blob, 0), 1.1) is ChunkOutcome.ACCEPTED
    assert t.complete()
    assert t.ask(0, 5.0) == []


@pytest.mark.parametrize("wrong", [b"", b"1234567", b"12345678", b"123456789"])
def test_wrong_bytes_are_counted_and_asked_again_elsewhere(wrong: bytes) -> None:
    t, blob = transfer(2, chunks=1)
    t.ask(0, 0.0)
    assert t.delivered(0, 0, wrong, 0.0) is ChunkOutcome.CORRUPT
    assert t.corrupt == 1
    assert t.blob == bytes(8)
    assert t.ask(1, 0.0) == [0]
    assert t.delivered(1, 0, part(blob, 0), 0.0) is ChunkOutcome.ACCEPTED


def test_a_holder_that_lies_again_and_again_is_given_up() -> None:
    t, _ = transfer(1)
    now = 0.0
    while not t.holders[0].given_up:
        now += 1.0
        for chunk in t.ask(0, now):
            t.delivered(0, chunk, b"x" * 8, now)
        assert now < 10
    assert "wrong hash" in t.summary()


def test_an_unasked_chunk_changes_nothing() -> None:
    t, blob = transfer(1, chunks=2)
    assert t.delivered(0, 7, part(blob, 0), 0.0) is ChunkOutcome.UNASKED
    assert t.delivered(0, -1, part(blob, 0), 0.0) is ChunkOutcome.UNASKED
    t.ask(0, 0.0)
    assert t.delivered(0, 1, part(blob, 1), 0.0) is ChunkOutcome.ACCEPTED
    assert t.delivered(0, 1, b"x" * 8, 0.0) is ChunkOutcome.DUPLICATE


@pytest.mark.parametrize("seed", range(20))
def test_any_schedule_with_one_honest_holder_completes(seed: int) -> None:
    rng = random.Random(seed)
    t, blob = transfer(3, chunks=30)
    now = 0.0
    for _ in range(5000):
        if t.complete():
            break
        now += rng.random() * 0.5
        index = rng.randrange(3)
        t.stalled(index, now)
        for chunk in t.ask(index, now):
            fate = rng.random() if index else 1.0
            if fate < 0.3:
                continue  # lost
            if fate < 0.4:
                t.refused(index, chunk, "no", now)
            else:
                t.delivered(index, chunk, b"x" * 8 if fate < 0.5 else part(blob, chunk), now)
    assert t.complete()
    assert t.blob == blob


def test_a_holder_kept_for_last_is_asked_while_the_others_deliver_nothing() -> None:
    t, blob = transfer(2)
    t.keep_for_last(1, True)
    assert t.ask(1, 0.0) == []
    (first, second) = t.ask(0, 0.5)
    assert t.delivered(0, first, part(blob, first), 0.9) is ChunkOutcome.ACCEPTED
    assert t.ask(1, 1.8) == [], "the other delivered less than a second ago"
    asked = t.ask(1, 1.95)
    assert asked, "it has not since"
    assert t.delivered(1, asked[0], part(blob, asked[0]), 2.0) is ChunkOutcome.ACCEPTED
    assert t.ask(1, 2.0), "what it delivers itself is no reason to stop"
    assert t.delivered(0, second, part(blob, second), 2.1) is ChunkOutcome.ACCEPTED
    assert t.is_kept_back(1, 2.1)
    t.keep_for_last(1, False)
    assert not t.is_kept_back(1, 2.1), "it is as any other now: the node's leader is gone"
    t.keep_for_last(1, True, after_s=30.0)
    assert t.is_kept_back(1, 32.0)
    assert not t.is_kept_back(1, 32.2), "so long was said of it"


def test_what_is_on_its_way_to_another_is_not_asked_of_who_has_all_unless_that_one_gets_nothing() -> None:
    t, _ = transfer(2, chunks=4)
    nothing, all_but_one = np.zeros(4, dtype=bool), np.array([True, True, False, True])
    t.expect(1, nothing, all_but_one, 0.0)
    t.know(1, nothing)
    assert t.ask(0, 0.0) == [2]
    assert t.coming().tolist() == [False, False, True, False]
    one = np.array([True, False, False, False])
    t.expect(1, one, np.array([False, True, False, True]), 0.8)
    t.know(1, one)
    assert t.ask(1, 0.8) == [0], "it has that now"
    t.expect(1, one, np.array([False, True, False, True]), 1.5)
    t.know(1, one)
    assert t.ask(0, 1.7) == [], "it got one less than a second ago"
    assert t.ask(0, 1.85) == [1], "it has got nothing since"
    t.expect(1, one, None, 1.9)
    t.abandon(1, "gone")
    t.lost(0, "for the test", 1.9)
    assert t.ask(0, 5.0) == [0], "nothing is on its way to who is gone"


def only(*chunks: int) -> np.ndarray[Any, Any]:
    return np.isin(np.arange(10), chunks)


EVERY = np.ones(10, dtype=bool)


def test_one_that_tells_of_another_chunk_each_time_gets_nothing() -> None:
    t, _ = transfer(2)
    for beat in range(10):
        t.expect(1, only(beat % 2), EVERY, beat / 10)
        t.know(1, only(beat % 2))
    assert t.ask(0, 0.95) == [], "it has told of a chunk less than a second ago"
    t.expect(1, only(0), EVERY, 1.0)
    t.know(1, only(0))
    assert t.ask(0, 1.05), "of no more than that since"


def test_one_that_says_of_nothing_and_again_of_all_that_it_is_on_its_way_gets_nothing() -> None:
    t, _ = transfer(2)
    for beat in range(11):
        t.expect(1, only(), None if beat % 2 else EVERY, beat / 10)
        t.know(1, None if beat == 5 else only())
    assert t.ask(0, 1.05)


def test_no_chunk_is_left_to_partial_holders_for_long_however_many_say_that_they_get_some() -> None:
    t, _ = transfer(4)
    asked: list[int] = []
    for beat in range(21):
        now = beat / 10
        t.expect(1 + beat % 3, only(*range(beat // 3)), EVERY, now)
        t.know(1 + beat % 3, only(*range(beat // 3)))
        asked = t.ask(0, now)
        assert not asked or now >= 2.0
    assert asked, "two seconds after it was first left to one of them"


def test_one_that_has_not_what_it_told_of_is_given_up() -> None:
    t, _ = transfer(2)
    now = 0.0
    for _ in range(LIMITS.failures):
        assert not t.holders[1].given_up
        now += 1.0
        t.know(1, only(4, 5, 6))
        for chunk in t.ask(1, now):
            t.absent(1, chunk, now)
    assert t.holders[1].given_up
    assert "which it had reported" in t.summary()
    assert t.ask(0, now) == [0, 1]


def test_the_absent_rest_of_a_window_is_one_failure_and_what_was_not_asked_is_none() -> None:
    t, blob = transfer(2)
    t.know(1, only(4, 5))
    t.absent(1, 9, 0.0)
    assert t.holders[1].failures == 0
    for chunk in t.ask(1, 0.0):
        t.absent(1, chunk, 0.0)
    assert t.holders[1].failures == 1
    t.know(1, only(4, 5))
    (chunk,) = t.ask(1, 1.0)
    t.delivered(1, chunk, part(blob, chunk), 1.0)
    assert t.holders[1].failures == 0


def test_a_chunk_that_others_keep_while_they_talk_on_is_asked_of_one_that_delivered_nothing_yet() -> None:
    t, blob = transfer(4, chunks=5)
    for index in (1, 2):
        (chunk, *_) = t.ask(index, 0.0)
        t.delivered(index, chunk, part(blob, chunk), 0.01)
    now = 0.1
    while now < 1.9:  # each takes what the other keeps
        for index in (1, 2):
            t.heard(index, now)
            assert not t.stalled(index, now)
            t.ask(index, now)
        assert t.ask(3, now) == []
        now += 0.1
    assert all(len(at) == 2 for at in t._flying.values())
    while not t.complete() and now < 5.0:
        t.heard(1, now)
        t.heard(2, now)
        for chunk in t.ask(3, now):
            t.delivered(3, chunk, part(blob, chunk), now)
        now += 0.1
    assert t.complete()
