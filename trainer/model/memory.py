"""What one rank holds of its GPU, told to the account: weights, optimizer, gradients, and what its computing takes beside them.

Owns when training state leaves and returns (`offload` moves it), and, where a file stands for the GPU, the count of what a step takes:
every tensor that it makes, from when it is made until its last reference is gone, and torch's habit of keeping what was freed until
`empty_cache`. On CUDA the allocator counts all that by itself. Knows no engine but as bytes of the same GPU.
Boundary: the GPU's memory as the rest of the GPU's users see it; the learner only computes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from rollout.engines.account import Account, Uncounted
from scavenger.sizing.training import Mode
from trainer.model import offload
from trainer.model.offload import Offload, OffloadChoice, nbytes_of

_log = structlog.get_logger(__name__)
WEIGHTS, OPTIMIZER, GRADIENTS, STEP = "weights", "optimizer", "gradients", "step"
#: As torch's allocator, which takes memory in blocks.
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class RankGpu:
    """Of one rank. `shared`: reserved engines lie on it; `engine_share`: which share of it they say that they take, 0 = they do not say."""

    account: Account = field(default_factory=Uncounted)
    shared: bool = True
    engine_share: float = 0.0
    rank: int = 0


class RankMemory:
    """One rank's. `working` is around all computing; `release` and `take_back` are the two ways of the toggle."""

    def __init__(self, gpu: RankGpu, state: Offload, mode: Mode) -> None:
        self._gpu, self._account = gpu, gpu.account
        self._state = state
        self._mode: Mode = mode
        self._pool = _Pool(self._account) if self._account.counts else None
        self._seen: int | None = None  # most that engines were seen to hold
        self.choice: OffloadChoice | None = None  # of the last release
        self._nbytes = {WEIGHTS: nbytes_of(state.parameters()), OPTIMIZER: nbytes_of(state.moments())}
        if self._pool is not None:
            self._pool.leave_out([*state.parameters(), *state.moments()])
            self._hold_state()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Something is computed: training state comes back as it is used."""
        self.take_back()
        if self._pool is None:
            yield
            return
        with self._pool.resizes(), self._pool:
            try:
                yield
            finally:
                self._pool.set_apart(nbytes_of(self._state.gradients()))

    def all_here(self) -> None:
        """Whatever comes next may use any of the training state."""
        self.take_back()
        self._state.arrive_all()

    def drop_gradients(self) -> None:
        self._state.drop_gradients()
        if self._pool is not None:
            self._pool.set_apart(0)

    def reading(self, tensor: Tensor) -> Tensor:
        """For who only reads, and leaves the GPU to engines that may have it."""
        return self._state.reading(tensor)

    def note_engines(self) -> None:
        """Engines have the GPU now: see how much of it they hold."""
        if found := self._account.of_other_processes():
            self._seen = max(self._seen or 0, found)

    def release(self) -> int:
        """Give the GPU's memory back: what lies unused at least, the training state too where engines need it. Returns bytes still held."""
        self._empty_cache()
        self._account.alone()  # before the first engine is woken
        self._decide()
        if self.choice is not None and self.choice.offload and not self._state.is_away:
            if self._pool is None:
                self._state.away()
            else:
                with self._pool.resizes():
                    self._state.away()
                for purpose in (WEIGHTS, OPTIMIZER):
                    self._account.hold(purpose, 0)
                self._pool.set_apart(0)
            self._empty_cache()
        return self._account.own()

    def take_back(self) -> None:
        """Engines gave the GPU back: training state begins to return. Raises `account.OverCapacity` where they did not."""
        if not self._state.is_away:
            return
        if self._pool is None:
            self._state.back()
            return
        self._hold_state()
        with self._pool.resizes():
            self._state.back()
        self._pool.set_apart(nbytes_of(self._state.gradients()))

    def _hold_state(self) -> None:
        for purpose, nbytes in self._nbytes.items():
            self._account.hold(purpose, nbytes)

    def _decide(self) -> None:
        if self._state.is_away:
            return
        capacity = self._account.capacity
        known = [self._seen] if self._seen is not None else []
        if self._gpu.engine_share:
            known.append(int(self._gpu.engine_share * capacity))
        engine = 0 if not self._gpu.shared else max(known, default=None)
        choice = offload.choose(self._mode, resident=self._account.own(), engine=engine, capacity=capacity)
        if self.choice is None or choice.offload != self.choice.offload:
            _log.info("trainer.offload", rank=self._gpu.rank, offload=choice.offload, reason=choice.reason)
        self.choice = choice

    def _empty_cache(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self._pool is not None:
            self._pool.empty_cache()


class _Pool(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what computing makes, as torch's allocator would on a GPU: inside, every new tensor's memory, until its last reference goes.

    `apart`: of what lives, bytes that are told under another purpose (gradients). Not for CUDA, and only for whoever tests: each operation
    takes some microseconds longer.
    """

    def __init__(self, account: Account) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._account = account
        self._sizes: dict[int, int] = {}  # by storage
        self._left_out: set[int] = set()
        self._live = self._reserved = self._apart = 0

    def leave_out(self, tensors: list[Tensor]) -> None:
        """These are counted elsewhere."""
        self._left_out |= offload.storages(tensors).keys()

    def set_apart(self, nbytes: int) -> None:
        reserved = max(self._reserved, self._live)
        if nbytes < self._apart:
            self._account.hold(GRADIENTS, nbytes)
        self._account.hold(STEP, max(0, reserved - nbytes))
        self._account.hold(GRADIENTS, nbytes)
        self._apart = nbytes

    def empty_cache(self) -> None:
        self._reserved = _blocks(self._live)
        self._account.hold(STEP, max(0, self._reserved - self._apart))

    @contextmanager
    def resizes(self) -> Iterator[None]:
        """Inside, storages that are emptied or filled again count too: FSDP2 frees a gathered layer so, and takes its memory again."""
        plain = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
            key, before = storage._cdata, storage.nbytes()
            found = plain(storage, nbytes)
            if key in self._sizes:
                self._change(key, nbytes - before)
            return found

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return made

    def _see(self, tensor: Tensor) -> None:
        whole: Any = tensor
        if is_traceable_wrapper_subclass(whole):
            for name in whole.__tensor_flatten__()[0]:
                if isinstance(part := getattr(whole, name), Tensor):
                    self._see(part)
            return
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes and storage._cdata not in self._left_out:
            self._sizes[storage._cdata] = 0
            weakref.finalize(storage, self._gone, storage._cdata).atexit = False
            self._change(storage._cdata, storage.nbytes())

    def _gone(self, key: int) -> None:
        self._live -= self._sizes.pop(key, 0)

    def _change(self, key: int, nbytes: int) -> None:
        self._sizes[key] += nbytes
        self._live += nbytes
        if self._live > self._reserved:
            reserved = _blocks(self._live)
            self._account.hold(STEP, max(0, reserved - self._apart))
            self._reserved = reserved


def _blocks(nbytes: int) -> int:
    return -(-nbytes // _BLOCK) * _BLOCK
