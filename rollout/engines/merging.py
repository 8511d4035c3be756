"""A version that holds low-rank adapters, put together with its base as an engine reads it.

Owns the check that adapters and base belong together, when each weight is made and on which device, and whether it is what the trainer
made of the same; `lora` has the arithmetic, `checksum` the sums. Knows no engine, no peft and no network. The base is never written: each
version is made from the pristine one, so that nothing accumulates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import torch
from torch import Tensor

from rollout.engines import checksum, lora, slices
from rollout.engines.base import Weight
from rollout.engines.published import STORED
from rollout.engines.slices import Box
from scavenger.errors import ONE_RELEASE, EngineError, WeightsDiffer
from scavenger.weights import files
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Manifest, SharedMemory, TensorView

#: Where a tensor lies: dtype, shape, which memory file, offset, nbytes.
FileRow = tuple[str, Sequence[int], int, int, int]
#: What a weight that lies there becomes: dtype, scale, and the rows of A and B if it has an adapter.
FileMerge = tuple[str, float, Sequence[FileRow]]
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
_RANK = "publish adapters of the rank that lora.rank says"
_REMEDY = "publish the adapters with the base that they were trained on"


@dataclass(frozen=True, slots=True)
class Merged:
    """`rollout.engines.base.Weight` of a base, with its adapter if it has one: made whenever `data` is read, rounded to `dtype`."""

    base: TensorView
    dtype: str
    adapter: tuple[TensorView, TensorView, float] | None = None  # A, B, scale

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.base.shape) * STORED[self.dtype].itemsize

    @property
    def data(self) -> memoryview:
        """Its bytes, in memory of their own."""
        raw: Any = self.on("cpu").contiguous().view(-1).view(torch.uint8)
        return memoryview(raw.numpy())

    @property
    def parts(self) -> tuple[TensorView, ...]:
        """What it is made of: the base, and A and B if it has an adapter."""
        return (self.base, *self.adapter[:2]) if self.adapter is not None else (self.base,)

    @property
    def scale(self) -> float:
        return self.adapter[2] if self.adapter is not None else 0.0

    @property
    def is_made_elsewhere(self) -> bool:
        """Whether who has the GPU is handed its parts and not the result: the base is no larger, or lies where it can be shown."""
        smaller = STORED[self.base.dtype].itemsize <= STORED[self.dtype].itemsize
        return smaller or self.base.memory is not None

    def on(self, device: torch.device | str) -> Tensor:
        """Its value, made on that device: a GPU and a CPU give the same bits (`lora`)."""
        return _made([tensor(part).to(device) for part in self.parts], self.scale, self.dtype)


def tensor(view: Weight) -> Tensor:
    """A view's tensor over the same memory; it is not written to."""
    if not view.nbytes:
        return torch.empty(view.shape, dtype=STORED[view.dtype])
    return torch.frombuffer(view.data, dtype=STORED[view.dtype]).reshape(view.shape)


def _made(parts: Sequence[Tensor], scale: float, dtype: str) -> Tensor:
    """Of a base, and of A and B if they are there, on the device where they are."""
    whole = parts[0] if len(parts) == 1 else lora.merged(parts[0], parts[1], parts[2], scale)
    return whole.to(STORED[dtype])


def on(weight: Weight, device: torch.device | str) -> Tensor:
    """A weight's value on a device; what is to be merged is merged there. On a CPU, another one's memory is not copied, nor written."""
    return weight.on(device) if isinstance(weight, Merged) else tensor(weight).to(device)


def from_files(
    files: Sequence[mmap],
    row: FileRow,
    merge: FileMerge | None,
    boxes: Sequence[Box],
    device: torch.device | str,
) -> Tensor:
    """A weight whose parts lie in memory files, on a device, merged there where `merge` says so. Outside of `boxes` nothing is read, and
    what stands there means nothing."""
    stored = _at(files, row)
    if merge is None and torch.device(device).type == "cpu":
        return stored  # pages that nobody looks at are not read
    dtype, scale, adapter = merge or (row[0], 0.0, ())
    made = torch.empty(stored.shape, dtype=STORED[dtype], device=device)
    for box in boxes:
        parts = [slices.cut(stored, box)]
        if (
            adapter
        ):  # rows and columns that are merged alone have the bits that they have in the whole (`lora`)
            down, up = (_at(files, part) for part in adapter)
            parts += [down[:, slice(*box[1])], up[slice(*box[0])]]
        slices.cut(made, box).copy_(_made([part.to(device) for part in parts], scale, dtype))
    return made


def read_nbytes(row: FileRow, merge: FileMerge | None, box: Box) -> int:
    """Bytes of the memory files that `from_files` reads of one box."""
    found = slices.numel(box) * STORED[row[0]].itemsize
    if merge is not None and merge[2]:
        (top, bottom), (left, right) = box
        for (dtype, shape, *_), crossed in zip(merge[2], (right - left, bottom - top), strict=True):
            found += min(shape) * crossed * STORED[dtype].itemsize
    return found


