"""Turns that an environment rewards: what each is compared by, and that a row trains each turn's tokens with its own advantage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from scavenger.config import AlgorithmSection
from tests.trainer.test_masks import FIRST, OBSERVED, PROMPT, SECOND, apart_by, episode, gradients, learner_of
from trainer.algorithms.advantages import Advantages, each, grpo, leave_one_out, to_go, with_turns
from trainer.algorithms.loss import Tokens, policy_loss
from trainer.algorithms.rows import ROWS, resolve
from trainer.algorithms.surrogates import by_token, gspo, ppo_clip
from trainer.data.batching import Micro, TrainRow
from trainer.data.collate import branched, packed, padded

#: The turns of three episodes of one task, of rewards 1, 0.5 and 0: what they leave of it is the outcome's.
REWARDS = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
TURNS: tuple[Mapping[int, float], ...] = ({0: 0.25, 1: 0.25}, {0: 0.5}, {0: -0.5, 1: 0.0, 2: 0.25})
USABLE = torch.ones(3, dtype=torch.bool)


def of_group(name: str, turns: tuple[Mapping[int, float], ...] = TURNS) -> Advantages:
    row = ROWS[name]
    [found] = with_turns(row.advantages, [(REWARDS, USABLE)], [turns], bool(row.scales))
    return found


def test_what_is_earned_from_a_turn_on_is_the_reward_less_what_turns_before_earned() -> None:
    assert to_go(REWARDS, TURNS, 0).tolist() == [1.0, 0.5, 0.0]
    assert to_go(REWARDS, TURNS, 1).tolist() == [0.75, 0.0, 0.5], "the second ended: its outcome is left"
    assert to_go(REWARDS, TURNS, 2).tolist() == [0.5, 0.0, 0.5]
    assert to_go(REWARDS, TURNS, 3).tolist() == [0.5, 0.0, 0.25], "nothing but the outcomes'"


def test_a_turn_is_compared_with_those_of_its_number_by_the_algorithm_s_own_rule() -> None:
    found = of_group("dr_grpo")
    assert found.values.tolist() == [0.5, 0.0, -0.5]
    assert found.of_turns[0].tolist() == [0.5, 0.0, -0.5]
    assert found.of_turns[1].tolist() == pytest.approx([0.75 - 1.25 / 3, -1.25 / 3, 0.5 - 1.25 / 3])
    assert found.of_turns[2].tolist() == pytest.approx([1 / 6, -1 / 3, 1 / 6])
    [alone] = with_turns(each(leave_one_out), [(REWARDS, USABLE)], [TURNS], False)
    assert alone.of_turns[1].tolist() == pytest.approx([0.75 - 0.25, 0.0 - 0.625, 0.5 - 0.375])
    [scaled] = with_turns(each(grpo), [(REWARDS, USABLE)], [TURNS], True)
    deviation = torch.tensor([0.75, 0.0, 0.5], dtype=torch.float64).std().item()
    assert scaled.of_turns[1].tolist() == pytest.approx([v / deviation for v in found.of_turns[1].tolist()])


@pytest.mark.parametrize("name", ROWS)
def test_a_first_turn_has_the_whole_reward_s_advantage_and_turns_that_earn_nothing_share_it(
    name: str,
) -> None:
    shared = of_group(name, ({}, {}, {}))
    assert not shared.of_turns
    assert torch.equal(of_group(name).values, shared.values)
    assert torch.equal(of_group(name).of_turns[0], shared.values)
    nothing = of_group(name, ({0: 0.0, 1: 0.0}, {0: 0.0}, {0: 0.0, 1: 0.0, 2: 0.0}))
    assert [torch.equal(nothing.of_turns[n], shared.values) for n in range(3)] == [True] * 3


@pytest.mark.parametrize("name", ROWS)
def test_without_rewarded_turns_advantages_are_what_the_algorithm_made_of_the_rewards(name: str) -> None:
    row = ROWS[name]
    calls: list[Any] = []

    def scope(groups: Any, scale: bool) -> list[Advantages]:
        calls.append(groups)
        return row.advantages(groups, scale)

    groups = [(REWARDS, USABLE)]
    [found] = with_turns(scope, groups, [({}, {}, {})], bool(row.scales))
    assert len(calls) == 1
    assert calls[0] is groups, "not even converted"
    assert torch.equal(found.values, row.advantages(groups, bool(row.scales))[0].values)


def test_equal_rewards_that_turns_earned_otherwise_say_something_and_equal_turns_do_not() -> None:
    equal = torch.ones(2, dtype=torch.float64)
    both = torch.ones(2, dtype=torch.bool)
    [found] = with_turns(each(grpo), [(equal, both)], [({0: 1.0, 1: 0.0}, {0: 0.0, 1: 1.0})], False)
    assert (found.informative, found.reason) == (True, "informative")
    assert found.values.tolist() == [0.0, 0.0]
    assert found.of_turns[1].tolist() == [-0.5, 0.5]
    [same] = with_turns(each(grpo), [(equal, both)], [({0: 1.0, 1: 0.0}, {0: 1.0, 1: 0.0})], False)
    assert not same.informative
    assert same.reason.startswith("zero variance")


def test_over_a_batch_turns_are_normalised_with_those_of_their_number_in_every_group() -> None:
    other = torch.tensor([2.0, 0.0], dtype=torch.float64)
    groups = [(REWARDS, USABLE), (other, torch.ones(2, dtype=torch.bool))]
    row = ROWS["reinforce++"]
    first, second = with_turns(row.advantages, groups, [TURNS, ({}, {})], True)
    earned = torch.tensor([0.75, 0.0, 0.5, 2.0, 0.0], dtype=torch.float64)
    expected = (earned[:3] - earned.mean()) / earned.std()
    assert first.of_turns[1].tolist() == pytest.approx(expected.tolist())
    assert not second.of_turns, "its turns are not rewarded: they share"


def test_an_episode_without_a_usable_reward_is_compared_with_nothing() -> None:
    usable = torch.tensor([True, False, True])
    [found] = with_turns(each(grpo), [(REWARDS, usable)], [(TURNS[0], {}, TURNS[2])], False)
    assert found.of_turns[1].tolist() == [0.125, 0.0, -0.125]


# ---------------------------------------------------------------- the loss


def tokens(turns: bool, name: str, advantage: float = 0.75) -> tuple[Tokens, torch.Tensor]:
    """Two samples of three tokens; the policy has moved a little. `turns`: each token's advantage is said by itself."""
    gap = 1e-5 if name == "gspo" else 0.3
    proximal = torch.tensor([-1.0, -2.0, -0.5, -1.5, -0.25, -3.0], dtype=torch.float64)
    moved = torch.tensor([1.0, -1.0, 0.5, 0.25, -0.5, 1.0], dtype=torch.float64)
    current = (proximal + gap * moved).requires_grad_()
    sample = torch.tensor([0, 0, 0, 1, 1, 1])
    advantages = torch.tensor([advantage, -advantage], dtype=torch.float64)
    own = advantages[sample] if turns else None
    return Tokens(current, proximal, proximal.clone(), sample, advantages, turn_advantages=own), current


