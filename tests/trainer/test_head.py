"""The output head by chunks against the plain one: values, gradients, memory, and which models it knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from scavenger.config import AlgorithmSection, LoraSection, OptimizerSection, TrainerSection
from scavenger.errors import ConfigError
from tests.trainer.rows import make_group
from trainer.algorithms.rows import resolve
from trainer.data.batching import Micro
from trainer.data.collate import packed
from trainer.model import adapters, head
from trainer.model.head import Tail, chunked_logprobs
from trainer.model.learner import Learner, RowStats

N, HIDDEN, VOCABULARY = 37, 12, 50
TAILS = {"plain": Tail(), "scale": Tail(0.25), "cap": Tail(1.0, 3.0), "both": Tail(0.5, 2.0)}


def drawn(dtype: torch.dtype, *, bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    draw = torch.Generator().manual_seed(1)
    hidden, weight = (
        torch.randn(rows, HIDDEN, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for rows in (N, VOCABULARY)
    )
    shift = torch.randn(VOCABULARY, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, shift if bias else None, torch.randint(VOCABULARY, (N,), generator=draw)


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, tail: Tail, temperature: float
) -> tuple[Tensor, Tensor]:
    logs = (tail.of(nn.functional.linear(hidden, weight, bias)) / temperature).log_softmax(-1)
    return logs.gather(-1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_values_and_gradients_are_those_of_the_plain_head(
    chunk: int, tail: Tail, dtype: torch.dtype, close: float
) -> None:
    """Relative to the largest of each; the loss takes values and entropies with a factor for each token, as a policy loss does."""
    hidden, weight, bias, targets = drawn(dtype, bias=True)
    parts = [hidden, weight, bias]
    factors = torch.randn(2, N, dtype=dtype, generator=torch.Generator().manual_seed(2))
    found = chunked_logprobs(hidden, weight, bias, targets, tail=tail, temperature=0.7, chunk=chunk)
    assert found.entropy is not None
    wanted = plain(hidden, weight, bias, targets, tail, 0.7)
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        assert float(((one - other).abs().max() / other.abs().max()).detach()) < close
    for of in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
        loss = (found.values * factors[0]).sum() * of[0] + (found.entropy * factors[1]).sum() * of[1]
        expected = (wanted[0] * factors[0]).sum() * of[0] + (wanted[1] * factors[1]).sum() * of[1]
        ours = torch.autograd.grad(loss, parts, retain_graph=True)  # type: ignore[arg-type]
        theirs = torch.autograd.grad(expected, parts, retain_graph=True)  # type: ignore[arg-type]
        for one, other in zip(ours, theirs, strict=True):
            assert float((one - other).abs().max() / other.abs().max()) < 5 * close


def test_gradients_are_what_finite_differences_say() -> None:
    hidden, weight, bias, targets = drawn(torch.float64, bias=True)
    assert bias is not None

    def values(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        found = chunked_logprobs(
            hidden, weight, bias, targets, tail=Tail(0.5, 2.0), temperature=0.7, chunk=10
        )
        assert found.entropy is not None
        return found.values, found.entropy

    assert torch.autograd.gradcheck(values, (hidden, weight, bias), check_undefined_grad=False)


def test_a_frozen_weight_gets_no_gradient_and_a_bfloat16_one_is_added_up_in_float32() -> None:
    hidden, weight, _, targets = drawn(torch.float32, bias=False)
    asks: dict[str, Any] = {"tail": Tail(), "temperature": 1.0}
    chunked_logprobs(hidden, weight.detach(), None, targets, chunk=5, **asks).values.sum().backward()
    assert hidden.grad is not None
    small = weight.detach().bfloat16().requires_grad_()
    rows = torch.randn(4000, HIDDEN).bfloat16()
    at = torch.randint(VOCABULARY, (4000,))
    (exact,) = torch.autograd.grad(
        chunked_logprobs(rows, small, None, at, chunk=4000, **asks).values.sum(), small
    )
    (added,) = torch.autograd.grad(
        chunked_logprobs(rows, small, None, at, chunk=4, **asks).values.sum(), small
    )
    assert exact.dtype == added.dtype == torch.bfloat16
    assert float((exact - added).abs().max() / exact.abs().max()) < 0.01, "1,000 chunks lose nothing"


class Largest(TorchDispatchMode):
    """Of all tensors that are made, the most values of one."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                self.values = max(self.values, one.numel())
        return made


@pytest.mark.parametrize("chunk", [4, 16])
def test_no_tensor_is_larger_than_a_chunk_s_logits_however_long_the_context(chunk: int) -> None:
    seen = []
    for tokens in (64, 256, 1024):
        hidden, weight = torch.randn(tokens, 2, requires_grad=True), torch.randn(1000, 2, requires_grad=True)
        at = torch.randint(1000, (tokens,))
        with Largest() as largest:
            found = chunked_logprobs(hidden, weight, None, at, tail=Tail(), temperature=1.0, chunk=chunk)
            (found.values.sum() + found.entropy.sum()).backward()  # type: ignore[union-attr]
        seen.append(largest.values)
    assert seen == [chunk * 1000] * 3


SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "untied": {"model_type": "llama", "tie_word_embeddings": False},
    "scaled": {"model_type": "cohere", "logit_scale": 0.0625, "tie_word_embeddings": True},
    "divided": {"model_type": "granite", "logits_scaling": 8.0, "tie_word_embeddings": False},
    "capped": {"model_type": "gemma2", "final_logit_softcapping": 3.0, "attn_logit_softcapping": None},
    "biased": {"model_type": "phi", "tie_word_embeddings": False},
}
Maker = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            folder = made[kind] = tmp_path_factory.mktemp(kind)
            (folder / "config.json").write_text(json.dumps(SHAPE | MODELS[kind]))
            with torch.random.fork_rng():
                torch.manual_seed(3)
                model = AutoModelForCausalLM.from_config(
                    AutoConfig.from_pretrained(folder), dtype=torch.float32
                )
                for parameter in model.parameters():
                    parameter.data.add_(torch.randn_like(parameter) * 0.2)
            save_file(
                {name: value.detach() for name, value in model.named_parameters()},
                folder / "model.safetensors",
                {"format": "pt"},
            )
        return made[kind]

    return make


