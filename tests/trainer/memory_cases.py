"""Runs small enough for a CPU whose memory is measured and predicted: dense, with experts, full and LoRA, on 1 to 8 ranks that cut layers,
share samples or hold replicas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from scavenger.sizing.shape import ModelShape, of_config
from scavenger.sizing.training import TrainJob

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def config(model_type: str, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    } | more


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "decoder_sparse_step": 1}
QWEN = config("qwen3", tie_word_embeddings=True)
LLAMA = config("llama")
WIDE = config("qwen3", num_key_value_heads=8)
MOE = config("qwen3_moe", **EXPERTS)


@dataclass(frozen=True)
class Case:
    config: dict[str, Any] = field(hash=False)
    ranks: int
    tokens: int
    compute: int = 2
    recompute: bool = False
    head_chunk: int = 1024
    lora_rank: int = 0
    targets: tuple[str, ...] = ()
    reference: bool = False
    rows: int = 1
    padded: bool = False
    tensor: int = 1
    replicas: int = 1
    context: int = 1

    @property
    def exact(self) -> bool:
        """A deterministic run computes in float64."""
        return self.compute == 8

    @property
    def shape(self) -> ModelShape:
        return of_config(self.config)

    @property
    def job(self) -> TrainJob:
        shape = self.shape
        return TrainJob(
            self.ranks,
            80.0,
            self.tokens,
            self.recompute,
            shape.adapters(self.lora_rank, self.targets) if self.lora_rank else shape.parameters,
            self.reference and not self.lora_rank,
            False,
            0.9,
            1,
            head_chunk=self.head_chunk,
            lora_rank=self.lora_rank,
            targets=self.targets,
            compute=self.compute,
            master=8 if self.exact else 4,
            flash=False,
            tensor=self.tensor,
            replicas=self.replicas,
            context=self.context,
        )


CASES = {
    "dense": Case(QWEN, 1, 512),
    "dense, float32": Case(QWEN, 1, 512, 4),
    "dense, 8 ranks": Case(QWEN, 8, 512),
    "dense, 8 ranks, few tokens": Case(QWEN, 8, 64),
    "dense, 8 ranks, recomputed": Case(QWEN, 8, 1024, recompute=True),
    "dense, 8 ranks, layers cut": Case(QWEN, 8, 512, tensor=2),
    "dense, layers cut, recomputed": Case(LLAMA, 2, 1024, recompute=True, tensor=2),
    "dense, layers cut in 4": Case(WIDE, 8, 512, tensor=4),
    "dense, layers cut in 8": Case(WIDE, 8, 512, tensor=8),
    "dense, two replicas": Case(QWEN, 8, 512, replicas=2),
    "dense, two replicas, layers cut": Case(QWEN, 8, 512, tensor=2, replicas=2),
    "dense, samples shared by 2": Case(QWEN, 8, 512, context=2),
    "dense, several samples": Case(LLAMA, 2, 512, 4, rows=4),
    "dense, padded": Case(QWEN, 1, 512, 4, rows=4, padded=True),
    "dense, deterministic": Case(LLAMA, 2, 256, 8, head_chunk=0, rows=2, padded=True),
    "dense, reference model": Case(LLAMA, 2, 256, reference=True),
    "large vocabulary": Case(LLAMA | {"vocab_size": 16384, "num_hidden_layers": 2}, 8, 32),
    "large tied vocabulary": Case(QWEN | {"vocab_size": 16384, "num_hidden_layers": 2}, 8, 32),
    "large vocabulary, whole head": Case(
        LLAMA | {"vocab_size": 4096, "num_hidden_layers": 2}, 8, 256, head_chunk=0
    ),
    "small head chunks": Case(QWEN | {"vocab_size": 4096, "num_hidden_layers": 2}, 8, 256, head_chunk=64),
    "LoRA": Case(QWEN, 2, 512, lora_rank=8, targets=ALL),
    "LoRA, layers cut": Case(QWEN, 4, 512, lora_rank=8, targets=ALL, tensor=2),
    "LoRA, some layers": Case(QWEN, 1, 512, 4, lora_rank=8, targets=("q_proj", "v_proj")),
    "LoRA, reference": Case(LLAMA, 2, 256, lora_rank=8, targets=ALL, reference=True),
    "experts": Case(MOE, 1, 512),
    "experts, 8 ranks, few tokens": Case(MOE, 8, 16, 4),
    "experts, 8 ranks, recomputed": Case(MOE, 8, 512, recompute=True),
    "experts, layers cut": Case(MOE, 8, 512, tensor=2),
    "experts, layers cut in 8": Case(MOE | {"num_key_value_heads": 8}, 8, 512, tensor=8),
    "experts, two replicas": Case(MOE, 8, 256, replicas=2),
    "experts, some layers": Case(MOE | {"mlp_only_layers": [0, 1]}, 4, 256, 4),
    "experts, LoRA": Case(MOE, 8, 256, lora_rank=8, targets=("q_proj", "v_proj")),
}
