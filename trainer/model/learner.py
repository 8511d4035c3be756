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
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from rollout.engines.norms import wide_norms
from scavenger.config import LoraSection, OptimizerSection, TrainerSection
from scavenger.errors import ConfigError, Diverged
from trainer.algorithms import differences
from trainer.algorithms.agreement import SpanAgreement, of_micro
from trainer.algorithms.loss import Tokens, policy_loss
from trainer.algorithms.rows import Recipe
from trainer.data.batching import Micro, TrainRow
from trainer.data.collate import Batch, branched, packed, padded
from trainer.model import adapters, attention, context, head, sharded_load, tensor_parallel
from trainer.model.attention import BRANCHED, PACKED
from trainer.model.context import Context
from trainer.model.memory import RankGpu, RankMemory
from trainer.model.mesh import Mesh, divide
from trainer.model.offload import Offload
from trainer.model.replay import Replay
from trainer.model.sharding import EXACT_BELOW, compute_dtype, local_of, reshard, shard

DEFAULTS = TrainerSection()
ALL_WEIGHTS = LoraSection()


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
    entropy: float = 0.0
    #: Of proximal/behaviour, before it is truncated or masked: the sum, and that of its squares.
    weight: float = 0.0
    weight_squares: float = 0.0
    #: Tokens by |proximal - behaviour| (`algorithms.mismatch.EDGES`).
    mismatch_bins: tuple[int, ...] = ()
    #: Of each of the row's `cuts`: how trainer and engine agree on it.
    agreement: tuple[SpanAgreement, ...] = ()
    #: proximal - behaviour of each token, packed float16 (`algorithms.differences`).
    difference: bytes = b""


