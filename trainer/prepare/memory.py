"""What a step takes of each GPU's memory, and an engine's job of its host's; whether a model fits. Pure arithmetic over sizes; knows no
torch and no file.

Two kinds of figures. *Certain*: states, which follow from the model, the ranks and the optimizer. *Estimated*: activations of one
micro-batch, by the values that a decoder layer of the usual kind keeps. A run is refused for either; the remedy names what changes most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GB = 1e9
#: Of a GPU's memory: the CUDA context, NCCL's buffers and what the allocator cannot use.
USABLE = 0.94
#: Host memory without any weights, in mebibytes: of an engine's processes on a CPU, measured (385 and 1030) with some room; and what each
#: GPU adds, assumed: CUDA's libraries and context, pinned buffers.
PROCESS_MB = {"reference": 512, "vllm": 1536}
GPU_MB = {"reference": 2048, "vllm": 3072}
#: bfloat16 values kept for the backward pass, per token and layer: of the hidden width, and of the feed-forward's.
KEPT_HIDDEN, KEPT_INNER = 14, 4
#: Bytes of a logit in the head's backward pass: in bfloat16 and its gradient; by chunks two in float32 more.
WHOLE_LOGIT, CHUNK_LOGIT = 4, 12


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Of a model: `parameters` in all, `inner` the feed-forward's width; heads of 0 are not known."""

    parameters: int
    layers: int
    hidden: int
    inner: int
    vocabulary: int
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0


@dataclass(frozen=True, slots=True)
class PublishedSize:
    """Bytes of the weights that an engine is given, and of the base under adapters, 0 where all weights are trained."""

    nbytes: int
    base: int


@dataclass(frozen=True, slots=True)
class TrainJob:
    """`trained`: parameters that have gradients (all of them, or the adapters'). `reference`: a second copy of the model is kept.

    `longest`: tokens of the longest sample that can come; longer than `micro_tokens`, it is a micro-batch of its own. 0: not known.
    `head_chunk`: tokens whose logits are there at once; 0: of the whole micro-batch. `offload`: `trainer.offload`.
    """

    ranks: int
    gpu_gb: float
    micro_tokens: int
    checkpointing: bool
    trained: int
    reference: bool
    reserved: bool
    engine_share: float
    engine_gpus: int
    reserved_gpus: int = 1
    longest: int = 0
    head_chunk: int = 0
    offload: Literal["auto", "never", "always"] = "auto"

    @property
    def computed_tokens(self) -> int:
        """Of the largest micro-batch."""
        return max(self.micro_tokens, self.longest)


@dataclass(frozen=True, slots=True)
class Need:
    """Gigabytes a GPU. `states`: masters, gradients, optimizer, reference. `step`: one micro-batch's activations, logits, layers."""

    states: float
    step: float
    engine: float
    usable: float


def engine_host_mb(version: PublishedSize, engine: str, gpus: int) -> int:
    """Host memory of a harvested engine's job, in mebibytes.

    All weights: three versions, of which the engine serves one, pulls or keeps the pages of another, and has the third in the file that its
    processes load from; and the deltas that it gives on, a quarter. Adapters: their base in place of the two. And the processes; `gpus` 0:
    without what GPUs add, which is a guess.
    """
    held = version.base + 1.25 * version.nbytes if version.base else 3.25 * version.nbytes
    return int(held / (1 << 20)) + 1 + PROCESS_MB.get(engine, 0) + gpus * GPU_MB.get(engine, 0)


