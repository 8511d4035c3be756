"""Rows with observations between what the model said: the same gradients as the turns apart, in packing, losses and metrics."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scavenger.config import AlgorithmSection, OptimizerSection
from scavenger.protocol import messages
from trainer.algorithms.loss import Tokens, policy_loss
from trainer.algorithms.rows import ROWS, DenominatorShare, resolve
from trainer.algorithms.scoring import ScoredGroup
from trainer.data.batching import Micro, TrainRow, balanced, rounds, spread
from trainer.data.collate import packed, padded
from trainer.loop.metrics import summarise
from trainer.model.learner import Learner

#: Of one episode: prompt, first answer, what the tool said, second answer.
PROMPT, FIRST, OBSERVED, SECOND = 5, 4, 3, 6
#: Whose surrogate is each token's own. GSPO's is its sequence's, which is the row.
OF_TOKENS = [name for name in ROWS if name != "gspo"]


def drawn(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, 13) for _ in range(count)]


def logprobs(count: int, seed: int) -> bytes:
    draw = random.Random(seed)
    return messages.pack_logprobs([draw.uniform(-4, -1) for _ in range(count)])


def episode(number: int, *, apart: bool) -> tuple[TrainRow, ...]:
    """The same two turns, as one row with a mask or as a row for each."""
    text = drawn(PROMPT + FIRST + OBSERVED + SECOND, number)
    first, second = logprobs(FIRST, number), logprobs(SECOND, 1000 + number)
    advantage = random.Random(number).uniform(-2, 2)
    pack = messages.pack_tokens
    if not apart:
        mask = bytes([1] * FIRST + [0] * OBSERVED + [1] * SECOND)
        return (
            TrainRow(number, pack(text[:PROMPT]), pack(text[PROMPT:]), first + second, advantage, mask=mask),
        )
    before = PROMPT + FIRST + OBSERVED
    one = TrainRow(2 * number, pack(text[:PROMPT]), pack(text[PROMPT : PROMPT + FIRST]), first, advantage)
    two = TrainRow(2 * number + 1, pack(text[:before]), pack(text[before:]), second, advantage)
    return (
        msgspec.structs.replace(one, episode=number, others=SECOND),
        msgspec.structs.replace(two, episode=number, others=FIRST),
    )


def rows(*, apart: bool) -> tuple[TrainRow, ...]:
    return tuple(row for number in range(4) for row in episode(number, apart=apart))


def learner_of(folder: Path, mesh: DeviceMesh, *, deterministic: bool, **algorithm: Any) -> Learner:
    return Learner(
        folder,
        mesh,
        recipe=resolve(AlgorithmSection(**algorithm), 16),
        optimizer=OptimizerSection(lr=1e-3, clip_norm=1e9),
        temperature=0.7,
        deterministic=deterministic,
    )


def gradients(learner: Learner) -> dict[str, Tensor]:
    return {name: p.grad.full_tensor().clone() for name, p in learner.model.named_parameters()}


def apart_by(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    gap = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    return (gap / sum(float(value.double().square().sum()) for value in other.values())) ** 0.5


@pytest.mark.parametrize("name", OF_TOKENS)
@pytest.mark.parametrize(("deterministic", "most"), [(True, 1e-9), (False, 1e-5)])
def test_two_turns_in_one_row_have_the_gradients_of_the_two_apart(
    model_folder: Path, mesh: DeviceMesh, name: str, deterministic: bool, most: float
) -> None:
    """`deterministic`: padded, in float64; else packed in one line, in float32."""
    learner = learner_of(model_folder, mesh, deterministic=deterministic, name=name)
    found = []
    for apart in (False, True):
        some = rows(apart=apart)
        stats = learner.train(Micro(some, max(row.tokens for row in some) if deterministic else 0))
        assert sum(one.tokens for one in stats) == 4 * (FIRST + SECOND), "observations are not trained"
        found.append(gradients(learner))
        learner.discard_gradients()
    assert apart_by(found[0], found[1]) < most


def test_the_share_of_a_token_is_the_episode_s_not_the_row_s(model_folder: Path, mesh: DeviceMesh) -> None:
    """What the test above would miss were `others` left out: a mean over sequences would weigh each turn as an answer of its own."""
    learner = learner_of(model_folder, mesh, deterministic=True, name="grpo")
    found = []
    for keep in (True, False):
        some = rows(apart=True)
        if not keep:
            some = tuple(msgspec.structs.replace(row, others=0) for row in some)
        learner.train(Micro(some, max(row.tokens for row in some)))
        found.append(gradients(learner))
        learner.discard_gradients()
    assert apart_by(found[0], found[1]) > 0.1


def test_the_logprobs_of_a_masked_row_are_those_of_its_generated_tokens(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    learner = learner_of(model_folder, mesh, deterministic=True, name="grpo")
    (whole,), (one, two) = episode(0, apart=False), episode(0, apart=True)
    alone = learner.proximal(Micro((whole,), whole.tokens))[whole.sample_id]
    each = learner.proximal(Micro((one, two), two.tokens))
    assert torch.frombuffer(bytearray(alone), dtype=torch.float64).tolist() == pytest.approx(
        torch.frombuffer(bytearray(each[one.sample_id] + each[two.sample_id]), dtype=torch.float64).tolist(),
        rel=1e-9,
    )


@pytest.mark.parametrize("layout", [padded, packed])
def test_only_masked_in_tokens_are_targets_and_each_is_predicted_by_its_predecessor(layout: Any) -> None:
    some = rows(apart=False)
    width = max(row.tokens for row in some)
    batch = layout(Micro(some, width if layout is padded else 0), torch.float64)
    line = batch.inputs.flatten().tolist()
    expected_targets, expected_before = [], []
    for row in some:
        text = messages.unpack_tokens(row.prompt + row.completion)
        for place in (*range(PROMPT, PROMPT + FIRST), *range(PROMPT + FIRST + OBSERVED, len(text))):
            expected_targets.append(text[place])
            expected_before.append(text[place - 1])
    assert batch.targets.tolist() == expected_targets
    assert [line[place] for place in batch.at.tolist()] == expected_before
    assert batch.row.tolist() == [i for i, row in enumerate(some) for _ in range(row.trained)]
    assert len(batch.behaviour) == len(batch.targets)


def test_a_mask_of_another_length_is_refused() -> None:
    (row,) = episode(0, apart=False)
    with pytest.raises(ValueError, match="a mask of 2 for 13 tokens"):
        packed(Micro((msgspec.structs.replace(row, mask=b"\1\1"),), 0), torch.float64)


def test_packing_counts_observations_as_computed_tokens_and_loses_no_row() -> None:
    some = rows(apart=False)
    for micros in (
        [one for of_round in balanced([some], budget=40, ranks=2) for one in of_round],
        [one for of_round in rounds(spread([some], budget=40, ranks=2), 2) for one in of_round],
    ):
        kept = [row for micro in micros for row in micro.rows if row.sample_id >= 0]
        assert sorted(row.sample_id for row in kept) == [row.sample_id for row in some]
        assert all(micro.computed_tokens <= 40 for micro in micros)


def test_a_row_without_a_mask_is_trained_whole() -> None:
    one = TrainRow(1, bytes(4), bytes(12), bytes(12), 1.0)
    assert (one.trained, one.whole, one.tokens) == (3, 1, 4)
    (masked,) = episode(7, apart=False)
    assert (masked.trained, masked.tokens) == (FIRST + SECOND, PROMPT + FIRST + OBSERVED + SECOND)


@pytest.mark.parametrize("name", OF_TOKENS)
def test_the_loss_sums_over_the_episode_s_tokens(name: Any) -> None:
    """Pure: the loss of one sample of ten tokens is that of its halves, each told of the other."""
    recipe = resolve(AlgorithmSection(name=name), 16)
    torch.manual_seed(0)
    current, behaviour = -torch.rand(10, dtype=torch.float64) - 1, -torch.rand(10, dtype=torch.float64) - 1
    advantage = torch.tensor([1.5], dtype=torch.float64)
    zeros = torch.zeros(10, dtype=torch.int64)
    whole = policy_loss(Tokens(current, current, behaviour, zeros, advantage), recipe)
    cuts = list(accumulate((0, 4, 6)))
    halves = [
        policy_loss(
            Tokens(
                current[a:b],
                current[a:b],
                behaviour[a:b],
                zeros[a:b],
                advantage,
                others=torch.tensor([10.0 - (b - a)], dtype=torch.float64),
            ),
            recipe,
        )
        for a, b in pairwise(cuts)
    ]
    assert float(sum(one.loss for one in halves)) == pytest.approx(float(whole.loss), rel=1e-12)


def test_metrics_count_an_episode_once_and_its_rows_apart(model_folder: Path, mesh: DeviceMesh) -> None:
    learner = learner_of(model_folder, mesh, deterministic=True, name="grpo")
    some = rows(apart=True)
    stats = {one.sample_id: one for one in learner.train(Micro(some, max(row.tokens for row in some)))}
    group = ScoredGroup(1, 0, some, (), (1.0,) * 4, (FIRST + SECOND,) * 4, True, DenominatorShare(4, 40))
    found = summarise([group], stats, divisor=4.0)
    assert (found["samples"], found["samples_trained"], found["rows_trained"]) == (4.0, 4.0, 8.0)
    assert found["tokens_trained"] == found["tokens"] == 4 * (FIRST + SECOND)
