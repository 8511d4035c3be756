"""The bookkeeping of a pull, without sockets."""

from __future__ import annotations

import os
import random

import pytest

from scavenger.weights import manifest as manifests
from scavenger.weights.transfer import Limits, Transfer, Verdict

LIMITS = Limits(window=3, stall_s=1.0, backoff_s=0.1, backoff_max_s=0.4, failures=3)


def transfer(holders: int, chunks: int = 10) -> tuple[Transfer, bytearray]:
    manifest, blob = manifests.build(1, {"w": ("float32", (chunks * 2,), memoryview(os.urandom(chunks * 8)))}, chunk_nbytes=8)
    return Transfer(manifest, holders, LIMITS, 0.0), blob


def part(blob: bytearray, chunk: int) -> bytes:
    return bytes(blob[chunk * 8 : chunk * 8 + 8])


def test_a_window_bounds_what_is_asked_of_one_holder() -> None:
    t, blob = transfer(2)
    assert t.ask(0, 0.0) == [0, 1, 2]
    assert t.ask(0, 0.0) == []
    assert t.ask(1, 0.0) == [3, 4, 5]
    assert t.delivered(0, 0, part(blob, 0), 0.1) is Verdict.ACCEPTED
    assert t.ask(0, 0.1) == [6]


def test_a_silent_holder_loses_its_chunks_to_the_others() -> None:
    t, _ = transfer(2, chunks=4)
    assert t.ask(0, 0.0) == [0, 1, 2]
    assert not t.stalled(0, 0.9)
    assert t.stalled(0, 1.0)
    assert t.ask(1, 1.0) == [3, 0, 1]
    assert t.ask(0, 1.05) == []  # it rests
    assert t.ask(0, 1.2) == [2]


def test_a_late_answer_is_still_good() -> None:
    t, blob = transfer(1, chunks=1)
    t.ask(0, 0.0)
    assert t.stalled(0, 1.0)
    assert t.delivered(0, 0, part(blob, 0), 1.1) is Verdict.ACCEPTED
    assert t.complete()
    assert t.ask(0, 5.0) == []


@pytest.mark.parametrize("wrong", [b"", b"1234567", b"12345678", b"123456789"])
def test_wrong_bytes_are_counted_and_asked_again_elsewhere(wrong: bytes) -> None:
    t, blob = transfer(2, chunks=1)
    t.ask(0, 0.0)
    assert t.delivered(0, 0, wrong, 0.0) is Verdict.CORRUPT
    assert t.corrupt == 1
    assert t.blob == bytearray(8)
    assert t.ask(1, 0.0) == [0]
    assert t.delivered(1, 0, part(blob, 0), 0.0) is Verdict.ACCEPTED


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
    assert t.delivered(0, 7, part(blob, 0), 0.0) is Verdict.UNASKED
    assert t.delivered(0, -1, part(blob, 0), 0.0) is Verdict.UNASKED
    t.ask(0, 0.0)
    assert t.delivered(0, 1, part(blob, 1), 0.0) is Verdict.ACCEPTED
    assert t.delivered(0, 1, b"x" * 8, 0.0) is Verdict.DUPLICATE


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
