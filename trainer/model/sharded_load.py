"""A Hugging Face folder into a model that is laid over the ranks: each reads its own rows, and nothing else.

Owns the way from weight files to shards, and what is wrong with a folder. Knows no optimizer, no loss and no launcher.

    begin    the model without weights, and where each of its tensors comes from; a folder that does not fit is refused here, by heads alone
    (adapters, the head and `sharding.shard` change the model)
    fill     memory for this rank's rows, and one range read after another into it

Weights are read through a memory map that is closed and opened again after `_MAPPED` bytes, so that pages of the files do not count as this
process's. What is converted on the way (experts that lie one by one in the files and are one tensor in the model) goes by transformers' own
mapping, an expert at a time. Buffers that no file holds (rotary frequencies) are computed as transformers computes them. Weights that are
tied are one parameter. Host memory: the rows that a rank keeps, `_MAPPED` bytes of the files, all adapters, and one tensor where a
conversion wants it whole.
Boundary: the only way from files to shards; `init --check` asks the same plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from scavenger.errors import ConfigError
from trainer.model.sharding import settle

#: Bytes of weight files that may be mapped and read at once.
_MAPPED = 8 << 20
_AGAIN = "copy the model's whole folder again"
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a weight file."""

    file: Path
    shape: Shape


@dataclass(slots=True)
class _Origin:
    """What a tensor of the model is made of: one stored tensor, or those that a converter takes, by its patterns."""

    keys: dict[str, list[str]] = field(default_factory=dict)
    converter: Any = None

    @property
    def one(self) -> str:
        return next(iter(self.keys.values()))[0]

    @property
    def stacks(self) -> bool:
        """Whether row i of the tensor is made of the i-th stored tensor of each pattern, and of no other."""
        operations = self.converter.operations
        first = isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
        return (
            first
            and len(self.converter.target_patterns) == 1
            and all(isinstance(one, Concatenate) and one.dim >= 1 for one in operations[1:])
        )


