"""Deltas applied on the GPU that the engine in this process computes on: the same bytes as `scavenger.weights.delta` makes on a core.

Owns the arithmetic with torch and the threads' streams. A delta is unpacked on the host, a few per cent of the work; ordering the items by
their exponents and adding the changes, all the rest, is done where a core is slow at it. The chunk goes there and comes back, because the
host holds and hashes every version (I8). Knows no version, socket or engine.

Boundary: torch, which an engine's process has loaded; the worker that pulls does without.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor

from scavenger.errors import WeightsError
from scavenger.weights import delta
from scavenger.weights.delta import Changes

_KINDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_log = structlog.get_logger(__name__)


class DeviceApply:
    """As `delta.apply_chain`, for any number of threads. Where the device fails (no memory left, say), the host's cores go on."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._own = threading.local()
        self._failed = False

    def __call__(self, old: memoryview, encoded: memoryview, into: memoryview) -> None:
        if not self._failed:
            try:
                self._apply(old, encoded, into)
                return
            except RuntimeError as error:
                self._failed = True
                _log.warning(
                    "weights.device_apply_failed", device=str(self._device), reason=type(error).__name__
                )
        delta.apply_chain(old, encoded, into)

    @torch.inference_mode()
    def _apply(self, old: memoryview, encoded: memoryview, into: memoryview) -> None:
        with self._stream():
            whole = _tensor(np.frombuffer(old, np.uint8)).to(self._device, copy=True)
            for link in delta.chain_links(encoded):
                changes = delta.taken_apart(link, len(into))
                if changes is not None:
                    self._change(whole.view(_KINDS[changes.width]), changes)
            torch.from_numpy(np.frombuffer(into, np.uint8)).copy_(whole)  # waits for the device

    def _stream(self) -> Any:
        if self._device.type != "cuda":
            return contextlib.nullcontext()
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch does not type it
        return torch.cuda.stream(self._own.stream)

    def _change(self, items: Tensor, changes: Changes) -> None:
        """Add a delta's changes to the items, in place. Raises `WeightsError` where they are none of these."""
        folded = self._there(changes.folded.view(f"<i{changes.width}"))
        if changes.fours is None:
            changed = self._there(delta.positions(changes, len(items)))
            items.index_add_(0, changed, _unfolded(folded))
            return
        four = self._there(changes.fours)
        small = torch.stack([four >> 2 * lane & 3 for lane in range(4)], 1).reshape(-1)[: len(items)]
        rest = (small == delta.LARGE).nonzero().reshape(-1)
        if len(rest) != len(folded):
            raise WeightsError(f"a delta of {len(rest)} large changes, its head says {len(folded)}")
        change = small.to(items.dtype)
        change.index_add_(0, rest, folded)
        shift, mask = delta.EXPONENT[changes.width]
        exponents = items.view(torch.uint8) if changes.width == 1 else (items >> shift) & mask
        order = torch.sort(exponents.to(torch.uint8 if mask <= 0xFF else torch.int16), stable=True).indices
        items.index_add_(0, order, _unfolded(change))

    def _there(self, values: np.ndarray[Any, Any]) -> Tensor:
        return _tensor(values).to(self._device)


def _tensor(values: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _unfolded(change: Tensor) -> Tensor:
    """0, 1, 2, 3, 4, ... become 0, -1, 1, -2, 2, ...; the shift brings in zeros, as of numbers without a sign."""
    bits = 8 * change.element_size()
    unfolded: Tensor = ((change >> 1) & (2 ** (bits - 1) - 1)) ^ -(change & 1)
    return unfolded
