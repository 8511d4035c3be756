"""However the ranks of a training job are divided, they take the step of one rank: replicas, context and tensor parallelism, products."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

from rollout.engines import checksum, lora
from scavenger.config import TrainerSection
from scavenger.errors import ConfigError
from tests.trainer.mesh_program import KINDS, LONG, LORA, LOST, make_learner, step
from trainer import tiny
from trainer.checkpoint import checkpoint
from trainer.loop import comm
from trainer.model import adapters
from trainer.model.mesh import Division, check_heads, divide

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ("plain", "plain-reference", "plain-lora", "plain-experts")
ON_TWO = (
    "context-2",
    "replicas-2",
    "context-2-reference",
    "tensor-2",
    "tensor-2-whole-head",
    "tensor-2-lora",
    "tensor-2-experts",
    "replicas-2-prefixes",
    "tensor-2-prefixes",
)
ON_FOUR = ("replicas-2-context-2-lora", "tensor-2-context-2")
ON_FOUR_LONG = (
    "replicas-2",
    "replicas-4",
    "context-2",
    "context-4",
    "replicas-2-context-2",
    "replicas-2-reference",
    "replicas-2-lora",
    "replicas-2-context-2-experts",
    "tensor-2",
    "tensor-2-replicas-2",
    "tensor-2-lora",
    "tensor-2-experts",
)
DIVIDED = [
    *(pytest.param(kind, 2) for kind in ON_TWO),
    *(pytest.param(kind, 4) for kind in ON_FOUR),
    *(pytest.param(kind, 4, marks=pytest.mark.long) for kind in ON_FOUR_LONG),
]


#: Four heads that share two of keys and values; of the first, a layer sees six tokens back, and widths are no multiples of four.
MODELS: dict[str, dict[str, Any]] = {
    "dense": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"],
        "intermediate_size": 90,
    },
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}


def make_model(folder: Path, kind: str) -> Path:
    config = tiny.model_config(hidden=32, layers=2) | {"head_dim": 8} | MODELS[kind]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        weights = {name: value + 0.05 * torch.randn(value.shape) for name, value in model.named_parameters()}
    save_file(
        {name: value.detach() for name, value in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


@dataclass
class Steps:
    """What one rank, two and four leave behind (see `mesh_program`), each made when it is first asked for."""

    models: dict[str, Path]
    out: Path
    mesh: DeviceMesh

    def model(self, kind: str) -> Path:
        return self.models["experts" if kind.endswith("experts") else "dense"]

    def of(self, kind: str, ranks: int) -> Path:
        folder = self.out / f"{kind}-{ranks}"
        if not folder.exists():
            on_four = ON_FOUR if kind in ON_FOUR else ON_FOUR_LONG
            together = (*ON_TWO, LOST) if ranks == 2 else on_four
            launch(self.out, ranks, [f"{one}={self.model(one)}" for one in together])
        return folder

    def of_one(self, kind: str) -> Path:
        """The same step on one rank."""
        plain = next(one for one in reversed(PLAIN) if kind.endswith(one.removeprefix("plain")))
        if not (self.out / f"{plain}-1").exists():
            step(comm.Solo(), self.mesh, self.model(plain), plain, self.out / f"{plain}-1")
        return self.out / f"{plain}-1"


@pytest.fixture(scope="module")
def steps(mesh: DeviceMesh, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    out = tmp_path_factory.mktemp("steps")
    return Steps({kind: make_model(out / kind, kind) for kind in MODELS}, out, mesh)


def launch(out: Path, ranks: int, jobs: Sequence[str]) -> None:
    program = [sys.executable, str(Path(__file__).with_name("mesh_program.py"))]
    done = subprocess.run(
        [*program, str(ranks), str(out), *jobs],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def found(folder: Path) -> Any:
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize(("kind", "ranks"), DIVIDED)
def test_gradients_are_those_of_one_rank(steps: Steps, kind: str, ranks: int) -> None:
    ours = load_file(steps.of(kind, ranks) / "gradients.safetensors")
    theirs = load_file(steps.of_one(kind) / "gradients.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert float((ours[name] - value).norm()) <= 1e-5 * float(value.norm()), name


@pytest.mark.parametrize(("kind", "ranks"), DIVIDED)
def test_losses_and_logprobs_are_those_of_one_rank(steps: Steps, kind: str, ranks: int) -> None:
    """Each sample is reported once, however many ranks trained it."""
    ours, theirs = found(steps.of(kind, ranks)), found(steps.of_one(kind))
    assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-5)
    assert ours["proximal"].keys() == theirs["proximal"].keys()
    for sample_id, logprobs in theirs["proximal"].items():
        assert ours["proximal"][sample_id] == pytest.approx(logprobs, abs=1e-5)
    for one, other in zip(ours["stats"], theirs["stats"], strict=True):
        exact = ("sample_id", "tokens", "kept")
        assert [one[name] for name in exact] == [other[name] for name in exact]
        for name in ("loss", "kl", "mismatch_k3", "mismatch_max"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
        if "head_chunk_tokens" not in KINDS[kind].trainer:  # without chunks it is estimated
            assert one["entropy"] == pytest.approx(other["entropy"], rel=1e-5)


@pytest.mark.parametrize(("kind", "ranks"), DIVIDED)
def test_engines_pull_the_weights_of_one_rank(steps: Steps, kind: str, ranks: int) -> None:
    """From the first replica alone, whose every rank serves some."""
    ours = load_file(steps.of(kind, ranks) / "weights.safetensors")
    theirs = load_file(steps.of_one(kind) / "weights.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        # Adam's first step is lr * sign(gradient): where a gradient is rounding, so is its sign.
        assert ((ours[name] - value).abs() < 1e-5).double().mean() > 0.99, name
    shards = divide(ranks, TrainerSection(**KINDS[kind].trainer)).shards
    assert found(steps.of(kind, ranks))["sources"] == shards


@pytest.mark.parametrize(("kind", "ranks"), [one for one in DIVIDED if str(one.values[0]).endswith("lora")])
def test_merged_weights_are_stated_as_an_engine_makes_them_of_what_it_pulls(
    steps: Steps, kind: str, ranks: int
) -> None:
    """Each rank states its own rows alone, whichever part of a layer it has."""
    base = load_file(steps.model(kind) / "model.safetensors")
    pulled = load_file(steps.of(kind, ranks) / "weights.safetensors")
    sums = {}
    for name, value in base.items():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" in pulled:
            down, up = (pulled[f"{layer}.lora_{side}.weight"] for side in "AB")
            value = lora.merged(value, down, up, LORA.alpha / LORA.rank)
        sums[name] = checksum.checksum(value)
    assert checksum.digest(sums).hex() == found(steps.of(kind, ranks))["merged"]


@pytest.mark.parametrize(("kind", "ranks"), DIVIDED)
def test_a_checkpoint_of_divided_ranks_resumes_on_one(
    steps: Steps, mesh: DeviceMesh, kind: str, ranks: int
) -> None:
    """Its parameters are what was published after it, bit by bit."""
    out = steps.of(kind, ranks)
    learner = make_learner(steps.model(kind), mesh, steps.of_one(kind).name.removesuffix("-1"))
    path = checkpoint.found(out)[0]
    checkpoint.load_shards(learner, path, checkpoint.read_state(path).updates_taken)
    pulled = load_file(out / "weights.safetensors")
    for name, value in learner.trained().items():
        assert torch.equal(adapters.whole(value), pulled[name.replace(".default.", ".")]), name


def test_a_model_whose_tokens_do_not_see_one_another_over_ranks_is_refused_at_the_start(steps: Steps) -> None:
    said = found(steps.of(LOST, 2))
    assert "Qwen3ForCausalLM: packed samples see one another, or tokens that ranks share do not" in said
    assert "remedy: set trainer.context_parallel = 1" in said


@pytest.mark.long
def test_what_a_long_sample_takes_of_a_rank_s_memory_falls_with_the_ranks_that_share_it(steps: Steps) -> None:
    takes = []
    for ranks in (1, 2, 4):
        launch(steps.out, ranks, [f"{LONG}={steps.models['experts']}"])
        takes.append(found(steps.out / f"{LONG}-{ranks}"))
    for one in takes[1:]:
        assert one["loss"] == pytest.approx(takes[0]["loss"], rel=1e-5)
        assert one["norm"] == pytest.approx(takes[0]["norm"], rel=1e-5)
    whole, half, quarter = (one["peak"] for one in takes)
    assert half < 0.75 * whole
    assert quarter < 0.5 * whole


@pytest.mark.parametrize(
    ("ranks", "replicas", "context", "told"),
    [
        (8, 3, 1, "trainer.replicas = 3 does not divide the training job's 8 rank"),
        (8, 4, 4, "trainer.context_parallel = 4 does not divide the 2 rank"),
        (1, 1, 2, "trainer.context_parallel = 2 does not divide the 1 rank"),
    ],
)
def test_ranks_that_cannot_be_divided_so_are_refused(
    ranks: int, replicas: int, context: int, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        divide(ranks, TrainerSection(replicas=replicas, context_parallel=context))


def test_a_division_says_who_is_where() -> None:
    division = divide(16, TrainerSection(replicas=2, context_parallel=4))
    assert division == Division(16, 2, 4)
    assert (division.shards, division.data_parallel) == (8, 4)
    assert str(division) == "8 ranks share the model, 2 replicas of it, 4 ranks share each sample"


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    check_heads(12, 4)
    with pytest.raises(
        ConfigError, match="12 attention heads, which 8 ranks cannot share equally"
    ) as refused:
        check_heads(12, 8)
    assert "1, 2, 3, 4, 6 or 12" in str(refused.value)
