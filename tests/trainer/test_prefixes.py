"""Prefixes that samples share are computed once: with the values, losses and gradients that each sample has alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

from scavenger.config import AlgorithmSection, OptimizerSection, TrainerSection
from scavenger.errors import ConfigError
from scavenger.protocol.messages import pack_logprobs, pack_tokens
from tests.trainer.test_packing import Maker, apart, folder_of, gradients  # noqa: F401  a fixture among them
from trainer.algorithms.rows import resolve
from trainer.data import batching, prefixes
from trainer.data.batching import Micro, TrainRow
from trainer.loop.step import Stepper
from trainer.model import attention
from trainer.model.learner import Learner


def row(number: int, draw: random.Random, tokens: Sequence[int], prompt: int, mask: bytes = b"") -> TrainRow:
    trained = mask.count(1) if mask else len(tokens) - prompt
    return TrainRow(
        number,
        pack_tokens(tokens[:prompt]),
        pack_tokens(tokens[prompt:]),
        pack_logprobs([draw.uniform(-4, -1) for _ in range(trained)]),
        draw.uniform(-2, 2),
        mask=mask,
    )


def words(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(1, 20) for _ in range(count)]


def siblings(number: int, size: int = 4, prompt: int = 9) -> tuple[TrainRow, ...]:
    """Samples of one prompt. The first two say the same, and two others begin alike."""
    draw = random.Random(number)
    asked, begun = words(draw, prompt), words(draw, 3)
    said = [begun, begun, *(begun[:2] + words(draw, draw.randint(1, 6)) for _ in range(size - 2))]
    return tuple(row(number * size + i, draw, asked + one, prompt) for i, one in enumerate(said))


def episode(number: int) -> tuple[TrainRow, ...]:
    """Three branches: a turn trains in the first that has it, and observations in none."""
    draw = random.Random(number)
    prompt, turn, tool, other = words(draw, 6), words(draw, 4), words(draw, 3), words(draw, 3)
    rest = [words(draw, 4) for _ in range(3)]
    base = 1000 + 10 * number
    masks = (bytes([1] * 4 + [0] * 3 + [1] * 4), bytes([0] * 7 + [1] * 4), bytes([0] * 4 + [0] * 3 + [1] * 4))
    lines = (turn + tool + rest[0], turn + tool + rest[1], turn + other + rest[2])
    return tuple(
        row(base + i, draw, prompt + line, 6, mask)
        for i, (line, mask) in enumerate(zip(lines, masks, strict=True))
    )


ROWS = {
    "groups": tuple(one for number in range(3) for one in siblings(number)),
    "episodes": tuple(one for number in range(3) for one in episode(number)),
}


def learner_of(folder: Path, mesh: DeviceMesh, **trainer: Any) -> Learner:
    return Learner(
        folder,
        mesh,
        recipe=resolve(AlgorithmSection(name="dapo"), 8),
        optimizer=OptimizerSection(lr=1e-6, clip_norm=1e9),
        temperature=0.8,
        deterministic=False,
        trainer=TrainerSection(**trainer),
    )


def logprobs(learner: Learner, micro: Micro) -> list[Tensor]:
    """Of each row."""
    found = learner.proximal(micro)
    return [torch.frombuffer(bytearray(found[one.sample_id]), dtype=torch.float64) for one in micro.rows]


def trained(learner: Learner, micro: Micro) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each row, and the gradients."""
    losses = [one.loss for one in learner.train(micro)]
    made = gradients(learner)
    learner.discard_gradients()
    return losses, made


