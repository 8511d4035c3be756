"""Memory is written again only when nobody looks at it."""

from __future__ import annotations

import os

import numpy as np
import pytest

from scavenger.weights.memory import Buffer, Pool


def test_a_buffer_is_idle_only_without_a_view_of_any_part_of_it() -> None:
    buffer = Buffer(1 << 16)
    assert buffer.idle()
    part = buffer.view[10:20]
    assert not buffer.idle()
    array = np.frombuffer(part, dtype=np.uint8)[2:4]
    del part
    assert not buffer.idle(), "an array made of a part"
    del array
    assert buffer.idle()
    buffer.view[5] = 7
    assert buffer.view[5] == 7


def test_the_pool_gives_out_what_is_idle_and_of_the_size() -> None:
    pool = Pool()
    first = pool.take(1000)
    pool.give(first)
    view = first.view
    assert pool.take(1000) is not first
    del view
    assert pool.take(2000) is not first
    pool.give(first)
    assert pool.take(1000) is first
    assert pool.take(1000) is not first, "it is taken"


def test_a_neighbour_can_read_and_not_write() -> None:
    buffer = Buffer(100)
    buffer.view[:] = b"x" * 100
    fd = buffer.readonly_fd()
    try:
        assert os.pread(fd, 200, 0) == b"x" * 100
        with pytest.raises(OSError):
            os.pwrite(fd, b"y", 0)
    finally:
        os.close(fd)


def test_an_empty_buffer_is_one() -> None:
    assert Buffer(0).view == b""