def engine_cpus(version: PublishedSize, gpus: int) -> int:
    """CPUs of a harvested engine's job: vLLM's server, its core and a process a GPU (its documentation's least), our worker, and a thread
    for each 8 GB of weights, four at most, to pull and hash them while the rest goes on."""
    return 3 + gpus + min(4, (version.base or version.nbytes) // (8 * 10**9))


def need(shape: ModelShape, job: TrainJob) -> Need:
    """float32 masters of all parameters, gradient and two moments of the trained ones (12 bytes), all sharded over the ranks."""
    states = (4 * shape.parameters * (2 if job.reference else 1) + 12 * job.trained) / job.ranks
    layer = max(0, shape.parameters - shape.vocabulary * shape.hidden) / max(1, shape.layers)
    gathered = 2 * (
        2 * layer + shape.vocabulary * shape.hidden
    )  # bfloat16: this layer, the next one, the vocabulary's matrix
    inside = job.computed_tokens * 2 * (KEPT_HIDDEN * shape.hidden + KEPT_INNER * shape.inner)
    kept = (
        shape.layers * job.computed_tokens * 2 * shape.hidden + inside
        if job.checkpointing
        else shape.layers * inside
    )
    logits = _head_nbytes(shape, job)
    engine = 2 * shape.parameters / job.engine_gpus
    return Need(states / GB, (gathered + kept + logits) / GB, engine / GB, USABLE * job.gpu_gb)


def _head_nbytes(shape: ModelShape, job: TrainJob) -> int:
    """Logits and what their gradients need; by chunks the weight's gradient is added up in float32."""
    if not job.head_chunk:
        return WHOLE_LOGIT * job.computed_tokens * shape.vocabulary
    together = min(job.head_chunk, job.computed_tokens)
    return (CHUNK_LOGIT * together + 4 * shape.hidden) * shape.vocabulary


def problem(shape: ModelShape, job: TrainJob) -> tuple[str, str]:
    """Cause and remedy where it does not fit, else two empty texts."""
    asks = need(shape, job)
    held = f"{asks.states:.1f} GB of weights, gradients and optimizer state a GPU, on {job.ranks} of {job.gpu_gb:g} GB"
    if asks.states > asks.usable:
        ranks = -(-int(asks.states * job.ranks * 1.2) // max(1, int(asks.usable)))
        return (
            f"the model is too big for the GPUs: {held}",
            f"train on {ranks} GPUs or more, or adapters only: lora.rank = 16",
        )
    if asks.states + asks.step > asks.usable:
        more = "" if job.checkpointing else "set trainer.activation_checkpointing = true, or "
        alone = job.longest > job.micro_tokens
        what = (
            f"the longest sample, {job.longest} tokens and a micro-batch of its own,"
            if alone
            else "a micro-batch"
        )
        lower = "sampling.max_tokens and model.context_length" if alone else "trainer.micro_batch_tokens"
        return (
            f"{what} does not fit: {held}, and about {asks.step:.1f} GB for {job.computed_tokens} tokens",
            f"{more}lower {lower}, or train on more GPUs",
        )
    if asks.engine > 0.85 * job.engine_share * job.gpu_gb:
        return (
            f"an engine's weights take {asks.engine:.1f} GB of each of its {job.engine_gpus} GPUs, of which it may have "
            f"{job.engine_share * job.gpu_gb:.1f} GB: too little is left for its cache",
            "raise run.gpus_per_engine, or engine.gpu_memory_share",
        )
    each = asks.engine * job.engine_gpus / job.reserved_gpus
    if job.reserved and each > 0.85 * job.engine_share * job.gpu_gb:
        cause = f"a reserved engine has reserved.gpus_per_engine = {job.reserved_gpus}, and the model's weights take {each:.1f} GB of each"
        return cause, f"set reserved.gpus_per_engine = {2 * job.reserved_gpus} or more"
    engine = job.engine_share * job.gpu_gb
    if job.reserved and engine > asks.usable:
        return (
            f"a reserved engine takes {engine:.1f} GB of a GPU, of which {asks.usable:.1f} GB are usable: the trainer's CUDA and NCCL stay",
            f"set engine.gpu_memory_share = {USABLE:.2f} or lower",
        )
    if job.reserved and job.offload == "never" and asks.states + engine > asks.usable:
        share = (asks.usable - asks.states) / job.gpu_gb
        if share * job.gpu_gb * 0.85 > each:
            return (
                f'a reserved engine shares its GPU with the trainer, trainer.offload = "never": {held}, the engine takes {engine:.1f} GB',
                f'set engine.gpu_memory_share = {int(share * 100) / 100:.2f} or lower, or trainer.offload = "auto"',
            )
        return (
            f'trainer and reserved engine do not fit on one GPU, and trainer.offload = "never": {held}',
            'set trainer.offload = "auto", or train on more GPUs: a run is never without a reserved engine',
        )
    return "", ""


def share_beside(shape: ModelShape, job: TrainJob) -> float:
    """The largest engine.gpu_memory_share, at most 0.9, that leaves room for what stays of the trainer meanwhile; 0.2 at least."""
    asks = need(shape, job)
    stays = asks.states if job.offload == "never" else 0.0
    return max(0.2, min(0.9, int((asks.usable - stays) / job.gpu_gb * 100) / 100))


def offloaded_gb(shape: ModelShape, job: TrainJob) -> float:
    """Gigabytes a GPU of states that wait in host memory while reserved engines generate; 0: they stay on the GPU."""
    asks = need(shape, job)
    stay = job.offload == "never" or not job.reserved
    if stay or (job.offload == "auto" and asks.states + job.engine_share * job.gpu_gb <= asks.usable):
        return 0.0
    return asks.states
