"""Training state in host memory while reserved engines have the GPU: masters, gradients of the step under way, optimizer moments.

    away      GPU -> host, then the GPU's memory is freed           before engines wake
    back      GPU memory is taken again, all copies are begun       once engines have given theirs back
    arrive    what one layer needs is there                         before that layer's forward pass; moments before the update

Owns the copies and their order, and the rule whether to make them at all (`choose`). Knows no engine, no rank and no account.

A tensor keeps its identity: its storage is emptied and filled again in place, as FSDP2 does with gathered layers, so that parameters,
what FSDP2 remembers of them, gradients and the optimizer's state all stay what they were. On CUDA copies run on a stream of their own,
in the order in which layers are used, and the streams that compute and that gather for FSDP2 wait for each layer's event alone; host
memory is pinned, and kept for the next time. On a CPU the copies are real too, each made when it is first needed: so tests see what
would be missing.

FSDP2's own CPUOffloadPolicy keeps shards on the host for good and updates them there: that is for models that never fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from scavenger.sizing import training as sizing
from scavenger.sizing.training import USABLE, Mode
from scavenger.weights.memory import Buffer
from trainer.model.pinned import Pins, cuda_pins
from trainer.model.sharding import gather_after, layers, local_of

#: Copies begin at multiples of this.
_ALIGN = 512


@dataclass(frozen=True, slots=True)
class OffloadChoice:
    offload: bool
    reason: str


def choose(mode: Mode, *, resident: int, engine: int | None, capacity: int) -> OffloadChoice:
    """Whether training state leaves a GPU of `capacity` bytes (0 = there is none) while engines have it. Pure.

    `resident`: what the trainer would keep there; `engine`: what engines take of this GPU, 0 = none lies there, None = not known yet.
    """
    if mode != "auto":
        return OffloadChoice(mode == "always", f'trainer.offload = "{mode}"')
    if not capacity:
        return OffloadChoice(False, "there is no GPU that engines could share")
    if engine == 0:
        return OffloadChoice(False, "no reserved engine lies on this GPU")
    kept = f"{_gb(resident)} of training state"
    if engine is None:
        return OffloadChoice(True, f"what an engine takes of {_gb(capacity)} beside {kept} is not known yet")
    both = f"{kept} and {_gb(engine)} of engines"
    if not sizing.offloads(mode, resident=resident, engine=engine, capacity=capacity):
        return OffloadChoice(False, f"{both} fit a GPU of {_gb(capacity)}")
    usable = f"of which {_gb(int(USABLE * capacity))} are usable"
    return OffloadChoice(True, f"{both} do not fit a GPU of {_gb(capacity)}, {usable}")


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"


@dataclass(slots=True)
class _Copy:
    """A storage of the GPU, emptied or not, and where its bytes wait."""

    storage: torch.UntypedStorage
    nbytes: int
    host: Tensor


@dataclass(slots=True)
class _Unit:
    """What arrives together. `copies` wait for that; none do where all is in place. `module`: whose forward pass uses the parameters."""

    module: nn.Module | None = None
    parameters: list[nn.Parameter] = field(default_factory=list)
    copies: list[_Copy] = field(default_factory=list)
    event: Any = None


def storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Of this rank's parts of the tensors, each once."""
    found = (local_of(tensor.detach()).untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in found}


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(storage.nbytes() for storage in storages(tensors).values())


