"""What one decode step, a prefill and the KV cache cost on a GPU: a roofline of memory bandwidth and compute. Pure functions.

A step reads all weights and every running sequence's KV once, computes 2 FLOPs a weight and token, and pays a fixed overhead:

    step_s = overhead + max((weights + kv_bytes * C) / bandwidth, (2 * P * B + 4 * l * h * d * C) / flops)

with B sequences, C tokens of context over all of them, P weights in matrix products, l layers of h heads of dimension d. Sequences that
all grow by a token a step make C grow by B, so a stretch of steps is an arithmetic series (two, where the roofline bends) and is summed in
closed form. Knows nothing of samples, requests, time or events: `sequences.py` holds an engine's running batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from scavenger.errors import ConfigError
from scavenger.simulate.speculation import NO_DRAFT, AcceptanceCurve, Draft, choose

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class GpuDatasheet:
    """One GPU by its datasheet. `dense_flops`: bf16 tensor cores without sparsity. `nvlink_bytes_s`: one direction."""

    name: str
    memory_bytes: float
    bandwidth_bytes_s: float
    dense_flops: float
    nvlink_bytes_s: float
    host_bytes_s: float


@dataclass(frozen=True, slots=True)
class Model:
    """A dense decoder-only transformer with grouped-query attention and a gated MLP, by its config.json.

    `matmul_parameters`: weights that every decoded token is multiplied with: the layers and the output head, not the embedding look-up.
    `attention_flops_per_pair`: for one query token and one key token, over all layers: QK^T and PV, 2 FLOPs each a dimension.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    matmul_parameters: int = field(init=False, repr=False, compare=False)
    kv_bytes_per_token: int = field(init=False, repr=False, compare=False)
    attention_flops_per_pair: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Worked out once: every prefill of a simulation asks.
        object.__setattr__(
            self, "matmul_parameters", self.layers * self.layer_parameters + self.vocab * self.hidden
        )
        object.__setattr__(
            self, "kv_bytes_per_token", 2 * self.layers * self.kv_heads * self.head_dim * BF16_BYTES
        )
        object.__setattr__(self, "attention_flops_per_pair", 4 * self.layers * self.heads * self.head_dim)

    @property
    def layer_parameters(self) -> int:
        """Weights in one layer's matrix products: q and o, k and v, gate, up and down. (Norms are left out: under 0.01 %.)"""
        return (
            self.hidden * (2 * self.heads + 2 * self.kv_heads) * self.head_dim
            + 3 * self.hidden * self.intermediate
        )

    @property
    def parameters(self) -> int:
        return self.matmul_parameters + (0 if self.tied else self.vocab * self.hidden)

    @property
    def weight_bytes(self) -> int:
        return self.parameters * BF16_BYTES


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The free parameters, to be fitted with `calibrate.py`. Shares of the datasheet's peak, and seconds a step."""

    bandwidth: float
    decode_compute: float
    overhead_s: float
    prefill_compute: float
    memory_share: float = 0.9
    # two all-reduces a layer when tensor parallel: a latency each, and the payload over NVLink
    allreduce_latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Step seconds of a batch of B: `overhead + max(memory + memory_slope * C, compute + compute_slope * C)`, C tokens of context."""

    overhead: float
    memory: float
    memory_slope: float
    compute: float
    compute_slope: float

    def at(self, context: float) -> float:
        return self.overhead + max(
            self.memory + self.memory_slope * context, self.compute + self.compute_slope * context
        )


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """One engine: a model on `gpus` GPUs (tensor parallel). `resident_bytes`: a GPU's memory that others hold (training state).
    `acceptance`: it speculates (`engine.speculation = "group"`), with this truth; None: it does not.

    `kv_capacity`: tokens of KV that fit beside the weights. Counted in tokens, not in blocks: at most half a block a sequence too many.
    """

    model: Model
    gpu: GpuDatasheet
    efficiency: Efficiency
    gpus: int = 1
    max_sequences: int = 256
    prefill_chunk: int = 8192
    resident_bytes: float = 0.0
    acceptance: AcceptanceCurve | None = None
    kv_capacity: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        free = (
            self.gpus * (self.gpu.memory_bytes * self.efficiency.memory_share - self.resident_bytes)
            - self.model.weight_bytes
        )
        object.__setattr__(self, "kv_capacity", math.floor(free / self.model.kv_bytes_per_token))
        if self.kv_capacity <= 0:
            raise ConfigError(
                f"{self.model.name} leaves no memory for KV on {self.gpus} x {self.gpu.name} beside {self.resident_bytes / 1e9:.0f} GB",
                "give the engine more GPUs, or offload the training state",
            )

    def with_resident(self, nbytes_per_gpu: float) -> SimulatedEngine:
        """The same engine while others hold this much of each of its GPUs' memory."""
        return replace(self, resident_bytes=nbytes_per_gpu)

    def curve(self, batch: int) -> DecodeCurve:
        """The cost of one step of `batch` sequences as a function of their context tokens."""
        if batch < 1:
            raise ValueError(f"a batch of {batch}")
        model, eff = self.model, self.efficiency
        bandwidth = self.gpus * self.gpu.bandwidth_bytes_s * eff.bandwidth
        flops = self.gpus * self.gpu.dense_flops * eff.decode_compute
        return DecodeCurve(
            overhead=eff.overhead_s + self.allreduce_s(batch),
            memory=model.matmul_parameters * BF16_BYTES / bandwidth,
            memory_slope=model.kv_bytes_per_token / bandwidth,
            compute=2 * model.matmul_parameters * batch / flops,
            compute_slope=model.attention_flops_per_pair / flops,
        )

    def pass_curve(self, batch: int, draft: int) -> DecodeCurve:
        """The same of a pass in which each sequence has `draft` drafted tokens verified: weights and KV are read once, 1 + `draft`
        positions of each are computed."""
        plain, positions = self.curve(batch), 1 + draft
        return DecodeCurve(
            overhead=self.efficiency.overhead_s + self.allreduce_s(batch * positions),
            memory=plain.memory,
            memory_slope=plain.memory_slope,
            compute=plain.compute * positions,
            compute_slope=plain.compute_slope * positions,
        )

    def token_curve(self, batch: int, context: float, siblings: float) -> tuple[DecodeCurve, Draft]:
        """Seconds in which each of `batch` sequences gains a token, as `curve` without speculation, and the draft that the engine chooses
        at `context` tokens in all. `siblings`: of a sequence, done on this engine, on average."""
        if self.acceptance is None:
            return self.curve(batch), NO_DRAFT
        passes = [self.pass_curve(batch, draft) for draft in range(self.acceptance.draft + 1)]
        chosen = choose(self.acceptance, siblings, batch, [one.at(context) for one in passes])
        if not chosen.length:
            return passes[0], chosen
        one, each = passes[chosen.length], 1.0 / chosen.tokens
        return (
            DecodeCurve(
                overhead=(one.overhead + batch * self.acceptance.row_s) * each,
                memory=one.memory * each,
                memory_slope=one.memory_slope * each,
                compute=one.compute * each,
                compute_slope=one.compute_slope * each,
            ),
            chosen,
        )

    def allreduce_s(self, tokens: int) -> float:
        """Ring all-reduce of the activations of `tokens` tokens, twice a layer: each GPU sends 2 (g - 1) / g of them."""
        if self.gpus == 1:
            return 0.0
        payload = (
            2
            * (self.gpus - 1)
            / self.gpus
            * tokens
            * self.model.hidden
            * BF16_BYTES
            / self.gpu.nvlink_bytes_s
        )
        return 2 * self.model.layers * (self.efficiency.allreduce_latency_s + payload)

    def step_s(self, batch: int, context_tokens: float) -> float:
        """Seconds of one decode step of `batch` sequences that hold `context_tokens` together."""
        return self.curve(batch).at(context_tokens)

    def tokens_per_s(self, batch: int, context: float) -> float:
        """Tokens a second of `batch` sequences of `context` tokens each."""
        return batch / self.step_s(batch, batch * context)

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds to prefill `new_tokens` after `cached_tokens` whose KV is there.

        A re-prefill after a move is this with the prompt and all accepted tokens as `new_tokens`; a prompt that a sibling has left in this
        engine's cache is `cached_tokens`.
        """
        return self.prefill_many_s([(new_tokens, cached_tokens)])

    def prefill_many_s(self, parts: Sequence[tuple[int, int]]) -> float:
        """Seconds to prefill (new, cached) token counts together, in chunks: compute bound, but each chunk reads all weights."""
        tokens = sum(new for new, _ in parts)
        if not tokens:
            return 0.0
        model, eff = self.model, self.efficiency
        pairs = sum(new * cached + new * (new + 1) / 2 for new, cached in parts)
        work = 2 * model.matmul_parameters * tokens + model.attention_flops_per_pair * pairs
        compute = work / (self.gpus * self.gpu.dense_flops * eff.prefill_compute)
        chunks = math.ceil(tokens / self.prefill_chunk)
        read = model.matmul_parameters * BF16_BYTES / (self.gpus * self.gpu.bandwidth_bytes_s * eff.bandwidth)
        latency = 2 * model.layers * eff.allreduce_latency_s * (chunks - 1) if self.gpus > 1 else 0.0
        return chunks * eff.overhead_s + latency + self.allreduce_s(tokens) + max(compute, chunks * read)

    def max_batch(self, context: float) -> int:
        """Sequences of `context` tokens that fit, at least 1."""
        return max(1, min(self.max_sequences, math.floor(self.kv_capacity / max(1.0, context))))

    def plateau(self, context: float, share: float = 0.9) -> int:
        """The smallest batch at `context` tokens each that reaches `share` of the best throughput that fits.

        Throughput grows with the batch (each term of a step's cost grows at most in proportion), so bisection finds it.
        """
        if not 0 < share <= 1:
            raise ValueError(f"share {share} is not in (0, 1]")
        low, high = 1, self.max_batch(context)
        wanted = share * self.tokens_per_s(high, context)
        while low < high:
            middle = (low + high) // 2
            if self.tokens_per_s(middle, context) >= wanted:
                high = middle
            else:
                low = middle + 1
        return low


class Stretch(msgspec.Struct, frozen=True, gc=False):
    """`batch` sequences that hold `context` tokens together at step 0 and gain one each a step, with nothing else happening."""

    curve: DecodeCurve
    batch: int
    context: float

    def seconds(self, steps: float) -> float:
        """Time of the first `steps` steps. Step k (from 0) costs `curve.at(context + k * batch)`; fractions interpolate smoothly."""
        early, late = self._lines()
        bend = _bend(early, late)
        if steps <= bend:
            return _series(early, 0, steps)
        return _series(early, 0, bend) + _series(late, bend, steps)

    def steps(self, seconds: float) -> float:
        """How many steps (with a fraction) `seconds` are enough for: the inverse of `seconds`."""
        early, late = self._lines()
        bend = _bend(early, late)
        first = _series(early, 0, bend) if bend < math.inf else math.inf
        if seconds <= first:
            return _solve(early, 0, seconds)
        return _solve(late, bend, seconds - first)

    def _lines(self) -> tuple[Line, Line]:
        """The line that leads at step 0, then the other."""
        curve, batch = self.curve, self.batch
        memory = (
            curve.overhead + curve.memory + curve.memory_slope * self.context,
            curve.memory_slope * batch,
        )
        compute = (
            curve.overhead + curve.compute + curve.compute_slope * self.context,
            curve.compute_slope * batch,
        )
        return (memory, compute) if memory >= compute else (compute, memory)


Line = tuple[float, float]  # a step's cost, and what it grows by with each


def _bend(early: Line, late: Line) -> float:
    """The first whole step at which the other line leads; infinity when it never does."""
    (high, slope), (low, steeper) = early, late
    return math.ceil((high - low) / (steeper - slope)) if steeper > slope else math.inf


def _series(line: Line, start: float, end: float) -> float:
    """Sum over k from `start` to `end - 1` of cost + slope * k."""
    cost, slope = line
    count = end - start
    return count * (cost + slope * start) + slope * count * (count - 1) / 2 if count else 0.0


def _solve(line: Line, start: float, seconds: float) -> float:
    """The `end` at which the series from `start` has taken `seconds`: the root of slope/2 n^2 + (first - slope/2) n - seconds."""
    cost, slope = line
    linear = cost + slope * start - slope / 2
    if slope == 0:
        return start + seconds / linear
    # this form of the root loses no digits when slope is tiny
    return start + 2 * seconds / (linear + math.sqrt(linear * linear + 2 * slope * seconds))
