"""What an engine's processes are handed: all tensors, and nobody can change them."""

from __future__ import annotations

import mmap
import os

import pytest

from rollout.engines.vllm.setup import MemoryFiles
from scavenger.weights.manifest import TensorView


def test_tensors_are_where_the_table_says_and_cannot_be_written() -> None:
    views = [
        TensorView("a", "int8", (3,), memoryview(b"abc")),
        TensorView("b", "int16", (2,), memoryview(b"wxyz").cast("h")),
    ]
    with MemoryFiles(views) as memory:
        (path,) = memory.paths
        with open(path, "rb") as file:
            # as the engine's worker maps it: its own writes stay its own
            private = mmap.mmap(
                file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        found = {
            name: bytes(private[offset : offset + nbytes])
            for name, _, _, file, offset, nbytes in memory.table
            if file == 0
        }
        assert found == {"a": b"abc", "b": b"wxyz"}
        private[0] = 0
        again = os.open(path, os.O_RDWR)
        try:
            for change in (
                lambda: os.pwrite(again, b"x", 0),
                lambda: os.ftruncate(again, 0),
                lambda: os.ftruncate(again, 1 << 20),
            ):
                with pytest.raises(PermissionError):
                    change()
            with pytest.raises(PermissionError):
                mmap.mmap(again, 0)
            assert os.pread(again, 3, 0) == b"abc"
        finally:
            os.close(again)
        private.close()
