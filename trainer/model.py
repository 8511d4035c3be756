"""The learner: the sharded model and its optimizer on one rank. Every method that computes is a collective: all ranks call it alike.

Owns parameters, gradients and optimizer state. Knows no daemon, no ledger and no MPI.

**One denominator.** Micro-batch losses are sums over tokens. FSDP's division of gradients by the number of ranks is undone (factor 1,
sum reduction), so the step's true denominator, applied once in `update`, is the only one (I7).

**Why a deterministic run repeats exactly** (`deterministic = true`). Three things could let the arrival order, the fleet or a
preemption into the weights, and each is closed:
1. *What is computed together.* One group per micro-batch, always padded to the same width: a group's gradient is a function of the
   group alone. Everything is float64, RMSNorm too (transformers' own rounds through float32).
2. *The order of sums.* Before gradients of a micro-batch are added to those of others (ranks or micro-steps) they are rounded to a
   multiple of 2^-40. Sums of such multiples below 2^13 have at most 53 bits, so every float64 addition is exact, and exact addition
   is associative: any order and any assignment to ranks gives the same bits. Sums of losses are taken in the order of the prompts.
3. *Drawing.* Dropout is off (a policy ratio needs one distribution) and nothing else here draws random numbers, so a checkpoint has
   no generator's state to keep.
What is left is the norm for clipping, summed over shards: it differs in the last bit between rank counts, not between runs on the
same number of ranks. Without the switch the order of sums is the order of arrival, and results agree to rounding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from rollout.engines.norms import wide_norms
from scavenger.config import OptimizerSection
from scavenger.errors import ConfigError
from trainer.algorithms.loss import Tokens, policy_loss, token_logprobs
from trainer.algorithms.rows import Recipe
from trainer.batching import Micro
from trainer.collate import Batch, padded

#: Gradients of a deterministic run are multiples of this; sums stay exact below QUANTUM * 2^53.
QUANTUM = 2.0**-40
EXACT_BELOW = QUANTUM * 2.0**53
#: Adding and subtracting 1.5 * 2^52 quanta rounds a float64 to the nearest quantum.
_ROUNDER = 1.5 * 2.0**52 * QUANTUM
#: The newer name first: torch 2.13 warns about the older one, 2.11 has only that.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RowStats(msgspec.Struct, frozen=True):
    """Sums over one row's tokens, as `algorithms.loss.Terms` has them; `mismatch_*` compare proximal with behaviour logprobs."""

    sample_id: int
    tokens: int
    kept: int
    loss: float
    kl: float
    clipped: float
    mismatch_k3: float
    mismatch_max: float
    truncated: float


def quantise_(gradients: Tensor) -> None:
    """Round to the nearest multiple of `QUANTUM`, in place. float64 only."""
    gradients.add_(_ROUNDER).sub_(_ROUNDER)


class ExactReduceScatter(ReduceScatter):
    """Reduce-scatter of gradients that are rounded first, so that the sum over ranks is exact."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        quantise_(input_tensor)
        return _reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """A causal LM from a Hugging Face folder, on the CPU. Raises `ConfigError`; runs no code that the folder brings."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path: {folder} holds no config.json", "give the folder of a Hugging Face model")
    disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path: {folder} cannot be loaded: {error}", "it must be a causal LM with safetensors weights") from error
    model.eval()
    if dtype == torch.float64:
        wide_norms(model)
    return model


def shard(model: Any, mesh: DeviceMesh, *, deterministic: bool) -> None:
    """FSDP2: each decoder layer and the rest, fp32 (deterministic: float64) masters; gradients are summed over ranks, never divided."""
    policy = MixedPrecisionPolicy()
    if mesh.device_type == "cuda" and not deterministic:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
            if deterministic and mesh.size() > 1:
                module.set_custom_reduce_scatter(ExactReduceScatter())
            elif deterministic:
                module.set_all_reduce_hook(quantise_)  # one rank reduces nothing; the hook still runs before accumulation


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from module
            return