def gap(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral"])
@pytest.mark.parametrize("rows", sorted(ROWS))
def test_logprobs_losses_and_gradients_are_those_without_sharing(
    folder_of: Maker,  # noqa: F811
    mesh: DeviceMesh,
    kind: str,
    rows: str,
) -> None:
    """Mistral's window is shorter than the prefixes."""
    micro = Micro(ROWS[rows], 0)
    alone = learner_of(folder_of(kind), mesh)
    together = learner_of(folder_of(kind), mesh, share_prefixes=True)
    assert gap(logprobs(together, micro), logprobs(alone, micro)) < 1e-5
    wanted, found = trained(alone, micro), trained(together, micro)
    assert found[0] == pytest.approx(wanted[0], rel=1e-5, abs=1e-5)
    assert apart(found[1], wanted[1]) < 1e-5


def test_every_algorithm_has_the_same_gradients(folder_of: Maker, mesh: DeviceMesh) -> None:  # noqa: F811
    micro = Micro(ROWS["groups"] + ROWS["episodes"], 0)
    alone = learner_of(folder_of("llama"), mesh)
    together = learner_of(folder_of("llama"), mesh, share_prefixes=True, activation_checkpointing=True)
    for algorithm in get_args(AlgorithmSection.model_fields["name"].annotation):
        alone._recipe = together._recipe = resolve(AlgorithmSection(name=algorithm), 8)
        wanted, found = trained(alone, micro), trained(together, micro)
        assert found[0] == pytest.approx(wanted[0], rel=1e-5, abs=1e-5), algorithm
        assert apart(found[1], wanted[1]) < 1e-5, algorithm


@pytest.mark.parametrize("window", [None, 3])
def test_a_piece_attends_as_the_end_of_its_whole_sample(window: int | None) -> None:
    """In float64: two samples of 5 and 6 tokens, of which the second has its first 3 from the first."""
    parts = [torch.randn(1, heads, 8, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    paths = [torch.arange(5), torch.tensor([0, 1, 2, 5, 6, 7])]
    more: dict[str, Any] = {"scaling": 0.3, "sliding_window": window}
    lengths, seen = torch.tensor([0, 5, 8]), torch.tensor([0, 5, 11])
    attend: Any = attention.branched_attention
    together, _ = attend(
        None, *parts, None, **more, **attention.branches_of(lengths, 5, torch.cat(paths), seen, 6)
    )
    whole: Any = attention.packed_attention
    alone = [
        whole(None, *(part[:, :, path] for part in parts), None, **more, **attention.borders_of(border, 6))[0]
        for path, border in zip(paths, (torch.tensor([0, 5]), torch.tensor([0, 6])), strict=True)
    ]
    wanted = torch.cat([alone[0], alone[1][:, 3:]], dim=1)
    torch.testing.assert_close(together, wanted, rtol=0, atol=1e-12)
    weights = torch.randn_like(together)
    for one, other in zip(
        torch.autograd.grad((together * weights).sum(), parts),
        torch.autograd.grad((wanted * weights).sum(), parts),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", sorted(ROWS))
def test_each_prefix_is_computed_once(folder_of: Maker, mesh: DeviceMesh, rows: str) -> None:  # noqa: F811
    learner, micro = learner_of(folder_of("llama"), mesh, share_prefixes=True), Micro(ROWS[rows], 0)
    seen: list[int] = []
    learner.model.model.embed_tokens.register_forward_hook(
        lambda _, __, out: seen.append(out.shape[0] * out.shape[1])
    )
    learner.train(micro)
    assert seen == [nodes(ROWS[rows])]
    assert nodes(ROWS[rows]) < 0.6 * sum(one.tokens for one in ROWS[rows])


def nodes(rows: Sequence[TrainRow]) -> int:
    """Tokens of a trie of what is computed of the rows."""
    texts = [prefixes.text_of(one) for one in rows]
    return len({text[:stop] for text in texts for stop in range(4, len(text) + 1, 4)})


# ---------------------------------------------------------------- planted faults


def test_a_row_that_takes_a_token_of_another_is_found(
    folder_of: Maker,  # noqa: F811
    mesh: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    micro = Micro(ROWS["groups"], 0)
    alone = logprobs(learner_of(folder_of("llama"), mesh), micro)
    learner = learner_of(folder_of("llama"), mesh, share_prefixes=True)
    right = prefixes.shared
    monkeypatch.setattr(
        prefixes, "shared", lambda one, other: min(right(one, other) + 1, len(one) // 4, len(other) // 4)
    )
    assert gap(logprobs(learner, micro), alone) > 1e-3


def test_a_model_whose_samples_see_too_little_of_their_prefix_is_refused(
    folder_of: Maker,  # noqa: F811
    mesh: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = attention._one

    def first_keys(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        """As a kernel that aligns the first query with the first key."""
        length = query.shape[2]
        return right(query, key[:, :, :length], value[:, :, :length], *rest)

    monkeypatch.setattr(attention, "_one", first_keys)
    with pytest.raises(ConfigError, match="samples that share prefixes are not what each is alone"):
        learner_of(folder_of("llama"), mesh, share_prefixes=True)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "falcon_h1"}, "recurrent"),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
            "linear_attention",
        ),
    ],
)
def test_a_model_with_recurrent_or_linear_layers_is_refused(config: dict[str, Any], said: str) -> None:
    shape = {
        "vocab_size": 16,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    made = AutoConfig.for_model(**(shape | config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    with pytest.raises(ConfigError, match=f"cannot share prefixes: .*{said}") as caught:
        attention.check_model(model)
    assert "set trainer.share_prefixes = false" in str(caught.value)


# ---------------------------------------------------------------- the plan


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_planned_once_within_the_budget_and_rounds_are_full(seed: int) -> None:
    draw = random.Random(seed)
    groups = [
        siblings(number, draw.randint(2, 6), draw.randint(1, 30)) for number in range(draw.randint(1, 9))
    ]
    budget, ranks = draw.choice((20, 50, 200)), draw.randint(1, 3)
    planned = prefixes.balanced(groups, budget=budget, ranks=ranks)
    assert all(len(one_round) == ranks for one_round in planned)
    micros = [micro for one_round in planned for micro in one_round if micro.rows[0].sample_id >= 0]
    given = [one for group in groups for one in group]
    assert sorted(one.sample_id for micro in micros for one in micro.rows) == sorted(
        one.sample_id for one in given
    )
    for micro in micros:
        assert nodes(micro.rows) == sum(len(prefixes.text_of(one)) // 4 for one in micro.rows) - micro.shared
        assert nodes(micro.rows) <= budget or len(micro.rows) == 1
        assert sum(one.trained for one in micro.rows) <= budget or len(micro.rows) == 1


@pytest.mark.parametrize("shares", [False, True])
def test_a_step_is_planned_as_the_setting_says(shares: bool) -> None:
    section = TrainerSection(share_prefixes=shares, micro_batch_tokens=40)
    config: Any = SimpleNamespace(trainer=section, run=SimpleNamespace(deterministic=False))
    stepper: Any = SimpleNamespace(_config=config, _ranks=SimpleNamespace(data_parallel=1))
    plan = prefixes.balanced if shares else batching.balanced
    groups = [siblings(number) for number in range(3)]
    assert Stepper._rounds(stepper, stepper, groups) == plan(groups, budget=40, ranks=1)


def test_neighbours_share_what_any_two_rows_share() -> None:
    rows = ROWS["groups"] + ROWS["episodes"]
    planned = prefixes.branches(rows)
    texts = [prefixes.text_of(rows[place]) for place, _ in planned]
    for at, (_, begin) in enumerate(planned):
        assert begin == max((prefixes.shared(before, texts[at]) for before in texts[:at]), default=0)
    assert all(one <= other for one, other in pairwise(texts))


def test_no_rows_make_no_rounds_and_a_long_group_is_cut_by_what_it_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert prefixes.balanced([[]], budget=10, ranks=2) == ()
    monkeypatch.setattr(prefixes, "MOST_SEEN", 2)
    draw = random.Random(1)
    asked = words(draw, 30)
    group = [row(number, draw, asked + words(draw, 1), 30) for number in range(8)]
    planned = prefixes.balanced([group], budget=40, ranks=1)
    assert [len(micro.rows) for (micro,) in planned] == [2, 2, 2, 2]
