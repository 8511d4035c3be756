"""LoRA: what is trained, what is published, what the reference is, what a checkpoint holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scavenger.config import AlgorithmSection, LoraSection, OptimizerSection
from scavenger.errors import ConfigError
from tests.trainer.published import larger_than_memory
from tests.trainer.rows import make_group
from trainer.algorithms.rows import resolve
from trainer.checkpoint import checkpoint
from trainer.checkpoint.saving import Saver
from trainer.data.batching import Micro, TrainRow
from trainer.model import adapters
from trainer.model.learner import Learner, load_model

RANK = 2


def learner_of(folder: Path, mesh: DeviceMesh, *, kl: float = 0.0, **lora: Any) -> Learner:
    return Learner(
        folder,
        mesh,
        recipe=resolve(AlgorithmSection(kl_coef=kl), 8),
        optimizer=OptimizerSection(lr=0.02, clip_norm=1e9),
        temperature=1.0,
        deterministic=False,
        lora=LoraSection(rank=RANK, alpha=4.0, **lora),
    )


def everything() -> Micro:
    return Micro(tuple(row for number in range(3) for row in make_group(number)), 0)


def published(learner: Learner) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in adapters.merged(learner.model, learner.shapes(base=True))}


def plain_logprobs(model: Any, row: TrainRow) -> Tensor:
    text = torch.frombuffer(bytearray(row.prompt + row.completion), dtype=torch.int32).long()
    first = len(row.prompt) // 4
    with torch.no_grad():
        logprobs: Tensor = model(input_ids=text[None, :-1]).logits[0, first - 1 :].log_softmax(-1)
    return logprobs.gather(-1, text[first:, None])[:, 0]


def trained(learner: Learner, steps: int = 3) -> Learner:
    for _ in range(steps):
        learner.train(everything())
        learner.update(12.0, lr=0.02)
    return learner


def test_at_first_the_version_is_the_base_and_only_adapters_are_trained(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    base = {
        name: value.detach() for name, value in load_model(model_folder, torch.float32).named_parameters()
    }
    learner = learner_of(model_folder, mesh)
    first = published(learner)
    assert first.keys() == base.keys()
    assert all(torch.equal(first[name], base[name]) for name in base)
    assert all(".lora_A." in name or ".lora_B." in name for name in learner.trained())
    later = published(trained(learner))
    for name in base:
        change = later[name] - base[name]
        if name.rpartition(".")[0].rpartition(".")[2].endswith("_proj"):
            assert 0 < int(torch.linalg.matrix_rank(change, atol=1e-6)) <= RANK
        else:
            assert torch.equal(later[name], base[name])


def test_what_is_published_gives_the_logprobs_that_are_trained(
    model_folder: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    learner = trained(learner_of(model_folder, mesh))
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())
    save_file(published(learner), tmp_path / "model.safetensors", {"format": "pt"})
    model = load_model(tmp_path, torch.float32)
    found = learner.proximal(everything())
    for row in everything().rows:
        ours = torch.frombuffer(bytearray(found[row.sample_id]), dtype=torch.float64)
        assert float((ours - plain_logprobs(model, row)).abs().max()) < 1e-4


def test_the_reference_is_the_adapter_switched_off_and_needs_no_second_model(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    learner = learner_of(model_folder, mesh, kl=0.1)
    assert learner._reference is None
    assert [one.kl for one in learner.train(everything())] == pytest.approx([0.0] * 12, abs=1e-9)
    learner.discard_gradients()
    current = trained(learner).proximal(everything())
    base = load_model(model_folder, torch.float32)
    stats = {one.sample_id: one for one in learner.train(everything())}
    for row in everything().rows:
        gap = plain_logprobs(base, row).double() - torch.frombuffer(
            bytearray(current[row.sample_id]), dtype=torch.float64
        )
        assert stats[row.sample_id].kl == pytest.approx(
            float((gap.exp() - gap - 1).sum()), rel=1e-3, abs=1e-6
        )
    assert max(one.kl for one in stats.values()) > 1e-3


def test_a_checkpoint_holds_adapters_alone_and_resumes(
    model_folder: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    learner = trained(learner_of(model_folder, mesh), 1)
    assert all(".lora_" in name for name in learner.state())
    path = checkpoint.prepare(tmp_path, 1, 0)
    saver = Saver()
    saver.begin(learner.state(), path)
    saver.wait()
    other = learner_of(model_folder, mesh)
    checkpoint.load_shards(other, path, learner.updates_taken)
    one, same = published(trained(learner, 1)), published(trained(other, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "c_attn"])
def test_what_cannot_have_an_adapter_is_refused_with_what_can(
    model_folder: Path, mesh: DeviceMesh, target: str
) -> None:
    with pytest.raises(ConfigError, match=rf"lora\.targets: {target} cannot.*\n.*down_proj, gate_proj"):
        learner_of(model_folder, mesh, targets=("q_proj", target))


def test_types_are_read_of_a_file_that_is_larger_than_the_host_s_memory(tmp_path: Path) -> None:
    """The kernel maps it to be read, and refuses to map it to be written."""
    larger_than_memory(tmp_path)
    assert adapters.stored_dtype(tmp_path) == "bfloat16"
