"""What training takes of one rank's GPU: states, and each part of a micro-batch, in bytes. Pure arithmetic over sizes.

Counted as `trainer.model` computes: FSDP2 gathers a decoder layer at a time and casts it, the next one on its way; gradients are summed
in float32; the output head makes logits by chunks (`head_chunk`), or all of them; layers keep what their backward pass needs, or
(`checkpointing`) their input alone. What autograd keeps of a layer is counted value by value (`kept_nbytes`), as transformers' layers are.
Also the rule of `trainer.offload` (`offloads`), which the trainer, `scavenger init --check` and the simulator follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scavenger.sizing.shape import ModelShape

GB = 1e9
#: Of a GPU's memory: CUDA contexts, NCCL's buffers and what the allocator cannot use take the rest.
USABLE = 0.94
#: Of a micro-batch itself, bytes a token: ids, places, targets, logprobs, and the loss's terms.
_BATCH_NBYTES = 150
#: Values of logits that are there in float32 at once, where the whole matrix is made (`trainer.algorithms.loss.PIECE`).
_PIECE = 1 << 26

Mode = Literal["auto", "never", "always"]
_ATTENTION = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class TrainJob:
    """`trained`: parameters that have gradients (all of them, or the adapters'). `reference`: a second copy of the model is kept.

    `longest`: tokens of the longest sample that can come; longer than `micro_tokens`, it is a micro-batch of its own. 0: not known.
    `head_chunk`: tokens whose logits are there at once; 0: of the whole micro-batch. `offload`: `trainer.offload`. `lora_rank`, `targets`:
    of adapters; rank 0: all is trained. `compute`, `master`: bytes of a value as layers compute, and of a master weight. `flash`: attention
    gives its result in the layout that the next layer wants, as on GPUs. `per_node`: ranks of a node, 0 = all of one.
    `reserved_workers`: reserved engines in all; 0: as many as the GPUs hold. `replicas`: of the model, over the `ranks`. `context`: ranks
    that share each sample's tokens. `tensor`: ranks that cut each layer. `sample_tokens`: of the longest sample that an engine must hold
    (`model.context_length`), whatever is trained of it at once; 0: not known. `published`: bytes of a published value (`weights.dtype`).
    `engine`: `engine.name`; of a reference engine `engine_share` is what it takes by itself.
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
    offload: Mode = "auto"
    lora_rank: int = 0
    targets: tuple[str, ...] = ()
    compute: int = 2
    master: int = 4
    flash: bool = True
    per_node: int = 0
    reserved_workers: int = 0
    replicas: int = 1
    context: int = 1
    sample_tokens: int = 0
    tensor: int = 1
    published: int = 2
    engine: str = "vllm"

    @property
    def computed_tokens(self) -> int:
        """Of the largest micro-batch, on one rank."""
        return max(self.micro_tokens, -(-self.longest // self.context))

    @property
    def shards(self) -> int:
        """Ranks over which states are cut."""
        return self.ranks // self.replicas

    @property
    def slice_ranks(self) -> int:
        """Ranks over which a slice of a layer is cut; all of a replica without tensor parallelism."""
        return self.shards // self.tensor

    @property
    def node_ranks(self) -> int:
        return min(self.per_node or self.ranks, self.ranks)


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of a rank's share, which is there from one step to the next."""

    weights: int
    reference: int
    optimizer: int
    gradients: int

    @property
    def nbytes(self) -> int:
        return self.weights + self.reference + self.optimizer + self.gradients


def states(shape: ModelShape, job: TrainJob) -> States:
    """Masters of all parameters, adapters' too; gradient and two moments of the trained ones; all cut over a replica's ranks. What tensor
    parallelism leaves whole is cut over those of one slice alone."""
    whole = shape.whole_adapters(job.lora_rank, job.targets) if job.lora_rank else shape.whole
    base, trained = _cut(shape.parameters, shape.whole, job.tensor), _cut(job.trained, whole, job.tensor)
    held = base + (trained if job.lora_rank else 0)
    share = job.master / job.slice_ranks
    copy = base if job.reference else 0
    return States(int(held * share), int(copy * share), int(2 * trained * share), int(trained * share))


def _cut(values: float, whole: float, ranks: int) -> float:
    """Of so many values, of which some stay whole, those of one of so many ranks of tensor parallelism."""
    return whole + (values - whole) / ranks


@dataclass(frozen=True, slots=True)
class Moment:
    """What lies on the GPU beside the states at one point of a micro-batch, in bytes."""

    name: str
    gathered: int
    reduced: int
    activations: int
    head: int

    @property
    def nbytes(self) -> int:
        return self.gathered + self.reduced + self.activations + self.head


def moments(shape: ModelShape, job: TrainJob) -> tuple[Moment, ...]:
    """The points at which a micro-batch may take most: `head` (forward pass ended), `backward`, `reduce` (all layers done)."""
    tokens, c, m = job.computed_tokens, job.compute, job.master
    full, layers = not job.lora_rank, max(1, shape.layers)
    adapters = _cut(job.trained, shape.whole_adapters(job.lora_rank, job.targets), job.tensor)
    shape = shape.slice(job.tensor)
    trained = shape.layer if full else int(adapters) // layers  # of one layer
    table = shape.vocabulary * shape.hidden
    stream = c * shape.hidden * tokens  # a value a token and unit of the hidden width
    batch = tokens * (_BATCH_NBYTES + 2 * c * shape.head_dim)
    dense, sparse = (kept_nbytes(shape, job, sparse=kind) * tokens for kind in (False, True))
    kinds = [dense] * (shape.sparse_layers < layers) + [sparse] * (shape.sparse_layers > 0)
    each, again = (stream, max(kinds)) if job.checkpointing else (max(kinds), 0)
    kept = (
        layers * stream
        if job.checkpointing
        else (layers - shape.sparse_layers) * dense + shape.sparse_layers * sparse
    )
    inside = inside_nbytes(shape, job) * tokens + stream
    # The last norm, and the gradient that begins to flow back.
    last = tokens * (max(c, 4) + 3 * c) * shape.hidden

    layer = c * (shape.layer + (0 if full else trained))  # gathered; and the next one, on its way
    root, of_root = c * shape.root, c * table * full
    flat = m * trained  # a layer's gradients, gathered from its parameters, on their way to the ranks
    summed = flat // job.slice_ranks if job.slice_ranks > 1 else 2 * flat
    outside = m * shape.root * full
    tied = root + 3 * of_root + flat if shape.tied else 0
    return (
        Moment("head", root + layer, 0, kept + batch, _head_nbytes(shape, job) + last),
        Moment("backward", root + 2 * layer, of_root, kept + again + inside + batch, 0),
        Moment("backward", root + 2 * layer, of_root + flat, kept - each + again + inside + batch, 0),
        Moment(
            "backward",
            root + 2 * layer,
            of_root + c * trained + flat,
            max(0, kept - 2 * each) + batch + 2 * stream,
            0,
        ),
        Moment("reduce", root + layer, of_root + flat + summed, max(0, kept - each) + batch + 2 * stream, 0),
        Moment("reduce", 0, max(outside + of_root * (1 if shape.tied else 2), tied), batch + stream, 0),
    )


def step_nbytes(shape: ModelShape, job: TrainJob) -> int:
    """The most that a micro-batch takes beside the states."""
    return max(moment.nbytes for moment in moments(shape, job))


def kept_nbytes(shape: ModelShape, job: TrainJob, *, sparse: bool) -> int:
    """Of one layer's forward pass, kept for the backward pass: bytes a token. `sparse`: of a layer with experts."""
    c, full, targets = job.compute, not job.lora_rank, set(job.targets)
    wide = max(c, 4)  # norms compute in float32

    def norm(width: int, read: bool) -> int:
        """Its input; what was normalised, where its weight is trained; its result, where that is kept as a layer's input."""
        return width * (wide + c * full + c * read)

    def used(*names: str) -> bool:
        """Whether the input of one of these is kept for the gradient of its weight."""
        return full or any(name in targets for name in names)

    queries, keys, hidden = shape.queries, shape.keys, shape.hidden
    total = norm(hidden, used(*_ATTENTION)) + c * (2 * queries + 2 * keys) + 4 * max(1, shape.heads)
    total += c * job.lora_rank * len(targets)
    if shape.head_norms:
        total += norm(queries, False) + norm(keys, False)
    if used("o_proj") and not job.flash:
        total += c * queries  # in another layout
    if not sparse:
        return total + norm(hidden, used("gate_proj", "up_proj")) + c * shape.inner * (3 + used("down_proj"))
    total += norm(hidden, full) + c * (3 + full) * shape.shared_inner + 2 * wide * shape.experts
    return total + c * shape.chosen * (hidden * (1 + full) + shape.expert_inner * (3 + full))


def inside_nbytes(shape: ModelShape, job: TrainJob) -> int:
    """What the backward pass of one layer makes and drops again, at its most: bytes a token."""
    c, hidden = job.compute, shape.hidden
    norm = hidden * (3 * max(c, 4) + c * (c < 4))
    feed = 2 * c * shape.inner
    experts = 3 * c * shape.chosen * hidden if shape.experts else 0
    return max(norm, feed, experts)


def _head_nbytes(shape: ModelShape, job: TrainJob) -> int:
    """Of the output head at its most."""
    c, tokens, values = job.compute, job.computed_tokens, shape.vocabulary
    wide, full = max(c, 4), not job.lora_rank
    table = values * shape.hidden
    copied = c * tokens * shape.hidden  # the hidden states of answer tokens
    if job.head_chunk:
        together = min(job.head_chunk, tokens)
        sums = wide * table * full
        return (2 + shape.capped) * wide * together * values + sums + 2 * copied
    pieces = 2 * wide * min(tokens * values, _PIECE) if c < 8 else 2 * wide * tokens * values
    return (2 + shape.capped) * c * tokens * values + pieces + 2 * copied


def offloads(mode: Mode, *, resident: float, engine: float, capacity: float) -> bool:
    """Whether training state leaves a GPU of `capacity` bytes while engines have it. `resident`: what the trainer would keep there;
    `engine`: what engines take of this GPU."""
    if mode != "auto":
        return mode == "always"
    return resident + engine > int(USABLE * capacity)
