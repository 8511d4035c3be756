"""Tensor parallelism: the ranks of one group compute the same tokens, each with a slice of every layer, by the model's own plan.

    colwise      a linear layer's outputs are cut: each rank has some heads, or a part of the feed-forward's width
    rowwise      its inputs are cut: each rank makes a part of every sum, and the parts are added up (all-reduce)
    experts      whole experts, some to each rank: it computes those tokens that go to its own, and the parts are added up
    vocabulary   embeddings and output head are cut by entries; no rank makes whole logits (`head.Slice`)
    the rest     norms and routers: whole on each rank, the same values everywhere

Which layer is cut how is transformers' word (`base_model_tp_plan`, in the names of `ALL_PARALLEL_STYLES`); a plan with another word is
refused. Two things are done otherwise than there. Experts are not cut inside (`packed_colwise`) but dealt out: halves that lie side by side
in one tensor have no range of their own in weight files, checkpoints or versions, and a slice of a small expert is too narrow to
compute well. And gradients of norms over heads (`replicated_with_grad_allreduce`) are summed where they flow back and not in a hook of
the module's, which FSDP2 does not wait for.

Parameters are DTensors over the group, so that FSDP2 cuts each slice further over the other ranks, checkpoints know every offset, and ranks
read their own ranges of the weight files. Layers compute on plain tensors: a module sees its slice while it runs. What crosses between
ranks is written out below (Megatron-LM's f and g: Shoeybi et al., arXiv 1909.08053).

Versions and merged adapters want rows in the ranks' order, which a slice of columns is not: `Rows` deals a tensor out again, one at a time.
Boundary: what is cut and what crosses for it; knows no loss, no sample and no optimizer but its gradients.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from scavenger.errors import ConfigError
from trainer.model import head
from trainer.model.crossing import Entrance, entering, gathered, leaving, split
from trainer.model.mesh import Mesh, check_slices
from trainer.model.sharding import local_of

_REMEDY = "set trainer.tensor_parallel = 1"
_PLAIN = "replicated"
#: Styles of linear layers, by what the plan calls them.
_COLUMNS = {"colwise", "colwise_gather_output", "colwise_rep"}
_ROWS = {"rowwise", "rowwise_split_input", "rowwise_rep"}
_GATHERS = {"colwise_gather_output", "colwise_rep"}
_SPLITS = {"rowwise_split_input", "rowwise_rep"}
_PARTIAL = "replicated_with_grad_allreduce"
_EXPERTS = "moe_tp_experts"
_EMBEDDING, _HEAD = "vocabulary in", "vocabulary out"


@dataclass(frozen=True, slots=True)
class Cut:
    """How one module is cut: `style` is one of the above; `sides`: of its parameters, the side that is cut. Others are whole."""

    module: nn.Module
    style: str
    sides: dict[str, int]


# ---------------------------------------------------------------- the plan


def check_model(model: Any, tensor: int) -> None:
    """Raises `ConfigError` for a model whose layers cannot be cut so. It may be without weights, and with adapters."""
    config = model.config.get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    check_slices(config.num_attention_heads, kv_heads, config.vocab_size, tensor)
    plan_of(model, tensor)


def plan_of(model: Any, ranks: int) -> dict[str, Cut]:
    """Of every module that has parameters itself, by its name. Raises `ConfigError`."""
    named = dict(model.named_modules())
    styles = _styles(model, named)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    found = {}
    for name, module in named.items():
        own = {key: value for key, value in module._parameters.items() if value is not None}
        style = styles.get(name, _PLAIN)
        if not own:
            if style != _PLAIN and not hasattr(module, "base_layer"):
                raise _refusal(
                    model, 0, f"{name}, which has no weights, is to be cut by {style!r}: not known here"
                )
            continue
        if module is embedding:
            style = _EMBEDDING
        elif module is output:
            style = _HEAD
        cut = Cut(module, style, _sides(model, name, module, style, own, styles))
        for key, side in cut.sides.items():
            if own[key].shape[side] % ranks:
                raise _refusal(
                    model, ranks, f"{name}.{key} has {own[key].shape[side]}, no multiple of {ranks}, to cut"
                )
        found[name] = cut
    return found


def _styles(model: Any, named: dict[str, nn.Module]) -> dict[str, str]:
    """What the plan says of each module, by its name; an adapter's parts follow the layer that they stand beside."""
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})
    found = {}
    for name in named:
        layer, beside = _layer_of(name)
        style = plan.get(_generic(layer), _PLAIN)
        if beside == "lora_A" and style in _COLUMNS:
            style = _PLAIN
        if beside == "lora_B" and style in _ROWS:
            style = _PLAIN
        found[name] = style
    used = {style for name, style in found.items() if style != _PLAIN and named[name]._parameters}
    if not used & _COLUMNS or not used & _ROWS:
        raise ConfigError(
            f"trainer.tensor_parallel: transformers has no plan to cut the layers of {type(model).__name__}",
            _REMEDY,
        )
    return found


