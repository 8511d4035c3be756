"""Whether a run fits its GPUs and hosts; where it does not, the cause, the remedy and the settings that fit. Pure arithmetic.

States follow from the model, the ranks and the optimizer; the step, of the largest micro-batch, from what layers keep. A run is refused for
either. `propose` changes what costs least first: recomputing, then smaller micro-batches, then more GPUs or adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scavenger.sizing import engine as engines
from scavenger.sizing import phases, training
from scavenger.sizing.engine import Cache
from scavenger.sizing.shape import ModelShape
from scavenger.sizing.training import GB, USABLE, TrainJob

#: Of an engine's share of a GPU, at most for weights: its cache wants the rest.
_WEIGHTS_SHARE = 0.85
#: The smallest micro-batch and the most ranks that are proposed.
_LEAST_TOKENS, _MOST_RANKS = 1024, 4096
_LEAST_CHUNK = 256
_ADAPTERS = 16
#: What adapters stand beside, where a run names nothing else (`lora.targets`).
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Need:
    """Gigabytes a GPU. `states`: masters, gradients, optimizer, reference. `step`: one micro-batch's activations, logits, layers."""

    states: float
    step: float
    engine: float
    usable: float


def need(shape: ModelShape, job: TrainJob) -> Need:
    engine = engines.weight_nbytes(shape, job.engine_gpus)
    return Need(
        training.states(shape, job).nbytes / GB,
        training.step_nbytes(shape, job) / GB,
        engine / GB,
        USABLE * job.gpu_gb,
    )