def stepped(
    folder: Path, mesh: DeviceMesh, chunk: int, *, lora: bool = False, **more: Any
) -> tuple[list[RowStats], dict[str, Tensor], dict[int, bytes]]:
    """Rows, gradients and proximal logprobs of one micro-batch."""
    packing = more.pop("packing", True)
    learner = Learner(
        folder,
        mesh,
        recipe=resolve(AlgorithmSection(name="dapo", kl_coef=0.1), 8),
        optimizer=OptimizerSection(lr=1e-3),
        temperature=0.8,
        deterministic=False,
        trainer=TrainerSection(head_chunk_tokens=chunk, packing=packing, **more),
        lora=LoraSection(rank=4, targets=("q_proj", "v_proj")) if lora else LoraSection(),
    )
    rows = tuple(row for number in range(4) for row in make_group(number))
    micro = Micro(rows, 0 if packing else max(row.tokens for row in rows))
    stats = list(learner.train(micro))
    found = {
        name: adapters.whole(p.grad).clone()
        for name, p in learner.model.named_parameters()
        if p.grad is not None
    }
    return stats, found, learner.proximal(micro)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # a plain head with a bias returns a view
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("tied", {}),
        ("untied", {}),
        ("tied", {"lora": True}),
        ("untied", {"packing": False}),
        ("scaled", {}),
        ("divided", {}),
        ("capped", {}),
        ("biased", {"packing": False}),
        ("tied", {"activation_checkpointing": True}),
    ],
)
def test_a_step_is_that_of_the_plain_head(
    folder_of: Maker, mesh: DeviceMesh, kind: str, more: dict[str, Any]
) -> None:
    """With the reference model's logprobs too, which the KL term takes. Only the entropy differs: there it is estimated."""
    stats, gradients, proximal = stepped(folder_of(kind), mesh, 7, **more)
    expected, theirs, before = stepped(folder_of(kind), mesh, 0, **more)
    assert gradients.keys() == theirs.keys()
    for name, value in theirs.items():
        assert float((gradients[name] - value).abs().max()) <= 5e-6 * float(value.abs().max()), name
    # A loss near 4 has float32 steps of 2.4e-7, and the order of a sum is the processor's own.
    assert [one.loss for one in stats] == pytest.approx([one.loss for one in expected], rel=2e-6, abs=1e-6)
    for sample, packed_values in before.items():
        ours, other = (
            torch.frombuffer(bytearray(one), dtype=torch.float64) for one in (proximal[sample], packed_values)
        )
        assert float((ours - other).abs().max()) < 1e-6 * max(1.0, float(other.abs().max()))


def test_the_entropy_of_a_step_is_the_distribution_s_own(folder_of: Maker, mesh: DeviceMesh) -> None:
    stats, _, _ = stepped(folder_of("tied"), mesh, 7)
    model = AutoModelForCausalLM.from_pretrained(folder_of("tied"), dtype=torch.float32)
    rows = [row for number in range(4) for row in make_group(number)]
    for row, one in zip(rows, stats, strict=True):
        text = torch.frombuffer(bytearray(row.prompt + row.completion), dtype=torch.int32).long()
        logs = (model(input_ids=text[None, :-1]).logits[0, len(row.prompt) // 4 - 1 :] / 0.8).log_softmax(-1)
        assert one.entropy == pytest.approx(float(-(logs.exp() * logs).sum().detach()), rel=1e-5)


def test_a_whole_step_makes_no_tensor_of_tokens_times_vocabulary(folder_of: Maker, mesh: DeviceMesh) -> None:
    folder = folder_of("untied")
    tokens = sum(len(row.completion) // 4 for number in range(4) for row in make_group(number))
    with Largest() as whole:
        stepped(folder, mesh, 0)
    with Largest() as chunked:
        stepped(folder, mesh, 4)
    assert whole.values >= tokens * SHAPE["vocab_size"]  # type: ignore[operator]
    assert chunked.values < tokens * SHAPE["vocab_size"]  # type: ignore[operator]


def standing(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    head.install(model, temperature=1.0, chunk=4)
    return model


def test_a_model_that_does_more_to_its_logits_is_refused(folder_of: Maker) -> None:
    batch = packed(Micro((make_group(0)[0],), 0), torch.float32)
    model = standing(folder_of("untied"))
    assert head._layout(batch).keys() >= {"position_ids"}
    head.check(model, batch)
    assert model.scavenger_head.tail == Tail()
    inside = model.scavenger_head._plain

    def shifted(*arguments: Any, **more: Any) -> Any:
        made = inside(*arguments, **more)
        made.logits = made.logits + torch.arange(made.logits.shape[-1])
        return made

    model.scavenger_head._plain = shifted
    with pytest.raises(ConfigError, match=r"more to its logits than a scale(.|\n)*head_chunk_tokens = 0"):
        head.check(model, batch)


def test_a_head_that_is_no_linear_layer_is_refused(folder_of: Maker) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder_of("untied"), dtype=torch.float32)
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ConfigError, match=r"output head is Sequential(.|\n)*head_chunk_tokens = 0"):
        head.install(model, temperature=1.0, chunk=4)
