"""Packed, mixed-precision training of real architectures against a plain implementation: one sample at a time, no FSDP, no packing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

from scavenger.config import AlgorithmSection, OptimizerSection, TrainerSection
from scavenger.errors import ConfigError
from tests.trainer.published import whole
from tests.trainer.rows import make_group
from trainer.algorithms import loss as loss_module
from trainer.algorithms.loss import picked_logprobs, token_logprobs
from trainer.algorithms.rows import resolve
from trainer.data.batching import Micro, TrainRow, filler
from trainer.model import attention, head
from trainer.model.learner import Learner

SHAPE = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "llama": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 4, "tie_word_embeddings": False},
}
Maker = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            folder = made[kind] = tmp_path_factory.mktemp(kind)
            (folder / "config.json").write_text(json.dumps(SHAPE | MODELS[kind] | {"model_type": kind}))
            with torch.random.fork_rng():
                torch.manual_seed(3)
                model = AutoModelForCausalLM.from_config(
                    AutoConfig.from_pretrained(folder), dtype=torch.float32
                )
                for parameter in model.parameters():
                    parameter.data.add_(torch.randn_like(parameter) * 0.08)
            save_file(
                {name: value.detach() for name, value in model.named_parameters()},
                folder / "model.safetensors",
                {"format": "pt"},
            )
        return made[kind]

    return make


def learner_of(folder: Path, mesh: DeviceMesh, **trainer_section: Any) -> Learner:
    return Learner(
        folder,
        mesh,
        recipe=resolve(AlgorithmSection(name="dapo"), 8),
        optimizer=OptimizerSection(lr=1e-6, clip_norm=1e9),
        temperature=0.8,
        deterministic=False,
        trainer=TrainerSection(**trainer_section),
    )


def everything() -> Micro:
    return Micro(tuple(row for number in range(4) for row in make_group(number)), 0)


def gradients(learner: Learner) -> dict[str, Tensor]:
    return {name: p.grad.full_tensor().clone() for name, p in learner.model.named_parameters()}


def plain(folder: Path, rows: tuple[TrainRow, ...]) -> tuple[float, dict[str, Tensor]]:
    """The token-summed PPO loss at ratio 1, and its gradients: transformers' own eager attention, one sample at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    total = torch.zeros(())
    for row in rows:
        text = torch.frombuffer(bytearray(row.prompt + row.completion), dtype=torch.int32).long()
        first = len(row.prompt) // 4
        logits = model(input_ids=text[None, :-1]).logits[0, first - 1 :] / 0.8
        current = logits.log_softmax(-1).gather(-1, text[first:, None])[:, 0]
        weight = (
            (current.detach() - torch.frombuffer(bytearray(row.behaviour), dtype=torch.float32))
            .exp()
            .clamp(max=2.0)
        )
        total = total - row.advantage * (weight * (current - current.detach()).exp()).sum()
    total.backward()
    return float(total.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    gap = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    return (gap / sum(float(value.double().square().sum()) for value in other.values())) ** 0.5


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3", {}),
        ("llama", {}),
        ("mistral", {}),
        ("qwen3", {"activation_checkpointing": True}),
        ("mistral", {"packing": False}),
    ],
)
def test_loss_and_gradients_are_those_of_a_plain_model(
    folder_of: Maker, mesh: DeviceMesh, kind: str, settings: dict[str, Any]
) -> None:
    folder, micro = folder_of(kind), everything()
    if not settings.get("packing", True):
        micro = Micro(micro.rows, max(row.tokens for row in micro.rows))
    loss, expected = plain(folder, micro.rows)
    learner = learner_of(folder, mesh, **settings)
    stats = learner.train(micro)
    assert sum(one.loss for one in stats) == pytest.approx(loss, rel=1e-5)
    assert apart(gradients(learner), expected) < 1e-5


