"""Engine arguments that a run passes on to vLLM (`[engine.vllm]`): which it may, for which engines. Pure.

Engines of harvested jobs are processes of the daemon's user and run no code that a run brings. They take the options of `PLAIN`, which
are numbers, switches and names of vLLM's own choices; the admin may allow others (`harvest.vllm_options`). Reserved engines are processes
of the run's own user and take any option that is not ours (`OWNED`). Knows no vLLM: its class checks types where it is installed.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

#: Of the options of one run, as JSON.
MAX_CHARS = 16_384

_WEIGHTS = "weights and configuration come from the training job"
_LEDGER = "the ledger's tokens and logprobs depend on it"
_LAYOUT = "the number of GPUs of the engine's job says it"
#: Option -> what sets it, or why it may not be set.
OWNED: Mapping[str, str] = {
    "model": _WEIGHTS,
    "model_weights": _WEIGHTS,
    "load_format": _WEIGHTS,
    "model_loader_extra_config": _WEIGHTS,
    "hf_config_path": _WEIGHTS,
    "revision": _WEIGHTS,
    "download_dir": _WEIGHTS,
    "tokenizer": _WEIGHTS,
    "skip_tokenizer_init": _WEIGHTS,
    "generation_config": "sampling is the run's: [sampling]",
    "override_generation_config": "sampling is the run's: [sampling]",
    "trust_remote_code": "no engine runs code that a model brings",
    "worker_cls": "weights are loaded by a worker of ours",
    "worker_extension_cls": "weights are loaded by a worker of ours",
    "weight_transfer_config": "weights are loaded by a worker of ours",
    "dtype": "weights.dtype and run.deterministic say it",
    "max_model_len": "model.context_length says it",
    "max_num_seqs": "engine.max_batch says it",
    "gpu_memory_utilization": "engine.gpu_memory_share says it",
    "enforce_eager": "engine.eager says it",
    "tensor_parallel_size": _LAYOUT,
    "data_parallel_size": _LAYOUT,
    "nnodes": _LAYOUT,
    "node_rank": _LAYOUT,
    "master_addr": _LAYOUT,
    "master_port": _LAYOUT,
    "distributed_executor_backend": _LAYOUT,
    "scheduling_policy": _LEDGER,
    "logprobs_mode": _LEDGER,
    "max_logprobs": _LEDGER,
    "logits_processors": _LEDGER,
    "enable_log_requests": "prompts belong in no log",
    "disable_log_stats": "the worker reports them",
    "enable_sleep_mode": "reserved engines sleep, others do not",
}
#: What harvested engines take of any run: no path, no address, no class, no plugin.
PLAIN = frozenset(
    {
        "all2all_backend",
        "async_scheduling",
        "attention_backend",
        "block_size",
        "cudagraph_capture_sizes",
        "decode_context_parallel_size",
        "disable_cascade_attn",
        "disable_custom_all_reduce",
        "disable_hybrid_kv_cache_manager",
        "disable_sliding_window",
        "enable_chunked_prefill",
        "enable_dbo",
        "enable_eplb",
        "enable_expert_parallel",
        "enable_flashinfer_autotune",
        "enable_prefix_caching",
        "expert_placement_strategy",
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
        "language_model_only",
        "linear_backend",
        "long_prefill_token_threshold",
        "mamba_block_size",
        "mamba_cache_dtype",
        "max_cudagraph_capture_size",
        "max_num_batched_tokens",
        "moe_backend",
        "num_gpu_blocks_override",
        "optimization_level",
        "performance_mode",
        "pipeline_parallel_size",
        "prefix_caching_hash_algo",
        "quantization",
        "stream_interval",
        "watermark",
    }
)
#: vLLM's ways to quantise weights as it loads them. All others need files that were quantised before.
ONLINE = (
    "fp8",
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "int8_per_channel_weight_only",
    "mxfp8",
    "nvfp4_per_token",
)
#: Under which an engine does not tell the experts of its tokens.
ROUTING_FORBIDS = (
    "decode_context_parallel_size",
    "enable_eplb",
    "pipeline_parallel_size",
    "speculative_config",
)
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_LARGE = 2**53
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def fault(
    options: Mapping[str, Any], *, harvested: bool, allowed: Collection[str] = ()
) -> tuple[str, str] | None:
    """Cause and remedy where an engine must not take these options; None where it may. `allowed`: what the admin adds to `PLAIN`."""
    for name in sorted(options):
        if not _NAME.fullmatch(name):
            return f"engine.vllm: {name[:64]!r} is no option of vLLM's", "write options as vLLM's Python does"
        if name in OWNED:
            return f"engine.vllm.{name} cannot be set: {OWNED[name]}", "remove it"
        if name == "quantization" and options[name] not in (*ONLINE, None):
            return (
                f"engine.vllm.quantization = {options[name]!r} needs weights that were quantised before, and engines get the trainer's",
                f"set one of {', '.join(ONLINE)}",
            )
        if harvested and name not in allowed and not (name in PLAIN and _is_plain(options[name])):
            why = "its value is no number, switch or plain word" if name in PLAIN else "it is none of those"
            return (
                f"engine.vllm.{name}: {why} that harvested engines take of any run",
                f"remove it, ask the admin for harvest.vllm_options = [{json.dumps(name)}], or set run.harvest = false",
            )
    return None


def fault_of_text(text: str, *, harvested: bool, allowed: Collection[str] = ()) -> tuple[str, str] | None:
    """The same of options as an `EngineSpec` carries them."""
    try:
        options = decode(text)
    except ValueError as error:
        return f"engine.vllm: {error}", "run trainer, engines and daemon of one release"
    return fault(options, harvested=harvested, allowed=allowed)


def leaves_kv(engine: str, gpus: int) -> bool:
    """Whether an engine of this name and so many GPUs has the KV blocks of a finished request until they are taken (`Request.leaves_kv`).
    Those of vLLM over several GPUs are spread over them."""
    return engine == "reference" or gpus == 1


@functools.lru_cache(maxsize=64)
def keeps_prefixes(engine: str, options: str) -> bool:
    """Whether an engine of this name, with options as an `EngineSpec` carries them, finds the prefix of a later prompt in its KV cache. The
    reference engine computes each prompt whole. Options that are none say nothing."""
    try:
        return engine == "vllm" and decode(options).get("enable_prefix_caching") is not False
    except ValueError:
        return False


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= 256 and all(type(one) is int and 0 <= one < _LARGE for one in value)
    if isinstance(value, (int, float)):
        return 0 <= value < _LARGE  # no NaN, which is in no order
    return isinstance(value, str) and bool(_WORD.fullmatch(value))


def encode(options: Mapping[str, Any]) -> str:
    """As an `EngineSpec` carries them; "" for none. Raises `ValueError` beyond `MAX_CHARS`."""
    text = json.dumps(dict(options), sort_keys=True) if options else ""
    if len(text) > MAX_CHARS:
        raise ValueError(f"engine.vllm: {len(text):,} characters of options, {MAX_CHARS:,} at most")
    return text


def decode(text: str) -> dict[str, Any]:
    """What `encode` made. Raises `ValueError` for anything else."""
    found = json.loads(text) if text else {}
    if not isinstance(found, dict):
        raise ValueError(f"engine options are a table, not {type(found).__name__}")
    return found
