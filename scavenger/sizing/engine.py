"""An engine's memory: its weights and KV cache over the GPUs of tensor parallelism, and its job's host memory and CPUs. Pure arithmetic.

Owns the table of GPU types, too. A layer of every kind counts as full attention, so a model with sliding windows or linear layers holds
more samples than is said here. What vLLM needs beside weights and cache (`work_nbytes`) is estimated, not measured.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from scavenger.sizing.shape import ModelShape
from scavenger.sizing.training import GB

#: Gigabytes of one GPU, by what its GRES type or its name holds; the first that fits counts. Of types that exist in two sizes the smaller.
GPU_GB = (
    ("gb200", 186.0),
    ("b200", 180.0),
    ("gh200", 96.0),
    ("h200", 141.0),
    ("h100", 80.0),
    ("h20", 96.0),
    ("h800", 80.0),
    ("a100", 40.0),
    ("a800", 80.0),
    ("l40s", 48.0),
    ("l40", 48.0),
    ("rtx6000", 24.0),
    ("a6000", 48.0),
    ("a40", 48.0),
    ("a30", 24.0),
    ("a10", 24.0),
    ("l4", 24.0),
    ("4090", 24.0),
    ("3090", 24.0),
    ("v100", 16.0),
    ("t4", 16.0),
)
#: A size in the name itself: a100_80gb, nvidia_h100_80gb_hbm3, a100-40, h100_1g.10gb.
SIZE = re.compile(r"(?:^|[^0-9])(\d{1,3})gb|a100[-_](40|80)(?![0-9])")
#: Bytes of a cached value on a GPU (bfloat16), and of one on a CPU, where engines compute in float32.
CACHED_NBYTES, CACHED_NBYTES_CPU = 2, 4
#: The bound of `engine.max_batch`: vLLM captures CUDA graphs up to here, and decoding gains little beyond.
MOST_BATCH = 512
#: Without a GPU, and where a model's config.json does not say its heads.
PLAIN_BATCH = 64
#: What vLLM is given for its cache without a GPU (`rollout.engines.vllm.setup.CPU_CACHE_NBYTES`).
CPU_NBYTES = 1 << 30
#: Tokens of one prefill in vLLM on a large GPU; and what a CUDA context, graphs and NCCL take of a GPU, assumed.
PREFILL_TOKENS, FIXED_NBYTES = 8192, 2 * 10**9


#: Host memory without any weights, in mebibytes: of an engine's processes on a CPU, measured (385 and 1030) with some room; and what each
#: GPU adds, assumed: CUDA's libraries and context, pinned buffers.
PROCESS_MB = {"reference": 512, "vllm": 1536}
GPU_MB = {"reference": 2048, "vllm": 3072}


@dataclass(frozen=True, slots=True)
class PublishedSize:
    """Bytes of the weights that an engine is given, and of the base under adapters, 0 where all weights are trained."""

    nbytes: int
    base: int


def engine_host_mb(version: PublishedSize, engine: str, gpus: int) -> int:
    """Host memory of a harvested engine's job, in mebibytes.

    All weights: two versions, of which the engine serves one and pulls or keeps the pages of another, which its processes load from where
    they lie; and the deltas that it gives on, a quarter. Adapters: their base in place of the two, and the quarter for two versions of
    them. And the processes; `gpus` 0: without what GPUs add, which is a guess.
    """
    held = version.base + 0.25 * version.nbytes if version.base else 2.25 * version.nbytes
    return int(held / (1 << 20)) + 1 + PROCESS_MB.get(engine, 0) + gpus * GPU_MB.get(engine, 0)


def engine_cpus(version: PublishedSize, gpus: int) -> int:
    """CPUs of a harvested engine's job: vLLM's server, its core and a process a GPU (its documentation's least), our worker, and a thread
    for each 8 GB of weights, four at most, to pull and hash them while the rest goes on."""
    return 3 + gpus + min(4, (version.base or version.nbytes) // (8 * 10**9))


def weight_nbytes(shape: ModelShape, gpus: int, value_nbytes: int = CACHED_NBYTES) -> int:
    """Of an engine's weights, on each of its GPUs: tensor parallelism cuts all but norms and routers, and copies key and value projections
    where there are more GPUs than KV heads."""
    norms = shape.layers * (2 * shape.hidden + 2 * shape.head_dim * shape.head_norms) + shape.hidden
    routers = shape.sparse_layers * shape.experts * shape.hidden
    keys = 2 * shape.layers * shape.hidden * shape.keys
    cut = shape.parameters - norms - routers - keys
    share = keys / min(gpus, shape.kv_heads or gpus)
    return int(value_nbytes * (cut / gpus + share + norms + routers))


def reference_nbytes(shape: ModelShape, batch: int, context: int, value_nbytes: int) -> int:
    """What a reference engine takes of its one GPU: weights, and a slot of the whole context for each sample of its batch."""
    return value_nbytes * shape.parameters + batch * context * token_nbytes(shape, 1, value_nbytes)


def gpu_gb(kind: str) -> float:
    """Gigabytes of a GPU of this type, as Slurm's GRES or a user names it; 0 = not known."""
    name = kind.lower()
    if size := SIZE.search(name):
        return float(size[1] or size[2])
    flat = re.sub(r"[^a-z0-9]", "", name)
    return next((gb for word, gb in GPU_GB if word in flat), 0.0)


def token_nbytes(shape: ModelShape, gpus: int, value_nbytes: int = CACHED_NBYTES) -> int:
    """Of keys and values of one token over all GPUs of an engine: more GPUs than KV heads hold copies. 0 = not known."""
    return 2 * shape.layers * -(-shape.kv_heads // gpus) * gpus * shape.head_dim * value_nbytes


def work_nbytes(shape: ModelShape, gpus: int) -> int:
    """Estimated: what each GPU of an engine needs beside weights and cache: a prefill's activations, a batch's logits, the rest."""
    inner = max(shape.inner, shape.chosen * shape.expert_inner + shape.shared_inner)
    activations = PREFILL_TOKENS * 2 * (4 * inner // gpus + 4 * shape.hidden)
    logits = MOST_BATCH * shape.vocabulary * 4 * 3  # float32: as computed, as scaled, as probabilities
    return FIXED_NBYTES + activations + logits


@dataclass(frozen=True, slots=True)
class Cache:
    """Of one engine. `nbytes`: over its GPUs, may be negative. `token`: bytes of one token; 0 = not known."""

    nbytes: int
    token: int
    gpus: int

    @property
    def tokens(self) -> int:
        return max(0, self.nbytes) // self.token if self.token else 0

    def samples(self, tokens: int) -> int:
        """How many of this many tokens each fit."""
        return self.tokens // max(1, tokens)


def of_gpus(shape: ModelShape, gpus: int, gpu_gb: float, share: float) -> Cache:
    """What an engine that takes `share` of each of its GPUs has left for its cache."""
    left = gpus * (share * gpu_gb * GB - work_nbytes(shape, gpus) - weight_nbytes(shape, gpus))
    return Cache(int(left), token_nbytes(shape, gpus), gpus)


def of_cpu(shape: ModelShape) -> Cache:
    return Cache(CPU_NBYTES, token_nbytes(shape, 1, CACHED_NBYTES_CPU), 1)


def expected_tokens(prompt: int, completion: int) -> int:
    """What a sample holds on average while it is generated, if all completions were as long as they may be: the prompt and half."""
    return prompt + completion // 2


def batch(cache: Cache, expected: int, most: int) -> int:
    """`engine.max_batch`: how many samples of `expected` tokens fit, at most `most`; from 8 on a multiple of 8."""
    fit = max(1, min(cache.samples(expected), most, MOST_BATCH))
    return fit if fit < 8 else fit - fit % 8
