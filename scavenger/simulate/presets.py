"""GPUs, models and engines by name. Every constant has its source in the comment above it; what was assumed says so.

Datasheets give the hardware, config.json the models. The efficiencies are the free parameters: `VLLM_H100` is fitted to one engine's
published measurements; measure yours and fit them with `calibrate.py` before a figure is believed.

`Stack` is the published setting of RLBoost's evaluation (arXiv 2510.19225; its code is PolyRL, github.com/Terra-Flux/PolyRL): what its
scripts fix is taken from them, and what is not published was chosen by a few of its points (`benchmarks/published.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from scavenger.errors import ConfigError
from scavenger.simulate.decode import Efficiency, GpuDatasheet, Model, SimulatedEngine
from scavenger.simulate.startup import ColdStart, StartupPhase
from scavenger.simulate.trainer_model import TrainerSpec

MIB = 2**20
T = TypeVar("T")

# NVIDIA H100 datasheet, SXM: 3.35 TB/s HBM3, 1,979 TFLOPS bf16 with sparsity (989.4 dense), NVLink 900 GB/s both ways, PCIe 5 x16
# 128 GB/s both ways. Memory: what `nvidia-smi` shows of the 80 GB.
H100 = GpuDatasheet("H100", 81_559 * MIB, 3.35e12, 989.4e12, 450e9, 64e9)
# NVIDIA H200 datasheet, SXM: 141 GB HBM3e, 4.8 TB/s; compute, NVLink and PCIe as H100. Memory: `nvidia-smi`.
H200 = GpuDatasheet("H200", 143_771 * MIB, 4.8e12, 989.4e12, 450e9, 64e9)
# NVIDIA A100 datasheet (nvidia-1758950-r4), 80GB SXM: 2,039 GB/s HBM2e, 312 TFLOPS bf16 dense, NVLink 600 GB/s both ways, PCIe 4 x16
# 64 GB/s both ways. Memory: `nvidia-smi`.
A100 = GpuDatasheet("A100", 81_920 * MIB, 2.039e12, 312e12, 300e9, 32e9)

# huggingface.co/Qwen/Qwen3-8B config.json: num_hidden_layers, hidden_size, num_attention_heads, num_key_value_heads, head_dim,
# intermediate_size, vocab_size, tie_word_embeddings. Its card says 8.2B parameters, 6.95B without embeddings.
QWEN3_8B = Model("Qwen3-8B", 36, 4096, 32, 8, 128, 12_288, 151_936)
# huggingface.co/Qwen/Qwen3-14B config.json. Its card says 14.8B parameters, 13.2B without embeddings.
QWEN3_14B = Model("Qwen3-14B", 40, 5120, 40, 8, 128, 17_408, 151_936)
# huggingface.co/Qwen/Qwen3-32B config.json. Its card says 32.8B parameters, 31.2B without embeddings.
QWEN3_32B = Model("Qwen3-32B", 64, 5120, 64, 8, 128, 25_600, 151_936)

# Uncalibrated. bandwidth and overhead: together they give the 75 tok/s that johnmusgrave.com/p/vllm-throughput-latency-sweep-on measured
# (Llama-3.1-8B bf16, batch 1, A100 40GB, vLLM 0.23: 77 % of the peak bandwidth); how they split is assumed, and that other GPUs are alike.
# decode_compute, prefill_compute: assumed (dense matrix products of this size). memory_share: vLLM's long-time default of
# gpu_memory_utilization. allreduce_latency_s: assumed (an intra-node all-reduce of some KB).
UNCALIBRATED = Efficiency(
    bandwidth=0.81,
    decode_compute=0.6,
    overhead_s=1.2e-3,
    prefill_compute=0.55,
    memory_share=0.9,
    allreduce_latency_s=10e-6,
)

# Measured median seconds between tokens by (batch, mean context): Qwen3-8B bf16 on one H100 80GB, vLLM 0.30, from
# github.com/tgarg01/silybench-data derived/csv/perf_points.csv, run 20260924T125045Z (workloads balanced-2048-2048, chat-128-128 and
# decode-128-1024 while nothing queued; the context is the prompt and half the completion).
VLLM_H100_STEPS: Mapping[tuple[int, int], float] = {
    (1, 3072): 6.998e-3,
    (4, 3072): 7.527e-3,
    (16, 3072): 9.464e-3,
    (32, 3072): 11.865e-3,
    (48, 3072): 14.574e-3,
    (64, 3072): 17.053e-3,
    (1, 192): 6.826e-3,
    (4, 192): 6.922e-3,
    (16, 192): 7.139e-3,
    (32, 192): 7.397e-3,
    (64, 192): 8.148e-3,
    (128, 192): 9.339e-3,
    (1, 640): 6.858e-3,
    (4, 640): 7.009e-3,
    (16, 640): 7.530e-3,
    (32, 640): 8.110e-3,
    (64, 640): 9.494e-3,
    (128, 640): 12.004e-3,
    (256, 640): 18.084e-3,
}
# `calibrate.fit` of these 19 points: 2.6 % rms, 6.6 % at worst (tests/simulate/test_presets.py fits again). Its compute share stands for
# all that grows with the batch. The rest as above. For other GPUs and models: assumed alike.
VLLM_H100 = Efficiency(
    bandwidth=0.825,
    decode_compute=0.246,
    overhead_s=1.48e-3,
    prefill_compute=0.55,
    memory_share=0.9,
    allreduce_latency_s=10e-6,
)

# vLLM's own start-up lines as users report them. container: 16 s to the engine's config (vllm-project/vllm issue 44881). imports: what
# 59 s until the first answer leave beside 34 s of engine initialisation and the container (issue 20264), about 10 s. compiling: 34 s of
# initialisation with torch.compile's cache warm, graph capture included (issue 20264). load: 21.8 GiB in 18 s (issue 44881).
# The spreads are assumed.
WARM_CACHE = ColdStart(
    StartupPhase(16.0, 0.4),
    StartupPhase(10.0, 0.3),
    StartupPhase(34.0, 0.3),
    load_bytes_s=1.3e9,
    load_spread=0.4,
)
# The same with nothing compiled before: 43 s of torch.compile (issue 44881) where the warm cache took 7.5 s (issue 20264).
COLD_CACHE = ColdStart(
    StartupPhase(16.0, 0.4),
    StartupPhase(10.0, 0.3),
    StartupPhase(70.0, 0.3),
    load_bytes_s=1.3e9,
    load_spread=0.4,
)

GPUS: Mapping[str, GpuDatasheet] = {gpu.name: gpu for gpu in (H100, H200, A100)}
MODELS: Mapping[str, Model] = {model.name: model for model in (QWEN3_8B, QWEN3_14B, QWEN3_32B)}


def gpu(name: str) -> GpuDatasheet:
    """A GPU by its name, whatever its case. Raises `ConfigError` naming the known ones."""
    return _known("GPU", name, GPUS)


def model(name: str) -> Model:
    """A model by its name, whatever its case, with or without `Qwen/`. Raises `ConfigError` naming the known ones."""
    return _known("model", name.rpartition("/")[2], MODELS)


def engine(
    model_name: str, gpu_name: str, gpus: int = 1, efficiency: Efficiency = VLLM_H100
) -> SimulatedEngine:
    """An engine of this model on `gpus` of these GPUs. Raises `ConfigError` when the weights leave no memory for KV."""
    return SimulatedEngine(model(model_name), gpu(gpu_name), efficiency, gpus)


def _known(what: str, name: str, table: Mapping[str, T]) -> T:
    for key, value in table.items():
        if key.lower() == name.lower():
            return value
    raise ConfigError(f"no preset for the {what} {name!r}", f"use one of {', '.join(sorted(table))}")


# ---------------------------------------------------------------- the published setting

GBPS = 1e9 / 8


@dataclass(frozen=True, slots=True)
class Stack:
    """What is the same in all rows: taken from the scripts, calibrated, or assumed, as the comments say."""

    # examples/scripts/run_sync_grpo8b_default.sh, run_async_grpo8b_pipeline.sh, launch_sglang_8b.sh
    prompts: int = 128
    samples_per_prompt: int = 8
    cap: int = 14_336
    engine_gpus: int = 2
    memory_share: float = 0.6
    max_sequences: int = 256
    token_budget: int = 16_384
    min_stream_samples: int = 16
    forwards: int = 2  # old log-probabilities, and the reference for the KL loss
    recompute: bool = True  # enable_gradient_checkpointing
    offload_optimizer: bool = True
    # the setting: spot pairs at 50 Gbps, the trainer's front end at 200 Gbps
    engine_bytes_s: float = 50 * GBPS
    trainer_bytes_s: float = 200 * GBPS
    # calibrated, together, on the rows that say so
    training_compute: float = 0.6  # of the peak, over all passes, recomputing included
    engine_overhead_s: float = 5e-3  # a decode step's time beside the GPU's: scheduling and streaming, tensor parallel over processes
    mean_tokens: float = 9500.0
    # assumed
    sigma: float = 0.6
    correlation: float = 0.5
    prompt_tokens: int = 180  # of at most 512
    micro_step_overhead_s: float = 0.3
    link_bytes_s: float = 400e9  # gathers over NVLink
    link_bytes_s_many_nodes: float = 50e9  # a 400 Gbps interface a GPU
    sleep_s: float = 2.0
    wake_s: float = 3.0
    hash_bytes_s: float = 2e9


STACK = Stack()


def trainer_of(model: Model, gpu: GpuDatasheet, ranks: int, stack: Stack = STACK) -> TrainerSpec:
    """The setting's trainer, for any model and GPU: nodes have eight GPUs."""
    return TrainerSpec(
        model,
        gpu,
        ranks=ranks,
        compute=stack.training_compute,
        link_bytes_s=stack.link_bytes_s if ranks <= 8 else stack.link_bytes_s_many_nodes,
        nic_bytes_s=stack.trainer_bytes_s,
        overhead_s=stack.micro_step_overhead_s,
        recompute=stack.recompute,
        forwards=stack.forwards,
        sleep_s=stack.sleep_s,
        wake_s=stack.wake_s,
        hash_bytes_s=stack.hash_bytes_s,
    )
