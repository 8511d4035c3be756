"""How a model is laid over the ranks: FSDP2, its precisions, activation checkpointing, and the exact sums of deterministic runs.

Knows modules and meshes; no loss, no optimizer, no row.

Masters are float32 (deterministic: float64) and sharded. In mixed precision a bfloat16 cast of each layer is gathered for its computation,
gradients are summed over ranks in float32 and added in float32 to those of the step's other micro-batches.
Boundary: FSDP2's layout of a model over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

#: Gradients of a deterministic run are multiples of this; sums stay exact below QUANTUM * 2^53.
QUANTUM = 2.0**-40
EXACT_BELOW = QUANTUM * 2.0**53
#: Adding and subtracting 1.5 * 2^52 quanta rounds a float64 to the nearest quantum.
_ROUNDER = 1.5 * 2.0**52 * QUANTUM
#: The newer name first: torch 2.13 warns about the older one, 2.11 has only that.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def quantise_(gradients: Tensor) -> None:
    """Round to the nearest multiple of `QUANTUM`, in place. float64 only."""
    gradients.add_(_ROUNDER).sub_(_ROUNDER)


class ExactReduceScatter(ReduceScatter):
    """Reduce-scatter of gradients that are rounded first, so that the sum over ranks is exact."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        quantise_(input_tensor)
        return _reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def compute_dtype(chosen: str, device: str, *, deterministic: bool) -> torch.dtype:
    """In which type layers compute. "auto": bfloat16 on a GPU, else float32."""
    if deterministic:
        return torch.float64
    if chosen == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return torch.bfloat16 if chosen == "bfloat16" else torch.float32


def shard(
    model: Any, mesh: DeviceMesh, *, compute: torch.dtype, deterministic: bool, recompute: bool
) -> None:
    """FSDP2: each decoder layer, and the rest. Gradients are summed over ranks, never divided.

    `mesh` has one side, or two: replicas by shards (HSDP).
    `recompute`: a layer's activations are not kept but computed again in the backward pass.
    """
    policy = MixedPrecisionPolicy()
    if compute == torch.bfloat16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers(model):
        if recompute:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
            if deterministic and mesh.size() > 1:
                module.set_custom_reduce_scatter(ExactReduceScatter())
            elif deterministic:
                module.set_all_reduce_hook(
                    quantise_
                )  # one rank reduces nothing; the hook still runs before accumulation


def reshard(model: nn.Module) -> None:
    """After a forward pass without a backward one: the root would stay unsharded, and its parameters be others."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def settle(model: nn.Module) -> None:
    """After the parameters of a sharded model were replaced: FSDP takes them at once, not at the first forward pass, which would move
    those that it pads to other memory under whoever keeps count of it."""
    for module in model.modules():
        for parameter in (one for group in _groups(module) for one in group.fsdp_params):
            parameter.reset_sharded_param()


def gather_after(module: nn.Module, event: Any) -> None:
    """What FSDP gathers of this module from now on it reads after the event.

    In a forward pass it copies shards on streams of its own, which wait for the stream that computes once, before the root's pass.
    """
    for group in _groups(module):
        group._wait_all_gather_streams_on_event(event)


def _groups(module: nn.Module) -> list[Any]:
    """The parameters that FSDP gathers together for this module itself."""
    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.11
    return [group for group in groups if group is not None]


def layers(model: nn.Module) -> Iterator[nn.Module]:
    """The decoder layers: the first list of modules."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from module
            return