def load_model(folder: Path, dtype: torch.dtype, kernel: str = "sdpa") -> Any:
    """A whole causal LM from a Hugging Face folder, on the CPU. Raises `ConfigError`; runs no code that the folder brings.

    Ranks read their shards alone (`sharded_load`).
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path: {folder} holds no config.json", "give the folder of a Hugging Face model"
        )
    disable_progress_bar()
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=kernel,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"model.path: {folder} cannot be loaded: {error}",
            "it must be a causal LM with safetensors weights",
        ) from error
    if loading["missing_keys"]:  # transformers would draw them at random
        raise ConfigError(
            f"model.path: {folder}: config.json and weights are of two models: {min(loading['missing_keys'])} is not in the weight files",
            "copy the model's whole folder again",
        )
    model.eval()
    if dtype == torch.float64:
        wide_norms(model)
    return model


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
        trainer: TrainerSection = DEFAULTS,
        lora: LoraSection = ALL_WEIGHTS,
        gpu: RankGpu | None = None,
        router_replay: bool = False,
    ) -> None:
        self.mesh = Mesh(mesh, divide(mesh.size(), trainer))
        self._context = Context(self.mesh.context_group) if self.mesh.context_group is not None else None
        self.dtype = torch.float64 if deterministic else torch.float32
        self.device = torch.device(mesh.device_type)
        self.deterministic = deterministic
        self._packing = trainer.packing and not deterministic
        self._shares_prefixes = trainer.share_prefixes and not deterministic
        self._head_chunk = 0 if deterministic else trainer.head_chunk_tokens
        self._compute = compute_dtype(trainer.compute_dtype, mesh.device_type, deterministic=deterministic)
        self._recompute = trainer.activation_checkpointing
        self._lora = lora
        self.base_dtype = (
            adapters.stored_dtype(folder) if lora.rank else ""
        )  # in which the base is published, exactly
        self._temperature = temperature
        self.model = self._load(folder)
        self._replay = Replay(self.model) if router_replay else None
        self._recipe = recipe
        self._settings = optimizer
        alone = recipe.needs_reference and not self._lora.rank
        self._reference = self._load(folder).requires_grad_(False) if alone else None
        if self._head_chunk:
            probe = self._piece(self._batch(Micro((_short_row(),), 2)))
            for model in filter(None, (self.model, self._reference)):
                head.check(model, probe)
        if self._shares_prefixes:
            self._check_prefixes()
        elif self._packing:
            self._check_packing()
        self.optimizer = torch.optim.AdamW(
            self.trained().values(),
            lr=optimizer.lr,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
            fused=not deterministic,
        )
        for parameter in self.trained().values():  # made now, so that a checkpoint can be loaded into them
            state = self.optimizer.state[parameter]
            state["step"] = self._count(0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        models = [one for one in (self._reference, self.model) if one is not None]  # in the order of use
        self._memory = RankMemory(
            gpu or RankGpu(), Offload(models, self.optimizer, self.device), trainer.offload
        )

    def _load(self, folder: Path) -> Any:
        kernel = PACKED if self._packing else "sdpa"
        if self._shares_prefixes:
            kernel = BRANCHED
        if self._context is not None:
            kernel = self._context.attention
        model, plan = sharded_load.begin(folder, self.dtype, kernel)
        if self._shares_prefixes:
            attention.check_model(model)
        if self._context is not None:
            context.check_model(model, self.mesh.division.context, self.mesh.division.tensor)
        if self.mesh.tensor is not None:
            tensor_parallel.check_model(model, self.mesh.division.tensor)
        if self.deterministic:
            wide_norms(model)
        if self._lora.rank:
            adapters.inject(model, self._lora)
        if self._head_chunk:
            head.install(model, temperature=self._temperature, chunk=self._head_chunk)
        plan.empty(model)
        if self.mesh.tensor is not None:
            tensor_parallel.cut(model, self.mesh.tensor)
        shard(
            model,
            self.mesh.sharding,
            compute=self._compute,
            deterministic=self.deterministic,
            recompute=self._recompute,
        )
        plan.fill(model, self.device)
        return model

    @torch.no_grad()
    def _check_packing(self) -> None:
        """A sample must not see those that lie in the line before it, and all of itself where ranks share its tokens. Raises `ConfigError`
        where the model is otherwise."""
        ids = torch.arange(12, dtype=torch.int32) % min(8, self.model.config.vocab_size)
        texts = [ids[start : start + 6].numpy().tobytes() for start in (0, 3, 6)]
        rows = tuple(TrainRow(-1, text[:8], text[8:], bytes(16), 0.0) for text in texts)
        together = self._logprobs(self.model, self._batch(Micro(rows, 0))).values
        with context.alone(self.model):
            one_by_one = [self._batch(Micro((row,), 0)) for row in rows]
            alone = torch.cat([self._own_logprobs(self.model, one).values for one in one_by_one])
        reshard(self.model)
        gap = float((together - alone).abs().max())
        if gap > (0.25 if self._compute == torch.bfloat16 else 1e-3):
            shared = self._context is not None
            what = "packed samples see one another" + (
                ", or tokens that ranks share do not" if shared else ""
            )
            raise ConfigError(
                f"{type(self.model).__name__}: {what} (logprobs differ by {gap:.2g})",
                "set trainer.context_parallel = 1" if shared else "set trainer.packing = false",
            )

    @torch.no_grad()
    def _check_prefixes(self) -> None:
        """A sample must see its own prefix, whichever sample brought it, and nothing else of others. Raises `ConfigError` where the model
        is otherwise."""
        size = min(8, self.model.config.vocab_size)
        lines = ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 6, 2], [1, 2, 3, 4, 6, 2, 3], [1, 2, 5, 0], [4, 0, 1, 3])
        texts = [torch.tensor([token % size for token in one], dtype=torch.int32) for one in lines]
        rows = tuple(
            TrainRow(
                -1, text[:2].numpy().tobytes(), text[2:].numpy().tobytes(), bytes(4 * len(text) - 8), 0.0
            )
            for text in texts
        )
        together = self._logprobs(self.model, self._batch(Micro(rows, 0))).values
        with context.alone(self.model):
            one_by_one = [packed(Micro((row,), 0), self.dtype).to(self.device) for row in rows]
            alone = torch.cat([self._own_logprobs(self.model, one).values for one in one_by_one])
        reshard(self.model)
        gap = float((together - alone).abs().max())
        if not gap <= (0.25 if self._compute == torch.bfloat16 else 1e-3):
            raise ConfigError(
                f"{type(self.model).__name__}: samples that share prefixes are not what each is alone (logprobs differ by {gap:.2g})",
                "set trainer.share_prefixes = false",
            )

    def _count(self, steps: int) -> Tensor:
        """Adam's count of steps; the fused form wants it beside the parameters."""
        return torch.tensor(float(steps), device=None if self.deterministic else self.device)

    def _batch(self, micro: Micro) -> Batch:
        layout = packed if self._packing else padded
        if self._shares_prefixes:
            layout = branched
        return layout(micro, self.dtype).to(self.device)

    def _piece(self, batch: Batch) -> Batch:
        """What of it this rank computes."""
        return batch if self._context is None else self._context.piece(batch)

    def _logprobs(self, model: Any, batch: Batch) -> head.Logprobs:
        """Of the answer tokens, flat: [N]."""
        found = self._own_logprobs(model, self._piece(batch))
        if self._context is None:
            return found
        entropy = None if found.entropy is None else self._context.whole(found.entropy, batch)
        return head.Logprobs(self._context.whole(found.values, batch), entropy)

    def _own_logprobs(self, model: Any, batch: Batch) -> head.Logprobs:
        return head.logprobs(model, batch, self._temperature, deterministic=self.deterministic)

    def train(self, micro: Micro) -> tuple[RowStats, ...]:
        """Forward and backward of one micro-batch; gradients add to those of the step. One entry a real row."""
        with self._memory.working(), self._routed():
            return self._train(micro)

    @contextmanager
    def _routed(self) -> Iterator[None]:
        """Inside, `_replay` may say which experts tokens go to; afterwards the model chooses by itself."""
        try:
            yield
        finally:
            if self._replay is not None:
                self._replay.off()

    def _route(self, batch: Batch) -> None:
        """What comes is of this batch, under the weights that are trained."""
        if self._replay is not None:
            self._replay.use(batch.routing, batch.at, batch.inputs.numel())

    def _train(self, micro: Micro) -> tuple[RowStats, ...]:
        batch = self._batch(micro)
        reference = self._reference_logprobs(batch) if self._recipe.needs_reference else None
        self._route(batch)
        current, entropy = self._logprobs(self.model, batch)
        proximal = current.detach() if batch.proximal is None else batch.proximal
        tokens = Tokens(
            current,
            proximal,
            batch.behaviour,
            batch.row,
            batch.advantages,
            reference,
            entropy,
            batch.others,
            batch.turn_advantages,
        )
        terms = policy_loss(tokens, self._recipe)
        terms.loss.backward()  # type: ignore[no-untyped-call]
        columns = (
            terms.tokens,
            terms.kept,
            terms.losses,
            terms.kl,
            terms.clipped,
            terms.mismatch_k3,
            terms.mismatch_max,
            terms.truncated,
            terms.entropy,
            terms.weight,
            terms.weight_squares,
        )
        agreement = of_micro(micro, proximal - batch.behaviour)
        apart = differences.packed(micro, proximal - batch.behaviour)
        table = torch.stack([column.double() for column in columns], dim=1).tolist()
        return tuple(
            msgspec.structs.replace(
                RowStats(row.sample_id, int(values[0]), int(values[1]), *values[2:]),
                mismatch_bins=tuple(bins),
                agreement=agreement[row.sample_id],
                difference=difference,
            )
            for row, values, bins, difference in zip(
                micro.rows, table, terms.mismatch_bins.tolist(), apart, strict=True
            )
            if row.sample_id >= 0
        )

    @torch.no_grad()
    def _reference_logprobs(self, batch: Batch) -> Tensor:
        """Under the starting model: one of its own, or this one without its adapters."""
        if self._reference is not None:
            found = self._logprobs(self._reference, batch).values
            reshard(self._reference)
            return found
        with adapters.switched_off(self.model):
            found = self._logprobs(self.model, batch).values
        reshard(self.model)
        return found

    @torch.no_grad()
    def proximal(self, micro: Micro) -> dict[int, bytes]:
        """Logprobs of the answers under the present weights: sample id -> packed float64."""
        with self._memory.working(), self._routed():
            batch = self._batch(micro)
            self._route(batch)
            logprobs = self._logprobs(self.model, batch).values.double().cpu()
            reshard(self.model)
        completions = torch.split(logprobs, [row.trained for row in micro.rows])
        return {
            row.sample_id: completion.numpy().tobytes()
            for row, completion in zip(micro.rows, completions, strict=True)
            if row.sample_id >= 0
        }

    def update(self, denominator: float, lr: float) -> float:
        """Scale by 1 / denominator (the step's true one), clip, step, clear. Returns the gradient's norm before clipping.

        Raises `Diverged` when gradients are not finite, `ArithmeticError` when too large for a deterministic run's exact sums.
        """
        with self._memory.working():
            self._memory.all_here()
            value = self._update(denominator, lr)
        self.discard_gradients()
        return value

    def _update(self, denominator: float, lr: float) -> float:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.deterministic:
            largest = max(
                (
                    float(local_of(gradient).abs().max())
                    for gradient in gradients
                    if local_of(gradient).numel()
                ),
                default=0.0,
            )
            if largest >= EXACT_BELOW / 2:
                raise ArithmeticError(
                    f"a gradient sum of {largest:g} is beyond the exact range of a deterministic run"
                )
        for gradient in gradients:
            gradient.div_(denominator)
        value = self._clip(gradients)
        if value != value or value == float("inf"):
            raise Diverged(
                f"the gradient's norm is {value}: the step was not taken",
                "look at rewards, grad_norm and lr in <out_dir>/metrics.jsonl; then lower optimizer.lr or bound the rewards, "
                "and go on from an older checkpoint (--resume DIR)",
            )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return value

    def _clip(self, gradients: Sequence[Tensor]) -> float:
        """Returns the norm over all ranks, before clipping."""
        if self.mesh.tensor is not None:
            tensor_parallel.even_out(gradients, self.mesh)
            return tensor_parallel.clip(gradients, self._settings.clip_norm, self.mesh)
        norm = torch.nn.utils.clip_grad_norm_(list(self.trained().values()), self._settings.clip_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def discard_gradients(self) -> None:
        self._memory.drop_gradients()

    @property
    def adapter_scale(self) -> float:
        """By which a product B A counts; 0 = all weights are trained."""
        return self._lora.alpha / self._lora.rank if self._lora.rank else 0.0

    def shapes(self, *, base: bool = False) -> dict[str, tuple[int, ...]]:
        """What a version holds: the adapters, or (`base`, or all are trained) every parameter, tied ones once, by the model's own names."""
        return (
            adapters.trained_shapes(self.model)
            if self._lora.rank and not base
            else adapters.shapes(self.model)
        )

    def shards(self, names: Iterable[str], *, base: bool = False) -> Iterator[tuple[str, Tensor]]:
        """This rank's rows of each, to be read: they may lie in host memory. With tensor parallelism a collective of a replica: all its
        ranks exhaust it, with the same names."""
        of = adapters.trained if self._lora.rank and not base else adapters.pristine
        if self.mesh.tensor is not None:
            self._memory.all_here()  # they are exchanged, on the GPU
            return of(self.model, names, self._rows())
        return ((name, self._memory.reading(rows)) for name, rows in of(self.model, names))

    def _rows(self) -> Callable[[Tensor], Tensor]:
        """How this rank gets its rows of a parameter."""
        if self.mesh.tensor is None:
            return adapters.own
        from trainer.model.slice_rows import Rows  # it needs packages that one rank does without

        return Rows(self.mesh)

    @torch.no_grad()
    def merged_rows(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's rows of each weight that has an adapter, as engines are to merge them. A collective: all ranks exhaust it."""
        self._memory.all_here()  # it gathers, on the GPU
        yield from adapters.merged_rows(self.model, self._rows())

    def trained(self) -> dict[str, torch.nn.Parameter]:
        return {
            name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }

    def state(self) -> dict[str, Tensor]:
        """The sharded tensors that a checkpoint holds, by name, to be read: those that are away from the GPU are given as they lie in host
        memory, so that engines keep it."""
        return {name: self._memory.reading(value) for name, value in self._state().items()}

    def state_to_load(self) -> dict[str, Tensor]:
        """The same tensors in their place: loading writes into them."""
        self._memory.all_here()
        return self._state()

    def _state(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.trained().items():
            state = self.optimizer.state[parameter]
            tensors[f"model.{name}"] = parameter.detach()
            tensors[f"exp_avg.{name}"] = state["exp_avg"]
            tensors[f"exp_avg_sq.{name}"] = state["exp_avg_sq"]
        return tensors

    def release(self) -> int:
        """Give the GPU's memory back: what torch keeps for reuse, and training state where engines need its place (`trainer.offload`).

        Returns the bytes left; 0 where there is no GPU.
        """
        return self._memory.release()

    def take_back(self) -> None:
        """Engines gave the GPU back: begin to bring training state there, in the order of its use."""
        self._memory.take_back()

    def note_engines(self) -> None:
        """Engines have the GPU: see how much of it they take."""
        self._memory.note_engines()

    @property
    def updates_taken(self) -> int:
        """Optimizer steps so far: Adam's bias correction counts them."""
        return int(next(iter(self.optimizer.state.values()))["step"])

    def set_updates_taken(self, count: int) -> None:
        for state in self.optimizer.state.values():
            state["step"] = self._count(count)


def _short_row() -> TrainRow:
    """One token that asks for one."""
    return TrainRow(-1, bytes(4), bytes(4), bytes(4), 0.0)


def learning_rate(settings: OptimizerSection, step: int, steps: int) -> float:
    """Linear warm-up over `warmup_steps`, then the schedule, which ends at `lr * final_lr_share` in step `steps`. `step` counts from 1."""
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    done = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    left = 1.0 - done if settings.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
    return settings.lr * (settings.final_lr_share + (1.0 - settings.final_lr_share) * left)


def model_config_text(folder: Path) -> str:
    """The text of config.json, for the engines. Raises `ConfigError`."""
    try:
        text = (folder / "config.json").read_text()
        json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path: {folder / 'config.json'}: {error}", "give the folder of a Hugging Face model"
        ) from error
    return text
