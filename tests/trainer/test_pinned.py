"""What is pinned of a version's memory: the rank's own pages, each once, until the buffer goes."""

from __future__ import annotations

import mmap
import random
from itertools import pairwise

import structlog

from scavenger.weights.memory import Buffer
from trainer.model.pinned import Pins, pages

PAGE = mmap.PAGESIZE


def test_pages_hold_every_byte_and_never_overlap() -> None:
    draw = random.Random(1)
    for _ in range(50):
        ranges = [
            (start, start + draw.randrange(3 * PAGE))
            for start in (draw.randrange(40 * PAGE) for _ in range(10))
        ]
        found = pages(ranges)
        assert all(start % PAGE == stop % PAGE == 0 for start, stop in found)
        assert all(one[1] < other[0] for one, other in pairwise(found))
        assert all(any(a <= start and stop <= b for a, b in found) for start, stop in ranges if start < stop)


def test_a_buffer_is_pinned_once_and_released_when_it_goes() -> None:
    held: set[int] = set()

    def register(address: int, nbytes: int) -> str:
        assert address not in held
        held.add(address)
        return ""

    pins, buffer = Pins(register, held.remove), Buffer(10 * PAGE)
    for _ in range(2):  # a pool gives the same one again
        pins.pin(buffer, 1 << 30, [(0, 10), (5 * PAGE + 1, 5 * PAGE + 2)])
    assert held == {1 << 30, (1 << 30) + 5 * PAGE}
    other = Buffer(PAGE)
    pins.pin(other, 1 << 31, [(0, PAGE)])
    del buffer
    assert held == {1 << 31}


def test_what_cannot_be_pinned_is_told_once_and_released_as_far_as_it_was() -> None:
    held: set[int] = set()

    def register(address: int, nbytes: int) -> str:
        if held:
            return "out of locked memory, in this test"
        held.add(address)
        return ""

    pins = Pins(register, held.remove)
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            buffer = Buffer(10 * PAGE)
            pins.pin(buffer, 1 << 30, [(0, 1), (5 * PAGE, 6 * PAGE)])
            del buffer
            assert not held
    assert [line["event"] for line in logs] == ["weights.not_pinned"]
