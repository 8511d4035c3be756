"""What of a run decides whether engines keep its adapters beside their base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scavenger.config import RunConfig
from scavenger.errors import ConfigError
from trainer.serving import adapters_beside_base

EIGHT = json.dumps(
    {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    }
)


def run(
    engine: str = "vllm",
    tokens: int = 1024,
    vllm: dict[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
    eager: bool = False,
    **lora: Any,
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 1, "state_dir": Path("/s"), "out_dir": Path("/o")},
            "model": {"path": Path("/m"), "context_length": 32768},
            "engine": {"name": engine, "eager": eager, "vllm": vllm or {}},
            "algorithm": algorithm or {},
            "sampling": {"max_tokens": tokens},
            "lora": {"rank": 16} | lora,
        }
    )


def test_the_prediction_decides_unless_it_is_set() -> None:
    short, long = run(tokens=1024), run(tokens=32_000)
    assert adapters_beside_base(short, EIGHT, "cuda")[0]
    assert not adapters_beside_base(long, EIGHT, "cuda")[0]
    assert adapters_beside_base(short, EIGHT, "cpu")[0], "merging 8 billion weights on a core takes minutes"
    assert adapters_beside_base(run(tokens=1024, serve="merged"), EIGHT, "cuda") == (
        False,
        "merged, as it is set",
    )
    assert adapters_beside_base(run(tokens=32_000, serve="unmerged"), EIGHT, "cuda") == (
        True,
        "unmerged, as it is set",
    )


def test_the_reference_engine_keeps_adapters_beside_their_base_where_it_is_told_to() -> None:
    said = "merged: the reference engine keeps adapters beside their base only where it is told to"
    assert adapters_beside_base(run("reference"), EIGHT, "cpu") == (False, said)
    assert adapters_beside_base(run("reference", serve="unmerged"), EIGHT, "cpu")[0]


def test_a_run_that_trains_all_weights_has_nothing_to_choose() -> None:
    assert adapters_beside_base(run(rank=0, serve="unmerged"), EIGHT, "cuda") == (False, "")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"rank": 1024}, "vLLM keeps adapters of rank 512 at most beside their base"),
        (
            {"algorithm": {"router_replay": True}, "eager": True},
            "algorithm.router_replay was not tried with adapters beside their base",
        ),
        (
            {"vllm": {"quantization": "fp8"}, "algorithm": {"importance": "truncate"}},
            "engine.vllm.quantization was not tried with adapters beside their base",
        ),
    ],
)
def test_what_cannot_be_is_merged_by_itself_and_refused_where_it_is_asked_for(
    config: dict[str, Any], why: str
) -> None:
    assert adapters_beside_base(run(**config), EIGHT, "cuda") == (False, f"merged: {why}")
    with pytest.raises(ConfigError, match=f"lora.serve = 'unmerged': {why}"):
        adapters_beside_base(run(**config, serve="unmerged"), EIGHT, "cuda")
