"""Adapters kept beside their base in one model, in lanes: each row of a forward pass is computed with the adapters of its lane.

    y = W0 x + scale * B (A x)      for the rows of a lane that has an adapter beside this layer; W0 x for all others

Lane 0 is of the run whose engine this is; the others are of runs that borrow slots of it (`shared`). Owns the adapters and the hooks that
add them. Nothing of one lane is read for a row of another. Knows no request: a pass is announced with the lanes of its rows.

Boundary: the model's linear layers; blocking, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollout.engines import merging
from rollout.engines.merging import Merged
from scavenger.errors import EngineError

#: Of the run whose engine it is.
OWN = 0


@dataclass(frozen=True, slots=True)
class Adapter:
    """A [rank, in] and B [out, rank], in the model's dtype."""

    down: Tensor
    up: Tensor
    scale: float

    def of(self, x: Tensor) -> Tensor:
        return (x @ self.down.T) @ self.up.T * self.scale


class Lanes:
    """The adapters of all lanes, beside the layers of one model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._beside: dict[str, dict[int, Adapter]] = {}  # layer -> lane -> its adapter
        self._rows: Sequence[int] = ()  # lane of each row of the pass

    def put(self, lane: int, adapters: Sequence[Merged]) -> None:
        """In place of those that the lane has. Raises `EngineError` where there is no place for one; then the lane has none."""
        self.drop(lane)
        found: dict[str, Adapter] = {}
        for one in adapters:
            layer = one.name.removesuffix(".weight")
            weight = self._linear(layer).weight
            down, up = (merging.tensor(part).to(weight, copy=True) for part in one.parts[1:])
            found[layer] = Adapter(down, up, one.scale)
        for layer, adapter in found.items():
            if layer not in self._beside:
                self._beside[layer] = {}
                self._linear(layer).register_forward_hook(self._hook(self._beside[layer]))
            self._beside[layer][lane] = adapter

    def drop(self, lane: int) -> None:
        """Overwrite the lane's adapters with zeros, and forget them."""
        for beside in self._beside.values():
            if (adapter := beside.pop(lane, None)) is not None:
                adapter.down.zero_()
                adapter.up.zero_()

    def drop_all(self) -> None:
        for lane in self.lanes():
            self.drop(lane)

    def lanes(self) -> list[int]:
        """Those that have adapters."""
        return sorted({lane for beside in self._beside.values() for lane in beside})

    def tensors(self) -> dict[str, Tensor]:
        """What it holds of all lanes, by names of their own."""
        return {
            f"lane {lane}: {layer}.{part}": tensor
            for layer, beside in self._beside.items()
            for lane, one in beside.items()
            for part, tensor in (("lora_A", one.down), ("lora_B", one.up))
        }

    def announce(self, rows: Sequence[int]) -> None:
        """The next pass is of rows of these lanes."""
        self._rows = tuple(rows)

    def move_to(self, device: str) -> None:
        for beside in self._beside.values():
            for lane, one in beside.items():
                beside[lane] = Adapter(one.down.to(device), one.up.to(device), one.scale)

    def _linear(self, layer: str) -> nn.Linear:
        try:
            found = self._model.get_submodule(layer)
        except AttributeError:
            found = None
        if not isinstance(found, nn.Linear):
            raise EngineError(
                f"the model has no linear layer {layer!r} to keep an adapter beside",
                'set lora.serve = "merged"',
            )
        return found

    def _hook(self, beside: dict[int, Adapter]) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def add(_layer: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> Tensor:
            """`given` [rows, positions, in]."""
            (x,) = given
            if len(x) != len(self._rows):
                raise EngineError(f"a pass of {len(x)} rows was announced with {len(self._rows)}")
            for lane, adapter in beside.items():
                rows = [row for row, of in enumerate(self._rows) if of == lane]
                if len(rows) == len(self._rows):
                    made = made + adapter.of(x)
                elif rows:
                    made = made.index_add(0, torch.tensor(rows, device=made.device), adapter.of(x[rows]))
            return made

        return add