class Offload:
    """The training state of one rank. `models` have been sharded; `optimizer` has its state."""

    def __init__(
        self, models: Sequence[nn.Module], optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._optimizer = optimizer
        self._moments = _Unit()
        self._units = [unit for model in models for unit in _hooked(model, self._arrive)]
        self._away: dict[int, _Copy] = {}  # by storage; of what is not in its place, or on its way there
        self._hosts: dict[str, Buffer] = {}  # pinned memory that is kept, by what it is for
        self._pins: Pins | None = None
        self._stream: Any = None
        self.is_away = False

    def parameters(self) -> list[Tensor]:
        return [parameter for unit in self._units for parameter in unit.parameters]

    def gradients(self) -> list[Tensor]:
        return [p.grad for unit in self._units for p in unit.parameters if p.grad is not None]

    def moments(self) -> list[Tensor]:
        """The optimizer's state that is as large as the parameters."""
        states = self._optimizer.state.values()
        return [state[name] for state in states for name in ("exp_avg", "exp_avg_sq") if name in state]

    # ---------------------------------------------------------------- the two ways

    @torch.no_grad()
    def away(self) -> None:
        """Copy all to the host, wait for that, and free the memory of the GPU. Nothing to do where it is away."""
        if self.is_away:
            return
        self.arrive_all()
        places = self._places("state", [*self.parameters(), *self.moments()])
        places |= self._places("gradients", self.gradients())
        for unit in self._units:
            grads = [parameter.grad for parameter in unit.parameters if parameter.grad is not None]
            unit.copies = _taken(places, [*unit.parameters, *grads])
        self._moments.copies = _taken(places, self.moments())
        with self._side_stream():
            for copy in self._copies():
                copy.host.copy_(_bytes_of(copy.storage, self._device), non_blocking=True)
        if self._cuda:
            self._stream.synchronize()
        for copy in self._copies():
            self._away[copy.storage._cdata] = copy
            copy.storage.resize_(0)
        self.is_away = True

    @torch.no_grad()
    def back(self) -> None:
        """Take the GPU's memory again, and begin to copy, in the order of use. Nothing to do where nothing is away."""
        if not self.is_away:
            return
        for copy in self._copies():
            copy.storage.resize_(copy.nbytes)
        self.is_away = False
        if not self._cuda:
            return  # each is copied as it is needed
        with self._side_stream():
            for unit in (*self._units, self._moments):
                for copy in unit.copies:
                    _bytes_of(copy.storage, self._device).copy_(copy.host, non_blocking=True)
                unit.event = self._stream.record_event()

    @torch.no_grad()
    def _arrive(self, unit: _Unit) -> None:
        if not unit.copies:
            return
        self.back()
        if self._cuda:
            torch.cuda.current_stream().wait_event(unit.event)
            if unit.module is not None:
                gather_after(unit.module, unit.event)
        for copy in unit.copies:
            if not self._cuda:
                _bytes_of(copy.storage, self._device).copy_(copy.host)
            del self._away[copy.storage._cdata]
        unit.copies, unit.event = [], None

    def arrive_all(self) -> None:
        """Everything is in its place: what is computed next may use any of it."""
        for unit in (*self._units, self._moments):
            self._arrive(unit)

    def drop_gradients(self) -> None:
        """Wherever they are: they come back no more."""
        for unit in self._units:
            if unit.event is not None:  # copies under way write into memory that would be another's at once
                torch.cuda.current_stream().wait_event(unit.event)
        self._optimizer.zero_grad(set_to_none=True)
        keep = storages([*self.parameters(), *self.moments()])
        for unit in self._units:
            for copy in unit.copies:
                if copy.storage._cdata not in keep:
                    del self._away[copy.storage._cdata]
            unit.copies = [copy for copy in unit.copies if copy.storage._cdata in keep]

    # ---------------------------------------------------------------- who reads meanwhile

    def reading(self, tensor: Tensor) -> Tensor:
        """The tensor, or, where its bytes are away or on their way, the same with its part in host memory: for who only reads."""
        local = local_of(tensor.detach())
        copy = self._away.get(local.untyped_storage()._cdata)
        if copy is None:
            return tensor.detach()
        typed = copy.host.view(local.dtype)
        part = typed.as_strided(local.size(), local.stride(), typed.storage_offset() + local.storage_offset())
        if not isinstance(tensor, DTensor):
            return part
        return DTensor(part, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    # ---------------------------------------------------------------- host memory

    def _copies(self) -> Iterator[_Copy]:
        for unit in (*self._units, self._moments):
            yield from unit.copies

    def _side_stream(self) -> Any:
        if not self._cuda:
            return torch.no_grad()
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _places(self, what: str, tensors: Iterable[Tensor]) -> dict[int, _Copy]:
        """Where the storages of these tensors are to wait, each once."""
        found = {key: storage for key, storage in storages(tensors).items() if storage.nbytes()}
        hosts = self._memory(what, [storage.nbytes() for storage in found.values()])
        pairs = zip(found.items(), hosts, strict=True)
        return {key: _Copy(storage, storage.nbytes(), host) for (key, storage), host in pairs}

    def _memory(self, what: str, sizes: Sequence[int]) -> list[Tensor]:
        """Of the host, each with a storage of its own: who copies one, as a checkpoint does, copies no other.

        What was pinned for the same purpose is used again, if it is large enough.
        """
        if not self._cuda:
            return [torch.empty(nbytes, dtype=torch.uint8) for nbytes in sizes]
        starts = [0, *accumulate(-(-nbytes // _ALIGN) * _ALIGN for nbytes in sizes)]
        kept = self._hosts.get(what)
        if kept is None or kept.nbytes < starts[-1]:
            self._hosts.pop(what, None)
            kept = self._hosts[what] = Buffer(max(starts[-1], 1))
            flat = torch.frombuffer(kept.view, dtype=torch.uint8)
            self._pins = self._pins or cuda_pins()
            self._pins.pin(kept, flat.data_ptr(), [(0, kept.nbytes)])
        view = kept.view
        places = zip(starts, sizes, strict=False)
        return [torch.frombuffer(view[start : start + nbytes], dtype=torch.uint8) for start, nbytes in places]


def _taken(places: dict[int, _Copy], tensors: Iterable[Tensor]) -> list[_Copy]:
    """Those of these tensors' storages that no unit before has."""
    return [places.pop(key) for key in storages(tensors) if key in places]


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _hooked(model: nn.Module, arrive: Any) -> list[_Unit]:
    """The model's parameters in the order of their use: what lies outside of the decoder layers, then each of these.

    Before a forward pass, and before FSDP2 gathers for it, they are to arrive.
    """
    units, taken = [], set[int]()
    rest = _Unit(model)
    for module in [*layers(model)]:
        unit = _Unit(module, list(module.parameters()))
        taken |= {id(parameter) for parameter in unit.parameters}
        module.register_forward_pre_hook(lambda _module, _args, unit=unit: arrive(unit), prepend=True)
        units.append(unit)
    rest.parameters = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    model.register_forward_pre_hook(lambda _module, _args: arrive(rest), prepend=True)
    return [rest, *units]
