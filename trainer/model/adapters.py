"""LoRA (Hu et al., arXiv 2106.09685) through peft: which weights are trained, the base under them, and the two put together.

Owns what is peft's: injecting, switching off, and the names of its parameters. Knows no loss, no optimizer and no rank but through tensors.

The base stays as it was read. It is published once, as a version of its own, and then A and B alone: engines merge them with the pristine
base (`rollout.engines.lora`), so that rounding never accumulates. The reference policy is the same model with its adapters switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollout.engines import lora
from scavenger.config import LoraSection
from scavenger.errors import ConfigError, WeightsError
from trainer.model.sharding import local_of

_ADAPTER = "default"
_BASE = ".base_layer"
_MERGED_VALUES = 1 << 22  # values merged at a time: bounds the float64 temporaries


def inject(model: Any, settings: LoraSection) -> None:
    """Put adapters beside the layers that `settings.targets` names, and freeze all else. Raises `ConfigError`.

    The adapters' first weights depend on nothing but their shapes, so all ranks make the same.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError("lora.rank needs peft", "install it: pip install 'scavenger[lora]'") from error
    check_targets(model, settings)
    dtype = next(model.parameters()).dtype
    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, target_modules=list(settings.targets), lora_dropout=0.0
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    model.to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    model.eval()


def check_targets(model: Any, settings: LoraSection) -> int:
    """How many layers get an adapter. Raises `ConfigError` for a target that none of them is. The model may be without weights."""
    modules = {name: module for name, module in model.named_modules() if name}
    ends = {_end(name) for name, module in modules.items() if isinstance(module, torch.nn.Linear)} - _heads(
        model
    )
    if strange := sorted(set(settings.targets) - ends):
        why = _why_not(strange[0], modules, _heads(model))
        raise ConfigError(
            f"lora.targets: {', '.join(strange)} cannot have an adapter: {why}",
            f"name linear layers inside the decoder: {', '.join(sorted(ends))}",
        )
    return sum(_end(name) in settings.targets for name in modules)


def _why_not(target: str, modules: dict[str, Any], heads: set[str]) -> str:
    if target in heads:
        return f"{target} is the output head, whose weight many models share with the embeddings; set lora.rank = 0 to train it"
    called = next((module for name, module in modules.items() if _end(name) == target), None)
    return (
        f"no layer of {target!r} is in the model"
        if called is None
        else f"{target} is {type(called).__name__}, no linear layer"
    )


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def _heads(model: Any) -> set[str]:
    """Names of the output head: tied to the embeddings in many models, and published by its own name."""
    head = model.get_output_embeddings()
    return {name.rpartition(".")[2] for name, module in model.named_modules() if module is head}


@contextmanager
def switched_off(model: Any) -> Iterator[None]:
    """Inside, the model is its pristine base."""
    layers = [
        module
        for module in model.modules()
        if hasattr(module, "lora_A") and hasattr(module, "enable_adapters")
    ]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """What the model is without its adapters: every parameter by the model's own name, tied ones once."""
    return {
        name.replace(_BASE, ""): tuple(value.shape)
        for name, value in model.named_parameters()
        if ".lora_" not in name
    }


def trained_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """The adapters, A and B of every layer that has them, by the names that a version gives them."""
    return {
        _published_name(name): tuple(value.shape)
        for name, value in model.named_parameters()
        if ".lora_" in name
    }


def _published_name(name: str) -> str:
    return name.replace(f".{_ADAPTER}.", ".")


def trained(
    model: Any, names: Iterable[str], rows_of: Callable[[Tensor], Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """This rank's rows of each of these adapters. `rows_of`: how it gets them, by default `own`."""
    named = {_published_name(name): value for name, value in model.named_parameters() if ".lora_" in name}
    return ((name, (rows_of or own)(named[name])) for name in names)


def write(folder: Path, values: dict[str, Tensor], settings: LoraSection, base: Path) -> None:
    """peft's files of these adapters, named as in a version: `adapter_model.safetensors` and `adapter_config.json`."""
    from peft import LoraConfig

    save_file(
        {f"base_model.model.{name}": value for name, value in values.items()},
        folder / "adapter_model.safetensors",
    )
    LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(settings.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=str(base),
    ).save_pretrained(str(folder))


def pristine(
    model: Any, names: Iterable[str], rows_of: Callable[[Tensor], Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """This rank's rows of each of these parameters, as the model was read. `rows_of`: how it gets them, by default `own`."""
    named = {
        name.replace(_BASE, ""): value for name, value in model.named_parameters() if ".lora_" not in name
    }
    return ((name, (rows_of or own)(named[name])) for name in names)


def merged(model: Any, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Each of these parameters whole, adapters merged as engines merge them. A collective: all ranks exhaust it, with the same names."""
    parameters = dict(model.named_parameters())
    layers = dict(model.named_modules())
    named = {name.replace(_BASE, ""): name for name in parameters if ".lora_" not in name}
    for name in names:
        value = whole(parameters[named[name]])
        if _BASE in named[name] and name.endswith(".weight"):
            layer = name.removesuffix(".weight")
            down, up = (whole(parameters[f"{layer}.lora_{side}.{_ADAPTER}.weight"]) for side in "AB")
            value = lora.merged(value, down, up, layers[layer].scaling[_ADAPTER])
        yield name, value


def merged_rows(
    model: Any, rows_of: Callable[[Tensor], Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """This rank's rows of each weight that has an adapter, merged, some rows at a time. A collective: all ranks exhaust it. `rows_of`: how
    it gets them, by default `own`."""
    rows_of = rows_of or own
    layers = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "base_layer")
    }
    for layer, module in layers.items():
        down = whole(module.lora_A[_ADAPTER].weight)
        base, up = rows_of(module.base_layer.weight), rows_of(module.lora_B[_ADAPTER].weight)
        if len(base) != len(up):
            raise WeightsError(
                f"a rank has {len(base)} rows of {layer}.weight, and {len(up)} of its adapter",
                "shard both alike",
            )
        together = max(1, _MERGED_VALUES // down.shape[1])
        for rows, beside in zip(torch.split(base, together), torch.split(up, together), strict=True):
            yield f"{layer}.weight", lora.merged(rows, down, beside, module.scaling[_ADAPTER])


def stored_dtype(folder: Path) -> str:
    """A type that has room for all weights of a Hugging Face folder as they are stored there."""
    kinds: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(
            path, "numpy"
        ) as file:  # torch maps to write, which a host may refuse for what exceeds its memory
            kinds.update(file.get_slice(name).get_dtype() for name in file.keys())  # noqa: SIM118  not a mapping
    if "F64" in kinds:
        return "float64"
    return (
        {"BF16": "bfloat16", "F16": "float16"}.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"
    )


def own(parameter: Tensor) -> Tensor:
    """The rows of a parameter that this rank has, without gradients."""
    return local_of(parameter).detach()


def whole(parameter: Tensor) -> Tensor:
    """The tensor gathered from its shards, without gradients."""
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
