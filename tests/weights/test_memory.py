"""Memory is written again only when nobody looks at it."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
import structlog

from scavenger.weights import memory
from scavenger.weights.memory import Buffer, MemoryPool


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
    pool = MemoryPool()
    first = pool.take(1000)
    pool.put_back(first)
    view = first.view
    assert pool.take(1000) is not first
    del view
    assert pool.take(2000) is not first
    pool.put_back(first)
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


def test_only_the_holders_own_mapping_writes_and_the_size_stays() -> None:
    buffer = Buffer(1 << 16)
    fd = buffer.readonly_fd()
    try:
        for target in (fd, buffer.fd):  # what a neighbour was handed, opened again
            again = os.open(f"/proc/self/fd/{target}", os.O_RDWR)
            try:
                with pytest.raises(PermissionError):
                    os.pwrite(again, b"y", 0)
                with pytest.raises(PermissionError):
                    mmap.mmap(again, 1 << 16)
                for size in (1, 1 << 20):
                    with pytest.raises(PermissionError):
                        os.ftruncate(again, size)
            finally:
                os.close(again)
        pool = MemoryPool()
        for letter in (b"a", b"b"):  # and it is used again
            buffer.prepare(buffer.nbytes)
            buffer.view[:] = letter * buffer.nbytes
            assert os.pread(fd, buffer.nbytes, 0) == letter * buffer.nbytes
            pool.put_back(buffer)
            assert pool.take(buffer.nbytes) is buffer
    finally:
        os.close(fd)


def test_a_kernel_without_the_seal_keeps_the_size_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_SEAL_FUTURE_WRITE", 1 << 20)  # none that it knows
    memory._warn_unsealed.cache_clear()
    with structlog.testing.capture_logs() as told:
        first, _ = Buffer(100), Buffer(100)
    assert [line["event"] for line in told] == ["weights.memory_writable"]
    with pytest.raises(PermissionError):
        os.ftruncate(first.fd, 1)
    memory._warn_unsealed.cache_clear()


def test_an_empty_buffer_is_one() -> None:
    assert Buffer(0).view == b""
