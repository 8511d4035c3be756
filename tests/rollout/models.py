"""Tiny models for the engine's tests: a config.json text, weights as a manifest, and a plain transformers forward to compare with."""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from scavenger.protocol.messages import EngineSpec
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Manifest, TensorView

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "vocab_size": 29,
    "tie_word_embeddings": True,
}


def config_text(model_type: str = "qwen3", **changes: Any) -> str:
    values = {"model_type": model_type, **SMALL, **changes}
    if model_type == "llama":
        values |= {"bos_token_id": 1, "eos_token_id": 2}
    return json.dumps(values)


def spec(
    text: str | None = None,
    *,
    dtype: str = "float64",
    max_batch: int = 16,
    context: int = 128,
    pace: float = 0.0,
    name: str = "reference",
) -> EngineSpec:
    return EngineSpec(name, text or config_text(), dtype, max_batch, context, pace)


def plain_model(text: str, seed: int = 0, scale: float = 6.0, dtype: torch.dtype = torch.float32) -> Any:
    """A transformers model, its weights scaled up so that the distribution is far from uniform."""
    values = json.loads(text)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.mul_(scale if "embed" not in name else 4.0)
    return model.to(dtype)


def weights(model: Any, version: int = 1) -> tuple[Manifest, memoryview]:
    """The model's weights as published: tied ones once, in the model's own dtype."""
    tensors: dict[str, tuple[str, tuple[int, ...], memoryview]] = {}
    for name, parameter in model.named_parameters():
        data = bytearray(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
        tensors[name] = (
            str(parameter.dtype).removeprefix("torch."),
            tuple(parameter.shape),
            memoryview(data),
        )
    return manifests.build(version, tensors)


def views(model: Any) -> list[TensorView]:
    manifest, blob = weights(model)
    return manifests.views(manifest, blob)
