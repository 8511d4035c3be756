"""Each rank reads its shards alone: what lies in the model then is what the whole load puts there, for any number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

from scavenger.errors import ConfigError
from tests.trainer import published
from tests.trainer.load_program import LORA, contents, learner_of
from trainer.model import adapters, sharded_load
from trainer.model.learner import load_model

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {
    "vocab_size": 26,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", "tie_word_embeddings": False, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "moe": {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "decoder_sparse_step": 1,
    },
    "fused": {"model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2, "tie_word_embeddings": False},
}  # fmt: skip
KINDS = {
    "dense": "dense",
    "tied": "tied",
    "moe": "moe",
    "tied-lora": "tied",
    "dense-wide": "dense",
    "moe-wide-reference": "moe",
}
Maker = Callable[[str], Path]


def as_on_the_hub(name: str, value: Tensor) -> dict[str, Tensor]:
    """Experts one by one, as the files of Qwen3-MoE hold them."""
    if ".mlp.experts.gate_up_proj" in name:
        before = name.removesuffix("gate_up_proj")
        halves = {"gate_proj": value.chunk(2, 1)[0], "up_proj": value.chunk(2, 1)[1]}
        return {
            f"{before}{expert}.{side}.weight": half[expert].contiguous()
            for side, half in halves.items()
            for expert in range(len(value))
        }
    if ".mlp.experts.down_proj" in name and "bias" not in name:
        before = name.removesuffix("down_proj")
        return {f"{before}{expert}.down_proj.weight": value[expert].clone() for expert in range(len(value))}
    return {name: value}


def write(folder: Path, kind: str) -> None:
    """bfloat16, in two files; `moe` with experts one by one."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE | MODELS[kind]))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        tensors: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            value = torch.randn_like(parameter).mul_(0.1).detach()
            tensors |= as_on_the_hub(name, value) if kind == "moe" else {name: value}
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({name: tensors[name] for name in some}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, some in parts.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            write(made[kind], kind)
        return made[kind]

    return make


def whole(folder: Path, kind: str) -> dict[str, Tensor]:
    """As every rank loaded it before: all of it, by transformers."""
    model = load_model(folder, torch.float64 if "wide" in kind else torch.float32)
    if "lora" in kind:
        adapters.inject(model, LORA)
    found = contents(model)
    return (
        found | {f"reference.{name}": value for name, value in found.items()}
        if "reference" in kind
        else found
    )


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert torch.equal(ours[name], value), name


def launch(ranks: int, out: Path, jobs: dict[str, Path]) -> None:
    program = str(Path(__file__).with_name("load_program.py"))
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    asked = [f"{kind}={folder}" for kind, folder in jobs.items()]
    done = subprocess.run(
        [sys.executable, program, str(ranks), str(out), *asked],
        env=environ,
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_holds_what_the_whole_load_puts_there(kind: str, folder_of: Maker, mesh: DeviceMesh) -> None:
    """Parameters and buffers bit by bit, one parameter for tied weights, and the published root."""
    folder = folder_of(KINDS[kind])
    learner = learner_of(folder, mesh, kind)
    held = contents(learner.model)
    if learner._reference is not None:
        held |= {f"reference.{name}": value for name, value in contents(learner._reference).items()}
    same(held, whole(folder, kind))
    assert not any(value.is_meta for value in learner.model.buffers())
    if "tied" in kind:
        assert learner.model.lm_head.weight is learner.model.model.embed_tokens.weight
    model = load_model(folder, learner.dtype)
    if "lora" in kind:
        adapters.inject(model, LORA)
    fresh = learner_of(folder, mesh, kind)
    fresh.model = model  # not sharded at all
    ours, theirs = (published.build_version(1, one, "bfloat16")[0] for one in (learner, fresh))
    assert ours.root == theirs.root


@pytest.fixture(scope="module")
def left_by(folder_of: Maker, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """What so many ranks left behind; starting them is slow, so one launch does it all."""
    made: dict[int, Path] = {}

    def make(ranks: int) -> Path:
        if ranks not in made:
            out = made[ranks] = tmp_path_factory.mktemp("ranks")
            jobs = {kind: folder_of(model) for kind, model in KINDS.items() if "reference" not in kind}
            if ranks == 4:
                write_large(out / "large")
                jobs["memory-sharded"] = out / "large"
            launch(ranks, out, jobs)
        return made[ranks]

    return make


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_holds_what_the_whole_load_puts_there(
    ranks: int, folder_of: Maker, left_by: Callable[[int], Path]
) -> None:
    for kind, model in KINDS.items():
        if "reference" in kind:
            continue
        same(load_file(left_by(ranks) / f"{kind}.safetensors"), whole(folder_of(model), kind))


def test_fused_experts_that_are_stored_so_are_read_by_ranges(folder_of: Maker) -> None:
    model, plan = sharded_load.begin(folder_of("fused"), torch.float32, "eager")
    assert all(value.untyped_storage().nbytes() <= 4 for value in model.parameters()), "no memory yet"
    expected = load_model(folder_of("fused"), torch.float32, "eager")
    for name, value in expected.named_parameters():
        rows = slice(1, max(2, len(value) - 1))
        part = torch.empty_like(value[rows])
        plan._read(name, part, (rows, *(slice(0, size) for size in value.shape[1:])))
        assert torch.equal(part, value[rows]), name


def changed(folder: Path, out: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """The folder in one file, with another content."""
    out.mkdir()
    tensors = {
        name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()
    }
    change(tensors)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text((folder / "config.json").read_text())
    return out


def drop(tensors: dict[str, Tensor], name: str) -> None:
    del tensors[name]


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        ("dense", "model.layers.1.mlp.up_proj.weight", r"of two models: model\.layers\.1\.mlp\.up_proj\.weight is not in"),
        ("moe", "model.layers.1.mlp.experts.4.up_proj.weight", r"model\.layers\.1\.mlp\.experts\.gate_up_proj cannot be made"),
        ("moe", "model.layers.0.mlp.experts.5.down_proj.weight", r"down_proj has the shape \(5, 16, 12\) there, not \(6, 16, 12\)"),
        ("tied", "model.embed_tokens.weight", r"is not in the weight files"),
    ],
)  # fmt: skip
def test_a_missing_tensor_is_refused_by_the_heads_alone(
    kind: str, name: str, why: str, folder_of: Maker, tmp_path: Path
) -> None:
    folder = changed(folder_of(kind), tmp_path / "m", lambda tensors: drop(tensors, name))
    for ask in (sharded_load.check, lambda folder: sharded_load.begin(folder, torch.float32)):
        with pytest.raises(ConfigError, match=why):
            ask(folder)


def test_a_tensor_of_another_shape_or_a_damaged_file_is_refused(folder_of: Maker, tmp_path: Path) -> None:
    def cut(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()

    folder = changed(folder_of("dense"), tmp_path / "m", cut)
    with pytest.raises(ConfigError, match=r"lm_head\.weight has the shape \(25, 16\) there, not \(26, 16\)"):
        sharded_load.check(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:400])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        sharded_load.check(folder)
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        sharded_load.check(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        sharded_load.check(folder)


def test_heads_are_read_of_a_file_that_is_larger_than_the_host_s_memory(tmp_path: Path) -> None:
    """One file of a 32B model on a login node: the kernel maps it to be read, and refuses to map it to be written."""
    rows = published.larger_than_memory(tmp_path)
    assert [(name, one.shape) for name, one in sharded_load._heads(tmp_path).items()] == [
        ("large", (rows, 4096))
    ]


def test_tied_weights_may_be_stored_twice_if_they_are_the_same(folder_of: Maker, tmp_path: Path) -> None:
    def twice(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def only_the_head(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    def differing(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1.0

    sharded_load.check(changed(folder_of("tied"), tmp_path / "twice", twice))
    sharded_load.check(changed(folder_of("tied"), tmp_path / "head", only_the_head))
    with pytest.raises(ConfigError, match=r"ties (.|\n)*two different ones(.|\n)*tie_word_embeddings"):
        sharded_load.check(changed(folder_of("tied"), tmp_path / "differing", differing))


def test_quantised_weights_are_refused(folder_of: Maker, tmp_path: Path) -> None:
    folder = changed(folder_of("dense"), tmp_path / "m", lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="quantised weights, which cannot be trained"):
        sharded_load.check(folder)


def write_large(folder: Path) -> None:
    """110 M parameters: enough that what a process takes by itself does not count."""
    folder.mkdir()
    large = SHAPE | {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
    }
    large |= {"num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    (folder / "config.json").write_text(json.dumps(large))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    weights = {
        name: torch.full(value.shape, 0.01, dtype=torch.bfloat16) for name, value in model.named_parameters()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_four_ranks_take_at_most_1_2_times_what_they_keep(left_by: Callable[[int], Path]) -> None:
    """Peaks of /proc beyond what each process had before; each rank with the whole model would take five times as much."""
    found = [json.loads((left_by(4) / f"memory-sharded-{rank}.json").read_text()) for rank in range(4)]
    kept = sum(one["kept"] for one in found)
    assert kept > 400e6
    assert sum(one["peak"] for one in found) < 1.2 * kept