def problem(shape: ModelShape, job: TrainJob) -> tuple[str, str]:
    """Cause and remedy where it does not fit, else two empty texts."""
    asks = need(shape, job)
    held = f"{asks.states:.1f} GB of weights, gradients and optimizer state a GPU, on {job.ranks} of {job.gpu_gb:g} GB"
    if asks.states > asks.usable:
        ranks = job.replicas * -(-int(asks.states * job.shards * 1.2) // max(1, int(asks.usable)))
        return (
            f"the model is too big for the GPUs: {held}",
            f"train on {ranks} GPUs or more, or adapters only (lora.rank){_this_fits(shape, job)}",
        )
    if asks.states + asks.step > asks.usable:
        return _too_long(shape, job, asks, held)
    return _engine_problem(shape, job, asks, held)


def _too_long(shape: ModelShape, job: TrainJob, asks: Need, held: str) -> tuple[str, str]:
    more = "" if job.checkpointing else "set trainer.activation_checkpointing = true, or "
    alone = job.longest > job.micro_tokens * job.context
    what = (
        f"the longest sample, {job.longest} tokens and a micro-batch of its own,"
        if alone
        else "a micro-batch"
    )
    lower = (
        f"sampling.max_tokens and model.context_length, set trainer.context_parallel = {2 * job.context} or more"
        if alone
        else "trainer.micro_batch_tokens"
    )
    shorter = f"lower {lower}, or " if alone or "GPUs" not in propose(shape, job) else ""
    return (
        f"{what} does not fit: {held}, and about {asks.step:.1f} GB for {job.computed_tokens} tokens",
        f"{more}{shorter}train on more GPUs{_this_fits(shape, job)}",
    )


def _this_fits(shape: ModelShape, job: TrainJob) -> str:
    """What fits, and where that takes more GPUs also what fits on those that there are."""
    keys = propose(shape, job)
    here = adapters(shape, job) if "GPUs" in keys else {}
    said = f"; this fits: {as_settings(keys)}" if keys else ""
    return f"{said}; on these GPUs: {as_settings(here)}" if here else said


def _engine_problem(shape: ModelShape, job: TrainJob, asks: Need, held: str) -> tuple[str, str]:
    engine = job.engine_share * job.gpu_gb
    if job.engine != "vllm":
        return _reference_problem(job, asks, engine)
    if asks.engine > _WEIGHTS_SHARE * engine:
        return (
            f"an engine's weights take {asks.engine:.1f} GB of each of its {job.engine_gpus} GPUs, of which it may have "
            f"{engine:.1f} GB: too little is left for its cache",
            "raise run.gpus_per_engine, or engine.gpu_memory_share"
            + _wider(shape, job, "run.gpus_per_engine", job.sample_tokens),
        )
    each = engines.weight_nbytes(shape, job.reserved_gpus) / GB
    if job.reserved and each > _WEIGHTS_SHARE * engine:
        cause = f"a reserved engine has reserved.gpus_per_engine = {job.reserved_gpus}, and the model's weights take {each:.1f} GB of each"
        return cause, f"set reserved.gpus_per_engine = {2 * job.reserved_gpus} or more"
    if job.reserved and engine > asks.usable:
        return (
            f"a reserved engine takes {engine:.1f} GB of a GPU, of which {asks.usable:.1f} GB are usable: the trainer's CUDA and NCCL stay",
            f"set engine.gpu_memory_share = {USABLE:.2f} or lower",
        )
    if job.reserved and job.offload == "never" and asks.states + engine > asks.usable:
        share = (asks.usable - asks.states) / job.gpu_gb
        if share * job.gpu_gb * _WEIGHTS_SHARE > each:
            return (
                f'a reserved engine shares its GPU with the trainer, trainer.offload = "never": {held}, the engine takes {engine:.1f} GB',
                f'set engine.gpu_memory_share = {int(share * 100) / 100:.2f} or lower, or trainer.offload = "auto"',
            )
        return (
            f'trainer and reserved engine do not fit on one GPU, and trainer.offload = "never": {held}',
            'set trainer.offload = "auto", or train on more GPUs: a run is never without a reserved engine',
        )
    return "", ""


def _reference_problem(job: TrainJob, asks: Need, engine: float) -> tuple[str, str]:
    beside = asks.states if job.offload == "never" and job.reserved else 0.0
    if engine + beside <= asks.usable:
        return "", ""
    stay = f" beside {beside:.1f} GB of training state that stay" if beside else ""
    return (
        f"a reference engine takes {engine:.1f} GB of its GPU (weights, and the whole context for each sample of engine.max_batch), "
        f"of which {asks.usable:.1f} GB are usable{stay}",
        'lower engine.max_batch or model.context_length, or set engine.name = "vllm"',
    )


def cache_problem(shape: ModelShape, job: TrainJob, context: int) -> tuple[str, str]:
    """Cause and remedy where an engine could not hold one sample of `context` tokens: vLLM does not start then. Else two empty texts."""
    kinds = [("an engine", "run.gpus_per_engine", job.engine_gpus)]
    if job.reserved:
        kinds.append(("a reserved engine", "reserved.gpus_per_engine", job.reserved_gpus))
    for who, key, gpus in kinds:
        cache = engines.of_gpus(shape, gpus, job.gpu_gb, job.engine_share)
        if cache.token and cache.tokens < context:
            return (
                f"{who} ({key} = {gpus}) has {max(0, cache.nbytes) / GB:.1f} GB for its KV cache, and one sample of model.context_length = "
                f"{context} tokens takes {context * cache.token / GB:.1f} GB",
                f"raise {key} or engine.gpu_memory_share, or lower sampling.max_tokens and model.context_length"
                + _wider(shape, job, key, context),
            )
    return "", ""


def _wider(shape: ModelShape, job: TrainJob, key: str, context: int) -> str:
    """The fewest GPUs of an engine that hold the weights and one sample of `context` tokens, as a remedy; "" where 8 do not."""
    most = job.engine_share * job.gpu_gb * GB
    for gpus in (1, 2, 4, 8):
        if shape.heads and shape.heads % gpus:
            continue
        cache = engines.of_gpus(shape, gpus, job.gpu_gb, job.engine_share)
        holds = not cache.token or cache.tokens >= context
        if engines.weight_nbytes(shape, gpus) <= _WEIGHTS_SHARE * most and holds:
            return f"; this fits: {key} = {gpus}"
    return ""


def reserved_within(shape: ModelShape, job: TrainJob, node_gb: float) -> tuple[int, int] | None:
    """GPUs of each reserved engine and how many there are in all, so that a node of `node_gb` holds them beside its ranks: engines of as
    few GPUs as the job's first, then fewer of them. None: not even one engine fits."""
    nodes = -(-job.ranks // job.node_ranks)
    widths = [
        gpus
        for gpus in (1, 2, 4, 8)
        if job.reserved_gpus <= gpus <= job.node_ranks and not (shape.heads and shape.heads % gpus)
    ]
    tried = [
        (gpus, most)
        for gpus in widths
        if (most := min(job.node_ranks // gpus * nodes, job.reserved_workers or job.ranks))
    ]
    tried += [(widths[-1], count) for count in range(tried[-1][1] - 1, 0, -1)] if tried else []
    for gpus, count in tried:
        if node_holds(shape, replace(job, reserved_gpus=gpus, reserved_workers=count), node_gb):
            return gpus, count
    return None


def node_holds(shape: ModelShape, job: TrainJob, node_gb: float) -> bool:
    """Whether a node of `node_gb` can grant what `asked_gib` asks for. 0: nothing is known, so it can."""
    return not node_gb or asked_gib(shape, job) * (1 << 30) <= node_gb * GB


def asked_gib(shape: ModelShape, job: TrainJob) -> int:
    """GiB to ask Slurm for on each node (`--mem`): what the training job's ranks and engines take there, and a twentieth."""
    return int(phases.node_nbytes(shape, job) * 1.05 / (1 << 30)) + 1


def host_problem(shape: ModelShape, job: TrainJob, asked_gb: float, has_gb: float = 0.0) -> tuple[str, str]:
    """Cause and remedy where a training node holds less than its ranks and engines take, or than it is asked for.

    `asked_gb`: what train.sbatch asks for, `has_gb`: what a node has; 0 = not known.
    """
    wanted, gib = phases.node_nbytes(shape, job) / GB, asked_gib(shape, job)
    if has_gb and not node_holds(shape, job, has_gb):
        return (
            f"each training node needs {wanted:,.0f} GB of host memory, and has {has_gb:,.0f} GB (# node-memory-gb in train.sbatch)",
            f"train on more nodes, or adapters only: lora.rank = {_ADAPTERS}{_fewer(shape, job, has_gb)}",
        )
    if asked_gb and wanted > asked_gb:
        return (
            f"each training node needs {wanted:,.0f} GB of host memory, and train.sbatch asks for {asked_gb:,.0f} GB",
            f"ask for --mem={gib}G or more, or train on more nodes{_fewer(shape, job, asked_gb)}",
        )
    if has_gb and asked_gb > has_gb:
        return (
            f"train.sbatch asks for {asked_gb:,.0f} GB of host memory, and a node has {has_gb:,.0f} GB (# node-memory-gb there)",
            f"ask for --mem={gib}G",
        )
    return "", ""


def _fewer(shape: ModelShape, job: TrainJob, node_gb: float) -> str:
    """Reserved engines that such a node holds, as a remedy."""
    found = reserved_within(shape, job, node_gb) if job.reserved else None
    if found is None:
        return ""
    return f", or with fewer or wider reserved engines: reserved.gpus_per_engine = {found[0]}, reserved.workers = {found[1]}"


def share_beside(shape: ModelShape, job: TrainJob) -> float:
    """The largest engine.gpu_memory_share, at most 0.9, that leaves room for what stays of the trainer meanwhile; 0.2 at least."""
    asks = need(shape, job)
    kept = asks.states if job.offload == "never" else 0.0
    return max(0.2, min(0.9, int((asks.usable - kept) / job.gpu_gb * 100) / 100))


def offloaded_gb(shape: ModelShape, job: TrainJob) -> float:
    """Gigabytes a GPU of states that wait in host memory while reserved engines generate; 0: they stay on the GPU."""
    return 0.0 if phases.stays(shape, job) else need(shape, job).states


# ---------------------------------------------------------------- what fits


def fits(shape: ModelShape, job: TrainJob) -> bool:
    return not problem(shape, job)[0]


def trains(shape: ModelShape, job: TrainJob) -> bool:
    """Whether states and a micro-batch fit a GPU, whatever engines need."""
    asks = need(shape, job)
    return asks.states + asks.step <= asks.usable


def largest_micro(shape: ModelShape, job: TrainJob, most: int = 1 << 20) -> int:
    """Tokens of the largest micro-batch that fits, a multiple of 1,024; 0: not even the longest sample does."""
    if not trains(shape, replace(job, micro_tokens=min(job.longest or _LEAST_TOKENS, _LEAST_TOKENS))):
        return 0
    low, high = 1, most // _LEAST_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if trains(shape, replace(job, micro_tokens=middle * _LEAST_TOKENS)):
            low = middle
        else:
            high = middle - 1
    return low * _LEAST_TOKENS


def propose(shape: ModelShape, job: TrainJob) -> dict[str, str]:
    """The keys to set so that states and a micro-batch fit, cheapest change first; empty where nothing has to change, or nothing helps."""
    if trains(shape, job):
        return {}
    for changed, keys in _changes(job):
        tokens = largest_micro(shape, changed, most=max(job.micro_tokens, _LEAST_TOKENS))
        if tokens:
            if min(tokens, job.micro_tokens) < job.micro_tokens:
                keys["trainer.micro_batch_tokens"] = f"{tokens}"
            return keys
    return _more(shape, job)


def _changes(job: TrainJob) -> Iterator[tuple[TrainJob, dict[str, str]]]:
    """Ways to need less, from the cheapest on. A smaller micro-batch is tried within each."""
    yield job, {}
    recomputed = replace(job, checkpointing=True)
    keys = {} if job.checkpointing else {"trainer.activation_checkpointing": "true"}
    yield recomputed, dict(keys)
    if job.head_chunk > _LEAST_CHUNK or (not job.head_chunk and job.compute < 8):
        keys["trainer.head_chunk_tokens"] = f"{_LEAST_CHUNK}"
        yield replace(recomputed, head_chunk=_LEAST_CHUNK), dict(keys)


def _more(shape: ModelShape, job: TrainJob) -> dict[str, str]:
    """More GPUs, or adapters on those that there are."""
    found = replace(job, checkpointing=True, micro_tokens=min(job.micro_tokens, _LEAST_TOKENS))
    ranks = job.ranks
    while ranks < _MOST_RANKS:
        ranks *= 2
        wider = replace(found, ranks=ranks)
        if trains(shape, wider):
            return _recomputed(job) | _smaller(shape, job, wider) | {"GPUs": f"{ranks}"}
    return adapters(shape, job)


def adapters(shape: ModelShape, job: TrainJob) -> dict[str, str]:
    """The keys of adapters in place of all weights, where they fit; empty where they do not, or are trained already."""
    if job.lora_rank:
        return {}
    lora = replace(
        job,
        checkpointing=True,
        micro_tokens=min(job.micro_tokens, _LEAST_TOKENS),
        lora_rank=_ADAPTERS,
        targets=_TARGETS,
        trained=shape.adapters(_ADAPTERS, _TARGETS),
        reference=False,
    )
    if not trains(shape, lora):
        return {}
    return _recomputed(job) | _smaller(shape, job, lora) | {"lora.rank": f"{_ADAPTERS}"}


def _recomputed(job: TrainJob) -> dict[str, str]:
    return {} if job.checkpointing else {"trainer.activation_checkpointing": "true"}


def _smaller(shape: ModelShape, job: TrainJob, changed: TrainJob) -> dict[str, str]:
    """The largest micro-batch that fits the changed job, where that is not as large as was asked."""
    tokens = largest_micro(shape, changed, most=max(job.micro_tokens, _LEAST_TOKENS))
    return {"trainer.micro_batch_tokens": f"{tokens}"} if tokens < job.micro_tokens else {}


def as_settings(keys: dict[str, str]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in keys.items())


def cache_of(shape: ModelShape, job: TrainJob) -> Cache:
    """Of the smaller of the two kinds of engines."""
    gpus = min(job.engine_gpus, job.reserved_gpus) if job.reserved else job.engine_gpus
    return engines.of_gpus(shape, gpus, job.gpu_gb, job.engine_share)
