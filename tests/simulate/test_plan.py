"""A `run.toml` becomes the run to be played; what it does not say is assumed in the open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scavenger.config import read_run
from scavenger.errors import ConfigError
from scavenger.simulate import presets
from scavenger.simulate.lengths import Lognormal
from scavenger.simulate.plan import (
    RunAssumptions,
    TrainingSettings,
    assumptions,
    of_run,
    parse_model,
    read_model,
)
from trainer.model.offload import choose

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/site/run.toml"
# huggingface.co/Qwen/Qwen3-8B config.json, the keys that matter
QWEN3_8B: dict[str, Any] = {
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


def test_the_example_becomes_a_plan_that_tells_what_it_assumes() -> None:
    assumed = RunAssumptions(reserved_gpus=4)
    plan = of_run(read_run(EXAMPLE), presets.QWEN3_8B, presets.H100, assumed)
    assert (plan.name, plan.prompts, plan.samples, plan.lengths.cap, plan.most_engines, plan.max_batch) == (
        "math-1",
        64,
        8,
        8192,
        16,
        104,
    )
    assert isinstance(plan.lengths, Lognormal)
    assert plan.lengths.capped_share() == pytest.approx(0.05)
    assert (
        plan.summary()
        == "Qwen3-8B on 4 reserved H100, at most 16 harvested engines of 1, 64 prompts x 8 up to 8,192 tokens"
    )
    (said,) = assumptions(plan, assumed)
    assert "sigma 0.8, 5% reach the cap" in said


def test_a_run_that_may_not_harvest_gets_no_engines(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        EXAMPLE.read_text(encoding="utf-8").replace("#harvest = false", "harvest = false"), encoding="utf-8"
    )
    assert of_run(read_run(path), presets.QWEN3_8B, presets.H100, RunAssumptions(4)).most_engines == 0


def test_somebody_must_train() -> None:
    with pytest.raises(ConfigError, match="0 reserved GPUs"):
        of_run(read_run(EXAMPLE), presets.QWEN3_8B, presets.H100, RunAssumptions(0))


def test_a_model_is_read_by_its_config_json(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_8B), encoding="utf-8")
    assert read_model(folder) == presets.QWEN3_8B


def test_what_a_config_json_leaves_out_is_what_transformers_takes() -> None:
    old = {
        key: value
        for key, value in QWEN3_8B.items()
        if key not in ("num_key_value_heads", "head_dim", "tie_word_embeddings")
    }
    found = parse_model(old, "old", Path("config.json"))
    assert (found.kv_heads, found.head_dim, found.tied) == (32, 128, False)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_hidden_layers": 0}, "has no num_hidden_layers"),
        ({"vocab_size": "many"}, "has no vocab_size"),
        ({"num_experts": 128}, "mixture of experts"),
    ],
)
def test_a_model_that_cannot_be_costed_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_model(QWEN3_8B | change, "odd", Path("config.json"))


def test_a_model_that_is_not_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_model(tmp_path)


def test_the_training_job_is_played_with_the_settings_of_the_run(tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    path = tmp_path / "run.toml"
    assert text.count("\n[trainer]\n") == 1
    path.write_text(text.replace("\n[trainer]\n", "\n[trainer]\nactivation_checkpointing = true\n"))
    assumed = RunAssumptions(reserved_gpus=4)
    found = of_run(read_run(path), presets.QWEN3_8B, presets.H100, assumed).training
    assert found == TrainingSettings("auto", 0.85, True, 0, 16384, 30.0, 60.0)


@pytest.mark.parametrize(
    ("offload", "state_gb", "share", "expected"),
    [
        ("auto", 30.0, 0.85, True),
        ("auto", 10.0, 0.85, True),
        ("auto", 6.0, 0.85, False),
        ("always", 1.0, 0.1, True),
        ("never", 79.0, 0.9, False),
    ],
)
def test_training_state_leaves_where_it_would_live(
    offload: Any, state_gb: float, share: float, expected: bool
) -> None:
    """As `trainer.model.offload.choose` decides."""
    settings = TrainingSettings(offload, share)
    assert settings.offloads(state_gb * 1e9, presets.H100) is expected
    engine = int(share * presets.H100.memory_bytes)
    live = choose(
        offload, resident=int(state_gb * 1e9), engine=engine, capacity=int(presets.H100.memory_bytes)
    )
    assert live.offload is expected