@pytest.mark.parametrize("name", ROWS)
def test_turns_of_one_advantage_have_the_gradient_of_an_episode_that_shares_it(name: Any) -> None:
    recipe = resolve(AlgorithmSection(name=name), 8)
    found = []
    for turns in (False, True):
        given, current = tokens(turns, name)
        policy_loss(given, recipe).loss.backward()
        assert current.grad is not None
        found.append(current.grad)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("name", ROWS)
def test_no_row_s_gradient_depends_on_whether_a_row_beside_it_has_rewarded_turns(name: Any) -> None:
    recipe = resolve(AlgorithmSection(name=name), 8)
    found = []
    for beside in (False, True):
        given, current = tokens(beside, name)
        given = replace(given, behaviour=given.behaviour - torch.tensor([0.0, 0.3, -0.2, 0.1, 0.0, 0.4]))
        if beside:
            own = given.turn_advantages
            assert own is not None
            own[3:] = torch.tensor([1.0, -2.0, 0.5])  # the second row's turns differ
        policy_loss(given, recipe).loss.backward()
        assert current.grad is not None
        found.append(current.grad)
    assert torch.equal(found[0][:3], found[1][:3])
    assert not torch.equal(found[0][3:], found[1][3:])


def test_the_gspo_of_tokens_has_the_sequence_s_ratio_and_clips_each_turn_by_its_own_advantage() -> None:
    proximal = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    current = torch.tensor([-0.8, -1.0], dtype=torch.float64, requires_grad=True)
    sample, own = torch.tensor([0, 0]), torch.tensor([1.0, -2.0], dtype=torch.float64)
    loss, clipped = by_token(gspo, 1)(current, proximal, own, sample, 0.05, 0.05)
    ratio = torch.exp(torch.tensor(0.1, dtype=torch.float64))
    assert loss.tolist() == pytest.approx([-1.05, 2.0 * float(ratio)])
    assert clipped.tolist() == [True, False]
    loss.sum().backward()
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([0.0, 2.0 * float(ratio)])