def _at(files: Sequence[mmap], row: FileRow) -> Tensor:
    dtype, shape, file, offset, nbytes = row
    kind = STORED[dtype]
    if not nbytes:
        return torch.empty(tuple(shape), dtype=kind)
    return torch.frombuffer(files[file], dtype=kind, count=nbytes // kind.itemsize, offset=offset).reshape(
        tuple(shape)
    )


def views(
    manifest: Manifest,
    adapters: Sequence[TensorView],
    base: Manifest,
    blob: memoryview,
    memory: SharedMemory | None = None,
) -> list[Weight]:
    """All weights of a version that holds adapters, each made when it is read, and the file beside them as it is in the base.

    `memory`: the base's, as `manifest.views` has it.

    Raises `EngineError` where the base is not its own.
    """
    of = manifest.adapter
    assert of is not None
    if base.root != of.base:
        raise EngineError(
            f"version {manifest.version} is of base {of.base.hex()}, not of {base.root.hex()}", _REMEDY
        )
    if of.dtype not in STORED:
        raise EngineError(
            f"version {manifest.version} is to be merged in {of.dtype}",
            f"publish in one of {', '.join(STORED)}",
        )
    given = {view.name: view for view in adapters}
    found = [
        weight if files.is_file(weight.name) else _one(weight, given, of.scale, of.dtype)
        for weight in manifests.views(base, blob, memory)
    ]
    if given:
        raise EngineError(
            f"{len(given)} adapters belong to no weight of the base, the first is {min(given)!r}", _REMEDY
        )
    return found


def apart(weights: Sequence[Weight]) -> tuple[list[Weight], list[Merged]]:
    """The base alone, rounded as the whole would be, and those that have an adapter."""
    base: list[Weight] = []
    for weight in weights:
        if isinstance(weight, Merged) and weight.adapter is not None:
            weight = weight.base if weight.base.dtype == weight.dtype else Merged(weight.base, weight.dtype)
        base.append(weight)
    return base, [one for one in weights if isinstance(one, Merged) and one.adapter is not None]


def refuse_larger(adapters: Iterable[Merged], rank: int) -> None:
    """Raises `EngineError` where one has a larger rank than `rank`: each row of it costs what its rank says."""
    for one in adapters:
        found = one.parts[1].shape[0]
        if found > rank:
            raise EngineError(f"weight {one.name!r} has an adapter of rank {found}, not {rank}", _RANK)


def same_memory(one: Sequence[Weight], other: Sequence[Weight]) -> bool:
    """Whether these are the same tensors in the same place, and so the same weights: what was pulled is not written again."""

    def place(weight: Weight) -> tuple[str, str, int | None, int]:
        view = weight.base if isinstance(weight, Merged) else weight
        memory = view.memory if isinstance(view, TensorView) else None
        return (
            weight.name,
            weight.dtype,
            None if memory is None else id(memory),
            view.offset if isinstance(view, TensorView) else 0,
        )

    places = [place(weight) for weight in one]
    return None not in [at for _, _, at, _ in places] and places == [place(weight) for weight in other]


def digest(weights: Iterable[Weight], names: Mapping[str, str]) -> bytes:
    """Of weights that sit in no engine yet, each made for it once more. `names`: under which they count."""
    return checksum.digest({names[weight.name]: checksum.checksum(tensor(weight)) for weight in weights})


def refuse_other(manifest: Manifest, found: bytes) -> None:
    """Raises `WeightsDiffer` where an engine holds (`found`, its digest) other weights than its trainer says that it merged."""
    if manifest.merged and found != manifest.merged:
        theirs, ours = manifest.merged.hex()[:16], found.hex()[:16]
        cause = f"version {manifest.version} was merged here to other weights ({ours}) than by its trainer ({theirs})"
        raise WeightsDiffer(cause, ONE_RELEASE)


def _one(weight: TensorView, given: dict[str, TensorView], scale: float, dtype: str) -> Weight:
    """The weight with its adapter, which is taken out of `given`."""
    if weight.dtype not in STORED:
        raise EngineError(
            f"weight {weight.name!r} of the base is {weight.dtype}",
            f"publish it in one of {', '.join(STORED)}",
        )
    layer = weight.name.removesuffix(".weight")
    down, up = given.get(layer + DOWN), given.get(layer + UP)
    if down is None or up is None:
        return weight if weight.dtype == dtype else Merged(weight, dtype)
    _check(weight, down, up)
    del given[layer + DOWN], given[layer + UP]
    return Merged(weight, dtype, (down, up, scale))


def _check(weight: TensorView, down: TensorView, up: TensorView) -> None:
    shapes = (weight.shape, up.shape, down.shape)
    fits = (
        all(len(shape) == 2 for shape in shapes)
        and weight.shape == (up.shape[0], down.shape[1])
        and up.shape[1] == down.shape[0]
    )
    if not fits or down.dtype != up.dtype or down.dtype not in ("float32", "float64"):
        detail = f"A is {down.dtype}{down.shape}, B is {up.dtype}{up.shape}"
        raise EngineError(
            f"weight {weight.name!r} {weight.shape} has an adapter that does not fit: {detail}", _REMEDY
        )
