"""Public models, as their config.json on huggingface.co/Qwen gives them: Qwen3-0.6B to 32B and Qwen3-30B-A3B."""

from __future__ import annotations

from typing import Any

from scavenger.sizing.shape import ModelShape, of_config


def qwen3(layers: int, hidden: int, heads: int, inner: int, *, tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": inner,
        "vocab_size": 151_936,
        "tie_word_embeddings": tied,
    }


CONFIGS = {
    "0.6B": qwen3(28, 1024, 16, 3072, tied=True),
    "1.7B": qwen3(28, 2048, 16, 6144, tied=True),
    "4B": qwen3(36, 2560, 32, 9728, tied=True),
    "8B": qwen3(36, 4096, 32, 12288),
    "14B": qwen3(40, 5120, 40, 17408),
    "32B": qwen3(64, 5120, 64, 25600),
    "30B-A3B": qwen3(48, 2048, 32, 6144)
    | {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
MODELS: dict[str, ModelShape] = {name: of_config(config) for name, config in CONFIGS.items()}