def test_a_surrogate_of_tokens_takes_each_token_s_advantage() -> None:
    current = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    own = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    loss, _ = by_token(ppo_clip, 2)(current, current, own, torch.tensor([0, 0, 1]), 0.2, 0.2)
    assert loss.tolist() == [-1.0, 2.0, 0.0]


# ---------------------------------------------------------------- rows


def rewarded(number: int) -> TrainRow:
    [row] = episode(number, apart=False)
    return msgspec.structs.replace(row, turns=((FIRST, 1.5), (SECOND, -0.5)))


@pytest.mark.parametrize("layout", [padded, packed, branched])
def test_a_row_says_each_token_s_advantage_and_one_without_turns_its_own(layout: Any) -> None:
    [plain] = episode(1, apart=False)
    width = PROMPT + FIRST + OBSERVED + SECOND if layout is padded else 0
    batch = layout(Micro((rewarded(0), plain), width), torch.float64)
    expected = [1.5] * FIRST + [-0.5] * SECOND + [plain.advantage] * (FIRST + SECOND)
    assert batch.turn_advantages.tolist() == pytest.approx(expected)
    assert layout(Micro((plain,), width), torch.float64).turn_advantages is None


def test_turns_that_are_not_the_row_s_tokens_are_refused() -> None:
    row = msgspec.structs.replace(rewarded(0), turns=((FIRST, 1.0), (SECOND + 1, 1.0)))
    with pytest.raises(ValueError, match="its turns are not its 10 trained tokens"):
        packed(Micro((row,), 0), torch.float64)


def test_the_signal_of_a_row_is_that_of_its_tokens() -> None:
    assert rewarded(0).signal == pytest.approx((1.5 * FIRST + 0.5 * SECOND) / (FIRST + SECOND))
    [plain] = episode(0, apart=False)
    assert plain.signal == abs(plain.advantage)


@pytest.mark.parametrize("deterministic", [True, False])
def test_two_turns_of_a_row_have_the_gradients_of_the_two_apart_each_with_its_advantage(
    model_folder: Any, mesh: DeviceMesh, deterministic: bool
) -> None:
    """Apart, the first turn is context of the second: a turn that trained the other's tokens too would show."""
    learner = learner_of(model_folder, mesh, deterministic=deterministic, name="grpo")
    first, second = episode(0, apart=True)
    replace = msgspec.structs.replace
    apart = (replace(first, advantage=1.5), replace(second, advantage=-0.5))
    shared = episode(0, apart=False)
    found = []
    for some in ((rewarded(0),), apart, shared):
        learner.train(Micro(some, max(row.tokens for row in some) if deterministic else 0))
        found.append(gradients(learner))
        learner.discard_gradients()
    assert apart_by(found[0], found[1]) < (1e-9 if deterministic else 1e-5)
    assert apart_by(found[0], found[2]) > 0.1
