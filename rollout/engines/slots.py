"""The KV cache of a running batch: one slot a request, preallocated, kept dense.

Owns the cache tensors and the mapping of a forward pass onto them. Knows neither requests nor sampling. Rows 0..n-1 are always
the running requests, so that a decode step works on a view and copies nothing.

Boundary: the KV cache's memory; it knows no request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FIRST_CAPACITY = 64


class SlotCache:
    """Keys and values a layer, each `[slots, kv_heads, capacity, head_dim]`; stands where transformers expects a `Cache`.

    A forward pass is announced by `prefill()` or `decode()`, which say where `update()`, called by each attention layer, puts
    what it computed. Entries beyond a row's length are finite leftovers and are always masked. `hold` is told how many bytes all is to
    be, before more is taken.
    """

    def __init__(
        self, slots: int, context_length: int, hold: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        self._hold, self._nbytes = hold, 0
        self._slots = slots
        self._context_length = context_length
        self._capacity = min(FIRST_CAPACITY, context_length)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._rows: Tensor | None = None
        self._positions: Tensor | None = None
        self._span = 0
        self._first = 0
        self._lengths: list[int] = []

    def prefill(self, first: int, lengths: list[int]) -> None:
        """The next pass fills rows `first…`, left-padded to the longest of `lengths`."""
        self._grow(max(lengths))
        self._positions, self._first, self._lengths = None, first, lengths

    def decode(self, positions: Tensor, span: int, first: int = 0) -> None:
        """The next pass puts entries into rows `first…`, at `positions` `[n, entries]`, and attends to `span` entries."""
        self._grow(span)
        self._rows = first + torch.arange(len(positions), device=positions.device)[:, None]
        self._positions, self._span, self._first = positions, span, first

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's new entries; returns the keys and values that its attention reads."""
        while len(self._keys) <= layer:
            self._keys.append(self._empty(keys))
            self._values.append(self._empty(values))
        if self._positions is None:
            for store, new in ((self._keys[layer], keys), (self._values[layer], values)):
                self._store_prompts(store, new)
            return keys, values
        rows = slice(self._first, self._first + len(self._positions))
        self._keys[layer][self._rows, :, self._positions] = keys.transpose(1, 2)
        self._values[layer][self._rows, :, self._positions] = values.transpose(1, 2)
        return self._keys[layer][rows, :, : self._span], self._values[layer][rows, :, : self._span]

    def get_seq_length(self, _layer: int = 0) -> int:
        """Asked by models that were given no position ids; ours always are."""
        return 0

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` entries of one row over another's."""
        for store in (*self._keys, *self._values):
            store[target, :, :length] = store[source, :, :length]

    def entries(self, row: int, length: int) -> list[Tensor]:
        """Copies of a row's first entries: keys, then values, layer by layer, each `[kv_heads, length, head_dim]`."""
        pairs = zip(self._keys, self._values, strict=True)
        return [store[row, :, :length].clone() for pair in pairs for store in pair]

    def put(self, row: int, entries: Sequence[Tensor]) -> None:
        """Fill a row's first entries with what `entries` gave."""
        length = entries[0].shape[1]
        while len(self._keys) < len(entries) // 2:
            like = entries[2 * len(self._keys)][None]
            self._keys.append(self._empty(like))
            self._values.append(self._empty(like))
        self._grow(length)
        for layer in range(len(self._keys)):
            self._keys[layer][row, :, :length] = entries[2 * layer]
            self._values[layer][row, :, :length] = entries[2 * layer + 1]

    def wipe(self, row: int, first: int = 0) -> None:
        """Zero a row's entries from `first` on, which may hold NaN: a masked NaN still poisons attention (0 * NaN)."""
        for store in (*self._keys, *self._values):
            store[row, :, first:] = 0

    def wipe_all(self) -> None:
        """Zero every entry."""
        for store in (*self._keys, *self._values):
            store.zero_()

    def _store_prompts(self, store: Tensor, new: Tensor) -> None:
        width = new.shape[2]
        if min(self._lengths) == width:
            store[self._first : self._first + len(self._lengths), :, :width] = new
            return
        for i, length in enumerate(self._lengths):
            store[self._first + i, :, :length] = new[i, :, width - length :]

    def _empty(self, like: Tensor) -> Tensor:
        shape = (self._slots, like.shape[1], self._capacity, like.shape[3])
        nbytes = math.prod(shape) * like.element_size()
        self._hold(self._nbytes + nbytes)
        self._nbytes += nbytes
        return like.new_zeros(*shape)

    def _grow(self, span: int) -> None:
        if span <= self._capacity:
            return
        while self._capacity < span:
            self._capacity = min(self._capacity * 2, self._context_length)
        for stores in (self._keys, self._values):
            for i, old in enumerate(stores):
                stores[i] = self._empty(old)
                stores[i][:, :, : old.shape[2]] = old
                self._nbytes -= old.nbytes
        self._hold(self._nbytes)