class Learner:
    """One rank's share of the model. `temperature` is the sampling temperature, under which all logprobs are taken."""

    def __init__(
        self,
        folder: Path,
        mesh: DeviceMesh,
        *,
        recipe: Recipe,
        optimizer: OptimizerSection,
        temperature: float,
        deterministic: bool,
    ) -> None:
        self.dtype = torch.float64 if deterministic else torch.float32
        self.device = torch.device(mesh.device_type)
        self.deterministic = deterministic
        self.model = self._load(folder, mesh)
        self._recipe = recipe
        self._settings = optimizer
        self._temperature = temperature
        self._reference = self._load(folder, mesh).requires_grad_(False) if recipe.needs_reference else None
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=optimizer.lr, betas=optimizer.betas, weight_decay=optimizer.weight_decay
        )
        for parameter in self.model.parameters():  # made now, so that a checkpoint can be loaded into them
            state = self.optimizer.state[parameter]
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)

    def _load(self, folder: Path, mesh: DeviceMesh) -> Any:
        model = load_model(folder, self.dtype).to(self.device)
        shard(model, mesh, deterministic=self.deterministic)
        return model

    def _logprobs(self, model: Any, batch: Batch) -> Tensor:
        """Of the answer tokens, flat: [N]."""
        logits = model(input_ids=batch.inputs, use_cache=False).logits.flatten(0, 1)[batch.at]
        return token_logprobs(logits if self.deterministic else logits.float(), batch.targets, self._temperature)

    def train(self, micro: Micro) -> tuple[RowStats, ...]:
        """Forward and backward of one micro-batch; gradients add to those of the step. One entry a real row."""
        batch = padded(micro, self.dtype).to(self.device)
        current = self._logprobs(self.model, batch)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = self._logprobs(self._reference, batch)
        proximal = current.detach() if batch.proximal is None else batch.proximal
        tokens = Tokens(current, proximal, batch.behaviour, batch.row, batch.advantages, reference)
        terms = policy_loss(tokens, self._recipe)
        terms.loss.backward()  # type: ignore[no-untyped-call]
        columns = (
            terms.tokens, terms.kept, terms.losses, terms.kl, terms.clipped, terms.mismatch_k3, terms.mismatch_max, terms.truncated,
        )  # fmt: skip
        table = torch.stack([column.double() for column in columns], dim=1).tolist()
        return tuple(
            RowStats(row.sample_id, int(values[0]), int(values[1]), *values[2:])
            for row, values in zip(micro.rows, table, strict=True)
            if row.sample_id >= 0
        )

    @torch.no_grad()
    def proximal(self, micro: Micro) -> dict[int, bytes]:
        """Logprobs of the answers under the present weights: sample id -> packed float64."""
        batch = padded(micro, self.dtype).to(self.device)
        logprobs = self._logprobs(self.model, batch).double().cpu()
        for module in self.model.modules():  # without a backward pass the root would stay unsharded, and its parameters be others
            if isinstance(module, FSDPModule):
                module.reshard()
        answers = torch.split(logprobs, [len(row.answer) // 4 for row in micro.rows])
        return {row.sample_id: answer.numpy().tobytes() for row, answer in zip(micro.rows, answers, strict=True) if row.sample_id >= 0}

    def update(self, denominator: float, lr: float) -> float:
        """Scale by 1 / denominator (the step's true one), clip, step, clear. Returns the gradient's norm before clipping.

        Raises `ArithmeticError` when gradients are not finite, or too large for a deterministic run's exact sums.
        """
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.deterministic:
            largest = max((float(_local(gradient).abs().max()) for gradient in gradients if _local(gradient).numel()), default=0.0)
            if largest >= EXACT_BELOW / 2:
                raise ArithmeticError(f"a gradient sum of {largest:g} is beyond the exact range of a deterministic run")
        for gradient in gradients:
            gradient.div_(denominator)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.clip_norm)
        value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if value != value or value == float("inf"):
            raise ArithmeticError(f"the gradient's norm is {value}: the step was not taken")
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.discard_gradients()
        return value

    def discard_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter gathered whole, in the order of names, tied ones once. All ranks must exhaust it."""
        for name, parameter in sorted(self.model.named_parameters()):
            yield name, (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()

    def state(self) -> dict[str, Tensor]:
        """The sharded tensors that a checkpoint holds, by name; loading writes into them."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            tensors[f"model.{name}"] = parameter.detach()
            tensors[f"exp_avg.{name}"] = state["exp_avg"]
            tensors[f"exp_avg_sq.{name}"] = state["exp_avg_sq"]
        return tensors

    @property
    def updates_taken(self) -> int:
        """Optimizer steps so far: Adam's bias correction counts them."""
        return int(next(iter(self.optimizer.state.values()))["step"])

    def set_updates_taken(self, count: int) -> None:
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(float(count))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def learning_rate(settings: OptimizerSection, step: int) -> float:
    """Linear warm-up over `warmup_steps`, then constant. `step` counts from 1."""
    return settings.lr * min(1.0, step / settings.warmup_steps) if settings.warmup_steps else settings.lr


def model_config_text(folder: Path) -> str:
    """The text of config.json, for the engines. Raises `ConfigError`."""
    try:
        text = (folder / "config.json").read_text()
        json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {folder / 'config.json'}: {error}", "give the folder of a Hugging Face model") from error
    return text
