"""What a training step costs: synchronous micro-steps, toggling, publishing. Pure functions of token counts.

All ranks wait for the one with the most work, so a micro-step takes the maximum over ranks of its packed tokens' FLOPs, attention's
L^2 included (sequences are packed, each attends to itself alone). Knows nothing of when groups arrive: the driver's trainer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scavenger.simulate.decode import BF16_BYTES, GpuDatasheet, Model

Lengths = Sequence[int]  # tokens of each sequence, prompt and completion


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """One training job over `ranks` GPUs with fully sharded state.

    `compute`: share of the peak FLOPs that a micro-step reaches. `recompute`: activations are computed again in the backward pass (one
    more forward). `forwards`: forward passes beside the training one (reference, proximal). `link_bytes_s`: a rank's bandwidth for gathers.
    `state_bytes`: a parameter's fp32 master, two moments and gradient. `sleep_s`, `wake_s`: an engine's own part of the toggle.
    """

    model: Model
    gpu: GpuDatasheet
    ranks: int
    compute: float
    link_bytes_s: float
    nic_bytes_s: float
    overhead_s: float = 0.0
    recompute: bool = True
    forwards: int = 0
    state_bytes: int = 16
    sleep_s: float = 0.0
    wake_s: float = 0.0
    hash_bytes_s: float = float("inf")


def forward_flops(model: Model, lengths: Lengths) -> float:
    """2 FLOPs a weight and token, and causal attention: L (L + 1) / 2 pairs a sequence."""
    pairs = sum(length * (length + 1) for length in lengths) / 2
    return 2.0 * model.matmul_parameters * sum(lengths) + model.attention_flops_per_pair * pairs


def rank_s(spec: TrainerSpec, lengths: Lengths) -> float:
    """One rank's computing in a micro-step: forward 1, backward 2, once more forward to recompute, and the extra forwards."""
    passes = 3 + spec.recompute + spec.forwards
    return passes * forward_flops(spec.model, lengths) / (spec.gpu.dense_flops * spec.compute)


def gather_s(spec: TrainerSpec) -> float:
    """A micro-step's traffic of fully sharded parameters: gathered for each pass but two share one, gradients (fp32) reduce-scattered."""
    if spec.ranks == 1:
        return 0.0
    other_ranks = (spec.ranks - 1) / spec.ranks
    gathers = (2 + spec.forwards) * spec.model.parameters * BF16_BYTES * other_ranks
    return (gathers + spec.model.parameters * 4 * other_ranks) / spec.link_bytes_s


def micro_step_s(spec: TrainerSpec, by_rank: Sequence[Lengths]) -> float:
    """One synchronous micro-step: the slowest rank, or the traffic where that takes longer (it overlaps). Raises on a missing rank."""
    if len(by_rank) != spec.ranks:
        raise ValueError(
            f"{len(by_rank)} ranks have work and there are {spec.ranks}: give the others an empty list"
        )
    return spec.overhead_s + max(gather_s(spec), *(rank_s(spec, lengths) for lengths in by_rank))


def pack(
    model: Model, lengths: Lengths, ranks: int, token_budget: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Micro-steps of ranks of lengths: the costliest first, each to the rank with the least work so far.

    A rank holds at most `token_budget` tokens; a sequence longer than that goes alone. Every sequence is in exactly one place.
    """
    steps: list[list[list[int]]] = []
    tokens: list[list[int]] = []  # tokens
    work: list[list[float]] = []
    least: list[int] = []  # tokens of each micro-step's emptiest rank
    for length in sorted(lengths, reverse=True):
        position = _micro_step_with_room(tokens, work, least, length, token_budget)
        if position is None:
            steps.append([[] for _ in range(ranks)])
            tokens.append([0] * ranks)
            work.append([0.0] * ranks)
            least.append(0)
            position = (len(steps) - 1, 0)
        step, rank = position
        steps[step][rank].append(length)
        tokens[step][rank] += length
        least[step] = min(tokens[step])
        work[step][rank] += forward_flops(model, [length])
    return tuple(tuple(tuple(rank) for rank in step) for step in steps)


def _micro_step_with_room(
    tokens: list[list[int]], work: list[list[float]], least: list[int], length: int, budget: int
) -> tuple[int, int] | None:
    """The least loaded rank, in the first micro-step that has room for `length`. `tokens`: each rank's tokens; `least`: of each step's."""
    left = budget - length
    for index, fewest in enumerate(least):
        if fewest <= left or not fewest:
            ranks = zip(work[index], tokens[index], strict=True)
            return index, min(
                [(done, rank) for rank, (done, has) in enumerate(ranks) if has <= left or not has]
            )[1]
    return None


def optimizer_s(spec: TrainerSpec) -> float:
    """Each rank reads and writes its shard of the state once (bandwidth bound), and writes the bf16 cast."""
    return (
        spec.model.parameters / spec.ranks * (2 * spec.state_bytes + BF16_BYTES) / spec.gpu.bandwidth_bytes_s
    )


def state_bytes_per_gpu(spec: TrainerSpec) -> float:
    """Training state on one GPU: what a reserved engine's KV loses while the state stays (`SimulatedEngine.with_resident`)."""
    return spec.model.parameters * spec.state_bytes / spec.ranks


def to_training_s(spec: TrainerSpec, offloaded: bool) -> float:
    """The toggle from generating: the engine gives its memory back; state that was offloaded comes back over PCIe."""
    return spec.sleep_s + (state_bytes_per_gpu(spec) / spec.gpu.host_bytes_s if offloaded else 0.0)


def to_generating_s(spec: TrainerSpec, offload: bool, engine_gpus: int = 1) -> float:
    """The toggle to generating: state goes to host memory, the engine takes memory again and its weights from the host."""
    weights_s = spec.model.weight_bytes / engine_gpus / spec.gpu.host_bytes_s
    return spec.wake_s + weights_s + (state_bytes_per_gpu(spec) / spec.gpu.host_bytes_s if offload else 0.0)


def publish_s(spec: TrainerSpec) -> float:
    """From the optimizer's end to a manifest: each rank casts and hashes its shard."""
    return spec.model.weight_bytes / spec.ranks / spec.hash_bytes_s
