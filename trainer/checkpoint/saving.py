"""Checkpoints beside the training: the copy is taken at once, the writing goes on while the next step runs.

Owns the order in which a checkpoint comes to count: shards written and flushed by every rank, then the folder's rename, then the
ledger's word, then the deletion of those that are surplus. Whatever kills the trainer in between, the last complete one is found. At most
one is under way. `Saver` is one rank's end, `Checkpoints` rank 0's. Knows no step and no model, only the tensors that it is given.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from scavenger.errors import CheckpointFailed, StaleAttempt
from trainer.checkpoint import checkpoint
from trainer.checkpoint.checkpoint import CheckpointState

REMEDY = "look at the file system of run.out_dir: its space, quota and rights; then submit the job again"


@contextlib.contextmanager
def _as_checkpoint_failed() -> Iterator[None]:
    """What rank 0 does alone to a checkpoint's folder. Raises `CheckpointFailed` for what the file system refuses."""
    try:
        yield
    except OSError as error:
        raise CheckpointFailed(f"a checkpoint could not be written: {error}", REMEDY) from error


class Saver:
    """One rank's writing. Ranks agree over a group of their own, so that it never meets the collectives of the training."""

    def __init__(self) -> None:
        self._group: Any = None
        self._writing: Future[Any] | None = None

    def begin(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        """All ranks: copy this rank's shards to memory of the CPU and return; a thread writes and flushes the copy."""
        self.wait()
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
        self._writing = cast(
            "Future[Any]", async_save(dict(tensors), storage_writer=writer, process_group=self._group)
        )

    def is_written(self) -> bool:
        """Whether every rank has written what was begun last. Raises `CheckpointFailed`."""
        if self._writing is not None and self._writing.done():
            self.wait()
        return self._writing is None

    def wait(self) -> None:
        """Until every rank has written. Raises `CheckpointFailed` with what went wrong on any of them."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except CheckpointException as error:
            causes = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items()))
            raise CheckpointFailed(f"a checkpoint could not be written: {causes}", REMEDY) from error


class _Run(Protocol):
    def checkpoint(
        self, step: int, version: int, root: bytes, path: str, kept: tuple[int, ...] | None = None
    ) -> None: ...


class _Ranks(Protocol):
    def save(self, path: Path) -> None: ...
    def is_saved(self) -> bool: ...
    def wait_saved(self) -> None: ...


class Checkpoints:
    """The checkpoints of one attempt. `seconds`: how long training stood still for them since they were last taken."""

    def __init__(self, out_dir: Path, keep: int, run: _Run, ranks: _Ranks) -> None:
        self._out_dir = out_dir
        self._keep = keep
        self._run = run
        self._ranks = ranks
        self._writing: CheckpointState | None = None
        self._seconds = 0.0

    def begin(self, state: CheckpointState) -> None:
        """Start to write; the one before is finished first."""
        self.finish()
        started = time.monotonic()
        with _as_checkpoint_failed():
            folder = checkpoint.prepare(self._out_dir, state.step, state.attempt)
        self._ranks.save(folder)
        self._writing = state
        self._seconds += time.monotonic() - started

    def advance(self) -> None:
        """Let a checkpoint that is written count. Returns at once when none is."""
        if self._writing is not None and self._ranks.is_saved():
            self._count(self._writing)

    def finish(self) -> None:
        """Wait for the one that is being written, if any, and let it count."""
        if self._writing is not None:
            started = time.monotonic()
            self._ranks.wait_saved()
            self._seconds += time.monotonic() - started
            self._count(self._writing)

    def take_seconds(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _count(self, state: CheckpointState) -> None:
        started = time.monotonic()
        self._writing = None
        with _as_checkpoint_failed():
            path = checkpoint.complete(self._out_dir, state)
        kept, going = checkpoint.surplus(self._out_dir, path, self._keep)
        try:
            self._run.checkpoint(state.step, state.version, bytes.fromhex(state.root), str(path), kept)
        except StaleAttempt:
            checkpoint.disown(
                path, state.attempt
            )  # of a history that another trainer left: nothing may resume from it
            raise
        checkpoint.delete(going)
        self._seconds += time.monotonic() - started