def test_nothing_is_computed_for_padding_and_the_head_sees_answers_only(
    folder_of: Maker, mesh: DeviceMesh
) -> None:
    learner, micro = learner_of(folder_of("llama"), mesh), everything()
    seen: dict[str, int] = {}
    for name, module in (("embedded", learner.model.model.embed_tokens), ("headed", learner.model.lm_head)):
        module.register_forward_hook(
            lambda _, __, out, name=name: seen.update({name: out.shape[0] * out.shape[1]})
        )
    learner.train(micro)
    assert seen == {
        "embedded": sum(row.tokens - 1 for row in micro.rows),
        "headed": sum(len(row.completion) // 4 for row in micro.rows),
    }


def test_a_packed_filler_adds_exactly_nothing(folder_of: Maker, mesh: DeviceMesh) -> None:
    learner = learner_of(folder_of("qwen3"), mesh)
    assert learner.train(filler(everything())) == ()
    assert all(float(gradient.abs().max()) == 0.0 for gradient in gradients(learner).values())


def test_a_model_whose_packed_samples_see_one_another_is_refused(
    folder_of: Maker, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(borders: Tensor, longest: int) -> dict[str, Any]:
        return attention.borders_of(borders[[0, -1]], longest)

    monkeypatch.setattr(head, "borders_of", none)
    with pytest.raises(ConfigError, match="packed samples see one another"):
        learner_of(folder_of("llama"), mesh)


@pytest.mark.parametrize("window", [None, 3])
def test_samples_of_one_length_attend_as_each_alone(window: int | None) -> None:
    parts = [torch.randn(1, heads, 15, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    more: dict[str, Any] = {"scaling": 0.3, "sliding_window": window, "max_length_q": 5}
    attend: Any = attention.packed_attention
    together, _ = attend(None, *parts, None, cu_seq_lens_q=torch.tensor([0, 5, 10, 15]), **more)
    alone = [
        attend(
            None,
            *(part[:, :, at : at + 5] for part in parts),
            None,
            cu_seq_lens_q=torch.tensor([0, 5]),
            **more,
        )[0]
        for at in (0, 5, 10)
    ]
    weights = torch.randn_like(together)
    torch.testing.assert_close(together, torch.cat(alone, dim=1), rtol=0, atol=1e-12)
    found = torch.autograd.grad((together * weights).sum(), parts)
    wanted = torch.autograd.grad((torch.cat(alone, dim=1) * weights).sum(), parts)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_model_that_asks_attention_for_more_is_refused() -> None:
    query = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ConfigError, match="asks attention for softcap"):
        attention.packed_attention(
            torch.nn.Linear(1, 1), query, query, query, None, softcap=30.0, cu_seq_lens_q=torch.tensor([0, 2])
        )
    with pytest.raises(ConfigError, match="does not hand the samples' borders"):
        attention.packed_attention(torch.nn.Linear(1, 1), query, query, query, None)


@pytest.mark.parametrize("piece", [1, 100, 1 << 20])
def test_logprobs_by_pieces_are_the_whole_s_with_their_gradients(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "PIECE", piece)
    draw = torch.Generator().manual_seed(0)
    logits, weights = torch.randn(11, 30, generator=draw).requires_grad_(), torch.randn(11, generator=draw)
    targets = torch.randint(30, (11,), generator=draw)
    (expected,) = torch.autograd.grad((token_logprobs(logits, targets, 0.7) * weights).sum(), logits)
    found = picked_logprobs(logits, targets, 0.7)
    assert torch.allclose(found, token_logprobs(logits, targets, 0.7), atol=1e-6)
    (gradient,) = torch.autograd.grad((found * weights).sum(), logits)
    assert torch.allclose(gradient, expected, atol=1e-6)


def masters(learner: Learner) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in whole(learner).items()}


def test_at_a_learning_rate_of_1e_6_masters_move_and_published_casts_change(
    folder_of: Maker, mesh: DeviceMesh
) -> None:
    """What is stored in bfloat16 stands still: an update of 1e-6 is far below half its spacing at .1, which is 2.4e-4."""
    folder, micro = folder_of("qwen3"), everything()
    learner = learner_of(folder, mesh, compute_dtype="bfloat16")
    before = masters(learner)
    cast = {name: value.to(torch.bfloat16) for name, value in before.items()}
    stored = {name: value.to(torch.bfloat16) for name, value in before.items()}
    reached = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in before.items()}
    for _ in range(10):
        learner.train(micro)
        for name, gradient in gradients(learner).items():
            assert gradient.dtype == torch.float32
            reached[name] |= gradient != 0
        last = masters(learner)
        learner.update(100.0, lr=1e-6)
        now = masters(learner)
        stored = {name: value + (now[name] - last[name]).to(torch.bfloat16) for name, value in stored.items()}
    published = {name: value.to(torch.bfloat16) for name, value in whole(learner).items()}

    def share(changed: Callable[[str], Tensor]) -> float:
        return sum(int((changed(name) & reached[name]).sum()) for name in before) / sum(
            int(one.sum()) for one in reached.values()
        )

    assert share(lambda name: now[name] != before[name]) > 0.98
    moved = share(lambda name: published[name] != cast[name])
    assert 0 < moved < 0.2
    assert share(lambda name: stored[name] != cast[name]) < 0.25 * moved
    state = learner.state()
    assert all(value.dtype == torch.float32 for value in state.values())