class ShardedLoadPlan:
    """Where each tensor of a model comes from. `fill` is for the model that `begin` made it with."""

    def __init__(
        self, folder: Path, stored: dict[str, _Stored], origins: dict[str, _Origin], config: Any
    ) -> None:
        self._folder = folder
        self._stored = stored
        self._origins = origins
        self._config = config
        self._adapters: dict[str, Tensor] = {}
        self._open: dict[Path, Any] = {}
        self._mapped = 0

    def empty(self, model: Any) -> None:
        """Keep the adapters that were put beside the layers since `begin`, and leave nothing else: ready to be sharded."""
        self._adapters = {
            name: value.detach() for name, value in model.named_parameters() if ".lora_" in name
        }
        _replace(model, lambda value: torch.empty_like(value, device="meta"))

    def fill(self, model: Any, device: torch.device) -> None:
        """Memory on `device` for this rank's part of every parameter of the sharded model, and the weights into it.

        Raises `ConfigError` for a file that cannot be read.
        """
        names = {id(value): name for name, value in model.named_parameters()}
        made: dict[int, nn.Parameter] = {}
        try:
            for module in model.modules():
                for key, value in module._parameters.items():
                    if value is None:
                        continue
                    if id(value) not in made:
                        made[id(value)] = self._filled(names[id(value)], value, device)
                    module._parameters[key] = made[id(value)]
            settle(model)
            for module, key, name in _buffers(model):
                if name in self._origins:
                    whole = torch.empty_like(module._buffers[key], device=device)
                    self._read(name, whole, tuple(slice(0, size) for size in whole.shape))
                    module._buffers[key] = whole
        except (OSError, SafetensorError, RuntimeError) as error:  # torch's, of a map that the host refuses
            raise ConfigError(f"model.path: {self._folder} cannot be read: {error}", _AGAIN) from error
        self._adapters.clear()
        self._close()

    def _filled(self, name: str, value: Any, device: torch.device) -> nn.Parameter:
        shape, offset = compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )
        ranges = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        local = torch.empty(shape, dtype=value.dtype, device=device)
        if local.numel():
            if name in self._adapters:
                local.copy_(self._adapters[name][ranges])
            else:
                self._read(_stored_name(name), local, ranges)
        laid = DTensor.from_local(
            local,
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
        return nn.Parameter(laid, requires_grad=value.requires_grad)

    def _read(self, name: str, out: Tensor, ranges: tuple[slice, ...]) -> None:
        """`ranges` of the tensor into `out`."""
        origin = self._origins[name]
        if origin.converter is None:
            self._copy(origin.one, out, ranges)
        elif origin.stacks:
            for place, row in enumerate(range(ranges[0].start, ranges[0].stop)):
                row_keys = {pattern: [keys[row]] for pattern, keys in origin.keys.items()}
                made = self._converted(name, origin, row_keys)[name]
                out[place].copy_(made[0][ranges[1:]])
        else:
            out.copy_(self._converted(name, origin, origin.keys)[name][ranges])

    def _copy(self, key: str, out: Tensor, ranges: tuple[slice, ...]) -> None:
        if not ranges:
            out.copy_(self._handle(key).get_tensor(key))
            return
        rows = ranges[0].stop - ranges[0].start
        each = max(1, out.nbytes // max(1, rows))
        together = max(1, _MAPPED // each)
        for start in range(0, rows, together):
            stop = min(start + together, rows)
            first = ranges[0].start
            piece = self._handle(key).get_slice(key)[slice(first + start, first + stop), *ranges[1:]]
            out[start:stop].copy_(piece)
            self._took(piece.nbytes)
            del piece

    def _converted(self, name: str, origin: _Origin, keys: dict[str, list[str]]) -> dict[str, Tensor]:
        tensors = {
            pattern: [self._handle(key).get_tensor(key) for key in some] for pattern, some in keys.items()
        }
        self._took(sum(one.nbytes for some in tensors.values() for one in some))
        return _convert(name, origin.converter, tensors, self._config)

    def _handle(self, key: str) -> Any:
        path = self._stored[key].file
        if path not in self._open:
            handle: Any = safe_open(path, "pt")
            self._open[path] = handle.__enter__()
        return self._open[path]

    def _took(self, nbytes: int) -> None:
        """Count what was read of the maps, and let go of their pages in time."""
        self._mapped += nbytes
        if self._mapped >= _MAPPED:
            self._close()

    def _close(self) -> None:
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()
        self._mapped = 0


def begin(folder: Path, dtype: torch.dtype, attention: str = "sdpa") -> tuple[Any, ShardedLoadPlan]:
    """The causal LM of a Hugging Face folder with weights that take no memory, and the plan to fill it. Runs no code of the folder's.

    Raises `ConfigError` where the weight files do not hold every tensor of the model in its shape.
    """
    model = _skeleton(folder, dtype, attention)
    plan = plan_of(folder, model)
    _compute_buffers(model)
    model.eval()
    _replace(model, lambda value: torch.zeros((), dtype=value.dtype).expand(value.shape))
    return model, plan


def check(folder: Path) -> None:
    """Raises `ConfigError` where `begin` would. Reads heads of files only."""
    plan_of(folder, _skeleton(folder, torch.bfloat16, "eager"))


def _skeleton(folder: Path, dtype: torch.dtype, attention: str) -> Any:
    """On the meta device, tied weights tied."""
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path: {folder} holds no config.json", "give the folder of a Hugging Face model"
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigError(
                f"model.path: {folder} holds quantised weights, which cannot be trained",
                "give the folder in bfloat16; transformers' save_pretrained writes it",
            )
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError, TypeError, ImportError) as error:
        raise ConfigError(
            f"model.path: {folder} cannot be loaded: {error}",
            "it must be a causal LM with safetensors weights",
        ) from error


def plan_of(folder: Path, model: Any) -> ShardedLoadPlan:
    """Where each of the model's tensors comes from. Raises `ConfigError`."""
    stored = _heads(folder)
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    origins, shapes = _origins(folder, model, stored, wanted)
    for names in _tied(model):
        there = [name for name in names if name in origins]
        if len(there) > 1:
            _refuse_two(folder, stored, origins, there)
        for name in there[:1]:
            origins |= dict.fromkeys(names, origins[name])
            shapes |= dict.fromkeys(names, shapes[name])
    two = f"model.path: {folder}: config.json and weights are of two models"
    for name in wanted:
        if name not in origins:
            raise ConfigError(f"{two}: {name} is not in the weight files", _AGAIN)
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise ConfigError(f"{two}: {name} has the shape {shapes[name]} there, not {shape}", _AGAIN)
    return ShardedLoadPlan(folder, stored, origins, model.config)


def weight_files(folder: Path) -> list[Path]:
    """`model.safetensors`, or the files that the index names. Raises `OSError`, `ValueError`, `KeyError` or `AttributeError`."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file() or not index.is_file():
        return [single]
    return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def _heads(folder: Path) -> dict[str, _Stored]:
    """Of every tensor in the weight files."""
    remedy = (
        "copy the whole folder; weights in other formats are converted with transformers' save_pretrained"
    )
    try:
        found = {}
        for path in weight_files(folder):
            with safe_open(
                path, "numpy"
            ) as file:  # torch maps to write, which a host may refuse for what exceeds its memory
                for key in file.keys():  # noqa: SIM118  not a mapping
                    found[key] = _Stored(path, tuple(file.get_slice(key).get_shape()))
        return found
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"model.path: {folder} cannot be loaded: {error}", remedy) from error


def _origins(
    folder: Path, model: Any, stored: dict[str, _Stored], wanted: dict[str, Shape]
) -> tuple[dict[str, _Origin], dict[str, Shape]]:
    """As transformers assigns stored tensors (`convert_and_load_state_dict_in_model`), and the shapes that come of it."""
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix, names = model.base_model_prefix, dict.fromkeys(wanted, True)
    found: dict[str, _Origin] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, names)
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], prefix, names)
        if name in wanted:
            origin = found.setdefault(name, _Origin(converter=by_pattern.get(pattern)))
            origin.keys.setdefault(pattern or "", []).append(key)
    shapes: dict[str, Shape] = {}
    for first, origin in list(found.items()):
        if origin.converter is None:
            shapes[first] = stored[origin.one].shape
            continue
        tensors = {
            pattern: [torch.empty(stored[key].shape, device="meta") for key in keys]
            for pattern, keys in origin.keys.items()
        }
        try:
            made = _convert(first, origin.converter, tensors, model.config)
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            raise ConfigError(
                f"model.path: {folder}: {first} cannot be made of what the weight files hold: {error}", _AGAIN
            ) from error
        for name, value in made.items():
            found[name], shapes[name] = origin, tuple(value.shape)
    return found, shapes


def _convert(name: str, converter: Any, tensors: dict[str, list[Tensor]], config: Any) -> dict[str, Tensor]:
    """What transformers' converter makes of these, by the names of the model. `name`: of the first that it makes."""
    made: dict[str, Any] = tensors
    for operation in converter.operations:
        made = operation.convert(
            made,
            source_patterns=converter.source_patterns,
            target_patterns=converter.target_patterns,
            full_layer_name=name,
            model=None,
            config=config,
            missing_keys=None,
        )
    target = next((target for target in made if target in name), None)
    before, _, after = name.partition(target) if target is not None else ("", "", "")
    return {
        f"{before}{target}{after}": value[0] if isinstance(value, list) else value
        for target, value in made.items()
    }


def _tied(model: Any) -> list[list[str]]:
    """Names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(value), []).append(name)
    return [some for some in names.values() if len(some) > 1]


def _refuse_two(
    folder: Path, stored: dict[str, _Stored], origins: dict[str, _Origin], names: list[str]
) -> None:
    """A file may hold tied weights once for each name, if they are the same."""
    one, other = (origins[name].one for name in names[:2])
    with safe_open(stored[one].file, "pt") as ours, safe_open(stored[other].file, "pt") as theirs:
        first, second = ours.get_slice(one), theirs.get_slice(other)
        same = first.get_shape() == second.get_shape() and all(
            torch.equal(first[rows], second[rows]) for rows in _pieces(first.get_shape())
        )
    if not same:
        raise ConfigError(
            f"model.path: {folder}: config.json ties {names[0]} and {names[1]}, and the weight files hold two different ones",
            'set "tie_word_embeddings": false in config.json',
        )


def _pieces(shape: list[int]) -> Iterator[slice]:
    each = max(1, _MAPPED // max(1, 4 * (shape[1] if len(shape) > 1 else 1)))
    return (slice(start, start + each) for start in range(0, shape[0], each))


def _compute_buffers(model: Any) -> None:
    """What no file holds, as transformers computes it after loading; parameters are left alone."""
    held = set(model.state_dict())
    for module, key, name in _buffers(model):
        if name not in held:
            module._buffers[key] = torch.empty_like(module._buffers[key], device="cpu")
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_meta:
            value._is_hf_initialized = True
        elif name in held:
            raise AssertionError(f"{name} is of the weight files, and not on the meta device")
    model.initialize_weights()


def _buffers(model: Any) -> list[tuple[Any, str, str]]:
    """Module, key there, whole name."""
    return [
        (module, key, f"{prefix}.{key}" if prefix else key)
        for prefix, module in model.named_modules()
        for key, value in module._buffers.items()
        if value is not None
    ]


def _replace(model: Any, made: Any) -> None:
    """Every parameter by another; one with several names stays one."""
    done: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, value in module._parameters.items():
            if value is not None:
                if id(value) not in done:
                    done[id(value)] = nn.Parameter(made(value.detach()), requires_grad=value.requires_grad)
                module._parameters[key] = done[id(value)]


def _stored_name(name: str) -> str:
    """Without what an adapter beside the layer puts into it."""
    return name.replace(".base_layer", "")
