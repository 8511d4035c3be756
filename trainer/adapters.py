"""LoRA (Hu et al., arXiv 2106.09685) through peft: which weights are trained, the base under them, and the two put together.

Owns what is peft's: injecting, switching off, and the names of its parameters. Knows no loss, no optimizer and no rank but through tensors.

The base stays as it was read. A version is made each time from that pristine base, W + scale * B A, so that rounding never accumulates,
and has the model's own names: any engine can load it. The reference policy is the same model with its adapters switched off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from scavenger.config import LoraSection
from scavenger.errors import ConfigError
from scavenger.weights.shards import rows

_ADAPTER = "default"
_BASE = ".base_layer"


def inject(model: Any, settings: LoraSection) -> None:
    """Put adapters beside the layers that `settings.targets` names, and freeze all else. Raises `ConfigError`.

    The adapters' first weights depend on nothing but their shapes, so all ranks make the same.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError("lora.rank needs peft", 'install it: pip install ".[lora]" in a clone of Scavenger') from error
    ends = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    ends -= _heads(model)
    if strange := sorted(set(settings.targets) - ends):
        raise ConfigError(
            f"lora.targets: {', '.join(strange)} cannot have an adapter",
            f"name linear layers inside the decoder: {', '.join(sorted(ends))}",
        )
    dtype = next(model.parameters()).dtype
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=list(settings.targets), lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    model.to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    model.eval()


def _heads(model: Any) -> set[str]:
    """Names of the output head: tied to the embeddings in many models, and published by its own name."""
    head = model.get_output_embeddings()
    return {name.rpartition(".")[2] for name, module in model.named_modules() if module is head}


@contextmanager
def switched_off(model: Any) -> Iterator[None]:
    """Inside, the model is its pristine base."""
    layers = [module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "enable_adapters")]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """What the model is without its adapters: every parameter by the model's own name, tied ones once."""
    return {name.replace(_BASE, ""): tuple(value.shape) for name, value in model.named_parameters() if ".lora_" not in name}


def merged(model: Any, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """This rank's rows of each of these parameters, adapters merged. A collective: all ranks must exhaust it, with the same names.

    The change that an adapter makes is computed whole on every rank and cut then: a product of some rows alone may round otherwise, and
    equal weights must be equal however many ranks there are.
    """
    parameters = dict(model.named_parameters())
    layers = dict(model.named_modules())
    named = {name.replace(_BASE, ""): name for name in parameters if ".lora_" not in name}
    for name in names:
        base = parameters[named[name]]
        value = own(base)
        if _BASE in named[name] and name.endswith(".weight"):
            layer = name.removesuffix(".weight")
            down, up = (whole(parameters[f"{layer}.lora_{side}.{_ADAPTER}.weight"]) for side in "AB")
            value = value + own_rows(base, layers[layer].scaling[_ADAPTER] * (up @ down))
        yield name, value


def own(parameter: Tensor) -> Tensor:
    """The rows of a parameter that this rank has, without gradients."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def own_rows(like: Tensor, value: Tensor) -> Tensor:
    """Of a whole tensor the rows that this rank has of the parameter `like`."""
    if not isinstance(like, DTensor):
        return value
    first, last = rows(like.shape[0], like.device_mesh.get_local_rank(), like.device_mesh.size())
    return value[first:last]


def whole(parameter: Tensor) -> Tensor:
    """The tensor gathered from its shards, without gradients."""
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