def _layer_of(name: str) -> tuple[str, str]:
    """The model's own name of a module, and "lora_A" or "lora_B" where it is an adapter's part."""
    for part in ("lora_A", "lora_B"):
        layer, found, _ = name.partition(f".{part}.")
        if found:
            return layer, part
    return name.removesuffix(".base_layer"), ""


def _generic(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _sides(
    model: Any, name: str, module: nn.Module, style: str, own: dict[str, Any], styles: dict[str, str]
) -> dict[str, int]:
    """Of each parameter that is cut, the side. Raises `ConfigError` for what this file does not do."""
    if style in (_EMBEDDING, _HEAD):
        return dict.fromkeys(own, 0)
    if style == _EXPERTS:
        counts = {value.shape[0] for value in own.values()}
        if counts != {getattr(module, "num_experts", 0)}:
            raise _refusal(
                model, 0, f"{name} is {type(module).__name__}, whose experts do not lie side by side"
            )
        return dict.fromkeys(own, 0)
    if style in _COLUMNS | _ROWS:
        if not isinstance(module, nn.Linear):
            raise _refusal(model, 0, f"{name} is {type(module).__name__}, no linear layer")
        return dict.fromkeys(own, 0) if style in _COLUMNS else {"weight": 1}
    if style not in (_PLAIN, _PARTIAL):
        raise _refusal(model, 0, f"{name} is to be cut by {style!r}, which is not known here")
    inside = [child for child in styles if child.startswith(f"{name}.") and styles[child] != _PLAIN]
    if inside:  # of the whole model, as attention's sinks are of all heads
        raise _refusal(
            model, 0, f"{name}.{min(own)} is a parameter beside layers that are cut, and in no plan"
        )
    return {}


def _refusal(model: Any, ranks: int, why: str) -> ConfigError:
    asked = f"trainer.tensor_parallel{f' = {ranks}' if ranks else ''}"
    return ConfigError(f"{asked}: the layers of {type(model).__name__} cannot be cut: {why}", _REMEDY)


# ---------------------------------------------------------------- the model, cut


def cut(model: Any, mesh: DeviceMesh) -> None:
    """Every parameter of a model on the meta device becomes this rank's slice of it, and every module computes with its slice.

    Before FSDP2 (`sharding.shard`), after adapters and head. Raises `ConfigError`.
    """
    made: dict[int, nn.Parameter] = {}
    entrance = Entrance(mesh.get_group())
    for of in plan_of(model, mesh.size()).values():
        for key, value in of.module._parameters.items():
            if value is None:
                continue
            if id(value) not in made:
                made[id(value)] = _slice(value, mesh, of.sides.get(key))
            of.module._parameters[key] = made[id(value)]
        _wrap(model, of, mesh, entrance)


def _slice(value: Tensor, mesh: DeviceMesh, side: int | None) -> nn.Parameter:
    shape = list(value.shape)
    placement: Placement = Replicate()
    if side is not None:
        shape[side] //= mesh.size()
        placement = Shard(side)
    laid = DTensor.from_local(
        torch.empty(shape, dtype=value.dtype, device=value.device),
        mesh,
        [placement],
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
    return nn.Parameter(laid, requires_grad=value.requires_grad)


def _wrap(model: Any, of: Cut, mesh: DeviceMesh, entrance: Entrance) -> None:
    """Let a module compute with its slice, and put around it what crosses between ranks."""
    module: Any = of.module
    group, plain = mesh.get_group(), _with_slices(module, module.forward, mesh, of.style == _PARTIAL)
    if of.style in _COLUMNS:
        gathers = of.style in _GATHERS

        def columns(hidden: Tensor) -> Tensor:
            found: Tensor = plain(entrance(hidden))
            return gathered(found, group) if gathers else found

        module.forward = columns
    elif of.style in _ROWS:
        splits = of.style in _SPLITS

        def rows(hidden: Tensor) -> Tensor:
            entrance.forget()
            bias, module._parameters["bias"] = module._parameters["bias"], None  # added once
            try:
                found = leaving(plain(split(hidden, group) if splits else hidden), group)
            finally:
                module._parameters["bias"] = bias
            return found if bias is None else found + local_of(bias)

        module.forward = rows
    elif of.style == _EXPERTS:
        module.forward = _experts(module, plain, mesh)
    elif of.style == _EMBEDDING:
        module.forward = _entries(module, plain, mesh)
    elif of.style == _HEAD:
        first = mesh.get_local_rank() * (module.weight.shape[0] // mesh.size())
        if head.take_slice(model, head.Slice(group, first)):
            module.forward = plain
        else:
            module.forward = lambda hidden: gathered(plain(entering(hidden, group)), group)
    else:
        module.forward = plain


def _with_slices(
    module: Any, forward: Callable[..., Any], mesh: DeviceMesh, partial: bool
) -> Callable[..., Any]:
    """`forward`, in which the module's parameters are plain tensors. `partial`: a rank finds a part of their gradients only."""
    group = mesh.get_group()

    @contextmanager
    def local() -> Iterator[None]:
        held = {key: value for key, value in module._parameters.items() if isinstance(value, DTensor)}
        slices = {key: value.to_local() for key, value in held.items()}
        if partial:
            slices = {key: entering(value, group) for key, value in slices.items()}
        module._parameters.update(slices)
        try:
            yield
        finally:
            module._parameters.update(held)

    def run(*arguments: Any, **more: Any) -> Any:
        with local():
            return forward(*arguments, **more)

    return run


def _experts(module: Any, plain: Callable[..., Any], mesh: DeviceMesh) -> Callable[..., Any]:
    """A rank's experts are those from its first on. It computes the tokens that go to one of them, once for each; the rest is nought."""
    group, count = mesh.get_group(), module.num_experts // mesh.size()
    first = mesh.get_local_rank() * count
    module.num_experts = count

    def run(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        hidden, weights = entering(hidden, group), entering(weights, group)
        here = (chosen >= first) & (chosen < first + count)
        token, place = here.nonzero(as_tuple=True)
        share = weights[token, place]
        if not len(token):  # other ranks wait for what entered to get its gradient: it is nought here
            token, place, share = (one.new_zeros(1) for one in (chosen, chosen, weights))
            share = share + 0.0 * weights[0, 0]
        mine = (chosen[token, place] - first).clamp(0, count - 1)
        parts = plain(hidden[token], mine[:, None], share[:, None])
        wide = torch.promote_types(parts.dtype, torch.float32)
        found = torch.zeros(hidden.shape, dtype=wide, device=hidden.device).index_add(
            0, token, parts.to(wide)
        )
        return leaving(found.to(hidden.dtype), group)

    return run


def _entries(module: Any, plain: Callable[..., Any], mesh: DeviceMesh) -> Callable[..., Any]:
    """A rank looks up those ids whose entries it has; the others' are nought there."""
    group, count = mesh.get_group(), module.weight.shape[0] // mesh.size()
    first = mesh.get_local_rank() * count
    padding = module.padding_idx
    module.padding_idx = padding - first if padding is not None and first <= padding < first + count else None

    def run(ids: Tensor) -> Tensor:
        here = (ids >= first) & (ids < first + count)
        found: Tensor = plain(torch.where(here, ids - first, 0))
        return leaving(found.masked_fill(~here[..., None], 0.0), group)

    return run


# ---------------------------------------------------------------- gradients of the whole model


def side_of(value: Any) -> int | None:
    """Which side of a parameter (a DTensor) is cut over the tensor group; None = it is whole on each rank."""
    placement = value.placements[-1]
    return placement.dim if isinstance(placement, Shard) else None


@torch.no_grad()
def even_out(gradients: Iterable[Tensor], mesh: Mesh) -> None:
    """Gradients of what is whole on each rank of a group are the same but for rounding. Make them so bit by bit, or copies would drift."""
    assert mesh.tensor is not None
    same = [local for one in gradients if side_of(one) is None and (local := local_of(one)).numel()]
    if not same:
        return
    flat = torch.cat([one.flatten() for one in same])
    dist.all_reduce(flat, group=mesh.tensor.get_group())
    flat /= mesh.tensor.size()
    for one, piece in zip(same, torch.split(flat, [one.numel() for one in same]), strict=True):
        one.copy_(piece.view_as(one))


@torch.no_grad()
def clip(gradients: Sequence[Tensor], most: float, mesh: Mesh) -> float:
    """Scale gradients so that their norm over all ranks is `most` at most. Returns the norm before, as `clip_grad_norm_` does.

    What is whole on each rank of the group counts once.
    """
    assert mesh.tensor is not None
    squares = torch.zeros((), dtype=torch.float64, device=mesh.device_type)
    for one in gradients:
        share = 1.0 if side_of(one) is not None else 1.0 / mesh.tensor.size()
        squares += share * torch.linalg.vector_norm(local_of(one), dtype=torch.float64) ** 2
    dist.all_reduce(squares, group=mesh.shard_group)
    norm = float(squares.sqrt())
    if (scale := most / (norm + 1e-6)) < 1.0:
        for one in gradients:
            local_of(one).mul_(scale)
    return norm
