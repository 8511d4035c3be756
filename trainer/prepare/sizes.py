"""How large a first run's engines are: GPUs of each, how many reserved ones, memory share, batch, CPUs and host memory. Pure.

Owns those choices and the reason of each, which becomes the comment beside the key. What fits is `scavenger.sizing`'s to say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scavenger.config import TrainerSection
from scavenger.sizing import engine, fit
from scavenger.sizing.engine import PublishedSize
from scavenger.sizing.shape import ModelShape
from scavenger.sizing.training import GB, TrainJob

MICRO_TOKENS = 16384
#: Host memory of a training node of which nothing is known, for each GB of its GPUs. Assumed: nodes of 8 A100, H100 or H200 have more.
HOST_PER_GPU = 1.6
#: From this many parameters on, activations are computed again.
LARGE = 1_000_000_000
#: Below this many parameters, and without a GPU, vLLM's start takes longer than the reference engine's whole work.
TINY = 20_000_000
#: Samples that an engine should hold at once: with room for fewer it gets more GPUs.
LEAST_BATCH = 8


@dataclass(frozen=True, slots=True)
class SizingRequest:
    """For whom engines are sized. `gpus`: of each training node, 0 = none. `samples`: of a step. Lengths in tokens.

    `node_gb`: of a training node's host memory, 0 = not known.
    """

    shape: ModelShape
    engine: str
    gpus: int
    nodes: int
    gpu_gb: float
    prompt: int
    completion: int
    context: int
    samples: int
    node_gb: float = 0.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """`engine_gpus`, `reserved_gpus`: of each harvested and of each reserved engine. `why_*`: where a number comes from, lines for a
    comment; `why_reserved` is "" where nothing but the GPUs decided."""

    engine_gpus: int
    reserved: int
    reserved_gpus: int
    why_reserved: str
    share: float
    max_batch: int
    why_batch: tuple[str, ...]
    micro_tokens: int
    checkpointing: bool
    cpus: int
    memory_mb: int
    why_host: str


def engine_for(parameters: int, gpus: int) -> str:
    """vLLM, but for a model that is tiny where no GPU is asked for."""
    return "reference" if not gpus and parameters < TINY else "vllm"


def choose(asked: SizingRequest) -> Sizes:
    """What does not fit at all gets the largest engines: `scavenger init --check` says then what is missing. One is always reserved."""
    shape, ranks = asked.shape, max(1, asked.gpus * asked.nodes)
    job = TrainJob(
        ranks,
        asked.gpu_gb,
        MICRO_TOKENS,
        shape.parameters >= LARGE,
        shape.parameters,
        False,
        True,
        0.9,
        1,
        longest=asked.context,
        head_chunk=TrainerSection().head_chunk_tokens,
    )
    job = _micro(shape, job)
    on_gpus = asked.engine == "vllm" and asked.gpus > 0
    share = fit.share_beside(shape, job) if on_gpus else 0.9
    gpus = _engine_gpus(asked, share) if on_gpus else 1
    reserved_gpus, reserved, why_reserved = _reserved(asked, job, gpus, share)
    batch, why = _batch(asked, gpus, share)
    version = PublishedSize(2 * shape.parameters, 0)  # bfloat16, as weights.dtype has it by default
    asks_gpus = gpus if asked.gpus else 0
    mb = -(-engine.engine_host_mb(version, asked.engine, asks_gpus) // 1024) * 1024
    host = (
        f"{version.nbytes / GB:.1f} GB of weights, {gpus} GPU{'s' if gpus > 1 else ''}"
        if asked.gpus
        else "no GPU"
    )
    cpus = engine.engine_cpus(version, asks_gpus)
    return Sizes(
        gpus,
        reserved,
        reserved_gpus,
        why_reserved,
        share,
        batch,
        why,
        job.micro_tokens,
        job.checkpointing,
        cpus,
        mb,
        host,
    )


def node_gb(gpus: int, gpu_gb: float) -> float:
    """Host memory of a training node in gigabytes, as it is assumed."""
    return HOST_PER_GPU * gpus * gpu_gb


def _reserved(asked: SizingRequest, job: TrainJob, gpus: int, share: float) -> tuple[int, int, str]:
    """GPUs of each reserved engine, how many there are, and why not as many as the GPUs hold: each keeps its weights in host memory
    asleep. Where none fits, as few as can be: the check says what is missing."""
    most = max(1, asked.gpus // gpus * asked.nodes)
    if asked.engine != "vllm" or not asked.gpus:
        return gpus, most, ""
    there = asked.node_gb or node_gb(asked.gpus, asked.gpu_gb)
    wanted = replace(
        job,
        engine_share=share,
        engine_gpus=gpus,
        reserved_gpus=gpus,
        reserved_workers=most,
        per_node=asked.gpus,
    )
    found = fit.reserved_within(asked.shape, wanted, there)
    if found == (gpus, most):
        return *found, ""
    needs = (
        fit.asked_gib(asked.shape, wanted if found else replace(wanted, reserved_workers=1)) * (1 << 30) / GB
    )
    if found is None:
        return (
            gpus,
            1,
            f"# a node's {there:,.0f} GB of host memory do not hold even one: {needs:,.0f} GB are wanted",
        )
    return *found, (
        f"# {most} engines of {gpus} GPU{'s' * (gpus > 1)} want {needs:,.0f} GB of each node's host memory, of {there:,.0f}: "
        "asleep, each keeps its weights there"
    )


def _micro(shape: ModelShape, job: TrainJob) -> TrainJob:
    """The largest micro-batch that fits, of 16,384 tokens at most; activations are computed again where the longest sample does not fit."""
    least = max(job.longest, 1)
    if not job.checkpointing and not fit.trains(
        shape, replace(job, micro_tokens=min(least, job.micro_tokens))
    ):
        job = replace(job, checkpointing=True)
    if fit.trains(shape, job):
        return job
    return replace(job, micro_tokens=fit.largest_micro(shape, job, most=MICRO_TOKENS) or job.micro_tokens)


def _engine_gpus(asked: SizingRequest, share: float) -> int:
    """The fewest GPUs of a node that hold the weights in half of their memory, one longest sample and some of the expected length."""
    shape = asked.shape
    most = [n for n in (1, 2, 4, 8) if n <= asked.gpus and shape.heads % n == 0]
    expected = engine.expected_tokens(asked.prompt, asked.completion)
    for gpus in most:
        cache = engine.of_gpus(shape, gpus, asked.gpu_gb, share)
        room = not cache.token or cache.tokens >= max(asked.context, LEAST_BATCH * expected)
        if engine.weight_nbytes(shape, gpus) < 0.5 * asked.gpu_gb * GB and room:
            return gpus
    return most[-1]


def _batch(asked: SizingRequest, gpus: int, share: float) -> tuple[int, tuple[str, ...]]:
    """`engine.max_batch`, and why so many."""
    if asked.engine != "vllm":
        return engine.PLAIN_BATCH, ("# samples that one engine generates at once",)
    expected, on_gpus = engine.expected_tokens(asked.prompt, asked.completion), asked.gpus > 0
    cache = engine.of_gpus(asked.shape, gpus, asked.gpu_gb, share) if on_gpus else engine.of_cpu(asked.shape)
    if not cache.token:
        return engine.PLAIN_BATCH, (
            "# samples at once: config.json does not say its attention heads, so this is a guess",
        )
    most = asked.samples if on_gpus else min(asked.samples, engine.PLAIN_BATCH)
    room, chosen = cache.samples(expected), engine.batch(cache, expected, most)
    of = f"{share:.2f} of {gpus} x {asked.gpu_gb:g} GB, less weights and work" if on_gpus else "without a GPU"
    bound = f"{room} fit; {most} are a step's or enough" if room > chosen + 7 else f"{room} fit"
    return chosen, (
        f"# max_batch: samples whose KV cache fits. It has {max(0, cache.nbytes) / GB:.1f} GB ({of}),",
        f"# a token takes {cache.token / 1e3:.0f} kB, a sample on average {expected} tokens (the prompt, half a completion): {bound}.",
    )
